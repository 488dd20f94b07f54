"""Shard servers as Ray actors, each in a process of its own, and their handles.

Ray itself waits without a limit; every wait here has one. Ray never restarts an actor (`max_restarts=0`): the next call
would reach an empty one, without an error.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jaxrec.checkpoint  # imported beforehand: a server saves, restores and tracks its rows
import jaxrec.cpr.tracking
from jaxrec.cluster.runtime import import_ray
from jaxrec.embedding.servers import Sender, ServerGone, ShardServer
from jaxrec.embedding.spec import EmbeddingSpec, Layout

ACTOR_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,  # an actor that reserves cores waits for ever where there are none left
    "max_restarts": 0,
    "max_concurrency": 4,  # so that reads continue while rows are written to disk
    "concurrency_groups": {"lifetime": 1},
    # No device, and one thread per server: the cores are the driver's. Its XLA flags are not for servers.
    "runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "XLA_FLAGS": ""}},
}
_LONGEST_REASON = 300  # characters of an error message of Ray


class ServerConfig(NamedTuple):
    """Arguments of a server, besides its shards.

    Attributes:
      spec: the tables.
      layout: parts and widths of their stacks.
      directory: directory of the run's checkpoints, which the server must see; None if nothing is saved.
      probe: name of a file in the directory that proves it; '' for successors, which are not checked.
    """

    spec: EmbeddingSpec
    layout: Layout
    directory: Path | None = None
    probe: str = ""


class ProcessInfo(NamedTuple):
    """The process of a server, as it reports it."""

    address: str  # of its machine
    pid: int
    version: str  # of jaxrec


class ServerActor:
    """Ray actor that holds a `ShardServer`."""

    def __init__(self) -> None:
        self._server: ShardServer | None = None

    def process_info(self) -> ProcessInfo:
        """Return address, process id and version; the first call to every actor."""
        return ProcessInfo(import_ray().util.get_node_ip_address(), os.getpid(), jaxrec.__version__)

    def begin(self, config: ServerConfig, shards: Sequence[int], incarnation: int) -> None:
        """Create the server, with initial rows.

        Raises:
          ValueError: as `ShardServer`, or this machine does not see the directory.
        """
        if config.directory is not None and not (config.directory / config.probe).exists():
            raise ValueError(
                f"the server of shards {list(shards)} does not see {config.directory}, where the run saves: give a "
                "directory that all machines see under one name, such as one of a shared file system."
            )
        self._server = ShardServer(config.spec, config.layout, shards, incarnation)

    def answer(self, verb: str, sender: Sender, *args) -> Any:
        """Answer a message, see `ShardServer.answer`."""
        if self._server is None:
            raise ServerGone("the server has not begun")
        return self._server.answer(verb, sender, *args)

    def lifetime(self) -> None:
        """Never return: a pending call of it fails as soon as this process ends."""
        threading.Event().wait()


class RayAnswer:
    """`Answer` to a call of a Ray actor.

    Args:
      reference: Ray's object reference to the result.
      name: name of the answering process, for error messages.
    """

    def __init__(self, reference: Any, name: str = "the process"):
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


class StandbyProcess:
    """A process with an empty `ServerActor`, in which a server can begin now or later.

    Args:
      resources: Ray resources that select its machine, such as {'rows': 1}; None for any machine.
    """

    def __init__(self, resources: dict[str, float] | None = None):
        actor_class = import_ray().remote(**ACTOR_OPTIONS, resources=resources or {})(ServerActor)
        self.actor = actor_class.remote()
        # Ready once the process has ended.
        self.lifetime = self.actor.lifetime.options(concurrency_group="lifetime").remote()
        self.info = self.actor.process_info.remote()

    def pid(self, timeout_s: float) -> int:
        """Wait up to `timeout_s` seconds for the process to start; return its process id.

        Raises:
          TimeoutError: it has not started in time.
          ServerGone: it has died.
        """
        return RayAnswer(self.info).result(timeout_s).pid

    def death_reason(self) -> str:
        """Return why the process has ended; '' while it runs or starts."""
        return death_reason(self.lifetime, "the process")

    def kill(self) -> None:
        """Kill the process; takes some seconds if it is stopped (SIGSTOP)."""
        kill_actor(self.actor)


class RayServer:
    """Handle of a shard server in a process of its own, see `Server`.

    It begins at once, and is usable after `wait`. A `Cluster` must be entered.

    Args:
      config: tables and directory.
      index: number of the server, in 0..P-1.
      shards: shard numbers that it holds.
      incarnation: 1, or one more than that of the server that it replaces.
      resources: Ray resources that select its machine, such as {'rows': 1}; None for any machine.
      standby: process in which it begins; a new one if None.

    Attributes:
      process: process id, None before `wait`.
      address: address of its machine, '' before `wait`.
      lifetime: Ray's object reference that is ready once the process has ended.
    """

    def __init__(
        self, config: ServerConfig, index: int, shards: Sequence[int], incarnation: int,
        resources: dict[str, float] | None = None, standby: StandbyProcess | None = None,
    ):  # fmt: skip
        self.index, self.shards, self.incarnation = index, tuple(shards), incarnation
        self._standby = standby or StandbyProcess(resources)
        self._actor, self.lifetime, self._info = self._standby.actor, self._standby.lifetime, self._standby.info
        self._begun = self._actor.begin.remote(config, self.shards, incarnation)
        self.process: int | None = None
        self.address = ""

    def __str__(self) -> str:
        return f"server {self.index} (incarnation {self.incarnation}, shards {list(self.shards)})"

    @property
    def actor(self) -> Any:
        """Ray's handle of the actor, for other processes that send it messages."""
        return self._actor

    @property
    def _name(self):
        return "its process" if self.process is None else f"its process {self.process} on {self.address}"

    def wait(self, timeout_s: float) -> None:
        """Wait until the server can answer.

        Args:
          timeout_s: seconds for the start of the process, and as many again for its initial rows.

        Raises:
          TimeoutError: one of them has taken longer.
          ServerGone: the process has died.
          ValueError: it runs another version of jaxrec, or does not see the directory.
        """
        info = self._wait_for(self._info, timeout_s, "has no process yet: look whether `ray status` has room")
        self._check(info)
        self._wait_for(self._begun, timeout_s, "has not made its rows")

    def call(self, verb: str, sender: Sender, *args) -> RayAnswer:
        """Send a message, see `Server.call`."""
        return RayAnswer(self._actor.answer.remote(verb, sender, *args), self._name)

    def death_reason(self) -> str:
        """Return why the process has ended; '' while it runs or starts."""
        return death_reason(self.lifetime, self._name)

    def kill(self) -> None:
        """Kill the process, and with it its rows; takes some seconds if it is stopped (SIGSTOP)."""
        self._standby.kill()

    def _wait_for(self, reference, timeout_s, problem):
        try:
            return RayAnswer(reference, self._name).result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{self} {problem}, after {timeout_s:g} s.") from None
        except ServerGone as gone:
            raise ServerGone(
                f"{self} has not begun: {gone}. On a cluster that was joined, jaxrec must be installed on every "
                "machine, and Ray must be started with RAY_AUTH_MODE=token and the same token."
            ) from None

    def _check(self, info):
        self.process, self.address = info.pid, info.address
        if info.version != jaxrec.__version__:
            raise ValueError(
                f"{self} runs jaxrec {info.version}, and the driver {jaxrec.__version__}: install the same version on "
                "every machine."
            )


def death_reason(lifetime: Any, name: str) -> str:
    """Return why the process of an actor has ended; '' while it runs or starts.

    Args:
      lifetime: Ray's reference to the actor's call of `lifetime`.
      name: name of the process, for the message.
    """
    try:
        RayAnswer(lifetime, name).result(0)
    except TimeoutError:
        return ""
    except Exception as error:
        return str(error)
    return f"{name} has ended"


def kill_actor(actor: Any) -> None:
    """Kill the process of an actor, if Ray still knows it."""
    ray = import_ray()
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(actor, no_restart=True)


def _one_line(error):
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + " ..."
