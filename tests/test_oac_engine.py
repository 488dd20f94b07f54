"""Pipeline as an engine: lost shards in every mode and stage, reset when it is broken; see also test_engine.py."""

import contextlib
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mortal import MortalTables
from oac_equivalence import Numbered
from studies.oac_failures import equal
from test_oac import SPEC, Broken, frozen, make_batches, make_state, plain_loop, same, update_of
from world import no_threads_left, until

from jaxrec.checkpoint import restore_shards
from jaxrec.oac import BrokenPipeline, Pipeline
from jaxrec.types import ShardsLost

STEPS = 14
BATCHES = make_batches(STEPS)


def mortal(*deaths):
    state = make_state()
    return state._replace(tables=MortalTables.of(state.tables, deaths))


class Reviver:
    """A watcher that restores shards to initial rows, and records the steps."""

    def __init__(self, engine):
        self.engine, self.lost = engine, []

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        pass

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


def train_mortal(state, batches=BATCHES, hooks=(), watch=True, **options):
    """(pipeline, watcher, losses) of a run in which shards die."""
    with Pipeline(state, update_of(SPEC), **({"window": 3} | options)) as pipeline:
        watcher = pipeline.enter(Reviver(pipeline)) if watch else None
        losses = [np.asarray(metrics["loss"]) for _, metrics in pipeline.run(batches, hooks)]
    assert no_threads_left()
    return pipeline, watcher, losses


def is_serial(pipeline, watcher, losses, **options):
    return same((pipeline.state, losses), serial_loop(watcher.lost, **options))


# ---- shards that are lost


@pytest.mark.parametrize("death", [("read", 6, 1), ("write", 6, 1), ("write", STEPS - 1, 2)])
@pytest.mark.parametrize("options", [{}, {"mode": "sync"}, {"mode": "semisync"}, {"skip_rewritten": True}], ids=str)
def test_every_mode_brings_a_shard_back_and_ends_as_the_loop(death, options):
    """One death is at the last write-back, when no thread is left to gather again."""
    window = {} if "mode" not in options else {"window": None}
    pipeline, watcher, losses = train_mortal(mortal(death), **options | window)
    assert [shards for _, shards in watcher.lost] == [(death[2],)]
    assert is_serial(pipeline, watcher, losses, delay=int(options.get("mode") == "semisync"))
    assert not same((pipeline.state, losses), serial_loop([]))


def test_async_brings_shards_back_too():
    pipeline, watcher, losses = train_mortal(mortal(("read", 5, 1), ("write", 9, 2)), mode="async", writers=2)
    # In one recovery or two: a write of an older batch may meet its death during the read.
    assert {shard for _, shards in watcher.lost for shard in shards} == {1, 2} and np.isfinite(losses).all()
    assert all(np.isfinite(a).all() for s in pipeline.tables.shards.values() for parts in s for a in parts.values())


@pytest.mark.parametrize("skips", [{}, {"skip_rewritten": True}])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_lost_shard_is_asked_for_no_more_until_it_is_back(kind, skips):
    """Each stage may hit the loss once, before it is known."""
    pipeline, watcher, _ = train_mortal(mortal((kind, 6, 1)), window=5, loaders=1, **skips)
    calls = pipeline.tables.calls
    assert len(watcher.lost) == 1 and calls["refused read"] <= 1 and calls["refused write"] <= 1
    assert calls["refused read"] + calls["refused write"] > 0


class Waiting(MortalTables):
    """Tables whose ninth read sets `begun`, then waits for a condition before it reads."""

    def read(self, plans):
        if self.calls["read"] == 8 and not self.begun.is_set():
            self.begun.set()
            self.until()
        return super().read(plans)


def pipeline_over_waiting(death, until, scheduler_type, **options):
    tables = Waiting.of(make_state().tables, [death])
    tables.__dict__.update(begun=threading.Event(), until=lambda: until(pipeline.scheduler))
    pipeline = Pipeline(make_state()._replace(tables=tables), update_of(SPEC), window=4, loaders=1, **options)
    pipeline.scheduler_type = scheduler_type
    return pipeline


