"""SPMD: any number of devices, with padding and replicas, computes the same as one device."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from homes import tables_in
from strategies import chosen, draw_ids
from test_tables import dense_table

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
from jaxrec.types import Batch

SPEC = EmbeddingSpec(
    {"a": Table(40, 4), "b": Table(9, 4), "w": Table(30, 1)},
    {"pair": Lookup(("a", "b")), "bag": Lookup("a", hots=3, pooling="mean"), "w": Lookup("w")},
)


def loss(params, activations, batch):
    """Nonlinear in everything it reads."""
    x = jnp.concatenate([activations["pair"].reshape(-1, 8), activations["bag"], activations["w"], batch.dense], axis=1)
    return (jnp.tanh(x @ params["kernel"] + params["bias"][None])[:, 0] - batch.label) ** 2


def params():
    rng = np.random.default_rng(0)
    return {"kernel": rng.standard_normal((16, 1), np.float32), "bias": np.zeros(1, np.float32)}


def batch_of(step, size=16, padding=0):
    """A random batch; the last `padding` examples have weight 0, but ids and labels like the others."""
    rng = np.random.default_rng(step)
    weight = np.concatenate([rng.random(size - padding), np.zeros(padding)]).astype(np.float32)
    dense, label = rng.standard_normal((size, 3), np.float32), rng.random(size).astype(np.float32)
    return Batch(draw_ids(SPEC, size, step), dense, label, weight)


def train(devices=1, replicas=1, home="device", padding=0, steps=3, wrap_loss=loss):
    mesh = jaxrec.make_mesh(replicas, jax.devices()[:devices])
    row_optimizer, optimizer = rowwise_adagrad(0.1, 0.1), optax.adam(0.01)
    tables = tables_in(home, SPEC, row_optimizer, mesh)
    step = jaxrec.make_train_step(SPEC, wrap_loss, optimizer, row_optimizer, mesh)
    state, losses = jaxrec.init_state(params(), optimizer, tables, mesh), []
    for i in range(steps):
        batch = batch_of(i, padding=padding)
        state, metrics = step(state, plan(SPEC, batch.ids), batch)
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
    mesh, rows, optimizer = jaxrec.make_mesh(1, jax.devices()[:devices]), rowwise_adagrad(0.1), optax.adam(0.01)
    step, found = jaxrec.make_train_step(SPEC, loss, optimizer, rows, mesh), []
    for fill in (None, np.nan, -np.inf):
        tables = tables_in(home, SPEC, rows, mesh)
        batch = batch_of(0, padding=5)
        if fill is not None:
            batch.label[-5:] = batch.dense[-5:, 1] = fill
        state = jaxrec.init_state(params(), optimizer, tables, mesh)
        state, metrics = step(state, plan(SPEC, batch.ids), batch)
        found.append([np.array(x) for x in (*leaves(state), metrics["loss"])])
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, found[0])
    batch.weight[-1] = 0.5  # negative control
    assert not np.isfinite(step(state, plan(SPEC, batch.ids), batch)[1]["loss"])


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
    mesh = jaxrec.make_mesh(1, jax.devices()[:2])
    traced = []

    def counted(*args):
        traced.append(1)
        return loss(*args)

    optimizer, row_optimizer = optax.adam(0.01), rowwise_adagrad(0.1)
    step = jaxrec.make_train_step(SPEC, counted, optimizer, row_optimizer, mesh)
    state = jaxrec.init_state(params(), optimizer, DeviceTables.create(SPEC, row_optimizer, mesh), mesh)
    batches = [batch_of(i) for i in range(4)]
    capacity = {n: 16 for n in SPEC.stacks}
    for batch in batches:
        state, _ = step(state, plan(SPEC, batch.ids, capacity), batch)
    # One trace of the value; autodiff and shard_map may look at it more than once, but never again after step 1.
    first = len(traced)
    for batch in batches:
        state, _ = step(state, plan(SPEC, batch.ids, capacity), batch)
    assert len(traced) == first == 1


def test_no_gradient_has_the_size_of_a_table():
    spec = EmbeddingSpec({"t": Table(123_457, 8)}, {"t": Lookup("t")}, shards=1)
    tables = DeviceTables.create(spec, sgd(0.1), jaxrec.make_mesh())
    batch = Batch({"t": np.arange(64)}, np.zeros((64, 0), np.float32), *np.ones((2, 64), np.float32))
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
    model, optimizer, row_optimizer = DLRM((16, 8), (16, 1)), optax.adam(0.01), rowwise_adagrad(0.05)

    def click_loss(params, activations, batch):
        logit = model.apply(params, batch.dense, activations["sparse"])
        return optax.sigmoid_binary_cross_entropy(logit, batch.label)

    mesh = jaxrec.make_mesh()
    tables = tables_in(home, spec, row_optimizer, mesh)
    state = jaxrec.init_state(
        model.init(jax.random.key(0), jnp.zeros((1, 3)), jnp.zeros((1, 3, 8))), optimizer, tables, mesh
    )
    step = jaxrec.make_train_step(spec, click_loss, optimizer, row_optimizer, mesh)
    losses, capacity = [], None
    for batch in clicks.stream(64, batches=steps):
        plans = plan(spec, batch.ids, capacity)
        capacity = {n: p.unique.shape[1] for n, p in plans.items()}
        state, metrics = step(state, plans, batch)
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


def step_with(loss_or_predict, devices=2, home="device", train=True):
    """Run one step with a loss or a prediction; return its result."""
    mesh, rows = jaxrec.make_mesh(devices=jax.devices()[:devices]), sgd(0.1)
    tables = DeviceTables.create(SPEC, rows, mesh) if home == "device" else HostTables.create(SPEC, rows)
    state, batch = jaxrec.init_state(params(), optax.sgd(0.1), tables, mesh), batch_of(0)
    make = jaxrec.make_train_step if train else jaxrec.make_eval_step
    step = make(SPEC, loss_or_predict, *([optax.sgd(0.1), rows] if train else []), mesh=mesh)
    return step(state, plan(SPEC, batch.ids), batch)


def test_several_tasks_have_a_loss_for_each_example_and_predictions_for_each_task():
    rng = np.random.default_rng(0)
    batch = batch_of(0)._replace(label=rng.random((16, 3), np.float32))
    state, steps = train(steps=0)[0], optax.adam(0.01)
    tasks = lambda p, a, b: a["pair"].reshape(len(b.weight), -1)[:, :3]
    step = jaxrec.make_eval_step(SPEC, tasks)
    assert step(state, plan(SPEC, batch.ids), batch).shape == (16, 3)
    summed = lambda p, a, b: jnp.sum((tasks(p, a, b) - b.label) ** 2, axis=-1)
    step = jaxrec.make_train_step(SPEC, summed, steps, rowwise_adagrad(0.1, 0.1))
    assert np.isfinite(step(state, plan(SPEC, batch.ids), batch)[1]["loss"])


def explicit(mesh):
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Explicit,) * 2)


@pytest.mark.parametrize("home", ["device", "host"])
def test_a_mesh_with_explicit_axes_computes_the_same_bits(home):
    """Explicit is the default of jax.make_mesh; arrays may lie on either."""
    wanted, found = [], []
    for change, results in ((lambda mesh: mesh, wanted), (explicit, found)):
        mesh = change(jaxrec.make_mesh(2, jax.devices()[:4]))
        rows, batch = rowwise_adagrad(0.1), batch_of(0)
        tables = tables_in(home, SPEC, rows, mesh)
        state = jaxrec.init_state(params(), optax.adam(0.01), tables, mesh)
        step = jaxrec.make_train_step(SPEC, loss, optax.adam(0.01), rows, mesh)
        plans, placed = plan(SPEC, batch.ids), jaxrec.sharding.put_on_mesh(batch, mesh, jaxrec.sharding.SPLIT)
        on_explicit = jax.device_put(batch, jax.sharding.NamedSharding(mesh, jaxrec.sharding.SPLIT))
        for given in (batch, placed, on_explicit):
            state, metrics = step(state, plans, given)
        logit = jaxrec.make_eval_step(SPEC, loss, mesh)(state, plans, batch)
        results += [np.asarray(x) for x in (*leaves(state), metrics["loss"], logit)]
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_rows_of_another_optimizer_are_refused_where_the_update_is_traced():
    """Also for callers of `update` without a step, such as the pipeline; it was silently wrong before."""
    batch = batch_of(0)
    plans, mesh = plan(SPEC, batch.ids), jaxrec.make_mesh()
    for made, wanted in ((adagrad(0.1), rowwise_adagrad(0.1)), (adagrad(0.1), sgd(0.1))):
        state = jaxrec.init_state(params(), optax.sgd(0.1), HostTables.create(SPEC, made), mesh)
        update = jax.jit(jaxrec.make_update(SPEC, loss, optax.sgd(0.1), wanted, mesh))
        with pytest.raises(ValueError, match="have slots .*give tables and step the same row optimizer"):
            update(state.dense, state.tables.read(plans), plans, batch)


def test_values_on_a_device_are_not_looked_at():
    """Checking them would block; a host batch of the same values is refused."""
    batch = batch_of(0)._replace(weight=np.full(16, -1, np.float32))
    plans, (state, _) = plan(SPEC, batch.ids), train(steps=0)
    step = jaxrec.make_eval_step(SPEC, loss)
    assert step(state, plans, jax.device_put(batch)).shape == (16,)
    with pytest.raises(ValueError, match="weights are finite and 0 or more"):
        step(state, plans, batch)


@pytest.mark.parametrize("home", ["device", "host"])
def test_a_refused_step_leaves_the_state_as_it_was_and_of_use(home):
    state, _ = train(home=home, steps=1)
    before, batch = [np.array(x) for x in leaves(state)], batch_of(1)
    step = jaxrec.make_train_step(SPEC, loss, optax.adam(0.01), rowwise_adagrad(0.1, 0.1))
    for wrong in (batch._replace(weight=-batch.weight), batch._replace(label=batch.label[:5]), batch._replace(ids={})):
        with pytest.raises(ValueError):
            step(state, plan(SPEC, batch.ids), wrong)
    jax.tree.map(np.testing.assert_array_equal, leaves(state), before)
    step(state, plan(SPEC, batch.ids), batch)


def test_a_step_is_a_part_of_a_program_of_ones_own():
    """Under an outer jit, with plans made on the device, a step computes the same result."""
    optimizer, rows = optax.adam(0.05), adagrad(0.1)
    step = jaxrec.make_train_step(SPEC, loss, optimizer, rows)
    capacity = {name: 64 for name in SPEC.stacks}

    def plan_and_step(state, batch):
        return step(state, device_plan(SPEC, batch.ids, capacity), batch)

    states = []
    for run in (jax.jit(plan_and_step), plan_and_step):
        state = jaxrec.init_state(params(), optimizer, DeviceTables.create(SPEC, rows, jaxrec.make_mesh()))
        for number in range(3):
            state, metrics = run(state, jax.device_put(batch_of(number)))
        assert np.isfinite(metrics["loss"])
        states.append(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *states)


def test_one_step_serves_host_tables_of_any_seed_and_refuses_another_order_of_tables():
    """The seed only sets initial rows; a step is compiled for the layout, which depends on the order of tables."""
    step = jaxrec.make_train_step(SPEC, loss, optax.adam(0.01), adagrad(0.1))
    batch = batch_of(0)

    def first_step(spec):
        state = jaxrec.init_state(params(), optax.adam(0.01), HostTables.create(spec, adagrad(0.1)))
        return step(state, plan(spec, batch.ids), batch)[1]["loss"]

    assert first_step(SPEC) != first_step(dataclasses.replace(SPEC, seed=1))
    with pytest.raises(ValueError, match="another spec than the step"):
        first_step(dataclasses.replace(SPEC, tables=dict(reversed(SPEC.tables.items()))))
