"""DCNv2: cross layers, full or low rank, and a deep tower, stacked or parallel (Wang et al., arXiv
2008.13535).

Legend: B batch, N dense features, F embedding vectors, E embedding width, X = N + F E, r rank; N is
the last size of `bottom` if there is one.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrec.models.tower import Tower


class DCNv2(nn.Module):
    """Deep and cross network: (dense f32[B, N], activations f32[B, F, E]) -> logit f32[B].

    x_0 is the dense features beside all embeddings, f32[B, X]; the cross layers learn products of
    features explicitly, the tower learns the rest.

    Reference: Wang et al., "DCN V2", WWW 2021, arXiv 2008.13535, sections 3.2 to 3.4. With `bottom`, a rank
    and `parallel=False` it is the DLRM-DCNv2 of MLPerf Training.

    Attributes:
      cross_layers: how many cross layers.
      rank: r of W = U V^T; a full matrix if None.
      tower: layer sizes of the deep tower.
      parallel: the tower beside the cross layers instead of after them.
      bottom: layer sizes that the dense features pass first; none if empty.
    """

    cross_layers: int = 3
    rank: int | None = None
    tower: Sequence[int] = (512, 256)
    parallel: bool = True
    bottom: Sequence[int] = ()

    @nn.compact
    def __call__(self, dense: jax.Array, activations: jax.Array) -> jax.Array:
        if dense.ndim != 2 or activations.ndim != 3 or len(dense) != len(activations):
            raise ValueError(
                f"DCNv2 wants dense [B, N] and activations [B, F, E], got {dense.shape} and {activations.shape}."
            )
        dense = Tower(self.bottom, name="bottom_tower")(dense).T if self.bottom else dense
        x0 = jnp.concatenate([dense, activations.reshape(len(activations), -1)], axis=1)
        crossed = x0
        for _ in range(self.cross_layers):
            crossed = Cross(self.rank)(x0, crossed)
        deep = Tower(self.tower)(x0 if self.parallel else crossed).T
        last = jnp.concatenate([crossed, deep], axis=1) if self.parallel else deep
        return nn.Dense(1)(last)[:, 0]


class Cross(nn.Module):
    """One cross layer, x_{l+1} = x_0 * (W x_l + b) + x_l, with W = U V^T of rank r if there is one
    (eqs. 1 and 2).

    Attributes:
      rank: r, or None for a full matrix.
    """

    rank: int | None = None

    @nn.compact
    def __call__(self, x0: jax.Array, x: jax.Array) -> jax.Array:
        width = x0.shape[1]
        if self.rank is not None:
            if not 1 <= self.rank < width:
                raise ValueError(f"rank={self.rank} must lie between 1 and {width - 1}, one less than the features.")
            x_low = nn.Dense(self.rank, use_bias=False)(x)
            return x0 * nn.Dense(width)(x_low) + x
        return x0 * nn.Dense(width)(x) + x
