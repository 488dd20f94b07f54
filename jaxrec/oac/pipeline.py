"""The pipeline: batches over host tables in flight in parallel, committed in order, results of one
after the other.

    plan -> send inputs -> admit -> gather -> send rows -> COMMIT -> fetch -> write back        one batch, left to right
    planner  `---------------- loaders ----------------'   caller   fetchers  writers            who does it

The planner numbers the rows of each batch and knows their last writers (`ring`). Loaders gather
when all but the last W batches are written (`scheduler`, the only throttle). The caller's thread
commits in batch order: replay what is stale, update, append to the ring. Writers put final rows
in batch order, each its own shards. `stages` say what is done to a batch, `workers` has the threads
that do it.

Legend: W window.
"""

import atexit
import collections
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax

from jaxrec.bounds import whole_number
from jaxrec.embedding import HostTables
from jaxrec.engine import (
    Cut,
    EngineBase,
    caught,
    checked_shards,
    first,
    note,
    notify_restarted,
)
from jaxrec.interrupts import raise_again, uninterrupted
from jaxrec.oac.options import Threads, check_options, mesh_for, state_itself
from jaxrec.oac.scheduler import BatchScheduler
from jaxrec.oac.stages import DeviceStep, Stages, check_same_shapes, fetch_whole
from jaxrec.oac.view import StaleTables, TableProgress
from jaxrec.oac.workers import CutSaver, Workers
from jaxrec.prefetch import Stream, Streams
from jaxrec.sharding import BATCH, SPLIT, plan_specs, shardings
from jaxrec.step import run_hooks
from jaxrec.types import ShardsLost, TrainState

REMEDY = "bring them back in `exclusive`, or go on from an image with `reset`"


