"""The three techniques of a run: devices, engine, callbacks and their figures, recovery and failures.

Also the placement of the rows, and rounds in the foreground.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax

from jaxrec.callbacks import Callback, StepInfo
from jaxrec.checkpoint import restore_shards
from jaxrec.cluster import Cluster, Supervisor
from jaxrec.cpr import Recovery, draw_failures, measure_costs, mfu, plan_recovery, scar, ssu
from jaxrec.cpr.schedule import SETTING_A, Mode, full_interval, partial_interval
from jaxrec.embedding import EmbeddingSpec, HostTables, Tables, create_tables
from jaxrec.engine import Serial
from jaxrec.files import Lock, local_path, make_directory, write_text
from jaxrec.oac import Overlap, Pipeline
from jaxrec.shadowsync import FreeTrainers, Rule, SyncGroup, replica_spread
from jaxrec.shadowsync.params import floating
from jaxrec.shadowsync.stats import average_sync_gap
from jaxrec.sharding import as_mesh, make_mesh
from jaxrec.task import Task
from jaxrec.types import PyTree, RowOptimizer, ShardsLost, TrainState
from jaxrec.xla import enough_threads
from main.cli import say
from main.click_data import ClickJob
from main.flags import TechniqueFlags, given_failures, rule_of
from main.run_dir import Run, cores, go_on_with

SCHEMES: dict[str, Callable[[], Any]] = {"mfu": mfu, "ssu": ssu, "scar": scar}
WINDOW, OVERLAP_WINDOW = 8, 2  # defaults
SYNC_SHARE = 1 / 80  # default share of this machine's cores for all synchronising threads
MEASURED_STEPS = 12  # to measure costs by, before the run
SERVER_TIMEOUT_S = 120.0  # also for the save and the restore of a server's rows


def claim_devices(config: TechniqueFlags) -> None:
    """Request one device per replica; call it before JAX starts."""
    if config.in_processes:  # each has its own JAX
        return
    if config.replicas > 1:
        enough_threads(config.replicas)
        try:
            jax.config.update("jax_num_cpu_devices", config.replicas)
        except (RuntimeError, ValueError):
            pass  # JAX has started, or an XLA flag sets the number
    if len(jax.devices()) < config.replicas:
        raise ValueError(
            f"--trainers {config.replicas} want a device each, and there are {len(jax.devices())}: give fewer trainers."
        )
    if not config.free:
        _check_split(config, mesh_of(config).size)


def mesh_of(config: TechniqueFlags) -> jax.sharding.Mesh:
    """Return a mesh with one device per trainer; without trainers, all devices share the batches."""
    if config.shadowsync == "none":
        return make_mesh(devices=jax.devices())
    return make_mesh(replicas=config.replicas, devices=jax.devices()[: config.replicas])


def job_of(config: TechniqueFlags, job: ClickJob) -> ClickJob:
    """Return the job for the techniques: foreground rounds keep their memory beside the optimizer state."""
    if config.in_lock_step and config.sync_every_steps is not None:
        return job._replace(
            task=dataclasses.replace(job.task, optimizer=remembering(job.task.optimizer, rule_of(config)))
        )
    return job


def make_engine(config, task: Task, state: TrainState, extra: Mapping[str, Any], stretch_steps: int):
    """Build the engine that the flags ask for.

    Args:
      extra: values saved with that state.
      stretch_steps: steps between two meetings of free-running trainers.
    """
    capacity = extra.get("capacity")
    if config.free:
        past, sync = extra.get("techniques", {}).get("trainers"), sync_options(config)
        return FreeTrainers(
            task, state, rule_of(config), stretch_steps=stretch_steps, workers=config.workers, past=past, **sync
        )
    if config.overlaps:
        return Serial(Overlap(task, config.window or OVERLAP_WINDOW), state, capacity=capacity)
    if config.pipeline == "none":
        return Serial(task, state, capacity=capacity)
    return Pipeline(
        task, state, mode=config.pipeline, capacity=capacity, validation=config.stale_rows,
        window=config.window or (WINDOW if config.pipeline in ("oac", "async") else None),
        skip_stale_reads=config.savings,
    )  # fmt: skip


def as_saved(config, task: Task, state: TrainState) -> TrainState:
    """Return an initial state with the structure of the run's images: free-running trainers save more."""
    return make_engine(config, task, state, {}, 1).state if config.free else state


