"""Synchronisation of trainers in different processes: a server that holds a transport, and the client of each trainer.

A `SyncServer` wraps a transport, `AllToAll` or `Centre`, with the rules and the bits of those between threads; any
transport of messages can call its methods. The leaves of a centre are distributed over several servers by size. A
`SyncClient` is the transport that a trainer sees: it calls the servers, sends them heartbeats, and waits for the
successor of a dead server while its trainer goes on.

Legend: R replicas of a trainer (1 here), n trainers.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.embedding.servers import ServerGone
from jaxrec.shadowsync.params import floating, initial_leaves, with_floating
from jaxrec.shadowsync.rules import Rule
from jaxrec.shadowsync.transport import AllToAll, Centre, PeerLeft
from jaxrec.types import PyTree

_POLL_S = 0.2  # longest delay until a waiting client notices that its trainer has left
_HEARTBEATS_PER_TIMEOUT = 8


def assign_leaves(sizes: Sequence[int], rule: Rule, sync_servers: int) -> list[list[int]]:
    """Distribute leaves over sync servers by their sizes in bytes; return the indices of the leaves of each server.

    A rule without a centre takes one server, as its rounds need all leaves.

    >>> from jaxrec.shadowsync.rules import easgd
    >>> assign_leaves([1, 5, 3, 3], easgd(), 2)
    [[0, 1], [2, 3]]
    """
    most = len(sizes) if rule.has_centre else 1
    limit = f"; {rule.describe()} over {len(sizes)} leaves takes at most {most}"
    whole_number("sync_servers", sync_servers, 1, most, limit)
    at = pack(list(sizes), sync_servers)
    return [[leaf for leaf, server in enumerate(at) if server == number] for number in range(sync_servers)]


def pack(sizes: list[int], bins: int) -> list[int]:
    """Assign items to bins greedily: the largest first, each to the least loaded bin; return the bin of each item.

    >>> pack([1, 5, 3, 3], 2)
    [0, 0, 1, 1]
    """
    load, place = [0] * bins, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        place[number] = load.index(min(load))
        # Largest first, so that small items at the end even out the loads.
        load[place[number]] += sizes[number]
    return place


class SyncServer:
    """A transport between trainers in other processes, in which a successor can replace a dead trainer.

    `leaves` are the initial floating leaves of one replica that this server synchronises; arguments as for `AllToAll`
    and `Centre`.
    """

    def __init__(self, rule: Rule, leaves: Sequence[np.ndarray], trainers: int, timeout_s: float):
        kind: Any = Centre if rule.has_centre else AllToAll
        self._transport = kind(rule, list(leaves), trainers, timeout_s=timeout_s, on_failure="replace")
        self._incarnations = [0] * trainers
        self._lock = threading.Lock()

    def join(self, trainer: int, incarnation: int) -> None:
        """Register a trainer; it replaces its earlier incarnation, if that one has joined."""
        with self._lock:
            self._check(trainer, incarnation)
            if self._incarnations[trainer] not in (0, incarnation):
                self._transport.leave(trainer)  # its death has not been reported yet
            self._transport.join(trainer)
            self._incarnations[trainer] = incarnation

    def sync_round(self, trainer: int, incarnation: int, before: list[np.ndarray], done: bool) -> tuple[list, bool]:
        """Make a round with leaves [R, ...], see `Transport.sync_round`."""
        self._check(trainer, incarnation)
        found, last = self._transport.sync_round(trainer, before, done)
        self._check(trainer, incarnation)
        return [np.array(leaf) for leaf in found], last

    def heartbeat(self, trainer: int, incarnation: int) -> None:
        """Record a heartbeat of a trainer; ignored if its successor has joined."""
        if incarnation == self._incarnations[trainer]:
            self._transport.heartbeat(trainer)

    def leave(self, trainer: int, incarnation: int, reason: str) -> None:
        """Remove a trainer, with the reason or ''; ignored if its successor has joined."""
        if incarnation == self._incarnations[trainer]:
            self._transport.leave(trainer, RuntimeError(reason) if reason else None)

    def give_up(self, trainer: int) -> None:
        """Remove a trainer for good: no successor will join."""
        self._transport.give_up(trainer)

    def leaves(self) -> list[np.ndarray]:
        """Return the leaves with which a trainer that joins now should start."""
        return list(self._transport.parameters)

    def _check(self, trainer, incarnation):
        if incarnation < self._incarnations[trainer]:
            raise PeerLeft(f"trainer {trainer} (incarnation {incarnation}) has a successor: it no longer takes part.")


class SyncClient:
    """The transport of one trainer to sync servers, which may die and be replaced; see `Transport`.

    Args:
      rule, parameters: as for `AllToAll` and `Centre`, the same for all trainers.
      trainer: number of the trainer, in 0..n-1.
      incarnation: 1, or one more than that of the trainer that it replaces.
      sync_servers: handles to all sync servers, in the order of `assign_leaves`: `call(method, *args)` calls a method
        of `SyncServer` and returns a future `Answer`.
      timeout_s: `timeout_s` of the servers.

    Attributes:
      newest: leaves [R, ...] that the trainer has sent last; None before its first round.
    """

    on_failure, last_round = "raise", True

    def __init__(
        self, rule: Rule, parameters: PyTree, trainer: int, incarnation: int,
        sync_servers: Sequence[Any], timeout_s: float,
    ):  # fmt: skip
        self.rule, self.timeout_s = rule, float(timeout_s)
        self.template, initial = initial_leaves(parameters)
        self._assigned = assign_leaves([leaf.nbytes for leaf in initial], rule, len(sync_servers))
        self._me, self._sync_servers = (trainer, incarnation), list(sync_servers)
        self._joined: list[Any] = [None] * len(sync_servers)
        self._final: list[list | None] = [None] * len(sync_servers)  # targets of each server's last round
        self._changed, self._left = threading.Condition(), False
        self._last_heartbeat = -float("inf")
        self.newest: list[np.ndarray] | None = None

    def join(self, trainer: int) -> None:
        """Do nothing: the first `sync_round` joins, so that others do not wait for a trainer that compiles its step."""

    def heartbeat(self, trainer: int) -> None:
        """Send a heartbeat to the sync servers, if one is due."""
        now = time.monotonic()
        if now - self._last_heartbeat > self.timeout_s / _HEARTBEATS_PER_TIMEOUT:
            self._last_heartbeat = now
            self._send("heartbeat")

    def exit_reason(self, trainer: int) -> str:
        """Return '': only `sync_round` learns from the servers whether the trainer still takes part."""
        return ""

    def leave(self, trainer: int, error: BaseException | None = None) -> None:
        """Leave, see `Transport.leave`, without waiting for the servers, which may be dead."""
        with self._changed:
            self._left = True
            self._changed.notify_all()
        self._send("leave", f"{type(error).__name__}: {str(error)[:200]}" if error is not None else "")

    def replace(self, number: int, server: Any) -> None:
        """Replace a dead sync server by its successor, with which a waiting round then continues."""
        with self._changed:
            self._sync_servers[number] = server
            self._changed.notify_all()

    def sync_round(self, trainer: int, before: PyTree, done: bool) -> tuple[PyTree, bool]:
        """Make a round with all sync servers at once, see `Transport.sync_round`."""
        leaves = [np.asarray(leaf) for leaf in floating(before)]
        self.newest = self.newest if done and self.rule.has_centre else leaves
        open_, found = [n for n, final in enumerate(self._final) if final is None], list(self._final)
        while open_:
            calls = [(n, self._sync_servers[n], self._begin(n, [leaves[leaf] for leaf in self._assigned[n]], done))
                     for n in open_]  # fmt: skip
            open_ = []
            for number, server, answer in calls:
                got = self._wait_for(answer)
                if got is None:  # the server is dead: repeat the round with its successor
                    self._wait_for_successor(number, server)
                    open_.append(number)
                    continue
                found[number], last = got
                self._final[number] = found[number] if last else None
        targets: dict[int, np.ndarray] = {}
        for mine, given in zip(self._assigned, found, strict=True):
            targets |= dict(zip(mine, given or (), strict=True))
        return with_floating(before, [targets[leaf] for leaf in range(len(leaves))]), None not in self._final

    def _begin(self, number, leaves, done):
        """Start a round with one server, after joining it if it is new; return a future, or None if it is dead."""
        server = self._sync_servers[number]
        try:
            if self._joined[number] is not server:
                if self._wait_for(server.call("join", *self._me)) is None:
                    return None
                self._joined[number] = server
            return server.call("sync_round", *self._me, leaves, done)
        except ServerGone:
            return None

    def _wait_for(self, answer):
        """Return the result of a future, () for None; or None if the server is dead."""
        while answer is not None:
            try:
                return answer.result(_POLL_S) or ()
            except TimeoutError:
                self._check_left()
            except ServerGone:
                break
        return None

    def _wait_for_successor(self, number, dead):
        with self._changed:
            while self._sync_servers[number] is dead:
                self._check_left()
                self._changed.wait(_POLL_S)

    def _check_left(self):
        if self._left:
            raise PeerLeft(f"trainer {self._me[0]} has left.")

    def _send(self, method, *args):
        """Call a method of all servers that this client has joined, without waiting."""
        for server, joined in zip(self._sync_servers, self._joined, strict=True):
            if joined is server:
                with contextlib.suppress(Exception):  # `sync_round` detects dead servers
                    server.call(method, *self._me, *args)
