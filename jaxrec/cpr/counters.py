"""Arrays of row trackers on host and device: numpy arrays change in place, with numba; jax arrays are donated.

The first axis of every array is the shard, and row r of the stack is at [r % S, r // S]. On devices, padding rows V lie
past the end, so scatters drop them.

Legend: S shards, V rows of the stack, E embedding width, U padded unique rows of a batch, n rows of a pick.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numba
import numpy as np

_compiled = numba.njit(cache=True, nogil=True, fastmath=False)
# Allows sums to be reordered: twice as fast.
_summed = numba.njit(cache=True, nogil=True, fastmath={"reassoc", "nsz"})


def on_host(array) -> bool:
    """Return whether an array, or a list of the rows of each shard, is in host memory; tracers under jit are not."""
    return isinstance(array, (np.ndarray, list, tuple))


def shape_of(value) -> tuple[int, int]:
    """Return S and V / S of rows on host or device."""
    return (len(value), len(value[0])) if on_host(value) else value.shape[:2]


def zeros(value, width: int, dtype=np.int32):
    """Return zeros [S, width] where the rows live, with their sharding."""
    shape = (shape_of(value)[0], width)
    return np.zeros(shape, dtype) if on_host(value) else jnp.zeros(shape, dtype, device=value.sharding)


def replaced(old, new: np.ndarray):
    """Replace the content of an array; return it where the old one lives."""
    if not on_host(old):
        return jax.device_put(new, old.sharding)
    old[:] = new
    return old


def set_shard(array, shard: int, new):
    """Replace the content of one shard."""
    if not on_host(array):
        return _set_shard(array, shard, new)
    array[shard] = new
    return array


def add_accesses(count, plan, by_access: bool):
    """Add a batch to i32[S, V / S]: each row as often as the plan's `inverse` reads it if `by_access`, else once."""
    inverse = plan.inverse if by_access else {}
    if not on_host(count):
        return _add_accesses(count, plan.unique, inverse)
    unique, used = np.asarray(plan.unique), np.asarray(plan.count)
    # Two passes: count reads by the few rows of the batch first, then look up only these among all rows.
    _add_hits(unique, used, accesses(plan._replace(inverse=inverse)), count)
    return count


def accesses(plan) -> np.ndarray:
    """Return how often a batch reads each of its rows, i32[S * U + 1].

    The last entry counts missing ids. All are 1 for a plan without `inverse`.
    """
    hits = np.full(np.asarray(plan.unique).size + 1, not plan.inverse, np.int32)
    for positions in plan.inverse.values():
        _count_positions(np.asarray(positions).reshape(-1), hits)
    return hits


@_compiled
def _count_positions(positions, hits):
    for position in positions:
        hits[position] += 1


