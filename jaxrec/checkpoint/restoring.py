"""Loading: a whole state, or one shard alone, from an image or from a chain of row deltas over it.

All is read and verified before anything changes. A directory stands for the newest image that is
whole; what is damaged is skipped with a warning that names it.

Legend: S shards, V rows of a stack, E embedding width, K slot width.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from jaxrec.checkpoint.deltas import (
    advise_leaving_out,
    beside,
    chain,
    chain_is_whole,
    is_delta,
    newest,
    newest_first,
)
from jaxrec.checkpoint.elsewhere import live_elsewhere
from jaxrec.checkpoint.image import DamagedImage, Image, leaves_of, load_arrays, verify, warn_skipped
from jaxrec.checkpoint.names import is_image
from jaxrec.checkpoint.state import (
    ROW_IDS,
    check_saved_dense,
    described,
    leaf_name,
    of_replica,
    place_dense,
    refuse_other,
    tables_of,
)
from jaxrec.embedding import Tables
from jaxrec.embedding.tables import empty_parts, fill_initial, initial_parts
from jaxrec.files import local_path
from jaxrec.types import TrainState

_THREADS, _TRIES = 4, 3
Home = TypeVar("Home", bound=Tables)
Loaded = TypeVar("Loaded")


def restore(
    path: str | Path,
    template: TrainState,
    cast: bool = False,
) -> tuple[TrainState, Image]:
    """Loads a whole state into any home, mesh and number of shards, value for value.

    From an image, or from a row delta that was saved with its dense state: then each row has its
    value from the newest delta that holds it, from the base, or its initial value. All is verified
    before the template changes.

    Args:
      path: an image, a delta, or a directory of them: then the newest from which a whole state can
        be had, with a warning that names what was skipped because it is damaged.
      template: a freshly made state of the wanted placement, whose tables must be those of the
        image; shards and lookups need not. Host tables are filled in place, those of devices are
        donated.
      cast: accept dense leaves of another dtype, and cast them to the template's.

    Returns:
      The state, and what the manifest says of the image or delta: go on with `run=image.run`.

    Raises:
      ValueError: there is no image; it was made for other tables, slots or another model (says what
        differs).
      DamagedImage: the image at `path` is damaged; every image of the directory is.

    Another process may save and prune in the directory meanwhile: then its newest images are looked
    for again.
    """
    return with_chain(path, lambda found: fill(found, template, cast))


def with_chain(path: str | Path, load: Callable[[list[Image]], Loaded], dense: bool = True) -> Loaded:
    """Loads from the verified chain of an image, or of the newest whole one of a directory.

    Args:
      path: as for `restore`.
      load: makes something of the chain, oldest image first.
      dense: whether the newest image must have a dense state, so that a whole state can be had.

    Raises:
      ValueError, DamagedImage: as `restore`.
    """
    path = local_path(path)
    if is_image(path):
        return load(_whole_chain(path))
    for _ in range(_TRIES - 1):
        found = _newest_whole(path, dense)
        try:
            return load(found)
        except DamagedImage:  # it was whole: it has been removed since
            continue
    return load(_newest_whole(path, dense))


def fill(
    found: list[Image], template: TrainState, cast: bool = False, replica: int | Literal["mean"] | None = None
) -> tuple[TrainState, Image]:
    """The state of a verified chain; the template changes only when all of it is read.

    Args:
      found: the chain, oldest image first.
      template, cast: as for `restore`.
      replica: whose parameters to take, for a template without optimizers; the whole state if None.
    """
    image, tables = found[-1], template.tables
    spec, layout = tables.spec, described(tables.layout)
    for other in found:
        refuse_other(other, "tables", tables_of(spec), other.tables)
        if replica is None:
            refuse_other(other, "row optimizer slots", layout, other.layout)
        if other.shards != image.shards:
            raise ValueError(f"{other.path} has {other.shards} shards and {image.path} has {image.shards}.")
    if not image.dense:
        raise ValueError(
            f"{image.path} was saved without its dense state, so no whole state can be had from it: restore shards of "
            "it (restore_shard), or an image of the whole state."
        )
    saved, dense = image, load_arrays(image, leaves_of(image, "dense."))
    if replica is not None:
        saved, dense = of_replica(image, dense, replica)
    check_saved_dense(saved, template.dense, cast)
    placed = place_dense(saved, template.dense, dense, cast)
    if live_elsewhere(tables) and all(other.spec == spec.digest for other in found):
        return TrainState(placed, _filled_there(image, tables)), image
    rows = _rows_below(found[0], tables)
    for other in found:
        arrays = load_arrays(other, _leaves_with(layout, other.shards) & leaves_of(other, "rows."))
        for (name, part), table in rows.items():
            for shard in range(other.shards):
                _write_over(table[shard :: other.shards], arrays, name, shard, part, other.shards)
    with tables.overwriting(step=image.step):  # files say that they are torn meanwhile
        for name, stack in spec.stacks.items():
            used = {part: rows[name, part][: stack.offsets[-1]] for part in layout[name]}
            for shard in range(spec.shards):
                mine = {part: table[shard :: spec.shards] for part, table in used.items()}
                tables = tables.with_shard(name, shard, mine)
    return TrainState(placed, tables), image


def _filled_there(image, tables):
    """Tables whose rows live elsewhere, each shard restored there, several at once."""
    with tables.overwriting(step=image.step), ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda shard: restore_shard(image.path, tables, shard), range(tables.spec.shards)))
    return tables


def _leaves_with(layout, shards):
    """Names of all leaves that hold rows of a layout, of images and of deltas."""
    return {
        leaf_name(name, shard, part)
        for name, parts in layout.items()
        for shard in range(shards)
        for part in (ROW_IDS, *parts)
    }


def _whole_chain(path) -> list[Image]:
    """The chain of an image or a delta, every file of it verified."""
    found = chain(path, advise=beside)
    for image in found:
        verify(image, advise=beside)
    return found


def _newest_whole(directory, dense=True) -> list[Image]:
    """The verified chain of the newest image or delta of a directory that a whole state can be had
    from; without `dense`, of the newest one."""
    skipped: list[DamagedImage] = []
    known: dict[str, bool] = {}
    for path in newest_first(directory):
        try:
            whole = chain_is_whole(path, known)
            # Which says what is damaged.
            found = chain(path, advise=beside) if whole else _whole_chain(path)
        except DamagedImage as error:
            skipped.append(error)
            continue
        if found[-1].dense or not dense:
            warn_skipped(skipped)
            return found
    if skipped:
        raise DamagedImage(f"every image in {directory} is damaged; the newest one: {skipped[0]}")
    raise ValueError(f"{directory} holds no image of a whole state: give the directory of a run that has saved one.")


def _rows_below(base, tables):
    """{(stack, part): array [V of the image, width]} to write a chain over; initial rows if it
    begins with a delta."""
    rows: dict[tuple[str, str], np.ndarray] = {}
    for name, stack in tables.spec.stacks.items():
        padded = -(-stack.offsets[-1] // base.shards) * base.shards
        if is_delta(base.path.name):
            _refuse_other_initial_rows(base, tables.spec)
            parts = initial_parts(tables.spec, tables.layout, name, np.arange(padded))
        else:
            layout = described(tables.layout)[name]
            parts = {part: np.empty((padded, width), dtype) for part, (width, dtype) in layout.items()}
        rows |= {(name, part): array for part, array in parts.items()}
    return rows


def _refuse_other_initial_rows(base, spec):
    scales = {table: t.scale for table, t in spec.tables.items()}
    if (base.seed, base.scales) != (spec.seed, scales):
        raise ValueError(
            f"{base.path} goes over initial rows of seed {base.seed} and scales {base.scales}, not of seed "
            f"{spec.seed} and {scales}: use the spec of that run."
        )


def _write_over(table, arrays, name, shard, part, shards):
    """Writes what an image holds of one part over the rows f32[V / S, width] of one shard."""
    saved = arrays.get(leaf_name(name, shard, part))
    ids = arrays.get(leaf_name(name, shard, ROW_IDS))
    if saved is not None:
        table[slice(None) if ids is None else ids // shards] = saved


def restore_shard(
    path: str | Path | None,
    tables: Home,
    shard: int,
    without: Collection[str] = (),
) -> tuple[Home, list[Image]]:
    """Loads one shard of all stacks: base, deltas in order, initial rows for what was never saved;
    reads nothing else.

    All is read and verified before the first row changes.

    Args:
      path: a delta, an image, or a directory of them (the newest); None for initial rows.
      tables: of the number of shards it was saved with. Host tables change in place, those of
        devices are donated.
      shard: from 0 to S - 1.
      without: names of images of the chain to leave out.

    Returns:
      The tables, and the manifests of what was read, oldest first.

    Raises:
      DamagedImage: an image is missing or damaged (says what to do).
      ValueError: an image is of another spec; there is no such shard.
    """
    path = None if path is None else local_path(path)
    spec = tables.spec
    if not 0 <= shard < spec.shards:
        raise ValueError(f"shard={shard} must lie between 0 and {spec.shards - 1}.")
    path = _resolve(path)
    found = [] if path is None else chain(path, without)
    if live_elsewhere(tables):  # who has the shard reads its files: no row travels
        with tables.overwriting([shard]):
            where = None if path is None else Path(path).resolve()
            return tables.change_shard(shard, _restore_there, where, list(without)), found  # type: ignore[attr-defined]
    load = functools.partial(_load_shard, path, spec, described(tables.layout), shard)
    with ThreadPoolExecutor(_THREADS) as pool:
        loaded = list(pool.map(load, found))
    with tables.overwriting([shard]):
        for name, stack in spec.stacks.items():
            if not found or is_delta(found[0].path.name):
                parts, over = empty_parts(stack, tables.layout[name]), loaded
                fill_initial(spec, tables.layout, name, shard, parts)
            else:  # all rows are there: another buffer for them would cost as much as reading them
                leaves, over = {part: leaf_name(name, shard, part) for part in tables.layout[name]}, loaded[1:]
                parts = {part: np.require(loaded[0].pop(leaf), requirements="W") for part, leaf in leaves.items()}
            _overlay(spec, name, shard, parts, over)
            tables = tables.with_shard(name, shard, parts)
    return tables, found


def _restore_there(server, shard, path, without):
    restore_shard(path, server, shard, without)


def shard_source(
    sources: Sequence[Path], shard: int, known: dict, without: Collection[str] = ()
) -> tuple[Path, list[DamagedImage]]:
    """The first of some images and deltas that one shard can be had from; reads but what it verifies.

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
        return verify(image, leaves, functools.partial(advise_leaving_out, tip))
    except DamagedImage as error:
        return error


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
