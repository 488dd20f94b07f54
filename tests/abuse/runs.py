"""Runs, signals and invalid flags, and accidents that happen to the files of a run."""

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import types
from pathlib import Path

import numpy as np
import train
from main.cli import Flags, Run, command_line, plot
from main.config import config_of, parse
from main.homes import own
from main.saving import PeriodicSaves
from main.signals import Stopped, say, stop_on_signals
from studies.cpr_work import JobConfig, make_data

from abuse import situation
from jaxrec import StepInfo


@dataclasses.dataclass(frozen=True)
class Small(Flags):
    """Flags of an experiment."""

    steps: int = 3


def begin(directory, *, resume=False, **flags):
    """Begin or resume a run, and leave it at once."""
    with Run("small", Small(**flags), directory, resume) as run:
        return run


def parsed(*flags):
    """The config that train.py parses from flags and checks before any work."""
    return parse(train.Config, flags)


# Flags.


@situation("resume without a directory", ValueError, "--resume needs --workdir")
def _(directory):
    Run("small", Small(), None, resume=True)


@situation("bad flags end in one line, and begin no run", SystemExit, "error: --steps 0 must be")
def _(directory):
    arguments, sys.argv = sys.argv, ["train.py", "--steps", "0", "--workdir", str(directory / "run")]
    try:
        command_line(train.main, train.Config, "", parse)
    finally:
        sys.argv = arguments
        assert not (directory / "run").exists()


# Directories.


@situation("an object store as the directory", ValueError, "s3:/bucket/run is no path on this machine")
def _(directory):
    begin(Path("s3://bucket/run"))


@situation("a file as the directory", ValueError, "file cannot hold a run.*Give another --workdir")
def _(directory):
    (directory / "file").write_text("mine")
    try:
        begin(directory / "file")
    finally:
        assert (directory / "file").read_text() == "mine"


@situation("a disk that is full from the beginning", ValueError, "cannot hold a run: .*No space left")
def _(directory):
    (directory / "config.json.partial").symlink_to("/dev/full")
    try:
        begin(directory)
    finally:
        assert not (directory / "config.json").exists()


@situation("a cut config.json", ValueError, "config.json is damaged")
def _(directory):
    begin(directory)
    (directory / "config.json").write_text('{"steps": 3, "ru')
    begin(directory, resume=True)


@situation("a config.json of another kind", ValueError, "config.json is damaged .no JSON object.")
def _(directory):
    (directory / "config.json").write_text("[]")
    begin(directory, resume=True)


@situation("a config.json that was removed", ValueError, "holds metrics.jsonl of a run whose config.json is gone")
def _(directory):
    with Run("small", Small(), directory) as run:
        run.log({"step": 1})
    (directory / "config.json").unlink()
    try:
        begin(directory)
    finally:
        assert (directory / "metrics.jsonl").read_text() == '{"step": 1}\n'


@situation("a best state without a config.json", ValueError, "holds best of a run whose config.json is gone")
def _(directory):
    (directory / "best").mkdir()
    begin(directory)


@situation("os.chdir after the run has begun")
def _(directory):
    before = Path.cwd()
    os.chdir(directory)
    try:
        with Run("small", Small(), Path("run")) as run:
            os.chdir(before)
            run.log({"step": 1})
    finally:
        os.chdir(before)
    assert (directory / "run" / "metrics.jsonl").exists()


# Data and models.


@situation("Criteo rows without a path", ValueError, "--data criteo needs --path")
def _(directory):
    make_data(JobConfig(data="criteo"), 1000)


@situation("a run that was begun before there was a choice of models goes on")
def _(directory):
    with Run("train", config_of(), directory) as run:
        before = {key: value for key, value in run.read_json("config.json").items() if key != "model"}
        run.write_json("config.json", before)
    with Run("train", config_of(), directory, resume=True) as run:
        assert run.id == before["run"]


@situation("results in which nothing is a number")
def _(directory):
    with Run("small", Small(), directory) as run:
        run.close({"a_low": None, "a": None, "regime": "none", "list": [1, 2], "auc": True, "auc_high": "?"})


# Metrics and results.


@situation("rows of metrics without an image to go on from", ValueError, "metrics up to step 4, but no image")
def _(directory):
    begin(directory)
    (directory / "metrics.jsonl").write_text('{"step": 4}\n')
    with Run("small", Small(), directory, resume=True) as run:
        try:
            train.resumed(run, None, None)
        finally:
            assert run.metrics() == [{"step": 4}]


@situation("a disk that is still full at the end", OSError, "No space left")
def _(directory):
    with Run("small", Small(), directory) as run:
        (directory / "metrics.jsonl").symlink_to("/dev/full")
        run.log({"step": 1})
        run.close({"test_auc": 0.5})


@situation("a picture on a full disk takes no results away")
def _(directory):
    (directory / "a.png.partial").symlink_to("/dev/full")
    assert not plot(directory / "a.png", {"y": {"line": ([1, 2], [1, None])}}, "x")
    assert not (directory / "a.png").exists()


# Signals.


@situation("signals taken twice, one inside the other")
def _(directory):
    with stop_on_signals() as outer, outer.held():
        with contextlib.suppress(Stopped), stop_on_signals() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60)
        assert inner and not outer
        os.kill(os.getpid(), signal.SIGTERM)
        assert outer


@situation("a background job, whose Ctrl-C is ignored")
def _(directory):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_on_signals() as asked:
            os.kill(os.getpid(), signal.SIGINT)
            assert not asked
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@situation("a full disk under what a run says")
def _(directory):
    with open("/dev/full", "w") as full:
        say("step 1", full)
        say("step 2", full)


# Saving.


def saves_over(save):
    """PeriodicSaves whose saves call `save`."""
    checkpointer = types.SimpleNamespace(
        save=save, done=lambda: True, wait=lambda: None, failures=[], stall_seconds=0.0, thread_seconds=0.0
    )
    saves = PeriodicSaves(checkpointer, every_steps=1)
    saves.begin(types.SimpleNamespace(snapshot_at=lambda step, save: save(INFO.state)))
    return saves


INFO = StepInfo(types.SimpleNamespace(dense=types.SimpleNamespace(step=np.int32(1))), 1, {}, {})


@situation("a disk that became read-only fails in the call itself, and ends nothing")
def _(directory):
    def save(state, extra):
        raise OSError(30, "Read-only file system")

    saves = saves_over(save)
    saves.after_step(INFO)
    assert "Read-only" in saves.last(INFO.state) and saves.results()["saves_failed"] == 2


@situation("an error of ours in a save is not taken for a full disk", TypeError, "mine")
def _(directory):
    def save(state, extra):
        raise TypeError("mine")

    saves_over(save).after_step(INFO)


@situation("a state whose loss is not finite is not saved", FloatingPointError, "this state is not saved")
def _(directory):
    recorder = types.SimpleNamespace(latest_losses=lambda step: np.array([0.5, np.nan], np.float32))
    train.Recorder.extra(recorder, 3)


@situation("another run's tables in use", ValueError, "lock is locked: another process is training on these tables")
def _(directory):
    with own(directory, "a"), own(directory, "b"):
        pass


@situation("another run's tables", ValueError, "holds tables of another run: give another --table-directory")
def _(directory):
    with own(directory, "a"):
        (directory / "tables.json").touch()
    with own(directory, "a"):
        pass
    try:
        with own(directory, "b"):
            pass
    finally:
        assert (directory / "run").read_text() == "a"


@situation("tables that no run made", ValueError, "holds tables of another run")
def _(directory):
    (directory / "tables.json").touch()
    with own(directory, "a"):
        pass
