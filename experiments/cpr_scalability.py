"""Full against partial recovery as a job grows, by the equations and replayed on failures of real clusters.

    python experiments/cpr_scalability.py --traces DIRECTORY  real traces; under a minute
    python experiments/cpr_scalability.py                     failures drawn from the fitted laws

The claim as we recall the paper's scalability figure (arXiv 2011.02999): the overhead of full recovery rises with the
number of nodes, that of CPR hardly does.

No overhead here is measured. `modelled` is by the equations of jaxrec/cpr/schedule.py, `emulated` is replayed event by
event with the costs of a setting, solved from the abstract's figures (see SETTING_A). It has three parts:

1. The equations against the event-by-event emulation: horizons of 100 back-to-back jobs, and single jobs of 56 h. They
agree on the clock of useful time; `wall` lets failures also hit saves, loads and recomputation.
2. Overhead over nodes n with T_fail = c / n and T_fail = 1 / (1 - (1 - p)^n), both 28 h at n = 8, N_emb = n. Costs do
not depend on n; `shard_load` divides the load time of partial recovery by n, as one shard of n is loaded.
3. Back-to-back jobs on n random nodes of a trace, in wall time, saving at the intervals that the MTBF of these nodes
gives. `modelled` is by eqs. (1) and (2). Intervals are at most the 56 h of a job; a spare node replaces a failed one,
so repairs do not count.

Seen with real traces, full against partial recovery, %: settings A and B modelled 8.50 / 0.53 and 8.20 / 0.68, emulated
over 199,563 failures 8.49 / 0.53 and 8.20 / 0.68, in wall time 8.99 / 0.53 and 8.65 / 0.68. Setting A, 64 nodes, T_fail
= c / n: 25.7 / 2.78 (0.25 with `shard_load`). Replayed on all nodes: InfiniteHBD (400) 11.6 / 0.71, LANL systems 18, 19
(1024), 20 (512) 18.7 / 1.37, 18.3 / 1.32, 13.0 / 0.83. Gamma laws fitted to the gaps by an earlier version had shapes
of 0.49, 0.75, 0.86, 0.53 and missed the survival curve by 1.1, 1.7, 1.2, 4.4 % (root mean square), exponential laws by
10.0, 5.3, 2.7, 13.8 %.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from main.cli import Flags, Run, command_line, grid
from studies.failure_replay import overhead_in_wall_time, replay_in_useful_time, replay_in_wall_time
from studies.failure_traces import load_infinitehbd, load_lanl
from tqdm import tqdm

from jaxrec.cpr import schedule
from jaxrec.cpr.failure import Failures, draw_failures, interruptions

SETTINGS = {"a": schedule.SETTING_A, "b": schedule.SETTING_B}
MODES: tuple[schedule.Mode, ...] = ("full", "partial")
COUNTS = (8, 16, 32, 64, 128, 256)
# Gamma laws fitted to the gaps of two real traces: mean gap, shape, nodes, hours.
FITTED = {"infinitehbd_like": (15.68, 0.490, 400, 8376.0), "lanl_20_like": (13.59, 0.527, 512, 32614.0)}


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the experiment."""

    traces: Path | None = None
    """Directory with infinitehbd_fault_trace.json.gz and lanl_1996_2005.csv.xz; without it failures are drawn."""
    setting: Literal["a", "b"] = "a"
    """Cost setting of parts 2 and 3."""
    target_pls: float = 0.1


def intervals(costs: schedule.Costs, target_pls: float) -> dict[schedule.Mode, float]:
    """Save interval of each mode of recovery, in hours, at most the length of the job."""
    full, partial = schedule.full_interval(costs), schedule.partial_interval(costs, target_pls)
    return {"full": min(full, costs.total_hours), "partial": min(partial, costs.total_hours)}


def modelled(costs: schedule.Costs, mode: schedule.Mode, every: float) -> schedule.Overhead:
    """Overhead by eq. (1) or (2)."""
    return schedule.full_overhead(costs, every) if mode == "full" else schedule.partial_overhead(costs, every)


def equations(name: str, costs: schedule.Costs, target_pls: float) -> dict[str, float]:
    """Modelled overheads of one setting, with their parts."""
    found: dict[str, float] = {}
    every = intervals(costs, target_pls)
    for mode in MODES:
        overhead = modelled(costs, mode, every[mode])
        parts = {"": overhead.total, "_save": overhead.save, "_lost_work": overhead.lost_work}
        parts["_load_and_reschedule"] = overhead.load + overhead.reschedule
        found |= {f"setting_{name}_{mode}{part}_percent_modelled": 100 * value for part, value in parts.items()}
        found[f"setting_{name}_{mode}_save_every_hours"] = every[mode]
    naive = modelled(costs, "partial", every["full"]).total
    found[f"setting_{name}_partial_at_full_interval_percent_modelled"] = 100 * naive
    return found | {f"setting_{name}_break_even_pls": schedule.break_even_pls(costs)}


