"""Pipeline runs with injected failures, for the soak of oac_equivalence.py.

What must hold after each: no pipeline thread is left except a planner blocked by the stream; the raised error is the
injected one or has it in its chain; dense state and tables equal, bit for bit, those of the plain loop at the reported
step; an intact pipeline resumes with the same iterator and reaches the final state of the plain loop, and a broken one
refuses to.
"""

import collections
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrec import BrokenEngine
from jaxrec.embedding import HostTables
from jaxrec.oac import Pipeline
from jaxrec.task import Task
from jaxrec.types import Batch, TrainState

KINDS = (
    "send", "gather", "fetch", "write back", "stream raises", "stream blocks", "callback", "ctrl-c", "snapshot",
    "break",
)  # fmt: skip
LOSES_ROWS = ("fetch", "write back")


class InjectedFailure(Exception):
    """The error injected into a run."""


class Problem(NamedTuple):
    """A training problem with the expected state after every step."""

    fresh_state: Callable[[], TrainState]
    task: Task
    batches: list[Batch]
    states: list[TrainState]  # states of the plain loop after 0, 1, ... batches


class Trap:
    """Raise `error` on call number `at`, counted from 0."""

    def __init__(self, at: int, error: BaseException):
        self.at, self.error, self.calls, self.fired = at, error, itertools.count(), False

    def __call__(self):
        if next(self.calls) == self.at:
            self.fired = True
            raise self.error


class WatchedTables(HostTables):
    """Tables that call functions before reads and writes; these may wait or raise."""

    before_read: Callable[[], object]
    before_write: Callable[[Sequence[int]], object]

    @classmethod
    def of(cls, tables: HostTables, before_read=lambda: None, before_write=lambda shards: None) -> "WatchedTables":
        """Wrap tables; the rows are shared, not copied.

        Args:
          tables: tables to wrap.
          before_read: called on a loader thread before each `read`.
          before_write: (shards) -> anything, called on a writer thread before each `put` and `add`.
        """
        found = cls(tables.spec, tables.layout, tables.shards, tables.directory, tables.puts)
        # The dataclass is frozen.
        found.__dict__.update(before_read=before_read, before_write=before_write)
        return found

    def read(self, plans):
        """See `HostTables`."""
        self.before_read()
        return super().read(plans)

    def put(self, plans, rows, shards=None):
        """See `HostTables`."""
        self.before_write(shards)
        return super().put(plans, rows, shards)

    def add(self, plans, rows, old, shards=None):
        """See `HostTables`."""
        self.before_write(shards)
        return super().add(plans, rows, old, shards)


class FailingStream:
    """Iterator over batches that fails once before batch `at`, then continues: raises by `trap`, or blocks if None."""

    def __init__(self, batches: list[Batch], at: int | None, trap: Trap | None):
        self.batches, self.at, self.trap, self.taken = batches, at, trap, 0
        self.open = threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        if self.taken == self.at and self.trap is not None and not self.trap.fired:
            self.trap()
        if self.taken == self.at and self.trap is None:
            self.open.wait()
        if self.taken == len(self.batches):
            raise StopIteration
        self.taken += 1
        return self.batches[self.taken - 1]


def carries(raised: BaseException | None, injected: BaseException) -> bool:
    """Whether an error is the injected one or has it in its chain of causes and contexts."""
    while raised is not None and raised is not injected:
        raised = raised.__cause__ or raised.__context__
    return raised is injected


def equal(a: TrainState, b: TrainState) -> bool:
    """Whether two states are bitwise equal."""
    return equal_leaves(a.dense, b.dense) and all(equal_shard(a, b, shard) for shard in range(a.tables.spec.shards))