def test_a_loss_that_two_stages_meet_is_recovered_once():
    """A loader that gathers while a write hits the loss reports it before exclusive access is granted."""

    class Late(Numbered):
        def mark_lost(self, shards):
            if threading.current_thread().name == "oac-load":
                until(lambda: self.epoch > 0 and not self.lost_shards)
            super().mark_lost(shards)

    def fetch(tree):
        assert Numbered.mine.batch != 4 or pipeline.tables.begun.wait(60)
        return jax.tree.map(np.asarray, tree)

    gone = lambda scheduler: until(lambda: scheduler.lost_shards)
    with pipeline_over_waiting(("write", 4, 1), gone, Late, fetch=fetch) as pipeline:
        watcher = pipeline.enter(Reviver(pipeline))
        list(pipeline.run(BATCHES))
    assert pipeline.tables.calls["refused read"] == pipeline.tables.calls["refused write"] == 1
    assert len(watcher.lost) == 1 and equal(pipeline.state, serial_loop(watcher.lost)[0])


def test_what_is_written_when_a_shard_is_known_to_be_lost_does_not_go_there():
    def fetch(tree):
        scheduler = pipeline.scheduler
        if Numbered.mine.batch >= 5:  # already committed; written only once the loss is known
            until(lambda: scheduler.lost_shards or watcher.lost)
        return jax.tree.map(np.asarray, tree)

    reached = lambda scheduler: (
        scheduler.committed - scheduler.first >= 6 and min(scheduler.written) - scheduler.first >= 5
    )
    before = lambda scheduler: until(lambda: reached(scheduler))  # writes in flight hit the loss
    with pipeline_over_waiting(("read", 8, 1), before, Numbered, fetch=fetch) as pipeline:
        watcher = pipeline.enter(Reviver(pipeline))
        list(pipeline.run(BATCHES))
    assert pipeline.tables.calls["refused read"] == 1 and pipeline.tables.calls["refused write"] == 0
    assert len(watcher.lost) == 1 and equal(pipeline.state, serial_loop(watcher.lost)[0])


def test_without_a_watcher_that_recovers_run_says_so_and_goes_on_when_they_are_back():
    stream, pipeline = iter(BATCHES), Pipeline(mortal(("read", 6, 1)), update_of(SPEC), window=3)
    with pipeline:
        with pytest.raises(ShardsLost, match="no watcher restores them: engine.enter") as raised:
            list(pipeline.run(stream))
        assert raised.value.shards == (1,) and not getattr(raised.value, "__notes__", [""])[1:]
        at = pipeline.step
        pipeline.exclusive(lambda tables: tables.revive([1]))
        list(pipeline.run(stream))
    assert equal(pipeline.state, serial_loop([(at, [1])])[0])


def test_shards_that_are_lost_while_a_run_is_left_are_told_and_come_back_in_the_next_one():
    stream, pipeline = iter(BATCHES), Pipeline(mortal(("write", 4, 1)), update_of(SPEC), window=3)
    with pytest.raises(ShardsLost, match="restore them in `exclusive`"), pipeline:
        for number, _ in enumerate(pipeline.run(stream), 1):
            if number == 5:
                break  # its write is due or done
    pipeline.tables.dead.clear()  # an empty successor reports no loss
    with pipeline:
        watcher = pipeline.enter(Reviver(pipeline))
        list(pipeline.run(stream))
    assert equal(pipeline.state, serial_loop(watcher.lost)[0]) and watcher.lost == [(5, (1,))]


def test_a_recovery_that_brings_nothing_back_ends_the_run_and_does_not_hang():
    class Idle(Reviver):
        def recover(self, shards):
            self.lost.append(shards)

    with pytest.raises(ShardsLost, match="again, after 8 recoveries at step"), contextlib.ExitStack() as stack:
        pipeline = stack.enter_context(Pipeline(mortal(("read", 4, 1)), update_of(SPEC), window=3))
        watcher = pipeline.enter(Idle(pipeline))
        list(pipeline.run(BATCHES))
    assert watcher.lost == [(1,)] * 8 and no_threads_left()


