"""Who takes part in a training: trainers join, are heard of, are done or leave; none waits for
ever.

Who is awaited and has not been heard of for longer than `timeout_s` is overdue. A trainer is heard
of by its rounds, by each call of `exchange`, and while it is in a transfer. With
on_failure='raise' a trainer that leaves early or is overdue ends the rounds of all: each gets
`Left` with its name. With 'drop' the rounds go on without it, and what it had brought is not used.
With 'replace' they do so too, and a successor may join in its place: the end of all waits for one,
until it is said that none will come.
"""

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from jaxrec.bounds import real_number, whole_number
from jaxrec.interrupts import uninterrupted, wait
from jaxrec.shadowsync.leaves import Template, initial_leaves
from jaxrec.shadowsync.rules import Rule
from jaxrec.types import PyTree

LONGEST_TIMEOUT_S = 1e6  # what a condition can wait for has a limit


class Left(RuntimeError):
    """No more rounds: another trainer has left or is overdue, or this one has been dropped."""


class Transport(Protocol):
    """How trainers meet; `meet` is called by their background threads only, or in the foreground.

    A transport around another one can hand on what it does not change: `__getattr__` for the
    attributes and `join`.

    Attributes:
      rule: by which trainers are synchronised.
      template: of the parameters of one replica.
      timeout_s: the longest that it waits for a trainer.

    One with an attribute `on_failure` that is 'drop' goes on with the others when a trainer leaves
    early. One with an attribute `last_round` that is False ends where the trainers stand: what
    `meet` returns with the last time is not used then. Three methods more are used if a transport
    has them: `alive(trainer)`, called by every `exchange`; `last_seen(trainer)`, when `alive` or
    `meet` was last at work for it, in seconds of `time.monotonic`; `why_gone(trainer)`, empty for
    one that takes part.
    """

    rule: Rule
    template: Template
    timeout_s: float

    def join(self, trainer: int) -> None:
        """Takes a trainer's place, once."""

    def meet(self, trainer: int, before: PyTree, done: bool) -> tuple[PyTree, bool]:
        """Brings floating leaves, numpy [R, ...]; returns where each should move to, and whether it
        ended.

        A trainer that is done goes on to meet until it is told that it was the last time. With a
        centre it brings nothing any more then, waits for the others, and gets the centre's
        parameters.
        """

    def leave(self, trainer: int, error: BaseException | None = None) -> None:
        """This trainer goes, because of an error if there is one; others must not wait for it."""


@dataclasses.dataclass
class Member:
    """A trainer as the others see it."""

    state: str = "expected"  # then "here", "done" (it waits for the others), "finished" or "gone"
    rounds: int = 0
    seen: float = -math.inf  # seconds of `time.monotonic`
    given_up: bool = False  # it is gone, and nobody takes its place
    why: str = ""  # it is gone


