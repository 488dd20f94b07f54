"""Progress of a pipeline's tables relative to its dense state, and guarded tables that refuse access while they lag."""

from typing import Any

import numpy as np

from jaxrec.embedding import HostedTables
from jaxrec.oac.flight import Flight
from jaxrec.table_use import BrokenEngine, TableUse


class TableProgress(TableUse):
    """Progress of a pipeline's tables relative to its dense state; queried by `GuardedTables`, and outlives the
    pipeline.

    `flight` is that of the run, or of the last one; `step` that of the dense state.
    """

    def __init__(self, tables: HostedTables, flight: Flight, step: int):
        super().__init__(tables)
        self.flight, self.step = flight, step
        self.mark_current()

    def mark_current(self) -> None:
        """Mark the tables as matching the dense state."""
        self.mark_at(self.step)

    def untouched(self) -> bool:
        """Return whether nothing was put since `mark_current`, except by a change within `exclusive`."""
        return self.flight.paused or np.array_equal(self.tables.puts[:, 1], self.puts[:, 1])

    def refuse_broken(self) -> None:
        """Raise BrokenEngine if rows are lost, with the error that lost them as its cause."""
        if (error := self.flight.error) is not None:
            dense_step = None if self.flight.stages.dense_is_lost() else self.step
            raise BrokenEngine(dense_step, self.table_steps(), error) from error

    def table_steps(self) -> list[int | None]:
        """Return the step of each shard, None if unknown, as where a write does not put all rows of a batch."""
        return [None] * len(self.puts) if self.flight.options.adds else super().table_steps()


class GuardedTables:
    """Guarded tables of a yielded state: they act as the pipeline's tables while these match it, and raise otherwise.

    `spec` and `layout` are always available.
    """

    def __init__(self, progress: TableProgress, step: int):
        self.spec, self.layout = progress.tables.spec, progress.tables.layout
        self._progress, self._step = progress, step

    @property
    def hosted(self) -> HostedTables:
        """The unguarded tables; raises unless they are at the step of the state."""
        self._progress.refuse_broken()
        if not (self._step == self._progress.step == self._progress.current_at and self._progress.untouched()):
            raise ValueError(
                f"these tables stood at step {self._step}, and lag behind the dense state or have gone on: use the "
                "newest state, and call pipeline.drain() before reading, evaluating or saving. (`exclusive`, the save "
                "of a snapshot and what `drain` returns have the tables themselves.)"
            )
        return self._progress.tables

    def __getattr__(self, name: str) -> Any:
        return getattr(self.hosted, name)

    def __reduce__(self):
        return _itself, (self.hosted,)  # a copy is of the unguarded tables

    def __repr__(self) -> str:
        return f"GuardedTables(of the state of step {self._step})"


def _itself(tables):
    return tables
