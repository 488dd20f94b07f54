"""Runs of a pipeline: in forced orders of events, with lost shards, and however they end or are interrupted.

No failure is swallowed, threads end, and committed batches are written. See also test_engine.py.
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failing_tables import FailingTables
from hypothesis import given, settings
from hypothesis import strategies as st
from oac_equivalence import HeldBack, batch_in_work, same
from oac_task import (
    ROWS,
    SPEC,
    frozen,
    make_batches,
    make_state,
    pipeline_with,
    plain_loop,
    reset,
    states_of,
    task_of,
    watched,
)
from step_callbacks import at_step
from studies.oac_failures import equal
from threads import ctrl_c as ctrl_c  # a fixture
from threads import interrupt_when, is_inside, join_all, no_threads_left, until, workers
from threads import no_automatic_gc as no_automatic_gc  # a fixture

import jaxrec
from jaxrec import BrokenEngine, Callback, Serial, planned
from jaxrec.checkpoint import restore_shards, snapshot
from jaxrec.embedding import HostTables
from jaxrec.interrupts import wait
from jaxrec.oac import Pipeline
from jaxrec.oac.flight import Flight
from jaxrec.oac.pipeline import live_pipelines
from jaxrec.oac.stages import Stages
from jaxrec.prefetch import result_or_error
from jaxrec.types import ShardsLost

# ---- properties that only a certain order of events could break; each order is forced


def reset_at(step):
    return lambda now, state: now == step and reset(state.tables)


class Broken(Exception):
    pass


def losses_of(pipeline, batches):
    with pipeline:
        return [np.asarray(metrics["loss"]) for _, metrics in pipeline.run(batches)]


def test_batches_planned_after_exclusive_take_nothing_of_before_from_the_ring():
    """The stream is late: batches in the window after the change are planned once it has been made."""
    batches, changed = make_batches(16), threading.Event()

    def stream():
        yield from batches[:7]
        assert changed.wait(60)
        yield from batches[7:]

    def change(state):
        pipeline.exclusive(reset)
        changed.set()

    pipeline = Pipeline(task_of(SPEC), make_state(), [at_step(7, change)], window=5)
    losses = losses_of(pipeline, stream())
    assert same((pipeline.state, losses), plain_loop(batches, after=reset_at(7)))


def test_exclusive_waits_for_a_cut_that_is_being_saved():
    """Between the commits of the snapshot's step and of the next one nothing else blocks `exclusive`."""
    batches, snapshots, inside = make_batches(12), [], threading.Event()

    def save(state):
        # An `exclusive` that does not wait would run before the snapshot is taken.
        until(lambda: inside.is_set() or (is_inside(Flight.wait_for_snapshot) and is_inside(wait)))
        snapshots.append(frozen(state))

    def change(tables):
        inside.set()
        assert len(snapshots) == 1
        return reset(tables)

    with Pipeline(task_of(SPEC), make_state(), window=3) as pipeline:
        pipeline.snapshot_at(7, save)
        for _ in pipeline.run(batches):
            if pipeline.step == 7:
                pipeline.exclusive(change)
    assert same((snapshots[0], []), (states_of(batches)[7], []))


class Looking(Flight):
    """Records the fetched batches that its writer has found, written or not."""

    def __init__(self, *args):
        super().__init__(*args)
        self.looked_at = set()

    def take(self, stage, ready):
        def look(number):
            found = ready(number)
            if stage == "write back" and number in self.items and self.items[number].fetched:
                self.looked_at.add(number)
            return found

        return super().take(stage, look)


def test_semisync_is_one_batch_stale_after_exclusive_too():
    """A batch gathered before the change is gathered again, and its predecessor's write waits for this."""
    batches, at = make_batches(16), 7

    def wait():
        flight, number = pipeline.flight, batch_in_work()
        if changed and number == at + 1:  # lets a write that does not wait come first
            (writer,) = workers("oac-write back")
            until(lambda: flight.first + at in flight.looked_at and is_inside(threading.Condition.wait, writer))

    def change(state):
        pipeline.drain()
        flight = pipeline.flight
        until(lambda: (later := flight.items.get(flight.committed + 1)) is not None and later.gathered)
        changed.append(at)
        pipeline.exclusive(reset)

    changed: list = []
    state, callbacks = watched(make_state(), before_read=wait), [at_step(at, change)]
    pipeline = Pipeline(task_of(SPEC), state, callbacks, mode="semisync", loaders=1)
    pipeline.flight_type = Looking
    losses = losses_of(pipeline, batches)
    assert same((pipeline.state, losses), plain_loop(batches, delay=1, after=reset_at(at)))


def test_write_backs_that_end_during_a_gather_are_not_taken_for_seen():
    """The rows were read before the write; it ends before the gather does."""
    batches, window = make_batches(16), 2
    held = HeldBack(window, len(batches))

    def send(tree, placement):
        sent = held.send(tree, placement)  # `held` then releases the write of the window's oldest batch
        if isinstance(tree, dict):  # rows
            flight, oldest = pipeline.flight, pipeline.flight.first + batch_in_work() - window
            until(lambda: oldest < flight.first or flight.written > oldest)
        return sent

    options = {"window": window, "loaders": 1, "send": send, "fetch": held.fetch}
    pipeline = Pipeline(task_of(SPEC), make_state(), **options)
    losses = losses_of(pipeline, batches)
    assert same((pipeline.state, losses), plain_loop(batches))
    # All rows in the ring were stale when each gather began, including those of the window's oldest batch.
    assert pipeline.counters["stale_rows"] == pipeline.counters["patched_rows"] > 16


# ---- lost shards in every mode and stage, and reset when it is broken

STEPS = 14
BATCHES = make_batches(STEPS)


def failing(*deaths):
    state = make_state()
    return state._replace(tables=FailingTables.of(state.tables, deaths))


class Reviver(Callback):
    """Restores shards to initial rows, and records the steps."""

    def __init__(self):
        self.lost = []

    def begin(self, engine):
        self.engine = engine

    def recover(self, shards):
        self.lost.append((self.engine.step, shards))
        self.engine.exclusive(lambda tables: tables.revive(shards))


def serial_loop(lost, batches=BATCHES, delay=0):
    """`plain_loop` that loses shards; `lost`: (step after which they are lost and reset, shards)."""

    def lose(step, state):
        shards = [shard for at, mine in lost if at == step for shard in mine]
        restore_shards(None, state.tables, shards)
        return shards

    return plain_loop(batches, delay=delay, after=lose)


def train_failing(state, **options):
    """(pipeline, reviver, losses) of a run in which shards die."""
    reviver = Reviver()
    pipeline = Pipeline(task_of(SPEC), state, [reviver], **({"window": 3} | options))
    losses = losses_of(pipeline, BATCHES)
    assert no_threads_left()
    return pipeline, reviver, losses


def is_serial(pipeline, reviver, losses, **options):
    return same((pipeline.state, losses), serial_loop(reviver.lost, **options))


# ---- shards that are lost


@pytest.mark.parametrize("death", [("read", 6, 1), ("write", 6, 1), ("write", STEPS - 1, 2)])
@pytest.mark.parametrize("options", [{}, {"mode": "sync"}, {"mode": "semisync"}], ids=str)
def test_every_mode_brings_a_shard_back_and_ends_as_the_loop(death, options):
    """One death is at the last write-back, when no thread is left to gather again."""
    window = {} if "mode" not in options else {"window": None}
    pipeline, reviver, losses = train_failing(failing(death), **options | window)
    assert [shards for _, shards in reviver.lost] == [(death[2],)]
    assert is_serial(pipeline, reviver, losses, delay=int(options.get("mode") == "semisync"))
    assert not same((pipeline.state, losses), serial_loop([]))


