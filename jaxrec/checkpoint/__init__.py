"""Checkpoints: images of the training state that are whole or absent, saved while training goes on.

`Checkpointer` saves the whole state; `RowCheckpointer` some rows over it, from which one shard is
restored alone (`restore_shard`), or, if the dense state was saved with them, the whole state
(`restore`). `restore_for_prediction` gives the model of a run without its optimizers, and
`read_tables` its embeddings without a state. Read `image` first, which says what is on the disk and
why it can be trusted; then `whole`, and for row deltas `deltas` and `rows`.
"""

from jaxrec.checkpoint.deltas import chain, copy_rows, newest, newest_first, save_rows
from jaxrec.checkpoint.image import DamagedImage, Image, Snapshot, is_whole, read_manifest, verify, write_image
from jaxrec.checkpoint.names import deltas, images
from jaxrec.checkpoint.predicting import read_tables, restore_for_prediction, spec_of
from jaxrec.checkpoint.restoring import restore, restore_shard, shard_source
from jaxrec.checkpoint.rows import RowCheckpointer, compact
from jaxrec.checkpoint.state import snapshot
from jaxrec.checkpoint.whole import Checkpointer

__all__ = [
    "Checkpointer", "DamagedImage", "Image", "RowCheckpointer", "Snapshot", "chain", "compact", "copy_rows", "deltas",
    "images", "is_whole", "newest", "newest_first", "read_manifest", "read_tables", "restore", "restore_for_prediction",
    "restore_shard", "save_rows", "shard_source", "snapshot", "spec_of", "verify", "write_image",
]  # fmt: skip
