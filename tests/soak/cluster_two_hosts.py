"""Measure rates and time to accuracy over a slow link between two hosts, and what a run keeps when that link is cut.

    python tests/soak/cluster_two_hosts.py                  links of 1,000 and 100 Mbit/s, cuts of up to a minute
    python tests/soak/cluster_two_hosts.py --preset smoke   one link and one cut, small tables; two minutes
    python tests/soak/cluster_two_hosts.py --parts cuts     one part
    python tests/soak/cluster_two_hosts.py --parts accuracy --workdir DIR --resume     three hours; goes on where it was

The hosts are network namespaces of this machine, which share its cores, and each limits what it sends by a token bucket
(Linux, with root or user namespaces; `tc` for the rates). The driver is on one host, two servers of rows on the other,
on one Ray. **Measured; the link is one of this kernel, without the delay of a network.**

Rates: the modes of oac_throughput.py. Accuracy: train.py over one pass of 3M clicks in three modes, each at a learning
rate of rows that was chosen for it by other seeds: seconds of training, with compilation and without evaluations, to
the AUC that `async` has at its end, and to that of sync. Cuts: train.py with OAC and whole saves, whose link is cut
half-way between two saves, beside one whose link is not. If Ray has given the second host up and ended there, it is
started again when the link is back, as a service manager would.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import numpy as np
from main.children import TRAIN, run_child
from main.cli import Flags, Run, command_line, grid, paired_interval, refuse, rule_of_ray
from main.signals import Asked, stop_on_signals
from oac_time_to_accuracy import steps_to
from studies.reference import ratio
from two_hosts import PORT, Host, ray_environment, ray_on, two_hosts
from watching import command_of, differences

OVER_SERVERS = ("--tables", "remote", "--servers", "2", "--pipeline", "oac", "--cpr", "vanilla")
SAVES, EVALUATIONS, CUT_AFTER = 8, 16, 3  # the third of 16 evaluations is half-way between the first two of 8 saves
# Chosen by the runs oac_rates_3m and oac_async_rates_3m of docs/results.md, over other seeds.
ROW_RATES = {"sync": 0.08, "async": 0.02, "oac": 0.08}
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"mbit_per_s": (1000.0,), "cuts_s": (2.0,), "rounds": 2, "rows": 20_000, "steps": 1600,
              "pass_steps": 40, "seeds": 2},
    "default": {"mbit_per_s": (1000.0, 100.0), "cuts_s": (2.0, 10.0, 20.0, 60.0), "rounds": 12, "rows": 1_000_000,
                "steps": 4000, "pass_steps": 1465, "seeds": 8},
    "paper": {"mbit_per_s": (1000.0, 100.0), "cuts_s": (2.0, 10.0, 20.0, 60.0), "rounds": 48, "rows": 1_000_000,
              "steps": 4000, "pass_steps": 5860, "seeds": 8},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the experiment."""

    parts: tuple[Literal["rates", "accuracy", "cuts"], ...] = ("rates", "cuts")
    """What to measure."""
    seeds: int | None = None
    """Of the accuracy; that of the preset by default."""
    resume: bool = False
    """Go on with the accuracy of the run in --workdir, also with more --seeds."""


