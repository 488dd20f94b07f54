"""Checkpoints over all placements, meshes, shards and optimizers, and of an earlier jaxrec; no torn image is taken."""

import dataclasses
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import threading
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from homes import dense_table, each_part, tables_in
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from strategies import TABLES, chosen, examples, small_spec

import jaxrec
from jaxrec import Serial
from jaxrec.checkpoint import (
    Checkpointer,
    RowCheckpointer,
    deltas,
    images,
    newest,
    read_manifest,
    restore,
    restore_for_prediction,
    restore_shards,
    snapshot,
    verify,
    write_image,
)
from jaxrec.checkpoint.format import load_arrays
from jaxrec.checkpoint.restore import fill, with_chain
from jaxrec.cpr import Recovery, mfu
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad, rowwise_adagrad, sgd
from jaxrec.embedding.tables import embedding_matrix, range_of
from jaxrec.files import write_json
from jaxrec.oac import Pipeline
from jaxrec.step import init_dense

OPTIMIZERS = {"sgd": sgd(0.1), "adagrad": adagrad(0.1), "rowwise_adagrad": rowwise_adagrad(0.1)}
SLOTS_ALIKE = ("sgd", "adagrad")  # saved and restored as those of rowwise_adagrad


def make(home, spec, optimizer="rowwise_adagrad", devices=1, seed=None, dense=(7, 3)):
    """A state with the given placement; random values if a seed is given."""
    mesh, rows = jaxrec.make_mesh(devices=jax.devices()[:devices]), OPTIMIZERS[optimizer]
    tables = tables_in(home, spec, rows, mesh)
    params = {"kernel": jnp.zeros(dense), "bias": jnp.zeros(3), "empty": jnp.zeros((0, 2))}
    state = jaxrec.TrainState(init_dense(params, optax.adam(0.1), mesh), tables)
    if seed is None:
        return state
    rng = np.random.default_rng(seed)
    fill = lambda x: jax.device_put(np.asarray(rng.normal(size=x.shape) * 100).astype(x.dtype), x.sharding)
    if tables.hosted:
        for _, array in each_part(tables):
            array[:] = rng.normal(size=array.shape)
    else:
        tables = jax.tree.map(fill, tables)
    return jaxrec.TrainState(jax.tree.map(fill, state.dense)._replace(step=jnp.asarray(12)), tables)


def assert_same(a, b, spec):
    jax.tree.map(np.testing.assert_array_equal, a.dense, b.dense)
    for name, stack in spec.stacks.items():
        for part in ("value", *read_slots(a, name)):
            used = stack.offsets[-1]
            np.testing.assert_array_equal(
                dense_table(a.tables, name, part)[:used], dense_table(b.tables, name, part)[:used]
            )


def read_slots(state, stack):
    return [part for part in state.tables.layout[stack] if part != "value"]


SOURCES = [("device", 1, 8), ("device", 8, 8), ("device", 4, 4), ("host", 1, 8), ("host", 1, 3), ("pinned", 4, 8)]


@pytest.mark.parametrize(
    ("source", "optimizer"),
    chosen([(source, name) for source in SOURCES for name in OPTIMIZERS], lambda source, name: name not in SLOTS_ALIKE),
)
def test_restores_to_every_home_mesh_and_number_of_shards(tmp_path, source, optimizer):
    home, devices, shards = source
    spec = small_spec(shards)
    state = make(home, spec, optimizer, devices, seed=1)
    write_image(tmp_path / "step_00000012", snapshot(state, {"position": 99}))
    for target, devices_there, shards_there in [
        ("device", 1, 8), ("device", 2, 8), ("device", 4, 16), ("device", 8, 8), ("host", 1, 8), ("host", 1, 5),
        ("pinned", 2, 8),
    ]:  # fmt: skip
        other = small_spec(shards_there)
        found, image = restore(tmp_path / "step_00000012", make(target, other, optimizer, devices_there))
        assert_same(state, found, spec)
        assert image.step == 12 and image.extra == {"position": 99}
        if target == "device":
            template = make(target, other, optimizer, devices_there)
            same = jax.tree.map(lambda a, b: a.sharding == b.sharding, found, template)
            assert all(jax.tree.leaves(same))


