"""Partial recovery at work: hooks that track rows, save them on schedule, and bring a lost shard back alone.

A shard is what CPR calls an embedding node. When one fails, the others and the dense parameters (which every trainer
has) go on as they are; the lost one takes its rows from the newest image of each: a whole base, deltas over it, initial
rows for what was never saved. With full recovery all goes back to the newest whole image, the data position too.

The schedule, in steps:   every save_every_steps a regular save, of everything without a scheme ("vanilla");
                          with one, every fraction * save_every_steps the rows that it picks, at most that fraction, and
                          at regular saves all rows of the tables named in `whole`.

Every save holds the dense state and the figures of the recovery too, so that a run also survives its own process:

    state, image = restore(directory, state, spec, row_optimizer)      # base + deltas + the dense state saved last
    with Recovery(directory, spec, row_optimizer, ...) as recovery:
        state = recovery.begin(state, image)                           # and the batches go on from image.step

Reference: Maeng et al., CPR, MLSys 2021, arXiv 2011.02999, sections 4 and 5.
Legend: S shards, V rows of a stack.
"""

import contextlib
import math
import threading
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxrec.checkpoint import (
    Checkpointer,
    Image,
    RowCheckpointer,
    chain,
    images,
    newest_first,
    restore,
    restore_shard,
    shard_source,
)
from jaxrec.checkpoint.image import set_aside, warn_skipped
from jaxrec.cpr.priority import Priority, budget_rows
from jaxrec.cpr.schedule import Mode, lost_portion
from jaxrec.cpr.watch import in_pick, in_ranges, is_initial, ranges_of, shard_rows, value_of, without_rows
from jaxrec.embedding import HostTables
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.files import local_path
from jaxrec.types import Plan, RowOptimizer, TrainState

_FIGURES = ("pls", "failed", "lost_steps", "rows_saved", "saves")  # go on with a run


class RolledBack(Exception):
    """Full recovery: the state is that of an earlier step; train on from there.

    Attributes:
      state: TrainState of that step.
      step: steps trained; the data goes back to it.
    """

    def __init__(self, state: TrainState, step: int):
        super().__init__(f"rolled back to step {step}")
        self.state, self.step = state, step


