"""train.py under kill -9, SIGTERM, SIGINT and SIGHUP, with each technique and all three, and with killed servers.

    python tests/soak/train_soak.py --minutes 10  what `make soak` runs

No run may be lost or hang, and each must keep what its regime promises. Runs of train.py are stopped at random instants
(while Python starts, while XLA compiles, in a step, in an evaluation, in a save, at the end) and resumed until they are
finished. Every process must end in time, with the exit code of its signal and without a traceback; what it reported as
saved must exist; and no run may resume from an earlier step than the last time.

Where a run is deterministic, every array of the last image and every row of metrics must be bitwise equal to those of
an undisturbed run: with OAC and with whole CPR saves, to those of a run without either. A run with a CPR scheme that
was killed resumes from rows of different ages: it must then report this, in words and as a portion of lost samples, and
its AUC may differ by `BAND`. So may that of trainers that run freely or are synchronised in the background, which are
never reproducible.

Where rows are at servers, one server is killed once, at a random instant between the first evaluation and the end,
including the last save and the last evaluation. The run must still finish with its results: with full recovery bitwise
equal to an undisturbed run, with MFU within `BAND`. (`cluster_soak.py` holds partial recovery bitwise to `Serial`: it
also records which saves a dead server had no part in.)
"""

import collections
import dataclasses
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import numpy as np
from main.children import TRAIN
from main.cli import Flags, Run, command_line, refuse, rule_of_ray
from tqdm import tqdm
from watching import (
    Ended,
    Process,
    differences,
    how_ended,
    judge,
    number_of,
    processes_below,
    result_of,
    step_begun,
    steps_saved,
    steps_told,
)

STEPS = 160
SMALL = (
    "--preset", "smoke", "--model", "small_dlrm", "--rows", "3000", "--batch-size", "128", "--steps", str(STEPS),
    "--evaluations", "8",
)  # fmt: skip
LINES = 9  # printed by such a run while it trains
AS_OFTEN = ((), ("--save-every-steps", "20"), ("--save-every-steps", "5"))  # how often to save
WAYS = {"SIGKILL": 0.4, "SIGTERM": 0.2, "SIGINT": 0.1, "SIGHUP": 0.2, "two SIGINT": 0.1}  # {way to stop: probability}
MOST_SIGNALS = 6  # signals per run; after them it may finish
BAND = 0.01  # tolerance of the test AUC


class Combination(NamedTuple):
    """Flags of a run, and what must survive kills."""

    flags: tuple[str, ...]
    like: str  # the combination whose undisturbed run it is compared with
    promise: Literal["same bits", "same bits unless told", "near"]


_HOST = ("--tables", "host")
_OAC = (*_HOST, "--pipeline", "oac")
_SERVERS = ("--tables", "remote", "--servers", "2", "--pipeline", "oac")
_TWO = ("--trainers", "2", "--shadowsync")
COMBINATIONS = {
    "oac_vanilla": Combination((*_OAC, "--cpr", "vanilla"), "host", "same bits"),
    "oac_mfu": Combination((*_OAC, "--cpr", "mfu"), "host", "same bits unless told"),
    "three": Combination((*_OAC, "--cpr", "mfu", *_TWO, "easgd", "--fail", "70:3"), "three", "near"),
    "three_lock_step": Combination(
        (*_OAC, "--cpr", "vanilla", *_TWO, "ma", "--sync-every-steps", "8"), "three_lock_step", "same bits"
    ),
    "free": Combination((*_HOST, *_TWO, "easgd"), "free", "near"),
    "oac_full": Combination((*_OAC, "--cpr", "full", "--fail", "50:3", "110:1,5"), "host", "same bits"),
    "oac": Combination(_OAC, "host", "same bits"),
    "host": Combination(_HOST, "host", "same bits"),
    "device": Combination((), "host", "same bits"),
    "mapped": Combination((*_HOST, "--table-directory", "{tables}"), "host", "same bits"),
    "servers_full": Combination((*_SERVERS, "--cpr", "full", "--save-every-steps", "20"), "host", "same bits"),
    "servers_mfu": Combination((*_SERVERS, "--cpr", "mfu"), "host", "near"),
}
IN_SMOKE = ("oac_vanilla", "oac_mfu")


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the soak."""

    minutes: float = 1.0
    workers: int = 6
    """Number of concurrent runs."""
    only: tuple[str, ...] = ()
    """Names of combinations to run; all by default."""


@dataclasses.dataclass
class SoakFigures:
    """Counters shared by the workers, under a lock; keys begin with the name of a combination."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    most: dict[str, float] = dataclasses.field(default_factory=dict)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def add(self, counts: Mapping[str, int], wrong: list[str], most: dict[str, float] | None = None) -> None:
        """Add counts, violations, and maxima."""
        with self.lock:
            self.counts.update(counts)
            self.wrong += wrong
            for name, value in (most or {}).items():
                self.most[name] = max(value, self.most.get(name, 0.0))


