"""Servers of shards: rows that live in other threads, processes or machines, and how they are asked for.

A server has some shards of a spec and answers messages: verb, sender, arguments. The sender says who it is and which
server it believes to talk to. So a server refuses what was meant for the one whose place it has taken (its rows are
other ones), and what a client sends that another has taken the place of; it does each write once, however often the
message comes, and none that is older than what it has written, which would roll rows back. Nothing in here knows how
messages travel.

Legend: S shards, V rows of a stack, p shards of a message, C rows of each of them, padded, E embedding width.
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

ANY = 0  # in place of an incarnation, in a hello, whose sender does not know it yet


class Sender(NamedTuple):
    """The sender of a message, and its receiver."""

    client: str
    incarnation: int  # of the client: its successor has a higher one
    server: int  # the incarnation of the server that the client believes in; `ANY` for a first hello
    number: int = 0  # of a write: 1, 2, ... for each server; a message that is sent again keeps it


class ServerInfo(NamedTuple):
    """What a server says of itself."""

    spec: str  # the digest of its spec
    layout: dict[str, dict[str, tuple[int, str]]]  # {stack: {part: (width, dtype)}}
    shards: tuple[int, ...]
    incarnation: int


class RowBlock(NamedTuple):
    """What a message holds of one stack, for p shards in the order of the message."""

    unique: Array  # i32[p, C] rows of the stack
    count: Array  # i32[p] of them in use
    parts: dict[str, np.ndarray]  # {part: f32[p, C, width]} new rows, or what is to be added; empty to read


class ServerGone(Exception):
    """A server has ended, and its rows with it; or nothing reaches it any more."""


class OtherIncarnation(Exception):
    """A message was meant for another incarnation of a server, whose rows are gone."""


class Superseded(Exception):
    """Another client has taken the place of the one that has sent this: it must not change a row any more."""


class OldWrite(ValueError):
    """A write came after a newer one to the same shard, and would have rolled rows back."""


class Answer(Protocol):
    """What a call returns at once; a `concurrent.futures.Future` is one."""

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the answer.

        Args:
          timeout: seconds; 0 only looks.

        Raises:
          TimeoutError: there is none yet; it may be asked for again.
          ServerGone: there will be none.
          Whatever `ShardServer.answer` has raised, as it was raised there.
        """


class Server(Protocol):
    """A way to a `ShardServer`; whatever carries messages there is made into one of these."""

    def call(self, verb: str, sender: Sender, *args) -> Answer:
        """Sends a message, and returns at once; the server may see it late, never, or more than once."""


READS = ("hello", "read", "take", "shard", "on_shards")
# Of one writer at a time for each shard, in the order of their numbers; `add` comes in any order.
IN_ORDER = ("put", "with_shard", "reset_shard", "change")
WRITES = (*IN_ORDER, "add")


def deal(shards: int, servers: int) -> list[list[int]]:
    """The shards of each server: few servers, each with many.

    >>> deal(5, 2)
    [[0, 2, 4], [1, 3]]
    """
    whole_number("shards", shards)
    whole_number("servers", servers, 1, shards, f": each of them needs one of the {shards} shards")
    return [list(range(first, shards, servers)) for first in range(servers)]


