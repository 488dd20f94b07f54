"""Rows of 16 bits: the law of stochastic rounding, and training, images and predictions with such rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equality import assert_equal
from homes import every_row, needs_compiler
from hypothesis import given
from hypothesis import strategies as st
from in_process_servers import remote
from strategies import draw_ids, small_spec

import jaxrec
from jaxrec.checkpoint import read_tables, restore, snapshot, spec_of, write_image
from jaxrec.embedding import HostTables, Table, kernels, rowwise_adagrad
from jaxrec.embedding.rounding import to_float16
from jaxrec.oac import Overlap, Pipeline
from jaxrec.shadowsync import train_freely

finite = (st.floats(-65504, 65504, width=32) | st.floats(-(2**-13), 2**-13, width=32)).filter(
    lambda x: x == 0 or abs(x) > 2**-120
)


def neighbours(value):
    """The float16 numbers around a value, nearest to 0 first."""
    near = np.float16(value)
    if abs(np.float64(near)) > abs(value):
        near = np.nextafter(near, np.float16(0))
    away = np.float16(np.copysign(np.inf, value))
    return near, near if np.float64(near) == value else np.nextafter(near, away)


def rounded(value, number=4096, step=0, seed=0):
    rows = jnp.full((1, number, 1), value, jnp.float32)
    return np.asarray(jax.jit(to_float16, static_argnums=3)(rows, jnp.arange(number)[None], step, seed)).ravel()


@given(finite)
def test_a_value_becomes_one_of_its_neighbours_and_is_right_on_average(value):
    found, (near, away) = rounded(value), neighbours(value)
    assert found.dtype == np.float16 and set(found) <= {near, away} and (np.signbit(found) == np.signbit(value)).all()
    if near != away:
        chance = (value - np.float64(near)) / (np.float64(away) - np.float64(near))
        error = np.sqrt(chance * (1 - chance) / len(found)) + 2**-14
        assert abs(np.mean(found == away) - chance) < 5 * error


@given(st.integers(0, 2**16 - 1))
def test_what_is_16_bits_stays_as_it_is(bits):
    value = np.uint16(bits).view(np.float16)
    np.testing.assert_array_equal(rounded(np.float32(value), 64), np.full(64, value))


@pytest.mark.parametrize("above", [1, 2, 3])
def test_the_last_bits_of_a_value_count_too(above):
    found = rounded(np.float32(1 + above * 2**-23), 1 << 20)
    assert abs((found > 1).sum() - above * 2**7) < 5 * np.sqrt(above * 2**7)


def test_too_large_a_value_is_infinite():
    assert np.isposinf(rounded(65536.0)).all() and np.isneginf(rounded(-1e30)).all()


def test_rows_columns_steps_and_seeds_have_numbers_of_their_own():
    half = np.float32(1 + 2**-11)  # halfway between two float16
    draw = lambda step, seed: to_float16(jnp.full((1, 4096, 8), half), jnp.arange(4096)[None], step, seed) > 1
    draws = np.stack([np.asarray(draw(*of)).reshape(4096, 8) for of in [(0, 0), (1, 0), (0, 1), (7, 3)]])
    columns = draws.transpose(0, 2, 1).reshape(32, 4096)  # step and seed, column
    assert np.abs(np.corrcoef(columns)[np.triu_indices(32, 1)]).max() < 5 / 64
    assert np.abs(np.corrcoef(draws.reshape(-1, 8)[:-1].ravel(), draws.reshape(-1, 8)[1:].ravel())[0, 1]) < 0.02


def test_the_bits_do_not_depend_on_the_program():
    values = np.random.default_rng(0).normal(0, [[[0.01], [1], [1e-6], [300]]], (3, 4, 50)).astype(np.float32)
    values, unique = values.transpose(0, 2, 1), np.random.default_rng(1).integers(0, 1000, (3, 50)).astype(np.int32)
    alone = to_float16(jnp.asarray(values), unique, 5, 2)
    fused = jax.jit(lambda v, u, s: to_float16(v * 3 - 2 * v, u, s, 2).astype(jnp.float32) * 1)(values, unique, 5)
    assert_equal(
        np.asarray(fused), np.asarray(to_float16(jnp.asarray(values * 3 - 2 * values), unique, 5, 2), np.float32)
    )
    for shard in range(3):
        assert_equal(to_float16(values[shard : shard + 1], unique[shard : shard + 1], 5, 2)[0], alone[shard])


SPEC = dataclasses.replace(
    small_spec(shards=4, tables={"a": Table(30, 5), "b": Table(5, 5), "w": Table(21, 1)}), dtype="float16"
)


def loss(params, activations, batch):
    return (activations["ab"].sum((1, 2)) + activations["w"][:, 0] + params["bias"] - batch.label) ** 2


def predict(params, activations, batch):
    return activations["ab"].sum((1, 2)) + params["bias"]


def batch_at(step):
    return jaxrec.Batch(draw_ids(SPEC, 12, step), np.ones(12, np.float32))


BATCHES = [batch_at(step) for step in range(20)]


def task_on(devices, spec=SPEC):
    return jaxrec.Task(
        spec, loss, optax.sgd(0.01), rowwise_adagrad(0.01), jaxrec.make_mesh(devices=jax.devices()[:devices])
    )


def trained(task, home, engine_of):
    tables = remote(task.spec, task.row_optimizer, servers=2) if home == "remote" else home
    if home == "pinned":
        needs_compiler()
    with engine_of(task, task.init({"bias": jnp.zeros(())}, tables)) as engine:
        losses = [float(metrics["loss"]) for _, metrics in engine.run(BATCHES)]
        return engine.state, losses


def bits(state, losses):
    return losses, jax.tree.map(np.asarray, state.dense), every_row(state.tables)


ENGINES = {
    "host": jaxrec.Serial,
    "pinned": jaxrec.Serial,
    "remote": jaxrec.Serial,
    "host oac": functools.partial(Pipeline, window=3),
    "pinned oac": lambda task, state: jaxrec.Serial(Overlap(task, window=2), state),
}


@pytest.mark.parametrize("devices", [1, 4])
def test_training_gives_the_same_bits_in_every_home_and_engine(devices):
    task = task_on(devices)
    wanted = bits(*trained(task, "device", jaxrec.Serial))
    for name, engine_of in ENGINES.items():
        assert_equal(bits(*trained(task, name.split()[0], engine_of)), wanted)
    assert {part: rows.dtype for (_, part), rows in wanted[2].items()} == {
        "value": np.float16,
        "accumulator": np.float32,
    }


class Shrinking(jaxrec.Task):
    def update(self, dense, rows, plans, batch):
        dense, rows, metrics = super().update(dense, rows, plans, batch)
        return dense, {name: row._replace(value=row.value * 0.999) for name, row in rows.items()}, metrics


def test_an_update_of_ones_own_computes_in_32_bits():
    """To the nearest float16, a row would stay as it is."""
    task = Shrinking(SPEC, lambda params, activations, batch: 0 * batch.label, optax.sgd(0.0), rowwise_adagrad(0.1))
    for home in ("device", "host"):
        state = task.init({"bias": jnp.zeros(())}, home)
        before = every_row(state.tables)
        for _ in range(200):
            state, _ = task.step(state, BATCHES[0])
        after = every_row(state.tables)
        touched = before["width_5", "value"] != after["width_5", "value"]
        ratio = (after["width_5", "value"][touched] / before["width_5", "value"][touched].astype(np.float32)).mean()
        assert abs(ratio - 0.999**200) < 0.01 and touched.sum() > 50


def test_tables_of_another_dtype_are_refused_by_name():
    task, other = task_on(1), task_on(1, dataclasses.replace(SPEC, dtype="float32"))
    with pytest.raises(ValueError, match="the tables are of float32, and the step's spec of float16"):
        task.step(other.init({"bias": jnp.zeros(())}, "host"), BATCHES[0])


def test_many_updates_below_half_a_distance_add_up():
    """Rounded to the nearest they are lost: the negative control of the claim that the rounding is what counts."""
    rows = jnp.ones((1, 200, 16), jnp.float16)
    unique, update = jnp.arange(200)[None], 2**-14  # a sixteenth of the distance from 1 to the next
    for step in range(160):
        rows = to_float16(rows.astype(jnp.float32) + update, unique, step, 0)
    assert abs(float(rows.mean()) - (1 + 160 * update)) < 1e-4
    assert (jnp.float16(1) + jnp.float16(update)) == 1


@given(st.lists(st.tuples(st.floats(width=16), st.floats(width=32)), min_size=1))
def test_the_kernel_adds_as_numpy_does(pairs):
    table, change = (
        np.array(one, dtype)[:, None]
        for one, dtype in zip(zip(*pairs, strict=True), (np.float16, np.float32), strict=True)
    )
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = np.add(table, change, dtype=np.float32).astype(np.float16)
    kernels.scatter_add(table, np.arange(len(pairs), dtype=np.int32), 1, len(pairs), change, np.zeros_like(change))
    np.testing.assert_array_equal(table, wanted)


def test_a_free_trainer_alone_ends_with_the_bits_of_serial():
    task = task_on(1)
    tables = HostTables.create(task.spec, task.row_optimizer)
    train_freely(task, {"bias": jnp.zeros(())}, tables, [BATCHES])
    wanted, _ = trained(task, "host", jaxrec.Serial)
    assert_equal(every_row(tables), every_row(wanted.tables))


@pytest.mark.parametrize("home", ["device", "host", "pinned"])
def test_images_have_half_the_bytes_of_values_and_predict_the_same(home, tmp_path):
    task = task_on(1)
    state, _ = trained(task, home, jaxrec.Serial)
    path = write_image(tmp_path / "step_00000020", snapshot(state)).path
    wanted = task.eval_step(predict)(state, BATCHES[0])
    for target in ("device", "host", "pinned"):
        found, image = restore(path, task.init({"bias": jnp.zeros(())}, target))
        assert_equal(every_row(found.tables), every_row(state.tables))
        assert_equal(task.eval_step(predict)(found, BATCHES[0]), wanted)
        assert spec_of(image).digest == SPEC.digest
    assert read_tables(path, ["a"])["a"]["value"].dtype == np.float16
    wider = task_on(1, dataclasses.replace(SPEC, dtype="float32"))
    with pytest.raises(ValueError, match="it has .*float16.*wanted .*float32"):
        restore(path, wider.init({"bias": jnp.zeros(())}, home))


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype='bfloat16' must be 'float32' or 'float16'"):
        dataclasses.replace(SPEC, dtype="bfloat16")


def test_rows_of_32_bits_keep_the_digest_of_their_images():
    assert small_spec().digest == "aeb65faccffbeb3e"
    assert dataclasses.replace(small_spec(), dtype="float16").digest != small_spec().digest
