"""Shard servers: embedding rows in other threads, processes or machines, and the protocol of messages to them.

A server holds some shards of a spec and answers messages of verb, sender and arguments. The sender names itself and the
incarnation of the server that it addresses. A server therefore refuses messages meant for its predecessor, whose rows
are lost, and messages from a client that has been superseded. It applies each write once, however often the message
arrives, and rejects a write older than one that it has applied, which would roll rows back. The transport of messages
is left to the implementations of `Server`.

Legend: S shards, V rows of a stack, p shards of a message, C rows of each of them (padded), E embedding width.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.embedding import kernels
from jaxrec.embedding.spec import EmbeddingSpec, Layout
from jaxrec.embedding.tables import Parts, RowIds, check_parts, check_shard, empty_parts, fill_initial
from jaxrec.types import Array

ANY = 0  # the server incarnation of a first hello, whose sender does not know it yet


class Sender(NamedTuple):
    """The sender of a message, and the server incarnation that it addresses."""

    client: str
    incarnation: int  # of the client; its successor has a higher one
    server: int  # incarnation of the server; `ANY` in a first hello
    number: int = 0  # sequence number of a write: 1, 2, ... per server; a repeated message keeps it


class ServerInfo(NamedTuple):
    """A server's answer to hello."""

    spec: str  # digest of its spec
    layout: dict[str, dict[str, tuple[int, str]]]  # {stack: {part: (width, dtype)}}
    shards: tuple[int, ...]
    incarnation: int


class RowBlock(NamedTuple):
    """The rows of one stack in a message, for p shards in the order of the message."""

    unique: Array  # i32[p, C] rows of the stack
    count: Array  # i32[p] rows in use per shard
    parts: dict[str, np.ndarray]  # {part: f32[p, C, width]} new values or differences to add; empty in a read


class ServerGone(Exception):
    """A server has died, and its rows are lost; or it cannot be reached any more."""


class OtherIncarnation(Exception):
    """A message was meant for an earlier incarnation of a server, whose rows are lost."""


class Superseded(Exception):
    """The client that sent this message has been superseded, and may not write any more."""


class OldWrite(ValueError):
    """A write arrived after a newer one to the same shard, and would have rolled rows back."""


class Answer(Protocol):
    """A future answer; a `concurrent.futures.Future` is one."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer.

        Args:
          timeout: seconds; 0 polls.

        Raises:
          TimeoutError: no answer yet; call again.
          ServerGone: no answer will come.
          Any error that `ShardServer.answer` raised.
        """


class Server(Protocol):
    """A handle to a `ShardServer`; each transport of messages implements it."""

    def call(self, verb: str, sender: Sender, *args) -> Answer:
        """Send a message and return at once; it may arrive late, never, or more than once."""


READS = ("hello", "read", "take", "shard", "run")
# These have one writer at a time per shard, in the order of their numbers; `add` and `track` come in any order.
IN_ORDER = ("put", "with_shard", "change")
WRITES = (*IN_ORDER, "add", "track")


def deal(shards: int, servers: int) -> list[list[int]]:
    """Deal S shards to P servers in turn; return the shards of each server.

    >>> deal(5, 2)
    [[0, 2, 4], [1, 3]]
    """
    whole_number("shards", shards)
    whole_number("servers", servers, 1, shards, f": each of them needs one of the {shards} shards")
    return [list(range(first, shards, servers)) for first in range(servers)]


