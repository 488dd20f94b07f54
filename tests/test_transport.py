"""Where trainers meet: everyone is named who is missing, nobody waits for ever, and what has left is not averaged."""

import contextlib
import os
import signal
import threading
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrec.embedding import EmbeddingSpec, Lookup, Table, sgd
from jaxrec.shadowsync import Emulation, Foreground, Left, Script, Shadow
from jaxrec.shadowsync.rules import Rule, bmuf, easgd, model_averaging
from jaxrec.shadowsync.transport import AllToAll, Centre, pack, queued
from jaxrec.types import Batch

PARAMS = {"w": np.zeros(3, np.float32)}
MEAN = model_averaging(1.0)


def of(*values):
    """Parameters of as many replicas as values, as a transport takes them."""
    return {"w": np.array(values, np.float32)[:, None] * np.ones(3, np.float32)}


def joined(transport, *trainers):
    for trainer in trainers:
        transport.join(trainer)
    return transport


def in_threads(*acts):
    """What each returned or raised, in order."""
    found = [None] * len(acts)

    def run(number, act):
        try:
            found[number] = act()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "a trainer hangs"
    return found


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        os.sched_yield()


@pytest.mark.parametrize("kind", [Shadow, Foreground])
@pytest.mark.parametrize("rule", [MEAN, easgd()])
def test_a_wrong_number_of_trainers_is_a_time_out_that_names_who_never_joined(kind, rule):
    transport = (Centre if rule.has_centre else AllToAll)(rule, PARAMS, 4, timeout_s=0.2)
    more = {"every_steps": 1} if kind is Foreground else {}

    def train(trainer):
        with kind(transport, trainer, **more) as synchroniser:
            return synchroniser.finish({"w": jnp.ones(3)})

    for error in in_threads(lambda: train(0), lambda: train(2)):
        assert isinstance(error, Left)
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
    with pytest.raises(ValueError, match="=0 left without `finish` after its round 0, and no trainer comes back"):
        transport.join(0)


def test_who_is_overdue_was_last_seen_at_a_round():
    transport = joined(AllToAll(MEAN, PARAMS, 2, timeout_s=0.2), 0, 1)

    def seven_rounds():
        for _ in range(7):
            transport.meet(1, of(0.0), False)

    def without_end():
        while True:
            transport.meet(0, of(0.0), False)

    error, _ = in_threads(without_end, seven_rounds)
    assert isinstance(error, Left)
    with pytest.raises(Left, match=r"trainer 1 was last seen at its round 7, 0\.\d+ s ago, timeout_s=0\.2"):
        raise error


@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_when_a_trainer_raises_all_others_stop_with_its_name(kind):
    """Long time-outs: they are woken."""
    transport, more = AllToAll(MEAN, PARAMS, 3), {"every_steps": 1} if kind is Foreground else {}

    def train(trainer):
        with kind(transport, trainer, **more) as synchroniser:
            state = {"w": jnp.ones(3)}
            if trainer == 1:
                raise OSError("the disk is gone")
            while True:
                state = synchroniser.exchange(state)

    started = time.monotonic()
    zero, one, two = in_threads(*[lambda i=i: train(i) for i in range(3)])
    assert isinstance(one, OSError) and time.monotonic() - started < 20
    for error in (zero, two):
        assert isinstance(error, Left) and "trainer 1 left after its round 0 with OSError: the disk is gone" in str(
            error
        )


def test_with_drop_the_others_go_on_without_what_it_had_brought():
    transport = joined(AllToAll(MEAN, PARAMS, 3, on_failure="drop"), 0, 1, 2)
    late = threading.Event()

    def leaves_while_it_waits():
        try:
            return transport.meet(0, of(1000.0), False)
        finally:
            late.set()

    def second():
        until(lambda: 0 in transport._brought)  # no outside sign tells that a trainer waits
        transport.leave(0, KeyboardInterrupt())
        assert late.wait(20)
        return transport.meet(1, of(2.0), False)

    gone, one, two = in_threads(
        leaves_while_it_waits, second, lambda: late.wait(20) and transport.meet(2, of(4.0), False)
    )
    assert isinstance(gone, Left) and "trainer 0 left after its round 0 with KeyboardInterrupt" in str(gone)
    for target, last in (one, two):
        np.testing.assert_array_equal(target["w"], of(3.0)["w"])
        assert not last
    with pytest.raises(Left, match="trainer 0 left"):
        transport.meet(0, of(0.0), False)


