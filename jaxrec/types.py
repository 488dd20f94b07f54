"""The values that flow through a step; every other module speaks in these.

Legend used throughout the package: B batch, N dense features, F columns of a lookup, H hots, E
embedding width, S shards, U padded unique rows per shard, V rows of a stack, K width of a slot, R
replicas.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

# jax.Array or np.ndarray, or a dict of them; a PartitionSpec where a tree says how another one lies
# on the mesh.
Array = Any
PyTree = Any


class Batch(NamedTuple):
    """Examples as a model sees them; an example of weight 0 is padding and touches nothing."""

    ids: Array  # {lookup: i32[B, ...]}, -1 where an id is missing
    dense: Array  # f32[B, N]
    label: Array  # f32[B], or f32[B, ...] of several labels
    weight: Array  # f32[B]


class Plan(NamedTuple):
    """The rows of one stack that a batch touches, and where each id finds its row among them."""

    # i32[S, U] rows of the stack, numbered by first appearance; V where there is none.
    unique: Array
    inverse: Array  # {lookup: i32[B, ...]} position in the flattened [S * U]; S * U if missing
    count: Array  # i32[S] unique rows per shard, also when there are more than U (an overflow)
    invalid: Array  # i32[] ids outside their table, treated as missing


class Rows(NamedTuple):
    """The working set of one stack for one batch: embedding rows and optimizer slots."""

    value: Array  # f32[S, U, E]
    slots: dict[str, Array]  # {slot: f32[S, U, K]}


class Slot(NamedTuple):
    """One optimizer slot of a row: its width and the value that a row never touched has."""

    width: int
    fill: float


class Part(NamedTuple):
    """One part of a row, the embedding itself or a slot, as tables hold it."""

    width: int
    dtype: str
    # Of a row never touched; None for the embedding, whose initial rows are drawn.
    fill: float | None


class RowOptimizer(NamedTuple):
    """A sparse optimizer as a pair of pure functions, applied to the touched rows only.

    A row whose gradient is zero must come back unchanged: padding rows rely on it.
    """

    init: Callable[[int], dict[str, Slot]]  # embedding width -> slots
    # (gradient, value, slots, step) -> value, slots.
    update: Callable[..., tuple[Array, dict[str, Array]]]


class DenseState(NamedTuple):
    """The dense half of the training state; in a train step every leaf has a leading axis of R
    replicas."""

    step: Array  # i32[]
    params: PyTree
    opt_state: PyTree


class ShardsLost(Exception):
    """The rows of some shards are gone.

    A home of rows raises it from `read`, `put` and `add`, and from what a save reads them with
    (`take`, `parts`). What was to be written to all other shards is written then: a caller that catches
    it writes nothing again.

    Args:
      shards: at least one.
      why: what is known beside that.

    Attributes:
      shards: tuple of ints, in order, each once.
      done: what a train step would have returned, if it raises this after its write: that step counts.

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
    """All that training changes: the dense half and the tables, see `embedding.Tables`."""

    dense: DenseState
    tables: Any


class RolledBack(Exception):
    """All goes back to an earlier step: what ends a run under full recovery.

    Args:
      go_back: restores the state and resets the engine; the batches go on from the engine's step by
        then.
    """

    def __init__(self, go_back: Callable[[], None]):
        super().__init__("all goes back to the newest whole image: call go_back(), and run on from engine.step")
        self.go_back = go_back
