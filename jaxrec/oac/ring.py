"""The device ring of OAC: what the last W batches wrote, and how a later batch finds its rows
there.

A batch gathers its rows from the host while up to W batches before it are not written back yet.
Before it is applied, every row whose last writer the gather could not see is replaced by what that
writer left in the ring. What the gather read instead, old, new or torn, is thrown away; so the step
sees the values of serial execution, and results are bitwise those of it. After OAC (OpenReview
xHQeok6ZWX); only its abstract fixes the protocol, the equations here are derived:

    w(r, t) = max {s < t : r in U_s}       the last writer of row r before batch t
    row r of batch t is stale  iff  w(r, t) > A_t
        A_t: all batches <= A_t were written when the gather began
    admission: A_t >= t - 1 - W, so a stale row's writer is one of the last W batches
        the ring holds all of these

Every leaf has the shards as its first axis, one ring per shard, so all functions work under
`shard_map` unchanged.
Legend: S shards, W slots of the ring, U padded unique rows per shard, E embedding width, K slot
width, V rows of a stack.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.embedding.kernels import last_writers
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.types import Array, Plan, Rows


class Ring(NamedTuple):
    """The last W batches' rows after their update."""

    version: Array  # i32[S, W] the batch in each slot, -1 where there is none yet
    # {stack: i32[S, W, U]} its rows, V after them; {} where the device does not look for them.
    unique: dict[str, Array]
    rows: dict[str, Rows]  # {stack: f32[S, W, U, E] and slots f32[S, W, U, K]}, post-update


def init(rows: dict[str, Rows], depth: int, numbers: bool = True) -> Ring:
    """Makes an empty ring.

    Args:
      rows: {stack: Rows} of the shapes of a batch, f32[S, U, E]; only shapes are used.
      depth: W, at least the window of the pipeline and at least 1.
      numbers: whether it holds row numbers, for `validate`.

    Returns:
      A Ring of 4 W S U (E + K + 1) bytes per stack, 4 W S U (E + K) without numbers.

    Raises:
      ValueError: depth < 1.
    """
    depth = whole_number("depth", depth, why=" (and at least the window)")
    slots = lambda leaf: jnp.zeros((leaf.shape[0], depth, *leaf.shape[1:]), leaf.dtype)
    shards = next(iter(rows.values())).value.shape[0]
    return Ring(
        jnp.full((shards, depth), -1, jnp.int32),
        {name: jnp.full((shards, depth, r.value.shape[1]), -1, jnp.int32) for name, r in rows.items() if numbers},
        jax.tree.map(slots, rows),
    )


def resize(ring: Ring, capacity: dict[str, int]) -> Ring:
    """Widens the slots to U = capacity[stack] rows per shard; places within a slot stay.

    Args:
      ring: of at most that width.
      capacity: {stack: U}.
    """

    return Ring(
        ring.version,
        {name: widened(leaf, capacity[name], -1) for name, leaf in ring.unique.items()},
        {
            name: jax.tree.map(lambda leaf, size=capacity[name]: widened(leaf, size, 0), rows)
            for name, rows in ring.rows.items()
        },
    )


def widened(leaf, size: int, fill, numpy=jnp):
    """[S, W, U, ...] -> [S, W, size, ...], of JAX or of numpy."""
    before = [(0, 0), (0, 0), (0, size - leaf.shape[2])]
    return numpy.pad(leaf, before + [(0, 0)] * (leaf.ndim - 3), constant_values=fill)


def validate(ring: Ring, plans: dict[str, Plan], read_version) -> dict[str, Array]:
    """Checks every row of a batch against its last writer, on the device.

    Args:
      ring: after all batches before this one.
      plans: {stack: Plan} of the batch.
      read_version: i32[], A_t: all batches up to it had been written when the rows were gathered.
        -1 - W or less replaces every row that the ring holds, which gives the same values.

    Returns:
      {stack: i32[S, U]}: where in the ring of its shard, flattened to [W U], the right value is; -1
        for a valid row.
    """
    newest_last = jnp.argsort(ring.version, axis=1)
    return {
        name: jax.vmap(_validate_shard, in_axes=(0, 0, 0, 0, 0, None))(
            ring.unique[name], ring.version, newest_last, p.unique, p.count, read_version
        )
        for name, p in plans.items()
    }


