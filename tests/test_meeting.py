"""Participation in rounds: missing trainers are named, no trainer waits for ever, dropped ones are not used."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest
from meetings import Around, Clock, in_meet, in_threads, joined, of, waits
from world import interrupt_when, no_threads_left, until

from jaxrec.shadowsync import Foreground, PeerLeft, Shadow
from jaxrec.shadowsync.rules import bmuf, easgd, model_averaging
from jaxrec.shadowsync.transport import AllToAll, Centre

PARAMS = {"w": np.zeros(3, np.float32)}
MEAN = model_averaging(1.0)


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


def test_a_trainer_on_a_slow_server_can_leave():
    centre, began = joined(Centre(easgd(), PARAMS, bytes_per_s=0.001), 0), threading.Event()

    def sync_round():
        began.set()
        return centre.sync_round(0, of(1.0), False)

    found, _ = in_threads(sync_round, lambda: began.wait(60) and centre.leave(0))  # 24,000 s
    assert isinstance(found, PeerLeft)
    np.testing.assert_array_equal(centre.parameters["w"], np.zeros(3))


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


def test_a_transfer_longer_than_the_time_out_loses_nobody(clock):
    centre = joined(Centre(easgd(0.5), PARAMS, 2, bytes_per_s=30.0, timeout_s=0.1), 0, 1)  # 0.8 s
    both_wait = waits(centre, 0, 1)

    def late():
        target, _ = centre.sync_round(1, of(8.0), False)
        return target, centre.sync_round(1, of(8.0), True)

    def time_passes():
        until(both_wait)
        for _ in range(13):
            clock.goes_on(0.06, centre, 0, 1)
        clock.goes_on(0.06)

    early, both, _ = in_threads(lambda: centre.sync_round(0, of(0.0), True), late, time_passes)
    assert isinstance(early, tuple) and isinstance(both, tuple), (early, both)
    np.testing.assert_array_equal(centre.parameters["w"], [4.0] * 3)


def test_a_trainer_on_a_slow_server_hears_that_another_fails():
    centre = joined(Centre(easgd(), PARAMS, 2, bytes_per_s=0.001), 0, 1)  # 24,000 s
    in_the_transfer = waits(centre, 0)

    def fails():
        until(in_the_transfer)
        centre.leave(1, OSError("the disk is gone"))

    found, _ = in_threads(lambda: centre.sync_round(0, of(1.0), False), fails)
    assert isinstance(found, PeerLeft) and "OSError: the disk is gone" in str(found)
    np.testing.assert_array_equal(centre.parameters["w"], np.zeros(3))


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
