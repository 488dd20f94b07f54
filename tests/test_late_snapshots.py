"""A snapshot whose save meets lost shards is saved again after their recovery: whole, at the run's current step."""

import functools
import threading
import traceback

import jax
import numpy as np
import pytest
from click_model import SPEC, TASK, batch_at, bits, fresh, plain
from equality import same
from failing_tables import FailingTables
from threads import until

from jaxrec import Callback, Serial
from jaxrec.checkpoint import deltas, restore
from jaxrec.cpr import Recovery, mfu
from jaxrec.oac import Pipeline
from jaxrec.types import ShardsLost, TrainState

SAVE_EVERY = 8  # more than the window: a late save is done before the next one is due


def failing(save=99, kind=FailingTables):
    """A state whose tables lose shard 1 when rows are copied for a chosen save, from 1."""
    state = fresh("host")
    return state._replace(tables=kind.of(state.tables, [("take", save - 1, 1)]))


class Watched(FailingTables):
    """Failing tables with a function `look` that is called when their values are read."""

    look = staticmethod(lambda: None)

    def parts(self, stack):
        self.look()
        return super().parts(stack)


ENGINES = {"serial": functools.partial(Serial, TASK), "pipeline": functools.partial(Pipeline, TASK, window=4)}
each = pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)


def recovery_of(directory, pick_ahead_steps):
    """A recovery whose every save is a regular one, with all rows touched by the time they are picked."""
    more = {"scheme": mfu(), "fraction": 1.0, "pick_ahead_steps": pick_ahead_steps, "save_at_end": False}
    return Recovery(directory, SAVE_EVERY, 40, **more)


def batches(stop):
    return map(batch_at, range(stop))


@each
def test_a_save_that_met_lost_shards_comes_again_and_is_of_the_step_that_it_says(tmp_path, make):
    """An image with the snapshot's step but a later dense state would train batches twice."""
    states = {}

    def keep(info):
        states[info.step] = jax.tree.map(np.array, info.state.dense)

    recovery = recovery_of(tmp_path, 2)
    with make(failing(save=2), [keep, recovery]) as engine:
        engine.train(batches(3 * SAVE_EVERY))
        # The third save picks its rows ahead, once the late snapshot has ended; one that never ended would block it.
        assert recovery.failed == 1 and recovery.saves == 3
    assert not same(bits(engine.state), plain(3 * SAVE_EVERY)[0])  # negative control: the run has noticed the loss
    for path in deltas(tmp_path):
        restored, image = restore(path, failing())
        assert int(restored.dense.step) == image.step == image.extra["cpr"]["regular"]
        assert same(jax.tree.map(np.array, restored.dense), states[image.step])
    assert len(deltas(tmp_path)) == 3


@each
def test_after_a_late_save_all_that_was_trained_since_is_saved_by_the_next_one(tmp_path, make):
    """Under OAC the late save reads its rows while later batches are committed; these are not part of it."""
    told = threading.Event()

    def tell(info):
        if info.step > late.get("from", 99):
            told.set()

    def wait_in_the_late_save():
        if threading.current_thread() is not threading.main_thread() and recovery.failed and not told.is_set():
            assert told.wait(60)

    late, state, recovery = {}, failing(save=1, kind=Watched), recovery_of(tmp_path, 0)
    with make(state, [recovery, tell]) as engine:
        state.tables.__dict__["look"] = wait_in_the_late_save
        for _ in engine.run(batches(2 * SAVE_EVERY)):
            if recovery.failed and not late:
                late["from"] = engine.step
        assert late and (told.is_set() or isinstance(engine, Serial))
        wanted = bits(engine.state)
        for shard in range(SPEC.shards):
            recovery.recover([shard])
        assert same(bits(engine.state), wanted)  # the last step's save holds all touched rows


class NoSuccessor(Callback):
    """A callback that replaces no server."""

    def recover(self, shards):
        raise OSError("no machine is left")


@each
def test_a_run_that_lost_shards_have_ended_goes_on_from_its_last_save(tmp_path, make):
    """A snapshot that the reset dropped used to block the thread that picks ahead, and the next save."""
    recovery = recovery_of(tmp_path, 2)
    with make(failing(save=2), [NoSuccessor(), recovery]) as engine:
        with pytest.raises(OSError, match="no machine is left"):
            engine.train(batches(40))
        wanted = Serial(TASK, restore(tmp_path, fresh("host"))[0])
        engine.reset(restore(tmp_path, fresh("host"))[0])
        assert engine.step == SAVE_EVERY
        for one in (engine, wanted):
            one.train(map(batch_at, range(SAVE_EVERY, 40)))
        assert same(bits(engine.state), bits(wanted.state)) and recovery.failed == 0


