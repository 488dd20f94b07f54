"""The device ring of OAC: the rows of the last W batches after their updates, from which later batches are repaired.

A batch gathers its rows from the host while up to W preceding batches are not written back yet. Before the update, each
row whose last writer the gather could not see is replaced by that writer's row in the ring. The gathered value, whether
old, new or torn, is discarded, so the step sees the values of serial execution and gives bitwise the same results.
After OAC (OpenReview xHQeok6ZWX); only its abstract specifies the protocol, the equations here are derived:

    w(r, t) = max {s < t : r in U_s}       the last writer of row r before batch t
    row r of batch t is stale  iff  w(r, t) > A_t
        A_t: all batches <= A_t were written when the gather began
    admission: A_t >= t - 1 - W, so a stale row's writer is one of the last W batches
        the ring holds all of these

The first axis of every leaf is the shard axis, with one ring per shard, so all functions work under `shard_map`
unchanged.

Legend: S shards, W slots of the ring, U padded unique rows per shard, E embedding width, K slot width, V rows of a
stack.
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
    """Updated rows of the last W batches."""

    version: Array  # i32[S, W] number of the batch in each slot, -1 if the slot is empty
    # {stack: i32[S, W, U]} row numbers, padded with V; {} if the device does not validate.
    unique: dict[str, Array]
    rows: dict[str, Rows]  # {stack: f32[S, W, U, E] and slots f32[S, W, U, K]}, post-update


def init(rows: dict[str, Rows], depth: int, numbers: bool = True) -> Ring:
    """Return an empty ring.

    Args:
      rows: {stack: Rows} with the shapes of a batch, f32[S, U, E]; the values are not used.
      depth: W, at least 1 and at least the window of the pipeline.
      numbers: whether the ring holds row numbers, which `validate` requires.

    Returns:
      A Ring of 4 W S U (E + K + 1) bytes per stack, or 4 W S U (E + K) without row numbers.

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
    """Widen the slots to U = capacity[stack] rows per shard; rows keep their positions within a slot."""
    return Ring(
        ring.version,
        {name: _widened(leaf, capacity[name], -1) for name, leaf in ring.unique.items()},
        {
            name: jax.tree.map(lambda leaf, size=capacity[name]: _widened(leaf, size, 0), rows)
            for name, rows in ring.rows.items()
        },
    )


def _widened(leaf, size, fill):
    """Pad [S, W, U, ...] to [S, W, size, ...]."""
    before = [(0, 0), (0, 0), (0, size - leaf.shape[2])]
    return jnp.pad(leaf, before + [(0, 0)] * (leaf.ndim - 3), constant_values=fill)


def validate(ring: Ring, plans: dict[str, Plan], read_version) -> dict[str, Array]:
    """Find the stale rows of a batch t and their last writers, on the device.

    Args:
      ring: Ring after batch t - 1.
      plans: {stack: Plan} of the batch.
      read_version: i32[], A_t: all batches <= A_t were written when the gather began. With -1 - W or less, every row
        that the ring holds counts as stale, which gives the same values.

    Returns:
      {stack: i32[S, U]}, the position of each stale row's current value in the ring of its shard, flattened to [W U];
        -1 for a valid row.
    """
    newest_last = jnp.argsort(ring.version, axis=1)
    return {
        name: jax.vmap(_validate_shard, in_axes=(0, 0, 0, 0, 0, None))(
            ring.unique[name], ring.version, newest_last, p.unique, p.count, read_version
        )
        for name, p in plans.items()
    }