@settings(max_examples=examples(3, 20), deadline=None)
@example(65_537)
@example(2 * 32_771)
@example(7 * 13 * 1000)
@given(rows=st.integers(50_000, 150_000))
def test_an_image_has_few_files_whatever_the_number_of_rows(rows):
    """Orbax divides arrays into equal chunks: of a prime number of rows, each was a file."""
    chunk_bytes, spec = 1 << 20, EmbeddingSpec({"a": Table(rows, 16)}, {"a": Lookup("a")}, shards=1)
    state = make("host", spec, seed=1)
    with tempfile.TemporaryDirectory() as directory, mock.patch("jaxrec.checkpoint.format.CHUNK_BYTES", chunk_bytes):
        path = Path(directory) / "step_00000012"
        files = write_image(path, snapshot(state)).files
        found, _ = restore(path, make("host", spec))
    named = [name for name in files if "/rows.width_16.0000.value/" in name]
    equal = [number for number in range(1, rows * 64 // chunk_bytes + 1) if rows % number == 0]
    assert len(named) == 1 + max(equal)  # with a file of metadata
    assert_same(state, found, spec)


LARGER = {"new": Table(3, 4), "a": Table(33, 4), "wide": Table(6, 9), "b": Table(5, 4), "w": Table(60, 1)}


def larger_spec(shards=8, tables=None):
    tables = tables or LARGER
    return EmbeddingSpec(tables, {name: Lookup(name) for name in tables}, shards=shards)


@pytest.mark.parametrize("home", ["device", "host", "pinned"])
@pytest.mark.parametrize(
    ("shards", "tables"), [(8, LARGER), (3, LARGER), (8, dict(reversed(TABLES.items()))), (8, TABLES)]
)
def test_rows_of_grown_tables_begin_as_initial_ones_and_all_others_keep_their_bits(tmp_path, home, shards, tables):
    state = make("host", small_spec(8), seed=1)
    write_image(tmp_path / "step_00000012", snapshot(state))
    spec = larger_spec(shards, tables)
    found, _ = restore(tmp_path, make(home, spec), grow=True)
    fresh = make("host", spec)
    for name, table in tables.items():
        stack, first, last = range_of(spec, name)
        for part in ("value", *read_slots(found, stack)):
            rows, wanted = (dense_table(each.tables, stack, part)[first:last] for each in (found, fresh))
            if name in TABLES:
                _, begin, end = range_of(small_spec(8), name)
                wanted = np.concatenate([dense_table(state.tables, stack, part)[begin:end], wanted[end - begin :]])
            np.testing.assert_array_equal(rows, wanted)
            assert len(rows) == table.rows
    jax.tree.map(np.testing.assert_array_equal, found.dense, state.dense)


def test_rows_saved_in_deltas_come_back_into_grown_tables(tmp_path):
    """Also those that no delta holds, whose initial values are of the smaller tables."""
    spec, rows = small_spec(8), {name: np.array([2, 10], np.int32) for name in ("width_4", "width_1")}
    state = make("host", spec, seed=1)
    with RowCheckpointer(tmp_path) as saver:
        saver.save(state.tables, {(name, 2): ids for name, ids in rows.items()}, 12, dense=state.dense)
    found, _ = restore(tmp_path, make("host", larger_spec()), grow=True)
    same, _ = restore(tmp_path, make("host", spec))
    for name in TABLES:
        stack, first, _ = range_of(larger_spec(), name)
        _, begin, end = range_of(spec, name)
        got = dense_table(found.tables, stack)[first : first + end - begin]
        np.testing.assert_array_equal(got, dense_table(same.tables, stack)[begin:end])


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"a": Table(29, 4)}, r"'a' of \[30, 4\] \(rows, width\), and here it is \[29, 4\]"),
        ({"w": Table(21, 2)}, r"'w' of \[21, 1\] \(rows, width\), and here it is \[21, 2\]"),
        ({"b": None}, r"'b' of \[5, 4\] \(rows, width\), and here it is missing"),
    ],
)
def test_a_table_that_has_shrunk_is_refused(tmp_path, change, rule):
    write_image(tmp_path / "step_00000012", snapshot(make("host", small_spec(), seed=1)))
    tables = {name: table for name, table in (LARGER | change).items() if table}
    template = make("host", larger_spec(tables=tables), seed=5)
    before = snapshot(template)
    with pytest.raises(ValueError, match=rule):
        restore(tmp_path, template, grow=True)
    jax.tree.map(np.testing.assert_array_equal, before.arrays, snapshot(template).arrays)
    with pytest.raises(ValueError, match="other tables"):
        restore(tmp_path, make("host", larger_spec()))  # not unless asked to


