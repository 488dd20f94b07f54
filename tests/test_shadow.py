"""The shadow thread: training never waits for it, nothing is lost that a rule keeps, nobody hangs."""

import collections
import functools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrec
from jaxrec.embedding import DeviceTables, EmbeddingSpec, Lookup, Table, sgd
from jaxrec.shadowsync import (
    AllToAll,
    Centre,
    Foreground,
    Left,
    Shadow,
    SyncGroup,
    bmuf,
    easgd,
    model_averaging,
    replica_spread,
)
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


class Steps:
    """A transport whose rounds begin one by one, when the test releases them; it keeps what they brought."""

    def __init__(self, transport):
        self.transport, self.begin, self.brought, self.left = transport, threading.Semaphore(0), [], False

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def meet(self, trainer, before, done):
        assert self.begin.acquire(timeout=60)
        if self.left:
            raise Left("the test is over")
        self.brought.append([np.array(leaf) for leaf in before])
        return self.transport.meet(trainer, before, done)

    def leave(self, trainer, error=None):
        self.left = True
        self.transport.leave(trainer, error)
        self.begin.release()


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


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        os.sched_yield()


def no_threads_left():
    return not [thread for thread in threading.enumerate() if thread.name.startswith("shadow-")]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [(model_averaging(0.5, "lerp"), 0.5), (model_averaging(0.5, "delta"), 1.0), (bmuf(1.0, form="lerp"), 0.0)],
)
def test_training_goes_on_while_a_round_is_blocked_and_keeps_what_the_rule_keeps(rule, kept):
    gate = Gate(AllToAll(rule, PARAMS))
    alpha = 1.0 if rule.name == "bmuf" else 0.5
    with Shadow(gate) as shadow:
        state = shadow.exchange(state_of(1.0, 3.0))  # handed over: 1 and 3, their mean is 2
        assert gate.entered.wait(60)
        for _ in range(8):  # no step waits for the round, which cannot end
            state = shadow.exchange(step(state))
        assert shadow.rounds == 0 and weights(state).tolist() == [9.0, 11.0]
        assert shadow.average_sync_gap == float("inf")
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
    with Foreground(transport(), every_steps=3) as foreground:
        for number in range(1, 13):
            a, b = (step(state, 0.1 * number) for state in (a, b))
            a = foreground.exchange(a)
            if number % 3 == 0:
                with Shadow(Once(shared)) as shadow:
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
            with Shadow(transport, trainer) as shadow:
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
        with pytest.raises(RuntimeError, match="out of memory"), Shadow(transport, 1) as shadow:
            shadow.exchange(state_of(0.0))
            assert reached.wait(60)
            raise RuntimeError("out of memory")

    thread = threading.Thread(target=failing)
    thread.start()
    with (
        pytest.raises(Left, match="trainer 1 left after its round . with RuntimeError: out of memory"),
        Shadow(transport, 0) as shadow,
    ):
        state = shadow.exchange(state_of(1.0))
        reached.set()
        shadow.finish(step(state))
    thread.join(60)
    assert not thread.is_alive() and no_threads_left()


def test_what_a_round_raises_surfaces_at_the_next_exchange_and_on_leaving():
    gate = Gate(AllToAll(model_averaging(), PARAMS), error=ValueError("corrupt"))
    gate.open.set()
    with pytest.raises(ValueError, match="corrupt"), Shadow(gate) as shadow:
        state = shadow.exchange(state_of(1.0, 2.0))
        shadow._thread.join(60)
        shadow.exchange(state)
    gate = Gate(AllToAll(model_averaging(), PARAMS), error=ValueError("corrupt"))
    with pytest.raises(ValueError, match="corrupt"), Shadow(gate) as shadow:
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
    before = replica_spread(state.dense.params)
    with Shadow(AllToAll(rule, PARAMS)) as shadow:
        state = shadow.exchange(state)
        wait_for_round(shadow)
        state = shadow.exchange(state)
    assert weights(state).tolist() == [1.5, 2.5, 3.5, 4.5]
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(state.dense.params)} == {jaxrec.sharding.PER_REPLICA}
    np.testing.assert_allclose(replica_spread(state.dense.params), before / 2, rtol=1e-6)