class TwoHosts:
    """A driver's host and that of its servers, and how commands run there; below a directory, until asked to stop."""

    def __init__(self, first: Host, second: Host, config: Config, above: Path, asked: Asked):
        self.first, self.second, self.above, self._asked = first, second, above, asked
        self.sizes, self._seed = SIZES[config.preset], config.seed

    def run(self, script: Path, name: str, *flags: str) -> None:
        """Run a script on the first host, whose servers are on the second; OSError if it fails."""
        joined = ("--ray-address", f"{self.first.address}:{PORT}", "--server-resource", "rows")
        directory = ("--workdir", str(self.above / name))
        command = self.first.command([sys.executable, str(script), *flags, *directory, *joined])
        with open(self.above / f"{name}.log", "w") as log:
            run_child(command, name, self._asked, ray_environment(), log)

    def _sized(self) -> tuple[str, ...]:
        return "--rows", str(self.sizes["rows"]), "--seed", str(self._seed)

    def slow_down(self, mbit_per_s: float) -> None:
        """Let the link send so much each way."""
        for host in (self.first, self.second):
            host.slow_down(mbit_per_s)

    def rates(self, mbit_per_s: float) -> dict[str, Any]:
        """Return the results of oac_throughput.py over a link that sends so much each way."""
        self.slow_down(mbit_per_s)
        name = f"rates_{mbit_per_s:g}"
        script, rounds = TRAIN.with_name("oac_throughput.py"), str(self.sizes["rounds"])
        self.run(script, name, "--link", "remote", "--rounds", rounds, *self._sized())
        return json.loads((self.above / name / "results.json").read_text())

    def curve(self, mode: str, seed: int) -> list[tuple[float, float]]:
        """Train one pass in a mode; return (seconds of training, validation AUC) at each evaluation."""
        name, steps, seed = f"pass_{mode}_{seed}", self.sizes["pass_steps"], self._seed + seed
        shutil.rmtree(self.above / name, ignore_errors=True)  # of one that was stopped
        window = () if mode == "sync" else ("--window", "16")
        how = ("--tables", "remote", "--servers", "2", "--pipeline", mode, "--row-learning-rate", str(ROW_RATES[mode]))
        size = ("--batch-size", "2048", "--steps", str(steps), "--evaluations", "8", "--save-every-steps", "0")
        self.run(TRAIN, name, *how, *window, *size, "--exponent", "1.05", "--seed", str(seed))
        lines = map(json.loads, (self.above / name / "metrics.jsonl").read_text().splitlines())
        found = [(row["train_seconds"], row["validation_auc"]) for row in lines if "validation_auc" in row]
        shutil.rmtree(self.above / name)  # its last image
        return found

    def train(self, cut_s: float) -> dict[str, Any]:
        """Train while the link is cut for so long; return what was lost and why, and how it ended if not well."""
        name, steps, failed = f"cut_{cut_s:g}", self.sizes["steps"], ""
        size = ("--model", "small_dlrm", "--batch-size", "512", "--steps", str(steps))
        often = ("--evaluations", str(EVALUATIONS), "--save-every-steps", str(steps // SAVES))
        ended, found = threading.Event(), dict[str, Any]()
        with ThreadPoolExecutor(1) as threads:
            cut = threads.submit(self._cut_link, cut_s, self.above / name / "metrics.jsonl", ended)
            try:
                self.run(TRAIN, name, *size, *often, *OVER_SERVERS, *self._sized())
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


def curves_over(
    links: Mapping[str, float], seeds: int, run: Run, hosts: Callable[[], contextlib.AbstractContextManager[TwoHosts]]
) -> dict[str, list[dict[str, list]]]:
    """Train the passes that the run has not logged yet; return {link: {mode: curve} of each seed}."""

    def train(name, mode, seed):
        with hosts() as pair:
            pair.slow_down(links[name])
            return {"curve": pair.curve(mode, seed)}

    curves: dict[str, list[dict[str, list]]] = {name: [] for name in links}
    for seed, name in itertools.product(range(seeds), links):
        made = {mode: functools.partial(train, name, mode, seed) for mode in ROW_RATES}
        logged = {mode: run.logged({"name": name, "seed": seed, "mode": mode}, make) for mode, make in made.items()}
        curves[name].append({mode: row["curve"] for mode, row in logged.items()})
    return curves


def seconds_to(curve: Sequence[tuple[float, float]], auc: float) -> float:
    """Return the seconds at which a curve of (seconds, AUC) first reaches an AUC; NaN if it never does."""
    found = steps_to([{"step": seconds, "test_auc": each} for seconds, each in curve], auc)
    return math.nan if found is None else found


def accuracy_of(curves: Sequence[Mapping[str, Sequence[tuple[float, float]]]]) -> dict[str, Any]:
    """Return the time to accuracy over a link from {mode: curve} of each seed.

    `oac_over_async_to_async`: the inverse ratio of their seconds to the last AUC of `async`; None if a seed never
    reaches it.

    >>> slow, fast = [(2.0, 0.6), (4.0, 0.7)], [(1.0, 0.6), (2.0, 0.7)]
    >>> found = accuracy_of(2 * [{"sync": slow, "async": [(1.0, 0.55), (2.0, 0.6)], "oac": fast}])
    >>> found["oac_over_sync_to_sync"], found["oac_over_async_to_async"], round(found["auc_lost_async"], 3)
    (2.0, 2.0, 0.1)
    """
    results: dict[str, Any] = {"seeds": len(curves)}
    results["same_curve_of_sync_and_oac"] = all(
        [auc for _, auc in of["sync"]] == [auc for _, auc in of["oac"]] for of in curves
    )
    for mode in ROW_RATES:
        results |= ratio(f"seconds_{mode}", [of[mode][-1][0] for of in curves])
        lost = [of["sync"][-1][1] - of[mode][-1][1] for of in curves]
        results[f"auc_lost_{mode}"], results[f"auc_lost_{mode}_half_width"] = paired_interval(lost)
    for mode, target in (("sync", "sync"), ("sync", "async"), ("async", "async")):
        key, last = f"oac_over_{mode}_to_{target}", [of[target][-1][1] for of in curves]
        took = [seconds_to(of[mode], auc) / seconds_to(of["oac"], auc) for of, auc in zip(curves, last, strict=True)]
        results |= ratio(key, took) if np.isfinite(took).all() else {key: None}
    return results


def table(results: Mapping[str, Any], parts: Mapping[str, list[str]]) -> str:
    """Format the rates and the accuracy over each link, and the runs whose link was cut: {part: names of its rows}."""
    columns = {
        "rates": {f"{way} over sync": f"{{}}_{way}_over_sync_remote" for way in ("semisync", "async", "oac")},
        "accuracy": {"speed to sync's AUC, OAC over sync": "{}_oac_over_sync_to_sync", "to that of async, over sync":
                     "{}_oac_over_sync_to_async", "over async": "{}_oac_over_async_to_async",
                     "AUC lost by async": "{}_auc_lost_async"},
        "cuts": {"the same bits": "{}_same_bits", "shards lost": "{}_shards_failed",
                 "seconds longer": "{}_seconds_longer"},
    }  # fmt: skip
    return "\n\n".join(grid(results, "link", rows, columns[part]) for part, rows in parts.items())


def main(config: Config) -> dict:
    """Measure the parts; return the contents of results.json."""
    refuse({
        "--parts needs at least one part.": not config.parts,
        "--parts rates and accuracy need tc of iproute2, which is not installed.": (
            {"rates", "accuracy"} & {*config.parts} and shutil.which("tc") is None
        ),
        "--resume goes on with the accuracy: give --parts accuracy alone.": (
            config.resume and config.parts != ("accuracy",)
        ),
    } | rule_of_ray())  # fmt: skip
    sizes, results = SIZES[config.preset], dict[str, Any]()
    links = {f"mbit_{mbit:g}": mbit for mbit in sizes["mbit_per_s"]}
    cuts = {f"cut_{cut:g}_s": cut for cut in sizes["cuts_s"]}
    rows: dict[str, list[str]] = {part: [*(cuts if part == "cuts" else links)] for part in config.parts}
    with Run("cluster_two_hosts", config, config.workdir, config.resume) as run, stop_on_signals() as asked:

        @contextlib.contextmanager
        def hosts():  # anew each time, so that nothing is left of a cut
            with two_hosts() as (first, second), ray_on(first, second):
                yield TwoHosts(first, second, config, run.directory, asked)

        def keep(name, row):
            run.log({"name": name} | row)
            results.update({f"{name}_{key}": value for key, value in row.items()})

        if "rates" in rows:
            for name, mbit_per_s in links.items():
                with hosts() as pair:
                    keep(name, pair.rates(mbit_per_s))
        if "accuracy" in rows:
            for name, curves in curves_over(links, config.seeds or sizes["seeds"], run, hosts).items():
                results.update({f"{name}_{key}": value for key, value in accuracy_of(curves).items()})
        if "cuts" in rows:
            with hosts() as pair:
                undisturbed = pair.train(0.0)
            keep("no_cut", undisturbed)
            for name, cut_s in cuts.items():
                with hosts() as pair:
                    row = pair.train(cut_s)
                if not row["failed"]:
                    row["same_bits"] = not differences(run.directory / "cut_0", run.directory / f"cut_{cut_s:g}")
                    row["seconds_longer"] = row["train_seconds"] - undisturbed["train_seconds"]
                keep(name, row)
        run.close(results, table(results, rows))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
