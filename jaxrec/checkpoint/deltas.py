"""Row deltas: small images of some rows, over a base, from which one shard is restored alone.

    directory/step_00000010     a base: an image of the whole state, from `Checkpointer`; or none, then initial rows
    directory/delta_000003      some rows of some shards; `parents` in its manifest: all images below, oldest first

A chain is a base, if there is one, and deltas in order; a row has its value from the newest that holds it, or its
initial value. What a delta needs is named in it, so a missing parent is an error and never a row of the wrong time.
CPR (arXiv 2011.02999) reloads a failed shard from such a chain: a mosaic of rows of several times.

Legend: S shards, V rows of a stack, E embedding width, K slot width, n rows of a delta in one shard.
"""

import functools
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrec.checkpoint.image import (
    Image,
    Snapshot,
    deltas,
    images,
    leaves_of,
    load_arrays,
    read_manifest,
    verify,
    write_image,
)
from jaxrec.checkpoint.state import leaf_name, manifest_of, refuse_other, slots_of
from jaxrec.embedding import DeviceTables, HostTables, bucket
from jaxrec.embedding.initial import initial_rows
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.types import Plan, RowOptimizer

RowIds = Mapping[tuple[str, int], np.ndarray]  # {(stack, shard): i32[n] rows of the stack, all of that shard}
ROW_IDS = "row_ids"
_THREADS = 4


def newest(directory: str | Path) -> Path | None:
    """The image or delta of a directory that stands for the latest step; None if there is neither.

    Errors:
      ValueError: the newest delta is damaged; says which images are left.
    """
    whole, small = images(directory), deltas(directory)
    if not small:
        return whole[0] if whole else None
    step = read_manifest(small[0], functools.partial(advise, small[0])).step
    return whole[0] if whole and int(whole[0].name[5:]) >= step else small[0]


def chain(path: str | Path, without: Collection[str] = ()) -> list[Image]:
    """The manifests of a delta and of all images below it.

    Args:
      path: a delta or an image.
      without: names of images to leave out.

    Returns:
      Oldest first: the base if there is one, then deltas.

    Errors:
      ValueError: one is missing or damaged; names it and what to do.
    """
    path = Path(path)
    say = functools.partial(advise, path)
    tip = read_manifest(path, say)
    below = [read_manifest(path.parent / name, say) for name in tip.parents if name not in without]
    return below + [tip] * (path.name not in without)


def advise(tip: Path, path: Path) -> str:
    """The sentence that ends an error about an image of the chain of a tip."""
    if path != tip or not _torn(path):
        return (
            f"Nothing was changed. without=[{path.name!r}] restores all else of {tip.name}: rows saved in no newer "
            "delta get their values from before it, or initial ones. `compact` takes it too, for the chain to go on."
        )
    older = [str(other) for other in [*deltas(path.parent), *images(path.parent)] if other != path]
    return f"Nothing was changed. Other images beside it: {', '.join(older) or 'none'}."


def _torn(path):
    """Whether a manifest itself cannot be believed: what lies below the image is then not known."""
    try:
        read_manifest(path, str)
    except ValueError:
        return True
    return False


def copy_rows(
    tables, rows: RowIds, step: int, spec: EmbeddingSpec | None = None, below: Iterable[str] = (), extra=None
) -> Snapshot:
    """Copies some rows and their slots to the host; the only part of saving them that training waits for.

    Args:
      tables: either home.
      rows: {(stack, shard): i32[n]}, rows of the stack as in `Plan.unique`; shards may be left out.
      step: steps trained.
      spec: of device tables, which do not know it.
      below: names of the images that the delta goes over, oldest first.
      extra: JSON values to save along.

    Returns:
      A Snapshot that shares no memory with the tables.

    Errors:
      ValueError: a row is of another shard or outside its stack.
    """
    spec = _spec_of(tables, spec)
    rows = {key: np.asarray(ids, np.int32) for key, ids in rows.items() if len(ids)}
    with ThreadPoolExecutor(_THREADS) as pool:  # training waits: its cores are free
        list(pool.map(functools.partial(_check_rows, spec), rows, rows.values()))
        copy = functools.partial(_copy_host, pool) if isinstance(tables, HostTables) else _copy_device
        arrays = {leaf_name(*key, ROW_IDS): ids.copy() for key, ids in rows.items()} | copy(tables, rows)
    return Snapshot(arrays, manifest_of(spec, slots_of(tables, spec), step, extra, parents=below))


