"""The pipeline: batches over host tables in flight in parallel, committed in order, results of one after the other.

    plan -> send inputs -> admit -> gather -> send rows -> COMMIT -> fetch -> write back        one batch, left to right
    planner  `---------------- loaders ----------------'   caller   fetchers  writers            who does it

The planner numbers the rows of each batch and knows their last writers (`stale`). Loaders gather when all but the last
W batches are written (`flow`, the only throttle). The caller's thread commits in batch order: replay what is stale,
update, append to the ring (`ring`). Writers put final rows in batch order, each its own shards.

Legend: W window, S shards, U padded unique rows a shard, C rows that travel, E embedding width, K slot width.
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

from jaxrec.embedding import HostTables, capacity_of, plan
from jaxrec.embedding.host import without_gaps
from jaxrec.oac import ring as rings
from jaxrec.oac.flow import Flow
from jaxrec.oac.sizes import MODES, VALIDATIONS, Travelling, nbytes
from jaxrec.oac.stale import LastWriters, found, mark_rewritten, newest_rows, written_since
from jaxrec.sharding import BATCH, EVERYWHERE, SPLIT, as_mesh, plan_specs, shardings
from jaxrec.step import run_hooks
from jaxrec.types import Plan, TrainState


@dataclasses.dataclass
class _Item:
    """One batch on its way; each stage fills what the next one reads."""

    number: int
    batch: Any
    plan: dict[str, Plan]
    source: dict[str, np.ndarray]  # where the ring holds each row, -1 where the gather will be right
    keep: dict[str, np.ndarray]  # bool[S, U], the rows to write back
    inputs: Any = None  # (plan, batch) on the device
    read: Any = None  # what the gather read, on the host, for `add`
    rows: Any = None  # (rows, source, place of each row among those sent) on the device
    watermark: int = 0  # when the gather began
    stale: Any = 0  # rows whose last writer was not written by then
    patched: Any = 0  # rows that the ring gives; on the device if they are found there
    back: Any = None  # (plans, rows) to write: on the device, then on the host


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

    Memory: see `memory_bytes`.

    Attributes:
      counters: of all runs: `batches` fetched, their `rows`, `stale_rows` and `patched_rows`; `bytes_sent` and
        `bytes_fetched`, all that was handed to `send` and `fetch`; `bytes_without_savings`, what that would have been
        with both savings off.

    Errors:
      ValueError: tables that are not HostTables; an unknown mode, a window or number of threads out of range.
    """

    flow_type = Flow

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
        if validation not in VALIDATIONS:
            raise ValueError(f"validation={validation!r} must be 'planned' or 'device'.")
        self._repairs = mode == "oac" and self.window > 0
        if (skip_stale_reads or skip_rewritten) and (validation == "device" or not self._repairs):
            raise ValueError("skip_stale_reads and skip_rewritten need mode='oac', window > 0, validation='planned'.")
        self.state, self.tables = state, state.tables
        self.counters: collections.Counter = collections.Counter()
        self._skip_reads, self._skip_writes = skip_stale_reads, skip_rewritten
        self._send, self._fetch = send or jax.device_put, fetch or _fetch
        self._loaders, self._fetchers, self._writers, self._ahead = loaders, fetchers, writers, ahead
        # A write may be skipped only when the batches up to W later are known.
        self._lookahead = self.window if skip_rewritten else 0
        self._depth = max(1, self.window)
        planned = self._repairs and validation == "planned"
        self._last = LastWriters(self.tables.spec, self.window, self._depth) if planned else None
        mesh = as_mesh(mesh)
        self._placement = shardings({"inputs": (plan_specs(self.tables.spec.stacks), BATCH), "rows": SPLIT}, mesh)
        self._update, self._pure_update = jax.jit(update, donate_argnums=0), update
        self._replay, self._append, self._validate, self._take, self._new_ring, self._widen = _programs(
            mesh, tuple(self.tables.spec.stacks)
        )
        self.compilations = 0  # how many programs its runs have compiled: some more whenever a capacity grows
        self._ring: rings.Ring | None = None
        self._capacity: dict[str, int] | None = None
        self._travelling: dict = collections.defaultdict(Travelling)  # (direction, stack) -> C
        self._checked: set = set()
        self._cuts: dict[int, Callable] = {}
        self._running: Generator | None = None
        self._flow: Any = None
        self._begin_run()

    def _begin_run(self):
        # Numbers go on behind everything planned before, so that no row of an earlier run counts as in flight.
        first = 0 if self._flow is None else self._flow.planned + self.window + 1
        one_stale, ahead = self.mode == "semisync", self._ahead + self._lookahead
        self._flow = self.flow_type(self.window, ahead, self._writers, first, one_stale)
        self._items: dict[int, _Item] = {}
        self._first_step = int(self.state.dense.step)
        self._cut_thread: threading.Thread | None = None

    def _programs_compiled(self):
        jitted: Any = (self._update, self._replay, self._append, self._validate, self._take)
        return sum(f._cache_size() for f in jitted if hasattr(f, "_cache_size"))

    @property
    def step(self) -> int:
        """How many steps the state has seen."""
        return self._first_step + self._flow.committed - self._flow.first

    def run(self, batches: Iterable, hooks: Sequence[Callable] = ()) -> Iterator[tuple[TrainState, dict]]:
        """Trains on all batches.

        Args:
          batches: Batch after Batch, of one size; consumed by the planner's thread, ahead of what is committed.
          hooks: (state, step, plan, metrics) -> state, run in batch order by the thread that iterates.

        Yields:
          (TrainState, metrics) after every batch. The dense half is donated to the next step. Metrics are those of
          the update, and where rows are repaired 'stale_rows', whose last writer was not written when the gather
          began, and 'patched_rows', which were taken from the ring.

        Errors:
          Whatever a stage raised, with a note that names stage and batch. Batches committed before it are written.
        """
        if self._running is not None:
            raise ValueError("this pipeline is running: close it, or exhaust the iterator of the run before.")
        self._running = self._iterate(batches, hooks)
        return self._running

    def _iterate(self, batches, hooks):
        self._begin_run()
        flow, compiled_before = self._flow, self._programs_compiled()
        threads = [self._start("plan", self._plan_all, batches)]
        threads += [self._start("load", self._load_all) for _ in range(self._loaders)]
        threads += [self._start("fetch", self._fetch_all) for _ in range(self._fetchers)]
        threads += [self._start("write back", self._write_all, writer) for writer in range(self._writers)]
        try:
            while (number := flow.wait_to_commit(self._lookahead)) is not None:
                item = self._items[number]
                try:
                    metrics = self._commit(item)
                    self.state = run_hooks(hooks, self.state, self.step, item.plan, metrics)
                    self._begin_cut()
                except Exception as error:
                    error.add_note(self._where("commit", number))
                    raise
                yield self.state, metrics
        finally:
            flow.finish()
            for thread in [*threads, self._cut_thread]:
                if thread is not None:
                    thread.join()
            if not flow.broken:
                self._write_rest(self._ring)
            self.compilations += self._programs_compiled() - compiled_before
            self._running = None
        flow.raise_failure()

    @property
    def running(self) -> bool:
        """Whether a run has begun and not ended."""
        return self._running is not None

    def close(self) -> None:
        """Ends a run: what is committed is written, what is not is dropped; no thread is left. Then one can go on."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close()

    def drain(self) -> HostTables:
        """Waits until all committed batches are written, and returns the tables, now those of `state.dense`.

        Call it on the committing thread, for example in a hook that evaluates. Batches gathered already stay valid.
        """
        self._flow.drain()
        self._flow.raise_failure()
        self._write_rest(self._ring)
        return self.tables

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[HostTables]:
        """Gives the tables to the caller alone, to change them: drains, and afterwards gathers anew what was ahead.

        For the committing thread. What the ring and the last-writer table say of earlier batches is forgotten.
        """
        self.drain()
        if self._cut_thread is not None:  # it may still be saving
            self._cut_thread.join()
            self._flow.raise_failure()
        self._flow.pause()
        try:
            yield self.tables
        finally:
            self._flow.restart(self._void)

    def _void(self):
        for item in self._items.values():
            item.rows = None
            item.source = written_since(item.source, item.number, self.window, self._flow.floor)

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
        if step <= self.step:
            raise ValueError(f"step={step} is committed already ({self.step} are).")
        self._cuts[step] = save

    def _begin_cut(self):
        if (save := self._cuts.pop(self.step, None)) is not None:
            number = self._flow.hold_writes()
            copy = jax.tree.map(jnp.copy, (self.state.dense, self._ring if self._skip_writes else None))
            self._cut_thread = self._start("cut", self._save_cut, number, *copy, save)

    def _save_cut(self, at, number, dense, ring, save):
        at[0] = number - 1
        try:
            if self._flow.wait_for_hold():
                self._write_rest(ring)
                save(TrainState(dense, self.tables))
        finally:
            self._flow.release_writes()

    # The stages. Each is the body of a thread but for the commit; at[0] is the batch in work.

    def _plan_all(self, at, batches):
        batches, flow = iter(batches), self._flow
        while True:
            number = at[0] = flow.planned
            batch = next(batches, None)
            if batch is None:
                break
            if not flow.wait_to_plan():
                return
            plans = plan(self.tables.spec, batch.ids, self._capacity)
            self._capacity = capacity_of(plans)
            source = self._last.sources(plans, number) if self._last else {}
            with flow.changed:
                if number - self.window < flow.floor:
                    source = written_since(source, number, self.window, flow.floor)
                keep = {}
                if self._skip_writes:
                    keep = {name: _used(p) for name, p in plans.items()}
                    mark_rewritten(self._keep_of, source, number, self.window)
                self._items[number] = _Item(number, batch, plans, source, keep)
                flow.planned += 1
                flow.changed.notify_all()
        with flow.changed:
            flow.end = flow.planned
            flow.changed.notify_all()

    def _keep_of(self, number):
        return self._items[number].keep if number >= self._flow.committed and number in self._items else None

    def _load_all(self, at):
        while (claim := self._flow.claim()) is not None:
            at[0] = claim[0]
            self._load(self._items[claim[0]], *claim)

    def _load(self, item, number, epoch):
        if item.inputs is None:
            item.inputs = self._send_counted((item.plan, item.batch), "inputs")
        watermark = self._flow.admit(number, epoch)
        if watermark is not None:
            rows = self._gather(item)
            since = max(watermark, self._flow.floor)
            stale = found(written_since(item.source, number, self.window, since))

            def store():
                item.rows, item.watermark = rows, watermark
                item.stale, item.patched = stale, found(item.source)

            self._flow.tell_loaded(number, epoch, store)

    def _gather(self, item):
        plans, place, floor = item.plan, {}, self._flow.floor
        if self._skip_reads and item.number - self.window >= floor:  # before that, little is in the ring
            fresh = {name: where < 0 for name, where in item.source.items()}
            if (some := self._without_gaps("sent", plans, fresh)) is not None:
                plans, _, place = some
        read = self.tables.read(plans)
        self._flow.tell_gathered(item.number)
        if self.mode in ("async", "semisync"):
            item.read = read
        whole = self._rows_bytes(item.plan) + nbytes(item.source)
        return self._send_counted((read, item.source, place), "rows", whole)

    def _commit(self, item):
        """Validate, replay, update, append: as `ring.commit`, with the update a program of its own in all modes."""
        (rows, source, place), (plans, batch) = item.rows, item.inputs
        self._check_shapes(item)
        with _uninterrupted():
            if self._repairs:
                if place:
                    rows = self._take(rows, place)
                self._fit_ring(item, rows)
                rows, source = self._repair(item, rows, source)
            dense, new, metrics = self._update(self.state.dense, rows, plans, batch)
            self.state = TrainState(dense, self.tables)
            if self._repairs:
                unique = {name: p.unique for name, p in plans.items()}
                self._ring = self._append(self._ring, unique, new, np.int32(item.number))
                if self._last is None:  # the device has found what the gather could not see, and no more
                    item.stale = item.patched = found(source)
                metrics = {**metrics, "stale_rows": item.stale, "patched_rows": item.patched}
            item.back, item.rows, item.inputs = (item.plan, new), None, None
            with self._flow.changed:
                self._flow.loaded.discard(item.number)
                self._flow.committed += 1
                self._flow.changed.notify_all()
        return metrics

    def _repair(self, item, rows, source):
        if self._last is None:
            written = max(item.watermark, self._flow.floor) - 1
            source = self._validate(self._ring, item.inputs[0], np.int32(written))
        return self._replay(self._ring, rows, source), source

    def _fit_ring(self, item, rows):
        """Makes the ring with the first batch, and widens it when a capacity has grown."""
        capacity = capacity_of(item.plan)
        if self._ring is None:
            self._ring = self._new_ring(rows, self._depth)
        elif any(leaf.shape[2] != capacity[name] for name, leaf in self._ring.unique.items()):
            self._ring = self._widen(self._ring, tuple(capacity.items()))

    def _fetch_all(self, at):
        while (number := self._flow.claim_fetch()) is not None:
            at[0] = number
            self._fetch_back(self._items[number])

    def _fetch_back(self, item):
        plans, rows = item.back
        whole = self._rows_bytes(plans)
        # What nobody is known to rewrite: behind the last batches of a run none is planned.
        if self._skip_writes and (self._flow.end is None or item.number + self.window < self._flow.end):
            if (some := self._without_gaps("fetched", plans, item.keep)) is not None:
                plans, index, _ = some
                rows = self._take(rows, self._send_counted(index, "rows", 0))
        self._count_bytes("bytes_fetched", nbytes(rows), whole)
        rows = self._fetch(rows)
        self._count(item)
        with self._flow.changed:
            item.back = plans, rows
            self._flow.fetched.add(item.number)
            self._flow.changed.notify_all()

    def _write_all(self, at, writer):
        shards = range(writer, self.tables.spec.shards, self._writers)
        while (number := self._flow.wait_to_write(writer)) is not None:
            at[0] = number
            self._write(self._items[number], shards)
            with self._flow.changed:
                self._flow.mark_written(writer, number)
                if min(self._flow.written) > number:
                    self._items.pop(number, None)
                self._flow.changed.notify_all()

    def _write(self, item, shards):
        plans, rows = item.back
        if self.mode in ("async", "semisync"):
            self.tables.add(plans, rows, item.read, shards)
        else:
            self.tables.put(plans, rows, shards)

    def _write_rest(self, ring):
        """Writes what was not written back because a later batch would."""
        if self._skip_writes and ring is not None:
            self.tables.put(*newest_rows(ring, self.tables.spec, self._flow.floor))

    def _without_gaps(self, direction, plans, keep):
        """`without_gaps` of every stack, in sizes C of few; None if that would save nothing."""
        masks, size = {name: keep[name] & _used(p) for name, p in plans.items()}, {}
        for name, p in plans.items():
            needed = int(masks[name].sum(axis=1).max(initial=1))
            with self._flow.changed:
                size[name] = min(self._travelling[direction, name].fit(needed), p.unique.shape[1])
        if size == capacity_of(plans):
            return None
        parts: tuple[dict, dict, dict] = {}, {}, {}
        for name, p in plans.items():
            made = without_gaps(p, masks[name], size[name], self.tables.spec.stacks[name].rows)
            for tree, part in zip(parts, made, strict=True):
                tree[name] = part
        return parts

    def _rows_bytes(self, plans):
        """The bytes of all rows of some plans, with padding and slots."""
        widths = {name: sum(a.shape[1] for a in shards[0].values()) for name, shards in self.tables.shards.items()}
        return sum(4 * p.unique.size * widths[name] for name, p in plans.items())

    def _send_counted(self, tree, kind, whole=None):
        self._count_bytes("bytes_sent", nbytes(tree), whole)
        return self._send(tree, self._placement[kind])

    def _count_bytes(self, direction, number, whole=None):
        """Counts what is handed over in one direction, and what it would be with both savings off."""
        with self._flow.changed:
            self.counters[direction] += number
            self.counters["bytes_without_savings"] += number if whole is None else whole

    def _count(self, item):
        rows = sum(int(p.count.sum()) for p in item.plan.values())
        stale, patched = int(item.stale), int(item.patched)  # before the lock: they may be on the device
        with self._flow.changed:
            self.counters.update(rows=rows, stale_rows=stale, patched_rows=patched, batches=1)

    def _check_shapes(self, item):
        """Refuses an update that returns other shapes than it was given, before anything is donated to it."""
        capacity = capacity_of(item.plan)
        if (key := tuple(sorted(capacity.items()))) in self._checked:
            return
        whole = lambda name: lambda leaf: jax.ShapeDtypeStruct((len(leaf), capacity[name], leaf.shape[2]), leaf.dtype)
        rows = {name: jax.tree.map(whole(name), stack_rows) for name, stack_rows in item.rows[0].items()}
        dense, new, _ = jax.eval_shape(self._pure_update, self.state.dense, rows, *item.inputs)
        for what, before, after in [("dense state", self.state.dense, dense), ("rows", rows, new)]:
            shapes = [jax.tree.map(lambda leaf: (tuple(leaf.shape), str(leaf.dtype)), tree) for tree in (before, after)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"the update changes the shapes of the {what}: from {shapes[0]} to {shapes[1]}. A step must return "
                    "what it was given, in shape and dtype."
                )
        self._checked.add(key)

    def _start(self, stage, body, *args):
        def guarded():
            at = [self._flow.first]
            try:
                body(at, *args)
            except BaseException as error:
                error.add_note(self._where(stage, at[0]))
                self._flow.fail(error, rows_are_lost=stage in ("fetch", "write back"))

        thread = threading.Thread(target=guarded, name=f"oac-{stage}", daemon=True)
        thread.start()
        return thread

    def _where(self, stage, number):
        return f"in stage '{stage}' of the pipeline, batch {number - self._flow.first} of this run"


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
    plans, split = plan_specs(stacks), shardings(SPLIT, mesh)
    on_mesh = lambda function, *inputs: jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=SPLIT)
    return (
        jax.jit(on_mesh(rings.replay, SPLIT, SPLIT, SPLIT)),
        jax.jit(on_mesh(rings.append, SPLIT, SPLIT, SPLIT, EVERYWHERE), donate_argnums=0),
        jax.jit(on_mesh(rings.validate, SPLIT, plans, EVERYWHERE)),
        jax.jit(on_mesh(rings.spread, SPLIT, SPLIT)),
        # Made where it stays: no device ever holds the rings of all shards.
        jax.jit(rings.init, static_argnums=1, out_shardings=split),
        jax.jit(lambda ring, capacity: rings.resize(ring, dict(capacity)), static_argnums=1, out_shardings=split),
    )


def _fetch(tree):
    for leaf in jax.tree.leaves(tree):
        leaf.copy_to_host_async()
    return jax.tree.map(np.asarray, tree)


def _used(p: Plan) -> np.ndarray:
    return np.arange(p.unique.shape[1]) < np.asarray(p.count)[:, None]


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
