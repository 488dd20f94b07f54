"""jaxrec: recommendation models in JAX with functional state; a step is plan -> read -> update -> put."""

from jaxrec.embedding import (
    DeviceTables,
    EmbeddingSpec,
    HostTables,
    Lookup,
    Table,
    Tables,
    activations,
    plan,
)  # fmt: skip
from jaxrec.sharding import make_mesh
from jaxrec.step import init_state, make_eval_step, make_train_step, make_update, run_hooks, update
from jaxrec.types import Batch, DenseState, Plan, RowOptimizer, Rows, Slot, TrainState

__version__ = "0.1.0"

__all__ = [
    "Batch", "DenseState", "DeviceTables", "EmbeddingSpec", "HostTables", "Lookup", "Plan", "RowOptimizer", "Rows",
    "Slot", "Table", "Tables", "TrainState", "activations", "init_state", "make_eval_step", "make_mesh",
    "make_train_step", "make_update", "plan", "run_hooks", "update",
]  # fmt: skip