def rounds_of(shadow, steps, state, number):
    """Lets rounds happen one by one: copy, round, fold; the states after each fold."""
    states = []
    for _ in range(number):
        steps.begin.release()
        wait_for_round(shadow)
        state = shadow.exchange(state)
        states.append(weights(state).copy())
        state = step(state)
    return state, states


def test_each_result_is_folded_in_once_and_a_copy_is_taken_after_the_fold():
    """One trainer of two replicas by differences: a round brings both to their mean, a second time would go beyond."""
    rule = model_averaging(1.0, "delta")
    steps = Steps(AllToAll(rule, PARAMS))
    with Shadow(steps) as shadow:
        state = shadow.exchange(state_of(0.0, 8.0))
        steps.begin.release()
        wait_for_round(shadow)
        state = shadow.exchange(step(state))
        assert weights(state).tolist() == [5.0, 5.0] and shadow.rounds == 1
        for number in range(3):  # the second round has not ended
            state = shadow.exchange(step(state))
            assert weights(state).tolist() == [6.0 + number] * 2 and shadow.rounds == 1
        steps.begin.release()
        wait_for_round(shadow)
        assert [brought[1][:, 0].tolist() for brought in steps.brought] == [[0.0, 8.0], [5.0, 5.0]]
        assert shadow.bytes == 2 * 2 * (3 + 2) * 4  # to and fro, replicas, floats: of the round that is folded in
        shadow.exchange(state)
        assert shadow.rounds == 2 and shadow.bytes == 2 * 2 * 2 * (3 + 2) * 4


def test_a_round_that_ends_during_finish_is_folded_in_before_the_last_one():
    rule = model_averaging(0.5, "lerp")

    class Late(Steps):
        def meet(self, trainer, before, done):
            until(lambda: shadow._done)  # no outside sign tells that `finish` has taken its copy
            return super().meet(trainer, before, done)

    steps = Late(AllToAll(rule, PARAMS))
    steps.begin.release(10)
    with Shadow(steps) as shadow:
        state = step(shadow.exchange(state_of(0.0, 8.0)))
        until(lambda: shadow._busy)
        state = shadow.finish(state)
    assert len(steps.brought) == 2  # 1, 9 -> half way to 4 -> half way to their mean, 4.5
    assert weights(state).tolist() == [3.5, 5.5]
    assert shadow.rounds == 1 and shadow.bytes == 2 * 2 * (3 + 2) * 4  # of both or of neither; not of the last one


def test_the_state_of_bmuf_goes_on_from_round_to_round():
    """Beside the equations by hand, from the initial parameters 0 on."""
    rule = bmuf(0.5, eta=0.8, momentum=0.5, form="lerp")
    steps = Steps(AllToAll(rule, PARAMS))
    with Shadow(steps) as shadow:
        state = shadow.exchange(state_of(4.0, 8.0))
        state, found = rounds_of(shadow, steps, state, 7)
        assert shadow.rounds == 7
    live, before, v, g = np.array([4.0, 8.0]), np.array([4.0, 8.0]), 0.0, 0.0
    for number in range(7):
        v = 0.5 * v + 0.8 * (before.mean() - g)
        g = g + v
        live = 0.5 * live + 0.5 * g
        np.testing.assert_allclose(found[number], live, rtol=1e-5)
        before, live = live, live + 1
        if number == 0:
            assert v == pytest.approx(4.8)


def test_the_fold_is_compiled_before_the_first_copy_is_handed_over():
    log, plain = [], model_averaging()

    def merge(live, before, target):
        log.append("compiled")
        return plain.merge(live, before, target)

    rule = plain._replace(merge=merge)

    class Logged(Steps):
        def meet(self, trainer, before, done):
            log.append("met")
            return super().meet(trainer, before, done)

    steps = Logged(AllToAll(rule, PARAMS))
    with Shadow(steps) as shadow:
        state = shadow.exchange(state_of(1.0, 3.0))
        steps.begin.release()
        wait_for_round(shadow)
        shadow.exchange(state)  # the result that is there is folded in at once
        assert shadow.rounds == 1 and log[:2] == ["compiled", "met"] and log.count("compiled") == 1