@_compiled
def _add_hits(unique, used, hits, count):
    # One call for all shards: each return to Python waits for the GIL, for which other threads compete.
    shards, capacity = unique.shape
    for shard in range(shards):
        for u in range(used[shard]):
            count[shard, unique[shard, u] // shards] += hits[shard * capacity + u]


@functools.partial(jax.jit, donate_argnums=0)
def _add_accesses(count, unique, inverse):
    hits = jnp.ones(unique.shape, jnp.int32)
    if inverse:
        positions = jnp.concatenate([jnp.ravel(p) for p in inverse.values()])
        hits = jnp.zeros(unique.size, jnp.int32).at[positions].add(1, mode="drop").reshape(unique.shape)
    return jax.vmap(lambda c, row, hit: c.at[row].add(hit, mode="drop"))(count, unique // len(count), hits)


def subtract(count, rows: Sequence[np.ndarray], seen: Sequence[np.ndarray]):
    """Subtract the counts seen by a pick, i32[n] per shard, from those of its rows, i32[n] of the stack per shard."""
    if not on_host(count):
        return _subtract(count, *_padded(rows, seen, count.shape))
    for shard, (mine, counted) in enumerate(zip(rows, seen, strict=True)):
        _subtract_rows(mine, len(count), counted, count[shard])
    return count


@_compiled
def _subtract_rows(rows, shards, seen, count):
    for i in range(rows.shape[0]):
        count[rows[i] // shards] -= seen[i]


@functools.partial(jax.jit, donate_argnums=0)
def _subtract(count, rows, seen):
    return jax.vmap(lambda c, row, s: c.at[row].add(-s, mode="drop"))(count, rows // len(count), seen)


def largest(weight: np.ndarray, budget: int) -> np.ndarray:
    """Return the rows of the `budget` largest positive weights, ties broken by a hash.

    Args:
      weight: i32 or f32[V / S] of one shard.
      budget: maximum number of rows.

    Returns:
      i32[n], ascending; all rows of positive weight if they are within the budget.

    >>> largest(np.array([5, 0, 9, 9, 3], np.int32), 3).tolist()
    [0, 2, 3]
    """
    # One integer order for counts and norms, so that the same code picks by both.
    bits = weight.view(np.int32)  # non-negative floats order as their bits do
    keys = np.empty(len(bits) + 1, np.int64)
    n = _fill_keys(bits, keys)
    # Only the threshold is needed: a partition avoids sorting.
    edge = np.partition(keys[:n], n - budget)[n - budget] if n > budget else np.int64(0)
    out = np.empty(min(n, budget) + 1, np.int32)
    return out[: _fill_rows(bits, edge, out)]


@_compiled
def _key(bits, row):
    # Distinct, as the multiplier is odd: many equal keys make the partition 20 times slower.
    return (np.int64(bits) << 32) | ((row * 0x9E3779B9) & 0xFFFFFFFF)


@_compiled
def _fill_keys(bits, keys):
    n = 0
    for row in range(bits.shape[0]):
        keys[n] = _key(bits[row], row)
        n += bits[row] > 0
    return n


@_compiled
def _fill_rows(bits, edge, out):
    n, last = 0, out.shape[0] - 1  # the last entry takes rows that are not selected
    for row in range(bits.shape[0]):
        out[min(n, last)] = row
        n += (bits[row] > 0) & (_key(bits[row], row) >= edge)
    return min(n, last)


def copy(value):
    """Copy the rows of a stack, f32[S, V / S, E], where they live."""
    return np.stack(value) if on_host(value) else _copy(value)


def changes(new, old):
    """Return the L2 norm of the change of every row, f32[S, V / S] in numpy, from f32[S, V / S, E]; 0 for NaN."""
    if not on_host(new):
        return np.asarray(_changes(new, old))
    change = np.empty(shape_of(new), np.float32)
    for shard, out in enumerate(change):
        _row_norms(_f32(new[shard]), _f32(old[shard]), out)  # fetches rows that live at servers
    return change


def _f32(rows):
    return np.asarray(rows, np.float32)


@_summed
def _row_norms(new, old, out):
    for row in range(new.shape[0]):
        square = 0.0
        for c in range(new.shape[1]):
            # Squared in float64, as the square of a large difference overflows in float32.
            difference = np.float64(new[row, c] - old[row, c])
            square += difference * difference
        norm = math.sqrt(square)
        out[row] = norm if norm > 0 else 0  # NaN: nothing to save


def rows_of(value, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Copy rows i32[n] of the stack to the host, as f32[n, E]; both are lists with one array per shard."""
    if on_host(value):
        return [value[shard][mine // len(value)] for shard, mine in enumerate(rows)]
    padded, _ = _padded(rows, rows, value.shape)
    return [held[: len(mine)] for held, mine in zip(np.asarray(_gather(value, padded)), rows, strict=True)]


def overwrite(value, rows: Sequence[np.ndarray], new: Sequence[np.ndarray]):
    """Write values f32[n, E] to rows i32[n] of the stack; both are lists with one array per shard."""
    if not on_host(value):
        return _overwrite(value, *_padded(rows, new, value.shape))
    for shard, (mine, values) in enumerate(zip(rows, new, strict=True)):
        value[shard, mine // len(value)] = values
    return value


def _padded(rows, values, shape):
    """Pad to rows [S, K], filled up with V, and values [S, K, ...]; K is a power of two, to compile few shapes."""
    size = 1 << max(0, max(map(len, rows)) - 1).bit_length()
    out = np.full((shape[0], size), shape[0] * shape[1], np.int32)
    padded = np.zeros((shape[0], size, *values[0].shape[1:]), values[0].dtype)
    for shard, (mine, held) in enumerate(zip(rows, values, strict=True)):
        out[shard, : len(mine)], padded[shard, : len(mine)] = mine, held
    return out, padded


_copy = jax.jit(jnp.copy)


@jax.jit
def _changes(new, old):
    norm = jnp.linalg.norm(new.astype(jnp.float32) - old.astype(jnp.float32), axis=-1)
    return jnp.where(norm > 0, norm, 0)  # NaN: nothing to save


@jax.jit
def _gather(value, rows):
    return jax.vmap(lambda v, row: v.at[row].get(mode="fill", fill_value=0))(value, rows // len(value))


@functools.partial(jax.jit, donate_argnums=0)
def _overwrite(value, rows, new):
    return jax.vmap(lambda v, row, n: v.at[row].set(n, mode="drop", unique_indices=True))(
        value, rows // len(value), new
    )


@functools.partial(jax.jit, donate_argnums=0)
def _set_shard(array, shard, new):
    return array.at[shard].set(new)
