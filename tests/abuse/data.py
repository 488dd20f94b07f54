"""Misuse of raw files, preparations, prepared directories, the Loader and the synthetic log."""

import gzip
import json
import os

import numpy as np

from abuse import refused, situation
from jaxrec.data.criteo import open_encoder, open_split, prepare
from jaxrec.data.loader import Loader
from jaxrec.data.synthetic import SyntheticClicks, scaled_cardinalities
from jaxrec.embedding import EmbeddingSpec, Lookup, Table

SMALL = {"block_rows": 16, "blocks_per_shard": 3, "hash_cap": 7}


def text(rows=120, seed=0):
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 99, (rows, 40))
    numbers[:, 0] %= 2
    return "".join("\t".join(map(str, row)) + "\n" for row in numbers.tolist())


def raw(directory, content=None, name="train.txt"):
    path = directory / name
    content = text() if content is None else content
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def prepared(directory, **options):
    """Prepare a small file in directory/out."""
    out = directory / "out"
    prepare([raw(directory)], out, **{**SMALL, **options})
    return out


def read_all(out):
    for name in ("train", "test"):
        split = open_split(out, name)
        for index in range(len(split)):
            split[index]


# Raw files.


refused(
    {
        r"train.txt: its lines end in a carriage return alone.*tr '\\r' '\\n'": lambda directory: prepare(
            [raw(directory, text().replace("\n", "\r"))], directory / "out", **SMALL, max_bad_rows=5
        ),
        "train.txt is no text, or UTF-16.*iconv": lambda directory: prepare(
            [raw(directory, text().encode("utf-16"))], directory / "out", **SMALL
        ),
        r"is one path, but sources is a list: write \[": lambda directory: prepare(
            str(raw(directory)), directory / "out", **SMALL
        ),
    }
)


@situation("a header line that is allowed as a bad row")
def _(directory):
    header = "\t".join(["label", *(f"x{i}" for i in range(39))]) + "\n"
    metadata = prepare([raw(directory, header + text())], directory / "out", **SMALL, max_bad_rows=1)
    assert metadata["skipped_rows"] == 1 and sum(metadata["rows"].values()) == 120


@situation("gzip is known by its bytes, whatever the name says")
def _(directory):
    for name, content in (("day_0", gzip.compress(text().encode())), ("day_0.gz", text())):
        metadata = prepare([raw(directory, content, name)], directory / f"of_{name}", **SMALL)
        assert metadata["rows"] == {"train": 100, "test": 20}


@situation("the archive that Kaggle's data comes in", ValueError, "dac.tar.gz is no text.*an archive")
def _(directory):
    import tarfile

    raw(directory)
    with tarfile.open(directory / "dac.tar.gz", "w:gz") as archive:
        archive.add(directory / "train.txt", "train.txt")
    prepare([directory / "dac.tar.gz"], directory / "out", **SMALL)


@situation("a pipe for a file", ValueError, "is no file: give raw files")
def _(directory):
    os.mkfifo(directory / "pipe")  # opening it would block for ever
    prepare([directory / "pipe"], directory / "out", **SMALL)


# Arguments and directories of a preparation.


@situation("hash_cap that no stack of tables can hold", ValueError, "hash_cap=82593005 must be .* to 82593004")
def _(directory):
    tables = {f"C{i}": Table(82_593_004, 1) for i in range(26)}
    for shards in (1, 64, 4096):
        EmbeddingSpec(tables, {"all": Lookup(tuple(tables))}, shards=shards)  # the largest allowed value fits
    try:
        prepare([raw(directory)], directory / "out", hash_cap=82_593_005)
    finally:
        assert not (directory / "out").exists()


@situation("a file for the directory", NotADirectoryError, "Not a directory: .*out")
def _(directory):
    prepare([raw(directory)], raw(directory, "x", "out"), **SMALL)


refused(
    {
        "progress.json is cut or damaged: it has no options": lambda directory: resumed(
            directory, lambda out: (out / "progress.json").write_text("{}")
        ),
        "vocabulary.npz is missing, cut or damaged .*delete this file and run": lambda directory: resumed(
            directory, lambda out: cut(out / "vocabulary.npz"), **VOCABULARY
        ),
        "array_record-00001 has 65536 bytes instead of": lambda directory: resumed(
            directory, lambda out: cut(out / "criteo-train.array_record-00001")
        ),
    }
)


@situation("a URL for the directory", ValueError, "gs://bucket/out is no path on this machine")
def _(directory):
    try:
        prepare([raw(directory)], "gs://bucket/out", **SMALL)
    finally:
        assert not os.path.exists("gs:")


@situation("one file more for a directory", ValueError, r"other sources \(train.txt, more.txt\)")
def _(directory):
    out = prepared(directory)
    prepare([directory / "train.txt", raw(directory, text(9, 1), "more.txt")], out, **SMALL)


@situation("a file of another name with the same rows", ValueError, r"other sources \(text or name of other.txt\)")
def _(directory):
    out = prepared(directory)
    prepare([(directory / "train.txt").rename(directory / "other.txt")], out, **SMALL)


def resumed(directory, damage, **options):
    """Kill a preparation before its last rename, damage its files with `damage`, and resume it."""
    out = prepared(directory, **options)
    (out / "dataset_info.json").unlink()
    damage(out)
    prepare([directory / "train.txt"], out, **{**SMALL, **options})


