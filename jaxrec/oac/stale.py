"""What is stale, known from row numbers alone: last writers, rows that will be rewritten, the
newest of a ring.

Legend: W window, S shards, U padded unique rows per shard, V rows of a stack.
"""

from collections.abc import Callable

import jax
import numpy as np

from jaxrec.embedding.kernels import last_writers
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.oac.ring import Ring
from jaxrec.types import Plan, Rows


class LastWriters:
    """The last batch of every row and where the row was in it: 8 bytes per row of host memory.

    Args:
      spec: the tables.
      window: how many batches back a writer counts.
      depth: slots of the ring, at least the window and 1.
    """

    def __init__(self, spec: EmbeddingSpec, window: int, depth: int):
        self.window, self.depth = window, depth
        shape = {name: (stack.shards, stack.rows_per_shard) for name, stack in spec.stacks.items()}
        self._writer = {name: np.full(shape[name], -(2**31), np.int32) for name in shape}
        self._place = {name: np.empty(shape[name], np.int32) for name in shape}

    def sources(self, plans: dict[str, Plan], number: int) -> dict[str, np.ndarray]:
        """Where the ring will hold each row of a batch, i32[S, U], -1 where it needs not; call it
        in batch order."""
        sources = {}
        for name, p in plans.items():
            sources[name] = np.empty(p.unique.shape, np.int32)
            known = self._writer[name], self._place[name]
            last_writers(p.unique, p.count, number, self.window, self.depth, *known, sources[name])
        return sources


def written_since(sources: dict[str, np.ndarray], number: int, window: int, floor: int) -> dict[str, np.ndarray]:
    """The sources of batch `number` that lie in batches from the floor on; -1 in place of the
    others."""

    def newer(where):
        slot, base = where // where.shape[1], number - window
        writer = base + (slot - base) % max(window, 1)  # the one batch of the window in that slot
        return np.where((where >= 0) & (writer >= floor), where, -1).astype(np.int32)

    return {name: newer(where) for name, where in sources.items()}


def found(sources: dict):
    """How many rows have a place in the ring: an i32[] of numpy or of JAX, as the sources are; 0
    without any."""
    return sum((where >= 0).sum() for where in sources.values())


def mark_rewritten(keep: Callable[[int], dict[str, np.ndarray] | None], sources, number: int, window: int) -> None:
    """Clears, in the batches of the window, the rows that batch `number` will write again.

    Args:
      keep: number -> {stack: bool[S, U]} of a batch, changed in place; None if it is too late for
        it.
      sources: {stack: i32[S, U]} of batch `number`.
      number, window: which batch; W.
    """
    for before in range(number - window, number):
        masks = keep(before)
        for name, where in sources.items() if masks else ():
            here = (where >= 0) & (where // where.shape[1] == before % window)
            shard, at = np.nonzero(here)
            masks[name][shard, where[shard, at] % where.shape[1]] = False  # type: ignore[index]


def newest_rows(ring: Ring, spec: EmbeddingSpec, floor: int) -> tuple[dict[str, Plan], dict[str, Rows]]:
    """The newest value of every row in a ring that holds row numbers, from batches from the floor
    on, as plans and rows to `put`."""
    ring = jax.tree.map(np.asarray, ring)
    # Newest first.
    slots = [slot for slot in np.argsort(-ring.version[0]) if ring.version[0, slot] >= floor]
    plans, rows = {}, {}
    for name, unique in ring.unique.items():
        flat = unique[:, slots].reshape(len(unique), -1)
        first = [np.unique(shard, return_index=True)[1] for shard in flat]
        used = (flat >= 0) & (flat < spec.stacks[name].rows)
        places = [at[shard[at]] for at, shard in zip(first, used, strict=True)]
        index = np.stack([np.pad(at, (0, flat.shape[1] - len(at))) for at in places])
        count = np.array([len(at) for at in places], np.int32)
        plans[name] = Plan(np.take_along_axis(flat, index, 1), {}, count, np.int32(0))
        newest = lambda leaf, at=index[..., None]: np.take_along_axis(
            leaf[:, slots].reshape(len(leaf), -1, leaf.shape[-1]), at, 1
        )
        rows[name] = jax.tree.map(newest, ring.rows[name])
    return plans, rows
