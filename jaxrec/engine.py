"""Engines take a state from batch to batch: what techniques rely on, and the serial engine, in any home of the rows.

`Engine` is what hooks and techniques see; `EngineBase` is what every engine does alike: one run at a time, a `with`
block, its watchers, and `CutSchedule`, at which steps its state is to be saved. `Serial` runs one batch after the
other, `jaxrec.oac.Pipeline` several at once, with the same bits.

Legend: B batch, U padded unique rows per shard.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

import jax
import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.embedding import EmbeddingSpec, Tables
from jaxrec.embedding.tables import check_shard
from jaxrec.interrupts import raise_again, uninterrupted
from jaxrec.prefetch import PlanPrefetcher, Streams, in_pairs
from jaxrec.step import run_hooks
from jaxrec.types import Batch, ShardsLost, TrainState
from jaxrec.validate import check_not_donated


class Engine(Protocol):
    """What trains over tables in some home: `Serial`; `oac.Pipeline`, with the same bits; `shadowsync.FreeTrainers`.

    At each step the order is: commit, hooks in their order, shards that their home has lost, the cut of the step if one
    is announced, and then what hooks have lost. A step that is committed keeps its cut though a hook of it has failed.
    An engine is a context manager: leaving it ends its run, waits for its cuts, and then leaves whatever was entered
    with `enter`. Leaving a run never waits for the stream.

    Attributes:
      tables: as they are now.
      step: how many steps are committed.
      state: between two steps; inside a hook it is refused, as the hook is given the state.
      running: whether a run has begun and not ended.
    """

    @property
    def tables(self) -> Tables: ...

    @property
    def step(self) -> int: ...

    @property
    def state(self) -> TrainState: ...

    @property
    def running(self) -> bool: ...

    def run(
        self, batches: Iterable[Batch], hooks: Sequence[Callable] = (), check_every_steps: int = 100
    ) -> Iterator[tuple[TrainState, dict]]:
        """Trains on all batches; yields the state and the metrics after each."""

    def exclusive(self, change: Callable[[Any], Any]) -> None:
        """Replaces the tables by change(tables), alone with them; for the thread that iterates, also in a hook."""

    def cut(self, step: int, save: Callable[[TrainState], Any], unreached: Literal["warn", "ignore"] = "warn") -> None:
        """Announces that a state is to be saved after a step that is not committed yet."""

    def withdraw(self, step: int) -> None:
        """The cut of a step is not wanted any more."""

    def lose(self, shards: Sequence[int]) -> None:
        """Says that shards are lost; after the step and its cut the watchers that can `recover` do so."""

    def reset(self, state: TrainState) -> None:
        """Goes on from another state, between two runs; watchers that have `restarted(state)` are told before."""

    def enter(self, watcher: AbstractContextManager) -> Any:
        """Enters a context manager that is left when this one is, and after it."""

    def replace_lost(self, shards: Iterable[int], but: Any) -> None:
        """Has the watchers before one recover shards that were lost while that one restores all rows."""


def caught(function: Callable):
    """What a function returns, or what it raised."""
    try:
        return function()
    except BaseException as error:
        return error


def first(failures: Sequence[BaseException]) -> BaseException:
    """The first of some failures, which tells of the others."""
    note(failures[0], failures[1:])
    return failures[0]


def note(error: BaseException, failures: Sequence[BaseException]) -> None:
    """Lets an error tell of failures of the engine beside it: a note each, and the failures in
    its context."""
    for failure in failures:
        known = _chain(error)
        if failure in known:
            continue
        said = " ".join([f"{type(failure).__name__}: {failure!s:.300}", *getattr(failure, "__notes__", [])])
        error.add_note(f"the engine had a failure of its own: {said}")
        if error not in _chain(failure):
            known[-1].__context__ = failure


def _chain(error):
    """An error, its cause or context, that of the latter, and so on."""
    found = [error]
    while (error := error.__cause__ or error.__context__) is not None and error not in found:
        found.append(error)
    return found


class Cut(NamedTuple):
    """What is to be done at a step."""

    save: Callable[[TrainState], Any]
    unreached: Literal["warn", "ignore"]


class CutSchedule:
    """The cuts of an engine that are still to come."""

    def __init__(self):
        self._to_come: dict[int, Cut] = {}

    def announce(self, step: int, now: int, cut: Cut) -> None:
        """Keeps a cut for a step after that of now.

        Raises:
          ValueError: the step is committed, or has a cut already.
        """
        if step <= now:
            raise ValueError(f"step={step} is committed already ({now} are).")
        if step in self._to_come:
            raise ValueError(f"a cut of step {step} is announced already: let one function save all that is wanted.")
        self._to_come[step] = cut

    def at(self, step: int) -> Callable[[TrainState], Any] | None:
        """The save of a step, which stays announced until `tell_begun`; None if there is none."""
        return self._to_come[step].save if step in self._to_come else None

    def tell_begun(self, step: int) -> None:
        """The cut of a step has begun."""
        self._to_come.pop(step)

    def withdraw(self, step: int) -> None:
        """The cut of a step is not wanted any more; no harm if it was taken, or never announced."""
        self._to_come.pop(step, None)

    def _wanted(self):
        """Steps of the cuts to warn of if they are not taken."""
        return sorted(step for step, cut in self._to_come.items() if cut.unreached == "warn")

    def forget(self, now: int) -> None:
        """No cut is to come any more, as another state takes the place of that of now."""
        steps = self._wanted()
        self._to_come = {}
        if steps:
            warnings.warn(
                f"cuts announced for steps {steps} were not taken, and are forgotten: the engine was reset at "
                f"step {now}.",
                stacklevel=3,
            )

    def warn(self, now: int) -> None:
        """Says, once, which cuts a run was left without, and forgets those that lie behind."""
        steps = self._wanted()
        later = {step: cut for step, cut in self._to_come.items() if step > now}
        self._to_come = {step: cut._replace(unreached="ignore") for step, cut in later.items()}
        if steps:
            warnings.warn(
                f"cuts announced for steps {steps} were not taken: the run was left at step {now}. Those of "
                "later steps stay announced for the next run.",
                stacklevel=4,
            )


# How often shards may be lost again before one more step is committed, or the cut that they keep is saved.
MOST_TRIES = 8


def checked_shards(spec: EmbeddingSpec, shards: Iterable[int], running: bool) -> set[int]:
    """The shards that a hook wants lost.

    Raises:
      ValueError: there is no such shard; nothing runs.
    """
    wanted = set(shards)
    for shard in wanted:
        check_shard(spec, shard)
    if not running:
        raise ValueError("nothing runs: `lose` is for a hook. Change the tables in `exclusive`.")
    return wanted


def notify_restarted(watchers: Iterable[Any], state: TrainState) -> None:
    """Tells watchers which state an engine will go on from; what they raise keeps it where it is."""
    for watcher in watchers:
        getattr(watcher, "restarted", lambda state: None)(state)


class Losses:
    """The losses of steps, on the device: to look at each would make every step wait for it."""

    def __init__(self):
        self._waiting: list[tuple[int, Any]] = []  # (step, loss), not looked at yet

    def note(self, step: int, metrics: dict) -> None:
        """Keeps the loss of a step, if it has one."""
        if "loss" in metrics:
            self._waiting.append((step, metrics["loss"]))

    def check(self, from_number: int = 1) -> None:
        """Looks at the losses since the last time, if there are so many.

        Raises:
          FloatingPointError: one is not finite; names the first such step, and what to look at.
        """
        if len(self._waiting) >= from_number:
            waiting, self._waiting = self._waiting, []
            found = np.asarray(jax.device_get([loss for _, loss in waiting]))
            if not np.isfinite(found).all():
                at = int(np.argmin(np.isfinite(found)))
                raise FloatingPointError(
                    f"the loss is {found[at]} at step {waiting[at][0]} (found when steps {waiting[0][0]} to "
                    f"{waiting[-1][0]} were checked). Look at that step's batch (labels? dense features on "
                    "a log scale?) and at the learning rates; `jax.config.update('jax_debug_nans', True)` "
                    "finds the operation."
                )


class Tries:
    """How often shards were brought back at one place: what is lost again and again ends the run."""

    def __init__(self):
        self._place, self._tries = "", 0

    def count(self, place: str, shards: Iterable[int], remedy: str) -> None:
        """Counts a recovery; at another place than the last one it begins anew.

        Args:
          place: as in "step 5".
          shards: the lost ones.
          remedy: what is said when it is one too many.

        Raises:
          ShardsLost: it is one too many.
        """
        self._tries = self._tries + 1 if self._place == place else 1
        self._place = place
        if self._tries > MOST_TRIES:
            raise ShardsLost(shards, f"again, after {MOST_TRIES} recoveries at {place}: {remedy}")


Entered = TypeVar("Entered")


class EngineBase:
    """An engine's run and `with` block, and the watchers that its end leaves."""

    _name = "engine"  # in what is said to users
    _cuts: CutSchedule
    step: int

    def __init__(self):
        # Weak: a caller that drops the iterator of a run has left it.
        self._generator: Callable = lambda: None
        self._untold: list[BaseException] = []  # what went wrong in a run, until it is raised
        self._tries = Tries()
        self._watchers: list[Any] = []  # in the order in which they were entered
        self._entered = contextlib.ExitStack()  # what leaves them
        self._within = 0  # how many will raise what leaving a run has found: `with` blocks, `close`
        self._recovering = False

    @property
    def running(self) -> bool:
        """Whether a run has begun and not ended."""
        generator = self._generator()
        return generator is not None and generator.gi_frame is not None

    def _hold(self, generator: Generator) -> Generator:
        self._generator = weakref.ref(generator)
        return generator

    def _take_untold(self) -> list[BaseException]:
        # Taken off: what was told once is not raised again by the next call.
        failures, self._untold = self._untold, []
        return failures

    def _end(self) -> list[BaseException]:
        """Ends the run, if one goes on; what went wrong in it and was not raised yet. Engines say how."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the run, if one goes on.

        Raises:
          Whatever went wrong in it, unless it was raised before; FloatingPointError for a loss that
            was not looked at yet.
        """
        if failures := self._end():
            raise first(failures)
        self._cuts.warn(self.step)

    def _close_within(self, error):
        try:
            failures = self._end()
        except KeyboardInterrupt as interrupt:
            note(interrupt, self._take_untold())
            raise
        if error is not None:
            note(error, failures)
        elif failures:
            raise first(failures)
        else:
            self._cuts.warn(self.step)

    def withdraw(self, step: int) -> None:
        """The cut of a step is not wanted any more; no harm if it was taken, or there is none."""
        self._cuts.withdraw(step)

    def enter(self, watcher: AbstractContextManager[Entered]) -> Entered:
        """Enters a context manager, which is left when the `with` block of this engine ends.

            with engine:
                recovery = engine.enter(Recovery(engine, ...))

        It is left after the run: when that is closed, and its cuts are saved. Of several the last
        is left first. If it has `recover(shards)`, that is called when shards are lost: see `lose`.

        Args:
          watcher: with `__enter__` and `__exit__`, which is told the error that ends the block, if
            there is one.

        Returns:
          What its `__enter__` has returned.
        """
        if not self._within:
            raise ValueError(f"enter a watcher within `with {self._name}:`, whose end will leave it.")
        entered = self._entered.enter_context(watcher)
        self._watchers.append(watcher if hasattr(watcher, "recover") else entered)
        return entered

    def __enter__(self) -> Self:
        self._within += 1
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._within -= 1
        entered = contextlib.ExitStack()
        if not self._within:
            entered, self._watchers = self._entered.pop_all(), []
        try:
            self._close_within(error)
        except BaseException as failure:
            # Watchers leave last: what a cut has begun to save belongs to them until the run is
            # closed. They are told what ends the block.
            if not entered.__exit__(type(failure), failure, failure.__traceback__):
                raise
            return False
        return bool(entered.__exit__(kind, error, trace))

    def _changed_when_whole(self, change: Callable) -> Any:
        """What change(tables) returns; it is called again when watchers have brought back lost shards that it met."""
        while True:
            changed, lost = self._changed(change)
            if not lost:
                return changed
            self._recover_met(lost)

    def _changed(self, change: Callable) -> tuple[Any, Collection[int]]:
        """What `_or_lost` finds, alone with the tables. Engines say how."""
        raise NotImplementedError

    def _recover_met(self, shards: Collection[int]) -> None:
        """Has shards brought back that a change has met. Engines say how."""
        raise NotImplementedError

    def _or_lost(self, change: Callable, tables: Any) -> tuple[Any, Collection[int]]:
        """What change(tables) returns, and no shards; or nothing, and lost ones that it met and watchers bring back."""
        try:
            return change(tables), ()
        except ShardsLost as lost:
            # What is lost while shards come back is the matter of what brings them back.
            if self._recovering or not any(hasattr(watcher, "recover") for watcher in self._watchers):
                raise
            return None, lost.shards

    def _bring_back(self, watchers: Iterable[Any], shards: Iterable[int]) -> None:
        """Has watchers bring shards back, in their order."""
        before, self._recovering = self._recovering, True
        try:
            for watcher in watchers:
                watcher.recover(tuple(sorted(shards)))
        finally:
            self._recovering = before

    def _who_recovers(self, step: int, shards: Iterable[int], again: str, otherwise: str = "") -> list[Any]:
        """The watchers that can bring shards back.

        Args:
          step: that the engine has committed.
          shards: the lost ones.
          again: what is said when they are lost at one step again and again.
          otherwise: what is said after the remedy when there is no such watcher.

        Raises:
          ShardsLost: there is no such watcher, or it is one time too many.
        """
        watchers = [watcher for watcher in self._watchers if hasattr(watcher, "recover")]
        if not watchers:
            remedy = f"{self._name}.enter(Recovery(...)) first{otherwise}"
            raise ShardsLost(shards, f"no watcher brings them back: {remedy}")
        # Counted per step: a home that loses again what was just brought back would go on for ever.
        self._tries.count(f"step {step}", shards, again)
        return watchers

    def replace_lost(self, shards: Iterable[int], but: Any) -> None:
        """Has the watchers before one recover shards that were lost while that one restores all rows, between two runs.

        Args:
          shards: the lost ones.
          but: the watcher that restores; those after it are not asked.

        Raises:
          ShardsLost: no watcher is before it, or it is one time too many at this step.
        """
        watchers = self._who_recovers(self.step, shards, "the servers that restore them die")
        before = watchers[: watchers.index(but)] if but in watchers else watchers
        if not before:
            raise ShardsLost(shards, f"while all were restored: {self._name}.enter(...) what replaces them first")
        for watcher in before:
            watcher.recover(tuple(sorted(shards)))


