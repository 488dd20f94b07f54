"""Ctrl-C and SIGTERM put off: a lock is not left held, and what belongs together is done or not
begun.

Python raises KeyboardInterrupt between any two instructions of the main thread, also between taking
a lock and the block that would release it. A second one comes while the first is dealt with.
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

# How often a wait of the main thread looks whether a signal came: its handler runs on that thread
# and cannot notify it.
_GLANCE_SECONDS = 0.05


@contextlib.contextmanager
def uninterrupted(again: bool = True) -> Iterator[list[int]]:
    """Puts Ctrl-C and SIGTERM off until the block is left; yields the list of the signals that
    came.

    Only the main thread gets any. A signal without a handler in Python never ends Python in the
    middle of a line.

    Args:
      again: whether they are raised when the block is left; if not, the caller calls `raise_again`,
        unless the block is left by an error.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    whole = False
    try:
        with _put_off(signal.SIGTERM, asked), _put_off(signal.SIGINT, asked):
            yield asked
        whole = True
    finally:
        if asked and (again or not whole):
            raise_again(asked)


class _put_off:
    """One signal goes into a list while the block lasts."""

    def __init__(self, number, asked):
        self.number, self.asked, self.handler = number, asked, signal.getsignal(number)

    def __enter__(self):
        if callable(self.handler):
            signal.signal(self.number, lambda number, frame: self.asked.append(number))

    def __exit__(self, *error):
        if callable(self.handler):
            signal.signal(self.number, self.handler)


def raise_again(asked: Sequence[int]) -> None:
    """Lets the handlers of signals that were put off run, those of SIGINT first."""
    if asked:
        number = min(asked)
        try:
            signal.raise_signal(number)
        finally:
            raise_again([other for other in asked if other != number])


def wait(
    changed: threading.Condition, over: Callable[[], bool], seconds: float = math.inf, by_the_clock: bool = False
) -> bool:
    """Waits for a condition, whose lock is free, until something is over; Ctrl-C ends it with
    the lock free.

    Args:
      changed: notified when `over` may have become true.
      over: looked at under the lock.
      seconds: the longest wait.
      by_the_clock: whether it may be over without a notification, so that every thread looks now
        and then.

    Returns:
      Whether it was over.
    """
    looks = by_the_clock or threading.current_thread() is threading.main_thread()
    longest = _GLANCE_SECONDS if looks else threading.TIMEOUT_MAX
    end = time.monotonic() + seconds
    while True:
        with uninterrupted() as asked, changed:
            while not (found := over()) and not asked and (left := end - time.monotonic()) > 0:
                changed.wait(min(left, longest))
            if found or not asked:
                return found