def test_what_a_trainer_had_brought_goes_with_it_before_it_wakes():
    transport = joined(AllToAll(MEAN, PARAMS, 3, on_failure="drop"), 0, 1, 2)

    def leaves_and_meets():
        until(lambda: len(transport._brought) == 2)  # no outside sign tells that they wait
        transport.leave(0)
        return transport.meet(2, of(4.0), False)

    gone, one, two = in_threads(
        lambda: transport.meet(0, of(1000.0), False), lambda: transport.meet(1, of(2.0), False), leaves_and_meets
    )
    assert isinstance(gone, Left)
    assert [target["w"][0, 0] for target, _ in (one, two)] == [3.0, 3.0]


def test_trainers_of_different_precision_are_averaged_in_float32():
    transport = joined(AllToAll(MEAN, PARAMS, 2), 0, 1)
    low = {"w": np.asarray(jnp.full((1, 3), 256.0, jnp.bfloat16))}
    for target, _ in in_threads(lambda: transport.meet(0, low, False), lambda: transport.meet(1, of(257.0), False)):
        assert target["w"].dtype == np.float32 and target["w"][0, 0] == 256.5


def test_an_overdue_trainer_is_dropped_and_refused_when_it_comes_back():
    transport = joined(AllToAll(MEAN, PARAMS, 3, timeout_s=0.2, on_failure="drop"), 0, 1)
    targets = in_threads(lambda: transport.meet(0, of(2.0), True), lambda: transport.meet(1, of(4.0), True))
    assert [(target["w"][0, 0], last) for target, last in targets] == [(3.0, True), (3.0, True)]
    with pytest.raises(ValueError, match="trainer=2 never joined within timeout_s=0.2.*no trainer comes back"):
        transport.join(2)
    with pytest.raises(ValueError, match="trainer=0 has finished"):
        transport.meet(0, of(2.0), False)


def test_a_trainer_that_waits_is_dropped_with_nobody_left_to_wait_for():
    transport = joined(AllToAll(MEAN, PARAMS, 2, on_failure="drop"), 0, 1)

    def leave():
        until(lambda: 0 in transport._brought)
        transport.leave(1)

    (target, last), _ = in_threads(lambda: transport.meet(0, of(5.0), False), leave)
    assert target["w"][0, 0] == 5.0 and not last


@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_with_a_centre_an_early_trainer_gets_the_last_model(kind):
    rule, more = easgd(0.5), {"every_steps": 1} if kind is Foreground else {}
    centre, early_waits = Centre(rule, PARAMS, 2), threading.Event()

    class Told:
        """The same centre; it tells when trainer 0 begins to wait."""

        def __getattr__(self, name):
            return getattr(centre, name)

        def meet(self, trainer, before, done):
            if done and trainer == 0:
                early_waits.set()
            return centre.meet(trainer, before, done)

    def train(trainer):
        with kind(Told(), trainer, **more) as synchroniser:
            state = {"w": jnp.full((1 + trainer, 3), 1000.0 * trainer)}
            if trainer:
                assert early_waits.wait(20)
                while synchroniser.rounds < 20:
                    synchroniser.exchange(state)
            return synchroniser.finish(state)

    early, late = in_threads(lambda: train(0), lambda: train(1))
    np.testing.assert_array_equal(early["w"], centre.parameters["w"][None])
    np.testing.assert_array_equal(late["w"], np.stack([centre.parameters["w"]] * 2))
    assert centre.parameters["w"][0] > 900


def test_a_trainer_that_is_done_waits_longer_than_the_time_out_for_who_still_comes():
    """The other comes ten times, each within the time-out, in all later than it."""
    centre, rounds = joined(Centre(easgd(), PARAMS, 2, timeout_s=0.4), 0, 1), []

    def early():
        last = False
        while not last:
            target, last = centre.meet(0, of(0.0), True)
        return target

    def late():
        started = time.monotonic()
        while time.monotonic() - started < 1.0:
            centre.meet(1, of(8.0), False)
            rounds.append(1)
            threading.Event().wait(0.1)
        return centre.meet(1, of(8.0), True)[1]

    target, last = in_threads(early, late)
    assert last and rounds and isinstance(target, dict)


def test_what_does_not_fit_is_seen_without_a_copy_of_the_centre():
    big = {"w": np.zeros(5_000_000, np.float32)}
    centre = joined(Centre(easgd(), big), 0)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"\['w'\]: it has \(1, 4\), wanted \(5000000,\)"):
            centre.meet(0, {"w": np.zeros((1, 4), np.float32)}, False)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_two_trainers_at_one_server_take_turns():
    """Both read the centre and write it: the second may not begin before the first is through."""
    both = threading.Barrier(2)

    def combine(centre, brought):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # without turns both are here at once
        return centre + brought, centre

    rule = Rule("sum", True, np.array, combine, lambda live, before, target: live)
    centre = joined(Centre(rule, PARAMS, 2), 0, 1)
    in_threads(lambda: centre.meet(0, of(1.0), False), lambda: centre.meet(1, of(2.0), False))
    np.testing.assert_array_equal(centre.parameters["w"], [3.0, 3.0, 3.0])


