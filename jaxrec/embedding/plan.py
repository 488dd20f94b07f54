"""Which rows a batch touches, planned on the device: pure, jit-able, and bitwise equal to the plan made on the host.

Legend: N ids of one stack in the batch, S shards, U capacity, V rows of the stack (and the mark of "no row").
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.sharding import AXES, device_index
from jaxrec.types import Plan


def device_plan(spec: EmbeddingSpec, ids, capacity, axes=False) -> dict[str, Plan]:
    """Numbers the rows of a batch by first appearance, shard by shard.

    Without a pass over the table: the cost depends on N, not on V. First appearances are found by a scatter-min of
    positions into N slots, the slot of an id being its rank in the sorted ids.

    Args:
      spec: the tables and lookups.
      ids: {lookup: i32[B, ...]}, -1 where an id is missing.
      capacity: {stack: U}, padded unique rows a shard.
      axes: True inside a shard_map over the mesh, where ids are the device's own part: the plan then holds the rows
        of the device's own shards and the positions of its own ids.

    Returns:
      {stack: Plan}. Where count > U the plan has dropped rows and must not be used: plan again with more capacity.
    """
    plans = {}
    for name, stack in spec.stacks.items():
        lookups = {key: ids[key] for key in spec.lookups_of(name)}
        rows, invalid = _stack_rows(spec, stack, lookups, axes)
        unique, position, count = _number(rows, stack, capacity[name], axes)
        plans[name] = Plan(unique, _split_back(position, lookups, axes), count, invalid)
    return plans


def _stack_rows(spec, stack, lookups, axes):
    """Row numbers i32[N] of all ids of all devices, V where missing; and how many ids are outside their table."""
    parts, invalid = [], jnp.zeros((), jnp.int32)
    for key, local in lookups.items():
        hots = spec.lookups[key].hots
        offset, limit = (np.repeat(a, hots)[None, :] for a in spec.columns_of(key))
        part = jax.lax.all_gather(local, AXES, tiled=True) if axes else jnp.asarray(local)
        part = part.reshape(-1, offset.shape[1])
        valid = (part >= 0) & (part < limit)
        invalid += jnp.sum(~valid & (part != -1), dtype=jnp.int32)
        parts.append(jnp.where(valid, part + offset, stack.rows).reshape(-1))
    if axes:
        invalid = jax.lax.pmax(invalid, AXES)  # equal on all devices; says so to the type system
    return jnp.concatenate(parts), invalid


def _number(rows, stack, capacity, axes):
    """unique i32[S', U] and count i32[S'] of the local shards, position i32[N] in the flattened [S * U]."""
    n, shards = rows.shape[0], stack.shards
    here = shards // jax.lax.axis_size(AXES) if axes else shards
    first_shard = device_index() * here if axes else 0
    index = jnp.arange(n, dtype=jnp.int32)
    slot = jnp.searchsorted(jnp.sort(rows), rows).astype(jnp.int32)
    first = jnp.full(n, n, jnp.int32).at[slot].min(index)[slot]  # where each row appears first
    shard = jnp.where(rows < stack.rows, rows % shards, shards) - first_shard
    heads = (first == index)[:, None] & (shard[:, None] == jnp.arange(here)[None, :])
    order = jnp.cumsum(heads, axis=0, dtype=jnp.int32)  # [N, S']
    count = order[-1]
    mine = (shard >= 0) & (shard < here)
    local = jnp.clip(shard, 0, here - 1)
    rank = jnp.take_along_axis(order, local[:, None], axis=1)[:, 0] - 1  # meant at first appearances
    unique = jnp.full((here, capacity), stack.rows, jnp.int32)
    target = jnp.where(mine & (first == index), rank, capacity)
    unique = unique.at[local, target].set(rows, mode="drop")
    rank = rank[first]
    found = mine & (rank < capacity)
    # One more than the position, so that 0 says "not here" when the devices' parts are added up.
    marked = jnp.where(found, (first_shard + local) * capacity + rank + 1, 0)
    if axes:
        marked = jax.lax.psum(marked, AXES)
    return unique, jnp.where(marked > 0, marked - 1, shards * capacity), count


def _split_back(position, lookups, axes):
    """Cuts positions i32[N] into one array a lookup, of the shape of the (device's own) ids."""
    inverse, start = {}, 0
    for key, local in lookups.items():
        size = int(np.prod(local.shape))
        if axes:
            begin = start + device_index() * size
            inverse[key] = jax.lax.dynamic_slice(position, (begin,), (size,)).reshape(local.shape)
            start += size * jax.lax.axis_size(AXES)
        else:
            inverse[key] = position[start : start + size].reshape(local.shape)
            start += size
    return inverse
