"""Compare what failures cost a run of train.py that is restarted by hand with what they cost one that recovers.

    python tests/soak/train_goodput.py                   4 GB of rows at 8 servers; 40 minutes
    python tests/soak/train_goodput.py --preset smoke    small tables; five minutes

Arms: `none`, without kills and saves; `restart`, where driver and servers are killed (`kill -9`) and the same command
is given again at once, as is usual, saved at Young's interval for what a save takes, --save-steps; and one for each way
of --cpr, where one server is killed, saved at the interval that train.py chooses by the costs that it measures.
Kills come at the same seconds of every arm, counted while all servers run, at a constant rate, until it ends. No
spares. A run that meets a kill before it could recover is started again, too. `*_overhead_percent`: seconds of an arm
beyond those of `none`, in percent of the seconds that `none` trains. **Measured, on one machine.**
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import numpy as np
from cluster_work import with_sizes
from main.children import TRAIN
from main.cli import Flags, Run, command_line, grid, refuse, rule_of_ray
from watching import processes_below

from jaxrec.cluster.reaper import marked

LOOK_S = 0.5  # between looks for servers
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"rows": 20_000, "steps": 1500, "batch_size": 256, "mtbf_steps": 1000, "save_steps": 100, "servers": 2},
    "default": {"rows": 59_000_000, "steps": 6000, "batch_size": 2048, "mtbf_steps": 2500, "save_steps": 1000,
                "servers": 8},
    "paper": {"rows": 59_000_000, "steps": 100_000, "batch_size": 2048, "mtbf_steps": 33_000, "save_steps": 3600,
              "servers": 8},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the experiment; the preset decides those that are not given."""

    rows: int | None = None
    """Rows of all tables together; each takes 68 bytes with its slot."""
    steps: int | None = None
    batch_size: int | None = None
    mtbf_steps: int | None = None
    """Mean time between kills, in steps of the arm without any."""
    save_steps: int | None = None
    """Steps between the saves of `restart`."""
    servers: int | None = None
    arms: tuple[Literal["restart", "full", "vanilla", "mfu", "ssu"], ...] = ("restart", "full", "mfu")


def kill_times(seed: int, mtbf_s: float) -> Iterator[float]:
    """Draw the seconds of kills, at a constant rate, without an end."""
    rng, at = np.random.default_rng(seed), 0.0
    while True:
        at += rng.exponential(mtbf_s)
        yield at


class Trained:
    """Runs of train.py, each in a directory of its own, whose temporary files are below another one."""

    def __init__(self, config: Config, above: Path, temporary: Path):
        self._config, self._above, self._temporary = config, above, temporary
        self._rng = np.random.default_rng(config.seed)

    def run(self, arm: str, times: Iterator[float] | None) -> dict[str, Any]:
        """Train to the end, with kills at the given seconds of servers that run; return seconds, kills and figures."""
        began = looked = time.monotonic()
        kills, starts, up_s = 0, 0, 0.0
        due = next(times) if times else float("inf")
        while True:
            starts += 1
            with open(self._above / f"{arm}.log", "a") as log:
                process = subprocess.Popen(
                    self._command(arm), stdout=log, stderr=log, start_new_session=True,
                    env=os.environ | {"TMPDIR": str(self._temporary)},
                )  # fmt: skip
            try:
                while process.poll() is None:
                    time.sleep(LOOK_S)
                    servers, now = sorted(processes_below(self._temporary)), time.monotonic()
                    up_s += (now - looked) * (len(servers) == self._config.servers)
                    looked = now
                    if times is not None and up_s >= due and servers:
                        self._kill(arm, process.pid, servers)
                        kills, due = kills + 1, next(times)
            finally:
                self._kill_all(process.pid)
            if process.returncode == 0:
                break
            if starts > kills:  # else it may have met a kill before it could recover, and asks to be started again
                raise OSError(f"{arm} ended with code {process.returncode}; see {self._above / arm}.log")
        results = json.loads((self._above / arm / "results.json").read_text())
        found = {"seconds": time.monotonic() - began, "kills": kills, "starts": starts}
        kept = ("train_seconds", "test_auc", "pls", "shards_failed")
        return found | {key: results[key] for key in kept if key in results}

    def _command(self, arm):
        config = self._config
        sizes = {"rows": config.rows, "steps": config.steps, "batch-size": config.batch_size, "seed": config.seed}
        words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        words += ["--tables", "remote", "--servers", str(config.servers), "--pipeline", "oac", "--evaluations", "2"]
        if arm in ("none", "restart"):
            words += ["--save-every-steps", str(0 if arm == "none" else config.save_steps)]
        else:
            words += ["--cpr", arm, "--recovery-costs", "measured", "--mtbf-steps", str(config.mtbf_steps)]
        return [sys.executable, str(TRAIN), *words, "--workdir", str(self._above / arm), "--resume"]

    def _kill(self, arm, driver, servers):
        """Kill a server, or everything."""
        if arm == "restart":
            self._kill_all(driver)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self._rng.choice(servers)), signal.SIGKILL)

    def _kill_all(self, driver):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver, signal.SIGKILL)
        for process in [one for below in self._temporary.glob("jaxrec-*") for one in marked(str(below))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def overheads(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of all arms, and what they take beyond `none`.

    >>> none = {"seconds": 120.0, "train_seconds": 100.0, "test_auc": 0.75}
    >>> found = overheads({"none": none, "mfu": {"seconds": 130.0, "test_auc": 0.5}})
    >>> found["mfu_overhead_percent"], found["auc_lost_mfu"]
    (10.0, 0.25)
    """
    results = {f"{arm}_{key}": value for arm, row in rows.items() for key, value in row.items()}
    none = rows["none"]
    for arm, row in rows.items():
        if arm != "none":
            results[f"{arm}_overhead_percent"] = 100 * (row["seconds"] - none["seconds"]) / none["train_seconds"]
            results[f"auc_lost_{arm}"] = none["test_auc"] - row["test_auc"]
    return results


def main(config: Config) -> dict:
    """Train all arms; return the contents of results.json."""
    given, config = config, with_sizes(config, SIZES)
    refuse({
        f"--servers {config.servers} must be at most 8, the number of shards.": (config.servers or 0) > 8,
        "--arms needs at least one arm.": not config.arms,
    } | rule_of_ray())  # fmt: skip
    run = Run("train_goodput", given, config.workdir)
    with tempfile.TemporaryDirectory(prefix="g-", dir="/tmp") as temporary:  # a short path, for sockets
        trained = Trained(config, run.directory, Path(temporary))
        rows = {"none": trained.run("none", None)}
        run.log({"arm": "none"} | rows["none"])
        mtbf_s = rows["none"]["train_seconds"] * (config.mtbf_steps or 0) / (config.steps or 1)
        for arm in config.arms:
            rows[arm] = trained.run(arm, kill_times(config.seed, mtbf_s))
            run.log({"arm": arm} | rows[arm])
    results = overheads(rows) | {"mtbf_s": mtbf_s}
    columns = {"overhead, %": "{}_overhead_percent", "kills": "{}_kills", "AUC lost": "auc_lost_{}", "PLS": "{}_pls"}
    run.close(results, grid(results, "arm", list(config.arms), columns))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
