"""From the files of a table to array_record shards of blocks, registered with tfds; killed at any point, it resumes at
the shard, and the bytes are those of an undisturbed run.

The rows are read two or three times: to count them (or their times) where the split wants it, for a look at them
(`look`), and to be written. What a row is for depends on the row or its number alone, and each shard notes the number
that follows its last row.

Legend: n rows of a piece.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.data.criteo.dataset import DONE, Layout, read_metadata, register, tfds_module, write_blocks
from jaxrec.data.criteo.record import PROGRESS, VOCABULARY, begin_record, finished, known_texts
from jaxrec.data.criteo.source import check_distinct, check_distinct_texts, check_untouched, fingerprint, local_files
from jaxrec.data.tabular import look as looks
from jaxrec.data.tabular.encode import arrays, encoders, table_rows
from jaxrec.data.tabular.reading import Piece, Table, is_parquet, read_pieces, read_table, reread
from jaxrec.data.tabular.schema import Schema, table_of
from jaxrec.data.tabular.splits import NAMES, ByColumn, ByFile, ByRows, ByTime, bounds, sides
from jaxrec.files import Lock, local_path, make_directory, write_json

_MOST_ROWS = 2**31 - 2**16  # tables share a stack, whose rows are numbered by int32


class Progress(NamedTuple):
    """How far a preparation is."""

    stage: str  # 'counts', 'looks' or 'writes'
    rows: int  # since the last call
    share: float | None  # of the stage that is done; None where nobody knows


class Job(NamedTuple):
    """One run of a preparation."""

    paths: list[Path]
    directory: Path
    schema: Schema
    options: dict[str, Any]
    state: dict[str, Any]  # the content of progress.json
    progress: Callable[[Progress], object] | None


def prepare(
    sources: Sequence[str | Path],
    directory: str | Path,
    schema: Schema,
    *,
    max_bad_rows: int = 0,
    block_rows: int = 4096,
    blocks_per_shard: int = 64,
    progress: Callable[[Progress], object] | None = None,
) -> dict[str, Any]:
    """Prepares a table; returns at once if it is prepared already, goes on if a run was killed.

    Args:
      sources: files of one schema, in their order: text, plain or .gz, or Parquet; they must not change meanwhile.
      directory: where the dataset goes.
      schema: what the columns are.
      max_bad_rows: how many malformed rows to leave out before giving up.
      block_rows: rows of a block, the unit of reading.
      blocks_per_shard: blocks of a shard, the unit of resuming.
      progress: called now and then.

    Returns:
      The metadata: rows and label_mean of each split, skipped_rows, cardinalities, options, sources; and under 'table'
      the names of labels, dense features and columns of the lookup 'sparse', the bags, the rows of all tables, a
      digest of what maps values to rows, and a summary.

    Raises:
      ValueError: a malformed file or row (with file, line, rule); a column that is not there; the same rows twice;
        files that changed since rows were made from them; arguments out of range; a directory that holds another
        preparation, or a damaged one; somebody else preparing there; a split without rows.
      OSError: the disk is full, or a file or directory may not be read or written. The same call goes on from there.
      ImportError: what the extra `data` installs is missing.
    """
    if not isinstance(schema, Schema):
        raise ValueError(f"schema is a {type(schema).__name__}, but a Schema(label=..., features=[...]) is wanted.")
    paths, directory = local_files(sources, "CSV, text or Parquet"), local_path(directory)
    options = {
        "max_bad_rows": whole_number("max_bad_rows", max_bad_rows, 0),
        "block_rows": whole_number("block_rows", block_rows),
        "blocks_per_shard": whole_number("blocks_per_shard", blocks_per_shard),
        "schema": schema.described(),
    }  # fmt: skip
    tfds_module()  # says what is missing before the work, not after
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file: give a directory, which is made if it does not exist.")
    prints = [fingerprint(path) for path in paths]
    check_distinct(paths, prints)
    make_directory(directory)
    with Lock(directory / "lock", f"preparing {directory}"):
        if schema.gather is not None:
            options["gathered"] = sorted([its["name"], its["size_bytes"], its["head_crc32"]] for its in prints)
            paths = list(schema.gather(paths, directory))
        _check_names(schema, paths)
        options = json.loads(json.dumps(options))  # as it is read back
        wanted = {"options": options, "sources": [fingerprint(path) for path in paths], "layout": _layout(schema)}
        if (directory / DONE).exists():
            return finished(directory, paths, wanted, reread(schema))
        state = begin_record(directory, paths, wanted, reread(schema))
        _run(Job(paths, directory, schema, options, state, progress))
    return read_metadata(directory)


def _check_names(schema: Schema, paths: Sequence[Path]) -> None:
    """Refuses a file that a split by files has no place for."""
    split = schema.split
    if not isinstance(split, ByFile):
        return
    for path in paths:
        if path.name not in split.train + split.validation + split.test:
            raise ValueError(f"{path} is none of the files of the split: {split}. Rename it, or say what it is for.")


def _layout(schema: Schema) -> dict[str, Any]:
    labels = [len(schema.label)] if len(schema.label) > 1 else []
    columns: dict[str, Any] = {"label": [labels, "float32"]}
    if schema.weight:
        columns["weight"] = [[], "float32"]
    if schema.dense:  # tfds reads no array without columns
        columns["dense"] = [[len(schema.dense)], "float32"]
    if schema.single:
        columns["ids.sparse"] = [[len(schema.single)], "int32"]
    columns |= {f"ids.{bag.column}": [[bag.hots], "int32"] for bag in schema.bags}
    return Layout("table", columns, "A table of one's own.", "That of the files it was made from.")._asdict()


def _run(job: Job) -> None:
    look, found = _look(job)
    rows = table_rows(job.schema, look.vocabularies)
    if sum(rows.values()) > _MOST_ROWS:
        raise ValueError(
            f"the tables have {sum(rows.values())} rows, but together at most {_MOST_ROWS} are numbered: give a "
            "larger min_count, or a hash_cap."
        )
    _write_shards(job, look, found)
    _check_splits(job, found)
    check_untouched(job.paths, job.state["sources"])
    schema = job.schema
    job.state["table"] = {
        "labels": [label.column for label in schema.label], "dense": [f.column for f in schema.dense],
        "sparse": list(schema.single), "tables": rows,
        "bags": {b.column: {"table": table_of(b), "hots": b.hots, "kind": type(b).__name__} for b in schema.bags},
        "digest": looks.digest(schema, look), "features": looks.shown(schema, look, rows),
        "label_over_time": look.summary["label_over_time"],
    }  # fmt: skip
    register(job.directory, job.state, list(rows.values()))


def _pieces(job: Job, stage: str) -> Iterator[Piece]:
    """All pieces of all files. Whoever reads to the end knows that each is the text that other readings saw."""
    texts = []
    sizes = [path.stat().st_size for path in job.paths]
    rows = sum(lines for _, _, lines in job.state["texts"])
    for piece in read_pieces(job.paths, job.schema, known_texts(job.state, len(job.paths))):
        texts += [piece.seen] if piece.seen.ended else []
        yield piece
        if job.progress is not None:
            share = _share(job, piece, sizes, rows)
            job.progress(Progress(stage, piece.rows, share))
    check_untouched(job.paths, job.state["sources"])
    check_distinct_texts(job.paths, texts)
    if not job.state["texts"]:
        job.state["texts"] = [[seen.bytes, seen.crc32, seen.lines] for seen in texts]
        write_json(job.directory / PROGRESS, job.state)


def _share(job: Job, piece: Piece, sizes: list[int], rows: int) -> float | None:
    """How much of all files was read, this piece included; nobody knows how long an unread .gz is."""
    if rows:
        return (piece.first_row + piece.rows) / rows
    if any(path.suffix == ".gz" or is_parquet(path) for path in job.paths):
        return None
    return (sum(sizes[: piece.source]) + piece.seen.bytes) / sum(sizes)


def _tables(
    job: Job, stage: str, from_row: int = 0, then: Callable[[Table], Any] = lambda table: None
) -> Iterator[tuple[Piece, Table, Any]]:
    """Reads the pieces that reach beyond a row, one piece ahead in a thread, which goes on to `then`; counts bad rows
    over all of them."""

    def read(piece):
        table = read_table(piece, job.schema)
        return table, then(table)

    allowed = job.options["max_bad_rows"]
    left: int | None = None
    pieces = (piece for piece in _pieces(job, stage) if piece.first_row + piece.rows > from_row)
    with ThreadPoolExecutor(1) as pool:
        ahead = lambda: [(p, pool.submit(read, p)) for p in itertools.islice(pieces, 1)]
        waiting = ahead()
        while waiting:
            piece, reading = waiting.pop()
            waiting = ahead()
            table, made = reading.result()
            if left is None:  # the bad rows of pieces that are skipped were counted by an earlier run
                left = allowed - sum(row < piece.first_row for row in job.state["bad_rows"])
            if len(table.bad_rows) > left:
                raise ValueError(
                    f"{table.why}. Correct it, or leave out up to N bad rows with max_bad_rows=N (--max-bad-rows N); "
                    f"here are {len(table.bad_rows)} together, {left} more are allowed."
                )
            left -= len(table.bad_rows)
            yield piece, table, made


def _sides(job: Job, found: dict[str, Any], piece: Piece, table: Table) -> np.ndarray:
    split, column = job.schema.split, None
    if isinstance(split, ByTime):
        column = table.frame[f"n:{split.column}"].to_numpy()
    if isinstance(split, ByColumn):
        column = np.array(table.frame[f"s:{split.column}"].to_list(), dtype=object)
    if isinstance(split, ByFile):
        column = np.full(len(table.row), piece.path.name, dtype=object)
    return sides(split, found, table.row, column)


def _look(job: Job) -> tuple[looks.Look, dict[str, Any]]:
    """The look at all rows, and what the split has to know of them; taken once."""
    path = job.directory / VOCABULARY
    if not path.exists():
        if job.state["shards"]:
            raise ValueError(
                f"{path} is missing, and shards were written with it: bring it back, or delete {job.directory} and run "
                "the preparation again."
            )
        found = _found(job)
        looking = looks.Looking(job.schema, found.get("periods", ()))
        for piece, table, _ in _tables(job, "looks"):
            looking.add(table, _sides(job, found, piece, table) == 0)
        looks.save(path, looking.done(), found)
    return looks.load(path, f"delete {job.directory} and run the preparation again.")


def _found(job: Job) -> dict[str, Any]:
    """What the split has to know of all rows."""
    split = job.schema.split
    if isinstance(split, ByRows):
        if not job.state["texts"]:
            for _ in _pieces(job, "counts"):
                pass
        return {"rows": sum(lines for _, _, lines in job.state["texts"])}
    if not isinstance(split, ByTime):
        return {}
    times, counts = np.zeros(0), np.zeros(0, np.int64)
    for _, table, _ in _tables(job, "counts"):
        new, many = np.unique(table.frame[f"n:{split.column}"].to_numpy(), return_counts=True)
        times, where = np.unique(np.concatenate([times, new]), return_inverse=True)
        counts = np.bincount(where, np.concatenate([counts, many]), len(times)).astype(np.int64)
    if not len(times):
        raise _no_good_row(job)
    part = (np.cumsum(counts) - counts) * looks.PERIODS // counts.sum()  # each time belongs to one period
    return {"times": bounds(split, times, counts), "periods": times[np.flatnonzero(np.diff(part, prepend=-1))].tolist()}


def _write_shards(job: Job, look: looks.Look, found: dict[str, Any]) -> None:
    """Writes the shards that are not there yet; each is noted before the next of its split begins."""
    ids_of, moments = encoders(job.schema, look.vocabularies), look.summary["moments"]
    shard_rows = job.options["block_rows"] * job.options["blocks_per_shard"]
    done = _first_rows(job, found)
    for shard in job.state["shards"]:
        done[shard["split"]] = shard["next_row"]
    waiting: dict[str, list[dict]] = {name: [] for name in NAMES}

    def flush(name, piece, at_end=False):
        while (rows := sum(len(part["label"]) for part in waiting[name])) >= shard_rows or (at_end and rows):
            whole = {key: np.concatenate([part[key] for part in waiting[name]]) for key in waiting[name][0]}
            _write_shard(job, name, {key: array[:shard_rows] for key, array in whole.items()}, piece)
            waiting[name] = [{key: array[shard_rows:] for key, array in whole.items()}]

    encoded = lambda table: arrays(job.schema, table.frame, ids_of, moments) | {"row": table.row}
    piece = None
    for piece, table, whole in _tables(job, "writes", min(done.values()), encoded):
        job.state["bad_rows"] = sorted({*job.state["bad_rows"], *table.bad_rows})
        side = _sides(job, found, piece, table)
        for number, name in enumerate(NAMES):
            chosen = (side == number) & (table.row >= done[name])
            if chosen.any():
                waiting[name].append({key: array[chosen] for key, array in whole.items()})
                flush(name, piece)
    for name in NAMES:
        flush(name, piece, at_end=True)


def _first_rows(job: Job, found: dict[str, Any]) -> dict[str, int]:
    """The row from which on each split may have some, so that a run that goes on skips what is done."""
    done = dict.fromkeys(NAMES, 0)
    if isinstance(job.schema.split, ByRows):
        side = sides(job.schema.split, found, np.arange(found["rows"]), None)
        done |= {name: int(np.searchsorted(side, number)) for number, name in enumerate(NAMES)}
    return done


def _write_shard(job: Job, name: str, rows, last: Piece) -> None:
    """Writes rows and notes them, with the piece up to which the files were read for them."""
    index = sum(shard["split"] == name for shard in job.state["shards"])
    layout = Layout(**job.state["layout"])
    size = write_blocks(job.directory, name, index, rows, job.options["block_rows"], layout)
    label = rows["label"] if rows["label"].ndim == 1 else rows["label"][:, 0]
    shard = {"split": name, "rows": len(label), "clicks": float(label.sum(dtype=np.float64)), "bytes": size}
    shard |= {"next_row": int(rows["row"][-1]) + 1, "text": [last.source, last.seen.bytes, last.seen.crc32]}
    job.state["shards"].append(shard)
    write_json(job.directory / PROGRESS, job.state)


def _no_good_row(job: Job) -> ValueError:
    return ValueError(f"{', '.join(map(str, job.paths))}: every row is malformed; check schema and files.")


def _check_splits(job: Job, found: dict[str, Any]) -> None:
    have = {shard["split"] for shard in job.state["shards"]}
    if not have:
        raise _no_good_row(job)
    split = job.schema.split
    wanted = {"train", "test"} | ({"validation"} if getattr(split, "validation", 0) not in (0, ()) else set())
    if isinstance(split, ByColumn | ByFile):
        wanted.discard("validation")  # who has none need not say so
    for name in NAMES:
        if name in wanted - have:
            rows = sum(lines for _, _, lines in job.state["texts"])
            raise ValueError(
                f"the {name} split would have no rows out of {rows}: give more rows, or change the split of the schema "
                "(in another directory, or delete this one)."
            )
