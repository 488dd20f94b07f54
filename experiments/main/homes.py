"""Where the embedding rows of a run are: on its devices, pinned beside them, in host memory, or at servers on Ray.

`--tables` chooses one; each creates its own tables, and what a run keeps beside them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from jaxrec.checkpoint import restore_shards
from jaxrec.cluster import Cluster, Machine, Supervisor
from jaxrec.embedding import EmbeddingSpec, HostTables, Tables, create_tables
from jaxrec.files import Lock, local_path, make_directory, write_text
from jaxrec.sharding import as_mesh
from jaxrec.task import Task
from jaxrec.types import RowOptimizer, ShardsLost
from main.cli import belongs, refuse, rule_of_ray, say
from main.run_dir import Run, go_on_with

HomeKind = Literal["device", "pinned", "host", "remote"] | None
SERVER_TIMEOUT_S = 120.0  # also for the save and the restore of a server's rows


class Placed:
    """What a run keeps of its tables' home while it trains.

    Args:
      create: task -> tables of initial rows, or the supervisor of servers that hold them.
      replaces: whether lost servers are replaced.

    Attributes:
      copy: how images copy the tables: 'whole', or 'shards', which each server writes itself.
    """

    copy: Literal["whole", "shards"] = "whole"

    def __init__(self, create: Callable[[Task], Tables | Supervisor], replaces: bool = False):
        self._create, self._replaces = create, replaces
        self._servers: Supervisor | None = None

    def tables(self, task: Task) -> Tables:
        """Create tables of initial rows."""
        created = self._create(task)
        if not isinstance(created, Supervisor):
            return created
        self._servers, self.copy = created, "shards"
        return created.tables

    def watch(self, engine) -> None:
        """Start replacing lost servers, if there are any; call it before a recovery is entered."""
        if self._replaces:
            engine.enter(self._servers)

    @property
    def lost(self) -> str:
        """Which servers are dead, in words; '' if none."""
        return "" if self._servers is None else self._servers.lost


@dataclasses.dataclass(frozen=True)
class Devices:
    """Rows that programs of the devices reach: in their memory, or pinned in that of this process."""

    tables: HomeKind = None
    """On the devices; pinned in the memory of this process, where the devices read and write the rows themselves; in
    that memory, copied by the host; or at server processes, on Ray. By default on the devices, or pinned if these are
    GPUs and rows and slots take more than half of their memory."""
    shards: int = 8
    """Shards of every table; CPR's nodes."""

    def check(self) -> None:
        """Raise ValueError if the flags contradict each other, or a library is missing."""

    @contextlib.contextmanager
    def opened(self, run: Run) -> Iterator[Placed]:
        """Yield the home of the tables of a run."""
        yield Placed(self._create)

    def _create(self, task: Task) -> Tables:
        on_devices = fits_devices(task) if self.tables is None else self.tables == "device"
        return create_tables("device" if on_devices else "pinned", task.spec, task.row_optimizer, task.mesh)


@dataclasses.dataclass(frozen=True)
class Host(Devices):
    """Rows in the memory of this process, or in mapped files, copied by the host."""

    read_by: ClassVar = "--tables host"
    tables: HomeKind = "host"
    table_directory: Path | None = None
    """Keep the tables as mapped files here (best on tmpfs) instead of in RAM."""

    @contextlib.contextmanager
    def opened(self, run: Run) -> Iterator[Placed]:
        with own(self.table_directory, run.id):
            yield Placed(self._create)

    @contextlib.contextmanager
    def shared(self, run: Run, task: Task) -> Iterator[tuple[Machine, HostTables]]:
        """Yield what starts processes, and tables that they share."""
        with own(self.table_directory, run.id), Machine() as machine:
            directory = self.table_directory or machine.directory / "tables"
            yield machine, host_tables(task.spec, task.row_optimizer, directory)

    def _create(self, task: Task) -> HostTables:
        return host_tables(task.spec, task.row_optimizer, self.table_directory)


