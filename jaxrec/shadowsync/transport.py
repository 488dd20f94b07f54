"""Transports between the trainers of one process: common rounds, or a centre that each trainer visits independently.

No trainer waits indefinitely. An awaited trainer without a sign of life for `timeout_s` is overdue; signs of life are
its rounds, its `exchange` calls and, in a process of its own, its answers to a pool. If a trainer leaves early or is
overdue, then with on_failure='raise' the rounds end and every other trainer gets a `PeerLeft` that names it; with
'drop' rounds continue without it, and its contribution to the current round is discarded; with 'replace' they also
continue, a successor may join in its place, and the end of training waits for the successor until `give_up` is called.
One that joins after the end gets the last target, or the centre.

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
    """Raised when no more rounds follow: another trainer has left or is overdue, or this one was dropped."""


class Transport(Protocol):
    """Interface of transports: `AllToAll`, `Centre`, or a wrapper that forwards other attributes by `__getattr__`.

    `sync_round` runs in a trainer's background thread or, in the foreground and in `finish`, in its own thread. It
    raises `PeerLeft` rather than wait indefinitely or continue for a trainer that has left.

    Attributes:
      rule, timeout_s, on_failure, last_round: as for `AllToAll`; if `last_round` is False, the target of the last
        `sync_round` is unused.
      template: names and shapes of the floating leaves of one replica.
    """

    rule: Rule
    template: Template
    timeout_s: float
    on_failure: str
    last_round: bool

    def join(self, trainer: int) -> None:
        """Register a trainer, once."""

    def sync_round(self, trainer: int, before: PyTree, done: bool) -> tuple[PyTree, bool]:
        """Make a round with floating NumPy leaves [R, ...]; return their targets and whether it was the last round.

        A trainer that is done calls it with done=True until it was the last round. With a centre it then sends nothing,
        waits for the others, and gets the centre's parameters.

        Raises:
          PeerLeft: another trainer has left or is overdue, or this one was dropped.
          ValueError: the leaves do not fit the template, or this trainer has not joined.
        """

    def leave(self, trainer: int, error: BaseException | None = None) -> None:
        """Remove a trainer, with the error that made it leave, if any; others no longer wait for it."""

    def heartbeat(self, trainer: int) -> None:
        """Record a sign of life of a trainer; called in every `exchange`."""

    def exit_reason(self, trainer: int) -> str:
        """Return why a trainer no longer takes part; empty if it does, or has finished."""


@dataclasses.dataclass
class Member:
    """Status of a trainer in a transport."""

    # "expected", then "here", "done" (waiting for the others), "finished" or "gone"; "late": joined after the end.
    state: str = "expected"
    rounds: int = 0
    seen: float = -math.inf  # time of the last sign of life, in seconds of `time.monotonic`
    given_up: bool = False  # whether no successor may take its place
    why: str = ""  # reason of state "gone"


class Membership:
    """Base class of transports that tracks which trainers have joined, left, finished or been lost.

    `_changed` guards all fields except `Member.seen`. Arguments: see `AllToAll`.
    """

    has_centre: bool  # of its rules

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
        if rule.has_centre != self.has_centre:
            needs, other = ("with", "AllToAll") if self.has_centre else ("without", "Centre")
            raise ValueError(
                f"{type(self).__name__} needs a rule {needs} a centre, got {rule.describe()}: use {other}."
            )
        whole_number("trainers", trainers)
        self.timeout_s = float(real_number("timeout_s", timeout_s, "above 0 and finite", is_positive))
        if on_failure not in ("raise", "drop", "replace"):
            raise ValueError(f"on_failure={on_failure!r} must be 'raise', 'drop' or 'replace'.")
        self.rule, self.on_failure, self.last_round = rule, on_failure, last_round
        self.template, self._initial = initial_leaves(parameters)
        self._shared: Any = _remembered(rule.init(self._initial), memory, rule)
        # All members exist from the start, so that a trainer that never joins is awaited too.
        self._members = [Member() for _ in range(trainers)]
        self._changed, self._failure = threading.Condition(), ""
        self._prepare(parameters)

    def _prepare(self, parameters: PyTree) -> None:
        """Create the fields of a subclass."""
        raise NotImplementedError

    @property
    def memory(self) -> PyTree:
        """Shared state of the rule as NumPy arrays: the centre, or global model and momentum of BMUF; else empty."""
        with uninterrupted(), self._changed:
            return jax.tree.map(np.array, self._shared)

    def join(self, trainer: int) -> None:
        """Register a trainer, or its successor; a transport serves a single training."""
        with uninterrupted(), self._changed:
            member = self._member(trainer)
            if member.state in ("here", "done"):
                raise ValueError(f"trainer={trainer} has joined already: each trainer has a number of its own, from 0.")
            ended = any(each.state == "finished" for each in self._members)  # so have all, but for the lost ones
            late = ended and self.on_failure == "replace"
            if member.state != "expected" and not late and not self._lacks(member):
                raise ValueError(
                    f"trainer={trainer} {member.why or 'has finished'}, and no trainer can rejoin: a group or a "
                    "transport is for one training, make a new one."
                )
            self._raise_failure(trainer)  # before joining, as no round will follow
            member.state, member.seen, member.why = "late" if late else "here", time.monotonic(), ""
            self._changed.notify_all()

    def give_up(self, trainer: int) -> None:
        """Remove a trainer for good: no successor may join, and the end of training no longer waits for one."""
        with uninterrupted(), self._changed:
            member = self._member(trainer)
            member.given_up = member.state != "finished"
            if member.state not in ("finished", "gone"):
                self._lose({trainer: f"was given up after its round {member.rounds}"})
            self._end_if_complete()
            self._changed.notify_all()

    def leave(self, trainer: int, error: BaseException | None = None) -> None:
        """Remove a trainer; no effect if it has finished or left before."""
        with uninterrupted(), self._changed:
            member = self._member(trainer)
            # The first call has the reason: `with` blocks call `leave` again on exit.
            if member.state not in ("finished", "gone"):
                because = f" with {type(error).__name__}: {str(error)[:200]}" if error is not None else ""
                without = "" if because or member.state == "expected" else " without `finish`"
                self._lose({trainer: f"left{without} after its round {member.rounds}{because}"})

    def heartbeat(self, trainer: int) -> None:
        """Record a sign of life of a trainer."""
        # A single write without lock or check, as every step of a trainer makes it.
        self._members[trainer].seen = time.monotonic()

    def last_seen(self, trainer: int) -> float:
        """Return when a trainer last gave a sign of life or waited in `sync_round`, in seconds of `time.monotonic`."""
        return self._member(trainer).seen

    def exit_reason(self, trainer: int) -> str:
        """Return why a trainer no longer takes part; empty if it does, or has finished."""
        return self._member(trainer).why

    def _member(self, trainer):
        trainers = len(self._members)
        return self._members[whole_number("trainer", trainer, 0, trainers - 1, f": there are trainers={trainers}")]

    def _taking_part(self, trainer):
        """Return the member of a trainer, after checking that it takes part and that rounds have not ended."""
        member = self._member(trainer)
        if member.state == "expected":
            raise ValueError(f"trainer={trainer} has not joined: `join` comes before `sync_round`.")
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
        """Return the trainers that are still training or have not joined yet."""
        return [i for i, member in enumerate(self._members) if member.state in ("expected", "here")]

    def _lacks(self, member):
        """Return whether a member is lost and may still get a successor."""
        return self.on_failure == "replace" and member.state == "gone" and not member.given_up

    def _lose(self, whys: dict[int, str]):
        for trainer, why in whys.items():
            self._members[trainer].state, self._members[trainer].why = "gone", why
        # Only the first failure is kept: trainers that leave later do so because of it.
        if self.on_failure == "raise" and not self._failure:
            all_of_them = ", ".join(f"trainer {trainer} {why}" for trainer, why in whys.items())
            self._failure = f"{all_of_them}. on_failure='drop' would go on with the others."
        # The others may have waited only for the lost trainers.
        self._end_if_complete()
        self._changed.notify_all()

    def _end_if_complete(self):
        """End the round or the training if no trainer is awaited any more."""
        raise NotImplementedError

    def _count(self, trainer):
        with uninterrupted(), self._changed:
            member = self._members[trainer]
            # A completed round is a sign of life, like an `exchange` call.
            member.rounds, member.seen = member.rounds + 1, time.monotonic()

    def _wait(self, trainer: int, over: Callable[[], bool], awaited: Callable[[], Iterable[int]]):
        """Wait until `over` returns True; awaited trainers without a sign of life within the time-out are lost.

        Call it without holding the lock, as Ctrl-C ends the wait.
        """
        is_over = functools.partial(self._is_over, trainer, time.monotonic(), over, awaited)
        # A waiting trainer gives a sign of life at least this often, so that trainers waiting for it do not lose it.
        while not wait(self._changed, is_over, self.timeout_s / 8):
            pass

    def _is_over(self, trainer, since, over, awaited):
        # Checked before failures: a completed round counts even if other trainers were lost since.
        if over() and self._members[trainer].state != "gone":
            return True
        # A waiting trainer is alive: only others can be overdue.
        self._taking_part(trainer).seen = now = time.monotonic()
        # Counted from the start of the wait, as rounds may be rarer than the time-out, or from a later sign of life.
        heard = {i: max(since, self._members[i].seen) for i in awaited() if i != trainer}
        overdue = [i for i, at in heard.items() if now - at >= self.timeout_s]
        if not overdue:
            return False
        self._lose({i: self._overdue(i, now) for i in overdue})
        # Without the lost trainers the wait may be over or have failed.
        return self._is_over(trainer, since, over, awaited)

    def _overdue(self, trainer, now):
        member = self._members[trainer]
        if member.state == "expected":
            return f"never joined within timeout_s={self.timeout_s:g} (are there {len(self._members)} trainers?)"
        ago = f"{now - member.seen:.3g} s ago, timeout_s={self.timeout_s:g}"
        return f"was last seen {f'at its round {member.rounds}' if member.rounds else 'when it joined'}, {ago}"


class AllToAll(Membership):
    """Transport with common rounds of all trainers, for rules that combine the mean over all replicas.

    A round waits for all trainers until all are done.

    Args:
      rule: synchronisation rule, whose shared state the transport holds once for all trainers.
      parameters: initial parameters of one replica, without a replica axis.
      trainers, timeout_s, last_round: as for `SyncGroup`. Rounds may be rarer than the time-out.
      on_failure: 'raise' or 'drop' as for `SyncGroup`, or 'replace' if a successor may join in place of a trainer that
        leaves early or is overdue.
      memory: `memory` of an earlier transport to continue from; None to start from the initial parameters.
    """

    has_centre = False

    def _prepare(self, parameters):
        self._contributions: dict[int, tuple[list, bool]] = {}  # trainer -> leaves and `done` in the current round
        self._round = 0
        self._target: list[np.ndarray] = []  # target of the last completed round
        self._last = False

    @property
    def parameters(self) -> list[np.ndarray]:
        """Floating leaves of the newest target, or initially of the parameters, in the initial dtypes."""
        with uninterrupted(), self._changed:
            newest = self._target or self._initial
        return [x.astype(initial.dtype) for x, initial in zip(newest, self._initial, strict=True)]

    def sync_round(self, trainer: int, before: PyTree, done: bool) -> tuple[PyTree, bool]:
        """Make a round with all other trainers; every replica gets the same target, in float32 or wider."""
        leaves, replicas = _contribution(self.template, before, trainer)
        round_ = self._round  # read without the lock, as no round ends without this trainer
        missing = lambda: set(self._awaited()) - set(self._contributions)
        try:
            with uninterrupted(), self._changed:
                late = self._taking_part(trainer).state == "late"
                if not late:
                    # Under the same lock, so that a trainer dropped in between contributes nothing.
                    self._contributions[trainer] = leaves, done
                    self._end_if_complete()
            if not late:
                self._wait(trainer, lambda: self._round > round_, missing)
        finally:
            with uninterrupted(), self._changed:
                # No later round can have replaced them, as it would need this trainer.
                target, last = self._target, self._last
                # After an error or an interrupt, withdraw this trainer's contribution.
                if self._round == round_:
                    self._contributions.pop(trainer, None)
        self._count(trainer)
        return with_floating(before, [np.broadcast_to(x, (replicas, *x.shape)) for x in target]), last

    def _end_if_complete(self):
        """Complete the round if all awaited trainers have contributed."""
        # Ordered by trainer number, not by arrival, on which the bits of a sum would depend.
        contributions = [self._contributions[i] for i in self._awaited() if i in self._contributions]
        if not contributions or len(contributions) < len(self._awaited()) or self._failure:
            return
        # The end of training waits for successors; rounds do not.
        if all(done for _, done in contributions) and any(map(self._lacks, self._members)):
            return
        last = all(done for _, done in contributions)
        # Nothing is modified before it returns, so that an error in the rule leaves the state unchanged.
        shared, target = self._average(contributions, unused=last and not self.last_round)
        self._shared, self._target, self._last = shared, target, last
        for i in self._awaited() if self._last else ():
            self._members[i].state = "finished"
        self._contributions = {}
        self._round += 1
        self._changed.notify_all()

    def _average(self, contributions, unused):
        """Return the rule's shared state and target of the mean over all replicas of all trainers."""
        replicas = [[leaf[r] for leaf in leaves] for leaves, _ in contributions for r in range(len(leaves[0]))]
        return (self._shared, replicas[0]) if unused else self.rule.combine(self._shared, mean_of(replicas))


