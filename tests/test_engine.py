"""All engines under one harness: the result of training, the order of events, and what holds under misuse."""

import _thread
import contextlib
import itertools
import os
import signal
import threading
import traceback
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from click_model import ROWS, SPEC, TASK, batch_at, bits, fresh, plain, stream_from
from equality import same
from failing_tables import FailingTables
from step_callbacks import at_step, failing_at
from threads import ctrl_c as ctrl_c  # a fixture
from threads import no_automatic_gc as no_automatic_gc  # a fixture
from threads import until

import jaxrec
from jaxrec import Batch, Callback, Serial
from jaxrec.callbacks import RolledBack
from jaxrec.cpr import Recovery, mfu
from jaxrec.data.loader import Loader
from jaxrec.embedding import DeviceTables, EmbeddingSpec, HostTables, Lookup, Table, native
from jaxrec.oac import Overlap, Pipeline
from jaxrec.prefetch import END, Stream
from jaxrec.types import ShardsLost


def played(state):
    """The state; from here on, puts beside the programs end as late as they may, in all tests."""
    native.load(jax.devices()[0]).jaxrec_play(3, 11)
    return state


ENGINES = {
    "serial over host tables": lambda callbacks=(): Serial(TASK, fresh("host"), callbacks),
    "serial over device tables": lambda callbacks=(): Serial(TASK, fresh("device"), callbacks),
    "serial over pinned tables": lambda callbacks=(): Serial(TASK, fresh("pinned"), callbacks),
    "serial over servers": lambda callbacks=(): Serial(TASK, fresh("remote"), callbacks),
    "overlap": lambda callbacks=(): Serial(Overlap(TASK, window=3), played(fresh("pinned")), callbacks),
    "pipeline": lambda callbacks=(): Pipeline(TASK, fresh("host"), callbacks, window=3),
    "pipeline in sync": lambda callbacks=(): Pipeline(TASK, fresh("host"), callbacks, mode="sync"),
    "pipeline over servers": lambda callbacks=(): Pipeline(TASK, fresh("remote"), callbacks, window=3),
    "pipeline over pinned tables": lambda callbacks=(): Pipeline(TASK, fresh("pinned"), callbacks, window=3),
}
KINDS = {
    "serial": lambda state, callbacks=(): Serial(TASK, state, callbacks),
    "pipeline": lambda state, callbacks=(): Pipeline(TASK, state, callbacks, window=3),
}
over_host_tables = pytest.mark.parametrize("engine_of", KINDS.values(), ids=KINDS)
# All parts are covered by other engines.
MORE = ("serial over servers", "pipeline in sync", "pipeline over pinned tables")
each = pytest.mark.parametrize(
    "make", [pytest.param(make, id=name, marks=[pytest.mark.more] * (name in MORE)) for name, make in ENGINES.items()]
)


def doubled(state):
    return state._replace(dense=state.dense._replace(params=jax.tree.map(lambda w: w * 2, state.dense.params)))


@pytest.mark.parametrize("make", [ENGINES["serial over device tables"], ENGINES["serial over pinned tables"]])
def test_batches_of_numpy_are_planned_by_a_gpu_with_equal_results(make, monkeypatch):
    """Here the CPU stands for a GPU. Capacities grow on the way; batches that were not trained come back."""
    monkeypatch.setattr("jaxrec.engine.on_one_gpu", lambda mesh: True)
    kinds, stream = set(), (batch_at(index, size=8 + 8 * (index > 5)) for index in range(12))
    note = lambda info: kinds.update(type(leaf) for leaf in jax.tree.leaves(info.plans))
    with make([note]) as engine:
        for _ in engine.run(stream):
            if engine.step == 4:
                break
        list(engine.run(stream))
        assert all(issubclass(kind, jax.Array) for kind in kinds)
        assert same(bits(engine.state), grown(12))
        good = Batch({"item": np.array([1, 2])}, np.ones(2, np.float32))
        for bad, why in (
            (good._replace(ids={"item": np.array([1, 40])}), "1 ids of lookups"),
            (good._replace(ids={"item": np.array([1, 2**40])}), "ids are i32"),
            (good._replace(weight=np.array([1, -1], np.float32)), r"weight\[1\] is -1"),
        ):
            with pytest.raises(ValueError, match=why):
                list(engine.run([bad]))
        assert engine.step == 12 and same(bits(engine.state), grown(12))
        # An id outside its table is raised in its place, and once; the batches around it are trained.
        stream = iter([good, good, good._replace(ids={"item": np.array([1, 40])}), good, good])
        seen = engine.run(stream)
        assert [engine.step for _ in itertools.islice(seen, 2)] == [13, 14]
        with pytest.raises(ValueError, match="1 ids of lookups"):
            next(seen)
        assert [engine.step for _ in engine.run(stream)] == [15, 16]


