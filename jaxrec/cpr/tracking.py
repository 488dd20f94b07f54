"""Which rows are to be saved: batches are tracked in the order of their steps, and rows are picked
before a save.

Legend: S shards, V rows of a stack, U padded unique rows per shard.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxrec.cpr.priority import Pick, Priority, budget_rows
from jaxrec.embedding import EmbeddingSpec, Tables
from jaxrec.embedding.lookup import without_gaps
from jaxrec.types import Plan


class RowTracker:
    """The trackers of a run's rows, and the thread that picks rows ahead of a save.

    Three threads meet here: the one that iterates tells of batches, the picker picks, and under OAC
    the thread of a cut saves. A thread that is late finds the batches in order: while a pick or a cut
    is under way they wait in a list, and what a pick or a save sees depends on steps alone, never on
    which thread was faster.

    Args:
      spec: the tables.
      scheme: which rows go first.
      fraction: r, of the rows that a save may hold.
      whole: {stack: [(first, end)]}, rows that are saved at regular saves and not tracked, see
        `ranges_of`.
    """

    def __init__(
        self, spec: EmbeddingSpec, scheme: Priority, fraction: float, whole: Mapping[str, list[tuple[int, int]]]
    ):
        self.spec, self.scheme, self.fraction, self.whole = spec, scheme, fraction, whole
        self.trackers: dict[str, Any] = {}
        self._waiting: list[tuple[int, dict[str, Plan]]] = []  # (step, plans) not tracked yet
        self._lock = threading.Lock()
        self._picker = ThreadPoolExecutor(1, "pick")
        # Step of a save -> its pick. Under OAC the pick of the next save begins while the cut of
        # this one waits.
        self._picking: dict[int, Future] = {}
        self._cuts: dict[int, threading.Event] = {}  # of those that have still to pick their rows
        self._cut_over = threading.Event()  # of the latest one
        self._cut_over.set()

    def begin(self, tables: Tables, known: Mapping[str, Any]) -> None:
        """Trackers of rows that are all as they were saved; the little more that they know comes
        from an image."""
        for name in self.spec.stacks:
            tracker = self.scheme.init(tables.parts(name)["value"], self.budget(name))
            self.trackers[name] = self.scheme.recall(tracker, known[name]) if name in known else tracker

    def remember(self) -> dict[str, Any]:
        """What an image keeps of the trackers, for `begin`."""
        return {name: self.scheme.remember(tracker) for name, tracker in self.trackers.items()}

    def budget(self, name: str) -> int:
        """How many tracked rows of one shard of a stack a save may hold."""
        stack = self.spec.stacks[name]
        watched = stack.rows - sum(end - first for first, end in self.whole.get(name, ()))
        return budget_rows(-(-watched // self.spec.shards), self.fraction)

    def tell(self, step: int, plans: dict[str, Plan]) -> None:
        """A batch was trained."""
        with self._lock:
            # The lock guards this list alone; a tracker is touched by one thread at a time, see
            # below.
            self._waiting.append((step, plans))
        # While a pick is under way, or a cut is to pick yet, the tracker stands still, so that what
        # they see depends on steps and not on which thread was faster.
        if not self._picking and self._cut_over.is_set():
            self.touch(step)

    def touch(self, step: int, picked: Mapping[str, Pick] | None = None) -> None:
        """Tracks the batches up to a step; but for rows that are picked, as their save holds them
        as they are then."""
        with self._lock:
            # They came in the order of their steps, so that these are the first of the list.
            mine = [plans for at, plans in self._waiting if at <= step]
            self._waiting = self._waiting[len(mine) :]
        for plans in mine:
            for name, plan in plans.items():
                self.trackers[name] = self.scheme.touch(self.trackers[name], self._tracked(name, plan, picked))

    def _tracked(self, name, plan, picked):
        if not picked and name not in self.whole:
            return plan
        # A picked row is saved as it is at the cut, with what these batches have done to it:
        # counted now, it would be saved again for nothing.
        gone = in_ranges(plan, self.whole.get(name, ()))
        gone = gone | in_pick(plan, picked[name].rows) if picked else gone
        return without_rows(plan, gone, self.spec.stacks[name].rows)

    def begin_cut(self, step: int) -> None:
        """The state of a step will be saved, perhaps beside training: batches of later steps wait
        until then."""
        # Under OAC the cut is saved in a thread, and training may be at a later step by then.
        self._cuts[step] = self._cut_over = threading.Event()

    def end_cut(self, step: int) -> None:
        """The rows of a step's cut are picked and copied. Training may have reached the cut after
        it by now."""
        if cut := self._cuts.pop(step, None):
            cut.set()

    def pick_ahead(self, step: int, save_step: int, settle: Callable[[], None]) -> None:
        """Begins to pick the rows of the next save, in the thread.

        Args:
          step: the pick knows the batches up to here.
          save_step: of the save.
          settle: waits for the save before it; a row of that one, once committed, is not picked
            again unchanged.
        """

        last_cut_over = self._cut_over  # of the save before this one, whose rows are picked first

        def pick():
            # In this order: the save before must have picked its rows, then the tracker learns the
            # batches up to now, then that save is settled, which takes its rows off, and only then
            # rows are picked.
            last_cut_over.wait()
            self.touch(step)
            settle()
            return self.pick()

        self._picking[save_step] = self._picker.submit(pick)

    def picked_ahead(self, save_step: int) -> dict[str, Pick] | None:
        """Waits for the thread to pick the rows of a save; None if nothing was picked ahead."""
        for older in [step for step in self._picking if step < save_step]:
            self._picking.pop(older).result()  # of a save that did not come: what it picked stays to be saved
        picking = self._picking.pop(save_step, None)
        # Raises here what the thread has raised, in the thread that saves.
        return picking.result() if picking else None

    def drop_picks(self) -> None:
        """Forgets what the thread has picked, as rows have changed that no batch has touched; while
        no cut is saved."""
        # Lost shards have kept them; the thread that picks would wait for them, and we for it.
        late = list(self._cuts)
        for step in late:
            self.end_cut(step)
        for save_step in list(self._picking):
            self.picked_ahead(save_step)
        for step in late:  # their saves come now, beside training: what is trained from here on is not in them
            self.begin_cut(step)

    def pick(self, tables: Tables | None = None) -> dict[str, Pick]:
        """{stack: Pick} of the next save; of tables that lie still, if the scheme looks at
        values."""
        picked = {}
        for name in self.spec.stacks:
            # Values are looked at only where the tables lie still, at a cut; the tracker alone can
            # be read at any time.
            value = None if tables is None else tables.parts(name)["value"]
            picked[name], self.trackers[name] = self.scheme.pick(self.trackers[name], self.budget(name), value)
        return picked

    def saved(self, picked: Mapping[str, Pick]) -> None:
        """A save is committed, and what it holds counts as saved."""
        for name, pick in picked.items():
            self.trackers[name] = self.scheme.saved(self.trackers[name], pick)

    def restored(self, tables: Tables, shard: int) -> None:
        """A shard has come back: its rows are as they were saved."""
        for name in self.trackers:
            self.trackers[name] = self.scheme.restored(self.trackers[name], shard, tables.parts(name)["value"])

    def close(self) -> None:
        """Ends the thread."""
        for step in list(self._cuts):  # they will never be saved
            self.end_cut(step)
        # After the cuts, for which a pick may wait.
        self._picker.shutdown()


def lose(tables: Tables, shard: int) -> Tables:
    """Makes the rows and slots of one shard NaN in all stacks, as if its node were gone; nothing of
    it survives.

    Args:
      tables: those of the host change in place, those of devices are donated.
      shard: from 0 to S - 1.

    Returns:
      The tables.
    """
    for name, stack in tables.spec.stacks.items():
        nothing = {
            part: np.full((stack.rows_per_shard, one.width), np.nan, one.dtype)
            for part, one in tables.layout[name].items()
        }
        tables = tables.with_shard(name, shard, nothing)
    return tables


def without_rows(plan: Plan, gone: np.ndarray, absent: int) -> Plan:
    """A plan on the host that reads nothing of some of its rows.

    Args:
      plan: of one stack.
      gone: bool[S, U], which rows.
      absent: V, which marks no row.
    """
    shards, padded = gone.shape
    keep = ~gone & (np.arange(padded) < np.asarray(plan.count)[:, None])
    kept, place = without_gaps(plan, keep, padded, absent)
    missing = shards * padded
    place = np.where(keep, place + np.arange(shards)[:, None] * padded, missing)
    place = np.append(place.reshape(-1), missing).astype(np.int32)
    inverse = {name: place[np.asarray(positions)] for name, positions in plan.inverse.items()}
    return kept._replace(inverse=inverse, invalid=plan.invalid)


def in_ranges(plan, ranges):
    """bool[S, U]: rows of a plan that lie in any of [(first, end)]."""
    unique = np.asarray(plan.unique)
    found = np.zeros(unique.shape, bool)
    for first, end in ranges:
        found |= (unique >= first) & (unique < end)
    return found


def in_pick(plan, rows):
    """bool[S, U]: rows of a plan that are among ascending rows of the stack, one array per
    shard."""
    found = lambda row, mine: np.append(mine, -1)[np.searchsorted(mine, row)] == row  # -1 is no row
    return np.array([found(row, mine) for row, mine in zip(np.asarray(plan.unique), rows, strict=True)])


def ranges_of(spec, whole):
    """{stack: [(first, end)]} of the tables saved whole."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for name, stack in spec.stacks.items():
        for place, table in enumerate(stack.tables):
            if table in whole:
                ranges.setdefault(name, []).append((stack.offsets[place], stack.offsets[place + 1]))
    return ranges


def shard_rows(first, end, shard, shards):
    """i32[n]: the rows of one shard among the rows from `first` to `end` of a stack."""
    return np.arange(first + (shard - first) % shards, end, shards, dtype=np.int32)
