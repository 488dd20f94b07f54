"""A free-running trainer in a process of its own, which `TrainerPool` starts, polls and replaces.

It runs `train_stretch` with one trainer over rows at servers, with a `SyncClient` as its transport. Its batches come
from a function that is called in its process. While a server is dead, `read` waits until the rows of its successor are
restored; updates to its rows are dropped and counted.

Legend: n trainers, m workers of each.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrec.cluster.processes import unpacked
from jaxrec.cluster.sync_servers import SyncClient
from jaxrec.embedding import HostTables, RemoteTables
from jaxrec.embedding.servers import Server
from jaxrec.shadowsync import Foreground, FreeStep, Rule, Shadow
from jaxrec.shadowsync.params import with_floating
from jaxrec.shadowsync.workers import map_schedules, train_stretch
from jaxrec.sharding import make_mesh
from jaxrec.step import init_dense
from jaxrec.task import Task
from jaxrec.types import Batch, Plan, PyTree, Rows, ShardsLost

# (trainer, trainers) -> (start -> the batches of that trainer, beginning with number start)
BatchFactory = Callable[[int, int], Callable[[int], Iterator[Batch]]]


class TrainerWork(NamedTuple):
    """Model, batches and synchronisation of all trainers of a pool.

    Attributes:
      task, params: as for `train_freely`.
      batches: (trainer, trainers) -> (start -> iterator over the trainer's batches, of one size, beginning with number
        start); called in the trainer's process, and must return the same batches in every call.
      rule: synchronisation rule; None to not synchronise.
      every_steps: k, for a round every k steps in the foreground; None to synchronise in the background.
      pace_seconds, core_share: of rounds in the background, as for `Shadow`.
      workers: m.
    """

    task: Task
    params: PyTree
    batches: BatchFactory
    rule: Rule | None = None
    every_steps: int | None = None
    pace_seconds: float = 0.0
    workers: int = 1
    core_share: float = 1.0


def work_of(given: Any) -> TrainerWork:
    """Return the work of a pool that is given as such, or `packed`, itself or as a function that makes it."""
    if not isinstance(given, TrainerWork):
        (given,) = unpacked(*given)
    return given() if callable(given) else given


class Progress(NamedTuple):
    """Progress of one incarnation of a trainer through its stream."""

    position: int = 0  # number of the first batch that is not trained yet
    examples: int = 0  # in the batches before it
    steps: int = 0
    rounds: int = 0
    waited_for_rows_s: float = 0.0
    rows_lost: int = 0  # row updates dropped because a server was dead
    lost: tuple[int, ...] = ()  # shards whose servers are dead, as far as the trainer knows
    # "waiting" for `begin`; then "starting", "training", "finishing" after its last batch, "done" or "failed".
    state: str = "waiting"
    reason: str = ""  # of state "failed"


class Stream:
    """Batches of a trainer, taken by several workers, and the position up to which all of them are trained."""

    def __init__(self, batches: Iterator, start: int):
        self._batches, self._numbers = batches, itertools.count(start)
        self._position, self._trained, self.over = start, 0, False
        self._examples: dict[int, int] = {}  # {number: examples} of batches taken, but not counted yet
        self._trained_ahead: set[int] = set()  # trained, but some batch before them is not
        self._batch_of_thread: dict[int, int] = {}  # {thread: number of the batch that it has taken last}
        self._lock = threading.Lock()

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self.over = True
            raise
        number = next(self._numbers)
        self._examples[number], self._batch_of_thread[threading.get_ident()] = examples_in(batch), number
        return batch

    def number(self) -> int:
        """Return the number of the batch that this thread has taken last."""
        return self._batch_of_thread[threading.get_ident()]

    def trained(self, number: int) -> None:
        """Record that a batch is trained."""
        with self._lock:
            self._trained_ahead.add(number)
            while self._position in self._trained_ahead:
                self._trained_ahead.remove(self._position)
                self._trained += self._examples.pop(self._position)
                self._position += 1

    def progress(self) -> tuple[int, int]:
        """Return the position up to which all batches are trained, and the number of examples before it."""
        with self._lock:
            return self._position, self._trained


def examples_in(batch: Batch) -> int:
    """Return the number of examples with a weight other than 0."""
    return int(np.count_nonzero(getattr(batch, "weight", ())))  # the step raises for objects that are no `Batch`


class RetryingTables(RemoteTables):
    """`RemoteTables` whose reads wait for the successor of a dead server, and whose `add` drops updates to its rows.

    Attributes:
      rows_lost: number of row updates dropped.
      waited_s: seconds for which reads have waited for successors, each at most `retry_timeout_s`.
    """

    def __init__(self, *args: Any, retry_timeout_s: float = 300.0, **more: Any):
        super().__init__(*args, **more)
        self._retry_timeout_s, self._changed = retry_timeout_s, threading.Condition()
        self.rows_lost, self.waited_s = 0, 0.0

    def read(self, plans: dict[str, Plan]) -> dict[str, Rows]:
        """Read rows, see `RemoteTables.read`; wait while a server is dead."""
        started_at = None
        while True:
            try:
                return super().read(plans)
            except ShardsLost:
                started_at = started_at or time.monotonic()
                remaining_s = started_at + self._retry_timeout_s - time.monotonic()
                since = time.monotonic()
                with self._changed:
                    restored = self._changed.wait_for(lambda: not self.lost, remaining_s)
                    self.waited_s += time.monotonic() - since
                if not restored:
                    raise

    def add(
        self, plans: dict[str, Plan], rows: dict[str, Rows], old: dict[str, Rows], shards: Sequence[int] | None = None
    ) -> "RetryingTables":
        """Add to rows, see `RemoteTables.add`; drop and count updates to rows of dead servers."""
        try:
            super().add(plans, rows, old, shards)
        except ShardsLost as lost:  # no retry: the living servers have added their part already
            shards_lost = list(lost.shards)
            with self._changed:
                self.rows_lost += sum(int(plan.count[shards_lost].sum()) for plan in plans.values())
        return self

    def replace_server(self, server: Server, shards: Sequence[int], reason: str) -> None:
        """Replace a dead server by its successor, whose rows are restored."""
        self.mark_lost(shards, reason)
        with contextlib.suppress(ShardsLost):  # `replace` requires that a call has raised the loss
            self.probe(shards[0])
        self.replace(server)
        with self._changed:
            self._changed.notify_all()


class TrainerProcess:
    """One incarnation of a trainer, for use in a process of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state, self._reason = "waiting", ""
        self._tables: Any = None  # `RetryingTables`, once the servers have answered their hello
        self._sync_client: Any = None
        self._sync: Any = None
        self._stream = Stream(iter(()), 0)
        self._steps = 0
        self._params: Any = None
        self._number = 0
        # Successors announced so far: {shards: server} and {number: sync server}.
        self._servers, self._sync_servers = dict[tuple, Server](), dict[int, Any]()

    def begin(
        self, work: TrainerWork | tuple[list[str], bytes], number: int, trainers: int, incarnation: int,
        start: int, params: list | None, servers: Sequence[Server] | Path, sync_servers: Sequence[Any], client: str,
        timeout_s: float, cores: Sequence[int] | None,
    ) -> None:  # fmt: skip
        """Start training in a thread.

        Args:
          work: work of the pool, see `work_of`.
          number, trainers, incarnation: of this trainer.
          start: number of the first batch.
          params: initial floating leaves; None for those of `work.params`.
          servers, sync_servers: handles, which must answer within `timeout_s`; or the directory of host tables.
          client: name of this trainer at the shard servers.
          cores: numbers of the cores that its threads may use; None for all.
        """
        self._stream = Stream(iter(()), start)  # so that `progress` never reports less than the previous incarnation
        self._state, self._number = "starting", number
        mine = (work, number, trainers, incarnation, start, params, servers, sync_servers, client, timeout_s)
        threading.Thread(target=self._run, args=(cores, *mine), name="free-trainer", daemon=True).start()

    def progress(self) -> Progress:
        """Return the progress so far; a sign of life for the other trainers, as one step may take long."""
        tables, sync, client = self._tables, self._sync, self._sync_client
        state = self._state
        if state == "training":
            if client is not None:
                client.heartbeat(self._number)
            state = "finishing" if self._stream.over else state
        with self._lock:
            return Progress(
                *self._stream.progress(), self._steps, getattr(sync, "rounds", 0),
                tables.waited_s if tables else 0.0, tables.rows_lost if tables else 0, tables.lost if tables else (),
                state, self._reason,
            )  # fmt: skip

    def newest(self) -> list[np.ndarray] | None:
        """Return the floating leaves of one replica that it has sent last to a round; None before the first."""
        leaves = self._sync_client.newest if self._sync_client else None
        return None if leaves is None else [np.array(leaf[0]) for leaf in leaves]

    def result(self) -> tuple[PyTree, Progress]:
        """Return the parameters, leaves [1, ...], if it is done, and the progress."""
        return self._params, self.progress()

    def replace_server(self, server: Server, shards: Sequence[int], reason: str) -> None:
        """Replace a dead shard server by its successor, whose rows are restored."""
        with self._lock:
            self._servers[tuple(shards)], tables = server, self._tables
        if tables is not None:
            tables.replace_server(server, shards, reason)

    def replace_sync_server(self, number: int, server: Any) -> None:
        """Replace a dead sync server by its successor."""
        with self._lock:
            self._sync_servers[number], client = server, self._sync_client
        if client is not None:
            client.replace(number, server)

    # ---- the thread

    def _run(self, cores, *mine):
        try:
            if cores is not None:  # before JAX counts them; threads inherit the mask
                os.sched_setaffinity(0, cores)
            work, *rest = mine
            self._params = self._train(work_of(work), *rest)
            self._state = "done"
        except BaseException as error:
            notes = "; ".join(getattr(error, "__notes__", ()))
            self._reason = f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")
            self._state = "failed"

    def _train(self, work, number, trainers, incarnation, start, params, servers, sync_servers, client, timeout_s):
        tables: Any
        if isinstance(servers, Path):
            tables = HostTables.attach(work.task.spec, work.task.row_optimizer, servers)
        else:
            tables = self._remote(work, servers, client, incarnation, timeout_s)
        self._stream = Stream(work.batches(number, trainers)(start), start)
        begin = work.params if params is None else with_floating(work.params, params)
        dense = init_dense(begin, work.task.optimizer, make_mesh(devices=jax.local_devices()[:1]))
        # Schedules of rows and of dense parameters continue.
        later = lambda count: count + start
        dense = dense._replace(step=later(dense.step), opt_state=map_schedules(later, dense.opt_state))
        if work.rule is not None:
            with self._lock:
                now = [self._sync_servers.get(number, server) for number, server in enumerate(sync_servers)]
                self._sync_client = SyncClient(work.rule, work.params, number, incarnation, now, timeout_s)
            self._sync = self._synchroniser(work, number)
        self._state = "training"
        (dense,), _ = train_stretch(
            FreeStep(work.task), [dense], tables, [self._stream],
            (lambda _: self._sync) if self._sync else None, work.workers, self._after_step,
        )  # fmt: skip
        return jax.device_get(dense.params)

    def _remote(self, work, servers, client, incarnation, timeout_s):
        tables = RetryingTables(
            work.task.spec, work.task.row_optimizer, servers, timeout_s, client=client, incarnation=incarnation
        )
        with self._lock:
            self._tables, successors = tables, dict(self._servers)
        for shards, server in successors.items():  # those announced before the tables were ready
            with contextlib.suppress(ValueError):
                tables.replace_server(server, shards, "it died while this trainer started")
        return tables

    def _synchroniser(self, work, number):
        if work.every_steps is not None:
            return Foreground(self._sync_client, number, every_steps=work.every_steps)
        return Shadow(self._sync_client, number, work.pace_seconds, work.core_share)

    def _after_step(self, trainer, step, metrics):
        self._stream.trained(self._stream.number())
        with self._lock:
            self._steps += 1
