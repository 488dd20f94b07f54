"""Kill or stop trainers, servers and sync servers on Ray at random: nothing may hang, every example counts once.

    python tests/soak/cluster_trainers_soak.py --minutes 10    what `make soak` runs
    python tests/soak/cluster_trainers_soak.py --preset smoke  two trainers and three deaths; two minutes

Four trainers of two workers each run freely over two servers (`jaxrec.cluster.pool`), synchronised in the background by
EASGD over two sync servers. Every 20 seconds a process is killed (`os.kill(pid, 9)`) or stopped for good (SIGSTOP): a
random trainer, server and sync server in turn. The stream is long enough for the given time. `accounting_exact`:
examples trained, each counted once, and examples lost add up to the stream. `processes_left`: processes of the pool and
of the servers that are alive at the end. `longest_step_over_median_STATE`: the longest step, from a batch to the next,
of a trainer that was not itself stopped, over the median of its steps: while a trainer or a sync server was stopped and
not yet declared dead; while a process started, which takes the cores of this machine that all share; while rows of a
dead server were away; and at all other times (`calm`). Regime: free-running, all **measured**.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import jax.numpy as jnp
import numpy as np
import optax
from main.cli import Flags, Run, command_line, refuse, rule_of_ray
from pauses import Timed, longest_by_state, state_at
from studies.pool_kills import KINDS, processes_of
from studies.server_kills import END_S, alive_after, of_its_own

from jaxrec.cluster import Cluster, Supervisor
from jaxrec.cluster.pool import TrainerPool
from jaxrec.cluster.trainers import TrainerWork
from jaxrec.data.synthetic import SyntheticClicks
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, adagrad
from jaxrec.shadowsync import easgd
from jaxrec.task import Task

BATCH, SERVERS, SYNC_SERVERS, TIMEOUT_S = 64, 2, 2, 15.0
PACE_S = 0.1  # seconds per batch of a trainer, so that the run takes the given time
STARTING_S = 8.0  # for which a new server or sync server counts as starting; trainers say it themselves
ROWS = {"user": 3000, "item": 2000, "shop": 500}
SPEC = EmbeddingSpec({name: Table(rows, 8) for name, rows in ROWS.items()}, {"sparse": Lookup(tuple(ROWS))}, shards=4)
CLICKS = SyntheticClicks(tuple(ROWS.values()), dense_features=4)
SIZES = {"smoke": (0.5, 2, 12.0), "default": (10.0, 4, 20.0), "paper": (60.0, 8, 20.0)}


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the soak; the preset decides those that are not given."""

    minutes: float | None = None
    trainers: int | None = None
    every_seconds: float | None = None
    """Seconds from one kill to the next."""


def loss(params, activations, batch):
    """Return the losses of a factorisation machine."""
    vectors = activations["sparse"]
    pairs = jnp.sum(jnp.sum(vectors, axis=1) ** 2 - jnp.sum(vectors**2, axis=1), axis=1)
    return optax.sigmoid_binary_cross_entropy(batch.dense @ params["dense"] + pairs + params["bias"], batch.label)


@dataclasses.dataclass(frozen=True)
class Paced:
    """Batches of each trainer, one every `PACE_S` seconds."""

    steps: int

    def __call__(self, trainer: int, trainers: int):
        def stream(start: int):
            for number in range(start, self.steps):
                time.sleep(PACE_S)
                yield CLICKS.batch(number * trainers + trainer, BATCH)

        return stream


