"""Criteo's files: what goes in comes out, bad rows are named, changed files refused, stopped preparations go on."""

import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from criteo_files import criteo_lines, read_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kills import kill_at_call
from smoke import smoke

from jaxrec.data import preparation, sources
from jaxrec.data.criteo import encode, open_split, prepare
from jaxrec.data.criteo import preparation as of_criteo
from jaxrec.data.criteo.parsing import DENSE, FIELDS, parse
from jaxrec.data.sources import Chunk, read_chunks

SMALL = {"block_rows": 16, "blocks_per_shard": 3}


def write(path, rows, end="\n", last_end=True):
    text = end.join(rows) + (end if last_end else "")
    # write_bytes closes the file, so that all of the text is on disk.
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def digests(directory):
    """A digest of each data file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.glob("criteo-*"))}


@pytest.mark.parametrize("name", ["train.txt", "day_0.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last_end", [True, False])
def test_what_goes_in_comes_out(tmp_path, name, end, last_end):
    rows = criteo_lines(120)
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
    rows = criteo_lines(130)
    whole = write(tmp_path / "whole.txt", rows)
    parts = [write(tmp_path / "day_0", rows[:70]), write(tmp_path / "day_1.gz", rows[70:])]
    prepare([whole], tmp_path / "a", **SMALL)
    prepare(parts, tmp_path / "b", **SMALL)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_a_byte_order_mark_and_blank_lines_at_the_end_are_no_part_of_a_text(tmp_path, monkeypatch):
    rows, path = criteo_lines(20), tmp_path / "excel.txt"
    text = b"\xef\xbb\xbf" + "\r\n".join(rows).encode()
    (wanted,) = read_chunks([write(tmp_path / "plain.txt", rows)])
    around = range(len(text) - 1, len(text) + 6)  # a piece of the file ends before, in and after each line end
    for end, sizes in ((b"\r\n\r\n", around), (b"\n\n", around), (b"\r\n\n\r\n\n", [1 << 20])):
        path.write_bytes(text + end)
        for size in sizes:
            monkeypatch.setattr(sources, "CHUNK_BYTES", size)
            chunks = list(read_chunks([path]))
            assert b"".join(chunk.text for chunk in chunks) == wanted.text, (end, size)
            assert sum(chunk.rows for chunk in chunks) == chunks[-1].seen.lines == 20 and chunks[-1].seen.ended
        out = tmp_path / f"out{len(end)}"
        assert sum(prepare([path], out, **SMALL)["rows"].values()) == 20


def test_hashing_stays_in_its_cap_and_a_random_split_is_seeded(tmp_path):
    path = write(tmp_path / "train.txt", criteo_lines(300))
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


GOOD = ["1", *map(str, range(13)), *(f"{x * 7919:08x}" for x in range(1, 27))]
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
    at, good = at % rows, criteo_lines(rows)
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
    rows = criteo_lines(90)
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
        prepare([write(tmp_path / "t.txt", criteo_lines(3))], tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_a_directory_belongs_to_one_preparation(tmp_path):
    path = write(tmp_path / "t.txt", criteo_lines(100))
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
    rows = criteo_lines(200)
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
    rows = criteo_lines(400)
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
    monkeypatch.setattr(of_criteo, "parse", lambda chunk: parsed.append(chunk) or parse(chunk))
    with pytest.raises(ValueError, match="line 391"):
        prepare([path], out, **arguments)
    assert parsed[0].first_row > 100


def test_a_file_that_was_corrected_is_prepared_in_the_same_directory(tmp_path):
    path = write(tmp_path / "t.txt", [*criteo_lines(100), "nonsense"])
    with pytest.raises(ValueError, match="line 101"):
        prepare([path], tmp_path / "out", **SMALL)
    write(path, criteo_lines(100))
    assert prepare([path], tmp_path / "out", **SMALL)["rows"] == {"train": 83, "test": 17}


def test_two_preparations_do_not_meet(tmp_path):
    path = write(tmp_path / "t.txt", criteo_lines(100))
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


# ---- files that change at any time or are given twice

HASH = {"hash_cap": 7, "split": "random", "train_fraction": 0.5}  # the only kind without a counting pass
KINDS = [{"min_count": 3}, {"hash_cap": 7}, {"min_count": 3, "split": "random"}, HASH]
CHANGES = {
    "edited": lambda text: text[:-300] + text[-300:].replace(b"\t1", b"\t2"),
    "grown": lambda text: text + "\n".join(criteo_lines(9, seed=5)).encode() + b"\n",
    "cut": lambda text: text[: text[:-1].rfind(b"\n") + 1],
}


def big(path, seed=0):
    """Write a file of more than a MiB, so that its head and tail do not overlap."""
    return write(path, [*criteo_lines(50, seed), *(criteo_lines(50, 1) * 110)])


def change(path, how):
    before = path.read_bytes()
    path.write_bytes(CHANGES[how](before))
    assert path.read_bytes() != before


def stop_after(calls):
    """A progress callback that raises KeyboardInterrupt at its calls-th call."""

    def progress(_now):
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("how", sorted(CHANGES))
def test_a_file_that_was_changed_is_not_taken_as_prepared(tmp_path, how):
    path, out = big(tmp_path / "t.txt"), tmp_path / "out"
    prepare([path], out, hash_cap=7)
    whole = digests(out)
    change(path, how)
    with pytest.raises(ValueError, match="t.txt.*(another directory|delete)"):
        prepare([path], out, hash_cap=7)
    assert digests(out) == whole


def test_an_edit_with_the_old_time_put_back_is_seen(tmp_path):
    path, out = big(tmp_path / "t.txt"), tmp_path / "out"
    prepare([path], out, hash_cap=7)
    stat = path.stat()
    change(path, "edited")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(ValueError, match="t.txt"):
        prepare([path], out, hash_cap=7)


@pytest.mark.parametrize("how", sorted(CHANGES))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_file_that_changes_on_the_way_is_refused(tmp_path, monkeypatch, kind, how):
    """Change it between the fingerprint and the first pass, after each chunk of each pass, and before the end."""
    path, begin = big(tmp_path / "t.txt"), preparation.begin_notes
    text = path.read_bytes()
    moments = []
    prepare([path], tmp_path / "whole", **kind, progress=moments.append)

    def begin_and_change(*arguments):
        state = begin(*arguments)
        change(path, how)
        return state

    with monkeypatch.context() as patched:
        patched.setattr(preparation, "begin_notes", begin_and_change)
        with pytest.raises(ValueError, match="t.txt"):
            prepare([path], tmp_path / "first", **kind)
    for moment in range(len(moments)):
        path.write_bytes(text)
        calls = []

        def progress(_now, at=moment, calls=calls):
            calls.append(1)
            if len(calls) == at + 1:
                change(path, how)

        with pytest.raises(ValueError, match="t.txt"):
            prepare([path], tmp_path / f"at{moment}", **kind, progress=progress)


@pytest.mark.parametrize("how", sorted(CHANGES))
def test_a_file_that_changes_is_not_mixed_into_a_preparation_that_goes_on(tmp_path, how):
    path, out = big(tmp_path / "t.txt"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare([path], out, **HASH, block_rows=512, blocks_per_shard=2, progress=stop_after(1))
    shards = digests(out)
    assert len(shards) >= 2
    change(path, how)
    with pytest.raises(ValueError, match="t.txt"):
        prepare([path], out, **HASH, block_rows=512, blocks_per_shard=2)
    assert {name: digest for name, digest in digests(out).items() if name in shards} == shards


def test_a_vocabulary_of_the_text_before_an_edit_is_made_anew(tmp_path):
    path, out = big(tmp_path / "t.txt"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        # Stop after counting, before the first chunk of the second pass is written.
        prepare([path], out, split="random", train_fraction=0.9, progress=stop_after(1))
    text = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        prepare([path], out, split="random", train_fraction=0.9, progress=stop_after(2), block_rows=10**6)
    assert (out / "vocabulary.npz").exists() and not digests(out)
    path.write_bytes(text[:-300_000] + text[-300_000:].replace(b"\t000", b"\t00a"))
    anew = prepare([path], tmp_path / "anew", split="random", train_fraction=0.9, block_rows=10**6)
    metadata = prepare([path], out, split="random", train_fraction=0.9, block_rows=10**6)
    assert metadata == anew and digests(out) == digests(tmp_path / "anew")


def test_rows_of_an_edit_that_was_taken_back_are_found(tmp_path, monkeypatch):
    """Count the text, edit it, write a part, and undo the edit: the rows written match no file."""
    path, out = big(tmp_path / "t.txt"), tmp_path / "out"
    text = path.read_bytes()
    monkeypatch.setattr("jaxrec.data.sources.CHUNK_BYTES", 1 << 18)
    calls, small = [], {"hash_cap": 7, "block_rows": 256, "blocks_per_shard": 1}
    edited = b"1" + text[1:] if text[:1] == b"0" else b"0" + text[1:]

    def progress(now):
        calls.extend([1] * (now.stage == "writes"))
        if len(calls) == 2:
            raise KeyboardInterrupt

    readings, read = itertools.count(), of_criteo.read_chunks

    def edit_after_count(*arguments):
        if next(readings) == 1:
            path.write_bytes(edited)
        return read(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(of_criteo, "read_chunks", edit_after_count)
        with pytest.raises(KeyboardInterrupt):
            prepare([path], out, **small, progress=progress)
    assert digests(out)
    path.write_bytes(text)
    with pytest.raises(ValueError, match="t.txt"):
        prepare([path], out, **small)


def bytes_read():
    """Bytes that this process has read from all files, as counted by the kernel."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_touch_costs_one_reading_and_nothing_else(tmp_path):
    path, out = big(tmp_path / "t.txt"), tmp_path / "out"
    metadata = prepare([path], out, **HASH)
    written = {p.name: p.stat().st_mtime_ns for p in out.glob("criteo-*")}
    os.utime(path)
    for readings in (1, 0):
        before = bytes_read()
        again = prepare([path], out, **HASH)
        assert readings <= (bytes_read() - before) / path.stat().st_size < readings + 0.9
        assert again["rows"] == metadata["rows"]
        assert {p.name: p.stat().st_mtime_ns for p in out.glob("criteo-*")} == written


