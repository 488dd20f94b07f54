"""Starts the servers of embedding tables, detects their deaths, and starts successors.

A death is detected by the call that it makes fail or, between calls, by a thread that looks at the processes. It starts
the successor at once, so that it is ready when the engine asks for it, and marks the shards as lost: the next call into
them raises `ShardsLost`. A successor begins with initial rows; none of them is read before the recovery, which the
engine calls next, has restored its shards.

Legend: S shards, P servers.
"""

import contextlib
import threading
import time
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrec.bounds import is_positive, real_number, whole_number
from jaxrec.callbacks import Callback
from jaxrec.cluster.processes import RayProcess
from jaxrec.cluster.runtime import Cluster
from jaxrec.cluster.servers import RayServer, ServerConfig, server_process
from jaxrec.embedding import RemoteTables
from jaxrec.embedding.servers import ServerGone, deal
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.files import local_path, make_directory
from jaxrec.types import RowOptimizer, ShardsLost

_POLL_S = 0.2  # until the thread looks at the processes again
_MINUTES = 10  # in which `most_deaths` are tolerated
_SECONDS = "a number of seconds above 0 and finite"


class GivenUp(OSError):
    """Ends the run: processes die too often, Ray itself has died, or the parameters of a pool are lost."""


class Death(NamedTuple):
    """Death of a server."""

    server: int  # its index, in 0..P-1
    incarnation: int
    reason: str
    at: float  # time of detection, in seconds of `time.monotonic`