class ShardServer:
    """Some shards of all stacks, in memory, and what is done to them where they are.

    It is used by several threads at once as `HostTables` is: what reads takes no lock, and writes come one after the
    other.

    Args:
      spec: the tables.
      layout: what a row consists of, `spec.layout(row_optimizer)`.
      shards: numbers of those that it has; only they take memory.
      incarnation: 1, or one more than that of the server whose place it takes.

    All rows are initial ones at first. A successor may fill them before the first message, as
    `restore_shard(path, server, shard)` does, which asks for no more of tables than is here.

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
        self._initial = set(self._parts)  # what nobody has written to so far
        self._clients: dict[str, _Client] = {}
        self._lock = threading.Lock()

    def answer(self, verb: str, sender: Sender, *args) -> Any:
        """Does what a message says, and returns what goes back.

        Args:
          verb: `hello`, which every client says first; `read`, `take`, `shard` and `on_shards`, which change nothing;
            `put`, `add`, `with_shard`, `reset_shard` and `change`.
          sender: of the message.
          args: of the verb.

        Raises:
          OtherIncarnation: it was meant for another incarnation of this server.
          Superseded: the client has a successor.
          OldWrite: a newer write has reached the same shard.
          ValueError: an unknown verb; arguments that do not fit; a client that has not said hello. Nothing has changed.
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
            return getattr(self, "_" + verb)(*args)
        with self._lock:  # after it: a successor may have said hello while this one waited
            self._write(verb, sender.number, self._client(verb, sender), args)

    # ---- clients and their writes

    def _hello(self, sender: Sender, token: str) -> ServerInfo:
        """What this server is; `token` is of the object that says hello, which may have to say it again."""
        with self._lock:
            known = self._clients.get(sender.client)
            if known is None or known.incarnation < sender.incarnation:
                known = self._clients[sender.client] = _Client(sender.incarnation, token)
            self._client("hello", sender)
            if known.token != token:  # its numbers begin at 1, and would pass for repeats
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
        number = whole_number("number", number, why=": each write has one of its own")
        if client.done(number):  # sent again: what the first one has done stands
            return
        shards = {"put": args[0], "add": args[0], "change": args[1]}.get(verb, [args[1]])
        self._check_mine(shards)
        newer = {shard: at for shard in shards if (at := client.newest.get(shard, 0)) > number}
        if newer and verb in IN_ORDER:
            raise OldWrite(
                f"{verb} number {number} came after newer writes, {{shard: number}} {newer}, and would roll rows "
                "back: a shard has one writer at a time, which waits for the answer to one write before the next."
            )
        getattr(self, verb if verb in ("with_shard", "reset_shard") else "_" + verb)(*args)
        client.tell_done(number, shards if verb in IN_ORDER else ())

    # ---- the verbs

    def _read(self, shards: Sequence[int], pieces: Mapping[str, RowBlock]) -> dict[str, dict[str, np.ndarray]]:
        """{stack: {part: f32[p, C, width]}}; padding reads zero."""
        self._check_mine(shards)
        return {name: self._read_stack(name, shards, self._checked(name, shards, p)) for name, p in pieces.items()}

    def _read_stack(self, name, shards, piece):
        widths = {part: one.width for part, one in self.layout[name].items()}
        out = {part: np.empty((*piece.unique.shape, width), np.float32) for part, width in widths.items()}
        for place, shard in enumerate(shards):
            for part, table in self._parts[name, shard].items():
                unique, count = piece.unique[place], piece.count[place]
                kernels.gather(table, unique, self.spec.shards, count, out[part][place])
        return out

    def _put(self, shards: Sequence[int], pieces: Mapping[str, RowBlock]) -> None:
        def put(table, unique, count, values):
            kernels.scatter(table, unique, self.spec.shards, count, values)

        self._store(put, shards, pieces)

    def _add(self, shards: Sequence[int], pieces: Mapping[str, RowBlock]) -> None:
        """Adds the parts of the pieces to the rows as they are now."""

        def add(table, unique, count, difference):
            kernels.scatter_add(table, unique, self.spec.shards, count, difference, np.zeros_like(difference))

        self._store(add, shards, pieces)

    def _store(self, store, shards, pieces):
        checked = {name: self._checked(name, shards, piece, stores=True) for name, piece in pieces.items()}
        for name, piece in checked.items():
            for place, shard in enumerate(shards):
                for part, table in self.writable(name, shard).items():
                    store(table, piece.unique[place], piece.count[place], piece.parts[part][place])

    def _take(self, rows: RowIds) -> dict[tuple[str, int], dict[str, np.ndarray]]:
        """{(stack, shard): {part: [n, width]}} of rows i32[n] of the stack, all of that shard."""
        self._check_mine({shard for _, shard in rows})
        taken = {}
        for (name, shard), ids in rows.items():
            local = np.asarray(ids) // self.spec.shards
            _check_local(name, shard, local, self.spec)
            taken[name, shard] = {part: table[local] for part, table in self._parts[name, shard].items()}
        return taken

    def _shard(self, stack: str, shard: int, part: str, index: Any) -> np.ndarray:
        """What an index gives of one part of the rows of a shard, [V / S, width]."""
        check_shard(self.spec, shard)
        self._check_mine([shard])
        return self._parts[stack, shard][part][index]

    def _on_shards(self, function: Callable[..., Any], *args) -> dict[tuple[str, int], Any]:
        """{(stack, shard): function(stack, shard, parts, *args)}."""
        return {(name, shard): function(name, shard, parts, *args) for (name, shard), parts in self._parts.items()}

    def _change(self, function: Callable[..., Any], shards: Sequence[int], *args) -> None:
        """Runs function(this server, shards, *args), which may change all rows of those shards."""
        function(self, shards, *args)

    # ---- whole shards, also for a successor that restores them before the first message

    def with_shard(self, stack: str, shard: int, parts: Mapping[str, np.ndarray]) -> "ShardServer":
        """Overwrites the first rows of a shard, as many as are given; as that of `Tables`."""
        check_parts(self.spec, self.layout, stack, shard, parts)
        self._check_mine([shard])
        for part, rows in self.writable(stack, shard).items():
            rows[: len(parts[part])] = parts[part]
        return self

    def writable(self, stack: str, shard: int) -> Parts:
        """{part: [V / S, width]} of a shard that it has, as they lie in memory, to be written to."""
        self._initial.discard((stack, shard))
        return self._parts[stack, shard]

    def reset_shard(self, stack: str, shard: int) -> "ShardServer":
        """Gives all rows of a shard their initial values; as that of `Tables`."""
        check_shard(self.spec, shard)
        self._check_mine([shard])
        if (stack, shard) not in self._initial:  # else a successor would draw them twice
            fill_initial(self.spec, self.layout, stack, shard, self._parts[stack, shard])
            self._initial.add((stack, shard))
        return self

    def overwriting(self, shards: Sequence[int] | None = None, step: int | None = None) -> AbstractContextManager:
        """As that of `Tables`: these rows do not outlive their process, so that no file has to say anything."""
        return contextlib.nullcontext(self)

    # ---- what kernels follow unchecked

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
                f"parts {found}, but parts {wanted} are wanted."
            )
        if (count > shape[1]).any() or kernels.outside(unique, count, self.spec.stacks[name].rows):
            raise ValueError(f"a message leads to rows that {name!r} has not: plan with the spec of the tables.")
        return RowBlock(unique, count, piece.parts)


class _Client:
    """What a server remembers of one incarnation of a client: which of its writes are done.

    Attributes:
      newest: {shard: number of the last write in order}.
    """

    def __init__(self, incarnation: int, token: str):
        self.incarnation, self.token = incarnation, token
        self.newest: dict[int, int] = {}
        self._below, self._above = 0, set[int]()  # all up to the one are done, and these after it

    def done(self, number: int) -> bool:
        """Whether a write was done before."""
        return number <= self._below or number in self._above

    def tell_done(self, number: int, shards: Sequence[int]) -> None:
        """A write is done, for some shards in order."""
        self.newest |= dict.fromkeys(shards, number)
        self._above.add(number)
        while self._below + 1 in self._above:
            self._below += 1
            self._above.remove(self._below)


def _check_local(name, shard, local, spec):
    rows = spec.stacks[name].rows_per_shard
    if local.size and not 0 <= local.min() <= local.max() < rows:
        raise ValueError(f"rows of {name!r} for shard {shard} lie outside of its {rows}.")
