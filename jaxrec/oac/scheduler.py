"""Which thread may do what when: the order of a pipeline's batches, without the batches.

Every batch is planned, loaded (inputs sent, admitted, gathered, rows sent), committed, fetched and
written. Threads ask here for their next batch and say here what is done. One lock guards a few
counters, which only this file writes; a thread that reads one without the lock reads a
number that may be behind, never ahead.

    planned >= claimed, committed >= fetched >= written         counters of batches, in batch order
    admission: batch t is gathered when all batches up to t - 1 - W are written, by all writers
    order: a writer writes batch by batch
    watermark: the first batch that some writer has not written

Failures: before the commit nothing is lost, so the batches before the one that failed are committed
and then its error is raised; after the commit rows are lost, and only the batches before that one
are still written. While shards are lost nothing is committed or gathered, and the rows of all others
are written; `restart` has everything gathered anew.

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
      ahead: how many batches beyond the window may be planned.
      writers: how many threads write, each its own shards of every batch.
      first: number of the first batch.
      one_stale: batch t - 1 is written only after batch t was gathered (semisync).
    """

    def __init__(self, window: int, ahead: int, writers: int, first: int, one_stale: bool = False):
        self._changed = threading.Condition()
        self.alive: collections.Counter = collections.Counter()  # stage -> threads at work
        # Number after the last batch to commit: of the stream, or of one that failed.
        self.end: int | None = None
        self.stopped = self.finished = False
        self.in_stream = False  # the planner is inside the caller's iterator, which may block
        self.error_before_commit: BaseException | None = None  # of batch `end`
        self.error_after_commit: BaseException | None = None  # rows are lost, of batches from `first_lost_batch` on
        self.first_lost_batch = 2**63
        self.dense_lost = False
        self.cut_error: BaseException | None = None  # of the first cut that was not saved
        # Shards that their home has lost, and that are not back yet.
        self.lost_shards: frozenset[int] = frozenset()
        self.window, self.ahead, self.one_stale, self.first = window, ahead, one_stale, first
        self.planned = self.claimed = self.committed = self.fetching = first
        self.floor = first  # what batches before it left in the ring is void
        self.written = [first] * writers
        self.loaded: set[int] = set()
        self.fetched: set[int] = set()
        self.last_gathered = first - 1
        self.hold: int | None = None  # batches from here on are not written yet
        self.gathering, self.epoch, self.paused = 0, 0, False

    @property
    def rows_lost(self) -> bool:
        """Whether rows that were committed are lost."""
        return self.error_after_commit is not None

    def wait(self, ready: Callable[[], bool]) -> None:
        """Waits, on the committing thread, until something holds that only this thread can undo;
        Ctrl-C ends it."""
        # No other thread undoes it: so without the lock first, and without the handler, which takes 20 us.
        if not ready():
            interrupts.wait(self._changed, ready, by_the_clock=True)

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> bool:
        """For onlookers: waits until something holds of the counters; returns whether it
        does."""
        with self._changed:
            return self._changed.wait_for(ready, seconds)

    def watermark(self) -> int:
        """All batches before it are written, by all writers."""
        return min(self.written)

    # Before the commit: threads give up when the run stops.

    def wait_to_plan(self) -> bool:
        """Waits until one more batch may be taken from the stream; False if none is wanted."""
        with self._changed:
            limit = lambda: self.committed + self.window + 1 + self.ahead
            self._changed.wait_for(lambda: self._complete() or self.planned < limit())
            self.in_stream = not self._complete()
            return self.in_stream

    def leave_stream(self) -> bool:
        """The planner is back from the stream; False if what it brings is not wanted any more."""
        with self._changed:
            self.in_stream = False
            self._changed.notify_all()
            return not self._complete()

    def mark_planned(self, store: Callable[[], None]) -> None:
        """A batch is planned; `store` keeps it, while nothing is committed and `floor` stays."""
        with self._changed:
            store()
            # After `store`: a thread that sees the number finds the batch.
            self.planned += 1
            self._changed.notify_all()

    def end_stream(self) -> None:
        """The stream has no more batches."""
        with self._changed:
            self.end = self.planned if self.end is None else self.end
            self._changed.notify_all()

    def _complete(self):
        return self.stopped or self.end is not None

    def claim(self) -> tuple[int, int] | None:
        """The next batch to load, and the epoch of the claim; None if the run stops."""
        with self._changed:
            last = lambda: self.planned if self.end is None else min(self.planned, self.end)
            self._changed.wait_for(lambda: self.stopped or (self._may_gather() and self.claimed < last()))
            if self.stopped:
                return None
            self.claimed += 1
            return self.claimed - 1, self.epoch

    def admit(self, number: int, epoch: int) -> int | None:
        """Waits until a claimed batch may be gathered; the watermark, None if the claim is void."""
        void = lambda: self.stopped or self.epoch != epoch
        written = lambda: self.watermark() >= number - self.window
        with self._changed:
            self._changed.wait_for(lambda: void() or (self._may_gather() and written()))
            if void():
                return None
            # With the watermark, in one breath: what is written from here on may be read half.
            self.gathering += 1
            return self.watermark()

    def _may_gather(self):
        return not self.paused and not self.lost_shards

    def mark_gathered(self, number: int) -> None:
        """The tables have been read."""
        with self._changed:
            self.last_gathered = max(self.last_gathered, number)
            self._changed.notify_all()

    def mark_loaded(self, number: int, epoch: int, store: Callable[[], None]) -> None:
        """The rows are on the device; `store` keeps them, unless the claim has become void."""
        with self._changed:
            self.gathering -= 1
            if self.epoch == epoch:
                store()
                self.loaded.add(number)
            self._changed.notify_all()

    def mark_not_loaded(self, lost: Collection[int] = ()) -> None:
        """The gather or the way to the device failed; if shards are lost, it comes again."""
        with self._changed:
            # In one breath: what brings shards back waits until no gather goes on, and must know of
            # all by then.
            self.lost_shards |= frozenset(lost)
            self.gathering -= 1
            self._changed.notify_all()

    def wait_to_commit(self, lookahead: int) -> int | None:
        """The next batch, when it is loaded and `lookahead` more are planned; None at the end or
        after a failure, and while shards are lost."""
        number = self.committed
        known = lambda: self.end is not None or self.planned > number + lookahead
        over = lambda: self.rows_lost or self.cut_error is not None or number == self.end or bool(self.lost_shards)
        self.wait(lambda: over() or (number in self.loaded and known()))
        return None if over() else number

    # After the commit: what is committed is written, whatever happens, unless rows were lost.

    def mark_committed(self, number: int) -> None:
        """The step of a batch is done, and its rows wait to be fetched."""
        with self._changed:
            self.loaded.discard(number)
            self.committed += 1
            self._changed.notify_all()

    def claim_fetch(self) -> int | None:
        """The next committed batch to fetch; None when there will be none."""
        with self._changed:
            number = self.fetching
            self.fetching += 1
            return number if self._wait_for(number, lambda: number < self.committed) else None

    def mark_fetched(self, number: int, store: Callable[[], None]) -> None:
        """The rows of a batch are on the host; `store` keeps them."""
        with self._changed:
            store()
            self.fetched.add(number)
            self._changed.notify_all()

    def wait_to_write(self, writer: int) -> int | None:
        """The next batch of a writer, in batch order, when it is fetched and not held; None when
        there will be none."""
        number = self.written[writer]

        def ready():
            read = not self.one_stale or self.last_gathered > number or number + 1 == self.end or self.stopped
            # The batch after it cannot be gathered, and will be gathered anew.
            read = read or bool(self.lost_shards)
            # A batch after the hold belongs to no cut: its rows are newer than its dense state.
            return number in self.fetched and read and (self.hold is None or number < self.hold)

        with self._changed:
            return number if self._wait_for(number, ready) else None

    def mark_written(self, writer: int, number: int, forget: Callable[[], None]) -> None:
        """A writer has written its shards of a batch; the last writer lets `forget` drop it."""
        with self._changed:
            self.count_written(writer, number)
            if min(self.written) > number:  # no writer asks for it any more
                self.fetched.discard(number)
                forget()
            self._changed.notify_all()

    def count_written(self, writer: int, number: int) -> None:
        """Counts a batch of a writer; the caller holds the lock."""
        self.written[writer] = number + 1

    def _wait_for(self, number, ready):
        never = lambda: number >= self.first_lost_batch or (self.finished and number >= self.committed)
        self._changed.wait_for(lambda: never() or ready())
        return number < self.first_lost_batch and ready()

    # For the committing thread. Ctrl-C ends its waits, and never finds it within the lock.

    def drain(self) -> None:
        """Waits until all that is committed, and not lost, is written."""
        self.wait(lambda: self.watermark() >= min(self.committed, self.first_lost_batch))

    def pause(self) -> None:
        """Stops gathering, and waits until no gather goes on."""
        with uninterrupted(), self._changed:
            # Under the lock: a gather was admitted before, and is waited for, or comes after it.
            self.paused = True
        self.wait(lambda: self.rows_lost or not self.gathering)

    def restart(self, void: Callable[[int], None]) -> None:
        """Goes on after `pause`: everything not committed is loaded again, after `void(floor)` has
        dropped what was."""
        with uninterrupted(), self._changed:
            self.epoch += 1  # a claim of before is void
            self.claimed = self.floor = self.committed
            # In semisync the last write waits again, for a gather that comes anew.
            self.last_gathered = min(self.last_gathered, self.committed - 1)
            self.loaded.clear()
            void(self.floor)
            self.paused = False
            self._changed.notify_all()

    def wait_for_release(self) -> None:
        """Waits until no cut holds the writes."""
        self.wait(lambda: self.rows_lost or self.hold is None)

    def hold_writes(self) -> int:
        """Lets writers go up to what is committed now, and no further; after `wait_for_release`."""
        with uninterrupted(), self._changed:
            # What is committed by now is part of the cut, and nothing after it.
            self.hold = self.committed
            return self.hold

    def wait_for_hold(self) -> bool:
        """Waits until writers stand at the hold; False if they never will, or the tables are not
        whole there."""
        with self._changed:
            hold = self.committed if self.hold is None else self.hold
            self._changed.wait_for(lambda: self.lost_shards or self.watermark() >= min(hold, self.first_lost_batch))
            return hold <= self.first_lost_batch and not self.lost_shards

    def release_writes(self) -> None:
        """Ends the hold."""
        with self._changed:
            self.hold = None
            self._changed.notify_all()

    def wait_for_cut(self) -> None:
        """Waits until no cut is being saved."""
        self.wait(lambda: not self.alive["cut"])

    # Shards that are lost: the tables go on without them, and no batch is committed until they are
    # back.

    def mark_lost(self, shards: Collection[int]) -> None:
        """A home has lost shards: what was to be written there is lost with them, what was to be
        read waits."""
        with self._changed:
            self.lost_shards |= frozenset(shards)
            self._changed.notify_all()

    def mark_recovered(self, shards: Collection[int]) -> None:
        """Shards are back, and everything that is not committed will be gathered anew."""
        with self._changed:
            self.lost_shards -= frozenset(shards)
            self._changed.notify_all()

    # Failures.

    def fail_before_commit(self, number: int, error: BaseException, epoch: int | None = None) -> None:
        """A batch will never be committed, nor those after it; of several the first counts."""
        with self._changed:
            void = epoch is not None and epoch != self.epoch  # it is loaded again
            if not void and (self.end is None or number < self.end):
                self.end, self.error_before_commit = number, error
                self._changed.notify_all()

    def mark_dense_lost(self) -> None:
        """The dense state died with an update that failed."""
        self.dense_lost = True

    def fail_after_commit(self, number: int, error: BaseException) -> None:
        """Rows of a committed batch are lost: only what is before it is still written. The first
        error counts."""
        with self._changed:
            # The earliest batch, whatever the order in which threads find that they have failed.
            self.error_after_commit = self.error_after_commit or error
            self.first_lost_batch = min(self.first_lost_batch, number)
            self.stopped = True
            self._changed.notify_all()

    def fail_cut(self, error: BaseException) -> None:
        """A cut was not saved; no further batch is committed."""
        with self._changed:
            self.cut_error = self.cut_error or error
            self._changed.notify_all()

    # Threads.

    def start(self, stage: str, thread: threading.Thread) -> None:
        """Starts a thread, which will say `leave` as the last thing that it does."""
        with self._changed:
            # Before it runs: it may end, and say so, at once.
            self.alive[stage] += 1
        try:
            thread.start()
        except BaseException:
            self.leave(stage)
            raise

    def leave(self, stage: str) -> None:
        """A thread ends."""
        with self._changed:
            self.alive[stage] -= 1
            self._changed.notify_all()

    def wait_for_threads(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Waits until all threads have ended, or it is enough; not for the planner inside the
        caller's stream."""
        self.wait(lambda: self._ended() or enough())

    def _ended(self):
        return self.alive.total() == (self.in_stream and self.alive["plan"])

    def over(self) -> bool:
        """Whether no batch will be committed any more and no thread is at work."""
        return self.finished and self._ended()

    def finish(self) -> None:
        """No batch will be committed any more: threads end when the rest is written."""
        with uninterrupted(), self._changed:
            self.stopped = self.finished = True
            if not self.alive["cut"]:
                self.hold = None  # of a cut that was interrupted before its thread began
            self._changed.notify_all()
