"""Objects that do not fit each other, and table files after accidents: mistakes of the first week."""

import contextlib
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from click_model import pair_batch, pair_loss, pair_predict

import jaxrec
from abuse import refused, situation
from jaxrec.embedding import DeviceTables, EmbeddingSpec, HostTables, Lookup, Table, adagrad, rowwise_adagrad
from jaxrec.types import RowOptimizer, Rows, Slot

SPEC = EmbeddingSpec({"user": Table(40, 4), "item": Table(9, 4)}, {"pair": Lookup(("user", "item"))}, shards=4)
ROWS, DENSE = rowwise_adagrad(0.1), optax.adam(0.01)
PARAMS = {"bias": np.zeros((), np.float32)}


@functools.cache  # one compiled program for all situations that can share it
def task_of(replicas=1, devices=1, rows=ROWS, dense=DENSE, spec=SPEC):
    return jaxrec.Task(spec, pair_loss, dense, rows, jaxrec.make_mesh(replicas, jax.devices()[:devices]))


def state_of(home="host", **task):
    return task_of(**task).init(PARAMS, home)


@functools.cache
def eval_step():
    return jaxrec.make_eval_step(SPEC, pair_predict)


def init(params, optimizer=DENSE):
    return task_of(dense=optimizer).init(params, "host")


def _halved(gradient, value, slots, step):
    value, slots = ROWS.update(gradient, value, slots, step)
    return value.astype(jnp.float16), slots


HALF = ROWS._replace(update=_halved)


def copy_of(state):
    tables = state.tables.shards if isinstance(state.tables, HostTables) else state.tables
    return jax.tree.map(np.array, (state.dense, tables))


@contextlib.contextmanager
def unchanged(state):
    """Check on exit that the state is unchanged and usable."""
    before = copy_of(state)
    try:
        yield state
    finally:
        jax.tree.map(np.testing.assert_array_equal, before, copy_of(state))


def train(batch=None, plan=None, state=None, task=None):
    """Take one step, which must leave the state unchanged if it fails."""
    batch = pair_batch() if batch is None else batch
    with unchanged(state_of() if state is None else state) as state:
        (task or task_of()).step(state, batch, plan)


# ---- invalid batches


BATCHES = {
    r"weight has shape \(8, 1\), but f32\[B\]": lambda _: train(pair_batch(weight=np.ones((8, 1), np.float32))),
    r"weight\[2\] is nan": lambda _: train(pair_batch(weight=np.array([1, 1, np.nan, 1, 1, 1, 1, 1], np.float32))),
    r"weight\[0\] is inf": lambda _: train(pair_batch(weight=np.array([np.inf] + [1.0] * 7, np.float32))),
    "at least one example": lambda _: train(pair_batch(0)),
    r"label has shape \(7,\), but the weights are of 8 examples": lambda _: train(
        pair_batch(label=np.ones(7, np.float32))
    ),
    "are object, but ids are arrays of integers.*pad bags of several lengths with -1": lambda _: jaxrec.plan(
        SPEC, {"pair": np.array([[[1, 2], [3]]], dtype=object)}
    ),
}
refused(BATCHES)


@situation("int64 ids, numpy's default")
def _(directory):
    batch = pair_batch()
    wide = batch._replace(ids={"pair": batch.ids["pair"].astype(np.int64)})
    states = [task_of().step(state_of(), each)[0] for each in (batch, wide)]
    jax.tree.map(np.testing.assert_array_equal, *map(copy_of, states))


# ---- arguments of a step


PLANS = {
    r"plans are Plan, but \{stack: Plan\}.*jaxrec.plan": lambda _: train(
        plan=jaxrec.plan(SPEC, pair_batch().ids)["width_4"]
    ),
    "is that of other ids: plan this very batch": lambda _: train(plan=jaxrec.plan(SPEC, pair_batch(seed=1).ids)),
    r"plan of 'width_4' is of ids .*\(4, 2\).*has .*\(8, 2\)": lambda _: train(
        plan=jaxrec.plan(SPEC, pair_batch(4).ids)
    ),
}
refused(PLANS)


@situation("a plan of another spec", ValueError, r"plans are \['width_8'\], but \{stack: Plan\} of \['width_4'\]")
def _(directory):
    other = EmbeddingSpec({"user": Table(40, 8), "item": Table(9, 8)}, {"pair": Lookup(("user", "item"))}, shards=4)
    train(plan=jaxrec.plan(other, pair_batch().ids))


@situation("a plan of another number of shards", ValueError, "2 shards, but the batch has .* and the spec 4 shards")
def _(directory):
    other = EmbeddingSpec(SPEC.tables, SPEC.lookups, shards=2)
    train(plan=jaxrec.plan(other, pair_batch().ids))


def _used_twice(home):
    state, batch = state_of(home), pair_batch()
    task_of().step(state, batch)
    task_of().step(state, batch)


@situation("the old state given to an engine", ValueError, "donated to an earlier step and is gone")
def _(directory):
    state = state_of()
    task_of().step(state, pair_batch())
    jaxrec.Serial(task_of(), state)


