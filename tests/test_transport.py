"""Rounds combine the parameters of trainers as a whole and by the rule; missing trainers are named in time."""

import threading
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from threads import in_threads, interrupt_when, is_inside, no_threads_left, until
from transports import Around, Clock, in_meet, joined, of, waits

from jaxrec.shadowsync import Foreground, PeerLeft, Shadow
from jaxrec.shadowsync.rules import Rule, bmuf, easgd, model_averaging
from jaxrec.shadowsync.transport import AllToAll, Centre

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


def summing(act):
    """A rule whose centre sums the parameters it gets, after a call of `act` on them."""

    def combine(centre, brought):
        for leaf in brought:
            act(leaf)
        return [one + other for one, other in zip(centre, brought, strict=True)], centre

    init = lambda leaves: [np.array(leaf) for leaf in leaves]
    return Rule("sum", True, init, combine, lambda live, before, target: live)


def test_a_combine_that_raises_between_two_leaves_leaves_the_centre_as_it_was():
    def act(brought):
        if brought.max() == 5:
            raise MemoryError("no room")

    centre = joined(Centre(summing(act), {"a": np.zeros(1), "b": np.zeros(1)}), 0)
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


# ---- trainers that are missing, late or gone


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.mark.parametrize("kind", [Shadow, Foreground])
@pytest.mark.parametrize("rule", [MEAN, easgd()])
def test_a_wrong_number_of_trainers_is_a_time_out_that_names_who_never_joined(kind, rule, clock):
    transport = (Centre if rule.has_centre else AllToAll)(rule, PARAMS, 4, timeout_s=0.2)
    more = {"every_steps": 1} if kind is Foreground else {}

    def train(trainer):
        with kind(transport, trainer, **more) as synchroniser:
            return synchroniser.finish({"w": jnp.ones(3)})

    def time_passes():
        until(lambda: len(in_meet(transport)) == 2)
        clock.goes_on(0.3)

    for error in in_threads(lambda: train(0), lambda: train(2), time_passes)[:2]:
        assert isinstance(error, PeerLeft)
        assert "trainer 1 never joined within timeout_s=0.2 (are there 4 trainers?), trainer 3 never" in str(error)


@pytest.mark.parametrize("make", [lambda: AllToAll(MEAN, PARAMS, 2), lambda: Centre(easgd(), PARAMS, 2)])
@pytest.mark.parametrize(("trainer", "message"), [(0, "has joined already"), (2, "from 0 to 1"), (-1, "from 0 to 1")])
def test_a_place_is_taken_once_and_must_exist(make, trainer, message):
    transport = make()
    with Shadow(transport):
        with pytest.raises(ValueError, match=message):
            Shadow(transport, trainer).__enter__()
        with pytest.raises(ValueError, match=message), Foreground(transport, trainer, every_steps=1):
            pass
    with pytest.raises(ValueError, match="=0 left without `finish` after its round 0, and no trainer can rejoin"):
        transport.join(0)


def test_who_is_overdue_was_last_seen_at_a_round(clock):
    transport, begun = joined(AllToAll(MEAN, PARAMS, 2, timeout_s=0.2), 0, 1), []

    def seven_rounds():
        for _ in range(7):
            transport.sync_round(1, of(0.0), False)
        until(lambda: len(begun) == 8 and in_meet(transport))
        clock.goes_on(0.3)

    def without_end():
        while True:
            begun.append(1)
            transport.sync_round(0, of(0.0), False)

    error, _ = in_threads(without_end, seven_rounds)
    assert isinstance(error, PeerLeft)
    with pytest.raises(PeerLeft, match=r"trainer 1 was last seen at its round 7, 0\.3 s ago, timeout_s=0\.2"):
        raise error


@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_when_a_trainer_raises_all_others_stop_with_its_name(kind):
    """The others are woken: the time-out is far longer than the test."""
    transport, more = AllToAll(MEAN, PARAMS, 3, timeout_s=1e6), {"every_steps": 1} if kind is Foreground else {}

    def train(trainer):
        with kind(transport, trainer, **more) as synchroniser:
            state = {"w": jnp.ones(3)}
            if trainer == 1:
                raise OSError("the disk is gone")
            while True:
                state = synchroniser.exchange(state)

    zero, one, two = in_threads(*[lambda i=i: train(i) for i in range(3)])
    assert isinstance(one, OSError)
    for error in (zero, two):
        assert isinstance(error, PeerLeft) and "trainer 1 left after its round 0 with OSError: the disk is gone" in str(
            error
        )


def test_what_a_trainer_had_brought_goes_with_it_before_it_wakes():
    transport = joined(AllToAll(MEAN, PARAMS, 3, on_failure="drop"), 0, 1, 2)
    both_have_brought = waits(transport, 0, 1)

    def leaves_and_meets():
        until(both_have_brought)
        transport.leave(0, KeyboardInterrupt())
        return transport.sync_round(2, of(4.0), False)

    gone, one, two = in_threads(
        lambda: transport.sync_round(0, of(1000.0), False),
        lambda: transport.sync_round(1, of(2.0), False),
        leaves_and_meets,
    )
    assert isinstance(gone, PeerLeft) and "trainer 0 left after its round 0 with KeyboardInterrupt" in str(gone)
    assert [(target["w"][0, 0], last) for target, last in (one, two)] == [(3.0, False)] * 2
    with pytest.raises(PeerLeft, match="trainer 0 left"):
        transport.sync_round(0, of(0.0), False)


