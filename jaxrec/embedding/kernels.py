"""Inner loops of the host, compiled by numba and run without the GIL: number rows, gather, scatter.

Legend: N ids, F columns of a lookup, S shards, V rows of a stack, U capacity, C columns of a table.
"""

import numba
import numpy as np

_compiled = numba.njit(cache=True, nogil=True, fastmath=False)


def empty_entries(rows):
    """Return an empty hash table, in which `number_rows` finds room for up to `rows` rows."""
    return np.full(1 << (2 * rows).bit_length(), -1, np.int64)


@_compiled
def number_rows(ids, hots, offset, limit, shards, entries, unique, count, position):
    """Number the rows of one lookup by first appearance, shard by shard, adding to an open-addressing hash table.

    Args:
      ids: i32[N], row-major over columns and hots.
      hots: H, ids of a bag.
      offset, limit: i32[F], first row and number of rows of the table of each column.
      shards: S.
      entries: i64[power of two], the hash table of row * 2**32 + rank, -1 where empty; from `empty_entries`.
      unique: i32[S, N], rows found so far.
      count: i32[S], number of rows found so far.
      position: i64[N], output: shard * 2**32 + rank, or -1 if missing.

    Returns:
      Number of ids outside their table; -1 if more than half of the hash table would be full: take a larger one.
    """
    # Unsigned, as numba would test each index for a negative one.
    mask, most = np.uint64(entries.shape[0] - 1), entries.shape[0] // 2
    columns, unsigned_shards = offset.shape[0], np.uint32(shards)
    invalid, used = 0, count.sum()
    column, hot = 0, 0
    for i in range(ids.shape[0]):
        given = ids[i]
        if given < 0 or given >= limit[column]:
            position[i] = -1
            invalid += given != -1
        else:
            row = np.uint32(given + offset[column])
            # Fibonacci hashing; the high bits are the well-mixed ones.
            place = np.uint64((row * np.uint32(2654435769)) >> np.uint32(7)) & mask
            entry = entries[place]
            while entry != -1 and np.uint32(entry >> 32) != row:
                place = (place + np.uint64(1)) & mask
                entry = entries[place]
            shard = np.int64(row % unsigned_shards)
            if entry == -1:
                if used == most:
                    return -1
                used += 1
                entry = np.int64(row) << 32 | np.int64(count[shard])
                entries[place] = entry
                unique[shard, count[shard]] = row
                count[shard] += 1
            position[i] = shard << 32 | (entry & 0xFFFFFFFF)
        hot += 1
        if hot == hots:
            hot = 0
            column += 1
            if column == columns:
                column = 0
    return invalid


@_compiled
def flatten_positions(position, capacity, missing, inverse):
    """Convert shard * 2**32 + rank to shard * U + rank, i32[N]; `missing` for -1 or rank >= U."""
    for i in range(position.shape[0]):
        rank = position[i] & 0xFFFFFFFF
        if position[i] < 0 or rank >= capacity:
            inverse[i] = missing
        else:
            inverse[i] = (position[i] >> 32) * capacity + rank


@_compiled
def misplaced(ids, hots, offset, limit, unique, inverse):
    """Count the ids of one lookup that a plan does not map to their own row.

    Args:
      ids: i32[N], row-major over columns and hots.
      hots, offset, limit: as for `number_rows`.
      unique: i32[S * U], the rows of the plan.
      inverse: i32[N], position of each id's row in `unique`; S * U where there is no row.
    """
    size, wrong, i = np.uint32(unique.shape[0]), 0, 0
    while i < ids.shape[0]:
        for column in range(offset.shape[0]):
            for _ in range(hots):
                given, place = ids[i], np.uint32(inverse[i])  # negative positions become large
                if 0 <= given < limit[column]:
                    if place >= size or unique[place] != given + offset[column]:
                        wrong += 1
                elif place < size:
                    wrong += 1
                i += 1
    return wrong


@_compiled
def mix(h):
    """The hash of `tables.mix`; products of u32 are u64 here."""
    h ^= h >> np.uint32(16)
    h = np.uint32(h * np.uint32(0x7FEB352D))
    h ^= h >> np.uint32(15)
    h = np.uint32(h * np.uint32(0x846CA68B))
    return h ^ (h >> np.uint32(16))


