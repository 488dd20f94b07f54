"""Preparation of Criteo files: values are kept, bad input is reported, a kill leaves no partial files."""

import gzip
import hashlib
import multiprocessing
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kills import kill_at_call

from jaxrec.data import sources
from jaxrec.data.criteo import encode, open_split, preparation, prepare
from jaxrec.data.criteo.parsing import DENSE, FIELDS, parse
from jaxrec.data.sources import Chunk, read_chunks

SMALL = {"block_rows": 16, "blocks_per_shard": 3}


def lines(rows, seed=0, missing=0.1):
    """Random well-formed lines."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(rows):
        dense = ["" if rng.random() < missing else str(int(x)) for x in rng.integers(-3, 500, DENSE)]
        hexes = ["" if rng.random() < missing else f"{int(x) * 7919:08x}" for x in rng.integers(0, 9, FIELDS)]
        result.append("\t".join([str(int(rng.random() < 0.3)), *dense, *hexes]))
    return result


def write(path, rows, end="\n", last_end=True):
    text = end.join(rows) + (end if last_end else "")
    # write_bytes closes the file, so that all of the text is on disk.
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read_all(directory, name):
    split = open_split(directory, name)
    blocks = [split[i] for i in range(len(split))]
    assert [len(b["label"]) for b in blocks] == split.rows
    return {key: np.concatenate([b[key] for b in blocks]) for key in blocks[0]}


def digests(directory):
    """A digest of each data file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.glob("criteo-*"))}


