"""Where the rows of a run live, as its flags say: on its devices, in its memory or mapped files, or at servers."""

import contextlib
from collections.abc import Iterator
from typing import Literal

from clicks import ClickJob
from runs import Run, go_on_with
from table_files import host_tables
from technique_flags import TechniqueFlags

from jaxrec.cluster import Cluster, Supervisor
from jaxrec.embedding import DeviceTables, Tables
from jaxrec.types import ShardsLost

SERVER_TIMEOUT_S = 120.0  # also for the save and the restore of a server's rows


class Home:
    """Rows in this process.

    Attributes:
      copy: how images of the rows are made.
    """

    copy: Literal["whole", "shards"] = "whole"

    def __init__(self, config: TechniqueFlags):
        self._config = config

    def tables(self, job: ClickJob, mesh) -> Tables:
        """Tables of initial rows."""
        if self._config.tables == "host":
            return host_tables(job.spec, job.row_optimizer, self._config.table_directory)
        return DeviceTables.create(job.spec, job.row_optimizer, mesh)

    def watch(self, engine) -> None:
        """Begins to replace what can be lost of this home; before what brings rows back is entered."""

    @property
    def lost(self) -> str:
        """Which of its servers are dead, in words; '' if none is."""
        return ""


class ServerHome(Home):
    """Rows at servers in other processes; who is dead has a successor if there is a recovery for its rows."""

    copy: Literal["whole", "shards"] = "shards"  # each server writes its own

    def __init__(self, config: TechniqueFlags, run: Run, cluster: Cluster):
        super().__init__(config)
        self._run, self._cluster = run, cluster
        self._supervisor: Supervisor | None = None

    def tables(self, job: ClickJob, mesh) -> Tables:
        """As that of `Home`."""
        self._supervisor = Supervisor(
            self._cluster, job.spec, job.row_optimizer, self._config.number_of_servers,
            directory=self._run.directory, timeout_s=SERVER_TIMEOUT_S, client=self._run.id,
            spares=self._config.spares,
        )  # fmt: skip
        return self._supervisor.tables

    def watch(self, engine) -> None:
        """As that of `Home`."""
        if self._supervisor is not None and self._config.cpr != "none":
            engine.enter(self._supervisor)

    @property
    def lost(self) -> str:
        """As that of `Home`."""
        return "" if self._supervisor is None else self._supervisor.lost


@contextlib.contextmanager
def home_of(config: TechniqueFlags, run: Run) -> Iterator[Home]:
    """The home that the flags ask for; servers end with the block.

    Raises:
      OSError: a server has died, and there is no recovery for its rows.
      ValueError, OSError: Ray cannot be started or joined.
    """
    if config.tables != "remote":
        yield Home(config)
        return
    go_on = go_on_with(run)
    advice, logs = f"{go_on[0].upper()}{go_on[1:]}.", run.directory / "ray_logs"
    with Cluster(config.ray_address, advice=advice, log_directory=logs) as cluster:
        home = ServerHome(config, run, cluster)
        try:
            yield home
        except ShardsLost as lost:
            hint = " With --cpr a run survives the death of a server." if config.cpr == "none" else ""
            raise OSError(f"{home.lost or lost}; {go_on}.{hint}") from lost
