"""Factorization machines (FM): all pairwise products of features, in linear time.

Legend: B batch, N dense features, F embedding vectors, E embedding width, K = E - 1 factors.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrec.models.lr import LR, check_inputs


class FM(nn.Module):
    """Factorization machine: (dense f32[B, N], activations f32[B, F, E]) -> logit f32[B].

    logit = w_0 + sum_i w_i x_i + sum_{i < j} <v_i, v_j> x_i x_j. The first element of a row is w_i, the other K = E - 1
    are v_i; w_i and v_i of dense features are model parameters.

    Reference: Rendle, "Factorization Machines", ICDM 2010, equation 1. AUC on Criteo_x4_001 in BARS: .80861.
    """

    @nn.compact
    def __call__(self, dense: jax.Array, activations: jax.Array) -> jax.Array:
        check_inputs(self, dense, activations, 2)
        first_order = LR(name="first_order")(dense, activations)
        factors = self.param("dense_factors", nn.initializers.normal(0.01), (dense.shape[1], activations.shape[2] - 1))
        vectors = jnp.concatenate([activations[:, :, 1:], dense[:, :, None] * factors[None]], axis=1)
        return first_order + pairwise(vectors)


def pairwise(vectors: jax.Array) -> jax.Array:
    """Compute sum_{i < j} <v_i, v_j>, f32[B], of vectors f32[B, F, K] in O(F K) (Rendle, lemma 3.1).

    1/2 sum_k ((sum_i v_ik)^2 - sum_i v_ik^2)

    >>> pairwise(jnp.array([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])).tolist()  # 11 + 17 + 39
    [67.0]
    """
    total = vectors.sum(axis=1)
    return 0.5 * (total * total - (vectors * vectors).sum(axis=1)).sum(axis=-1)
