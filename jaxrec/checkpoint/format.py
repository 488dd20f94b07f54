"""Images on disk: committed atomically and verified before use. Only this module uses Orbax.

An image is a directory: Orbax writes each array as one leaf inside NAME.partial, a manifest lists size and checksum of
every file, everything is flushed, and one rename commits the image. A killed save therefore leaves older images intact,
and a load reads only verified files. A manifest names its run and, by digest, its parent images, so that images of
different runs are never mixed.
"""

import contextlib
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
_REPLACED = ".replaced"  # an image that gives way to a new one of its name


def mark_damaged(path: Path) -> Path:
    """Rename an image to NAME.damaged or NAME.damaged.N, so that it is not read again; return the new path."""
    names = (path.with_name(path.name + _DAMAGED + (f".{number}" if number else "")) for number in itertools.count())
    free = next(name for name in names if not name.exists())
    os.rename(path, free)
    return free


def images(directory: str | Path) -> list[Path]:
    """Return the committed images of a directory, newest step first; an image needs no other one."""
    # Left by a process killed between the two renames of `_move`; the rename fails if the new image is there.
    for replaced in Path(directory).glob(f"step_*{_REPLACED}"):
        with contextlib.suppress(OSError):
            os.rename(replaced, replaced.with_suffix(""))
    return _numbered(directory, "step_")


def deltas(directory: str | Path) -> list[Path]:
    """Return the committed row deltas of a directory, newest first; each needs the parents named in its manifest."""
    return _numbered(directory, "delta_")


def is_image(path: Path) -> bool:
    """Return whether a path is an image or a delta, damaged or not, rather than a directory of them."""
    named = re.fullmatch(r"(step|delta)_\d+", path.name) is not None
    return (path / MANIFEST).exists() or (named and not images(path) and not deltas(path))


def _numbered(directory, prefix):
    found = [path for path in Path(directory).glob(f"{prefix}*") if re.fullmatch(rf"{prefix}\d+", path.name)]
    return sorted(found, key=number_of, reverse=True)


def number_of(path: Path) -> int:
    """Return the step of an image, or the sequence number of a delta."""
    return int(path.name.rpartition("_")[2])


def remove_partial(directory: Path, prefix: str) -> None:
    """Remove what killed saves have left of images whose names start with a prefix; the caller holds their lock."""
    replaced = [path for path in directory.glob(f"{prefix}*{_REPLACED}") if path.with_suffix("").exists()]
    for torn in [*directory.glob(f"{prefix}*{PARTIAL}"), *replaced]:
        shutil.rmtree(torn, ignore_errors=True)


# Orbax warns at every save that there is nothing to merge without OCDBT. It also logs a hundred lines of tracebacks for
# an error in one of its threads, which the save raises anyway.
_NOISE = "Skipping merge of OCDBT", "_SignalingThread.run() raised an exception"
logging.getLogger("absl").addFilter(lambda record: not any(text in record.getMessage() for text in _NOISE))

FORMAT = 2  # version of the manifest
_ARRAYS, CHAIN = "arrays", "chain.json"
CHUNK_BYTES, PIECE_BYTES = 1 << 26, 1 << 27
_READERS = 4  # threads that verify files: checksums release the GIL
# File-system blocks: besides its data, a leaf takes a directory and a metadata file.
_BLOCK_BYTES, _BLOCKS_PER_LEAF = 4096, 3


class DamagedImage(ValueError):
    """An image is damaged: a file does not match its manifest, or the manifest its digest."""


