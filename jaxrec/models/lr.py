"""Logistic regression over categories (LR), the baseline of every click model.

The first element of a row is the weight of its category, so that all models read the same activations; LR ignores the
other E - 1, the factors of FM. A separate table of weights would cost a second lookup of the same ids.

Legend: B batch, N dense features, F embedding vectors, E embedding width.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp


class LR(nn.Module):
    """Logistic regression: (dense f32[B, N], activations f32[B, F, E]) -> logit f32[B].

    logit = w_0 + sum_i w_i x_i, over one-hot categories (w_i is the first element of each row) and dense features.

    Reference: Richardson et al., "Predicting Clicks", WWW 2007, section 5. AUC on Criteo_x4_001 in BARS: .79336.

    >>> import jax.numpy as jnp
    >>> model = LR()
    >>> dense, activations = jnp.ones((2, 3)), jnp.ones((2, 4, 8))
    >>> model.apply(model.init(jax.random.key(0), dense, activations), dense, activations).tolist()
    [4.0, 4.0]
    """

    @nn.compact
    def __call__(self, dense: jax.Array, activations: jax.Array) -> jax.Array:
        check_inputs(self, dense, activations)
        of_dense = nn.Dense(1, kernel_init=nn.initializers.zeros)(dense)[:, 0]  # includes w_0
        return of_dense + activations[:, :, 0].sum(axis=1)


def check_inputs(model: nn.Module, dense: jax.Array, activations: jax.Array, least_width: int = 1) -> None:
    """Check that dense features and activations have the shapes that all click models take."""
    name = type(model).__name__
    if dense.ndim != 2 or activations.ndim != 3 or dense.shape[0] != activations.shape[0]:
        raise ValueError(
            f"{name} wants dense [B, N] and activations [B, F, E], got {dense.shape} and {activations.shape}."
        )
    if activations.shape[2] < least_width:
        raise ValueError(
            f"{name} wants rows of a width of at least {least_width}, the weight and the factors of a category, and "
            f"these have {activations.shape[2]}: make the tables wider."
        )


def joined(model: nn.Module, dense: jax.Array, activations: jax.Array) -> jax.Array:
    """Return the checked inputs of a model as one vector for each example, f32[B, N + F E], the input of a tower."""
    check_inputs(model, dense, activations)
    return jnp.concatenate([dense, activations.reshape(activations.shape[0], -1)], axis=1)
