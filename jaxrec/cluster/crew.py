"""Trainers in processes, and the crew that keeps them training: one call for a laptop and for a cluster.

    with Cluster() as cluster:
        servers = Supervisor(cluster, spec, row_optimizer, servers=2)
        with Crew(cluster, servers, work, trainers=4) as crew:
            params, figures = crew.run()

Each trainer is a process with a JAX of its own, that reads its batches itself, trains on rows at the servers and meets
the others at places (`places`), in the background or every so many steps. What dies is replaced, and nothing rolls
back:

- a trainer: its successor begins with the parameters of the others and a fresh optimizer state, at the last position
  that the crew has heard of; what was trained after it is trained once more;
- a server: its successor has its rows from the newest image, or initial ones; trainers that need them wait;
- a place: its successor begins with what a trainer has brought to it last; training does not wait;
- the driver: all end.

A trainer that says nothing for `timeout_s` (it was stopped, or its machine is gone) counts as dead. **Accounting**: an
example counts as trained once, when the crew has heard of it; those of a trainer that has died too often, and was given
up, are lost. The sum of both is the stream. Reference: Zheng et al., ShadowSync, arXiv 2003.03477; of failures it says
nothing. Legend: n trainers, m workers of each.
"""

import contextlib
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrec.bounds import is_positive, real_number, whole_number
from jaxrec.cluster.crew_figures import CrewFigures, Fall, Progress, figures_of, summed
from jaxrec.cluster.crew_places import CrewPlaces
from jaxrec.cluster.crew_rows import CrewRows
from jaxrec.cluster.processes import Process, ServerWay, packed
from jaxrec.cluster.runtime import Cluster
from jaxrec.cluster.supervisor import GivenUp, Supervisor
from jaxrec.cluster.trainers import TrainerProcess, Work, examples_in
from jaxrec.embedding.servers import ServerGone
from jaxrec.shadowsync.params import initial_leaves
from jaxrec.types import PyTree

_LOOK_S, _ASK_S = 0.1, 2.0
# What a trainer may fail by when others die: its successor does not fail by it as well.
_OF_OTHERS = ("PeerLeft", "ShardsLost", "ServerGone", "OtherIncarnation", "TimeoutError")


