"""How replicas are brought together: EASGD, model averaging and BMUF as pure functions.

A rule is three functions on any pytrees of arrays, numpy's or JAX's; on numpy arrays they launch no
program. A round of synchronisation is

    before         = a copy of a trainer's parameters              the trainer trains on meanwhile
    shared, target = combine(shared, before or the mean of all)    in the background
    live           = merge(live, before, target)                   on what they are by then

and in the foreground the same with `before` = `live`. EASGD has a centre, with which each trainer
makes rounds of its own; model averaging and BMUF combine the mean over all trainers, the same for
each.

Reference: Zheng et al., ShadowSync, arXiv 2003.03477, of which the public abstract is all that
could be checked; the equations are those of the papers named at each rule. Optimizer state and
embedding rows are never synchronised.

Floating leaves are computed in float32, or float64 if they are that wide, so that a mean of many
small floats neither overflows nor loses digits; `merge` returns the dtypes of `live`. All other
leaves (counters, booleans, PRNG keys) are left as the first argument has them: each replica keeps
its own.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.bounds import is_portion, is_positive, real_number
from jaxrec.types import PyTree


class Rule(NamedTuple):
    """A way to synchronise, as pure functions."""

    name: str
    # Combine takes one trainer's parameters at a time; else the mean over all of them.
    has_centre: bool
    init: Callable[[PyTree], Any]  # initial parameters -> shared
    # Shared, one trainer's or the mean -> shared', target.
    combine: Callable[[Any, PyTree], tuple[Any, PyTree]]
    merge: Callable[[PyTree, PyTree, PyTree], PyTree]  # live, before, target -> live'
    settings: tuple[tuple[str, Any], ...] = ()  # (name, value) of all its numbers

    def describe(self) -> str:
        """The call that makes it."""
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.settings)})"


class Block(NamedTuple):
    """What BMUF shares, the same on all trainers."""

    parameters: PyTree  # the global model
    momentum: PyTree


def easgd(alpha: float = 0.5, form: str = "symmetric") -> Rule:
    """Elastic averaging SGD: trainer and centre move towards each other (Zhang et al., 1412.6651).

    symmetric:   c' = c + alpha (w - c)    live' = live + alpha (c - w)    keeps the sum of all w and c
    sequential:  c' = c + alpha (w - c)    live' = live + alpha (c' - live)

    w are the trainer's parameters when the round began. Without training in between, a round brings
    w - c to (1 - 2 alpha) (w - c) in the first form and to (1 - alpha)^2 (w - c) in the second.

    In the symmetric form the centre takes no step of its own, but moves with the others: this slows
    convergence by a factor n / (n + 1), whatever alpha and the gap. That is 2/3 for two trainers; model
    averaging does not slow it.

    Args:
      alpha: elastic weight, above 0 and at most 1.
      form: 'symmetric', as the EASGD paper, or 'sequential', where the trainer sees the centre that
        it has moved.

    Raises:
      ValueError: alpha outside (0, 1]; another form.
    """
    alpha = _checked_alpha(alpha)
    if form not in ("symmetric", "sequential"):
        raise ValueError(f"form={form!r} must be 'symmetric' or 'sequential'.")

    def combine(centre, before):
        moved = _map(lambda c, w: c + alpha * (w - c), centre, before)
        return moved, centre if form == "symmetric" else moved

    def merge(live, before, target):
        seen = before if form == "symmetric" else live
        return _like(live, _map(lambda x, w, c: x + alpha * (c - w), live, seen, target))

    return Rule("easgd", True, _copy, combine, merge, (("alpha", alpha), ("form", form)))


def model_averaging(alpha: float = 0.5, form: str = "delta") -> Rule:
    """Model averaging: every trainer moves towards the mean over all trainers.

    delta:  live' = live + alpha (mean - before)     all that was learned is kept
    lerp:   live' = (1 - alpha) live + alpha mean    of what was learned meanwhile, 1 - alpha is kept

    The delta form with alpha = 1 is that of hivemind and Bagua.
    In the foreground nothing is learned during a round, and the two are the same. In a shadow
    `lerp` goes back towards a mean of the past in every round: a classifier trained so ended below
    one without any synchronisation (experiments/shadowsync_classifier.py, whose results are not kept),
    and by `delta` above it.

    Args:
      alpha: weight of the mean, above 0 and at most 1.
      form: 'delta', or 'lerp', as we recall the equation of ShadowSync.

    Raises:
      ValueError: alpha outside (0, 1]; another form.
    """
    settings, merge = (("alpha", _checked_alpha(alpha)), ("form", form)), _towards(alpha, form)
    return Rule("ma", False, lambda parameters: (), lambda shared, mean: (shared, mean), merge, settings)


def bmuf(alpha: float = 0.5, eta: float = 1.0, momentum: float = 0.0, form: str = "delta") -> Rule:
    """Block-wise model update filtering: the mean is a direction for a global model.

    Reference: Chen and Huo, ICASSP 2016.

    v' = momentum v + eta (mean - g)    g' = g + v'    live' as in model averaging, with g' for mean

    The global model g' and not a Nesterov-shifted one is what trainers move to. With eta = 1 and no
    momentum this is model averaging, up to rounding.

    Args:
      alpha: weight of the global model, above 0 and at most 1.
      eta: block step size, above 0.
      momentum: block momentum, from 0 to below 1.
      form: 'delta' or 'lerp', for the reason given there.

    Raises:
      ValueError: a number outside its range; another form.
    """
    alpha, eta = _checked_alpha(alpha), float(real_number("eta", eta, "above 0", is_positive))
    momentum = float(real_number("momentum", momentum, "from 0 to below 1", lambda x: 0 <= x < 1))

    def init(parameters):
        return Block(_copy(parameters), _map(lambda x: 0 * x, parameters))

    def combine(block, mean):
        velocity = _map(lambda v, w, g: momentum * v + eta * (w - g), block.momentum, mean, block.parameters)
        moved = _map(lambda g, v: g + v, block.parameters, velocity)
        return Block(moved, velocity), moved

    settings = (("alpha", alpha), ("eta", eta), ("momentum", momentum), ("form", form))
    return Rule("bmuf", False, init, combine, _towards(alpha, form), settings)


def mean_of(replicas: list[PyTree]) -> PyTree:
    """The mean of trees of one structure and of the same shapes, summed in their order, in float32 or wider."""
    if not replicas:
        raise ValueError("the mean of no replicas: give at least one.")
    return _map(lambda *leaves: sum(leaves[1:], leaves[0]) / len(leaves), *replicas)


def is_synchronised(leaf) -> bool:
    """Whether rules touch a leaf: it is floating.

    >>> [is_synchronised(x) for x in (np.float16(1), np.int32(1), True, jax.random.key(0))]
    [True, False, False, False]
    """
    return _is_floating(getattr(leaf, "dtype", None) or np.asarray(leaf).dtype)


@functools.lru_cache(maxsize=256)  # a question for each leaf of each exchange
def _is_floating(dtype):
    return bool(jnp.issubdtype(dtype, jnp.floating))


def wide(dtype) -> np.dtype:
    """What floats of a dtype are computed in: float32, or float64 if they are that wide."""
    return np.dtype(np.float64 if np.dtype(dtype).itemsize > 4 else np.float32)


def _towards(alpha, form):
    alpha = _checked_alpha(alpha)
    if form not in ("lerp", "delta"):
        raise ValueError(f"form={form!r} must be 'lerp' or 'delta'.")

    def merge(live, before, target):
        if form == "delta":
            return _like(live, _map(lambda x, w, t: x + alpha * (t - w), live, before, target))
        return _like(live, _map(lambda x, t: (1 - alpha) * x + alpha * t, live, target))

    return merge


def _checked_alpha(alpha):
    # A scalar of NumPy would widen what it multiplies.
    return float(real_number("alpha", alpha, "above 0 and at most 1", is_portion))


def _map(function, first, *rest):
    """Maps floating leaves, each widened; any other leaf of the first tree is kept."""
    widened = lambda x: x.astype(wide(x.dtype), copy=False) if hasattr(x, "dtype") else np.float64(x)
    apply = lambda x, *others: function(*map(widened, (x, *others))) if is_synchronised(x) else x
    return jax.tree.map(apply, first, *rest)


def _like(wanted, tree):
    """Gives the floating leaves of a tree the dtypes of another."""
    cast = lambda x, y: y.astype(x.dtype, copy=False) if is_synchronised(x) and hasattr(x, "dtype") else y
    return jax.tree.map(cast, wanted, tree)


def _copy(parameters):
    return _map(lambda x: x.copy(), parameters)
