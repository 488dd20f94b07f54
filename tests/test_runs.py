"""A run owns its directory, stops on signals, reports, and keeps the cost of saves within its bound."""

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import train
from hypothesis import given, settings
from hypothesis import strategies as st
from main import saving
from main.cli import Flags, Run
from main.config import config_of
from main.run_dir import to_json
from main.saving import PeriodicSaves
from main.signals import STOPPING, Stopped, stop_on_signals
from trained_run import changed
from watching import differences

from jaxrec import StepInfo
from jaxrec.checkpoint import images, read_manifest

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Small(Flags):
    """Flags of a test."""

    steps: int = 3
    resume: bool = False


def written(directory):
    return json.loads((directory / "config.json").read_text())


# The directory of a run.


def test_a_directory_is_a_run_from_the_first_second(tmp_path):
    with Run("a", Small(), tmp_path) as first:  # left before anything was logged
        assert written(tmp_path)["run"] == first.id and len(first.id) == 16
        with pytest.raises(ValueError, match="lock is locked"):
            Run("a", Small(), tmp_path, resume=True)
    with pytest.raises(ValueError, match="holds a run already"):
        Run("a", Small(), tmp_path)
    with pytest.raises(ValueError, match="begun with steps 3, not 4"):
        Run("a", Small(steps=4), tmp_path, resume=True)
    with pytest.raises(ValueError, match="begun with experiment a, not b"):
        Run("b", Small(), tmp_path, resume=True)
    assert written(tmp_path)["steps"] == 3


def test_a_run_that_is_refused_before_it_has_anything_leaves_its_directory(tmp_path):
    def refused(error, *made):
        with pytest.raises(type(error), match=str(error)), Run("a", Small(), tmp_path) as run:
            for name in made:
                (run.directory / name).touch()
            raise error

    refused(ValueError("no such file"), "graph.json")
    refused(ValueError("no such file"))
    assert {path.name for path in tmp_path.iterdir()} == {"lock"}
    refused(ValueError("an arm is refused"), "arm")  # those before it are kept, and the flags with them
    assert written(tmp_path)["steps"] == 3
    with pytest.raises(ValueError, match="holds a run already"):
        Run("a", Small(), tmp_path)
    with pytest.raises(OSError, match="full"), Run("a", Small(), tmp_path / "other"):
        raise OSError("full")
    assert written(tmp_path / "other")["steps"] == 3


def test_tables_that_programs_reach_go_on_wherever_the_run_keeps_them(tmp_path):
    with Run("a", config_of(tables="device"), tmp_path):  # as runs said before the choice was theirs
        pass
    for tables in (None, "pinned", "device"):
        with Run("a", config_of(tables=tables), tmp_path, resume=True) as run:
            assert run.resumed
    with pytest.raises(ValueError, match="begun with tables device, not host"):
        Run("a", config_of(tables="host"), tmp_path, resume=True)


def test_a_resumed_run_keeps_its_id(tmp_path):
    with Run("a", Small(), tmp_path) as before:
        pass
    with Run("a", Small(), tmp_path, resume=True) as again:
        assert again.resumed and again.id == before.id == written(tmp_path)["run"]


@pytest.mark.process
def test_another_process_is_refused_until_the_first_one_dies(tmp_path):
    program = (
        "import sys; from main import cli; r = cli.Run('a', cli.Flags(), sys.argv[1]); print('x', flush=True); input()"
    )
    command = [sys.executable, "-c", program, tmp_path]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path_of_python()}
    )
    try:
        child.stdout.readline()
        with pytest.raises(ValueError, match="lock is locked"):
            Run("a", Flags(), tmp_path, resume=True)
    finally:
        child.kill()
        child.communicate()
    with Run("a", Flags(), tmp_path, resume=True) as run:
        assert run.resumed


def path_of_python():
    return os.pathsep.join([str(ROOT), str(ROOT / "experiments")])


def test_a_torn_last_row_is_cut_with_a_warning(tmp_path):
    with Run("a", Small(), tmp_path) as run:
        run.log({"step": 1})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "au')
    with pytest.warns(UserWarning, match="torn last line of 15 bytes"):
        resumed = Run("a", Small(), tmp_path, resume=True)
    with resumed as run:
        run.log({"step": 2})
        assert run.metrics() == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("middle", [b'{"step": 2, "au\n', b"\0\0\0\n", b"\xff\n", b"7\n", b"\n"])