def test_async_brings_shards_back_too():
    pipeline, reviver, losses = train_failing(failing(("read", 5, 1), ("write", 9, 2)), mode="async")
    # In one recovery or two: a write of an older batch may meet its death during the read.
    assert {shard for _, shards in reviver.lost for shard in shards} == {1, 2} and np.isfinite(losses).all()
    assert all(np.isfinite(a).all() for s in pipeline.tables.shards.values() for parts in s for a in parts.values())


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_lost_shard_is_asked_for_no_more_until_it_is_back(kind):
    """Each stage may hit the loss once, before it is known."""
    pipeline, reviver, _ = train_failing(failing((kind, 6, 1)), window=5, loaders=1)
    calls = pipeline.tables.calls
    assert len(reviver.lost) == 1 and calls["refused read"] <= 1 and calls["refused write"] <= 1
    assert calls["refused read"] + calls["refused write"] > 0


class Waiting(FailingTables):
    """Tables whose ninth read sets `begun`, then waits for a condition before it reads."""

    def read(self, plans):
        if self.calls["read"] == 8 and not self.begun.is_set():
            self.begun.set()
            self.until()
        return super().read(plans)


def pipeline_over_waiting(death, until, **options):
    tables = Waiting.of(make_state().tables, [death])
    tables.__dict__.update(begun=threading.Event(), until=lambda: until(pipeline.flight))
    pipeline = Pipeline(task_of(SPEC), make_state()._replace(tables=tables), window=4, loaders=1, **options)
    return pipeline


def test_a_loss_that_two_stages_meet_is_recovered_once():
    """A loader that gathers while a write hits the loss reports it before exclusive access is granted."""

    def fetch(tree):
        assert batch_in_work() != 4 or pipeline.tables.begun.wait(60)
        return jax.tree.map(np.asarray, tree)

    def recovering(flight):  # the gather ends only when `exclusive` waits for it, or has not waited
        until(lambda: reviver.lost and ((is_inside(Flight.pause) and is_inside(wait)) or not flight.lost_shards))

    reviver = Reviver()
    with pipeline_over_waiting(("write", 4, 1), recovering, callbacks=[reviver], fetch=fetch) as pipeline:
        list(pipeline.run(BATCHES))
    assert pipeline.tables.calls["refused read"] == pipeline.tables.calls["refused write"] == 1
    assert len(reviver.lost) == 1 and equal(pipeline.state, serial_loop(reviver.lost)[0])


def test_what_is_written_when_a_shard_is_known_to_be_lost_does_not_go_there():
    def fetch(tree):
        flight = pipeline.flight
        if batch_in_work() >= 5:  # already committed; written only once the loss is known
            until(lambda: flight.lost_shards or reviver.lost)
        return jax.tree.map(np.asarray, tree)

    reached = lambda flight: flight.committed - flight.first >= 6 and flight.written - flight.first >= 5
    before = lambda flight: until(lambda: reached(flight))  # writes in flight hit the loss
    reviver = Reviver()
    with pipeline_over_waiting(("read", 8, 1), before, callbacks=[reviver], fetch=fetch) as pipeline:
        list(pipeline.run(BATCHES))
    assert pipeline.tables.calls["refused read"] == 1 and pipeline.tables.calls["refused write"] == 0
    assert len(reviver.lost) == 1 and equal(pipeline.state, serial_loop(reviver.lost)[0])


def test_without_a_callback_that_recovers_run_says_so_and_goes_on_when_they_are_back():
    stream, pipeline = iter(BATCHES), Pipeline(task_of(SPEC), failing(("read", 6, 1)), window=3)
    with pipeline:
        with pytest.raises(ShardsLost, match="no callback restores them: give callbacks=") as raised:
            list(pipeline.run(stream))
        assert raised.value.shards == (1,) and not getattr(raised.value, "__notes__", [""])[1:]
        at = pipeline.step
        pipeline.exclusive(lambda tables: tables.revive([1]))
        list(pipeline.run(stream))
    assert equal(pipeline.state, serial_loop([(at, [1])])[0])


def test_shards_that_are_lost_while_a_run_is_left_are_told_and_come_back_in_the_next_one():
    stream, pipeline = iter(BATCHES), Pipeline(task_of(SPEC), failing(("write", 4, 1)), window=3)
    with pytest.raises(ShardsLost, match="restore them in `exclusive`"), pipeline:
        for number, _ in enumerate(pipeline.run(stream), 1):
            if number == 5:
                break  # its write is due or done
    pipeline.tables.dead.clear()  # an empty successor reports no loss
    with pipeline:
        reviver = pipeline.enter(Reviver())
        list(pipeline.run(stream))
    assert equal(pipeline.state, serial_loop(reviver.lost)[0]) and reviver.lost == [(5, (1,))]


def test_a_recovery_that_brings_nothing_back_ends_the_run_and_does_not_hang():
    class Idle(Reviver):
        def recover(self, shards):
            self.lost.append(shards)

    idle = Idle()
    pipeline = Pipeline(task_of(SPEC), failing(("read", 4, 1)), [idle], window=3)
    with pytest.raises(ShardsLost, match="again, after 8 recoveries at step"), pipeline:
        list(pipeline.run(BATCHES))
    assert idle.lost == [(1,)] * 8 and no_threads_left()


@pytest.mark.parametrize("how", ["before the save", "in the save", "at the end"])
def test_a_cut_that_meets_lost_shards_is_saved_once_they_are_back(how):
    saved, step = [], STEPS if how == "at the end" else 6
    write = {"before the save": 5, "in the save": 99, "at the end": STEPS - 1}[how]
    reviver = Reviver()
    pipeline = Pipeline(task_of(SPEC), failing(("write", write, 1)), [reviver], window=3)

    def save(state):
        if how == "in the save" and not pipeline.tables.dead and not reviver.lost:
            pipeline.tables.kill(1)
            raise ShardsLost([1])
        saved.append(frozen(state))

    pipeline.snapshot_at(step, save)
    with pipeline:
        list(pipeline.run(BATCHES))
    ((at, shards),) = reviver.lost
    assert shards == (1,) and at >= step and len(saved) == 1
    assert equal(saved[0], serial_loop([(at, [1])], BATCHES[:at])[0])
    assert equal(pipeline.state, serial_loop([(at, [1])])[0])


@settings(max_examples=15)
@given(data=st.data())
def test_a_run_that_loses_shards_is_that_of_a_loop_that_loses_them_at_the_same_steps(data):
    mode = data.draw(st.sampled_from(["oac", "oac", "oac", "sync", "semisync"]), label="mode")
    options = {"window": data.draw(st.integers(1, 5), label="window")} if mode == "oac" else {"window": None}
    options |= {name: data.draw(st.integers(1, 3), label=name) for name in ("loaders", "fetchers")}
    death = st.tuples(st.sampled_from(["read", "write"]), st.integers(0, STEPS), st.integers(0, 3))
    deaths = data.draw(st.lists(death, min_size=1, max_size=3), label="deaths")
    pipeline, reviver, losses = train_failing(failing(*deaths), mode=mode, **options)
    died = {shard for kind, number, shard in deaths if number < pipeline.tables.calls[kind]}
    assert {shard for _, shards in reviver.lost for shard in shards} == died
    assert is_serial(pipeline, reviver, losses, delay=int(mode == "semisync"))
    assert pipeline.tables.step == (STEPS if mode != "semisync" else 0)


