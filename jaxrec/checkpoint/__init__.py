"""Checkpoints: images of the training state that are whole or absent, saved while training goes on."""

from jaxrec.checkpoint.image import Image, Snapshot, images, read_manifest, verify, write_image
from jaxrec.checkpoint.state import Checkpointer, restore, restore_shard, snapshot

__all__ = [
    "Checkpointer", "Image", "Snapshot", "images", "read_manifest", "restore", "restore_shard", "snapshot", "verify",
    "write_image",
]  # fmt: skip