@_compiled
def initial_rows(row, key, column, scale, out):
    """Draw rows as `tables.initial_rows` does with jax.numpy, to the bit.

    Args:
      row: u32[n], numbers of the rows.
      key: u32, of the seed.
      column: u32[E], keys of the columns.
      scale: f32[n] or f32[1].
      out: f32[n, E], output.
    """
    for i in range(row.shape[0]):
        row_key, factor = mix(row[i] ^ key), scale[i % scale.shape[0]]
        for c in range(column.shape[0]):
            h = mix(np.uint32(row_key + column[c]))
            out[i, c] = (np.float32(h >> np.uint32(8)) * np.float32(2.0**-23) - np.float32(1.0)) * factor


@_compiled
def outside(unique, count, rows):
    """Count the rows in use of unique i32[S, U] that are outside a stack of `rows` rows: kernels check no bounds."""
    wrong = 0
    for shard in range(unique.shape[0]):
        for u in range(count[shard]):
            wrong += unique[shard, u] < 0 or unique[shard, u] >= rows
    return wrong


def gather(table, rows, shards, count, out):
    """out[u] = table[rows[u] // S] for u < count, else 0; table [V / S, C], rows i32[U], out [U, C]."""
    _gather(_movable(table), rows, shards, count, _movable(out))


def scatter(table, rows, shards, count, values):
    """table[rows[u] // S] = values[u] for u < count; table [V / S, C], rows i32[U], values [U, C]."""
    _scatter(_movable(table), rows, shards, count, _movable(values))


def scatter_add(table, rows, shards, count, values, old):
    """table[rows[u] // S] += values[u] - old[u] for u < count, in f32, on the current row, without a lock."""
    if table.dtype == np.float32:
        _scatter_add(table, rows, shards, count, values, old)
    else:
        if values.dtype == np.float16:
            values, old = (_floats(_movable(array), count, _FLOATS) for array in (values, old))
        row, near_half = np.empty((2, table.shape[1]), np.float32)
        scratch = row, row.view(np.uint32), near_half, near_half.view(np.uint32)
        _scatter_add_16(_movable(table), rows, shards, count, values, old, _FLOATS, *scratch)


_FLOATS = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)  # of the bits of a float16


def _movable(array):
    """Return float16 as their bits, as numba has none of them on a CPU."""
    return array.view(np.uint16) if array.dtype == np.float16 else array


@_compiled
def _gather(table, rows, shards, count, out):
    width = table.shape[1]
    for u in range(count):
        row = rows[u] // shards
        for c in range(width):
            out[u, c] = table[row, c]
    out[count:] = 0


@_compiled
def _scatter(table, rows, shards, count, values):
    width = table.shape[1]
    for u in range(count):
        row = rows[u] // shards
        for c in range(width):
            table[row, c] = values[u, c]


@_compiled
def _scatter_add(table, rows, shards, count, values, old):
    width = table.shape[1]
    for u in range(count):
        row = rows[u] // shards
        for c in range(width):
            table[row, c] += values[u, c] - old[u, c]


@_compiled
def _floats(bits, count, floats):
    found = np.empty((count, bits.shape[1]), np.float32)
    for u in range(count):
        for c in range(bits.shape[1]):
            found[u, c] = floats[bits[u, c]]
    return found


@_compiled
def _scatter_add_16(table, rows, shards, count, values, old, floats, total, total_bits, near_half, near_half_bits):
    # One loop for each step, as only then they are vectorised.
    width = table.shape[1]
    for u in range(count):
        row = rows[u] // shards
        for c in range(width):
            total[c] = floats[table[row, c]] + (values[u, c] - old[u, c])
        for c in range(width):
            near_half[c] = np.abs(total[c]) + np.float32(0.5)
        for c in range(width):
            size = total_bits[c] & np.uint32(0x7FFFFFFF)
            if size >= np.uint32(0x47800000):  # infinite, or NaN
                half = np.uint32(0x7E00) if size > np.uint32(0x7F800000) else np.uint32(0x7C00)
            elif size < np.uint32(0x38800000):  # below 2**-14: multiples of 2**-24, the spacing of f32 at 0.5
                half = near_half_bits[c] - np.uint32(0x3F000000)
            else:  # to the nearest, ties to even, with the exponent of float16
                half = (
                    size + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1)) - np.uint32(0x38000000)
                ) >> np.uint32(13)
            table[row, c] = np.uint16((total_bits[c] >> np.uint32(16)) & np.uint32(0x8000) | half)
