"""Write the saves of a recovery (picked rows, all rows, bases), and keep track of which ones are committed.

Reference: Maeng et al., CPR, MLSys 2021, arXiv 2011.02999. Legend: S shards, V rows of a stack.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxrec.checkpoint import Checkpointer, Image, RowCheckpointer, images
from jaxrec.checkpoint.row_deltas import ancestors, refuse_newer
from jaxrec.cpr.tracking import RowTracker, shard_rows
from jaxrec.embedding import EmbeddingSpec
from jaxrec.types import ShardsLost, TrainState


class SaveSchedule(NamedTuple):
    """Schedule of a run's saves, in steps; intervals may be fractional.

    >>> schedule = SaveSchedule(every=10, partial_interval=2.5)
    >>> [step for step in range(1, 13) if schedule.due(step)], schedule.regular_due(12, since=0)
    ([3, 5, 8, 10], True)
    """

    every: float  # T_save: steps between regular saves
    partial_interval: float  # steps between saves: r T_save with a scheme, else T_save

    def due(self, step: int, since: int | None = None) -> bool:
        """Return whether a save became due after step `since`, by default the step before."""
        return _between(self.partial_interval, step - 1 if since is None else since, step)

    def regular_due(self, step: int, since: int) -> bool:
        """Return whether a regular save became due after step `since`; a failed one stays due."""
        return _between(self.every, since, step)


def _between(every, since, step):
    """Return whether a multiple of `every` lies in (since, step]."""
    return int(step / every + 1e-9) > int(since / every + 1e-9)


class Saves:
    """Whole images and row deltas of a run.

    Args:
      directory: directory of the run's images.
      schedule: schedule of the saves.
      most_deltas: as for `RowCheckpointer`.
      copy: as for `Checkpointer`, for whole images.
      figures: (step, step of the last regular save) -> JSON values to record in the manifest.

    Attributes:
      regular: step of the last committed regular save; mini-saves leave it unchanged.
      whole_step: step of the newest committed image of all rows, or that of a state that needs none.
      rows_saved, saves: numbers of rows and of saves so far.
      stall_seconds: total duration of `save_snapshot`.
    """

    def __init__(
        self,
        directory: Path,
        schedule: SaveSchedule,
        most_deltas: int,
        copy: Literal["whole", "shards"],
        figures: Callable[[int, int], dict[str, Any]],
    ):
        self.directory, self._schedule = directory, schedule
        self._row_tracker: RowTracker | None = None  # set by `open`, as is the spec
        self._most_deltas, self._copy, self._figures = most_deltas, copy, figures
        self._checkpointer: Any = None  # Checkpointer, set by `open`
        self._row_checkpointer: Any = None  # RowCheckpointer, set by `open` if rows are tracked
        self._pending_rows: dict[str, Any] = {}  # {stack: Pick} of the save in flight
        self._pending_regular = 0  # step of the regular save in flight, else `regular`
        # Whether a whole image must precede more deltas: after a damaged chain or untracked steps.
        self._needs_base = False
        self.regular, self.whole_step, self.rows_saved, self.saves, self.stall_seconds = 0, 0, 0, 0, 0.0

    def open(
        self, spec: EmbeddingSpec, row_tracker: RowTracker | None, step: int, image: Image | None, run: str | None
    ) -> contextlib.ExitStack:
        """Lock the directory for the savers of a run, or for none of them; closing the result unlocks it.

        Args:
          spec: spec of the tables.
          row_tracker: picks the rows to save; None saves all rows.
          step: step of the state, which was restored from `image` if that is not None.
          image: image of this directory, or None.
          run: id of the run; that of the image, or a new one, if None.
        """
        self._spec, self._row_tracker = spec, row_tracker
        with contextlib.ExitStack() as opened:
            # Both savers use the same run id.
            run, base = (run or image.run, image.path) if image else (run, None)
            checkpointer = opened.enter_context(Checkpointer(self.directory, run=run, copy=self._copy))
            checkpointer.check_no_newer_image(step)  # else a save of its step would be skipped
            if self._row_tracker:
                row_checkpointer = RowCheckpointer(self.directory, base, self._most_deltas, checkpointer.run)
                self._row_checkpointer = opened.enter_context(row_checkpointer)
            else:  # else `restore` would return the rows of an abandoned timeline
                refuse_newer(self.directory, ancestors(self.directory, base))
            # Set last: `opened` must be true only if both savers have the directory.
            self._checkpointer = checkpointer
            self.reset_regular(step)
            return opened.pop_all()

    @property
    def opened(self) -> bool:
        """Whether `open` has locked the directory."""
        return self._checkpointer is not None

    @property
    def bytes_written(self) -> int:
        """Size of all committed images and deltas, merged deltas included."""
        return sum(saver.bytes_written for saver in self._savers())

    @property
    def failures(self) -> list[str]:
        """Error messages, one per failed save."""
        return [line for saver in self._savers() for line in saver.failures]

    def _savers(self):
        return [saver for saver in (self._checkpointer, self._row_checkpointer) if saver is not None]

    def save_snapshot(self, snapshot_step: int, state: TrainState) -> None:
        """Save the snapshot of a step; the state is of a later step if lost shards have delayed the save.

        Raises:
          ShardsLost: the snapshot stays open, and the engine calls again once the shards are recovered.
        """
        start, before, retry = time.perf_counter(), (self.saves, self.rows_saved), False
        try:
            # The step of the state, not of the snapshot: from a delayed save, a resumed run must continue where its
            # state is.
            self.save(state, int(state.dense.step))
        except ShardsLost:
            self.saves, self.rows_saved = before
            retry = True
            raise
        finally:
            if self._row_tracker and not retry:
                # Also after an error, as batches of later steps wait for this. The snapshot began under its own step,
                # not under that of the state.
                self._row_tracker.end_snapshot(snapshot_step)
            self.stall_seconds += time.perf_counter() - start

    def save(self, state: TrainState, step: int) -> None:
        """Start the save that is due; it is written while training continues."""
        state = at_step(state, step)
        if self._row_tracker is None:
            self.settle()
            self.rows_saved += sum(stack.rows for stack in self._spec.stacks.values())
            self.saves += 1
            self._checkpointer.save(state, self._figures(step, step))
            self._pending_regular = step
        elif self._needs_base or self._row_checkpointer.damaged:
            self._row_tracker.await_pick(step)  # discarded, as all rows are saved
            self._row_tracker.track_until(step)
            # First, as the base starts trackers afresh: the last save's pick must not be subtracted from those.
            self.settle()
            self.save_base(state)
        else:
            self._save_rows(state, step, self._row_tracker)

    def _save_rows(self, state, step, row_tracker):
        """Save the picked rows, and if a regular save is due also all rows of the tables in `whole`."""
        picked = row_tracker.await_pick(step)
        row_tracker.track_until(step)
        if picked is None:
            # Settle first, so that rows of the previous save are not picked again unchanged.
            self.settle()
            picked = row_tracker.pick(state.tables)
        regular = self._schedule.regular_due(step, self.regular)  # only now is the last save settled
        # Rows of the tables in `whole` are never picked, so no mini-save holds them.
        rows = self._with_whole(picked, row_tracker.whole) if regular else _by_shard(picked)
        self.rows_saved += sum(map(len, rows.values()))
        self.saves += 1
        figures = self._figures(step, step if regular else self.regular)
        copied = row_tracker.copied(state.tables, picked)
        self._row_checkpointer.save(state.tables, rows, step, figures, state.dense)
        self._pending_rows = copied  # only now: if the copy fails, the rows stay unsaved
        self._pending_regular = step if regular else self._pending_regular

    def _with_whole(self, picked, whole):
        rows = _by_shard(picked)
        for name, ranges in whole.items():
            for shard in range(self._spec.shards):
                all_of = [shard_rows(first, end, shard, self._spec.shards) for first, end in ranges]
                rows[name, shard] = np.unique(np.concatenate([rows[name, shard], *all_of]))
        return rows

    def settle(self) -> None:
        """Wait for the save in flight; its rows count as saved only if it was committed."""
        # Cleared first, so that each save is settled once, even if this raises.
        rows, self._pending_rows = self._pending_rows, {}
        regular_step, self._pending_regular = self._pending_regular, self.regular
        # A list, so that every saver is settled even if an earlier one has failed. Rows of a failed save stay unsaved
        # and are picked again.
        if not all([saver.settle() for saver in self._savers()]):
            return
        if self._row_tracker:
            self._row_tracker.saved(rows)
        elif regular_step != self.regular:  # a regular save holds everything
            self.whole_step = regular_step
        self.regular = self._pending_regular = regular_step

    def require_base(self) -> None:
        """Make the next save one of all rows, which it is anyway if no rows are tracked."""
        self._needs_base = True

    def save_base(self, state: TrainState, must_succeed: bool = False) -> None:
        """Save a whole image, wait for it, and start a new chain there.

        Args:
          state: state to save, with its step.
          must_succeed: raise the error of a failed save; otherwise the next save tries again.
        """
        step = int(state.dense.step)
        # Before the write: if it fails, the next save knows that deltas have no base.
        self._needs_base = self._needs_base or not must_succeed
        # Replaced, as the state of a saved step may have changed, by `exclusive` or a reset.
        self._checkpointer.save(state, self._figures(step, step), replace=True)
        if must_succeed:
            self._checkpointer.wait()
        elif not self._checkpointer.settle():
            return
        if self._row_tracker:
            # Only once the base is committed: until then, lost shards are restored from the old chain.
            self._row_checkpointer.restart(self._checkpointer.path_of(step))
            self._row_tracker.begin(state.tables, self._row_tracker.remember())
        self._needs_base = False
        self.reset_regular(step)

    def reset_regular(self, step: int) -> None:
        """Treat all rows as saved at a step."""
        self.regular = self._pending_regular = self.whole_step = step

    def sources(self) -> list[Path]:
        """Return the images to restore a shard from, newest first: the chain from its tip down, then older images."""
        # The chain first: its tip has the newest rows.
        chain = reversed(self._row_checkpointer.chain) if self._row_tracker else ()
        mine = [self.directory / name for name in chain]
        return [*mine, *(path for path in images(self.directory) if path not in mine)]


def at_step(state: TrainState, step: int) -> TrainState:
    """Return the state with its step set; under OAC the dense half of a copy may carry another one."""
    return state._replace(dense=state.dense._replace(step=np.int32(step)))


def _by_shard(picked):
    return {(name, shard): mine for name, rows in picked.items() for shard, mine in enumerate(rows)}