def grown(steps):
    """The bits of a plain loop over batches of 8, then of 16."""
    state = fresh("host")
    for index in range(steps):
        batch = batch_at(index, size=8 + 8 * (index > 5))
        state, _ = TASK.step(state, batch)
    return bits(state)


@each
def test_a_run_is_a_fold_of_the_step(make):
    seen = []
    note = lambda info: seen.append((info.step, int(info.state.dense.step), set(info.plans)))
    with make(iter([note])) as engine:
        losses = [float(metrics["loss"]) for _, metrics in engine.run(stream_from(0))]
    wanted, wanted_losses = plain(12)
    assert losses == wanted_losses and same(bits(engine.state), wanted)
    assert seen == [(step, step, {"width_4"}) for step in range(1, 13)] and engine.step == 12
    assert not same(bits(engine.state), plain(11)[0])  # negative control


@each
def test_the_same_iterator_goes_on_where_a_run_left_it(make):
    stream = stream_from(0)
    with make() as engine:
        for _ in engine.run(stream):
            if engine.step == 5:
                break
        assert not engine.running
        list(engine.run(stream))
    assert engine.step == 12 and same(bits(engine.state), plain(12)[0])


@pytest.mark.parametrize(
    "make",
    [
        ENGINES["serial over host tables"],
        ENGINES["serial over device tables"],
        ENGINES["serial over pinned tables"],
        ENGINES["pipeline"],
    ],
)
def test_batches_on_the_device_are_planned_there_with_equal_results(make):
    """Capacities grow on the way and are checked as on the host; a bad id is refused before its step."""
    kinds, sent = set(), (jaxrec.to_device(batch_at(index, size=8 + 8 * (index > 5))) for index in range(12))
    note = lambda info: kinds.update(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(info.plans))
    with make([note]) as engine:
        list(engine.run(sent))
        found = bits(engine.state)
        with pytest.raises(ValueError, match="1 ids of lookups"):
            list(engine.run([jaxrec.to_device(Batch({"item": np.array([1, 40])}, np.ones(2)))]))
        assert engine.step == 12 and same(bits(engine.state), found)
    with make() as engine:
        list(engine.run(batch_at(index, size=8 + 8 * (index > 5)) for index in range(12)))
        assert kinds == {True} and same(bits(engine.state), found)


class Blocks:
    """The rows of the batches of `stream_from`, a block each."""

    rows = [len(batch_at(0).label)] * 12

    def __getitem__(self, index):
        batch = batch_at(index)
        return {"label": batch.label, "dense": batch.dense, "ids": batch.ids}


@each
def test_a_loader_goes_on_where_a_run_left_it(make):
    with make() as engine:
        list(engine.run(Loader(Blocks(), Blocks.rows[0])))
        wanted = bits(engine.state)
    for last in (5, 10):  # from 10 on, the end of the loader is seen ahead
        loader = Loader(Blocks(), Blocks.rows[0])
        with make() as engine:
            for _ in engine.run(loader):
                if engine.step == last:
                    until(lambda: last == 5 or loader.position() == 12)  # noqa: B023  called here
                    break
            list(engine.run(loader))
        assert engine.step == 12 and same(bits(engine.state), wanted)


@each
def test_a_source_that_fails_once_loses_no_batch_of_a_loader(make):
    class Once(Blocks):
        def __getitem__(self, index):
            if index == 10 and not failed:
                failed.append(index)
                raise OSError("the disk hesitates")
            return super().__getitem__(index)

    failed, told, loader = [], 0, Loader(Once(), Blocks.rows[0])
    with make() as engine:
        run = engine.run(loader)
        for _ in itertools.islice(run, 8):
            pass
        until(lambda: failed)
        run.close()
        for _ in range(2):
            try:
                list(engine.run(loader))
            except OSError:
                told += 1
    assert (told, engine.step) == (1, 12) and same(bits(engine.state), plain(12)[0])


@each
def test_ctrl_c_while_a_run_begins_loses_no_batch(make, ctrl_c, no_automatic_gc):
    def stream():
        _thread.interrupt_main()
        yield from stream_from(0)

    batches = stream()
    with make() as engine:
        with pytest.raises(KeyboardInterrupt):
            list(engine.run(batches))
        list(engine.run(batches))
    assert engine.step == 12 and same(bits(engine.state), plain(12)[0])


def test_batches_are_planned_by_the_lookups_of_the_task_whatever_those_of_its_tables_are():
    tables = {"left": Table(40, 4), "right": Table(40, 4)}
    mine, other = (
        EmbeddingSpec(tables, {"item": Lookup(item), "more": Lookup(more)}, shards=4)
        for item, more in (("left", "right"), ("right", "left"))
    )
    task = TASK.__class__(mine, TASK.loss, TASK.optimizer, TASK.row_optimizer)
    batches = [batch._replace(ids=dict.fromkeys(("item", "more"), batch.ids["item"])) for batch in stream_from(0)]
    init = lambda home, spec: task.init({"w": np.ones(4, np.float32)}, home.create(spec, TASK.row_optimizer))
    wanted = Serial(task, init(HostTables, mine)).train(batches)
    found = [of(init(HostTables, other)) for of in (lambda s: Serial(task, s), lambda s: Pipeline(task, s, window=3))]
    found = [engine.train(batches) for engine in found]
    found.append(Serial(task, init(DeviceTables, other)).train(map(jaxrec.to_device, batches)))
    assert all(same(bits(state), bits(wanted)) for state in found)


