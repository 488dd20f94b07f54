"""Processes of this machine, without Ray: calls, deaths, the driver's end; and pools of trainers that share tables."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import optax
import pytest
from threads import until

from jaxrec.cluster import Machine, Supervisor
from jaxrec.cluster.pool import TrainerPool
from jaxrec.cluster.processes import Process
from jaxrec.cluster.trainers import TrainerWork
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, sgd
from jaxrec.embedding.servers import ServerGone
from jaxrec.shadowsync import SyncGroup, bmuf, easgd, model_averaging, train_freely
from jaxrec.task import Task
from jaxrec.types import Batch

ROWS, STEPS, BATCH = 40, 30, 8
TURN_TIMEOUT_S = 120.0
SPEC = EmbeddingSpec({"item": Table(ROWS, 2)}, {"item": Lookup("item")}, shards=2)
RULES = {"none": None, "easgd": easgd(), "ma": model_averaging()}


class Desk:
    """An object with calls that answer, raise, wait for each other, and cannot be sent."""

    def __init__(self, greeting):
        self.greeting, self.rung = greeting, threading.Event()

    def greet(self, name):
        return f"{self.greeting}, {name}"

    def fail(self):
        raise KeyError("no such key")

    def wait(self):
        return self.rung.wait(60)

    def ring(self):
        self.rung.set()

    def is_rung(self):
        return self.rung.is_set()

    def unsendable(self):
        return threading.Lock()

    def back(self, what):
        return what

    def terminated(self):
        """Return how a program ends that this process starts and asks to end."""
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        return program.wait()


def test_calls_are_answered_and_deaths_are_noticed():
    with Machine() as machine:
        directory, desk = machine.directory, machine.process(Desk, "the desk", ("Hello",))
        waiting = desk.handle.call("wait")
        assert desk.handle.call("greet", "Ann").result(60) == "Hello, Ann" and desk.death_reason() == ""
        with pytest.raises(TimeoutError):
            waiting.result(0)
        with pytest.raises(KeyError, match="no such key"):
            desk.handle.call("fail").result(60)
        with pytest.raises(RuntimeError, match="the answer of unsendable cannot be sent"):
            desk.handle.call("unsendable").result(60)
        desk.handle.call("ring")
        assert waiting.result(60) is True and waiting.result() is True
        assert desk.info.result(60).pid == desk.pid and os.stat(directory).st_mode & 0o77 == 0
        while desk.poll("is_rung") is None:
            threading.Event().wait(0.01)
        os.kill(desk.pid, signal.SIGSTOP)
        assert desk.poll("is_rung") is None
        threading.Event().wait(0.3)
        assert "has not answered for 0.2 s" in desk.death_reason(0.2)
        pending = desk.handle.call("greet", "Bob")
        desk.kill()
        with pytest.raises(ServerGone, match="the desk has ended"):
            pending.result(60)
        with pytest.raises(ServerGone, match="the desk has ended"):
            desk.handle.call("greet", "Bob").result(60)
        assert desk.death_reason() == "the desk has ended with code -9"
    assert not directory.exists()


class Unreadable:
    def __reduce__(self):
        return int, ("unreadable",)


def test_what_ends_all_processes_of_a_run_is_for_its_driver_and_what_cannot_be_read_is_answered():
    with Machine() as machine:
        desk = machine.process(Desk, "the desk", ("Hello",))
        assert desk.handle.call("greet", "Ann").result(60)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(desk.pid, number)
        assert desk.handle.call("terminated").result(60) == -signal.SIGTERM
        with pytest.raises(ValueError, match="unreadable"):
            desk.handle.call("greet", Unreadable()).result(60)
        assert desk.handle.call("greet", "Bob").result(60) == "Hello, Bob" and desk.death_reason() == ""


class Calls(dict):
    """Handle to an object whose calls are futures, {method: future}."""

    def call(self, method, *args):
        return self.setdefault(method, Future())


class Nobody(Process):
    def kill(self):
        raise NotImplementedError

    def _ended(self):
        return ""


def test_a_process_that_nobody_has_asked_for_long_is_not_dead(monkeypatch):
    monkeypatch.setattr("jaxrec.cluster.processes.START_TIMEOUT_S", 0.1)
    calls = Calls()
    process = Nobody("it", calls)
    until(lambda: process.death_reason(0.01) == "it has not started within 0.1 s")
    calls["process_info"].set_result(None)
    assert process.death_reason(0.01) == "" and process.poll("progress") is None
    until(lambda: process.death_reason(0.01) == "it has not answered for 0.1 s")  # for the first time
    calls.pop("progress").set_result("early")
    assert process.poll("progress") == "early" and process.death_reason(0.01) == ""
    assert process.poll("progress") is None
    until(lambda: process.death_reason(0.01) == "it has not answered for 0.01 s")


def test_a_stopped_process_holds_up_no_call_however_large():
    large = os.urandom(1 << 24)
    with Machine() as machine:
        desk = machine.process(Desk, "the desk", ("Hello",))
        for delay_s in (0, *np.linspace(0, 0.03, 8)):  # first before it serves, then at any place of call or answer
            answer = desk.handle.call("back", large)
            threading.Event().wait(delay_s)
            os.kill(desk.pid, signal.SIGSTOP)
            with contextlib.suppress(TimeoutError):
                answer.result(0.02)
            again, start = desk.handle.call("back", large), time.monotonic()
            with pytest.raises(TimeoutError):
                again.result(0.02)
            assert time.monotonic() - start < 10
            os.kill(desk.pid, signal.SIGCONT)
            assert answer.result(60) == again.result(60) == large
        assert len(list(machine.directory.iterdir())) == 1  # its socket: no message stays


DRIVER = """
import os, sys, threading
from jaxrec.cluster import Machine
from test_local_processes import Desk
if __name__ == "__main__":
    with Machine() as machine:
        pid = os.getpid()
        if sys.argv[1] == "True":
            desk = machine.process(Desk, "the desk", ("Hello",))
            desk.handle.call("greet", "Ann").result(60)
            pid = desk.pid
        (machine.directory / "tables").write_text("rows")
        print(pid, machine.directory, flush=True)
        if sys.argv[2] == "killed":
            threading.Event().wait()
