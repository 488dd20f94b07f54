"""Loading: a whole state, or one shard alone, from an image or from a chain of row deltas over it.

All is read and verified before anything changes. A directory stands for the newest image that is whole; what is
damaged is skipped with a warning that names it.

Legend: S shards, V rows of a stack, E embedding width, K slot width.
"""

import contextlib
import functools
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrec.checkpoint.deltas import (
    advise_leaving_out,
    beside,
    chain,
    chain_is_whole,
    is_delta,
    newest,
    newest_first,
    spec_of,
)
from jaxrec.checkpoint.image import (
    DamagedImage,
    Image,
    is_image,
    leaves_of,
    load_arrays,
    verify,
    warn_skipped,
)
from jaxrec.checkpoint.state import (
    ROW_IDS,
    check_dense,
    layout_of,
    leaf_name,
    place_dense,
    refuse_other,
    replace_part,
    tables_of,
)
from jaxrec.embedding import DeviceTables, HostTables
from jaxrec.embedding.initial import initial_rows
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.files import local_path
from jaxrec.types import RowOptimizer, TrainState

_THREADS, _TRIES = 4, 3


def restore(
    path: str | Path,
    template: TrainState,
    spec: EmbeddingSpec,
    row_optimizer: RowOptimizer | None = None,
    cast: bool = False,
) -> tuple[TrainState, Image]:
    """Loads a whole state into any home, mesh and number of shards, value for value.

    From an image, or from a row delta that was saved with its dense state: then each row has its value from the newest
    delta that holds it, from the base, or its initial value. All is verified before the template changes.

    Args:
      path: an image, a delta, or a directory of them: then the newest from which a whole state can be had, with a
        warning that names what was skipped because it is damaged.
      template: a freshly made state of the wanted placement; host tables are filled in place, all else is replaced.
      spec: of the template; its tables must be those of the image, shards and lookups need not.
      row_optimizer: of device tables, for rows that were never saved; only deltas without a base have any.
      cast: accept dense leaves of another dtype, and cast them to the template's.

    Returns:
      The state, and what the manifest says of the image or delta: go on with `run=image.run`.

    Raises:
      ValueError: there is no image; it was made for other tables, slots or another model (says what differs).
      DamagedImage: the image at `path` is damaged; every image of the directory is.

    Another process may save and prune in the directory meanwhile: then its newest images are looked for again.
    """
    path = local_path(path)
    if is_image(path):
        return _restore(_whole_chain(path), template, spec, row_optimizer, cast)
    for _ in range(_TRIES - 1):
        found = _newest_whole(path)
        try:
            return _restore(found, template, spec, row_optimizer, cast)
        except DamagedImage:  # it was whole: it has been removed since
            continue
    return _restore(_newest_whole(path), template, spec, row_optimizer, cast)


def _restore(found, template, spec, row_optimizer, cast):
    """The state of a verified chain; the template changes only when all of it is read."""
    image, layout = found[-1], layout_of(template.tables, spec)
    for other in found:
        refuse_other(other, "tables", tables_of(spec), other.tables)
        refuse_other(other, "row optimizer slots", layout, other.layout)
        if other.shards != image.shards:
            raise ValueError(f"{other.path} has {other.shards} shards and {image.path} has {image.shards}.")
    if not image.dense:
        raise ValueError(
            f"{image.path} was saved without its dense state, so no whole state can be had from it: restore shards of "
            "it (restore_shard), or an image of the whole state."
        )
    check_dense(image, template.dense, cast)
    rows = _initial_parts(found[0], template.tables, spec, row_optimizer)
    dense = load_arrays(image, leaves_of(image, "dense."))
    for other in found:
        arrays = load_arrays(other, leaves_of(other, "rows."))
        for (name, part), table in rows.items():
            for shard in range(other.shards):
                _write_over(table[shard :: other.shards], arrays, name, shard, part, other.shards)
    tables = template.tables
    host = isinstance(tables, HostTables)
    with tables.overwriting(step=image.step) if host else contextlib.nullcontext():  # mapped files are torn meanwhile
        for (name, part), table in rows.items():
            tables = replace_part(tables, name, part, table[: spec.stacks[name].offsets[-1]])
    return TrainState(place_dense(image, template.dense, dense, cast), tables), image


def _whole_chain(path) -> list[Image]:
    """The chain of an image or a delta, every file of it verified."""
    found = chain(path, advise=beside)
    for image in found:
        verify(image, advise=beside)
    return found


def _newest_whole(directory) -> list[Image]:
    """The verified chain of the newest image or delta of a directory that a whole state can be had from."""
    skipped: list[DamagedImage] = []
    known: dict[str, bool] = {}
    for path in newest_first(directory):
        try:
            whole = chain_is_whole(path, known)
            found = chain(path, advise=beside) if whole else _whole_chain(path)  # which says what is damaged
        except DamagedImage as error:
            skipped.append(error)
            continue
        if found[-1].dense:
            warn_skipped(skipped)
            return found
    if skipped:
        raise DamagedImage(f"every image in {directory} is damaged; the newest one: {skipped[0]}")
    raise ValueError(f"{directory} holds no image of a whole state: give the directory of a run that has saved one.")


