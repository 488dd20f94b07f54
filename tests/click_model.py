"""Small click models, and a task over 40 items with its states, batches and plain training loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from homes import every_row, tables_in
from in_process_servers import remote

from jaxrec import Batch, Task
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, adagrad, plan


def loss(params, activations, batch):
    """Log loss of the dot product of the lookup `item` and the weights `w`."""
    return optax.sigmoid_binary_cross_entropy(activations["item"] @ params["w"], batch.label)


SPEC = EmbeddingSpec({"item": Table(40, 4)}, {"item": Lookup("item")}, shards=4)
ROWS, DENSE = adagrad(0.1), optax.adam(0.02)
TASK = Task(SPEC, loss, DENSE, ROWS)


def batch_at(index, size=8):
    rng = np.random.default_rng(index)
    ids, label = (rng.zipf(1.3, size) % 40).astype(np.int32), rng.integers(0, 2, size).astype(np.float32)
    return Batch({"item": ids}, label)


def stream_from(first, last=12):
    return (batch_at(index) for index in range(first, last))


def plan_of(items):
    return plan(SPEC, {"item": np.asarray(items, np.int32)})


def fresh(home):
    tables = remote(SPEC, ROWS) if home == "remote" else tables_in(home, SPEC, ROWS)
    return TASK.init({"w": jnp.ones(4)}, tables)


def bits(state):
    """Copies of all arrays on the host, wherever the tables are placed."""
    return jax.tree.map(np.array, state.dense), every_row(state.tables)


def plain(steps, home="host", act=lambda state, step: state):
    """(bits, losses) of a plain training loop; `act` is called after every step."""
    state, losses = fresh(home), []
    for index in range(steps):
        batch = batch_at(index)
        state, metrics = TASK.step(state, batch, plan(SPEC, batch.ids, {"width_4": 8}))
        losses.append(float(metrics["loss"]))
        state = act(state, index + 1)
    return bits(state), losses


def pair_predict(params, activations, batch):
    """Logits: dot product of the two tables of the lookup `pair`, plus a bias."""
    return activations["pair"].prod(axis=1).sum(axis=-1) + params["bias"]


def pair_loss(params, activations, batch):
    return optax.sigmoid_binary_cross_entropy(pair_predict(params, activations, batch), batch.label)


def pair_batch(size=8, seed=0, **changes):
    """A batch with random ids of tables of 40 and 9 rows."""
    rng = np.random.default_rng(seed)
    ids = {"pair": rng.integers(0, [40, 9], (size, 2)).astype(np.int32)}
    return Batch(ids, (rng.random(size) < 0.5).astype(np.float32))._replace(**changes)
