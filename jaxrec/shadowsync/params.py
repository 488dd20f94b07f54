"""Which leaves of a pytree are synchronised, whether they fit those of a transport, and a trainer's
as they are now: out of its state, to the host and back, the fold.

A state is a TrainState, whose parameters have a leading axis of R replicas (those of the mesh in
lock step, or one of a trainer of its own), or a pytree of parameters, with that axis or without.
Legend: R replicas, the leading axis of all leaves or of none.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.shadowsync.rules import is_synchronised, wide
from jaxrec.sharding import mean_replica
from jaxrec.types import PyTree, TrainState

REMEDY = (
    "Give the parameters that the group or the transport was made with: one replica as it was given there, or all "
    "leaves with one leading axis of at least one replica."
)


class Template(NamedTuple):
    """The floating leaves of one replica, in the order of `jax.tree.leaves`."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


def floating(tree: PyTree) -> list:
    """The leaves that are synchronised."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_synchronised(leaf)]


def with_floating(tree: PyTree, new: list) -> PyTree:
    """A tree with other floating leaves; all others are left alone."""
    left = iter(new)
    return jax.tree.map(lambda leaf: next(left) if is_synchronised(leaf) else leaf, tree)


def initial_leaves(parameters: PyTree) -> tuple[Template, list[np.ndarray]]:
    """The template of initial parameters of one replica, and host copies of their floating leaves.

    Raises:
      ValueError: there is no floating leaf; one is complex or not finite.
    """
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)]
    for name, leaf in named:
        if jnp.issubdtype(getattr(leaf, "dtype", None) or np.asarray(leaf).dtype, jnp.complexfloating):
            raise ValueError(
                f"the leaf {name} is complex: rules are for real numbers, keep its two parts as two leaves."
            )
    named = [(name, np.array(leaf)) for name, leaf in named if is_synchronised(leaf)]
    if not named:
        raise ValueError(
            "the initial parameters have no floating leaf, so there is nothing to synchronise: give the parameters of "
            "one replica, for example state.dense.params without their leading axis."
        )
    names, leaves = zip(*named, strict=True)
    check_leaves(names, leaves, "the initial parameters")
    return Template(names, tuple(leaf.shape for leaf in leaves)), list(leaves)


def check_leaves(names: Sequence[str], leaves: Sequence[np.ndarray], what: str) -> None:
    """Refuses leaves on the host that hold nan or inf, which a mean would spread to all trainers.

    Raises:
      ValueError: names the first leaf.
    """
    for name, leaf in zip(names, leaves, strict=True):
        if not np.isfinite(leaf).all():
            raise ValueError(
                f"{what} cannot be synchronised: the leaf {name} holds nan or inf, which would spread to all trainers. "
                "Training has diverged, or starts from bad parameters: lower the learning rate or clip gradients."
            )


def replicas_in(template: Template, tree: PyTree, what: str) -> int | None:
    """R of a tree whose floating leaves are all [R, *shape]; None if all are of one replica.

    >>> template, _ = initial_leaves({"w": np.zeros(3), "b": np.zeros(())})
    >>> replicas_in(template, {"w": np.ones((2, 3)), "b": np.ones(2)}, "trainer 0"), replicas_in(
    ...     template, {"w": np.ones(3), "b": np.ones(())}, "trainer 0")
    (2, None)

    Raises:
      ValueError: another structure, other shapes, some leaves with an axis and some without; names
        the first leaf.
    """
    found = [np.shape(leaf) for leaf in floating(tree)]
    rows = found[0][0] if found and len(found[0]) > len(template.shapes[0]) else 0
    wanted = [(rows, *shape) if rows else shape for shape in template.shapes]
    for name, here, there in itertools.zip_longest(template.names, found, wanted, fillvalue="nothing"):
        if here != there:
            raise ValueError(f"{what} does not fit at {name}: it has {here}, wanted {there}. {REMEDY}")
    return rows or None


def check_names(template: Template, tree: PyTree, what: str) -> None:
    """Refuses a tree whose floating leaves have other names or another order.

    Raises:
      ValueError: names the first leaf.
    """
    paths = jax.tree_util.tree_leaves_with_path(tree)
    found = [jax.tree_util.keystr(path) for path, leaf in paths if is_synchronised(leaf)]
    for wanted, name in itertools.zip_longest(template.names, found, fillvalue="nothing"):
        if name != wanted:
            raise ValueError(f"{what} does not fit: it has {name or 'an array'} where {wanted} is wanted. {REMEDY}")


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


def with_mean_replica(state: TrainState) -> TrainState:
    """The model that the replicas of a state are together: each of them is their mean.

    What model averaging and BMUF train is the mean, which a run in the background never holds while it
    goes on; predict with this state, and train on with the one that was given.

    Args:
      state: TrainState, whose parameters have a first axis of R replicas.

    Returns:
      The state with other floating parameters, where they were; all else is as it was.
    """
    leaves = floating(state.dense.params)
    means = [np.broadcast_to(mean_replica(leaf), leaf.shape) for leaf in leaves]
    return with_leaves(state, place(means, leaves) if leaves else [])


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
    """An array of JAX, of the same dtype.

    Raises:
      ValueError: the leaf is traced, or of a dtype that JAX would change.
    """
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError("a synchroniser was called by a function under jit: call it between two steps, outside.")
    if not isinstance(leaf, jax.Array):
        # A copy: on the host JAX would share the caller's memory.
        placed = jnp.asarray(np.array(leaf))
        if placed.dtype != getattr(leaf, "dtype", placed.dtype):
            raise ValueError(
                f"JAX would turn a leaf of {leaf.dtype} into {placed.dtype}: give that dtype, or set jax_enable_x64."
            )
        return placed
    return leaf


def fold_program(merge: Callable, leaves: list[jax.Array]) -> Callable:
    """A rule's merge for leaves of these shapes, dtypes and places, compiled; trainers share it."""
    return _compiled(merge, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))


@functools.lru_cache(maxsize=256)
def _compiled(merge, kinds):
    live = [jax.ShapeDtypeStruct(shape, dtype, sharding=at) for shape, dtype, at in kinds]
    target = [jax.ShapeDtypeStruct(leaf.shape, wide(leaf.dtype), sharding=leaf.sharding) for leaf in live]
    return jax.jit(merge).lower(live, live, target).compile()
