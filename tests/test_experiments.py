"""The experiments run from the command line, and their flags stay stable."""

import fcntl
import itertools
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import oac_time_to_accuracy
import pytest
import shadowsync_isolation
import shadowsync_quality
import shadowsync_soak
from hypothesis import given
from hypothesis import strategies as st
from main.pools import SharedStream
from smoke import logged, results, run, smoke
from studies.oac_turns import PipelineWay, compare, equal
from studies.oac_work import EmulatedLink, Work, turn
from studies.reference import Job
from watching import differences

from jaxrec.checkpoint import images, read_manifest, verify
from jaxrec.embedding import HostTables

ROOT = Path(__file__).parent.parent
RESULTS = {"test_auc", "test_log_loss", "test_normalized_entropy", "examples_per_s", "examples", "steps"}


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["device", "host"])
def test_train_keeps_the_contract_and_learns(tmp_path, tables):
    found = smoke(tmp_path, "train", "--tables", tables, "--batch-size", 512)
    assert found.keys() >= RESULTS and found["steps"] == 100 and found["examples"] == 51_200
    assert 0.6 < found["test_auc"] < found["teacher_auc"]
    assert json.loads((tmp_path / "config.json").read_text())["tables"] == tables
    assert json.loads((tmp_path / "environment.json").read_text())["jax"]
    assert [row["step"] for row in logged(tmp_path)] == [13, 26, 39, 52, 65, 78, 91, 100]
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    again = run("train", "--workdir", tmp_path)
    assert again.returncode != 0 and "holds a run already" in again.stderr and "Traceback" not in again.stderr


