"""From raw files to array_record shards of blocks, registered with tfds; killed at any point, it
resumes at the shard.

Every line has a number; whether it trains or tests depends on that number alone, and every shard
records the number that follows its last row. So a second run skips what is done and writes the same
bytes as an undisturbed one.

Legend: n rows of a block, N = 13 dense features, F = 26 fields.
"""

import itertools
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.data.criteo import encode
from jaxrec.data.criteo.dataset import DONE, read_metadata, register, tfds_module, write_blocks
from jaxrec.data.criteo.parsing import FIELDS, Columns, parse
from jaxrec.data.criteo.record import PROGRESS, VOCABULARY, begin_record, finished, known_texts
from jaxrec.data.criteo.source import (
    Chunk,
    check_distinct,
    check_distinct_texts,
    check_untouched,
    fingerprint,
    local_files,
    read_chunks,
)
from jaxrec.files import Lock, aside, local_path, make_directory, write_json

# The tables of the fields may share a stack, whose rows are numbered by int32 and rounded up to the
# number of shards.
_MOST_ROWS = 2**31 - 2**16
_COUNT_AGAIN = (
    "delete this file and run the preparation again, which counts the values once more and keeps what is written."
)


class Preparation(NamedTuple):
    """One run of a preparation."""

    paths: list[Path]
    directory: Path
    options: dict[str, Any]
    state: dict[str, Any]  # the content of progress.json
    progress: Callable[[int], object] | None