@over_host_tables
def test_a_save_that_fails_where_a_run_goes_back_is_told(engine_of):
    class Back(Callback):
        goes_back = True

        def begin(self, engine):
            self.engine = engine

        def after_step(self, info):
            if info.step == 5:
                self.engine.snapshot_at(5, self.save)
                self.engine.lose([0])

        def save(self, state):
            raise OSError("the disk is full")

        def recover(self, shards):
            raise RolledBack(lambda: self.engine.reset(fresh("host")))

    with pytest.raises(OSError, match="the disk is full"), engine_of(fresh("host"), [Back()]) as engine:
        engine.train(lambda step: stream_from(step))


@over_host_tables
def test_an_error_of_the_stream_ahead_of_its_turn_keeps_no_run_from_going_back(engine_of):
    failed, lost = [], []

    class Back(Callback):
        goes_back = True

        def begin(self, engine):
            self.engine = engine

        def after_step(self, info):
            if info.step == 5 and not lost:
                lost.append(5)
                until(lambda: failed)
                self.engine.lose([0])

        def recover(self, shards):
            raise RolledBack(lambda: self.engine.reset(fresh("host")))

    def batches(step):
        for number in range(step, 12):
            if number == 7 and not failed:
                failed.append(7)
                raise OSError("the disk hesitates")
            yield batch_at(number)

    with engine_of(fresh("host"), [Back()]) as engine:
        engine.train(batches)
        assert lost and engine.step == 12 and same(bits(engine.state), plain(12)[0])


@each
def test_an_error_of_the_stream_is_raised_in_its_turn_whatever_has_ended_a_run_before(make):
    def stream():
        yield from itertools.islice(stream_from(0), 6)
        met.append(6)
        raise OSError("no more can be read")

    for last in (4, 6):
        met, batches = [], stream()
        with make() as engine:
            for _ in engine.run(batches):
                if engine.step == last:
                    until(lambda: met)  # noqa: B023  called here
                    break
            with pytest.raises(OSError, match="no more can be read"):
                list(engine.run(batches))
            assert engine.step == 6 and same(bits(engine.state), plain(6)[0])


def test_exclusive_is_refused_while_another_engine_trains_the_tables():
    state = fresh("host")
    with Serial(TASK, fresh("host")._replace(tables=state.tables)) as other, Pipeline(TASK, state) as pipeline:
        next(run := pipeline.run(stream_from(0)))
        with pytest.raises(ValueError, match="another engine is running over these tables"):
            other.exclusive(lambda tables: tables)
        not_begun = other.run(stream_from(0))
        with pytest.raises(ValueError, match="another engine is running over these tables"):
            other.exclusive(lambda tables: tables)
        run.close()
        not_begun.close()
        other.exclusive(lambda tables: tables)


def test_an_engine_in_a_thread_called_rows_is_left_as_any_other():
    def trained():
        with Pipeline(TASK, fresh("host"), window=3) as engine:
            engine.train(stream_from(0))
        return bits(engine.state)

    with ThreadPoolExecutor(1, "rows") as pool:
        assert same(pool.submit(trained).result(60), plain(12)[0])


@each
def test_a_callback_that_fails_leaves_what_the_last_whole_callback_returned(make):
    double = lambda info: doubled(info.state)
    with make([double, failing_at(4), double]) as engine:
        with pytest.raises(KeyError):
            list(engine.run(stream_from(0)))
        failed = bits(engine.state)
    act = lambda state, step: doubled(doubled(state)) if step < 4 else doubled(state)
    assert engine.step == 4 and same(failed, plain(4, act=act)[0])


@each
def test_the_state_is_refused_in_after_step(make):
    with make([lambda info: engine.state]) as engine:
        with pytest.raises(ValueError, match="was read in `after_step`: use info.state"):
            list(engine.run(stream_from(0)))
        assert np.isfinite(engine.state.dense.params["w"]).all()


def emptied(tables):
    """The tables with shard 1 set to zero; device tables are donated."""
    rows = {part: np.zeros((10, one.width), np.float32) for part, one in SPEC.layout(ROWS)["width_4"].items()}
    return tables.with_shard("width_4", 1, rows)


