"""Metrics against definitions and scipy-free references; merging is addition."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec import metrics


def click_data(seed, n=20_000, spread=1.5):
    rng = np.random.default_rng(seed)
    logit = rng.normal(-1.2, spread, n)
    return logit, (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(float), rng.integers(0, 3, n).astype(float)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(1, 3)), min_size=2, max_size=20))
def test_exact_auc_is_the_share_of_ordered_pairs(rows):
    score, label, weight = (np.array(column, float) for column in zip(*rows, strict=True))
    pairs = [
        (weight[i] * weight[j], (score[i] > score[j]) + 0.5 * (score[i] == score[j]))
        for i in range(len(rows))
        for j in range(len(rows))
        if label[i] == 1 and label[j] == 0
    ]
    found = metrics.exact_auc(score, label, weight)
    if pairs:
        assert found == pytest.approx(sum(w * x for w, x in pairs) / sum(w for w, _ in pairs))
    else:
        assert np.isnan(found)


@given(st.integers(0, 10_000), st.floats(0.3, 4.0))
@settings(max_examples=30)
def test_streaming_auc_is_exact_but_for_pairs_of_one_bin(seed, spread):
    """Such a pair counts as one half instead of one or zero: the error is at most half of their share."""
    logit, label, weight = click_data(seed, spread=spread)
    evaluation = metrics.evaluate_batch(logit, label, weight)
    result, (clicks, others) = metrics.summarize(evaluation), (evaluation.positives, evaluation.negatives)
    shared = np.sum(clicks * others) / (clicks.sum() * others.sum())
    assert shared < 1e-3 and abs(result["auc"] - metrics.exact_auc(logit, label, weight)) <= shared / 2 + 1e-12
    mean, probability = np.average(label, weights=weight), 1 / (1 + np.exp(-logit))
    loss = np.average(-np.log(np.where(label == 1, probability, 1 - probability)), weights=weight)
    assert result["log_loss"] == pytest.approx(loss, rel=1e-9)
    entropy = -mean * np.log(mean) - (1 - mean) * np.log(1 - mean)
    assert result["normalized_entropy"] == pytest.approx(loss / entropy, rel=1e-9)
    assert result["calibration"] == pytest.approx(
        np.sum(weight / (1 + np.exp(-logit))) / np.sum(weight * label), rel=1e-12
    )
    assert result["examples"] == np.sum(weight > 0)


@pytest.mark.parametrize("seed", range(8))
def test_streaming_auc_is_exact_to_1e_5(seed):
    logit, label, weight = click_data(seed)
    result = metrics.summarize(metrics.evaluate_batch(logit, label, weight))
    assert abs(result["auc"] - metrics.exact_auc(logit, label, weight)) < 1e-5


def test_a_coarse_histogram_fails_the_same_bound(monkeypatch):
    """Negative control: with 64 bins the streaming AUC is no longer within 1e-5."""
    monkeypatch.setattr(metrics, "BINS", 64)
    logit, label, weight = click_data(0)
    result = metrics.summarize(metrics.evaluate_batch(logit, label, weight))
    assert abs(result["auc"] - metrics.exact_auc(logit, label, weight)) > 1e-5


@given(st.integers(0, 99), st.lists(st.integers(0, 300), min_size=1, max_size=6))
@settings(max_examples=30)
def test_merging_parts_in_any_order_equals_the_whole(seed, cuts):
    logit, label, weight = click_data(seed, n=300)
    bounds = [0, *sorted(cuts), 300]
    parts = [metrics.evaluate_batch(logit[a:b], label[a:b], weight[a:b]) for a, b in itertools.pairwise(bounds)]
    total = metrics.empty_evaluation()
    for part in np.random.default_rng(seed).permutation(len(parts)):
        total = metrics.merge(parts[part], total)
    whole = metrics.evaluate_batch(logit, label, weight)
    np.testing.assert_array_equal(total.positives, whole.positives)
    for key, value in metrics.summarize(whole).items():
        assert metrics.summarize(total)[key] == pytest.approx(value, rel=1e-9)


def test_a_constant_at_the_base_rate_has_normalized_entropy_1():
    found = metrics.evaluate_batch(np.full(4, np.log(0.25 / 0.75)), np.array([1.0, 0, 0, 0]), np.ones(4))
    assert metrics.summarize(found)["normalized_entropy"] == pytest.approx(1)
    with pytest.raises(ValueError, match="no example"):
        metrics.summarize(metrics.empty_evaluation())


MEASURES = {
    "evaluate_batch": lambda *a: metrics.summarize(metrics.evaluate_batch(*a))["log_loss"],
    "exact_auc": metrics.exact_auc,
}


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize(
    ("place", "value", "error", "message"),
    [
        (0, np.nan, FloatingPointError, "1 of 50 logits are wrong, the first is nan: the model has diverged"),
        (0, np.inf, FloatingPointError, "1 of 50 logits are wrong, the first is inf"),
        (1, 0.5, ValueError, "1 of 50 labels are wrong, the first is 0.5: labels of clicks are 0 or 1"),
        (1, np.nan, ValueError, "labels are wrong, the first is nan"),
        (2, -1.0, ValueError, "1 of 51 weights are wrong, the first is -1.0: weights are finite and 0 or more"),
        (2, np.nan, ValueError, "weights are wrong, the first is nan"),
        (2, np.inf, ValueError, "weights are wrong, the first is inf"),
    ],
)
def test_what_is_no_click_is_refused_and_padding_may_hold_it(name, place, value, error, message):
    logit, label, _ = click_data(0, n=51)
    weight = np.where(np.arange(51) == 7, 0.0, 1.0)
    good = MEASURES[name](logit, label, weight)
    for example in (7, 3):
        changed = [logit.copy(), label.copy(), weight.copy()]
        changed[place][example] = value
        if example == 7 and place != 2:  # has weight 0
            assert MEASURES[name](*changed) == good
        else:
            with pytest.raises(error, match=message):
                MEASURES[name](*changed)


@pytest.mark.parametrize("name", MEASURES)
def test_columns_are_refused(name):
    logit, label, weight = click_data(0, n=5)
    for arrays in ((logit[:, None], label, weight), (logit, label[:, None], weight), (logit, label, weight[:4])):
        with pytest.raises(ValueError, match="one of each for an example is expected"):
            MEASURES[name](*arrays)
