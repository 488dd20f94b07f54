"""Who may do what when: the order of a pipeline's batches, without the batches.

Every batch is planned, loaded (inputs sent, admitted, gathered, rows sent), committed, fetched and written.
Threads ask here for their next batch and say here what is done; one lock guards a few counters.

    planned >= claimed, committed >= fetched >= written         counters of batches, in batch order
    admission: batch t is gathered when all batches up to t - 1 - W are written, by all writers
    order: a writer writes batch by batch; the watermark is the first batch that some writer has not written

Legend: W window.
"""

import threading
from collections.abc import Callable


class Flow:
    """The state of one run of a pipeline.

    Args:
      window: W.
      ahead: how many batches beyond the window may be planned.
      writers: how many threads write, each its own shards of every batch.
      first: number of the first batch.
      one_stale: batch t - 1 is written only after batch t was gathered (semisync).
    """

    def __init__(self, window: int, ahead: int, writers: int, first: int, one_stale: bool = False):
        self.window, self.ahead, self.one_stale, self.first = window, ahead, one_stale, first
        self.changed = threading.Condition()
        self.planned = self.claimed = self.committed = self.fetching = first
        self.floor = first  # what batches before it left in the ring is void
        self.written = [first] * writers
        self.loaded: set[int] = set()
        self.fetched: set[int] = set()
        self.last_gathered = first - 1
        self.end: int | None = None  # number behind the last batch, once it is known
        self.hold: int | None = None  # batches from here on are not written yet
        self.gathering, self.epoch, self.paused = 0, 0, False
        self.stopped = self.finished = self.broken = False
        self.failure: BaseException | None = None

    def watermark(self) -> int:
        """All batches before it are written, by all writers."""
        return min(self.written)

    # Ahead of the commit: give up when the run stops.

    def wait_to_plan(self) -> bool:
        """Waits until one more batch may be planned; False if the run stops."""
        with self.changed:
            limit = lambda: self.committed + self.window + 1 + self.ahead
            self.changed.wait_for(lambda: self.stopped or self.planned < limit())
            return not self.stopped

    def claim(self) -> tuple[int, int] | None:
        """The next batch to load, and the epoch of the claim; None if the run stops."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or (not self.paused and self.claimed < self.planned))
            if self.stopped:
                return None
            self.claimed += 1
            return self.claimed - 1, self.epoch

    def admit(self, number: int, epoch: int) -> int | None:
        """Waits until a claimed batch may be gathered; returns the watermark, None if the claim is void."""
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    self.stopped
                    or self.epoch != epoch
                    or (not self.paused and self.watermark() >= number - self.window)
                )
            )
            if self.stopped or self.epoch != epoch:
                return None
            self.gathering += 1
            return self.watermark()

    def tell_gathered(self, number: int) -> None:
        """The tables have been read."""
        with self.changed:
            self.last_gathered = max(self.last_gathered, number)
            self.changed.notify_all()

    def tell_loaded(self, number: int, epoch: int, store: Callable[[], None]) -> None:
        """The rows are on the device; `store` keeps them, unless the claim has become void."""
        with self.changed:
            self.gathering -= 1
            if self.epoch == epoch:
                store()
                self.loaded.add(number)
            self.changed.notify_all()

    def wait_to_commit(self, lookahead: int) -> int | None:
        """The next batch, when it is loaded and `lookahead` more are planned; None at the end or after a failure."""
        with self.changed:
            number = self.committed
            known = lambda: self.end is not None or self.planned > number + lookahead
            over = lambda: self.failure is not None or number == self.end
            self.changed.wait_for(lambda: over() or (number in self.loaded and known()))
            return None if over() else number

    # Behind the commit: what is committed is written, whatever happens, unless rows were lost.

    def claim_fetch(self) -> int | None:
        """The next committed batch to fetch; None when there will be none."""
        with self.changed:
            number = self.fetching
            self.fetching += 1
            return number if self._wait_for(number, lambda: number < self.committed) else None

    def wait_to_write(self, writer: int) -> int | None:
        """The next batch of a writer, in batch order, when it is fetched and not held; None when there will be none."""
        number = self.written[writer]

        def ready():
            read = not self.one_stale or self.last_gathered > number or number + 1 == self.end or self.stopped
            return number in self.fetched and read and (self.hold is None or number < self.hold)

        with self.changed:
            return number if self._wait_for(number, ready) else None

    def mark_written(self, writer: int, number: int) -> None:
        """A writer has written its shards of a batch; the caller holds the lock."""
        self.written[writer] = number + 1
        if min(self.written) > number:  # nobody asks for it any more
            self.fetched.discard(number)

    def _wait_for(self, number, ready):
        self.changed.wait_for(lambda: self.broken or ready() or (self.finished and number >= self.committed))
        return not self.broken and ready()

    # For the committing thread.

    def drain(self) -> None:
        """Waits until all that is committed is written."""
        with self.changed:
            self.changed.wait_for(lambda: self.broken or self.watermark() >= self.committed)

    def pause(self) -> None:
        """Stops gathering, and waits until nobody gathers."""
        with self.changed:
            self.paused = True
            self.changed.wait_for(lambda: not self.gathering)

    def restart(self, void: Callable[[], None]) -> None:
        """Goes on after `pause`: everything not committed is loaded again, after `void` has dropped what was."""
        with self.changed:
            self.epoch += 1
            self.claimed = self.floor = self.committed
            self.last_gathered = min(self.last_gathered, self.committed - 1)
            self.loaded.clear()
            void()
            self.paused = False
            self.changed.notify_all()

    def hold_writes(self) -> int:
        """Lets writers go up to what is committed now, and no further; waits for the hold before it to end."""
        with self.changed:
            self.changed.wait_for(lambda: self.broken or self.hold is None)
            self.hold = self.committed
            return self.hold

    def wait_for_hold(self) -> bool:
        """Waits until writers stand at the hold; False if they never will."""
        with self.changed:
            self.changed.wait_for(lambda: self.broken or (self.hold is not None and self.watermark() >= self.hold))
            return not self.broken

    def release_writes(self) -> None:
        """Ends the hold."""
        with self.changed:
            self.hold = None
            self.changed.notify_all()

    def fail(self, error: BaseException, rows_are_lost: bool) -> None:
        """Stops the run because of an error in some thread; the first one counts."""
        with self.changed:
            self.failure = self.failure or error
            self.stopped, self.broken = True, self.broken or rows_are_lost
            self.changed.notify_all()

    def finish(self) -> None:
        """No batch will be committed any more: threads end when the rest is written."""
        with self.changed:
            self.stopped = self.finished = True
            self.changed.notify_all()

    def raise_failure(self) -> None:
        """Raises what some thread has raised."""
        if self.failure is not None:
            raise self.failure
