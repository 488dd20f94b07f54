"""Partial recovery for any pytree: save some rows of some leaves over a base, and restore them alone.

The counterpart of `RowCheckpointer` for embeddings that are plain leaves [V, ...] of a pytree, sharded over devices or
not. `jaxrec.cpr` decides which rows to save, and when: `cpr.counters` counts accesses, `cpr.schedule` plans saves.

    directory/step_00000010     base from `save_tree`: all leaves
    directory/delta_000003      delta from `save_rows`: some rows of some leaves, over the base and all earlier deltas

Files are as for all images: committed atomically and verified before use.

Legend: V rows of a leaf, n rows of a delta.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.checkpoint.format import (
    Image,
    Snapshot,
    deltas,
    leaves_of,
    load_arrays,
    number_of,
    verify,
    write_image,
)
from jaxrec.checkpoint.row_deltas import chain
from jaxrec.checkpoint.state import check_matches
from jaxrec.files import Lock, local_path, make_directory
from jaxrec.types import PyTree

RowsOf = Mapping[str, np.ndarray | None]
_KIND = "tree"


def save_tree(directory: str | Path, tree: PyTree, step: int) -> Path:
    """Save all leaves as a base for deltas, and wait until it is committed.

    Args:
      directory: directory of the images of one run.
      tree: pytree of arrays; copied to the host leaf by leaf.
      step: number of training steps completed.

    Returns:
      Path of the image.

    Raises:
      ValueError: an image of this step exists; another process saves a tree there.
      OSError: the disk is full or read-only; older images are unchanged.
    """
    directory, leaves = local_path(directory), _arrays_of(tree)
    whole_number("step", step, 0)
    with _writing(directory):
        # Orbax refuses empty arrays; `restore_rows` keeps those of its tree.
        arrays = {_leaf(i, "whole"): np.array(leaf) for i, leaf in enumerate(leaves.values()) if leaf.size}
        return write_image(directory / f"step_{step:08d}", Snapshot(arrays, _manifest(leaves, step, {}))).path


def save_rows(directory: str | Path, base: str | Path, rows: RowsOf, tree: PyTree, step: int | None = None) -> Path:
    """Save some rows as a delta over a base, and wait until it is committed.

    Args:
      directory: directory of the base.
      base: parent of the delta: path of an image from `save_tree`, or of a delta.
      rows: {leaf: i32[n], row numbers along its first axis, or None for the whole leaf}; leaves are named by
        `jax.tree_util.keystr`, such as "['item']".
      tree: pytree with the structure, shapes and dtypes of the base; leaves not in `rows` are not read.
      step: number of training steps completed; that of the base if None.

    Returns:
      Path of the delta.

    Raises:
      ValueError: no such row; leaves that differ from those of the base; another process saves a tree there.
      DamagedImage: as `row_deltas.chain`, for the base.
      OSError: the disk is full or read-only; older images are unchanged.

    >>> import tempfile, jax.numpy as jnp
    >>> directory, tree = tempfile.mkdtemp(), {"item": jnp.zeros((4, 2)), "bias": jnp.zeros(())}
    >>> base = save_tree(directory, tree, step=10)
    >>> tree["item"] = tree["item"].at[1].set(5.0)
    >>> delta = save_rows(directory, base, {"['item']": np.array([1])}, tree, step=12)
    >>> restore_rows(delta, {"item": jnp.ones((4, 2)), "bias": jnp.ones(())})["item"][:, 0].tolist()
    [0.0, 5.0, 0.0, 0.0]
    """
    directory, base, leaves = local_path(directory), local_path(base), _arrays_of(tree)
    if base.parent != directory:
        raise ValueError(f"{base} is not in {directory}: rows are saved beside what they go over.")
    below = chain(base)
    _check_leaves(below[-1], leaves)
    arrays: dict[str, np.ndarray] = {}
    for name, ids in _checked(rows, leaves).items():
        number, leaf = list(leaves).index(name), leaves[name]
        if not leaf.size:
            continue
        if ids is None:
            arrays[_leaf(number, "whole")] = np.array(leaf)
        elif len(ids):
            arrays[_leaf(number, "rows")] = ids
            arrays[_leaf(number, "value")] = _take(leaf, ids)
    step = below[-1].step if step is None else whole_number("step", step, 0)
    with _writing(directory):
        number = max((number_of(path) for path in deltas(directory)), default=-1) + 1
        names = {image.path.name: image.digest for image in below}
        manifest = _manifest(leaves, step, names)
        return write_image(directory / f"delta_{number:06d}", Snapshot(arrays, manifest)).path


def restore_rows(path: str | Path, tree: PyTree, rows: RowsOf | None = None) -> PyTree:
    """Restore a tree, or only some rows of it, such as those lost with a device.

    Args:
      path: an image or a delta; rows are restored to their newest values in its chain.
      tree: current pytree; shapes, dtypes and shardings are kept. Nothing changes in place: restored leaves are new
        arrays.
      rows: {leaf: i32[n], or None for the whole leaf} to restore; other rows and leaves stay bitwise unchanged.
        Everything is restored if None.

    Returns:
      The restored tree.

    Raises:
      ValueError: no such row; leaves that differ from those of the image.
      DamagedImage: an image is missing, damaged or of another run.
    """
    leaves, found = _arrays_of(tree), chain(local_path(path))
    for image in found:
        _check_leaves(image, leaves)
        verify(image)
    wanted = dict.fromkeys(leaves) if rows is None else _checked(rows, leaves)
    new = dict(leaves)
    for number, name in enumerate(leaves):
        if name in wanted and leaves[name].size:
            value, ids = _value_of(found, number), wanted[name]
            new[name] = _placed(value, leaves[name]) if ids is None else _with_rows(leaves[name], ids, value[ids])
    return jax.tree.unflatten(jax.tree.structure(tree), list(new.values()))


def rows_on(leaf: jax.Array, devices) -> np.ndarray:
    """Return the rows of a leaf that are lost with some devices.

    Args:
      leaf: array with any sharding.
      devices: lost devices.

    Returns:
      i32[n], in order, without rows that are replicated on other devices.

    >>> import jax.numpy as jnp
    >>> rows_on(jnp.zeros((3, 2)), jax.devices()[:1]).tolist()
    [0, 1, 2]
    """
    lost, columns = set(devices), max(1, int(np.prod(leaf.shape[1:])))
    held = np.zeros((leaf.shape[0], columns), bool)
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        if device not in lost:
            part = np.zeros(leaf.shape, bool)
            part[index] = True
            held |= part.reshape(held.shape)
    return np.flatnonzero(~held.all(axis=1)).astype(np.int32)


def _value_of(found: list[Image], number: int) -> np.ndarray:
    """Return the newest value of a leaf in a chain given oldest first."""
    value: Any = None
    for image in found:
        names = {_leaf(number, part) for part in ("whole", "rows", "value")} & leaves_of(image)
        arrays = load_arrays(image, names)
        if _leaf(number, "whole") in arrays:
            value = arrays[_leaf(number, "whole")]
        elif names:
            value[arrays[_leaf(number, "rows")]] = arrays[_leaf(number, "value")]
    return value


def _take(leaf, ids: np.ndarray) -> np.ndarray:
    """Copy some rows shard by shard: a gather would need an output sharding."""
    if not isinstance(leaf, jax.Array):
        return np.array(leaf[ids])
    if not leaf.is_fully_addressable:
        raise ValueError("a leaf lies on devices of other processes, too: give `jax.experimental.multihost_utils."
                         "process_allgather(leaf)`.")  # fmt: skip
    taken = np.empty((len(ids), *leaf.shape[1:]), leaf.dtype)
    for shard in leaf.addressable_shards:
        first, end, _ = shard.index[0].indices(leaf.shape[0])
        mine = (first <= ids) & (ids < end)
        if mine.any():
            taken[(slice(None), *shard.index[1:])][mine] = np.asarray(shard.data)[ids[mine] - first]
    return taken


def _with_rows(leaf, ids: np.ndarray, values: np.ndarray):
    """Return a leaf with some rows replaced; shards without such rows are shared with the old leaf."""
    if not isinstance(leaf, jax.Array):
        changed = np.array(leaf)
        changed[ids] = values
        return changed
    parts = []
    for shard in leaf.addressable_shards:
        first, end, _ = shard.index[0].indices(leaf.shape[0])
        mine, part = (first <= ids) & (ids < end), shard.data
        if mine.any():
            # A shard replaced as a whole is not read: its device may be a new one.
            part = np.empty(part.shape, part.dtype) if mine.sum() == len(part) else np.array(part)
            part[ids[mine] - first] = values[mine][(slice(None), *shard.index[1:])]
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


def _placed(value: np.ndarray, like):
    if isinstance(like, jax.Array):
        return jax.device_put(value.astype(like.dtype), like.sharding)
    return value


def _arrays_of(tree: PyTree) -> dict[str, Any]:
    """Return {name: leaf}, in the order of the tree."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _checked(rows: RowsOf, leaves: Mapping[str, Any]) -> dict[str, np.ndarray | None]:
    """Return sorted, distinct rows of each leaf; numpy would accept negative rows, and a cast round fractions."""
    found: dict[str, np.ndarray | None] = {}
    for name, wanted in rows.items():
        leaf = leaves[name]
        if wanted is None:
            found[name] = None
            continue
        ids = np.unique(wanted)
        if len(ids) and not (ids.dtype.kind in "iu" and ids[0] >= 0 and ids[-1] < leaf.shape[0]):
            raise ValueError(f"rows of {name} must be whole numbers from 0 to {leaf.shape[0] - 1}: {ids!r:.200}.")
        found[name] = ids.astype(np.int64)
    return found


def _check_leaves(image: Image, leaves: Mapping[str, Any]) -> None:
    wanted = {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in leaves.items()}
    check_matches(image, "leaves", wanted, {name: kind for name, *kind in image.dense})


def _manifest(leaves, step, parents) -> dict[str, Any]:
    described = [[name, list(leaf.shape), str(leaf.dtype)] for name, leaf in leaves.items()]
    return {
        "run": "", "step": step, "tables": {}, "shards": 0, "layout": {}, "seed": 0, "scales": {}, "spec": _KIND,
        "dense": described, "extra": {}, "parents": parents,
    }  # fmt: skip


def _leaf(number: int, part: str) -> str:
    return f"tree.{number:05d}.{part}"


def _writing(directory: Path) -> Lock:
    make_directory(directory)
    return Lock(directory / "tree.lock", "saving a tree in it")
