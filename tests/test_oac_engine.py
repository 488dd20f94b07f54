"""Pipeline as an engine: exclusive access, lost shards, reset to other states, watchers that exit last."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hooks import at_step
from hypothesis import given, settings
from hypothesis import strategies as st
from oac_equivalence import Numbered
from studies.oac_failures import equal
from test_oac import SPEC, Broken, copied, frozen, make_batches, make_state, same, update_of
from world import no_threads_left

import jaxrec
from jaxrec.embedding import HostTables
from jaxrec.oac import BrokenPipeline, Pipeline
from jaxrec.types import ShardsLost, TrainState

STEPS = 14
BATCHES = make_batches(STEPS)


class MortalTables(HostTables):
    """Tables whose shards die at chosen reads or writes: their rows are lost, and refused until revived."""

    @classmethod
    def of(cls, tables, deaths=()):
        """`deaths`: (kind of call, its index from 0, shard)."""
        found = cls(tables.spec, tables.layout, tables.shards, tables.directory, tables.steps)
        calls = {"read": 0, "write": 0, "refused read": 0, "refused write": 0}
        found.__dict__.update(deaths=list(deaths), calls=calls, dead=set(), lock=threading.Lock())
        return found

    def count(self, kind):
        with self.lock:
            number, self.calls[kind] = self.calls[kind], self.calls[kind] + 1
            for shard in [shard for k, n, shard in self.deaths if (k, n) == (kind, number)]:
                self.kill(shard)

    def kill(self, shard):
        self.dead.add(shard)
        for name in self.spec.stacks:
            for array in self.shards[name][shard].values():
                array[:] = np.nan

    def revive(self, shards):
        with self.overwriting(shards):
            for shard in shards:
                self.dead.discard(shard)
                for name in self.spec.stacks:
                    self.reset_shard(name, shard)
        return self

    def read(self, plans):
        self.count("read")
        rows = super().read(plans)
        # After the read: a shard that dies during it leaves torn rows.
        if lost := [s for s in self.dead if any(p.count[s] for p in plans.values())]:
            self.count("refused read")
            raise ShardsLost(lost, "the test killed them")
        return rows

    def write(self, store, shards):
        self.count("write")
        chosen = range(self.spec.shards) if shards is None else shards
        store([shard for shard in chosen if shard not in self.dead])
        if lost := self.dead.intersection(chosen):
            self.count("refused write")
            raise ShardsLost(lost)
        return self

    def put(self, plans, rows, shards=None):
        return self.write(lambda there: HostTables.put(self, plans, rows, there), shards)

    def add(self, plans, rows, old, shards=None):
        return self.write(lambda there: HostTables.add(self, plans, rows, old, there), shards)


def mortal(*deaths):
    state = make_state()
    return state._replace(tables=MortalTables.of(state.tables, deaths))


class Reviver:
    """A watcher that restores shards to initial rows, and records the steps."""

    def __init__(self, engine):
        self.engine, self.lost, self.events = engine, [], []

    def __enter__(self):
        self.events.append("enter")
        return self

    def __exit__(self, kind, error, trace):
        self.events.append(("leave", kind))

    def recover(self, shards):
        self.lost.append((self.engine.step, shards))
        self.engine.exclusive(lambda tables: tables.revive(shards))


def serial_loop(lost, batches=BATCHES, delay=0):
    """Trains batch by batch; `lost`: (step after which shards are lost and reset, shards)."""
    update, state, losses, capacity = jax.jit(update_of(SPEC), donate_argnums=0), make_state(), [], None
    dense, tables = state
    before = copied(tables)
    for step, batch in enumerate(batches, 1):
        plans = jaxrec.plan(SPEC, batch.ids, capacity)
        capacity = {name: p.unique.shape[1] for name, p in plans.items()}
        old, before = (before if delay else tables).read(plans), copied(tables)
        dense, rows, metrics = update(dense, old, plans, batch)
        tables.add(plans, rows, old) if delay else tables.put(plans, rows)
        losses.append(np.asarray(metrics["loss"]))
        for shards in [shards for at, shards in lost if at == step]:
            for name in SPEC.stacks:
                for shard in shards:
                    tables.reset_shard(name, shard)
            before = copied(tables)
    return TrainState(dense, tables), losses


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
            assert self.until()
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
                self.wait_until(lambda: self.epoch > 0 and not self.lost_shards, seconds=5)
            super().mark_lost(shards)

    def fetch(tree):
        assert Numbered.mine.batch != 4 or pipeline.tables.begun.wait(60)
        return jax.tree.map(np.asarray, tree)

    gone = lambda scheduler: scheduler.wait_until(lambda: scheduler.lost_shards, seconds=60)
    with pipeline_over_waiting(("write", 4, 1), gone, Late, fetch=fetch) as pipeline:
        watcher = pipeline.enter(Reviver(pipeline))
        list(pipeline.run(BATCHES))
    assert pipeline.tables.calls["refused read"] == pipeline.tables.calls["refused write"] == 1
    assert len(watcher.lost) == 1 and equal(pipeline.state, serial_loop(watcher.lost)[0])


def test_what_is_written_when_a_shard_is_known_to_be_lost_does_not_go_there():
    def fetch(tree):
        scheduler = pipeline.scheduler
        if Numbered.mine.batch >= 5:  # already committed; written only once the loss is known
            assert scheduler.wait_until(lambda: scheduler.lost_shards or watcher.lost, seconds=60)
        return jax.tree.map(np.asarray, tree)

    reached = lambda scheduler: (
        scheduler.committed - scheduler.first >= 6 and min(scheduler.written) - scheduler.first >= 5
    )
    before = lambda scheduler: scheduler.wait_until(
        lambda: reached(scheduler), seconds=60
    )  # writes in flight hit the loss
    with pipeline_over_waiting(("read", 8, 1), before, Numbered, fetch=fetch) as pipeline:
        watcher = pipeline.enter(Reviver(pipeline))
        list(pipeline.run(BATCHES))
    assert pipeline.tables.calls["refused read"] == 1 and pipeline.tables.calls["refused write"] == 0
    assert len(watcher.lost) == 1 and equal(pipeline.state, serial_loop(watcher.lost)[0])


def test_what_a_hook_loses_comes_back_behind_the_cut_of_its_step():
    events, views = [], []
    pipeline = Pipeline(mortal(), update_of(SPEC), window=3)
    pipeline.snapshot_at(5, lambda state: events.append(("snapshot", equal(frozen(state), frozen_at[5]))))
    frozen_at = {step: serial_loop([], BATCHES[:step])[0] for step in (5,)}
    hooks = [at_step(5, lambda state: pipeline.lose([2])), at_step(5, lambda state: events.append("hook"))]
    with pipeline:
        watcher = pipeline.enter(Reviver(pipeline))
        watcher.lost = events
        for number, (state, _) in enumerate(pipeline.run(BATCHES, hooks), 1):
            if number == 5:
                views.append(frozen(state))  # the tables are whole, and match the state
    assert events == ["hook", ("snapshot", True), (5, (2,))]
    assert equal(views[0], serial_loop([(5, (2,))], BATCHES[:5])[0])
    assert equal(pipeline.state, serial_loop([(5, (2,))])[0])


@pytest.mark.parametrize("real", [True, False])
def test_without_a_watcher_that_recovers_run_says_so_and_goes_on_when_they_are_back(real):
    stream, pipeline = iter(BATCHES), Pipeline(mortal(*[("read", 6, 1)] * real), update_of(SPEC), window=3)
    hook = at_step(5, lambda state: None if real else pipeline.lose([1]))
    with pipeline:
        with pytest.raises(ShardsLost, match="no watcher restores them: pipeline.enter") as raised:
            list(pipeline.run(stream, [hook]))
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


# ---- alone with the tables, and the state


def test_a_change_that_returns_other_tables_or_raises_leaves_a_pipeline_that_goes_on():
    def raise_broken(tables):
        raise Broken

    pipeline = Pipeline(make_state(), update_of(SPEC), window=3)
    with pipeline:
        for number, _ in enumerate(pipeline.run(BATCHES), 1):
            if number == 4:
                for change in (copied, lambda tables: None):
                    with pytest.raises(ValueError, match="changed in place, so return those that it was given"):
                        pipeline.exclusive(change)
                with pytest.raises(Broken):
                    pipeline.exclusive(raise_broken)
    assert equal(pipeline.state, serial_loop([])[0])


def test_the_state_is_refused_in_hooks_and_saves_and_is_what_the_last_whole_hook_returned():
    def halve(state, step, plan, metrics):
        if step != 3:
            return state
        params = jax.tree.map(lambda leaf: leaf / 2, state.dense.params)
        halved.append(np.array(params["scale"]))
        return state._replace(dense=state.dense._replace(params=params))

    def look(state):
        with pytest.raises(ValueError, match="use the state passed to it"):
            _ = pipeline.state
        looked.append(frozen(state) if threading.current_thread().name == "oac-snapshot" else state.dense)
        if len(looked) == 2:
            raise Broken

    looked: list = []
    halved: list = []
    pipeline = Pipeline(make_state(), update_of(SPEC), window=3)
    pipeline.snapshot_at(1, look)
    with pytest.raises(Broken), pipeline:
        for state, _ in pipeline.run(BATCHES, [halve, at_step(3, look)]):
            if pipeline.step == 1:
                pipeline.drain()
            assert pipeline.state.dense is state.dense
    np.testing.assert_array_equal(pipeline.state.dense.params["scale"], halved[0])
    np.testing.assert_array_equal(looked[1].params["scale"], halved[0])
    assert int(looked[0].dense.step) == 1 and int(pipeline.state.dense.step) == 3


# ---- another state


def image_of(step):
    """A saved state of the given step, with its own tables."""
    state = frozen(serial_loop([], BATCHES[:step])[0])
    return state._replace(dense=jax.tree.map(jnp.asarray, state.dense))


@pytest.mark.parametrize("skips", [{}, {"skip_rewritten": True, "skip_stale_reads": True}, {"validation": "device"}])
@pytest.mark.parametrize("broken", [True, False])
def test_after_reset_a_pipeline_goes_on_from_the_other_state(broken, skips):
    calls = iter(range(1000))

    def fetch(tree):
        if broken and next(calls) == 8:
            raise Broken
        return jax.tree.map(np.asarray, tree)

    pipeline = Pipeline(make_state(), update_of(SPEC), window=3, fetch=fetch, **skips)
    pipeline.snapshot_at(STEPS, lambda state: None, unreached="ignore")
    with pipeline:
        with pytest.raises(Broken):
            for _ in pipeline.run(BATCHES, [at_step(9, lambda state: broken or raise_broken())]):
                pass
        if broken:
            with pytest.raises(BrokenPipeline):
                pipeline.drain()
        pipeline.reset(image_of(5))
        assert pipeline.step == 5 == int(pipeline.state.dense.step)
        pipeline.snapshot_at(STEPS, lambda state: None)  # the announced snapshot was dropped
        list(pipeline.run(BATCHES[5:]))
    assert equal(pipeline.state, serial_loop([])[0])


def raise_broken():
    raise Broken


# ---- watchers


class Watcher:
    """A watcher that records its enter and exit."""

    def __init__(self, name, events, end=None):
        self.name, self.events, self.end = name, events, end

    def __enter__(self):
        self.events.append(f"enter {self.name}")
        return self.name

    def __exit__(self, kind, error, trace):
        self.events.append((f"leave {self.name}", kind))
        if self.end:
            raise self.end


@pytest.mark.parametrize("error", [None, Broken])
def test_watchers_leave_in_reverse_when_the_run_is_closed_and_the_cut_that_is_due_is_saved(error):
    events, saving = [], threading.Event()
    pipeline = Pipeline(make_state(), update_of(SPEC), window=3)

    def save(state):
        saving.set()
        events.append(("saved", equal(frozen(state), serial_loop([], BATCHES[:6])[0])))

    pipeline.snapshot_at(6, save)
    with pytest.raises(error) if error else contextlib.nullcontext(), pipeline:
        assert pipeline.enter(Watcher("first", events)) == "first"
        pipeline.enter(Watcher("second", events))
        for number, _ in enumerate(pipeline.run(BATCHES), 1):
            if number == 6 and error:
                raise error
            if number == 6:
                break
    assert events == ["enter first", "enter second", ("saved", True), ("leave second", error), ("leave first", error)]
    assert not pipeline.running and saving.is_set() and no_threads_left()


def test_watchers_are_told_what_leaving_has_found_and_may_add_to_it():
    def fetch(tree):
        raise Broken

    events: list = []
    with pytest.raises(KeyError) as raised, Pipeline(make_state(), update_of(SPEC), fetch=fetch) as pipeline:
        pipeline.enter(Watcher("first", events, end=KeyError("the watcher's")))
        with pipeline:  # an inner block leaves no watcher
            pass
        assert events == ["enter first"]
        for _ in pipeline.run(BATCHES):
            break
    assert events[1:] == [("leave first", Broken)] and isinstance(raised.value.__context__, Broken)
