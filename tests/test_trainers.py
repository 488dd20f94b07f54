"""Free-running trainers: one alone is plain training, no update is lost, every end is reached, failures stop all."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrec import Batch, init_state, make_train_step
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad, plan, sgd
from jaxrec.shadowsync import AllToAll, Centre, Foreground, Shadow, easgd, model_averaging, train_freely

SPEC = EmbeddingSpec({"item": Table(40, 4)}, {"item": Lookup("item")}, shards=2)
PARAMS = {"w": jnp.ones(4)}


def loss(params, activations, batch):
    return optax.sigmoid_binary_cross_entropy(activations["item"] @ params["w"], batch.label)


def counting(params, activations, batch):
    """The gradient of a batch by row 0, all whose examples look it up, and by w is -1 in every step."""
    return -activations["item"].sum(-1) - params["w"].sum()


def stream(seed, batches, rows=40, size=8):
    rng = np.random.default_rng(seed)
    for _ in range(batches):
        ids, label = rng.integers(0, rows, size), rng.integers(0, 2, size)
        yield Batch({"item": ids.astype(np.int32)}, np.zeros((size, 0), np.float32), label, np.ones(size, np.float32))


def synchronisers(kind, rule, trainers, of=None, on_failure="raise", timeout_s=60.0, **more):
    of = of or (Centre if rule.has_centre else AllToAll)
    transport = of(rule, PARAMS, trainers, on_failure=on_failure, timeout_s=timeout_s)
    return lambda number: kind(rule, transport, number, **more)


def alone_in(transport, rule):
    return transport(rule, PARAMS, 1)


def no_threads_left():
    return not [t for t in threading.enumerate() if t.name.startswith(("trainer", "shadow", "synchronisation"))]


def test_no_thread_is_seen_after_training_though_each_lingers_at_its_end(monkeypatch):
    """A thread that has told that it is done is still there until the system has ended it."""
    run = threading.Thread.run
    monkeypatch.setattr(threading.Thread, "run", lambda thread: (run(thread), threading.Event().wait(0.2)))
    train_freely(SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, HostTables.create(SPEC, sgd(0.1)), [stream(0, 3)])
    assert no_threads_left()


def test_one_trainer_with_one_worker_is_plain_training():
    dense, rows = optax.adam(0.01), adagrad(0.1)
    tables = HostTables.create(SPEC, rows)
    (found,), figures = train_freely(SPEC, loss, dense, rows, PARAMS, tables, [stream(0, 30)])
    state, step = (
        init_state(PARAMS, dense, HostTables.create(SPEC, rows)),
        make_train_step(SPEC, loss, dense, rows),
    )
    for batch in stream(0, 30):
        state, _ = step(state, plan(SPEC, batch.ids), batch)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found.params, state.dense.params)
    jax.tree.map(close, tables.shards, state.tables.shards)
    assert figures.steps == [30] and figures.examples == 240 and figures.spread == 0


def counted(trainers, workers, synchroniser=None):
    """(what row 0 has gained, steps) after trainers x 40 batches that each add 1."""
    rows = sgd(1.0)
    tables = HostTables.create(SPEC, rows)
    before = tables.shards["width_4"][0]["value"][0].copy()
    streams = [stream(i, 40, rows=1) for i in range(trainers)]
    dense, figures = train_freely(
        SPEC, counting, optax.sgd(1.0), rows, PARAMS, tables, streams, synchroniser, workers_per_trainer=workers
    )
    return tables.shards["width_4"][0]["value"][0] - before, dense, figures


def test_no_update_of_rows_or_parameters_is_lost_with_hogwild_workers():
    gained, dense, figures = counted(trainers=2, workers=4)
    np.testing.assert_allclose(gained, 80, rtol=0.02)  # adds take no lock: two at the same instant may count as one
    assert figures.steps == [40, 40] and figures.example_level_parallelism == 8 * 4 * 2
    for state in dense:
        np.testing.assert_array_equal(state.params["w"], 41)  # exact: the newest version is stepped under the lock


@pytest.mark.parametrize(("verb", "gained"), [("add", 80), ("put", 40)])
def test_put_in_place_of_add_loses_one_of_two_updates(monkeypatch, verb, gained):
    """Two writers in a script: both read, one writes, the other writes, and so again for each of 40 batches."""
    add, both, one = HostTables.add, threading.Barrier(2), threading.Lock()

    def in_turns(self, plans, new, old):
        both.wait(60)
        with one:
            add(self, plans, new, old) if verb == "add" else self.put(plans, new)
        both.wait(60)

    monkeypatch.setattr(HostTables, "add", in_turns)
    found, _, figures = counted(trainers=2, workers=1)
    np.testing.assert_allclose(found, gained, rtol=1e-6)
    assert figures.steps == [40, 40]


WAYS = {
    "s-easgd": (Shadow, easgd(), {}),
    "s-ma-lerp": (Shadow, model_averaging(form="lerp"), {}),
    "s-ma-delta": (Shadow, model_averaging(alpha=1.0, form="delta"), {}),
    "fr-easgd-3": (Foreground, easgd(), {"every_steps": 3}),
    "fr-ma-3": (Foreground, model_averaging(), {"every_steps": 3}),
}


def until_a_round(seed, batches, synchroniser):
    """So many batches, and more until the trainer's synchroniser has folded a result in, but not for ever."""
    for number, batch in enumerate(stream(seed, 20_000)):
        if number >= batches and synchroniser.rounds:
            return
        yield batch