def test_a_pace_keeps_the_next_round_from_beginning_and_not_from_ending():
    """Beside a witness without a pace, which takes the same calls, so that no clock is read."""
    group, params = SyncGroup(easgd(), PARAMS, 2, pace_seconds=1e6), PARAMS
    with group.trainer(0) as paced, Shadow(group.transport, 1) as witness:
        while witness.rounds < 30 or not paced.rounds:
            for sync in (paced, witness):
                sync.exchange(params)
        assert paced.rounds == 1
        with ThreadPoolExecutor(2) as pool:  # neither waits for the pace
            list(pool.map(lambda sync: sync.finish(params), (paced, witness)))


def test_a_fold_and_finish_leave_optimizer_step_and_integers_alone():
    optimizer = optax.adam(0.1)
    params = {"w": jnp.ones((2, 3)), "n": jnp.array([1, 4], jnp.int32), "key": jax.random.split(jax.random.key(0), 2)}
    moments = optimizer.init({"w": params["w"]})
    moments = jax.tree.map(lambda x: x + 7, moments)
    state = TrainState(DenseState(jnp.int32(5), params, moments), "tables")
    params["w"] = params["w"].at[1].set(3.0)
    rule = model_averaging(1.0)
    initial = {"w": np.zeros(3, np.float32), "n": 0, "key": jax.random.key(1)}
    steps = Steps(AllToAll(rule, initial))
    with Shadow(steps) as shadow:
        found = shadow.exchange(state)
        steps.begin.release(10)
        wait_for_round(shadow)
        found = shadow.exchange(found)
        assert shadow.rounds == 1 and weights(found).tolist() == [2.0, 2.0]
        ended = shadow.finish(found)
    for after in (found, ended):
        assert after.dense.params["n"].tolist() == [1, 4] and after.dense.params["n"].dtype == jnp.int32
        assert after.dense.params["key"] is params["key"]
        jax.tree.map(np.testing.assert_array_equal, after.dense.opt_state, moments)
        assert int(after.dense.step) == 5 and after.tables == "tables"


def test_the_hook_returns_what_exchange_returns():
    rule = model_averaging(1.0)
    with Foreground(AllToAll(rule, PARAMS), every_steps=1) as foreground:
        found = foreground.hook(state_of(1.0, 5.0), 1, None, None)
    assert weights(found).tolist() == [3.0, 3.0] and foreground.rounds == 1


