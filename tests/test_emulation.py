"""The emulation of many trainers: one is plain training, a script follows the rules, the order is seeded."""

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click_model import loss
from studies.emulation import ALL_REDUCE, Emulation, Script
from transports import InOrder

from jaxrec import Batch, Task
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, adagrad, sgd
from jaxrec.shadowsync import AllToAll, Centre, Foreground, bmuf, easgd, model_averaging

SPEC = EmbeddingSpec({"item": Table(40, 4)}, {"item": Lookup("item")}, shards=1)
PARAMS = {"w": jnp.ones(4)}
TASK = Task(SPEC, loss, optax.sgd(0.1), sgd(0.1))
close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def batches(number, seed=0, size=8):
    rng = np.random.default_rng(seed)
    for _ in range(number):
        ids, label = rng.integers(0, 40, size).astype(np.int32), rng.integers(0, 2, size)
        yield Batch({"item": ids}, label.astype(np.float32))


def emulate(number, trainers, workers=1, script=None, task=None, **more):
    emulation = Emulation(task or TASK, PARAMS, trainers, workers, script, **more)
    return emulation, emulation.run(batches(number))


def weights(emulation):
    return np.stack([dense.params["w"] for dense in emulation.dense])


def table(emulation):
    return np.asarray(emulation.tables.value["width_4"][0])


def test_one_worker_of_one_trainer_is_plain_training():
    task = Task(SPEC, loss, optax.adam(0.01), adagrad(0.1))
    emulation, losses = emulate(30, 1, task=task)
    state, wanted = task.init(PARAMS, "host"), []
    for batch in batches(30):
        state, metrics = task.step(state, batch)
        wanted.append(metrics["loss"])
    close(losses, wanted)
    jax.tree.map(close, emulation.replica().dense, state.dense)
    close(table(emulation), state.tables.shards["width_4"][0]["value"])


