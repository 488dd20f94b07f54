"""Kills a server of a supervisor when a given message is on its way to it, for the soak and for tests."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator

from jaxrec.cluster import RayServer, Supervisor


class Killing:
    """kill -9 for one incarnation of a server: when a message of a verb is sent to it.

    Args:
      servers: whose process it is.
      verb, number: of the message that is not answered any more; `read`, say, from 0.
      incarnation: of the server.
      place: of the server.
    """

    def __init__(self, servers: Supervisor, verb: str, number: int = 0, incarnation: int = 1, place: int = 1):
        self.servers, self.left, self.verb, self.wanted = servers, number, verb, (place, incarnation)
        self.dead = threading.Event()
        self._lock = threading.Lock()  # several threads send

    def sees(self, server: RayServer, verb: str) -> None:
        """Called as a message is sent."""
        if (verb, (server.place, server.incarnation)) != (self.verb, self.wanted) or self.dead.is_set():
            return
        with self._lock:
            self.left -= 1
            if self.left >= 0 or self.dead.is_set() or server.process is None:
                return
            self.dead.set()
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.kill(server.process, signal.SIGKILL)


@contextlib.contextmanager
def killing(plans: Iterable[Killing]) -> Iterator[None]:
    """Within it every message of this process goes by the plans, which may be added to."""
    call = RayServer.call

    def seen(self, verb, sender, *args):
        answer = call(self, verb, sender, *args)
        for plan in plans:
            plan.sees(self, verb)
        return answer

    RayServer.call = seen  # type: ignore[method-assign]
    try:
        yield
    finally:
        RayServer.call = call  # type: ignore[method-assign]