def events(name: str, costs: schedule.Costs, config: Config, horizons: int) -> dict[str, float]:
    """Part 1 for one setting: emulated overheads and PLS, compared with the equations."""
    found: dict[str, float] = {}
    long = costs._replace(total_hours=100 * costs.total_hours)
    drawn, jobs = (
        [draw_failures(c.mtbf_hours, c.total_hours, c.nodes, config.seed + i).hours for i in range(number)]
        for c, number in ((long, horizons), (costs, 20 * horizons))
    )
    found[f"setting_{name}_failures"] = sum(map(len, drawn))
    for mode, every in intervals(costs, config.target_pls).items():
        key, law = f"setting_{name}_{mode}", modelled(costs, mode, every).total
        replays = [replay_in_useful_time(long, mode, every, hours) for hours in drawn]
        found |= beside_law(key, law, [replay.overhead.total for replay in replays])
        wall = [replay_in_wall_time(costs, mode, every, hours, long.total_hours).overhead.total for hours in drawn]
        found |= beside_law(f"{key}_wall", overhead_in_wall_time(costs, mode, every), wall)
        singles = [replay_in_useful_time(costs, mode, every, hours) for hours in jobs]
        percent = 100 * np.array([replay.overhead.total for replay in singles])
        found[f"{key}_one_job_percent_emulated"] = float(percent.mean())
        found[f"{key}_one_job_standard_deviation_points"] = float(percent.std(ddof=1))
        found[f"{key}_one_job_standard_error_points"] = float(percent.std(ddof=1) / np.sqrt(len(percent)))
    found[f"setting_{name}_pls_emulated"] = float(np.mean([replay.pls for replay in replays]))
    found[f"setting_{name}_pls_modelled"] = schedule.expected_pls(costs, every)
    found[f"setting_{name}_one_job_pls_emulated"] = float(np.mean([replay.pls for replay in singles]))
    found[f"setting_{name}_one_job_pls_standard_deviation"] = float(np.std([replay.pls for replay in singles], ddof=1))
    return found | {f"setting_{name}_one_job_pls_modelled": schedule.expected_pls_of_job(costs, every)}


def beside_law(key: str, law: float, values: list[float]) -> dict[str, float]:
    """Mean over horizons, its standard error, and its difference from the modelled value, in percent of useful time."""
    percent = 100 * np.array(values)
    return {
        f"{key}_percent_emulated": float(percent.mean()),
        f"{key}_standard_error_points": float(percent.std(ddof=1) / np.sqrt(len(percent))),
        f"{key}_emulated_minus_modelled_points": float(percent.mean() - 100 * law),
    }


def scaling(costs: schedule.Costs, target_pls: float) -> dict[str, dict[str, list[float]]]:
    """Part 2: {MTBF law: {line: overheads in percent, one for each of COUNTS}}."""
    node_hours = costs.mtbf_hours * costs.nodes
    chance = -np.expm1(np.log1p(-1 / costs.mtbf_hours) / costs.nodes)
    laws = {"linear": lambda n: node_hours / n, "independent": lambda n: -1 / np.expm1(n * np.log1p(-chance))}
    found: dict[str, dict[str, list[float]]] = {}
    for law, mtbf in laws.items():
        found[law] = {"full": [], "full_wall": [], "partial": [], "partial_shard_load": []}
        for n in COUNTS:
            here = costs._replace(nodes=n, mtbf_hours=mtbf(n))
            every = intervals(here, target_pls)
            found[law]["full"].append(100 * modelled(here, "full", every["full"]).total)
            found[law]["full_wall"].append(100 * overhead_in_wall_time(here, "full", every["full"]))
            found[law]["partial"].append(100 * modelled(here, "partial", every["partial"]).total)
            shard = here._replace(partial_load_hours=here.load_hours / n)
            found[law]["partial_shard_load"].append(100 * modelled(shard, "partial", every["partial"]).total)
    return found


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


def of_nodes(failures: Failures, chosen: np.ndarray) -> Failures:
    """Return the failures that a job sees on some nodes i32[k], distinct, numbered by their position in `chosen`."""
    place = np.full(failures.nodes, -1, np.int32)
    place[chosen] = np.arange(len(chosen))
    node = np.where(failures.node >= 0, place[failures.node], -1)
    kept = node >= 0
    return failures._replace(hours=failures.hours[kept], node=node[kept], cause=failures.cause[kept], nodes=len(chosen))


