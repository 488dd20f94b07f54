"""Cuts that are announced: at which steps of a run a state is to be saved."""

import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxrec.types import TrainState


class Cut(NamedTuple):
    """What is to be done at a step."""

    save: Callable[[TrainState], Any]
    unreached: Literal["warn", "ignore"]


class Announced:
    """The cuts of an engine that are still to come."""

    def __init__(self):
        self._to_come: dict[int, Cut] = {}

    def announce(self, step: int, now: int, cut: Cut) -> None:
        """Keeps a cut for a step behind that of now.

        Raises:
          ValueError: the step lies behind, or has a cut already; no whole number, no function, an unknown word.
        """
        if not isinstance(step, int | np.integer) or not callable(cut.save):
            raise ValueError(f"cut(step={step!r:.80}, save={cut.save!r:.80}) wants a whole number and a function.")
        if cut.unreached not in ("warn", "ignore"):
            raise ValueError(f"unreached={cut.unreached!r} must be 'warn' or 'ignore'.")
        if step <= now:
            raise ValueError(f"step={step} is committed already ({now} are).")
        if step in self._to_come:
            raise ValueError(f"a cut of step {step} is announced already: let one function save all that is wanted.")
        self._to_come[step] = cut

    def at(self, step: int) -> Callable[[TrainState], Any] | None:
        """The save of a step, which stays announced until `tell_begun`; None if there is none."""
        return self._to_come[step].save if step in self._to_come else None

    def tell_begun(self, step: int) -> None:
        """The cut of a step has begun."""
        self._to_come.pop(step)

    def withdraw(self, step: int) -> None:
        """The cut of a step is not wanted any more; no harm if it was taken, or never announced."""
        self._to_come.pop(step, None)

    def _wanted(self):
        """Steps of the cuts that somebody is to be told of if they are not taken."""
        return sorted(step for step, cut in self._to_come.items() if cut.unreached == "warn")

    def forget(self, now: int) -> None:
        """No cut is to come any more, as another state takes the place of that of now."""
        steps = self._wanted()
        self._to_come = {}
        if steps:
            warnings.warn(
                f"cuts announced for steps {steps} were not taken, and are forgotten: the engine was reset at "
                f"step {now}.",
                stacklevel=3,
            )

    def warn(self, now: int) -> None:
        """Says, once, which cuts a run was left without, and forgets those that lie behind."""
        steps = self._wanted()
        later = {step: cut for step, cut in self._to_come.items() if step > now}
        self._to_come = {step: cut._replace(unreached="ignore") for step, cut in later.items()}
        if steps:
            warnings.warn(
                f"cuts announced for steps {steps} were not taken: the run was left at step {now}. Those of "
                "later steps stay announced for the next run.",
                stacklevel=4,
            )
