"""Claim: training does not wait for the shadow. Its rate with none, with one, with it blocked, and in the foreground.

    python experiments/shadowsync_isolation.py  8 minutes
    python experiments/shadowsync_isolation.py --rule easgd

One trainer trains DLRM-Kaggle of throughput.py over host tables, and its one peer only synchronises; regime:
free-running. All arms run in each of 24 rounds: none; shadow, back to back and at three paces; shadow whose transport
blocks for 3 seconds in each round, longer than a run; foreground, every step and every `--every-steps` steps; and
both with rounds that begin `--late-steps` late, as if the peer were late (EASGD: its centre), EMULATED by a sleep.
`X_over_no_sync` is the rate of X over that without synchronisation; `average_sync_gap_X`, null where no round was
merged, the steps per round. Result: results/two_cores_cpu/shadowsync_isolation*.json.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from main.cli import Flags, Run, bars, command_line, grid
from main.report import figures, said
from studies.reference import Job, ratio
from studies.shadow_work import RULES, TimedTrainer, Way, trainer_turn
from studies.turns import in_turns


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the benchmark."""

    rule: Literal["ma", "bmuf", "easgd"] = "ma"
    pace_seconds: float = 0.2
    every_steps: int = 5
    late_steps: tuple[float, ...] = (0.5, 1.0, 3.0)
    """How late rounds begin, in steps without synchronisation."""
    rows: int = 1_000_000
    batch_size: int = 2048


ROUNDS_AND_STEPS = {"smoke": (2, 8), "default": (24, 15), "paper": (60, 40)}


def synchronisers_of(config: Config, step_s: float) -> dict[str, Way]:
    """Return {name: way}, for steps of so many seconds."""
    paces = sorted({0.0, config.pace_seconds / 2, config.pace_seconds, 2 * config.pace_seconds})
    ways = {
        "none": Way("none"),
        "foreground": Way("foreground", every_steps=config.every_steps),
        "foreground_every_step": Way("foreground", every_steps=1),
        "blocked": Way("shadow", late_seconds=3.0),
    }
    ways |= {"shadow_back_to_back" if not pace else f"shadow_pace_{pace:g}_s": Way("shadow", pace) for pace in paces}
    for late in config.late_steps:
        ways[f"foreground_late_{late:g}"] = ways["foreground"]._replace(late_seconds=late * step_s)
        ways[f"shadow_late_{late:g}"] = Way("shadow", late_seconds=late * step_s)
    return ways


def run_in_turns(config: Config, run: Run) -> dict[str, list[dict[str, float]]]:
    """Run every arm once per round: {name: figures of each run}."""
    rounds, steps = ROUNDS_AND_STEPS[config.preset]
    trainer = TimedTrainer(Job(rows=config.rows, batch_size=config.batch_size, seed=config.seed))
    # One rule for all runs, so that its merge is compiled once.
    rule = RULES[config.rule]()
    for method in ("none", "foreground", "shadow"):
        trainer_turn(trainer, rule, Way(method, every_steps=1), 3)  # compiles
    ways = synchronisers_of(config, float(np.median(trainer.run(steps))))

    def turn(name):
        times, gap = trainer_turn(trainer, rule, ways[name], steps)
        longest = float(times.max() / np.median(times))
        figures = {"step_s": float(times.mean()), "gap": gap, "longest_step_over_median": longest}
        figures["late_s"] = ways[name].late_seconds
        run.log({"way": name} | figures | {"gap": gap if np.isfinite(gap) else None})
        return figures

    return in_turns({name: functools.partial(turn, name) for name in ways}, rounds, "rounds")


def rates_over_none(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Contents of results.json, from the runs of all arms."""
    of = lambda name, figure: np.array([turn[figure] for turn in found[name]])
    results: dict[str, Any] = {
        "rounds": len(found["none"]),
        "step_ms_none": 1e3 * float(np.median(of("none", "step_s"))),
    }
    for name in found:
        if name != "none":
            results |= ratio(f"{name}_over_no_sync", of("none", "step_s") / of(name, "step_s"))
            gap = float(np.median(of(name, "gap")))
            results[f"average_sync_gap_{name}"] = gap if np.isfinite(gap) else None
        longest = float(np.median(of(name, "longest_step_over_median")))
        results[f"longest_step_over_median_{name}"] = longest
        if late := found[name][0]["late_s"]:
            results[f"late_over_step_{name}"] = late / float(np.median(of("none", "step_s")))
    return results


def rates_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """{way: rate over that without synchronisation, with interval}."""
    ends = "_over_no_sync"
    return {key.removesuffix(ends): each for key, each in figures(results).items() if key.endswith(ends)}


def finding(results: Mapping[str, Any]) -> str:
    """Title of the plot."""
    rates = rates_of(results)
    shadows = [each.value for way, each in rates.items() if way.startswith(("shadow_back", "shadow_pace"))]
    beside = ""
    if late := [way for way in rates if way.startswith("shadow_late")]:
        steps, foreground = results[f"late_over_step_{late[-1]}"], rates[late[-1].replace("shadow", "foreground")]
        beside = f"; if rounds come {steps:.1f} steps late, {said(rates[late[-1]])} and {said(foreground)}"
    return (
        f"Beside a shadow training keeps {min(shadows):.2f} to {max(shadows):.2f} of its rate without "
        f"sync, beside a blocked one {said(rates['blocked'])}, with sync in the foreground every "
        f"{results['average_sync_gap_foreground']:g} steps {said(rates['foreground'])}{beside}"
    )


def draw(directory: Path, results: Mapping[str, Any]) -> None:
    """Plot rate and sync gap of each arm."""
    words = lambda way: way.replace("_", " ")
    rate, gap = "step rate over that without sync", "average sync gap, steps"
    gaps = {words(way): results[f"average_sync_gap_{way}"] for way in rates_of(results)}
    panels = {rate: {"": {words(way): each for way, each in rates_of(results).items()}}, gap: {"": gaps}}
    bars(directory / "rates_and_gaps.png", panels, finding(results), {rate: {"no sync": 1.0}})


def main(config: Config) -> dict:
    """Run all arms in interleaved rounds and return the contents of results.json."""
    run = Run("shadowsync_isolation", config, config.workdir)
    if config.preset == "smoke":
        config = dataclasses.replace(config, rows=20_000, batch_size=256)
    results = {"regime": "free-running", "rule": config.rule} | rates_over_none(run_in_turns(config, run))
    draw(run.directory, results)
    columns = {"rate over no sync": "{}_over_no_sync", "average sync gap, steps": "average_sync_gap_{}"}
    columns |= {"longest step over median": "longest_step_over_median_{}"}
    run.close(results, grid(results, "way", list(synchronisers_of(config, 1.0)), columns))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