def test_a_damaged_row_in_the_middle_is_refused_with_its_line(tmp_path, middle):
    content = b'{"step": 1}\n' + middle + b'{"step": 3}\n'
    with Run("a", Small(), tmp_path):
        pass
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is damaged"):
        Run("a", Small(), tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


def test_rows_that_a_full_disk_refused_are_written_with_the_next_one(tmp_path, capsys):
    with Run("a", Small(), tmp_path) as run:
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")  # a kernel that says ENOSPC
        run.log({"step": 1})
        run.log({"step": 2})
        assert "2 rows of metrics are kept in memory" in capsys.readouterr().err
        (tmp_path / "metrics.jsonl").unlink()
        run.log({"step": 3})
        assert run.metrics() == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


PLAIN = st.floats() | st.integers() | st.booleans() | st.none() | st.text()


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
@settings(max_examples=100)
def test_what_is_written_is_json_and_says_what_it_cannot_hold(content):
    with contextlib.ExitStack() as stack:
        lost = not_finite(content)
        if lost:
            stack.enter_context(pytest.warns(UserWarning, match="so null in JSON"))
        text = to_json({"x": content})
    found = json.loads(text, parse_constant=pytest.fail)["x"]
    assert equal_but_for_null(content, found)


def not_finite(value):
    if isinstance(value, dict):
        return any(map(not_finite, value.values()))
    if isinstance(value, list):
        return any(map(not_finite, value))
    return isinstance(value, float) and not np.isfinite(value)


def equal_but_for_null(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_but_for_null(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal_but_for_null, a, b))
    return b is None if not_finite(a) else a == b and type(a) is type(b)


def test_the_warning_names_the_keys(tmp_path):
    with Run("a", Small(), tmp_path) as run, pytest.warns(UserWarning, match=r"test_auc, arms\.a\[1\]$"):
        run.log({"test_auc": np.float32("nan"), "arms": {"a": [1, float("inf")]}, "step": 1})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"test_auc": null, "arms": {"a": [1, null]}, "step": 1}\n'


# Signals.


def test_a_signal_raises_at_once_where_nothing_is_to_be_saved():
    for number in STOPPING:
        before = signal.getsignal(number)
        with pytest.raises(Stopped, match=signal.Signals(number).name), stop_on_signals() as asked:
            os.kill(os.getpid(), number)
            threading.Event().wait(60)
            pytest.fail("went on")
        assert asked.signal == number and signal.getsignal(number) is before


def test_held_signals_wait_and_the_first_one_counts():
    with stop_on_signals() as asked:
        with asked.held():
            assert not asked
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                os.kill(os.getpid(), number)
            assert asked and asked.signal == signal.SIGINT
            with pytest.raises(Stopped, match="SIGINT"):
                asked.check()
            with pytest.raises(Stopped):
                list(asked.each([1]))
        os.kill(os.getpid(), signal.SIGTERM)  # a second signal does not interrupt the way out


def test_a_lost_exception_is_raised_again_before_training():
    with pytest.raises(Stopped), stop_on_signals() as asked:
        with contextlib.suppress(Stopped):  # as a callback in C does
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60)
        with asked.held():
            pytest.fail("training began")


class Dropped:
    """What its destructor raises is dropped by Python, as is what some callbacks raise."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_whose_exception_was_dropped_is_not_the_last_one(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: None)  # pytest's keeps the exception
    for _ in range(2):
        with pytest.raises(Stopped, match="SIGTERM"), stop_on_signals() as asked:
            Dropped()
            assert asked.signal == signal.SIGINT
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("went on")


def enter_held(asked):
    with asked.held():
        pytest.fail("training began")


@pytest.mark.parametrize(
    ("stop", "dropped"),
    [
        (lambda asked: signal.raise_signal(signal.SIGINT), False),
        (lambda asked: signal.raise_signal(signal.SIGINT), True),
        (lambda asked: asked.check(), True),
        (lambda asked: list(asked.each([1])), True),
        (enter_held, True),
    ],
)
def test_a_further_signal_does_not_disturb_the_way_out(monkeypatch, stop, dropped):
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: None)
    left = []
    with pytest.raises(Stopped, match="SIGINT"), stop_on_signals() as asked:
        if dropped:
            Dropped()
        try:
            stop(asked)
        finally:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            left.append(True)
    assert left


@pytest.mark.process
@pytest.mark.parametrize(
    ("signals", "flags", "code"),
    [
        (("SIGTERM",), [], 143),
        (("SIGTERM",), ["--requeue"], 75),
        (("SIGINT", "SIGTERM", "SIGINT", "SIGINT"), [], 130),
    ],
)
def test_a_process_ends_with_the_code_of_its_signal(signals, flags, code):
    program = f"""
