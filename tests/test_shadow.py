"""The shadow thread: training never waits for it, nothing is lost that a rule keeps, nobody hangs."""

import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrec
from jaxrec.embedding import DeviceTables, EmbeddingSpec, Lookup, Table, sgd
from jaxrec.shadowsync.rules import bmuf, easgd, model_averaging
from jaxrec.shadowsync.shadow import Foreground, Shadow, spread
from jaxrec.shadowsync.transport import AllToAll, Centre, Left, pack, queued
from jaxrec.types import DenseState, TrainState

PARAMS = {"w": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}


def state_of(*values):
    """A state of as many replicas as values."""
    params = {"w": jnp.asarray(values, jnp.float32)[:, None] * jnp.ones((1, 3)), "b": jnp.zeros((len(values), 2))}
    return TrainState(DenseState(jnp.zeros((), jnp.int32), params, {}), None)


@functools.partial(jax.jit, donate_argnums=0)
def step_dense(dense, change):
    """Adds to every parameter; the state is donated, as a train step does."""
    return dense._replace(step=dense.step + 1, params=jax.tree.map(lambda x: x + change, dense.params))


def step(state, change=1.0):
    return state._replace(dense=step_dense(state.dense, change))


def weights(state):
    return np.asarray(state.dense.params["w"])[:, 0]


def wait_for_round(shadow):
    """Until the thread has a result for the trainer."""
    with shadow._changed:
        assert shadow._changed.wait_for(lambda: shadow._result is not None or shadow._failure, timeout=60)


class Gate:
    """A transport that waits until it is opened, or fails."""

    def __init__(self, transport, error=None):
        self.transport, self.error, self.entered, self.open = transport, error, threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def meet(self, trainer, before, done):
        self.entered.set()
        assert self.open.wait(60)
        if self.error:
            raise self.error
        return self.transport.meet(trainer, before, done)


class Once:
    """A transport of one round over another one, which trainer 0 has joined; who brings more waits until it leaves."""

    def __init__(self, transport):
        self.transport, self.met, self.left = transport, False, threading.Event()

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def join(self, trainer):
        pass

    def meet(self, trainer, before, done):
        if self.met:
            assert self.left.wait(60)
            raise Left
        self.met = True
        return self.transport.meet(trainer, before, done)

    def leave(self, trainer, error=None):
        self.left.set()


class Ends:
    """A transport that keeps the first weight that each trainer had when it was done."""

    def __init__(self, transport):
        self.transport, self.ends = transport, {}

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def meet(self, trainer, before, done):
        if done:
            self.ends[trainer] = float(before[-1].flat[0])
        return self.transport.meet(trainer, before, done)


def no_threads_left():
    return not [thread for thread in threading.enumerate() if thread.name.startswith("shadow-")]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [(model_averaging(0.5, "lerp"), 0.5), (model_averaging(0.5, "delta"), 1.0), (bmuf(1.0, form="lerp"), 0.0)],
)
def test_training_goes_on_while_a_round_is_blocked_and_keeps_what_the_rule_keeps(rule, kept):
    gate = Gate(AllToAll(rule, PARAMS))
    alpha = 1.0 if rule.name == "bmuf" else 0.5
    with Shadow(rule, gate) as shadow:
        state = shadow.exchange(state_of(1.0, 3.0))  # handed over: 1 and 3, their mean is 2
        assert gate.entered.wait(60)
        for _ in range(8):  # no step waits for the round, which cannot end
            state = shadow.exchange(step(state))
        assert shadow.rounds == 0 and weights(state).tolist() == [9.0, 11.0]
        gate.open.set()
        wait_for_round(shadow)
        state = shadow.exchange(state)
        np.testing.assert_allclose(weights(state), [2 + kept * 8 - (1 - alpha), 2 + kept * 8 + (1 - alpha)], rtol=1e-6)
        assert shadow.rounds == 1 and shadow.steps == 10 and shadow.average_sync_gap == 10
    assert no_threads_left()


