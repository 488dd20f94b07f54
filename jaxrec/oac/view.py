"""Which run has the tables, where they stand beside the dense state, and the tables that a yielded
state carries: they refuse while they lag. Tables are in one run at a time, whatever objects and
attached files lead to them.

Legend: S shards.
"""

import contextlib
import gc
import itertools
import os
import threading
import weakref
from typing import Any

import numpy as np

from jaxrec.embedding import HostTables
from jaxrec.oac.scheduler import BatchScheduler

# {key of tables: (flow of the run, weak reference to its pipeline)}, and the number of the last run
# of each.
_running: dict[Any, tuple[BatchScheduler, weakref.ref]] = {}
_last: dict[Any, int] = {}
_numbers = itertools.count(1)
_lock = threading.RLock()  # the collector may leave a run, which comes in here, at any line


def _keys(tables):
    """What is the same for all that lead to the same rows: views share the counters, attached
    tables the directory."""
    files = [] if tables.directory is None else [os.path.realpath(tables.directory)]
    return [id(tables.steps), *files]


def begin_run(tables: HostTables, scheduler: BatchScheduler, pipeline: Any) -> int:
    """A run begins; returns its number.

    Raises:
      ValueError: another run goes on.
    """
    with _lock:
        check_alone(tables, scheduler)
        number, entry = next(_numbers), (scheduler, weakref.ref(pipeline))
        for key in _keys(tables):
            _running[key], _last[key] = entry, number
        return number


def end_run(scheduler: BatchScheduler) -> None:
    """A run has ended, and all that it committed is written."""
    with _lock:
        for key in [key for key, (user, _) in list(_running.items()) if user is scheduler]:
            _running.pop(key, None)


def check_alone(tables: HostTables, scheduler: BatchScheduler) -> None:
    """Raises if another run than that of this flow goes on over the tables.

    Raises:
      ValueError: it says what to do.
    """
    if _others(tables, scheduler) and any(user.over() for user in _others(tables, scheduler)):
        gc.collect()  # a pipeline that nobody holds any more may wait to be collected
    if _others(tables, scheduler):
        raise ValueError(
            "another pipeline is running over these tables: exhaust or close its run first; they may take turns."
        )


def _others(tables, scheduler):
    with _lock:
        found = [_running[key] for key in _keys(tables) if key in _running]
    # Whoever was collected by one of its own threads has ended without saying so.
    return [user for user, owner in found if user is not scheduler and not (user.over() and owner() is None)]


def last_run(tables: HostTables) -> int:
    """The number of the last run that has begun over the tables."""
    with _lock:
        return max(_last.get(key, 0) for key in _keys(tables))


def pipelines_in_a_run() -> list[Any]:
    """Those that are in a run."""
    with _lock:
        owners = [owner() for _, owner in list(_running.values())]
    return list({id(owner): owner for owner in owners if owner is not None}.values())


