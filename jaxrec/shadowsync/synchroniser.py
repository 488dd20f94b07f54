"""Synchroniser of one trainer, in the background (`Shadow`) or in the foreground (`Foreground`).

The shadow is a thread that synchronises a trainer's replicas during training. No backward pass and no k-th step waits:
between two steps the trainer gives the thread a copy of its dense parameters if the thread is idle, and folds the
newest result, if any, into its current parameters. The thread copies to the host, meets the other replicas through a
transport, and launches no program on a training device. `Foreground` is the baseline: every k steps the trainer waits
for its round.

Floating leaves are synchronised and keep their dtype; all other leaves are unchanged.

Reference: Zheng et al., ShadowSync, arXiv 2003.03477. Legend: R replicas of a trainer.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jaxrec.bounds import is_not_negative, is_portion, real_number, whole_number
from jaxrec.callbacks import Callback, StepInfo
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
from jaxrec.shadowsync.stats import average_sync_gap
from jaxrec.shadowsync.transport import PeerLeft, Transport
from jaxrec.types import TrainState


class Round(NamedTuple):
    """Result of a round, on the device."""

    before: list[jax.Array]
    target: list[jax.Array]


class Synchroniser(Callback):
    """Base class of a trainer's synchroniser: `Shadow` in the background, `Foreground` in the foreground.

    It is a context manager for a loop of one's own, and a callback for an engine. If that goes back to another state (a
    `reset`, full recovery), the rounds of the group go on: the memory of its rule, such as a centre, is not of that
    state, so that results are not those of an undisturbed run.

    Attributes:
      steps: number of `exchange` calls.
      rounds: number of rounds whose results were folded in by `exchange` or `finish`, without those made by `finish`.
    """

    def __init__(self, transport: Transport, trainer: int):
        self._transport, self._trainer, self._rule = transport, trainer, transport.rule
        self._phase = "has not been entered"
        self._structures: list = []  # tree structure of the last state whose names were checked
        self.steps = self.rounds = 0

    @property
    def average_sync_gap(self) -> float:
        """Steps of this trainer per folded round; inf without a round."""
        return average_sync_gap([self.steps], [self.rounds])

    @property
    def on_failure(self) -> str:
        """Effect on the other trainers when this one leaves early: 'raise', 'drop' or 'replace'."""
        return self._transport.on_failure

    @property
    def exit_reason(self) -> str:
        """Reason why this trainer no longer takes part; empty if it does, or has finished."""
        return self._transport.exit_reason(self._trainer)

    @property
    def failure(self) -> BaseException | None:
        """Error of a round in the background, which the next `exchange` raises."""
        return None

    def __enter__(self) -> Self:
        if self._phase != "has not been entered":
            raise ValueError(f"{self._name} has been entered before: make one for each training.")
        try:
            # Ctrl-C between `join` and `_begin` would leave a joined trainer that never leaves.
            with uninterrupted():
                self._transport.join(self._trainer)
                self._phase = "open"
                self._begin()
        except BaseException as error:  # a thread that cannot start, or Ctrl-C
            if self._phase == "open":
                self.leave(error)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.end(error)

    def exchange(self, state: Any) -> Any:
        """Synchronise a state, now or in the background.

        The first call compiles the fold, so that no round waits for compilation.

        Args:
          state: TrainState with parameters [R, ...], or a pytree of parameters of one replica or [R, ...].

        Returns:
          The state to continue training from: the given one if nothing was folded in, else one whose parameters are new
          JAX arrays. No array is donated. NumPy parameters are copied, so the caller may change them in place.

        Raises:
          ValueError: called outside the `with` block; the parameters do not fit the transport's template; they are not
            finite (in the background, those of an earlier call).
          PeerLeft: another trainer has left or is overdue, or this one was dropped.
          Exception: any other error of a round.
        """
        raise NotImplementedError

    def finish(self, state: Any) -> Any:
        """Take part in rounds until all trainers are done.

        Args:
          state: state after the trainer's last step, in a form that `exchange` accepts.

        Returns:
          The state with new parameters, on the same devices and of the same dtypes; all else is unchanged. With a
          centre, every trainer gets the centre's parameters after the last round of all. With `AllToAll`, a last common
          round moves each replica by alpha (target - replica) in both forms, which scales its distance from the target
          by 1 - alpha: with alpha = 1 all replicas are equal, exactly by lerp and up to rounding by delta.

        Raises:
          As `exchange`; ValueError: called a second time, even after an interrupt.
        """
        self._check_open("finish")
        live = self._live(state)
        # Set first: after an interrupt the rounds made so far are unknown, so `finish` cannot be repeated.
        self._phase = "has called `finish`"
        live = live._replace(leaves=self._at_rest(live))
        final = self._last_rounds(live.to_host())
        return with_leaves(state, live.from_host(final))

    def begin(self, engine: Any) -> None:
        """Enter the synchroniser, as a callback of an engine."""
        self.__enter__()

    def after_step(self, info: StepInfo) -> TrainState:
        """`exchange` the state, as a callback of an engine."""
        return self.exchange(info.state)

    def end(self, error: BaseException | None) -> None:
        """Leave the synchroniser, at the end of its `with` block or that of its engine."""
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """End this trainer's participation, so that the others no longer wait for it."""
        with uninterrupted():
            if self._phase != "has left":
                self._phase = "has left"
                self._stop()
                self._transport.leave(self._trainer, error)

    def _begin(self):
        """Start work on entering the `with` block."""

    def _stop(self):
        """Begin no more rounds, except those of `finish`."""

    def _at_rest(self, live: Live) -> list[jax.Array]:
        """Return the leaves after all rounds begun before `finish`."""
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
        """Return whether a state has the structure of the last checked one, and is not traced."""
        # Shapes are checked where leaves are used; a call without work costs only this check.
        leaves, structure = jax.tree.flatten(params_of(state))
        return structure in self._structures and not isinstance(leaves[0], jax.core.Tracer)

    def _live(self, state) -> Live:
        """Return the floating leaves on the device, after checking them against the transport's template."""
        params, what = params_of(state), f"the state of trainer {self._trainer}"
        template = self._transport.template
        structure = jax.tree.structure(params)
        if structure not in self._structures:  # checking names costs more than checking shapes
            check_names(template, params, what)
            self._structures = [structure]
        has_axis = replicas_in(template, params, what) is not None
        if isinstance(state, TrainState) and not has_axis:
            raise ValueError(
                "the parameters of a TrainState have a leading axis of replicas, and those that the transport was made "
                "with have it too: make the group or the transport with one replica, the parameters given "
                "to `task.init`."
            )
        leaves = [on_device(leaf) for leaf in floating(params)]
        return Live(leaves, has_axis, fold_program(self._rule.merge, leaves))

    def _meet(self, before, done=False):
        """Make one round with NumPy leaves; return their targets and whether it was the last round."""
        # A nan would spread to all trainers. A trainer that is done sends nothing to a centre.
        if not (done and self._rule.has_centre):
            check_leaves(self._transport.template.names, before, f"the state of trainer {self._trainer}")
        return self._transport.sync_round(self._trainer, before, done)

    def _round_of(self, live) -> Round:
        target, _ = self._meet(live.to_host())
        return Round(live.leaves, live.from_host(target))

    def _folded(self, live, result):
        """Count a round and return the leaves with its result folded in; unchanged leaves if there is none."""
        if result is None:
            return live.leaves
        self.rounds += 1
        # The leaves may have moved to other devices since the round began.
        return live.fold(live.leaves, place(result.before, live.leaves), place(result.target, live.leaves))

    def _last_rounds(self, leaves):
        """Make rounds until all trainers are done; return the resulting NumPy leaves."""
        last, together = False, self._transport.last_round
        if self._rule.has_centre:
            # The others may still move the centre: make a last round with it, then wait until all are done.
            if together:
                leaves = self._rule.merge(leaves, leaves, self._meet(leaves)[0])
            while not last:
                target, last = self._meet(leaves, done=True)
            return [np.array(x, leaf.dtype) for x, leaf in zip(target, leaves, strict=True)] if together else leaves
        while not last:
            target, last = self._meet(leaves, done=True)
            if together or not last:  # else the last meeting only ends training, and its target is unused
                leaves = self._rule.merge(leaves, leaves, target)
        return leaves


