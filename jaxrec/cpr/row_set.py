"""The list of SSU: at most C rows per shard, into which whole batches are inserted.

A row that is not in the list takes a free entry, or a random one once the list is full. So a list with room forgets no
row, and in a full one frequently used rows tend to return and stay. One bit per row tells whether it is listed, so that
a batch costs the same however long the list is. The rows of a batch are inserted one after another, from a random one
on: none is more likely to stay because of its number. numba and jax give the same list to the bit.

The rows of a save leave the list when they are copied; until it is committed, a second bit per row remembers them.

Legend: S shards, V rows of the stack, C entries per shard, W words of V / S bits, U padded unique rows of a batch,
n picked rows.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numba
import numpy as np

from jaxrec.cpr import counters
from jaxrec.types import Array

_compiled = numba.njit(cache=True, nogil=True, fastmath=False)


class RowSet(NamedTuple):
    """A list per shard; row r of the stack is number r // S of its shard, and bit r // S % 32 of word r // S // 32."""

    entry: Array  # i32[S, C] rows of the shard, in no order; only the first `size` count
    size: Array  # i32[S, 1]
    listed: Array  # u32[S, W], bits of the rows in the list
    copied: Array  # u32[S, W], bits of the rows that were copied for a save, until it is committed


def empty(value, capacity: int) -> RowSet:
    """Return lists of C = capacity entries where the rows live, as `Priority.init`."""
    words = -(-counters.shape_of(value)[1] // 32)
    bits = lambda: counters.zeros(value, words, np.uint32)
    return RowSet(counters.zeros(value, capacity), counters.zeros(value, 1), bits(), bits())


def insert(rows: RowSet, plan, batch, sampled=True) -> RowSet:
    """Insert the rows of a batch.

    Args:
      rows: changed in place in numpy, donated in jax.
      plan: Plan of the batch.
      batch: i32[], number of the batch, which seeds the random choices.
      sampled: bool[]; if False, nothing is inserted.
    """
    if not isinstance(rows.entry, np.ndarray):
        entry, size, listed = _insert(*rows[:3], plan.unique, plan.count, batch, sampled)
        return RowSet(entry, size, listed, rows.copied)
    if sampled:
        _insert_rows(*rows[:3], np.asarray(plan.unique), np.asarray(plan.count), np.int64(batch))
    return rows


@_compiled
def _scramble(x):
    """Return a 32-bit hash, computed in i64 arithmetic."""
    x = (x * 0x9E3779B9) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x85EBCA6B) & 0xFFFFFFFF
    return x ^ (x >> 13)


