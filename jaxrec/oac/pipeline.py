"""The pipeline: several batches over host tables in flight, committed in order, with the results of serial execution.

    plan -> send inputs -> admit -> gather -> send rows -> COMMIT -> fetch -> write back        one batch, left to right
    planner  `---------------- loaders ----------------'   caller   fetchers  writer             thread

The planner numbers the rows of each batch. Loaders gather when all but the last W
batches are written. The caller's thread commits in batch order: replay stale rows, update, append to the ring. The
writer puts final rows in batch order. `stages` defines the work on a batch, and holds what is trained; `flight` has the
threads of one run, and decides when they may go on; `guard` keeps lagging tables from being read.

Legend: W window.
"""

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp

from jaxrec.callbacks import AfterStep, Callback, RolledBack
from jaxrec.embedding import HostedTables
from jaxrec.embedding.host import in_copier
from jaxrec.engine import CHECK_EVERY_STEPS, REMEDY, Engine, RecoveryCounter, add_failures, first_failure
from jaxrec.interrupts import raise_deferred, uninterrupted
from jaxrec.oac.flight import Flight
from jaxrec.oac.guard import GuardedTables, TableProgress
from jaxrec.oac.options import check_options, checked_mesh, with_unguarded_tables
from jaxrec.oac.stages import Stages
from jaxrec.prefetch import Stream, result_or_error
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
    the next batch, and raises otherwise. `pipeline.tables` are the tables themselves, unguarded. A snapshot is saved
    in its own thread, with the tables exactly as of its step: meanwhile later batches are not written, and training
    goes on until the window is full. If the save fails, no further batch is committed, and its error ends the run.

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
        semisync (1). In oac the devices hold the rows of W batches, and 8 bytes for each row of the tables.
      send: (tree of arrays, tree of shardings) -> tree on the device, called in loader threads; None for
        `jax.device_put`.
      fetch: (tree on the device) -> tree of numpy arrays, called in fetcher threads; None to start a copy and wait,
        from a GPU through pinned memory.
      loaders, fetchers: number of threads of each kind.
      ahead: number of batches planned, and their inputs sent, before admission.
      capacity: initial {stack: U} of the plans, as for `Serial`.

    Attributes:
      counters: totals of all runs: `batches` fetched, their `rows`, `stale_rows` and `patched_rows`; `bytes_sent` and
        `bytes_fetched`, passed to `send` and `fetch`.
      compilations: number of programs compiled by its runs; grows whenever a capacity grows.
      flight: the batches of the run in flight, for inspection.

    Raises:
      ValueError: tables on the device; an unknown mode; a window or number of threads out of range; a task and a
        state that do not fit each other.
    """

    flight_type, stages_type = Flight, Stages

    def __init__(
        self, task: Task, state: TrainState, callbacks: Iterable[Callback | AfterStep] = (), *, mode: str = "oac",
        window: int | None = None, send: Callable | None = None, fetch: Callable | None = None,
        loaders: int = 2, fetchers: int = 1, ahead: int = 2, capacity: Mapping[str, int] | None = None,
    ):  # fmt: skip
        super().__init__(callbacks)
        state = with_unguarded_tables(state)
        options = check_options(mode, window, loaders=loaders, fetchers=fetchers, ahead=ahead)
        self.mode, self.window = options.mode, options.window
        mesh = checked_mesh(task, state)
        self._stages = self.stages_type(task, state, mesh, options, send, fetch, capacity)
        self.counters, self.compilations = self._stages.counters, 0
        self._begin_at(state, 0)
        self._save_tries = RecoveryCounter()
        self._left, self._iterating = True, threading.current_thread()  # the thread that iterates over the run
        self._postponed: list[int] = []  # signals that arrived while a finalizer left the run
        live_pipelines.add(self)

    def _begin_at(self, state, first):
        """Go on from a state whose halves match; `first` is the number of the next batch."""
        self._stages.dense, self._stages.tables = state
        self.flight = self.flight_type(self._stages, Stream(iter(())), first)
        self._progress = TableProgress(state.tables, self.flight, int(state.dense.step))
        # The tables of yielded states, which refuse to be read while they lag.
        self._guarded_tables: HostedTables | GuardedTables = state.tables

    @property
    def tables(self) -> HostedTables:
        """The trained tables, unguarded."""
        return self._stages.tables

    @property
    def _state(self) -> TrainState:  # type: ignore[override]
        return TrainState(self._stages.dense, self._guarded_tables)

    @property
    def step(self) -> int:  # type: ignore[override]
        """Number of committed steps."""
        return self._progress.step

    # ---- a run

    def _over(self, stream):
        at_yield = False
        try:
            self._begin_run(stream)
            # Shards that a callback marked as lost in an earlier run, which a later one then ended.
            self._recover_marked()
            while (item := self._next_item()) is not None:
                metrics = self._train(item)
                del item
                self._losses.check(CHECK_EVERY_STEPS)
                at_yield = True
                yield self._state, metrics
                at_yield = False
            self._losses.check()
            self._leave(over=True)
        except BaseException as error:
            if at_yield and isinstance(error, GeneratorExit):  # the run is left, not a callback's own GeneratorExit
                self._leave_at_yield()
                return
            self._leave(error)
            failures = self._pop_unraised()
            # `run` goes back, which undoes all but a save that has failed, and drops the error with its notes.
            if isinstance(error, RolledBack) and (failed := self.flight.snapshot_error) is not None:
                raise failed from error
            add_failures(error, failures)
            raise
        self._raise_failures()
        self._snapshots.warn(self.step)

    def _begin_run(self, stream):
        with uninterrupted():
            self._refuse()
            self._left, self._iterating = False, threading.current_thread()
            self._compiled_before = self._stages.compiled()
            # Batch numbers go on, so that what was planned before and not trained is void.
            left = self.flight
            self.flight = self.flight_type(self._stages, stream, left.planned, left.lost_shards)
            self._progress.flight = self.flight
            self._progress.mark_current()
            self._progress.begin_run()
            self.flight.start(self._progress)

    def _next_item(self):
        """Return the next batch to commit once it is loaded, recovering lost shards meanwhile; None at the end."""
        flight = self.flight
        if flight.paused:  # nothing is loaded meanwhile, so waiting would never end
            raise ValueError("`exclusive` is at work: take the next batch when it has returned.")
        while (item := flight.wait_to_commit()) is None and not flight.failed():
            # At the end: the last writes, and the save of a snapshot, may meet lost shards.
            flight.drain()
            flight.wait_for_snapshot()
            if not self._has_lost_shards():
                break
            self._recover_lost()
            self._begin_snapshots()  # those that met the loss
        return item

    def _train(self, item):
        plans, self._iterating = item.plans, threading.current_thread()
        try:
            with uninterrupted(reraise=False) as deferred:
                metrics = self._commit(item)
            # A Ctrl-C during the commit is deferred until the callbacks of its step are done; one during them is not.
            try:
                self._after_step(plans, metrics)
            finally:
                raise_deferred(deferred)
            # Before the snapshot, which cannot save rows of lost shards.
            self._recover_lost()
            # After the callbacks, as their changes of the dense state belong to the step.
            self._begin_snapshots()
            # After the snapshot, so that recovery from an emulated failure can use the save of this step.
            self._recover_marked()
        except Exception as error:
            error.add_note(self.flight.where("commit", item.number - self.flight.first))
            raise
        return metrics

    def _commit(self, item):
        """Commit one batch atomically; the caller defers signals."""
        before = self._stages.dense
        try:
            metrics = self._stages.commit(item)
        except BaseException as error:
            done = self._stages.dense is not before  # then the rows of the step are lost
            if not done and isinstance(error, (TypeError, ValueError)):
                item.batch = None  # a refused batch is not returned to the stream
            if done or self._stages.dense_is_lost():
                self.flight.lose_rows(item.number, error)
            if done:
                self._progress.step += 1
                self.flight.mark_committed()
            raise
        self._progress.step += 1
        self._guarded_tables = GuardedTables(self._progress, self.step)
        self._losses.note(self.step, metrics)
        # Last: from here on a fetcher may take the rows.
        self.flight.mark_committed()
        return metrics

    def _take_from_callback(self, given, found):
        if found.tables not in (self._guarded_tables, self.tables):
            raise ValueError("a callback returned a state with other tables: change rows in pipeline.exclusive().")
        check_same_shapes(given.dense, found.dense, "a callback returned a dense state of other shapes")
        self._stages.dense = found.dense

    # ---- between two steps

    def drain(self) -> HostedTables:
        """Wait until all committed batches are written; return the tables, which then match `state.dense`.

        For the committing thread, for example in a callback that evaluates. Batches gathered already stay valid. In
        semisync it blocks until the next batch has arrived and been gathered, as that batch must not see the rows of
        the current one.

        Raises:
          BrokenEngine: rows are lost.
          ValueError: another thread iterates over the run.
        """
        self._refuse_elsewhere()
        self._refuse()
        self.flight.drain()
        self._progress.refuse_broken()
        # After a run all rows are written, and another pipeline may have trained the tables since.
        if not self._left:
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
        if self.flight.paused:
            raise ValueError("`exclusive` cannot be nested: its function has the tables.")
        changed = self._change_exclusively(change)
        if not (self.running or self._looking):  # outside a run, the change is responsible for lost shards
            self.flight.mark_recovered(self.flight.lost_shards)
        if changed is not self.tables:
            raise ValueError(
                f"the change returned a {type(changed).__name__}: tables in host memory are changed in place, so "
                "return those that it was given."
            )

    def _change_once(self, change):
        with self._at_rest(changes=not self._looking):
            return self._try_change(change, self.tables)

    @contextlib.contextmanager
    def _at_rest(self, changes):
        """Let nothing else use the tables in this block; after changes, prefetched rows are gathered again."""
        self.drain()
        self.flight.wait_for_snapshot()  # its save may still be active
        try:
            self.flight.pause()
            self._progress.refuse_broken()
            yield
        finally:
            with uninterrupted():
                self._progress.mark_current()  # before anything is gathered again
                if changes:
                    self.flight.restart()  # it voids the ring; otherwise a later batch would undo the changes
                else:
                    self.flight.resume()

    def _begin_snapshots(self, wait=None):
        """Begin to save the snapshots of the step just committed, and those that lost shards have delayed.

        Each waits for the one before it. If a loss is not finite they are dropped, as such a state must not take the
        place of a good image.
        """
        while snapshot := self._snapshots.due(self.step):
            # If Ctrl-C ends the wait for the previous snapshot, this one stays pending.
            (wait or self.flight.wait_for_snapshot)()
            if self.flight.lost_shards:  # possibly met by the save that was awaited, which then comes first
                return
            self._drop_unless_finite(self._stages.dense)
            with uninterrupted():
                # A copy, as the next step donates the dense state.
                dense = jax.tree.map(jnp.copy, self._stages.dense)
                self.flight.save(snapshot, dense, self._snapshots)
                self._snapshots.mark_taken(snapshot)

    def reset(self, state: TrainState) -> None:
        """Continue from another state, such as a restored image, after an error or before the next run.

        Ring entries of earlier batches become void; announced snapshots, lost rows and lost shards are
        forgotten. The caller rewinds the batches to the step of the state.

        Raises:
          ValueError: a run is active; the state has other shapes, or tables of another spec.
          Failures of the last run that no call has raised yet.
        """
        self._refuse_reset(state)
        self._leave()
        self._raise_failures()
        state = with_unguarded_tables(state)
        check_same_shapes(self._stages.dense, state.dense, "reset to a dense state of other shapes")
        self._progress.refuse_others(state.tables)
        self._notify_restarted(state)
        before, self._marked_lost = self.step, set()
        self._begin_at(state, self.flight.planned)  # with a new progress: earlier states stay stale
        self._snapshots.forget(before)  # last, as it may warn

    # ---- lost shards

    def _recover_during_change(self, shards):
        self.flight.mark_lost(shards)
        self._recover(self.flight.lost_shards)

    def _recover_lost(self):
        """Have callbacks recover shards that the row storage has lost, until none is lost."""
        while self._has_lost_shards():
            self._recover(self.flight.lost_shards)

    def _has_lost_shards(self):
        # A run with another failure raises that one, and the next run begins with the lost shards.
        return bool(self.flight.lost_shards) and not self.flight.failed()

    def _recover_marked(self):
        """Have callbacks recover the shards that some have marked as lost."""
        # Cleared first: if the recovery fails, the next step must not lose them once more.
        wanted, self._marked_lost = self._marked_lost, set()
        if wanted:
            self._recover(wanted)

    def _recover(self, shards):
        callbacks = self._recovering_callbacks(shards)
        # The snapshot of this step precedes the failure, so the recovery must find it saved.
        self.flight.wait_for_snapshot()
        # Training may go on while a save is tried again, so that a limit of recoveries per step is never reached.
        if late := self._snapshots.due(self.step):
            self._save_tries.count(f"the snapshot of step {late.step}", shards)
        try:
            self._run_recovery(callbacks, shards)
        except ShardsLost as lost:  # during the recovery: recover all of them once more
            self.flight.mark_lost(lost.shards)
            self._recover({*shards, *lost.shards})
            return
        # The batches whose gathers met the loss are gathered again, even if no callback has used `exclusive`.
        with self._at_rest(changes=True):
            pass
        # After the restart: until then, gathers in progress may have reported the same loss.
        self.flight.mark_recovered(shards)

    # ---- the end of a run

    def _end(self):
        self._refuse_elsewhere()
        self._refuse_within_step()
        generator, self._within = self._generator(), self._within + 1
        try:
            with uninterrupted() as deferred:
                if generator is not None:
                    generator.close()
                if not self._postponed:
                    self._leave()
                deferred += self._postponed
                self._postponed = []
        finally:
            self._within -= 1
        return self._pop_unraised()

    def close_at_exit(self) -> None:
        """Leave a run that is active when the process ends, whichever thread iterates."""
        self._leave()
        self._raise_failures()

    def _leave_at_yield(self):
        """Leave the run, possibly in a finalizer, where Python prints exceptions and drops them."""
        with uninterrupted(reraise=False) as deferred, contextlib.suppress(InterruptedError):
            self._leave()
        if self._within:  # `close` or the end of the `with` block raises all
            self._postponed = deferred
            return
        raise_deferred(deferred)
        if self._unraised:
            raise first_failure(self._unraised) from None  # kept, so that the next call raises it too

    def _leave(self, told: BaseException | None = None, over: bool = False) -> None:
        """End the threads of the run, if any, write committed rows, and keep failures in `_unraised`.

        `told` is the error that ends the run: if it is ShardsLost, it reports the lost shards. `over` as for
        `Flight.end`.
        """
        flight = self.flight
        if threading.current_thread() in flight.threads or in_copier():
            # Garbage collection dropped the run in a thread that it waits for: the next call waits for the threads.
            flight.stop()
            return
        with uninterrupted() as deferred:
            if self._left:
                return
            flight.stop()  # first: if this is interrupted, its threads end nevertheless
            # The snapshots of the last step, if its callbacks were interrupted.
            wait = lambda: flight.wait_for_last_snapshot(deferred, self.patience_seconds)
            if isinstance(failed := result_or_error(lambda: self._begin_snapshots(wait)), InterruptedError):
                raise failed
            failures = [*flight.end(deferred, self.patience_seconds, over), failed]
            if flight.error is None:
                self._progress.mark_current()
                self._guarded_tables = self.tables
            # Other pipelines may use the tables only when all rows are written; then the ring is void.
            self._progress.running, self._stages.ring = False, None
            self.compilations += self._stages.compiled() - self._compiled_before
            self._left = True
            failures.append(result_or_error(self._losses.check))
            if flight.lost_shards and not isinstance(told, ShardsLost):
                failures.append(ShardsLost(flight.lost_shards, REMEDY))
            self._unraised += [failure for failure in failures if failure is not None]

    # ---- refusals

    def _refuse(self):
        """Raise if the pipeline cannot be used: lost rows, failures not raised yet, tables in use by another run."""
        if not self.running:
            self._leave()
        self._progress.refuse_broken()
        self._raise_failures()
        self._progress.refuse_others(self.tables)

    def _break(self, error: BaseException) -> None:
        self.flight.lose_rows(self.step, error)

    def _refuse_elsewhere(self):
        """Raise on another thread than the one that iterates, whose step may donate the dense state at any time."""
        there = self._iterating
        if not self._left and there is not threading.current_thread() and there.is_alive():
            raise ValueError(f"another thread, {there.name!r}, iterates over the run: call this there.")


live_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()  # of this process


@atexit.register
def _close_all():
    """Write committed rows and raise failures before the interpreter exits, which stops threads at any point."""
    with contextlib.ExitStack() as stack:
        for pipeline in list(live_pipelines):
            stack.callback(pipeline.close_at_exit)


# A forked child has none of a run's threads, and nothing to wait for.
os.register_at_fork(after_in_child=live_pipelines.clear)
