"""However a trainer leaves its shadow, nothing hangs and no thread is left."""

import signal
import threading

import pytest
from meetings import PARAMS, Gate, Stuck, state_of
from world import join_all, no_threads_left, until

from jaxrec.shadowsync import AllToAll, PeerLeft, Shadow, model_averaging


def test_what_a_round_raises_surfaces_at_the_next_exchange_and_on_leaving():
    gate = Gate(AllToAll(model_averaging(), PARAMS), error=ValueError("corrupt"))
    gate.open.set()
    with pytest.raises(ValueError, match="corrupt"), Shadow(gate) as shadow:
        state = shadow.exchange(state_of(1.0, 2.0))
        until(no_threads_left)
        shadow.exchange(state)
    gate = Gate(AllToAll(model_averaging(), PARAMS), error=ValueError("corrupt"))
    with pytest.raises(ValueError, match="corrupt"), Shadow(gate) as shadow:
        shadow.exchange(state_of(1.0, 2.0))
        assert gate.entered.wait(60)
        gate.open.set()
    assert no_threads_left()


def test_a_meet_that_never_returns_does_not_hold_up_who_leaves():
    rule = model_averaging()
    stuck = Stuck(AllToAll(rule, PARAMS, timeout_s=0.2))
    with pytest.raises(
        TimeoutError, match=r"trainer 0: `sync_round` of Stuck .* timeout_s=0\.2, and the thread is left"
    ):
        with Shadow(stuck) as shadow:
            shadow.exchange(state_of(1.0))
            assert stuck.entered.wait(60)
    stuck.end()
    stuck = Stuck(AllToAll(rule, PARAMS, timeout_s=0.2))
    with pytest.raises(OSError, match="its own") as caught, Shadow(stuck) as shadow:
        shadow.exchange(state_of(1.0))
        assert stuck.entered.wait(60)
        raise OSError("its own")
    assert "the thread is left there" in caught.value.__notes__[0]
    stuck.end()


class Interrupting(threading.Condition):
    """A condition that raises SIGINT once the main thread has taken its lock for the n-th time."""

    def __init__(self, countdown):
        super().__init__()
        self.countdown = countdown

    def __enter__(self):
        found = super().__enter__()
        if threading.current_thread() is threading.main_thread():
            self.countdown -= 1
            if self.countdown == 0:
                signal.raise_signal(signal.SIGINT)
        return found

    def is_free(self):
        free = []

        def try_it():
            if taken := self.acquire(timeout=30):
                self.release()
            free.append(taken)

        thread = threading.Thread(target=try_it)
        thread.start()
        join_all([thread])
        return free == [True]


@pytest.mark.parametrize(
    ("whose", "countdown"), [("shadow", 1), ("shadow", 2), ("shadow", 3), ("transport", 1), ("transport", 2)]
)
def test_ctrl_c_leaves_no_lock_held_and_no_thread(monkeypatch, whose, countdown):
    changed, plain = Interrupting(countdown), threading.Condition

    def made(of, make):
        """Call `make` with the interrupting condition if `of` is the subject; an `Event` keeps the lock it passes."""
        with monkeypatch.context() as patch:
            patch.setattr(threading, "Condition", lambda lock=None: plain(lock) if lock or whose != of else changed)
            return make()

    transport = made("transport", lambda: AllToAll(model_averaging(), PARAMS))
    with pytest.raises(KeyboardInterrupt):
        with made("shadow", lambda: Shadow(transport)) as shadow:
            state = shadow.exchange(state_of(1.0))
            shadow.finish(state)
    assert changed.countdown <= 0 and changed.is_free()
    until(no_threads_left)


def test_ctrl_c_while_entering_ends_the_thread():
    rule = model_averaging()
    transport = AllToAll(rule, PARAMS, 2)

    class Asked(AllToAll):
        def join(self, trainer):
            transport.join(trainer)
            signal.raise_signal(signal.SIGINT)

        def leave(self, trainer, error=None):
            transport.leave(trainer, error)

    with pytest.raises(KeyboardInterrupt), Shadow(Asked(rule, PARAMS)):
        raise AssertionError("it was entered")
    until(no_threads_left)
    with pytest.raises(PeerLeft, match="trainer 0 left after its round 0 with KeyboardInterrupt"):
        transport.join(1)
