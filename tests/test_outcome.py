"""Arguments and results of losses: repeatable keys, and figures and variables averaged over devices."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from nonlinear_model import SPEC, batch_of, loss, params
from strategies import chosen

import jaxrec
from jaxrec.embedding import HostTables, plan, rowwise_adagrad, sgd
from jaxrec.oac import Pipeline
from jaxrec.step import gradients

OPTIMIZER, ROWS = optax.adam(0.01), rowwise_adagrad(0.1, 0.1)
ONE = np.zeros((1, 3), np.float32)  # the dense features of one example
SHAPES = {
    "one number": lambda x: jnp.sum(x),
    "a column": lambda x: x[:, None],
    "a row": lambda x: x[None],
    "a square": lambda x: x[:, None] - x[None, :],
    "half of the examples": lambda x: x[::2],
}


def step_with(loss_or_predict, devices=2, home="device", train=True):
    """Run one step with a loss or a prediction; return its result."""
    mesh = jaxrec.make_mesh(devices=jax.devices()[:devices])
    task = jaxrec.Task(SPEC, loss_or_predict if train else loss, optax.sgd(0.1), sgd(0.1), mesh)
    step = task.step if train else jaxrec.make_eval_step(SPEC, loss_or_predict, mesh)
    return step(task.init(params(), home), batch_of(0))


@pytest.mark.parametrize(
    ("train", "name"),
    chosen([(train, name) for train in (True, False) for name in SHAPES], lambda train, name: train or name == "a row"),
)
def test_a_loss_is_one_number_for_each_example_and_a_prediction_that_or_a_vector(name, train):
    wrong = lambda *args: SHAPES[name](loss(*args))
    if not train and name == "a square":
        assert step_with(wrong, train=False).shape == (16, 8)
        return
    with pytest.raises(ValueError, match=r"for 8 examples .of one device., but one number for each is expected"):
        step_with(wrong, train=train)
    step_with(loss, train=train)


def test_gradients_alone_look_at_the_loss_too():
    found = functools.partial(_gradients, batch_of(0))
    for change in SHAPES.values():
        with pytest.raises(ValueError, match="loss returned an array of shape .* for 16 examples"):
            found(lambda *args, change=change: change(loss(*args)))
    with pytest.raises(ValueError, match="wants a key, `rng`, and gets none"):
        found(dropped)
    with pytest.raises(ValueError, match=r"variables \['bias'\], but free trainers apply gradients"):
        found(lambda p, a, b: (loss(p, a, b), {}, {"bias": p["bias"]}))


def _gradients(batch, wanted):
    plans = plan(SPEC, batch.ids)
    values = {name: rows.value for name, rows in HostTables.create(SPEC, sgd(0.1)).read(plans).items()}
    return gradients(params(), values, plans, batch, spec=SPEC, loss=wanted)


# ---- the key


def dropped(params, activations, batch, *, rng):
    """A loss with dropout; returns its key's draw as a figure."""
    keep = jax.random.bernoulli(rng, 0.8, activations["pair"].shape)
    activations = {**activations, "pair": jnp.where(keep, activations["pair"], 0)}
    return loss(params, activations, batch), {"draw": jax.random.uniform(rng)}


def run(batches, seed=3, home="device", mesh=None, state=None, wanted=dropped, start=None):
    """(state after the batches, metrics of each step)."""
    task, told = jaxrec.Task(SPEC, wanted, OPTIMIZER, ROWS, mesh, seed), []
    state = state or task.init(start or params(), home)
    for batch in batches:
        state, metrics = task.step(state, batch)
        told.append({name: float(value) for name, value in metrics.items()})
    return state, told


def draw(seed, step, device=0):
    return float(jax.random.uniform(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), device)))


@pytest.mark.parametrize("home", [pytest.param("device", marks=pytest.mark.slow), "host"])
def test_a_resumed_run_draws_what_one_without_a_break_draws(home):
    batches = [batch_of(i) for i in range(5)]
    whole, told = run(batches, home=home)
    half, first = run(batches[:3], home=home)
    resumed, second = run(batches[3:], home=home, state=half)
    assert first + second == told and [t["draw"] for t in told] == [draw(3, step) for step in range(5)]
    jax.tree.map(np.testing.assert_array_equal, resumed.dense, whole.dense)
    assert run(batches[:1], seed=4)[1][0]["loss"] != told[0]["loss"]


