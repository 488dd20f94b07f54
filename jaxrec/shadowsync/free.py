"""Free-running trainers as an engine: they train on one stream in stretches and are idle in between.

The complete state of a training is in its TrainState, which is saved and restored like any other: see `FreeState`. The
regime is not deterministic. A killed training resumes from its newest image and loses later progress; rows, dense
parameters, optimizer states and the rule's shared state in an image are from one instant at which all were idle.

Legend: n trainers, m workers of each.
"""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.callbacks import AfterStep, Callback
from jaxrec.embedding import HostedTables
from jaxrec.engine import Engine
from jaxrec.interrupts import raise_deferred, uninterrupted
from jaxrec.prefetch import END, Stream, result_or_error
from jaxrec.shadowsync.group import SyncGroup
from jaxrec.shadowsync.rules import Rule
from jaxrec.shadowsync.stats import average_sync_gap
from jaxrec.shadowsync.workers import FreeStats, FreeStep, Turn, train_stretch
from jaxrec.sharding import DATA, EVERYWHERE, PER_REPLICA, REPLICA, make_mesh, put_on_mesh
from jaxrec.task import Task
from jaxrec.types import Batch, DenseState, PyTree, TrainState
from jaxrec.validate import check_spec


class FreeTrainers(Engine):
    """Engine of n free-running trainers over shared host tables; it does not support `lose`.

        task = Task(spec, loss, optimizer, row_optimizer, make_mesh(replicas=2, devices=jax.devices()[:2]))
        with FreeTrainers(task, task.init(params, "host"), easgd(), stretch_steps=100) as engine:
            engine.train(batches)
        final = engine.together()

    Args:
      task: Task, whose loss may neither take a key nor return variables.
      state: TrainState with HostTables and dense parameters on `make_mesh(replicas=n)` of n devices, from `task.init`,
        from a FreeTrainers or restored from an image. It is not donated, but its tables are written in place.
      rule: synchronisation rule; None for no synchronisation.
      callbacks: see `Engine`; called after every stretch.
      stretch_steps: length of a stretch in batches: trainers meet and callbacks are called whenever the number of
        batches taken is a multiple of it.
      workers: m.
      past: result of `figures` from an earlier process, to continue counting.
      group: options of `SyncGroup`: every_steps, pace_seconds, core_share, timeout_s, on_failure.

    With on_failure='drop', a failing trainer is dropped until the end of the stretch and its batch is lost; in the next
    stretch it starts as a copy of the first trainer that has not failed. A stretch ended by a failure leaves no usable
    state, as rows have changed already: restore an image and `reset`.

    Attributes:
      step: number of batches taken from the stream.
    """

    def __init__(
        self,
        task: Task,
        state: TrainState,
        rule: Rule | None = None,
        callbacks: Iterable[Callback | AfterStep] = (),
        *,
        stretch_steps: int = 100,
        workers: int = 1,
        past: dict[str, Any] | None = None,
        **group: Any,
    ):
        super().__init__(callbacks)
        self._free_step, self._rule, self._options = FreeStep(task), rule, group
        if rule is None and group:
            raise ValueError(f"{', '.join(group)} is of a rule, and rule=None: give one, as easgd(), or leave it out.")
        self._stretch_steps = whole_number("stretch_steps", stretch_steps)
        self._workers = whole_number("workers", workers)
        self._failure = ""
        self._take_state(state)
        none: dict[str, Any] = {name: [0] * self._replicas for name in ("steps", "rounds")}
        none |= {"average_sync_gap": None, "replica_spread": None, "batches_lost": 0, "dropped": []}
        self._figures = none
        if past is not None:
            if len(past["steps"]) != self._replicas:
                raise ValueError(f"past={past!r:.200} is not what `figures` of {self._replicas} trainers has given.")
            self._figures = {name: past[name] for name in none}

    def _take_state(self, state):
        mesh = _mesh_of(state, self._free_step)
        self._replicas = mesh.shape[REPLICA]
        self._state, self._mesh = self._with_memory(state), mesh
        self.step = int(state.dense.step)
        self._apart: tuple[Any, list] = None, []  # a dense state, and its copies on the trainers' devices
        self._failure = ""

    def _with_memory(self, state):
        """Return the state with a `FreeState`, which is created if it comes from another engine."""
        kept = state.dense.opt_state
        if isinstance(kept, FreeState):
            if kept.group and self._rule is None:
                raise ValueError(
                    "the state was trained with a rule, and rule=None would forget what it knows: give it."
                )
            self._group(state.dense)  # raises here if the memory does not fit
            return state
        steps = np.full(self._replicas, int(state.dense.step), np.int32)
        capacity = {name: np.zeros((), np.int64) for name in state.tables.spec.stacks}
        group = self._group(state.dense._replace(opt_state=FreeState(kept, steps, {}, capacity)))
        kept = FreeState(kept, steps, group.memory if group else {}, capacity)
        return state._replace(dense=state.dense._replace(opt_state=kept))

    @property
    def state(self) -> TrainState:
        """State of all trainers while idle; callbacks use info.state, as reading this in one raises ValueError."""
        self._check_whole()
        return super().state

    def figures(self) -> dict[str, Any]:
        """Return statistics of all stretches as JSON values.

        Returns:
          steps, rounds: lists with one number per trainer; average_sync_gap: over all trainers, None without a
          round; replica_spread: at the end of the last stretch, None before the first; batches_lost: batches taken but
          not trained; dropped: one message per dropped trainer and stretch.
        """
        return dict(self._figures)

    def run(
        self, batches: Iterable[Batch] | Callable[[int], Iterable[Batch]]
    ) -> Generator[tuple[TrainState, dict], None, None]:
        """Train on all batches; yield after every stretch, the last of which ends with the stream.

        Ctrl-C and SIGTERM end a stretch early with all trainers idle, and lose the batches in flight; the state is
        consistent when the signal handler runs. An error of the stream ends the stretch like the end of the stream, and
        is raised after it.

        Args:
          batches: as for `Engine.run`; each is trained by one trainer.

        Yields:
          (TrainState, metrics of the stretch). Metrics: loss, mean over the stretch's examples, nan without examples;
          examples; rounds, sum over trainers; average_sync_gap, inf without a round; replica_spread; seconds;
          batches_lost. Callbacks get the same, and no plans.

        Raises:
          FloatingPointError: a loss is not finite, unless trainers that fail are dropped; no callback is called.
          ValueError: another run is active; an earlier stretch has failed; the stream yields an object that is not a
            Batch.
          Exception: an error of a trainer, which is named; of the stream, once all trainers are idle; of a callback.
        """
        return super().run(batches)

    def _refuse(self):
        self._check_whole()

    def _over(self, stream):
        over = False
        while not over:
            steps = self._stretch_steps - self.step % self._stretch_steps
            trained = int(self._state.dense.opt_state.steps.sum())
            splitter = StreamSplitter(stream, steps, trained, self._replicas)
            metrics = self._stretch(splitter)
            if splitter.taken:
                try:
                    self._after_step({}, metrics)
                finally:  # as in other engines, also if a callback failed
                    self._save_snapshots()
                yield self._state, metrics
            if splitter.error is not None:
                raise splitter.error
            over = splitter.over

    def _save_snapshots(self):
        while snapshot := self._snapshots.due(self.step):
            self._drop_unless_finite(self._state.dense)
            self._snapshots.mark_taken(snapshot)
            snapshot.save(self._state)

    def _stretch(self, splitter) -> dict[str, Any]:
        """Train until all trainers are idle; signals are deferred until the state is consistent."""
        self._check_whole()
        seen: list[dict] = []
        with uninterrupted(reraise=False) as deferred:
            try:
                group = self._group(self._state.dense)
                states, figures = self._train(splitter, group, lambda trainer, step, metrics: seen.append(metrics))
                if splitter.taken:  # else keep the state that callbacks saw last
                    self._commit(states, splitter.taken, group.memory if group else {}, figures)
                lost = splitter.taken - sum(figures.steps)
                self._figures = _added(self._figures, figures, lost)
            except BaseException as error:
                if splitter.taken:  # else nothing was changed
                    self._failure = f"{type(error).__name__} has ended the stretch that began at step {self.step}"
                raise
        raise_deferred(deferred)
        return _metrics_of(seen, figures, lost)

    def _train(self, splitter, group, hook):
        # Taken from the state, so that shapes, on which the order of a sum depends, are those of one long run.
        capacity = {name: int(rows) for name, rows in self._state.dense.opt_state.capacity.items()}
        self._free_step.capacity = capacity if any(capacity.values()) else None
        streams, make = [splitter.batches() for _ in range(self._replicas)], group and group.trainer
        states = self._states_apart()
        try:
            return train_stretch(self._free_step, states, self._state.tables, streams, make, self._workers, hook)
        finally:
            splitter.close()  # before `taken` is read

    def _states_apart(self):
        # Reuse the copies from the last stretch if no callback has replaced the dense state.
        (of, states), self._apart = self._apart, (None, [])
        return states if of is self._state.dense else _apart_states(self._state.dense, self._mesh)

    def _commit(self, states, taken, memory, figures):
        mine = [state for number, state in enumerate(states) if number not in figures.failures]
        whole = [mine[0] if number in figures.failures else state for number, state in enumerate(states)]
        known = self._free_step.capacity or {}
        capacity = {name: np.array(known.get(name, 0), np.int64) for name in self.tables.spec.stacks}
        self._state = TrainState(_joined(whole, self._mesh, self.step + taken, memory, capacity), self.tables)
        self.step += taken
        if len(mine) == len(states):
            self._apart = self._state.dense, states

    def _group(self, dense) -> SyncGroup | None:
        if self._rule is None:
            return None
        one, memory = _first_replica(dense.params), dense.opt_state.group or None
        return SyncGroup(self._rule, one, self._replicas, last_round=False, memory=memory, **self._options)

    def exclusive(self, change: Callable[[HostedTables], HostedTables]) -> None:
        """Replace the tables by change(tables) while all trainers are idle: in a callback, or between two runs."""
        self._count_change()
        changed = change(self._state.tables)
        if changed is None or changed.hosted is None or changed.spec.digest != self.tables.spec.digest:
            raise ValueError(
                f"the change returned a {type(changed).__name__}: HostTables of the same spec are expected."
            )
        self._state = self._state._replace(tables=changed)

    def snapshot_at(
        self, step: int, save: Callable[[TrainState], Any], dropped: Callable[[], object] = lambda: None
    ) -> None:
        """See `Engine`; only of the step of `info`, as free trainers are not idle after another one."""
        if step != self.step or not self._in_callback:
            raise ValueError(
                f"free trainers have no snapshot after step {step}: save in `after_step`, where all rest, or announce "
                "info.step there."
            )
        super().snapshot_at(step, save, dropped)

    def lose(self, shards: Iterable[int]) -> None:
        """Raise ValueError: a shard is restored to a step, and free trainers have no common step."""
        raise ValueError(
            f"free trainers cannot bring shards {list(shards)} back while they train: use replicas in lock step "
            "(Serial or Pipeline), or restore an image and `reset`."
        )

    def reset(self, state: TrainState) -> None:
        """Continue from another state, between two runs or after a failure; pending snapshots are forgotten."""
        self._refuse_reset(state)
        replicas = _mesh_of(state, self._free_step).shape[REPLICA]
        if replicas != self._replicas:
            raise ValueError(f"the state has {replicas} replicas, and there are {self._replicas} trainers.")
        self._notify_restarted(state)
        before = self.step
        self._take_state(state)
        self._snapshots.forget(before)

    def together(self) -> TrainState:
        """Return the state after the last rounds that a synchroniser's `finish` makes, for evaluation.

        With a centre, each trainer makes one more round and all get the centre's parameters; without one, all make a
        common round. The training state is not modified.
        """
        self._check_whole()
        if self._rule is None:
            return self._state
        # All replicas belong to a single trainer here.
        memory = {"shared": self._state.dense.opt_state.group["shared"], "waited": [0]}
        group = SyncGroup(self._rule, _first_replica(self._state.dense.params), 1, every_steps=1, memory=memory)
        with group.trainer(0) as trainer:
            return trainer.finish(self._state)

    def _check_whole(self):
        if self._failure:
            raise ValueError(
                f"{self._failure}: rows have changed since, and the trainers' parameters are lost. Restore an image "
                "and give its state to `reset`."
            )


