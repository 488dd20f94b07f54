"""Measurements of killed servers: times of the kills, and breakdown of the recovery.

The experiment itself is slow, as it starts Ray.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cluster_failures import Config, check, kills_of, of_kills, overheads, sized
from cluster_soak import drawn
from cluster_work import SCHEMES, Kill
from hypothesis import given
from hypothesis import strategies as st
from main.cli import refuse_small
from smoke import results, run, smoke
from studies.pool_kills import PoolKiller, pool_figures
from studies.recovery_overheads import ARMS
from studies.server_kills import alive_after


@given(
    seed=st.integers(0, 2**31), kills=st.integers(1, 40), more=st.integers(0, 400), servers=st.integers(1, 8),
    shape=st.floats(0.01, 5),
)  # fmt: skip
def test_kills_fill_the_run_behind_its_beginning_and_follow_from_the_seed(seed, kills, more, servers, shape):
    steps = max(16, 8 * kills) + more
    config = sized(Config(seed=seed, kills=kills, steps=steps, servers=servers, fail_shape=shape))
    plan = kills_of(config)
    assert plan == kills_of(config) and len(plan) == kills
    assert all(1 <= step < steps for step in plan) and set(plan.values()) <= set(range(servers))


def test_a_trace_gives_gaps_in_their_proportions_and_the_servers(tmp_path):
    days = [1.0, 2.0, 4.0, 5.0, 6.0, 9.0]
    kind = {"event_type": "fault_start", "fault_type": {"Level": "a", "Class": "b"}}
    events = [{"event_time": day, "node_id": f"n{index}"} | kind for index, day in enumerate(days)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    found = set()
    for seed in range(20):
        plan = kills_of(sized(Config(seed=seed, kills=2, steps=808, trace=path, servers=2)))
        found.add(tuple(sorted(plan)))
    share = lambda *gaps: tuple(101 + int(sum(gaps[:n]) / sum(gaps) * 706) for n in (1, 2))
    assert found <= {share(1, 2, 1), share(2, 1, 1), share(1, 1, 3)} and len(found) > 1
    with pytest.raises(ValueError, match="has 6 failures: too few for --kills 5"):
        kills_of(sized(Config(kills=5, steps=808, trace=path)))


def of(step=10, start=100.0, repeating=None, checking=0.0):
    """A kill whose parts take 1, 2, 3 and 4 seconds, plus `repeating` seconds of replay."""
    kill = Kill(
        step, 0, start, 0, start + 1, start + 3, start + 6 + checking, start + 10 + checking, None, 20, checking
    )
    kill.caught_up = None if repeating is None else kill.next_step + repeating
    return kill


class Killed:
    def __init__(self, *kills):
        self.kills = list(kills)


def test_the_parts_of_a_kill_add_up_and_what_looking_took_is_left_out():
    parts = of(checking=50.0, repeating=5).seconds()
    assert parts == {"noticing": 1, "starting": 2, "restoring": 3, "resuming": 4, "repeating": 5, "to_next_step": 10}
    killers = {"full": Killed(of(repeating=7)), "vanilla": Killed(of(), of()), "mfu": Killed(of()), "ssu": Killed(of())}
    found = of_kills(killers)
    assert found["full_repeating_s"] == 7 and found["vanilla_restoring_s"] == 6 and found["mfu_starting_s"] == 2
    assert found["seconds_kill_to_next_step"] == found["seconds_kill_to_next_step_max"] == 10


def rows():
    """Figures of all arms; the one without failures takes 100 s."""
    seconds = {"none": 100.0, "full": 150.0, "vanilla": 140.0, "mfu": 120.0, "ssu": 110.0}
    more = {"saves": 5, "saving_s": 10.0, "pls": 0.1, "lost_steps": 0}
    return {arm: {"seconds": at, "test_auc": 0.75 + at * 1e-5} | more for arm, at in seconds.items()}


def test_overheads_are_over_the_run_without_failures():
    killers = {arm: Killed(of(repeating=7 if arm == "full" else None)) for arm in ARMS[1:]}
    found = of_kills(killers)
    measured = overheads(rows(), found)
    assert measured["cpr_overhead_percent"] == measured["mfu_overhead_percent"] == pytest.approx(20)
    assert measured["full_repeating_percent"] == pytest.approx(7) and measured["ssu_saving_percent"] == pytest.approx(
        10
    )
    assert measured["auc_lost_full"] == pytest.approx(-0.0005)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"kills": 0}, "--kills 0 must be a number of at least 1"),
        ({"kills": 3, "steps": 20}, "--kills 3 are too many for --steps 20"),
        ({"servers": 9}, "--servers 9 must be at most 8"),
        ({"save_every_steps": 5}, "--save-every-steps 5 must be at least 8"),
        ({"trainers": 3}, "--trainers 3 is for --kill trainers or sync: add that"),
        ({"kill": ("sync",), "spares": 2}, "--spares 2 is for --kill servers alone"),
        ({"kill": ("trainers",), "save_every_steps": 9.0}, "--save-every-steps 9.0 is for --kill servers alone"),
        ({"trace": Path("a.json"), "fail_shape": 1.0}, "--fail-shape 1.0 is for gaps that are drawn, without --trace"),
        ({"trace": Path("a.json"), "lanl_system": 8}, "--lanl-system 8 is for --trace with LANL's records"),
    ],
    ids=str,
)
def test_flags_that_do_not_go_together_are_refused_before_anything_begins(flags, words):
    with pytest.raises(ValueError, match=words):
        refuse_small(Config(**flags))
        check(Config(**flags))


def test_without_ray_it_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs Ray, which is not installed: pip install 'jaxrec\[cluster\]'"):
        check(Config())


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_all_arms_are_killed_and_end_with_the_bits_of_serial(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: `make cluster`, or pip install -e '.[cluster]'")
    found = smoke(tmp_path, "cluster_failures")
    assert found["kills"] == 4 and found["survivors_bit_identical"] and found["equal_to_serial"]
    assert found["vanilla_differs_from_none"]  # negative control
    assert all(found[f"{arm}_shards_failed"] == 4 for arm in ARMS[1:]) and found["full_lost_steps"] > 0
    assert 0 < found["seconds_restoring"] < found["seconds_kill_to_next_step"]
    assert all(f"auc_lost_{arm}" in found and f"{arm}_overhead_percent" in found for arm in SCHEMES)


# ---- pools


class Pool:
    """What `PoolKiller` sees of a pool: `steps` of each trainer's newest incarnation."""

    def __init__(self, *steps):
        self.processes, self.sync_server_processes, self.failures = [], [], []
        self.progress = [SimpleNamespace(steps=step, state="training") for step in steps]

    def after(self, *steps, state="training"):
        for one, step in zip(self.progress, steps, strict=True):
            one.steps = step
        self.progress[-1].state = state


