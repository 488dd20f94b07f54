"""Convert a training state to an image and back, exactly, for any `Tables`, mesh and number of shards.

Servers write and restore their own rows in parallel, and no row crosses the network: each server writes its part of an
image to separate subdirectories and reports sizes and checksums; the saving process writes the manifest and renames.
All must therefore see the same directory, which is checked before anything is written.

Legend: S shards, V rows of a stack, E embedding width, K slot width, R replicas.
"""

import functools
import itertools
import json
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxrec.checkpoint.format import Image, Snapshot, WriteRows, write_leaves
from jaxrec.embedding import EmbeddingSpec, Layout, RemoteTables, Tables
from jaxrec.embedding.tables import RowIds
from jaxrec.sharding import mean_replica
from jaxrec.types import DenseState, TrainState

_PROBE = "probe"


def copies_at_servers(tables: RemoteTables, rows: RowIds) -> WriteRows:
    """Make the servers copy some rows; return what makes them write the copies."""
    token = _new_token()
    tables.track(_copy_rows, lambda shards: (token, {key: ids for key, ids in rows.items() if key[1] in shards}))
    return functools.partial(_write_at_servers, tables, token, True)


def _new_token():
    """Return a unique name: a server's late write for one image must not change the files of another."""
    return uuid.uuid4().hex[:12]


def _write_at_servers(tables, token, copied, directory):
    """Make the servers write; raise ValueError if one does not see the directory, ShardsLost if one is dead."""
    probe, files = directory / _PROBE, dict[str, list[int]]()
    probe.write_text(token)
    for written in tables.run(_write_rows, lambda shards: (str(directory.resolve()), token, copied)).values():
        files |= written
    probe.unlink()
    return files


# ---- at a server


def _copy_rows(server, token, rows):
    server.memory["copies"] = token, row_leaves(server, rows)


def _write_rows(server, directory, token, copied):
    """Write all rows or the copies, once for a token however often the message arrives."""
    with server.memory.setdefault("writing", threading.Lock()):
        if server.memory.get("written", ("",))[0] != token:
            _check_seen(server, Path(directory), token)
            server.memory["written"] = token, (_write_copies if copied else _write_shards)(server, directory, token)
        return server.memory["written"][1]


def _check_seen(server, directory, token):
    probe = directory / _PROBE
    if not probe.is_file() or probe.read_text() != token:
        raise ValueError(
            f"the server of shards {list(server.shards)} does not see {directory}, where it is to save its rows: give "
            "a directory that all machines see under one name, such as one of a shared file system."
        )


def _write_copies(server, directory, token):
    copied, leaves = server.memory.get("copies", ("", {}))
    if copied != token:
        raise OSError(f"the rows to save of shards {list(server.shards)} were lost with an earlier server")
    files = write_leaves(Path(directory), f"{token}.{server.shards[0]:04d}", leaves)
    del server.memory["copies"]
    return files


def _write_shards(server, directory, token):
    def write(stack, shard, parts):
        leaves = {leaf_name(stack, shard, part): rows for part, rows in parts.items()}
        return write_leaves(Path(directory), f"{token}.{stack}.{shard:04d}", leaves)

    return dict(itertools.chain(*(files.items() for files in server.on_shards(write).values())))


ROW_IDS = "row_ids"


def row_leaves(holder: Any, rows: RowIds) -> dict[str, np.ndarray]:
    """Return copies of some rows of tables, or of a server, as leaves {name: array}, with their numbers."""
    leaves: dict[str, np.ndarray] = {}
    for (stack, shard), parts in holder.take(rows).items():
        leaves[leaf_name(stack, shard, ROW_IDS)] = np.array(rows[stack, shard])
        leaves |= {leaf_name(stack, shard, part): array for part, array in parts.items()}
    return leaves


def snapshot(state: TrainState, extra: Mapping[str, Any] | None = None, run: str = "", copy: bool = True) -> Snapshot:
    """Copy a training state to the host, the only blocking part of saving an image.

    Args:
      state: TrainState.
      extra: further JSON values to save.
      run: run id.
      copy: if False, rows are read shard by shard while the image is written (by their servers, if remote), and must
        not change until it is.

    Returns:
      A Snapshot; with `copy` it shares no memory with the state.
    """
    leaves, arrays = dense_leaves(state.dense)
    manifest = manifest_of(state.tables, int(state.dense.step), extra, run, leaves)
    if not copy and isinstance(remote := state.tables.hosted, RemoteTables):
        write = functools.partial(_write_at_servers, remote, _new_token(), False)
        return Snapshot(arrays, manifest, write_remote_rows=write)
    if not copy:
        return Snapshot(arrays, manifest, _shard_by_shard(state.tables))
    for name in state.tables.spec.stacks:
        for part, shards in state.tables.parts(name).items():
            # Device rows are one array, copied to the host at once.
            shards = np.asarray(shards) if isinstance(shards, jax.Array) else shards
            arrays |= {leaf_name(name, shard, part): np.array(rows) for shard, rows in enumerate(shards)}
    return Snapshot(arrays, manifest)


def dense_leaves(dense: DenseState | None) -> tuple[list, dict[str, np.ndarray]]:
    """Return [[path, shape, dtype]] of the leaves of a dense state, and their copies {name: array}."""
    leaves, arrays = [], {}
    for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(dense)):
        shape, dtype = _kind(leaf)
        leaves.append([jax.tree_util.keystr(path), shape, dtype])
        array = np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        if array.size:  # Orbax refuses empty arrays
            arrays[dense_name(number)] = array
    return leaves, arrays


def dense_name(number: int) -> str:
    """Return the name of the leaf at an index of a manifest's `dense`."""
    return f"dense.{number:04d}"


