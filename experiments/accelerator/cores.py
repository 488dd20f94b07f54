"""Part `cores`: free-running trainers as processes on 1 to all cores, over tables in memory that they share.

Each trainer is pinned to a core. `efficiency` is the rate over n times that of one trainer alone without
synchronisation; `of_none` is the rate over that without synchronisation at the same n. A rate is the median over
seconds of one run, from when all trainers have compiled until the first one ends.
"""

import contextlib
import functools
import itertools
import os
import tempfile
import time
from typing import Any

import numpy as np
from studies.reference import BATCHES, Job, reference_work, synthetic
from studies.shadow_work import RULES

from accelerator.measure import Task, interval
from jaxrec.cluster import Machine
from jaxrec.cluster.pool import TrainerPool
from jaxrec.cluster.trainers import TrainerWork
from jaxrec.embedding import HostTables

WAYS = ("none", "s_easgd", "s_ma", "s_bmuf", "easgd_every_5", "ma_every_5")
PACE_S = 0.6  # of background rounds: some four steps of one core
WARM_STEPS = 4


def work_of(job: Job, way: str, steps: int) -> TrainerWork:
    """Build the work of the trainers, in their processes too."""
    task, params = reference_work(job)

    def batches(trainer, trainers):
        _, mine = synthetic(job, BATCHES // 2)  # drawn once, then repeated: the log is not what is measured
        mine = mine[trainer % len(mine) :] + mine[: trainer % len(mine)]
        return lambda start: itertools.islice(itertools.cycle(mine), start, steps)

    rule = next((RULES[name]() for name in RULES if name in way), None)
    every = 5 if way.endswith("every_5") else None
    return TrainerWork(task, params, batches, rule, every_steps=every, pace_seconds=PACE_S)


def measure(job: Job, way: str, trainers: int, seconds: float) -> tuple[np.ndarray, float]:
    """Return steps per second of all trainers, of each second of a run, and the average sync gap in steps."""
    seen: list[tuple[float, list[int]]] = []

    class Measured(Exception):
        """Raised once enough is seen."""

    def look(pool: TrainerPool) -> None:
        positions = [one.steps for one in pool.progress]
        if min(positions) >= WARM_STEPS and (not seen or time.monotonic() - seen[-1][0] >= 1):
            seen.append((time.monotonic(), positions))
            if seen[-1][0] - seen[0][0] >= seconds:
                rounds.extend(one.rounds for one in pool.progress)
                raise Measured

    rounds: list[int] = []
    with Machine() as machine:
        task, _ = reference_work(job)
        tables = HostTables.create(task.spec, task.row_optimizer, machine.directory / "tables")
        cores = [[core] for core in sorted(os.sched_getaffinity(0))[:trainers]]
        work = functools.partial(work_of, job, way, 10**9)
        with TrainerPool(machine, tables, work, trainers, cores=cores, timeout_s=120.0) as pool:
            with contextlib.suppress(Measured):
                pool.run(look)
    at, steps = np.array([each[0] for each in seen]), np.array([sum(each[1]) for each in seen])
    gap = sum(seen[-1][1]) / sum(rounds) if sum(rounds) else float("inf")
    return np.diff(steps) / np.diff(at), gap


def run(task: Task) -> None:
    """Measure all cores and half of them with all ways first, then fewer trainers without synchronisation."""
    cores = len(os.sched_getaffinity(0))
    job = Job("host", 20_000 if task.smoke else 1_000_000, 64 if task.smoke else 2048)
    fewer = [2**i for i in range(1, 10) if 2**i < cores]
    points = [("none", 1), *((way, cores) for way in (("none", "s_ma") if task.smoke else WAYS))]
    if not task.smoke:
        points += [("none", n) for n in reversed(fewer)] + [(way, n) for n in reversed(fewer) for way in WAYS[1:4]]
    rates: dict[tuple[str, int], float] = {}

    def point(named: dict[str, Any], until: float) -> None:
        way, n = named["way"], named["trainers"]
        found, gap = measure(job, way, n, 2 if task.smoke else 10)
        rates[way, n] = float(np.median(found))
        figures: dict[str, Any] = {"examples_per_s": interval(job.batch_size * found)}
        figures["efficiency"] = rates[way, n] / (n * rates["none", 1])
        if way != "none":
            figures |= {"of_none": rates[way, n] / rates["none", n], "sync_gap_steps": gap}
        task.row(named | {"cores": cores, "batch": job.batch_size}, figures)

    # Compiled once, and read by every other process.
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        task.each([{"way": way, "trainers": n} for way, n in points], point)
