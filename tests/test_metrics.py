"""Metrics of clicks and of rankings equal their definitions; merging is addition."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec import metrics
from jaxrec.metrics import evaluate_batch, exact_auc, summarize
from jaxrec.ranking import auc_interval, by_segment, gain_of_places, group_auc, places_of


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


@pytest.mark.parametrize("scale", [10.0, 1e3, 1e7, 1e37])
def test_the_auc_of_logits_beyond_20_is_exact_to_the_share_of_pairs_closer_than_two_percent(scale):
    """They are those of a model of unscaled features; in one bin on each side, half of their pairs counted as ties."""
    logit, label, weight = click_data(5)
    logit = (scale * logit).astype(np.float32)
    assert np.mean(np.abs(logit) > 20) > 0.1
    evaluation = metrics.evaluate_batch(logit, label, weight)
    clicks, others = evaluation.positives, evaluation.negatives
    shared = np.sum(clicks * others) / (clicks.sum() * others.sum())
    error = abs(metrics.summarize(evaluation)["auc"] - metrics.exact_auc(logit, label, weight))
    assert error <= shared / 2 + 1e-12 and shared < 0.02 and error < 1e-4
    order = np.sort(np.concatenate([logit, [0.0, 20.0, -20.0, 3.4e38, -3.4e38]]))
    each = [
        np.argmax(metrics.evaluate_batch(np.array([one]), np.ones(1), np.ones(1)).positives) for one in order[::200]
    ]
    assert each == sorted(each)


def test_a_coarse_histogram_fails_the_same_bound(monkeypatch):
    """Negative control: with 64 bins the streaming AUC is no longer within 1e-5."""
    monkeypatch.setattr(metrics, "FINE_BINS", 64)
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


# ---- rankings, on random inputs with ties and weights


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
        (lambda: places_of(np.zeros((2, 3)), np.array([0])), ValueError, "2 queries and 1 targets"),
        (lambda: places_of(np.full((1, 3), np.nan), np.array([0])), FloatingPointError, "3 scores are NaN"),
        (lambda: gain_of_places(np.zeros(0)), ValueError, "at least one"),
        (lambda: gain_of_places(np.array([1]), at=(0,)), ValueError, "k of at=0 must be"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()
