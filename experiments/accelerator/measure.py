"""How the parts measure: ways in turns, medians with bootstrap intervals, within a budget of time."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

ROW = "row "  # how a line of a part's output begins that holds a row
MOST_ROUNDS, LEAST_ROUNDS = 24, 3


def interval(values, draws: int = 2000) -> dict[str, Any]:
    """The median of some rounds with its 95 % bootstrap interval.

    Args:
      values: one a round.
      draws: how often the rounds are drawn anew, with replacement; seeded, so that equal rounds give equal intervals.

    Returns:
      {'median', 'low', 'high', 'rounds'}; low and high are None for a single round.

    Raises:
      ValueError: no rounds, or one that is not finite.

    >>> interval([1.0, 2.0, 9.0])["median"]
    2.0
    >>> interval([3.0])
    {'median': 3.0, 'low': None, 'high': None, 'rounds': 1}
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"{values} are no rounds: an interval wants one finite figure a round, at least one.")
    low = high = None
    if len(values) > 1:
        drawn = np.random.default_rng(0).integers(0, len(values), (draws, len(values)))
        low, high = (float(q) for q in np.quantile(np.median(values[drawn], axis=1), (0.025, 0.975)))
    return {"median": float(np.median(values)), "low": low, "high": high, "rounds": len(values)}


def over(above, below) -> dict[str, Any]:
    """The interval of a ratio within each round, such as that of the times of two ways.

    Raises:
      ValueError: other rounds above than below.
    """
    above, below = np.asarray(above, np.float64), np.asarray(below, np.float64)
    if above.shape != below.shape:
        raise ValueError(f"{above.shape} and {below.shape} rounds cannot be paired: take both from one `in_turns`.")
    return interval(above / below)


def in_turns(ways: Mapping[Any, Callable], until: float, rounds: int = MOST_ROUNDS) -> dict[Any, list]:
    """Runs all ways one after the other, again and again, so that a slow minute hits all of them.

    Args:
      ways: {name: function without arguments}.
      until: a time of `time.monotonic`; no round begins that would, as long as the last one, end behind it.
      rounds: the most.

    Returns:
      {name: what it returned, one a round}; whole rounds only, at least LEAST_ROUNDS or `rounds` of them.
    """
    found: dict[Any, list] = {name: [] for name in ways}
    last = 0.0
    for number in range(rounds):
        start = time.monotonic()
        if number >= LEAST_ROUNDS and start + last > until:
            break
        for name, way in ways.items():
            found[name].append(way())
        last = time.monotonic() - start
    return found


class Task:
    """What a part is given: how long it may take, whether it is a smoke test, and where its rows go.

    Args:
      seconds: until the part must have ended.
      smoke: tiny sizes and one round, to see that all works; its figures mean nothing.
      say: prints a line.
    """

    def __init__(self, seconds: float, smoke: bool = False, say: Callable[[str], Any] = print):
        self.start, self.smoke, self._say = time.monotonic(), smoke, say
        # A tenth is kept to end in: what is measured when the runner kills the part is not in its file.
        self.end = self.start + 0.9 * seconds
        self.rows: list[dict] = []
        self.left_out: list[str] = []

    def left(self) -> float:
        """Seconds that are left for measuring."""
        return self.end - time.monotonic()

    def row(self, point: dict, figures: dict) -> None:
        """Notes the figures of a point, and prints them in a way that survives the process."""
        self.rows.append({"point": point, "figures": figures})
        self._say(ROW + json.dumps(self.rows[-1]))

    def leave_out(self, what: str, why: str) -> None:
        """Notes what was not measured."""
        self.left_out.append(f"{what}: {why}")
        self._say(f"left out: {self.left_out[-1]}")

    def points(self, todo: Iterable[dict]) -> Iterator[tuple[dict, float]]:
        """Yields (point, until when it should be measured), most valuable first, as long as there is time.

        A point begins if the longest one so far would end in time; it may use half of what is left, or its even share
        if that is more.
        """
        todo, longest = list(todo), 0.0
        for number, point in enumerate(todo):
            left, start = self.left(), time.monotonic()
            if left <= 0 or (number and longest > left):
                self.leave_out(_words(point), "no time was left")
                continue
            yield point, start + max(0.5, 1 / (len(todo) - number)) * left
            longest = max(longest, time.monotonic() - start)

    @property
    def rounds(self) -> int:
        """The most rounds of a comparison."""
        return 1 if self.smoke else MOST_ROUNDS


def table(rows: list[dict]) -> str:
    """Rows as a person reads them.

    >>> print(table([{"point": {"batch": 2}, "figures": {"step_ms": interval([1.5, 1.5]), "steps": 7}}]))
    batch 2
      step_ms   1.5 (1.5 to 1.5; 2 rounds)
      steps     7
    """
    lines = []
    for row in rows:
        lines.append(_words(row["point"]))
        width = max(map(len, row["figures"]), default=0)
        lines += [f"  {name:<{width}}   {_figure(value)}" for name, value in row["figures"].items()]
    return "\n".join(lines)


def _words(point):
    return ", ".join(f"{key} {value}" for key, value in point.items())


def _figure(value):
    if isinstance(value, dict) and "median" in value:
        if value["low"] is None:
            return f"{value['median']:.4g} (one round)"
        return f"{value['median']:.4g} ({value['low']:.4g} to {value['high']:.4g}; {value['rounds']} rounds)"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
