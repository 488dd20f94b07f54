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
def test_streaming_auc_is_exact_to_1e_5(seed, spread):
    logit, label, weight = click_data(seed, spread=spread)
    result = metrics.summarize(metrics.evaluate_batch(logit, label, weight))
    assert abs(result["auc"] - metrics.exact_auc(logit, label, weight)) < 1e-5
    assert result["log_loss"] == pytest.approx(metrics.log_loss(logit, label, weight), rel=1e-12)
    assert result["normalized_entropy"] == pytest.approx(metrics.normalized_entropy(logit, label, weight), rel=1e-12)
    assert result["calibration"] == pytest.approx(
        np.sum(weight / (1 + np.exp(-logit))) / np.sum(weight * label), rel=1e-12
    )
    assert result["examples"] == np.sum(weight > 0)


def test_a_coarse_histogram_fails_the_same_bound(monkeypatch):
    """Negative control: with 64 bins the streaming AUC is no longer within 1e-5."""
    monkeypatch.setattr(metrics, "_BINS", 64)
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
    label = np.array([1.0, 0, 0, 0])
    assert metrics.normalized_entropy(np.full(4, np.log(0.25 / 0.75)), label) == pytest.approx(1)
    with pytest.raises(ValueError, match="no example"):
        metrics.summarize(metrics.empty_evaluation())
