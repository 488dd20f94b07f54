"""Partial recovery at work: it tracks rows, saves them on schedule, and brings a lost shard back
alone.

A shard is what CPR calls an embedding node. When one fails, the others and the dense parameters
(which every trainer has) go on as they are; the lost one takes its rows from the newest image of
each: a whole base, deltas over it, initial rows for what was never saved. With full recovery all
goes back to the newest whole image, the data position too.

The schedule, in steps:   every save_every_steps a regular save, of everything without a scheme ("vanilla");
                          with one, every fraction * save_every_steps the rows that it picks, at most that fraction, and
                          at regular saves all rows of the tables named in `whole`.

Every save holds the dense state and the figures of the recovery too, so that a run also survives
its own process:

    state, image = restore(directory, state)                    # base + deltas + the dense state saved last
    with Serial(state, train_step) as engine:
        recovery = engine.enter(Recovery(engine, directory, image=image, ...))
        train(engine, stream, hooks=[recovery.hook])            # the stream goes on from engine.step

Reference: Maeng et al., CPR, MLSys 2021, arXiv 2011.02999, sections 4 and 5.
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
from jaxrec.checkpoint import Image, images, newest_first, read_manifest, restore, restore_shards, shard_source
from jaxrec.checkpoint.format import set_aside, warn_skipped
from jaxrec.checkpoint.row_deltas import Verified
from jaxrec.cpr.priority import Priority, budget_rows
from jaxrec.cpr.saving import Clock, Saves, at_step
from jaxrec.cpr.schedule import Mode, lost_portion
from jaxrec.cpr.tracking import RowTracker, ranges_of
from jaxrec.embedding import Tables
from jaxrec.embedding.tables import is_initial
from jaxrec.files import local_path
from jaxrec.types import Plan, RolledBack, ShardsLost, TrainState


def check_image(directory: Path, image: Image | None, step: int) -> None:
    """Refuses a directory whose images are not those that a run goes on from.

    Args:
      directory: of the run's images.
      image: what `restore` returned; None for a run that begins.
      step: of the engine.
    """
    found = newest_first(directory)
    if image is None and found:
        raise ValueError(
            f"{directory} holds {found[0].name} (and {len(found) - 1} more), which would pass for rows of "
            "this run: go on with that one (state, image = restore(directory, state), then Recovery(..., "
            "image=image)), or give another directory."
        )
    if image is not None and (image.path.resolve() not in [p.resolve() for p in found] or image.step != step):
        raise ValueError(
            f"image {image.path} of step {image.step} must lie in {directory}, and the engine's state, of "
            f"step {step}, must be what `restore` returned with it."
        )


def check_shards(spec, shards):
    """Refuses what is no list of distinct shards."""
    if not len(shards) or any(not 0 <= shard < spec.shards for shard in shards) or len(set(shards)) < len(shards):
        raise ValueError(f"shards={list(shards)} must be distinct and lie between 0 and {spec.shards - 1}.")


def check_scheme(spec, mode, scheme, whole):
    """Refuses a scheme that does not fit mode or tables."""
    if mode not in ("partial", "full"):
        raise ValueError(f"mode={mode!r} must be 'partial' or 'full'.")
    if scheme and mode == "full":
        raise ValueError(f"full recovery goes back to whole images: scheme={scheme.name!r} must be None.")
    if whole and scheme and not scheme.by_tracker:
        raise ValueError(f"scheme={scheme.name!r} compares all rows: leave whole empty, not {list(whole)}.")
    if unknown := set(whole) - set(spec.tables):
        raise ValueError(f"whole names unknown tables {sorted(unknown)}; known: {list(spec.tables)}.")


_KEPT = ("pls", "failed", "lost_steps", "rows_saved", "saves")  # go on with a run


# Of each engine, the recovery that watches it: a second one would not know which rows the first has brought back.
_watching: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Recovery:
    """Saves a run's embedding rows and restores lost shards; watches an engine, serial or OAC's
    pipeline.

        with Serial(state, train_step) as engine:
            recovery = engine.enter(Recovery(engine, directory, save_every_steps=1000, total_steps=9000, scheme=mfu()))
            train(engine, stream, hooks=[recovery.hook])        # or, between two steps, recovery.recover([3])

    Entering it saves the state as a base, unless its rows are initial ones, which need none; with
    full recovery, which has dense parameters to go back to, always. Between two steps it saves at
    cuts of the engine. When the engine finds shards lost, it calls `recover` after the step and its
    cut.

    Args:
      engine: whose run it is, see `jaxrec.engine.Engine`.
      directory: of the run's images; made if it does not exist.
      save_every_steps: T_save.
      total_steps: of the run, for the portion of lost samples.
      mode: 'partial' or 'full', as from `plan_recovery`.
      scheme: which rows go first, from `priority`; None saves everything at regular saves.
      fraction: r, of the rows that a scheme may save each r T_save.
      whole: tables that no scheme tracks: all their rows are saved at regular saves. In the paper, as
        we recall it, they are all but the 7 largest.
      failures: {step: shards} that fail right after a step, for emulation.
      image: what `restore` returned with the engine's state, if the run goes on: the figures are
        taken from it, and what the restored rows miss against its step counts as lost by all
        shards. Scheme, fraction and number of shards may be others than before.
      most_deltas: as for `RowCheckpointer`; 16 / r if None, so that merging them costs at most a
        sixteenth of the bytes that saving everything at regular saves would write.
      pick_ahead_steps: how long before a save its rows are picked, in a thread beside training;
        less than the steps between saves, whatever is given. Batches trained meanwhile are tracked
        at the save, except for the picked rows, which it saves as they are then. Always 0 for
        schemes that look at values (SCAR).
      copy: of whole images, as for `Checkpointer`.
      run: id of the run, for its images; that of `image`, or a new one, if None.
      extra: step -> JSON values to save along with that step, such as the data position; called when
        the save is made, under OAC in a thread of its own.

    Attributes:
      pls: portion of lost samples so far (eq. 4); a mini-save does not count as a checkpoint there,
        as we recall the paper.
      failed: shards lost so far. lost_steps: steps trained again, with full recovery.

    Raises:
      ValueError: a number out of range, an unknown table, a scheme with full recovery, SCAR with
        `whole`. On entering: the directory holds images, and `image` is not the newest whole one of
        them; another saver has the directory.
      OSError: on entering, a base cannot be written.

    A save that fails with an OSError is warned of, and training goes on: its rows stay to be saved
    (SSU's as far as its list has room). Leaving the recovery raises what the last save failed with.
    """

    def __init__(
        self, engine, directory: str | Path, save_every_steps: float, total_steps: int, mode: Mode = "partial",
        scheme: Priority | None = None, fraction: float = 0.125, whole: Collection[str] = (),
        failures: Mapping[int, Sequence[int]] | None = None, image: Image | None = None,
        most_deltas: int | None = None, pick_ahead_steps: int = 4, copy: Literal["whole", "shards"] = "whole",
        run: str | None = None, extra: Callable[[int], Mapping[str, Any]] | None = None,
    ):  # fmt: skip
        self._total, self._extra = total_steps, extra
        self.pls, self.failed, self.lost_steps = 0.0, 0, 0
        self._engine, self.spec = engine, engine.tables.spec
        real_number("save_every_steps", save_every_steps, "above 0 and finite", is_positive)
        whole_number("total_steps", total_steps)
        whole_number("pick_ahead_steps", pick_ahead_steps, 0)
        budget_rows(1, fraction)  # which refuses what is no fraction
        check_scheme(self.spec, mode, scheme, whole)
        for step, shards in (failures or {}).items():
            whole_number("a step of failures", step)
            check_shards(self.spec, shards)
        self.directory, self.mode = local_path(directory), mode
        self._clock = Clock(save_every_steps, save_every_steps * fraction if scheme else save_every_steps)
        self._failures = dict(failures or {})
        self._watch = RowTracker(self.spec, scheme, fraction, ranges_of(self.spec, whole)) if scheme else None
        self._scheme_name = scheme.name if scheme else None
        ahead = pick_ahead_steps if scheme and scheme.by_tracker else 0
        self._ahead = max(0, min(ahead, int(self._clock.partial_interval) - 1))
        most = most_deltas or math.ceil(16 / fraction)
        self._saves = Saves(self.directory, self.spec, self._clock, self._watch, most, copy, self._remember)
        self._image, self._run, self._open = image, run, contextlib.ExitStack()  # what leaving closes
        self._announced = 0  # step of the cut to come
        self.closed = False
        self._seen, self._rolling_back = 0, False  # the step up to which all is known

    # ---- what it has saved, lost and brought back

    @property
    def saves(self) -> int:
        """Saves so far."""
        return self._saves.saves

    @property
    def rows_saved(self) -> int:
        """Rows in them."""
        return self._saves.rows_saved

    @property
    def stall_seconds(self) -> float:
        """How long training has waited for saves: for picking, copying, and what was being written
        still; of an engine that saves beside training, how long its writes were held."""
        return self._saves.stall_seconds

    @property
    def bytes_written(self) -> int:
        """Bytes of all images and deltas committed since it was entered, merged deltas included."""
        return self._saves.bytes_written

    @property
    def failed_saves(self) -> list[str]:
        """What went wrong with saves, a line for each that failed."""
        return self._saves.failures

    def _remember(self, step, regular) -> dict[str, Any]:
        """What a save of a step says beside rows and dense state; `regular` is the step of the last regular save."""
        extra = dict(self._extra(step)) if self._extra else {}
        if "cpr" in extra:
            raise ValueError("extra holds 'cpr', under which the recovery saves its own figures: take another name.")
        trackers = self._watch.remember() if self._watch else {}
        more = {"regular": regular, "scheme": self._scheme_name, "trackers": trackers}
        return {**extra, "cpr": {name: getattr(self, name) for name in _KEPT} | more}

    def _go_on(self, known: Mapping[str, Any], step: int) -> None:
        """Goes on with what an image remembers; what that lacks of its step is lost in all shards."""
        self.pls, self.failed, self.lost_steps = (known.get(name, 0) for name in ("pls", "failed", "lost_steps"))
        self._saves.rows_saved, self._saves.saves = known.get("rows_saved", 0), known.get("saves", 0)
        regular = known.get("regular", step)
        # And no more of it later: a shard that fails next comes back with what was restored now.
        if regular < step:
            self.pls += self._portion(step, regular, self.spec.shards)

    def _portion(self, step, saved, shards):
        return lost_portion(step, saved, max(self._total, step), self.spec.shards, shards)

    # ---- the beginning and the end

    def __enter__(self) -> "Recovery":
        state, image = self._engine.state, self._image
        step = self._engine.step
        # Before anything is opened: a directory of another run stays as it is.
        if self._saves.opened:
            raise ValueError("this recovery was entered before: it watches one run, once.")
        other = _watching.get(self._engine, lambda: None)()
        if other is not None and not other.closed:
            raise ValueError(f"this engine has a recovery already, which saves in {other.directory}: leave it first.")
        check_image(self.directory, image, step)
        with self._saves.open(step, image, self._run) as opened:
            # Within the block: if the base cannot be written, the directory is given back.
            self._begin(state, step)
            self._announce(step)
            self._open = opened.pop_all()
        _watching[self._engine] = weakref.ref(self)
        return self

    def _begin(self, state, step):
        """Trackers, figures and the base of a run, new or going on."""
        self._seen, image, tables = step, self._image, state.tables
        known = image.extra.get("cpr", {}) if image else {}
        split_as_before = image is not None and image.spec == tables.spec.digest
        if self._watch:  # of another scheme, or of tables that are split otherwise, trackers begin anew
            same = split_as_before and known.get("scheme") == self._scheme_name
            self._watch.begin(tables, known.get("trackers", {}) if same else {})
        self._go_on(known, step)
        if image is None:  # initial rows can be made again, but with full recovery dense parameters go back too
            base_wanted = self.mode == "full" or step > 0 or not is_initial(tables)
        else:  # a base is one of all rows, split as they are now; or the chain of one goes on
            base_wanted = not split_as_before or not (self._watch or image.path in images(self.directory))
        if base_wanted:
            self._saves.save_base(state, tell=True)

    def __exit__(self, kind, error, trace) -> None:
        # First, so that a hook that runs late is refused and picks nothing more.
        self.closed = True
        self._withdraw()
        try:
            if self._watch:
                # Before the savers: the thread that picks may wait for one of their saves.
                self._watch.close()
                if error is None:
                    self._watch.drop_picks()  # which tells what went wrong in the thread
            if error is None:
                self._tell_missed(self._engine.step)
        finally:
            self._open.__exit__(kind, error, trace)

    # ---- at each step

    def hook(self, state: TrainState, step: int, plans: dict[str, Plan], metrics) -> TrainState:
        """Tracks the batch, and announces the next save and emulated failure to the engine.

        Raises:
          ValueError: it was not entered; the step is not the engine's.
        """
        self._refuse_closed()
        if step != self._engine.step:
            raise ValueError(f"step {step} is not that of this recovery's engine, {self._engine.step}: train with it.")
        if step <= self._seen:
            raise ValueError(f"step {step} was seen before: give the hook once, to this recovery's engine.")
        if self._tell_missed(step - 1):
            self._saves.want_base()  # it is not known which rows have changed
        self._seen = step
        if self._watch:
            # The state of this very step is saved: an engine runs hooks first, then the cut.
            if step == self._announced:
                # Before this batch is told, which then waits for the save: that one tracks it, but
                # for the rows that it holds.
                self._watch.begin_cut(step)
            # Before a pick begins, which is to know this batch.
            self._watch.tell(step, plans)
            if self._ahead and self._clock.due(step + self._ahead):
                self._watch.pick_ahead(step, step + self._ahead, self._saves.settle)
        # The next cut is announced a step ahead, also where two saves follow each other.
        self._announce(step)
        if step in self._failures:
            # The engine calls `recover` after the cut. Taken off, as a rollback may come to this
            # step again, and a failure happens once.
            self._engine.lose(self._failures.pop(step))
        return state

    def _announce(self, step):
        """Announces the cut of the next step, if a save is due then: an engine takes it right after that step."""
        self._announced = 0
        if self._clock.due(step + 1):
            self._engine.cut(step + 1, functools.partial(self._at_cut, step + 1), unreached="ignore")
            self._announced = step + 1

    def _withdraw(self):
        """Takes back what is announced."""
        self._engine.withdraw(self._announced)
        self._announced = 0

    def _at_cut(self, step, state):
        if self._seen < int(state.dense.step):
            self._saves.want_base()  # a hook before this one's has failed, and the batch was not tracked
        self._saves.at_cut(step, state)

    def _tell_missed(self, step):
        """Whether steps up to this one were trained without the hook, which is told."""
        if step <= self._seen:
            return False
        warnings.warn(
            f"steps {self._seen + 1} to {step} were trained without recovery.hook: hooks=[recovery.hook] has what they "
            "changed saved.",
            stacklevel=4,
        )
        return True

    def save_whole(self) -> None:
        """Saves all rows and the dense state between two steps, and waits until they are on the disk:
        a run restored from this image goes on with the same bits.

        Raises:
          ValueError: it was not entered; within a hook.
          OSError: the disk is full or read-only; what was saved before is as it was.
        """
        self._refuse_closed()
        dense, step = self._engine.state.dense, self._engine.step
        self._engine.exclusive(lambda tables: self._save_all(at_step(TrainState(dense, tables), step)))

    def _save_all(self, state):
        self._end_save(int(state.dense.step))
        self._saves.save_base(state, tell=True)
        return state.tables

    def restarted(self, state: TrainState) -> None:
        """The engine is about to go on from another state: all its rows are saved, as no batch tells which are new.

        Raises:
          ValueError: the directory holds a whole image of a later step.
          OSError: the base cannot be written.
        """
        if self._rolling_back or self.closed:
            return
        self._end_save(self._seen)
        self._withdraw()
        self._saves.save_base(state, tell=True)
        self._seen = int(state.dense.step)

    def _refuse_closed(self):
        if not self._saves.opened:
            raise ValueError("enter the recovery before the first step: engine.enter(recovery).")
        if self.closed:
            raise ValueError("this recovery is closed: the block of its engine was left. Make one for each run.")

    # ---- recovering

    def recover(self, shards: Sequence[int]) -> None:
        """Brings lost shards back: they alone, or with full recovery all, by `RolledBack`.

        A damaged image is passed over, with a warning; the step of the one used decides the PLS.

        Args:
          shards: the ones that are lost, of all stacks.

        Raises:
          RolledBack: with full recovery; `train` goes on by itself.
          DamagedImage: no image is whole; nothing has changed.
          ValueError: there is no such shard; it was not entered; within a hook (there, use
            `engine.lose`).
        """
        self._refuse_closed()
        check_shards(self.spec, shards)
        if self.mode == "full":  # raised, not done here: the state of a run that goes on cannot be replaced
            raise RolledBack(lambda: self._roll_back(len(shards)))
        # Alone with the tables: no other thread may read a row of a shard that is half restored.
        dense, step = self._engine.state.dense, self._engine.step
        self._engine.exclusive(lambda tables: self._recovered(TrainState(dense, tables), step, shards))

    def _end_save(self, step):
        """Ends what is being picked and saved; a save that failed does not keep a shard from coming
        back."""
        try:
            if self._watch:
                self._watch.drop_picks()  # rows of lost shards are no longer what was picked
                self._watch.touch(step)
            self._saves.settle()
        except Exception as error:
            warnings.warn(f"a save failed: {error}", stacklevel=6)

    def _recovered(self, state, step, shards) -> Tables:
        """The tables with lost shards from the newest images of each; nothing is picked or saved meanwhile."""
        # First: a save that was being written is among the sources then, or has failed.
        self._end_save(step)
        known: Verified = {}
        every, tables = self._saves.sources(), state.tables
        # All is read and verified before the first row changes.
        sources = [shard_source(every, shard, known) if every else (None, []) for shard in shards]
        saved = [_saved_up_to(source) if source and damaged else self._saves.regular for source, damaged in sources]
        # Once, for the shard that had to go back furthest.
        warn_skipped(max((damaged for _, damaged in sources), key=len))
        from_source = [source for source, _ in sources]
        for source in dict.fromkeys(from_source):
            mine = [shard for shard, chosen in zip(shards, from_source, strict=True) if chosen == source]
            tables, _ = restore_shards(source, tables, mine)
            if self._watch:
                for shard in mine:
                    self._watch.restored(tables, shard)
        skipped = {path for source, damaged in sources if source and damaged for path in every[: every.index(source)]}
        if skipped and self._watch:
            # Nothing more goes over a damaged chain.
            self._saves.save_base(at_step(state._replace(tables=tables), step))
        for path in () if self._watch else skipped:
            set_aside(path)  # it does not count among the images to keep
        # Counted when all shards are back: a restore that raises has changed no figure.
        self.pls += sum(self._portion(step, at, 1) for at in saved)
        self.failed += len(saved)
        return tables

    def _roll_back(self, lost):
        """All goes back to the newest whole image; the engine's run has ended by now."""
        step, image = self._engine.step, None
        self._end_save(step)
        while image is None:
            try:
                state, image = restore(self.directory, self._engine.state)
            except ShardsLost as gone:  # rows of some are those of the image already: all begin anew
                self._engine.replace_lost(gone.shards, self)
                lost += len(gone.shards)
        self.failed, self.lost_steps = self.failed + lost, self.lost_steps + step - image.step
        # The next regular save is due from there, and not from the steps that were lost.
        self._saves.back_to(image.step)
        # The first cut is announced again after the reset.
        self._withdraw()
        self._rolling_back = True
        try:
            self._engine.reset(state)
        finally:
            self._rolling_back = False
        self._seen = image.step
        self._announce(image.step)


def _saved_up_to(source: Path) -> int:
    """The step up to which an older image counts as saved; mini-saves do not move it."""
    image = read_manifest(source)
    return image.extra.get("cpr", {}).get("regular", image.step)
