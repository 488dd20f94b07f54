"""The stream of a run: the caller's iterator, what was taken from it and not trained, and its plans.

Legend: U padded unique rows per shard.
"""

import collections
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

from jaxrec.boundary import own_batch
from jaxrec.data.loader import prefetch
from jaxrec.embedding import EmbeddingSpec, capacity_of, plan
from jaxrec.types import Batch

END = object()  # what `take` returns when the stream has ended


class _Raised(NamedTuple):
    """What a stream raised when nobody listened any more, in its place among the batches."""

    error: BaseException


class Stream:
    """One iterator of batches; what a run took from it and did not train comes first in the next
    run.

    Args:
      iterator: of Batch; `next` of it is called by one thread at a time, and may block.
    """

    def __init__(self, iterator: Iterator):
        self.iterator: Any = iterator
        self._weak = _weak(iterator)
        self.waiting: collections.deque = collections.deque()
        self.free = threading.Event()  # no planner is inside
        self.free.set()

    def take(self) -> Any:
        """The next batch, with arrays of its own; END when there is none."""
        taken = self.waiting.popleft() if self.waiting else next(self.iterator, END)
        if isinstance(taken, _Raised):
            raise taken.error
        # A loader may fill the same arrays again for the next batch.
        return own_batch(taken) if isinstance(taken, Batch) else taken

    def give_back(self, taken: Any) -> None:
        """What was taken and is not wanted any more: a batch, or an error that the stream
        raised."""
        if taken is not END:
            self.waiting.append(_Raised(taken) if isinstance(taken, BaseException) else taken)

    def rest(self) -> None:
        """No run uses the stream: what waits is kept as long as somebody else keeps the
        iterator."""
        if self._weak is not None or (self.free.is_set() and not self.waiting):
            self.iterator = None

    def is_of(self, iterator: Iterator) -> bool:
        """Whether it is the stream of this iterator; if so, it can be used again."""
        if (self._weak() if self._weak is not None else self.iterator) is not iterator:
            return False
        self.iterator = iterator
        return True

    def may_come_back(self) -> bool:
        """Whether it matters that somebody comes back with the iterator."""
        return self._weak() is not None if self._weak is not None else bool(self.waiting) or not self.free.is_set()


class Streams:
    """The streams of a pipeline's runs that may come back: of iterators that live, and of those
    that do not tell whether they live (of `map`, `zip`, a list) the last, and all of which batches
    wait or in which a planner does."""

    def __init__(self):
        self._known: list[Stream] = []

    def of(self, batches: Iterable, patience_seconds: float) -> Stream:
        """The stream of an iterable; the one of before, if it is the same iterator again.

        Args:
          batches: an iterable of Batch.
          patience_seconds: how long a planner that was left inside the iterator may take to come
            out of it.

        Raises:
          ValueError: no iterable of batches; a planner that was left still waits inside the
            iterator.
        """
        if isinstance(batches, Batch):
            raise ValueError("run wants an iterable of batches, and was given one Batch: run([batch]).")
        try:
            iterator = iter(batches)
        except TypeError as error:
            raise ValueError(f"run wants an iterable of Batch, and was given a {type(batches).__name__}.") from error
        stream = next((known for known in self._known if known.is_of(iterator)), None) or Stream(iterator)
        if not stream.free.wait(patience_seconds):
            raise ValueError(
                "the planner of an earlier run still waits inside this iterator for a batch: let the iterator return "
                "first (nothing of it is lost then), or give another one."
            )
        self._known = [*(known for known in self._known if known is not stream and known.may_come_back()), stream]
        return stream


def _weak(iterator):
    try:
        return weakref.ref(iterator)
    except TypeError:
        return None


def planned(spec: EmbeddingSpec, batches: Iterable, capacity=None, depth: int = 2) -> Generator[tuple, None, None]:
    """Plans batches in a thread, ahead of the step: plans depend on ids only, never on parameters.

    Args:
      spec: the tables and lookups.
      batches: Batch after Batch, of one size.
      capacity: {stack: U} to begin with; it grows when a batch does not fit.
      depth: how many batches to be ahead.

    Yields:
      (batch, {stack: Plan}). Close the generator (or exhaust it) to end the thread.

    Raises:
      ValueError: as `plan`; what comes is no Batch.
    """
    return prefetch(_plan_each(spec, batches, capacity), depth)


def _plan_each(spec, batches, capacity):
    for batch in batches:
        # Plans run ahead, and a loader may fill the same arrays again.
        batch = own_batch(_batch(batch, "`planned`"))
        plans = plan(spec, batch.ids, capacity)
        capacity = capacity_of(plans)
        yield batch, plans


def planned_of(stream, spec, taken):
    """Pairs of a stream, in the thread that reads it; what could not be planned does not come again
    with the stream."""
    capacity = None
    while (batch := stream.take()) is not END:
        plans = plan(spec, _batch(batch, "a run").ids, capacity)
        capacity = capacity_of(plans)
        # Before it is handed over: the run takes it off this list when its step begins.
        taken.append(batch)
        yield batch, plans


def _batch(batch, who):
    if not isinstance(batch, Batch):
        raise ValueError(f"{who} makes the plans itself from Batch after Batch, but got a {type(batch).__name__}.")
    return batch


def in_pairs(batches):
    """The pairs of an iterable, each looked at before a step is given it."""
    for pair in batches:
        if isinstance(pair, Batch) or not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                f"a (Batch, {{stack: Plan}}) pair is wanted, got a {type(pair).__name__}: iterate over "
                "planned(spec, batches)."
            )
        yield pair
