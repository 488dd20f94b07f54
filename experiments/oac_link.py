"""Count the rows that OAC's window keeps off the link between tables and device, beside an oracle.

    python experiments/oac_link.py      exponents 0.6 to 1.3, windows 1 to 32; two minutes

OAC over pinned tables (`Overlap`) does not read a row that the ring of the last W batches holds. Ids of DLRM-Kaggle are
drawn from a power law of each exponent; with few rows in common there is little to save. Rows are COUNTED from the ids;
the oracle is a cache of as many rows that knows all future ids.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from main.cli import Flags, Run, command_line, grid, plot
from studies.reference import Job, synthetic


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the experiment."""

    exponents: tuple[float, ...] = (0.6, 0.8, 1.05, 1.3)
    """Exponents of the power law of the ids."""
    windows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rows: int = 1_000_000
    batch_size: int = 2048


def window_rows(batches: list[np.ndarray], window: int) -> int:
    """Rows read, if a ring serves those of the last W batches.

    Args:
      batches: distinct rows of each batch.
      window: W.

    >>> window_rows([np.array([1, 2]), np.array([1, 3]), np.array([2, 3])], 1)  # 1, 3 once; 2 twice
    4
    """
    last: dict[int, int] = {}
    read = 0
    for number, rows in enumerate(batches):
        known = [last.get(row, -window - 1) for row in rows.tolist()]
        read += sum(number - before > window for before in known)
        last.update(dict.fromkeys(rows.tolist(), number))
    return read


def oracle_rows(batches: list[np.ndarray], capacity: int) -> int:
    """Rows read, if a cache knows all future ids and keeps the rows needed soonest.

    The rows of a batch are on the device while it is trained; afterwards the cache keeps `capacity` rows.

    Args:
      batches: distinct rows of each batch.
      capacity: rows kept between two batches.

    >>> oracle_rows([np.array([1, 2]), np.array([3]), np.array([1])], capacity=1)  # 1 stays, 2 and 3 do not
    3
    """
    coming: dict[int, int] = {}
    following = []  # for each batch: the next batch that needs each of its rows
    for number in range(len(batches) - 1, -1, -1):
        following.append([coming.get(row, len(batches)) for row in batches[number].tolist()])
        coming.update(dict.fromkeys(batches[number].tolist(), number))
    held: dict[int, int] = {}
    read = 0
    for rows, needed in zip(batches, reversed(following), strict=True):
        read += sum(row not in held for row in rows.tolist())
        held.update(zip(rows.tolist(), needed, strict=True))
        if (over := len(held) - capacity) > 0:
            names = [*held]
            for place in np.argpartition([-batch for batch in held.values()], over - 1)[:over].tolist():
                del held[names[place]]
    return read


def distinct_rows(config: Config, exponent: float, number: int) -> list[np.ndarray]:
    """The distinct rows of each of the first batches."""
    job = Job(rows=config.rows, batch_size=config.batch_size, exponent=exponent, seed=config.seed)
    offsets = np.cumsum([0, *job.cardinalities[:-1]])
    return [np.unique(batch.ids["sparse"] + offsets) for batch in synthetic(job, number)[1]]


def saved_percent(batches: list[np.ndarray], window: int) -> dict[str, float]:
    """Percentage of rows that are not read: with the ring, and by the oracle."""
    whole = sum(map(len, batches))
    read = {"rows": window_rows(batches, window), "oracle_rows": oracle_rows(batches, window * whole // len(batches))}
    return {f"{name}_saved_percent": 100 * (1 - rows / whole) for name, rows in read.items()}


def point(exponent: float, window: int) -> str:
    """Key of a point of the sweep.

    >>> point(1.05, 8)
    'exponent_1.05_window_8'
    """
    return f"exponent_{exponent:g}_window_{window}"


def main(config: Config) -> dict:
    """Count all points and return the contents of results.json."""
    run = Run("oac_link", config, config.workdir)
    least = {"smoke": 12, "default": 96, "paper": 192}[config.preset]
    if config.preset == "smoke":
        config = dataclasses.replace(config, rows=20_000, batch_size=256, exponents=(1.05,), windows=(2, 4))
    results: dict[str, Any] = {}
    for exponent in config.exponents:
        batches = distinct_rows(config, exponent, max(least, 8 * max(config.windows)))
        for window in config.windows:
            found = saved_percent(batches[: max(least, 8 * window)], window)
            run.log({"exponent": exponent, "window": window} | found)
            results |= {f"{key}_{point(exponent, window)}": value for key, value in found.items()}
    draw(run.directory / "link.png", config, results)
    points = {f"{e:g}, W = {w}": point(e, w) for e, w in itertools.product(config.exponents, config.windows)}
    columns = {"rows saved, %": "rows_saved_percent_{}", "by the oracle": "oracle_rows_saved_percent_{}"}
    run.close(results, grid(results, "exponent", points, columns))
    return results


def draw(path: Path, config: Config, results: dict[str, Any]) -> bool:
    """Plot the rows saved over the window, one line per exponent."""
    saved = lambda key, exponent: [results[f"{key}_{point(exponent, window)}"] for window in config.windows]
    panels = {
        label: {f"exponent {e:g}": (list(config.windows), saved(key, e)) for e in config.exponents}
        for label, key in {
            "rows saved, %": "rows_saved_percent", "rows an oracle saves, %": "oracle_rows_saved_percent",
        }.items()
    }  # fmt: skip
    window = 8 if 8 in config.windows else max(config.windows)
    each = [results[f"rows_saved_percent_{point(exponent, window)}"] for exponent in config.exponents]
    title = f"OAC's ring saves {min(each):.0f} to {max(each):.0f} % of the rows read at W = {window}"
    return plot(path, panels, "window W, batches", title, log_x=True)


if __name__ == "__main__":
    command_line(main, Config, __doc__)
