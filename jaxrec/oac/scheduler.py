"""The scheduler of a pipeline's threads: it orders batches by number and holds none of their data.

Every batch is planned, loaded (inputs sent, admitted, gathered, rows sent), committed, fetched and written. Threads
claim their next batch here and report its completion here. One lock guards a few counters, which only this file writes;
a thread that reads one without the lock may read an older value, never a newer one.

    planned >= claimed, committed >= fetched >= written         counters of batches, in batch order
    admission: batch t is gathered when all batches up to t - 1 - W are written, by all writers
    order: a writer writes batch by batch
    watermark: the first batch that some writer has not written

Failures: before the commit nothing is lost, so all batches before the failed one are committed and then its error is
raised; after the commit rows are lost, and only the batches before the failed one are still written. While shards are
lost, nothing is committed or gathered, and the rows of all other shards are written; after `restart` every uncommitted
batch is gathered again.

Legend: W window.
"""

import collections
import threading
from collections.abc import Callable, Collection

from jaxrec import interrupts
from jaxrec.interrupts import uninterrupted


class BatchScheduler:
    """The state of one run of a pipeline.

    Args:
      window: W.
      ahead: number of batches that may be planned beyond the window.
      writers: number of writer threads; each writes its own shards of every batch.
      first: number of the first batch.
      semisync: whether batch t - 1 is written only after batch t is gathered (semisync).
    """

    def __init__(self, window: int, ahead: int, writers: int, first: int, semisync: bool = False):
        self._changed = threading.Condition()
        self.live_threads: collections.Counter = collections.Counter()  # {stage: number of live threads}
        # Number after the last batch to commit, at the end of the stream or before a failed batch; None if unknown.
        self.end: int | None = None
        self.stopped = self.finished = False
        self.in_stream = False  # the planner is inside the caller's iterator, which may block
        self.error_before_commit: BaseException | None = None  # of batch `end`
        self.error_after_commit: BaseException | None = None  # rows of batches from `first_lost_batch` on are lost
        self.first_lost_batch = 2**63
        self.dense_lost = False
        self.snapshot_error: BaseException | None = None  # of the first snapshot that could not be saved
        # Shards that the row storage has lost and that are not recovered yet.
        self.lost_shards: frozenset[int] = frozenset()
        self.window, self.ahead, self.semisync, self.first = window, ahead, semisync, first
        self.planned = self.claimed = self.committed = self.next_fetch = first
        self.void_before = first  # ring entries of earlier batches are void
        self.written = [first] * writers
        self.loaded: set[int] = set()
        self.fetched: set[int] = set()
        self.last_gathered = first - 1
        self.write_limit: int | None = None  # batches from this number on must not be written yet
        self.active_gathers, self.epoch, self.paused = 0, 0, False

    @property
    def rows_lost(self) -> bool:
        """Whether rows of committed batches are lost."""
        return self.error_after_commit is not None

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait on the committing thread until a predicate holds that no other thread can make false; Ctrl-C ends it."""
        # As it stays true, it is checked first without the lock and without the signal handlers, which take 20 us.
        if not ready():
            interrupts.wait(self._changed, ready, by_the_clock=True)

    def watermark(self) -> int:
        """Return the first batch that some writer has not written."""
        return min(self.written)

    # Before the commit: threads stop waiting when the run stops.

    def wait_to_plan(self) -> bool:
        """Wait until another batch may be taken from the stream; return False if the run needs no more."""
        with self._changed:
            limit = lambda: self.committed + self.window + 1 + self.ahead
            self._changed.wait_for(lambda: self._complete() or self.planned < limit())
            self.in_stream = not self._complete()
            return self.in_stream

    def leave_stream(self) -> bool:
        """Mark that the planner has left the stream; return False if the run no longer needs the batch taken."""
        with self._changed:
            self.in_stream = False
            self._changed.notify_all()
            return not self._complete()

    def mark_planned(self, store: Callable[[], None]) -> None:
        """Count a planned batch; `store` stores it under the lock, which keeps `void_before` fixed."""
        with self._changed:
            store()
            # After `store`, so that a thread that reads the new count finds the batch.
            self.planned += 1
            self._changed.notify_all()

    def end_stream(self) -> None:
        """Mark that the stream is exhausted."""
        with self._changed:
            self.end = self.planned if self.end is None else self.end
            self._changed.notify_all()

    def _complete(self):
        return self.stopped or self.end is not None

    def claim(self) -> tuple[int, int] | None:
        """Wait for the next batch to load; return its number and the epoch of the claim, or None if the run stops."""
        with self._changed:
            last = lambda: self.planned if self.end is None else min(self.planned, self.end)
            self._changed.wait_for(lambda: self.stopped or (self._may_gather() and self.claimed < last()))
            if self.stopped:
                return None
            self.claimed += 1
            return self.claimed - 1, self.epoch

    def admit(self, number: int, epoch: int) -> int | None:
        """Wait until a claimed batch may be gathered; return the watermark, or None if the claim is void."""
        void = lambda: self.stopped or self.epoch != epoch
        written = lambda: self.watermark() >= number - self.window
        with self._changed:
            self._changed.wait_for(lambda: void() or (self._may_gather() and written()))
            if void():
                return None
            # Atomic with reading the watermark, as rows written from here on may be read torn.
            self.active_gathers += 1
            return self.watermark()

    def _may_gather(self):
        return not self.paused and not self.lost_shards

    def mark_gathered(self, number: int) -> None:
        """Mark that the rows of a batch have been read from the tables."""
        with self._changed:
            self.last_gathered = max(self.last_gathered, number)
            self._changed.notify_all()

    def mark_loaded(self, number: int, epoch: int, store: Callable[[], None]) -> None:
        """Mark that the rows of a batch are on the device; `store` stores them unless the claim has become void."""
        with self._changed:
            self.active_gathers -= 1
            if self.epoch == epoch:
                store()
                self.loaded.add(number)
            self._changed.notify_all()

    def mark_not_loaded(self, lost: Collection[int] = ()) -> None:
        """Mark that the gather of a batch, or its transfer, has failed; after a recovery it is repeated."""
        with self._changed:
            # Atomic, as the recovery waits until no gather is in progress and must know all lost shards by then.
            self.lost_shards |= frozenset(lost)
            self.active_gathers -= 1
            self._changed.notify_all()

    def wait_to_commit(self) -> int | None:
        """Wait until the next batch is loaded; return its number, or None at the end, after a failure, and while
        shards are lost.
        """
        number = self.committed
        over = lambda: self.rows_lost or self.snapshot_error is not None or number == self.end or bool(self.lost_shards)
        self.wait(lambda: over() or number in self.loaded)
        return None if over() else number

    # After the commit: committed batches are always written, unless rows are lost.

    def mark_committed(self, number: int) -> None:
        """Mark that the step of a batch is done and its rows may be fetched."""
        with self._changed:
            self.loaded.discard(number)
            self.committed += 1
            self._changed.notify_all()

    def claim_fetch(self) -> int | None:
        """Wait for the next committed batch to fetch; return its number, or None if there will be no more."""
        with self._changed:
            number = self.next_fetch
            self.next_fetch += 1
            return number if self._wait_for(number, lambda: number < self.committed) else None

    def mark_fetched(self, number: int, store: Callable[[], None]) -> None:
        """Mark that the rows of a batch are on the host; `store` stores them."""
        with self._changed:
            store()
            self.fetched.add(number)
            self._changed.notify_all()

    def wait_to_write(self, writer: int) -> int | None:
        """Wait until the next batch of a writer may be written; return its number, or None if there will be no more."""
        number = self.written[writer]

        def ready():
            read = not self.semisync or self.last_gathered > number or number + 1 == self.end or self.stopped
            # While shards are lost, the next batch cannot be gathered; it is gathered again after the recovery.
            read = read or bool(self.lost_shards)
            # Batches from the hold on are not part of the snapshot: their rows are newer than its dense state.
            return number in self.fetched and read and (self.write_limit is None or number < self.write_limit)

        with self._changed:
            return number if self._wait_for(number, ready) else None

    def mark_written(self, writer: int, number: int, forget: Callable[[], None]) -> None:
        """Mark that a writer has written its shards of a batch; after the last writer, `forget` drops the batch."""
        with self._changed:
            self.count_written(writer, number)
            if min(self.written) > number:  # no writer needs it any more
                self.fetched.discard(number)
                forget()
            self._changed.notify_all()

    def count_written(self, writer: int, number: int) -> None:
        """Count a batch as written by a writer; the caller holds the lock."""
        self.written[writer] = number + 1

    def _wait_for(self, number, ready):
        never = lambda: number >= self.first_lost_batch or (self.finished and number >= self.committed)
        self._changed.wait_for(lambda: never() or ready())
        return number < self.first_lost_batch and ready()

    # For the committing thread. Ctrl-C ends its waits, and never interrupts it while it holds the lock.

    def drain(self) -> None:
        """Wait until all committed batches whose rows are not lost are written."""
        self.wait(lambda: self.watermark() >= min(self.committed, self.first_lost_batch))

    def pause(self) -> None:
        """Admit no further gathers, and wait until none is in progress."""
        with uninterrupted(), self._changed:
            # Under the lock, so that a gather is either admitted earlier and awaited below, or not admitted.
            self.paused = True
        self.wait(lambda: self.rows_lost or not self.active_gathers)

    def restart(self, void: Callable[[int], None]) -> None:
        """Continue after `pause`: drop the loaded rows with `void(floor)`, and load all uncommitted batches again."""
        with uninterrupted(), self._changed:
            self.epoch += 1  # earlier claims are void
            self.claimed = self.void_before = self.committed
            # In semisync the last write waits again until the next batch is gathered again.
            self.last_gathered = min(self.last_gathered, self.committed - 1)
            self.loaded.clear()
            void(self.void_before)
            self.paused = False
            self._changed.notify_all()

    def hold_writes(self) -> int:
        """While no snapshot is being saved: let writers write only what is committed; return the number after it."""
        with uninterrupted(), self._changed:
            # The snapshot consists of exactly the batches committed by now.
            self.write_limit = self.committed
            return self.write_limit

    def wait_for_hold(self) -> bool:
        """Wait until all writers have reached the hold; return False if rows before it, or any shards, are lost."""
        with self._changed:
            hold = self.committed if self.write_limit is None else self.write_limit
            self._changed.wait_for(lambda: self.lost_shards or self.watermark() >= min(hold, self.first_lost_batch))
            return hold <= self.first_lost_batch and not self.lost_shards

    def release_writes(self) -> None:
        """End the hold."""
        with self._changed:
            self.write_limit = None
            self._changed.notify_all()

    def wait_for_snapshot(self) -> None:
        """Wait until no snapshot is being saved."""
        self.wait(lambda: not self.live_threads["snapshot"])

    # Lost shards: the other shards are still written, and no batch is committed until the recovery.

    def mark_lost(self, shards: Collection[int]) -> None:
        """Mark shards as lost: their pending writes are lost with them, and gathers wait for their recovery."""
        with self._changed:
            self.lost_shards |= frozenset(shards)
            self._changed.notify_all()

    def mark_recovered(self, shards: Collection[int]) -> None:
        """Mark shards as recovered, so that all uncommitted batches are gathered again."""
        with self._changed:
            self.lost_shards -= frozenset(shards)
            self._changed.notify_all()

    # Failures.

    def fail_before_commit(self, number: int, error: BaseException, epoch: int | None = None) -> None:
        """Report an error before the commit of a batch: all earlier batches will be committed, then it is raised.

        Of several failures, that of the earliest batch counts; a failure under a void claim, of an older epoch, is
        ignored.
        """
        with self._changed:
            void = epoch is not None and epoch != self.epoch  # the batch is loaded again
            if not void and (self.end is None or number < self.end):
                self.end, self.error_before_commit = number, error
                self._changed.notify_all()

    def mark_dense_lost(self) -> None:
        """Mark the dense state as lost: it was donated to an update that failed."""
        self.dense_lost = True

    def fail_after_commit(self, number: int, error: BaseException) -> None:
        """Report an error that lost rows of a committed batch: only earlier batches are still written."""
        with self._changed:
            # The first error reported, but the earliest batch, in whatever order threads report.
            self.error_after_commit = self.error_after_commit or error
            self.first_lost_batch = min(self.first_lost_batch, number)
            self.stopped = True
            self._changed.notify_all()

    def fail_snapshot(self, error: BaseException) -> None:
        """Report that a snapshot could not be saved; no further batch is committed."""
        with self._changed:
            self.snapshot_error = self.snapshot_error or error
            self._changed.notify_all()

    # Threads.

    def start(self, stage: str, thread: threading.Thread) -> None:
        """Start a thread, which must call `leave` as its last action."""
        with self._changed:
            # Before the start, as the thread may call `leave` at once.
            self.live_threads[stage] += 1
        try:
            thread.start()
        except BaseException:
            self.leave(stage)
            raise

    def leave(self, stage: str) -> None:
        """Mark that a thread ends."""
        with self._changed:
            self.live_threads[stage] -= 1
            self._changed.notify_all()

    def wait_for_threads(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Wait until all threads have ended, except a planner inside the caller's stream, or until `enough()` holds."""
        self.wait(lambda: self._ended() or enough())

    def _ended(self):
        return self.live_threads.total() == (self.in_stream and self.live_threads["plan"])

    def over(self) -> bool:
        """Return whether the run is finished and all threads have ended, except a planner inside the stream."""
        return self.finished and self._ended()

    def finish(self) -> None:
        """End commits; threads end when all committed batches are written."""
        with uninterrupted(), self._changed:
            self.stopped = self.finished = True
            if not self.live_threads["snapshot"]:
                self.write_limit = None  # left by a snapshot that was interrupted before its thread started
            self._changed.notify_all()
