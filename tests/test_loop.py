"""The loop: callbacks in order, a non-finite loss is named, plans are made ahead and grow."""

import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest
from threads import until

from jaxrec import Serial, evaluate, every, planned
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, sgd
from jaxrec.types import Batch, DenseState, TrainState

SPEC = EmbeddingSpec({"t": Table(200, 4)}, {"t": Lookup("t")}, shards=1)


def state_at(step):
    return TrainState(DenseState(jnp.asarray(step), {}, {}), HostTables.create(SPEC, sgd(0.1)))


def batches(number):
    """Batches of one example each, with ids that count up from 0."""
    return (Batch({"t": np.array([index])}, np.zeros(1, np.float32)) for index in range(number))


def counting(losses):
    """A task whose step only counts; the losses are those of the ids."""

    def step(state, batch, plans):
        dense = state.dense._replace(step=state.dense.step + 1)
        return state._replace(dense=dense), {"loss": jnp.asarray(losses[batch.ids["t"][0]])}

    return types.SimpleNamespace(step=step)


def test_every_callback_is_called_once_a_step_in_order():
    seen, losses = [], [0.5, 0.4, 0.3]

    def note(name):
        return lambda info: seen.append(
            (name, int(info.state.dense.step), info.step, info.plans["width_4"].unique[0, 0], info.metrics["loss"])
        )

    state = Serial(counting(losses), state_at(7), [note("a"), every(3, note("b"))]).train(batches(3))
    assert int(state.dense.step) == 10
    a = [("a", 8 + i, 8 + i, i, pytest.approx(losses[i])) for i in range(3)]
    assert seen == [a[0], a[1], ("b", *a[1][1:]), a[2]]


@pytest.mark.parametrize("bad", [0, 4, 120])
def test_a_loss_that_is_not_finite_stops_the_run_within_100_steps_and_names_the_step(bad):
    losses, steps = [0.1] * 130, []
    losses[bad] = float("nan")
    engine = Serial(counting(losses), state_at(0), [lambda info: steps.append(info.step)])
    with pytest.raises(FloatingPointError, match=f"nan at step {bad + 1} .*learning rates"):
        engine.train(batches(130))
    assert len(steps) == (100 if bad < 100 else 130)


def test_planned_grows_and_keeps_its_capacity():
    spec = EmbeddingSpec({"t": Table(1000, 4)}, {"t": Lookup("t")}, shards=1)

    def batches():
        for size in (3, 30, 3):
            ids = np.where(np.arange(64) < size, np.arange(64), -1)
            yield Batch({"t": ids}, np.zeros(64, np.float32))

    shapes = [plans["width_4"].unique.shape[1] for _, plans in planned(spec, batches())]
    assert shapes == [8, 30, 30]


def one_each(number, taken):
    for index in range(number):
        taken.append(index)
        yield Batch({"t": np.array([index])}, np.zeros(1, np.float32))
    raise OSError("disk on fire")


def test_planned_stays_three_ahead_raises_in_place_and_ends_its_thread():
    planners, taken = lambda: [thread for thread in threading.enumerate() if thread.name == "plan"], []
    pairs = planned(SPEC, one_each(8, taken))
    next(pairs)
    assert planners()
    until(lambda: len(taken) == 4)
    pairs.close()
    assert len(taken) == 4 and not planners()
    pairs = planned(SPEC, one_each(2, []))
    assert [int(batch.ids["t"][0]) for batch, _ in (next(pairs), next(pairs))] == [0, 1]
    with pytest.raises(OSError, match="disk on fire"):
        next(pairs)
    assert not planners()


def test_evaluate_ignores_padding():
    batch = Batch({}, np.array([1.0, 0, 1]), weight=np.array([1.0, 1, 0]))
    plans = types.SimpleNamespace()
    result = evaluate(None, [(batch, plans)] * 2, lambda state, batch, plans: np.array([2.0, -2, -9]))
    assert result["auc"] == 1 and result["examples"] == 4


def test_an_evaluation_of_one_class_says_why_its_auc_is_nan():
    with pytest.warns(UserWarning, match="all labels of the 2 examples are 1,"):
        result = evaluate(None, [(Batch({}, np.ones(2)), None)], lambda *_: np.zeros(2))
    assert np.isnan(result["auc"])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_evaluation_that_is_not_finite_names_step_and_batch(bad):
    batch = Batch({}, np.array([1.0, 0]))
    logits = iter([np.zeros(2), np.array([0.5, bad])])
    with pytest.raises(FloatingPointError, match=f"after step 7, in its batch 1: 1 of 2 logits .* is {bad}: the model"):
        evaluate(state_at(7), [(batch, None)] * 2, lambda *_: next(logits))
