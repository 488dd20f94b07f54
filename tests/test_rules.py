"""Rules of ShadowSync: invariants, rates of convergence, and updates made during a round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrec.shadowsync.rules import bmuf, easgd, mean_of, model_averaging

ALPHAS = st.sampled_from([0.1, 0.25, 0.5, 0.9, 1.0])


def replicas_of(seed, number, kind=np.asarray):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: kind(rng.normal(size=shape).astype(np.float32))
    return [{"kernel": draw(3, 2), "layers": [draw(4)]} for _ in range(number)]


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.float64)


def round_of_all(rule, shared, replicas):
    """One foreground round of all replicas."""
    if rule.has_centre:
        for i, replica in enumerate(replicas):
            shared, target = rule.combine(shared, replica)
            replicas[i] = rule.merge(replica, replica, target)
        return shared, replicas
    shared, target = rule.combine(shared, mean_of(replicas))
    return shared, [rule.merge(replica, replica, target) for replica in replicas]


@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.more)])
@given(seed=st.integers(0, 99), number=st.integers(1, 6), alpha=ALPHAS)
def test_symmetric_easgd_keeps_the_sum_and_brings_trainer_and_centre_together(rounds, seed, number, alpha):
    rule, replicas = easgd(alpha), replicas_of(seed, number)
    centre = rule.init(replicas_of(seed + 100, 1)[0])
    gap = flat(replicas[0]) - flat(centre)
    once, target = rule.combine(centre, replicas[0])
    near = rule.merge(replicas[0], replicas[0], target)
    np.testing.assert_allclose(flat(near) - flat(once), (1 - 2 * alpha) * gap, atol=1e-5)
    total = sum(map(flat, replicas)) + flat(centre)
    for _ in range(rounds):
        centre, replicas = round_of_all(rule, centre, replicas)
    np.testing.assert_allclose(sum(map(flat, replicas)) + flat(centre), total, atol=1e-5 * (number + 1))


@given(seed=st.integers(0, 99), alpha=ALPHAS)
def test_sequential_easgd_shrinks_the_gap_by_its_square_and_keeps_no_sum(seed, alpha):
    rule, (live, centre) = easgd(alpha, "sequential"), replicas_of(seed, 2)
    moved, target = rule.combine(rule.init(centre), live)
    near = rule.merge(live, live, target)
    np.testing.assert_allclose(flat(near) - flat(moved), (1 - alpha) ** 2 * (flat(live) - flat(centre)), atol=1e-5)
    if alpha < 1:
        assert np.abs(flat(near) + flat(moved) - flat(live) - flat(centre)).max() > 1e-3


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("alpha", [0.1, 0.5])
@pytest.mark.parametrize("every", [1, 4])
def test_the_centre_of_symmetric_easgd_is_one_more_to_be_moved(number, alpha, every):
    """Replicas that make steps of 1 move at n / (n + 1) with the centre, and at 1 under model averaging."""
    for rule, speed in ((easgd(alpha), number / (number + 1)), (model_averaging(alpha), 1.0)):
        replicas, shared = [np.zeros(1) for _ in range(number)], rule.init(np.zeros(1))
        at = []
        for step in range(1, 801):
            replicas = [replica + 1 for replica in replicas]
            if step % every == 0:
                shared, replicas = round_of_all(rule, shared, replicas)
            at.append(np.mean(replicas))
        assert (at[-1] - at[399]) / 400 == pytest.approx(speed, rel=1e-3)


def test_platoon_case():
    """mila-iqia/platoon's own test: workers at +-[3, 4], centre 0, alpha one half."""
    rule, centre = easgd(0.5), {"w": np.zeros(2)}
    replicas = [{"w": sign * np.array([3.0, 4.0])} for sign in (1, -1)]
    moves = [rule.combine(centre, replica) for replica in replicas]  # both against the initial centre
    after = [rule.merge(r, r, target) for r, (_, target) in zip(replicas, moves, strict=True)]
    np.testing.assert_array_equal(sum(moved["w"] for moved, _ in moves), np.zeros(2))
    np.testing.assert_array_equal([a["w"] for a in after], [[1.5, 2.0], [-1.5, -2.0]])


