"""Engines, which train a state over a stream of batches: the base class and the serial engine.

`Engine` is the interface that techniques use, with what all engines share: one run at a time, the `with` block and its
callbacks. `SnapshotSchedule` holds the snapshots, the steps at which a state will be saved. `Serial` runs batches one
after the other; `jaxrec.oac.Pipeline` overlaps several, with bitwise the same results.

Legend: B batch, U padded unique rows per shard.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import jax
import numpy as np

from jaxrec.callbacks import AfterStep, Callback, CallbackList, RolledBack, StepInfo
from jaxrec.embedding import Tables
from jaxrec.embedding.tables import check_shard
from jaxrec.interrupts import raise_deferred, uninterrupted
from jaxrec.prefetch import PlanPrefetcher, Stream, on_one_gpu
from jaxrec.sharding import mesh_of
from jaxrec.table_use import BrokenEngine, TableUse
from jaxrec.types import Batch, DenseState, Plan, ShardsLost, TrainState
from jaxrec.validate import check_finite, check_not_donated, donated


def first_failure(failures: Sequence[BaseException]) -> BaseException:
    """Return the first of several failures, with the others noted on it."""
    add_failures(failures[0], failures[1:])
    return failures[0]


def add_failures(error: BaseException, failures: Sequence[BaseException]) -> None:
    """Attach failures of the engine to an error, each as a note and as the end of its chain of contexts."""
    for failure in failures:
        known = _chain(error)
        if failure in known:
            continue
        said = " ".join([f"{type(failure).__name__}: {failure!s:.300}", *getattr(failure, "__notes__", [])])
        error.add_note(f"the engine had a failure of its own: {said}")
        if error not in _chain(failure):
            known[-1].__context__ = failure


def _chain(error):
    """Return an error and its chain of causes or contexts."""
    found = [error]
    while (error := error.__cause__ or error.__context__) is not None and error not in found:
        found.append(error)
    return found


class Snapshot(NamedTuple):
    """A state to be saved after a step, or as soon after it as lost shards are back."""

    step: int
    save: Callable[[TrainState], Any]
    dropped: Callable[[], object]  # called in place of `save`


class SnapshotSchedule:
    """The pending snapshots of an engine, in the order in which they were announced."""

    def __init__(self):
        self._pending: list[Snapshot] = []
        self._unwarned: set[int] = set()  # steps to warn of if a run ends before them

    def announce(self, snapshot: Snapshot, now: int) -> None:
        """Add a snapshot of step `now`, whose callbacks are at work, or of a later one."""
        self._pending.append(snapshot)
        if snapshot.step > now:
            self._unwarned.add(snapshot.step)

    def due(self, step: int) -> Snapshot | None:
        """Return the next snapshot of a step or an earlier one, or None; it stays pending until `mark_taken`."""
        return next((each for each in self._pending if each.step <= step), None)

    def mark_taken(self, snapshot: Snapshot) -> None:
        """Remove a snapshot, which has begun."""
        self._pending.remove(snapshot)
        self._unwarned.discard(snapshot.step)

    def put_back(self, snapshot: Snapshot) -> None:
        """Add a snapshot again, as the first one, whose save has met lost shards; any thread may call this."""
        self._pending.insert(0, snapshot)

    def drop(self, step: int) -> None:
        """Remove all snapshots of a step and earlier ones."""
        dropped = [each for each in self._pending if each.step <= step]
        self._pending = [each for each in self._pending if each.step > step]
        self._unwarned.discard(step)
        for each in dropped:
            each.dropped()

    def forget(self, now: int) -> None:
        """Drop all snapshots, as the state of step `now` is replaced; warn of those that were not taken."""
        self._pending = []
        self._warn(f", and are forgotten: the engine was reset at step {now}.")

    def warn(self, now: int) -> None:
        """Warn once of snapshots that a run ending at step `now` has not taken."""
        self._warn(f": the run was left at step {now}. Those of later steps stay announced for the next run.")

    def _warn(self, why):
        steps, self._unwarned = sorted(self._unwarned), set()
        if steps:
            warnings.warn(f"snapshots announced for steps {steps} were not taken{why}", stacklevel=5)


# Limit of successive recoveries without a further committed step, or without the save of the snapshot they delay.
MAX_RECOVERIES = 8

REMEDY = "restore them in `exclusive`, or go on from an image with `reset`"

CHECK_EVERY_STEPS = 100  # steps between two checks of the losses within a run


class Losses:
    """Unchecked losses of steps, kept on the device, as fetching each would block every step."""

    def __init__(self):
        self._waiting: list[tuple[int, Any]] = []  # (step, loss), not checked yet

    def note(self, step: int, metrics: dict) -> None:
        """Record the loss of a step, if it has one."""
        if "loss" in metrics:
            self._waiting.append((step, metrics["loss"]))

    def check(self, from_number: int = 1) -> None:
        """Fetch the recorded losses if there are at least `from_number`, and raise if one is not finite."""
        if len(self._waiting) >= from_number:
            waiting, self._waiting = self._waiting, []
            found = np.asarray(jax.device_get([loss for _, loss in waiting]))
            if not np.isfinite(found).all():
                at = int(np.argmin(np.isfinite(found)))
                raise FloatingPointError(
                    f"the loss is {found[at]} at step {waiting[at][0]} (found when steps {waiting[0][0]} to "
                    f"{waiting[-1][0]} were checked). Look at that step's batch (labels? dense features on "
                    "a log scale?) and at the learning rates."
                )


class RecoveryCounter:
    """Counter of successive recoveries at one place, to end a run whose shards are lost again and again."""

    def __init__(self):
        self._place, self._tries = "", 0

    def count(self, place: str, shards: Iterable[int]) -> None:
        """Count a recovery at a place, such as "step 5"; raise ShardsLost after MAX_RECOVERIES of them there."""
        self._tries = self._tries + 1 if self._place == place else 1
        self._place = place
        if self._tries > MAX_RECOVERIES:
            raise ShardsLost(shards, f"again, after {MAX_RECOVERIES} recoveries at {place}: {REMEDY}")


Entered = TypeVar("Entered", bound=Callback | AfterStep)


class Engine:
    """Base class of engines: `Serial`; `oac.Pipeline`, with bitwise the same results; `shadowsync.FreeTrainers`.

    The order at each step is: commit, `after_step` of the callbacks, recovery of shards that the row storage has lost,
    the snapshot of the step if one is announced, and recovery of shards that callbacks have marked with `lose`. A
    committed step keeps its snapshot even if one of its callbacks fails. An engine is a context manager: entering it
    begins its callbacks; leaving it ends the run, waits for its snapshots, and then ends the callbacks. Leaving a run
    never waits for the stream.

    However a run ends, the state is that of the last committed step, with the changes of the callbacks that completed;
    Ctrl-C and SIGTERM wait for the commit. The next run starts with the batches that were taken but not trained, if it
    is over the same iterator or `Loader`; a run over another one drops them.

    Args:
      callbacks: `Callback` objects, or functions (StepInfo) -> state or None, which are called after every step; in
        this order.

    Attributes:
      step: number of committed steps.
      changes: number of changes of tables by `exclusive` or a callback, which no batch reports; without recoveries.
    """

    # How long `run` waits for an iterator that an earlier run is still in.
    patience_seconds = 10.0
    step: int
    _state: TrainState

    def __init__(self, callbacks: Iterable[Callback | AfterStep] = ()):
        self._callbacks = CallbackList(callbacks)
        # Weak, so that dropping the iterator of a run ends the run.
        self._generator: Callable = lambda: None
        self._unraised: list[BaseException] = []  # failures of a run that were not raised yet
        self._stream = Stream(iter(()))  # of the last run
        self._snapshots, self._losses = SnapshotSchedule(), Losses()
        self._in_callback = False
        self._marked_lost = set[int]()  # marked by a callback with `lose`, to be recovered after the snapshot
        self._tries = RecoveryCounter()
        self._within = 0  # depth of callers that will raise failures of the run: `with` blocks, `close`
        self._recovering = self._going_back = self._looking = False
        self.changes = 0

    @property
    def tables(self) -> Tables:
        """The current tables."""
        return self._state.tables

    @property
    def state(self) -> TrainState:
        """The state between two steps; `after_step` may not read it, as it gets the state as an argument."""
        if self._in_callback:
            raise ValueError("engine.state was read in `after_step`: use info.state; this may be older.")
        return self._state

    @property
    def callbacks(self) -> tuple[Callback | AfterStep, ...]:
        """The callbacks at work, in order."""
        return tuple(self._callbacks.at_work)

    @property
    def running(self) -> bool:
        """Whether a run has begun and not ended."""
        generator = self._generator()
        return generator is not None and generator.gi_frame is not None and not self._going_back

    def train(self, batches: Iterable[Batch] | Callable[[int], Iterable[Batch]]) -> TrainState:
        """Train on all batches, see `run`; return the state after the last one."""
        for _ in self.run(batches):
            pass
        return self.state

    def run(
        self, batches: Iterable[Batch] | Callable[[int], Iterable[Batch]]
    ) -> Generator[tuple[TrainState, dict], None, None]:
        """Train on all batches, and yield after each.

        Args:
          batches: iterable of Batch, all of one size, which are taken, copied and planned ahead of the steps; or a
            function of the number of committed steps that returns the batches from there on, which is called again when
            a recovery goes back to an earlier step.

        Yields:
          (TrainState, metrics) after every batch; the state is donated to the next step.

        Raises:
          FloatingPointError: a loss is not finite; the error gives the step. Losses are checked every 100 steps,
            before a snapshot, which is not taken then, and when a run ends; before a snapshot also the parameters.
          ShardsLost: shards were lost, and no callback can recover them.
          ValueError: another run is active; callbacks have not begun; as the step.
        """
        if self.running:
            raise ValueError("this engine is running: exhaust or close the iterator of the run before.")
        if len(self.callbacks) < len(self._callbacks.given):
            raise ValueError("run it within `with engine:`, which begins and ends its callbacks.")
        if not callable(batches) and any(each.goes_back for each in self._callbacks.objects):
            raise ValueError(
                "a recovery may go back to an earlier step, which an iterator cannot: give a function from the number "
                "of committed steps to the batches from there on."
            )
        self._refuse()
        stream = self._stream_of(batches(self.step) if callable(batches) else batches)
        generator = self._runs(stream, batches)
        self._generator = weakref.ref(generator)
        return generator

    def _refuse(self) -> None:
        """Raise if the engine cannot go on from its state."""

    def _runs(self, stream, batches):
        while True:
            try:
                yield from self._over(stream)
                return
            except RolledBack as back:
                if not callable(batches):
                    raise
                # Only here has the run ended, so that the state of the engine may be replaced.
                self._going_back = True
                before = self._puts()
                try:
                    back.go_back()
                except BaseException as error:
                    if before is not None and (before != self._puts()).any():  # it has ended amid the rows
                        self._break(error)
                    raise
                finally:
                    self._going_back = False
            stream = self._stream_of(batches(self.step))

    def _puts(self) -> np.ndarray | None:
        """Return how many puts to rows on the host have begun and ended so far; None if there are no such rows."""
        hosted = self.tables.hosted
        return None if hosted is None else np.array(hosted.puts)

    def _break(self, error: BaseException) -> None:
        """Refuse everything but `reset` from here on."""

    def _stream_of(self, batches: Iterable[Batch]) -> Stream:
        """Return the stream of an iterable: the one of the last run if its iterator is the same."""
        iterator = iter(batches)
        if self._stream.iterator is not iterator:
            self._stream = Stream(iterator)
        if not self._stream.free.wait(self.patience_seconds):
            raise ValueError(
                "the planner of an earlier run still waits inside this iterator for a batch: let the iterator return "
                "first (nothing of it is lost then), or give another one."
            )
        return self._stream

    def _over(self, stream: Stream) -> Generator:
        """Train on all batches of a stream; yield as `run`."""
        raise NotImplementedError

    def _after_step(self, plans: Any, metrics: dict) -> None:
        """Call the callbacks after a step; the state is that of each that has completed."""
        for each in self.callbacks:
            given, self._in_callback = self._state, True
            try:
                info = StepInfo(given, self.step, plans, metrics)
                found = each.after_step(info) if isinstance(each, Callback) else each(info)
            finally:
                self._in_callback = False
            # After each: the next one may raise, and this one may have donated the earlier state.
            if isinstance(found, TrainState):
                self._take_from_callback(given, found)
            elif found is not None:
                raise ValueError(
                    f"the callback {each!r:.200} returned a {type(found).__name__}: return the state to go on with, or "
                    "None to leave it as it is."
                )

    def _take_from_callback(self, given: TrainState, found: TrainState) -> None:
        # If `exclusive` in the callback has replaced the tables, those passed to it may be donated.
        self.changes += found.tables is not given.tables
        self._state = found._replace(tables=self.tables) if found.tables is given.tables else found

    def exclusive(self, change: Callable[[Any], Any]) -> None:
        """Replace the tables by change(tables) with exclusive access; for the iterating thread, also in a callback."""
        raise NotImplementedError

    def at_rest(self, look: Callable[[Any], Any]) -> None:
        """Call look(tables) as `exclusive` calls a change, for a function that changes nothing, such as an evaluation.

        Args:
          look: (tables) -> anything. It is called again after recovery if it meets lost shards.
        """

        def looked(tables):
            look(tables)
            return tables

        before, self._looking = self._looking, True
        try:
            self.exclusive(looked)
        finally:
            self._looking = before

    def reset(self, state: TrainState) -> None:
        """Continue from another state, between two runs, at the step of its dense half.

        Callbacks are notified before, by `restarted`, and may refuse by raising. Batches that were taken ahead are
        trained first if the next run is over the same iterator: after rewinding it, give another object.

        Raises:
          ValueError: a run is active, the state was donated, or its tables have another spec.
        """
        raise NotImplementedError

    def _refuse_reset(self, state: TrainState) -> None:
        if self.running:
            raise ValueError("reset within a run: leave the loop, or close the engine, first.")
        check_not_donated(state)
        if state.tables.spec.digest != self.tables.spec.digest:
            raise ValueError("reset to tables of another spec: make a new engine for them.")

    def _notify_restarted(self, state: TrainState) -> None:
        """Notify callbacks of the state that the engine will continue from; if one raises, it is not reset."""
        for callback in self._callbacks.objects:
            callback.restarted(state)

    def lose(self, shards: Iterable[int]) -> None:
        """Mark shards as lost, in `after_step`; callbacks `recover` them after the step and its snapshot.

        For a callback that emulates a failure. If the row storage has really lost shards, it raises `ShardsLost`, and
        the same recovery happens at the step committed when the loss is noticed.

        Raises:
          ValueError: there is no such shard, or no run is active.
        """
        wanted = set(shards)
        for shard in wanted:
            check_shard(self.tables.spec, shard)
        if not self.running:
            raise ValueError("nothing runs: `lose` is for a callback. Change the tables in `exclusive`.")
        self._marked_lost |= wanted

    def _pop_unraised(self) -> list[BaseException]:
        # Cleared, so that the next call does not raise the same failures again.
        failures, self._unraised = self._unraised, []
        return failures

    def _raise_failures(self) -> None:
        if failures := self._pop_unraised():
            raise first_failure(failures)

    def close(self) -> None:
        """End the active run, if any, write all committed rows, and raise its failures that were not raised before."""
        self._close_within(None)

    def _end(self) -> list[BaseException]:
        """End the active run, if any, and return its failures that were not raised yet."""
        self._refuse_within_step()
        generator = self._generator()
        for end in (generator.close if generator is not None else lambda: None, self._losses.check):
            try:
                end()
            except Exception as failure:
                self._unraised.append(failure)
        return self._pop_unraised()

    def _refuse_within_step(self):
        generator = self._generator()
        if generator is not None and generator.gi_running:
            raise ValueError("close within a step: raise in the callback to end the run, or leave the loop over it.")

    def _close_within(self, error):
        try:
            failures = self._end()
        except KeyboardInterrupt as interrupt:
            add_failures(interrupt, self._pop_unraised())
            raise
        if error is not None:
            add_failures(error, failures)
        elif failures:
            raise first_failure(failures)
        else:
            self._snapshots.warn(self.step)

    def snapshot_at(
        self, step: int, save: Callable[[TrainState], Any], dropped: Callable[[], object] = lambda: None
    ) -> None:
        """Announce a snapshot: after a step and its callbacks, save(state) will be called.

        If a run ends before the step, it warns, and the snapshot stays announced for the next run.

        Args:
          step: number of a step that is not committed yet; in `after_step` also that of `info`.
          save: (TrainState) -> anything, for example `Checkpointer.save`.
          dropped: called instead if a loss or a dense parameter is not finite, or if the block ends before; not by
            `reset`.

        Raises:
          ValueError: the step is committed.
        """
        self._refuse()
        if step < self.step or (step == self.step and not self._in_callback):
            raise ValueError(f"step={step} is committed already ({self.step} are).")
        self._snapshots.announce(Snapshot(step, save, dropped), self.step)

    def enter(self, callback: Entered) -> Entered:
        """Begin a further callback, as the last one; for one that needs the engine to be made.

        Args:
          callback: Callback, or a function (StepInfo) -> state or None; it is at work until the `with` block ends.

        Returns:
          The callback.

        Raises:
          ValueError: called outside the `with` block.
        """
        if not self._within:
            raise ValueError("enter a callback within `with engine:`, whose end will end it.")
        self._callbacks.begin(callback, self)
        return callback

    def __enter__(self) -> Self:
        try:
            self._within += 1
            if self._within == 1:
                self._callbacks.begin_all(self)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._within -= 1
        ends = contextlib.ExitStack() if self._within else self._callbacks.dismiss()
        if not self._within:  # a save that lost shards have delayed is of callbacks that end here
            ends.callback(lambda: self._snapshots.drop(self.step))
        try:
            self._close_within(error)
        except BaseException as failure:
            # Callbacks are ended last, as a snapshot may be saving for them until the run is closed. They get the error
            # that ends the block.
            ends.__exit__(type(failure), failure, failure.__traceback__)
            raise
        ends.__exit__(kind, error, trace)

    def _change_exclusively(self, change: Callable) -> Any:
        """Return change(tables), calling it again after recovery if it raises ShardsLost."""
        while True:
            changed, lost = self._change_once(change)
            if not lost:
                return changed
            within, self._in_callback = self._in_callback, False  # a recovery reads the state
            try:
                self._recover_during_change(lost)
            finally:
                self._in_callback = within

    def _change_once(self, change: Callable) -> tuple[Any, Collection[int]]:
        """Return the result of `_try_change`, called with exclusive access to the tables."""
        raise NotImplementedError

    def _recover_during_change(self, shards: Collection[int]) -> None:
        """Have callbacks recover lost shards that a change of the tables has met."""
        raise NotImplementedError

    def _try_change(self, change: Callable, tables: Any) -> tuple[Any, Collection[int]]:
        """Return (change(tables), ()), or (None, lost shards) if it meets lost shards that a callback can recover."""
        self._count_change()
        try:
            return change(tables), ()
        except ShardsLost as lost:
            # A loss during a recovery is handled by the caller of the recovery.
            if self._recovering or not self._callbacks.that_recover:
                raise
            return None, lost.shards

    def _drop_unless_finite(self, dense: DenseState) -> None:
        """Drop the snapshots of this step, and raise, if the state must not take the place of a good image."""
        try:
            self._losses.check()
            check_finite(dense)
        except FloatingPointError:
            self._snapshots.drop(self.step)
            raise

    def _count_change(self):
        """Count a change that is about to be made; while it is, no snapshot is being saved."""
        self.changes += not (self._looking or self._recovering)

    def _run_recovery(self, callbacks: Iterable[Callback], shards: Iterable[int]) -> None:
        """Call `recover` of callbacks in order."""
        before, self._recovering = self._recovering, True
        try:
            for callback in callbacks:
                callback.recover(tuple(sorted(shards)))
        finally:
            self._recovering = before

    def _recovering_callbacks(self, shards: Iterable[int]) -> list[Callback]:
        """Return the callbacks that recover, at least one, and count the recovery."""
        callbacks = self._callbacks.that_recover
        if not callbacks:
            raise ShardsLost(shards, f"no callback restores them: give callbacks=[Recovery(...)]; now {REMEDY}")
        # Counted per step: storage that loses restored shards again and again would loop forever.
        self._tries.count(f"step {self.step}", shards)
        return callbacks

    def replace_lost(self, shards: Iterable[int], but: Callback) -> None:
        """Have the callbacks before `but` recover shards that were lost while `but` restores all rows.

        Call it between two runs. `but` and later callbacks are not called; if there is none before, or shards are lost
        too often at this step, ShardsLost is raised.
        """
        callbacks = self._recovering_callbacks(shards)
        before = callbacks[: callbacks.index(but)]
        if not before:
            raise ShardsLost(shards, "while all were restored: list what replaces them before the recovery")
        for callback in before:
            callback.recover(tuple(sorted(shards)))


class Stepper(Protocol):
    """What `Serial` takes its steps from; batches are planned by the lookups of its `spec`, if it has one."""

    def step(self, state: TrainState, batch: Batch, plans: dict[str, Plan] | None = None) -> tuple[TrainState, Any]:
        """See `Task.step`."""


@runtime_checkable
class LooksAhead(Stepper, Protocol):
    """A `Stepper` that begins to read the rows of the next batch during a step."""

    def announce(self, plans: dict[str, Plan] | None) -> None:
        """Name the plans of the batch after the next `step`; None if there is none, or it is not planned yet."""


class Serial(Engine):
    """Engine that trains batches one after the other, over tables in any storage; plans are made ahead in a thread.

    Batches of numpy arrays are planned on the host, or, if one GPU reads the rows itself, sent to it and planned there;
    batches of JAX arrays on their devices. Results are equal.

        with Serial(task, task.init(params)) as engine:
            state = engine.train(batches)  # or: for state, metrics in engine.run(batches): ...

    Args:
      task: Task, or anything else with its `step`; `oac.Overlap(task)` to overlap its steps over pinned tables.
      state: TrainState; it is donated.
      callbacks: see `Engine`.
      capacity: initial {stack: U} of the plans: `capacity_of` the last plans, to resume a run bitwise.

    >>> import jax.numpy as jnp, numpy as np, optax, jaxrec
    >>> from jaxrec import EmbeddingSpec, Lookup, Table, sgd
    >>> spec = EmbeddingSpec({'item': Table(9, 2)}, {'item': Lookup('item')})
    >>> loss = lambda params, activations, batch: (activations['item'].sum(-1) + params - batch.label) ** 2
    >>> task = jaxrec.Task(spec, loss, optax.sgd(0.1), sgd(0.1))
    >>> batches = [jaxrec.Batch({'item': np.array([k, 8])}, np.ones(2, np.float32)) for k in range(5)]
    >>> with Serial(task, task.init(jnp.zeros(()))) as engine:
    ...     losses = [float(metrics['loss']) for state, metrics in engine.run(batches)]
    >>> engine.step, losses[-1] < losses[0]
    (5, True)
    """

    def __init__(
        self, task: Stepper, state: TrainState, callbacks: Iterable[Callback | AfterStep] = (), *,
        capacity: Mapping[str, int] | None = None,
    ):  # fmt: skip
        super().__init__(callbacks)
        check_not_donated(state)
        self._state, self._task, self._capacity = state, task, capacity
        self._alone = False
        self._lost_shards = set[int]()  # lost by the row storage, not recovered yet
        self._use: TableUse | None = None  # of the last run, if the tables are written in place
        self._broken: BaseException | None = None  # failure of a step that has lost rows
        self.step = int(state.dense.step)

    @property
    def state(self) -> TrainState:
        """See `Engine`; raises BrokenEngine after a step that has lost rows."""
        self._refuse()
        return super().state

    def _refuse(self):
        if self._broken is not None:
            dense_step = None if donated(self._state) else self.step
            unknown: list[int | None] = [None] * self.tables.spec.shards
            steps = self._use.table_steps() if self._use else unknown
            raise BrokenEngine(dense_step, steps, self._broken) from self._broken

    def _break(self, error: BaseException) -> None:
        self._broken = error

    def _over(self, stream):
        # Rows that the host moves are planned there.
        sends = self.tables.traced is not None and on_one_gpu(mesh_of(self._state.dense))
        hosted = self.tables.hosted
        self._state = self._state._replace(tables=hosted or self.tables)  # those of a pipeline's state are guarded
        self._use = TableUse(hosted) if hosted else None
        spec = getattr(self._task, "spec", self.tables.spec)  # lookups of the tables' own spec may be others
        with PlanPrefetcher(stream, spec, self._capacity, sends) as ahead:
            with self._use.a_run() if self._use else contextlib.nullcontext():
                yield from self._train_all(ahead)

    def _train_all(self, ahead):
        try:
            self._finish_step()  # completes the last step of the previous run
            for batch, plans in ahead:
                if isinstance(self._task, LooksAhead):
                    self._task.announce(ahead.peek())
                metrics = self._train(plans, batch, ahead.forget)
                yield self._state, metrics
                self._losses.check(CHECK_EVERY_STEPS)
        finally:
            # A committed step keeps its snapshot even if its callbacks failed or were interrupted.
            if not self._lost_shards and self._broken is None:
                with uninterrupted():
                    self._save_snapshot()
        self._losses.check()
        self._snapshots.warn(self.step)

    def _train(self, plans, batch, forget):
        while True:
            # A step donates its state: an interrupt between the call and the assignment would leave no state.
            with uninterrupted(reraise=False) as deferred:
                metrics = self._commit(plans, batch, forget)
            try:
                if metrics is not None:
                    self._after_step(plans, metrics)
                self._finish_step()
            finally:
                raise_deferred(deferred)
            if metrics is not None:
                return metrics

    def _commit(self, plans, batch, forget):
        """Run a step and return its metrics; None if its rows could not be read, so that it must be retried."""
        if self._use:
            self._use.mark_at(self.step)
        try:
            done = self._task.step(self._state, batch, plans)
        except ShardsLost as lost:
            self._lost_shards.update(lost.shards)
            if lost.done is None:
                return None
            done = lost.done
        except BaseException as error:
            if isinstance(error, (TypeError, ValueError)):
                forget()  # a refused batch is not returned to the stream; one whose rows could not be read is
            if donated(self._state) or (self._use and self._use.changed()):
                self._broken = error
            raise
        forget()
        self._state, metrics = done
        self.step += 1
        self._losses.note(self.step, metrics)
        return metrics

    def _finish_step(self):
        """Complete a step after its callbacks: recover lost shards, save its snapshot, recover marked shards."""
        self._recover(self._lost_shards)
        self._save_snapshot()
        # After the snapshot, so that the recovery can use what it saved.
        wanted, self._marked_lost = self._marked_lost, set()
        self._recover(wanted)

    def _recover(self, shards):
        if not shards:
            return
        callbacks = self._recovering_callbacks(shards)
        try:
            self._run_recovery(callbacks, shards)
        except ShardsLost as lost:  # during the recovery: recover all once more
            self._lost_shards.update(lost.shards)
            self._recover({*shards, *lost.shards})
            return
        # Only after success: otherwise the next run starts by recovering them.
        self._lost_shards = self._lost_shards.difference(shards)

    def _save_snapshot(self):
        while snapshot := self._snapshots.due(self.step):
            self._recover(self._lost_shards)
            self._drop_unless_finite(self._state.dense)
            try:
                snapshot.save(self._state)
            except ShardsLost as lost:  # retried after recovery
                self._lost_shards.update(lost.shards)
            finally:
                if not self._lost_shards:
                    self._snapshots.mark_taken(snapshot)

    def _recover_during_change(self, shards):
        self._lost_shards.update(shards)
        self._recover(self._lost_shards)

    def exclusive(self, change: Callable[[Tables], Tables]) -> None:
        """Replace the tables by change(tables).

        Args:
          change: (tables) -> tables of the same spec; device tables that it donates are lost even if it raises. It is
            called again after recovery if it meets lost shards.

        Raises:
          ValueError: it returns something else, and the tables are not replaced; called within another `exclusive`.
          ShardsLost: shards were lost, and no callback can recover them.
        """
        if self._alone:
            raise ValueError("`exclusive` cannot be nested: its function has the tables.")
        changed = self._change_exclusively(change)
        if changed is None or changed.spec.digest != self._state.tables.spec.digest:
            raise ValueError(f"the change returned a {type(changed).__name__}: tables of the same spec are expected.")
        self._state = self._state._replace(tables=changed)
        if not (self.running or self._looking):  # outside a run, the change is responsible for lost shards
            self._lost_shards = set()

    def _change_once(self, change):
        hosted, mine = self._state.tables.hosted, self._use
        if hosted is not None and not (mine and mine.running):
            TableUse(hosted).refuse_others(hosted)
        self._alone = True
        try:
            return self._try_change(change, self._state.tables)
        finally:
            self._alone = False

    def reset(self, state: TrainState) -> None:
        """See `Engine`; pending snapshots and lost shards are dropped."""
        self._refuse_reset(state)
        self._notify_restarted(state)
        before, self._state, self.step = self.step, state, int(state.dense.step)
        self._losses, self._lost_shards, self._marked_lost = Losses(), set(), set()
        self._broken = None
        self._snapshots.forget(before)  # last, as it may warn
