"""One trainer's place among the others: its synchroniser, in the background (`Shadow`) or in the foreground.

The shadow is a thread that synchronises a trainer's replicas while it trains. Neither the backward pass nor every k-th
step waits: between two steps a trainer hands a copy of its dense parameters over if the thread is free, and folds the
newest result in if there is one, on the parameters as they are by then. The thread reads to the host, meets the other
replicas through a transport, and launches no program on a training device. `Foreground` is what it is compared with:
every k steps the trainer waits for its round.

Floating leaves are synchronised and keep their dtype; all others are left alone.

Reference: Zheng et al., ShadowSync, arXiv 2003.03477. Legend: R replicas of a trainer.
"""

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jaxrec.bounds import is_not_negative, is_portion, is_positive, real_number, whole_number
from jaxrec.interrupts import uninterrupted, wait
from jaxrec.shadowsync.params import (
    Live,
    check_leaves,
    check_names,
    copied,
    floating,
    fold_program,
    on_device,
    params_of,
    place,
    replicas_in,
    with_leaves,
)
from jaxrec.shadowsync.transport import PeerLeft, Transport
from jaxrec.types import TrainState


class Round(NamedTuple):
    """What a round has found, on the device."""

    before: list[jax.Array]
    target: list[jax.Array]
    bytes: int  # brought and taken


