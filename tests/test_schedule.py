"""CPR's overhead model: its equations, replays of jobs, and measured costs, which connect it with a run that saves."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from studies.failure_replay import replay_in_useful_time, replay_in_wall_time

from jaxrec import Batch, Serial, Task
from jaxrec.checkpoint import Checkpointer, is_intact
from jaxrec.cpr import Recovery, measure_costs, plan_recovery, schedule
from jaxrec.cpr.failure import draw_failures
from jaxrec.cpr.schedule import SETTING_A, SETTING_B, Costs
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad

HOURS = st.floats(0.01, 100)
COSTS = st.builds(
    Costs, HOURS, st.floats(0, 1), st.floats(0, 1), st.floats(1, 1000), st.floats(1, 1000), st.integers(4, 64),
    st.integers(1, 4), st.none() | st.floats(0, 1),
)  # fmt: skip


def best(costs, mode):
    return schedule.full_interval(costs) if mode == "full" else schedule.partial_interval(costs, 0.1)


def law(costs, mode, every):
    return (schedule.full_overhead if mode == "full" else schedule.partial_overhead)(costs, every).total


@pytest.mark.parametrize(("costs", "full", "partial"), [(SETTING_A, 8.50, 0.53), (SETTING_B, 8.20, 0.68)])
def test_reference_settings_give_the_overheads_of_the_abstract(costs, full, partial):
    assert abs(100 * law(costs, "full", best(costs, "full")) - full) < 0.01
    assert abs(100 * law(costs, "partial", best(costs, "partial")) - partial) < 0.01
    assert best(costs, "partial") == pytest.approx(44.8)
    plan = schedule.plan_recovery(costs, 0.1)
    assert plan.mode == "partial" and plan.expected_pls == pytest.approx(0.1)
    assert plan.expected_overhead == schedule.partial_overhead(costs, plan.save_every_hours)


@given(costs=COSTS, factor=st.sampled_from([0.3, 0.9, 1.1, 3.0]))
def test_full_recovery_is_cheapest_at_its_interval(costs, factor):
    every = schedule.full_interval(costs)
    assert law(costs, "full", every) < law(costs, "full", factor * every)
    lost = schedule.full_overhead(costs, every).lost_work  # there, saving costs as much as lost work
    assert lost == pytest.approx(schedule.full_overhead(costs, every).save)


@given(costs=COSTS)
def test_another_loss_has_its_minimum_elsewhere(costs):
    """Negative control: with all of an interval lost instead of half, a shorter interval is cheaper."""
    wrong = lambda every: law(costs, "full", every) + schedule.full_overhead(costs, every).lost_work
    assert wrong(schedule.full_interval(costs) / math.sqrt(2)) < wrong(schedule.full_interval(costs))


@given(costs=COSTS, pls=st.floats(1e-4, 1))
def test_interval_and_expected_pls_are_inverse(costs, pls):
    every = schedule.partial_interval(costs, pls)
    assert schedule.expected_pls(costs, every) == pytest.approx(pls)
    assert schedule.partial_interval(costs._replace(failed_nodes=1), pls) == pytest.approx(every * costs.failed_nodes)


@given(costs=COSTS, pls=st.floats(1e-4, 1))
def test_the_cheaper_recovery_is_planned_within_the_job(costs, pls):
    within = {"full": schedule.full_interval(costs), "partial": schedule.partial_interval(costs, pls)}
    totals = {mode: law(costs, mode, min(every, costs.total_hours)) for mode, every in within.items()}
    plan = schedule.plan_recovery(costs, pls)
    assert plan.expected_overhead.total == totals[plan.mode] == min(totals.values())
    assert plan.save_every_hours <= costs.total_hours and (plan.expected_pls > 0) == (plan.mode == "partial")


@given(costs=COSTS, every=HOURS)
def test_a_partial_recovery_has_a_load_of_its_own(costs, every):
    assert law(costs, "full", every) == law(costs._replace(partial_load_hours=None), "full", every)
    quick, slow = costs._replace(partial_load_hours=0.0), costs._replace(partial_load_hours=1.0)
    assert schedule.partial_overhead(slow, every).load == 1.0 / costs.mtbf_hours
    assert schedule.partial_overhead(quick, every).load == 0


def test_where_a_partial_recovery_loads_too_long_it_is_never_the_cheaper_one():
    costs = SETTING_A._replace(partial_load_hours=3.0)
    assert schedule.plan_recovery(costs, 1.0).mode == "full" != schedule.plan_recovery(SETTING_A, 1.0).mode


@given(costs=COSTS, every=HOURS, whole=st.integers(1, 20))
def test_pls_of_a_job_of_whole_intervals_is_that_of_the_paper(costs, every, whole):
    job = costs._replace(total_hours=whole * every)
    assume(whole * every // every == whole)  # exact division
    assert schedule.expected_pls_of_job(job, every) == pytest.approx(schedule.expected_pls(job, every))
    cut = costs._replace(total_hours=(whole + 0.5) * every)
    assert schedule.expected_pls_of_job(cut, every) < schedule.expected_pls(cut, every)


@pytest.mark.parametrize("every", [2.2, 11, 22.4, 44.8])
@pytest.mark.parametrize("failed", [1, 4])
def test_pls_of_random_jobs(every, failed):
    costs = SETTING_A._replace(failed_nodes=failed)
    jobs = [draw_failures(28, 56, 8, seed, failed_nodes=failed) for seed in range(4000)]
    seen = np.array([replay_in_useful_time(costs, "partial", every, np.unique(job.hours)).pls for job in jobs])
    error = seen.std() / math.sqrt(len(seen))
    assert abs(seen.mean() - schedule.expected_pls_of_job(costs, every)) < 4 * error
    if every == 44.8:  # negative control: eq. (5) is above what a job of 56 hours can lose
        assert seen.mean() < schedule.expected_pls(costs, every) - 4 * error


def overhead_in_wall_time(costs, mode, every):
    """With failures at a constant rate of wall time: full by Daly, FGCS 22(3), 2006; partial derived alike."""
    mtbf, save = costs.mtbf_hours, costs.save_hours
    recovery = math.exp((costs.load_of(mode) + costs.reschedule_hours) / mtbf)
    if mode == "full":
        return recovery * mtbf * math.expm1((every + save) / mtbf) / every - 1
    return recovery * (every + mtbf * math.expm1(save / mtbf)) / every - 1


def wall_hours(replay):
    return replay.useful_hours * (1 + replay.overhead.total)


@pytest.mark.parametrize("mode", ["full", "partial"])
@pytest.mark.parametrize("costs", [SETTING_A, SETTING_B])
def test_replays_agree_with_the_equations(costs, mode):
    """100 jobs end to end, 200 times: on the clock of useful time as in the paper, on the wall clock as in Daly."""
    horizon, every = 100 * costs.total_hours, best(costs, mode)
    drawn = [draw_failures(costs.mtbf_hours, horizon, costs.nodes, seed).hours for seed in range(200)]
    assert sum(map(len, drawn)) >= 20_000
    long = costs._replace(total_hours=horizon)
    useful = [100 * replay_in_useful_time(long, mode, every, hours).overhead.total for hours in drawn]
    wall = [100 * replay_in_wall_time(costs, mode, every, hours, horizon).overhead.total for hours in drawn]
    assert abs(np.mean(useful) - 100 * law(costs, mode, every)) < 0.1
    assert abs(np.mean(wall) - 100 * overhead_in_wall_time(costs, mode, every)) < 0.1
    if mode == "full":  # negative control: the two clocks differ
        assert np.mean(wall) - 100 * law(costs, mode, every) > 0.3


def test_a_job_by_hand():
    """Saves of 1 h after each 10 h, recovery 0.5 + 1.5 h; failures at 14 and 25 h."""
    costs = Costs(1.0, 1.5, 0.5, 20.0, 30.0, nodes=8)
    full = replay_in_useful_time(costs, "full", 10, [14, 25])
    assert full.saves == 3 and full.failures == 2 and full.pls == 0
    np.testing.assert_allclose(30 * np.array(full.overhead), [3, 3, 4 + 5, 1])
    partial = replay_in_useful_time(costs, "partial", 10, [14, 25], np.array([1, 4]))
    np.testing.assert_allclose(30 * np.array(partial.overhead), [3, 3, 0, 1])
    assert partial.pls == pytest.approx((1 * 4 + 4 * 5) / (8 * 30))
    quick = replay_in_useful_time(costs._replace(partial_load_hours=0.25), "partial", 10, [14, 25])
    np.testing.assert_allclose(30 * np.array(quick.overhead), [3, 2 * 0.25, 0, 1])
    # Wall clock: work to 10, save to 11, work to 14, recovery to 16; work resumes at 10 and is at 19 at hour 25.
    wall = replay_in_wall_time(costs, "full", 10, [14, 25], 25.5)
    assert wall.useful_hours == 10 and wall.saves == 1 and wall_hours(wall) == pytest.approx(25.5)
    np.testing.assert_allclose(10 * np.array(wall.overhead), [1, 1.5, 3 + 9, 0.5 + 0.5])
    # Partial: 3 hours of work after the save at 11 are kept; work from 16 to 23, then a save interrupted at 23.5.
    wall = replay_in_wall_time(costs, "partial", 10, [14, 23.5], 26.5, [1, 2])
    assert wall.useful_hours == pytest.approx(20) and wall.pls == pytest.approx((3 + 2 * 10) / (8 * 20))
    np.testing.assert_allclose(20 * np.array(wall.overhead), [1 + 1, 3, 0.5, 1])


def step_by_step(costs, mode, every, hours, end):
    """Reference for the wall clock, phase by phase: (useful, saves, load, lost, reschedule, PLS)."""
    load = costs.load_of(mode)
    length = {"work": every, "save": costs.save_hours, "load": load, "reschedule": costs.reschedule_hours}
    spent, done, saved, lost, pls = dict.fromkeys(length, 0.0), 0.0, 0.0, 0.0, 0.0
    phase, left, now, then = "work", every, 0.0, ("work", every)
    failures = [*hours, math.inf]
    while now < end:
        until = min(now + left, failures[0], end)
        spent[phase] += until - now
        done += until - now if phase == "work" else 0
        left, now, broken = left - (until - now), until, until == failures[0]
        if broken:
            failures.pop(0)
            pls += done - saved
            if phase == "save":
                lost, spent["save"] = lost + costs.save_hours - left, spent["save"] - costs.save_hours + left
            if phase in ("work", "save"):
                then = (phase, left) if phase == "work" else ("save", costs.save_hours)
            if mode == "full":
                lost, spent["work"], done = lost + done - saved, spent["work"] - (done - saved), saved
                then = ("work", every)
            phase, left = "reschedule", costs.reschedule_hours
        elif until < end:
            saved = done if phase == "save" else saved
            following = {"work": ("save", costs.save_hours), "save": ("work", every), "load": then}
            phase, left = following.get(phase, ("load", load))
    return done, spent["save"], spent["load"], lost, spent["reschedule"], pls / costs.nodes if mode == "partial" else 0


@given(
    seed=st.integers(0, 9999), mode=st.sampled_from(["full", "partial"]), every=st.floats(0.5, 5),
    save=st.floats(0.1, 2), load=st.floats(0.1, 2), reschedule=st.floats(0.1, 2), partial=st.floats(0.1, 2),
)  # fmt: skip
def test_the_wall_clock_step_by_step(seed, mode, every, save, load, reschedule, partial):
    """Frequent failures that hit saves, loads and work; no hour is counted twice or omitted."""
    costs = Costs(save, load, reschedule, 3.0, 50.0, nodes=4, partial_load_hours=partial)
    hours = draw_failures(3.0, 50.0, 4, seed).hours
    found = replay_in_wall_time(costs, mode, every, hours, 50.0)
    useful, *spent, pls = step_by_step(costs, mode, every, hours.tolist(), 50.0)
    assert found.useful_hours == pytest.approx(useful, abs=1e-9)
    if useful:
        np.testing.assert_allclose(useful * np.array(found.overhead), spent, atol=1e-9)
        assert wall_hours(found) == pytest.approx(50.0) and found.pls == pytest.approx(pls / useful, abs=1e-12)
    else:
        assert found.overhead.total == math.inf


@given(costs=COSTS, every=st.floats(0.5, 5), mode=st.sampled_from(["full", "partial"]))
def test_without_failures_only_saves_cost(costs, every, mode):
    found = replay_in_useful_time(costs, mode, every, [])
    assert found.overhead[1:] == (0, 0, 0) and found.pls == 0
    assert found.saves * every <= costs.total_hours * (1 + 1e-9) and (found.saves + 1) * every > costs.total_hours
    wall = replay_in_wall_time(costs, mode, every, [], costs.total_hours)
    assert wall.overhead[1:] == (0, 0, 0) and wall.failures == 0


@given(costs=COSTS, pls=st.floats(1e-4, 1), seconds=st.floats(1e-3, 5))
def test_a_plan_in_steps_is_the_plan_in_hours(costs, pls, seconds):
    """The interval is the same share of the job in hours and in steps, and converts back without loss."""
    plan = schedule.plan_recovery(costs, pls)
    assume(plan.save_every_hours * 3600 > 1.001 * seconds)
    steps = plan.in_steps(seconds)
    assert steps["save_every_steps"] * seconds / 3600 == pytest.approx(plan.save_every_hours, rel=1e-5)
    assert abs(steps["total_steps"] * seconds / 3600 - costs.total_hours) <= seconds / 3600
    assert type(steps["total_steps"]) is int and steps["mode"] == plan.mode
    assert plan.in_steps(seconds / 2)["save_every_steps"] == pytest.approx(2 * steps["save_every_steps"], rel=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedule.full_overhead(SETTING_A, 0), "save_every_hours=0"),
        (lambda: schedule.full_interval(SETTING_A._replace(mtbf_hours=math.nan)), "mtbf_hours=nan"),
        (lambda: schedule.full_interval(SETTING_A._replace(reschedule_hours=-1)), "reschedule_hours=-1"),
        (
            lambda: schedule.expected_pls(SETTING_A._replace(failed_nodes=9), 1),
            "failed_nodes=9 must be .* from 1 to 8",
        ),
        (lambda: schedule.plan_recovery(SETTING_A, 1.5), "target_pls=1.5"),
        (lambda: schedule.lost_portion(1, 2, 10, 8), "saved=2, seen=1"),
        (lambda: schedule.lost_portion(2, 1, 10, 8, failed_nodes=9), "failed_nodes=9"),
        (lambda: replay_in_useful_time(SETTING_A, "half", 1, [1]), "mode='half'"),
        (lambda: replay_in_useful_time(SETTING_A, "full", 1, [2, 1]), "must ascend"),
        (lambda: replay_in_useful_time(SETTING_A, "full", 1, [-1]), "must ascend from 0"),
        (lambda: replay_in_useful_time(SETTING_A, "full", 1, [1], [9]), "failed_nodes from 9 to 9"),
        (lambda: replay_in_wall_time(SETTING_A, "full", 1, [1], 5, [1, 2]), "one length"),
        (lambda: replay_in_wall_time(SETTING_A, "full", 1, [1], 0), "end_hours=0"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- measured costs and plans in steps

SPEC = EmbeddingSpec({"item": Table(50, 4)}, {"item": Lookup("item")}, shards=4)
ROWS, DENSE = adagrad(0.1), optax.adam(0.01)
JOB = {"mtbf_hours": 28, "total_hours": 56, "reschedule_hours": 0.1}


def loss(params, activations, batch):
    return (activations["item"].sum(-1) + params["bias"] - batch.label) ** 2


TASK = Task(SPEC, loss, DENSE, ROWS)


def state_of(tables):
    return TASK.init({"bias": jnp.ones(())}, tables)


def batch(index):
    ids = np.random.default_rng(index).integers(0, 50, 8).astype(np.int32)
    return Batch({"item": ids}, np.ones(8))


def listing(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


class NotedTables(HostTables):
    """Tables that record each restored shard, and which images are intact at that time."""

    def with_shard(self, stack, shard, parts):
        self.seen.append((shard, [is_intact(path) for path in self.place.rglob("step_*") if path.is_dir()]))
        return super().with_shard(stack, shard, parts)


@pytest.mark.parametrize("mode", ["full", "partial"])
def test_recovery_takes_a_plan_in_steps(tmp_path, mode):
    """It saves at the steps of the planned hours: with 90 s per step and a save every 0.1 h, at steps 4, 8 and 12."""
    decided = plan_recovery(SETTING_A, 0.1)._replace(mode=mode, save_every_hours=0.1, total_hours=0.3)
    recovery = Recovery(tmp_path, **decided.in_steps(seconds_per_step=90))
    with Serial(TASK, state_of("host"), [recovery]) as engine:
        saved = [engine.step for _ in engine.run(lambda step: map(batch, range(step, 12))) if recovery.saves]
    assert saved[0] == 4 and recovery.saves == 3 and recovery.mode == mode


@pytest.mark.parametrize("copy", ["whole", "shards"])
@pytest.mark.parametrize("home", ["host", "device"])
def test_measured_costs_stand_in_for_assumed_ones_and_nothing_is_left_or_changed(tmp_path, home, copy):
    """Measured beside a run that has saved in the same directory and still holds its locks."""
    state, _ = TASK.step(state_of(home), batch(0))
    state = state._replace(dense=state.dense._replace(step=jnp.int32(7)))  # as if others had written the tables
    before = jax.tree.map(np.array, (state.dense, state.tables.parts("width_4"), state.tables.step))
    with Checkpointer(tmp_path) as saver:
        saver.save(state)
        saver.wait()
        files = listing(tmp_path)
        state, costs = measure_costs(state, tmp_path, **JOB, failed_nodes=2, copy=copy, rounds=2)
        assert listing(tmp_path) == files
    after = jax.tree.map(np.array, (state.dense, state.tables.parts("width_4"), state.tables.step))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert 0 < costs.save_hours < 1 and 0 < costs.load_hours < 1 and 0 < costs.partial_load_hours < 1
    assert costs[2:7] == (0.1, 28, 56, 4, 2) and plan_recovery(costs, 0.1).mode == "partial"
    TASK.step(state, batch(0))  # the state can still be trained


def test_measuring_really_saves_all_and_restores_all_and_then_the_failed_shards(tmp_path):
    state = state_of(NotedTables.create(SPEC, ROWS))
    state.tables.__dict__.update(seen=[], place=tmp_path)
    measure_costs(state, tmp_path / "made" / "by nobody", **JOB, failed_nodes=3, rounds=2)
    assert state.tables.seen == 2 * [(shard, [True]) for shard in [0, 1, 2, 3, 0, 1, 2]]
    assert listing(tmp_path) == []
