"""Whose turn it is: tables are in one run at a time, whatever objects and attached files lead to
them."""

import gc
import itertools
import os
import threading
import weakref
from typing import Any

from jaxrec.embedding import HostTables
from jaxrec.oac.flow import Flow

# {key of tables: (flow of the run, weak reference to its pipeline)}, and the number of the last run
# of each.
_running: dict[Any, tuple[Flow, weakref.ref]] = {}
_last: dict[Any, int] = {}
_numbers = itertools.count(1)
_lock = threading.RLock()  # the collector may leave a run, which comes in here, at any line


def _keys(tables):
    """What is the same for all that lead to the same rows: views share the counters, attached
    tables the directory."""
    files = [] if tables.directory is None else [os.path.realpath(tables.directory)]
    return [id(tables.steps), *files]


def begin(tables: HostTables, flow: Flow, pipeline: Any) -> int:
    """A run begins; returns its number.

    Raises:
      ValueError: another run goes on.
    """
    with _lock:
        check_alone(tables, flow)
        number, entry = next(_numbers), (flow, weakref.ref(pipeline))
        for key in _keys(tables):
            _running[key], _last[key] = entry, number
        return number


def end(flow: Flow) -> None:
    """A run has ended, and all that it committed is written."""
    with _lock:
        for key in [key for key, (user, _) in list(_running.items()) if user is flow]:
            _running.pop(key, None)


def check_alone(tables: HostTables, flow: Flow) -> None:
    """Raises if another run than that of this flow goes on over the tables.

    Raises:
      ValueError: it says what to do.
    """
    if _others(tables, flow) and any(user.over() for user in _others(tables, flow)):
        gc.collect()  # a pipeline that nobody holds any more may wait to be collected
    if _others(tables, flow):
        raise ValueError(
            "another pipeline is running over these tables: exhaust or close its run first; they may take turns."
        )


def _others(tables, flow):
    with _lock:
        found = [_running[key] for key in _keys(tables) if key in _running]
    # Whoever was collected by one of its own threads has ended without saying so.
    return [user for user, owner in found if user is not flow and not (user.over() and owner() is None)]


def last(tables: HostTables) -> int:
    """The number of the last run that has begun over the tables."""
    with _lock:
        return max(_last.get(key, 0) for key in _keys(tables))


def pipelines() -> list[Any]:
    """Those that are in a run."""
    with _lock:
        owners = [owner() for _, owner in list(_running.values())]
    return list({id(owner): owner for owner in owners if owner is not None}.values())
