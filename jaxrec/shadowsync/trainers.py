"""Free-running trainers: threads that share host tables and nothing else but what synchronises their dense parameters.

Each of the n trainers has a replica on a device of its own and m Hogwild workers. A worker reads rows and the trainer's
newest parameters without waiting for the other workers, computes the gradients, then applies them to whatever the
parameters and rows are by then: parameters with optax on the newest version, rows with `add`. So a gradient may be
m - 1 steps of its trainer old, and rows as many steps of all trainers as were in flight. Arrays of JAX never change, so
a worker sees parameters of one version: consistent reads, unlike Hogwild on shared memory, which may see torn ones.

A foreground round keeps waiting the one worker whose step it was time at. The trainer's other workers step on, and what
the round has found is folded into the parameters as they are by then, as a shadow's result is.

All threads are daemons: one that is blocked for ever by a stream, a hook or a transport of the user's does not keep the
process alive. When it wakes after training was left, it makes no round and writes nothing.

Reference: Zheng et al., ShadowSync, arXiv 2003.03477 (replication and Hogwild together). Regime: free-running.
Legend: n trainers, m workers a trainer, B batch.
"""

import contextlib
import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.embedding import HostTables, capacity_of, plan
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.interrupts import uninterrupted
from jaxrec.shadowsync.rules import checked_number
from jaxrec.shadowsync.shadow import Foreground, Synchroniser, spread
from jaxrec.shadowsync.transport import Left
from jaxrec.sharding import make_mesh
from jaxrec.step import gradients, init_state, step_dense, step_rows, with_replica, without_replica
from jaxrec.types import Batch, DenseState, TrainState

_END = object()  # of a stream; one that gives None is wrong


class Figures(NamedTuple):
    """What a run of n trainers has done."""

    examples: int
    seconds: float  # until the last worker was done; rounds after it do not count
    examples_per_s: float
    example_level_parallelism: int  # B m n: examples in flight
    steps: list[int]  # of each trainer
    rounds: list[int]
    bytes: list[int]  # sent and received by its synchronisation
    average_sync_gap: list[float]  # steps of the trainer for each round; inf without one
    average_sync_gap_per_worker: list[float]  # the same, divided by m
    spread: float  # root mean square distance of the replicas from their mean, at the end, without dropped ones
    failures: dict[int, BaseException]  # why a trainer was dropped; always empty if a failure stops all


def train_freely(
    spec: EmbeddingSpec,
    loss: Callable,
    optimizer,
    row_optimizer,
    params,
    tables: HostTables,
    streams: Sequence[Iterable[Batch]],
    synchroniser: Callable[[int], Any] | None = None,
    workers_per_trainer: int = 1,
    devices=None,
    hook: Callable[[int, int, dict], None] | None = None,
    leave_timeout_s: float = 10.0,
) -> tuple[list[DenseState], Figures]:
    """Trains n = len(streams) trainers until their streams are exhausted.

    A failing trainer stops all, unless its synchroniser's transport has `on_failure='drop'`: then it is dropped with a
    warning, its error is in `Figures.failures`, and the others go on to their ends. So is one that the transport has
    dropped because it was overdue; a thread of it that is blocked is left behind. Ctrl-C, and anything else that is
    no `Exception`, stops all in either case.

    Args:
      spec, loss, optimizer, row_optimizer: as for `make_train_step`.
      params: initial dense parameters, the same for every trainer.
      tables: shared by all; written in place.
      streams: the batches of each trainer, of one size; its workers take them in turns.
      synchroniser: trainer -> `Shadow` or `Foreground`, not entered yet; none if None. k and the gap count steps of a
        trainer.
      workers_per_trainer: m.
      devices: trainer i trains on device i modulo their number; all local devices if None.
      hook: (trainer, step, metrics on the device) after every step, on the worker's thread.
      leave_timeout_s: seconds that leaving waits for threads that are blocked by a stream, a hook or a transport;
        another Ctrl-C ends the wait. Those that have not ended by then are left behind, and named.

    Returns:
      The dense state of every trainer, leaves with a leading axis of one replica (of a dropped trainer as it was), and
      the figures.

    Raises:
      ValueError: no streams, no list of them, or one iterator for two trainers; workers_per_trainer < 1; tables that
        are not on the host; a synchroniser that is no function, or returns no synchroniser; a hook that is no function;
        leave_timeout_s is not a number of at least 0.
      KeyboardInterrupt: after Ctrl-C; all threads have ended by then, but for those that are left behind.
      Exception: the first of any thread, with trainer and worker named, and likewise all threads have ended; of the
        trainer that failed, not of those that it left.
    """
    _check(streams, tables, synchroniser, workers_per_trainer, leave_timeout_s, hook)
    devices = jax.local_devices() if devices is None else devices
    shared = _Shared(spec, loss, optimizer, row_optimizer, tables, hook)
    trainers = []
    for number, stream in enumerate(streams):
        state = init_state(params, optimizer, tables, make_mesh(devices=[devices[number % len(devices)]]))
        sync = _made(synchroniser, number) if synchroniser else None
        trainers.append(_Trainer(shared, number, state.dense, stream, sync, workers_per_trainer))
    start = time.perf_counter()
    _run(shared, trainers, leave_timeout_s)
    _raise_or_warn(shared, trainers)
    return [trainer.dense for trainer in trainers], _figures(shared, trainers, start, workers_per_trainer)


