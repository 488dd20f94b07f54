"""Free trainers that fail, block or are interrupted: the failed one is named, the others end or continue."""

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
import numpy as np
import pytest
from free_trainers import (
    PARAMS,
    SPEC,
    WAYS,
    every,
    freely,
    lasting,
    raising,
    stream,
    synchronisers,
)
from meetings import Clock, in_meet
from world import frames, join_all, no_threads_left, until, workers

from jaxrec.embedding import HostTables, sgd
from jaxrec.shadowsync import AllToAll, Centre, Foreground, Shadow, easgd, model_averaging


@pytest.mark.parametrize(
    ("where", "kind"), [("stream", None), ("stream", Shadow), ("stream", Foreground), ("hook", None), ("hook", Shadow)]
)
def test_a_failure_stops_everybody_and_its_worker_is_named(where, kind):
    def hook(trainer, step, metrics):
        if where == "hook" and (trainer, step) == (1, 5):
            raise OSError("the disk is gone")

    broken = raising(OSError("the disk is gone")) if where == "stream" else stream(1, 10**6)
    make, tables = kind and synchronisers(kind, easgd(), 2, **every(2, kind)), HostTables.create(SPEC, sgd(0.1))
    with pytest.raises(OSError, match="the disk is gone") as caught:
        freely(tables, [stream(0, 10**6), broken], make, 2, hook=hook)
    assert "in worker" in caught.value.__notes__[0] and "of trainer 1" in caught.value.__notes__[0]
    assert no_threads_left()


class Blocks:
    """Trainer 0 blocks in its stream or in a read of rows until `wake` is set; trainer 1 fails meanwhile."""

    def __init__(self, where, read=HostTables.read):
        self.where, self.read_rows, self.blocked, self.wake = where, read, threading.Event(), threading.Event()
        self.steps = []  # steps of trainer 0

    def block(self):
        self.blocked.set()
        assert self.wake.wait(60)

    def stream(self):
        yield from stream(0, 3)
        if self.where == "stream":
            self.block()
        yield from stream(1, 3)

    def read(self, tables, plans):
        if self.where == "read" and threading.current_thread().name.startswith("trainer-0"):
            self.block()
        return self.read_rows(tables, plans)

    def hook(self, trainer, step, metrics):
        if trainer == 0:
            self.steps.append(step)

    def broken(self):
        yield from stream(1, 3)
        assert self.blocked.wait(60)
        if self.where == "stream":
            until(lambda: len(self.steps) == 3)  # its other worker has finished its writes
        raise OSError("the disk is gone")


@pytest.mark.parametrize("where", ["stream", "read"])
def test_what_blocks_is_left_behind_by_name_and_writes_nothing_when_it_wakes(monkeypatch, where):
    blocks, tables = Blocks(where), HostTables.create(SPEC, sgd(0.1))
    monkeypatch.setattr(HostTables, "read", lambda *given: blocks.read(*given))
    make, streams = synchronisers(Shadow, model_averaging(), 2), [blocks.stream(), blocks.broken()]
    monkeypatch.setattr("jaxrec.shadowsync.workers.LEAVE_S", 0.2)
    with (
        pytest.warns(RuntimeWarning, match="trainer-0.* did not end within 0.2 s"),
        pytest.raises(OSError, match="disk"),
    ):
        freely(tables, streams, make, 2, hook=blocks.hook)
    join_all(workers("trainer-1"))  # on a busy machine they may be late
    as_left = jax.tree.map(np.array, tables.shards)
    left = workers()
    blocks.wake.set()
    join_all(left)
    assert [thread for thread in left if thread.name == "trainer-0"] and no_threads_left()
    jax.tree.map(np.testing.assert_array_equal, tables.shards, as_left)


