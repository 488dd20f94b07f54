"""Misuse of a pipeline: arguments, streams, callbacks, lagging states, calls at the wrong time, failing parts."""

import copy
import functools
import pickle
import threading

import jax
import numpy as np
import optax
from click_model import pair_batch, pair_loss
from step_callbacks import at_step
from threads import no_threads_left

import jaxrec
from abuse import refused, situation
from jaxrec import BrokenEngine, Callback, Serial
from jaxrec.checkpoint import restore_shards
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad
from jaxrec.oac import Pipeline
from jaxrec.types import ShardsLost, TrainState

SPEC = EmbeddingSpec({"user": Table(40, 4), "item": Table(9, 4)}, {"pair": Lookup(("user", "item"))}, shards=4)
OTHER = EmbeddingSpec(SPEC.tables, SPEC.lookups, shards=2)
ROWS, DENSE = adagrad(0.1), optax.sgd(0.01)
DRAIN = r"call pipeline.drain\(\) before reading, evaluating or saving"


def two_devices(replicas=1):
    return jaxrec.make_mesh(replicas, jax.devices()[:2])


@functools.cache  # one compiled program for all situations
def task_of(mesh=None):
    return jaxrec.Task(SPEC, pair_loss, DENSE, ROWS, mesh)


def state_of(mesh=None):
    return task_of(mesh).init({"bias": np.zeros((), np.float32)}, "host")


def pipeline_of(state=None, **options):
    return Pipeline(task_of(), state or state_of(), **({"window": 2} | options))


def batches_of(number=6):
    return [pair_batch(seed=seed) for seed in range(number)]


def train(pipeline=None, batches=None, steps=6):
    """Run a pipeline; however it ends, no thread is left, and the tables are at the expected step."""
    pipeline = pipeline or pipeline_of()
    try:
        with pipeline:
            pipeline.train(batches_of() if batches is None else batches)
    finally:
        assert no_threads_left()
        assert not pipeline.running and pipeline.step == steps == pipeline.tables.step, pipeline.step
    return pipeline


def look_at(act):
    """Train, and call `act` on the state after the second step, which lags."""
    train(pipeline_of(callbacks=[at_step(2, act)]), steps=2)


def donated():
    """A state that a pipeline has taken and trained."""
    state = state_of()
    train(pipeline_of(state))
    return state


def in_the_save_of_a_cut(name):
    pipeline = pipeline_of(window=8)
    pipeline.snapshot_at(6, lambda state: getattr(pipeline, name)())
    train(pipeline)


def next_within_exclusive():
    with pipeline_of(window=8) as pipeline:
        running = pipeline.run(batches_of())
        next(running)
        pipeline.exclusive(lambda tables: next(running))


def close_in_a_callback():
    pipeline = pipeline_of(callbacks=[at_step(2, lambda state: pipeline.close())])
    train(pipeline, steps=2)


def reset_to_other_shapes():
    state = state_of()
    params = {"bias": np.zeros((1, 3), np.float32)}
    pipeline_of().reset(state._replace(dense=state.dense._replace(params=params)))


MISTAKES = {
    # States and meshes.
    "was donated to an earlier step": (
        lambda _: pipeline_of(donated()),
        lambda _: pipeline_of().reset(donated()),
    ),
    "reset to a dense state of other shapes": lambda _: reset_to_other_shapes(),
    "task is for a mesh of 2 devices.*lies on 1": lambda _: Pipeline(task_of(two_devices()), state_of()),
    "task is for a mesh of 1 devices.*lies on 2": lambda _: Pipeline(task_of(), state_of(two_devices())),
    "in 1 replicas, but the state lies on 2 in 2": lambda _: Pipeline(task_of(), state_of(two_devices(2))),
    "made with another spec than the step": lambda _: pipeline_of(
        state_of()._replace(tables=HostTables.create(OTHER, ROWS))
    ),
    # Streams, callbacks, and calls at the wrong time.
    "the stream has given a NoneType, where a Batch is expected": lambda _: train(batches=[None], steps=0),
    "the stream has given a tuple, where a Batch": lambda _: train(batches=[(pair_batch(), {})], steps=0),
    "the stream has given a dict, where a Batch": lambda _: train(batches=pair_batch(), steps=0),
    "close within a step: raise in the callback to end the run": lambda _: close_in_a_callback(),
    r"other tables: change rows in pipeline.exclusive\(\)": lambda _: train(
        pipeline_of(callbacks=[lambda info: info.state._replace(tables=HostTables.create(SPEC, ROWS))]), steps=1
    ),
    "another thread, 'MainThread', iterates over the run: call this there": (
        lambda _: in_the_save_of_a_cut("close"),
        lambda _: in_the_save_of_a_cut("drain"),
    ),
    "take the next batch when it has returned": lambda _: next_within_exclusive(),
    # States that lag.
    DRAIN: (lambda _: look_at(lambda state: pickle.dumps(state.tables)), lambda _: look_at(pipeline_of)),
    "at least one": lambda _: ShardsLost([]),
}
refused(MISTAKES)


