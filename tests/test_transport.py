"""All-reduce rounds and the centre: parameters of trainers are combined as a whole, and by the rule."""

import threading
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meetings import Around, in_threads, joined, of, waits
from world import is_inside, until

from jaxrec.shadowsync import Foreground, PeerLeft, Shadow
from jaxrec.shadowsync.rules import Rule, easgd, model_averaging
from jaxrec.shadowsync.transport import AllToAll, Centre, pack, queued

PARAMS = {"w": np.zeros(3, np.float32)}
MEAN = model_averaging(1.0)


def test_trainers_of_different_precision_are_averaged_in_float32():
    transport = joined(AllToAll(MEAN, PARAMS, 2), 0, 1)
    low = {"w": np.asarray(jnp.full((1, 3), 256.0, jnp.bfloat16))}
    for target, _ in in_threads(
        lambda: transport.sync_round(0, low, False), lambda: transport.sync_round(1, of(257.0), False)
    ):
        assert target["w"].dtype == np.float32 and target["w"][0, 0] == 256.5


def test_a_mean_is_over_all_replicas_of_all_trainers():
    transport = joined(AllToAll(MEAN, PARAMS, 2), 0, 1)
    meets = (lambda: transport.sync_round(0, of(0.0, 0.0, 0.0), False), lambda: transport.sync_round(1, of(4.0), False))
    for (target, _), replicas in zip(in_threads(*meets), (3, 1), strict=True):
        np.testing.assert_array_equal(target["w"], np.ones((replicas, 3)))


@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_with_a_centre_an_early_trainer_gets_the_last_model(kind):
    rule, more = easgd(0.5), {"every_steps": 1} if kind is Foreground else {}
    centre, early_waits = Centre(rule, PARAMS, 2), threading.Event()

    class Told(Around):
        """Sets early_waits when trainer 0 begins to wait at its end."""

        def sync_round(self, trainer, before, done):
            if done and trainer == 0:
                early_waits.set()
            return centre.sync_round(trainer, before, done)

    def train(trainer):
        with kind(Told(centre), trainer, **more) as synchroniser:
            state = {"w": jnp.full((1 + trainer, 3), 1000.0 * trainer)}
            if trainer:
                assert early_waits.wait(60)
                while synchroniser.rounds < 20:
                    synchroniser.exchange(state)
            return synchroniser.finish(state)

    early, late = in_threads(lambda: train(0), lambda: train(1))
    np.testing.assert_array_equal(early["w"], centre.parameters["w"][None])
    np.testing.assert_array_equal(late["w"], np.stack([centre.parameters["w"]] * 2))
    assert centre.parameters["w"][0] > 900


def test_what_does_not_fit_is_seen_without_a_copy_of_the_centre():
    big = {"w": np.zeros(5_000_000, np.float32)}
    centre = joined(Centre(easgd(), big), 0)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"\['w'\]: it has \(1, 4\), wanted \(1, 5000000\)"):
            centre.sync_round(0, {"w": np.zeros((1, 4), np.float32)}, False)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_two_trainers_at_one_server_take_turns():
    """Both read and write the centre: the second may not begin before the first is done."""
    threads, first, second = [], [], threading.Event()
    both_meet = lambda: [is_inside(Centre.sync_round, thread) for thread in threads] == [True, True]

    def act(brought):
        if first:
            second.set()
            return
        first.append(brought)
        until(lambda: second.is_set() or both_meet())
        second.wait(0.3)  # without turns the other arrives at once

    def sync_round(trainer):
        threads.append(threading.current_thread())
        centre.sync_round(trainer, of(1.0 + trainer), False)

    centre = joined(Centre(summing(act), PARAMS, 2), 0, 1)
    in_threads(lambda: sync_round(0), lambda: sync_round(1))
    np.testing.assert_array_equal(centre.parameters["w"], [3.0, 3.0, 3.0])


