"""Row deltas: partial checkpoints of some rows over a base, saved while training continues, and merged to bound chains.

    directory/step_00000010     base: an image of the whole state, from `Checkpointer`; without one, initial rows
    directory/delta_000003      some rows of some shards; `parents` in its manifest: the chain below it, oldest first

A chain is an optional base followed by deltas in order; each row has its value from the newest image that holds it, or
its initial value. A delta names its parents by digest, so a parent that is missing or of another run is an error and
never yields stale rows. CPR (arXiv 2011.02999) restores a failed shard from such a chain: a mix of rows from several
steps. A chain whose last delta was saved with the dense state also restores the whole state, see `restore`.

Legend: S shards, V rows of a stack, E embedding width, K slot width, n rows of a delta in one shard.
"""

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.checkpoint.checkpointer import BackgroundSaver
from jaxrec.checkpoint.format import (
    CHAIN,
    DamagedImage,
    Image,
    Snapshot,
    deltas,
    images,
    leaves_of,
    load_arrays,
    mark_damaged,
    number_of,
    read_manifest,
    remove_partial,
    verify,
    write_image,
)
from jaxrec.checkpoint.state import ROW_IDS, copies_at_servers, dense_leaves, manifest_of, row_leaves
from jaxrec.embedding import RemoteTables, Tables
from jaxrec.embedding.tables import RowIds
from jaxrec.files import local_path, remove_directory, write_json
from jaxrec.types import DenseState


def newest_first(directory: str | Path) -> list[Path]:
    """Return the images and deltas of a directory, latest step first, and an image before a delta of the same step.

    Damaged deltas, whose step is unknown, are ordered among the deltas by their number.
    """
    small, step = [], 0
    for path in reversed(deltas(directory)):
        with contextlib.suppress(DamagedImage):
            step = read_manifest(path).step
        small.append((step, 0, number_of(path), path))
    whole = [(number_of(path), 1, 0, path) for path in images(directory)]
    return [path for *_, path in sorted(small + whole, reverse=True)]


def newest(directory: str | Path) -> Path | None:
    """Return the image or delta of the latest step in a directory, or None if it holds neither.

    Raises:
      DamagedImage: the manifest of the newest is damaged.
    """
    found = newest_first(local_path(directory))
    if found:
        read_manifest(found[0])
    return found[0] if found else None