class Pipeline(EngineBase):
    """Trains over `HostTables` or `RemoteTables` with up to W batches in flight.

        with Pipeline(state, update, mode="oac", window=8) as pipeline:
            for state, metrics in pipeline.run(batches):
                ...
        state = pipeline.state

    Modes: `sync` gathers a batch when the one before it is written; only rows wait, plans and
    inputs go ahead. `oac` gives bitwise the same results with W batches in flight. `async` repairs
    nothing and writes with `add`, as Marius (OSDI 2021): rows are up to W batches old. `semisync`
    is exactly one batch stale and repeatable, as TorchRec's SemiSync: batch t sees rows after batch
    t - 2, and its change is added in order. All modes run the same compiled update.

    Between batches the tables lag behind `state.dense` by up to W + 1 batches: `state.tables`
    refuses to be read until `drain`, and from then to the next batch it can be read.
    `pipeline.tables` are the tables themselves, unguarded.

    However a run is left, what is committed is written, and no failure is swallowed: see `close`.
    At a step come the commit, the hooks in their order, the cut, and then failures that are
    emulated; shards that their home has lost come back before the cut.

    Args:
      state: TrainState with tables of host memory or of servers; its dense half is donated.
      update: (dense, rows, plans, batch) -> dense', rows', metrics, as from `make_update`; not
        jitted.
      mode: 'sync', 'async', 'semisync' or 'oac'.
      window: W, how many batches before it may be unwritten when a batch is gathered; fixed in sync
        (0) and semisync (1).
      mesh: from `make_mesh`; that of the state's dense half if None.
      send: (tree of arrays, tree of shardings) -> tree on the device, in a loader's thread;
        `jax.device_put` if None.
      fetch: (tree on the device) -> tree of numpy arrays, in a fetcher's thread; starts a copy and
        waits if None.
      loaders, fetchers, writers: threads of each kind; a writer has its own shards.
      ahead: how many batches are planned, and their inputs sent, before they are admitted.
      validation: 'planned' finds stale rows on the host, where plans are made; 'device' compares
        row numbers and versions on the device, as the abstract says. Same values.
      skip_stale_reads: do not gather and send rows that the ring will patch.
      skip_rewritten: do not fetch and write rows that a batch within the window, planned already,
        will write again. A batch is committed when W more are planned or the stream has ended or
        failed: while a stream blocks, the last W batches taken from it wait.
      capacity: {stack: U} of the plans to begin with, as for `Serial`.

    Memory: see `memory_bytes`.

    Attributes:
      tables: those that are trained, unguarded. state: between two steps. step: committed steps.
      counters: of all runs: `batches` fetched, their `rows`, `stale_rows` and `patched_rows`;
        `bytes_sent` and `bytes_fetched`, all that was handed to `send` and `fetch`;
        `bytes_without_savings`, what that would have been with both savings off.
      compilations: how many programs its runs have compiled: some more whenever a capacity grows.
      scheduler: where the batches of the run are, to look at.

    Raises:
      ValueError: tables on the device; an unknown mode, a window or number of threads out
        of range; state, update and mesh that do not fit each other.
    """

    _name = "pipeline"
    # How long leaving waits before it says what it waits for, and `run` for an iterator in use.
    patience_seconds = 10.0
    scheduler_type, device_step_type = BatchScheduler, DeviceStep
    _cuts: CutSaver

    def __init__(
        self, state: TrainState, update: Callable, *, mode: str = "oac", window: int | None = None,
        mesh: jax.sharding.Mesh | None = None, send: Callable | None = None, fetch: Callable | None = None,
        loaders: int = 2, fetchers: int = 1, writers: int = 1, ahead: int = 2, validation: str = "planned",
        skip_stale_reads: bool = False, skip_rewritten: bool = False, capacity: Mapping[str, int] | None = None,
    ):  # fmt: skip
        super().__init__()
        self._interrupted: list[int] = []  # signals that came while a finalizer left the run
        self._iterating: threading.Thread | None = None  # that takes the batches of the run
        self._left, self._in_hooks = True, False
        self._to_lose: set[int] = set()  # after the cut of this step
        state = state_itself(state)
        options = check_options(mode, window, validation, skip_stale_reads, skip_rewritten)
        self.mode, self.window, self._options = options.mode, options.window, options
        threads = {"loaders": loaders, "fetchers": fetchers, "writers": writers, "ahead": ahead}
        self._threads = Threads(**{name: whole_number(name, count) for name, count in threads.items()})
        self.tables, spec = state.tables, state.tables.spec
        self._mesh = mesh = mesh_for(mesh, state, update)
        placement = shardings({"inputs": (plan_specs(spec.stacks), BATCH), "rows": SPLIT}, mesh)
        self._device_step = self.device_step_type(update, options, self.tables, mesh, state.dense)
        transfers = send or jax.device_put, fetch or fetch_whole, placement
        self._stages = Stages(self.tables, options, self._device_step, mesh.size, *transfers, capacity)
        self.compilations, self._compiled_before = 0, 0
        self._cuts, self._streams = CutSaver(self._stages, self._device_step), Streams()
        self._progress = TableProgress(self.tables, counted=not options.adds and not options.skip_writes)
        # The tables of the state: they refuse while they lag.
        self._view: HostTables | StaleTables = self.tables
        self._new_scheduler(0, Stream(iter(())))
        _pipelines.add(self)

    def _new_scheduler(self, number, stream, lost=()):
        ahead = self._threads.ahead + self._options.lookahead
        self.scheduler = self.scheduler_type(self.window, ahead, self._threads.writers, number, self.mode == "semisync")
        self.scheduler.mark_lost(lost)
        self._progress.begin(self.scheduler, int(self._device_step.dense.step))
        self._workers = Workers(self.scheduler, self._stages, stream, self._threads, self._progress)

    @property
    def counters(self) -> collections.Counter:
        """What has gone through, see above."""
        return self._stages.counters

    @property
    def state(self) -> TrainState:
        """The state after the last step; to be asked for between two steps.

        Raises:
          ValueError: in a hook or in the save of a cut, which have one of their own.
        """
        if self._in_hooks or threading.current_thread() in self._workers.threads:
            raise ValueError(
                "pipeline.state was read in a hook or in the save of a cut: take the state that it was given, as this "
                "one is behind what earlier hooks have made of it, or ahead."
            )
        return self._state()

    def _state(self):
        return TrainState(self._device_step.dense, self._view)

    @property
    def step(self) -> int:  # type: ignore[override]
        """How many steps the state has seen."""
        return self._progress.step

    def run(
        self, batches: Iterable, hooks: Sequence[Callable] = (), check_every_steps: int = 100
    ) -> Generator[tuple[TrainState, dict], None, None]:
        """Trains on all batches.

        Args:
          batches: Batch after Batch, of one size; consumed by the planner's thread, ahead of what
            is committed, and copied. The iterator that the run before has left begins with what was
            taken from it and not trained.
          hooks: (state, step, plans, metrics) -> state, run in batch order by the thread that
            iterates; they may change the values of the dense state.
          check_every_steps: how often the losses are fetched and checked; they are, too, at the end
            of a run.

        Yields:
          (TrainState, metrics) after every batch. The dense half is donated to the next step.
          Metrics are those of the update, and where rows are repaired 'stale_rows', whose last
          writer was not written when the gather began, and 'patched_rows', which were taken from
          the ring.

        Raises:
          BrokenPipeline: rows were lost before.
          FloatingPointError: a loss is not finite; names the step.
          ValueError: a run goes on, of this or of another pipeline over the same tables; a batch
            that does not fit. Whatever else a stage raised; all with a note that names stage and
            batch.
        """
        if self.running:
            raise ValueError("this pipeline is running: close it, or exhaust the iterator of the run before.")
        check_every_steps = whole_number("check_every_steps", check_every_steps)
        once = tuple(hooks)
        self._refuse()
        return self._hold(self._iterate(self._streams.of(batches, self.patience_seconds), once, check_every_steps))

    def _iterate(self, stream, hooks, check_every_steps):
        try:
            self._begin_run(stream)
            # What a hook has lost in a run that a hook after it has ended.
            self._recover_emulated()
            while (number := self._next_number()) is not None:
                metrics = self._train(number, hooks)
                self._device_step.losses.check(check_every_steps)
                yield self._state(), metrics
            self._device_step.losses.check()
            self._leave(recovers=True)
            # The last rows may have met lost shards on their way back, when no thread was left to
            # gather anew.
            if not self._untold:
                self._recover_lost()
        except GeneratorExit:  # perhaps from a finalizer, where Python prints what is raised, and drops it
            self._leave(postpone=self._within > 0)
            if self._untold and not self._within:  # else `with` or `close` will tell
                raise first(self._untold) from None  # and it stays untold for the next call
            return
        except BaseException as error:
            self._leave(recovers=isinstance(error, ShardsLost))  # which has told of them
            note(error, self._take_untold())
            raise
        if failures := self._take_untold():
            raise first(failures)
        self._cuts.warn(self.step)

    def _begin_run(self, stream):
        with uninterrupted():
            self._refuse()
            self._left, self._iterating = False, threading.current_thread()
            self._compiled_before = self._device_step.compiled()
            # Numbers go on after everything planned before, so that no row of an earlier run
            # counts as in flight.
            self._new_scheduler(self.scheduler.planned + self.window + 1, stream, self.scheduler.lost_shards)
            self._progress.begin_run()
            self._workers.start_all()

    def _next_number(self):
        """The batch to commit, when it is loaded and its shards are there; None at the end."""
        lookahead = self._stages.options.lookahead
        while (number := self.scheduler.wait_to_commit(lookahead)) is None and self._some_to_recover():
            self._recover_lost()
        return number

    def _train(self, number, hooks):
        if self.scheduler.paused:
            raise ValueError("`exclusive` is at work: take the next batch when it has returned.")
        plans, self._iterating = self._stages.items[number].planned.plans, threading.current_thread()
        try:
            with uninterrupted(again=False) as asked:
                metrics = self._commit(number)
            # A Ctrl-C in the commit waits for the hooks of its step, in which another one is not
            # put off.
            try:
                self._run_hooks(hooks, plans, metrics)
                # Before the cut, which could not save rows that are really gone.
                self._recover_lost()
                # After the hooks: what they made of the dense state belongs to the step.
                self._cuts.begin(self.step, self._workers)
                # After the cut: an emulated failure finds what was saved at its step.
                self._recover_emulated()
            finally:
                raise_again(asked)
        except Exception as error:
            error.add_note(self._workers.where("commit", number))
            raise
        return metrics

    def _commit(self, number):
        """The step of one batch, whole or not at all: the caller puts signals off."""
        item, before = self._stages.items[number], self._device_step.dense
        try:
            item.committed, metrics = self._device_step.commit(item, self.scheduler.floor)
        except BaseException as error:
            if self._device_step.dense is not before:  # the step is done, and its rows are gone
                self.scheduler.mark_committed(number)
                self.scheduler.fail_after_commit(number, error)
            elif self._device_step.dense_is_lost():
                self.scheduler.mark_dense_lost()
                self.scheduler.fail_after_commit(number, error)
            raise
        # Dropped before another batch may take their place in memory.
        item.loaded = item.inputs = None
        self._view = StaleTables(self._progress, self.step + 1)
        # Last: from here on a fetcher may have the rows, and the step counts.
        self.scheduler.mark_committed(number)
        self._device_step.losses.note(self.step, metrics)
        return metrics

    def _run_hooks(self, hooks, plans, metrics):
        self._in_hooks = True
        try:
            for hook in hooks:
                before = self._state()
                state = run_hooks([hook], before, self.step, plans, metrics)
                if not isinstance(state, TrainState) or state.tables not in (self._view, self.tables):
                    raise ValueError("a hook returned a state with other tables: change rows in pipeline.exclusive().")
                check_same_shapes(before.dense, state.dense, "a hook returned a dense state of other shapes")
                # After each: the next one may raise, and an earlier state may be donated by then.
                self._device_step.dense = state.dense
        finally:
            self._in_hooks = False

    def drain(self) -> HostTables:
        """Waits until all committed batches are written, and returns the tables, now those of
        `state.dense`.

        Call it on the committing thread, for example in a hook that evaluates. Batches gathered
        already stay valid. In semisync it waits until the next batch has come and was gathered, as
        that one must not see the rows of this one.

        Raises:
          BrokenPipeline: rows are lost.
          ValueError: another thread is in the middle of a step.
          Whatever the save of a cut has raised.
        """
        self._refuse()
        self._refuse_elsewhere()
        self.scheduler.drain()
        self._progress.refuse_broken()
        self._refuse_unsaved()
        if self._stages.options.skip_writes:
            self.scheduler.wait_for_cut()  # which writes the same rest
            self._refuse_unsaved()
        with uninterrupted():
            # Else it was written, and others may have trained over the tables since.
            if not self._left:
                self._stages.write_rest(self._device_step.whole_ring(), self.scheduler)
                self._progress.mark_current()
        return self.tables

    def exclusive(self, change: Callable[[HostTables], HostTables]) -> None:
        """Changes the tables while nothing else reads or writes them: what was gathered ahead is
        gathered anew.

            pipeline.exclusive(lambda tables: restore_shard(path, tables, shard)[0])

        For the committing thread, between steps or in a hook; the state that later hooks get and
        that is yielded has the tables as they are then. Tables in host memory are changed in place.

        Args:
          change: (tables) -> tables, those that hold from then on; here the same ones. It is called again if it meets
            lost shards, when watchers have brought them back.

        Raises:
          ValueError: `change` returns other tables; one is at work already.
          ShardsLost: shards were lost, and no watcher can recover them.
          As `drain`, and whatever `change` raises: what was changed until then stays.
        """
        if self.scheduler.paused:
            raise ValueError("`exclusive` within `exclusive`: the tables are yours already.")
        changed = self._changed_when_whole(change)
        if not self.running:  # a change outside of a run answers for their shards
            self.scheduler.mark_recovered(self.scheduler.lost_shards)
        if changed is not self.tables:
            raise ValueError(
                f"the change returned a {type(changed).__name__}: tables in host memory are changed in place, so "
                "return those that it was given."
            )

    def _changed(self, change):
        self.drain()
        self.scheduler.wait_for_cut()  # it may still be saving
        self._refuse_unsaved()
        try:
            self.scheduler.pause()
            self._progress.refuse_broken()
            return self._or_lost(change, self.tables)
        finally:
            with uninterrupted():
                # Before the restart: a loader that gathers anew may look at the tables at once. What the ring
                # and the last writers say of earlier batches is forgotten, or a later batch would
                # undo the change.
                self._progress.mark_current()
                self.scheduler.restart(self._stages.void)

    def cut(self, step: int, save: Callable[[TrainState], Any], unreached: Literal["warn", "ignore"] = "warn") -> None:
        """Announces a consistent state after a step, to be saved while training goes on.

        When the step is committed its dense state is copied; when its rows are written, `save` runs
        in a thread of its own, with tables that stand exactly after that step. Until it returns,
        later batches are not written, and compute goes on until the window is full.

        Args:
          step: a step that is not committed yet.
          save: (TrainState) -> anything, for example `Checkpointer.save`.
          unreached: whether leaving a run warns that the step was not reached; it stays announced
            for the next run.

        Raises:
          ValueError: the step lies behind, or has a cut already.
          BrokenPipeline: rows are lost.
          Whatever the save of an earlier cut has raised.
        """
        self._refuse()
        self._refuse_unsaved()
        self._cuts.announce(step, self.step, Cut(save, unreached))

    def reset(self, state: TrainState) -> None:
        """Goes on from another state: an image that was restored, after an error or before the next
        run.

        What the ring and the last writers say of earlier batches is void. Cuts that are announced
        are forgotten, as are rows and shards that were lost. The data go back with the state: that
        is the caller's part.

        Args:
          state: TrainState of the same shapes; its step is that of the pipeline from then on.

        Raises:
          ValueError: within a run; a state of other shapes, or over tables of another spec.
          Whatever leaving a run has found and no call has raised yet.
        """
        if self.running:
            raise ValueError("reset within a run: leave the loop, or close the pipeline, first.")
        self._leave()
        if failures := self._take_untold():
            raise first(failures)
        state = state_itself(state)
        if state.tables.spec.digest != self.tables.spec.digest:
            raise ValueError("reset to tables of another spec: make a new Pipeline for them.")
        check_same_shapes(self._device_step.dense, state.dense, "reset to a dense state of other shapes")
        mesh_for(self._mesh, state, self._device_step.update)
        self._progress.refuse_others(state.tables)
        notify_restarted(self._watchers, state)
        before, self._to_lose = self.step, set()
        self.tables = self._view = self._stages.tables = state.tables
        self._progress = TableProgress(state.tables, self._progress.counted)  # states of before stay stale
        self._device_step.dense = state.dense
        self._new_scheduler(self.scheduler.planned + self.window + 1, Stream(iter(())))
        self._cuts.forget(before)  # last, as it may warn

    def lose(self, shards: Iterable[int]) -> None:
        """Has lost shards brought back after the cut of this step, by `recover(shards)` of all
        watchers that have it.

        For a hook that emulates a failure. A home whose shards are really lost says so by
        `ShardsLost`, and the same happens at the step that is committed when it is noticed: what
        was to be written to them by then is lost with them, what was gathered ahead is gathered
        anew. A cut that meets them is saved when they are back.

        Args:
          shards: their numbers.

        Raises:
          ValueError: there is no such shard; nothing runs.
          ShardsLost: by `run`, if no watcher recovers, or shards are lost again and again.
        """
        wanted = checked_shards(self.tables.spec, shards, self.running)
        self._to_lose |= wanted

    def _recover_met(self, shards):
        self.scheduler.mark_lost(shards)
        in_hooks, self._in_hooks = self._in_hooks, False  # what recovers asks for the state
        try:
            self._recover(self.scheduler.lost_shards, begin_cut=not in_hooks)
        finally:
            self._in_hooks = in_hooks

    def _recover_lost(self):
        """Has watchers bring back what homes have lost, until nothing is."""
        while self._some_to_recover():
            self._recover(self.scheduler.lost_shards)

    def _some_to_recover(self):
        # A run that has failed otherwise tells of that, and the next one begins with what is lost.
        return bool(self.scheduler.lost_shards) and not self.scheduler.rows_lost and self.scheduler.cut_error is None

    def _recover_emulated(self):
        """Has watchers bring back what hooks want lost."""
        # Taken off first: if bringing them back fails, the next step must not lose them once more.
        wanted, self._to_lose = self._to_lose, set()
        if wanted:
            self._recover(wanted)

    def _recover(self, shards, begin_cut=True):
        watchers = self._who_recovers(self.step, shards, REMEDY, f"; now {REMEDY}")
        # The cut of this step belongs before the failure: the recovery finds it saved.
        self.scheduler.wait_for_cut()
        # After the wait: a save tells of the loss before it says that it was missed.
        self._cuts.count_recovery(shards, REMEDY)
        before = self.scheduler.epoch
        try:
            self._bring_back(watchers, shards)
        except ShardsLost as lost:  # while they came back: all come back once more
            self.scheduler.mark_lost(lost.shards)
            self._recover({*shards, *lost.shards}, begin_cut)
            return
        # No watcher was alone with the tables: what was parked has to be gathered anew.
        if self.scheduler.epoch == before:
            self.exclusive(lambda tables: tables)
        # After the restart: until then, loaders that were gathering have told of the same loss.
        self.scheduler.mark_recovered(shards)
        if self._left:
            self._save_missed()
        elif begin_cut:  # in a hook others are still to come, whose changes belong to the step
            self._cuts.begin(self.step, self._workers)

    def _save_missed(self):
        """Saves, on this thread, what lost shards have kept from being saved, when a run has ended."""
        try:
            self._cuts.save_missed(self.state)
        except ShardsLost as lost:  # again: no worker is left to tell of them
            self.scheduler.mark_lost(lost.shards)

    def close(self) -> None:
        """Ends a run: what is committed is written, what is not comes first when the same iterator
        is given to `run`.

        Raises:
          ValueError: in a hook, which leaves a run by an exception; in the save of a cut.
          Whatever a stage raised, unless it was raised before.
        """
        super().close()

    def _end(self):
        self._refuse_worker()
        iterating = self._iterating
        if not self._left and iterating is not threading.current_thread() and iterating and iterating.is_alive():
            raise ValueError(
                f"close was called in another thread than {iterating.name!r}, which iterates over the run and "
                "would take its stream for ended: leave the loop there."
            )
        generator, self._within = self._generator(), self._within + 1
        try:
            with uninterrupted() as asked:
                if generator is not None:
                    generator.close()
                if not self._interrupted:
                    self._leave()
                asked += self._interrupted
                self._interrupted = []
        finally:
            self._within -= 1
        return self._take_untold()

    def leave_at_exit(self) -> None:
        """Leaves a run that the end of the process has come upon, whichever thread iterates."""
        self._leave()
        if failures := self._take_untold():
            raise first(failures)

    def _leave(self, postpone: bool = False, recovers: bool = False) -> None:
        """Ends the threads of a run, writes what is committed, and keeps what went wrong. Once more
        is no harm.

        Args:
          postpone: whether a signal that comes meanwhile is raised by `close` or by the end of the
            `with` block.
          recovers: whether the caller brings lost shards back, so that they are no failure.
        """
        scheduler, workers = self.scheduler, self._workers
        with uninterrupted() as asked:
            if self._left:
                return
            if threading.current_thread() in workers.threads:
                scheduler.finish()
                # The collector has dropped the run in here: the next call waits for the threads.
                return
            # Before the threads are told that no more will come: of the last step, if its hooks
            # were interrupted.
            failed = caught(lambda: self._cuts.begin(self.step, workers))
            try:
                workers.end(asked, self.patience_seconds)
            except InterruptedError:
                if not postpone:
                    raise
            else:
                self._end_run(failed, recovers)
            if postpone and asked:
                self._interrupted = [*asked]
                asked.clear()

    def _end_run(self, failed, recovers):
        """What is left to do when the threads have ended."""
        scheduler = self.scheduler
        if not scheduler.rows_lost:
            # After the threads, so that nothing older comes after it.
            self._write_rest()
        elif isinstance(caught(lambda: jax.block_until_ready(self._device_step.dense)), BaseException):
            scheduler.mark_dense_lost()
        # The tables are free for others only when all is written.
        self._progress.running = False
        self.compilations += self._device_step.compiled() - self._compiled_before
        self._left = True
        unrecovered = ShardsLost(scheduler.lost_shards, REMEDY) if scheduler.lost_shards and not recovers else None
        checked = caught(self._device_step.losses.check)
        told = (scheduler.error_after_commit, scheduler.cut_error, scheduler.error_before_commit)
        failures = (*told, failed, checked, unrecovered)
        self._untold += [failure for failure in failures if failure is not None]

    def _write_rest(self):
        try:
            self._stages.write_rest(self._device_step.whole_ring(), self.scheduler)
        except Exception as error:
            error.add_note("in the last write of a run of the pipeline")
            self.scheduler.fail_after_commit(self.scheduler.committed, error)
        else:
            self._progress.mark_current()
            self._view = self.tables

    def _refuse(self):
        """Raises what speaks against any use: rows that were lost, failures that no call has
        raised yet, tables in other hands."""
        self._refuse_worker()
        if not self.running:
            self._leave()
        self._progress.refuse_broken()
        if failures := self._take_untold():
            raise first(failures)
        self._progress.refuse_others(self.tables)

    def _refuse_worker(self):
        if threading.current_thread() in self._workers.threads:
            raise ValueError("a thread of the pipeline cannot wait for it: call this on the thread that iterates.")

    def _refuse_unsaved(self):
        if not self._left and self.scheduler.cut_error is not None:
            raise self.scheduler.cut_error

    def _refuse_elsewhere(self):
        # A step in another thread may donate the dense state that this call would look at.
        generator, here = self._generator(), threading.current_thread()
        if generator is not None and generator.gi_running and self._iterating is not here:
            raise ValueError("another thread is in the middle of a step: call this on the thread that iterates.")


_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@atexit.register
def _leave_all():
    """Python's end stops threads in the middle: what is committed is written first, and what went wrong is raised."""
    with contextlib.ExitStack() as stack:
        for pipeline in list(_pipelines):
            stack.callback(pipeline.leave_at_exit)


# The threads of a run are not in a fork: it has nothing to wait for.
os.register_at_fork(after_in_child=_pipelines.clear)