@given(seed=st.integers(0, 99), number=st.integers(1, 6), alpha=ALPHAS, form=st.sampled_from(["lerp", "delta"]))
def test_model_averaging_keeps_the_mean_and_shrinks_the_spread(seed, number, alpha, form):
    rule, replicas = model_averaging(alpha, form), replicas_of(seed, number)
    _, after = round_of_all(rule, rule.init(replicas[0]), list(replicas))
    mean = np.mean([flat(r) for r in replicas], axis=0)
    np.testing.assert_allclose(np.mean([flat(r) for r in after], axis=0), mean, atol=1e-5)
    for before, now in zip(replicas, after, strict=True):
        np.testing.assert_allclose(flat(now) - mean, (1 - alpha) * (flat(before) - mean), atol=1e-5)


@given(seed=st.integers(0, 99), number=st.integers(1, 6), alpha=ALPHAS, form=st.sampled_from(["lerp", "delta"]))
def test_bmuf_without_momentum_is_model_averaging(seed, number, alpha, form):
    first, second = bmuf(alpha, form=form), model_averaging(alpha, form)
    replicas = replicas_of(seed, number)
    shared = first.init(replicas[0])
    for _ in range(3):
        shared, a = round_of_all(first, shared, list(replicas))
        _, b = round_of_all(second, (), list(replicas))
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(flat(x), flat(y), atol=1e-5)
        replicas = a


def test_bmuf_with_momentum_by_hand():
    rule = bmuf(alpha=1.0, eta=0.5, momentum=0.5)
    block = rule.init({"w": np.array([0.0])})
    block, target = rule.combine(block, {"w": np.array([4.0])})  # v = 2, g = 2
    assert target["w"] == 2
    block, target = rule.combine(block, {"w": np.array([4.0])})  # v = 0.5 * 2 + 0.5 * 2 = 2, g = 4
    assert target["w"] == 4
    block, target = rule.combine(block, {"w": np.array([4.0])})  # v = 1: the global model goes on beyond the mean
    assert target["w"] == 5 and block.momentum["w"] == 1


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (model_averaging(1.0, "lerp"), 0.0),  # overwritten
        (model_averaging(0.25, "lerp"), 0.75),
        (model_averaging(), 1.0),  # the defaults keep all
        (bmuf(momentum=0.0), 1.0),
        (easgd(), 1.0),
        (model_averaging(1.0, "delta"), 1.0),
        (bmuf(0.25, form="lerp"), 0.75),
        (bmuf(1.0, form="delta"), 1.0),
        (easgd(0.25), 1.0),
        (easgd(0.25, "sequential"), 0.75),
    ],
)
def test_what_is_kept_of_updates_made_during_a_round(rule, kept):
    """Lost update: a trainer adds 1 to its parameters 8 times while a round is held."""
    before = {"w": np.full(3, 5.0)}
    _, target = rule.combine(rule.init(before), before)
    live = {"w": before["w"] + 8}
    np.testing.assert_allclose(rule.merge(live, before, target)["w"], 5 + kept * 8)


@pytest.mark.parametrize("rule", [easgd(), easgd(form="sequential"), model_averaging(), bmuf(momentum=0.5)])
def test_rules_work_on_numpy_without_jax_and_under_jit(rule):
    on_host, on_device = replicas_of(3, 2), replicas_of(3, 2, jnp.asarray)
    found = []
    for wrap, (a, b) in ((lambda f: f, on_host), (jax.jit, on_device)):
        shared, target = wrap(rule.combine)(wrap(rule.init)(a), b)
        found.append((shared, target, wrap(rule.merge)(b, a, target)))
    assert all(isinstance(leaf, np.ndarray) and leaf.dtype == np.float32 for leaf in jax.tree.leaves(found[0]))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), *found)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: easgd(0.0), "alpha=0.0"),
        (lambda: model_averaging(1.5), "alpha=1.5"),
        (lambda: bmuf(-1), "alpha=-1"),
        (lambda: easgd(form="both"), "form='both'"),
        (lambda: model_averaging(form="mean"), "form='mean'"),
        (lambda: bmuf(eta=0), "eta=0"),
        (lambda: bmuf(momentum=1.0), "momentum=1.0"),
        (lambda: mean_of([]), "no replicas"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
