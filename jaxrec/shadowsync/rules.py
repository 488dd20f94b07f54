"""Synchronisation rules as pure functions: EASGD, model averaging and BMUF.

A rule is three functions on pytrees of NumPy or JAX arrays; on NumPy arrays they launch no program. A background round
of synchronisation is

    before         = copy of a trainer's parameters             the trainer keeps training
    shared, target = combine(shared, before or mean over all)   in the background
    live           = merge(live, before, target)                on the current parameters

In the foreground `before` = `live`. EASGD has a centre, and each trainer makes its own rounds with it; model averaging
and BMUF combine the mean over all trainers, with one target for all.

Reference: Zheng et al., ShadowSync, arXiv 2003.03477, of which only the public abstract could be checked; the equations
are from the papers named at each rule. Optimizer state and embedding rows are never synchronised.

Floating leaves are computed in float32, or in float64 if they are wider than float32, so that a mean of many small
floats neither overflows nor loses digits; `merge` returns the dtypes of `live`. All other leaves (counters, booleans,
PRNG keys) are taken from the first argument, so each replica keeps its own.
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
    """A synchronisation rule as pure functions."""

    name: str
    has_centre: bool  # `combine` takes one trainer's parameters if True, else the mean over all trainers
    init: Callable[[PyTree], Any]  # initial parameters -> shared
    # shared, one trainer's parameters or the mean -> shared', target
    combine: Callable[[Any, PyTree], tuple[Any, PyTree]]
    merge: Callable[[PyTree, PyTree, PyTree], PyTree]  # live, before, target -> live'
    settings: tuple[tuple[str, Any], ...] = ()  # (name, value) of each hyperparameter

    def describe(self) -> str:
        """Return the call that creates this rule."""
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.settings)})"


class Block(NamedTuple):
    """Shared state of BMUF, identical on all trainers."""

    parameters: PyTree  # the global model
    momentum: PyTree


def easgd(alpha: float = 0.5, form: str = "symmetric") -> Rule:
    """Elastic averaging SGD: trainer and centre move towards each other (Zhang et al., arXiv 1412.6651).

    symmetric:   c' = c + alpha (w - c)    live' = live + alpha (c - w)    keeps the sum of all w and c
    sequential:  c' = c + alpha (w - c)    live' = live + alpha (c' - live)

    w denotes the trainer's parameters at the start of the round. Without training during the round, w - c becomes
    (1 - 2 alpha) (w - c) in the symmetric form and (1 - alpha)^2 (w - c) in the sequential form.

    In the symmetric form the centre makes no gradient step but moves with the n trainers, which slows convergence by a
    factor n / (n + 1) for any alpha and synchronisation gap: 2/3 for two trainers. Model averaging has no slowdown.

    Args:
      alpha: elastic weight in (0, 1].
      form: 'symmetric', as in the EASGD paper, or 'sequential', where the trainer moves towards the updated centre.
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

    delta:  live' = live + alpha (mean - before)     keeps all updates made during the round
    lerp:   live' = (1 - alpha) live + alpha mean    keeps 1 - alpha of the updates made during the round

    hivemind and Bagua use the delta form with alpha = 1. In the foreground no update is made during a round, so both
    forms are equal. In a shadow, `lerp` pulls towards a stale mean in every round: a classifier trained this way ended
    below one without any synchronisation, and above it with `delta` (experiments/shadowsync_classifier.py).

    Args:
      alpha: weight of the mean, in (0, 1].
      form: 'delta', or 'lerp', the equation of ShadowSync as we recall it.
    """
    settings, merge = (("alpha", _checked_alpha(alpha)), ("form", form)), _towards(alpha, form)
    return Rule("model_averaging", False, lambda parameters: (), lambda shared, mean: (shared, mean), merge, settings)


def bmuf(alpha: float = 0.5, eta: float = 1.0, momentum: float = 0.0, form: str = "delta") -> Rule:
    """Block-wise model update filtering: the mean gives the update direction of a global model.

    Reference: Chen and Huo, ICASSP 2016.

    v' = momentum v + eta (mean - g)    g' = g + v'    live' as in model averaging, with g' for mean

    Trainers move towards the global model g', not towards a Nesterov-shifted one. With eta = 1 and momentum = 0 this is
    model averaging, up to rounding.

    Args:
      alpha: weight of the global model, in (0, 1].
      eta: block step size, above 0.
      momentum: block momentum, in [0, 1).
      form: 'delta' or 'lerp', as in `model_averaging`.
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
    """Return the mean of pytrees of equal structure and shapes, summed in list order in float32 or wider."""
    if not replicas:
        raise ValueError("the mean of no replicas: give at least one.")
    return _map(lambda *leaves: sum(leaves[1:], leaves[0]) / len(leaves), *replicas)


def is_synchronised(leaf) -> bool:
    """Return whether rules synchronise a leaf, that is, whether its dtype is floating.

    >>> [is_synchronised(x) for x in (np.float16(1), np.int32(1), True, jax.random.key(0))]
    [True, False, False, False]
    """
    return _is_floating(getattr(leaf, "dtype", None) or np.asarray(leaf).dtype)


@functools.lru_cache(maxsize=256)  # called for each leaf in each exchange
def _is_floating(dtype):
    return bool(jnp.issubdtype(dtype, jnp.floating))


def wide(dtype) -> np.dtype:
    """Return the dtype in which floats are computed: float32, or float64 for dtypes wider than float32."""
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
    # A NumPy scalar would widen the arrays it multiplies.
    return float(real_number("alpha", alpha, "above 0 and at most 1", is_portion))


def _map(function, first, *rest):
    """Map a function over widened floating leaves; other leaves are taken from the first tree."""
    widened = lambda x: x.astype(wide(x.dtype), copy=False) if hasattr(x, "dtype") else np.float64(x)
    apply = lambda x, *others: function(*map(widened, (x, *others))) if is_synchronised(x) else x
    return jax.tree.map(apply, first, *rest)


def _like(wanted, tree):
    """Cast the floating leaves of `tree` to the dtypes of `wanted`."""
    cast = lambda x, y: y.astype(x.dtype, copy=False) if is_synchronised(x) and hasattr(x, "dtype") else y
    return jax.tree.map(cast, wanted, tree)


def _copy(parameters):
    return _map(lambda x: x.copy(), parameters)