class Fading(FailingTables):
    """Tables that lose shard 1 while the first image is written from them."""

    def parts(self, stack):
        writing = any(frame.name == "write_image" for frame in traceback.extract_stack())
        if writing and not self.calls["faded"]:
            self.count("faded")
            self.kill(1)
            raise ShardsLost([1])
        return super().parts(stack)


@each
def test_a_save_that_is_written_from_the_tables_themselves_comes_again_too(tmp_path, make):
    recovery = Recovery(tmp_path, SAVE_EVERY, 40, copy="shards")
    with make(failing(kind=Fading), [recovery]) as engine:
        engine.train(batches(SAVE_EVERY + 3))
        assert recovery.failed == recovery.saves == 1 and not engine.tables.dead
    assert restore(tmp_path, failing())[1].step >= SAVE_EVERY


@pytest.mark.parametrize("within", [True, False])
def test_a_serial_engine_calls_a_save_again_when_its_shards_are_back(within):
    """At the same step: within the run, or before the next run if the shards are restored in between."""
    saved, stream = [], iter([*batches(12)])
    engine = Serial(TASK, failing(), [Reviver()] if within else [])

    def save(state):
        if not saved:
            saved.append("lost")
            raise ShardsLost([1])
        saved.append((engine.step, bits(state)))

    engine.snapshot_at(8, save)
    with engine:
        if not within:
            for _ in range(2):  # still
                with pytest.raises(ShardsLost, match=r"shards \[1\] are lost"):
                    engine.train(stream)
            assert engine.step == 8
            engine.exclusive(lambda tables: tables)  # a change between runs counts as a recovery
        engine.train(stream)
    assert engine.step == 12 and saved[0] == "lost" and len(saved) == 2
    assert saved[1][0] == 8 and same(saved[1][1], plain(8)[0]) and same(bits(engine.state), plain(12)[0])


class Reviver(Callback):
    """A callback that reports shards as restored; here they were never lost."""

    def begin(self, engine):
        self.engine, self.steps = engine, []

    def recover(self, shards):
        self.steps.append(self.engine.step)
        self.engine.exclusive(lambda tables: tables)


AGAIN = "again, after 8 recoveries"


@each
@pytest.mark.parametrize("step", [6, 12])
def test_a_save_that_meets_lost_shards_for_ever_ends_the_run_by_name(make, step):
    """At step 12, the last one, a pipeline has no threads left and saves on the caller's thread.

    A pipeline counts recoveries per snapshot, as it may commit steps before the save fails again.
    """

    def save(state):
        raise ShardsLost([2])

    reviver = Reviver()
    engine = make(failing(), [reviver])
    engine.snapshot_at(step, save)
    with (
        pytest.raises(ShardsLost, match=rf"\[2\] are lost: {AGAIN} at (the snapshot of step {step}|step \d+): "),
        engine,
    ):
        engine.train(batches(12))
    assert len(reviver.steps) == 8 and reviver.steps[0] >= step


def test_a_save_that_meets_lost_shards_for_ever_ends_a_run_that_outruns_it():
    """Each save fails only after one more step is committed: no step has more than one recovery."""

    def save(state):
        until(lambda: engine.step > int(state.dense.step))
        raise ShardsLost([2])

    reviver = Reviver()
    engine = Pipeline(TASK, failing(), [reviver], window=4)
    engine.snapshot_at(6, save)
    with (
        pytest.raises(ShardsLost, match=rf"\[2\] are lost: {AGAIN} at the snapshot of step 6: restore them"),
        engine,
    ):
        engine.train(batches(100))
    assert len(set(reviver.steps)) == len(reviver.steps) == 8 and engine.step < 100
    engine.reset(TrainState(engine.state.dense, engine.tables))  # discards the snapshot
    with engine:
        assert len(list(engine.run(batches(3)))) == 3


@each
def test_a_save_that_lost_shards_have_delayed_does_not_outlive_the_block_whose_callbacks_wanted_it(make):
    saves = []

    def save(state):
        saves.append(int(state.dense.step))
        raise ShardsLost([1])

    engine, stream = make(failing()), iter([*batches(12)])  # more than a window after the save, however late that is
    engine.snapshot_at(2, save)
    with pytest.raises(ShardsLost), engine:
        engine.train(stream)
    left_at = engine.step
    with engine:
        engine.enter(Reviver())
        engine.train(stream)
    assert saves == [2] and left_at < engine.step == 12


def test_a_reset_forgets_what_was_to_be_saved_again():
    def save(state):
        raise ShardsLost([1])

    engine = Serial(TASK, failing())
    engine.snapshot_at(2, save)
    with engine:
        with pytest.raises(ShardsLost):
            engine.train(batches(4))
        with pytest.warns(UserWarning, match=r"steps \[2\] were not taken, and are forgotten"):
            engine.reset(TrainState(engine.state.dense, engine.tables))
        engine.train(batches(3))
    assert engine.step == 5
