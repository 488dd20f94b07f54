"""A shard is restored bit for bit from base and deltas; damage, deletion and a full disk lose nothing."""

import errno
import os
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from homes import each_part, every_row, tables_in
from hypothesis import example, given, settings
from hypothesis import strategies as st
from in_process_servers import remote
from strategies import chosen, examples, small_spec

from jaxrec.checkpoint import (
    Checkpointer,
    DamagedImage,
    RowCheckpointer,
    chain,
    deltas,
    images,
    newest,
    restore,
    restore_shards,
    snapshot,
    write_image,
)  # fmt: skip
from jaxrec.checkpoint.row_deltas import compact
from jaxrec.embedding import HostTables, rowwise_adagrad, sgd
from jaxrec.embedding.tables import initial_rows
from jaxrec.sharding import make_mesh
from jaxrec.types import DenseState, TrainState

ROWS = rowwise_adagrad(0.1)
HOMES = {"host": ("host", 1), "device": ("device", 1), "device4": ("device", 4), "pinned4": ("pinned", 4)}


def initial(spec):
    parts = every_row(HostTables.create(spec, ROWS))
    row = np.arange(spec.stacks["width_4"].rows)
    expected = initial_rows(row, 4, spec.row_scale("width_4", row), spec.seed)
    np.testing.assert_array_equal(parts["width_4", "value"], expected)
    return parts


def draw_rows(spec, seed, most=12):
    """Random rows of random shards."""
    rng = np.random.default_rng(seed)
    rows = {}
    for name, stack in spec.stacks.items():
        for shard in range(spec.shards):
            mine = np.arange(shard, stack.rows, spec.shards)
            rows[name, shard] = rng.choice(mine, min(len(mine), rng.integers(0, most)), replace=False).astype(np.int32)
    return rows


def save_rows(directory, base, rows, tables, step):
    """Save a delta over a base; return its path, or the base if there is nothing to save."""
    with RowCheckpointer(directory, base) as saver:
        saver.save(tables, rows, step)
        saver.wait()
        return saver.newest()


def random_tables(home, spec, seed):
    kind, devices = HOMES[home]
    rng = np.random.default_rng(seed)
    tables = tables_in(kind, spec, ROWS, make_mesh(devices=jax.devices()[:devices]))
    if tables.hosted:
        for _, array in each_part(tables):
            array[:] = rng.standard_normal(array.shape)
        return tables
    return jax.tree.map(lambda x: jax.device_put(rng.standard_normal(x.shape, np.float32), x.sharding), tables)


class Saved:
    """A run that saves rows, with the expected saved value of every row."""

    def __init__(self, directory, home="host", base=True, shards=8):
        self.directory, self.home, self.spec = directory, home, small_spec(shards)
        self.expected, self.path = initial(self.spec), None
        if base:
            state = self.state(0)
            self.path = directory / "step_00000000"
            write_image(self.path, snapshot(state))
            self.expected = every_row(state.tables)

    def state(self, step):
        """Random rows at the given step, and an empty dense state."""
        return TrainState(DenseState(np.int32(step), {}, {}), random_tables(self.home, self.spec, step))

    def note(self, tables, rows):
        now = every_row(tables)
        for (name, _), ids in rows.items():
            for part in (part for stack, part in now if stack == name):
                self.expected[name, part][ids] = now[name, part][ids]

    def save(self, step):
        tables, rows = self.state(step).tables, draw_rows(self.spec, step)
        self.path = save_rows(self.directory, self.path, rows, tables, step)
        self.note(tables, rows)

    def check(self, path=None, home="host", shards=None):
        """Restores shards one by one: each equals its image bit for bit, and all others are unchanged."""
        for shard in range(self.spec.shards) if shards is None else shards:
            tables = random_tables(home, self.spec, 99)
            before = every_row(tables)
            tables, _ = restore_shards(path or self.path, tables, [shard])
            for key, rows in every_row(tables).items():
                mine = np.arange(len(rows)) % self.spec.shards == shard
                np.testing.assert_array_equal(rows[mine], self.expected[key][mine])
                np.testing.assert_array_equal(rows[~mine], before[key][~mine])


WAYS = [("host", "host"), ("host", "device4"), ("device4", "host"), ("device", "device"), ("pinned4", "pinned4")]


@pytest.mark.parametrize(
    ("home", "target", "base"),
    chosen([(*way, base) for way in WAYS for base in (True, False)], lambda home, target, base: base or target == home),
)
def test_one_shard_comes_back_bit_for_bit(tmp_path, home, target, base):
    run = Saved(tmp_path, home, base)
    for step in range(1, 4):
        run.save(step)
    run.check(home=target, shards=(0, 5))
    assert newest(tmp_path) == run.path
    run.check(tmp_path, target, shards=(7,))  # the newest chain of a directory
    assert [image.step for image in chain(run.path)] == ([0] if base else []) + [1, 2, 3]


