"""What ends a run of a pipeline or keeps it from going on: its threads, what failed, lost shards.

`flow` adds the order of the batches. Both have one lock, and whoever waits for anything is woken by
any change.
"""

import collections
import threading
from collections.abc import Callable, Collection

from jaxrec import interrupts


class Ends:
    """The threads of one run, and what went wrong in it."""

    def __init__(self):
        self._changed = threading.Condition()
        self.alive: collections.Counter = collections.Counter()  # stage -> threads at work
        # Number behind the last batch to commit: of the stream, or of one that failed.
        self.end: int | None = None
        self.stopped = self.finished = False
        self.in_stream = False  # the planner is inside the caller's iterator, which may block
        self.given_up = False  # loaders and fetchers that do not come back are waited for no more
        self.failure: BaseException | None = None  # ahead of the commit, of batch `end`
        # Behind the commit: rows are gone, of batches from `lost_from` on.
        self.lost: BaseException | None = None
        self.lost_from = 2**63
        self.dense_gone = False
        self.unsaved: BaseException | None = None  # of a cut
        # Shards that their home has lost, and nobody has brought back.
        self.gone: frozenset[int] = frozenset()

    @property
    def broken(self) -> bool:
        """Whether rows that were committed are lost."""
        return self.lost is not None

    def wait(self, ready: Callable[[], bool]) -> None:
        """Waits, on the committing thread, until something holds that only this thread can undo;
        Ctrl-C ends it."""
        # Nobody undoes it: so without the lock first, and without the handler, which takes 20 us.
        if not ready():
            interrupts.wait(self._changed, ready, by_the_clock=True)

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Waits, as somebody who only looks on, until something holds of the counters; returns
        whether it does."""
        with self._changed:
            return self._changed.wait_for(ready, seconds)

    # Shards that are lost: the tables go on without them, and no batch is committed until they are
    # back.

    def tell_lost(self, shards: Collection[int]) -> None:
        """A home has lost shards: what was to be written there is lost with them, what was to be
        read waits."""
        with self._changed:
            self.gone |= frozenset(shards)
            self._changed.notify_all()

    def tell_recovered(self, shards: Collection[int]) -> None:
        """Shards are back, and everything that is not committed will be gathered anew."""
        with self._changed:
            self.gone -= frozenset(shards)
            self._changed.notify_all()

    # Failures.

    def tell_dense_gone(self) -> None:
        """The dense state died with an update that failed."""
        self.dense_gone = True

    def fail_behind(self, number: int, error: BaseException) -> None:
        """Rows of a committed batch are lost: only what is before it is still written. The first
        error counts."""
        with self._changed:
            # The earliest batch, whatever the order in which threads find that they have failed.
            self.lost, self.lost_from = self.lost or error, min(self.lost_from, number)
            self.stopped = True
            self._changed.notify_all()

    def fail_cut(self, error: BaseException) -> None:
        """A cut was not saved; no further batch is committed."""
        with self._changed:
            self.unsaved = self.unsaved or error
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

    def give_up(self, number: int, error: BaseException) -> None:
        """Breaks the pipeline from a batch on, as loaders or fetchers do not come back: when they
        do, they touch nothing."""
        self.fail_behind(number, error)
        self.given_up = True

    def _ended(self):
        behind = self.given_up * (self.alive["load"] + self.alive["fetch"])
        return self.alive.total() == behind + (self.in_stream and self.alive["plan"])

    def over(self) -> bool:
        """Whether no batch will be committed any more and no thread is at work."""
        return self.finished and self._ended()
