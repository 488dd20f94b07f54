"""From a training state to an image and back: any home of the rows, any mesh, any number of shards,
value for value.

Rows in other processes are written and restored there, all at once, and no row travels: each process has its part of an
image in directories of its own, and says what their files hold; the one that saves writes the manifest and renames. So
all must see one directory, which is tried before anything is written.

Legend: S shards, V rows of a stack, E embedding width, K slot width, R replicas.
"""

import functools
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxrec.checkpoint.format import Image, Snapshot, write_piece
from jaxrec.embedding import EmbeddingSpec, Layout, Tables
from jaxrec.sharding import mean_replica
from jaxrec.types import DenseState, TrainState

_PROBE = "probe"


def is_remote(tables: Tables) -> bool:
    """Whether the rows live in other processes than this one."""
    return getattr(tables, "remote_rows", False)


def write_there(tables: Tables, directory: Path) -> dict[str, list[int]]:
    """Has all shards written into the directory of an image by the servers that have them.

    Args:
      tables: whose rows live elsewhere.
      directory: of the image.

    Returns:
      {file: [bytes, crc32]}, for the manifest.

    Raises:
      ValueError: a server does not see the directory.
      ShardsLost: a server has died; what is written is no image.
    """
    # A name of its own: a server that is late with an earlier image writes beside these files, not into them.
    token, probe = uuid.uuid4().hex[:12], directory / _PROBE
    probe.write_text(token)
    files: dict[str, list[int]] = {}
    for written in tables.on_shards(_write_shard, str(directory.resolve()), token).values():
        files |= written
    probe.unlink()
    return files


def _write_shard(stack, shard, parts, directory, token):
    """Runs where the rows are."""
    probe = Path(directory) / _PROBE
    if not probe.is_file() or probe.read_text() != token:
        raise ValueError(
            f"the server of shard {shard} does not see {directory}, where it is to save its rows: give a directory "
            "that all machines see under one name, such as one of a shared file system."
        )
    arrays = {leaf_name(stack, shard, part): rows for part, rows in parts.items()}
    return write_piece(Path(directory), f"{token}.{stack}.{shard:04d}", arrays)


ROW_IDS = "row_ids"


def snapshot(state: TrainState, extra: Mapping[str, Any] | None = None, run: str = "", copy: bool = True) -> Snapshot:
    """Copies a training state to the host; the only part of saving that training waits for.

    Args:
      state: TrainState.
      extra: JSON values to save along.
      run: id of the run.
      copy: without it the rows are taken shard by shard while they are written, by their servers if
        they have any; they may not change until then.

    Returns:
      A Snapshot; with `copy` it shares no memory with the state.
    """
    leaves, arrays = dense_leaves(state.dense)
    manifest = manifest_of(state.tables, int(state.dense.step), extra, run, leaves)
    if not copy and is_remote(state.tables):
        return Snapshot(arrays, manifest, remote_rows=functools.partial(write_there, state.tables))
    if not copy:
        return Snapshot(arrays, manifest, _shard_by_shard(state.tables))
    for name in state.tables.spec.stacks:
        for part, shards in state.tables.parts(name).items():
            # Device rows come in one piece, from which each shard is cut.
            shards = np.asarray(shards) if isinstance(shards, jax.Array) else shards
            arrays |= {leaf_name(name, shard, part): np.array(rows) for shard, rows in enumerate(shards)}
    return Snapshot(arrays, manifest)


def dense_leaves(dense: DenseState | None) -> tuple[list, dict[str, np.ndarray]]:
    """[[path, shape, dtype]] of the leaves of a dense state and copies of them, {name: array}."""
    leaves, arrays = [], {}
    for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(dense)):
        shape, dtype = _kind(leaf)
        leaves.append([jax.tree_util.keystr(path), shape, dtype])
        array = np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        if array.size:  # Orbax refuses empty arrays
            arrays[dense_name(number)] = array
    return leaves, arrays


def dense_name(number: int) -> str:
    """Name of the leaf of so many in a manifest's `dense`."""
    return f"dense.{number:04d}"


def _is_key(leaf):
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _kind(leaf):
    """Shape and dtype of a leaf: an array, a Python number, or PRNG keys."""
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return list(leaf.shape), str(leaf.dtype)


def manifest_of(tables: Tables, step: int, extra=None, run="", dense=(), parents=None) -> dict[str, Any]:
    """What a manifest says of the state it belongs to, see `Image`; its files are added when they
    are written."""
    json.dumps(extra)  # what is not JSON is refused here, and not by the thread that writes
    spec = tables.spec
    return {
        "run": run, "step": step, "tables": tables_of(spec), "shards": spec.shards, "layout": described(tables.layout),
        "seed": spec.seed, "scales": {name: table.scale for name, table in spec.tables.items()}, "spec": spec.digest,
        "dense": list(dense), "extra": dict(extra or {}), "parents": dict(parents or {}),
    }  # fmt: skip