# ---- the state, and another one


def image_of(step):
    """A saved state of the given step, with its own tables."""
    state = frozen(serial_loop([], BATCHES[:step])[0])
    return state._replace(dense=jax.tree.map(jnp.asarray, state.dense))


def test_after_reset_a_broken_pipeline_goes_on_from_the_other_state():
    calls = itertools.count()

    def fetch(tree):
        if next(calls) == 8:
            raise Broken
        return jax.tree.map(np.asarray, tree)

    pipeline = Pipeline(task_of(SPEC), make_state(), window=3, fetch=fetch)
    with pipeline:
        with pytest.raises(Broken):
            list(pipeline.run(BATCHES))
        with pytest.raises(BrokenEngine):
            pipeline.drain()
        pipeline.reset(image_of(5))
        assert pipeline.step == 5 == int(pipeline.state.dense.step)
        list(pipeline.run(BATCHES[5:]))
    assert equal(pipeline.state, serial_loop([])[0])


# ---- exits: however a run ends, threads end, committed batches are written, and no failure is swallowed

WINDOW = 3
REGIMES = [
    {"mode": "sync"},
    {"mode": "semisync"},
    {"mode": "async", "window": WINDOW},
    {"window": WINDOW, "loaders": 3},
]


def to_host(tree):
    return jax.tree.map(np.asarray, tree)


class Failing:
    """A function that raises at its call `number` (from 0), after waiting for `may`; sets `failed` when it does."""

    def __init__(self, number, function, may=None):
        self.calls, self.failed = itertools.count(), threading.Event()
        self.number, self.function, self.may = number, function, may

    def __call__(self, *args):
        if next(self.calls) == self.number:
            assert self.may is None or self.may.wait(60)
            self.failed.set()
            raise Broken
        return self.function(*args)


def pipeline_of(state=None, task=None, kind=Pipeline, **options):
    return kind(task or task_of(SPEC), state or make_state(), **({"window": WINDOW} | options))


def interrupt(state):
    signal.raise_signal(signal.SIGINT)


def unchanged(tables):
    return tables


def all_notes(error):
    return " ".join(getattr(error, "__notes__", []))


def chain(error):
    """The error and all its causes and contexts."""
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


# ---- O1: a failure after the commit reaches the caller on leaving, and the pipeline reports itself broken


@pytest.mark.parametrize("way", ["break", "close", "body", "callback", "ctrl-c", "exhausted"])
def test_rows_that_were_lost_are_told_however_the_run_is_left(way):
    fetch, batches = Failing(2, to_host, may=threading.Event()), make_batches(16)

    def leave(state):
        fetch.may.set()
        assert fetch.failed.wait(60)
        if way == "callback":
            raise KeyError("the callback's")

    pipeline = pipeline_of(fetch=fetch, callbacks=[at_step(5, leave)])
    wanted = {"body": KeyError, "callback": KeyError, "ctrl-c": KeyboardInterrupt}.get(way, Broken)
    with pytest.raises(wanted) as raised, pipeline:
        for number, _ in enumerate(pipeline.run(batches), 1):
            if number == 5 and way == "break":
                break
            if number == 5 and way == "close":
                pipeline.close()
            if number == 5 and way in ("body", "ctrl-c"):
                raise wanted("the body's")
    assert no_threads_left()
    failure = next(error for error in chain(raised.value) if isinstance(error, Broken))
    assert "in stage 'fetch' of the pipeline, batch 2" in all_notes(failure)
    if wanted is not Broken:
        assert "stage 'fetch'" in all_notes(raised.value) and "batch 2" in all_notes(raised.value)
    step, tables = int(pipeline.state.dense.step), states_of(batches)[2].tables
    assert same((jaxrec.TrainState((), pipeline.tables), []), (jaxrec.TrainState((), tables), []))
    refuses_everything(pipeline, step, [2] * 4)


def refuses_everything(pipeline, dense_step, table_steps):
    """Checks that every call on a broken pipeline raises BrokenEngine with the steps of its state."""
    asks = {
        "run": lambda: pipeline.run(make_batches(2)),
        "drain": pipeline.drain,
        "exclusive": lambda: pipeline.exclusive(unchanged),
        "snapshot": lambda: pipeline.snapshot_at(100, print),
        "read": lambda: pipeline.state.tables.read({}),
        "shards": lambda: pipeline.state.tables.shards,
        "save": lambda: snapshot(pipeline.state),
    }
    for ask, act in asks.items():
        with pytest.raises(BrokenEngine, match="give it to `reset` or to a new engine") as raised:
            act()
        broken = raised.value
        assert (broken.dense_step, broken.table_steps) == (dense_step, table_steps), ask
        assert f"dense state stands at step {dense_step}" in str(broken)
        assert any(isinstance(error, Broken) for error in chain(broken)), ask
    pipeline.close()


# ---- O5: all batches before the failed one are trained, and the pipeline can continue


def raising(batches, at):
    yield from batches[:at]
    raise Broken


def is_inputs_of(tree, batch):
    """Whether a tree passed to `send` holds the inputs of a batch."""
    return isinstance(tree, tuple) and np.array_equal(tree[1].label, batch.label)


class BrokenSend:
    """A transfer to the device that raises at the inputs of one batch, until `mend`."""

    def __init__(self, batch, after=None):
        self.batch, self.after = batch, after

    def __call__(self, tree, placement):
        if self.batch is not None and is_inputs_of(tree, self.batch):
            assert self.after is None or self.after.wait(60)
            raise Broken
        return jax.device_put(tree, placement)

    def mend(self):
        self.batch = None


@pytest.mark.parametrize("options", REGIMES, ids=str)
def test_a_batch_that_cannot_be_sent_is_told_after_those_before_it_and_is_not_lost(options):
    batches = make_batches(16)
    stream, send = iter(batches), BrokenSend(batches[9])
    with pytest.raises(Broken) as raised, pipeline_of(**{"window": None} | options, send=send) as pipeline:
        list(pipeline.run(stream))
    assert pipeline.step == 9 and no_threads_left()
    assert "in stage 'load' of the pipeline, batch 9" in all_notes(raised.value)
    send.mend()
    list(pipeline.run(stream))
    assert pipeline.step == 16
    if options.get("mode") not in ("async", "semisync"):
        assert equal(pipeline.state, states_of(batches)[16])


# ---- O4: a stream that blocks


class Blocking:
    """An iterator that blocks at a batch until it is released."""

    def __init__(self, batches, at):
        self.batches, self.at, self.number = batches, at, 0
        self.blocked, self.let_go = threading.Event(), threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        if self.number == self.at:
            self.blocked.set()
            assert self.let_go.wait(60)
        if self.number == len(self.batches):
            raise StopIteration
        self.number += 1
        return self.batches[self.number - 1]


def let_go(stream):
    stream.let_go.set()
    for thread in workers("oac-plan"):
        thread.join(60)
    assert no_threads_left()