@each
def test_tables_change_in_a_callback_for_those_behind_it_and_for_the_step_to_come(make):
    seen = []
    change = at_step(6, lambda state: engine.exclusive(emptied))
    keep = lambda state: lambda tables: (seen.append(bits(state._replace(tables=tables))), tables)[1]
    look = at_step(6, lambda state: engine.exclusive(keep(state)))
    with make([change, look]) as engine:
        list(engine.run(stream_from(0)))
    act = lambda state, step: state._replace(tables=emptied(state.tables)) if step == 6 else state
    assert not np.any(seen[0][1]["width_4", "value"][1::4]) and same(bits(engine.state), plain(12, act=act)[0])
    assert not same(bits(engine.state), plain(12)[0])


class Restoring(Callback):
    """Records events and restores lost shards with zeros."""

    def __init__(self, events, name="end"):
        self.events, self.name = events, name

    def begin(self, engine):
        self.engine, self.thread = engine, threading.current_thread()
        self.events.append("begin")

    def end(self, error):
        self.events.append((self.name, error and type(error), self.engine.running))

    def save(self, state):
        self.events.append(("save", int(state.dense.step), bits(state)))

    def recover(self, shards):
        assert threading.current_thread() is self.thread
        self.engine.exclusive(emptied)  # waits for the snapshot
        self.events.append(("recover", self.engine.step, list(shards)))


class Losing(Restoring):
    """Loses shard 1 after step 3."""

    def after_step(self, info):
        self.events.append(("after_step", info.step))
        if info.step == 3:
            self.engine.lose([1])


@each
def test_the_order_is_commit_callbacks_cut_and_recovery(make):
    events, seen = [], []
    callback = Losing(events)
    with make([callback]) as engine:
        engine.snapshot_at(3, callback.save)
        for state, _ in engine.run(stream_from(0, 5)):
            seen += [bits(state)] if engine.step == 3 else []
    (at, saved), *none = [(i, event) for i, event in enumerate(events) if event[0] == "save"]
    assert not none and same(saved[2], plain(3)[0])
    events[at] = saved[:2]
    called = [("after_step", step) for step in range(1, 6)]
    steps = [*called[:3], ("save", 3), ("recover", 3, [1]), *called[3:]]
    assert events == ["begin", *steps, ("end", None, False)]
    act = lambda state, step: state._replace(tables=emptied(state.tables)) if step == 3 else state
    assert same(seen[0], plain(3, act=act)[0]) and same(bits(engine.state), plain(5, act=act)[0])


@each
def test_shards_that_nobody_recovers_end_the_run_by_name_and_it_goes_on_when_they_are_back(make):
    stream = stream_from(0)
    with make([at_step(2, lambda state: engine.lose([3, 1]))]) as engine:
        with pytest.raises(ShardsLost, match=r"shards \[1, 3\]") as caught:
            list(engine.run(stream))
        at = engine.step
        engine.exclusive(emptied)
        list(engine.run(stream))
    act = lambda state, step: state._replace(tables=emptied(state.tables)) if step == at else state
    assert caught.value.shards == (1, 3) and same(bits(engine.state), plain(12, act=act)[0])


@each
@pytest.mark.parametrize("error", [None, KeyError])
def test_callbacks_end_in_reverse_behind_the_run_and_its_cuts_with_the_error(make, error):
    """Right after a step whose snapshot may still be saved."""
    events = []
    first, second = Restoring(events, "first"), Restoring(events, "second")
    with pytest.raises(error) if error else contextlib.nullcontext(), make([first, second]) as engine:
        engine.snapshot_at(2, second.save)
        for _ in engine.run(stream_from(0)):
            if engine.step == 2:
                if error:
                    raise error("in the body")
                break
    assert same(events[2][2], plain(2)[0]) and events[2][:2] == ("save", 2)
    assert events[3:] == [("second", error, False), ("first", error, False)]


@each
def test_another_state_takes_the_place_between_runs(make):
    with make() as engine:
        list(engine.run(stream_from(0, 7)))
        kept = make().state
        running = engine.run(stream_from(7))
        next(running)
        with pytest.raises(ValueError, match="reset within a run"):
            engine.reset(kept)
        running.close()
        engine.reset(kept)
        assert engine.step == 0
        assert same(bits(engine.train(stream_from)), plain(12)[0])


@each
@pytest.mark.parametrize("bad", [1, 3, 4])
def test_a_loss_that_is_not_finite_is_refused_by_its_step(make, bad):
    batches = [batch_at(index) for index in range(4)]
    batches[bad - 1].label[2] = np.nan
    with make() as engine, pytest.raises(FloatingPointError, match=f"nan at step {bad} .*learning rates"):
        list(engine.run(batches))


@each
def test_two_runs_at_a_time_and_cuts_of_a_committed_step_are_refused(make):
    with make() as engine:
        running = engine.run(stream_from(0))
        next(running)
        with pytest.raises(ValueError, match="running"):
            next(engine.run(stream_from(0)))
        with pytest.raises(ValueError, match="committed already"):
            engine.snapshot_at(1, print)
        engine.snapshot_at(40, print)
        with pytest.warns(UserWarning, match=r"snapshots announced for steps \[40\] were not taken: .* left at step 1"):
            engine.close()