def dense_of(step):
    return DenseState(np.int32(step), {"w": np.full(3, step, np.float32)}, ())


@settings(max_examples=examples(3, 6))
@given(shards=st.sampled_from([1, 3, 8]), steps=st.integers(0, 4), base=st.booleans(), most=st.integers(1, 3))
@example(shards=3, steps=3, base=True, most=2)
def test_chains_and_their_compaction(tmp_path_factory, shards, steps, base, most):
    """A merged delta has the newest value of each row, and the newest dense state."""
    run = Saved(tmp_path_factory.mktemp("chain"), base=base, shards=shards)
    with RowCheckpointer(run.directory, run.path, most_deltas=most) as saver:
        for step in range(1, steps + 1):
            tables, rows = run.state(step).tables, draw_rows(run.spec, step)
            assert saver.save(tables, rows, step, dense=dense_of(step)) >= 0
            run.note(tables, rows)
            saver.wait()
            assert len(deltas(run.directory)) <= most
        found = saver.newest()
        run.path = found
        tables = random_tables("host", run.spec, 5)
        restored = [restore_shards(found, tables, [shard])[1] for shard in range(shards)]
    assert all([image.path for image in read] == [image.path for image in restored[0]] for read in restored)
    for key, rows in every_row(tables).items():
        np.testing.assert_array_equal(rows, run.expected[key])
    if steps and found:
        before = every_row(tables)
        merged = compact(found).path
        tables = random_tables("host", run.spec, 6)
        for shard in range(shards):
            restore_shards(merged, tables, [shard])
        assert all((before[key] == rows).all() for key, rows in every_row(tables).items())
        assert len(chain(merged)) == base + 1 and not list(run.directory.glob("*.partial"))
        state, _ = restore(merged, TrainState(dense_of(0), HostTables.create(run.spec, ROWS)))
        assert (state.dense.params["w"] == steps).all() and state.dense.step == steps


@pytest.mark.parametrize("base", [True, False])
@pytest.mark.parametrize("written", [False, True], ids=["a successor's initial rows", "rows that were written"])
@pytest.mark.parametrize("shards_at_once", [1, 2, 8])
def test_servers_restore_several_shards_where_they_lie_or_leave_them_as_they_were(
    tmp_path, base, written, shards_at_once, monkeypatch
):
    run = Saved(tmp_path, base=base)
    for step in (1, 2):
        run.save(step)
    tables = remote(run.spec, ROWS, 2)
    floats = {name: sum(part.width for part in parts.values()) for name, parts in tables.layout.items()}
    shard_bytes = sum(4 * floats[name] * stack.rows_per_shard for name, stack in run.spec.stacks.items())
    module = sys.modules["jaxrec.checkpoint.restore"]  # shadowed by a function
    monkeypatch.setattr(module, "_GROUP_BYTES", shards_at_once * shard_bytes)
    if written:
        other = random_tables("host", run.spec, 7)
        for name in run.spec.stacks:
            for shard in range(run.spec.shards):
                tables.with_shard(name, shard, {part: rows[shard] for part, rows in other.parts(name).items()})

    def check(shards):
        now = every_row(tables)
        for key, rows in now.items():
            mine = np.isin(np.arange(len(rows)) % run.spec.shards, shards)
            np.testing.assert_array_equal(rows[mine], run.expected[key][mine])
            np.testing.assert_array_equal(rows[~mine], before[key][~mine])
        return now

    before = every_row(tables)
    _, read = restore_shards(run.path, tables, [6, 1, 4])
    assert [image.step for image in read] == ([0] if base else []) + [1, 2]
    before = check([1, 4, 6])
    damaged = max(
        (run.path / "arrays.0000" / "rows.width_4.0003.value").rglob("*"), key=lambda file: file.stat().st_size
    )
    damaged.write_bytes(damaged.read_bytes()[::-1])
    with pytest.raises(DamagedImage, match=r"rows.width_4.0003.value.* is damaged"):
        restore_shards(run.path, tables, [5, 3])  # two shards of one server
    check([])
    restore_shards(run.path, tables, [5])  # the files of this shard are intact
    before = check([5])
    if not base:
        run.expected = initial(run.spec)
        restore_shards(None, tables, [1, 5])
        check([1, 5])


def test_the_order_of_deltas_matters(tmp_path):
    """Negative control: the same deltas in another order give other rows."""
    run = Saved(tmp_path / "run", base=False)
    for step in (1, 2, 3):
        run.save(step)
    for order, same in (((1, 2, 3), True), ((3, 2, 1), False)):
        path, directory = None, tmp_path / f"beginning_with_{order[0]}"
        for number, step in enumerate(order, 1):
            path = save_rows(directory, path, draw_rows(run.spec, step), run.state(step).tables, number)
        tables, _ = restore_shards(path, HostTables.create(run.spec, ROWS), [2])
        rows, expected = every_row(tables)["width_4", "value"], run.expected["width_4", "value"]
        assert (rows[2::8] == expected[2::8]).all() == same


