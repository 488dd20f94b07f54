"""Schemes that choose which rows to save first: MFU, SSU and SCAR of CPR (arXiv 2011.02999), round-robin and random.

Partial recovery loses all updates of a shard since its rows were last saved. Saving the r V most important rows every r
T, instead of all V every T, loses less for the same bytes. A tracker watches one stack, shard by shard:

    tracker = scheme.init(value, budget)
    tracker = scheme.touch(tracker, plan)                    after every step
    rows, tracker = scheme.pick(tracker, budget, value)      on the host: at most `budget` rows per shard
    pick, tracker = scheme.copied(tracker, rows, value)      a save has copied them, as they are now
    tracker = scheme.saved(tracker, pick)                    once it is committed; not called if the save failed
    tracker = scheme.restored(tracker, shard, value)         a shard was restored: it equals its saved rows
    tracker = scheme.recall(tracker, scheme.remember(tracker))         state beyond the rows, as JSON

Only rows that were touched (SCAR: that differ) since they were last saved are picked. `saved` subtracts what was copied
and no more, so rows touched between copy and commit stay unsaved. At most one pick is in flight. `value` is a list of
f32[V / S, E], one per shard (host tables), or a jax array f32[S, V / S, E] (device tables); the tracker lives where
`value` does. Numpy trackers change in place, and picks by counts may run in another thread, concurrently with `touch`;
jax trackers are donated, and `touch` may be traced by jit.

| | state, bytes per row | picks |
|---|---|---|
| MFU | accesses since saved, 4 | the most accessed rows |
| SSU | a list of r V rows of sampled batches, 4 r, and two bits per row, 1/4 | the list |
| SCAR | the rows as last saved, 4 E | the most changed rows, by L2 norm |
| round-robin, random | as MFU | the next touched rows; random touched rows |

Legend: S shards, V rows of the stack, E embedding width, n rows of a pick.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxrec.bounds import is_portion, real_number, whole_number
from jaxrec.cpr import counters, row_set
from jaxrec.types import Array


class Pick(NamedTuple):
    """Rows that a save holds, and what it holds of them; lists have one array per shard."""

    rows: list[np.ndarray]  # i32[n] rows of the stack, ascending, n <= budget
    # Accesses i32[n] or values f32[n, E] when they were copied; empty for SSU.
    seen: list[np.ndarray]


class Priority(NamedTuple):
    """A scheme, as functions of its tracker; see the module docstring."""

    name: str
    init: Callable[..., Any]  # (value, budget) -> tracker
    touch: Callable[..., Any]  # (tracker, Plan) -> tracker
    pick: Callable[..., tuple[list[np.ndarray], Any]]  # (tracker, budget, value) -> rows, tracker
    copied: Callable[..., tuple[Pick, Any]]  # (tracker, rows, value) -> Pick, tracker
    saved: Callable[..., Any]  # (tracker, Pick) -> tracker
    restored: Callable[..., Any]  # (tracker, shard, value) -> tracker
    # (tracker) -> JSON: the state that a fresh tracker of saved rows lacks
    remember: Callable[..., dict[str, Any]]
    recall: Callable[..., Any]  # (tracker, JSON) -> tracker
    # Whether `pick` uses the tracker alone, not values, so that it may run while training continues.
    by_tracker: bool = True
    # What `touch` looks at of a plan: its rows and how often each is read, its rows, or nothing.
    tracks: Literal["accesses", "rows", "nothing"] = "accesses"
    # (function, args) to pickle instead, as closures cannot be pickled
    recipe: tuple[Callable[..., "Priority"], tuple] | None = None

    def __reduce__(self):
        return self.recipe or (Priority, tuple(self))


def budget_rows(rows: int, fraction: float) -> int:
    """Return the budget of a shard, ceil(r V / S) rows per save; in CPR each node has its own, too.

    Args:
      rows: V / S.
      fraction: r, above 0 and at most 1; 0.125 in CPR.

    >>> budget_rows(1000, 0.125), budget_rows(30, 0.1), budget_rows(7, 0.125)
    (125, 3, 1)
    """
    real_number("fraction", fraction, "above 0 and at most 1: CPR saves r = 0.125 of the rows", is_portion)
    return math.ceil(fraction * rows - 1e-9)  # 0.1 * 30 is above 3 in floats


class AccessCounts(NamedTuple):
    """Accesses of every row since it was last saved."""

    count: Array  # i32[S, V / S]
    turn: np.ndarray  # i64[S], start of the next pick of each shard; always on the host


def mfu() -> Priority:
    """Most frequently used: save the rows with the most accesses since they were last saved.

    Every read of a row in a batch counts, as we recall the paper; one per batch for plans without `inverse`.
    """
    select = lambda count, budget, turn: (counters.largest(count, budget), turn)
    return _count_scheme("mfu", True, select, (mfu, ()))


def round_robin() -> Priority:
    """Save the next touched rows after the previously picked ones, in the order of row numbers."""

    def select(count, budget, turn):
        # From the row after the last pick on, wrapping around.
        rows = np.flatnonzero(count)
        first = int(np.searchsorted(rows, turn))
        picked = rows[(first + np.arange(min(budget, len(rows)))) % max(len(rows), 1)]
        return np.sort(picked), picked[-1] + 1 if len(picked) else turn

    return _count_scheme("round_robin", False, select, (round_robin, ()))


def random_rows(seed: int = 0) -> Priority:
    """Save random touched rows, drawn from (seed, shard, pick)."""

    def select(count, budget, turn):
        # Above 0.
        draw = 1 - np.random.default_rng([seed, turn]).random(len(count), np.float32)
        return counters.largest(np.where(count > 0, draw, np.float32(0)), budget), turn + 1

    return _count_scheme("random", False, select, (random_rows, (seed,)), turn_stride=1 << 32)


def _count_scheme(name, by_access, select, recipe, turn_stride=0):
    """Make a scheme from select(count, budget, turn) -> ascending rows of a shard, next turn.

    The first turns of consecutive shards differ by `turn_stride`: a server holds only some of the shards, so their
    positions do not distinguish them.
    """

    def init(value, budget):
        shards, rows = counters.shape_of(value)
        return AccessCounts(counters.zeros(value, rows), np.arange(shards) * turn_stride)

    def touch(tracker, plan):
        return AccessCounts(counters.add_accesses(tracker.count, plan, by_access), tracker.turn)

    def pick(tracker, budget, value):
        counts, turn, picked = np.asarray(tracker.count), np.array(tracker.turn), []
        for shard, count in enumerate(counts):
            rows, turn[shard] = select(count, budget, turn[shard])
            picked.append((rows * len(counts) + shard).astype(np.int32))
        return picked, AccessCounts(tracker.count, turn)

    def copied(tracker, rows, value):
        # Counts stay unchanged until the save is committed: if it fails, all accesses still count.
        counts = np.asarray(tracker.count)
        return Pick(rows, [count[mine // len(counts)] for count, mine in zip(counts, rows, strict=True)]), tracker

    def saved(tracker, pick):
        # Subtracted, not set to 0: the row may have been used since it was copied.
        return AccessCounts(counters.subtract(tracker.count, *pick), tracker.turn)

    def restored(tracker, shard, value):
        return AccessCounts(counters.set_shard(tracker.count, shard, 0), tracker.turn)

    def remember(tracker):
        return {"turn": np.asarray(tracker.turn).tolist()}

    def recall(tracker, known):
        return tracker._replace(turn=np.array(known["turn"], np.int64))

    tracks: Literal["accesses", "rows"] = "accesses" if by_access else "rows"
    return Priority(name, init, touch, pick, copied, saved, restored, remember, recall, tracks=tracks, recipe=recipe)


class SampledRows(NamedTuple):
    """A list of rows per shard, see `row_set.py`."""

    rows: row_set.RowSet
    batch: Array  # i32[], batches seen


def ssu(every: int = 2) -> Priority:
    """Sub-sampled used: insert the rows of every n-th batch into a list of r V entries, and save the list.

    In a full list a new row replaces a random one, so frequently used rows tend to stay.

    Args:
      every: n; CPR treats the period as a tuning parameter.
    """
    whole_number("every", every, why=": 1 samples all batches, 2 every second one")

    def init(value, budget):
        return SampledRows(row_set.empty(value, budget), np.int32(0))

    def touch(tracker, plan):
        rows, batch = tracker
        # By batch number, which an image records: a resumed run samples the same batches.
        sampled = batch % every == 0  # traced under jit
        if not isinstance(sampled, np.bool_) or sampled:
            rows = row_set.insert(rows, plan, batch, sampled)
        return SampledRows(rows, batch + np.int32(1))

    def pick(tracker, budget, value):
        return row_set.pick(tracker.rows, budget, tracker.batch), tracker

    def copied(tracker, rows, value):
        nothing = [np.zeros(0, np.int32)] * len(rows)
        return Pick(rows, nothing), tracker._replace(rows=row_set.copied(tracker.rows, rows))

    def saved(tracker, pick):
        return tracker._replace(rows=row_set.saved(tracker.rows, pick.rows))

    def restored(tracker, shard, value):
        return tracker._replace(rows=row_set.clear(tracker.rows, shard))

    def remember(tracker):
        return {"batch": int(tracker.batch)}

    def recall(tracker, known):
        return tracker._replace(batch=np.int32(known["batch"]))

    functions = (init, touch, pick, copied, saved, restored, remember, recall)
    return Priority("ssu", *functions, tracks="rows", recipe=(ssu, (every,)))


class ScarTracker(NamedTuple):
    """The rows as last saved; takes as much memory as the rows themselves."""

    value: Array  # f32[S, V / S, E]


def scar() -> Priority:
    """Save the rows that changed most since they were last saved, by L2 norm (SCAR, arXiv 1810.07354)."""

    def init(value, budget):
        return ScarTracker(counters.copy(value))

    def touch(tracker, plan):
        return tracker

    def pick(tracker, budget, value):
        picked = []
        for shard, change in enumerate(counters.changes(value, tracker.value)):
            picked.append((counters.largest(change, budget) * len(value) + shard).astype(np.int32))
        return picked, tracker

    def copied(tracker, rows, value):
        return Pick(rows, counters.rows_of(value, rows)), tracker

    def saved(tracker, pick):
        # With the values that were copied: the image does not hold the current ones.
        return ScarTracker(counters.overwrite(tracker.value, *pick))

    def restored(tracker, shard, value):
        return ScarTracker(counters.set_shard(tracker.value, shard, value[shard]))

    def recall(tracker, known):
        return tracker

    def remember(tracker):
        return {}

    functions = (init, touch, pick, copied, saved, restored, remember, recall)
    return Priority("scar", *functions, by_tracker=False, tracks="nothing", recipe=(scar, ()))
