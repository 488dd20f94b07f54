"""Row deltas: small images of some rows, over a base, from which one shard is restored alone, or a
whole state.

    directory/step_00000010     a base: an image of the whole state, from `Checkpointer`; or none, then initial rows
    directory/delta_000003      some rows of some shards; `parents` in its manifest: all images below, oldest first

A chain is a base, if there is one, and deltas in order; a row has its value from the newest that
holds it, or its initial value. What a delta needs is named in it by digest, so a missing parent, or
one of another run, is an error and never a row of the wrong time. CPR (arXiv 2011.02999) reloads a
failed shard from such a chain: a mosaic of rows of several times. A delta that was saved with the
dense state stands for a whole state, see `restore`.

Legend: S shards, V rows of a stack, E embedding width, K slot width, n rows of a delta in one
shard.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

from jaxrec.checkpoint.image import DamagedImage, Image, Snapshot, read_manifest, verify, write_image
from jaxrec.checkpoint.names import deltas, images, number_of
from jaxrec.checkpoint.state import ROW_IDS, dense_leaves, leaf_name, manifest_of
from jaxrec.embedding import Tables
from jaxrec.embedding.tables import RowIds
from jaxrec.files import Lock, local_path, make_directory
from jaxrec.types import DenseState


def newest_first(directory: str | Path) -> list[Path]:
    """The images and deltas of a directory, latest step first; of one step the image comes before
    the delta.

    Damaged deltas, whose step nobody knows, stand where their number puts them among the deltas.
    """
    small, step = [], 0
    for path in reversed(deltas(directory)):
        try:
            step = read_manifest(path, str).step
        except DamagedImage:
            pass
        small.append((step, 0, number_of(path), path))
    whole = [(number_of(path), 1, 0, path) for path in images(directory)]
    return [path for *_, path in sorted(small + whole, reverse=True)]


def newest(directory: str | Path) -> Path | None:
    """The image or delta of a directory that stands for the latest step; None if there is neither.

    Raises:
      DamagedImage: the newest is damaged; says which images are left.
    """
    found = newest_first(local_path(directory))
    if found:
        read_manifest(found[0], beside)
    return found[0] if found else None


def chain(path: str | Path, without: Collection[str] = (), advise: Callable[[Path], str] | None = None) -> list[Image]:
    """The manifests of a delta and of all images below it.

    Args:
      path: a delta or an image.
      without: names of images to leave out.
      advise: makes of the path of a damaged image the last sentence of the error.

    Returns:
      Oldest first: the base if there is one, then deltas.

    Raises:
      DamagedImage: one is missing, damaged, or not the one that the delta was saved over; names it
        and what to do.
    """
    path = Path(path)
    say = advise or functools.partial(advise_leaving_out, path)
    tip, found = read_manifest(path, say), []
    for name, digest in tip.parents.items():
        if name in without:
            continue
        below = read_manifest(path.parent / name, say)
        if below.digest != digest:
            raise DamagedImage(
                f"{below.path} is not the image that {path.name} was saved over: it is of another run (or was written "
                f"anew). {say(below.path)}"
            )
        found.append(below)
    return found + [tip] * (path.name not in without)


def chain_is_whole(path: Path, known: dict[str, bool]) -> bool:
    """Whether every file of a chain can be believed; each image is looked at once, and `known`
    remembers it by name."""
    for image in chain(path):
        if image.path.name not in known:
            try:
                verify(image, advise=str)
                known[image.path.name] = True
            except DamagedImage:
                known[image.path.name] = False
        if not known[image.path.name]:
            return False
    return True


def beside(path: Path, *but: Path) -> str:
    """The sentence that ends an error about an image: what else there is."""
    others = [str(other) for other in newest_first(path.parent) if other not in (path, *but)]
    return f"Nothing was changed. Other images beside it: {', '.join(others[:3]) or 'none'}."


def advise_leaving_out(tip: Path, path: Path) -> str:
    """The sentence that ends an error about an image of the chain of a tip, where images can be
    left out."""
    said = beside(path, tip)
    if path == tip and (_torn(path) or not is_delta(path.name)):
        return said
    return (
        f"{said} without=[{path.name!r}] restores all else of {tip.name}: rows saved in no newer delta get their "
        "values from before it, or initial ones. `compact` takes it too, for the chain to go on."
    )


def _torn(path):
    """Whether a manifest itself cannot be believed: what lies below the image is then not known."""
    try:
        read_manifest(path, str)
    except DamagedImage:
        return True
    return False


def copy_rows(
    tables: Tables, rows: RowIds, step: int, below: Mapping[str, str] | None = None, extra=None, run: str = "",
    dense: DenseState | None = None,
) -> Snapshot:  # fmt: skip
    """Copies some rows and their slots to the host; the only part of saving them that training
    waits for.

    Args:
      tables: in any home.
      rows: {(stack, shard): i32[n]}, rows of the stack as in `Plan.unique`; shards may be left out.
      step: steps trained.
      below: {name: digest} of the images that the delta goes over, oldest first.
      extra: JSON values to save along.
      run: id of the run.
      dense: the dense state of that step, to save along; a whole state can then be restored from
        the delta.

    Returns:
      A Snapshot that shares no memory with the tables.

    Raises:
      ValueError: a row is of another shard or outside its stack.
    """
    rows = {key: np.asarray(ids, np.int32) for key, ids in rows.items() if len(ids)}
    for key, ids in rows.items():
        _check_rows(tables.spec, key, ids)
    leaves, arrays = dense_leaves(dense)
    for key, parts in tables.take(rows).items():
        arrays[leaf_name(*key, ROW_IDS)] = rows[key].copy()
        arrays |= {leaf_name(*key, part): array for part, array in parts.items()}
    return Snapshot(arrays, manifest_of(tables, step, extra, run, leaves, below))


def _check_rows(spec, key, ids):
    name, shard = key
    if name not in spec.stacks or not 0 <= shard < spec.shards:
        raise ValueError(f"rows of {key}: stacks are {list(spec.stacks)}, shards 0 to {spec.shards - 1}.")
    if ids.min() < 0 or ids.max() >= spec.stacks[name].rows or (ids % spec.shards != shard).any():
        raise ValueError(
            f"rows of {name} for shard {shard} run from {ids.min()} to {ids.max()}: they must be rows r of the stack, "
            f"0 <= r < {spec.stacks[name].rows}, with r % {spec.shards} == {shard}. Pick them shard by shard."
        )


def save_rows(
    directory: str | Path,
    base: str | Path | None,
    rows: RowIds,
    tables: Tables,
    step: int,
    extra=None,
) -> Path | None:
    """Saves rows as a new delta and waits until it is committed; `RowCheckpointer` does so while
    training goes on.

    Args:
      directory: of the run's images.
      base: what the delta goes over: an image or a delta in that directory; None for initial rows.
      rows: {(stack, shard): i32[n]} rows of the stack; without any, nothing is written.
      tables: in any home.
      step: steps trained.
      extra: JSON values to save along.

    Returns:
      The path of the delta; `base` if there was nothing to save.

    Raises:
      ValueError: rows of another shard; a base that is not in the directory, or damaged; somebody
        saves rows there.
      OSError: the disk is full or read-only; older images are as they were.
    """
    directory = local_path(directory)
    below = images_below(directory, base)
    run = below[-1].run if below else ""
    image = copy_rows(tables, rows, step, {b.path.name: b.digest for b in below}, extra, run)
    if not image.arrays:
        return None if base is None else Path(base)
    make_directory(directory)
    with Lock(directory / "rows.lock", "saving rows in it"):
        return write_delta(directory, image).path


def images_below(directory: Path, base: str | Path | None) -> list[Image]:
    """All images that a delta over a base needs, oldest first."""
    if base is None:
        return []
    if Path(base).resolve().parent != directory.resolve():
        raise ValueError(f"the base {base} must lie in {directory}, beside the deltas over it.")
    return chain(directory / Path(base).name)


def write_delta(directory: Path, image: Snapshot) -> Image:
    """Writes rows from `copy_rows` as the next delta of a directory."""
    lost = [name for name in image.manifest["parents"] if not (directory / name).is_dir()]
    if lost:
        raise ValueError(
            f"{lost} in {directory} are gone, and rows are to be saved over them: save a whole image and go on over it."
        )
    number = max(map(number_of, deltas(directory)), default=0) + 1
    return write_image(directory / f"delta_{number:06d}", image)


def is_delta(name: str) -> bool:
    """Whether an image of that name holds some rows only."""
    return name.startswith("delta_")
