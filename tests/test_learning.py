"""The learning flags: one schedule for dense parameters and rows, and unchanged programs without one."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from main.learning import OPTIMIZERS, ROW_OPTIMIZERS, Learning

from jaxrec.embedding import sgd

STEPS = 20


def rates(steps=STEPS, **flags):
    """Learning rates of dense parameters and rows relative to their flags: f64[2, steps + 1]."""
    learning = Learning(optimizer="sgd", row_optimizer="sgd", learning_rate=0.5, row_learning_rate=2.0, **flags)
    dense, rows = learning.optimizers(steps)
    state, found = dense.init(jnp.zeros(())), []
    for step in range(steps + 1):
        change, state = dense.update(jnp.ones(()), state)
        value, _ = rows.update(jnp.ones(()), jnp.zeros(()), {}, jnp.int32(step))
        found.append((-float(change) / 0.5, -float(value) / 2.0))
    return np.array(found).T


@pytest.mark.parametrize("schedule", typing.get_args(Learning.__dataclass_fields__["schedule"].type))
@pytest.mark.parametrize("warmup", [0, 1, 8, STEPS - 1])
def test_both_halves_follow_one_schedule_from_0_to_the_peak_to_the_end(schedule, warmup):
    dense, rows = rates(schedule=schedule, warmup_steps=warmup)
    np.testing.assert_allclose(dense, rows, rtol=1e-6)
    np.testing.assert_allclose(dense[: warmup + 1], np.arange(warmup + 1) / warmup if warmup else 1, rtol=1e-6)
    behind = np.linspace(0, 1, STEPS - warmup + 1)
    wanted = {"constant": 1 + 0 * behind, "linear": 1 - behind, "cosine": (1 + np.cos(np.pi * behind)) / 2}[schedule]
    np.testing.assert_allclose(dense[warmup:], wanted, atol=1e-6)


def test_without_a_schedule_the_programs_are_those_of_floats():
    flags = Learning(optimizer="adam", row_optimizer="sgd")
    dense, rows = flags.optimizers(STEPS)
    params = {"w": jnp.ones(3)}
    text = lambda optimizer: jax.jit(optimizer.update).lower(params, optimizer.init(params), params).as_text()
    assert text(dense) == text(optax.adam(1e-3)) != text(Learning(schedule="cosine").optimizers(STEPS)[0])
    of_rows = lambda optimizer: jax.jit(optimizer.update).lower(jnp.ones(3), jnp.ones(3), {}, jnp.int32(0)).as_text()
    assert of_rows(rows) == of_rows(sgd(0.02))


@pytest.mark.parametrize("warmup", [STEPS, STEPS + 5, -1])
def test_a_warmup_that_takes_the_whole_run_is_refused(warmup):
    with pytest.raises(ValueError, match=f"--warmup-steps {warmup} must be less than the {STEPS} steps of the run"):
        rates(warmup_steps=warmup)


def test_every_choice_of_a_flag_is_there():
    choices = {name: typing.get_args(field.type) for name, field in Learning.__dataclass_fields__.items()}
    for dense in choices["optimizer"]:
        for rows in choices["row_optimizer"]:
            for schedule in choices["schedule"]:
                assert len(Learning(optimizer=dense, row_optimizer=rows, schedule=schedule).optimizers(5)) == 2
    assert choices["optimizer"] == tuple(OPTIMIZERS) and choices["row_optimizer"] == tuple(ROW_OPTIMIZERS)


def test_dense_gradients_are_clipped_and_then_decay_is_added():
    params, gradient = {"a": jnp.full(3, 4.0), "b": jnp.zeros(1)}, {"a": jnp.zeros(3), "b": jnp.full(1, 10.0)}

    def step(**flags):
        dense, _ = Learning(optimizer="sgd", learning_rate=1.0, **flags).optimizers(STEPS)
        change, _ = dense.update(gradient, dense.init(params), params)
        return jax.tree.map(float, {"a": -change["a"][0], "b": -change["b"][0]})

    assert step() == {"a": 0, "b": 10} and step(weight_decay=0.5) == {"a": 2, "b": 10}
    assert step(clip_norm=5.0) == {"a": 0, "b": 5} and step(clip_norm=5.0, weight_decay=0.5) == {"a": 2, "b": 5}
