"""Traffic that `skip_stale_reads` keeps off the link between tables and device, compared with an oracle.

    python experiments/oac_link.py             exponents 0.6 to 1.3, windows 1 to 32; 15 minutes
    python experiments/oac_link.py --rounds 0  bytes alone, no speed; 22 minutes beside other work

OAC with `skip_stale_reads` does not send a row that the ring of the last W batches holds. Ids of DLRM-Kaggle are drawn
from a power law of each exponent; with few rows in common there is little to save. `*_bytes_saved_percent` is MEASURED,
of all bytes passed to `send`, or to `send` and `fetch`; `rows_saved_percent` and `oracle_rows_saved_percent` are
COUNTED from the ids (`oracle_rows`). Speeds are over an EMULATED link, as slow as in the regime `link` of
oac_throughput.py, in interleaved rounds. Result: results/two_cores_cpu/oac_link.json.
"""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
from main.cli import Flags, Run, command_line, grid, plot
from studies.oac_turns import PipelineWay, compare, compiled, turns_of
from studies.oac_work import EmulatedLink, Work, bytes_a_batch, bytes_per_s, compute_ms
from studies.reference import Job
from studies.turns import in_turns

MODES = ("async", "oac", "oac_skip_reads")


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the experiment."""

    exponents: tuple[float, ...] = (0.6, 0.8, 1.05, 1.3)
    """Exponents of the power law of the ids."""
    windows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rounds: int | None = None
    """Timed rounds of each mode; the preset's number if None, 0 measures bytes alone."""
    rows: int = 1_000_000
    batch_size: int = 2048
    width: int = 16
    latency_ms: float = 0.05
    """Latency of the emulated link, each way."""


def window_rows(batches: list[np.ndarray], window: int) -> int:
    """Rows sent, if a ring serves those of the last W batches.

    Args:
      batches: distinct rows of each batch.
      window: W.

    >>> window_rows([np.array([1, 2]), np.array([1, 3]), np.array([2, 3])], 1)  # 1, 3 once; 2 twice
    4
    """
    last: dict[int, int] = {}
    sent = 0
    for number, rows in enumerate(batches):
        known = [last.get(row, -window - 1) for row in rows.tolist()]
        sent += sum(number - before > window for before in known)
        last.update(dict.fromkeys(rows.tolist(), number))
    return sent


def oracle_rows(batches: list[np.ndarray], capacity: int) -> int:
    """Rows sent, if a cache knows all future ids and keeps the rows needed soonest.

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
    sent = 0
    for rows, needed in zip(batches, reversed(following), strict=True):
        sent += sum(row not in held for row in rows.tolist())
        held.update(zip(rows.tolist(), needed, strict=True))
        if (over := len(held) - capacity) > 0:
            names = [*held]
            for place in np.argpartition([-batch for batch in held.values()], over - 1)[:over].tolist():
                del held[names[place]]
    return sent


def count_rows(work: Work, number: int, window: int) -> dict[str, float]:
    """Percentage of rows that are not sent: with `skip_stale_reads`, and by the oracle."""
    offsets = np.cumsum([0, *work.job.cardinalities[:-1]])
    batches = [np.unique(batch.ids["sparse"] + offsets) for batch in work.batches[:number]]
    whole = sum(map(len, batches))
    sent = {"rows": window_rows(batches, window), "oracle_rows": oracle_rows(batches, window * whole // number)}
    return {f"{name}_saved_percent": 100 * (1 - rows / whole) for name, rows in sent.items()}


def count_bytes(work: Work, number: int, window: int) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes transferred with and without `skip_stale_reads`: (figures, bytes of plain `oac` by direction)."""
    results: dict[str, float] = {"distinct_batches": number}
    moved = {}
    for mode in ("oac", "oac_skip_reads"):
        moved[mode] = bytes_a_batch(work, mode, number, window=window)
        results |= {f"{mode}_{way}_mb_a_batch": 1e-6 * size for way, size in moved[mode].items()}
    for name, ways in {"sent": ("send",), "link": ("send", "fetch")}.items():
        some, whole = (sum(moved[mode][way] for way in ways) for mode in ("oac_skip_reads", "oac"))
        results[f"{name}_bytes_saved_percent"] = 100 * (1 - some / whole)
    return results, moved["oac"]


