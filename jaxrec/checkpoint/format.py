"""Images on disk: whole or absent, verified before they are believed. Only this file knows Orbax.

An image is a directory of ours: Orbax writes one leaf an array inside NAME.partial, a manifest
lists size and checksum of every file, all is flushed, and one rename commits. So a killed save
leaves the images before it as they were, and a load reads only what it has verified. A manifest
names its run and, by digest, the images that it needs, so that images of two runs are never mixed.
"""

import errno
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp

from jaxrec.files import PARTIAL, make_directory, sync

MANIFEST, _DAMAGED = "manifest.json", ".damaged"


def set_aside(path: Path) -> Path:
    """Renames an image that is not to be read again to NAME.damaged (and a number): the path."""
    names = (path.with_name(path.name + _DAMAGED + (f".{number}" if number else "")) for number in itertools.count())
    free = next(name for name in names if not name.exists())
    os.rename(path, free)
    return free


def images(directory: str | Path) -> list[Path]:
    """The committed images of a directory that are whole by themselves, newest step first."""
    return _numbered(directory, "step_")


def deltas(directory: str | Path) -> list[Path]:
    """The committed row deltas of a directory, newest first; each needs what its manifest names."""
    return _numbered(directory, "delta_")


def is_image(path: Path) -> bool:
    """Whether a path names an image or a delta, damaged or not, and no directory of them."""
    named = re.fullmatch(r"(step|delta)_\d+", path.name) is not None
    return (path / MANIFEST).exists() or (named and not images(path) and not deltas(path))


def _numbered(directory, prefix):
    found = [path for path in Path(directory).glob(f"{prefix}*") if re.fullmatch(rf"{prefix}\d+", path.name)]
    return sorted(found, key=number_of, reverse=True)


def number_of(path: Path) -> int:
    """The step of an image, the number of a delta."""
    return int(path.name.rpartition("_")[2])


def remove_partial(directory: Path, prefix: str) -> None:
    """Removes what killed saves have left of images of a prefix; the caller holds their lock."""
    for torn in directory.glob(f"{prefix}*{PARTIAL}"):
        shutil.rmtree(torn, ignore_errors=True)


# Without OCDBT there is nothing to merge, which Orbax warns of at every save. And what one of its
# threads raises, the save raises as well: a hundred lines of tracebacks before that say no more.
_NOISE = "Skipping merge of OCDBT", "_SignalingThread.run() raised an exception"
logging.getLogger("absl").addFilter(lambda record: not any(text in record.getMessage() for text in _NOISE))

FORMAT = 2  # of the manifest
_ARRAYS, CHAIN = "arrays", "chain.json"
_CHUNK_BYTES, _PIECE_BYTES = 1 << 26, 1 << 27
_READERS = 4  # threads that verify files: a checksum lets other threads run
# Of a file system: a leaf has a directory and a file beside its own.
_BLOCK_BYTES, _BLOCKS_PER_LEAF = 4096, 3


class DamagedImage(ValueError):
    """An image cannot be believed: a file differs from its manifest, or that from its digest."""


