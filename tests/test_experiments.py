"""The experiments run as users run them and keep their contract."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrec.checkpoint import images, read_manifest
from jaxrec.checkpoint.image import load_arrays

ROOT = Path(__file__).parent.parent
RESULTS = {"test_auc", "test_log_loss", "test_normalized_entropy", "examples_per_s", "examples", "steps"}


def run(name, *flags, cwd=None):
    command = [sys.executable, ROOT / "experiments" / f"{name}.py", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def results(workdir):
    return json.loads((workdir / "results.json").read_text())


def logged(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("tables", [pytest.param("device", marks=pytest.mark.slow), "host"])
def test_train_keeps_the_contract_and_learns(tmp_path, tables):
    done = run("train", "--preset", "smoke", "--tables", tables, "--batch-size", 512, "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert found.keys() >= RESULTS and found["steps"] == 100 and found["examples"] == 51_200
    assert 0.6 < found["test_auc"] < found["teacher_auc"]
    assert json.loads((tmp_path / "config.json").read_text())["tables"] == tables
    assert json.loads((tmp_path / "environment.json").read_text())["jax"]
    assert [row["step"] for row in logged(tmp_path)] == [13, 26, 39, 52, 65, 78, 91, 100]
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    again = run("train", "--workdir", tmp_path)
    assert again.returncode != 0 and "holds a run already" in again.stderr and "Traceback" not in again.stderr


def test_train_says_what_a_bad_file_has(tmp_path):
    (tmp_path / "train.txt").write_text("1\t2\n")
    for _ in range(2):
        done = run("train", "--data", "criteo", "--path", "train.txt", "--workdir", "run", cwd=tmp_path)
        assert done.returncode != 0 and "train.txt, line 1: 2 fields" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_criteo_defaults_reach_their_auc(real_data, tmp_path):
    """One seed here; the README's figure is the mean of three."""
    raw = real_data / "criteo" / "train_110000.tsv.gz"
    assert run("prepare", "--sources", raw, "--directory", tmp_path / "rows").returncode == 0
    done = run("train", "--data", "criteo", "--path", tmp_path / "rows", "--workdir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert results(tmp_path / "run")["test_auc"] >= 0.755


def start_and_interrupt(workdir, *flags):
    """Runs train.py until it has evaluated once, then sends Ctrl-C; returns what it said."""
    command = [sys.executable, ROOT / "experiments" / "train.py", "--workdir", workdir, *flags]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in child.stdout:
        if line.startswith("step "):
            child.send_signal(signal.SIGINT)
            break
    return child.communicate()[1]


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["host", "device"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, tables):
    flags = ["--preset", "smoke", "--tables", tables, "--batch-size", "256", "--steps", "60", "--evaluations", "6"]
    whole = run("train", *flags, "--workdir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    said = start_and_interrupt(tmp_path / "cut", *flags)
    assert "stopped and saved; go on with" in said and "Traceback" not in said
    assert not (tmp_path / "cut" / "results.json").exists()
    again = run("train", *flags, "--workdir", tmp_path / "cut", "--resume")
    assert again.returncode == 0 and "going on from" in again.stdout, again.stderr
    a, b = (images(tmp_path / name / "checkpoints")[0] for name in ("whole", "cut"))
    first, second = read_manifest(a), read_manifest(b)
    assert first.step == second.step == 60 and {*first.files} == {*second.files}
    leaves = {name.split("/")[1] for name in first.files if name.count("/") > 1}
    jax.tree.map(np.testing.assert_array_equal, load_arrays(first, leaves), load_arrays(second, leaves))
    whole, cut = logged(tmp_path / "whole"), logged(tmp_path / "cut")
    assert [(row["step"], row["test_auc"]) for row in whole] == [(row["step"], row["test_auc"]) for row in cut]


@pytest.mark.slow
def test_oac_equals_sync_and_its_mutants_do_not(tmp_path):
    done = run("oac_equivalence", "--preset", "smoke", "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert found["bitwise_equal"] and found["mutants_caught"] == found["mutants_total"] == 5
    assert found["stale_fraction_error_max"] < 0.05


@pytest.mark.slow
def test_oac_throughput_names_its_link(tmp_path):
    done = run("oac_throughput", "--preset", "smoke", "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert found["oac_over_sync"] > 0 and found["bytes_saved_percent"] > 20  # one core has nothing to overlap
    assert found["emulated_link_balanced_link"] is True and found["emulated_link_no_link"] is False


@pytest.mark.slow
def test_oac_takes_less_time_to_the_accuracy_of_sync(tmp_path):
    done = run("oac_time_to_accuracy", "--preset", "smoke", "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert found["auc_loss_oac_window_4_exponent_1.05"] == 0 < found["auc_loss_async_window_4_exponent_1.05"]
    assert found["seconds_to_target_oac"] < found["seconds_to_target_sync"]
    again = run("oac_time_to_accuracy", "--preset", "smoke", "--workdir", tmp_path, "--resume")
    assert again.returncode == 0 and results(tmp_path) == found  # all arms were there


@pytest.mark.slow
def test_shadowsync_quality_compares_every_way_with_one_replica(tmp_path):
    flags = ("--preset", "smoke", "--workdir", tmp_path)
    done = run("shadowsync_quality", *flags, "--seeds", 1)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert found["regime"] == "free-running, emulated" and found["evaluated"] == "trainer 0"
    assert 0.6 < found["test_auc_none_trainers_4"] < found["test_auc_one_replica_trainers_1"]
    assert found["spread_fr_ma_5_trainers_4"] < found["spread_none_trainers_4"]
    first = logged(tmp_path)
    again = run("shadowsync_quality", *flags, "--resume")  # arm by arm: the first seed is there
    assert again.returncode == 0 and logged(tmp_path)[: len(first)] == first
    assert len(logged(tmp_path)) == 2 * len(first) and "auc_over_foreground_s_ma_trainers_4" in results(tmp_path)
    wrong = run("shadowsync_quality", *flags[:3], tmp_path / "wrong", "--arms", "s_adam")
    assert wrong.returncode != 0 and "arm 's_adam'" in wrong.stderr and "Traceback" not in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["ma", "easgd"])
def test_shadowsync_isolation_keeps_its_contract(tmp_path, rule):
    done = run("shadowsync_isolation", "--preset", "smoke", "--rule", rule, "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert found["foreground_sync_gap"] == 5 and found["average_sync_gap"] >= 1
    for way in ("shadow", "blocked", "foreground"):
        assert found[f"{way}_over_no_sync"] > 0


@pytest.mark.slow
def test_shadowsync_stands_stress(tmp_path):
    done = run("shadowsync_soak", "--preset", "smoke", "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert found["torn_values"] == found["threads_left"] == 0 and found["conserved_sum_error_max"] < 1e-5
    assert found["rounds"] > 20 and found["sets"] >= 4  # every rule
    assert {row["rule"] for row in logged(tmp_path)} == {"s_easgd", "s_ma", "s_ma_delta", "s_bmuf"}


@pytest.mark.slow
def test_cpr_overhead_models_emulates_and_measures(tmp_path):
    done = run("cpr_overhead", "--preset", "smoke", "--seeds", 1, "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    wanted = {"a_full": 8.50, "a_cpr": 0.53, "b_full": 8.20, "b_cpr": 0.68}  # the paper's percentages
    for key, percent in wanted.items():
        assert found[f"setting_{key}_percent_modelled"] == pytest.approx(percent, abs=0.01)
        assert found[f"setting_{key}_percent_emulated"] == pytest.approx(percent, abs=0.2)
    first = logged(tmp_path)
    assert [row["scheme"] for row in first] == ["no_failure", "vanilla", "scar", "mfu", "ssu"]
    assert all(row["shards_failed"] == 2 and row["realized_pls"] > 0 for row in first[1:])
    again = run("cpr_overhead", "--preset", "smoke", "--seeds", 2, "--workdir", tmp_path, "--resume")
    assert again.returncode == 0 and logged(tmp_path)[:5] == first and results(tmp_path)["seeds"] == 2
    other = run("cpr_overhead", "--preset", "smoke", "--failures", 3, "--workdir", tmp_path, "--resume")
    assert other.returncode != 0 and "failures 2, not 3" in other.stderr and len(logged(tmp_path)) == 10
    assert json.loads((tmp_path / "config.json").read_text())["failures"] == 2


@pytest.mark.slow
def test_cpr_pls_draws_a_line_for_each_scheme(tmp_path):
    done = run("cpr_pls", "--preset", "smoke", "--schemes", "vanilla", "mfu", "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert found["vanilla_runs"] == found["mfu_runs"] == 4 and found["vanilla_realized_pls_max"] > 0.5
    assert found["vanilla_slope"] > 0 and found["vanilla_correlation_ne"] > 0.5


@pytest.mark.slow
def test_cpr_real_cost_measures_every_way(tmp_path):
    done = run("cpr_real_cost", "--preset", "smoke", "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    ways = ("orbax_standard", "orbax_pytree", "orbax_pytree_async", "full", "full_blocking", "rows")
    assert all(found[f"{way}_save_s"] > 0 and found[f"{way}_mb"] > 0 for way in ways)
    budget = 0.125 * found["rows_of_table"]
    assert budget - 1 < found["rows_saved"] <= budget + 8 and found["recovery_rows_saved"] <= budget + 8
    assert found["rows_mb"] < 0.2 * found["full_mb"] and found["recovery_stall_s"] > 0
    assert not (tmp_path / "files").exists()


@pytest.mark.parametrize("tables", ["host", pytest.param("device", marks=pytest.mark.slow)])
def test_throughput_measures_every_part(tmp_path, tables):
    done = run("throughput", "--preset", "smoke", "--tables", tables, "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert all(found[f"{part}_ms"] > 0 for part in ("plan", "read", "update", "put", "step", "gemm"))
    assert found["gemm_share_of_step"] > 0 and found["peak_memory_mb"] > found["tables_and_slots_mb"]
