"""Batches from blocks: a seeded shuffle, and an exact position to resume from.

Legend: B batch, N dense features, F columns of a lookup, H hots, n rows of a block.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.types import Batch

Column = str | tuple[str, str]  # 'label', 'dense', 'weight', or ('ids', the name of the lookup)
Columns = dict[Column, np.ndarray]


class BlockSource(Protocol):
    """Rows in blocks that can be read in any order."""

    @property
    def rows(self) -> Sequence[int]:
        """Number of rows n of each block."""
        ...

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return one block: {'label': [n], 'dense': f32[n, N], 'ids': int[n, ...]} and optionally 'weight': f32[n].

        The label is [n, K] for K labels. 'ids' is one array, or {lookup: array} for several lookups. Bags of H ids,
        padded with -1, form a last axis: [n, F, H]. 'keys', which say what a row is, are left out of batches. All
        blocks have the same columns, with the same dtypes and row shapes.
        """
        ...


class Loader:
    """Batches of any size from blocks, in a seeded order, from any position.

    Without a seed, rows come in file order. With one, each epoch shuffles the blocks, then the rows within windows of
    consecutive blocks of that order. The last batch of an epoch is padded with examples of weight 0 and missing ids.
    Like a file, a Loader has one iterator: another loop goes on where the last one was left, and another run of an
    engine with the batches that it had taken ahead. After `seek` there is a new one, and the old one raises ValueError
    when it is advanced.

    Args:
      source: the blocks.
      batch_size: B.
      shuffle_seed: None for file order.
      window_blocks: number of blocks held in memory and shuffled together; without a seed they are held one by one.
      epochs: passes over the data; None for no end.
      lookup: name in `Batch.ids` of the ids of blocks that hold a single array of them.

    Attributes:
      batches_per_epoch: number of batches of an epoch.
      window_rows: most rows of a window, which is read whole.

    >>> class TwoBlocks:
    ...     rows = [3, 2]
    ...     def __getitem__(self, index):
    ...         ids = np.arange(self.rows[index])[:, None]
    ...         return {"label": ids[:, 0] % 2, "dense": np.zeros((len(ids), 1)), "ids": {"item": ids}}
    >>> [batch.ids["item"].ravel().tolist() for batch in Loader(TwoBlocks(), 2)]
    [[0, 1], [2, 0], [1, -1]]
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
        self._batch_size = whole_number("batch_size", batch_size)
        self._window_blocks = whole_number("window_blocks", window_blocks)
        self._seed = None if shuffle_seed is None else whole_number("shuffle_seed", shuffle_seed, 0)
        self._epochs = None if epochs is None else whole_number("epochs", epochs)
        self._source, self._lookup = source, lookup
        self._rows = np.asarray(source.rows, np.int64)
        if self._rows.sum() == 0:
            raise ValueError("the source holds no rows: prepare a file that has some.")
        self.batches_per_epoch = -(-int(self._rows.sum()) // self._batch_size)
        if self._seed is None:  # so that no block is read before that of the first row
            self._window_blocks = 1
        self.window_rows = int(self._rows.max()) * self._window_blocks
        self._turn = _Turn(self, 0)
        self._first: tuple[int, list[Column]] | None = None  # the first block read, and its columns

    def __len__(self) -> int:
        if self._epochs is None:
            raise ValueError("a Loader with epochs=None has no length.")
        return self.batches_per_epoch * self._epochs

    def position(self) -> int:
        """Return the number of batches delivered since the start of the first epoch; an engine takes some ahead."""
        return self._turn.position

    def seek(self, position: int) -> None:
        """Make the next iteration start at batch `position`, at the cost of reading at most one window."""
        position = whole_number("position", position, 0)
        if self._epochs is not None and position > len(self):
            raise ValueError(f"position={position} must lie between 0 and {len(self)}, the number of batches.")
        self._turn.batches = None  # frees its window, unless another thread is reading there
        self._turn = _Turn(self, position)

    def __iter__(self) -> Iterator[Batch]:
        return self._turn

    def _batches(self, position: int) -> Iterator[Batch]:
        while self._epochs is None or position < len(self):
            epoch, first = divmod(position, self.batches_per_epoch)
            for batch in self._epoch(epoch, first * self._batch_size):
                position += 1
                yield batch

    def _epoch(self, epoch: int, skip: int) -> Iterator[Batch]:
        size, waiting = self._batch_size, list[Columns]()
        for window in self._windows(epoch, skip):
            waiting.append(window)
            if (rows := sum(len(part["label"]) for part in waiting)) < size:
                continue
            together, whole = _together(waiting), rows // size * size
            for start in range(0, whole, size):
                yield self._batch({key: array[start : start + size] for key, array in together.items()})
            waiting = [{key: array[whole:] for key, array in together.items()}]
        if any(len(part["label"]) for part in waiting):
            yield self._batch(_together(waiting))

    def _windows(self, epoch: int, skip: int) -> Iterator[Columns]:
        """Yield the windows of an epoch, rows in their final order, without the first `skip` rows."""
        order = np.arange(len(self._rows))
        if self._seed is not None:
            np.random.default_rng([self._seed, epoch]).shuffle(order)
        starts = range(0, len(order), self._window_blocks)
        rows = np.add.reduceat(self._rows[order], starts)
        ends = np.cumsum(rows)
        for number in range(int(np.searchsorted(ends, skip, side="right")), len(starts)):
            chosen = order[starts[number] : starts[number] + self._window_blocks]
            window = _together([self._block(int(i)) for i in chosen])
            if self._seed is not None:
                shuffled = np.random.default_rng([self._seed, epoch, number]).permutation(rows[number])
                window = {key: array[shuffled] for key, array in window.items()}
            yield {key: array[max(0, skip - int(ends[number] - rows[number])) :] for key, array in window.items()}

    def _block(self, index: int) -> Columns:
        """Return the columns of a block; raise ValueError unless they are those of the first block read."""
        columns = _columns(index, self._source[index], int(self._rows[index]), self._lookup)
        if self._first is None:
            self._first = index, list(columns)
        first, expected = self._first
        if list(columns) != expected:
            names, others = (", ".join(map(_shown, keys)) for keys in (columns, expected))
            raise ValueError(f"block {index} has {names}, but block {first} has {others}: give all the same columns.")
        return columns

    def _batch(self, rows: Columns) -> Batch:
        missing = self._batch_size - len(rows["label"])
        weight = rows["weight"] if "weight" in rows else np.ones(len(rows["label"]), np.float32)
        ids = {key[1]: _padded(array, missing, -1) for key, array in rows.items() if isinstance(key, tuple)}
        label, weight = (_padded(array.astype(np.float32), missing, 0) for array in (rows["label"], weight))
        return Batch(ids, label, _padded(rows["dense"], missing, 0), weight)


class _Turn(Iterator[Batch]):
    """The iterator of a loader until `seek`; it counts on its own, as a thread may be reading here meanwhile.

    It stays the same at its end and after an error of the source: by it an engine finds the batches it has taken ahead.
    """

    def __init__(self, loader: Loader, position: int):
        self.loader, self.position = loader, position
        self.batches: Iterator[Batch] | None = None

    def __next__(self) -> Batch:
        if self.loader._turn is not self:
            raise ValueError(
                "`seek` was called while this iterator was in use: leave the loop then, or make a Loader for each."
            )
        batches = self.batches = self.batches or self.loader._batches(self.position)
        try:
            batch = next(batches)
        except BaseException:  # of the source: the next call reads that batch again; or the end
            self.batches = None
            raise
        self.position += 1
        return batch


def _together(parts: Sequence[Columns]) -> Columns:
    """Return the rows of all parts, one after the other."""
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _columns(index: int, block: Mapping[str, Any], rows: int, lookup: str) -> Columns:
    """Return the columns of a block, always in the same order; raise ValueError if a batch cannot hold them."""
    for name in set(block) - {"label", "dense", "weight", "ids", "keys"}:
        raise ValueError(
            f"block {index} has {name!r}, which a batch has no place for: leave it out, or call it weight."
        )
    ids = block["ids"] if isinstance(block["ids"], Mapping) else {lookup: block["ids"]}
    columns: Columns = {"label": block["label"], "dense": block["dense"]}
    columns |= {"weight": block["weight"]} if "weight" in block else {}
    columns |= {("ids", name): ids[name] for name in sorted(ids)}
    for key, array in columns.items():
        if len(array) != rows:
            raise ValueError(
                f"block {index}: {_shown(key)} has {len(array)} rows instead of {rows}: give each column as many as "
                "`rows` says."
            )
    if columns["label"].shape[1:] == (1,):
        raise ValueError(f"block {index}: 'label' has shape {columns['label'].shape}: make one label [n], not [n, 1].")
    return columns


def _shown(key: Column) -> str:
    return f"ids[{key[1]!r}]" if isinstance(key, tuple) else repr(key)


def _padded(array: np.ndarray, missing: int, fill: int) -> np.ndarray:
    """Append `missing` rows of value `fill`."""
    if not missing:
        return array
    return np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1), constant_values=fill)
