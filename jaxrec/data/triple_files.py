"""Files of triples: OpenKE's, and tables of three columns, as text or Parquet.

Legend: n triples, N entities, R relations.
"""

import gzip
import zlib
from pathlib import Path

import numpy as np

from jaxrec.data.triples import Triples

_SPLITS = ("train", "valid", "test")
_TABLES = (".tsv", ".txt", ".tsv.gz", ".txt.gz", ".parquet")
_MAX_ID = 10**9
_LONGEST = 1000  # characters of a name
_HEADS, _TAILS = {"head", "subject", "source"}, {"tail", "object", "target"}  # of a line that names the columns
_SPLIT = 5  # stream of random numbers


def load_triples(path: Path | str, seed: int = 0) -> Triples:
    """Read a knowledge graph.

    Args:
      path: one of
        - a directory of the OpenKE files {train,valid,test}2id.txt(.gz): a count, then lines `head tail relation` of
          ids, in this order;
        - a directory of the tables {train,valid,test}.{tsv,txt,parquet} (text may be packed, .gz): head, relation and
          tail, named by any texts or numbers, tab-separated in lines without a header, or the first three columns;
        - one such table, of whose distinct triples a random 5 % each become those of validation and test.
      seed: seed of that split.

    Returns:
      Triples; of OpenKE's files with the ids given, otherwise with the names numbered in their order.

    Raises:
      ValueError: there are no such files, or a line of them is no triple.
    """
    path = Path(path)
    if path.is_file():
        none = [np.zeros(0, object)] * 3
        found = _numbered([_columns(path), none, none])
        # Without repeats, of which one would be tested and another trained.
        rows = np.sort(np.unique(found.train, axis=0, return_index=True)[1])
        order, held_out = np.random.default_rng([seed, _SPLIT]).permutation(rows), len(rows) // 20
        if not held_out:
            raise ValueError(f"{path} has {len(rows)} distinct triples, too few to split: give at least 20.")
        train, valid, test = np.split(order, [len(order) - 2 * held_out, len(order) - held_out])
        return found._replace(train=found.train[train], valid=found.train[valid], test=found.train[test])
    if tables := _find(path, [[f"{split}{ending}" for ending in _TABLES] for split in _SPLITS]):
        return _numbered([_columns(table) for table in tables])
    files = _find(path, [[f"{split}2id.txt.gz", f"{split}2id.txt"] for split in _SPLITS])
    if not files:
        raise ValueError(
            f"{path} holds neither OpenKE's train2id.txt, valid2id.txt and test2id.txt (.gz), nor tables train, valid "
            f"and test ({', '.join(_TABLES)}): give their directory, or one table."
        )
    parts = [_read(file) for file in files]  # i64[n, 3]
    n, r = (1 + max(int(part[:, columns].max()) for part in parts) for columns in ([0, 2], [1]))
    if n > 100 * (total := sum(map(len, parts))):
        raise ValueError(
            f"{path}: {total} triples have ids up to {n - 1}, each of which would have a row: number them anew."
        )
    train, valid, test = (part.astype(np.int32) for part in parts)
    return Triples(train, valid, test, n, r)


def _find(directory, names_of):
    """Return one existing file of each split; [] if a split has none."""
    found = [next((directory / name for name in names if (directory / name).is_file()), None) for names in names_of]
    return [] if None in found else found


def _numbered(parts):
    """Number the names of tables of three columns, objects."""
    heads, relations, tails = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    entities, ids = np.unique(np.concatenate([heads, tails]), return_inverse=True)
    kinds, relation = np.unique(relations, return_inverse=True)
    triples = np.stack([ids[: len(heads)], relation, ids[len(heads) :]], axis=1).astype(np.int32)
    train, valid, test = np.split(triples, np.cumsum([len(part[0]) for part in parts])[:-1])
    return Triples(train, valid, test, len(entities), len(kinds), (entities.astype(str), kinds.astype(str)))


def _columns(path):
    """Read a table: three arrays of n names, objects."""
    columns = _parquet(path) if path.suffix == ".parquet" else _texts(path)
    longest = max(len(name) for column in columns for name in column)
    if longest > _LONGEST:
        raise ValueError(f"{path} has a name of {longest} characters: names have at most {_LONGEST}.")
    return columns


def _parquet(path):
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        columns = [column.cast(pyarrow.string()) for column in table.columns[:3]]
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as a table of names: {error}") from error
    floats = [str(field.name) for field in table.schema if pyarrow.types.is_floating(field.type)]
    if len(columns) < 3 or not table.num_rows or any(column.null_count for column in columns) or floats:
        raise ValueError(
            f"{path} has {table.num_columns} columns, {', '.join(floats) or 'none'} of them floats, and "
            f"{table.num_rows} rows: head, relation and tail are expected as the first three, texts or whole numbers "
            "without nulls."
        )
    return [np.array(column.to_pylist(), object) for column in columns]


def _texts(path):
    rows = []
    for number, line in enumerate(_lines(path), 1):
        row = [name.strip() for name in line.split("\t")]
        if len(row) != 3 or not all(row):
            raise ValueError(
                f"{path}, line {number}: {line!r:.80} is not head, relation and tail, separated by tabs: correct the "
                "line."
            )
        if number == 1 and row[0].lower() in _HEADS and row[2].lower() in _TAILS:
            raise ValueError(f"{path}, line 1, names the columns, and would be a triple: remove the line.")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} is empty: a line for each triple is expected.")
    return list(np.array(rows, object).T)


def _lines(path):
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = data.decode("utf-8-sig").split("\n")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): fetch it again.") from error
    return lines if lines[-1] else lines[:-1]


def _read(path: Path) -> np.ndarray:
    """Read a file of OpenKE, i64[n, 3] in the order head, relation, tail."""
    lines = _lines(path)
    count = lines[0].strip() if lines else ""
    if not (count.isascii() and count.isdecimal()) or not 0 < int(count) == len(lines) - 1:
        raise ValueError(
            f"{path}, line 1: {count!r} is not the number of triples, one on each of the {len(lines[1:])} lines that "
            "follow, at least one: fetch the file again or correct the number."
        )
    rows = []
    for number, line in enumerate(lines[1:], 2):
        fields = line.split()
        if len(fields) != 3 or not all(
            field.isdecimal() and field.isascii() and int(field) < _MAX_ID for field in fields
        ):
            raise ValueError(
                f"{path}, line {number}: {line!r} is not `head tail relation`, three integers from 0 to {_MAX_ID - 1}: "
                "correct the line."
            )
        rows.append([int(field) for field in fields])
    return np.array(rows, np.int64)[:, [0, 2, 1]]
