"""Transports that a test can block, a clock that it advances, and trainers with a few parameters."""

import functools
import itertools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from threads import DEADLINE_S, is_inside, join_all, no_threads_left, until, workers

from jaxrec.interrupts import wait
from jaxrec.shadowsync import PeerLeft
from jaxrec.types import DenseState, TrainState

PARAMS = {"w": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}


def state_of(*values):
    """A state with one replica for each value."""
    params = {"w": jnp.asarray(values, jnp.float32)[:, None] * jnp.ones((1, 3)), "b": jnp.zeros((len(values), 2))}
    return TrainState(DenseState(jnp.zeros((), jnp.int32), params, {}), None)


@functools.partial(jax.jit, donate_argnums=0)
def step_dense(dense, change):
    """Adds `change` to every parameter and donates the state, as a train step does."""
    return dense._replace(step=dense.step + 1, params=jax.tree.map(lambda x: x + change, dense.params))


def step(state, change=1.0):
    return state._replace(dense=step_dense(state.dense, change))


def weights(state):
    return np.asarray(state.dense.params["w"])[:, 0]


def of(*values):
    """Parameters of one replica for each value, in the form that a transport takes."""
    return {"w": np.array(values, np.float32)[:, None] * np.ones(3, np.float32)}


def waits(transport, *trainers):
    """A condition that holds once each trainer has read the clock, as those waiting in `sync_round` do repeatedly.

    Created before the trainers enter `sync_round`, it holds once all of them wait there.
    """
    before = [transport.last_seen(trainer) for trainer in trainers]
    return lambda: all(transport.last_seen(i) != seen for i, seen in zip(trainers, before, strict=True))


def joined(transport, *trainers):
    for trainer in trainers:
        transport.join(trainer)
    return transport


def in_meet(transport):
    """The names of the threads that wait for other trainers in `sync_round` of an AllToAll or a Centre."""
    meeting = [thread for thread in threading.enumerate() if is_inside(type(transport).sync_round, thread)]
    return [thread.name for thread in meeting if is_inside(wait, thread)]


class Clock:
    """The clock of transports and synchronisers: it advances on demand, and by a nanosecond at each read.

    Waiting trainers read it often: every eighth of the transport's `timeout_s`, in real seconds.
    """

    def __init__(self, monkeypatch):
        self.now, self.looks = 1000.0, itertools.count()
        for name in ("transport", "synchroniser"):
            monkeypatch.setattr(f"jaxrec.shadowsync.{name}.time", self)

    def __getattr__(self, name):
        return getattr(time, name)

    def monotonic(self):
        return self.now + 1e-9 * next(self.looks)

    def goes_on(self, seconds, transport=None, *trainers, unless=lambda: False):
        """Advances by `seconds` at once; returns when trainers waiting in `sync_round` have seen it or `unless()`."""
        self.now += seconds
        if trainers:
            seen = waits(transport, *trainers)
            until(lambda: seen() or unless())


def folded(shadow, state):
    """The state after one more round, whose result is folded in as soon as it is available."""
    rounds, end = shadow.rounds, time.monotonic() + DEADLINE_S
    while shadow.rounds == rounds:
        assert time.monotonic() < end, "no round"
        state = shadow.exchange(state)
        time.sleep(0.001)
    return state


class Around:
    """A transport that delegates to another one all that it does not override."""

    def __init__(self, transport):
        self.transport = transport

    def __getattr__(self, name):
        return getattr(self.transport, name)


class Gate(Around):
    """A transport whose rounds block until it is opened, then run or raise `error`."""

    def __init__(self, transport, error=None):
        super().__init__(transport)
        self.error, self.entered, self.open = error, threading.Event(), threading.Event()

    def sync_round(self, trainer, before, done):
        self.entered.set()
        assert self.open.wait(60)
        if self.error:
            raise self.error
        return self.transport.sync_round(trainer, before, done)


class Once(Around):
    """A transport of a single round over one that trainer 0 has joined; later rounds block until a trainer leaves."""

    def __init__(self, transport):
        super().__init__(transport)
        self.met, self.left = False, threading.Event()

    def join(self, trainer):
        pass

    def sync_round(self, trainer, before, done):
        if self.met:
            assert self.left.wait(60)
            raise PeerLeft
        self.met = True
        return self.transport.sync_round(trainer, before, done)

    def leave(self, trainer, error=None):
        self.left.set()


class Steps(Around):
    """A transport whose rounds begin one by one, as the test releases them; it records the parameters brought."""

    def __init__(self, transport):
        super().__init__(transport)
        self.begin, self.brought, self.left = threading.Semaphore(0), [], False
        self.entered = threading.Event()  # by a round, which may wait to begin

    def sync_round(self, trainer, before, done):
        self.entered.set()
        assert self.begin.acquire(timeout=60)
        if self.left:
            raise PeerLeft("the test is over")
        self.brought.append([np.array(leaf) for leaf in before])
        return self.transport.sync_round(trainer, before, done)

    def leave(self, trainer, error=None):
        self.left = True
        self.transport.leave(trainer, error)
        self.begin.release()


class InOrder(Around):
    """A centre that, once `ordered`, admits each trainer's next round in the order of trainer numbers."""

    def __init__(self, transport):
        super().__init__(transport)
        self.ordered, self.next, self.changed = False, 0, threading.Condition()

    def sync_round(self, trainer, before, done):
        if done or not self.ordered:
            return self.transport.sync_round(trainer, before, done)
        with self.changed:
            assert self.changed.wait_for(lambda: self.next == trainer, 60)
            self.next += 1
            self.changed.notify_all()
            return self.transport.sync_round(trainer, before, done)


class Ends(Around):
    """A transport that records each trainer's first weight at its last round."""

    def __init__(self, transport):
        super().__init__(transport)
        self.ends = {}

    def sync_round(self, trainer, before, done):
        if done:
            self.ends[trainer] = float(before[-1].flat[0])
        return self.transport.sync_round(trainer, before, done)


class Stuck(Around):
    """A transport whose `sync_round` returns only when the test allows it, even if trainers leave."""

    def __init__(self, transport):
        super().__init__(transport)
        self.entered, self.returns, self.met = threading.Event(), threading.Event(), 0

    def sync_round(self, trainer, before, done):
        self.met += 1
        self.entered.set()
        assert self.returns.wait(60)
        return [np.asarray(leaf) for leaf in before], False

    def end(self):
        """Lets its threads end and checks that they have begun no other round."""
        self.returns.set()
        join_all(workers("shadow-"))
        assert no_threads_left() and self.met == 1
