"""Row optimizers: pure (init, update) pairs that update only the rows a batch touched.

Gradients of duplicate ids are summed beforehand, so that a row takes one step per batch. A row with zero gradient stays
unchanged, including its slots: moments of untouched rows do not decay ("lazy"). `learning_rate` is a float or an optax
schedule, step i32[] -> f32[]; the step is that of the dense parameters, 0 at the first update, so that one schedule
gives dense parameters and rows the same rate.

| | slots of a row, floats | equivalent, if every step touches every row |
|---|---|---|
| `sgd` | 0 | `optax.sgd` |
| `momentum_sgd` | E | `optax.sgd(momentum=, nesterov=)` |
| `adagrad` | E | `optax.adagrad`, which has eps below the root |
| `rowwise_adagrad` | 1 | FBGEMM's EXACT_ROWWISE_ADAGRAD |
| `lazy_adam` | 2 E + 1 | `optax.adamw` |
| `rowwise_adam` | E + 2 | FBGEMM's PARTIAL_ROWWISE_ADAM |
| `ftrl` | 2 E | FTRL-proximal (McMahan et al., KDD 2013, algorithm 1) |

`with_weight_decay` and `with_clipping` wrap any of them, or a RowOptimizer of your own.

Legend: E embedding width; gradients, values and slots have any leading shape.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.bounds import is_not_negative, real_number
from jaxrec.embedding.spec import check_row_optimizer
from jaxrec.types import RowOptimizer, Slot

Rate = float | jax.Array | Callable[[Any], Any]


def sgd(learning_rate: Rate) -> RowOptimizer:
    """Plain gradient descent, v -= lr * g.

    Args:
      learning_rate: lr, a float or a schedule.

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
    """Adagrad, a += g^2; v -= lr * g / (sqrt(a) + eps), one accumulator per element (Duchi et al., JMLR 2011).

    Args:
      learning_rate: lr, a float or a schedule.
      initial_accumulator_value: initial value of a.
      eps: added to the root; 1e-8 as in FBGEMM.
    """
    return _adagrad(learning_rate, initial_accumulator_value, eps, lambda width: width, lambda squares: squares)


def rowwise_adagrad(learning_rate: Rate, initial_accumulator_value=0.0, eps=1e-8) -> RowOptimizer:
    """Row-wise Adagrad, a += mean(g^2); v -= lr * g / (sqrt(a) + eps), one accumulator per row.

    The optimizer of DLRM (arXiv 1906.00091), FBGEMM's EXACT_ROWWISE_ADAGRAD: 4 bytes of state per row.

    Args:
      learning_rate: lr, a float or a schedule.
      initial_accumulator_value: initial value of a.
      eps: added to the root; 1e-8 as in FBGEMM.
    """
    return _adagrad(learning_rate, initial_accumulator_value, eps, lambda width: 1, _mean)


def _adagrad(learning_rate, initial_accumulator_value, eps, width_of, sum_of):
    _check(learning_rate)
    start, eps = _least_zero("initial_accumulator_value", initial_accumulator_value), _least_zero("eps", eps)

    def update(gradient, value, slots, step):
        accumulator = slots["accumulator"] + sum_of(gradient * gradient)
        # Guard: with accumulator 0 and eps 0 an untouched row would become NaN. A row that is NaN must tell.
        root = jnp.sqrt(accumulator) + eps
        move = jnp.where(root == 0, 0.0, _rate(learning_rate, step) * gradient / root)
        return value - move, {"accumulator": accumulator}

    return RowOptimizer(lambda width: {"accumulator": Slot(width_of(width), start)}, update)


def _mean(squares):
    return jnp.mean(squares, axis=-1, keepdims=True)


def momentum_sgd(learning_rate: Rate, momentum: float = 0.9, nesterov: bool = False) -> RowOptimizer:
    """Gradient descent with momentum, u = momentum * u + g; v -= lr * u, one velocity per element.

    With Nesterov's momentum v -= lr * (g + momentum * u) (Sutskever et al., ICML 2013; the form of optax and PyTorch).

    Args:
      learning_rate: lr, a float or a schedule.
      momentum: decay rate of the velocity per update of a row, in [0, 1).
      nesterov: use Nesterov's momentum.
    """
    _check(learning_rate)
    momentum = _share("momentum", momentum)

    def update(gradient, value, slots, step):
        velocity = momentum * slots["velocity"] + gradient
        move = gradient + momentum * velocity if nesterov else velocity
        new = value - _rate(learning_rate, step) * move, {"velocity": velocity}
        return _where_touched(gradient, new, (value, slots))

    return RowOptimizer(lambda width: {"velocity": Slot(width, 0.0)}, update)


