"""DIN: a click model that weights each step of a user's history by its relevance to the candidate item.

Legend: B batch, N dense features, F embedding vectors, E embedding width, T steps of a history.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrec.models.lr import check_inputs
from jaxrec.models.tower import Tower, WithTowers


class DIN(WithTowers):
    """Deep interest network: dense features, activations, a candidate and a history -> logit f32[B].

    The arguments are dense f32[B, N], activations f32[B, F, E], candidate f32[B, E], history f32[B, T, E] and present
    bool[B, T]. A history is looked up in one table with ids i32[B, T]; missing steps have id -1, and `present` masks
    them.

    The interest is v_U = sum_t a(e_t, v_A) e_t. The weights a are not normalised, so that the norm of v_U reflects the
    intensity of the interest (section 4.3, equation 3). The tower reads v_U, the candidate and all other features. The
    activation unit a is a small tower over e, v_A, their difference and their product, with ReLU. ReLU replaces PReLU
    and Dice of the paper.

    Reference: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018, arXiv 1706.06978.

    Attributes:
      tower: layer sizes.
      attention: hidden sizes of the activation unit.
    """

    tower: Sequence[int] = (200, 80)
    attention: Sequence[int] = (32, 16)

    @nn.compact
    def __call__(
        self, dense: jax.Array, activations: jax.Array, candidate: jax.Array, history: jax.Array, present: jax.Array,
        train: bool = False, counts: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        check_inputs(self, dense, activations)
        if present.shape != history.shape[:2]:
            raise ValueError(f"DIN wants a history [B, T, E] and present [B, T], got {history.shape}, {present.shape}.")
        query = jnp.broadcast_to(candidate[:, None], history.shape)
        pair = jnp.concatenate([history, query, history - query, history * query], axis=-1)
        unit = Tower(self.attention, name="unit")(pair.reshape(-1, pair.shape[-1])).T
        weight = nn.Dense(1, name="weight")(unit).reshape(present.shape)
        interest = jnp.sum(jnp.where(present, weight, 0.0)[..., None] * history, axis=1)
        x = jnp.concatenate([dense, activations.reshape(activations.shape[0], -1), candidate, interest], axis=1)
        return nn.Dense(1)(Tower(self.tower, **self.layers)(x, train, counts).T)[:, 0]
