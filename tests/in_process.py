"""A shard server in this process: a thread of its own answers, one message after the other, in the order in which they
were sent. With faults, what a network and machines do to messages can be had at will.
"""

import collections
import copy
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxrec.embedding.servers import Sender, ServerGone, ShardServer

# How often a message arrives at once.
_TIMES = {"": 1, "twice": 2, "twice, once late": 1, "late": 0, "drop": 0, "answer and die": 1}


class InProcess:
    """A way to a server in this process, see `Server`.

    What goes there and what comes back are copies, as between processes.

    Args:
      server: that answers.
      fate: (verb, number) -> what becomes of the number-th message of this verb, from 0: '' if it arrives once;
        'twice'; 'late', after the message that is sent next; 'twice, once late'; 'drop'; 'die', when the server ends
        before it looks at the message, or 'answer and die', when it ends after it, and no answer comes.
    """

    def __init__(self, server: ShardServer, fate: Callable[[str, int], str] = lambda verb, number: ""):
        self._server: ShardServer | None = server
        self._fate, self._counts, self._late = fate, collections.Counter[str](), list[tuple]()
        self._pool, self._lock = ThreadPoolExecutor(1, "shard-server"), threading.Lock()
        self._waiting: set[Future] = set()  # answers that are still to come

    def call(self, verb: str, sender: Sender, *args) -> Future:
        """Sends a message, as `Server`."""
        answer: Future = Future()
        with self._lock:
            if self._server is None:
                answer.set_exception(_gone())
            else:
                self._waiting.add(answer)
                self._pool.submit(self._arrive, (verb, sender, copy.deepcopy(args), answer))
        return answer

    def kill(self) -> None:
        """The server ends, and its rows are gone; a message that it is at is done, and nobody hears of it."""
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

    # ---- in the thread

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
            if answer not in self._waiting:  # it was told already, or the server is dead
                return
            self._waiting.discard(answer)
        answer.set_result(found) if error is None else answer.set_exception(error)


def _gone():
    return ServerGone("the server in this process has ended")
