"""The experiments run as users run them and keep their contract."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = {"test_auc", "test_log_loss", "test_normalized_entropy", "examples_per_s", "examples", "steps"}


def run(name, *flags):
    command = [sys.executable, ROOT / "experiments" / f"{name}.py", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True)


def results(workdir):
    return json.loads((workdir / "results.json").read_text())


@pytest.mark.parametrize("tables", ["device", "host"])
def test_train_keeps_the_contract_and_learns(tmp_path, tables):
    done = run("train", "--preset", "smoke", "--tables", tables, "--batch-size", 512, "--workdir", tmp_path)
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert found.keys() >= RESULTS and found["steps"] == 100 and found["examples"] == 51_200
    assert 0.6 < found["test_auc"] < found["teacher_auc"]
    assert json.loads((tmp_path / "config.json").read_text())["tables"] == tables
    assert json.loads((tmp_path / "environment.json").read_text())["jax"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [13, 26, 39, 52, 65, 78, 91, 100]
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    again = run("train", "--workdir", tmp_path)
    assert again.returncode != 0 and "holds a run already" in again.stderr and "Traceback" not in again.stderr


def test_train_says_what_a_bad_file_has(tmp_path):
    (tmp_path / "train.txt").write_text("1\t2\n")
    done = run("train", "--data", "criteo", "--path", tmp_path / "train.txt", "--workdir", tmp_path / "run")
    assert done.returncode != 0 and "train.txt, line 1: 2 fields" in done.stderr and "Traceback" not in done.stderr


def test_criteo_defaults_reach_their_auc(real_data, tmp_path):
    """One seed here; the README's figure is the mean of three."""
    raw = real_data / "criteo" / "train_110000.tsv.gz"
    assert run("prepare", "--sources", raw, "--directory", tmp_path / "rows").returncode == 0
    done = run("train", "--data", "criteo", "--path", tmp_path / "rows", "--workdir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert results(tmp_path / "run")["test_auc"] >= 0.755
