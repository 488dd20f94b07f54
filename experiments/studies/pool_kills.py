"""Killers of the processes of a pool of free-running trainers, of all kinds, and what a pool has come to.

For `shadowsync_quality.py --where processes` and the soaks of pools.
"""

import contextlib
import dataclasses
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.cluster import Cluster, Supervisor
from jaxrec.cluster.pool import PoolStats, TrainerPool
from jaxrec.cluster.trainers import TrainerWork
from jaxrec.data.synthetic import SyntheticClicks
from jaxrec.types import Batch, DenseState, TrainState

KINDS = {"trainers": "trainer", "servers": "server", "sync": "sync server"}  # {flag: name at the pool}
SAVE_EVERY_S, TIMEOUT_S = 10.0, 120.0


def click_stream(clicks: SyntheticClicks, batch_size: int, batches: int) -> Callable[[int], Iterable[Batch]]:
    """Return first -> the batches from that one on, drawn where it is called."""
    return lambda first: (clicks.batch(number, batch_size) for number in range(first, batches))


def processes_of(pool: Any, servers: Supervisor) -> dict[str, list[int]]:
    """Return {kind: process ids} of a pool and its shard servers, of those that have started."""
    of = {"trainer": pool.processes, "server": servers.processes, "sync server": pool.sync_server_processes}
    return {kind: [number for number in each if number is not None] for kind, each in of.items()}


@dataclasses.dataclass
class PoolKill:
    """A kill, with instants in seconds of `time.monotonic`; None for those yet to come.

    Attributes:
      kind: 'trainer', 'server' or 'sync server'.
      killed, noticed: when the signal was sent, and when the pool recorded the death.
      stepped: when each trainer that has work left had made a step since then, a successor its first one.
    """

    kind: str
    killed: float
    noticed: float | None = None
    stepped: float | None = None
    before: list[int] = dataclasses.field(default_factory=list)  # steps of the trainers when it was noticed


class PoolKiller:
    """Hook of `TrainerPool.run` that kills a process when the trainers have made so many steps together.

    A kill that is due before the one before it is over waits for its end.

    Args:
      plan: {steps of all trainers together: kind of the process}.
      seed: of the draw of each victim among those of its kind.

    Attributes:
      kills: kills so far.
      looks: (seconds, steps of all trainers, repeated ones included) of each call.
    """

    def __init__(self, servers: Supervisor, plan: Mapping[int, str], seed: int):
        self._servers, self._plan, self._draw = servers, sorted(plan.items()), random.Random(seed)
        self._deaths, self._earlier, self._last = 0, 0, list[int]()
        self.kills: list[PoolKill] = []
        self.looks: list[tuple[float, int]] = []

    def __call__(self, pool: Any) -> None:
        """Note what has come to pass, and kill what is due."""
        now, steps = time.monotonic(), [one.steps for one in pool.progress]
        # A successor counts from 0.
        self._earlier += sum(max(0, was - at) for was, at in zip(self._last, steps, strict=False))
        self._last = steps
        self.looks.append((now, self._earlier + sum(steps)))
        kill = self.kills[-1] if self.kills else None
        if kill and kill.noticed is None and len(pool.failures) > self._deaths:
            kill.noticed, kill.before, self._deaths = now, steps, len(pool.failures)
        elif kill and kill.noticed and kill.stepped is None:
            working = [one.state != "done" for one in pool.progress]
            if all(at > was for at, was, works in zip(steps, kill.before, working, strict=True) if works):
                kill.stepped = now
        if self._plan and self.looks[-1][1] >= self._plan[0][0] and (kill is None or kill.stepped):
            self._kill(self._plan.pop(0)[1], pool)

    def _kill(self, kind, pool):
        victim = self._draw.choice(processes_of(pool, self._servers)[kind])
        with contextlib.suppress(ProcessLookupError):  # a trainer that is done
            os.kill(victim, signal.SIGKILL)
            self.kills.append(PoolKill(kind, time.monotonic()))


@contextlib.contextmanager
def trained_pool(
    cluster: Cluster, work: TrainerWork, trainers: int, servers: int = 2, plan: Mapping[int, str] | None = None,
    seed: int = 0, directory: Path | None = None,
) -> Iterator[tuple[TrainState, PoolStats, PoolKiller]]:  # fmt: skip
    """Train a pool over new servers; within the context the rows are there to be evaluated.

    Args:
      trainers, servers: numbers of processes.
      plan, seed: as for `PoolKiller`; no kills if None.
      directory: where an image of the rows is saved every `SAVE_EVERY_S` seconds; None to not save.

    Yields:
      State of trainer 0 over the rows at the servers; the statistics; the killer.
    """
    plan = plan or {}
    started = Supervisor(
        cluster, work.task.spec, work.task.row_optimizer, servers, directory=directory, timeout_s=TIMEOUT_S,
        most_deaths=len(plan) + 8,
    )  # fmt: skip
    with contextlib.closing(started):
        killer = PoolKiller(started, plan, seed)
        every = None if directory is None else SAVE_EVERY_S
        with TrainerPool(
            cluster, started, work, trainers, directory=directory, save_every_seconds=every, timeout_s=TIMEOUT_S
        ) as pool:
            params, stats = pool.run(killer)
            killer(pool)
        if len(stats.failures) > len(killer.kills):
            raise RuntimeError(f"more processes have died than were killed: {stats.failures}")
        dense: Any = DenseState(np.int32(0), params[0], ())
        yield TrainState(dense, started.tables), stats, killer


def pool_figures(stats: PoolStats, killer: PoolKiller, stream: int) -> dict[str, Any]:
    """Return the figures of a run.

    Args:
      stream: number of examples of the stream.
    """
    begun = next(at for at, steps in killer.looks if steps)
    results: dict[str, Any] = {
        "seconds": killer.looks[-1][0] - begun, "kills": len(killer.kills), "examples": stats.examples,
        "examples_lost": stats.examples_lost, "accounting_exact": stats.examples + stats.examples_lost == stream,
        "rows_lost": stats.rows_lost, "waited_for_rows_s": sum(stats.waited_for_rows_s),
        "average_sync_gap": float(np.mean(stats.average_sync_gap)),
    }  # fmt: skip
    for kind in KINDS.values():
        mine = [kill for kill in killer.kills if kill.kind == kind]
        name = kind.replace(" ", "_")
        results[f"{name}_kills"] = len(mine)
        if noticed := [one.noticed - one.killed for one in mine if one.noticed]:
            results[f"{name}_seconds_noticing"] = statistics.median(noticed)
        if back := [one.stepped - one.killed for one in mine if one.stepped]:
            results[f"{name}_seconds_until_all_step"] = statistics.median(back)
    return results
