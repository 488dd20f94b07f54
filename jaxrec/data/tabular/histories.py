"""Histories from interactions: what the same user did strictly before the time of a row, whatever the order of files.

The preparation keeps a log with a record for each row that is remembered, sorted by user, time and row. The history of
a row is the end of its user's records before its time, which bisection finds. The log is sorted in bounded memory:
records go to files by the first bits of their users, and one file after another is sorted and appended.

Legend: n rows of a piece, m records, T steps of a history.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numba
import numpy as np

from jaxrec.data.tabular.encode import Ids, hashes, labels_of, rows_of
from jaxrec.data.tabular.schema import MISSING, History, Schema
from jaxrec.files import PARTIAL, atomic_write

# With a field for the four bytes of padding, which numpy copies or leaves as they are, as its version likes.
RECORD = np.dtype([("user", "<u8"), ("time", "<f8"), ("item", "<i4"), ("zero", "<i4")])
"""One record of a log; the user is a hash, which two of ten million share with a probability of 3e-6."""
SORTED_ROWS = 1 << 22  # sorted at once, if no user has more
SCRATCH = ".parts" + PARTIAL  # after the name of a log: the directory in which it is sorted
AS_PREPARED = "give the directory as it was prepared."
_MOST_BITS = 8  # of a user that choose its file


def log_path(directory: Path, schema: Schema, history: History) -> Path:
    """Return the file of the log of a history in the directory of a preparation."""
    return directory / f"history_{schema.bags.index(history)}.log"


def remembered(history: History, schema: Schema, frame: Any, ids: Ids) -> np.ndarray:
    """Return the records of the rows of a frame from `read_table` that histories may hold, in its order.

    Args:
      ids: strings of the column `of` -> rows of its table.
    """
    item = rows_of(ids, frame[f"c:{history.of}"])
    chosen = frame[f"c:{history.by}"].is_not_null().to_numpy() & (item != MISSING)
    if history.where is not None:
        chosen &= labels_of(next(label for label in schema.label if label.column == history.where), frame) == 1
    found = np.zeros(int(chosen.sum()), RECORD)
    found["user"], found["time"] = (part[chosen] for part in _asked(history, frame))
    found["item"] = item[chosen]
    return found


@contextlib.contextmanager
def writing_log(path: Path, rows: int) -> Iterator[Callable[[np.ndarray], None]]:
    """Sort records by user and time, equal ones in the order given, and write them, whole or not at all.

    Args:
      rows: at least their number; decides over how many files they are sorted.

    Yields:
      What adds records, from `remembered`; they are sorted and written when the block ends.
    """
    bits = min((rows // SORTED_ROWS).bit_length(), _MOST_BITS)
    scratch = path.with_name(path.name + SCRATCH)
    scratch.mkdir()
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(scratch / str(part), "w+b")) for part in range(1 << bits)]

            def add(records):
                part = (records["user"] >> np.uint64(56)) >> np.uint64(_MOST_BITS - bits)
                for number in np.unique(part):
                    records[part == number].tofile(files[number])

            yield add
            with atomic_write(path) as partial, open(partial, "wb") as whole:
                for file in files:
                    file.seek(0)
                    records = np.fromfile(file, RECORD)
                    records[np.lexsort((records["time"], records["user"]))].tofile(whole)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def open_log(path: Path, remedy: str, records: int | None = None) -> np.ndarray:
    """Map a log into memory: RECORD[m]; raise ValueError if it is missing, or has not that number of records."""
    size = path.stat().st_size if path.exists() else None
    if size is None or size % RECORD.itemsize or records not in (None, size // RECORD.itemsize):
        raise ValueError(f"{path} is missing, cut or of another preparation: {remedy}")
    return np.memmap(path, RECORD, "r").view(np.ndarray) if size else np.zeros(0, RECORD)


def open_logs(directory: Path, schema: Schema, table: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Map the logs of all histories of a prepared table, {bag: RECORD[m]}; `table` is its metadata."""
    return {
        its.column: open_log(log_path(directory, schema, its), AS_PREPARED, table["histories"][its.column])
        for its in schema.histories
    }


def in_parts(log: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the records of a log in order, some at a time."""
    return (log[first : first + SORTED_ROWS] for first in range(0, len(log), SORTED_ROWS))


def before(logs: Mapping[str, np.ndarray], history: History, frame: Any) -> np.ndarray:
    """Return the history of each row of a frame from `read_table`, oldest first, padded with -1: i32[n, T]."""
    user, time = _asked(history, frame)
    log = logs[history.column]
    found = np.full((len(frame), history.last), -1, np.int32)
    there = frame[f"c:{history.by}"].is_not_null().to_numpy()
    found[there] = _newest(log["user"], log["time"], log["item"], user[there], time[there], history.last)
    return found


def _asked(history: History, frame: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return user u64[n] and time f64[n] of each row; a missing user is as one named ''."""
    return hashes(frame[f"c:{history.by}"].fill_null(""), history.by), frame[f"n:{history.time}"].to_numpy()


@numba.njit(cache=True, nogil=True)
def _newest(user_of, time_of, item_of, users, times, last):
    """Return the items of the last records before each (user, time), padded with -1."""
    found = np.full((len(users), last), -1, np.int32)
    for row in range(len(users)):
        user, time = users[row], times[row]
        end, high = 0, len(user_of)
        while end < high:
            middle = (end + high) // 2
            if user_of[middle] < user or (user_of[middle] == user and time_of[middle] < time):
                end = middle + 1
            else:
                high = middle
        begin = end
        while begin > 0 and end - begin < last and user_of[begin - 1] == user:
            begin -= 1
        for at in range(begin, end):
            found[row, at - begin] = item_of[at]
    return found
