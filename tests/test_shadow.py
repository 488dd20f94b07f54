"""The shadow and the foreground: training never waits for a shadow, and no update is lost that the rule keeps.

Calls in a wrong order are refused, and however a trainer leaves, nothing hangs.
"""

import collections
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from threads import at_line, in_threads, is_inside, join_all, no_threads_left, until, workers
from transports import (
    PARAMS,
    Ends,
    Gate,
    Once,
    Steps,
    Stuck,
    folded,
    state_of,
    step,
    weights,
)

import jaxrec
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, sgd
from jaxrec.interrupts import wait
from jaxrec.shadowsync import (
    AllToAll,
    Centre,
    Foreground,
    PeerLeft,
    Shadow,
    SyncGroup,
    bmuf,
    easgd,
    model_averaging,
    replica_spread,
    with_mean_replica,
)
from jaxrec.types import DenseState, TrainState


@pytest.mark.parametrize(
    ("rule", "kept"),
    [(model_averaging(0.5, "lerp"), 0.5), (model_averaging(0.5, "delta"), 1.0), (bmuf(1.0, form="lerp"), 0.0)],
)
def test_training_goes_on_while_a_round_is_blocked_and_keeps_what_the_rule_keeps(rule, kept):
    gate, beats = Gate(AllToAll(rule, PARAMS)), []
    gate.heartbeat = beats.append
    alpha = 1.0 if rule.name == "bmuf" else 0.5
    with Shadow(gate) as shadow:
        state = shadow.exchange(state_of(1.0, 3.0))  # copied: 1 and 3, with mean 2
        assert gate.entered.wait(60)
        for _ in range(8):  # no step waits for the round, which cannot end
            state = shadow.exchange(step(state))
        assert beats == [0] * 9  # each step is a sign of life: others must not take this trainer for dead
        assert shadow.rounds == 0 and weights(state).tolist() == [9.0, 11.0]
        assert shadow.average_sync_gap == float("inf")
        gate.open.set()
        state = folded(shadow, state)
        np.testing.assert_allclose(weights(state), [2 + kept * 8 - (1 - alpha), 2 + kept * 8 + (1 - alpha)], rtol=1e-6)
        assert shadow.rounds == 1 and shadow.average_sync_gap == shadow.steps >= 10
    assert no_threads_left()


@pytest.mark.parametrize("rule", [easgd(0.3), easgd(0.3, "sequential"), model_averaging(0.7), bmuf(0.6, 0.9, 0.5)])
def test_a_round_without_latency_is_the_foreground_round_to_the_bit(rule):
    """A shadow round every 3 steps whose result is folded in before the next step equals a foreground round."""

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
                    b = folded(shadow, b)
                    rounds += shadow.rounds
            jax.tree.map(np.testing.assert_array_equal, a.dense.params, b.dense.params)
        assert foreground.rounds == rounds == 4 and foreground.average_sync_gap == 3


def test_free_running_easgd_keeps_the_sum():
    initial = {"w": np.full(3, 9.0, np.float32), "b": np.zeros(2, np.float32)}
    centre = Ends(Centre(easgd(0.4), initial, 4))

    def train(trainer, steps):
        state = state_of(float(trainer))
        with Shadow(centre, trainer) as shadow:
            for _ in range(steps):
                state = shadow.exchange(step(state, 0.0))
            return shadow.finish(state)

    states = in_threads(*[lambda item=item: train(*item) for item in enumerate([50, 5, 120, 70])])
    for state in states:
        np.testing.assert_array_equal(state.dense.params["w"][0], centre.parameters["w"])
    total = sum(centre.ends.values()) + centre.parameters["w"][0]
    np.testing.assert_allclose(total, 0 + 1 + 2 + 3 + 9, rtol=1e-5)
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
        state = folded(shadow, state)
    assert weights(state).tolist() == [1.5, 2.5, 3.5, 4.5]
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(state.dense.params)} == {jaxrec.sharding.PER_REPLICA}
    np.testing.assert_allclose(replica_spread(state.dense.params), before / 2, rtol=1e-6)