OTHERS = {
    r"ids\['pair'\] are <class 'list'>, but ids are arrays of integers": lambda _: jaxrec.plan(
        SPEC, {"pair": [[1, 2], [3, 4]]}
    ),
    "optimizer state is .*wants .*ScaleByBeliefState": lambda _: train(
        state=state_of(dense=optax.adam(0.1)), task=task_of(dense=optax.adabelief(0.1))
    ),
    r"pair is expected, got a Batch: iterate over planned\(spec": lambda _: jaxrec.evaluate(
        state_of(), [pair_batch()], eval_step()
    ),
    "have slots {'accumulator': 4} .*'accumulator': 1": lambda _: train(state=state_of("device", rows=adagrad(0.1))),
    "has dropped rows: .* in a shard of capacity 1": lambda _: train(
        plan=jaxrec.embedding.host_plan(SPEC, pair_batch().ids, {"width_4": 1})
    ),
    "donated to an earlier step and is gone: go on with the state that": lambda _: _used_twice("host"),
    r"params\['count'\] is int32, but dense parameters are arrays of floats": lambda _: init({"count": jnp.int32(3)}),
    r"params\['active'\] is <class 'str'>, but dense": lambda _: init({"active": "relu"}),
    r"params\['key'\] is key<.*, but dense .*the loss gets its key by `seed=`": lambda _: init(
        {"key": jax.random.key(0)}
    ),
    r"opt_state\[0\].rng_key is a PRNG key, .* draw noise in the loss": lambda _: init(
        PARAMS, optax.chain(optax.add_noise(0.1, 0.5, 0), DENSE)
    ),
    "rows are in 'device', 'pinned' or 'host' memory, not 'gpu'": lambda _: state_of("gpu"),
    "label and dense of a batch are arrays": lambda _: train(pair_batch(label=None)),
    r"row optimizer returned rows .*float16\[.*only values may change": lambda _: train(task=task_of(rows=HALF)),
    "is not a RowOptimizer": lambda directory: HostTables.create(SPEC, DENSE, directory / "tables"),
}
refused(OTHERS)


@situation("device tables of another spec", ValueError, "made with another spec than the step: .*one spec")
def _(directory):
    other = EmbeddingSpec({"user": Table(10, 4), "item": Table(9, 4)}, SPEC.lookups, shards=4)
    train(state=state_of("device", spec=other))


# ---- meshes


@situation("130 examples on 4 devices", ValueError, "[Ss]hard.*4.*130")
def _(directory):
    train(pair_batch(130), state=state_of("device", devices=4), task=task_of(devices=4))


def _step_on_four(*states):
    """One step of each state on four devices, which must give the same."""
    after = [task_of(devices=4).step(state, pair_batch())[0] for state in states]
    jax.tree.map(np.testing.assert_array_equal, *map(copy_of, after))


@situation("a state of one device and device tables on four")
def _(directory):
    four = jaxrec.make_mesh(devices=jax.devices()[:4])
    tables = DeviceTables.create(SPEC, ROWS, four)
    _step_on_four(task_of().init(PARAMS, tables), state_of("device", devices=4))


@situation("a state of one device and host tables")
def _(directory):
    _step_on_four(state_of(), state_of(devices=4))


@situation("two replicas in the state, one in the step", ValueError, r"first axis of \[\(2,\)\], but .* 1 replicas")
def _(directory):
    train(state=state_of(replicas=2, devices=2), task=task_of(devices=2))


MESHES = {
    "replica=1 must lie between 0 and 0": lambda _: jaxrec.make_eval_step(SPEC, pair_predict, replica=1),
    r"the mesh has the axes \('batch',\), but one over": lambda _: jaxrec.Task(
        SPEC, pair_loss, DENSE, ROWS, jax.make_mesh((2,), ("batch",))
    ),
    "4 shards cannot be split over 8 devices": lambda _: jaxrec.make_eval_step(
        SPEC, pair_predict, jaxrec.make_mesh(devices=jax.devices())
    ),
    "does not match the sharding.*'data': 1": lambda _: train(state=state_of("device", devices=4)),
    "does not match the sharding.*'data': 4": lambda _: train(
        state=task_of(devices=4).init(PARAMS, DeviceTables.create(SPEC, ROWS)), task=task_of(devices=4)
    ),
}
refused(MESHES)


# ---- loops


@situation("an iterator that was used up before", ValueError, "no example .* used up before")
def _(directory):
    pairs = jaxrec.planned(SPEC, [pair_batch()])
    jaxrec.evaluate(state_of(), pairs, eval_step())
    jaxrec.evaluate(state_of(), pairs, eval_step())


# ---- specs


refused(
    {
        "rows=1000000.0 must be a whole number from 1, such as 1_000_000": lambda _: Table(1e6, 16),
        "scale=.* must be 0 or more and finite": lambda _: Table(9, 4, scale=-1.0),
    }
)