class Serial(EngineBase):
    """Trains one batch after the other, over tables in any home; plans are made ahead, in a thread.

        with Serial(state, train_step) as engine:
            for state, metrics in engine.run(batches, hooks=[...]): ...
        state = engine.state

    Args:
      state: TrainState; it is donated.
      train_step: (state, plans, batch) -> state', metrics, as from `make_train_step`.
      capacity: {stack: U} of the plans to begin with: `capacity_of` the last ones, if a run is to go on bit for bit.

    Whatever ends a run, the state is that of the last step committed, with what the last whole hook has returned; a
    Ctrl-C or a SIGTERM waits for the commit. The iterator of the run before, if it comes again, begins with what was
    taken and not trained.

    >>> import jax.numpy as jnp, numpy as np, optax, jaxrec
    >>> from jaxrec.embedding import DeviceTables, EmbeddingSpec, Lookup, Table, sgd
    >>> spec = EmbeddingSpec({'item': Table(9, 2)}, {'item': Lookup('item')})
    >>> loss = lambda params, activations, batch: (activations['item'].sum(-1) + params - batch.label) ** 2
    >>> state = jaxrec.init_state(jnp.zeros(()), optax.sgd(0.1), DeviceTables.create(spec, sgd(0.1)))
    >>> ones = np.ones(2, np.float32)
    >>> batches = [jaxrec.Batch({'item': np.array([k, 8])}, np.zeros((2, 0)), ones, ones) for k in range(5)]
    >>> with Serial(state, jaxrec.make_train_step(spec, loss, optax.sgd(0.1), sgd(0.1))) as engine:
    ...     losses = [float(metrics['loss']) for state, metrics in engine.run(batches)]
    >>> engine.step, losses[-1] < losses[0]
    (5, True)
    """

    def __init__(self, state: TrainState, train_step: Callable, capacity: Mapping[str, int] | None = None):
        super().__init__()
        check_not_donated(state)
        self._state, self._train_step, self._capacity = state, train_step, capacity
        self._streams, self._cuts = Streams(), CutSchedule()
        self._losses, self._in_hook, self._alone = Losses(), False, False
        self._lost_shards = set[int]()  # that their home has lost, and that are not back yet
        self._to_lose = set[int]()  # after the cut of this step, by the wish of a hook
        self.step = int(state.dense.step)

    @property
    def state(self) -> TrainState:
        """Between two steps; a hook is given the state, and may not ask for it here."""
        if self._in_hook:
            raise ValueError("engine.state was read in a hook: take the state that it was given; this may be older.")
        return self._state

    @property
    def tables(self) -> Tables:
        """As they are now."""
        return self._state.tables

    def run(
        self, batches: Iterable[Batch], hooks: Sequence[Callable] = (), check_every_steps: int = 100
    ) -> Generator[tuple[TrainState, dict], None, None]:
        """Trains on all batches.

        Args:
          batches: Batch after Batch, of one size; planned, and taken from their iterator, up to three ahead.
          hooks: (state, step, plans, metrics) -> state, in order after every step.
          check_every_steps: how often, and at the end of a run, the losses are fetched and checked.

        Yields:
          (TrainState, metrics) after every batch; the state is donated to the next step.

        Raises:
          FloatingPointError: a loss is not finite; names the step.
          ShardsLost: shards were lost, and no watcher can recover them.
          ValueError: a run goes on; as the step.
        """
        hooks, stream = self._check_run(hooks), self._streams.of(batches, patience_seconds=10.0)
        return self._hold(self._over_stream(stream, hooks, check_every_steps))

    def steps(
        self, pairs: Iterable[tuple], hooks: Sequence[Callable] = (), check_every_steps: int = 100
    ) -> Generator[tuple[TrainState, dict], None, None]:
        """As `run`, over (Batch, {stack: Plan}) pairs that were planned before."""
        return self._hold(self._over_pairs(in_pairs(pairs), self._check_run(hooks), check_every_steps))

    def _check_run(self, hooks):
        if self.running:
            raise ValueError("this engine is running: exhaust or close the iterator of the run before.")
        return tuple(hooks)  # which are called in every step, and may come from a generator

    def _over_stream(self, stream, hooks, check_every_steps):
        with PlanPrefetcher(stream, self.tables.spec, self._capacity) as ahead:
            yield from self._over_pairs(ahead, hooks, check_every_steps, ahead.forget)

    def _over_pairs(self, pairs, hooks, check_every_steps, forget=lambda: None):
        whole_number("check_every_steps", check_every_steps)
        try:
            self._finish_step()  # what a run before this one was left with
            for batch, plans in pairs:
                metrics = self._train(plans, batch, hooks, forget)
                yield self._state, metrics
                self._losses.check(check_every_steps)
        finally:
            # A step that is committed keeps its cut, though its hooks failed or were interrupted.
            if not self._lost_shards:
                with uninterrupted():
                    self._save_cut()
        self._losses.check()
        self._cuts.warn(self.step)

    def _train(self, plans, batch, hooks, forget):
        while True:
            # A step donates the state that it is given: between its call and the assignment there would be none.
            with uninterrupted(again=False) as asked:
                metrics = self._commit(plans, batch, forget)
            try:
                if metrics is not None:
                    for hook in hooks:
                        self._run_hook(hook, plans, metrics)
                self._finish_step()
            finally:
                raise_again(asked)
            if metrics is not None:
                return metrics

    def _commit(self, plans, batch, forget):
        """The metrics of a step; None if its rows could not be read: it is tried again when they are back."""
        try:
            done = self._train_step(self._state, plans, batch)
        except ShardsLost as lost:
            self._lost_shards.update(lost.shards)
            if lost.done is None:
                return None
            done = lost.done
        except BaseException:
            forget()  # a batch that the step refuses does not come again
            raise
        forget()
        self._state, metrics = done
        self.step += 1
        self._losses.note(self.step, metrics)
        return metrics

    def _finish_step(self):
        """What belongs to a step after its hooks."""
        self._recover(self._lost_shards)
        self._save_cut()
        # After the cut: a recovery finds it saved.
        wanted, self._to_lose = self._to_lose, set()
        self._recover(wanted)

    def _recover(self, shards):
        if not shards:
            return
        watchers = self._who_recovers(self.step, shards, "what brings them back does not")
        try:
            self._bring_back(watchers, shards)
        except ShardsLost as lost:  # while they came back: all come back once more
            self._lost_shards.update(lost.shards)
            self._recover({*shards, *lost.shards})
            return
        # Only now: if no watcher brings them back, the next run begins with them.
        self._lost_shards = self._lost_shards.difference(shards)

    def _save_cut(self):
        while save := self._cuts.at(self.step):
            self._recover(self._lost_shards)
            try:
                save(self._state)
            except ShardsLost as lost:  # it comes again when they are back
                self._lost_shards.update(lost.shards)
            finally:
                if not self._lost_shards:
                    self._cuts.tell_begun(self.step)

    def _recover_met(self, shards):
        self._lost_shards.update(shards)
        in_hook, self._in_hook = self._in_hook, False  # what recovers asks for the state
        try:
            self._recover(self._lost_shards)
        finally:
            self._in_hook = in_hook

    def _run_hook(self, hook, plans, metrics):
        given, self._in_hook = self._state, True
        try:
            found = run_hooks((hook,), given, self.step, plans, metrics)
        finally:
            self._in_hook = False
        # `exclusive` within the hook has replaced the tables, and those that the hook was given may be donated.
        changed = found.tables is given.tables and self._state.tables is not given.tables
        self._state = found._replace(tables=self._state.tables) if changed else found

    def exclusive(self, change: Callable[[Tables], Tables]) -> None:
        """Replaces the tables by change(tables).

        Args:
          change: (tables) -> tables, of the same spec; device tables that are donated on the way are gone. It is called
            again if it meets lost shards, when watchers have brought them back.

        Raises:
          ValueError: it returns no such tables, which changes nothing; one is at work already.
          ShardsLost: shards were lost, and no watcher can recover them.
        """
        if self._alone:
            raise ValueError("`exclusive` within `exclusive`: the tables are yours already.")
        changed = self._changed_when_whole(change)
        if getattr(changed, "spec", None) is None or changed.spec.digest != self._state.tables.spec.digest:
            raise ValueError(f"the change returned a {type(changed).__name__}: tables of the same spec are wanted.")
        self._state = self._state._replace(tables=changed)
        if not self.running:  # a change outside of a run answers for their shards
            self._lost_shards = set()

    def _changed(self, change):
        self._alone = True
        try:
            return self._or_lost(change, self._state.tables)
        finally:
            self._alone = False

    def cut(self, step: int, save: Callable[[TrainState], Any], unreached: Literal["warn", "ignore"] = "warn") -> None:
        """Announces that save(state) is to be called after a step; training waits for it.

        Args:
          step: a step that is not committed yet.
          save: (TrainState) -> anything.
          unreached: whether leaving a run warns that the step was not reached; it stays announced for the next run.

        Raises:
          ValueError: the step is committed, or has a cut already.
        """
        self._cuts.announce(step, self.step, Cut(save, unreached))

    def lose(self, shards: Sequence[int]) -> None:
        """Says in a hook that shards are lost; they are recovered after the step and its cut.

        Raises:
          ValueError: there is no such shard; nothing runs.
        """
        self._to_lose |= checked_shards(self.tables.spec, shards, self.running)

    def reset(self, state: TrainState) -> None:
        """Goes on from another state, whose step is that of its dense half; what was announced or lost is forgotten.

        Watchers that have `restarted(state)` are told before, and may refuse.
        """
        if self.running:
            raise ValueError("reset within a run: leave the loop, or close the engine, first.")
        check_not_donated(state)
        if state.tables.spec.digest != self.tables.spec.digest:
            raise ValueError("reset to tables of another spec: make a new engine for them.")
        notify_restarted(self._watchers, state)
        before, self._state, self.step = self.step, state, int(state.dense.step)
        self._losses, self._lost_shards, self._to_lose = Losses(), set(), set()
        self._cuts.forget(before)  # last, as it may warn

    def _end(self):
        generator = self._generator()
        for end in (generator.close if generator is not None else lambda: None, self._losses.check):
            try:
                end()
            except Exception as failure:
                self._untold.append(failure)
        return self._take_untold()
