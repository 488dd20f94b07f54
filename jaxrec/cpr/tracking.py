"""Track which rows were trained, in the order of steps, and pick the rows of the next save.

Trackers live where the rows live: in this process, or at the embedding servers, each of which tracks and picks from its
own shards. In the latter case no memory of the trainer grows with the tables.

Legend: S shards, p shards of a server, V rows of a stack, U padded unique rows per shard, C padded rows per shard of a
message, n rows of a pick.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxrec.cpr import counters
from jaxrec.cpr.priority import Pick, Priority, budget_rows
from jaxrec.embedding import EmbeddingSpec, RemoteTables, Tables
from jaxrec.embedding.servers import ShardServer
from jaxrec.types import Plan, ShardsLost

Values = Callable[[str], Any]  # stack -> its rows, in the form that `Priority` takes
VALUES_PER_MESSAGE = 1 << 22  # i32 of the plans that wait to be reported to servers at once, 16 MB


class Trackers:
    """One tracker per stack, for all shards of some tables or for those of one server.

    Args:
      scheme: priority scheme.
      values: stack -> its rows, all of them as last saved.
      budgets: {stack: maximum number of rows per shard in a save}.
      known: {stack: result of `Priority.remember`}; trackers of absent stacks start afresh.
    """

    def __init__(
        self, scheme: Priority, values: Values, budgets: Mapping[str, int], known: Mapping[str, Any] | None = None
    ):
        self._scheme, self._budgets = scheme, budgets
        self._by_stack = {name: scheme.init(values(name), budget) for name, budget in budgets.items()}
        self.recall(known or {})

    def touch(self, batches: Sequence[Mapping[str, Plan]]) -> None:
        """Track the rows of several batches, in order."""
        for plans in batches:
            for name, plan in plans.items():
                self._by_stack[name] = self._scheme.touch(self._by_stack[name], plan)

    def pick(self, values: Values) -> dict[str, list[np.ndarray]]:
        """Return the rows to save next, {stack: i32[n] per shard}.

        For schemes that compare values, the tables must not change meanwhile, nor until `copied`.
        """
        picked = {}
        for name, budget in self._budgets.items():
            value = self._compared(values, name)
            picked[name], self._by_stack[name] = self._scheme.pick(self._by_stack[name], budget, value)
        return picked

    def copied(self, picked: Mapping[str, list[np.ndarray]], values: Values) -> dict[str, Pick]:
        """Note that a save holds picked rows as they are now; return what `saved` takes."""
        copied = {}
        for name, rows in picked.items():
            value = self._compared(values, name)
            copied[name], self._by_stack[name] = self._scheme.copied(self._by_stack[name], rows, value)
        return copied

    def _compared(self, values, name):
        return None if self._scheme.by_tracker else values(name)

    def saved(self, copied: Mapping[str, Pick]) -> None:
        """Mark rows as saved as they were copied, once their save is committed."""
        for name, pick in copied.items():
            self._by_stack[name] = self._scheme.saved(self._by_stack[name], pick)

    def restored(self, shards: Sequence[int], values: Values) -> None:
        """Mark the rows of shards as equal to the saved ones; `shards` index those of `values`."""
        for name in self._by_stack:
            for shard in shards:
                self._by_stack[name] = self._scheme.restored(self._by_stack[name], shard, values(name))

    def remember(self) -> dict[str, Any]:
        """Return, as JSON, the state that fresh trackers of saved rows lack."""
        return {name: self._scheme.remember(tracker) for name, tracker in self._by_stack.items()}

    def recall(self, known: Mapping[str, Any]) -> None:
        """Restore the result of `remember`."""
        for name in self._by_stack.keys() & known.keys():
            self._by_stack[name] = self._scheme.recall(self._by_stack[name], known[name])


class ServerTrackers:
    """`Trackers` that live at the embedding servers; each call runs at all servers in parallel.

    The result of `Trackers.remember` is also kept here, for the successor of a dead server; its trackers need nothing
    more, as its rows are restored to their saved values. Only `pick` and `restored` raise `ShardsLost`: for the other
    calls a dead server does not matter, as what it tracked is no longer needed.

    Args:
      scheme, budgets, known: as for `Trackers`.
      tables: rows at the servers.
    """

    def __init__(self, scheme: Priority, tables: RemoteTables, budgets: Mapping[str, int], known: Mapping[str, Any]):
        self._scheme, self._tables, self._budgets = scheme, tables, dict(budgets)
        self._spec: EmbeddingSpec = tables.spec
        no_rows = {
            name: [np.zeros((0, stack.width), np.float32)] * self._spec.shards
            for name, stack in self._spec.stacks.items()
        }
        self._remembered = Trackers(scheme, no_rows.__getitem__, dict.fromkeys(budgets, 1), known)
        tables.track(_server_begin, lambda shards: (scheme, self._budgets, self._known_of(shards)))

    def touch(self, batches: Sequence[Mapping[str, Plan]]) -> None:
        """As `Trackers.touch`; nothing is sent that the scheme does not look at."""
        if self._scheme.tracks == "nothing":
            return
        accesses = _accesses if self._scheme.tracks == "accesses" else lambda plan: None
        counted = [{name: (plan, accesses(plan)) for name, plan in plans.items()} for plans in batches]
        self._at_servers(
            _server_touch,
            lambda shards: ([{name: _plan_part(*of, shards) for name, of in plans.items()} for plans in counted],),
        )
        empty = Plan(np.zeros((self._spec.shards, 0), np.int32), {}, np.zeros(self._spec.shards, np.int32), 0)
        self._remembered.touch([dict.fromkeys(plans, empty) for plans in batches])  # SSU counts batches

    def pick(self, values: Values | None = None) -> dict[str, list[np.ndarray]]:
        """As `Trackers.pick`.

        Raises:
          ShardsLost: a server is dead, so its rows cannot be saved.
        """
        found = self._tables.track(_server_pick, lambda shards: ())
        rows = {name: [np.zeros(0, np.int32)] * self._spec.shards for name in self._budgets}
        known = self._remembered.remember()
        for shards, (picked, remembered) in found.items():
            for name, mine in picked.items():
                for place, shard in enumerate(shards):
                    rows[name][shard] = mine[place]
            for name, of in remembered.items():
                known[name] = {key: _merged(known[name][key], value, shards) for key, value in of.items()}
        self._remembered.recall(known)
        return rows

    def copied(self, picked: Mapping[str, list[np.ndarray]], values: Values | None = None) -> dict[str, Pick]:
        """As `Trackers.copied`, for the last pick; `Pick.seen` stays at the servers, for `saved`."""
        self._at_servers(_server_copied, lambda shards: ())
        return {name: Pick(rows, []) for name, rows in picked.items()}

    def saved(self, copied: Mapping[str, Pick]) -> None:
        """As `Trackers.saved`, for the last copy."""
        if copied:
            self._at_servers(_server_saved, lambda shards: ())

    def restored(self, shards: Sequence[int], values: Values | None = None) -> None:
        """As `Trackers.restored`."""
        restored = [int(shard) for shard in shards]
        self._tables.track(
            _server_restored, lambda shards: (restored, self._scheme, self._budgets, self._known_of(shards))
        )

    def remember(self) -> dict[str, Any]:
        """As `Trackers.remember`."""
        return self._remembered.remember()

    def _known_of(self, shards):
        """Return the part of `remember` for the server of some shards; lists have one value per shard."""
        part = lambda value: [value[shard] for shard in shards] if isinstance(value, list) else value
        return {name: {key: part(value) for key, value in of.items()} for name, of in self.remember().items()}

    def _at_servers(self, function, args_of):
        with contextlib.suppress(ShardsLost):  # the other servers have done it; the engine's next call reports the loss
            self._tables.track(function, args_of)


def _merged(all_of, mine, shards):
    """Update a remembered value of all shards with that of one server."""
    if not isinstance(mine, list):
        return mine
    merged = list(all_of)
    for shard, value in zip(shards, mine, strict=True):
        merged[shard] = value
    return merged


def _accesses(plan):
    """Return the number of reads of each row by a batch, i32[S, U]; None for a plan without `inverse`."""
    return counters.accesses(plan)[:-1].reshape(np.shape(plan.unique)) if plan.inverse else None


def _plan_part(plan, accesses, shards):
    """Cut a plan to the shards of a server: unique i32[p, C], count i32[p], accesses i32[p, C] or None."""
    shards = list(shards)
    count = np.asarray(plan.count)[shards]
    cut = lambda array: np.ascontiguousarray(np.asarray(array)[shards, : count.max()])
    return cut(plan.unique), count, None if accesses is None else cut(accesses)


def _values(tables) -> Values:
    return lambda name: tables.parts(name)["value"]


# ---- at a server: its trackers number its p shards from 0 to p - 1, so row r of a stack is (r // S) p + place


def _server_begin(server: ShardServer, scheme, budgets, known):
    server.memory["trackers"] = Trackers(scheme, _values(server), budgets, known)
    server.memory["picked"], server.memory["copied"] = {}, {}


def _server_touch(server, batches):
    if "trackers" in server.memory:  # else a successor whose rows have not been restored yet
        server.memory["trackers"].touch(
            [{name: _server_plan(server, *of) for name, of in batch.items()} for batch in batches]
        )


def _server_plan(server, unique, count, accesses):
    places = np.arange(len(server.shards), dtype=np.int32)[:, None]
    inverse = {} if accesses is None else {"": np.repeat(np.arange(unique.size, dtype=np.int32), accesses.reshape(-1))}
    return Plan(unique // server.spec.shards * len(server.shards) + places, inverse, count, np.int32(0))


def _server_pick(server):
    if "trackers" not in server.memory:
        return {}, {}
    trackers = server.memory["trackers"]
    server.memory["picked"] = picked = trackers.pick(_values(server))
    p, shards = len(server.shards), server.spec.shards
    rows = {
        name: [mine // p * shards + shard for mine, shard in zip(of, server.shards, strict=True)]
        for name, of in picked.items()
    }
    return rows, trackers.remember()


def _server_copied(server):
    if "trackers" in server.memory:
        server.memory["copied"] = server.memory["trackers"].copied(server.memory["picked"], _values(server))


def _server_saved(server):
    if "trackers" in server.memory:
        server.memory["trackers"].saved(server.memory["copied"])


def _server_restored(server, shards, scheme, budgets, known):
    if "trackers" not in server.memory and set(shards) & set(server.shards):
        _server_begin(server, scheme, budgets, known)
    if "trackers" in server.memory:
        places = [place for place, shard in enumerate(server.shards) if shard in shards]
        server.memory["trackers"].restored(places, _values(server))


# ---- one run


class RowTracker:
    """The trackers of a run, with a thread that picks rows ahead of a save.

    Three threads use it: the one that iterates reports batches, the picker picks, and under OAC another one saves
    snapshots. While a pick is running or the rows of a snapshot have not been picked, batches wait in a list. So picks
    and saves depend on steps alone, never on the timing of threads.

    Args:
      spec: spec of the tables.
      scheme: priority scheme.
      fraction: r, maximum fraction of the rows in a save.
      whole: {stack: [(first, end)]}, ranges of rows that every regular save holds and that are not tracked, see
        `ranges_of`.
    """

    def __init__(
        self, spec: EmbeddingSpec, scheme: Priority, fraction: float, whole: Mapping[str, list[tuple[int, int]]]
    ):
        self.spec, self.scheme, self.fraction, self.whole = spec, scheme, fraction, whole
        self.trackers: Any = None  # set by `begin`: `Trackers` or `ServerTrackers`
        self._values_per_call = 0
        self._untracked: list[tuple[int, dict[str, Plan]]] = []  # (step, plans) not tracked yet, in the order of steps
        self._values_untracked = 0
        self._lock = threading.Lock()
        self._picker = ThreadPoolExecutor(1, "pick")
        # Step of a save -> its pick. Under OAC the next pick can start before the previous snapshot is saved.
        self._picks: dict[int, Future] = {}
        # Step -> event, set once the rows of its snapshot are picked and copied.
        self._snapshots: dict[int, threading.Event] = {}
        self._snapshot_done = threading.Event()  # event of the latest snapshot
        self._snapshot_done.set()

    def begin(self, tables: Tables, known: Mapping[str, Any]) -> None:
        """Start trackers of rows that all equal the saved ones; `known` is the result of `remember`, or empty."""
        budgets = {name: self.budget(name) for name in self.spec.stacks}
        if isinstance(remote := tables.hosted, RemoteTables):
            self._values_per_call = 0 if self.scheme.tracks == "nothing" else VALUES_PER_MESSAGE
            self.trackers = ServerTrackers(self.scheme, remote, budgets, known)
        else:
            self._values_per_call = 0
            self.trackers = Trackers(self.scheme, _values(tables), budgets, known)

    def remember(self) -> dict[str, Any]:
        """Return the state of the trackers that an image records, for `begin`."""
        return self.trackers.remember()

    def budget(self, name: str) -> int:
        """Return the maximum number of tracked rows per shard of a stack in a save."""
        stack = self.spec.stacks[name]
        tracked = stack.rows - sum(end - first for first, end in self.whole.get(name, ()))
        return budget_rows(-(-tracked // self.spec.shards), self.fraction)

    def mark_trained(self, step: int, plans: dict[str, Plan]) -> None:
        """Report a trained batch."""
        with self._lock:
            # The lock guards only this list; trackers are used by one thread at a time.
            self._untracked.append((step, plans))
            self._values_untracked += _values_of(plans)
        # See the class: batches wait for picks and snapshots.
        if not self._picks and self._snapshot_done.is_set() and self._values_untracked >= self._values_per_call:
            self.track_until(step)

    def track_until(self, step: int) -> None:
        """Track the batches up to a step."""
        with self._lock:
            mine = [plans for at, plans in self._untracked if at <= step]
            self._untracked = self._untracked[len(mine) :]
            self._values_untracked -= sum(map(_values_of, mine))
        if mine:
            self.trackers.touch([{name: self._rows_to_track(name, plan) for name, plan in of.items()} for of in mine])

    def _rows_to_track(self, name, plan):
        if name not in self.whole:
            return plan
        return without_rows(plan, in_ranges(plan, self.whole[name]), self.spec.stacks[name].rows)

    def begin_snapshot(self, step: int) -> None:
        """Hold back batches of later steps until the snapshot of a step is saved."""
        self._snapshots[step] = self._snapshot_done = threading.Event()

    def end_snapshot(self, step: int) -> None:
        """Mark the rows of a snapshot as picked and copied; training may have reached the next snapshot by now."""
        if done := self._snapshots.pop(step, None):
            done.set()

    def end_snapshots(self) -> None:
        """End all snapshots, as a pick may wait for one."""
        for step in list(self._snapshots):
            self.end_snapshot(step)

    def pick_ahead(self, step: int, save_step: int, settle: Callable[[], None]) -> None:
        """Start to pick the rows of the next save, in the picker thread.

        Args:
          step: last step whose batch the pick takes into account.
          save_step: step of the save.
          settle: waits for the previous save, so that its rows are not picked again unchanged.
        """

        previous_done = self._snapshot_done

        def pick():
            # The order matters: the previous save copies its rows, batches up to `step` are tracked, settling the save
            # subtracts what it holds, and only then are rows picked.
            previous_done.wait()
            self.track_until(step)
            settle()
            return self.pick()

        self._picks[save_step] = self._picker.submit(pick)

    def await_pick(self, save_step: int) -> dict[str, list[np.ndarray]] | None:
        """Wait for the pick of a save and return it; None if its rows were not picked ahead."""
        for older in [step for step in self._picks if step < save_step]:
            self._picks.pop(older).result()  # its save did not happen: the rows stay unsaved
        future = self._picks.pop(save_step, None)
        # Re-raises, in the thread that saves, an error of the picker.
        return future.result() if future else None

    def drop_picks(self) -> None:
        """Discard picks made ahead, as rows change outside training; not to be called while a snapshot is saved."""
        # Lost shards have delayed these snapshots: the picker would wait for them, and this thread for the picker.
        unsaved = list(self._snapshots)
        self.end_snapshots()
        for save_step in list(self._picks):
            with contextlib.suppress(ShardsLost):  # a server died during the pick
                self.await_pick(save_step)
        for step in unsaved:  # they will be saved concurrently with later training
            self.begin_snapshot(step)

    def pick(self, tables: Tables | None = None) -> dict[str, list[np.ndarray]]:
        """Return the rows of the next save, {stack: i32[n] per shard}; only schemes that compare values need tables."""
        return self.trackers.pick(_values(tables))

    def copied(self, tables: Tables, picked: Mapping[str, list[np.ndarray]]) -> dict[str, Pick]:
        """Note that a save holds picked rows as they are now, with all batches up to its step; for `saved`."""
        return self.trackers.copied(picked, _values(tables))

    def saved(self, copied: Mapping[str, Pick]) -> None:
        """Mark rows as saved as they were copied, once their save is committed."""
        self.trackers.saved(copied)

    def restored(self, tables: Tables, shards: Sequence[int]) -> None:
        """Mark the rows of restored shards as equal to the saved ones."""
        self.trackers.restored(shards, _values(tables))

    def close(self) -> None:
        """End the picker thread."""
        self.end_snapshots()  # they will never be saved
        self._picker.shutdown()


def _values_of(plans):
    """Return the number of i32 in the rows and positions of plans."""
    return sum(plan.unique.size + sum(each.size for each in plan.inverse.values()) for plan in plans.values())


def without_rows(plan: Plan, dropped: np.ndarray, absent: int) -> Plan:
    """Remove some rows from a plan on the host, with all reads of them.

    Args:
      plan: Plan of one stack.
      dropped: bool[S, U], rows to remove.
      absent: V, marker for "no row".
    """
    shards, padded = dropped.shape
    keep = ~dropped & (np.arange(padded) < np.asarray(plan.count)[:, None])
    rows, unique = np.asarray(plan.unique), np.full(dropped.shape, absent, np.int32)
    for shard, kept in enumerate(keep):
        unique[shard, : kept.sum()] = rows[shard, kept]
    missing = shards * padded
    place = np.cumsum(keep, axis=1) - 1 + np.arange(shards)[:, None] * padded
    place = np.append(np.where(keep, place, missing).reshape(-1), missing).astype(np.int32)
    inverse = {name: place[np.asarray(positions)] for name, positions in plan.inverse.items()}
    return Plan(unique, inverse, keep.sum(axis=1).astype(np.int32), plan.invalid)


def in_ranges(plan, ranges):
    """Return bool[S, U]: whether each row of a plan lies in one of the ranges [(first, end)]."""
    unique = np.asarray(plan.unique)
    found = np.zeros(unique.shape, bool)
    for first, end in ranges:
        found |= (unique >= first) & (unique < end)
    return found


def ranges_of(spec, whole):
    """Return {stack: [(first, end)]}, the row ranges of the tables that are saved whole."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for name, stack in spec.stacks.items():
        for place, table in enumerate(stack.tables):
            if table in whole:
                ranges.setdefault(name, []).append((stack.offsets[place], stack.offsets[place + 1]))
    return ranges


def shard_rows(first, end, shard, shards):
    """Return i32[n], the rows of one shard among rows `first` to `end` of a stack."""
    return np.arange(first + (shard - first) % shards, end, shards, dtype=np.int32)