def test_servers_share_the_tensors_and_their_bandwidth():
    assert sorted(pack([8, 1, 7, 2, 6], 2)) == [0, 0, 0, 1, 1]
    assert queued([0.0, 0.0], [800, 800], 1600.0, now=0.0) == [0.5, 0.5]
    assert queued(queued([0.0], [1600], 1600.0, now=0.0), [1600], 1600.0, now=0.0) == [2.0]
    tree = {"a": np.zeros((1, 100), np.float32), "b": np.zeros((1, 100), np.float32)}

    def seconds(servers):
        """Time for two trainers at once, which queue at each server; a tensor takes 0.1 s both ways."""
        initial = jax.tree.map(lambda x: x[0], tree)
        centre = joined(Centre(easgd(), initial, 2, servers=servers, bytes_per_s=8000.0), 0, 1)
        start = time.monotonic()
        in_threads(*[lambda i=i: centre.sync_round(i, tree, False) for i in range(2)])
        return time.monotonic() - start

    assert seconds(servers=1) >= 0.4 and seconds(servers=2) >= 0.2


def summing(act):
    """A rule whose centre sums the parameters it gets, after a call of `act` on them."""

    def combine(centre, brought):
        act(brought)
        return centre + brought, centre

    return Rule("sum", True, np.array, combine, lambda live, before, target: live)


def test_a_combine_that_raises_between_two_leaves_leaves_the_centre_as_it_was():
    def act(brought):
        if brought.max() == 5:
            raise MemoryError("no room")

    centre = joined(Centre(summing(act), {"a": np.zeros(1), "b": np.zeros(1)}, servers=2), 0)
    with pytest.raises(MemoryError, match="no room"):
        centre.sync_round(0, {"a": np.full((1, 1), 1.0), "b": np.full((1, 1), 5.0)}, False)
    assert centre.parameters["a"][0] == centre.parameters["b"][0] == 0
    centre.sync_round(0, {"a": np.full((1, 1), 1.0), "b": np.full((1, 1), 2.0)}, False)
    assert (centre.parameters["a"][0], centre.parameters["b"][0]) == (1, 2)


def test_who_is_dropped_while_it_combines_does_not_move_the_centre():
    centre = Centre(summing(lambda brought: centre.leave(0)), PARAMS, 2, on_failure="drop")
    joined(centre, 0, 1)
    with pytest.raises(PeerLeft, match="trainer 0 left"):
        centre.sync_round(0, of(1.0), False)
    np.testing.assert_array_equal(centre.parameters["w"], np.zeros(3))


def test_what_was_brought_to_a_mean_that_raises_is_not_kept():
    """After trainer 0 leaves, the round must not use the parameters that trainer 2 gave to the failed round."""
    calls = []

    def combine(shared, mean):
        calls.append(mean[0][0])
        if len(calls) == 1:
            raise MemoryError("no room")
        return shared, mean

    rule = Rule("mean", False, lambda parameters: (), combine, lambda live, before, target: target)
    transport = joined(AllToAll(rule, PARAMS, 3, on_failure="drop"), 0, 1, 2)
    both_have_brought = waits(transport, 0, 1)

    def comes_last():
        until(both_have_brought)
        with pytest.raises(MemoryError):
            transport.sync_round(2, of(6.0), False)
        transport.leave(0)
        return transport.sync_round(2, of(4.0), False)

    meets = [lambda i=i: transport.sync_round(i, of(2.0), False) for i in (0, 1)]
    gone, one, two = in_threads(*meets, comes_last)
    assert isinstance(gone, PeerLeft) and [target["w"][0, 0] for target, _ in (one, two)] == [3.0, 3.0]
    assert calls == pytest.approx([10 / 3, 3.0])


def test_a_centre_keeps_nothing_that_a_step_may_donate():
    initial = {"w": jnp.zeros(3), "n": jnp.arange(3)}
    centre = Centre(easgd(), initial)
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(initial)
    assert initial["n"].is_deleted()
    assert centre.parameters["n"].tolist() == [0, 1, 2] and centre.parameters["w"].tolist() == [0.0] * 3


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_bits_of_a_mean_do_not_depend_on_who_comes_first(order):
    """In float32, 1e8 + 1 - 1e8 is 0, but 1 in another order."""
    transport = joined(AllToAll(MEAN, PARAMS, 3), 0, 1, 2)
    at = [transport.last_seen(trainer) for trainer in order]

    def come(place):
        if place:  # the previous one waits in `sync_round`
            until(lambda: transport.last_seen(order[place - 1]) > at[place - 1])
        return transport.sync_round(order[place], of((1e8, 1.0, -1e8)[order[place]]), False)

    for target, _ in in_threads(*[lambda place=place: come(place) for place in range(3)]):
        np.testing.assert_array_equal(target["w"], np.zeros((1, 3)))