def test_a_touch_does_not_end_a_preparation_that_goes_on(tmp_path):
    path, out = big(tmp_path / "t.txt"), tmp_path / "out"
    small = {**HASH, "block_rows": 512, "blocks_per_shard": 2}
    with pytest.raises(KeyboardInterrupt):
        prepare([path], out, **small, progress=stop_after(1))
    shards = {p.name: p.stat().st_mtime_ns for p in out.glob("criteo-*")}
    assert shards
    os.utime(path)
    prepare([path], out, **small)
    assert {n: (out / n).stat().st_mtime_ns for n in shards} == shards
    prepare([path], tmp_path / "whole", **small)
    assert digests(out) == digests(tmp_path / "whole")


def test_a_preparation_of_an_earlier_version_stays_readable_and_is_not_gone_on_with(tmp_path):
    path, out = write(tmp_path / "t.txt", criteo_lines(100)), tmp_path / "out"
    metadata = prepare([path], out, **SMALL)
    rows = read_all(out, "train")
    old = {key: metadata[key] for key in ("cardinalities", "rows", "label_mean", "skipped_rows", "options")}
    old["sources"] = [[path.name, path.stat().st_size, zlib.crc32(path.read_bytes())]]
    (out / "metadata.json").write_text(json.dumps(old))
    np.testing.assert_array_equal(read_all(out, "train")["ids"], rows["ids"])
    with pytest.raises(ValueError, match="other sources.*another directory"):
        prepare([path], out, **SMALL)
    np.testing.assert_array_equal(read_all(out, "train")["ids"], rows["ids"])


