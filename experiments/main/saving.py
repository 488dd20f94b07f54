"""When a run saves: unless an interval is given, as often as costs at most one percent of its time."""

import contextlib
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxrec.callbacks import Callback, StepInfo
from jaxrec.checkpoint import Checkpointer, DamagedImage, images, read_manifest, restore, snapshot, write_image
from jaxrec.checkpoint.checkpointer import check_same_run
from jaxrec.checkpoint.format import mark_damaged, remove_partial
from jaxrec.cpr import Recovery
from jaxrec.files import remove_directory
from jaxrec.types import TrainState
from main.report import QUALITY
from main.run_dir import BEST, Run, cores
from main.signals import say

PERCENT = 1.0  # of the run's time that saving may cost
# Steps of a process before its first save: compilation is over, and the cost is known early.
FIRST_STEPS = 20
AT_LEAST_S, AFTER_FAILURE_S = 10.0, 60.0  # between two saves, at least


def seconds_between(cost_s: float, failed: bool = False) -> float:
    """Return how long to wait after a save, so that saves cost at most `PERCENT` of the time.

    Args:
      cost_s: cost of one save, seconds: blocking time plus CPU seconds of the saving thread over the cores.
      failed: whether the save failed; the wait then allows a full disk to be cleared.

    >>> seconds_between(0.5)
    50.0
    >>> seconds_between(0.001), seconds_between(0.001, failed=True)
    (10.0, 60.0)
    """
    return max(AFTER_FAILURE_S if failed else AT_LEAST_S, 100 * cost_s / PERCENT)


