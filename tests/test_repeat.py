"""An experiment repeated: its interval covers what whole runs differ by, and no run is lost or counted twice."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import repeat
from accelerator.measure import interval
from main.signals import Stopped

COMMAND = "throughput.py --preset smoke"


@pytest.fixture
def started(monkeypatch):
    """Paths of the runs that were started; the results of each are made up: its number plus 0.5."""
    paths: list[Path] = []

    def run_child(words, *_, **__):
        path = Path(words[words.index("--workdir") + 1])
        assert not path.exists() and Path(words[1]).name == "throughput.py" and words[2:4] == ["--preset", "smoke"]
        path.mkdir()
        (path / "results.json").write_text(json.dumps({"rate": int(path.name) + 0.5, "side": "a"}))
        paths.append(path)

    monkeypatch.setattr(repeat, "run_child", run_child)
    return paths


def test_an_interval_over_runs_holds_its_share_and_that_of_one_run_does_not():
    """Where runs differ as much as the rounds within a run do."""
    rng, inside = np.random.default_rng(0), np.zeros(2)
    for _ in range(1000):
        rounds = 10 + rng.standard_normal((6, 1)) + rng.standard_normal((6, 25))
        found = repeat.over_runs([{"rate": float(np.median(each))} for each in rounds])
        of_one = interval(rounds[0], draws=200)
        inside += found["rate_low"] < 10 < found["rate_high"], of_one["low"] < 10 < of_one["high"]
    assert 0.93 < inside[0] / 1000 < 0.97 and inside[1] / 1000 < 0.5


def test_figures_keep_their_keys_and_what_is_no_number_is_not_averaged():
    runs = [
        {"x_at_4": value, "x_low_at_4": 0.0, "x_high_at_4": 9.0, "x_min_at_4": -1.0, "kept": True, "equal": value > 1}
        for value in (1.0, 2.0, 3.0)
    ]
    found = repeat.over_runs([runs[0] | {"only_here": 1.0}, *runs[1:]])
    half = 4.302652729911275 / 3**0.5  # of t with two degrees of freedom, and a deviation of 1
    assert found == {
        "repeats": 3, "x_at_4": 2.0, "x_low_at_4": pytest.approx(2 - half), "x_high_at_4": pytest.approx(2 + half),
        "x_min_at_4": 1.0, "x_at_4_max": 3.0, "kept": True, "equal": "False or True",
    }  # fmt: skip


def test_runs_are_added_and_one_that_was_cut_off_is_measured_anew(tmp_path, started, capsys):
    config = repeat.Config(COMMAND, times=2, workdir=tmp_path)
    assert repeat.main(config)["rate"] == 2.0 and f"{COMMAND}, 2 runs" in capsys.readouterr().out
    first = (tmp_path / "1" / "results.json").stat().st_mtime_ns
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "metrics.jsonl").write_text("{}\n")
    found = repeat.main(repeat.Config(COMMAND, times=4, workdir=tmp_path, resume=True))
    assert (found["repeats"], found["rate"], found["rate_min"], found["rate_max"]) == (4, 3.0, 1.5, 4.5)
    assert [path.name for path in started] == ["1", "2", "3", "4"]
    assert (tmp_path / "1" / "results.json").stat().st_mtime_ns == first
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["run"], row["rate"]) for row in rows] == [(1, 1.5), (2, 2.5), (3, 3.5), (4, 4.5)]
    with pytest.raises(ValueError, match="was begun with command"):
        repeat.main(repeat.Config(COMMAND + " --rounds 9", workdir=tmp_path, resume=True))


def test_runs_have_seeds_of_their_own_if_asked(tmp_path, started, monkeypatch):
    seeds, run_child = [], repeat.run_child
    monkeypatch.setattr(repeat, "run_child", lambda words, *_, **__: seeds.append(words[-2:]) or run_child(words))
    repeat.main(repeat.Config(COMMAND, times=2, workdir=tmp_path / "a", own_seeds=True))
    assert seeds == [["--seed", "0"], ["--seed", "1"]]
    with pytest.raises(ValueError, match="--own-seeds gives each run its --seed: leave it out"):
        repeat.main(repeat.Config(f"{COMMAND} --seed 3", times=2, workdir=tmp_path / "b", own_seeds=True))


def test_a_signal_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(repeat, "run_child", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped, match=f"SIGTERM: go on with .*{tmp_path}.* --resume"):
        repeat.main(repeat.Config(COMMAND, workdir=tmp_path / "a"))


@pytest.mark.parametrize(
    ("command", "times", "words"),
    [
        ("", 6, "'' is no experiment"),
        ("thruput.py", 6, r"'thruput\.py' is no experiment of .*experiments: begin with its file"),
        ("../setup.py", 6, "is no experiment"),
        ("main", 6, "is no experiment"),
        ("repeat.py --times 3", 6, "would repeat itself"),
        ("throughput.py --workdir=a --rounds 4", 6, "has --workdir=a, and each run has a directory of its own"),
        ("throughput.py --resume", 6, "has --resume"),
        (COMMAND, 1, "--times 1 must be at least 2"),
    ],
)
def test_what_cannot_be_repeated_is_refused_before_anything_runs(tmp_path, started, command, times, words):
    with pytest.raises(ValueError, match=words):
        repeat.main(repeat.Config(command, times, tmp_path / "a"))
    assert not started and not (tmp_path / "a").exists()


@pytest.mark.slow
def test_a_benchmark_is_repeated(tmp_path):
    words = "throughput.py --preset smoke --rows 2000 --batch-size 64"
    found = repeat.main(repeat.Config(words, times=2, workdir=tmp_path))
    each = [json.loads((tmp_path / str(n) / "results.json").read_text()) for n in (1, 2)]
    assert each[0]["step_ms"] != each[1]["step_ms"] and found["repeats"] == 2
    assert found["step_ms"] == pytest.approx(np.mean([one["step_ms"] for one in each]))
    assert {"step_over_parts", "step_over_parts_low", "step_over_parts_high", "step_ms_low"} <= found.keys()
    with pytest.raises(OSError, match=r"run 1 ended with code \d+, see .*1\.log"):
        repeat.main(repeat.Config("throughput.py --model none", workdir=tmp_path / "b"))