@each
def test_all_cuts_of_a_step_are_taken_after_its_callbacks_in_the_order_of_their_announcement(make):
    act = lambda state, step: doubled(state) if step == 5 else state
    events, wanted = [], {step: plain(step, act=act)[0] for step in (5, 6)}

    def cut(name):
        return lambda state: events.append((name, same(bits(state), wanted[int(state.dense.step)])))

    def first(info):
        if info.step in (5, 6):
            engine.snapshot_at(info.step, cut(f"second of {info.step}"))
            engine.snapshot_at(info.step, cut(f"third of {info.step}"))

    with make([first, lambda info: doubled(info.state) if info.step == 5 else None]) as engine:
        engine.snapshot_at(5, cut("first of 5"))
        engine.train(stream_from)
    assert [name for name, _ in events] == [
        "first of 5", "second of 5", "third of 5", "second of 6", "third of 6"
    ] and all(equal for _, equal in events)  # fmt: skip


def test_ctrl_c_waits_for_the_step_that_is_committed_and_its_callbacks(ctrl_c):
    def step(*given):
        found = TASK.step(*given)
        if int(found[0].dense.step) == 4:
            signal.raise_signal(signal.SIGINT)
        return found

    seen = []
    with Serial(types.SimpleNamespace(step=step), fresh("device"), [lambda info: seen.append(info.step)]) as engine:
        with pytest.raises(KeyboardInterrupt):
            list(engine.run(stream_from(0)))
        assert engine.step == 4 and seen == [1, 2, 3, 4] and same(bits(engine.state), plain(4)[0])


# ---- under misuse nothing fails silently, nothing hangs, no state is lost


@each
def test_the_cut_of_a_step_is_saved_though_a_callback_of_it_failed(make):
    saved, stream = [], stream_from(0)
    with make([failing_at(3)]) as engine:
        engine.snapshot_at(3, lambda state: saved.append(bits(state)))
        with pytest.raises(KeyError, match="of the callback"):
            list(engine.run(stream))
        assert len(saved) == 1 and same(saved[0], plain(3)[0])
        list(engine.run(stream))
    assert same(bits(engine.state), plain(12)[0])


@each
def test_a_loss_that_is_not_finite_is_told_though_the_run_was_left(make):
    bad = batch_at(1)
    bad.label[2] = np.nan
    with pytest.raises(FloatingPointError, match="at step 2"), make() as engine:
        for _ in engine.run([batch_at(0), bad, batch_at(2), batch_at(3)]):
            if engine.step == 3:
                break


@each
@pytest.mark.parametrize("callbacks", [[], [failing_at(4)]], ids=["", "a callback fails"])
def test_a_cut_of_a_state_whose_loss_is_not_finite_is_not_saved(make, callbacks):
    """It would take the place of a good image, and a few steps later all images would be of no use."""
    saved, batches = [], [batch_at(index) for index in range(6)]
    batches[2].label[2] = np.nan
    with make(callbacks) as engine:
        for step in (2, 4):
            engine.snapshot_at(step, lambda state: saved.append(int(state.dense.step)))
        with pytest.raises((FloatingPointError, KeyError)) as raised:
            list(engine.run(batches))
    said = "".join(traceback.format_exception(raised.value))
    assert "the loss is nan at step 3" in said and engine.step == 4 and saved == [2]


@each
def test_a_cut_of_parameters_that_are_not_finite_is_not_saved_though_the_losses_are(make):
    """The loss of a step is that of the parameters before it."""
    saved = []

    def break_them(info):
        dense = info.state.dense
        infinite = jax.tree.map(lambda weight: weight * np.inf, dense.params)
        return info.state._replace(dense=dense._replace(params=infinite)) if info.step == 4 else None

    with pytest.raises(FloatingPointError, match="a dense parameter is not finite after step 4"), make() as engine:
        engine.enter(break_them)
        for step in (2, 4):
            engine.snapshot_at(step, lambda state: saved.append(int(state.dense.step)))
        engine.train(batch_at(index) for index in range(6))
    assert saved == [2] and engine.step == 4


@each
def test_what_the_stream_raised_is_told_though_the_run_was_left_before_it(make):
    reached = threading.Event()

    def stream():
        yield from stream_from(0, 4)
        reached.set()
        raise KeyError("of the stream")

    batches = stream()
    with pytest.raises(KeyError, match="of the stream"), make() as engine:
        for _ in engine.run(batches):
            if engine.step == 2:
                assert reached.wait(60)
                break
        list(engine.run(batches))
    assert engine.step in (2, 4)