@pytest.mark.parametrize("name", ["train.txt", "day_0.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last_end", [True, False])
def test_what_goes_in_comes_out(tmp_path, name, end, last_end):
    rows = lines(120)
    path = write(tmp_path / name, rows, end, last_end)
    metadata = prepare([path], tmp_path / "out", min_count=3, **SMALL)
    train, test = read_all(tmp_path / "out", "train"), read_all(tmp_path / "out", "test")
    assert metadata["rows"] == {"train": 100, "test": 20}
    fields = [row.split("\t") for row in rows]
    labels = np.array([int(f[0]) for f in fields])
    np.testing.assert_array_equal(np.concatenate([train["label"], test["label"]]), labels)
    assert metadata["label_mean"] == {"train": labels[:100].mean(), "test": labels[100:].mean()}
    dense = [[np.log1p(max(int(x), 0)) if x else 0 for x in f[1 : DENSE + 1]] for f in fields]
    np.testing.assert_allclose(np.concatenate([train["dense"], test["dense"]]), dense, rtol=1e-6)
    ids = np.concatenate([train["ids"], test["ids"]])
    for field in range(FIELDS):
        column = [f[1 + DENSE + field] for f in fields]
        counts = {v: column[:100].count(v) for v in set(column[:100]) - {""}}
        kept = sorted((v for v in counts if counts[v] >= 3), key=lambda v: (-counts[v], int(v, 16)))
        table = {"": 0, **{v: 2 + i for i, v in enumerate(kept)}}
        assert ids[:, field].tolist() == [table.get(v, 1) for v in column]
        assert metadata["cardinalities"][field] == 2 + len(kept)


def test_several_files_are_one_log(tmp_path):
    rows = lines(130)
    whole = write(tmp_path / "whole.txt", rows)
    parts = [write(tmp_path / "day_0", rows[:70]), write(tmp_path / "day_1.gz", rows[70:])]
    prepare([whole], tmp_path / "a", **SMALL)
    prepare(parts, tmp_path / "b", **SMALL)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_hashing_stays_in_its_cap_and_a_random_split_is_seeded(tmp_path):
    path = write(tmp_path / "train.txt", lines(300))
    a = prepare([path], tmp_path / "a", hash_cap=5, split="random", seed=1, **SMALL)
    b = prepare([path], tmp_path / "b", hash_cap=5, split="random", seed=2, **SMALL)
    ids = read_all(tmp_path / "a", "train")["ids"]
    assert a["cardinalities"] == [5] * FIELDS and set(np.unique(ids)) == {0, 1, 2, 3, 4}
    assert 200 < a["rows"]["train"] < 290 and sum(a["rows"].values()) == 300
    assert digests(tmp_path / "a") != digests(tmp_path / "b") and a["options"]["seed"] != b["options"]["seed"]


def test_hashing_spreads_values_and_depends_on_the_field():
    category = np.repeat(np.arange(10_000, dtype=np.uint32)[:, None], 2, axis=1)
    ids = encode.hash_ids(category, np.ones(category.shape, bool), 101)
    counts = np.bincount(ids[:, 0], minlength=101)
    assert counts[0] == 0 and counts[1:].min() > 50 and counts[1:].max() < 170
    assert (ids[:, 0] == ids[:, 1]).mean() < 0.05


def test_counting_in_pieces_equals_counting_at_once(monkeypatch):
    monkeypatch.setattr(encode, "PENDING_ROWS", 40)
    rng = np.random.default_rng(0)
    category, present = rng.integers(0, 30, (200, 3)).astype(np.uint32), rng.random((200, 3)) < 0.8
    pieces = [(category[i : i + 17], present[i : i + 17]) for i in range(0, 200, 17)]
    for field, (values, counts) in enumerate(encode.count_values(pieces, 3)):
        expected = np.unique(category[present[:, field], field], return_counts=True)
        np.testing.assert_array_equal(values, expected[0])
        np.testing.assert_array_equal(counts, expected[1])


GOOD = lines(1, missing=0)[0].split("\t")
BAD = {
    "too few fields": (lambda f, i: f[:i] + f[i + 1 :], "39 fields, but a row has 40"),
    "too many fields": (lambda f, i: [*f[:i], "7", *f[i:]], "41 fields, but a row has 40"),
    "label 2": (lambda f, i: ["2", *f[1:]], "label '2', but a label is 0 or 1"),
    "label empty": (lambda f, i: ["", *f[1:]], "label '', but"),
    "fraction": (lambda f, i: [*f[:3], "1.5", *f[4:]], "I3 is '1.5', but a dense feature is an integer"),
    "huge": (lambda f, i: [*f[:3], "9" * 30, *f[4:]], "I3 is '9999"),
    "not hexadecimal": (lambda f, i: [*f[:14], "xyz", *f[15:]], "C1 is 'xyz', but a category has up to 8 hexa"),
    "long hexadecimal": (lambda f, i: [*f[:39], "123456789"], "C26 is '123456789'"),
    "quoted": (lambda f, i: [*f[:20], '"0a"', *f[21:]], "C7 is '\"0a\"'"),
    "beyond ascii": (lambda f, i: [*f[:20], "é", *f[21:]], "C7 is "),
    "carriage return": (lambda f, i: [*f[:2], "5\r", *f[3:]], r"I2 is '5\\r'"),
}


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(sorted(BAD)), rows=st.integers(1, 30), at=st.integers(0, 29), field=st.integers(1, 38),
    more=st.integers(0, 3), compressed=st.booleans(),
)  # fmt: skip
def test_malformed_rows_are_named_or_counted(tmp_path, kind, rows, at, field, more, compressed):
    break_line, message = BAD[kind]
    at, good = at % rows, lines(rows)
    broken = [*good]
    broken[at] = "\t".join(break_line(GOOD, field))
    for extra in range(more):  # more bad rows after the first
        broken.append("\t".join(break_line(GOOD, field + extra % 2)))
    path = write(tmp_path / ("bad.gz" if compressed else "bad.txt"), broken)
    (chunk,) = read_chunks([path])
    columns = parse(chunk)
    assert columns.why.startswith(f"{path}, line {at + 1}: ") and re.search(message, columns.why)
    assert columns.bad_rows == [at, *range(rows, rows + more)]
    kept = [row for i, row in enumerate(broken) if i not in columns.bad_rows]
    (clean,) = [*read_chunks([write(tmp_path / "clean.txt", kept)])] if kept else [None]
    if clean is not None:
        for a, b in zip(parse(clean)[1:5], columns[1:5], strict=True):
            np.testing.assert_array_equal(a, b)