@pytest.mark.parametrize("rule", [model_averaging(1.0), bmuf(1.0), easgd(0.5)], ids=lambda rule: rule.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_dtypes_are_kept_and_sums_do_not_overflow(rule, dtype, kind):
    with jax.enable_x64(dtype == "float64"):
        high = jnp.asarray([[60000.0, 1.0], [60000.0, 2.0]], dtype)
        initial = {"w": np.asarray(high[0])}
        transport = Steps((Centre if rule.has_centre else AllToAll)(rule, initial))
        with kind(transport, **({"every_steps": 1} if kind is Foreground else {})) as synchroniser:
            transport.begin.release(10)
            state = synchroniser.exchange({"w": high})
            if kind is Shadow:
                wait_for_round(synchroniser)
                state = synchroniser.exchange(state)
            assert synchroniser.rounds == 1
            ended = synchroniser.finish(state)
    for found in (state["w"], ended["w"]):
        assert found.dtype == dtype and bool(jnp.isfinite(found).all())
        assert float(found[0, 0]) == float(high[0, 0])
    if not rule.has_centre:
        assert float(state["w"][0, 1]) == float(state["w"][1, 1]) == 1.5
        assert transport.brought[0][0].dtype == dtype  # no wider on the way


def test_small_differences_add_up_in_the_centre_of_bfloat16():
    """A centre of 256 in bfloat16 would not see 0.5; trainers bring it 40 times."""
    rule = easgd(0.01)
    centre = Centre(rule, {"w": jnp.full(2, 256.0, jnp.bfloat16)})
    with Foreground(centre, every_steps=1) as foreground:
        for _ in range(100):
            foreground.exchange({"w": jnp.full(2, 260.0, jnp.bfloat16)})
    assert centre.parameters["w"].dtype == jnp.bfloat16 and float(centre.parameters["w"][0]) == 258.0


def linen_of(value):
    from flax import linen

    model = linen.Dense(2)
    params = model.init(jax.random.key(0), jnp.ones((1, 3)))
    return jax.tree.map(lambda x: jnp.full_like(x, value), params), lambda params: params["params"]["kernel"]


def nnx_of(value):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.dropout = nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    graph, state = nnx.split(Model(nnx.Rngs(int(value))))  # holds a typed key and a counter
    state = jax.tree.map(lambda x: jnp.full_like(x, value) if x.dtype == jnp.float32 else x, state)
    return state, lambda state: nnx.merge(graph, state).linear.kernel[...]


@pytest.mark.parametrize("of", [linen_of, nnx_of])
@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_flax_states_are_synchronised_as_they_come(of, kind):
    """Two trainers, one thread each, of one replica without an axis."""
    rule, more = model_averaging(1.0), {"every_steps": 1} if kind is Foreground else {}
    transport, found = AllToAll(rule, of(0.0)[0], 2), {}

    def train(trainer):
        state, kernel = of(10.0 * trainer)
        with kind(transport, trainer, **more) as synchroniser:
            while synchroniser.rounds < 2:
                state = synchroniser.exchange(state)
            found[trainer] = kernel(state), kernel(synchroniser.finish(state)), state

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0, 1]
    for trainer in (0, 1):
        np.testing.assert_array_equal(found[trainer][1], np.full((3, 2), 5.0))
        assert jax.tree.structure(found[trainer][2]) == jax.tree.structure(of(0.0)[0])


def test_a_training_function_that_donates_reads_and_writes_nobody_elses_arrays():
    """Large aligned arrays, which a CPU device takes over without a copy."""
    rule, size, found = easgd(0.5), 1 << 16, {}
    initial = {"w": jnp.zeros(size)}
    centre = Centre(rule, initial, 3)
    train = jax.jit(lambda params: {"w": params["w"] + 1.0}, donate_argnums=0)

    def run(trainer):
        params = {"w": initial["w"] + 0.0}
        with Shadow(centre, trainer) as shadow:
            while shadow.rounds < 10:
                params = shadow.exchange(train(params))
                whole = np.asarray(params["w"])
                assert (whole == whole[0]).all()
            params = shadow.finish(params)
        ended = np.array(params["w"])
        for _ in range(20):
            params = train(params)
        found[trainer] = ended, float(params["w"][0])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0, 1, 2]
    for ended, later in found.values():
        np.testing.assert_array_equal(ended, centre.parameters["w"])
        assert later == pytest.approx(ended[0] + 20, rel=1e-5)


def test_the_results_of_a_round_lie_where_the_parameters_lie():
    device = jax.devices()[3]
    rule = model_averaging()
    params = jax.device_put({"w": jnp.ones(3), "b": jnp.ones(2)}, device)
    with Shadow(AllToAll(rule, PARAMS)) as shadow:
        params = shadow.exchange(params)
        wait_for_round(shadow)
        params = shadow.exchange(params)
        assert shadow.rounds == 1 and {leaf.device for leaf in jax.tree.leaves(params)} == {device}
        ended = shadow.finish(jax.device_put(params, jax.devices()[2]))  # and where they are by then
    assert {leaf.device for leaf in jax.tree.leaves(ended)} == {jax.devices()[2]}


class Stuck:
    """A transport whose `meet` returns when the test lets it, whoever leaves."""

    def __init__(self, transport):
        self.transport, self.entered, self.returns, self.met = transport, threading.Event(), threading.Event(), 0

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def meet(self, trainer, before, done):
        self.met += 1
        self.entered.set()
        assert self.returns.wait(60)
        return [np.asarray(leaf) for leaf in before], False

    def end(self):
        """Its threads end, and have done nothing more."""
        self.returns.set()
        for thread in threading.enumerate():
            if thread.name.startswith("shadow-"):
                thread.join(60)
        assert no_threads_left() and self.met == 1


