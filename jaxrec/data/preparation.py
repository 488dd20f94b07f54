"""Preparation of raw files: array_record shards of blocks, registered with tfds; resumable after a kill.

A resumed run continues at the first missing shard, and all bytes equal those of an uninterrupted run.

Criteo's logs and tables with a schema share this code; they differ in how rows are read, split and encoded. Files are
read in pieces, such as `sources.Chunk`: each has a path, the number of its file, its first row, its number of rows, and
how far the file has been `Seen`. Every row has a number, and the split of a row depends on the row or its number alone.
Each shard records the number after its last row, so that a resumed run skips finished rows.

`progress.json`, the progress notes, holds options, fingerprints of the files, the shards written so far, each with the
position in the text up to which the files must not change; `ids`, the sums of `count_ids` over the shards of each
split, which an earlier version did not count; and `texts`: the checksums of all files, once they have been read to the
end.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrec.data.blocks import (
    DONE,
    METADATA,
    PROGRESS,
    SPLITS,
    check_files,
    check_shards,
    layout_of,
    read_json,
    read_metadata,
    register,
    shard_bytes,
    tfds_module,
    write_blocks,
)
from jaxrec.data.sources import (
    Seen,
    check_distinct_files,
    check_distinct_texts,
    check_untouched,
    fingerprint,
    is_gzip,
    is_parquet,
    same_head,
    same_stamps,
)
from jaxrec.files import Lock, make_directory, write_json

VOCABULARY = "vocabulary.npz"
# Tables may share a stack, whose rows are numbered by int32 and rounded up to a multiple of the number of shards.
MOST_ROWS = 2**31 - 2**16
COUNT_AGAIN = (
    "delete this file and run the preparation again, which counts the values once more and keeps what is written."
)

Read = Callable[[Sequence[Path], Sequence[Sequence[Seen]]], Iterator[Any]]


class Progress(NamedTuple):
    """Progress of a preparation."""

    stage: str  # 'counts', 'looks', 'histories' or 'writes'
    rows: int  # since the last call
    share: float | None  # fraction of the stage that is done; None if unknown


class Job(NamedTuple):
    """One run of a preparation."""

    paths: list[Path]
    directory: Path
    options: dict[str, Any]
    state: dict[str, Any]  # the content of progress.json
    read: Read  # (paths, earlier readings of each) -> pieces
    progress: Callable[[Progress], object] | None


class Encoded(NamedTuple):
    """The well-formed rows of a piece, encoded as blocks hold them."""

    piece: Any
    row: np.ndarray  # i64[n] number among all rows of all files
    side: np.ndarray  # int[n] index into SPLITS
    columns: dict[str, np.ndarray]
    bad_rows: Sequence[int] = ()  # as for `tables`, if it was encoded in the thread
    why: str = ""


def prepare_files(
    paths: list[Path],
    directory: Path,
    options: dict[str, Any],
    read: Read,
    write: Callable[[Job], list[int]],
    progress: Callable[[Progress], object] | None = None,
    gather: Callable[[list[Path], Path], Sequence[Path]] | None = None,
    notes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Prepare files; return at once if they are already prepared, resume if a previous run was killed.

    Args:
      paths: the raw files.
      directory: directory of the dataset.
      options: options that determine the rows; all runs in a directory must agree on them.
      read: (paths, earlier readings of each) -> pieces of the files.
      write: writes the missing shards and returns the number of rows of each table.
      progress: called after each piece that is read.
      gather: (paths, directory) -> files derived from them, which are prepared instead.
      notes: further entries of the progress notes.

    Returns:
      The metadata.

    Raises:
      ValueError: the same rows are given twice; a file changed after rows were made from it; the directory holds
        another preparation or a damaged one, or another run is preparing there; a split has no rows.
    """
    tfds_module()  # fails now, not after the work, if a package is missing
    make_directory(directory)
    with Lock(directory / "lock", f"preparing {directory}"):
        if gather is not None:
            heads = [fingerprint(path) for path in paths]
            options = options | {"gathered": sorted([h["name"], h["size_bytes"], h["head_crc32"]] for h in heads)}
            paths = list(gather(paths, directory))
        check_distinct_files(paths)
        wanted = {"options": options, "sources": [fingerprint(path) for path in paths], **(notes or {})}
        if (directory / DONE).exists():
            return _finished(directory, paths, wanted, read)
        job = Job(paths, directory, options, begin_notes(directory, paths, wanted, read), read, progress)
        table_rows = write(job)
        check_untouched(paths, job.state["sources"])
        register(directory, job.state, table_rows)
    return read_metadata(directory)


def count_rows(job: Job) -> int:
    """Count the rows of all files, malformed ones included; free if an earlier reading was complete."""
    if not job.state["texts"]:
        for piece in _pieces(job):
            _tell(job, "counts", piece)
    return sum(rows for _, _, rows in job.state["texts"])


