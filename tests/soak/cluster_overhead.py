"""Measure the overhead of saves and failures with full and with partial recovery, each at an interval of its own.

    python tests/soak/cluster_overhead.py                      4 GB of rows at 8 servers, 30 minutes of useful work
                                                               an arm, a kill every 10 minutes; two hours for a seed
    python tests/soak/cluster_overhead.py --preset smoke       small tables, half a minute an arm; five minutes
    python tests/soak/cluster_overhead.py --workdir DIR --resume --seeds 3      goes on; arms that ended stay

Server processes of this machine are killed by `os.kill(pid, 9)` after exponential times, at the same steps in every arm
of a seed. First a trial of each arm measures its costs; equations (1) to (6) of jaxrec/cpr/schedule.py take these,
choose the interval between saves (Young's for full recovery, that of the target PLS for partial), and predict overhead
and PLS for the kills that were drawn, which is logged before the arms begin. **Measured, on one machine.**

Each arm has a clock of its own: what a step takes far from saves and kills, in the mean. Its overhead is what it takes
beyond that for each step of the job, so that arms hours apart can be compared. Full recovery and vanilla save whole
images; MFU and SSU save what they pick, in parts, while training goes on, so that their saves cost less for that reason
too. Their trial lasts until after their first save, so that this save holds as many rows as one of the job. What
tracking costs is measured too, but is not in the equations.
"""

import contextlib
import dataclasses
import functools
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import numpy as np
from cluster_work import FRACTION, ClusterJob, Kill, Killer, with_sizes
from main.cli import Flags, Run, command_line, grid, paired_interval, refuse, rule_of_ray
from studies.recovery_overheads import PARTS

from jaxrec.checkpoint.checkpointer import BackgroundSaver
from jaxrec.cluster import Cluster
from jaxrec.cpr import schedule
from jaxrec.cpr.saving import Saves
from jaxrec.cpr.tracking import RowTracker

