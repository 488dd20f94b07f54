"""FinalMLP: two towers, each with its own feature gate, and a bilinear fusion.

Legend: B batch, N dense features, F embedding vectors, E embedding width, X = N + F E, H heads.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrec.models.lr import joined
from jaxrec.models.tower import Tower, WithTowers


class FinalMLP(WithTowers):
    """FinalMLP: (dense f32[B, N], activations f32[B, F, E]) -> logit f32[B].

    h_s = 2 sigmoid(MLP_s(e_s)) * x for the streams s = 1, 2 (equations 4 and 5), where the context e_s is learned and
    shared by all examples (section 3.2.1, without hand-picked features), o_s = MLP_s(h_s), and logit = b + w_1^T o_1 +
    w_2^T o_2 + sum_h o_1h^T W_h o_2h over H heads (equations 7 and 8).

    Reference: Mao et al., "FinalMLP", AAAI 2023, arXiv 2304.00902.

    Attributes:
      towers: layer sizes of each stream; both last sizes are divisible by `heads`.
      gate: hidden size of the gates.
      heads: H.
    """

    towers: Sequence[Sequence[int]] = ((512, 256), (512, 256))
    gate: int = 64
    heads: int = 8

    @nn.compact
    def __call__(
        self, dense: jax.Array, activations: jax.Array, train: bool = False, counts: jax.Array | None = None
    ) -> jax.Array:
        x = joined(self, dense, activations)
        if any(sizes[-1] % self.heads for sizes in self.towers):
            raise ValueError(f"towers={self.towers} must each end with a multiple of heads={self.heads}.")
        first, second = (self._stream(x, number, sizes, train, counts) for number, sizes in enumerate(self.towers))
        heads = lambda out: out.reshape(out.shape[0], self.heads, -1)
        weight = self.param(
            "bilinear",
            nn.initializers.lecun_normal(batch_axis=0),
            (self.heads, first.shape[1] // self.heads, second.shape[1] // self.heads),
        )
        products = jnp.einsum("bhi,hij,bhj->b", heads(first), weight, heads(second))
        linear = nn.Dense(1, name="first")(first) + nn.Dense(1, use_bias=False, name="second")(second)
        return linear[:, 0] + products

    def _stream(self, x, number, sizes, train, counts):
        context = self.param(f"context_{number}", nn.initializers.normal(1.0), (1, self.gate))
        hidden = nn.relu(nn.Dense(self.gate, name=f"gate_hidden_{number}")(context))
        gate = 2 * nn.sigmoid(nn.Dense(x.shape[1], name=f"gate_{number}")(hidden))
        return Tower(sizes, name=f"tower_{number}", **self.layers)(gate * x, train, counts).T