@pytest.mark.parametrize(("rule", "wanted"), [(MEAN, 3.0), (bmuf(1.0, momentum=0.5), 3.0), (easgd(), 0.0)])
def test_an_overdue_trainer_is_dropped_and_refused_when_it_comes_back(rule, wanted, clock):
    kind = Centre if rule.has_centre else AllToAll
    transport = joined(kind(rule, PARAMS, 3, timeout_s=0.2, on_failure="drop"), 0, 1)

    def time_passes():
        until(lambda: len(in_meet(transport)) == 2)
        clock.goes_on(0.3)

    meets = [lambda: transport.sync_round(0, of(2.0), True), lambda: transport.sync_round(1, of(4.0), True)]
    targets = in_threads(*meets, time_passes)[:2]
    assert [(target["w"][0, 0], last) for target, last in targets] == [(wanted, True), (wanted, True)]
    with pytest.raises(ValueError, match="trainer=2 never joined within timeout_s=0.2.*no trainer can rejoin"):
        transport.join(2)
    with pytest.raises(ValueError, match="trainer=0 has finished"):
        transport.sync_round(0, of(2.0), False)


def test_a_trainer_that_waits_is_dropped_with_nobody_left_to_wait_for():
    transport = joined(AllToAll(MEAN, PARAMS, 2, on_failure="drop"), 0, 1)
    brought = waits(transport, 0)

    def leave():
        until(brought)
        transport.leave(1)

    (target, last), _ = in_threads(lambda: transport.sync_round(0, of(5.0), False), leave)
    assert target["w"][0, 0] == 5.0 and not last


def test_a_trainer_that_is_done_waits_longer_than_the_time_out_for_who_still_comes(clock):
    """The other trainer comes ten times, each within the time-out, in total well after it."""
    centre = joined(Centre(easgd(), PARAMS, 2, timeout_s=0.1), 0, 1)

    def late():
        for _ in range(10):
            clock.goes_on(0.06, centre, 0, unless=lambda: centre.exit_reason(1))
            centre.sync_round(1, of(8.0), False)
        return centre.sync_round(1, of(8.0), True)[1]

    (_, early), last = in_threads(lambda: centre.sync_round(0, of(0.0), True), late)
    assert early and last


class Interrupting(Around):
    """A transport that sends Ctrl-C once the first trainer to arrive waits in it."""

    def __init__(self, transport):
        super().__init__(transport)
        self.met = []

    def sync_round(self, trainer, before, done):
        self.met.append(trainer)
        if len(self.met) == 1:
            interrupt_when(waits(self.transport, trainer))
        return self.transport.sync_round(trainer, before, done)


@pytest.mark.parametrize("where", ["Shadow.finish", "Foreground.finish", "Foreground.exchange"])
def test_ctrl_c_while_it_waits_ends_its_part_and_the_others_hear_of_it(where):
    kind, act = where.split(".")
    transport, params = joined(AllToAll(MEAN, PARAMS, 2), 1), {"w": jnp.ones(3)}
    told = Interrupting(transport)
    with pytest.raises(KeyboardInterrupt):
        with Shadow(told) if kind == "Shadow" else Foreground(told, every_steps=1) as synchroniser:
            try:
                getattr(synchroniser, act)(params)
            finally:
                for again in (synchroniser.finish, synchroniser.exchange) if act == "finish" else ():
                    with pytest.raises(ValueError, match="before `finish`: .* has called `finish`"):
                        again(params)
    assert told.met == [0] and no_threads_left()
    with pytest.raises(PeerLeft, match="trainer 0 left after its round 0 with KeyboardInterrupt"):
        transport.sync_round(1, of(0.0), False)


@pytest.mark.parametrize("rule", [MEAN, easgd(0.5)], ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_rounds_that_are_rarer_than_the_time_out_lose_nobody(kind, rule, clock):
    """Trainer 1 trains for six time-outs without a round, while trainer 0 waits for it in its last round."""
    transport = (Centre if rule.has_centre else AllToAll)(rule, PARAMS, 2, timeout_s=0.1)

    def early():
        with kind(transport, 0, **({"every_steps": 1} if kind is Foreground else {})) as synchroniser:
            return synchroniser.finish({"w": jnp.ones(3)})

    def late():
        with Foreground(transport, 1, every_steps=10**9) as foreground:
            state = {"w": jnp.ones(3)}
            for _ in range(10):
                clock.goes_on(0.06, transport, 0, unless=lambda: transport.exit_reason(1))
                state = foreground.exchange(state)
            return foreground.finish(state)

    for found in in_threads(early, late):
        assert not isinstance(found, BaseException), found


@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_a_trainer_that_has_diverged_is_named_and_poisons_nobody(kind):
    transport, gave = AllToAll(MEAN, PARAMS, 2), []

    def train(trainer):
        state = {"w": jnp.full(3, float("nan") if trainer else 1.0)}
        with kind(transport, trainer, **({"every_steps": 1} if kind is Foreground else {})) as synchroniser:
            for _ in range(10**6):
                gave.append(state := synchroniser.exchange(state))

    zero, one = in_threads(lambda: train(0), lambda: train(1))
    assert isinstance(one, ValueError) and "trainer 1" in str(one) and "['w'] holds nan or inf" in str(one)
    assert isinstance(zero, PeerLeft) and "trainer 1 left after its round 0 with ValueError" in str(zero)