"""


@pytest.mark.parametrize(("with_process", "way"), [(True, "killed"), (False, "killed"), (True, "ended")])
def test_a_driver_leaves_no_process_and_nothing_in_shared_memory(tmp_path, with_process, way):
    (tmp_path / "driver.py").write_text(DRIVER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    command = [sys.executable, tmp_path / "driver.py", str(with_process), way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as driver:
        pid, directory = driver.stdout.readline().split()
        if way == "killed":
            driver.kill()
        assert driver.wait(60) == (-signal.SIGKILL if way == "killed" else 0)
    end = time.monotonic() + 30
    while (Path(f"/proc/{int(pid)}").exists() or Path(directory.decode()).exists()) and time.monotonic() < end:
        threading.Event().wait(0.05)
    assert not Path(f"/proc/{int(pid)}").exists() and not Path(directory.decode()).exists()


# Pools


def loss(params, activations, batch):
    """Its gradient of a row is 1 for each use, whatever the rows and parameters are."""
    return activations["item"].sum((1, 2)) + params * batch.label


def batches(trainer, trainers, gate=None):
    """Batches of rows that no other trainer has, at intervals, from the tenth on once there is a file `gate`."""

    def stream(start):
        for number in range(start, STEPS):
            threading.Event().wait(0.02)
            if gate is not None and number >= 10:
                until(gate.exists, TURN_TIMEOUT_S)
            ids = (
                trainers * np.random.default_rng([trainer, number]).integers(0, ROWS // trainers, (BATCH, 1))
            ) + trainer
            yield Batch({"item": ids.astype(np.int32)}, np.ones(BATCH, np.float32))

    return stream


def work_of(rule, gate=None):
    task = Task(SPEC, loss, optax.sgd(0.01), sgd(1.0))
    of_each = functools.partial(batches, gate=gate)
    return TrainerWork(task, np.zeros((), np.float32), of_each, RULES[rule], pace_seconds=0.02)


def pool_of(machine, rule, trainers=2, gate=None, **options):
    tables = HostTables.create(SPEC, sgd(1.0), machine.directory / "tables")
    options = {"timeout_s": 30.0} | options
    return tables, TrainerPool(machine, tables, functools.partial(work_of, rule, gate), trainers, **options)


def uses(trainers=2):
    found = np.zeros(ROWS)
    for trainer in range(trainers):
        for batch in batches(trainer, trainers)(0):
            np.add.at(found, batch.ids["item"], 1)
    return found


def rows(tables):
    return np.stack(tables.parts("width_2")["value"], axis=1).reshape(ROWS, 2)


def test_what_a_machine_cannot_share_and_does_not_have_is_refused():
    tables = HostTables.create(SPEC, sgd(1.0))
    with Machine() as machine:
        with pytest.raises(ValueError, match="create them in a directory"):
            TrainerPool(machine, tables, functools.partial(work_of, "none"))
        with pytest.raises(TypeError, match="resources"), pool_of(machine, "none", resources={"trainer": 1})[1]:
            pass
        with pytest.raises(ValueError, match="processes of a Machine cannot reach the servers of a Cluster"):
            TrainerPool(machine, Supervisor.__new__(Supervisor), functools.partial(work_of, "none"))
    with pytest.raises(ValueError, match="the machine is not entered"):
        TrainerPool(Machine(), tables, functools.partial(work_of, "none"))


@pytest.mark.process
@pytest.mark.parametrize("rule", RULES)
def test_trainers_train_every_batch_once_into_the_rows_that_they_share(rule):
    with Machine() as machine:
        tables, pool = pool_of(machine, rule, cores=[[0], [0]])
        before = rows(tables).copy()
        with pool:
            params, stats = pool.run()
        changed = before - rows(tables)
        directory, processes = machine.directory, [*pool.processes, *pool.sync_server_processes]
    np.testing.assert_allclose(changed, uses()[:, None].repeat(2, 1) / BATCH, rtol=1e-4)
    assert stats.examples == 2 * STEPS * BATCH and stats.steps == [STEPS] * 2 and len(params) == 2
    assert all(stats.rounds) == (rule != "none") and stats.failures == []
    assert not directory.exists() and not any(Path(f"/proc/{pid}").exists() for pid in processes)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(restarts at|its successor has|is given up|no batch for):UserWarning")
@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGKILL, "trainer"), (signal.SIGSTOP, "trainer"), (signal.SIGKILL, "sync server")]
)
def test_a_dead_process_is_replaced_and_every_example_counts_once(tmp_path, number, kind):
    with Machine() as machine:
        gate = tmp_path / "gate"
        _, pool = pool_of(machine, "ma", gate=gate, timeout_s=5.0, directory=tmp_path, save_every_seconds=0.2)
        hit = []

        def strike(pool):
            if not hit and min(one.position for one in pool.progress) >= 5:
                hit.append((pool.processes if kind == "trainer" else pool.sync_server_processes)[-1])
                os.kill(hit[0], number)
                gate.touch()

        with pool:
            params, stats = pool.run(strike)
        processes = [*hit, *pool.processes, *pool.sync_server_processes]
    assert stats.examples == 2 * STEPS * BATCH and stats.examples_lost == 0 and len(params) == 2
    assert {failure.kind for failure in stats.failures} >= {kind} and list(tmp_path.glob("step_*"))
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)


@pytest.mark.process
@pytest.mark.slow
def test_an_error_of_a_trainer_names_it():
    with Machine() as machine:
        tables = HostTables.create(SPEC, sgd(1.0), machine.directory / "tables")
        with (
            TrainerPool(machine, tables, wrong_work, 1) as pool,
            pytest.raises(RuntimeError, match="trainer 0 has failed"),
        ):
            pool.run()


def wrong_work():
    return work_of("none")._replace(batches=lambda trainer, trainers: lambda start: iter([1 / trainer]))


# A run whose order is scripted, in threads and in processes

SCRIPTED = {
    "easgd": easgd(0.3), "sequential": easgd(0.3, form="sequential"), "ma": model_averaging(0.7),
    "bmuf": bmuf(momentum=0.5),
}  # fmt: skip


def curved_loss(params, activations, batch):
    """Its gradients depend on all rows and parameters, so that another order gives other bits."""
    return (activations["item"].sum((1, 2)) * params + params - batch.label) ** 2


def in_turns(directory, script, trainer, trainers):
    """Batches that wait for their turns in a script, the trainers in the order of their steps and exchanges.

    A turn ends when its trainer asks for the next batch, and a stream once all turns are over and the trainers before
    it have made their last exchange. Without a script, trainers meet in every round, and none uses a row of another.
    """

    def stream(start):
        turns = range(5) if script is None else [turn for turn, whose in enumerate(script) if whose == trainer]
        for number, turn in enumerate(turns):
            if script is not None and turn:
                until((directory / str(turn - 1)).exists, TURN_TIMEOUT_S)
            ids = np.random.default_rng([trainer, number]).integers(0, ROWS, (BATCH, 1)).astype(np.int32)
            if script is None:
                ids = ids // trainers * trainers + trainer
            yield Batch({"item": ids % ROWS}, np.linspace(0, 1, BATCH, dtype=np.float32))
            (directory / str(turn)).touch()
        if script is not None:
            until(lambda: (directory / "exchanges").stat().st_size >= len(script) + trainer, TURN_TIMEOUT_S)

    return stream


def noting(rule, directory):
    """Return a rule that adds a byte to a file in each exchange with the centre."""

    def combine(centre, before):
        with open(directory / "exchanges", "ab") as file:
            file.write(b".")
        return rule.combine(centre, before)

    return rule._replace(combine=combine) if rule.has_centre else rule


def scripted_work(rule, directory, script):
    task = Task(SPEC, curved_loss, optax.adam(0.05), sgd(0.1))
    batches = functools.partial(in_turns, directory, script)
    return TrainerWork(task, np.ones((), np.float32), batches, noting(SCRIPTED[rule], directory), every_steps=1)


def by_threads(rule, directory, script):
    directory.mkdir()
    work, tables = scripted_work(rule, directory, script), HostTables.create(SPEC, sgd(0.1))
    group = SyncGroup(work.rule, work.params, 2, every_steps=1, timeout_s=TURN_TIMEOUT_S)
    states, _ = train_freely(work.task, work.params, tables, [work.batches(n, 2)(0) for n in range(2)], group.trainer)
    return [*(np.array(state.params) for state in states), rows(tables)]


def by_processes(rule, directory, script):
    directory.mkdir()
    with Machine() as machine:
        tables = HostTables.create(SPEC, sgd(0.1), machine.directory / "tables")
        work = functools.partial(scripted_work, rule, directory, script)
        with TrainerPool(machine, tables, work, 2, timeout_s=TURN_TIMEOUT_S) as pool:
            params, stats = pool.run()
        assert stats.failures == []
        return [*params, rows(tables).copy()]


def same(a, b):
    return all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.process
@pytest.mark.parametrize("rule", SCRIPTED)
def test_a_scripted_run_of_processes_has_the_bits_of_threads(rule, tmp_path):
    drawn = np.random.default_rng(0).permutation([0, 1] * 5)
    if SCRIPTED[rule].has_centre:
        script, *control = drawn, rule, 1 - drawn
    else:
        script, *control = None, "ma" if rule == "bmuf" else "bmuf", None
    found = by_processes(rule, tmp_path / "processes", script)
    assert same(found, by_threads(rule, tmp_path / "threads", script))
    assert not same(found, by_threads(control[0], tmp_path / "control", control[1]))
