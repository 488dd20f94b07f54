"""Which rows of a batch a tracker sees, and what a lost shard is: pure helpers of `recovery.py`.

Legend: S shards, V rows of a stack, U padded unique rows a shard.
"""

import functools

import jax
import numpy as np

from jaxrec.embedding import HostTables
from jaxrec.embedding.host import without_gaps
from jaxrec.embedding.initial import initial_rows
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.types import Plan

_CHUNK_ROWS = 1 << 14


def lose(tables, shard: int):
    """Makes the rows and slots of one shard NaN in all stacks, as if its node were gone; nothing of it survives.

    Args:
      tables: host tables change in place; device tables are donated.
      shard: from 0 to S - 1.

    Returns:
      The tables.
    """
    if isinstance(tables, HostTables):
        for shards in tables.shards.values():
            for part in shards[shard].values():
                part[:] = np.nan
        return tables
    return _lose(tables, shard)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
def _lose(tables, shard):
    return jax.tree.map(lambda array: array.at[shard].set(np.nan), tables)


def without_rows(plan: Plan, gone: np.ndarray, absent: int) -> Plan:
    """A plan on the host that reads nothing of some of its rows.

    Args:
      plan: of one stack.
      gone: bool[S, U], which rows.
      absent: V, which marks no row.
    """
    shards, padded = gone.shape
    keep = ~gone & (np.arange(padded) < np.asarray(plan.count)[:, None])
    kept, _, place = without_gaps(plan, keep, padded, absent)
    missing = shards * padded
    place = np.where(keep, place + np.arange(shards)[:, None] * padded, missing)
    place = np.append(place.reshape(-1), missing).astype(np.int32)
    inverse = {name: place[np.asarray(positions)] for name, positions in plan.inverse.items()}
    return kept._replace(inverse=inverse, invalid=plan.invalid)


def in_ranges(plan, ranges):
    """bool[S, U]: rows of a plan that lie in any of [(first, end)]."""
    unique = np.asarray(plan.unique)
    found = np.zeros(unique.shape, bool)
    for first, end in ranges:
        found |= (unique >= first) & (unique < end)
    return found


def in_pick(plan, rows):
    """bool[S, U]: rows of a plan that are among ascending rows of the stack, one array a shard."""
    found = lambda row, mine: np.append(mine, -1)[np.searchsorted(mine, row)] == row  # -1 is no row
    return np.array([found(row, mine) for row, mine in zip(np.asarray(plan.unique), rows, strict=True)])


def is_initial(tables, spec: EmbeddingSpec) -> bool:
    """Whether all rows have their initial values: then nothing need be saved for them to come back."""
    for name, stack in spec.stacks.items():
        for shard in range(spec.shards):
            value = value_of(tables, name)[shard]
            for start in range(0, stack.rows_per_shard, _CHUNK_ROWS):
                row = np.arange(start, min(start + _CHUNK_ROWS, stack.rows_per_shard)) * spec.shards + shard
                initial = initial_rows(row, stack.width, spec.row_scale(name, row), spec.seed)
                if not np.array_equal(np.asarray(value[start : start + len(row)]), initial):
                    return False
    return True


def value_of(tables, name):
    """The embedding rows of a stack as trackers take them."""
    if isinstance(tables, HostTables):
        return [shard["value"] for shard in tables.shards[name]]
    return tables.value[name]


def ranges_of(spec, whole):
    """{stack: [(first, end)]} of the tables saved whole."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for name, stack in spec.stacks.items():
        for place, table in enumerate(stack.tables):
            if table in whole:
                ranges.setdefault(name, []).append((stack.offsets[place], stack.offsets[place + 1]))
    return ranges


def shard_rows(first, end, shard, shards):
    """i32[n]: the rows of one shard among the rows from `first` to `end` of a stack."""
    return np.arange(first + (shard - first) % shards, end, shards, dtype=np.int32)
