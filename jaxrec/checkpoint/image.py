"""Images on disk: whole or absent, verified before they are believed. The one file that knows Orbax.

An image is a directory of ours: Orbax writes one leaf an array inside NAME.partial, a manifest lists size and checksum
of every file, all is flushed, and one rename commits. So a killed save leaves the images before it as they were, and a
load reads only what it has verified.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp

# Without OCDBT there is nothing to merge, which Orbax warns of at every save.
logging.getLogger("absl").addFilter(lambda record: "Skipping merge of OCDBT" not in record.getMessage())

_MANIFEST, _ARRAYS, PARTIAL = "manifest.json", "arrays", ".partial"
_CHUNK_BYTES = 1 << 26


class Image(NamedTuple):
    """What a manifest says of an image.

    Attributes:
      path: its directory.
      step: steps trained.
      tables: {table: [rows, width]} in the order of the spec.
      shards: S.
      slots: {stack: {slot: K}}.
      seed: of the initial rows.
      spec: digest of the spec.
      dense: [[path in the pytree, shape, dtype]] of the dense state, in order.
      extra: what the caller saved along, such as the data position.
      parents: names of the images that this one needs.
      files: {name: [bytes, crc32]}.
    """

    path: Path
    step: int
    tables: dict[str, list[int]]
    shards: int
    slots: dict[str, dict[str, int]]
    seed: int
    spec: str
    dense: list
    extra: dict[str, Any]
    parents: list[str]
    files: dict[str, list[int]]


class Snapshot(NamedTuple):
    """A copy of the training state on the host, ready to be written."""

    arrays: dict[str, np.ndarray]
    manifest: dict[str, Any]


def write_image(path: str | Path, image: Snapshot) -> None:
    """Writes an image: aside, flushed, then renamed into place.

    Args:
      path: the image's directory, which must not exist.
      image: from `snapshot`.

    Errors:
      ValueError: there is an image of that name.
      OSError: the disk is full or read-only; older images are as they were.
    """
    path = Path(path)
    if path.exists():
        raise ValueError(f"{path} exists already: images are never overwritten, give another name.")
    partial = path.with_name(path.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)  # of a save that was killed
    try:
        partial.mkdir(parents=True)
        _write_files(partial, image)
        os.rename(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk gets its space back
        raise
    _sync(path.parent)


def _write_files(partial, image):
    """Arrays, then the manifest with their checksums, all flushed."""
    save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in image.arrays}
    with _orbax() as orbax:
        orbax.save((partial / _ARRAYS).resolve(), ocp.args.PyTreeSave(image.arrays, save_args=save_args))
    files = sorted(file for file in partial.rglob("*") if file.is_file())
    sums = {str(file.relative_to(partial)): _checksum(file) for file in files}
    body = json.dumps({**image.manifest, "files": sums})
    (partial / _MANIFEST).write_text(body + "\n" + hashlib.sha256(body.encode()).hexdigest() + "\n")
    for file in [*files, partial / _MANIFEST, *(d for d in partial.rglob("*") if d.is_dir()), partial]:
        _sync(file)


def remove_image(path: Path) -> None:
    """Removes a committed image; a kill on the way leaves no half one under its name."""
    doomed = path.with_name(path.name + PARTIAL)
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def images(directory: str | Path) -> list[Path]:
    """The committed images of a directory that are whole by themselves, newest step first."""
    return _numbered(directory, "step_")


def deltas(directory: str | Path) -> list[Path]:
    """The committed row deltas of a directory, newest first; each needs the images that its manifest names."""
    return _numbered(directory, "delta_")


def _numbered(directory, prefix):
    found = [path for path in Path(directory).glob(f"{prefix}*") if re.fullmatch(rf"{prefix}\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name[len(prefix) :]), reverse=True)


def needed(directory: str | Path) -> set[str]:
    """Names of the images that some row delta of a directory needs; what cannot be read needs none."""
    names = set()
    for path in deltas(directory):
        try:
            names |= set(read_manifest(path, lambda _: "").parents)
        except ValueError:
            continue  # the deltas before and after it name the same base
    return names


def older_image(path: Path) -> str:
    """A sentence that offers the newest older image that is whole."""
    for other in images(path.parent):
        if other.name < path.name:
            try:
                verify(read_manifest(other))
            except ValueError:
                continue
            return f"The newest older image that is whole is {other}."
    return "There is no older whole image beside it."


def read_manifest(path: str | Path, advise: Callable[[Path], str] = older_image) -> Image:
    """Reads and verifies the manifest of an image.

    Args:
      path: the image.
      advise: makes of the path the last sentence of an error.

    Errors:
      ValueError: there is none, or it is damaged; names the newest older image.
    """
    path = Path(path)
    try:
        body, _, digest = (path / _MANIFEST).read_bytes().rstrip(b"\n").rpartition(b"\n")
    except OSError as error:
        raise ValueError(f"{path} has no readable manifest ({error.strerror}). {advise(path)}") from error
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError(f"{path / _MANIFEST} is damaged: its checksum does not fit. {advise(path)}")
    return Image(path=path, **json.loads(body))


def verify(image: Image, leaves=None, advise: Callable[[Path], str] = older_image) -> None:
    """Compares the files of an image with its manifest.

    Args:
      image: from `read_manifest`.
      leaves: names of the leaves whose files to check; all if None.
      advise: makes of the image's path the last sentence of an error.

    Errors:
      ValueError: a file is missing, or its size or checksum differs; names it, and the newest older image.
    """
    for name, (size, crc) in image.files.items():
        if leaves is not None and name.count("/") > 1 and name.split("/")[1] not in leaves:
            continue  # a file of another leaf; Orbax' own metadata are always checked
        file = image.path / name
        if not file.is_file():
            raise ValueError(f"{file} is missing. {advise(image.path)}")
        if _checksum(file) != [size, crc]:
            raise ValueError(f"{file} is damaged: size or checksum differ from the manifest. {advise(image.path)}")


def _orbax():
    # Without OCDBT each leaf is a directory of its own: one shard is read, and verified, alone. Embeddings do not
    # compress (by a tenth), and trying to doubles the time of a save.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False, use_compression=False))


def leaves_of(image: Image) -> set[str]:
    """Names of the arrays in an image."""
    return {name.split("/")[1] for name in image.files if name.count("/") > 1}


def load_arrays(image: Image, leaves) -> dict[str, np.ndarray]:
    """Reads some leaves of an image, and no others; verify them first."""
    item = {leaf: 0 for leaf in leaves}
    how = {leaf: ocp.RestoreArgs(restore_type=np.ndarray) for leaf in leaves}
    with _orbax() as orbax:
        return orbax.restore(
            (image.path / _ARRAYS).resolve(), ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True)
        )


def _checksum(path):
    crc, size = 0, 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


def _sync(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
