"""Data types of a step, shared by all modules.

Legend used throughout the package: B batch, N dense features, F columns of a lookup, H hots, E embedding width, S
shards, U padded unique rows per shard, V rows of a stack, K width of a slot, R replicas.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

# jax.Array or np.ndarray, or a dict of them; a PartitionSpec in trees that describe a placement on the mesh.
Array = Any
PyTree = Any


class _BatchFields(NamedTuple):
    ids: Array
    label: Array
    dense: Array
    weight: Array


class Batch(_BatchFields):
    """A batch of examples; one of weight 0 is padding and adds to no gradient, even if its label or features are NaN.

    Args:
      ids: {lookup: i32[B, ...]}, -1 for missing ids.
      label: f32[B], or f32[B, ...] for several labels, or a dict, also nested, of arrays [B, ...]; zeros if not given,
        for a loss without labels.
      dense: f32[B, N]; f32[B, 0] if not given.
      weight: f32[B]; 1 each if not given.

    >>> Batch({"item": np.array([7, 8])}, np.array([0.0, 1.0])).weight.tolist()
    [1.0, 1.0]
    >>> Batch({"item": np.array([[7, 8], [9, -1]])}).label.tolist()
    [0.0, 0.0]
    """

    __slots__ = ()

    def __new__(cls, ids: Array, label: Array = None, dense: Array = None, weight: Array = None) -> "Batch":
        """Fill in what is not given."""
        label = np.zeros(np.shape(next(iter(ids.values())))[:1], np.float32) if label is None else label
        size = np.shape([*jax.tree.leaves(label), None][0] if isinstance(label, dict) else label)[:1]
        dense = np.zeros((*size, 0), np.float32) if dense is None else dense
        weight = np.ones(size, np.float32) if weight is None else weight
        return super().__new__(cls, ids, label, dense, weight)

    def __reduce__(self):
        return Batch._make, (tuple(self),)  # as below


# By `_make`, which fills in nothing: trees of batches may have any leaves, also None.
jax.tree_util.register_pytree_with_keys(
    Batch,
    lambda batch: (tuple(zip(map(jax.tree_util.GetAttrKey, Batch._fields), batch, strict=True)), None),
    lambda _, leaves: Batch._make(leaves),
    lambda batch: (tuple(batch), None),
)


class Plan(NamedTuple):
    """The unique rows of one stack that a batch touches, and the position of each id's row among them."""

    # i32[S, U] row numbers in the stack, in order of first appearance, padded with V.
    unique: Array
    # {lookup: i32[B, ...]} position in the flattened [S * U]; S * U if missing. Columns of other stacks are left out.
    inverse: Array
    count: Array  # i32[S] unique rows per shard; above U on overflow
    invalid: Array  # i32[] ids outside their table, treated as missing


class Rows(NamedTuple):
    """The working set of one stack for one batch: embedding rows and optimizer slots."""

    value: Array  # f32[S, U, E], or f16, as the tables store it
    slots: dict[str, Array]  # {slot: f32[S, U, K]}


class Slot(NamedTuple):
    """One optimizer slot of a row: its width and its initial value."""

    width: int
    fill: float


class Part(NamedTuple):
    """One stored part of a row: the embedding or an optimizer slot."""

    width: int
    dtype: str
    fill: float | None  # initial value; None for the embedding, which is initialised randomly

    @property
    def row_bytes(self) -> int:
        """Size of this part of one row."""
        return self.width * np.dtype(self.dtype).itemsize


class RowOptimizer(NamedTuple):
    """A sparse optimizer as a pair of pure functions, applied to the touched rows only.

    A row of zero gradient must be returned unchanged: padding rows rely on it.
    """

    init: Callable[[int], dict[str, Slot]]  # embedding width -> slots
    update: Callable[..., tuple[Array, dict[str, Array]]]  # (gradient, value, slots, step) -> value, slots


class DenseState(NamedTuple):
    """The dense half of the training state; in a TrainState every leaf but `step` has a leading axis of R replicas."""

    step: Array  # i32[]
    params: PyTree
    opt_state: PyTree


class ShardsLost(Exception):
    """The rows of some shards are lost.

    Raised by `read`, `put` and `add` of the row storage, and by its reads for a save (`take`, `parts`). Writes to all
    other shards have been done by then: a caller that catches it must not repeat the write.

    Args:
      shards: shard numbers, at least one.
      why: further explanation.

    Attributes:
      shards: sorted tuple of distinct shard numbers.
      done: result of the train step, if raised after its write, so that the step counts; else None.

    >>> ShardsLost([3, 1, 3]).shards
    (1, 3)
    """

    done: "tuple[TrainState, dict[str, Array]] | None" = None

    def __init__(self, shards: Iterable[int], why: str = ""):
        self.shards = tuple(sorted({int(shard) for shard in shards}))
        if not self.shards:
            raise ValueError("ShardsLost wants the shards that are lost, at least one.")
        super().__init__(f"shards {list(self.shards)} are lost" + (f": {why}" if why else ""))

    def __reduce__(self):
        return _shards_lost, (self.shards, str(self))


def _shards_lost(shards, text):
    error = ShardsLost(shards)
    error.args = (text,)
    return error


class TrainState(NamedTuple):
    """The complete training state: the dense half and the tables, see `embedding.Tables`."""

    dense: DenseState
    tables: Any
