"""Tables whose rows live with servers: the third home.

Every verb sends one message to each server that it concerns, with all its stacks and shards, and waits for all
answers. A server that dies, that does not answer in time, or whose place another has taken, has lost its shards:
`ShardsLost` says so when all other servers have done their part, and a call into a lost shard goes on raising it until
a successor is there (`replace`). `servers` says what makes a write that comes twice, late or from the past harmless.

Legend: S shards, P servers, U padded unique rows per shard, C rows of a message per shard, E embedding width.
"""

import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxrec.bounds import is_positive, real_number, whole_number
from jaxrec.embedding.host import is_untorn, torn_within
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
)
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.embedding.tables import RowIds, check_parts, check_shard, chosen_shards, parts_on_host, used_rows
from jaxrec.types import Plan, RowOptimizer, Rows, ShardsLost

_LOST = (ServerGone, OtherIncarnation, TimeoutError)


class Connection:
    """One server as its client knows it; the place is None for a successor."""

    def __init__(self, place: int | None, server: Server):
        self.place, self.server, self.numbers = place, server, itertools.count(1)
        self.shards: tuple[int, ...] = ()
        self.incarnation = ANY
        self.lost = ""  # why
        self.told = False  # a caller knows, by ShardsLost

    def __str__(self) -> str:
        return "the successor" if self.place is None else f"server {self.place} (incarnation {self.incarnation})"


class _Call:
    """A message on its way, perhaps more than once; `found` is the answer or the error that has come."""

    def __init__(self, link: Connection, verb: str, sender: Sender, args: tuple):
        self._message = link.server.call, verb, sender, args
        self._answers: list[Answer] = []
        self.found: Any = None
        self.send()

    def send(self) -> None:
        """Sends it, once more if it was sent before."""
        call, verb, sender, args = self._message
        try:
            self._answers.append(call(verb, sender, *args))
        except Exception as error:
            failed: Future = Future()
            failed.set_exception(error)
            self._answers.append(failed)

    def has_answer(self, timeout_s: float) -> bool:
        """Whether an answer to any of its messages is there, after at most so many seconds."""
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
    """The links, if their servers have each shard once between them."""
    having = {shard: [link.place for link in links if shard in link.shards] for shard in range(shards)}
    missing = [shard for shard, places in having.items() if not places]
    twice = {shard: places for shard, places in having.items() if len(places) > 1}
    if missing or twice:
        raise ValueError(
            f"the {len(links)} servers must have each of the {shards} shards once between them: nobody has "
            f"{missing}, and several have {{shard: servers}} {twice}. Start them with the shards of "
            f"deal({shards}, {len(links)})."
        )
    return links


def _said(error):
    return f"is gone: {error}" if isinstance(error, ServerGone) else str(error)


