"""Starts the servers of some tables, notices their deaths, and starts the successors of the dead.

A death is noticed by the call that it makes fail, or, between calls, by a thread that waits for the end of each
process. The thread begins the successor at once, so that it is there when the engine asks for it; and it tells the
tables, whose next call raises `ShardsLost`. A successor begins with initial rows, and none of them is read before
the recovery, which the engine calls next, has brought its shards back where they are.

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

import numpy as np

from jaxrec.bounds import is_positive, real_number, whole_number
from jaxrec.cluster.runtime import Cluster, import_ray
from jaxrec.cluster.servers import Process, RayServer, ServerConfig
from jaxrec.embedding import RemoteTables
from jaxrec.embedding.servers import ServerGone, deal
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.files import local_path, make_directory
from jaxrec.types import RowOptimizer, ShardsLost

_POLL_S = 0.2  # how soon the thread sees that it is to end
_SECONDS = "a number of seconds above 0 and finite"


class GivenUp(OSError):
    """Servers die so often, or Ray itself has died, that the run is ended."""


class Death(NamedTuple):
    """What is known of the death of a server.

    Attributes:
      server: its place, from 0.
      incarnation: that has died.
      why: in words.
      at: when it was noticed, seconds of `time.monotonic`.
    """

    server: int
    incarnation: int
    why: str
    at: float


class Supervisor:
    """The servers of some tables on Ray, and a watcher of the engine over them, to be entered before the recovery.

    Without a recovery after it do not enter it: rows of the dead would be initial ones. Then the run ends with
    `ShardsLost`, and goes on from its last save.

    Args:
      cluster: that was entered.
      spec, row_optimizer: of the tables.
      servers: P, from 1 to S; few servers, each with many shards.
      directory: where the run saves; every server must see it. None if nothing is saved.
      timeout_s: seconds in which a server has to answer, a save and a restore of its rows among it; a longer silence
        counts as its death.
      start_timeout_s: seconds in which a process has to be there, and then its rows.
      most_deaths: of all servers together within `within_minutes`; one more ends the run.
      within_minutes: as it says.
      client: the name of this client for the servers, as the id of the run; a name of its own if None.
      resources: of Ray that each server needs, to choose its machine, as {'rows': 1}; none if None.
      spares: processes that wait, so that a successor need not be started first; each has about 300 MB.

    Attributes:
      tables: `RemoteTables` over the servers.
      deaths: all so far, of type `Death`.

    Raises:
      ValueError: a number out of range; the cluster is not entered; a server does not see the directory, or is of
        another version of jaxrec.
      TimeoutError, ServerGone: a server has not begun; names it.
    """

    def __init__(
        self, cluster: Cluster, spec: EmbeddingSpec, row_optimizer: RowOptimizer, servers: int = 2,
        directory: str | Path | None = None, timeout_s: float = 60.0, start_timeout_s: float = 60.0,
        most_deaths: int = 8, within_minutes: float = 10.0, client: str | None = None,
        resources: dict[str, float] | None = None, spares: int = 0,
    ):  # fmt: skip
        self._number_of_spares, self._spares = whole_number("spares", spares, 0), list[Process]()
        self._check(cluster, timeout_s, start_timeout_s, most_deaths, within_minutes)
        self.deaths: list[Death] = []
        self._cluster, self._resources, self._lock = cluster, resources, threading.RLock()
        self._given_up: GivenUp | None = None
        where = None if directory is None else local_path(directory).resolve()
        self._config = ServerConfig(spec, spec.layout(row_optimizer), where)
        self._servers: list[RayServer] = []  # the newest of each place, in use or not yet
        self._closed, self._entered = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="jaxrec-supervisor", daemon=True)
        try:
            with _probe(where) as name:
                for index, shards in enumerate(deal(spec.shards, servers)):
                    config = self._config._replace(probe=name)
                    self._servers.append(RayServer(config, index, shards, 1, resources))
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

    def _check(self, cluster, timeout_s, start_timeout_s, most_deaths, within_minutes):
        if not isinstance(cluster, Cluster):
            raise ValueError(f"cluster is a {type(cluster).__name__}, but a Cluster that was entered is wanted.")
        real_number("timeout_s", timeout_s, _SECONDS, is_positive)
        self._start_timeout_s = real_number("start_timeout_s", start_timeout_s, _SECONDS, is_positive)
        self._most_deaths = whole_number("most_deaths", most_deaths, 0)
        rule = "a number of minutes above 0 and finite"
        self._within_s = 60 * real_number("within_minutes", within_minutes, rule, is_positive)
        cluster.check_entered()

    @property
    def processes(self) -> list[int | None]:
        """The number of each server's process, on its machine."""
        return [server.process for server in self._servers]

    @property
    def spares(self) -> list[int]:
        """The number of each process that waits, when all of them are there."""
        return [spare.number(self._start_timeout_s) for spare in self._spares]

    @property
    def addresses(self) -> list[str]:
        """The address of each server's machine."""
        return [server.address for server in self._in_use]

    @property
    def in_use(self) -> list[RayServer]:
        """The servers that the tables use, in the order of their places."""
        return [*self._in_use]

    @property
    def lost(self) -> str:
        """Which servers are dead, without a successor so far, and why, in words; '' if none is."""
        return "; ".join(why for server in self._in_use if (why := self._why_lost(server)))

    # ---- the watcher

    def recover(self, shards: Sequence[int]) -> None:
        """Puts successors in the place of dead servers; the recovery after this one brings their rows back.

        Args:
          shards: that an engine has lost; those of servers that live are none of this one's business.

        Raises:
          GivenUp: there were too many deaths.
        """
        for index, server in enumerate(self._in_use):
            # Else the engine does not know of the death: the next call tells it.
            if set(server.shards) <= set(shards) and (why := self._why_lost(server)):
                self._start_successor(index, why)

    def _why_lost(self, server):
        """What a call into the shards of a server raises; '' if it is not lost."""
        if not set(server.shards) & set(self.tables.lost):
            return ""
        try:
            self.tables.take({(next(iter(self._config.spec.stacks)), server.shards[0]): np.zeros(0, np.int32)})
        except ShardsLost as lost:
            return str(lost)
        return ""

    def __enter__(self) -> "Supervisor":
        self._entered = True  # from here on rows are brought back
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """The servers go on, as tables are looked at after a run: `close`, or the end of the cluster, ends them."""

    def close(self) -> None:
        """Ends the servers; their rows are gone."""
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
            living = [spare for spare in self._spares if not spare.why()]
            more = 0 if self._closed.is_set() else self._number_of_spares - len(living)
            self._spares = living + [Process(self._resources) for _ in range(more)]

    def _spare(self):
        """A process that waits, if one lives; with the lock."""
        while self._spares:
            if not (spare := self._spares.pop(0)).why():
                return spare
        return None

    # ---- deaths

    def _start_successor(self, index, why):
        """Waits until a successor is in place, or one that has taken the place of that."""
        while True:
            with self._lock:
                if self._servers[index] is self._in_use[index]:
                    self._record_death(index, why)
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
            self._start_spares()  # only now: it would take its time from the successor
            warnings.warn(f"{why}; {successor} has taken its place", stacklevel=6)
            return

    def _record_death(self, index, why):
        """Notes a death, and begins the successor; with the lock."""
        dead = self._servers[index]
        dead.kill()  # one that does not answer may come back, and is not to
        if self._given_up is None:
            self.deaths.append(Death(index, dead.incarnation, why, time.monotonic()))
            died = self._cluster.died  # then no successor would ever begin
            self._given_up = GivenUp(died) if died else self._too_many()
        if self._given_up is not None:
            raise self._given_up
        self._servers[index] = RayServer(
            self._config, index, dead.shards, dead.incarnation + 1, self._resources, self._spare()
        )

    def _too_many(self):
        recent = [death for death in self.deaths if death.at > time.monotonic() - self._within_s]
        if len(recent) <= self._most_deaths:
            return None
        last = recent[-1]
        return GivenUp(
            f"{len(recent)} deaths of servers within {self._within_s / 60:g} minutes, and {self._most_deaths} are "
            f"borne; the last one of server {last.server} (incarnation {last.incarnation}): {last.why}. Look at its "
            "machine, then go on from the last save."
        )

    # ---- the thread

    def _watch(self):
        """Waits for the ends of processes while there are no calls."""
        ray, seen = import_ray(), set[RayServer]()
        while not self._closed.is_set():
            living = {server.life: server for server in self._servers if server not in seen}
            if not living:
                self._closed.wait(_POLL_S)
                continue
            try:
                ended, _ = ray.wait(list(living), timeout=_POLL_S)
            except ray.exceptions.RayError:  # Ray itself has ended
                return
            for life in ended:
                seen.add(living[life])
                with contextlib.suppress(GivenUp):  # `recover` says it
                    self._tell(living[life])

    def _tell(self, server):
        with self._lock:
            if self._closed.is_set() or self._servers[server.index] is not server:
                return  # it is known already
            why = server.why()
            if self._in_use[server.index] is server:
                self.tables.mark_lost(server.shards, why)
            if self._entered:
                self._record_death(server.index, why)


@contextlib.contextmanager
def _probe(directory):
    """The name of a file that servers must see in a directory."""
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
