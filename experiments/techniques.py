"""The three techniques of a run: their flags, what goes together, and the engine that they make.

Two regimes of ShadowSync follow from the other flags. In lock step trainers are replicas on a mesh,
each on a device of its own, that share every batch: over device tables, under a pipeline, with CPR.
Free-running trainers are threads over shared host tables, each with batches of its own.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from clicks import ClickJob
from contract import Flags, say
from free import FreeTrainers

from jaxrec.cpr import Recovery, draw_failures, mfu, plan_recovery, scar, ssu
from jaxrec.cpr.schedule import SETTING_A, Mode
from jaxrec.loop import Serial
from jaxrec.oac import Pipeline
from jaxrec.shadowsync import FreeStep, Rule, SyncGroup, bmuf, easgd, model_averaging, replica_spread
from jaxrec.sharding import make_mesh
from jaxrec.types import TrainState

RULES: dict[str, Callable[..., Rule]] = {"easgd": easgd, "ma": model_averaging, "bmuf": bmuf}
SCHEMES: dict[str, Callable[[], Any]] = {"mfu": mfu, "ssu": ssu, "scar": scar}
WINDOW, TRAINERS = 8, 2  # unless given


@dataclasses.dataclass(frozen=True)
class TechniqueFlags(Flags):
    """Where the rows are, how batches overlap, who is synchronised, and what survives a failure."""

    tables: Literal["device", "host"] = "device"
    table_directory: Path | None = None
    """Host tables as mapped files here (best on tmpfs) instead of RAM."""
    shards: int = 8
    """Of every table; CPR's nodes."""
    pipeline: Literal["none", "sync", "semisync", "async", "oac"] = "none"
    """Over host tables: oac overlaps batches with the same bits; none trains one after the other."""
    window: int | None = None
    """Of oac and async: how many batches are in flight, 8 unless given."""
    stale_rows: Literal["planned", "device"] = "planned"
    """Of oac: who finds rows that arrive too old, the host that plans or the device."""
    savings: bool = False
    """Of oac: no row travels that the device has already, or that a batch in flight writes again."""
    shadowsync: Literal["none", "easgd", "ma", "bmuf"] = "none"
    """Replicas of the dense network, synchronised in the background. With host tables alone trainers run freely;
    with a pipeline, device tables or CPR they are replicas in lock step."""
    trainers: int | None = None
    """2 unless given. In lock step each has a share of every batch."""
    workers: int = 1
    """Free-running: Hogwild workers of each trainer."""
    sync_form: str | None = None
    """Of the rule: delta or lerp; of easgd symmetric or sequential."""
    sync_pace_seconds: float = 0.0
    """The least time from one round in the background to the next."""
    sync_every_steps: int | None = None
    """In the foreground instead: a round every so many steps, which training waits for."""
    cpr: Literal["none", "full", "vanilla", "mfu", "ssu", "scar"] = "none"
    """Saves through a recovery that brings lost shards back: full rolls all back, the others the lost ones alone, from
    saves of everything (vanilla) or of the rows that a scheme picks."""
    target_pls: float = 0.1
    """The portion of lost samples that the model can bear; it decides how often to save, unless --save-every-steps
    does."""
    fail: tuple[str, ...] = ()
    """Emulated failures, as step:shards: 1500:3 2200:1,5; or the word gamma, to draw them."""
    mtbf_steps: float | None = None
    """Mean steps between failures; half of the run unless given, as in the paper."""
    fail_shape: float = 1.0
    """Of the gamma law: 1 is the exponential law, below it failures come in bursts."""

    @property
    def replicas(self) -> int:
        """How many copies of the dense parameters there are."""
        return 1 if self.shadowsync == "none" else self.trainers or TRAINERS

    @property
    def free(self) -> bool:
        """Whether trainers run freely."""
        return self.shadowsync != "none" and (self.tables, self.pipeline, self.cpr) == ("host", "none", "none")


