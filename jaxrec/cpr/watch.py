"""Which rows of a batch a tracker sees, and what a lost shard is: pure helpers of `recovery.py`.

Legend: S shards, V rows of a stack, U padded unique rows a shard.
"""

import numpy as np

from jaxrec.embedding import Tables
from jaxrec.embedding.planning import without_gaps
from jaxrec.types import Plan


def lose(tables: Tables, shard: int) -> Tables:
    """Makes the rows and slots of one shard NaN in all stacks, as if its node were gone; nothing of it survives.

    Args:
      tables: those of the host change in place, those of devices are donated.
      shard: from 0 to S - 1.

    Returns:
      The tables.
    """
    for name, stack in tables.spec.stacks.items():
        nothing = {
            part: np.full((stack.rows_per_shard, one.width), np.nan, one.dtype)
            for part, one in tables.layout[name].items()
        }
        tables = tables.with_shard(name, shard, nothing)
    return tables


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
