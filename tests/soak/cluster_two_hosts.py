"""Measure rates over a slow link between two hosts, and what a run keeps when that link is cut for a while.

    python tests/soak/cluster_two_hosts.py                  links of 1,000 and 100 Mbit/s, cuts of up to a minute
    python tests/soak/cluster_two_hosts.py --preset smoke   one link and one cut, small tables; two minutes
    python tests/soak/cluster_two_hosts.py --parts cuts     one part

The hosts are network namespaces of this machine, which share its cores, and each limits what it sends by a token bucket
(Linux, with root or user namespaces; `tc` for the rates). The driver is on one host, two servers of rows on the other,
on one Ray. **Measured; the link is one of this kernel, without the delay of a network.**

Rates: the modes of oac_throughput.py. Cuts: train.py with OAC and whole saves, whose link is cut half-way between two
saves, beside one whose link is not. If Ray has given the second host up and ended there, it is started again when the
link is back, as a service manager would.
"""

import contextlib
import dataclasses
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

from main.children import TRAIN, run_child
from main.cli import Flags, Run, command_line, grid, refuse, rule_of_ray
from main.signals import Asked, stop_on_signals
from two_hosts import PORT, Host, ray_environment, ray_on, two_hosts
from watching import command_of, differences

OVER_SERVERS = ("--tables", "remote", "--servers", "2", "--pipeline", "oac", "--cpr", "vanilla")
SAVES, EVALUATIONS, CUT_AFTER = 8, 16, 3  # the third of 16 evaluations is half-way between the first two of 8 saves
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"mbit_per_s": (1000.0,), "cuts_s": (2.0,), "rounds": 2, "rows": 20_000, "steps": 1600},
    "default": {"mbit_per_s": (1000.0, 100.0), "cuts_s": (2.0, 10.0, 20.0, 60.0), "rounds": 12, "rows": 1_000_000,
                "steps": 4000},
    "paper": {"mbit_per_s": (1000.0, 100.0), "cuts_s": (2.0, 10.0, 20.0, 60.0), "rounds": 48, "rows": 1_000_000,
              "steps": 4000},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the experiment."""

    parts: tuple[Literal["rates", "cuts"], ...] = ("rates", "cuts")
    """What to measure."""


class TwoHosts:
    """A driver's host and that of its servers, and how commands run there; below a directory, until asked to stop."""

    def __init__(self, first: Host, second: Host, config: Config, above: Path, asked: Asked):
        self.first, self.second, self.above, self._asked = first, second, above, asked
        self.sizes, self._seed = SIZES[config.preset], config.seed

    def run(self, script: Path, name: str, *flags: str) -> None:
        """Run a script on the first host, whose servers are on the second; OSError if it fails."""
        rows, seed = str(self.sizes["rows"]), str(self._seed)
        shared = ("--workdir", str(self.above / name), "--rows", rows, "--seed", seed)
        joined = ("--ray-address", f"{self.first.address}:{PORT}", "--server-resource", "rows")
        command = self.first.command([sys.executable, str(script), *flags, *shared, *joined])
        with open(self.above / f"{name}.log", "w") as log:
            run_child(command, name, self._asked, ray_environment(), log)

    def rates(self, mbit_per_s: float) -> dict[str, Any]:
        """Return the results of oac_throughput.py over a link that sends so much each way."""
        for host in (self.first, self.second):
            host.slow_down(mbit_per_s)
        name = f"rates_{mbit_per_s:g}"
        script, rounds = TRAIN.with_name("oac_throughput.py"), str(self.sizes["rounds"])
        self.run(script, name, "--link", "remote", "--rounds", rounds)
        return json.loads((self.above / name / "results.json").read_text())

    def train(self, cut_s: float) -> dict[str, Any]:
        """Train while the link is cut for so long; return what was lost and why, and how it ended if not well."""
        name, steps, failed = f"cut_{cut_s:g}", self.sizes["steps"], ""
        size = ("--model", "small_dlrm", "--batch-size", "512", "--steps", str(steps))
        often = ("--evaluations", str(EVALUATIONS), "--save-every-steps", str(steps // SAVES))
        ended, found = threading.Event(), dict[str, Any]()
        with ThreadPoolExecutor(1) as threads:
            cut = threads.submit(self._cut_link, cut_s, self.above / name / "metrics.jsonl", ended)
            try:
                self.run(TRAIN, name, *size, *often, *OVER_SERVERS)
            except OSError as error:  # a finding, as where the servers are given up
                failed = str(error)
            finally:
                ended.set()
            found |= cut.result()
        if not failed:
            results = json.loads((self.above / name / "results.json").read_text())
            found |= {key: results[key] for key in ("test_auc", "pls", "train_seconds", "shards_failed")}
        return found | {"why_lost": reasons((self.above / f"{name}.log").read_text()), "failed": failed}

    def _cut_link(self, cut_s: float, metrics: Path, ended: threading.Event) -> dict[str, Any]:
        """Cut the link for so long; start Ray on the second host again if it ends there."""
        found = {"cut_s": 0.0, "ray_restarts": 0}
        while cut_s and not (metrics.exists() and metrics.read_text().count("\n") >= CUT_AFTER):
            if ended.wait(0.05):
                return found
        if not cut_s:
            return found
        began = time.monotonic()
        self.first.cut()
        try:
            ended.wait(cut_s)
        finally:
            self.first.join()
        found["cut_s"] = time.monotonic() - began
        while not ended.wait(1):
            if not any("raylet/raylet" in command_of(process) for process in self.second.processes()):
                self.second.kill()
                self.second.join_ray(self.first)
                found["ray_restarts"] += 1
        return found


def reasons(said: str) -> list[str]:
    """Return why servers were lost, from what a run said; without numbers of processes.

    >>> reasons("shards [0, 2] are lost: server 0 (incarnation 1) is gone: its process 7 has ended; server 0 (inc")
    ['is gone: its process has ended']
    """
    found = re.findall(r"are lost: server \d+ \(incarnation \d+\) (.*?); server", said.replace("\n", " "))
    return sorted({re.sub(r"process \d+", "process", each) for each in found})


def table(results: Mapping[str, Any], links: list[str], cuts: list[str]) -> str:
    """Format the rates over each link and the runs whose link was cut."""
    modes = {f"{way} over sync": f"{{}}_{way}_over_sync_remote" for way in ("semisync", "async", "oac")}
    lost = {"the same bits": "{}_same_bits", "shards lost": "{}_shards_failed", "seconds longer": "{}_seconds_longer"}
    parts = [grid(results, "link", links, modes)] if links else []
    return "\n\n".join([*parts, grid(results, "cut", cuts, lost)] if cuts else parts)


def main(config: Config) -> dict:
    """Measure the parts; return the contents of results.json."""
    refuse({
        "--parts needs at least one part.": not config.parts,
        "--parts rates needs tc of iproute2, which is not installed.": (
            "rates" in config.parts and shutil.which("tc") is None
        ),
    } | rule_of_ray())  # fmt: skip
    sizes, results = SIZES[config.preset], dict[str, Any]()
    links = [f"mbit_{mbit:g}" for mbit in sizes["mbit_per_s"]] if "rates" in config.parts else []
    cuts = [f"cut_{cut:g}_s" for cut in sizes["cuts_s"]] if "cuts" in config.parts else []
    with Run("cluster_two_hosts", config, config.workdir) as run, stop_on_signals() as asked:

        @contextlib.contextmanager
        def hosts():  # anew each time, so that nothing is left of a cut
            with two_hosts() as (first, second), ray_on(first, second):
                yield TwoHosts(first, second, config, run.directory, asked)

        def keep(name, row):
            run.log({"name": name} | row)
            results.update({f"{name}_{key}": value for key, value in row.items()})

        for name, mbit_per_s in zip(links, sizes["mbit_per_s"], strict=False):
            with hosts() as pair:
                keep(name, pair.rates(mbit_per_s))
        if cuts:
            with hosts() as pair:
                undisturbed = pair.train(0.0)
            keep("no_cut", undisturbed)
            for name, cut_s in zip(cuts, sizes["cuts_s"], strict=True):
                with hosts() as pair:
                    row = pair.train(cut_s)
                if not row["failed"]:
                    row["same_bits"] = not differences(run.directory / "cut_0", run.directory / f"cut_{cut_s:g}")
                    row["seconds_longer"] = row["train_seconds"] - undisturbed["train_seconds"]
                keep(name, row)
        run.close(results, table(results, links, cuts))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
