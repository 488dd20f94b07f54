"""Servers on Ray that are killed at random instants: no run hangs, none ends wrong, nothing is left behind.

    python experiments/cluster_soak.py --kills 50  what `make soak` runs; about ten minutes

Small trainings over two servers, one batch after the other or with batches in flight, with whole saves,
MFU, SSU and full recovery in turns; rows are looked at every few steps and at the end, after which all are
saved once more, as in `train.py`. `os.kill(pid, 9)` meets a random message of a random server: in a
read, a write, a look, a save or a restore, among them a successor that dies while it restores, and after
the last step. Each run must end after all its steps, each of them committed, and with the bits of `Serial`
over tables in this process that loses the same shards at the same steps; with full recovery, with those of
a run without failures. After each no process of a server may live, and after all no process and no
directory of Ray may be left. `wrong` counts what was otherwise, and metrics.jsonl says it. `uncompared` are
runs where at one step more shards were lost when the first were back: no run that is told of failures can
do that; their ends are looked at, not their bits.
"""

import contextlib
import dataclasses
import functools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from main.cli import Flags, Run, command_line, refuse, rule_of_ray
from studies.cluster_work import SCHEMES, TIMEOUT_S, ClusterJob
from studies.deaths import Late, Log, NotingPipeline, NotingSerial, digests
from studies.server_kills import END_S, Killing, alive_after, killing, of_its_own
from tqdm import tqdm

from jaxrec.cluster import Cluster, Supervisor
from jaxrec.cpr import Recovery
from jaxrec.loop import every, train
from jaxrec.types import RolledBack

