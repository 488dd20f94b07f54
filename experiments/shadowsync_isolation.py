"""Training does not wait for the shadow: rate without synchronisation, with it, with it blocked, and in the foreground.

    python experiments/shadowsync_isolation.py                     3 minutes
    python experiments/shadowsync_isolation.py --rule easgd

One trainer trains the reference work (DLRM-Kaggle of throughput.py) over host tables; regime: free-running. It meets
one peer, which only synchronises and trains nothing, through the same transport as any trainer. In every round of the
benchmark all ways take turns: none; shadow at the pace `--pace-seconds`; shadow whose transport blocks for 3 seconds in
each round; foreground, every `--every-steps` steps. `average_sync_gap` is steps for each round folded in: with a shadow
it is an outcome, in the foreground it is k. The curve runs through several paces.
"""

import dataclasses
from typing import Any, Literal

import numpy as np
from contract import Flags, Run, command_line, plot
from reference import Job, ratio
from shadow_work import RULES, Trainer, turn
from tqdm import tqdm


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the benchmark."""

    rule: Literal["ma", "bmuf", "easgd"] = "ma"
    pace_seconds: float = 0.2
    every_steps: int = 5
    rows: int = 1_000_000
    batch_size: int = 2048


def main(config: Config) -> dict:
    """All ways in turns; returns what results.json holds."""
    run = Run("shadowsync_isolation", config, config.workdir)
    rounds, steps = {"smoke": (2, 8), "default": (8, 40), "paper": (30, 100)}[config.preset]
    if config.preset == "smoke":
        config = dataclasses.replace(config, rows=20_000, batch_size=256)
    trainer = Trainer(Job(rows=config.rows, batch_size=config.batch_size, seed=config.seed))
    rule = RULES[config.rule]()  # one for all turns: its merge is compiled once
    paces = sorted({0.0, config.pace_seconds / 2, config.pace_seconds, 2 * config.pace_seconds})
    ways = [("none", 0.0), ("foreground", 0.0), ("blocked", 0.0)] + [("shadow", pace) for pace in paces]
    for way, pace in ways:
        turn(trainer, rule, way, 3, pace, config.every_steps)  # compiles
    seconds: dict[tuple[str, float], list[float]] = {way: [] for way in ways}
    longest: dict[tuple[str, float], list[float]] = {way: [] for way in ways}
    gaps: dict[tuple[str, float], list[float]] = {way: [] for way in ways}
    for number in tqdm(range(rounds), unit="round", disable=None):
        for way, pace in ways:
            times, gap = turn(trainer, rule, way, steps, pace, config.every_steps)
            seconds[way, pace].append(float(times.mean()))
            longest[way, pace].append(float(times.max() / np.median(times)))
            gaps[way, pace].append(gap)
            row = {"round": number, "way": way, "pace_seconds": pace, "step_ms": 1e3 * times.mean()}
            run.log(row | {"average_sync_gap": gap if np.isfinite(gap) else None})
    none = np.array(seconds["none", 0.0])
    chosen = ("shadow", config.pace_seconds)
    results: dict[str, Any] = {
        "regime": "free-running",
        "rule": config.rule,
        "step_ms_none": 1e3 * float(np.median(none)),
    }
    results |= ratio("shadow_over_no_sync", none / np.array(seconds[chosen]))
    results["average_sync_gap"] = float(np.median(gaps[chosen]))
    results |= ratio("blocked_over_no_sync", none / np.array(seconds["blocked", 0.0]))
    results["blocked_longest_step_over_median"] = float(np.median(longest["blocked", 0.0]))
    results["none_longest_step_over_median"] = float(np.median(longest["none", 0.0]))
    results |= ratio("foreground_over_no_sync", none / np.array(seconds["foreground", 0.0]))
    results["foreground_sync_gap"] = float(config.every_steps)
    curve = sorted(
        (float(np.median(gaps["shadow", pace])), float(np.median(none / np.array(seconds["shadow", pace]))))
        for pace in paces
    )
    for (gap, rate), pace in zip(curve, paces, strict=True):
        results[f"sync_gap_at_pace_{pace}_s"], results[f"over_no_sync_at_pace_{pace}_s"] = gap, rate
    lines = {"shadow": ([gap for gap, _ in curve], [rate for _, rate in curve])}
    plot(run.directory / "rate_over_gap.png", {"step rate over that without sync": lines}, "average sync gap, steps")
    run.close(results)
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
