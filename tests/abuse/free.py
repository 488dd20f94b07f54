"""Free trainers, in stretches and without: wrong states, options, streams and callbacks, failures, blocking, Ctrl-C."""

import contextlib
import functools
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click_model import loss
from step_callbacks import at_step
from threads import interrupt_when, join_all
from threads import workers as threads_at_work

from abuse import refused, situation
from jaxrec import Batch, Task, make_mesh
from jaxrec.embedding import DeviceTables, EmbeddingSpec, HostTables, Lookup, Table, sgd
from jaxrec.shadowsync import (
    AllToAll,
    FreeStep,
    FreeTrainers,
    Shadow,
    SyncGroup,
    bmuf,
    easgd,
    model_averaging,
    train_freely,
)
from jaxrec.shadowsync.workers import train_stretch

SPEC = EmbeddingSpec({"item": Table(40, 4)}, {"item": Lookup("item")}, shards=2)
OTHER = EmbeddingSpec({"item": Table(30, 4)}, {"item": Lookup("item")}, shards=2)
PARAMS, DENSE, ROWS = {"w": jnp.ones(4)}, optax.sgd(0.1), sgd(0.1)


def stream(batches, label=0.0):
    for number in range(batches):
        yield Batch({"item": np.arange(8, dtype=np.int32) + number % 32}, np.full(8, label, np.float32))


@functools.cache  # shared, so that its programs are compiled once
def task_of(trainers, spec=SPEC):
    return Task(spec, loss, DENSE, ROWS, make_mesh(trainers, jax.devices()[:trainers]))


def state_of(trainers=2):
    return task_of(trainers).init(PARAMS, "host")


@contextlib.contextmanager
def no_thread_left():
    try:
        yield
    finally:
        assert not threads_at_work(), threads_at_work()


# ---- one training


def shadows(trainers):
    transport = AllToAll(model_averaging(), PARAMS, trainers)
    return lambda number: Shadow(transport, number)


def freely(streams, synchroniser=None, workers=1, tables=None):
    """Train, and check that tables are unchanged if that is refused."""
    tables = tables or HostTables.create(SPEC, ROWS)
    before = jax.tree.map(np.array, tables.parts("width_4"))
    with no_thread_left():
        try:
            return train_freely(task_of(1), PARAMS, tables, streams, synchroniser, workers)
        except ValueError:
            jax.tree.map(np.testing.assert_array_equal, tables.parts("width_4"), before)
            raise


FREELY = {
    "0 streams, .*must be 1 or more": lambda _: freely([]),
    "workers_per_trainer=0": lambda _: freely([stream(1)], workers=0),
    "trainer=2 .*from 0 to 1": lambda _: freely([stream(2) for _ in range(3)], shadows(2)),
    "the same iterator": lambda _: freely([stream(5)] * 2),
    "DeviceTables: free trainers write in place": lambda _: freely(
        [stream(2)], tables=DeviceTables.create(SPEC, ROWS, make_mesh())
    ),
    "synchroniser.1. is a NoneType: return a": lambda _: freely(
        [stream(2), stream(2)], lambda number: None if number else shadows(2)(0)
    ),
    "the state of trainer 0 is not of one replica": lambda _: train_stretch(
        FreeStep(task_of(2)), [state_of(2).dense], HostTables.create(SPEC, ROWS), [stream(1)]
    ),
}
refused(FREELY)


class OfOnesOwn(Task):
    """A task whose step free trainers would not run."""

    def update(self, dense, rows, plans, batch):
        raise AssertionError("nothing trains by it")


@situation("free trainers of an update of one's own", ValueError, "OfOnesOwn has an update of its own")
def _(directory):
    train_freely(OfOnesOwn(SPEC, loss, DENSE, ROWS), PARAMS, HostTables.create(SPEC, ROWS), [stream(1)])


@situation("three free trainers over two shards")
def _(directory):
    with FreeTrainers(task_of(3), state_of(3), None, stretch_steps=3) as engine:
        assert [metrics["examples"] for _, metrics in engine.run(stream(6))] == [24, 24]


@situation("trainers without a batch")
def _(directory):
    for batches in (5, 0):
        _, figures = freely([stream(0), stream(batches)], shadows(2))
        assert figures.steps == [0, batches] and figures.rounds[0] == 0


# ---- stretches


def trainers_of(rule=None, trainers=2, state=None, **more):
    return FreeTrainers(task_of(trainers), state or state_of(trainers), rule, **more)


@contextlib.contextmanager
def free(*given, **more):
    """Free-running trainers; check that no thread is left at the end."""
    with no_thread_left(), trainers_of(*given, **more) as engine:
        yield engine


def goes_on(engine, batches):
    """Check that exactly `batches` batches were trained and that training can continue."""
    assert engine.step == int(engine.state.dense.step) == batches
    engine.train(stream(2))
    assert engine.step == batches + 2


def after(rule, batches, then):
    """Make other trainers of the state after some batches."""
    with free(rule) as engine:
        engine.train(stream(batches))
        trainers_of(then, state=engine.state)


def in_a_callback(act):
    """Call `act` with the engine in a callback after the first stretch, which is whole whatever that does."""
    with free(stretch_steps=2, callbacks=[at_step(2, lambda state: act(engine))]) as engine:
        try:
            engine.train(stream(4))
        finally:
            goes_on(engine, 2)


def at_rest(act):
    with free() as engine:
        try:
            act(engine)
        finally:
            goes_on(engine, 0)


def figures_of_one():
    with free(trainers=1) as engine:
        return engine.figures()