def speeds(work: Work, window: int, link: EmulatedLink, size: dict, rounds: int, counted: int, words: str) -> dict:
    """Rates of the modes over a link slower than the compute of each round, interleaved, and their ratios."""

    def calibrate():
        link.bytes_per_s = bytes_per_s("link", compute_ms(work.stages_ms(12)), size)

    ways, options = [PipelineWay(mode) for mode in MODES], {"window": window, "send": link.send, "fetch": link.fetch}
    turns = turns_of(compiled(work, ways, **options), work.batches, counted)
    times = in_turns(turns, rounds, words, calibrate)
    return compare(times, ways, work.job.batch_size)


def measure(run: Run, config: Config, exponent: float, rounds: int, counted: int, least: int) -> dict[str, Any]:
    """Measure all windows of an exponent."""
    job = Job(rows=config.rows, batch_size=config.batch_size, width=config.width, exponent=exponent, seed=config.seed)
    number = {window: max(least, 8 * window) for window in config.windows}
    work = Work(job, max(*number.values(), max(config.windows) + 3 + counted), max(config.windows))
    work.stages_ms(4)  # compiles
    results: dict[str, Any] = {}
    for window in config.windows:
        found, whole = count_bytes(work, number[window], window)
        found |= count_rows(work, number[window], window)
        if rounds:
            link = EmulatedLink(math.inf, config.latency_ms / 1e3)
            found |= speeds(work, window, link, whole, rounds, counted, f"exponent {exponent:g}, window {window}")
        run.log({"exponent": exponent, "window": window} | found)
        results |= {f"{key}_{point(exponent, window)}": value for key, value in found.items()}
    return results


def point(exponent: float, window: int) -> str:
    """Key of a point of the sweep.

    >>> point(1.05, 8)
    'exponent_1.05_window_8'
    """
    return f"exponent_{exponent:g}_window_{window}"


COLUMNS = {
    "sent bytes saved, % (measured)": "sent_bytes_saved_percent",
    "of both directions": "link_bytes_saved_percent",
    "rows saved, % (counted)": "rows_saved_percent",
    "by the oracle": "oracle_rows_saved_percent",
    "oac over async (link emulated)": "oac_over_async",
    "with skip_stale_reads": "oac_skip_reads_over_async",
}


def main(config: Config) -> dict:
    """Run all points and return the contents of results.json."""
    run = Run("oac_link", config, config.workdir)
    rounds, counted, least = {"smoke": (1, 4, 12), "default": (4, 8, 96), "paper": (24, 8, 192)}[config.preset]
    rounds = rounds if config.rounds is None else config.rounds
    if config.preset == "smoke":
        config = dataclasses.replace(config, rows=20_000, batch_size=256, exponents=(1.05,), windows=(2, 4))
    results: dict[str, Any] = {"rounds": rounds, "link": "emulated"}
    for exponent in config.exponents:
        results |= measure(run, config, exponent, rounds, counted, least)
    draw(run.directory / "link.png", config, results)
    points = {f"{e:g}, W = {w}": point(e, w) for e, w in itertools.product(config.exponents, config.windows)}
    run.close(results, grid(results, "exponent", points, {head: f"{key}_{{}}" for head, key in COLUMNS.items()}))
    return results


def finding(config: Config, results: dict[str, Any]) -> str:
    """Title of the plot."""
    window = 8 if 8 in config.windows else max(config.windows)
    saved = [results[f"sent_bytes_saved_percent_{point(exponent, window)}"] for exponent in config.exponents]
    return f"skip_stale_reads saves {min(saved):.0f} to {max(saved):.0f} % of the bytes sent at W = {window}"


def draw(path: Path, config: Config, results: dict[str, Any]) -> bool:
    """Plot rows and bytes saved, and speed, over the window, one line per exponent."""
    panels: dict[str, dict] = {}
    for label, key in [
        ("rows saved, % (counted)", "rows_saved_percent"),
        ("rows an oracle saves, % (counted)", "oracle_rows_saved_percent"),
        ("sent bytes saved, % (measured)", "sent_bytes_saved_percent"),
        ("rate with skip_stale_reads over async (link emulated)", "oac_skip_reads_over_async"),
    ]:
        found = {e: [results.get(f"{key}_{point(e, window)}") for window in config.windows] for e in config.exponents}
        if None not in itertools.chain(*found.values()):
            panels[label] = {f"exponent {e:g}": (list(config.windows), values) for e, values in found.items()}
    return plot(path, panels, "window W, batches", finding(config, results), log_x=True)


if __name__ == "__main__":
    command_line(main, Config, __doc__)
