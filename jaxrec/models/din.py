"""DIN: what a user did before, weighed by what it has to do with what is shown now.

Legend: B batch, N dense features, F embedding vectors, E embedding width, T steps of a history.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrec.models.lr import check_inputs
from jaxrec.models.tower import Tower


class DIN(nn.Module):
    """Deep interest network: (dense f32[B, N], activations f32[B, F, E], candidate f32[B, E], history f32[B, T, E],
    present bool[B, T]) -> logit f32[B].

    The interest is v_U = sum_t a(e_t, v_A) e_t, whose weights a are not normalised, so that its length says how much
    there was (section 4.3, equation 3); the tower sees it beside the candidate and all other features. The
    activation unit a is a small tower over e, v_A, their difference and their product. PReLU and Dice of the paper
    are ReLU here.

    A history is a lookup of one table with ids i32[B, T]; -1 where there is none, which `present` leaves out.

    Reference: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018, arXiv 1706.06978.

    Attributes:
      tower: layer sizes.
      attention: hidden sizes of the activation unit.
    """

    tower: Sequence[int] = (200, 80)
    attention: Sequence[int] = (32, 16)

    @nn.compact
    def __call__(
        self, dense: jax.Array, activations: jax.Array, candidate: jax.Array, history: jax.Array, present: jax.Array
    ) -> jax.Array:
        check_inputs(self, dense, activations)
        if (
            history.ndim != 3
            or candidate.shape != (len(dense), history.shape[2])
            or present.shape != history.shape[:2]
            or len(history) != len(dense)
        ):
            raise ValueError(
                f"DIN wants a candidate [B, E], a history [B, T, E] and present [B, T], got {candidate.shape}, "
                f"{history.shape} and {present.shape} for {len(dense)} examples."
            )
        query = jnp.broadcast_to(candidate[:, None], history.shape)
        pair = jnp.concatenate([history, query, history - query, history * query], axis=-1)
        unit = Tower(self.attention, name="unit")(pair.reshape(-1, pair.shape[-1])).T
        weight = nn.Dense(1, name="weight")(unit).reshape(present.shape)
        interest = jnp.sum(jnp.where(present, weight, 0.0)[..., None] * history, axis=1)
        x = jnp.concatenate([dense, activations.reshape(len(activations), -1), candidate, interest], axis=1)
        return nn.Dense(1)(Tower(self.tower)(x).T)[:, 0]
