"""Rows of a table in pieces, from separated text (plain or compressed by gzip) or Parquet; malformed rows are named.

A text is read again whenever it is needed, and compared with earlier readings (see `jaxrec.data.sources`); of a Parquet
file, the whole checksum is taken before it is read.

Legend: n rows of a piece.
"""

import csv
import datetime
import io
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrec.data.sources import CHUNK_BYTES, Chunk, Seen, changed, is_parquet, read_chunks
from jaxrec.data.tabular.encode import categories
from jaxrec.data.tabular.lines import NO_UTF8, SPLIT, explain, well_formed
from jaxrec.data.tabular.schema import KEY_BYTES, Categorical, Dense, History, Schema
from jaxrec.data.tabular.splits import ByColumn

PARQUET_ROWS = 1 << 17  # read at once, which bounds the memory of a preparation together with CHUNK_BYTES


class Piece(NamedTuple):
    """Some rows of one file, not validated yet."""

    path: Path
    source: int  # number of the file, from 0
    first_line: int  # its first row: line of the text, or row of the Parquet file, from 1
    first_row: int  # its first row among the rows of all files, from 0
    rows: int
    content: Any  # bytes of whole lines, or a polars frame
    names: tuple[str, ...]  # all columns of the content
    seen: Seen  # of the file up to the end of this piece; its lines are rows


class Table(NamedTuple):
    """The well-formed rows of a piece.

    `frame` has one column per role of a column NAME: 'n:NAME' numbers, 'c:NAME' strings, 'b:NAME' strings or lists of
    strings, 's:NAME' the values that decide the split, 'k:NAME' keys; null is missing.
    """

    row: np.ndarray  # i64[n] number among all rows of all files
    frame: Any
    bad_rows: list[int]
    why: str  # file, line and fault of the first bad row; empty if there is none


def read_pieces(paths: Sequence[Path], schema: Schema, known: Sequence[Sequence[Seen]] = ()) -> Iterator[Piece]:
    """Stream files, each text or Parquet, in bounded memory; `known` are earlier readings of each."""
    first_row = 0
    for number, path in enumerate(paths):
        read = _parquet if is_parquet(path) else _text
        last = None
        for piece in read(path, schema, known[number] if known else ()):
            last = piece = piece._replace(source=number, first_row=piece.first_row + first_row)
            yield piece
        if last is None or not last.seen.lines:
            raise ValueError(f"{path} has no rows: give a file with some, or leave it out.")
        first_row += last.seen.lines


def _text(path: Path, schema: Schema, known) -> Iterator[Piece]:
    names, header = schema.columns, schema.columns is None
    if names is not None:
        _check_names(path, schema, names, ", as columns=(...) of the schema says")
    for chunk in read_chunks([path], [known]):
        text, first_line, rows = _in_utf8(chunk, schema.encoding), chunk.first_line, chunk.rows
        if header and first_line == 1:
            line, _, text = text.partition(b"\n")
            names, first_line, rows = _header(path, schema, line), 2, rows - 1
        assert names is not None
        seen = chunk.seen._replace(lines=chunk.seen.lines - header)
        yield Piece(path, 0, first_line, first_line - 1 - header, rows, text, names, seen)


def _in_utf8(chunk: Chunk, encoding: str) -> bytes:
    if encoding == "utf-8":
        return chunk.text  # checked line by line
    try:
        return chunk.text.decode(encoding).encode()
    except UnicodeDecodeError as error:
        line = chunk.first_line + chunk.text.count(b"\n", 0, error.start)
        raise ValueError(
            f"{chunk.path}, line {line}: byte {error.object[error.start]:#04x} is no {encoding}, the encoding of the "
            "schema: give that of the file."
        ) from None


def _header(path: Path, schema: Schema, line: bytes) -> tuple[str, ...]:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line 1: byte {error.start + 1} of the header {NO_UTF8}.") from None
    if not schema.quote:
        names = text.split(schema.separator)
    else:
        try:
            names = next(csv.reader([text], delimiter=schema.separator), [])
        except csv.Error as error:
            raise ValueError(f"{path}, line 1: the header is malformed ({error}): mend it.") from None
    _check_names(path, schema, names, ", line 1", "; is the separator right, and is there a header?")
    return tuple(names)


def _check_names(path, schema, names, where="", remedy="") -> None:
    for name in schema.used:
        if list(names).count(name) != 1:
            has = "twice" if name in names else "not"
            raise ValueError(
                f"{path}{where}: the column {name!r} of the schema is {has} there, only "
                f"{', '.join(map(repr, names[:40]))!s:.500}{remedy}"
            )


