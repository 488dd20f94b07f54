"""Rates over the number of trainers: the foreground saturates its servers, the background only widens the sync gap.

    python experiments/shadowsync_scaling.py                            all three parts; 30 minutes
    python experiments/shadowsync_scaling.py --tensors dlrm             servers hold whole tensors of DLRM-Kaggle
    python experiments/shadowsync_scaling.py --no-protocol --rounds 4   the measured trainers alone; 6 minutes
    python experiments/shadowsync_scaling.py --where processes          trainers and servers in processes; 40 minutes

Regime: free-running. The parts share no keys. `measured_*`: trainers on the cores of this machine (`measured`,
`pool_work.py`); `emulated_sleep_*`: up to 64 trainers that sleep in place of computing, over the real protocol
(`points_of_protocol`); `simulated_*`: the same in SimPy, up to 1,000. `efficiency` is over n times one trainer,
`over_no_sync` over n trainers that do not synchronise, `of_ideal` over n that never wait.
Result: results/two_cores_cpu/shadowsync_scaling*.json.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from main.cli import Flags, Run, bars, command_line, grid, listing, plot, refuse, rule_of_ray, unread
from main.report import figures, said
from studies.pool_work import measured_processes
from studies.reference import Job, ratio, reference_work
from studies.shadow_protocol import WAYS, Point, emulate, simulate
from studies.shadow_work import FORMS_OF_RULES, Trainers
from studies.sides import Side
from studies.turns import in_turns
from tqdm import tqdm

SHORTEST_STEP_S = 0.02  # of a sleeping trainer, so that two cores can wake 64 of them
KINDS = {"emulated_sleep": "Emulated, with trainers that sleep", "simulated": "Simulated"}
LINES = [("s_easgd", 2), ("s_easgd", 4), ("fr_easgd_5", 2), ("fr_easgd_5", 4), ("fr_easgd_30", 2), ("s_ma", 0)]


class Preset(NamedTuple):
    """Sizes that a preset sets."""

    emulated: tuple[int, ...]  # trainers
    simulated: tuple[int, ...]  # trainers, in addition to the emulated numbers
    window: int  # counted steps
    measured: tuple[str, ...]  # arms besides the base
    measured_steps: int  # steps per run of a measured arm
    rounds: int  # rounds of measured arms


SHADOWS = tuple(f"s_{rule}{pace}" for rule in FORMS_OF_RULES for pace in ("", "_paced"))
PRESETS = {
    "smoke": Preset((1, 24), (100,), 15, ("none", "s_easgd-symmetric", "s_ma-delta_paced"), 15, 1),
    "default": Preset((1, 2, 4, 8, 16, 32, 64), (128, 256, 512, 1000), 40, ("none", *SHADOWS), 8, 24),
    "paper": Preset(
        (1, 2, 4, 8, 12, 14, 16, 20, 24, 32, 48, 64), (128, 256, 512, 1000), 300, ("none", *SHADOWS), 15, 24
    ),
}

# {preset: (arms, rounds, steps)} of trainers in processes.
OF_PROCESSES: dict[str, tuple[tuple[str, ...], int, int]] = {
    "smoke": (("s_easgd_paced",), 1, 300),
    "default": (("s_easgd", "s_easgd_paced", "s_ma_paced"), 24, 40),
    "paper": (("s_easgd_paced",), 24, 100),
}


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the benchmark."""

    resume: bool = False
    rows: int = 1_000_000
    batch_size: int = 2048
    where: Literal["threads", "processes"] = "threads"
    """Where the measured trainers run; with `processes` nothing else is run."""
    rounds: int = 0
    """Rounds of the measured trainers; 0 takes the preset's number."""
    protocol: bool = True
    """Whether to emulate and to simulate the protocol besides measuring."""
    tensors: Literal["equal", "dlrm"] = "equal"
    """Tensors divided among the servers: four equal ones, or those of DLRM-Kaggle."""
    saturation: float = 14.0
    """Number of trainers at which FR-EASGD-5 saturates two servers."""
    pace_seconds: float = 0.3
    """Least time between rounds of the measured shadows that are `_paced`."""


