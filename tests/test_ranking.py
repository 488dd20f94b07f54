"""Metrics of rankings equal their definitions, on random inputs with ties and weights."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.metrics import evaluate_batch, exact_auc, summarize
from jaxrec.ranking import auc_interval, by_segment, gain_of_places, group_auc, places_of


def drawn(seed, n):
    """Scores with ties, labels, groups, and weights of which some are 0."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 6, n) / 3.0 - 1, rng.integers(0, 2, n), rng.integers(0, 5, n), rng.integers(0, 3, n) * 0.5


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 40))
def test_group_auc_is_the_weighted_mean_of_the_aucs_within(seed, n):
    score, label, group, weight = drawn(seed, n)
    if not weight.sum():
        weight = weight + 1
    aucs, weights = [], []
    for one in np.unique(group[weight > 0]):
        mine = (group == one) & (weight > 0)
        if len(set(label[mine])) == 2:
            aucs.append(exact_auc(score[mine], label[mine], weight[mine]))
            weights.append(weight[mine].sum())
    found = group_auc(score, label, np.array([f"user {one}" for one in group]), weight)
    wanted = np.average(aucs, weights=weights) if aucs else np.nan
    np.testing.assert_allclose(found["gauc"], wanted, rtol=1e-12)
    assert found["groups_counted"] == len(aucs) and found["groups"] == len(set(group[weight > 0]))
    np.testing.assert_allclose(found["share_counted"], sum(weights) / weight.sum())


def test_group_auc_does_not_see_what_lies_between_groups():
    """Scores that only tell users apart raise AUC but not group AUC."""
    label, group = np.array([1, 1, 1, 0, 1, 0, 0, 0]), np.repeat([0, 1], 4)
    score = 1.0 - group
    assert exact_auc(score, label) > 0.7 and group_auc(score, label, group)["gauc"] == 0.5


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 40))
def test_segments_are_the_metric_of_their_examples(seed, n):
    logit, label, segment, weight = drawn(seed, n)
    found = by_segment(logit, label, segment, weight)
    assert set(found) == {str(one) for one in segment[weight > 0]}
    sizes = [figures["examples"] for figures in found.values()]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == (weight > 0).sum()
    for name, figures in found.items():
        mine = (segment == int(name)) & (weight > 0)
        assert figures == pytest.approx(summarize(evaluate_batch(logit[mine], label[mine], weight[mine])), nan_ok=True)


def test_the_interval_covers_as_often_as_it_says():
    """Of 60 test sets from a known distribution, about 57 have its AUC within their 95 % interval."""
    inside, widths = 0, []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        label = (np.arange(300) % 3 == 0).astype(int)
        score = label + rng.standard_normal(300)
        auc, low, high = auc_interval(score, label, draws=200, seed=seed)
        assert low < auc < high and auc == exact_auc(score, label)
        inside += low < 0.7602 < high  # Phi(1 / sqrt(2))
        widths.append(high - low)
    assert 51 <= inside <= 60 and 0.09 < np.mean(widths) < 0.14


def test_the_interval_takes_ties_and_weights():
    score, label = np.array([0.0, 0.0, 1.0, 1.0]), np.array([0, 1, 0, 1])
    auc, low, high = auc_interval(score, label, np.array([1.0, 1.0, 0.0, 2.0]), draws=100)
    assert auc == exact_auc(score, label, np.array([1.0, 1.0, 0.0, 2.0])) and 0 <= low <= auc <= high <= 1
    assert auc_interval(score, label, draws=50, seed=3) == auc_interval(score, label, draws=50, seed=3)
    assert np.isnan(auc_interval(score, np.zeros(4), draws=10)).all()


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 10), items=st.integers(1, 12))
def test_places_and_their_gains(seed, n, items):
    rng = np.random.default_rng(seed)
    score, target = rng.integers(0, 4, (n, items)) * 0.5, rng.integers(0, items, n)
    places = places_of(score, target)
    for row, wanted, place in zip(score, target, places, strict=True):
        assert place == sum(other >= row[wanted] for i, other in enumerate(row) if i != wanted)
    found = gain_of_places(places, at=(1, 3))
    assert found["recall_at_3"] == np.mean([place < 3 for place in places])
    np.testing.assert_allclose(found["ndcg_at_3"], np.mean([1 / np.log2(p + 2) if p < 3 else 0 for p in places]))
    np.testing.assert_allclose(found["mrr"], np.mean([1 / (1 + place) for place in places]))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: group_auc(np.zeros(3), np.zeros(3), np.zeros(2)), ValueError, r"groups of shape \(2,\)"),
        (lambda: group_auc(np.zeros(3), np.full(3, 2), np.zeros(3)), ValueError, "labels of clicks are 0 or 1"),
        (lambda: group_auc(np.zeros(0), np.zeros(0), np.zeros(0)), ValueError, "nothing to measure"),
        (lambda: by_segment(np.zeros(3), np.zeros(3), np.zeros((3, 1))), ValueError, "segments of shape"),
        (lambda: by_segment(np.full(2, np.nan), np.zeros(2), np.zeros(2)), FloatingPointError, "diverged"),
        (lambda: auc_interval(np.zeros(3), np.zeros(3), draws=1), ValueError, "draws=1 must be"),
        (lambda: auc_interval(np.zeros(3), np.zeros(3), share=95), ValueError, "share=95 must lie"),
        (lambda: places_of(np.zeros((2, 3)), np.array([0, 3])), ValueError, "from 0 to 3, but there are 3 items"),
        (lambda: places_of(np.full((1, 3), np.nan), np.array([0])), FloatingPointError, "3 scores are NaN"),
        (lambda: gain_of_places(np.zeros(0)), ValueError, "at least one"),
        (lambda: gain_of_places(np.array([1]), at=(0,)), ValueError, "k of at=0 must be"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()
