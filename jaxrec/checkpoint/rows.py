"""Saving rows while training goes on, and keeping chains of deltas short: what costs a thread or
disk space.

Legend: S shards, V rows of a stack, n rows of a delta in one shard.
"""

import functools
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.checkpoint.deltas import (
    advise_leaving_out,
    chain,
    chain_is_whole,
    copy_rows,
    images_below,
    is_delta,
    write_delta,
)
from jaxrec.checkpoint.image import CHAIN, DamagedImage, Image, Snapshot, leaves_of, load_arrays, read_manifest, verify
from jaxrec.checkpoint.names import deltas, remove_partial, set_aside
from jaxrec.checkpoint.state import ROW_IDS
from jaxrec.checkpoint.whole import Saver
from jaxrec.embedding import Tables
from jaxrec.embedding.tables import RowIds
from jaxrec.files import Lock, local_path, remove_directory, write_json
from jaxrec.types import DenseState


def compact(path: str | Path, without: Collection[str] = ()) -> Path:
    """Merges all deltas of a chain into one, newest value wins, and removes them; restoring gives
    the same rows.

    A chain is then no larger than its base and one table of rows. Host memory: that of the rows in
    the deltas.

    Args:
      path: the newest delta of the chain.
      without: names of images to leave out, such as damaged ones.

    Returns:
      The path of the new delta, over the same base; `path` if there is nothing to merge.

    Raises:
      DamagedImage: an image is missing or damaged; none was removed.
      ValueError: somebody saves rows in the directory: a `RowCheckpointer` merges its deltas by
        itself.
      OSError: the disk is full or read-only; older images are as they were.
    """
    path = local_path(path)
    with Lock(path.parent / "rows.lock", "saving rows in it"):
        return _compact(path, without)


def _compact(path, without=()):
    found = chain(path, without)
    small = [image for image in found if is_delta(image.path.name)]
    if len(small) < 2 and not without:
        return path
    if not small:
        raise ValueError(f"without={list(without)} leaves no delta of {path}: go on over the images before it.")
    below = {image.path.name: image.digest for image in found if not is_delta(image.path.name)}
    merged = _merge(path, small, below)
    for name in {path.name, *read_manifest(path).parents}:
        if is_delta(name) and (path.parent / name).is_dir():
            remove_directory(path.parent / name)
    return merged.path


def _merge(tip, small, below: Mapping[str, str]) -> Image:
    """Writes one delta of the rows of several, oldest first, over other images than they are."""
    for image in small:
        verify(image, advise=functools.partial(advise_leaving_out, tip))
    newest = small[-1]
    dense = load_arrays(newest, leaves_of(newest, "dense."))
    fields = newest._asdict() | {"parents": dict(below)}
    about = {key: fields[key] for key in fields if key not in ("path", "format", "files", "digest")}
    return write_delta(tip.parent, Snapshot(dense, about, _newest_rows(small)))


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
        base and would be lost; somebody else saves rows there.
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
        known = dict.fromkeys(mine, True)
        for path in deltas(self.directory):
            if path.name in mine:
                continue
            try:
                newer = read_manifest(path, str).step > step
                damaged = newer and not chain_is_whole(path, known)
            except DamagedImage:
                newer, damaged = False, True
            if damaged:
                set_aside(path)
            elif newer:
                raise ValueError(
                    f"{path} is newer than {found[-1].path.name if found else 'initial rows'}, and saving would remove "
                    "it: go on from it (`restore` it, or base=newest(directory)), or give another directory."
                )

    def _reserve(self, found: list[Image]) -> None:
        """Takes images as what the next delta goes over; said on disk, so that nobody removes the
        base meanwhile."""
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

    def rebase(self, base: str | Path) -> None:
        """Goes on over a whole image that was saved meanwhile; deltas newer than it are written
        anew over it.

        Args:
          base: an image of the directory, from `Checkpointer`.
        """
        self._refuse_closed()
        self.wait()
        write_json(self.directory / CHAIN, [Path(base).name, *self._chain])
        step, tip = read_manifest(base).step, self.newest()
        found = chain(tip) if tip else []
        newer = [image for image in found if is_delta(image.path.name) and image.step > step]
        self._begin(self._rebase, tip, newer, Path(base))

    def restart(self, base: str | Path) -> None:
        """Goes on over a whole image of the latest step; the deltas before it, damaged or not, are
        removed.

        Args:
          base: an image of the directory, from `Checkpointer`.
        """
        self.wait()
        self._reserve(images_below(self.directory, base))
        self._tidy()

    def _rebase(self, tip, newer, base: Path) -> Image:
        found = images_below(self.directory, base)
        if newer:
            found.append(_merge(tip, newer, {image.path.name: image.digest for image in found}))
        self._reserve(found)
        self._tidy()
        return found[-1]

    def _commit(self, image: Snapshot) -> Image:
        written = write_delta(self.directory, image)
        self._chain = {**image.manifest["parents"], written.path.name: written.digest}
        if sum(map(is_delta, self._chain)) > self._most:
            merged = read_manifest(_compact(written.path))
            self.bytes_written += written.nbytes
            self._chain = {**merged.parents, merged.path.name: merged.digest}
            written = merged
        self._tidy()
        return written

    def _tidy(self) -> None:
        for other in deltas(self.directory):
            if other.name not in self._chain:
                remove_directory(other)
        remove_partial(self.directory, "delta_")  # of processes that were killed
