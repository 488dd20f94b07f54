"""Objects in processes of their own, as Ray actors: call and poll them, and detect the deaths of the processes."""

import importlib
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrec.cluster.runtime import import_ray
from jaxrec.cluster.servers import ACTOR_OPTIONS, RayAnswer, death_reason, kill_actor
from jaxrec.embedding.servers import Sender, ServerGone

START_TIMEOUT_S = 120.0  # for a process to start and answer for the first time


class ActorHandle(NamedTuple):
    """Handle to an object in another process; can be pickled."""

    actor: Any
    name: str

    def call(self, method: str, *args: Any) -> RayAnswer:
        """Call a method of the object; return a future of its result."""
        return RayAnswer(getattr(self.actor, method).remote(*args), self.name)


class ServerHandle(NamedTuple):
    """Handle to a shard server, see `jaxrec.embedding.servers.Server`; can be pickled."""

    actor: Any
    name: str

    def call(self, verb: str, sender: Sender, *args: Any) -> RayAnswer:
        """Send a message; return a future of the answer."""
        return RayAnswer(self.actor.answer.remote(verb, sender, *args), self.name)


class Process:
    """A new process with one object, whose methods are called through `handle`.

    Args:
      kind: class of the object.
      threads: maximum number of concurrent calls.
      resources: Ray resources that select its machine, such as {'trainer': 1}; None for any machine.
      name: name of the process in messages.
      args: arguments of the class.
    """

    def __init__(self, kind: type, threads: int, resources: dict[str, float] | None, name: str, *args: Any):
        options = ACTOR_OPTIONS | {"max_concurrency": threads, "resources": resources or {}}
        self.name, self.actor = name, import_ray().remote(**options)(_with_lifetime(kind)).remote(*args)
        self.handle = ActorHandle(self.actor, name)
        self.lifetime = self.actor.lifetime.options(concurrency_group="lifetime").remote()
        self._pid = self.handle.call("process_id")
        self._pending: RayAnswer | None = None
        self._started_at, self._asked_at, self._answered_at = time.monotonic(), 0.0, -math.inf

    @property
    def pid(self) -> int | None:
        """Process id on its machine; None until it has started."""
        try:
            return self._pid.result(0)
        except (TimeoutError, ServerGone):
            return None

    def death_reason(self, timeout_s: float) -> str:
        """Return why the process counts as dead; '' if it is alive.

        Args:
          timeout_s: maximum seconds until a call of `poll` is answered; `START_TIMEOUT_S`, if longer, for the first.
        """
        now, start_timeout_s = time.monotonic(), max(START_TIMEOUT_S, timeout_s)
        if self._answered_at == -math.inf and now - self._started_at > start_timeout_s:
            return f"{self.name} has not started within {start_timeout_s:g} s"
        # Since the call, not since the last answer: this process may itself have waited for something else meanwhile.
        if self._answered_at > -math.inf and self._pending is not None and now - self._asked_at > timeout_s:
            return f"{self.name} has not answered for {timeout_s:g} s"
        return death_reason(self.lifetime, self.name)

    def kill(self) -> None:
        """Kill the process."""
        kill_actor(self.actor)

    def poll(self, method: str) -> Any:
        """Return the result of the pending call of a method and forget the call; None if there is no result yet.

        Starts a call if none is pending. Errors give None: `death_reason` reports them.
        """
        try:
            if self._pending is None:
                self._asked_at, self._pending = time.monotonic(), self.handle.call(method)
            found = self._pending.result(0)
        except TimeoutError:
            return None
        except Exception:
            self._pending = None
            return None
        self._pending, self._answered_at = None, time.monotonic()
        return found


def packed(*what: Any) -> tuple[list[str], bytes]:
    """Pickle objects and functions, also of `__main__`, with the module search path that `unpacked` needs."""
    return [path for path in sys.path if path], importlib.import_module("ray.cloudpickle").dumps(what)


def unpacked(paths: Sequence[str], pickled: bytes) -> tuple:
    """Unpickle, in another process, what `packed` has returned; its search path is appended to that of this process."""
    sys.path += [path for path in paths if path not in sys.path and os.path.isdir(path)]
    return pickle.loads(pickled)


def _with_lifetime(kind):
    """Return a subclass with the methods that `Process` calls."""

    class WithLifetime(kind):  # type: ignore[misc, valid-type]
        def lifetime(self):
            threading.Event().wait()

        def process_id(self):
            return os.getpid()

    WithLifetime.__name__ = kind.__name__  # by which `ps` and Ray's logs name the process
    return WithLifetime