class BrokenPipeline(RuntimeError):
    """Rows that were committed are lost: the dense state and the tables stand at different steps
    for good.

    Attributes:
      dense_step: steps that the dense state has seen; None if it is gone with the update that
        failed.
      table_steps: for each shard the step at which it stands; None where it stands at none (a write
        that was cut short, rows that were left for a later batch to write).
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
            "into `pipeline.tables` or new tables, and make a new Pipeline."
        )
        self.dense_step, self.table_steps = dense_step, table_steps


def _at(step):
    return "at no step" if step is None else f"at step {step}"


class TableProgress:
    """Where the tables of a pipeline stand beside its dense state; views ask it, and it outlives
    the pipeline.

    Args:
      tables: HostTables themselves.
      exact: whether each batch puts all its rows: then the tables' own counters say where a shard
        stands.
      whole: whether all rows of a batch are written with it.
    """

    def __init__(self, tables: HostTables, exact: bool, whole: bool):
        self.tables, self.exact, self.whole = tables, exact, whole

    def begin(self, scheduler, step: int) -> None:
        """A run begins, at a step at which the tables stand."""
        self.scheduler, self.first_step = scheduler, step
        self.half: set[int] = set()  # shards that a write was cut short in
        self.puts = self.tables.steps[:, 1].copy()  # of each shard, when its last batch was written
        self.settled = step  # where tables and dense state stood together last
        self.turn = last_run(self.tables)  # whoever begins a run later changes the tables

    @property
    def step(self) -> int:
        """How many steps the dense state has seen."""
        return self.first_step + self.scheduler.committed - self.scheduler.first

    def settle(self) -> None:
        """The tables stand where the dense state does."""
        self.settled, self.puts = self.step, self.tables.steps[:, 1].copy()

    def mark(self, shards) -> None:
        """A writer has written its shards of a batch."""
        self.puts[shards] = self.tables.steps[shards, 1]

    def refuse_broken(self) -> None:
        """Raises BrokenPipeline, from what broke it, if rows were lost."""
        if self.scheduler.lost is not None:
            dense_step = None if self.scheduler.dense_gone else self.step
            raise BrokenPipeline(dense_step, self.table_steps(), self.scheduler.lost) from self.scheduler.lost

    def table_steps(self) -> list[int | None]:
        """For each shard the step at which it stands."""
        scheduler, puts = self.scheduler, self.tables.steps
        steps: list[int | None] = []
        for shard in range(len(puts)):
            written = self.first_step + scheduler.written[shard % len(scheduler.written)] - scheduler.first
            torn = shard in self.half or puts[shard, 0] != puts[shard, 1] or not self.whole
            # A writer failed behind this shard.
            ahead = int(puts[shard, 1] - self.puts[shard]) if self.exact else 0
            steps.append(None if torn else written + ahead)
        return steps

    def refuse_lag(self, step: int, puts: np.ndarray | None = None) -> None:
        """Raises if tables of a state of this step cannot be read.

        Args:
          step: of the state.
          puts: i64[S], of each shard when the holder of the state has put rows of its own last;
            None if it never has.

        Raises:
          BrokenPipeline: rows are lost.
          ValueError: the tables lag behind the state, or are ahead of it.
        """
        self.refuse_broken()
        if step != self.step:
            raise ValueError(
                f"these tables stood at step {step}, and the pipeline is at step {self.step}: use the newest state, "
                "and call pipeline.drain() before reading, evaluating or saving."
            )
        if last_run(self.tables) != self.turn:
            raise ValueError(
                f"these tables stood at step {step}, and another run has begun over these tables since: use the state "
                "of that one."
            )
        if step == self.settled:
            own = self.puts if puts is None else puts
            if not self.scheduler.paused and not np.array_equal(self.tables.steps[:, 1], own):
                raise ValueError(
                    f"these tables stood at step {step}, and their rows were changed since: use the state of whoever "
                    "changed them."
                )
            return
        lag = max(1, self.scheduler.committed - self.scheduler.watermark())
        raise ValueError(
            f"these tables lag {lag} batch{'es' * (lag > 1)} behind the dense state: call pipeline.drain() before "
            "reading, evaluating or saving. (`exclusive`, a cut's save and what `drain` returns have the tables "
            "themselves.)"
        )


class StaleTables(HostTables):
    """The tables of a state that a pipeline yields: rows can be reached only while they are those
    of the state.

    Args:
      standing: of the pipeline.
      step: of the state.
    """

    _progress: TableProgress
    _step: int
    _puts: np.ndarray | None

    def __init__(self, progress: TableProgress, step: int):
        tables = progress.tables
        self.__dict__.update(  # the class is frozen, and `shards` and `directory` are guarded
            spec=tables.spec, layout=tables.layout, steps=tables.steps, _progress=progress, _step=step,
            _puts=None,
        )  # fmt: skip

    def themselves(self) -> HostTables:
        """The tables without a guard; refused while they lag."""
        self._progress.refuse_lag(self._step, self._puts)
        return self._progress.tables

    def _keep_puts(self):
        """What is put through this view makes it the newest; those of earlier states see that the
        rows were changed."""
        self.__dict__["_puts"] = self.steps[:, 1].copy()
        return self

    @property
    def shards(self):
        """As those of the tables themselves."""
        return self.themselves().shards

    @property
    def directory(self):
        """As that of the tables themselves: who attaches the files reads them."""
        return self.themselves().directory

    def read(self, plans):
        """As the tables themselves, like all that follows."""
        return self.themselves().read(plans)

    def put(self, plans, rows, shards=None):
        self.themselves().put(plans, rows, shards)
        return self._keep_puts()

    def add(self, plans, rows, old, shards=None):
        self.themselves().add(plans, rows, old, shards)
        return self

    def parts(self, stack):
        return self.themselves().parts(stack)

    def on_shards(self, function, *args):
        return self.themselves().on_shards(function, *args)

    def take(self, rows):
        return self.themselves().take(rows)

    def with_shard(self, stack, shard, parts):
        self.themselves().with_shard(stack, shard, parts)
        return self

    def reset_shard(self, stack, shard):
        self.themselves().reset_shard(stack, shard)
        return self

    @contextlib.contextmanager
    def overwriting(self, shards=None, step=None):
        tables = self.themselves()
        with tables.overwriting(shards, step):
            yield tables
        self._keep_puts()

    def __repr__(self) -> str:
        return f"StaleTables(of the state of step {self._step})"

    def __reduce__(self):
        tables = self.themselves()
        return HostTables, (tables.spec, tables.layout, tables.shards, tables.directory, np.array(tables.steps))
