"""Towers of several labels over common layers: shared-bottom, and a mixture of experts (MMoE).

Legend: B batch, N dense features, F embedding vectors, E embedding width, K labels, n experts, H size of their output.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrec.models.lr import check_inputs
from jaxrec.models.tower import Tower, WithTowers


class SharedBottom(WithTowers):
    """Shared-bottom: (dense f32[B, N], activations f32[B, F, E]) -> outputs f32[B, K].

    y_k = h^k(f(x)): one tower f over all features, and a tower h^k for each label.

    Reference: Caruana, "Multitask Learning", Machine Learning 1997; Ma et al., KDD 2018, equation 1.

    Attributes:
      labels: K.
      bottom: layer sizes of f.
      tower: layer sizes of each h^k, before its output.
    """

    labels: int = 2
    bottom: Sequence[int] = (512, 256)
    tower: Sequence[int] = (64,)

    @nn.compact
    def __call__(
        self, dense: jax.Array, activations: jax.Array, train: bool = False, counts: jax.Array | None = None
    ) -> jax.Array:
        check_inputs(self, dense, activations)
        x = jnp.concatenate([dense, activations.reshape(activations.shape[0], -1)], axis=1)
        common = Tower(self.bottom, name="bottom", **self.layers)(x, train, counts).T
        return _outputs([common] * self.labels, self.tower, self.layers, train, counts)


class MMoE(WithTowers):
    """Multi-gate mixture of experts: (dense f32[B, N], activations f32[B, F, E]) -> outputs f32[B, K].

    y_k = h^k(sum_i g^k(x)_i f_i(x)), g^k(x) = softmax(W_k x): experts f_i that all labels share, mixed for each label
    by a gate of its own.

    Reference: Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts", KDD
    2018, equations 6 and 7.

    Attributes:
      labels: K.
      experts: n.
      expert: layer sizes of each f_i.
      tower: layer sizes of each h^k, before its output.
    """

    labels: int = 2
    experts: int = 8
    expert: Sequence[int] = (512, 256)
    tower: Sequence[int] = (64,)

    @nn.compact
    def __call__(
        self, dense: jax.Array, activations: jax.Array, train: bool = False, counts: jax.Array | None = None
    ) -> jax.Array:
        check_inputs(self, dense, activations)
        x = jnp.concatenate([dense, activations.reshape(activations.shape[0], -1)], axis=1)
        experts = [
            Tower(self.expert, name=f"expert_{i}", **self.layers)(x, train, counts).T for i in range(self.experts)
        ]
        found = jnp.stack(experts, axis=1)  # [B, n, H]
        gates = [nn.softmax(nn.Dense(self.experts, use_bias=False, name=f"gate_{k}")(x)) for k in range(self.labels)]
        mixed = [jnp.einsum("bn,bnh->bh", gate, found) for gate in gates]
        return _outputs(mixed, self.tower, self.layers, train, counts)


def _outputs(inputs: Sequence[jax.Array], sizes: Sequence[int], how, train, counts) -> jax.Array:
    """Compute f32[B, K] from the inputs f32[B, H] of each label."""
    towers = [Tower(sizes, name=f"tower_{k}", **how)(x, train, counts).T for k, x in enumerate(inputs)]
    return jnp.concatenate([nn.Dense(1, name=f"output_{k}")(x) for k, x in enumerate(towers)], axis=1)
