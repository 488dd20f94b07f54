"""`RemoteTables`: embedding tables whose rows live at shard servers.

Each call sends one message to every server concerned, with all its stacks and shards, and waits for all answers. A
server that dies, times out, or has been replaced by another incarnation has lost its shards: the call raises
`ShardsLost` after all other servers have done their part, and so does every later call into a lost shard until
`replace` puts a successor in its place. Module `servers` makes repeated, late and outdated writes harmless.

Legend: S shards, P servers, U padded unique rows per shard, C rows of a message per shard, E embedding width.
"""

import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Self

import numpy as np

from jaxrec.bounds import is_positive, real_number, whole_number
from jaxrec.embedding.host import PutCounts
from jaxrec.embedding.servers import (
    ANY,
    WRITES,
    Answer,
    OtherIncarnation,
    RowBlock,
    Sender,
    Server,
    ServerGone,
    ServerInfo,
    ShardServer,
)
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.embedding.tables import RowIds, check_parts, check_shard, chosen_shards, parts_on_host, used_rows
from jaxrec.types import Plan, RowOptimizer, Rows, ShardsLost

_LOST = (ServerGone, OtherIncarnation, TimeoutError)


class Connection:
    """The client's record of one server; `index` is None for a successor that has not replaced one yet."""

    def __init__(self, index: int | None, server: Server):
        self.index, self.server, self.numbers = index, server, itertools.count(1)
        self.shards: tuple[int, ...] = ()
        self.incarnation = ANY
        self.lost = ""  # the reason, once it is lost
        self.reported = False  # a call has raised ShardsLost for it

    def __str__(self) -> str:
        return "the successor" if self.index is None else f"server {self.index} (incarnation {self.incarnation})"


