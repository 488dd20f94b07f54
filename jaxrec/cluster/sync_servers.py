"""Where trainers of other processes meet: transports that live with servers of their own, and the handle there.

A `SyncServer` has a transport, an `AllToAll` or a `Centre`, with the rules and the bits of threads; whatever carries
messages there calls its methods. The tensors of a centre are packed over several servers by size. A `SyncClient` is the
transport of one trainer: it calls the servers, sends heartbeats of its trainer, and waits for the successor of a server
that has died, while its trainer trains on.

Legend: R replicas of a trainer (1 here), n trainers.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.embedding.servers import Answer, ServerGone
from jaxrec.shadowsync.params import floating, initial_leaves, with_floating
from jaxrec.shadowsync.rules import Rule
from jaxrec.shadowsync.transport import AllToAll, Centre, PeerLeft, pack
from jaxrec.types import PyTree

_POLL_S = 0.2  # how soon a client sees that it has been left
_HEARTBEATS_PER_TIMEOUT = 8  # how often within the time-out a trainer is heard of


class SyncServerHandle(Protocol):
    """A way to a `SyncServer`; whatever carries messages there is made into one of these."""

    def call(self, method: str, *args) -> Answer:
        """Calls a method there, and returns at once."""


def assign_leaves(sizes: Sequence[int], rule: Rule, sync_servers: int) -> list[list[int]]:
    """Which leaves each place has: of a rule with a centre packed by size, else all at one.

    Args:
      sizes: of the leaves, bytes.
      rule: by which trainers are synchronised.
      sync_servers: how many there are.

    Raises:
      ValueError: more servers than leaves; more than one for a rule without a centre, whose rounds are of all leaves.

    >>> from jaxrec.shadowsync.rules import easgd
    >>> assign_leaves([1, 5, 3, 3], easgd(), 2)
    [[0, 1], [2, 3]]
    """
    most = len(sizes) if rule.has_centre else 1
    why = f"; {rule.describe()} over {len(sizes)} leaves takes at most {most}"
    whole_number("sync_servers", sync_servers, 1, most, why)
    at = pack(list(sizes), sync_servers)
    return [[leaf for leaf, server in enumerate(at) if server == number] for number in range(sync_servers)]


class SyncServer:
    """A transport for trainers that come from elsewhere, and that successors may take the places of.

    Args:
      rule: by which they are synchronised.
      leaves: the initial floating leaves of one replica that meet here.
      trainers: n.
      timeout_s: after which one that is awaited and not heard of is overdue.

    Raises:
      ValueError: as `AllToAll` and `Centre`.
    """

    def __init__(self, rule: Rule, leaves: Sequence[np.ndarray], trainers: int, timeout_s: float):
        kind: Any = Centre if rule.has_centre else AllToAll
        self._transport = kind(rule, list(leaves), trainers, timeout_s=timeout_s, on_failure="replace")
        self._incarnations = [0] * trainers
        self._lock = threading.Lock()

    def join(self, trainer: int, incarnation: int) -> None:
        """Takes the place of a trainer, also that of one of a lower incarnation, which takes no part any more.

        Raises:
          PeerLeft: a successor is here.
          ValueError: as `AllToAll.join`.
        """
        with self._lock:
            self._check(trainer, incarnation)
            if self._incarnations[trainer] not in (0, incarnation):
                self._transport.leave(trainer)  # before its death was known
            self._transport.join(trainer)
            self._incarnations[trainer] = incarnation

    def meet(self, trainer: int, incarnation: int, before: list[np.ndarray], done: bool) -> tuple[list, bool]:
        """As `Transport.meet`, of leaves [R, ...].

        Raises:
          PeerLeft: it takes no part any more, as a successor has come or as it was overdue.
        """
        self._check(trainer, incarnation)
        found, last = self._transport.meet(trainer, before, done)
        self._check(trainer, incarnation)
        return [np.array(leaf) for leaf in found], last

    def tell(self, trainer: int, incarnation: int, ago_s: float) -> str:
        """It was heard of so many seconds ago; returns why it takes no part any more, '' if it does."""
        if incarnation != self._incarnations[trainer]:
            return "has a successor" if incarnation < self._incarnations[trainer] else ""
        self._transport.alive(trainer, ago_s)
        return self._transport.why_gone(trainer)

    def leave(self, trainer: int, incarnation: int, why: str) -> None:
        """It goes; nothing happens if a successor is here."""
        if incarnation == self._incarnations[trainer]:
            self._transport.leave(trainer, RuntimeError(why) if why else None)

    def give_up(self, trainer: int) -> None:
        """No successor will take its server."""
        self._transport.give_up(trainer)

    def leaves(self) -> list[np.ndarray]:
        """Those that a trainer that comes now should begin with."""
        return list(self._transport.parameters)

    def _check(self, trainer, incarnation):
        if incarnation < self._incarnations[trainer]:
            raise PeerLeft(f"trainer {trainer} (incarnation {incarnation}) has a successor: it takes no part any more.")


class SyncClient:
    """The transport of one trainer, to sync_servers that may be gone and come again; see `Transport`.

    Args:
      rule, parameters: as for `AllToAll` and `Centre`, the same for all trainers.
      trainer: its number.
      incarnation: 1, or one more than that of the trainer whose place it takes.
      sync_servers: handles to all of them, in the order of `assign_leaves`.
      timeout_s: of the sync_servers.

    Attributes:
      newest: leaves that the trainer has brought last, None before.
      waited_s: seconds that its rounds waited for sync_servers that were gone.

    Raises:
      ValueError: parameters that cannot be synchronised, or not over so many sync_servers.
    """

    on_failure, last_round = "raise", True

    def __init__(
        self,
        rule: Rule,
        parameters: PyTree,
        trainer: int,
        incarnation: int,
        sync_servers: Sequence[SyncServerHandle],
        timeout_s: float,
    ):
        self.rule, self.timeout_s = rule, float(timeout_s)
        self.template, initial = initial_leaves(parameters)
        self._assigned = assign_leaves([leaf.nbytes for leaf in initial], rule, len(sync_servers))
        self._me, self._sync_servers = (trainer, incarnation), list(sync_servers)
        self._joined: list[SyncServerHandle | None] = [None] * len(sync_servers)
        self._ended: list[list | None] = [None] * len(sync_servers)  # what each has given with the last time
        self._changed, self._left, self._why = threading.Condition(), False, ""
        self._last_heartbeat = -float("inf")
        self.newest: list[np.ndarray] | None = None
        self.waited_s = 0.0

    def join(self, trainer: int) -> None:
        """Nothing yet: a trainer that has not made a step would keep the others waiting. The first `meet` joins."""

    def alive(self, trainer: int) -> None:
        """Its trainer is heard of; the sync_servers are told now and then."""
        now = time.monotonic()
        if now - self._last_heartbeat > self.timeout_s / _HEARTBEATS_PER_TIMEOUT:
            self._last_heartbeat = now
            self._tell(0.0)

    def why_gone(self, trainer: int) -> str:
        """As `Membership.why_gone`, as far as it is known here."""
        return self._why

    def leave(self, trainer: int, error: BaseException | None = None) -> None:
        """As `Transport.leave`; it is not waited for, as sync_servers may be gone."""
        with self._changed:
            self._left = True
            self._changed.notify_all()
        why = f"{type(error).__name__}: {str(error)[:200]}" if error is not None else ""
        for server, joined in zip(self._sync_servers, self._joined, strict=True):
            if joined is server:
                with contextlib.suppress(Exception):
                    server.call("leave", *self._me, why)

    def replace(self, number: int, server: SyncServerHandle) -> None:
        """Takes the next one in the place of a place that is gone; the round that waits for it goes there."""
        with self._changed:
            self._sync_servers[number] = server
            self._changed.notify_all()

    def meet(self, trainer: int, before: PyTree, done: bool) -> tuple[PyTree, bool]:
        """As `Transport.meet`, at all sync_servers at once.

        Raises:
          PeerLeft: this trainer takes no part any more, or has left.
        """
        leaves = [np.asarray(leaf) for leaf in floating(before)]
        self.newest = self.newest if done and self.rule.has_centre else leaves
        open_, found = [n for n, ended in enumerate(self._ended) if ended is None], list(self._ended)
        while open_:
            calls = [(n, self._sync_servers[n], self._begin(n, [leaves[leaf] for leaf in self._assigned[n]], done))
                     for n in open_]  # fmt: skip
            open_ = []
            for number, server, answer in calls:
                got = self._awaited(answer)
                if got is None:  # the place is gone: once more, at the next one
                    self._await_another(number, server)
                    open_.append(number)
                    continue
                found[number], last = got
                self._ended[number] = found[number] if last else None
        targets: dict[int, np.ndarray] = {}
        for mine, given in zip(self._assigned, found, strict=True):
            targets |= dict(zip(mine, given or (), strict=True))
        return with_floating(before, [targets[leaf] for leaf in range(len(leaves))]), None not in self._ended

    def _begin(self, number, leaves, done):
        """The answer to come of a server, that is joined first if it is another one than before."""
        server = self._sync_servers[number]
        try:
            if self._joined[number] is not server:
                if self._awaited(server.call("join", *self._me)) is None:
                    return None
                self._joined[number] = server
            return server.call("meet", *self._me, leaves, done)
        except ServerGone:
            return None

    def _awaited(self, answer):
        """What comes, None if the place is gone."""
        while answer is not None:
            try:
                return answer.result(_POLL_S) or ()
            except TimeoutError:
                self._refuse_left()
            except ServerGone:
                break
        return None

    def _await_another(self, number, gone):
        begun = time.monotonic()
        with self._changed:
            while self._sync_servers[number] is gone:
                self._refuse_left()
                self._changed.wait(_POLL_S)
        self.waited_s += time.monotonic() - begun

    def _refuse_left(self):
        if self._left:
            raise PeerLeft(f"trainer {self._me[0]} has left.")

    def _tell(self, ago_s):
        for server, joined in zip(self._sync_servers, self._joined, strict=True):
            if joined is server:
                with contextlib.suppress(Exception):  # one that is gone is heard of in `meet`
                    server.call("tell", *self._me, ago_s)
