"""Threads in tests: waiting for them, where they are, which are left, and Ctrl-C."""

import contextlib
import gc
import itertools
import signal
import sys
import threading
import time
import traceback

import pytest

WORKERS = ("oac-", "trainer", "shadow")  # name prefixes of threads that a run must not leave
DEADLINE_S = 60  # generous, as other threads may run late on a busy machine


def until(condition, seconds=DEADLINE_S):
    """Wait for a condition set by another thread or process, yielding the core meanwhile."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {seconds} s"
        time.sleep(0.001)


def join_all(threads):
    """Join threads within one common deadline."""
    end = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    alive = [thread.name for thread in threads if thread.is_alive()]
    assert not alive, f"{alive} hang"


def workers(*names):
    """Live threads whose names begin with one of `names`, by default with those that a run must not leave."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(names or WORKERS)]


def no_threads_left():
    return not workers()


def frames():
    """{thread id: innermost frame}, including threads that Python no longer lists."""
    return sys._current_frames()  # the only way in CPython to get the frames of other threads


def is_inside(function, thread=None):
    """Whether a thread (None: the main thread) is currently inside a call of a function."""
    frame = frames().get((thread or threading.main_thread()).ident)
    return frame is not None and any(at.f_code is function.__code__ for at, _ in traceback.walk_stack(frame))


@contextlib.contextmanager
def at_line(function, number, act):
    """Call `act` just before this thread runs the number-th line of a function, from 0; yield the line numbers hit.

    `act` must not wait for a lock that the function may hold there.
    """
    lines, times = itertools.count(), []

    def trace(frame, event, argument):
        if event == "line" and next(lines) == number:
            times.append(frame.f_lineno)
            act()
        return trace

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: trace if frame.f_code is function.__code__ else None)
    try:
        yield times
    finally:
        sys.settrace(before)


def interrupt_when(condition, then=lambda: None):
    """Send SIGINT to the main thread once a condition holds, then call `then`; return the thread that does so."""

    def wait_and_send():
        until(condition)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        then()

    thread = threading.Thread(target=wait_and_send)
    thread.start()
    return thread


@pytest.fixture
def no_automatic_gc():
    """No thread collects garbage by itself; while one does, `gc.collect` in another does nothing."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def ctrl_c():
    """Installs Python's SIGINT handler; a shell's background job starts with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def in_threads(*acts):
    """Runs each function in a thread; returns what each has returned or raised, in order."""
    found = [None] * len(acts)

    def run(number, act):
        try:
            found[number] = act()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=item, name=f"act-{item[0]}", daemon=True) for item in enumerate(acts)]
    for thread in threads:
        thread.start()
    join_all(threads)
    return found
