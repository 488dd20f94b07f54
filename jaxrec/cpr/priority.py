"""Which rows to save first: MFU, SSU and SCAR of CPR (arXiv 2011.02999), round-robin and random
beside them.

Partial recovery loses what a shard learned since its rows were saved; saving the r V rows that
matter most every r T instead of all V every T loses less for the same bytes. A tracker watches one
stack, shard by shard:

    tracker = scheme.init(value, budget)
    tracker = scheme.touch(tracker, plan)                    after every step
    pick, tracker = scheme.pick(tracker, budget, value)      on the host: at most `budget` rows per shard
    tracker = scheme.saved(tracker, pick)                    when they are committed; never, if the save failed
    tracker = scheme.restored(tracker, shard, value)         a shard was loaded: it equals what is saved
    tracker = scheme.recall(tracker, scheme.remember(tracker))         what a tracker knows beyond its rows, as JSON

A row is picked only if it was touched (SCAR: if it differs) since it was last saved, and `saved`
takes back what the pick saw and no more: what is touched between pick and commit stays to be saved.
One pick is in flight at a time. `value` is f32[V / S, E] a shard in a list (host tables) or a jax
array f32[S, V / S, E] (device tables); the tracker lives where it does. Trackers in numpy change in
place, and picks by counts may run in another thread beside touches; trackers in jax are donated,
and `touch` may be inside jit.

| | keeps, bytes per row | picks |
|---|---|---|
| MFU | accesses since saved, 4 | the most accessed rows |
| SSU | a list of r V rows of sampled batches, 4 r | the list |
| SCAR | the rows as last saved, 4 E | the most changed rows, by L2 norm |
| round-robin, random | as MFU | the next ones; any |

Legend: S shards, V rows of the stack, E embedding width, C entries of a list, n rows of a pick.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxrec.bounds import is_portion, real_number, whole_number
from jaxrec.cpr import counters, row_set
from jaxrec.types import Array


class Pick(NamedTuple):
    """Rows to save, and what the tracker saw of them; lists have one array per shard."""

    rows: list[np.ndarray]  # i32[n] rows of the stack, ascending, n <= budget
    # Accesses i32[n] or values f32[n, E] at the time of the pick; empty for SSU.
    seen: list[np.ndarray]


class Priority(NamedTuple):
    """A scheme as functions of its tracker; see the head of this file."""

    name: str
    init: Callable[..., Any]  # (value, budget) -> tracker
    touch: Callable[..., Any]  # (tracker, Plan) -> tracker
    pick: Callable[..., tuple[Pick, Any]]  # (tracker, budget, value) -> Pick, tracker
    saved: Callable[..., Any]  # (tracker, Pick) -> tracker
    restored: Callable[..., Any]  # (tracker, shard, value) -> tracker
    # (tracker) -> JSON: all that a fresh tracker of saved rows lacks.
    remember: Callable[..., dict[str, Any]]
    recall: Callable[..., Any]  # (tracker, JSON) -> tracker
    # `pick` looks at the tracker alone, not at values, and may run while training goes on.
    by_tracker: bool = True


def budget_rows(rows: int, fraction: float) -> int:
    """Rows a save may write: ceil(r V / S), the budget of a shard; every shard has its own, as
    every node in CPR.

    Args:
      rows: V / S.
      fraction: r, above 0 and at most 1; 0.125 in CPR.

    >>> budget_rows(1000, 0.125), budget_rows(30, 0.1), budget_rows(7, 0.125)
    (125, 3, 1)
    """
    real_number("fraction", fraction, "above 0 and at most 1: CPR saves r = 0.125 of the rows", is_portion)
    return math.ceil(fraction * rows - 1e-9)  # 0.1 * 30 is above 3


class Counts(NamedTuple):
    """Accesses of every row since it was last saved."""

    count: Array  # i32[S, V / S]
    turn: np.ndarray  # i32[S] where the next pick of a shard begins; always on the host


def mfu(by_access: bool = True) -> Priority:
    """Most frequently used: a counter per row; the largest are saved, and then what was counted is
    taken off.

    Args:
      by_access: count a row as often as a batch reads it, as we recall the paper; else once per batch.
        Plans that know no accesses (`inverse` empty) count once.
    """
    name = "mfu" if by_access else "mfu_by_batch"
    return _counted(name, by_access, lambda count, budget, turn, shard: (counters.largest(count, budget), turn))


def round_robin() -> Priority:
    """The next touched rows after those picked before, in the order of their numbers."""

    def choose(count, budget, turn, shard):
        # From the row after the last pick on, and round to the first ones.
        rows = np.flatnonzero(count)
        first = int(np.searchsorted(rows, turn))
        picked = rows[(first + np.arange(min(budget, len(rows)))) % max(len(rows), 1)]
        return np.sort(picked), picked[-1] + 1 if len(picked) else turn

    return _counted("round_robin", False, choose)


def random(seed: int = 0) -> Priority:
    """Any touched rows, drawn from (seed, pick, shard)."""

    def choose(count, budget, turn, shard):
        # Above 0.
        draw = 1 - np.random.default_rng([seed, turn, shard]).random(len(count), np.float32)
        return counters.largest(np.where(count > 0, draw, np.float32(0)), budget), turn + 1

    return _counted("random", False, choose)


def _counted(name, by_access, choose):
    """A scheme on access counts; choose(count, budget, turn, shard) -> rows of the shard,
    ascending; next turn."""

    def init(value, budget):
        shards, rows = counters.shape_of(value)
        return Counts(counters.filled(value, rows, 0), np.zeros(shards, np.int32))

    def touch(tracker, plan):
        return Counts(counters.add_accesses(tracker.count, plan, by_access), tracker.turn)

    def pick(tracker, budget, value):
        # The counts stay as they are until the save is committed; what was seen of them goes with
        # the pick, so that accesses that come meanwhile are kept.
        counts, turn, picked = np.asarray(tracker.count), np.array(tracker.turn), Pick([], [])
        for shard, count in enumerate(counts):
            rows, turn[shard] = choose(count, budget, turn[shard], shard)
            picked.rows.append((rows * len(counts) + shard).astype(np.int32))
            picked.seen.append(count[rows])
        return picked, Counts(tracker.count, turn)

    def saved(tracker, pick):
        # Subtracted, not set to 0: the row may have been used since it was picked.
        return Counts(counters.subtract(tracker.count, *pick), tracker.turn)

    def restored(tracker, shard, value):
        return Counts(counters.set_shard(tracker.count, shard, 0), tracker.turn)

    def remember(tracker):
        return {"turn": np.asarray(tracker.turn).tolist()}

    def recall(tracker, known):
        return tracker._replace(turn=np.array(known["turn"], np.int32))

    return Priority(name, init, touch, pick, saved, restored, remember, recall)


class SampledRows(NamedTuple):
    """A set of rows per shard, see `row_set.py`."""

    entry: Array  # i32[S, C]
    batch: Array  # i32[] batches seen


def ssu(every: int = 2) -> Priority:
    """Sub-sampled used: the rows of every n-th batch go to a list of r V entries, which is what is
    saved.

    In a full list a row takes the place of a random one, so that what is used often stays.

    Args:
      every: which batches are sampled; the period is a matter of tuning in CPR.
    """
    whole_number("every", every, why=": 1 samples all batches, 2 every second one")

    def init(value, budget):
        return SampledRows(counters.filled(value, row_set.entries(budget), row_set.EMPTY), np.int32(0))

    def touch(tracker, plan):
        entry, batch = tracker
        # By the number of the batch, which an image remembers: a run that goes on samples the same
        # ones.
        sampled = batch % every == 0  # traced under jit
        if not isinstance(sampled, np.bool_) or sampled:
            entry = row_set.insert(entry, plan, batch, sampled)
        return SampledRows(entry, batch + np.int32(1))

    def pick(tracker, budget, value):
        entry, rows = row_set.pick(tracker.entry, budget)
        nothing = [np.zeros(0, np.int32)] * len(rows)
        return Pick(rows, nothing), tracker._replace(entry=counters.replaced(tracker.entry, entry))

    def saved(tracker, pick):
        # Only now: until the save is committed its rows keep their places.
        return tracker._replace(entry=row_set.drop_picked(tracker.entry))

    def restored(tracker, shard, value):
        return tracker._replace(entry=counters.set_shard(tracker.entry, shard, row_set.EMPTY))

    def remember(tracker):
        return {"batch": int(tracker.batch)}

    def recall(tracker, known):
        return tracker._replace(batch=np.int32(known["batch"]))

    return Priority("ssu", init, touch, pick, saved, restored, remember, recall)


class Saved(NamedTuple):
    """The rows as they were last saved, as much memory as the rows themselves."""

    value: Array  # f32[S, V / S, E]


def scar() -> Priority:
    """The rows that changed most since they were saved, by the L2 norm of the change (SCAR, arXiv
    1810.07354)."""

    def init(value, budget):
        return Saved(counters.copy(value))

    def touch(tracker, plan):
        return tracker

    def pick(tracker, budget, value):
        picked = []
        # Shard by shard: each has a budget of its own, as every node in CPR.
        for shard, change in enumerate(counters.changes(value, tracker.value)):
            picked.append((counters.largest(change, budget) * len(value) + shard).astype(np.int32))
        return Pick(picked, counters.rows_of(value, picked)), tracker

    def saved(tracker, pick):
        # With the values of the pick, not those of now, which the image does not hold.
        return Saved(counters.overwrite(tracker.value, *pick))

    def restored(tracker, shard, value):
        return Saved(counters.set_shard(tracker.value, shard, value[shard]))

    def recall(tracker, known):
        return tracker

    return Priority("scar", init, touch, pick, saved, restored, lambda tracker: {}, recall, by_tracker=False)
