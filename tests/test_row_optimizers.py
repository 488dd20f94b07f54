"""Row optimizers equal dense optimizers on the rows that a batch touches, in every engine, home and image.

Their rate may be a schedule; then it is that of the step of the run.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equality import assert_equal
from studies.emulation import Emulation

import jaxrec
from jaxrec.checkpoint import Checkpointer, deltas, restore, restore_shards
from jaxrec.cpr import Recovery, mfu
from jaxrec.embedding import (
    EmbeddingSpec,
    Lookup,
    Table,
    adagrad,
    embedding_matrix,
    ftrl,
    lazy_adam,
    momentum_sgd,
    rowwise_adagrad,
    rowwise_adam,
    sgd,
    with_clipping,
    with_weight_decay,
)
from jaxrec.oac import Pipeline
from jaxrec.shadowsync import train_freely
from jaxrec.types import Batch, RowOptimizer

ROWS, WIDTH, STEPS = 23, 4, 20
SPEC = EmbeddingSpec({"item": Table(ROWS, WIDTH)}, {"two": Lookup("item", hots=2)}, shards=4)
RATE = optax.linear_schedule(0.2, 0.05, STEPS)


class RowwiseAdam:
    """Reference: row-wise Adam over one row."""

    def __init__(self, rate, b1=0.9, b2=0.999, eps=1e-8):
        self.given, self.first, self.second, self.touches = (rate, b1, b2, eps), 0.0, 0.0, 0

    def step(self, value, gradient, step):
        rate, b1, b2, eps = self.given
        self.touches += 1
        self.first = b1 * self.first + (1 - b1) * gradient
        self.second = b2 * self.second + (1 - b2) * np.mean(gradient**2)
        root = math.sqrt(self.second / (1 - b2**self.touches)) + eps
        return value - rate * self.first / (1 - b1**self.touches) / root


class Ftrl:
    """Algorithm 1 of McMahan et al. as printed, starting from the z whose weight is the initial value."""

    def __init__(self, rate, beta=1.0, l1=0.0, l2=0.0):
        self.given, self.n, self.z = (rate, beta, l1, l2), 0.0, None

    def step(self, value, gradient, step):
        rate, beta, l1, l2 = self.given
        if self.z is None:
            self.z = -value * (beta / rate + l2) - np.sign(value) * l1
        sigma = (np.sqrt(self.n + gradient**2) - np.sqrt(self.n)) / rate
        self.z, self.n = self.z + gradient - sigma * value, self.n + gradient**2
        weight = -(self.z - np.sign(self.z) * l1) / ((beta + np.sqrt(self.n)) / rate + l2)
        return np.where(np.abs(self.z) <= l1, 0.0, weight)


class Dense:
    """A dense optax optimizer over one row, whose steps are the touches of that row."""

    def __init__(self, optimizer):
        self.update, self.state = jax.jit(optimizer.update), optimizer.init(jnp.zeros(WIDTH))

    def step(self, value, gradient, step):
        value = jnp.asarray(value, jnp.float32)
        updates, self.state = self.update(jnp.asarray(gradient, jnp.float32), self.state, value)
        return np.asarray(optax.apply_updates(value, updates), np.float64)


class Scheduled:
    """SGD at the rate of the global step, not of the touches of the row."""

    def step(self, value, gradient, step):
        return value - float(RATE(step)) * gradient


def dense(optimizer):
    return lambda: Dense(optimizer)


CASES: dict[str, tuple] = {  # (row optimizer, factory of the reference for one row)
    "sgd": (sgd(0.1), dense(optax.sgd(0.1))),
    "sgd at a schedule": (sgd(RATE), Scheduled),
    "momentum": (momentum_sgd(0.1, 0.8), dense(optax.sgd(0.1, momentum=0.8))),
    "nesterov": (momentum_sgd(0.1, 0.8, nesterov=True), dense(optax.sgd(0.1, momentum=0.8, nesterov=True))),
    "adagrad": (adagrad(0.1, 0.1), dense(optax.chain(optax.scale_by_rss(0.1, 1e-16), optax.scale(-0.1)))),
    "lazy adam": (lazy_adam(0.05), dense(optax.adam(0.05))),
    "adamw": (lazy_adam(0.05, weight_decay=0.1), dense(optax.adamw(0.05, weight_decay=0.1))),
    "rowwise adam": (rowwise_adam(0.05), lambda: RowwiseAdam(0.05)),
    "ftrl": (ftrl(0.1), lambda: Ftrl(0.1)),
    "ftrl with penalties": (ftrl(0.1, 0.5, 0.3, 0.2), lambda: Ftrl(0.1, 0.5, 0.3, 0.2)),
    "decay": (
        with_weight_decay(momentum_sgd(0.1), 0.3),
        dense(optax.chain(optax.add_decayed_weights(0.3), optax.sgd(0.1, momentum=0.9))),
    ),
    "clipping": (
        with_clipping(sgd(0.1), 0.2),
        dense(optax.chain(optax.clip_by_global_norm(0.2), optax.sgd(0.1))),
    ),
    "both": (
        with_clipping(with_weight_decay(lazy_adam(0.05), 0.3), 0.2),
        dense(optax.chain(optax.clip_by_global_norm(0.2), optax.add_decayed_weights(0.3), optax.adam(0.05))),
    ),
}
EACH = pytest.mark.parametrize("name", CASES)
# Of the slow cases the fast tests keep three: the one with most slots, a nested one, and one that depends on the step.
FAST = ("lazy adam", "both", "sgd at a schedule")
SLOWLY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in CASES]
)


def loss(params, activations, batch):
    """Linear in the rows, so that their gradients do not depend on them."""
    return (activations["two"] * batch.dense).sum(-1) * params["scale"]


def batches(first=0, last=STEPS):
    for step in range(first, last):
        rng = np.random.default_rng(step)
        ids = rng.integers(0, ROWS, (6, 2)).astype(np.int32)
        ids[1] = ids[0]  # duplicates, within a batch and within an example
        ids[2, 1] = ids[2, 0]
        weight = np.array([1, 2, 1, 0, 1, 1], np.float32)
        yield Batch({"two": ids}, np.zeros(6, np.float32), rng.standard_normal((6, WIDTH)).astype(np.float32), weight)


def gradients_of(batch):
    """{row: f64[E]}, summed over occurrences; rows of examples without weight get 0."""
    found: dict[int, np.ndarray] = {}
    for row, *given in zip(batch.ids["two"], batch.dense, batch.weight, strict=True):
        for one in row:
            found[one] = found.get(one, 0.0) + given[0].astype(np.float64) * given[1] / batch.weight.sum()
    return {row: gradient for row, gradient in found.items() if gradient.any()}


DENSE = optax.sgd(0.0)


@functools.cache
def task_of(name, mesh=None):
    return jaxrec.Task(SPEC, loss, DENSE, CASES[name][0], mesh)


def fresh(task, place="host"):
    return task.init({"scale": jnp.ones(())}, place)


def frozen(state):
    """A copy of the whole state."""
    return jax.tree.map(np.array, state.dense), {
        part: [np.array(shard) for shard in shards] for part, shards in state.tables.parts("width_4").items()
    }


def serial(name, state=None, last=STEPS):
    with jaxrec.Serial(task_of(name), state or fresh(task_of(name))) as engine:
        return frozen(engine.train(lambda first: batches(first, last)))


@EACH
def test_it_is_the_dense_optimizer_on_touched_rows(name):
    task, reference = task_of(name), CASES[name][1]
    with jaxrec.Serial(task, fresh(task)) as engine:
        wanted = embedding_matrix(engine.tables, "item").astype(np.float64)
        initial = wanted.copy()
        kept: dict[int, object] = {}
        for step, batch in enumerate(batches()):
            for row, gradient in gradients_of(batch).items():
                wanted[row] = kept.setdefault(row, reference()).step(wanted[row], gradient, step)
        engine.train(batches)
        np.testing.assert_allclose(embedding_matrix(engine.tables, "item"), wanted, rtol=2e-5, atol=1e-6)
    assert np.abs(wanted - initial).max() > 0.01


# eps 0 with an empty accumulator is the hard case.
ADAGRADS = {"rowwise_adagrad": rowwise_adagrad(0.1), "without eps": rowwise_adagrad(0.1, eps=0.0)}
ALL = {name: case[0] for name, case in CASES.items()} | ADAGRADS


@pytest.mark.parametrize("rows", ALL.values(), ids=ALL)
def test_a_row_without_gradient_keeps_its_bits_and_its_slots(rows):
    rng = np.random.default_rng(0)
    value = jnp.asarray(rng.standard_normal((5, WIDTH), np.float32))
    slots = {key: jnp.asarray(rng.random((5, slot.width)), jnp.float32) for key, slot in rows.init(WIDTH).items()}
    gradient = jnp.asarray(rng.standard_normal((5, WIDTH), np.float32)).at[np.array([1, 3])].set(0.0)
    new, new_slots = jax.jit(rows.update)(gradient, value, slots, jnp.int32(3))
    for before, after in ((value, new), *((slots[key], new_slots[key]) for key in slots)):
        np.testing.assert_array_equal(after[jnp.array([1, 3])], before[jnp.array([1, 3])])
        assert (after[0] != before[0]).any()
    zeros = {key: jnp.zeros_like(slot) for key, slot in slots.items()}
    padding = jax.jit(rows.update)(jnp.zeros_like(value), jnp.zeros_like(value), zeros, jnp.int32(0))
    assert_equal(padding, (jnp.zeros_like(value), zeros))  # no NaN from 0 / 0


@SLOWLY
def test_in_flight_it_has_the_bits_of_one_batch_after_the_other(name):
    with Pipeline(task_of(name), fresh(task_of(name)), window=3) as pipeline:
        found = frozen(pipeline.train(batches))
        assert pipeline.counters["stale_rows"] > STEPS
    assert_equal(found, serial(name))


@SLOWLY
def test_devices_that_share_the_rows_agree(name):
    task = task_of(name, jaxrec.make_mesh(devices=jax.devices()[:4]))
    with jaxrec.Serial(task, fresh(task, "device")) as engine:
        eight = lambda batch: jax.tree.map(lambda leaf: np.concatenate([leaf, leaf[:2] * 0]), batch)
        found = frozen(engine.train(map(eight, batches())))
    wanted = serial(name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[: len(b)], b, rtol=1e-4, atol=2e-5), found[1], wanted[1])


@SLOWLY
def test_images_hold_all_of_it(name, tmp_path):
    task = task_of(name)
    with jaxrec.Serial(task, fresh(task)) as engine, Checkpointer(tmp_path) as saver:
        saver.save(engine.train(batches(0, 11)))
    state, image = restore(tmp_path, fresh(task))
    assert_equal(serial(name, state), serial(name))
    tables = fresh(task).tables
    restore_shards(image.path, tables, [2])
    wanted = serial(name, last=11)[1]
    for part, shards in tables.parts("width_4").items():
        np.testing.assert_array_equal(np.asarray(shards[2])[: len(wanted[part][2])], wanted[part][2])


@SLOWLY
def test_a_lost_shard_comes_back_from_deltas_with_its_slots(name, tmp_path):
    """Every touched row is saved at every step, so the run has the bits of one without the failure."""
    recovery = Recovery(tmp_path, 1, STEPS, scheme=mfu(), fraction=1.0, failures={9: [2]}, save_at_end=False)
    with jaxrec.Serial(task_of(name), fresh(task_of(name)), [recovery]) as engine:
        found = frozen(engine.train(batches))
    assert deltas(tmp_path)
    assert_equal(found, serial(name))


def test_an_adam_that_does_not_stand_still_is_another_one():
    """Negative control of the harness: dense Adam, whose moments move every row in every step."""
    plain = optax.adam(0.05)
    states = plain.init(jnp.zeros((ROWS, WIDTH)))
    wanted = jnp.asarray(embedding_matrix(fresh(task_of("lazy adam")).tables, "item"))
    for batch in batches():
        gradient = np.zeros((ROWS, WIDTH), np.float32)
        for row, one in gradients_of(batch).items():
            gradient[row] = one
        updates, states = plain.update(gradient, states)
        wanted = optax.apply_updates(wanted, updates)
    found = np.concatenate([serial("lazy adam")[1]["value"][row % 4][[row // 4]] for row in range(ROWS)])
    assert np.abs(found - wanted).max() > 0.05


def test_ftrl_follows_a_schedule_from_a_rate_of_zero():
    """At rate 0, as at the start of a warm-up, rows stay. Later rates do not move rows without gradient."""
    rows = ftrl(optax.linear_schedule(0.0, 0.5, 10))
    value, slots = jnp.array([[1.0, -2.0]]), {key: jnp.zeros((1, 2)) for key in ("squares", "linear")}
    first, slots = rows.update(jnp.ones((1, 2)), value, slots, 0)
    np.testing.assert_allclose(first, value, rtol=1e-6)
    tiny, _ = rows.update(jnp.full((1, 2), 1e-6), first, slots, 10)
    np.testing.assert_allclose(tiny, value, rtol=1e-5)
    moved, _ = rows.update(jnp.ones((1, 2)), first, slots, 10)
    assert (np.asarray(moved) < np.asarray(value) - 0.1).all()


def test_ftrl_leaves_rare_weights_at_zero():
    rows = ftrl(0.1, l1=1.0)
    value, slots = jnp.zeros((1, 2)), {key: jnp.zeros((1, 2)) for key in ("squares", "linear")}
    for step in range(3):
        value, slots = rows.update(jnp.array([[0.3, 2.0]]), value, slots, step)
    assert value[0, 0] == 0.0 and value[0, 1] < -0.05


# ---- rates


COSINE = optax.warmup_cosine_decay_schedule(0.0, 0.3, 2, 9)


@pytest.mark.parametrize("make", [sgd, adagrad, rowwise_adagrad])
def test_a_schedule_gives_each_step_the_rate_of_a_float(make):
    scheduled, rng = make(COSINE), np.random.default_rng(0)
    value = jnp.asarray(rng.standard_normal((3, 4), np.float32))
    slots = {key: jnp.full((3, slot.width), slot.fill) for key, slot in scheduled.init(4).items()}
    for step in range(11):
        gradient = jnp.asarray(rng.standard_normal((3, 4), np.float32))
        wanted = make(float(COSINE(step))).update(gradient, value, slots, step)
        value, slots = scheduled.update(gradient, value, slots, jnp.int32(step))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), (value, slots), wanted)


def test_free_and_emulated_trainers_count_their_own_steps():
    """One trainer with one worker equals the serial loop: dense parameters and rows are at the same step."""
    task, params = task_of("sgd at a schedule"), {"scale": jnp.ones(())}
    tables = fresh(task).tables
    train_freely(task, params, tables, [batches()])
    one_shard = dataclasses.replace(task, spec=dataclasses.replace(SPEC, shards=1))
    emulation = Emulation(one_shard, params, trainers=1)
    emulation.run(batches())
    with jaxrec.Serial(task, fresh(task)) as engine:
        wanted = embedding_matrix(engine.train(batches).tables, "item")
    for found in (tables, emulation.tables):
        np.testing.assert_allclose(embedding_matrix(found, "item"), wanted, rtol=1e-4, atol=1e-6)


def test_a_float_gives_the_program_that_it_always_gave():
    """Without a schedule the program has no more operations than the formula."""

    def by_hand(gradient, value, accumulator):
        accumulator = accumulator + jnp.mean(gradient * gradient, axis=-1, keepdims=True)
        root = jnp.sqrt(accumulator) + 1e-8
        return value - jnp.where(root == 0, 0.0, 0.1 * gradient / root), accumulator

    def program_of(rate):
        def by_hand(gradient, value, accumulator):
            value, slots = rowwise_adagrad(rate).update(gradient, value, {"accumulator": accumulator}, step)
            return value, slots["accumulator"]

        return text_of(by_hand)

    step, ones = jnp.int32(3), jnp.ones((3, 4))
    text_of = lambda function: jax.jit(function).lower(ones, ones, ones[:, :1]).as_text()
    assert program_of(0.1) == text_of(by_hand) != program_of(optax.linear_schedule(0.1, 0.0, 9))


@pytest.mark.parametrize("rate", [np.array(0.5), jnp.float32(0.5), 0])
def test_any_number_is_a_rate(rate):
    value, _ = sgd(rate).update(jnp.ones(2), jnp.ones(2), {}, 0)
    assert value.tolist() == [1 - float(rate)] * 2


@pytest.mark.parametrize("rate", ["0.1", float("nan"), float("inf"), -0.1, None, True, optax.sgd(0.1), np.ones(4)])
def test_what_is_no_rate_is_refused(rate):
    with pytest.raises(ValueError, match=r"learning_rate=.* must be .* or a schedule"):
        sgd(rate)


def test_a_schedule_that_gives_an_array_is_refused_when_it_is_traced():
    with pytest.raises(ValueError, match=r"schedule .*shape \(4,\)"):
        sgd(lambda step: jnp.ones(4)).update(jnp.ones((2, 4)), jnp.ones((2, 4)), {}, 0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: adagrad(None), "learning_rate=None must be"),
        (lambda: rowwise_adagrad(None), "learning_rate=None must be"),
        (lambda: adagrad(0.1, eps=-10), "eps=-10 must be 0 or more"),
        (lambda: rowwise_adagrad(0.1, initial_accumulator_value=-1), "initial_accumulator_value=-1 must be"),
        (lambda: momentum_sgd(-0.1), "learning_rate=-0.1 must be"),
        (lambda: lazy_adam("fast"), "learning_rate='fast' must be"),
        (lambda: ftrl(None), "learning_rate=None must be"),
        (lambda: momentum_sgd(0.1, 1.0), "momentum=1.0 must be 0 or more and below 1"),
        (lambda: lazy_adam(0.1, b1=-0.1), "b1=-0.1 must be"),
        (lambda: lazy_adam(0.1, b2=1), "b2=1 must be"),
        (lambda: rowwise_adam(0.1, eps=float("nan")), "eps=nan must be"),
        (lambda: lazy_adam(0.1, weight_decay=-1), "weight_decay=-1 must be"),
        (lambda: ftrl(0.1, l1=-1.0), "l1=-1.0 must be"),
        (lambda: with_weight_decay(sgd(0.1), True), "rate=True must be"),
        (lambda: with_weight_decay(optax.adam(0.1), 0.1), "is not a RowOptimizer"),
        (lambda: with_clipping(sgd(0.1), 0.0), "largest_norm=0.0 must be above 0"),
        (lambda: with_clipping(0.1, sgd(0.1)), "is not a RowOptimizer"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_given(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("make", [sgd, momentum_sgd, adagrad, rowwise_adagrad, lazy_adam, rowwise_adam, ftrl])
def test_a_row_of_a_gradient_that_is_nan_is_nan_and_no_other_is(make):
    optimizer = make(0.1)
    slots = {name: jnp.full((2, slot.width), slot.fill) for name, slot in optimizer.init(3).items()}
    gradient = jnp.array([[1.0, np.nan, 0.0], [1.0, 2.0, 0.0]])
    value, _ = optimizer.update(gradient, jnp.ones((2, 3)), slots, 0)
    assert np.isnan(value[0]).any() and np.isfinite(value[1]).all()


def test_they_go_around_a_row_optimizer_of_ones_own():
    mine = RowOptimizer(lambda width: {}, lambda gradient, value, slots, step: (value - gradient, slots))
    new, _ = with_clipping(with_weight_decay(mine, 1.0), 1.0).update(jnp.array([[0.0, 3.0]]), jnp.ones((1, 2)), {}, 0)
    assert new.tolist() == [[0.0, -1.0]]
    assert rowwise_adagrad(0.1).init(4).keys() == with_clipping(rowwise_adagrad(0.1), 1.0).init(4).keys()