def rules(config: TechniqueFlags) -> dict[str, object]:
    """{what is wrong, and the remedy: whether it is} of flags that do not go together."""
    windowed, shadow = config.pipeline in ("oac", "async"), config.shadowsync != "none"
    return {
        f"--pipeline {config.pipeline} is for --tables host: add it, or leave the pipeline out.": (
            config.pipeline != "none" and config.tables != "host"
        ),
        f"--window {config.window} is for --pipeline oac or async.": config.window is not None and not windowed,
        f"--stale-rows {config.stale_rows} is for --pipeline oac.": (
            config.stale_rows != "planned" and config.pipeline != "oac"
        ),
        "--savings is for --pipeline oac.": config.savings and config.pipeline != "oac",
        f"--table-directory {config.table_directory} is for --tables host: add it, or leave the directory out.": (
            config.table_directory is not None and config.tables != "host"
        ),
        f"--trainers {config.trainers} is for --shadowsync easgd, ma or bmuf.": (
            config.trainers is not None and not shadow
        ),
        f"--sync-form {config.sync_form} is for --shadowsync easgd, ma or bmuf.": config.sync_form and not shadow,
        f"--sync-pace-seconds {config.sync_pace_seconds:g} is for --shadowsync easgd, ma or bmuf.": (
            config.sync_pace_seconds and not shadow
        ),
        f"--sync-every-steps {config.sync_every_steps} is for --shadowsync easgd, ma or bmuf.": (
            config.sync_every_steps is not None and not shadow
        ),
        "--sync-pace-seconds is of the background, --sync-every-steps of the foreground: give one of them.": (
            config.sync_pace_seconds and config.sync_every_steps is not None
        ),
        f"--workers {config.workers} are of trainers that run freely: leave out --pipeline, --cpr and --tables device, "
        "or the workers.": config.workers > 1 and not config.free,
        f"--fail {' '.join(config.fail)} needs something that recovers: add --cpr mfu, say.": (
            config.fail and config.cpr == "none"
        ),
        f"--mtbf-steps {config.mtbf_steps} is of --cpr.": config.mtbf_steps is not None and config.cpr == "none",
        f"--fail-shape {config.fail_shape:g} is of --fail gamma.": (
            config.fail_shape != 1.0 and config.fail != ("gamma",)
        ),
        "--save-every-steps 0 saves nothing that --cpr could bring back: leave one of them out.": (
            config.cpr != "none" and getattr(config, "save_every_steps", None) == 0
        ),
    }


def claim_devices(config: TechniqueFlags) -> None:
    """Asks for as many devices as there are replicas; before JAX starts.

    Raises:
      ValueError: there are fewer, and none can be made.
    """
    if config.replicas > 1:
        try:
            jax.config.update("jax_num_cpu_devices", config.replicas)
        except (RuntimeError, ValueError):
            pass  # JAX has started, or was told how many by a flag of XLA
    if len(jax.devices()) < config.replicas:
        raise ValueError(
            f"--trainers {config.replicas} want a device each, and there are {len(jax.devices())}: give fewer trainers."
        )


def mesh_of(config: TechniqueFlags) -> jax.sharding.Mesh:
    """A device for each replica; without any, all devices share the batches."""
    if config.replicas == 1:
        return make_mesh(devices=jax.devices())
    return make_mesh(replicas=config.replicas, devices=jax.devices()[: config.replicas])


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
    return RULES[config.shadowsync](**({"form": config.sync_form} if config.sync_form else {}))


def _options(config):
    if config.sync_every_steps is not None:
        return {"every_steps": config.sync_every_steps}
    return {"pace_seconds": config.sync_pace_seconds} if config.sync_pace_seconds else {}


