"""The host's inner loops, compiled by numba and free of the GIL: number rows, gather, scatter.

Legend: N ids, F columns of a lookup, S shards, V rows of a stack, U capacity, C columns of a table.
"""

import numba
import numpy as np

_compiled = numba.njit(cache=True, nogil=True, fastmath=False)


@_compiled
def number_rows(ids, hots, offset, limit, shards, keys, ranks, unique, count, position):
    """Numbers the rows of one lookup by first appearance, shard by shard, continuing an
    open-addressing hash.

    Args:
      ids: i32[N], row-major over columns and hots.
      hots: H.
      offset, limit: i32[F], first row and number of rows of the table of each column.
      shards: S.
      keys, ranks: i32[power of two >= 2 N], the hash; keys are -1 where empty.
      unique: i32[S, N], rows found so far.
      count: i32[S], how many.
      position: i64[N], out: shard * 2**32 + rank, or -1 if missing.

    Returns:
      How many ids lie outside their table.
    """
    mask = keys.shape[0] - 1
    columns = offset.shape[0]
    invalid = 0
    column, hot = 0, 0
    for i in range(ids.shape[0]):
        given = ids[i]
        if given < 0 or given >= limit[column]:
            position[i] = -1
            invalid += given != -1
        else:
            row = given + offset[column]
            # Fibonacci hashing; the high bits are the good ones.
            place = ((np.uint32(row) * np.uint32(2654435769)) >> np.uint32(7)) & mask
            while keys[place] != row and keys[place] != -1:
                place = (place + 1) & mask
            shard = row % shards
            if keys[place] == -1:
                keys[place] = row
                ranks[place] = count[shard]
                unique[shard, count[shard]] = row
                count[shard] += 1
            position[i] = (np.int64(shard) << 32) | np.int64(ranks[place])
        hot += 1
        if hot == hots:
            hot = 0
            column += 1
            if column == columns:
                column = 0
    return invalid


@_compiled
def flatten_positions(position, capacity, missing, inverse):
    """Turns shard * 2**32 + rank into shard * U + rank, i32[N]; `missing` where there is none or
    rank >= U."""
    for i in range(position.shape[0]):
        rank = position[i] & 0xFFFFFFFF
        if position[i] < 0 or rank >= capacity:
            inverse[i] = missing
        else:
            inverse[i] = (position[i] >> 32) * capacity + rank


@_compiled
def misplaced(ids, hots, offset, limit, unique, inverse):
    """Counts the ids of one lookup that do not find their own row in a plan.

    Args:
      ids: i32[N], row-major over columns and hots.
      hots, offset, limit: as for `number_rows`.
      unique: i32[S * U], the rows of the plan.
      inverse: i32[N], the place of each id among them; S * U where there is no row.
    """
    size, wrong, i = np.uint32(unique.shape[0]), 0, 0
    while i < ids.shape[0]:
        for column in range(offset.shape[0]):
            for _ in range(hots):
                given, place = ids[i], np.uint32(inverse[i])  # a negative one is large
                if 0 <= given < limit[column]:
                    if place >= size or unique[place] != given + offset[column]:
                        wrong += 1
                elif place < size:
                    wrong += 1
                i += 1
    return wrong


@_compiled
def outside(unique, count, rows):
    """How many of the rows in use, i32[S, U] up to count i32[S], are none of a stack's V: no kernel
    may follow them."""
    wrong = 0
    for shard in range(unique.shape[0]):
        for u in range(count[shard]):
            wrong += unique[shard, u] < 0 or unique[shard, u] >= rows
    return wrong


@_compiled
def gather(table, rows, shards, count, out):
    """out[u] = table[rows[u] // S] for u < count, 0 after; table f32[V / S, C], rows i32[U], out
    f32[U, C]."""
    width = table.shape[1]
    for u in range(count):
        row = rows[u] // shards
        for c in range(width):
            out[u, c] = table[row, c]
    out[count:] = 0


@_compiled
def scatter(table, rows, shards, count, values):
    """table[rows[u] // S] = values[u] for u < count; table f32[V / S, C], rows i32[U], values
    f32[U, C]."""
    width = table.shape[1]
    for u in range(count):
        row = rows[u] // shards
        for c in range(width):
            table[row, c] = values[u, c]


@_compiled
def scatter_add(table, rows, shards, count, values, old):
    """table[rows[u] // S] += values[u] - old[u] for u < count, on the row as it is now, without a
    lock."""
    width = table.shape[1]
    for u in range(count):
        row = rows[u] // shards
        for c in range(width):
            table[row, c] += values[u, c] - old[u, c]


@_compiled
def last_writers(unique, count, number, window, depth, writer, place, source):
    """Where the ring holds each row of a batch, and that this batch is now their last writer.

    source[s, u] = w % depth * U + place of the row in batch w, if its last writer w >= number -
    window; else -1. All shards in one call: each return to Python waits for the GIL, which the other
    threads of a pipeline want as well.

    Args:
      unique, count: i32[S, U] and i32[S], the rows in use.
      number, window, depth: the batch, and the sizes of pipeline and ring.
      writer, place: i32[S, V / S], the last batch of each row, and where the row was in it; changed
        in place.
      source: i32[S, U], out.
    """
    shards, capacity = unique.shape
    source[:] = -1
    for shard in range(shards):
        for u in range(count[shard]):
            row = unique[shard, u] // shards
            if writer[shard, row] >= number - window:
                source[shard, u] = writer[shard, row] % depth * capacity + place[shard, row]
            writer[shard, row] = number
            place[shard, row] = u
