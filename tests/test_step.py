"""SPMD: any number of devices, with padding and replicas, computes the same as one device."""

import copy
import dataclasses
import functools
import pickle
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from homes import dense_table, tables_in
from nonlinear_model import SPEC, batch_of, loss, params
from strategies import chosen

import jaxrec
from jaxrec.data.synthetic import SyntheticClicks
from jaxrec.embedding import (
    DeviceTables,
    EmbeddingSpec,
    HostTables,
    Lookup,
    Table,
    adagrad,
    device_plan,
    plan,
    rowwise_adagrad,
    sgd,
)
from jaxrec.models.dlrm import DLRM
from jaxrec.types import Batch, RowOptimizer

TASK = jaxrec.Task(SPEC, loss, optax.adam(0.01), rowwise_adagrad(0.1, 0.1))
CAPACITY = {name: 16 for name in SPEC.stacks}  # enough for every batch


@functools.cache
def task_on(devices, replicas=1, wrap_loss=loss):
    return dataclasses.replace(TASK, loss=wrap_loss, mesh=jaxrec.make_mesh(replicas, jax.devices()[:devices]))


def fresh(task, home="device"):
    return task.init(params(), tables_in(home, SPEC, task.row_optimizer, task.mesh))


def train(devices=1, replicas=1, home="device", padding=0, steps=3, wrap_loss=loss):
    task = task_on(devices, replicas, wrap_loss)
    state, losses = fresh(task, home), []
    for i in range(steps):
        state, metrics = task.step(state, batch_of(i, padding=padding))
        losses.append(float(metrics["loss"]))
    return state, losses


def leaves(state):
    return [*jax.tree.leaves(state.dense.params), *(dense_table(state.tables, n) for n in SPEC.stacks)]


# With padding 9, some of 8 devices have padding only.
HOMES = ("device", "host", "pinned")
PLACES = [(padding, devices, home) for padding in (0, 1, 9) for devices in (1, 2, 4, 8) for home in HOMES]


def in_the_gate(padding, devices, home):
    return (padding, devices) == (9, 4) if home != "device" else padding != 1 and devices != 4


@pytest.mark.parametrize(("padding", "devices", "home"), chosen(PLACES, in_the_gate))
def test_any_number_of_devices_equals_one(padding, devices, home):
    one, losses_of_one = train(padding=padding)
    many, losses = train(devices, home=home, padding=padding)
    np.testing.assert_allclose(losses, losses_of_one, rtol=1e-5)
    for a, b in zip(leaves(one), leaves(many), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_parameter_gradient_summed_by_hand_breaks_the_law():
    """Negative control: an extra psum scales the gradient by the number of devices, which the comparison detects."""

    def doubled(params, activations, batch):
        scale = jax.lax.axis_size("data")  # the effect of a psum of a summed gradient
        twice = jax.tree.map(lambda p: p * scale + jax.lax.stop_gradient(p - p * scale), params)
        return loss(twice, activations, batch)

    one, many = train(wrap_loss=loss)[0], train(4, wrap_loss=doubled)[0]
    sgd_like = (
        np.asarray(one.dense.opt_state[0].mu["kernel"]),
        np.asarray(many.dense.opt_state[0].mu["kernel"]),
    )
    assert np.abs(sgd_like[0] - sgd_like[1]).max() > 0.01


def test_a_step_without_examples_changes_no_row():
    before = train(steps=0)[0]
    tables = [dense_table(before.tables, n).copy() for n in SPEC.stacks]
    after, losses = train(4, steps=1, padding=16)
    assert losses == [0.0]
    for n, old in zip(SPEC.stacks, tables, strict=True):
        np.testing.assert_array_equal(dense_table(after.tables, n), old)


@pytest.mark.parametrize(("devices", "home"), [(1, "device"), (1, "host"), (4, "device"), (4, "pinned")])
def test_an_example_of_weight_0_updates_nothing_though_its_label_and_features_are_not_finite(devices, home):
    """Weighting the loss alone would leave gradients of 0 * NaN; finite values there give the same bits."""
    task, found = dataclasses.replace(task_on(devices), row_optimizer=rowwise_adagrad(0.1)), []
    for fill in (None, np.nan, -np.inf):
        batch = batch_of(0, padding=5)
        if fill is not None:
            batch.label[-5:] = batch.dense[-5:, 1] = fill
        state, metrics = task.step(fresh(task, home), batch)
        found.append([np.array(x) for x in (*leaves(state), metrics["loss"])])
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, found[0])
    batch.weight[-1] = 0.5  # negative control
    assert not np.isfinite(task.step(state, batch)[1]["loss"])