class ShardServer:
    """Some shards of all stacks in memory, and the operations on them.

    Like `HostTables` it may be used by several threads at once: reads take no lock, and writes are serialised.

    Args:
      spec: the tables.
      layout: the parts of a row, `spec.layout(row_optimizer)`.
      shards: numbers of the shards that this server holds; only they take memory.
      incarnation: 1, or that of the predecessor plus one.

    Attributes:
      memory: whatever functions of `track` keep beside the rows.

    All rows have their initial values at first; a successor restores its rows by `restore_shards`.

    >>> from jaxrec.embedding import Lookup, Table, sgd
    >>> spec = EmbeddingSpec({'item': Table(10, 4)}, {'item': Lookup('item')}, shards=2)
    >>> server = ShardServer(spec, spec.layout(sgd(0.1)), shards=[1])
    >>> me = Sender("run 1", 1, 1)
    >>> server.answer("hello", me, "a token").shards
    (1,)
    >>> rows = RowBlock(np.array([[3, 5]], np.int32), np.array([2], np.int32), {})
    >>> server.answer("read", me, [1], {"width_4": rows})["width_4"]["value"].shape
    (1, 2, 4)
    """

    def __init__(self, spec: EmbeddingSpec, layout: Layout, shards: Sequence[int], incarnation: int = 1):
        for shard in shards:
            check_shard(spec, shard)
        if len({*shards}) != len(shards):
            raise ValueError(f"shards={list(shards)} names one twice, whose rows would be added to twice.")
        self.incarnation = whole_number("incarnation", incarnation)
        self.spec, self.layout, self.shards = spec, layout, tuple(int(shard) for shard in shards)
        self._parts: dict[tuple[str, int], Parts] = {
            (name, shard): empty_parts(stack, layout[name])
            for name, stack in spec.stacks.items()
            for shard in self.shards
        }
        for name, shard in self._parts:
            fill_initial(spec, layout, name, shard, self._parts[name, shard])
        self._initial = set(self._parts)  # shards never written to
        self._clients: dict[str, _Client] = {}
        self._lock, self._tracking = threading.Lock(), threading.Lock()
        self.memory: dict[str, Any] = {}

    def answer(self, verb: str, sender: Sender, *args) -> Any:
        """Carry out a message and return the answer.

        Args:
          verb: `hello`, the first message of every client; `read`, `take`, `shard` and `run`, which change no row and
            may be repeated; `put`, `add`, `with_shard` and `change`, which write rows; `track`, which changes `memory`
            alone.
          sender: client, incarnations and sequence number.
          args: arguments of the verb.

        Raises:
          OtherIncarnation: the message was meant for another incarnation of this server.
          Superseded: the client has a successor.
          OldWrite: a newer write has been applied to the same shard.
          ValueError: an unknown verb; arguments that do not fit; no hello before. Nothing has changed.
        """
        if verb not in READS + WRITES:
            raise ValueError(f"verb={verb!r:.80} must be one of {READS + WRITES}.")
        if sender.server != self.incarnation and (verb, sender.server) != ("hello", ANY):
            raise OtherIncarnation(
                f"{verb} was sent to incarnation {sender.server} of the server of shards {list(self.shards)}, and "
                f"this is incarnation {self.incarnation}."
            )
        if verb == "hello":
            return self._hello(sender, *args)
        if verb in READS:
            self._client(verb, sender)
            return self._verb(verb)(*args)
        number = whole_number("number", sender.number, why=": each write has one of its own")
        if verb == "track":
            return self._track(number, sender, *args)
        with self._lock:  # checked within it: a successor may have said hello while this message waited
            self._write(verb, number, self._client(verb, sender), args)

    # ---- clients and their writes

    def _hello(self, sender: Sender, token: str) -> ServerInfo:
        """Register a client; `token` identifies the client object, which may have to repeat its hello."""
        with self._lock:
            known = self._clients.get(sender.client)
            if known is None or known.incarnation < sender.incarnation:
                known = self._clients[sender.client] = _Client(sender.incarnation, token)
            self._client("hello", sender)
            if known.token != token:  # its numbers begin at 1 and would be taken for repeats
                raise ValueError(
                    f"incarnation {sender.incarnation} of client {sender.client!r:.80} uses this server already: give "
                    "a higher incarnation, or a client of another name."
                )
        layout = {
            name: {part: (one.width, one.dtype) for part, one in self.layout[name].items()} for name in self.layout
        }
        return ServerInfo(self.spec.digest, layout, self.shards, self.incarnation)

    def _client(self, verb, sender):
        known = self._clients.get(sender.client)
        if known is None or known.incarnation < sender.incarnation:
            raise ValueError(
                f"{verb} of incarnation {sender.incarnation} of client {sender.client!r:.80}, which has not said hello "
                "to this server: say it first."
            )
        if known.incarnation > sender.incarnation:
            raise Superseded(
                f"{verb} of incarnation {sender.incarnation} of client {sender.client!r:.80}, whose incarnation "
                f"{known.incarnation} has taken its place: this one must end."
            )
        return known

    def _write(self, verb, number, client, args):
        if client.done(number):  # a repeated message
            return
        shards = {"put": args[0], "add": args[0], "change": args[1]}.get(verb, [args[1]])
        self._check_mine(shards)
        newer = {shard: at for shard in shards if (at := client.newest.get(shard, 0)) > number}
        if newer and verb in IN_ORDER:
            raise OldWrite(
                f"{verb} number {number} came after newer writes, {{shard: number}} {newer}, and would roll rows "
                "back: a shard has one writer at a time, which waits for the answer to one write before the next."
            )
        self._verb(verb)(*args)
        client.mark_done(number, shards if verb in IN_ORDER else ())

    # ---- the verbs

    def _verb(self, verb):
        return getattr(self, verb if verb in ("take", "with_shard") else "_" + verb)

    def _read(self, shards: Sequence[int], pieces: Mapping[str, RowBlock]) -> dict[str, dict[str, np.ndarray]]:
        """{stack: {part: f32[p, C, width]}}; padding reads zero."""
        self._check_mine(shards)
        return {name: self._read_stack(name, shards, self._checked(name, shards, p)) for name, p in pieces.items()}

    def _read_stack(self, name, shards, piece):
        parts, shape = self.layout[name], piece.unique.shape
        out = {part: np.empty((*shape, one.width), one.dtype) for part, one in parts.items()}
        for place, shard in enumerate(shards):
            for part, table in self._parts[name, shard].items():
                unique, count = piece.unique[place], piece.count[place]
                kernels.gather(table, unique, self.spec.shards, count, out[part][place])
        return out

    def _put(self, shards: Sequence[int], pieces: Mapping[str, RowBlock]) -> None:
        self._store(kernels.scatter, shards, pieces)

    def _add(self, shards: Sequence[int], pieces: Mapping[str, RowBlock]) -> None:
        """Add differences to the current rows."""

        def add(table, unique, shards, count, change):
            kernels.scatter_add(table, unique, shards, count, change, np.zeros_like(change))

        self._store(add, shards, pieces)

    def _store(self, store, shards, pieces):
        checked = {name: self._checked(name, shards, piece, stores=True) for name, piece in pieces.items()}
        for name, piece in checked.items():
            for place, shard in enumerate(shards):
                for part, table in self.writable(name, shard).items():
                    store(table, piece.unique[place], self.spec.shards, piece.count[place], piece.parts[part][place])

    def take(self, rows: RowIds) -> dict[tuple[str, int], dict[str, np.ndarray]]:
        """{(stack, shard): {part: [n, width]}} for {(stack, shard): i32[n] rows of the stack}."""
        self._check_mine({shard for _, shard in rows})
        taken = {}
        for (name, shard), ids in rows.items():
            local = np.asarray(ids) // self.spec.shards
            _check_local(name, shard, local, self.spec)
            taken[name, shard] = {part: table[local] for part, table in self._parts[name, shard].items()}
        return taken

    def _shard(self, stack: str, shard: int, part: str, index: Any) -> np.ndarray:
        """rows[index] of one part of a shard, whose rows are [V / S, width]."""
        check_shard(self.spec, shard)
        self._check_mine([shard])
        return self._parts[stack, shard][part][index]

    def _run(self, function: Callable[..., Any], *args) -> Any:
        """Return function(server, *args), which changes no row."""
        return function(self, *args)

    def on_shards(self, function: Callable[..., Any], *args) -> dict[tuple[str, int], Any]:
        """{(stack, shard): function(stack, shard, parts, *args)} of the shards held."""
        return {(name, shard): function(name, shard, parts, *args) for (name, shard), parts in self._parts.items()}

    def _change(self, function: Callable[..., Any], shards: Sequence[int], *args) -> None:
        """Run function(server, shards, *args), which may change any row of those shards."""
        function(self, shards, *args)

    def _track(self, number: int, sender: Sender, function: Callable[..., Any], *args) -> Any:
        """Run function(server, *args) once, concurrently with reads and writes of rows; return its result."""
        with self._tracking:
            with self._lock:
                client = self._client("track", sender)
                if client.done(number):
                    return client.tracked.get(number)
            found = function(self, *args)
            with self._lock:
                client.mark_done(number, ())
                client.tracked = {number: found}  # one is enough: a client waits before it sends the next
            return found

    def parts(self, stack: str) -> dict[str, list[np.ndarray]]:
        """{part: one array [V / S, width] per shard held} of a stack, to be read."""
        return {part: [self._parts[stack, shard][part] for shard in self.shards] for part in self.layout[stack]}

    # ---- whole shards

    def with_shard(self, stack: str, shard: int, parts: Mapping[str, np.ndarray]) -> "ShardServer":
        """Overwrite the first rows of a shard, as `Tables.with_shard`."""
        check_parts(self.spec, self.layout, stack, shard, parts)
        self._check_mine([shard])
        for part, rows in self.writable(stack, shard).items():
            rows[: len(parts[part])] = parts[part]
        return self

    def writable(self, stack: str, shard: int) -> Parts:
        """{part: [V / S, width]}, the arrays of a shard themselves, to be written to."""
        self._initial.discard((stack, shard))
        return self._parts[stack, shard]

    def reset_shard(self, stack: str, shard: int) -> "ShardServer":
        """Give all rows of a shard their initial values."""
        check_shard(self.spec, shard)
        self._check_mine([shard])
        if (stack, shard) not in self._initial:  # a successor has just drawn them
            fill_initial(self.spec, self.layout, stack, shard, self._parts[stack, shard])
            self._initial.add((stack, shard))
        return self

    def overwriting(self, shards: Sequence[int]) -> AbstractContextManager:
        """As `Tables.overwriting`; nothing has to be marked, as these rows do not outlive their process."""
        return contextlib.nullcontext(self)

    # ---- checks of what the kernels follow unchecked

    def _check_mine(self, shards):
        if len(set(shards)) < len(shards) or not set(shards) <= set(self.shards):
            raise ValueError(
                f"a message for shards {list(shards)}, but this server has {list(self.shards)}: each of them at most "
                "once."
            )

    def _checked(self, name, shards, piece, stores=False):
        if name not in self.layout:
            raise ValueError(f"rows of {name!r}, but the tables have {list(self.layout)}.")
        unique, count = np.asarray(piece.unique), np.asarray(piece.count)
        shape = (len(shards), unique.shape[-1])
        wanted = {part: (*shape, one.width) for part, one in self.layout[name].items()} if stores else {}
        found = {part: np.shape(array) for part, array in piece.parts.items()}
        if unique.shape != shape or count.shape != shape[:1] or found != wanted:
            raise ValueError(
                f"a message of {name!r} for {len(shards)} shards holds rows {unique.shape}, counts {count.shape} and "
                f"parts {found}, but parts {wanted} are expected."
            )
        if (count > shape[1]).any() or kernels.outside(unique, count, self.spec.stacks[name].rows):
            raise ValueError(f"row numbers out of range for {name!r}: plan with the spec of the tables.")
        return RowBlock(unique, count, piece.parts)


class _Client:
    """A server's record of one incarnation of a client and its writes.

    Attributes:
      newest: {shard: number of the last ordered write}.
      tracked: {number: answer} of the last `track`.
    """

    def __init__(self, incarnation: int, token: str):
        self.incarnation, self.token = incarnation, token
        self.newest: dict[int, int] = {}
        self.tracked: dict[int, Any] = {}
        self._below, self._above = 0, set[int]()  # done: all numbers up to `_below`, and those in `_above`

    def done(self, number: int) -> bool:
        """Whether a write has been applied before."""
        return number <= self._below or number in self._above

    def mark_done(self, number: int, shards: Sequence[int]) -> None:
        """Mark a write as applied, as the newest ordered one of some shards."""
        self.newest |= dict.fromkeys(shards, number)
        self._above.add(number)
        while self._below + 1 in self._above:
            self._below += 1
            self._above.remove(self._below)


def _check_local(name, shard, local, spec):
    rows = spec.stacks[name].rows_per_shard
    if local.size and not 0 <= local.min() <= local.max() < rows:
        raise ValueError(f"rows of {name!r} for shard {shard} lie outside of its {rows}.")