def test_the_model_of_a_run_is_the_mean_of_its_replicas():
    """On any devices; the state itself and leaves that are not floats stay unchanged."""
    mesh = jaxrec.make_mesh(replicas=2, devices=jax.devices()[:2])
    place = lambda leaf: jaxrec.sharding.put_on_mesh(leaf, mesh, jaxrec.sharding.PER_REPLICA)
    params = {"w": np.array([[1.0, 2.0], [3.0, 8.0]], jnp.bfloat16), "count": np.array([[3], [5]])}
    state = state_of(0.0, 0.0)
    state = state._replace(dense=state.dense._replace(params=jax.tree.map(place, params)))
    mean = with_mean_replica(state).dense.params
    assert np.asarray(mean["w"]).tolist() == [[2.0, 5.0]] * 2 and np.asarray(mean["count"]).tolist() == [[3], [5]]
    assert {name: (leaf.dtype, leaf.sharding) for name, leaf in mean.items()} == {
        name: (leaf.dtype, leaf.sharding) for name, leaf in state.dense.params.items()
    }
    assert np.asarray(state.dense.params["w"]).tolist() == params["w"].tolist()


def test_each_result_is_folded_in_once_and_a_copy_is_taken_after_the_fold():
    """Model averaging of two replicas by differences: a round moves both to the mean; folding twice would overshoot."""
    rule = model_averaging(1.0, "delta")
    steps = Steps(AllToAll(rule, PARAMS))
    with Shadow(steps) as shadow:
        state = shadow.exchange(state_of(0.0, 8.0))
        steps.begin.release()
        state = folded(shadow, step(state))
        assert weights(state).tolist() == [5.0, 5.0] and shadow.rounds == 1
        for number in range(3):  # the second round has not ended
            state = shadow.exchange(step(state))
            assert weights(state).tolist() == [6.0 + number] * 2 and shadow.rounds == 1
        steps.begin.release()
        until(lambda: len(steps.brought) == 2)
        assert [brought[1][:, 0].tolist() for brought in steps.brought] == [[0.0, 8.0], [5.0, 5.0]]
        folded(shadow, state)
        assert shadow.rounds == 2


@pytest.mark.parametrize("ended", [False, True], ids=["the round is in flight", "its result waits"])
def test_what_a_round_gives_for_a_state_that_was_replaced_is_dropped(ended):
    rule = model_averaging(1.0, "delta")
    steps = Steps(AllToAll(rule, PARAMS))
    with Shadow(steps) as shadow:
        shadow.exchange(state_of(0.0, 8.0))
        assert steps.entered.wait(60)  # before that, a state that is replaced begins no round
        if ended:
            steps.begin.release()
            until(lambda: steps.brought)
            time.sleep(0.1)  # probably enough for the result
        other = state_of(100.0, 102.0)
        shadow.restarted(other)
        if not ended:
            steps.begin.release()
        for _ in range(2):
            until(lambda: steps.brought)
            time.sleep(0.1)
            other = shadow.exchange(other)
            assert weights(other).tolist() == [100.0, 102.0] and shadow.rounds == 0
        steps.begin.release()
        assert weights(folded(shadow, other)).tolist() == [101.0, 101.0]


def test_a_round_that_ends_during_finish_is_folded_in_before_the_last_one():
    rule, entered = model_averaging(0.5, "lerp"), threading.Event()

    class Late(Steps):
        def sync_round(self, trainer, before, done):
            entered.set()
            if not done:
                until(lambda: is_inside(wait))  # `finish` waits for the round to end
            return super().sync_round(trainer, before, done)

    steps = Late(AllToAll(rule, PARAMS))
    steps.begin.release(10)
    with Shadow(steps) as shadow:
        state = step(shadow.exchange(state_of(0.0, 8.0)))
        assert entered.wait(60)
        state = shadow.finish(state)
    assert len(steps.brought) == 2  # 1, 9 -> half way to 4 -> half way to their mean, 4.5
    assert weights(state).tolist() == [3.5, 5.5]
    assert shadow.rounds == 1  # the last round is not counted


def test_the_fold_is_compiled_before_the_first_copy_is_handed_over():
    log, plain = [], model_averaging()

    def merge(live, before, target):
        log.append("compiled")
        return plain.merge(live, before, target)

    rule = plain._replace(merge=merge)

    class Logged(Steps):
        def sync_round(self, trainer, before, done):
            log.append("met")
            return super().sync_round(trainer, before, done)

    steps = Logged(AllToAll(rule, PARAMS))
    with Shadow(steps) as shadow:
        state = shadow.exchange(state_of(1.0, 3.0))
        steps.begin.release()
        folded(shadow, state)
        assert shadow.rounds == 1 and log[:2] == ["compiled", "met"] and log.count("compiled") == 1


