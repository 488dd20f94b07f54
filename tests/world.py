"""Helpers shared by tests: a small click model, callbacks, waiting for threads, Ctrl-C, threads that are left."""

import contextlib
import gc
import itertools
import signal
import sys
import threading
import time
import traceback

import numpy as np
import optax
import pytest

from jaxrec import Batch

WORKERS = ("oac-", "trainer", "shadow")  # name prefixes of threads that a run must not leave
DEADLINE_S = 60  # generous, as other threads may run late on a busy machine


def loss(params, activations, batch):
    """Log loss of the dot product of the lookup `item` and the weights `w`."""
    return optax.sigmoid_binary_cross_entropy(activations["item"] @ params["w"], batch.label)


def batch_of(ids, label):
    """A batch without dense features; all examples have weight 1."""
    return Batch(ids, label)


def pair_predict(params, activations, batch):
    """Logits: dot product of the two tables of the lookup `pair`, plus a bias."""
    return activations["pair"].prod(axis=1).sum(axis=-1) + params["bias"]


def pair_loss(params, activations, batch):
    return optax.sigmoid_binary_cross_entropy(pair_predict(params, activations, batch), batch.label)


def pair_batch(size=8, seed=0, **changes):
    """A batch with random ids of tables of 40 and 9 rows."""
    rng = np.random.default_rng(seed)
    ids = {"pair": rng.integers(0, [40, 9], (size, 2)).astype(np.int32)}
    return batch_of(ids, (rng.random(size) < 0.5).astype(np.float32))._replace(**changes)


def at_step(step, act):
    """A callback that calls a function with the state after one given step."""

    def callback(info):
        if info.step == step:
            act(info.state)

    return callback


def until(condition):
    """Wait for a condition set by another thread, yielding the core meanwhile."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {DEADLINE_S} s"
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
