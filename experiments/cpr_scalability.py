"""Full against partial recovery as a job grows, by the equations and replayed on failures of real clusters.

    python experiments/cpr_scalability.py --traces DIRECTORY  real traces; under a minute
    python experiments/cpr_scalability.py                     failures drawn from the fitted laws

The claim as we recall the paper's scalability figure (arXiv 2011.02999): the overhead of full recovery rises with the
number of nodes, that of CPR hardly does.

No overhead here is measured. `modelled` is by the equations of jaxrec/cpr/schedule.py, `emulated` is replayed event by
event with the costs of a setting, solved from the abstract's figures (see SETTING_A). It has three parts:

1. The equations against the event-by-event emulation, over horizons of 100 back-to-back jobs on the clock of useful
time.
2. Overhead over nodes n with T_fail = c / n, 28 h at n = 8, N_emb = n. Costs do not depend on n; `shard_load` divides
the load time of partial recovery by n, as one shard of n is loaded.
3. Back-to-back jobs on all nodes of a trace, in wall time, saving at the intervals that the MTBF of these nodes gives.
`modelled` is by eqs. (1) and (2). Intervals are at most the 56 h of a job; a spare node replaces a failed one, so
repairs do not count.

docs/results.md has the figures of real traces. Gamma laws fitted to their gaps by an earlier version had shapes of
0.49 (InfiniteHBD), 0.75, 0.86 and 0.53 (LANL systems 18, 19, 20) and missed the survival curve by 1.1, 1.7, 1.2, 4.4 %
(root mean square), exponential laws by 10.0, 5.3, 2.7, 13.8 %.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from main.cli import Flags, Run, command_line, grid, plot
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


def main(config: Config) -> dict:
    """Run all three parts and return the contents of results.json."""
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


if __name__ == "__main__":
    command_line(main, Config, __doc__)