def test_a_delta_holds_the_rows_of_the_moment_it_was_taken(tmp_path):
    run = Saved(tmp_path, base=False)
    tables, rows = run.state(1).tables, draw_rows(run.spec, 1)
    run.note(tables, rows)
    with RowCheckpointer(tmp_path) as saver:
        saver.save(tables, rows, 1)
        for shards in tables.shards.values():
            for parts in shards:
                parts["value"][:] = -1
        for ids in rows.values():
            ids[:] = -1
    assert saver.done() and saver.stall_seconds > 0
    run.check(saver.newest(), shards=(1, 6))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A base and three deltas."""
    run = Saved(tmp_path_factory.mktemp("four"), shards=2)
    for step in (1, 2, 3):
        run.save(step)
    return run


def test_a_flipped_bit_is_found_and_changes_nothing(four, tmp_path):
    directory, rng = shutil.copytree(four.directory, tmp_path / "copy"), np.random.default_rng(0)
    files = [file for file in sorted(directory.glob("*/**/*")) if file.is_file() and "dense." not in str(file)]
    for file in [files[i] for i in rng.choice(len(files), 24, replace=False)] + sorted(
        directory.glob("*/manifest.json")
    ):
        content = file.read_bytes()
        place = int(rng.integers(len(content)))
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << int(rng.integers(8))]) + content[place + 1 :])
        tables = random_tables("host", four.spec, 9)
        before = every_row(tables)
        with pytest.raises(ValueError, match="damaged|no readable manifest") as caught:
            for shard in range(2):
                restore_shards(directory / four.path.name, tables, [shard])
        damaged = file.relative_to(directory).parts[0]
        assert damaged in str(caught.value)
        now = every_row(tables)
        for key in now:  # the first shard may be intact
            assert (now[key][1::2] == before[key][1::2]).all()
        file.write_bytes(content)
    four.check(directory / four.path.name)


@pytest.mark.parametrize("lost", ["step_00000000", "delta_000001", "delta_000002", "delta_000003"])
def test_a_deleted_image_is_named(four, tmp_path, lost):
    directory = shutil.copytree(four.directory, tmp_path / "copy")
    shutil.rmtree(directory / lost)
    for act in (lambda tip: restore_shards(tip, random_tables("host", four.spec, 0), [1]), compact):
        with pytest.raises(DamagedImage, match=f"{lost} has no readable manifest"):
            act(directory / "delta_000003")


def test_a_full_disk_is_told_and_tried_again_and_loses_nothing(tmp_path, monkeypatch):
    run = Saved(tmp_path)
    run.save(1)
    saver = RowCheckpointer(tmp_path, run.path)
    tables, rows = run.state(2).tables, draw_rows(run.spec, 2)
    for name, error in (("fsync", errno.ENOSPC), ("rename", errno.EROFS)):

        def fail(*args, error=error):
            raise OSError(error, os.strerror(error))

        with monkeypatch.context() as patched:
            patched.setattr(os, name, fail)
            saver.save(tables, rows, 2)
            with pytest.raises(OSError, match=os.strerror(error)):
                saver.wait()
            saver.save(tables, rows, 2)
            with pytest.warns(UserWarning, match=f"a save failed, and the next one tries again.*{os.strerror(error)}"):
                saver.save(tables, rows, 2)
            with pytest.raises(OSError, match=os.strerror(error)):
                saver.wait()
            assert len(saver.failures) == 3 * (1 + (name == "rename"))
        assert saver.newest() == run.path and not list(tmp_path.glob("*.partial"))
        run.check(tmp_path, shards=(2,))
    saver.save(tables, rows, 2)
    run.note(tables, rows)
    saver.wait()
    run.check(saver.newest(), shards=(2, 3))


@pytest.mark.parametrize("failing", ["compact", "remove_directory"])
def test_a_merge_that_fails_leaves_a_longer_chain_and_a_save_that_has_not_failed(tmp_path, monkeypatch, failing):
    run = Saved(tmp_path)

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RowCheckpointer(tmp_path, run.path, most_deltas=2) as saver:
        for step in range(1, 7):
            tables, rows = run.state(step).tables, draw_rows(run.spec, step)
            run.note(tables, rows)
            with monkeypatch.context() as patched:
                if step in (3, 4, 5):
                    patched.setattr(f"jaxrec.checkpoint.row_deltas.{failing}", fail)
                    with pytest.warns(UserWarning, match="could not be merged or removed.*No space left"):
                        saver.save(tables, rows, step)
                        assert saver.settle()
                else:
                    saver.save(tables, rows, step)
                    assert saver.settle()
            run.check(saver.newest(), shards=(1, 6))
        assert not saver.failures and len(deltas(tmp_path)) <= 2


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    run = Saved(tmp_path, base=False)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        save_rows(tmp_path / "file" / "below", None, draw_rows(run.spec, 1), run.state(1).tables, 1)

    def fail(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    saver = RowCheckpointer(tmp_path)
    monkeypatch.setattr(Path, "mkdir", fail)
    saver.save(run.state(1).tables, draw_rows(run.spec, 1), 1)
    with pytest.raises(OSError, match="Read-only"):
        saver.close()
    with pytest.raises(OSError, match="Read-only"):
        RowCheckpointer(tmp_path / "new")


@pytest.mark.parametrize(
    ("key", "ids", "message"),
    [
        (("width_4", 3), [3, 12], "rows of width_4 for shard 3 run from 3 to 12: .* r % 8 == 3"),
        (("width_4", 3), [3, 43], "0 <= r < 40"),
        (("width_4", 0), [-8], "from -8 to -8"),
        (("width_4", 8), [8], "shards 0 to 7"),
        (("width_9", 0), [8], "stacks are .'width_4', 'width_1'"),
    ],
)
def test_rows_of_another_shard_are_refused(tmp_path, key, ids, message):
    run = Saved(tmp_path, base=False)
    with pytest.raises(ValueError, match=message):
        save_rows(tmp_path, None, {key: np.array(ids)}, run.state(1).tables, 1)
    assert not deltas(tmp_path)


def test_what_does_not_fit_is_refused(four, tmp_path):
    tables = random_tables("host", four.spec, 0)
    with pytest.raises(ValueError, match="shard=2 must be a whole number from 0 to 1"):
        restore_shards(four.path, tables, [2])
    with pytest.raises(ValueError, match="other spec"):
        restore_shards(four.path, random_tables("host", small_spec(8), 0), [1])
    with pytest.raises(ValueError, match="other row optimizer slots"):
        restore_shards(four.path, HostTables.create(four.spec, sgd(0.1)), [1])
    with pytest.raises(ValueError, match="must lie in"):
        save_rows(tmp_path, four.path, {}, tables, 1)
    assert save_rows(four.directory, four.path, {}, tables, 9) == four.path  # nothing to save


def test_a_base_stays_while_deltas_need_it_and_a_new_one_takes_over(tmp_path):
    run = Saved(tmp_path, base=False)
    with Checkpointer(tmp_path, keep=1) as whole:
        whole.save(run.state(1))
        whole.wait()
        with RowCheckpointer(tmp_path, newest(tmp_path)) as small:
            assert small.run == whole.run
            small.save(run.state(2).tables, draw_rows(run.spec, 2), 2)
            small.wait()
            assert newest(tmp_path) == small.newest()
            whole.save(run.state(2))
            whole.wait()
            assert newest(tmp_path) == images(tmp_path)[0]  # before the delta of its step
            whole.save(run.state(3))
            whole.wait()
            assert [path.name for path in images(tmp_path)] == ["step_00000003", "step_00000001"]
            assert newest(tmp_path) == images(tmp_path)[0]
            small.restart(images(tmp_path)[0])
            assert not deltas(tmp_path)
            small.save(run.state(4).tables, draw_rows(run.spec, 4), 4)
            small.wait()
        assert [image.path.name for image in chain(small.newest())] == ["step_00000003", "delta_000001"]
        run.expected = every_row(run.state(3).tables)
        run.note(run.state(4).tables, draw_rows(run.spec, 4))
        run.check(small.newest(), shards=(0, 4))


@pytest.mark.parametrize(
    ("file", "content"),
    [("delta_000001/manifest.json", "cut"), *(("chain.json", content) for content in ("[", "3", "{}", "[]"))],
)
def test_no_image_is_removed_while_nobody_can_tell_which_ones_deltas_need(tmp_path, file, content):
    run = Saved(tmp_path)
    run.save(1)
    of_run = chain(run.path)[-1].run
    (tmp_path / file).write_text(content)
    with Checkpointer(tmp_path, keep=1, run=of_run) as whole:
        for step in (2, 3):
            whole.save(run.state(step))
            whole.wait()
    assert [path.name for path in images(tmp_path)] == ["step_00000003", "step_00000002", "step_00000000"]


def test_a_base_that_is_gone_is_not_saved_over(tmp_path):
    run = Saved(tmp_path)
    saver = RowCheckpointer(tmp_path, run.path)
    shutil.rmtree(run.path)
    saver.save(run.state(1).tables, draw_rows(run.spec, 1), 1)
    with pytest.raises(ValueError, match="step_00000000.* are gone.*save a whole image"):
        saver.wait()
