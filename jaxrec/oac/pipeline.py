"""The pipeline: several batches over host tables in flight, committed in order, with the results of serial execution.

    plan -> send inputs -> admit -> gather -> send rows -> COMMIT -> fetch -> write back        one batch, left to right
    planner  `---------------- loaders ----------------'   caller   fetchers  writers            thread

The planner numbers the rows of each batch and knows their last writers (`ring`). Loaders gather when all but the last W
batches are written (`scheduler`, the only throttle). The caller's thread commits in batch order: replay stale rows,
update, append to the ring. Writers put final rows in batch order, each to its own shards. `stages` defines the work on
a batch, `workers` the threads that do it.

Legend: W window.
"""

import atexit
import collections
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxrec.callbacks import AfterStep, Callback
from jaxrec.embedding import HostedTables
from jaxrec.engine import (
    CHECK_EVERY_STEPS,
    REMEDY,
    Engine,
    add_failures,
    first_failure,
)
from jaxrec.interrupts import raise_deferred, uninterrupted
from jaxrec.oac.guard import GuardedTables, TableProgress
from jaxrec.oac.options import check_options, checked_mesh, with_unguarded_tables
from jaxrec.oac.scheduler import BatchScheduler
from jaxrec.oac.stages import DeviceStep, Stages, fetch_whole
from jaxrec.oac.workers import SnapshotSaver, Workers
from jaxrec.prefetch import Stream, result_or_error
from jaxrec.sharding import BATCH, SPLIT, plan_specs, shardings
from jaxrec.task import Task
from jaxrec.types import ShardsLost, TrainState
from jaxrec.validate import check_same_shapes


