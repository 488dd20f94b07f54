"""Checkpoints: images of the training state that are whole or absent, saved while training goes on.

`Checkpointer` saves the whole state; `RowCheckpointer` some rows over it, from which one shard is restored alone.
"""

from jaxrec.checkpoint.deltas import chain, copy_rows, newest, restore_shard, save_rows
from jaxrec.checkpoint.image import Image, Snapshot, deltas, images, read_manifest, verify, write_image
from jaxrec.checkpoint.rows import RowCheckpointer, compact
from jaxrec.checkpoint.state import Checkpointer, restore, snapshot

__all__ = [
    "Checkpointer", "Image", "RowCheckpointer", "Snapshot", "chain", "compact", "copy_rows", "deltas", "images",
    "newest", "read_manifest", "restore", "restore_shard", "save_rows", "snapshot", "verify", "write_image",
]  # fmt: skip
