"""Bad situations, as tables: a file here for each part of the house, a function for each situation.

    @situation("an id outside its table", ValueError, "ids of lookups .* are outside their tables")
    def _(directory):
        plan(SPEC, {"item": np.array([99])})

The function gets an empty directory, makes the mistake, and checks in a `finally` what must be untouched. Without an
error the situation is survived: the function checks what must hold then. `tests/test_abuse.py` runs them all.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Situation(NamedTuple):
    """A mistake or an accident, and the error that names it; None if it is survived."""

    area: str
    words: str
    error: type[BaseException] | None
    match: str
    act: Callable[[Path], object]
    marks: tuple[str, ...] = ()


SITUATIONS: list[Situation] = []


def situation(words: str, error: type[BaseException] | None = None, match: str = "", marks: str = "") -> Callable:
    """Enters a function into the table; marks are of pytest, as in "process realtime"."""

    def enter(act):
        area = act.__module__.rpartition(".")[2]
        SITUATIONS.append(Situation(area, words, error, match, act, tuple(marks.split())))
        return act

    return enter
