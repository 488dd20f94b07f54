"""The engine: what takes a state from batch to batch. `Serial` trains one after the other, in any
home of the rows.

Legend: B batch, U padded unique rows per shard.
"""

import collections
import contextlib
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from jaxrec.announced import Announced, Cut
from jaxrec.boundary import check_not_donated
from jaxrec.bounds import whole_number
from jaxrec.data.loader import prefetch
from jaxrec.embedding import Tables
from jaxrec.interrupts import raise_again, uninterrupted
from jaxrec.step import check_finite, run_hooks
from jaxrec.stream import Streams, in_pairs, planned_of
from jaxrec.types import Batch, ShardsLost, TrainState


class Engine(Protocol):
    """What trains over tables in some home: `Serial`, and `oac.Pipeline`, whose results are the
    same bits.

    At each step the order is: commit, hooks in their order, the cut of the step if one is
    announced, and then what was lost is recovered. An engine is a context manager: leaving it ends
    its run, waits for its cuts, and then leaves whatever was entered with `enter`.

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
        """Replaces the tables by change(tables), alone with them; for the thread that iterates,
        also in a hook."""

    def cut(self, step: int, save: Callable[[TrainState], Any], unreached: Literal["warn", "ignore"] = "warn") -> None:
        """Announces that a state is to be saved after a step that is not committed yet."""

    def lose(self, shards: Sequence[int]) -> None:
        """Says that shards are lost; after the step and its cut whoever was entered and can
        `recover` does so."""

    def reset(self, state: TrainState) -> None:
        """Goes on from another state, between two runs."""

    def enter(self, watcher: AbstractContextManager) -> Any:
        """Enters a context manager that is left when this one is, and behind it."""


class Serial:
    """Trains one batch after the other, over tables in any home; plans are made ahead, in a thread.

        with Serial(state, train_step) as engine:
            for state, metrics in engine.run(batches, hooks=[...]):
                ...
        state = engine.state

    Args:
      state: TrainState; it is donated.
      train_step: (state, plans, batch) -> state', metrics, as from `make_train_step`.

    Whatever ends a run, the engine keeps the state of the last step that was committed, with what
    the last whole hook has returned; a Ctrl-C or a SIGTERM waits for the step that is being
    committed. An iterator that a run has left begins, if it comes again, with what was taken from
    it and not trained.

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

    def __init__(self, state: TrainState, train_step: Callable):
        check_not_donated(state)
        self._state, self._train_step = state, train_step
        self._run: Callable = lambda: None  # weak: who drops the iterator of a run has left it
        self._streams = Streams()
        self._cuts = Announced()
        self._lost: list[int] = []
        self._watchers: list[Any] = []
        self._open = contextlib.ExitStack()
        self._in_hook = False
        self.step = int(state.dense.step)

    @property
    def state(self) -> TrainState:
        """Between two steps; a hook is given the state, and may not ask for it here."""
        if self._in_hook:
            raise ValueError(
                "engine.state was read in a hook: take the state that it was given, as this one may be older."
            )
        return self._state

    @property
    def tables(self) -> Tables:
        """As they are now."""
        return self._state.tables

    @property
    def running(self) -> bool:
        """Whether a run has begun and not ended."""
        generator = self._run()
        return generator is not None and generator.gi_frame is not None

    def run(
        self, batches: Iterable[Batch], hooks: Sequence[Callable] = (), check_every_steps: int = 100
    ) -> Generator[tuple[TrainState, dict], None, None]:
        """Trains on all batches.

        Args:
          batches: Batch after Batch, of one size; planned, and taken from their iterator, up to
            three ahead.
          hooks: (state, step, plans, metrics) -> state, in order after every step.
          check_every_steps: how often the losses are fetched and checked; they are, too, at the end
            of a run.

        Yields:
          (TrainState, metrics) after every batch; the state is donated to the next step.

        Raises:
          FloatingPointError: a loss is not finite; names the step.
          ShardsLost: shards were lost, and nobody who was entered can recover them.
          ValueError: a run goes on; what comes is no Batch; as the step.
        """
        self._refuse_running()
        stream = self._streams.of(batches, patience_seconds=10.0)
        return self._remember(self._over_stream(stream, hooks, check_every_steps))

    def steps(
        self, pairs: Iterable[tuple], hooks: Sequence[Callable] = (), check_every_steps: int = 100
    ) -> Generator[tuple[TrainState, dict], None, None]:
        """As `run`, over (Batch, {stack: Plan}) pairs that were planned before."""
        self._refuse_running()
        return self._remember(self._over_pairs(in_pairs(pairs), hooks, check_every_steps))

    def _refuse_running(self):
        if self.running:
            raise ValueError("this engine is running: exhaust or close the iterator of the run before.")

    def _remember(self, generator):
        self._run = weakref.ref(generator)
        return generator

    def _over_stream(self, stream, hooks, check_every_steps):
        taken: collections.deque = collections.deque()  # planned, and not given to a step yet
        # From here on the stream is this run's: who wants the same iterator waits until it is free
        # again.
        stream.free.clear()
        try:
            with contextlib.closing(prefetch(planned_of(stream, self.tables.spec, taken), 2)) as pairs:
                yield from self._over_pairs(pairs, hooks, check_every_steps, taken.popleft)
        finally:
            # What was planned and not trained goes back in front, in its order, so that the next
            # run begins with it and no batch of the stream is lost.
            stream.waiting.extendleft(reversed(taken))
            stream.free.set()
            stream.rest()

    def _over_pairs(self, pairs, hooks, check_every_steps, tell=lambda: None):
        whole_number("check_every_steps", check_every_steps)
        # Losses are fetched in lots: to look at each would make every step wait for the device.
        losses: list = []
        for batch, plans in pairs:
            # A step donates the state that it is given: between its call and this assignment there
            # would be none.
            with uninterrupted(again=False) as asked:
                tell()  # before the step: a batch that it refuses does not come again
                self._state, metrics = self._train_step(self._state, plans, batch)
                self.step += 1
                losses.append(metrics["loss"])
            try:
                self._after_step(hooks, plans, metrics)
            finally:
                raise_again(asked)
            yield self._state, metrics
            if len(losses) >= check_every_steps:
                check_finite(losses, self.step)
                losses = []
        check_finite(losses, self.step)
        self._cuts.warn(self.step)

    def _after_step(self, hooks, plans, metrics):
        # Hooks before the cut: what they make of the dense state belongs to the step that is saved.
        for hook in hooks:
            self._run_hook(hook, plans, metrics)
        if save := self._cuts.at(self.step):
            # Before the save: one that raises is not tried again when the run goes on, as its step
            # is over.
            self._cuts.tell_begun(self.step)
            save(self._state)
        self._recover()

    def _run_hook(self, hook, plans, metrics):
        # A hook may donate what it is given: `state` is refused until it has returned another one.
        given, self._in_hook = self._state, True
        try:
            found = run_hooks((hook,), given, self.step, plans, metrics)
        finally:
            self._in_hook = False
        # `exclusive` within the hook has replaced the tables, and those that the hook was given may
        # be donated.
        changed = found.tables is given.tables and self._state.tables is not given.tables
        self._state = found._replace(tables=self._state.tables) if changed else found

    def _recover(self):
        # Taken off first: a recovery that raises must not find the same shards again at the next
        # step. Behind the cut: a shard that is lost at this step comes back with what was just
        # saved of it.
        lost, self._lost = sorted(set(self._lost)), []
        watchers = [watcher.recover for watcher in self._watchers if hasattr(watcher, "recover")]
        if lost and not watchers:
            raise ShardsLost(lost)
        for recover in watchers if lost else ():
            recover(lost)

    def exclusive(self, change: Callable[[Tables], Tables]) -> None:
        """Replaces the tables by change(tables); device tables that are donated on the way are
        gone."""
        self._state = self._state._replace(tables=change(self._state.tables))

    def cut(self, step: int, save: Callable[[TrainState], Any], unreached: Literal["warn", "ignore"] = "warn") -> None:
        """Announces that save(state) is to be called after a step; training waits for it.

        Args:
          step: a step that is not committed yet.
          save: (TrainState) -> anything.
          unreached: whether leaving a run warns that the step was not reached; it stays announced
            for the next run.

        Raises:
          ValueError: the step is committed, or has a cut already.
        """
        self._cuts.announce(step, self.step, Cut(save, unreached))

    def lose(self, shards: Sequence[int]) -> None:
        """Says in a hook that shards are lost; they are recovered after the step and its cut."""
        self._lost.extend(shards)

    def reset(self, state: TrainState) -> None:
        """Goes on from another state, whose step is that of its dense half; what was announced or
        lost is forgotten.

        Raises:
          ValueError: a run goes on; the state was donated before.
        """
        if self.running:
            raise ValueError("reset within a run: leave the loop, or close the engine, first.")
        check_not_donated(state)
        self._state, self.step = state, int(state.dense.step)
        self._cuts.warn(self.step)
        # The steps of these cuts are those of the state that was left.
        self._cuts.forget()
        self._lost = []

    def enter(self, watcher: AbstractContextManager) -> Any:
        """Enters a context manager, which is left when the engine is."""
        entered = self._open.enter_context(watcher)
        self._watchers.append(watcher)
        return entered

    def __enter__(self) -> "Serial":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close()
        self._open.__exit__(kind, error, trace)

    def close(self) -> None:
        """Ends the run, if one goes on; the state stays."""
        if (generator := self._run()) is not None:
            # Before what was entered is left: a recovery must still be there while the run ends.
            generator.close()
        self._cuts.warn(self.step)
