"""A task for OAC with its batches, the plain loop that is the reference of its runs, and pipelines to look into."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from oac_equivalence import HeldBack
from strategies import draw_ids
from studies.oac_failures import WatchedTables

import jaxrec
from jaxrec.checkpoint import restore_shards
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad
from jaxrec.oac import Pipeline
from jaxrec.oac.stages import Stages
from jaxrec.types import Batch, TrainState

OPTIMIZER, ROWS = optax.adam(0.05), adagrad(0.1)
SPEC = EmbeddingSpec(
    {"user": Table(60, 4), "item": Table(7, 4), "bias": Table(1, 1)},
    {"pair": Lookup(("user", "item")), "bag": Lookup("user", 3, "mean"), "bias": Lookup("bias")},
    shards=4,
)  # fmt: skip


def loss(params, activations, batch):
    """Squared error of a quadratic form of all lookups."""
    total = batch.dense @ params["dense"]
    for value in activations.values():
        flat = value.reshape(len(value), -1)
        total = total + jnp.sum(flat * flat, axis=1) * params["scale"] + jnp.sum(flat, axis=1)
    return (total - batch.label) ** 2


@functools.cache
def task_of(spec, mesh=None, kind=jaxrec.Task):
    return kind(spec, loss, OPTIMIZER, ROWS, mesh)


def make_state(spec=SPEC, mesh=None, features=3):
    params = {"dense": jnp.ones(features), "scale": jnp.ones(())}
    return task_of(spec, mesh).init(params, "host")


def make_batches(number, spec=SPEC, size=8, seed=0, overlap="some"):
    """Batches that share all, some or no rows with adjacent ones; the last one is partly padding."""
    rng, batches = np.random.default_rng(seed), []
    for index in range(number):
        ids = draw_ids(spec, size, seed if overlap == "full" else seed + index)
        if overlap == "none":  # row r belongs to batch r % number
            mine = {key: array - array % number + index for key, array in ids.items()}
            ids = {key: np.where((array >= 0) & (mine[key] <= array), mine[key], -1) for key, array in ids.items()}
        weight = np.ones(size, np.float32)
        if index == number - 1:
            weight[size // 2 :] = 0
            ids = {key: np.where(weight.reshape(-1, *[1] * (a.ndim - 1)) > 0, a, -1) for key, a in ids.items()}
        dense, label = rng.normal(size=(size, 3)).astype(np.float32), rng.normal(size=size).astype(np.float32)
        batches.append(Batch({key: a.astype(np.int32) for key, a in ids.items()}, label, dense, weight))
    return batches


def plain_loop(batches, spec=SPEC, mesh=None, delay=0, after=None):
    """Training without a pipeline, the reference of all comparisons: (state, losses).

    With a delay, batch t reads rows as of batch t - 1 - delay and adds its change of them. `after` (step, state) is
    called after each batch; if it returns something true, it has changed rows, and later batches read them changed.
    """
    update = jax.jit(task_of(spec, mesh).checked_update, donate_argnums=0)
    (dense, tables), losses, capacity = make_state(spec, mesh), [], None
    past = [copied(tables)] * (delay + 1)
    for step, batch in enumerate(batches, 1):
        plans = jaxrec.plan(spec, batch.ids, capacity)
        capacity = {name: p.unique.shape[1] for name, p in plans.items()}
        if delay:
            old = past[0].read(plans)
            dense, rows, metrics = update(dense, old, plans, batch)
            tables.add(plans, rows, old)
            past = [*past[1:], copied(tables)]
        else:
            dense, rows, metrics = update(dense, tables.read(plans), plans, batch)
            tables.put(plans, rows)
        losses.append(np.asarray(metrics["loss"]))
        if after and after(step, TrainState(dense, tables)):
            past = [copied(tables)] * (delay + 1)
    return TrainState(dense, tables), losses


def copied(tables):
    shards = {n: [{p: a.copy() for p, a in parts.items()} for parts in s] for n, s in tables.shards.items()}
    return HostTables(tables.spec, tables.layout, shards)


def frozen(state):
    """A copy of a state that training does not change."""
    return TrainState(jax.tree.map(np.array, state.dense), copied(state.tables))


def states_of(batches):
    """{step: state} of training batch by batch."""
    states = {0: frozen(make_state())}
    plain_loop(batches, after=lambda step, state: states.update({step: frozen(state)}))
    return states


def train(batches, spec=SPEC, mesh=None, late=True, callbacks=(), state=None, **options):
    """Trains through a pipeline; if `late`, write-backs are as late as allowed: (pipeline, (state, losses))."""
    window = {"sync": 0, "semisync": 1}.get(options.get("mode"), options.get("window", 8))
    held = HeldBack(window, len(batches))
    if late:
        options = {"send": held.send, "fetch": held.fetch} | options
    with Pipeline(task_of(spec, mesh), state or make_state(spec, mesh), callbacks, **options) as pipeline:
        losses = [np.asarray(metrics["loss"]) for _, metrics in pipeline.run(batches)]
    return pipeline, (pipeline.state, losses)


def reset(tables):
    """Resets shard 1, as after a failure; rows of earlier batches must not undo this."""
    return restore_shards(None, tables, [1])[0]


def watched(state, **before):
    """A state whose tables call functions before they are read and written."""
    return state._replace(tables=WatchedTables.of(state.tables, **before))


def pipeline_with(wrapper):
    """A Pipeline class whose compiled update is wrapped by a function."""

    class Wrapped(Stages):
        def __init__(self, *given):
            super().__init__(*given)
            self.update = wrapper(self.update)

    return type("WrappedPipeline", (Pipeline,), {"stages_type": Wrapped})
