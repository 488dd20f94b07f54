"""Files of a table to shards of blocks, by its schema.

The rows are read two to four times: to count them (or their times) if the split needs it, for statistics (`look`), for
the logs of histories, and to write them.

Legend: n rows of a piece.
"""

import contextlib
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.data.blocks import SPLITS, Layout, Split, open_split
from jaxrec.data.preparation import (
    COUNT_AGAIN,
    VOCABULARY,
    Encoded,
    Job,
    Progress,
    check_splits,
    check_table_rows,
    count_rows,
    prepare_files,
    tables,
    write_shards,
)
from jaxrec.data.sources import local_files
from jaxrec.data.tabular import look as looks
from jaxrec.data.tabular.encode import Ids, arrays, encoders, table_rows
from jaxrec.data.tabular.histories import (
    AS_PREPARED,
    RECORD,
    SCRATCH,
    before,
    in_parts,
    log_path,
    open_log,
    open_logs,
    remembered,
    writing_log,
)
from jaxrec.data.tabular.reading import Piece, Table, read_pieces, read_table
from jaxrec.data.tabular.schema import KEY_BYTES, Categorical, Schema, table_of
from jaxrec.data.tabular.splits import ByColumn, ByFile, ByRows, ByTime, bounds, sides
from jaxrec.files import local_path


def prepare(
    sources: Sequence[str | Path],
    directory: str | Path,
    schema: Schema,
    *,
    max_bad_rows: int = 0,
    block_rows: int = 4096,
    blocks_per_shard: int = 64,
    onto: str | Path | None = None,
    progress: Callable[[Progress], object] | None = None,
) -> dict[str, Any]:
    """Prepare a table; return at once if it is already prepared, resume if a previous run was killed.

    Args:
      sources: files of one schema, in order: text, plain or compressed by gzip, or Parquet; they must not change
        meanwhile.
      directory: directory of the dataset.
      schema: schema of the files.
      max_bad_rows: number of malformed rows to leave out before giving up.
      block_rows: rows per block, the unit of reading.
      blocks_per_shard: blocks per shard, the unit of resuming.
      onto: directory of a table prepared before by the same schema, of which these files are newer rows: its categories
        keep their rows in all tables, new ones come after them, numbers are scaled as there, and histories begin there.
      progress: called after each piece that is read.

    Returns:
      The metadata: rows and label_mean of each split, skipped_rows, cardinalities, options, sources; and under 'table'
      the names of labels, dense features and columns of the lookup 'sparse', the bags, the rows of all tables, a digest
      of the mapping from values to rows, and those of the tables that it goes on from, mean and deviation of labels of
      a regression, the keys, and a summary.

    Raises:
      ValueError: a malformed file or row (with file, line, rule), a missing column, another schema than that of `onto`,
        or an error of `prepare_files`.
      OSError: the disk is full, or a file or directory is not readable or writable. The same call resumes from there.
      ImportError: the extra `data` is not installed.
    """
    described = json.loads(json.dumps(schema.described()))  # as it will be read back
    base = None if onto is None else _open_base(local_path(onto), schema, described)
    options = {
        "max_bad_rows": whole_number("max_bad_rows", max_bad_rows, 0),
        "block_rows": whole_number("block_rows", block_rows),
        "blocks_per_shard": whole_number("blocks_per_shard", blocks_per_shard),
        "schema": described,
        "onto": None if base is None else base.identity,
        "format": looks.FORMAT,
    }
    return prepare_files(
        local_files(sources), local_path(directory), options,
        lambda paths, known: read_pieces(paths, schema, known), lambda job: _write(job, schema, base), progress,
        schema.gather, {"layout": _layout(schema)},
    )  # fmt: skip


class Base(NamedTuple):
    """A prepared table that another one goes on from."""

    look: looks.Look
    identity: str  # of its mapping and of all files so far: days without new categories map values alike
    digests: list[str]  # of the tables that it goes on from, and its own
    texts: list[list[int]]  # sizes and checksums of the files of these tables
    logs: dict[str, np.ndarray]  # {history: log}


