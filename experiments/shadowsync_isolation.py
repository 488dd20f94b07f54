"""Training does not wait for the shadow: rate without synchronisation, with it, with it blocked, and in the foreground.

    python experiments/shadowsync_isolation.py                     3 minutes
    python experiments/shadowsync_isolation.py --rule easgd

One trainer trains the reference work (DLRM-Kaggle of throughput.py) over host tables; regime: free-running. It meets
one peer, which only synchronises and trains nothing, through the same transport as any trainer. In every round of the
benchmark all ways take turns: none; shadow at the pace `--pace-seconds`; shadow whose transport blocks for 3 seconds in
each round; foreground, every `--every-steps` steps. `average_sync_gap` is steps for each round folded in: with a shadow
it is an outcome, in the foreground it is k. The curve runs through several paces.
"""

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
import throughput
from contract import Flags, Run, command_line, plot
from tqdm import tqdm

from jaxrec.embedding import HostTables, capacity_of
from jaxrec.loop import keep_memory, planned
from jaxrec.shadowsync import AllToAll, Centre, Foreground, Rule, Shadow, bmuf, easgd, model_averaging
from jaxrec.step import init_state, make_train_step

RULES: dict[str, Callable[..., Rule]] = {"ma": model_averaging, "bmuf": bmuf, "easgd": easgd}


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the benchmark."""

    rule: Literal["ma", "bmuf", "easgd"] = "ma"
    pace_seconds: float = 0.2
    every_steps: int = 5
    rows: int = 1_000_000
    batch_size: int = 2048


class Blocking:
    """A transport that is stuck for a while in each round."""

    def __init__(self, transport, seconds: float):
        self.transport, self.seconds, self.ended = transport, seconds, threading.Event()

    def meet(self, trainer, before, done):
        """Late."""
        self.ended.wait(self.seconds)
        return self.transport.meet(trainer, before, done)

    def leave(self, trainer):
        """At once."""
        self.ended.set()
        self.transport.leave(trainer)


class Trainer:
    """The reference work, one step after the other."""

    def __init__(self, config: Config):
        keep_memory()
        reference = throughput.Config(rows=config.rows, batch_size=config.batch_size, seed=config.seed)
        self.spec, loss, self.params, optimizer, rows = throughput.reference_work(reference)
        clicks, _ = throughput.synthetic(dataclasses.replace(reference, batch_size=1))
        self.batches = list(clicks.stream(config.batch_size, batches=16))
        self.state = init_state(self.params, optimizer, HostTables.create(self.spec, rows))
        self.step = make_train_step(self.spec, loss, optimizer, rows)
        self.capacity: dict[str, int] | None = None

    def run(self, steps: int, synchroniser=None) -> np.ndarray:
        """Seconds of every step; the rows of a step are written before the next one begins."""
        times = []
        batches = itertools.islice(itertools.cycle(self.batches), steps + 1)
        with contextlib.closing(planned(self.spec, batches, self.capacity)) as pairs:
            _, plans = next(pairs)  # not timed: it starts the thread
            self.capacity = capacity_of(plans)
            start = time.perf_counter()
            for batch, plans in pairs:
                self.state, _ = self.step(self.state, plans, batch)
                if synchroniser is not None:
                    self.state = synchroniser.exchange(self.state)
                now = time.perf_counter()
                times.append(now - start)
                start = now
        return np.array(times)


def transport_of(rule: Rule, trainer: Trainer):
    """Two trainers all to all, or a centre."""
    return Centre(rule, trainer.params) if rule.has_centre else AllToAll(rule, 2)


@contextlib.contextmanager
def peer(rule: Rule, transport, params):
    """The other trainer of an all-to-all round: brings its parameters whenever there is a round."""
    if rule.has_centre:
        yield
        return

    def bring():
        mine = jax.tree.map(lambda x: np.array(x)[None], params)
        with contextlib.suppress(RuntimeError):  # the trainer has left
            while True:
                target, _ = transport.meet(1, mine, False)
                mine = rule.merge(mine, mine, target)

    thread = threading.Thread(target=bring, name="peer", daemon=True)
    thread.start()
    try:
        yield
    finally:
        transport.leave(0)
        thread.join()


def turn(trainer: Trainer, config: Config, rule: Rule, way: str, steps: int, pace: float) -> tuple[np.ndarray, float]:
    """One turn of one way: (seconds of each step, average sync gap)."""
    if way == "none":
        return trainer.run(steps), float("inf")
    transport = transport_of(rule, trainer)
    with peer(rule, transport, trainer.params):
        if way == "foreground":
            foreground = Foreground(rule, transport, every_steps=config.every_steps)
            return trainer.run(steps, foreground), foreground.average_sync_gap
        over: Any = Blocking(transport, 3.0) if way == "blocked" else transport
        with Shadow(rule, over, pace_seconds=pace) as shadow:
            times = trainer.run(steps, shadow)
        return times, shadow.average_sync_gap


def main(config: Config) -> dict:
    """All ways in turns; returns what results.json holds."""
    run = Run("shadowsync_isolation", config, config.workdir)
    rounds, steps = {"smoke": (2, 8), "default": (8, 40), "paper": (30, 100)}[config.preset]
    if config.preset == "smoke":
        config = dataclasses.replace(config, rows=20_000, batch_size=256)
    trainer = Trainer(config)
    rule = RULES[config.rule]()  # one for all turns: its merge is compiled once
    paces = sorted({0.0, config.pace_seconds / 2, config.pace_seconds, 2 * config.pace_seconds})
    ways = [("none", 0.0), ("foreground", 0.0), ("blocked", 0.0)] + [("shadow", pace) for pace in paces]
    for way, pace in ways:
        turn(trainer, config, rule, way, 3, pace)  # compiles
    seconds: dict[tuple[str, float], list[float]] = {way: [] for way in ways}
    longest: dict[tuple[str, float], list[float]] = {way: [] for way in ways}
    gaps: dict[tuple[str, float], list[float]] = {way: [] for way in ways}
    for number in tqdm(range(rounds), unit="round", disable=None):
        for way, pace in ways:
            times, gap = turn(trainer, config, rule, way, steps, pace)
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
    results |= throughput.ratio("shadow_over_no_sync", none / np.array(seconds[chosen]))
    results["average_sync_gap"] = float(np.median(gaps[chosen]))
    results |= throughput.ratio("blocked_over_no_sync", none / np.array(seconds["blocked", 0.0]))
    results["blocked_longest_step_over_median"] = float(np.median(longest["blocked", 0.0]))
    results["none_longest_step_over_median"] = float(np.median(longest["none", 0.0]))
    results |= throughput.ratio("foreground_over_no_sync", none / np.array(seconds["foreground", 0.0]))
    results["foreground_sync_gap"] = float(config.every_steps)
    curve = sorted(
        (float(np.median(gaps["shadow", pace])), float(np.median(none / np.array(seconds["shadow", pace]))))
        for pace in paces
    )
    for (gap, ratio), pace in zip(curve, paces, strict=True):
        results[f"sync_gap_at_pace_{pace}_s"], results[f"over_no_sync_at_pace_{pace}_s"] = gap, ratio
    lines = {"shadow": ([gap for gap, _ in curve], [ratio for _, ratio in curve])}
    plot(run.directory / "rate_over_gap.png", {"step rate over that without sync": lines}, "average sync gap, steps")
    run.close(results)
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
