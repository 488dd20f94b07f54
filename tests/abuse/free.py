"""Free trainers in stretches: wrong states, options, streams and hooks, failures, blocking, Ctrl-C."""

import contextlib
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from world import batch_of, interrupt_when, join_all, loss
from world import workers as threads_at_work

from abuse import situation
from jaxrec import init_state, loop, make_mesh
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, sgd
from jaxrec.shadowsync import (
    FreeStep,
    FreeTrainers,
    SyncGroup,
    bmuf,
    easgd,
    model_averaging,
    train_stretch,
)

SPEC = EmbeddingSpec({"item": Table(40, 4)}, {"item": Lookup("item")}, shards=2)
PARAMS, DENSE, ROWS = {"w": jnp.ones(4)}, optax.sgd(0.1), sgd(0.1)
STEP = FreeStep(SPEC, loss, DENSE, ROWS)  # shared, so that its programs are compiled once


def stream(batches, label=0.0):
    for number in range(batches):
        yield batch_of({"item": np.arange(8, dtype=np.int32) + number % 32}, np.full(8, label, np.float32))


def state_of(trainers=2, spec=SPEC, home=HostTables):
    mesh = make_mesh(trainers, jax.devices()[:trainers])
    tables = home.create(spec, ROWS) if home is HostTables else home.create(spec, ROWS, mesh)
    return init_state(PARAMS, DENSE, tables, mesh)


@contextlib.contextmanager
def free(rule=None, trainers=2, state=None, step=STEP, **more):
    """Free-running trainers; check that no thread is left at the end."""
    try:
        with FreeTrainers(state or state_of(trainers), step, rule, **more) as engine:
            yield engine
    finally:
        assert not threads_at_work(), threads_at_work()


def train(engine, batches, hooks=()):
    for _ in engine.run(batches, hooks):
        pass


def goes_on(engine, batches):
    """Check that exactly `batches` batches were trained and that training can continue."""
    assert engine.step == int(engine.state.dense.step) == batches
    train(engine, stream(2))
    assert engine.step == batches + 2


@situation("tables of another spec than the step", ValueError, "tables were made with another spec")
def _(directory):
    other = EmbeddingSpec({"item": Table(30, 4)}, {"item": Lookup("item")}, shards=2)
    FreeTrainers(state_of(spec=other), STEP)


@situation("one replica over two devices", ValueError, "no mesh of one device for each trainer")
def _(directory):
    tables = HostTables.create(SPEC, ROWS)
    FreeTrainers(init_state(PARAMS, DENSE, tables, make_mesh(1, jax.devices()[:2])), STEP)


@situation("a foreground without a rule", ValueError, "every_steps is of a rule, and rule=None")
def _(directory):
    FreeTrainers(state_of(), STEP, every_steps=3)


@situation("figures of another number of trainers", ValueError, "is not what `figures` of 2 trainers has given")
def _(directory):
    with free(trainers=1) as engine:
        past = engine.figures()
    with free(past=past):
        pass


@situation("stretches of no steps", ValueError, "stretch_steps=0 must be a whole number from 1")
def _(directory):
    FreeTrainers(state_of(), STEP, stretch_steps=0)


@situation("a state of another rule", ValueError, "the memory of easgd.* does not fit")
def _(directory):
    with free(bmuf()) as engine:
        train(engine, stream(3))
        FreeTrainers(engine.state, STEP, easgd())


@situation("a state of a rule goes on without one", ValueError, "rule=None would forget what it knows")
def _(directory):
    with free(easgd()) as engine:
        train(engine, stream(3))
        FreeTrainers(engine.state, STEP)


@situation("a state of no rule goes on with one")
def _(directory):
    with free() as engine:
        train(engine, stream(3))
        state = engine.state
    with free(easgd(), state=state, every_steps=1) as engine:
        goes_on(engine, 3)
        assert sum(engine.figures()["rounds"]) == 2


@situation("a memory of another number of trainers", ValueError, "memory is of 3 trainers and the group of 2")
def _(directory):
    SyncGroup(easgd(), PARAMS, trainers=2, memory=SyncGroup(easgd(), PARAMS, trainers=3).memory)


@situation("a memory that has diverged", ValueError, "the memory of bmuf.* holds nan or inf")
def _(directory):
    memory = SyncGroup(bmuf(), PARAMS, trainers=1).memory
    memory["shared"].momentum[0][:] = np.nan
    SyncGroup(bmuf(), PARAMS, trainers=1, memory=memory)


@situation("the state of two replicas for one trainer", ValueError, "the state of trainer 0 is not of one replica")
def _(directory):
    train_stretch(STEP, [state_of(2).dense], HostTables.create(SPEC, ROWS), [stream(1)])


