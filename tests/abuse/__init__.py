"""Tables of misuses and accidents: one file per part of the library, one function per situation.

    @situation("an id outside its table", ValueError, "ids of lookups .* are outside their tables")
    def _(directory):
        plan(SPEC, {"item": np.array([99])})

The function gets an empty directory, makes the mistake, and checks in a `finally` what must be unchanged. A situation
without an error must be survived; its function checks what must hold afterwards. Mistakes of one expression may stand
in a table, `refused`. `tests/test_abuse.py` runs them all.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple


class Situation(NamedTuple):
    """A mistake or an accident, and the error that reports it; None if it must be survived."""

    area: str
    words: str
    error: type[BaseException] | None
    match: str
    act: Callable[[Path], object]
    marks: tuple[str, ...] = ()


SITUATIONS: list[Situation] = []


def situation(words: str, error: type[BaseException] | None = None, match: str = "", marks: str = "") -> Callable:
    """Decorator that registers a situation; `marks` are pytest marks, as in "process realtime"."""

    def enter(act):
        area = act.__module__.rpartition(".")[2]
        SITUATIONS.append(Situation(area, words, error, match, act, tuple(marks.split())))
        return act

    return enter


def refused(table: Mapping[str, Callable | tuple[Callable, ...]]) -> None:
    """Register mistakes of one expression each, {words of the error: mistake or mistakes}, which raise ValueError."""
    for match, acts in table.items():
        for act in acts if isinstance(acts, tuple) else (acts,):
            situation(match, ValueError, match)(act)