def test_a_pace_keeps_the_next_round_from_beginning_and_not_from_ending():
    """Compared with a trainer without a pace that takes the same calls, so that no clock is read."""
    group, params = SyncGroup(easgd(), PARAMS, 2, pace_seconds=1e6), PARAMS
    with group.trainer(0) as paced, Shadow(group.transport, 1) as witness:
        while witness.rounds < 30 or not paced.rounds:
            for sync in (paced, witness):
                sync.exchange(params)
        assert paced.rounds == 1
        with ThreadPoolExecutor(2) as pool:  # neither waits for the pace
            list(pool.map(lambda sync: sync.finish(params), (paced, witness)))


def test_a_share_of_a_core_is_all_that_the_thread_takes():
    plain, work_seconds, share = easgd(), 0.02, 0.1

    def combine(centre, before):
        until = time.thread_time() + work_seconds
        while time.thread_time() < until:
            pass
        return plain.combine(centre, before)

    group, params = SyncGroup(plain._replace(combine=combine), PARAMS, 1, core_share=share), PARAMS
    begun = time.monotonic()
    with group.trainer(0) as sync:
        for _ in range(4):
            params = folded(sync, params)
        of_a_round = work_seconds / share
        assert 3 * of_a_round < time.monotonic() - begun
        sync.finish(params)  # does not wait for the pause to end


def exchanged_while_a_round_ends(form, number):
    """End a round before the number-th line of an exchange; return whether the exchange has that line."""
    steps, at_rest = Steps(Centre(easgd(0.5), {"w": np.zeros(3, np.float32)})), threading.Condition.wait_for
    with Shadow(steps) as shadow:
        (thread,) = workers("shadow-")
        params = shadow.exchange({"w": jnp.full(3, 8.0)})
        until(lambda: is_inside(steps.sync_round, thread))

        def end_round(number):
            """End a round, unless the exchange holds the lock or the round has not begun."""
            steps.begin.release()
            end, ended = time.monotonic() + 0.05, lambda: len(steps.brought) == number and is_inside(at_rest, thread)
            until(lambda: ended() or time.monotonic() > end)

        with at_line(Shadow.exchange, number, lambda: end_round(1)) as reached:
            params = shadow.exchange(form(params))
        for round_ in (2,) if reached else (1, 2):
            end_round(round_)  # a second round begun by this exchange must not overwrite the first result
        while shadow.rounds < 2:
            params = folded(shadow, params)
        assert len(steps.brought) == 2 and float(params["w"][0] + steps.parameters["w"][0]) == 8.0
    return bool(reached)


@pytest.mark.parametrize(("form", "lines"), [(dict, 5), (collections.OrderedDict, 11)])  # dicts have a fast path
def test_a_round_that_ends_in_the_middle_of_an_exchange_keeps_its_result(form, lines):
    """At any line: no result is folded in twice or overwritten by the next one; EASGD keeps the sum."""
    number = 0
    while exchanged_while_a_round_ends(form, number):
        number += 1
    assert number >= lines


# ---- what shadow and foreground share


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
        found = folded(shadow, found)
        assert shadow.rounds == 1 and weights(found).tolist() == [2.0, 2.0]
        ended = shadow.finish(found)
    for after in (found, ended):
        assert after.dense.params["n"].tolist() == [1, 4] and after.dense.params["n"].dtype == jnp.int32
        assert after.dense.params["key"] is params["key"]
        jax.tree.map(np.testing.assert_array_equal, after.dense.opt_state, moments)
        assert int(after.dense.step) == 5 and after.tables == "tables"


DTYPES = ["bfloat16", "float16", "float32", "float64"]


