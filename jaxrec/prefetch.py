"""Plans made ahead of the step, in a thread: they depend on ids alone, never on parameters. And the stream of a run:
the caller's iterator, and what was taken from it and not trained.
"""

import collections
import queue
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jaxrec.data.loader import prefetch
from jaxrec.embedding import EmbeddingSpec, capacity_of, plan
from jaxrec.interrupts import uninterrupted
from jaxrec.types import Batch

END = object()  # what `take` returns when the stream has ended


class _Raised(NamedTuple):
    """What a stream raised when the run had left it, in its place among the batches."""

    error: BaseException


class Stream:
    """An iterator of batches; what a run took from it and did not train comes first in the next run over it.

    Args:
      iterator: of Batch; `next` of it is called by one thread at a time, and may block.
    """

    def __init__(self, iterator: Iterator):
        self.iterator = iterator
        self.waiting: collections.deque = collections.deque()
        self.free = threading.Event()  # no planner is inside
        self.free.set()

    def take(self) -> Any:
        """The next batch, with arrays of its own; END when there is none."""
        taken: Any = self.waiting.popleft() if self.waiting else next(self.iterator, END)
        if isinstance(taken, _Raised):
            raise taken.error
        return own_batch(taken)

    def give_back(self, taken: Any, first: bool = False) -> None:
        """What was taken and is not wanted any more, a batch or an error that the stream raised:
        after what waits already, or in front of it."""
        if taken is not END:
            put = self.waiting.appendleft if first else self.waiting.append
            put(_Raised(taken) if isinstance(taken, BaseException) else taken)


class Streams:
    """The stream of an engine's last run, in case the next one is over the same iterator."""

    def __init__(self):
        self._last = Stream(iter(()))

    def of(self, batches: Iterable, patience_seconds: float) -> Stream:
        """The stream of an iterable; that of the run before, if it is the same iterator again.

        Args:
          batches: an iterable of Batch.
          patience_seconds: how long a planner that was left inside the iterator may take to come
            out of it.

        Raises:
          ValueError: a planner that was left still waits inside the iterator.
        """
        iterator = iter(batches)
        if self._last.iterator is not iterator:
            self._last = Stream(iterator)
        if not self._last.free.wait(patience_seconds):
            raise ValueError(
                "the planner of an earlier run still waits inside this iterator for a batch: let the iterator return "
                "first (nothing of it is lost then), or give another one."
            )
        return self._last


def own_batch(batch: Batch) -> Batch:
    """A batch with host arrays of its own, as a loader may fill the same arrays again for the next one."""
    return jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, batch)


_AHEAD = 3  # batches, with the one that is in work


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
      ValueError: as `plan`.
    """
    return prefetch(_plan_each(spec, batches, capacity), depth)


def _plan_each(spec, batches, capacity):
    for batch in batches:
        batch = own_batch(batch)
        plans = plan(spec, batch.ids, capacity)
        capacity = capacity_of(plans)
        yield batch, plans


def in_pairs(batches: Iterable) -> Generator[tuple, None, None]:
    """The pairs of an iterable; batches without their plans are refused by name."""
    for pair in batches:
        if isinstance(pair, Batch) or len(pair) != 2:
            raise ValueError(
                f"a (Batch, {{stack: Plan}}) pair is wanted, got a {type(pair).__name__}: iterate over "
                "planned(spec, batches)."
            )
        yield pair


class PlanPrefetcher:
    """The batches of a stream with their plans, made in a thread; leaving it never waits for the stream.

    What was taken from the stream and not trained goes back to it, in its place, errors too: to the run that goes on
    with the same iterator nothing was read ahead.

    Args:
      stream: no other thread takes from it meanwhile.
      spec: of the tables.
      capacity: {stack: U} to begin with, or None.
    """

    def __init__(self, stream: Stream, spec: EmbeddingSpec, capacity: Mapping[str, int] | None = None):
        self._stream, self._spec, self._capacity = stream, spec, capacity
        self._taken: collections.deque = collections.deque()  # batches and errors, until `forget`
        # Both are of C, and hold no lock that a Ctrl-C could leave held.
        self._made: queue.SimpleQueue = queue.SimpleQueue()  # (pair, error) of what is taken, in order
        self._room: queue.SimpleQueue = queue.SimpleQueue()  # a token for each batch that may be taken
        self._inside = self._left = False  # whether the thread is in the stream; whether no more is wanted
        self._lock = threading.RLock()  # the collector may leave a run at any line, also of the thread itself
        for _ in range(_AHEAD):
            self._room.put(None)
        self._thread = threading.Thread(target=self._plan_all, name="plan", daemon=True)
        stream.free.clear()
        try:
            self._thread.start()
        except BaseException:
            stream.free.set()
            raise

    def __iter__(self) -> Iterator[tuple]:
        """Yields (Batch, {stack: Plan}); raises what the stream or a plan raised, in its place."""
        while True:
            pair, error = self._made.get()
            if error is not None:
                self.forget()
                raise error
            if pair is None:
                return
            self._room.put(None)
            yield pair

    def forget(self) -> None:
        """The oldest batch counts as trained, or as refused: it does not come again."""
        self._taken.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Ends the thread, but for one that the stream blocks: it gives back what it brings when it wakes."""
        with uninterrupted():
            with self._lock:
                self._left, inside = True, self._inside
            self._room.put(None)
            if not inside and self._thread is not threading.current_thread():
                self._thread.join()
            with self._lock:
                # In front of what a thread that was inside may have given back by now.
                for taken in reversed(self._taken):
                    self._stream.give_back(taken, first=True)
                self._taken.clear()

    def _plan_all(self):
        try:
            while self._enter_stream() and (taken := self._take()) is not END:
                plans = plan(self._spec, taken.ids, self._capacity)
                self._capacity = capacity_of(plans)
                self._made.put(((taken, plans), None))
            self._made.put((None, None))
        except BaseException as error:
            self._keep(error)
            self._made.put((None, error))
        finally:
            self._stream.free.set()

    def _enter_stream(self):
        self._room.get()
        with self._lock:
            self._inside = not self._left
            return self._inside

    def _take(self):
        """The next batch, kept until it is trained; END if there is none, or it is not wanted any more."""
        try:
            taken = self._stream.take()
        except BaseException as error:
            taken = error
        with self._lock:
            self._inside = False
            if self._left:
                self._stream.give_back(taken)
                return END
            if taken is not END:
                self._taken.append(taken)
        if isinstance(taken, BaseException):
            raise taken
        return taken

    def _keep(self, error):
        # In the place of its batch: what cannot be planned does not come again, and the error is told once.
        with self._lock:
            self._taken[-1] = error