Span = tuple[float, float]  # seconds of `time.monotonic`
WARM_UP = 40  # steps before the clock of an arm starts, by which an arm is longer, for its last save
CATCHING_UP_S = 0.3  # after saves and tracking, of steps that had to wait
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"rows": 20_000, "minutes": 0.5, "mtbf_minutes": 0.2, "batch_size": 256, "trial_steps": 160},
    "default": {"rows": 59_000_000, "minutes": 30.0, "mtbf_minutes": 10.0, "batch_size": 2048, "trial_steps": 1200},
    "paper": {"rows": 59_000_000, "minutes": 56 * 60.0, "mtbf_minutes": 28 * 60.0, "batch_size": 2048,
              "trial_steps": 1200},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the experiment; the preset decides those that are not given."""

    rows: int | None = None
    """Rows of all tables together; each takes 68 bytes with its slot."""
    minutes: float | None = None
    """Useful time of a job, without saves and failures, by the rate of the trial."""
    mtbf_minutes: float | None = None
    """Mean useful time between failures of the job."""
    batch_size: int | None = None
    trial_steps: int | None = None
    """Steps in which the costs of full recovery and vanilla are measured: four saves and one kill."""
    servers: int = 8
    spares: int = 1
    """Standby processes, in which a successor begins without waiting for a start."""
    target_pls: float = 0.1
    arms: tuple[Literal["full", "vanilla", "mfu", "ssu"], ...] = ("full", "vanilla", "mfu")
    seeds: int = 1
    resume: bool = False
    """Go on with the run in --workdir, also with more --seeds."""


def check(config: Config) -> None:
    """Refuse flags that do not go together."""
    refuse({
        f"--servers {config.servers} must be at most 8, the number of shards.": config.servers > 8,
        f"--target-pls {config.target_pls:g} must be above 0 and at most 1.": not 0 < config.target_pls <= 1,
        f"--arms {' '.join(config.arms)}: give full and at least one other, each once.": (
            "full" not in config.arms or len(set(config.arms)) != len(config.arms) or len(config.arms) < 2
        ),
    } | rule_of_ray())  # fmt: skip


@contextlib.contextmanager
def timed() -> Iterator[tuple[list[Span], list[Span]]]:
    """Yield lists of the times of saves (picks, copies and writes) and of tracking, filled in the block."""
    saves, tracking = list[Span](), list[Span]()

    def noted(method, spans):
        def call(*args):
            start = time.monotonic()
            try:
                return method(*args)
            finally:
                spans.append((start, time.monotonic() + CATCHING_UP_S))

        return call

    with contextlib.ExitStack() as patched:
        for owner, name, spans in (
            (RowTracker, "pick", saves), (Saves, "save_snapshot", saves), (BackgroundSaver, "_do", saves),
            (RowTracker, "track_until", tracking),
        ):  # fmt: skip
            patched.enter_context(mock.patch.object(owner, name, noted(getattr(owner, name), spans)))
        yield saves, tracking


def accounted(
    times: Sequence[tuple[float, int]], saves: Sequence[Span], tracking: Sequence[Span], recoveries: Sequence[Span]
) -> dict[str, float]:
    """Split the time of an arm into useful work, saves, tracking and recoveries.

    Args:
      times: (seconds, step) of every committed step; steps fall where full recovery goes back.
      saves: spans of picks, copies and writes.
      tracking: spans in which batches were tracked.
      recoveries: spans from a kill until the job is back where it was, or later.

    Returns:
      step_s, the mean seconds of a step outside all spans; useful_s, that for each new step; saving_s, what steps
      beside a save took beyond it; tracking_s, what steps beside tracking alone took; recovering_s, the rest
      beyond useful_s.

    >>> times = [(0.0, 1), (1.0, 2), (2.0, 3), (5.0, 4), (6.0, 5), (9.0, 4), (10.0, 5), (11.5, 6)]
    >>> accounted(times, saves=[(2.5, 4.0)], tracking=[(10.2, 10.4)], recoveries=[(6.5, 9.5)])
    {'step_s': 1.0, 'useful_s': 5.0, 'saving_s': 2.0, 'tracking_s': 0.5, 'recovering_s': 4.0}
    """
    at = np.array([seconds for seconds, _ in times])
    took = np.diff(at)

    def meets(spans):
        found = np.zeros(len(took), bool)
        for start, end in spans:
            found[np.searchsorted(at[1:], start, "right") : np.searchsorted(at[:-1], end, "left")] = True
        return found

    recovering = meets(recoveries)
    saving = meets(saves) & ~recovering
    tracked = meets(tracking) & ~recovering & ~saving
    if not (plain := ~recovering & ~saving & ~tracked).any():
        raise ValueError(f"all {len(took)} steps lie beside saves or failures: give more --minutes or --mtbf-minutes.")
    step_s = float(took[plain].mean())
    useful_s = step_s * (times[-1][1] - times[0][1])
    saving_s, tracking_s = (float((took[beside] - step_s).sum()) for beside in (saving, tracked))
    return {
        "step_s": step_s, "useful_s": useful_s, "saving_s": saving_s, "tracking_s": tracking_s,
        "recovering_s": float(took.sum()) - useful_s - saving_s - tracking_s,
    }  # fmt: skip


def recoveries_of(kills: Sequence[Kill], full: bool, settling_s: float) -> list[Span]:
    """Return the span of each recovery: until the job is back, and a new spare process has started meanwhile."""
    back = [(kill.caught_up if full else kill.next_step) or kill.killed for kill in kills]
    return [(kill.killed, max(at, kill.killed + settling_s)) for kill, at in zip(kills, back, strict=True)]


def figures_of(
    row: Mapping[str, Any], killer: Killer, saves: Sequence[Span], tracking: Sequence[Span], settling_s: float
) -> dict[str, Any]:
    """Return the figures of an arm, with its overhead and the parts of it in percent of its useful time."""
    recoveries = recoveries_of(killer.kills, row["arm"] == "full", settling_s)
    found = accounted(killer.times[WARM_UP:], saves, tracking, recoveries)
    seconds_of = [kill.seconds() for kill in killer.kills]
    parts = {part: sum(one[part] for one in seconds_of) for part in PARTS}
    percent = {part: found[f"{part}_s"] for part in ("saving", "tracking")} | parts
    percent["overhead"] = found["saving_s"] + found["tracking_s"] + found["recovering_s"]
    return {
        **{f"{name}_percent": 100 * seconds / found["useful_s"] for name, seconds in percent.items()},
        "useful_s": found["useful_s"], "step_ms": 1000 * found["step_s"],
        "seconds_to_next_step": [one["to_next_step"] for one in seconds_of],
        **{key: row[key] for key in ("kills", "saves", "rows_saved", "pls", "lost_steps", "test_auc")},
    }  # fmt: skip


def costs_of(config: Config, figures: Mapping[str, Any], intervals: float) -> schedule.Costs:
    """Return the costs of an arm from the figures of one in which servers were killed, and saved so many intervals."""
    hours = lambda *parts: sum(figures[f"{part}_percent"] for part in parts) / 100 * figures["useful_s"] / 3600
    kills = max(1, figures["kills"])
    return schedule.Costs(
        save_hours=max(hours("saving") / intervals, figures["step_ms"] / 3.6e6),  # at least a step
        load_hours=hours("restoring") / kills, reschedule_hours=hours("noticing", "starting", "resuming") / kills,
        mtbf_hours=(config.mtbf_minutes or 0) / 60, total_hours=(config.minutes or 0) / 60, nodes=config.servers,
    )  # fmt: skip


def part_saved(arm: str) -> float:
    """Return r: an arm saves at most so much of the rows, and 1 / r times in an interval T_save."""
    return 1.0 if arm in ("full", "vanilla") else FRACTION


class Trial(NamedTuple):
    """A job in which the costs of an arm are measured."""

    steps: int
    every: float  # T_save in steps
    kill: int  # step of its kill
    intervals: float  # how many T_save its saves stand for


def trial_of(config: Config, arm: str, step_s: float) -> Trial:
    """Return the trial of an arm; one that saves parts is told the seconds of a step."""
    steps, part = config.trial_steps or 0, part_saved(arm)
    if part == 1:
        return Trial(steps, steps / 4, int(0.6 * steps), 4)
    # Its costs do not matter here.
    minutes = schedule.Costs(1, 1, 1, config.mtbf_minutes or 0, config.minutes or 0, config.servers)
    every = min(schedule.partial_interval(minutes, config.target_pls), minutes.total_hours) * 60 / step_s
    steps = max(steps, int(1.3 * part * every))  # the kill is after the first save
    return Trial(steps, every, max(steps // 2, int(1.2 * part * every)), steps // (part * every) * part)


def predicted(config: Config, costs: schedule.Costs, arm: str, kills: Sequence[float]) -> dict[str, float]:
    """Return the interval between saves in minutes, and what equations give there: overhead in percent, and PLS.

    Args:
      kills: times of the kills that were drawn, in shares of the job, in place of as many as are expected.
    """
    full, total = arm == "full", costs.total_hours
    every = min(schedule.full_interval(costs) if full else schedule.partial_interval(costs, config.target_pls), total)
    drawn = costs._replace(mtbf_hours=total / len(kills) if kills else 1e9)
    overhead = (schedule.full_overhead if full else schedule.partial_overhead)(drawn, every)
    lost = sum(schedule.lost_portion(share * total % every, 0.0, total, costs.nodes) for share in kills)
    return {
        "save_every_minutes": 60 * every, "overhead_percent": 100 * overhead.total, "pls": 0.0 if full else lost,
        "expected_pls": 0.0 if full else schedule.expected_pls_of_job(costs, every),
    }  # fmt: skip


def kills_of(seed: int, steps: int, mtbf_steps: float, servers: int) -> dict[int, int]:
    """Draw kills {step: server} at a constant rate, from the end of the warm-up to that of the job."""
    rng, step, found = np.random.default_rng(seed), float(WARM_UP), {}
    while (step := step + rng.exponential(mtbf_steps)) < steps:
        found[int(step)] = int(rng.integers(servers))
    return found


def run_seed(run: Run, config: Config, seed: int, cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Make what is not logged yet of the trials, predictions and arms of a seed; return {arm: its figures}."""

    @functools.cache
    def job(steps):
        sizes = config.rows or 0, steps + WARM_UP, config.batch_size or 0
        return ClusterJob(*sizes, float(steps), config.servers, seed, config.spares)

    def logged(kind, arm, make):
        return run.logged({"seed": seed, "kind": kind, "arm": arm}, make)

    def train(arm, steps, every, plan):
        with timed() as (saves, tracking):
            row, killer, _ = job(steps).run(arm, plan, cluster, run.directory, every, compare=False)
        if len(killer.servers.deaths) != len(killer.kills):
            raise RuntimeError(f"{arm}: servers died that were not killed, {killer.servers.deaths}.")
        settling_s = 3 * (config.mtbf_minutes or 0)  # a twentieth
        return figures_of(row, killer, saves, tracking, settling_s)

    trials, laws, results = (dict[str, dict[str, Any]]() for _ in range(3))
    arms, step_s, intervals = list[str](config.arms), 0.0, dict[str, float]()
    for arm in sorted(arms, key=part_saved, reverse=True):
        trial = trial_of(config, arm, step_s)
        intervals[arm], plan = trial.intervals, {trial.kill: seed % config.servers}
        one = functools.partial(train, arm, trial.steps, trial.every, plan)
        trials[arm] = logged("trial", arm, one)
        step_s = float(np.mean([trial["step_ms"] for trial in trials.values()])) / 1000
    steps, mtbf_steps = round((config.minutes or 0) * 60 / step_s), (config.mtbf_minutes or 0) * 60 / step_s
    plan = kills_of(seed, steps, mtbf_steps, config.servers)
    shares = [step / steps for step in plan]
    for arm in arms:
        costs = costs_of(config, trials[arm], intervals[arm])
        laws[arm] = logged("predicted", arm, functools.partial(predicted, config, costs, arm, shares))
    for arm in arms:
        every = laws[arm]["save_every_minutes"] * 60 / step_s
        found = logged("measured", arm, functools.partial(train, arm, steps, every, plan))
        scale = found["useful_s"] / 60 / (config.minutes or 1)  # of a step here to one of the trials
        own = dataclasses.replace(
            config, minutes=(config.minutes or 0) * scale, mtbf_minutes=(config.mtbf_minutes or 0) * scale
        )
        again = predicted(own, costs_of(own, found, steps / every), arm, shares)
        results[arm] = found | {f"predicted_{key}": value for key, value in laws[arm].items()}
        results[arm] |= {f"afterwards_{key}": value for key, value in again.items()}
    return results


