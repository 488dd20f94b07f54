"""A task for CPR: tables of two widths, batches with skewed ids, and all schemes."""

import jax.numpy as jnp
import numpy as np
import optax
from homes import tables_in

from jaxrec import Batch, Task, make_mesh
from jaxrec.cpr import mfu, random_rows, round_robin, scar, ssu
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, adagrad

TABLES = {"big": Table(90, 4), "small": Table(7, 4), "wide": Table(40, 8)}
SPEC = EmbeddingSpec(TABLES, {"pair": Lookup(("big", "small")), "wide": Lookup("wide")}, shards=4)
ROWS, DENSE = adagrad(0.1), optax.adam(0.01)
SCHEMES = {
    "vanilla": None,
    "mfu": mfu(),
    "ssu": ssu(1),
    "scar": scar(),
    "round_robin": round_robin(),
    "random": random_rows(),
}
STEPS = 40


def loss(params, activations, batch):
    logit = activations["pair"].sum((1, 2)) + activations["wide"].sum(-1) * params["w"].sum()
    return optax.sigmoid_binary_cross_entropy(logit, batch.label)


TASK = Task(SPEC, loss, DENSE, ROWS)
CAPACITY = {"width_4": 16, "width_8": 12}  # enough for every batch, so that each home compiles once


def batches(start=0, stop=STEPS, size=12):
    for index in range(start, stop):
        rng = np.random.default_rng(index)
        pair = np.stack([rng.zipf(1.5, size) % 90, rng.integers(0, 7, size)], axis=1).astype(np.int32)
        ids = {"pair": pair, "wide": (rng.zipf(1.3, size) % 40).astype(np.int32)}
        label = rng.integers(0, 2, size).astype(np.float32)
        yield Batch(ids, label)


def fresh(home):
    return TASK.init({"w": jnp.ones(3)}, tables_in(home, SPEC, ROWS, make_mesh()))


def rows_of(state, shard):
    """Copies of all rows and slots of a shard."""
    every = {name: state.tables.parts(name) for name in SPEC.stacks}
    return {(name, part): np.array(rows[shard]) for name in SPEC.stacks for part, rows in every[name].items()}


def nothing(number, size=12):
    """Batches that look up no row: later saves hold rows touched before."""
    return [Batch({"pair": np.full((size, 2), -1), "wide": np.full(size, -1)}, np.ones(size, np.float32))] * number