def _is_key(leaf):
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _kind(leaf):
    """Return shape and dtype of a leaf: an array, a Python number, or PRNG keys."""
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return list(leaf.shape), str(leaf.dtype)


def manifest_of(tables: Tables, step: int, extra=None, run="", dense=(), parents=None) -> dict[str, Any]:
    """Return the manifest fields of a state, see `Image`; the files are added when they are written."""
    json.dumps(extra)  # values that are not JSON raise here, not in the writing thread
    spec = tables.spec
    return {
        "run": run, "step": step, "tables": tables_of(spec), "shards": spec.shards, "layout": described(tables.layout),
        "seed": spec.seed, "scales": {name: table.scale for name, table in spec.tables.items()}, "spec": spec.digest,
        "dense": list(dense), "extra": dict(extra or {}), "parents": dict(parents or {}),
    }  # fmt: skip


def place_dense(image: Image, template: DenseState, arrays: Mapping[str, np.ndarray]) -> DenseState:
    """Return the dense state of an image, each leaf placed as in the template, after checking paths, shapes and dtypes.

    An image of a single replica fills any number of replicas.
    """
    _check_saved_dense(image, template)
    leaves = []
    for number, (old, (_, shape, dtype)) in enumerate(zip(jax.tree.leaves(template), image.dense, strict=True)):
        saved = arrays.get(dense_name(number))
        leaves.append(_place(np.zeros(shape, dtype) if saved is None else saved, old))
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _place(saved, old):
    """Return a saved leaf with the type, dtype, shape and sharding of the leaf it replaces."""
    if _is_key(old):
        saved = np.broadcast_to(saved, (*old.shape, *saved.shape[-1:]))
        return jax.device_put(jax.random.wrap_key_data(saved, impl=jax.random.key_impl(old)), old.sharding)
    if not hasattr(old, "dtype"):
        return type(old)(saved)  # a Python number, which some optimizers keep
    saved = np.broadcast_to(saved, old.shape)
    return jax.device_put(saved, old.sharding) if isinstance(old, jax.Array) else np.array(saved)


def _check_saved_dense(image, template):
    wanted = {jax.tree_util.keystr(p): _kind(leaf) for p, leaf in jax.tree_util.tree_leaves_with_path(template)}
    wanted = {path: list(kind) for path, kind in wanted.items()}
    found = {path: [shape, dtype] for path, shape, dtype in image.dense}
    for path, (shape, dtype) in found.items():
        mine = wanted.get(path, [[], dtype])
        if shape[:1] == [1] and shape[1:] == mine[0][1:]:
            mine[0] = shape  # a single replica fills any number of replicas
    more, but_the_first = "", lambda kinds: {path: (shape[1:], dtype) for path, (shape, dtype) in kinds.items()}
    if but_the_first(wanted) == but_the_first(found):
        more = (
            " Perhaps the number of replicas is another one: `restore_for_prediction` takes one of them, or the mean."
        )
    check_matches(image, "dense state", wanted, found, more)


def select_replica(
    image: Image, arrays: Mapping[str, np.ndarray], replica: int | Literal["mean"]
) -> tuple[Image, dict[str, np.ndarray]]:
    """Reduce an image's dense leaves, and their arrays, to the step and the parameters of a replica or of the mean."""
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
    """Return the name of the leaf that holds 'value', a slot, or the 'row_ids' of a delta, for one shard."""
    return f"rows.{stack}.{shard:04d}.{part}"


def _shard_by_shard(tables: Tables) -> Iterator[dict[str, np.ndarray]]:
    """Yield {leaf: rows} of all stacks, shard by shard; of device tables, one shard is on the host at a time."""
    parts = {name: tables.parts(name) for name in tables.spec.stacks}
    for shard in range(tables.spec.shards):
        yield {
            leaf_name(name, shard, part): np.asarray(rows[shard])
            for name, mine in parts.items()
            for part, rows in mine.items()
        }


def described(layout: Layout) -> dict[str, dict[str, list]]:
    """Return {stack: {part: [width, dtype]}}, the form of a layout in manifests."""
    return {name: {part: [one.width, one.dtype] for part, one in parts.items()} for name, parts in layout.items()}


def tables_of(spec: EmbeddingSpec) -> dict[str, list[int]]:
    """Return {table: [rows, width]} in the order of a spec."""
    return {name: [table.rows, table.width] for name, table in spec.tables.items()}


def check_matches(image: Image, what: str, wanted, found, more: str = "") -> None:
    """Raise ValueError, naming the differences, if a property of an image is not as wanted; `more` ends its message."""
    # Tables are compared in order, which determines the row numbers.
    if json.dumps(wanted) != json.dumps(found):
        raise ValueError(
            f"{image.path} was saved with other {what}: it has {_shortened(found, wanted)}, wanted "
            f"{_shortened(wanted, found)}. Use the spec, model and optimizers of that run, or another directory.{more}"
        )


def check_has_grown(image: Image, tables: dict[str, list[int]]) -> None:
    """Raise ValueError if a table of an image is missing in `tables` {name: [rows, width]}, narrower or shorter."""
    wrong = {
        name: (was, tables.get(name))
        for name, was in image.tables.items()
        if name not in tables or tables[name][1] != was[1] or tables[name][0] < was[0]
    }
    if wrong:
        name, (was, now) = next(iter(wrong.items()))
        raise ValueError(
            f"{image.path} has {name!r} of {was} (rows, width), and here it is {now or 'missing'}: tables may have "
            "more rows and be more, but each keeps its name, its width and the rows that it had."
        )


def _shortened(a, b):
    """Return the items of a that differ from b, if both are dicts; else a."""
    if isinstance(a, dict) and isinstance(b, dict):
        return {key: value for key, value in a.items() if b.get(key) != value} or f"the order {list(a)}"
    return a