@pytest.mark.process
def test_a_pool_is_killed_in_turn_and_each_kill_is_over_when_every_trainer_that_has_work_has_stepped():
    victims = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    pool, servers = Pool(0, 0), SimpleNamespace(processes=[victims[1].pid])
    pool.processes = [victims[0].pid, None]
    killer = PoolKiller(servers, {20: "server", 10: "trainer"}, seed=0)
    killer(pool)
    pool.after(4, 5)
    killer(pool)
    assert killer.kills == []
    pool.after(5, 6)
    killer(pool)
    (first,) = killer.kills
    assert victims[0].wait(10) == -9 and first.kind == "trainer" and first.noticed is None
    pool.failures.append("it has died")
    pool.after(0, 30)  # the successor of the first begins anew
    killer(pool)
    assert first.noticed and not first.stepped and killer.looks[-1][1] == 5 + 30
    pool.after(0, 31)
    killer(pool)
    assert not first.stepped and len(killer.kills) == 1  # the next one waits, due as it is
    pool.after(1, 31, state="done")
    killer(pool)
    assert first.killed < first.noticed < first.stepped and victims[1].wait(10) == -9
    assert [kill.kind for kill in killer.kills] == ["trainer", "server"]
    stats = SimpleNamespace(
        examples=90, examples_lost=10, rows_lost=0, waited_for_rows_s=[1.0, 2.0], average_sync_gap=2.0
    )
    found = pool_figures(stats, killer, 100)
    assert found["accounting_exact"] and not pool_figures(stats, killer, 101)["accounting_exact"]
    assert found["trainer_seconds_until_all_step"] == first.stepped - first.killed and found["server_kills"] == 1
    assert "server_seconds_noticing" not in found and found["sync_server_kills"] == 0


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_every_kind_of_process_of_a_pool_is_killed_in_one_run_and_no_example_is_missing(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: `make cluster`, or pip install -e '.[cluster]'")
    kills = "--kill trainers servers sync --kills 3 --steps 300".split()
    found = smoke(tmp_path, "cluster_failures", *kills)
    assert [found[f"killed_{kind}_kills"] for kind in ("trainer", "server", "sync_server")] == [1, 1, 1]
    assert found["none_accounting_exact"] and found["killed_accounting_exact"] and found["killed_examples_lost"] == 0
    assert found["none_kills"] == 0 and found["killed_trainer_seconds_until_all_step"] > 0


# ---- the soak


@given(seed=st.integers(0, 2**31), number=st.integers(0, 100))
def test_a_trial_of_the_soak_follows_from_its_seed_and_every_fourth_kills_a_successor_that_restores(seed, number):
    trial = drawn(np.random.default_rng(seed), number)
    assert trial == drawn(np.random.default_rng(seed), number) and trial.arm == ARMS[1:][number % 4]
    restoring = [death for death in trial.deaths if death[0] == "change"]
    assert bool(restoring) == (number % 4 == 3) and all(incarnation == 2 for _, _, incarnation, _ in restoring)
    assert ("track" in {verb for verb, *_ in trial.deaths}) <= (trial.arm in ("mfu", "ssu"))


@pytest.mark.process
def test_a_process_that_lives_on_is_named():
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert alive_after([process.pid], 0.2) == [process.pid]
    process.communicate()
    assert alive_after([process.pid], 10) == []


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_eight_random_kills_leave_nothing_wrong_and_nothing_behind(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: `make cluster`, or pip install -e '.[cluster]'")
    done = run("cluster_soak", "--kills", 8, "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert found["kills"] >= 8 and found["wrong"] == found["directories_left"] == 0 and found["runs"] >= 2
