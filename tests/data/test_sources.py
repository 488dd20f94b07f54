"""Prepared rows match the source files: a file that changes at any time or is given twice is refused."""

import gzip
import itertools
import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from test_criteo import SMALL, digests, lines, read_all, write

from jaxrec.data import preparation
from jaxrec.data.criteo import preparation as of_criteo
from jaxrec.data.criteo import prepare

HASH = {"hash_cap": 7, "split": "random", "train_fraction": 0.5}  # the only kind without a counting pass
KINDS = [{"min_count": 3}, {"hash_cap": 7}, {"min_count": 3, "split": "random"}, HASH]
CHANGES = {
    "edited": lambda text: text[:-300] + text[-300:].replace(b"\t1", b"\t2"),
    "grown": lambda text: text + "\n".join(lines(9, seed=5)).encode() + b"\n",
    "cut": lambda text: text[: text[:-1].rfind(b"\n") + 1],
}


def big(path, seed=0):
    """Write a file of more than a MiB, so that its head and tail do not overlap."""
    return write(path, [*lines(50, seed), *(lines(50, 1) * 110)])


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
    path, out = write(tmp_path / "t.txt", lines(100)), tmp_path / "out"
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
    path = write(tmp_path / "t.txt", lines(100))
    other = write(tmp_path / "other.txt", lines(100, seed=3))
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
    text = lines(rows)
    for row in bad:
        text[row] = "nonsense"
    path = write(tmp_path / "t.txt", text)
    with pytest.raises(ValueError, match=match):
        prepare([path], tmp_path / "out", **kind, max_bad_rows=len(bad), **SMALL)
    assert not (tmp_path / "out" / "dataset_info.json").exists()
