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
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxrec.checkpoint import Image
from jaxrec.cpr.arguments import (
    check_alone,
    check_image,
    check_numbers,
    check_scheme,
    check_shards,
    check_step,
    checked_failures,
    spec_of,
    warn_missed,
)
from jaxrec.cpr.beginning import begin_watch, wants_base
from jaxrec.cpr.figures import Figures
from jaxrec.cpr.priority import Priority
from jaxrec.cpr.returning import bring_back, restored_whole, settle
from jaxrec.cpr.saves import Clock, Cuts, Saves, at_step
from jaxrec.cpr.schedule import Mode
from jaxrec.cpr.watch import Watch, ranges_of
from jaxrec.embedding import Tables
from jaxrec.files import local_path
from jaxrec.types import Plan, RolledBack, TrainState

# Of each engine, the recovery that watches it: a second one would not know which rows the first has brought back.
_watching: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Recovery(Figures):
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

    `Figures` says what it counts.

    Raises:
      ValueError: a number out of range, an unknown table, a scheme with full recovery, SCAR with
        `whole`. On entering: the directory holds images, and `image` is not the newest whole one of
        them; somebody else saves there.
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
        super().__init__(total_steps, extra)
        self._engine, self.spec = engine, spec_of(engine)
        check_numbers(save_every_steps, total_steps, most_deltas, pick_ahead_steps)
        check_scheme(self.spec, mode, scheme, fraction, whole)
        self.directory, self.mode = local_path(directory), mode
        self._clock = Clock(save_every_steps, save_every_steps * fraction if scheme else save_every_steps)
        self._failures = checked_failures(self.spec, failures or {})
        self._watch = Watch(self.spec, scheme, fraction, ranges_of(self.spec, whole)) if scheme else None
        ahead = pick_ahead_steps if scheme and scheme.by_tracker else 0
        self._ahead = max(0, min(ahead, int(self._clock.mini) - 1))
        most = most_deltas or math.ceil(16 / fraction)
        self._saves = Saves(self.directory, self.spec, self._clock, self._watch, most, copy, self.remember)
        self._image, self._run, self._open = image, run, contextlib.ExitStack()  # what leaving closes
        self._cuts = Cuts(engine, self._clock, self._at_cut)
        self._first, self.closed = 0, False  # step on entering
        self._seen, self._rolling_back = 0, False  # the step up to which all is known

    # ---- the beginning and the end

    def __enter__(self) -> "Recovery":
        state, image = self._engine.state, self._image
        step = self._engine.step
        # Before anything is opened: a directory of another run stays as it is.
        if self._saves.opened:
            raise ValueError("this recovery was entered before: it watches one run, once.")
        check_alone(_watching.get(self._engine, lambda: None)())
        check_image(self.directory, image, step)
        with self._saves.open(step, image, self._run) as opened:
            # Within the block: if the base cannot be written, the directory is given back.
            self._begin(state, step)
            self._cuts.announce(step)
            self._open = opened.pop_all()
        _watching[self._engine] = weakref.ref(self)
        return self

    def _begin(self, state, step):
        """Trackers, figures and the base of a run, new or going on."""
        self._first = self._seen = step
        self.go_on(begin_watch(self._watch, state.tables, self._image, self.scheme_name), step)
        if wants_base(self.directory, self._image, state.tables, step, self.mode, self._watch is not None):
            self._saves.save_first(state)

    def __exit__(self, kind, error, trace) -> None:
        # First, so that a hook that runs late is refused and picks nothing more.
        self.closed = True
        self._cuts.withdraw()
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
        check_step(step, self._engine.step, self._seen)
        if self._tell_missed(step - 1):
            self._saves.want_base()  # nobody knows which rows have changed
        self._seen = step
        if self._watch:
            # The state of this very step is saved: an engine runs hooks first, then the cut.
            if step in self._cuts.announced:
                # Before this batch is told, which then waits for the save: that one tracks it, but
                # for the rows that it holds.
                self._watch.begin_cut(step)
            # Before a pick begins, which is to know this batch.
            self._watch.tell(step, plans)
            if self._ahead and self._clock.due(step + self._ahead):
                self._watch.pick_ahead(step, step + self._ahead, self._saves.settle)
        # The next cut is announced a step ahead, also where two saves follow each other.
        self._cuts.announce(step)
        if step in self._failures:
            # The engine calls `recover` behind the cut. Taken off, as a rollback may come to this
            # step again, and a failure happens once.
            self._engine.lose(self._failures.pop(step))
        return state

    def _at_cut(self, step, state):
        if self._seen < int(state.dense.step):
            self._saves.want_base()  # a hook before this one's has failed, and the batch was not tracked
        self._saves.at_cut(step, state)

    def _tell_missed(self, step):
        """Whether steps up to this one were trained without the hook, which is told."""
        if step <= self._seen:
            return False
        warn_missed(self._seen + 1, step)
        return True

    def save_whole(self) -> None:
        """Saves all rows and the dense state between two steps, and waits until they are on the disk:
        who restores this image goes on with the same bits.

        Raises:
          ValueError: it was not entered; within a hook.
          OSError: the disk is full or read-only; what was saved before is as it was.
        """
        self._refuse_closed()
        dense, step = self._engine.state.dense, self._engine.step
        self._engine.exclusive(lambda tables: self._save_all(at_step(TrainState(dense, tables), step)))

    def _save_all(self, state):
        settle(self._saves, self._watch, int(state.dense.step))
        self._saves.save_first(state)
        return state.tables

    def restarted(self, state: TrainState) -> None:
        """The engine is about to go on from another state: all its rows are saved, as no batch tells which are new.

        Raises:
          ValueError: the directory holds a whole image of a later step.
          OSError: the base cannot be written.
        """
        if self._rolling_back or self.closed:
            return
        settle(self._saves, self._watch, self._seen)
        self._cuts.withdraw()
        self._saves.save_first(state)
        self._seen = int(state.dense.step)

    def _refuse_closed(self):
        if not self._saves.opened:
            raise ValueError("enter the recovery before the first step: engine.enter(recovery).")
        if self.closed:
            raise ValueError("this recovery is closed: the block of its engine was left. Make one for each run.")

    # ---- recovering

    def recover(self, shards: Sequence[int], without: Collection[str] = ()) -> None:
        """Brings lost shards back: they alone, or with full recovery all, by `RolledBack`.

        A damaged image is passed over, with a warning; the step of the one used decides the PLS.

        Args:
          shards: the ones that are lost, of all stacks.
          without: names of damaged images to leave out, when nothing else is whole.

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
        self._engine.exclusive(lambda tables: self._recovered(TrainState(dense, tables), step, shards, without))

    def _recovered(self, state, step, shards, without) -> Tables:
        # First: a save that was being written is among the sources then, or has failed.
        settle(self._saves, self._watch, step)
        state = at_step(state, step)
        tables, saved = bring_back(self._saves, self._watch, state, shards, without, self._first)
        # Counted when all shards are back: a restore that raises has changed no figure.
        self.count_lost(step, saved)
        return tables

    def _roll_back(self, lost):
        """All goes back to the newest whole image; the engine's run has ended by now."""
        step = self._engine.step
        settle(self._saves, self._watch, step)
        state, image, more = restored_whole(self._engine, self.directory, self)
        self.failed, self.lost_steps = self.failed + lost + more, self.lost_steps + step - image.step
        # The next regular save is due from there, and not from the steps that were lost.
        self._saves.back_to(image.step)
        # The first cut is announced again behind the reset.
        self._cuts.withdraw()
        self._rolling_back = True
        try:
            self._engine.reset(state)
        finally:
            self._rolling_back = False
        self._seen = image.step
        self._cuts.announce(image.step)