def diverged():
    memory = SyncGroup(bmuf(), PARAMS, trainers=1).memory
    memory["shared"].momentum[0][:] = np.nan
    return memory


MISTAKES = {
    # States and options.
    "tables were made with another spec": lambda _: FreeTrainers(task_of(2, OTHER), state_of()),
    "no mesh of one device for each trainer": lambda _: trainers_of(
        state=Task(SPEC, loss, DENSE, ROWS, make_mesh(1, jax.devices()[:2])).init(PARAMS, "host")
    ),
    "every_steps is of a rule, and rule=None": lambda _: trainers_of(every_steps=3),
    "stretch_steps=0 must be a whole number from 1": lambda _: trainers_of(stretch_steps=0),
    "is not what `figures` of 2 trainers has given": lambda _: trainers_of(past=figures_of_one()),
    "the memory of easgd.* does not fit": lambda _: after(bmuf(), 3, easgd()),
    "rule=None would forget what it knows": lambda _: after(easgd(), 3, None),
    "memory is of 3 trainers and the group of 2": lambda _: SyncGroup(
        easgd(), PARAMS, trainers=2, memory=SyncGroup(easgd(), PARAMS, trainers=3).memory
    ),
    "the memory of bmuf.* holds nan or inf": lambda _: SyncGroup(bmuf(), PARAMS, trainers=1, memory=diverged()),
    "the state has 1 replicas, .* are 2 trainers": lambda _: at_rest(lambda engine: engine.reset(state_of(1))),
    # Calls at the wrong time.
    "engine is running: exhaust or close": lambda _: in_a_callback(lambda engine: engine.run(stream(5))),
    "reset within a run": lambda _: in_a_callback(lambda engine: engine.reset(state_of())),
    "engine.state was read in `after_step`": lambda _: in_a_callback(lambda engine: engine.state),
    "cannot bring shards .1. back .* lock step": lambda _: in_a_callback(lambda engine: engine.lose([1])),
    "no snapshot after step 3: save in `after_step`": lambda _: at_rest(lambda engine: engine.snapshot_at(3, print)),
    "returned a NoneType: HostTables of the same spec": lambda _: at_rest(
        lambda engine: engine.exclusive(lambda tables: None)
    ),
}
refused(MISTAKES)


@situation("a state of no rule goes on with one")
def _(directory):
    with free() as engine:
        engine.train(stream(3))
        state = engine.state
    with free(easgd(), state=state, every_steps=1) as engine:
        goes_on(engine, 3)
        assert sum(engine.figures()["rounds"]) == 2


@situation("a stream without a batch calls no callback")
def _(directory):
    steps = []
    with free(easgd(), callbacks=[lambda info: steps.append(info.step)]) as engine:
        engine.train([])
        assert steps == []
        goes_on(engine, 0)


def ends_after_3(item):
    """A stream that gives `item` after three batches, which count; an exception is raised."""
    yield from stream(3)
    if isinstance(item, BaseException):
        raise item
    yield item


for _words, _item, _error, _match in (
    ("a dict in the stream of free trainers", {"item": 3}, ValueError, "the stream has given a dict"),
    ("Ctrl-C raised in the stream of free trainers", KeyboardInterrupt("now"), KeyboardInterrupt, "now"),
):

    @situation(_words, _error, _match)
    def _(directory, item=_item):
        steps = []
        note = lambda info: steps.append(info.step)
        with free(model_averaging(), callbacks=[note], every_steps=2, on_failure="drop") as engine:
            try:
                engine.train(ends_after_3(item))
            finally:
                assert steps == [3]
                goes_on(engine, 3)


@situation("Ctrl-C while the stream of free trainers blocks", KeyboardInterrupt, "^$")
def _(directory):
    blocked, wake = threading.Event(), threading.Event()

    def batches():
        yield from stream(3)
        blocked.set()
        assert wake.wait(60)
        yield from stream(1)

    given = batches()
    with free(model_averaging()) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrec.shadowsync.workers.LEAVE_S", 0.1)
        interrupting = interrupt_when(blocked.is_set)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # about threads that did not end
                engine.train(given)
        finally:
            join_all([interrupting])
            wake.set()
            join_all(threads_at_work())
            engine.train(given)  # the late batch was not lost
            goes_on(engine, 4)


@situation("an exclusive change in a callback is what is trained on")
def _(directory):
    other = HostTables.create(SPEC, ROWS)

    change = at_step(2, lambda state: engine.exclusive(lambda tables: other))
    with free(stretch_steps=2, callbacks=[change]) as engine:
        engine.train(stream(2))
        before = jax.tree.map(np.array, other.shards)
        goes_on(engine, 2)
        assert engine.state.tables is other
    assert not np.array_equal(before["width_4"][0]["value"], other.shards["width_4"][0]["value"])


@situation("a loss that is not finite calls no callback", FloatingPointError, "loss of trainer [01] is nan")
def _(directory):
    with free(stretch_steps=2, callbacks=[lambda info: 1 / 0]) as engine:
        engine.train(stream(4, label=np.nan))


@situation("free trainers are left in the middle of a run")
def _(directory):
    with free(easgd(), stretch_steps=2) as engine:
        for _ in engine.run(stream(8)):
            break
        engine.run(stream(8))
    assert engine.step == 2 and not engine.running


@situation("free trainers over batches from a step on, in a thread that gets no signals")
def _(directory):
    with free(easgd(), stretch_steps=2) as engine:
        thread = threading.Thread(target=engine.train, args=(lambda step: stream(6 - step),))
        thread.start()
        join_all([thread])
        goes_on(engine, 6)
