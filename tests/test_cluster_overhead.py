"""The measured overhead of saves and failures: its accounts, its kills, its predictions; the job itself is slow."""

import numpy as np
import pytest
from cluster_overhead import (
    SIZES,
    WARM_UP,
    Config,
    accounted,
    check,
    costs_of,
    kills_of,
    predicted,
    recoveries_of,
    summary,
    trial_of,
)
from cluster_work import Kill, with_sizes
from hypothesis import given
from hypothesis import strategies as st
from main.cli import refuse_small
from smoke import logged, smoke


@given(
    plain=st.lists(st.floats(0.01, 0.03), min_size=5, max_size=30), saved=st.lists(st.floats(0.1, 1), max_size=5),
    tracked=st.lists(st.floats(0.1, 1), max_size=5), waits=st.lists(st.floats(0.5, 5), max_size=3),
    back=st.integers(0, 4), data=st.data(),
)  # fmt: skip
def test_the_parts_of_an_arm_add_up_to_its_time_wherever_its_parts_fall(plain, saved, tracked, waits, back, data):
    left = {"plain": [*plain], "save": [*saved], "track": [*tracked], "wait": [*waits]}
    kinds = data.draw(st.permutations([kind for kind, each in left.items() for _ in each]))
    at, step, times = 0.0, 10, [(0.0, 10)]
    spans: dict[str, list] = {"save": [], "track": [], "wait": []}
    for kind in kinds:
        took = left[kind].pop()
        if kind != "plain":  # strictly between two steps
            spans[kind].append((at + took / 4, at + took / 2))
        at, step = at + took, step + 1 - (back if kind == "wait" else 0)
        times.append((at, step))
    found = accounted(times, *spans.values())
    assert found["step_s"] == pytest.approx(np.mean(plain))
    assert found["useful_s"] == pytest.approx(np.mean(plain) * (step - 10))
    assert found["saving_s"] == pytest.approx(sum(saved) - len(saved) * np.mean(plain))
    assert found["tracking_s"] == pytest.approx(sum(tracked) - len(tracked) * np.mean(plain))
    assert sum(found[f"{part}_s"] for part in ("useful", "saving", "tracking", "recovering")) == pytest.approx(at)


def test_a_recovery_lasts_until_the_job_is_back_and_one_beside_a_save_is_a_recovery():
    kill = Kill(10, 0, 1.0, 0, 1.5, 2.0, 3.0, 4.0, 9.0, 20)
    assert recoveries_of([kill], full=False, settling_s=2.0) == [(1.0, 4.0)]
    assert recoveries_of([kill], full=False, settling_s=5.0) == [(1.0, 6.0)]
    assert recoveries_of([kill], full=True, settling_s=5.0) == [(1.0, 9.0)]
    times = [(0.0, 1), (1.0, 2), (4.0, 3), (5.0, 4), (7.0, 5)]
    both = [(1.5, 2.0), (6.0, 6.5)]
    found = accounted(times, both[1:], tracking=both, recoveries=[(3.0, 3.5)])
    assert (found["saving_s"], found["tracking_s"], found["recovering_s"]) == (1, 0, 2)


def test_kills_come_at_a_constant_rate_and_follow_from_the_seed():
    plans = [kills_of(seed, 10_000, 100.0, 8) for seed in range(50)]
    assert plans[3] == kills_of(3, 10_000, 100.0, 8) != plans[4]
    steps = [step for plan in plans for step in plan]
    assert min(steps) >= WARM_UP and max(steps) < 10_000
    assert len(steps) == pytest.approx(5000, rel=0.06)  # 4 standard deviations
    gaps = np.concatenate([np.diff(list(plan)) for plan in plans])
    assert np.std(gaps) == pytest.approx(100, rel=0.1)  # exponential: the deviation is the mean
    servers = [server for plan in plans for server in plan.values()]
    assert np.bincount(servers) == pytest.approx(np.full(8, 625), rel=0.2)


