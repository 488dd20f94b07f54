"""Kill servers on Ray at random instants: no run may hang, end wrong, or leave processes or files.

    python tests/soak/cluster_soak.py --kills 50  what `make soak` runs; about ten minutes

Small trainings over two servers, one batch after the other or with batches in flight, with whole saves, MFU, SSU and
full recovery in turn; rows are read every few steps and at the end, when everything is saved once more, as in
`train.py`. `os.kill(pid, 9)` hits a random message of a random server: in a read, a put, a save or a restore, also of a
successor while it restores, and after the last step. Each run must commit all its steps and end with the bits of
`Serial` over tables in this process that loses the same shards at the same steps; with full recovery, with the bits of
a run without failures. After each run no server process may be alive, and at the end no process and no directory of Ray
may be left. `wrong` counts violations; metrics.jsonl describes them. `uncompared` counts runs in which further shards
were lost at a step after the first ones had been restored. `failures=` cannot reproduce that, so the bits of these runs
are not compared.
"""

import contextlib
import dataclasses
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import numpy as np
from cluster_work import SCHEMES, TIMEOUT_S, ClusterJob
from deaths import Late, Log, NotingPipeline, NotingSerial, digests
from main.cli import Flags, Run, command_line, refuse, rule_of_ray
from studies.server_kills import END_S, Killing, alive_after, killing, of_its_own
from tqdm import tqdm

from jaxrec.callbacks import every
from jaxrec.cluster import Cluster, Supervisor
from jaxrec.cpr import Recovery, RolledBack

STEPS, EVERY, LOOK_EVERY, SERVERS = 48, 12, 8, 2
# Upper limit of the random number of the message that a kill hits: about as many as each server gets in a run.
VERBS = {"read": 55, "put": 48, "change": 1}
WHOLE, PICKED = {"run": 5}, {"run": 26, "track": 120}  # in saves of all rows, and of picked ones


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the soak."""

    kills: int | None = None
    """Minimum number of kills; by default that of the preset."""


class Trial(NamedTuple):
    """One run and its kills.

    Attributes:
      arm: vanilla, mfu, ssu or full.
      window: batches in flight; 0 for one after the other.
      deaths: (verb, number of the message, incarnation, server) of each kill.
      spares: standby processes.
    """

    arm: str
    window: int
    deaths: tuple[tuple[str, int, int, int], ...]
    spares: int


def drawn(rng: np.random.Generator, number: int) -> Trial:
    """Draw a random trial; every fourth one kills a successor while it restores."""
    arm = ("full", *SCHEMES)[number % 4]
    most = VERBS | (PICKED if arm in ("mfu", "ssu") else WHOLE)
    verbs = [verb for verb in most if verb != "change"]
    deaths = []
    for _ in range(int(rng.integers(1, 3))):
        verb, server = str(rng.choice(verbs)), int(rng.integers(SERVERS))
        deaths.append((verb, int(rng.integers(most[verb])), 1, server))
    if number % 4 == 3:
        server, change = int(rng.integers(SERVERS)), VERBS["change"]
        deaths = [("put", int(rng.integers(4, 30)), 1, server), ("change", int(rng.integers(change)), 2, server)]
    return Trial(arm, int(rng.integers(0, 6)), tuple(deaths), int(rng.integers(2)))


class Soak:
    """Runs trials of one job on one Ray, and compares their ends with the required ones."""

    def __init__(self, cluster: Cluster, above: Path, seed: int):
        self.cluster, self.above = cluster, above
        self.job = ClusterJob(2_000, STEPS, 64, EVERY, SERVERS, seed)
        self.wanted: dict | None = None  # digests of a run without failures

    def run(self, trial: Trial) -> dict[str, Any]:
        """Run a trial; return {kills, wrong: descriptions of violations, uncompared}."""
        with tempfile.TemporaryDirectory(dir=self.above) as directory, contextlib.ExitStack() as opened:
            job = self.job
            servers = opened.enter_context(contextlib.closing(Supervisor(
                self.cluster, job.job.spec, job.job.task.row_optimizer, SERVERS, directory=directory,
                timeout_s=TIMEOUT_S, spares=trial.spares,
            )))  # fmt: skip
            state = job.job.state(servers.tables, job.seed)
            engine: Any = NotingSerial(job.job.task, state)
            if trial.window:
                engine = NotingPipeline(job.job.task, state, window=trial.window)
            steps: list[int] = []
            with engine:
                log = engine.enter(Log())
                engine.enter(servers)
                recovery = engine.enter(job.recovery(trial.arm, Path(directory)))
                engine.enter(Late())
                engine.enter(lambda info: steps.append(info.step))
                plans = [Killing(servers, verb, *rest) for verb, *rest in trial.deaths]
                with killing(plans):
                    to_the_end(engine, job.data.train, recovery)
                found = digests(engine.state)
            processes = [number for number in servers.processes if number is not None]
        wrong = self._wrong(trial, log, steps, found)
        wrong += [f"process {number} lives" for number in alive_after(processes, END_S)]
        deaths = sum(plan.dead.is_set() for plan in plans)
        return {"kills": deaths, "wrong": wrong, "uncompared": bool(log.more and trial.arm != "full")}

    def _wrong(self, trial, log, steps, found):
        wrong = [] if set(steps) == set(range(1, STEPS + 1)) else [f"steps {sorted(set(steps))}"]
        if trial.arm == "full":
            self.wanted = self.wanted or self.job.serially("full", {}, (), self.above)
            return wrong + ([] if found == self.wanted else ["other bits than a run without failures"])
        if log.more:
            return wrong
        same = found == self.job.serially(trial.arm, log.losses, log.voided, self.above)
        return wrong + ([] if same else [f"other bits than Serial with {log.losses}"])


def to_the_end(engine: Any, stream: Callable, recovery: Recovery) -> None:
    """Train, read rows on the way and at the end, and save everything; again wherever full recovery rolls back."""
    seen: dict[str, Any] = {}

    def look(info):
        seen["plans"] = info.plans
        engine.at_rest(lambda tables: tables.read(info.plans))

    engine.enter(every(LOOK_EVERY, look))
    while True:
        try:
            engine.train(stream)
            engine.at_rest(lambda tables: tables.read(seen["plans"]))
            recovery.save_whole()
            return
        except RolledBack as back:
            back.go_back()


def main(config: Config) -> dict:
    """Run trials until enough servers have been killed; return the contents of results.json."""
    refuse(rule_of_ray())
    wanted = config.kills or {"smoke": 2, "default": 50, "paper": 500}[config.preset]
    rng, rows = np.random.default_rng(config.seed), list[dict[str, Any]]()
    with Run("cluster_soak", config, config.workdir) as run, of_its_own() as temporary, warnings.catch_warnings():
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
            "directories_left": len(list(temporary.glob("jaxrec-*"))),
        }  # fmt: skip
        run.close(results)
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