def test_replicas_step_on_their_own_batches():
    """Each replica's dense part equals a step on its half batch; row gradients are the sum of both."""
    state, _ = train(4, replicas=2, steps=1)
    plans, optimizer = plan(SPEC, batch_of(0).ids), rowwise_adagrad(0.1, 0.1)
    rows, gradients = HostTables.create(SPEC, optimizer).read(plans), []
    for replica, half in enumerate((slice(0, 8), slice(8, 16))):
        params_of_half, moved = half_step(rows, plans, half)
        own = jax.tree.map(lambda leaf, replica=replica: leaf[replica], state.dense.params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), own, params_of_half)
        gradients.append({n: rows[n].value - moved[n].value for n in rows})
    for n in rows:
        total = gradients[0][n] + gradients[1][n]
        value, _ = optimizer.update(total, rows[n].value, rows[n].slots, 0)
        valid = plans[n].unique < SPEC.stacks[n].rows
        found = dense_table(state.tables, n)[plans[n].unique[valid]]
        np.testing.assert_allclose(found, np.asarray(value)[valid], rtol=1e-4, atol=1e-5)


def half_step(rows, plans, half):
    """Parameters and rows after one step with sgd(1.0) on the rows, on a part of the first batch."""
    part = jax.tree.map(lambda x: x[half], batch_of(0))
    cut = {n: p._replace(inverse={k: v[half] for k, v in p.inverse.items()}) for n, p in plans.items()}
    optimizer = optax.adam(0.01)
    dense = jaxrec.DenseState(jnp.zeros((), jnp.int32), params(), optimizer.init(params()))
    arguments = {"spec": SPEC, "loss": loss, "optimizer": optimizer, "row_optimizer": sgd(1.0)}
    new, moved, _ = jaxrec.update(dense, rows, cut, part, **arguments)
    return new.params, moved