def _validate_shard(held, version, newest_last, unique, count, read_version):
    """Sort the U rows of one shard, look up all W U rows of its ring among them, and return the newest matches."""
    (depth, width), size = held.shape, unique.shape[0]
    ordered, place = jax.lax.sort_key_val(unique, jnp.arange(size, dtype=jnp.int32))
    candidates = held[newest_last]  # [W, U], oldest slot first
    found = jnp.minimum(jnp.searchsorted(ordered, candidates.reshape(-1)), size - 1).reshape(depth, width)
    live = (version > read_version)[newest_last]
    # Without padding, which may match padding in the ring.
    hit = (ordered[found] == candidates) & (place[found] < count) & live[:, None]
    target = jnp.where(hit, place[found], size)
    age = jnp.arange(depth * width, dtype=jnp.int32).reshape(depth, width)
    newest = jnp.full(size, -1, jnp.int32).at[target].max(age, mode="drop")
    return jnp.where(newest < 0, -1, newest_last[newest // width].astype(jnp.int32) * width + newest % width)


def replay(ring: Ring, rows: dict[str, Rows], source: dict[str, Array]) -> dict[str, Rows]:
    """Replace stale rows and their slots by the current values.

    Args:
      ring: Ring after the previous batch.
      rows: {stack: Rows}, f32[S, U, E], gathered.
      source: {stack: i32[S, U]}, positions in the ring, from `validate` or planned on the host.

    Returns:
      {stack: Rows}, f32[S, U, E], the values of serial execution.
    """

    def replayed(place, rows, held):
        one = lambda gathered, held: jnp.where(place[..., None] >= 0, _rows_at(held, jnp.maximum(place, 0)), gathered)
        return jax.tree.map(one, rows, held)

    return {name: replayed(source[name], rows[name], ring.rows[name]) for name in rows}


def append(ring: Ring, unique: dict[str, Array], rows: dict[str, Rows], number) -> Ring:
    """Overwrite the oldest slot, number % W, with a batch.

    Args:
      ring: Ring after the previous batch; donate it.
      unique: {stack: i32[S, U]}, row numbers of the batch, padded with V.
      rows: {stack: Rows}, f32[S, U, E], after the update.
      number: i32[], batch number; batches are appended in order, without gaps.
    """
    slot = number % ring.version.shape[1]
    write = lambda held, new: jax.lax.dynamic_update_index_in_dim(held, new.astype(held.dtype), slot, axis=1)
    version = write(ring.version, jnp.broadcast_to(jnp.asarray(number, jnp.int32), ring.version.shape[:1]))
    return Ring(version, jax.tree.map(write, ring.unique, unique), jax.tree.map(write, ring.rows, rows))


def commit(update: Callable, dense, ring: Ring, rows, plans, batch, number, *, source=None, read_version=None):
    """Validate, replay, update and append one batch: the step of OAC in one function.

    `Pipeline` runs the same parts, some of them on the host, in `Stages.commit`.

    Args:
      update: (dense, rows, plans, batch) -> dense', rows', metrics, as `Task.update`.
      dense: DenseState after batch number - 1.
      ring: Ring after batch number - 1.
      rows: {stack: Rows}, gathered and possibly stale.
      plans: {stack: Plan} of the batch.
      batch: Batch.
      number: i32[], batch number.
      source: {stack: i32[S, U]} planned on the host; None to `validate` on the device.
      read_version: i32[], as for `validate`; required without `source`.

    Returns:
      dense', ring', rows' (final values to write back), metrics with 'patched_rows' i32[].
    """
    unique = {name: p.unique for name, p in plans.items()}
    source = validate(ring, plans, read_version) if source is None else source
    dense, new, metrics = update(dense, replay(ring, rows, source), plans, batch)
    patched = sum(jnp.sum(where >= 0) for where in source.values())
    return dense, append(ring, unique, new, number), new, {**metrics, "patched_rows": patched}


def _rows_at(held, place):
    """Return the rows of f32[S, W, U, E] at places i32[S, U] in the ring of their shard, as f32[S, U, E]."""
    flat = place + held.shape[1] * held.shape[2] * jnp.arange(len(held), dtype=jnp.int32)[:, None]
    return held.reshape(-1, held.shape[-1]).at[flat].get(mode="promise_in_bounds")


class LastWriters:
    """The last writer of every row, and the row's position in that batch: 8 bytes of host memory per row.

    The writes of the W = `window` preceding batches count; the ring has `depth` slots, at least W and at least 1.
    """

    def __init__(self, spec: EmbeddingSpec, window: int, depth: int):
        self.window, self.depth = window, depth
        shape = {name: (stack.shards, stack.rows_per_shard) for name, stack in spec.stacks.items()}
        self._writer = {name: np.full(shape[name], -(2**31), np.int32) for name in shape}
        self._place = {name: np.empty(shape[name], np.int32) for name in shape}

    def sources(self, plans: dict[str, Plan], number: int) -> dict[str, np.ndarray]:
        """Return {stack: i32[S, U]}, the position of each row in the ring, -1 without a writer in the window.

        Must be called in batch order, as it also records the batch as the last writer of its rows.
        """
        sources = {}
        for name, p in plans.items():
            sources[name] = np.empty(p.unique.shape, np.int32)
            known = self._writer[name], self._place[name]
            unique, count = np.asarray(p.unique), np.asarray(p.count)  # of a plan that was made on the device, too
            last_writers(unique, count, number, self.window, self.depth, *known, sources[name])
        return sources


def written_since(sources: dict[str, np.ndarray], number: int, window: int, floor: int) -> dict[str, np.ndarray]:
    """Return the sources of batch `number`, with -1 for those in ring entries of batches before the floor."""

    def newer(where):
        slot, base = where // where.shape[1], number - window
        writer = base + (slot - base) % max(window, 1)  # the only batch of the window in that slot
        return np.where((where >= 0) & (writer >= floor), where, -1).astype(np.int32)

    return {name: newer(where) for name, where in sources.items()}


def count_found(sources: dict):
    """Return the number of rows that the ring provides: i32[] of numpy or JAX, as the sources; 0 without stacks."""
    return sum((where >= 0).sum() for where in sources.values())