class Far(AllToAll):
    """Rounds whose result lies 1000 beyond the mean, until a trainer is done."""

    def meet(self, trainer, before, done):
        target, last = super().meet(trainer, before, done)
        return (target if done else jax.tree.map(lambda x: x + 1000, target)), last


@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_what_a_round_gives_is_what_the_workers_train_on(kind):
    """No rate moves anything here, so a loss that falls below -1000 is that of parameters which a round has given."""
    rule, losses = model_averaging(alpha=1.0), []
    more = {"every_steps": 3} if kind is Foreground else {}
    make = synchronisers(kind, rule, 1, Far, **more)

    def until_seen():
        return itertools.takewhile(lambda _: min(losses, default=0) > -1000, stream(0, 20_000))

    train_freely(
        SPEC, counting, optax.sgd(0.0), sgd(0.0), PARAMS, HostTables.create(SPEC, sgd(0.0)), [until_seen()], make,
        hook=lambda trainer, step, metrics: losses.append(float(metrics["loss"])),
    )  # fmt: skip
    assert losses[0] > -1000 > losses[-1]


@pytest.mark.parametrize("way", WAYS)
def test_uneven_trainers_reach_their_end_together(way):
    kind, rule, more = WAYS[way]
    make = synchronisers(kind, rule, 3, **more)
    made = [make(number) for number in range(3)]
    tables, batches = HostTables.create(SPEC, sgd(0.1)), (5, 20, 33)
    dense, figures = train_freely(
        SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables,
        [until_a_round(i, batches[i], made[i]) if kind is Shadow else stream(i, batches[i]) for i in range(3)],
        made.__getitem__, workers_per_trainer=2,
    )  # fmt: skip
    assert min(figures.rounds) > 0 and all(a >= b for a, b in zip(figures.steps, batches, strict=True))
    if kind is Foreground:
        assert figures.steps == [5, 20, 33]
        assert figures.rounds == [1, 6, 11] and figures.bytes == [32, 192, 352]  # 4 floats to and fro
        assert figures.average_sync_gap[2] == 3 and figures.average_sync_gap_per_worker[2] == 1.5
    alone, figures = train_freely(  # negative control: what synchronises brings the replicas nearer to each other
        SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, HostTables.create(SPEC, sgd(0.1)),
        [stream(i, steps) for i, steps in enumerate(figures.steps)],
    )  # fmt: skip
    assert figures.rounds == [0, 0, 0] and figures.average_sync_gap == [float("inf")] * 3
    distance = lambda states: float(np.abs(np.asarray(states[0].params["w"]) - np.asarray(states[2].params["w"])).max())
    assert distance(dense) < distance(alone)
    assert no_threads_left()


