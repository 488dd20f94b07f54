"""How replicas of the dense parameters are brought together: EASGD, model averaging and BMUF as pure functions.

A rule is three functions on any pytrees of arrays, numpy's or JAX's; on numpy arrays they launch no program. A round of
synchronisation is

    before  = a copy of a trainer's parameters                     the trainer trains on meanwhile
    shared, target = combine(shared, before or the mean of all)    in the background
    live    = merge(live, before, target)                          on the parameters as they are by then

and in the foreground the same with `before` = `live`. EASGD has a centre, with which each trainer makes rounds of its
own; model averaging and BMUF combine the mean over all trainers, the same for each.

Reference: Zheng et al., ShadowSync, arXiv 2003.03477, of which the public abstract is all that could be checked; the
equations are those of the papers named at each rule. Optimizer state and embedding rows are never synchronised.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrec.types import PyTree


class Rule(NamedTuple):
    """A way to synchronise, as pure functions."""

    name: str
    has_centre: bool  # combine takes one trainer's parameters at a time; else the mean over all of them
    init: Callable[[PyTree], Any]  # initial parameters -> shared
    combine: Callable[[Any, PyTree], tuple[Any, PyTree]]  # shared, one trainer's or the mean -> shared', target
    merge: Callable[[PyTree, PyTree, PyTree], PyTree]  # live, before, target -> live'


class Block(NamedTuple):
    """What BMUF shares, the same on all trainers."""

    parameters: PyTree  # the global model
    momentum: PyTree


def easgd(alpha: float = 0.5, form: str = "symmetric") -> Rule:
    """Elastic averaging SGD (Zhang et al., arXiv 1412.6651): trainer and centre move towards each other.

    symmetric:   c' = c + alpha (w - c)       live' = live + alpha (c - w)       keeps the sum of all w and c
    sequential:  c' = c + alpha (w - c)       live' = live + alpha (c' - live)

    w are the trainer's parameters when the round began. Without training in between, a round brings w - c to
    (1 - 2 alpha) (w - c) in the first form and to (1 - alpha)^2 (w - c) in the second.

    Args:
      alpha: elastic weight, above 0 and at most 1.
      form: 'symmetric', as the EASGD paper, or 'sequential', where the trainer sees the centre that it has moved.

    Errors:
      ValueError: alpha outside (0, 1]; another form.
    """
    _check_alpha(alpha)
    if form not in ("symmetric", "sequential"):
        raise ValueError(f"form={form!r} must be 'symmetric' or 'sequential'.")

    def combine(centre, before):
        moved = jax.tree.map(lambda c, w: c + alpha * (w - c), centre, before)
        return moved, centre if form == "symmetric" else moved

    def merge(live, before, target):
        seen = before if form == "symmetric" else live
        return jax.tree.map(lambda x, w, c: x + alpha * (c - w), live, seen, target)

    return Rule("easgd", True, _copy, combine, merge)


def model_averaging(alpha: float = 0.5, form: str = "lerp") -> Rule:
    """Model averaging: every trainer moves towards the mean over all trainers.

    lerp:   live' = (1 - alpha) live + alpha mean       of what was learned during the round, 1 - alpha is kept
    delta:  live' = live + alpha (mean - before)        all of it is kept (as hivemind and Bagua do, with alpha = 1)

    Args:
      alpha: weight of the mean, above 0 and at most 1.
      form: 'lerp', as ShadowSync, or 'delta'.

    Errors:
      ValueError: alpha outside (0, 1]; another form.
    """
    return Rule("ma", False, lambda parameters: (), lambda shared, mean: (shared, mean), _towards(alpha, form))


def bmuf(alpha: float = 0.5, eta: float = 1.0, momentum: float = 0.0, form: str = "lerp") -> Rule:
    """Block-wise model update filtering (Chen and Huo, ICASSP 2016): the mean is a direction for a global model.

    v' = momentum v + eta (mean - g)        g' = g + v'        live' as in model averaging, with g' for the mean

    The global model g' and not a Nesterov-shifted one is what trainers move to. With eta = 1 and no momentum this is
    model averaging, up to rounding.

    Args:
      alpha: weight of the global model, above 0 and at most 1.
      eta: block step size, above 0.
      momentum: block momentum, from 0 to below 1.
      form: 'lerp' or 'delta'.

    Errors:
      ValueError: a number outside its range; another form.
    """
    if eta <= 0 or not 0 <= momentum < 1:
        raise ValueError(f"eta={eta} must be above 0 and momentum={momentum} from 0 to below 1.")

    def init(parameters):
        return Block(_copy(parameters), jax.tree.map(lambda x: 0 * x, parameters))

    def combine(block, mean):
        velocity = jax.tree.map(lambda v, w, g: momentum * v + eta * (w - g), block.momentum, mean, block.parameters)
        moved = jax.tree.map(lambda g, v: g + v, block.parameters, velocity)
        return Block(moved, velocity), moved

    return Rule("bmuf", False, init, combine, _towards(alpha, form))


def mean_of(replicas: list[PyTree]) -> PyTree:
    """The mean of equal trees, summed in their order.

    Errors:
      ValueError: there are none; they differ in structure, shape or dtype.
    """
    if not replicas:
        raise ValueError("the mean of no replicas: give at least one.")
    for number, replica in enumerate(replicas[1:], 1):
        check_same(replicas[0], replica, f"replica {number}")
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]) / len(leaves), *replicas)


def check_same(expected: PyTree, found: PyTree, what: str) -> None:
    """Refuses a tree of other structure, shapes or dtypes than expected, naming the first difference."""
    shapes = [
        {jax.tree_util.keystr(path): (np.shape(x), str(getattr(x, "dtype", type(x).__name__))) for path, x in leaves}
        for leaves in map(jax.tree_util.tree_leaves_with_path, (expected, found))
    ]
    for path in {**shapes[0], **shapes[1]}:
        if shapes[0].get(path) != shapes[1].get(path):
            raise ValueError(
                f"{what} does not fit at {path or 'the root'}: it has {shapes[1].get(path, 'nothing')}, wanted "
                f"{shapes[0].get(path, 'nothing')}. All replicas must have the same parameters."
            )


def _towards(alpha, form):
    _check_alpha(alpha)
    if form not in ("lerp", "delta"):
        raise ValueError(f"form={form!r} must be 'lerp' or 'delta'.")

    def merge(live, before, target):
        if form == "delta":
            return jax.tree.map(lambda x, w, t: x + alpha * (t - w), live, before, target)
        return jax.tree.map(lambda x, t: (1 - alpha) * x + alpha * t, live, target)

    return merge


def _check_alpha(alpha):
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha={alpha} must be above 0 and at most 1.")


def _copy(parameters):
    return jax.tree.map(lambda x: x.copy(), parameters)
