"""The reference workload with a shadow: one trainer with a peer, and free-running trainers with one core each.

Timed by shadowsync_isolation.py, shadowsync_scaling.py and on_accelerator.py.
"""

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrec.embedding import HostTables, capacity_of
from jaxrec.loop import keep_memory
from jaxrec.prefetch import planned
from jaxrec.shadowsync import (
    Foreground,
    Rule,
    Shadow,
    SyncGroup,
    bmuf,
    easgd,
    model_averaging,
    train_freely,
)
from studies.reference import Job, reference_work, synthetic

RULES: dict[str, Callable[..., Rule]] = {"ma": model_averaging, "bmuf": bmuf, "easgd": easgd}
FORMS = {"easgd": ("symmetric", "sequential"), "ma": ("lerp", "delta"), "bmuf": ("lerp", "delta")}
FORMS_OF_RULES: dict[str, Callable[[], Rule]] = {
    f"{rule}-{form}": functools.partial(RULES[rule], form=form) for rule in FORMS for form in FORMS[rule]
}


class Late:
    """A transport whose rounds begin late, as if a peer or a centre were late: it sleeps before it joins."""

    def __init__(self, transport, seconds: float):
        self.transport, self.seconds, self.ended = transport, seconds, threading.Event()

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def sync_round(self, trainer, before, done):
        """Sleep, then join the round."""
        self.ended.wait(self.seconds)
        return self.transport.sync_round(trainer, before, done)

    def leave(self, trainer, error=None):
        """Leave at once and end any sleep."""
        self.ended.set()
        self.transport.leave(trainer, error)


class TimedTrainer:
    """The reference workload, trained serially."""

    def __init__(self, job: Job):
        keep_memory()
        self.job = job
        self.task, self.params = reference_work(job)
        _, self.batches = synthetic(job)
        self.spec = self.task.spec
        self.state = self.task.init(self.params, job.tables)
        self.capacity: dict[str, int] | None = None

    def run(self, steps: int, synchroniser=None) -> np.ndarray:
        """Seconds of every step.

        With host tables, the rows of a step are written before the next step begins. Steps over device tables are
        dispatched without waiting: only their mean counts, as the last one waits for all.
        """
        times: list[float] = []
        batches = itertools.islice(itertools.cycle(self.batches), steps + 1)
        with contextlib.closing(planned(self.spec, batches, self.capacity)) as pairs:
            _, plans = next(pairs)  # starts the thread, so it is not timed
            self.capacity = capacity_of(plans)
            start = time.perf_counter()
            for batch, plans in pairs:
                self.state, _ = self.task.step(self.state, batch, plans)
                if synchroniser is not None:
                    self.state = synchroniser.exchange(self.state)
                if len(times) == steps - 1:
                    jax.block_until_ready(self.state.dense)
                now = time.perf_counter()
                times.append(now - start)
                start = now
        return np.array(times)


@contextlib.contextmanager
def peer(rule: Rule, transport, params):
    """The other trainer of all-to-all rounds: it joins every round with its parameters and trains nothing."""
    if rule.has_centre:
        yield
        return

    transport.join(1)

    def bring():
        mine = jax.tree.map(lambda x: np.array(x)[None], params)
        with contextlib.suppress(RuntimeError):  # raised once the trainer has left
            while True:
                target, _ = transport.sync_round(1, mine, False)
                mine = rule.merge(mine, mine, target)

    thread = threading.Thread(target=bring, name="peer", daemon=True)
    thread.start()
    try:
        yield
    finally:
        transport.leave(0)
        thread.join()


class Way(NamedTuple):
    """A synchronisation method: none, foreground or shadow."""

    method: str
    pace_seconds: float = 0.0  # of the shadow
    every_steps: int = 5  # of the foreground
    late_seconds: float = 0.0  # how late each round begins


def trainer_turn(trainer: TimedTrainer, rule: Rule, way: Way, steps: int) -> tuple[np.ndarray, float]:
    """Run one synchronisation method for `steps` steps.

    Returns:
      Seconds of each step; the average sync gap in steps.
    """
    if way.method == "none":
        return trainer.run(steps), float("inf")
    transport = SyncGroup(rule, trainer.params, 1 if rule.has_centre else 2).transport
    over: Any = Late(transport, way.late_seconds) if way.late_seconds else transport
    sync: Foreground | Shadow
    if way.method == "foreground":
        sync = Foreground(over, every_steps=way.every_steps)
    else:
        sync = Shadow(over, pace_seconds=way.pace_seconds)
    with peer(rule, transport, trainer.params):
        with sync:
            times = trainer.run(steps, sync)
        return times, sync.average_sync_gap


class Trainers:
    """n trainers in one process that is pinned to n cores."""

    def __init__(self, job: Job, trainers: int, pace_seconds: float):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:trainers])
        of_xla = f"--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count={trainers}"
        os.environ["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} {of_xla}"  # keeps what importing jaxrec has set
        jax.config.update("jax_platforms", "cpu")
        keep_memory()
        self.task, self.params = reference_work(job)
        _, self.batches = synthetic(job)
        self.tables = HostTables.create(self.task.spec, self.task.row_optimizer)
        self.trainers, self.pace_seconds = trainers, pace_seconds
        # Created once, so that their compiled programs are reused; keys are RULE and RULE-FORM.
        self.rules = {name: make() for name, make in {**RULES, **FORMS_OF_RULES}.items()}

    def run(self, way_and_steps: tuple[str, int]) -> dict[str, float]:
        """Measure rates over `steps` steps, from when every trainer has seen all batches once and nothing compiles.

        Args:
          way_and_steps: ('none' or 's_RULE[-FORM]', steps); rounds are back to back, or paced with the suffix '_paced'.
        """
        way, steps = way_and_steps
        synchroniser = None
        if way != "none":
            rule = self.rules[way.removeprefix("s_").removesuffix("_paced")]
            pace = self.pace_seconds if way.endswith("_paced") else 0.0
            synchroniser = SyncGroup(rule, self.params, self.trainers, pace_seconds=pace).trainer
        # Wall and CPU time after every step.
        clocks: list[list[tuple[float, float]]] = [[] for _ in range(self.trainers)]
        first = len(self.batches)

        def note(trainer, step, metrics):
            clocks[trainer].append((time.perf_counter(), time.process_time()))

        def stream(trainer):
            for batch in itertools.cycle(self.batches[trainer:] + self.batches[:trainer]):
                if min(map(len, clocks)) > first + steps:
                    return
                yield batch

        _, figures = train_freely(
            self.task, self.params, self.tables, [stream(i) for i in range(self.trainers)], synchroniser, hook=note
        )
        start, end = max(each[first] for each in clocks), min(each[-1] for each in clocks)
        done = sum(start < clock <= end for each in clocks for clock in each)
        return {
            "steps_per_s": done / (end[0] - start[0]),
            "busy_cores": (end[1] - start[1]) / (end[0] - start[0]),
            "average_sync_gap": float(np.mean(figures.average_sync_gap)),
        }
