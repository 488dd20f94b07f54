"""From rows to what a model sees: gather by position, mask what is missing, pool bags.

Legend: S shards, U padded unique rows per shard, E embedding width, H hots.
"""

import jax.numpy as jnp

from jaxrec.embedding.spec import EmbeddingSpec


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
        for key, lookup in spec.lookups_of(name).items():
            position = plan.inverse[key]
            taken = rows.at[position].get(mode="fill", fill_value=0)
            result[key] = taken if lookup.hots == 1 else _pool(taken, position < rows.shape[0], lookup)
    return result


def _pool(taken, present, lookup):
    total = taken.sum(axis=-2)
    if lookup.pooling == "sum":
        return total
    count = jnp.maximum(present.sum(axis=-1), 1)
    return total / count[..., None].astype(total.dtype)
