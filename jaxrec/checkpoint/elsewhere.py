"""Rows that live in other processes are written, and brought back, by these, all at once: no row travels.

Each has its part of an image in directories of its own, and says what their files hold; who saves writes the manifest
and renames. So all must see one directory: who does not is found out before it writes.
"""

import uuid
from collections.abc import Callable
from pathlib import Path

from jaxrec.checkpoint.image import write_piece
from jaxrec.embedding import Tables

_PROBE = "probe"


def live_elsewhere(tables: Tables) -> bool:
    """Whether the rows live in other processes than this one."""
    return getattr(tables, "elsewhere", False)


def write_there(tables: Tables, leaf_name: Callable[[str, int, str], str], directory: Path) -> dict[str, list[int]]:
    """Has all shards written into the directory of an image by those who have them.

    Args:
      tables: whose rows live elsewhere.
      leaf_name: (stack, shard, part) -> name of a leaf.
      directory: of the image.

    Returns:
      {file: [bytes, crc32]}, for the manifest.

    Raises:
      ValueError: a server does not see the directory.
      ShardsLost: a server has died; what is written is no image.
    """
    # A name of its own: who was late with an image before writes beside these files, not into them.
    token, probe = uuid.uuid4().hex[:12], directory / _PROBE
    probe.write_text(token)
    files: dict[str, list[int]] = {}
    for written in tables.on_shards(_write_shard, str(directory.resolve()), token, leaf_name).values():
        files |= written
    probe.unlink()
    return files


def _write_shard(stack, shard, parts, directory, token, leaf_name):
    """Runs where the rows are."""
    probe = Path(directory) / _PROBE
    if not probe.is_file() or probe.read_text() != token:
        raise ValueError(
            f"the server of shard {shard} does not see {directory}, where it is to save its rows: give a directory "
            "that all machines see under one name, such as one of a shared file system."
        )
    arrays = {leaf_name(stack, shard, part): rows for part, rows in parts.items()}
    return write_piece(Path(directory), f"{token}.{stack}.{shard:04d}", arrays)