def measured(config: Config, run: Run) -> dict[str, Any]:
    """Measure real trainers, all arms in 24 interleaved rounds.

    They train DLRM-Kaggle of throughput.py over shared host tables: n threads of one process on n cores, each program
    limited to one thread. The base is one trainer on one core. `_paced`: rounds at --pace-seconds, not back to back.
    `busy_cores` below n means that other processes had the cores; `cpu_time_efficiency`, the base's CPU seconds per
    step over those of n trainers, is the efficiency that free cores would have given if no trainer waits.
    """
    for row in run.metrics():
        if row["kind"] == "measured":
            return row["results"]
    preset, cores = PRESETS[config.preset], len(os.sched_getaffinity(0))
    numbers = sorted({1, cores} | {2**i for i in range(10) if 2**i < cores})
    turns = [("none", 1)] + [(way, n) for way in preset.measured for n in numbers if n > 1]
    job = Job(rows=config.rows, batch_size=config.batch_size, seed=config.seed)
    with ThreadPoolExecutor(2) as pool:
        processes = pool.map(lambda n: Side(functools.partial(Trainers, job, n, config.pace_seconds)), numbers)
        sides = dict(zip(numbers, processes, strict=True))
    ways = {(way, n): functools.partial(sides[n].ask, "run", (way, preset.measured_steps)) for way, n in turns}
    found = in_turns(ways, config.rounds or preset.rounds, "measured")
    for side in sides.values():
        side.close()
    of = lambda turn, figure: np.array([each[figure] for each in found[turn]])
    rate = {turn: config.batch_size * of(turn, "steps_per_s") for turn in turns}
    cpu_s = {turn: of(turn, "busy_cores") / of(turn, "steps_per_s") for turn in turns}
    base = turns[0]
    results: dict[str, Any] = {"measured_cores": cores, "measured_base": "one trainer held to one core, no sync"}
    results["measured_step_ms"] = 1e3 * config.batch_size / float(np.median(rate[base]))
    for way, n in turns:
        end = f"{way}_trainers_{n}"
        results[f"measured_examples_per_s_{end}"] = float(np.median(rate[way, n]))
        results[f"measured_busy_cores_{end}"] = float(np.median(of((way, n), "busy_cores")))
        if n > 1:
            results |= ratio(f"measured_efficiency_{end}", rate[way, n] / (n * rate[base]))
            results |= ratio(f"measured_cpu_time_efficiency_{end}", cpu_s[base] / cpu_s[way, n])
        if way != "none":
            results |= ratio(f"measured_over_no_sync_{end}", rate[way, n] / rate["none", n])
            results[f"measured_average_sync_gap_{end}"] = float(np.median(of((way, n), "average_sync_gap")))
    run.log({"kind": "measured", "results": results})
    return results


