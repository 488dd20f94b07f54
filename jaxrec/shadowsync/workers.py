"""One trainer that runs freely: a replica on its device, Hogwild workers and a synchroniser.

All threads are daemons: one that is blocked for ever by a stream, a hook or a transport of the
user's does not keep the process alive. When it wakes after training was left, it makes no round and
writes nothing.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrec.embedding import HostTables, capacity_of, plan
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.losses import check_draws_nothing
from jaxrec.shadowsync.meeting import Left
from jaxrec.shadowsync.synchroniser import Foreground, Synchroniser
from jaxrec.step import gradients, step_dense, step_rows, with_replica, without_replica
from jaxrec.types import Array, Batch, DenseState, Plan, RowOptimizer, TrainState

_END = object()  # of a stream; one that gives None is wrong


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
        check_draws_nothing(loss, "free trainers apply gradients in any order, and give none")
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

    Flags, sets and lists of Python's own are read and written without a lock: Ctrl-C must not leave
    one held.
    """

    def __init__(self, step: FreeStep, tables: HostTables, hook: Callable[[int, int, dict], None] | None):
        self.step, self.tables, self.hook = step, tables, hook
        self.stopped = False
        self.left_at: float | None = None
        self.running: set[str] = set()  # names of threads
        self.threads: list[threading.Thread] = []  # all that were started
        self.failures: list[tuple[int, BaseException]] = []  # trainer, error; in the order of time
        self.notes: list[str] = []

    def start(self, function: Callable[[], None], name: str) -> threading.Thread:
        """A daemon thread that is in `running` until it ends."""

        def run():
            try:
                function()
            finally:
                self.running.discard(name)

        # Before it starts, so that nobody takes all threads for ended while it comes to life.
        self.running.add(name)
        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread to give
            self.running.discard(name)
            raise
        self.threads.append(thread)
        return thread


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
            self._stop(Left(f"trainer {self.number} {why}"), f"of trainer {self.number}")
        return self.ended or self.failed

    def leave(self, error: BaseException | None = None) -> None:
        """Wakes those who wait for this trainer, or in it, if it has not come to its end."""
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
        try:
            self.entered.__exit__(None, None, None)
        except Exception as error:
            # Its thread has heard that this trainer was left.
            echo = self.failed and isinstance(error, Left)
            if not echo and not any(error is known for _, known in self.shared.failures):
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
                if not hasattr(batch, "ids"):
                    raise ValueError(f"a stream gives Batch after Batch, and this has given a {type(batch).__name__}.")
                self._step(batch)
        except BaseException as error:
            self._stop(error, f"in worker {worker} of trainer {self.number}, near its step {self.steps}")

    def _stop(self, error, note):
        """Keeps the error, unless training is over, and wakes those who wait for this trainer."""
        if not self.over:
            self._fail(error, note)
        self.leave(error)

    def _fail(self, error, note):
        with contextlib.suppress(AttributeError):  # of an exception that takes no notes
            error.add_note(note)
        # The list before the flags: who sees a flag finds the error.
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
        if self.over:  # training was left meanwhile, and its tables may be somebody else's by now
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
        """Under the lock: a shadow's exchange; returns a foreground that it is time for a round
        of."""
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