def _parquet(path: Path, schema: Schema, known) -> Iterator[Piece]:
    import polars as pl

    size, crc = path.stat().st_size, 0
    with open(path, "rb") as file:
        while block := file.read(CHUNK_BYTES):
            crc = zlib.crc32(block, crc)
    if any((mark.bytes, mark.crc32) != (size, crc) for mark in known):
        raise changed(path)
    try:
        lazy = pl.scan_parquet(path)
        rows, names = int(lazy.select(pl.len()).collect().item()), lazy.collect_schema().names()
        _check_names(path, schema, names)
        for start in range(0, rows, PARQUET_ROWS):
            frame = lazy.select(schema.used).slice(start, PARQUET_ROWS).collect()
            seen = Seen(size, crc, start + len(frame), start + len(frame) == rows)
            yield Piece(path, 0, start + 1, start, len(frame), frame, tuple(frame.columns), seen)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        why = str(error).partition("\n")[0][:200]
        raise ValueError(f"{path} is no whole Parquet file ({why}): write it again.") from error


def read_table(piece: Piece, schema: Schema, times: Sequence[str] = ()) -> Table:
    """Validate and convert the rows of a piece; malformed rows are left out and named.

    Args:
      times: further columns whose numbers may be dates, as of a split that the schema has no more.
    """
    good, wrong, frame = np.ones(piece.rows, bool), "", piece.content
    if isinstance(frame, bytes):
        good, wrong, frame = _fields(piece, schema)
    typed, fits, rule = _typed(frame, schema, piece, times)
    at = np.flatnonzero(good)
    of_value = at[~fits]
    if len(of_value) and (good.all() or of_value[0] < np.argmin(good)):
        wrong = f"{piece.path}, {_place(piece, of_value[0])}: {rule}"
    good[of_value] = False
    row = np.arange(piece.first_row, piece.first_row + piece.rows)
    import polars as pl

    return Table(row[good], typed.filter(pl.Series(fits)), row[~good].tolist(), wrong)


def _place(piece: Piece, at: int) -> str:
    return f"{'line' if isinstance(piece.content, bytes) else 'row'} {piece.first_line + int(at)}"


def _fields(piece: Piece, schema: Schema) -> tuple[np.ndarray, str, Any]:
    """Return the well-formed lines bool[n], the fault of the first other one, and the used columns of the good ones."""
    import polars as pl

    text, separator = piece.content, schema.separator.encode()
    several = len(separator) > 1
    good = well_formed(text, separator, len(piece.names), schema.quote)
    wrong = ""
    if not good.all():
        lines = text.split(b"\n")[:-1]
        at = int(np.argmin(good))
        wrong = f"{piece.path}, {_place(piece, at)}: {explain(lines[at], separator, len(piece.names), schema.quote)}"
        text = b"".join(line + b"\n" for line, ok in zip(lines, good, strict=True) if ok)
    if several:
        text = text.replace(separator, SPLIT.encode())
    names = [f"column_{place + 1}" for place in range(len(piece.names))]
    wanted = {names[piece.names.index(name)]: name for name in schema.used}
    quote = '"' if schema.quote and b'"' in text else None
    rows = int(good.sum())
    if rows:
        frame = pl.read_csv(
            io.BytesIO(text), separator=SPLIT if several else schema.separator, has_header=False, quote_char=quote,
            schema=dict.fromkeys(names, pl.String), columns=list(wanted),
        ).rename(wanted)  # fmt: skip
    else:
        frame = pl.DataFrame(schema=dict.fromkeys(schema.used, pl.String))
    if len(frame) != rows:
        raise ValueError(
            f"{piece.path}, lines {piece.first_line} to {piece.first_line + piece.rows - 1}: {rows} lines were read as "
            f"{len(frame)} rows; are there fields over several lines? One row is one line here."
        )
    return good, wrong, frame


