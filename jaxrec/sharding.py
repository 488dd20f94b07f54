"""The mesh and the placement of state: tables and batches are split over both axes, dense state over replicas.

Legend: R replicas, D devices per replica, S shards (a multiple of R * D).
"""

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrec.types import Batch, Plan

REPLICA, DATA = "replica", "data"
AXES = (REPLICA, DATA)
SPLIT = PartitionSpec(AXES)  # axis 0 over all devices: rows, ids, examples
PER_REPLICA = PartitionSpec(REPLICA)  # axis 0 is the replica: dense parameters and optimizer state
EVERYWHERE = PartitionSpec()
_AUTO = (AxisType.Auto,) * 2


def make_mesh(replicas=1, devices=None) -> jax.sharding.Mesh:
    """Return a mesh of devices with axes (replica, data).

    Args:
      replicas: R, a divisor of the number of devices.
      devices: the devices to use; one device if None.

    Returns:
      A mesh of shape (R, number of devices / R) with automatic axis types, as required by plain shard_map code.
    """
    devices = jax.devices()[:1] if devices is None else list(devices)
    if not devices or replicas < 1 or len(devices) % replicas:
        raise ValueError(f"replicas={replicas} must divide the number of devices, {len(devices)}.")
    shape = (replicas, len(devices) // replicas)
    return jax.make_mesh(shape, AXES, axis_types=_AUTO, devices=devices)


def as_mesh(mesh: jax.sharding.Mesh | None) -> jax.sharding.Mesh:
    """Convert a user's mesh to automatic axis types.

    Args:
      mesh: mesh with axes (replica, data) of any axis type; one device if None.

    Returns:
      The mesh over the same devices with automatic axis types. Arrays placed on either mesh are placed on both.

    >>> as_mesh(jax.make_mesh((1, 1), ("replica", "data"))).axis_types
    (Auto, Auto)
    """
    if mesh is None:
        return make_mesh()
    if mesh.axis_names != AXES:
        raise ValueError(
            f"the mesh has the axes {mesh.axis_names}, but one over {AXES} is expected: jaxrec.make_mesh(replicas, "
            "devices)."
        )
    return mesh if mesh.axis_types == _AUTO else jax.sharding.Mesh(mesh.devices, AXES, axis_types=_AUTO)


def check_split(shards: int, mesh: jax.sharding.Mesh) -> None:
    """Refuse a number of shards that is not a multiple of the number of devices."""
    if shards % mesh.size:
        raise ValueError(
            f"{shards} shards cannot be split over {mesh.size} devices: make `EmbeddingSpec(shards=...)` a multiple."
        )


def put_on_mesh(tree, mesh, spec):
    """Place every leaf of a tree on the mesh with one partition spec."""
    return jax.device_put(tree, NamedSharding(as_mesh(mesh), spec))


BATCH = Batch(ids=SPLIT, label=SPLIT, dense=SPLIT, weight=SPLIT)


def to_device(batch: Batch, mesh: jax.sharding.Mesh | None = None) -> Batch:
    """Send a batch to the devices of a mesh, where it can also be planned.

    Args:
      batch: Batch of numpy arrays.
      mesh: from `make_mesh`; the default device if None, from which JAX sends it on to that of any step.

    Returns:
      Batch of JAX arrays, its ids i32.

    Raises:
      ValueError: an id does not fit i32; `jax.device_put` would cut it to another one.

    >>> to_device(Batch({"user": np.array([2**32 + 5])}, np.ones(1, np.float32)))
    Traceback (most recent call last):
        ...
    ValueError: ids['user'] run from 0 to 4294967301, but ids are i32, at most 2147483647: hash them into range.
    """
    ids = {name: _as_int32(name, array) for name, array in batch.ids.items()}
    batch = batch._replace(ids=ids)
    return jax.device_put(batch) if mesh is None else put_on_mesh(batch, mesh, SPLIT)


def _as_int32(name, ids):
    if not (isinstance(ids, np.ndarray) and np.issubdtype(ids.dtype, np.integer)):
        return ids  # for `plan` to accept or refuse
    low, high, fits = ids.min(initial=0), ids.max(initial=0), np.iinfo(np.int32)
    if low < fits.min or high > fits.max:
        raise ValueError(
            f"ids[{name!r}] run from {low} to {high}, but ids are i32, at most {fits.max}: hash them into range."
        )
    return ids.astype(np.int32, copy=False)


def mesh_of(tree) -> jax.sharding.Mesh:
    """Return the mesh on which a state lies: that of its first leaf with one, or one device."""
    meshes = (getattr(getattr(leaf, "sharding", None), "mesh", None) for leaf in jax.tree.leaves(tree))
    return as_mesh(next((mesh for mesh in meshes if mesh is not None), None))


def plan_specs(stacks):
    """Return the partition specs of {stack: Plan} for the given stacks."""
    return {name: Plan(unique=SPLIT, inverse=SPLIT, count=SPLIT, invalid=EVERYWHERE) for name in stacks}


def shardings(tree_of_specs, mesh):
    """Convert a tree of partition specs to shardings on a mesh, for `jax.jit(in_shardings=...)`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        tree_of_specs,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def device_index():
    """Return the index of the current device among all devices of the mesh; call it inside shard_map."""
    return jax.lax.axis_index(AXES)


def replicate(tree, replicas: int):
    """Add a leading axis of R equal replicas to every leaf."""
    return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (replicas, *np.shape(leaf))), tree)


def mean_replica(leaf) -> np.ndarray:
    """Return the mean of R replicas of one leaf, the leaf of the averaged model.

    The sum runs in replica order, in float32 or wider. A leaf that is not a float, such as a counter, is taken from the
    first replica.

    Args:
      leaf: [R, ...].

    Returns:
      [...], of the same dtype, on the host.

    >>> mean_replica(np.array([[1.0, 2.0], [3.0, 6.0]])), mean_replica(np.array([[7], [9]]))
    (array([2., 4.]), array([7]))
    """
    replicas = np.asarray(leaf)
    if not jax.numpy.issubdtype(replicas.dtype, np.floating):
        return replicas[0]
    wide = np.dtype(np.float64 if replicas.dtype == np.float64 else np.float32)
    total = replicas[0].astype(wide)
    for replica in replicas[1:]:
        total = total + replica.astype(wide)
    return np.asarray(total / wide.type(len(replicas))).astype(replicas.dtype)
