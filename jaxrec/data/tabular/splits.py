"""Splits of rows into train, validation and test, by the row itself or by its number.

Legend: n rows.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxrec.bounds import real_number, whole_number
from jaxrec.data.blocks import SPLITS
from jaxrec.data.preparation import drawn


@dataclasses.dataclass(frozen=True)
class ByRows:
    """Split by row order: first train, then validation, then test."""

    train: float = 0.8
    validation: float = 0.0

    def __post_init__(self):
        _check_shares(self)


@dataclasses.dataclass(frozen=True)
class AtRandom:
    """Split at random, by a hash of seed and row number."""

    train: float = 0.8
    validation: float = 0.0
    seed: int = 0

    def __post_init__(self):
        _check_shares(self)
        whole_number("seed of the split", self.seed, 0, 2**63 - 1)


@dataclasses.dataclass(frozen=True)
class ByTime:
    """Split by time: the earliest rows train, the latest test; rows of equal time stay together.

    Attributes:
      column: column of numbers, or of ISO 8601 dates and times.
      train, validation: shares of the rows, met as closely as equal times allow.
    """

    column: str
    train: float = 0.8
    validation: float = 0.0

    def __post_init__(self):
        _check_shares(self)


@dataclasses.dataclass(frozen=True)
class ByColumn:
    """Split by the value of a column.

    Attributes:
      column: column name.
      train, validation, test: values of each split; a row with any other value is malformed.
    """

    column: str
    train: tuple[str, ...] = ("train",)
    validation: tuple[str, ...] = ("validation",)
    test: tuple[str, ...] = ("test",)

    def __post_init__(self):
        _check_values(self)


@dataclasses.dataclass(frozen=True)
class ByFile:
    """Split by the name of the file.

    Attributes:
      train, validation, test: file names of each split, without directories.
    """

    train: tuple[str, ...] = ("train.csv",)
    validation: tuple[str, ...] = ("valid.csv",)
    test: tuple[str, ...] = ("test.csv",)

    def __post_init__(self):
        _check_values(self)


Split = ByRows | AtRandom | ByTime | ByColumn | ByFile


def sides(split: Split, found: dict[str, Any], row: np.ndarray, column: np.ndarray | None) -> np.ndarray:
    """Return the split of each row, u8[n]: 0 train, 1 validation, 2 test, 3 unknown.

    Args:
      found: {'rows': number of rows} for `ByRows`, {'times': result of `bounds`} for `ByTime`; otherwise unused.
      row: i64[n] row numbers.
      column: times f64[n], values of the column, or file names, according to the split; None for the others.

    >>> sides(ByRows(0.5, 0.25), {"rows": 4}, np.arange(4), None).tolist()
    [0, 0, 1, 2]
    """
    if isinstance(split, ByColumn | ByFile):
        assert column is not None
        side = np.full(len(row), 3, np.uint8)
        for number, name in enumerate(SPLITS):
            side[np.isin(column, np.array(getattr(split, name), dtype=object))] = number
        return side
    if isinstance(split, AtRandom):
        return _side(drawn(row, split.seed), split.train, split.train + split.validation)
    if isinstance(split, ByTime):
        assert column is not None
        return _side(column, *found["times"])
    first = int(found["rows"] * split.train + 1e-9)
    return _side(row, first, first + int(found["rows"] * split.validation + 1e-9))


def _side(where, first, second):
    return ((where >= first).astype(np.uint8) + (where >= second)).astype(np.uint8)


def bounds(split: ByTime, times: np.ndarray, counts: np.ndarray) -> list[float]:
    """Return the two times at which validation and test begin, given distinct times f64[v] and their rows i64[v].

    The shares of rows before them are the nearest to those of the split.

    >>> bounds(ByTime("t", 0.5), np.array([1.0, 2.0, 3.0]), np.array([10, 10, 20]))
    [3.0, 3.0]
    """
    if len(times) < 2 + bool(split.validation):
        raise ValueError(
            f"{split.column!r} has {len(times)} different times, too few to split by: split ByRows or AtRandom."
        )
    before = np.concatenate([[0], np.cumsum(counts)])[:-1] / counts.sum()
    most = len(times) - 1
    first = int(np.clip(np.argmin(np.abs(before - split.train)), 1, most - bool(split.validation)))
    if not split.validation:
        return [float(times[first])] * 2
    second = int(np.clip(np.argmin(np.abs(before - split.train - split.validation)), first + 1, most))
    return [float(times[first]), float(times[second])]


def _check_values(split) -> None:
    for name in SPLITS:
        object.__setattr__(split, name, texts(f"{name} of the split", getattr(split, name)))
    values = split.train + split.validation + split.test
    if not split.train or not split.test or len(set(values)) < len(values):
        raise ValueError(
            f"{split}: train and test have at least one value each, and no value stands for two of the three."
        )


def _check_shares(split) -> None:
    for name in ("train", "validation"):
        rule = "a share of the rows, from 0 to below 1"
        real_number(f"{name} of the split", getattr(split, name), rule, lambda share: 0 <= share < 1)
    if not (split.train > 0 and split.train + split.validation < 1):
        raise ValueError(f"{split}: train must be above 0, and train + validation below 1, as some rows test.")


def texts(name: str, values: Any) -> tuple[str, ...]:
    """Return strings as a tuple; raise ValueError for anything else."""
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name}={values!r:.80} must be a list of texts.")
    return tuple(values)