def test_servers_share_the_tensors_and_their_bandwidth():
    assert sorted(pack([8, 1, 7, 2, 6], 2)) == [0, 0, 0, 1, 1]
    assert queued([0.0, 0.0], [800, 800], 1600.0, now=0.0) == [0.5, 0.5]
    assert queued(queued([0.0], [1600], 1600.0, now=0.0), [1600], 1600.0, now=0.0) == [2.0]
    tree = {"a": np.zeros((1, 100), np.float32), "b": np.zeros((1, 100), np.float32)}

    def seconds(servers):
        """Two trainers at one instant, the second behind the first; a tensor takes 0.1 s to and fro."""
        initial = jax.tree.map(lambda x: x[0], tree)
        centre = joined(Centre(easgd(), initial, 2, servers=servers, bytes_per_s=8000.0), 0, 1)
        start = time.monotonic()
        in_threads(*[lambda i=i: centre.meet(i, tree, False) for i in range(2)])
        return time.monotonic() - start

    assert seconds(servers=1) >= 0.4 and seconds(servers=2) >= 0.2


def test_a_trainer_on_a_slow_server_can_leave():
    centre, began = joined(Centre(easgd(), PARAMS, bytes_per_s=0.001), 0), threading.Event()

    def meet():
        began.set()
        return centre.meet(0, of(1.0), False)

    found, _ = in_threads(meet, lambda: began.wait(20) and centre.leave(0))  # 24,000 s
    assert isinstance(found, Left)
    np.testing.assert_array_equal(centre.parameters["w"], np.zeros(3))


def test_bmuf_with_momentum_is_that_of_the_emulation_over_many_rounds():
    """A walk of constant steps, rounds without latency; the state of BMUF begins at the initial parameters."""
    rule, n, every, ticks = bmuf(0.6, eta=0.9, momentum=0.5), 3, 2, 16
    spec = EmbeddingSpec({"item": Table(8, 4)}, {"item": Lookup("item")}, shards=1)
    walk = lambda params, activations, batch: -params["w"].sum() * batch.label
    initial = {"w": jnp.full(4, 2.0)}
    rng = np.random.default_rng(0)
    batch = lambda label: Batch(
        {"item": np.zeros(2, np.int32)}, np.zeros((2, 0), np.float32), np.full(2, label), np.ones(2, np.float32)
    )
    labels = rng.random((ticks, n)).astype(np.float32)
    emulation = Emulation(spec, walk, optax.sgd(1.0), sgd(0.0), initial, n, script=Script(rule, every))
    emulation.run([batch(label) for tick in labels for label in tick])

    transport = AllToAll(rule, initial, n)

    def train(trainer):
        params = initial
        with Foreground(transport, trainer, every_steps=every) as foreground:
            foreground.exchange(params)  # the emulation applies in a tick what the last one has computed
            for label in labels[:-1, trainer]:
                params = foreground.exchange({"w": params["w"] + label})
            return params["w"] + labels[-1, trainer], foreground.rounds

    for trainer, (w, rounds) in enumerate(in_threads(*[lambda i=i: train(i) for i in range(n)])):
        assert rounds == ticks // every
        np.testing.assert_allclose(w, emulation.dense[trainer].params["w"], rtol=1e-5)


def test_fifty_trainers_meet():
    transport, rounds = AllToAll(model_averaging(0.5, "delta"), PARAMS, 50), 5

    def train(trainer):
        with Foreground(transport, trainer, every_steps=1) as foreground:
            state = {"w": jnp.full(3, float(trainer))}
            for _ in range(rounds):
                state = foreground.exchange(state)
            return foreground.finish(state)

    found = in_threads(*[lambda i=i: train(i) for i in range(50)])
    values = np.array([float(state["w"][0]) for state in found])
    np.testing.assert_allclose(values.mean(), 24.5, rtol=1e-5)
    np.testing.assert_allclose(values - 24.5, (np.arange(50) - 24.5) * 0.5 ** (rounds + 1), atol=1e-4)


@pytest.mark.parametrize("where", ["Shadow.finish", "Foreground.finish", "Foreground.exchange"])
def test_ctrl_c_while_it_waits_ends_its_part_and_the_others_hear_of_it(where):
    kind, act = where.split(".")
    transport, met = AllToAll(MEAN, PARAMS, 2), []
    joined(transport, 1)

    class Told:
        def __getattr__(self, name):
            return getattr(transport, name)

        def meet(self, trainer, before, done):
            met.append(trainer)
            if len(met) == 1:
                sender.start()
            return transport.meet(trainer, before, done)

    def interrupt():
        until(lambda: 0 in transport._brought)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        with Shadow(Told()) if kind == "Shadow" else Foreground(Told(), every_steps=1) as synchroniser:
            try:
                getattr(synchroniser, act)({"w": jnp.ones(3)})
            finally:
                for again in (synchroniser.finish, synchroniser.exchange) if act == "finish" else ():
                    with pytest.raises(ValueError, match="too late: .* has begun to finish before"):
                        again({"w": jnp.ones(3)})
    sender.join(20)
    assert met == [0] and not [t for t in threading.enumerate() if t.name.startswith("shadow-")]
    with pytest.raises(Left, match="trainer 0 left after its round 0 with KeyboardInterrupt"):
        transport.meet(1, of(0.0), False)


