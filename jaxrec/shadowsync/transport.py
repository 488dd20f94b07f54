"""Where the trainers of one process meet: in rounds of all, or at a centre, each when it likes. None waits for ever.

A trainer that is awaited and has not been heard of for longer than `timeout_s` is overdue. A trainer is heard
of by its rounds, by each call of `exchange`, and while it is in a transfer. With
on_failure='raise' a trainer that leaves early or is overdue ends the rounds of all: each gets
`PeerLeft` with its name. With 'drop' the rounds go on without it, and what it had brought is not used.
With 'replace' they do so too, and a successor may join in its place: the end of all waits for one,
until it is said that none will come.

Legend: R replicas of a trainer, n trainers.
"""

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
import numpy as np

from jaxrec.bounds import is_positive, real_number, whole_number
from jaxrec.interrupts import uninterrupted, wait
from jaxrec.shadowsync.params import Template, check_leaves, floating, initial_leaves, replicas_in, with_floating
from jaxrec.shadowsync.rules import Rule, mean_of, wide
from jaxrec.types import PyTree


class PeerLeft(RuntimeError):
    """No more rounds: another trainer has left or is overdue, or this one has been dropped."""


class Transport(Protocol):
    """How trainers meet: `AllToAll`, `Centre`, or one around another, which hands on what it does not change by
    `__getattr__`.

    `meet` is called by a trainer's background thread or, in the foreground and in `finish`, by its own. It neither
    waits for ever nor goes on for a trainer that has left: it raises `PeerLeft`.

    Attributes:
      rule: by which trainers are synchronised.
      template: of the parameters of one replica.
      timeout_s: the longest that it waits for a trainer.
      on_failure: when a trainer leaves early it raises in the others ('raise'), goes on without it ('drop'), or waits
        for its successor ('replace').
      last_round: whether it brings trainers together at the end; if not, what `meet` returns with the last time is
        not used.
    """

    rule: Rule
    template: Template
    timeout_s: float
    on_failure: str
    last_round: bool

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

    def alive(self, trainer: int) -> None:
        """This trainer is heard of: every `exchange` says so."""

    def why_gone(self, trainer: int) -> str:
        """Why this trainer takes no part any more; empty if it does, or has finished."""


@dataclasses.dataclass
class Member:
    """A trainer as the others see it."""

    state: str = "expected"  # then "here", "done" (it waits for the others), "finished" or "gone"
    rounds: int = 0
    seen: float = -math.inf  # seconds of `time.monotonic`
    given_up: bool = False  # it is gone, and no successor takes its place
    why: str = ""  # it is gone


