"""Images, row deltas and recovery: damaged, mixed up, misplaced, interrupted, out of space."""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from threads import interrupt_when, is_inside, until

from abuse import refused, situation
from jaxrec import Batch, Serial
from jaxrec.checkpoint import (
    Checkpointer,
    DamagedImage,
    RowCheckpointer,
    chain,
    deltas,
    images,
    newest,
    newest_first,
    read_manifest,
    restore,
    restore_shards,
    snapshot,
    write_image,
)
from jaxrec.cpr import Recovery, RolledBack, mfu, round_robin, ssu
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad, sgd
from jaxrec.types import DenseState, TrainState

SPEC = EmbeddingSpec({"t": Table(8, 2)}, {"t": Lookup("t")}, shards=2)
OTHER = EmbeddingSpec({"t": Table(8, 2)}, {"t": Lookup("t")}, shards=2, seed=1)
ROWS = adagrad(0.1)


def state_of(step=0, fill=None, params=None, spec=SPEC):
    """Host tables whose rows and slots all equal the step, and a small dense state."""
    tables = HostTables.create(spec, ROWS)
    for shard in tables.shards["width_2"]:
        for array in shard.values() if step or fill is not None else ():
            array[:] = step if fill is None else fill
    params = {"w": jnp.full((1, 2), float(step))} if params is None else params
    return TrainState(DenseState(jnp.asarray(step, jnp.int32), params, ()), tables)


def save(directory, step, run="run", **more):
    path = directory / f"step_{step:08d}"
    write_image(path, snapshot(state_of(step, **more), run=run))
    return path


def save_delta(directory, base, step, rows=(0, 1)):
    """Save a delta of some rows, all equal to the step."""
    ids = {("width_2", shard): np.array([row for row in rows if row % 2 == shard], np.int32) for shard in (0, 1)}
    with RowCheckpointer(directory, base) as saver:
        saver.save(state_of(step).tables, ids, step)
        saver.wait()
        return saver.newest()