@pytest.mark.parametrize("mode", ["sync", "oac"])
def test_every_mode_draws_what_the_step_draws_and_keeps_what_it_keeps(mode):
    batches = [batch_of(i) for i in range(6)]
    start = {**params(), "seen": np.zeros(3, np.float32)}
    wanted, told = run(batches, home="host", wanted=all_at_once, start=start)
    task = jaxrec.Task(SPEC, all_at_once, OPTIMIZER, ROWS, seed=3)
    with Pipeline(task, task.init(start, "host"), mode=mode) as pipeline:
        found = [{name: float(metrics[name]) for name in told[0]} for _, metrics in pipeline.run(batches)]
    assert found == told
    jax.tree.map(np.testing.assert_array_equal, pipeline.state.dense, wanted.dense)


def all_at_once(params, activations, batch, *, rng):
    per_example, figures = dropped(params, activations, batch, rng=rng)
    return per_example, figures, {"seen": params["seen"] + jnp.mean(batch.dense, axis=0)}


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_each_device_and_each_replica_has_a_key_of_its_own(replicas):
    """Only one device's examples have weight, so that the figure is this device's draw."""
    mesh, found = jaxrec.make_mesh(replicas, jax.devices()[:4]), []
    for device in range(4):
        weight = np.where(np.arange(16) // 4 == device, 2, 0).astype(np.float32)
        found.append(run([batch_of(0)._replace(weight=weight)], mesh=mesh)[1][0]["draw"] * replicas)
    np.testing.assert_allclose(found, [draw(3, 0, device) for device in range(4)], rtol=1e-6)
    assert len(set(found)) == 4


def test_a_loss_that_uses_nothing_new_is_the_same_program():
    batch = batch_of(0)
    plans, state = plan(SPEC, batch.ids), jaxrec.Task(SPEC, loss, OPTIMIZER, ROWS).init(params(), "host")

    def text(wanted, seed=None):
        update = jax.jit(jaxrec.Task(SPEC, wanted, OPTIMIZER, ROWS, seed=seed).checked_update)
        return update.lower(state.dense, state.tables.read(plans), plans, batch).as_text()

    plain = text(loss)
    assert text(lambda *args: (loss(*args), {})) == text(lambda *args: (loss(*args), {}, {})) == plain
    assert "threefry" not in plain and "random" not in plain
    assert "threefry" in text(lambda *args, rng: loss(*args) * jax.random.uniform(rng), seed=0)


# ---- figures


def told_apart(params, activations, batch):
    """Figures of both shapes and several dtypes; invalid where weights are 0."""
    per_example = loss(params, activations, batch)
    broken = jnp.where(batch.weight > 0, per_example, jnp.nan)
    own = jnp.sum(per_example * batch.weight) / jnp.sum(batch.weight)  # NaN on a device with padding only
    figures = {"each": broken, "mean": own, "above": per_example > 1, "low": per_example.astype(jnp.bfloat16)}
    return per_example, {**figures, "constant": 0.25, "bias": params["bias"][0]}


@pytest.mark.parametrize(
    ("devices", "replicas", "padding"),
    chosen(
        [(1, 1, 0), (1, 1, 9), (2, 1, 9), (4, 1, 9), (8, 1, 9), (4, 2, 0), (8, 2, 9)],
        lambda devices, replicas, padding: replicas == 2 or (devices in (1, 8) and padding == 9),
    ),
)
def test_figures_are_averaged_as_the_loss_is(devices, replicas, padding):
    mesh = jaxrec.make_mesh(replicas, jax.devices()[:devices])
    told = run([batch_of(0, padding=padding)], None, mesh=mesh, wanted=told_apart)[1][0]
    parts = np.split(np.arange(16), replicas)
    batch = batch_of(0, padding=padding)
    per_example = np.asarray(jax.device_get(_per_example(batch)))
    weights = [batch.weight[part] / max(batch.weight[part].sum(), 1e-30) for part in parts]
    mean = lambda values: np.mean([values[part] @ weight for part, weight in zip(parts, weights, strict=True)])
    np.testing.assert_allclose([told["each"], told["mean"]], [told["loss"]] * 2, rtol=1e-5)
    np.testing.assert_allclose(told["loss"], mean(per_example), rtol=1e-5)
    np.testing.assert_allclose(told["above"], mean((per_example > 1).astype(np.float32)), rtol=1e-5)
    np.testing.assert_allclose(told["low"], told["loss"], rtol=1e-2)
    filled = np.mean([np.any(weight) for weight in weights])  # a replica without examples reports 0, as for its loss
    np.testing.assert_allclose([told["constant"], told["bias"]], [0.25 * filled, 0], rtol=1e-6)


def _per_example(batch):
    tables, plans = HostTables.create(SPEC, ROWS), plan(SPEC, batch.ids)
    values = {name: rows.value for name, rows in tables.read(plans).items()}
    return loss(params(), jaxrec.activations(SPEC, values, plans), batch)


# ---- variables


def keeps_means(params, activations, batch):
    """A moving mean of the dense features; undefined where there is only padding."""
    mean = jnp.sum(batch.dense * batch.weight[:, None], axis=0) / jnp.sum(batch.weight)
    return loss(params, activations, batch), {}, {"seen": {"mean": 0.5 * params["seen"]["mean"] + 0.5 * mean}}


def means(devices, replicas=1, padding=0, steps=2, optimizer=OPTIMIZER):
    mesh = jaxrec.make_mesh(replicas, jax.devices()[:devices])
    start = {**params(), "seen": {"mean": np.ones(3, np.float32)}}
    task = jaxrec.Task(SPEC, keeps_means, optimizer, ROWS, mesh)
    state = task.init(start)
    for batch in [batch_of(i, padding=padding) for i in range(steps)]:
        state, _ = task.step(state, batch)
    return np.asarray(state.dense.params["seen"]["mean"])


def wanted_means(part, padding=0, steps=2):
    found = np.ones(3, np.float32)
    for batch in [batch_of(i, padding=padding) for i in range(steps)]:
        weight = batch.weight[part]
        found = 0.5 * found + 0.5 * (weight @ batch.dense[part]) / weight.sum() if weight.any() else found
    return found


@pytest.mark.parametrize(
    ("devices", "padding"),
    chosen([(1, 0), (2, 9), (4, 9), (8, 0), (8, 9)], lambda devices, padding: (devices, padding) in ((1, 0), (8, 9))),
)
def test_variables_are_averaged_over_the_devices_of_a_replica(devices, padding):
    found = means(devices, padding=padding)
    np.testing.assert_allclose(found, [wanted_means(slice(0, 16), padding)], rtol=1e-5)


@pytest.mark.parametrize("padding", [0, 9])  # 9: the second replica, all padding, stays unchanged
def test_each_replica_keeps_its_own_variables(padding):
    found = means(4, 2, padding)
    wanted = [wanted_means(slice(start, start + 8), padding) for start in (0, 8)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 1e-3


def test_no_optimizer_touches_variables_and_without_examples_they_stay():
    decayed = optax.chain(optax.clip_by_global_norm(1e-3), optax.adamw(0.1, weight_decay=0.5))
    np.testing.assert_array_equal(means(1, optimizer=decayed), means(1))
    for devices in (1, 4):
        np.testing.assert_array_equal(means(devices, padding=16, optimizer=decayed), np.ones((1, 3)))


class Normalised(nn.Module):
    """Batch normalisation with statistics over a replica's devices, of one device, or with running ones."""

    over: str | None = "data"

    @nn.compact
    def __call__(self, x, train, counts=True):
        mask = jnp.broadcast_to(counts, len(x))[:, None]
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5, axis_name=self.over)(x, mask=mask)
        return nn.Dense(1)(x)[:, 0]


def test_batch_normalisation_over_devices_is_that_of_one():
    """With equal weights: Flax gives each device the same share."""
    results = []
    for devices in (1, 4):
        mesh = jaxrec.make_mesh(devices=jax.devices()[:devices])
        start = Normalised().init(jax.random.key(0), ONE, train=False)
        batches = [batch_of(i)._replace(weight=np.ones(16, np.float32)) for i in range(3)]
        state, told = run(batches, None, mesh=mesh, wanted=normalised, start=start)
        results.append((jax.device_get(state.dense.params), told))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), *results)
    assert np.abs(results[0][0]["batch_stats"]["BatchNorm_0"]["mean"]).min() > 1e-3


