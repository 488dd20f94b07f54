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
_SPLIT = 5  # stream of random numbers


def load_triples(path: Path | str, seed: int = 0) -> Triples:
    """Read a knowledge graph.

    Args:
      path: one of
        - a directory of the OpenKE files {train,valid,test}2id.txt(.gz): a count, then lines `head tail relation` of
          ids, in this order;
        - a directory of the tables {train,valid,test}.{tsv,txt,parquet} (text may be packed, .gz): head, relation and
          tail, named by any texts or numbers, tab-separated in lines without a header, or the first three columns;
        - one such table, of which a random 5 % each become the validation and the test triples.
      seed: seed of that split.

    Returns:
      Triples, in file order; of OpenKE's files with the ids given, otherwise with the names numbered in their order.

    Raises:
      ValueError: there are no such files, or a line of them is no triple.
    """
    path = Path(path)
    if path.is_file():
        columns = _columns(path)
        order = np.random.default_rng([seed, _SPLIT]).permutation(len(columns[0]))
        held_out = len(order) // 20
        chosen = np.split(order, [len(order) - 2 * held_out, len(order) - held_out])
        if not held_out:
            raise ValueError(f"{path} has {len(order)} triples, too few to split: give at least 20.")
        return _numbered([[column[rows] for column in columns] for rows in chosen])
    if tables := _find(path, {split: [f"{split}{ending}" for ending in _TABLES] for split in _SPLITS}):
        return _numbered([_columns(table) for table in tables])
    files = _find(path, {split: [f"{split}2id.txt.gz", f"{split}2id.txt"] for split in _SPLITS})
    if not files:
        raise ValueError(
            f"{path} holds neither OpenKE's train2id.txt, valid2id.txt and test2id.txt (.gz), nor tables train, valid "
            f"and test ({', '.join(_TABLES)}): give their directory, or one table."
        )
    parts = [_read(file) for file in files]  # i64[n, 3]
    n, r = (1 + max(int(part[:, columns].max()) for part in parts) for columns in ([0, 2], [1]))
    train, valid, test = (part.astype(np.int32) for part in parts)
    return Triples(train, valid, test, n, r)


def _find(directory, names_of):
    """Return one existing file of each split; [] if a split has none."""
    found = [
        next((directory / name for name in names if (directory / name).is_file()), None) for names in names_of.values()
    ]
    return [] if None in found else found


def _numbered(parts):
    """Number the names of tables of three columns."""
    heads, relations, tails = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    entities, ids = np.unique(np.concatenate([heads, tails]), return_inverse=True)
    kinds, relation = np.unique(relations, return_inverse=True)
    triples = np.stack([ids[: len(heads)], relation, ids[len(heads) :]], axis=1).astype(np.int32)
    train, valid, test = np.split(triples, np.cumsum([len(part[0]) for part in parts])[:-1])
    return Triples(train, valid, test, len(entities), len(kinds), (entities.astype(str), kinds.astype(str)))


def _columns(path):
    """Read a table: three arrays of n names."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} cannot be read as Parquet: {error}") from error
        if table.num_columns < 3 or not table.num_rows or any(table.column(i).null_count for i in range(3)):
            raise ValueError(
                f"{path} has {table.num_columns} columns and {table.num_rows} rows: three columns without nulls are "
                "expected, head, relation and tail."
            )
        return [np.asarray(table.column(i).to_numpy()) for i in range(3)]
    rows = [line.split("\t") for line in _lines(path)]
    for number, row in enumerate(rows, 1):
        if len(row) != 3:
            raise ValueError(
                f"{path}, line {number}: {chr(9).join(row)!r:.80} is not head, relation and tail, separated by tabs: "
                "correct the line."
            )
    if not rows:
        raise ValueError(f"{path} is empty: a line for each triple is expected.")
    return list(np.array(rows).T)


def _lines(path):
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode().splitlines()
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): fetch it again.") from error


def _read(path: Path) -> np.ndarray:
    """Read a file of OpenKE, i64[n, 3] in the order head, relation, tail."""
    lines = _lines(path)
    count = lines[0].strip() if lines else ""
    if not count.isdigit() or not 0 < int(count) == len(lines) - 1:
        raise ValueError(
            f"{path}, line 1: {count!r} is not the number of triples, one on each of the {len(lines[1:])} lines that "
            "follow, at least one: fetch the file again or correct the number."
        )
    rows = []
    for number, line in enumerate(lines[1:], 2):
        fields = line.split()
        if len(fields) != 3 or not all(field.isdigit() and int(field) < _MAX_ID for field in fields):
            raise ValueError(
                f"{path}, line {number}: {line!r} is not `head tail relation`, three integers from 0 to {_MAX_ID - 1}: "
                "correct the line."
            )
        rows.append([int(field) for field in fields])
    return np.array(rows, np.int64)[:, [0, 2, 1]]