def chain(path: str | Path) -> list[Image]:
    """Return the manifests of a delta or image and of its parents.

    Args:
      path: a delta or an image.

    Returns:
      Manifests, oldest first: the base if there is one, then deltas.

    Raises:
      DamagedImage: a manifest is missing or damaged, or a parent's digest differs from the recorded one; names it.
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


# (image, shard or None for all shards) -> the damage found in its files, None if intact.
Verified = dict[tuple[Path, int | None], DamagedImage | None]


def verified_chain(path: str | Path, known: Verified | None = None, shard: int | None = None) -> list[Image]:
    """As `chain`, with the files of a shard, or all, verified; `known` caches results, to read no file twice."""
    found, known = chain(path), {} if known is None else known
    for image in found:
        if (image.path, shard) not in known:
            known[image.path, shard] = _damage(image, shard)
        if (damage := known[image.path, shard]) is not None:
            raise damage
    return found


def _damage(image: Image, shard: int | None) -> DamagedImage | None:
    """Return the error for an image whose files are damaged, or None."""
    leaves = None if shard is None else {leaf for leaf in leaves_of(image) if leaf.split(".")[-2] == f"{shard:04d}"}
    try:
        verify(image, leaves)
    except DamagedImage as error:
        return error
    return None


def snapshot_rows(
    tables: Tables, rows: RowIds, step: int, below: Mapping[str, str] | None = None, extra=None, run: str = "",
    dense: DenseState | None = None,
) -> Snapshot:  # fmt: skip
    """Copy some rows and their slots, the only blocking part of saving a delta.

    Rows at servers are copied there, and written by their servers.

    Args:
      tables: any `Tables`.
      rows: {(stack, shard): i32[n]}, rows of the stack as in `Plan.unique`; not all shards need be given.
      step: number of training steps completed.
      below: {name: digest} of the delta's parents, oldest first.
      extra: further JSON values to save.
      run: run id.
      dense: dense state of that step, so that the whole state can be restored from the delta; not saved if None.

    Returns:
      A Snapshot that shares no memory with the tables.

    Raises:
      ValueError: a row is of another shard or outside its stack.
    """
    rows = {key: np.asarray(ids, np.int32) for key, ids in rows.items() if len(ids)}
    for key, ids in rows.items():
        _check_rows(tables.spec, key, ids)
    leaves, arrays = dense_leaves(dense)
    manifest = manifest_of(tables, step, extra, run, leaves, below)
    if isinstance(remote := tables.hosted, RemoteTables):
        return Snapshot(arrays, manifest, write_remote_rows=copies_at_servers(remote, rows) if rows else None)
    return Snapshot(arrays | row_leaves(tables, rows), manifest)


def _check_rows(spec, key, ids):
    name, shard = key
    if name not in spec.stacks or not 0 <= shard < spec.shards:
        raise ValueError(f"rows of {key}: stacks are {list(spec.stacks)}, shards 0 to {spec.shards - 1}.")
    if ids.min() < 0 or ids.max() >= spec.stacks[name].rows or (ids % spec.shards != shard).any():
        raise ValueError(
            f"rows of {name} for shard {shard} run from {ids.min()} to {ids.max()}: they must be rows r of the stack, "
            f"0 <= r < {spec.stacks[name].rows}, with r % {spec.shards} == {shard}. Pick them shard by shard."
        )


def ancestors(directory: Path, base: str | Path | None) -> list[Image]:
    """Return all images that a delta over a base needs, oldest first."""
    if base is None:
        return []
    if Path(base).resolve().parent != directory.resolve():
        raise ValueError(f"the base {base} must lie in {directory}, beside the deltas over it.")
    return chain(directory / Path(base).name)


def write_delta(directory: Path, image: Snapshot) -> Image:
    """Write a snapshot from `snapshot_rows` as the next delta of a directory."""
    lost = [name for name in image.manifest["parents"] if not (directory / name).is_dir()]
    if lost:
        raise ValueError(
            f"{lost} in {directory} are gone, and rows are to be saved over them: save a whole image and go on over it."
        )
    number = max(map(number_of, deltas(directory)), default=0) + 1
    return write_image(directory / f"delta_{number:06d}", image)


def is_delta(name: str) -> bool:
    """Return whether a name is that of a delta."""
    return name.startswith("delta_")


def compact(path: Path) -> Image:
    """Merge all deltas of a chain, given its newest one, into one over the same base, which needs none of them.

    Without them the chain takes at most the base and one copy of all rows. The merge takes host memory for the distinct
    rows of the deltas and one delta. The caller holds the lock for saving rows, and removes the deltas.
    """
    found = chain(path)
    small = [image for image in found if is_delta(image.path.name)]
    for image in small:
        verify(image)
    dense = load_arrays(small[-1], leaves_of(small[-1], "dense."))
    about = small[-1]._asdict() | {"parents": {i.path.name: i.digest for i in found if not is_delta(i.path.name)}}
    for field in ("path", "format", "files", "digest"):
        about.pop(field)
    return write_delta(path.parent, Snapshot(dense, about, _newest_rows(small)))


def _newest_rows(small: list[Image]) -> Iterator[dict[str, np.ndarray]]:
    """Yield the newest value of each row in deltas (given oldest first), the leaves of one (stack, shard) at a time.

    Deltas are read from the newest to the oldest, and only rows that no newer delta holds are kept: this takes memory
    for one copy of all rows plus one delta, for a chain of any length.
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


def refuse_newer(directory: Path, found: list[Image]) -> None:
    """Raise if an intact delta is newer than a chain and outside it; rename damaged ones."""
    mine, step = {image.path.name for image in found}, found[-1].step if found else -1
    known: Verified = {(image.path, None): None for image in found}
    for path in deltas(directory):
        if path.name in mine:
            continue
        try:
            newer = read_manifest(path).step > step and verified_chain(path, known)
        except DamagedImage:
            mark_damaged(path)
            continue
        if newer:
            raise ValueError(
                f"{path} is newer than {found[-1].path.name if found else 'initial rows'}, which saving would "
                "remove: go on from it (`restore` it, or base=newest(directory)), or give another directory."
            )


