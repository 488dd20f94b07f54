"""A shard server on Ray: an actor in a process of its own, and the way to it.

Nothing of Ray waits without a limit here: it has none by itself. An actor is never restarted by Ray (`max_restarts=0`):
the next call would succeed on an empty one, without an error.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jaxrec.checkpoint  # a server saves and restores: else its first time would wait for this
from jaxrec.cluster.runtime import import_ray
from jaxrec.embedding.servers import Sender, ServerGone, ShardServer
from jaxrec.embedding.spec import EmbeddingSpec, Layout

ACTOR_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,  # an actor without its resources would wait for ever
    "max_restarts": 0,
    "max_concurrency": 4,  # so that reads go on while rows are written to the disk
    "concurrency_groups": {"life": 1},
    # No device and one thread for each: the cores are the driver's. What it has told XLA is not for servers.
    "runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "XLA_FLAGS": ""}},
}
_LONGEST_WHY = 300  # characters of what Ray says


class ServerConfig(NamedTuple):
    """What a server is made of.

    Attributes:
      spec, layout: of the tables.
      directory: where the run saves, which a server must see; None if it need not.
      probe: the name of a file there; '' after the beginning of a run.
    """

    spec: EmbeddingSpec
    layout: Layout
    directory: Path | None = None
    probe: str = ""


class Where(NamedTuple):
    """Where a server runs, as it says itself."""

    address: str
    process: int
    jaxrec: str  # its version


class Actor:
    """What runs in the process of a server."""

    def __init__(self) -> None:
        self._server: ShardServer | None = None

    def where(self) -> Where:
        """Where this runs: the first thing that is asked."""
        return Where(import_ray().util.get_node_ip_address(), os.getpid(), jaxrec.__version__)

    def begin(self, config: ServerConfig, shards: Sequence[int], incarnation: int) -> None:
        """Makes the server, with initial rows.

        Raises:
          ValueError: as `ShardServer`; the directory is not to be seen from here.
        """
        if config.directory is not None and not (config.directory / config.probe).exists():
            raise ValueError(
                f"the server of shards {list(shards)} does not see {config.directory}, where the run saves: give a "
                "directory that all machines see under one name, such as one of a shared file system."
            )
        self._server = ShardServer(config.spec, config.layout, shards, incarnation)

    def answer(self, verb: str, sender: Sender, *args) -> Any:
        """As `ShardServer`."""
        if self._server is None:
            raise ServerGone("the server has not begun")
        return self._server.answer(verb, sender, *args)

    def life(self) -> None:
        """Never returns: the end of this process ends the wait for it, at once."""
        threading.Event().wait()


class RayAnswer:
    """An `Answer` that Ray brings.

    Args:
      reference: of Ray, to what comes.
      name: of the process that gives it, in words.
    """

    def __init__(self, reference: Any, name: str = "the process"):
        self._reference, self._name = reference, name

    def result(self, timeout: float | None = None) -> Any:
        """As `Answer`."""
        ray = import_ray()
        try:
            return ray.get(self._reference, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError("no answer yet") from None
        except ray.exceptions.RayTaskError as error:
            raise error.cause or RuntimeError(_short(error)) from None
        except ray.exceptions.ActorDiedError:  # which says in ten lines where Ray keeps its logs
            raise ServerGone(f"{self._name} has ended") from None
        except ray.exceptions.RayError as error:
            raise ServerGone(f"{self._name} is not to be reached: {_short(error)}") from None


class Process:
    """A process in which a server can begin, now or later; it has none of its own yet.

    Args:
      resources: of Ray that it needs, to choose a machine, as {'rows': 1}; none if None.
    """

    def __init__(self, resources: dict[str, float] | None = None):
        made = import_ray().remote(**ACTOR_OPTIONS, resources=resources or {})(Actor)
        self.actor = made.remote()
        self.life = self.actor.life.options(concurrency_group="life").remote()  # ready when the process has ended
        self.where = self.actor.where.remote()

    def number(self, timeout_s: float) -> int:
        """Its number on its machine, when it is there.

        Args:
          timeout_s: seconds.

        Raises:
          TimeoutError: it is not there by then.
          ServerGone: it has died.
        """
        return RayAnswer(self.where).result(timeout_s).process

    def why(self) -> str:
        """Why it has ended; '' if it lives or is being started."""
        return _why(self.life, "the process")

    def kill(self) -> None:
        """Ends it, some seconds later if it is stopped."""
        ray = import_ray()
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.actor, no_restart=True)


class RayServer:
    """A server in a process of its own, and the way to it, see `Server`.

    It is begun at once, and usable when `wait` has returned.

    Args:
      config: what it is made of; a `Cluster` is entered.
      index: its number among the servers of the tables.
      shards: that it has.
      incarnation: one more than that of the server whose place it takes.
      resources: of Ray that it needs, to choose a machine, as {'rows': 1}; none if None.
      started: the process in which it begins; a new one if None.
    """

    def __init__(
        self, config: ServerConfig, index: int, shards: Sequence[int], incarnation: int,
        resources: dict[str, float] | None = None, started: Process | None = None,
    ):  # fmt: skip
        self.index, self.shards, self.incarnation = index, tuple(shards), incarnation
        self._process = started or Process(resources)
        self._actor, self.life, self._where = self._process.actor, self._process.life, self._process.where
        self._started = self._actor.begin.remote(config, self.shards, incarnation)
        self.process: int | None = None
        self.address = ""

    def __str__(self) -> str:
        return f"server {self.index} (incarnation {self.incarnation}, shards {list(self.shards)})"

    @property
    def actor(self) -> Any:
        """Ray's handle of it, for others that send messages there."""
        return self._actor

    @property
    def _name(self):
        return "its process" if self.process is None else f"its process {self.process} on {self.address}"

    def wait(self, timeout_s: float) -> None:
        """Waits until it can answer.

        Args:
          timeout_s: seconds, of the process and of its rows each.

        Raises:
          TimeoutError: it has not begun by then.
          ServerGone: it has died.
          ValueError: it is of another version of jaxrec, or does not see the directory.
        """
        self._check(self._awaited(self._where, timeout_s, "has no process yet: look whether `ray status` has room"))
        self._awaited(self._started, timeout_s, "has not made its rows")

    def call(self, verb: str, sender: Sender, *args) -> RayAnswer:
        """Sends a message, as `Server`."""
        return RayAnswer(self._actor.answer.remote(verb, sender, *args), self._name)

    def why(self) -> str:
        """Why it has ended; '' if it lives."""
        return _why(self.life, self._name)

    def kill(self) -> None:
        """Ends the process, some seconds later if it is stopped; its rows are gone."""
        self._process.kill()

    def _awaited(self, reference, timeout_s, what):
        try:
            return RayAnswer(reference, self._name).result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{self} {what}, after {timeout_s:g} s.") from None
        except ServerGone as gone:
            raise ServerGone(
                f"{self} has not begun: {gone}. On a cluster that was joined, jaxrec must be installed everywhere, and "
                "Ray be started with RAY_AUTH_MODE=token and one token."
            ) from None

    def _check(self, where):
        self.process, self.address = where.process, where.address
        if where.jaxrec != jaxrec.__version__:
            raise ValueError(
                f"{self} has jaxrec {where.jaxrec}, and this is {jaxrec.__version__}: install the same everywhere."
            )


def _why(life, name):
    """Why a process has ended; '' if it has not."""
    try:
        RayAnswer(life, name).result(0)
    except TimeoutError:
        return ""
    except Exception as error:
        return str(error)
    return f"{name} has ended"


def _short(error):
    """What Ray says, in a line."""
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST_WHY else text[:_LONGEST_WHY] + " ..."
