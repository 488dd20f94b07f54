"""Signature of a loss: an optional PRNG key, user-defined figures (extra metrics), and model variables.

    loss(params, activations, batch) -> f32[B], (f32[B], figures) or (f32[B], figures, variables)
    loss(params, activations, batch, *, rng)         likewise, for a step made with a seed

The key is fold_in(fold_in(key(seed), dense.step), device). It is therefore the same in a resumed run, for all row
storage and in every mode of `oac`. Each device of the mesh, and so each replica, has a different key: results depend on
the number of devices.

Figures are a dict, whose values are reported in the metrics as f32[]:
- f32[B], one value per example, is averaged like the loss: weighted over the examples of a replica, then over replicas;
- f32[] is taken as the mean over the examples of the device, weighted by their total weight.
  Other shapes and the names in RESERVED are refused.

Variables are a dict, whose values replace params[name] after the optimizer, such as running statistics of a model. They
are averaged over the devices of a replica, weighted by the examples of each, and differ between replicas. They keep
their values if all weights are 0.

All of this is decided while a step is traced: it costs a loss nothing that does not use it.
Legend: B examples of one device, W total weight of the examples of a replica.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrec.bounds import whole_number
from jaxrec.sharding import DATA, REPLICA, device_index
from jaxrec.types import Batch, PyTree

RESERVED = ("loss", "weight", "stale_rows", "patched_rows")  # metrics of the step and of OAC
_SEED = ", or None: the step makes the key itself, from the seed, its own number and the device's"


class Outcome(NamedTuple):
    """The result of a loss for the examples of one device."""

    per_example: jax.Array  # f32[B]
    figures: dict[str, jax.Array]  # f32[B] or f32[] each
    variables: dict[str, PyTree]  # new values of params[name]


def key_at(seed: int, step: jax.Array, sharded: bool = False) -> jax.Array:
    """Return the PRNG key of a step on a device, fold_in(fold_in(key(seed), step), device).

    The device index is 0 unless `sharded`, that is, inside a shard_map over the mesh.

    >>> bool(jax.random.uniform(key_at(0, 7)) == jax.random.uniform(key_at(0, 7)))
    True
    """
    key = jax.random.fold_in(jax.random.key(checked_seed(seed)), step)
    return jax.random.fold_in(key, device_index() if sharded else 0)


def outcome_of(
    loss: Callable, params: PyTree, activations: dict[str, jax.Array], batch: Batch, rng: jax.Array | None = None
) -> Outcome:
    """Call a loss, with the key if one is given, and validate its result."""
    check_rng(loss, rng is not None)
    with naming_lookups(activations):
        found = loss(params, activations, batch) if rng is None else loss(params, activations, batch, rng=rng)
    several = isinstance(found, tuple) and len(found) in (2, 3)
    per_example, figures, variables = (*found, {})[:3] if several else (found, {}, {})
    check_per_example("loss", per_example, batch)
    _check_figures(figures, batch.weight.shape[0])
    for name, new in variables.items():
        _check_variable(name, new, params[name])
    return Outcome(per_example, jax.tree.map(jnp.asarray, figures), variables)


@contextlib.contextmanager
def naming_lookups(lookups: Iterable[str]) -> Iterator[None]:
    """Note the names of the lookups on a KeyError, which may be of a misspelt one."""
    try:
        yield
    except KeyError as error:
        error.add_note(f"the activations have the lookups {list(lookups)}")
        raise


def mean_figures(figures: dict[str, jax.Array], batch: Batch, weight: jax.Array, sharded: bool) -> dict[str, jax.Array]:
    """Average figures like the loss, {name: f32[]}: weighted over the examples of a replica, then over replicas.

    Examples of weight 0, and devices with only such examples, are ignored, even if they hold NaN. `sharded` is whether
    the caller is inside a shard_map over the mesh.
    """

    def mean(value):
        value, own = jnp.asarray(value, jnp.float32), jnp.sum(batch.weight)
        if value.ndim:
            part = jnp.sum(jnp.where(batch.weight > 0, value * batch.weight, 0)) / or_one(weight)
        else:
            part = _part(value, own, weight)
        return jax.lax.pmean(jax.lax.psum(part, DATA), REPLICA) if sharded else part

    return {name: mean(value) for name, value in figures.items()}


def mean_variables(
    variables: dict[str, PyTree], params: PyTree, batch: Batch, weight: jax.Array, sharded: bool
) -> dict[str, PyTree]:
    """Average new variables over the devices of a replica, weighted by the examples of each; the old ones if W is 0."""
    own = jnp.sum(batch.weight)

    def mean(new, old):
        part = _part(new, own, weight)
        found = jax.lax.psum(part, DATA) if sharded else part
        return jnp.where(weight > 0, found, old).astype(old.dtype)

    return {name: jax.tree.map(mean, new, params[name]) for name, new in variables.items()}


def or_one(weight: jax.Array) -> jax.Array:
    """Return the divisor of a sum over examples: their total weight, or 1 if it is 0."""
    return jnp.where(weight > 0, weight, 1)


def _part(value, own, weight):
    # The share own / weight is exactly 1 on one device, where the value must stay bitwise equal.
    return jnp.where(own > 0, value * (own / or_one(weight)), 0)


def checked_seed(seed: int) -> int:
    """Return a seed as a Python int."""
    return whole_number("seed", seed, 0, 2**32 - 1, _SEED)


def check_rng(function: Callable, keyed: bool) -> None:
    """Refuse a function that requires a key and gets none, or gets one and does not take it."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a C function: the call itself will fail
        return
    every = list(parameters.values())
    named = [p for p in every if p.name == "rng" and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if keyed and not named and all(p.kind is not p.VAR_KEYWORD for p in every):
        raise ValueError(
            "a seed was given, but the loss takes no key: write it as loss(params, activations, "
            "batch, *, rng), or leave the seed out."
        )
    if not keyed and any(p.default is p.empty for p in named):
        raise ValueError(
            "the function wants a key, `rng`, and gets none: give the Task a seed=0. "
            "Predictions and free trainers draw nothing: write `rng=None` there, and deterministic=True in Flax."
        )


def check_per_example(what: str, found: Any, batch: Batch, only_first_axis: bool = False) -> None:
    """Refuse the result of a loss or a prediction that is not one number per example.

    With `only_first_axis`, an example may have several numbers.
    """
    size, shape = batch.weight.shape[0], getattr(found, "shape", None)
    if shape is None or shape[:1] != (size,) or (len(shape) > 1 and not only_first_axis):
        kind = f"a {type(found).__name__}" if shape is None else f"an array of shape {tuple(shape)}"
        raise ValueError(
            f"{what} returned {kind} for {size} examples (of one device), but one number for each is expected, "
            f"f32[{size}]: take `[..., 0]` of an nn.Dense(1), in logit and label alike, and leave the mean to the "
            "step, which weights the examples. A loss may return it with a dict of figures, (f32, figures), or with "
            "figures and variables."
        )


def _check_figures(figures, size):
    if not isinstance(figures, dict):
        raise ValueError(
            f"the loss returned a {type(figures).__name__} beside its numbers: a dict of figures is expected there, "
            "(f32[B], {'name': f32[B]})."
        )
    if taken := [name for name in RESERVED if name in figures]:
        raise ValueError(f"the loss returned figures named {taken}, which are the step's own: choose other names.")
    for name, value in figures.items():
        if jnp.shape(value) not in ((), (size,)):
            raise ValueError(
                f"the figure {name!r} has shape {jnp.shape(value)}, but a figure is one number for "
                f"each example, f32[{size}] (of one device), or their mean, f32[]: give each "
                "column a name of its own."
            )


def _check_variable(name, new, old):
    found, wanted = _described(new), _described(old)
    if jax.tree.flatten(found) != jax.tree.flatten(wanted):
        raise ValueError(
            f"the loss returned {found!s:.300} as {name!r}, but the parameters have "
            f"{wanted!s:.300}: return the whole of it, in the same shapes and dtypes."
        )


def _described(tree):
    leaf = lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}" if hasattr(x, "dtype") else type(x).__name__
    return jax.tree.map(leaf, tree)
