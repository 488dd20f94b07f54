"""What all engines have alike: one run at a time, a `with` block, and who watches them."""

import contextlib
import weakref
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

from jaxrec.announced import Announced
from jaxrec.asked import Tries, check_watcher
from jaxrec.errors import first, note
from jaxrec.types import ShardsLost

Entered = TypeVar("Entered")


class Watched:
    """An engine's run and `with` block, and the watchers that its end leaves."""

    _name = "engine"  # in what is said to users
    _cuts: Announced
    step: int

    def __init__(self):
        # Weak: who drops the iterator of a run has left it.
        self._generator: Callable = lambda: None
        self._untold: list[BaseException] = []  # what went wrong in a run, until somebody is told
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
        """Ends the run, if one goes on; what went wrong in it that nobody was told. Engines say how."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the run, if one goes on.

        Raises:
          Whatever went wrong in it, unless it was raised before; FloatingPointError for a loss that
            nobody has looked at yet.
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

    def enter(self, watcher: AbstractContextManager[Entered]) -> Entered:
        """Enters a context manager, which is left when the `with` block of this engine ends.

            with engine:
                recovery = engine.enter(Recovery(engine, ...))

        It is left behind the run: when that is closed, and its cuts are saved. Of several the last
        is left first. If it has `recover(shards)`, that is called when shards are lost: see `lose`.

        Args:
          watcher: with `__enter__` and `__exit__`, which is told the error that ends the block, if
            there is one.

        Returns:
          What its `__enter__` has returned.

        Raises:
          ValueError: outside of a `with` block, or no context manager.
        """
        if not self._within:
            raise ValueError(f"enter a watcher within `with {self._name}:`, whose end will leave it.")
        check_watcher(watcher)
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
        """What `_or_lost` finds, with nobody else at the tables. Engines say how."""
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

    @contextlib.contextmanager
    def _bringing_back(self):
        """A `with` block in which shards come back."""
        before, self._recovering = self._recovering, True
        try:
            yield
        finally:
            self._recovering = before

    def _who_recovers(self, step: int, shards: Iterable[int], again: str, otherwise: str = "") -> list[Any]:
        """The watchers that can bring shards back.

        Args:
          step: that the engine has committed.
          shards: the lost ones.
          again: what is said when they are lost at one step again and again.
          otherwise: what is said behind the remedy when there is nobody.

        Raises:
          ShardsLost: there is nobody, or it is one time too many.
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
          but: the watcher that restores; those behind it are not asked.

        Raises:
          ShardsLost: nobody is before it, or it is one time too many at this step.
        """
        watchers = self._who_recovers(self.step, shards, "the servers that restore them die")
        before = watchers[: watchers.index(but)] if but in watchers else watchers
        if not before:
            raise ShardsLost(shards, f"while all were restored: {self._name}.enter(...) what replaces them first")
        for watcher in before:
            watcher.recover(tuple(sorted(shards)))
