"""Trainers in processes, and the pool that keeps them training: one call for a laptop and for a cluster.

    with Cluster() as cluster:
        servers = Supervisor(cluster, spec, row_optimizer, servers=2)
        with TrainerPool(cluster, servers, work, trainers=4) as pool:
            params, figures = pool.run()

Each trainer is a process with a JAX of its own, that reads its batches itself, trains on rows at the servers and meets
the others at sync servers, in the background or every k steps. What dies is replaced, and nothing rolls back:

- a trainer: its successor begins with the parameters of the others and a fresh optimizer state, at the last position
  that the pool has heard of; what was trained after it is trained once more;
- a server: its successor has its rows from the newest image, or initial ones; trainers that need them wait;
- a sync server: its successor begins with what a trainer has brought to it last; training does not wait;
- the driver: all end.

A trainer that says nothing for `timeout_s` (it was stopped, or its machine is gone) counts as dead. **Accounting**: an
example counts as trained once, when the pool has heard of it; those of a trainer that has died too often, and was given
up, are lost. The sum of both is the stream. Reference: Zheng et al., ShadowSync, arXiv 2003.03477; of failures it says
nothing. Legend: n trainers, m workers of each.
"""

import contextlib
import math
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.bounds import is_positive, real_number, whole_number
from jaxrec.checkpoint import Checkpointer, newest, restore_shards
from jaxrec.cluster.processes import ActorHandle, Process, ServerHandle, packed
from jaxrec.cluster.runtime import Cluster
from jaxrec.cluster.servers import RayServer
from jaxrec.cluster.supervisor import GivenUp, Supervisor
from jaxrec.cluster.sync_servers import SyncServer, assign_leaves
from jaxrec.cluster.trainers import Progress, TrainerProcess, TrainerWork, examples_in
from jaxrec.embedding.servers import ServerGone
from jaxrec.files import local_path
from jaxrec.shadowsync.params import initial_leaves, replica_spread, with_floating
from jaxrec.shadowsync.rules import Rule
from jaxrec.types import DenseState, PyTree, ShardsLost, TrainState

_POLL_S, _ASK_S = 0.1, 2.0
# What a trainer may fail by when others die: its successor does not fail by it as well.
_CAUSED_BY_OTHERS = ("PeerLeft", "ShardsLost", "ServerGone", "OtherIncarnation", "TimeoutError")
# Of the progress of a trainer, what all of its incarnations have together.
_SUMMED = ("examples", "steps", "rounds", "bytes", "waited_for_rows_s", "rows_lost")
_NO_ROWS = np.zeros(0, np.int32)


class Failure(NamedTuple):
    """What is known of a death.

    Attributes:
      kind: 'trainer', 'server' or 'place'.
      number: of them, from 0.
      why: in words.
      at_s: seconds since the run has begun.
    """

    kind: str
    number: int
    why: str
    at_s: float


class PoolStats(NamedTuple):
    """What a run of n trainers has done; lists have a number for each trainer, and all its incarnations."""

    examples: int  # trained, each counted once
    examples_lost: int  # of trainers that were given up
    seconds: float  # until the last trainer was done
    examples_per_s: float
    steps: list[int]  # those that were trained once more among them
    rounds: list[int]
    bytes: list[int]  # sent and received by synchronisation
    average_sync_gap: list[float]  # steps per round; inf without one
    longest_step_over_median: list[float]  # of the newest incarnation, without what waited for rows
    waited_for_rows_s: list[float]
    rows_lost: int  # that were to be added where a server was dead
    replica_spread: float  # of those that have come to their end
    failures: list[Failure]
    pls: float  # portion of lost samples, of all trainers


def summed(before: Progress, now: Progress) -> Progress:
    """What incarnations of a trainer have done before, and one more of them.

    >>> summed(Progress(position=9, steps=9), Progress(position=12, steps=3)).steps
    12
    """
    return now._replace(**{name: getattr(before, name) + getattr(now, name) for name in _SUMMED})


def stats_of(
    reached: Sequence[Progress], lost: int, seconds: float, ended: Sequence[PyTree], failures: Sequence[Failure]
) -> PoolStats:
    """The figures of a run.

    Args:
      reached: of each trainer, of all its incarnations.
      lost: examples that no trainer trains.
      seconds: of the run.
      ended: parameters of those that are done, leaves [1, ...].
      failures: deaths.
    """
    all_of = lambda name: [getattr(one, name) for one in reached]
    examples, steps, rounds = sum(all_of("examples")), all_of("steps"), all_of("rounds")
    return PoolStats(
        examples=examples,
        examples_lost=lost,
        seconds=seconds,
        examples_per_s=examples / seconds,
        steps=steps,
        rounds=rounds,
        bytes=all_of("bytes"),
        average_sync_gap=[step / made if made else float("inf") for step, made in zip(steps, rounds, strict=True)],
        longest_step_over_median=[
            one.longest_step_s / one.median_step_s if one.median_step_s else 0 for one in reached
        ],
        waited_for_rows_s=all_of("waited_for_rows_s"),
        rows_lost=sum(all_of("rows_lost")),
        replica_spread=replica_spread(jax.tree.map(lambda *leaves: np.concatenate(leaves), *ended)),
        failures=list(failures),
        pls=lost / (examples + lost) if examples + lost else 0.0,
    )