def damage(path, part="value"):
    """Change one byte of the rows of the last shard of an image."""
    file = max(
        file for file in path.rglob("*") if file.is_file() and f".0001.{part}" in str(file) and file.name[0] != "."
    )
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def value(state, row):
    return float(state.tables.shards["width_2"][row % 2]["value"][row // 2, 0])


def take_its_number(state, batch, plans):
    """A training step that sets every row to the number of the step."""
    step = int(state.dense.step) + 1
    fresh = state_of(step, spec=state.tables.spec)
    for mine, new in zip(state.tables.shards["width_2"], fresh.tables.shards["width_2"], strict=True):
        for part, array in new.items():
            mine[part][:] = array
    return state._replace(dense=fresh.dense), {"loss": np.float32(0)}


TASK = types.SimpleNamespace(step=take_its_number)


def recovery_of(directory, **more):
    # The end of a block stands for the death of the process.
    return Recovery(directory, **({"save_every_steps": 4, "total_steps": 100, "save_at_end": False} | more))


@contextlib.contextmanager
def recovering(directory, state=None, **more):
    """An engine and its recovery."""
    recovery = recovery_of(directory, **more)
    with Serial(TASK, state or state_of(), [recovery]) as engine:
        yield engine, recovery


def train_to(engine, recovery, *steps, saves=True):
    """Train up to each step in turn with batches that touch every row, and wait until its save is on disk."""
    batch = Batch({"t": np.arange(8)}, np.ones(8, np.float32))
    for step in steps:
        engine.train(lambda done, step=step: [batch] * (step - done))
        until(lambda step=step: not saves or is_saved(recovery.directory, step))


def is_saved(directory, step):
    """Whether an image of a step is on disk; False while another image is being removed."""
    try:
        return step in [read_manifest(path).step for path in newest_first(directory)]
    except DamagedImage:
        return False


def untouched(directory):
    """The files of a directory and their contents, to compare with later."""
    return {str(file): file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()}


# ---- runs


@situation("images of another run in the directory", ValueError, "holds step_00000003 of run run, and this is run ")
def _(directory):
    save(directory, 3)
    Checkpointer(directory)


@situation("row deltas of another run in the directory", ValueError, "of run run, and this is run other")
def _(directory):
    save_delta(directory, save(directory, 3), 4)
    shutil.rmtree(directory / "step_00000003")
    RowCheckpointer(directory, run="other")


@situation("a second writer of images", ValueError, "images.lock is locked: another process is saving images in it")
def _(directory):
    with Checkpointer(directory) as first:
        first.save(state_of(1))
        Checkpointer(directory, run=first.run)


@situation("a base of another run with the same name", DamagedImage, "not the image that delta_000001 was saved over")
def _(directory):
    delta = save_delta(directory, save(directory, 3), 4)
    shutil.rmtree(directory / "step_00000003")
    save(directory, 3, run="other", fill=9)
    restore_shards(delta, state_of().tables, [0])


@situation("a delta of another run in the middle of a chain", DamagedImage, "not the image that delta_000002 was saved")
def _(directory):
    base = save(directory, 3)
    last = save_delta(directory, save_delta(directory, base, 4), 5)
    shutil.rmtree(directory / "delta_000001")
    other = save_delta(directory / "other", save(directory / "other", 3), 8)
    shutil.move(other, directory / "delta_000001")
    chain(last)


@situation("saving at a step before an image that is whole", ValueError, "whole and of a later step than 5")
def _(directory):
    save(directory, 9)
    with Checkpointer(directory, run="run") as checkpointer:
        checkpointer.save(state_of(5))


@situation("saving at a step before an image that is damaged")
def _(directory):
    damage(save(directory, 9))
    with Checkpointer(directory, run="run", keep=1) as checkpointer:
        checkpointer.save(state_of(5))
    assert [path.name for path in images(directory)] == ["step_00000005"]
    assert (directory / "step_00000009.damaged").is_dir()  # damaged images are kept


@situation("deltas in the directory that a new saver of rows does not know", ValueError, "is newer than initial rows")
def _(directory):
    delta = save_delta(directory, None, 4)
    try:
        RowCheckpointer(directory, run=read_manifest(delta).run)
    finally:
        assert deltas(directory)


@situation("deltas newer than the base that a saver of rows is given", ValueError, "is newer than step_00000003")
def _(directory):
    base = save(directory, 3)
    save_delta(directory, base, 4)
    try:
        RowCheckpointer(directory, base)
    finally:
        assert deltas(directory)


# ---- paths


@situation("s3:// as the directory of a checkpointer", ValueError, "object stores are not supported")
def _(directory):
    before = os.getcwd()
    os.chdir(directory)
    try:
        Checkpointer("s3://bucket/run")
    finally:
        os.chdir(before)
        assert not list(directory.iterdir())  # no directory named s3:


@situation("a relative directory, and os.chdir before the save")
def _(directory):
    before = os.getcwd()
    (directory / "elsewhere").mkdir()
    try:
        os.chdir(directory)
        checkpointer = Checkpointer("run")
        os.chdir("elsewhere")
        checkpointer.save(state_of(3))
        checkpointer.close()
    finally:
        os.chdir(before)
    assert [path.name for path in images(directory / "run")] == ["step_00000003"]


@situation("a directory without images to restore from", ValueError, "holds no image of a whole state")
def _(directory):
    restore(directory, state_of())


@situation("a shard from a directory without images", ValueError, "holds no image: give the directory of a run")
def _(directory):
    tables = state_of(5).tables
    try:
        restore_shards(directory, tables, [0])
    finally:
        assert (tables.shards["width_2"][0]["value"] == 5).all()


@situation("an image of a step beyond 8 digits is the newest one")
def _(directory):
    for step in (99_999_999, 100_000_000):
        save(directory, step)
    assert images(directory)[0].name == "step_100000000"
    damage(directory / "step_100000000")
    with pytest.warns(UserWarning, match="skipped what is damaged: .*step_100000000"):
        assert restore(directory, state_of())[1].step == 99_999_999


# ---- damage


@situation("the newest of several images is damaged: a directory stands for the newest whole one")
def _(directory):
    for step in (3, 6, 9):
        save(directory, step)
    damage(directory / "step_00000009")
    with pytest.warns(UserWarning, match="skipped what is damaged: .*step_00000009"):
        state, image = restore(directory, state_of())
    assert image.step == 6 and value(state, 5) == 6


@situation("every image of a directory is damaged", DamagedImage, "every image in .* is damaged")
def _(directory):
    template = state_of(7)
    for step in (3, 6):
        damage(save(directory, step))
    try:
        restore(directory, template)
    finally:
        assert value(template, 1) == 7


@situation("an image without a manifest beside a whole one")
def _(directory):
    save(directory, 3)
    (save(directory, 6) / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="step_00000006 has no readable manifest"):
        assert restore(directory, state_of())[1].step == 3


@situation("a damaged image of the step to be saved is replaced")
def _(directory):
    damage(save(directory, 3))
    with Checkpointer(directory, run="run") as checkpointer:
        checkpointer.save(state_of(3))
    assert restore(directory, state_of())[1].step == 3 and not list(directory.glob("*.damaged"))


@situation("a whole image of the step to be saved is left as it is")
def _(directory):
    save(directory, 3)
    before = untouched(directory)
    with Checkpointer(directory, run="run") as checkpointer:
        checkpointer.save(state_of(3, fill=8))
    after = untouched(directory)
    assert all(after[name] == before[name] for name in before)


@contextlib.contextmanager
def while_replaced(path, act):
    """Call `act` whenever an image has moved aside, right before the new one gets its name."""
    rename = os.rename

    def watched(source, target):
        if (Path(source).suffix, Path(target)) == (".partial", path) and not path.exists():
            act()
        rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", watched)
        yield


def die():
    raise SystemExit


@situation("a save that ends right before the image that it replaces has its successor: the image stays")
def _(directory):
    path, new = save(directory, 3), snapshot(state_of(3, fill=8), run="run")
    with while_replaced(path, die), pytest.raises(SystemExit):
        write_image(path, new, replace=True)
    assert not path.exists()  # as after kill -9
    state, image = restore(directory, state_of())
    assert image.path == path and value(state, 1) == 3
    with while_replaced(path, die), pytest.raises(SystemExit):
        write_image(path, new, replace=True)
    with Checkpointer(directory, run="run"):
        assert images(directory) == [path] and not list(directory.glob("*.replaced"))


@situation("an image is replaced while another process lists the directory")
def _(directory):
    path, listed = save(directory, 3), []
    with while_replaced(path, lambda: listed or listed.append(images(directory))):
        write_image(path, snapshot(state_of(3, fill=8), run="run"), replace=True)
    assert listed == [[path]] and value(restore(directory, state_of())[0], 1) == 8


@situation("an image whose successor is there is removed when the next saver begins, and does not return")
def _(directory):
    path = save(directory, 3)
    old = shutil.copytree(path, path.with_suffix(".replaced"))
    assert images(directory) == [path] and old.exists()
    with Checkpointer(directory, run="run"):
        assert not old.exists() and images(directory) == [path]


@situation("a partial image of a save that was killed goes when the next saver begins")
def _(directory):
    (directory / "step_00000003.partial" / "arrays.0000").mkdir(parents=True)
    (directory / "delta_000001.partial").mkdir()
    Checkpointer(directory).close()
    RowCheckpointer(directory).close()
    assert sorted(path.name for path in directory.iterdir()) == ["images.lock", "rows.lock", "run.json"]


@situation("a delta whose manifest cannot be read for a moment keeps its base")
def _(directory):
    base = save(directory, 1)
    manifest = save_delta(directory, base, 2) / "manifest.json"
    with Checkpointer(directory, keep=1, run="run") as checkpointer:
        content = manifest.read_bytes()
        manifest.write_bytes(b"")
        checkpointer.save(state_of(3))
        checkpointer.wait()
        manifest.write_bytes(content)
    assert base in images(directory)
    restore_shards(directory / "delta_000001", state_of().tables, [1])


@situation("a base is kept for a saver of rows that has not saved anything yet")
def _(directory):
    with Checkpointer(directory, keep=1) as whole:
        whole.save(state_of(1))
        whole.wait()
        with RowCheckpointer(directory, newest(directory)) as rows:
            whole.save(state_of(2))
            whole.wait()
            rows.save(state_of(3).tables, {("width_2", 0): np.array([0, 2], np.int32)}, 3)
    assert [image.path.name for image in chain(rows.newest())] == ["step_00000001", "delta_000001"]


# ---- mismatches


@situation("an image of float32 parameters in a bfloat16 model", ValueError, "dense state.*float32.*wanted.*bfloat16")
def _(directory):
    save(directory, 3)
    restore(directory, state_of(params={"w": jnp.zeros((1, 2), jnp.bfloat16)}))


@situation("an image of one replica fills four")
def _(directory):
    save(directory, 3)
    state, _ = restore(directory, state_of(params={"w": jnp.zeros((4, 2))}))
    assert np.array_equal(state.dense.params["w"], np.full((4, 2), 3.0))


@situation("deltas over initial rows of another seed: a row that no delta holds has the initial value of its own run")
def _(directory):
    with RowCheckpointer(directory) as rows:
        rows.save(state_of(3).tables, {("width_2", 0): np.array([0], np.int32)}, 3, dense=state_of(3).dense)
    state, _ = restore(directory, state_of(spec=OTHER))
    assert value(state, 0) == 3 and value(state, 2) == value(state_of(), 2) != value(state_of(spec=OTHER), 2)


refused(
    {
        "without its dense state": lambda directory: restore(save_delta(directory, save(directory, 3), 4), state_of()),
        "copy='half' must be 'whole' or 'shards'": lambda directory: Checkpointer(directory, copy="half"),
    }
)


@situation("a Python number in the optimizer's state comes back as one")
def _(directory):
    params = {"w": jnp.ones((1, 2)), "count": 7, "rate": 0.5}
    save(directory, 3, params=params)
    state, _ = restore(directory, state_of(params={"w": jnp.zeros((1, 2)), "count": 0, "rate": 0.0}))
    assert state.dense.params["count"] == 7 and state.dense.params["rate"] == 0.5
    assert isinstance(state.dense.params["count"], int)


@situation("keys of another generator", ValueError, "other dense state")
def _(directory):
    save(directory, 3, params={"key": jax.random.split(jax.random.key(3), (1, 2))})
    other = jax.random.split(jax.random.key(3, impl="rbg"), (1, 2))
    restore(directory, state_of(params={"key": other}))


@situation("merging a chain with a damaged delta")
def _(directory):
    first = save_delta(directory, save(directory, 3), 4)
    last = save_delta(directory, first, 5)
    damage(first)
    with RowCheckpointer(directory, last, most_deltas=2) as saver:
        with pytest.warns(UserWarning, match="cannot be merged: .* is damaged"):
            saver.save(state_of(6).tables, {("width_2", 0): np.array([0], np.int32)}, 6)
            saver.wait()
        assert saver.damaged and len(deltas(directory)) == 3


# ---- recovery


@situation("a base that cannot be written when a recovery begins", OSError, "No space left on device")
def _(directory):
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=10)
    try:
        with recovering(directory, mode="full"):
            pass
    finally:
        shutil.disk_usage = usage


@situation("a run that goes on from an image of another directory", ValueError, "must lie in")
def _(directory):
    image = read_manifest(save(directory / "a", 3))
    with recovering(directory / "b", state_of(3), image=image):
        pass


@situation(
    "a run that goes on from an image, with a state of another step", ValueError, "must be what `restore` return"
)
def _(directory):
    image = read_manifest(save(directory, 3))
    with recovering(directory, state_of(4), image=image):
        pass


@situation("the newest image of a vanilla recovery is damaged: the one before it is used, and its step counts")
def _(directory):
    with recovering(directory) as (engine, recovery):
        train_to(engine, recovery, 4, 8)
        damage(directory / "step_00000008")
        train_to(engine, recovery, 9, saves=False)
        with pytest.warns(UserWarning, match="skipped what is damaged: .*step_00000008"):
            recovery.recover([1])
        assert value(engine.state, 1) == 4 and value(engine.state, 0) == 9
        assert recovery.pls == pytest.approx((9 - 4) / (100 * 2))
        assert (directory / "step_00000008.damaged").is_dir()


@situation("the newest image of a full recovery is damaged: all goes back to the one before it")
def _(directory):
    with recovering(directory, mode="full") as (engine, recovery):
        train_to(engine, recovery, 4, 8)
        damage(directory / "step_00000008")
        train_to(engine, recovery, 9, saves=False)
        with pytest.raises(RolledBack) as back:
            recovery.recover([1])
        assert engine.step == 9 and value(engine.state, 3) == 9  # no rollback while a run may be active
        with pytest.warns(UserWarning, match="step_00000008"):
            back.value.go_back()
        assert engine.step == 4 and recovery.lost_steps == 5 and value(engine.state, 3) == 4


@situation("a damaged delta of a recovery: rows come from before it, and a whole image is saved over it")
def _(directory):
    with recovering(directory, scheme=mfu(), fraction=1.0) as (engine, recovery):
        train_to(engine, recovery, 4, 8)
        damage(deltas(directory)[0])
        train_to(engine, recovery, 9, saves=False)
        with pytest.warns(UserWarning, match="skipped what is damaged"):
            recovery.recover([1])
        assert value(engine.state, 1) == 4 and value(engine.state, 0) == 9
        assert recovery.pls == pytest.approx((9 - 4) / (100 * 2))
        assert [path.name for path in images(directory)] == ["step_00000009"] and not deltas(directory)
        train_to(engine, recovery, 10, saves=False)
        recovery.recover([0])  # restored from the whole image
        assert value(engine.state, 0) == 9


@situation(
    "a run that goes on from an image before a whole one, without a scheme", ValueError, "of a later step than 3"
)
def _(directory):
    older = read_manifest(save(directory, 3))
    save(directory, 6)
    with recovering(directory, state_of(3), image=older):
        pass


@situation("going on without a scheme from an image before a delta", ValueError, "is newer than step_00000003")
def _(directory):
    base = save(directory, 3)
    save_delta(directory, base, 6)
    before = untouched(directory)
    try:
        with recovering(directory, state_of(3), image=read_manifest(base)):
            pass
    finally:
        after = untouched(directory)
        assert all(after[name] == before[name] for name in before)


@situation("a warm start at step 0: its rows are no initial ones, and come back")
def _(directory):
    with recovering(directory, state_of(0, fill=7), scheme=mfu()) as (engine, recovery):
        for shard in engine.tables.shards["width_2"]:
            shard["value"][:] = 9
        recovery.recover([1])
        assert value(engine.state, 1) == 7 and value(engine.state, 0) == 9


@situation("a resume with another number of shards and another scheme")
def _(directory):
    with recovering(directory, scheme=mfu(), fraction=1.0) as (engine, recovery):
        train_to(engine, recovery, 4)
    for shards, scheme, step in ((4, ssu(), 8), (1, round_robin(), 12), (2, None, 16), (4, mfu(), 20)):
        spec = EmbeddingSpec({"t": Table(8, 2)}, {"t": Lookup("t")}, shards=shards)
        state, image = restore(directory, state_of(spec=spec))
        with recovering(directory, state, scheme=scheme, image=image) as (engine, recovery):
            train_to(engine, recovery, step)
            recovery.recover([0])
    assert restore(directory, state_of())[1].step == 20


@situation("one of two shards damaged in the only image: neither changes", DamagedImage, "is damaged")
def _(directory):
    with recovering(directory) as (engine, recovery):
        train_to(engine, recovery, 4)
        damage(directory / "step_00000004")  # its last shard
        train_to(engine, recovery, 5, saves=False)
        try:
            recovery.recover([0, 1])
        finally:
            assert value(engine.state, 0) == value(engine.state, 1) == 5 and recovery.pls == recovery.failed == 0


@situation("a reset to a step before the last save", ValueError, "whole and of a later step than 3")
def _(directory):
    with recovering(directory) as (engine, recovery):
        train_to(engine, recovery, 8)
        try:
            engine.reset(state_of(3, fill=9))
        finally:
            assert value(engine.state, 0) == engine.step == 8


@situation("the newest delta is damaged: what restore gives can be begun with, and is gone on from")
def _(directory):
    with recovering(directory, scheme=mfu(), fraction=1.0) as (engine, recovery):
        train_to(engine, recovery, 4, 8, 12)
    damage(deltas(directory)[1])
    with pytest.warns(UserWarning, match="skipped what is damaged"):
        state, image = restore(directory, state_of())
    assert image.step == 4
    with recovering(directory, state, scheme=mfu(), fraction=1.0, image=image) as (engine, recovery):
        train_to(engine, recovery, 8)
    assert restore(directory, state_of())[1].step == 8 and len(list(directory.glob("delta_*.damaged"))) == 2


@situation("what was lost is not counted again in the next life")
def _(directory):
    lost = []
    for life in range(4):
        state, image = state_of(), None
        if life:
            state, image = restore(directory, state)
        more = {"scheme": mfu(), "save_every_steps": 80, "fraction": 0.025}
        with recovering(directory, state, image=image, **more) as (engine, recovery):
            train_to(engine, recovery, 2 * life + 2)
        lost.append(recovery.pls)
    assert lost == pytest.approx([0, 2 / 100, 4 / 100, 6 / 100])


@situation("two savers of a fresh directory belong to one run")
def _(directory):
    with Checkpointer(directory) as whole, RowCheckpointer(directory) as rows:
        assert whole.run == rows.run
        whole.save(state_of(1))


@situation("a recovery whose entering was refused can be entered")
def _(directory):
    recovery = recovery_of(directory / "run", scheme=mfu())
    with RowCheckpointer(directory / "run"), pytest.raises(ValueError, match="is locked"):
        Serial(TASK, state_of(), [recovery]).__enter__()
    with Serial(TASK, state_of(), [recovery]):
        pass


@contextlib.contextmanager
def slow_writes(slow):
    """Replace the writer of whole images by slow(write_image, path, image, **options)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrec.checkpoint.checkpointer.write_image", functools.partial(slow, write_image))
        yield


@situation("Ctrl-C while a save is waited for: it goes on, is committed, and the lock is held until then")
def _(directory):
    running, go_on = threading.Event(), threading.Event()

    def slow(write, *given, **more):
        running.set()
        go_on.wait(60)
        return write(*given, **more)

    checkpointer = Checkpointer(directory)
    with slow_writes(slow):
        checkpointer.save(state_of(3))
        running.wait(60)
        for leave in (checkpointer.wait, checkpointer.close):
            with pytest.raises(KeyboardInterrupt):
                interrupt_when(lambda: is_inside(Checkpointer.wait))
                leave()
        with pytest.raises(ValueError, match="is locked"):
            Checkpointer(directory)
        go_on.set()
        checkpointer.wait()
    assert restore(directory, state_of())[1].step == 3
    with pytest.raises(ValueError, match="is closed"):
        checkpointer.save(state_of(4))


@situation("Ctrl-C in a save that is written from the tables themselves: it is not committed")
def _(directory):
    running = threading.Event()

    def slow(write, path, image, **more):
        def later():
            for number, piece in enumerate(image.later):
                yield piece
                if not number:
                    running.set()
                    threading.Event().wait(60)

        return write(path, image._replace(later=later()), **more)

    checkpointer = Checkpointer(directory, copy="shards")
    with slow_writes(slow):
        with pytest.raises(KeyboardInterrupt):
            interrupt_when(running.is_set)
            checkpointer.save(state_of(3))
    assert not images(directory) and not list(directory.glob("*.partial"))
    checkpointer.save(state_of(3))
    checkpointer.close()
    assert [path.name for path in images(directory)] == ["step_00000003"]


def _small_disk(command):
    """Command that runs a shell command where $DISK is a file system of 1 MB; skips where mounting is not allowed."""
    script = f'set -e; mount -t tmpfs -o size=1m none "$DISK"; {command}'
    allowed = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=1m none "$DISK"'], env=os.environ | {"DISK": "/mnt"},
        capture_output=True,
    )  # fmt: skip
    if allowed.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    return ["unshare", "-Urm", "sh", "-c", script]


def fill_a_real_disk(directory):
    """Fill a file system of 1 MB, in a process of its own: training continues, earlier saves stay complete."""
    spec = EmbeddingSpec({"t": Table(6000, 16)}, {"t": Lookup("t")}, shards=2)  # 400 kB an image
    state = TrainState(DenseState(np.int32(1), {}, ()), HostTables.create(spec, sgd(0.1)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        checkpointer = Checkpointer(directory, keep=1)
        for step in range(1, 3):
            checkpointer.save(state._replace(dense=DenseState(np.int32(step), {}, ())))
        checkpointer.wait()
        (directory / "other").write_bytes(bytes(500_000))
        for step in range(3, 5):
            checkpointer.save(state._replace(dense=DenseState(np.int32(step), {}, ())))
        assert checkpointer.settle() is False
        assert len(checkpointer.failures) == 2, (checkpointer.failures, shutil.disk_usage(directory))
        (directory / "other").unlink()
        checkpointer.save(state._replace(dense=DenseState(np.int32(5), {}, ())))
        checkpointer.close()
    assert [str(w.message).count("No space left on device") for w in said] == [1, 1], [str(w.message) for w in said]
    assert all("\n" not in str(w.message) for w in said)
    assert restore(directory, state)[1].step == 5 and not list(directory.glob("*.partial"))


@situation("a disk that is really full: one line, training goes on, the next save tries again", marks="process")
def _(directory):
    python = f"{sys.executable} -m abuse.images"
    here = Path(__file__).parent.parent
    environment = os.environ | {"DISK": str(directory), "PYTHONPATH": f"{here}:{here.parent}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(_small_disk(python), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("\n") < 3, done.stderr  # no tracebacks of threads


if __name__ == "__main__":
    fill_a_real_disk(Path(os.environ["DISK"]))
