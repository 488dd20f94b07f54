"""Free-running trainers in processes of their own, with replacement of dead processes.

    with Cluster() as cluster:                       # rows at servers, on Ray
        servers = Supervisor(cluster, task.spec, task.row_optimizer, servers=2)
        with TrainerPool(cluster, servers, work, trainers=4) as pool:
            params, stats = pool.run()

    with Machine() as machine:                       # rows in memory that processes of this machine share
        tables = HostTables.create(task.spec, task.row_optimizer, machine.directory / "tables")
        with TrainerPool(machine, tables, work, trainers=16, cores=[[core] for core in range(16)]) as pool:
            params, stats = pool.run()

Each trainer has a JAX and a stream of batches of its own, trains on rows at the servers or in the shared memory, and
synchronises through sync servers, in the background or every k steps. A dead process is replaced, and nothing rolls
back:

- trainer: its successor starts with the parameters of the others (without a rule: with initial ones) and a fresh
  optimizer state, at the last position that the pool has polled; batches after it are trained twice;
- shard server: its successor gets its rows from the newest intact image, or initial ones; trainers that need them wait;
- sync server: its successor starts with the parameters that a trainer has sent last; training does not wait;
- driver: all processes end.

If all processes with the newest parameters die at once, successors start with those that the pool has seen last, at a
save or an earlier death; if it has seen none, the run ends. A process that does not answer for `timeout_s`, because it
is stopped or its machine is lost, counts as dead; a trainer that answers, but trains no batch for so long, is named.
**Accounting**: an example counts as trained once, when the pool has polled a position after it; the remaining examples
of a trainer that is given up after too many deaths are lost. Both add up to the stream. Reference: Zheng et al.,
ShadowSync, arXiv 2003.03477, which does not treat failures. Legend: n trainers, m workers of each.
"""

import contextlib
import dataclasses
import json
import math
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.bounds import is_positive, real_number, whole_number
from jaxrec.checkpoint import Checkpointer, DamagedImage, images, newest_first, restore_each
from jaxrec.checkpoint.format import number_of
from jaxrec.cluster.local import Machine
from jaxrec.cluster.processes import START_TIMEOUT_S, Process, RayProcess, packed
from jaxrec.cluster.runtime import Cluster
from jaxrec.cluster.servers import RayServer
from jaxrec.cluster.supervisor import GivenUp, Supervisor
from jaxrec.cluster.sync_servers import SyncServer, assign_leaves
from jaxrec.cluster.trainers import Progress, TrainerProcess, TrainerWork, examples_in, work_of
from jaxrec.embedding import HostTables, Tables
from jaxrec.embedding.servers import ServerGone
from jaxrec.files import local_path
from jaxrec.shadowsync.params import floating, initial_leaves, replica_spread, with_floating
from jaxrec.shadowsync.stats import TrainerStats
from jaxrec.types import DenseState, PyTree, ShardsLost, TrainState

_POLL_S = 0.1
# Errors that the death of another process may cause in a trainer; its successor need not fail again.
_CAUSED_BY_OTHERS = ("PeerLeft", "ShardsLost", "ServerGone", "OtherIncarnation", "TimeoutError")
# Fields of `Progress` that are summed over the incarnations of a trainer.
_SUMMED = ("examples", "steps", "rounds", "waited_for_rows_s", "rows_lost")


class Failure(NamedTuple):
    """Death of a process."""

    kind: str  # 'trainer', 'server' or 'sync server'
    number: int  # among those of its kind, from 0
    reason: str
    at_s: float  # time of detection, in seconds since the start of the pool


@dataclasses.dataclass(frozen=True)
class PoolStats(TrainerStats):
    """Statistics of a pool; those of a trainer are over all its incarnations. Each example is counted once.

    Attributes:
      examples_lost: of trainers that were given up.
      waited_for_rows_s: by each trainer.
      rows_lost: row updates that were dropped because a server was dead.
      failures: deaths of processes.
    """

    examples_lost: int
    waited_for_rows_s: list[float]
    rows_lost: int
    failures: list[Failure]