def goes_on(pipeline, stream, batches):
    """Trains on the rest of a stream; returns whether the end state equals training batch by batch."""
    list(pipeline.run(stream))
    return equal(pipeline.state, states_of(batches)[len(batches)])


@pytest.mark.parametrize("way", ["break", "callback", "load", "fetch"])
def test_a_stream_that_blocks_blocks_neither_leaving_nor_an_error(way):
    batches = make_batches(16)
    stream, send = Blocking(batches, 8), BrokenSend(batches[6] if way == "load" else None)
    options = {"fetch": Failing(7, to_host)} if way == "fetch" else {}
    callbacks = [Failing(5, lambda info: None)] if way == "callback" else []
    pipeline = pipeline_of(send=send, callbacks=callbacks, **options)
    with contextlib.nullcontext() if way == "break" else pytest.raises(Broken) as raised, pipeline:
        for number, _ in enumerate(pipeline.run(stream), 1):
            if number == 5 and way == "break":
                assert stream.blocked.wait(60)
                break
    done = {"break": 5, "callback": 6, "load": 6, "fetch": 8}[way]
    assert pipeline.step == done
    if way == "callback":
        assert "in stage 'commit' of the pipeline, batch 5" in all_notes(raised.value)
    if way == "fetch":  # the batch's rows are lost
        stream.let_go.set()
        return
    if stream.blocked.is_set():
        pipeline.patience_seconds = 0.05
        with pytest.raises(ValueError, match="still waits inside this iterator"):
            pipeline.run(stream)
    send.mend()
    let_go(stream)
    assert equal(pipeline.state, states_of(batches)[done])  # the woken thread touched nothing
    assert goes_on(pipeline, stream, batches)


def test_an_iterator_whose_planner_is_on_its_way_out_is_waited_for():
    blocking, left = Blocking(make_batches(12), 7), threading.Event()

    class Patient(Pipeline):
        @property
        def patience_seconds(self):  # read on leaving a run, and when its iterator is reused
            if left.is_set():
                blocking.let_go.set()
            return 60

    pipeline = Patient(task_of(SPEC), make_state())
    running = pipeline.run(blocking)
    for _ in range(4):
        next(running)
    assert blocking.blocked.wait(60)
    running.close()
    left.set()
    assert len(list(pipeline.run(blocking))) == 8


# ---- O7: tables that lag behind refuse to be read


def ask_all(state, check):
    batch = make_batches(1)[0]
    plans = jaxrec.plan(SPEC, batch.ids)
    evaluate = jaxrec.make_eval_step(SPEC, lambda params, activations, batch: activations["pair"].sum((1, 2)))
    tables = state.tables
    for act in [
        lambda: tables.read(plans),
        lambda: tables.shards,
        lambda: tables.parts("width_4"),
        lambda: tables.put({}, {}),
        lambda: tables.add({}, {}, {}),
        lambda: tables.with_shard("width_4", 0, {}),
        lambda: tables.overwriting().__enter__(),
        lambda: evaluate(state, batch, plans),
        lambda: snapshot(state),
    ]:
        check(act)


def refused(act):
    with pytest.raises(ValueError, match=r"call pipeline.drain\(\) before reading, evaluating or saving"):
        act()


def test_the_tables_of_a_yielded_state_refuse_to_be_read_until_they_are_drained():
    batches, drained = make_batches(12), []
    states = states_of(batches)

    def drain(state):
        assert state.tables.spec is SPEC  # available in every state
        pipeline.drain()
        assert equal(frozen(state), states[pipeline.step])
        drained.append(state)

    ask = lambda info: ask_all(info.state, refused)
    with pipeline_of(callbacks=[ask, at_step(6, drain)]) as pipeline:
        for number, (state, _) in enumerate(pipeline.run(batches), 1):
            if number == 6:
                assert equal(frozen(state), states[6])  # still drained
                repr(state)
            else:
                ask_all(state, refused)
            if number == 9:
                drain(state)
                with pytest.raises(ValueError, match="stood at step 6"):
                    drained[0].tables.read({})
        assert equal(frozen(state), states[12]) and equal(frozen(pipeline.state), states[12])
    assert len(drained) == 2


def test_the_last_state_of_a_run_refuses_when_others_have_begun_to_train_over_its_tables():
    first, batches = pipeline_of(), make_batches(6)
    *_, (last, _) = first.run(batches)
    last.tables.read({})
    second = pipeline_of(make_state()._replace(tables=first.tables))
    for number, _ in enumerate(second.run(batches), 1):
        if number == 3:
            with pytest.raises(ValueError, match="or have gone on"):
                last.tables.read({})
    with pytest.raises(ValueError, match="or have gone on"):
        last.tables.read({})
    *_, (last, _) = first.run(batches)
    last.tables.read({})


def test_a_serial_engine_goes_on_from_the_last_state_of_a_run():
    batches = make_batches(12)
    with pipeline_of() as pipeline:
        *_, (last, _) = pipeline.run(batches[:6])
    with Serial(task_of(SPEC), last) as engine:
        engine.train(batches[6:])
    assert equal(frozen(engine.state), states_of(batches)[12])


# ---- O3, O12: waits end, void claims are released


def test_a_loader_that_sleeps_through_exclusive_finds_its_batch_written_and_lets_it_go():
    claimed, go, batches = threading.Event(), threading.Event(), make_batches(20)

    def send(tree, placement):
        if is_inputs_of(tree, batches[6]) and not claimed.is_set():
            claimed.set()
            assert go.wait(60)
        return jax.device_put(tree, placement)

    def change(state):
        assert claimed.wait(60)
        pipeline.exclusive(unchanged)

    callbacks = [at_step(2, change), at_step(14, lambda state: go.set())]
    pipeline = pipeline_of(loaders=2, callbacks=callbacks, send=send)
    with pipeline:
        list(pipeline.run(batches))
    assert equal(pipeline.state, states_of(batches)[20])


# ---- O8: a data loader that reuses its arrays


def reusing(batches):
    buffer = jax.tree.map(np.copy, batches[0])
    for batch in batches:
        jax.tree.map(np.copyto, buffer, batch)
        yield buffer
    jax.tree.map(lambda leaf: leaf.fill(1), buffer)


def test_a_loader_that_fills_the_same_arrays_again_trains_what_it_yielded():
    batches = make_batches(12)
    with pipeline_of(window=5) as pipeline:
        list(pipeline.run(reusing(batches)))
    assert equal(pipeline.state, states_of(batches)[12])
    for (batch, plans), wanted in zip(planned(SPEC, reusing(batches)), batches, strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, wanted)
        np.testing.assert_array_equal(plans["width_1"].unique, jaxrec.plan(SPEC, wanted.ids)["width_1"].unique)


# ---- O13: one run at a time over one set of tables


