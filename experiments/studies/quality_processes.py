"""Trainers in processes over rows at servers, trained on one pass over a stream that they share, and evaluated.

For `shadowsync_quality.py --where processes`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jaxrec.cluster import Cluster, Supervisor
from jaxrec.cluster.pool import PoolStats, TrainerPool
from jaxrec.cluster.trainers import TrainerWork
from jaxrec.types import Batch, DenseState, TrainState

SERVERS, SHARDS, TIMEOUT_S = 2, 4, 120.0


@dataclasses.dataclass(frozen=True)
class Shared:
    """Batch factory of a pool whose n trainers share a stream: trainer i has its batches i, i + n, i + 2 n, ...

    Attributes:
      make: opens the stream in a trainer's process; (first, every) -> batches first, first + every, ... of it.
      batches: length of the stream; those that are left over after equal shares are dropped.
    """

    make: Callable[[], Callable[[int, int], Iterable[Batch]]]
    batches: int

    def __call__(self, trainer: int, trainers: int) -> Callable[[int], Iterator[Batch]]:
        stream, steps = self.make(), self.batches // trainers

        def of(start):
            mine = iter(stream(trainer + start * trainers, trainers))
            return (batch for batch, _ in zip(mine, range(steps - start), strict=False))

        return of


def trained_in_processes(
    cluster: Cluster, work: TrainerWork, trainers: int, test: Callable[[TrainState], dict[str, float]]
) -> tuple[dict[str, float], PoolStats]:
    """Train a pool over new servers, and evaluate its trainer 0 there.

    Args:
      cluster: the entered cluster.
      work: work of the trainers.
      trainers: n.
      test: evaluates a state.

    Returns:
      Result of `test`, and the statistics of the pool.

    Raises:
      RuntimeError: a process has died, so that the result would be of another run.
    """
    started = Supervisor(cluster, work.spec, work.row_optimizer, SERVERS, timeout_s=TIMEOUT_S)
    with contextlib.closing(started) as servers:
        with TrainerPool(cluster, servers, work, trainers, timeout_s=TIMEOUT_S) as pool:
            params, stats = pool.run()
        if stats.failures:
            raise RuntimeError(f"processes have died: {stats.failures}")
        dense: Any = DenseState(np.int32(0), params[0], ())
        return test(TrainState(dense, servers.tables)), stats
