"""Supervised train.py processes for train_soak.py, which sends them signals.

Checks how each process ended, what it printed, and how two finished runs differ.
"""

import contextlib
import json
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import NamedTuple

from jaxrec.checkpoint import images, read_manifest, verify
from jaxrec.checkpoint.format import leaves_of, load_arrays
from jaxrec.cluster.reaper import marked

LIMIT_S = 240.0  # time limit of a process, which takes 10 s on an idle core
# Metrics that depend on timing, not only on the computation.
TIMED = {
    "train_seconds", "stale_share", "sync_gap_steps", "replica_spread", "pls", "rows_saved", "shards_failed",
    "lost_steps", "failures",
}  # fmt: skip


class Ended(NamedTuple):
    """Outcome of a process."""

    code: int
    said: str
    hung: bool  # it exceeded its time limit and was ended


class Process:
    """A process with a time limit.

    Args:
      environment: environment variables; those of this process if None.
      limit_s: seconds after which it counts as hung and is ended.
    """

    def __init__(self, command: list[str], environment: dict[str, str] | None = None, limit_s: float = LIMIT_S):
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1, env=environment
        )
        self._said, self._hung = "", False
        self._limit = threading.Timer(limit_s, self._end)
        self._limit.start()

    def _end(self):
        self._hung = True
        self._process.send_signal(signal.SIGABRT)  # faulthandler prints the stack of each thread
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def read(self, lines: int) -> None:
        """Wait until `lines` more lines were printed, or the process ends."""
        assert self._process.stdout is not None
        for _ in range(lines):
            self._said += self._process.stdout.readline()

    def send(self, number: int) -> None:
        """Send a signal if the process is alive."""
        self._process.send_signal(number)

    def ended(self) -> Ended:
        """Wait for the process to end."""
        try:
            self._said += self._process.communicate()[0]
        finally:
            self._limit.cancel()
        return Ended(self._process.returncode, self._said, self._hung)


def command_of(process: int) -> str:
    """Command line of a process of this machine; '' if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text()
    return ""


def processes_below(directory: Path, name: str = "ServerActor") -> list[int]:
    """Process ids of the actors of a class whose Ray session lies below a directory."""
    found = [process for below in directory.glob("jaxrec-*") for process in marked(str(below))]
    return [process for process in found if f"ray::{name}" in command_of(process)]


def number_of(way: str) -> int:
    """Number of the signal to send; 0 if none."""
    return 0 if way == "nobody" else signal.Signals[way.split()[-1]]


def judge(ended: Ended, way: str, workdir: Path) -> list[str]:
    """List what was wrong with the end of a process."""
    (code, said, hung), number, wrong = ended, number_of(way), []
    if hung:
        return [f"hung, and was ended:\n{said[-12_000:]}"]
    for step in steps_saved(said):
        path = workdir / "checkpoints" / f"step_{step:08d}"
        try:
            verify(read_manifest(path))
        except ValueError as error:
            wrong.append(f"said that step {step} was saved: {error}")
    # Before the first import of the job, and after everything is written, Python's own signal handlers may apply.
    at_work = "AUC to expect" in said and "run written to" not in said
    killed = -number if number == signal.SIGKILL or not at_work else 0
    # Ctrl-C during imports ends Python with 1 and a traceback, before any of our code runs, or with a crash if it hits
    # an extension module of numpy or jax while that is loaded.
    early = not said or "Traceback" in said or said.startswith("Fatal Python error")
    in_start = {1, -signal.SIGSEGV} if number == signal.SIGINT and early else set()
    stopped = {128 + number} if number else set()
    if code not in {0, killed} | stopped | (set() if at_work else in_start):
        wrong.append(f"ended with {code}:\n{said[-3000:]}")
    if at_work and "Traceback" in said:
        wrong.append(f"a traceback:\n{said[-3000:]}")
    return wrong


def how_ended(ended: Ended) -> str:
    """Outcome of a process as a key: hung, finished, killed, saved or nothing_to_save."""
    saved = "saved" if steps_saved(ended.said) else "nothing_to_save"
    return "hung" if ended.hung else {0: "finished", -signal.SIGKILL: "killed"}.get(ended.code, saved)


def steps_saved(said: str) -> list[int]:
    """Steps that a stopped process reported as saved."""
    return [int(step) for step in re.findall(r"stopped and saved at step (\d+)", said)]


def step_begun(said: str) -> int | None:
    """Step from which a process reported to continue; 0 for a reported fresh start, None without a report."""
    found = re.search(r"going on from .*, step (\d+)", said)
    return int(found[1]) if found else 0 if "begins at step 0" in said else None


def steps_told(said: str) -> int | None:
    """Number of steps that a process reported as lost because rows were older than its image; None if not reported."""
    found = re.search(r"older than the image, which counts as (\d+) lost steps: not bit for bit", said)
    return int(found[1]) if found else None


def result_of(workdir: Path) -> tuple[float, float]:
    """Test AUC and PLS of a finished run."""
    results = json.loads((workdir / "results.json").read_text())
    return results["test_auc"], results.get("pls", 0.0)


def differences(whole: Path, other: Path) -> list[str]:
    """List how two finished runs differ: arrays of their last images, rows of metrics."""
    first, second = (read_manifest(images(workdir / "checkpoints")[0]) for workdir in (whole, other))
    a, b = (load_arrays(image, leaves_of(image)) for image in (first, second))
    found = [f"array {name} differs" for name in a.keys() | b.keys() if not same_arrays(a.get(name), b.get(name))]
    if first.step != second.step:
        found.append(f"steps {first.step} and {second.step}")
    if rows(whole) != rows(other):
        found.append(f"metrics differ: {rows(whole)} and {rows(other)}")
    return found


def same_arrays(a, b) -> bool:
    """Whether two arrays are bitwise equal; False if one is None."""
    return a is not None and b is not None and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def rows(workdir: Path) -> list[dict]:
    """The metrics of a run without those that depend on timing."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMED} for line in lines]