def equal_leaves(a, b) -> bool:
    """Whether the arrays of two trees are bitwise equal."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def equal_shard(a: TrainState, b: TrainState, shard: int) -> bool:
    """Whether one shard of the tables of two states is bitwise equal."""
    left, right = a.tables.shards, b.tables.shards
    return all(np.array_equal(left[n][shard][p], right[n][shard][p]) for n in left for p in left[n][shard])


def threads_left(but: tuple[str, ...] = ()) -> list[str]:
    """Names of live pipeline threads, except those in `but`."""
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("oac-") and name not in but]


def break_one(problem: Problem, kind: str, rng: np.random.Generator) -> tuple[str, list[str]]:
    """Run the pipeline once with one kind of injected failure.

    Returns:
      The kind, followed by '(never came)' if the failure did not trigger; a list of violations.
    """
    number = len(problem.batches)
    at = int(rng.integers(1, number))
    error: BaseException = KeyboardInterrupt() if kind == "ctrl-c" else InjectedFailure(kind)
    trap = Trap({"send": int(rng.integers(0, 2 * number)), "stream raises": 0}.get(kind, at), error)
    in_stream = at if kind.startswith("stream") else None
    stream = FailingStream(problem.batches, in_stream, trap if kind == "stream raises" else None)
    pipeline = _pipeline(problem, kind, trap, rng)
    last = int(rng.integers(1, at + 1)) if kind == "stream blocks" else at
    raised = _run(pipeline, stream, kind, at, last, trap)
    wrong: list[str] = []

    def check(holds, words):
        if not holds:
            wrong.append(f"{kind}: {words}")

    check(not threads_left(("oac-plan",) if kind == "stream blocks" else ()), f"threads left: {threads_left()}")
    fired = trap.fired or kind in ("stream blocks", "break")
    check(carries(raised, error) if trap.fired else raised is None, f"came out: {raised!r}")
    notes = getattr(error, "__notes__", [])
    if trap.fired and any(f"in stage '{stage}'" in note for stage in LOSES_ROWS for note in notes):
        _check_broken(problem, pipeline, check)
        return kind, wrong
    if kind in ("stream raises", "callback", "ctrl-c", "break"):
        wanted = at if kind in ("stream raises", "break") else trap.at + 1
        check(pipeline.step == wanted, f"stands at step {pipeline.step}, wanted {wanted}")
    check(equal(pipeline.state, problem.states[pipeline.step]), f"differs from the plain loop at step {pipeline.step}")
    _go_on(problem, pipeline, stream, kind, check)
    return (kind if fired else f"{kind} (never came)"), wrong


def _pipeline(problem, kind, trap, rng):
    threads: dict[str, Any] = {name: int(rng.integers(1, 4)) for name in ("loaders", "fetchers")}

    def send(tree, placement):
        if kind == "send":
            trap()
        return jax.device_put(tree, placement)

    def fetch(tree):
        if kind == "fetch":
            trap()
        return jax.tree.map(np.asarray, tree)

    state, traps = problem.fresh_state(), {}
    if kind == "gather":
        traps = {"before_read": trap}
    elif kind == "write back":
        traps = {"before_write": lambda shards: trap()}
    return Pipeline(
        problem.task, state._replace(tables=WatchedTables.of(state.tables, **traps)),
        window=int(rng.integers(1, 7)), send=send, fetch=fetch, **threads,
    )  # fmt: skip


def _run(pipeline, stream, kind, at, last, trap):
    """Train until the failure, or until the loop breaks; return the raised error, or None."""

    def fail(info):
        if kind == "callback":
            trap()

    def save(state):
        trap.fired = True
        raise trap.error

    try:
        with pipeline:
            pipeline.enter(fail)
            if kind == "snapshot":
                pipeline.snapshot_at(at, save)
            for _ in pipeline.run(stream):
                if kind == "ctrl-c":
                    trap()
                if kind in ("stream blocks", "break") and pipeline.step == last:
                    break
    except BaseException as error:
        return error
    return None


def _check_broken(problem, pipeline, check):
    for call in (lambda: pipeline.run(problem.batches), pipeline.drain):
        try:
            call()
        except BrokenEngine as broken:
            check(broken.dense_step == int(pipeline.state.dense.step), f"says dense step {broken.dense_step}")
            for shard, step in enumerate(broken.table_steps):
                check(step is not None, f"says nothing of shard {shard}")
                if step is not None:
                    stands = pipeline.state._replace(tables=pipeline.tables)
                    check(equal_shard(stands, problem.states[step], shard), f"shard {shard} is not at step {step}")
        else:
            check(False, "broken, and did not refuse")


def _go_on(problem, pipeline, stream, kind, check):
    if kind == "stream blocks":
        if threads_left():  # else the run ended before the planner reached the blocking batch
            try:
                pipeline.run(stream)
            except ValueError as error:
                check("still waits inside this iterator" in str(error), f"refused with {error}")
            else:
                check(False, "took an iterator in which a planner waits")
        planners = [thread for thread in threading.enumerate() if thread.name == "oac-plan"]
        stream.open.set()
        for planner in planners:
            planner.join(30)
        check(not threads_left(), "the planner did not end when its stream went on")
    with pipeline:
        for _ in pipeline.run(stream):
            pass
    check(pipeline.step == len(problem.batches), f"went on to step {pipeline.step} of {len(problem.batches)}")
    check(equal(pipeline.state, problem.states[-1]), "went on to other bits than the plain loop's")
    check(not threads_left(), f"threads left at the end: {threads_left()}")


class Tally:
    """Counts of runs by kind of failure, and the violations found."""

    def __init__(self):
        self.runs: collections.Counter = collections.Counter()
        self.wrong: list[str] = []

    def add(self, kind: str, wrong: list[str]) -> None:
        """Count one run and add its violations."""
        self.runs[kind] += 1
        self.wrong += wrong