def test_pipelines_take_turns_over_tables_and_a_second_one_at_a_time_is_refused(no_automatic_gc):
    batches, state = make_batches(12), make_state()
    first = Pipeline(task_of(SPEC), state, window=WINDOW)
    other = make_state()._replace(tables=dataclasses.replace(state.tables))  # the same arrays
    second = Pipeline(task_of(SPEC), other, window=WINDOW)
    running = first.run(batches[:6])
    next(running)
    asks = (lambda: next(second.run(batches)), second.drain, lambda: second.exclusive(unchanged))
    for ask in (*asks, lambda: pipeline_of().reset(make_state()._replace(tables=second.tables))):
        with pytest.raises(ValueError, match="another engine is running over these tables"):
            ask()
    list(running)
    assert len(list(second.run(batches))) == 12  # in turns
    dropped = first.run(batches[:6])
    next(dropped)
    del dropped, first
    gc.collect()
    assert len(list(second.run(batches))) == 12 and no_threads_left()
    broken = Pipeline(task_of(SPEC), make_state()._replace(tables=state.tables), fetch=Failing(0, to_host))
    with pytest.raises(Broken):
        list(broken.run(batches))
    assert len(list(second.run(batches))) == 12  # others may continue on the remaining tables


def test_a_run_takes_nothing_of_the_run_before_from_the_ring():
    """Others may have changed rows in between."""
    found = []
    for engine in (pipeline_of(window=8), Serial(task_of(SPEC), make_state())):
        losses = losses_of(engine, make_batches(12)[:6])
        for name, shard in itertools.product(SPEC.stacks, range(SPEC.shards)):
            zeros = {part: 0 * array[shard] for part, array in engine.tables.parts(name).items()}
            engine.tables.with_shard(name, shard, zeros)
        losses += losses_of(engine, make_batches(12)[6:])
        found.append((engine.state, losses))
    assert same(*found)


def test_a_batch_that_cannot_be_split_over_the_devices_is_told_and_does_not_come_again():
    mesh = jaxrec.make_mesh(devices=jax.devices()[:4])
    first, second, third = make_batches(3)
    stream = iter([first, jax.tree.map(lambda leaf: leaf[:6], second), third])
    with Pipeline(task_of(SPEC, mesh), make_state(SPEC, mesh), window=WINDOW) as pipeline:
        with pytest.raises(ValueError, match="6 examples cannot be split over 4 devices"):
            list(pipeline.run(stream))
        assert len(list(pipeline.run(stream))) == 1
    assert pipeline.step == 2


def test_one_directory_attached_twice_is_in_one_pipeline_at_a_time(tmp_path):
    state = make_state()._replace(tables=HostTables.create(SPEC, ROWS, tmp_path / "tables"))
    (tmp_path / "link").symlink_to(tmp_path / "tables")
    other = make_state()._replace(tables=HostTables.attach(SPEC, ROWS, tmp_path / "link"))
    first, second, batches = pipeline_of(state), pipeline_of(other), make_batches(6)
    running = first.run(batches)
    next(running)
    with pytest.raises(ValueError, match="another engine is running over these tables"):
        next(second.run(batches))
    running.close()
    assert len(list(second.run(batches))) == 6


# ---- snapshots


class BrokenSave:
    """A snapshot's save that fails."""

    def __init__(self):
        self.began, self.thread = threading.Event(), None

    def __call__(self, state):
        self.thread = threading.current_thread()
        self.began.set()
        raise Broken

    def wait(self):
        """Waits until the failure has been reported; until then the snapshot counts as good."""
        assert self.began.wait(60)
        self.thread.join(60)


def test_a_save_that_fails_is_told_on_leaving_and_breaks_nothing():
    batches, save = make_batches(16), BrokenSave()
    stream = iter(batches)
    with pytest.raises(Broken) as raised, pipeline_of(window=8) as pipeline:
        pipeline.snapshot_at(4, save)
        for number, _ in enumerate(pipeline.run(stream), 1):
            if number == 4:
                save.wait()
                break
    assert "in stage 'snapshot' of the pipeline, batch 3" in all_notes(raised.value) and no_threads_left()
    assert equal(pipeline.state, states_of(batches)[4])
    with pipeline:
        assert goes_on(pipeline, stream, batches)


def test_a_cut_of_a_step_that_never_comes_is_said_and_stays_for_the_next_run():
    batches, saved = make_batches(12), []
    pipeline = pipeline_of()
    pipeline.snapshot_at(9, lambda state: saved.append(int(state.dense.step)))
    pipeline.snapshot_at(98, saved.append)
    pipeline.snapshot_at(99, saved.append)
    with pytest.warns(
        UserWarning, match=r"snapshots announced for steps \[9, 98, 99\] were not taken: .* left at step 5"
    ):
        list(pipeline.run(batches[:5]))
    assert not saved
    list(pipeline.run(batches[5:]))  # warnings are errors here: it is reported once
    assert saved == [9]


# ---- updates


def test_an_update_whose_metrics_are_no_dict_is_refused_before_anything_is_donated():
    class Changed(jaxrec.Task):
        def update(self, *given):
            dense, rows, metrics = super().update(*given)
            return dense, rows, metrics["loss"]

    pipeline = pipeline_of(task=task_of(SPEC, kind=Changed))
    with pytest.raises(ValueError, match="metrics.*dict"), pipeline:
        list(pipeline.run(make_batches(3)))
    assert int(pipeline.state.dense.step) == 0 == pipeline.tables.step
    with pytest.raises(ValueError, match="metrics.*dict"):
        list(pipeline.run(make_batches(3)))


def test_an_update_that_returns_another_dtype_for_another_batch_size_is_refused_and_breaks_nothing():
    class Changed(jaxrec.Task):
        def update(self, dense, rows, plans, batch):
            new, rows, metrics = super().update(dense, rows, plans, batch)
            if len(batch.label) == 4:
                new = new._replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), new.params))
            return new, rows, metrics

    half = jax.tree.map(lambda leaf: leaf[:4], make_batches(1)[0])  # no more rows, so the plan keeps its capacity
    pipeline = pipeline_of(task=task_of(SPEC, kind=Changed))
    with pytest.raises(ValueError, match="changes the shapes of the dense state"), pipeline:
        list(pipeline.run([*make_batches(3), half]))
    assert int(pipeline.state.dense.step) == 3 == pipeline.tables.step


def test_a_callback_that_changes_the_dtype_of_the_dense_state_is_refused():
    def change(info):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), info.state.dense.params)
        return info.state._replace(dense=info.state.dense._replace(params=params)) if info.step == 2 else None

    pipeline = pipeline_of(callbacks=[change])
    with pytest.raises(ValueError, match="a callback returned a dense state of other shapes"), pipeline:
        list(pipeline.run(make_batches(6)))
    assert int(pipeline.state.dense.step) == 2 == pipeline.tables.step


def test_a_dense_state_that_died_with_its_update_is_said_to_be_gone():
    def refuse(step):
        if step > 3:
            raise Broken
        return step

    class Refused(jaxrec.Task):
        def update(self, *given):
            dense, rows, metrics = super().update(*given)
            step = jax.pure_callback(refuse, jax.ShapeDtypeStruct((), jnp.int32), dense.step)
            return dense._replace(step=step), rows, metrics

    pipeline = pipeline_of(task=task_of(SPEC, kind=Refused), window=0)
    with pytest.raises(Exception, match="Broken"), pipeline:  # jax's error, which contains it
        list(pipeline.run(make_batches(6)))
    with pytest.raises(BrokenEngine, match="The dense state is gone") as raised:
        pipeline.drain()
    assert raised.value.dense_step is None


