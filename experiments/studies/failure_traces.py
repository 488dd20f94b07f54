"""Readers for two published failure traces, plain or compressed (.gz, .xz)."""

import contextlib
import csv
import datetime
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.cpr.failure import Failures


def load_infinitehbd(path: Path, nodes: int = 400) -> Failures:
    """Read the fault trace of InfiniteHBD (SIGCOMM 2025): a JSON array of events, where a `fault_start` is a failure.

    Args:
      nodes: number of servers in the cluster; the trace names only those that ever had a fault.

    Returns:
      Failures in hours from day 0 of the trace to its last event.
    """
    with _opened(path) as file:
        events = json.load(file)
        last = 24 * max(float(event["event_time"]) for event in events)
        starts = [event for event in events if event["event_type"] == "fault_start"]
        hours = [24 * float(event["event_time"]) for event in starts]
        names = [event["node_id"] for event in starts]
    number = {name: place for place, name in enumerate(dict.fromkeys(names))}
    if not 0 < len(number) <= nodes:
        raise ValueError(f"{path}: {len(number)} nodes have faults, and the cluster has {nodes}.")
    return _in_order(hours, [number[name] for name in names], nodes, last)


def load_lanl(path: Path, system: int) -> Failures:
    """Read the failures of one system from the Los Alamos National Laboratory records, 1996-2005 (LA-UR-05-7318).

    Returns:
      Failures in hours of local time from the first failure of the system to its last; unknown nodes are -1.
    """
    with _opened(path) as file:
        rows = [row for row in csv.DictReader(file) if row["System"] == str(system)]
        started = [datetime.datetime.strptime(row["Prob Started"], "%m/%d/%Y %H:%M") for row in rows]
        node = [int(row["nodenumz"] or -1) for row in rows]
        sizes = [int(row["nodes"] or 0) for row in rows]
    if not rows:
        raise ValueError(f"{path}: system={system} has no failure there.")
    hours = [(at - min(started)) / datetime.timedelta(hours=1) for at in started]
    return _in_order(hours, node, max(*sizes, max(node) + 1), max(hours))


def _in_order(hours: list[float], node: list[int], nodes: int, span: float) -> Failures:
    order = np.argsort(hours, kind="stable")
    return Failures(np.array(hours)[order], np.array(node, np.int32)[order], nodes, span)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a trace as text; what cannot be read of it is a ValueError that names the file."""
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            yield file
    except (KeyError, TypeError, ValueError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} is damaged, or no such trace: {type(error).__name__}: {error}. Fetch it again."
        ) from error