def test_one_shard_is_restored_alone(tmp_path):
    spec = small_spec()
    state = make("host", spec, seed=1)
    write_image(tmp_path / "step_1", snapshot(state))
    other = make("host", spec, seed=2).tables
    before = snapshot(jaxrec.TrainState(state.dense, other))
    # All files of other shards may be missing: they are neither verified nor read.
    for leaf in (tmp_path / "step_1" / "arrays.0000").glob("rows.*"):
        if ".0003." not in leaf.name:
            shutil.rmtree(leaf)
    restore_shards(tmp_path / "step_1", other, [3])
    after = snapshot(jaxrec.TrainState(state.dense, other))
    expected = snapshot(state)
    for name, array in after.arrays.items():
        source = expected if ".0003." in name or "dense" in name else before
        np.testing.assert_array_equal(array, source.arrays[name])
    with pytest.raises(ValueError, match="cannot be read"):
        restore_shards(tmp_path / "step_1", other, [4])
    with pytest.raises(ValueError, match="shard=8"):
        restore_shards(tmp_path / "step_1", other, [8])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tables": {**TABLES, "b": Table(6, 4)}}, "other tables: it has .*'b': .5, 4.*wanted .*'b': .6, 4"),
        ({"tables": dict(reversed(TABLES.items()))}, "other tables: it has the order"),
        ({"optimizer": "sgd"}, "other row optimizer slots"),
        ({"dense": (7, 4)}, "other dense state: it has .*kernel.*1, 7, 3.*wanted .*1, 7, 4"),
    ],
)
@pytest.mark.parametrize("home", ["device", "host", "pinned"])
def test_an_image_of_something_else_is_refused(tmp_path, home, change, message):
    spec = small_spec()
    write_image(tmp_path / "step_1", snapshot(make("device", spec)))
    tables = change.pop("tables", None) if (change := dict(change)) else None
    other = small_spec(tables=tables)
    template = make(home, other, seed=5, **change)
    before = snapshot(template)
    with pytest.raises(ValueError, match=message):
        restore(tmp_path / "step_1", template)
    jax.tree.map(np.testing.assert_array_equal, before.arrays, snapshot(template).arrays)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two images of one run."""
    directory, spec = tmp_path_factory.mktemp("images"), small_spec(2)
    for step in (1, 2):
        write_image(directory / f"step_{step:08d}", snapshot(make("host", spec, seed=step)))
    return directory


@settings(max_examples=examples(40, 300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 2**40), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found(whole, place, bit):
    """A bit of the newest image, at a place among all bytes of its files."""
    image, spec = whole / "step_00000002", small_spec(2)
    files = sorted(file for file in image.rglob("*") if file.is_file())
    place %= sum(file.stat().st_size for file in files)
    while place >= files[0].stat().st_size:
        place -= files.pop(0).stat().st_size
    original = files[0].read_bytes()
    files[0].write_bytes(original[:place] + bytes([original[place] ^ 1 << bit]) + original[place + 1 :])
    try:
        with pytest.raises(ValueError, match="damaged|no readable manifest"):
            restore(image, make("host", spec))
    finally:
        files[0].write_bytes(original)


def test_a_missing_file_is_named(whole, tmp_path):
    spec = small_spec(2)
    copy = shutil.copytree(whole, tmp_path / "copy")
    for file in sorted((copy / "step_00000002").rglob("*")):
        if file.is_file():
            content = file.read_bytes()
            file.unlink()
            with pytest.raises(ValueError, match="cannot be read|no readable manifest") as caught:
                restore(copy / "step_00000002", make("host", spec))
            assert file.name in str(caught.value) or "manifest" in str(caught.value)
            file.write_bytes(content)
    restore(copy / "step_00000002", make("host", spec))


def test_orbax_alone_loads_a_changed_byte(whole, tmp_path):
    """Negative control: the reason why our loads verify."""
    image = read_manifest(shutil.copytree(whole, tmp_path / "copy") / "step_00000002")
    (leaf,) = [name for name in image.files if name.startswith("arrays.0000/dense.0000/") and name.endswith("/0")]
    content = (image.path / leaf).read_bytes()
    loaded = []
    for place in range(len(content)):
        for bit in range(8):
            (image.path / leaf).write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            with pytest.raises(ValueError, match="damaged"):
                verify(image)
            try:
                loaded.append(int(load_arrays(image, ["dense.0000"])["dense.0000"]))
            except ValueError:
                pass
    assert set(loaded) - {12}


def test_images_are_kept_replaced_and_never_overwritten(tmp_path):
    spec = small_spec()
    state = make("host", spec)
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in range(5):
            checkpointer.save(state._replace(dense=state.dense._replace(step=jnp.asarray(step))))
        assert checkpointer.save(state._replace(dense=state.dense._replace(step=jnp.asarray(4)))) >= 0
    assert [path.name for path in images(tmp_path)] == ["step_00000004", "step_00000003"]
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(ValueError, match="exists already"):
        write_image(tmp_path / "step_00000004", snapshot(state))
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)


@settings(max_examples=examples(8, 40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(st.integers(1, 30), min_size=1), st.integers(1, 12), st.integers(1, 3))
def test_the_first_image_of_each_period_stays_beside_the_last_ones(tmp_path, steps, period, keep):
    state, steps = make("host", small_spec(1)), sorted(steps)
    with (
        tempfile.TemporaryDirectory(dir=tmp_path) as directory,
        Checkpointer(directory, keep=keep, keep_period=period) as saves,
    ):
        for step in steps:
            saves.save(state._replace(dense=state.dense._replace(step=jnp.asarray(step))))
            saves.wait()
        first = {min(step for step in steps if step // period == one) for one in {s // period for s in steps} - {0}}
        assert {read_manifest(path).step for path in images(Path(directory))} == first | {*steps[-keep:]}


@pytest.mark.parametrize("killed_at", [1, 2, 3])
def test_an_image_that_is_replaced_is_there_until_the_new_one_is_whatever_rename_is_the_last(
    tmp_path, monkeypatch, killed_at
):
    class Killed(BaseException):
        pass

    def rename_until(source, target):
        if next(calls) == killed_at:
            raise Killed
        rename(source, target)

    rename, calls = os.rename, itertools.count(1)
    state, path = make("host", small_spec(2), seed=1), tmp_path / "step_00000012"
    write_image(path, snapshot(state))
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(os, "rename", rename_until)
        write_image(path, snapshot(make("host", small_spec(2), seed=2)), replace=True)
    found, _ = restore(tmp_path, make("host", small_spec(2)))
    assert_same(found, state, small_spec(2))


def test_an_image_that_is_pruned_while_it_is_read_gives_way_to_the_newer_one(tmp_path):
    spec = small_spec(2)
    newer = make("host", spec, seed=2)
    write_image(tmp_path / "step_00000001", snapshot(make("host", spec, seed=1)))

    def load(found):
        if found[-1].path.name == "step_00000001":  # verified; now another process saves, and keeps one image
            write_image(tmp_path / "step_00000002", snapshot(newer))
            shutil.rmtree(found[-1].path)
        return fill(found, make("host", spec))

    assert_same(with_chain(tmp_path, load)[0], newer, spec)


@pytest.mark.parametrize("home", ["host", "device"])
@pytest.mark.parametrize(("saved", "wanted"), [("float16", "float32"), ("float32", "float16")])
@pytest.mark.parametrize("base", [True, False])
def test_rows_of_another_dtype_are_predicted_with(home, saved, wanted, base, tmp_path):
    spec = dataclasses.replace(small_spec(2), dtype=saved)
    tables = HostTables.create(spec, OPTIMIZERS["sgd"])
    state = make("host", spec, "sgd")._replace(tables=tables)
    if base:
        write_image(tmp_path / "step_00000000", snapshot(state))
    with RowCheckpointer(tmp_path, newest(tmp_path)) as saver:
        for rows in tables.shards["width_4"][1].values():
            rows[1:3] = 0.37
        saver.save(tables, {("width_4", 1): np.array([3, 5], np.int32)}, 1, dense=state.dense)
    params = {"kernel": jnp.zeros((7, 3)), "bias": jnp.zeros(3), "empty": jnp.zeros((0, 2))}
    found = [
        restore_for_prediction(tmp_path, dataclasses.replace(spec, dtype=dtype), params, place=home)[0].tables
        for dtype in (saved, wanted)
    ]
    for name in spec.tables:
        right, converted = (embedding_matrix(tables, name) for tables in found)
        np.testing.assert_allclose(converted.astype(np.float32), right.astype(np.float32), rtol=1e-3, atol=1e-5)
    assert (np.abs(embedding_matrix(found[1], "a").astype(np.float32) - 0.37) < 1e-3).any()


@pytest.mark.parametrize("home", ["host", "device"])
def test_an_image_that_is_pruned_between_two_of_its_shards_gives_way_to_the_newer_one(home, tmp_path, monkeypatch):
    """The template of the first try has some of its rows by then, and is restored again."""
    spec = EmbeddingSpec({"t": Table(1_100_000, 32)}, {"t": Lookup("t")}, shards=2)  # more than is read at a time
    newer = make("host", spec, "sgd", seed=2)
    write_image(tmp_path / "step_00000001", snapshot(make("host", spec, "sgd", seed=1)))
    read = []

    def load(image, leaves):
        read.append(image.path.name)
        if len(read) == 3:  # the dense state and one shard are read
            write_image(tmp_path / "step_00000002", snapshot(newer))
            shutil.rmtree(tmp_path / "step_00000001")
        return load_arrays(image, leaves)

    monkeypatch.setattr(sys.modules["jaxrec.checkpoint.restore"], "load_arrays", load)
    assert_same(restore(tmp_path, make(home, spec, "sgd"))[0], newer, spec)
    assert read == ["step_00000001"] * 3 + ["step_00000002"] * 3


def test_a_save_that_outlives_an_interrupted_close_releases_the_directory_when_it_ends(tmp_path, monkeypatch):
    written, begun = threading.Event(), threading.Event()
    write = lambda *given, **more: (begun.set(), written.wait(60), write_image(*given, **more))[-1]
    monkeypatch.setattr("jaxrec.checkpoint.checkpointer.write_image", write)
    saver = Checkpointer(tmp_path)
    saver.save(make("host", small_spec(2)))
    assert begun.wait(60)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(saver, "wait", functools.partial(signal.default_int_handler, signal.SIGINT, None))
        saver.close()
    with pytest.raises(ValueError, match="is locked"):
        Checkpointer(tmp_path)
    written.set()
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    Checkpointer(tmp_path, run=saver.run).close()


def test_a_failed_save_is_told_tried_again_and_raised_on_leaving(tmp_path, monkeypatch):
    spec = small_spec(2)
    state, rename, saved = make("host", spec), os.rename, tmp_path / "step_00000000"
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        Checkpointer(tmp_path / "file" / "below")

    def fail(source, target):
        raise OSError(28, "No space left on device")

    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(os, "rename", fail)
        checkpointer.save(state)
        with pytest.warns(UserWarning, match="a save failed, and the next one tries again.*No space left"):
            checkpointer.save(state)
        with pytest.raises(OSError, match="No space left"):
            checkpointer.wait()
        monkeypatch.setattr(os, "rename", rename)
        checkpointer.save(state)
        checkpointer.wait()
        assert saved.exists() and len(checkpointer.failures) == 2
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="No space left"), Checkpointer(tmp_path / "other") as checkpointer:
        checkpointer.save(state)
    with pytest.raises(KeyError) as caught, Checkpointer(tmp_path / "third") as checkpointer:
        checkpointer.save(state)
        raise KeyError("the body")
    assert "And a save failed: [Errno 28] No space left on device" in caught.value.__notes__


def test_a_snapshot_shares_no_memory_with_the_state():
    spec = small_spec()
    state = make("host", spec, seed=1)
    image = snapshot(state)
    before = {name: array.copy() for name, array in image.arrays.items()}
    for parts in state.tables.shards["width_4"]:
        parts["value"][:] = -1
    jax.tree.map(np.testing.assert_array_equal, image.arrays, before)
    json.dumps(image.manifest)


@pytest.fixture
def flushed(monkeypatch):
    """The calls of fsync, rename and replace with their paths, in order."""
    calls = []
    fsync, moves = os.fsync, {name: getattr(os, name) for name in ("rename", "replace")}

    def note_fsync(handle):
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def note_move(move):
        def noted(source, target):
            calls.append(("rename", str(target)))
            move(source, target)

        return noted

    monkeypatch.setattr(os, "fsync", note_fsync)
    for name, move in moves.items():
        monkeypatch.setattr(os, name, note_move(move))
    return calls


def test_a_commit_is_flushed_before_and_after_its_rename(tmp_path, flushed):
    """After a power cut all files are on disk if the name is, and the name is once training has continued."""
    directory, spec = tmp_path / "made" / "on the way", small_spec(2)
    write_image(directory / "step_1", snapshot(make("host", spec)))
    renamed, partial = flushed.index(("rename", str(directory / "step_1"))), directory / "step_1.partial"
    files = [partial / path.relative_to(directory / "step_1") for path in (directory / "step_1").rglob("*")]
    assert {("fsync", str(path)) for path in [*files, partial]} <= set(flushed[:renamed])
    assert ("fsync", str(directory)) in flushed[renamed:]
    for made in (directory, tmp_path / "made"):  # a directory is durable once its parent is flushed
        assert ("fsync", str(made.parent)) in flushed


def test_a_file_is_flushed_before_and_its_directory_after_it_has_its_name(tmp_path, flushed):
    """The same holds for all that is written through `files`, such as config.json."""
    write_json(tmp_path / "config.json", {"seed": 0})
    moved = ("rename", str(tmp_path / "config.json"))
    assert flushed == [("fsync", str(tmp_path / "config.json.partial")), moved, ("fsync", str(tmp_path))]


SHARD_ROWS = 400_000  # 51 MB


def _extra_memory(directory, copy, connection):
    """Peak memory of a save beyond the process's memory before it, in units of one shard."""
    spec = EmbeddingSpec({"t": Table(4 * SHARD_ROWS, 32)}, {"t": Lookup("t")}, shards=4)
    state = jaxrec.TrainState(jaxrec.DenseState(np.int32(1), {}, ()), HostTables.create(spec, sgd(0.1)))
    small = EmbeddingSpec({"t": Table(8, 32)}, {"t": Lookup("t")}, shards=4)
    write_image(directory / "warm", snapshot(state._replace(tables=HostTables.create(small, sgd(0.1)))))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _memory_kb("VmRSS")
    with Checkpointer(directory / copy, copy=copy) as checkpointer:
        checkpointer.save(state)
        done = checkpointer.done()
    connection.send(((_memory_kb("VmHWM") - before) * 1024 / (SHARD_ROWS * 32 * 4), done))