def _made(synchroniser, number):
    sync = synchroniser(number)
    if not isinstance(sync, Synchroniser):
        raise ValueError(
            f"the function given as synchroniser has returned a {type(sync).__name__} for trainer {number}: return a "
            "Shadow or a Foreground, as lambda i: Shadow(rule, transport, i), or give synchroniser=None."
        )
    return sync


def _check(streams, tables, synchroniser, workers, leave_timeout_s, hook):
    if not isinstance(streams, Sequence) or isinstance(streams, str):
        raise ValueError(f"streams is a {type(streams).__name__}: give a list with one stream for each trainer.")
    if not streams:
        raise ValueError("there are 0 streams, which must be 1 or more: each is a trainer.")
    checked_number("workers_per_trainer", workers, "1 or more", lambda m: m >= 1, whole=True)
    iterators = [id(stream) for stream in streams if isinstance(stream, Iterator)]
    if len(set(iterators)) < len(iterators):
        raise ValueError("two trainers have the same iterator as their stream: give each one of its own.")
    if not isinstance(tables, HostTables):
        raise ValueError(f"tables is a {type(tables).__name__}: free trainers write in place, which needs HostTables.")
    if synchroniser is not None and not callable(synchroniser):
        kind = type(synchroniser).__name__
        raise ValueError(
            f"synchroniser is a {kind}: give a function of the trainer's number, as lambda i: {kind}(..., i)."
        )
    checked_number(
        "leave_timeout_s", leave_timeout_s, "a number of seconds, 0 or more", lambda s: 0 <= s < float("inf")
    )
    if hook is not None and not callable(hook):
        raise ValueError(f"hook is a {type(hook).__name__}: give a function (trainer, step, metrics), or None.")


def _run(shared, trainers, leave_timeout_s):
    """Enters all synchronisers, runs all trainers and leaves, whatever comes."""
    try:
        try:
            for trainer in trainers:
                trainer.enter()
            with uninterrupted() as asked:  # Ctrl-C ends the loop, and can at no instant skip the leaving
                try:
                    for trainer in trainers:
                        shared.start(trainer.run, trainer.name)
                    while not (asked or shared.stopped or all(trainer.is_over() for trainer in trainers)):
                        _pause()
                finally:
                    _leave(shared, trainers)
        finally:
            with uninterrupted() as asked:
                _leave(shared, trainers)  # of trainers that could not all be entered
                _wait(shared, leave_timeout_s, asked)
    except BaseException as error:
        if shared.running:
            error.add_note(_left_behind(shared, leave_timeout_s))
        raise
    if shared.running:
        shared.notes.append(_left_behind(shared, leave_timeout_s))


def _leave(shared, trainers):
    """Begins to leave, once: nobody begins anything any more, who waits wakes, and synchronisers are left."""
    shared.stopped = True  # first
    if shared.left_at is not None:
        return
    shared.left_at = time.monotonic()
    for trainer in trainers:
        trainer.leave()
    for trainer in trainers:  # all at once, as a transport may block each
        shared.start(trainer.exit, f"synchronisation-{trainer.number}")


def _wait(shared, seconds, asked):
    """Until all threads have ended, but not longer, nor longer than until Ctrl-C comes again."""
    while shared.running and not asked and time.monotonic() < shared.left_at + seconds:
        _pause()
    for thread in shared.threads:
        if thread.name not in shared.running:
            thread.join()  # it has nothing more to do


def _pause():
    # No `join` and no `Event.wait`: Ctrl-C in the one makes Python before 3.13 take a thread at work for ended, and in
    # the other can leave its lock held.
    time.sleep(0.005)


def _left_behind(shared, seconds):
    names, waited = ", ".join(sorted(shared.running)), time.monotonic() - shared.left_at
    if waited < seconds:
        return f"{names} had not ended after {waited:.2g} s, when Ctrl-C came again. They write nothing more."
    return (
        f"{names} did not end within {seconds:g} s and were left behind: a stream, a hook or a transport blocks them. "
        "They write nothing more."
    )