def _open_base(directory: Path, schema: Schema, described: Mapping[str, Any]) -> Base:
    metadata = metadata_of(directory)
    its, options = metadata["table"], metadata["options"]
    look = look_of(directory, its, schema)
    for part in ("label", "weight"):  # which do not change what values are mapped to
        now, earlier = described.get(part), options["schema"].get(part)
        if now != earlier:
            raise ValueError(
                f"{directory} was prepared with the {part} {earlier}, not {now}, so "
                "that rows would be learned and remembered by two rules: give the schema that it was prepared with."
            )
    texts = [*its.get("earlier_texts", []), *metadata["texts"]]
    identity = hashlib.sha256(json.dumps([its["digest"], texts]).encode()).hexdigest()[:16]
    digests = [*its.get("onto", []), its["digest"]]
    return Base(look, identity, digests, texts, open_logs(directory, schema, its))


def metadata_of(directory: Path) -> dict[str, Any]:
    """Return the metadata of a prepared table that this version can map values by."""
    metadata = open_table(directory, "train").metadata
    if metadata["options"].get("format") != looks.FORMAT:
        raise ValueError(
            f"{directory} was prepared by an earlier version, which read some values otherwise, such as 12.0 and nan: "
            "prepare the same sources in another directory, and give that; if it has another vocabulary, train again."
        )
    return metadata


def look_of(directory: Path, table: Mapping[str, Any], schema: Schema) -> looks.Look:
    """Return the look of a prepared table with that metadata; raise ValueError if its schema maps values otherwise."""
    look, _ = looks.load(directory / VOCABULARY, AS_PREPARED)
    if looks.digest(schema, look) != table["digest"]:
        raise ValueError(
            f"{directory} was prepared with another schema, by which the same values are other categories, or its "
            "vocabulary.npz is of another preparation: give the schema and the directory as they were."
        )
    return look


def open_table(directory: str | Path, name: str) -> Split:
    """Open a split of a prepared table, as `open_split`; raises ValueError if it was prepared without a schema too."""
    split = open_split(directory, name)
    if "table" not in split.metadata:
        raise ValueError(f"{directory} holds Criteo rows, prepared without a schema: open it with --data criteo.")
    return split


def _layout(schema: Schema) -> dict[str, Any]:
    labels = [len(schema.label)] if len(schema.label) > 1 else []
    columns: dict[str, Any] = {"label": [labels, "float32"]}
    if schema.weight:
        columns["weight"] = [[], "float32"]
    if schema.dense:  # tfds cannot read an array without columns
        columns["dense"] = [[len(schema.dense)], "float32"]
    if schema.single:
        columns["ids.sparse"] = [[len(schema.single)], "int32"]
    columns |= {f"ids.{bag.column}": [[bag.hots], "int32"] for bag in schema.bags}
    columns |= {f"key.{name}": [[KEY_BYTES], "uint8"] for name in schema.keys}
    return Layout("table", columns)._asdict()


def _write(job: Job, schema: Schema, base: Base | None) -> list[int]:
    """Write the missing shards; return the number of rows of each table."""
    if isinstance(split := schema.split, ByFile):
        for path in job.paths:
            if path.name not in split.train + split.validation + split.test:
                raise ValueError(
                    f"{path} is none of the files of the split: {split}. Rename it, or say what it is for."
                )
    look, found = _look(job, schema, base)
    for path, text in zip(job.paths, job.state["texts"], strict=True):
        if base is not None and text in base.texts:
            raise ValueError(
                f"{path} is one of the files of the table that it is prepared onto, or of one before that: give newer "
                "files alone, in another directory."
            )
    ids_of, moments = encoders(schema, look.vocabularies), look.summary["moments"]
    rows = table_rows(schema, look.vocabularies)
    check_table_rows(sum(rows.values()), "give a larger min_count, or a hash_cap")
    logs = _logs(job, schema, ids_of, base)
    histories = functools.partial(before, logs)

    def read(piece):
        table = read_table(piece, schema)
        side, columns = _sides(schema, found, piece, table), arrays(schema, table.frame, ids_of, moments, histories)
        return Encoded(piece, table.row, side, columns, table.bad_rows, table.why)

    encoded = lambda from_row: (each for _, each in tables(job, "writes", read, from_row))
    write_shards(job, encoded, _first_rows(schema, found))
    check_splits(job, _wanted_splits(schema), "the split of the schema")
    job.state["table"] = {
        "labels": [label.column for label in schema.label], "dense": [f.column for f in schema.dense],
        "sparse": list(schema.single), "tables": rows,
        "shared": {f.column: f.share for f in schema.features if isinstance(f, Categorical) and f.share},
        "bags": {b.column: {"table": table_of(b), "hots": b.hots, "kind": type(b).__name__} for b in schema.bags},
        "digest": looks.digest(schema, look), "features": looks.shown(schema, look, rows, job.state["ids"]),
        "label_over_time": look.summary["label_over_time"],
        "targets": look.summary.get("targets", {}), "keys": list(schema.keys),
        "histories": {name: len(log) for name, log in logs.items()}, "onto": [] if base is None else base.digests,
        "earlier_texts": [] if base is None else base.texts,
    }  # fmt: skip
    return list(rows.values())


