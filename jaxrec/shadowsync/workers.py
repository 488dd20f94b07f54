"""Free-running trainers: threads that share host tables, and what synchronises their parameters.

Each of the n trainers has a replica on a device of its own and m Hogwild workers. A worker reads
rows and the trainer's newest parameters without waiting for the other workers, computes the
gradients, then applies them to whatever the parameters and rows are by then: parameters with optax
on the newest version, rows with `add`. So a gradient may be m - 1 steps of its trainer old, and
rows as many steps of all trainers as were in flight. Arrays of JAX never change, so a worker sees
parameters of one version: consistent reads, unlike Hogwild on shared memory, which may see torn
ones.

A foreground round keeps waiting the one worker whose step it was time at. The trainer's other
workers step on, and what the round has found is folded into the parameters as they are by then, as
a shadow's result is.

All threads are daemons: one that a stream or a hook of the user's blocks for ever does not keep the
process alive. When it wakes after training was left, it makes no round and writes nothing.

Reference: Zheng et al., ShadowSync, arXiv 2003.03477 (replication and Hogwild together). Regime:
free-running. Legend: n trainers, m workers per trainer, B batch.
"""

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
from jaxrec.embedding import HostTables, capacity_of, plan
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.interrupts import uninterrupted
from jaxrec.losses import check_rng
from jaxrec.shadowsync.params import replica_spread
from jaxrec.shadowsync.synchroniser import Foreground, Synchroniser
from jaxrec.shadowsync.transport import PeerLeft
from jaxrec.sharding import make_mesh
from jaxrec.step import gradients, init_state, step_dense, step_rows, with_replica, without_replica
from jaxrec.types import Array, Batch, DenseState, Plan, PyTree, RowOptimizer, TrainState

_END = object()  # of a stream; one that gives None is wrong
LEAVE_S = 10.0  # how long leaving waits for threads that a stream or a hook blocks
_PAUSE_S = 0.005  # between two looks at the threads


class FreeStep:
    """The step of free trainers: its programs, which are compiled once for all stretches of a training.

    Args:
      spec, loss, optimizer, row_optimizer: as for `make_train_step`; but the loss may neither want a
        key nor return variables, as gradients are applied in any order.

    Attributes:
      capacity: {stack: U} of the plans so far. They only grow, and all workers share them, so that
        few shapes are compiled.

    Raises:
      ValueError: a loss that wants a key.
    """

    def __init__(
        self,
        spec: EmbeddingSpec,
        loss: Callable,
        optimizer: optax.GradientTransformation,
        row_optimizer: RowOptimizer,
    ):
        check_rng(loss, keyed=False)
        self.spec, self.optimizer = spec, optimizer
        self.capacity: dict[str, int] | None = None
        self._lock = threading.Lock()  # of the capacities

        def differentiate(dense, rows, plans, batch):
            params = without_replica(dense).params
            values = {name: stack.value for name, stack in rows.items()}
            gradient, by_rows, metrics = gradients(params, values, plans, batch, spec=spec, loss=loss)
            return gradient, step_rows(rows, by_rows, dense.step, row_optimizer), metrics

        def apply(dense, gradient):
            return with_replica(step_dense(without_replica(dense), gradient, optimizer))

        self.differentiate, self.apply = jax.jit(differentiate), jax.jit(apply, donate_argnums=0)
        self.copy = jax.jit(functools.partial(jax.tree.map, jnp.copy))

    def plan(self, ids: dict[str, Array]) -> dict[str, Plan]:
        """The plans of a batch."""
        plans = plan(self.spec, ids, self.capacity)
        with self._lock:
            known = self.capacity or {}
            self.capacity = {name: max(rows, known.get(name, 0)) for name, rows in capacity_of(plans).items()}
        return plans