class Killer:
    """Kills or stops a process every `every_s` seconds, for `minutes` minutes from the first step on.

    Attributes:
      done: signals sent.
      seen: ids of all processes that were there.
      samples: (instant, state of the pool, see `state_at`) of each call.
    """

    def __init__(self, servers: Supervisor, seed: int, every_s: float, minutes: float, run: Run):
        self.servers, self.every_s, self.end_s, self.run = servers, every_s, 60 * minutes, run
        self.rng, self.begun, self.next_at = np.random.default_rng(seed), 0.0, every_s / 2
        self.done: list[dict[str, Any]] = []
        self.seen: set[int] = set()
        self.samples: list[tuple[float, str]] = []
        self._noticed: list[tuple[float, str]] = []  # (instant, kind) of deaths
        self._pending: list[tuple[str, bool]] = []  # (kind, whether it was stopped) of signals not yet noticed

    def __call__(self, pool: Any) -> None:
        """Kill or stop a process if one is due; called by the pool some times a second."""
        processes = processes_of(pool, self.servers)
        self.seen |= {number for each in processes.values() for number in each}
        self._sample(pool)
        if not self.begun and any(one.steps for one in pool.progress):
            self.begun = time.monotonic()
        now = time.monotonic() - self.begun if self.begun else 0.0
        if not self.next_at <= now <= self.end_s:
            return
        self.next_at = now + self.every_s
        kind = [*KINDS.values()][len(self.done) % len(KINDS)]
        if not processes[kind]:
            return
        victim = int(self.rng.choice(processes[kind]))
        how = signal.SIGSTOP if self.rng.random() < 0.3 else signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):  # it has already ended
            os.kill(victim, how)
            self.done.append({"at_s": now, "kind": kind, "signal": how.name, "process": victim})
            self.run.log(self.done[-1])
            self._pending.append((kind, how is signal.SIGSTOP))

    def _sample(self, pool):
        now = time.monotonic()
        for failure in pool.failures[len(self._noticed) :]:
            self._noticed.append((now, failure.kind))
            mine = [each for each in self._pending if each[0] == failure.kind]
            if mine:
                self._pending.remove(mine[0])
        states = {one.state for one in pool.progress}
        of_server = any(kind == "server" for kind, _ in self._pending)
        recent = any(kind != "trainer" and now - at < STARTING_S for at, kind in self._noticed)
        state = state_at(
            rows_away=of_server or any(one.lost for one in pool.progress),
            starting=recent or bool(states & {"waiting", "starting"}),
            stopped=any(stopped for _, stopped in self._pending),
        )
        self.samples.append((now, state))


def soak(config: Config, run: Run, minutes: float, trainers: int, every_s: float) -> dict[str, Any]:
    """Run the pool under kills; return the contents of results.json."""
    row_optimizer, steps = adagrad(0.05), int(60 * minutes / PACE_S)
    params = {"dense": np.zeros(4, np.float32), "bias": np.float32(0)}
    instants = run.directory / "instants"
    instants.mkdir()
    work = TrainerWork(
        Task(SPEC, loss, optax.adam(3e-3), row_optimizer), params, Timed(Paced(steps), instants), easgd(),
        pace_seconds=0.2, workers=2,
    )  # fmt: skip
    with Cluster() as cluster:
        servers = Supervisor(
            cluster, SPEC, row_optimizer, SERVERS, directory=run.directory, timeout_s=TIMEOUT_S, most_deaths=10**6
        )
        options: dict[str, Any] = {"sync_servers": SYNC_SERVERS, "timeout_s": TIMEOUT_S, "most_deaths": 10**6}
        with TrainerPool(
            cluster, servers, work, trainers, directory=run.directory / "images", save_every_seconds=10.0, **options
        ) as pool:
            killer = Killer(servers, config.seed, every_s, minutes, run)
            models, stats = pool.run(killer)
        servers.close()
        left = alive_after([*killer.seen], END_S)
    stream = trainers * steps * BATCH
    failures = [failure.kind for failure in stats.failures]
    return {
        "trainers": trainers, "workers": 2, "servers": SERVERS, "sync_servers": SYNC_SERVERS,
        "signals": len(killer.done), "stopped": sum(one["signal"] == "SIGSTOP" for one in killer.done),
        **{f"{kind.replace(' ', '_')}s_replaced": failures.count(kind) for kind in KINDS.values()},
        "examples_of_the_stream": stream, "examples": stats.examples, "examples_lost": stats.examples_lost,
        "accounting_exact": stats.examples + stats.examples_lost == stream,
        "trainers_done": len(models), "processes_left": len(left), "seconds": stats.seconds,
        "rows_lost": stats.rows_lost, "waited_for_rows_s": sum(stats.waited_for_rows_s),
        "average_sync_gap": float(np.mean(stats.average_sync_gap)), "replica_spread": stats.replica_spread,
        **longest_by_state(instants, killer.samples),
    }  # fmt: skip


def main(config: Config) -> dict:
    """Run the soak; return the contents of results.json."""
    refuse(rule_of_ray())
    minutes, trainers, every_s = SIZES[config.preset]
    sizes = config.minutes or minutes, config.trainers or trainers, config.every_seconds or every_s
    with Run("cluster_trainers_soak", config, config.workdir) as run, of_its_own() as above, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one for each death; metrics.jsonl has them
        results = soak(config, run, *sizes)
        results["directories_left"] = len(list(above.glob("jaxrec-*")))
        run.close(results)
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