def lazy_adam(learning_rate: Rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0) -> RowOptimizer:
    """Adam (Kingma and Ba, ICLR 2015, algorithm 1) whose moments do not decay while a row is untouched.

    m = b1 m + (1 - b1) g, s = b2 s + (1 - b2) g^2, and at the t-th update of this row
    v -= lr * (m / (1 - b1^t) / (sqrt(s / (1 - b2^t)) + eps) + weight_decay * v). Since t counts updates of the row, not
    training steps, the first updates of rare rows are as large as those of frequent ones.

    Args:
      learning_rate: lr, a float or a schedule.
      b1, b2: decay rates of the first and second moment per update of a row, in [0, 1).
      eps: added to the root.
      weight_decay: decoupled, as in AdamW (Loshchilov and Hutter, ICLR 2019); 0 or more.
    """
    return _adam(learning_rate, b1, b2, eps, weight_decay, lambda width: width, lambda squares: squares)


def rowwise_adam(learning_rate: Rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0) -> RowOptimizer:
    """`lazy_adam` with one second moment per row, s = b2 s + (1 - b2) mean(g^2), as FBGEMM's PARTIAL_ROWWISE_ADAM.

    E + 2 floats of state per row instead of 2 E + 1.

    Args:
      learning_rate, b1, b2, eps, weight_decay: as for `lazy_adam`.
    """
    return _adam(learning_rate, b1, b2, eps, weight_decay, lambda width: 1, _mean)


def _adam(learning_rate, b1, b2, eps, weight_decay, second_width, second_of):
    _check(learning_rate)
    b1, b2, eps = _share("b1", b1), _share("b2", b2), _least_zero("eps", eps)
    weight_decay = _least_zero("weight_decay", weight_decay)

    def init(width):
        return {"first": Slot(width, 0.0), "second": Slot(second_width(width), 0.0), "touches": Slot(1, 0.0)}

    def update(gradient, value, slots, step):
        touches = slots["touches"] + 1
        first = b1 * slots["first"] + (1 - b1) * gradient
        second = b2 * slots["second"] + (1 - b2) * second_of(gradient * gradient)
        root = jnp.sqrt(second / (1 - b2**touches)) + eps
        # Guard: with eps 0 a row of zero gradient would give NaN before it is masked. A row that is NaN must tell.
        move = jnp.where(root == 0, 0.0, first / (1 - b1**touches) / root)
        move = move + weight_decay * value if weight_decay else move
        new = value - _rate(learning_rate, step) * move, {"first": first, "second": second, "touches": touches}
        return _where_touched(gradient, new, (value, slots))

    return RowOptimizer(init, update)


def ftrl(learning_rate: Rate, beta=1.0, l1=0.0, l2=0.0) -> RowOptimizer:
    """FTRL-proximal (McMahan et al., KDD 2013, algorithm 1), which keeps rarely used weights at exactly 0.

    With n the sum of g^2 and z that of g - (sqrt(n + g^2) - sqrt(n)) / lr * v:
    v = 0 where |z| <= l1, else -(z - sign(z) l1) / ((beta + sqrt(n)) / lr + l2).

    The paper starts from v = 0 with a constant rate. Here rows start at random and rates may follow a schedule: where v
    is not 0, z is recomputed from that equation with the rate of this step, so that the row continues from its current
    value. With v = 0 initially, `Table(scale=0.0)`, and a constant rate it is the paper's algorithm.

    Args:
      learning_rate: lr (alpha in the paper), a float or a schedule.
      beta: shortens the first steps, 0 or more.
      l1, l2: penalties, 0 or more.
    """
    _check(learning_rate)
    beta, l1, l2 = _least_zero("beta", beta), _least_zero("l1", l1), _least_zero("l2", l2)

    def update(gradient, value, slots, step):
        # Guard: division by a rate of 0, at which a warm-up starts.
        rate, old = jnp.maximum(_rate(learning_rate, step), 1e-30), slots["squares"]
        squares = old + gradient * gradient
        stiffness = lambda total: (beta + jnp.sqrt(total)) / rate + l2
        linear = jnp.where(value != 0, -value * stiffness(old) - jnp.sign(value) * l1, slots["linear"])
        linear = linear + gradient - (jnp.sqrt(squares) - jnp.sqrt(old)) / rate * value
        # Guard: 0 / 0 with beta = l2 = 0, where all gradients so far were 0.
        still = (jnp.abs(linear) <= l1) | (stiffness(squares) == 0)
        moved = jnp.where(still, 0.0, -(linear - jnp.sign(linear) * l1) / stiffness(squares))
        return _where_touched(gradient, (moved, {"squares": squares, "linear": linear}), (value, slots))

    return RowOptimizer(lambda width: {"squares": Slot(width, 0.0), "linear": Slot(width, 0.0)}, update)


