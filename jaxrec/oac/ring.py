"""The device ring of OAC: the rows of the last W batches after their updates, from which later batches are repaired.

A batch is read while up to W preceding batches are not written back yet. Just before its update, each row is looked up
in a stamp, which says what batch has written it last: if that is one of the last W, the row is taken from the ring.
What was read is discarded, whether old, new or torn, so the step sees the values of serial execution and gives bitwise
the same results. After OAC (OpenReview xHQeok6ZWX); only its abstract specifies the protocol, the equations here are
derived:

    w(r, t) = max {s < t : r in U_s}       the last writer of row r before batch t
    row r of batch t may be stale  iff  w(r, t) >= t - W
        admission: batches before t - W are written when the batch is read
        the ring holds all of the last W batches

The first axis of every leaf is the shard axis, with one ring per shard, so all functions but `commit`, whose update
may hold a `shard_map` of its own, work under one, where they are given the number of `shards` of all devices.

Legend: S shards, W slots of the ring, U padded unique rows per shard, V rows of a shard, E embedding width, K slot
width.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrec.bounds import whole_number
from jaxrec.types import Array, Plan, Rows

_NEVER = -(2**31)
Items = Mapping[str, int] | tuple[tuple[str, int], ...]  # the second, which has a hash, for `jax.jit`


class Ring(NamedTuple):
    """Updated rows of the last W batches, and the last writer of every row."""

    # {stack: f32[S, W, U, E] and slots f32[S, W, U, K]}, post-update, those of batch t in slot t % W; or other trees.
    rows: dict[str, Any]
    writer: dict[str, Array]  # {stack: i32[S, V]} number of the batch that has written the row last
    place: dict[str, Array]  # {stack: i32[S, V]} place of the row in that batch


def init(rows: Mapping[str, Any], rows_per_shard: Items, window: int) -> Ring:
    """Return an empty ring.

    Args:
      rows: {stack: Rows} with the shapes of a batch, f32[S, U, E]; the values are not used.
      rows_per_shard: {stack: V}, or its items.
      window: W.

    Returns:
      A Ring of 4 W S U (E + K) + 8 S V bytes per stack.

    Raises:
      ValueError: window < 1.
    """
    window = whole_number("window", window)
    empty = lambda leaf: jnp.zeros((leaf.shape[0], window, *leaf.shape[1:]), leaf.dtype)
    size = dict(rows_per_shard)
    shape = {name: (jax.tree.leaves(tree)[0].shape[0], size[name]) for name, tree in rows.items()}
    return Ring(
        jax.tree.map(empty, dict(rows)),
        {name: jnp.full(shape[name], _NEVER, jnp.int32) for name in rows},
        {name: jnp.zeros(shape[name], jnp.int32) for name in rows},
    )


def widen(rows: Mapping[str, Any], capacity: Items) -> dict[str, Any]:
    """Widen the slots of `Ring.rows` to U rows per shard or more, of {stack: U} or its items; rows keep places."""
    size = dict(capacity)
    return {name: _widened(tree, 2, size[name]) for name, tree in rows.items()}


def numbers_of_rows(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Return plans without what depends on the batch's size, for which programs of the ring would be compiled anew."""
    return {name: plan._replace(inverse={}) for name, plan in plans.items()}


def _widened(tree, axis, size):
    """Pad an axis of all leaves to a size, unless it has more."""

    def one(leaf):
        padding = [(0, 0)] * leaf.ndim
        padding[axis] = (0, max(0, size - leaf.shape[axis]))
        return jnp.pad(leaf, padding)

    return jax.tree.map(one, tree)


def validate(
    ring: Ring, plans: Mapping[str, Plan], number: Any, since: Any = 0, shards: int | None = None
) -> dict[str, Array]:
    """Find the rows of a batch whose last writer is in the ring.

    Args:
      ring: Ring after batch number - 1, or an earlier one.
      plans: {stack: Plan} of the batch.
      number: i32[], number of the batch.
      since: i32[]; batches before it do not count, such as those that were written before the rows were read.
      shards: S of all devices; None for as many as here.

    Returns:
      {stack: i32[S, U]}, the place of each such row in the ring of its shard, flattened to [W U]; -1 for other rows.
    """

    def one(name, plan):
        (_, window, width), writer = jax.tree.leaves(ring.rows[name])[0].shape[:3], ring.writer[name]
        row = plan.unique // (shards or len(writer))
        known = lambda leaf, fill: jax.vmap(lambda of, at: of.at[at].get(mode="fill", fill_value=fill))(leaf, row)
        last, place = known(writer, _NEVER), known(ring.place[name], 0)
        return jnp.where(last >= jnp.maximum(number - window, since), last % window * width + place, -1)

    return {name: one(name, plan) for name, plan in plans.items()}


