"""Runs of the pipeline that are broken on purpose, for the soak of oac_equivalence.py.

What must hold after each: no thread is left but a planner that the stream blocks; the error that
comes out is the one injected, or carries it; dense state and tables stand at the step that is said,
bit for bit as in the plain loop; a pipeline that is whole goes on with the same iterator to the
plain loop's end, and a broken one refuses.
"""

import collections
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrec.embedding import HostTables
from jaxrec.oac import BrokenPipeline, Pipeline
from jaxrec.types import Batch, TrainState

KINDS = (
    "send", "gather", "fetch", "write back", "stream raises", "stream blocks", "hook", "ctrl-c", "cut", "break",
)  # fmt: skip
LOSES_ROWS = ("fetch", "write back")


class InjectedFailure(Exception):
    """What a case breaks a run with."""


class Problem(NamedTuple):
    """What is trained, and what every step of it must give."""

    fresh_state: Callable[[], TrainState]
    update: Callable
    batches: list[Batch]
    states: list[TrainState]  # after 0, 1, ... batches of the plain loop


class Trap:
    """Raises its error when it is passed for the n-th time."""

    def __init__(self, at: int, error: BaseException):
        self.at, self.error, self.calls, self.fired = at, error, itertools.count(), False

    def __call__(self):
        if next(self.calls) == self.at:
            self.fired = True
            raise self.error


class WatchedTables(HostTables):
    """Tables that call functions before they are read and written, which may wait or raise."""

    before_read: Callable[[], object]
    before_write: Callable[[Sequence[int]], object]

    @classmethod
    def of(cls, tables: HostTables, before_read=lambda: None, before_write=lambda shards: None) -> "WatchedTables":
        """The same rows, watched.

        Args:
          tables: the rows.
          before_read: called by a loader, as `read` is.
          before_write: (shards) -> anything, called by a writer, as `put` and `add` are.
        """
        found = cls(tables.spec, tables.layout, tables.shards, tables.directory, tables.steps)
        # The class is frozen.
        found.__dict__.update(before_read=before_read, before_write=before_write)
        return found

    def read(self, plans):
        """As `HostTables`."""
        self.before_read()
        return super().read(plans)

    def put(self, plans, rows, shards=None):
        """As `HostTables`."""
        self.before_write(shards)
        return super().put(plans, rows, shards)

    def add(self, plans, rows, old, shards=None):
        """As `HostTables`."""
        self.before_write(shards)
        return super().add(plans, rows, old, shards)


class FailingStream:
    """An iterator of batches that raises or blocks once, before the batch `at`, and then goes
    on."""

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
    """Whether an error is the injected one, or has it in the chain of what it came from."""
    while raised is not None and raised is not injected:
        raised = raised.__cause__ or raised.__context__
    return raised is injected


def equal(a: TrainState, b: TrainState) -> bool:
    """Whether two states agree to the last bit."""
    return equal_leaves(a.dense, b.dense) and all(equal_shard(a, b, shard) for shard in range(a.tables.spec.shards))


def equal_leaves(a, b) -> bool:
    """Whether the arrays of two trees agree to the last bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def equal_shard(a: TrainState, b: TrainState, shard: int) -> bool:
    """Whether one shard of two states' tables agrees to the last bit."""
    left, right = a.tables.shards, b.tables.shards
    return all(np.array_equal(left[n][shard][p], right[n][shard][p]) for n in left for p in left[n][shard])


def threads_left(but: tuple[str, ...] = ()) -> list[str]:
    """Names of the pipeline's threads that are alive."""
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("oac-") and name not in but]