def summed(before: Progress, now: Progress) -> Progress:
    """Return the progress of an incarnation, with the sums of the previous ones added."""
    return now._replace(**{name: getattr(before, name) + getattr(now, name) for name in _SUMMED})


class TrainerPool:
    """Pool of n trainers in processes of their own; for a `with` block.

    Args:
      cluster: the entered cluster, or the entered machine.
      servers: shard servers, for the exclusive use of this pool; or host tables in files of this machine.
      work: work of the trainers, or a function that returns it and is called in each process. Where neither Ray nor
        cloudpickle is installed it must be one of a module, as an optax optimizer cannot be pickled.
      trainers: n.
      sync_servers: number of processes over which the leaves of a centre are distributed; 1 for other rules.
      cores: numbers of the cores that each trainer may use, such as [[0], [1]]; None for all.
      directory: directory of images, the newest of which restores the rows of a dead server; None for initial rows.
      save_every_seconds: interval at which an image of all rows is saved into the directory; None to not save.
      run: run id of the images; that of the directory, or a new one, if None.
      extra: further values to save with each image, as `json.dumps` takes them.
      positions: number of the first batch of each trainer, such as `extra["positions"]` of an image whose rows the
        servers have; None for 0.
      timeout_s: seconds after which a process that does not answer counts as dead, and a warning names a trainer that
        answers and trains no batch; 120, if that is longer, until its first one.
      most_deaths: tolerated deaths of each trainer; one more, and it is given up.
      resources: of a cluster: those that select each trainer's machine, such as {'trainer': 1}; None for any machine.

    Attributes:
      failures: all deaths so far, as `Failure`.
    """

    def __init__(
        self, cluster: Cluster | Machine, servers: Supervisor | HostTables,
        work: TrainerWork | Callable[[], TrainerWork], trainers: int = 2, *, sync_servers: int = 1,
        cores: Sequence[Sequence[int]] | None = None, directory: str | Path | None = None,
        save_every_seconds: float | None = None, run: str | None = None, extra: Mapping[str, Any] | None = None,
        positions: Sequence[int] | None = None, timeout_s: float = 30.0, most_deaths: int = 8,
        resources: dict[str, float] | None = None,
    ):  # fmt: skip
        given, work = work, work() if callable(work) else work
        _check(cluster, servers, work, trainers, cores, positions, directory, save_every_seconds)
        self._most_deaths = whole_number("most_deaths", most_deaths, 0)
        self._timeout_s = real_number("timeout_s", timeout_s, "a number of seconds above 0 and finite", is_positive)
        self._work, self._cores = work, cores
        self._resources = {"resources": resources} if resources else {}  # which a machine does not have
        self._process: Callable[..., Process] = cluster.process if isinstance(cluster, Machine) else RayProcess
        self._packed = packed(given)
        self._initial, rule = initial_leaves(work.params)[1], work.rule
        # Numbers of the leaves that each sync server has.
        sizes = [leaf.nbytes for leaf in self._initial]
        self._assigned = [] if rule is None else assign_leaves(sizes, rule, sync_servers)
        self._extra = dict(extra or {})
        try:
            json.dumps(self._extra)
        except TypeError as error:  # told now, as a save could only warn
            raise ValueError(f"extra={self._extra} cannot be saved as JSON: {error}.") from None
        kind: Any = SharedTables if isinstance(servers, HostTables) else ServedTables
        self._tables: SharedTables = kind(servers, directory, save_every_seconds, work.params, run)
        self._name, self.failures = uuid.uuid4().hex[:12], list[Failure]()
        self._trainers, self._sync_servers = list[Process](), list[Process]()
        self._incarnations = [1] * trainers
        # Of the newest incarnation.
        positions = [0] * trainers if positions is None else positions
        self._progress = [Progress(position=whole_number("position", one, 0)) for one in positions]
        self._before = [Progress()] * trainers  # of the previous incarnations, summed
        self._params: dict[int, PyTree] = {}  # {trainer: parameters} of those that are done
        self._given_up: dict[int, str] = {}  # {trainer: reason}
        self._lost_since: dict[int, float] = {}  # {trainer: when it was first seen waiting for a server}
        self._begun: dict[int, Any] = {}  # {trainer: answer to its `begin`}
        self._trained_at: dict[int, float] = {}  # {trainer: when it was last seen to train; inf once it is named}
        self._seen: list[np.ndarray] | None = None  # leaves after some round, at a save or a death
        self._started_at = time.monotonic()

    @property
    def processes(self) -> list[int | None]:
        """Process id of each trainer on its machine; None until it has started."""
        return [one.pid for one in self._trainers]

    @property
    def sync_server_processes(self) -> list[int | None]:
        """Process id of each sync server; None until it has started."""
        return [one.pid for one in self._sync_servers]

    @property
    def progress(self) -> list[Progress]:
        """Progress of the newest incarnation of each trainer, as polled last."""
        return list(self._progress)

    def __enter__(self) -> "TrainerPool":
        self._tables.begin(self)
        self._started_at = time.monotonic()
        try:
            for number in range(len(self._assigned)):
                self._sync_servers.append(self._start_sync_server(number, None))
            for number in range(len(self._progress)):
                self._trainers.append(self._start_trainer(number, None))
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for one in [*self._trainers, *self._sync_servers]:
            one.kill()
        self._tables.close()

    def run(self, hook: Callable[["TrainerPool"], None] | None = None) -> tuple[list[PyTree], PoolStats]:
        """Wait until all trainers are done or given up, and replace dead processes meanwhile.

        Args:
          hook: called with the pool, some times a second; nothing is replaced before it returns.

        Returns:
          Parameters of each trainer that is done, NumPy leaves [1, ...], and the statistics.

        Raises:
          ValueError: the pool is not entered.
          GivenUp: all trainers, or the shard servers, have died too often, or the dense parameters are lost.
          RuntimeError: a trainer has failed by an error of its own, with which its successor would fail again.
        """
        if not self._trainers:
            raise ValueError("the pool is not entered: with TrainerPool(...) as pool: pool.run().")
        while running := self._running():
            self._check_servers(running)
            for number in range(len(self._sync_servers)):
                self._check_sync_server(number, running)
            for number in running:
                self._check_trainer(number)
            if hook is not None:
                hook(self)
            time.sleep(_POLL_S)
        if not self._params:
            raise GivenUp(f"all trainers were given up: {next(iter(self._given_up.values()))}")
        seconds, params = time.monotonic() - self._started_at, [self._params[n] for n in sorted(self._params)]
        return params, self._stats(seconds, params)

    def _stats(self, seconds, params):
        progress = self._summed_progress()
        all_of = lambda name: [getattr(one, name) for one in progress]
        return PoolStats(
            examples=sum(all_of("examples")),
            examples_lost=self._examples_lost(),
            seconds=seconds,
            steps=all_of("steps"),
            rounds=all_of("rounds"),
            waited_for_rows_s=all_of("waited_for_rows_s"),
            rows_lost=sum(all_of("rows_lost")),
            replica_spread=replica_spread(jax.tree.map(lambda *leaves: np.concatenate(leaves), *params)),
            failures=list(self.failures),
        )

    def _summed_progress(self):
        """Return the progress of each trainer over all its incarnations."""
        return [summed(before, now) for before, now in zip(self._before, self._progress, strict=True)]

    def save(self) -> None:
        """Save an image now, and wait for it.

        Raises:
          ValueError: the pool does not save.
          OSError: it was not saved, as the disk is full or a server is dead; older images are unchanged.
        """
        self._tables.save(self._beside_rows)

    def _beside_rows(self):
        """Return what an image holds beside the rows: leaves of one replica, and positions and examples so far.

        Raises an OSError if no process has parameters that answer for these positions.
        """
        # The positions first: a batch may be trained twice after a restore, and none is left out.
        progress = self._summed_progress()
        positions = {"positions": [one.position for one in progress], "examples": sum(one.examples for one in progress)}
        leaves = self._leaves()
        if leaves is None and positions["examples"]:
            raise OSError("an image was not saved: no trainer or sync server has sent its parameters")
        self._keep(leaves)
        return leaves, self._extra | positions

    def _running(self):
        return [n for n in range(len(self._trainers)) if n not in self._params and n not in self._given_up]

    # ---- trainers

    def _start_trainer(self, number, leaves):
        name = f"trainer {number} (incarnation {self._incarnations[number]})"
        cores = None if self._cores is None else list(self._cores[number])
        one = self._process(TrainerProcess, name, **self._resources)
        sync_servers = [server.handle for server in self._sync_servers]
        try:
            self._begun[number] = one.handle.call(
                "begin", self._packed, number, len(self._progress), self._incarnations[number],
                self._progress[number].position, leaves, self._tables.access, sync_servers,
                f"{self._name}-{number}", self._timeout_s, cores,
            )  # fmt: skip
        except BaseException:
            one.kill()
            raise
        return one

    def _check_trainer(self, number):
        one = self._trainers[number]
        found, reason = one.look("progress", self._timeout_s)
        if reason:
            self._start_successor(number, reason)
        if found is None:
            return
        self._name_if_idle(number, found, one.asked_at)
        if found.state == "waiting":  # `begin` has not arrived, and it does not know its position
            try:
                self._begun[number].result(0)
            except (TimeoutError, ServerGone):
                return
            except Exception as error:  # its arguments cannot be read there
                raise RuntimeError(f"trainer {number} cannot begin: {error!r}") from error
            return
        self._progress[number] = found
        self._check_lost(number, found.lost)
        if found.state == "done":
            self._finish(number, one)
        elif found.state == "failed":
            if not found.reason.startswith(_CAUSED_BY_OTHERS):
                raise RuntimeError(f"trainer {number} has failed: {found.reason}")
            self._start_successor(number, f"{one.name} has failed: {found.reason}")

    def _name_if_idle(self, number, found, asked_at):
        """Warn, once, of a trainer that answers and trains nothing; its answer is to a question of some time."""
        at, before_end = self._progress[number].position, found.state in ("waiting", "starting", "training")
        limit_s = self._timeout_s if found.steps else max(START_TIMEOUT_S, self._timeout_s)  # the first one compiles
        if not before_end or (found.position != at and found.state != "waiting"):
            self._trained_at[number] = asked_at
        elif asked_at - self._trained_at.setdefault(number, asked_at) > limit_s:
            self._trained_at[number] = math.inf
            warnings.warn(
                f"trainer {number} answers, but has trained no batch for {limit_s:g} s, at its batch {at}: its stream, "
                "a step, a lost server or a round that waits for another trainer holds it up",
                stacklevel=4,
            )

    def _check_lost(self, number, lost):
        """Look at the servers of shards that a trainer takes for lost.

        They answer if they are successors that have not been announced to it yet, or were only slow. As the trainer
        waits for a successor in either case, they count as lost if it still waits after `timeout_s`.
        """
        if not lost:
            self._lost_since.pop(number, None)
        elif time.monotonic() - self._lost_since.setdefault(number, time.monotonic()) > self._timeout_s:
            self._tables.mark_lost(lost, f"it has not answered trainer {number} for {self._timeout_s:g} s")
        else:
            self._tables.probe(lost)

    def _finish(self, number, one):
        try:
            self._params[number], self._progress[number] = one.handle.call("result").result(self._timeout_s)
        except (ServerGone, TimeoutError) as error:  # it has died, and its parameters are lost
            self._start_successor(number, str(error))
        else:
            _tell(self._sync_servers, "give_up", number)  # no successor will join

    def _start_successor(self, number, reason):
        self._trainers[number].kill()  # a stopped process could resume later
        _tell(self._sync_servers, "leave", number, self._incarnations[number], reason)
        self._record_death("trainer", number, reason)
        position = self._progress[number].position
        self._before[number] = summed(self._before[number], self._progress[number])
        self._progress[number] = Progress(position=position)
        if self._incarnations[number] > self._most_deaths:
            self._given_up[number] = reason
            _tell(self._sync_servers, "give_up", number)
            warnings.warn(f"{reason}; trainer {number} is given up at its batch {position}", stacklevel=4)
            return
        self._incarnations[number] += 1
        self._trained_at.pop(number, None)
        leaves, whose = self._or_seen(self._leaves(), "of the others")
        self._trainers[number] = self._start_trainer(number, leaves)
        warnings.warn(
            f"{reason}; trainer {number} restarts at its batch {position}, with the parameters {whose} and a fresh "
            "optimizer state",
            stacklevel=4,
        )

    def _keep(self, leaves):
        if leaves and not all(map(np.array_equal, leaves, self._initial)):
            self._seen = leaves

    def _or_seen(self, leaves, whose):
        """Return leaves to begin with, and whose they are; those seen last if the given ones are None.

        None for the initial ones, before the first round.
        """
        self._keep(leaves)
        if leaves is not None:
            return leaves, whose
        if self._seen is not None:
            return self._seen, "seen last, at a save or an earlier death"
        if any(one.rounds for one in self._summed_progress()):
            raise GivenUp(
                "the dense parameters are lost: all processes that had them have died, and none was seen at a save or "
                "an earlier death. Go on from an image of an earlier run, if there is one."
            )
        return None, "that it had at first"

    def _leaves(self):
        """Return the leaves with which a trainer that joins now starts; None if no process has any."""
        found: dict[int, np.ndarray] = {}
        for server, mine in zip(self._sync_servers, self._assigned, strict=True):
            try:
                found |= dict(zip(mine, server.handle.call("leaves").result(self._timeout_s), strict=True))
            except (ServerGone, TimeoutError):
                return self._newest_leaves()
        return [found[leaf] for leaf in sorted(found)] or self._newest_leaves()

    def _newest_leaves(self):
        """Return the leaves that a running trainer has sent last to a round, or those of one that is done, or None."""
        answers = _tell([self._trainers[number] for number in self._running()], "newest")
        end = time.monotonic() + self._timeout_s  # a step may keep trainers from answering
        while answers and time.monotonic() < end:
            for answer in list(answers):  # whichever is first, so that nobody waits for a trainer that is stopped
                try:
                    found = answer.result(0)
                except TimeoutError:
                    continue
                except ServerGone:
                    found = None
                if found is not None:
                    return found
                answers.remove(answer)
            time.sleep(_POLL_S / 10)
        return next(([np.array(leaf[0]) for leaf in floating(params)] for params in self._params.values()), None)

    # ---- servers

    def _start_sync_server(self, number, leaves):
        trainers = len(self._progress)
        mine = [(leaves or self._initial)[leaf] for leaf in self._assigned[number]]
        args = self._packed, mine, trainers, self._timeout_s
        # Threads for calls that wait in a round, and others meanwhile.
        return self._process(PoolSyncServer, f"sync server {number}", args, 2 * trainers + 8)

    def _check_sync_server(self, number, running):
        _, reason = self._sync_servers[number].look("process_info", self._timeout_s)
        if not reason:
            return
        self._sync_servers[number].kill()
        self._record_death("sync server", number, reason)
        leaves, whose = self._or_seen(self._newest_leaves(), "of a trainer")
        successor = self._sync_servers[number] = self._start_sync_server(number, leaves)
        warnings.warn(f"{reason}; its successor has started with the parameters {whose}", stacklevel=3)
        for trainer, one in enumerate(self._trainers):
            if trainer in running:
                _tell([one], "replace_sync_server", number, successor.handle)
            else:
                _tell([successor], "give_up", trainer)

    def _check_servers(self, running):
        for server, reason in self._tables.restore_lost(self._beside_rows).items():
            self._lost_since.clear()  # successors are announced below
            self._record_death("server", server.index, reason)
            trainers = [self._trainers[number] for number in running]
            _tell(trainers, "replace_server", server.handle, server.shards, reason)

    def _record_death(self, kind, number, reason):
        self.failures.append(Failure(kind, number, reason, time.monotonic() - self._started_at))

    def _examples_lost(self):
        """Return the number of examples of given-up trainers after their last positions."""
        lost = 0
        for number in self._given_up:
            try:
                for batch in self._work.batches(number, len(self._trainers))(self._progress[number].position):
                    lost += examples_in(batch)
            except Exception as error:  # all others have trained to the end
                warnings.warn(
                    f"the examples that trainer {number} has lost are not all counted: {error!r}", stacklevel=4
                )
        return lost


