"""What a run reports of its techniques: failures at their steps, a table with units, and one picture of all three."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import demo
import matplotlib.figure
import pytest
import train
from main import plots
from main.cli import listing
from main.signals import Stopped
from test_runs import TINY, rows_of, signalled
from trained_run import changed

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
FAILING = changed(TINY, tables="host", cpr="vanilla", fail=("3:3", "8:1,5", "12:0"), save_every_steps=2)
LOST = [{"step": 3, "examples": 192, "shards": [3]}, {"step": 8, "examples": 512, "shards": [1, 5]}]


@pytest.fixture
def pictures(monkeypatch):
    """All figures that are saved."""
    drawn, save = [], matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *to, **how: (drawn.append(self), save(self, *to, **how))
    )
    return drawn


def dotted(picture):
    """Positions of the dotted lines in each visible panel, and the labels above them."""
    panels = [axis for axis in picture.axes if axis.get_visible()]
    places = [[line.get_xdata()[0] for line in axis.lines if line.get_linestyle() == ":"] for axis in panels]
    return places, [[text.get_text() for text in axis.texts if text.xy[1] == 1] for axis in panels]


# The record of failures


@pytest.mark.slow
def test_a_row_tells_of_the_failures_since_the_one_before_and_the_picture_marks_all(tmp_path, pictures):
    train.main(changed(FAILING, pipeline="oac", workdir=tmp_path))
    # A failure follows the row of its step, so the next row reports it.
    assert {row["step"]: row["failures"] for row in rows_of(tmp_path)} == {3: [], 6: LOST[:1], 9: LOST[1:], 12: []}
    places, words = dotted(pictures[-1])
    assert len(places) >= 4 and all(where == [192, 512, 768] for where in places)
    assert all(said == ["3", "1, 5", "0"] for said in words)
    assert "failures" not in json.loads((tmp_path / "results.json").read_text())


@pytest.mark.slow
def test_without_anything_that_recovers_no_failure_is_noted_nor_marked(tmp_path, pictures):
    train.main(changed(TINY, workdir=tmp_path))
    assert all("failures" not in row for row in rows_of(tmp_path)) and not any(dotted(pictures[-1])[0])


@pytest.mark.slow
def test_a_run_that_goes_on_tells_of_each_failure_once(tmp_path, monkeypatch, pictures):
    whole, config = train.data_of, changed(FAILING, evaluations=1, workdir=tmp_path)
    with monkeypatch.context() as patched:
        stream = lambda data: lambda start: signalled(data.train(start), 7, signal.SIGTERM)
        patched.setattr(train, "data_of", lambda flags: (data := whole(flags))._replace(train=stream(data)))
        with pytest.raises(Stopped):  # between the two failures
            train.main(config)
    assert rows_of(tmp_path) == []
    train.main(changed(config, resume=True))
    assert [row["failures"] for row in rows_of(tmp_path)] == [LOST]
    assert dotted(pictures[-1])[0][0] == [192, 512, 768]


# The table


def test_the_table_has_names_and_units_for_all_that_a_run_says():
    results = dict.fromkeys([line.key for group in plots.TABLE.values() for line in group], 0.25) | {"steps": 7}
    said = [line.strip() for line in listing(results, plots.TABLE).splitlines()]
    assert "OAC: rows that arrived too old" in said[said.index("Techniques") + 1]
    by_name = {name.strip(): value for name, _, value in (line.rpartition("   ") for line in said if "   " in line)}
    assert by_name["OAC: rows that arrived too old"].strip() == "25.00 %"
    assert by_name["CPR: portion of lost samples"].strip() == "25.00 %"
    assert by_name["ShadowSync: sync gap"].strip() == "0.2500 steps"
    assert not any("_" in line for line in said) and "" not in said


@pytest.mark.slow
def test_nothing_of_a_run_is_left_over_below_its_table(tmp_path, capsys):
    results = train.main(changed(FAILING, workdir=tmp_path, pipeline="oac", shadowsync="easgd"))
    table = capsys.readouterr().out.partition("Test set\n")[2].partition("run written")[0]
    assert not results.keys() - {line.key for group in plots.TABLE.values() for line in group}
    assert "\n\n" not in table and "_" not in table
    assert table.index("OAC: ") < table.index("ShadowSync: ") < table.index("CPR: shards failed")


# The demonstration


def test_both_arms_differ_in_the_techniques_alone_and_failures_lie_within_the_run():
    for preset in demo.SIZES:
        none, both = (demo.flags_of(arm, demo.Config(preset=preset, seed=3)) for arm in demo.ARMS)
        assert both[: len(none)] == none and "--cpr" not in none
        steps = int(none[none.index("--steps") + 1]) if "--steps" in none else 1_000
        at = both.index("--fail")
        assert [int(word.partition(":")[0]) for word in both[at + 1 :]] == [steps // 3, 2 * steps // 3]


def test_arms_have_two_devices_whatever_the_process_has(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --xla_force_host_platform_device_count=8")
    assert demo.environment()["XLA_FLAGS"].split() == ["--a=1", "--xla_force_host_platform_device_count=2"]


def demonstrate(directory, *flags):
    command = [sys.executable, EXPERIMENTS / "demo.py", "--preset", "smoke", "--workdir", directory, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_the_demonstration_stops_on_a_signal_goes_on_and_trains_no_arm_twice(tmp_path):
    with demonstrate(tmp_path) as first:
        line = next(line for line in first.stdout if line.startswith("step "))  # the first arm is training
        os.kill(first.pid, signal.SIGTERM)
        said, wrong = first.communicate()
    assert first.returncode == 128 + signal.SIGTERM and "--resume" in wrong and line
    assert "Traceback" not in wrong and not (tmp_path / "results.json").exists()
    with demonstrate(tmp_path, "--resume") as second:
        said, wrong = second.communicate()
    assert second.returncode == 0, wrong
    assert "techniques  test AUC" in said and (tmp_path / "demo.png").stat().st_size > 10_000
    found = json.loads((tmp_path / "results.json").read_text())
    for arm in demo.ARMS:
        mine = json.loads((tmp_path / arm / "results.json").read_text())
        assert {f"{arm}_{key}" for key in mine} <= found.keys() and found[f"{arm}_test_auc"] == mine["test_auc"]
    assert found["all_shards_failed"] == 3 and found["all_pls"] > 0 and "none_pls" not in found
    with demonstrate(tmp_path, "--resume") as third:
        said, wrong = third.communicate()
    assert third.returncode == 0 and said.count("is not trained again") == 2 and "step " not in said


@pytest.mark.process
def test_an_arm_that_fails_is_told_with_its_way_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setitem(demo.SIZES, "smoke", {"steps": 3, "rows": 3})
    with pytest.raises(OSError, match="with none of the techniques ended with code 1, see above; go on with make demo"):
        demo.main(demo.Config(preset="smoke", workdir=tmp_path))
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "results.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        demo.main(demo.Config(preset="smoke", workdir=tmp_path, resume=True))