class FreeState(NamedTuple):
    """State of free trainers beside their parameters, stored as `DenseState.opt_state`.

    `DenseState.step` counts the batches that all trainers have taken from the stream.
    """

    optimizer: PyTree  # optimizer states, leaves [n, ...]
    steps: np.ndarray  # i32[n], steps of each trainer
    group: dict[str, Any]  # `SyncGroup.memory`; empty without a rule
    capacity: dict[str, np.ndarray]  # {stack: i64[]}, capacity of the plans, 0 before the first plan


class StreamSplitter:
    """Iterators over at most `steps` batches of a stream for the trainers of a stretch: an idle one takes the next.

    Schedules are at step t // n for batch t, whichever of the n trainers takes it, as if all were equally fast; of the
    dense parameters those of optax that count the trainer's steps.

    Args:
      stream: the stream.
      steps: number of batches of the stretch.
      first: number of its first batch, t: of steps that all trainers have made.
      trainers: n.

    Attributes:
      taken: number of batches given out.
      over: whether the stream has ended or failed.
      error: error raised by the stream. It fails no trainer: all stop as at the end of the stream.
    """

    def __init__(self, stream: Stream, steps: int, first: int = 0, trainers: int = 1):
        self._stream, self._steps, self._first, self._trainers = stream, steps, first, trainers
        self._asking = threading.Lock()  # held as long as the stream blocks
        self._counting = threading.Lock()
        self.taken, self.over, self.closed = 0, False, False
        self.error: BaseException | None = None

    def batches(self) -> Iterator[Turn]:
        """Iterate over the batches of one trainer."""
        while (turn := self._take()) is not None:
            yield turn

    def close(self) -> None:
        """Stop giving out batches; a batch that the stream returns later is kept for its next run."""
        with self._counting:
            self.closed = True

    def _take(self):
        with self._asking:
            if self.over or self.closed or self.taken == self._steps:
                return None
            self._stream.free.clear()  # a run over the same iterator must wait
            try:
                return self._counted(result_or_error(self._stream.take))
            finally:
                self._stream.free.set()

    def _counted(self, found):
        """Count and return a batch; return None at the end, after an error, or once closed."""
        with self._counting:
            if self.closed:  # the stretch has ended meanwhile: it stays in line for the next run
                return None
            if found is not END:
                self._stream.accept()
            if isinstance(found, Batch):
                self.taken += 1
                return Turn(found, np.array((self._first + self.taken - 1) // self._trainers, np.int32))
            self.over, self.error = True, None if found is END else found
            return None


def _metrics_of(seen: list[dict], figures: FreeStats, lost: int) -> dict[str, Any]:
    """Return the metrics of a stretch, from the metrics of its steps."""
    found = jax.device_get([(metrics["loss"], metrics["weight"]) for metrics in seen])
    losses, weights = np.array(found, np.float64).reshape(-1, 2).T
    return {
        "loss": float(np.average(losses, weights=weights if weights.any() else None)) if seen else float("nan"),
        "examples": figures.examples,
        "rounds": sum(figures.rounds),
        "average_sync_gap": figures.average_sync_gap,
        "replica_spread": figures.replica_spread,
        "seconds": figures.seconds,
        "batches_lost": lost,
    }


def _mesh_of(state, step):
    """Return the mesh of a state, after checking that it has one device per trainer and the spec of the step."""
    check_spec(step.spec, state.tables.spec)
    mesh = jax.tree.leaves(state.dense.params)[0].sharding.mesh
    if mesh.shape[DATA] != 1:
        raise ValueError(
            "the dense state lies on no mesh of one device for each trainer: make it by `init` of a Task over "
            "make_mesh(replicas=n, devices=jax.devices()[:n])."
        )
    return mesh


def _apart_states(dense: DenseState, mesh) -> list[DenseState]:
    """Return the dense state of each trainer with its own step count, copied to its device."""
    whole, states = jax.device_get((dense.params, dense.opt_state.optimizer)), []
    for number, device in enumerate(mesh.devices[:, 0]):
        own = make_mesh(devices=[device])
        # Copied, as a step donates it and JAX on CPU would share the memory.
        mine = jax.tree.map(lambda leaf, i=number: np.array(leaf[i : i + 1]), whole)
        params, optimizer = put_on_mesh(mine, own, PER_REPLICA)
        step = put_on_mesh(np.array(dense.opt_state.steps[number], np.int32), own, EVERYWHERE)
        states.append(DenseState(step, params, optimizer))
    return states


def _joined(states: list[DenseState], mesh, step: int, group: dict, capacity: dict) -> DenseState:
    """Combine the dense states of all trainers into one on their mesh."""
    steps = np.array([int(state.step) for state in states], np.int32)
    trees = [jax.device_get((state.params, state.opt_state)) for state in states]
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *trees)
    params, optimizer = put_on_mesh(whole, mesh, PER_REPLICA)
    step = put_on_mesh(np.array(step, np.int32), mesh, EVERYWHERE)
    return DenseState(step, params, FreeState(optimizer, steps, group, capacity))


def _first_replica(params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0, ...], jax.device_get(params))


def _added(past: dict[str, Any], figures: FreeStats, lost: int) -> dict[str, Any]:
    """Add the figures of a stretch to those of past stretches, as JSON values."""
    sums = {
        name: [a + b for a, b in zip(past[name], getattr(figures, name), strict=True)] for name in ("steps", "rounds")
    }
    dropped = [f"trainer {i}: {type(error).__name__}: {error}" for i, error in figures.failures.items()]
    return sums | {
        "average_sync_gap": average_sync_gap(**sums) if sum(sums["rounds"]) else None,
        "replica_spread": figures.replica_spread,
        "batches_lost": past["batches_lost"] + lost,
        "dropped": [*past["dropped"], *dropped],
    }
