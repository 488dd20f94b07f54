"""Ctrl-C put off: a lock is not left held, and what belongs together is done or not begun.

Python raises KeyboardInterrupt between any two instructions of the main thread, also between taking a lock and the
block that would release it. A second one comes while the first is dealt with.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

# How often a wait of the main thread looks whether a signal came: its handler runs on that thread and cannot notify it.
_GLANCE_SECONDS = 0.05


@contextlib.contextmanager
def uninterrupted() -> Iterator[list[int]]:
    """Puts Ctrl-C off until the block is left; yields the list of those that came. Only the main thread gets any."""
    asked: list[int] = []
    # A process that dies of SIGINT, or one whose handler is not Python's, is never interrupted in the middle of Python.
    if threading.current_thread() is not threading.main_thread() or not callable(signal.getsignal(signal.SIGINT)):
        yield asked
        return
    handler = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, handler)
        if asked:
            signal.raise_signal(signal.SIGINT)


def wait(changed: threading.Condition, over: Callable[[], bool], seconds: float) -> bool:
    """Waits for a condition, whose lock nobody holds, until something is over; Ctrl-C ends it with the lock free.

    Args:
      changed: notified when `over` may have become true.
      over: looked at under the lock.
      seconds: the longest wait.

    Returns:
      Whether it was over.
    """
    main = threading.current_thread() is threading.main_thread()
    longest = _GLANCE_SECONDS if main else threading.TIMEOUT_MAX
    end = time.monotonic() + seconds
    while True:
        with uninterrupted() as asked, changed:
            while not (found := over()) and not asked and (left := end - time.monotonic()) > 0:
                changed.wait(min(left, longest))
            if found or not asked:
                return found
