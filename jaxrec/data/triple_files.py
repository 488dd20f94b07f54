"""Files of triples: OpenKE's, and tables of three columns, as text or Parquet.

Legend: n triples, N entities, R relations.
"""

import gzip
import warnings
import zlib
from pathlib import Path

import numpy as np

from jaxrec.data.sources import is_gzip, is_parquet
from jaxrec.data.triples import Triples

_SPLITS = ("train", "valid", "test")
_TABLES = (".tsv", ".txt", ".tsv.gz", ".txt.gz", ".parquet")
_MAX_ID = 10**9
_LONGEST = 1000  # characters of a name
_ROLES = (  # how columns are named
    {"head", "subject", "source", "src", "from", "h"},
    {"relation", "predicate", "edge", "rel", "r"},
    {"tail", "object", "target", "dst", "to", "t"},
)
_SPLIT = 5  # stream of random numbers


def load_triples(path: Path | str, seed: int = 0) -> Triples:
    """Read a knowledge graph.

    Args:
      path: one of
        - a directory of the OpenKE files {train,valid,test}2id.txt(.gz): a count, then lines `head tail relation` of
          ids, in this order; entity2id.txt and relation2id.txt, lines of a name and its id, if they are there;
        - a directory of the tables {train,valid,test}.{tsv,txt,parquet} (text may be packed, .gz): head, relation and
          tail, named by any texts or numbers, tab-separated in lines without a header, or columns of these names, or
          the first three;
        - one such table, of whose distinct triples a random 5 % each are held out for validation and test. A triple and
          its reverse by the same relation, which tells it, are held out together; each entity and relation keeps a
          triple to train, so that of some graphs fewer can be held out.
      seed: seed of that split.

    Returns:
      Triples; of OpenKE's files with the ids given, otherwise with the names numbered in their order as texts.

    Raises:
      ValueError: there are no such files, or a line of them is no triple.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a table of triples, or a directory of three.")
    if path.is_file():
        none = [np.zeros(0, object)] * 3
        found = _numbered([_columns(path), none, none])
        # Without repeats, of which one would be tested and another trained.
        triples = found.train[np.sort(np.unique(found.train, axis=0, return_index=True)[1])]
        train, valid, test = _split(triples, found.entities, seed)
        if not (len(valid) and len(test)):
            raise ValueError(
                f"{path} has {len(triples)} distinct triples, too few to split: give at least 20, whose ends and "
                "relations others have too; or a directory of tables train, valid and test."
            )
        return found._replace(train=triples[train], valid=triples[valid], test=triples[test])
    if tables := _find(path, [[f"{split}{ending}" for ending in _TABLES] for split in _SPLITS]):
        return _numbered([_columns(table) for table in tables])
    files = _find(path, [[f"{split}2id.txt.gz", f"{split}2id.txt"] for split in _SPLITS])
    if not files:
        there = ", ".join(sorted(file.name for file in path.iterdir()))
        raise ValueError(
            f"{path} holds neither OpenKE's train2id.txt, valid2id.txt and test2id.txt (.gz), nor all of the tables "
            f"train, valid and test ({', '.join(_TABLES)}), but {there or 'nothing':.200}: give their directory, or "
            "one table."
        )
    parts = [_read(file) for file in files]  # i64[n, 3]
    n, r = (1 + max(int(part[:, columns].max()) for part in parts) for columns in ([0, 2], [1]))
    if max(n, r) > 100 * (total := sum(map(len, parts))):
        raise ValueError(
            f"{path}: {total} triples have ids up to {max(n, r) - 1}, each of which would have a row: number them anew."
        )
    train, valid, test = (part.astype(np.int32) for part in parts)
    names = _names_in(path, "entity2id.txt", n), _names_in(path, "relation2id.txt", r)
    return Triples(train, valid, test, max(n, len(names[0])), max(r, len(names[1])), names)


def _split(triples, entities, seed):
    """Return the rows of train, valid and test, given distinct triples i32[n, 3]."""
    n, undirected = len(triples), np.concatenate([np.sort(triples[:, ::2], axis=1), triples[:, 1:2]], axis=1)
    link = np.unique(undirected, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.argsort(link, kind="stable")
    pairs = np.flatnonzero(np.diff(link[order]) == 0)
    reverse = np.arange(n)
    reverse[order[pairs]], reverse[order[pairs + 1]] = order[pairs + 1], order[pairs]
    used = triples + np.array([0, entities, 0])  # entities and relations, numbered together
    left = np.bincount(used.reshape(-1)).tolist()  # how many of their uses are in training
    drawn = np.random.default_rng([seed, _SPLIT]).permutation(n)
    held_out = dict[int, None]()  # in the order in which they were drawn
    for row in drawn[::-1].tolist():
        if len(held_out) >= 2 * (n // 20):
            break
        if row in held_out:
            continue
        both = list(dict.fromkeys((row, int(reverse[row]))))
        uses = used[both].reshape(-1).tolist()
        for one in uses:
            left[one] -= 1
        if all(left[one] for one in uses):
            held_out |= dict.fromkeys(both)
        else:
            for one in uses:
                left[one] += 1
    rows, half = np.array([*held_out], np.int64), len(held_out) // 2
    return drawn[~np.isin(drawn, rows)], rows[half:][::-1], rows[:half][::-1]


def _names_in(directory, name, least):
    """Read a file of OpenKE that names ids, str[N], N at least `least`; empty if there is none."""
    files = _find(directory, [[f"{name}.gz", name]])
    if not files:
        return np.zeros(0, str)
    rows = [line.rsplit(maxsplit=1) for line in _lines(files[0])]
    rows = rows[len(rows[0]) == 1 :] if rows else []  # without their number
    named = {int(row[1]): row[0] for row in rows if len(row) == 2 and row[1].isascii() and row[1].isdecimal()}
    if not least <= len(named) == len(rows) or named.keys() != set(range(len(named))):
        raise ValueError(
            f"{files[0]} does not name the ids from 0 to at least {least - 1}, each once: correct or remove it."
        )
    return np.array([named[number] for number in range(len(named))])


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
    starts = np.cumsum([0, *(len(part[0]) for part in parts)])
    train, valid, test = np.split(triples, starts[1:-1])
    rest = np.delete(triples, [start for start in starts[:-1] if start < len(triples)], axis=0)
    if len(rest) and not np.isin(train[0, ::2], rest[:, ::2]).any() and train[0, 1] not in rest[:, 1]:
        said = " ".join(str(names[0]) for names in parts[0])
        warnings.warn(
            f"the first triple, {said:.80}, has names of its own: remove it if it names the columns.", stacklevel=3
        )
    return Triples(train, valid, test, len(entities), len(kinds), (entities.astype(str), kinds.astype(str)))


def _columns(path):
    """Read a table: three arrays of n names, objects."""
    columns = _parquet(path) if is_parquet(path) else _texts(path)
    longest = max(len(name) for column in columns for name in column)
    if longest > _LONGEST:
        raise ValueError(f"{path} has a name of {longest} characters: names have at most {_LONGEST}.")
    return columns


def _parquet(path):
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path).read()
        table = table.select(_roles(path, table.column_names))
        columns = [column.cast(pyarrow.string()) for column in table.columns]
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as a table of names: {error}") from error
    floats = [str(field.name) for field in table.schema if pyarrow.types.is_floating(field.type)]
    if len(columns) < 3 or not table.num_rows or any(column.null_count for column in columns) or floats:
        raise ValueError(
            f"{path} has {table.num_columns} columns, {', '.join(floats) or 'none'} of them floats, and "
            f"{table.num_rows} rows: head, relation and tail are expected, texts or whole numbers without nulls."
        )
    found = [[name.strip() for name in column.to_pylist()] for column in columns]
    if not all(map(all, found)):
        raise ValueError(f"{path} has an empty name: give each entity and relation one.")
    return [np.array(names, object) for names in found]


def _roles(path, names):
    """Return the columns of head, relation and tail: those of such names, or the first three if none has one."""
    found = [[i for i, name in enumerate(names) if name.lower() in role] for role in _ROLES]
    if not found[0] and not found[2]:
        return [*range(min(3, len(names)))]
    if len(names) == 3 and not found[1]:
        found[1] = [*{0, 1, 2}.difference(found[0], found[2])]
    if [len(places) for places in found] != [1, 1, 1]:
        raise ValueError(f"{path} has the columns {', '.join(names)}: name one each head, relation and tail.")
    return [places[0] for places in found]


def _texts(path):
    rows = []
    for number, line in enumerate(_lines(path), 1):
        row = [name.strip() for name in line.split("\t")]
        if len(row) != 3 or not all(row):
            raise ValueError(
                f"{path}, line {number}: {line!r:.80} is not head, relation and tail, separated by tabs: correct the "
                "line."
            )
        if number == 1 and row[0].lower() in _ROLES[0] and row[2].lower() in _ROLES[2]:
            raise ValueError(f"{path}, line 1, names the columns, and would be a triple: remove the line.")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} is empty: a line for each triple is expected.")
    return list(np.array(rows, object).T)


def _lines(path):
    try:
        data = gzip.decompress(path.read_bytes()) if is_gzip(path) else path.read_bytes()
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