def _raise_or_warn(shared, trainers):
    """Raises what has stopped all; what dropped trainers have raised is a warning, and theirs only."""
    failures = [error for i, error in shared.failures if not trainers[i].survived(error)]
    if all(trainer.failed for trainer in trainers):
        failures = failures or [error for _, error in shared.failures]
    causes = [error for error in failures if not isinstance(error, Left)] or failures
    if causes:
        for note in shared.notes:
            causes[0].add_note(note)
        raise causes[0]
    for trainer, error in shared.failures:
        shared.notes.append(f"trainer {trainer} was dropped: {type(error).__name__}: {error}")
    for note in shared.notes:
        warnings.warn(note, RuntimeWarning, stacklevel=3)


class _Shared:
    """What all trainers of a run have in common."""

    def __init__(self, spec, loss, optimizer, row_optimizer, tables, hook):
        self.spec, self.tables, self.hook = spec, tables, hook
        self.lock = threading.Lock()
        # Flags and sets of Python's own, read and written without a lock: Ctrl-C must not leave one held.
        self.stopped, self.left_at = False, None
        self.running: set[str] = set()  # names of threads
        self.threads: list[threading.Thread] = []  # all that were started
        self.failures: list[tuple[int, BaseException]] = []  # trainer, error; in the order of time
        self.notes: list[str] = []
        self.capacity: dict[str, int] | None = None

        def differentiate(dense, rows, plan, batch):
            params, values = without_replica(dense).params, {name: stack.value for name, stack in rows.items()}
            gradient, by_rows, metrics = gradients(params, values, plan, batch, spec=spec, loss=loss)
            return gradient, step_rows(rows, by_rows, dense.step, row_optimizer), metrics

        def apply(dense, gradient):
            return with_replica(step_dense(without_replica(dense), gradient, optimizer))

        self.differentiate, self.apply = jax.jit(differentiate), jax.jit(apply, donate_argnums=0)
        self.copy = jax.jit(functools.partial(jax.tree.map, jnp.copy))

    def plan(self, ids):
        """The plan of a batch; capacities only grow, and all workers share them, so that few shapes are compiled."""
        plans = plan(self.spec, ids, self.capacity)
        with self.lock:
            known = self.capacity or {}
            self.capacity = {name: max(rows, known.get(name, 0)) for name, rows in capacity_of(plans).items()}
        return plans

    def start(self, function, name) -> threading.Thread:
        """A daemon thread that is in `running` until it ends."""

        def run():
            try:
                function()
            finally:
                self.running.discard(name)

        self.running.add(name)
        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread to give
            self.running.discard(name)
            raise
        self.threads.append(thread)
        return thread


