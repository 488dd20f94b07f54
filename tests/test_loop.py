"""The loop: hooks in order, a non-finite loss is named, plans are made ahead and grow."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import loop
from jaxrec.embedding import EmbeddingSpec, Lookup, Table
from jaxrec.step import run_hooks
from jaxrec.types import Batch, DenseState, TrainState


def state_at(step):
    return TrainState(DenseState(jnp.asarray(step), {}, {}), None)


def counting_step(losses):
    def step(state, plan, batch):
        dense = state.dense._replace(step=state.dense.step + 1)
        return state._replace(dense=dense), {"loss": jnp.asarray(losses[batch])}

    return step


def test_fit_runs_every_hook_once_a_step_in_order():
    seen = []

    def hook(name):
        return lambda state, step, plan, metrics: seen.append((name, step, plan, float(metrics["loss"]))) or state

    losses = [0.5, 0.4, 0.3]
    state = loop.fit(
        state_at(7), [(i, f"plan{i}") for i in range(3)], counting_step(losses), [hook("a"), loop.every(3, hook("b"))]
    )
    assert int(state.dense.step) == 10
    a = [("a", 8 + i, f"plan{i}", pytest.approx(losses[i])) for i in range(3)]
    assert seen == [a[0], a[1], ("b", 9, "plan1", pytest.approx(0.4)), a[2]]
    assert run_hooks([lambda s, *_: s + 1, lambda s, *_: s * 10], 1, 0, None, None) == 20


def test_planned_grows_and_keeps_its_capacity():
    spec = EmbeddingSpec({"t": Table(1000, 4)}, {"t": Lookup("t")}, shards=1)

    def batches():
        for size in (3, 30, 3):
            ids = np.where(np.arange(64) < size, np.arange(64), -1)
            yield Batch({"t": ids}, *[np.zeros(64, np.float32)] * 3)

    shapes = [plans["width_4"].unique.shape[1] for _, plans in loop.planned(spec, batches())]
    assert shapes == [8, 30, 30]


def test_every_refuses_zero():
    with pytest.raises(ValueError, match="from 1"):
        loop.every(0, lambda *a: None)


def test_evaluate_ignores_padding():
    batch = Batch({}, None, np.array([1.0, 0, 1]), np.array([1.0, 1, 0]))
    plans = types.SimpleNamespace()
    result = loop.evaluate(None, [(batch, plans)] * 2, lambda state, plan, batch: np.array([2.0, -2, -9]))
    assert result["auc"] == 1 and result["examples"] == 4


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_evaluation_that_is_not_finite_names_step_and_batch(bad):
    batch = Batch({}, None, np.array([1.0, 0]), np.ones(2))
    logits = iter([np.zeros(2), np.array([0.5, bad])])
    with pytest.raises(FloatingPointError, match=f"after step 7, in its batch 1: 1 of 2 logits .* is {bad}: the model"):
        loop.evaluate(state_at(7), [(batch, None)] * 2, lambda *_: next(logits))
