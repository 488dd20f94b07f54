"""From a training state to an image and back: any home of the rows, any mesh, any number of shards, value for value.

Legend: S shards, V rows of a stack, E embedding width, K slot width, R replicas.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jaxrec.checkpoint.image import (
    Image,
    Snapshot,
    images,
    leaves_of,
    load_arrays,
    needed,
    read_manifest,
    remove_image,
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
    arrays = {leaf_name(*key): np.array(array) for key, array in parts.items()}
    dense = jax.tree_util.tree_leaves_with_path(state.dense)
    described = []
    for number, (path, leaf) in enumerate(dense):
        array = np.array(leaf)
        described.append([jax.tree_util.keystr(path), list(array.shape), str(array.dtype)])
        if array.size:  # Orbax refuses empty arrays
            arrays[f"dense.{number:04d}"] = array
    manifest = manifest_of(spec, slots_of(state.tables, spec), int(state.dense.step), extra, dense=described)
    return Snapshot(arrays, manifest)


def manifest_of(spec: EmbeddingSpec, slots, step: int, extra=None, dense=(), parents=()) -> dict[str, Any]:
    """What a manifest says of the state it belongs to, see `Image`; its files are added when they are written."""
    return {
        "step": step, "tables": _tables_of(spec), "shards": spec.shards, "slots": slots, "seed": spec.seed,
        "spec": spec.digest, "dense": list(dense), "extra": dict(extra or {}), "parents": list(parents),
    }  # fmt: skip


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
    refuse_other(image, "tables", _tables_of(spec), image.tables)
    refuse_other(image, "row optimizer slots", slots_of(template.tables, spec), image.slots)
    dense, shapes = _check_dense(image, template.dense)
    verify(image)
    arrays = load_arrays(image, leaves_of(image))
    tables = template.tables
    for name, stack in spec.stacks.items():
        for part in ("value", *image.slots[name]):
            rows = np.stack([arrays.pop(leaf_name(name, shard, part)) for shard in range(image.shards)], axis=1)
            rows = rows.reshape(-1, rows.shape[-1])[: stack.offsets[-1]]  # all rows in order, padding cut off
            tables = _replace_part(tables, name, part, rows)
    leaves = [arrays.get(f"dense.{n:04d}", np.zeros(shape, dtype)) for n, (shape, dtype) in enumerate(shapes)]
    placed = [
        jax.device_put(np.broadcast_to(leaf, old.shape), old.sharding) for leaf, old in zip(leaves, dense, strict=True)
    ]
    return TrainState(jax.tree.unflatten(jax.tree.structure(template.dense), placed), tables), image


class Background:
    """One job at a time in a thread; what it raises is raised by the next call, and on leaving the `with` block."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.stall_seconds = 0.0  # how long training has waited for saves, in all

    def wait(self) -> None:
        """Waits until what is being written is committed; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def done(self) -> bool:
        """Whether nothing is being written; raises what went wrong."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self.wait()
        return True

    def _begin(self, job: Callable, *args) -> None:
        def run():
            try:
                job(*args)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join()


class Checkpointer(Background):
    """Saves images of a run while training goes on; one at a time, in a thread.

    Args:
      directory: where the images go, as step_N.
      spec: the tables.
      keep: how many images to keep; older ones are removed after a newer one is committed, but for those that row
        deltas need.

    A failed save is raised by the next call, and on leaving the `with` block.
    """

    def __init__(self, directory: str | Path, spec: EmbeddingSpec, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1.")
        super().__init__()
        self.directory, self._spec, self._keep = Path(directory), spec, keep

    def save(self, state: TrainState, extra: Mapping[str, Any] | None = None) -> float:
        """Copies the state and begins to write it; returns the seconds that training waited.

        An image of the same step that is there already is left as it is.
        """
        start = time.perf_counter()
        self.wait()
        path = self.directory / f"step_{int(state.dense.step):08d}"
        if not path.exists():
            self._begin(self._write, path, snapshot(state, self._spec, extra))
        stall = time.perf_counter() - start
        self.stall_seconds += stall
        return stall

    def _write(self, path, image):
        write_image(path, image)
        for old in images(self.directory)[self._keep :]:
            if old.name not in needed(self.directory):
                remove_image(old)


def leaf_name(stack: str, shard: int, part: str) -> str:
    """Name of the leaf that holds 'value', a slot, or the 'row_ids' of a delta, of one shard."""
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


def slots_of(tables, spec: EmbeddingSpec) -> dict[str, dict[str, int]]:
    """{stack: {slot: K}} of tables of either home, in the order of the spec."""
    if isinstance(tables, HostTables):
        return {name: {slot: layout.width for slot, layout in tables.layout[name].items()} for name in spec.stacks}
    return {name: {slot: array.shape[-1] for slot, array in tables.slots[name].items()} for name in spec.stacks}


def _tables_of(spec):
    return {name: [table.rows, table.width] for name, table in spec.tables.items()}


def refuse_other(image: Image, what: str, wanted, found) -> None:
    """Raises ValueError, with what differs, if an image was saved with something else than wanted."""
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
    refuse_other(image, "dense state", wanted, found)
    return [leaf for _, leaf in leaves], [(tuple(shape), dtype) for _, shape, dtype in image.dense]
