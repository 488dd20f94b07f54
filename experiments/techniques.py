"""The three techniques of a run: the engine that their flags make, what they do at each step, and their figures."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from clicks import ClickJob
from contract import say
from environment import cores
from rounds import ForegroundRounds, remembering
from technique_flags import TechniqueFlags, given_failures

from jaxrec.cpr import Recovery, draw_failures, measure, mfu, plan_recovery, scar, ssu
from jaxrec.cpr.schedule import SETTING_A, Mode, full_interval, partial_interval
from jaxrec.loop import Serial
from jaxrec.oac import Pipeline
from jaxrec.shadowsync import FreeStep, FreeTrainers, Rule, SyncGroup, bmuf, easgd, model_averaging, replica_spread
from jaxrec.sharding import make_mesh
from jaxrec.types import TrainState
from jaxrec.xla import enough_threads

RULES: dict[str, Callable[..., Rule]] = {"easgd": easgd, "ma": model_averaging, "bmuf": bmuf}
SCHEMES: dict[str, Callable[[], Any]] = {"mfu": mfu, "ssu": ssu, "scar": scar}
MEASURED_STEPS = 12  # before a run whose costs are measured
WINDOW = 8  # unless given
SYNC_SHARE = 1 / 80  # of this machine's cores, for all threads that synchronise, unless a pace is given


def claim_devices(config: TechniqueFlags) -> None:
    """Asks for as many devices as there are replicas; before JAX starts.

    Raises:
      ValueError: there are fewer, and none can be made; shards or batches cannot be split over them.
    """
    if config.replicas > 1:
        enough_threads(config.replicas)
        try:
            jax.config.update("jax_num_cpu_devices", config.replicas)
        except (RuntimeError, ValueError):
            pass  # JAX has started, or was told how many by a flag of XLA
    if len(jax.devices()) < config.replicas:
        raise ValueError(
            f"--trainers {config.replicas} want a device each, and there are {len(jax.devices())}: give fewer trainers."
        )
    if not config.free:
        _check_split(config, mesh_of(config).size)


def _check_split(config, devices):
    # Batches of a size that is not given are of 128 or a multiple.
    for name, number in (("shards", config.shards), ("batch_size", getattr(config, "batch_size", None) or 128)):
        if number % devices:
            raise ValueError(
                f"--{name.replace('_', '-')} {number} cannot be split over {devices} devices: give a multiple of "
                f"{devices}" + (", or other --trainers." if config.in_lock_step else ".")
            )


def mesh_of(config: TechniqueFlags) -> jax.sharding.Mesh:
    """A device for each trainer; without any, all devices share the batches."""
    if config.shadowsync == "none":
        return make_mesh(devices=jax.devices())
    return make_mesh(replicas=config.replicas, devices=jax.devices()[: config.replicas])


def job_of(config: TechniqueFlags, job: ClickJob) -> ClickJob:
    """The job as the techniques want it: what rounds in the foreground remember lies beside the optimizer's state."""
    if config.in_lock_step and config.sync_every_steps is not None:
        return job._replace(optimizer=remembering(job.optimizer, _rule(config)))
    return job


def make_engine(config, job: ClickJob, state: TrainState, mesh, extra: Mapping[str, Any], stretch_steps: int):
    """The engine that the flags ask for.

    Args:
      config: TechniqueFlags.
      job: the model and how it learns.
      state: to begin with.
      mesh: from `mesh_of`.
      extra: what was saved along with that state.
      stretch_steps: how often free trainers meet.
    """
    capacity = extra.get("capacity")
    if config.free:
        step = FreeStep(job.spec, job.loss, job.optimizer, job.row_optimizer)
        past, sync = extra.get("techniques", {}).get("trainers"), _options(config)
        return FreeTrainers(
            state, step, _rule(config), stretch_steps=stretch_steps, workers=config.workers, past=past, **sync
        )
    if config.pipeline == "none":
        return Serial(state, job.train_step(mesh), capacity)
    return Pipeline(
        state, job.update(mesh), mode=config.pipeline, mesh=mesh, capacity=capacity, validation=config.stale_rows,
        window=config.window or (WINDOW if config.pipeline in ("oac", "async") else None),
        skip_stale_reads=config.savings, skip_rewritten=config.savings,
    )  # fmt: skip