class Crew:
    """n trainers over the rows of some servers.

    Args:
      cluster: that was entered.
      servers: of the rows; for this crew alone meanwhile.
      work: what each trainer does.
      trainers: n.
      places: over how many processes the tensors of a centre are packed; one for other rules.
      cores: for each trainer the cores that its threads are held to, as [[0], [1]]; all cores for all if None.
      directory: of images, from the newest of which the rows of a dead server come; initial rows if None.
      save_every_seconds: an image of all rows so often, into the directory; none if None.
      timeout_s: a process that says nothing for so long is dead.
      most_deaths: of one trainer; one more, and it is given up.
      resources: of Ray that each trainer needs, to choose its machine, as {'trainer': 1}; none if None.

    Attributes:
      falls: deaths so far.

    Raises:
      ValueError: a number out of range; not as many lists of cores as trainers; a rule that cannot be had over so many
        places; saves without a directory.
    """

    def __init__(
        self, cluster: Cluster, servers: Supervisor, work: Work, trainers: int = 2, *, places: int = 1,
        cores: Sequence[Sequence[int]] | None = None, directory: str | Path | None = None,
        save_every_seconds: float | None = None, timeout_s: float = 30.0, most_deaths: int = 8,
        resources: dict[str, float] | None = None,
    ):  # fmt: skip
        _check(cluster, work, trainers, cores, directory, save_every_seconds)
        self._most_deaths = whole_number("most_deaths", most_deaths, 0)
        self._timeout_s = real_number("timeout_s", timeout_s, "a number of seconds above 0 and finite", is_positive)
        self._servers, self._work, self._cores, self._resources = servers, work, cores, resources
        self._places = CrewPlaces(work.rule, initial_leaves(work.params)[1], trainers, places, timeout_s)
        self._rows = CrewRows(servers, directory, save_every_seconds, work.params)
        self._packed = packed(work)
        self._name, self.falls = uuid.uuid4().hex[:12], list[Fall]()
        self._crew: list[Process] = []
        self._incarnations = [1] * trainers
        self._reached = [Progress()] * trainers  # of the newest incarnation
        self._before = [Progress()] * trainers  # of those before it
        self._ended: dict[int, PyTree] = {}  # parameters of trainers that are done
        self._given_up: dict[int, str] = {}
        self._begun = time.monotonic()

    @property
    def processes(self) -> list[int | None]:
        """The number of each trainer's process, on its machine; None while it is started."""
        return [one.number for one in self._crew]

    @property
    def place_processes(self) -> list[int | None]:
        """The number of each place's process; None while it is started."""
        return self._places.processes

    @property
    def reached(self) -> list[Progress]:
        """How far each trainer has come, as the crew has heard."""
        return list(self._reached)

    def __enter__(self) -> "Crew":
        self._servers.__enter__()  # from here on rows are brought back
        self._begun = time.monotonic()
        self._places.begin()
        self._crew = [self._started(number, None) for number in range(len(self._reached))]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for one in self._crew:
            one.kill()
        self._places.kill()
        self._rows.close()

    def run(self, look: Callable[["Crew"], None] | None = None) -> tuple[list[PyTree], CrewFigures]:
        """Waits until all trainers are done or given up, and replaces those that die.

        Args:
          look: called some times a second, with the crew.

        Returns:
          The parameters of each trainer that is done, leaves [1, ...] in numpy, and the figures.

        Raises:
          ValueError: the crew was not entered.
          GivenUp: all trainers have died too often; servers have.
          RuntimeError: a trainer has failed by itself, which says why: its successor would fail as well.
        """
        if not self._crew:
            raise ValueError("the crew was not entered: with Crew(...) as crew: crew.run().")
        while present := self._present():
            self._look_at_servers(present)
            self._look_at_places(present)
            for number in present:
                self._look_at(number)
            if look is not None:
                look(self)
            time.sleep(_LOOK_S)
        if not self._ended:
            raise GivenUp(f"all trainers were given up: {next(iter(self._given_up.values()))}")
        seconds, ended = time.monotonic() - self._begun, [self._ended[number] for number in sorted(self._ended)]
        reached = [summed(before, now) for before, now in zip(self._before, self._reached, strict=True)]
        return ended, figures_of(reached, self._lost(), seconds, ended, self.falls)

    def _present(self):
        return [n for n in range(len(self._crew)) if n not in self._ended and n not in self._given_up]

    # ---- trainers

    def _started(self, number, leaves):
        name = f"trainer {number} (incarnation {self._incarnations[number]})"
        one = Process(TrainerProcess, 4, self._resources, name)
        cores = None if self._cores is None else list(self._cores[number])
        one.way.call(
            "begin", self._packed, number, len(self._reached), self._incarnations[number],
            self._reached[number].position, leaves, self._rows.ways, self._places.ways, f"{self._name}-{number}",
            self._timeout_s, cores,
        )  # fmt: skip
        return one

    def _look_at(self, number):
        one = self._crew[number]
        found = one.look("progress")
        if found is None:
            if why := one.why_dead(self._timeout_s):
                self._succeed(number, why)
            return
        if found.state == "waits":  # it has not heard yet where it begins
            return
        self._reached[number] = found
        if found.lost:
            self._rows.hear_of(found.lost)
        if found.state == "done":
            self._end(number, one)
        elif found.state == "failed":
            if not found.why.startswith(_OF_OTHERS):
                raise RuntimeError(f"trainer {number} has failed: {found.why}")
            self._succeed(number, f"{one.name} could not go on: {found.why}")

    def _end(self, number, one):
        try:
            self._ended[number], self._reached[number] = one.way.call("result").result(self._timeout_s)
        except (ServerGone, TimeoutError) as error:  # it has died with its parameters
            self._succeed(number, str(error))
        else:
            self._places.give_up(number)  # no successor comes

    def _succeed(self, number, why):
        self._crew[number].kill()  # one that is stopped may come back, and is not to
        self._places.leave(number, self._incarnations[number], why)
        self._fall("trainer", number, why)
        position = self._reached[number].position
        self._before[number] = summed(self._before[number], self._reached[number])
        self._reached[number] = Progress(position=position)
        if self._incarnations[number] > self._most_deaths:
            self._given_up[number] = why
            self._places.give_up(number)
            warnings.warn(f"{why}; trainer {number} is given up at its batch {position}", stacklevel=4)
            return
        self._incarnations[number] += 1
        leaves = self._places.leaves() or self._newest_leaves()
        self._crew[number] = self._started(number, leaves)
        warnings.warn(
            f"{why}; trainer {number} begins again at its batch {position}, with the parameters of the others and a "
            "fresh optimizer state", stacklevel=4,
        )  # fmt: skip

    def _newest_leaves(self):
        """What a living trainer has brought last to a round; None if none has."""
        for number in self._present():
            with contextlib.suppress(ServerGone, TimeoutError):
                if (found := self._crew[number].way.call("newest").result(_ASK_S)) is not None:
                    return found
        return None

    # ---- places and servers

    def _look_at_places(self, present):
        absent = [n for n in range(len(self._crew)) if n not in present]
        for place, why in self._places.replace_dead(self._newest_leaves, absent).items():
            self._fall("place", place, why)
            warnings.warn(f"{why}; another one has begun with the parameters of a trainer", stacklevel=4)
            for number in present:
                self._crew[number].way.call("take_place", place, self._places.ways[place])

    def _look_at_servers(self, present):
        for server, why in self._rows.bring_back(self._places.leaves).items():
            self._fall("server", server.place, why)
            for number in present:
                self._crew[number].way.call("take_over", ServerWay(server.actor, str(server)), server.shards, why)

    def _fall(self, kind, number, why):
        self.falls.append(Fall(kind, number, why, time.monotonic() - self._begun))

    def _lost(self):
        """Examples of trainers that were given up, after what they had trained."""
        streams = [self._work.batches(n, len(self._crew))(self._reached[n].position) for n in self._given_up]
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