def _spec_of(tables, spec):
    if isinstance(tables, HostTables):
        return tables.spec
    if spec is None:
        raise ValueError("device tables do not know their spec: give spec=...")
    return spec


def _check_rows(spec, key, ids):
    name, shard = key
    if name not in spec.stacks or not 0 <= shard < spec.shards:
        raise ValueError(f"rows of {key}: stacks are {list(spec.stacks)}, shards 0 to {spec.shards - 1}.")
    if ids.min() < 0 or ids.max() >= spec.stacks[name].rows or (ids % spec.shards != shard).any():
        raise ValueError(
            f"rows of {name} for shard {shard} run from {ids.min()} to {ids.max()}: they must be rows r of the stack, "
            f"0 <= r < {spec.stacks[name].rows}, with r % {spec.shards} == {shard}. Pick them shard by shard."
        )


def _copy_host(pool, tables, rows):
    arrays = {}  # allocated on this thread, to which glibc gives back what it freed (see `keep_memory`)
    for (name, shard), ids in rows.items():
        for part, table in tables.shards[name][shard].items():
            arrays[leaf_name(name, shard, part)] = np.empty((len(ids), table.shape[1]), np.float32)

    def copy(key):
        name, shard = key
        local = rows[key] // tables.spec.shards
        for part, table in tables.shards[name][shard].items():
            table.take(local, axis=0, out=arrays[leaf_name(name, shard, part)], mode="clip")

    list(pool.map(copy, rows))
    return arrays


def _copy_device(tables, rows):
    """Reads a stack's rows of all shards in one gather, padded to one of few sizes."""
    arrays, shards = {}, tables.shards
    for name in {name: None for name, _ in rows}:
        mine = [rows.get((name, shard), np.zeros(0, np.int32)) for shard in range(shards)]
        absent = tables.value[name].shape[1] * shards
        unique = np.full((shards, bucket(max(map(len, mine)))), absent, np.int32)
        for shard, ids in enumerate(mine):
            unique[shard, : len(ids)] = ids
        count = np.array([len(ids) for ids in mine], np.int32)
        read = _read(tables, {name: Plan(unique, {}, count, np.int32(0))})[name]
        for part, array in {"value": read.value, **read.slots}.items():
            host = np.asarray(array)
            for shard, ids in enumerate(mine):
                if len(ids):
                    arrays[leaf_name(name, shard, part)] = host[shard, : len(ids)]
    return arrays


_read = jax.jit(lambda tables, plans: tables.read(plans))


def save_rows(
    directory: str | Path,
    base: str | Path | None,
    rows: RowIds,
    tables,
    step: int,
    spec: EmbeddingSpec | None = None,
    extra=None,
) -> Path | None:
    """Saves rows as a new delta and waits until it is committed; `RowCheckpointer` does so while training goes on.

    Args:
      directory: of the run's images.
      base: what the delta goes over: an image or a delta in that directory; None for initial rows.
      rows: {(stack, shard): i32[n]} rows of the stack; without any, nothing is written.
      tables: either home.
      step: steps trained.
      spec: of device tables, which do not know it.
      extra: JSON values to save along.

    Returns:
      The path of the delta; `base` if there was nothing to save.

    Errors:
      ValueError: rows of another shard; a base that is not in the directory, or damaged.
      OSError: the disk is full or read-only; older images are as they were.
    """
    directory = Path(directory)
    below = names_below(directory, base)
    image = copy_rows(tables, rows, step, spec, below, extra)
    if not image.arrays:
        return None if base is None else Path(base)
    return write_delta(directory, image)


def names_below(directory: Path, base: str | Path | None) -> list[str]:
    """Names of all images that a delta over a base needs, oldest first."""
    if base is None:
        return []
    if Path(base).resolve().parent != directory.resolve():
        raise ValueError(f"the base {base} must lie in {directory}, beside the deltas over it.")
    return [image.path.name for image in chain(directory / Path(base).name)]


def write_delta(directory: Path, image: Snapshot) -> Path:
    """Writes rows from `copy_rows` as the next delta of a directory; returns its path."""
    lost = [name for name in image.manifest["parents"] if not (directory / name).is_dir()]
    if lost:
        raise ValueError(
            f"{lost} in {directory} are gone, and rows are to be saved over them: save a whole image and go on over it."
        )
    number = max((int(path.name[6:]) for path in deltas(directory)), default=0) + 1
    path = directory / f"delta_{number:06d}"
    write_image(path, image)
    return path


