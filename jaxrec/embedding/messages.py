"""The messages to servers of shards, and what carries them: a call that gives an answer later.

Legend: p shards of a message, C rows of each of them, padded.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrec.types import Array

ANY = 0  # in place of an incarnation, by who says hello and does not know it yet


class Sender(NamedTuple):
    """Who sends a message, and to whom."""

    client: str
    incarnation: int  # of the client: whoever takes its place has a higher one
    server: int  # the incarnation of the server that the client believes in; `ANY` for a first hello
    number: int = 0  # of a write: 1, 2, ... for each server; a message that is sent again keeps it


class About(NamedTuple):
    """What a server says of itself."""

    spec: str  # the digest of its spec
    layout: dict[str, dict[str, tuple[int, str]]]  # {stack: {part: (width, dtype)}}
    shards: tuple[int, ...]
    incarnation: int


class Piece(NamedTuple):
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
    """A write came behind a newer one to the same shard, and would have rolled rows back."""


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
