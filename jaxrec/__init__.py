"""Recommendation models in JAX with functional state: large tables, many trainers, failing machines.

A training step is plan -> read -> update -> put:

    plans = plan(spec, batch.ids)         deduplicated rows that the batch touches, per stack of tables
    rows = tables.read(plans)             from `DeviceTables` or, if the tables are larger, `PinnedTables`
    dense, rows, metrics = update(...)    pure: loss, gradients, optax, and a row optimizer
    tables = tables.put(plans, rows)      store the updated rows

`Task.step` is all four; the docstring of `Task` trains a whole model. The engine `Serial` trains it over batches and
calls a `Callback` after each step, and `evaluate` computes AUC and log loss. Three techniques build on it, each usable
alone or with the others; `help` of each package says what to read first:

    jaxrec.oac          overlap batches over `HostTables`, with the results of serial training: `Pipeline`
    jaxrec.shadowsync   average replicas of the dense network in the background: `SyncGroup`
    jaxrec.cpr          restore only the lost shards, from checkpoints of the most used rows: `Recovery`

>>> spec = EmbeddingSpec({"user": Table(1000, 8), "item": Table(50, 8)}, {"pair": Lookup(("user", "item"))})
>>> tables, batch = HostTables.create(spec, adagrad(0.1)), SyntheticClicks((1000, 50), lookup="pair").batch(0, 32)
>>> tables.read(plan(spec, batch.ids))["width_8"].value.shape[-1]
8
"""

from jaxrec.callbacks import Callback, StepInfo, every
from jaxrec.data.synthetic import SyntheticClicks
from jaxrec.embedding import (
    DeviceTables,
    EmbeddingSpec,
    HostTables,
    Lookup,
    PinnedTables,
    Table,
    Tables,
    activations,
    adagrad,
    plan,
    rowwise_adagrad,
    sgd,
)
from jaxrec.engine import Engine, Serial
from jaxrec.loop import evaluate
from jaxrec.models import DLRM, DCNv2
from jaxrec.prefetch import planned
from jaxrec.sharding import make_mesh, to_device
from jaxrec.step import make_eval_step, update
from jaxrec.table_use import BrokenEngine
from jaxrec.task import Task, check_step
from jaxrec.types import Batch, DenseState, Plan, RowOptimizer, Rows, Slot, TrainState
from jaxrec.xla import avoid_faults

avoid_faults()

__version__ = "0.1.0"

__all__ = [
    "DLRM", "Batch", "BrokenEngine", "Callback", "DCNv2", "DenseState", "DeviceTables", "EmbeddingSpec", "Engine",
    "HostTables", "Lookup", "PinnedTables", "Plan", "RowOptimizer", "Rows", "Serial", "Slot", "StepInfo",
    "SyntheticClicks", "Table", "Tables", "Task", "TrainState", "activations", "adagrad", "check_step", "evaluate",
    "every", "make_eval_step", "make_mesh", "plan", "planned", "rowwise_adagrad", "sgd", "to_device", "update",
]  # fmt: skip