def test_bad_rows_are_counted_over_the_whole_file(tmp_path):
    rows = lines(90)
    rows[10], rows[80] = "nonsense", "2" + rows[80][1:]
    path = write(tmp_path / "train.txt", rows)
    with pytest.raises(ValueError, match="line 11: 1 fields"):
        prepare([path], tmp_path / "out", max_bad_rows=1, **SMALL)
    metadata = prepare([path], tmp_path / "two", max_bad_rows=2, **SMALL)
    assert metadata["skipped_rows"] == 2 and sum(metadata["rows"].values()) == 88
    with pytest.raises(ValueError, match="no complete dataset"):
        open_split(tmp_path / "out", "train")


def test_empty_truncated_and_missing_files_are_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="empty.txt, line 1: the file is empty"):
        prepare([tmp_path / "empty.txt"], tmp_path / "a")
    rng = np.random.default_rng(0)
    whole = write(tmp_path / "whole.gz", [f"{x:x}" for x in rng.integers(0, 2**62, 5000)]).read_bytes()
    for cut in (len(whole) // 2, len(whole) - 4, 11):
        (tmp_path / "cut.gz").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="cut.gz, after .* truncated or corrupt"):
            list(read_chunks([tmp_path / "cut.gz"]))
    (tmp_path / "flipped.gz").write_bytes(whole[:500] + bytes([whole[500] ^ 255]) + whole[501:])
    with pytest.raises(ValueError, match="truncated or corrupt"):
        list(read_chunks([tmp_path / "flipped.gz"]))
    with pytest.raises(ValueError, match="every row is malformed"):
        prepare([write(tmp_path / "bad.txt", ["x"] * 5)], tmp_path / "c", max_bad_rows=5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"min_count": 0}, {"hash_cap": 1}, {"hash_cap": 5, "min_count": 2}, {"split": "user"}, {"train_fraction": 1.0},
        {"max_bad_rows": -1}, {"block_rows": 0}, {"blocks_per_shard": 0},
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(tmp_path, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        prepare([write(tmp_path / "t.txt", lines(3))], tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_a_directory_belongs_to_one_preparation(tmp_path):
    path = write(tmp_path / "t.txt", lines(100))
    first = prepare([path], tmp_path / "out", **SMALL)
    assert prepare([path], tmp_path / "out", **SMALL) == first
    with pytest.raises(ValueError, match="with other min_count"):
        prepare([path], tmp_path / "out", min_count=2, **SMALL)
    with pytest.raises(ValueError, match="no split 'valid'"):
        open_split(tmp_path / "out", "valid")
    (tmp_path / "out" / "criteo-train.array_record-00001").unlink()
    with pytest.raises(ValueError, match="00001 is missing"):
        open_split(tmp_path / "out", "train")


RULE_OF_A_LINE = re.compile(rb"[01](\t(-?[0-9]{1,18})?){13}(\t([0-9a-fA-F]{1,8})?){26}")


@pytest.mark.parametrize(
    "fields",
    [
        (0, 1, DENSE, 1 + DENSE, DENSE + FIELDS),  # the label, and the first and last field of each kind
        pytest.param(range(1 + DENSE + FIELDS), marks=pytest.mark.more),
    ],
    ids=["ends", "all"],
)
def test_the_quick_check_of_a_chunk_agrees_with_the_rule_of_a_line(fields):
    good = GOOD[:1] + ["5"] * DENSE + ["0a"] * FIELDS
    odd = ["", " 1", "1 ", "\0", "\x0b", "\r", "a\rb", "9" * 18, "-" + "9" * 18, "1" * 19, "0" * 19, "0" * 9]
    odd += '0 - --1 -0 -1 a-1 007 1e3 1_0 0x1f 0A ffffffff 100000000 NaN null "" \\N'.split()
    for field in fields:
        for value in odd:
            line = "\t".join([*good[:field], value, *good[field + 1 :]]).encode()
            for text in (line + b"\n", "\t".join(good).encode() + b"\n" + line + b"\n"):
                chunk = Chunk(Path("t.txt"), 0, 1, 0, text, text.count(b"\n"), None)
                assert (not parse(chunk).bad_rows) == (RULE_OF_A_LINE.fullmatch(line) is not None), line


def _prepare_and_die(path, out, arguments, die_at):
    kill_at_call(die_at)
    prepare([path], out, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"min_count": 3}, {"hash_cap": 7, "split": "random"}])