def _memory_kb(what):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1])


@pytest.mark.process
@pytest.mark.realtime  # it measures the memory of a process
@pytest.mark.parametrize(("copy", "at_least", "at_most"), [("shards", 0, 1.3), ("whole", 3.9, 8)])
def test_saving_shard_by_shard_needs_no_more_than_about_one_shard_of_memory(tmp_path, copy, at_least, at_most):
    context = multiprocessing.get_context("spawn")  # the child starts with little memory
    here, there = context.Pipe()
    child = context.Process(target=_extra_memory, args=(tmp_path, copy, there))
    child.start()
    shards, done = here.recv()
    child.join()
    assert at_least <= shards <= at_most, shards
    assert done or copy == "whole"  # with "shards", training waits for the write
    assert read_manifest(tmp_path / copy / "step_00000001").nbytes > 4 * SHARD_ROWS * 32 * 4


@pytest.mark.parametrize("home", ["host", "device", "pinned"])
def test_an_image_saved_shard_by_shard_is_the_same_state(tmp_path, home):
    spec, state = small_spec(), make(home, small_spec(), devices=1 if home == "host" else 4, seed=1)
    for copy in ("whole", "shards"):
        with Checkpointer(tmp_path / copy, copy=copy) as checkpointer:
            checkpointer.save(state)
        found, _ = restore(tmp_path / copy, make("device", spec))
        assert_same(state, found, spec)
    tables = make("host", spec, seed=3).tables
    restore_shards(tmp_path / "shards", tables, [3])
    np.testing.assert_array_equal(dense_table(tables, "width_4")[3::8], dense_table(state.tables, "width_4")[3::8])


