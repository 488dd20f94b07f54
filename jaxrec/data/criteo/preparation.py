"""Criteo's raw files to shards of blocks: options, the split of the lines, and the ids of their categories.

The split of a line depends on its number alone.

Legend: n rows of a chunk, F = 26 fields.
"""

import hashlib
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrec.bounds import real_number, whole_number
from jaxrec.data.criteo import encode
from jaxrec.data.criteo.parsing import FIELDS, parse
from jaxrec.data.preparation import (
    COUNT_AGAIN,
    MOST_ROWS,
    VOCABULARY,
    Encoded,
    Job,
    Progress,
    check_splits,
    check_table_rows,
    count_rows,
    drawn,
    no_rows,
    prepare_files,
    tables,
    write_shards,
)
from jaxrec.data.sources import local_files, read_chunks
from jaxrec.files import atomic_write, local_path

_TRAINS, _TESTS = 0, 2  # indices into SPLITS
_CHANGE = "train_fraction, split or seed"


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
    progress: Callable[[Progress], object] | None = None,
) -> dict[str, Any]:
    """Prepare Criteo files; return at once if they are already prepared, resume if a previous run was killed.

    Args:
      sources: raw files in time order, plain or compressed by gzip; each is read to its end one to three times, and
        must not change meanwhile.
      directory: directory of the dataset.
      min_count: categories that occur less often in the training lines share the out-of-vocabulary row; 6 by default,
        unless hashing. A vocabulary needs 12 bytes of memory per distinct value: hash the 1TB logs.
      hash_cap: instead of a vocabulary, hash each field into a table of this many rows, 2 to 82,593,004.
      split: 'time' (the first lines train) or 'random' (by a hash of seed and line number).
      train_fraction: fraction of the lines in the train split.
      seed: seed of the random split.
      max_bad_rows: number of malformed lines to leave out before giving up.
      block_rows: rows per block, the unit of reading.
      blocks_per_shard: blocks per shard, the unit of resuming.
      progress: called after each piece that is read.

    Returns:
      The metadata: cardinalities (rows of each field's table), rows and label_mean of each split, skipped_rows,
      options, sources; with a vocabulary, unknown_share, {field: {split: share of its ids without rows of their own}}.

    Raises:
      ValueError: a malformed file (with file, line, rule), or an error of `prepare_files`.
      OSError: the disk is full, or a file or directory is not readable or writable. Finished shards are kept: the same
        call resumes from there.
      ImportError: the extra `data` is not installed.
    """
    if min_count is not None and hash_cap is not None:
        raise ValueError("min_count (a vocabulary) and hash_cap (hashing) exclude each other: give one.")
    if split not in ("time", "random"):
        raise ValueError(f"split={split!r} must be 'time' or 'random'.")
    options = {
        "min_count": None if hash_cap is not None else whole_number("min_count", 6 if min_count is None else min_count),
        "hash_cap": None if hash_cap is None else whole_number("hash_cap", hash_cap, 2, MOST_ROWS // FIELDS),
        "split": split,
        "train_fraction": real_number("train_fraction", train_fraction, "between 0 and 1", lambda x: 0 < x < 1),
        "seed": whole_number("seed", seed, -(2**63)),
        "max_bad_rows": whole_number("max_bad_rows", max_bad_rows, 0),
        "block_rows": whole_number("block_rows", block_rows),
        "blocks_per_shard": whole_number("blocks_per_shard", blocks_per_shard),
    }
    return prepare_files(local_files(sources), local_path(directory), options, read_chunks, _write, progress)


def _write(job: Job) -> list[int]:
    """Write the missing shards; return the number of rows of each table."""
    side, first_test = _splitter(job)
    encoder = _encoder(job, side)

    def encoded(from_row):
        for chunk, good in tables(job, "writes", parse, from_row):
            ids = encoder.encode(good.category, good.present)
            yield Encoded(chunk, good.row, side(good.row), {"label": good.label, "dense": good.dense, "ids": ids})

    write_shards(job, encoded, {"train": 0, "test": first_test})
    check_splits(job, {"train", "test"}, _CHANGE)
    if job.options["hash_cap"] is None and "ids" in job.state:
        counts = {split: of["ids"] for split, of in job.state["ids"].items()}
        job.state["unknown_share"] = {
            f"C{field + 1}": {split: rare[field] / max(given[field], 1) for split, (given, rare) in counts.items()}
            for field in range(FIELDS)
        }
    return list(encoder.cardinalities)


def _splitter(job: Job) -> tuple[Callable[[np.ndarray], np.ndarray], int]:
    """Return the map from rows i64[n] to indices into SPLITS, int[n], and the first row that may test."""
    fraction, seed = job.options["train_fraction"], job.options["seed"]
    if job.options["split"] == "random":
        return lambda rows: np.where(drawn(rows, seed) < fraction, _TRAINS, _TESTS), 0
    lines = count_rows(job)
    first_test = int(lines * fraction)
    if not 0 < first_test < lines:
        raise no_rows(job, "test" if first_test else "train", _CHANGE)
    return lambda rows: np.where(rows < first_test, _TRAINS, _TESTS), first_test


class Encoder(NamedTuple):
    """The mapping of a preparation from categories to ids.

    Attributes:
      encode: (category u32[n, F], present bool[n, F]) -> ids i32[n, F].
      cardinalities: number of rows of each field's table.
      digest: equal for two preparations if and only if they map all categories alike.
    """

    encode: Callable[[np.ndarray, np.ndarray], np.ndarray]
    cardinalities: tuple[int, ...]
    digest: str


def _encoder(job: Job, side) -> Encoder:
    """Return the encoder of a preparation, counting the training lines first, once, if it needs a vocabulary."""
    path, cap = job.directory / VOCABULARY, job.options["hash_cap"]
    if cap is None and not path.exists():
        good = (rows for _, rows in tables(job, "looks", parse))
        chunks = ((rows.category[t], rows.present[t]) for rows in good for t in [side(rows.row) == _TRAINS])
        kept = encode.vocabulary(encode.count_values(chunks, FIELDS), job.options["min_count"])
        with atomic_write(path) as partial, open(partial, "wb") as file:
            np.savez(file, allow_pickle=False, **{f"C{i + 1}": values for i, values in enumerate(kept)})
    encoder = load_encoder(path, cap, COUNT_AGAIN)
    check_table_rows(sum(encoder.cardinalities), "give a larger min_count, or hash_cap")
    return encoder


def load_encoder(path: Path, cap: int | None, remedy: str) -> Encoder:
    """Return the encoder that hashes into `cap` rows per field, or that of the vocabulary in a file."""
    if cap is not None:
        digest = hashlib.sha256(f"hash {cap}".encode()).hexdigest()[:16]
        return Encoder(lambda category, present: encode.hash_ids(category, present, cap), (cap,) * FIELDS, digest)
    try:
        # Opened here, since numpy leaks its own handle if the file is damaged; zip verifies the checksum of each part.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
            kept = [saved[f"C{i + 1}"] for i in range(FIELDS)]
    except (
        FileNotFoundError, ValueError, TypeError, AttributeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error,
    ) as error:  # fmt: skip
        raise ValueError(f"{path} is missing, cut or damaged ({error}): {remedy}") from error
    summed = hashlib.sha256()
    for values in kept:
        summed.update(len(values).to_bytes(8, "little") + values.tobytes())
    cardinalities = tuple(2 + len(values) for values in kept)
    return Encoder(encode.vocabulary_encoder(kept), cardinalities, summed.hexdigest()[:16])