@pytest.mark.slow
def test_criteo_defaults_reach_their_auc(real_data, tmp_path):
    """Uses one seed; the README's figure is the mean of three."""
    raw = real_data / "criteo" / "train_110000.tsv.gz"
    assert run("prepare", "--sources", raw, "--directory", tmp_path / "rows").returncode == 0
    done = run("train", "--data", "criteo", "--path", tmp_path / "rows", "--workdir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert results(tmp_path / "run")["test_auc"] >= 0.755


SMALL = ("--preset", "smoke", "--rows", "5000", "--batch-size", "128")


def start(workdir, *flags, **how):
    """Starts train.py."""
    command = [sys.executable, ROOT / "experiments" / "train.py", "--workdir", workdir, *map(str, flags)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)


def read_until(stream, words):
    """Reads output up to a line that begins with `words`; returns the line."""
    for line in stream:
        if line.startswith(words):
            return line
    raise AssertionError(f"no line begins with {words}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "name", "code"),
    [("mapped", "SIGINT", 130), ("requeued", "SIGTERM", 75)],
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, way, name, code):
    flags = [*SMALL, "--steps", 60, "--evaluations", 6]
    whole = run("train", *flags, "--workdir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    flags += {"mapped": ["--tables", "host", "--table-directory", tmp_path / "tables"], "requeued": ["--requeue"]}[way]
    flags += ["--resume"]
    child = start(tmp_path / "cut", *flags)
    read_until(child.stdout, "step ")
    child.send_signal(signal.Signals[name])
    said = child.communicate()[1]
    assert child.returncode == code and f"{name}: stopped and saved at step" in said and "Traceback" not in said
    assert not (tmp_path / "cut" / "results.json").exists()
    again = run("train", *flags, "--workdir", tmp_path / "cut")
    assert again.returncode == 0 and "going on from" in again.stdout, again.stderr
    assert differences(tmp_path / "whole", tmp_path / "cut") == []
    before = (tmp_path / "cut" / "results.json").read_bytes()
    once_more = run("train", *flags, "--workdir", tmp_path / "cut")
    assert once_more.returncode == 0 and "is complete" in once_more.stdout
    assert (tmp_path / "cut" / "results.json").read_bytes() == before


@pytest.mark.slow
def test_a_closed_terminal_saves(tmp_path):
    """Uses a real terminal: once its other end is closed, all output fails."""
    terminal, theirs = pty.openpty()
    command = [sys.executable, ROOT / "experiments" / "train.py", *SMALL, "--steps", "4000", "--evaluations", "800"]
    child = subprocess.Popen(
        [*command, "--workdir", tmp_path], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    said = b""
    while b"\nstep " not in said:
        said += os.read(terminal, 1000)
    os.close(terminal)
    assert child.wait() == 129
    image = read_manifest(images(tmp_path / "checkpoints")[0])
    verify(image)
    assert image.step >= logged(tmp_path)[-1]["step"]


IN_A_SMALL_DISK = """
set -o pipefail
mount -t tmpfs -o size={size} none "$1" && cd "$1" || exit 99
shift
head -c {filler} /dev/zero > filler
"$@" --workdir run 2>&1 | while read -r line; do
    echo "$line"
    case "$line" in *"a save failed"*) rm -f {free};; esac
done
code=$?
cat run/results.json
exit $code
"""


def train_on_a_small_disk(directory, **disk):
    """Trains in a temporary file system of a few MB."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount: unshare -Urm fails")
    script = IN_A_SMALL_DISK.format(**disk)
    command = [sys.executable, ROOT / "experiments" / "train.py", *SMALL, "--steps", "60", "--save-every-steps", "10"]
    command = ["unshare", "-Urm", "bash", "-c", script, "bash", directory, *command]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_a_full_disk_does_not_end_training(tmp_path):
    """Space is freed after the first failure: training continues, and the last state is saved."""
    done = train_on_a_small_disk(tmp_path, size="30m", filler="29M", free="filler")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("a save failed; the next one tries again") >= 1 and "No space left" in done.stdout
    assert "step 60: validation AUC" in done.stdout and "the last state is saved" in done.stdout
    assert '"last_state_saved": true' in done.stdout and '"saves_failed": 0' not in done.stdout


@pytest.mark.slow
def test_a_disk_that_stays_full_is_told_at_the_end(tmp_path):
    done = train_on_a_small_disk(tmp_path, size="2m", filler="1000", free="nothing")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "step 60: validation AUC" in done.stdout and "the last state is NOT saved" in done.stdout
    assert "error: the last state could not be saved" in done.stdout
    assert '"last_state_saved": false' in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_oac_equals_sync_and_its_mutants_do_not(tmp_path):
    found = smoke(tmp_path, "oac_equivalence")
    assert found["bitwise_equal"] and found["mutants_caught"] == found["mutants_total"] == 5
    assert found["stale_rows_miscounted"] == 0 and found["stale_fraction_max"] > 0
    assert found["broken_runs"] >= 10 and found["broken_runs_wrong"] == 0


REGIMES = ("balanced_link", "link_link", "compute_link", "no_link")


@pytest.mark.slow
def test_oac_throughput_compares_every_mode_in_every_regime(tmp_path):
    done = run("oac_throughput", "--preset", "smoke", "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert found["emulated_link_balanced_link"] is True and found["emulated_link_no_link"] is False
    lines = [line for line in done.stdout.splitlines() if line.startswith(REGIMES)]  # all rows, good or bad
    for regime in REGIMES:
        for mode in ("sync", "semisync", "async", "oac"):
            assert found[f"examples_per_s_{mode}_{regime}"] > 0
            assert sum(line.split()[:2] == [regime, mode] for line in lines) == 1
        for key in ("oac_over_sync", "semisync_over_sync", "oac_over_async"):
            low, median, high = (found[f"{key}{end}_{regime}"] for end in ("_low", "", "_high"))
            assert low <= median <= high


@pytest.mark.slow
def test_oac_link_counts_what_a_window_saves_beside_an_oracle(tmp_path):
    found = smoke(tmp_path, "oac_link")
    of = lambda key: [found[f"{key}_exponent_1.05_window_{window}"] for window in (2, 4)]
    few, more = of("rows_saved_percent")
    assert 20 < few < more and all(np.less((few, more), of("oracle_rows_saved_percent")))


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_oac_throughput_over_servers_compares_the_modes_and_their_bits(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: `make cluster`, or pip install -e '.[cluster]'")
    found = smoke(tmp_path, "oac_throughput", "--link", "remote", "--rounds", 1)
    assert found["bitwise_equal_remote"]
    assert not found["bitwise_equal_async_remote"]  # negative control
    keys = (
        "oac_over_sync_remote",
        "oac_over_async_remote",
        "remote_oac_over_local_oac",
    )
    assert all(found[key] > 0 for key in (*keys, "stage_ms_gather_remote", "examples_per_s_semisync_remote"))
    assert not any("emulated" in key for key in found)


class OtherRows(HostTables):
    """Emulates servers whose initial rows differ, equally in every mode."""

    def with_shard(self, stack, shard, parts):
        return super().with_shard(stack, shard, {**parts, "value": parts["value"] + 1})


@pytest.mark.realtime
@pytest.mark.parametrize(("home", "wanted"), [(HostTables, True), (OtherRows, False)])
def test_bits_over_servers_are_compared_with_sync_over_tables_in_this_process(home, wanted):
    job = Job(rows=2000, batch_size=32)
    found = equal(Work(job, 12, create=home.create), Work(job, 12), number=6)
    assert found["bitwise_equal_remote"] is wanted
    assert found["bitwise_equal_async_remote"] is False


def test_the_emulated_link_counts_what_passes_and_takes_its_time():
    link, tree = EmulatedLink(1e6, 0.0), {"a": np.zeros((100, 20), np.float32), "b": np.zeros(500, np.int32)}
    start = time.perf_counter()
    sent = link.send(tree, jax.devices()[0])
    assert time.perf_counter() - start >= 0.01  # 10,000 bytes
    fetched = link.fetch({"a": sent["a"]})
    assert link.passed == {"send": 10_000, "fetch": 8_000}
    np.testing.assert_array_equal(fetched["a"], tree["a"])


@pytest.mark.slow
def test_a_turn_counts_the_steady_state_and_leaves_the_pipeline_whole():
    """No batch after the last counted one is trained, and the next turn continues."""
    work = Work(Job(rows=2000, batch_size=32), number=12, window=4)
    for mode in ("sync", "oac", "async"):
        pipeline = work.pipeline(mode, tables=work.create())
        for number in (1, 2):
            assert turn(pipeline, work.batches[:9], 6) > 0
            assert pipeline.step == int(pipeline.state.dense.step) == 9 * number and not pipeline.running


class PlanPrefetcher:
    """Emulates a pipeline that plans 20 batches before it trains the first."""

    def run(self, stream):
        stream = iter(stream)
        for batch in [next(stream) for _ in range(20)]:
            yield None, batch

    def close(self):
        self.closed = True


def test_a_turn_never_comes_to_the_end_of_its_stream():
    """Otherwise its last batches would train with no planning, gathering and sending in parallel."""
    pipeline = PlanPrefetcher()
    assert turn(pipeline, list(range(9)), 6) > 0 and pipeline.closed
    with pytest.raises(ValueError, match="7 batches leave none to count after the first 6: give 8"):
        turn(pipeline, list(range(7)), 6)


def test_ratios_are_of_rates_within_a_round_and_windows_meet_their_like():
    times = {"sync": [4.0, 8.0], "async_window_2": [1.0, 4.0], "oac_window_2": [2.0, 2.0], "oac_window_8": [1.0, 1.0]}
    ways = [PipelineWay("sync"), PipelineWay("async", 2), PipelineWay("oac", 2), PipelineWay("oac", 8)]
    found = compare({name: np.array(each) for name, each in times.items()}, ways, 8)
    assert found["oac_window_2_over_sync"] == 3.0 and found["oac_window_2_over_async_window_2"] == 1.25
    assert found["examples_per_s_oac_window_8"] == 8 and found["examples_per_s_sync"] == 1.5
    assert found["oac_window_8_over_sync"] == 6.0 and "oac_window_8_over_async_window_8" not in found


def test_a_step_time_and_steps_make_modelled_seconds():
    """Computed with the arm's own median step time; None if some seed never reaches the target."""
    steps = {"sync": [90.0, 110.0], "oac_window_4": [90.0, 110.0], "async_window_4": [90.0, None]}
    step_s = {"sync": [0.002, 0.004], "async_window_4": [0.001, 0.002], "oac_window_4": [0.001, 0.001]}
    found = oac_time_to_accuracy.times(step_s, steps, 1.2)
    assert found["seconds_to_target_modelled_sync_exponent_1.2"] == pytest.approx(0.3)
    assert found["seconds_to_target_modelled_oac_window_4_exponent_1.2"] == pytest.approx(0.1)
    assert found["seconds_to_target_modelled_async_window_4_exponent_1.2"] is None
    assert found["oac_window_4_rate_over_sync"] == pytest.approx(3) and found["step_ms_sync"] == pytest.approx(3)
    assert found["sync_seconds_over_oac_window_4_modelled"] == pytest.approx(3)
    assert not any("async_window_4_seconds_over" in key for key in found)


def test_the_interval_of_a_ratio_of_seconds_covers_rounds_and_seeds():
    """With one of them fixed it is that of the other, and both draws are paired."""
    over = lambda step_s, steps: oac_time_to_accuracy.seconds_over(step_s, steps, "a", "b")
    rng = np.random.default_rng(0)
    step, steps = rng.uniform(1, 2, 24), rng.uniform(100, 200, 8)
    fixed = over({"a": list(2 * step), "b": list(step)}, {"a": list(3 * steps), "b": list(steps)})
    assert all(value == pytest.approx(6) for value in fixed.values())
    noisy = over({"a": [1.0] * 24, "b": [1.0] * 24}, {"a": list(steps), "b": [100.0] * 8})
    half = 1.96 * steps.std() / 8**0.5 / 100
    assert noisy[""] == pytest.approx(steps.mean() / 100) and noisy["_low"] < noisy[""] < noisy["_high"]
    assert noisy["_high"] - noisy["_low"] == pytest.approx(2 * half, rel=0.1)
    both = over({"a": list(step), "b": [1.0] * 24}, {"a": list(steps), "b": [100.0] * 8})
    assert both["_high"] / both["_low"] > noisy["_high"] / noisy["_low"]


def test_seeds_of_time_to_accuracy_start_from_their_own_rows_and_parameters():
    job = oac_time_to_accuracy.SkewJob(oac_time_to_accuracy.Config(), steps=1, every_steps=1)
    states = [job.fresh_state(seed) for seed in (0, 0, 1)]
    params = [jax.tree.leaves(state.dense.params) for state in states]
    for first, again, other in (params, [state.tables.parts("width_8")["value"] for state in states]):
        assert all(map(np.array_equal, first, again)) and not any(map(np.array_equal, first, other))


@pytest.mark.slow
def test_oac_time_to_accuracy_tells_steps_from_seconds(tmp_path):
    found = smoke(tmp_path, "oac_time_to_accuracy")
    end = "exponent_1.05"
    assert found[f"auc_loss_oac_window_4_{end}"] == 0 != found[f"auc_loss_async_window_4_{end}"]
    assert found[f"steps_to_target_oac_window_4_{end}"] == found[f"steps_to_target_sync_{end}"] <= found["steps"]
    for arm in ("sync", "semisync", "oac_window_4"):
        seconds = 1e-3 * found[f"step_ms_{arm}"] * found[f"steps_to_target_{arm}_{end}"]
        assert found[f"seconds_to_target_modelled_{arm}_{end}"] == pytest.approx(seconds)
    again = run("oac_time_to_accuracy", "--preset", "smoke", "--workdir", tmp_path, "--resume")
    assert again.returncode == 0 and results(tmp_path) == found  # all arms were complete


def test_time_to_accuracy_takes_each_seed_for_itself():
    """Sync ends at step 200; a seed below the target makes the arm's mean None; seeds that reach it are counted."""
    curve = lambda *aucs: [{"step": 100 * (i + 1), "test_auc": auc} for i, auc in enumerate(aucs)]
    curves = {(1.2, "sync", seed): curve(0.6, 0.7) for seed in (0, 1)}
    curves |= {(1.2, "late", 0): curve(0.6, 0.69, 0.71), (1.2, "late", 1): curve(0.6, 0.68, 0.699)}
    curves |= {(1.2, "lost", 0): curve(0.6, 0.69, 0.71), (1.2, "lost", 1): curve(0.6, 0.68, 0.69)}
    found = oac_time_to_accuracy.quality_of(curves, 2)
    assert found["target_auc_exponent_1.2"] == pytest.approx(0.699)
    assert found["steps_to_target_late_exponent_1.2"] == pytest.approx((200 + 100 * 0.009 / 0.02 + 300) / 2)
    assert found["seeds_that_reach_target_late_exponent_1.2"] == 2
    assert found["auc_loss_late_exponent_1.2"] == pytest.approx(0.015)  # at the end of sync, not of the arm
    assert found["steps_to_target_lost_exponent_1.2"] is None
    assert found["seeds_that_reach_target_lost_exponent_1.2"] == 1


@pytest.mark.slow
def test_shadowsync_quality_compares_every_way_with_one_replica(tmp_path):
    flags = ("--preset", "smoke", "--workdir", tmp_path)
    found = smoke(tmp_path, "shadowsync_quality", "--seeds", 1)
    assert found["regime"] == "free-running, emulated" and found["evaluated"] == "trainer 0"
    assert 0.6 < found["test_auc_none_trainers_4"] < found["test_auc_one_replica_trainers_1"]
    assert found["spread_fr_ma_5_trainers_4"] < found["spread_none_trainers_4"]
    first = logged(tmp_path)
    again = run("shadowsync_quality", *flags, "--resume")  # the first seed is complete
    assert again.returncode == 0 and logged(tmp_path)[: len(first)] == first
    found = results(tmp_path)
    assert len(logged(tmp_path)) == 2 * len(first) and "auc_over_foreground_s_ma-lerp_trainers_4" in found
    assert found["last_rounds"] and {row["last_rounds"] for row in logged(tmp_path)} == {True}
    wrong = run("shadowsync_quality", *flags[:3], tmp_path / "wrong", "--arms", "s_adam")
    assert wrong.returncode != 0 and "arm 's_adam'" in wrong.stderr and "Traceback" not in wrong.stderr


@pytest.mark.slow
def test_shadowsync_quality_gives_each_arm_the_rates_that_suit_it(tmp_path):
    flags = ("--seeds", 1, "--arms", "none", "s_ma-delta", "--factors", 0.05, 1, "--decay", "--curved", 0.5)
    found, rows = smoke(tmp_path, "shadowsync_quality", *flags), logged(tmp_path)
    assert len(rows) == 3 * 2 + 3 and found["seeds"] == 1  # the tuning seed is not compared
    assert found["factor_none_trainers_4"] == found["factor_s_ma-delta_trainers_4"] == 1  # the other one hardly learns
    assert {row["factor"] for row in rows[6:]} == {1}
    smoke(tmp_path, "shadowsync_quality", *flags, "--resume")
    assert logged(tmp_path) == rows


def test_rates_of_a_job_fall_to_zero_where_asked():
    def rates(steps, **flags):
        config = shadowsync_quality.Config(preset="smoke", warmup_steps=2, **flags)
        data = shadowsync_quality.make_quality_data(config, shadowsync_quality.size_of(config))
        job, _ = shadowsync_quality.QualityJob(config, data).job_of(steps, 2.0)
        fresh = {name: jnp.full((1, 1), slot.fill) for name, slot in job.task.row_optimizer.init(1).items()}
        moved = lambda step: job.task.row_optimizer.update(jnp.ones((1, 1)), jnp.zeros((1, 1)), fresh, step)[0]
        return [float(-moved(step)[0, 0]) / config.row_learning_rate for step in (0, 1, 5, 10)]

    assert rates(None) == pytest.approx([1, 2, 2, 2])
    assert rates(10) == pytest.approx([1, 1.8, 1, 0])


def test_an_arm_takes_the_factor_with_the_best_auc_and_trains_what_is_not_logged():
    class Log:
        rows: ClassVar[list] = []
        metrics = staticmethod(lambda: list(Log.rows))
        log = staticmethod(lambda row: Log.rows.append(row))

    class Job:
        run = staticmethod(lambda arm, n, workers, seed, factor: {"test_auc": 0.7 - abs(factor - 1.1) / 10})

    arm = ("s_ma", 4, 1)
    assert shadowsync_quality.tuned(Log, Job, arm, (0.5, 1, 2)) == 1
    Log.rows[0]["test_auc"] = 0.8
    assert shadowsync_quality.tuned(Log, Job, arm, (0.5, 1, 2, 4)) == 0.5 and len(Log.rows) == 4
    assert shadowsync_quality.tuned(Log, Job, ("s_ma", 8, 1), (2, 4)) == 2 and len(Log.rows) == 6


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_shadowsync_quality_in_processes_is_compared_with_the_emulation_of_its_gaps(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: `make cluster`, or pip install -e '.[cluster]'")
    flags = ("--where", "processes", "--trainers", 2, "--seeds", 2, "--arms", "none", "s_easgd")
    found, rows = smoke(tmp_path, "shadowsync_quality", *flags), logged(tmp_path)
    assert found["regime"] == "free-running, measured" and len(rows) == 2 * 5
    assert {row["arm"]: row["regime"] for row in rows if row["arm"] != "one_replica"} == {
        arm: f"free-running, {'emulated' if 'emulated' in arm else 'measured'}"
        for arm in ("none", "emulated_none", "s_easgd", "emulated_s_easgd")
    }
    for row in rows:
        if row["arm"] == "s_easgd":
            assert row["average_sync_gap"] >= 1 and row["spread"] == 0 and row["example_level_parallelism"] == 400
    assert abs(found["auc_over_twin_s_easgd_trainers_2"]) < 0.02
    assert found["spread_none_trainers_2"] > 0 and found["test_auc_s_easgd_trainers_2"] > 0.6


@given(n=st.integers(1, 5), batches=st.integers(5, 40), in_a_row=st.integers(1, 9), start=st.integers(0, 9))
def test_trainers_in_processes_have_equal_shares_of_the_stream_from_any_position(n, batches, in_a_row, start):
    shared = SharedStream(lambda: lambda first: range(first, batches), batches, in_a_row)
    shares = [list(shared(trainer, n)(0)) for trainer in range(n)]
    assert {len(share) for share in shares} == {batches // n}
    assert sorted(itertools.chain(*shares)) == list(range(batches // n * n))
    assert [list(shared(trainer, n)(start)) for trainer in range(n)] == [share[start:] for share in shares]
    for share in shares:
        jumps = {number for number, (a, b) in enumerate(itertools.pairwise(share), 1) if b != a + 1}
        assert jumps == {number for number in range(in_a_row, batches // n, in_a_row) if n > 1}


def test_the_emulated_twin_of_an_arm_takes_its_measured_gap():
    class Job:
        def run(self, arm, *of, gap):
            return arm, *of, gap

    row = dict(zip(shadowsync_quality.KEYS, ("s_ma", 4, 1, 7), strict=True)) | {"average_sync_gap": 2.6}
    rows = [row | {"seed": 6, "average_sync_gap": 9.0}, row, row | {"arm": "none", "average_sync_gap": None}]
    run_arm = lambda arm: shadowsync_quality.run_arm(Job(), "a cluster", rows, (arm, 4, 1, 7))
    assert run_arm("emulated_s_ma") == ("s_ma", 4, 1, 7, 3) and run_arm("emulated_none") == ("none", 4, 1, 7, 1)


def test_shadowsync_quality_plays_every_rule_in_both_forms():
    config = shadowsync_quality.Config()
    forms = {"easgd": ("symmetric", "sequential"), "ma": ("lerp", "delta"), "bmuf": ("lerp", "delta")}
    for rule, form in [(name, form) for name in forms for form in forms[name]]:
        script = shadowsync_quality.script_of(f"s_{rule}-{form}", config)
        assert dict(script.rule.settings)["form"] == form and script.rule.name == (
            "model_averaging" if rule == "ma" else rule
        )
        assert script.every_ticks == script.latency_ticks == config.shadow_steps
    script = shadowsync_quality.script_of("s_ma-delta_12", config)
    assert script.every_ticks == script.latency_ticks == 12
    assert dict(shadowsync_quality.script_of("fr_bmuf_30", config).rule.settings)["momentum"] == config.block_momentum
    for wrong in ("s_ma_0", "fr_ma", "fr_ma_0", "s_ma-sequential", "x_ma", "s_", "fr_ma_5_5", "fr_ma_-5"):
        with pytest.raises(ValueError, match="must be none, all_reduce"):
            shadowsync_quality.script_of(wrong, config)


def test_shadowsync_isolation_keeps_gaps_with_their_paces():
    """A slow pace has the shorter gap here: if gaps and paces were sorted separately, figures would be swapped."""
    turn = lambda step_s, gap: {"step_s": step_s, "gap": gap, "longest_step_over_median": 1.0, "late_s": 0.0}
    names = shadowsync_isolation.synchronisers_of(shadowsync_isolation.Config(pace_seconds=0.2, late_steps=(3,)), 0.5)
    assert list(names) == [
        "none", "foreground", "foreground_every_step", "blocked", "shadow_back_to_back",
        "shadow_pace_0.1_s", "shadow_pace_0.2_s", "shadow_pace_0.4_s", "foreground_late_3", "shadow_late_3",
    ]  # fmt: skip
    assert names["foreground_late_3"] == ("foreground", 0.0, 5, 1.5)
    found = {name: [turn(1.0, 5.0)] * 3 for name in names}
    found |= {"shadow_pace_0.1_s": [turn(2.0, 9.0)] * 3, "shadow_pace_0.4_s": [turn(4.0, 2.0)] * 3}
    found["blocked"] = [turn(1.0, float("inf"))] * 3
    results = shadowsync_isolation.rates_over_none(found)
    assert (results["average_sync_gap_shadow_pace_0.1_s"], results["shadow_pace_0.1_s_over_no_sync"]) == (9.0, 0.5)
    assert (results["average_sync_gap_shadow_pace_0.4_s"], results["shadow_pace_0.4_s_over_no_sync"]) == (2.0, 0.25)
    assert results["average_sync_gap_blocked"] is None and results["rounds"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["ma", "easgd"])
def test_shadowsync_isolation_keeps_its_contract(tmp_path, rule):
    found = smoke(tmp_path, "shadowsync_isolation", "--rule", rule)
    assert found["average_sync_gap_foreground"] >= 5 and found["average_sync_gap_shadow_back_to_back"] >= 1
    for way in ("shadow_back_to_back", "shadow_pace_0.2_s", "foreground", "shadow_late_3"):
        assert found[f"{way}_over_no_sync"] > 0
    assert found["average_sync_gap_blocked"] is None  # no round ends within the run
    assert found["longest_step_over_median_foreground_late_3"] > 2  # a step has slept for three others


@pytest.mark.slow
def test_shadowsync_stands_stress(tmp_path):
    found = smoke(tmp_path, "shadowsync_soak")
    assert found["wrong"] == found["torn_values"] == found["threads_left"] == 0
    assert found["conserved_sum_error_max"] < 1e-5 and found["rounds"] > 20
    assert {row["rule"] for row in logged(tmp_path)} == set(shadowsync_soak.RULES)
    assert {row["kind"] for row in logged(tmp_path)} == {"Shadow", "Foreground"}
    for failure, policy in shadowsync_soak.CASES:
        assert found[f"sets_{failure}_{policy}"] >= 1


@pytest.mark.slow
def test_a_plain_users_classifier_folds_rounds_in_by_every_default(tmp_path):
    """150 steps; only the experiment's full 1,500 show a gain by the defaults."""
    found = smoke(tmp_path, "shadowsync_classifier")
    for model, rule in itertools.product(("linen", "nnx"), ("easgd", "ma", "bmuf")):
        assert found[f"rounds_least_{model}_s_{rule}"] > 0
        assert found[f"test_accuracy_{model}_s_{rule}"] > 0.15  # 20 classes
        assert f"above_none_{model}_s_{rule}" in found


@pytest.mark.slow
def test_cpr_overhead_trains_every_scheme_and_goes_on_seed_by_seed(tmp_path):
    schemes = "vanilla", "scar", "mfu", "ssu", "random"
    smoke(tmp_path, "cpr_overhead", "--seeds", 1, "--schemes", *schemes)
    first = logged(tmp_path)
    assert [row["scheme"] for row in first] == ["no_failure", *schemes]
    assert all(row["shards_failed"] == 2 and row["realized_pls"] > 0 for row in first[1:])
    again = run(
        "cpr_overhead", "--preset", "smoke", "--seeds", 2, "--schemes", *schemes, "--workdir", tmp_path, "--resume"
    )
    assert again.returncode == 0 and logged(tmp_path)[:6] == first and results(tmp_path)["seeds"] == 2
    assert "cpr_mfu_test_auc_minus_random" in results(tmp_path)
    other = run("cpr_overhead", "--preset", "smoke", "--failures", 3, "--workdir", tmp_path, "--resume")
    assert other.returncode != 0 and "failures 2, not 3" in other.stderr and len(logged(tmp_path)) == 12
    assert json.loads((tmp_path / "config.json").read_text())["failures"] == 2


@pytest.mark.slow
def test_cpr_overhead_over_pls_draws_a_line_for_each_scheme(tmp_path):
    found = smoke(tmp_path, "cpr_overhead", "--over-pls", "--schemes", "vanilla", "mfu")
    assert found["vanilla_runs"] == found["mfu_runs"] == 4 and found["vanilla_realized_pls_max"] > 0.5
    assert found["vanilla_slope"] > 0 and found["vanilla_correlation_ne"] > 0.5


@pytest.mark.slow
def test_cpr_real_cost_measures_every_way(tmp_path):
    found = smoke(tmp_path, "cpr_real_cost")
    ways = ("orbax_standard", "orbax_pytree", "orbax_pytree_async", "full", "full_blocking", "rows")
    assert all(found[f"{way}_save_s"] > 0 and found[f"{way}_mb"] > 0 for way in ways)
    budget = 0.125 * found["rows_of_table"]
    assert budget - 1 < found["rows_saved"] <= budget + 8 and found["recovery_rows_saved"] <= budget + 8
    assert found["rows_mb"] < 0.2 * found["full_mb"] and found["recovery_stall_s"] > 0
    assert not (tmp_path / "files").exists()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    "--tables host --hots mlperf --hots-scale 0.1",
    "--tables device",
    "--tables host --model dcnv2_mlperf --width 8 --batch-size 64",
])  # fmt: skip
def test_throughput_measures_every_part(tmp_path, flags):
    found = smoke(tmp_path, "throughput", *flags.split())
    assert all(found[f"{part}_ms"] > 0 for part in ("plan", "read", "update", "put", "step", "planned_step", "gemm"))
    assert found["step_over_parts_low"] > 0 and found["planned_step_over_parts_low"] > 0
    assert found["gemm_share_of_step"] > 0 and found["peak_memory_mb"] > found["tables_and_slots_mb"]
    assert found["peak_over_tables_and_slots"] > 1 and found["allocated_mb_per_step"] > 0
