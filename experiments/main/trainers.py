"""Who trains: one replica of the dense network, or several that ShadowSync synchronises. `--shadowsync` and `--where`.

In lock step, trainers are replicas on a mesh, one per device, that share every batch. Free-running trainers, each with
its own batches, are threads over host tables, or processes over host tables that they share or tables at servers.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np
import optax

from jaxrec.callbacks import Callback, StepInfo
from jaxrec.engine import Engine
from jaxrec.shadowsync import FreeTrainers, Rule, SyncGroup, bmuf, easgd, model_averaging, replica_spread
from jaxrec.shadowsync.params import floating
from jaxrec.shadowsync.stats import average_sync_gap
from jaxrec.sharding import make_mesh
from jaxrec.task import Task
from jaxrec.types import PyTree, TrainState
from jaxrec.xla import enough_threads
from main.cli import refuse
from main.click_data import TEST_BATCH
from main.engines import InTurn
from main.run_dir import cores

ShadowKind = Literal["none", "easgd", "ma", "bmuf"]
Where = Literal["lockstep", "threads", "processes"] | None
RULES: dict[str, Callable[..., Rule]] = {"easgd": easgd, "ma": model_averaging, "bmuf": bmuf}
SYNC_SHARE = 1 / 80  # default share of this machine's cores for all synchronising threads


@dataclasses.dataclass(frozen=True)
class One:
    """One replica, whose batches all devices share."""

    shadowsync: ShadowKind = "none"
    """Replicas of the dense network, synchronised in the background."""
    where: Where = None
    """How trainers run: in lock step, as replicas that each train a share of every batch; free-running, as threads over
    host tables, or as processes over host or remote ones. By default, without --pipeline and --cpr, as threads over
    host tables and as processes over remote ones."""

    @property
    def replicas(self) -> int:
        """Number of replicas of the dense parameters."""
        return 1

    def check(self) -> None:
        """Raise ValueError if the flags contradict each other."""

    def claim_devices(self, shards: int, batch_size: int | None) -> None:
        """Request one device per replica, which share shards and batches; call it before JAX starts."""
        self._check_split(shards, batch_size, "")

    def _check_split(self, shards, batch_size, remedy):
        devices = self.mesh().size
        for name, number in (("shards", shards), ("batch-size", batch_size or 128)):  # defaults are multiples of 128
            if number % devices:
                raise ValueError(
                    f"--{name} {number} cannot be split over {devices} devices: give a multiple of {devices}{remedy}."
                )
        if TEST_BATCH % devices:
            raise ValueError(
                f"evaluations, in batches of {TEST_BATCH}, cannot be split over {devices} devices: give a power of 2 "
                "of them."
            )

    @property
    def devices(self) -> list[jax.Device]:
        """The devices that this process trains on."""
        return jax.devices()

    def mesh(self) -> jax.sharding.Mesh:
        """Return the mesh of a run."""
        return make_mesh(devices=self.devices)

    def task(self, task: Task) -> Task:
        """Return the task as these trainers need it."""
        return task

    def steps_of_one(self, steps: int) -> int:
        """Return how many of all steps one trainer counts."""
        return steps

    def engine(self, engine: InTurn, task: Task, state: TrainState, extra: Mapping[str, Any], stretch: int) -> Engine:
        """Build the engine of a run.

        Args:
          engine: how its batches follow each other.
          extra: values saved with that state.
          stretch: steps between two meetings of free-running trainers.
        """
        return engine.engine(task, state, extra.get("capacity"))

    def initial(self, task: Task, state: TrainState) -> TrainState:
        """Return an initial state with the structure of the run's images."""
        return state

    def enter(self, engine: Engine) -> Any:
        """Enter what synchronises replicas, and return it; None if nothing does."""

    def figures(self, engine: Any, sync: Any, state: TrainState, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return figures of the synchronisation, of this process so far."""
        return {}

    def extra(self, engine: Any) -> dict[str, Any]:
        """Return the values to save with a state."""
        return {}


@dataclasses.dataclass(frozen=True)
class Replicas(One):
    """Replicas of the dense network, synchronised by a rule."""

    read_by: ClassVar = "--shadowsync easgd, ma or bmuf"
    shadowsync: ShadowKind = "easgd"
    trainers: int = 2
    """Number of trainers. In lock step each trains a share of every batch."""
    sync_form: str | None = None
    """Form of the rule: delta or lerp; for easgd symmetric or sequential."""
    sync_alpha: float | None = None
    """How far a round moves the replicas; default 0.5. EASGD pulls back towards its centre what a step has moved, by
    half if a round follows each step: with back-to-back rounds over a small network, choose less, or set a pace."""
    sync_pace_seconds: float | None = None
    """Least time between two background rounds, 0 for back to back. By default rounds are so rare that they take an
    eightieth of this machine's cores."""
    sync_every_steps: int | None = None
    """Synchronise in the foreground instead: a round every k steps, which blocks training."""

    @property
    def replicas(self) -> int:
        return self.trainers

    def check(self) -> None:
        self.rule  # noqa: B018  raises
        refuse(
            {
                "--sync-pace-seconds is of the background, --sync-every-steps of the foreground: give one of them.": (
                    self.sync_pace_seconds is not None and self.sync_every_steps is not None
                )
            }
        )

    @property
    def rule(self) -> Rule:
        """The synchronisation rule."""
        given = {"form": self.sync_form, "alpha": self.sync_alpha}
        return RULES[self.shadowsync](**{name: value for name, value in given.items() if value is not None})

    def pace(self, threads: int) -> dict[str, Any]:
        """Return when rounds are made, as arguments of a synchroniser, beside so many that train."""
        if self.sync_every_steps is not None:
            return {"every_steps": self.sync_every_steps}
        if self.sync_pace_seconds is not None:
            return {"pace_seconds": self.sync_pace_seconds}
        # Where all cores train, a round costs training more than its own time: caches, and trainers that wait for a
        # stalled one.
        return {"core_share": min(1.0, SYNC_SHARE * cores() / threads)}

    def _claim(self):
        if self.trainers > 1:
            enough_threads(self.trainers)
            try:
                jax.config.update("jax_num_cpu_devices", self.trainers)
            except (RuntimeError, ValueError):
                pass  # JAX has started, or an XLA flag sets the number
        if len(jax.devices()) < self.trainers:
            raise ValueError(
                f"--trainers {self.trainers} want a device each, and there are {len(jax.devices())}: give fewer."
            )

    @property
    def devices(self) -> list[jax.Device]:
        return jax.devices()[: self.trainers]

    def mesh(self) -> jax.sharding.Mesh:
        return make_mesh(replicas=self.trainers, devices=self.devices)


@dataclasses.dataclass(frozen=True)
class LockStep(Replicas):
    """Replicas that take each step together, one per device."""

    def claim_devices(self, shards: int, batch_size: int | None) -> None:
        self._claim()
        self._check_split(shards, batch_size, ", or other --trainers")

    def task(self, task: Task) -> Task:
        """Foreground rounds keep their memory beside the optimizer state."""
        if self.sync_every_steps is None:
            return task
        return dataclasses.replace(task, optimizer=remembering(task.optimizer, self.rule))

    def enter(self, engine: Engine) -> Any:
        if self.sync_every_steps is not None:
            return engine.enter(ForegroundRounds(self.rule, self.sync_every_steps))
        one = jax.tree.map(lambda leaf: np.array(leaf[0]), engine.state.dense.params)
        return engine.enter(SyncGroup(self.rule, one, 1, **self.pace(1)).trainer(0))

    def figures(self, engine: Any, sync: Any, state: TrainState, metrics: Mapping[str, Any]) -> dict[str, float]:
        return {
            "sync_gap_steps": average_sync_gap([sync.steps], [sync.rounds]),
            "replica_spread": replica_spread(jax.device_get(state.dense.params)),
        }


@dataclasses.dataclass(frozen=True)
class Threads(Replicas):
    """Free-running trainers, as threads over host tables."""

    read_by: ClassVar = "trainers that run freely, over --tables host or remote without --pipeline and --cpr"
    workers: int = 1
    """Hogwild workers per trainer."""

    def claim_devices(self, shards: int, batch_size: int | None) -> None:
        self._claim()
        # As evaluations do; each trains whole batches.
        self._check_split(shards, self.trainers, ", or --where processes")

    def steps_of_one(self, steps: int) -> int:
        return -(-steps // self.trainers)

    def engine(self, engine: InTurn, task: Task, state: TrainState, extra: Mapping[str, Any], stretch: int) -> Engine:
        past = extra.get("techniques", {}).get("trainers")
        return FreeTrainers(
            task, state, self.rule, stretch_steps=stretch, workers=self.workers, past=past, **self.pace(self.trainers)
        )

    def initial(self, task: Task, state: TrainState) -> TrainState:
        """Free-running trainers save more than a state."""
        return self.engine(InTurn(), task, state, {}, 1).state

    def figures(self, engine: Any, sync: Any, state: TrainState, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return figures of the last stretch; before its first one a resumed run has those saved with its state."""
        known = metrics or {name: x for name, x in engine.figures().items() if x is not None}
        names = {"sync_gap_steps": "average_sync_gap", "replica_spread": "replica_spread"}
        return {mine: known[name] for mine, name in names.items() if name in known}

    def extra(self, engine: Any) -> dict[str, Any]:
        return {"trainers": engine.figures()}


@dataclasses.dataclass(frozen=True)
class Processes(Threads):
    """Free-running trainers, each a process with its own JAX: main/pools.py."""

    @property
    def cores(self) -> list[list[int]] | None:
        """A core of this machine for each trainer; None if there are fewer cores than trainers."""
        mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        return [[core] for core in mine[: self.trainers]] if len(mine) >= self.trainers else None

    def claim_devices(self, shards: int, batch_size: int | None) -> None:
        """Nothing: each process has its own devices."""


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
