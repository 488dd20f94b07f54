"""Checkpoints: images of the training state that are whole or absent, saved while training goes on.

`Checkpointer` saves the whole state; `RowCheckpointer` some rows over it, from which one shard is
restored alone (`restore_shard`, `restore_shards`), or, if the dense state was saved with them, the whole state
(`restore`). `restore_for_prediction` gives the model of a run without its optimizers, and
`read_tables` its embeddings without a state. Read `format` first, which says what is on the disk and
why it can be trusted; then `checkpointer`, and for row deltas `row_deltas`.
"""

from jaxrec.checkpoint.checkpointer import Checkpointer
from jaxrec.checkpoint.format import (
    DamagedImage,
    Image,
    Snapshot,
    deltas,
    images,
    is_whole,
    read_manifest,
    verify,
    write_image,
)
from jaxrec.checkpoint.restore import (
    read_tables,
    restore,
    restore_for_prediction,
    restore_shard,
    restore_shards,
    shard_source,
    spec_of,
)
from jaxrec.checkpoint.row_deltas import RowCheckpointer, chain, copy_rows, newest, newest_first, save_rows
from jaxrec.checkpoint.state import snapshot

__all__ = [
    "Checkpointer", "DamagedImage", "Image", "RowCheckpointer", "Snapshot", "chain", "copy_rows", "deltas",
    "images", "is_whole", "newest", "newest_first", "read_manifest", "read_tables", "restore", "restore_for_prediction",
    "restore_shard", "restore_shards", "save_rows", "shard_source", "snapshot", "spec_of", "verify", "write_image",
]  # fmt: skip