def summary(config: Config, rows: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return means over seeds, with 95 % intervals and extremes, and full's mean overhead over that of each arm.

    `predicted`: by equations from the costs of the trials; `afterwards`: from the costs of the arms themselves.
    """
    results: dict[str, Any] = {"seeds": len(rows)}

    def add(key, values):
        results[key], results[f"{key}_half_width"] = paired_interval(values)
        results[f"{key}_min"], results[f"{key}_max"] = min(values), max(values)

    kinds = ("", "predicted_", "afterwards_")
    keys = [f"{kind}{key}" for key in ("overhead_percent", "pls") for kind in kinds]
    keys += [f"{kind}save_every_minutes" for kind in kinds[1:]]
    keys += [f"{part}_percent" for part in ("saving", "tracking", *PARTS)]
    for arm in config.arms:
        each = [row[arm] for row in rows]
        for key in (*keys, "step_ms", "predicted_expected_pls"):
            add(f"{arm}_{key}", [one[key] for one in each])
        results |= {f"{arm}_{key}": sum(one[key] for one in each) for key in ("kills", "saves", "rows_saved")}
        waits = [wait for one in each for wait in one["seconds_to_next_step"]]
        results[f"{arm}_seconds_to_next_step"] = float(np.median(waits)) if waits else None
    for arm in [arm for arm in config.arms if arm != "full"]:
        for kind in kinds:
            key = f"{kind}overhead_percent"
            results[f"{kind}full_over_{arm}"] = results[f"full_{key}"] / results[f"{arm}_{key}"]
            ratios = [row["full"][key] / row[arm][key] for row in rows]
            results |= {f"{kind}full_over_{arm}_min": min(ratios), f"{kind}full_over_{arm}_max": max(ratios)}
        add(f"auc_lost_{arm}", [row["full"]["test_auc"] - row[arm]["test_auc"] for row in rows])
    return results


def table(config: Config, results: Mapping[str, Any]) -> str:
    """Format the overhead of each arm, its parts, and the predictions."""
    columns = {"overhead, %": "{}_overhead_percent", "predicted, %": "{}_predicted_overhead_percent",
               "from its own costs, %": "{}_afterwards_overhead_percent"}  # fmt: skip
    columns |= {f"{part}, %": f"{{}}_{part}_percent" for part in ("saving", "tracking", *PARTS)}
    columns |= {"saved every, min": "{}_predicted_save_every_minutes", "kills": "{}_kills", "PLS": "{}_pls",
                "predicted PLS": "{}_predicted_pls", "AUC lost": "auc_lost_{}", "full over it": "full_over_{}",
                "s to the next step": "{}_seconds_to_next_step", "step, ms": "{}_step_ms"}  # fmt: skip
    return grid(results, "arm", list(config.arms), columns)


def main(config: Config) -> dict:
    """Train what is missing; return the contents of results.json."""
    given, config = config, with_sizes(config, SIZES)
    check(config)
    run = Run("cluster_overhead", given, config.workdir, config.resume)
    with run, Cluster() as cluster:
        for left in run.directory.glob("tmp*"):  # of an arm that was killed
            shutil.rmtree(left, ignore_errors=True)
        rows = [run_seed(run, config, config.seed + place, cluster) for place in range(config.seeds)]
        results = summary(config, rows)
        run.close(results, table(config, results))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