def cut(path, keep=0.5):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


VOCABULARY = {"hash_cap": None, "min_count": 1}


@situation("vocabulary.npz is one array", ValueError, "vocabulary.npz is missing, cut or damaged")
def _(directory):
    def damage(out):
        with open(out / "vocabulary.npz", "wb") as file:
            np.save(file, np.zeros(3))

    resumed(directory, damage, **VOCABULARY)


@situation("vocabulary.npz of another preparation", ValueError, "vocabulary.npz is the vocabulary of another prep")
def _(directory):
    out = prepared(directory, **VOCABULARY)
    prepare([directory / "train.txt"], directory / "other", **{**SMALL, "hash_cap": None, "min_count": 3})
    (directory / "other" / "vocabulary.npz").replace(out / "vocabulary.npz")
    open_encoder(out)


@situation("vocabulary.npz is gone: it is counted again")
def _(directory):
    resumed(directory, lambda out: (out / "vocabulary.npz").unlink(), **VOCABULARY)
    read_all(directory / "out")


# Prepared directories.


@situation("metadata.json is cut", ValueError, "metadata.json is cut or damaged .*delete .*out and run")
def _(directory):
    out = prepared(directory)
    cut(out / "metadata.json")
    open_split(out, "train")


@situation("metadata.json is gone", ValueError, "metadata.json is missing.*delete .*out and run")
def _(directory):
    out = prepared(directory)
    (out / "metadata.json").unlink()
    open_split(out, "train")


@situation("dataset_info.json is of something else", ValueError, "dataset_info.json .*out and run")
def _(directory):
    out = prepared(directory)
    (out / "dataset_info.json").write_text("{}")
    open_split(out, "train")


@situation("a shard tells of fewer blocks than there are", ValueError, "dataset_info.json tells of 6 blocks")
def _(directory):
    out = prepared(directory)
    info = json.loads((out / "dataset_info.json").read_text())
    info["splits"][0]["shardLengths"][0] = "2"
    (out / "dataset_info.json").write_text(json.dumps(info))
    open_split(out, "train")


@situation(
    "a shard is cut", ValueError, "criteo-train.array_record-00001 has .* bytes instead of .*delete .*out and run"
)
def _(directory):
    out = prepared(directory)
    cut(out / "criteo-train.array_record-00001", 0.999)
    open_split(out, "train")


@situation(
    "bytes of a shard are wrong", ValueError, "array_record-00001, block 0 cannot be read .*delete .*out and run"
)
def _(directory):
    split = open_split(prepared(directory), "train")
    path = directory / "out" / "criteo-train.array_record-00001"
    data = bytearray(path.read_bytes())
    data[100:110] = b"\xff" * 10
    path.write_bytes(data)
    for index in range(len(split)):
        split[index]


@situation(
    "two shards of one size were exchanged",
    ValueError,
    "array_record-00000, block 0 cannot be read .*rows instead of 16",
)
def _(directory):
    out = prepared(directory)
    first, last = (out / f"criteo-train.array_record-0000{i}" for i in (0, 2))
    first.rename(out / "other")
    last.rename(first)
    (out / "other").rename(last)
    metadata = json.loads((out / "metadata.json").read_text())
    metadata["shard_bytes"]["train"].reverse()
    (out / "metadata.json").write_text(json.dumps(metadata))
    split = open_split(out, "train")
    for index in (0, 1, 6):
        split[index]


@situation("a negative block", IndexError, "block -1 of split 'train'")
def _(directory):
    open_split(prepared(directory), "train")[-1]


# The Loader.


class Rows:
    """Five rows in two blocks."""

    rows = (3, 2)

    def __init__(self, **columns):
        self.columns = columns

    def __getitem__(self, index):
        n = self.rows[index]
        block = {"label": np.zeros(n), "dense": np.zeros((n, 2), np.float32), "ids": np.zeros((n, 3), np.int32)}
        return block | {name: make(n) for name, make in self.columns.items()}


refused(
    {
        r"block 0: 'label' has shape \(3, 1\): make one label \[n\]": lambda _: list(
            Loader(Rows(label=lambda n: np.zeros((n, 1))), 2)
        ),
        "block 0 has 'wieght', which a batch has no place for": lambda _: list(Loader(Rows(wieght=np.ones), 2)),
    }
)


# The synthetic log.


refused(
    {
        "exponent=nan must be finite and 0 or more": lambda _: SyntheticClicks((5,), exponent=float("nan")),
        "bias=nan must be finite": lambda _: SyntheticClicks((5,), bias=float("nan")),
        "each of cardinalities=2147483648 must be a": lambda _: SyntheticClicks((2**31,)),
        "rows=10 must be a whole number from 78": lambda _: scaled_cardinalities(10),
    }
)


@situation("synthetic: a huge exponent leaves one id")
def _(directory):
    assert not SyntheticClicks((50,), exponent=300.0).batch(0, 100).ids["sparse"].any()


@situation("synthetic: no dense features")
def _(directory):
    assert SyntheticClicks((50, 5), dense_features=0).batch(0, 4).dense.shape == (4, 0)
