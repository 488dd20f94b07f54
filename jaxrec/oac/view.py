"""Progress of a pipeline's tables relative to its dense state, and guarded tables that refuse access while they lag.

Only one run at a time may use the same rows, through whatever table objects or attached files.

Legend: S shards.
"""

import os
import threading
import weakref
from typing import Any

import numpy as np

from jaxrec.embedding import HostTables


class BrokenPipeline(RuntimeError):
    """Committed rows are lost: dense state and tables permanently differ in their steps.

    Attributes:
      dense_step: step of the dense state; None if it was donated to the failed update.
      table_steps: step of each shard; None after an interrupted write, and always in async, in semisync and with
        `skip_rewritten`, where a write does not store all rows of a batch.
    """

    def __init__(self, dense_step: int | None, table_steps: list[int | None], why: BaseException):
        gone = "is gone (it was given to the update that failed)"
        super().__init__(
            f"this pipeline is broken, as rows were lost ({type(why).__name__}: {why!s:.200}). The dense state "
            f"{gone if dense_step is None else f'stands at step {dense_step}'}, the shards of the tables at steps "
            f"{table_steps!s:.400}. Restore the last image, into `pipeline.tables` or new tables, and give it to "
            "`reset` or to a new Pipeline."
        )
        self.dense_step, self.table_steps = dense_step, table_steps


class TableProgress:
    """Progress of a pipeline's tables relative to its dense state; queried by `GuardedTables`, and outlives the
    pipeline.

    `counted`: each batch puts all its rows, so that the put counters of the tables give the step of each shard.
    """

    def __init__(self, tables: HostTables, counted: bool):
        self.tables, self.counted, self.running = tables, counted, False
        _all.add(self)

    def begin(self, scheduler, step: int) -> None:
        """Start counting with a new scheduler, from the common step of tables and dense state."""
        self.scheduler, self.first_step = scheduler, step
        self.mark_current()

    @property
    def step(self) -> int:
        """Step of the dense state."""
        return self.first_step + self.scheduler.committed - self.scheduler.first

    def mark_current(self) -> None:
        """Mark the tables as matching the dense state."""
        self.current_at: int | None = self.step  # None if another run has begun over the tables since
        self.puts = self.tables.puts[:, 1].copy()

    def untouched(self) -> bool:
        """Return whether nothing was put since `mark_current`, except by a change within `exclusive`."""
        return self.scheduler.paused or np.array_equal(self.tables.puts[:, 1], self.puts)

    def begin_run(self) -> None:
        """Begin a run, and mark the tables as changed for all other pipelines over them."""
        with _lock:
            self.refuse_others(self.tables)
            for other in self._others(self.tables):
                other.current_at = None
            self.running = True

    def refuse_others(self, tables: HostTables) -> None:
        """Refuse tables over which another pipeline is running."""
        if any(other.running for other in self._others(tables)):
            raise ValueError(
                "another pipeline is running over these tables: exhaust or close its run first; they may take turns."
            )

    def _others(self, tables):
        return [other for other in list(_all) if other is not self and _same_rows(other.tables, tables)]

    def refuse_broken(self) -> None:
        """Raise BrokenPipeline if rows are lost, with the error that lost them as its cause."""
        if (error := self.scheduler.error_after_commit) is not None:
            dense_step = None if self.scheduler.dense_lost else self.step
            raise BrokenPipeline(dense_step, self.table_steps(), error) from error

    def table_steps(self) -> list[int | None]:
        """Return the step of each shard, None if unknown."""
        if not self.counted or self.current_at is None:
            return [None] * len(self.puts)
        return [
            self.current_at + int(done - before) if begun == done else None
            for (begun, done), before in zip(self.tables.puts, self.puts, strict=True)
        ]


# Progress of all live pipelines, and of garbage-collected ones until their threads have ended.
_all: weakref.WeakSet[TableProgress] = weakref.WeakSet()
_lock = threading.Lock()


def _same_rows(one, other):
    """Return whether two tables hold the same rows: views share the counters, attached tables the directory."""
    files = [one.directory, other.directory]
    return one.puts is other.puts or (None not in files and len({*map(os.path.realpath, files)}) == 1)


class GuardedTables:
    """Guarded tables of a yielded state: they act as the pipeline's tables while these match it, and raise otherwise.

    `spec` and `layout` are always available.
    """

    in_place = True

    def __init__(self, progress: TableProgress, step: int):
        self.spec, self.layout = progress.tables.spec, progress.tables.layout
        self._progress, self._step = progress, step

    def unguarded(self) -> HostTables:
        """Return the unguarded tables; raise unless they are at the step of the state."""
        self._progress.refuse_broken()
        if not (self._step == self._progress.step == self._progress.current_at and self._progress.untouched()):
            raise ValueError(
                f"these tables stood at step {self._step}, and lag behind the dense state or have gone on: use the "
                "newest state, and call pipeline.drain() before reading, evaluating or saving. (`exclusive`, the save "
                "of a snapshot and what `drain` returns have the tables themselves.)"
            )
        return self._progress.tables

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded(), name)

    def __reduce__(self):
        return _itself, (self.unguarded(),)  # a copy is of the unguarded tables

    def __repr__(self) -> str:
        return f"GuardedTables(of the state of step {self._step})"


def _itself(tables):
    return tables