class TrainerPool:
    """n trainers over the rows of some servers.

    Args:
      cluster: that was entered.
      servers: of the rows; for this pool alone meanwhile.
      work: what each trainer does.
      trainers: n.
      sync_servers: over how many processes the tensors of a centre are packed; one for other rules.
      cores: for each trainer the cores that its threads are held to, as [[0], [1]]; all cores for all if None.
      directory: of images, from the newest of which the rows of a dead server come; initial rows if None.
      save_every_seconds: an image of all rows so often, into the directory; none if None.
      timeout_s: a process that says nothing for so long is dead.
      most_deaths: of one trainer; one more, and it is given up.
      resources: of Ray that each trainer needs, to choose its machine, as {'trainer': 1}; none if None.

    Attributes:
      failures: deaths so far.

    Raises:
      ValueError: a number out of range; not as many lists of cores as trainers; a rule that cannot be had over so many
        sync_servers; saves without a directory.
    """

    def __init__(
        self, cluster: Cluster, servers: Supervisor, work: TrainerWork, trainers: int = 2, *, sync_servers: int = 1,
        cores: Sequence[Sequence[int]] | None = None, directory: str | Path | None = None,
        save_every_seconds: float | None = None, timeout_s: float = 30.0, most_deaths: int = 8,
        resources: dict[str, float] | None = None,
    ):  # fmt: skip
        _check(cluster, work, trainers, cores, directory, save_every_seconds)
        self._most_deaths = whole_number("most_deaths", most_deaths, 0)
        self._timeout_s = real_number("timeout_s", timeout_s, "a number of seconds above 0 and finite", is_positive)
        self._servers, self._work, self._cores, self._resources = servers, work, cores, resources
        self._sync_servers = SyncServers(work.rule, initial_leaves(work.params)[1], trainers, sync_servers, timeout_s)
        self._rows = PoolTables(servers, directory, save_every_seconds, work.params)
        self._packed = packed(work)
        self._name, self.failures = uuid.uuid4().hex[:12], list[Failure]()
        self._trainers: list[Process] = []
        self._incarnations = [1] * trainers
        self._reached = [Progress()] * trainers  # of the newest incarnation
        self._before = [Progress()] * trainers  # of those before it
        self._ended: dict[int, PyTree] = {}  # parameters of trainers that are done
        self._given_up: dict[int, str] = {}
        self._started_at = time.monotonic()

    @property
    def processes(self) -> list[int | None]:
        """The number of each trainer's process, on its machine; None while it is started."""
        return [one.number for one in self._trainers]

    @property
    def sync_server_processes(self) -> list[int | None]:
        """The number of each place's process; None while it is started."""
        return self._sync_servers.processes

    @property
    def reached(self) -> list[Progress]:
        """How far each trainer has come, as the pool has heard."""
        return list(self._reached)

    def __enter__(self) -> "TrainerPool":
        self._servers.__enter__()  # from here on rows are brought back
        self._started_at = time.monotonic()
        self._sync_servers.begin()
        self._trainers = [self._started(number, None) for number in range(len(self._reached))]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for one in self._trainers:
            one.kill()
        self._sync_servers.kill()
        self._rows.close()

    def run(self, look: Callable[["TrainerPool"], None] | None = None) -> tuple[list[PyTree], PoolStats]:
        """Waits until all trainers are done or given up, and replaces those that die.

        Args:
          look: called some times a second, with the pool.

        Returns:
          The parameters of each trainer that is done, leaves [1, ...] in numpy, and the figures.

        Raises:
          ValueError: the pool was not entered.
          GivenUp: all trainers have died too often; servers have.
          RuntimeError: a trainer has failed by itself, which says why: its successor would fail as well.
        """
        if not self._trainers:
            raise ValueError("the pool was not entered: with TrainerPool(...) as pool: pool.run().")
        while present := self._present():
            self._check_servers(present)
            self._check_sync_servers(present)
            for number in present:
                self._check_trainer(number)
            if look is not None:
                look(self)
            time.sleep(_POLL_S)
        if not self._ended:
            raise GivenUp(f"all trainers were given up: {next(iter(self._given_up.values()))}")
        seconds, ended = time.monotonic() - self._started_at, [self._ended[number] for number in sorted(self._ended)]
        reached = [summed(before, now) for before, now in zip(self._before, self._reached, strict=True)]
        return ended, stats_of(reached, self._lost(), seconds, ended, self.failures)

    def _present(self):
        return [n for n in range(len(self._trainers)) if n not in self._ended and n not in self._given_up]

    # ---- trainers

    def _started(self, number, leaves):
        name = f"trainer {number} (incarnation {self._incarnations[number]})"
        one = Process(TrainerProcess, 4, self._resources, name)
        cores = None if self._cores is None else list(self._cores[number])
        one.handle.call(
            "begin", self._packed, number, len(self._reached), self._incarnations[number],
            self._reached[number].position, leaves, self._rows.handles, self._sync_servers.handles,
            f"{self._name}-{number}", self._timeout_s, cores,
        )  # fmt: skip
        return one

    def _check_trainer(self, number):
        one = self._trainers[number]
        found = one.poll("progress")
        if found is None:
            if why := one.death_reason(self._timeout_s):
                self._start_successor(number, why)
            return
        if found.state == "waits":  # it has not heard yet where it begins
            return
        self._reached[number] = found
        if found.lost:
            self._rows.mark_lost(found.lost)
        if found.state == "done":
            self._end(number, one)
        elif found.state == "failed":
            if not found.why.startswith(_CAUSED_BY_OTHERS):
                raise RuntimeError(f"trainer {number} has failed: {found.why}")
            self._start_successor(number, f"{one.name} could not go on: {found.why}")

    def _end(self, number, one):
        try:
            self._ended[number], self._reached[number] = one.handle.call("result").result(self._timeout_s)
        except (ServerGone, TimeoutError) as error:  # it has died with its parameters
            self._start_successor(number, str(error))
        else:
            self._sync_servers.give_up(number)  # no successor comes

    def _start_successor(self, number, why):
        self._trainers[number].kill()  # one that is stopped may come back, and is not to
        self._sync_servers.leave(number, self._incarnations[number], why)
        self._record_failure("trainer", number, why)
        position = self._reached[number].position
        self._before[number] = summed(self._before[number], self._reached[number])
        self._reached[number] = Progress(position=position)
        if self._incarnations[number] > self._most_deaths:
            self._given_up[number] = why
            self._sync_servers.give_up(number)
            warnings.warn(f"{why}; trainer {number} is given up at its batch {position}", stacklevel=4)
            return
        self._incarnations[number] += 1
        leaves = self._sync_servers.leaves() or self._newest_leaves()
        self._trainers[number] = self._started(number, leaves)
        warnings.warn(
            f"{why}; trainer {number} begins again at its batch {position}, with the parameters of the others and a "
            "fresh optimizer state", stacklevel=4,
        )  # fmt: skip

    def _newest_leaves(self):
        """What a living trainer has brought last to a round; None if none has."""
        for number in self._present():
            with contextlib.suppress(ServerGone, TimeoutError):
                if (found := self._trainers[number].handle.call("newest").result(_ASK_S)) is not None:
                    return found
        return None

    # ---- sync_servers and servers

    def _check_sync_servers(self, present):
        absent = [n for n in range(len(self._trainers)) if n not in present]
        for index, why in self._sync_servers.replace_dead(self._newest_leaves, absent).items():
            self._record_failure("sync server", index, why)
            warnings.warn(f"{why}; another one has begun with the parameters of a trainer", stacklevel=4)
            for number in present:
                self._trainers[number].handle.call("replace_sync_server", index, self._sync_servers.handles[index])

    def _check_servers(self, present):
        for server, why in self._rows.restore_lost(self._sync_servers.leaves).items():
            self._record_failure("server", server.index, why)
            for number in present:
                self._trainers[number].handle.call(
                    "replace_server", ServerHandle(server.actor, str(server)), server.shards, why
                )

    def _record_failure(self, kind, number, why):
        self.failures.append(Failure(kind, number, why, time.monotonic() - self._started_at))

    def _lost(self):
        """Examples of trainers that were given up, after what they had trained."""
        streams = [self._work.batches(n, len(self._trainers))(self._reached[n].position) for n in self._given_up]
        return sum(examples_in(batch) for stream in streams for batch in stream)