class Gated(AllToAll):
    """Rounds before the end wait for the test, and find each weight 100 above what was brought."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.entered, self.open = threading.Event(), threading.Event()

    def meet(self, trainer, before, done):
        target, last = super().meet(trainer, before, done)
        if done:
            return target, last
        self.entered.set()
        assert self.open.wait(30), "nobody stepped during the round"
        return [x + 100 for x in target], last


@pytest.mark.parametrize("workers", [2, 3])
def test_a_foreground_round_keeps_one_worker_waiting_and_the_others_step_on(workers):
    rule = model_averaging(alpha=1.0, form="delta")
    transport, opened_at = alone_in(Gated, rule), []

    def hook(trainer, step, metrics):
        """Once the round of step 4 has begun, step 7 is made, and lets it go; at step 8 the next is due."""
        if step in (5, 6):
            assert transport.entered.wait(30)
        if step == 7:
            opened_at.append(step)
            transport.open.set()

    (found,), figures = train_freely(
        SPEC, counting, optax.sgd(1.0), sgd(0.0), PARAMS, HostTables.create(SPEC, sgd(0.0)), [stream(0, 15)],
        lambda i: Foreground(rule, transport, i, every_steps=4), workers, hook=hook,
    )  # fmt: skip
    assert opened_at == [7] and figures.steps == [15] and figures.rounds == [3]
    # Every step adds 1 and every round 100: those of the steps during a round are kept, and no round counts twice.
    np.testing.assert_array_equal(found.params["w"], 1 + 15 + 300)


@pytest.mark.parametrize("kind", [None, Shadow, Foreground])
def test_a_failure_stops_everybody_and_is_named(kind):
    def broken():
        yield from stream(0, 3)
        raise OSError("the disk is gone")

    def endless():
        while True:
            yield from stream(1, 10)

    more = {"every_steps": 1} if kind is Foreground else {}
    make = kind and synchronisers(kind, model_averaging(), 2, **more)
    tables = HostTables.create(SPEC, sgd(0.1))
    with pytest.raises(OSError, match="the disk is gone") as caught:
        train_freely(SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, [broken(), endless()], make, 2)
    assert "trainer 0" in caught.value.__notes__[0]
    assert no_threads_left()


@pytest.mark.parametrize("kind", [None, Shadow, Foreground])
def test_a_hook_that_raises_stops_everybody_and_its_worker_is_named(kind):
    def hook(trainer, step, metrics):
        if (trainer, step) == (1, 5):
            raise RuntimeError("no room for figures")

    make = kind and synchronisers(kind, easgd(), 2, **({"every_steps": 2} if kind is Foreground else {}))
    tables = HostTables.create(SPEC, sgd(0.1))
    with pytest.raises(RuntimeError, match="no room for figures") as caught:
        streams = [stream(i, 10**6) for i in range(2)]
        train_freely(SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, streams, make, 2, hook=hook)
    assert "in worker" in caught.value.__notes__[0] and "of trainer 1" in caught.value.__notes__[0]
    assert no_threads_left()


@pytest.mark.parametrize("where", ["stream", "read"])
def test_what_blocks_is_left_behind_by_name_and_writes_nothing_when_it_wakes(monkeypatch, where):
    blocked, wake, read = threading.Event(), threading.Event(), HostTables.read

    def block():
        blocked.set()
        assert wake.wait(60)

    def blocking_stream():
        yield from stream(0, 3)
        if where == "stream":
            block()
        yield from stream(1, 3)

    def blocking_read(self, plans):
        if where == "read" and threading.current_thread().name.startswith("trainer-0"):
            block()
        return read(self, plans)

    def broken():
        yield from stream(1, 3)
        assert blocked.wait(60)
        raise OSError("the disk is gone")

    monkeypatch.setattr(HostTables, "read", blocking_read)
    tables = HostTables.create(SPEC, sgd(0.1))
    make = synchronisers(Shadow, model_averaging(), 2)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        train_freely(
            SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, [blocking_stream(), broken()], make, 2,
            leave_timeout_s=0.2,
        )  # fmt: skip
    assert "trainer-0" in caught.value.__notes__[-1] and "0.2 s" in caught.value.__notes__[-1]
    as_left = jax.tree.map(np.array, tables.shards)
    left = [thread for thread in threading.enumerate() if thread.name.startswith("trainer-0")]
    wake.set()
    for thread in left:
        thread.join(60)
    assert left and no_threads_left()
    jax.tree.map(np.testing.assert_array_equal, tables.shards, as_left)


def raising(error):
    """Three batches, then the error."""
    yield from stream(0, 3)
    raise error


@pytest.mark.parametrize("rule", [model_averaging(), easgd()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_a_failing_trainer_is_dropped_and_the_others_finish(kind, rule):
    make = synchronisers(kind, rule, 3, on_failure="drop", **every(2, kind))
    made, tables = [make(number) for number in range(3)], HostTables.create(SPEC, sgd(0.1))
    streams = [raising(OSError("the disk is gone")), *(lasting(i, 30, made) for i in (1, 2))]
    with pytest.warns(RuntimeWarning, match="trainer 0 was dropped: OSError: the disk is gone"):
        dense, figures = train_freely(
            SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, streams, made.__getitem__, 2
        )
    assert list(figures.failures) == [0] and str(figures.failures[0]) == "the disk is gone"
    assert "of trainer 0" in figures.failures[0].__notes__[0]
    assert min(figures.steps[1:]) >= 30 and min(figures.rounds[1:]) > 0 and figures.steps[0] <= 3
    assert len(dense) == 3 and no_threads_left()
    if rule.has_centre:
        np.testing.assert_array_equal(dense[1].params["w"], dense[2].params["w"])  # the centre, after both


def every(steps, kind):
    return {"every_steps": steps} if kind is Foreground else {}


def lasting(number, batches, made):
    """So many batches of one that is not dropped, and as many more as a round of its own needs."""
    for count, batch in enumerate(stream(number, 20_000)):
        if count >= batches and made[number].rounds:
            return
        yield batch


def test_all_dropped_is_a_failure_and_ctrl_c_of_one_drops_nobody():
    tables = HostTables.create(SPEC, sgd(0.1))
    make = lambda: synchronisers(Shadow, model_averaging(), 2, on_failure="drop")
    with pytest.raises(OSError, match="disk"):
        both = [raising(OSError("no disk")), raising(OSError("no disk"))]
        train_freely(SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, both, make())
    with pytest.raises(KeyboardInterrupt) as caught:
        streams = [raising(KeyboardInterrupt()), stream(1, 10**9)]
        train_freely(SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, streams, make(), 2)
    assert "of trainer 0" in caught.value.__notes__[0]
    assert no_threads_left()


def test_at_a_centre_that_all_have_left_meanwhile_a_trainer_that_asks_again_is_at_its_end():
    centre, brought = Centre(easgd(), PARAMS, 2, timeout_s=0.1, on_failure="drop"), [np.ones((1, 4), np.float32)]
    for trainer in (0, 1):
        centre.join(trainer)
    keep_on = threading.Event()

    def train():
        while not keep_on.wait(0.02):  # the other is seen all the time: nobody is overdue
            centre.meet(1, brought, False)

    other = threading.Thread(target=train)
    other.start()
    _, last = centre.meet(0, brought, True)
    keep_on.set()
    other.join()
    assert not last
    centre.leave(1)
    assert centre.meet(0, brought, True)[1]
    with pytest.raises(ValueError, match="has finished"):
        centre.meet(0, brought, True)


class Broken(AllToAll):
    """A transport that raises in the third round of trainer 1."""

    rounds_of_1 = 0

    def meet(self, trainer, before, done):
        if trainer == 1 and self.rounds_of_1 == 2:
            raise ConnectionError("the cable is cut")
        self.rounds_of_1 += trainer == 1
        return super().meet(trainer, before, done)


@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_what_a_transport_raises_comes_out_and_not_that_others_were_left(kind):
    tables = HostTables.create(SPEC, sgd(0.1))
    make = synchronisers(kind, model_averaging(), 3, of=Broken, **every(1, kind))
    with pytest.raises(ConnectionError, match="cable") as caught:
        streams = [stream(i, 10**9) for i in range(3)]
        train_freely(SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, streams, make, 2)
    assert "trainer 1" in caught.value.__notes__[0]
    assert no_threads_left()


def test_a_transport_that_never_returns_does_not_keep_training_from_leaving():
    entered, wake = threading.Event(), threading.Event()

    class Stuck(AllToAll):
        def meet(self, trainer, before, done):
            entered.set()
            assert wake.wait(60)
            return super().meet(trainer, before, done)

    def broken():
        for batch in stream(0, 20_000):
            if entered.is_set():
                raise OSError("the disk is gone")
            yield batch

    tables, make = HostTables.create(SPEC, sgd(0.1)), synchronisers(Shadow, model_averaging(), 1, of=Stuck)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        train_freely(SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, [broken()], make, leave_timeout_s=0.2)
    assert "synchronisation-0" in caught.value.__notes__[-1]
    left = [thread for thread in threading.enumerate() if thread.name.startswith(("shadow", "synchronisation"))]
    wake.set()
    for thread in left:
        thread.join(30)
    assert len(left) == 2 and no_threads_left()


@pytest.mark.parametrize("rule", [model_averaging(), easgd()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_a_trainer_whose_stream_blocks_is_dropped_and_left_behind_by_name(kind, rule):
    wake = threading.Event()

    def blocking():
        yield from stream(0, 3)
        assert wake.wait(60)
        yield from stream(0, 3)

    make = synchronisers(kind, rule, 2, on_failure="drop", timeout_s=0.5, **every(2, kind))
    tables = HostTables.create(SPEC, sgd(0.1))
    with pytest.warns(RuntimeWarning) as told:
        _, figures = train_freely(
            SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, [stream(1, 5), blocking()], make, leave_timeout_s=0.2
        )
    words = " ".join(str(each.message) for each in told)
    assert "trainer 1 was dropped: Left: trainer 1 was last seen" in words and "trainer-1 did not end within" in words
    assert list(figures.failures) == [1] and figures.steps == [5, 3]
    left = [thread for thread in threading.enumerate() if thread.name == "trainer-1"]
    wake.set()
    for thread in left:
        thread.join(30)
    assert len(left) == 1 and no_threads_left() and figures.steps == [5, 3]


@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_ctrl_c_again_and_again_while_leaving_leaves_no_synchroniser_behind(monkeypatch, kind):
    armed, ended, meets, wake = [], [], [], threading.Event()

    class Counting(AllToAll):
        def meet(self, trainer, before, done):
            meets.append(bool(ended))
            return super().meet(trainer, before, done)

    def pause():
        threading.Event().wait(0.002)
        if armed:
            signal.raise_signal(signal.SIGINT)

    def hook(trainer, step, metrics):
        if trainer == 1 and step == 3:
            armed.append(True)
            assert wake.wait(60)

    monkeypatch.setattr("jaxrec.shadowsync.trainers._pause", pause)
    make = synchronisers(kind, model_averaging(), 3, of=Counting, **every(1, kind))
    tables, streams = HostTables.create(SPEC, sgd(0.1)), [stream(i, 10**9) for i in range(3)]
    with pytest.raises(KeyboardInterrupt) as caught:
        train_freely(SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, streams, make, hook=hook)
    ended.append(True)
    left = [t for t in threading.enumerate() if t.name.startswith(("trainer", "shadow", "synchronisation"))]
    wake.set()
    for thread in left:
        thread.join(30)
    assert no_threads_left() and not any(meets)
    assert "s, when Ctrl-C came again" in caught.value.__notes__[-1] and "within 10 s" not in caught.value.__notes__[-1]


def train_for_ever(way):
    """Trainer 0 is soon done and waits for trainer 1, which never is."""
    kind, rule, more = WAYS[way] if way != "none" else (None, None, {})

    class Telling(Centre if rule and rule.has_centre else AllToAll):
        def meet(self, trainer, before, done):
            if done:
                print("finishing", flush=True)
            return super().meet(trainer, before, done)

    make = kind and synchronisers(kind, rule, 2, of=Telling, **more)
    streams = [stream(0, 5), stream(1, 10**9)]
    train_freely(SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, HostTables.create(SPEC, sgd(0.1)), streams, make, 2)


def child():
    """Trains until SIGINT, again and again, and tells in a line which threads of Python are still at work."""
    before = set(sys._current_frames())  # `threading.enumerate` may leave out a thread that Ctrl-C hit in a `join`
    for way in itertools.cycle(["none", *WAYS]):
        told = {"way": way, "raised": None}
        try:
            print("training", flush=True)
            train_for_ever(way)
        except KeyboardInterrupt:
            told["raised"] = "KeyboardInterrupt"
        told["left"] = len(set(sys._current_frames()) - before)
        told["names"] = [thread.name for thread in threading.enumerate()]
        print(json.dumps(told), flush=True)


@pytest.mark.timeout(200)
def test_ctrl_c_at_any_instant_ends_all_threads():
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "import test_trainers; test_trainers.child()"]
    instants, told = random.Random(3), []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}) as process:
        lines = iter(process.stdout.readline, "")
        try:
            for number in range(14):
                way = ["none", *WAYS][number % (len(WAYS) + 1)]
                wanted = "training" if number % 2 or way == "none" else "finishing"
                assert wanted in (line.strip() for line in lines)  # reads as far as it
                threading.Event().wait(instants.random() * 0.6)
                process.send_signal(signal.SIGINT)
                told.append(json.loads(next(line for line in lines if line.startswith("{"))))
        finally:
            process.kill()
    assert [each["way"] for each in told] == (3 * ["none", *WAYS])[:14]
    assert [each["raised"] for each in told] == ["KeyboardInterrupt"] * 14, told
    assert [each["names"] for each in told] == [["MainThread"]] * 14
    assert [each["left"] for each in told] == [0] * 14


def test_all_devices_take_turns_and_a_gap_without_rounds_is_infinite():
    devices = jax.local_devices()
    dense, figures = train_freely(
        SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, HostTables.create(SPEC, sgd(0.1)),
        [stream(i, 2) for i in range(3)], devices=devices[:2],
    )  # fmt: skip
    assert [next(iter(state.params["w"].devices())) for state in dense] == [devices[i] for i in (0, 1, 0)]
    assert figures.average_sync_gap_per_worker == [float("inf")] * 3 and figures.failures == {}


def test_bad_input_is_refused():
    tables = HostTables.create(SPEC, sgd(0.1))
    with pytest.raises(ValueError, match="leave_timeout_s=-1"):
        train_freely(SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, [stream(0, 1)], leave_timeout_s=-1)
    for streams, workers in (([], 1), ([stream(0, 1)], 0)):
        with pytest.raises(ValueError, match="must be 1 or more"):
            train_freely(SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, streams, workers_per_trainer=workers)
