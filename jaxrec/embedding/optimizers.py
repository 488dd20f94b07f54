"""Row optimizers: pure (init, update) pairs that step only the rows a batch touched.

Duplicate ids are reduced before they arrive here, so that a row takes one step per batch. All leave
a row with zero gradient unchanged. `learning_rate` is a float or a function of the step, i32[] ->
f32[].

Legend: E embedding width; gradients, values and slots have any leading shape.
"""

import jax
import jax.numpy as jnp

from jaxrec.types import RowOptimizer, Slot


def sgd(learning_rate) -> RowOptimizer:
    """Plain gradient descent, v -= lr * g.

    >>> update = sgd(0.5).update
    >>> float(update(jnp.ones(1), jnp.zeros(1), {}, 0)[0][0])
    -0.5
    """

    def update(gradient, value, slots, step):
        return value - _rate(learning_rate, step) * gradient, slots

    return RowOptimizer(lambda width: {}, update)


def adagrad(learning_rate, initial_accumulator_value=0.0, eps=1e-8) -> RowOptimizer:
    """Adagrad, a += g^2; v -= lr * g / (sqrt(a) + eps), one accumulator per element (Duchi et al.,
    JMLR 2011).

    Args:
      learning_rate: lr, a float or a function of the step.
      initial_accumulator_value: value of a for a row never touched.
      eps: added to the root; 1e-8 as in FBGEMM.
    """

    def update(gradient, value, slots, step):
        accumulator = slots["accumulator"] + gradient * gradient
        return value - _adagrad_step(learning_rate, gradient, accumulator, eps, step), {"accumulator": accumulator}

    return RowOptimizer(lambda width: {"accumulator": Slot(width, initial_accumulator_value)}, update)


def rowwise_adagrad(learning_rate, initial_accumulator_value=0.0, eps=1e-8) -> RowOptimizer:
    """Row-wise Adagrad, a += mean(g^2); v -= lr * g / (sqrt(a) + eps), one accumulator per row.

    The optimizer of DLRM (arXiv 1906.00091) and of FBGEMM's EXACT_ROWWISE_ADAGRAD: 4 bytes of state
    per row.

    Args:
      learning_rate: lr, a float or a function of the step.
      initial_accumulator_value: value of a for a row never touched.
      eps: added to the root; 1e-8 as in FBGEMM.
    """

    def update(gradient, value, slots, step):
        accumulator = slots["accumulator"] + jnp.mean(gradient * gradient, axis=-1, keepdims=True)
        return value - _adagrad_step(learning_rate, gradient, accumulator, eps, step), {"accumulator": accumulator}

    return RowOptimizer(lambda width: {"accumulator": Slot(1, initial_accumulator_value)}, update)


def _adagrad_step(learning_rate, gradient, accumulator, eps, step):
    # Guard: with accumulator 0 and eps 0 an untouched row would turn into NaN.
    root = jnp.sqrt(accumulator) + eps
    return jnp.where(root > 0, _rate(learning_rate, step) * gradient / root, 0.0)


def _rate(learning_rate, step) -> jax.Array | float:
    return learning_rate(step) if callable(learning_rate) else learning_rate