def replay(ring: Ring, rows: Mapping[str, Any], source: Mapping[str, Array]) -> dict[str, Any]:
    """Replace rows and their slots by those of the ring.

    Args:
      ring: Ring after the previous batch.
      rows: {stack: Rows}, f32[S, U, E], as read.
      source: {stack: i32[S, U]}, places in the ring, from `validate`.

    Returns:
      {stack: Rows}, f32[S, U, E], the values of serial execution.
    """

    def replayed(place, read, held):
        one = lambda read, held: jnp.where(place[..., None] >= 0, _rows_at(held, jnp.maximum(place, 0)), read)
        return jax.tree.map(one, read, held)

    return {name: replayed(source[name], rows[name], ring.rows[name]) for name in rows}


def _rows_at(held, place):
    """Return the rows of f32[S, W, U, E] at places i32[S, U] in the ring of their shard, as f32[S, U, E]."""
    flat = place + held.shape[1] * held.shape[2] * jnp.arange(len(held), dtype=jnp.int32)[:, None]
    return held.reshape(-1, held.shape[-1]).at[flat].get(mode="promise_in_bounds")


def append(
    ring: Ring, plans: Mapping[str, Plan], rows: Mapping[str, Any], number: Any, shards: int | None = None
) -> Ring:
    """Overwrite the oldest slot, number % W, with a batch, and stamp its rows.

    Args:
      ring: Ring after the previous batch; donate it.
      plans: {stack: Plan} of the batch.
      rows: {stack: Rows}, f32[S, U, E], after the update.
      number: i32[], batch number; batches are appended in order, without gaps.
      shards: as for `validate`.
    """
    written, writer, place = dict(ring.rows), dict(ring.writer), dict(ring.place)
    for name, plan in plans.items():
        _, window, width = jax.tree.leaves(ring.rows[name])[0].shape[:3]
        put = lambda held, new, slot=number % window: jax.lax.dynamic_update_index_in_dim(
            held, new.astype(held.dtype), slot, axis=1
        )
        written[name] = jax.tree.map(put, ring.rows[name], _widened(rows[name], 1, width))
        at, row = jnp.arange(plan.unique.shape[1], dtype=jnp.int32)[None], plan.unique // (shards or len(writer[name]))
        # Padding is beyond the last row, each in a place of its own, as XLA may assume that places differ.
        row = jnp.where(at < plan.count[:, None], row, writer[name].shape[1] + at)
        stamp = jax.vmap(lambda of, row, value: of.at[row].set(value, mode="drop", unique_indices=True))
        writer[name] = stamp(writer[name], row, jnp.broadcast_to(jnp.asarray(number, jnp.int32), row.shape))
        place[name] = stamp(place[name], row, jnp.broadcast_to(at, row.shape))
    return Ring(written, writer, place)


def commit(
    update: Callable, dense: Any, ring: Ring, rows: dict[str, Rows], plans: dict[str, Plan], batch: Any, number: Any
):  # fmt: skip
    """Validate, replay, update and append one batch: the step of OAC in one function.

    `Pipeline` runs the same parts in `Stages.commit`, `Overlap` in `Overlap.step`.

    Args:
      update: (dense, rows, plans, batch) -> dense', rows', metrics, as `Task.update`.
      dense: DenseState after batch number - 1.
      ring: Ring after batch number - 1.
      rows: {stack: Rows}, as read, possibly stale.
      plans: {stack: Plan} of the batch.
      batch: Batch.
      number: i32[], as for `validate`.

    Returns:
      dense', ring', rows' (final values to write back), metrics with 'patched_rows' i32[].
    """
    source = validate(ring, plans, number)
    dense, new, metrics = update(dense, replay(ring, rows, source), plans, batch)
    return dense, append(ring, plans, new, number), new, {**metrics, "patched_rows": count_found(source)}


def count_found(source: Mapping[str, Array]) -> Array:
    """Return the number of rows that the ring provides, i32[]."""
    return sum((jnp.sum(where >= 0, dtype=jnp.int32) for where in source.values()), start=jnp.zeros((), jnp.int32))
