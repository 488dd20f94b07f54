"""The names of images in a directory: step_N is whole by itself, delta_N needs others; .partial is being written, and
what is .damaged is never read again."""

import os
import re
import shutil
from pathlib import Path

from jaxrec.files import PARTIAL

MANIFEST, _DAMAGED = "manifest.json", ".damaged"


def set_aside(path: Path) -> Path:
    """Renames an image that is not to be read again to NAME.damaged (and a number): the path."""
    for number in range(1000):
        name = path.with_name(path.name + _DAMAGED + (f".{number}" if number else ""))
        if not name.exists():
            os.rename(path, name)
            return name
    raise ValueError(f"{path.parent} holds 1000 damaged images named {path.name}: remove them.")


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
