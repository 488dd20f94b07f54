"""train.py under kill -9, SIGTERM, SIGINT and SIGHUP: every run that was stopped ends as the one
that nobody disturbed.

    python experiments/train_soak.py --minutes 10  what `make soak` runs

Runs of train.py over tables on the device, in host memory and in mapped files are stopped at random
instants (while Python starts, while XLA compiles, in a step, in an evaluation, in a save, at the
end) and gone on with, until they are finished. Then every array of their last image and every row
of metrics must equal, bit for bit, those of a run of the same flags that nobody disturbed; every
process must have ended with the code that its signal asks for, none with a traceback; and what a
process said that it had saved must be there.
"""

import collections
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from contract import Flags, Run, command_line
from tqdm import tqdm

from jaxrec.checkpoint import images, read_manifest, verify
from jaxrec.checkpoint.image import leaves_of, load_arrays

HOMES = {"device": (), "host": ("--tables", "host"), "mapped": ("--tables", "host", "--table-directory", "{tables}")}
WAYS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "two SIGINT")
SMALL = ("--preset", "smoke", "--rows", "5000", "--batch-size", "128", "--steps", "400", "--evaluations", "10")
LINES = 12  # that such a run prints while it is at work
AS_OFTEN = ((), ("--save-every-steps", "7"), ("--save-every-steps", "1"))  # saves


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the stress."""

    minutes: float = 1.0
    workers: int = 2
    """Runs at a time."""


@dataclasses.dataclass
class SoakFigures:
    """What the workers count, under a lock."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    signals: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    ends: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    finished: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)

    def add(self, way: str, end: str, wrong: list[str]) -> None:
        """Enters one process that was disturbed."""
        with self.lock:
            self.signals[way] += 1
            self.ends[end] += 1
            self.wrong += wrong


class Soak:
    """The runs of one stress, in a directory that is removed in the end if nothing was wrong."""

    def __init__(self, directory: Path, config: Config):
        self.directory, self.until = directory, time.perf_counter() + 60 * config.minutes
        self.figures, self.seed = SoakFigures(), config.seed
        self.environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def start(self, home: str, workdir: Path, flags: tuple[str, ...] = ()) -> subprocess.Popen:
        """Starts train.py, or goes on."""
        placed = [flag.format(tables=workdir.with_name(workdir.name + ".tables")) for flag in HOMES[home]]
        command = [sys.executable, str(Path(__file__).parent / "train.py"), *SMALL, *placed, *flags]
        command += ["--workdir", str(workdir), "--resume"]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1, env=self.environment
        )

    def undisturbed(self) -> None:
        """The run that others are compared with, whatever their home: all have the same bits."""
        process = self.start("host", self.directory / "undisturbed")
        said, _ = process.communicate()
        if process.returncode:
            raise ValueError(f"an undisturbed run ended with {process.returncode}: {said[-2000:]}")

    def disturbed(self, number: int, bar: tqdm) -> None:
        """One run, disturbed until it is finished or the time is over, then compared."""
        rng = np.random.default_rng([self.seed, number])
        home = list(HOMES)[number % len(HOMES)]
        flags = AS_OFTEN[int(rng.integers(len(AS_OFTEN)))]
        workdir = self.directory / f"run-{number}-{home}"
        code = None
        while code != 0:
            process = self.start(home, workdir, flags)
            if time.perf_counter() > self.until:
                said, _ = process.communicate()
                self.refuse(f"{workdir.name}: ended with {process.returncode}\n{said}" if process.returncode else "")
            else:
                self.disturb(process, workdir, rng)
                bar.update()
            code = process.returncode
            if process.returncode and time.perf_counter() > self.until + 60:
                return
        self.refuse(*(f"{workdir.name}: {what}" for what in differences(self.directory / "undisturbed", workdir)))
        with self.figures.lock:
            self.figures.finished += 1
        if not self.figures.wrong:
            shutil.rmtree(workdir)

    def disturb(self, process: subprocess.Popen, workdir: Path, rng) -> None:
        """Sends a signal at a random instant, waits for the end, and looks at it."""
        # One in four comes while Python starts; the others after a line that says how far the run
        # has come.
        way = WAYS[int(rng.integers(len(WAYS)))]
        lines = int(rng.integers(2, LINES)) if rng.random() < 0.75 else 0
        assert process.stdout is not None
        said = ""
        for _ in range(lines):
            said += process.stdout.readline()
        time.sleep(rng.random() * (0.2 if lines else 4.0))
        number = signal.Signals[way.split()[-1]]
        process.send_signal(number)
        if way.startswith("two"):
            time.sleep(0.005)
            process.send_signal(number)
        said += process.communicate()[0]
        end, wrong = judge(process.returncode, number, said, workdir)
        self.figures.add(way, end, [f"{workdir.name}, {way}: {what}" for what in wrong])

    def refuse(self, *words: str) -> None:
        """Enters what is wrong, if anything."""
        with self.figures.lock:
            self.figures.wrong += [word for word in words if word]

    def work(self, workers: int) -> None:
        """Runs until the time is over."""
        with tqdm(unit="signal", disable=None) as bar, ThreadPoolExecutor(workers) as pool:
            numbers = iter(range(10**9))

            def worker():
                while time.perf_counter() < self.until:
                    with self.figures.lock:
                        number = next(numbers)
                    self.disturbed(number, bar)

            for done in [pool.submit(worker) for _ in range(workers)]:
                done.result()


