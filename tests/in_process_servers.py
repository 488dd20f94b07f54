"""Servers in this process, which die on demand and have successors.

Shard servers answer messages one at a time in sending order, the others in threads. Faults emulate what a network and
machines do to messages.
"""

import collections
import copy
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxrec import Callback
from jaxrec.embedding import RemoteTables
from jaxrec.embedding.servers import Sender, ServerGone, ShardServer, deal

# How often a message is handled on arrival.
_TIMES = {"": 1, "twice": 2, "twice, once late": 1, "late": 0, "drop": 0, "answer and die": 1}


class InProcess:
    """A connection to a shard server in this process, see `Server`.

    Messages and answers are copied, as between processes.

    Args:
      server: the server that answers.
      fate: (verb, index) -> the fate of the message with this index, from 0, among those of its verb: '' arrives once;
        'twice'; 'late', after the next message; 'twice, once late'; 'drop'; 'die', the server dies before it handles
        the message; or 'answer and die', the server dies after handling it and the answer is lost.
    """

    def __init__(self, server: ShardServer, fate: Callable[[str, int], str] = lambda verb, number: ""):
        self._server: ShardServer | None = server
        self._fate, self._counts, self._late = fate, collections.Counter[str](), list[tuple]()
        self._pool, self._lock = ThreadPoolExecutor(1, "shard-server"), threading.Lock()
        self._waiting: set[Future] = set()  # answers still pending

    def call(self, verb: str, sender: Sender, *args) -> Future:
        """Sends a message, as `Server.call`."""
        answer: Future = Future()
        with self._lock:
            if self._server is None:
                answer.set_exception(_gone())
            else:
                self._waiting.add(answer)
                self._pool.submit(self._arrive, (verb, sender, copy.deepcopy(args), answer))
        return answer

    def kill(self) -> None:
        """Ends the server and loses its rows; a message being handled is completed, but its answer is lost."""
        with self._lock:
            self._server, waiting, self._waiting = None, self._waiting, set()
        for answer in waiting:
            answer.set_exception(_gone())
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.kill()
        self._pool.shutdown()

    # ---- in the server's thread

    def _arrive(self, message):
        verb, late, self._late = message[0], self._late, []
        number, self._counts[verb] = self._counts[verb], self._counts[verb] + 1
        fate = self._fate(verb, number)
        if fate == "die":
            return self.kill()
        if fate not in _TIMES:
            return self._tell(message[-1], error=ValueError(f"fate {fate!r} must be 'die' or one of {list(_TIMES)}."))
        for _ in range(_TIMES[fate]):
            self._handle(message, heard=fate != "answer and die")
        if fate == "answer and die":
            return self.kill()
        for other in late:
            self._handle(other)
        if fate in ("late", "twice, once late"):
            self._late.append(message)

    def _handle(self, message, heard=True):
        verb, sender, args, answer = message
        with self._lock:
            server = self._server
        if server is None:
            return
        try:
            found, error = copy.deepcopy(server.answer(verb, sender, *args)), None
        except Exception as raised:
            found, error = None, raised
        if heard:
            self._tell(answer, found, error)

    def _tell(self, answer, found=None, error=None):
        with self._lock:
            if answer not in self._waiting:  # already answered, or the server is dead
                return
            self._waiting.discard(answer)
        answer.set_result(found) if error is None else answer.set_exception(error)


def _gone():
    return ServerGone("the server in this process has ended")


class Fleet(Callback):
    """The shard servers of one set of tables; as a callback listed before a `Recovery`, it starts successors.

    A context manager, whose end is that of the servers.

    Args:
      servers: number of servers.
      fate: (server, incarnation, verb, index of the message among those of its verb) -> a fate of `InProcess`.
      way: (spec, layout, shards, incarnation) -> a connection to a new server; default: `InProcess`.
      options: passed to RemoteTables.
    """

    def __init__(self, spec, row_optimizer, servers=2, fate=lambda *message: "", way=None, **options):
        self.spec, self.layout, self.fate, self.way = spec, spec.layout(row_optimizer), fate, way
        self.shards, self.died = deal(spec.shards, servers), []
        self.ways = [self.start(number) for number in range(servers)]
        self.tables = RemoteTables(spec, row_optimizer, self.ways, **({"timeout_s": 60} | options))

    def start(self, number, incarnation=1):
        if self.way:
            return self.way(self.spec, self.layout, self.shards[number], incarnation)
        fate = lambda verb, message: self.fate(number, incarnation, verb, message)
        return InProcess(ShardServer(self.spec, self.layout, self.shards[number], incarnation), fate)

    def recover(self, shards):
        for number, mine in enumerate(self.shards):
            if set(mine) & set(self.tables.lost):
                assert set(mine) <= set(shards)  # a dead server loses all of its rows
                self.died.append(number)
                self.ways[number].kill()
                self.ways[number] = self.start(number, 1 + self.died.count(number))
                self.tables.replace(self.ways[number])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for way in self.ways:
            way.kill()


class Supervised(Fleet):
    """A fleet with what a trainer pool reads of its supervisor."""

    deaths = ()

    @property
    def in_use(self):
        return self.ways


def remote(spec, row_optimizer, servers=2, **options):
    """RemoteTables over new servers, which end with this process."""
    return Fleet(spec, row_optimizer, servers, **options).tables


class InThread:
    """Handle to an object of this process whose methods run in threads, until `kill`."""

    def __init__(self, server):
        self.server, self.dead, self.pool = server, threading.Event(), ThreadPoolExecutor(16)
        self.waiting = set()

    def call(self, method, *args):
        if self.dead.is_set():
            raise ServerGone("the sync server has ended")
        answer = Future()
        self.waiting.add(answer)
        self.pool.submit(self._run, answer, method, args)
        return answer

    def _run(self, answer, method, args):
        try:
            found, error = getattr(self.server, method)(*args), None
        except Exception as raised:
            found, error = None, raised
        if not self.dead.is_set():
            self.waiting.discard(answer)
            answer.set_result(found) if error is None else answer.set_exception(error)

    def kill(self):
        self.dead.set()
        for answer in list(self.waiting):
            answer.set_exception(ServerGone("the sync server has ended"))