@pytest.mark.parametrize("script", [None, Script(easgd(), 3, 2), ALL_REDUCE])
def test_the_order_is_the_seeds_and_runs_repeat_to_the_bit(script):
    workers = 1 if script == ALL_REDUCE else 3
    first, again, other = (emulate(48, 4, workers, script, seed=seed)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(weights(first), weights(again))
    np.testing.assert_array_equal(table(first), table(again))
    if script != ALL_REDUCE:
        assert (weights(first) != weights(other)).any()


def test_every_gradient_is_applied_once():
    """With a loss that is linear in all parameters, order and staleness affect rounding only."""
    linear = lambda params, activations, batch: -activations["item"].sum(-1) - params["w"].sum()
    found = Emulation(Task(SPEC, linear, optax.sgd(1.0), sgd(1.0)), PARAMS, trainers=3, workers=4)
    before = table(found)
    found.run(batches(48))
    np.testing.assert_array_equal(weights(found), 1 + 16)
    counts = np.zeros(40)
    for batch in batches(48):
        np.add.at(counts, batch.ids["item"], 1 / 8)
    close(table(found) - before, np.repeat(counts[:, None], 4, axis=1))
    assert found.ticks == 16 and found.example_level_parallelism == 8 * 3 * 4


def test_the_mean_of_every_step_is_a_step_on_the_large_batch():
    """FR-MA-1 with SGD and all-reduce; rows add up over trainers, which a learning rate divided by n offsets."""
    n, task = 4, Task(SPEC, loss, optax.sgd(0.1), sgd(0.1 / 4))
    averaged, _ = emulate(40, n, script=Script(model_averaging(1.0), 1), task=task)
    reduced, _ = emulate(40, n, script=ALL_REDUCE, task=task)
    state, stream = TASK.init(PARAMS, "host"), batches(40)
    for some in zip(*[stream] * n, strict=True):
        large = jax.tree.map(lambda *x: np.concatenate(x), *some)
        state, _ = TASK.step(state, large)
    close(weights(reduced), np.broadcast_to(state.dense.params["w"], (n, 4)))
    close(table(reduced), state.tables.shards["width_4"][0]["value"])
    # Averaging after each step reads rows with other trainers' newer updates: close, not equal (test_shadow has equal).
    np.testing.assert_allclose(weights(averaged).mean(axis=0), weights(reduced)[0], atol=2e-4)
    alone, _ = emulate(40, n, task=task)  # negative control
    assert np.ptp(weights(alone), axis=0).max() > 3 * np.ptp(weights(averaged), axis=0).max()


def walk(params, activations, batch):
    """A loss whose gradient by every weight is a constant of the batch, so that steps can be computed by hand."""
    return -params["w"].sum() * (1 + batch.label)


WALK = Task(SPEC, walk, optax.sgd(1.0), sgd(0.0))


def walks(trainers, ticks):
    """Increments of each trainer's weights at every tick: f32[ticks, trainers]."""
    means = [1 + batch.label.mean() for batch in batches(trainers * ticks)]
    return np.array(means, np.float32).reshape(ticks, trainers)


class Plainly:
    """A plain implementation of a script, for trainers with the loss `walk`.

    Attributes:
      live: weights of each trainer. shared: the rule's shared state. before: weights copied by a round in progress.
      rounds: number of rounds, summed over trainers.
    """

    def __init__(self, rule, added, every, latency):
        ticks, n = added.shape
        self.rule, self.groups = rule, [[i] for i in range(n)] if rule.has_centre else [list(range(n))]
        self.live, self.before = [np.ones(4, np.float32) for _ in range(n)], [None] * n
        self.shared, self.rounds = rule.init(np.ones(4, np.float32)), 0
        for tick in range(1, ticks + 1):
            if tick > 1:  # updates are applied one tick after they are computed
                self.live = [w + more for w, more in zip(self.live, added[tick - 2], strict=True)]
            for number, group in enumerate(self.groups):
                begins, ends = ((t + number) % every == 0 < t for t in (tick, tick - latency))
                for act in (self.begin, self.end) if latency == 0 else (self.end, self.begin):
                    if begins if act == self.begin else ends:
                        act(group)
        self.live = [w + more for w, more in zip(self.live, added[-1], strict=True)]

    def begin(self, group):
        for i in group:
            self.before[i] = self.live[i].copy()

    def end(self, group):
        self.shared, target = self.rule.combine(self.shared, np.mean([self.before[i] for i in group], axis=0))
        for i in group:
            self.live[i] = self.rule.merge(self.live[i], self.before[i], target)
            self.before[i], self.rounds = None, self.rounds + 1


@pytest.mark.parametrize(
    "rule", [easgd(0.3), model_averaging(0.5), bmuf(0.5, eta=0.9, momentum=0.4)], ids=lambda r: r.name
)
@pytest.mark.parametrize("latency", [0, 2])
def test_a_script_does_what_the_rules_say(rule, latency):
    """Compared with the plain implementation; rows are frozen, dense parameters move by constant steps."""
    n, every, ticks = 3, 4, 13
    found = Emulation(WALK, PARAMS, n, script=Script(rule, every, latency))
    found.run(batches(n * ticks))
    plain = Plainly(rule, walks(n, ticks), every, latency)
    close(weights(found), np.stack(plain.live))
    assert found.average_sync_gap == pytest.approx(ticks * n / plain.rounds)


RULES = [
    easgd(0.3),
    easgd(0.3, "sequential"),
    model_averaging(0.4, "lerp"),
    bmuf(0.5, eta=0.9, momentum=0.4),
    pytest.param(model_averaging(0.4), marks=pytest.mark.more),
    pytest.param(bmuf(0.5, eta=0.9, momentum=0.4, form="lerp"), marks=pytest.mark.more),
    pytest.param(bmuf(1.0, momentum=0.8), marks=pytest.mark.more),
]
TRAINERS, EVERY, TICKS = 3, 4, 27


def emulated(rule, latency=0, finish=True):
    found = Emulation(WALK, PARAMS, TRAINERS, script=Script(rule, EVERY, latency))
    found.run(batches(TRAINERS * TICKS))
    if finish:
        found.finish()
    return found


def in_earnest(rule, kind, finish, **more):
    """The same with the real transport, `exchange` at the end of every tick: (weights, rounds of each trainer)."""
    transport = InOrder(Centre(rule, PARAMS, TRAINERS)) if rule.has_centre else AllToAll(rule, PARAMS, TRAINERS)
    live, added = (
        [dict(PARAMS) for _ in range(TRAINERS)],
        np.concatenate([np.zeros((1, TRAINERS), np.float32), walks(TRAINERS, TICKS)]),
    )
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(TRAINERS))
        syncs = [stack.enter_context(kind(transport, i, **more)) for i in range(TRAINERS)]
        if rule.has_centre:  # trainer i is i ticks ahead of trainer 0, so that no two are at the centre at once
            for i, sync in enumerate(syncs):
                for _ in range(i):
                    live[i] = sync.exchange(live[i])
        for tick in range(TICKS):
            live = [{"w": params["w"] + add} for params, add in zip(live, added[tick], strict=True)]
            live = list(pool.map(lambda sync, params: sync.exchange(params), syncs, live))
        live = [{"w": params["w"] + add} for params, add in zip(live, added[TICKS], strict=True)]
        if rule.has_centre:
            transport.ordered = True  # only now: before, no two are at the centre at once
        if finish:
            live = list(pool.map(lambda sync, params: sync.finish(params), syncs, live))
        rounds = [sync.rounds for sync in syncs]
    return np.stack([params["w"] for params in live]), rounds


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.describe())
def test_the_foreground_in_earnest_is_the_emulation(rule):
    """To 1e-6, not bit for bit: the emulation compiles the rules, the transport runs them in NumPy."""
    found, rounds = in_earnest(rule, Foreground, finish=False, every_steps=EVERY)
    assert min(rounds) >= 6
    played = emulated(rule, finish=False)
    np.testing.assert_allclose(found, weights(played), rtol=1e-6)
    alone = 1 + walks(TRAINERS, TICKS).sum(axis=0)  # negative control
    assert np.abs(found[:, 0] - alone).max() > 0.01


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.describe())
def test_the_last_rounds_are_those_of_finish(rule):
    played, before = emulated(rule), emulated(rule, finish=False)
    found, _ = in_earnest(rule, Foreground, finish=True, every_steps=EVERY)
    np.testing.assert_allclose(found, weights(played), rtol=1e-6)
    if rule.has_centre:
        assert (weights(played) == weights(played)[0]).all() and (found == found[0]).all()
        plain = Plainly(rule, walks(TRAINERS, TICKS), EVERY, latency=0)
        for group in plain.groups:
            plain.begin(group)
            plain.end(group)
        close(weights(played)[0], plain.shared)
    assert (weights(played) != weights(before)).any()
    assert played.average_sync_gap == before.average_sync_gap  # last rounds are not counted, as in `TrainerStats`


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.describe())
def test_a_round_under_way_is_folded_in_before_the_last_ones(rule):
    """Compared with the plain implementation."""
    plain, played = Plainly(rule, walks(TRAINERS, TICKS), EVERY, latency=4), emulated(rule, latency=4)
    assert all(weights is not None for weights in plain.before)
    for group in plain.groups:
        plain.end(group)
    for group in plain.groups:
        plain.begin(group)
        plain.end(group)
    close(weights(played), np.stack([plain.shared] * TRAINERS if rule.has_centre else plain.live))


