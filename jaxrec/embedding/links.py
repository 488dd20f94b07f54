"""The ways to the servers of some tables: what is sent to several at once, how long one waits, and who is lost.

Legend: S shards, P servers.
"""

import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from jaxrec.bounds import is_positive, real_number, whole_number
from jaxrec.embedding.messages import ANY, About, Answer, OtherIncarnation, Sender, Server, ServerGone
from jaxrec.embedding.servers import WRITES
from jaxrec.types import ShardsLost

_LOST = (ServerGone, OtherIncarnation, TimeoutError)


class Link:
    """One server as its client knows it; the place is None of who is to take one."""

    def __init__(self, place: int | None, server: Server):
        self.place, self.server, self.numbers = place, server, itertools.count(1)
        self.shards: tuple[int, ...] = ()
        self.incarnation = ANY
        self.lost = ""  # why
        self.told = False  # somebody knows by ShardsLost

    def __str__(self) -> str:
        return "the successor" if self.place is None else f"server {self.place} (incarnation {self.incarnation})"


class Links:
    """The servers of some tables, each with its shards.

    Args:
      servers: ways to P servers.
      shards: S, each of which one of the servers has.
      check: raises ValueError if what a server says of itself, `About`, does not fit the tables; called with how an
        error names the server.
      timeout_s, client, incarnation, tries: as for `RemoteTables`.
    """

    def __init__(
        self, servers: Sequence[Server], shards: int, check: Callable[[About, str], None], timeout_s: float,
        client: str | None, incarnation: int, tries: int,
    ):  # fmt: skip
        real_number("timeout_s", timeout_s, "a number of seconds above 0 and finite", is_positive)
        self._timeout_s, self._tries, self._check = timeout_s, whole_number("tries", tries), check
        self._client, self._token = client or uuid.uuid4().hex, uuid.uuid4().hex
        self._incarnation, self._closed = whole_number("incarnation", incarnation), False
        links = [Link(place, server) for place, server in enumerate(_checked_servers(servers))]
        self._greet(links)
        self.all = _with_each_shard_once(links, shards)

    def of(self, shard: int) -> Link:
        """The one whose server has a shard."""
        return next(link for link in self.all if shard in link.shards)

    @property
    def lost(self) -> tuple[int, ...]:
        """The shards whose servers are gone, without a successor so far."""
        return tuple(sorted(shard for link in self.all if link.lost for shard in link.shards))

    def ask(self, verb: str, messages: Mapping[Link, tuple]) -> dict[Link, Any]:
        """Sends a message to each of some servers, and waits for all answers.

        Args:
          verb: of `ShardServer`.
          messages: {link: arguments}.

        Raises:
          ShardsLost: some of them are gone; all others have done their part.
          Whatever a server has raised, when all others have done their part.
        """
        self.refuse_closed()
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
        about = self._exchange("hello", {link: (self._token,) for link in links})
        for link, found in about.items():
            if isinstance(found, _LOST):
                raise type(found)(f"{link} {_said(found)}")
            if isinstance(found, BaseException):
                raise found
            link.shards, link.incarnation = tuple(found.shards), found.incarnation
            self._check(found, str(link))

    def tell_lost(self, shards: Iterable[int], why: str) -> None:
        """Says that the servers of some shards are dead, before a call finds out: the next one into them raises."""
        for link in {self.of(shard) for shard in shards}:
            link.lost = link.lost or f"{link} is gone: {why}"

    def replace(self, server: Server) -> None:
        """Takes the successor of a server that is lost; its rows are used from here on as they are.

        For the `recover(shards)` of a watcher that is entered before the `Recovery`, which then brings the rows back.

        Args:
          server: a way to a server of the same shards and a higher incarnation.

        Raises:
          ValueError: it is of other shards, or of an incarnation that was seen before; the one before it is not lost,
            or no call has raised `ShardsLost` for it yet: then rows would be set back without anybody's knowledge.
          ServerGone, TimeoutError: it does not answer.
        """
        self.refuse_closed()
        link = Link(None, server)
        self._greet([link])
        before = next((old for old in self.all if set(old.shards) == set(link.shards)), None)
        if before is None:
            known = [list(old.shards) for old in self.all]
            raise ValueError(f"the successor has the shards {list(link.shards)}, but the servers have {known}.")
        if not before.told:
            state = "is lost, but no call has raised ShardsLost for it yet" if before.lost else "is not lost"
            raise ValueError(
                f"{before} {state}: its successor would set rows back in silence. Say that it is dead by "
                "tell_lost(shards, why), and replace it when an engine asks to recover the shards."
            )
        if link.incarnation <= before.incarnation:
            raise ValueError(
                f"the successor of {before} has incarnation {link.incarnation}: start it with a higher one, so "
                "that nobody takes the one for the other."
            )
        link.place = before.place
        self.all = [link if old is before else old for old in self.all]

    def close(self) -> None:
        """Nothing is sent from here on."""
        self._closed = True

    def refuse_closed(self) -> None:
        """Raises ValueError behind `close`."""
        if self._closed:
            raise ValueError("these tables are closed: make others over the servers.")


class _Call:
    """A message on its way, perhaps more than once; `found` is the answer or the error that has come."""

    def __init__(self, link: Link, verb: str, sender: Sender, args: tuple):
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


def _checked_servers(servers):
    given = list(servers) if isinstance(servers, Iterable) else []
    wrong = [type(server).__name__ for server in given if not callable(getattr(server, "call", None))]
    if not given or wrong:
        raise ValueError(
            f"servers={servers!r:.80} must be a list of ways to servers, at least one, each with `call(verb, sender, "
            "*args)`, such as InProcess(ShardServer(...))."
        )
    return given


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