@pytest.mark.parametrize("home", HOMES)
def test_repeats_to_the_bit(home):
    for a, b in zip(leaves(train(home=home)[0]), leaves(train(home=home)[0]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_step_compiles_once():
    traced = []

    def counted(*args):
        traced.append(1)
        return loss(*args)

    task = task_on(2, wrap_loss=counted)
    state, batches = fresh(task), [batch_of(i) for i in range(4)]
    for batch in batches:
        state, _ = task.step(state, batch, plan(SPEC, batch.ids, CAPACITY))
    # One trace of the value; autodiff and shard_map may look at it more than once, but never again after step 1.
    first = len(traced)
    for batch in batches:
        state, _ = task.step(state, batch, plan(SPEC, batch.ids, CAPACITY))
    assert len(traced) == first == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_on_one_device_has_no_collective(devices):
    """XLA keeps them as copies of all rows; two devices are the negative control."""

    def all_at_once(params, activations, batch, *, rng):
        per_example = loss(params, activations, batch)
        return per_example, {"drawn": jax.random.uniform(rng), "loss_again": per_example}, {"bias": params["bias"] + 1}

    task, batch = dataclasses.replace(task_on(devices), loss=all_at_once, seed=0), batch_of(0)
    state, plans = fresh(task), plan(SPEC, batch.ids)
    rows = state.tables.read(plans)
    evaluation = task.eval_step(lambda params, activations, batch: loss(params, activations, batch))
    programs = {
        "update": (task.checked_update, state.dense, rows, plans, batch),  # of every home
        "step": (task.step, state, batch, plans),
        "evaluation": (evaluation, state, batch, plans),
    }
    collective = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)[-(]")
    for name, (program, *arguments) in programs.items():
        text = jax.jit(program).lower(*arguments).compile().as_text()
        assert bool(collective.search(text)) == (devices > 1), name


def test_no_gradient_has_the_size_of_a_table():
    spec = EmbeddingSpec({"t": Table(123_457, 8)}, {"t": Lookup("t")}, shards=1)
    tables = DeviceTables.create(spec, sgd(0.1), jaxrec.make_mesh())
    batch = Batch({"t": np.arange(64)}, np.ones(64, np.float32))
    plans, optimizer = plan(spec, batch.ids), optax.sgd(0.1)
    dense = jaxrec.DenseState(jnp.zeros((), jnp.int32), {}, optimizer.init({}))
    squared = lambda params, activations, batch: (activations["t"] ** 2).sum(-1)
    arguments = {"spec": spec, "loss": squared, "optimizer": optimizer, "row_optimizer": sgd(0.1)}

    def step(dense, tables):
        _, new, _ = jaxrec.update(dense, tables.read(plans), plans, batch, **arguments)
        return tables.put(plans, new)

    text = jax.jit(step, donate_argnums=1).lower(dense, tables).compile().as_text()
    # The table is an argument, and the scatter writes into it; nothing else may have its shape.
    makers = {
        line.split(" = ")[1].split("(")[0].split()[-1]
        for line in text.splitlines()
        if "f32[1,123457,8]" in line.split(" = ")[-1].split("(")[0] and " = " in line
    }
    assert tables.read(plans)["width_8"].value.shape[1] < 200
    assert makers <= {"parameter", "scatter", "fusion", "tuple", "call", "while", "get-tuple-element", "bitcast"}


def dlrm_losses(home, steps=30):
    clicks = SyntheticClicks((50, 300, 7), dense_features=3, seed=1)
    spec = EmbeddingSpec(
        {str(i): Table(n, 8) for i, n in enumerate(clicks.cardinalities)}, {"sparse": Lookup(("0", "1", "2"))}
    )
    model = DLRM((16, 8), (16, 1))

    def click_loss(params, activations, batch):
        logit = model.apply(params, batch.dense, activations["sparse"])
        return optax.sigmoid_binary_cross_entropy(logit, batch.label)

    task = jaxrec.Task(spec, click_loss, optax.adam(0.01), rowwise_adagrad(0.05), jaxrec.make_mesh())
    tables = tables_in(home, spec, task.row_optimizer, task.mesh)
    state = task.init(model.init(jax.random.key(0), jnp.zeros((1, 3)), jnp.zeros((1, 3, 8))), tables)
    losses, capacity = [], None
    for batch in clicks.stream(64, batches=steps):
        plans = plan(spec, batch.ids, capacity)
        capacity = {n: p.unique.shape[1] for n, p in plans.items()}
        state, metrics = task.step(state, batch, plans)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize("home", HOMES)
def test_the_golden_curve(home):
    """Loss curve of a small DLRM; regenerate it (and say why) only when the mathematics changes."""
    golden = Path(__file__).parent / "golden" / "dlrm_losses.txt"
    losses = dlrm_losses(home)
    if not golden.exists():  # pragma: no cover
        golden.write_text("".join(f"{x!r}\n" for x in losses))
        pytest.fail(f"{golden} was missing and has been written: look at it and commit it")
    np.testing.assert_allclose(losses, [float(x) for x in golden.read_text().split()], rtol=2e-5)


def test_several_tasks_have_a_loss_for_each_example_and_predictions_for_each_task():
    rng = np.random.default_rng(0)
    batch = batch_of(0)._replace(label=rng.random((16, 3), np.float32))
    state = train(steps=0)[0]
    several = lambda p, a, b: a["pair"].reshape(len(b.weight), -1)[:, :3]
    assert jaxrec.make_eval_step(SPEC, several)(state, batch).shape == (16, 3)
    summed = lambda p, a, b: jnp.sum((several(p, a, b) - b.label) ** 2, axis=-1)
    assert np.isfinite(dataclasses.replace(TASK, loss=summed).step(state, batch)[1]["loss"])


def explicit(mesh):
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Explicit,) * 2)


