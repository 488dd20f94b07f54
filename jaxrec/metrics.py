"""Metrics of click prediction: log loss, normalised entropy, AUC, calibration; and of a regression; numpy, float64.

Legend: n examples.
"""

import operator
from typing import Any, NamedTuple, TypeVar

import numpy as np

# Bins of the logit between -20 and 20 are 6e-4 wide, so that few pairs of examples share one; beyond, where models of
# unscaled features go, their width is 2 % of the logit.
FINE_BINS, _LIMIT = 1 << 16, 20.0
_WIDE_BINS, _FARTHEST = 1 << 12, 1e39  # on either side; more than any f32
BINS = FINE_BINS + 2 * _WIDE_BINS


def exact_auc(score: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Return the area under the ROC curve, P(positive scores above negative), with ties counted half.

    Args:
      score: f32[n], any monotone score.
      label: f32[n], 0 or 1.
      weight: f32[n]; 1 if None.

    Returns:
      The AUC; NaN if one class is absent.

    >>> exact_auc(np.array([.1, .4, .35, .8]), np.array([0, 0, 1, 1]))
    0.75
    """
    score, label, weight = _clicks(score, label, weight)
    if not len(weight):
        raise ValueError("no example of weight above 0: there is nothing to measure.")
    _, place = np.unique(score, return_inverse=True)
    positives = np.bincount(place, weight * label)
    negatives = np.bincount(place, weight * (1 - label))
    return _auc_of_bins(positives, negatives)


class Evaluation(NamedTuple):
    """Sufficient statistics of predicted clicks; `merge` adds them in any order, across batches and processes."""

    positives: np.ndarray  # f64[bins], weight of the clicks by logit
    negatives: np.ndarray  # f64[bins], weight of the other examples by logit
    loss: float  # sum of weight * log loss
    prediction: float  # sum of weight * probability
    examples: int  # number of examples of weight above 0


class Errors(NamedTuple):
    """Sufficient statistics of a regression, for `merge`: weighted sums over the examples."""

    squared: float
    absolute: float
    prediction: float
    label: float
    weight: float
    examples: int  # number of examples of weight above 0


def empty_evaluation() -> Evaluation:
    """Return the statistics of an empty set of examples."""
    return Evaluation(np.zeros(BINS), np.zeros(BINS), 0.0, 0.0, 0)


def evaluate_batch(logit: np.ndarray, label: np.ndarray, weight: np.ndarray) -> Evaluation:
    """Return the statistics of one batch.

    Args:
      logit, label, weight: f32[n]; examples of weight 0 are ignored, even if their values are invalid.

    Raises:
      ValueError: the shapes differ, a label is not 0 or 1, or a weight is negative or not finite.
      FloatingPointError: a logit is not finite.
    """
    logit, label, weight = _clicks(logit, label, weight)
    place = _bin_of(logit)
    return Evaluation(
        np.bincount(place, weight * label, BINS),
        np.bincount(place, weight * (1 - label), BINS),
        float(np.sum(weight * (np.logaddexp(0, logit) - label * logit))),
        float(np.sum(weight / (1 + np.exp(-np.maximum(logit, -700))))),
        int(np.sum(weight > 0)),
    )


def _bin_of(logit):
    """Return the bin of each logit, i64[n], in the order of the logits."""
    place = _WIDE_BINS + ((logit + _LIMIT) * (FINE_BINS / (2 * _LIMIT))).clip(0, FINE_BINS - 1).astype(np.int64)
    far = np.abs(logit) > _LIMIT
    if far.any():
        ratio = np.abs(logit[far]).clip(max=_FARTHEST) / _LIMIT
        beyond = (np.log(ratio) * (_WIDE_BINS / np.log(_FARTHEST / _LIMIT))).astype(np.int64).clip(max=_WIDE_BINS - 1)
        place[far] = np.where(logit[far] > 0, _WIDE_BINS + FINE_BINS + beyond, _WIDE_BINS - 1 - beyond)
    return place


def evaluate_errors(prediction: np.ndarray, label: np.ndarray, weight: np.ndarray) -> Errors:
    """Return the statistics of one batch of a regression; arguments and errors as of `evaluate_batch`.

    >>> found = evaluate_errors(np.array([1.0, 4.0]), np.array([2.0, 2.0]), np.ones(2))
    >>> summarize(found)["rmse"], summarize(found)["mae"]
    (1.5811388300841898, 1.5)
    """
    prediction, label, weight = _counting(prediction, label, weight)
    _refuse(ValueError, label, np.isfinite(label), "label", "labels of a regression are finite: leave such rows out")
    error = prediction - label
    squared, absolute, predicted, labelled = (
        float(np.sum(weight * each)) for each in (error**2, np.abs(error), prediction, label)
    )
    return Errors(squared, absolute, predicted, labelled, float(np.sum(weight)), len(weight))


Statistics = TypeVar("Statistics", Evaluation, Errors)


def merge(a: Statistics, b: Statistics) -> Statistics:
    """Return the statistics of the union of two sets of examples."""
    left, right = list[Any](a), list[Any](b)
    return type(a)(*map(operator.add, left, right))


def summarize(evaluation: Evaluation | Errors) -> dict[str, float]:
    """Compute metrics from statistics.

    Returns:
      Of clicks: auc (streaming: exact except for pairs of logits closer than 6e-4 or, beyond 20, than 2 %; NaN
      if all labels are equal); log_loss, the mean of -log p(label) with p = sigmoid(logit);
      normalized_entropy, log loss over the entropy of the label mean, so that the best constant has 1 (He et al., ADKDD
      2014, eq. 1); calibration (mean prediction over label mean); label_mean; examples. Of a regression: rmse, the root
      of the mean squared error; mae, the mean absolute error; prediction_mean; label_mean; examples.
    """
    if isinstance(evaluation, Errors):
        total = _some(evaluation.weight)
        return {
            "rmse": (evaluation.squared / total) ** 0.5,
            "mae": evaluation.absolute / total,
            "prediction_mean": evaluation.prediction / total,
            "label_mean": evaluation.label / total,
            "examples": evaluation.examples,
        }
    clicks = float(evaluation.positives.sum())
    total = _some(clicks + float(evaluation.negatives.sum()))
    loss = evaluation.loss / total
    return {
        "auc": _auc_of_bins(evaluation.positives, evaluation.negatives),
        "log_loss": loss,
        "normalized_entropy": loss / _entropy(clicks / total),
        "calibration": evaluation.prediction / clicks if clicks else float("inf"),
        "label_mean": clicks / total,
        "examples": evaluation.examples,
    }


def _some(weight: float) -> float:
    if weight == 0:
        raise ValueError(
            "no example of weight above 0 was evaluated: the data is empty, or its iterator was used up before."
        )
    return weight


def _clicks(logit, label, weight):
    """As `_counting`, of labels 0 and 1."""
    logit, label, weight = _counting(logit, label, weight)
    binary = (label == 0) | (label == 1)
    _refuse(ValueError, label, binary, "label", "labels of clicks are 0 or 1: map yours to them")
    return logit, label, weight


def _counting(logit, label, weight):
    """Validate logits and weights, and return the examples of weight above 0, f64[n] each."""
    weight = np.ones(np.shape(logit)) if weight is None else weight
    logit, label, weight = (np.asarray(a, np.float64) for a in (logit, label, weight))
    if not logit.ndim == 1 or not logit.shape == label.shape == weight.shape:
        raise ValueError(
            f"logits of shape {logit.shape}, labels {label.shape}, weights {weight.shape}: one of "
            "each for an example is expected, [n] each. Take `[..., 0]` of an nn.Dense(1)."
        )
    finite = (weight >= 0) & (weight < np.inf)
    _refuse(ValueError, weight, finite, "weight", "weights are finite and 0 or more")
    counts = weight > 0
    if not counts.all():
        logit, label, weight = logit[counts], label[counts], weight[counts]
    remedy = "the model has diverged or its input is not finite: look at the learning rates and the dense features"
    _refuse(FloatingPointError, logit, np.isfinite(logit), "logit", remedy)
    return logit, label, weight


def _refuse(error, values, good, name, remedy):
    if not good.all():
        raise error(f"{(~good).sum()} of {len(good)} {name}s are wrong, the first is {values[~good][0]}: {remedy}.")


def _auc_of_bins(positives, negatives) -> float:
    below = np.cumsum(negatives) - negatives / 2
    pairs = positives.sum() * negatives.sum()
    return float(np.sum(positives * below) / pairs) if pairs > 0 else float("nan")


def _entropy(p: float) -> float:
    return float(-sum(q * np.log(q) for q in (p, 1 - p) if q > 0)) or float("nan")
