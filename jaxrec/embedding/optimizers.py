"""Row optimizers: pure (init, update) pairs that step only the rows a batch touched.

Duplicate ids are reduced before they arrive here, so that a row takes one step per batch. All leave
a row with zero gradient unchanged. `learning_rate` is a float or a schedule of optax, a function of
the step i32[] -> f32[]; the step is that of the dense parameters, 0 at the first update, so that one
schedule given to both halves gives both the same rate.

Legend: E embedding width; gradients, values and slots have any leading shape.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.bounds import is_not_negative, real_number
from jaxrec.types import RowOptimizer, Slot

Rate = float | jax.Array | Callable[[Any], Any]


def sgd(learning_rate: Rate) -> RowOptimizer:
    """Plain gradient descent, v -= lr * g.

    Args:
      learning_rate: lr, a float or a schedule.

    Raises:
      ValueError: the rate is no number of at least 0 and no function; later, the schedule gives no
        number.

    >>> import optax
    >>> update = sgd(optax.linear_schedule(0.5, 0.0, transition_steps=10)).update
    >>> [float(update(jnp.ones(1), jnp.zeros(1), {}, step)[0][0]) for step in (0, 5, 10)]
    [-0.5, -0.25, 0.0]
    """
    _check(learning_rate)

    def update(gradient, value, slots, step):
        return value - _rate(learning_rate, step) * gradient, slots

    return RowOptimizer(lambda width: {}, update)


def adagrad(learning_rate: Rate, initial_accumulator_value=0.0, eps=1e-8) -> RowOptimizer:
    """Adagrad, a += g^2; v -= lr * g / (sqrt(a) + eps), one accumulator per element (Duchi et al.,
    JMLR 2011).

    Args:
      learning_rate: lr, a float or a schedule.
      initial_accumulator_value: value of a for a row never touched.
      eps: added to the root; 1e-8 as in FBGEMM.

    Raises:
      ValueError: as `sgd`.
    """
    _check(learning_rate)

    def update(gradient, value, slots, step):
        accumulator = slots["accumulator"] + gradient * gradient
        return value - _adagrad_step(learning_rate, gradient, accumulator, eps, step), {"accumulator": accumulator}

    return RowOptimizer(lambda width: {"accumulator": Slot(width, initial_accumulator_value)}, update)


def rowwise_adagrad(learning_rate: Rate, initial_accumulator_value=0.0, eps=1e-8) -> RowOptimizer:
    """Row-wise Adagrad, a += mean(g^2); v -= lr * g / (sqrt(a) + eps), one accumulator per row.

    The optimizer of DLRM (arXiv 1906.00091) and of FBGEMM's EXACT_ROWWISE_ADAGRAD: 4 bytes of state
    per row.

    Args:
      learning_rate: lr, a float or a schedule.
      initial_accumulator_value: value of a for a row never touched.
      eps: added to the root; 1e-8 as in FBGEMM.

    Raises:
      ValueError: as `sgd`.
    """
    _check(learning_rate)

    def update(gradient, value, slots, step):
        accumulator = slots["accumulator"] + jnp.mean(gradient * gradient, axis=-1, keepdims=True)
        return value - _adagrad_step(learning_rate, gradient, accumulator, eps, step), {"accumulator": accumulator}

    return RowOptimizer(lambda width: {"accumulator": Slot(1, initial_accumulator_value)}, update)


def _adagrad_step(learning_rate, gradient, accumulator, eps, step):
    # Guard: with accumulator 0 and eps 0 an untouched row would turn into NaN.
    root = jnp.sqrt(accumulator) + eps
    return jnp.where(root > 0, _rate(learning_rate, step) * gradient / root, 0.0)


def _rate(learning_rate, step):
    if not callable(learning_rate):
        return learning_rate
    rate = learning_rate(step)
    if callable(rate) or rate is None or np.shape(rate) != ():
        what = f"an array of shape {np.shape(rate)}" if np.shape(rate) else f"a {type(rate).__name__}"
        raise ValueError(
            f"the schedule {learning_rate!r:.80} gave {what} at a step, but it gives one number: "
            "f(step i32[]) -> f32[], as optax.cosine_decay_schedule(0.1, steps) returns one."
        )
    return rate


def _check(learning_rate):
    """Refuses what is no rate where it is given, and not where it is traced."""
    if callable(learning_rate) or (isinstance(learning_rate, jax.Array | np.ndarray) and learning_rate.shape == ()):
        return
    real_number("learning_rate", learning_rate, "0 or more and finite, or a schedule (step -> rate)", is_not_negative)