def _typed(frame, schema: Schema, piece: Piece, times: Sequence[str]) -> tuple[Any, np.ndarray, str]:
    """Return the columns by role, which rows have valid values (bool[n]), and the fault of the first that has not."""
    import polars as pl

    columns, checks = {}, []

    def number(name, needed, rule="a number", fits=None, missing=schema.missing):
        series = frame[name]
        known, absent = _known(pl, series, name in (*schema.times, *times), missing, piece)
        ok = known.is_finite().fill_null(False) if fits is None else fits(known).fill_null(False)
        if missing and needed:
            rule += " that is not one of missing=... of the schema"
        checks.append((name, rule, (ok if needed else ok | absent).to_numpy(), series))
        columns[f"n:{name}"] = known

    for label in schema.label:
        binary = label.at_least is None and not label.regression
        within = (lambda found: (found == 0) | (found == 1)) if binary else None
        rule = (
            "0 or 1 (of other numbers, at_least of the Label says what is a 1, and regression predicts them)"
            if binary else "a number"
        )  # fmt: skip
        # No text for a missing value is a valid label but 0 or 1, which are then meant for features.
        number(label.column, True, rule, within, () if binary else schema.missing)
    if schema.weight:
        number(schema.weight, True, "a number from 0", lambda found: (found >= 0) & found.is_finite())
    for name in schema.times:
        if f"n:{name}" not in columns:
            number(name, True, "a number, or a date and time such as 2014-10-21 05:00")
    for feature in schema.features:
        if isinstance(feature, Dense):
            if f"n:{feature.column}" not in columns:
                number(feature.column, False, "a number or missing")
            continue
        name, role = feature.column, "c" if isinstance(feature, Categorical) else "b"
        if isinstance(feature, History):
            name, role = feature.by, "c"
        columns[f"{role}:{name}"] = _categories(pl, frame[name], schema.absent, piece, role)
    for name in schema.keys:
        found = _categories(pl, frame[name], schema.absent, piece, "c")
        short = (found.str.len_bytes() <= KEY_BYTES).fill_null(True)
        checks.append((name, f"a key, a text of at most {KEY_BYTES} bytes", short.to_numpy(), found))
        columns[f"k:{name}"] = found
    if isinstance(schema.split, ByColumn):
        split = schema.split
        found = _checked(pl, frame[split.column], piece, "c").cast(pl.String)  # as the split says it, whatever it is
        known = found.is_in([*split.train, *split.validation, *split.test]).fill_null(False)
        checks.append((split.column, "a value of the split", known.to_numpy(), found))
        columns[f"s:{split.column}"] = found
    fits = np.logical_and.reduce([ok for _, _, ok, _ in checks])
    rule = ""
    if not fits.all():
        at = int(np.argmin(fits))
        name, wanted, _, series = next(check for check in checks if not check[2][at])
        found = "missing" if series[at] is None else f"{str(series[at])!a:.60}"
        rule = f"{name!r} is {found}, but it is {wanted}"
    return pl.DataFrame({key: series.alias(key) for key, series in columns.items()}), fits, rule


def _known(pl, series, time: bool, missing: Sequence[str], piece: Piece):
    """Return the numbers of a series, null where they are missing or one of `missing`, and where that is."""
    no_numbers = pl.Series(missing, dtype=pl.String).cast(pl.Float64, strict=False).drop_nulls().to_list()
    found = _numbers(pl, series, time, piece)
    absent = series.is_null() | found.is_nan().fill_null(False) | found.is_in(no_numbers).fill_null(False)
    if series.dtype == pl.String:
        absent |= series.is_in(["", *missing]).fill_null(True)
    return found.set(absent, None), absent


def _numbers(pl, series, time: bool, piece: Piece):
    """Convert a series to f64, null where missing; of a `time`, dates to seconds since 1970, in files of any type."""
    if time and series.dtype in (pl.Date, pl.Datetime):
        return series.dt.epoch("us").cast(pl.Float64) / 1e6
    if not (series.dtype == pl.String or series.dtype.is_numeric() or series.dtype in (pl.Boolean, pl.Null)):
        raise ValueError(f"{piece.path}: {series.name!r} holds {series.dtype}, but numbers are expected: cast it.")
    found = series.cast(pl.Float64, strict=False)
    if not time or series.dtype != pl.String or not (found.is_null() & series.is_not_null()).any():
        return found
    texts = series.unique().drop_nulls().to_list()
    moments = {text: moment for text in texts if (moment := _moment(text)) is not None}
    old, new = list(moments), list(moments.values())
    dated = series.replace_strict(old, new, default=None, return_dtype=pl.Float64) if old else found
    return pl.Series(np.where(found.is_null().to_numpy(), dated.to_numpy(), found.to_numpy()), nan_to_null=True)


def _moment(text: str) -> float | None:
    """Parse an ISO 8601 date and time: seconds since 1970, in UTC unless it names another zone; None if it is none."""
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def _categories(pl, series, absent: Sequence[str], piece: Piece, role: str):
    """Convert a series to strings, null where missing, or to lists."""
    series = _checked(pl, series, piece, role)
    if isinstance(series.dtype, pl.List | pl.Array):
        return series.cast(pl.List(series.dtype.inner))
    return categories(series, absent)


def _checked(pl, series, piece: Piece, role: str):
    """Return a series whose values can be categories."""
    listed = isinstance(series.dtype, pl.List | pl.Array)
    inner = series.dtype.inner if listed else series.dtype
    if (listed and role == "c") or inner.is_nested() or inner in (pl.Binary, pl.Object, pl.Duration):
        kinds = "texts and whole numbers are categories" + ("" if role == "c" else ", or lists of them")
        raise ValueError(f"{piece.path}: {series.name!r} holds {series.dtype}, but {kinds}: cast it.")
    return series
