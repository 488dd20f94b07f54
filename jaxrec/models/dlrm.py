"""DLRM: bottom MLP, dot interaction, top MLP (Naumov et al., arXiv 1906.00091).

Legend: B batch, N dense features, F embedding vectors, E embedding width, P = (F + 1) F / 2 pairs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.models.tower import Tower, WithTowers

# With XLA:CPU of jaxlib 0.10 the products take twice as long once the vectors exceed the caches. In pieces, the whole
# step is 1.1 times as fast at width 128. Later versions are faster without pieces.
NUMBERS_AT_ONCE = 1 << 21 if jax.__version_info__ < (0, 11) else 1 << 62
EXAMPLES_IN_A_PIECE = 128


class DLRM(WithTowers):
    """Deep learning recommendation model: (dense f32[B, N], activations f32[B, F, E]) -> logit f32[B].

    Weights are normal, cut off at two deviations, with variance 2 / (fan in + fan out), biases normal with variance
    1 / fan out, as in the reference code.

    Reference: Naumov et al., arXiv 1906.00091, section 2.

    Results: one pass over the first 91,666 of 110,000 Criteo Kaggle rows (in time order) with the defaults of
    `experiments/train.py --data criteo` gives a test AUC of 0.7607 to 0.7618 (3 seeds) and a normalised entropy of
    0.849. Published single-epoch results on the whole set are near an AUC of 0.80.

    Attributes:
      bottom: layer sizes of the MLP over the dense features; the last one is E.
      top: layer sizes of the MLP after the interaction, at least two; the last one is 1.
    """

    bottom: Sequence[int] = (512, 256, 64, 16)
    top: Sequence[int] = (512, 256, 1)

    @nn.compact
    def __call__(
        self, dense: jax.Array, activations: jax.Array, train: bool = False, counts: jax.Array | None = None
    ) -> jax.Array:
        if len(self.top) < 2 or self.top[-1] != 1:
            raise ValueError(f"top={tuple(self.top)} must have at least two sizes, the last one 1.")
        if dense.ndim != 2 or activations.ndim != 3 or self.bottom[-1] != activations.shape[-1]:
            raise ValueError(
                f"DLRM wants dense [B, N] and activations [B, F, {self.bottom[-1]}] (the last size "
                f"of `bottom`), got {dense.shape} and {activations.shape}."
            )
        how: dict[str, Any] = {"kernel_init": nn.initializers.glorot_normal(), "bias_deviation": 1.0, **self.layers}
        bottom = Tower(self.bottom, name="bottom_tower", **how)(dense, train, counts).T
        features = jnp.concatenate([bottom, dot_interaction(bottom, activations)], axis=1)
        x = Tower(self.top[:-1], name="top_tower", **how)(features, train, counts)
        kernel = self.param("kernel", nn.initializers.glorot_normal(), (x.shape[0], 1))
        bias = self.param("bias", nn.initializers.normal(1.0), (1,))
        return kernel[:, 0] @ x + bias


@jax.custom_vjp
def dot_interaction(bottom: jax.Array, activations: jax.Array) -> jax.Array:
    """Compute the dot products of all pairs of distinct vectors of an example; `bottom` is the first vector.

    The derivative is written out: autodiff would scatter the P gradients into a [F + 1, F + 1] matrix, the slowest
    operation of the whole step on a CPU, where gathering them into the symmetric matrix suffices.

    Args:
      bottom: f32[B, E].
      activations: f32[B, F, E].

    Returns:
      f32[B, P]: the strict lower triangle, row by row, of the products of all F + 1 vectors.

    >>> one = lambda *rows: jnp.array([rows], jnp.float32)
    >>> dot_interaction(one(1, 2), one((3, 4), (5, 6))).tolist()  # 1 3 + 2 4, 1 5 + 2 6, 3 5 + 4 6
    [[11.0, 17.0, 39.0]]
    """
    size = activations.shape[1] + 1
    row, column = np.tril_indices(size, -1)
    place = row * size + column

    def pairs(activations, bottom):
        vectors = jnp.concatenate([bottom[None], activations])
        return (vectors @ vectors.T).reshape(-1).at[place].get(mode="promise_in_bounds")

    return of_each_example(pairs, activations, bottom)


def _interaction_forward(bottom, activations):
    return dot_interaction(bottom, activations), (bottom, activations)


def _interaction_backward(saved, gradient):
    # With Z = X X^T, dX = (G + G^T) X; G holds the gradients below its diagonal, zeros elsewhere.
    bottom, activations = saved
    size = activations.shape[1] + 1
    pairs = size * (size - 1) // 2
    place = np.full((size, size), pairs)
    place[np.tril_indices(size, -1)] = np.arange(pairs)
    place = np.minimum(place, place.T).reshape(-1)

    def by_vectors(activations, bottom, gradient):
        symmetric = jnp.pad(gradient, (0, 1)).at[place].get(mode="promise_in_bounds").reshape(size, size)
        found = symmetric @ jnp.concatenate([bottom[None], activations])
        return found[0], found[1:]

    return of_each_example(by_vectors, activations, bottom, gradient)


dot_interaction.defvjp(_interaction_forward, _interaction_backward)


def of_each_example(function: Callable, vectors: jax.Array, *others: jax.Array) -> Any:
    """Map a function over the examples of arrays [B, ...], all at once or, where that is faster, in pieces."""
    whole = jax.vmap(function)
    # The size is no int if the batch is symbolic, as in an export for batches of any size.
    if not isinstance(vectors.size, int) or vectors.size <= NUMBERS_AT_ONCE:
        return whole(vectors, *others)
    pieces = lambda *each: jax.lax.map(lambda example: function(*example), each, batch_size=EXAMPLES_IN_A_PIECE)
    return jax.lax.platform_dependent(vectors, *others, cpu=pieces, default=whole)
