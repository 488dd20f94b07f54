"""Free-running trainers: threads that share host tables and nothing else but what synchronises their dense parameters.

Each of the n trainers has a replica on a device of its own and m Hogwild workers. A worker reads rows and the trainer's
newest parameters without waiting for the other workers, computes the gradients, then applies them to whatever the
parameters and rows are by then: parameters with optax on the newest version, rows with `add`. So a gradient may be
m - 1 steps of its trainer old, and rows as many steps of all trainers as were in flight. Arrays of JAX never change, so
a worker sees parameters of one version: consistent reads, unlike Hogwild on shared memory, which may see torn ones.

Reference: Zheng et al., ShadowSync, arXiv 2003.03477 (replication and Hogwild together). Regime: free-running.
Legend: n trainers, m workers a trainer, B batch.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrec.embedding import HostTables, capacity_of, plan
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.shadowsync.shadow import spread
from jaxrec.sharding import make_mesh
from jaxrec.step import gradients, init_state, step_dense, step_rows, with_replica, without_replica
from jaxrec.types import Batch, DenseState, TrainState


class Figures(NamedTuple):
    """What a run of n trainers has done."""

    examples: int
    seconds: float  # until the last worker was done; rounds after it do not count
    examples_per_s: float
    example_level_parallelism: int  # B m n: examples in flight
    steps: list[int]  # of each trainer
    rounds: list[int]
    bytes: list[int]  # sent and received by its synchronisation
    average_sync_gap: list[float]  # steps of the trainer for each round
    average_sync_gap_per_worker: list[float]  # the same, divided by m
    spread: float  # root mean square distance of the replicas from their mean, at the end


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
) -> tuple[list[DenseState], Figures]:
    """Trains n = len(streams) trainers until their streams are exhausted.

    Args:
      spec, loss, optimizer, row_optimizer: as for `make_train_step`.
      params: initial dense parameters, the same for every trainer.
      tables: shared by all; written in place.
      streams: the batches of each trainer, of one size; its workers take them in turns.
      synchroniser: trainer -> `Shadow` or `Foreground`; none if None. k and the gap count steps of a trainer.
      workers_per_trainer: m.
      devices: trainer i trains on device i modulo their number; all local devices if None.
      hook: (trainer, step, metrics on the device) after every step, on the worker's thread.

    Returns:
      The dense state of every trainer, leaves with a leading axis of one replica, and the figures.

    Errors:
      ValueError: no streams; workers_per_trainer < 1.
      The first exception of any thread, with trainer and worker named; all threads have ended by then.
    """
    if not streams or workers_per_trainer < 1:
        raise ValueError(f"{len(streams)} streams, workers_per_trainer={workers_per_trainer}: both must be 1 or more.")
    devices = jax.local_devices() if devices is None else devices
    shared = _Shared(spec, loss, optimizer, row_optimizer, tables, hook)
    trainers = []
    for number, stream in enumerate(streams):
        state = init_state(params, optimizer, tables, make_mesh(devices=[devices[number % len(devices)]]))
        sync = synchroniser(number) if synchroniser else None
        trainers.append(_Trainer(shared, number, state.dense, stream, sync, workers_per_trainer))
    start = time.perf_counter()
    threads = [threading.Thread(target=trainer.run, name=f"trainer-{trainer.number}") for trainer in trainers]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:  # Ctrl-C
        shared.stopped.set()
        for thread in threads:
            thread.join()
    if shared.failure is not None:
        raise shared.failure
    return [trainer.dense for trainer in trainers], _figures(trainers, start, workers_per_trainer)


class _Shared:
    """What all trainers of a run have in common."""

    def __init__(self, spec, loss, optimizer, row_optimizer, tables, hook):
        self.spec, self.tables, self.hook = spec, tables, hook
        self.stopped, self.lock = threading.Event(), threading.Lock()
        self.failure: BaseException | None = None
        self.capacity: dict[str, int] | None = None

        def differentiate(dense, rows, plan, batch):
            params, values = without_replica(dense).params, {name: stack.value for name, stack in rows.items()}
            gradient, by_rows, metrics = gradients(params, values, plan, batch, spec=spec, loss=loss)
            return gradient, step_rows(rows, by_rows, dense.step, row_optimizer), metrics

        def apply(dense, gradient):
            return with_replica(step_dense(without_replica(dense), gradient, optimizer))

        self.differentiate, self.apply = jax.jit(differentiate), jax.jit(apply, donate_argnums=0)

    def plan(self, ids):
        """The plan of a batch; capacities only grow, and all workers share them, so that few shapes are compiled."""
        plans = plan(self.spec, ids, self.capacity)
        with self.lock:
            known = self.capacity or {}
            self.capacity = {name: max(rows, known.get(name, 0)) for name, rows in capacity_of(plans).items()}
        return plans

    def fail(self, error, note):
        """Keeps the first failure and stops everybody."""
        with self.lock:
            if self.failure is None and not self.stopped.is_set():
                error.add_note(note)
                self.failure = error
        self.stopped.set()


class _Trainer:
    """One replica and its workers. The lock is held for dispatch only, never while a program runs."""

    def __init__(self, shared, number, dense, stream, synchroniser, workers):
        self.shared, self.number, self.dense, self.synchroniser = shared, number, dense, synchroniser
        self.stream, self.reading, self.lock = iter(stream), threading.Lock(), threading.Lock()
        self.workers, self.steps, self.examples, self.batch_size = workers, 0, 0, 0
        self.ended = 0.0

    def run(self):
        """Trains to the end of the stream, then takes part in rounds until all trainers are done."""
        try:
            with contextlib.ExitStack() as stack:
                if hasattr(self.synchroniser, "__enter__"):
                    stack.enter_context(self.synchroniser)
                threads = [threading.Thread(target=self._work, args=(w,)) for w in range(1, self.workers)]
                for thread in threads:
                    thread.start()
                self._work(0)
                for thread in threads:
                    thread.join()
                self.ended = time.perf_counter()
                if self.shared.stopped.is_set():
                    raise InterruptedError("another trainer has failed")
                if self.synchroniser is not None:
                    state = self.synchroniser.finish(TrainState(self.dense, self.shared.tables))
                    self.dense = state.dense
        except BaseException as error:
            self._fail(error, f"in trainer {self.number}")

    def _work(self, worker):
        try:
            while not self.shared.stopped.is_set():
                with self.reading:
                    batch = next(self.stream, None)
                if batch is None:
                    return
                self._step(batch)
        except BaseException as error:
            self._fail(error, f"in worker {worker} of trainer {self.number}, near its step {self.steps}")

    def _fail(self, error, note):
        self.shared.fail(error, note)
        if self.synchroniser is not None:
            self.synchroniser.leave()  # wakes who waits for this trainer

    def _step(self, batch):
        shared = self.shared
        plans = shared.plan(batch.ids)
        rows = shared.tables.read(plans)
        with self.lock:  # a later step donates these parameters; once dispatched, the program keeps them
            gradient, new, metrics = shared.differentiate(self.dense, rows, plans, batch)
        new = jax.tree.map(np.asarray, new)  # waits for the program, other workers go on
        shared.tables.add(plans, new, rows)
        with self.lock:
            self.dense = shared.apply(self.dense, gradient)
            if self.synchroniser is not None:
                self.dense = self.synchroniser.exchange(TrainState(self.dense, shared.tables)).dense
            self.steps += 1
            self.examples += int(np.count_nonzero(batch.weight))
            self.batch_size, step = len(batch.label), self.steps
        if shared.hook is not None:
            shared.hook(self.number, step, metrics)


def _figures(trainers, start, workers):
    seconds = max(trainer.ended for trainer in trainers) - start
    examples, n = sum(trainer.examples for trainer in trainers), len(trainers)
    count = lambda name: [getattr(trainer.synchroniser, name, 0) for trainer in trainers]
    gaps = [trainer.steps / max(1, rounds) for trainer, rounds in zip(trainers, count("rounds"), strict=True)]
    replicas = [jax.device_get(trainer.dense.params) for trainer in trainers]
    return Figures(
        examples, seconds, examples / seconds, max(trainer.batch_size for trainer in trainers) * workers * n,
        [trainer.steps for trainer in trainers], count("rounds"), count("bytes"),
        gaps, [gap / workers for gap in gaps], spread(jax.tree.map(lambda *x: np.concatenate(x), *replicas)),
    )  # fmt: skip