@pytest.mark.parametrize("rule", [model_averaging(1.0), bmuf(1.0), easgd(0.5)], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((Foreground, dtype) for dtype in DTYPES),
        (Shadow, "bfloat16"),
        *(pytest.param(Shadow, dtype, marks=pytest.mark.more) for dtype in DTYPES[1:]),
    ],
)
def test_dtypes_are_kept_and_sums_do_not_overflow(rule, dtype, kind):
    with jax.enable_x64(dtype == "float64"):
        high = jnp.asarray([[60000.0, 1.0], [60000.0, 2.0]], dtype)
        initial = {"w": np.asarray(high[0])}
        transport = Steps((Centre if rule.has_centre else AllToAll)(rule, initial))
        with kind(transport, **({"every_steps": 1} if kind is Foreground else {})) as synchroniser:
            transport.begin.release(10)
            state = synchroniser.exchange({"w": high})
            if kind is Shadow:
                state = folded(synchroniser, state)
            assert synchroniser.rounds == 1
            ended = synchroniser.finish(state)
    for found in (state["w"], ended["w"]):
        assert found.dtype == dtype and bool(jnp.isfinite(found).all())
        assert float(found[0, 0]) == float(high[0, 0])
    if not rule.has_centre:
        assert float(state["w"][0, 1]) == float(state["w"][1, 1]) == 1.5
        assert transport.brought[0][0].dtype == dtype  # not widened in transit


def test_small_differences_add_up_in_the_centre_of_bfloat16():
    """A centre of 256 in bfloat16 would lose each move of at most 0.04; their sum must arrive."""
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


@pytest.mark.parametrize(("of", "kind"), [(linen_of, Foreground), (nnx_of, Shadow)])
def test_flax_states_are_synchronised_as_they_come(of, kind):
    """Two trainers, one thread each, of one replica without a replica axis."""
    rule, more = model_averaging(1.0), {"every_steps": 1} if kind is Foreground else {}
    transport = AllToAll(rule, of(0.0)[0], 2)

    def train(trainer):
        state, kernel = of(10.0 * trainer)
        with kind(transport, trainer, **more) as synchroniser:
            while synchroniser.rounds < 2:
                state = synchroniser.exchange(state)
            return kernel(synchroniser.finish(state)), state

    for ended, state in in_threads(lambda: train(0), lambda: train(1)):
        np.testing.assert_array_equal(ended, np.full((3, 2), 5.0))
        assert jax.tree.structure(state) == jax.tree.structure(of(0.0)[0])


def test_a_training_function_that_donates_reads_and_writes_nobody_elses_arrays():
    """Large aligned arrays, which a CPU device adopts without a copy."""
    rule, size = easgd(0.5), 1 << 16
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
        return ended, float(params["w"][0])

    for ended, later in in_threads(*[lambda i=i: run(i) for i in range(3)]):
        np.testing.assert_array_equal(ended, centre.parameters["w"])
        assert later == pytest.approx(ended[0] + 20, rel=1e-5)


def test_the_results_of_a_round_lie_where_the_parameters_lie():
    device = jax.devices()[3]
    rule = model_averaging()
    params = jax.device_put({"w": jnp.ones(3), "b": jnp.ones(2)}, device)
    with Shadow(AllToAll(rule, PARAMS)) as shadow:
        params = shadow.exchange(params)
        params = folded(shadow, params)
        assert shadow.rounds == 1 and {leaf.device for leaf in jax.tree.leaves(params)} == {device}
        ended = shadow.finish(jax.device_put(params, jax.devices()[2]))  # and on their current device
    assert {leaf.device for leaf in jax.tree.leaves(ended)} == {jax.devices()[2]}


@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_every_wrong_order_of_calls_is_refused_by_name(kind):
    rule = model_averaging()
    make = lambda: kind(AllToAll(rule, PARAMS), **({"every_steps": 1} if kind is Foreground else {}))
    state = state_of(1.0)
    info = jaxrec.StepInfo(state, 1, {}, {})
    calls = [lambda s: s.exchange(state), lambda s: s.after_step(info), lambda s: s.finish(state)]
    for call in calls:
        with pytest.raises(ValueError, match="inside of the `with` block"):
            call(make())
        with make() as synchroniser:
            synchroniser.finish(state)
            with pytest.raises(ValueError, match="before `finish`: .* has called `finish`"):
                call(synchroniser)
        with pytest.raises(ValueError, match="has left"):
            call(synchroniser)
    with pytest.raises(ValueError, match="has been entered before"):
        synchroniser.__enter__()
    assert no_threads_left()


def test_averaging_after_every_step_of_sgd_is_training_on_the_large_batch():
    """FR-MA-1, lock-step: four replicas of one batch each equal one of all four, to 1e-6; row gradients are summed."""
    spec = EmbeddingSpec({"item": Table(40, 4)}, {"item": Lookup("item")})
    loss = lambda params, act, batch: optax.sigmoid_binary_cross_entropy(act["item"] @ params["w"], batch.label)
    rng = np.random.default_rng(0)
    batches = [jaxrec.Batch({"item": rng.integers(0, 40, 32).astype(np.int32)}, rng.random(32)) for _ in range(20)]

    def trained(replicas, synchroniser):
        mesh = jaxrec.make_mesh(replicas, jax.devices()[:4])
        task = jaxrec.Task(spec, loss, optax.sgd(0.5), sgd(0.5 / replicas), mesh)
        state = task.init({"w": jnp.ones(4)})
        for batch in batches:
            state, _ = task.step(state, batch)
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