@pytest.mark.parametrize("home", ["device", "host"])
def test_a_mesh_with_explicit_axes_computes_the_same_bits(home):
    """Explicit is the default of jax.make_mesh; arrays may lie on either."""
    wanted, found = [], []
    for change, results in ((lambda mesh: mesh, wanted), (explicit, found)):
        mesh = change(jaxrec.make_mesh(2, jax.devices()[:4]))
        task, batch = dataclasses.replace(TASK, mesh=mesh), batch_of(0)
        state = task.init(params(), home)
        plans, placed = plan(SPEC, batch.ids), jaxrec.sharding.put_on_mesh(batch, mesh, jaxrec.sharding.SPLIT)
        on_explicit = jax.device_put(batch, jax.sharding.NamedSharding(mesh, jaxrec.sharding.SPLIT))
        for given in (batch, placed, on_explicit):
            state, metrics = task.step(state, given, plans)
        logit = jaxrec.make_eval_step(SPEC, loss, mesh)(state, batch, plans)
        results += [np.asarray(x) for x in (*leaves(state), metrics["loss"], logit)]
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_rows_of_another_optimizer_are_refused_where_the_update_is_traced():
    """Also for callers of `update` without a step, such as the pipeline; it was silently wrong before."""
    batch = batch_of(0)
    plans, mesh = plan(SPEC, batch.ids), jaxrec.make_mesh()
    for made, wanted in ((adagrad(0.1), rowwise_adagrad(0.1)), (adagrad(0.1), sgd(0.1))):
        task = jaxrec.Task(SPEC, loss, optax.sgd(0.1), wanted, mesh)
        state = task.init(params(), HostTables.create(SPEC, made))
        update = jax.jit(task.checked_update)
        with pytest.raises(ValueError, match="have slots .*give tables and step the same row optimizer"):
            update(state.dense, state.tables.read(plans), plans, batch)


def test_values_on_a_device_are_not_looked_at():
    """Checking them would block; a host batch of the same values is refused."""
    batch = batch_of(0)._replace(weight=np.full(16, -1, np.float32))
    plans, (state, _) = plan(SPEC, batch.ids), train(steps=0)
    step = jaxrec.make_eval_step(SPEC, loss)
    assert step(state, jax.device_put(batch), plans).shape == (16,)
    with pytest.raises(ValueError, match="weights are finite and 0 or more"):
        step(state, batch, plans)


@pytest.mark.parametrize("home", ["device", "host"])
def test_a_refused_step_leaves_the_state_as_it_was_and_of_use(home):
    state, _ = train(home=home, steps=1)
    before, batch = [np.array(x) for x in leaves(state)], batch_of(1)
    for wrong in (batch._replace(weight=-batch.weight), batch._replace(label=batch.label[:5]), batch._replace(ids={})):
        for plans in (plan(SPEC, batch.ids), None):
            with pytest.raises(ValueError):
                TASK.step(state, wrong, plans)
    jax.tree.map(np.testing.assert_array_equal, leaves(state), before)
    TASK.step(state, batch)


def test_a_step_is_a_part_of_a_program_of_ones_own():
    """Under an outer jit, with plans made on the device, a step computes the same result."""
    task = jaxrec.Task(SPEC, loss, optax.adam(0.05), adagrad(0.1))
    capacity = {name: 64 for name in SPEC.stacks}

    def plan_and_step(state, batch):
        return task.step(state, batch, device_plan(SPEC, batch.ids, capacity))

    states = []
    for run in (jax.jit(plan_and_step), plan_and_step):
        state = task.init(params())
        for number in range(3):
            state, metrics = run(state, jax.device_put(batch_of(number)))
        assert np.isfinite(metrics["loss"])
        states.append(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *states)


