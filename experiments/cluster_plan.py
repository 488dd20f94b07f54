"""What tables at many servers would cost, and where that saturates: a plan on paper from measured costs.

    python experiments/cluster_plan.py                              1 TB at 64 servers, with the costs below
    python experiments/cluster_plan.py --servers 16 --terabytes .2  another plan
    python experiments/cluster_plan.py --measure                    with costs that are measured here first; two minutes
    python experiments/cluster_plan.py --read-row-us 0.4 ...        with costs of your own

The costs are **measured**, by `--measure` on one machine: servers in processes of their own, which Ray starts, share
its cores and its memory with the driver, and no network lies between. Whoever plans for machines of their own measures
there. The defaults of the flags were measured on two cores beside other work, so they are rather too high. Everything
else is **modelled**, and nothing of that size was run:

- A read or a put takes base + servers x message + rows x row, fitted to measured times by least squares with no term
  below 0; to that comes the time of its bytes on the driver's link.
- `sync` is compute + read + put. `oac` is the longer one of compute and of read + put: batches overlap, but what the
  driver copies counts as if one core did it all.
- Servers save and bring back at once, each at its own rate, together at most at that of the shared file system.
  Training counts as if it stood still meanwhile, which it does not (`copy="shards"`).
- Overheads are equations (1), (2), (3) and (6) of jaxrec/cpr/schedule.py; the mean time between failures is that of one
  server over the number of servers.
"""

import dataclasses
from typing import Any, NamedTuple

from main.cli import Flags, Run, command_line, listing, refuse, rule_of_ray
from studies.cluster_costs import Costs, Size, measure

from jaxrec.cpr import schedule

MOST_ROWS = 2**31  # of all tables of one width: row numbers are int32
ID_BYTES, COUNT_BYTES = 4, 4  # of a row number in a message; of a row's access count in the driver
SIZES = {
    "smoke": Size(10_000, (500, 2000), (1, 2), 3),
    "default": Size(200_000, (500, 4000, 16_000), (1, 2, 4), 15),
    "paper": Size(200_000, (500, 4000, 16_000), (1, 2, 4), 40),
}


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the experiment."""

    measure: bool = False
    """Measure the costs here first; else they are those of the flags."""
    terabytes: float = 1.0
    """Of rows and slots."""
    servers: int = 64
    width: int = 128
    """Of a row, in floats; one more is the slot of row-wise Adagrad."""
    rows_per_step: int = 50_000
    """Unique rows of a batch."""
    compute_ms: float = 100.0
    """Of a step whose rows are there."""
    link_gbit_per_s: float = 25.0
    """The driver's, each way."""
    files_mb_per_s: float = 2000.0
    """Of the shared file system, all servers together."""
    server_mtbf_hours: float = 5000.0
    """Of one server."""
    total_hours: float = 56.0
    target_pls: float = 0.1
    read_base_ms: float = 0.0
    read_message_ms: float = 1.43
    """For each server."""
    read_row_us: float = 1.59
    put_base_ms: float = 0.56
    put_message_ms: float = 1.07
    put_row_us: float = 1.44
    server_row_us: float = 0.25
    """Of a server, to gather a row and to scatter it."""
    save_mb_per_s: float = 103.0
    """Of one server."""
    restore_mb_per_s: float = 321.0
    initial_rows_per_s: float = 331_000.0
    start_s: float = 4.4
    """Of a process, without its rows."""


class Job(NamedTuple):
    """What is planned; the flags of the same names say what they are."""

    terabytes: float
    servers: int
    width: int
    rows_per_step: int
    compute_ms: float
    link_gbit_per_s: float
    files_mb_per_s: float
    server_mtbf_hours: float
    total_hours: float
    target_pls: float


def of_tables(job: Job) -> dict[str, float]:
    """How many rows there are, and where they lie.

    >>> job = Job(1.0, 64, 124, 50_000, 100.0, 25.0, 2000.0, 5000.0, 56.0, 0.1)
    >>> of_tables(job)["rows_millions_modelled"], of_tables(job)["server_gb_modelled"]
    (2000.0, 15.625)
    """
    rows = job.terabytes * 1e12 / row_bytes(job)
    return {
        "rows_millions_modelled": rows / 1e6,
        "server_gb_modelled": job.terabytes * 1000 / job.servers,
        "rows_of_the_most_of_a_width_percent_modelled": 100 * rows / MOST_ROWS,
        "driver_access_counts_gb_modelled": rows * COUNT_BYTES / 1e9,
    }


def row_bytes(job: Job) -> int:
    """A row with the slot of row-wise Adagrad."""
    return 4 * (job.width + 1)


def of_step(job: Job, costs: Costs) -> dict[str, float]:
    """How long a step takes, and who is busy meanwhile.

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
    """Where a step becomes longer than its computation.

    Returns:
      Rows per second that the driver can read and put, and its link; rows of a step at which OAC hides the link no
      more; servers at which their messages cost as much as the rows, and at which the messages alone take as long as
      the computation, both left out where messages cost nothing.
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
    """How long images take, and what failures cost by the equations of CPR.

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
    """The whole plan, flat.

    Args:
      job: what is planned.
      costs: measured, or assumed by whoever gives them.
    """
    return of_tables(job) | of_step(job, costs) | of_limits(job, costs) | of_failures(job, costs)


def check(config: Config) -> None:
    """Refuses flags of which no plan can be made.

    Raises:
      ValueError: with the first rule that is broken.
    """
    zero_too = {name for name in Costs._fields if name.endswith(("_ms", "start_s"))} | {"compute_ms"}
    for name in dict.fromkeys((*Job._fields, *Costs._fields)):
        value, flag = getattr(config, name), name.replace("_", "-")
        least = "0 or more" if name in zero_too else "above 0"
        refuse({f"--{flag} {value:g} must be {least} and finite.": not (value >= 0 if name in zero_too else value > 0)
                or value == float("inf")})  # fmt: skip
    refuse({
        f"--target-pls {config.target_pls:g} must be at most 1.": config.target_pls > 1,
    } | (rule_of_ray() if config.measure else {}))  # fmt: skip


def taken(kind: type, config: Config) -> Any:
    """A Job or the Costs of the flags."""
    return kind(*(getattr(config, name) for name in kind._fields))  # type: ignore[attr-defined]


def main(config: Config) -> dict:
    """Measures if it is told to, and plans; returns what results.json holds."""
    check(config)
    with Run("cluster_plan", config, config.workdir) as run:
        costs, word = taken(Costs, config), "given"
        if config.measure:
            (costs, times), word = measure(config.width, SIZES[config.preset], config.seed), "measured"
            for row in times:
                run.log(row)
        paid: dict[str, Any] = {f"{name}_{word}": value for name, value in costs._asdict().items()}
        found = planned(taken(Job, config), costs)
        results = paid | found
        groups = {f"Costs, {word}": list(paid), "The plan, modelled": list(found)}
        run.close(results, listing(results, groups))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
