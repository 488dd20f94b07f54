"""Partial recovery of a run: track rows, save them on schedule, and restore lost shards alone.

A shard is an embedding node in the terms of CPR. When one fails, the other shards and the dense parameters (of which
every trainer has a copy) continue as they are; each row of the lost shard is restored from the newest image that holds
it: a base, deltas over it, or the initial row if it was never saved. With full recovery everything returns to the
newest whole image, including the data position.

The schedule, in steps:   every save_every_steps a regular save, of everything without a scheme ("vanilla");
                          with one, every fraction * save_every_steps the rows that it picks, at most that fraction, and
                          at regular saves all rows of the tables named in `whole`.

Every save also holds the dense state and the figures of the recovery, so that a run survives the loss of its process.
At the end of the run everything is saved, so that `restore` returns the trained model:

    state, image = restore(directory, state)                    # base + deltas + the dense state saved last
    with Serial(task, state, [Recovery(directory, image=image, ...)]) as engine:
        state = engine.train(lambda step: batches[step:])       # continues from engine.step

A snapshot is the state of a step that the engine hands to a save announced with `Engine.snapshot_at`.

Reference: Maeng et al., CPR, MLSys 2021, arXiv 2011.02999.
Legend: S shards, V rows of a stack.
"""

import contextlib
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxrec.bounds import is_positive, real_number, whole_number
from jaxrec.callbacks import Callback, RolledBack, StepInfo
from jaxrec.checkpoint import Image, images, newest_first, read_manifest, restore, restore_each
from jaxrec.checkpoint.format import mark_damaged
from jaxrec.cpr.priority import Priority, budget_rows
from jaxrec.cpr.saving import Saves, SaveSchedule, at_step
from jaxrec.cpr.schedule import Mode, lost_portion
from jaxrec.cpr.tracking import RowTracker, ranges_of
from jaxrec.embedding import Tables
from jaxrec.embedding.tables import is_initial
from jaxrec.files import local_path
from jaxrec.types import ShardsLost, TrainState
from jaxrec.validate import check_finite


def check_image(directory: Path, image: Image | None, step: int) -> None:
    """Raise if a directory holds images, unless the engine's state was restored from one of them."""
    found = newest_first(directory)
    if image is None and found:
        raise ValueError(
            f"{directory} holds {found[0].name} (and {len(found) - 1} more), which `restore` would take for "
            "this run's: go on with that one (state, image = restore(directory, state), then Recovery(..., "
            "image=image)), or give another directory."
        )
    if image is not None and (image.path.resolve() not in [p.resolve() for p in found] or image.step != step):
        raise ValueError(
            f"image {image.path} of step {image.step} must lie in {directory}, and the engine's state, of "
            f"step {step}, must be what `restore` returned with it."
        )


def check_shards(spec, shards):
    """Raise unless `shards` are distinct shard numbers, at least one."""
    if not len(shards) or any(not 0 <= shard < spec.shards for shard in shards) or len(set(shards)) < len(shards):
        raise ValueError(f"shards={list(shards)} must be distinct and lie between 0 and {spec.shards - 1}.")


def check_scheme(mode, scheme, whole):
    """Raise if a scheme does not fit the mode."""
    if mode not in ("partial", "full"):
        raise ValueError(f"mode={mode!r} must be 'partial' or 'full'.")
    if scheme is not None and not isinstance(scheme, Priority):
        raise ValueError(f"scheme={scheme!r:.80} is no Priority: call one of jaxrec.cpr, as scheme=mfu().")
    if scheme and mode == "full":
        raise ValueError(f"full recovery goes back to whole images: scheme={scheme.name!r} must be None.")
    if whole and scheme and not scheme.by_tracker:
        raise ValueError(f"scheme={scheme.name!r} compares all rows: leave whole empty, not {list(whole)}.")


_FIGURES = ("pls", "failed", "lost_steps", "rows_saved", "saves")  # restored when a run is resumed