def _sides(schema: Schema, found: dict[str, Any], piece: Piece, table: Table) -> np.ndarray:
    split, column = schema.split, None
    if isinstance(split, ByTime):
        column = table.frame[f"n:{split.column}"].to_numpy()
    if isinstance(split, ByColumn):
        column = np.array(table.frame[f"s:{split.column}"].to_list(), dtype=object)
    if isinstance(split, ByFile):
        column = np.full(len(table.row), piece.path.name, dtype=object)
    return sides(split, found, table.row, column)


def _look(job: Job, schema: Schema, base: Base | None) -> tuple[looks.Look, dict[str, Any]]:
    """Return the statistics of all rows, and what the split needs to know of them; computed once."""
    path = job.directory / VOCABULARY
    if not path.exists():
        for log in job.directory.glob("history_*.log"):  # of another vocabulary
            log.unlink()
        found = _found(job, schema)
        looking = looks.Looking(schema, found.get("periods", ()))
        for piece, table in tables(job, "looks", lambda piece: read_table(piece, schema)):
            looking.add(table, _sides(schema, found, piece, table) == 0)
        look = looking.done()
        looks.save(path, look if base is None else looks.extended(base.look, look), found)
    return looks.load(path, COUNT_AGAIN)


def _logs(job: Job, schema: Schema, ids_of: dict[str, Ids], base: Base | None) -> dict[str, np.ndarray]:
    """Return {history: the log that its rows are looked up in}; those that are missing are written in one reading."""
    for parts in job.directory.glob(f"history_*{SCRATCH}"):  # of a run that was killed
        shutil.rmtree(parts)
    paths = {history: log_path(job.directory, schema, history) for history in schema.histories}
    if missing := {history: path for history, path in paths.items() if not path.exists()}:
        rows = count_rows(job)
        with contextlib.ExitStack() as stack:
            adds = {}
            for history, path in missing.items():
                earlier = np.zeros(0, RECORD) if base is None else base.logs[history.column]
                adds[history] = stack.enter_context(writing_log(path, len(earlier) + rows))
                for part in in_parts(earlier):
                    adds[history](part)
            for _, table in tables(job, "histories", lambda piece: read_table(piece, schema)):
                for history, add in adds.items():
                    add(remembered(history, schema, table.frame, ids_of[history.of]))
    return {history.column: open_log(path, COUNT_AGAIN) for history, path in paths.items()}


def _found(job: Job, schema: Schema) -> dict[str, Any]:
    """Return what the split needs to know of all rows."""
    split = schema.split
    if isinstance(split, ByRows):
        return {"rows": count_rows(job)}
    if not isinstance(split, ByTime):
        return {}
    times, counts = np.zeros(0), np.zeros(0, np.int64)
    for _, table in tables(job, "counts", lambda piece: read_table(piece, schema)):
        new, many = np.unique(table.frame[f"n:{split.column}"].to_numpy(), return_counts=True)
        times, where = np.unique(np.concatenate([times, new]), return_inverse=True)
        counts = np.bincount(where, np.concatenate([counts, many]), len(times)).astype(np.int64)
    begin = bounds(split, times, counts)
    part = (np.cumsum(counts) - counts) * looks.PERIODS // counts.sum()  # each time belongs to one period
    return {"times": begin, "periods": times[np.flatnonzero(np.diff(part, prepend=-1))].tolist()}


def _first_rows(schema: Schema, found: dict[str, Any]) -> dict[str, int]:
    """Return {split: first row that may belong to it}, so that a resumed run skips finished rows."""
    if not isinstance(schema.split, ByRows):
        return dict.fromkeys(SPLITS, 0)
    side = sides(schema.split, found, np.arange(found["rows"]), None)
    return {name: int(np.searchsorted(side, number)) for number, name in enumerate(SPLITS)}


def _wanted_splits(schema: Schema) -> set[str]:
    """Return the splits that must have rows; validation may be empty in a split by column or by file."""
    shares = not isinstance(schema.split, ByColumn | ByFile)
    return {"train", "test"} | ({"validation"} if shares and schema.split.validation else set())