class Shared:
    """What all trainers of a run have in common: step, tables, threads, and what went wrong.

    Flags and lists of Python's own are read and written without a lock.
    """

    def __init__(self, step: FreeStep, tables: HostTables, hook: Callable[[int, int, dict], None] | None):
        self.step, self.tables, self.hook = step, tables, hook
        self.stopped = False
        self.threads: list[threading.Thread] = []
        self.failures: list[tuple[int, BaseException]] = []  # trainer, error; in the order of time

    def start(self, function: Callable[[], None], name: str) -> threading.Thread:
        """A daemon thread."""
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        self.threads.append(thread)
        return thread

    def at_work(self) -> list[str]:
        """The names of the threads that have not ended."""
        return sorted(thread.name for thread in self.threads if thread.is_alive())


class Trainer:
    """One replica and its workers."""

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
        # Of the parameters; held for dispatch only, never while a program or a round runs.
        self.lock = threading.Lock()
        self.turns = threading.Lock()  # of foreground rounds
        self.steps = self.examples = self.batch_size = 0
        self.entered: Synchroniser | None = None
        self.failed = self.ended = False
        self.end = time.perf_counter()  # of the last step

    @property
    def over(self) -> bool:
        """Whether nothing may be begun or written any more."""
        return self.shared.stopped or self.failed

    def enter(self) -> None:
        """Enters the synchroniser."""
        if self.synchroniser is not None:
            self.entered = self.synchroniser.__enter__()

    def is_over(self) -> bool:
        """Whether it has come to its end, or failed, as when the others go on without it."""
        if not self.ended and not self.failed and self.entered and (why := self.entered.why_gone):
            self._stop(PeerLeft(f"trainer {self.number} {why}"), f"of trainer {self.number}")
        return self.ended or self.failed

    def leave(self, error: BaseException | None = None) -> None:
        """Wakes the threads that wait for this trainer, or in it, if it has not come to its end."""
        if self.entered is None or self.ended:
            return
        try:
            self.entered.leave(error)
        except Exception as failure:  # of a transport of the user's; the others are still to be left
            self._fail(failure, f"in leaving the transport of trainer {self.number}")

    def exit(self) -> None:
        """Leaves the synchroniser: what its thread has raised is heard now, at the latest."""
        if self.entered is None:
            return
        own = next((error for number, error in self.shared.failures if number == self.number), None)
        try:
            self.entered.__exit__(None, own, None)
        except Exception as error:
            self._fail(error, f"in the synchronisation of trainer {self.number}")

    def run(self) -> None:
        """Trains to the end of the stream, then makes rounds until all trainers are done."""
        try:
            self._train()
            self.end = time.perf_counter()
            if not self.over and self.synchroniser is not None:
                self.dense = self.synchroniser.finish(TrainState(self.dense, self.shared.tables)).dense
            # A trainer that was left while it finished has not come to its end.
            self.ended = not self.over
        except BaseException as error:
            self._stop(error, f"in trainer {self.number}")

    def survived(self, error: BaseException) -> bool:
        """Whether the others go on without this trainer after such an error."""
        return self.drops and isinstance(error, Exception)

    def _train(self):
        """All workers; the first is this thread."""
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
                    # Looked at again: training may have been left while another worker had the
                    # stream.
                    batch = _END if self.over else next(self.stream, _END)
                if batch is _END or self.over:
                    return
                self._step(batch)
        except BaseException as error:
            self._stop(error, f"in worker {worker} of trainer {self.number}, near its step {self.steps}")

    def _stop(self, error, note):
        """Keeps the error, unless training is over, and wakes the threads that wait for this trainer."""
        if not self.over:
            self._fail(error, note)
        self.leave(error)

    def _fail(self, error, note):
        error.add_note(note)
        # The list before the flags: where a flag is seen, the error is found.
        self.shared.failures.append((self.number, error))
        self.failed = True
        if not self.survived(error):
            self.shared.stopped = True

    def _step(self, batch):
        shared = self.shared
        plans = shared.step.plan(batch.ids)
        # Without any lock: rows of other trainers' updates may come in between, as Hogwild has it.
        rows = shared.tables.read(plans)
        # A later step donates these parameters; once dispatched, the program keeps them.
        with self.lock:
            gradient, new, metrics = shared.step.differentiate(self.dense, rows, plans, batch)
        new = jax.tree.map(np.asarray, new)  # waits for the program, other workers go on
        if self.over:  # training was left meanwhile, and its tables may be in other use by now
            return
        # Added, not put: what others have written between this read and this write stays.
        shared.tables.add(plans, new, rows)
        with self.lock:
            self.dense = shared.step.apply(self.dense, gradient)
            # Before the exchange, which may raise: the step is done.
            self.steps += 1
            self.examples += int(np.count_nonzero(batch.weight))
            self.batch_size, step = len(batch.label), self.steps
            # Under the same lock as the step: an exchange sees parameters between two steps.
            due = self._exchange()
        # Without the lock: the other workers step on during a round.
        if due is not None:
            self._round(due)
        if shared.hook is not None:
            shared.hook(self.number, step, metrics)

    def _exchange(self) -> Foreground | None:
        """Under the lock: a shadow's exchange; the foreground if it is time for a round of it."""
        sync = self.synchroniser
        if isinstance(sync, Foreground):
            return sync if sync.due() else None
        if sync is not None:
            self.dense = sync.exchange(TrainState(self.dense, self.shared.tables)).dense
        return None

    def _round(self, foreground):
        """A foreground round: it keeps this worker, and those only whose own round is due."""
        with self.turns:
            with self.lock:
                before = self.shared.step.copy(self.dense.params)  # a later step donates them
            # Without the lock of the parameters, as it waits for the other trainers.
            fold = foreground.meet(before)
            with self.lock:
                # Folded into what they are by now: other workers have stepped on during the round.
                self.dense = self.dense._replace(params=fold(self.dense.params))