def normalised(params, activations, batch):
    logit, kept = Normalised().apply(params, batch.dense, train=True, mutable=["batch_stats"])
    return (logit - batch.label) ** 2, {}, kept


@pytest.mark.parametrize("devices", [1, 8])
def test_padding_does_not_enter_batch_statistics(devices):
    """With the mask of docs/your_model.md, which allows for devices with padding only, as some of the 8 have here."""

    def masked(params, activations, batch):
        counts = (batch.weight > 0) | (batch.weight.sum() == 0)
        logit, kept = Normalised(None).apply(params, batch.dense, train=True, counts=counts, mutable=["batch_stats"])
        return (logit - batch.label) ** 2, {}, kept

    mesh, start = jaxrec.make_mesh(devices=jax.devices()[:devices]), Normalised().init(jax.random.key(0), ONE, False)
    batch = batch_of(0)._replace(weight=(np.arange(16) < 6).astype(np.float32))
    wild = batch._replace(dense=np.where(batch.weight[:, None] > 0, batch.dense, 1e6).astype(np.float32))
    state, told = run([wild], None, mesh=mesh, wanted=masked, start=start)
    kept = state.dense.params["batch_stats"]["BatchNorm_0"]["mean"][0]
    np.testing.assert_allclose(kept, 0.5 * batch.dense[:6].mean(axis=0), rtol=1e-4)
    assert np.isfinite(told[0]["loss"])