@situation("a table of numpy's numbers")
def _(directory):
    spec = EmbeddingSpec({"a": Table(np.int64(9), np.int32(4))}, {"a": Lookup("a")}, shards=np.int64(4))
    assert spec.digest == EmbeddingSpec({"a": Table(9, 4)}, {"a": Lookup("a")}, shards=4).digest


# ---- host tables and their files


@situation("host tables read with a plan of larger ones", ValueError, "its row numbers are out of range")
def _(directory):
    large = EmbeddingSpec({"user": Table(4000, 4), "item": Table(9, 4)}, SPEC.lookups, shards=4)
    HostTables.create(SPEC, ROWS).read(jaxrec.plan(large, {"pair": np.array([[3999, 8]])}))


@situation("host tables read with a plan of other shards", ValueError, "a plan of 2 shards for 'width_4'.* in 4 shards")
def _(directory):
    two = EmbeddingSpec(SPEC.tables, SPEC.lookups, shards=2)
    HostTables.create(SPEC, ROWS).read(jaxrec.plan(two, pair_batch().ids))


def _put_changed(change):
    tables = HostTables.create(SPEC, ROWS)
    plans = jaxrec.plan(SPEC, pair_batch().ids)
    rows = tables.read(plans)
    before = jax.tree.map(np.array, tables.shards)
    try:
        tables.put(plans, {name: change(r) for name, r in rows.items()})
    finally:
        jax.tree.map(np.testing.assert_array_equal, before, tables.shards)
        assert tables.step == 0


refused(
    {
        "rows of 'width_4' have the shapes": lambda _: _put_changed(lambda rows: Rows(rows.value, {})),
        "object stores are not supported": lambda _: HostTables.create(SPEC, ROWS, "s3://bucket/tables"),
        "slot named 'value'": lambda _: HostTables.create(
            SPEC, RowOptimizer(lambda width: {"value": Slot(width, 0.0)}, ROWS.update)
        ),
    }
)


@situation("device tables read with a plan of other shards", ValueError, "a plan of 2 shards for 'width_4', but")
def _(directory):
    two = EmbeddingSpec(SPEC.tables, SPEC.lookups, shards=2)
    DeviceTables.create(SPEC, ROWS).read(jaxrec.plan(two, pair_batch().ids))


@situation("rows put on a device that would be broadcast", ValueError, "rows of 'width_4' have the shapes")
def _(directory):
    tables, plans = DeviceTables.create(SPEC, ROWS), jaxrec.plan(SPEC, pair_batch().ids)
    tables.put(plans, {name: rows._replace(value=rows.value[..., :1]) for name, rows in tables.read(plans).items()})


@situation("a shard that there is not", ValueError, "shard=4 must be a whole number from 0 to 3")
def _(directory):
    tables = HostTables.create(SPEC, ROWS)
    plans = jaxrec.plan(SPEC, pair_batch().ids)
    tables.put(plans, tables.read(plans), [4])


def files(directory):
    return HostTables.create(SPEC, ROWS, directory / "tables")


def attach(directory, **options):
    return HostTables.attach(SPEC, ROWS, directory / "tables", **options)


@situation("a table file cut short", ValueError, "width_4.002 is 8 bytes long, but 260 bytes are expected")
def _(directory):
    files(directory)
    os.truncate(directory / "tables" / "width_4.002", 8)
    attach(directory)


@situation("a table file that is missing", ValueError, "width_4.000 is missing.*restore an image")
def _(directory):
    files(directory)
    (directory / "tables" / "width_4.000").unlink()
    attach(directory)


@situation("a cut manifest of tables", ValueError, "tables.json is damaged")
def _(directory):
    files(directory)
    os.truncate(directory / "tables" / "tables.json", 20)
    attach(directory)


@situation("a manifest of tables that is no dict", ValueError, "tables.json is damaged")
def _(directory):
    files(directory)
    (directory / "tables" / "tables.json").write_text(json.dumps([1]))
    attach(directory)


@situation("a file where the table directory should be", ValueError, "holds no complete tables")
def _(directory):
    (directory / "tables").touch()
    attach(directory)


@situation("two that create tables at once", ValueError, "tables.lock is locked: another process is creating tables in")
def _(directory):
    from jaxrec.embedding.host import creating_files

    with creating_files(directory / "tables", SPEC, SPEC.layout(ROWS)):
        files(directory)


@situation("another word for torn", ValueError, "torn='yes' must be 'refuse' or 'accept'")
def _(directory):
    files(directory)
    attach(directory, torn="yes")


@situation("overwriting a shard that there is not", ValueError, "shard=9 must be")
def _(directory):
    tables = files(directory)
    try:
        with tables.overwriting([9]):
            pass
    finally:
        assert tables.step == 0


@situation("chdir between create and attach by another name")
def _(directory):
    here = os.getcwd()
    try:
        os.chdir(directory)
        tables = HostTables.create(SPEC, ROWS, "tables")
    finally:
        os.chdir(here)
    tables.flush()
    assert tables.directory == directory / "tables" and attach(directory).step == 0