def tables(job: Job, stage: str, read: Callable[[Any], Any], from_row: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield (piece, result of `read`) for the pieces that reach beyond a row, one piece ahead in a thread.

    `read` gives the well-formed rows, with `bad_rows`, the numbers of the malformed ones, and `why`: file, line and
    fault of the first of them.
    """
    left: int | None = None
    pieces = (piece for piece in _pieces(job) if piece.first_row + piece.rows > from_row)
    with ThreadPoolExecutor(1) as pool:
        ahead = lambda: [(piece, pool.submit(read, piece)) for piece in itertools.islice(pieces, 1)]
        waiting = ahead()
        while waiting:
            piece, reading = waiting.pop()
            waiting = ahead()
            table = reading.result()
            if left is None:  # an earlier run counted the bad rows of the skipped pieces
                skipped = sum(row < piece.first_row for row in job.state["bad_rows"])
                left = job.options["max_bad_rows"] - skipped
            if len(table.bad_rows) > left:
                raise ValueError(
                    f"{table.why}. Correct it, or leave out up to N bad rows with max_bad_rows=N (--max-bad-rows N); "
                    f"here are {len(table.bad_rows)} together, {left} more are allowed."
                )
            left -= len(table.bad_rows)
            job.state["bad_rows"] = sorted({*job.state["bad_rows"], *table.bad_rows})
            yield piece, table
            _tell(job, stage, piece)


def write_shards(job: Job, encoded: Callable[[int], Iterator[Encoded]], first_row: dict[str, int]) -> None:
    """Write the missing shards; each one is recorded before the next shard of its split begins.

    Args:
      encoded: row -> the encoded pieces that reach beyond it.
      first_row: {split: number of the first row that may belong to it}.
    """
    shard_rows = job.options["block_rows"] * job.options["blocks_per_shard"]
    # The row after the last shard of each split.
    done = first_row | {shard["split"]: shard["next_row"] for shard in job.state["shards"]}
    waiting: dict[str, list[dict]] = {name: [] for name in first_row}

    def flush(name, piece, at_end=False):
        while (rows := sum(len(part["label"]) for part in waiting[name])) >= shard_rows or (at_end and rows):
            whole = {key: np.concatenate([part[key] for part in waiting[name]]) for key in waiting[name][0]}
            _write_shard(job, name, {key: array[:shard_rows] for key, array in whole.items()}, piece)
            waiting[name] = [{key: array[shard_rows:] for key, array in whole.items()}]

    piece = None
    for piece, row, side, columns, _, _ in encoded(min(done.values())):
        for name in waiting:
            chosen = (side == SPLITS.index(name)) & (row >= done[name])
            if chosen.any():
                waiting[name].append({key: array[chosen] for key, array in (columns | {"row": row}).items()})
                flush(name, piece)
    for name in waiting:
        flush(name, piece, at_end=True)


def check_splits(job: Job, wanted: set[str], change: str) -> None:
    """Raise ValueError if a wanted split has no rows; `change` names the options that would give it some."""
    have = {shard["split"] for shard in job.state["shards"]}
    if not have:
        raise ValueError(f"{', '.join(map(str, job.paths))}: every row is malformed; check the format.")
    for name in SPLITS:
        if name in wanted - have:
            raise no_rows(job, name, change)


def no_rows(job: Job, split: str, change: str) -> ValueError:
    """Make the error for a split without rows."""
    return ValueError(
        f"the {split} split would have no rows out of {count_rows(job)}: give more rows, or change {change} "
        "(in another directory, or delete this one)."
    )


def count_ids(ids: np.ndarray) -> np.ndarray:
    """Count the ids of each column of i32[n, H], missing ones left out, and the unknown ones among them: i64[2, H].

    Row 1 of a table with a vocabulary is of the categories that have no row of their own.

    >>> count_ids(np.array([[0, 1, 7], [1, 1, -1]])).tolist()
    [[1, 2, 1], [1, 2, 0]]
    """
    return np.stack([(ids > 0).sum(axis=0), (ids == 1).sum(axis=0)])


def drawn(row: np.ndarray, seed: int) -> np.ndarray:
    """Draw a number in [0, 1) for each row, f64[n], by hashing the seed and the row number i64[n] (splitmix64)."""
    h = row.astype(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + 1) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
    return (h >> np.uint64(11)).astype(np.float64) * 2.0**-53


def check_table_rows(rows: int, remedy: str) -> None:
    """Raise ValueError if the tables have too many rows in total to be numbered together."""
    if rows > MOST_ROWS:
        raise ValueError(f"the tables have {rows} rows, but together at most {MOST_ROWS} are numbered: {remedy}.")


def _pieces(job: Job) -> Iterator[Any]:
    """Yield all pieces of all files; once exhausted, every file has been verified against earlier readings."""
    texts = []
    for piece in job.read(job.paths, _known_texts(job.state, len(job.paths))):
        texts += [piece.seen] if piece.seen.ended else []
        yield piece
    check_untouched(job.paths, job.state["sources"])
    check_distinct_texts(job.paths, texts)
    if not job.state["texts"]:
        # Recorded before anything is written from this reading, so that nothing written is older than the record.
        job.state["texts"] = [[seen.bytes, seen.crc32, seen.lines] for seen in texts]
        write_json(job.directory / PROGRESS, job.state)


def _tell(job: Job, stage: str, piece: Any) -> None:
    if job.progress is not None:
        job.progress(Progress(stage, piece.rows, _share(job, piece)))


def _share(job: Job, piece: Any) -> float | None:
    """Return the fraction of all files read, this piece included; None in the first reading of .gz or Parquet files."""
    if rows := sum(rows for _, _, rows in job.state["texts"]):
        return (piece.first_row + piece.rows) / rows
    if any(is_gzip(path) or is_parquet(path) for path in job.paths):
        return None
    sizes = [source["size_bytes"] for source in job.state["sources"]]
    return (sum(sizes[: piece.source]) + piece.seen.bytes) / sum(sizes)


def _write_shard(job: Job, name: str, rows: dict[str, np.ndarray], last: Any) -> None:
    """Write rows and record the shard, with the piece up to which the files had been read."""
    index = sum(shard["split"] == name for shard in job.state["shards"])
    size = write_blocks(job.directory, name, index, rows, job.options["block_rows"], layout_of(job.state))
    if "ids" in job.state:
        counts = job.state["ids"].setdefault(name, {})
        for key, ids in rows.items():
            if key.startswith("ids"):
                counts[key] = (np.array(counts.get(key, 0)) + count_ids(ids)).tolist()
    label = rows["label"] if rows["label"].ndim == 1 else rows["label"][:, 0]
    shard = {"split": name, "rows": len(label), "clicks": float(label.sum(dtype=np.float64)), "bytes": size}
    shard |= {"next_row": int(rows["row"][-1]) + 1, "text": [last.source, last.seen.bytes, last.seen.crc32]}
    job.state["shards"].append(shard)
    write_json(job.directory / PROGRESS, job.state)


def begin_notes(directory: Path, paths: Sequence[Path], wanted: dict[str, Any], read: Read) -> dict[str, Any]:
    """Return the progress notes of a preparation: new ones, or those of the previous run."""
    path = directory / PROGRESS
    remedy = f"Delete {directory} and run the preparation again."
    state = read_json(path, ("options", "sources", "shards"), remedy) if path.exists() else None
    if state is not None:
        differ = _differences(state, wanted, paths, read)
        if not differ:
            check_shards(directory, shard_bytes(state), layout_of(state))
            if state["sources"] != wanted["sources"]:
                # The text is unchanged: keep the new timestamps.
                state["sources"] = wanted["sources"]
                write_json(path, state)
            return state
        if state["shards"]:
            raise _other(directory, differ)
    # No shard has been written: nothing is lost.
    (directory / VOCABULARY).unlink(missing_ok=True)
    state = {**wanted, "texts": [], "shards": [], "bad_rows": [], "ids": {}}
    write_json(path, state)
    return state


def _finished(directory: Path, paths: Sequence[Path], wanted: dict[str, Any], read: Read) -> dict[str, Any]:
    """Return the metadata of a complete preparation, if it is one of these files with these options."""
    metadata = read_metadata(directory)
    differ = _differences(metadata, wanted, paths, read)
    if differ:
        raise _other(directory, differ)
    check_files(directory, metadata)
    if metadata["sources"] != wanted["sources"]:
        # The next call then need not read the files again.
        metadata["sources"] = wanted["sources"]
        write_json(directory / METADATA, metadata)
    return metadata


def _known_texts(state: dict[str, Any], files: int) -> list[list[Seen]]:
    """Return the earlier readings of each file, shortest first: up to each shard, and to the end."""
    known: list[list[Seen]] = [[] for _ in range(files)]
    for shard in state.get("shards", []):
        source, end, crc = shard["text"]
        known[source].append(Seen(end, crc, 0, False))
    for marks, (end, crc, lines) in zip(known, state["texts"], strict=False):
        marks.append(Seen(end, crc, lines, True))
    return [sorted(marks) for marks in known]


def _differences(kept, wanted, paths, read) -> list[str]:
    """Name the options and files that differ from the notes, reading files whose timestamps have changed."""
    differ = [name for name, value in wanted["options"].items() if kept["options"].get(name) != value]
    # Earlier versions recorded no checksums of texts: their datasets can be opened, but not continued.
    if "texts" not in kept or len(kept["sources"]) != len(paths):
        return [*differ, f"sources ({', '.join(path.name for path in paths)})"]
    known = _known_texts(kept, len(paths))
    for path, before, now, seen in zip(paths, kept["sources"], wanted["sources"], known, strict=True):
        if not same_head(before, now) or not (same_stamps(before, now) or _is_as_seen(path, seen, read)):
            differ.append(f"sources (text or name of {path.name})")
    return differ


def _is_as_seen(path: Path, seen: list[Seen], read: Read) -> bool:
    if not seen:
        return True  # no row was made from it
    try:
        for _ in read([path], [seen]):
            pass
    except ValueError:
        return False
    return True


def _other(directory, differ) -> ValueError:
    return ValueError(
        f"{directory} holds a preparation with other {', '.join(differ)}: use the same, or another directory, "
        "or delete it."
    )