def test_one_step_serves_host_tables_of_any_seed_and_refuses_another_order_of_tables():
    """The seed only sets initial rows; a step is compiled for the layout, which depends on the order of tables."""
    batch = batch_of(0)

    def first_step(spec):
        state = TASK.init(params())._replace(tables=HostTables.create(spec, TASK.row_optimizer))
        return TASK.step(state, batch, plan(spec, batch.ids))[1]["loss"]

    assert first_step(SPEC) != first_step(dataclasses.replace(SPEC, seed=1))
    with pytest.raises(ValueError, match="another spec than the step"):
        first_step(dataclasses.replace(SPEC, tables=dict(reversed(SPEC.tables.items()))))


# ---- the task


def looped(task, state, pairs):
    """(state, metrics of all steps) of a plain loop over (batch, plans)."""
    told = []
    for batch, plans in pairs:
        state, metrics = task.step(state, batch, plans)
        told.append(metrics)
    return state, jax.tree.map(lambda *each: np.stack(each), *told)


def planned(steps):
    return [(batch, plan(SPEC, batch.ids, CAPACITY)) for batch in map(batch_of, range(steps))]


def jitted(task, state, pairs):
    return looped(types.SimpleNamespace(step=jax.jit(task.step)), state, pairs)


def scanned(task, state, pairs):
    stacked = jax.tree.map(lambda *each: np.stack(each), *pairs)
    return jax.jit(lambda state, pairs: jax.lax.scan(lambda state, pair: task.step(state, *pair), state, pairs))(
        state, stacked
    )


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("run", [jitted, scanned])
def test_over_device_tables_a_step_is_a_function_to_jit_and_to_scan(run, devices):
    task, pairs = task_on(devices), planned(6)
    wanted, found = looped(task, fresh(task), pairs), run(task, fresh(task), pairs)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert int(found[0].dense.step) == 6 and np.ptp(found[1]["loss"]) > 0


@pytest.mark.parametrize("home", HOMES)
def test_a_step_makes_the_plans_that_it_is_not_given(home):
    (one, losses), other, told = train(home=home), fresh(TASK, home), []
    for batch in map(batch_of, range(3)):
        other, metrics = TASK.step(other, batch, plan(SPEC, batch.ids))
        told.append(float(metrics["loss"]))
    jax.tree.map(np.testing.assert_array_equal, leaves(other), leaves(one))
    batch, look = batch_of(3), jaxrec.make_eval_step(SPEC, loss)
    np.testing.assert_array_equal(look(one, batch), look(one, batch, plan(SPEC, batch.ids)))
    assert told == losses


def no_state(params):
    return optax.EmptyState()


def tenth(gradient, state, params=None):
    return jax.tree.map(lambda leaf: -0.1 * leaf, gradient), state


def no_slots(width):
    return {}


def minus_tenth(gradient, value, slots, step):
    return value - 0.1 * gradient, slots


class Halved(jaxrec.Task):
    """A task whose figures have another one."""

    def update(self, *given):
        dense, rows, metrics = super().update(*given)
        return dense, rows, metrics | {"half": metrics["loss"] / 2}


@pytest.mark.parametrize("kind", [jaxrec.Task, Halved])
def test_a_task_is_pickled_without_its_programs_and_trains_the_same_bits(kind):
    """Optimizers of optax and ours are closures, which need cloudpickle; these are not."""
    optimizer, rows = optax.GradientTransformation(no_state, tenth), RowOptimizer(no_slots, minus_tenth)
    task, pairs = kind(SPEC, loss, optimizer, rows), planned(3)
    before = pickle.dumps(task)
    wanted = looped(task, task.init(params()), pairs)  # compiles
    after = pickle.dumps(task)
    assert after == before and ("half" in wanted[1]) == (kind is Halved)
    for again in map(pickle.loads, (before, after)):
        assert type(again) is kind and again.spec == SPEC and again.seed is again.mesh is None
        found = looped(again, again.init(params()), pairs)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_the_evaluation_of_a_task_is_on_its_devices():
    one, many = (task_on(devices).eval_step(loss)(fresh(task_on(devices)), batch_of(5)) for devices in (1, 4))
    np.testing.assert_allclose(one, many, rtol=1e-6)
    assert len(one.sharding.device_set) == 1 and len(many.sharding.device_set) == 4


