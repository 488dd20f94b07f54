"""The places of a crew: processes in which its trainers meet, and successors of those that die."""

import contextlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxrec.cluster.places import MeetingPlace, deal_leaves
from jaxrec.cluster.processes import Ask, Process
from jaxrec.embedding.servers import ServerGone
from jaxrec.shadowsync.rules import Rule


class CrewPlaces:
    """Processes with a `MeetingPlace` each.

    Args:
      rule: by which trainers are synchronised; there are no places if None.
      initial: floating leaves of one replica.
      trainers: n.
      places: over how many processes the leaves of a centre are packed.
      timeout_s: a process that says nothing for so long is dead.

    Raises:
      ValueError: more places than the rule can have.
    """

    def __init__(self, rule: Rule | None, initial: Sequence[np.ndarray], trainers: int, places: int, timeout_s: float):
        self._rule, self._initial, self._trainers, self._timeout_s = rule, list(initial), trainers, timeout_s
        self._dealt = [] if rule is None else deal_leaves([leaf.nbytes for leaf in initial], rule, places)
        self._all: list[Process] = []

    def begin(self) -> None:
        """Starts them."""
        self._all = [self._made(number, self._initial) for number in range(len(self._dealt))]

    @property
    def ways(self) -> list[Ask]:
        """To each of them."""
        return [place.way for place in self._all]

    @property
    def processes(self) -> list[int | None]:
        """The number of each process; None while it is started."""
        return [place.number for place in self._all]

    def leaves(self) -> list[np.ndarray] | None:
        """What a trainer that comes now begins with; None if a place does not say."""
        found: dict[int, np.ndarray] = {}
        for place, mine in zip(self._all, self._dealt, strict=True):
            try:
                found |= dict(zip(mine, place.way.call("leaves").result(self._timeout_s), strict=True))
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
        for number, place in enumerate(self._all):
            place.look("process")
            if why := place.why_dead(self._timeout_s):
                place.kill()
                dead[number] = why
                self._all[number] = self._made(number, newest() or self._initial)
                for trainer in absent:
                    self._all[number].way.call("give_up", trainer)
        return dead

    def give_up(self, trainer: int) -> None:
        """Tells all that a trainer will not come any more."""
        for place in self._all:
            with contextlib.suppress(ServerGone):
                place.way.call("give_up", trainer)

    def leave(self, trainer: int, incarnation: int, why: str) -> None:
        """Tells all that a trainer is dead, before it is overdue."""
        for place in self._all:
            with contextlib.suppress(ServerGone):
                place.way.call("leave", trainer, incarnation, why)

    def kill(self) -> None:
        """Ends them."""
        for place in self._all:
            place.kill()

    def _made(self, number, leaves):
        threads = 2 * self._trainers + 8  # those that wait for a round, and those that ask meanwhile
        mine = [leaves[leaf] for leaf in self._dealt[number]]
        return Process(
            MeetingPlace, threads, None, f"place {number}", self._rule, mine, self._trainers, self._timeout_s
        )
