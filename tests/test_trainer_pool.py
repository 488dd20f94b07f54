"""Trainer pools on Ray with killed processes: the run ends, every example counts once, no process is left."""

import contextlib
import os
import signal
import threading
import time

import pytest
from trainer_work import CLICKS, OWN, SPEC, work
from watching import command_of

from jaxrec.cluster import Cluster, GivenUp, Supervisor
from jaxrec.cluster.pool import TrainerPool
from jaxrec.shadowsync import easgd, model_averaging

pytest.importorskip("ray", reason="Ray is not installed: `make cluster`, or pip install -e '.[cluster]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings(
        "ignore:.*(restarts at|has taken|its successor has|is given up|not saved|no batch for):UserWarning"
    ),
]
STEPS, BATCH = 150, 16
RULES = {"easgd": easgd(), "ma": model_averaging()}


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def servers(cluster):
    """Servers for tests in which no server dies."""
    with contextlib.closing(Supervisor(cluster, SPEC, OWN[1], 1)) as servers:
        yield servers


def paced(trainer, trainers):
    """Batches at intervals, so that a kill finds the trainers running."""

    def stream(start):
        for number in range(start, STEPS):
            threading.Event().wait(0.02)
            yield CLICKS.batch(number * trainers + trainer, BATCH)

    return stream


@contextlib.contextmanager
def pool_of(cluster, tmp_path=None, rule="ma", **options):
    servers = Supervisor(cluster, SPEC, OWN[1], 2, directory=tmp_path, timeout_s=10)
    of_work = work(batches=paced, rule=RULES.get(rule), pace_seconds=0.05, workers=2)
    servers_of_rule = 2 if rule == "easgd" else 1
    options = {"trainers": 2, "timeout_s": 5, "sync_servers": servers_of_rule, "directory": tmp_path} | options
    with contextlib.closing(servers), TrainerPool(cluster, servers, of_work, **options) as pool:
        yield servers, pool


class Killer:
    """Sends a signal to the last process of each kind, once all trainers have reached position `at`."""

    def __init__(self, servers, number, kinds, at=20):
        self.servers, self.number, self.kinds, self.at = servers, number, kinds, at
        self.sent, self.position = [], None

    def __call__(self, pool):
        positions = [one.position for one in pool.progress]
        if not self.sent and min(positions) >= self.at:
            of = {"trainer": pool.processes, "sync server": pool.sync_server_processes}
            of["server"] = self.servers.processes
            self.sent, self.position = [of[kind][-1] for kind in self.kinds], positions[0]
            for process in self.sent:
                os.kill(process, self.number)


def have_ended(processes, seconds=20):
    end = time.monotonic() + seconds
    while any(map(command_of, processes)) and time.monotonic() < end:
        threading.Event().wait(0.05)
    return not any(map(command_of, processes))


