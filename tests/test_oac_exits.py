"""OAC's exits: however a run is left, its threads end, what is committed is written, and no failure is swallowed."""

import contextlib
import gc
import itertools
import threading

import jax
import numpy as np
import pytest
from test_oac import SPEC, Broken, frozen, make_batches, make_state, no_threads_left, plain_loop, same, update_of

import jaxrec
from jaxrec.checkpoint import snapshot
from jaxrec.embedding import HostTables
from jaxrec.oac import Pipeline

WINDOW = 3
REGIMES = [
    {"mode": "sync"},
    {"mode": "semisync"},
    {"mode": "async", "window": WINDOW},
    {"window": WINDOW, "loaders": 3},
    {"window": WINDOW, "validation": "device"},
    {"window": WINDOW, "skip_stale_reads": True, "skip_rewritten": True},
]


def to_host(tree):
    return jax.tree.map(np.asarray, tree)


class Failing:
    """A function that raises when it is called for the number-th time (from 0), once it may; `failed` is set then."""

    def __init__(self, number, function, may=None):
        self.calls, self.failed = itertools.count(), threading.Event()
        self.number, self.function, self.may = number, function, may

    def __call__(self, *args):
        if next(self.calls) == self.number:
            assert self.may is None or self.may.wait(60)
            self.failed.set()
            raise Broken
        return self.function(*args)


def states_of(batches):
    """The state after each step of one batch after the other."""
    states = {0: frozen(make_state())}
    plain_loop(batches, after=lambda step, state: states.update({step: frozen(state)}))
    return states


def equal(state, expected):
    return same((state, []), (expected, []))


def all_notes(error):
    return " ".join(getattr(error, "__notes__", []))


def chain(error):
    """An error, and all that are behind it."""
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


# ---- O1: a failure behind the commit reaches who leaves, and the pipeline says that it is broken


@pytest.mark.parametrize("way", ["break", "close", "body", "hook", "ctrl-c", "exhausted"])
def test_rows_that_were_lost_are_told_however_the_run_is_left(way):
    fetch, batches = Failing(2, to_host, may=threading.Event()), make_batches(16)
    pipeline = Pipeline(make_state(), update_of(SPEC), window=WINDOW, fetch=fetch)

    def leave(state, step, plan, metrics):
        if step == 5:
            fetch.may.set()
            assert fetch.failed.wait(60)
            if way == "hook":
                raise KeyError("the hook's")
        return state

    wanted = {"body": KeyError, "hook": KeyError, "ctrl-c": KeyboardInterrupt}.get(way, Broken)
    with pytest.raises(wanted) as raised, pipeline:
        for number, _ in enumerate(pipeline.run(batches, [leave]), 1):
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
    """A broken pipeline says where it stands, whatever is asked of it."""
    from jaxrec.oac import BrokenPipeline

    def enter():
        with pipeline.exclusive():
            pass

    asks = {
        "run": lambda: pipeline.run(make_batches(2)),
        "drain": pipeline.drain,
        "exclusive": enter,
        "cut": lambda: pipeline.cut(100, print),
        "read": lambda: pipeline.state.tables.read({}),
        "shards": lambda: pipeline.state.tables.shards,
        "save": lambda: snapshot(pipeline.state, SPEC),
    }
    for ask, act in asks.items():
        with pytest.raises(BrokenPipeline, match="make a new Pipeline") as raised:
            act()
        broken = raised.value
        assert (broken.dense_step, broken.table_steps) == (dense_step, table_steps), ask
        assert f"dense state stands at step {dense_step}" in str(broken)
        assert any(isinstance(error, Broken) for error in chain(broken)), ask
    pipeline.close()


# ---- O6: with several writers the tables may stand at several steps, which is said