class Figures(NamedTuple):
    """What a run of n trainers has done."""

    examples: int
    seconds: float  # until the last worker was done; rounds after it do not count
    examples_per_s: float
    example_level_parallelism: int  # B m n: examples in flight
    steps: list[int]  # of each trainer
    rounds: list[int]
    bytes: list[int]  # sent and received by its synchronisation
    average_sync_gap: list[float]  # steps of the trainer per round; inf without one
    average_sync_gap_per_worker: list[float]  # the same, divided by m
    replica_spread: float  # of the replicas at the end, without dropped ones
    # Why a trainer was dropped; always empty if a failure stops all.
    failures: dict[int, BaseException]


def train_freely(
    spec: EmbeddingSpec,
    loss: Callable,
    optimizer: optax.GradientTransformation,
    row_optimizer: RowOptimizer,
    params: PyTree,
    tables: HostTables,
    streams: Sequence[Iterable[Batch]],
    synchroniser: Callable[[int], Synchroniser] | None = None,
    workers_per_trainer: int = 1,
    devices: Sequence[jax.Device] | None = None,
    hook: Callable[[int, int, dict], None] | None = None,
) -> tuple[list[DenseState], Figures]:
    """Trains n = len(streams) trainers until their streams are exhausted.

    A failing trainer stops all, unless its group (its synchroniser's transport) has
    `on_failure='drop'`: then it is dropped with a warning, its error is in `Figures.failures`, and
    the others go on to their ends. So is one that the group has dropped because it was overdue. Ctrl-C,
    and anything else that is no `Exception`, stops all in either case. A thread that a stream or a hook
    blocks for 10 s after the end is left there, with a warning that names it.

    Args:
      spec, loss, optimizer, row_optimizer: as for `make_train_step`; but the loss may neither want a
        key nor return variables, as gradients are applied in any order.
      params: initial dense parameters, the same for every trainer.
      tables: shared by all; written in place.
      streams: the batches of each trainer, of one size; its workers take them in turns.
      synchroniser: trainer -> what synchronises it, not entered yet: `group.trainer` of a
        `SyncGroup`; none if None. `every_steps` and the gap count steps of a trainer.
      workers_per_trainer: m.
      devices: trainer i trains on device i modulo their number; all local devices if None.
      hook: (trainer, step, metrics on the device) after every step, on the worker's thread.

    Returns:
      The dense state of every trainer, leaves with a leading axis of one replica (of a dropped
      trainer as it was), and the figures.

    Raises:
      ValueError: no streams, or one iterator for two trainers; workers_per_trainer < 1; tables that
        are not on the host; a synchroniser that returns none; a loss that wants a key or returns
        variables.
      KeyboardInterrupt: after Ctrl-C, when all threads have ended.
      Exception: the first of any thread, with trainer and worker named, when all threads have ended;
        of the trainer that failed, not of those that it left.
    """
    step = FreeStep(spec, loss, optimizer, row_optimizer)
    devices = jax.local_devices() if devices is None else devices
    meshes = [make_mesh(devices=[devices[number % len(devices)]]) for number in range(len(streams))]
    states = [init_state(params, optimizer, tables, mesh).dense for mesh in meshes]
    return train_stretch(step, states, tables, streams, synchroniser, workers_per_trainer, hook)