# ---- the stream


@situation("a stream without batches")
def _(directory):
    train(batches=[], steps=0)


@situation("a stream that raises KeyboardInterrupt in its thread", KeyboardInterrupt, "^of the stream")
def _(directory):
    def stream():
        yield from batches_of()
        raise KeyboardInterrupt("of the stream")

    train(batches=stream())


@situation("a stream that is closed by its owner meanwhile")
def _(directory):
    stream = (batch for batch in batches_of())
    pipeline = pipeline_of()
    running = pipeline.run(stream)
    next(running)
    del running
    stream.close()  # batches taken before are trained
    list(pipeline.run(stream))
    assert 1 < pipeline.step <= 6 and pipeline.tables.step == pipeline.step


# ---- callbacks, and calls at the wrong time


def reset(tables, shards=(0,)):
    """Reset shards to their initial rows, in place."""
    return restore_shards(None, tables, shards)[0]


@situation("drain, exclusive and close outside of a run")
def _(directory):
    pipeline = pipeline_of()
    for _ in range(2):
        assert pipeline.drain() is pipeline.tables
        pipeline.exclusive(reset)
        pipeline.close()
        list(pipeline.run(batches_of()))
    assert pipeline.step == 12


@situation(
    "exclusive in another thread than that of the step",
    ValueError,
    "another thread, 'MainThread', iterates over the run",
)
def _(directory):
    failed = []

    def change():
        try:
            pipeline.exclusive(reset)
        except ValueError as error:
            failed.append(error)

    def remote_rows(state):
        thread = threading.Thread(target=change)
        thread.start()
        thread.join(60)

    pipeline = pipeline_of(callbacks=[at_step(2, remote_rows)])
    train(pipeline)
    raise failed[0]


# ---- lost shards, other states


class Reviver(Callback):
    """Restore lost shards with initial rows, or call `act` if given."""

    def __init__(self, act=None):
        self.act, self.seen = act, []

    def begin(self, engine):
        self.engine = engine

    def recover(self, shards):
        self.seen.append(shards)
        act = self.act or (lambda shards: self.engine.exclusive(lambda tables: reset(tables, shards)))
        act(shards)

    def end(self, error):
        self.seen.append("ended")


def lose_at_2(shards, steps=6, act=None, revivers=1):
    """Train with a callback that loses shards after step 2; return the revivers."""
    found = [Reviver(act) for _ in range(revivers)]
    pipeline = pipeline_of(callbacks=[*found, at_step(2, lambda state: pipeline.lose(shards))])
    train(pipeline, steps=steps)
    return found


@situation("losing no shard, all shards, a shard twice, with two callbacks that recover")
def _(directory):
    assert lose_at_2([])[0].seen == ["ended"]
    for reviver in lose_at_2(np.array([3, 1, 0, 2, 1]), revivers=2):
        assert reviver.seen == [(0, 1, 2, 3), "ended"]


@situation("a recovery that raises", OSError, "no image")
def _(directory):
    def act(shards):
        raise OSError("no image")

    lose_at_2([1], steps=2, act=act)


