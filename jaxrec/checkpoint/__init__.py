"""Checkpoints: atomic images of the training state, and row deltas over them, saved while training continues.

`Checkpointer` saves images of the whole state. `RowCheckpointer` saves deltas of some rows over an image, from which
`restore_shards` restores shards alone, and `restore` the whole state if the dense state was saved
with them. `restore_for_prediction` restores a model without its optimizers, and `read_tables` reads embeddings without
a state. Read `format` first, for the files and why they can be trusted; then `checkpointer`, and `row_deltas` for
deltas.
"""

from jaxrec.checkpoint.checkpointer import Checkpointer
from jaxrec.checkpoint.format import (
    DamagedImage,
    Image,
    Snapshot,
    deltas,
    images,
    is_intact,
    read_manifest,
    verify,
    write_image,
)
from jaxrec.checkpoint.restore import (
    read_tables,
    restore,
    restore_each,
    restore_for_prediction,
    restore_shards,
    shard_source,
    spec_of,
)
from jaxrec.checkpoint.row_deltas import RowCheckpointer, chain, newest, newest_first, snapshot_rows
from jaxrec.checkpoint.state import snapshot

__all__ = [
    "Checkpointer",
    "DamagedImage",
    "Image",
    "RowCheckpointer",
    "Snapshot",
    "chain",
    "deltas",
    "images",
    "is_intact",
    "newest",
    "newest_first",
    "read_manifest",
    "read_tables",
    "restore",
    "restore_each",
    "restore_for_prediction",
    "restore_shards",
    "shard_source",
    "snapshot",
    "snapshot_rows",
    "spec_of",
    "verify",
    "write_image",
]  # fmt: skip