@pytest.mark.parametrize("rule", [easgd(0.3), easgd(0.3, "sequential"), model_averaging(0.7), bmuf(0.6, 0.9, 0.5)])
def test_a_round_without_latency_is_the_foreground_round_to_the_bit(rule):
    """Shadow contains foreground: every 3 steps, result folded in before the next step."""

    def transport():
        initial = {"w": np.ones(3, np.float32), "b": np.zeros(2, np.float32)}
        return Centre(rule, initial) if rule.has_centre else AllToAll(rule, initial)

    shared, a, b, rounds = transport(), state_of(1.0, -2.0, 4.0), state_of(1.0, -2.0, 4.0), 0
    shared.join(0)
    with Foreground(rule, transport(), every_steps=3) as foreground:
        for number in range(1, 13):
            a, b = (step(state, 0.1 * number) for state in (a, b))
            a = foreground.exchange(a)
            if number % 3 == 0:
                with Shadow(rule, Once(shared)) as shadow:
                    b = shadow.exchange(b)
                    wait_for_round(shadow)
                    b = shadow.exchange(b)
                    rounds += shadow.rounds
            jax.tree.map(np.testing.assert_array_equal, a.dense.params, b.dense.params)
        assert foreground.rounds == rounds == 4 and foreground.average_sync_gap == 3


