"""Where the tables of a pipeline stand beside its dense state, and the tables that a yielded state carries: they refuse
while they lag. Tables are in one run at a time, whatever objects and attached files lead to them.

Legend: S shards.
"""

import os
import threading
import weakref
from typing import Any

import numpy as np

from jaxrec.embedding import HostTables


class BrokenPipeline(RuntimeError):
    """Rows that were committed are lost: the dense state and the tables stand at different steps
    for good.

    Attributes:
      dense_step: steps that the dense state has seen; None if it is gone with the update that
        failed.
      table_steps: for each shard the step at which it stands; None for a write that was cut short,
        and in async, semisync and with `skip_rewritten`, where no write is a whole batch's.
    """

    def __init__(self, dense_step: int | None, table_steps: list[int | None], why: BaseException):
        where = {*table_steps}
        if len(where) == 1:
            tables = f"the tables {_at(table_steps[0])}"
        else:
            tables = "of the tables " + ", ".join(f"shard {s} {_at(step)}" for s, step in enumerate(table_steps))
        gone = "is gone (it was given to the update that failed)"
        super().__init__(
            f"this pipeline is broken, as rows were lost ({type(why).__name__}: {why!s:.200}). The dense state "
            f"{gone if dense_step is None else 'stands ' + _at(dense_step)}, {tables:.400}. Restore the last image, "
            "into `pipeline.tables` or new tables, and give it to `reset` or to a new Pipeline."
        )
        self.dense_step, self.table_steps = dense_step, table_steps


def _at(step):
    return "at no step" if step is None else f"at step {step}"


class TableProgress:
    """Where the tables of a pipeline stand beside its dense state; views ask it, and it outlives
    the pipeline.

    Args:
      tables: HostTables themselves.
      counted: whether each batch puts all its rows: then the tables' own counters say where a shard
        stands.
    """

    def __init__(self, tables: HostTables, counted: bool):
        self.tables, self.counted, self.running = tables, counted, False
        _all.add(self)

    def begin(self, scheduler, step: int) -> None:
        """Batches are counted anew, from a step at which the tables stand."""
        self.scheduler, self.first_step = scheduler, step
        self.mark_current()

    @property
    def step(self) -> int:
        """How many steps the dense state has seen."""
        return self.first_step + self.scheduler.committed - self.scheduler.first

    def mark_current(self) -> None:
        """The tables stand where the dense state does."""
        self.current_at: int | None = self.step  # None if another run has begun over them since
        self.puts = self.tables.steps[:, 1].copy()

    def untouched(self) -> bool:
        """Whether the rows are those of `mark_current`, or changed by the one that `exclusive` has given them to."""
        return self.scheduler.paused or np.array_equal(self.tables.steps[:, 1], self.puts)

    def begin_run(self) -> None:
        """A run begins: to all other pipelines over these tables they have gone on.

        Raises:
          ValueError: another run goes on.
        """
        with _lock:
            self.refuse_others(self.tables)
            for other in self._others(self.tables):
                other.current_at = None
            self.running = True

    def refuse_others(self, tables: HostTables) -> None:
        """Raises if the run of another pipeline goes on over some tables.

        Raises:
          ValueError: it says what to do.
        """
        if any(other.running for other in self._others(tables)):
            raise ValueError(
                "another pipeline is running over these tables: exhaust or close its run first; they may take turns."
            )

    def _others(self, tables):
        return [other for other in list(_all) if other is not self and _same_rows(other.tables, tables)]

    def refuse_broken(self) -> None:
        """Raises BrokenPipeline, from what broke it, if rows were lost."""
        if (error := self.scheduler.error_after_commit) is not None:
            dense_step = None if self.scheduler.dense_lost else self.step
            raise BrokenPipeline(dense_step, self.table_steps(), error) from error

    def table_steps(self) -> list[int | None]:
        """For each shard the step at which it stands; None where nothing says so."""
        if not self.counted or self.current_at is None:
            return [None] * len(self.puts)
        return [
            self.current_at + int(done - before) if begun == done else None
            for (begun, done), before in zip(self.tables.steps, self.puts, strict=True)
        ]


# Of all pipelines, and of those that were collected by a thread of their own, until their threads have ended.
_all: weakref.WeakSet[TableProgress] = weakref.WeakSet()
_lock = threading.Lock()


def _same_rows(one, other):
    """Whether two tables lead to the same rows: views share the counters, attached tables the directory."""
    files = [one.directory, other.directory]
    return one.steps is other.steps or (None not in files and len({*map(os.path.realpath, files)}) == 1)


class StaleTables:
    """The tables of a state that a pipeline yields: they do what the tables themselves do while these stand where the
    dense state does, and refuse while they lag; `spec` and `layout` are always there.

    Args:
      progress: of the pipeline.
      step: of the state.
    """

    in_place = True

    def __init__(self, progress: TableProgress, step: int):
        self.spec, self.layout = progress.tables.spec, progress.tables.layout
        self._progress, self._step = progress, step

    def themselves(self) -> HostTables:
        """The tables without a guard.

        Raises:
          BrokenPipeline: rows are lost.
          ValueError: they do not stand at the step of the state.
        """
        self._progress.refuse_broken()
        if not (self._step == self._progress.step == self._progress.current_at and self._progress.untouched()):
            raise ValueError(
                f"these tables stood at step {self._step}, and lag behind the dense state or have gone on: use the "
                "newest state, and call pipeline.drain() before reading, evaluating or saving. (`exclusive`, the save "
                "of a cut and what `drain` returns have the tables themselves.)"
            )
        return self._progress.tables

    def __getattr__(self, name: str) -> Any:
        return getattr(self.themselves(), name)

    def __reduce__(self):
        return _itself, (self.themselves(),)  # a copy is of the tables themselves

    def __repr__(self) -> str:
        return f"StaleTables(of the state of step {self._step})"


def _itself(tables):
    return tables
