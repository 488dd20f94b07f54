"""The parameters of a trainer as they are now: out of its state, to the host and back, the fold.

A state is a TrainState, whose parameters have a leading axis of R replicas (those of the mesh in
lock step, or one of a trainer of its own), or a pytree of parameters, with that axis or without.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.shadowsync.leaves import floating, with_floating
from jaxrec.shadowsync.rules import wide
from jaxrec.types import PyTree, TrainState


class Live(NamedTuple):
    """The floating leaves of a trainer on its device, and the program that folds a result in."""

    leaves: list[jax.Array]
    has_axis: bool  # else they are of one replica, which gets the axis on its way to a transport
    fold: Callable[[list, list, list], list[jax.Array]]  # live, before, target -> live'

    def to_host(self) -> list[np.ndarray]:
        """Leaves [R, ...]: views where the device is the host."""
        # XLA does not reuse the memory meanwhile, as this object holds the leaves.
        arrays = [np.asarray(leaf) for leaf in self.leaves]
        return arrays if self.has_axis else [array[None] for array in arrays]

    def from_host(self, leaves: list[np.ndarray]) -> list[jax.Array]:
        """Leaves [R, ...] to the device, with this trainer's axis or without."""
        return place(leaves if self.has_axis else [leaf[0] for leaf in leaves], self.leaves)


def params_of(state: TrainState | PyTree) -> PyTree:
    """The parameters of a state."""
    return state.dense.params if isinstance(state, TrainState) else state


def with_leaves(state: TrainState | PyTree, leaves: list) -> Any:
    """A state with other floating parameters; all else is as it was."""
    params = with_floating(params_of(state), leaves)
    if not isinstance(state, TrainState):
        return params
    return state._replace(dense=state.dense._replace(params=params))


def place(new: list, old: list[jax.Array]) -> list[jax.Array]:
    """Arrays to where others are, in one call."""
    # A thread does not inherit `jax.enable_x64`, without which float64 would be cut.
    with jax.enable_x64(any(leaf.dtype.itemsize > 4 for leaf in new)):
        return jax.device_put(new, [leaf.sharding for leaf in old])


# A copy, as the trainer's next step may donate the leaves.
copied = jax.jit(lambda leaves: [jnp.copy(leaf) for leaf in leaves])


def replica_spread(params: PyTree) -> float:
    """How far R replicas [R, ...] are from their mean.

    The root mean square over replicas and floating parameters.

    >>> replica_spread({"w": np.array([[1.0], [5.0]])})
    2.0
    """
    leaves = [np.asarray(leaf).astype(np.float64) for leaf in floating(params)]
    squares = sum(((leaf - leaf.mean(axis=0)) ** 2).sum() for leaf in leaves)
    return float(np.sqrt(squares / max(1, sum(leaf.size for leaf in leaves))))


def on_device(leaf: Any) -> jax.Array:
    """An array of JAX that is still there, of the same dtype.

    Raises:
      ValueError: the leaf is traced, has been donated, or is of a dtype that JAX would change.
    """
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError("a synchroniser was called by a function under jit: call it between two steps, outside.")
    if not isinstance(leaf, jax.Array):
        placed = jnp.asarray(np.array(leaf))  # a copy: on the host JAX would share the caller's memory
        if placed.dtype != getattr(leaf, "dtype", placed.dtype):
            raise ValueError(
                f"JAX would turn a leaf of {leaf.dtype} into {placed.dtype}: give that dtype, or set jax_enable_x64."
            )
        return placed
    if leaf.is_deleted():
        raise ValueError("a leaf has been donated to an earlier step: give the state that this step has returned.")
    return leaf


def fold_program(merge: Callable, leaves: list[jax.Array]) -> Callable:
    """A rule's merge for leaves of these shapes, dtypes and places, compiled; trainers share it."""
    return _compiled(merge, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))


@functools.lru_cache(maxsize=256)
def _compiled(merge, kinds):
    live = [jax.ShapeDtypeStruct(shape, dtype, sharding=at) for shape, dtype, at in kinds]
    target = [jax.ShapeDtypeStruct(leaf.shape, wide(leaf.dtype), sharding=leaf.sharding) for leaf in live]
    return jax.jit(merge).lower(live, live, target).compile()
