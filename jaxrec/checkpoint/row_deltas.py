"""Row deltas: small images of some rows over a base, from which one shard is restored alone, or a
whole state; saved while training goes on, and merged so that chains stay short.

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

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.checkpoint.checkpointer import Saver
from jaxrec.checkpoint.format import (
    CHAIN,
    DamagedImage,
    Image,
    Snapshot,
    deltas,
    images,
    leaves_of,
    load_arrays,
    number_of,
    read_manifest,
    remove_partial,
    set_aside,
    verify,
    write_image,
)
from jaxrec.checkpoint.state import ROW_IDS, dense_leaves, leaf_name, manifest_of
from jaxrec.embedding import Tables
from jaxrec.embedding.tables import RowIds
from jaxrec.files import Lock, local_path, make_directory, remove_directory, write_json
from jaxrec.types import DenseState


def newest_first(directory: str | Path) -> list[Path]:
    """The images and deltas of a directory, latest step first; of one step the image comes before
    the delta.

    Damaged deltas, whose step is not known, stand where their number puts them among the deltas.
    """
    small, step = [], 0
    for path in reversed(deltas(directory)):
        with contextlib.suppress(DamagedImage):
            step = read_manifest(path).step
        small.append((step, 0, number_of(path), path))
    whole = [(number_of(path), 1, 0, path) for path in images(directory)]
    return [path for *_, path in sorted(small + whole, reverse=True)]


def newest(directory: str | Path) -> Path | None:
    """The image or delta of a directory that stands for the latest step; None if there is neither.

    Raises:
      DamagedImage: the newest is damaged.
    """
    found = newest_first(local_path(directory))
    if found:
        read_manifest(found[0])
    return found[0] if found else None


def chain(path: str | Path) -> list[Image]:
    """The manifests of a delta and of all images below it.

    Args:
      path: a delta or an image.

    Returns:
      Oldest first: the base if there is one, then deltas.

    Raises:
      DamagedImage: one is missing, damaged, or not the one that the delta was saved over; names it.
    """
    path = Path(path)
    tip, found = read_manifest(path), []
    for name, digest in tip.parents.items():
        below = read_manifest(path.parent / name)
        if below.digest != digest:
            raise DamagedImage(
                f"{below.path} is not the image that {path.name} was saved over: it is of another run (or was written "
                "anew)."
            )
        found.append(below)
    return [*found, tip]


# (image, shard, or None for all of it) -> what is wrong with its files, None if nothing is.
Verified = dict[tuple[Path, int | None], DamagedImage | None]


def whole_chain(path: str | Path, known: Verified | None = None, shard: int | None = None) -> list[Image]:
    """The chain of an image or a delta, its files verified.

    Args:
      path: a delta or an image.
      known: what was verified before; it is added to, so that no file is read twice.
      shard: whose files to verify; all if None.

    Returns:
      As `chain`.

    Raises:
      DamagedImage: as `chain`; a file is missing or differs.
    """
    found, known = chain(path), {} if known is None else known
    for image in found:
        if (image.path, shard) not in known:
            known[image.path, shard] = _damage(image, shard)
        if (damage := known[image.path, shard]) is not None:
            raise damage
    return found


def _damage(image: Image, shard: int | None) -> DamagedImage | None:
    """What is wrong with the files of an image."""
    leaves = None if shard is None else {leaf for leaf in leaves_of(image) if leaf.split(".")[-2] == f"{shard:04d}"}
    try:
        verify(image, leaves)
    except DamagedImage as error:
        return error
    return None


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
      ValueError: rows of another shard; a base that is not in the directory; another process saves
        rows there.
      DamagedImage: the base cannot be believed.
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


def compact(path: Path) -> Image:
    """Merges all deltas of a chain into one over the same base, newest value wins, and removes them;
    restoring gives the same rows.

    A chain is then no larger than its base and one table of rows. Host memory: that of the rows in
    the deltas. The caller holds the lock of the rows.

    Args:
      path: the newest delta of the chain.

    Raises:
      DamagedImage: an image is missing or damaged; none was removed.
      OSError: the disk is full or read-only; older images are as they were.
    """
    found = chain(path)
    small = [image for image in found if is_delta(image.path.name)]
    for image in small:
        verify(image)
    dense = load_arrays(small[-1], leaves_of(small[-1], "dense."))
    about = small[-1]._asdict() | {"parents": {i.path.name: i.digest for i in found if not is_delta(i.path.name)}}
    for field in ("path", "format", "files", "digest"):
        about.pop(field)
    merged = write_delta(path.parent, Snapshot(dense, about, _newest_rows(small)))
    for image in small:
        remove_directory(image.path)
    return merged


def _newest_rows(small: list[Image]) -> Iterator[dict[str, np.ndarray]]:
    """The newest value of each row of several deltas, oldest first: the leaves of one (stack,
    shard) at a time.

    Deltas are read from the newest on, and only rows that no newer one holds are kept: memory for
    one table of rows and one delta, however long the chain.
    """
    kept: dict[str, list[dict[str, np.ndarray]]] = {}
    for image in reversed(small):
        arrays = load_arrays(image, leaves_of(image, "rows."))
        for leaf in [leaf for leaf in arrays if leaf.endswith("." + ROW_IDS)]:
            key = leaf.removesuffix(ROW_IDS)
            known = np.concatenate([np.zeros(0, np.int32), *(parts[leaf] for parts in kept.get(key, []))])
            new = ~np.isin(arrays[leaf], known)
            mine = {name: array[new] for name, array in arrays.items() if name.startswith(key)}
            kept.setdefault(key, []).append(mine)
    for key in sorted(kept):
        pieces = kept.pop(key)
        order = np.argsort(np.concatenate([parts[key + ROW_IDS] for parts in pieces]))
        yield {name: np.concatenate([parts[name] for parts in pieces])[order] for name in pieces[0]}


class RowCheckpointer(Saver):
    """Saves row deltas of a run while training goes on; one at a time, in a thread.

    The deltas of the directory that its chain does not need are removed when it has committed one.

    Args:
      directory: of the run's images; the deltas go beside them. Made if it does not exist.
      base: where the chain goes on: `newest(directory)`, an image, a delta, or None for initial
        rows.
      most_deltas: more of them than that in the chain are merged into one, which writes up to all
        rows once more. On disk are then at most the base and so many deltas, and while merging one
        of up to all rows.
      run: id of the run; that of the base, or a new one, if None.

    Raises:
      ValueError: the directory holds images of another run, or whole deltas that are newer than the
        base and would be lost; another saver of rows has it.
    """

    def __init__(
        self,
        directory: str | Path,
        base: str | Path | None = None,
        most_deltas: int = 128,
        run: str | None = None,
    ):
        whole_number("most_deltas", most_deltas)
        found = images_below(local_path(directory), base)
        super().__init__(directory, "rows", run or (found[-1].run if found else ""))
        self._most = most_deltas
        try:
            self._refuse_lost(found)
            self._reserve(found)
        except BaseException:
            self._lock.release()
            raise
        remove_partial(self.directory, "delta_")

    def _refuse_lost(self, found):
        """Deltas outside of the chain: damaged ones get another name, newer ones are refused,
        others go in time."""
        mine, step = {image.path.name for image in found}, found[-1].step if found else -1
        known: Verified = {(image.path, None): None for image in found}
        for path in deltas(self.directory):
            if path.name in mine:
                continue
            try:
                newer = read_manifest(path).step > step and whole_chain(path, known)
            except DamagedImage:
                set_aside(path)
                continue
            if newer:
                raise ValueError(
                    f"{path} is newer than {found[-1].path.name if found else 'initial rows'}, and saving would remove "
                    "it: go on from it (`restore` it, or base=newest(directory)), or give another directory."
                )

    def _reserve(self, found: list[Image]) -> None:
        """Takes images as what the next delta goes over; said on disk, so that a `Checkpointer`
        does not remove the base meanwhile."""
        self._chain = {image.path.name: image.digest for image in found}
        if found and not is_delta(found[0].path.name):
            write_json(self.directory / CHAIN, [found[0].path.name])

    def newest(self) -> Path | None:
        """What `restore_shard` should read: the last committed delta, the base, or None for initial
        rows."""
        return self.directory / list(self._chain)[-1] if self._chain else None

    def chain_names(self) -> list[str]:
        """Names of what `newest` stands on, and its own, oldest first."""
        return list(self._chain)

    def save(
        self,
        tables: Tables,
        rows: RowIds,
        step: int,
        extra: Mapping[str, Any] | None = None,
        dense: DenseState | None = None,
    ) -> float:
        """Copies rows and begins to write them; returns the seconds that training waited.

        Args:
          tables, rows, step, extra: as for `save_rows`.
          dense: the dense state of that step, to save along, so that `restore` gives a whole state.

        Raises:
          ValueError: rows of another shard; the saver is closed. What a save before this one met
            with, if it was no OSError.
        """
        start = time.perf_counter()
        self._refuse_closed()
        self.settle()
        image = copy_rows(tables, rows, step, self._chain, extra, self.run, dense)
        if image.arrays:
            self._begin(self._commit, image)
        stall = time.perf_counter() - start
        self.stall_seconds += stall
        return stall

    def restart(self, base: str | Path) -> None:
        """Goes on over a whole image of the latest step; the deltas before it, damaged or not, are
        removed.

        Args:
          base: an image of the directory, from `Checkpointer`.
        """
        self.wait()
        self._reserve(images_below(self.directory, base))
        self._tidy()

    def _commit(self, image: Snapshot) -> Image:
        written = write_delta(self.directory, image)
        self._chain = {**image.manifest["parents"], written.path.name: written.digest}
        if sum(map(is_delta, self._chain)) > self._most:
            self.bytes_written += written.nbytes
            written = compact(written.path)
            self._chain = {**written.parents, written.path.name: written.digest}
        self._tidy()
        return written

    def _tidy(self) -> None:
        for other in deltas(self.directory):
            if other.name not in self._chain:
                remove_directory(other)
        remove_partial(self.directory, "delta_")  # of processes that were killed
