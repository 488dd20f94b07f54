"""The serial engine: one batch after the other, over tables in any home of the rows.

Legend: B batch, U padded unique rows per shard.
"""

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal

from jaxrec.ahead import Ahead, in_pairs
from jaxrec.announced import Announced, Cut
from jaxrec.asked import Losses, check_change, check_hooks, checked_capacity, checked_shards, tell_restarted
from jaxrec.boundary import check_is_state, check_not_donated
from jaxrec.bounds import whole_number
from jaxrec.embedding import Tables
from jaxrec.interrupts import raise_again, uninterrupted
from jaxrec.step import run_hooks
from jaxrec.stream import Streams
from jaxrec.types import Batch, ShardsLost, TrainState
from jaxrec.watched import Watched


class Serial(Watched):
    """Trains one batch after the other, over tables in any home; plans are made ahead, in a thread.

        with Serial(state, train_step) as engine:
            for state, metrics in engine.run(batches, hooks=[...]): ...
        state = engine.state

    Args:
      state: TrainState; it is donated.
      train_step: (state, plans, batch) -> state', metrics, as from `make_train_step`.
      capacity: {stack: U} of the plans to begin with: `capacity_of` the last ones, if a run is to go on bit for bit.

    Whatever ends a run, the state is that of the last step committed, with what the last whole hook has returned; a
    Ctrl-C or a SIGTERM waits for the commit. An iterator that comes again begins with what was taken and not trained.

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
        self._state, self._train_step = _checked(state), train_step
        self._capacity = None if capacity is None else checked_capacity(state.tables.spec, capacity)
        self._streams, self._cuts = Streams(), Announced()
        self._losses, self._in_hook, self._alone = Losses(), False, False
        self._gone, self._lost = set[int](), set[int]()  # shards: of their home, and by the wish of a hook
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
          ShardsLost: shards were lost, and nobody who was entered can recover them.
          ValueError: a run goes on; what comes is no Batch; as the step.
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
        _check_step(self._train_step)
        return check_hooks(hooks)

    def _over_stream(self, stream, hooks, check_every_steps):
        with Ahead(stream, self.tables.spec, self._capacity) as ahead:
            yield from self._over_pairs(ahead, hooks, check_every_steps, ahead.forget)

    def _over_pairs(self, pairs, hooks, check_every_steps, tell=lambda: None):
        whole_number("check_every_steps", check_every_steps)
        try:
            self._settle()  # what a run before this one was left with
            for batch, plans in pairs:
                metrics = self._train(plans, batch, hooks, tell)
                yield self._state, metrics
                self._losses.check(check_every_steps)
        finally:
            # A step that is committed keeps its cut, though its hooks failed or were interrupted.
            if not self._gone:
                with uninterrupted():
                    self._save_cut()
        self._losses.check()
        self._cuts.warn(self.step)

    def _train(self, plans, batch, hooks, tell):
        metrics = None
        while metrics is None:
            # A step donates the state that it is given: between its call and the assignment there would be none.
            with uninterrupted(again=False) as asked:
                metrics = self._commit(plans, batch, tell)
            try:
                for hook in () if metrics is None else hooks:
                    self._run_hook(hook, plans, metrics)
                self._settle()
            finally:
                raise_again(asked)
        return metrics

    def _commit(self, plans, batch, tell):
        """The metrics of a step; None if its rows cannot be read: it comes again when they are back."""
        try:
            done = self._train_step(self._state, plans, batch)
        except ShardsLost as lost:
            self._gone.update(lost.shards)
            if lost.done is None:
                return None
            done = lost.done
        except BaseException:
            tell()  # a batch that the step refuses does not come again
            raise
        tell()
        self._state, metrics = done
        self.step += 1
        self._losses.note(self.step, metrics)
        return metrics

    def _settle(self):
        """What belongs to a step behind its hooks."""
        self._recover_gone()
        self._save_cut()
        # Behind the cut: whoever recovers finds it saved.
        lost, self._lost = self._lost, set()
        self._recover(lost)

    def _recover(self, shards):
        watchers = self._who_recovers(self.step, shards, "what brings them back does not") if shards else ()
        try:
            with self._bringing_back():
                for watcher in watchers:
                    watcher.recover(tuple(sorted(shards)))
        except ShardsLost as lost:  # while they came back: all come back once more
            self._gone.update(lost.shards)
            self._recover({*shards, *lost.shards})
            self._gone.difference_update(lost.shards)

    def _save_cut(self):
        while save := self._cuts.at(self.step):
            self._recover_gone()
            try:
                save(self._state)
            except ShardsLost as lost:  # it comes again when they are back
                self._gone.update(lost.shards)
            finally:
                if not self._gone:
                    self._cuts.tell_begun(self.step)

    def _recover_gone(self):
        self._recover(self._gone)
        self._gone = set()  # only now: if nobody brings them back, the next run begins with them

    def _recover_met(self, shards):
        self._gone.update(shards)
        in_hook, self._in_hook = self._in_hook, False  # what recovers asks for the state
        try:
            self._recover_gone()
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
            again if it meets lost shards, when those who were entered have brought them back.

        Raises:
          ValueError: it is no function, or returns no such tables, which changes nothing; one is at work already.
          ShardsLost: shards were lost, and nobody who was entered can recover them.
        """
        check_change(change)
        if self._alone:
            raise ValueError("`exclusive` within `exclusive`: the tables are yours already.")
        changed = self._changed_when_whole(change)
        if not hasattr(changed, "on_shards") or changed.spec.digest != self._state.tables.spec.digest:
            raise ValueError(f"the change returned a {type(changed).__name__}: tables of the same spec are wanted.")
        self._state = self._state._replace(tables=changed)
        if not self.running:  # whoever changes them then answers for their shards
            self._gone = set()

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

    def withdraw(self, step: int) -> None:
        """The cut of a step is not wanted any more; no harm if it was taken."""
        self._cuts.withdraw(step)

    def lose(self, shards: Sequence[int]) -> None:
        """Says in a hook that shards are lost; they are recovered after the step and its cut.

        Raises:
          ValueError: there is no such shard; nothing runs.
        """
        self._lost |= checked_shards(self.tables.spec, shards, self.running)

    def reset(self, state: TrainState) -> None:
        """Goes on from another state, whose step is that of its dense half; what was announced or lost is forgotten.

        Watchers that have `restarted(state)` are told before, and may refuse.

        Raises:
          ValueError: a run goes on; it is no state, was donated before, or is over tables of another spec.
        """
        if self.running:
            raise ValueError("reset within a run: leave the loop, or close the engine, first.")
        if _checked(state).tables.spec.digest != self.tables.spec.digest:
            raise ValueError("reset to tables of another spec: make a new engine for them.")
        tell_restarted(self._watchers, state)
        before, self._state, self.step = self.step, state, int(state.dense.step)
        self._losses, self._gone, self._lost = Losses(), set(), set()
        self._cuts.forget(before)  # last, as it may warn

    def _end(self):
        generator = self._generator()
        for end in (generator.close if generator is not None else lambda: None, self._losses.check):
            try:
                end()
            except Exception as failure:
                self._untold.append(failure)
        return self._take_untold()


def _checked(state):
    """A state that an engine can train."""
    check_is_state(state)
    check_not_donated(state)
    return state


def _check_step(train_step: Callable) -> None:
    """Refuses what cannot take a step.

    Raises:
      ValueError: it does not take (state, plans, batch).
    """
    try:
        inspect.signature(train_step).bind("state", "plans", "batch")
    except (TypeError, ValueError):
        raise ValueError(
            f"the train step {train_step!r:.200} must take (state, plans, batch): make it with `make_train_step`; an "
            "update from `make_update` is for a Pipeline."
        ) from None
