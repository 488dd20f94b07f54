"""What a run predicts: one or several labels, each a click (0 or 1) or a number of a regression.

A model has one output for each: the logit of a click, or how many deviations a number is above its mean in training,
so that prices learn as fast as ratings. The first label is the main one: its figures are `auc` or `rmse`, those of the
label `like` are `like_auc`.

Legend: B batch, K labels.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrec import metrics
from jaxrec.loop import evaluate_labels


class Target(NamedTuple):
    """A label to predict."""

    name: str
    weight: float = 1.0  # of its loss
    moments: tuple[float, float] | None = None  # of a regression: mean and deviation of the label in training

    @property
    def measure(self) -> Callable:
        """Metrics of its predictions: (prediction [n], label [n], weight [n]) -> statistics."""
        return metrics.evaluate_batch if self.moments is None else metrics.evaluate_errors

    @property
    def metric(self) -> str:
        """By which states are compared."""
        return "auc" if self.moments is None else "rmse"

    def loss(self, output: jax.Array, label: jax.Array) -> jax.Array:
        """Return the loss per example, f32[B]: cross entropy, or the squared error in deviations."""
        if self.moments is None:
            return optax.sigmoid_binary_cross_entropy(output, label)
        mean, deviation = self.moments
        return (output - (label - mean) / deviation) ** 2

    def prediction(self, output: jax.Array) -> jax.Array:
        """Return what is measured: the logit of a click, or the number."""
        return output if self.moments is None else self.moments[0] + self.moments[1] * output

    def served(self, prediction: jax.Array) -> jax.Array:
        """Return what a server answers: the probability of a click, or the number."""
        return jax.nn.sigmoid(prediction) if self.moments is None else prediction


Targets = Sequence[Target]
CLICK: Targets = (Target("click"),)


def targets_of(table: Mapping[str, Any], labels: Sequence[str] = (), weights: Sequence[float] = ()) -> Targets:
    """Return the labels to predict, of those of a prepared table.

    Args:
      table: its metadata.
      labels: the names; none for the first of the table.
      weights: of their losses; none for 1 each.

    >>> table = {"labels": ["click", "price"], "targets": {"price": [9.0, 2.0]}}
    >>> targets_of(table, ["price"]), targets_of(table)
    ((Target(name='price', weight=1.0, moments=(9.0, 2.0)),), (Target(name='click', weight=1.0, moments=None),))
    """
    known, names = table["labels"], tuple(labels) or (table["labels"][0],)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--labels {unknown[0]} is no label of the table: give some of {', '.join(known)}.")
    if len(set(names)) < len(names):
        raise ValueError(f"--labels {' '.join(names)} names a label twice: give each once.")
    if weights and len(weights) != len(names):
        raise ValueError(f"--label-weights has {len(weights)} weights for {len(names)} labels: give one for each.")
    if weights and not any(weights):
        raise ValueError("--label-weights are all 0: give a weight above 0 to at least one label.")
    moments = {name: (mean, deviation or 1.0) for name, (mean, deviation) in table.get("targets", {}).items()}
    return tuple(
        Target(name, weight, moments.get(name))
        for name, weight in zip(names, weights or [1.0] * len(names), strict=True)
    )


def told(targets: Targets) -> list[list[Any]]:
    """Return targets as JSON values, to save with a run."""
    return [[one.name, one.weight, one.moments and list(one.moments)] for one in targets]


def of_told(saved: Iterable[Sequence[Any]]) -> Targets:
    """Return the targets that `told` tells of.

    >>> targets = (Target("click"), Target("price", 2.0, (9.0, 2.0)))
    >>> of_told(told(targets)) == targets
    True
    """
    return tuple(Target(name, weight, moments and tuple(moments)) for name, weight, moments in saved)


def losses(targets: Targets, outputs: jax.Array, label: jax.Array) -> jax.Array:
    """Return the weighted sum of the losses of all labels per example, f32[B]."""
    if label.ndim == 1:
        (target,) = targets
        found = target.loss(outputs.reshape(label.shape), label)
        return found if target.weight == 1.0 else target.weight * found
    of_labels = [one.weight * one.loss(outputs[:, k], label[:, k]) for k, one in enumerate(targets)]
    return jnp.stack(of_labels).sum(axis=0)


def of_each(targets: Targets, outputs: jax.Array, how: Callable[[Target, jax.Array], jax.Array]) -> jax.Array:
    """Return how(target, its output f32[B]) of all labels: f32[B] of one, f32[B, K] of several."""
    if len(targets) == 1:
        return how(targets[0], outputs.reshape(outputs.shape[0]))
    return jnp.stack([how(one, outputs[:, k]) for k, one in enumerate(targets)], axis=1)


def evaluate(state: Any, batches: Iterable[tuple], eval_step: Callable, targets: Targets) -> dict[str, float]:
    """Evaluate a model, as `jaxrec.loop.evaluate_labels`; figures of other labels than the first have its name."""
    return named(targets, evaluate_labels(state, batches, eval_step, [one.measure for one in targets]))


def named(targets: Targets, found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of each label as one dict.

    >>> named([Target("click"), Target("like")], [{"auc": 0.8}, {"auc": 0.6}])
    {'auc': 0.8, 'like_auc': 0.6}
    """
    prefixes = ["", *(f"{one.name}_" for one in targets[1:])]
    return {
        f"{prefix}{key}": value
        for prefix, one in zip(prefixes, found, strict=True)
        for key, value in one.items()
        if not (prefix and key == "examples")
    }
