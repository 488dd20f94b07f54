"""Towers of several labels over common layers: shared-bottom, and a mixture of experts (MMoE).

Legend: B batch, N dense features, F embedding vectors, E embedding width, K labels, n experts, H size of their output.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrec.models.lr import joined
from jaxrec.models.tower import Tower, WithTowers


class OfSeveralLabels(WithTowers):
    """Base class: y_k = h^k(x_k), a tower h^k for each label over what `inputs` makes of all features for it.

    Attributes:
      labels: K.
      tower: layer sizes of each h^k, before its output.
    """

    labels: int = 2
    tower: Sequence[int] = (64,)

    @nn.compact
    def __call__(
        self, dense: jax.Array, activations: jax.Array, train: bool = False, counts: jax.Array | None = None
    ) -> jax.Array:
        inputs = self.inputs(joined(self, dense, activations), train, counts)
        towers = [Tower(self.tower, name=f"tower_{k}", **self.layers)(x, train, counts).T for k, x in enumerate(inputs)]
        return jnp.concatenate([nn.Dense(1, name=f"output_{k}")(x) for k, x in enumerate(towers)], axis=1)

    def inputs(self, x: jax.Array, train: bool, counts: jax.Array | None) -> Sequence[jax.Array]:
        """Return the input of the tower of each label, f32[B, H]."""
        raise NotImplementedError


class SharedBottom(OfSeveralLabels):
    """Shared-bottom: (dense f32[B, N], activations f32[B, F, E]) -> outputs f32[B, K].

    y_k = h^k(f(x)): one tower f over all features, and a tower h^k for each label.

    Reference: Caruana, "Multitask Learning", Machine Learning 1997; Ma et al., KDD 2018, equation 1.

    Attributes:
      bottom: layer sizes of f.
    """

    bottom: Sequence[int] = (512, 256)

    def inputs(self, x, train, counts):
        """See `OfSeveralLabels`."""
        return [Tower(self.bottom, name="bottom", **self.layers)(x, train, counts).T] * self.labels


class MMoE(OfSeveralLabels):
    """Multi-gate mixture of experts: (dense f32[B, N], activations f32[B, F, E]) -> outputs f32[B, K].

    y_k = h^k(sum_i g^k(x)_i f_i(x)), g^k(x) = softmax(W_k x): experts f_i that all labels share, mixed for each label
    by a gate of its own.

    Reference: Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts", KDD
    2018, equations 6 and 7.

    Attributes:
      experts: n.
      expert: layer sizes of each f_i.
    """

    experts: int = 8
    expert: Sequence[int] = (512, 256)

    def inputs(self, x, train, counts):
        """See `OfSeveralLabels`."""
        experts = [
            Tower(self.expert, name=f"expert_{i}", **self.layers)(x, train, counts).T for i in range(self.experts)
        ]
        found = jnp.stack(experts, axis=1)  # [B, n, H]
        gates = [nn.softmax(nn.Dense(self.experts, use_bias=False, name=f"gate_{k}")(x)) for k in range(self.labels)]
        return [jnp.einsum("bn,bnh->bh", gate, found) for gate in gates]