def test_a_step_that_fails_after_its_update_counts_and_its_rows_are_lost():
    class Torn(Stages):
        def commit(self, item):
            metrics = super().commit(item)
            if item.number == 4:
                for leaf in jax.tree.leaves(self.ring):  # as if `append` had failed, to which it is donated
                    leaf.delete()
                raise Broken
            return metrics

    pipeline = pipeline_of(kind=type("TornPipeline", (Pipeline,), {"stages_type": Torn}))
    with pytest.raises(Broken) as raised, pipeline:
        list(pipeline.run(make_batches(8)))
    assert "in stage 'commit' of the pipeline, batch 4" in all_notes(raised.value)
    assert pipeline.step == 5 and no_threads_left()
    refuses_everything(pipeline, 5, [4] * 4)
    pipeline.reset(make_state())
    losses = losses_of(pipeline, make_batches(8))
    assert same((pipeline.state, losses), plain_loop(make_batches(8)))


# ---- failures beside others, and beside changes


def test_no_snapshot_is_saved_once_rows_before_it_are_lost():
    """A fetch of a batch before the snapshot's step fails when the step is committed."""
    fetch, saved = Failing(2, to_host, may=threading.Event()), []
    pipeline = pipeline_of(fetch=fetch, window=6, callbacks=[at_step(6, lambda state: fetch.may.set())])
    pipeline.snapshot_at(5, saved.append)
    with pytest.raises(Broken), pipeline:
        list(pipeline.run(make_batches(12)))
    assert saved == []


class LateSave:
    """A snapshot's save that fails when it is told to."""

    def __init__(self, pipeline):
        self.pipeline, self.may = pipeline, threading.Event()

    def __call__(self, state):
        assert self.may.wait(60)
        raise Broken

    def fail(self):
        self.may.set()
        until(lambda: self.pipeline.flight.snapshot_error is not None)


def test_no_batch_is_committed_once_a_save_has_failed():
    pipeline = pipeline_of(callbacks=[at_step(5, lambda state: save.fail())])
    save = LateSave(pipeline)
    pipeline.snapshot_at(3, save)
    with pytest.raises(Broken), pipeline:
        list(pipeline.run(make_batches(12)))
    assert pipeline.step == 5


def test_no_shard_is_recovered_once_a_save_has_failed():
    """The save's error ends the run; shards that are lost meanwhile are recovered by the next one."""

    def lose(state):
        save.fail()
        pipeline.tables.kill(1)
        pipeline.flight.mark_lost([1])

    batches, reviver = make_batches(12), Reviver()
    pipeline, stream = pipeline_of(failing(), callbacks=[reviver, at_step(4, lose)]), iter(batches)
    save = LateSave(pipeline)
    pipeline.snapshot_at(3, save)
    with pytest.raises(Broken), pipeline:
        list(pipeline.run(stream))
    assert pipeline.step == 4 and reviver.lost == []
    with pipeline:
        list(pipeline.run(stream))
    assert reviver.lost == [(4, (1,))]
    assert equal(pipeline.state, serial_loop([(4, [1])], batches)[0])


@pytest.mark.parametrize("what", ["inputs", "rows"])
def test_a_failure_of_a_load_that_exclusive_has_made_void_ends_nothing(what):
    """The batch is loaded again, and its transfer works then."""
    inside, changed, batches = threading.Event(), threading.Event(), make_batches(12)

    def send(tree, placement):
        is_inputs = isinstance(tree, tuple)
        if batch_in_work() == 5 and is_inputs == (what == "inputs") and not changed.is_set():
            inside.set()
            assert changed.wait(60)
            raise Broken
        return jax.device_put(tree, placement)

    def change(state):
        assert inside.wait(60)
        pipeline.exclusive(unchanged)
        changed.set()

    pipeline = pipeline_of(send=send, window=3, callbacks=[at_step(3, change)])
    losses = losses_of(pipeline, batches)
    assert inside.is_set() and same((pipeline.state, losses), plain_loop(batches))


def test_of_two_lost_batches_the_tables_are_said_to_be_at_the_earlier_one():
    """Two fetches fail, and the later batch's failure is reported last."""
    both, batches = threading.Event(), make_batches(12)

    def fetch(tree):
        if batch_in_work() == 2:
            assert both.wait(60)
            raise Broken
        if batch_in_work() == 3:
            both.set()
            until(lambda: pipeline.flight.error is not None)
            raise Broken
        return to_host(tree)

    pipeline, raised = pipeline_of(fetch=fetch, fetchers=2, window=8), []
    # Not in this thread: the run would wait for ever for batch 2 if batch 3 counted.
    trainer = threading.Thread(target=lambda: raised.append(result_or_error(lambda: losses_of(pipeline, batches))))
    trainer.daemon = True
    trainer.start()
    join_all([trainer])
    assert isinstance(raised[0], Broken)
    # A writer that waits for batch 2 may have ended before batch 3 fails, and would not tell.
    assert pipeline.flight.lost_from == pipeline.flight.first + 2
    refuses_everything(pipeline, pipeline.step, [2] * 4)


def test_of_a_failed_fetch_and_a_failed_write_the_first_is_told():
    def fetch(tree):
        if batch_in_work() == 5:
            raise KeyError("first")
        return to_host(tree)

    def write(shards):
        if batch_in_work() == 3:
            until(lambda: pipeline.flight.error is not None)
            raise Broken

    pipeline = Pipeline(task_of(SPEC), watched(make_state(), before_write=write), window=8, fetch=fetch)
    with pytest.raises(KeyError, match="first"), pipeline:
        list(pipeline.run(make_batches(16)))
    assert pipeline.flight.lost_from == pipeline.flight.first + 3


def test_drain_in_another_thread_than_that_of_the_step_is_refused():
    found = []

    def drain_there(state):
        thread = threading.Thread(target=lambda: found.append(result_or_error(pipeline.drain)))
        thread.start()
        thread.join(60)

    with pipeline_of(callbacks=[at_step(4, drain_there)]) as pipeline:
        list(pipeline.run(make_batches(6)))
    assert "'MainThread', iterates over the run: call this there" in str(found[0])


def test_a_dense_state_that_is_found_dead_at_the_end_is_said_to_be_gone(monkeypatch):
    """On an accelerator an update may fail after its call has returned; here `block_until_ready` fails."""
    pipeline = pipeline_of(fetch=Failing(2, to_host))

    def fail(tree):
        raise Broken

    monkeypatch.setattr(jax, "block_until_ready", fail)
    with pytest.raises(Broken), pipeline:
        list(pipeline.run(make_batches(6)))
    with pytest.raises(BrokenEngine, match="The dense state is gone") as raised:
        pipeline.drain()
    monkeypatch.undo()
    assert raised.value.dense_step is None


def test_an_error_behind_one_that_ended_the_run_is_raised_in_its_turn():
    fails = iter([True])

    def stream():
        yield from make_batches(5)
        raise OSError("no more of the file can be read")

    def send(tree, placement):
        if batch_in_work() == 3 and next(fails, False):
            until(lambda: pipeline.flight.planned == 6, 60)  # with the error of the stream
            raise Broken
        return jax.device_put(tree, placement)

    batches = stream()
    with pipeline_of(window=4, send=send) as pipeline:
        for error in (Broken, OSError):
            with pytest.raises(error):
                list(pipeline.run(batches))
        list(pipeline.run(batches))
    assert pipeline.step == 5 and equal(pipeline.state, states_of(make_batches(5))[5])