def test_trainers_that_have_finished_train_no_more():
    played = emulated(model_averaging())
    with pytest.raises(ValueError, match="`finish` comes once"):
        played.finish()
    with pytest.raises(ValueError, match="`run` comes before `finish`"):
        played.run(batches(6))
    alone, reduced = emulate(9, 3)[0], emulate(9, 3, script=ALL_REDUCE)[0]
    for each in (alone, reduced):  # nothing to synchronise
        as_it_was = weights(each)
        each.finish()
        np.testing.assert_array_equal(weights(each), as_it_was)
        assert each.average_sync_gap == float("inf")
    at_once = Emulation(TASK, PARAMS, 2, script=Script(model_averaging(), 2, 2))
    at_once.finish()
    np.testing.assert_array_equal(weights(at_once), 1)


class OfOnesOwn(Task):
    """A task whose step the emulation would not run."""

    def update(self, dense, rows, plans, batch):
        raise AssertionError("nothing trains by it")


def keyed(params, activations, batch, *, rng):
    return loss(params, activations, batch) * jax.random.uniform(rng)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (OfOnesOwn(SPEC, loss, optax.sgd(0.1), sgd(0.1)), "OfOnesOwn has an update of its own"),
        (Task(SPEC, keyed, optax.sgd(0.1), sgd(0.1), seed=0), "give a loss no key"),
        (Task(SPEC, lambda *args: (loss(*args), {}, PARAMS), optax.sgd(0.1), sgd(0.1)), "returned variables"),
    ],
)
def test_a_task_that_more_than_gradients_train_is_refused(task, message):
    with pytest.raises(ValueError, match=message):
        emulate(2, 2, task=task)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trainers": 0}, "must be a whole number from 1"),
        ({"workers": 0}, "must be a whole number from 1"),
        ({"script": ALL_REDUCE, "workers": 2}, "all_reduce"),
        ({"script": Script(easgd(), 0)}, "every_ticks=0"),
        ({"script": Script(easgd(), 2, 3)}, "do not overlap"),
        ({"spec": EmbeddingSpec({"item": Table(40, 4)}, {"item": Lookup("item")}, shards=2)}, "shards"),
    ],
)
def test_bad_input_is_refused(changed, message):
    given = {"spec": SPEC, "trainers": 2, "workers": 1, "script": None} | changed
    spec = given.pop("spec")
    with pytest.raises(ValueError, match=message):
        Emulation(dataclasses.replace(TASK, spec=spec), PARAMS, **given)
    with pytest.raises(ValueError, match="fewer batches"):
        emulate(2, 3)
