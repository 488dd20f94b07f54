"""The pipeline: batches over host tables in flight in parallel, committed in order, results of one after the other.

    plan -> send inputs -> admit -> gather -> send rows -> COMMIT -> fetch -> write back        one batch, left to right
    planner  `---------------- loaders ----------------'   caller   fetchers  writers            who does it

The planner numbers the rows of each batch and knows their last writers. Loaders gather when all but the last W batches
are written (admission, the only throttle). The caller's thread commits in batch order: replay what is stale, update,
append to the ring (`jaxrec.oac.ring`). Writers put final rows in batch order, each its own shards.

Legend: W window, S shards, U padded unique rows a shard, E embedding width, K slot width, V rows of a stack.
"""

import collections
import contextlib
import dataclasses
import functools
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.embedding import HostTables, bucket, capacity_of, plan
from jaxrec.embedding.kernels import last_writers
from jaxrec.oac import ring as rings
from jaxrec.sharding import BATCH, EVERYWHERE, SPLIT, make_mesh, plan_specs, shardings
from jaxrec.step import run_hooks
from jaxrec.types import Plan, TrainState

MODES = ("sync", "async", "semisync", "oac")


def memory_bytes(window: int, rows: int, row_floats: int) -> dict[str, int]:
    """How much memory a pipeline needs beside tables, dense state and the update's own scratch memory.

    A batch has `rows` = S U padded rows of `row_floats` = E + K floats. The ring holds W batches with their row numbers;
    at most W + 1 batches are gathered and not yet written, and a commit holds one of them three times: as it was
    gathered, as it was repaired, and as the update left it:

        device: 4 rows (W (row_floats + 1) + (W + 3) row_floats)      host: 4 rows (W + 1) row_floats

    On a CPU both are the same memory, and copies between them are views: the device's figure alone counts. `async` and
    `semisync` keep what they read until it is written, and have no ring.

    Args:
      window: W.
      rows: S U of one stack.
      row_floats: E + K of that stack.

    Returns:
      {'device': bytes, 'host': bytes} of one stack.
    """
    device = window * (row_floats + 1) + (window + 3) * row_floats
    return {"device": 4 * rows * device, "host": 4 * rows * (window + 1) * row_floats}


@dataclasses.dataclass
class _Item:
    """One batch on its way; a stage fills what the next one reads."""

    number: int
    batch: Any
    plan: dict[str, Plan]
    source: dict[str, np.ndarray]  # where the ring holds each row, -1 where the gather will be right
    keep: dict[str, np.ndarray]  # bool[S, U], the rows to write back
    inputs: Any = None  # (plan, batch) on the device
    read: Any = None  # what the gather read, on the host, for `add`
    rows: Any = None  # (rows, source, place or None) on the device
    read_version: int = -1
    loaded: bool = False
    back: Any = None  # ({stack: Plan}, rows) to write, first on the device, then on the host
    fetched: bool = False


class LastWriters:
    """The last batch of every row and where the row was in it: 8 bytes a row of host memory.

    Args:
      tables: whose rows.
      window: how many batches back a writer counts.
      depth: slots of the ring, at least the window and 1.
    """

    def __init__(self, tables: HostTables, window: int, depth: int):
        self.window, self.depth = window, depth
        self._tables = {
            name: (np.full((stack.shards, stack.rows_per_shard), -(2**31), np.int32),
                   np.empty((stack.shards, stack.rows_per_shard), np.int32))
            for name, stack in tables.spec.stacks.items()
        }  # fmt: skip

    def sources(self, plans: dict[str, Plan], number: int) -> dict[str, np.ndarray]:
        """Where the ring will hold each row of a batch, i32[S, U], -1 where it needs not; call it in batch order."""
        sources = {}
        for name, p in plans.items():
            sources[name] = np.empty(p.unique.shape, np.int32)
            shards = len(p.unique)
            for shard, (writer, place) in enumerate(zip(*self._tables[name], strict=True)):
                last_writers(
                    p.unique[shard], shards, p.count[shard], number, self.window, self.depth, writer, place,
                    sources[name][shard],
                )  # fmt: skip
        return sources