class RowCheckpointer(BackgroundSaver):
    """Background saver of row deltas of a run, one at a time while training continues.

    Each commit removes the deltas of the directory that are not in the chain.

    Args:
      directory: directory of the run's images, where the deltas are stored too; created if missing.
      base: where to continue the chain: `newest(directory)`, an image, a delta, or None for initial rows.
      most_deltas: maximum number of deltas in the chain; above it they are merged into one, which rewrites up to all
        rows, and temporarily takes their space on disk in addition.
      run: run id; that of the base, or a new one, if None.

    Attributes:
      chain: {name: digest} of the images in the chain, oldest first.
      damaged: whether an image of the chain is, so that no more deltas should be saved over it.

    Raises:
      ValueError: the directory holds images of another run, or intact deltas that are newer than the base and would be
        lost; another saver of rows uses it.
    """

    def __init__(
        self,
        directory: str | Path,
        base: str | Path | None = None,
        most_deltas: int = 128,
        run: str | None = None,
    ):
        whole_number("most_deltas", most_deltas)
        found = ancestors(local_path(directory), base)
        super().__init__(directory, "rows", run or (found[-1].run if found else ""))
        self._most = most_deltas
        try:
            refuse_newer(self.directory, found)  # a commit removes the others
            self._reserve(found)
        except BaseException:
            self._lock.release()
            raise
        remove_partial(self.directory, "delta_")

    def _reserve(self, found: list[Image]) -> None:
        """Set the parents of the next delta; also record the base on disk, so that no `Checkpointer` removes it."""
        self.chain, self.damaged = {image.path.name: image.digest for image in found}, False
        if found and not is_delta(found[0].path.name):
            write_json(self.directory / CHAIN, [found[0].path.name])

    def newest(self) -> Path | None:
        """Return the path for `restore_shards`: the last committed delta, the base, or None for initial rows."""
        return self.directory / list(self.chain)[-1] if self.chain else None

    def save(
        self,
        tables: Tables,
        rows: RowIds,
        step: int,
        extra: Mapping[str, Any] | None = None,
        dense: DenseState | None = None,
    ) -> float:
        """Copy rows and start writing them; return the seconds that training waited.

        Args:
          tables, rows, step, extra: as for `snapshot_rows`.
          dense: dense state of that step, so that `restore` can restore the whole state; not saved if None.

        Raises:
          ValueError: rows of another shard; the saver is closed.
          Any error of the previous save, except OSError.
        """
        start = time.perf_counter()
        self._refuse_closed()
        self.settle()
        image = snapshot_rows(tables, rows, step, self.chain, extra, self.run, dense)
        if image.arrays or image.write_remote_rows is not None:  # else there is nothing to save
            self._begin(self._commit, image)
        stall = time.perf_counter() - start
        self.stall_seconds += stall
        return stall

    def restart(self, base: str | Path) -> None:
        """Start a new chain over an image of the latest step, and remove all earlier deltas, damaged or not.

        Args:
          base: image in the directory, from `Checkpointer`.
        """
        self.wait()
        found = ancestors(self.directory, base)
        try:  # the base is saved, and stands for itself if the rest fails
            self._reserve(found)
            self._tidy()
        except OSError as error:
            said = (
                f"the deltas before {Path(base).name} could not be removed, or it be noted as their successor: {error}"
            )
            warnings.warn(said, stacklevel=2)

    def _commit(self, image: Snapshot) -> Image:
        written = write_delta(self.directory, image)
        self.chain = {**image.manifest["parents"], written.path.name: written.digest}
        # The rows are committed from here on: if the save counted as failed, they would be picked again and again.
        try:
            if sum(map(is_delta, self.chain)) > self._most:
                merged = compact(written.path)
                self.bytes_written += merged.nbytes
                self.chain = {**merged.parents, merged.path.name: merged.digest}
            self._tidy()
        except DamagedImage as error:
            self.damaged = True
            warnings.warn(f"row deltas cannot be merged: {error}", stacklevel=2)
        except OSError as error:
            said = f"row deltas could not be merged or removed, and the next save tries again: {error}"
            warnings.warn(said, stacklevel=2)
        return written

    def _tidy(self) -> None:
        for other in deltas(self.directory):
            if other.name not in self.chain:
                remove_directory(other)
        remove_partial(self.directory, "delta_")  # left by killed processes
