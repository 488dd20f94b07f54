"""Part 6: free-running trainers on 1 to all processor cores over shared host tables; no accelerator is used.

Each number of trainers is a separate process, limited to as many cores. The baseline is one trainer on one core without
synchronisation; `efficiency` is the rate over n times that of the baseline.
"""

import functools
import os
from typing import Any

import numpy as np
from studies.reference import Job
from studies.shadow_work import Trainers
from studies.sides import Side

from accelerator.measure import Task, interval, over

PACE_S = 0.3


def run(task: Task) -> None:
    """Measure all numbers of trainers in turns."""
    cores = len(os.sched_getaffinity(0))
    numbers = sorted({1, cores} | {2**i for i in range(10) if 2**i < cores})
    job = Job("host", 20_000 if task.smoke else 1_000_000, 64 if task.smoke else 2048)
    turns = [(way, n) for way in ("none", "s_ma_paced") for n in numbers if n > 1 or way == "none"]
    turns += [("s_easgd_paced", cores)] * (not task.smoke)
    sides = {n: Side(functools.partial(Trainers, job, n, PACE_S), start=False) for n in numbers}
    try:
        for side in sides.values():
            side.ready()
        steps = 3 if task.smoke else 15
        ways = {turn: functools.partial(sides[turn[1]].ask, "run", (turn[0], steps)) for turn in turns}
        for warm_up in ways.values() if not task.smoke else ():
            warm_up()  # compiles, and fills caches
        found = task.turns(ways, task.end)
    finally:
        for side in sides.values():
            side.close()
    rate = {turn: np.array([job.batch_size * each["steps_per_s"] for each in found[turn]]) for turn in turns}
    for way, n in turns:
        figures: dict[str, Any] = {"examples_per_s": interval(rate[way, n])}
        figures["efficiency"] = over(rate[way, n], n * rate[turns[0]])
        figures["busy_cores"] = interval([each["busy_cores"] for each in found[way, n]])
        if way != "none":
            figures["sync_gap_steps"] = interval([each["average_sync_gap"] for each in found[way, n]])
        task.row({"way": way, "trainers": n, "cores": cores, "batch": job.batch_size}, figures)