# ---- runs of an earlier jaxrec are restored to the same values and go on, or are refused by their format
#
# golden/run_of_format_2.tar.gz was written by the code of commit fd9c844, before there were engines: a base of step 2,
# deltas of steps 4 and 6 by MFU, and restored.npz, the state that that code itself restored from them.

GOLDEN = Path(__file__).parent / "golden" / "run_of_format_2.tar.gz"
SPEC = EmbeddingSpec({"item": Table(12, 2)}, {"item": Lookup("item")}, shards=2)
ROWS, DENSE = adagrad(0.1), optax.sgd(0.1, momentum=0.9)
HOMES = pytest.mark.parametrize("home", ["host", "device", "pinned"])


@pytest.fixture
def old_run(tmp_path):
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run_of_format_2"


def loss(params, activations, batch):
    return (activations["item"].sum(-1) + params["bias"] - batch.label) ** 2


TASK = jaxrec.Task(SPEC, loss, DENSE, ROWS)


def batch(index):
    draw = np.random.default_rng(index)
    ids = {"item": draw.integers(0, 12, 4).astype(np.int32)}
    return jaxrec.Batch(ids, draw.random(4, np.float32))


def fresh(home):
    return TASK.init({"bias": jnp.zeros(())}, tables_in(home, SPEC, ROWS))


