"""Crews on Ray, of whom everybody is killed: the run ends, every example is counted once, and nobody is left behind."""

import contextlib
import os
import signal
import threading
import time

import pytest
from test_cluster import is_alive
from test_trainers import CLICKS, OWN, SPEC, work

from jaxrec.cluster import Cluster, GivenUp, Supervisor
from jaxrec.cluster.crew import Crew
from jaxrec.shadowsync import easgd, model_averaging

pytest.importorskip("ray", reason="Ray is not installed: `make cluster`, or pip install -e '.[cluster]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore:.*(begins again|has taken|another one has|is given up|not saved):UserWarning"),
]
STEPS, BATCH = 150, 16
RULES = {"easgd": easgd(), "ma": model_averaging()}


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def servers(cluster):
    """Of tests in which nobody dies."""
    with contextlib.closing(Supervisor(cluster, SPEC, OWN[1], 1)) as servers:
        yield servers


def paced(trainer, trainers):
    """Batches that take a while, so that a kill finds somebody at work."""

    def stream(start):
        for number in range(start, STEPS):
            threading.Event().wait(0.02)
            yield CLICKS.batch(number * trainers + trainer, BATCH)

    return stream


@contextlib.contextmanager
def crew_of(cluster, tmp_path=None, rule="ma", **options):
    servers = Supervisor(cluster, SPEC, OWN[1], 2, directory=tmp_path, timeout_s=10)
    of_work = work(batches=paced, rule=RULES.get(rule), pace_seconds=0.05, workers=2)
    options = {"trainers": 2, "timeout_s": 5, "places": 2 if rule == "easgd" else 1, "directory": tmp_path} | options
    with contextlib.closing(servers), Crew(cluster, servers, of_work, **options) as crew:
        yield servers, crew


class Killer:
    """Sends a signal to some processes, once a trainer has come so far."""

    def __init__(self, servers, number, kinds, at=20):
        self.servers, self.number, self.kinds, self.at = servers, number, kinds, at
        self.sent, self.position = [], None

    def __call__(self, crew):
        positions = [one.position for one in crew.reached]
        if not self.sent and min(positions) >= self.at:
            of = {"trainer": crew.processes, "place": crew.place_processes, "server": self.servers.processes}
            self.sent, self.position = [of[kind][-1] for kind in self.kinds], positions[0]
            for process in self.sent:
                os.kill(process, self.number)


def gone(processes, seconds=20):
    end = time.monotonic() + seconds
    while any(map(is_alive, processes)) and time.monotonic() < end:
        threading.Event().wait(0.05)
    return not any(map(is_alive, processes))


@pytest.mark.parametrize(
    ("rule", "number", "kinds"),
    [
        ("ma", signal.SIGSTOP, ["trainer"]),
        ("easgd", signal.SIGKILL, ["trainer", "place", "server"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else str(value),
)
def test_a_run_survives_whoever_dies_and_counts_every_example_once(cluster, tmp_path, rule, number, kinds):
    with crew_of(cluster, tmp_path, rule, save_every_seconds=0.5) as (servers, crew):
        killer = Killer(servers, number, kinds)
        params, figures = crew.run(killer)
        processes = [*crew.processes, *crew.place_processes, *servers.processes, *killer.sent]
    assert figures.examples == 2 * STEPS * BATCH and figures.examples_lost == 0 and len(params) == 2
    assert {fall.kind for fall in figures.falls} >= set(kinds), figures.falls  # on a slow machine more seem dead
    assert all(rounds > 0 for rounds in figures.rounds) and sum(figures.steps) <= 2 * STEPS
    assert gone(processes)
    if number == signal.SIGSTOP:  # the other one has trained on, long before anybody knew
        assert figures.falls[0].at_s > 5 and "has said nothing for 5 s" in figures.falls[0].why


def test_a_successor_that_dies_before_it_trains_loses_and_repeats_nothing(cluster):
    with crew_of(cluster, rule=None) as (servers, crew):
        first, seen = Killer(servers, signal.SIGKILL, ["trainer"]), []

        def kill_again(crew):
            first(crew)
            successor = crew.processes[-1]
            if first.sent and not seen and successor not in (None, *first.sent):
                seen.append((successor, crew.reached[-1].position))
                os.kill(successor, signal.SIGKILL)

        _, figures = crew.run(kill_again)
    assert len(figures.falls) >= 2 and seen[0][1] >= first.at
    assert figures.examples == 2 * STEPS * BATCH and sum(figures.steps) <= 2 * STEPS


def test_a_trainer_that_dies_too_often_is_given_up_and_what_it_lacks_is_lost(cluster):
    with crew_of(cluster, most_deaths=0) as (servers, crew):
        params, figures = crew.run(Killer(servers, signal.SIGKILL, ["trainer"]))
    assert len(params) == 1 and figures.examples_lost > 0
    assert figures.examples + figures.examples_lost == 2 * STEPS * BATCH
    assert figures.pls == figures.examples_lost / (2 * STEPS * BATCH)
    with crew_of(cluster, trainers=1, most_deaths=0) as (servers, crew), pytest.raises(GivenUp, match="all trainers"):
        crew.run(Killer(servers, signal.SIGKILL, ["trainer"]))


def test_without_a_rule_nobody_meets_and_cores_are_kept(cluster):
    with crew_of(cluster, rule=None, cores=[[0], [0]]) as (_, crew):
        masks = []

        def look(crew):
            if all(one.steps for one in crew.reached):
                threads = [int(t) for pid in crew.processes for t in os.listdir(f"/proc/{pid}/task")]
                masks.append([os.sched_getaffinity(thread) for thread in threads])

        _, figures = crew.run(look)
    assert figures.rounds == [0, 0] and figures.examples == 2 * STEPS * BATCH and figures.replica_spread > 0
    assert any({0} in mask for mask in masks)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trainers": 0}, "trainers=0"),
        ({"cores": [[0]]}, "cores has 1 lists and there are 2"),
        ({"places": 2}, "takes at most 1"),
        ({"save_every_seconds": 1.0}, "needs the directory"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"most_deaths": -1}, "most_deaths=-1"),
    ],
)
def test_what_a_crew_cannot_be_is_refused_before_anybody_is_started(cluster, servers, options, words):
    with pytest.raises(ValueError, match=words):
        Crew(cluster, servers, work(rule=RULES["ma"]), **options)


def test_a_crew_that_was_not_entered_and_one_that_fails_say_so(cluster, servers):
    crew = Crew(cluster, servers, work())
    with pytest.raises(ValueError, match="was not entered"):
        crew.run()
    wrong = work(batches=lambda trainer, trainers: lambda start: iter([1 / trainer]))
    with Crew(cluster, servers, wrong) as crew, pytest.raises(RuntimeError, match=r"trainer \d has failed: "):
        crew.run()