@each
def test_leaving_a_run_does_not_wait_for_a_stream_that_blocks(make):
    inside, more = threading.Event(), threading.Event()

    def stream():
        yield from stream_from(0, 3)
        inside.set()
        assert more.wait(60)
        yield from stream_from(3)

    batches = stream()
    with make() as engine:
        for _ in engine.run(batches):
            if engine.step == 3:
                assert inside.wait(60)
                break
        assert not more.is_set()
        more.set()
        list(engine.run(batches))
    assert engine.step == 12 and same(bits(engine.state), plain(12)[0])


@each
def test_a_returned_batch_stays_first_in_line_until_a_run_accepts_it(make, monkeypatch):
    """Though the next run is left while its planner takes that batch, and other batches have been returned after it."""
    ahead, taking, left, held = (threading.Event() for _ in range(4))
    take = Stream.take

    def stream():
        for index in range(12):
            if index == 3:
                ahead.set()
            yield batch_at(index)

    def slow_take(self):
        taken = take(self)
        if not held.is_set() and taken is not END and np.array_equal(taken.ids["item"], batch_at(2).ids["item"]):
            held.set()
            taking.set()
            assert left.wait(60)
        return taken

    batches, engine = stream(), make()
    for _ in engine.run(batches):
        assert ahead.wait(60)
        break
    engine.close()
    monkeypatch.setattr(Stream, "take", slow_take)
    run = engine.run(batches)
    next(run)
    assert taking.wait(60)
    run.close()
    left.set()
    list(engine.run(batches))
    engine.close()
    assert engine.step == 12 and same(bits(engine.state), plain(12)[0])


@each
@pytest.mark.parametrize("wakes", [True, False])
def test_ctrl_c_ends_the_wait_for_a_stream_that_blocks_and_nothing_of_it_is_lost(make, wakes, ctrl_c):
    """Also where the signal ends no blocking call, as one that comes just before the call begins."""
    more = threading.Event()

    def stream():
        yield from stream_from(0, 3)
        if wakes:
            os.kill(os.getpid(), signal.SIGINT)  # while the main thread waits or trains
        else:
            assert not more.wait(0.2)
            _thread.interrupt_main()
        assert more.wait(60)
        yield from stream_from(3)

    batches = stream()
    with make() as engine:
        with pytest.raises(KeyboardInterrupt):
            list(engine.run(batches))
        assert engine.step <= 3 and same(bits(engine.state), plain(engine.step)[0])
        more.set()
        list(engine.run(batches))
    assert engine.step == 12 and same(bits(engine.state), plain(12)[0])


@each
def test_a_change_that_raises_returns_no_tables_or_lies_within_another_is_refused_and_loses_nothing(make):
    wrong = [
        (lambda tables: None, ValueError, "returned a NoneType"),
        (lambda tables: engine.exclusive(lambda same: same), ValueError, "cannot be nested"),
        (lambda tables: 1 / 0, ZeroDivisionError, "division"),
    ]
    with make() as engine:
        if isinstance(engine, Pipeline):  # its tables stay where they are
            wrong.append((lambda tables: fresh("host").tables, ValueError, "return those that it was given"))
        for _ in engine.run(stream_from(0)):
            for change, error, words in wrong if engine.step == 2 else ():
                with pytest.raises(error, match=words):
                    engine.exclusive(change)
    assert same(bits(engine.state), plain(12)[0])


@each
def test_shards_that_are_none_are_not_lost(make):
    stream = stream_from(0)
    with make([Restoring([]), at_step(1, lambda state: engine.lose([1, 4]))]) as engine:
        with pytest.raises(ValueError, match="nothing runs"):
            engine.lose([1])
        with pytest.raises(ValueError, match="shard=4 must be"):
            list(engine.run(stream))
        list(engine.run(stream))
    assert same(bits(engine.state), plain(12)[0])


@each
def test_what_a_callback_has_lost_comes_back_before_the_next_step_though_one_behind_it_failed(make):
    events, stream = [], stream_from(0, 5)
    with make([Restoring(events), failing_at(3, lambda: engine.lose([1]))]) as engine:
        with pytest.raises(KeyError, match="of the callback"):
            list(engine.run(stream))
        list(engine.run(stream))
    assert ("recover", 3, [1]) in events
    act = lambda state, step: state._replace(tables=emptied(state.tables)) if step == 3 else state
    assert same(bits(engine.state), plain(5, act=act)[0])


@each
def test_callbacks_begin_with_a_block_whose_end_ends_them_once_whatever_it_finds(make):
    events = []
    engine = make([Restoring(events)])
    with pytest.raises(ValueError, match="within `with"):
        engine.enter(Restoring(events))
    with engine:
        with engine:  # an inner block begins and ends none
            pass
        engine.enter(Losing(events))
        assert events == ["begin", "begin"]
    assert events == ["begin"] * 2 + [("end", None, False)] * 2
    del events[:]
    with engine:  # a second block begins those that were given, and only those
        list(engine.run(stream_from(0, 4)))
    assert events == ["begin", ("end", None, False)]
    del events[:]
    with pytest.raises(UserWarning, match="not taken"), engine:  # warnings are errors here
        engine.snapshot_at(40, print)
    assert events == ["begin", ("end", UserWarning, False)]


