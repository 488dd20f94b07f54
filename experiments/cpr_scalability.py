"""Recovery as a job grows, on paper: overheads over nodes and on real failures, or a plan for tables at many servers.

    python experiments/cpr_scalability.py --traces DIRECTORY  failures of real clusters; under a minute
    python experiments/cpr_scalability.py                     failures drawn from the laws fitted to them
    python experiments/cpr_scalability.py --plan              1 TB at 64 servers, with the costs of the flags
    python experiments/cpr_scalability.py --plan --measure    measures the costs here first; two minutes

Claim as we recall the paper's scalability figure (arXiv 2011.02999): the overhead of full recovery rises with the
number of nodes, that of CPR hardly does. No overhead is measured: `modelled` is by the equations of
jaxrec/cpr/schedule.py, `emulated` is replayed event by event, both with costs solved from the abstract (`SETTING_A`).
The costs of a plan are measured on one machine, where servers and driver share the cores and no network lies between;
all else is modelled, and nothing of that size was run (docs/cluster.md).
Result: results/two_cores_cpu/cpr_scalability.json.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from main.cli import Flags, Run, command_line, grid, listing, plot, refuse, rule_of_ray, unread
from studies.cluster_costs import Costs, Size, measure
from studies.failure_replay import replay_in_useful_time, replay_in_wall_time
from studies.failure_traces import load_infinitehbd, load_lanl
from tqdm import tqdm

from jaxrec.cpr import schedule
from jaxrec.cpr.failure import Failures, draw_failures, interruptions

SETTINGS = {"a": schedule.SETTING_A, "b": schedule.SETTING_B}
MODES: tuple[schedule.Mode, ...] = ("full", "partial")
COUNTS = (8, 16, 32, 64, 128, 256)
# Gamma laws fitted to the gaps of two real traces: mean gap, shape, nodes, hours.
FITTED = {"infinitehbd_like": (15.68, 0.490, 400, 8376.0), "lanl_20_like": (13.59, 0.527, 512, 32614.0)}
MOST_ROWS = 2**31  # rows in all tables of one width: row numbers are int32
ID_BYTES, COUNT_BYTES = 4, 4  # a row number in a message; the access count of a row at its server
MEASUREMENTS = {
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

    traces: Path | None = None
    """Directory with infinitehbd_fault_trace.json.gz and lanl_1996_2005.csv.xz; without it failures are drawn."""
    setting: Literal["a", "b"] = "a"
    """Cost setting of parts 2 and 3."""
    plan: bool = False
    """Plan tables at many servers, from the costs of the flags."""
    measure: bool = False
    """Measure the costs of the plan here first."""


def intervals(costs: schedule.Costs, target_pls: float) -> dict[schedule.Mode, float]:
    """Save interval of each mode of recovery, in hours, at most the length of the job."""
    full, partial = schedule.full_interval(costs), schedule.partial_interval(costs, target_pls)
    return {"full": min(full, costs.total_hours), "partial": min(partial, costs.total_hours)}


def modelled(costs: schedule.Costs, mode: schedule.Mode, every: float) -> schedule.Overhead:
    """Overhead by eq. (1) or (2)."""
    return schedule.full_overhead(costs, every) if mode == "full" else schedule.partial_overhead(costs, every)


def of_setting(name: str, costs: schedule.Costs, config: Config, horizons: int) -> dict[str, float]:
    """Part 1 for one setting: overheads and PLS by the equations and emulated, in percent of the useful time."""
    found: dict[str, float] = {}
    long = costs._replace(total_hours=100 * costs.total_hours)
    drawn = [
        draw_failures(long.mtbf_hours, long.total_hours, long.nodes, config.seed + i).hours for i in range(horizons)
    ]
    found[f"setting_{name}_failures"] = sum(map(len, drawn))
    for mode, every in intervals(costs, config.target_pls).items():
        key, law = f"setting_{name}_{mode}", 100 * modelled(costs, mode, every).total
        replays = [replay_in_useful_time(long, mode, every, hours) for hours in drawn]
        percent = 100 * np.array([replay.overhead.total for replay in replays])
        found |= {f"{key}_percent_modelled": law, f"{key}_percent_emulated": float(percent.mean())}
        found[f"{key}_standard_error_points"] = float(percent.std(ddof=1) / np.sqrt(len(percent)))
        found[f"{key}_emulated_minus_modelled_points"] = float(percent.mean() - law)
        found[f"{key}_save_every_hours"] = every
    found[f"setting_{name}_pls_emulated"] = float(np.mean([replay.pls for replay in replays]))
    found[f"setting_{name}_pls_modelled"] = schedule.expected_pls(costs, every)
    return found | {f"setting_{name}_one_job_pls_modelled": schedule.expected_pls_of_job(costs, every)}


def at_nodes(costs: schedule.Costs, target_pls: float, nodes: int) -> dict[str, float]:
    """Part 2 for one number of nodes: overheads in percent."""
    here = costs._replace(nodes=nodes, mtbf_hours=costs.mtbf_hours * costs.nodes / nodes)
    shard = here._replace(partial_load_hours=here.load_hours / nodes)
    every = intervals(here, target_pls)
    lines: dict[str, tuple[schedule.Costs, schedule.Mode]]
    lines = {"full": (here, "full"), "partial": (here, "partial"), "partial_shard_load": (shard, "partial")}
    return {
        f"{line}_percent_modelled": 100 * modelled(of, mode, every[mode]).total for line, (of, mode) in lines.items()
    }


def sources(config: Config) -> dict[str, Failures]:
    """Real traces, or failures drawn from the distributions fitted to two of them."""
    if config.traces is None:
        return {
            name: draw_failures(mtbf, hours, nodes, config.seed, shape)
            for name, (mtbf, shape, nodes, hours) in FITTED.items()
        }
    found = {"infinitehbd": load_infinitehbd(config.traces / "infinitehbd_fault_trace.json.gz")}
    path = config.traces / "lanl_1996_2005.csv.xz"
    return found | {f"lanl_{system}": load_lanl(path, system) for system in (18, 19, 20)}


def replayed(failures: Failures, costs: schedule.Costs, target_pls: float) -> dict[str, float]:
    """Part 3 for one source: overheads of back-to-back jobs on all its nodes."""
    known = failures.node >= 0
    hours, failed = interruptions(failures._replace(hours=failures.hours[known], node=failures.node[known]))
    here = costs._replace(nodes=failures.nodes, mtbf_hours=failures.span_hours / max(1, len(hours)))
    found = {"nodes": float(failures.nodes), "mtbf_hours": here.mtbf_hours}
    for mode, every in intervals(here, target_pls).items():
        replay = replay_in_wall_time(here, mode, every, hours, failures.span_hours, failed)
        found[f"{mode}_percent_emulated"] = 100 * replay.overhead.total
        found[f"{mode}_percent_modelled"] = 100 * modelled(here, mode, every).total
        found[f"{mode}_pls_emulated"] = replay.pls
    return found


def finding(results: Mapping[str, Any]) -> str:
    """Title of the plot."""
    at = lambda line: results[f"linear_mtbf_64_nodes_{line}_percent_modelled"]
    return (
        f"Modelled, MTBF = c / nodes: with 64 nodes full recovery costs {at('full'):.1f} % of the useful time, "
        f"CPR {at('partial'):.1f} %, and {at('partial_shard_load'):.2f} % where it loads the lost shard alone"
    )


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """Plot the equations over the number of nodes."""
    of = lambda line: [results[f"linear_mtbf_{n}_nodes_{line}_percent_modelled"] for n in COUNTS]
    lines = {line.replace("_", " "): (COUNTS, of(line)) for line in ("full", "partial", "partial_shard_load")}
    plot(path, {"overhead, %": lines}, "nodes", finding(results), log_x=True)


def table(results: dict[str, Any], traces: Iterable[str]) -> str:
    """Format equations against emulation, growth with the number of nodes, and the traces."""
    recovery = {f"{name.upper()}: {mode}": f"setting_{name}_{mode}" for name in SETTINGS for mode in MODES}
    first = {"modelled, %": "{}_percent_modelled", "emulated, %": "{}_percent_emulated"}
    first |= {"standard error": "{}_standard_error_points", "a save every, h": "{}_save_every_hours"}
    growth = {f"{n} nodes": f"linear_mtbf_{n}_nodes" for n in COUNTS}
    parts = ("full", "partial", "partial_shard_load")
    second = {f"{part.replace('_', ' ')}, %": f"{{}}_{part}_percent_modelled" for part in parts}
    third = {"failures": "{}_failures", "MTBF, h": "{}_all_nodes_mtbf_hours", "nodes": "{}_all_nodes_nodes"}
    third |= {f"{mode} recovery, %": f"{{}}_all_nodes_{mode}_percent_emulated" for mode in MODES}
    tables = [grid(results, "setting and recovery", recovery, first), grid(results, "modelled", growth, second)]
    return "\n\n".join([*tables, grid(results, f"failures, {results['failures_are']}", list(traces), third)])


def of_nodes_and_traces(config: Config) -> dict:
    """Run all three parts; return the contents of results.json."""
    run = Run("cpr_scalability", config, config.workdir)
    horizons = {"smoke": 100, "default": 1000, "paper": 10000}[config.preset]
    traces, costs = sources(config), SETTINGS[config.setting]
    results: dict[str, Any] = {
        "overhead_is": "modelled (equations) or emulated (events), never measured",
        "failures_are": "drawn" if config.traces is None else "of real traces",
    }
    for name, setting in SETTINGS.items():
        results |= of_setting(name, setting, config, horizons)
    for n in COUNTS:
        found = at_nodes(costs, config.target_pls, n)
        results |= {f"linear_mtbf_{n}_nodes_{key}": value for key, value in found.items()}
    for name, failures in tqdm(traces.items(), unit="trace", disable=None):
        found = replayed(failures, costs, config.target_pls)
        results[f"{name}_failures"] = len(failures.hours)
        results |= {f"{name}_all_nodes_{key}": value for key, value in found.items()}
    draw(run.directory / "scaling.png", results)
    run.close(results, table(results, traces))
    return results


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

    A read or a put takes base + servers x message + rows x row, and the time of its bytes on the driver's link. With
    OAC batches overlap, but the driver copies rows as if with a single core.

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

    Servers save and restore at the same time, each at its own rate, all together at most at that of the shared file
    system. A save blocks training in this model, which it does not in reality (`copy="shards"`).

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
    """Refuse flags that no plan can be made from, or that nothing reads."""
    zero_too = {name for name in names_of(Costs) if name.endswith(("_ms", "start_s"))} | {"compute_ms"}
    for name in (*names_of(Job), *names_of(Costs)):
        value, flag = getattr(config, name), name.replace("_", "-")
        least = "0 or more" if name in zero_too else "above 0"
        refuse({f"--{flag} {value:g} must be {least} and finite.": not (value >= 0 if name in zero_too else value > 0)
                or value == float("inf")})  # fmt: skip
    read = [name for name in (*names_of(Job), *names_of(Costs), "measure") if name != "target_pls"]
    refuse(unread(config, {
        "--plan": (config.plan, read), "failures, without --plan": (not config.plan, ("traces", "setting")),
    }) | {
        f"--target-pls {config.target_pls:g} must be at most 1.": config.target_pls > 1,
    } | (rule_of_ray() if config.measure else {}))  # fmt: skip


def of_plan(config: Config) -> dict:
    """Measure the costs if --measure is given, and plan; return the contents of results.json."""
    with Run("cluster_plan", config, config.workdir) as run:
        costs: Costs = config
        origin = "given"
        if config.measure:
            (costs, times), origin = measure(config.width, MEASUREMENTS[config.preset], config.seed), "measured"
            for row in times:
                run.log(row)
        paid: dict[str, Any] = {f"{name}_{origin}": getattr(costs, name) for name in names_of(Costs)}
        found = planned(config, costs)
        results = paid | found
        groups = {f"Costs, {origin}": list(paid), "The plan, modelled": list(found)}
        run.close(results, listing(results, groups))
    return results


def main(config: Config) -> dict:
    """Return the contents of results.json."""
    check(config)
    return of_plan(config) if config.plan else of_nodes_and_traces(config)


if __name__ == "__main__":
    command_line(main, Config, __doc__)