@situation("a run of free trainers within another", ValueError, "engine is running: exhaust or close")
def _(directory):
    with free(stretch_steps=2) as engine:
        for _ in engine.run(stream(5)):
            engine.run(stream(5))


@situation("a stream without a batch calls no hook")
def _(directory):
    with free(easgd()) as engine:
        train(engine, [], [lambda *given: 1 / 0])
        goes_on(engine, 0)


@situation("a dict in the stream of free trainers, after batches that count", ValueError, "the stream has given a dict")
def _(directory):
    steps = []
    with free(easgd()) as engine:
        try:
            train(engine, [*stream(3), {"item": 3}], [lambda state, step, *_: steps.append(step) or state])
        finally:
            assert steps == [3]
            goes_on(engine, 3)


@situation("Ctrl-C raised in the stream of free trainers", KeyboardInterrupt, "now")
def _(directory):
    def batches():
        yield from stream(3)
        raise KeyboardInterrupt("now")

    with free(model_averaging(), every_steps=2, on_failure="drop") as engine:
        try:
            train(engine, batches())
        finally:
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
                train(engine, given)
        finally:
            join_all([interrupting])
            wake.set()
            join_all(threads_at_work())
            train(engine, given)  # the late batch was not lost
            goes_on(engine, 4)


@situation("a hook of free trainers that returns nothing", ValueError, "returned None: a hook returns the state")
def _(directory):
    with free(stretch_steps=2) as engine:
        try:
            train(engine, stream(4), [lambda *given: None])
        finally:
            goes_on(engine, 2)


@situation("a hook that asks the free trainers for their state", ValueError, "engine.state was read in a hook")
def _(directory):
    with free() as engine:
        train(engine, stream(4), [lambda *given: engine.state])


@situation("a reset in the middle of a run of free trainers", ValueError, "reset within a run")
def _(directory):
    with free(stretch_steps=2) as engine:
        for _ in engine.run(stream(4)):
            engine.reset(state_of())


@situation(
    "a reset to a state of another number of trainers", ValueError, "the state has 1 replicas, .* are 2 trainers"
)
def _(directory):
    with free() as engine:
        engine.reset(state_of(1))


@situation("an exclusive change that returns nothing", ValueError, "returned a NoneType: HostTables of the same spec")
def _(directory):
    with free() as engine:
        try:
            engine.exclusive(lambda tables: None)
        finally:
            goes_on(engine, 0)


@situation("an exclusive change in a hook is what is trained on")
def _(directory):
    other = HostTables.create(SPEC, ROWS)

    def hook(state, step, plans, metrics):
        engine.exclusive(lambda tables: other)
        return state

    with free(stretch_steps=2) as engine:
        train(engine, stream(2), [hook])
        before = jax.tree.map(np.array, other.shards)
        goes_on(engine, 2)
        assert engine.state.tables is other
    assert not np.array_equal(before["width_4"][0]["value"], other.shards["width_4"][0]["value"])


@situation("a loss that is not finite calls no hook", FloatingPointError, "stretch that ended at step 2 is nan")
def _(directory):
    with free(stretch_steps=2) as engine:
        train(engine, stream(4, label=np.nan), [lambda *given: 1 / 0])


@situation("a loss that is not finite is not spread by a rule", ValueError, "holds nan or inf, which would spread")
def _(directory):
    with free(model_averaging(), every_steps=1) as engine:
        train(engine, stream(4, label=np.nan))


@situation("free trainers are left in the middle of a run")
def _(directory):
    with free(easgd(), stretch_steps=2) as engine:
        for _ in engine.run(stream(8)):
            break
        engine.run(stream(8))
    assert engine.step == 2 and not engine.running


@situation("a snapshot after a step of free trainers", ValueError, "no snapshot after step 3: save in a hook")
def _(directory):
    FreeTrainers(state_of(), STEP).snapshot_at(3, print)


@situation("shards that free trainers are to lose", ValueError, "cannot bring shards .1. back .* lock step")
def _(directory):
    with free() as engine:
        train(engine, stream(2), [lambda *given: engine.lose([1])])


@situation("free trainers in the loop that all engines share")
def _(directory):
    with free(easgd(), stretch_steps=2) as engine:
        assert int(loop.train(engine, lambda step: stream(6 - step)).dense.step) == 6


@situation("free trainers in a thread that gets no signals")
def _(directory):
    with free(easgd(), stretch_steps=2) as engine:
        thread = threading.Thread(target=train, args=(engine, stream(6)))
        thread.start()
        join_all([thread])
        goes_on(engine, 6)