@pytest.mark.parametrize("rule", [MEAN, easgd(0.5)], ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_rounds_that_are_rarer_than_the_time_out_lose_nobody(kind, rule):
    """Trainer 1 is at work for five time-outs without a round, while trainer 0 waits for it at its end."""
    transport = (Centre if rule.has_centre else AllToAll)(rule, PARAMS, 2, timeout_s=0.2)

    def early():
        with kind(transport, 0, **({"every_steps": 1} if kind is Foreground else {})) as synchroniser:
            return synchroniser.finish({"w": jnp.ones(3)})

    def late():
        with Foreground(transport, 1, every_steps=10**9) as foreground:
            state, end = {"w": jnp.ones(3)}, time.monotonic() + 1.0
            while time.monotonic() < end:
                state = foreground.exchange(state)
            return foreground.finish(state)

    for found in in_threads(early, late):
        assert not isinstance(found, BaseException), found


def test_a_transfer_longer_than_the_time_out_loses_nobody():
    centre = joined(Centre(easgd(0.5), PARAMS, 2, bytes_per_s=30.0, timeout_s=0.2), 0, 1)  # 0.8 s

    def early():
        while not centre.meet(0, of(0.0), True)[1]:
            pass

    def late():
        target, _ = centre.meet(1, of(8.0), False)
        return target, centre.meet(1, of(8.0), True)

    found, both = in_threads(early, late)
    assert found is None and isinstance(both, tuple), (found, both)
    np.testing.assert_array_equal(centre.parameters["w"], [4.0] * 3)


def test_a_trainer_on_a_slow_server_hears_that_another_fails():
    centre = joined(Centre(easgd(), PARAMS, 2, bytes_per_s=0.001), 0, 1)  # 24,000 s

    def fails():
        until(lambda: max(centre._free_at) > 0)
        centre.leave(1, OSError("the disk is gone"))

    found, _ = in_threads(lambda: centre.meet(0, of(1.0), False), fails)
    assert isinstance(found, Left) and "OSError: the disk is gone" in str(found)
    np.testing.assert_array_equal(centre.parameters["w"], np.zeros(3))


def summing(act):
    """A rule whose centre adds up what it is brought, after `act` on it."""

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
        centre.meet(0, {"a": np.full((1, 1), 1.0), "b": np.full((1, 1), 5.0)}, False)
    assert centre.parameters["a"][0] == centre.parameters["b"][0] == 0
    centre.meet(0, {"a": np.full((1, 1), 1.0), "b": np.full((1, 1), 2.0)}, False)
    assert (centre.parameters["a"][0], centre.parameters["b"][0]) == (1, 2)


def test_who_is_dropped_while_it_combines_does_not_move_the_centre():
    centre = Centre(summing(lambda brought: centre.leave(0)), PARAMS, 2, on_failure="drop")
    joined(centre, 0, 1)
    with pytest.raises(Left, match="trainer 0 left"):
        centre.meet(0, of(1.0), False)
    np.testing.assert_array_equal(centre.parameters["w"], np.zeros(3))


def test_what_was_brought_to_a_mean_that_raises_is_not_kept():
    calls = []

    def combine(shared, mean):
        calls.append(mean[0][0])
        if len(calls) == 1:
            raise MemoryError("no room")
        return shared, mean

    rule = Rule("mean", False, lambda parameters: (), combine, lambda live, before, target: target)
    transport = joined(AllToAll(rule, PARAMS), 0)
    with pytest.raises(MemoryError):
        transport.meet(0, of(1.0), False)
    assert not transport._brought
    assert transport.meet(0, of(2.0), False)[0]["w"][0, 0] == 2.0 and calls == [1.0, 2.0]


def test_a_centre_keeps_nothing_that_a_step_may_donate():
    initial = {"w": jnp.zeros(3), "n": jnp.arange(3)}
    centre = Centre(easgd(), initial)
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(initial)
    assert initial["n"].is_deleted()
    assert centre.parameters["n"].tolist() == [0, 1, 2] and centre.parameters["w"].tolist() == [0.0] * 3


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
    assert isinstance(zero, Left) and "trainer 1 left after its round 0 with ValueError" in str(zero)