def test_two_writers_and_a_failed_write_leave_the_tables_at_steps_that_are_said():
    done = threading.Event()

    class Late(Pipeline):
        def _write(self, item, shards):
            number = item.number - self._flow.first
            if shards.start == 1 and number == 2:  # only when the other writer has written more
                assert done.wait(60)
                raise Broken
            super()._write(item, shards)
            if shards.start == 0 and number == 3:
                done.set()

    batches = make_batches(16)
    pipeline = Late(make_state(), update_of(SPEC), window=5, writers=2)
    with pytest.raises(Broken) as raised, pipeline:
        for _ in pipeline.run(batches):
            pass
    assert "in stage 'write back' of the pipeline, batch 2" in all_notes(raised.value)
    with pytest.raises(RuntimeError, match="shard 0 at step") as broken:
        pipeline.drain()
    steps, states = broken.value.table_steps, states_of(batches)
    assert steps[1] == steps[3] == 2 and steps[0] == steps[2] >= 4
    for name, shards in pipeline.tables.shards.items():
        for shard, parts in enumerate(shards):
            for part, array in parts.items():
                np.testing.assert_array_equal(array, states[steps[shard]].tables.shards[name][shard][part])
    assert (pipeline.tables.steps[:, 1] == steps).all()
    refuses_everything(pipeline, int(pipeline.state.dense.step), steps)


# ---- O5: all batches before the one that failed are trained, and the pipeline goes on


def raising(batches, at):
    yield from batches[:at]
    raise Broken


@pytest.mark.parametrize("options", REGIMES, ids=str)
def test_a_stream_that_raises_is_told_after_all_of_its_batches_are_trained(options):
    batches = make_batches(20)
    pipeline = Pipeline(make_state(), update_of(SPEC), **options)
    with pytest.raises(Broken) as raised, pipeline:
        for _ in pipeline.run(raising(batches, 15)):
            pass
    assert int(pipeline.state.dense.step) == 15
    assert "in stage 'plan' of the pipeline, batch 15" in all_notes(raised.value)
    assert no_threads_left()
    if options.get("mode") not in ("async", "semisync"):
        assert equal(pipeline.state, states_of(batches)[15])


@pytest.mark.parametrize("options", REGIMES, ids=str)
def test_a_batch_that_cannot_be_sent_is_told_after_those_before_it_and_is_not_lost(options):
    batches, bad = make_batches(16), [True]

    def send(tree, placement):
        batch = tree[1] if isinstance(tree, tuple) and len(tree) == 2 else None
        if isinstance(batch, jaxrec.Batch) and bad[0] and np.array_equal(batch.label, batches[9].label):
            raise Broken
        return jax.device_put(tree, placement)

    stream = iter(batches)
    with Pipeline(make_state(), update_of(SPEC), send=send, **options) as pipeline:
        with pytest.raises(Broken) as raised:
            for _ in pipeline.run(stream):
                pass
        assert int(pipeline.state.dense.step) == 9
        assert "in stage 'load' of the pipeline, batch 9" in all_notes(raised.value)
        bad[0] = False  # whatever it was is over: the same iterator goes on
        for _ in pipeline.run(stream):
            pass
    assert int(pipeline.state.dense.step) == 16
    if options.get("mode") not in ("async", "semisync"):
        assert equal(pipeline.state, states_of(batches)[16])


@pytest.mark.parametrize("way", ["break", "close", "hook", "abandoned"])
def test_batches_that_were_taken_and_not_trained_come_first_when_the_iterator_comes_again(way):
    batches = make_batches(16)
    stream = (batch for batch in batches)
    pipeline = Pipeline(make_state(), update_of(SPEC), window=WINDOW)
    stop = Failing(4, lambda state, *args: state)
    with contextlib.suppress(Broken):
        for number, _ in enumerate(pipeline.run(stream, [stop] if way == "hook" else []), 1):
            if number == 5 and way == "close":
                pipeline.close()
            elif number == 5 and way == "break":
                break
            elif number == 5 and way == "abandoned":
                break
    gc.collect()
    assert not pipeline.running and no_threads_left()
    assert int(pipeline.state.dense.step) == 5 and equal(pipeline.state, states_of(batches)[5])
    for _ in pipeline.run(stream):
        pass
    assert equal(pipeline.state, states_of(batches)[16])


