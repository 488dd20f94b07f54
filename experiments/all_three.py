"""All three techniques against none: OAC, replicas in lock step and CPR together; their rate, or their accuracy.

    python experiments/all_three.py               rates at batch 512 and 2,048, rows of width 16 and 64
    python experiments/all_three.py --quality     AUC over 8 seeds, fixed beforehand; about 40 minutes on two cores
    python experiments/all_three.py --quality --workdir DIR --resume

Claim: together they cost neither rate (`all_over_serial`, `all_over_sync`, above 1 where `all` is faster) nor accuracy
(`auc_all_non_inferior`: the 95 % interval of the paired differences lies above -0.0005 AUC). Tables are in host memory,
on two devices, without a link. The sides of a rate (`SIDES`) alternate, one round of batches each; the arms of the
accuracy (`ARMS`) are runs of train.py. `failures` loses three shards in two failures; `foreground`, `easgd` and `sqrt`,
with the dense learning rate times the root of two, show where a difference comes from.
Result: results/two_cores_cpu/all_three*.json.
"""

from main.signals import stop_on_signals  # before JAX, so that a signal ends its import in one line

# isort: split
import contextlib
import dataclasses
import functools
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from demo import environment
from main.cli import Flags, Run, command_line, grid, listing, paired_interval, refuse, unread
from main.click_data import click_job, synthetic_clicks
from main.config import config_of
from main.model import make_model
from main.recovering import Recovering
from studies.reference import ratio
from studies.turns import in_turns
from sweep import trained_arms

from jaxrec.data.synthetic import scaled_cardinalities
from jaxrec.embedding import rowwise_adagrad
from jaxrec.loop import keep_memory
from jaxrec.sharding import make_mesh

POINTS = [(512, 16), (2048, 16), (512, 64), (2048, 64)]  # batch size, width
SIDES = {
    "serial": config_of(tables="host"),
    "sync": config_of(tables="host", pipeline="sync"),
    "all": config_of(tables="host", pipeline="oac", shadowsync="ma", trainers=2, cpr="mfu"),
}

MARGIN_AUC = -0.0005
Arm = Literal["none", "all", "failures", "foreground", "easgd", "sqrt"]
REPLICAS = "--tables host --pipeline oac --window 8 --trainers 2 --cpr mfu --shadowsync "
ARMS: dict[Arm, str] = {
    "none": "--tables host --pipeline sync",
    "all": REPLICAS + "ma",
    "failures": REPLICAS + "ma --fail 300:3 700:1,5",
    "foreground": REPLICAS + "ma --sync-every-steps 1 --sync-alpha 1",
    "easgd": REPLICAS + "easgd",
    "sqrt": REPLICAS + "ma --learning-rate 0.001414",
}
SMALL = ARMS | {"failures": REPLICAS + "ma --fail 30:3 70:1,5"}  # for the 100 steps of `smoke`
TABLE = {"Test AUC": ["auc"], "Of the runs": ["seeds", "pls", "shards", "replica", "stale", "examples"]}


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the benchmark, and of the comparison of accuracy."""

    quality: bool = False
    """Compare accuracy over seeds, not rates."""
    rounds: int = 0
    """Timed rounds of each side; 0 takes the preset's number."""
    rows: int = 200_000
    steps: int = 1000
    """Steps of the job, from which the recovery derives how often it saves."""
    seeds: int = 8
    arms: tuple[Arm, ...] = tuple(ARMS)
    """Arms to compare with `none`."""
    resume: bool = False
    """Continue the comparison in --workdir."""


