"""The batches of one run in flight, the threads that move them, and the counters that decide which thread may go on.

    planned >= next["load"], committed >= next["fetch"] >= written      numbers of batches, in batch order
    admission: batch t is gathered when all batches up to t - 1 - W are written
    order: batches are written one after the other

Failures: before the commit nothing is lost, so all batches before the failed one are committed, and then its error is
raised; after the commit rows are lost, and only the batches before the failed one are still written. While shards are
lost, nothing is committed or gathered, and the rows of all other shards are written.

One lock guards all fields; a thread that reads a counter without it may read an older value, never a newer one.

Legend: W window.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Collection, Sequence

from jaxrec import interrupts
from jaxrec.engine import Snapshot, SnapshotSchedule
from jaxrec.interrupts import uninterrupted
from jaxrec.oac.stages import Item, Stages
from jaxrec.prefetch import END, Stream, result_or_error
from jaxrec.table_use import TableUse
from jaxrec.types import DenseState, ShardsLost, TrainState


class Worker(threading.Thread):
    """A thread of one stage; `batch`, the one in work, is counted from the first of the run."""

    def __init__(self, stage: str, body: Callable, *args):
        super().__init__(target=body, args=(self, *args), name=f"oac-{stage}", daemon=True)
        self.stage, self.batch, self.ended = stage, 0, False


class Flight:
    """One run of a pipeline.

    Args:
      stages: the stages, and what they train.
      stream: where batches come from.
      first: number of the first batch; earlier runs have planned smaller ones.
      lost_shards: shards that were lost before and not recovered.
    """

    def __init__(self, stages: Stages, stream: Stream, first: int = 0, lost_shards: Collection[int] = ()):
        self.stages, self.options, self.stream, self.first = stages, stages.options, stream, first
        self.changed = threading.Condition()
        self.items: dict[int, Item] = {}  # planned and not written
        self.planned = self.committed = self.written = first
        self.next = {"load": first, "fetch": first, "write back": first}
        self.gathering = 0  # gathers in progress
        self.paused = self.stopped = False
        self.in_stream = False  # the planner is inside the caller's iterator, which may block
        self.write_limit: int | None = None  # batches from here on are not written until a snapshot is saved
        self.lost_shards = frozenset(lost_shards)  # by the row storage, and not recovered yet
        # An error that lost rows of committed batches, from `lost_from` on.
        self.error: BaseException | None = None
        self.lost_from = 2**63
        self.snapshot_error: BaseException | None = None  # of the first snapshot that could not be saved
        self.threads: list[Worker] = []

    @contextlib.contextmanager
    def _changing(self):
        """Hold the lock to change fields; Ctrl-C never interrupts a thread that holds it."""
        with uninterrupted(), self.changed:
            yield
            self.changed.notify_all()

    # ---- threads

    def start(self, use: TableUse) -> None:
        """Start the threads of all stages; if the system cannot, `end` ends those already started."""
        self.stream.free.clear()
        self._start("plan", self._plan)
        for _ in range(self.options.loaders):
            self._start("load", self._load)
        for _ in range(self.options.fetchers):
            self._start("fetch", self._fetch)
        # It holds `use`, so that the tables count as in use even if the pipeline is garbage before it ends.
        self._start("write back", self._write, use)

    def _start(self, stage, act, *args):
        worker = Worker(stage, self._work, act, *args)
        self.threads = [*(thread for thread in self.threads if thread.is_alive()), worker]
        try:
            worker.start()
        except BaseException:
            self.threads.remove(worker)
            raise

    def _work(self, worker, act, *args):
        """Act until that returns nothing true, and hold no batch in between."""
        try:
            while act(worker, *args):
                pass
        except BaseException as error:
            error.add_note(self.where(worker.stage, worker.batch))
            if worker.stage == "plan":
                self._enter(Item(self.planned, over=error))
            else:
                self.lose_rows(self.first + worker.batch, error)
        finally:
            with self._changing():
                worker.ended = True

    def where(self, stage: str, batch: int) -> str:
        """Return the note that names the stage and batch of an error."""
        return f"in stage '{stage}' of the pipeline, batch {batch} of this run"

    def take(self, stage: str, ready: Callable[[int], bool]) -> Item | None:
        """Wait until the next batch of a stage is ready for it; return it, or None if there will be no more."""
        number = lambda: self.next[stage]
        never = lambda: number() >= self.lost_from or (self.stopped and number() >= self.committed)
        with self.changed:
            self.changed.wait_for(lambda: never() or ready(number()))
            if never():
                return None
            self.next[stage] += 1
            return self.items[number() - 1]

    # ---- before the commit

    def _plan(self, worker):
        try:
            while self._may_plan():
                worker.batch = self.planned - self.first
                taken = result_or_error(self.stream.take)
                with self._changing():
                    self.in_stream = False
                    if self.stopped:  # what was taken stays in the stream; a later run may be at work by now
                        return
                if taken is END:
                    self._enter(Item(self.planned, over=END))
                    return
                self.stream.accept()
                if isinstance(taken, BaseException):
                    raise taken
                self._enter(self.stages.plan(taken, self.planned))
        finally:
            self.stream.free.set()

    def _may_plan(self):
        ahead = self.options.window + 1 + self.options.ahead
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self.planned < self.committed + ahead)
            self.in_stream = not self.stopped
            return self.in_stream

    def _enter(self, item):
        with self._changing():
            self.items[item.number] = item
            self.planned += 1

    def _load(self, worker):
        item = self.take("load", lambda number: number < self.planned and self.items[number].over is None)
        if item is None:
            return False
        worker.batch = item.number - self.first
        try:
            if item.inputs is None:  # inputs stay valid when rows are gathered again
                self.stages.send_inputs(item)
            if self.admit(item) and (found := self._gather(item)) is not None:
                self.stages.send_rows(item, found)
                with self._changing():
                    item.loaded = True
        except BaseException as error:  # go on, as earlier batches must still be loaded
            error.add_note(self.where("load", worker.batch))
            with self._changing():
                item.over = error  # counts for nothing if `restart` has made the item void
        return True

    def admit(self, item: Item) -> bool:
        """Wait until a batch may be gathered; return False if `restart` has replaced the item."""
        void = lambda: self.stopped or self.items.get(item.number) is not item
        written = lambda: self.written >= item.number - self.options.window
        with self.changed:
            self.changed.wait_for(lambda: void() or (written() and not self.paused and not self.lost_shards))
            if void():
                return False
            # Atomic with reading `written`, as rows written from here on may be read torn.
            self.gathering += 1
            item.watermark = self.written
            return True

    def _gather(self, item):
        """Return the gathered rows; None if shards are lost: the batch is gathered again after the recovery."""
        found, lost = None, frozenset[int]()
        try:
            found = self.stages.gather(item)
        except ShardsLost as error:
            lost = frozenset(error.shards)
        finally:
            # At once: a recovery waits for gathers in progress, and must know all lost shards by then.
            with self._changing():
                self.lost_shards |= lost
                item.gathered = found is not None
                self.gathering -= 1
        return found

    # ---- after the commit

    def _fetch(self, worker):
        if (item := self.take("fetch", lambda number: number < self.committed)) is None:
            return False
        worker.batch = item.number - self.first
        self.stages.fetch(item)
        with self._changing():
            item.fetched = True
        return True

    def _write(self, worker, use):
        if (item := self.take("write back", self._may_write)) is None:
            return False
        worker.batch = item.number - self.first
        shards = set(range(self.stages.tables.spec.shards)) - self.lost_shards
        try:
            self.stages.write(item, sorted(shards))
        except ShardsLost as lost:  # the other shards are written
            # Before the write is counted; otherwise a batch admitted by it might be gathered without it.
            self.mark_lost(lost.shards)
        with self._changing():
            self.count_written(item.number)
            # The thread that has committed it may still reference the batch.
            self.items.pop(item.number).rows = None
        return True

    def _may_write(self, number):
        item, following = self.items.get(number), self.items.get(number + 1)
        # Rows of batches from the limit on are newer than the dense state of the snapshot.
        if item is None or not item.fetched or (self.write_limit is not None and number >= self.write_limit):
            return False
        if self.options.mode != "semisync" or self.stopped or self.lost_shards:
            return True
        # In semisync the next batch is gathered without this one.
        return following is not None and (following.gathered or following.over is not None)

    def count_written(self, number: int) -> None:
        """Count a batch as written; the caller holds the lock."""
        self.written = number + 1

    def lose_rows(self, number: int, error: BaseException) -> None:
        """Mark the rows of committed batches from a number on as lost."""
        with self._changing():
            # The first error reported, but the earliest batch, in whatever order threads report.
            self.error, self.lost_from = self.error or error, min(self.lost_from, number)

    # ---- for the committing thread: Ctrl-C ends its waits

    def wait(self, ready: Callable[[], object]) -> None:
        """Wait until a predicate holds that no other thread can make false."""
        # As it stays true, it is checked first without the lock and without the signal handlers, which take 20 us.
        if not ready():
            interrupts.wait(self.changed, lambda: bool(ready()))

    def wait_to_commit(self) -> Item | None:
        """Wait for the next batch to be loaded; return None at the end, after a failure, and while shards are lost."""
        stopped = lambda: self.failed() or self.lost_shards
        here = lambda: self.items.get(self.committed)
        self.wait(lambda: stopped() or ((item := here()) and (item.loaded or item.over is not None)))
        item = here()
        return None if stopped() or item is None or item.over is not None else item

    def failed(self) -> bool:
        """Return whether rows are lost or a snapshot could not be saved: nothing more is committed."""
        return self.error is not None or self.snapshot_error is not None

    def mark_committed(self) -> None:
        """Count a batch as committed: its rows may be fetched. The caller defers signals."""
        with self.changed:
            self.committed += 1
            self.changed.notify_all()

    def drain(self) -> None:
        """Wait until all committed batches whose rows are not lost are written."""
        self.wait(lambda: self.written >= min(self.committed, self.lost_from))

    def pause(self) -> None:
        """Admit no further gathers, and wait until none is in progress."""
        with self._changing():
            # Under the lock, so that a gather is either admitted earlier and awaited below, or not admitted.
            self.paused = True
        self.wait(lambda: not self.gathering)

    def restart(self) -> None:
        """Continue after `pause`: all batches that are not committed are loaded again, and the ring is void."""
        with self._changing():
            self.next["load"], self.stages.ring = self.committed, None
            self.items |= {number: item.afresh() for number, item in self.items.items() if number >= self.committed}
            self.paused = False

    def resume(self) -> None:
        """Continue after `pause` if no row has changed: what is gathered stays valid."""
        with self._changing():
            self.paused = False

    def mark_lost(self, shards: Collection[int]) -> None:
        """Mark shards as lost: their pending writes are lost with them, and gathers wait for their recovery."""
        with self._changing():
            self.lost_shards |= frozenset(shards)

    def mark_recovered(self, shards: Collection[int]) -> None:
        """Mark shards as recovered; a `restart` has made all earlier gathers void."""
        with self._changing():
            self.lost_shards -= frozenset(shards)

    # ---- snapshots

    def save(self, snapshot: Snapshot, dense: DenseState, schedule: SnapshotSchedule) -> None:
        """Save a snapshot in a thread, with the rows of all batches committed by now; later ones are written after it.

        One that meets lost shards goes back to the schedule.
        """
        with self._changing():
            limit = self.write_limit = self.committed
        try:
            self._start("snapshot", self._save, limit, snapshot, dense, schedule)
        except BaseException:
            self._release_writes()
            raise

    def _save(self, worker, limit, snapshot, dense, schedule):
        worker.batch = limit - 1 - self.first
        try:
            with self.changed:
                written = lambda: self.written >= min(limit, self.lost_from)
                self.changed.wait_for(lambda: self.lost_shards or written())
            if self.lost_shards:
                raise ShardsLost(self.lost_shards)
            if limit <= self.lost_from:
                snapshot.save(TrainState(dense, self.stages.tables))
        except ShardsLost as lost:
            self.mark_lost(lost.shards)
            schedule.put_back(snapshot)
        except BaseException as error:
            error.add_note(self.where("snapshot", worker.batch))
            self.snapshot_error = self.snapshot_error or error
        finally:
            self._release_writes()

    def _release_writes(self):
        with self._changing():
            self.write_limit = None

    def wait_for_snapshot(self) -> None:
        """Wait until no snapshot is being saved."""
        self.wait(lambda: self.write_limit is None)

    # ---- the end

    def stop(self) -> None:
        """End commits; threads end when all committed batches are written."""
        with self._changing():
            self.stopped = True

    def wait_for_last_snapshot(self, deferred: Sequence[int], patience_seconds: float) -> None:
        """Wait until no snapshot is being saved, with the patience of `end`."""
        self._wait_for_ends(lambda worker: worker.stage == "snapshot", deferred, patience_seconds)

    def end(self, deferred: Sequence[int], patience_seconds: float, over: bool) -> list[BaseException | None]:
        """Wait until all committed rows are written and all threads have ended; return untrained batches to the stream.

        After `patience_seconds` a warning lists the threads still awaited. If `deferred`, the list of deferred signals,
        grows after that, InterruptedError is raised, and the run is not left.

        Args:
          over: whether all batches before the end of the stream, or before an error, are trained.

        Returns:
          The failures after the commit, of a snapshot, and that error; None where there was none.
        """
        self.stop()
        # Not a planner inside the stream, which ends when that lets it go.
        in_stream = lambda worker: worker.stage == "plan" and self.in_stream
        self._wait_for_ends(lambda worker: not in_stream(worker), deferred, patience_seconds)
        for worker in self.threads:
            if not in_stream(worker):
                worker.join()
        # After the joins: no thread plans, or holds any part of a batch, when the batches return to the stream.
        left = [item for item in self.items.values() if item.number >= self.committed]
        in_turn = left[0].over if left and over and not self.failed() else None
        in_turn = in_turn if isinstance(in_turn, BaseException) else None
        # Batches that could not be loaded are tried again; other errors are raised in their turn.
        back = [item.over if item.batch is None else item.batch for item in left]
        self.stream.give_back([each for each in back if each is not in_turn and each is not END and each is not None])
        if not self.threads:  # no thread could be started, so no planner will set it
            self.stream.free.set()
        self.items, self.threads = {}, []
        return [self.error, self.snapshot_error, in_turn]

    def _wait_for_ends(self, chosen, deferred, patience_seconds):
        """Wait until the chosen threads have ended, see `end`."""
        awaited = lambda: [worker for worker in self.threads if not worker.ended and chosen(worker)]
        if not interrupts.wait(self.changed, lambda: not awaited(), patience_seconds):
            names, before = ", ".join(f"{worker.name} at batch {worker.batch}" for worker in awaited()), len(deferred)
            # The run must be left even where warnings are errors.
            with contextlib.suppress(UserWarning):
                warnings.warn(
                    f"leaving the run waits for threads that have not ended yet: {names}. Ctrl-C stops this wait, and "
                    "the next call of the pipeline takes it up.",
                    stacklevel=5,
                )
            self.wait(lambda: not awaited() or len(deferred) > before)
            if awaited():
                raise InterruptedError(f"the run was not left, as these threads have not ended: {names}")