def test_a_look_at_rest_keeps_the_staleness_of_semisync():
    look = at_step(4, lambda state: pipeline.at_rest(lambda tables: None))
    batches, pipeline = make_batches(12), Pipeline(task_of(SPEC), make_state(), [look], mode="semisync")
    with pipeline:
        losses = [np.asarray(metrics["loss"]) for _, metrics in pipeline.run(batches)]
    assert same((pipeline.state, losses), plain_loop(batches, delay=1))


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_has_no_pipelines_to_wait_for():
    """Their threads stay with the parent, so the child would wait for them at its exit."""
    running = (pipeline := pipeline_of()).run(make_batches(6))
    next(running)
    child = os.fork()
    if not child:
        os._exit(len(live_pipelines))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and pipeline in live_pipelines
    pipeline.close()


# ---- iterators that are dropped, interrupts


def test_an_iterator_that_is_dropped_ends_its_threads_also_within_a_cycle(no_automatic_gc):
    pipeline, batches = pipeline_of(), make_batches(12)
    cycle = {"run": pipeline.run(batches)}
    cycle["itself"] = cycle
    next(cycle["run"])
    assert pipeline.running and not no_threads_left()
    del cycle
    gc.collect()
    assert not pipeline.running and no_threads_left()
    assert equal(pipeline.state, states_of(batches)[1])


def test_a_run_that_is_collected_in_a_thread_of_its_own_has_the_tables_until_its_threads_end(no_automatic_gc):
    state, batches = make_state(), make_batches(6)
    dropped, collected, go = threading.Event(), threading.Event(), threading.Event()

    def fetch(tree):
        if batch_in_work() == 2:
            assert dropped.wait(60)
            gc.collect()
            collected.set()
            assert go.wait(60)
        return to_host(tree)

    cycle = {"run": pipeline_of(state, fetch=fetch).run(batches)}
    cycle["itself"] = cycle
    for _ in range(3):
        next(cycle["run"])
    del cycle
    dropped.set()
    assert collected.wait(60)
    other = pipeline_of(make_state()._replace(tables=state.tables))
    with pytest.raises(ValueError, match="another engine is running over these tables"):
        next(other.run(batches))
    go.set()
    until(no_threads_left)
    assert state.tables.step == 3 and len(list(other.run(batches))) == 6


# The function in which the main thread waits, by test case.
WAITS = {
    "drain": Flight.drain,
    "exclusive": Flight.drain,
    "snapshot": Flight.wait_for_snapshot,
    "commit": Flight.wait_to_commit,
    "leave": Flight.end,
}


def waiting_pipeline(place, go):
    """A pipeline that waits at step 5 at the given place until `go` is set."""
    fetches = itertools.count()

    def fetch(tree):
        if next(fetches) == 4:
            assert go.wait(60)
        return to_host(tree)

    pipeline = Pipeline(task_of(SPEC), make_state(), fetch=fetch, window=0 if place == "commit" else WINDOW)
    if place == "snapshot":
        pipeline.snapshot_at(4, lambda state: go.wait(60))
        pipeline.snapshot_at(5, print)
    return pipeline


@pytest.mark.parametrize("place", WAITS)
def test_ctrl_c_ends_a_wait_of_the_committing_thread_and_nothing_is_torn(place, ctrl_c):
    """A real signal is sent while the thread waits; the thread then leaves the run."""
    batches, go = make_batches(12), threading.Event()
    pipeline = waiting_pipeline(place, go)
    acts = {"drain": lambda state: pipeline.drain(), "exclusive": lambda state: pipeline.exclusive(unchanged)}
    waits = lambda: pipeline.step == 5 and is_inside(WAITS[place]) and is_inside(wait)
    sender = interrupt_when(waits, then=go.set)
    with pytest.raises(KeyboardInterrupt), pipeline:
        if place in acts:
            pipeline.enter(at_step(5, acts[place]))
        for number, _ in enumerate(pipeline.run(batches), 1):
            if number == 5 and place == "leave":
                break
    sender.join(60)
    assert no_threads_left() and equal(pipeline.state, states_of(batches)[5])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_the_thread_of_a_cut_began_leaves_nobody_held(ctrl_c):
    """The thread of the save has not started: Ctrl-C waits for it, leaving for its save."""
    saved = []

    class Telling(Flight):
        def save(self, *args):
            signal.raise_signal(signal.SIGINT)
            super().save(*args)

    batches = make_batches(12)
    pipeline = pipeline_of()
    pipeline.flight_type = Telling
    pipeline.snapshot_at(5, lambda state: saved.append(int(state.dense.step)))
    with pytest.raises(KeyboardInterrupt), pipeline:
        list(pipeline.run(batches))
    assert saved == [5] and no_threads_left() and equal(pipeline.state, states_of(batches)[5])


def test_a_loss_that_is_not_finite_is_told_with_its_step_beside_another_end():
    def leave(state):
        raise Broken

    batches = make_batches(12)
    batches[4].label[0] = np.nan
    with pytest.raises(Broken) as raised, pipeline_of(callbacks=[at_step(5, leave)]) as pipeline:
        list(pipeline.run(batches))
    assert "at step 5" in all_notes(raised.value)


def test_the_cut_of_a_step_is_saved_though_its_commit_is_interrupted(ctrl_c):
    batches, saved, called = make_batches(12), [], []
    callbacks, stream = [lambda info: called.append(info.step)], iter(batches)
    pipeline = pipeline_of(kind=interrupted_in_the_commit(5), callbacks=callbacks)
    pipeline.snapshot_at(5, lambda state: saved.append((int(state.dense.step), equal(state, states_of(batches)[5]))))
    with pytest.raises(KeyboardInterrupt), pipeline:
        list(pipeline.run(stream))
    assert pipeline.step == 5 and saved == [(5, True)] and no_threads_left() and called == [1, 2, 3, 4, 5]
    list(pipeline.run(stream))
    assert equal(pipeline.state, states_of(batches)[12])


def interrupted_in_the_commit(step, number=signal.SIGINT):
    """A Pipeline class that receives a real signal during the compiled update of a step."""
    calls = itertools.count(1)

    def signalled(compiled, *args):
        found = compiled(*args)
        if next(calls) == step:
            signal.raise_signal(number)
        return found

    return pipeline_with(lambda compiled: functools.partial(signalled, compiled))


def test_a_callback_that_blocks_after_an_interrupted_commit_can_be_interrupted(ctrl_c):
    callbacks = [at_step(5, interrupt), at_step(5, pytest.fail)]
    pipeline = pipeline_of(kind=interrupted_in_the_commit(5), callbacks=callbacks)
    with pytest.raises(KeyboardInterrupt), pipeline:
        list(pipeline.run(make_batches(12)))
    assert pipeline.step == 5


def test_sigterm_with_a_handler_that_exits_tears_no_batch():
    before = signal.signal(signal.SIGTERM, lambda *args: sys.exit(143))
    try:
        batches, pipeline = make_batches(12), pipeline_of(kind=interrupted_in_the_commit(5, signal.SIGTERM))
        with pytest.raises(SystemExit), pipeline:
            list(pipeline.run(batches))
        assert equal(pipeline.state, states_of(batches)[5]) and no_threads_left()
        assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("ask", ["close", "run"])
def test_what_leaving_by_break_has_found_is_raised_by_the_next_call(ask):
    batches, failed, pipeline = make_batches(12), threading.Event(), pipeline_of()

    def save(state):
        failed.set()
        raise Broken

    pipeline.snapshot_at(4, save)
    for number, _ in enumerate(pipeline.run(batches), 1):
        if number == 4:
            assert failed.wait(60)
            break
    with pytest.raises(Broken):
        getattr(pipeline, ask)(*[batches] * (ask == "run"))
    pipeline.close()
    assert len(list(pipeline.run(batches))) == 12