def train_stretch(
    step: FreeStep,
    states: Sequence[DenseState],
    tables: HostTables,
    streams: Sequence[Iterable[Batch]],
    synchroniser: Callable[[int], Synchroniser] | None = None,
    workers_per_trainer: int = 1,
    hook: Callable[[int, int, dict], None] | None = None,
) -> tuple[list[DenseState], Figures]:
    """Trains on from the dense states that an earlier call has returned, with the programs that it has compiled.

    What a group knows goes on with `SyncGroup(..., last_round=False)` in each stretch but the last, and the `memory`
    of the one before in each but the first. A stretch ends by a barrier of all trainers: a trainer that is done takes
    part in the rounds of those that still train, with its parameters as they are, where in one long run it would have
    trained on until its own round was due. Of a round in a shadow the end is waited for. Else two stretches are one
    run: bit for bit with one trainer of one worker that nothing synchronises, or that the foreground does.

    Args:
      step: the same in all stretches.
      states: of each trainer, leaves [1, ...] on its device, with its optimizer state and its count of steps; they are
        donated.
      tables, streams, synchroniser, workers_per_trainer, hook: as for `train_freely`; `hook` is told the steps of the
        trainer in this stretch.

    Returns:
      As `train_freely`, the figures of this stretch.

    Raises:
      As `train_freely`; ValueError: a state without an axis of one replica.

    >>> import jax.numpy as jnp, numpy as np, optax
    >>> from jaxrec.embedding import HostTables, Lookup, Table, sgd
    >>> spec = EmbeddingSpec({'item': Table(9, 2)}, {'item': Lookup('item')})
    >>> loss = lambda params, activations, batch: (activations['item'].sum(-1) + params - batch.label) ** 2
    >>> step, tables = FreeStep(spec, loss, optax.adam(0.1), sgd(0.1)), HostTables.create(spec, sgd(0.1))
    >>> ones = np.ones(2, np.float32)
    >>> batch = Batch({'item': np.array([3, 8])}, np.zeros((2, 0), np.float32), ones, ones)
    >>> states = [init_state(jnp.zeros(()), optax.adam(0.1), tables).dense for trainer in range(2)]
    >>> for stretch in range(3):
    ...     states, figures = train_stretch(step, states, tables, [[batch] * 5, [batch] * 4])
    >>> [int(state.step) for state in states], figures.steps
    ([15, 12], [5, 4])
    """
    _check(states, tables, streams, workers_per_trainer)
    shared = Shared(step, tables, hook)
    trainers = []
    for number, (dense, stream) in enumerate(zip(states, streams, strict=True)):
        sync = synchroniser(number) if synchroniser is not None else None
        if synchroniser is not None and not isinstance(sync, Synchroniser):
            raise ValueError(f"synchroniser({number}) is a {type(sync).__name__}: return a Shadow or a Foreground.")
        trainers.append(Trainer(shared, number, dense, stream, sync, workers_per_trainer))
    start = time.perf_counter()
    _run(shared, trainers)
    _raise_or_warn(shared, trainers)
    return [trainer.dense for trainer in trainers], _figures(shared, trainers, start, workers_per_trainer)