@_compiled
def _insert_rows(entry, size, listed, unique, count, batch):
    # One call for all shards: each return to Python waits for the GIL, for which other threads compete.
    shards, capacity = entry.shape
    seed, absent = _scramble(batch), np.empty(unique.shape[1], np.int32)
    for shard in range(shards):
        used, bits, n = count[shard], listed[shard], 0
        # All absent rows are found before any is inserted, as one may replace a row that the batch has, too.
        at = seed % max(used, 1)
        for _ in range(used):
            row = unique[shard, at] // shards
            absent[n] = row
            n += not (bits[row >> 5] >> np.uint32(row & 31)) & 1
            at = at + 1 if at + 1 < used else 0
        for rank in range(n):
            place = np.int64(size[shard, 0])
            if place < capacity:
                size[shard, 0] += 1
            else:
                place = _scramble(seed + rank) % capacity
                replaced = entry[shard, place]
                bits[replaced >> 5] ^= np.uint32(1) << np.uint32(replaced & 31)
            row = absent[rank]
            entry[shard, place] = row
            bits[row >> 5] |= np.uint32(1) << np.uint32(row & 31)


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def _insert(entry, size, listed, unique, count, batch, sampled):
    seed = _scramble_u32(batch)

    def one(entry, size, bits, rows, used):
        capacity, bit = len(entry), lambda row: jnp.uint32(1) << (row & 31).astype(jnp.uint32)
        absent = sampled & (jnp.arange(len(rows)) < used) & (bits.at[rows >> 5].get(mode="clip") & bit(rows) == 0)
        before = jnp.cumsum(absent) - absent
        start = (seed % jnp.maximum(used, 1).astype(jnp.uint32)).astype(jnp.int32)
        rank = (before - before[start]) % jnp.maximum(absent.sum(), 1)
        random = (_scramble_u32(seed + rank.astype(jnp.uint32)) % jnp.uint32(capacity)).astype(jnp.int32)
        place = jnp.where(size + rank < capacity, size + rank, random)
        place = jnp.where(absent, place, capacity)
        # Of rows with the same place the last one stays, as if they were inserted one after another. `min` and `max`,
        # as a `set` of equal indices may not drop on a GPU, see `device_plan`.
        claimed = entry.at[place].min(~rank, mode="drop")
        stays = absent & (claimed.at[place].get(mode="clip") == ~rank)
        replaced = entry.at[place].get(mode="clip")
        bits = bits.at[jnp.where(stays, rows >> 5, len(bits))].add(bit(rows), mode="drop")
        bits = bits.at[jnp.where(stays & (place < size), replaced >> 5, len(bits))].add(-bit(replaced), mode="drop")
        entry = claimed.at[place].max(jnp.where(stays, rows, ~rank), mode="drop")
        return entry, jnp.minimum(size + absent.sum(), capacity), bits

    return jax.vmap(one)(entry, size, listed, unique // len(unique), count)


def _scramble_u32(x):
    x = jnp.asarray(x).astype(jnp.uint32) * jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 15)) * jnp.uint32(0x85EBCA6B)
    return x ^ (x >> 13)


def pick(rows: RowSet, budget: int, batch) -> list[np.ndarray]:
    """Pick at most `budget` rows per shard, on the host: those listed, and those of a save that was not committed.

    Args:
      budget: maximum number of rows per shard, at least C. If a failed save has left more, random ones are picked.
      batch: i32[], number of the batch, which seeds the random choices.

    Returns:
      The ascending rows of the stack, one array i32[n] per shard.
    """
    picked = []
    for shard, bits in enumerate(np.asarray(rows.listed) | np.asarray(rows.copied)):
        mine = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        if len(mine) > budget:
            mine = np.sort(np.random.default_rng(int(batch)).choice(mine, budget, replace=False))
        picked.append((mine * len(rows.listed) + shard).astype(np.int32))
    return picked


def copied(rows: RowSet, picked: Sequence[np.ndarray]) -> RowSet:
    """Remove rows i32[n] of the stack, one array per shard, from the list: a save holds them as they are now."""
    entry, size, listed, unsaved = map(np.array, rows)
    for shard, bits in enumerate(_bits_of(rows, picked)):
        listed[shard] &= ~bits
        unsaved[shard] |= bits
        held = entry[shard, : size[shard, 0]]
        kept = held[listed[shard][held >> 5] >> (held & 31).astype(np.uint32) & 1 == 1]
        entry[shard, : len(kept)], size[shard] = kept, len(kept)
    return RowSet(*map(counters.replaced, rows, (entry, size, listed, unsaved)))


def saved(rows: RowSet, picked: Sequence[np.ndarray]) -> RowSet:
    """Forget that rows were copied, once their save is committed; rows touched since are listed again."""
    return rows._replace(copied=counters.replaced(rows.copied, np.asarray(rows.copied) & ~_bits_of(rows, picked)))


def _bits_of(rows, picked):
    """Return the bits of rows i32[n] of the stack, one array per shard; u32[S, W]."""
    shards, words = rows.listed.shape
    found = np.zeros((shards, 32 * words), bool)
    for shard, mine in enumerate(picked):
        found[shard, mine // shards] = True
    return np.packbits(found, axis=1, bitorder="little").view(np.uint32)


def clear(rows: RowSet, shard: int) -> RowSet:
    """Return the set without the rows of one shard."""
    return RowSet(rows.entry, *(counters.set_shard(array, shard, 0) for array in rows[1:]))