class Membership:
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
        whole_number("trainers", trainers)
        self.timeout_s = float(real_number("timeout_s", timeout_s, "above 0 and finite", is_positive))
        if on_failure not in ("raise", "drop", "replace"):
            raise ValueError(f"on_failure={on_failure!r} must be 'raise', 'drop' or 'replace'.")
        self.rule, self.on_failure, self.last_round = rule, on_failure, last_round
        self.template, self._initial = initial_leaves(parameters)
        # One of each number from the start: a trainer that never joins is awaited too.
        self._members = [Member() for _ in range(trainers)]
        self._changed, self._failure = threading.Condition(), ""

    def join(self, trainer: int) -> None:
        """Takes a trainer's place, once: a transport is for one training.

        Raises:
          ValueError: there is no such place, or it was taken before.
          PeerLeft: the others have stopped.
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
            self._raise_failure(trainer)  # no place is taken where no round will come
            member.state, member.seen, member.why = "here", time.monotonic(), ""
            self._changed.notify_all()

    def give_up(self, trainer: int) -> None:
        """No successor will take the place of this trainer: it goes, if it is here, and the end of all waits no
        longer."""
        with uninterrupted(), self._changed:
            member = self._member(trainer)
            member.given_up = member.state != "finished"
            if member.state not in ("finished", "gone"):
                self._lose({trainer: f"was given up after its round {member.rounds}"})
            self._end_if_complete()
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
        # One write without the lock or a check, as it comes with every step of a trainer.
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

    def _taking_part(self, trainer):
        """The member, which must be here, and have others to meet."""
        member = self._member(trainer)
        if member.state == "expected":
            raise ValueError(f"trainer={trainer} has not joined: `join` comes before `meet`.")
        if member.state == "finished":
            raise ValueError(f"trainer={trainer} has finished: there are no more rounds.")
        if member.state == "gone":
            raise PeerLeft(f"trainer {trainer} {member.why}; it takes no part any more.")
        self._raise_failure(trainer)
        return member

    def _raise_failure(self, trainer):
        if self._failure:
            raise PeerLeft(f"trainer {trainer} has no others to meet: {self._failure}")

    def _awaited(self) -> list[int]:
        """The trainers that still train, or have yet to come."""
        return [i for i, member in enumerate(self._members) if member.state in ("expected", "here")]

    def _lacks(self, member):
        """Whether a successor may still come for a member."""
        return self.on_failure == "replace" and member.state == "gone" and not member.given_up

    def _lose(self, whys: dict[int, str]):
        for trainer, why in whys.items():
            self._members[trainer].state, self._members[trainer].why = "gone", why
        # The first failure is the cause: trainers that leave after it leave because of it.
        if self.on_failure == "raise" and not self._failure:
            all_of_them = ", ".join(f"trainer {trainer} {why}" for trainer, why in whys.items())
            self._failure = f"{all_of_them}. on_failure='drop' would go on with the others."
        # Others may have waited for the lost ones only.
        self._end_if_complete()
        self._changed.notify_all()

    def _end_if_complete(self):
        """What is due once no trainer is awaited any more."""
        raise NotImplementedError

    def _count(self, trainer):
        with uninterrupted(), self._changed:
            member = self._members[trainer]
            # A round that has ended is a sign of life, like a call of its trainer.
            member.rounds, member.seen = member.rounds + 1, time.monotonic()

    def _wait(self, trainer: int, over: Callable[[], bool], awaited: Callable[[], Iterable[int]]):
        """Until it is over; a trainer that is awaited for longer than the time-out, and was not seen, is lost.

        The lock is free when it is called, as Ctrl-C ends the wait.
        """
        is_over = functools.partial(self._is_over, trainer, time.monotonic(), over, awaited)
        while not wait(self._changed, is_over, self._nap):
            pass

    @property
    def _nap(self):
        # A trainer that waits is heard of at least so often, so that others that wait for it do not
        # lose it.
        return self.timeout_s / 8

    def _is_over(self, trainer, since, over, awaited):
        # Before the failure: a round that has ended counts, whatever became of the others since.
        if over() and self._members[trainer].state != "gone":
            return True
        # A trainer that waits is alive, and says so: only others can be overdue.
        self._taking_part(trainer).seen = now = time.monotonic()
        # From when they were awaited, as rounds may be rarer than the time-out, or from when they were seen.
        heard = {i: max(since, self._members[i].seen) for i in awaited() if i != trainer}
        overdue = [i for i, at in heard.items() if now - at >= self.timeout_s]
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


class AllToAll(Membership):
    """Rounds of all trainers of one process, for rules that combine the mean over all replicas.

    Args:
      rule: model averaging or BMUF; what it shares is kept here once, being the same for all.
      parameters: the initial ones of one replica, without a replica axis; BMUF begins from them.
      trainers: n; a round waits for all of them, as long as not all are done.
      timeout_s: how long a round waits for a trainer that is not heard of: more than the longest
        time between two of its calls of `exchange`, compilation included. Rounds may be rarer.
      on_failure: what becomes of the others when a trainer leaves early or is overdue: 'raise',
        'drop', or 'replace' if successors take the places of the lost.
      last_round: whether trainers that are done make a last round, which brings them together.
      memory: of an earlier transport, whose rounds go on here; of the initial parameters if None.

    Raises:
      ValueError: a rule with a centre; another argument out of range; parameters that cannot be
        synchronised; a memory of another rule or of other parameters.
    """

    def __init__(
        self,
        rule: Rule,
        parameters: PyTree,
        trainers: int = 1,
        *,
        timeout_s: float = 60.0,
        on_failure: str = "raise",
        last_round: bool = True,
        memory: PyTree | None = None,
    ):
        super().__init__(rule, parameters, trainers, timeout_s, on_failure, last_round)
        if rule.has_centre:
            raise ValueError(f"AllToAll needs a rule without a centre, got {rule.describe()}: use Centre.")
        self._shared: Any = _remembered(rule.init(self._initial), memory, rule)
        self._brought: dict[int, tuple[list, bool]] = {}  # to the round that has not ended
        self._round = 0
        self._target: list[np.ndarray] = []  # of the round before, until all have fetched it
        self._last = False

    @property
    def memory(self) -> PyTree:
        """What rounds have left for later ones, as numpy arrays; BMUF has a global model and a
        momentum."""
        with uninterrupted(), self._changed:
            return jax.tree.map(np.array, self._shared)

    @property
    def parameters(self) -> list[np.ndarray]:
        """The floating leaves of the newest target, in the dtypes of the initial parameters; those before any round."""
        with uninterrupted(), self._changed:
            newest = self._target or self._initial
        return [x.astype(initial.dtype) for x, initial in zip(newest, self._initial, strict=True)]

    def meet(self, trainer: int, before: PyTree, done: bool) -> tuple[PyTree, bool]:
        """One round: waits for all others; every replica gets the same target, in float32 or wider.

        Raises:
          ValueError: the parameters do not fit; this trainer has not joined.
          PeerLeft: another trainer has left or is overdue, or this one has been dropped.
        """
        leaves, rows = _brought(self.template, before, trainer)
        round_ = self._round  # without the lock, as no round ends without this trainer
        missing = lambda: set(self._awaited()) - set(self._brought)
        try:
            with uninterrupted(), self._changed:
                self._taking_part(trainer)
                # Checked and brought under one lock: a trainer that is dropped in between brings
                # nothing.
                self._brought[trainer] = leaves, done
                self._end_if_complete()
            self._wait(trainer, lambda: self._round > round_, missing)
        finally:
            with uninterrupted(), self._changed:
                # Taken before the next round can end, which needs this trainer.
                target, last = self._target, self._last
                # An error or an interrupt: what it has brought goes with it.
                if self._round == round_:
                    self._brought.pop(trainer, None)
        self._count(trainer)
        return with_floating(before, [np.broadcast_to(x, (rows, *x.shape)) for x in target]), last

    def _end_if_complete(self):
        """Combines what was brought if it is all that is needed."""
        # By the number of the trainer, not in the order of arrival, on which a sum's bits depend.
        brought = [self._brought[i] for i in self._awaited() if i in self._brought]
        if not brought or len(brought) < len(self._awaited()) or self._failure:
            return
        # The end waits for successors; rounds do not.
        if all(done for _, done in brought) and any(map(self._lacks, self._members)):
            return
        replicas = [[leaf[r] for leaf in leaves] for leaves, _ in brought for r in range(len(leaves[0]))]
        last = all(done for _, done in brought)
        # Nothing is kept before this line, so that a combine that raises leaves all as it was.
        if last and not self.last_round:
            shared, target = self._shared, replicas[0]  # which is not used
        else:
            shared, target = self.rule.combine(self._shared, mean_of(replicas))
        self._shared, self._target, self._last = shared, target, last
        for i in self._awaited() if self._last else ():
            self._members[i].state = "finished"
        self._brought = {}
        self._round += 1
        self._changed.notify_all()


class Centre(Membership):
    """Synchronisation parameter servers in this process, for EASGD: each trainer comes when it
    likes.

    The tensors are bin-packed over the servers by size. A server's bandwidth is emulated: transfers
    to and from it take turns, and their time is waited for.

    Args:
      rule: with a centre.
      parameters: the initial ones of one replica, without a replica axis.
      trainers: n; a trainer that is done waits for all of them.
      servers: how many.
      bytes_per_s: of each server, both directions together; None for no limit.
      timeout_s: how long a trainer that is done waits for another that is not heard of: more than the
        longest time between two of its calls of `exchange`. Rounds and transfers may take longer.
      on_failure: what becomes of the others when a trainer leaves early or is overdue: 'raise',
        'drop', or 'replace' if successors take the places of the lost.
      last_round: whether trainers that are done go to the centre once more, and get its parameters.
      memory: of an earlier transport, whose centre goes on here; of the initial parameters if None.

    Raises:
      ValueError: a rule without a centre; another argument out of range; parameters that cannot be
        synchronised; a memory of another rule or of other parameters.
    """

    def __init__(
        self,
        rule: Rule,
        parameters: PyTree,
        trainers: int = 1,
        *,
        servers: int = 1,
        bytes_per_s: float | None = None,
        timeout_s: float = 60.0,
        on_failure: str = "raise",
        last_round: bool = True,
        memory: PyTree | None = None,
    ):
        super().__init__(rule, parameters, trainers, timeout_s, on_failure, last_round)
        if not rule.has_centre:
            raise ValueError(f"Centre needs a rule with a centre, got {rule.describe()}: use AllToAll.")
        whole_number("servers", servers)
        if bytes_per_s is not None:
            real_number("bytes_per_s", bytes_per_s, "above 0, or None", lambda x: x > 0)
        self._tree = with_floating(_on_host(parameters), self._initial)
        self._centre = _remembered([rule.init(leaf) for leaf in self._initial], memory, rule)
        self._turn = threading.Lock()  # to move the centre
        self._bytes_per_s, self._free_at = bytes_per_s, [0.0] * servers
        sizes = [2 * leaf.nbytes for leaf in self._initial]  # to and fro
        places = pack(sizes, servers)
        self._bytes_of = [sum(s for s, at in zip(sizes, places, strict=True) if at == n) for n in range(servers)]

    @property
    def memory(self) -> PyTree:
        """The centre as numpy arrays, in float32 or wider, in the order of the template."""
        return self._now()

    @property
    def parameters(self) -> PyTree:
        """The centre as it is, in the dtypes of the initial parameters, with their other leaves."""
        pairs = zip(self._now(), self._initial, strict=True)
        return with_floating(self._tree, [x.astype(initial.dtype) for x, initial in pairs])

    def meet(self, trainer: int, before: PyTree, done: bool) -> tuple[PyTree, bool]:
        """Moves the centre towards every replica brought, one after the other: all of it, or
        nothing.

        Raises:
          ValueError: the parameters do not fit; this trainer has not joined.
          PeerLeft: another trainer has left or is overdue, or this one has been dropped.
        """
        leaves, rows = _brought(self.template, before, trainer)
        with uninterrupted(), self._changed:
            member = self._taking_part(trainer)
            if done:
                member.state = "done"
                self._end_if_complete()
        if done:
            self._wait(trainer, lambda: member.state == "finished", self._awaited)
            return with_floating(before, [np.stack([leaf] * rows) for leaf in self._now()]), True
        # First the way to the servers: a trainer that is dropped meanwhile must not move the centre.
        for _ in range(rows):
            self._transfer(trainer)
        targets = self._move(trainer, leaves, rows)
        self._count(trainer)
        return with_floating(before, [np.stack(target) for target in zip(*targets, strict=True)]), False

    def _move(self, trainer, leaves, rows):
        """The targets of each replica; the centre moves when all is computed, if the trainer still takes part."""
        # A lock of its own: rules compute for long, and the others must be heard of meanwhile.
        with uninterrupted(), self._turn:
            centre, targets = self._centre, []
            for replica in range(rows):
                pairs = [self.rule.combine(c, leaf[replica]) for c, leaf in zip(centre, leaves, strict=True)]
                centre = [moved for moved, _ in pairs]
                targets.append([target for _, target in pairs])
            with self._changed:
                self._taking_part(trainer)
                # One assignment of new arrays, so that one version is seen without the lock.
                self._centre = centre
        return targets

    def _now(self):
        return [np.array(leaf) for leaf in self._centre]

    def _end_if_complete(self):
        if not self._awaited() and not self._failure and not any(map(self._lacks, self._members)):
            for member in self._members:
                member.state = "finished" if member.state == "done" else member.state
        self._changed.notify_all()

    def _transfer(self, trainer):
        """Waits until the slowest server has got and sent its tensors, after what it had to do."""
        if self._bytes_per_s is None:
            return
        with uninterrupted(), self._changed:
            self._free_at = queued(self._free_at, self._bytes_of, self._bytes_per_s, time.monotonic())
            # The slowest server decides, as a round needs all tensors.
            until = max(self._free_at)
        while (left := until - time.monotonic()) > 0:
            wait(self._changed, functools.partial(self._is_hindered, trainer), min(left, self._nap))

    def _is_hindered(self, trainer):
        """Raises what a trainer in a transfer must hear; it may leave meanwhile."""
        self._taking_part(trainer).seen = time.monotonic()
        return False


def _remembered(fresh, memory, rule):
    """What a rule shares at the beginning: the memory, which must be alike, or the fresh one."""
    if memory is None:
        return fresh
    what = f"the memory of {rule.describe()}"
    wanted, leaves = (
        {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (fresh, memory)
    )
    shapes, found = ({name: leaf.shape for name, leaf in each.items()} for each in (wanted, leaves))
    if found != shapes:
        raise ValueError(f"{what} does not fit: it has {found!s:.300}, wanted {shapes!s:.300}.")
    check_leaves(list(leaves), list(leaves.values()), what)
    return jax.tree.unflatten(jax.tree.structure(fresh), list(leaves.values()))


def _on_host(tree):
    """A tree without arrays on a device, but for keys: a step could donate them."""
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    copied = lambda leaf: np.array(leaf) if isinstance(leaf, jax.Array) and not is_key(leaf) else leaf
    return jax.tree.map(copied, tree)


def queued(free_at: list[float], sizes: list[int], bytes_per_s: float, now: float) -> list[float]:
    """When each server will be free that gets so many bytes now, after what it has to do already.

    >>> queued([0.0, 5.0], [10, 10], bytes_per_s=10.0, now=3.0)
    [4.0, 6.0]
    """
    return [max(now, at) + size / bytes_per_s for at, size in zip(free_at, sizes, strict=True)]


def pack(sizes: list[int], bins: int) -> list[int]:
    """Spreads things over bins: the largest first, each to the bin that is emptiest so far.

    >>> pack([1, 5, 3, 3], 2)
    [0, 0, 1, 1]
    """
    load, place = [0] * bins, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        place[number] = load.index(min(load))
        # The largest first: what is left for the end is small, and fills up what is uneven.
        load[place[number]] += sizes[number]
    return place


def _brought(template, before, trainer):
    """The leaves and R of what a trainer brings."""
    rows = replicas_in(template, before, f"what trainer {trainer} brings")
    if rows is None:
        raise ValueError(f"what trainer {trainer} brings has no replica axis: bring leaves [R, ...].")
    return [leaf.astype(wide(leaf.dtype), copy=False) for leaf in floating(before)], rows