class Centre(Membership):
    """Transport with a centre, for EASGD: trainers make rounds with it independently of each other.

    Arguments as for `AllToAll`; only a trainer that is done waits for the others.
    """

    has_centre = True

    def _prepare(self, parameters):
        self._tree = with_floating(_on_host(parameters), self._initial)
        self._turn = threading.Lock()  # held while moving the centre

    @property
    def parameters(self) -> PyTree:
        """Current centre in the structure and dtypes of the initial parameters, including their other leaves."""
        pairs = zip(self._shared, self._initial, strict=True)
        return with_floating(self._tree, [x.astype(initial.dtype) for x, initial in pairs])

    def sync_round(self, trainer: int, before: PyTree, done: bool) -> tuple[PyTree, bool]:
        """Move the centre towards each replica of a trainer in turn, atomically."""
        leaves, replicas = _contribution(self.template, before, trainer)
        with uninterrupted(), self._changed:
            member = self._taking_part(trainer)
            late = member.state == "late"
            if done and not late:
                member.state = "done"
                self._end_if_complete()
        if late or done:
            if not late:
                self._wait(trainer, lambda: member.state == "finished", self._awaited)
            return with_floating(before, [np.stack([leaf] * replicas) for leaf in self._shared]), True
        targets = self._move(trainer, leaves, replicas)
        self._count(trainer)
        return with_floating(before, [np.stack(target) for target in zip(*targets, strict=True)]), False

    def _move(self, trainer, leaves, replicas):
        """Return the targets of each replica; move the centre at the end, if the trainer still takes part."""
        # Not under `_changed`: a rule may compute for long, while others must be able to give signs of life.
        with uninterrupted(), self._turn:
            centre, targets = self._shared, []
            for replica in range(replicas):
                centre, target = self.rule.combine(centre, [leaf[replica] for leaf in leaves])
                targets.append(target)
            with self._changed:
                self._taking_part(trainer)
                # A single assignment of new arrays, so that readers without the lock see one version.
                self._shared = centre
        return targets

    def _end_if_complete(self):
        if not self._awaited() and not self._failure and not any(map(self._lacks, self._members)):
            for member in self._members:
                member.state = "finished" if member.state == "done" else member.state
        self._changed.notify_all()


def _remembered(fresh, memory, rule):
    """Return the initial shared state of a rule: the memory, which must match the fresh one, or the fresh one."""
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
    """Copy device arrays of a tree, except PRNG keys, to the host, as a step could donate them."""
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    copied = lambda leaf: np.array(leaf) if isinstance(leaf, jax.Array) and not is_key(leaf) else leaf
    return jax.tree.map(copied, tree)


def _contribution(template, before, trainer):
    """Return the widened floating leaves that a trainer contributes, and R."""
    replicas = replicas_in(template, before, f"what trainer {trainer} brings")
    if replicas is None:
        raise ValueError(f"what trainer {trainer} brings has no replica axis: bring leaves [R, ...].")
    return [leaf.astype(wide(leaf.dtype), copy=False) for leaf in floating(before)], replicas
