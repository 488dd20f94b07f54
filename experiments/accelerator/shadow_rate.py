"""Part 4: step rate without synchronisation, with a shadow beside training, and with its meeting blocked.

One trainer, with tables on the device or in host memory, and one peer that trains nothing; model averaging. `shadow`
makes rounds back to back, `shadow_paced` one every 0.2 seconds, `blocked` hangs for 3 seconds in each round,
`foreground` waits for a round every 5 steps. Rates are relative to `none`: below 1 is slower.
"""

import functools
from typing import Any

import numpy as np
from studies.reference import Job
from studies.shadow_work import TimedTrainer, Way, trainer_turn

from accelerator.measure import Task, interval, over
from jaxrec.shadowsync import model_averaging

WAYS = {
    "none": Way("none"),
    "shadow": Way("shadow"),
    "shadow_paced": Way("shadow", pace_seconds=0.2),
    "blocked": Way("shadow", late_seconds=3.0),
    "foreground": Way("foreground"),
}
TURN_S = 0.7  # several rounds of the shadow


def run(task: Task) -> None:
    """Measure both placements of the rows, at two batch sizes each."""
    sizes = (64,) if task.smoke else (16384, 4096)

    def one(point, until):
        job = Job(point["tables"], 20_000 if task.smoke else 1_000_000, point["batch"])
        task.row(point | {"rows": job.rows}, measure_shadow(TimedTrainer(job), until, task))

    task.each([{"tables": home, "batch": size} for size in sizes for home in ("device", "host")], one)


def measure_shadow(trainer: TimedTrainer, until: float, task: Task) -> dict[str, Any]:
    """Measure all ways of one trainer in turns."""
    rule = model_averaging()  # one for all turns: its merge is compiled once
    for way in WAYS.values():
        trainer_turn(trainer, rule, way, 6)  # compiles; the foreground meets at every 5th step
    alone = float(trainer_turn(trainer, rule, WAYS["none"], 10)[0].mean())
    steps = 6 if task.smoke else max(10, min(400, int(TURN_S / alone)))
    ways = {name: functools.partial(trainer_turn, trainer, rule, way, steps) for name, way in WAYS.items()}
    turns = task.turns(ways, until)
    means = {name: [float(times.mean()) for times, _ in found] for name, found in turns.items()}
    figures: dict[str, Any] = {f"{name}_step_ms": interval([1e3 * t for t in means[name]]) for name in means}
    for name in means:
        if name != "none":
            figures[f"{name}_rate_over_none"] = over(means["none"], means[name])
            figures[f"{name}_sync_gap_steps"] = interval([min(gap, steps) for _, gap in turns[name]])
        if trainer.job.tables == "host":
            longest = [float(times.max() / np.median(times)) for times, _ in turns[name]]
            figures[f"{name}_longest_step_over_median"] = interval(longest)
    return figures | {"steps_of_a_turn": steps}
