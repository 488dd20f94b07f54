"""Where the rows are, by name."""

from typing import Literal

import jax

from jaxrec.embedding.device import DeviceTables
from jaxrec.embedding.host import HostTables
from jaxrec.embedding.pinned import PinnedTables
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.types import RowOptimizer

Place = Literal["device", "pinned", "host"]


def create_tables(
    place: Place, spec: EmbeddingSpec, row_optimizer: RowOptimizer, mesh: jax.sharding.Mesh | None = None
) -> DeviceTables | PinnedTables | HostTables:
    """Create initial tables.

    Args:
      place: "device": on the devices of a mesh; "pinned": in host memory that they read and write; "host": in host
        memory, from which rows are copied to them.
      spec: tables and shards.
      row_optimizer: decides the slots.
      mesh: from `make_mesh`; one device if None.

    Raises:
      ValueError: another name; as `create` of the class.
    """
    if place == "host":
        return HostTables.create(spec, row_optimizer)
    if place not in ("device", "pinned"):
        raise ValueError(f"rows are in 'device', 'pinned' or 'host' memory, not {place!r:.200}.")
    return (DeviceTables if place == "device" else PinnedTables).create(spec, row_optimizer, mesh)