@each
def test_no_callback_swallows_the_error_that_ends_the_block(make):
    class Swallows(Callback):
        def end(self, error):
            return True

    with pytest.raises(KeyError, match="of the body"), make([Swallows()]):
        raise KeyError("of the body")


@each
def test_only_a_state_over_tables_of_the_same_spec_takes_the_place_of_another(make):
    other = EmbeddingSpec({"item": Table(44, 4)}, {"item": Lookup("item")}, shards=4)
    with make() as engine:
        list(engine.run(stream_from(0, 3)))
        home = HostTables if engine.tables.hosted else DeviceTables
        wrong = fresh("host")._replace(tables=home.create(other, ROWS))
        with pytest.raises(ValueError, match="another spec"):
            engine.reset(wrong)
        list(engine.run(stream_from(3)))
    assert same(bits(engine.state), plain(12)[0])


@each
def test_reset_forgets_the_cuts_to_come_and_says_so(make):
    with make() as engine:
        list(engine.run(stream_from(0, 3)))
        engine.snapshot_at(5, print)
        kept = make().state
        with pytest.warns(UserWarning, match=r"steps \[5\] were not taken.* at step 3") as warned:
            engine.reset(kept)
        assert "stay announced" not in str(warned[0].message)
        list(engine.run(stream_from(0)))
    assert same(bits(engine.state), plain(12)[0])


def failing(kind, number):
    """A state whose tables lose shard 1 at a chosen call."""
    state = fresh("host")
    return state._replace(tables=FailingTables.of(state.tables, [(kind, number, 1)]))


@pytest.mark.parametrize("kind", ["read", "write"])
@over_host_tables
def test_shards_that_their_home_has_lost_come_back_and_no_step_is_lost(engine_of, kind):
    events, saved = [], []
    with engine_of(failing(kind, 5), [Restoring(events)]) as engine:
        engine.snapshot_at(6, lambda state: saved.append(int(state.dense.step)))
        losses = [float(metrics["loss"]) for _, metrics in engine.run(stream_from(0))]
    ((at, shards),) = [event[1:] for event in events if event[0] == "recover"]
    act = lambda state, step: state._replace(tables=emptied(state.tables)) if step == at else state
    wanted, wanted_losses = plain(12, act=act)
    assert shards == [1] and losses == wanted_losses and same(bits(engine.state), wanted) and len(saved) == 1


class Stumbling(HostTables):
    """Tables that raise OSError once, at one call of `read` or `put`."""

    @classmethod
    def at(cls, kind, number):
        state = fresh("host")
        found = cls(SPEC, state.tables.layout, state.tables.shards)
        found.__dict__.update(calls=iter(range(number)), kind=kind, failed=[])
        return state._replace(tables=found)

    def stumble(self, kind):
        if kind == self.kind and next(self.calls, None) is None and not self.failed:
            self.failed.append(kind)
            raise OSError("the link")

    def read(self, plans):
        self.stumble("read")
        return super().read(plans)

    def put(self, plans, rows, shards=None):
        self.stumble("put")
        return super().put(plans, rows, shards)


@over_host_tables
def test_a_batch_whose_rows_could_not_be_read_is_the_first_of_the_next_run(engine_of):
    stream = stream_from(0)
    with engine_of(Stumbling.at("read", 5)) as engine:
        with pytest.raises(OSError, match="the link"):
            list(engine.run(stream))
        assert 2 <= engine.step <= 6  # the sixth read of a pipeline may be of any batch that its window admits
        list(engine.run(stream))
    assert engine.step == 12 and same(bits(engine.state), plain(12)[0])


@over_host_tables
def test_an_engine_whose_rows_could_not_be_written_is_broken_until_it_is_reset(engine_of):
    engine = engine_of(Stumbling.at("put", 5))
    with pytest.raises(OSError, match="the link"), engine:
        list(engine.run(stream_from(0)))
    for ask in (lambda: list(engine.run([])), lambda: engine.snapshot_at(99, print), lambda: bits(engine.state)):
        with pytest.raises(jaxrec.BrokenEngine, match="rows were lost .OSError: the link.*give it to `reset`") as told:
            ask()
        assert told.value.table_steps == [5] * SPEC.shards and isinstance(told.value.__cause__, OSError)
    engine.reset(fresh("host"))
    list(engine.run(stream_from(0)))
    assert same(bits(engine.state), plain(12)[0])


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_engines_take_turns_over_tables_and_a_second_run_at_a_time_is_refused(first, second):
    one, stream = KINDS[first](fresh("host")), stream_from(0)
    other = KINDS[second](fresh("host")._replace(tables=one.tables))
    with one, other:
        run = one.run(stream)
        next(run)
        with pytest.raises(ValueError, match="another engine is running over these tables"):
            next(other.run(stream_from(0)))
        assert other.step == 0
        run.close()
        one.close()
        list(other.run(stream_from(0)))
    assert other.step == 12


