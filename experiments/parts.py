"""A part of the rows of a source, as a source for `Loader`: what trains without what validates."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.data.loader import BlockSource


class Part:
    """Some rows of each block of a source.

    Args:
      source: of the blocks.
      counts: how many rows of each block; a block without any is left out, and is never read.
      chosen: number of a block -> which of its rows, so many.

    Attributes:
      rows: of each block that is left.
    """

    def __init__(self, source: BlockSource, counts: list[int], chosen: Callable[[int], np.ndarray]):
        self._source, self._chosen = source, chosen
        self._blocks = [block for block, rows in enumerate(counts) if rows]
        self.rows = [counts[block] for block in self._blocks]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        block = self._blocks[index]
        rows = self._chosen(block)
        return {key: _chosen(column, rows) for key, column in self._source[block].items()}


def _chosen(column, rows):
    """Rows of a column, or of each of several, such as the ids of several lookups."""
    if isinstance(column, Mapping):
        return {key: each[rows] for key, each in column.items()}
    return column[rows]


def set_apart(source: BlockSource, rows: int, seed: int | None = None) -> tuple[Part, Part]:
    """All rows of a source but so many, and those, both in the order of the source.

    Args:
      source: blocks whose columns are arrays.
      rows: how many to set apart, from 0 to all.
      seed: None to set the last ones apart; else random ones, an equal share of every block.

    Raises:
      ValueError: the source does not have so many rows.

    >>> class TwoBlocks:
    ...     rows = [3, 2]
    ...     def __getitem__(self, index):
    ...         return {"label": np.array([[10, 11, 12], [13, 14]][index])}
    >>> most, last = set_apart(TwoBlocks(), 3)
    >>> most.rows, last.rows, last[0]["label"].tolist(), last[1]["label"].tolist()
    ([2], [1, 2], [12], [13, 14])
    """
    sizes = [int(size) for size in source.rows]
    total = sum(sizes)
    whole_number("rows", rows, 0, total, ", as many as the source has")
    taken, start = [], 0
    for size in sizes:
        end = start + size
        if seed is None:
            taken.append(min(max(end - (total - rows), 0), size))
        else:  # in whole numbers, so that all of them together are exactly so many
            taken.append(end * rows // max(total, 1) - start * rows // max(total, 1))
        start = end

    def order(block):
        return (
            np.arange(sizes[block]) if seed is None else np.random.default_rng([seed, block]).permutation(sizes[block])
        )

    left = [size - apart for size, apart in zip(sizes, taken, strict=True)]
    return (
        Part(source, left, lambda block: np.sort(order(block)[: left[block]])),
        Part(source, taken, lambda block: np.sort(order(block)[left[block] :])),
    )