class Image(NamedTuple):
    """What a manifest says of an image.

    Attributes:
      path: its directory.
      format: of the manifest, `FORMAT`.
      run: id of the run that saved it.
      step: steps trained.
      tables: {table: [rows, width]} in the order of the spec.
      shards: S.
      layout: {stack: {part: [width, dtype]}} of 'value' and each slot.
      seed: of the initial rows. scales: {table: half width of their distribution}, or None.
      spec: digest of the spec.
      dense: [[path in the pytree, shape, dtype]] of the dense state, in order; empty if not saved.
      extra: what the caller saved along, such as the data position.
      parents: {name: digest} of the images that this one needs, oldest first.
      files: {name: [bytes, crc32]}.
      digest: of the manifest itself, by which others name this image.
    """

    path: Path
    format: int
    run: str
    step: int
    tables: dict[str, list[int]]
    shards: int
    layout: dict[str, dict[str, list]]
    seed: int
    scales: dict[str, float | None]
    spec: str
    dense: list
    extra: dict[str, Any]
    parents: dict[str, str]
    files: dict[str, list[int]]
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of all its files but the manifest."""
        return sum(size for size, _ in self.files.values())


class Snapshot(NamedTuple):
    """A training state on the host, ready to be written."""

    arrays: dict[str, np.ndarray]
    manifest: dict[str, Any]
    # More arrays; each piece is written before the next one is made.
    later: Iterable[dict[str, np.ndarray]] = ()
    # (directory) -> {file: [bytes, crc32]}, flushed: has the rest written by the servers that have it.
    remote_rows: Callable[[Path], dict[str, list[int]]] | None = None


def write_image(path: str | Path, image: Snapshot, replace: bool = False) -> Image:
    """Writes an image, aside, flushed, then renamed into place: what its manifest says.

    Args:
      path: the image's directory. What is there already and is not whole is replaced.
      image: from `snapshot`.
      replace: a whole image of that name, too.

    Raises:
      ValueError: there is a whole image of that name.
      OSError: the disk is full or read-only; older images are as they were.
    """
    path = Path(path)
    if not replace and is_whole(path):
        raise ValueError(f"{path} exists already: images are never overwritten, give another name.")
    partial = path.with_name(path.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)  # of a save that was killed
    make_directory(path.parent)
    try:
        partial.mkdir()
        _write_files(partial, image)
        damaged = set_aside(path) if path.exists() else None
        os.rename(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk gets its space back
        raise
    sync(path.parent)
    if damaged is not None:
        shutil.rmtree(damaged)
    return read_manifest(path)


def _write_files(partial, image):
    """Arrays, then the manifest with their checksums, all flushed."""
    theirs = image.remote_rows(partial) if image.remote_rows else {}
    pieces = itertools.chain(_pieces(image.arrays), filter(None, image.later))
    for number, arrays in enumerate(pieces):
        _write_arrays(partial / f"{_ARRAYS}.{number:04d}", arrays)
    mine = sorted(
        file for file in partial.rglob("*") if file.is_file() and str(file.relative_to(partial)) not in theirs
    )
    sums = {str(file.relative_to(partial)): _checksum(file) for file in mine} | theirs
    body = json.dumps({"format": FORMAT, **image.manifest, "files": sums})
    (partial / MANIFEST).write_text(body + "\n" + hashlib.sha256(body.encode()).hexdigest() + "\n")
    for file in [*mine, partial / MANIFEST, *(d for d in partial.rglob("*") if d.is_dir()), partial]:
        sync(file)


def write_piece(directory: Path, name: str, arrays: dict[str, np.ndarray]) -> dict[str, list[int]]:
    """Writes and flushes some leaves of an image, whose manifest another process writes.

    Args:
      directory: of the image.
      name: of the piece, unlike that of any other.
      arrays: {leaf: array}.

    Returns:
      {file: [bytes, crc32]}, for the manifest.
    """
    piece = directory / f"{_ARRAYS}.{name}"
    _write_arrays(piece, arrays)
    files = sorted(file for file in piece.rglob("*") if file.is_file())
    for path in [*files, *(d for d in piece.rglob("*") if d.is_dir()), piece]:
        sync(path)
    return {str(file.relative_to(directory)): _checksum(file) for file in files}


def _pieces(arrays):
    """Cuts {name: array} into dicts of about `_PIECE_BYTES`: Orbax copies all of what it gets."""
    piece, size = {}, 0
    for name, array in arrays.items():
        piece[name], size = array, size + array.nbytes
        if size >= _PIECE_BYTES:
            yield piece
            piece, size = {}, 0
    if piece:
        yield piece


def _write_arrays(directory, arrays):
    blocks = sum(-(-array.nbytes // _BLOCK_BYTES) + _BLOCKS_PER_LEAF for array in arrays.values())
    needs, free = blocks * _BLOCK_BYTES, shutil.disk_usage(directory.parent).free
    # Asked before, as tensorstore's threads complain at length of a disk that is full on the way.
    if needs > free:
        said = f"{os.strerror(errno.ENOSPC)}: {needs} bytes are to be written, {free} are free"
        raise OSError(errno.ENOSPC, said, str(directory))
    save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in arrays}
    try:
        with _orbax() as orbax:
            orbax.save(directory.resolve(), ocp.args.PyTreeSave(arrays, save_args=save_args))
    except OSError:
        raise
    except Exception as error:  # only the disk can refuse arrays of ours: tensorstore says so in a ValueError
        full = "No space left" in str(error) or "RESOURCE_EXHAUSTED" in str(error)
        number = errno.ENOSPC if full else errno.EIO
        raise OSError(number, os.strerror(number), str(directory)) from error


def needed(directory: str | Path) -> set[str]:
    """Names of the images that a row delta of a directory needs, or is to be written over.

    What cannot be read may need any image: then all are needed.
    """
    directory, names = Path(directory), set()
    try:
        for path in deltas(directory):
            names |= set(read_manifest(path).parents)
        if (directory / CHAIN).exists():
            names |= set(json.loads((directory / CHAIN).read_text()))
    except (ValueError, OSError):
        return {path.name for path in images(directory)}
    return names


def read_manifest(path: str | Path) -> Image:
    """Reads and verifies the manifest of an image.

    Raises:
      DamagedImage: there is none, or it is damaged.
      ValueError: it is of a format that this version does not read.
    """
    path = Path(path)
    try:
        body, _, digest = (path / MANIFEST).read_bytes().rstrip(b"\n").rpartition(b"\n")
    except OSError as error:
        raise DamagedImage(f"{path} has no readable manifest ({error.strerror}).") from error
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise DamagedImage(f"{path / MANIFEST} is damaged: its checksum does not fit.")
    fields = json.loads(body)
    if fields["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {fields['format']}, and this version of jaxrec reads format {FORMAT}: go on with the "
            "version that saved it."
        )
    return Image(path=path, digest=digest.decode(), **fields)


def verify(image: Image, leaves: Collection[str] | None = None) -> None:
    """Compares the files of an image with its manifest.

    Args:
      image: from `read_manifest`.
      leaves: names of the leaves whose files to check; all if None.

    Raises:
      DamagedImage: a file is missing or differs; names it.
    """
    # A file of another leaf is left out; Orbax' own metadata are always checked.
    mine = [name for name in image.files if leaves is None or name.count("/") < 2 or name.split("/")[1] in leaves]
    with ThreadPoolExecutor(_READERS) as pool:
        sums = {name: pool.submit(_checksum, image.path / name) for name in mine}
        for name, checked in sums.items():
            try:
                found = checked.result()
            except OSError as error:
                raise DamagedImage(f"{image.path / name} cannot be read ({error.strerror}).") from error
            if found != image.files[name]:
                raise DamagedImage(f"{image.path / name} is damaged: size or checksum differ from the manifest.")


def is_whole(path: Path) -> bool:
    """Whether an image is there and can be believed, file by file; not what it needs."""
    try:
        verify(read_manifest(path))
    except DamagedImage:
        return False
    return True


def warn_skipped(errors: Sequence[BaseException]) -> None:
    """Warns, once, that damaged images were passed over; the errors name them, newest first."""
    if errors:
        more = f" (and {len(errors) - 1} more before it)" if len(errors) > 1 else ""
        warnings.warn(f"skipped what is damaged: {errors[0]}{more}", stacklevel=3)


def _orbax():
    # Without OCDBT each leaf is a directory of its own: one shard is read, and verified, alone.
    # Embeddings do not compress (by a tenth), and trying to doubles the time of a save.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False, use_compression=False))


def leaves_of(image: Image, prefix: str = "") -> set[str]:
    """Names of the arrays in an image, of those that begin with 'dense.' or 'rows.', say."""
    names = {name.split("/")[1] for name in image.files if name.count("/") > 1}
    return {name for name in names if name.startswith(prefix)}


def load_arrays(image: Image, leaves: Iterable[str]) -> dict[str, np.ndarray]:
    """Reads some leaves of an image, and no others; verify them first."""
    where = {name.split("/")[1]: name.split("/")[0] for name in image.files if name.count("/") > 1}
    pieces: dict[str, list[str]] = {}
    for leaf in leaves:
        pieces.setdefault(where[leaf], []).append(leaf)
    loaded: dict[str, np.ndarray] = {}
    for piece, mine in pieces.items():
        how = {leaf: ocp.RestoreArgs(restore_type=np.ndarray) for leaf in mine}
        args = ocp.args.PyTreeRestore(dict.fromkeys(mine, 0), restore_args=how, partial_restore=True)
        try:
            with _orbax() as orbax:
                loaded |= orbax.restore((image.path / piece).resolve(), args)
        except Exception as error:
            if image.path.is_dir():
                raise
            raise DamagedImage(f"{image.path} was removed while it was read.") from error
    return loaded


def _checksum(path):
    crc, size = 0, 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]
