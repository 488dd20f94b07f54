"""Recommendation models in JAX with functional state: large tables, many trainers, machines that
fail.

A training step is plan -> read -> update -> put, and a batch flows through it so:

    plans = plan(spec, batch.ids)         which rows of which tables the batch touches, each once
    rows = tables.read(plans)             from `DeviceTables` or, if they are larger, `HostTables`
    dense, rows, metrics = update(...)    pure: loss, gradients, optax, and a row optimizer
    tables = tables.put(plans, rows)      the new rows back to where they live

`make_train_step` makes one function of all four, whose docstring trains a whole model. `Serial` and
`train` repeat it over batches with hooks, `fit` folds it over planned batches, and `evaluate` tells
AUC and log loss. Three techniques stand on it, each usable alone and with the others; `help` of
each says what to read first:

    jaxrec.oac          batches overlap over host tables, results are those of one after the other: `Pipeline`
    jaxrec.shadowsync   copies of the dense network are averaged in the background: `SyncGroup`
    jaxrec.cpr          lost shards come back alone, from checkpoints of the most used rows: `Recovery`

>>> spec = EmbeddingSpec({"user": Table(1000, 8), "item": Table(50, 8)}, {"pair": Lookup(("user", "item"))})
>>> tables, batch = HostTables.create(spec, adagrad(0.1)), SyntheticClicks((1000, 50), lookup="pair").batch(0, 32)
>>> tables.read(plan(spec, batch.ids))["width_8"].value.shape[-1]
8
"""

from jaxrec.data.synthetic import SyntheticClicks
from jaxrec.embedding import (
    DeviceTables,
    EmbeddingSpec,
    HostTables,
    Lookup,
    Table,
    Tables,
    activations,
    adagrad,
    plan,
    rowwise_adagrad,
    sgd,
)
from jaxrec.engine import Engine
from jaxrec.loop import Serial, evaluate, every, fit, planned, train
from jaxrec.models import DLRM, DCNv2
from jaxrec.sharding import make_mesh
from jaxrec.step import check_step, init_state, make_eval_step, make_train_step, make_update, run_hooks, update
from jaxrec.types import Batch, DenseState, Plan, RowOptimizer, Rows, Slot, TrainState
from jaxrec.xla import avoid_faults

avoid_faults()

__version__ = "0.1.0"

__all__ = [
    "DLRM", "Batch", "DCNv2", "DenseState", "DeviceTables", "EmbeddingSpec", "Engine", "HostTables", "Lookup", "Plan",
    "RowOptimizer", "Rows", "Serial", "Slot", "SyntheticClicks", "Table", "Tables", "TrainState", "activations",
    "adagrad", "check_step", "evaluate", "every", "fit", "init_state", "make_eval_step", "make_mesh", "make_train_step",
    "make_update", "plan", "planned", "rowwise_adagrad", "run_hooks", "sgd", "train", "update",
]  # fmt: skip
