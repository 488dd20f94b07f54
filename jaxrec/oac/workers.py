"""The threads of one run, and the saves of snapshots.

Each thread claims its next batch from `scheduler`, runs its stage of `stages`, and reports completion to `scheduler`. A
snapshot, a consistent state announced for a step, is saved in its own thread while training goes on.
"""

import contextlib
import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrec.engine import Losses, RecoveryCounter, SnapshotSchedule
from jaxrec.interrupts import uninterrupted
from jaxrec.oac.guard import TableProgress
from jaxrec.oac.scheduler import BatchScheduler
from jaxrec.oac.stages import DeviceStep, Item, Stages
from jaxrec.prefetch import END, Stream, result_or_error
from jaxrec.types import ShardsLost, TrainState


class Worker(threading.Thread):
    """A thread of one stage."""

    stage: str
    number: int  # of the batch in work


class Workers:
    """All threads of a run except the committing one."""

    def __init__(self, scheduler: BatchScheduler, stages: Stages, stream: Stream, progress: TableProgress):
        self.scheduler, self.stages, self.stream, self.options = scheduler, stages, stream, stages.options
        self.progress = progress  # held, so that the tables count as in use while the threads live
        self.threads: list[Worker] = []

    def start_all(self) -> None:
        """Start all threads that live throughout the run; if the system cannot, `end` ends those already started."""
        self.stream.free.clear()
        self.start("plan", self._plan_all)
        for _ in range(self.options.loaders):
            self.start("load", self._load_all)
        for _ in range(self.options.fetchers):
            self.start("fetch", self._fetch_all)
        for writer in range(self.options.writers):
            self.start("write back", functools.partial(self._write_all, writer))

    def start(self, stage: str, body: Callable[[Worker], None]) -> None:
        """Start a thread of a stage; an exception of the body is reported to `scheduler`."""
        worker = Worker(target=lambda: self._run(worker, body), name=f"oac-{stage}", daemon=True)
        worker.stage, worker.number = stage, self.scheduler.first
        self.threads = [*self.threads[:1], *(t for t in self.threads[1:] if t.is_alive()), worker]
        # Listed before it runs, as calls of its body may check whether they are on a thread of the list.
        try:
            self.scheduler.start(stage, worker)
        except BaseException:
            self.threads.remove(worker)
            raise

    def _run(self, worker, body):
        try:
            body(worker)
        except BaseException as error:
            self._fail(worker, error)
        finally:
            self.scheduler.leave(worker.stage)

    def where(self, stage: str, number: int) -> str:
        """Return the note that names the stage and batch of an error."""
        return f"in stage '{stage}' of the pipeline, batch {number - self.scheduler.first} of this run"

    def _fail(self, worker, error, epoch=None):
        error.add_note(self.where(worker.stage, worker.number))
        if worker.stage in ("plan", "load"):
            self.scheduler.fail_before_commit(worker.number, error, epoch)
        elif worker.stage == "snapshot":
            self.scheduler.fail_snapshot(error)
        else:
            self.scheduler.fail_after_commit(worker.number, error)

    # The end of a run.

    def end(self, deferred: Sequence[int], patience_seconds: float) -> None:
        """Wait until all committed rows are written and all threads have ended; return untrained batches to the stream.

        After `patience_seconds` a warning lists the threads still awaited. If `deferred`, the list of deferred signals,
        grows after that, InterruptedError is raised, and the run is not left.
        """
        scheduler = self.scheduler
        scheduler.finish()
        self._wait(deferred, patience_seconds)
        for thread in self.threads:
            if not (scheduler.live_threads["plan"] and thread is self.threads[0]):  # the stream blocks it
                thread.join()
        # After the joins: no thread plans, or holds any part of a batch, when the batches return to the stream.
        left = [self.stages.items[number].planned.batch for number in range(scheduler.committed, scheduler.planned)]
        self.stream.give_back(left)
        if not self.threads:  # no thread could be started, so no planner will set it
            self.stream.free.set()
        self.stages.items, self.threads = {}, []

    def _wait(self, deferred, patience_seconds):
        scheduler, late = self.scheduler, time.monotonic() + patience_seconds
        scheduler.wait_for_threads(lambda: time.monotonic() > late)
        if scheduler.over():
            return
        alive = [thread for thread in self.threads if thread.is_alive()]
        awaited = ", ".join(f"{thread.name} at batch {thread.number - scheduler.first}" for thread in alive)
        # The run must be left even where warnings are errors.
        with contextlib.suppress(UserWarning):
            warnings.warn(
                f"leaving the run waits for threads that have not ended yet: {awaited}. Ctrl-C stops this wait, and "
                "the next call of the pipeline takes it up.",
                stacklevel=5,
            )
        before = len(deferred)
        scheduler.wait_for_threads(lambda: len(deferred) > before)
        if not scheduler.over():
            raise InterruptedError(f"the run was not left, as these threads have not ended: {awaited}")

    # Thread bodies. `worker.number` is the batch in work.

    def _plan_all(self, worker):
        scheduler, stream = self.scheduler, self.stream
        try:
            while scheduler.wait_to_plan():
                worker.number = scheduler.planned
                taken = result_or_error(stream.take)
                # A thread that was blocked in the stream may wake up during a later run.
                if not scheduler.leave_stream():
                    return
                if taken is END:
                    scheduler.end_stream()
                    return
                stream.accept()
                if isinstance(taken, BaseException):
                    raise taken
                self._plan(taken, worker.number)
        finally:
            stream.free.set()

    def _plan(self, batch: Any, number: int):
        scheduler, stages = self.scheduler, self.stages
        planned = stages.plan(batch, number)
        scheduler.mark_planned(lambda: stages.enter(planned, scheduler.void_before))

    def _load_all(self, worker):
        while (claim := self.scheduler.claim()) is not None:
            worker.number, epoch = claim
            # None if the claim has become void and the batch is written by now.
            item = self.stages.items.get(worker.number)
            try:
                if item is not None:
                    self._load(item, worker, epoch)
            except BaseException as error:  # go on: earlier batches must still be loaded
                self._fail(worker, error, epoch)
            # Otherwise this batch's rows would stay alive while the thread waits for its next batch.
            del item

    def _load(self, item: Item, worker: Worker, epoch: int):
        scheduler, stages, number = self.scheduler, self.stages, worker.number
        if item.inputs is None:  # inputs stay valid when rows are gathered again
            item.inputs = stages.send_inputs(item.planned)
        watermark = scheduler.admit(number, epoch)
        if watermark is None:
            return
        try:
            loaded = [stages.load(item.planned, watermark, scheduler)]
        except ShardsLost as lost:  # parked: claimed and gathered again after the recovery
            scheduler.mark_not_loaded(lost.shards)
            return
        except BaseException as error:
            # Reported first: once no gather is in progress, `exclusive` may void the claim, and the error is lost.
            self._fail(worker, error, epoch)
            scheduler.mark_not_loaded()
            return

        def store():
            # Popped, so that this frame holds no rows: the batch may be committed before `mark_loaded` returns.
            item.loaded = loaded.pop()

        scheduler.mark_loaded(number, epoch, store)

    def _fetch_all(self, worker):
        while (number := self.scheduler.claim_fetch()) is not None:
            worker.number = number
            self._fetch(self.stages.items[number], number)

    def _fetch(self, item: Item, number: int):
        fetched = [self.stages.fetch(item)]

        def store():
            item.committed, item.fetched = None, fetched.pop()

        self.scheduler.mark_fetched(number, store)

    def _write_all(self, writer: int, worker: Worker):
        shards = range(writer, self.stages.tables.spec.shards, self.options.writers)
        while (number := self.scheduler.wait_to_write(writer)) is not None:
            worker.number = number
            self._write(self.stages.items[number], shards, writer, number)

    def _write(self, item: Item, shards: range, writer: int, number: int):
        self.stages.write(item, shards, self.scheduler)

        def forget():
            # Cleared, so that a thread that still references the item holds no rows.
            self.stages.items.pop(number).fetched = None

        self.scheduler.mark_written(writer, number, forget)


