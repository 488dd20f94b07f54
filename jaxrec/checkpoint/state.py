"""From a training state to an image and back: any home of the rows, any mesh, any number of shards, value for value.

Legend: S shards, V rows of a stack, E embedding width, K slot width, R replicas.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrec.checkpoint.image import (
    PARTIAL,
    Image,
    Snapshot,
    images,
    load_arrays,
    read_manifest,
    verify,
    write_image,
)  # fmt: skip
from jaxrec.embedding import DeviceTables, HostTables
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.types import DenseState, TrainState


def snapshot(state: TrainState, spec: EmbeddingSpec, extra: Mapping[str, Any] | None = None) -> Snapshot:
    """Copies a training state to the host; the only part of saving that training waits for.

    Args:
      state: TrainState with either home.
      spec: the tables.
      extra: JSON values to save along.

    Returns:
      A Snapshot that shares no memory with the state.
    """
    parts = _table_parts(state.tables)
    arrays = {_leaf(*key): np.array(array) for key, array in parts.items()}
    dense = jax.tree_util.tree_leaves_with_path(state.dense)
    described = []
    for number, (path, leaf) in enumerate(dense):
        array = np.array(leaf)
        described.append([jax.tree_util.keystr(path), list(array.shape), str(array.dtype)])
        if array.size:  # Orbax refuses empty arrays
            arrays[f"dense.{number:04d}"] = array
    slots: dict[str, dict[str, int]] = {name: {} for name in spec.stacks}
    for (name, _, part), array in parts.items():
        if part != "value":
            slots[name][part] = array.shape[-1]
    manifest = {
        "step": int(state.dense.step), "tables": _tables_of(spec), "shards": spec.shards, "slots": slots,
        "seed": spec.seed, "spec": spec.digest, "dense": described, "extra": dict(extra or {}), "parents": [],
    }  # fmt: skip
    return Snapshot(arrays, manifest)


def restore(path: str | Path, template: TrainState, spec: EmbeddingSpec) -> tuple[TrainState, Image]:
    """Loads an image into a state of any home, mesh and number of shards, value for value.

    Args:
      path: the image.
      template: a freshly made state of the wanted placement; host tables are filled in place, all else is replaced.
      spec: of the template; its tables must be those of the image, shards and lookups need not.

    Returns:
      The state and the image's manifest.

    Errors:
      ValueError: the image is damaged, or was made for other tables, slots or another model; says what differs.
    """
    image = read_manifest(path)
    slots = {name: {} for name in spec.stacks} | _slots_of(template.tables)
    _refuse_other(image, "tables", _tables_of(spec), image.tables)
    _refuse_other(image, "row optimizer slots", slots, image.slots)
    dense, shapes = _check_dense(image, template.dense)
    verify(image)
    arrays = load_arrays(image, {name.split("/")[1] for name in image.files if name.count("/") > 1})
    tables = template.tables
    for name, stack in spec.stacks.items():
        for part in ("value", *image.slots[name]):
            rows = np.stack([arrays.pop(_leaf(name, shard, part)) for shard in range(image.shards)], axis=1)
            rows = rows.reshape(-1, rows.shape[-1])[: stack.offsets[-1]]  # all rows in order, padding cut off
            tables = _replace_part(tables, name, part, rows)
    leaves = [arrays.get(f"dense.{n:04d}", np.zeros(shape, dtype)) for n, (shape, dtype) in enumerate(shapes)]
    placed = [
        jax.device_put(np.broadcast_to(leaf, old.shape), old.sharding) for leaf, old in zip(leaves, dense, strict=True)
    ]
    return TrainState(jax.tree.unflatten(jax.tree.structure(template.dense), placed), tables), image


def restore_shard(path: str | Path, tables: HostTables, shard: int) -> Image:
    """Loads one shard of all stacks into host tables of the same number of shards; reads nothing else.

    Args:
      path: the image.
      tables: as when it was saved; needs no mesh.
      shard: from 0 to S - 1.

    Errors:
      ValueError: the image is damaged or of another spec; there is no such shard.
    """
    image, spec = read_manifest(path), tables.spec
    _refuse_other(image, "spec", spec.digest, image.spec)
    _refuse_other(image, "row optimizer slots", _slots_of(tables), image.slots)
    if not 0 <= shard < spec.shards:
        raise ValueError(f"shard={shard} must lie between 0 and {spec.shards - 1}.")
    leaves = {_leaf(name, shard, part): (name, part) for name in spec.stacks for part in ("value", *image.slots[name])}
    verify(image, leaves)
    for leaf, array in load_arrays(image, list(leaves)).items():
        name, part = leaves[leaf]
        tables.shards[name][shard][part][:] = array
    return image


class Checkpointer:
    """Saves images of a run while training goes on; one at a time, in a thread.

    Args:
      directory: where the images go, as step_N.
      spec: the tables.
      keep: how many images to keep; older ones are removed after a newer one is committed.

    A failed save is raised by the next call, and on leaving the `with` block.
    """

    def __init__(self, directory: str | Path, spec: EmbeddingSpec, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1.")
        self.directory, self._spec, self._keep = Path(directory), spec, keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.stall_seconds = 0.0  # how long training has waited for saves, in all

    def save(self, state: TrainState, extra: Mapping[str, Any] | None = None) -> float:
        """Copies the state and begins to write it; returns the seconds that training waited.

        An image of the same step that is there already is left as it is.
        """
        start = time.perf_counter()
        self.wait()
        path = self.directory / f"step_{int(state.dense.step):08d}"
        if not path.exists():
            image = snapshot(state, self._spec, extra)
            self._thread = threading.Thread(target=self._write, args=(path, image), name="checkpoint")
            self._thread.start()
        stall = time.perf_counter() - start
        self.stall_seconds += stall
        return stall

    def wait(self) -> None:
        """Waits until the image in work is committed; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, path, image):
        try:
            write_image(path, image)
            for old in images(self.directory)[self._keep :]:
                doomed = old.with_name(old.name + PARTIAL)  # never half an image under a whole one's name
                os.rename(old, doomed)
                shutil.rmtree(doomed)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join()


