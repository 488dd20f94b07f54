"""Synchronised leaves of a trainer's state: selection, validation, transfer to and from the host, and the fold.

A state is a TrainState, whose parameters have a leading axis of R replicas (the replicas of a mesh in lock step, or the
single one of a free-running trainer), or a pytree of parameters with or without that axis.
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
    """Names and shapes of the floating leaves of one replica, in the order of `jax.tree.leaves`."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


def floating(tree: PyTree) -> list:
    """Return the floating leaves, which are the synchronised ones."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_synchronised(leaf)]


def with_floating(tree: PyTree, new: list) -> PyTree:
    """Return a tree with its floating leaves replaced and all others unchanged."""
    left = iter(new)
    return jax.tree.map(lambda leaf: next(left) if is_synchronised(leaf) else leaf, tree)


def initial_leaves(parameters: PyTree) -> tuple[Template, list[np.ndarray]]:
    """Return the template of one replica's initial parameters, and host copies of their floating leaves."""
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
    """Check that host leaves are finite: a mean would spread nan or inf to all trainers."""
    for name, leaf in zip(names, leaves, strict=True):
        if not np.isfinite(leaf).all():
            raise ValueError(
                f"{what} cannot be synchronised: the leaf {name} holds nan or inf, which would spread to all trainers. "
                "Training has diverged, or starts from bad parameters: lower the learning rate or clip gradients."
            )


def replicas_in(template: Template, tree: PyTree, what: str) -> int | None:
    """Return R if all floating leaves of a tree are [R, *shape], or None if they have no replica axis.

    >>> template, _ = initial_leaves({"w": np.zeros(3), "b": np.zeros(())})
    >>> replicas_in(template, {"w": np.ones((2, 3)), "b": np.ones(2)}, "trainer 0"), replicas_in(
    ...     template, {"w": np.ones(3), "b": np.ones(())}, "trainer 0")
    (2, None)
    """
    found = [np.shape(leaf) for leaf in floating(tree)]
    replicas = found[0][0] if found and len(found[0]) > len(template.shapes[0]) else 0
    wanted = [(replicas, *shape) if replicas else shape for shape in template.shapes]
    for name, here, there in itertools.zip_longest(template.names, found, wanted, fillvalue="nothing"):
        if here != there:
            raise ValueError(f"{what} does not fit at {name}: it has {here}, wanted {there}. {REMEDY}")
    return replicas or None


def check_names(template: Template, tree: PyTree, what: str) -> None:
    """Check that the floating leaves of a tree have the names and the order of the template."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    found = [jax.tree_util.keystr(path) for path, leaf in paths if is_synchronised(leaf)]
    for wanted, name in itertools.zip_longest(template.names, found, fillvalue="nothing"):
        if name != wanted:
            raise ValueError(f"{what} does not fit: it has {name or 'an array'} where {wanted} is expected. {REMEDY}")


class Live(NamedTuple):
    """A trainer's floating leaves on its device, and the compiled program that folds a round's result into them."""

    leaves: list[jax.Array]
    has_axis: bool  # whether leaves have the replica axis; if not, `to_host` adds one of length 1
    fold: Callable[[list, list, list], list[jax.Array]]  # live, before, target -> live'

    def to_host(self) -> list[np.ndarray]:
        """Copy the leaves to the host as [R, ...]; on CPU devices they are views."""
        # The views stay valid: this object holds the leaves, so XLA does not reuse their memory.
        arrays = [np.asarray(leaf) for leaf in self.leaves]
        return arrays if self.has_axis else [array[None] for array in arrays]

    def from_host(self, leaves: list[np.ndarray]) -> list[jax.Array]:
        """Put leaves [R, ...] on the device, and drop the replica axis if this trainer has none."""
        return place(leaves if self.has_axis else [leaf[0] for leaf in leaves], self.leaves)


def params_of(state: TrainState | PyTree) -> PyTree:
    """Return the parameters of a state."""
    return state.dense.params if isinstance(state, TrainState) else state


def with_leaves(state: TrainState | PyTree, leaves: list) -> Any:
    """Return a state with its floating parameters replaced and all else unchanged."""
    params = with_floating(params_of(state), leaves)
    if not isinstance(state, TrainState):
        return params
    return state._replace(dense=state.dense._replace(params=params))


def place(new: list, old: list[jax.Array]) -> list[jax.Array]:
    """Put new arrays on the devices of the old ones, in one call."""
    # A thread does not inherit `jax.enable_x64`, without which float64 would be truncated.
    with jax.enable_x64(any(leaf.dtype.itemsize > 4 for leaf in new)):
        return jax.device_put(new, [leaf.sharding for leaf in old])


# Copies leaves that the trainer's next step may donate.
copied = jax.jit(lambda leaves: [jnp.copy(leaf) for leaf in leaves])


def with_mean_replica(state: TrainState) -> TrainState:
    """Return a state in which each replica is the mean over all replicas, for evaluation.

    Model averaging and BMUF train the mean, which no replica holds during background training: predict with the
    returned state, and continue training with the given one.

    Args:
      state: TrainState whose parameters have a leading axis of R replicas.

    Returns:
      The state with new floating parameters on the same devices; all else is unchanged.
    """
    leaves = floating(state.dense.params)
    means = [np.broadcast_to(mean_replica(leaf), leaf.shape) for leaf in leaves]
    return with_leaves(state, place(means, leaves) if leaves else [])


def replica_spread(params: PyTree) -> float:
    """Return the root-mean-square distance of R replicas [R, ...] from their mean, over all floating parameters.

    >>> replica_spread({"w": np.array([[1.0], [5.0]])})
    2.0
    """
    leaves = [np.asarray(leaf).astype(np.float64) for leaf in floating(params)]
    squares = sum(((leaf - leaf.mean(axis=0)) ** 2).sum() for leaf in leaves)
    return float(np.sqrt(squares / max(1, sum(leaf.size for leaf in leaves))))


def on_device(leaf: Any) -> jax.Array:
    """Return a leaf as a JAX array of the same dtype."""
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError("a synchroniser was called by a function under jit: call it between two steps, outside.")
    if not isinstance(leaf, jax.Array):
        # Copied, as JAX on CPU would share the caller's memory.
        placed = jnp.asarray(np.array(leaf))
        if placed.dtype != getattr(leaf, "dtype", placed.dtype):
            raise ValueError(
                f"JAX would turn a leaf of {leaf.dtype} into {placed.dtype}: give that dtype, or set jax_enable_x64."
            )
        return placed
    return leaf


def fold_program(merge: Callable, leaves: list[jax.Array]) -> Callable:
    """Compile a rule's merge for the shapes, dtypes and shardings of these leaves; trainers share the program."""
    return _compiled(merge, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))


@functools.lru_cache(maxsize=256)
def _compiled(merge, kinds):
    live = [jax.ShapeDtypeStruct(shape, dtype, sharding=at) for shape, dtype, at in kinds]
    target = [jax.ShapeDtypeStruct(leaf.shape, wide(leaf.dtype), sharding=leaf.sharding) for leaf in live]
    return jax.jit(merge).lower(live, live, target).compile()
