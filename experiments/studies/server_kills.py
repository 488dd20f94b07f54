"""Kill a server when a given message is sent to it, and check what is left afterwards; for the soaks and tests."""

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxrec.cluster import RayServer, Supervisor

END_S = 10.0  # time within which the processes of a run must end


class Killing:
    """A plan to kill -9 one incarnation of a server when a given message is sent to it.

    Args:
      verb, number: the message that triggers the kill: number `number`, from 0, of those with this verb, such as
        `read`.
    """

    def __init__(self, servers: Supervisor, verb: str, number: int = 0, incarnation: int = 1, place: int = 1):
        self.servers, self.left, self.verb, self.wanted = servers, number, verb, (place, incarnation)
        self.dead = threading.Event()
        self._lock = threading.Lock()  # messages are sent by several threads

    def sees(self, server: RayServer, verb: str) -> None:
        """Kill the server if this message triggers it; called for each message sent."""
        if (verb, (server.index, server.incarnation)) != (self.verb, self.wanted) or self.dead.is_set():
            return
        with self._lock:
            self.left -= 1
            if self.left >= 0 or self.dead.is_set() or server.process is None:
                return
            self.dead.set()
        with contextlib.suppress(ProcessLookupError):  # already ended
            os.kill(server.process, signal.SIGKILL)


@contextlib.contextmanager
def killing(plans: Iterable[Killing]) -> Iterator[None]:
    """Within the context, every message of this process is checked against the plans, which may grow meanwhile."""
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
    """Return the processes that are still alive after `seconds`; returns early once all have ended."""
    end, left = time.monotonic() + seconds, processes
    while left and time.monotonic() < end:
        left = [number for number in left if lives(number)]
        time.sleep(0.05)
    return left


def lives(process: int) -> bool:
    """Whether a process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    return False


@contextlib.contextmanager
def of_its_own() -> Iterator[Path]:
    """Put the temporary files of this process into a fresh directory with a short path."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="s-") as place:
        tempfile.tempdir = place
        try:
            yield Path(place)
        finally:
            tempfile.tempdir = before