@pytest.mark.parametrize(
    ("rule", "number", "kinds"),
    [
        ("ma", signal.SIGSTOP, ["trainer"]),
        ("easgd", signal.SIGKILL, ["trainer", "sync server", "server"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else str(value),
)
def test_a_run_survives_deaths_and_counts_every_example_once(cluster, tmp_path, rule, number, kinds):
    with pool_of(cluster, tmp_path, rule, save_every_seconds=0.5) as (servers, pool):
        killer = Killer(servers, number, kinds)
        params, stats = pool.run(killer)
        processes = [*pool.processes, *pool.sync_server_processes, *servers.processes, *killer.sent]
    assert stats.examples == 2 * STEPS * BATCH and stats.examples_lost == 0 and len(params) == 2
    # On a slow machine more processes may time out.
    assert {failure.kind for failure in stats.failures} >= set(kinds), stats.failures
    assert all(rounds > 0 for rounds in stats.rounds) and sum(stats.steps) <= 2 * STEPS
    assert have_ended(processes)
    if number == signal.SIGSTOP:  # detected by the time-out
        assert stats.failures[0].at_s > 5 and "has not answered for 5 s" in stats.failures[0].reason


def test_a_server_that_was_only_slow_is_replaced_and_its_trainers_do_not_wait_for_minutes(cluster, tmp_path):
    with pool_of(cluster, tmp_path, rule=None) as (servers, pool):  # trainers wait 5 s for an answer, the driver 10
        stop = Killer(servers, signal.SIGSTOP, ["server"])

        def stop_for_a_while(pool):
            if not stop.sent:
                stop(pool)
                if stop.sent:
                    threading.Timer(8, os.kill, (stop.sent[0], signal.SIGCONT)).start()

        _, stats = pool.run(stop_for_a_while)
    assert "has not answered trainer" in next(one.reason for one in stats.failures if one.kind == "server")
    assert stats.examples == 2 * STEPS * BATCH and max(stats.waited_for_rows_s) < 120


def test_a_successor_that_dies_before_it_trains_loses_and_repeats_nothing(cluster):
    with pool_of(cluster, rule=None) as (servers, pool):
        first, seen = Killer(servers, signal.SIGKILL, ["trainer"]), []

        def kill_again(pool):
            first(pool)
            successor = pool.processes[-1]
            if first.sent and not seen and successor not in (None, *first.sent):
                seen.append((successor, pool.progress[-1].position))
                os.kill(successor, signal.SIGKILL)

        _, stats = pool.run(kill_again)
    assert len(stats.failures) >= 2 and seen[0][1] >= first.at
    assert stats.examples == 2 * STEPS * BATCH and sum(stats.steps) <= 2 * STEPS


def test_a_trainer_that_dies_too_often_is_given_up_and_what_it_lacks_is_lost(cluster):
    with pool_of(cluster, most_deaths=0) as (servers, pool):
        params, stats = pool.run(Killer(servers, signal.SIGKILL, ["trainer"]))
    assert len(params) == 1 and stats.examples_lost > 0
    assert stats.examples + stats.examples_lost == 2 * STEPS * BATCH
    with pool_of(cluster, trainers=1, most_deaths=0) as (servers, pool), pytest.raises(GivenUp, match="all trainers"):
        pool.run(Killer(servers, signal.SIGKILL, ["trainer"]))


def test_without_a_rule_there_are_no_rounds_and_cores_are_kept(cluster):
    with pool_of(cluster, rule=None, cores=[[0], [0]]) as (_, pool):
        masks = []

        def hook(pool):
            if all(one.steps for one in pool.progress):
                threads = [int(t) for pid in pool.processes for t in os.listdir(f"/proc/{pid}/task")]
                for thread in threads:
                    with contextlib.suppress(ProcessLookupError):  # it has ended since
                        masks.append(os.sched_getaffinity(thread))

        _, stats = pool.run(hook)
    assert stats.rounds == [0, 0] and stats.examples == 2 * STEPS * BATCH and stats.replica_spread > 0
    assert {0} in masks


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trainers": 0}, "trainers=0"),
        ({"cores": [[0]]}, r"cores=\[\[0\]\] is of 1 trainers, and there are 2"),
        ({"sync_servers": 2}, "takes at most 1"),
        ({"save_every_seconds": 1.0}, "needs a directory to save into"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"most_deaths": -1}, "most_deaths=-1"),
    ],
)
def test_wrong_arguments_are_refused_before_any_process_starts(cluster, servers, options, words):
    with pytest.raises(ValueError, match=words):
        TrainerPool(cluster, servers, work(rule=RULES["ma"]), **options)


def test_a_pool_without_a_rule_has_no_parameters_to_save(cluster, servers, tmp_path):
    with pytest.raises(ValueError, match=r"save_every_seconds=1 needs a rule"):
        TrainerPool(cluster, servers, work(), directory=tmp_path, save_every_seconds=1.0)


def test_a_pool_that_is_not_entered_and_a_trainer_that_fails_raise(cluster, servers):
    pool = TrainerPool(cluster, servers, work())
    with pytest.raises(ValueError, match="is not entered"):
        pool.run()
    wrong = work(batches=lambda trainer, trainers: lambda start: iter([1 / trainer]))
    with TrainerPool(cluster, servers, wrong) as pool, pytest.raises(RuntimeError, match=r"trainer \d has failed: "):
        pool.run()