def break_one(problem: Problem, kind: str, rng: np.random.Generator) -> tuple[str, list[str]]:
    """One run that is broken by one kind of failure: (kind, or kind and 'missed' if it never came;
    what was wrong)."""
    number = len(problem.batches)
    at = int(rng.integers(1, number))
    error: BaseException = KeyboardInterrupt() if kind == "ctrl-c" else InjectedFailure(kind)
    trap = Trap({"send": int(rng.integers(0, 2 * number)), "stream raises": 0}.get(kind, at), error)
    in_stream = at if kind.startswith("stream") else None
    stream = FailingStream(problem.batches, in_stream, trap if kind == "stream raises" else None)
    pipeline, skips = _pipeline(problem, kind, trap, rng)
    last = int(rng.integers(1, at + 1)) if kind == "stream blocks" else at
    raised = _run(pipeline, stream, kind, at, last, trap)
    wrong: list[str] = []

    def check(holds, words):
        if not holds:
            wrong.append(f"{kind}: {words}")

    check(not threads_left(("oac-plan",) if kind == "stream blocks" else ()), f"threads left: {threads_left()}")
    fired = trap.fired or kind in ("stream blocks", "break")
    check(carries(raised, error) if trap.fired else raised is None, f"came out: {raised!r}")
    # With `skip_rewritten` a fetcher sends too: which rows to bring.
    notes = getattr(error, "__notes__", [])
    if trap.fired and any(f"in stage '{stage}'" in note for stage in LOSES_ROWS for note in notes):
        _check_broken(problem, pipeline, skips, check)
        return kind, wrong
    if kind in ("stream raises", "hook", "ctrl-c", "break"):
        wanted = at if kind in ("stream raises", "break") else trap.at + 1
        check(pipeline.step == wanted, f"stands at step {pipeline.step}, wanted {wanted}")
    check(equal(pipeline.state, problem.states[pipeline.step]), f"differs from the plain loop at step {pipeline.step}")
    _go_on(problem, pipeline, stream, kind, check)
    return (kind if fired else f"{kind} (never came)"), wrong


def _pipeline(problem, kind, trap, rng):
    skips: dict[str, Any] = {name: bool(rng.integers(2)) for name in ("skip_stale_reads", "skip_rewritten")}
    # A write is skipped only when the batches of the window are known: training waits too.
    if kind == "stream blocks":
        skips["skip_rewritten"] = False
    validation = "planned" if any(skips.values()) else str(rng.choice(["planned", "device"]))
    threads: dict[str, Any] = {name: int(rng.integers(1, 4)) for name in ("loaders", "fetchers", "writers")}

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
        state._replace(tables=WatchedTables.of(state.tables, **traps)), problem.update,
        window=int(rng.integers(1, 7)), validation=validation, send=send, fetch=fetch, **threads, **skips,
    ), skips["skip_rewritten"]  # fmt: skip


def _run(pipeline, stream, kind, at, last, trap):
    """Trains until the failure, or until the body leaves; returns what came out."""

    def hook(state, step, plans, metrics):
        if kind == "hook":
            trap()
        return state

    def save(state):
        trap.fired = True
        raise trap.error

    try:
        with pipeline:
            if kind == "cut":
                pipeline.cut(at, save)
            for _ in pipeline.run(stream, [hook]):
                if kind == "ctrl-c":
                    trap()
                if kind in ("stream blocks", "break") and pipeline.step == last:
                    break
    except BaseException as error:
        return error
    return None


def _check_broken(problem, pipeline, skips, check):
    for call in (lambda: pipeline.run(problem.batches), pipeline.drain):
        try:
            call()
        except BrokenPipeline as broken:
            check(broken.dense_step == int(pipeline.state.dense.step), f"says dense step {broken.dense_step}")
            for shard, step in enumerate(broken.table_steps):
                check(step is not None or skips, f"says nothing of shard {shard}")
                if step is not None:
                    stands = pipeline.state._replace(tables=pipeline.tables)
                    check(equal_shard(stands, problem.states[step], shard), f"shard {shard} is not at step {step}")
        else:
            check(False, "broken, and did not refuse")


def _go_on(problem, pipeline, stream, kind, check):
    if kind == "stream blocks":
        if threads_left():  # else it was left before it came to the place
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
    """How often each kind of failure came, and what was wrong."""

    def __init__(self):
        self.runs: collections.Counter = collections.Counter()
        self.wrong: list[str] = []

    def add(self, kind: str, wrong: list[str]) -> None:
        """Counts one run."""
        self.runs[kind] += 1
        self.wrong += wrong