class Pipeline(Engine):
    """Trains over `HostTables` or `RemoteTables` with up to W batches in flight.

        with Pipeline(task, task.init(params, "host"), window=8) as pipeline:
            state = pipeline.train(batches)

    Modes: `sync` gathers a batch when the previous one is written; plans and inputs are prefetched. `oac` gives bitwise
    the same results with W batches in flight. `async` repairs nothing and writes with `add`, as Marius (OSDI 2021):
    rows are up to W batches stale. `semisync` has a staleness of exactly one batch and is repeatable, as TorchRec's
    SemiSync: batch t sees rows after batch t - 2, and its changes are added in order. All modes run the same compiled
    update.

    During a run the tables lag the dense state by up to W + 1 batches: `state.tables` can be read only from `drain` to
    the next batch, and raises otherwise. `pipeline.tables` are the tables themselves, unguarded.

    However a run ends, committed rows are written, and every failure is raised, with a note that names its stage and
    batch; after a failure that has lost rows, every call raises `BrokenEngine`. Metrics are those of the update and,
    where rows are repaired, 'stale_rows', whose last writer was not written when the gather began, and 'patched_rows',
    taken from the ring. Callbacks may change the values of the dense state.

    Args:
      task: Task, whose `update` runs in every mode.
      state: TrainState with tables in host memory or at servers; its dense half is donated.
      callbacks: see `Engine`.
      mode: 'sync', 'async', 'semisync' or 'oac'.
      window: W, the number of preceding batches that may be unwritten when a batch is gathered; fixed in sync (0) and
        semisync (1).
      send: (tree of arrays, tree of shardings) -> tree on the device, called in loader threads; None for
        `jax.device_put`.
      fetch: (tree on the device) -> tree of numpy arrays, called in fetcher threads; None to start a copy and wait,
        from a GPU through pinned memory.
      loaders, fetchers, writers: number of threads of each kind; each writer has its own shards.
      ahead: number of batches planned, and their inputs sent, before admission.
      validation: 'planned' finds stale rows on the host, during planning; 'device' compares row numbers and versions on
        the device, as in the abstract of OAC. Both give the same values.
      skip_stale_reads: do not gather and send rows that the ring will patch.
      capacity: initial {stack: U} of the plans, as for `Serial`.

    Memory: see `memory_bytes`.

    Attributes:
      counters: totals of all runs: `batches` fetched, their `rows`, `stale_rows` and `patched_rows`; `bytes_sent` and
        `bytes_fetched`, passed to `send` and `fetch`; `bytes_without_savings`, the sum of both without
        `skip_stale_reads`.
      compilations: number of programs compiled by its runs; grows whenever a capacity grows.
      scheduler: progress of the batches of the run, for inspection.

    Raises:
      ValueError: tables on the device; an unknown mode; a window or number of threads out of range; a task and a
        state that do not fit each other.
    """

    scheduler_type, device_step_type = BatchScheduler, DeviceStep
    _snapshots: SnapshotSaver

    def __init__(
        self, task: Task, state: TrainState, callbacks: Iterable[Callback | AfterStep] = (), *, mode: str = "oac",
        window: int | None = None, send: Callable | None = None, fetch: Callable | None = None,
        loaders: int = 2, fetchers: int = 1, writers: int = 1, ahead: int = 2, validation: str = "planned",
        skip_stale_reads: bool = False, capacity: Mapping[str, int] | None = None,
    ):  # fmt: skip
        super().__init__(callbacks)
        self._interrupted: list[int] = []  # signals deferred while a finalizer left the run
        self._iterating: threading.Thread | None = None  # thread that iterates over the run
        self._left = True
        state = with_unguarded_tables(state)
        options = check_options(
            mode, window, validation, skip_stale_reads,
            loaders=loaders, fetchers=fetchers, writers=writers, ahead=ahead,
        )  # fmt: skip
        self.mode, self.window, self._options = options.mode, options.window, options
        tables, spec = state.tables, state.tables.spec
        mesh = checked_mesh(task, state)
        placement = shardings({"inputs": (plan_specs(spec.stacks), BATCH), "rows": SPLIT}, mesh)
        self._device_step = self.device_step_type(task.checked_update, options, tables.layout, mesh, state.dense)
        transfers = send or jax.device_put, fetch or fetch_whole, placement
        self._stages = Stages(tables, options, self._device_step, *transfers, capacity)
        self.compilations, self._compiled_before = 0, 0
        self._snapshots = SnapshotSaver(self._stages, self._device_step, self._losses)
        self._progress = TableProgress(tables, counted=not options.adds)
        # The tables of yielded states, which refuse to be read while they lag.
        self._guarded_tables: HostedTables | GuardedTables = tables
        self._new_scheduler(0, Stream(iter(())))
        live_pipelines.add(self)

    def _new_scheduler(self, number, stream, lost=()):
        options, semisync = self._options, self.mode == "semisync"
        self.scheduler = self.scheduler_type(self.window, options.ahead, options.writers, number, semisync)
        self.scheduler.mark_lost(lost)
        self._progress.begin(self.scheduler, int(self._device_step.dense.step))
        self._workers = Workers(self.scheduler, self._stages, stream, self._progress)

    @property
    def tables(self) -> HostedTables:
        """The trained tables, unguarded."""
        return self._stages.tables

    @property
    def counters(self) -> collections.Counter:
        """Totals of all runs, see the class docstring."""
        return self._stages.counters

    @property
    def state(self) -> TrainState:
        """See `Engine`; the save of a snapshot may not read it either."""
        if threading.current_thread() in self._workers.threads:
            raise ValueError("pipeline.state was read in the save of a snapshot: use the state passed to it.")
        return super().state

    @property
    def _state(self) -> TrainState:  # type: ignore[override]
        return TrainState(self._device_step.dense, self._guarded_tables)

    @property
    def step(self) -> int:  # type: ignore[override]
        """Number of committed steps."""
        return self._progress.step

    def _over(self, stream):
        at_yield = False
        try:
            self._begin_run(stream)
            # Shards that a callback marked as lost in an earlier run, which a later one then ended.
            self._recover_emulated()
            while (number := self._next_batch_number()) is not None:
                metrics = self._train(number)
                self._losses.check(CHECK_EVERY_STEPS)
                at_yield = True
                yield self._state, metrics
                at_yield = False
            self._losses.check()
            self._leave(recovers=True)
            # The last writes may have met lost shards after the loop above had ended.
            if not self._unraised:
                self._recover_lost()
        except BaseException as error:
            if at_yield and isinstance(error, GeneratorExit):  # the run is left, not a callback's own GeneratorExit
                # Possibly in a finalizer, where Python prints exceptions and drops them.
                self._leave(postpone=self._within > 0)
                if self._unraised and not self._within:  # else `with` or `close` raises it
                    raise first_failure(self._unraised) from None  # kept, so that the next call raises it too
                return
            self._leave(recovers=isinstance(error, ShardsLost))  # ShardsLost itself reports the lost shards
            add_failures(error, self._pop_unraised())
            raise
        self._raise_failures()
        self._snapshots.warn(self.step)

    def _begin_run(self, stream):
        with uninterrupted():
            self._refuse()
            self._left, self._iterating = False, threading.current_thread()
            self._compiled_before = self._device_step.compiled()
            # Batch numbers continue beyond the window of all planned batches, so that no row of an earlier run counts
            # as in flight.
            self._new_scheduler(self.scheduler.planned + self.window + 1, stream, self.scheduler.lost_shards)
            self._progress.begin_run()
            self._workers.start_all()

    def _next_batch_number(self):
        """Return the next batch to commit once it is loaded, recovering lost shards meanwhile; None at the end."""
        if self.scheduler.paused:  # nothing is loaded meanwhile, so waiting would never end
            raise ValueError("`exclusive` is at work: take the next batch when it has returned.")
        while (number := self.scheduler.wait_to_commit()) is None and self._has_lost_shards():
            self._recover_lost()
        return number

    def _train(self, number):
        plans, self._iterating = self._stages.items[number].planned.plans, threading.current_thread()
        try:
            with uninterrupted(reraise=False) as deferred:
                metrics = self._commit(number)
            # A Ctrl-C during the commit is deferred until the callbacks of its step are done; one during them is not.
            try:
                self._after_step(plans, metrics)
                # Before the snapshot, which cannot save rows of lost shards.
                self._recover_lost()
                # After the callbacks, as their changes of the dense state belong to the step.
                self._snapshots.begin(self.step, self._workers)
                # After the snapshot, so that recovery from an emulated failure can use the save of this step.
                self._recover_emulated()
            finally:
                raise_deferred(deferred)
        except Exception as error:
            error.add_note(self._workers.where("commit", number))
            raise
        return metrics

    def _commit(self, number):
        """Commit one batch atomically; the caller defers signals."""
        item, before = self._stages.items[number], self._device_step.dense
        try:
            item.committed, metrics = self._device_step.commit(item, self.scheduler.void_before)
        except BaseException as error:
            if self._device_step.dense is not before:  # the step is done, and its rows are lost
                self.scheduler.mark_committed(number)
                self.scheduler.fail_after_commit(number, error)
            elif self._device_step.dense_is_lost():
                self.scheduler.mark_dense_lost()
                self.scheduler.fail_after_commit(number, error)
            raise
        # Freed before another batch needs the memory.
        item.loaded = item.inputs = None
        self._guarded_tables = GuardedTables(self._progress, self.step + 1)
        # Last: from here on a fetcher may take the rows, and the step counts as committed.
        self.scheduler.mark_committed(number)
        self._losses.note(self.step, metrics)
        return metrics

    def _take_from_callback(self, given, found):
        if found.tables not in (self._guarded_tables, self.tables):
            raise ValueError("a callback returned a state with other tables: change rows in pipeline.exclusive().")
        check_same_shapes(given.dense, found.dense, "a callback returned a dense state of other shapes")
        self._device_step.dense = found.dense

    def drain(self) -> HostedTables:
        """Wait until all committed batches are written; return the tables, which then match `state.dense`.

        For the committing thread, for example in a callback that evaluates. Batches gathered already stay valid. In
        semisync it blocks until the next batch has arrived and been gathered, as that batch must not see the rows of
        the current one.

        Raises:
          BrokenEngine: rows are lost.
          ValueError: another thread is in the middle of a step.
          Any error of the save of a snapshot.
        """
        self._refuse()
        self._check_thread()
        self.scheduler.drain()
        self._progress.refuse_broken()
        self._check_snapshot_saved()
        # After a run all rows are written, and another pipeline may have trained the tables since.
        if not self._left:
            with uninterrupted():
                self._progress.mark_current()
        return self.tables

    def exclusive(self, change: Callable[[HostedTables], HostedTables]) -> None:
        """Change the tables while nothing else reads or writes them; prefetched rows are gathered again.

            pipeline.exclusive(lambda tables: restore_shards(path, tables, [shard])[0])

        For the committing thread, between steps or in a callback; later ones and the yielded state see the changed
        tables. Tables in host memory are changed in place.

        Args:
          change: (tables) -> tables; must return the same object. Called again after recovery if it meets lost shards.

        Raises:
          ValueError: `change` returns other tables; another `exclusive` is active.
          As `drain`, and any error of `change`, whose changes up to the error stay.
        """
        if self.scheduler.paused:
            raise ValueError("`exclusive` cannot be nested: its function has the tables.")
        changed = self._change_exclusively(change)
        if not self.running:  # outside a run, the change is responsible for lost shards
            self.scheduler.mark_recovered(self.scheduler.lost_shards)
        if changed is not self.tables:
            raise ValueError(
                f"the change returned a {type(changed).__name__}: tables in host memory are changed in place, so "
                "return those that it was given."
            )

    def _change_once(self, change):
        self.drain()
        self.scheduler.wait_for_snapshot()  # its save may still be active
        self._check_snapshot_saved()
        try:
            self.scheduler.pause()
            self._progress.refuse_broken()
            return self._try_change(change, self.tables)
        finally:
            with uninterrupted():
                # Before the restart, as loaders may gather at once. The restart voids the ring and the sources of
                # earlier batches; otherwise a later batch would undo the change.
                self._progress.mark_current()
                self.scheduler.restart(self._stages.void)

    def snapshot_at(self, step: int, save: Callable[[TrainState], Any]) -> None:
        """Announce a snapshot: a consistent state after a step, to be saved while training goes on.

        When the step is committed, its dense state is copied; when its rows are written, `save` runs in its own thread,
        with the tables exactly as of that step. Until it returns, later batches are not written, and training goes on
        until the window is full.

        Args and errors are those of `Engine.snapshot_at`; any error of the save of an earlier snapshot is raised too.
        """
        self._check_snapshot_saved()
        super().snapshot_at(step, save)

    def reset(self, state: TrainState) -> None:
        """Continue from another state, such as a restored image, after an error or before the next run.

        Ring entries and last writers of earlier batches become void; announced snapshots, lost rows and lost shards are
        forgotten. The caller rewinds the batches to the step of the state.

        Raises:
          ValueError: a run is active; the state has other shapes, or tables of another spec.
          Failures of the last run that no call has raised yet.
        """
        self._refuse_reset(state)
        self._leave()
        self._raise_failures()
        state = with_unguarded_tables(state)
        check_same_shapes(self._device_step.dense, state.dense, "reset to a dense state of other shapes")
        self._progress.refuse_others(state.tables)
        self._notify_restarted(state)
        before, self._marked_lost = self.step, set()
        self._guarded_tables = self._stages.tables = state.tables
        self._progress = TableProgress(state.tables, self._progress.counted)  # earlier states stay stale
        self._device_step.dense = state.dense
        self._new_scheduler(self.scheduler.planned + self.window + 1, Stream(iter(())))
        self._snapshots.forget(before)  # last, as it may warn

    def _recover_during_change(self, shards):
        self.scheduler.mark_lost(shards)
        within, self._in_callback = self._in_callback, False  # a recovery reads the state
        try:
            self._recover(self.scheduler.lost_shards, begin_snapshot=not within)
        finally:
            self._in_callback = within

    def _recover_lost(self):
        """Have callbacks recover shards that the row storage has lost, until none is lost."""
        while self._has_lost_shards():
            self._recover(self.scheduler.lost_shards)

    def _has_lost_shards(self):
        # A run with another failure raises that one, and the next run begins with the lost shards.
        return (
            bool(self.scheduler.lost_shards) and not self.scheduler.rows_lost and self.scheduler.snapshot_error is None
        )

    def _recover_emulated(self):
        """Have callbacks recover the shards that some have marked as lost."""
        # Cleared first: if the recovery fails, the next step must not lose them once more.
        wanted, self._marked_lost = self._marked_lost, set()
        if wanted:
            self._recover(wanted)

    def _recover(self, shards, begin_snapshot=True):
        callbacks = self._recovering_callbacks(shards)
        # The snapshot of this step precedes the failure, so the recovery must find it saved.
        self.scheduler.wait_for_snapshot()
        # After the wait: a save that meets lost shards marks them first, and records its snapshot as missed later.
        self._snapshots.count_recovery(shards)
        before = self.scheduler.epoch
        try:
            self._run_recovery(callbacks, shards)
        except ShardsLost as lost:  # during the recovery: recover all of them once more
            self.scheduler.mark_lost(lost.shards)
            self._recover({*shards, *lost.shards}, begin_snapshot)
            return
        # None used `exclusive`, so the parked batches still have to be gathered again.
        if self.scheduler.epoch == before:
            self.exclusive(lambda tables: tables)
        # After the restart: until then, gathers in progress may have reported the same loss.
        self.scheduler.mark_recovered(shards)
        if self._left:
            self._save_missed()
        elif begin_snapshot:  # not in a callback: changes of later ones belong to the step
            self._snapshots.begin(self.step, self._workers)

    def _save_missed(self):
        """Save the snapshots missed because of lost shards on this thread, after a run has ended."""
        try:
            self._snapshots.save_missed(self.state)
        except ShardsLost as lost:  # lost again, and no worker is left to mark them
            self.scheduler.mark_lost(lost.shards)

    def _end(self):
        self._refuse_worker()
        iterating = self._iterating
        if not self._left and iterating is not threading.current_thread() and iterating and iterating.is_alive():
            raise ValueError(
                f"close was called in another thread than {iterating.name!r}, which iterates over the run and "
                "would take its stream for ended: leave the loop there."
            )
        self._refuse_within_step()
        generator, self._within = self._generator(), self._within + 1
        try:
            with uninterrupted() as deferred:
                if generator is not None:
                    generator.close()
                if not self._interrupted:
                    self._leave()
                deferred += self._interrupted
                self._interrupted = []
        finally:
            self._within -= 1
        return self._pop_unraised()

    def close_at_exit(self) -> None:
        """Leave a run that is active when the process ends, whichever thread iterates."""
        self._leave()
        self._raise_failures()

    def _leave(self, postpone: bool = False, recovers: bool = False) -> None:
        """End the threads of a run, write committed rows, and keep failures in `_unraised`; idempotent.

        `postpone` leaves signals that arrive meanwhile to `close` or the end of the `with` block. Lost shards are not a
        failure if the caller `recovers` them.
        """
        scheduler, workers = self.scheduler, self._workers
        with uninterrupted() as deferred:
            if self._left:
                return
            if threading.current_thread() in workers.threads:
                scheduler.finish()
                # Garbage collection dropped the run in a thread of the pipeline: the next call waits for the threads.
                return
            # The snapshot of the last step, if its callbacks were interrupted; before the threads learn of the end.
            failed = result_or_error(lambda: self._snapshots.begin(self.step, workers))
            try:
                workers.end(deferred, self.patience_seconds)
            except InterruptedError:
                if not postpone:
                    raise
            else:
                self._end_run(failed, recovers)
            if postpone and deferred:
                self._interrupted = [*deferred]
                deferred.clear()

    def _end_run(self, failed, recovers):
        """Collect the failures, after the threads have ended."""
        scheduler = self.scheduler
        if not scheduler.rows_lost:
            self._progress.mark_current()
            self._guarded_tables = self.tables
        elif isinstance(result_or_error(lambda: jax.block_until_ready(self._device_step.dense)), BaseException):
            scheduler.mark_dense_lost()
        # Other pipelines may use the tables only when all rows are written.
        self._progress.running = False
        self.compilations += self._device_step.compiled() - self._compiled_before
        self._left = True
        unrecovered = ShardsLost(scheduler.lost_shards, REMEDY) if scheduler.lost_shards and not recovers else None
        checked = result_or_error(self._losses.check)
        told = (scheduler.error_after_commit, scheduler.snapshot_error, scheduler.error_before_commit)
        failures = (*told, failed, checked, unrecovered)
        self._unraised += [failure for failure in failures if failure is not None]

    def _refuse(self):
        """Raise if the pipeline cannot be used: lost rows, failures not raised yet, tables in use by another run."""
        self._refuse_worker()
        if not self.running:
            self._leave()
        self._progress.refuse_broken()
        self._raise_failures()
        self._progress.refuse_others(self.tables)

    def _refuse_worker(self):
        if threading.current_thread() in self._workers.threads:
            raise ValueError("a thread of the pipeline cannot wait for it: call this on the thread that iterates.")

    def _check_snapshot_saved(self):
        if not self._left and self.scheduler.snapshot_error is not None:
            raise self.scheduler.snapshot_error

    def _check_thread(self):
        # A step in another thread may donate the dense state that this call would read.
        generator, here = self._generator(), threading.current_thread()
        if generator is not None and generator.gi_running and self._iterating is not here:
            raise ValueError("another thread is in the middle of a step: call this on the thread that iterates.")


live_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()  # of this process


@atexit.register
def _close_all():
    """Write committed rows and raise failures before the interpreter exits, which stops threads at any point."""
    with contextlib.ExitStack() as stack:
        for pipeline in list(live_pipelines):
            stack.callback(pipeline.close_at_exit)


# A forked child has none of a run's threads, and nothing to wait for.
os.register_at_fork(after_in_child=live_pipelines.clear)
