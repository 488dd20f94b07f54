"""Planning ahead of the step, in a thread, and the batch stream of a run.

Plans depend on ids only, never on parameters. A stream wraps the caller's iterator and keeps the batches that were
taken from it but not trained.
"""

import collections
import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jaxrec.embedding import EmbeddingSpec, capacity_of, checked_plan, plan, unchecked_plan
from jaxrec.interrupts import next_of, raise_deferred, uninterrupted
from jaxrec.sharding import to_device
from jaxrec.types import Batch, Plan
from jaxrec.validate import check_weight

END = object()  # returned by `take` at the end of the stream


def result_or_error(function: Callable):
    """Return the result of a function, or the exception it raises."""
    try:
        return function()
    except BaseException as error:
        return error


class _Raised(NamedTuple):
    """An error in the line of a stream, to be raised in order with the batches."""

    error: BaseException


class Stream:
    """An iterator of batches, and the line of batches taken from it that no run has accepted, the oldest first.

    A batch leaves the line only when a run accepts it, so a run that is left meanwhile leaves it in its place.
    One thread at a time advances the iterator, whose `next` may block.
    """

    def __init__(self, iterator: Iterator):
        self.iterator = iterator
        self._line: collections.deque = collections.deque()
        self.free = threading.Event()  # set while no planner thread is in the iterator
        self.free.set()

    def take(self) -> Any:
        """Return the first batch in line, a copy of the iterator's next one if none waits; it stays until `accept`.

        Returns END at the end of the iterator, which `accept` must not follow; raises an error of the iterator, which
        stands in the line like a batch.
        """
        if not self._line:
            taken = result_or_error(lambda: jax.tree.map(_copy, next(self.iterator, END)))
            if taken is END:
                return END
            if not isinstance(taken, (Batch, BaseException)):
                taken = ValueError(
                    f"the stream has given a {type(taken).__name__}, where a Batch is expected: iterate over batches."
                )
            self._line.append(_in_line(taken))
        first = self._line[0]
        if isinstance(first, _Raised):
            raise first.error
        return first

    def accept(self) -> None:
        """Remove the batch or error that `take` gave from the line: the run trains it or returns it."""
        self._line.popleft()

    def give_back(self, taken: Sequence[Any]) -> None:
        """Return untrained batches, and errors to be raised in place of some, to the front of the line in order."""
        self._line.extendleft(map(_in_line, reversed(taken)))


def _in_line(taken):
    return _Raised(taken) if isinstance(taken, BaseException) else taken


def _copy(leaf):
    # A loader may reuse its arrays for the next batch.
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


_AHEAD = 3  # batches taken from the stream ahead of training, including the one being planned


def in_pairs(batches: Iterable) -> Generator[tuple, None, None]:
    """Yield the (Batch, {stack: Plan}) pairs of an iterable; raise ValueError for anything else."""
    for pair in batches:
        if isinstance(pair, Batch) or len(pair) != 2:
            raise ValueError(
                f"a (Batch, {{stack: Plan}}) pair is expected, got a {type(pair).__name__}: iterate over "
                "planned(spec, batches)."
            )
        yield pair


def on_one_gpu(mesh: jax.sharding.Mesh | None) -> bool:
    """Return whether all devices, or those of a mesh, are one GPU, which plans faster than the host.

    Several would plan together, and might run the plans of this thread and the steps of another in different orders.
    """
    devices = list(mesh.devices.flat) if mesh else jax.devices()
    return len(devices) == 1 and devices[0].platform == "gpu"


