"""The rows of a crew: saved now and then while trainers write, and brought back when a server dies."""

import math
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.checkpoint import Checkpointer, newest, restore_shards
from jaxrec.cluster.processes import ServerWay
from jaxrec.cluster.servers import RayServer
from jaxrec.cluster.supervisor import Supervisor
from jaxrec.files import local_path
from jaxrec.shadowsync.params import with_floating
from jaxrec.types import DenseState, PyTree, ShardsLost, TrainState


class CrewRows:
    """Servers whose trainers are in other processes, which find out first that one is dead.

    Args:
      servers: of the rows.
      directory: of images; None if nothing is saved.
      save_every_seconds: None if nothing is saved.
      params: of one replica.
    """

    def __init__(
        self, servers: Supervisor, directory: str | Path | None, save_every_seconds: float | None, params: PyTree
    ):
        self._servers, self._every, self._params = servers, save_every_seconds or math.inf, params
        self._directory = None if directory is None else local_path(directory)
        # Opened now: if another saves there, that is known before anything is trained.
        self._saver: Checkpointer | None = None
        if self._directory is not None and save_every_seconds is not None:
            self._saver = Checkpointer(self._directory, copy="shards")
        self._saving: threading.Thread | None = None
        self._saved_at, self.saves = time.monotonic(), 0

    @property
    def ways(self) -> list[ServerWay]:
        """To the servers that the tables use."""
        return [ServerWay(server.actor, str(server)) for server in self._servers.in_use]

    def hear_of(self, lost: Sequence[int]) -> None:
        """A trainer waits in vain for some shards."""
        for server in self._servers.in_use:
            # A server with a successor that answers is lost only to a trainer that has not heard of it.
            if set(server.shards) & set(lost) and not self._answers(server):
                self._servers.tables.mark_lost(server.shards, "a trainer waits for it in vain")

    def _answers(self, server):
        try:
            self._servers.tables.take({(next(iter(self._servers.tables.spec.stacks)), server.shards[0]): _NONE})
        except ShardsLost:
            return False
        return True

    def bring_back(self, leaves: Callable[[], list | None]) -> dict[RayServer, str]:
        """Puts successors in the place of dead servers, with rows from the newest image; saves if it is time.

        Args:
          leaves: floating leaves of one replica, to be saved along.

        Returns:
          {successor: why the one before it is dead}.

        Raises:
          GivenUp: there were too many deaths.
        """
        lost, before = self._servers.tables.lost, self._servers.in_use
        if not lost:
            self._save_if_due(leaves)
            return {}
        if self._saving is not None:
            self._saving.join()  # it fails by itself
        self._servers.recover(lost)
        path = None if self._directory is None else newest(self._directory)
        restore_shards(path, self._servers.tables, lost)
        why = {death.server: death.why for death in self._servers.deaths}
        after = self._servers.in_use
        return {new: why[new.place] for old, new in zip(before, after, strict=True) if new is not old}

    def _save_if_due(self, leaves):
        at_work = self._saving is not None and self._saving.is_alive()
        if self._saver is None or at_work or time.monotonic() - self._saved_at < self._every:
            return
        self._saved_at, found = time.monotonic(), leaves()
        self.saves += 1
        of_save = self._saver, found, self.saves
        self._saving = threading.Thread(target=self._save, args=of_save, name="crew-saves", daemon=True)
        self._saving.start()

    def _save(self, saver, leaves, number):
        params = self._params if leaves is None else with_floating(self._params, leaves)
        one = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], params)
        try:
            saver.save(TrainState(DenseState(jnp.asarray(number, jnp.int32), one, ()), self._servers.tables))
            saver.wait()
        except (ShardsLost, OSError) as error:
            warnings.warn(f"an image was not saved: {error}", stacklevel=2)

    def close(self) -> None:
        """Ends what is saved."""
        if self._saving is not None:
            self._saving.join()
        if self._saver is not None:
            self._saver.close()


_NONE = np.zeros(0, np.int32)
