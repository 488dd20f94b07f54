"""Free-running trainers and their emulation: wrong arguments and streams; trainers that fail, block or time out."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from world import batch_of, loss
from world import workers as threads_at_work

from abuse import situation
from jaxrec.embedding import DeviceTables, EmbeddingSpec, HostTables, Lookup, Table, sgd
from jaxrec.shadowsync import (
    AllToAll,
    Emulation,
    Foreground,
    PeerLeft,
    Script,
    Shadow,
    model_averaging,
    train_freely,
)
from jaxrec.sharding import make_mesh

SPEC = EmbeddingSpec({"item": Table(40, 4)}, {"item": Lookup("item")}, shards=1)
PARAMS = {"w": jnp.ones(4)}
RULE = model_averaging()


def stream(batches, seed=0, size=8):
    rng = np.random.default_rng(seed)
    for _ in range(batches):
        ids, label = rng.integers(0, 40, size).astype(np.int32), np.zeros(size, np.float32)
        yield batch_of({"item": ids}, label)


def shadows(trainers, kind=Shadow, more=None, **given):
    transport = AllToAll(RULE, PARAMS, trainers, **given)
    return lambda number: kind(transport, number, **(more or {}))


@contextlib.contextmanager
def no_thread_left():
    try:
        yield
    finally:
        assert not threads_at_work(), threads_at_work()


def train(streams, synchroniser=None, workers=1, tables=None, **more):
    tables = tables or HostTables.create(SPEC, sgd(0.1))
    with no_thread_left():
        return train_freely(
            SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, streams, synchroniser, workers, **more
        )


@situation("no streams", ValueError, "0 streams, .*must be 1 or more")
def _(directory):
    train([])


@situation("no workers", ValueError, "workers_per_trainer=0")
def _(directory):
    train([stream(1)], workers=0)


@situation("a transport for two trainers under three", ValueError, "trainer=2 .*from 0 to 1")
def _(directory):
    tables = HostTables.create(SPEC, sgd(0.1))
    before = jax.tree.map(np.array, tables.shards)
    try:
        train([stream(2) for _ in range(3)], shadows(2), tables=tables)
    finally:  # refused before any training
        jax.tree.map(np.testing.assert_array_equal, tables.shards, before)


@situation(
    "a transport for three trainers under two", PeerLeft, "never joined within timeout_s=0.2 .*are there 3 trainers"
)
def _(directory):
    # Without batches, as compiling a step on a busy machine may take longer than the time-out; and in the foreground,
    # as background threads are not waited for beyond it.
    train([stream(0), stream(0)], shadows(3, Foreground, {"every_steps": 1}, timeout_s=0.2))


@situation("one iterator for two trainers", ValueError, "the same iterator")
def _(directory):
    train([stream(5)] * 2)


@situation("tables on the device", ValueError, "DeviceTables: free trainers write in place")
def _(directory):
    train([stream(2)], tables=DeviceTables.create(SPEC, sgd(0.1), make_mesh()))


@situation("a trainer without a batch beside one that has some")
def _(directory):
    _, figures = train([stream(0), stream(5)], shadows(2))
    assert figures.steps == [0, 5]


@situation("no trainer has a batch")
def _(directory):
    _, figures = train([stream(0), stream(0)], shadows(2))
    assert figures.steps == [0, 0] and figures.average_sync_gap == [float("inf")] * 2


@situation("something else than a Batch in a stream", AttributeError, "'dict' object has no attribute 'ids'")
def _(directory):
    train([iter([{"item": 3}]), stream(5)], shadows(2))


@situation("a hook that calls sys.exit in a worker", SystemExit, "3")
def _(directory):
    def hook(trainer, step, metrics):
        raise SystemExit(3)

    train([stream(10**9)], workers=2, hook=hook)


@situation("last rounds before the first step keep the initial parameters")
def _(directory):
    emulation = Emulation(SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, 2, script=Script(RULE, 2, 2))
    emulation.finish()
    for dense in emulation.dense:
        np.testing.assert_array_equal(dense.params["w"], 1)
    assert emulation.average_sync_gap == float("inf")


@situation(
    "a synchroniser's function that returns nothing for one", ValueError, "synchroniser.1. is a NoneType: return a"
)
def _(directory):
    make = shadows(2)
    train([stream(2), stream(2)], lambda number: None if number else make(0))
