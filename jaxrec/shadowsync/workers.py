"""Free-running trainers: threads that share host tables and whose dense parameters a synchroniser keeps together.

Each of the n trainers has one replica on one device and m Hogwild workers. A worker reads rows and the trainer's newest
parameters without waiting for other workers, computes gradients, and applies them to the current parameters with optax
and to the current rows with `add`. The staleness of a gradient is therefore up to m - 1 steps of its trainer for
parameters, and the number of steps of all trainers in flight for rows. JAX arrays are immutable, so a worker reads
parameters of one version, unlike Hogwild on shared memory, where reads may be torn.

A foreground round blocks only the worker whose step made it due. The trainer's other workers keep training, and the
result is folded into the current parameters, as in a shadow.

All threads are daemons: a thread blocked in a user's stream or hook does not keep the process alive. If it wakes after
training has ended, it makes no round and writes nothing.

Reference: Zheng et al., ShadowSync, arXiv 2003.03477 (replication and Hogwild together). Regime:
free-running. Legend: n trainers, m workers per trainer, B batch.
"""

import dataclasses
import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrec.bounds import whole_number
from jaxrec.embedding import HostedTables, capacity_of, plan
from jaxrec.interrupts import uninterrupted
from jaxrec.shadowsync.params import replica_spread
from jaxrec.shadowsync.stats import TrainerStats
from jaxrec.shadowsync.synchroniser import Foreground, Synchroniser
from jaxrec.shadowsync.transport import PeerLeft
from jaxrec.sharding import as_mesh, make_mesh
from jaxrec.step import gradients, init_dense, step_dense, step_rows, with_replica, without_replica
from jaxrec.table_use import TableUse
from jaxrec.task import Task, check_gradients_suffice, once_per_task
from jaxrec.types import Array, Batch, DenseState, Plan, PyTree, TrainState
from jaxrec.validate import check_dense, check_examples, check_rows, check_spec
from jaxrec.xla import check_fusion

_END = object()  # marks the end of a stream; None does not
LEAVE_S = 10.0  # maximum wait at the end for threads blocked in a stream or a hook, in seconds
_PAUSE_S = 0.005  # polling interval of the threads, in seconds


class FreeStep:
    """The free-running training step of a task, whose loss may neither take a key nor return variables.

    Attributes:
      capacity: {stack: U} of the plans so far, None before the first. Capacities only grow and are shared by all
        workers, so that few shapes are compiled.
    """

    def __init__(self, task: Task):
        self.spec = task.spec
        self.capacity: dict[str, int] | None = None
        self._lock = threading.Lock()  # guards `capacity`
        self.differentiate, self.apply, self.copy = _programs(task)

    def plan(self, ids: dict[str, Array]) -> dict[str, Plan]:
        """Plan a batch, and grow `capacity` if needed."""
        plans = plan(self.spec, ids, self.capacity)
        with self._lock:
            self.capacity = capacity_of(plans, self.capacity)
        return plans


@once_per_task
def _programs(task):
    check_gradients_suffice(task)
    check_fusion(as_mesh(task.mesh).devices.flat[0].platform)

    # Checked once per compiled shape.
    def differentiate(dense, rows, plans, batch, at=None):
        check_dense(dense, task.optimizer, 1)
        check_rows(task.spec, rows, task.row_optimizer)
        params = without_replica(dense).params
        values = {name: stack.value for name, stack in rows.items()}
        gradient, by_rows, metrics = gradients(params, values, plans, batch, spec=task.spec, loss=task.loss)
        step = dense.step if at is None else at
        return gradient, step_rows(rows, by_rows, plans, step, task.spec, task.row_optimizer), metrics

    def apply(dense, gradient, at=None):
        one = without_replica(dense)
        return with_replica(
            step_dense(one, gradient, task.optimizer) if at is None else _step_at(one, gradient, at, task)
        )

    copy = functools.partial(jax.tree.map, jnp.copy)
    return jax.jit(differentiate), jax.jit(apply, donate_argnums=0), jax.jit(copy)


def _step_at(dense, gradient, at, task):
    """Apply a gradient with the optax schedules at a step; those that count otherwise, as in `MultiSteps`, stay."""
    ahead = lambda count: jnp.where(count == dense.step, at - dense.step, 0)
    before = dense.opt_state
    moved = map_schedules(lambda old: old + ahead(old), before)
    new = step_dense(dense._replace(opt_state=moved), gradient, task.optimizer)
    return new._replace(opt_state=map_schedules(lambda old, new: new - ahead(old), before, new.opt_state))


