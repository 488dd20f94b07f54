"""The synthetic click log is a pure function of the batch index; no model beats its teacher."""

import numpy as np
import pytest

from jaxrec import metrics
from jaxrec.data.synthetic import CRITEO_KAGGLE_CARDINALITIES, SyntheticClicks, scaled_cardinalities

CLICKS = SyntheticClicks(scaled_cardinalities(20_000), seed=3)


def test_batches_depend_on_their_index_alone():
    a, b = list(CLICKS.stream(50, batches=4)), list(CLICKS.stream(50, start=2, batches=4))
    for left, right in zip(a[2:], b, strict=True):
        np.testing.assert_array_equal(left.ids["sparse"], right.ids["sparse"])
        np.testing.assert_array_equal(left.label, right.label)
    assert (a[0].dense != a[1].dense).all()
    assert (CLICKS.batch(0, 50, test=True).dense != a[0].dense).all()


def test_ids_follow_their_power_law_and_stay_in_their_table():
    clicks = SyntheticClicks((1000, 3, 1), exponent=1.05)
    ids = np.concatenate([b.ids["sparse"] for b in clicks.stream(4096, batches=20)])
    assert (ids >= 0).all() and (ids < np.array([1000, 3, 1])).all()
    counts = np.bincount(ids[:, 0], minlength=1000)
    ranks = np.arange(8, 500)
    slope = np.polyfit(np.log(ranks + 1.5), np.log(counts[8:500]), 1)[0]
    assert slope == pytest.approx(-1.05, abs=0.05)


def test_the_teacher_is_calibrated_and_stronger_than_its_parts():
    batches = list(CLICKS.stream(4096, batches=10))
    logit = np.concatenate([CLICKS.teacher_logit(b) for b in batches])
    label = np.concatenate([b.label for b in batches])
    total = metrics.summarize(metrics.evaluate_batch(logit, label, np.ones(len(label))))
    assert total["calibration"] == pytest.approx(1, abs=0.03)
    assert total["normalized_entropy"] < 0.85 and 0.2 < total["label_mean"] < 0.3
    dense = np.concatenate([b.dense for b in batches])
    linear = dense @ np.linalg.lstsq(dense, logit - logit.mean(), rcond=None)[0]
    assert total["auc"] > metrics.exact_auc(linear, label) + 0.05


def test_scaled_cardinalities_sum_to_what_was_asked():
    whole = sum(CRITEO_KAGGLE_CARDINALITIES)
    for rows in (20_000, 200_000, 10_000_000, whole, 50_000_000, 10**9):
        scaled = scaled_cardinalities(rows)
        assert sum(scaled) == rows
        pairs = list(zip(scaled, CRITEO_KAGGLE_CARDINALITIES, strict=True))
        assert all(a >= b for a, b in pairs) if rows >= whole else all(a <= b + 1 for a, b in pairs)


def test_a_curved_share_leaves_the_log_alone_but_for_its_labels():
    curved, plain = SyntheticClicks((500, 70, 9), seed=3, curved=0.5), SyntheticClicks((500, 70, 9), seed=3)
    a, b = curved.batch(2, 4096), plain.batch(2, 4096)
    np.testing.assert_array_equal(a.ids["sparse"], b.ids["sparse"])
    assert 0.05 < (a.label != b.label).mean() < 0.5
    of_both = [clicks.teacher_logit(clicks.batch(0, 40_000)).std() for clicks in (curved, plain)]
    np.testing.assert_allclose(of_both, 1.5, rtol=0.2)  # the signal is as strong


def test_what_is_curved_is_neither_a_sum_nor_products_of_two_fields():
    """The best fit by pairs of categories leaves much of the variance; without curvature it leaves none."""

    def left(share):
        clicks = SyntheticClicks((3,) * 6, dense_features=0, curved=share, exponent=0.0)
        batch = clicks.batch(0, 20_000)
        logit = clicks.teacher_logit(batch).astype(np.float64)
        one_hot = np.eye(3)[batch.ids["sparse"]].reshape(len(logit), -1)
        pairs = (one_hot[:, :, None] * one_hot[:, None]).reshape(len(logit), -1)
        best = pairs @ np.linalg.lstsq(pairs, logit - logit.mean(), rcond=None)[0]
        return np.var(logit - logit.mean() - best) / np.var(logit)

    assert left(0.0) < 0.01 < 0.15 < left(1.0)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), "half"])
def test_a_curved_share_is_a_share(share):
    with pytest.raises(ValueError, match="curved=.* must be a share from 0 to 1"):
        SyntheticClicks((3, 3), curved=share)
