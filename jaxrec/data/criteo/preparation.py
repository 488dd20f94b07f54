"""From raw files to array_record shards of blocks, registered with tfds; killed at any point, it resumes at the shard.

Every line has a number; whether it trains or tests depends on that number alone, and every shard records the number
that follows its last row. So a second run skips what is done and writes the same bytes as an undisturbed one.

Legend: n rows of a block, N = 13 dense features, F = 26 fields.
"""

import contextlib
import fcntl
import itertools
import json
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.data.criteo import encode
from jaxrec.data.criteo.dataset import DONE, aside, register, tfds_module, write_blocks, write_json
from jaxrec.data.criteo.parse import FIELDS, parse, read_chunks

_PROGRESS, _VOCABULARY = "progress.json", "vocabulary.npz"


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
    """Prepares Criteo files; returns at once if they are prepared already, goes on if a run was killed.

    Args:
      sources: raw files in time order, plain or .gz.
      directory: where the dataset goes.
      min_count: a category seen less often in the train part shares the out-of-vocabulary row; 6 unless hashing. The
        vocabulary needs 12 bytes of memory for each distinct value: hash the 1TB logs.
      hash_cap: hash each field into a table of so many rows instead.
      split: 'time' (the first lines train) or 'random' (by a hash of seed and line number).
      train_fraction: share of the lines that trains.
      seed: of the random split.
      max_bad_rows: how many malformed lines to leave out before giving up.
      block_rows: rows of a block, the unit of reading.
      blocks_per_shard: blocks of a shard, the unit of resuming.
      progress: called with the number of lines read since the last call.

    Returns:
      The metadata: cardinalities (rows of each field's table), rows and label_mean of each split, skipped_rows,
      options, sources.

    Errors:
      ValueError: a malformed file (with file, line, rule); arguments out of range; a directory that holds another
        preparation; another process preparing there; no good row at all.
      ImportError: what the extra `data` installs is missing.
    """
    options = dict(
        min_count=6 if min_count is None and hash_cap is None else min_count, hash_cap=hash_cap, split=split,
        train_fraction=train_fraction, seed=seed, max_bad_rows=max_bad_rows, block_rows=block_rows,
        blocks_per_shard=blocks_per_shard,
    )  # fmt: skip
    _check(options)
    if not sources:
        raise ValueError("sources is empty: give at least one raw Criteo file.")
    tfds_module()  # says what is missing before the work, not after
    paths, directory = [Path(source) for source in sources], Path(directory)
    wanted = {"options": options, "sources": [_fingerprint(path) for path in paths]}
    directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory):
        state = _begin(directory, wanted)
        if not (directory / DONE).exists():
            in_train = _splitter(paths, options, state)
            encoder, cardinalities = _encoder(paths, options, directory, in_train, progress)
            _write_shards(paths, options, directory, state, in_train, encoder, progress)
            if not state["shards"]:
                raise ValueError(f"{', '.join(map(str, paths))}: every row is bad; check the format.")
            register(directory, state, cardinalities)
    return json.loads((directory / "metadata.json").read_text())


def _check(options):
    if options["min_count"] is not None and options["hash_cap"] is not None:
        raise ValueError("min_count (a vocabulary) and hash_cap (hashing) exclude each other: give one.")
    rules = {
        "min_count": (lambda v: v is None or v >= 1, "at least 1"),
        "hash_cap": (lambda v: v is None or 2 <= v < 2**31, "from 2 to 2**31 - 1"),
        "split": (lambda v: v in ("time", "random"), "'time' or 'random'"),
        "train_fraction": (lambda v: 0 < v < 1, "between 0 and 1"),
        "max_bad_rows": (lambda v: v >= 0, "at least 0"),
        "block_rows": (lambda v: v >= 1, "at least 1"),
        "blocks_per_shard": (lambda v: v >= 1, "at least 1"),
    }
    for name, (holds, rule) in rules.items():
        if not holds(options[name]):
            raise ValueError(f"{name}={options[name]!r} must be {rule}.")


def _fingerprint(path: Path) -> list:
    if not path.is_file():
        raise ValueError(f"{path} is no file: give raw Criteo files, or a prepared directory where one is wanted.")
    with open(path, "rb") as file:
        return [path.name, path.stat().st_size, zlib.crc32(file.read(1 << 20))]