class Meeting:
    """The trainers of one training, and what becomes of them; a transport adds the rounds.

    `_changed` guards all fields, but for the time at which a member was last seen.
    """

    def __init__(
        self,
        rule: Rule,
        parameters: PyTree,
        trainers: int,
        timeout_s: float,
        on_failure: str,
        last_round: bool,
    ):
        _check(rule, parameters, trainers, timeout_s, on_failure)
        self.rule, self.timeout_s, self.on_failure = rule, float(timeout_s), on_failure
        self.last_round = last_round
        self.template, self._initial = initial_leaves(parameters)
        # One of each number from the start: who never joins is awaited too.
        self._members = [Member() for _ in range(trainers)]
        self._changed, self._failure = threading.Condition(), ""

    def join(self, trainer: int) -> None:
        """Takes a trainer's place, once: a transport is for one training.

        Raises:
          ValueError: there is no such place, or it was taken before.
          Left: the others have stopped.
        """
        with uninterrupted(), self._changed:
            member = self._member(trainer)
            if member.state in ("here", "done"):
                raise ValueError(f"trainer={trainer} has joined already: each trainer has a number of its own, from 0.")
            if member.state != "expected" and not self._lacks(member):
                raise ValueError(
                    f"trainer={trainer} {member.why or 'has finished'}, and no trainer comes back: a group or a "
                    "transport is for one training, make a new one."
                )
            self._raise_failure(trainer)  # a place is not taken where no round will come
            member.state, member.seen, member.why = "here", time.monotonic(), ""
            self._changed.notify_all()

    def give_up(self, trainer: int) -> None:
        """Nobody will take the place of this trainer: it goes, if it is here, and the end of all waits no longer."""
        with uninterrupted(), self._changed:
            member = self._member(trainer)
            member.given_up = member.state != "finished"
            if member.state not in ("finished", "gone"):
                self._lose({trainer: f"was given up after its round {member.rounds}"})
            self._settle()
            self._changed.notify_all()

    def leave(self, trainer: int, error: BaseException | None = None) -> None:
        """This trainer goes; nothing happens if it has finished or gone before."""
        with uninterrupted(), self._changed:
            member = self._member(trainer)
            # What made it leave first is the reason: `with` blocks leave again on their way out.
            if member.state not in ("finished", "gone"):
                because = f" with {type(error).__name__}: {str(error)[:200]}" if error is not None else ""
                without = "" if because or member.state == "expected" else " without `finish`"
                self._lose({trainer: f"left{without} after its round {member.rounds}{because}"})

    def alive(self, trainer: int, ago_s: float = 0.0) -> None:
        """This trainer is heard of, or was so many seconds ago."""
        # One write without the lock or a check, as it comes with every step of one who has joined.
        self._members[trainer].seen = time.monotonic() - ago_s

    def last_seen(self, trainer: int) -> float:
        """When this trainer was last heard of, or waited in `meet`: seconds of `time.monotonic`."""
        return self._member(trainer).seen

    def why_gone(self, trainer: int) -> str:
        """Why this trainer takes no part any more; empty if it does, or has finished."""
        return self._member(trainer).why

    def _member(self, trainer):
        trainers = len(self._members)
        return self._members[whole_number("trainer", trainer, 0, trainers - 1, f": there are trainers={trainers}")]

    def _present(self, trainer):
        """The member, which must be taking part."""
        member = self._member(trainer)
        if member.state == "expected":
            raise ValueError(f"trainer={trainer} has not joined: `join` comes before `meet`.")
        if member.state == "finished":
            raise ValueError(f"trainer={trainer} has finished: there are no more rounds.")
        if member.state == "gone":
            raise Left(f"trainer {trainer} {member.why}; it takes no part any more.")
        return member

    def _raise_failure(self, trainer):
        if self._failure:
            raise Left(f"trainer {trainer} has nobody to meet: {self._failure}")

    def _awaited(self) -> list[int]:
        """Who is still training, or has yet to come."""
        return [i for i, member in enumerate(self._members) if member.state in ("expected", "here")]

    def _lacks(self, member):
        """Whether a successor may still come for a member."""
        return self.on_failure == "replace" and member.state == "gone" and not member.given_up

    def _lose(self, whys: dict[int, str]):
        for trainer, why in whys.items():
            self._members[trainer].state, self._members[trainer].why = "gone", why
        # The first failure is the cause: whoever leaves after it leaves because of it.
        if self.on_failure == "raise" and not self._failure:
            some = [f"trainer {trainer} {why}" for trainer, why in list(whys.items())[:3]]
            more = [f"{len(whys) - 3} more"] if len(whys) > 3 else []
            self._failure = f"{', '.join(some + more)}. on_failure='drop' would go on with the others."
        # Those who wait may have waited for the lost ones only.
        self._settle()
        self._changed.notify_all()

    def _settle(self):
        """What is due once nobody is awaited any more."""
        raise NotImplementedError

    def _count(self, trainer):
        with uninterrupted(), self._changed:
            member = self._members[trainer]
            # A round that has ended is a sign of life, like a call of its trainer.
            member.rounds, member.seen = member.rounds + 1, time.monotonic()

    def _wait(
        self,
        trainer: int,
        since: float,
        over: Callable[[], bool],
        awaited: Callable[[], Iterable[int]],
    ):
        """Until it is over; who was awaited for too long, since then or since it was seen, is lost.

        Nobody holds the lock when it is called, as Ctrl-C ends the wait.
        """
        is_over = functools.partial(self._is_over, trainer, since, over, awaited)
        over_in = lambda: min([self._nap, *self._due(trainer, since, awaited).values()])
        while not wait(self._changed, is_over, over_in()):
            pass

    @property
    def _nap(self):
        # A trainer that waits is heard of at least so often, so that those who wait for it do not
        # lose it.
        return self.timeout_s / 2

    def _due(self, trainer, since, awaited):
        """In how many seconds each of the others that are awaited is overdue."""
        # From when it was awaited, as rounds may be rarer than the time-out, or from when it was
        # seen.
        due = since + self.timeout_s - time.monotonic()
        return {i: due + max(0.0, self._members[i].seen - since) for i in awaited() if i != trainer}

    def _is_over(self, trainer, since, over, awaited):
        # Before the failure: a round that has ended counts, whatever became of the others since.
        if over() and self._members[trainer].state != "gone":
            return True
        self._present(trainer)
        self._raise_failure(trainer)
        self._members[trainer].seen = now = time.monotonic()
        # Whoever waits is alive, and has just said so: only others can be overdue.
        overdue = [i for i, left in self._due(trainer, since, awaited).items() if left <= 0]
        if not overdue:
            return False
        self._lose({i: self._overdue(i, now) for i in overdue})
        # Without them it may be over, or have failed.
        return self._is_over(trainer, since, over, awaited)

    def _overdue(self, trainer, now):
        member = self._members[trainer]
        if member.state == "expected":
            return f"never joined within timeout_s={self.timeout_s:g} (are there {len(self._members)} trainers?)"
        ago = f"{now - member.seen:.3g} s ago, timeout_s={self.timeout_s:g}"
        return f"was last seen {f'at its round {member.rounds}' if member.rounds else 'when it joined'}, {ago}"


def _check(rule, parameters, trainers, timeout_s, on_failure):
    if not isinstance(rule, Rule):
        raise ValueError(f"rule is a {type(rule).__name__}: give model_averaging(), bmuf() or easgd().")
    if isinstance(parameters, int):
        raise ValueError(
            f"parameters={parameters} is a number: give the initial parameters of one replica before the number of "
            f"trainers, as in SyncGroup(rule, params, trainers={parameters})."
        )
    whole_number("trainers", trainers)
    fits = lambda seconds: 0 < seconds <= LONGEST_TIMEOUT_S
    real_number("timeout_s", timeout_s, f"above 0 and at most {LONGEST_TIMEOUT_S:g} seconds", fits)
    if on_failure not in ("raise", "drop", "replace"):
        raise ValueError(f"on_failure={on_failure!r} must be 'raise', 'drop' or 'replace'.")