def aligned(shape):
    """A NumPy array that JAX would adopt on a CPU without a copy."""
    whole = np.zeros(4 * int(np.prod(shape)) + 64, np.uint8)
    begin = -whole.ctypes.data % 64
    return whole[begin : begin + 4 * int(np.prod(shape))].view(np.float32).reshape(shape)


def test_numpy_parameters_may_be_changed_in_place_while_a_round_is_made():
    mine, seen = {"w": aligned((100,))}, []

    class Changed(AllToAll):
        def sync_round(self, trainer, before, done):
            mine["w"] += 1
            seen.append(float(before[0].max()))
            return super().sync_round(trainer, before, done)

    rule = model_averaging()
    with Foreground(Changed(rule, {"w": np.zeros(100, np.float32)}), every_steps=1) as foreground:
        assert isinstance(foreground.exchange(mine)["w"], jax.Array)
    assert seen == [0.0]


# ---- however a trainer leaves


def test_what_a_round_raises_surfaces_at_the_next_exchange_and_on_leaving():
    gate = Gate(AllToAll(model_averaging(), PARAMS), error=ValueError("corrupt"))
    gate.open.set()
    with pytest.raises(ValueError, match="corrupt"), Shadow(gate) as shadow:
        state = shadow.exchange(state_of(1.0, 2.0))
        until(no_threads_left)
        shadow.exchange(state)
    gate = Gate(AllToAll(model_averaging(), PARAMS), error=ValueError("corrupt"))
    with pytest.raises(ValueError, match="corrupt"), Shadow(gate) as shadow:
        shadow.exchange(state_of(1.0, 2.0))
        assert gate.entered.wait(60)
        gate.open.set()
    assert no_threads_left()


def test_a_meet_that_never_returns_does_not_hold_up_who_leaves():
    rule = model_averaging()
    stuck = Stuck(AllToAll(rule, PARAMS, timeout_s=0.2))
    with pytest.raises(
        TimeoutError, match=r"trainer 0: `sync_round` of Stuck .* timeout_s=0\.2, and the thread is left"
    ):
        with Shadow(stuck) as shadow:
            shadow.exchange(state_of(1.0))
            assert stuck.entered.wait(60)
    stuck.end()
    stuck = Stuck(AllToAll(rule, PARAMS, timeout_s=0.2))
    with pytest.raises(OSError, match="its own") as caught, Shadow(stuck) as shadow:
        shadow.exchange(state_of(1.0))
        assert stuck.entered.wait(60)
        raise OSError("its own")
    assert "the thread is left there" in caught.value.__notes__[0]
    stuck.end()


class Interrupting(threading.Condition):
    """A condition that raises SIGINT once the main thread has taken its lock for the n-th time."""

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
            if taken := self.acquire(timeout=30):
                self.release()
            free.append(taken)

        thread = threading.Thread(target=try_it)
        thread.start()
        join_all([thread])
        return free == [True]


@pytest.mark.parametrize(
    ("whose", "countdown"), [("shadow", 1), ("shadow", 2), ("shadow", 3), ("transport", 1), ("transport", 2)]
)
def test_ctrl_c_leaves_no_lock_held_and_no_thread(monkeypatch, whose, countdown):
    changed, plain = Interrupting(countdown), threading.Condition

    def made(of, make):
        """Call `make` with the interrupting condition if `of` is the subject; an `Event` keeps the lock it passes."""
        with monkeypatch.context() as patch:
            patch.setattr(threading, "Condition", lambda lock=None: plain(lock) if lock or whose != of else changed)
            return make()

    transport = made("transport", lambda: AllToAll(model_averaging(), PARAMS))
    with pytest.raises(KeyboardInterrupt):
        with made("shadow", lambda: Shadow(transport)) as shadow:
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
    with pytest.raises(PeerLeft, match="trainer 0 left after its round 0 with KeyboardInterrupt"):
        transport.join(1)