def again(path, how, directory):
    """Give the same rows under another path or in another form."""
    if how == "the same name":
        return path
    if how == "through a link":
        (directory / "link.txt").symlink_to(path)
        return directory / "link.txt"
    if how == "a hard link":
        os.link(path, directory / "hard.txt")
        return directory / "hard.txt"
    if how == "a copy under another name":
        return directory / write(directory / "copy.txt", path.read_text().split("\n")[:-1])
    compressed = directory / "day_1.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    return compressed


WAYS = ["the same name", "through a link", "a hard link", "a copy under another name", "compressed"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_rows_twice_are_refused(tmp_path, how, kind):
    path = write(tmp_path / "t.txt", criteo_lines(100))
    other = write(tmp_path / "other.txt", criteo_lines(100, seed=3))
    twice = [path, other, again(path, how, tmp_path)]
    with pytest.raises(ValueError, match="t.txt and .* the same rows"):
        prepare(twice, tmp_path / "out", **kind, **SMALL)
    assert not (tmp_path / "out" / "dataset_info.json").exists()


def test_files_that_only_begin_alike_are_two(tmp_path):
    path = big(tmp_path / "a.txt")
    text = path.read_bytes()
    (tmp_path / "b.txt").write_bytes(CHANGES["edited"](text))
    assert sum(prepare([path, tmp_path / "b.txt"], tmp_path / "out", hash_cap=7)["rows"].values()) == 2 * 5550


@pytest.mark.parametrize(
    ("kind", "rows", "bad", "match"),
    [
        ({"train_fraction": 0.001}, 20, [], "train split .*no rows.*train_fraction"),
        ({}, 1, [], "train split .*no rows"),
        ({"train_fraction": 1 - 1e-9, "split": "random"}, 20, [], "test split .*no rows.*train_fraction"),
        ({"train_fraction": 0.9}, 20, [18, 19], "test split .*no rows"),
        ({"train_fraction": 0.1, "hash_cap": 5}, 20, [0, 1], "train split .*no rows"),
    ],
)
def test_both_splits_have_rows(tmp_path, kind, rows, bad, match):
    text = criteo_lines(rows)
    for row in bad:
        text[row] = "nonsense"
    path = write(tmp_path / "t.txt", text)
    with pytest.raises(ValueError, match=match):
        prepare([path], tmp_path / "out", **kind, max_bad_rows=len(bad), **SMALL)
    assert not (tmp_path / "out" / "dataset_info.json").exists()


# ---- prepare.py as a user sees it: every failure is one line and an exit code, and nothing is lost

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "experiments" / "prepare.py"
FLAGS = ["--hash-cap", "100"]
TMPFS = 'mount -t tmpfs -o size=$0 tmpfs "$1" && shift && exec "$@"'


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options
    )