# ---- O4: a stream that blocks


class Blocking:
    """An iterator that blocks at a batch until it is let go."""

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


@pytest.mark.parametrize("way", ["break", "hook", "load", "fetch"])
def test_a_stream_that_blocks_blocks_neither_leaving_nor_an_error(way):
    batches = make_batches(16)
    stream, options = Blocking(batches, 8), {}
    if way == "load":
        bad = batches[6]

        def send(tree, placement):
            if isinstance(tree, tuple) and isinstance(tree[1], jaxrec.Batch) and bad is not None:
                if np.array_equal(tree[1].label, bad.label):
                    raise Broken
            return jax.device_put(tree, placement)

        options["send"] = send
    if way == "fetch":
        options["fetch"] = Failing(7, to_host)
    pipeline = Pipeline(make_state(), update_of(SPEC), window=WINDOW, **options)
    hook = Failing(5, lambda state, *args: state)
    with contextlib.nullcontext() if way == "break" else pytest.raises(Broken), pipeline:
        for number, _ in enumerate(pipeline.run(stream, [hook] if way == "hook" else []), 1):
            if number == 5 and way == "break":
                assert stream.blocked.wait(60)
                break
    done = {"break": 5, "hook": 6, "load": 6, "fetch": 8}[way]
    assert int(pipeline.state.dense.step) == done
    if way == "fetch":
        stream.let_go.set()
        return
    assert equal(pipeline.state, states_of(batches)[done])
    if stream.blocked.is_set():
        with pytest.raises(ValueError, match="still waits inside this iterator"):
            pipeline.run(stream)
    bad = None
    stream.let_go.set()
    for thread in threading.enumerate():
        if thread.name == "oac-plan":
            thread.join(60)
    assert no_threads_left()
    assert equal(pipeline.state, states_of(batches)[done])  # who woke up touched nothing
    for _ in pipeline.run(stream):
        pass
    assert equal(pipeline.state, states_of(batches)[16])


# ---- O7: what lags says so


def ask_all(state, check):
    batch = make_batches(1)[0]
    plans = jaxrec.plan(SPEC, batch.ids)
    evaluate = jaxrec.make_eval_step(SPEC, lambda params, activations, batch: activations["pair"].sum((1, 2)))
    tables = state.tables
    for act in [
        lambda: tables.read(plans),
        lambda: tables.shards,
        lambda: tables.put({}, {}),
        lambda: tables.add({}, {}, {}),
        lambda: tables.reset_shard("width_4", 0),
        lambda: tables.overwriting().__enter__(),
        lambda: evaluate(state, plans, batch),
        lambda: snapshot(state, SPEC),
    ]:
        check(act)


def test_the_tables_of_a_yielded_state_refuse_to_be_read_until_they_are_drained():
    def refused(act):
        with pytest.raises(ValueError, match=r"call pipeline.drain\(\) before reading, evaluating or saving"):
            act()

    batches, seen, last = make_batches(12), [], None
    states = states_of(batches)

    def hook(state, step, plan, metrics):
        assert isinstance(state.tables, HostTables) and state.tables.spec is SPEC and "width_4" in repr(SPEC.stacks)
        ask_all(state, refused)
        if step == 6:
            pipeline.drain()
            assert equal(frozen(state), states[6])
            seen.append(state)
        return state

    with Pipeline(make_state(), update_of(SPEC), window=WINDOW) as pipeline:
        for number, (state, _) in enumerate(pipeline.run(batches, [hook]), 1):
            last = state
            if number == 6:
                assert equal(frozen(state), states[6])  # still drained
                repr(state)
            else:
                ask_all(state, refused)
            if number == 9:
                pipeline.drain()
                assert equal(frozen(state), states[9])
                with pytest.raises(ValueError, match="stood at step 6"):
                    seen[0].tables.read({})
        assert equal(frozen(last), states[12]) and equal(frozen(pipeline.state), states[12])
    assert len(seen) == 1