def as_saved(config, job: ClickJob, state: TrainState, mesh) -> TrainState:
    """An initial state with all that an image of the run holds: free trainers have more to remember."""
    return make_engine(config, job, state, mesh, {}, 1).state if config.free else state


def _rule(config):
    given = {"form": config.sync_form, "alpha": config.sync_alpha}
    return RULES[config.shadowsync](**{name: value for name, value in given.items() if value is not None})


def _options(config):
    if config.sync_every_steps is not None:
        return {"every_steps": config.sync_every_steps}
    if config.sync_pace_seconds is not None:
        return {"pace_seconds": config.sync_pace_seconds}
    # Where all cores train, a round takes from training what it needs, and more: caches, and the time of those who wait
    # for the one that stands still.
    threads = config.replicas if config.free else 1
    return {"core_share": min(1.0, SYNC_SHARE * cores() / threads)}


class Techniques:
    """What is on in a run, beside its engine: hooks and figures.

    Args:
      config: TechniqueFlags.
      engine: from `make_engine`, whose `with` block was begun.
    """

    def __init__(self, config: TechniqueFlags, engine):
        self._engine, self._sync = engine, None
        if config.in_lock_step:
            self._sync = _rounds(config, engine)
        self.hooks = [self._sync.hook] if self._sync else []

    def figures(self, state: TrainState, metrics: Mapping[str, Any]) -> dict[str, float]:
        """A figure of each technique that is on, of this process so far; of free trainers that of a stretch."""
        found: dict[str, float] = {}
        if isinstance(self._engine, Pipeline) and self._engine.mode == "oac":
            counters = self._engine.counters
            found["stale_share"] = counters["stale_rows"] / max(counters["rows"], 1)
        if self._sync:
            found["sync_gap_steps"] = self._sync.steps / self._sync.rounds if self._sync.rounds else float("inf")
            found["replica_spread"] = replica_spread(jax.device_get(state.dense.params))
        if isinstance(self._engine, FreeTrainers):
            # Before its first stretch a run that goes on has no metrics but those that were saved with its state.
            known = metrics or {name: x for name, x in self._engine.figures().items() if x is not None}
            names = {"sync_gap_steps": "average_sync_gap", "replica_spread": "replica_spread"}
            found |= {mine: known[name] for mine, name in names.items() if name in known}
        return found

    def extra(self) -> dict[str, Any]:
        """What is saved along with a state."""
        return {"trainers": self._engine.figures()} if isinstance(self._engine, FreeTrainers) else {}


def _rounds(config, engine):
    """What synchronises replicas in lock step: in the foreground, or a thread beside training."""
    if config.sync_every_steps is not None:
        return ForegroundRounds(_rule(config), config.sync_every_steps)
    one = jax.tree.map(lambda leaf: np.array(leaf[0]), engine.state.dense.params)
    return engine.enter(SyncGroup(_rule(config), one, 1, **_options(config)).trainer(0))


def recovery_of(
    config, engine, directory: Path, steps: int, every: float, image, run: str, extra: Callable,
    copy: Literal["whole", "shards"] = "whole",
) -> Recovery:  # fmt: skip
    """The recovery that the flags ask for, to be entered.

    Args:
      config: TechniqueFlags, and `seed`.
      engine: that it watches.
      directory: of its images.
      steps: of the run.
      every: how often it saves, in steps.
      image: that the run goes on from, or None.
      run: its id.
      extra: step -> JSON values to save along.
      copy: how images are made.
    """
    return Recovery(
        engine, directory, every, steps, mode=_mode(config), image=image, run=run, extra=extra, copy=copy,
        scheme=SCHEMES[config.cpr]() if config.cpr in SCHEMES else None,
        failures=failures_of(config, steps, config.mtbf_steps or steps / 2),
    )  # fmt: skip


