"""The engine: what takes a state from batch to batch, as the techniques see it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from jaxrec.embedding import Tables
from jaxrec.types import Batch, TrainState


class Engine(Protocol):
    """What trains over tables in some home: `Serial`, and `oac.Pipeline`, whose results are the same bits.

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
        """Says that shards are lost; after the step and its cut whoever was entered and can `recover` does so."""

    def reset(self, state: TrainState) -> None:
        """Goes on from another state, between two runs; watchers that have `restarted(state)` are told before."""

    def enter(self, watcher: AbstractContextManager) -> Any:
        """Enters a context manager that is left when this one is, and behind it."""

    def replace_lost(self, shards: Iterable[int], but: Any) -> None:
        """Has the watchers before one recover shards that were lost while that one restores all rows."""
