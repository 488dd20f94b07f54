"""The shadow: a thread that synchronises a trainer's replicas while it trains.

Neither the backward pass nor every k-th step waits: between two steps a trainer hands a copy of its
dense parameters over if the thread is free, and folds the newest result in if there is one, on the
parameters as they are by then. The thread reads to the host, meets the other replicas through a
transport, and launches no program on a training device.

Reference: Zheng et al., ShadowSync, arXiv 2003.03477. Legend: R replicas of a trainer.
"""

import threading
import time
from types import TracebackType
from typing import Any

import numpy as np

from jaxrec.bounds import is_not_negative, is_portion, real_number
from jaxrec.interrupts import uninterrupted, wait
from jaxrec.shadowsync.leaves import Live, copied, with_leaves
from jaxrec.shadowsync.meeting import Left, Transport
from jaxrec.shadowsync.synchroniser import Round, Synchroniser


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
      ValueError: no transport; a number out of range. On entering: no such trainer, or a taken one.
      Left: another trainer has left, or is overdue. It and whatever else a round raises come with
        the next `exchange`, or on leaving the `with` block.
      TimeoutError: on leaving, the thread has not ended within `timeout_s` of the transport, as
        when `meet` does not return: it is left behind, and does nothing with what may still come.
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
        self._met_at: float | None = None  # when `meet` was called that has not returned
        self._at_end: Live | None = None  # of a trainer that is done, without its leaves
        self._final: list[np.ndarray] = []  # its leaves [R, ...], then those after the last rounds
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"shadow-{trainer}", daemon=True)

    def _begin(self):
        self._thread.start()

    def leave(self, error: BaseException | None = None) -> None:
        """Tells the others not to wait for this trainer any more: it fails, and its thread ends."""
        with uninterrupted():
            # Stopped first: that it has left, which the thread then hears, is no failure of it.
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            super().leave(error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave(error)
        if not wait(self._changed, lambda: self._ended, self._transport.timeout_s):
            self._leave_behind(error)
            return
        with uninterrupted():
            self._thread.join()  # it has nothing more to do
        if error is None:
            self._raise_failure()

    def _leave_behind(self, error):
        why = f"timeout_s={self._transport.timeout_s:g}; its thread is left behind and does nothing with what may come."
        if self._met_at is None:
            message = f"{self._name} is still at work after {why}"
        else:
            message = f"{self._name}: `meet` of {type(self._transport).__name__} has not returned for {why}"
        if error is None:
            raise TimeoutError(message)
        error.add_note(message)

    def exchange(self, state: Any) -> Any:
        """Folds the newest result in, and hands a copy over if the thread is free; never waits.

        The first call compiles the fold, so that the first result is folded in as soon as it is
        there. A call that has nothing to do looks at the state's structure only.

        Args:
          state: TrainState with parameters [R, ...], or a pytree of parameters, of one replica or
            [R, ...].

        Returns:
          The state to train on. It is the one given where nothing was folded in; else its
          parameters are new arrays of JAX, also where they were NumPy's, which may be changed in
          place: their values are copied at once. No array is donated.

        Raises:
          ValueError: outside of the `with` block; the parameters do not fit those of the transport;
            those of an earlier call were not finite.
          Left: another trainer has left or is overdue, or this one has been dropped.
          Exception: whatever else a round raised.
        """
        self._check_open("exchange")
        self._raise_failure()
        self._tell_alive(self._trainer)
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
          ValueError: outside of the `with` block, or again, even after an interrupt; parameters do
            not fit or are not finite.
          Left: another trainer has left or is overdue, or this one has been dropped.
          TimeoutError: `meet` neither has returned nor was at work for three times `timeout_s` of
            the transport.
          Exception: whatever else a round raised.
        """
        self._check_open("finish")
        self._raise_failure()
        live = self._live(state)
        with uninterrupted():  # else an interrupt could fold a result in and then not use it
            self._phase = "begun to finish before"
            with self._changed:
                result, self._result = self._result, None
            live = live._replace(leaves=self._folded(live, result))
            final = live.to_host()
            with self._changed:
                # Without the arrays, whose memory this object would keep.
                self._at_end, self._final = live._replace(leaves=[]), final
                self._changed.notify_all()
        self._wait_for_the_end()
        self._raise_failure()
        if self._stopped:
            raise Left(f"trainer {self._trainer} has left while it finished.")
        # Only now: an error on the way leaves a phase that says so.
        self._phase = "finished"
        return with_leaves(state, live.from_host(self._final))

    def _wait_for_the_end(self):
        # The limit is that of a transport that does nothing: one that waits for others who still
        # train is at work.
        limit = 3 * self._transport.timeout_s
        seen = getattr(self._transport, "last_seen", lambda trainer: 0.0)
        while not wait(self._changed, lambda: self._ended, self._transport.timeout_s / 2):
            now = time.monotonic()
            if now - max(self._met_at or now, seen(self._trainer)) > limit:
                raise TimeoutError(f"{self._name}: `meet` of its transport has not returned for {limit:g} s.")

    def _run(self):
        try:
            while (handed := self._next()) is not None:
                self._round(handed)
            if self._at_end is not None and not self._stopped:
                # A result that came behind the last exchange counts before the last rounds compare.
                self._fold_late(self._at_end)
                self._final = self._last_rounds(self._final)
        except BaseException as error:
            with self._changed:
                echo = self._stopped and isinstance(error, Left)
                self._failure = None if echo else error
            if not echo:  # else whoever has stopped this trainer tells the transport
                self._leave_transport(error)
        finally:
            with self._changed:
                # Last of all, and whatever was raised: who leaves waits for it.
                self._ended = True
                self._changed.notify_all()

    def _leave_transport(self, error):
        try:
            self._transport.leave(self._trainer, error)
        except Exception as failure:  # nobody would hear of it in this thread
            error.add_note(f"and then leaving the transport failed: {type(failure).__name__}: {failure}")

    @property
    def _done(self):
        return self._at_end is not None

    def _next(self) -> Live | None:
        """The copy to bring to the next round; None when the trainer is done or has stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._handed is not None or self._done or self._stopped)
            if self._done or self._stopped:
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
                self._changed.wait_for(lambda: self._done or self._stopped, min(left, threading.TIMEOUT_MAX))
                self._busy = False

    def _fold_late(self, live):
        """Folds in a result that came after the last exchange; on the host: no program from here."""
        if (late := self._result) is not None:
            before, target = (live._replace(leaves=part).to_host() for part in (late.before, late.target))
            self._final = self._rule.merge(self._final, before, target)
            self.rounds, self.bytes = self.rounds + 1, self.bytes + late.bytes

    def _meet(self, before, done=False):
        self._check_not_stopped()
        self._met_at = time.monotonic()
        try:
            found = super()._meet(before, done)
        finally:
            self._met_at = None
        self._check_not_stopped()  # it was left behind: nothing comes of a late answer
        return found

    def _check_not_stopped(self):
        if self._stopped:
            raise Left(f"trainer {self._trainer} has left.")

    def _raise_failure(self):
        if self._failure is not None:
            raise self._failure