@pytest.mark.process
@pytest.mark.random_instant
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_storm_of_ctrl_c_leaves_no_thread_no_half_batch_and_loses_none(seed):
    """Real signals to a separate process, at random instants, one or several at a time."""
    command = [sys.executable, Path(__file__).with_name("train_under_sigint.py"), str(seed), "50" if seed else "12"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800 if seed else 220, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["interrupted"] >= (10 if seed else 1) and counts["wrong"] == 0, counts  # many come too early or late


# ---- the end of the process


SCRIPT = """
import sys, time
import numpy as np, jax
from oac_task import ROWS, SPEC, make_batches, make_state, task_of
from jaxrec.embedding import HostTables
from jaxrec.oac import Pipeline

def fetch(tree):
    time.sleep(0.02)
    if sys.argv[2] == "fails" and pipeline.step == 6:
        raise OSError("the link is down")
    return jax.tree.map(np.asarray, tree)

state = make_state()._replace(tables=HostTables.create(SPEC, ROWS, sys.argv[1]))
pipeline = Pipeline(task_of(SPEC), state, window=3, fetch=fetch)
sys.kept = pipeline.run(make_batches(12))  # nothing of it is ever collected
for _ in range(6):
    next(sys.kept)
"""


@pytest.mark.process
@pytest.mark.parametrize("way", [pytest.param("ends", marks=pytest.mark.gate), "fails"])
def test_a_process_that_ends_within_a_run_writes_what_it_has_committed(way, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "tables"), way]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    if way == "fails":
        assert "the link is down" in done.stderr
        return
    tables = HostTables.attach(SPEC, ROWS, tmp_path / "tables")
    assert tables.step == 6 and done.stderr == ""
    jax.tree.map(np.testing.assert_array_equal, tables.shards, states_of(make_batches(12))[6].tables.shards)


# ---- hanging transfers


class Hanging:
    """A transfer that hangs at its tenth call until `go` is set."""

    def __init__(self):
        self.calls, self.hangs, self.go = itertools.count(), threading.Event(), threading.Event()

    def __call__(self, tree, *placement):
        if next(self.calls) == 9:
            self.hangs.set()
            assert self.go.wait(60)
        return jax.device_put(tree, *placement) if placement else to_host(tree)


@pytest.mark.realtime  # the loop body has to run after the transfer hangs
@pytest.mark.parametrize("stage", ["send", "fetch"])
def test_ctrl_c_ends_the_wait_for_what_hangs_once_it_was_said_and_a_later_call_takes_it_up(stage, ctrl_c):
    """Two real signals: one ends the loop; the other, after the warning, ends the wait."""
    transfer, batches = Hanging(), make_batches(12)
    pipeline = pipeline_of(**{stage: transfer})
    pipeline.patience_seconds = 0.05
    with pytest.warns(UserWarning, match=f"oac-{'load' if stage == 'send' else stage} at batch") as warned:
        sender = interrupt_when(lambda: len(warned) > 0)
        with pytest.raises(KeyboardInterrupt), pipeline:
            for _ in pipeline.run(batches):
                if transfer.hangs.is_set():
                    interrupt(None)
    sender.join(60)
    assert not no_threads_left()
    transfer.go.set()
    pipeline.patience_seconds = 60
    pipeline.close()
    assert no_threads_left() and equal(pipeline.state, states_of(batches)[pipeline.step])


@pytest.mark.realtime  # a signal has to arrive in the wait
def test_ctrl_c_ends_the_wait_for_a_save_that_hangs_before_another_one_can_begin(ctrl_c):
    go, batches = threading.Event(), make_batches(12)
    first = at_step(3, lambda state: pipeline.snapshot_at(3, lambda saved_state: go.wait(60)))
    second = at_step(4, lambda state: pipeline.snapshot_at(4, lambda saved_state: None))
    pipeline = pipeline_of(callbacks=[first, second])
    pipeline.patience_seconds = 0.05
    with pytest.warns(UserWarning, match="oac-snapshot at batch") as warned:
        # In the run, in leaving it, and in closing the pipeline.
        conditions = lambda: pipeline.step == 4, lambda: len(warned) > 0, lambda: len(warned) > 1
        senders = [*map(interrupt_when, conditions)]
        with pytest.raises(KeyboardInterrupt), pipeline:
            list(pipeline.run(batches))
    join_all(senders)
    go.set()
    pipeline.patience_seconds = 60
    pipeline.close()
    assert no_threads_left() and equal(pipeline.state, states_of(batches)[4])


@pytest.mark.realtime  # signals have to arrive in the wait
def test_ctrl_c_ends_the_wait_for_the_first_of_two_snapshots_of_the_last_step(ctrl_c, no_automatic_gc):
    """Nor do the threads of a run that is dropped then keep its tables."""
    go = threading.Event()

    def save_twice(state):
        pipeline.snapshot_at(3, lambda saved_state: go.wait(60))
        pipeline.snapshot_at(3, lambda saved_state: None)
        raise KeyboardInterrupt

    pipeline = pipeline_of(callbacks=[at_step(3, save_twice)])
    pipeline.patience_seconds = 0.05
    with pytest.warns(UserWarning, match="oac-snapshot at batch") as warned:
        sender = interrupt_when(lambda: len(warned) > 0)
        with pytest.raises(KeyboardInterrupt):
            list(pipeline.run(make_batches(12)))
    sender.join(60)
    assert pipeline.flight.stopped and not no_threads_left()
    go.set()
    until(no_threads_left)


def test_the_last_state_refuses_when_its_rows_were_put_by_hand_since():
    pipeline, batches = pipeline_of(), make_batches(3)
    *_, (last, _) = pipeline.run(batches)
    plans = jaxrec.plan(SPEC, batches[0].ids)
    last.tables.read(plans)
    pipeline.tables.put(plans, pipeline.tables.read(plans))
    with pytest.raises(ValueError, match="lag behind the dense state or have gone on"):
        last.tables.read(plans)


def test_a_state_of_before_a_reset_stays_stale_at_the_same_step():
    pipeline, batches = pipeline_of(), make_batches(6)
    begin = states_of(batches)[0].dense
    *_, (last, _) = pipeline.run(batches[:3])
    pipeline.reset(jaxrec.TrainState(begin, pipeline.tables))
    *_, (again, _) = pipeline.run(batches[3:])
    again.tables.read({})
    with pytest.raises(ValueError, match="lag behind the dense state or have gone on"):
        last.tables.read({})


def test_close_in_another_thread_is_refused_and_harms_nothing():
    batches, said = make_batches(6), []
    pipeline = pipeline_of(callbacks=[at_step(4, lambda state: elsewhere())])

    def close():
        try:
            pipeline.close()
        except ValueError as error:
            said.append(str(error))

    def elsewhere():
        thread = threading.Thread(target=close)
        thread.start()
        thread.join(60)

    with pipeline:
        for number, _ in enumerate(pipeline.run(batches), 1):
            if number == 2:
                elsewhere()
    assert len(said) == 2 and all("another thread" in text for text in said)
    assert equal(pipeline.state, states_of(batches)[6])
