"""How the parts measure: ways in turns, medians with bootstrap intervals, within a budget of
time."""

import json
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

ROW = "row "  # how a line of a part's output begins that holds a row
MOST_ROUNDS, LEAST_ROUNDS = 24, 3


def interval(values, draws: int = 2000) -> dict[str, Any]:
    """The median of some rounds with its 95 % bootstrap interval.

    Args:
      values: one per round.
      draws: how often the rounds are drawn anew, with replacement; seeded, so that equal rounds
        give equal intervals.

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
        raise ValueError(f"{values} are no rounds: an interval wants one finite figure per round, at least one.")
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


def in_turns(ways: Mapping[Any, Callable], until: float, end: float, rounds: int = MOST_ROUNDS) -> dict[Any, list]:
    """Runs all ways one after the other, again and again, so that a slow minute hits all of them.

    Args:
      ways: {name: function without arguments}.
      until, end: times of `time.monotonic`. No round begins that would, being as long as the last
        one, end after `until`; but LEAST_ROUNDS are run, if they do not end after `end`, and one
        in any case.
      rounds: the most.

    Returns:
      {name: what it returned, one per round}; whole rounds only.
    """
    found: dict[Any, list] = {name: [] for name in ways}
    last = 0.0
    for number in range(rounds):
        start = time.monotonic()
        if number and start + last > (until if number >= LEAST_ROUNDS else end):
            break
        for name, way in ways.items():
            found[name].append(way())
        last = time.monotonic() - start
    return found


class Task:
    """What a part is given: how long it may take, whether it is a smoke test, and where its rows
    go.

    Args:
      seconds: until the part must have ended.
      smoke: tiny sizes and one round, to see that all works; its figures mean nothing.
      say: prints a line.
    """

    def __init__(self, seconds: float, smoke: bool = False, say: Callable[[str], Any] = print):
        self.start, self.smoke, self._say = time.monotonic(), smoke, say
        # A tenth is kept to end in: what is measured when the runner kills the part is not in its
        # file.
        self.end = self.start + 0.9 * seconds
        self._began, self._cost, self._need = self.start, 1.0, 0.0
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

    def each(self, points: Iterable[dict], measure: Callable[[dict, float], Any], cost: str = "") -> None:
        """Measures point after point, most valuable first, as long as there is time.

        A point that fails is left out, with its error, and the next one follows. A point begins if
        its preparation and LEAST_ROUNDS rounds fit in what is left, as far as the points before it
        tell. It may use half of that, or its even share if that is more.

        Args:
          points: what to measure.
          measure: (point, until when it should be measured) -> anything; calls `turns` and `row`.
          cost: the key of a point that its time grows with; none if all take alike.
        """
        points = list(points)
        for number, point in enumerate(points):
            left, self._began, self._cost = self.left(), time.monotonic(), point.get(cost, 1)
            if left <= 0 or self._need * self._cost > left:
                self.leave_out(words(point), "no time was left")
                continue
            try:
                measure(point, self._began + max(0.5, 1 / (len(points) - number)) * left)
            except Exception as error:
                traceback.print_exc()
                self.leave_out(words(point), f"{type(error).__name__}: {last_line(error)}")

    def turns(self, ways: Mapping[Any, Callable], until: float) -> dict[Any, list]:
        """`in_turns` within the time of the part; notes what such a point needs."""
        start = time.monotonic()
        found = in_turns(ways, until, self.end, 1 if self.smoke else MOST_ROUNDS)
        rounds = len(next(iter(found.values()), []))
        need = start - self._began + LEAST_ROUNDS * (time.monotonic() - start) / max(1, rounds)
        self._need = max(self._need, need / self._cost)
        return found


def last_line(error: Exception) -> str:
    """What an error says, at most a line; of a process's traceback the last one."""
    return (str(error).strip().splitlines() or [""])[-1][:300]


def table(rows: list[dict]) -> str:
    """Rows as a person reads them.

    >>> print(table([{"point": {"batch": 2}, "figures": {"step_ms": interval([1.5, 1.5]), "steps": 7}}]))
    batch 2
      step_ms   1.5 (1.5 to 1.5; 2 rounds)
      steps     7
    """
    lines = []
    for row in rows:
        lines.append(words(row["point"]))
        width = max(map(len, row["figures"]), default=0)
        lines += [f"  {name:<{width}}   {_figure(value)}" for name, value in row["figures"].items()]
    return "\n".join(lines)


def words(point: dict) -> str:
    """A point in a line.

    >>> words({"batch": 64, "width": 16})
    'batch 64, width 16'
    """
    return ", ".join(f"{key} {value}" for key, value in point.items())


def _figure(value):
    if isinstance(value, dict) and "median" in value:
        if value["low"] is None:
            return f"{value['median']:.4g} (one round)"
        return f"{value['median']:.4g} ({value['low']:.4g} to {value['high']:.4g}; {value['rounds']} rounds)"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