def map_schedules(change: Callable, *states: PyTree) -> PyTree:
    """Return the last of some states of an optimizer, with change(*counts) for the steps counted by each schedule."""
    is_schedule = lambda state: getattr(state, "_fields", None) == optax.ScaleByScheduleState._fields  # or injected

    def changed(*given):
        last = given[-1]
        return last._replace(count=change(*(one.count for one in given))) if is_schedule(last) else last

    return jax.tree.map(changed, *states, is_leaf=is_schedule)


class Turn(NamedTuple):
    """A batch of a stream that trainers share, and the step i32[] at which schedules are for it."""

    batch: Batch
    at: np.ndarray


class Shared:
    """What the trainers of a run share; its flags and lists are read and written without a lock."""

    def __init__(self, step: FreeStep, tables: HostedTables, hook: Callable[[int, int, dict], None] | None):
        self.step, self.tables, self.hook = step, tables, hook
        self.stopped = False
        self.threads: list[threading.Thread] = []
        self.failures: list[tuple[int, BaseException]] = []  # (trainer, error), oldest first

    def start(self, function: Callable[[], None], name: str) -> threading.Thread:
        """Start a daemon thread and keep track of it."""
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        self.threads.append(thread)
        return thread

    def at_work(self) -> list[str]:
        """Return the names of the threads that have not ended."""
        return sorted(thread.name for thread in self.threads if thread.is_alive())