def _tell(processes, method, *args):
    """Call a method of processes and return the pending answers; those that are dead are noticed by their polls."""
    answers = []
    for one in processes:
        with contextlib.suppress(ServerGone):
            answers.append(one.handle.call(method, *args))
    return answers


def _check(cluster, servers, work, trainers, cores, positions, directory, save_every_seconds):
    cluster.check_entered()
    if isinstance(servers, HostTables) and (servers.directory is None or not isinstance(cluster, Machine)):
        raise ValueError(
            "HostTables are shared by processes of one Machine, through files: create them in a directory, such as "
            "machine.directory / 'tables'."
        )
    if isinstance(servers, Supervisor) and isinstance(cluster, Machine):
        raise ValueError("processes of a Machine cannot reach the servers of a Cluster: TrainerPool(cluster, ...).")
    whole_number("trainers", trainers)
    whole_number("work.workers", work.workers)
    for name, given in (("cores", cores), ("positions", positions)):
        if given is not None and len(given) != trainers:
            raise ValueError(f"{name}={given} is of {len(given)} trainers, and there are {trainers}.")
    if save_every_seconds is not None:
        real_number("save_every_seconds", save_every_seconds, "a number of seconds above 0 and finite", is_positive)
        if directory is None:
            raise ValueError(
                f"save_every_seconds={save_every_seconds:g} needs a directory to save into: give directory=."
            )
        if work.rule is None:
            raise ValueError(
                f"save_every_seconds={save_every_seconds:g} needs a rule: an image has dense parameters of a round, "
                "and trainers without one never send theirs. Give work.rule, such as easgd(), or do not save."
            )