def _mode(config) -> Mode:
    return "full" if config.cpr == "full" else "partial"


def saves_every(config, engine, run, steps: int, first_steps: Callable[[int], Iterator]) -> float:
    """How often a recovery saves, in steps.

    Measured costs are written to recovery.json, so that a run that goes on keeps its interval.

    Args:
      config: TechniqueFlags, and `save_every_steps` if a job has that flag.
      engine: at its first step, or at that of an image.
      run: whose directory is on the disk to save to, where costs are measured.
      steps: of the run.
      first_steps: number -> an iterator that trains so many, where costs are measured.
    """
    if (given := getattr(config, "save_every_steps", None)) is not None:
        return given
    mtbf, hours = config.mtbf_steps or steps / 2, SETTING_A.total_hours / steps
    if config.recovery_costs == "assumed":
        costs = SETTING_A._replace(mtbf_hours=mtbf * hours, nodes=engine.tables.spec.shards)
        return _planned(config, costs, hours)
    if not (known := run.read_json("recovery.json")):
        hours = _step_seconds(first_steps) / 3600
        state, costs = measure(
            engine.state, run.directory, mtbf_hours=mtbf * hours, total_hours=steps * hours, reschedule_hours=0.0
        )
        engine.reset(state)
        known = {"save_every_steps": _planned(config, costs, hours), "step_hours": hours, **costs._asdict()}
        run.write_json("recovery.json", known)
        say(
            f"measured: a step {3.6e6 * hours:.3g} ms, a save {3600 * costs.save_hours:.3g} s, a restore "
            f"{3600 * costs.load_hours:.3g} s, of one shard {3600 * (costs.partial_load_hours or 0):.3g} s"
        )
    return known["save_every_steps"]


def _planned(config, costs, step_hours):
    """The interval of the plan; of the mode that was asked for, though the other one may be cheaper."""
    plan, mode = plan_recovery(costs, config.target_pls), _mode(config)
    hours = full_interval(costs) if mode == "full" else partial_interval(costs, config.target_pls)
    every = max(1.0, min(hours, costs.total_hours) / step_hours)
    also = "" if plan.mode == mode else f"; {plan.mode} recovery would be cheaper by these costs"
    say(f"--cpr {config.cpr} saves everything once in {every:.1f} steps, by {config.recovery_costs} costs{also}")
    return every


def _step_seconds(first_steps) -> float:
    """The median time of a step, of the second half of the first ones."""
    times = []
    for _, metrics in first_steps(MEASURED_STEPS):
        jax.block_until_ready(metrics)
        times.append(time.perf_counter())
    if len(times) < MEASURED_STEPS:
        raise ValueError(f"{len(times)} steps are too few to measure costs by: {MEASURED_STEPS} are wanted.")
    return float(np.median(np.diff(times[MEASURED_STEPS // 2 :])))


def failures_of(config, steps: int, mtbf_steps: float) -> dict[int, list[int]]:
    """{step: shards} of the failures that the flags ask for.

    Raises:
      ValueError: as `given_failures`; a step that the run does not have.
    """
    if config.fail == ("gamma",):
        drawn = draw_failures(mtbf_steps, steps, config.shards, config.seed, config.fail_shape)
        at: dict[int, set[int]] = {}
        for hours, shard in zip(drawn.hours, drawn.node, strict=True):
            at.setdefault(min(steps, 1 + int(hours)), set()).add(int(shard))
        return {step: sorted(shards) for step, shards in at.items()}
    for step in (found := given_failures(config)):
        if not 1 <= step <= steps:
            raise ValueError(f"--fail {step}: the run has steps 1 to {steps}.")
    return found