class Begun(NamedTuple):
    """A snapshot that has begun: its step, its save function, and a counter of recoveries since it was missed."""

    step: int
    save: Callable[[TrainState], Any]
    tries: RecoveryCounter


class SnapshotSaver(SnapshotSchedule):
    """The snapshots of a pipeline, each saved in its own thread."""

    def __init__(self, stages: Stages, device_step: DeviceStep, losses: Losses):
        super().__init__()
        self._stages, self._device_step, self._losses = stages, device_step, losses
        # Snapshots whose saves met lost shards; saved again after the recovery.
        self._missed: list[Begun] = []

    def begin(self, step: int, workers: Workers) -> None:
        """Begin the snapshots missed because of lost shards, and those of the step just committed.

        If a loss is not finite they are dropped, as such a state must not take the place of a good image.
        """
        missed = len(self._missed)
        try:
            if missed or self.at(step):
                self._losses.check()
        except FloatingPointError:
            self.drop(step)
            raise
        for _ in range(missed):
            self._begin(self._missed[0], workers, lambda: self._missed.pop(0))
        while save := self.at(step):
            self._begin(Begun(step, save, RecoveryCounter()), workers, lambda: self.mark_taken(step))

    def count_recovery(self, shards: Iterable[int]) -> None:
        """Count a recovery for each missed snapshot, while none is being saved; raise ShardsLost if they are too many.

        Training may go on while a save is tried again, so that a limit of recoveries per step would never be reached.
        """
        for snapshot in self._missed:
            snapshot.tries.count(f"the snapshot of step {snapshot.step}", shards)

    def save_missed(self, state: TrainState) -> None:
        """Save the missed snapshots on this thread, after the run; one that meets lost shards again stays missed."""
        while self._missed:
            self._missed[0].save(state)
            self._missed.pop(0)

    def drop(self, step: int) -> None:
        """Remove all snapshots of a step, and those missed before."""
        self._missed = []
        super().drop(step)

    def forget(self, now: int) -> None:
        """Drop all snapshots, missed ones included; warn of those that were not taken."""
        self._missed = []
        super().forget(now)

    def _begin(self, snapshot, workers, forget):
        scheduler = workers.scheduler
        # Waits for the previous snapshot; if Ctrl-C ends the wait, this snapshot stays pending.
        scheduler.wait_for_snapshot()
        with uninterrupted():  # a hold always gets the thread that releases it
            # Before the copy: later batches are not written from here on, so that tables and copy match.
            number = scheduler.hold_writes()
            try:
                # Copied at once, as the next step donates the dense state.
                dense = jax.tree.map(jnp.copy, self._device_step.dense)
                workers.start("snapshot", lambda worker: self._save(worker, workers, number, dense, snapshot))
                forget()
            except BaseException:
                scheduler.release_writes()
                raise

    def _save(self, worker, workers, number, dense, snapshot):
        worker.number, scheduler = number - 1, workers.scheduler
        try:
            whole = scheduler.wait_for_hold()
            if scheduler.lost_shards:  # possibly lost since the wait
                self._missed.append(snapshot)
            elif whole:
                snapshot.save(TrainState(dense, self._stages.tables))
        except ShardsLost as lost:
            scheduler.mark_lost(lost.shards)
            self._missed.append(snapshot)
        finally:
            scheduler.release_writes()
