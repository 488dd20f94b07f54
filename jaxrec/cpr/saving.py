"""What a recovery saves: rows that are picked, all rows, a base; and what of it is committed.

Reference: Maeng et al., CPR, MLSys 2021, arXiv 2011.02999, section 5. Legend: S shards, V rows of a
stack.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxrec.checkpoint import Checkpointer, Image, RowCheckpointer, images
from jaxrec.cpr.tracking import RowTracker, shard_rows
from jaxrec.embedding import EmbeddingSpec
from jaxrec.types import ShardsLost, TrainState


class Clock(NamedTuple):
    """The schedule of a run's saves, in steps, which need not be whole.

    >>> clock = Clock(every=10, partial_interval=2.5)
    >>> [step for step in range(1, 13) if clock.due(step)], clock.regular_due(12, since=0)
    ([3, 5, 8, 10], True)
    """

    every: float  # T_save: from one regular save to the next
    partial_interval: float  # r T_save with a scheme, else T_save: from one save to the next

    def due(self, step: int) -> bool:
        """Whether a save falls on a step."""
        return _between(self.partial_interval, step - 1, step)

    def regular_due(self, step: int, since: int) -> bool:
        """Whether a regular save has fallen due since a step: one that failed stays due."""
        return _between(self.every, since, step)


def _between(every, since, step):
    """Whether a multiple of `every` lies in (since, step]."""
    return int(step / every + 1e-9) > int(since / every + 1e-9)


class Saves:
    """The images of a run, whole ones and row deltas.

    Args:
      directory: of the run's images.
      spec: the tables.
      clock: when saves are due.
      watch: which rows go first; None saves everything.
      most_deltas: as for `RowCheckpointer`.
      copy: of whole images, as for `Checkpointer`.
      figures: (step, step of the last regular save) -> JSON values to save along.

    Attributes:
      regular: step of the last regular save that is committed; a mini-save does not move it.
      rows_saved, saves: rows and saves so far.
      stall_seconds: how long the calls of `save` have taken.
    """

    def __init__(
        self,
        directory: Path,
        spec: EmbeddingSpec,
        clock: Clock,
        watch: RowTracker | None,
        most_deltas: int,
        copy: Literal["whole", "shards"],
        figures: Callable[[int, int], dict[str, Any]],
    ):
        self.directory, self._spec, self._clock, self._watch = directory, spec, clock, watch
        self._most, self._copy, self._figures = most_deltas, copy, figures
        self._whole: Any = None  # the saver of whole images; there from `open` on
        self._deltas: Any = None  # the saver of rows, where there is a watch
        self._picked: dict[str, Any] = {}  # of the save that is being written
        self._coming = 0  # step of the regular save that is being written, or `regular`
        self._base_wanted = False  # a damaged chain, untracked steps: a whole image goes before more deltas
        self.regular, self.rows_saved, self.saves, self.stall_seconds = 0, 0, 0, 0.0

    def open(self, step: int, image: Image | None, run: str | None = None) -> contextlib.ExitStack:
        """Takes the directory for this run, all of it or nothing; what it returns gives it back.

        Args:
          step: of the state.
          image: that it was restored from, or None.
          run: id of the run; that of the image, or a new one, if None.

        Raises:
          ValueError: another saver has it; there is a whole image of a later step.
        """
        with contextlib.ExitStack() as opened:
            # Whole images and row deltas take the directory under one run id.
            run, base = (run or image.run, image.path) if image else (run, None)
            whole = opened.enter_context(Checkpointer(self.directory, run=run, copy=self._copy))
            whole.refuse_newer(step)  # else a save of its step would be left as it is
            if self._watch:
                deltas = RowCheckpointer(self.directory, base, self._most, whole.run)
                self._deltas = opened.enter_context(deltas)
            # Last: `opened` is true only of a directory that is taken as a whole.
            self._whole, self.regular, self._coming = whole, step, step
            return opened.pop_all()

    @property
    def opened(self) -> bool:
        """Whether `open` has taken the directory."""
        return self._whole is not None

    @property
    def bytes_written(self) -> int:
        """Bytes of all that is committed, merged deltas included."""
        return sum(saver.bytes_written for saver in self._savers())

    @property
    def failures(self) -> list[str]:
        """What went wrong, a line for each save that failed."""
        return [line for saver in self._savers() for line in saver.failures]

    def _savers(self):
        return [saver for saver in (self._whole, self._deltas) if saver is not None]

    def at_cut(self, cut_step: int, state: TrainState) -> None:
        """The save of a step's cut; its state is of a later step if lost shards kept it from being
        saved before.

        Raises:
          ShardsLost: the cut stays open, and the engine calls again when they are back.
        """
        start, counted, again = time.perf_counter(), (self.saves, self.rows_saved), False
        try:
            # Of the state, not of the cut: what is saved late says where a resumed run has to go on.
            self.save(state, int(state.dense.step))
        except ShardsLost:
            self.saves, self.rows_saved = counted
            again = True
            raise
        finally:
            if self._watch and not again:
                # Also after an error: batches of later steps wait to be tracked until this cut is
                # over. Of the cut, not of the state: it was begun under that step.
                self._watch.end_cut(cut_step)
            self.stall_seconds += time.perf_counter() - start

    def save(self, state: TrainState, step: int) -> None:
        """Saves what is due; it is written while training goes on."""
        state = at_step(state, step)
        if self._base_wanted:
            if self._watch:
                self._watch.picked_ahead(step)  # and dropped, as all rows are saved
                self._watch.touch(step)
            self.save_base(state)
        elif self._watch:
            self._save_rows(state, step, self._watch)
        else:
            self.settle()
            self.rows_saved += sum(stack.rows for stack in self._spec.stacks.values())
            self.saves += 1
            self._whole.save(state, self._figures(step, step))
            self._coming = step

    def _save_rows(self, state, step, watch):
        """Saves what is picked, and at a regular save, which is due until one is committed, the
        tables in `whole`."""
        # Before `touch`, which tracks for the next save: batches up to this step, but for picked
        # rows.
        picked = watch.picked_ahead(step)
        watch.touch(step, picked)
        if picked is None:
            # First, so that a row of the save before, once committed, is not picked again
            # unchanged.
            self.settle()
            picked = watch.pick(state.tables)
        regular = self._clock.regular_due(step, self.regular)  # only now is the last save settled
        # Rows of the tables in `whole` are in no pick, and so in no mini-save.
        rows = self._with_whole(picked, watch.whole) if regular else _rows_of(picked)
        self.rows_saved += sum(map(len, rows.values()))
        self.saves += 1
        figures = self._figures(step, step if regular else self.regular)
        self._deltas.save(state.tables, rows, step, figures, state.dense)
        self._picked = picked  # only now: what was not copied stays to be saved
        self._coming = step if regular else self._coming

    def _with_whole(self, picked, whole):
        rows = _rows_of(picked)
        for name, ranges in whole.items():
            for shard in range(self._spec.shards):
                all_of = [shard_rows(first, end, shard, self._spec.shards) for first, end in ranges]
                rows[name, shard] = np.unique(np.concatenate([rows[name, shard], *all_of]))
        return rows

    def settle(self) -> None:
        """Waits for the save that is being written; only what is committed counts as saved."""
        # Taken off first: whatever the save has come to, it is settled once.
        picked, self._picked = self._picked, {}
        coming, self._coming = self._coming, self.regular
        # A list, so that each saver is settled even if one before it has failed. After a failure
        # nothing counts as saved: its rows keep their counts, and are picked again.
        if not all([saver.settle() for saver in self._savers()]):
            return
        if self._watch:
            self._watch.saved(picked)
        self.regular = self._coming = coming

    def want_base(self) -> None:
        """The next save is one of all rows."""
        self._base_wanted = True

    def save_base(self, state: TrainState, tell: bool = False) -> None:
        """Saves a whole image, waits for it, and lets the chain begin there.

        Args:
          state: at its step.
          tell: whether what goes wrong is raised; if not, the next save tries again.
        """
        step = int(state.dense.step)
        # Before the write: if it fails, the next save knows that deltas have nothing to stand on.
        self._base_wanted = self._base_wanted or not tell
        self._whole.save(state, self._figures(step, step))
        if tell:
            self._whole.wait()
        elif not self._whole.settle():
            return
        if self._watch:
            # Only when the base is committed: until then the old chain is what a shard would come
            # back from.
            self._deltas.restart(self._whole.path_of(step))
            self._watch.begin(state.tables, self._watch.remember())
        self._base_wanted = False
        self.back_to(step)

    def back_to(self, step: int) -> None:
        """All rows are those of a step."""
        self.regular = self._coming = step

    def sources(self) -> list[Path]:
        """What a shard may come back from, newest first: the chain, link by link, then older
        images."""
        # The chain before older images: its last link holds the newest rows.
        mine = [self.directory / name for name in reversed(self._deltas.chain_names())] if self._watch else []
        return [*mine, *(path for path in images(self.directory) if path not in mine)]


def at_step(state: TrainState, step: int) -> TrainState:
    """A state that says which step it is of: under OAC the dense half of a copy may not."""
    return state._replace(dense=state.dense._replace(step=np.int32(step)))


def _rows_of(picked):
    return {(name, shard): mine for name, pick in picked.items() for shard, mine in enumerate(pick.rows)}