def _initial_parts(base, tables, spec, row_optimizer):
    """{(stack, part): array [V of the image, width]} to write a chain over; initial rows if it begins with a delta."""
    rows = {}
    for name, stack in spec.stacks.items():
        padded = -(-stack.offsets[-1] // base.shards) * base.shards
        for part, (width, dtype) in base.layout[name].items():
            rows[name, part] = np.empty((padded, width), dtype)
        if is_delta(base.path.name):
            scales = {table: t.scale for table, t in spec.tables.items()}
            if (base.seed, base.scales) != (spec.seed, scales):
                raise ValueError(
                    f"{base.path} goes over initial rows of seed {base.seed} and scales {base.scales}, not of seed "
                    f"{spec.seed} and {scales}: use the spec of that run."
                )
            row = np.arange(padded)
            rows[name, "value"][:] = initial_rows(row, stack.width, spec.row_scale(name, row), spec.seed)
            for slot, fill in _fills(tables, name, stack, row_optimizer).items():
                rows[name, slot][:] = fill
    return rows


def _fills(tables, name, stack, row_optimizer):
    """{slot: value of a row never touched} of a stack."""
    if isinstance(tables, HostTables):
        return {slot: layout.fill for slot, layout in tables.layout[name].items()}
    if row_optimizer is None:
        raise ValueError("device tables do not know their initial slots: give row_optimizer=...")
    return {slot: layout.fill for slot, layout in row_optimizer.init(stack.width).items()}


def _write_over(table, arrays, name, shard, part, shards):
    """Writes what an image holds of one part over the rows f32[V / S, width] of one shard."""
    saved = arrays.get(leaf_name(name, shard, part))
    ids = arrays.get(leaf_name(name, shard, ROW_IDS))
    if saved is not None:
        table[slice(None) if ids is None else ids // shards] = saved


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

    Raises:
      DamagedImage: an image is missing or damaged (says what to do).
      ValueError: an image is of another spec; there is no such shard.
    """
    path = None if path is None else local_path(path)
    host, spec = isinstance(tables, HostTables), spec_of(tables, spec)
    if not (host or row_optimizer):
        raise ValueError("device tables do not know their initial slots: give row_optimizer=...")
    if not 0 <= shard < spec.shards:
        raise ValueError(f"shard={shard} must lie between 0 and {spec.shards - 1}.")
    path = _resolve(path)
    found = [] if path is None else chain(path, without)
    load = functools.partial(_load_shard, path, spec, layout_of(tables, spec), shard)
    with ThreadPoolExecutor(_THREADS) as pool:
        loaded = list(pool.map(load, found))
    if host:
        with tables.overwriting([shard]):
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


def shard_source(
    sources: Sequence[Path], shard: int, known: dict, without: Collection[str] = ()
) -> tuple[Path, list[DamagedImage]]:
    """The first of some images and deltas that one shard can be had from; reads nothing but what it verifies.

    Args:
      sources: paths, the wanted one first.
      shard: from 0 to S - 1.
      known: what was verified before; it is added to, so that no file is looked at twice.
      without: names of images to leave out.

    Returns:
      The path, and what is wrong with those before it.

    Raises:
      DamagedImage: of the first one, if none is whole.
    """
    damaged: list[DamagedImage] = []
    for path in sources:
        try:
            for image in chain(path, without):
                if (image.path, shard) not in known:
                    mine = {leaf for leaf in leaves_of(image) if leaf.split(".")[-2] == f"{shard:04d}"}
                    known[image.path, shard] = _damage(image, mine, path)
                if known[image.path, shard] is not None:
                    raise known[image.path, shard]
            return path, damaged
        except DamagedImage as error:
            damaged.append(error)
    raise damaged[0]


def _damage(image, leaves, tip):
    """What is wrong with some leaves of an image; None if nothing is."""
    try:
        verify(image, leaves, functools.partial(advise_leaving_out, tip))
    except DamagedImage as error:
        return error
    return None


def _resolve(path):
    if path is None or is_image(path):
        return path
    found = newest(path)
    if found is None:
        raise ValueError(f"{path} holds no image: give the directory of a run that has saved one, or None.")
    return found


def _load_shard(tip, spec, layout, shard, image):
    """Verified leaves of one shard of an image, {name: array}."""
    refuse_other(image, "spec", spec.digest, image.spec)
    refuse_other(image, "row optimizer slots", layout, image.layout)
    mine = {leaf_name(name, shard, part) for name in spec.stacks for part in (ROW_IDS, *image.layout[name])}
    leaves = sorted(mine & leaves_of(image))
    verify(image, leaves, functools.partial(advise_leaving_out, Path(tip)))
    return load_arrays(image, leaves) if leaves else {}


def _overlay(spec, name, shard, parts, loaded):
    """Writes what was loaded over the rows of one shard, oldest first."""
    for arrays in loaded:
        for part, table in parts.items():
            _write_over(table, arrays, name, shard, part, spec.shards)


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