def with_a_key(params, activations, batch, *, rng):
    return loss(params, activations, batch)


def test_a_pickled_task_has_its_mesh_and_its_seed():
    optimizer, rows = optax.GradientTransformation(no_state, tenth), RowOptimizer(no_slots, minus_tenth)
    assert pickle.loads(pickle.dumps(jaxrec.Task(SPEC, with_a_key, optimizer, rows, seed=5))).seed == 5
    one = dataclasses.replace(TASK, mesh=jaxrec.make_mesh(devices=jax.devices()[:2]))
    assert copy.copy(one).mesh is one.mesh  # by the same method; a mesh is of a process


def test_a_batch_of_fewer_rows_is_trained_by_the_program_of_the_one_before_it():
    traced = []

    def counted(*args):
        traced.append(1)
        return loss(*args)

    spec = dataclasses.replace(SPEC, shards=1)
    task, many = dataclasses.replace(TASK, spec=spec, loss=counted), batch_of(0, size=32)
    few = many._replace(ids={name: np.zeros_like(ids) for name, ids in many.ids.items()})
    state = task.init(params())
    for batch in (many, few, many):
        state, _ = task.step(state, batch)
    assert len(traced) == 1
    shapes = [{name: each.unique.shape for name, each in plan(spec, batch.ids).items()} for batch in (many, few)]
    assert shapes[0] != shapes[1]  # negative control: a plan of its own has another shape


def overriding(change):
    """A task whose `update` returns what a function makes of (dense, rows, metrics)."""

    class Changed(jaxrec.Task):
        def update(self, *given):
            return change(*super().update(*given))

    return Changed(SPEC, loss, TASK.optimizer, TASK.row_optimizer)


def of_each(change):
    return lambda dense, rows, metrics: (dense, {name: change(its) for name, its in rows.items()}, metrics)


ROWS_DIFFER, DENSE_DIFFERS = "update changes the shapes of the rows", "update changes the shapes of the dense state"
WRONG = {
    "fewer rows": (of_each(lambda its: its._replace(value=its.value[:, :1])), ROWS_DIFFER),
    "rows of another dtype": (of_each(lambda its: its._replace(value=its.value.astype(jnp.bfloat16))), ROWS_DIFFER),
    "rows without slots": (of_each(lambda its: its._replace(slots={})), ROWS_DIFFER),
    "no rows": (lambda dense, rows, metrics: (dense, {}, metrics), ROWS_DIFFER),
    "other parameters": (
        lambda dense, rows, metrics: (dense._replace(params=dense.params["bias"]), rows, metrics),
        DENSE_DIFFERS,
    ),
    "parameters without replicas": (
        lambda dense, rows, metrics: (jax.tree.map(jnp.squeeze, dense), rows, metrics),
        DENSE_DIFFERS,
    ),
    "metrics in a list": (
        lambda dense, rows, metrics: (dense, rows, [*metrics.values()]),
        "metrics that are a list: a dict",
    ),
    "a loss for metrics": (lambda dense, rows, metrics: (dense, rows, metrics["loss"]), "a dict {name: array} is"),
}


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("name", WRONG)
def test_an_update_of_ones_own_that_breaks_shapes_is_refused_and_the_state_stays(name, home):
    change, words = WRONG[name]
    (state, _), task, batch = train(home=home, steps=1), overriding(change), batch_of(1)
    before = [np.array(leaf) for leaf in leaves(state)]
    for act in (task.step, functools.partial(jaxrec.check_step, task)):
        with pytest.raises(ValueError, match=re.escape(words)):
            act(state, batch)
    assert not state.dense.step.is_deleted()
    jax.tree.map(np.testing.assert_array_equal, leaves(state), before)
    TASK.step(state, batch)


def doubling():
    return overriding(lambda dense, rows, metrics: (dense, rows, metrics | {"twice": 2 * metrics["loss"]}))


