"""Shard servers in processes of their own, on Ray, and their handles."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jaxrec.checkpoint  # imported beforehand: a server saves, restores and tracks its rows
import jaxrec.cpr.tracking
from jaxrec.cluster.processes import Handle, RayAnswer, RayProcess
from jaxrec.embedding.servers import Sender, ServerGone, ShardServer
from jaxrec.embedding.spec import EmbeddingSpec, Layout


class ServerConfig(NamedTuple):
    """Arguments of a server, besides its shards."""

    spec: EmbeddingSpec
    layout: Layout
    directory: Path | None = None  # of the run's checkpoints, which the server must see; None if nothing is saved
    probe: str = ""  # name of a file in it that proves that; '' for successors, which are not checked


class ServerActor:
    """The object in the process of a server; holds a `ShardServer` after `begin`."""

    def __init__(self) -> None:
        self._server: ShardServer | None = None

    def begin(self, config: ServerConfig, shards: Sequence[int], incarnation: int) -> None:
        """Create the server, with initial rows."""
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


def server_process(resources: dict[str, float] | None = None) -> RayProcess:
    """Start a process in which a server can begin, now or later."""
    return RayProcess(ServerActor, "its process", resources=resources)


class ServerHandle(Handle):
    """Handle to a shard server, see `jaxrec.embedding.servers.Server`; can be pickled."""

    def call(self, verb: str, sender: Sender, *args: Any) -> RayAnswer:
        """Send a message; return a future of the answer."""
        return super().call("answer", verb, sender, *args)


class RayServer:
    """A shard server in a process of its own, see `Server`.

    It begins at once, and is usable after `wait`. A `Cluster` must be entered.

    Args:
      config: tables and directory.
      index: number of the server, in 0..P-1.
      shards: shard numbers that it holds.
      incarnation: 1, or one more than that of the server that it replaces.
      standby: result of `server_process`, in which it begins.

    Attributes:
      process: process id, None before `wait`.
      address: address of its machine, '' before `wait`.
    """

    def __init__(self, config: ServerConfig, index: int, shards: Sequence[int], incarnation: int, standby: RayProcess):
        self.index, self.shards, self.incarnation = index, tuple(shards), incarnation
        self._process = standby
        self._begun = standby.handle.call("begin", config, self.shards, incarnation)
        self.process: int | None = None
        self.address = ""

    def __str__(self) -> str:
        return f"server {self.index} (incarnation {self.incarnation}, shards {list(self.shards)})"

    @property
    def handle(self) -> ServerHandle:
        """Handle for other processes that send it messages."""
        return ServerHandle(self._process.handle.actor, str(self))

    def wait(self, timeout_s: float) -> None:
        """Wait until the server can answer.

        Args:
          timeout_s: seconds for the start of the process, and as many again for its initial rows.

        Raises:
          TimeoutError: one of them has taken longer.
          ServerGone: the process has died.
          ValueError: it runs another version of jaxrec, or does not see the directory.
        """
        info = self._wait_for(self._process.info, timeout_s, "has no process yet: look whether `ray status` has room")
        if info.version != jaxrec.__version__:
            raise ValueError(
                f"{self} runs jaxrec {info.version}, and the driver {jaxrec.__version__}: install the same version on "
                "every machine."
            )
        self.process, self.address = info.pid, info.address
        self._process.name = f"its process {info.pid} on {info.address}"
        self._wait_for(self._begun, timeout_s, "has not made its rows")

    def call(self, verb: str, sender: Sender, *args) -> RayAnswer:
        """Send a message, see `Server.call`."""
        return RayAnswer(self._process.handle.actor.answer.remote(verb, sender, *args), self._process.name)

    def death_reason(self) -> str:
        """Return why the process has ended; '' while it runs or starts."""
        return self._process.death_reason()

    def kill(self) -> None:
        """Kill the process, and with it its rows; takes some seconds if it is stopped (SIGSTOP)."""
        self._process.kill()

    def _wait_for(self, answer, timeout_s, problem):
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{self} {problem}, after {timeout_s:g} s.") from None
        except ServerGone as gone:
            raise ServerGone(
                f"{self} has not begun: {gone}. On a cluster that was joined, jaxrec must be installed on every "
                "machine, and Ray must be started with RAY_AUTH_MODE=token and the same token."
            ) from None