class _Call:
    """A message in flight, possibly sent several times; `found` is its answer or error."""

    def __init__(self, link: Connection, verb: str, sender: Sender, args: tuple):
        self._message = link.server.call, verb, sender, args
        self._answers: list[Answer] = []
        self.found: Any = None
        self.send()

    def send(self) -> None:
        """Send the message, or repeat it."""
        call, verb, sender, args = self._message
        try:
            self._answers.append(call(verb, sender, *args))
        except Exception as error:
            failed: Future = Future()
            failed.set_exception(error)
            self._answers.append(failed)

    def has_answer(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds; return whether any copy of the message has been answered."""
        *before, last = self._answers
        return any(self._look(answer, 0.0) for answer in before) or self._look(last, timeout_s)

    def _look(self, answer, timeout_s):
        try:
            self.found = answer.result(timeout_s)
        except TimeoutError:
            return False
        except Exception as error:
            self.found = error
        return True


def _with_each_shard_once(links, shards):
    """The links, if their servers hold each shard exactly once between them."""
    having = {shard: [link.index for link in links if shard in link.shards] for shard in range(shards)}
    missing = [shard for shard, servers in having.items() if not servers]
    twice = {shard: servers for shard, servers in having.items() if len(servers) > 1}
    if missing or twice:
        raise ValueError(
            f"the {len(links)} servers must hold each of the {shards} shards once between them: none holds "
            f"{missing}, and several hold {{shard: servers}} {twice}. Start them with the shards of "
            f"deal({shards}, {len(links)})."
        )
    return links


def _said(error):
    return f"is gone: {error}" if isinstance(error, ServerGone) else str(error)


class RemoteTables(PutCounts):
    """Embedding tables and their optimizer slots in the memory of shard servers.

    Thread-safe like `HostTables`: `put` takes one writer per shard at a time, in batch order; concurrent writers use
    `add`. Reads return fresh buffers.

    Args:
      spec: the tables; the number of shards S is independent of the number of servers.
      row_optimizer: decides the slots.
      servers: handles of P servers, which hold each shard once between them.
      timeout_s: seconds in which a server must answer a call, else it counts as dead; longer than it takes to save or
        restore all of its rows.
      client: name of this client at the servers; a random one if None. A process that resumes a run gives the same name
        and a higher incarnation: then no late write of its predecessor changes a row.
      incarnation: incarnation of the client.
      tries: how often a message is sent within `timeout_s` while unanswered, for transports that may lose messages.

    Attributes:
      puts: i64[S, 2], puts begun and puts done per shard, as in `HostTables`.

    Raises:
      ValueError: a server of another spec or row optimizer; shards held by no server or by two; a number out of range;
        another object uses this client name and incarnation.
      Superseded: the client has a successor.
      ServerGone, TimeoutError: a server does not answer.

    >>> from jaxrec.embedding import Lookup, Table, sgd
    >>> from jaxrec.embedding.servers import ShardServer, deal
    >>> class Here(ShardServer):  # its own handle: no message travels
    ...     def call(self, verb, sender, *args):
    ...         answer = Future()
    ...         answer.set_result(self.answer(verb, sender, *args))
    ...         return answer
    >>> spec = EmbeddingSpec({'item': Table(10, 4)}, {'item': Lookup('item')}, shards=4)
    >>> servers = [Here(spec, spec.layout(sgd(0.1)), shards) for shards in deal(4, 2)]
    >>> tables = RemoteTables(spec, sgd(0.1), servers, timeout_s=60)
    >>> tables.step, tables.lost
    (0, ())
    >>> tables.mark_lost([3], 'its machine was taken away')
    >>> tables.probe(3)
    Traceback (most recent call last):
    jaxrec.types.ShardsLost: shards [1, 3] are lost: server 1 (incarnation 1) is gone: its machine was taken away
    """

    traced: ClassVar[None] = None

    def __init__(
        self, spec: EmbeddingSpec, row_optimizer: RowOptimizer, servers: Sequence[Server], timeout_s: float = 60.0,
        client: str | None = None, incarnation: int = 1, tries: int = 1,
    ):  # fmt: skip
        real_number("timeout_s", timeout_s, "a number of seconds above 0 and finite", is_positive)
        self.spec, self.layout = spec, spec.layout(row_optimizer)
        self.puts = np.zeros((spec.shards, 2), np.int64)
        self._timeout_s, self._tries, self._closed = timeout_s, whole_number("tries", tries), False
        self._client, self._token = client or uuid.uuid4().hex, uuid.uuid4().hex
        self._incarnation = whole_number("incarnation", incarnation)
        links = [Connection(index, server) for index, server in enumerate(servers)]
        self._greet(links)
        self._links = _with_each_shard_once(links, spec.shards)

    @property
    def step(self) -> int | None:
        """Number of puts applied to all shards; None if shards differ or some are lost."""
        return None if self.lost else super().step

    @property
    def lost(self) -> tuple[int, ...]:
        """The shards whose servers are lost and have not been replaced."""
        return tuple(sorted(shard for link in self._links if link.lost for shard in link.shards))

    # ---- rows of a batch

    def read(self, plans: dict[str, Plan]) -> dict[str, Rows]:
        """Gather the planned rows and slots into fresh arrays; padding reads zero."""
        used = {name: used_rows(self, name, plan) for name, plan in plans.items()}
        messages = self._messages(range(self.spec.shards), {name: (*both, {}) for name, both in used.items()})
        # Never reused, and never the buffers of the messages: jax may alias them (jax#37830).
        out = {
            name: {part: np.zeros((*unique.shape, one.width), one.dtype) for part, one in self.layout[name].items()}
            for name, (unique, _) in used.items()
        }
        for link, stacks in self._ask("read", messages).items():
            for name, parts in stacks.items():
                for part, rows in parts.items():
                    for shard, mine in zip(messages[link][0], rows, strict=True):
                        out[name][part][shard, : len(mine)] = mine
        return {name: Rows(parts.pop("value"), parts) for name, parts in out.items()}

    def put(self, plans: dict[str, Plan], rows: dict[str, Rows], shards: Sequence[int] | None = None) -> Self:
        """Store final rows of all shards or of some; return the same tables.

        Raises:
          ShardsLost: some shards are lost; all others are written.
        """
        chosen = chosen_shards(self.spec, shards)
        work = {
            name: (*used_rows(self, name, plan), parts_on_host(self, name, plan, rows)) for name, plan in plans.items()
        }
        messages = self._messages(chosen, work)
        self.puts[chosen, 0] += 1
        try:
            self._ask("put", messages)
        except ShardsLost as lost:  # the lost shards stay torn until they are overwritten
            self.puts[[shard for shard in chosen if shard not in lost.shards], 1] += 1
            raise
        self.puts[chosen, 1] += 1
        return self

    def add(
        self, plans: dict[str, Plan], rows: dict[str, Rows], old: dict[str, Rows], shards: Sequence[int] | None = None
    ) -> Self:
        """Add rows - old to the current rows; return the same tables.

        Raises:
          ShardsLost: some shards are lost; all others are written.
        """
        work = {}
        for name, plan in plans.items():
            new, before = parts_on_host(self, name, plan, rows), parts_on_host(self, name, plan, old)
            # The difference, in f32, is as many bytes as f32 rows; adding it gives the bits of `HostTables.add`.
            work[name] = (
                *used_rows(self, name, plan),
                {part: np.subtract(new[part], before[part], dtype=np.float32) for part in new},
            )
        self._ask("add", self._messages(chosen_shards(self.spec, shards), work))
        return self

    def _messages(self, shards, work):
        """{link: (shards, {stack: RowBlock})} of {stack: (unique, count, parts)}, for servers with rows among them."""
        found, wanted = {}, set(shards)
        for link in self._links:
            mine = [shard for shard in link.shards if shard in wanted]
            pieces = {name: _row_block(mine, *of) for name, of in work.items() if of[1][mine].any()}
            if pieces:
                found[link] = mine, pieces
        return found

    # ---- whole shards and chosen rows

    def parts(self, stack: str) -> dict[str, list["RemoteRows"]]:
        """{part: the rows of each shard} of a stack; rows are fetched when they are indexed."""
        rows = self.spec.stacks[stack].rows_per_shard
        return {
            part: [
                RemoteRows(self._look, stack, shard, part, (rows, one.width), one.dtype)
                for shard in range(self.spec.shards)
            ]
            for part, one in self.layout[stack].items()
        }

    def _look(self, stack, shard, part, where):
        link = self._of(shard)
        return self._ask("shard", {link: (stack, shard, part, where)})[link]

    def on_shards(self, function: Callable[..., Any], *args) -> dict[tuple[str, int], Any]:
        """Run function(stack, shard, parts, *args) for every shard, at its server."""
        found: dict[tuple[str, int], Any] = {}
        for results in self.run(ShardServer.on_shards, lambda shards: (function, *args)).values():
            found |= results
        return {(name, shard): found[name, shard] for name in self.spec.stacks for shard in range(self.spec.shards)}

    def take(self, rows: RowIds) -> dict[tuple[str, int], dict[str, np.ndarray]]:
        """Copy chosen rows to the host, as `Tables.take`."""
        messages: dict[Connection, tuple[dict]] = {}
        for (name, shard), ids in rows.items():
            check_shard(self.spec, shard)
            messages.setdefault(self._of(shard), ({},))[0][name, shard] = np.asarray(ids)
        found: dict[tuple[str, int], dict[str, np.ndarray]] = {}
        for taken in self._ask("take", messages).values():
            found |= taken
        return {key: {part: np.array(held) for part, held in found[key].items()} for key in rows}

    def probe(self, shard: int) -> None:
        """Check that the server of a shard answers; it is asked for no rows.

        Raises:
          ShardsLost: it does not.
        """
        self.take({(next(iter(self.spec.stacks)), shard): np.zeros(0, np.int32)})

    def with_shard(self, stack: str, shard: int, parts: Mapping[str, np.ndarray]) -> Self:
        """Overwrite the first rows of one shard, as `Tables.with_shard`; return the same tables."""
        check_parts(self.spec, self.layout, stack, shard, parts)
        whole = {part: np.ascontiguousarray(rows) for part, rows in parts.items()}
        self._ask("with_shard", {self._of(shard): (stack, int(shard), whole)})
        return self

    def change_shards(self, shards: Sequence[int], function: Callable[..., Any], *args) -> Self:
        """Run function(server, shards, *args) on every `ShardServer` that holds some of the shards, in parallel.

        Args:
          shards: shards that the function may change; it is given those of its server.
          function: picklable; its result is dropped.
          args: picklable.
        """
        there: dict[Connection, list[int]] = {}
        for shard in chosen_shards(self.spec, shards):
            there.setdefault(self._of(shard), []).append(shard)
        self._ask("change", {link: (function, mine, *args) for link, mine in there.items()})
        return self

    def run(self, function: Callable[..., Any], args_of: Callable[[Sequence[int]], tuple]) -> dict[tuple, Any]:
        """Run function(server, *args) on every `ShardServer`, in parallel, concurrently with reads and writes of rows.

        Args:
          function: picklable; changes no row, and may be repeated at a server.
          args_of: shards of a server -> picklable arguments.

        Returns:
          {shards of a server: result of the function there}.

        Raises:
          ShardsLost: some servers are lost; the function has run at all others.
        """
        return self._at_all("run", function, args_of)

    def track(self, function: Callable[..., Any], args_of: Callable[[Sequence[int]], tuple]) -> dict[tuple, Any]:
        """As `run`, but exactly once at each server: for state beside the rows, in `ShardServer.memory`.

        One call at a time.
        """
        return self._at_all("track", function, args_of)

    def _at_all(self, verb, function, args_of):
        messages = {link: (function, *args_of(link.shards)) for link in self._links}
        return {link.shards: found for link, found in self._ask(verb, messages).items()}

    # ---- lost servers

    def mark_lost(self, shards: Iterable[int], why: str) -> None:
        """Declare the servers of some shards dead; the next call into these shards raises `ShardsLost`."""
        for link in {self._of(shard) for shard in chosen_shards(self.spec, list(shards))}:
            link.lost = link.lost or f"{link} is gone: {why}"

    def replace(self, server: Server) -> None:
        """Replace a lost server by its successor, whose rows are used as they are from here on.

        To be called by `recover` of a callback that is listed before the `Recovery`, which then restores the rows.

        Args:
          server: handle of a server of the same shards and a higher incarnation.

        Raises:
          ValueError: other shards; an incarnation seen before; the predecessor is not lost, or no call has raised
            `ShardsLost` for it yet: rows would be rolled back silently.
          ServerGone, TimeoutError: the successor does not answer.
        """
        self._refuse_closed()
        link = Connection(None, server)
        self._greet([link])
        before = next((old for old in self._links if set(old.shards) == set(link.shards)), None)
        if before is None:
            known = [list(old.shards) for old in self._links]
            raise ValueError(f"the successor has the shards {list(link.shards)}, but the servers have {known}.")
        if not before.reported:
            state = "is lost, but no call has raised ShardsLost for it yet" if before.lost else "is not lost"
            raise ValueError(
                f"{before} {state}: its successor would set rows back in silence. Say that it is dead by "
                "mark_lost(shards, why), and replace it when an engine asks to recover the shards."
            )
        if link.incarnation <= before.incarnation:
            raise ValueError(
                f"the successor of {before} has incarnation {link.incarnation}: start it with a higher one, so "
                "that the one is not taken for the other."
            )
        link.index = before.index
        self._links = [link if old is before else old for old in self._links]

    def close(self) -> None:
        """Close these tables; the servers go on."""
        self._closed = True

    def _refuse_closed(self):
        if self._closed:
            raise ValueError("these tables are closed: make others over the servers.")

    # ---- messages

    def _of(self, shard: int) -> Connection:
        """The connection to the server of a shard."""
        return next(link for link in self._links if shard in link.shards)

    def _ask(self, verb: str, messages: Mapping[Connection, tuple]) -> dict[Connection, Any]:
        """Send one message each to some servers and wait for all answers.

        Args:
          verb: as in `ShardServer.answer`.
          messages: {link: arguments}.

        Raises:
          ShardsLost: some servers are lost; all others have done their part.
          Any error raised by a server, after all others have done their part.
        """
        self._refuse_closed()
        answers = self._exchange(verb, {link: args for link, args in messages.items() if not link.lost})
        for link, found in answers.items():
            if isinstance(found, _LOST):
                link.lost = link.lost or f"{link} {_said(found)}"
        errors = [found for found in answers.values() if isinstance(found, Exception) and not isinstance(found, _LOST)]
        if errors:
            raise errors[0]
        if lost := [link for link in messages if link.lost]:
            for link in lost:
                link.reported = True
            raise ShardsLost([s for link in lost for s in link.shards], "; ".join(link.lost for link in lost))
        return answers

    def _exchange(self, verb, messages):
        """{link: answer or error} of messages sent in parallel."""
        calls = {link: _Call(link, verb, self._sender(verb, link), args) for link, args in messages.items()}
        start, waiting = time.monotonic(), list(calls.values())
        for attempt in range(1, self._tries + 1):
            end = start + self._timeout_s * attempt / self._tries
            waiting = [call for call in waiting if not call.has_answer(max(0.0, end - time.monotonic()))]
            if attempt < self._tries:
                for call in waiting:
                    call.send()
        for call in waiting:
            call.found = TimeoutError(f"has not answered {verb} within {self._timeout_s:g} s")
        return {link: call.found for link, call in calls.items()}

    def _sender(self, verb, link):
        number = next(link.numbers) if verb in WRITES else 0
        return Sender(self._client, self._incarnation, link.incarnation, number)

    def _greet(self, links):
        for link, found in self._exchange("hello", {link: (self._token,) for link in links}).items():
            if isinstance(found, _LOST):
                raise type(found)(f"{link} {_said(found)}")
            if isinstance(found, BaseException):
                raise found
            link.shards, link.incarnation = tuple(found.shards), found.incarnation
            _check_about(self.spec, self.layout, found, str(link))

    def __repr__(self) -> str:
        return f"RemoteTables(of {self.spec.shards} shards at {len(self._links)} servers)"

    def __reduce__(self):
        raise TypeError("RemoteTables cannot be pickled, their rows live elsewhere: save an image, or make others.")


class RemoteRows:
    """One part of the rows of a shard, [V / S, width]; `np.asarray` and indexing fetch rows from their server."""

    def __init__(self, look: Callable, stack: str, shard: int, part: str, shape: tuple[int, int], dtype: str):
        self._look, self._where = look, (stack, shard, part)
        self.shape, self.dtype = shape, np.dtype(dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index) -> np.ndarray:
        return np.array(self._look(*self._where, index))

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        found = self[:]
        return found if dtype is None else found.astype(dtype)


def _check_about(spec, layout, about: ServerInfo, server: str):
    """Refuse a server of other tables."""
    parts = {name: {part: (one.width, one.dtype) for part, one in stack.items()} for name, stack in layout.items()}
    if about.spec != spec.digest or about.layout != parts:
        what = "spec" if about.spec != spec.digest else "row optimizer"
        raise ValueError(
            f"{server} was made for another {what}: make servers and tables with one spec and one row optimizer."
        )


def _row_block(shards, unique, count, parts):
    """The `RowBlock` of the rows in use of some shards."""
    most = int(count[shards].max())
    cut = lambda array: np.ascontiguousarray(array[shards, :most])
    return RowBlock(cut(unique), count[shards], {part: cut(array) for part, array in parts.items()})
