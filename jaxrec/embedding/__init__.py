"""Embeddings: tables and lookups (`EmbeddingSpec`), the rows that a batch touches (`plan`), and row storage (`Tables`).

Read `spec` first, then `tables`: `DeviceTables`, `PinnedTables`, `HostTables` and `RemoteTables` implement that one
interface, whose operations are `read`, `put` and `add`. `lookup` numbers rows and turns them into activations;
`optimizers` updates them. `embedding_matrix` copies a table out of any implementation. The servers of remote rows are
in `servers`.
"""

from jaxrec.embedding.device import DeviceTables
from jaxrec.embedding.homes import Place, create_tables
from jaxrec.embedding.host import HostTables
from jaxrec.embedding.lookup import (
    activations,
    bucket,
    capacity_of,
    checked_plan,
    device_plan,
    host_plan,
    plan,
    unchecked_plan,
)
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
from jaxrec.embedding.pinned import PinnedTables
from jaxrec.embedding.remote import RemoteTables
from jaxrec.embedding.spec import EmbeddingSpec, Layout, Lookup, Table
from jaxrec.embedding.tables import HostedTables, Tables, embedding_matrix

__all__ = [
    "DeviceTables", "EmbeddingSpec", "HostTables", "HostedTables", "Layout", "Lookup", "PinnedTables", "Place",
    "RemoteTables", "Table", "Tables", "activations", "adagrad", "bucket", "capacity_of", "checked_plan",
    "create_tables", "device_plan", "embedding_matrix", "ftrl", "host_plan", "lazy_adam", "momentum_sgd", "plan",
    "rowwise_adagrad", "rowwise_adam", "sgd", "unchecked_plan", "with_clipping", "with_weight_decay",
]  # fmt: skip
