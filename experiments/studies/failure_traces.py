"""Readers for published failure traces, streaming, plain or compressed (.gz, .xz)."""

import csv
import datetime
import gzip
import itertools
import json
import lzma
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.cpr.failure import Failures

_PIECE = 1 << 16  # characters read at a time; also the size limit of a line or event
_MAX_NODES = 1_000_000
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, UnicodeDecodeError)
_LANL_CAUSES = ("Facilities", "Hardware", "Human Error", "Network", "Undetermined", "Software")
_LANL_COLUMNS = ("System", "nodes", "nodenumz", "Prob Started", *_LANL_CAUSES)


def load_infinitehbd(path: Path | str, nodes: int = 400) -> Failures:
    """Read the fault trace of InfiniteHBD (SIGCOMM 2025): a JSON array of events, where a `fault_start` is a failure.

    Args:
      path: the file, as published or compressed.
      nodes: number of servers in the cluster; the trace names only those that ever had a fault.

    Returns:
      Failures in hours from day 0 of the trace to its last event; a cause is 'Level: Class'.

    Raises:
      ValueError: the file is damaged; an event lacks a field or has an invalid one; more than `nodes` nodes.
        Names the file and the line.
    """
    path = Path(path)
    days, node, cause, last = array("d"), array("i"), array("i"), 0.0
    names: dict[str, int] = {}
    causes: dict[str, int] = {}
    for line, event in _array_items(path):
        try:
            day, kind, name = float(event["event_time"]), event["event_type"], str(event["node_id"])
            why = f"{event['fault_type']['Level']}: {event['fault_type']['Class']}"
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {line}: an event must have event_time in days, event_type, node_id and fault_type with "
                f"Level and Class; {type(error).__name__}: {error}. Correct or remove it."
            ) from None
        if kind not in ("fault_start", "fault_end") or not 0 <= day < 1e6:
            raise ValueError(
                f"{path}, line {line}: event_type={kind!r} must be fault_start or fault_end, and event_time={day} days "
                "from 0 on. Correct or remove the event."
            )
        last = max(last, day)
        if kind == "fault_start":
            days.append(day)
            node.append(names.setdefault(name, len(names)))
            cause.append(causes.setdefault(why, len(causes)))
    if len(names) > nodes or not names:
        raise ValueError(
            f"{path}: {len(names)} nodes have faults, nodes={nodes}: need at least one, and no more than that."
        )
    return _sorted(np.array(days) * 24, node, cause, tuple(causes), nodes, last * 24)


def load_lanl(path: Path | str, system: int) -> Failures:
    """Read the failures of one system from the Los Alamos National Laboratory records, 1996-2005 (LA-UR-05-7318).

    Args:
      path: the CSV file, as published or compressed.
      system: number of the system.

    Returns:
      Failures in hours of local time from the first failure of the system to its last; unknown nodes are -1, an unknown
        number of nodes is 0; a cause is one of the six of the records, or 'Unknown' where none is marked.

    Raises:
      ValueError: the file is damaged; a line has the wrong number of fields; a field of the system is not a
        valid number or time; the system has no failure. Names the file and the line.
    """
    path = Path(path)
    minutes, node, cause, nodes = array("q"), array("i"), array("i"), 0
    causes, systems = (*_LANL_CAUSES, "Unknown"), set()
    for line, row in _csv_rows(path):
        systems.add(row["System"])
        if row["System"] != str(system):
            continue
        try:
            started = datetime.datetime.strptime(row["Prob Started"], "%m/%d/%Y %H:%M")
            number, size = int(row["nodenumz"] or -1), int(row["nodes"] or 0)
            if max(number, size) >= _MAX_NODES:
                raise ValueError(f"nodenumz={number} and nodes={size} must be below {_MAX_NODES}")
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: {error}. Correct or remove the line.") from None
        node.append(number)
        nodes = max(nodes, size, number + 1)
        minutes.append((started - datetime.datetime(1990, 1, 1)) // datetime.timedelta(minutes=1))
        cause.append(next((i for i, name in enumerate(_LANL_CAUSES) if row[name].strip()), len(_LANL_CAUSES)))
    if not minutes:
        raise ValueError(f"{path}: system={system} has no failure there, but these have: {', '.join(sorted(systems))}.")
    hours = (np.array(minutes) - min(minutes)) / 60
    return _sorted(hours, node, cause, causes, nodes, float(hours.max()))


def _sorted(hours, node, cause, causes, nodes, span):
    order = np.argsort(hours, kind="stable")
    node, cause = np.array(node, np.int32), np.array(cause, np.int32)
    return Failures(hours[order], node[order], cause[order], causes, nodes, span)


def _array_items(path: Path) -> Iterator[tuple[int, dict]]:
    """Yield (line number, item) of a JSON array."""
    decoder, text, line, before = json.JSONDecoder(), "", 1, ""
    for piece in itertools.chain(_read(path), [""]):
        text += piece
        while True:
            rest = text.lstrip(" \t\r\n[,]")
            skipped = text[: len(text) - len(rest)]
            line, before, text = line + skipped.count("\n"), before + "".join(skipped.split()), rest
            try:
                item, end = decoder.raw_decode(text)
            except json.JSONDecodeError as error:
                if len(text) > _PIECE or (text and not piece):
                    raise ValueError(f"{path}, line {line + error.lineno - 1}: {error.msg}; no JSON.") from None
                break
            if before not in ("[", ","):
                raise ValueError(f"{path}, line {line}: {before!r} before an event; the file must be one JSON array.")
            yield line, item
            line, before, text = line + text.count("\n", 0, end), "", text[end:]
    if before not in ("]", "[]"):
        raise ValueError(f"{path}, line {line}: the file ends within its JSON array; fetch it again.")


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line number, row) of a CSV file with a header."""
    reader, line = csv.reader(_read(path, lines=True)), 1
    try:
        header = next(reader, [])
        if missing := [name for name in _LANL_COLUMNS if name not in header]:
            raise ValueError(f"{path}, line 1: columns {missing} are missing; is it the table of all systems?")
        line = reader.line_num + 1
        for row in reader:
            if len(row) != len(header):
                raise ValueError(f"{path}, line {line}: {len(row)} fields, wanted {len(header)}; correct it.")
            yield line, dict(zip(header, row, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}, line {line}: {error}; correct it.") from None


def _read(path: Path, lines: bool = False) -> Iterator[str]:
    """Yield chunks of a file, or its lines, of at most _PIECE characters each."""
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            while piece := (file.readline if lines else file.read)(_PIECE):
                if lines and len(piece) == _PIECE and not piece.endswith("\n"):
                    raise ValueError(f"{path}, line {number + 1}: longer than {_PIECE} characters; correct it.")
                yield piece
                number += piece.count("\n")
    except _DAMAGED as error:
        raise ValueError(f"{path}, after line {number}: {error}; the file is damaged, fetch it again.") from None