def names_of(config: Config) -> tuple[str, ...]:
    """The combinations to run in turn."""
    return IN_SMOKE if config.preset == "smoke" else config.only or tuple(COMBINATIONS)


class Soak:
    """The runs of one soak, in a directory that is removed at the end unless something was wrong."""

    def __init__(self, directory: Path, config: Config):
        self.directory, self.seed, self.until = directory, config.seed, 0.0
        smoke = config.preset == "smoke"  # one run of each, without a time limit
        self.names = names_of(config)
        self.numbers = iter(range(len(IN_SMOKE) if smoke else 10**9))
        self.most_signals = 4 if smoke else MOST_SIGNALS
        self.figures = SoakFigures()
        self.environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONFAULTHANDLER": "1",
        }

    def start(self, name: str, workdir: Path, flags: tuple[str, ...] = (), temporary: str | None = None) -> Process:
        """Start a train.py that begins or resumes a run; `temporary` is its directory for temporary files."""
        tables = workdir.with_name(workdir.name + ".tables")
        placed = [flag.format(tables=tables) for flag in COMBINATIONS[name].flags]
        command = [sys.executable, str(TRAIN), *SMALL, *placed, *flags]
        return Process(
            [*command, "--workdir", str(workdir), "--resume"],
            self.environment | ({"TMPDIR": temporary} if temporary else {}),
        )

    def undisturbed(self, name: str) -> None:
        """Run a combination undisturbed, for comparison."""
        code, said, _ = self.start(name, self.directory / name).ended()
        if code:
            raise ValueError(f"an undisturbed run ({name}) ended with {code}: {said[-2000:]}")

    def disturbed(self, number: int, bar: tqdm) -> None:
        """Disturb one run until it is finished or the time is up, then compare it."""
        rng, name = np.random.default_rng([self.seed, number]), self.names[number % len(self.names)]
        if name.startswith("servers"):
            return self.bereaved(number, name, rng)
        workdir, least, signals = self.directory / f"run-{number}-{name}", 0, 0
        told: list[int] = []
        code: int | None = None
        while code != 0:
            flags = AS_OFTEN[int(rng.integers(len(AS_OFTEN)))]
            process = self.start(name, workdir, flags)
            if calm := time.perf_counter() > self.until or signals == self.most_signals:
                way, ended = "nobody", process.ended()
            else:
                way, ended = disturb(process, rng)
                signals += 1
                bar.update()
            wrong = judge(ended, way, workdir)
            if (begun := step_begun(ended.said)) is not None:
                if begun < least:
                    wrong.append(f"went on from step {begun}, and step {least} was saved before:\n{ended.said[-3000:]}")
            if (lost := steps_told(ended.said)) is not None:
                told.append(lost)
            least, code = max(least, begun or 0, *steps_saved(ended.said), 0), ended.code
            counts = {f"{name}_signals": not calm, f"{name}_kills": way == "SIGKILL", f"{name}_hangs": ended.hung}
            counts |= {f"signals_{way.replace(' ', '_')}": not calm, f"ended_{how_ended(ended)}": not calm}
            self.figures.add(counts, [f"{workdir.name}, {way}: {what}" for what in wrong])
            if calm and (code or ended.hung):
                return self.figures.add({f"{name}_runs_lost": 1}, [f"{workdir.name} did not end undisturbed"])
        self.compare(name, workdir, told)

    def bereaved(self, number: int, name: str, rng) -> None:
        """Kill one server of a run, then compare the run."""
        workdir = self.directory / f"run-{number}-{name}"
        with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as temporary:  # a short path, for sockets
            process = self.start(name, workdir, temporary=temporary)
            process.read(int(rng.integers(2, LINES + 1)))
            time.sleep(3 * rng.random())
            if killed := processes_below(Path(temporary)):
                os.kill(int(rng.choice(killed)), signal.SIGKILL)
            ended = process.ended()
            left = [str(path) for path in Path(temporary).glob("jaxrec-*")]
        wrong = judge(ended, "nobody", workdir) + [f"{path} is left" for path in left]
        counts = {f"{name}_signals": len(killed) > 0, f"{name}_kills": len(killed) > 0, f"{name}_hangs": ended.hung}
        if (noted := workdir / "failures.json").exists():
            steps = [failure["step"] for failure in json.loads(noted.read_text())["failures"]]
            counts[f"{name}_kills_after_the_last_step"] = STEPS in steps
        self.figures.add(counts, [f"{workdir.name}: {what}" for what in wrong])
        if ended.code == 0:
            self.compare(name, workdir, [])

    def compare(self, name: str, workdir: Path, told: list[int]) -> None:
        """Compare a finished run with the undisturbed one, as far as its promise goes."""
        _, like, promise = COMBINATIONS[name]
        exact = promise == "same bits" or (promise == "same bits unless told" and not told)
        whole, (auc, pls) = self.directory / like, result_of(workdir)
        away = abs(auc - result_of(whole)[0])
        wrong = differences(whole, workdir) if exact else []
        if away > BAND:
            wrong.append(f"the test AUC is {away:.4f} away from that of an undisturbed run")
        if promise == "same bits unless told" and (sum(told) > 0) != (pls > 0):
            wrong.append(f"steps that were told to be lost: {told}, and its PLS is {pls}")
        counts = {
            f"{name}_runs": 1,
            f"{name}_runs_equal": exact and not wrong,
            f"{name}_told_of_old_rows": len(told),
            f"{name}_steps_told_lost": sum(told),
        }
        most = {f"{name}_auc_away": away, f"{name}_pls": pls}
        self.figures.add(counts, [f"{workdir.name}: {what}" for what in wrong], most)
        if not wrong:
            shutil.rmtree(workdir)

    def work(self, workers: int) -> None:
        """Run until the time is up."""
        with tqdm(unit="signal", disable=None) as bar, ThreadPoolExecutor(workers) as pool:

            def worker():
                while time.perf_counter() < self.until:
                    with self.figures.lock:
                        number = next(self.numbers, None)
                    if number is None:
                        return
                    self.disturbed(number, bar)

            for done in [pool.submit(worker) for _ in range(workers)]:
                done.result()


