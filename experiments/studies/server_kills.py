"""Kills a server of a supervisor when a given message is on its way to it, and looks what is left afterwards: for the
soaks and for tests."""

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxrec.cluster import RayServer, Supervisor

END_S = 10.0  # in which the processes of a run have ended


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


def alive_after(processes: list[int], seconds: float) -> list[int]:
    """Those of some processes that are alive when so many seconds are over."""
    end, left = time.monotonic() + seconds, processes
    while left and time.monotonic() < end:
        left = [number for number in left if lives(number)]
        time.sleep(0.05)
    return left


def lives(process: int) -> bool:
    """Whether a process runs."""
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    return False


@contextlib.contextmanager
def of_its_own() -> Iterator[Path]:
    """A directory for the temporary files of this process, whatever other processes leave; with a short path."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="s-") as place:
        tempfile.tempdir = place
        try:
            yield Path(place)
        finally:
            tempfile.tempdir = before