def test_a_meet_that_never_returns_does_not_hold_up_who_leaves():
    rule = model_averaging()
    stuck = Stuck(AllToAll(rule, PARAMS, timeout_s=0.2))
    with pytest.raises(TimeoutError, match=r"trainer 0: `meet` of Stuck .* timeout_s=0\.2; its thread is left behind"):
        with Shadow(stuck) as shadow:
            shadow.exchange(state_of(1.0))
            assert stuck.entered.wait(60)
    stuck.end()
    stuck = Stuck(AllToAll(rule, PARAMS, timeout_s=0.2))
    with pytest.raises(OSError, match="its own") as caught, Shadow(stuck) as shadow:
        shadow.exchange(state_of(1.0))
        assert stuck.entered.wait(60)
        raise OSError("its own")
    assert "left behind" in caught.value.__notes__[0]
    stuck.end()


def test_a_meet_that_never_returns_does_not_hold_up_finish():
    rule = model_averaging()
    stuck = Stuck(AllToAll(rule, PARAMS, timeout_s=0.2))
    with pytest.raises(TimeoutError, match="has not returned for 0.6 s"), Shadow(stuck) as shadow:
        shadow.finish(state_of(1.0))
    stuck.end()


@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_every_wrong_order_of_calls_is_refused_by_name(kind):
    rule = model_averaging()
    make = lambda: kind(AllToAll(rule, PARAMS), **({"every_steps": 1} if kind is Foreground else {}))
    state = state_of(1.0)
    calls = [lambda s: s.exchange(state), lambda s: s.hook(state, 1, None, None), lambda s: s.finish(state)]
    for call in calls:
        with pytest.raises(ValueError, match="inside of the `with` block"):
            call(make())
        with make() as synchroniser:
            synchroniser.finish(state)
            with pytest.raises(ValueError, match="comes too late: .* has finished"):
                call(synchroniser)
        with pytest.raises(ValueError, match="has left"):
            call(synchroniser)
    with pytest.raises(ValueError, match="has been entered before"):
        synchroniser.__enter__()
    assert no_threads_left()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllToAll(easgd(), PARAMS), "without a centre"),
        (lambda: AllToAll(model_averaging(), PARAMS, 0), "trainers=0"),
        (lambda: AllToAll(model_averaging(), 3), "SyncGroup.rule, params, trainers=3"),
        (lambda: Centre(bmuf(), PARAMS), "with a centre"),
        (lambda: Centre(easgd(), PARAMS, servers=0), "servers=0"),
        (lambda: Centre(easgd(), PARAMS, bytes_per_s=0), "bytes_per_s=0"),
        (lambda: Foreground(None, every_steps=0), "every_steps=0"),
        (lambda: Foreground(None), "one of them"),
        (lambda: Shadow(None, pace_seconds=-1), "pace_seconds=-1"),
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
    with Foreground(AllToAll(rule, {"w": np.ones(4)}), every_steps=1) as foreground:
        each, rows = trained(4, foreground)
    whole, wanted = trained(1, None)
    np.testing.assert_allclose(each, np.broadcast_to(whole, (4, 4)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(rows, wanted, rtol=1e-6, atol=1e-6)
    alone, _ = trained(4, None)  # negative control
    assert np.abs(alone - whole).max() > 1e-3


@pytest.mark.parametrize("form", [dict, collections.OrderedDict])
def test_a_round_that_ends_in_the_middle_of_an_exchange_keeps_its_result(form):
    """It ends when the exchange has looked for a result and not yet whether the thread is free; EASGD keeps the sum."""
    rule = easgd(0.5)
    steps = Steps(Centre(rule, {"w": np.zeros(3, np.float32)}))
    armed = []

    class Lets(threading.Condition):
        """Lets the round end just when the trainer has let go of the lock."""

        def __exit__(self, *given):
            super().__exit__(*given)
            if armed and threading.current_thread() is threading.main_thread():
                armed.clear()
                steps.begin.release()
                until(lambda: not shadow._busy)

    shadow = Shadow(steps)
    shadow._changed = Lets()
    with shadow:
        params = shadow.exchange({"w": jnp.full(3, 8.0)})
        until(lambda: shadow._busy)
        armed.append(True)
        params = shadow.exchange(form(params))
        if armed or shadow._handed is not None or shadow._busy:  # a round that has not ended yet
            armed.clear()
            steps.begin.release()
        until(lambda: not shadow._busy and shadow._handed is None)
        params = shadow.exchange(params)
        assert shadow.rounds == len(steps.brought) > 0
        assert float(params["w"][0] + steps.parameters["w"][0]) == 8.0


def aligned(shape):
    """An array of NumPy that JAX would take over on a CPU without a copy."""
    whole = np.zeros(4 * int(np.prod(shape)) + 64, np.uint8)
    begin = -whole.ctypes.data % 64
    return whole[begin : begin + 4 * int(np.prod(shape))].view(np.float32).reshape(shape)


def test_numpy_parameters_may_be_changed_in_place_while_a_round_is_made():
    mine, seen = {"w": aligned((100,))}, []

    class Changed(AllToAll):
        def meet(self, trainer, before, done):
            mine["w"] += 1
            seen.append(float(before[0].max()))
            return super().meet(trainer, before, done)

    rule = model_averaging()
    with Foreground(Changed(rule, {"w": np.zeros(100, np.float32)}), every_steps=1) as foreground:
        assert isinstance(foreground.exchange(mine)["w"], jax.Array)
    assert seen == [0.0]


def test_seconds_count_from_entering(monkeypatch):
    now = [100.0]
    rule = model_averaging()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    foreground = Foreground(AllToAll(rule, PARAMS), every_seconds=5.0)
    now[0] = 200.0  # compiling, say
    with foreground:
        foreground.exchange(PARAMS)
        assert foreground.rounds == 0
        now[0] = 205.0
        foreground.exchange(PARAMS)
        assert foreground.rounds == 1


class Interrupting(threading.Condition):
    """Ctrl-C comes as soon as the main thread has taken the lock for the n-th time."""

    def __init__(self, countdown):
        super().__init__()
        self.countdown = countdown

    def __enter__(self):
        found = super().__enter__()
        if threading.current_thread() is threading.main_thread():
            self.countdown -= 1
            if self.countdown == 0:
                signal.raise_signal(signal.SIGINT)
        return found

    def is_free(self):
        free = []

        def try_it():
            if taken := self.acquire(timeout=5):
                self.release()
            free.append(taken)

        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join(20)
        return free == [True]


@pytest.mark.parametrize(
    ("whose", "countdown"), [("shadow", 1), ("shadow", 2), ("shadow", 3), ("transport", 1), ("transport", 2)]
)
def test_ctrl_c_leaves_no_lock_held_and_no_thread(whose, countdown):
    rule = model_averaging()
    transport = AllToAll(rule, PARAMS)
    changed = Interrupting(countdown)
    with pytest.raises(KeyboardInterrupt):
        shadow = Shadow(transport)
        (shadow if whose == "shadow" else transport)._changed = changed
        with shadow:
            state = shadow.exchange(state_of(1.0))
            shadow.finish(state)
    assert changed.countdown <= 0 and changed.is_free()
    until(no_threads_left)


def test_ctrl_c_while_entering_ends_the_thread():
    rule = model_averaging()
    transport = AllToAll(rule, PARAMS, 2)

    class Asked(AllToAll):
        def join(self, trainer):
            transport.join(trainer)
            signal.raise_signal(signal.SIGINT)

        def leave(self, trainer, error=None):
            transport.leave(trainer, error)

    with pytest.raises(KeyboardInterrupt), Shadow(Asked(rule, PARAMS)):
        raise AssertionError("it was entered")
    until(no_threads_left)
    with pytest.raises(Left, match="trainer 0 left after its round 0 with KeyboardInterrupt"):
        transport.join(1)