class Techniques:
    """Active techniques of a run, which its engine enters, and their figures."""

    def __init__(self, config: TechniqueFlags, engine):
        self._engine, self._sync = engine, None
        if config.in_lock_step:
            self._sync = engine.enter(_rounds(config, engine))

    def figures(self, state: TrainState, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the active techniques' figures, of this process so far; with free-running trainers, of a stretch."""
        found: dict[str, float] = {}
        if isinstance(self._engine, Pipeline) and self._engine.mode == "oac":
            counters = self._engine.counters
            found["stale_share"] = counters["stale_rows"] / max(counters["rows"], 1)
        if self._sync:
            found["sync_gap_steps"] = average_sync_gap([self._sync.steps], [self._sync.rounds])
            found["replica_spread"] = replica_spread(jax.device_get(state.dense.params))
        if isinstance(self._engine, FreeTrainers):
            # Before its first stretch, a resumed run has only the figures saved with its state.
            known = metrics or {name: x for name, x in self._engine.figures().items() if x is not None}
            names = {"sync_gap_steps": "average_sync_gap", "replica_spread": "replica_spread"}
            found |= {mine: known[name] for mine, name in names.items() if name in known}
        return found

    def extra(self) -> dict[str, Any]:
        """Return the values to save with a state."""
        return {"trainers": self._engine.figures()} if isinstance(self._engine, FreeTrainers) else {}


def recovery_of(
    config, directory: Path, steps: int, every: float, image, run: str, extra: Callable,
    copy: Literal["whole", "shards"] = "whole",
) -> Recovery:  # fmt: skip
    """Build the recovery that the flags ask for; the caller enters it.

    Args:
      config: TechniqueFlags, and `seed`.
      every: interval between saves, in steps.
      image: image from which the run resumes, or None.
      extra: step -> JSON values to save with the state.
      copy: how images copy the tables: 'whole' or 'shards'.
    """
    return Recovery(
        directory, every, steps, mode=_mode(config), image=image, run=run, extra=extra, copy=copy,
        scheme=SCHEMES[config.cpr]() if config.cpr in SCHEMES else None,
        failures=failures_of(config, steps, config.mtbf_steps or steps / 2),
    )  # fmt: skip


def saves_every(config, engine, run, steps: int, first_steps: Callable[[int], Iterator]) -> float:
    """Return the interval between saves of a recovery, in steps.

    Measured costs are written to recovery.json, so that a resumed run keeps its interval.

    Args:
      config: TechniqueFlags, and `save_every_steps` if the job has that flag.
      run: run; to measure costs, its directory must be on the disk to save to.
      first_steps: number -> iterator that trains that many steps, to measure costs.
    """
    if (given := getattr(config, "save_every_steps", None)) is not None:
        return given
    mtbf, hours = config.mtbf_steps or steps / 2, SETTING_A.total_hours / steps
    if config.recovery_costs == "assumed":
        costs = SETTING_A._replace(mtbf_hours=mtbf * hours, nodes=engine.tables.spec.shards)
        return _planned(config, costs, hours)
    if not (known := run.read_json("recovery.json")):
        hours = _step_seconds(first_steps) / 3600
        state, costs = measure_costs(
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


def failures_of(config, steps: int, mtbf_steps: float) -> dict[int, list[int]]:
    """Return {step: shards} of the failures that the flags ask for."""
    if config.fail == ("gamma",):
        drawn = draw_failures(mtbf_steps, steps, config.shards, config.seed, config.fail_shape)
        at: dict[int, set[int]] = {}
        for hours, shard in zip(drawn.hours, drawn.node, strict=True):
            at.setdefault(min(steps, 1 + int(hours)), set()).add(int(shard))
        return {step: sorted(shards) for step, shards in at.items()}
    for step in (found := given_failures(config)):
        if not 1 <= step <= steps:
            raise ValueError(f"--fail {step}: the run has steps 1 to {steps}: give one of these.")
    return found


class Home:
    """Placement of the rows: on the device, in host memory, or at servers, which get successors with a recovery.

    Attributes:
      copy: how images copy the tables: 'whole', or 'shards', which each server writes itself.
    """

    def __init__(self, config: TechniqueFlags, run: Run, cluster: Cluster | None = None):
        self._config, self._run, self._cluster = config, run, cluster
        self.copy: Literal["whole", "shards"] = "whole" if cluster is None else "shards"
        self._supervisor: Supervisor | None = None

    def tables(self, task: Task) -> Tables:
        """Create tables of initial rows."""
        if self._cluster is not None:
            self._supervisor = Supervisor(
                self._cluster, task.spec, task.row_optimizer, self._config.number_of_servers,
                directory=self._run.directory, timeout_s=SERVER_TIMEOUT_S, client=self._run.id,
                spares=self._config.spares,
            )  # fmt: skip
            return self._supervisor.tables
        if self._config.tables == "host":
            return host_tables(task.spec, task.row_optimizer, self._config.table_directory)
        on_devices = fits_devices(task) if self._config.tables is None else self._config.tables == "device"
        return create_tables("device" if on_devices else "pinned", task.spec, task.row_optimizer, task.mesh)

    def watch(self, engine) -> None:
        """Start replacing lost servers, if there are any; call it before the recovery is entered."""
        if self._supervisor is not None and self._config.cpr != "none":
            engine.enter(self._supervisor)

    @property
    def lost(self) -> str:
        """Which servers are dead, in words; '' if none."""
        return "" if self._supervisor is None else self._supervisor.lost


@contextlib.contextmanager
def home_of(config: TechniqueFlags, run: Run) -> Iterator[Home]:
    """Yield the placement that the flags ask for; servers end with the block."""
    if config.tables != "remote":
        yield Home(config, run)
        return
    with cluster_of(config, run) as cluster:
        home = Home(config, run, cluster)
        try:
            yield home
        except ShardsLost as lost:
            hint = " With --cpr a run survives the death of a server." if config.cpr == "none" else ""
            raise OSError(f"{home.lost or lost}; {go_on_with(run)}.{hint}") from lost


def cluster_of(config: TechniqueFlags, run: Run) -> Cluster:
    """Return the cluster that the flags ask for, to be entered."""
    go_on = go_on_with(run)
    return Cluster(
        config.ray_address, advice=f"{go_on[0].upper()}{go_on[1:]}.", log_directory=run.directory / "ray_logs"
    )


def fits_devices(task: Task) -> bool:
    """Return whether rows and slots take at most half of the GPUs' memory, and say so; always true of other devices."""
    devices = as_mesh(task.mesh).devices.flat
    if devices[0].platform != "gpu":
        return True
    known = [device.memory_stats() for device in devices]
    layout = task.spec.layout(task.row_optimizer)
    of_row = {stack: 4 * sum(part.width for part in parts.values()) for stack, parts in layout.items()}
    taken_gb = sum(of_row[name] * stack.rows for name, stack in task.spec.stacks.items()) / 1e9
    memory_gb = sum(each["bytes_limit"] for each in known) / 1e9
    fits = taken_gb <= memory_gb / 2
    where = "on the devices" if fits else "pinned in host memory"
    say(f"rows {where}: they take {taken_gb:.3g} GB with their slots, and the devices have {memory_gb:.3g} GB")
    return fits


def host_tables(spec: EmbeddingSpec, row_optimizer: RowOptimizer, directory: Path | None) -> HostTables:
    """Return fresh tables in host memory, or in mapped files if a directory is given."""
    if directory is None or not (directory / "tables.json").exists():
        return HostTables.create(spec, row_optimizer, directory)
    # A kill within a step may have torn them, at no loss: their rows are restored from the image of the run.
    return with_initial_rows(HostTables.attach(spec, row_optimizer, directory, torn="accept"))


def with_initial_rows(tables: Any) -> Any:
    """Return the tables reset to their initial rows."""
    with tables.overwriting(step=0):
        return restore_shards(None, tables, range(tables.spec.shards))[0]


@contextlib.contextmanager
def own(directory: Path | None, run: str) -> Iterator[None]:
    """Keep other runs out of a directory of mapped tables, now and later.

    Args:
      directory: None if the tables are not in files.
    """
    if directory is None:
        yield
        return
    directory = local_path(directory)
    make_directory(directory)
    with Lock(directory / "run.lock", "training on these tables"):
        owner = directory / "run"
        if (directory / "tables.json").exists() and not (owner.exists() and owner.read_text() == run):
            raise ValueError(f"{directory} holds tables of another run: give another --table-directory, or remove it.")
        write_text(owner, run)
        yield


class Remembering(NamedTuple):
    """Optimizer state, and the memory of a synchronisation rule beside it."""

    optimizer: PyTree
    memory: PyTree  # of `SyncGroup.memory`, the same for each replica; empty for model averaging


def remembering(optimizer: optax.GradientTransformation, rule: Rule) -> optax.GradientTransformation:
    """Wrap an optimizer so that its state also holds the memory of a rule."""

    def init(params):
        return Remembering(optimizer.init(params), rule.init(floating(params)))

    def update(gradient, state, params=None):
        changes, kept = optimizer.update(gradient, state.optimizer, params)
        return changes, state._replace(optimizer=kept)

    return optax.GradientTransformation(init, update)


class ForegroundRounds(Callback):
    """Callback that makes a round of all replicas every k steps; its memory is in the training state.

    Args:
      every_steps: k; rounds are made at its multiples.

    Attributes:
      steps: steps so far.
      rounds: rounds made, each of all replicas.
    """

    def __init__(self, rule: Rule, every_steps: int):
        self._rule, self._every_steps = rule, every_steps
        self.steps = self.rounds = 0

    def after_step(self, info: StepInfo) -> TrainState | None:
        """Make a round if one is due; the state's optimizer must be a `remembering` one."""
        self.steps += 1
        if info.step % self._every_steps:
            return None
        state = info.state
        self.rounds += 1
        known = state.dense.opt_state.memory
        params, shared = jax.tree.map(lambda leaf: np.array(leaf[0]), jax.device_get((state.dense.params, known)))
        group = SyncGroup(self._rule, params, 1, every_steps=1, memory={"shared": shared, "waited": [0.0]})
        with group.trainer(0) as sync:
            state = sync.exchange(state)
        # Stacked into new memory, which a step may donate.
        alike = lambda new, old: jax.device_put(np.stack([new] * len(old)), old.sharding)
        memory = jax.tree.map(alike, group.memory["shared"], known)
        kept = state.dense.opt_state._replace(memory=memory)
        return state._replace(dense=state.dense._replace(opt_state=kept))


def _check_split(config, devices):
    # Default batch sizes are multiples of 128.
    for name, number in (("shards", config.shards), ("batch_size", getattr(config, "batch_size", None) or 128)):
        if number % devices:
            raise ValueError(
                f"--{name.replace('_', '-')} {number} cannot be split over {devices} devices: give a multiple of "
                f"{devices}" + (", or other --trainers." if config.in_lock_step else ".")
            )


def sync_options(config: TechniqueFlags) -> dict[str, Any]:
    """Return when rounds are made, as arguments of a synchroniser."""
    if config.sync_every_steps is not None:
        return {"every_steps": config.sync_every_steps}
    if config.sync_pace_seconds is not None:
        return {"pace_seconds": config.sync_pace_seconds}
    # Where all cores train, a round costs training more than its own time: caches, and trainers that wait for a
    # stalled one.
    threads = config.replicas if config.free else 1
    return {"core_share": min(1.0, SYNC_SHARE * cores() / threads)}


def _rounds(config, engine):
    """Return the callback that synchronises replicas in lock step, in the foreground or in the background."""
    if config.sync_every_steps is not None:
        return ForegroundRounds(rule_of(config), config.sync_every_steps)
    one = jax.tree.map(lambda leaf: np.array(leaf[0]), engine.state.dense.params)
    return SyncGroup(rule_of(config), one, 1, **sync_options(config)).trainer(0)


def _mode(config) -> Mode:
    return "full" if config.cpr == "full" else "partial"


def _planned(config, costs, step_hours):
    """Return the planned interval of the requested mode, even if the other mode is cheaper."""
    plan, mode = plan_recovery(costs, config.target_pls), _mode(config)
    hours = full_interval(costs) if mode == "full" else partial_interval(costs, config.target_pls)
    every = max(1.0, min(hours, costs.total_hours) / step_hours)
    also = "" if plan.mode == mode else f"; {plan.mode} recovery would be cheaper by these costs"
    say(f"--cpr {config.cpr} saves everything once in {every:.1f} steps, by {config.recovery_costs} costs{also}")
    return every


def _step_seconds(first_steps) -> float:
    """Return the median time of a step, over the second half of the first steps."""
    times = []
    for _, metrics in first_steps(MEASURED_STEPS):
        jax.block_until_ready(metrics)
        times.append(time.perf_counter())
    if len(times) < MEASURED_STEPS:
        raise ValueError(f"{len(times)} steps are too few to measure costs by: {MEASURED_STEPS} are needed.")
    return float(np.median(np.diff(times[MEASURED_STEPS // 2 :])))