def image_of(directory: Path, params: PyTree, tables: Tables) -> TrainState:
    """Return the next image of a pool in a directory: parameters of one replica over the rows, without optimizers."""
    number = 1 + max(map(number_of, images(directory)), default=0)
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], params)
    return TrainState(DenseState(jnp.asarray(number, jnp.int32), one, ()), tables)


class PoolSyncServer(SyncServer):
    """A sync server in a process of its own, for the rule of a pool's work, which is `packed`."""

    def __init__(self, packed: tuple[list[str], bytes], *args: Any):
        rule = work_of(packed).rule
        assert rule is not None
        super().__init__(rule, *args)


class SharedTables:
    """Host tables in files that trainers attach, and the images of their rows.

    `params`, parameters of one replica, are a template of those in an image.

    Attributes:
      access: what a trainer reaches the rows by: the directory of the files.
    """

    copy: Literal["whole", "shards"] = "whole"

    def __init__(
        self, tables: Any, directory: str | Path | None, save_every_seconds: float | None, params: PyTree,
        run: str | None = None,
    ):  # fmt: skip
        self._tables, self._every, self._params = tables, save_every_seconds or math.inf, params
        self._directory = None if directory is None else local_path(directory)
        # Opened now, to detect another run that saves there before anything is trained.
        self._saver: Checkpointer | None = None
        if self._directory is not None and save_every_seconds is not None:
            self._saver = Checkpointer(self._directory, copy=self.copy, run=run)
        self._saving: threading.Thread | None = None
        self._failure: Exception | None = None  # of the last save
        self._saved_at = time.monotonic()

    @property
    def access(self) -> Any:
        """See `SharedTables`."""
        return self._tables.directory

    def begin(self, pool: TrainerPool) -> None:
        """Begin to restore lost rows; those in files are not lost."""

    def probe(self, lost: Sequence[int]) -> None:
        """Let the tables note whether shards are lost that a trainer takes for lost."""

    def mark_lost(self, lost: Sequence[int], reason: str) -> None:
        """Mark shards as lost."""

    def restore_lost(self, beside_rows: Callable[[], tuple[list | None, dict]]) -> dict[RayServer, str]:
        """Replace dead servers and restore their rows from the newest image; if none is dead, save if a save is due.

        Args:
          beside_rows: `TrainerPool._beside_rows`; leaves None are the initial ones.

        Returns:
          {successor: reason of the death}.
        """
        self._save_if_due(beside_rows)
        return {}

    def save(self, beside_rows: Callable[[], tuple[list | None, dict]]) -> None:
        """As `TrainerPool.save`."""
        if self._saver is None:
            raise ValueError("this pool does not save: give directory= and save_every_seconds=.")
        if self._saving is not None:
            self._saving.join()
        self._start_save(*beside_rows()).join()
        if self._failure is not None:
            raise OSError(f"an image was not saved: {self._failure}") from self._failure

    def _save_if_due(self, beside_rows):
        saving = self._saving is not None and self._saving.is_alive()
        if self._saver is None or saving or time.monotonic() - self._saved_at < self._every:
            return
        try:
            self._start_save(*beside_rows())
        except OSError as error:
            self._saved_at = time.monotonic()
            warnings.warn(str(error), stacklevel=2)

    def _start_save(self, leaves, extra):
        self._saved_at, self._failure = time.monotonic(), None
        args = self._saver, leaves, extra
        self._saving = threading.Thread(target=self._save, args=args, name="pool-saves", daemon=True)
        self._saving.start()
        return self._saving

    def _save(self, saver, leaves, extra):
        params = self._params if leaves is None else with_floating(self._params, leaves)
        try:
            if not all(np.isfinite(leaf).all() for leaf in leaves or ()):
                raise FloatingPointError("the parameters are not finite")
            saver.save(image_of(saver.directory, params, self._tables), extra)
            saver.wait()
        except Exception as error:  # the thread must not end in silence; training goes on
            self._failure = error
            warnings.warn(f"an image was not saved: {error}", stacklevel=2)

    def close(self) -> None:
        """Wait for a save in progress, and close the checkpointer."""
        if self._saving is not None:
            self._saving.join()
        if self._saver is not None:
            self._saver.close()


