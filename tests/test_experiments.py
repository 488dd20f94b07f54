"""The experiments run as users run them and keep their contract."""

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrec.checkpoint import images, read_manifest, verify
from jaxrec.checkpoint.image import leaves_of, load_arrays

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
    (tmp_path / "train.txt").write_text("1\t2\n" * 12)
    for flags in ((), ("--resume",)):
        done = run("train", "--data", "criteo", "--path", "train.txt", "--workdir", "run", *flags, cwd=tmp_path)
        assert done.returncode != 0 and "train.txt, line 1: 2 fields" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_criteo_defaults_reach_their_auc(real_data, tmp_path):
    """One seed here; the README's figure is the mean of three."""
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
    """Reads what is said up to a line that begins with some words."""
    for line in stream:
        if line.startswith(words):
            return line
    raise AssertionError(f"no line begins with {words}")


def last_arrays(workdir):
    image = read_manifest(images(workdir / "checkpoints")[0])
    return image, load_arrays(image, leaves_of(image))


def without_clock(rows):
    return [{key: value for key, value in row.items() if key != "train_seconds"} for row in rows]


def assert_equal_runs(a, b):
    (image_a, arrays_a), (image_b, arrays_b) = last_arrays(a), last_arrays(b)
    assert image_a.step == image_b.step and arrays_a.keys() == arrays_b.keys()
    jax.tree.map(np.testing.assert_array_equal, arrays_a, arrays_b)
    assert without_clock(logged(a)) == without_clock(logged(b))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("home", "name", "code"),
    [("host", "SIGTERM", 143), ("device", "SIGHUP", 129), ("mapped", "SIGINT", 130), ("requeued", "SIGTERM", 75)],
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, home, name, code):
    of_home = {"host": ("--tables", "host"), "mapped": ("--tables", "host", "--table-directory", tmp_path / "tables")}
    flags = [*SMALL, "--steps", 60, "--evaluations", 6]
    whole = run("train", *flags, "--workdir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    flags += [*of_home.get(home, ()), "--resume", *(["--requeue"] if home == "requeued" else [])]
    child = start(tmp_path / "cut", *flags)
    read_until(child.stdout, "step ")
    child.send_signal(signal.Signals[name])
    said = child.communicate()[1]
    assert child.returncode == code and f"{name}: stopped and saved at step" in said and "Traceback" not in said
    assert not (tmp_path / "cut" / "results.json").exists()
    again = run("train", *flags, "--workdir", tmp_path / "cut")
    assert again.returncode == 0 and "going on from" in again.stdout, again.stderr
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")
    before = (tmp_path / "cut" / "results.json").read_bytes()
    once_more = run("train", *flags, "--workdir", tmp_path / "cut")
    assert once_more.returncode == 0 and "is complete" in once_more.stdout
    assert (tmp_path / "cut" / "results.json").read_bytes() == before


@pytest.mark.slow
def test_two_ctrl_c_within_milliseconds_lose_nothing(tmp_path):
    """Ten times, at ten stages of a run; what was said to be saved is there."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    steps = 0
    for _ in range(10):
        child = start(tmp_path / "run", *SMALL, "--steps", 4000, "--evaluations", 800, "--resume", env=environment)
        read_until(child.stdout, "step ")
        child.send_signal(signal.SIGINT)
        threading.Event().wait(0.005)
        child.send_signal(signal.SIGINT)
        said = child.communicate()[1]
        assert child.returncode == 130 and "Traceback" not in said, said
        step = int(re.search(r"stopped and saved at step (\d+)", said)[1])
        verify(read_manifest(images(tmp_path / "run" / "checkpoints")[0]))
        assert last_arrays(tmp_path / "run")[0].step == step > steps
        steps = step


@pytest.mark.slow
def test_a_closed_terminal_saves(tmp_path):
    """The terminal is a real one: its other end is closed, and all that is said from then on fails."""
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
    image, _ = last_arrays(tmp_path)
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
    """Trains in a file system of a few MB that is made for this."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount: unshare -Urm fails")
    script = IN_A_SMALL_DISK.format(**disk)
    command = [sys.executable, ROOT / "experiments" / "train.py", *SMALL, "--steps", "60", "--save-every-steps", "10"]
    command = ["unshare", "-Urm", "bash", "-c", script, "bash", directory, *command]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_a_full_disk_does_not_end_training(tmp_path):
    """Space is made after the first failure: training goes on, and the last state is saved."""
    done = train_on_a_small_disk(tmp_path, size="30m", filler="29M", free="filler")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("a save failed; the next one tries again") >= 1 and "No space left" in done.stdout
    assert "step 60: test AUC" in done.stdout and "the last state is saved" in done.stdout
    assert '"last_state_saved": true' in done.stdout and '"saves_failed": 0' not in done.stdout


@pytest.mark.slow
def test_a_disk_that_stays_full_is_told_at_the_end(tmp_path):
    done = train_on_a_small_disk(tmp_path, size="2m", filler="1000", free="nothing")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "step 60: test AUC" in done.stdout and "the last state is NOT saved" in done.stdout
    assert "error: the last state could not be saved" in done.stdout
    assert '"last_state_saved": false' in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_train_stands_kills(tmp_path):
    done = run("train_soak", "--preset", "smoke", "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert found["wrong"] == 0 and found["signals"] >= 1 and found["runs_finished"] >= 1


@pytest.mark.slow
def test_oac_equals_sync_and_its_mutants_do_not(tmp_path):
    done = run("oac_equivalence", "--preset", "smoke", "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert found["bitwise_equal"] and found["mutants_caught"] == found["mutants_total"] == 5
    assert found["stale_rows_miscounted"] == 0 and found["stale_fraction_max"] > 0
    assert found["broken_runs"] >= 10 and found["broken_runs_wrong"] == 0


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
