"""A trainer that runs freely in a process of its own: what a `TrainerPool` starts, asks, and replaces when it dies.

It is `train_stretch` with one trainer, over rows at servers, with a `SyncClient` as its transport. Batches come from a
factory that runs here. A server that dies keeps its trainer waiting in `read` until a successor has its rows back; what
was to be added to its rows meanwhile is lost, and counted.

Legend: n trainers, m workers of each.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxrec.cluster.processes import unpacked
from jaxrec.cluster.sync_servers import SyncClient
from jaxrec.embedding import RemoteTables
from jaxrec.embedding.servers import Server
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.shadowsync import Foreground, FreeStep, Rule, Shadow, train_stretch
from jaxrec.shadowsync.params import with_floating
from jaxrec.sharding import make_mesh
from jaxrec.step import init_state
from jaxrec.types import Batch, Plan, PyTree, RowOptimizer, Rows, ShardsLost

# (trainer, trainers) -> (start -> the batches of that trainer from number start on)
Factory = Callable[[int, int], Callable[[int], Iterator[Batch]]]


class TrainerWork(NamedTuple):
    """What all trainers of a pool do.

    Attributes:
      spec, loss, optimizer, row_optimizer, params: as for `train_freely`.
      batches: (trainer, trainers) -> (start -> iterator of the trainer's batches from number start on, of one size); it
        is called where the trainer runs, and gives the same batches whenever it is called.
      rule: by which trainers are synchronised; nothing does if None.
      every_steps: in the foreground, a round every so many steps; in the background if None.
      pace_seconds: in the background, the least time from one round to the next.
      workers: m.
    """

    spec: EmbeddingSpec
    loss: Callable
    optimizer: optax.GradientTransformation
    row_optimizer: RowOptimizer
    params: PyTree
    batches: Factory
    rule: Rule | None = None
    every_steps: int | None = None
    pace_seconds: float = 0.0
    workers: int = 1


class Progress(NamedTuple):
    """How far a trainer has come, in what it has trained of its own stream."""

    position: int = 0  # all batches before it are trained
    examples: int = 0  # in these
    steps: int = 0  # of this incarnation
    rounds: int = 0
    bytes: int = 0  # of its synchronisation
    longest_step_s: float = 0.0  # from one step of a worker to its next, without what waited for rows
    median_step_s: float = 0.0
    waited_for_rows_s: float = 0.0
    rows_lost: int = 0  # that were to be added where a server was dead
    lost: tuple[int, ...] = ()  # shards whose servers are dead, as far as it knows
    state: str = "waits"  # then "begins", "trains", "done" or "failed"
    why: str = ""


class Stream:
    """The batches of a trainer, and which of them are trained: workers take them in turns, and end in any order.

    >>> stream = Stream(iter(["seven  ", "five "]), start=10, examples_of=len)
    >>> first, second = next(stream), next(stream)
    >>> stream.trained(11)
    >>> stream.position, stream.examples
    (10, 0)
    >>> stream.trained(10)
    >>> stream.position, stream.examples
    (12, 12)
    """

    def __init__(self, batches: Iterator, start: int, examples_of: Callable[[Any], int] = lambda b: examples_in(b)):
        self._batches, self._numbers, self._examples_of = batches, itertools.count(start), examples_of
        self.position, self.examples = start, 0
        self._examples: dict[int, int] = {}  # {number: examples} of what was taken and does not count yet
        self._trained_ahead: set[int] = set()  # trained, but not all before them
        self._batch_of_thread: dict[int, int] = {}  # which batch each worker has
        self._lock = threading.Lock()

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        number = next(self._numbers)
        self._examples[number], self._batch_of_thread[threading.get_ident()] = self._examples_of(batch), number
        return batch

    def number(self) -> int:
        """Of the batch that this thread has taken last."""
        return self._batch_of_thread[threading.get_ident()]

    def trained(self, number: int) -> None:
        """A batch is trained."""
        with self._lock:
            self._trained_ahead.add(number)
            while self.position in self._trained_ahead:
                self._trained_ahead.remove(self.position)
                self.examples += self._examples.pop(self.position)
                self.position += 1


def examples_in(batch: Batch) -> int:
    """How many examples of a batch count."""
    return int(np.count_nonzero(getattr(batch, "weight", ())))  # what is no batch is refused where it is trained


class RetryingTables(RemoteTables):
    """Rows at servers for trainers that write by `add`: reads wait for successors, and writes to the dead are lost.

    Args:
      of_remote: as for `RemoteTables`.
      retry_timeout_s: seconds that a read waits for a successor.
    """

    def __init__(self, *of_remote: Any, retry_timeout_s: float = 300.0, **more: Any):
        super().__init__(*of_remote, **more)
        self._retry_timeout_s, self._changed = retry_timeout_s, threading.Condition()
        self.rows_lost, self.waited_s = 0, 0.0

    def read(self, plans: dict[str, Plan]) -> dict[str, Rows]:
        """As `RemoteTables.read`; waits while rows are gone.

        Raises:
          ShardsLost: there is no successor within the patience.
        """
        begun = None
        while True:
            try:
                return super().read(plans)
            except ShardsLost:
                begun = begun or time.monotonic()
                with self._changed:
                    there = self._changed.wait_for(
                        lambda: not self.lost, begun + self._retry_timeout_s - time.monotonic()
                    )
                self.waited_s += time.monotonic() - begun
                if not there:
                    raise

    def add(
        self, plans: dict[str, Plan], rows: dict[str, Rows], old: dict[str, Rows], shards: Sequence[int] | None = None
    ) -> "RetryingTables":
        """As `RemoteTables.add`; what was for rows that are gone is lost."""
        try:
            super().add(plans, rows, old, shards)
        except ShardsLost as lost:  # the others have theirs: to send it again would add it twice
            gone = list(lost.shards)
            with self._changed:
                self.rows_lost += sum(int(plan.count[gone].sum()) for plan in plans.values())
        return self

    def replace_server(self, server: Server, shards: Sequence[int], why: str) -> None:
        """Takes the successor of a server whose rows are back."""
        self.mark_lost(shards, why)
        try:  # the tables must have heard of the loss before
            self.take({(next(iter(self.spec.stacks)), shards[0]): np.zeros(0, np.int32)})
        except ShardsLost:
            pass
        self.replace(server)
        with self._changed:
            self._changed.notify_all()


class TrainerProcess:
    """One incarnation of a trainer; `begin` returns at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state, self._why = "waits", ""
        self._tables: Any = None  # `RetryingTables`, once it has said hello
        self._sync_client: Any = None
        self._sync: Any = None
        self._stream = Stream(iter(()), 0)
        self._steps, self._times = 0, list[float]()
        self._dense: Any = None
        # What has come while it began: {shards: server} and {number: place}.
        self._servers, self._sync_servers = dict[tuple, Server](), dict[int, Any]()

    def begin(
        self, work: TrainerWork | tuple[list[str], bytes], number: int, trainers: int, incarnation: int, start: int,
        params: list | None, servers: Sequence[Server], sync_servers: Sequence[Any], client: str, timeout_s: float,
        cores: Sequence[int] | None,
    ) -> None:  # fmt: skip
        """Begins to train in a thread.

        Args:
          work: of the pool; or `packed`, from another process.
          number, trainers: its number of n.
          incarnation: 1, or one more than that of the trainer whose place it takes.
          start: the number of the first batch.
          params: floating leaves to begin with; the initial ones of the work if None.
          servers: of the rows.
          sync_servers: where it is synchronised.
          client: its name for the servers.
          timeout_s: of the servers and of the sync_servers.
          cores: of the machine, that its threads are held to; all if None.
        """
        self._stream = Stream(iter(()), start)  # one that dies while it begins has come no less far than the one before
        self._state = "begins"
        mine = (work, number, trainers, incarnation, start, params, servers, sync_servers, client, timeout_s)
        threading.Thread(target=self._run, args=(cores, *mine), name="free-trainer", daemon=True).start()

    def progress(self) -> Progress:
        """How far it has come."""
        tables, sync, times = self._tables, self._sync, self._times[1:]  # the first one has compiled
        with self._lock:
            return Progress(
                self._stream.position, self._stream.examples, self._steps,
                getattr(sync, "rounds", 0), getattr(sync, "bytes", 0),
                max(times, default=0.0), float(np.median(times)) if times else 0.0,
                tables.waited_s if tables else 0.0, tables.rows_lost if tables else 0, tables.lost if tables else (),
                self._state, self._why,
            )  # fmt: skip

    def newest(self) -> list[np.ndarray] | None:
        """The floating leaves of one replica that it has brought last to a round; None before."""
        brought = self._sync_client.newest if self._sync_client else None
        return None if brought is None else [np.array(leaf[0]) for leaf in brought]

    def result(self) -> tuple[PyTree, Progress]:
        """Its parameters, leaves [1, ...], when it is done, and how far it has come."""
        return self._dense, self.progress()

    def replace_server(self, server: Server, shards: Sequence[int], why: str) -> None:
        """A server has a successor, whose rows are back."""
        with self._lock:
            self._servers[tuple(shards)], tables = server, self._tables
        if tables is not None:
            tables.replace_server(server, shards, why)

    def replace_sync_server(self, number: int, server: Any) -> None:
        """A place has a successor."""
        with self._lock:
            self._sync_servers[number], client = server, self._sync_client
        if client is not None:
            client.replace(number, server)

    # ---- the thread

    def _run(self, cores, *mine):
        try:
            if cores is not None:  # before JAX has looked how many there are; its threads are of this one
                os.sched_setaffinity(0, cores)
            work, *rest = mine
            if not isinstance(work, TrainerWork):
                (work,) = unpacked(*work)
            self._dense = self._trained(work, *rest)
            self._state = "done"
        except BaseException as error:
            notes = "; ".join(getattr(error, "__notes__", ()))
            self._why = f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")
            self._state = "failed"

    def _trained(
        self, work, number, trainers, incarnation, start, params, servers, sync_servers, client, timeout_s
    ):  # fmt: skip
        spec, own = work.spec, (work.optimizer, work.row_optimizer)
        tables: Any = RetryingTables(
            spec, work.row_optimizer, servers, timeout_s, client=client, incarnation=incarnation
        )
        with self._lock:
            self._tables, came = tables, dict(self._servers)
        for shards, server in came.items():  # while it said hello to the one before
            with contextlib.suppress(ValueError):
                tables.replace_server(server, shards, "it died while this trainer began")
        self._stream = Stream(work.batches(number, trainers)(start), start)
        begin = work.params if params is None else with_floating(work.params, params)
        dense = init_state(begin, work.optimizer, tables, make_mesh(devices=jax.local_devices()[:1])).dense
        dense = dense._replace(step=dense.step + start)  # schedules go on
        if work.rule is not None:
            with self._lock:
                now = [self._sync_servers.get(number, server) for number, server in enumerate(sync_servers)]
                self._sync_client = SyncClient(work.rule, work.params, number, incarnation, now, timeout_s)
            self._sync = self._synchroniser(work, number)
        self._state, self._last = "trains", threading.local()
        (dense,), _ = train_stretch(
            FreeStep(spec, work.loss, *own), [dense], tables, [self._stream],
            (lambda _: self._sync) if self._sync else None, work.workers, self._stepped,
        )  # fmt: skip
        return jax.device_get(dense.params)

    def _synchroniser(self, work, number):
        if work.every_steps is not None:
            return Foreground(self._sync_client, number, every_steps=work.every_steps)
        return Shadow(self._sync_client, number, pace_seconds=work.pace_seconds)

    def _stepped(self, trainer, step, metrics):
        now, waited = time.monotonic(), self._tables.waited_s
        self._stream.trained(self._stream.number())
        before = getattr(self._last, "at", None)
        with self._lock:
            self._steps += 1
            if before is not None:
                self._times.append(now - before[0] - (waited - before[1]))
        self._last.at = now, waited