def found(state):
    """The arrays of a state under the names of restored.npz."""
    rows = state.tables.parts("width_2")
    dense = {"bias": state.dense.params["bias"], "trace": state.dense.opt_state[0].trace["bias"]}
    shards = {f"{part}_{shard}": rows[part][shard] for part in rows for shard in range(2)}
    return {"step": state.dense.step} | dense | shards


@HOMES
def test_a_run_of_before_the_engines_restores_value_for_value(old_run, home):
    state, image = restore(old_run, fresh(home))
    wanted = dict(np.load(old_run / "restored.npz"))
    mine = found(state)
    assert mine.keys() == wanted.keys() and image.step == 6 and image.format == 2
    assert all(np.array_equal(mine[name], wanted[name]) for name in wanted)
    assert not all(np.array_equal(found(fresh(home))[name], wanted[name]) for name in wanted)  # negative control


@HOMES
def test_a_shard_of_it_comes_back_alone(old_run, home):
    wanted = dict(np.load(old_run / "restored.npz"))
    tables, read = restore_shards(newest(old_run), fresh(home).tables, [1])
    assert [image.step for image in read] == [2, 4, 6]
    mine = tables.parts("width_2")
    assert all(np.array_equal(mine[part][1], wanted[f"{part}_1"]) for part in mine)