def _leaf(stack, shard, part):
    return f"rows.{stack}.{shard:04d}.{part}"


def _table_parts(tables):
    """{(stack, shard, part): array} of either home."""
    if isinstance(tables, HostTables):
        return {
            (name, shard, part): array
            for name, shards in tables.shards.items()
            for shard, parts in enumerate(shards)
            for part, array in parts.items()
        }
    parts: dict[tuple[str, int, str], np.ndarray] = {}
    for name in tables.value:
        for part, array in {"value": tables.value[name], **tables.slots[name]}.items():
            host = np.asarray(array)
            parts |= {(name, shard, part): host[shard] for shard in range(tables.shards)}
    return parts


def _replace_part(tables, name, part, rows):
    """Tables of either home with all rows f32[rows in use, width] of one part; rows not in use keep their values."""
    if isinstance(tables, HostTables):
        for shard, parts in enumerate(tables.shards[name]):
            mine = rows[shard :: tables.spec.shards]
            parts[part][: len(mine)] = mine
        return tables
    old = tables.value[name] if part == "value" else tables.slots[name][part]
    new = np.array(old)
    for shard in range(tables.shards):
        mine = rows[shard :: tables.shards]
        new[shard, : len(mine)] = mine
    placed = jax.device_put(new, old.sharding)
    if part == "value":
        return DeviceTables({**tables.value, name: placed}, tables.slots, tables.shards)
    return DeviceTables(tables.value, {**tables.slots, name: {**tables.slots[name], part: placed}}, tables.shards)


def _slots_of(tables):
    if isinstance(tables, HostTables):
        return {name: {slot: layout.width for slot, layout in slots.items()} for name, slots in tables.layout.items()}
    return {name: {slot: array.shape[-1] for slot, array in slots.items()} for name, slots in tables.slots.items()}


def _tables_of(spec):
    return {name: [table.rows, table.width] for name, table in spec.tables.items()}


def _refuse_other(image, what, wanted, found):
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


def _check_dense(image, dense: DenseState):
    """Leaves of the template's dense state and the saved shapes, after comparing them."""
    leaves = jax.tree_util.tree_leaves_with_path(dense)
    wanted = {jax.tree_util.keystr(path): [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves}
    found = {path: [shape, dtype] for path, shape, dtype in image.dense}
    for path in wanted:  # an image of one replica fills any number of them
        if path in found and found[path][0][:1] == [1] and found[path][0][1:] == wanted[path][0][1:]:
            wanted[path] = found[path]
    _refuse_other(image, "dense state", wanted, found)
    return [leaf for _, leaf in leaves], [(tuple(shape), dtype) for _, shape, dtype in image.dense]