class Image(NamedTuple):
    """The manifest of an image or a row delta.

    Attributes:
      path: directory of the image.
      format: version of the manifest, `FORMAT`.
      run: id of the run that saved it.
      step: number of training steps completed.
      tables: {table: [rows, width]} in the order of the spec.
      shards: number of shards S.
      layout: {stack: {part: [width, dtype]}} of 'value' and each slot.
      seed: seed of the initial rows.
      scales: {table: half the width of the initial distribution, or None for the default}.
      spec: digest of the spec.
      dense: [[path in the pytree, shape, dtype]] of the dense leaves, in order; empty if not saved.
      extra: further values saved by the caller, such as the data position.
      parents: {name: digest} of the images that this one needs, oldest first.
      files: {name: [bytes, crc32]}.
      digest: SHA-256 of the manifest, by which children refer to this image.
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
        """Total size of all files except the manifest, in bytes."""
        return sum(size for size, _ in self.files.values())


# Writes rows into the partial directory of an image; returns {file: [bytes, crc32]} for its manifest.
WriteRows = Callable[[Path], dict[str, list[int]]]


class Snapshot(NamedTuple):
    """A consistent training state on the host, ready to be written."""

    arrays: dict[str, np.ndarray]
    manifest: dict[str, Any]
    # More arrays; each dict is written before the next one is requested.
    later: Iterable[dict[str, np.ndarray]] = ()
    write_remote_rows: WriteRows | None = None  # makes the servers write and flush their rows


def write_image(path: str | Path, image: Snapshot, replace: bool = False) -> Image:
    """Write an image to a partial directory, flush it and rename it into place; return its manifest.

    Args:
      path: directory of the image; replaced if it exists but is not intact.
      image: from `snapshot`.
      replace: also replace an intact image of that name.

    Raises:
      ValueError: an intact image of that name exists.
      OSError: the disk is full or read-only; older images are unchanged.
    """
    path = Path(path)
    if not replace and is_intact(path):
        raise ValueError(f"{path} exists already: images are never overwritten, give another name.")
    partial = path.with_name(path.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed save
    make_directory(path.parent)
    try:
        partial.mkdir()
        _write_files(partial, image)
        replaced = _move(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # frees the space on a full disk
        raise
    sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return read_manifest(path)


def _move(partial, path):
    """Rename a partial image into place, and the image that it replaces aside; return that one's path."""
    replaced = path.with_name(path.name + _REPLACED)
    while True:
        try:
            os.rename(partial, path)
            return replaced
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        shutil.rmtree(replaced, ignore_errors=True)  # left by a killed save, and `path` is newer
        os.rename(path, replaced)  # again, if `images` has renamed it back meanwhile


def _write_files(partial, image):
    """Write and flush the arrays, then the manifest with their checksums."""
    theirs = image.write_remote_rows(partial) if image.write_remote_rows else {}
    pieces = itertools.chain(_pieces(image.arrays), filter(None, image.later))
    sums = _write_pieces(partial, _ARRAYS, pieces) | theirs
    body = json.dumps({"format": FORMAT, **image.manifest, "files": sums})
    (partial / MANIFEST).write_text(body + "\n" + hashlib.sha256(body.encode()).hexdigest() + "\n")
    for path in (partial / MANIFEST, partial):
        sync(path)


def write_leaves(directory: Path, name: str, arrays: dict[str, np.ndarray]) -> dict[str, list[int]]:
    """Write and flush some leaves of an image, under a unique name; return {file: [bytes, crc32]} for its manifest."""
    return _write_pieces(directory, f"{_ARRAYS}.{name}", _pieces(arrays))


def _write_pieces(directory, name, pieces):
    """Write and flush dicts of arrays, each in a directory of its own; return {file: [bytes, crc32]}."""
    sums: dict[str, list[int]] = {}
    for number, arrays in enumerate(pieces):
        where = directory / f"{name}.{number:04d}"
        _write_arrays(where, arrays)
        files = sorted(file for file in where.rglob("*") if file.is_file())
        for path in [*files, *(d for d in where.rglob("*") if d.is_dir()), where]:
            sync(path)
        sums |= {str(file.relative_to(directory)): _checksum(file) for file in files}
    return sums


def _pieces(arrays):
    """Split {name: array} into dicts of about `PIECE_BYTES`, as Orbax copies all arrays of a save."""
    piece, size = {}, 0
    for name, array in arrays.items():
        piece[name], size = array, size + array.nbytes
        if size >= PIECE_BYTES:
            yield piece
            piece, size = {}, 0
    if piece:
        yield piece