@each
def test_whatever_a_callback_raises_ends_the_run_and_is_told(make):
    """GeneratorExit too, which Python itself raises where a generator is left."""
    with make([failing_at(3, error=GeneratorExit)]) as engine:
        with pytest.raises(GeneratorExit):
            list(engine.run(stream_from(0)))
        assert engine.step == 3


def test_shards_that_never_come_back_end_a_serial_run_and_the_batch_comes_again():
    stream = stream_from(0)
    with Serial(TASK, failing("read", 5)) as engine:
        with pytest.raises(ShardsLost, match="no callback restores them: give callbacks="):
            list(engine.run(stream))
        assert engine.step == 5
        engine.exclusive(emptied)
        callback = engine.enter(Restoring([]))
        engine.tables.kill(1)
        callback.recover = lambda shards: None
        with pytest.raises(ShardsLost, match="again, after 8 recoveries at step 5"):
            list(engine.run(stream))
        engine.exclusive(emptied)
        list(engine.run(stream))
    assert engine.step == 12


def test_a_failure_that_comes_again_at_the_same_step_ends_training_and_does_not_go_round_for_ever(tmp_path):
    recovery = Recovery(tmp_path, 4, 12, mode="full")
    with Serial(TASK, fresh("host"), [recovery, at_step(6, lambda state: engine.lose([1]))]) as engine:
        with pytest.raises(ShardsLost, match="again, after 8 recoveries at step 6"):
            engine.train(stream_from)
    assert recovery.lost_steps == 8 * 2


class Stumbles:
    """An iterator that raises once, in place of its third batch, and then continues."""

    def __init__(self):
        self.calls = iter(range(13))

    def __iter__(self):
        return self

    def __next__(self):
        call = next(self.calls)
        if call == 2:
            raise KeyError("of the stream")
        return batch_at(call - (call > 2))


@each
def test_an_error_of_a_stream_comes_once_and_a_batch_that_is_refused_does_not_come_again(make):
    stream = Stumbles()
    with make() as engine:
        with pytest.raises(KeyError, match="of the stream"):
            list(engine.run(stream))
        list(engine.run(stream))
        assert engine.step == 12 and same(bits(engine.state), plain(12)[0])
        bad = batch_at(1)
        bad.weight[2] = -1
        # The second one is refused by the loss, when the step is traced.
        for refused, message in (
            (bad, r"weight\[2\] is -1"),
            (batch_at(1)._replace(label=np.zeros((8, 3), np.float32)), "shape"),
        ):
            stream = iter([batch_at(0), refused, batch_at(2)])
            with pytest.raises(ValueError, match=message):
                list(engine.run(stream))
            assert len(list(engine.run(stream))) == 1
    assert engine.step == 16


@each
def test_what_a_recovery_has_trained_is_freed_without_a_search_for_cycles(make, tmp_path, no_automatic_gc):
    """Which is rare in a program that allocates few objects: tables would pile up in memory."""
    recovery = Recovery(tmp_path, 4, 12, scheme=mfu(), failures={6: [1]})
    with make([recovery]) as engine:
        list(engine.run(stream_from(0)))
    assert recovery.failed == 1
    engine, there = None, weakref.ref(engine)
    assert there() is None  # though the recovery is still there


@each
def test_a_callback_may_refuse_another_state_and_what_was_lost_is_forgotten_with_the_one_before(make):
    class Refuses(Restoring):
        refuses = True

        def restarted(self, state):
            if self.refuses:
                raise ValueError("not that one")

    callback, engine = Refuses([]), make()
    with engine:
        engine.enter(failing_at(3, lambda: engine.lose([1])))
        with pytest.raises(KeyError):
            list(engine.run(stream_from(0)))
    with engine:
        engine.enter(callback)
        before = bits(engine.state)
        with pytest.raises(ValueError, match="not that one"):
            engine.reset(make().state)
        assert engine.step == 3 and same(bits(engine.state), before)
        callback.refuses = False
        engine.reset(make().state)
        list(engine.run(stream_from(0)))
    assert callback.events == ["begin", ("end", None, False)] and same(bits(engine.state), plain(12)[0])


def test_a_serial_run_begins_with_shards_that_the_one_before_has_lost():
    """Their server was restarted empty in the meantime and reports no loss."""
    events, stream = [], stream_from(0)
    with Serial(TASK, failing("write", 5)) as engine:
        with pytest.raises(ShardsLost):
            list(engine.run(stream))
        engine.tables.dead.clear()
        engine.enter(Restoring(events))
        list(engine.run(stream))
    assert ("recover", 6, [1]) in events
    act = lambda state, step: state._replace(tables=emptied(state.tables)) if step == 6 else state
    assert same(bits(engine.state), plain(12, act=act)[0])
