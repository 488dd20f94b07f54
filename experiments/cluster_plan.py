"""Plan tables at many servers on paper: step time, failures and limits, from measured costs.

    python experiments/cluster_plan.py                              1 TB at 64 servers, with the costs below
    python experiments/cluster_plan.py --servers 16 --terabytes .2  another plan
    python experiments/cluster_plan.py --measure                    measures the costs here first; two minutes
    python experiments/cluster_plan.py --read-row-us 0.4 ...        with your own costs

The costs are **measured**, by `--measure` on one machine: the servers, processes that Ray starts, share its cores and
memory with the driver, and there is no network between them. To plan for your machines, measure there. The defaults of
the flags were measured on two cores under other load, so they are rather too high. Everything else is **modelled**;
nothing of that size was run:

- A read or a put takes base + servers x message + rows x row, fitted to measured times by least squares with no term
  below 0, plus the time of its bytes on the driver's link.
- `sync` is compute + read + put. `oac` is the larger of compute and read + put: batches overlap, but the driver copies
  rows as if with a single core.
- Servers save and restore at the same time, each at its own rate, all together at most at the rate of the shared file
  system. A save blocks training in this model, which it does not in reality (`copy="shards"`).
- Overheads are equations (1), (2), (3) and (6) of jaxrec/cpr/schedule.py; the MTBF is that of one server divided by the
  number of servers.
- Access counts of MFU lie at the servers, 4 bytes for each row; only picked rows and their numbers travel.
"""

import dataclasses
from typing import Any

from main.cli import Flags, Run, command_line, listing, refuse, rule_of_ray
from studies.cluster_costs import Costs, Size, measure

from jaxrec.cpr import schedule

