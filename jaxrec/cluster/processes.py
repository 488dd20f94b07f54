"""Objects in processes of their own: call and poll them, and detect the deaths of the processes; as Ray actors.

Ray itself waits without a limit; every wait here has one. Ray never restarts an actor (`max_restarts=0`): the next call
would reach an empty one, without an error.
"""

import abc
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

from jaxrec.cluster.runtime import INLINE_BETWEEN_MACHINES, import_ray
from jaxrec.embedding.servers import ServerGone

START_TIMEOUT_S = 120.0  # for a process to start and answer for the first time
# No device, and one thread per operator: the cores are the driver's or each trainer's. Its XLA flags are its own.
VARIABLES = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "XLA_FLAGS": ""}
_ACTOR_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,  # an actor that reserves cores waits for ever where there are none left
    "max_restarts": 0,
    "concurrency_groups": {"lifetime": 1},
}
_LONGEST_REASON = 300  # characters of an error message of Ray


class RayAnswer:
    """`Answer` to a call of a Ray actor, from Ray's reference to the result and the name of its process."""

    def __init__(self, reference: Any, name: str):
        self._reference, self._name = reference, name

    def result(self, timeout: float | None = None) -> Any:
        """Return the answer, see `Answer.result`."""
        ray = import_ray()
        try:
            return ray.get(self._reference, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError("no answer yet") from None
        except ray.exceptions.RayTaskError as error:
            raise error.cause or RuntimeError(_one_line(error)) from None
        except ray.exceptions.ActorDiedError:  # its message is ten lines on where Ray keeps its logs
            raise ServerGone(f"{self._name} has ended") from None
        except ray.exceptions.RayError as error:
            raise ServerGone(f"{self._name} cannot be reached: {_one_line(error)}") from None


class Handle(NamedTuple):
    """Handle to an object in another process; can be pickled."""

    actor: Any
    name: str

    def call(self, method: str, *args: Any) -> RayAnswer:
        """Call a method of the object; return a future of its result."""
        return RayAnswer(getattr(self.actor, method).remote(*args), self.name)


class ProcessInfo(NamedTuple):
    """A process, as it reports itself."""

    address: str  # of its machine
    pid: int
    version: str  # of jaxrec


class Process(abc.ABC):
    """A new process with one object, whose methods are called through `handle`.

    Attributes:
      info: future of its `ProcessInfo`.
      asked_at: time of the call whose answer `poll` has returned last or will return, by `time.monotonic`.
    """

    def __init__(self, name: str, handle: Any):
        self.name, self.handle = name, handle
        self.info = handle.call("process_info")
        self._pending: Any = None
        self._started_at, self.asked_at, self._has_answered = time.monotonic(), 0.0, False

    @property
    def pid(self) -> int | None:
        """Process id on its machine; None until it has started."""
        try:
            return self.info.result(0).pid
        except (TimeoutError, ServerGone):
            return None

    @abc.abstractmethod
    def kill(self) -> None:
        """Kill the process."""

    @abc.abstractmethod
    def _ended(self) -> str:
        """Return how the process has ended; '' if it is there."""

    def look(self, method: str, timeout_s: float) -> tuple[Any, str]:
        """Return what `poll` does and, if that is None, the `death_reason`."""
        found = self.poll(method)
        return found, "" if found is not None else self.death_reason(timeout_s)

    def death_reason(self, timeout_s: float = math.inf) -> str:
        """Return why the process counts as dead; '' if it is alive.

        Args:
          timeout_s: maximum seconds until a call of `poll` is answered; `START_TIMEOUT_S`, if longer, for the first.
        """
        now, limit_s = time.monotonic(), timeout_s if self._has_answered else max(START_TIMEOUT_S, timeout_s)
        if now - self._started_at > limit_s and not self._has_started():
            return f"{self.name} has not started within {limit_s:g} s"
        # Since the call, not since the last answer: this process may itself have waited for something else meanwhile.
        if self._pending is not None and now - self.asked_at > limit_s:
            return f"{self.name} has not answered for {limit_s:g} s"
        return self._ended()

    def _has_started(self):
        try:
            self.info.result(0)
        except TimeoutError:
            return False
        except Exception:  # it has ended, as `_ended` says
            pass
        return True

    def poll(self, method: str) -> Any:
        """Return the result of the pending call of a method and forget the call; None if there is no result yet.

        Starts a call if none is pending. Errors give None: `death_reason` reports them.
        """
        try:
            if self._pending is None:
                self.asked_at, self._pending = time.monotonic(), self.handle.call(method)
            found = self._pending.result(0)
        except TimeoutError:
            return None
        except Exception:
            self._pending = None
            return None
        self._pending, self._has_answered = None, True
        return found


class RayProcess(Process):
    """A new process on Ray.

    Args:
      kind: class of the object.
      name: name of the process in messages.
      args: arguments of the class.
      threads: maximum number of concurrent calls.
      resources: Ray resources that select its machine, such as {'trainer': 1}; None for any machine.
    """

    def __init__(
        self, kind: type, name: str, args: Sequence = (), threads: int = 4, resources: dict[str, float] | None = None
    ):
        inline = {name: os.environ[name] for name in INLINE_BETWEEN_MACHINES if name in os.environ}
        options = _ACTOR_OPTIONS | {"max_concurrency": threads, "resources": resources or {}}
        options["runtime_env"] = {"env_vars": VARIABLES | inline}
        actor = import_ray().remote(**options)(_with_lifetime(kind)).remote(*args)
        self._lifetime = actor.lifetime.options(concurrency_group="lifetime").remote()
        super().__init__(name, Handle(actor, name))

    def _ended(self) -> str:
        try:
            RayAnswer(self._lifetime, self.name).result(0)
        except TimeoutError:
            return ""
        except Exception as error:
            return str(error)
        return f"{self.name} has ended"

    def kill(self) -> None:
        """Kill the process, if Ray still knows it; takes some seconds if it is stopped (SIGSTOP)."""
        ray = import_ray()
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.handle.actor, no_restart=True)


def packed(*what: Any) -> tuple[list[str], bytes]:
    """Pickle objects and functions, with the module search path that `unpacked` needs.

    Raises:
      ValueError: something cannot be pickled without Ray or cloudpickle.
    """
    try:
        return [path for path in sys.path if path], _pickler().dumps(what)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"this cannot be sent to another process ({error}): give a function of a module that makes it, or "
            "pip install cloudpickle."
        ) from error


def _pickler():
    for name in ("cloudpickle", "ray.cloudpickle"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return pickle


def unpacked(paths: Sequence[str], pickled: bytes) -> tuple:
    """Unpickle, in another process, what `packed` has returned; its search path is appended to that of this process."""
    sys.path += [path for path in paths if path not in sys.path and os.path.isdir(path)]
    return pickle.loads(pickled)


def _with_lifetime(kind):
    """Return a subclass with the methods that `Process` calls."""

    class WithLifetime(kind):  # type: ignore[misc, valid-type]
        def lifetime(self):  # never returns: a pending call of it fails as soon as the process ends
            threading.Event().wait()

        def process_info(self):
            version = importlib.import_module("jaxrec").__version__
            return ProcessInfo(import_ray().util.get_node_ip_address(), os.getpid(), version)

    # By these `ps` and Ray's logs name the process, at rest and in a call.
    WithLifetime.__name__ = WithLifetime.__qualname__ = kind.__name__
    return WithLifetime


def _one_line(error):
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + " ..."