class Pipeline:
    """Trains over `HostTables` with up to W batches in flight.

    with Pipeline(state, update, mode="oac", window=8) as pipeline:
        for state, metrics in pipeline.run(batches):
            ...
    state = pipeline.state

    Modes: `sync` gathers a batch when the one before it is written; only rows wait, plans and inputs go ahead. `oac`
    gives bitwise the same results with W batches in flight. `async` repairs nothing and writes with `add`, as Marius
    (OSDI 2021): rows are up to W batches old. `semisync` is exactly one batch stale and repeatable, as TorchRec's
    SemiSync: batch t sees rows after batch t - 2, and its change is added in order. All modes run the same compiled
    update.

    Between batches `state.tables` lags behind `state.dense` by up to W + 1 batches: `drain` before reading them.

    Args:
      state: TrainState with HostTables; its dense half is donated.
      update: (dense, rows, plan, batch) -> dense', rows', metrics, as from `make_update`; not jitted.
      mode: one of MODES.
      window: W, how many batches before it may be unwritten when a batch is gathered; fixed in sync (0) and semisync
        (1).
      mesh: from `make_mesh`; one device if None.
      send: (tree of arrays, tree of shardings) -> tree on the device, in a loader's thread; `jax.device_put` if None.
      fetch: (tree on the device) -> tree of numpy arrays, in a fetcher's thread; starts a copy and waits if None.
      loaders, fetchers, writers: threads of each kind; a writer has its own shards.
      ahead: how many batches are planned, and their inputs sent, before they are admitted.
      validation: 'planned' finds stale rows on the host, where plans are made; 'device' compares row numbers and
        versions on the device, as the paper says. Same values.
      skip_stale_reads: do not gather and send rows that the ring will patch.
      skip_rewritten: do not fetch and write rows that a batch within the window, planned already, will write again.

    Memory: see `memory_bytes`, and 8 bytes a row of the tables for the last writers.

    Errors:
      ValueError: tables that are not HostTables; an unknown mode, a window or number of threads out of range.
    """

    def __init__(
        self,
        state: TrainState,
        update: Callable,
        *,
        mode: str = "oac",
        window: int | None = None,
        mesh=None,
        send: Callable | None = None,
        fetch: Callable | None = None,
        loaders: int = 2,
        fetchers: int = 1,
        writers: int = 1,
        ahead: int = 2,
        validation: str = "planned",
        skip_stale_reads: bool = False,
        skip_rewritten: bool = False,
    ):
        if not isinstance(state.tables, HostTables):
            raise ValueError("Pipeline is for HostTables; tables on the device need none: use `make_train_step`.")
        self.mode, self.window = mode, _check_window(mode, window)
        for name, number in {"loaders": loaders, "fetchers": fetchers, "writers": writers, "ahead": ahead}.items():
            if number < 1:
                raise ValueError(f"{name}={number} must be at least 1.")
        if writers > state.tables.spec.shards:
            raise ValueError(f"writers={writers} must not be more than the shards, {state.tables.spec.shards}.")
        if validation not in ("planned", "device"):
            raise ValueError(f"validation={validation!r} must be 'planned' or 'device'.")
        self._repairs = mode == "oac" and self.window > 0
        if (skip_stale_reads or skip_rewritten) and (validation == "device" or not self._repairs):
            raise ValueError("skip_stale_reads and skip_rewritten need mode='oac', window > 0, validation='planned'.")
        self.state, self.tables = state, state.tables
        self.counters: collections.Counter = collections.Counter()
        self._validation, self._skip_reads, self._skip_writes = validation, skip_stale_reads, skip_rewritten
        self._send, self._fetch = send or jax.device_put, fetch or _fetch
        self._threads_of = {"loader": loaders, "fetcher": fetchers, "writer": writers}
        # A write may be skipped only when the batches up to W later are known.
        self._ahead = ahead + (self.window + 1 if skip_rewritten else 0)
        self._depth = max(1, self.window)
        planned = self._repairs and validation == "planned"
        self._last = LastWriters(self.tables, self.window, self._depth) if planned else None
        mesh = mesh or make_mesh()
        plans = plan_specs(self.tables.spec.stacks)
        self._placement = shardings({"inputs": (plans, BATCH), "rows": SPLIT, "number": EVERYWHERE}, mesh)
        self._update, self._pure_update = jax.jit(update, donate_argnums=0), update
        self._replay, self._append, self._validate, self._take = _programs(mesh, tuple(self.tables.spec.stacks))
        self._compiled_before = 0
        self._compiled_before = self.compilations
        self._ring: rings.Ring | None = None
        self._ring_shardings = shardings(SPLIT, mesh)
        self._capacity: dict[str, int] | None = None
        self._travel: dict[tuple[str, str], int] = {}  # (direction, stack) -> rows a shard, without gaps
        self._checked: set = set()
        self._changed = threading.Condition()
        self._cuts: dict[int, Callable] = {}
        self._first_step = int(state.dense.step)
        self._run: Generator | None = None
        self._reset(0)

    @property
    def compilations(self) -> int:
        """How many programs were compiled so far: one more set whenever a capacity grows."""
        jitted = (self._update, self._replay, self._append, self._validate, self._take)
        return sum(function._cache_size() for function in jitted) - self._compiled_before

    def run(self, batches: Iterable, hooks: Sequence[Callable] = ()) -> Iterator[tuple[TrainState, dict]]:
        """Trains on all batches.

        Args:
          batches: Batch after Batch, of one size; consumed by the planner's thread, ahead of what is committed.
          hooks: (state, step, plan, metrics) -> state, run in batch order by the thread that iterates.

        Yields:
          (TrainState, metrics) after every batch. The dense half is donated to the next step. Metrics are those of
          the update, and in mode 'oac' 'stale_rows'.

        Errors:
          Whatever a stage raised, with a note that names stage and batch. Batches committed before it are written.
        """
        if self._run is not None:
            raise ValueError("this pipeline is running: close the iterator of the run before, or exhaust it.")
        self._run = self._iterate(batches, hooks)
        return self._run

    def _iterate(self, batches, hooks):
        # Numbers go on behind everything planned before, so that no row of an earlier run counts as in flight.
        self._reset(self._planned + self.window + 1)
        threads = [self._start(0, "plan", self._plan_all, batches)]
        threads += [self._start(i, "load", self._load_all) for i in range(self._threads_of["loader"])]
        threads += [self._start(i, "fetch", self._fetch_all) for i in range(self._threads_of["fetcher"])]
        threads += [self._start(i, "write back", self._write_all, i) for i in range(self._threads_of["writer"])]
        try:
            while (item := self._next_loaded()) is not None:
                try:
                    metrics = self._commit(item)
                    step = self._first_step + self._steps
                    self.state = run_hooks(hooks, self.state, step, item.plan, metrics)
                    self._begin_cut(step)
                except Exception as error:
                    error.add_note(self._where("commit", item.number))
                    raise
                yield self.state, metrics
        finally:
            self._finish(threads)
        self._raise_failure()

    def close(self) -> None:
        """Ends a run: what is committed is written, what is not is dropped; no thread is left. Then one can go on."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close()

    def drain(self) -> HostTables:
        """Waits until all committed batches are written, and returns the tables, now those of `state.dense`.

        Call it on the committing thread, for example in a hook that evaluates. Batches gathered already stay valid.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._watermark() >= self._committed)
        self._raise_failure()
        self._write_ring(self._ring)
        return self.tables

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[HostTables]:
        """Gives the tables to the caller alone, to change them: drains, and afterwards gathers anew what was ahead.

        For the committing thread. Whatever the ring and the last-writer table say of earlier batches is forgotten.
        """
        self.drain()
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._gathering)
        try:
            yield self.tables
        finally:
            with self._changed:
                self._epoch += 1
                self._claimed = self._floor = self._committed
                for item in self._items.values():
                    item.loaded, item.rows = False, None
                    item.source = self._newer_than_floor(item.number, item.source)
                self._paused = False
                self._changed.notify_all()

    def cut(self, step: int, save: Callable[[TrainState], Any]) -> None:
        """Announces a consistent state after a step, to be saved while training goes on.

        When the step is committed its dense state is copied; when its rows are written, `save` runs in a thread of
        its own, with tables that stand exactly after that step. Until it returns, later batches are not written, and
        compute goes on until the window is full.

        Args:
          step: a step that is not committed yet.
          save: (TrainState) -> anything, for example `Checkpointer.save`.

        Errors:
          ValueError: the step lies behind.
        """
        if step <= self._first_step + self._steps:
            raise ValueError(f"step={step} is committed already ({self._first_step + self._steps} are).")
        self._cuts[step] = save

    # The stages, each the body of a thread; what they share is guarded by self._changed.

    def _plan_all(self, at, batches):
        iterator = iter(batches)
        while True:
            number = at[0] = self._planned
            batch = next(iterator, None)
            if batch is None:
                break
            if not self._wait_upstream(lambda: self._planned < self._committed + self.window + 1 + self._ahead):
                return
            plans = plan(self.tables.spec, batch.ids, self._capacity)
            self._capacity = capacity_of(plans)
            source = self._last.sources(plans, number) if self._last else {}
            keep = {}
            with self._changed:
                if number - self.window < self._floor:
                    source = self._newer_than_floor(number, source)
                if self._skip_writes:
                    keep = {n: np.arange(p.unique.shape[1]) < p.count[:, None] for n, p in plans.items()}
                    self._mark_rewritten(number, source)
                self._items[number] = _Item(number, batch, plans, source, keep)
                self._planned += 1
                self._changed.notify_all()
        with self._changed:
            self._end = self._planned
            self._changed.notify_all()

    def _load_all(self, at):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stop or (not self._paused and self._claimed < self._planned))
                if self._stop:
                    return
                item, epoch = self._items[self._claimed], self._epoch
                at[0] = item.number
                self._claimed += 1
            if item.inputs is None:
                item.inputs = self._send((item.plan, item.batch), self._placement["inputs"])
            with self._changed:
                admitted = lambda: not self._paused and self._watermark() >= item.number - self.window
                self._changed.wait_for(lambda: self._stop or self._epoch != epoch or admitted())
                if self._stop:
                    return
                if self._epoch != epoch:
                    continue
                self._gathering += 1
                item.read_version = self._watermark() - 1
            rows = self._gather(item)
            with self._changed:
                self._gathering -= 1
                if self._epoch == epoch:
                    item.rows, item.loaded = rows, True
                self._changed.notify_all()
            del item, rows  # a waiting thread keeps no batch alive

    def _gather(self, item):
        plans, place = item.plan, None
        if self._skip_reads:
            plans, place = self._without_gaps("to device", item.plan, {n: s < 0 for n, s in item.source.items()})
        read = self.tables.read(plans)
        with self._changed:
            self._gathered = max(self._gathered, item.number)
            self._changed.notify_all()
        if self.mode in ("async", "semisync"):
            item.read = read
        return self._send((read, item.source, place or {}), self._placement["rows"])

    def _commit(self, item):
        if (shapes := tuple(sorted(capacity_of(item.plan).items()))) not in self._checked:
            self._check_shapes(item)
            self._checked.add(shapes)
        rows, source, place = item.rows
        plans, batch = item.inputs
        with _uninterrupted():
            if self._repairs:
                rows, source = self._repair(item, rows, source, place)
            dense, new, metrics = self._update(self.state.dense, rows, plans, batch)
            self.state = TrainState(dense, self.tables)
            if self._repairs:
                unique = {name: p.unique for name, p in plans.items()}
                self._ring = self._append(self._ring, unique, new, np.int32(item.number))
                metrics = {**metrics, "stale_rows": _count_stale(item, source)}
            item.back = item.plan, new
            with self._changed:
                item.rows = item.inputs = None
                self._committed += 1
                self._steps += 1
                self._changed.notify_all()
        return metrics

    def _repair(self, item, rows, source, place):
        if self._ring is None:
            whole = {
                name: jax.tree.map(
                    lambda leaf, p=p: np.empty((*p.unique.shape, leaf.shape[-1]), np.float32), rows[name]
                )
                for name, p in item.plan.items()
            }
            self._ring = jax.device_put(rings.init(whole, self._depth), self._ring_shardings)
        if any(leaf.shape[2] < item.plan[name].unique.shape[1] for name, leaf in self._ring.unique.items()):
            self._ring = jax.device_put(rings.resize(self._ring, capacity_of(item.plan)), self._ring_shardings)
        if self._skip_reads:
            rows = self._take(rows, place)
        if self._validation == "device":
            source = self._validate(self._ring, item.inputs[0], np.int32(max(item.read_version, self._floor - 1)))
        return self._replay(self._ring, rows, source), source

    def _fetch_all(self, at):
        while True:
            with self._changed:
                number = self._fetching
                self._fetching += 1
            at[0] = number
            if not self._wait_downstream(number, lambda n=number: n < self._committed):
                return
            item = self._items[number]
            plans, rows = item.back
            if self._skip_writes:
                plans, index = self._without_gaps("to host", plans, item.keep, packing=True)
                rows = self._take(rows, self._send(index, self._placement["rows"]))
            rows = self._fetch(rows)
            with self._changed:
                self._count_traffic(item, plans)
                item.back, item.fetched = (plans, rows), True
                self._changed.notify_all()
            del item, plans, rows

    def _write_all(self, at, writer):
        shards = range(writer, self.tables.spec.shards, self._threads_of["writer"])
        while (number := self._next_to_write(writer)) is not None:
            at[0] = number
            self._write(self._items[number], shards)
            with self._changed:
                self._mark_written(number, writer)
                if min(self._written) > number:
                    self._items.pop(number, None)
                self._changed.notify_all()

    def _write(self, item, shards):
        plans, rows = item.back
        if self.mode in ("async", "semisync"):
            self.tables.add(plans, rows, item.read, shards)
        else:
            self.tables.put(plans, rows, shards)

    def _mark_written(self, number, writer):
        self._written[writer] = number + 1

    def _next_to_write(self, writer):
        """The batch that a writer writes next, in order, when it is fetched and not held back; None at the end."""
        number = self._written[writer]

        def ready():
            fetched = number < self._committed and self._items[number].fetched
            # One step stale exactly: the batch behind has read before this one writes.
            read = self.mode != "semisync" or self._gathered > number or number + 1 == self._end or self._stop
            return fetched and read and number < self._hold

        return number if self._wait_downstream(number, ready) else None

    def _watermark(self):
        """A + 1: all batches before this one are written, by all writers."""
        return min(self._written)

    def _begin_cut(self, step):
        save = self._cuts.pop(step, None)
        if save is None:
            return
        with self._changed:  # one cut at a time
            self._changed.wait_for(lambda: self._broken or self._hold == np.inf)
            self._hold = self._committed
        copy = jax.tree.map(jnp.copy, (self.state.dense, self._ring if self._skip_writes else None))
        self._cut_thread = self._start(0, "cut", self._save_cut, self._committed, *copy, save)

    def _save_cut(self, at, number, dense, ring, save):
        at[0] = number - 1
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._watermark() >= number)
        try:
            if not self._broken:
                self._write_ring(ring)
                save(TrainState(dense, self.tables))
        finally:
            with self._changed:
                self._hold = np.inf
                self._changed.notify_all()

    def _write_ring(self, ring):
        """Writes what was not written back because a later batch would: the newest value of every row in the ring."""
        if not self._skip_writes or ring is None:
            return
        ring = jax.tree.map(np.asarray, ring)
        newest_first = [slot for slot in np.argsort(-ring.version[0]) if ring.version[0, slot] >= self._floor]
        plans, rows = {}, {}
        for name, unique in ring.unique.items():
            flat = unique[:, newest_first].reshape(len(unique), -1)
            places = [np.unique(shard, return_index=True)[1] for shard in flat]  # of a row's newest value
            places = [
                at[shard[at] < self.tables.spec.stacks[name].rows] for at, shard in zip(places, flat, strict=True)
            ]
            count = np.array([len(at) for at in places], np.int32)
            index = np.stack([np.pad(at, (0, flat.shape[1] - len(at))) for at in places])
            plans[name] = Plan(np.take_along_axis(flat, index, 1), {}, count, np.int32(0))
            newest = lambda leaf, at=index[..., None]: np.take_along_axis(
                leaf[:, newest_first].reshape(len(leaf), -1, leaf.shape[-1]), at, 1
            )
            rows[name] = jax.tree.map(newest, ring.rows[name])
        self.tables.put(plans, rows)

    def _mark_rewritten(self, number, source):
        """This batch will write these rows: the batch that wrote them last, if not committed yet, needs not."""
        for name, where in source.items():
            slot, place = np.divmod(where, where.shape[1])
            slot[where < 0] = -1
            for back in range(1, self.window + 1):
                before = self._items.get(number - back)
                if before is not None and before.number >= self._committed:
                    shard, at = np.nonzero(slot == before.number % self._depth)
                    before.keep[name][shard, place[shard, at]] = False

    def _without_gaps(self, direction, plans, keep, packing=False):
        """Plans of the kept rows alone, and their places: of each row among the kept ones, or the other way round."""
        smaller, places = {}, {}
        for name, p in plans.items():
            mask = keep[name] & (np.arange(p.unique.shape[1]) < p.count[:, None])
            count = mask.sum(axis=1).astype(np.int32)
            with self._changed:
                old = self._travel.get((direction, name), 0)
                size = old if count.max() <= old else min(bucket(int(1.1 * count.max()) + 1), p.unique.shape[1])
                self._travel[direction, name] = size = max(size, int(count.max()), 1)
            unique = np.full((len(mask), size), self.tables.spec.stacks[name].rows, np.int32)
            index = np.zeros((len(mask), size), np.int32)
            for shard, row in enumerate(mask):
                at = np.flatnonzero(row)
                index[shard, : len(at)], unique[shard, : len(at)] = at, p.unique[shard, at]
            smaller[name] = Plan(unique, {}, count, np.int32(0))
            places[name] = index if packing else np.maximum(np.cumsum(mask, axis=1, dtype=np.int32) - 1, 0)
        return smaller, places

    def _newer_than_floor(self, number, source):
        """The sources of a batch without those in batches before the floor, which the tables know better."""

        def only_newer(where):
            base = number - self.window
            writer = base + (where // where.shape[1] - base) % self._depth  # the one batch of the window in that slot
            return np.where((where >= 0) & (writer >= self._floor), where, -1).astype(np.int32)

        return {name: only_newer(where) for name, where in source.items()}

    def _count_traffic(self, item, written):
        rows = {name: int(p.count.sum()) for name, p in item.plan.items()}
        floats = {name: self._row_floats(name) for name in rows}
        stale = {name: int((item.source[name] >= 0).sum()) if item.source else 0 for name in rows}
        back = {name: int(p.count.sum()) for name, p in written.items()}
        self.counters.update(
            batches=1,
            rows=sum(rows.values()),
            stale_rows=sum(stale.values()),
            bytes_sent=sum(4 * floats[n] * (rows[n] - self._skip_reads * stale[n]) for n in rows),
            bytes_fetched=sum(4 * floats[n] * back[n] for n in rows),
            bytes_without_savings=sum(8 * floats[n] * rows[n] for n in rows),
        )

    def _row_floats(self, name):
        return sum(array.shape[1] for array in self.tables.shards[name][0].values())

    def _check_shapes(self, item):
        def shapes(tree):
            return jax.tree.map(lambda leaf: (tuple(leaf.shape), str(leaf.dtype)), tree)

        rows = {
            name: type(r)(
                *jax.tree.map(
                    lambda leaf, n=name: jax.ShapeDtypeStruct((*item.plan[n].unique.shape, leaf.shape[-1]), leaf.dtype),
                    tuple(r),
                )
            )
            for name, r in item.rows[0].items()
        }
        dense, new, _ = jax.eval_shape(self._pure_update, self.state.dense, rows, *item.inputs)
        for what, before, after in [("dense state", self.state.dense, dense), ("rows", rows, new)]:
            if shapes(before) != shapes(after):
                raise ValueError(
                    f"the update changes the shapes of the {what}: from {shapes(before)} to {shapes(after)}. A step "
                    "must return what it was given, in shape and dtype."
                )

    # Threads: start, wait, stop, raise.

    def _reset(self, number):
        self._items: dict[int, _Item] = {}
        self._begin = number
        self._planned = self._claimed = self._committed = self._fetching = self._floor = number
        self._written = [number] * self._threads_of["writer"]
        self._gathered, self._end, self._hold = number - 1, None, np.inf
        self._gathering, self._epoch, self._paused = 0, 0, False
        self._stop = self._no_more_commits = self._broken = False
        self._failure: BaseException | None = None
        self._cut_thread: threading.Thread | None = None
        self._first_step, self._steps = int(self.state.dense.step), 0

    def _start(self, index, stage, body, *args):
        def guarded():
            at = [self._committed]  # the batch in work, for the note
            try:
                body(at, *args)
            except BaseException as error:
                error.add_note(self._where(stage, at[0]))
                with self._changed:
                    self._failure = self._failure or error
                    self._stop = True
                    self._broken = self._broken or stage in ("fetch", "write back")
                    self._changed.notify_all()

        thread = threading.Thread(target=guarded, name=f"oac-{stage}-{index}", daemon=True)
        thread.start()
        return thread

    def _where(self, stage, number):
        return f"in stage '{stage}' of the pipeline, batch {number - self._begin} of this run"

    def _next_loaded(self):
        with self._changed:
            number = self._committed
            self._changed.wait_for(
                lambda: (
                    self._failure is not None
                    or number == self._end
                    or (
                        number in self._items
                        and self._items[number].loaded
                        and (not self._skip_writes or self._end is not None or self._planned > number + self.window)
                    )
                )
            )
            return None if self._failure is not None or number == self._end else self._items[number]

    def _wait_upstream(self, ready):
        with self._changed:
            self._changed.wait_for(lambda: self._stop or ready())
            return not self._stop

    def _wait_downstream(self, number, ready):
        """Waits for work that must be done even when the run stops, if its batch is committed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._broken or ready() or (self._no_more_commits and number >= self._committed)
            )
            return not self._broken and ready()

    def _finish(self, threads):
        with self._changed:
            self._stop = self._no_more_commits = True
            self._changed.notify_all()
        for thread in [*threads, self._cut_thread]:
            if thread is not None:
                thread.join()
        self._write_ring(None if self._broken else self._ring)
        self._run = None

    def _raise_failure(self):
        if self._failure is not None:
            raise self._failure


def _check_window(mode, window):
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} must be one of {MODES}.")
    fixed = {"sync": 0, "semisync": 1}
    if mode in fixed:
        if window not in (None, fixed[mode]):
            raise ValueError(f"window={window} does not fit mode={mode!r}, whose window is {fixed[mode]}.")
        return fixed[mode]
    window = 8 if window is None else window
    if window < 0:
        raise ValueError(f"window={window} must be 0 (one batch after the other) or more.")
    return window


@functools.lru_cache
def _programs(mesh, stacks):
    """The ring's functions, compiled once a mesh, however many pipelines there are."""
    plans = plan_specs(stacks)
    on_mesh = lambda function, *inputs: jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=SPLIT)
    return (
        jax.jit(on_mesh(rings.replay, SPLIT, SPLIT, SPLIT)),
        jax.jit(on_mesh(rings.append, SPLIT, SPLIT, SPLIT, EVERYWHERE), donate_argnums=0),
        jax.jit(on_mesh(rings.validate, SPLIT, plans, EVERYWHERE)),
        jax.jit(on_mesh(rings.spread, SPLIT, SPLIT)),
    )


def _fetch(tree):
    for leaf in jax.tree.leaves(tree):
        leaf.copy_to_host_async()
    return jax.tree.map(np.asarray, tree)


def _count_stale(item, source):
    if item.source:
        return np.int32(sum(int((where >= 0).sum()) for where in item.source.values()))
    return sum(jnp.sum(where >= 0) for where in source.values())


@contextlib.contextmanager
def _uninterrupted():
    """Puts Ctrl-C off until a batch is committed as a whole; only the main thread gets it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = []
    old = signal.signal(signal.SIGINT, lambda number, frame: asked.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
    if asked and callable(old):
        old(*asked[0])