def restore_shard(
    path: str | Path | None,
    tables,
    shard: int,
    spec: EmbeddingSpec | None = None,
    row_optimizer: RowOptimizer | None = None,
    without: Collection[str] = (),
) -> tuple[Any, list[Image]]:
    """Loads one shard of all stacks: base, deltas in order, initial rows for what was never saved; reads nothing else.

    All is read and verified before the first row changes.

    Args:
      path: a delta, an image, or a directory of them (the newest); None for initial rows.
      tables: of the number of shards it was saved with. Host tables change in place and need no mesh; device tables
        are donated.
      shard: from 0 to S - 1.
      spec, row_optimizer: of device tables, which do not know them; host tables do.
      without: names of images of the chain to leave out.

    Returns:
      The tables, and the manifests of what was read, oldest first.

    Errors:
      ValueError: an image is missing, damaged or of another spec (says what to do); there is no such shard.
    """
    host, spec = isinstance(tables, HostTables), _spec_of(tables, spec)
    if not (host or row_optimizer):
        raise ValueError("device tables do not know their initial slots: give row_optimizer=...")
    if not 0 <= shard < spec.shards:
        raise ValueError(f"shard={shard} must lie between 0 and {spec.shards - 1}.")
    path = _resolve(path)
    found = [] if path is None else chain(path, without)
    load = functools.partial(_load_shard, path, spec, slots_of(tables, spec), shard)
    with ThreadPoolExecutor(_THREADS) as pool:
        loaded = list(pool.map(load, found))
    if host:
        for name in spec.stacks:
            if not found or is_delta(found[0].path.name):
                tables.reset_shard(name, shard)
            _overlay(spec, name, shard, tables.shards[name][shard], loaded)
        return tables, found
    for name in spec.stacks:
        parts = _initial_shard(spec, row_optimizer, name, shard)
        _overlay(spec, name, shard, parts, loaded)
        tables = _replace_shard(tables, name, shard, parts)
    return tables, found


def _resolve(path):
    if path is None or (Path(path) / "manifest.json").exists():
        return path
    return newest(path) if images(path) or deltas(path) else path


def is_delta(name: str) -> bool:
    """Whether an image of that name holds some rows only."""
    return name.startswith("delta_")


def _load_shard(tip, spec, slots, shard, image):
    """Verified leaves of one shard of an image, {name: array}."""
    refuse_other(image, "spec", spec.digest, image.spec)
    refuse_other(image, "row optimizer slots", slots, image.slots)
    mine = {leaf_name(name, shard, part) for name in spec.stacks for part in (ROW_IDS, "value", *image.slots[name])}
    leaves = sorted(mine & leaves_of(image))
    verify(image, leaves, functools.partial(advise, Path(tip)))
    return load_arrays(image, leaves) if leaves else {}


def _overlay(spec, name, shard, parts, loaded):
    """Writes what was loaded over the rows of one shard, oldest first."""
    for arrays in loaded:
        ids = arrays.get(leaf_name(name, shard, ROW_IDS))
        for part, table in parts.items():
            saved = arrays.get(leaf_name(name, shard, part))
            if saved is not None:
                table[slice(None) if ids is None else ids // spec.shards] = saved


def _initial_shard(spec, row_optimizer, name, shard):
    stack = spec.stacks[name]
    row = np.arange(stack.rows_per_shard) * spec.shards + shard
    value = initial_rows(row, stack.width, spec.row_scale(name, row), spec.seed)
    fills = row_optimizer.init(stack.width).items()
    return {"value": value} | {
        slot: np.full((len(row), layout.width), layout.fill, np.float32) for slot, layout in fills
    }


def _replace_shard(tables, name, shard, parts):
    old = {"value": tables.value[name], **tables.slots[name]}
    new = {part: _set_shard(table, shard, parts[part], table.sharding) for part, table in old.items()}
    value = {**tables.value, name: new.pop("value")}
    return DeviceTables(value, {**tables.slots, name: new}, tables.shards)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _set_shard(table, shard, rows, sharding):
    return jax.lax.with_sharding_constraint(table.at[shard].set(rows), sharding)
