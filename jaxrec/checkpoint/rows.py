"""Saving rows while training goes on, and keeping chains of deltas short: what costs a thread or disk space.

Legend: S shards, V rows of a stack, n rows of a delta in one shard.
"""

import functools
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.checkpoint.deltas import ROW_IDS, RowIds, advise, chain, copy_rows, is_delta, names_below, write_delta
from jaxrec.checkpoint.image import (
    PARTIAL,
    Snapshot,
    deltas,
    leaves_of,
    load_arrays,
    read_manifest,
    remove_image,
    verify,
)
from jaxrec.checkpoint.state import Background
from jaxrec.embedding.spec import EmbeddingSpec


def compact(path: str | Path, without: Collection[str] = ()) -> Path:
    """Merges all deltas of a chain into one, newest value wins, and removes them; restoring gives the same rows.

    A chain is then no larger than its base and one table of rows. Host memory: that of the rows in the deltas.

    Args:
      path: the newest delta of the chain.
      without: names of images to leave out, such as damaged ones.

    Returns:
      The path of the new delta, over the same base; `path` if there is nothing to merge.

    Errors:
      ValueError: an image is missing or damaged; none was removed.
      OSError: the disk is full or read-only; older images are as they were.
    """
    path = Path(path)
    found = chain(path, without)
    small = [image for image in found if is_delta(image.path.name)]
    if len(small) < 2 and not without:
        return path
    if not small:
        raise ValueError(f"without={list(without)} leaves no delta of {path}: go on over the images before it.")
    merged = _merge(path, small, [image.path.name for image in found if not is_delta(image.path.name)])
    for name in {path.name, *read_manifest(path).parents}:
        if is_delta(name) and (path.parent / name).is_dir():
            remove_image(path.parent / name)
    return merged


def _merge(tip, small, below):
    """Writes one delta of the rows of several, oldest first, over other images than they are; returns its path."""
    for image in small:
        verify(image, advise=functools.partial(advise, tip))
    arrays = _newest_rows([load_arrays(image, leaves_of(image)) for image in small])
    about = {**small[-1]._asdict(), "parents": below}
    del about["path"], about["files"]
    return write_delta(tip.parent, Snapshot(arrays, about))


def _newest_rows(loaded):
    """One dict of leaves from those of several deltas, oldest first: the newest value of each row."""
    merged = {}
    for ids_leaf in sorted({leaf for arrays in loaded for leaf in arrays if leaf.endswith("." + ROW_IDS)}):
        key = ids_leaf.removesuffix(ROW_IDS)
        mine = [arrays for arrays in reversed(loaded) if ids_leaf in arrays]  # newest first
        _, index = np.unique(np.concatenate([arrays[ids_leaf] for arrays in mine]), return_index=True)
        for leaf in [leaf for leaf in mine[0] if leaf.startswith(key)]:
            merged[leaf] = np.concatenate([arrays[leaf] for arrays in mine])[index]
    return merged


class RowCheckpointer(Background):
    """Saves row deltas of a run while training goes on; one at a time, in a thread.

    The deltas of the directory that its chain does not need are removed when it has committed one.

    Args:
      directory: of the run's images; the deltas go beside them.
      spec: the tables.
      base: where the chain goes on: `newest(directory)`, an image, a delta, or None for initial rows.
      most_deltas: more of them than that in the chain are merged into one. On disk are then at most the base, one
        delta of up to all rows, so many as were picked each time, and while merging one of up to all rows more.

    A failed save is raised by the next call, and on leaving the `with` block; the chain is then as before it.
    """

    def __init__(
        self, directory: str | Path, spec: EmbeddingSpec, base: str | Path | None = None, most_deltas: int = 8
    ):
        if most_deltas < 1:
            raise ValueError(f"most_deltas={most_deltas} must be at least 1.")
        super().__init__()
        self.directory, self._spec, self._most = Path(directory), spec, most_deltas
        self._chain: list[str] = names_below(self.directory, base)

    def newest(self) -> Path | None:
        """What `restore_shard` should read: the last committed delta, the base, or None for initial rows."""
        return self.directory / self._chain[-1] if self._chain else None

    def save(self, tables, rows: RowIds, step: int, extra: Mapping[str, Any] | None = None) -> float:
        """Copies rows and begins to write them; returns the seconds that training waited.

        Args:
          tables, rows, step, extra: as for `save_rows`.
        """
        start = time.perf_counter()
        self.wait()
        image = copy_rows(tables, rows, step, self._spec, self._chain, extra)
        if image.arrays:
            self._begin(self._commit, image)
        stall = time.perf_counter() - start
        self.stall_seconds += stall
        return stall

    def rebase(self, base: str | Path) -> None:
        """Goes on over a whole image that was saved meanwhile; deltas newer than it are written anew over it.

        Args:
          base: an image of the directory, from `Checkpointer`.
        """
        self.wait()
        step, tip = read_manifest(base).step, self.newest()
        found = chain(tip) if tip else []
        self._begin(self._rebase, tip, [i for i in found if is_delta(i.path.name) and i.step > step], Path(base))

    def _rebase(self, tip, newer, base: Path) -> None:
        below = names_below(self.directory, base)
        self._chain = [*below, _merge(tip, newer, below).name] if newer else below
        self._tidy()

    def _commit(self, image: Snapshot) -> None:
        path = write_delta(self.directory, image)
        self._chain = [*image.manifest["parents"], path.name]
        if sum(map(is_delta, self._chain)) > self._most:
            merged = compact(path)
            self._chain = [*read_manifest(merged).parents, merged.name]
        self._tidy()

    def _tidy(self) -> None:
        for other in deltas(self.directory):
            if other.name not in self._chain:
                remove_image(other)
        for torn in self.directory.glob(f"delta_*{PARTIAL}"):  # of processes that were killed
            shutil.rmtree(torn)