@situation("a recovery that changes nothing")
def _(directory):
    assert lose_at_2([1], act=lambda shards: None)[0].seen == [(1,), "ended"]


@situation("ShardsLost travels between processes")
def _(directory):
    for error in (ShardsLost([2, 1]), ShardsLost((1, 2), "the node is down")):
        again = pickle.loads(pickle.dumps(error))
        assert again.shards == (1, 2) and str(again) == str(error)


@situation("an iterator that nobody ever asks")
def _(directory):
    pipeline = pipeline_of()
    pipeline.run(batches_of())
    train(pipeline)


# ---- states that lag


@situation("a drained state is copied, pickled and trained on")
def _(directory):
    kept = []

    def keep(state):
        pipeline.drain()
        kept.extend([copy.deepcopy(state.tables), pickle.loads(pickle.dumps(state.tables)), state])

    pipeline = pipeline_of(callbacks=[at_step(6, keep)])
    train(pipeline)
    for tables in kept[:2]:
        jax.tree.map(np.testing.assert_array_equal, tables.shards, pipeline.tables.shards)
        assert tables.step == 6
    Serial(task_of(), pipeline.state).train(batches_of())


# ---- parts that fail


def broken_pipeline():
    """A pipeline whose first batches are lost."""

    def fetch(tree):
        raise OSError("the link is down")

    pipeline = pipeline_of(fetch=fetch)
    try:
        list(pipeline.run(batches_of()))
    except OSError:
        return pipeline
    raise AssertionError("the failure was swallowed")


@situation(
    "a pipeline over a broken one's state", BrokenEngine, "into new tables, or into `engine.tables` if these are"
)
def _(directory):
    pipeline_of(broken_pipeline().state)


@situation("a new pipeline over a broken one's tables, as its error says")
def _(directory):
    tables = broken_pipeline().tables
    assert tables.step == 0
    train(pipeline_of(state_of()._replace(tables=tables)))


@situation("a fetch that gives other shapes", ValueError, "read, update and put with one plan")
def _(directory):
    fetch = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf)[:, :-1], tree)
    pipeline = pipeline_of(fetch=fetch)
    try:
        list(pipeline.run(batches_of()))
    finally:
        assert pipeline.tables.step == 0


@situation("a send that exits", SystemExit, "3")
def _(directory):
    def send(*args):
        raise SystemExit(3)

    train(pipeline_of(send=send), steps=0)


@situation("threads that cannot be started", RuntimeError, "can't start new thread")
def _(directory):
    pipeline, stream, start = pipeline_of(), iter(batches_of()), threading.Thread.start
    for may in range(5):  # planner, two loaders, fetcher, writer
        allowed = [True] * may

        def refuse(thread, allowed=allowed):
            if not allowed:
                raise RuntimeError("can't start new thread")
            allowed.pop()
            start(thread)

        threading.Thread.start = refuse
        try:
            next(pipeline.run(stream))
        except RuntimeError as error:
            failure = error
        finally:
            threading.Thread.start = start
    train(pipeline, stream)
    raise failure


@situation("an update that raises when it is traced, is mended, and a run that goes on", None)
def _(directory):
    failing = [True]

    class Failing(jaxrec.Task):
        def update(self, dense, rows, plans, batch):
            if failing and len(batch.label) == 2 * size:
                raise ZeroDivisionError  # no refusal of the batch, which comes again, as with `Serial`
            return super().update(dense, rows, plans, batch)

    size = len(batches_of(1)[0].label)
    pipeline = Pipeline(Failing(SPEC, pair_loss, DENSE, ROWS), state_of(), window=2)
    stream = iter([*batches_of(3), *[grown(batch) for batch in batches_of(3)]])
    try:
        list(pipeline.run(stream))
    except ZeroDivisionError:
        assert pipeline.step == 3 == pipeline.tables.step
    else:
        raise AssertionError("the update was not traced again")
    failing.clear()
    list(pipeline.run(stream))
    assert isinstance(pipeline.state, TrainState) and pipeline.step == 6 == pipeline.tables.step


def grown(batch):
    """A batch of twice the size, which needs another program."""
    return jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), batch)
