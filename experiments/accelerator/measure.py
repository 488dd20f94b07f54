"""How the parts measure: ways in turns, medians with bootstrap intervals, within a time budget."""

import json
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

ROW = "row "  # prefix of the lines of a part's output that hold a row
MOST_ROUNDS, LEAST_ROUNDS = 24, 3


def interval(values, draws: int = 2000) -> dict[str, Any]:
    """Return the median of some rounds with its 95 % bootstrap interval.

    Args:
      values: one per round.
      draws: number of bootstrap resamples; seeded, so that equal rounds give equal intervals.

    Returns:
      {'median', 'low', 'high', 'rounds'}; low and high are None for a single round.

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
    """Return the interval of a ratio within each round, such as that of the times of two ways."""
    above, below = np.asarray(above, np.float64), np.asarray(below, np.float64)
    if above.shape != below.shape:
        raise ValueError(f"{above.shape} and {below.shape} rounds cannot be paired: take both from one `in_turns`.")
    return interval(above / below)


def in_turns(ways: Mapping[Any, Callable], until: float, end: float, rounds: int = MOST_ROUNDS) -> dict[Any, list]:
    """Run all ways one after the other, again and again, so that a slow minute affects all of them.

    Args:
      ways: {name: function without arguments}.
      until, end: times of `time.monotonic`. A round begins only if, being as long as the last one, it ends before
        `until`; but LEAST_ROUNDS are run if they end before `end`, and one in any case.
      rounds: maximum.

    Returns:
      {name: results, one per round}; whole rounds only.
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
    """Time budget, smoke flag and rows of a part.

    Args:
      seconds: time within which the part must end.
      smoke: tiny sizes and one round, to check that everything works; its figures mean nothing.
      say: prints a line.
    """

    def __init__(self, seconds: float, smoke: bool = False, say: Callable[[str], Any] = print):
        self.start, self.smoke, self._say = time.monotonic(), smoke, say
        # A tenth is reserved for ending: a part that the runner kills writes no file.
        self.end = self.start + 0.9 * seconds
        self._began, self._cost, self._need = self.start, 1.0, 0.0
        self.rows: list[dict] = []
        self.left_out: list[str] = []

    def left(self) -> float:
        """Return the seconds left for measuring."""
        return self.end - time.monotonic()

    def row(self, point: dict, figures: dict) -> None:
        """Record the figures of a point, and print them in a form that survives the process."""
        self.rows.append({"point": point, "figures": figures})
        self._say(ROW + json.dumps(self.rows[-1]))

    def leave_out(self, what: str, why: str) -> None:
        """Record what was not measured, and why."""
        self.left_out.append(f"{what}: {why}")
        self._say(f"left out: {self.left_out[-1]}")

    def each(self, points: Iterable[dict], measure: Callable[[dict, float], Any], cost: str = "") -> None:
        """Measure point after point, most valuable first, while there is time.

        A point that fails is left out, with its error, and the next one follows. A point begins if its preparation and
        LEAST_ROUNDS rounds fit in the time left, judging by the points before it. It may use half of that time, or its
        even share if that is more.

        Args:
          points: points to measure.
          measure: (point, time until which to measure) -> anything; calls `turns` and `row`.
          cost: key of a point with which its time grows; '' if all take equally long.
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
        """Run `in_turns` within the time of the part, and record the time that such a point needs."""
        start = time.monotonic()
        found = in_turns(ways, until, self.end, 1 if self.smoke else MOST_ROUNDS)
        rounds = len(next(iter(found.values()), []))
        need = start - self._began + LEAST_ROUNDS * (time.monotonic() - start) / max(1, rounds)
        self._need = max(self._need, need / self._cost)
        return found


def last_line(error: Exception) -> str:
    """Return the last line of an error's message, at most 300 characters."""
    return (str(error).strip().splitlines() or [""])[-1][:300]


def table(rows: list[dict]) -> str:
    """Format rows for printing.

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
    """Format a point in one line.

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
