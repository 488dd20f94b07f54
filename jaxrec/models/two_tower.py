"""Two-tower retrieval: query and item meet only in a dot product, so that items are ranked by vector search.

Legend: B batch, N dense features, F embedding vectors, E embedding width, D width of the last layer.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrec.models.tower import Tower


class Side(nn.Module):
    """One of two towers: activations f32[B, F, E] (and dense f32[B, N]) -> unit vectors f32[B, D].

    Reference: Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", RecSys 2019,
    section 3.

    Attributes:
      tower: layer sizes; the last one is D, and the last layer has no ReLU.
    """

    tower: Sequence[int] = (128, 64)

    @nn.compact
    def __call__(self, activations: jax.Array, dense: jax.Array | None = None) -> jax.Array:
        x = activations.reshape(activations.shape[0], -1)
        x = x if dense is None else jnp.concatenate([x, dense], axis=1)
        hidden = Tower(self.tower[:-1])(x).T if len(self.tower) > 1 else x
        out = nn.Dense(self.tower[-1], use_bias=False)(hidden)
        # The constant keeps the gradient of a zero vector finite.
        return out * jax.lax.rsqrt(jnp.sum(out * out, axis=1, keepdims=True) + 1e-12)


def in_batch_softmax(
    query: jax.Array,
    item: jax.Array,
    weight: jax.Array | None = None,
    log_share: jax.Array | None = None,
    item_id: jax.Array | None = None,
    temperature: float = 0.05,
) -> jax.Array:
    """Compute the softmax loss of each query, whose negatives are the other items of the batch.

    -log(exp(s_ii) / sum_j exp(s_ij)), s_ij = <u_i, v_j> / temperature - log p_j (Yi et al., RecSys 2019, equations 3 to
    5). Popular items occur in many batches; without the correction by log p_j they would be penalised for it. Over
    several devices, negatives are the items of the same device.

    Args:
      query, item: f32[B, D], unit vectors; item i is the positive of query i.
      weight: f32[B]; an item of weight 0 is no negative of any query. 1 if None.
      log_share: f32[B], log p_j, where p_j is the share of examples with this item; no correction if None.
      item_id: i32[B]; examples with the item of query i are no negatives of it. All other items are if None.
      temperature: above 0.

    Returns:
      f32[B].

    >>> same = jnp.eye(3)
    >>> [round(float(loss), 4) for loss in in_batch_softmax(same, same, temperature=1.0)]  # log(e + 2) - 1
    [0.5514, 0.5514, 0.5514]
    """
    for name, given in (("weight", weight), ("log_share", log_share), ("item_id", item_id)):
        if given is not None and given.shape != query.shape[:1]:
            raise ValueError(f"{name} has shape {given.shape}, wanted {query.shape[:1]}: one for each example.")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r} must be above 0, such as 0.05.")
    score = jax.lax.dot_general(query, item, (((1,), (1,)), ((), ()))) / temperature
    score = score if log_share is None else score - log_share[None]
    own = jnp.eye(len(query), dtype=bool)
    out = jnp.zeros_like(own)
    if weight is not None:
        out |= weight[None] == 0
    if item_id is not None:
        out |= item_id[None] == item_id[:, None]
    score = jnp.where(out & ~own, -jnp.inf, score)
    return jax.nn.logsumexp(score, axis=1) - jnp.diagonal(score)