def judge(code: int, number: int, said: str, workdir: Path) -> tuple[str, list[str]]:
    """How a process ended, in a word, and what was wrong with that."""
    wrong = []
    for step in re.findall(r"stopped and saved at step (\d+)", said):
        path = workdir / "checkpoints" / f"step_{int(step):08d}"
        try:
            verify(read_manifest(path))
        except ValueError as error:
            wrong.append(f"said that step {step} was saved: {error}")
    # Before the job has begun, and after all of it is written, Python's own handlers are at work.
    at_work = "AUC to expect" in said and "run written to" not in said
    killed = -number if number == signal.SIGKILL or not at_work else 0
    # Ctrl-C while Python imports its own packages ends it with 1 and a traceback, before a line of
    # ours has run.
    # Or with a crash: an extension of numpy's or jax's that Ctrl-C meets while it is loaded.
    in_start = {1, -signal.SIGSEGV} if number == signal.SIGINT and (not said or "Traceback" in said) else set()
    if code not in {0, killed, 128 + number} | (set() if at_work else in_start):
        wrong.append(f"ended with {code}:\n{said[-3000:]}")
    if at_work and "Traceback" in said:
        wrong.append(f"a traceback:\n{said[-3000:]}")
    saved = "saved" if "stopped and saved" in said else "nothing to save"
    return {0: "finished", -signal.SIGKILL: "killed"}.get(code, saved), wrong


def differences(whole: Path, other: Path) -> list[str]:
    """What two finished runs do not have in common: arrays of their last image, rows of metrics."""
    first, second = (read_manifest(images(workdir / "checkpoints")[0]) for workdir in (whole, other))
    a, b = (load_arrays(image, leaves_of(image)) for image in (first, second))
    found = [f"array {name} differs" for name in a.keys() | b.keys() if not same_arrays(a.get(name), b.get(name))]
    if first.step != second.step:
        found.append(f"steps {first.step} and {second.step}")
    if rows(whole) != rows(other):
        found.append(f"metrics differ: {rows(whole)} and {rows(other)}")
    return found


def same_arrays(a, b) -> bool:
    """Whether two arrays are equal bit for bit."""
    return a is not None and b is not None and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def rows(workdir: Path) -> list[dict]:
    """The metrics of a run without its clock."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "train_seconds"} for line in lines]


def main(config: Config) -> dict:
    """Disturbs runs until the time is over; returns what results.json holds."""
    run = Run("train_soak", config, config.workdir)
    directory, start = run.directory / "files", time.perf_counter()
    directory.mkdir()
    soak = Soak(directory, config)
    soak.undisturbed()
    soak.until = time.perf_counter() + (20 if config.preset == "smoke" else 60 * config.minutes)
    soak.work(config.workers)
    figures = soak.figures
    for what in figures.wrong:
        run.log({"wrong": what})
    results = {
        "minutes": (time.perf_counter() - start) / 60, "signals": figures.signals.total(),
        "runs_finished": figures.finished, "wrong": len(figures.wrong),
    }  # fmt: skip
    results |= {f"signals_{way.replace(' ', '_')}": figures.signals[way] for way in WAYS}
    results |= {f"ended_{end.replace(' ', '_')}": count for end, count in sorted(figures.ends.items())}
    run.close(results)
    if figures.wrong:
        raise ValueError(f"the stress has found something, see {run.directory}/metrics.jsonl: {figures.wrong[0]}")
    shutil.rmtree(directory)
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