def _check(cluster, work, trainers, cores, directory, save_every_seconds):
    cluster.check_entered()
    whole_number("trainers", trainers)
    whole_number("work.workers", work.workers)
    if cores is not None and len(cores) != trainers:
        raise ValueError(f"cores has {len(cores)} lists and there are {trainers} trainers: give each its own.")
    if not callable(work.batches):
        raise ValueError("work.batches must be a function (trainer, trainers) -> (start -> iterator of batches).")
    if save_every_seconds is not None:
        real_number("save_every_seconds", save_every_seconds, "a number of seconds above 0 and finite", is_positive)
        if directory is None:
            raise ValueError(f"save_every_seconds={save_every_seconds:g} needs the directory to save into: give it.")


class SyncServers:
    """Processes with a `SyncServer` each.

    Args:
      rule: by which trainers are synchronised; there are no sync_servers if None.
      initial: floating leaves of one replica.
      trainers: n.
      sync_servers: over how many processes the leaves of a centre are packed.
      timeout_s: a process that says nothing for so long is dead.

    Raises:
      ValueError: more sync_servers than the rule can have.
    """

    def __init__(
        self, rule: Rule | None, initial: Sequence[np.ndarray], trainers: int, sync_servers: int, timeout_s: float
    ):
        self._rule, self._initial, self._trainers, self._timeout_s = rule, list(initial), trainers, timeout_s
        self._assigned = [] if rule is None else assign_leaves([leaf.nbytes for leaf in initial], rule, sync_servers)
        self._all: list[Process] = []

    def begin(self) -> None:
        """Starts them."""
        self._all = [self._made(number, self._initial) for number in range(len(self._assigned))]

    @property
    def handles(self) -> list[ActorHandle]:
        """To each of them."""
        return [server.handle for server in self._all]

    @property
    def processes(self) -> list[int | None]:
        """The number of each process; None while it is started."""
        return [server.number for server in self._all]

    def leaves(self) -> list[np.ndarray] | None:
        """What a trainer that comes now begins with; None if a place does not say."""
        found: dict[int, np.ndarray] = {}
        for server, mine in zip(self._all, self._assigned, strict=True):
            try:
                found |= dict(zip(mine, server.handle.call("leaves").result(self._timeout_s), strict=True))
            except (ServerGone, TimeoutError):
                return None
        return [found[leaf] for leaf in range(len(self._initial))] if found else None

    def replace_dead(self, newest: Callable[[], list[np.ndarray] | None], absent: Iterable[int]) -> dict[int, str]:
        """Starts successors of those that are dead.

        Args:
          newest: leaves that a trainer has brought last, to begin with; the initial ones if it gives None.
          absent: trainers that will not come there.

        Returns:
          {number: why it is dead}.
        """
        dead = {}
        for number, server in enumerate(self._all):
            server.poll("process")
            if why := server.death_reason(self._timeout_s):
                server.kill()
                dead[number] = why
                self._all[number] = self._made(number, newest() or self._initial)
                for trainer in absent:
                    self._all[number].handle.call("give_up", trainer)
        return dead

    def give_up(self, trainer: int) -> None:
        """Tells all that a trainer will not come any more."""
        for server in self._all:
            with contextlib.suppress(ServerGone):
                server.handle.call("give_up", trainer)

    def leave(self, trainer: int, incarnation: int, why: str) -> None:
        """Tells all that a trainer is dead, before it is overdue."""
        for server in self._all:
            with contextlib.suppress(ServerGone):
                server.handle.call("leave", trainer, incarnation, why)

    def kill(self) -> None:
        """Ends them."""
        for server in self._all:
            server.kill()

    def _made(self, number, leaves):
        threads = 2 * self._trainers + 8  # those that wait for a round, and those that ask meanwhile
        mine = [leaves[leaf] for leaf in self._assigned[number]]
        return Process(
            SyncServer, threads, None, f"sync server {number}", self._rule, mine, self._trainers, self._timeout_s
        )