def one_line(text):
    assert text.count("\n") == 1, text
    return text


def larger(path):
    return write(path, criteo_lines(300) * 60)


def stopped_in_the_second_chunk(path, out, number):
    """Run prepare.py with chunks of 64 KiB, and send it a signal after its first shard; return code and stderr."""
    code = f"""
import runpy, sys
import jaxrec.data.criteo, jaxrec.data.preparation as preparation, jaxrec.data.sources as sources
sources.CHUNK_BYTES = 1 << 16
write = preparation.write_blocks
def told(*arguments):
    size = write(*arguments)
    print("shard", flush=True)
    sys.stdin.readline()  # the signal comes while this waits
    return size
preparation.write_blocks = told
sys.path.insert(0, {str(SCRIPT.parent)!r})
defaults = jaxrec.data.criteo.prepare.__kwdefaults__
defaults["block_rows"], defaults["blocks_per_shard"] = 100, 2
sys.argv = ["prepare.py", "--sources", {str(path)!r}, "--directory", {str(out)!r}, *{FLAGS}]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "shard\n"
    child.send_signal(number)
    _, error = child.communicate(timeout=120)
    return child.returncode, error


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.gate), (signal.SIGTERM, 143)]
)
def test_a_signal_ends_in_a_line_and_the_same_call_goes_on(tmp_path, number, code):
    path, out = larger(tmp_path / "t.txt"), tmp_path / "out"
    returned, error = stopped_in_the_second_chunk(path, out, number)
    assert returned == code
    assert one_line(error) == f"stopped by {signal.Signals(number).name}: the same command goes on where it was.\n"
    small = {"hash_cap": 100, "block_rows": 100, "blocks_per_shard": 2}
    prepare([path], out, **small)
    prepare([path], tmp_path / "undisturbed", **small)
    assert digests(out) == digests(tmp_path / "undisturbed")


@pytest.mark.process
def test_a_signal_before_the_work_ends_in_a_line(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-X", "importtime", SCRIPT, "--sources", "none.txt", "--directory", tmp_path / "out"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in child.stderr:
        if line.rstrip().endswith("numpy.version"):  # an early line of -X importtime
            child.send_signal(signal.SIGINT)
            break
    said = [line for line in child.stderr if not line.startswith("import time")]
    assert child.wait(timeout=120) == 130
    assert said == ["stopped by SIGINT: the same command goes on where it was.\n"]


def may_mount():
    try:
        return subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.process
@pytest.mark.parametrize("full_at", ["the first shard", "the vocabulary", "the metadata"])
def test_a_full_disk_ends_in_a_line_and_leaves_what_is_whole(tmp_path, full_at):
    """The disk is a tmpfs of limited size, in pages of 4 KiB."""
    if not may_mount():
        pytest.skip("a disk of its own needs `unshare -Urm`, which is not allowed here")
    path, disk = larger(tmp_path / "t.txt"), tmp_path / "disk"
    disk.mkdir()
    prepare([path], tmp_path / "whole", min_count=1)
    shards = sum(file.stat().st_size for file in (tmp_path / "whole").glob("criteo-*"))
    vocabulary = -(-(tmp_path / "whole" / "vocabulary.npz").stat().st_size // 4096) * 4096
    size = {"the vocabulary": 8 << 10, "the first shard": 200 << 10, "the metadata": shards + vocabulary + (12 << 10)}
    out = disk / "out"
    command = [sys.executable, SCRIPT, "--sources", path, "--directory", out, "--min-count", "1"]
    # List the files left on the full disk, then check that the same command resumes once there is space.
    inside = (
        f'"$@"; echo "code $?" >&2; ls {out}; mount -o remount,size=50m {disk}; "$@" > /dev/null; echo "then $?" >&2'
    )
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", TMPFS, str(size[full_at]), disk, "sh", "-c", inside, "sh", *command],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    *said, code, then = done.stderr.splitlines()
    assert (code, then) == ("code 1", "then 0"), done.stderr
    assert len(said) == 1 and "No space left on device" in said[0] and "free some space" in said[0]
    left = done.stdout.split()
    assert not any(name.endswith(".partial") for name in left) and "dataset_info.json" not in left
    assert ("vocabulary.npz" in left) == (full_at != "the vocabulary")
    assert ("criteo-test.array_record-00000" in left) == (full_at == "the metadata")


@pytest.mark.process
def test_missing_rights_end_in_a_line(tmp_path):
    home = {**os.environ, "HOME": str(tmp_path)}  # numba's cache if it cannot write beside the source
    path = write(tmp_path / "t.txt", criteo_lines(10))
    (tmp_path / "closed").mkdir(mode=0o500)
    for parent in [tmp_path, *tmp_path.parents][:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    tmp_path.chmod(0o777)
    if os.geteuid() == 0:
        rights = ["setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all"]
        if subprocess.run(
            [*rights, sys.executable, "-c", "import tyro, jaxrec"], capture_output=True, env=home
        ).returncode:
            pytest.skip("the user 65534 may not run this Python")
    else:
        rights = []

    def said(*arguments):
        command = [*rights, sys.executable, SCRIPT, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=home)
        assert done.returncode == 1
        return one_line(done.stderr)

    line = said("--sources", path, "--directory", tmp_path / "closed" / "out")
    assert "closed/out: Permission denied" in line and "rights" in line
    path.chmod(0o000)
    line = said("--sources", path, "--directory", tmp_path / "out")
    assert "t.txt: Permission denied" in line and "rights" in line


@pytest.mark.process
def test_a_seed_of_no_split_is_refused_in_a_line(tmp_path):
    done = run("--sources", "t.txt", "--directory", tmp_path / "out", "--seed", "1")
    assert done.returncode == 1 and "--seed 1 is for --split random" in one_line(done.stderr)


@pytest.mark.process
def test_a_good_run_prints_its_figures(tmp_path):
    done = run("--sources", write(tmp_path / "t.txt", criteo_lines(100)), "--directory", tmp_path / "out", *FLAGS)
    assert done.returncode == 0 and "rows: {'train': 83, 'test': 17}" in done.stdout


@pytest.mark.slow
@pytest.mark.process
def test_what_preparing_takes_is_measured_of_each_format(tmp_path):
    found = smoke(tmp_path, "preparation_rate")
    for name in ("criteo", "csv", "parquet"):
        assert found[f"{name}_rows_per_s"] > 0 and 0.05 < found[f"{name}_peak_gb"] < 8
        assert found[f"{name}_loader_examples_per_s"] > found[f"{name}_rows_per_s"]
        assert not (tmp_path / name).exists()
