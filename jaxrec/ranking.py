"""Ranking metrics and metrics of subsets: AUC within groups, by segment and with an interval; recall, NDCG and MRR.

They show what a metric over all examples hides: a model may order users rather than the items shown to each of them
(`group_auc`), fail on new items (`by_segment`), or be better by chance (`auc_interval`). Numpy, float64.

Legend: n examples.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.metrics import evaluate_batch, exact_auc, summarize


def group_auc(
    score: np.ndarray, label: np.ndarray, group: np.ndarray, weight: np.ndarray | None = None
) -> dict[str, float]:
    """Return GAUC, the mean of the AUCs within groups such as users, each weighted by its examples.

    GAUC = sum_g w_g AUC_g / sum_g w_g (Zhu et al., KDD 2017, eq. 14; Zhou et al., KDD 2018, eq. 7), over the groups
    that contain both classes; other groups have no AUC.

    Args:
      score: f32[n], any monotone score.
      label: f32[n], 0 or 1.
      group: integers or strings [n], group of each example.
      weight: f32[n]; 1 if None. Examples of weight 0 are ignored.

    Returns:
      gauc (NaN if no group has both classes), groups, groups_counted, share_counted (of the weight).

    >>> user = np.array(["a", "a", "b", "b", "c"])
    >>> found = group_auc(np.array([.9, .1, .2, .3, .5]), np.array([1, 0, 1, 0, 1]), user)
    >>> found["gauc"], found["groups"], found["groups_counted"]
    (0.5, 3, 2)
    """
    score, label, group = np.asarray(score), np.asarray(label), np.asarray(group)
    weight = np.ones(score.shape) if weight is None else np.asarray(weight, np.float64)
    if group.shape != score.shape:
        raise ValueError(f"groups of shape {group.shape} for scores of shape {score.shape}: one for each example.")
    exact_auc(score, label, weight)  # validates the arguments
    counts = weight > 0
    score, label, weight = (np.asarray(a[counts], np.float64) for a in (score, label, weight))
    names, mine = np.unique(group[counts], return_inverse=True)
    # Equal scores of a group share a place; places are numbered consecutively over the groups.
    order = np.lexsort((score, mine))
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(mine[order]) != 0) | (np.diff(score[order]) != 0)
    place = np.cumsum(new) - 1
    positives = np.bincount(place, (weight * label)[order])
    negatives = np.bincount(place, (weight * (1 - label))[order])
    of_place = mine[order][new]
    total = np.bincount(mine, weight, len(names))
    clicks, others = (np.bincount(of_place, its, len(names)) for its in (positives, negatives))
    below = np.cumsum(negatives) - negatives / 2 - (np.cumsum(others) - others)[of_place]
    right = np.bincount(of_place, positives * below, len(names))
    both = (clicks > 0) & (others > 0)
    aucs = right[both] / (clicks * others)[both]
    counted = total[both].sum()
    return {
        "gauc": float(np.sum(total[both] * aucs) / counted) if counted else float("nan"),
        "groups": len(names),
        "groups_counted": int(both.sum()),
        "share_counted": float(counted / total.sum()),
    }


def by_segment(
    logit: np.ndarray, label: np.ndarray, segment: np.ndarray, weight: np.ndarray | None = None
) -> dict[str, dict[str, float]]:
    """Return the metrics of `metrics.summarize` for each value of a field: normalised entropy, calibration, AUC, etc.

    Args:
      logit, label, weight: f32[n] as for `metrics.evaluate_batch`; weight is 1 if None.
      segment: integers or strings [n], value of the field for each example.

    Returns:
      {value as text: metrics}, the largest segment first. Segments without examples of weight above 0 are left out; the
      normalised entropy of a segment with a single class is NaN.

    >>> found = by_segment(np.zeros(3), np.array([0., 1., 1.]), np.array(["old", "old", "new"]))
    >>> [(name, figures["examples"], round(figures["log_loss"], 3)) for name, figures in found.items()]
    [('old', 2, 0.693), ('new', 1, 0.693)]
    """
    logit, label, segment = np.asarray(logit), np.asarray(label), np.asarray(segment)
    weight = np.ones(logit.shape) if weight is None else np.asarray(weight)
    if segment.shape != logit.shape:
        raise ValueError(f"segments of shape {segment.shape} for logits of shape {logit.shape}: one for each example.")
    evaluate_batch(logit, label, weight)  # validates all examples before they are split
    counts = weight > 0
    logit, label, weight, segment = (a[counts] for a in (logit, label, weight, segment))
    names, mine, sizes = np.unique(segment, return_inverse=True, return_counts=True)
    order = np.argsort(mine, kind="stable")
    rows = np.split(order, np.cumsum(sizes)[:-1]) if len(names) else []
    return {
        str(names[i]): summarize(evaluate_batch(logit[rows[i]], label[rows[i]], weight[rows[i]]))
        for i in np.argsort(-sizes, kind="stable")
    }


def auc_interval(
    score: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None, draws: int = 1000, seed: int = 0,
    share: float = 0.95,
) -> tuple[float, float, float]:  # fmt: skip
    """Return AUC with a bootstrap interval over the examples (percentiles; Efron, 1979).

    The interval covers the choice of a test set of this size, not the variation between trainings.

    Args:
      score, label, weight: as for `exact_auc`.
      draws: number of bootstrap samples.
      seed: seed of the samples.
      share: confidence level, the share of the samples within the interval.

    Returns:
      The AUC, and the lower and upper ends of the interval.

    >>> rng = np.random.default_rng(0)
    >>> label = rng.integers(0, 2, 400)
    >>> auc, low, high = auc_interval(label + rng.standard_normal(400), label, draws=200)
    >>> 0.7 < low < auc < high < 0.9
    True
    """
    whole_number("draws", draws, 2)
    if not 0 < share < 1:
        raise ValueError(f"share={share!r} must lie between 0 and 1, as 0.95 does.")
    auc = exact_auc(score, label, weight)
    score, label = np.asarray(score, np.float64), np.asarray(label, np.float64)
    weight = np.ones(len(score)) if weight is None else np.asarray(weight, np.float64)
    score, label, weight = score[weight > 0], label[weight > 0], weight[weight > 0]
    order = np.argsort(score, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], np.diff(score[order]) != 0]))
    label, weight, n = label[order], weight[order], len(order)
    rng, found = np.random.default_rng(seed), []
    for _ in range(draws):
        drawn = np.bincount(rng.integers(0, n, n), minlength=n) * weight
        positives = np.add.reduceat(drawn * label, starts)
        negatives = np.add.reduceat(drawn * (1 - label), starts)
        pairs = positives.sum() * negatives.sum()
        if pairs:  # a draw of one class has no AUC
            found.append(float(positives @ (np.cumsum(negatives) - negatives / 2) / pairs))
    if not found:
        return auc, float("nan"), float("nan")
    low, high = np.quantile(found, [(1 - share) / 2, (1 + share) / 2])
    return auc, float(low), float(high)


def places_of(score: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the rank of each query's relevant item among all items, 0 for the best.

    An item ranks after all others of equal score, so that a constant score gains nothing.

    Args:
      score: f32[n, items].
      target: i32[n], the relevant item of each query.

    Returns:
      i64[n].

    >>> places_of(np.array([[.1, .9, .5], [.2, .2, .1]]), np.array([2, 0])).tolist()
    [1, 1]
    """
    score, target = np.asarray(score), np.asarray(target)
    if len(target) != len(score):
        raise ValueError(f"{len(score)} queries and {len(target)} targets: one item for each query.")
    if len(target) and not (0 <= target.min() and target.max() < score.shape[1]):
        raise ValueError(f"targets from {target.min()} to {target.max()}, but there are {score.shape[1]} items.")
    if np.isnan(score).any():
        raise FloatingPointError(f"{np.isnan(score).sum()} scores are NaN: the model has diverged.")
    own = score[np.arange(len(target)), target]
    return np.sum(score >= own[:, None], axis=1) - 1