class PoolTables:
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
    def handles(self) -> list[ServerHandle]:
        """To the servers that the tables use."""
        return [ServerHandle(server.actor, str(server)) for server in self._servers.in_use]

    def mark_lost(self, lost: Sequence[int]) -> None:
        """A trainer waits in vain for some shards."""
        for server in self._servers.in_use:
            # A server with a successor that answers is lost only to a trainer that has not heard of it.
            if set(server.shards) & set(lost) and not self._answers(server):
                self._servers.tables.mark_lost(server.shards, "a trainer waits for it in vain")

    def _answers(self, server):
        try:
            self._servers.tables.take({(next(iter(self._servers.tables.spec.stacks)), server.shards[0]): _NO_ROWS})
        except ShardsLost:
            return False
        return True

    def restore_lost(self, leaves: Callable[[], list | None]) -> dict[RayServer, str]:
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
        return {new: why[new.index] for old, new in zip(before, after, strict=True) if new is not old}

    def _save_if_due(self, leaves):
        at_work = self._saving is not None and self._saving.is_alive()
        if self._saver is None or at_work or time.monotonic() - self._saved_at < self._every:
            return
        self._saved_at, found = time.monotonic(), leaves()
        self.saves += 1
        of_save = self._saver, found, self.saves
        self._saving = threading.Thread(target=self._save, args=of_save, name="pool-saves", daemon=True)
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