def points_of_protocol(config: Config, step_s: float, trainers: tuple[int, ...]) -> list[Point]:
    """All lines at these numbers of trainers.

    Trainers sleep for the measured time of a step, +-10 %, at least 20 ms, so that those in the background keep 1.00 of
    the ideal rate by construction: the findings are where the foreground saturates, and the sync gap. Parameters and
    bandwidth are a thousandth of the real ones; FR-EASGD-5 saturates two servers at `--saturation` trainers, and a
    round of model averaging is a ring all-reduce over links of that bandwidth. The forms of a rule move the same bytes
    at the same times, so a rule is one line. `flattens_at_trainers`: the highest rate over that of one such trainer.
    """
    params = jax.eval_shape(lambda: reference_work(Job(rows=100))[1])
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)]
    sizes = sizes if config.tensors == "dlrm" else [sum(sizes) // 4] * 4
    of_two = Point("fr_easgd_5", 1, 2, step_s, 0.1, config.seed, tuple(sizes), bytes_per_s=1.0)
    bytes_per_s = max(of_two.server_s) * (config.saturation - 1) / (5 * step_s)
    one = of_two._replace(bytes_per_s=bytes_per_s)
    return [one._replace(way=way, servers=servers, trainers=n) for way, servers in LINES for n in trainers]


def run_points(config: Config, run: Run, kind: str, function: Callable, todo: list[Point]) -> dict[Point, dict]:
    """Run the points that metrics.jsonl does not have yet; return the rows of all."""
    known = {row["label"]: row for row in run.metrics() if row["kind"] == kind}
    rows = {}
    for point in tqdm(todo, desc=kind, unit="point", disable=None):
        if point.label not in known:
            found = function(point, PRESETS[config.preset].window)
            steps, rounds = found.pop("steps_per_s"), found.pop("rounds_per_s")
            row = {"kind": kind, "label": point.label, "examples_per_s": config.batch_size * steps}
            row["of_ideal"] = steps * point.step_s / point.trainers
            row["average_sync_gap"] = float(WAYS[point.way].every) or steps / rounds
            run.log(row | found)
            known[point.label] = row | found
        rows[point] = known[point.label]
    return rows


def flat(kind: str, rows: dict[Point, dict]) -> dict[str, float]:
    """Keys of results.json of one part."""
    results: dict[str, float] = {}
    for figure in ("examples_per_s", "of_ideal", "average_sync_gap"):
        results |= {f"{kind}_{figure}_{p.label}": row[figure] for p, row in rows.items()}
    for servers in (2, 4):
        rates = {p.trainers: rows[p]["examples_per_s"] for p in rows if (p.way, p.servers) == ("fr_easgd_5", servers)}
        results[f"{kind}_flattens_at_trainers_fr_easgd_5_servers_{servers}"] = max(rates.values()) / rates[1]
    return results


def lines(rows: dict[Point, dict], figure: str) -> dict[str, tuple]:
    """{line: (trainers, values)} of a plot."""
    found: dict[str, tuple[list, list]] = {}
    for point, row in rows.items():
        name = f"{point.way}, {point.servers} servers" if point.servers else point.way
        for values, value in zip(found.setdefault(name, ([], [])), (point.trainers, row[figure]), strict=True):
            values.append(value)
    return dict(found)


def largest_error(emulated: dict[Point, dict], simulated: dict[Point, dict], figure: str) -> float:
    """Largest relative difference over the points that both have."""
    return max(abs(simulated[p][figure] / emulated[p][figure] - 1) for p in emulated if p in simulated)


def finding(results: Mapping[str, Any], kind: str) -> str:
    """Title of the plot of a part."""
    rates = [results[f"{kind}_flattens_at_trainers_fr_easgd_5_servers_{n}"] for n in (2, 4)]
    gap = re.compile(rf"{kind}_average_sync_gap_s_easgd_trainers_(\d+)_servers_2")
    gaps = {int(found[1]): results[key] for key in results if (found := gap.fullmatch(key))}
    return (
        f"{KINDS[kind]}: FR-EASGD-5 gets to the rate of {rates[0]:.1f} trainers with 2 servers, and of {rates[1]:.1f} "
        f"with 4. In the background the sync gap is {gaps[max(gaps)]:.1f} steps with {max(gaps)} trainers"
    )


def finding_measured(results: Mapping[str, Any]) -> str:
    """Title of the plot of the measured trainers."""
    efficiency = efficiencies(results)
    n, ways = next(reversed(efficiency.items()))
    best = max((way for way in ways if way != "none"), key=lambda way: ways[way].value)
    beside = f"; those that do not synchronise {said(ways['none'])}" if "none" in ways else ""
    return f"Measured: {n} trainers with {best} reach {said(ways[best])} of {n} times the rate of one{beside}"


def efficiencies(results: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Rates of n trainers over n times that of one: {n: {way: Figure}}, n ascending.

    >>> efficiencies({"measured_efficiency_s_ma-delta_trainers_2": 0.8})
    {2: {'s_ma-delta': Figure(value=0.8, low=None, high=None)}}
    """
    found: dict[int, dict[str, Any]] = {}
    for key, figure in figures(results).items():
        if match := re.fullmatch(r"measured(?:_processes)?_efficiency_(.+)_trainers_(\d+)", key):
            found.setdefault(int(match[2]), {})[match[1]] = figure
    return dict(sorted(found.items()))


def draw(run: Run, results: dict[str, Any], kind: str, rows: dict[Point, dict]) -> None:
    """Plot rate and sync gap over the trainers, with the ideal of trainers that never wait."""
    ideal = {point.trainers: row["examples_per_s"] / row["of_ideal"] for point, row in rows.items()}
    panels = {
        "examples/s": lines(rows, "examples_per_s") | {"ideal": (list(ideal), list(ideal.values()))},
        "average sync gap, steps": lines(rows, "average_sync_gap"),
    }
    plot(run.directory / f"{kind}.png", panels, "trainers", finding(results, kind), log_x=True, log_y=True)


def draw_measured(directory: Path, results: dict[str, Any]) -> None:
    """Plot the efficiency of each arm."""
    label = "measured rate, over so many times that of one trainer"
    series = {f"{n} trainers": ways for n, ways in efficiencies(results).items()}
    if series:
        bars(directory / "measured.png", {label: series}, finding_measured(results), {label: {"no cost": 1.0}})


def table(results: Mapping[str, Any], points: Iterable[Point]) -> str:
    """Format the measured figures, then those of sleeping and simulated trainers, a line per point."""
    alone = {key: value for key, value in results.items() if not any(key.endswith(point.label) for point in points)}
    columns = {
        f"{kind.partition('_')[0]}: {words}": f"{kind}_{key}_{{}}"
        for kind in ("emulated_sleep", "simulated")
        for words, key in (("of the ideal rate", "of_ideal"), ("sync gap, steps", "average_sync_gap"))
    }
    return listing(alone) + "\n\n" + grid(results, "protocol", [point.label for point in points], columns)


def main(config: Config) -> dict:
    """Run the parts and return the contents of results.json."""
    processes = config.where == "processes"
    refuse(
        unread(config, {"--where threads": (not processes, ("protocol", "tensors", "saturation"))})
        | unread(config, {"the protocol, which --no-protocol leaves out": (config.protocol, ("tensors", "saturation"))})
        | {f"--saturation {config.saturation} must be above 1: one trainer waits for no other.": config.saturation <= 1}
        | (rule_of_ray() if processes else {})
    )
    jax.config.update("jax_platforms", "cpu")
    run = Run("shadowsync_scaling", config, config.workdir, config.resume)
    preset = PRESETS[config.preset]
    if config.preset == "smoke":
        config = dataclasses.replace(config, rows=20_000, batch_size=256)
    results: dict[str, Any] = {"regime": "free-running"}
    if processes:
        job = Job(rows=config.rows, batch_size=config.batch_size, seed=config.seed)
        arms, rounds, steps = OF_PROCESSES[config.preset]
        results |= measured_processes(job, arms, config.rounds or rounds, steps, config.pace_seconds)
    else:
        results |= measured(config, run)
    if processes or not config.protocol:
        draw_measured(run.directory, results)
        run.close(results)
        return results
    step_s = max(SHORTEST_STEP_S, results["measured_step_ms"] / 1e3)
    common, more = (
        points_of_protocol(config, step_s, preset.emulated),
        points_of_protocol(config, step_s, preset.simulated),
    )
    emulated = run_points(config, run, "emulated_sleep", emulate, common)
    simulated = run_points(config, run, "simulated", simulate, common + more)
    results |= {"emulated_sleep_step_ms": 1e3 * step_s, "emulated_sleep_server_bytes_per_s": common[0].bytes_per_s}
    results["emulated_sleep_parameters_bytes"] = sum(common[0].sizes)
    results["emulated_sleep_busy_cores_max"] = max(row["busy_cores"] for row in emulated.values())
    results |= flat("emulated_sleep", emulated) | flat("simulated", simulated)
    for figure, name in (("examples_per_s", ""), ("average_sync_gap", "_sync_gap")):
        results[f"simulated_over_emulated_sleep{name}_error_max"] = largest_error(emulated, simulated, figure)
    for kind, rows in (("emulated_sleep", emulated), ("simulated", simulated)):
        draw(run, results, kind, rows)
    draw_measured(run.directory, results)
    run.close(results, table(results, common + more))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
