"""Objects in processes of their own, that are asked again and again, and whose ends are noticed."""

import contextlib
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
from jaxrec.cluster.servers import ACTOR_OPTIONS, RayAnswer
from jaxrec.embedding.servers import Sender, ServerGone

START_TIMEOUT_S = 120.0  # of a process, until it answers for the first time


class ActorHandle(NamedTuple):
    """A way to an object in a process of its own; pickled, it leads there too."""

    actor: Any
    name: str

    def call(self, method: str, *args: Any) -> RayAnswer:
        """Calls a method there, and returns at once."""
        return RayAnswer(getattr(self.actor, method).remote(*args), self.name)


class ServerHandle(NamedTuple):
    """A way to a shard server, see `jaxrec.embedding.servers.Server`."""

    actor: Any
    name: str

    def call(self, verb: str, sender: Sender, *args: Any) -> RayAnswer:
        """Sends a message, and returns at once."""
        return RayAnswer(self.actor.answer.remote(verb, sender, *args), self.name)


class Process:
    """An object in a process of its own, and what is asked of it at the moment.

    Args:
      kind: the class of the object.
      threads: that answer there.
      resources: of Ray that it needs, to choose its machine; none if None.
      name: of it, in words.
      args: of the class.
    """

    def __init__(self, kind: type, threads: int, resources: dict[str, float] | None, name: str, *args: Any):
        options = ACTOR_OPTIONS | {"max_concurrency": threads, "resources": resources or {}}
        made = import_ray().remote(**options)(_with_life(kind))
        self.name, self.actor = name, made.remote(*args)
        self.handle = ActorHandle(self.actor, name)
        self.life = self.actor.life.options(concurrency_group="life").remote()
        self._number = self.handle.call("process")
        self._pending: RayAnswer | None = None
        self._started_at, self._answered_at = time.monotonic(), -math.inf

    @property
    def number(self) -> int | None:
        """Of the process, on its machine; None while it is started."""
        try:
            return self._number.result(0)
        except (TimeoutError, ServerGone):
            return None

    def death_reason(self, timeout_s: float) -> str:
        """Why it is dead, '' if it lives; one that has been silent for too long is.

        Args:
          timeout_s: seconds; a process that has not begun gets `START_TIMEOUT_S` instead.
        """
        now = time.monotonic()
        if self._answered_at == -math.inf and now - self._started_at > max(START_TIMEOUT_S, timeout_s):
            return f"{self.name} has not begun within {max(START_TIMEOUT_S, timeout_s):g} s"
        if now - self._answered_at > timeout_s and self._answered_at > -math.inf:
            return f"{self.name} has said nothing for {timeout_s:g} s"
        try:
            RayAnswer(self.life, self.name).result(0)
        except TimeoutError:
            return ""
        except Exception as error:
            return str(error)
        return f"{self.name} has ended"

    def kill(self) -> None:
        """Ends it."""
        ray = import_ray()
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.actor, no_restart=True)

    def poll(self, method: str) -> Any:
        """The newest answer to a question that is asked again and again; None if none has come since the last look."""
        try:
            self._pending = self._pending or self.handle.call(method)
            found = self._pending.result(0)
        except TimeoutError:
            return None
        except Exception:  # it is dead, which `death_reason` says
            self._pending = None
            return None
        self._pending, self._answered_at = None, time.monotonic()
        return found


def packed(*what: Any) -> tuple[list[str], bytes]:
    """Objects and functions of the caller's, and where their modules are to be found, for `unpacked` elsewhere."""
    return [path for path in sys.path if path], importlib.import_module("ray.cloudpickle").dumps(what)


def unpacked(paths: Sequence[str], pickled: bytes) -> tuple:
    """What was `packed` in another process, whose modules are looked for after those of this one."""
    sys.path += [path for path in paths if path not in sys.path and os.path.isdir(path)]
    return pickle.loads(pickled)


def _with_life(kind):
    """A class whose objects can be waited for, and say which process they are in."""

    class Living(kind):  # type: ignore[misc, valid-type]
        def life(self):
            threading.Event().wait()

        def process(self):
            return os.getpid()

    return Living