class _Trainer:
    """One replica and its workers. The lock is held for dispatch only, never while a program or a round runs."""

    def __init__(self, shared, number, dense, stream, synchroniser, workers):
        self.shared, self.number, self.dense, self.synchroniser = shared, number, dense, synchroniser
        self.name, self.drops = f"trainer-{number}", getattr(synchroniser, "on_failure", "raise") == "drop"
        self.stream, self.reading = iter(stream), threading.Lock()
        self.lock, self.turns = threading.Lock(), threading.Lock()  # of the parameters; of foreground rounds
        self.workers, self.steps, self.examples, self.batch_size = workers, 0, 0, 0
        self.entered = self.failed = self.ended = False
        self.end = time.perf_counter()  # of the last step

    @property
    def over(self) -> bool:
        """Whether nothing may be begun or written any more."""
        return self.shared.stopped or self.failed

    def enter(self) -> None:
        """Enters the synchroniser."""
        if self.synchroniser is not None:
            self.synchroniser.__enter__()
            self.entered = True

    def is_over(self) -> bool:
        """Whether it has come to its end, or failed; it has failed when the others go on without it."""
        if not self.ended and not self.failed and self.entered and (why := self.synchroniser.why_gone):
            self._stop(Left(f"trainer {self.number} {why}"), f"of trainer {self.number}")
        return self.ended or self.failed

    def exit(self) -> None:
        """Leaves the synchroniser: what its thread has raised is heard now, at the latest."""
        if not self.entered:
            return
        try:
            self.synchroniser.__exit__(None, None, None)
        except Exception as error:
            echo = self.failed and isinstance(error, Left)  # its thread has heard that this trainer was left
            if not echo and not any(error is known for _, known in self.shared.failures):
                self._fail(error, f"in the synchronisation of trainer {self.number}")

    def leave(self, error: BaseException | None = None) -> None:
        """Wakes those who wait for this trainer, or in it, if it has not come to its end."""
        if not self.entered or self.ended:
            return
        try:
            self.synchroniser.leave(error)
        except Exception as failure:  # of a transport of the user's; the others are still to be left
            self._fail(failure, f"in leaving the transport of trainer {self.number}")

    def run(self):
        """Trains to the end of the stream, then takes part in rounds until all trainers are done."""
        try:
            names = [f"{self.name}-worker-{worker}" for worker in range(1, self.workers)]
            threads = [
                self.shared.start(functools.partial(self._work, worker), name) for worker, name in enumerate(names, 1)
            ]
            self._work(0)
            for thread in threads:
                thread.join()
            self.end = time.perf_counter()
            if not self.over and self.synchroniser is not None:
                self.dense = self.synchroniser.finish(TrainState(self.dense, self.shared.tables)).dense
            self.ended = not self.over
        except BaseException as error:
            self._stop(error, f"in trainer {self.number}")

    def _work(self, worker):
        try:
            while not self.over:
                with self.reading:
                    batch = _END if self.over else next(self.stream, _END)
                if batch is _END or self.over:
                    return
                if not hasattr(batch, "ids"):
                    raise ValueError(f"a stream gives Batch after Batch, and this has given a {type(batch).__name__}.")
                self._step(batch)
        except BaseException as error:
            self._stop(error, f"in worker {worker} of trainer {self.number}, near its step {self.steps}")

    def _stop(self, error, note):
        """Keeps the error, unless it only says that training is over, and wakes those who wait for this trainer."""
        if not self.over:
            self._fail(error, note)
        self.leave(error)

    def _fail(self, error, note):
        with contextlib.suppress(AttributeError):  # of an exception that takes no notes
            error.add_note(note)
        self.shared.failures.append((self.number, error))
        self.failed = True
        if not self.survived(error):
            self.shared.stopped = True

    def survived(self, error) -> bool:
        """Whether the others go on without this trainer after such an error."""
        return self.drops and isinstance(error, Exception)

    def _step(self, batch):
        shared = self.shared
        plans = shared.plan(batch.ids)
        rows = shared.tables.read(plans)
        with self.lock:  # a later step donates these parameters; once dispatched, the program keeps them
            gradient, new, metrics = shared.differentiate(self.dense, rows, plans, batch)
        new = jax.tree.map(np.asarray, new)  # waits for the program, other workers go on
        if self.over:  # training was left meanwhile, and its tables may be somebody else's by now
            return
        shared.tables.add(plans, new, rows)
        with self.lock:
            self.dense = shared.apply(self.dense, gradient)
            is_time = self._exchange()
            self.steps += 1
            self.examples += int(np.count_nonzero(batch.weight))
            self.batch_size, step = len(batch.label), self.steps
        if is_time:
            self._round()
        if shared.hook is not None:
            shared.hook(self.number, step, metrics)

    def _exchange(self) -> bool:
        """Under the lock: a shadow's exchange; of a foreground only whether it is time for a round."""
        if isinstance(self.synchroniser, Foreground):
            return self.synchroniser.due()
        if self.synchroniser is not None:
            self.dense = self.synchroniser.exchange(TrainState(self.dense, self.shared.tables)).dense
        return False

    def _round(self):
        """A foreground round: it keeps this worker, and those only whose own round it is time for."""
        with self.turns:
            with self.lock:
                before = self.shared.copy(self.dense.params)  # a later step donates them
            fold = self.synchroniser.meet(before)
            with self.lock:
                self.dense = self.dense._replace(params=fold(self.dense.params))


def _figures(shared, trainers, start, workers):
    seconds = max(trainer.end for trainer in trainers) - start
    examples, n = sum(trainer.examples for trainer in trainers), len(trainers)
    count = lambda name: [getattr(trainer.synchroniser, name, 0) for trainer in trainers]
    gaps = [
        trainer.steps / rounds if rounds else float("inf")
        for trainer, rounds in zip(trainers, count("rounds"), strict=True)
    ]
    replicas = [jax.device_get(trainer.dense.params) for trainer in trainers if not trainer.failed]
    return Figures(
        examples, seconds, examples / seconds, max(trainer.batch_size for trainer in trainers) * workers * n,
        [trainer.steps for trainer in trainers], count("rounds"), count("bytes"),
        gaps, [gap / workers for gap in gaps], spread(jax.tree.map(lambda *x: np.concatenate(x), *replicas)),
        {number: error for number, error in reversed(shared.failures)},
    )  # fmt: skip