import os, signal
from main.signals import Stopped, leave, stop_on_signals
try:
    with stop_on_signals() as asked, asked.held():
        for name in {signals}:
            os.kill(os.getpid(), signal.Signals[name])
        raise Stopped(asked.signal, "stopped and saved")
except Stopped as stopped:
    leave(stopped)
"""
    environment = os.environ | {"PYTHONPATH": path_of_python()}
    done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, env=environment)
    assert done.returncode == code and "Traceback" not in done.stderr and "stopped and saved" in done.stderr


HANDLE_SIGNALS = [path for path in (ROOT / "experiments").glob("*.py") if "stop_on_signals" in path.read_text()]


@pytest.mark.process
@pytest.mark.parametrize("script", HANDLE_SIGNALS, ids=lambda path: path.stem)
def test_a_signal_while_an_experiment_is_imported_ends_it_in_one_line(tmp_path, script):
    """JAX, the first import that takes seconds, is replaced by a module that sends a signal."""
    name, flags, code = ("SIGTERM", ["--requeue"], 75) if script.stem == "train" else ("SIGINT", [], 130)
    (tmp_path / "jax.py").write_text(f"import signal\nsignal.raise_signal(signal.{name})\nraise SystemExit('went on')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, script, *flags], capture_output=True, text=True, env=environment)
    said = f"{name}: stopped before there was anything new to save\n"
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


@pytest.mark.process
def test_a_closed_pipe_ends_nothing(tmp_path):
    program = (
        "from main.signals import say\nimport sys\nfor _ in range(3): say('x' * 100_000)\nprint('on', file=sys.stderr)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": path_of_python()},
    )  # fmt: skip
    child.stdout.close()
    assert child.stderr.read() == "on\n" and child.wait() == 0


# Saving.


class Disk:
    """A Checkpointer whose saves have a given cost."""

    def __init__(self, clock, stall_s, cpu_s):
        self.clock, self.stall_s, self.cpu_s = clock, stall_s, cpu_s
        self.stall_seconds = self.thread_seconds = 0.0
        self.failures, self.saved, self.full = [], [], False

    def save(self, state, extra):
        self.clock.now += self.stall_s
        self.stall_seconds += self.stall_s
        self.thread_seconds += self.cpu_s
        if self.full:
            self.failures.append("No space left on device")
        else:
            self.saved.append((self.clock.now, int(state.dense.step), extra))

    def done(self):
        return True

    wait = done


def run_of(stall_s, cpu_s, step_s, steps, every_steps=None, full=()):
    """Train by a simulated clock; `full` holds the steps at which the disk is full."""
    clock = types.SimpleNamespace(now=0.0)
    disk = Disk(clock, stall_s, cpu_s)
    saves = PeriodicSaves(disk, every_steps, clock=lambda: clock.now)
    saves.begin(types.SimpleNamespace(snapshot_at=lambda step, save: save(state_at(step))))
    for step in range(1, steps + 1):
        clock.now += step_s
        disk.full = step in full
        saves.after_step(StepInfo(state_at(step), step, {}, {}))
    return clock, disk, saves


def state_at(step):
    return types.SimpleNamespace(dense=types.SimpleNamespace(step=np.int32(step)))


@given(st.floats(0, 5), st.floats(0, 20), st.floats(0.01, 1.0))
def test_saving_costs_at_most_a_percent_of_the_time(stall_s, cpu_s, step_s):
    clock, disk, saves = run_of(stall_s, cpu_s, step_s, 3000)
    cost_s = stall_s + cpu_s / len(os.sched_getaffinity(0))
    times = [when for when, _, _ in disk.saved]
    assert disk.saved[0][1] == saving.FIRST_STEPS
    for before, after in itertools.pairwise(times):
        assert cost_s <= 0.01 * (after - before) + 1e-9  # up to rounding
        no_later = max(100 * cost_s, saving.AT_LEAST_S) + stall_s + step_s
        assert after - before <= no_later + 1e-6
    assert saves.results()["saves"] == len(times)
    assert saves.results()["checkpoint_percent"] <= 100 * cost_s * len(times) / clock.now + 1e-6


def test_a_failed_save_is_said_at_once_and_tried_again(capsys):
    _, disk, saves = run_of(0.0, 0.0, 0.1, 30, every_steps=10, full={10})
    assert [step for _, step, _ in disk.saved] == [20, 30]
    assert capsys.readouterr().err.count("a save failed; the next one tries again: No space left") == 1
    assert saves.results()["saves"] == 2 and saves.results()["saves_failed"] == 1


def test_a_disk_that_stays_full_is_tried_once_a_minute(capsys):
    _, disk, saves = run_of(0.0, 0.0, 0.1, 3000, full=range(10_000))  # five minutes
    assert len(disk.failures) == 5 and not disk.saved
    disk.full = True
    assert saves.last(state_at(3000)) == "No space left on device"
    disk.full = False
    assert saves.last(state_at(3000)) is None and disk.saved[-1][1] == 3000


def test_zero_switches_periodic_saves_off():
    _, disk, saves = run_of(0.1, 0.1, 0.1, 500, every_steps=0)
    saves.ensure_image(state_at(500))
    assert not disk.saved
    assert saves.last(state_at(500)) is None and len(disk.saved) == 1


def test_there_is_an_image_before_the_first_row():
    _, disk, saves = run_of(0.1, 0.1, 0.1, 5)
    saves.ensure_image(state_at(5))
    saves.ensure_image(state_at(5))
    assert [step for _, step, _ in disk.saved] == [5]
    assert saves.last(state_at(5)) is None and len(disk.saved) == 1  # it exists already


def test_the_account_goes_on_in_the_next_process():
    _, disk, saves = run_of(1.0, 0.0, 0.1, 2000)
    total = saves.totals()
    again = PeriodicSaves(Disk(types.SimpleNamespace(now=0.0), 1.0, 0.0), past=total, clock=lambda: 0.0)
    assert again.totals() == total and total["saves"] == len(disk.saved)
    assert 0 < disk.saved[-1][2]["saving"]["saves"] < total["saves"]


# The main job, in this process.

TINY = config_of(preset="smoke", rows=500, batch_size=64, steps=12, evaluations=4, embedding_width=8)


def rows_of(directory):
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [{key: value for key, value in json.loads(line).items() if key != "train_seconds"} for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    train.main(changed(TINY, workdir=directory))
    return directory


GOLDEN = {"train_loss": [0.781099, 0.723952, 0.679021, 0.668069], "step": [3, 6, 9, 12]}
GOLDEN |= {"validation_auc": [0.547398, 0.564355, 0.597352, 0.612715]}
GOLDEN |= {"validation_log_loss": [0.692177, 0.590715, 0.592022, 0.579835]}
GOLDEN_TEST = {"test_auc": 0.597354, "test_log_loss": 0.589083}  # of the last state only


def test_the_main_job_has_its_golden_figures(undisturbed):
    for key, figures in GOLDEN.items():
        np.testing.assert_allclose([row[key] for row in rows_of(undisturbed)], figures, rtol=2e-5, err_msg=key)
    results = json.loads((undisturbed / "results.json").read_text())
    assert {key: results[key] for key in GOLDEN_TEST} == pytest.approx(GOLDEN_TEST, rel=2e-5)
    assert not any(key.startswith("test_") for row in rows_of(undisturbed) for key in row)


def test_the_table_of_the_main_job_has_units_and_groups(undisturbed, capsys):
    train.main(changed(TINY, workdir=undisturbed, resume=True))
    said = capsys.readouterr().out
    assert "is complete, nothing is left to do" in said and "_" not in said.partition("to do:")[2]
    places = [said.index(words) for words in ("Test set\n  AUC ", "Training\n  steps ", "Saving\n  saves ")]
    assert places == sorted(places) and re.search(r"  time, with compilation +[\d.]+ s\n", said)


@pytest.mark.slow
def test_another_model_is_trained_and_is_another_run(tmp_path):
    config = changed(TINY, model="dcnv2", steps=6, evaluations=2, workdir=tmp_path)
    results = train.main(config)
    assert results["steps"] == 6
    losses = [row["train_loss"] for row in rows_of(tmp_path)]
    assert losses[1] < losses[0] != pytest.approx(GOLDEN["train_loss"][0], rel=1e-3)
    with pytest.raises(ValueError, match="begun with model dcnv2, not dlrm"):
        train.main(changed(config, model="dlrm", resume=True))


def test_the_test_set_is_the_same_at_every_batch_size():
    few, many = (train.data_of(changed(TINY, batch_size=size)) for size in (64, 256))
    assert few.best == many.best
    for a, b in zip(few.test(), many.test(), strict=True):
        np.testing.assert_array_equal(a.ids["sparse"], b.ids["sparse"])
        np.testing.assert_array_equal(a.label, b.label)


def signalled(batches, at, number):
    for index, batch in enumerate(batches):
        if index == at:
            os.kill(os.getpid(), number)
        yield batch


def disturbed(whole, config, where, at):
    """The data of a run, with a SIGTERM before one of its batches or while it is loaded."""
    if where == "data":
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(60)
    data, looks = whole(config), iter(range(100))
    if where == "train":
        return data._replace(train=lambda start: signalled(data.train(start), at, signal.SIGTERM))
    if where == "test":
        return data._replace(test=lambda: signalled(data.test(), at, signal.SIGTERM))
    if where == "results":
        return data

    def validation():
        due = next(looks) == {"validation": 1, "last validation": 3}[where]
        return signalled(data.validation(), at, signal.SIGTERM) if due else data.validation()

    return data._replace(validation=validation)


@pytest.mark.parametrize(
    ("where", "at"),
    [("train", 7), ("test", 1)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("validation", 3),
            ("data", 0),
            ("train", 0),
            ("validation", 0),
            ("last validation", 1),
            ("results", 0),
        ]
    ],
)
def test_stopped_anywhere_a_run_goes_on_bit_for_bit(tmp_path, monkeypatch, undisturbed, where, at, capsys):
    whole = train.data_of
    monkeypatch.setattr(train, "data_of", lambda config: disturbed(whole, config, where, at))
    config = changed(TINY, workdir=tmp_path, tables="host")  # the same bits as on the device
    if where == "results":
        monkeypatch.setattr(train, "draw", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped, match=f"SIGTERM: stopped.*; go on with .*--workdir {tmp_path} --resume") as stopped:
        train.main(config)
    if where not in ("data", "results"):
        step = int(str(stopped.value).split("saved at step ")[1].split(";")[0])
        assert step == read_manifest(images(tmp_path / "checkpoints")[0]).step and 0 < step <= 12
        logged = [row["step"] for row in rows_of(tmp_path)]
        assert max(logged, default=0) <= step
        assert where in ("train", "test") or step not in logged  # stopped half way
    monkeypatch.undo()
    results = train.main(changed(config, resume=True))
    assert differences(undisturbed, tmp_path) == []
    assert results["saves_failed"] == 0 and results["last_state_saved"]
    said = capsys.readouterr().out
    assert ("begins at step 0" if where == "data" else "going on from") in said


@pytest.mark.parametrize(
    ("function", "seeds", "words"),
    [
        ("train_to_the_end", 1, "stopped; go on with the same flags and --workdir {} --resume"),
        ("train_to_the_end", 2, "stopped in seed 0; go on with the same flags and --workdir {} --resume"),
        ("paired_interval", 2, "stopped; go on with the same flags and --workdir {} --resume"),
    ],
)
def test_once_it_has_a_directory_a_run_says_how_to_go_on(tmp_path, monkeypatch, function, seeds, words):
    """Also where nothing is held: before the first step, and behind the last."""
    monkeypatch.setattr(train, "train_to_the_end", lambda *_: collections.defaultdict(float))
    monkeypatch.setattr(train, function, lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped) as stopped:
        train.main(changed(TINY, workdir=tmp_path, seeds=seeds))
    assert str(stopped.value) == "SIGTERM: " + words.format(tmp_path)