@pytest.mark.parametrize("skips", [{}, {"skip_rewritten": True, "skip_stale_reads": True}])
@pytest.mark.parametrize("how", ["before the save", "in the save", "at the end"])
def test_a_cut_that_meets_lost_shards_is_saved_once_they_are_back(how, skips):
    saved, step = [], STEPS if how == "at the end" else 6
    write = {"before the save": 5, "in the save": 99, "at the end": STEPS - 1}[how]
    pipeline = Pipeline(mortal(("write", write, 1)), update_of(SPEC), window=3, **skips)

    def save(state):
        if how == "in the save" and not pipeline.tables.dead and not watcher.lost:
            pipeline.tables.kill(1)
            raise ShardsLost([1])
        saved.append(frozen(state))

    pipeline.snapshot_at(step, save)
    with pipeline:
        watcher = pipeline.enter(Reviver(pipeline))
        list(pipeline.run(BATCHES))
    ((at, shards),) = watcher.lost
    assert shards == (1,) and at >= step and len(saved) == 1
    assert equal(saved[0], serial_loop([(at, [1])], BATCHES[:at])[0])
    assert equal(pipeline.state, serial_loop([(at, [1])])[0])


@settings(max_examples=15)
@given(data=st.data())
def test_a_run_that_loses_shards_is_that_of_a_loop_that_loses_them_at_the_same_steps(data):
    mode = data.draw(st.sampled_from(["oac", "oac", "oac", "sync", "semisync"]), label="mode")
    options = {"window": data.draw(st.integers(1, 5), label="window")} if mode == "oac" else {"window": None}
    options |= {name: data.draw(st.integers(1, 3), label=name) for name in ("loaders", "fetchers", "writers")}
    if mode == "oac":
        skips = {name: data.draw(st.booleans(), label=name) for name in ("skip_stale_reads", "skip_rewritten")}
        device = not any(skips.values()) and data.draw(st.booleans(), label="device")
        options |= skips | {"validation": "device" if device else "planned"}
    death = st.tuples(st.sampled_from(["read", "write"]), st.integers(0, STEPS), st.integers(0, 3))
    deaths = data.draw(st.lists(death, min_size=1, max_size=3), label="deaths")
    pipeline, watcher, losses = train_mortal(mortal(*deaths), mode=mode, **options)
    died = {shard for kind, number, shard in deaths if number < pipeline.tables.calls[kind]}
    assert {shard for _, shards in watcher.lost for shard in shards} == died
    assert is_serial(pipeline, watcher, losses, delay=int(mode == "semisync"))
    assert pipeline.tables.step == (STEPS if mode != "semisync" else 0)


# ---- the state, and another one


def test_the_state_is_refused_in_saves():
    pipeline = Pipeline(make_state(), update_of(SPEC), window=3)
    pipeline.snapshot_at(1, lambda state: pipeline.state)
    with pytest.raises(ValueError, match="use the state passed to it"), pipeline:
        list(pipeline.run(BATCHES))


def image_of(step):
    """A saved state of the given step, with its own tables."""
    state = frozen(serial_loop([], BATCHES[:step])[0])
    return state._replace(dense=jax.tree.map(jnp.asarray, state.dense))


@pytest.mark.parametrize("skips", [{}, {"skip_rewritten": True, "skip_stale_reads": True}, {"validation": "device"}])
def test_after_reset_a_broken_pipeline_goes_on_from_the_other_state(skips):
    calls = itertools.count()

    def fetch(tree):
        if next(calls) == 8:
            raise Broken
        return jax.tree.map(np.asarray, tree)

    pipeline = Pipeline(make_state(), update_of(SPEC), window=3, fetch=fetch, **skips)
    with pipeline:
        with pytest.raises(Broken):
            list(pipeline.run(BATCHES))
        with pytest.raises(BrokenPipeline):
            pipeline.drain()
        pipeline.reset(image_of(5))
        assert pipeline.step == 5 == int(pipeline.state.dense.step)
        list(pipeline.run(BATCHES[5:]))
    assert equal(pipeline.state, serial_loop([])[0])