def gain_of_places(place: np.ndarray, at: Sequence[int] = (10, 100)) -> Mapping[str, float]:
    """Return recall and NDCG at k, and MRR, of queries with one relevant item each.

    With p the rank, from 0: recall@k = mean(p < k), NDCG@k = mean([p < k] / log2(p + 2)) (Järvelin and Kekäläinen,
    TOIS 2002; the ideal is 1), MRR = mean(1 / (p + 1)).

    Args:
      place: i64[n], ranks from `places_of`.
      at: values of k.

    Returns:
      {"recall_at_10": ..., "ndcg_at_10": ..., "mrr": ...}.

    >>> {key: round(value, 3) for key, value in gain_of_places(np.array([0, 2, 30]), at=(1, 10)).items()}
    {'recall_at_1': 0.333, 'ndcg_at_1': 0.333, 'recall_at_10': 0.667, 'ndcg_at_10': 0.5, 'mrr': 0.455}
    """
    place = np.asarray(place, np.float64)
    if place.ndim != 1 or not len(place) or not (place >= 0).all():
        raise ValueError(f"places of shape {place.shape}: at least one is expected, [n], each 0 or more.")
    found = {}
    for k in at:
        whole_number("k of at", k, 1)
        found[f"recall_at_{k}"] = float(np.mean(place < k))
        found[f"ndcg_at_{k}"] = float(np.mean((place < k) / np.log2(place + 2)))
    return found | {"mrr": float(np.mean(1 / (place + 1)))}