class Foreground(Synchroniser):
    """Synchroniser that makes a round every k steps, for which training waits (FR-k).

    It is used in a `with` block like `Shadow`.

    Args:
      transport, trainer: as for `Shadow`.
      every_steps: k, at least 1.
      waited: steps already made since a round was due, when an earlier training is continued.
    """

    def __init__(self, transport: Transport, trainer: int = 0, *, every_steps: int, waited: int = 0):
        super().__init__(transport, trainer)
        self._every, self._before = whole_number("every_steps", every_steps), waited

    @property
    def waited(self) -> int:
        """Steps since a round was last due."""
        return (self._before + self.steps) % self._every

    def exchange(self, state: Any) -> Any:
        """Make a round if one is due; otherwise as `Synchroniser.exchange`."""
        self._check_open("exchange")
        # Compiles the fold before the first round, where all other trainers would wait for it.
        if not self._looks_known(state):
            self._live(state)
        return self.round_from(state)(state) if self.due() else state

    def due(self) -> bool:
        """Count a step, report a sign of life, and return whether a round is due."""
        self._transport.heartbeat(self._trainer)
        self.steps += 1
        return self.waited == 0

    def round_from(self, before: Any) -> Callable[[Any], Any]:
        """Make a round from a state, which must not be donated meanwhile; return the fold, state -> state.

        The two halves of `exchange`, for a trainer whose other workers keep training in between.
        """
        self._check_open("round_from")
        result = self._round_of(self._live(before))
        # Counted when folded in, as in a shadow.
        return lambda state: with_leaves(state, self._folded(self._live(state), result))