class Techniques:
    """What is on in a run, beside its engine: hooks and figures.

    Args:
      config: TechniqueFlags.
      engine: from `make_engine`, whose `with` block was begun.
    """

    def __init__(self, config: TechniqueFlags, engine):
        self._engine, self._first, self._seen = engine, engine.step, Counter[str]()
        self._sync = None
        if config.shadowsync != "none" and not config.free:
            one = jax.tree.map(lambda leaf: np.array(leaf[0]), engine.state.dense.params)
            self._sync = engine.enter(SyncGroup(_rule(config), one, 1, **_options(config)).trainer(0))
            self._sync.steps = engine.step  # rounds in the foreground fall on the steps that they would have
        self.hooks = [self._sync.hook] if self._sync else []

    def figures(self, state: TrainState, metrics: Mapping[str, Any]) -> dict[str, float]:
        """A figure of each technique that is on, since the last time."""
        found: dict[str, float] = {}
        if isinstance(self._engine, Pipeline) and self._engine.mode == "oac":
            now, before = Counter(self._engine.counters), self._seen
            found["stale_share"] = (now["stale_rows"] - before["stale_rows"]) / max(now["rows"] - before["rows"], 1)
            self._seen = now
        if self._sync:
            steps = self._sync.steps - self._first
            found["sync_gap_steps"] = steps / self._sync.rounds if self._sync.rounds else float("inf")
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


def recovery_of(config, engine, directory: Path, steps: int, image, run: str, extra: Callable) -> Recovery:
    """The recovery that the flags ask for, to be entered.

    Args:
      config: TechniqueFlags, and `save_every_steps` and `seed`.
      engine: that it watches.
      directory: of its images.
      steps: of the run.
      image: that the run goes on from, or None.
      run: its id.
      extra: step -> JSON values to save along.
    """
    mtbf = config.mtbf_steps or steps / 2
    mode: Mode = "full" if config.cpr == "full" else "partial"
    every = config.save_every_steps
    if every is None:
        # The job of the paper's setting A, whose 56 hours are these steps.
        hours = SETTING_A.total_hours / steps
        costs = SETTING_A._replace(mtbf_hours=mtbf * hours, nodes=engine.tables.spec.shards)
        plan = plan_recovery(costs, config.target_pls)
        every = plan.in_steps(3600 * hours)["save_every_steps"]
        if plan.mode != mode:
            say(f"{plan.mode} recovery would be cheaper by the costs assumed; --cpr {config.cpr} is what was asked for")
    scheme = SCHEMES[config.cpr]() if config.cpr in SCHEMES else None
    return Recovery(
        engine, directory, every, steps, mode=mode, scheme=scheme, failures=failures_of(config, steps, mtbf),
        image=image, run=run, extra=extra,
    )  # fmt: skip


def failures_of(config, steps: int, mtbf_steps: float) -> dict[int, list[int]]:
    """{step: shards} of the failures that the flags ask for.

    Raises:
      ValueError: a word that is none; a step that the run does not have.
    """
    if config.fail == ("gamma",):
        drawn = draw_failures(mtbf_steps, steps, config.shards, config.seed, config.fail_shape)
        found: dict[int, list[int]] = {}
        for hours, shard in zip(drawn.hours, drawn.node, strict=True):
            found.setdefault(min(steps, 1 + int(hours)), []).append(int(shard))
        return {step: sorted(set(shards)) for step, shards in found.items()}
    found = {}
    for word in config.fail:
        step, _, shards = word.partition(":")
        try:
            found[int(step)] = sorted({int(shard) for shard in shards.split(",")})
        except ValueError:
            raise ValueError(f"--fail {word}: give step:shards, such as 1500:3 or 2200:1,5; or gamma alone.") from None
        if not 1 <= int(step) <= steps:
            raise ValueError(f"--fail {word}: the run has steps 1 to {steps}.")
        wrong = [shard for shard in found[int(step)] if not 0 <= shard < config.shards]
        if wrong:
            raise ValueError(f"--fail {word}: shards {wrong} are not among the {config.shards}, from 0.")
    return found