@contextlib.contextmanager
def _lock(directory):
    with open(directory / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is preparing {directory}: wait for it, or give another one.") from None
        yield  # the kernel unlocks, also after a kill -9


def _begin(directory, wanted):
    """The progress of a preparation: new, or of the run before."""
    path = directory / _PROGRESS
    state = json.loads(path.read_text()) if path.exists() else None
    differ = [] if state is None else [k for k, v in wanted["options"].items() if state["options"].get(k) != v]
    differ += ["sources"] if state is not None and state["sources"] != wanted["sources"] else []
    if state is not None and not differ:
        return state
    if state is not None and state["shards"]:
        raise ValueError(
            f"{directory} holds a preparation with other {', '.join(differ)}: use the same, or another directory, or "
            "delete it."
        )
    (directory / _VOCABULARY).unlink(missing_ok=True)  # of a run that wrote no shard: nothing to lose
    state = {**wanted, "lines": None, "shards": [], "bad_rows": []}
    write_json(path, state)
    return state


def _splitter(paths, options, state):
    """Makes rows i64[n] -> bool[n]: does a line train? Depends on its number alone."""
    fraction, seed = options["train_fraction"], options["seed"]
    if options["split"] == "random":

        def at_random(rows):
            h = rows.astype(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + 1) % 2**64)
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
                h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
            return (h >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction

        return at_random
    if state["lines"] is None:
        state["lines"] = sum(chunk.lines for chunk in read_chunks(paths))
    return lambda rows: rows < _first_test(state)


def _first_test(state) -> int:
    return int(state["lines"] * state["options"]["train_fraction"])


def _columns(paths, options, progress, from_row=0, known_bad=()):
    """Parses the chunks that reach beyond a row, one chunk ahead in a thread; counts bad rows over all of them."""
    allowed = left = options["max_bad_rows"]
    chunks = (chunk for chunk in read_chunks(paths) if chunk.first_row + chunk.lines > from_row)
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
            yield columns
            if progress is not None:
                progress(chunk.lines)


def _encoder(paths, options, directory, in_train, progress):
    """(category, present) -> ids, and the rows of each field's table; counts the train part first, once."""
    if options["hash_cap"] is not None:
        cap = options["hash_cap"]
        return lambda category, present: encode.hash_ids(category, present, cap), [cap] * FIELDS
    path = directory / _VOCABULARY
    if not path.exists():
        chunks = ((c.category[t], c.present[t]) for c in _columns(paths, options, progress) for t in [in_train(c.row)])
        kept = encode.vocabulary(encode.count_values(chunks, FIELDS), options["min_count"])
        with aside(path) as partial, open(partial, "wb") as file:
            np.savez(file, allow_pickle=False, **{f"C{i + 1}": values for i, values in enumerate(kept)})
    with np.load(path) as saved:
        kept = [saved[f"C{i + 1}"] for i in range(FIELDS)]
    return encode.vocabulary_encoder(kept), [2 + len(values) for values in kept]


def _write_shards(paths, options, directory, state, in_train, encoder, progress):
    """Writes the shards that are not there yet; each is recorded before the next of its split begins."""
    shard_rows = options["block_rows"] * options["blocks_per_shard"]
    # The line that follows the last shard. By time, the test part waits for none before its first.
    done = {"train": 0, "test": _first_test(state) if options["split"] == "time" else 0}
    for shard in state["shards"]:
        done[shard["split"]] = shard["next_row"]
    waiting: dict[str, list[dict]] = {"train": [], "test": []}

    def flush(name, at_end=False):
        while (rows := sum(len(part["label"]) for part in waiting[name])) >= shard_rows or (at_end and rows):
            whole = {key: np.concatenate([part[key] for part in waiting[name]]) for key in waiting[name][0]}
            _write_shard(directory, state, name, {k: v[:shard_rows] for k, v in whole.items()}, options["block_rows"])
            waiting[name] = [{key: array[shard_rows:] for key, array in whole.items()}]

    for columns in _columns(paths, options, progress, min(done.values()), state["bad_rows"]):
        state["bad_rows"] = sorted({*state["bad_rows"], *columns.bad_rows})
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


def _write_shard(directory, state, name, rows, block_rows):
    index = sum(shard["split"] == name for shard in state["shards"])
    write_blocks(directory, name, index, rows, block_rows)
    clicks = int(rows["label"].sum())
    shard = {"split": name, "rows": len(rows["label"]), "clicks": clicks, "next_row": int(rows["row"][-1]) + 1}
    state["shards"].append(shard)
    write_json(directory / _PROGRESS, state)