def with_weight_decay(optimizer: RowOptimizer, rate: float) -> RowOptimizer:
    """Add L2 regularisation of touched rows: the gradient becomes g + rate * v.

    As `optax.chain(optax.add_decayed_weights(rate), ...)` and FBGEMM's WeightDecayMode.L2. Untouched rows do not decay.
    `lazy_adam` also has the decoupled form.

    Args:
      optimizer: RowOptimizer to wrap.
      rate: decay rate, 0 or more; CTR models of BARS use 1e-6 to 1e-4.

    >>> optimizer = with_weight_decay(sgd(1.0), 0.1)
    >>> optimizer.update(jnp.array([[1.0], [0.0]]), jnp.array([[10.0], [10.0]]), {}, 0)[0].tolist()
    [[8.0], [10.0]]
    """
    check_row_optimizer(optimizer)
    rate = _least_zero("rate", rate)

    def update(gradient, value, slots, step):
        decayed = jnp.where(_touched(gradient), gradient + rate * value, 0.0)
        return _where_touched(gradient, optimizer.update(decayed, value, slots, step), (value, slots))

    return RowOptimizer(optimizer.init, update)


def with_clipping(optimizer: RowOptimizer, largest_norm: float) -> RowOptimizer:
    """Clip the gradient of each row to a norm: g * min(1, largest_norm / |g|).

    Rows are clipped individually, as the norm over all rows of a batch would depend on their number.

    Args:
      optimizer: RowOptimizer to wrap.
      largest_norm: maximum norm of a row's gradient, summed over the batch; above 0.

    >>> optimizer = with_clipping(sgd(1.0), 5.0)
    >>> optimizer.update(jnp.array([[6.0, 8.0], [0.0, 1.0]]), jnp.zeros((2, 2)), {}, 0)[0].tolist()
    [[-3.0, -4.0], [0.0, -1.0]]
    """
    check_row_optimizer(optimizer)
    largest = real_number("largest_norm", largest_norm, "above 0 and finite", lambda x: 0 < x < np.inf)

    def update(gradient, value, slots, step):
        norm = jnp.sqrt(jnp.sum(gradient * gradient, axis=-1, keepdims=True))
        return optimizer.update(gradient * (largest / jnp.maximum(norm, largest)), value, slots, step)

    return RowOptimizer(optimizer.init, update)


def _touched(gradient):
    """Return which rows take a step, bool[..., 1]; the others are padding, or do not affect the loss."""
    return jnp.any(gradient != 0, axis=-1, keepdims=True)


def _where_touched(gradient, new, old):
    touched = _touched(gradient)
    (value, slots), (value_before, slots_before) = new, old
    return jnp.where(touched, value, value_before), {
        name: jnp.where(touched, slots[name], slots_before[name]) for name in slots
    }


def _rate(learning_rate, step):
    if not callable(learning_rate):
        return learning_rate
    rate = learning_rate(step)
    if np.shape(rate) != ():
        raise ValueError(
            f"the schedule {learning_rate!r:.80} gave an array of shape {np.shape(rate)} at a step, but a rate is one "
            "number."
        )
    return rate


def _check(learning_rate):
    """Raise ValueError for an invalid rate at construction rather than during tracing."""
    if callable(learning_rate) or (isinstance(learning_rate, jax.Array | np.ndarray) and learning_rate.shape == ()):
        return
    real_number("learning_rate", learning_rate, "0 or more and finite, or a schedule (step -> rate)", is_not_negative)


def _share(name, value):
    return real_number(name, value, "0 or more and below 1", lambda x: 0 <= x < 1)


def _least_zero(name, value):
    return real_number(name, value, "0 or more and finite", is_not_negative)