def place_dense(image: Image, template: DenseState, arrays: Mapping[str, np.ndarray], cast: bool) -> DenseState:
    """The dense state of an image, each leaf placed as in the template, after comparing paths,
    shapes and dtypes.

    Args:
      image: whose dense state it is; one replica's fills any number of them.
      template: the dense state to fill.
      arrays: what `load_arrays` gave.
      cast: accept other dtypes of numbers, and cast to the template's.

    Raises:
      ValueError: a path, a shape or (without `cast`) a dtype differs; says which.
    """
    _check_saved_dense(image, template, cast)
    leaves = []
    for number, (old, (_, shape, dtype)) in enumerate(zip(jax.tree.leaves(template), image.dense, strict=True)):
        saved = arrays.get(dense_name(number))
        leaves.append(_place(np.zeros(shape, dtype) if saved is None else saved, old))
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _place(saved, old):
    """A saved leaf in the kind, dtype, shape and sharding of the one that it replaces."""
    if _is_key(old):
        saved = np.broadcast_to(saved, (*old.shape, *saved.shape[-1:]))
        return jax.device_put(jax.random.wrap_key_data(saved, impl=jax.random.key_impl(old)), old.sharding)
    if not hasattr(old, "dtype"):
        return type(old)(saved)  # a Python number, as some optimizers keep
    saved = np.broadcast_to(saved.astype(old.dtype), old.shape)
    return jax.device_put(saved, old.sharding) if isinstance(old, jax.Array) else np.array(saved)


def _check_saved_dense(image, template, cast):
    wanted = {jax.tree_util.keystr(p): _kind(leaf) for p, leaf in jax.tree_util.tree_leaves_with_path(template)}
    wanted = {path: list(kind) for path, kind in wanted.items()}
    found = {path: [shape, dtype] for path, shape, dtype in image.dense}
    other_dtypes = {}
    for path, (shape, dtype) in found.items():
        mine = wanted.get(path, [[], dtype])
        if shape[:1] == [1] and shape[1:] == mine[0][1:]:
            mine[0] = shape  # one replica fills any number of them
        if mine[1] != dtype and "key<" not in mine[1] + dtype:
            other_dtypes[path] = f"{dtype}, wanted {mine[1]}"
            mine[1] = dtype
    refuse_other(image, "dense state", wanted, found)
    if other_dtypes and not cast:
        raise ValueError(
            f"{image.path} was saved with other dtypes: {other_dtypes}. Make the model and optimizer in the saved "
            "ones, or ask for a cast: restore(..., cast=True)."
        )


def of_replica(
    image: Image, arrays: Mapping[str, np.ndarray], replica: int | Literal["mean"]
) -> tuple[Image, dict[str, np.ndarray]]:
    """The dense state of an image as one replica would have saved it, without optimizers.

    Args:
      image: of a whole state.
      arrays: its dense leaves, what `load_arrays` gave.
      replica: from 0 to R - 1, or "mean" for the mean of all.

    Returns:
      The image with the leaves of the step and the parameters alone, and their arrays.

    Raises:
      ValueError: there is no such replica.
    """
    kept: list[list] = []
    chosen: dict[str, np.ndarray] = {}
    for number, (path, shape, dtype) in enumerate(image.dense):
        if path.startswith(".opt_state"):
            continue
        saved = arrays.get(dense_name(number))
        if path.startswith(".params"):
            if replica != "mean" and not 0 <= replica < shape[0]:
                raise ValueError(f"replica={replica}, but {image.path} holds {shape[0]} of them, from 0 on.")
            shape = [1, *shape[1:]]
            if saved is not None:
                saved = mean_replica(saved)[None] if replica == "mean" else saved[replica : replica + 1]
        if saved is not None:
            chosen[dense_name(len(kept))] = saved
        kept.append([path, shape, dtype])
    return image._replace(dense=kept), chosen


def leaf_name(stack: str, shard: int, part: str) -> str:
    """Name of the leaf that holds 'value', a slot, or the 'row_ids' of a delta, of one shard."""
    return f"rows.{stack}.{shard:04d}.{part}"


def _shard_by_shard(tables: Tables) -> Iterator[dict[str, np.ndarray]]:
    """{leaf: rows} of one shard of all stacks after the other; of device tables a shard is on the
    host at a time."""
    parts = {name: tables.parts(name) for name in tables.spec.stacks}
    for shard in range(tables.spec.shards):
        yield {
            leaf_name(name, shard, part): np.asarray(rows[shard])
            for name, mine in parts.items()
            for part, rows in mine.items()
        }


def described(layout: Layout) -> dict[str, dict[str, list]]:
    """{stack: {part: [width, dtype]}} of a layout, as manifests have it."""
    return {name: {part: [one.width, one.dtype] for part, one in parts.items()} for name, parts in layout.items()}


def tables_of(spec: EmbeddingSpec) -> dict[str, list[int]]:
    """{table: [rows, width]} in the order of a spec."""
    return {name: [table.rows, table.width] for name, table in spec.tables.items()}


def refuse_other(image: Image, what: str, wanted, found) -> None:
    """Raises ValueError, with what differs, if an image was saved with something else than
    wanted."""
    # Tables are compared in order: it decides the row numbers.
    if json.dumps(wanted) != json.dumps(found):
        raise ValueError(
            f"{image.path} was saved with other {what}: it has {_shortened(found, wanted)}, wanted "
            f"{_shortened(wanted, found)}. Use the spec, model and optimizers of that run, or another directory."
        )


def _shortened(a, b):
    """What a has and b has not, if both are dicts."""
    if isinstance(a, dict) and isinstance(b, dict):
        return {key: value for key, value in a.items() if b.get(key) != value} or f"the order {list(a)}"
    return a
