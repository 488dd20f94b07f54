"""The foreground counterpart of a shadow: the same rules, in rounds for which training waits."""

import time
from collections.abc import Callable
from typing import Any

from jaxrec.bounds import real_number, whole_number
from jaxrec.shadowsync.live import with_leaves
from jaxrec.shadowsync.meeting import Transport
from jaxrec.shadowsync.synchroniser import Synchroniser


class Foreground(Synchroniser):
    """Synchronises every so many steps or seconds: training waits for each round (FR-k).

    Used as `Shadow` is, in a `with` block.

    Args:
      transport, trainer: as for `Shadow`.
      every_steps: k, or None.
      every_seconds: or this.

    Raises:
      ValueError: not exactly one of the two is given, or it is below 1 step or not above 0 seconds;
        as `Shadow`.
    """

    def __init__(
        self,
        transport: Transport,
        trainer: int = 0,
        every_steps: int | None = None,
        every_seconds: float | None = None,
    ):
        if (every_steps is None) == (every_seconds is None):
            raise ValueError("give every_steps or every_seconds, one of them.")
        if every_steps is not None:
            whole_number("every_steps", every_steps)
        if every_seconds is not None:
            real_number("every_seconds", every_seconds, "above 0", lambda x: x > 0)
        super().__init__(transport, trainer)
        self._steps, self._seconds = every_steps, every_seconds

    def _begin(self):
        # Not when it was made: what is compiled in between is no training.
        self._last = time.monotonic()

    def exchange(self, state: Any) -> Any:
        """Makes a round if it is time for one; the first call compiles the fold.

        Args:
          state: TrainState with parameters [R, ...], or a pytree of parameters, of one replica or
            [R, ...].

        Returns:
          The state to train on: the one given if it was no time; else its parameters are new arrays
          of JAX.

        Raises:
          ValueError: outside of the `with` block; the parameters do not fit those of the transport,
            or are not finite.
          Left: another trainer has left or is overdue, or this one has been dropped.
        """
        self._check_open("exchange")
        # Compiles the fold before the first round, in which all others would wait for it.
        if not self._looks_known(state):
            self._live(state)
        return self.meet(state)(state) if self.due() else state

    def due(self) -> bool:
        """Counts a step, by which this trainer is heard of; says whether it is time for a round."""
        self._tell_alive(self._trainer)
        self.steps += 1
        if self._steps is not None:
            return self.steps % self._steps == 0
        if self._seconds is not None and time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True

    def meet(self, before: Any) -> Callable[[Any], Any]:
        """Makes a round; the first half of an `exchange`, whose second is the function that it returns.

        For a trainer whose other workers step on between the two.

        Args:
          before: as `exchange` takes it; nobody may donate it during the round.

        Returns:
          A function: the state as it is by then -> the state with the round's result folded in.

        Raises:
          As `exchange`.
        """
        self._check_open("meet")
        result = self._round_of(self._live(before))
        # Counted where it is folded in, as a shadow's.
        return lambda state: with_leaves(state, self._folded(self._live(state), result))

    def finish(self, state: Any) -> Any:
        """Takes part in rounds until all trainers are done; returns what `Shadow.finish` does.

        Raises:
          ValueError: outside of the `with` block, or again, even after an interrupt; parameters do
            not fit or are not finite.
          Left: another trainer has left or is overdue, or this one has been dropped.
        """
        self._check_open("finish")
        live = self._live(state)
        # A phase of its own until the end: after an interrupt nobody knows which rounds it made.
        self._phase = "begun to finish before"
        final = self._last_rounds(live.to_host())
        self._phase = "finished"
        return with_leaves(state, live.from_host(final))