class Trainer:
    """A replica and its workers."""

    def __init__(
        self,
        shared: Shared,
        number: int,
        dense: DenseState,
        stream: Iterable[Batch],
        synchroniser: Synchroniser | None,
        workers: int,
    ):
        self.shared, self.number, self.workers = shared, number, workers
        self.dense, self.synchroniser = dense, synchroniser
        self.name = f"trainer-{number}"
        self.drops = getattr(synchroniser, "on_failure", "raise") == "drop"
        self.stream, self.reading = iter(stream), threading.Lock()
        # Guards `dense`; held for dispatch only, never while a program or a round runs.
        self.lock = threading.Lock()
        self.turns = threading.Lock()  # serialises foreground rounds
        self.steps = self.examples = 0
        self.entered: Synchroniser | None = None
        self.failed = self.ended = False
        self.end = time.perf_counter()  # end of the last step

    @property
    def over(self) -> bool:
        """Whether this trainer must neither begin nor write anything any more."""
        return self.shared.stopped or self.failed

    def enter(self) -> None:
        """Enter the synchroniser."""
        if self.synchroniser is not None:
            self.entered = self.synchroniser.__enter__()

    def is_over(self) -> bool:
        """Return whether this trainer has ended or failed; being dropped by its group is a failure."""
        if not self.ended and not self.failed and self.entered and (why := self.entered.exit_reason):
            # Its own background thread may have failed, and set that error before it left.
            error = self.entered.failure or PeerLeft(f"trainer {self.number} {why}")
            self._stop(error, f"of trainer {self.number}")
        return self.ended or self.failed

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the transport unless training has ended, which wakes all threads that wait for or in this trainer."""
        if self.entered is None or self.ended:
            return
        try:
            self.entered.leave(error)
        except Exception as failure:  # of a custom transport; the other trainers must still leave
            self._fail(failure, f"in leaving the transport of trainer {self.number}")

    def exit(self) -> None:
        """Exit the synchroniser, and record an error of its thread that was not raised before."""
        if self.entered is None:
            return
        own = next((error for number, error in self.shared.failures if number == self.number), None)
        try:
            self.entered.end(own)
        except Exception as error:
            self._fail(error, f"in the synchronisation of trainer {self.number}")

    def run(self) -> None:
        """Train to the end of the stream, then make rounds until all trainers are done."""
        try:
            self._train()
            self.end = time.perf_counter()
            if not self.over and self.synchroniser is not None:
                self.dense = self.synchroniser.finish(TrainState(self.dense, self.shared.tables)).dense
            # A trainer stopped during `finish` has not ended.
            self.ended = not self.over
        except BaseException as error:
            self._stop(error, f"in trainer {self.number}")

    def survived(self, error: BaseException) -> bool:
        """Return whether the other trainers continue after this trainer failed with an error."""
        return self.drops and isinstance(error, Exception)

    def _train(self):
        """Run all workers, the first of them in this thread."""
        others = [
            self.shared.start(functools.partial(self._work, worker), f"{self.name}-worker-{worker}")
            for worker in range(1, self.workers)
        ]
        self._work(0)
        for thread in others:
            thread.join()

    def _work(self, worker):
        try:
            while not self.over:
                with self.reading:
                    # Checked again: training may have ended while another worker held the stream.
                    batch = _END if self.over else next(self.stream, _END)
                if batch is _END or self.over:
                    return
                self._step(batch)
        except BaseException as error:
            self._stop(error, f"in worker {worker} of trainer {self.number}, near its step {self.steps}")

    def _stop(self, error, note):
        """Record an error unless training is over, and wake the threads that wait for this trainer."""
        if not self.over:
            self._fail(error, note)
        self.leave(error)

    def _fail(self, error, note):
        error.add_note(note)
        # Appended before the flags are set, so that a thread that sees a flag finds the error.
        self.shared.failures.append((self.number, error))
        self.failed = True
        if not self.survived(error):
            self.shared.stopped = True

    def _step(self, given):
        shared = self.shared
        batch, at = given if isinstance(given, Turn) else (given, None)
        check_examples(batch)
        plans = shared.step.plan(batch.ids)
        # Without any lock: other trainers may update the rows in between, as in Hogwild.
        rows = shared.tables.read(plans)
        # A later step donates these parameters, but a dispatched program keeps its inputs alive.
        with self.lock:
            gradient, new, metrics = shared.step.differentiate(self.dense, rows, plans, batch, at)
        new = jax.tree.map(np.asarray, new)  # waits for the program; other workers continue
        if not np.isfinite(loss := float(metrics["loss"])):
            raise FloatingPointError(
                f"the loss of trainer {self.number} is {loss} after its step {self.steps}: look at that batch (labels? "
                "dense features on a log scale?) and at the learning rates."
            )
        if self.over:  # training has ended meanwhile, and the tables may be used elsewhere
            return
        # Added, not put: keeps what other workers wrote between this read and this write.
        shared.tables.add(plans, new, rows)
        with self.lock:
            self.dense = shared.step.apply(self.dense, gradient, at)
            # Counted before the exchange, which may raise although the step is done.
            self.steps += 1
            self.examples += int(np.count_nonzero(batch.weight))
            step = self.steps
            # Under the same lock as the step, so that an exchange sees the parameters between two steps.
            due = self._exchange()
        # Without the lock: the other workers keep training during a round.
        if due is not None:
            self._round(due)
        if shared.hook is not None:
            shared.hook(self.number, step, metrics)

    def _exchange(self) -> Foreground | None:
        """Exchange with a shadow, or return the foreground synchroniser if its round is due; requires `lock`."""
        sync = self.synchroniser
        if isinstance(sync, Foreground):
            return sync if sync.due() else None
        if sync is not None:
            self.dense = sync.exchange(TrainState(self.dense, self.shared.tables)).dense
        return None

    def _round(self, foreground):
        """Make a foreground round, which blocks this worker and any other whose round is due."""
        with self.turns:
            with self.lock:
                before = self.shared.step.copy(self.dense.params)  # a later step donates them
            # Without `lock`, as a round waits for the other trainers.
            fold = foreground.round_from(before)
            with self.lock:
                # Folded into the current parameters, as other workers kept training during the round.
                self.dense = self.dense._replace(params=fold(self.dense.params))


@dataclasses.dataclass(frozen=True)
class FreeStats(TrainerStats):
    """Statistics of `train_freely`.

    Attributes:
      failures: {number: error} of the trainers that were dropped.
    """

    failures: dict[int, BaseException]


def train_freely(
    task: Task,
    params: PyTree,
    tables: HostedTables,
    streams: Sequence[Iterable[Batch]],
    synchroniser: Callable[[int], Synchroniser] | None = None,
    workers_per_trainer: int = 1,
    devices: Sequence[jax.Device] | None = None,
    hook: Callable[[int, int, dict], None] | None = None,
) -> tuple[list[DenseState], FreeStats]:
    """Train n = len(streams) trainers until their streams are exhausted.

    A failing trainer stops all, unless its group (its synchroniser's transport) has on_failure='drop': then it is
    dropped with a warning, its error is in `FreeStats.failures`, and the others train to the end of their streams. A
    trainer that the group has dropped as overdue is handled likewise. Ctrl-C, and any error that is not an `Exception`,
    stops all in either case. A thread still blocked in a stream or a hook 10 s after the end is abandoned, with a
    warning that names it.

    Args:
      task: Task, whose loss may neither take a key nor return variables, as gradients are applied in any order.
      params: initial dense parameters, the same for every trainer.
      tables: host tables shared by all trainers; written in place.
      streams: batches of each trainer, all of one size; its workers take them in turns.
      synchroniser: function from trainer number to a synchroniser that is not entered yet, such as `SyncGroup.trainer`;
        None for no synchronisation. `every_steps` and `average_sync_gap` count steps of a trainer.
      workers_per_trainer: m.
      devices: trainer i trains on device i modulo len(devices); None for all local devices.
      hook: called with (trainer, step, metrics on the device) after every step, in the worker's thread.

    Returns:
      The dense state of every trainer, with a leading axis of one replica (for a dropped trainer its last state), and
      the figures.

    Raises:
      ValueError: there are no streams, or two trainers share an iterator; workers_per_trainer < 1; the tables are not
        on the host; `synchroniser` returns no synchroniser; the loss takes a key or returns variables.
      KeyboardInterrupt: after Ctrl-C, when all threads have ended.
      Exception: the first error of the trainer that failed, naming trainer and worker, when all threads have ended;
        not a `PeerLeft` that it caused in other trainers. FloatingPointError: a loss is not finite; its batch has
        changed nothing.
    """
    devices = jax.local_devices() if devices is None else devices
    meshes = [make_mesh(devices=[devices[number % len(devices)]]) for number in range(len(streams))]
    states = [init_dense(params, task.optimizer, mesh) for mesh in meshes]
    return train_stretch(FreeStep(task), states, tables, streams, synchroniser, workers_per_trainer, hook)


def train_stretch(
    step: FreeStep,
    states: Sequence[DenseState],
    tables: HostedTables,
    streams: Sequence[Iterable[Batch]],
    synchroniser: Callable[[int], Synchroniser] | None = None,
    workers_per_trainer: int = 1,
    hook: Callable[[int, int, dict], None] | None = None,
) -> tuple[list[DenseState], FreeStats]:
    """Continue training from the dense states that an earlier call returned, with its compiled programs.

    To continue the synchronisation too, create the group of every stretch but the last with `last_round=False`, and of
    every stretch but the first with the `memory` of the previous group. A stretch ends with a barrier: a trainer that
    is done takes part, with unchanged parameters, in the rounds of trainers that still train, whereas in one long run
    it would have kept training until its own round was due; and a shadow's round in flight is completed. Apart from
    this, two stretches equal one run, bitwise for one trainer with one worker and no or foreground synchronisation.

    Args:
      step: programs of the step, the same object in all stretches.
      states: dense state of each trainer, leaves [1, ...] on its device, with optimizer state and step count; donated.
      tables, streams, synchroniser, workers_per_trainer, hook: as for `train_freely`; `hook` gets the trainer's step
        number within this stretch.

    Returns:
      As `train_freely`, with the figures of this stretch.

    Raises:
      As `train_freely`; ValueError: a state has no leading axis of one replica.

    >>> import jax.numpy as jnp, numpy as np, optax
    >>> from jaxrec import EmbeddingSpec, HostTables, Lookup, Table, sgd
    >>> spec = EmbeddingSpec({'item': Table(9, 2)}, {'item': Lookup('item')})
    >>> loss = lambda params, activations, batch: (activations['item'].sum(-1) + params - batch.label) ** 2
    >>> task = Task(spec, loss, optax.adam(0.1), sgd(0.1))
    >>> step, batch = FreeStep(task), Batch({'item': np.array([3, 8])}, np.ones(2, np.float32))
    >>> tables = HostTables.create(spec, sgd(0.1))
    >>> states = [task.init(jnp.zeros(()), tables).dense for trainer in range(2)]
    >>> for stretch in range(3):
    ...     states, figures = train_stretch(step, states, tables, [[batch] * 5, [batch] * 4])
    >>> [int(state.step) for state in states], figures.steps
    ([15, 12], [5, 4])
    """
    _check(states, tables, streams, workers_per_trainer)
    check_spec(step.spec, tables.spec)
    shared = Shared(step, tables, hook)
    trainers = []
    for number, (dense, stream) in enumerate(zip(states, streams, strict=True)):
        sync = synchroniser(number) if synchroniser is not None else None
        if synchroniser is not None and not isinstance(sync, Synchroniser):
            raise ValueError(f"synchroniser({number}) is a {type(sync).__name__}: return a Shadow or a Foreground.")
        trainers.append(Trainer(shared, number, dense, stream, sync, workers_per_trainer))
    start = time.perf_counter()
    with TableUse(tables).a_run():
        _run(shared, trainers)
    _raise_or_warn(shared, trainers)
    return [trainer.dense for trainer in trainers], _figures(shared, trainers, start)


def _check(states, tables, streams, workers):
    if not streams:
        raise ValueError("there are 0 streams, which must be 1 or more: each is a trainer.")
    whole_number("workers_per_trainer", workers)
    iterators = [id(stream) for stream in streams if isinstance(stream, Iterator)]
    if len(set(iterators)) < len(iterators):
        raise ValueError("two trainers have the same iterator as their stream: give each one of its own.")
    if tables.hosted is None:
        raise ValueError(f"tables is a {type(tables).__name__}: free trainers write in place, which needs HostTables.")
    for number, state in enumerate(states):
        if any(np.shape(leaf)[:1] != (1,) for leaf in jax.tree.leaves((state.params, state.opt_state))):
            raise ValueError(
                f"the state of trainer {number} is not of one replica, whose leaves are [1, ...]: give what an earlier "
                "call has returned, or `task.init(...).dense`."
            )


def _run(shared, trainers):
    """Enter all synchronisers, run all trainers, and leave even after errors."""
    # Ctrl-C ends the loop, but cannot skip the `finally` block.
    with uninterrupted() as deferred:
        try:
            for trainer in trainers:
                # All are entered before any trains, so that errors on entering occur before a row changes.
                trainer.enter()
            for trainer in trainers:
                shared.start(trainer.run, trainer.name)
            # A list, as each call also notices that a trainer is gone.
            while not (deferred or shared.stopped or all([trainer.is_over() for trainer in trainers])):
                time.sleep(_PAUSE_S)
        finally:
            shared.stopped = True  # first, so that nothing new begins
            for trainer in trainers:
                trainer.leave()
            end = time.monotonic() + LEAVE_S
            while shared.at_work() and time.monotonic() < end:
                time.sleep(_PAUSE_S)
            for trainer in trainers:
                trainer.exit()
            if names := shared.at_work():
                why = f"did not end within {LEAVE_S:g} s and were left there: a stream or a hook blocks them."
                warnings.warn(f"{', '.join(names)} {why} They write nothing more.", RuntimeWarning, stacklevel=4)


def _raise_or_warn(shared, trainers):
    """Raise the error that stopped all trainers; warn of the errors of dropped ones."""
    failures = [error for i, error in shared.failures if not trainers[i].survived(error)]
    if all(trainer.failed for trainer in trainers):
        failures = failures or [error for _, error in shared.failures]
    # `PeerLeft` is a consequence of another failure: raise it only if no cause is known.
    causes = [error for error in failures if not isinstance(error, PeerLeft)] or failures
    if causes:
        raise causes[0]
    for trainer, error in shared.failures:
        warnings.warn(f"trainer {trainer} was dropped: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=4)


def _figures(shared, trainers, start):
    rounds = [getattr(trainer.synchroniser, "rounds", 0) for trainer in trainers]
    replicas = [jax.device_get(trainer.dense.params) for trainer in trainers if not trainer.failed]
    return FreeStats(
        examples=sum(trainer.examples for trainer in trainers),
        seconds=max(trainer.end for trainer in trainers) - start,
        steps=[trainer.steps for trainer in trainers],
        rounds=rounds,
        replica_spread=replica_spread(jax.tree.map(lambda *x: np.concatenate(x), *replicas)),
        # Reversed, so that the first of several errors of a trainer is kept.
        failures=dict(reversed(shared.failures)),
    )