def _write_arrays(directory, arrays):
    blocks = sum(-(-array.nbytes // _BLOCK_BYTES) + _BLOCKS_PER_LEAF for array in arrays.values())
    needs, free = blocks * _BLOCK_BYTES, shutil.disk_usage(directory.parent).free
    # Checked in advance, as tensorstore's threads log at length when the disk fills up during a save.
    if needs > free:
        said = f"{os.strerror(errno.ENOSPC)}: {needs} bytes are to be written, {free} are free"
        raise OSError(errno.ENOSPC, said, str(directory))
    save_args = {name: ocp.SaveArgs(chunk_byte_size=_chunk_bytes(array)) for name, array in arrays.items()}
    try:
        with _orbax() as orbax:
            orbax.save(directory.resolve(), ocp.args.PyTreeSave(arrays, save_args=save_args))
    except OSError:
        raise
    except Exception as error:  # a disk error, the only possible cause, which tensorstore raises as a ValueError
        full = "No space left" in str(error) or "RESOURCE_EXHAUSTED" in str(error)
        number = errno.ENOSPC if full else errno.EIO
        raise OSError(number, os.strerror(number), str(directory)) from error


def _chunk_bytes(array):
    """Return the size of an array's files: the least from CHUNK_BYTES on that divides its longest axis.

    Orbax divides axes into equal chunks only: with an upper bound in its place, each row of a prime number of rows
    became a file.
    """
    longest, most = max(array.shape, default=1), max(1, array.nbytes // CHUNK_BYTES)
    chunks = next(number for number in range(most, 0, -1) if longest % number == 0)
    return max(CHUNK_BYTES, array.nbytes // chunks)


def needed(directory: str | Path) -> set[str]:
    """Return the names of the images that a directory's row deltas, or the next delta, need.

    If a delta or the chain file is unreadable, all images count as needed.
    """
    directory, names = Path(directory), set()
    try:
        for path in deltas(directory):
            names |= set(read_manifest(path).parents)
        if (directory / CHAIN).exists():
            (base,) = json.loads((directory / CHAIN).read_text())
            names.add(base)
    except (ValueError, TypeError, OSError):
        return {path.name for path in images(directory)}
    return names


def read_manifest(path: str | Path) -> Image:
    """Read and verify the manifest of an image.

    Raises:
      DamagedImage: the manifest is missing or damaged.
      ValueError: the manifest has another format version, or other fields than this one's.
    """
    path = Path(path)
    try:
        body, _, digest = (path / MANIFEST).read_bytes().rstrip(b"\n").rpartition(b"\n")
    except OSError as error:
        raise DamagedImage(f"{path} has no readable manifest ({error.strerror}).") from error
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise DamagedImage(f"{path / MANIFEST} is damaged: its checksum does not fit.")
    fields = json.loads(body)
    wanted = {*Image._fields} - {"path", "digest"}
    if fields.get("format") != FORMAT or fields.keys() != wanted:
        more, less = sorted(fields.keys() - wanted), sorted(wanted - fields.keys())
        raise ValueError(
            f"{path} has format {fields.get('format')}{f', with {more}' if more else ''}"
            f"{f', without {less}' if less else ''}, and this version of jaxrec reads format {FORMAT}: go on with the "
            "version that saved it."
        )
    return Image(path=path, digest=digest.decode(), **fields)


def verify(image: Image, leaves: Collection[str] | None = None) -> None:
    """Check the files of an image against its manifest.

    Args:
      image: from `read_manifest`.
      leaves: names of the leaves to check; all if None.

    Raises:
      DamagedImage: a file is missing or differs; names it.
    """
    # Files of other leaves are skipped; Orbax' own metadata are always checked.
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


def is_intact(path: Path) -> bool:
    """Return whether an image exists and all its files match its manifest; its parents are not checked."""
    try:
        verify(read_manifest(path))
    except DamagedImage:
        return False
    return True


def warn_skipped(errors: Sequence[BaseException]) -> None:
    """Warn once that damaged images were skipped; the errors name them, newest first."""
    if errors:
        more = f" (and {len(errors) - 1} more before it)" if len(errors) > 1 else ""
        warnings.warn(f"skipped what is damaged: {errors[0]}{more}", stacklevel=3)


def _orbax():
    # Without OCDBT each leaf is a separate directory, so that one shard can be read and verified alone. Compression
    # would shrink embeddings by only a tenth and double the time of a save.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False, use_compression=False))


def leaves_of(image: Image, prefix: str = "") -> set[str]:
    """Return the names of the arrays in an image that start with a prefix, such as 'dense.' or 'rows.'."""
    names = {name.split("/")[1] for name in image.files if name.count("/") > 1}
    return {name for name in names if name.startswith(prefix)}


def load_arrays(image: Image, leaves: Iterable[str]) -> dict[str, np.ndarray]:
    """Read some leaves of an image, and no others; verify them first."""
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