class Recovery(Callback):
    """Saves the embedding rows of a run and restores lost shards; callback of an engine, serial or OAC's pipeline.

        recovery = Recovery(directory, save_every_steps=1000, total_steps=9000, scheme=mfu())
        with Serial(task, state, [recovery]) as engine:
            state = engine.train(lambda step: batches[step:])   # or, between two steps, recovery.recover([3])

    At its beginning it saves the state as a base, unless all rows are initial ones, which can be regenerated; with full
    recovery always, as dense parameters must be restorable too. It saves snapshots that the engine takes between steps.
    When the engine finds shards lost, it calls `recover` after the step and its snapshot. With full recovery the engine
    wants its batches as a function of the step, as it may go back. At a clean end of the engine's block it saves all
    rows and the dense state, unless its last save holds those of the last step: `restore` then returns the trained
    model. After an error, or the loss of the process, `restore` returns rows as old as their last save.

    Args:
      directory: directory of the run's images; created if missing.
      save_every_steps: T_save.
      total_steps: length of the run, for the portion of lost samples.
      mode: 'partial' or 'full', as from `plan_recovery`.
      scheme: priority scheme from `priority`; None saves everything at regular saves. Of no use with `FreeTrainers`,
        which do not report their rows, so that each of its saves would hold all.
      fraction: r, maximum fraction of the rows that a scheme saves every r T_save.
      whole: tables without priorities: regular saves hold all their rows. In the paper, as we recall it, all but the 7
        largest.
      failures: {step: shards} to lose right after a step, for emulation.
      image: result of `restore` with the engine's state, to resume a run: its figures are restored, and updates that
        the restored rows lack at its step count as lost in all shards. Scheme, fraction and number of shards may differ
        from before.
      most_deltas: as for `RowCheckpointer`; 16 / r if None, so that merging deltas costs at most a sixteenth of the
        bytes of saving everything at regular saves.
      pick_ahead_steps: number of steps before a save at which a background thread picks its rows; limited to less than
        the steps between saves. The save tracks the batches trained meanwhile, except for the picked rows, which it
        saves with their current values. Always 0 for schemes that compare values (SCAR).
      copy: as for `Checkpointer`, for whole images.
      run: id of the run, recorded in its images; if None, that of `image`, or a new one.
      extra: step -> JSON values to save along with a step, such as the data position; called at the save, under OAC in
        a background thread.
      save_at_end: False if what is trained is stored otherwise, or for measurements of the saves on schedule.

    Attributes:
      pls: portion of lost samples so far (eq. 4); mini-saves do not count as checkpoints there, as we recall the paper.
      failed: number of shards lost so far.
      lost_steps: number of steps trained again, with full recovery.

    Raises:
      ValueError: a number is out of range, full recovery has a scheme, or SCAR has `whole`. At its beginning: a table,
        step or shard is unknown; the directory holds images and `image` is not the newest intact one; another saver has
        the directory.
      OSError: at its beginning, the base cannot be written.

    If a save fails with an OSError, training continues with a warning: its rows stay unsaved. The end of the engine's
    block raises the error of the last save, that at the end included, and ShardsLost if it meets lost shards.
    """

    def __init__(
        self, directory: str | Path, save_every_steps: float, total_steps: int, mode: Mode = "partial",
        scheme: Priority | None = None, fraction: float = 0.125, whole: Collection[str] = (),
        failures: Mapping[int, Sequence[int]] | None = None, image: Image | None = None,
        most_deltas: int | None = None, pick_ahead_steps: int = 4, copy: Literal["whole", "shards"] = "whole",
        run: str | None = None, extra: Callable[[int], Mapping[str, Any]] | None = None, save_at_end: bool = True,
    ):  # fmt: skip
        self._total_steps, self._extra, self._save_at_end = total_steps, extra, save_at_end
        self.pls, self.failed, self.lost_steps = 0.0, 0, 0
        real_number("save_every_steps", save_every_steps, "above 0 and finite", is_positive)
        whole_number("total_steps", total_steps)
        whole_number("pick_ahead_steps", pick_ahead_steps, 0)
        budget_rows(1, fraction)  # raises if `fraction` is out of range
        check_scheme(mode, scheme, whole)
        self.directory, self.mode = local_path(directory), mode
        self._schedule = SaveSchedule(save_every_steps, save_every_steps * fraction if scheme else save_every_steps)
        self._failures = dict(failures or {})
        self._scheme, self._fraction, self._whole = scheme, fraction, whole
        self._row_tracker: RowTracker | None = None  # set by `begin` if there is a scheme
        self._scheme_name = scheme.name if scheme else None
        ahead = pick_ahead_steps if scheme and scheme.by_tracker else 0
        self._pick_ahead_steps = max(0, min(ahead, int(self._schedule.partial_interval) - 1))
        most = most_deltas or math.ceil(16 / fraction)
        # Weak: in a cycle, the tables of a run that is over would stay in memory until Python looks for cycles.
        figures = weakref.WeakMethod(self._figures)
        self._saves = Saves(
            self.directory, self._schedule, most, copy,
            lambda step, regular: figures()(step, regular),  # type: ignore[misc]
        )  # fmt: skip
        self._image, self._run_id, self._on_exit = image, run, contextlib.ExitStack()  # closed at the end
        self.closed = False
        self._seen_step, self._going_back = 0, False  # last step known to the trackers or saved
        self._seen_changes = 0  # changes of the engine that a save holds, or that were restored

    @property
    def goes_back(self) -> bool:  # type: ignore[override]
        """See `Callback`."""
        return self.mode == "full"

    # ---- figures

    @property
    def saves(self) -> int:
        """Number of saves so far."""
        return self._saves.saves

    @property
    def rows_saved(self) -> int:
        """Number of rows in them."""
        return self._saves.rows_saved

    @property
    def stall_seconds(self) -> float:
        """Time that training has waited for saves: for picks, copies, and earlier writes still in flight.

        For an engine that saves concurrently with training: the time for which its writes were held back.
        """
        return self._saves.stall_seconds

    @property
    def bytes_written(self) -> int:
        """Size of all images and deltas committed since entering, merged deltas included."""
        return self._saves.bytes_written

    @property
    def failed_saves(self) -> list[str]:
        """Error messages, one per failed save."""
        return self._saves.failures

    def _figures(self, step, regular) -> dict[str, Any]:
        """Return the JSON values that a save records; `regular` is the step of the last regular save."""
        extra = dict(self._extra(step)) if self._extra else {}
        if "cpr" in extra:
            raise ValueError("extra holds 'cpr', under which the recovery saves its own figures: take another name.")
        trackers = self._row_tracker.remember() if self._row_tracker else {}
        more = {"regular": regular, "scheme": self._scheme_name, "trackers": trackers}
        return {**extra, "cpr": {name: getattr(self, name) for name in _FIGURES} | more}

    def _resume_figures(self, known: Mapping[str, Any], step: int) -> None:
        """Restore the figures of an image; updates that its rows lack at its step count as lost in all shards."""
        self.pls, self.failed, self.lost_steps = (known.get(name, 0) for name in ("pls", "failed", "lost_steps"))
        self._saves.rows_saved, self._saves.saves = known.get("rows_saved", 0), known.get("saves", 0)
        regular = known.get("regular", step)
        # Counted once: a shard that fails next is restored to what was restored now.
        if regular < step:
            self.pls += self._lost_portion(step, regular, self._engine.tables.spec.shards)

    def _lost_portion(self, step, saved, shards):
        return lost_portion(step, saved, max(self._total_steps, step), self._engine.tables.spec.shards, shards)

    # ---- beginning and end

    def begin(self, engine: Any) -> None:
        """Lock the directory, and save a base if the rows cannot be regenerated."""
        state, step, image = engine.state, engine.step, self._image
        spec = state.tables.spec
        # Before anything is opened, so that the directory of another run is left unchanged.
        if self._saves.opened:
            raise ValueError("this recovery has begun before: it watches one run, once.")
        for other in engine.callbacks:
            if isinstance(other, Recovery):  # which of them has restored a row, the other would not know
                raise ValueError(f"this engine has a recovery already, which saves in {other.directory}.")
        if unknown := set(self._whole) - set(spec.tables):
            raise ValueError(f"whole names unknown tables {sorted(unknown)}; known: {list(spec.tables)}.")
        first = 1 if image else step + 1  # a run that goes on may name what came before its image
        why = ", the steps that this run trains: elsewhere nothing would fail. Give one of these, or more total_steps"
        for at, shards in self._failures.items():
            whole_number("a step of failures", at, first, self._total_steps, why)
            check_shards(spec, shards)
        check_image(self.directory, image, step)
        self._engine = engine
        if self._scheme:
            self._row_tracker = RowTracker(spec, self._scheme, self._fraction, ranges_of(spec, self._whole))
        with self._saves.open(spec, self._row_tracker, step, image, self._run_id) as opened:
            # Within the block, so that the directory is unlocked if the base cannot be written.
            self._begin(state, step)
            self._on_exit = opened.pop_all()

    def _begin(self, state, step):
        """Start trackers and figures of a new or resumed run, and save a base if needed."""
        self._seen_step, image, tables = step, self._image, state.tables
        known = image.extra.get("cpr", {}) if image else {}
        split_as_before = image is not None and image.spec == tables.spec.digest
        if self._row_tracker:  # trackers of another scheme or split of the tables start afresh
            same = split_as_before and known.get("scheme") == self._scheme_name
            self._row_tracker.begin(tables, known.get("trackers", {}) if same else {})
        self._resume_figures(known, step)
        if image is None:  # initial rows can be regenerated, but full recovery must also restore dense parameters
            base_wanted = self.mode == "full" or step > 0 or not is_initial(tables)
        else:  # a base must hold all rows, in the current split; otherwise the old chain continues
            base_wanted = not split_as_before or not (self._row_tracker or image.path in images(self.directory))
        if base_wanted:
            self._saves.save_base(state, must_succeed=True)

    def _drop(self, step):
        if self._row_tracker:
            self._row_tracker.end_snapshot(step)  # else the next pick would wait for it

    def end(self, error: BaseException | None) -> None:
        """Save all rows if no error ends the block, wait for the last save, and unlock the directory."""
        self.closed = True
        try:
            if self._row_tracker:
                # Before closing the savers: the picker may wait for one of their saves.
                self._row_tracker.close()
                if error is None:
                    self._row_tracker.drop_picks()  # raises an error of the picker
            if error is None and self._save_at_end:
                self._saves.settle()  # a failed save is made up for
                if self._saves.whole_step < self._engine.step or self._rows_changed():
                    self._save_whole()
        finally:
            del self._engine  # a cycle would keep the tables in memory
            self._on_exit.__exit__(type(error) if error else None, error, None)

    # ---- each step

    def after_step(self, info: StepInfo) -> None:
        """Track the batch, and have the engine take a snapshot that is due, and lose shards that are to fail."""
        step, due = info.step, self._schedule.due(info.step, self._seen_step)
        if step > self._seen_step + 1 or not info.plans:
            # It is unknown which rows have changed: a callback before this one has failed, or trainers run freely.
            self._saves.require_base()
        self._seen_step = step
        if due:
            self._engine.snapshot_at(
                step, functools.partial(self._save_snapshot, step), functools.partial(self._drop, step)
            )
        if self._row_tracker:
            if due:
                # Before this batch is reported, which then waits for the save: that tracks it, except for the rows that
                # it holds.
                self._row_tracker.begin_snapshot(step)
            # Before a pick starts, which must know this batch.
            self._row_tracker.mark_trained(step, info.plans)
            if self._pick_ahead_steps and self._schedule.due(step + self._pick_ahead_steps):
                self._row_tracker.pick_ahead(step, step + self._pick_ahead_steps, self._saves.settle)
        if step in self._failures:
            # The engine calls `recover` after the snapshot. Removed, as a rollback may reach this step again and a
            # failure happens once.
            self._engine.lose(self._failures.pop(step))

    def _save_snapshot(self, step, state):
        # If an earlier callback failed, the batch was not tracked.
        if self._rows_changed() or self._seen_step < int(state.dense.step):
            self._saves.require_base()
        self._saves.save_snapshot(step, state)

    def _rows_changed(self) -> bool:
        """Return whether `exclusive` has changed rows since the last call, which no batch reports."""
        before, self._seen_changes = self._seen_changes, self._engine.changes
        return self._seen_changes > before

    def save_whole(self) -> None:
        """Save all rows and the dense state between two steps, and wait until they are on disk.

        A run restored from this image continues bit for bit.

        Raises:
          ValueError: the recovery has not begun, or it is called in `after_step` of a callback.
          FloatingPointError: a dense parameter is not finite.
          OSError: the disk is full or read-only; earlier saves are unchanged.
        """
        self._refuse_closed()
        self._save_whole()

    def _save_whole(self):
        dense, step = self._engine.state.dense, self._engine.step
        check_finite(dense)

        def save(tables):
            self._finish_saves(step)
            self._saves.save_base(at_step(TrainState(dense, tables), step), must_succeed=True)

        self._engine.at_rest(save)
        self._seen_changes = self._engine.changes

    def restarted(self, state: TrainState) -> None:
        """Save all rows of the state from which the engine will continue, as no batch reports which ones changed.

        Raises:
          ValueError: the directory holds an intact image of a later step.
          OSError: the base cannot be written.
        """
        if self._going_back or self.closed:
            return
        self._finish_saves(self._seen_step)
        self._saves.save_base(state, must_succeed=True)
        if self._row_tracker:
            self._row_tracker.end_snapshots()  # the engine drops those whose save met lost shards
        self._seen_step, self._seen_changes = int(state.dense.step), self._engine.changes

    def _refuse_closed(self):
        if not self._saves.opened:
            raise ValueError("this recovery has not begun: list it in the callbacks of an engine, and enter that.")
        if self.closed:
            raise ValueError("this recovery is closed: the block of its engine was left. Make one for each run.")

    # ---- recovery

    def recover(self, shards: Sequence[int]) -> None:
        """Restore lost shards alone; with full recovery raise `RolledBack`, which restores everything.

        Damaged images are skipped with a warning; the step of the image used determines the PLS.

        Args:
          shards: numbers of the shards lost in all stacks.

        Raises:
          RolledBack: with full recovery; the engine handles it.
          DamagedImage: no image is intact; nothing has changed.
          ValueError: there is no such shard, the recovery has not begun, or it is called in `after_step` of a callback
            (use `engine.lose` there).
        """
        self._refuse_closed()
        check_shards(self._engine.tables.spec, shards)
        if self.mode == "full":  # raised, as the state of a running engine cannot be replaced
            raise RolledBack(lambda: self._go_back(len(shards)))
        # With exclusive access: no other thread may read rows of a partly restored shard.
        dense, step = self._engine.state.dense, self._engine.step
        if self._rows_changed():
            self._saves.require_base()
        self._engine.exclusive(lambda tables: self._recover_tables(TrainState(dense, tables), step, shards))
        self._seen_changes = self._engine.changes  # by this call, which the tracker knows

    def _finish_saves(self, step):
        """Discard picks and wait for the save in flight; a failed save does not prevent recovery."""
        try:
            if self._row_tracker:
                self._row_tracker.drop_picks()  # picked rows of lost shards are outdated
                self._row_tracker.track_until(step)
            self._saves.settle()
        except Exception as error:
            warnings.warn(f"a save failed: {error}", stacklevel=6)

    def _recover_tables(self, state, step, shards) -> Tables:
        """Return the tables with lost shards restored; nothing is picked or saved meanwhile."""
        # First: by now a save in flight has become a source, or failed.
        self._finish_saves(step)
        candidates = self._saves.sources()
        tables, sources = restore_each(candidates, state.tables, shards)
        saved = [_saved_up_to(source) if source and damaged else self._saves.regular for source, damaged in sources]
        if self._row_tracker:
            self._row_tracker.restored(tables, shards)
        # Counted once all shards are restored: if a restore raises, no figure has changed. A save below records them.
        before = self.pls, self.failed
        self.pls += sum(self._lost_portion(step, at, 1) for at in saved)
        self.failed += len(saved)
        skipped = candidates[: max(len(damaged) for _, damaged in sources)]
        if skipped and self._row_tracker:
            # A damaged chain must not grow.
            try:
                self._saves.save_base(at_step(state._replace(tables=tables), step))
            except ShardsLost:  # all of them are restored again
                self.pls, self.failed = before
                raise
        for path in () if self._row_tracker else skipped:
            mark_damaged(path)  # so that it does not count towards the images to keep
            self._saves.whole_step = -1  # what it held is in no image
        return tables

    def _go_back(self, lost):
        """Restore everything from the newest whole image, after the engine's run has ended."""
        step, image = self._engine.step, None
        self._finish_saves(step)
        while image is None:
            try:
                state, image = restore(self.directory, self._engine.state)
            except ShardsLost as lost_again:  # some shards already hold rows of the image: restore all again
                self._engine.replace_lost(lost_again.shards, self)
                lost += len(lost_again.shards)
        self.failed, self.lost_steps = self.failed + lost, self.lost_steps + step - image.step
        # The next regular save counts from there, not from the steps that were lost.
        self._saves.reset_regular(image.step)
        self._going_back = True
        try:
            self._engine.reset(state)
        finally:
            self._going_back = False
        self._seen_step = image.step


def _saved_up_to(source: Path) -> int:
    """Return the step up to which an older image counts as saved: that of its last regular save."""
    image = read_manifest(source)
    return image.extra.get("cpr", {}).get("regular", image.step)
