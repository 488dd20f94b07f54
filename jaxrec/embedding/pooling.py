"""From rows to what a model sees: gather by position, mask what is missing, pool bags.

Legend: S shards, U padded unique rows per shard, E embedding width, H hots.
"""

import functools

import jax
import jax.numpy as jnp

from jaxrec.embedding.spec import EmbeddingSpec

_AT_ONCE = 8  # hots that one fused loop of XLA adds up; twice as many are no faster, and take longer to compile


def activations(spec: EmbeddingSpec, values, plans):
    """Looks up and pools the embeddings of a batch.

    Args:
      spec: the tables and lookups.
      values: {stack: f32[S, U, E]}, the rows of all shards.
      plans: {stack: Plan}, whose `inverse` i32[B, ...] points into the flattened [S * U].

    Returns:
      {lookup: f32[B, ..., E]}; a lookup of several hots has lost its axis H; missing ids count as
      nothing, and an empty bag reads zero.
    """
    result = {}
    for name, plan in plans.items():
        rows = jnp.asarray(values[name]).reshape(-1, values[name].shape[-1])
        lookups = spec.lookups_of(name)
        bags = frozenset(key for key, lookup in lookups.items() if lookup.hots > 1)
        totals = _totals(bags, rows, {key: jnp.asarray(plan.inverse[key]) for key in lookups})
        for key, lookup in lookups.items():
            mean = key in bags and lookup.pooling == "mean"
            result[key] = _mean(totals[key], plan.inverse[key], len(rows)) if mean else totals[key]
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _totals(bags, rows, positions):
    """{lookup: f32[B, ..., E]}: the rows f32[S U, E] at the positions, those of each bag summed over the last axis.

    No [B, ..., H, E] is made, neither here nor in the derivative: memory goes by bags, not by ids.
    """
    return {key: _sum(rows, at) if key in bags else _taken(rows, at) for key, at in positions.items()}


def _taken(rows, position):
    return rows.at[position].get(mode="fill", fill_value=0)


def _sum(rows, position):
    hots = position.shape[-1]
    first = hots % _AT_ONCE or _AT_ONCE

    def plus(total, position):
        for hot in range(position.shape[-1]):
            total = total + _taken(rows, position[..., hot])
        return total

    def block(number, total):
        start = first + number * _AT_ONCE
        return plus(total, jax.lax.dynamic_slice_in_dim(position, start, _AT_ONCE, axis=-1))

    total = plus(_taken(rows, position[..., 0]), position[..., 1:first])
    return total if hots == first else jax.lax.fori_loop(0, (hots - first) // _AT_ONCE, block, total)


def _totals_forward(bags, rows, positions):
    return _totals(bags, rows, positions), (rows, positions)


def _totals_backward(bags, saved, gradients):
    # One array of gradients for all lookups, to which each adds in turn: autodiff would make one for each lookup and
    # sum them, which takes longer than all that is added. One hot after the other, as all rows of a bag gain the same
    # vector; autodiff would write it H times.
    rows, positions = saved
    total = jnp.zeros_like(rows)
    for key, position in positions.items():
        add = functools.partial(_added, gradient=gradients[key])
        if key in bags:
            total = jax.lax.fori_loop(0, position.shape[-1], functools.partial(_added_hot, position, add), total)
        else:
            total = add(total, position)
    return total, None


def _added(total, position, gradient):
    return total.at[position].add(gradient, mode="drop")


def _added_hot(position, add, hot, total):
    return add(total, jax.lax.dynamic_index_in_dim(position, hot, position.ndim - 1, keepdims=False))


_totals.defvjp(_totals_forward, _totals_backward)


def _mean(total, position, rows):
    count = jnp.maximum((position < rows).sum(axis=-1), 1)
    return total / count[..., None].astype(total.dtype)