class Shadow(Synchroniser):
    """Synchroniser of a trainer's dense parameters in the background.

        with Shadow(transport) as shadow:
            for batch in batches:
                state = shadow.exchange(step(state, batch))  # never waits
            state = shadow.finish(state)                     # goes on until all trainers are done

    Args:
      transport: transport shared by all trainers; it holds the rule.
      trainer: unique number of this trainer, from 0.
      pace_seconds: minimum seconds from the start of one round to the start of the next; 0 for back-to-back rounds.
      core_share: maximum fraction of one core's time that the thread uses for rounds, in (0, 1].

    Raises:
      ValueError: a number is out of range; on entering, there is no such trainer, or its number is taken.
      PeerLeft: another trainer has left or is overdue. Errors of a round are raised by the next `exchange`, or on
        leaving the `with` block.
      TimeoutError: on leaving, the transport's `sync_round` did not return within `timeout_s`; the thread is abandoned.
    """

    def __init__(self, transport: Transport, trainer: int = 0, pace_seconds: float = 0.0, core_share: float = 1.0):
        real_number("pace_seconds", pace_seconds, "0 or more", is_not_negative)
        real_number("core_share", core_share, "above 0 and at most 1", is_portion)
        super().__init__(transport, trainer)
        self._pace, self._core_share = pace_seconds, core_share
        self._changed = threading.Condition()  # guards the fields below
        self._handed: Live | None = None  # copy waiting for the thread
        self._result: Round | None = None  # result of the thread since the last exchange
        self._busy = self._stopped = self._ended = False
        self._outdated = False  # the round in flight is of a state that was replaced
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"shadow-{trainer}", daemon=True)

    @property
    def failure(self) -> BaseException | None:
        """See `Synchroniser`."""
        return self._failure

    def _begin(self):
        self._thread.start()

    def end(self, error: BaseException | None) -> None:
        """See `Synchroniser`; also wait for the thread, and raise its error unless there is another one."""
        self.leave(error)
        if self._has_ended(self._transport.timeout_s):
            if error is None:
                self._raise_failure()
            return
        message = (
            f"{self._name}: `sync_round` of {type(self._transport).__name__} has not returned within "
            f"timeout_s={self._transport.timeout_s:g}, and the thread is left there."
        )
        if error is None:
            raise TimeoutError(message)
        error.add_note(message)

    def exchange(self, state: Any) -> Any:
        """Fold in the newest result, and give the thread a copy if it is idle; never wait.

        A call without work checks only the state's structure. All else as in `Synchroniser.exchange`.
        """
        self._check_open("exchange")
        self._raise_failure()
        self._transport.heartbeat(self._trainer)
        # Without the lock, as most calls end here: a result that arrives now is folded in by the next call.
        if self._result is None and (self._busy or self._handed is not None) and self._looks_known(state):
            self.steps += 1
            return state
        live = self._live(state)
        self.steps += 1
        # Both under one lock: the result of a round that ended in between would not be taken, and the next round, which
        # the copy below begins, would overwrite it.
        with uninterrupted(), self._changed:
            result, self._result = self._result, None
            free = self._handed is None and not self._busy
        leaves = self._folded(live, result)
        if free:
            # Copied after the fold: a copy from before it would send updates that this round has already sent.
            copy = live._replace(leaves=copied(leaves))
            with uninterrupted(), self._changed:
                self._handed = copy
                self._changed.notify_all()
        return state if result is None else with_leaves(state, leaves)

    def restarted(self, state: TrainState) -> None:
        """Drop what the thread has, or will have, of the state that is replaced."""
        with uninterrupted(), self._changed:
            self._handed = self._result = None
            self._outdated = self._busy

    def _stop(self):
        with uninterrupted(), self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _at_rest(self, live):
        self._stop()
        self._has_ended()  # waits for a round in flight, whose time the transport bounds
        self._raise_failure()
        return self._folded(live, self._result)

    def _has_ended(self, seconds=math.inf):
        """Wait for the end of the thread; return whether it ended within the given time."""
        if not wait(self._changed, lambda: self._ended, seconds):
            return False
        with uninterrupted():
            self._thread.join()  # returns at once: setting `_ended` is the thread's last action
        return True

    def _run(self):
        try:
            while (handed := self._next()) is not None:
                self._round(handed)
        except BaseException as error:
            # A `PeerLeft` that only reports that this trainer itself has left is no failure of the thread.
            if not (self._phase == "has left" and isinstance(error, PeerLeft)):
                self._failure = error
                self._transport.leave(self._trainer, error)
        finally:
            with self._changed:
                # Last, and after any error: `end` and `finish` wait for it.
                self._ended = True
                self._changed.notify_all()

    def _next(self) -> Live | None:
        """Wait for the copy for the next round; return None once stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._handed is not None or self._stopped)
            if self._stopped:
                return None
            # Under one lock: an exchange in between would give the thread a second copy.
            handed, self._handed, self._busy = self._handed, None, True
            return handed

    def _round(self, handed):
        start, before = time.monotonic(), time.thread_time()
        # Without the lock: a round may wait for all other trainers while this one keeps training.
        result = self._round_of(handed)
        with self._changed:
            # Under one lock: an exchange that finds the thread idle also finds its result.
            self._result = None if self._outdated else result
            self._busy = self._outdated = False
            self._changed.notify_all()
            pace = max(self._pace, (time.thread_time() - before) / self._core_share)
            left = start + pace - time.monotonic()
            if left > 0:
                self._busy = True  # else a copy taken now would be stale when the next round begins
                self._changed.wait_for(lambda: self._stopped, min(left, threading.TIMEOUT_MAX))
                self._busy = self._outdated = False

    def _raise_failure(self):
        if self._failure is not None:
            raise self._failure