class PeriodicSaves(Callback):
    """Save the state of a run, and account for the cost.

    A failed save is reported at once, and the next one tries again.

    Args:
      every_steps: interval in steps; None to choose it by measured cost, 0 for never.
      extra: step -> JSON values to save with the state.
      past: `totals` of the process that this one resumes.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        every_steps: int | None = None,
        extra: Callable[[int], Mapping[str, Any]] = lambda step: {},
        past: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._checkpointer, self._every_steps, self._extra, self._clock = checkpointer, every_steps, extra, clock
        self._past = {"saves": 0, "saves_failed": 0, "stall_s": 0.0, "cost_s": 0.0, "seconds": 0.0, **(past or {})}
        self._cores = cores()
        self._image = past is not None  # whether an image is known to be committed
        self._began = self._last = clock()
        self._announced = False  # whether a save is pending, or running in a thread of the engine
        self._started = self._reported = 0
        self._first: int | None = None  # step of the first call
        self._checked_step = 0  # the last step that was checked
        self._waited = self._cost_before = 0.0  # seconds
        self._step: int | None = None  # of the last save
        self._failed_before = 0  # failures before it began

    def begin(self, engine: Any) -> None:
        """See `Callback`."""
        self._engine = engine

    def after_step(self, info: StepInfo) -> None:
        """Have the engine take a snapshot if a save is due."""
        step = info.step
        self._first = step if self._first is None else self._first
        if self._announced:
            return
        if self._is_due(step, self._look()):
            self._announced = True
            self._engine.snapshot_at(step, self._save_snapshot)

    def _save_snapshot(self, state):
        try:
            self.save(state)
        finally:
            self._announced = False

    def save(self, state) -> None:
        """Begin to save a state; training waits for the copy only."""
        # Waiting for the step is not a cost of saving.
        step = int(jax.block_until_ready(state.dense.step))
        if step == self._step and not self._last_failed():
            return
        extra = {**self._extra(step), "saving": self.totals()}
        self._cost_before, self._failed_before = self._cost(), len(self._checkpointer.failures)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the previous save, which `_look` reports
                self._checkpointer.save(state, extra)
        except OSError as error:
            self._checkpointer.failures.append(str(error))
        self._started, self._step, self._last = self._started + 1, step, self._clock()

    def ensure_image(self, state) -> None:
        """Wait for an image before the first row of metrics: rows without an image then mean lost images."""
        if self._image or self._every_steps == 0:
            return
        if not self._started or self._last_failed():
            self.save(state)
        self._image = self._settle()

    def last(self, state) -> str | None:
        """Save and wait until the image is committed; return the error, if any."""
        self._settle()
        self.save(state)
        return None if self._settle() else self._checkpointer.failures[-1]

    def totals(self) -> dict[str, float]:
        """Return saves done and failed, blocking seconds, total cost in seconds, and seconds of the run."""
        now = {
            "saves": self._started - len(self._checkpointer.failures),
            "saves_failed": len(self._checkpointer.failures),
            "stall_s": self._checkpointer.stall_seconds + self._waited,
            "cost_s": self._cost() + self._waited,
            "seconds": self._clock() - self._began,
        }
        return {key: self._past[key] + value for key, value in now.items()}

    def figures(self) -> dict[str, float]:
        """Return nothing: periodic saves have no figures of progress."""
        return {}

    def results(self) -> dict[str, float]:
        """Return the part of results.json about saving; percent of the time of the run."""
        totals = self.totals()
        return {
            "saves": totals["saves"],
            "saves_failed": totals["saves_failed"],
            "checkpoint_stall_s": totals["stall_s"],
            "checkpoint_percent": 100 * totals["cost_s"] / max(totals["seconds"], 1e-9),
        }

    def _is_due(self, step, idle):
        if self._every_steps is not None:
            looked, self._checked_step = max(self._checked_step, (self._first or step) - 1), step
            # A multiple since the last check, as free-running trainers call this after many steps only.
            return self._every_steps > 0 and step // self._every_steps > looked // self._every_steps
        if not self._started:
            return step - (self._first or step) + 1 >= FIRST_STEPS
        every_s = seconds_between(self._cost() - self._cost_before, self._last_failed())
        return idle and self._clock() - self._last >= every_s

    def _cost(self):
        """Return the cost of saves beside training so far, in seconds."""
        return self._checkpointer.stall_seconds + self._checkpointer.thread_seconds / self._cores

    def _last_failed(self):
        return len(self._checkpointer.failures) > self._failed_before

    def _settle(self):
        """Wait for the save in progress; return whether the last one is committed."""
        start = self._clock()
        with contextlib.suppress(OSError):  # it is in `failures` too
            self._checkpointer.wait()
        self._waited += self._clock() - start
        self._look()
        return not self._last_failed()

    def _look(self):
        """Report saves that failed since the last call; return whether nothing is being written."""
        idle = True
        with contextlib.suppress(OSError):
            idle = self._checkpointer.done()
        for failure in self._checkpointer.failures[self._reported :]:
            say(f"a save failed; the next one tries again: {failure}", sys.stderr)
        self._reported = len(self._checkpointer.failures)
        return idle


class RecoverySaves:
    """Save the state of a run through a CPR recovery, with the interface of `PeriodicSaves`."""

    def __init__(
        self, recovery: Recovery, past: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):  # fmt: skip
        self.recovery, self._clock, self._began = recovery, clock, clock()
        self._past = {"stall_s": 0.0, "seconds": 0.0, **(past or {})}

    def ensure_image(self, state) -> None:
        """Do nothing: the run began with an image."""

    def count_failed(self, shards: int) -> None:
        """Count shards that an earlier process lost after the image from which this one resumes."""
        self.recovery.failed += shards

    def last(self, state) -> str | None:
        """Save all rows and wait; return the error, if any."""
        try:
            self.recovery.save_whole()
        except OSError as error:
            return str(error)
        return None

    def figures(self) -> dict[str, float]:
        """Return what the recovery has saved and lost so far."""
        recovery = self.recovery
        return {
            "pls": recovery.pls, "rows_saved": recovery.rows_saved, "shards_failed": recovery.failed,
            "lost_steps": recovery.lost_steps,
        }  # fmt: skip

    def totals(self) -> dict[str, float]:
        """Return blocking seconds, and seconds of this process, before a plateau and since."""
        now = {"stall_s": self.recovery.stall_seconds, "seconds": self._clock() - self._began}
        return {key: self._past[key] + value for key, value in now.items()}

    def results(self) -> dict[str, float]:
        """Return the part of results.json about saving; percent of the time of this process."""
        totals = self.totals()
        return self.figures() | {
            "saves": self.recovery.saves,
            "saves_failed": len(self.recovery.failed_saves),
            "checkpoint_stall_s": totals["stall_s"],
            "checkpoint_percent": 100 * totals["stall_s"] / max(totals["seconds"], 1e-9),
        }


def worth(metric: str, row: Mapping[str, Any]) -> float:
    """Return a metric of a row, such as "validation_auc", with the sign that makes more of it better, or NaN."""
    value = row[metric]
    return math.nan if value is None else QUALITY[metric.partition("_")[2]] * value  # null in a file


def without_gain(history: Sequence[Mapping[str, Any]], metric: str) -> int:
    """Return how many rows are no better than the best one before them.

    >>> without_gain([{"test_auc": auc} for auc in (0.6, 0.7, 0.65, 0.7, float("nan"), None, 0.71)], "test_auc")
    4
    """
    best, found = -math.inf, 0
    for row in history:
        gains = worth(metric, row) > best
        best, found = worth(metric, row) if gains else best, found + (not gains)
    return found


class Best:
    """The best evaluated state of a run, as an image in DIR/best beside those from which the run resumes.

    It is saved while training waits, before its row of metrics is logged, and the image before it goes once it is
    whole: a kill at any instant leaves the one or the other. A run that resumes from an earlier step keeps it, as a
    state that the run has had; where training repeats itself it is had again, and is not saved again.

    Args:
      metric: key of the rows of metrics by which states are compared, such as "validation_auc".
      extra: step -> JSON values to save with a state.

    Attributes:
      row: figures of the best state, of its row of metrics; {} before the first evaluation.

    Raises:
      ValueError: the directory holds an image of another run.
    """

    def __init__(self, run: Run, metric: str, extra: Callable[[int], Mapping[str, Any]]):
        self._directory, self._run, self._metric, self._extra = run.directory / BEST, run.id, metric, extra
        self._path, self.row = self._directory, dict[str, Any]()
        remove_partial(self._directory, "step_")
        check_same_run(self._directory, run.id)
        for path in images(self._directory):
            try:
                self.row, self._path = read_manifest(path).extra.get(BEST, {}), path
                break  # an older one was left by a kill before it was removed
            except DamagedImage as error:
                warnings.warn(f"the best state is lost, the best one from here on is kept: {error}", stacklevel=2)
                mark_damaged(path)

    def offer(self, state: TrainState, row: Mapping[str, Any]) -> None:
        """Save a state at rest if it is better than the best one so far, given its row of metrics.

        Raises:
          OSError: the disk is full or read-only; the image before it stays.
        """
        its, best = worth(self._metric, row), worth(self._metric, self.row) if self.row else -math.inf
        if not math.isfinite(its) or its <= best:
            return
        watched, step = self._metric.partition("_")[0], int(state.dense.step)
        figures = {"step": row["step"]} | {key: row[key] for key in row if key.startswith(f"{watched}_")}
        # Shard by shard, as training waits anyway: a copy would need room for all tables.
        image = snapshot(state, {**self._extra(step), BEST: figures}, self._run, copy=False)
        path = write_image(self._directory / f"step_{step:08d}", image, replace=True).path
        for other in images(self._directory):
            if other != path:
                remove_directory(other)
        self.row, self._path = figures, path

    def evaluations_since(self, history: Sequence[Mapping[str, Any]]) -> int:
        """Return how many rows of metrics are of later steps than the best state; 0 without one."""
        return sum(row["step"] > self.row["step"] for row in history) if self.row else 0

    def restored(self, state: TrainState) -> TrainState:
        """Return the best state, restored over `state`; `state` itself if there was no evaluation."""
        if not self.row:
            return state
        try:
            return restore(self._path, state)[0]
        except DamagedImage as error:
            raise ValueError(f"{error} Remove {self._directory}, and the last state is tested in its place.") from error

    def results(self) -> dict[str, Any]:
        """Return the part of results.json about the best state."""
        return {"best_step": None} | {"best_step" if key == "step" else key: value for key, value in self.row.items()}
