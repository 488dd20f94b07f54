"""Row optimizers take optax schedules: the rate of a step is the same in every engine and home and after a resume."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import chosen, draw_ids

import jaxrec
from jaxrec.checkpoint import Checkpointer, restore
from jaxrec.embedding import DeviceTables, EmbeddingSpec, HostTables, Lookup, Table, adagrad, rowwise_adagrad, sgd
from jaxrec.loop import Serial, train
from jaxrec.oac import Pipeline
from jaxrec.shadowsync import Emulation, train_freely
from jaxrec.types import Batch, RowOptimizer

MAKERS = {"sgd": sgd, "adagrad": adagrad, "rowwise_adagrad": rowwise_adagrad}
STEPS = 9
SPEC = EmbeddingSpec({"user": Table(12, 4), "item": Table(7, 4)}, {"pair": Lookup(("user", "item"))}, shards=2)
DENSE = optax.sgd(optax.linear_schedule(0.1, 0.0, STEPS))
COSINE = optax.warmup_cosine_decay_schedule(0.0, 0.3, 2, STEPS)


def loss(params, activations, batch):
    user, item = activations["pair"][:, 0], activations["pair"][:, 1]
    return optax.sigmoid_binary_cross_entropy((user * item).sum(-1) * params["scale"], batch.label)


def batches(first=0, size=8):
    for step in range(first, STEPS):
        label = np.random.default_rng(step).integers(0, 2, size).astype(np.float32)
        yield Batch(draw_ids(SPEC, size, step, missing=0), np.zeros((size, 0), np.float32), label, np.ones_like(label))


def fresh(rows, home="host"):
    tables = HostTables.create(SPEC, rows) if home == "host" else DeviceTables.create(SPEC, rows)
    return jaxrec.init_state({"scale": jnp.ones(())}, DENSE, tables)


@functools.cache
def programs(rows):
    arguments = SPEC, loss, DENSE, rows
    return jaxrec.make_train_step(*arguments), jaxrec.make_update(*arguments)


def parts_of(tables):
    """{stack: {part: f32[S, rows, width]}}."""
    return {stack: {part: np.stack(rows) for part, rows in tables.parts(stack).items()} for stack in SPEC.stacks}


def frozen(state):
    """Copies of all arrays of a state."""
    return jax.tree.map(np.array, state.dense), parts_of(state.tables)


def serial(rows, home="host"):
    with Serial(fresh(rows, home), programs(rows)[0]) as engine:
        return frozen(train(engine, batches))


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", MAKERS)
def test_a_schedule_gives_each_step_the_rate_of_a_float(name):
    """A step with a schedule equals a step with the value of the schedule as a float."""
    scheduled, rng = MAKERS[name](COSINE), np.random.default_rng(0)
    value = jnp.asarray(rng.standard_normal((3, 4), np.float32))
    slots = {key: jnp.full((3, slot.width), slot.fill) for key, slot in scheduled.init(4).items()}
    for step in range(STEPS + 2):
        gradient = jnp.asarray(rng.standard_normal((3, 4), np.float32))
        wanted = MAKERS[name](float(COSINE(step))).update(gradient, value, slots, step)
        value, slots = scheduled.update(gradient, value, slots, jnp.int32(step))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), (value, slots), wanted)


@pytest.mark.parametrize(("name", "window"), [("sgd", 8), ("adagrad", 3), ("rowwise_adagrad", 3)])
def test_a_pipeline_has_the_bits_of_one_batch_after_the_other(name, window):
    rows = MAKERS[name](COSINE)

    def piped(**mode):
        with Pipeline(fresh(rows), programs(rows)[1], **mode) as pipeline:
            return frozen(train(pipeline, batches))

    assert_equal(piped(mode="oac", window=window), serial(rows))
    if name == "adagrad":  # negative control: without replay stale rows are seen
        with pytest.raises(AssertionError):
            assert_equal(piped(mode="async"), serial(rows))


def test_the_homes_agree_and_the_schedule_matters():
    on_host, on_device = serial(adagrad(COSINE)), serial(adagrad(COSINE), "device")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), on_host, on_device)
    with pytest.raises(AssertionError):
        assert_equal(on_host, serial(adagrad(0.3)))


@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_run_goes_on_at_its_rate(tmp_path, stop):
    rows = rowwise_adagrad(COSINE)
    with Serial(fresh(rows), programs(rows)[0]) as engine, Checkpointer(tmp_path) as saver:
        cut = train(engine, lambda first: list(batches(first))[: stop - first])
        saver.save(cut)
    state, image = restore(tmp_path, fresh(rows))
    assert image.step == stop
    with Pipeline(state, programs(rows)[1], mode="oac", window=3) as pipeline:
        assert_equal(frozen(train(pipeline, batches)), serial(rows))


def test_a_free_trainer_counts_its_own_steps():
    """One trainer with one worker equals the serial loop: dense parameters and rows are at the same step."""
    rows = sgd(COSINE)
    tables = HostTables.create(SPEC, rows)
    (dense,), _ = train_freely(SPEC, loss, DENSE, rows, {"scale": jnp.ones(())}, tables, [batches()])
    wanted, parts = serial(rows)
    np.testing.assert_allclose(np.ravel(dense.params["scale"]), np.ravel(wanted.params["scale"]), rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), parts_of(tables), parts)


def test_an_emulated_trainer_counts_its_own_steps():
    rows, spec = sgd(COSINE), dataclasses.replace(SPEC, shards=1)
    emulation = Emulation(spec, loss, DENSE, rows, {"scale": jnp.ones(())}, trainers=1)
    emulation.run(batches())
    wanted, parts = serial(rows)
    np.testing.assert_allclose(emulation.dense[0].params["scale"], wanted.params["scale"][0], rtol=1e-5)
    for stack in SPEC.stacks:  # row r is in shard r % S at r // S
        whole = parts[stack]["value"].transpose(1, 0, 2).reshape(-1, 4)
        found = np.asarray(emulation.tables.parts(stack)["value"][0])
        np.testing.assert_allclose(found, whole[: len(found)], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rate", [np.array(0.5), np.float32(0.5), jnp.float32(0.5), 0])
def test_any_number_is_a_rate(rate):
    value, _ = sgd(rate).update(jnp.ones(2), jnp.ones(2), {}, 0)
    assert value.tolist() == [1 - float(rate)] * 2


def test_a_float_gives_the_program_that_it_always_gave():
    """Without a schedule the program has no more operations than the formula."""

    def by_hand(gradient, value, accumulator):
        accumulator = accumulator + jnp.mean(gradient * gradient, axis=-1, keepdims=True)
        root = jnp.sqrt(accumulator) + 1e-8
        return value - jnp.where(root > 0, 0.1 * gradient / root, 0.0), accumulator

    def program_of(rate):
        def by_hand(gradient, value, accumulator):
            value, slots = rowwise_adagrad(rate).update(gradient, value, {"accumulator": accumulator}, step)
            return value, slots["accumulator"]

        return text_of(by_hand)

    step, ones = jnp.int32(3), jnp.ones((3, 4))
    text_of = lambda function: jax.jit(function).lower(ones, ones, ones[:, :1]).as_text()
    assert program_of(0.1) == text_of(by_hand) != program_of(optax.linear_schedule(0.1, 0.0, 9))


def test_a_row_optimizer_of_ones_own_need_not_look_at_the_step():
    plain = RowOptimizer(lambda width: {}, lambda gradient, value, slots, step: (value - 0.1 * gradient, slots))
    assert_equal(serial(plain), serial(sgd(0.1)))


NO_RATES = ["0.1", float("nan"), float("inf"), -0.1, None, True, optax.sgd(0.1), np.ones(4)]


@pytest.mark.parametrize(
    ("name", "rate"),
    chosen([(name, rate) for name in MAKERS for rate in NO_RATES], lambda name, rate: name == "sgd" or rate is None),
)
def test_what_is_no_rate_is_refused_where_it_is_given(name, rate):
    with pytest.raises(ValueError, match=r"learning_rate=.* must be .* or a schedule"):
        MAKERS[name](rate)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda step: jnp.ones(4), r"shape \(4,\)"),
        (lambda step: None, "NoneType"),
        (optax.constant_schedule, "function"),  # a factory of schedules
    ],
)
def test_a_schedule_that_gives_no_number_is_refused_when_it_is_traced(schedule, words):
    with pytest.raises(ValueError, match=f"schedule .*{words}"):
        sgd(schedule).update(jnp.ones((2, 4)), jnp.ones((2, 4)), {}, 0)
