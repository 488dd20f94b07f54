"""Deferral of Ctrl-C and SIGTERM, so that no lock stays held and no change is left half done.

Python raises KeyboardInterrupt between any two instructions of the main thread, even between taking a lock and entering
the block that releases it. A second one may arrive while the first is being handled.
"""

import contextlib
import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Polling interval for signals while the main thread waits: their handlers run on that thread and cannot notify it. Nor
# does a signal end a blocking call that begins just after it.
_GLANCE_SECONDS = 0.05


@contextlib.contextmanager
def uninterrupted(reraise: bool = True) -> Iterator[list[int]]:
    """Defer Ctrl-C and SIGTERM until the block ends; yield the list of deferred signal numbers.

    It has an effect on the main thread only, as no other thread receives signals. Signals without a Python handler are
    not deferred: they raise nothing between two instructions. The signals are raised when the block ends; if not
    `reraise`, only if the block raises, and otherwise the caller calls `raise_deferred`.
    """
    deferred: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield deferred
        return
    whole = False
    try:
        with _put_off(signal.SIGTERM, deferred), _put_off(signal.SIGINT, deferred):
            yield deferred
        whole = True
    finally:
        if deferred and (reraise or not whole):
            raise_deferred(deferred)


class _put_off:
    """Context manager that appends occurrences of one signal to a list."""

    def __init__(self, number, deferred):
        self.number, self.deferred, self.handler = number, deferred, signal.getsignal(number)

    def __enter__(self):
        if callable(self.handler):
            signal.signal(self.number, lambda number, frame: self.deferred.append(number))

    def __exit__(self, *error):
        if callable(self.handler):
            signal.signal(self.number, self.handler)


def raise_deferred(deferred: Sequence[int]) -> None:
    """Run the handlers of deferred signals, SIGINT first."""
    if deferred:
        number = min(deferred)
        try:
            signal.raise_signal(number)
        finally:
            raise_deferred([other for other in deferred if other != number])


def wait(
    changed: threading.Condition, over: Callable[[], bool], seconds: float = math.inf, by_the_clock: bool = False
) -> bool:
    """Wait until a predicate holds or the time is out, and return whether it holds; Ctrl-C ends the wait.

    The lock of `changed` is held while `over` is evaluated, and released afterwards; the caller does not hold it. With
    `by_the_clock`, `over` may become true without a notification, so that every thread polls.
    """
    looks = by_the_clock or threading.current_thread() is threading.main_thread()
    longest = _GLANCE_SECONDS if looks else threading.TIMEOUT_MAX
    end = time.monotonic() + seconds
    while True:
        with uninterrupted() as deferred, changed:
            while not (found := over()) and not deferred and (left := end - time.monotonic()) > 0:
                changed.wait(min(left, longest))
            if found or not deferred:
                return found


def next_of(items: queue.Queue | queue.SimpleQueue) -> Any:
    """Wait for the next item of a queue; Ctrl-C ends the wait."""
    longest = _GLANCE_SECONDS if threading.current_thread() is threading.main_thread() else None
    while True:
        with contextlib.suppress(queue.Empty):
            return items.get(timeout=longest)