class ServedTables(SharedTables):
    """The shard servers of a pool, whose deaths trainers detect before the driver does, and the images of their rows.

    Attributes:
      access: handles to the servers that the tables use.
    """

    copy = "shards"

    def __init__(self, servers: Supervisor, *args: Any):
        super().__init__(servers.tables, *args)
        self._servers = servers

    @property
    def access(self) -> Any:
        """See `ServedTables`."""
        return [server.handle for server in self._servers.in_use]

    def begin(self, pool: TrainerPool) -> None:
        """See `SharedTables`."""
        self._servers.begin(pool)

    def probe(self, lost: Sequence[int]) -> None:
        """See `SharedTables`."""
        for server in self._servers.in_use:
            if set(server.shards) & set(lost):
                with contextlib.suppress(ShardsLost):
                    self._tables.probe(server.shards[0])

    def mark_lost(self, lost: Sequence[int], reason: str) -> None:
        """See `SharedTables`."""
        self._tables.mark_lost(lost, reason)

    def restore_lost(self, beside_rows: Callable[[], tuple[list | None, dict]]) -> dict[RayServer, str]:
        """See `SharedTables`."""
        lost, before = self._tables.lost, self._servers.in_use
        if not lost:
            return super().restore_lost(beside_rows)
        if self._saving is not None:
            self._saving.join()  # it fails, as shards are lost
        while lost:
            self._servers.recover(lost)
            try:
                # Each shard from the newest image in which it is intact.
                candidates = [] if self._directory is None else newest_first(self._directory)
                try:
                    restore_each(candidates, self._tables, lost)
                except DamagedImage as error:  # of all of them, before any row has changed
                    warnings.warn(f"no image is intact, rows are initial ones again: {error}", stacklevel=4)
                    restore_each([], self._tables, lost)
                lost = ()
            except ShardsLost as again:  # a successor died: restore all of them again
                lost = tuple(sorted({*lost, *again.shards}))
        reasons = {death.server: death.reason for death in self._servers.deaths}
        after = self._servers.in_use
        return {new: reasons[new.index] for old, new in zip(before, after, strict=True) if new is not old}