class RemoteTables:
    """Embedding tables and their optimizer slots in the memory of servers.

    What is read lies in fresh buffers, whatever the messages came in. Several threads may call; `put` is for one writer
    of a shard at a time, in batch order, and writers that do not take turns use `add`, as over host tables.

    Args:
      spec: the tables; its number of shards S has nothing to do with that of the servers.
      row_optimizer: decides the slots.
      servers: ways to P servers, which have each shard once between them.
      timeout_s: seconds in which a server has to answer a call; a longer silence counts as its death. More than it
        takes to save or to restore what it has.
      client: the name of this client, for the servers; one of its own if None. What goes on with the run of a
        process that is gone gives the same name and a higher incarnation: then no late write of that process
        changes a row.
      incarnation: of the client.
      tries: how often a message is sent within `timeout_s` while no answer comes, for ways that may lose one.

    Attributes:
      steps: i64[S, 2], for each shard the puts begun and the puts done, as those of `HostTables`.

    Raises:
      ValueError: a server of another spec or row optimizer; shards that no server has, or two have; a number out of
        range; another object is this client already.
      Superseded: the client has a successor.
      ServerGone, TimeoutError: a server does not answer.

    >>> from jaxrec.embedding import Lookup, Table, sgd
    >>> from jaxrec.embedding.servers import ShardServer, deal
    >>> class Here(ShardServer):  # a way to itself: no message travels
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
    >>> tables.reset_shard('width_4', 3)
    Traceback (most recent call last):
    jaxrec.types.ShardsLost: shards [1, 3] are lost: server 1 (incarnation 1) is gone: its machine was taken away
    """

    in_place: ClassVar[bool] = True
    remote_rows: ClassVar[bool] = True  # the rows: they are saved and brought back where they live
    directory: ClassVar[Path | None] = None

    def __init__(
        self, spec: EmbeddingSpec, row_optimizer: RowOptimizer, servers: Sequence[Server], timeout_s: float = 60.0,
        client: str | None = None, incarnation: int = 1, tries: int = 1,
    ):  # fmt: skip
        real_number("timeout_s", timeout_s, "a number of seconds above 0 and finite", is_positive)
        self.spec, self.layout = spec, spec.layout(row_optimizer)
        self.steps = np.zeros((spec.shards, 2), np.int64)
        self._timeout_s, self._tries, self._closed = timeout_s, whole_number("tries", tries), False
        self._client, self._token = client or uuid.uuid4().hex, uuid.uuid4().hex
        self._incarnation = whole_number("incarnation", incarnation)
        links = [Connection(place, server) for place, server in enumerate(servers)]
        self._greet(links)
        self._links = _with_each_shard_once(links, spec.shards)

    @property
    def step(self) -> int | None:
        """How many puts all shards have seen; None if they have not seen the same ones, or some are lost."""
        return int(self.steps[0, 0]) if is_untorn(self.steps) and not self.lost else None

    @property
    def lost(self) -> tuple[int, ...]:
        """The shards whose servers are gone, without a successor so far."""
        return tuple(sorted(shard for link in self._links if link.lost for shard in link.shards))

    @contextlib.contextmanager
    def overwriting(self, shards: Sequence[int] | None = None, step: int | None = None) -> Iterator["RemoteTables"]:
        """Within it the caller fills whole shards; until it is left without an error they count as torn.

        Args:
          shards: which ones will be filled; all if None.
          step: where they will stand; if None, where the furthest of all shards stands.

        Raises:
          ValueError: there is no such shard, or a negative step; nothing was marked.
        """
        with torn_within(self.spec, self.steps, shards, step):
            yield self

    # ---- the verbs

    def read(self, plans: dict[str, Plan]) -> dict[str, Rows]:
        """Gathers the planned rows and slots into fresh arrays; padding reads zero.

        Raises:
          ValueError: the plans were made with another spec.
          ShardsLost: rows of some are gone.
        """
        used = {name: used_rows(self, name, plan) for name, plan in plans.items()}
        messages = self._messages(range(self.spec.shards), {name: (*both, {}) for name, both in used.items()})
        # Never reused, and never what the messages came in: jax may alias them (jax#37830).
        out = {
            name: {part: np.zeros((*unique.shape, one.width), np.float32) for part, one in self.layout[name].items()}
            for name, (unique, _) in used.items()
        }
        for link, stacks in self._ask("read", messages).items():
            for name, parts in stacks.items():
                for part, rows in parts.items():
                    for shard, mine in zip(messages[link][0], rows, strict=True):
                        out[name][part][shard, : len(mine)] = mine
        return {name: Rows(parts.pop("value"), parts) for name, parts in out.items()}

    def put(self, plans: dict[str, Plan], rows: dict[str, Rows], shards: Sequence[int] | None = None) -> "RemoteTables":
        """Stores final rows of all shards or of some; returns the same tables.

        Raises:
          ValueError: plans or rows do not fit these tables; nothing was written.
          ShardsLost: some are gone; all others are written.
        """
        chosen = chosen_shards(self.spec, shards)
        work = {
            name: (*used_rows(self, name, plan), parts_on_host(self, name, plan, rows)) for name, plan in plans.items()
        }
        messages = self._messages(chosen, work)
        self.steps[chosen, 0] += 1
        try:
            self._ask("put", messages)
        except ShardsLost as lost:  # which stay torn until they are overwritten
            self.steps[[shard for shard in chosen if shard not in lost.shards], 1] += 1
            raise
        self.steps[chosen, 1] += 1
        return self

    def add(
        self, plans: dict[str, Plan], rows: dict[str, Rows], old: dict[str, Rows], shards: Sequence[int] | None = None
    ) -> "RemoteTables":
        """Adds rows - old to what the servers hold now; returns the same tables.

        Raises:
          ValueError: plans or rows do not fit these tables; nothing was written.
          ShardsLost: some are gone; all others are written.
        """
        work = {}
        for name, plan in plans.items():
            new, before = parts_on_host(self, name, plan, rows), parts_on_host(self, name, plan, old)
            # Half of what would travel; the servers add it, with the bits of `HostTables.add`.
            work[name] = (*used_rows(self, name, plan), {part: new[part] - before[part] for part in new})
        self._ask("add", self._messages(chosen_shards(self.spec, shards), work))
        return self

    def _messages(self, shards, work):
        """{link: (shards, {stack: Piece})} of {stack: (unique, count, parts)}; for links with rows among them."""
        found, wanted = {}, set(shards)
        for link in self._links:
            mine = [shard for shard in link.shards if shard in wanted]
            pieces = {name: _piece(mine, *of) for name, of in work.items() if of[1][mine].any()}
            if pieces:
                found[link] = mine, pieces
        return found

    # ---- rows where they are

    def parts(self, stack: str) -> dict[str, list["RemoteRows"]]:
        """{part: the rows of each shard} of a stack; they travel when they are looked at."""
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
        """Runs function(stack, shard, parts, *args) for every shard, at its server."""
        found: dict[tuple[str, int], Any] = {}
        for results in self._ask("on_shards", dict.fromkeys(self._links, (function, *args))).values():
            found |= results
        return {(name, shard): found[name, shard] for name in self.spec.stacks for shard in range(self.spec.shards)}

    def take(self, rows: RowIds) -> dict[tuple[str, int], dict[str, np.ndarray]]:
        """Copies picked rows to the host."""
        messages: dict[Connection, tuple[dict]] = {}
        for (name, shard), ids in rows.items():
            check_shard(self.spec, shard)
            messages.setdefault(self._of(shard), ({},))[0][name, shard] = np.asarray(ids)
        found: dict[tuple[str, int], dict[str, np.ndarray]] = {}
        for taken in self._ask("take", messages).values():
            found |= taken
        return {key: {part: np.array(held) for part, held in found[key].items()} for key in rows}

    def with_shard(self, stack: str, shard: int, parts: Mapping[str, np.ndarray]) -> "RemoteTables":
        """Overwrites the first rows of one shard, as many as are given; returns the same tables."""
        check_parts(self.spec, self.layout, stack, shard, parts)
        whole = {part: np.ascontiguousarray(rows) for part, rows in parts.items()}
        self._ask("with_shard", {self._of(shard): (stack, int(shard), whole)})
        return self

    def reset_shard(self, stack: str, shard: int) -> "RemoteTables":
        """Gives all rows of one shard their initial values and slots; returns the same tables."""
        check_shard(self.spec, shard)
        self._ask("reset_shard", {self._of(shard): (stack, int(shard))})
        return self

    def change_shards(self, shards: Sequence[int], function: Callable[..., Any], *args) -> "RemoteTables":
        """Runs function(server, shards, *args) on every `ShardServer` that has some of the shards, all at once.

        Args:
          shards: the ones that the function may change; it is given those that its server has.
          function: picklable; what it returns is dropped.
          args: picklable.
        """
        there: dict[Connection, list[int]] = {}
        for shard in chosen_shards(self.spec, shards):
            there.setdefault(self._of(shard), []).append(shard)
        self._ask("change", {link: (function, mine, *args) for link, mine in there.items()})
        return self

    # ---- servers that are lost

    def mark_lost(self, shards: Iterable[int], why: str) -> None:
        """Says that the servers of some shards are dead, before a call finds out: the next one into them raises."""
        for link in {self._of(shard) for shard in chosen_shards(self.spec, list(shards))}:
            link.lost = link.lost or f"{link} is gone: {why}"

    def replace(self, server: Server) -> None:
        """Takes the successor of a server that is lost; its rows are used from here on as they are.

        For the `recover(shards)` of a watcher that is entered before the `Recovery`, which then brings the rows back.

        Args:
          server: a way to a server of the same shards and a higher incarnation.

        Raises:
          ValueError: it is of other shards, or of an incarnation that was seen before; the one before it is not lost,
            or no call has raised `ShardsLost` for it yet: then rows would be set back in silence.
          ServerGone, TimeoutError: it does not answer.
        """
        self._refuse_closed()
        link = Connection(None, server)
        self._greet([link])
        before = next((old for old in self._links if set(old.shards) == set(link.shards)), None)
        if before is None:
            known = [list(old.shards) for old in self._links]
            raise ValueError(f"the successor has the shards {list(link.shards)}, but the servers have {known}.")
        if not before.told:
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
        link.place = before.place
        self._links = [link if old is before else old for old in self._links]

    def close(self) -> None:
        """Ends the use of these tables; the servers go on."""
        self._closed = True

    def _refuse_closed(self):
        if self._closed:
            raise ValueError("these tables are closed: make others over the servers.")

    # ---- messages

    def _of(self, shard: int) -> Connection:
        """The one whose server has a shard."""
        return next(link for link in self._links if shard in link.shards)

    def _ask(self, verb: str, messages: Mapping[Connection, tuple]) -> dict[Connection, Any]:
        """Sends a message to each of some servers, and waits for all answers.

        Args:
          verb: of `ShardServer`.
          messages: {link: arguments}.

        Raises:
          ShardsLost: some of them are gone; all others have done their part.
          Whatever a server has raised, when all others have done their part.
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
                link.told = True
            raise ShardsLost([s for link in lost for s in link.shards], "; ".join(link.lost for link in lost))
        return answers

    def _exchange(self, verb, messages):
        """{link: answer or error} of messages that are sent at once."""
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
    """One part of the rows of a shard, [V / S, width]: `np.asarray` and an index fetch them from their server."""

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
    """Refuses a server of other tables."""
    parts = {name: {part: (one.width, one.dtype) for part, one in stack.items()} for name, stack in layout.items()}
    if about.spec != spec.digest or about.layout != parts:
        what = "spec" if about.spec != spec.digest else "row optimizer"
        raise ValueError(
            f"{server} was made for another {what}: make servers and tables with one spec and one row optimizer."
        )


def _piece(shards, unique, count, parts):
    """The rows in use of some shards, as a message has them."""
    most = int(count[shards].max())
    cut = lambda array: np.ascontiguousarray(array[shards, :most])
    return RowBlock(cut(unique), count[shards], {part: cut(array) for part, array in parts.items()})