def _validate_shard(held, version, newest_last, unique, count, read_version):
    """One shard: sorts its U rows, looks all W U held ones up among them, and lets the newest
    win."""
    (depth, width), size = held.shape, unique.shape[0]
    ordered, place = jax.lax.sort_key_val(unique, jnp.arange(size, dtype=jnp.int32))
    candidates = held[newest_last]  # [W, U], oldest slot first
    found = jnp.minimum(jnp.searchsorted(ordered, candidates.reshape(-1)), size - 1).reshape(depth, width)
    live = (version > read_version)[newest_last]
    # Padding is not a row.
    hit = (ordered[found] == candidates) & (place[found] < count) & live[:, None]
    target = jnp.where(hit, place[found], size)
    age = jnp.arange(depth * width, dtype=jnp.int32).reshape(depth, width)
    newest = jnp.full(size, -1, jnp.int32).at[target].max(age, mode="drop")
    return jnp.where(newest < 0, -1, newest_last[newest // width].astype(jnp.int32) * width + newest % width)


def replay(ring: Ring, rows: dict[str, Rows], source: dict[str, Array]) -> dict[str, Rows]:
    """Puts the right values in the place of stale rows and slots.

    Args:
      ring: after all batches before this one.
      rows: {stack: Rows}, f32[S, U, E], as gathered; or f32[S, C, E] with C < U, those rows alone that the ring
        does not give, in their order.
      source: {stack: i32[S, U]}, from `validate` or planned on the host.

    Returns:
      {stack: Rows}, f32[S, U, E], the values of serial execution.
    """

    def patch(name):
        where, sent = source[name], rows[name].value.shape[1]
        depth, width = ring.rows[name].value.shape[1:3]
        # The n-th row that the ring does not give is the n-th that was sent: no list of them has to travel.
        place = jnp.clip(jnp.cumsum(where < 0, axis=1, dtype=jnp.int32) - 1, 0, sent - 1)

        def one(gathered, held):
            right = _rows_at(held.reshape(held.shape[0], depth * width, -1), jnp.maximum(where, 0))
            gathered = gathered if sent == where.shape[1] else _rows_at(gathered, place)
            return jnp.where(where[..., None] >= 0, right, gathered)

        return jax.tree.map(one, rows[name], ring.rows[name])

    return {name: patch(name) for name in rows}


def append(ring: Ring, unique: dict[str, Array], rows: dict[str, Rows], number) -> Ring:
    """Writes a batch over the oldest slot, number % W.

    Args:
      ring: donate it.
      unique: {stack: i32[S, U]}, the rows of the batch, V where there is none.
      rows: {stack: Rows}, f32[S, U, E], after the update.
      number: i32[], of the batch; one more than that of the batch before.
    """
    slot = number % ring.version.shape[1]
    write = lambda held, new: jax.lax.dynamic_update_index_in_dim(held, new.astype(held.dtype), slot, axis=1)
    version = write(ring.version, jnp.broadcast_to(jnp.asarray(number, jnp.int32), ring.version.shape[:1]))
    return Ring(version, jax.tree.map(write, ring.unique, unique), jax.tree.map(write, ring.rows, rows))


def commit(update: Callable, dense, ring: Ring, rows, plans, batch, number, *, source=None, read_version=None):
    """Validates, replays, updates and appends one batch: the step of OAC.

    Args:
      update: (dense, rows, plans, batch) -> dense', rows', metrics, as from `make_update`.
      dense: DenseState after batch number - 1.
      ring: Ring after batch number - 1.
      rows: {stack: Rows} as gathered, perhaps stale.
      plans: {stack: Plan} of the batch.
      batch: Batch.
      number: i32[], of the batch.
      source: {stack: i32[S, U]} planned on the host; else `read_version` decides, on the device.
      read_version: i32[], see `validate`.

    Returns:
      dense', ring', rows' (final values, to be written back), metrics with 'patched_rows' i32[].
    """
    unique = {name: p.unique for name, p in plans.items()}
    source = validate(ring, plans, read_version) if source is None else source
    dense, new, metrics = update(dense, replay(ring, rows, source), plans, batch)
    patched = sum(jnp.sum(where >= 0) for where in source.values())
    return dense, append(ring, unique, new, number), new, {**metrics, "patched_rows": patched}


def kept(rows: dict[str, Rows], bits: dict[str, Array], size: dict[str, int]) -> dict[str, Rows]:
    """Those rows of a batch that are to be written back, in their order.

    Args:
      rows: {stack: Rows}, f32[S, U, E].
      bits: {stack: u8[S, U / 8]}, from `numpy.packbits`: which rows.
      size: {stack: C}, at least as many as there are in any shard; all rows stay where they are if it is U.

    Returns:
      {stack: Rows}, f32[S, C, E]; what is after the kept ones is anything.
    """

    def some(name):
        (shards, width), wanted = rows[name].value.shape[:2], size[name]
        if wanted == width:
            return rows[name]
        keep = jnp.unpackbits(bits[name], axis=1, count=width)
        behind = jnp.cumsum(keep, axis=1, dtype=jnp.int32) - 1
        shard = jnp.broadcast_to(jnp.arange(shards, dtype=jnp.int32)[:, None], keep.shape)
        number = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), keep.shape)
        at = jnp.where(keep > 0, behind, wanted)
        place = jnp.zeros((shards, wanted), jnp.int32).at[shard, at].set(number, mode="drop")
        return jax.tree.map(lambda leaf: _rows_at(leaf, place), rows[name])

    return {name: some(name) for name in rows}


def _rows_at(leaf, place):
    """f32[S, N, E], i32[S, U] places below N -> f32[S, U, E]."""
    flat = place + leaf.shape[1] * jnp.arange(leaf.shape[0], dtype=jnp.int32)[:, None]
    return leaf.reshape(-1, leaf.shape[-1]).at[flat].get(mode="promise_in_bounds")


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


def count_found(sources: dict):
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