def run_trainers(rule, transport, steps, change=1.0):
    """Free-running trainers, each a thread with its own shadow; their last states, and errors."""
    states, errors = {}, {}

    def train(trainer, number):
        try:
            state = state_of(float(trainer))
            with Shadow(rule, transport, trainer) as shadow:
                for _ in range(number):
                    state = shadow.exchange(step(state, change))
                states[trainer] = shadow.finish(state)
        except Exception as error:
            errors[trainer] = error

    threads = [threading.Thread(target=train, args=item) for item in enumerate(steps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and no_threads_left()
    return states, errors


def test_uneven_trainers_make_rounds_until_all_are_done():
    states, errors = run_trainers(model_averaging(1.0), AllToAll(model_averaging(1.0), PARAMS, 3), [3, 200, 40])
    assert not errors
    assert len({weights(state)[0] for state in states.values()}) == 1  # the last round had all of them


def test_free_running_easgd_keeps_the_sum():
    rule = easgd(0.4)
    initial = {"w": np.full(3, 9.0, np.float32), "b": np.zeros(2, np.float32)}
    centre = Ends(Centre(rule, initial, 4, servers=2))
    states, errors = run_trainers(rule, centre, [50, 5, 120, 70], change=0.0)
    assert not errors
    total = sum(centre.ends.values()) + centre.parameters["w"][0]
    np.testing.assert_allclose(total, 0 + 1 + 2 + 3 + 9, rtol=1e-5)
    for state in states.values():
        np.testing.assert_array_equal(state.dense.params["w"][0], centre.parameters["w"])


def test_nobody_waits_for_a_trainer_that_fails():
    rule = model_averaging()
    transport = AllToAll(rule, PARAMS, 2)
    reached = threading.Event()

    def failing():
        with pytest.raises(RuntimeError, match="out of memory"), Shadow(rule, transport, 1) as shadow:
            shadow.exchange(state_of(0.0))
            assert reached.wait(60)
            raise RuntimeError("out of memory")

    thread = threading.Thread(target=failing)
    thread.start()
    with (
        pytest.raises(Left, match="trainer 1 left after its round . with RuntimeError: out of memory"),
        Shadow(rule, transport, 0) as shadow,
    ):
        state = shadow.exchange(state_of(1.0))
        reached.set()
        shadow.finish(step(state))
    thread.join(60)
    assert not thread.is_alive() and no_threads_left()


def test_what_a_round_raises_surfaces_at_the_next_exchange_and_on_leaving():
    gate = Gate(AllToAll(model_averaging(), PARAMS), error=ValueError("corrupt"))
    gate.open.set()
    with pytest.raises(ValueError, match="corrupt"), Shadow(model_averaging(), gate) as shadow:
        state = shadow.exchange(state_of(1.0, 2.0))
        shadow._thread.join(60)
        shadow.exchange(state)
    gate = Gate(AllToAll(model_averaging(), PARAMS), error=ValueError("corrupt"))
    with pytest.raises(ValueError, match="corrupt"), Shadow(model_averaging(), gate) as shadow:
        shadow.exchange(state_of(1.0, 2.0))
        assert gate.entered.wait(60)
        gate.open.set()
    assert no_threads_left()


def test_lock_step_replicas_of_a_mesh_are_averaged_where_they_lie():
    mesh = jaxrec.make_mesh(replicas=4, devices=jax.devices()[:4])
    place = lambda leaf: jaxrec.sharding.put_on_mesh(leaf, mesh, jaxrec.sharding.PER_REPLICA)
    state = state_of(0.0, 2.0, 4.0, 6.0)
    state = state._replace(dense=state.dense._replace(params=jax.tree.map(place, state.dense.params)))
    rule = model_averaging(0.5)
    before = spread(state.dense.params)
    with Shadow(rule, AllToAll(rule, PARAMS)) as shadow:
        state = shadow.exchange(state)
        wait_for_round(shadow)
        state = shadow.exchange(state)
    assert weights(state).tolist() == [1.5, 2.5, 3.5, 4.5]
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(state.dense.params)} == {jaxrec.sharding.PER_REPLICA}
    np.testing.assert_allclose(spread(state.dense.params), before / 2, rtol=1e-6)


def test_servers_share_the_tensors_and_their_bandwidth():
    assert sorted(pack([8, 1, 7, 2, 6], 2)) == [0, 0, 0, 1, 1]

    def waited(servers, trainers=2):
        """Seconds until two trainers are through that come at the same instant, the second behind the first."""
        tree = {"a": np.zeros((1, 100), np.float32), "b": np.zeros((1, 100), np.float32)}
        initial = jax.tree.map(lambda x: x[0], tree)
        centre, start = Centre(easgd(), initial, trainers, servers=servers, bytes_per_s=8000.0), time.monotonic()
        for trainer in range(trainers):
            centre.join(trainer)
            centre.meet(trainer, tree, False)
        return time.monotonic() - start

    assert waited(servers=1) >= 0.4 and 0.2 <= waited(servers=2)
    assert queued([0.0, 0.0], [800, 800], 1600.0, now=0.0) == [0.5, 0.5]
    assert queued(queued([0.0], [1600], 1600.0, now=0.0), [1600], 1600.0, now=0.0) == [2.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllToAll(easgd(), PARAMS), "without a centre"),
        (lambda: AllToAll(model_averaging(), PARAMS, 0), "trainers=0"),
        (lambda: AllToAll(model_averaging(), 3), "AllToAll.rule, parameters, trainers=3"),
        (lambda: Centre(bmuf(), PARAMS), "with a centre"),
        (lambda: Centre(easgd(), PARAMS, servers=0), "servers=0"),
        (lambda: Centre(easgd(), PARAMS, bytes_per_s=0), "bytes_per_s=0"),
        (lambda: Foreground(easgd(), None, every_steps=0), "every_steps=0"),
        (lambda: Foreground(easgd(), None), "one of them"),
        (lambda: Shadow(easgd(), None, pace_seconds=-1), "pace_seconds=-1"),
        (
            lambda: Centre(easgd(), {"w": np.zeros(3)}).meet(0, {"w": np.zeros((1, 4))}, False),
            r"trainer 0 brings does not fit at \['w'\]",
        ),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_averaging_after_every_step_of_sgd_is_training_on_the_large_batch():
    """FR-MA-1, lock-step, row_gradient='mean': four replicas of a batch each equal one with all four, to 1e-6."""
    spec = EmbeddingSpec({"item": Table(40, 4)}, {"item": Lookup("item")})
    loss = lambda params, act, batch: optax.sigmoid_binary_cross_entropy(act["item"] @ params["w"], batch.label)
    rng = np.random.default_rng(0)
    batches = [
        jaxrec.Batch({"item": rng.integers(0, 40, 32).astype(np.int32)}, np.zeros((32, 0)), rng.random(32), np.ones(32))
        for _ in range(20)
    ]

    def trained(replicas, synchroniser):
        mesh = jaxrec.make_mesh(replicas, jax.devices()[:4])
        step = jaxrec.make_train_step(spec, loss, optax.sgd(0.5), sgd(0.5), mesh, row_gradient="mean")
        tables = DeviceTables.create(spec, sgd(0.5), mesh)
        state = jaxrec.init_state({"w": jnp.ones(4)}, optax.sgd(0.5), tables, mesh)
        for batch in batches:
            state, _ = step(state, jaxrec.plan(spec, batch.ids), batch)
            state = synchroniser.exchange(state) if synchroniser else state
        assert synchroniser is None or synchroniser.rounds == len(batches)
        return np.asarray(state.dense.params["w"]), np.asarray(state.tables.value["width_4"])

    rule = model_averaging(1.0)
    with Foreground(rule, AllToAll(rule, {"w": np.ones(4)}), every_steps=1) as foreground:
        each, rows = trained(4, foreground)
    whole, wanted = trained(1, None)
    np.testing.assert_allclose(each, np.broadcast_to(whole, (4, 4)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(rows, wanted, rtol=1e-6, atol=1e-6)
    alone, _ = trained(4, None)  # negative control
    assert np.abs(alone - whole).max() > 1e-3
