"""Callbacks: what a technique, a log or an evaluation does at the steps of an engine.

An engine calls its callbacks in the order of their list: `begin`, `after_step`, `recover` and `restarted` from first to
last, `end` from last to first. So a technique that changes the state comes before what saves or evaluates it, and what
replaces servers before what restores their rows.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

from jaxrec.bounds import whole_number
from jaxrec.types import Plan, TrainState


class StepInfo(NamedTuple):
    """A step that has just been committed, or a stretch of free-running trainers."""

    state: TrainState  # with the changes of the callbacks before
    step: int  # number of committed steps
    plans: dict[str, Plan]  # {stack: Plan} of the batch; {} for a stretch
    metrics: dict[str, Any]  # of the step, on the device


AfterStep = Callable[[StepInfo], TrainState | None]


class Callback:
    """Base class of callbacks, which do nothing unless overridden.

    A callback watches one engine at a time, on the thread that iterates over the run.

    >>> class BestLoss(Callback):
    ...     loss = float('inf')
    ...     def after_step(self, info):
    ...         self.loss = min(self.loss, float(info.metrics['loss']))
    """

    # Whether `recover` may raise `RolledBack`, so that a run needs its batches as a function of the step.
    goes_back = False

    def begin(self, engine: Any) -> None:
        """Start to watch an engine, at the start of its `with` block."""

    def after_step(self, info: StepInfo) -> TrainState | None:
        """Return the state to go on with; None leaves it as it is. Only values of its dense half may differ."""

    def recover(self, shards: Sequence[int]) -> None:
        """Restore lost shards, or do a part of it; an engine recovers if any of its callbacks overrides this."""

    def restarted(self, state: TrainState) -> None:
        """Learn of the state from which the engine is about to go on, see `Engine.reset`; raise to refuse it."""

    def end(self, error: BaseException | None) -> None:
        """Stop watching, after the last run and its snapshots; `error` is what ends the `with` block, if anything."""


class RolledBack(Exception):
    """Raised by `recover` of a callback to end a run that goes back to an earlier step.

    `Engine.run` handles it. Between two runs, and in the body of a loop over `run`, it reaches the caller, who calls
    `go_back` when no run is active and trains on with the batches from `engine.step`.

    Args:
      go_back: restores the state and resets the engine.
    """

    def __init__(self, go_back: Callable[[], None]):
        super().__init__("all goes back to the newest whole image: call go_back(), and run on from engine.step")
        self.go_back = go_back


@final
class CallbackList:
    """The callbacks of one engine at work: between its `with` blocks only functions, which need no begin and end.

    Args:
      given: Callback objects and functions StepInfo -> state or None, which each `with` block begins in this order.
    """

    def __init__(self, given: Iterable[Callback | AfterStep]):
        self.given = tuple(given)
        self._ends = contextlib.ExitStack()
        self.at_work: list[Callback | AfterStep] = []
        self._rest()

    def _rest(self):
        self.at_work = [each for each in self.given if not isinstance(each, Callback)]

    @property
    def objects(self) -> list[Callback]:
        """Those that are more than a function."""
        return [each for each in self.at_work if isinstance(each, Callback)]

    @property
    def that_recover(self) -> list[Callback]:
        """Those that override `recover`."""
        return [each for each in self.objects if type(each).recover is not Callback.recover]

    def begin_all(self, engine: Any) -> None:
        """Begin the given ones; if one raises, those before it are at work."""
        self.at_work = []
        for each in self.given:
            self.begin(each, engine)

    def begin(self, callback: Callback | AfterStep, engine: Any) -> None:
        """Begin one as the last one."""
        if isinstance(callback, Callback):
            callback.begin(engine)
            self._ends.push(functools.partial(_end, callback))
        self.at_work.append(callback)

    def dismiss(self) -> contextlib.ExitStack:
        """Return what ends those at work, in reverse order; they are not called any more."""
        self._rest()
        return self._ends.pop_all()


def _end(callback, kind, error, trace):
    callback.end(error)  # what it returns would suppress the error


def every(steps: int, after_step: AfterStep) -> AfterStep:
    """Return a function that calls another one at every multiple of `steps`, or at those that end a stretch.

    Args:
      steps: interval in steps.
      after_step: StepInfo -> state, or None to leave it as it is.

    >>> seen = []
    >>> report = every(10, lambda info: seen.append(info.step))
    >>> for step in range(25):
    ...     report(StepInfo(None, step, {}, {}))
    >>> seen
    [0, 10, 20]
    """
    whole_number("steps", steps)
    return lambda info: after_step(info) if info.step % steps == 0 else None
