"""Who watches an engine: entered with it, asked to bring lost shards back, and left behind its run."""

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Self

from jaxrec.asked import Tries, check_watcher
from jaxrec.types import ShardsLost

_REMEDY = "no watcher brings them back: engine.enter(Recovery(...)) first"


class Watched:
    """An engine's `with` block, and the watchers that its end leaves. `Serial` is the one that has this."""

    step: int

    def __init__(self):
        self._tries = Tries()
        self._watchers: list[Any] = []
        self._open = contextlib.ExitStack()
        self._within = 0  # how many `with` blocks there are

    def _end(self) -> None:
        """Ends the run, if one goes on; the engine says how."""

    def _warn(self) -> None:
        """Says what the run was left without; the engine knows."""

    def enter(self, watcher: AbstractContextManager) -> Any:
        """Enters a context manager, which is left when the `with` block of this engine ends.

        If it has `recover(shards)`, that is called when shards are lost.

        Raises:
          ValueError: outside of a `with` block, or no context manager.
        """
        if not self._within:
            raise ValueError("enter a watcher within `with engine:`, whose end will leave it.")
        check_watcher(watcher)
        entered = self._open.enter_context(watcher)
        self._watchers.append(watcher if hasattr(watcher, "recover") else entered)
        return entered

    def __enter__(self) -> Self:
        self._within += 1
        return self

    def __exit__(self, kind, error, trace) -> bool:
        self._within -= 1
        entered = contextlib.ExitStack()
        if not self._within:
            entered, self._watchers = self._open.pop_all(), []
        try:
            self._close_within(error)
        except BaseException as failure:
            # Watchers leave last, and are told what ends the block.
            if not entered.__exit__(type(failure), failure, failure.__traceback__):
                raise
            return False
        return bool(entered.__exit__(kind, error, trace))

    def _close_within(self, error):
        try:
            self._end()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"And leaving the engine found: {failure}")
        if error is None:
            self._warn()

    def _recover(self, shards: Iterable[int]) -> None:
        """Has all watchers that can bring shards back."""
        if not shards:
            return
        watchers = [watcher for watcher in self._watchers if hasattr(watcher, "recover")]
        if not watchers:
            raise ShardsLost(shards, _REMEDY)
        self._tries.count(self.step, shards, "what brings them back does not")
        for watcher in watchers:
            watcher.recover(tuple(sorted(shards)))
