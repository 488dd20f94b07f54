"""When a run saves: so often that saving costs at most one percent of its time, unless told
otherwise."""

import contextlib
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxrec.checkpoint import Checkpointer, images, restore
from jaxrec.checkpoint.format import number_of
from jaxrec.cpr import Recovery
from jaxrec.types import TrainState
from main.run_dir import Run, cores
from main.signals import say

PERCENT = 1.0  # of the time, that saving may cost
# Of this process before its first save: compilation is over, and the cost gets known early.
FIRST_STEPS = 20
AT_LEAST_S, AFTER_FAILURE_S = 10.0, 60.0  # between two saves, however cheap they are


def seconds_between(cost_s: float, failed: bool = False) -> float:
    """How long to wait after a save, so that saves cost at most `PERCENT` of the time.

    Args:
      cost_s: of one save, seconds: training waited, plus CPU seconds of the saving thread over the
        cores.
      failed: whether the save failed; then a full disk gets time to be emptied.

    >>> seconds_between(0.5)
    50.0
    >>> seconds_between(0.001), seconds_between(0.001, failed=True)
    (10.0, 60.0)
    """
    return max(AFTER_FAILURE_S if failed else AT_LEAST_S, 100 * cost_s / PERCENT)


class PeriodicSaves:
    """Saves the state of a run, as a hook, and keeps account of what that costs.

    A save that fails is said at once, and the next one tries again.

    Args:
      checkpointer: which saves.
      every_steps: None to choose by the cost that is measured; 0 for never.
      extra: step -> JSON values to save along.
      past: what `totals` said in the process that this one goes on from.
      clock: gives seconds.
      cut: of an engine, which calls back when a state is at rest; None to save in the hook.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        every_steps: int | None = None,
        extra: Callable[[int], Mapping[str, Any]] = lambda step: {},
        past: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        cut: Callable | None = None,
    ):
        self._checkpointer, self._every_steps, self._extra, self._clock = checkpointer, every_steps, extra, clock
        self._past = {"saves": 0, "saves_failed": 0, "stall_s": 0.0, "cost_s": 0.0, "seconds": 0.0, **(past or {})}
        self._cores = cores()
        self._image = past is not None  # whether one is known to be committed
        self._began = self._last = clock()
        self._cut, self._announced = cut, False  # whether a save is to come, or at work in a thread of the engine
        self._begun = self._told = 0
        self._first: int | None = None  # step of the first hook
        self._looked = 0  # the last step that was looked at
        self._waited = self._cost_before = 0.0  # seconds
        self._step: int | None = None  # of the last save
        self._failed_before = 0  # failures when it began

    def hook(self, state, step: int, plans, metrics):
        """Saves if it is time to; at a cut of the engine in the next step, if it has cuts."""
        self._first = step if self._first is None else self._first
        if self._announced:
            return state
        idle = self._look()
        ahead = 0 if self._cut is None else 1
        if self._is_due(step + ahead, idle):
            if self._cut is None:
                self.save(state)
            else:
                self._announced = True
                self._cut(step + 1, self._at_cut, unreached="ignore")
        return state

    def _at_cut(self, state):
        try:
            self.save(state)
        finally:
            self._announced = False

    def save(self, state) -> None:
        """Begins to save a state; training waits for the copy only."""
        # To wait for a step is not a cost of saving.
        step = int(jax.block_until_ready(state.dense.step))
        if step == self._step and not self._last_failed():
            return
        extra = {**self._extra(step), "saving": self.totals()}
        self._cost_before, self._failed_before = self._cost(), len(self._checkpointer.failures)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the save before, which `_look` tells of
                self._checkpointer.save(state, extra)
        except OSError as error:
            self._checkpointer.failures.append(str(error))
        self._begun, self._step, self._last = self._begun + 1, step, self._clock()

    def ensure_image(self, state) -> None:
        """Waits for an image before the first row of metrics: so rows without an image mean that
        images were lost."""
        if self._image or self._every_steps == 0:
            return
        if not self._begun or self._last_failed():
            self.save(state)
        self._image = self._settle()

    def last(self, state) -> str | None:
        """Saves and waits until the image is committed; returns what went wrong, if anything."""
        self._settle()
        self.save(state)
        return None if self._settle() else self._checkpointer.failures[-1]

    def totals(self) -> dict[str, float]:
        """Saves begun and failed, seconds that training waited, their whole cost, and the seconds
        of the run."""
        now = {
            "saves": self._begun - len(self._checkpointer.failures),
            "saves_failed": len(self._checkpointer.failures),
            "stall_s": self._checkpointer.stall_seconds + self._waited,
            "cost_s": self._cost() + self._waited,
            "seconds": self._clock() - self._began,
        }
        return {key: self._past[key] + value for key, value in now.items()}

    def figures(self) -> dict[str, float]:
        """Nothing that belongs to the progress of a run."""
        return {}

    def results(self) -> dict[str, float]:
        """What results.json says of saving; percent of the time of the run."""
        totals = self.totals()
        return {
            "saves": totals["saves"],
            "saves_failed": totals["saves_failed"],
            "checkpoint_stall_s": totals["stall_s"],
            "checkpoint_percent": 100 * totals["cost_s"] / max(totals["seconds"], 1e-9),
        }

    def _is_due(self, step, idle):
        if self._every_steps is not None:
            looked, self._looked = max(self._looked, (self._first or step) - 1), step
            # A multiple since the last look, as free trainers come by after many steps.
            return self._every_steps > 0 and step // self._every_steps > looked // self._every_steps
        if not self._begun:
            return step - (self._first or step) + 1 >= FIRST_STEPS
        every_s = seconds_between(self._cost() - self._cost_before, self._last_failed())
        return idle and self._clock() - self._last >= every_s

    def _cost(self):
        """Seconds that saving while training goes on has cost so far."""
        return self._checkpointer.stall_seconds + self._checkpointer.thread_seconds / self._cores

    def _last_failed(self):
        return len(self._checkpointer.failures) > self._failed_before

    def _settle(self):
        """Waits for the save that runs; whether the last one is committed."""
        start = self._clock()
        with contextlib.suppress(OSError):  # it stands in `failures` too
            self._checkpointer.wait()
        self._waited += self._clock() - start
        self._look()
        return not self._last_failed()

    def _look(self):
        """Says which saves have failed since; returns whether nothing is being written."""
        idle = True
        with contextlib.suppress(OSError):
            idle = self._checkpointer.done()
        for failure in self._checkpointer.failures[self._told :]:
            say(f"a save failed; the next one tries again: {failure}", sys.stderr)
        self._told = len(self._checkpointer.failures)
        return idle


class RecoverySaves:
    """Saves the state of a run through a CPR recovery, with the face of `PeriodicSaves`.

    Args:
      recovery: entered.
      clock: gives seconds.
    """

    def __init__(self, recovery: Recovery, clock: Callable[[], float] = time.perf_counter):
        self.recovery, self._clock, self._began = recovery, clock, clock()
        self.hook = recovery.hook

    def ensure_image(self, state) -> None:
        """There is one: the run has begun with it."""

    def count_failed(self, shards: int) -> None:
        """Counts shards that an earlier process has lost since the image that this one goes on from."""
        self.recovery.failed += shards

    def last(self, state) -> str | None:
        """Saves all rows and waits; returns what went wrong, if anything."""
        try:
            self.recovery.save_whole()
        except OSError as error:
            return str(error)
        return None

    def figures(self) -> dict[str, float]:
        """What the recovery has saved and lost so far."""
        recovery = self.recovery
        return {
            "pls": recovery.pls, "rows_saved": recovery.rows_saved, "shards_failed": recovery.failed,
            "lost_steps": recovery.lost_steps,
        }  # fmt: skip

    def results(self) -> dict[str, float]:
        """What results.json says of saving; percent of the time of this process."""
        stall = self.recovery.stall_seconds
        return self.figures() | {
            "saves": self.recovery.saves,
            "saves_failed": len(self.recovery.failed_saves),
            "checkpoint_stall_s": stall,
            "checkpoint_percent": 100 * stall / max(self._clock() - self._began, 1e-9),
        }


class Best(Checkpointer):
    """The state of the best evaluation of a run, in a directory of its own; training waits for it.

    Args:
      run: that it is of.
      step: that the run begins at: what was saved of later steps is of a past that it has left.
    """

    def __init__(self, run: Run, step: int):
        for path in images(run.directory / "best"):
            if number_of(path) > step:
                shutil.rmtree(path)
        super().__init__(run.directory / "best", keep=1, run=run.id)

    def save(self, state: TrainState, extra: Mapping[str, Any] | None = None) -> float:
        """Saves a state and waits until it is on the disk; returns the seconds."""
        stall = super().save(state, extra)
        self.wait()
        return stall

    def restored(self, state: TrainState) -> TrainState:
        """The best state, in the place of another one; that one, if there was no evaluation."""
        return restore(self.directory, state)[0] if images(self.directory) else state
