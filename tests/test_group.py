"""`SyncGroup`, ShadowSync's entry point: equals its parts assembled by hand, and needs only its docstring."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrec import StepInfo
from jaxrec.shadowsync import (
    AllToAll,
    Centre,
    Foreground,
    Shadow,
    SyncGroup,
    bmuf,
    easgd,
    model_averaging,
)
from jaxrec.types import DenseState, TrainState

PARAMS = {"w": np.zeros(3, np.float32)}
RULES = [model_averaging(1.0), bmuf(0.5, momentum=0.5), easgd(0.3)]

A_NEWCOMERS_SCRIPT = """
from concurrent.futures import ThreadPoolExecutor
import numpy as np, optax
from flax import nnx
from jaxrec.shadowsync import SyncGroup, easgd

class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(2, 16, rngs=rngs), nnx.Linear(16, 2, rngs=rngs)
    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))

@nnx.jit
def step(model, optimizer, x, label):
    loss = lambda model: optax.softmax_cross_entropy_with_integer_labels(model(x), label).mean()
    optimizer.update(model, nnx.grad(loss)(model))

group = SyncGroup(easgd(), nnx.state(Classifier(nnx.Rngs(0))), trainers=2)

def train(number):
    data, model = np.random.default_rng(number), Classifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)
    with group.trainer(number) as sync:
        while sync.steps < STEPS or not sync.rounds:
            x = data.normal(size=(64, 2)).astype(np.float32)
            step(model, optimizer, x, (x[:, 0] * x[:, 1] > 0).astype(np.int32))
            nnx.update(model, sync.exchange(nnx.state(model)))
        nnx.update(model, sync.finish(nnx.state(model)))
    return model, sync.rounds
"""


def classifiers(steps):
    """Models that the newcomer's trainers have trained for `steps` steps, and until each had a round."""
    names = {"STEPS": steps}
    exec(A_NEWCOMERS_SCRIPT, names)
    return together(names["train"], 2)


def test_a_classifier_of_flax_nnx_is_synchronised_in_less_than_thirty_lines():
    assert len(A_NEWCOMERS_SCRIPT.strip().splitlines()) < 30
    (one, rounds), (other, of_other) = classifiers(20)
    assert rounds > 0 < of_other
    jax.tree.map(np.testing.assert_array_equal, nnx.state(one), nnx.state(other))
    start = nnx.state(type(one)(nnx.Rngs(0)))
    moved = jax.tree.map(lambda now, then: float(abs(now - then).max()), nnx.state(one), start)
    assert min(jax.tree.leaves(moved)) > 0


@pytest.mark.realtime
def test_what_the_newcomer_has_trained_classifies():
    """The two threads' rounds run freely, so that no two runs are alike."""
    (one, _), _ = classifiers(300)
    x = np.random.default_rng(9).normal(size=(2000, 2)).astype(np.float32)
    assert ((one(x).argmax(1) == 1) == (x[:, 0] * x[:, 1] > 0)).mean() > 0.85


def together(act, number):
    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(act, range(number)))


def trained(make, number=3, steps=6):
    """(weights before `finish`, after it, rounds) of trainers with different steps; `make` creates synchronisers."""

    def train(i):
        params = jax.tree.map(jnp.asarray, PARAMS)
        with make(i) as sync:
            for _ in range(steps):
                params = sync.exchange(jax.tree.map(lambda x: x + i, params))
            return np.asarray(params["w"]), np.asarray(sync.finish(params)["w"]), sync.rounds

    return together(train, number)


@pytest.mark.parametrize("rule", RULES[:2], ids=lambda rule: rule.name)
def test_a_group_in_the_foreground_is_what_the_parts_are_by_hand_to_the_bit(rule):
    group, transport = SyncGroup(rule, PARAMS, 3, every_steps=2), AllToAll(rule, PARAMS, 3)
    found = trained(group.trainer)
    jax.tree.map(np.testing.assert_array_equal, found, trained(lambda i: Foreground(transport, i, every_steps=2)))
    assert [rounds for *_, rounds in found] == [3, 3, 3]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("given", [{}, {"every_steps": 2}], ids=str)
def test_the_transport_follows_from_the_rule_and_the_kind_from_the_arguments(rule, given):
    group = SyncGroup(rule, PARAMS, 2, **given)
    assert type(group.transport) is (Centre if rule.has_centre else AllToAll)
    for i in range(2):
        assert type(group.trainer(i)) is (Foreground if given else Shadow)
    assert group.trainer(0) is not group.trainer(0)


def test_with_a_centre_all_end_with_its_parameters():
    group = SyncGroup(easgd(0.3), PARAMS, 3)
    for _, end, _ in trained(group.trainer):
        np.testing.assert_array_equal(end, group.transport.parameters["w"])


def test_a_train_state_is_taken_as_plain_parameters_are():
    """Likewise in `after_step`, which an engine calls."""
    state = TrainState(DenseState(jnp.int32(4), {"w": jnp.array([[0.0] * 3, [8.0] * 3])}, {}), "tables")
    with SyncGroup(model_averaging(1.0), PARAMS, 1, every_steps=1).trainer(0) as sync:
        found = sync.after_step(StepInfo(state, 1, {}, {}))
        ended = sync.finish(found)
    for each in (found, ended):
        np.testing.assert_array_equal(each.dense.params["w"], np.full((2, 3), 4.0))
        assert int(each.dense.step) == 4 and each.tables == "tables"