@pytest.mark.parametrize("rule", [model_averaging(), easgd()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_a_failing_trainer_is_dropped_and_the_others_finish(kind, rule):
    make = synchronisers(kind, rule, 3, on_failure="drop", **every(2, kind))
    made, tables = [make(number) for number in range(3)], HostTables.create(SPEC, sgd(0.1))
    streams = [raising(OSError("the disk is gone")), *(lasting(i, 30, made) for i in (1, 2))]
    with pytest.warns(RuntimeWarning, match="trainer 0 was dropped: OSError: the disk is gone"):
        dense, figures = freely(tables, streams, made.__getitem__, 2)
    assert list(figures.failures) == [0] and str(figures.failures[0]) == "the disk is gone"
    assert "of trainer 0" in figures.failures[0].__notes__[0]
    assert min(figures.steps[1:]) >= 30 and min(figures.rounds[1:]) > 0 and figures.steps[0] <= 3
    assert len(dense) == 3 and no_threads_left()
    if rule.has_centre:
        np.testing.assert_array_equal(dense[1].params["w"], dense[2].params["w"])  # the centre after both trainers


def test_all_dropped_is_a_failure_and_ctrl_c_of_one_drops_nobody():
    tables = HostTables.create(SPEC, sgd(0.1))
    make = lambda: synchronisers(Shadow, model_averaging(), 2, on_failure="drop")
    with pytest.raises(OSError, match="disk"):
        both = [raising(OSError("no disk")), raising(OSError("no disk"))]
        freely(tables, both, make())
    with pytest.raises(KeyboardInterrupt) as caught:
        streams = [raising(KeyboardInterrupt()), stream(1, 10**9)]
        freely(tables, streams, make(), 2)
    assert "of trainer 0" in caught.value.__notes__[0]
    assert no_threads_left()


class Broken(AllToAll):
    """A transport that raises in the third round of trainer 1."""

    rounds_of_1 = 0

    def sync_round(self, trainer, before, done):
        if trainer == 1 and self.rounds_of_1 == 2:
            raise ConnectionError("the cable is cut")
        self.rounds_of_1 += trainer == 1
        return super().sync_round(trainer, before, done)


@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_what_a_transport_raises_comes_out_and_not_that_others_were_left(kind):
    tables = HostTables.create(SPEC, sgd(0.1))
    make = synchronisers(kind, model_averaging(), 3, of=Broken, **every(1, kind))
    with pytest.raises(ConnectionError, match="cable") as caught:
        streams = [stream(i, 10**9) for i in range(3)]
        freely(tables, streams, make, 2)
    assert "trainer 1" in caught.value.__notes__[0]
    assert no_threads_left()


def test_what_a_round_of_a_dropped_trainer_raises_is_told_once():
    make = synchronisers(Shadow, model_averaging(), 2, of=Broken, on_failure="drop")
    with pytest.warns(RuntimeWarning) as told:
        freely(HostTables.create(SPEC, sgd(0.1)), [stream(0, 5), stream(1, 10**9)], make)
    assert ["cable" in str(each.message) for each in told] == [True]


@pytest.mark.parametrize("rule", [model_averaging(), easgd()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_a_trainer_whose_stream_blocks_is_dropped_and_left_behind_by_name(kind, rule, monkeypatch):
    """The clock stands until trainer 1 blocks and trainer 0 waits for it, so compiling makes no other overdue."""
    clock, blocked, wake = Clock(monkeypatch), threading.Event(), threading.Event()
    transport = (Centre if rule.has_centre else AllToAll)(rule, PARAMS, 2, timeout_s=0.5, on_failure="drop")

    def blocking():
        yield from stream(0, 3)
        blocked.set()
        assert wake.wait(60)
        yield from stream(0, 3)

    def time_passes():
        until(lambda: blocked.is_set() and {"trainer-0", "shadow-0"} & {*in_meet(transport)})
        gone = lambda: transport.exit_reason(1)
        while not gone():
            clock.goes_on(0.3, transport, 0, unless=gone)

    (passing := threading.Thread(target=time_passes)).start()
    tables, make = HostTables.create(SPEC, sgd(0.1)), lambda number: kind(transport, number, **every(2, kind))
    monkeypatch.setattr("jaxrec.shadowsync.workers.LEAVE_S", 0.2)
    with pytest.warns(RuntimeWarning) as told:
        _, figures = freely(tables, [stream(1, 5), blocking()], make)
    words = " ".join(str(each.message) for each in told)
    assert (
        "trainer 1 was dropped: PeerLeft: trainer 1 was last seen" in words and "trainer-1 did not end within" in words
    )
    assert list(figures.failures) == [1] and figures.steps == [5, 3]
    left = workers()
    wake.set()
    join_all([*left, passing])
    assert "trainer-1" in {thread.name for thread in left} and no_threads_left() and figures.steps == [5, 3]


def train_for_ever(way):
    """Trainer 0 finishes early and waits for trainer 1, which never finishes."""
    kind, rule, more = WAYS[way] if way != "none" else (None, None, {})

    class Telling(Centre if rule and rule.has_centre else AllToAll):
        def sync_round(self, trainer, before, done):
            if done:
                print("finishing", flush=True)
            return super().sync_round(trainer, before, done)

    make = kind and synchronisers(kind, rule, 2, of=Telling, **more)
    streams = [stream(0, 5), stream(1, 10**9)]
    freely(HostTables.create(SPEC, sgd(0.1)), streams, make, 2)


def child():
    """Train until SIGINT, repeatedly; print a JSON line with the Python threads that are left."""
    before = set(frames())  # `threading.enumerate` may leave out a thread that Ctrl-C hit in a `join`
    for way in itertools.cycle(["none", *WAYS]):
        told = {"way": way, "raised": None}
        try:
            print("training", flush=True)
            train_for_ever(way)
        except KeyboardInterrupt:
            told["raised"] = "KeyboardInterrupt"
        told["left"] = len(set(frames()) - before)
        told["names"] = [thread.name for thread in threading.enumerate()]
        print(json.dumps(told), flush=True)


@pytest.mark.process
@pytest.mark.random_instant
@pytest.mark.timeout(200)
def test_ctrl_c_at_any_instant_ends_all_threads():
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "import test_trainer_failures; test_trainer_failures.child()"]
    instants, told = random.Random(3), []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}) as process:
        lines = iter(process.stdout.readline, "")
        try:
            for number in range(14):
                way = ["none", *WAYS][number % (len(WAYS) + 1)]
                wanted = "training" if number % 2 or way == "none" else "finishing"
                assert wanted in (line.strip() for line in lines)  # reads up to that line
                threading.Event().wait(instants.random() * 0.6)
                process.send_signal(signal.SIGINT)
                told.append(json.loads(next(line for line in lines if line.startswith("{"))))
        finally:
            process.kill()
    assert [each["way"] for each in told] == (3 * ["none", *WAYS])[:14]
    assert [each["raised"] for each in told] == ["KeyboardInterrupt"] * 14, told
    assert [each["names"] for each in told] == [["MainThread"]] * 14
    assert [each["left"] for each in told] == [0] * 14


def test_of_two_errors_of_a_dropped_trainer_the_first_is_its_failure():
    class NoWayOut(AllToAll):
        def leave(self, trainer, error=None):
            super().leave(trainer, error)
            if error is not None:
                raise OSError("no way out")

    make = synchronisers(Shadow, model_averaging(), 2, of=NoWayOut, on_failure="drop")
    streams, tables = [raising(OSError("the disk is gone")), stream(1, 5)], HostTables.create(SPEC, sgd(0.1))
    with pytest.warns(RuntimeWarning) as told:
        _, figures = freely(tables, streams, make)
    assert [str(error) for error in figures.failures.values()] == ["the disk is gone"] and no_threads_left()
    assert [word for each in told for word in ("disk", "way out") if word in str(each.message)] == ["disk", "way out"]