@pytest.mark.parametrize("engine_of", [
    functools.partial(Serial, TASK),
    functools.partial(Pipeline, TASK, window=2),
], ids=["serial", "pipeline"])  # fmt: skip
def test_it_goes_on_in_its_directory_with_its_figures(old_run, engine_of):
    state, image = restore(old_run, fresh("host"))
    recovery = Recovery(old_run, 4, 20, scheme=mfu(), fraction=0.5, image=image)
    with engine_of(state, [recovery]) as engine:
        before = image.extra["cpr"]
        assert (recovery.saves, recovery.rows_saved) == (before["saves"], before["rows_saved"]) and recovery.saves > 0
        engine.train(map(batch, range(6, 12)))
        recovery.recover([0])
        assert recovery.saves > before["saves"] and np.isfinite(engine.state.dense.params["bias"]).all()
    assert restore(old_run, fresh("host"))[1].step == 12


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda body: body | {"format": 1}, "format 1"),
        (lambda body: body | {"format": 3}, "format 3"),
        (lambda body: body | {"later": 5}, r"format 2, with \['later'\]"),
        (lambda body: {key: body[key] for key in body if key != "scales"}, r"format 2, without \['scales'\]"),
        (lambda body: {}, r"format None, without \['dense'.*\]"),
    ],
)
def test_an_image_of_another_format_is_refused_by_it_with_the_way_to_convert_and_stays(old_run, change, told):
    """An older and a newer format, and other fields, through every function that reads images."""
    for path in [*images(old_run), *deltas(old_run)]:
        body = json.dumps(change(json.loads((path / "manifest.json").read_bytes().split(b"\n")[0])))
        digest = hashlib.sha256(body.encode()).hexdigest()
        (path / "manifest.json").write_text(f"{body}\n{digest}\n")
    files = sorted(old_run.rglob("*"))
    for act in (
        lambda: restore(old_run, fresh("host")),
        lambda: restore(images(old_run)[0], fresh("host")),
        lambda: restore_shards(deltas(old_run)[0], fresh("host").tables, [0]),
        lambda: Serial(TASK, fresh("host"), [Recovery(old_run, 4, 20)]).__enter__(),
    ):
        with pytest.raises(ValueError, match=f"{told}, and this version of jaxrec reads format 2: go on with"):
            act()
    assert sorted(old_run.rglob("*")) == files


@pytest.mark.parametrize("content", ["[]", "{}", "3", "{"])
def test_the_run_id_of_another_version_is_refused_with_the_way_out(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run.json is damaged, or of another version .*: remove it"):
        Checkpointer(tmp_path)
    (tmp_path / "run.json").unlink()
    Checkpointer(tmp_path).close()
