"""Atomic writes of files and directories, and locks for a single writer.

A file is written under a temporary name, flushed and renamed into place, and the directory is flushed: after a kill or
a power failure either the old or the new version exists. A directory is locked with `flock`, which the kernel releases
when the owner dies.
"""

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

PARTIAL = ".partial"


def local_path(path: str | Path) -> Path:
    """Return an absolute path on this machine, which stays valid after `os.chdir`; refuse a URL, as s3://bucket/run.

    A leading ~ is the user's home.

    >>> local_path("/runs/a")
    PosixPath('/runs/a')
    """
    # Path("s3://b") becomes s3:/b, which would silently be created as a local directory.
    text = os.fspath(path)
    scheme = text.partition(":/")[0]
    if ":/" in text and len(scheme) > 1 and scheme.isalnum():
        raise ValueError(
            f"{text} is no path on this machine: object stores are not supported. Give a directory of a local or "
            "mounted file system."
        )
    return Path(text).expanduser().absolute()


def new_run_id() -> str:
    """Return a unique run name of 16 hexadecimal digits."""
    return uuid.uuid4().hex[:16]


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same directory, whose file atomically replaces `path` when the block ends.

    If that fails, as on a full disk, the file is unchanged and the temporary file is removed.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)  # frees the space on a full disk
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    with atomic_write(path) as partial:
        partial.write_text(text)


def write_json(path: Path, content) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content))


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """Create a directory and its parents, flushing each into its parent; it may exist already."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync(directory.parent)


def remove_directory(path: Path) -> None:
    """Remove a directory; a kill in between leaves no partial directory under its name."""
    doomed = path.with_name(path.name + PARTIAL)
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


class Lock:
    """An exclusive lock on a file, held until `release` or until the process dies; ValueError if it is held already.

    The file is created if it does not exist, and never removed. `what` is the holder's activity, for the error:
    "writing images in runs/a".
    """

    def __init__(self, path: Path, what: str):
        self._file = open(path, "a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(
                f"{path} is locked: another process is {what}. Wait until that is done, or take another directory."
            ) from None

    def release(self) -> None:
        """Release the lock, even if a forked child still has the file open; idempotent."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.release()
