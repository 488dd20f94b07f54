"""Raw files on disk: their format, whether they are unchanged, and their text in whole lines.

A preparation reads its files one to three times, and may resume days after it was killed. Every reading therefore takes
a checksum of the text and compares it with earlier readings, at each position up to which rows were written and at the
end. Size and timestamps decide whether a file must be read again to verify that it is unchanged.
"""

import collections
import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrec.data.blocks import is_prepared
from jaxrec.files import local_path

CHUNK_BYTES = 16 << 20  # read at once, which bounds the memory of a preparation
_HEAD_BYTES = 1 << 20
_STAMPS = ("mtime_ns", "ctime_ns")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of every "CSV UTF-8" of Excel; no part of the text


class Seen(NamedTuple):
    """One reading of a file: how far its text was read, and the checksum up to there."""

    bytes: int
    crc32: int
    lines: int  # whole lines, or rows of a table
    ended: bool  # the file ends here


class Chunk(NamedTuple):
    """Whole lines of one file."""

    path: Path
    source: int  # number of the file, from 0
    first_line: int  # in the file, from 1
    first_row: int  # among the lines of all files, from 0
    text: bytes  # ends with a newline
    rows: int  # number of lines
    seen: Seen  # of the file up to the end of this chunk


def local_files(sources: Sequence[str | Path]) -> list[Path]:
    """Return the absolute paths of raw files; of a directory of part files, those of all parts, sorted by name."""
    if isinstance(sources, str | Path):
        raise ValueError(f"sources={str(sources)!r} is one path, but sources is a list: write [{str(sources)!r}].")
    paths = [path for source in sources for path in _parts(local_path(source))]
    if not paths:
        raise ValueError("sources is empty: give at least one raw file.")
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is no file: give raw files, or a prepared directory where one is expected.")
    return paths


def _parts(path: Path) -> list[Path]:
    """Return a file itself, or the files of a directory without what Spark adds to them (_SUCCESS, .part-0.crc)."""
    if not path.is_dir() or is_prepared(path):
        return [path]
    parts = sorted(part for part in path.iterdir() if not part.name.startswith((".", "_")))
    inner = next((part for part in parts if part.is_dir()), None)
    if inner is not None or not parts:
        has = f"holds the directory {inner.name}" if inner else "has no files"
        raise ValueError(f"{path} {has}: give raw files, or a directory that holds nothing else.")
    return parts


def is_gzip(path: Path) -> bool:
    """Whether a file is compressed by gzip, judged by its first bytes."""
    return _first_bytes(path, 2) == b"\x1f\x8b"


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, judged by its first bytes."""
    return _first_bytes(path, 4) == b"PAR1"


def _first_bytes(path, number):
    with open(path, "rb") as file:
        return file.read(number)


def fingerprint(path: Path) -> dict[str, Any]:
    """Identify a file by reading one MiB: its name, size, timestamps, and the checksum of its head."""
    with open(path, "rb") as file:
        head = zlib.crc32(file.read(_HEAD_BYTES))
    stat = path.stat()
    stamps = {"mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}
    return {"name": path.name, "size_bytes": stat.st_size, "head_crc32": head, **stamps}


def same_stamps(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether a file was untouched between two fingerprints; ctime reveals a change even if mtime was set back."""
    return all(a[stamp] == b[stamp] for stamp in _STAMPS)