def test_kill_9_at_every_write_leaves_a_run_that_goes_on(tmp_path, arguments):
    rows = lines(200)
    rows[50] = "nonsense"
    path, arguments = write(tmp_path / "t.txt", rows), {**arguments, **SMALL, "max_bad_rows": 1}
    expected = prepare([path], tmp_path / "undisturbed", **arguments)
    context = multiprocessing.get_context("forkserver")  # polars' threads do not survive a fork
    context.set_forkserver_preload(["tensorflow_datasets", "jaxrec.data.criteo"])
    killed = 0
    for die_at in range(1, 60, 3):
        out = tmp_path / f"killed{die_at}"
        child = context.Process(target=_prepare_and_die, args=(path, out, arguments, die_at))
        child.start()
        child.join()
        killed += child.exitcode == -signal.SIGKILL
        before = {p.name: p.stat().st_mtime_ns for p in out.glob("criteo-*") if not p.name.endswith("partial")}
        assert prepare([path], out, **arguments) == expected
        assert digests(out) == digests(tmp_path / "undisturbed")
        after = {p.name: p.stat().st_mtime_ns for p in out.glob("criteo-*")}
        redone = [name for name in before if before[name] != after[name]]
        assert len(redone) <= 1  # the shard that was renamed but not yet recorded
    assert killed >= 10


@pytest.mark.parametrize("split", ["time", "random"])
def test_a_killed_run_keeps_its_bad_rows_and_parses_only_the_rest(tmp_path, monkeypatch, split):
    rows = lines(400)
    rows[2] = rows[390] = "nonsense"
    path, out = write(tmp_path / "t.txt", rows), tmp_path / "out"
    arguments = {"hash_cap": 7, "split": split, "train_fraction": 0.5, "max_bad_rows": 1, **SMALL}
    monkeypatch.setattr(sources, "CHUNK_BYTES", 4000)
    # One bad row is allowed and there are two: an undisturbed run fails at line 391, and so must every later one.
    for _ in range(3):
        with pytest.raises(ValueError, match="line 391: 1 fields"):
            prepare([path], out, **arguments)
    shards = len(list(out.glob("criteo-*")))
    assert shards >= 5
    parsed = []
    monkeypatch.setattr(preparation, "parse", lambda chunk: parsed.append(chunk) or parse(chunk))
    with pytest.raises(ValueError, match="line 391"):
        prepare([path], out, **arguments)
    assert parsed[0].first_row > 100


def test_a_file_that_was_corrected_is_prepared_in_the_same_directory(tmp_path):
    path = write(tmp_path / "t.txt", [*lines(100), "nonsense"])
    with pytest.raises(ValueError, match="line 101"):
        prepare([path], tmp_path / "out", **SMALL)
    write(path, lines(100))
    assert prepare([path], tmp_path / "out", **SMALL)["rows"] == {"train": 83, "test": 17}


def test_two_preparations_do_not_meet(tmp_path):
    path = write(tmp_path / "t.txt", lines(100))
    inside, leave, errors = threading.Event(), threading.Event(), []

    def wait(_progress):
        inside.set()
        leave.wait()

    def first():
        try:
            prepare([path], tmp_path / "out", progress=wait, **SMALL)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    with pytest.raises(ValueError, match="another process is preparing"):
        prepare([path], tmp_path / "out", **SMALL)
    leave.set()
    thread.join()
    assert not errors
    assert len(open_split(tmp_path / "out", "train")) == 6


def test_real_rows(real_data, tmp_path):
    metadata = prepare([real_data / "criteo" / "train_110000.tsv.gz"], tmp_path / "out")
    assert sum(metadata["rows"].values()) == 110_000
    mean = sum(metadata["rows"][s] * metadata["label_mean"][s] for s in ("train", "test")) / 110_000
    assert abs(mean - 0.257) < 0.001
    test = read_all(tmp_path / "out", "test")
    assert (test["ids"][:, 21] == 0).mean() > 0.7  # C22 is mostly missing
    assert test["dense"].min() == 0
