"""The shadow thread: training never waits for it, and no update is lost that the rule keeps."""

import collections
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meetings import (
    PARAMS,
    Ends,
    Gate,
    Once,
    Steps,
    folded,
    in_threads,
    state_of,
    step,
    weights,
)
from world import at_line, is_inside, no_threads_left, until, workers

import jaxrec
from jaxrec.interrupts import wait
from jaxrec.shadowsync import (
    AllToAll,
    Centre,
    Foreground,
    Shadow,
    SyncGroup,
    bmuf,
    easgd,
    model_averaging,
    replica_spread,
    with_mean_replica,
)


@pytest.mark.parametrize(
    ("rule", "kept"),
    [(model_averaging(0.5, "lerp"), 0.5), (model_averaging(0.5, "delta"), 1.0), (bmuf(1.0, form="lerp"), 0.0)],
)
def test_training_goes_on_while_a_round_is_blocked_and_keeps_what_the_rule_keeps(rule, kept):
    gate = Gate(AllToAll(rule, PARAMS))
    alpha = 1.0 if rule.name == "bmuf" else 0.5
    with Shadow(gate) as shadow:
        state = shadow.exchange(state_of(1.0, 3.0))  # copied: 1 and 3, with mean 2
        assert gate.entered.wait(60)
        for _ in range(8):  # no step waits for the round, which cannot end
            state = shadow.exchange(step(state))
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