def test_equations_choose_the_intervals_and_predict_the_overheads_from_the_costs_of_the_trials():
    config = with_sizes(Config(minutes=60.0, mtbf_minutes=20.0), SIZES)
    percent = {"noticing": 1, "starting": 2, "restoring": 3, "resuming": 4, "repeating": 50, "saving": 8}
    trial = {f"{part}_percent": value for part, value in percent.items()}
    trial |= {"useful_s": 100.0, "kills": 1, "step_ms": 50.0}
    full, mfu = (
        costs_of(config, trial, 4),
        costs_of(config, trial, 1),
    )  # four saves, or one interval of eight small ones
    assert full[:6] == pytest.approx((2 / 3600, 3 / 3600, 7 / 3600, 1 / 3, 1.0, 8))
    assert mfu.save_hours == pytest.approx(8 / 3600)
    twice = costs_of(config, trial | {"kills": 2, "saving_percent": -1.0}, 4)
    assert twice.load_hours == pytest.approx(1.5 / 3600) and twice.save_hours == pytest.approx(0.05 / 3600)
    kills = [0.25, 0.5]  # of three that are expected
    law = predicted(config, full, "full", kills)
    assert law["save_every_minutes"] == pytest.approx((2 * 2 * 1200) ** 0.5 / 60)
    every = law["save_every_minutes"] * 60
    assert law["overhead_percent"] == pytest.approx(100 * (2 / every + (3 + 7 + every / 2) / 1800)) and law["pls"] == 0
    law = predicted(config, mfu, "mfu", kills)
    assert law["save_every_minutes"] == pytest.approx(2 * 0.1 * 8 * 20)
    assert law["overhead_percent"] == pytest.approx(100 * (8 / (32 * 60) + 10 / 1800))
    assert law["pls"] == pytest.approx((15 + 30) / (60 * 8))
    assert law["expected_pls"] == pytest.approx((32**2 + 28**2) / 2 / (60 * 20 * 8))
    assert predicted(config, mfu, "mfu", [0.9])["pls"] == pytest.approx((54 - 32) / (60 * 8))  # since the save
    assert predicted(config, mfu, "mfu", [])["overhead_percent"] == pytest.approx(100 * 8 / (32 * 60))


def test_the_trial_of_an_arm_that_saves_parts_holds_one_save_of_the_size_of_those_of_the_job_and_then_a_kill():
    config = with_sizes(Config(minutes=60.0, mtbf_minutes=20.0, trial_steps=100), SIZES)
    assert trial_of(config, "vanilla", 0.05) == (100, 25, 60, 4)
    every = 2 * 0.1 * 8 * 20 * 60 / 0.05
    assert trial_of(config, "mfu", 0.05) == (int(1.3 * every / 8), every, int(1.2 * every / 8), 1 / 8)
    trial = trial_of(with_sizes(Config(mtbf_minutes=0.01, trial_steps=100), SIZES), "ssu", 0.05)  # T_save: 19.2 steps
    assert (trial.steps, trial.kill, trial.intervals) == (100, 50, 41 / 8)  # 100 / 2.4


def test_seeds_are_summed_up_with_the_ratio_of_full_recovery_to_each():
    kinds = ("", "predicted_", "afterwards_")
    parts = ("saving", "tracking", "noticing", "starting", "restoring", "resuming", "repeating")
    arm = lambda overhead, auc: {
        **{f"{part}_percent": 1.0 for part in parts}, **{f"{kind}pls": 0.1 for kind in kinds},
        **{f"{kind}overhead_percent": overhead + len(kind) for kind in kinds}, "predicted_expected_pls": 0.1,
        "predicted_save_every_minutes": 5.0, "afterwards_save_every_minutes": 5.0, "kills": 2, "saves": 3,
        "rows_saved": 9, "step_ms": 50.0, "seconds_to_next_step": [overhead, 2.0], "test_auc": auc,
    }  # fmt: skip
    rows = [{"full": arm(20.0, 0.75), "mfu": arm(2.0, 0.74)}, {"full": arm(29.0, 0.75), "mfu": arm(5.0, 0.75)}]
    found = summary(Config(arms=("full", "mfu"), seeds=2), rows)
    assert found["full_over_mfu"] == 7 and found["predicted_full_over_mfu"] == (24.5 + 10) / (3.5 + 10)
    assert found["mfu_overhead_percent"] == 3.5 and found["auc_lost_mfu"] == pytest.approx(0.005)
    assert (found["full_over_mfu_min"], found["full_over_mfu_max"]) == (5.8, 10)
    assert (found["mfu_overhead_percent_min"], found["mfu_overhead_percent_max"]) == (2, 5)
    assert found["mfu_kills"] == 4 and found["mfu_seconds_to_next_step"] == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"servers": 9}, "--servers 9 must be at most 8"),
        ({"target_pls": 0.0}, "--target-pls 0 must be above 0"),
        ({"arms": ("mfu", "ssu")}, "--arms mfu ssu: give full and at least one other"),
    ],
    ids=str,
)
def test_flags_that_do_not_go_together_are_refused_before_anything_begins(flags, words):
    with pytest.raises(ValueError, match=words):
        refuse_small(Config(**flags))
        check(with_sizes(Config(**flags), SIZES))


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_both_arms_are_killed_and_a_resumed_run_keeps_what_has_ended(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: `make cluster`, or pip install -e '.[cluster]'")
    flags = "--minutes 0.2 --mtbf-minutes 0.08 --target-pls 0.3 --arms full mfu".split()
    found = smoke(tmp_path, "cluster_overhead", *flags)
    assert found["full_kills"] > 0 and found["mfu_kills"] > 0 == found["mfu_repeating_percent"]
    kinds = [(row["kind"], row["arm"]) for row in logged(tmp_path)]
    assert kinds == [(kind, arm) for kind in ("trial", "predicted", "measured") for arm in ("full", "mfu")]
    (tmp_path / "results.json").unlink()
    assert smoke(tmp_path, "cluster_overhead", *flags, "--resume") == found  # trains nothing
