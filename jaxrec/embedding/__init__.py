"""Embeddings: what to look up (`EmbeddingSpec`), what a batch touches (`plan`), and where rows live
(`Tables`).

Read `spec` first, then `tables`: `DeviceTables`, `HostTables` and `RemoteTables` are three homes of
that one interface, whose verbs are `read`, `put` and `add`. `lookup` numbers rows and turns them
into activations, and `optimizers` step them. `embedding_matrix` copies a table out of
any home. Remote rows are with `servers`.
"""

from jaxrec.embedding.device import DeviceTables
from jaxrec.embedding.host import HostTables
from jaxrec.embedding.lookup import activations, bucket, capacity_of, device_plan, host_plan, plan
from jaxrec.embedding.optimizers import (
    adagrad,
    ftrl,
    lazy_adam,
    momentum_sgd,
    rowwise_adagrad,
    rowwise_adam,
    sgd,
    with_clipping,
    with_weight_decay,
)
from jaxrec.embedding.remote import RemoteTables
from jaxrec.embedding.spec import EmbeddingSpec, Layout, Lookup, Table
from jaxrec.embedding.tables import Tables, embedding_matrix

__all__ = [
    "DeviceTables", "EmbeddingSpec", "HostTables", "Layout", "Lookup", "RemoteTables", "Table",
    "Tables", "activations", "adagrad", "bucket", "capacity_of", "device_plan", "embedding_matrix", "ftrl",
    "host_plan", "lazy_adam", "momentum_sgd", "plan", "rowwise_adagrad", "rowwise_adam", "sgd", "with_clipping",
    "with_weight_decay",
]  # fmt: skip
