"""DCNv2: full or low-rank cross layers and a deep tower, stacked or in parallel (Wang et al., arXiv 2008.13535).

Legend: B batch, N dense features, F embedding vectors, E embedding width, X = N + F E, r rank; N is the last size of
`bottom` if there is one.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrec.models.lr import check_inputs
from jaxrec.models.tower import Tower, WithTowers, aligned_product


class DCNv2(WithTowers):
    """Deep and cross network: (dense f32[B, N], activations f32[B, F, E]) -> logit f32[B].

    x_0 f32[B, X] concatenates the dense features and all embeddings. The cross layers learn products of features
    explicitly, the tower learns the rest.

    Reference: Wang et al., "DCN V2", WWW 2021, arXiv 2008.13535, sections 3.2 to 3.4. With `bottom`, a rank and
    `parallel=False` it is the DLRM-DCNv2 of MLPerf Training.

    Attributes:
      cross_layers: number of cross layers.
      rank: r in W = U V^T; None for a full matrix.
      tower: layer sizes of the deep tower.
      parallel: whether the tower reads x_0, beside the cross layers, instead of their output.
      bottom: layer sizes of an MLP applied to the dense features first; empty for none.
    """

    cross_layers: int = 3
    rank: int | None = None
    tower: Sequence[int] = (512, 256)
    parallel: bool = True
    bottom: Sequence[int] = ()

    @nn.compact
    def __call__(
        self, dense: jax.Array, activations: jax.Array, train: bool = False, counts: jax.Array | None = None
    ) -> jax.Array:
        check_inputs(self, dense, activations)
        dense = Tower(self.bottom, name="bottom_tower", **self.layers)(dense, train, counts).T if self.bottom else dense
        x0 = jnp.concatenate([dense, activations.reshape(activations.shape[0], -1)], axis=1)
        crossed = x0
        for _ in range(self.cross_layers):
            crossed = Cross(self.rank)(x0, crossed)
        deep = Tower(self.tower, **self.layers)(x0 if self.parallel else crossed, train, counts).T
        last = jnp.concatenate([crossed, deep], axis=1) if self.parallel else deep
        return nn.Dense(1)(last)[:, 0]


class Cross(nn.Module):
    """One cross layer, x_{l+1} = x_0 * (W x_l + b) + x_l, where W may be U V^T of rank r (eqs. 1 and 2).

    Attributes:
      rank: r; None for a full matrix.
    """

    rank: int | None = None

    @nn.compact
    def __call__(self, x0: jax.Array, x: jax.Array) -> jax.Array:
        width = x0.shape[1]
        if self.rank is not None:
            if not 1 <= self.rank < width:
                raise ValueError(f"rank={self.rank} must lie between 1 and {width - 1}, one less than the features.")
            x_low = nn.Dense(self.rank, use_bias=False, dot_general=aligned_product)(x)
            return x0 * nn.Dense(width, dot_general=aligned_product)(x_low) + x
        return x0 * nn.Dense(width, dot_general=aligned_product)(x) + x