def replays(failures: Failures, costs: schedule.Costs, config: Config, draws: int) -> list[dict[str, float]]:
    """Part 3 for one source: one row per number of nodes, with means over random choices of nodes."""
    rng, rows = np.random.default_rng(config.seed), []
    for n in [*(n for n in COUNTS if n < failures.nodes), failures.nodes]:
        found: dict[str, list[float]] = {}
        for _ in range(draws if n < failures.nodes else 1):
            hours, failed = interruptions(of_nodes(failures, rng.permutation(failures.nodes)[:n]))
            here = costs._replace(nodes=n, mtbf_hours=failures.span_hours / max(1, len(hours)))
            for mode, every in intervals(here, config.target_pls).items():
                replay = replay_in_wall_time(here, mode, every, hours, failures.span_hours, failed)
                found.setdefault(f"{mode}_percent_emulated", []).append(100 * replay.overhead.total)
                found.setdefault(f"{mode}_percent_modelled", []).append(100 * modelled(here, mode, every).total)
                if mode == "partial":
                    found.setdefault("partial_pls_emulated", []).append(replay.pls)
            found.setdefault("mtbf_hours", []).append(here.mtbf_hours)
        row = {"nodes": float(n)} | {key: float(np.mean(values)) for key, values in found.items()}
        if n < failures.nodes:
            row["full_percent_emulated_standard_deviation"] = float(np.std(found["full_percent_emulated"], ddof=1))
        rows.append(row)
    return rows


def table(results: dict[str, Any], traces: Iterable[str]) -> str:
    """Format equations against emulation, growth with the number of nodes, and the traces."""
    recovery = {f"{name.upper()}: {mode}": f"setting_{name}_{mode}" for name in SETTINGS for mode in MODES}
    first = {"modelled, %": "{}_percent_modelled", "emulated, %": "{}_percent_emulated"}
    first |= {"standard error": "{}_standard_error_points", "on the wall clock, %": "{}_wall_percent_emulated"}
    first |= {"one job, %": "{}_one_job_percent_emulated", "a save every, h": "{}_save_every_hours"}
    growth = {f"{law} MTBF, {n} nodes": f"{law}_mtbf_{n}_nodes" for law in ("linear", "independent") for n in (8, 64)}
    parts = ("full", "full_wall", "partial", "partial_shard_load")
    second = {f"{part.replace('_', ' ')}, %": f"{{}}_{part}_percent_modelled" for part in parts}
    third = {"failures": "{}_failures", "MTBF, h": "{}_all_nodes_mtbf_hours", "nodes": "{}_all_nodes_nodes"}
    third |= {f"{mode} recovery, %": f"{{}}_all_nodes_{mode}_percent_emulated" for mode in MODES}
    tables = [grid(results, "setting and recovery", recovery, first), grid(results, "modelled", growth, second)]
    return "\n\n".join([*tables, grid(results, f"failures, {results['failures_are']}", list(traces), third)])


def main(config: Config) -> dict:
    """Run all three parts and return the contents of results.json."""
    run = Run("cpr_scalability", config, config.workdir)
    horizons, draws = {"smoke": (100, 2), "default": (1000, 20), "paper": (10000, 200)}[config.preset]
    traces, costs = sources(config), SETTINGS[config.setting]
    results: dict[str, Any] = {
        "overhead_is": "modelled (equations) or emulated (events), never measured",
        "failures_are": "drawn" if config.traces is None else "of real traces",
    }
    for name, setting in SETTINGS.items():
        results |= equations(name, setting, config.target_pls) | events(name, setting, config, horizons)
    lines = scaling(costs, config.target_pls)
    for law, of_law in lines.items():
        for place, n in enumerate(COUNTS):
            row = {f"{line}_percent_modelled": values[place] for line, values in of_law.items()}
            run.log({"source": f"{law} MTBF", "nodes": n} | row)
            if n in (8, 64):
                results |= {f"{law}_mtbf_{n}_nodes_{key}": value for key, value in row.items()}
    for name, failures in tqdm(traces.items(), unit="trace", disable=None):
        found = replays(failures, costs, config, draws)
        for row in found:
            run.log({"source": name} | row)
        results[f"{name}_failures"] = len(failures.hours)
        results |= {f"{name}_all_nodes_{key}": value for key, value in found[-1].items()}
    run.close(results, table(results, traces))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