class Synchroniser:
    """One trainer's part in the synchronisation: `Shadow` in the background, or `Foreground`.

    Attributes:
      steps: calls of `exchange`.
      rounds: whose results were folded in, by `exchange` or by `finish`; not those that `finish`
        itself makes.
      bytes: of floating leaves that these rounds have brought and taken.
    """

    def __init__(self, transport: Transport, trainer: int):
        self._transport, self._trainer, self._rule = transport, trainer, transport.rule
        self._phase = "has not been entered"
        self._structures: list = []  # of the last state, whose names fit
        self.steps = self.rounds = self.bytes = 0

    @property
    def average_sync_gap(self) -> float:
        """Steps of this trainer per round that it has folded in; inf if there was none."""
        return self.steps / self.rounds if self.rounds else float("inf")

    @property
    def on_failure(self) -> str:
        """What becomes of the others when this trainer leaves early: 'raise', 'drop' or 'replace'."""
        return self._transport.on_failure

    @property
    def why_gone(self) -> str:
        """Why the others go on without this trainer; empty if they do not."""
        return self._transport.why_gone(self._trainer)

    def __enter__(self) -> Self:
        if self._phase != "has not been entered":
            raise ValueError(f"{self._name} has been entered before: make one for each training.")
        try:
            # Ctrl-C between joining and beginning would leave a place taken that no trainer leaves.
            with uninterrupted():
                self._transport.join(self._trainer)
                self._phase = "open"
                self._begin()
        except BaseException as error:  # no more threads, or Ctrl-C
            if self._phase == "open":
                self.leave(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave(error)

    def exchange(self, state: Any) -> Any:
        """Synchronises a state, now or in the background.

        The first call compiles the fold, so that no round waits for it.

        Args:
          state: TrainState with parameters [R, ...], or a pytree of parameters, of one replica or
            [R, ...].

        Returns:
          The state to train on. It is the one given where nothing was folded in; else its
          parameters are new arrays of JAX, also where they were NumPy's, which may be changed in
          place: their values are copied at once. No array is donated.

        Raises:
          ValueError: outside of the `with` block; the parameters do not fit those of the transport,
            or are not finite (in the background those of an earlier call).
          PeerLeft: another trainer has left or is overdue, or this one has been dropped.
          Exception: whatever else a round raised.
        """
        raise NotImplementedError

    def finish(self, state: Any) -> Any:
        """Takes part in rounds until all trainers are done.

        Args:
          state: after the trainer's last step, as `exchange` takes it.

        Returns:
          The state with new parameters, on the same devices and of the same dtypes; all else is as
          it was. With a centre they are the centre's after the last round of all trainers: the same
          model for each. With AllToAll each trainer has its replica after a last round of all: by
          lerp it is 1 - alpha of its old distance from the target, so all are equal with alpha = 1;
          by delta it is moved by alpha (target - replica), the same here.

        Raises:
          As `exchange`; ValueError: again, even after an interrupt.
        """
        self._check_open("finish")
        live = self._live(state)
        # After an interrupt it is not known which rounds were made, so that it cannot be called again.
        self._phase = "has called `finish`"
        live = live._replace(leaves=self._at_rest(live))
        final = self._last_rounds(live.to_host())
        return with_leaves(state, live.from_host(final))

    def hook(self, state: TrainState, step: int, plans: dict, metrics: dict) -> TrainState:
        """`exchange` as a hook of `fit` or `Pipeline`."""
        return self.exchange(state)

    def leave(self, error: BaseException | None = None) -> None:
        """Tells the others not to wait for this trainer any more: it takes no part from now on."""
        with uninterrupted():
            if self._phase != "has left":
                self._phase = "has left"
                self._stop()
                self._transport.leave(self._trainer, error)

    def _begin(self):
        """What begins with the `with` block."""

    def _stop(self):
        """No round begins any more, but for those of `finish`."""

    def _at_rest(self, live: Live) -> list[jax.Array]:
        """The leaves after all rounds that were begun before `finish`."""
        return live.leaves

    @property
    def _name(self):
        return f"{type(self).__name__} of trainer {self._trainer}"

    def _check_open(self, what):
        if self._phase != "open":
            raise ValueError(
                f"`{what}` comes inside of the `with` block and before `finish`: {self._name} {self._phase}."
            )

    def _looks_known(self, state):
        """Whether a state has the structure of those before, and is not traced."""
        # Shapes are looked at where leaves are used: this is all that a call with nothing to do
        # costs.
        leaves, structure = jax.tree.flatten(params_of(state))
        return structure in self._structures and not isinstance(leaves[0], jax.core.Tracer)

    def _live(self, state) -> Live:
        """The floating leaves on the device, which must be those of the transport's parameters."""
        params, what = params_of(state), f"the state of trainer {self._trainer}"
        template = self._transport.template
        structure = jax.tree.structure(params)
        if structure not in self._structures:  # names cost more than shapes
            check_names(template, params, what)
            self._structures = [structure]
        has_axis = replicas_in(template, params, what) is not None
        if isinstance(state, TrainState) and not has_axis:
            raise ValueError(
                "the parameters of a TrainState have a leading axis of replicas, and those that the transport was made "
                "with have it too: make the group or the transport with one replica, the parameters that "
                "`init_state` was given."
            )
        leaves = [on_device(leaf) for leaf in floating(params)]
        return Live(leaves, has_axis, fold_program(self._rule.merge, leaves))

    def _meet(self, before, done=False):
        """One round on leaves in numpy: where they should move to, and whether it was the last."""
        # One nan would spread to all trainers. A trainer that is done brings nothing to a centre.
        if not (done and self._rule.has_centre):
            check_leaves(self._transport.template.names, before, f"the state of trainer {self._trainer}")
        return self._transport.meet(self._trainer, before, done)

    def _round_of(self, live) -> Round:
        before = live.to_host()
        target, _ = self._meet(before)
        moved = sum(leaf.nbytes for leaf in (*before, *target))
        return Round(live.leaves, live.from_host(target), moved)

    def _folded(self, live, result):
        """Leaves on the device after a round that is counted now; as they are if there is none."""
        if result is None:
            return live.leaves
        self.rounds += 1
        self.bytes += result.bytes
        # The leaves may lie elsewhere by now than when the round began.
        return live.fold(live.leaves, place(result.before, live.leaves), place(result.target, live.leaves))

    def _last_rounds(self, leaves):
        """Rounds of a trainer that is done, until all are; the leaves in numpy after them."""
        last, together = False, self._transport.last_round
        if self._rule.has_centre:
            # The others may still move the centre: this trainer brings its part, then waits for the
            # end of all.
            if together:
                leaves = self._rule.merge(leaves, leaves, self._meet(leaves)[0])
            while not last:
                target, last = self._meet(leaves, done=True)
            return [np.array(x, leaf.dtype) for x, leaf in zip(target, leaves, strict=True)] if together else leaves
        while not last:
            target, last = self._meet(leaves, done=True)
            if together or not last:  # else the last is no round: all stay as they are
                leaves = self._rule.merge(leaves, leaves, target)
        return leaves


class Foreground(Synchroniser):
    """Synchronises every so many steps or seconds: training waits for each round (FR-k).

    Used as `Shadow` is, in a `with` block.

    Args:
      transport, trainer: as for `Shadow`.
      every_steps: k, or None.
      every_seconds: or this.
      waited: how many of these steps or seconds have passed already, in an earlier training that
        goes on here.

    Raises:
      ValueError: not exactly one of the two is given, or it is below 1 step or not above 0 seconds.
    """

    def __init__(
        self,
        transport: Transport,
        trainer: int = 0,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        waited: float = 0,
    ):
        if (every_steps is None) == (every_seconds is None):
            raise ValueError("give every_steps or every_seconds, one of them.")
        if every_steps is not None:
            whole_number("every_steps", every_steps)
        if every_seconds is not None:
            real_number("every_seconds", every_seconds, "above 0 and finite", is_positive)
        super().__init__(transport, trainer)
        self._steps, self._seconds, self._before = every_steps, every_seconds, waited

    @property
    def waited(self) -> float:
        """How many steps or seconds have passed since it was time for a round."""
        if self._steps is not None:
            return (self._before + self.steps) % self._steps
        return self._before if self._phase == "has not been entered" else time.monotonic() - self._last

    def _begin(self):
        # Not when it was made: what is compiled in between is no training.
        self._last = time.monotonic() - self._before

    def exchange(self, state: Any) -> Any:
        """Makes a round if it is time for one; else as `Synchroniser.exchange`."""
        self._check_open("exchange")
        # Compiles the fold before the first round, in which all others would wait for it.
        if not self._looks_known(state):
            self._live(state)
        return self.meet(state)(state) if self.due() else state

    def due(self) -> bool:
        """Counts a step, by which this trainer is heard of; says whether it is time for a round."""
        self._transport.alive(self._trainer)
        self.steps += 1
        if self._steps is not None:
            return self.waited == 0
        if self._seconds is not None and time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True

    def meet(self, before: Any) -> Callable[[Any], Any]:
        """Makes a round; the first half of an `exchange`, whose second is the function that it
        returns.

        For a trainer whose other workers step on between the two.

        Args:
          before: as `exchange` takes it; it may not be donated during the round.

        Returns:
          A function: the state as it is by then -> the state with the round's result folded in.

        Raises:
          As `exchange`.
        """
        self._check_open("meet")
        result = self._round_of(self._live(before))
        # Counted where it is folded in, as a shadow's.
        return lambda state: with_leaves(state, self._folded(self._live(state), result))


class Shadow(Synchroniser):
    """Synchronises a trainer's dense parameters in the background.

        with Shadow(transport) as shadow:
            for batch in batches:
                state = shadow.exchange(step(state, batch))  # never waits
            state = shadow.finish(state)                     # goes on until all trainers are done

    Args:
      transport: shared by all trainers; it has the rule.
      trainer: the number of this one, from 0; each has its own.
      pace_seconds: the least time from one round to the next; 0 is back to back.
      core_share: of the time of a core, the largest part that the thread takes for its rounds, up to 1.

    Raises:
      ValueError: a number out of range. On entering: no such trainer, or a taken one.
      PeerLeft: another trainer has left, or is overdue. It and whatever else a round raises come with
        the next `exchange`, or on leaving the `with` block.
      TimeoutError: on leaving, `meet` of the transport has not returned within its `timeout_s`; the thread is left
        there.
    """

    def __init__(self, transport: Transport, trainer: int = 0, pace_seconds: float = 0.0, core_share: float = 1.0):
        real_number("pace_seconds", pace_seconds, "0 or more", is_not_negative)
        real_number("core_share", core_share, "above 0 and at most 1", is_portion)
        super().__init__(transport, trainer)
        self._pace, self._core_share = pace_seconds, core_share
        self._changed = threading.Condition()  # guards all that follows
        self._handed: Live | None = None  # a copy for the thread
        self._result: Round | None = None  # what the thread has found since the last exchange
        self._busy = self._stopped = self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"shadow-{trainer}", daemon=True)

    def _begin(self):
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave(error)
        if self._has_ended(self._transport.timeout_s):
            if error is None:
                self._raise_failure()
            return
        message = (
            f"{self._name}: `meet` of {type(self._transport).__name__} has not returned within "
            f"timeout_s={self._transport.timeout_s:g}, and the thread is left there."
        )
        if error is None:
            raise TimeoutError(message)
        error.add_note(message)

    def exchange(self, state: Any) -> Any:
        """Folds the newest result in, and hands a copy over if the thread is free; never waits.

        A call that has nothing to do looks at the state's structure only. All else as `Synchroniser.exchange`.
        """
        self._check_open("exchange")
        self._raise_failure()
        self._transport.alive(self._trainer)
        # Without the lock, as most calls end here: a result that comes now is for the next one.
        if self._result is None and (self._busy or self._handed is not None) and self._looks_known(state):
            self.steps += 1
            return state
        live = self._live(state)
        self.steps += 1
        # Both under one lock: a round that ends between them would leave its result where the next
        # round, which the copy handed over now begins, puts its own.
        with uninterrupted(), self._changed:
            result, self._result = self._result, None
            free = self._handed is None and not self._busy
        leaves = self._folded(live, result)
        if free:
            # After the fold: a copy from before it would bring to the others what this round has
            # already told them.
            copy = live._replace(leaves=copied(leaves))
            with uninterrupted(), self._changed:
                self._handed = copy
                self._changed.notify_all()
        return state if result is None else with_leaves(state, leaves)

    def _stop(self):
        with uninterrupted(), self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _at_rest(self, live):
        self._stop()
        self._has_ended()  # a round that is under way ends: the transport bounds its time
        self._raise_failure()
        return self._folded(live, self._result)

    def _has_ended(self, seconds=math.inf):
        """Waits for the end of the thread; says whether it came."""
        if not wait(self._changed, lambda: self._ended, seconds):
            return False
        with uninterrupted():
            self._thread.join()  # it has nothing more to do
        return True

    def _run(self):
        try:
            while (handed := self._next()) is not None:
                self._round(handed)
        except BaseException as error:
            # That this trainer has left, it is told by the transport that it was left: no failure of the thread.
            if not (self._phase == "has left" and isinstance(error, PeerLeft)):
                self._failure = error
                self._transport.leave(self._trainer, error)
        finally:
            with self._changed:
                # Last of all, and whatever was raised, as `leave` and `finish` wait for it.
                self._ended = True
                self._changed.notify_all()

    def _next(self) -> Live | None:
        """The copy to bring to the next round; None when there is none to come."""
        with self._changed:
            self._changed.wait_for(lambda: self._handed is not None or self._stopped)
            if self._stopped:
                return None
            # In one breath: an exchange in between would hand over a second copy.
            handed, self._handed, self._busy = self._handed, None, True
            return handed

    def _round(self, handed):
        start, before = time.monotonic(), time.thread_time()
        # Without the lock, as it may wait for all others: training goes on meanwhile.
        result = self._round_of(handed)
        with self._changed:
            # Together: an exchange that finds the thread free finds its result, too.
            self._result, self._busy = result, False
            self._changed.notify_all()
            pace = max(self._pace, (time.thread_time() - before) / self._core_share)
            left = start + pace - time.monotonic()
            if left > 0:
                self._busy = True  # else a copy is taken now that is old when the next round begins
                self._changed.wait_for(lambda: self._stopped, min(left, threading.TIMEOUT_MAX))
                self._busy = False

    def _raise_failure(self):
        if self._failure is not None:
            raise self._failure