@pytest.mark.more  # operation by operation it takes 20 s
def test_an_update_of_ones_own_is_checked_as_ours():
    assert jaxrec.check_step(doubling(), fresh(TASK), batch_of(0)) < 1e-4


def test_an_update_of_ones_own_is_trained():
    wanted, losses = train(steps=1)
    state, metrics = doubling().step(fresh(TASK), batch_of(0))
    assert float(metrics["twice"]) == 2 * losses[0]
    jax.tree.map(np.testing.assert_array_equal, leaves(state), leaves(wanted))


@pytest.mark.parametrize("devices", [3, 5, 7])
def test_a_mesh_that_cannot_share_the_shards_is_refused(devices):
    task = dataclasses.replace(TASK, mesh=jaxrec.make_mesh(devices=jax.devices()[:devices]))
    for refused in (lambda: fresh(task, "device"), lambda: task.step(fresh(task, "host"), batch_of(0))):
        with pytest.raises(ValueError, match=f"8 shards cannot be split over {devices} devices"):
            refused()


OTHERS = {
    "one row more": dataclasses.replace(SPEC, tables={**SPEC.tables, "a": Table(41, 4)}),
    "other shards": dataclasses.replace(SPEC, shards=4),
    "one table less": EmbeddingSpec({"a": Table(40, 4)}, {"bag": Lookup("a")}),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("home", ["device", "host"])
def test_a_state_over_tables_of_another_spec_is_not_made(name, home):
    with pytest.raises(ValueError, match="the tables were made with another spec than the step"):
        TASK.init(params(), tables_in(home, OTHERS[name], TASK.row_optimizer))


@pytest.mark.parametrize("place", ["gpu", "Host", ""])
def test_a_place_that_is_none_is_refused_by_name(place):
    with pytest.raises(ValueError, match=f"rows are in 'device', 'pinned' or 'host' memory, not {place!r}"):
        TASK.init(params(), place)


# ---- batches


def test_a_batch_of_ids_and_labels_has_no_dense_features_and_counts_every_example():
    batch = Batch({"a": np.arange(3)}, np.ones((3, 2)))
    assert batch.dense.shape == (3, 0) and batch.dense.dtype == batch.weight.dtype == np.float32
    assert batch.weight.tolist() == [1, 1, 1] and batch == (batch.ids, batch.label, batch.dense, batch.weight)
    assert Batch({}, {"click": np.zeros(2), "bought": np.ones(2)}).weight.tolist() == [1, 1]
    given = Batch({}, np.zeros(2), dense=np.ones((2, 5)), weight=np.array([0.5, 0]))
    assert given.dense.shape == (2, 5) and given.weight.tolist() == [0.5, 0]


def test_a_batch_is_a_tree_of_any_leaves_with_named_fields():
    batch = Batch({"a": np.arange(3), "b": np.arange(2)}, np.ones(3))
    leaves, shape = jax.tree.flatten_with_path(batch)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert names == [".ids['a']", ".ids['b']", ".label", ".dense", ".weight"]
    assert jax.tree.unflatten(shape, range(5)) == ({"a": 0, "b": 1}, 2, 3, 4)
    nothing = jax.tree.map(lambda leaf: None, batch)
    assert type(nothing) is Batch and nothing == ({"a": None, "b": None}, None, None, None)
    assert jax.tree.leaves(nothing) == [] and type(jax.tree.map(np.shape, batch)) is Batch


def test_a_batch_keeps_its_fields_where_it_is_changed_copied_or_sent():
    batch = batch_of(0)
    changed = batch._replace(label=None)
    assert type(changed) is Batch and changed.label is None and changed.weight is batch.weight
    for again in (pickle.loads(pickle.dumps(batch)), copy.copy(batch), copy.deepcopy(batch), jax.device_put(batch)):
        assert type(again) is Batch and again._fields == ("ids", "label", "dense", "weight")
        jax.tree.map(np.testing.assert_array_equal, again, batch)
    nothing = Batch._make([None] * 4)
    assert all(again == nothing for again in (pickle.loads(pickle.dumps(nothing)), copy.deepcopy(nothing)))
