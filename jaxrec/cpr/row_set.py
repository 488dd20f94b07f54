"""The list of SSU: a set of at most C rows per shard, into which whole batches are inserted.

A hash assigns every row to one bucket of 4 entries; in a full bucket a new row replaces a random one. So the list holds
each row once without sorting, and frequently used rows tend to return and stay. An entry is

    row >= 0    a row of the shard, r // S          ~row < 0    a picked row, whose entry may be reused          EMPTY

Insertion reads the list as it was before the batch, so that numba and jax give the same list to the bit; of two rows of
a batch with the same entry, the larger one is kept.

Legend: S shards, C entries per shard, U padded unique rows of a batch, n picked rows.
"""

import functools

import jax
import jax.numpy as jnp
import numba
import numpy as np

EMPTY = np.int32(-(2**31))
_WAYS = 4
_compiled = numba.njit(cache=True, nogil=True, fastmath=False)


def entries(budget: int) -> int:
    """Return C for a budget of rows per shard: the budget rounded down to whole buckets, at least one bucket."""
    return max(_WAYS, budget - budget % _WAYS)


def insert(entry, plan, batch, sampled=True):
    """Insert the rows of a batch.

    Args:
      entry: i32[S, C], changed in place in numpy, donated in jax.
      plan: Plan of the batch.
      batch: i32[], number of the batch, which seeds the random choices.
      sampled: bool[]; if False, nothing is inserted.

    Returns:
      i32[S, C].
    """
    if not isinstance(entry, np.ndarray):
        return _insert(entry, plan.unique, plan.count, batch, sampled)
    unique, count = np.asarray(plan.unique), np.asarray(plan.count)
    place = np.empty(unique.shape[1], np.int32)
    # All entries are found before any is written: row by row, the result would depend on the order of rows.
    for shard, mine in enumerate(entry if sampled else ()):
        rows = unique[shard, : count[shard]]
        _find_buckets(rows, len(unique), len(mine), place)
        _find_places(mine, rows, len(unique), int(batch), place)
        _write_places(mine, rows, len(unique), place)
    return entry


@_compiled
def _scramble(x):
    """Return a 32-bit hash, computed in i64 arithmetic."""
    x = (x * 0x9E3779B9) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x85EBCA6B) & 0xFFFFFFFF
    return x ^ (x >> 13)


@_compiled
def _find_buckets(rows, shards, size, place):
    buckets = np.uint32(size // _WAYS)
    for u in range(rows.shape[0]):
        place[u] = np.uint32(_scramble(np.int64(rows[u] // shards))) % buckets * _WAYS


@_compiled
def _find_places(entry, rows, shards, batch, place):
    """Find the entry for each row: that of its earlier pick, else a free one, else any; C if the row is present.

    Free of branches, which the hardware could not predict. On entry, `place` holds the first entry of each bucket.
    """
    for u in range(rows.shape[0]):
        row, first = np.int32(rows[u] // shards), np.uint64(place[u])
        start = np.int32(_scramble(np.int64(row) ^ (batch + 1)) % _WAYS)
        best = np.int32(0)
        for way in range(_WAYS):
            held, kind = entry[first + np.uint64(way)], np.int32(0)
            if held < 0:
                kind = np.int32(1)
            if held == ~row:
                kind = np.int32(2)
            if held == row:
                kind = np.int32(3)
            turn = (way - start) % _WAYS
            best = max(best, np.int32((kind * _WAYS + _WAYS - 1 - turn) * _WAYS + way))
        place[u] = entry.shape[0] if best >= 3 * _WAYS * _WAYS else place[u] + best % _WAYS


@_compiled
def _write_places(entry, rows, shards, place):
    for u in range(rows.shape[0]):
        if place[u] < entry.shape[0]:
            entry[place[u]] = EMPTY
    for u in range(rows.shape[0]):
        if place[u] < entry.shape[0]:
            entry[place[u]] = max(entry[place[u]], rows[u] // shards)


@functools.partial(jax.jit, donate_argnums=0)
def _insert(entry, unique, count, batch, sampled):
    def one(entry, rows, used):
        size, turn = len(entry), jnp.arange(_WAYS)[None, :]
        first = (_scramble_u32(rows) % (size // _WAYS)).astype(jnp.int32) * _WAYS
        start = (_scramble_u32(rows ^ (batch + 1)) % _WAYS).astype(jnp.int32)
        # Each row and batch searches the bucket from a different entry, so that a random row of a full one is replaced.
        at = first[:, None] + (start[:, None] + turn) % _WAYS  # [U, ways]
        held, row = entry[at], rows[:, None]
        kind = jnp.select([held == row, held == ~row, held < 0], [3, 2, 1], 0)
        best = jnp.argmax(kind * _WAYS - turn, axis=1)
        place = jnp.take_along_axis(at, best[:, None], axis=1)[:, 0]
        wanted = sampled & (jnp.arange(len(rows)) < used) & ~jnp.any(kind == 3, axis=1)
        place = jnp.where(wanted, place, size)
        # `min`, as EMPTY is the smallest number: a `set` of equal indices may not drop on a GPU, see `device_plan`.
        return entry.at[place].min(EMPTY, mode="drop").at[place].max(rows, mode="drop")

    return jax.vmap(one)(entry, unique // len(unique), count)


def _scramble_u32(x):
    x = x.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 15)) * jnp.uint32(0x85EBCA6B)
    return x ^ (x >> 13)


def pick(entry, budget: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Pick at most `budget` rows per shard, on the host; rows of a failed save count as not picked.

    Args:
      entry: i32[S, C].
      budget: maximum number of rows per shard.

    Returns:
      The list with the picked entries marked, i32[S, C], and the ascending rows of the stack, one array i32[n] per
      shard.
    """
    marked, rows = np.array(entry), []
    for shard, mine in enumerate(marked):
        # Entries that are still marked belong to a save that was not committed: they may be picked again.
        mine[:] = np.where((mine < 0) & (mine != EMPTY), ~mine, mine)
        at = np.flatnonzero(mine >= 0)[:budget]
        rows.append(np.sort(mine[at]) * np.int32(len(marked)) + np.int32(shard))
        # Marked, not removed: if the save fails, the row must not have lost its entry.
        mine[at] = ~mine[at]
    return marked, rows


def drop_picked(entry):
    """Return the list without rows that were picked and not touched since, i32[S, C]."""
    if not isinstance(entry, np.ndarray):
        return _drop_picked(entry)
    entry[entry < 0] = EMPTY
    return entry


@functools.partial(jax.jit, donate_argnums=0)
def _drop_picked(entry):
    return jnp.where(entry < 0, EMPTY, entry)
