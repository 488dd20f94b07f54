"""A tower over all features: alone (DNN), beside a linear part (Wide & Deep), or beside an FM (DeepFM).

Legend: B batch, N dense features, F embedding vectors, E embedding width.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax

from jaxrec.models.fm import FM
from jaxrec.models.lr import LR, check_inputs, joined
from jaxrec.models.tower import Tower, WithTowers


class DNN(WithTowers):
    """A deep tower: (dense f32[B, N], activations f32[B, F, E]) -> logit f32[B].

    logit = w^T a_L + b, a_{l+1} = relu(W_l a_l + b_l), where a_0 concatenates the dense features and all embeddings.

    Reference: Covington et al., "Deep Neural Networks for YouTube Recommendations", RecSys 2016, section 4.3. AUC on
    Criteo_x4_001 in BARS: .81404.

    Attributes:
      tower: layer sizes.
    """

    tower: Sequence[int] = (512, 256)

    @nn.compact
    def __call__(
        self, dense: jax.Array, activations: jax.Array, train: bool = False, counts: jax.Array | None = None
    ) -> jax.Array:
        x = joined(self, dense, activations)
        return nn.Dense(1)(Tower(self.tower, **self.layers)(x, train, counts).T)[:, 0]


class WideAndDeep(WithTowers):
    """Wide & Deep: (dense f32[B, N], activations f32[B, F, E]) -> logit f32[B].

    logit = w_wide^T x + w_deep^T a_L + b: a linear part and a tower, trained jointly. The linear part is `LR` over the
    first element of each row; the tower reads the other E - 1 elements and the dense features.

    Reference: Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016, equation 3. Prepare the paper's
    crossed columns as additional categorical columns. AUC on Criteo_x4_001 in BARS: .81423.

    Attributes:
      tower: layer sizes.
    """

    tower: Sequence[int] = (512, 256)

    @nn.compact
    def __call__(
        self, dense: jax.Array, activations: jax.Array, train: bool = False, counts: jax.Array | None = None
    ) -> jax.Array:
        check_inputs(self, dense, activations, 2)
        deep = DNN(self.tower, name="deep", **self.layers)(dense, activations[:, :, 1:], train, counts)
        return LR(name="wide")(dense, activations) + deep


class DeepFM(WithTowers):
    """DeepFM: (dense f32[B, N], activations f32[B, F, E]) -> logit f32[B].

    logit = y_FM + y_DNN, a factorization machine and a tower over the same embeddings.

    Reference: Guo et al., "DeepFM", IJCAI 2017, equation 1. AUC on Criteo_x4_001 in BARS: .81433.

    Attributes:
      tower: layer sizes.
    """

    tower: Sequence[int] = (512, 256)

    @nn.compact
    def __call__(
        self, dense: jax.Array, activations: jax.Array, train: bool = False, counts: jax.Array | None = None
    ) -> jax.Array:
        check_inputs(self, dense, activations, 2)
        deep = DNN(self.tower, name="deep", **self.layers)(dense, activations[:, :, 1:], train, counts)
        return FM(name="fm")(dense, activations) + deep
