"""The main job with OAC and CPR is killed, resumes, and loses only what it reports.

The soak's own checks are tested, too: they find a hang, a wrong exit code and a differing bit.
"""

import os
import signal
import sys
import threading
import time

import pytest
import train
import train_soak
from kills import was_killed
from test_runs import TINY
from tqdm import tqdm
from train_soak import Config, Soak
from trained_run import changed
from watching import Ended, Process, differences, judge, step_begun, steps_told

from jaxrec.checkpoint import deltas, images
from jaxrec.checkpoint.format import number_of

SMALL = changed(TINY, model="small_dlrm", evaluations=2)
OAC = changed(SMALL, tables="host", pipeline="oac", window=3, resume=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run with neither OAC nor CPR."""
    directory = tmp_path_factory.mktemp("undisturbed")
    train.main(changed(SMALL, tables="host", workdir=directory))
    return directory


def _train_until_killed(config):
    """Kills itself with batches in flight, once a save of a step after 0 is on disk."""
    whole, saved = train.data_of(config), config.workdir / "checkpoints"

    def killed(start):
        until = time.monotonic() + 60
        for index, batch in enumerate(whole.train(start)):
            while index == 9 and time.monotonic() < until:
                if any(number_of(path) for path in [*images(saved), *deltas(saved)]):
                    os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    train.data_of = lambda config: whole._replace(train=killed)
    train.main(config)


@pytest.mark.parametrize(
    ("cpr", "every", "more"),
    [
        ("vanilla", 4, {}),
        ("full", 4, {}),
        ("mfu", 16, {}),
        ("mfu", 1, {}),
        ("mfu", 16, {"shadowsync": "easgd", "sync_every_steps": 5}),
    ],
)
@pytest.mark.slow
@pytest.mark.process
def test_kill_9_with_oac_and_cpr_goes_on_as_promised(tmp_path, undisturbed, capsys, cpr, every, more):
    config = changed(OAC, cpr=cpr, save_every_steps=every, workdir=tmp_path, **more)
    assert was_killed(_train_until_killed, config)
    results = train.main(config)
    said = capsys.readouterr().out
    assert step_begun(said) >= 1 and results["steps"] == TINY.source.steps
    # MFU saves some rows of each step, never all of them, even with a regular save at every step.
    lost = steps_told(said)
    assert (differences(undisturbed, tmp_path) == []) == (lost is None) == (cpr != "mfu")
    assert ((lost or 0) > 0) == (results["pls"] > 0) == (every == 16)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.random_instant
def test_a_handful_of_real_processes_that_are_stopped_at_random_lose_no_run(tmp_path):
    """A short version of `make soak`, which takes ten minutes: OAC with CPR vanilla and with MFU."""
    results = train_soak.main(Config(preset="smoke", workdir=tmp_path / "soak"))
    assert 3 <= results["signals"] <= 8 and results["runs"] == 2 and results["hangs"] == results["wrong"] == 0
    assert results["oac_vanilla_runs_equal"] == 1 and results["oac_mfu_auc_away"] <= train_soak.BAND
    assert not (tmp_path / "soak" / "files").exists()


# ---- checks of the soak


@pytest.mark.process
def test_a_process_that_hangs_is_ended_and_is_wrong(tmp_path, monkeypatch):
    """The time limit starts when the process hangs."""
    begun = threading.Event()

    class Limit(threading.Timer):
        def run(self):
            assert begun.wait(60)
            super().run()

    hangs = "import signal, threading; signal.signal(signal.SIGTERM, lambda *_: None); print('hangs', flush=True); "
    monkeypatch.setattr(threading, "Timer", Limit)
    command = [sys.executable, "-X", "faulthandler", "-c", hangs + "threading.Event().wait()"]
    process = Process(command, limit_s=1.0)
    process.read(1)
    begun.set()
    ended = process.ended()
    assert ended.hung
    (wrong,) = judge(ended, "SIGTERM", tmp_path)
    assert "hung" in wrong and "in wait" in wrong  # names the place of the hang


AT_WORK = "test AUC to expect: 0.7\n"


@pytest.mark.parametrize(
    ("code", "said", "way", "wrong"),
    [
        (143, AT_WORK, "SIGTERM", None),
        (-9, AT_WORK, "SIGKILL", None),
        (0, AT_WORK, "SIGHUP", None),
        (0, "", "nobody", None),
        (-signal.SIGSEGV, "", "SIGINT", None),  # Ctrl-C during the import of an extension
        (-signal.SIGSEGV, AT_WORK, "SIGINT", "ended with -11"),
        (1, "error: no", "nobody", "ended with 1"),
        (128, AT_WORK, "nobody", "ended with 128"),
        (-15, AT_WORK, "SIGTERM", "ended with -15"),
        (143, AT_WORK, "SIGHUP", "ended with 143"),
        (143, AT_WORK + "Traceback (most recent call last)", "SIGTERM", "a traceback"),
        (143, AT_WORK + "stopped and saved at step 7", "SIGTERM", "said that step 7 was saved"),
    ],
)
def test_an_end_is_judged(tmp_path, code, said, way, wrong):
    found = judge(Ended(code, said, hung=False), way, tmp_path)
    assert [wrong in one for one in found] == [True] if wrong else found == []


class Actor:
    """Emulates a run's processes; each ends as its entry of the script says."""

    def __init__(self, play):
        self._play = iter(play)

    def __call__(self, *_):
        self._end = Ended(*next(self._play), hung=False)
        return self

    def ended(self):
        return self._end


@pytest.mark.parametrize(
    ("begun", "again", "lost"),
    [(40, 40, False), (40, 60, False), (40, 39, True), (40, None, True), (None, None, False)],
)
def test_a_run_that_goes_on_from_before_its_last_step_is_wrong(tmp_path, monkeypatch, begun, again, lost):
    say = lambda step: "begins at step 0" if step is None else f"going on from x, step {step}"
    soak = Soak(tmp_path, Config(preset="smoke"))
    soak.until = float("inf")
    monkeypatch.setattr(soak, "start", Actor([(-9, say(begun)), (0, say(again))]))
    monkeypatch.setattr(soak, "compare", lambda *_: None)
    monkeypatch.setattr(train_soak, "disturb", lambda process, rng: ("SIGKILL", process.ended()))
    soak.disturbed(0, tqdm(disable=True))
    assert [f"step {begun} was saved before" in wrong for wrong in soak.figures.wrong] == [True] * lost
    assert soak.figures.counts["oac_vanilla_kills"] == 2