def _check(states, tables, streams, workers):
    if not streams:
        raise ValueError("there are 0 streams, which must be 1 or more: each is a trainer.")
    whole_number("workers_per_trainer", workers)
    iterators = [id(stream) for stream in streams if isinstance(stream, Iterator)]
    if len(set(iterators)) < len(iterators):
        raise ValueError("two trainers have the same iterator as their stream: give each one of its own.")
    if not getattr(tables, "in_place", False):
        raise ValueError(f"tables is a {type(tables).__name__}: free trainers write in place, which needs HostTables.")
    for number, state in enumerate(states):
        if any(np.shape(leaf)[:1] != (1,) for leaf in jax.tree.leaves((state.params, state.opt_state))):
            raise ValueError(
                f"the state of trainer {number} is not of one replica, whose leaves are [1, ...]: give what an earlier "
                "call has returned, or `init_state(...).dense`."
            )


def _run(shared, trainers):
    """Enters all synchronisers, runs all trainers and leaves, whatever comes."""
    # Ctrl-C ends the loop, and can at no instant skip the leaving.
    with uninterrupted() as asked:
        try:
            for trainer in trainers:
                # All of them before one trains: what cannot be entered is known before a row changes.
                trainer.enter()
            for trainer in trainers:
                shared.start(trainer.run, trainer.name)
            while not (asked or shared.stopped or all(trainer.is_over() for trainer in trainers)):
                time.sleep(_PAUSE_S)
        finally:
            shared.stopped = True  # first: nothing is begun any more
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
    """Raises what has stopped all; what dropped trainers have raised is a warning."""
    failures = [error for i, error in shared.failures if not trainers[i].survived(error)]
    if all(trainer.failed for trainer in trainers):
        failures = failures or [error for _, error in shared.failures]
    # `PeerLeft` is what the others hear of a failure: it is raised where nothing else is known.
    causes = [error for error in failures if not isinstance(error, PeerLeft)] or failures
    if causes:
        raise causes[0]
    for trainer, error in shared.failures:
        warnings.warn(f"trainer {trainer} was dropped: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=4)


def _figures(shared, trainers, start, workers):
    seconds = max(trainer.end for trainer in trainers) - start
    examples = sum(trainer.examples for trainer in trainers)
    batch_size = max(trainer.batch_size for trainer in trainers)
    syncs = [trainer.synchroniser for trainer in trainers]
    rounds = [getattr(sync, "rounds", 0) for sync in syncs]
    gaps = [t.steps / number if number else float("inf") for t, number in zip(trainers, rounds, strict=True)]
    replicas = [jax.device_get(trainer.dense.params) for trainer in trainers if not trainer.failed]
    return Figures(
        examples=examples,
        seconds=seconds,
        examples_per_s=examples / seconds,
        example_level_parallelism=batch_size * workers * len(trainers),
        steps=[trainer.steps for trainer in trainers],
        rounds=rounds,
        bytes=[getattr(sync, "bytes", 0) for sync in syncs],
        average_sync_gap=gaps,
        average_sync_gap_per_worker=[gap / workers for gap in gaps],
        replica_spread=replica_spread(jax.tree.map(lambda *x: np.concatenate(x), *replicas)),
        # Reversed, so that of two errors of one trainer the first stays.
        failures=dict(reversed(shared.failures)),
    )