class PlanPrefetcher:
    """Context manager that plans the batches of a stream in a thread; leaving it never waits for the stream.

    Untrained batches and errors are returned to the stream in order, so that the next run over the same iterator misses
    nothing. No other thread uses the stream meanwhile.

    A GPU is sent the batches and plans them (`sends`), some steps ahead of their training. Whoever iterates then reads
    how many rows a batch has just before its step, when that is long known: neither it nor the GPU waits, and no batch
    is trained with rows left out.
    """

    def __init__(
        self,
        stream: Stream,
        spec: EmbeddingSpec,
        capacity: Mapping[str, int] | None = None,
        sends: bool = False,
    ):
        self._stream, self._spec, self._capacity, self._sends = stream, spec, capacity, sends
        self._taken: collections.deque = collections.deque()  # batches and errors, until `forget`
        # SimpleQueue is implemented in C: it has no Python lock that a Ctrl-C could leave held.
        self._made: queue.SimpleQueue = queue.SimpleQueue()  # (pair, error) in stream order
        self._peeked: tuple | None = None  # taken out of `_made` by `peek`
        self._room: queue.SimpleQueue = queue.SimpleQueue()  # one token per batch that may be taken
        self._inside = self._left = False  # thread is in the stream; context was left
        self._lock = threading.RLock()  # reentrant: garbage collection may end a run at any line, even in the thread
        for _ in range(_AHEAD):
            self._room.put(None)
        self._thread = threading.Thread(target=self._plan_all, name="plan", daemon=True)

    def __iter__(self) -> Iterator[tuple]:
        """Yield (Batch, {stack: Plan}); raise errors of the stream or of planning in stream order."""
        while True:
            pair, error = self._peeked or self._checked(*next_of(self._made))
            self._peeked = None
            if error is not None:
                self.forget()
                raise error
            if pair is None:
                return
            self._room.put(None)
            yield pair

    def peek(self) -> dict[str, Plan] | None:
        """Return the plans that are yielded next, if they are made already; None if not, or at the end."""
        with contextlib.suppress(queue.Empty):
            self._peeked = self._peeked or self._checked(*self._made.get_nowait())
        return self._peeked[0][1] if self._peeked and self._peeked[0] else None

    def _checked(self, pair, error):
        if not (self._sends and pair):
            return pair, error
        batch, plans = pair
        try:
            plans = checked_plan(self._spec, batch.ids, plans)
        except ValueError as refused:
            return None, refused
        self._capacity = capacity_of(plans, self._capacity)
        return (batch, plans), None

    def forget(self) -> None:
        """Drop the oldest batch, which was trained or refused, so that it is not returned to the stream."""
        self._taken.popleft()

    def __enter__(self) -> Self:
        with uninterrupted(reraise=False) as deferred:
            self._stream.free.clear()
            try:
                self._thread.start()
            except BaseException:
                self._stream.free.set()
                raise
        try:
            raise_deferred(deferred)
        except BaseException as error:  # after which there is no `with` block that would end the thread
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End the thread and return untrained batches; a thread that the stream blocks ends when it wakes."""
        with uninterrupted():
            with self._lock:
                self._left, inside = True, self._inside
            self._room.put(None)
            if self._thread is threading.current_thread():  # garbage collection: it returns them when it ends
                return
            if not inside:
                self._thread.join()
            self._return_taken()

    def _return_taken(self):
        with self._lock:
            self._stream.give_back(self._taken)
            self._taken.clear()

    def _plan_all(self):
        try:
            while self._enter_stream() and (taken := self._take()) is not END:
                if self._sends:
                    check_weight(taken.weight)  # the step does not read it on a device
                    taken = to_device(taken)
                if self._sends and self._capacity:
                    plans = unchecked_plan(self._spec, taken.ids, self._capacity)
                else:
                    plans = plan(self._spec, taken.ids, self._capacity)
                    self._capacity = capacity_of(plans)
                self._made.put(((taken, plans), None))
            self._made.put((None, None))
        except BaseException as error:
            self._keep(error)
            self._made.put((None, error))
        finally:
            if self._left:
                self._return_taken()
            self._stream.free.set()

    def _enter_stream(self):
        self._room.get()
        with self._lock:
            self._inside = not self._left
            return self._inside

    def _take(self):
        """Return the next batch and keep it until `forget`; END if the stream has ended or the context was left."""
        taken = result_or_error(self._stream.take)
        with self._lock:
            self._inside = False
            if self._left or taken is END:
                return END
            self._stream.accept()
            self._taken.append(taken)
        if isinstance(taken, BaseException):
            raise taken
        return taken

    def _keep(self, error):
        # Replaces its batch: a batch that cannot be planned is not returned to the stream; its error is raised once.
        with self._lock:
            self._taken[-1] = error


def planned(
    spec: EmbeddingSpec,
    batches: Iterable,
    capacity: Mapping[str, int] | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Generator[tuple, None, None]:
    """Plan batches ahead of the step, in a thread; a single GPU is sent the batches, and plans them.

    Args:
      spec: the tables and lookups.
      batches: iterable of Batch, all of one size; up to three are taken ahead, so that the `position()` of a `Loader`
        runs ahead of what the caller has received.
      capacity: initial {stack: U}; it grows when a batch does not fit.
      mesh: from `make_mesh`; all devices if None.

    Yields:
      (batch, {stack: Plan}). Close or exhaust the generator to end the thread.

    Raises:
      ValueError: as `plan`.
    """
    with PlanPrefetcher(Stream(iter(batches)), spec, capacity, on_one_gpu(mesh)) as ahead:
        for pair in ahead:
            ahead.forget()
            yield pair