def same_head(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two fingerprints may belong to the same text, whatever their timestamps."""
    return all(a[key] == b[key] for key in a if key not in _STAMPS)


def check_untouched(paths: Sequence[Path], fingerprints: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError if a file was written to after its fingerprint was taken."""
    for path, before in zip(paths, fingerprints, strict=True):
        now = fingerprint(path) if path.is_file() else None
        if now is None or not (same_head(now, before) and same_stamps(now, before)):
            raise ValueError(
                f"{path} was written to or replaced while it was prepared: wait until it is whole, then run the "
                "preparation again. It goes on where it was if the text is the same."
            )


def check_distinct_files(paths: Sequence[Path]) -> None:
    """Raise ValueError if a file is given twice, before anything is written."""
    _check_distinct(paths, [(path.stat().st_dev, path.stat().st_ino) for path in paths])


def check_distinct_texts(paths: Sequence[Path], texts: Sequence[Seen]) -> None:
    """Raise ValueError if two files have the same text, such as a file and its .gz.

    Training rows of one would be test rows of the other.
    """
    _check_distinct(paths, [(text.bytes, text.crc32) for text in texts])


def _check_distinct(paths, keys):
    first: dict[tuple[int, int], Path] = {}
    for path, key in zip(paths, keys, strict=True):
        other = first.setdefault(key, path)
        if other is not path:
            raise ValueError(f"{other} and {path} hold the same rows, which would train and test: give each file once.")


def read_chunks(paths: Sequence[Path], known: Sequence[Sequence[Seen]] = ()) -> Iterator[Chunk]:
    """Stream files, plain or .gz, as chunks of whole lines in bounded memory; `known` are earlier readings of each."""
    first_row = 0
    for number, path in enumerate(paths):
        before = 0
        for text, seen in _whole_lines(path, known[number] if known else ()):
            yield Chunk(path, number, before + 1, first_row + before, text, seen.lines - before, seen)
            before = seen.lines
        if not before:
            raise ValueError(f"{path}, line 1: the file is empty, but a click log has at least one row.")
        first_row += before


def _whole_lines(path: Path, known: Sequence[Seen]) -> Iterator[tuple[bytes, Seen]]:
    rest, lines = b"", 0
    for block, end, crc, ended in _checked(path, known):
        cut = len(block) if ended else block.rfind(b"\n") + 1
        text, rest = (rest + block[:cut], block[cut:]) if cut else (b"", rest + block)
        if len(rest) > 4 * CHUNK_BYTES:
            raise ValueError(f"{path}, line {lines + 1}: no end of line in {len(rest)} bytes; is it a text file?")
        if not text:
            continue
        if not text.endswith(b"\n"):
            text = text.removesuffix(b"\r") + b"\n"
        text = text.replace(b"\r\n", b"\n")
        if ended:  # blank lines at the end of a file are no rows
            text = text.rstrip(b"\n")
            text += b"\n" if text else b""
        lines += text.count(b"\n")
        yield text, Seen(end, crc, lines, ended)


def _checked(path: Path, known: Sequence[Seen]) -> Iterator[tuple[bytes, int, int, bool]]:
    """Yield blocks of text, with length and checksum of the text up to each end, and whether the file ends there."""
    marks, end, crc = collections.deque(known), 0, 0
    blocks = _blocks(path)
    block = next(blocks, b"")
    while block:
        following = next(blocks, b"")
        start, end = end, end + len(block)
        while marks and marks[0].bytes <= end:
            mark = marks.popleft()
            longer = mark.ended and (following or mark.bytes < end)
            if longer or zlib.crc32(block[: mark.bytes - start], crc) != mark.crc32:
                raise changed(path)
        if marks and not following:
            raise changed(path)
        crc = zlib.crc32(block, crc)
        yield block, end, crc, not following
        block = following


def changed(path: Path) -> ValueError:
    """Make the error for a file whose text changed after rows were made from it."""
    return ValueError(
        f"{path} is not the text that rows were prepared from before: it was edited, cut or has grown. Restore the old "
        "text back, take another directory, or delete the directory and prepare anew."
    )


def _blocks(path: Path) -> Iterator[bytes]:
    with gzip.open(path) if is_gzip(path) else open(path, "rb") as file:
        read = 0
        while True:
            try:
                block = file.read(CHUNK_BYTES)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(
                    f"{path}, after {read} bytes of text: the .gz is truncated or corrupt ({error}); fetch it again."
                ) from error
            if not block:
                return
            is_first, read = not read, read + len(block)
            if is_first:
                _check_text(path, block)
                block = block.removeprefix(_BYTE_ORDER_MARK)
            yield block


def _check_text(path: Path, block: bytes) -> None:
    if b"\0" in block[:512]:  # as in the head of a tar or zip archive, and in every line of UTF-16
        raise ValueError(
            f"{path} is no text, or UTF-16: unpack it if it is an archive, and give the files in it; convert UTF-16 "
            "(iconv -f UTF-16 -t UTF-8)."
        )
    if b"\n" not in block and b"\r" in block.rstrip(b"\r"):
        raise ValueError(
            f"{path}: its lines end in a carriage return alone, as on an old Mac: convert it "
            f"(tr '\\r' '\\n' < {path.name} > new_{path.name})."
        )