class Recovery:
    """Saves a run's embedding rows and restores lost shards; a hook of `fit` and of `Pipeline`.

        with Recovery(directory, spec, rows, save_every_steps=1000, total_steps=10_000, scheme=mfu()) as recovery:
            state = recovery.begin(state)
            state = fit(state, batches, step, hooks=[recovery.hook])        # or state = recovery.fail(state, [3])

    Args:
      directory: of the run's images; made if it does not exist.
      spec: the tables.
      row_optimizer: theirs.
      save_every_steps: T_save.
      total_steps: of the run, for the portion of lost samples.
      mode: 'partial' or 'full', as from `plan_recovery`.
      scheme: which rows go first, from `priority`; None saves everything at regular saves.
      fraction: r, of the rows that a scheme may save each r T_save.
      whole: tables that no scheme watches: all their rows are saved at regular saves. CPR's are all but the 7 largest.
      failures: {step: shards} that fail right after a step, for emulation.
      pipeline: an OAC `Pipeline` whose hook this is; saves are then taken at announced cuts, and failures drain it.
      most_deltas: as for `RowCheckpointer`; 16 / r if None, so that merging them costs at most a sixteenth of the bytes
        that saving everything at regular saves would write.
      pick_ahead_steps: how long before a save its rows are picked, in a thread beside training; less than the steps
        between saves, whatever is given. Batches trained meanwhile are tracked at the save, except for the picked
        rows, which it saves as they are then. Always 0 with a pipeline, and for schemes that look at values (SCAR).
      copy: of whole images, as for `Checkpointer`.

    Attributes:
      pls: portion of lost samples so far (eq. 4); a mini-save does not count as a checkpoint there, as in the paper.
      failed: shards lost so far. lost_steps: steps trained again, with full recovery.
      rows_saved, saves: rows and saves so far.

    Raises:
      ValueError: a number out of range, an unknown table, a scheme or a pipeline with full recovery, SCAR with `whole`.

    A save that fails with an OSError is warned of, and training goes on: its rows stay to be saved (SSU's as far as its
    list has room). Leaving the `with` block raises what the last save failed with.
    """

    def __init__(
        self, directory: str | Path, spec: EmbeddingSpec, row_optimizer: RowOptimizer, save_every_steps: float,
        total_steps: int, mode: Mode = "partial", scheme: Priority | None = None, fraction: float = 0.125,
        whole: Collection[str] = (), failures: Mapping[int, Sequence[int]] | None = None, pipeline=None,
        most_deltas: int | None = None, pick_ahead_steps: int = 4, copy: Literal["whole", "shards"] = "whole",
    ):  # fmt: skip
        if mode == "full" and pipeline is not None:
            raise ValueError(
                "full recovery rolls the state back, which a pipeline cannot: train with fit, or mode='partial'."
            )
        if most_deltas is not None and (not isinstance(most_deltas, int) or most_deltas < 1):
            raise ValueError(f"most_deltas={most_deltas} must be a whole number from 1.")
        _check(spec, save_every_steps, total_steps, mode, scheme, fraction, whole, failures or {}, pick_ahead_steps)
        self.directory, self.spec, self.mode = local_path(directory), spec, mode
        self._rows, self._total, self._every = row_optimizer, total_steps, save_every_steps
        self._mini = save_every_steps * fraction if scheme else save_every_steps
        ahead = pick_ahead_steps if scheme and scheme.by_tracker and pipeline is None else 0
        self._ahead = max(0, min(ahead, int(self._mini) - 1))
        self._scheme: Any = scheme
        self._fraction, self._whole = fraction, ranges_of(spec, whole)
        self._failures, self._pipeline = dict(failures or {}), pipeline
        self._most, self._copy = most_deltas or math.ceil(16 / fraction), copy
        self._open = contextlib.ExitStack()  # what leaving the `with` block closes
        self._checkpointer: Any = None  # whole images; made by `begin`, which knows the run
        self._deltas: Any = None  # rows, with a scheme
        self._trackers: dict[str, Any] = {}
        self._picked: dict[str, Any] = {}  # of the save that is being written
        self._picking: Future | None = None  # for the save to come
        self._picker = ThreadPoolExecutor(1, "pick")
        self._waiting: list[tuple[int, dict[str, Plan]]] = []  # (step, plans) trained while rows are being picked
        self._lock, self._cuts = threading.Lock(), 0  # cuts that have not picked yet
        self._announced: set[int] = set()  # steps of cuts to come
        self._stall, self._begun = 0.0, False
        self._base_wanted = False  # the chain is damaged: a whole image goes before more deltas
        # Step of the last regular save committed; of the one that is being written, or that.
        self._regular = self._coming = 0
        self._first = self._seen = 0  # step of `begin`; of the last batch
        self._puts: int | None = 0  # that the tables had seen before step 0; None if they do not say
        self.pls, self.failed, self.lost_steps, self.rows_saved, self.saves = 0.0, 0, 0, 0, 0

    @property
    def stall_seconds(self) -> float:
        """How long training has waited for saves: for picking, copying, and what was being written still."""
        return self._stall if self._pipeline is None else sum(saver.stall_seconds for saver in self._savers())

    @property
    def bytes_written(self) -> int:
        """Bytes of all images and deltas committed since `begin`, merged deltas included."""
        return sum(saver.bytes_written for saver in self._savers())

    @property
    def failed_saves(self) -> list[str]:
        """What went wrong with saves, a line for each that failed."""
        return [line for saver in self._savers() for line in saver.failures]

    def _savers(self):
        return [saver for saver in (self._checkpointer, self._deltas) if saver is not None]

    def begin(self, state: TrainState, image: Image | None = None) -> TrainState:
        """Starts to track; saves the state as a base, unless its rows are initial ones, which need none.

        With full recovery, which has dense parameters to go back to, a base is always saved.

        Args:
          state: TrainState.
          image: what `restore` returned with the state, if the run goes on: the figures are taken from it, and what the
            mosaic of rows has lost against its step counts as lost by all shards. Scheme, fraction and number of shards
            may be others than before.

        Returns:
          The state.

        Raises:
          ValueError: the directory holds images, and `image` is not the newest whole one of them; somebody else saves
            there; a second `begin`.
          OSError: a base cannot be written.
        """
        step = int(state.dense.step)
        self._check_begin(step, image)
        with contextlib.ExitStack() as opened:  # all of it, or nothing
            checkpointer = opened.enter_context(
                Checkpointer(self.directory, self.spec, run=image.run if image else None, copy=self._copy)
            )
            checkpointer.refuse_newer(step)  # else a save of its step would be left as it is
            if self._scheme:
                base = image.path if image else None
                rows = RowCheckpointer(self.directory, self.spec, base, self._most, checkpointer.run)
                self._deltas = opened.enter_context(rows)
            self._checkpointer, self._open = checkpointer, opened.pop_all()
        self._first = self._seen = self._regular = self._coming = step
        self._puts = _puts_before(state.tables, step)
        known = image.extra.get("cpr", {}) if image else {}
        same = image is not None and (image.spec, known.get("scheme")) == (self.spec.digest, self._scheme_name())
        self._watch_from(state.tables, known.get("trackers", {}) if same else {})
        self._take_figures(known, step)
        if image is None:
            wants_base = self.mode == "full" or step > 0 or not is_initial(state.tables, self.spec)
        else:  # one of all rows, split as they are now, or a chain that goes on
            wants_base = image.spec != self.spec.digest or not (self._scheme or image.path in images(self.directory))
        if wants_base:
            self._save_base(state)
        self._begun = True
        self._announce(step)
        return state

    def _check_begin(self, step, image):
        found = newest_first(self.directory)
        if self._checkpointer is not None:
            raise ValueError("begin was called before: a Recovery watches one run, once.")
        if image is None and found:
            raise ValueError(
                f"{self.directory} holds {found[0].name} (and {len(found) - 1} more), which would pass for rows of "
                "this run: go on with that one (state, image = restore(directory, state, spec, row_optimizer), then "
                "begin(state, image)), or give another directory."
            )
        if image is not None and not isinstance(image, Image):
            raise ValueError(f"image is a {type(image).__name__}: give what `restore` returned beside the state.")
        if image is not None and (image.path.resolve() not in [p.resolve() for p in found] or image.step != step):
            raise ValueError(
                f"image {image.path} of step {image.step} must lie in {self.directory}, and the state, of step {step}, "
                "must be what `restore` returned with it."
            )

    def _watch_from(self, tables, known):
        """Trackers of rows that are all as they were saved; the little more that they know comes from an image."""
        for name in self.spec.stacks if self._scheme else ():
            tracker = self._scheme.init(value_of(tables, name), self._budget(name))
            self._trackers[name] = self._scheme.recall(tracker, known[name]) if name in known else tracker

    def _take_figures(self, known, step):
        """Goes on with the figures of an image; rows of before its step that it lacks are lost in all shards."""
        for name in _FIGURES:
            setattr(self, name, known.get(name, getattr(self, name)))
        regular = known.get("regular", step)
        if regular < step:  # and no more of it later: a shard that fails next comes back with what was restored now
            self.pls += lost_portion(step, regular, max(self._total, step), self.spec.shards, self.spec.shards)

    def _figures(self, regular):
        """What a save says of the recovery, beside rows and dense state."""
        trackers = {name: self._scheme.remember(tracker) for name, tracker in self._trackers.items()}
        more = {"regular": regular, "scheme": self._scheme_name(), "trackers": trackers}
        return {"cpr": {name: getattr(self, name) for name in _FIGURES} | more}

    def _scheme_name(self):
        return self._scheme.name if self._scheme else None

    def hook(self, state: TrainState, step: int, plan: dict[str, Plan], metrics) -> TrainState:
        """Tracks the batch, saves if it is time to, and recovers from the failures of this step.

        Raises:
          ValueError: `begin` was not called; steps do not rise; the tables are not those of this step.
          RolledBack: with full recovery, if shards fail.
        """
        self._refuse_unbegun()
        self._refuse_other_time(state.tables, step)
        if self._scheme:
            with self._lock:
                self._waiting.append((step, plan))
                if not self._cuts and self._picking is None:
                    self._touch(step)
        if self._ahead and self._due(step + self._ahead, self._mini):
            self._picking = self._picker.submit(self._pick)
        if self._due(step, self._mini):
            if self._pipeline is None:
                start = time.perf_counter()
                self._save(state, step)
                self._stall += time.perf_counter() - start
            elif step in self._failures:  # no cut was announced: what fails after the save must find it
                self._pipeline.exclusive(lambda tables: self._save(state, step) or tables)
        self._announce(step)
        if step in self._failures:
            state = self.fail(state, self._failures.pop(step), step)
        return state

    def _refuse_unbegun(self):
        if not self._begun:
            raise ValueError("call state = recovery.begin(state) before the first step.")

    def _refuse_other_time(self, tables, step):
        """Refuses steps counted anew after a resume, and tables that lag behind the step or that nobody cuts."""
        if step <= self._seen:
            raise ValueError(
                f"step {step} after step {self._seen}: steps rise; after a resume they go on from image.step."
            )
        self._seen = step
        if self._pipeline is not None:
            if not self._pipeline.running:
                raise ValueError("this recovery saves at cuts of its pipeline, which is not running: train with it.")
            return
        puts = _puts_before(tables, step)
        counted = puts is not None and self._puts is not None and puts + step != self._puts + self._first
        if counted and puts != self._puts:  # writers that `add` are not counted
            raise ValueError(
                f"the tables lag behind step {step} by {self._puts - puts} puts: under a Pipeline they do, so give it "
                "to Recovery (pipeline=...); elsewhere a step is one put."
            )

    def fail(
        self, state: TrainState, shards: Sequence[int], step: int | None = None, without: Collection[str] = ()
    ) -> TrainState:
        """Loses shards and recovers: partial recovery restores them alone, full recovery raises `RolledBack`.

        Where an image is damaged, the newest one that is whole is used, with a warning; its step decides the PLS.

        Args:
          state: TrainState; its tables change, those of devices are donated.
          shards: the ones that fail, of all stacks.
          step: steps trained.
          without: names of damaged images to leave out, when nothing else is whole.

        Returns:
          The state to go on with.

        Raises:
          RolledBack: with full recovery.
          DamagedImage: no image is whole; nothing has changed.
          ValueError: there is no such shard; `begin` was not called.
        """
        self._refuse_unbegun()
        step = int(state.dense.step) if step is None else step
        _check_shards(self.spec, shards)
        if self._pipeline is None:
            return state._replace(tables=self._recover(state, state.tables, shards, step, without))
        self._pipeline.exclusive(lambda tables: self._recover(state, tables, shards, step, without))
        return state

    def _recover(self, state, tables, shards, step, without):
        try:  # a save that failed does not keep a shard from coming back
            self._picked_ahead()  # and dropped: rows of lost shards are no longer what was picked
            self._touch(step)
            self._settle()
        except Exception as error:
            warnings.warn(f"a save failed: {error}", stacklevel=3)
        if self.mode == "full":
            self.failed += len(shards)
            self._roll_back(state, step)
        every = self._sources(without)
        known: dict = {}
        # All is read, verified and counted before the first row changes.
        sources = [shard_source(every, shard, known, without) if every else (None, []) for shard in shards]
        lost = [self._lost_by(step, source, bool(damaged or without), without) for source, damaged in sources]
        warn_skipped(max((damaged for _, damaged in sources), key=len))
        for shard, (source, _) in zip(shards, sources, strict=True):
            tables, _ = restore_shard(source, tables, shard, self.spec, self._rows, without)
            for name in self._trackers:
                self._trackers[name] = self._scheme.restored(self._trackers[name], shard, value_of(tables, name))
        self.pls, self.failed = self.pls + sum(lost), self.failed + len(shards)
        skipped = {path for source, damaged in sources if damaged for path in every[: every.index(source)]}
        if (skipped or without) and self._scheme:
            self._save_base(_at_step(state._replace(tables=tables), step))  # nothing more goes over a damaged chain
        for path in () if self._scheme else skipped:
            set_aside(path)  # it does not count among the images to keep
        return tables

    def _lost_by(self, step, source, older, without):
        """What a shard adds to the PLS that comes back from a source; an older one if the newest is not whole."""
        found = chain(source, without) if older and source is not None else []
        saved = _regular_of(found) if found else self._first if older else self._regular
        return lost_portion(step, saved, max(self._total, step), self.spec.shards)

    def _sources(self, without):
        """What a shard may come back from, newest first: the chain, link by link, then older images."""
        mine = [self.directory / name for name in reversed(self._deltas.chain_names())] if self._scheme else []
        every = [*mine, *(path for path in images(self.directory) if path not in mine)]
        return [path for path in every if path.name not in without]

    def _roll_back(self, state, step):
        restored, image = restore(self.directory, state, self.spec, self._rows)
        self.lost_steps += step - image.step
        self._seen = self._regular = self._coming = image.step
        self._puts = _puts_before(restored.tables, image.step)
        raise RolledBack(restored, image.step)

    # ---- saving

    def _due(self, step, every, since=None):
        """Whether a multiple of `every`, which need not be whole, lies in (since, step]; the step before if None."""
        since = step - 1 if since is None else since
        return int(step / every + 1e-9) > int(since / every + 1e-9)

    def _announce(self, step):
        if self._pipeline is None:
            return
        if self._due(step + 1, self._mini) and step + 1 not in self._failures:
            self._pipeline.cut(step + 1, self._save_cut, unreached="ignore")
            self._announced.add(step + 1)
        if step in self._announced:
            self._announced.remove(step)
            with self._lock:
                self._cuts += 1  # batches trained from now on wait until it has picked

    def _save_cut(self, state):
        try:
            self._save(state, int(state.dense.step))
        finally:
            with self._lock:
                self._cuts -= 1

    def _touch(self, step, picked=None):
        """Tracks what waits, up to a step; nothing of the rows in {stack: Pick}."""
        while self._waiting and self._waiting[0][0] <= step:
            for name, plan in self._waiting.pop(0)[1].items():
                if picked or name in self._whole:
                    gone = in_ranges(plan, self._whole.get(name, ()))
                    gone = gone | in_pick(plan, picked[name].rows) if picked else gone
                    plan = without_rows(plan, gone, self.spec.stacks[name].rows)
                self._trackers[name] = self._scheme.touch(self._trackers[name], plan)

    def _pick(self, tables=None):
        """{stack: Pick} of the next save; of tables that lie still, if the scheme looks at values."""
        self._settle()  # first, so that a row of the save before, once committed, is not picked again unchanged
        picked = {}
        for name in self.spec.stacks:
            value = None if tables is None else value_of(tables, name)
            picked[name], self._trackers[name] = self._scheme.pick(self._trackers[name], self._budget(name), value)
        return picked

    def _picked_ahead(self):
        """Waits for the thread: {stack: Pick}, or None if nothing was picked ahead."""
        picking, self._picking = self._picking, None
        return picking.result() if picking else None

    def _settle(self):
        """Waits for the save that is being written; only what is committed counts as saved."""
        picked, self._picked = self._picked, {}
        coming, self._coming = self._coming, self._regular
        if not all([saver.settle() for saver in self._savers()]):
            return
        for name, pick in picked.items():
            self._trackers[name] = self._scheme.saved(self._trackers[name], pick)
        self._regular = self._coming = coming

    def _save(self, state, step):
        state = _at_step(state, step)
        if self._base_wanted:
            self._picked_ahead()
            self._touch(step)
            self._save_base(state)
            return
        if self._scheme:
            regular = self._save_rows(state, step)
        else:
            self._settle()
            regular = self._due(step, self._every, self._regular)
            self.rows_saved += sum(stack.rows for stack in self.spec.stacks.values())
            self.saves += 1
            self._checkpointer.save(state, self._figures(step))
        self._coming = step if regular else self._coming

    def _save_rows(self, state, step):
        """Saves what is picked; returns whether it is a regular save, which is due until one is committed."""
        picked = self._picked_ahead()
        self._touch(step, picked)
        picked = self._pick(state.tables) if picked is None else picked  # only then is the last save settled
        regular = self._due(step, self._every, self._regular)
        rows: dict[tuple[str, int], np.ndarray] = {}
        for name, pick in picked.items():
            for shard, mine in enumerate(pick.rows):
                all_of = [shard_rows(first, end, shard, self.spec.shards) for first, end in self._whole.get(name, ())]
                rows[name, shard] = np.unique(np.concatenate([mine, *all_of])) if regular and all_of else mine
        self.rows_saved += sum(map(len, rows.values()))
        self.saves += 1
        self._deltas.save(state.tables, rows, step, self._figures(step if regular else self._regular), state.dense)
        self._picked = picked  # only now: what was not copied stays to be saved
        return regular

    def _save_base(self, state):
        """Saves a whole image, waits for it, and lets the chain begin there; if it fails, the next save tries again."""
        step = int(state.dense.step)
        self._base_wanted = True
        self._checkpointer.save(state, self._figures(step))
        if self._begun and not self._checkpointer.settle():
            return
        self._checkpointer.wait()  # before the first step nothing has been lost yet, and the error is raised
        if self._deltas is not None:
            self._deltas.restart(self._checkpointer.path_of(step))
            self._watch_from(state.tables, {name: self._scheme.remember(t) for name, t in self._trackers.items()})
        self._base_wanted = False
        self._regular = self._coming = step

    def _budget(self, name):
        stack = self.spec.stacks[name]
        watched = stack.rows - sum(end - first for first, end in self._whole.get(name, ()))
        return budget_rows(-(-watched // self.spec.shards), self._fraction)

    def __enter__(self) -> "Recovery":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if error is None:
                self._picked_ahead()
        finally:
            self._picker.shutdown()
            self._open.__exit__(kind, error, trace)


def _at_step(state, step):
    """A state that says which step it is of: a hook is told, and under OAC the dense half may not say so."""
    return state._replace(dense=state.dense._replace(step=np.int32(step)))


def _puts_before(tables, step):
    """How many puts host tables have seen beyond one a step; None if they do not say."""
    puts = tables.step if isinstance(tables, HostTables) else None
    return None if puts is None else puts - step


def _regular_of(found):
    """The step up to which a chain counts as saved, which mini-saves do not move."""
    return found[-1].extra.get("cpr", {}).get("regular", found[-1].step)


def _check_shards(spec, shards):
    if not isinstance(shards, Sequence | np.ndarray) or not len(shards):
        raise ValueError(f"shards={shards!r} must be a list of one shard or several.")
    if any(not 0 <= shard < spec.shards for shard in shards) or len(set(shards)) < len(shards):
        raise ValueError(f"shards={list(shards)} must be distinct and lie between 0 and {spec.shards - 1}.")


def _check(spec, save_every_steps, total_steps, mode, scheme, fraction, whole, failures, pick_ahead_steps):
    if not isinstance(spec, EmbeddingSpec) or not isinstance(scheme, Priority | None):
        raise ValueError(
            f"spec={spec!r:.80} must be an EmbeddingSpec, scheme={scheme!r:.80} one of mfu(), ssu(), ... or None."
        )
    if not (isinstance(save_every_steps, int | float) and 0 < save_every_steps < math.inf) or total_steps < 1:
        raise ValueError(f"save_every_steps={save_every_steps} must be above 0, total_steps={total_steps} at least 1.")
    if mode not in ("partial", "full"):
        raise ValueError(f"mode={mode!r} must be 'partial' or 'full'.")
    if scheme and mode == "full":
        raise ValueError(f"full recovery goes back to whole images: scheme={scheme.name!r} must be None.")
    if whole and scheme and not scheme.by_tracker:
        raise ValueError(f"scheme={scheme.name!r} compares all rows: leave whole empty, not {list(whole)}.")
    if not isinstance(pick_ahead_steps, int) or pick_ahead_steps < 0:
        raise ValueError(f"pick_ahead_steps={pick_ahead_steps} must be a whole number from 0.")
    for step, shards in failures.items():
        if not isinstance(step, int | np.integer) or step < 1:
            raise ValueError(f"failures at step {step!r}: steps are whole numbers from 1.")
        _check_shards(spec, shards)
    unknown = sorted(set(whole) - set(spec.tables))
    if unknown:
        raise ValueError(f"whole names unknown tables {unknown}; known: {list(spec.tables)}.")
    budget_rows(1, fraction)