def disturb(process: Process, rng) -> tuple[str, Ended]:
    """Send a signal at a random instant and wait for the process to end; return (way, outcome)."""
    way = str(rng.choice(list(WAYS), p=list(WAYS.values())))
    # One in three arrives while Python starts, the others after a random line of progress.
    lines = int(rng.integers(2, LINES)) if rng.random() < 2 / 3 else 0
    process.read(lines)
    time.sleep(rng.random() * (0.5 if lines else 6.0))
    number = number_of(way)
    process.send(number)
    if way.startswith("two"):
        time.sleep(0.005)
        process.send(number)
    return way, process.ended()


def main(config: Config) -> dict:
    """Disturb runs until the time is up and return the contents of results.json."""
    unknown = sorted({*config.only} - {*COMBINATIONS})
    wants_ray = any(name.startswith("servers") for name in names_of(config))
    refuse({
        f"--only {' '.join(unknown)}: the combinations are {', '.join(COMBINATIONS)}.": unknown,
    } | (rule_of_ray() if wants_ray else {}))  # fmt: skip
    run = Run("train_soak", config, config.workdir)
    directory = run.directory / "files"
    directory.mkdir()
    soak = Soak(directory, config)
    with ThreadPoolExecutor(config.workers) as pool:
        list(pool.map(soak.undisturbed, sorted({COMBINATIONS[name].like for name in soak.names})))
    start = time.perf_counter()
    soak.until = start + (math.inf if config.preset == "smoke" else 60 * config.minutes)
    soak.work(config.workers)
    figures, minutes = soak.figures, (time.perf_counter() - start) / 60
    for what in figures.wrong:
        run.log({"wrong": what})
    totals = {what: sum(figures.counts[f"{name}_{what}"] for name in soak.names) for what in ("signals", "kills")}
    totals |= {what: sum(figures.counts[f"{name}_{what}"] for name in soak.names) for what in ("runs", "hangs")}
    results = {"minutes": minutes, **totals, "wrong": len(figures.wrong), **figures.counts, **figures.most}
    run.close(results)
    if figures.wrong:
        raise ValueError(f"the stress has found something, see {run.directory}/metrics.jsonl: {figures.wrong[0]}")
    shutil.rmtree(directory)
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