STEPS, EVERY, LOOK_EVERY, SERVERS = 48, 12, 8, 2
# Where a message of a verb comes up to so often in a run, on each server.
VERBS = {"read": 55, "put": 48, "take": 9, "on_shards": 5, "change": 1}


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the soak."""

    kills: int | None = None
    """At least so many; by the preset unless given."""


class Trial(NamedTuple):
    """One run and who dies in it.

    Attributes:
      arm: vanilla, mfu, ssu or full.
      window: batches in flight; 0 for one after the other.
      deaths: (verb, number of the message, incarnation, place) of each.
      spares: processes that wait.
    """

    arm: str
    window: int
    deaths: tuple[tuple[str, int, int, int], ...]
    spares: int


def drawn(rng: np.random.Generator, number: int) -> Trial:
    """A random trial; every fourth one kills a successor while it restores."""
    arm = ("full", *SCHEMES)[number % 4]
    saving = "take" if arm in ("mfu", "ssu") else "on_shards"  # of rows that are picked, or of whole images
    verbs = ["read", "put", saving]
    deaths = []
    for _ in range(int(rng.integers(1, 3))):
        verb, place = str(rng.choice(verbs)), int(rng.integers(SERVERS))
        deaths.append((verb, int(rng.integers(VERBS[verb])), 1, place))
    if number % 4 == 3:
        place = int(rng.integers(SERVERS))
        deaths = [("put", int(rng.integers(4, 30)), 1, place), ("change", int(rng.integers(VERBS["change"])), 2, place)]
    return Trial(arm, int(rng.integers(0, 6)), tuple(deaths), int(rng.integers(2)))


class Soak:
    """Runs of one job on one Ray, and what they must end with."""

    def __init__(self, cluster: Cluster, above: Path, seed: int):
        self.cluster, self.above = cluster, above
        self.job = ClusterJob(2_000, STEPS, 64, EVERY, SERVERS, seed)
        self.wanted: dict | None = None  # of a run without failures

    def run(self, trial: Trial) -> dict[str, Any]:
        """One trial: {kills, wrong: [what], uncompared}."""
        with tempfile.TemporaryDirectory(dir=self.above) as directory, contextlib.ExitStack() as opened:
            job = self.job
            servers = opened.enter_context(contextlib.closing(Supervisor(
                self.cluster, job.job.spec, job.job.row_optimizer, SERVERS, directory=directory, timeout_s=TIMEOUT_S,
                spares=trial.spares,
            )))  # fmt: skip
            state = job.job.state(servers.tables, job.seed)
            engine: Any = NotingSerial(state, job.step)
            if trial.window:
                engine = NotingPipeline(state, job.update, window=trial.window)
            steps: list[int] = []
            with engine:
                log = engine.enter(Log(engine))
                engine.enter(servers)
                recovery = engine.enter(job.recovery(engine, trial.arm, Path(directory)))
                engine.enter(Late(engine))
                plans = [Killing(servers, verb, *rest) for verb, *rest in trial.deaths]
                with killing(plans):
                    to_the_end(engine, job.data.train, [recovery.hook, noting(steps)], recovery)
                found = digests(engine.state)
            processes = [number for number in servers.processes if number is not None]
        wrong = self._wrong(trial, log, steps, found)
        wrong += [f"process {number} lives" for number in alive_after(processes, END_S)]
        deaths = sum(plan.dead.is_set() for plan in plans)
        return {"kills": deaths, "wrong": wrong, "uncompared": bool(log.more and trial.arm != "full")}

    def _wrong(self, trial, log, steps, found):
        wrong = [] if set(steps) == set(range(1, STEPS + 1)) else [f"steps {sorted(set(steps))}"]
        if trial.arm == "full":
            self.wanted = self.wanted or self.job.serially("full", {}, self.above)
            return wrong + ([] if found == self.wanted else ["other bits than a run without failures"])
        if log.more:
            return wrong
        same = found == self.job.serially(trial.arm, log.losses, self.above)
        return wrong + ([] if same else [f"other bits than Serial with {log.losses}"])


def to_the_end(engine: Any, stream: Callable, hooks: list[Callable], recovery: Recovery) -> None:
    """Trains, looks at rows on the way and at the end, and saves all; again where full recovery has gone back."""
    seen: dict[str, Any] = {}

    def rows(plans, tables):
        tables.read(plans)
        return tables

    def look(state, step, plans, metrics):
        seen["plans"] = plans
        engine.exclusive(functools.partial(rows, plans))
        return state

    while True:
        try:
            train(engine, stream, [*hooks, every(LOOK_EVERY, look)])
            engine.exclusive(functools.partial(rows, seen["plans"]))
            recovery.save_whole()
            return
        except RolledBack as back:
            back.go_back()


def noting(steps: list[int]) -> Callable:
    """A hook that notes the steps that are committed."""

    def hook(state, step, plans, metrics):
        steps.append(step)
        return state

    return hook


def main(config: Config) -> dict:
    """Runs trials until enough servers have died; returns what results.json holds."""
    refuse(rule_of_ray())
    wanted = config.kills or {"smoke": 2, "default": 50, "paper": 500}[config.preset]
    rng, rows = np.random.default_rng(config.seed), list[dict[str, Any]]()
    with Run("cluster_soak", config, config.workdir) as run, of_its_own() as place, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "shards .* has taken its place")
        with Cluster() as cluster, tqdm(total=wanted, unit="kill", disable=None) as bar:
            soak = Soak(cluster, run.directory, config.seed)
            while sum(row["kills"] for row in rows) < wanted:
                trial = drawn(rng, len(rows))
                rows.append(trial._asdict() | soak.run(trial))
                run.log(rows[-1])
                bar.update(rows[-1]["kills"])
        results = {
            "runs": len(rows), "kills": sum(row["kills"] for row in rows),
            "wrong": sum(bool(row["wrong"]) for row in rows), "uncompared": sum(row["uncompared"] for row in rows),
            "killed_while_restoring": sum(row["kills"] > 1 for row in rows[3::4]),
            "directories_left": len(list(place.glob("jaxrec-*"))),
        }  # fmt: skip
        run.close(results)
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