class Supervisor(Callback):
    """Starts P shard servers on Ray and replaces dead ones; a callback that an engine lists before the recovery.

    List it only together with a recovery: otherwise the rows of a successor would stay initial ones. When it is not
    listed, a death ends the run with `ShardsLost`; resume it from its last save.

    Args:
      cluster: the entered cluster.
      spec: the tables.
      row_optimizer: decides the slots.
      servers: P, from 1 to S; prefer few servers with many shards each.
      directory: directory of the run's checkpoints, which every server must see; None if nothing is saved.
      timeout_s: seconds in which a server must answer a call, else it counts as dead; longer than it takes to save or
        restore all of its rows.
      start_timeout_s: seconds for a process to start, and as many again for its initial rows.
      most_deaths: tolerated deaths of all servers together within ten minutes; one more ends the run.
      client: name of this client at the servers, such as the id of the run; a random one if None.
      resources: Ray resources that select each server's machine, such as {'rows': 1}; None for any machine.
      spares: standby processes, in which a successor begins without waiting for a start; about 300 MB each.

    Attributes:
      tables: `RemoteTables` over the servers.
      deaths: all deaths so far, as `Death`.

    Raises:
      ValueError: a number is out of range, the cluster is not entered, or a server does not see the directory or runs
        another version of jaxrec.
      TimeoutError, ServerGone: the server that the message names has not begun.
    """

    def __init__(
        self, cluster: Cluster, spec: EmbeddingSpec, row_optimizer: RowOptimizer, servers: int = 2,
        directory: str | Path | None = None, timeout_s: float = 60.0, start_timeout_s: float = 60.0,
        most_deaths: int = 8, client: str | None = None, resources: dict[str, float] | None = None, spares: int = 0,
    ):  # fmt: skip
        self._number_of_spares, self._spares = whole_number("spares", spares, 0), list[RayProcess]()
        real_number("timeout_s", timeout_s, _SECONDS, is_positive)
        self._start_timeout_s = real_number("start_timeout_s", start_timeout_s, _SECONDS, is_positive)
        self._most_deaths = whole_number("most_deaths", most_deaths, 0)
        cluster.check_entered()
        self.deaths: list[Death] = []
        self._cluster, self._resources, self._lock = cluster, resources, threading.RLock()
        self._given_up: GivenUp | None = None
        path = None if directory is None else local_path(directory).resolve()
        self._config = ServerConfig(spec, spec.layout(row_optimizer), path)
        self._servers: list[RayServer] = []  # the newest incarnation of each, possibly not in use yet
        self._closed, self._entered = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="jaxrec-supervisor", daemon=True)
        try:
            with _probe(path) as name:
                for index, shards in enumerate(deal(spec.shards, servers)):
                    config = self._config._replace(probe=name)
                    self._servers.append(RayServer(config, index, shards, 1, self._process()))
                for server in self._servers:
                    server.wait(start_timeout_s)
            self._start_spares()
            self.tables = RemoteTables(spec, row_optimizer, self._servers, timeout_s, client)
        except BaseException:
            self._kill_all()
            raise
        self._in_use = [*self._servers]
        cluster.before_end(self.close)
        self._thread.start()

    @property
    def processes(self) -> list[int | None]:
        """Process id of each server on its machine; None for a successor that has not started yet."""
        return [server.process for server in self._servers]

    @property
    def spares(self) -> list[int]:
        """Process ids of the standby processes, after waiting until all have started."""
        return [spare.info.result(self._start_timeout_s).pid for spare in self._spares]

    @property
    def in_use(self) -> list[RayServer]:
        """Servers that the tables use, in order of their index."""
        return [*self._in_use]

    @property
    def lost(self) -> str:
        """Description of the dead servers that have no successor in use yet; '' if there are none."""
        return "; ".join(reason for server in self._in_use if (reason := self._lost_reason(server)))

    # ---- the callback

    def recover(self, shards: Sequence[int]) -> None:
        """Replace dead servers by successors, whose rows the recovery after this callback restores.

        Args:
          shards: shards that the engine has lost, possibly some of living servers, which are left alone.

        Raises:
          GivenUp: there were too many deaths.
        """
        for index, server in enumerate(self._in_use):
            # A server of which only some shards are in the list: the engine learns of its death by its next call.
            if set(server.shards) <= set(shards) and (reason := self._lost_reason(server)):
                self._start_successor(index, reason)

    def _lost_reason(self, server):
        """Return the message of the `ShardsLost` that a call into a server raises; '' if it is not lost."""
        if not set(server.shards) & set(self.tables.lost):
            return ""
        try:
            self.tables.probe(server.shards[0])
        except ShardsLost as lost:
            return str(lost)
        return ""

    def begin(self, engine: Any) -> None:
        """Start to replace servers. They outlive the engine, for reads after the run, until `close`."""
        self._entered = True  # from here on a recovery restores rows

    def close(self) -> None:
        """End the servers, as the end of the cluster does; their rows are lost."""
        self._closed.set()
        self._thread.join()
        self.tables.close()
        self._kill_all()

    def _kill_all(self):
        for server in self._servers:
            server.kill()
        for spare in self._spares:
            spare.kill()

    # ---- spares

    def _start_spares(self):
        with self._lock:
            living = [spare for spare in self._spares if not spare.death_reason()]
            more = 0 if self._closed.is_set() else self._number_of_spares - len(living)
            self._spares = living + [server_process(self._resources) for _ in range(more)]

    def _process(self):
        """Return a living standby process, or a new one; the caller holds the lock."""
        while self._spares:
            if not (spare := self._spares.pop(0)).death_reason():
                return spare
        return server_process(self._resources)

    # ---- deaths

    def _start_successor(self, index, reason):
        """Wait until a successor is in use; one that dies meanwhile is itself replaced."""
        while True:
            with self._lock:
                if self._servers[index] is self._in_use[index]:
                    self._record_death(index, reason)
                successor = self._servers[index]
            try:
                successor.wait(self._start_timeout_s)
                self.tables.replace(successor)
            except (ServerGone, TimeoutError) as error:
                with self._lock:
                    if self._servers[index] is successor:
                        self._record_death(index, str(error))
                continue
            self._in_use[index] = successor
            self._start_spares()  # only now: its start would slow down that of the successor
            warnings.warn(f"{reason}; {successor} has taken its place", stacklevel=6)
            return

    def _record_death(self, index, reason):
        """Record a death and start the successor; the caller holds the lock."""
        dead = self._servers[index]
        dead.kill()  # one that does not answer could resume later
        if self._given_up is None:
            self.deaths.append(Death(index, dead.incarnation, reason, time.monotonic()))
            died = self._cluster.died  # without Ray no successor would ever begin
            self._given_up = GivenUp(died) if died else self._too_many()
        if self._given_up is not None:
            raise self._given_up
        self._servers[index] = RayServer(self._config, index, dead.shards, dead.incarnation + 1, self._process())

    def _too_many(self):
        recent = [death for death in self.deaths if death.at > time.monotonic() - _MINUTES * 60]
        if len(recent) <= self._most_deaths:
            return None
        last = recent[-1]
        return GivenUp(
            f"{len(recent)} deaths of servers within {_MINUTES} minutes, above most_deaths={self._most_deaths}; the "
            f"last one of server {last.server} (incarnation {last.incarnation}): {last.reason}. Look at its machine, "
            "then go on from the last save."
        )

    # ---- the thread

    def _watch(self):
        """Detect the ends of processes between calls."""
        seen = set[RayServer]()
        while not self._closed.wait(_POLL_S):
            for server in [server for server in self._servers if server not in seen]:
                if reason := server.death_reason():
                    seen.add(server)
                    with contextlib.suppress(GivenUp):  # `recover` raises it
                        self._handle_end(server, reason)

    def _handle_end(self, server, reason):
        with self._lock:
            if self._closed.is_set() or self._servers[server.index] is not server:
                return  # known already
            if self._in_use[server.index] is server:
                self.tables.mark_lost(server.shards, reason)
            if self._entered:
                self._record_death(server.index, reason)


@contextlib.contextmanager
def _probe(directory):
    """Create a file that servers must see in a directory, for the `with` block; yields its name."""
    if directory is None:
        yield ""
        return
    make_directory(directory)
    path = directory / f"probe-{uuid.uuid4().hex[:12]}"
    path.touch()
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)