MOST_ROWS = 2**31  # rows in all tables of one width: row numbers are int32
ID_BYTES, COUNT_BYTES = 4, 4  # a row number in a message; the access count of a row at its server
SIZES = {
    "smoke": Size(10_000, (500, 2000), (1, 2), 3),
    "default": Size(200_000, (500, 4000, 16_000), (1, 2, 4), 15),
    "paper": Size(200_000, (500, 4000, 16_000), (1, 2, 4), 40),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """The planned job."""

    terabytes: float = 1.0
    """Size of all rows with their slots, in TB."""
    servers: int = 64
    width: int = 128
    """Floats in a row, besides the one for the slot of row-wise Adagrad."""
    rows_per_step: int = 50_000
    """Unique rows in a batch."""
    compute_ms: float = 100.0
    """Computation of a step, without reading and writing rows."""
    link_gbit_per_s: float = 25.0
    """Bandwidth of the driver's network link in each direction."""
    files_mb_per_s: float = 2000.0
    """Rate of the shared file system for all servers together."""
    server_mtbf_hours: float = 5000.0
    """Mean time between failures of one server."""
    total_hours: float = 56.0
    """Length of the job without failures."""
    target_pls: float = 0.1
    """Portion of lost samples for which partial recovery chooses its save interval, equation (6)."""


@dataclasses.dataclass(frozen=True)
class Config(Costs, Job, Flags):
    """Flags of the experiment."""

    measure: bool = False
    """Measure the costs here first, instead of taking them from the flags."""


def of_tables(job: Job) -> dict[str, float]:
    """Return the number of rows and the memory at each server.

    >>> job = Job(1.0, 64, 124, 50_000, 100.0, 25.0, 2000.0, 5000.0, 56.0, 0.1)
    >>> of_tables(job)["rows_millions_modelled"], of_tables(job)["server_gb_modelled"]
    (2000.0, 15.625)
    >>> of_tables(job)["server_access_counts_gb_modelled"]
    0.125
    """
    rows = job.terabytes * 1e12 / row_bytes(job)
    return {
        "rows_millions_modelled": rows / 1e6,
        "server_gb_modelled": job.terabytes * 1000 / job.servers,
        "rows_of_the_most_of_a_width_percent_modelled": 100 * rows / MOST_ROWS,
        "server_access_counts_gb_modelled": rows / job.servers * COUNT_BYTES / 1e9,
    }


def row_bytes(job: Job) -> int:
    """Return the bytes of a row with the slot of row-wise Adagrad."""
    return 4 * (job.width + 1)


def of_step(job: Job, costs: Costs) -> dict[str, float]:
    """Return the times of a step and of its parts, and how busy a server is.

    >>> job = Job(1.0, 10, 124, 1000, 12.0, 4.0, 2000.0, 5000.0, 56.0, 0.1)  # 500 bytes a row: 1 us on the link
    >>> costs = Costs(0.0, 0.1, 2.0, 1.0, 0.2, 3.0, 0.5, 500.0, 500.0, 1e6, 3.0)
    >>> step = of_step(job, costs)
    >>> [round(step[f"{part}_ms_modelled"], 6) for part in ("read", "put", "sync", "oac")]
    [4.008, 7.008, 23.016, 12.0]
    >>> step["server_busy_percent_modelled"]  # 100 rows of 0.5 us in 12 ms
    0.4166666666666667
    """
    wire_us = (row_bytes(job) + ID_BYTES) * 8 / (job.link_gbit_per_s * 1e3)
    rows = job.rows_per_step
    read = costs.read_base_ms + job.servers * costs.read_message_ms + rows * (costs.read_row_us + wire_us) / 1e3
    put = costs.put_base_ms + job.servers * costs.put_message_ms + rows * (costs.put_row_us + wire_us) / 1e3
    oac = max(job.compute_ms, read + put)
    return {
        "read_ms_modelled": read,
        "put_ms_modelled": put,
        "link_ms_modelled": rows * wire_us / 1e3,
        "sync_ms_modelled": job.compute_ms + read + put,
        "oac_ms_modelled": oac,
        "server_busy_percent_modelled": 100 * rows / job.servers * costs.server_row_us / 1e3 / oac,
    }


def of_limits(job: Job, costs: Costs) -> dict[str, float]:
    """Return the limits beyond which a step takes longer than its computation.

    Returns:
      Rows per second that the driver can read and put, and that its link can carry; rows per step up to which OAC hides
      reads and puts. Where messages have a cost, also the numbers of servers at which messages cost as much as the
      rows, and at which messages alone take as long as the computation.
    """
    row_us, message_ms = costs.read_row_us + costs.put_row_us, costs.read_message_ms + costs.put_message_ms
    base, wire_us = costs.read_base_ms + costs.put_base_ms, 2 * (row_bytes(job) + ID_BYTES) * 8 / 1e3
    left_ms = max(0.0, job.compute_ms - base - job.servers * message_ms)
    found = {
        "driver_rows_per_s_modelled": 1e6 / row_us,
        "link_rows_per_s_modelled": job.link_gbit_per_s * 1e9 / 8 / (row_bytes(job) + ID_BYTES),
        "rows_per_step_that_oac_hides_modelled": 1e3 * left_ms / (row_us + wire_us / job.link_gbit_per_s),
    }
    if message_ms:
        found["servers_whose_messages_cost_as_the_rows_modelled"] = job.rows_per_step * row_us / 1e3 / message_ms
        found["servers_whose_messages_take_the_computation_modelled"] = max(0.0, job.compute_ms - base) / message_ms
    return found


def of_failures(job: Job, costs: Costs) -> dict[str, float]:
    """Return the times of saves and restores, and the overheads of failures by the equations of CPR.

    >>> job = Job(1.0, 64, 124, 50_000, 100.0, 25.0, 2000.0, 6400.0, 56.0, 0.1)
    >>> costs = Costs(0.0, 0.1, 2.0, 1.0, 0.2, 3.0, 0.5, 125.0, 250.0, 1e6, 3.0)
    >>> found = of_failures(job, costs)
    >>> found["save_s_modelled"], found["restore_one_s_modelled"], found["restore_all_s_modelled"]
    (500.0, 62.5, 500.0)
    >>> found["mtbf_hours_modelled"]
    100.0
    >>> found["partial_overhead_percent_modelled"] < found["full_overhead_percent_modelled"]
    True
    """
    total_mb, server_mb = job.terabytes * 1e6, job.terabytes * 1e6 / job.servers
    save = max(server_mb / costs.save_mb_per_s, total_mb / job.files_mb_per_s)
    one = server_mb / min(costs.restore_mb_per_s, job.files_mb_per_s)
    everything = max(server_mb / costs.restore_mb_per_s, total_mb / job.files_mb_per_s)
    begin = costs.start_s + job.terabytes * 1e12 / row_bytes(job) / job.servers / costs.initial_rows_per_s
    paid = schedule.Costs(
        save / 3600, everything / 3600, begin / 3600, job.server_mtbf_hours / job.servers, job.total_hours, job.servers,
        partial_load_hours=one / 3600,
    )  # fmt: skip
    full = min(schedule.full_interval(paid), job.total_hours)
    partial = min(schedule.partial_interval(paid, job.target_pls), job.total_hours)
    return {
        "save_s_modelled": save,
        "restore_one_s_modelled": one,
        "restore_all_s_modelled": everything,
        "begin_s_modelled": begin,
        "mtbf_hours_modelled": paid.mtbf_hours,
        "full_save_every_hours_modelled": full,
        "full_overhead_percent_modelled": 100 * schedule.full_overhead(paid, full).total,
        "partial_save_every_hours_modelled": partial,
        "partial_overhead_percent_modelled": 100 * schedule.partial_overhead(paid, partial).total,
    }


def planned(job: Job, costs: Costs) -> dict[str, float]:
    """Return all figures of the plan in one dictionary."""
    return of_tables(job) | of_step(job, costs) | of_limits(job, costs) | of_failures(job, costs)


def names_of(kind: type) -> list[str]:
    """Return the names of the fields of a dataclass."""
    return [field.name for field in dataclasses.fields(kind)]


def check(config: Config) -> None:
    """Refuse flags that no plan can be made from."""
    zero_too = {name for name in names_of(Costs) if name.endswith(("_ms", "start_s"))} | {"compute_ms"}
    for name in (*names_of(Job), *names_of(Costs)):
        value, flag = getattr(config, name), name.replace("_", "-")
        least = "0 or more" if name in zero_too else "above 0"
        refuse({f"--{flag} {value:g} must be {least} and finite.": not (value >= 0 if name in zero_too else value > 0)
                or value == float("inf")})  # fmt: skip
    refuse({
        f"--target-pls {config.target_pls:g} must be at most 1.": config.target_pls > 1,
    } | (rule_of_ray() if config.measure else {}))  # fmt: skip


def main(config: Config) -> dict:
    """Measure the costs if --measure is given, and plan; return the contents of results.json."""
    check(config)
    with Run("cluster_plan", config, config.workdir) as run:
        costs: Costs = config
        origin = "given"
        if config.measure:
            (costs, times), origin = measure(config.width, SIZES[config.preset], config.seed), "measured"
            for row in times:
                run.log(row)
        paid: dict[str, Any] = {f"{name}_{origin}": getattr(costs, name) for name in names_of(Costs)}
        found = planned(config, costs)
        results = paid | found
        groups = {f"Costs, {origin}": list(paid), "The plan, modelled": list(found)}
        run.close(results, listing(results, groups))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