class Side:
    """One configuration to train, which keeps its state between rounds."""

    def __init__(self, name: str, config: Config, batches: list, width: int, opened: contextlib.ExitStack):
        parts = SIDES[name]
        self.batches = batches
        mesh = parts.trainers.mesh() if parts.trainers.replicas > 1 else make_mesh(devices=jax.devices()[:2])
        job = click_job(
            scaled_cardinalities(config.rows), make_model("dlrm", width), optax.adam(1e-3), rowwise_adagrad(0.02),
            width, parts.home.shards, config.seed,
        )  # fmt: skip
        job = job.on(mesh)
        state = job.state("host", config.seed)
        self.engine = opened.enter_context(parts.trainers.engine(parts.engine, job.task, state, {}, 1))
        parts.trainers.enter(self.engine)
        if isinstance(parts.saves, Recovering):
            saved = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            every = parts.saves.saves_every(self.engine, None, config.steps, lambda number: iter(()))
            self.engine.enter(
                parts.saves.recovery(saved, config.steps, every, job.spec.shards, config.seed, run="all-three")
            )

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


def rates(config: Config) -> dict:
    """Measure all points; return the contents of results.json."""
    SIDES["all"].trainers.claim_devices(SIDES["all"].home.shards, None)
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


def again_in(run: Run) -> str:
    """The command that resumes the comparison in the directory of a run."""
    return f"python experiments/all_three.py --quality --workdir {run.directory} --resume, and the same flags"


def quality(config: Config) -> dict:
    """Train the missing arms; return the contents of results.json."""
    with (
        Run("all_three_quality", config, config.workdir, config.resume) as run,
        stop_on_signals(f"go on with {again_in(run)}") as asked,
    ):
        flags_of, seeds = SMALL if config.preset == "smoke" else ARMS, range(config.seed, config.seed + config.seeds)
        arms = {arm: flags_of[arm].split() for arm in ARMS if arm == "none" or arm in config.arms}
        results = summary(trained_arms(run, arms, config.preset, seeds, asked, environment()))
        run.close(results, listing(results, TABLE))
        return results


def summary(found: dict[str, list[dict]]) -> dict[str, Any]:
    """Paired AUC differences between arms, and figures of the techniques.

    >>> arms = {"none": [{"test_auc": 0.74}, {"test_auc": 0.75}], "all": [{"test_auc": 0.74}, {"test_auc": 0.76}]}
    >>> round(summary(arms)["auc_all_minus_none"], 3), summary(arms)["auc_all_non_inferior"]
    (0.005, False)
    >>> found = summary(arms | {"foreground": [{"test_auc": 0.73}, {"test_auc": 0.75}]})
    >>> round(found["auc_all_minus_foreground"], 3), found["auc_all_non_inferior_to_foreground"]
    (0.01, True)
    """
    auc = {arm: [run["test_auc"] for run in runs] for arm, runs in found.items()}
    results: dict[str, Any] = {"seeds": len(auc["none"])}
    results |= {f"auc_{arm}": sum(values) / len(values) for arm, values in auc.items()}
    for arm in [arm for arm in found if arm != "none"]:
        results |= minus(auc, arm, "none", f"auc_{arm}_non_inferior")
        for name in ("pls", "shards_failed", "replica_spread", "stale_share"):
            values = [run[name] for run in found[arm] if name in run]
            results |= {f"{name}_{arm}": sum(values) / len(values)} if values else {}
    if "all" in auc and "foreground" in auc:  # as ShadowSync's paper compares: equally many trainers, background or not
        results |= minus(auc, "all", "foreground", "auc_all_non_inferior_to_foreground")
    return results


def minus(auc: dict[str, list[float]], arm: str, other: str, verdict: str) -> dict[str, Any]:
    """Paired difference of two arms with its interval; whether the first is non-inferior, under the key `verdict`."""
    difference, half_width = paired_interval([a - b for a, b in zip(auc[arm], auc[other], strict=True)])
    name = f"auc_{arm}_minus_{other}"
    non_inferior = half_width is not None and difference - half_width > MARGIN_AUC
    return {name: difference, f"{name}_half_width": half_width, verdict: non_inferior}


def main(config: Config) -> dict:
    """Return the contents of results.json."""
    refuse(unread(config, {
        "--quality": (config.quality, ("seeds", "arms", "resume")),
        "rates, without --quality": (not config.quality, ("rounds", "rows", "steps")),
    }))  # fmt: skip
    return quality(config) if config.quality else rates(config)


if __name__ == "__main__":
    command_line(main, Config, __doc__)
