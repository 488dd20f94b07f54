"""Raw Criteo lines, validated and converted to columns: label, 13 integers, 26 hexadecimal categories, tab-separated.

Legend: n rows of a chunk, N = 13 dense features, F = 26 fields.
"""

import io
import re
from typing import NamedTuple

import numpy as np

from jaxrec.data.sources import Chunk

DENSE, FIELDS = 13, 26
_TABS = DENSE + FIELDS
_INTEGER, _HEX = re.compile(rb"-?[0-9]{1,18}"), re.compile(rb"[0-9a-fA-F]{1,8}")
_LINE = re.compile(rb"[01](\t(-?[0-9]{1,18})?){13}(\t([0-9a-fA-F]{1,8})?){26}")
_ALLOWED = b"0123456789abcdefABCDEF-\t\n"
_LONGEST = np.array([1] + [18] * DENSE + [8] * FIELDS)  # bytes up to which a field is left to polars


class Columns(NamedTuple):
    """The well-formed rows of a chunk."""

    row: np.ndarray  # i64[n] number among all lines of all files
    label: np.ndarray  # u8[n]
    dense: np.ndarray  # f32[n, N], log(1 + max(x, 0)), 0 if missing
    category: np.ndarray  # u32[n, F]
    present: np.ndarray  # bool[n, F]
    bad_rows: list[int]  # numbers of the malformed lines
    why: str  # file, line and fault of the first of them; empty if there is none


def parse(chunk: Chunk, labelled: bool = True) -> Columns:
    """Validate and convert a chunk; without labels in its lines they are 0."""
    text = chunk.text if labelled else _with_label(chunk.text)
    parsed = _parse_good(text, chunk.rows)
    rows = np.arange(chunk.first_row, chunk.first_row + chunk.rows)
    if parsed is not None:
        return Columns(rows, *parsed, bad_rows=[], why="")
    # polars does not name the line: check line by line.
    lines = text.split(b"\n")[:-1]
    good = np.array([_LINE.fullmatch(line) is not None for line in lines])
    at = int(np.argmin(good))
    why = f"{chunk.path}, line {chunk.first_line + at}: {_explain(lines[at], labelled)}"
    kept = [line for line, ok in zip(lines, good, strict=True) if ok]
    parsed = _parse_good(b"".join(line + b"\n" for line in kept), len(kept))
    assert parsed is not None
    return Columns(rows[good], *parsed, bad_rows=rows[~good].tolist(), why=why)


def has_labels(line: bytes) -> bool:
    """Whether a file with this first line has labels; a line of neither kind counts as labelled and fails later."""
    return line.count(b"\t") != _TABS - 1


def _with_label(text: bytes) -> bytes:
    return b"0\t" + text[:-1].replace(b"\n", b"\n0\t") + b"\n"


def _explain(line: bytes, labelled: bool) -> str:
    fields = line.split(b"\t")
    if len(fields) != _TABS + 1 and not labelled:
        return f"{len(fields) - 1} fields, but a row without a label has {_TABS}, separated by tabs"
    if len(fields) != _TABS + 1:
        return f"{len(fields)} fields, but a row has {_TABS + 1}, separated by tabs"
    if fields[0] not in (b"0", b"1"):
        return f"label {_shown(fields[0])}, but a label is 0 or 1"
    for place, field in enumerate(fields[1:], 1):
        if place <= DENSE and field and not _INTEGER.fullmatch(field):
            return f"I{place} is {_shown(field)}, but a dense feature is an integer of up to 18 digits or empty"
        if place > DENSE and field and not _HEX.fullmatch(field):
            return f"C{place - DENSE} is {_shown(field)}, but a category has up to 8 hexadecimal digits or is empty"
    raise AssertionError(line)


def _shown(field: bytes) -> str:
    return ascii(field[:40].decode("latin-1"))


def _parse_good(text: bytes, lines: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Return label, dense, category and present of all lines; None if any line is malformed."""
    import polars as pl

    if not lines:
        empty = np.zeros((0, FIELDS))
        dense = np.zeros((0, DENSE), np.float32)
        return np.zeros(0, np.uint8), dense, empty.astype(np.uint32), empty.astype(bool)
    if not _is_usual(text, lines) and not all(_LINE.fullmatch(line) for line in text.split(b"\n")[:-1]):
        return None
    return _convert(pl, text)


def _is_usual(text: bytes, lines: int) -> bool:
    """Whether polars can validate the rest: it silently fills short lines, cuts long ones and strips blanks."""
    if text.translate(None, _ALLOWED):
        return False
    raw = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(raw < 11)  # tabs and newlines: no other allowed byte is below 11
    if len(ends) != lines * (_TABS + 1) or (raw[ends[_TABS :: _TABS + 1]] != 10).any():
        return False
    longest = np.diff(ends, prepend=-1).reshape(lines, _TABS + 1).max(0) - 1
    return bool((longest <= _LONGEST).all())


def _convert(pl, text):
    names = ["label", *(f"I{i + 1}" for i in range(DENSE)), *(f"C{i + 1}" for i in range(FIELDS))]
    kinds = [pl.String, *[pl.Int64] * DENSE, *[pl.String] * FIELDS]
    schema = dict(zip(names, kinds, strict=True))
    try:
        frame = pl.read_csv(io.BytesIO(text), separator="\t", has_header=False, schema=schema, quote_char=None)
        if not frame["label"].is_in(["0", "1"]).fill_null(False).all():
            return None
        dense = frame.select(names[1 : DENSE + 1])
        category = frame.select(pl.col(names[DENSE + 1 :]).str.to_integer(base=16, dtype=pl.UInt32, strict=True))
    except (pl.exceptions.ComputeError, pl.exceptions.InvalidOperationError, pl.exceptions.SchemaError):
        return None
    values = dense.fill_null(0).to_numpy()
    present = np.stack([column.is_not_null().to_numpy() for column in category], axis=1)
    return (
        (frame["label"] == "1").to_numpy().astype(np.uint8),
        np.ascontiguousarray(np.log1p(values.clip(0)).astype(np.float32)),
        np.ascontiguousarray(category.fill_null(0).to_numpy()),
        present,
    )
