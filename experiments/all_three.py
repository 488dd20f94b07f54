"""What all three techniques cost together: OAC, replicas in lock step and CPR, against none of them.

    python experiments/all_three.py                 batch 512 and 2,048, rows of width 16 and 64
    python experiments/all_three.py --preset smoke

DLRM over synthetic clicks, tables in host memory, on a mesh of two devices (two virtual ones on a machine with one
CPU), without a link. `all` is `train.py --tables host --pipeline oac --window 8 --shadowsync ma --trainers 2 --cpr
mfu`: two replicas synchronised by a thread, and saves at the interval that a target PLS of 0.1 requires. `serial` and
`sync` use none of the techniques: the devices share each batch, batches run one after another, without (`serial`) or
with (`sync`) a pipeline that plans and sends ahead. The sides alternate, one round of batches each, so that a slow
minute hits all of them; each engine continues from its last state. Ratios are of rates: above 1 `all` is faster.
Figures are medians over the rounds with 95 % bootstrap intervals.
"""

import contextlib
import dataclasses
import functools
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from main.cli import Flags, Run, command_line, grid
from main.click_data import click_job, make_model, synthetic_clicks
from main.techniques import TechniqueFlags, Techniques, claim_devices, make_engine, mesh_of, recovery_of, saves_every
from studies.reference import ratio
from studies.turns import in_turns

from jaxrec.data.synthetic import scaled_cardinalities
from jaxrec.embedding import rowwise_adagrad
from jaxrec.loop import keep_memory
from jaxrec.sharding import make_mesh

POINTS = [(512, 16), (2048, 16), (512, 64), (2048, 64)]  # batch size, width
SIDES = {
    "serial": TechniqueFlags(tables="host"),
    "sync": TechniqueFlags(tables="host", pipeline="sync"),
    "all": TechniqueFlags(tables="host", pipeline="oac", shadowsync="ma", trainers=2, cpr="mfu"),
}


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the benchmark."""

    rounds: int = 0
    """Timed rounds of each side; 0 takes the preset's number."""
    rows: int = 200_000
    steps: int = 1000
    """Steps of the job, from which the recovery derives how often it saves."""


class Side:
    """One configuration to train, which keeps its state between rounds."""

    def __init__(self, name: str, config: Config, batches: list, width: int, opened: contextlib.ExitStack):
        flags = SIDES[name]
        self.batches = batches
        mesh = mesh_of(flags) if flags.replicas > 1 else make_mesh(devices=jax.devices()[:2])
        job = click_job(
            scaled_cardinalities(config.rows), make_model("dlrm", width), optax.adam(1e-3), rowwise_adagrad(0.02),
            width, flags.shards, config.seed,
        )  # fmt: skip
        job = job.on(mesh)
        state = job.state("host", config.seed)
        self.engine = opened.enter_context(make_engine(flags, job.task, state, {}, 1))
        Techniques(flags, self.engine)
        if flags.cpr != "none":
            saved = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            every = saves_every(flags, self.engine, None, config.steps, lambda number: iter(()))
            self.engine.enter(recovery_of(flags, saved, config.steps, every, None, "all-three", lambda step: {}))

    def turn(self, skip: int, counted: int) -> float:
        """Steady-state seconds per batch of one run: `counted` batches after the first `skip`."""
        start = end = 0.0
        for index, (_, metrics) in enumerate(self.engine.run(itertools.cycle(self.batches)), 1):
            if index in (skip, skip + counted):
                jax.block_until_ready(metrics)
                start, end = end, time.perf_counter()
            if index == skip + counted:
                break
        self.engine.close()
        return (end - start) / counted


def measure(config: Config, batch_size: int, width: int, rounds: int, counted: int) -> dict[str, Any]:
    """Measure all sides in interleaved rounds at one batch size and width; return flat results."""
    skip = 10  # more than a window, so that the pipeline is full
    data = synthetic_clicks(scaled_cardinalities(config.rows), batch_size, skip + counted, config.seed, 1)
    batches = list(data.train(0))
    with contextlib.ExitStack() as opened:
        sides = {name: Side(name, config, batches, width, opened) for name in SIDES}
        for side in sides.values():
            side.turn(skip, counted)  # compiles
        turns = {name: functools.partial(side.turn, skip, counted) for name, side in sides.items()}
        seconds = in_turns(turns, rounds, f"batch {batch_size}, width {width}")
    times = {name: np.array(each) for name, each in seconds.items()}
    results: dict[str, Any] = {}
    for name, each in times.items():
        results |= ratio(f"examples_per_s_{name}", batch_size / each)
    for name in ("serial", "sync"):
        results |= ratio(f"all_over_{name}", times[name] / times["all"])
    return results


def main(config: Config) -> dict:
    """Measure all points and return the contents of results.json."""
    claim_devices(SIDES["all"])
    keep_memory()
    rounds, counted = {"smoke": (2, 4), "default": (24, 12), "paper": (96, 24)}[config.preset]
    points = POINTS[:1] if config.preset == "smoke" else POINTS
    results: dict[str, Any] = {}
    with Run("all_three", config, config.workdir) as run:
        for batch_size, width in points:
            found = measure(config, batch_size, width, config.rounds or rounds, counted)
            run.log({"batch_size": batch_size, "width": width} | found)
            results |= {f"{key}_at_batch_{batch_size}_width_{width}": value for key, value in found.items()}
        labels = {f"{batch:,}, {width}": f"{batch}_width_{width}" for batch, width in points}
        columns = {f"{name}, examples/s": f"examples_per_s_{name}_at_batch_{{}}" for name in SIDES}
        columns |= {f"all over {name}": f"all_over_{name}_at_batch_{{}}" for name in ("serial", "sync")}
        run.close(results | {"rounds": config.rounds or rounds}, grid(results, "batch, width", labels, columns))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
