"""Which run uses which rows, and the error for rows that a run has lost.

Rows in host memory or at servers are changed in place, so two runs over the same rows would overwrite each other's
updates. One run at a time may use them, through whatever table objects or attached files.

Legend: S shards.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator

import numpy as np

from jaxrec.embedding import HostedTables


class BrokenEngine(RuntimeError):
    """Rows of a step are lost: dense state and tables permanently differ in their steps.

    Attributes:
      dense_step: step of the dense state; None if it was donated to the failed step.
      table_steps: step of each shard; None after an interrupted write, for tables on a device, and always in async and
        semisync, where a write does not store all rows of a batch.
    """

    def __init__(self, dense_step: int | None, table_steps: list[int | None], why: BaseException):
        gone = "is gone (it was given to the step that failed)"
        super().__init__(
            f"this engine is broken, as rows were lost ({type(why).__name__}: {why!s:.200}). The dense state "
            f"{gone if dense_step is None else f'stands at step {dense_step}'}, the shards of the tables at steps "
            f"{table_steps!s:.400}. Restore the last image, into new tables, or into `engine.tables` if these are on "
            "the host, and give it to `reset` or to a new engine."
        )
        self.dense_step, self.table_steps = dense_step, table_steps


class TableUse:
    """The use of tables by the runs of one engine, and the step at which the tables are.

    Attributes:
      current_at: step of the dense state that the tables match; None if another run has used them since.
    """

    current_at: int | None = None

    def __init__(self, tables: HostedTables):
        self.tables, self.running = tables, False
        _all.add(self)

    def mark_at(self, step: int) -> None:
        """Mark the tables as matching the dense state of a step."""
        self.current_at, self.puts = step, self.tables.puts.copy()

    def changed(self) -> bool:
        """Return whether a write has begun or ended since `mark_at`."""
        return not np.array_equal(self.tables.puts, self.puts)

    def table_steps(self) -> list[int | None]:
        """Return the step of each shard, None if unknown."""
        if self.current_at is None:
            return [None] * len(self.puts)
        return [
            self.current_at + int(done - before) if begun == done else None
            for (begun, done), before in zip(self.tables.puts, self.puts[:, 1], strict=True)
        ]

    def begin_run(self) -> None:
        """Begin a run, and mark the tables as changed for all other engines over them."""
        with _lock:
            self.refuse_others(self.tables)
            for other in self._others(self.tables):
                other.current_at = None
            self.running = True

    def refuse_others(self, tables: HostedTables) -> None:
        """Refuse tables over which another engine is running."""
        if any(other.running for other in self._others(tables)):
            raise ValueError(
                "another engine is running over these tables: exhaust or close its run first; they may take turns."
            )

    @contextlib.contextmanager
    def a_run(self) -> Iterator[None]:
        """Use the tables for a run in this block."""
        try:
            self.begin_run()
            yield
        finally:
            self.running = False

    def _others(self, tables):
        return [other for other in list(_all) if other is not self and _same_rows(other.tables, tables)]


# Of all live engines, and of garbage-collected ones until their threads have ended.
_all: weakref.WeakSet[TableUse] = weakref.WeakSet()
_lock = threading.Lock()


def _same_rows(one, other):
    """Return whether two tables hold the same rows: views share the counters, attached tables the directory."""
    files = [one.directory, other.directory]
    return one.puts is other.puts or (None not in files and len({*map(os.path.realpath, files)}) == 1)