def prepare(
    sources: Sequence[str | Path],
    directory: str | Path,
    *,
    min_count: int | None = None,
    hash_cap: int | None = None,
    split: str = "time",
    train_fraction: float = 5 / 6,
    seed: int = 0,
    max_bad_rows: int = 0,
    block_rows: int = 4096,
    blocks_per_shard: int = 128,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Prepares Criteo files; returns at once if they are prepared already, goes on if a run was
    killed.

    Args:
      sources: raw files in time order, plain or .gz; each is read to its end once, twice or three
        times, and must not change meanwhile.
      directory: where the dataset goes.
      min_count: a category seen less often in the train part shares the out-of-vocabulary row; 6
        unless hashing. The vocabulary needs 12 bytes of memory for each distinct value: hash the
        1TB logs.
      hash_cap: hash each field into a table of so many rows instead, 2 to 82,593,004.
      split: 'time' (the first lines train) or 'random' (by a hash of seed and line number).
      train_fraction: share of the lines that trains.
      seed: of the random split.
      max_bad_rows: how many malformed lines to leave out before giving up.
      block_rows: rows of a block, the unit of reading.
      blocks_per_shard: blocks of a shard, the unit of resuming.
      progress: called with the number of lines read since the last call.

    Returns:
      The metadata: cardinalities (rows of each field's table), rows and label_mean of each split,
      skipped_rows, options, sources.

    Raises:
      ValueError: a malformed file (with file, line, rule); the same rows twice; files that changed
        since rows were made from them; arguments out of range; a directory that holds another
        preparation, or a damaged one; somebody else preparing there; a split without rows.
      OSError: the disk is full, or a file or directory may not be read or written. What is done is
        kept: the same call goes on from there.
      ImportError: what the extra `data` installs is missing.
    """
    options = dict(
        min_count=6 if min_count is None and hash_cap is None else min_count, hash_cap=hash_cap, split=split,
        train_fraction=train_fraction, seed=seed, max_bad_rows=max_bad_rows, block_rows=block_rows,
        blocks_per_shard=blocks_per_shard,
    )  # fmt: skip
    _check(options)
    paths, directory = local_files(sources), local_path(directory)
    tfds_module()  # says what is missing before the work, not after
    wanted: dict[str, Any] = {"options": options, "sources": [fingerprint(path) for path in paths]}
    check_distinct(paths, wanted["sources"])
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file: give a directory, which is made if it does not exist.")
    make_directory(directory)
    with Lock(directory / "lock", f"preparing {directory}"):
        if (directory / DONE).exists():
            return finished(directory, paths, wanted)
        _run(Preparation(paths, directory, options, begin_record(directory, paths, wanted), progress))
    return read_metadata(directory)


def _run(job: Preparation) -> None:
    in_train = _splitter(job)
    encoder, cardinalities = _encoder(job, in_train)
    _write_shards(job, in_train, encoder)
    _check_splits(job)
    check_untouched(job.paths, job.state["sources"])
    register(job.directory, job.state, cardinalities)


def _check(options):
    if options["min_count"] is not None and options["hash_cap"] is not None:
        raise ValueError("min_count (a vocabulary) and hash_cap (hashing) exclude each other: give one.")
    cap = _MOST_ROWS // FIELDS
    least = {"min_count": 1, "hash_cap": 2, "max_bad_rows": 0, "block_rows": 1, "blocks_per_shard": 1, "seed": -(2**63)}
    for name, bound in least.items():
        value = options[name]
        if value is None and name in ("min_count", "hash_cap"):
            continue
        options[name] = whole_number(_flag(name), value, bound)
    if options["hash_cap"] is not None and options["hash_cap"] > cap:
        raise ValueError(
            f"{_flag('hash_cap')}={options['hash_cap']} must be at most {cap}: the {FIELDS} tables share a stack, "
            "whose rows are numbered by int32."
        )
    if options["split"] not in ("time", "random"):
        raise ValueError(f"{_flag('split')}={options['split']!r} must be 'time' or 'random'.")
    if not isinstance(options["train_fraction"], float) or not 0 < options["train_fraction"] < 1:
        raise ValueError(f"{_flag('train_fraction')}={options['train_fraction']!r} must be between 0 and 1.")


def _flag(name: str) -> str:
    """An argument as it is called here and on the command line, for errors."""
    command_line = ("min_count", "hash_cap", "split", "train_fraction", "max_bad_rows")
    of = {"seed": " of prepare.py"} | dict.fromkeys(command_line, "")  # train.py has the others too
    return f"{name} (--{name.replace('_', '-')}{of[name]})" if name in of else name


def _read(job: Preparation) -> Iterator[Chunk]:
    """All chunks of all files. Whoever reads to the end knows that each is the text that other
    readings saw."""
    texts = []
    for chunk in read_chunks(job.paths, known_texts(job.state, len(job.paths))):
        texts += [chunk.seen] if chunk.seen.ended else []
        yield chunk
    check_untouched(job.paths, job.state["sources"])
    check_distinct_texts(job.paths, texts)
    if not job.state["texts"]:
        # Noted before anything is made of this reading, so that what is made is never older than
        # what is noted.
        job.state["texts"] = [[seen.bytes, seen.crc32, seen.lines] for seen in texts]
        write_json(job.directory / PROGRESS, job.state)


def _splitter(job: Preparation):
    """Makes rows i64[n] -> bool[n]: does a line train? Depends on its number alone."""
    fraction, seed = job.options["train_fraction"], job.options["seed"]
    if job.options["split"] == "random":

        def at_random(rows):
            h = rows.astype(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + 1) % 2**64)
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
                h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
            return (h >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction

        return at_random
    if not job.state["texts"]:
        for _ in _read(job):  # counts the lines
            pass
    first_test, lines = _first_test(job), _lines(job)
    if not 0 < first_test < lines:
        raise _no_rows("test" if first_test else "train", lines)
    return lambda rows: rows < first_test


def _lines(job: Preparation) -> int:
    return sum(lines for _, _, lines in job.state["texts"])


def _first_test(job: Preparation) -> int:
    return int(_lines(job) * job.options["train_fraction"])


def _no_rows(split: str, lines: int) -> ValueError:
    return ValueError(
        f"the {split} split would have no rows out of {lines} lines: give more lines, or change "
        f"{_flag('train_fraction')}, {_flag('split')} or {_flag('seed')} (in another directory, or delete this one)."
    )


def _check_splits(job: Preparation) -> None:
    missing = {"train", "test"} - {shard["split"] for shard in job.state["shards"]}
    if len(missing) == 2:
        raise ValueError(f"{', '.join(map(str, job.paths))}: every row is bad; check the format.")
    for split in missing:
        raise _no_rows(split, _lines(job))


def _columns(job: Preparation, from_row=0, known_bad=()) -> Iterator[tuple[Chunk, Columns]]:
    """Parses the chunks that reach beyond a row, one chunk ahead in a thread; counts bad rows over
    all of them."""
    allowed = left = job.options["max_bad_rows"]
    chunks = (chunk for chunk in _read(job) if chunk.first_row + chunk.lines > from_row)
    with ThreadPoolExecutor(1) as pool:
        waiting = [(chunk, pool.submit(parse, chunk, allowed)) for chunk in itertools.islice(chunks, 1)]
        # The bad rows of the chunks that are skipped were counted by an earlier run.
        left -= sum(row < chunk.first_row for chunk, _ in waiting for row in known_bad)
        while waiting:
            chunk, parsed = waiting.pop()
            waiting = [(chunk, pool.submit(parse, chunk, allowed)) for chunk in itertools.islice(chunks, 1)]
            columns = parsed.result()
            if len(columns.bad_rows) > left:
                parse(chunk, left)  # raises, and names the line
            left -= len(columns.bad_rows)
            yield chunk, columns
            if job.progress is not None:
                job.progress(chunk.lines)


def _encoder(job: Preparation, in_train):
    """(category, present) -> ids, and the rows of each field's table; counts the train part first,
    once."""
    if job.options["hash_cap"] is not None:
        cap = job.options["hash_cap"]
        return lambda category, present: encode.hash_ids(category, present, cap), [cap] * FIELDS
    path = job.directory / VOCABULARY
    if not path.exists():
        chunks = ((c.category[t], c.present[t]) for _, c in _columns(job) for t in [in_train(c.row)])
        kept = encode.vocabulary(encode.count_values(chunks, FIELDS), job.options["min_count"])
        with aside(path) as partial, open(partial, "wb") as file:
            np.savez(file, allow_pickle=False, **{f"C{i + 1}": values for i, values in enumerate(kept)})
    kept = load_vocabulary(path, _COUNT_AGAIN)
    cardinalities = [2 + len(values) for values in kept]
    if sum(cardinalities) > _MOST_ROWS:
        raise ValueError(
            f"the vocabulary needs {sum(cardinalities)} rows, but the tables share a stack, whose rows are numbered by "
            f"int32: give a larger {_flag('min_count')}, or {_flag('hash_cap')}."
        )
    return encode.vocabulary_encoder(kept), cardinalities


def load_vocabulary(path: Path, remedy: str) -> list[np.ndarray]:
    """The kept values of each field, u32[v]; zip notes a checksum of each.

    Raises:
      ValueError: the file is cut or damaged; ends with the remedy.
    """
    try:
        # Opened here: of a damaged file, numpy leaves its own handle open.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
            kept = [saved[f"C{i + 1}"] for i in range(FIELDS)]
        if any(values.dtype != np.uint32 or values.ndim != 1 for values in kept):
            raise ValueError("its values are not of the kind that was written")
    except (ValueError, TypeError, AttributeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is cut or damaged ({error}): {remedy}") from error
    return kept


def _write_shards(job: Preparation, in_train, encoder) -> None:
    """Writes the shards that are not there yet; each is recorded before the next of its split
    begins."""
    shard_rows = job.options["block_rows"] * job.options["blocks_per_shard"]
    # The line that follows the last shard. By time, the test part waits for none before its first.
    done = {"train": 0, "test": _first_test(job) if job.options["split"] == "time" else 0}
    for shard in job.state["shards"]:
        done[shard["split"]] = shard["next_row"]
    waiting: dict[str, list[dict]] = {"train": [], "test": []}

    def flush(name, at_end=False):
        while (rows := sum(len(part["label"]) for part in waiting[name])) >= shard_rows or (at_end and rows):
            whole = {key: np.concatenate([part[key] for part in waiting[name]]) for key in waiting[name][0]}
            _write_shard(job, name, {k: v[:shard_rows] for k, v in whole.items()}, chunk)
            waiting[name] = [{key: array[shard_rows:] for key, array in whole.items()}]

    for chunk, columns in _columns(job, min(done.values()), job.state["bad_rows"]):  # noqa: B007, flush notes it
        job.state["bad_rows"] = sorted({*job.state["bad_rows"], *columns.bad_rows})
        trains = in_train(columns.row)
        for name, chosen in (("train", trains), ("test", ~trains)):
            chosen = chosen & (columns.row >= done[name])
            if chosen.any():
                ids = encoder(columns.category[chosen], columns.present[chosen])
                part = {"label": columns.label[chosen], "dense": columns.dense[chosen], "ids": ids}
                waiting[name].append({**part, "row": columns.row[chosen]})
                flush(name)
    for name in waiting:
        flush(name, at_end=True)


def _write_shard(job: Preparation, name: str, rows, last: Chunk) -> None:
    """Writes rows and notes them, with the chunk up to which the files were read for them."""
    index = sum(shard["split"] == name for shard in job.state["shards"])
    size = write_blocks(job.directory, name, index, rows, job.options["block_rows"])
    shard = {"split": name, "rows": len(rows["label"]), "clicks": int(rows["label"].sum()), "bytes": size}
    shard |= {"next_row": int(rows["row"][-1]) + 1, "text": [last.source, last.seen.bytes, last.seen.crc32]}
    job.state["shards"].append(shard)
    write_json(job.directory / PROGRESS, job.state)
