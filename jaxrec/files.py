"""Files and directories that are whole or absent, and belong to one writer: what every part that
writes shares.

A file is written aside, flushed, renamed into place, and the directory is flushed: after a kill or
a power cut there is the old one or the new one. A directory is locked with `flock`, which the
kernel frees when its owner dies.
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
    """An absolute path on this machine, so that it means the same after `os.chdir`; a leading ~ is
    the user's home.

    Args:
      path: relative or absolute.

    Raises:
      ValueError: the path is a URL, such as s3://bucket/run.

    >>> local_path("/runs/a")
    PosixPath('/runs/a')
    """
    # Path("s3://b") turns into s3:/b, and would be made here without a word.
    text = os.fspath(path)
    scheme = text.partition(":/")[0]
    if ":/" in text and len(scheme) > 1 and scheme.isalnum():
        raise ValueError(
            f"{text} is no path on this machine: object stores are not supported. Give a directory of a local or "
            "mounted file system."
        )
    return Path(text).expanduser().absolute()


def new_run_id() -> str:
    """A name for a run that no other run has: 16 hexadecimal digits."""
    return uuid.uuid4().hex[:16]


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Yields a name beside a file to write to; what was written takes its place at once, or not at
    all.

    Args:
      path: the file, which may exist.

    Raises:
      OSError: the disk is full or read-only; the file is as it was, and what was written aside is
        removed.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)  # a full disk gets its space back
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all; raises as `aside`."""
    with aside(path) as partial:
        partial.write_text(text)


def write_json(path: Path, content) -> None:
    """Writes JSON whole or not at all; raises as `aside`."""
    write_text(path, json.dumps(content))


def sync(path: Path) -> None:
    """Waits until a file or directory is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """Makes a directory and those above it, each flushed into the one that holds it; it may
    exist."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync(directory.parent)


def remove_directory(path: Path) -> None:
    """Removes a directory; a kill on the way leaves no half one under its name."""
    doomed = path.with_name(path.name + PARTIAL)
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


class Lock:
    """An exclusive lock on a file, held until `release` or until the process dies.

    Args:
      path: of the file, made if it does not exist and never removed.
      what: is being done, for the error of the second: "writing images in runs/a".

    Raises:
      ValueError: it is held, in this process or another one.
      OSError: the file cannot be made, or its file system knows no locks.
    """

    def __init__(self, path: Path, what: str):
        self._file = open(path, "a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(
                f"{path} is locked: somebody else is {what}. Wait until that is done, or take another directory."
            ) from None

    def release(self) -> None:
        """Gives the lock back, also if a forked child still has the file; once is enough."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.release()
