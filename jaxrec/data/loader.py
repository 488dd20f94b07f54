"""Batches out of blocks: seeded shuffle, exact position, and a prefetch thread.

Legend: B batch, N dense features, F fields, n rows of a block.
"""

import queue
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrec.types import Batch


class BlockSource(Protocol):
    """Rows in blocks that can be read in any order."""

    @property
    def rows(self) -> Sequence[int]:
        """n of each block."""
        ...

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        """One block: {'label': u8[n], 'dense': f32[n, N], 'ids': i32[n, F]}."""
        ...


class Loader:
    """Batches of any size out of blocks, in a seeded order, from any position.

    Without a seed, rows come in the order of the file. With one, each epoch shuffles the blocks, then the rows within
    windows of consecutive blocks of that order. The last batch of an epoch is padded with examples of weight 0 whose
    ids are missing. Iterating starts at `position()`.

    Args:
      source: the blocks.
      batch_size: B.
      shuffle_seed: None for the order of the file.
      window_blocks: how many blocks are held and shuffled together.
      epochs: passes over the data; None for ever.
      lookup: the name of the ids in `Batch.ids`.

    Errors:
      ValueError: a size below 1, or a source without rows.
    """

    def __init__(
        self,
        source: BlockSource,
        batch_size: int,
        *,
        shuffle_seed: int | None = None,
        window_blocks: int = 16,
        epochs: int | None = 1,
        lookup: str = "sparse",
    ):
        if batch_size < 1 or window_blocks < 1:
            raise ValueError(f"batch_size={batch_size}, window_blocks={window_blocks}: both must be at least 1.")
        self._source, self._lookup = source, lookup
        self._rows = np.asarray(source.rows, np.int64)
        if self._rows.sum() == 0:
            raise ValueError("the source holds no rows: prepare a file that has some.")
        self._batch_size, self._seed = batch_size, shuffle_seed
        self._window_blocks, self._epochs = window_blocks, epochs
        self.batches_per_epoch = -(-int(self._rows.sum()) // batch_size)
        self._position = 0

    def __len__(self) -> int:
        if self._epochs is None:
            raise ValueError("a Loader with epochs=None has no length.")
        return self.batches_per_epoch * self._epochs

    def position(self) -> int:
        """Batches delivered since the start of the first epoch."""
        return self._position

    def seek(self, position: int) -> None:
        """Makes the next iteration begin with batch `position`; costs no more than reading one window."""
        if position < 0 or (self._epochs is not None and position > len(self)):
            raise ValueError(f"position={position} must lie between 0 and the number of batches.")
        self._position = position

    def __iter__(self) -> Iterator[Batch]:
        while self._epochs is None or self._position < len(self):
            epoch, first = divmod(self._position, self.batches_per_epoch)
            for batch in self._epoch(epoch, first * self._batch_size):
                # Counted before it is handed over: whoever holds batch p finds position() == p + 1.
                self._position += 1
                yield batch

    def _epoch(self, epoch: int, skip: int) -> Iterator[Batch]:
        size, rest = self._batch_size, None
        for window in self._windows(epoch, skip):
            if rest is not None:
                window = {key: np.concatenate([rest[key], window[key]]) for key in window}
            whole = len(window["label"]) // size * size
            for start in range(0, whole, size):
                yield self._batch({key: array[start : start + size] for key, array in window.items()})
            rest = {key: array[whole:] for key, array in window.items()}
        if rest is not None and len(rest["label"]):
            yield self._batch(rest)

    def _windows(self, epoch: int, skip: int) -> Iterator[dict[str, np.ndarray]]:
        """The windows of an epoch, rows in their final order, without the first `skip` rows."""
        order = np.arange(len(self._rows))
        if self._seed is not None:
            np.random.default_rng([self._seed, epoch]).shuffle(order)
        for number, start in enumerate(range(0, len(order), self._window_blocks)):
            chosen = order[start : start + self._window_blocks]
            rows = int(self._rows[chosen].sum())
            if skip >= rows:
                skip -= rows
                continue
            blocks = [self._source[int(i)] for i in chosen]
            window = {key: np.concatenate([block[key] for block in blocks]) for key in blocks[0]}
            if self._seed is not None:
                shuffled = np.random.default_rng([self._seed, epoch, number]).permutation(rows)
                window = {key: array[shuffled] for key, array in window.items()}
            yield {key: array[skip:] for key, array in window.items()}
            skip = 0

    def _batch(self, rows) -> Batch:
        missing = self._batch_size - len(rows["label"])
        label, dense, ids = rows["label"].astype(np.float32), rows["dense"], rows["ids"]
        weight = np.ones(self._batch_size, np.float32)
        if missing:
            label = np.pad(label, (0, missing))
            dense = np.pad(dense, ((0, missing), (0, 0)))
            ids = np.pad(ids, ((0, missing), (0, 0)), constant_values=-1)
            weight[self._batch_size - missing :] = 0
        return Batch({self._lookup: ids}, dense, label, weight)


class _Failure:
    def __init__(self, error: BaseException):
        self.error = error


_END = object()


def prefetch(iterable: Iterable, depth: int = 2) -> Generator[Any, None, None]:
    """Iterates in a thread, up to `depth` items ahead.

    Args:
      iterable: made and consumed by the thread alone; the `position()` of a `Loader` here runs ahead of what the
        caller has seen, so resume from the caller's own count of batches.
      depth: items made before they are asked for.

    Yields:
      The items in their order; an exception of the iterable is raised here, in its place. Closing the generator
      stops and joins the thread.

    >>> list(prefetch(range(3)))
    [0, 1, 2]
    """
    if depth < 1:
        raise ValueError(f"depth={depth} must be at least 1.")
    return _consume(iterable, queue.Queue(depth), threading.Event())


def _consume(iterable, items, stop):
    thread = threading.Thread(target=_produce, args=(iterable, items, stop), name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := items.get()) is not _END:
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        stop.set()
        while thread.is_alive():  # a producer that waits for room must find some, see `stop` and end
            try:
                items.get(timeout=0.01)
            except queue.Empty:
                pass
        thread.join()


def _produce(iterable, items, stop):
    iterator: Iterator = iter(())
    try:
        iterator = iter(iterable)
        for item in iterator:
            items.put(item)
            if stop.is_set():
                return
        last: object = _END
    except BaseException as error:
        last = _Failure(error)
    finally:
        # A generator is closed by the thread that runs it, so that threads below it end as well.
        close = getattr(iterator, "close", None)
        if close is not None:
            close()
    items.put(last)
