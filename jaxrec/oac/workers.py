"""The threads of one run: each asks `scheduler` for its next batch, has `stages` do its part, and says
that it is done. Cuts, states that are announced for a step, are saved in a thread of their own
while training goes on.
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

from jaxrec.engine import CutSchedule, Tries, caught
from jaxrec.interrupts import uninterrupted
from jaxrec.oac.options import Threads
from jaxrec.oac.scheduler import BatchScheduler
from jaxrec.oac.stages import DeviceStep, Item, Stages
from jaxrec.oac.view import TableProgress
from jaxrec.prefetch import END, Stream
from jaxrec.types import ShardsLost, TrainState


class Worker(threading.Thread):
    """One thread, and the batch that it is at.

    Args:
      stage: its name.
      number: of the first batch.
      body: called with this thread.
      fail: called with this thread and what the body raised.
      leave: called when all is over, as the last thing that the thread does.
    """

    def __init__(self, stage: str, number: int, body: Callable, fail: Callable, leave: Callable):
        super().__init__(name=f"oac-{stage}", daemon=True)
        self.stage, self.number = stage, number
        self._body, self._fail, self._leave = body, fail, leave

    def run(self):
        """What `start` starts."""
        try:
            self._body(self)
        except BaseException as error:
            self._fail(self, error)
        finally:
            self._leave(self.stage)


class Workers:
    """All threads of a run, but for the one that commits.

    Args:
      scheduler: of the run.
      stages: of the pipeline.
      stream: the batches of the run.
      threads: how many of each kind.
      progress: of the pipeline's tables, which are in a run as long as these threads live.
    """

    def __init__(
        self, scheduler: BatchScheduler, stages: Stages, stream: Stream, threads: Threads, progress: TableProgress
    ):
        self.scheduler, self.stages, self.stream, self.count = scheduler, stages, stream, threads
        self.progress = progress
        self.threads: list[Worker] = []

    def start_all(self) -> None:
        """Starts all threads that a run has from its beginning.

        Raises:
          RuntimeError: the system gives no more threads; those that were started are ended by
            `end`.
        """
        self.stream.free.clear()
        self.start("plan", self._plan_all)
        for _ in range(self.count.loaders):
            self.start("load", self._load_all)
        for _ in range(self.count.fetchers):
            self.start("fetch", self._fetch_all)
        for writer in range(self.count.writers):
            self.start("write back", functools.partial(self._write_all, writer))

    def start(self, stage: str, body: Callable[[Worker], None]) -> None:
        """Starts a thread of a stage; what the body raises is told to `scheduler`."""
        worker = Worker(stage, self.scheduler.first, body, self._fail, self.scheduler.leave)
        self.threads = [*self.threads[:1], *(t for t in self.threads[1:] if t.is_alive()), worker]
        # It is in the list before it runs, and can ask whether it is one of these.
        try:
            self.scheduler.start(stage, worker)
        except BaseException:
            self.threads.remove(worker)
            raise

    def where(self, stage: str, number: int) -> str:
        """What an error says of where it came from."""
        return f"in stage '{stage}' of the pipeline, batch {number - self.scheduler.first} of this run"

    def _fail(self, worker, error, epoch=None):
        error.add_note(self.where(worker.stage, worker.number))
        if worker.stage in ("plan", "load"):
            self.scheduler.fail_before_commit(worker.number, error, epoch)
        elif worker.stage == "cut":
            self.scheduler.fail_cut(error)
        else:
            self.scheduler.fail_after_commit(worker.number, error)

    # The end of a run.

    def end(self, asked: Sequence[int], patience_seconds: float) -> None:
        """Waits until all threads have written what is committed, and ended; what was not trained
        goes back.

        Args:
          asked: signals that came meanwhile; it grows.
          patience_seconds: how long before it says what it waits for.

        Raises:
          InterruptedError: a signal came after that was said; the run is not left.
        """
        scheduler = self.scheduler
        scheduler.finish()
        self._wait(asked, patience_seconds)
        for thread in self.threads:
            if not (scheduler.alive["plan"] and thread is self.threads[0]):  # the stream blocks it
                thread.join()
        # After the joins: no thread plans, and nothing of a batch is in any hand, when its batch
        # is given back.
        left = [self.stages.items[number].planned.batch for number in range(scheduler.committed, scheduler.planned)]
        self.stream.waiting.extendleft(reversed(left))
        if not self.threads:  # no thread could be started, so none will say so
            self.stream.free.set()
        self.stages.items, self.threads = {}, []

    def _wait(self, asked, patience_seconds):
        scheduler, late = self.scheduler, time.monotonic() + patience_seconds
        scheduler.wait_for_threads(lambda: time.monotonic() > late)
        if scheduler.over():
            return
        alive = [thread for thread in self.threads if thread.is_alive()]
        awaited = ", ".join(f"{thread.name} at batch {thread.number - scheduler.first}" for thread in alive)
        # Where warnings are errors the run is to be left all the same.
        with contextlib.suppress(UserWarning):
            warnings.warn(
                f"leaving the run waits for threads that have not ended yet: {awaited}. Ctrl-C stops this wait, and "
                "the next call of the pipeline takes it up.",
                stacklevel=5,
            )
        before = len(asked)
        scheduler.wait_for_threads(lambda: len(asked) > before)
        if not scheduler.over():
            raise InterruptedError(f"the run was not left, as these threads have not ended: {awaited}")

    # The bodies. `worker.number` is the batch in work.

    def _plan_all(self, worker):
        scheduler, stream = self.scheduler, self.stream
        try:
            while scheduler.wait_to_plan():
                worker.number = scheduler.planned
                taken = caught(stream.take)
                # A thread that was blocked in there may wake up in the middle of another run.
                if not scheduler.leave_stream():
                    stream.give_back(taken)
                    return
                if isinstance(taken, BaseException):
                    raise taken
                if taken is END:
                    scheduler.end_stream()
                    return
                self._plan(taken, worker.number)
        finally:
            stream.free.set()

    def _plan(self, batch: Any, number: int):
        scheduler, stages = self.scheduler, self.stages
        planned = stages.plan(batch, number)
        scheduler.mark_planned(lambda: stages.enter(planned, scheduler.floor, scheduler.committed))

    def _load_all(self, worker):
        while (claim := self.scheduler.claim()) is not None:
            worker.number, epoch = claim
            # None if the claim was void, and the batch is written by now.
            item = self.stages.items.get(worker.number)
            try:
                if item is not None:
                    self._load(item, worker.number, epoch)
            except BaseException as error:  # the thread goes on: batches before this one are still to be loaded
                self._fail(worker, error, epoch)
            # While this thread waits for its next batch this one's rows must not wait with it.
            del item

    def _load(self, item: Item, number: int, epoch: int):
        scheduler, stages = self.scheduler, self.stages
        if item.inputs is None:  # they stay right when the rows are gathered anew
            item.inputs = stages.send_inputs(item.planned)
        watermark = scheduler.admit(number, epoch)
        if watermark is None:
            return
        try:
            loaded = [stages.load(item.planned, watermark, scheduler)]
        except ShardsLost as lost:  # parked: when the shards are back, it is claimed and gathered anew
            scheduler.mark_not_loaded(lost.shards)
            return
        except BaseException:
            scheduler.mark_not_loaded()
            raise

        def store():
            # Nothing here holds the rows: the batch may be committed before this call ends.
            item.loaded = loaded.pop()

        scheduler.mark_loaded(number, epoch, store)

    def _fetch_all(self, worker):
        while (number := self.scheduler.claim_fetch()) is not None:
            worker.number = number
            self._fetch(self.stages.items[number], number)

    def _fetch(self, item: Item, number: int):
        fetched = [self.stages.fetch(item, self.scheduler.end)]

        def store():
            item.committed, item.fetched = None, fetched.pop()

        self.scheduler.mark_fetched(number, store)

    def _write_all(self, writer: int, worker: Worker):
        shards = range(writer, self.stages.tables.spec.shards, self.count.writers)
        while (number := self.scheduler.wait_to_write(writer)) is not None:
            worker.number = number
            self._write(self.stages.items[number], shards, writer, number)

    def _write(self, item: Item, shards: range, writer: int, number: int):
        self.stages.write(item, shards, self.scheduler)

        def forget():
            # A thread that has it still in hand holds no rows.
            self.stages.items.pop(number).fetched = None

        self.scheduler.mark_written(writer, number, forget)


class Begun(NamedTuple):
    """A cut that has begun: its step, its save, and the recoveries that it was missed at."""

    step: int
    save: Callable[[TrainState], Any]
    tries: Tries


class CutSaver(CutSchedule):
    """The cuts of a pipeline, each saved in a thread of its own.

    Args:
      stages, device_step: of the pipeline.
    """

    def __init__(self, stages: Stages, device_step: DeviceStep):
        super().__init__()
        self._stages, self._device_step = stages, device_step
        # Those whose saves met lost shards, and come again when the shards are back.
        self._missed: list[Begun] = []

    def begin(self, step: int, workers: Workers) -> None:
        """Begins the cut of a step that was just committed, if there is one, and those that lost
        shards have kept."""
        for _ in range(len(self._missed)):
            self._begin(self._missed[0], workers, lambda: self._missed.pop(0))
        if save := self.at(step):
            self._begin(Begun(step, save, Tries()), workers, lambda: self.tell_begun(step))

    def count_recovery(self, shards: Iterable[int], remedy: str) -> None:
        """Counts a recovery for each cut that was missed, once no cut is being saved. While a save is tried again
        training may go on, so that the tries at a step alone would never be too many.

        Args:
          shards: the lost ones.
          remedy: what is said when it is one too many.

        Raises:
          ShardsLost: for one cut it is one too many.
        """
        for cut in self._missed:
            cut.tries.count(f"the cut of step {cut.step}", shards, remedy)

    def save_missed(self, state: TrainState) -> None:
        """Saves, on this thread, what lost shards have kept from being saved, when a run has ended;
        what meets lost shards again stays, and raises ShardsLost."""
        while self._missed:
            self._missed[0].save(state)
            self._missed.pop(0)

    def forget(self, now: int) -> None:
        """No cut is to come any more."""
        self._missed = []
        super().forget(now)

    def _begin(self, cut, workers, forget):
        scheduler = workers.scheduler
        # Of the cut before; Ctrl-C may end it, and then this one is still to come.
        scheduler.wait_for_release()
        with uninterrupted():  # what holds the writes has a thread that lets them go
            # Before the copy: no later batch is written from here on, and what is copied fits what
            # will be written.
            number = scheduler.hold_writes()
            try:
                ring = self._device_step.whole_ring() if self._stages.options.skip_writes else None
                # Now, as the next step takes the dense state for good.
                dense, ring = jax.tree.map(jnp.copy, (self._device_step.dense, ring))
                workers.start("cut", lambda worker: self._save(worker, workers, number, dense, ring, cut))
                forget()
            except BaseException:
                scheduler.release_writes()
                raise

    def _save(self, worker, workers, number, dense, ring, cut):
        worker.number, scheduler = number - 1, workers.scheduler
        try:
            if whole := scheduler.wait_for_hold():
                self._stages.write_rest(ring, scheduler)
            if scheduler.lost_shards:  # perhaps only since then
                self._missed.append(cut)
            elif whole:
                cut.save(TrainState(dense, self._stages.tables))
        except ShardsLost as lost:
            scheduler.mark_lost(lost.shards)
            self._missed.append(cut)
        finally:
            scheduler.release_writes()
