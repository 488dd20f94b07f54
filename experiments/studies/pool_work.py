"""Reference work of trainers in processes, each pinned to a core, for `shadowsync_scaling.py --where processes`.

Rows live at two servers, and trainers synchronise at one sync server; all are processes that Ray starts on this
machine. Only trainers are pinned to cores, so on few cores servers and Ray share them. A rate relative to that of one
trainer therefore describes a machine with this number of cores, not how the protocol scales.
"""

import dataclasses
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxrec.cluster import Cluster, Supervisor
from jaxrec.cluster.pool import TrainerPool
from jaxrec.cluster.trainers import TrainerWork
from jaxrec.shadowsync import Rule, easgd, model_averaging
from studies.reference import Job, ratio, reference_work, synthetic
from studies.server_kills import of_its_own
from studies.turns import in_turns

SERVERS, WARM_STEPS, TIMEOUT_S = 2, 20, 60.0
WAYS: dict[str, Callable[[], Rule]] = {"s_easgd": easgd, "s_ma": model_averaging}


@dataclasses.dataclass(frozen=True)
class Cycled:
    """Batches of the reference work in an endless cycle, cut to `steps`; each trainer begins with another one."""

    job: Job
    steps: int

    def __call__(self, trainer: int, trainers: int) -> Callable[[int], Iterator]:
        _, batches = synthetic(self.job)
        mine = batches[trainer % len(batches) :] + batches[: trainer % len(batches)]
        return lambda start: itertools.islice(itertools.cycle(mine), start, self.steps)


def rate(looks: list[tuple[float, list[int]]], warm: int) -> float:
    """Return the steps per second of all trainers together, over the interval in which all of them train.

    Args:
      looks: samples (seconds, steps of each trainer), in order.
      warm: steps that the slowest trainer must have made when the interval begins; it ends when the first one is done.

    >>> rate([(0.0, [9, 0]), (1.0, [20, 21]), (3.0, [40, 31]), (4.0, [40, 36])], warm=20)
    15.0
    """
    last = max(max(steps) for _, steps in looks)
    counted = [look for look in looks if min(look[1]) >= warm]
    before_end = [look for look in counted if max(look[1]) < last]
    end = counted[len(before_end)] if len(before_end) < len(counted) else counted[-1]
    start = counted[0]
    if end[0] <= start[0]:
        raise ValueError(f"{last} steps end before a second sample: train more steps.")
    return (sum(end[1]) - sum(start[1])) / (end[0] - start[0])


def turn(cluster: Cluster, servers: Supervisor, job: Job, arm: str, trainers: int, steps: int, pace: float) -> dict:
    """Run one pool; return {steps_per_s, average_sync_gap}."""
    task, params = reference_work(job)
    cores, name = sorted(os.sched_getaffinity(0)), arm.removesuffix("_paced")
    rule = None if arm == "none" else WAYS[name]()
    work = TrainerWork(
        task, params, Cycled(job, WARM_STEPS + steps), rule,
        pace_seconds=pace if arm.endswith("_paced") else 0.0,
    )  # fmt: skip
    looks: list[tuple[float, list[int]]] = []
    mine = [[cores[number % len(cores)]] for number in range(trainers)]
    with TrainerPool(cluster, servers, work, trainers, cores=mine, timeout_s=TIMEOUT_S) as pool:
        hook = lambda pool: looks.append((time.perf_counter(), [one.steps for one in pool.progress]))
        _, stats = pool.run(hook)
        hook(pool)
    return {"steps_per_s": rate(looks, WARM_STEPS), "average_sync_gap": float(np.mean(stats.average_sync_gap))}


def measured_processes(job: Job, arms: tuple[str, ...], rounds: int, steps: int, pace: float) -> dict[str, Any]:
    """Measure all arms in turn, with one trainer and with one per core.

    Args:
      arms: arms besides none: s_easgd, s_ma, or one of them with the suffix _paced.
      steps: steps of each trainer after warm-up.
      pace: `pace_seconds` of the _paced arms.

    Returns:
      Figures for results.json: medians over the rounds, and ratios with their spread.
    """
    cores = len(os.sched_getaffinity(0))
    turns = [(arm, n) for arm in ("none", *arms) for n in sorted({1, cores})]
    task, _ = reference_work(job)
    with of_its_own(), tempfile.TemporaryDirectory() as directory, Cluster() as cluster:
        servers = Supervisor(cluster, task.spec, task.row_optimizer, SERVERS, directory=directory, timeout_s=TIMEOUT_S)
        ways = {each: functools.partial(turn, cluster, servers, job, *each, steps, pace) for each in turns}
        found = in_turns(ways, rounds, "processes")
        servers.close()
    of = lambda turn, figure: np.array([each[figure] for each in found[turn]])
    results: dict[str, Any] = {"measured_processes_cores": cores, "measured_processes_servers": SERVERS}
    results["measured_processes_rounds"] = rounds
    for arm, n in turns:
        end, rates = f"{arm}_trainers_{n}", job.batch_size * of((arm, n), "steps_per_s")
        results[f"measured_processes_examples_per_s_{end}"] = float(np.median(rates))
        if n > 1:
            base = job.batch_size * of((arm, 1), "steps_per_s")
            results |= ratio(f"measured_processes_efficiency_{end}", rates / (n * base))
        if arm != "none":
            alone = job.batch_size * of(("none", n), "steps_per_s")
            results |= ratio(f"measured_processes_over_no_sync_{end}", rates / alone)
            results[f"measured_processes_average_sync_gap_{end}"] = float(np.median(of((arm, n), "average_sync_gap")))
    return results