@dataclasses.dataclass(frozen=True)
class Servers(Devices):
    """Rows at server processes, on Ray, which end with the run."""

    read_by: ClassVar = "--tables remote"
    tables: HomeKind = "remote"
    servers: int = 2
    """Number of server processes."""
    ray_address: str | None = None
    """Address of a running Ray cluster, host:port or auto; by default Ray is started on this machine."""
    server_resource: str | None = None
    """Ray resource that the machines of the servers have, such as rows; by default Ray chooses them."""
    replaces: ClassVar[bool] = False

    @property
    def standby(self) -> int:
        """Number of standby processes."""
        return 0

    def check(self) -> None:
        refuse(
            {
                belongs("server_resource", self.server_resource, "--ray-address"): (
                    self.server_resource is not None and self.ray_address is None
                ),
                f"--servers {self.servers} are more than the {self.shards} shards, of which each has one or more: give "
                "fewer servers, or more --shards.": self.servers > self.shards,
                **rule_of_ray(),  # last: a run that is refused anyway does not need Ray
            }
        )

    def cluster(self, run: Run) -> Cluster:
        """Return the cluster of the servers, to be entered."""
        go_on = go_on_with(run)
        return Cluster(
            self.ray_address, advice=f"{go_on[0].upper()}{go_on[1:]}.", log_directory=run.directory / "ray_logs"
        )

    def supervisor(self, cluster: Cluster, task: Task, run: Run) -> Supervisor:
        """Start the servers of a run, with initial rows."""
        return Supervisor(
            cluster, task.spec, task.row_optimizer, self.servers, directory=run.directory,
            timeout_s=SERVER_TIMEOUT_S, client=run.id, resources=share_of(self.server_resource), spares=self.standby,
        )  # fmt: skip

    @contextlib.contextmanager
    def shared(self, run: Run, task: Task) -> Iterator[tuple[Cluster, Supervisor]]:
        """Yield what starts processes, and servers of tables that they share."""
        with self.cluster(run) as cluster, contextlib.closing(self.supervisor(cluster, task, run)) as servers:
            yield cluster, servers

    @contextlib.contextmanager
    def opened(self, run: Run) -> Iterator[Placed]:
        with self.cluster(run) as cluster:
            home = Placed(lambda task: self.supervisor(cluster, task, run), self.replaces)
            hint = "" if self.replaces else " With --cpr a run survives the death of a server."
            try:
                yield home
            except ShardsLost as lost:
                raise OSError(f"{home.lost or lost}; {go_on_with(run)}.{hint}") from lost


@dataclasses.dataclass(frozen=True)
class ReplacedServers(Servers):
    """Servers whose dead are replaced, for a recovery that restores their shards."""

    read_by: ClassVar = "--tables remote with --cpr"
    spares: int = 0
    """Standby processes, each to replace a server that dies."""
    replaces: ClassVar[bool] = True

    @property
    def standby(self) -> int:
        return self.spares


def fits_devices(task: Task) -> bool:
    """Return whether rows and slots take at most half of the GPUs' memory, and say so; always true of other devices."""
    devices = as_mesh(task.mesh).devices.flat
    if devices[0].platform != "gpu":
        return True
    known = [device.memory_stats() for device in devices]
    layout = task.spec.layout(task.row_optimizer)
    of_row = {stack: sum(part.row_bytes for part in parts.values()) for stack, parts in layout.items()}
    taken_gb = sum(of_row[name] * stack.rows for name, stack in task.spec.stacks.items()) / 1e9
    memory_gb = sum(each["bytes_limit"] for each in known) / 1e9
    fits = taken_gb <= memory_gb / 2
    where = "on the devices" if fits else "pinned in host memory"
    say(f"rows {where}: they take {taken_gb:.3g} GB with their slots, and the devices have {memory_gb:.3g} GB")
    return fits


def share_of(resource: str | None) -> dict[str, float] | None:
    """Return what a server takes of a Ray resource: so little that a machine with 1 of it has room for a hundred."""
    return {resource: 0.01} if resource else None


def host_tables(spec: EmbeddingSpec, row_optimizer: RowOptimizer, directory: Path | None) -> HostTables:
    """Return fresh tables in host memory, or in mapped files if a directory is given."""
    if directory is None or not (directory / "tables.json").exists():
        return HostTables.create(spec, row_optimizer, directory)
    # A kill within a step may have torn them, at no loss: their rows are restored from the image of the run.
    return with_initial_rows(HostTables.attach(spec, row_optimizer, directory, torn="accept"))


def with_initial_rows(tables: Any) -> Any:
    """Return the tables reset to their initial rows."""
    with tables.overwriting(step=0):
        return restore_shards(None, tables, range(tables.spec.shards))[0]


@contextlib.contextmanager
def own(directory: Path | None, run: str) -> Iterator[None]:
    """Keep other runs out of a directory of mapped tables, now and later.

    Args:
      directory: None if the tables are not in files.
    """
    if directory is None:
        yield
        return
    directory = local_path(directory)
    make_directory(directory)
    with Lock(directory / "run.lock", "training on these tables"):
        owner = directory / "run"
        if (directory / "tables.json").exists() and not (owner.exists() and owner.read_text() == run):
            raise ValueError(f"{directory} holds tables of another run: give another --table-directory, or remove it.")
        write_text(owner, run)
        yield
