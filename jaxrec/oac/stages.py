"""The stages of a batch: each takes the result of the stage before it.

    plan -> send inputs -> gather, send rows -> COMMIT -> fetch -> write back
    Planned     Inputs          Loaded          Committed  Fetched

No stage waits for another batch: `scheduler` decides when a stage may begin, and `workers` ask it.

On the device (`DeviceStep`), four programs validate, replay, update and append, not one: `update` is then the same
compiled program in every mode and in a loop without a pipeline, so that bitwise equality does not depend on fusion.

Data that no device program reads stay on the host: leaves of the batch that the loss does not use (often the ids), row
numbers, rows that the ring provides.

Legend: W window, S shards, U padded unique rows per shard, C rows that are transferred.
"""

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from jaxrec import validate
from jaxrec.embedding import HostedTables, Layout, bucket, capacity_of, plan
from jaxrec.embedding.lookup import compact_plan
from jaxrec.oac import ring as rings
from jaxrec.oac.options import PipelineOptions, nbytes
from jaxrec.oac.ring import LastWriters, count_found, written_since
from jaxrec.oac.scheduler import BatchScheduler
from jaxrec.sharding import EVERYWHERE, SPLIT, plan_specs, shardings
from jaxrec.types import Array, Batch, DenseState, Plan, Rows, ShardsLost


class Inputs(NamedTuple):
    """Plans and batch: leaves that device programs read are on the device, the others on the host."""

    plans: dict[str, Plan]
    batch: Batch


class Planned(NamedTuple):
    """A planned batch of the stream, with its own copies of the arrays."""

    number: int
    batch: Batch
    plans: dict[str, Plan]
    reads: Inputs  # of bool: leaves that device programs read
    # i32[S, U] place of each row in the ring, -1 where the gathered row will be valid.
    source: dict[str, np.ndarray]


class Loaded(NamedTuple):
    """The gathered rows of a batch, possibly stale."""

    # f32[S, U, E] on the device; [S, C, E] if rows that the ring provides were not sent.
    rows: dict[str, Rows]
    source: dict[str, Array]  # `Planned.source`, on the device
    watermark: int  # all batches before it were written when the gather began
    stale: int  # rows whose last writer was not written when the gather began
    patched: int  # rows that the ring provides
    read: dict[str, Rows]  # gathered rows on the host, which `add` subtracts; empty if rows are put


class Committed(NamedTuple):
    """The updated rows of a batch, on the device."""

    rows: dict[str, Rows]
    stale: Any  # as in `Loaded`; i32[] on the device if validation='device'
    patched: Any
    read: dict[str, Rows]


class Fetched(NamedTuple):
    """Rows to write back, on the host."""

    plans: dict[str, Plan]
    rows: dict[str, Rows]
    read: dict[str, Rows]


@dataclasses.dataclass
class Item:
    """A batch in flight: each field is set by one stage and cleared when a later stage no longer needs it."""

    planned: Planned
    inputs: Inputs | None = None
    loaded: Loaded | None = None
    committed: Committed | None = None
    fetched: Fetched | None = None


@functools.lru_cache
def compile_ops(mesh: jax.sharding.Mesh, stacks: tuple[str, ...]) -> dict[str, Callable]:
    """Return the jitted functions of `ring`, shared by all pipelines on a mesh."""
    plans, split = plan_specs(stacks), shardings(SPLIT, mesh)
    on_mesh = lambda function, *inputs: jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=SPLIT)
    return {
        # Of one stack: the sizes of several would be compiled in all their combinations with `skip_stale_reads`.
        "replay": jax.jit(on_mesh(rings.replay_stack, SPLIT, SPLIT, SPLIT)),
        "append": jax.jit(on_mesh(rings.append, SPLIT, SPLIT, SPLIT, EVERYWHERE), donate_argnums=0),
        "validate": jax.jit(on_mesh(rings.validate, SPLIT, plans, EVERYWHERE)),
        # Created with its final sharding: no device ever holds the rings of all shards.
        "init": jax.jit(rings.init, static_argnums=(1, 2), out_shardings=split),
        "widen": jax.jit(
            lambda ring, capacity: rings.resize(ring, dict(capacity)), static_argnums=1, out_shardings=split
        ),
    }


class DeviceStep:
    """The device side of a pipeline: dense state, which is donated, and ring, stepped one batch after the other."""

    def __init__(
        self, update: Callable, options: PipelineOptions, layout: Layout, mesh: jax.sharding.Mesh, dense: DenseState
    ):
        self.options, self.dense, self.depth = options, dense, options.depth
        self.ring: rings.Ring | None = None
        self.update: Callable = jax.jit(update, donate_argnums=0)
        self._layout, self._jitted, self._programs = layout, self.update, compile_ops(mesh, tuple(layout))
        self._row_numbers_on_device = options.repairs and not options.plans_sources
        self._read: dict = {}  # {shapes: Inputs of bool}

    def compiled(self) -> int:
        """Return the number of programs compiled so far."""
        jitted = (self.update, *self._programs.values())
        return sum(program._cache_size() for program in jitted if hasattr(program, "_cache_size"))

    def reads(self, inputs: Inputs) -> Inputs:
        """Return which leaves of plans and batch the programs of a step read, as Inputs of bool."""
        leaves, structure = jax.tree.flatten(inputs)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._read:
            dense, rows = jax.tree.map(shape_of, self.dense), self._rows_of(inputs.plans)
            traced = self._jitted.trace(dense, rows, *jax.tree.map(shape_of, inputs))
            # The same dead-code elimination by which `jit` drops unused arguments.
            read = dce_jaxpr(traced.jaxpr.jaxpr, [True] * len(traced.jaxpr.out_avals))[1]
            found = jax.tree.unflatten(structure, read[len(read) - len(leaves) :])
            if self._row_numbers_on_device:
                plans = {name: p._replace(unique=True, count=True) for name, p in found.plans.items()}
                found = found._replace(plans=plans)
            self._read[key] = found
        return self._read[key]

    def _rows_of(self, plans):
        def rows(name, plan):
            shape = lambda part: jax.ShapeDtypeStruct((*plan.unique.shape, part.width), part.dtype)
            parts = {part: shape(one) for part, one in self._layout[name].items()}
            return Rows(parts.pop("value"), parts)

        return {name: rows(name, plan) for name, plan in plans.items()}

    def commit(self, item: Item, floor: int) -> tuple[Committed, dict]:
        """Run the step of a loaded batch, as `ring.commit`, and replace `dense`; return updated rows and metrics.

        Ring entries of batches before `floor` are void. If a program fails after `dense` was replaced, the step is done
        and its rows are lost.
        """
        planned, inputs, loaded = item.planned, item.inputs, item.loaded
        assert inputs is not None and loaded is not None
        rows, source = loaded.rows, loaded.source
        if self.options.repairs:
            # Every program needs a ring as wide as the batch, even if the batch takes no row from it.
            self._fit_ring(planned, rows)
            rows, source = self.repair(inputs, loaded, rows, floor)
        self.dense, new, metrics = self.update(self.dense, rows, *inputs)
        stale, patched = loaded.stale, loaded.patched
        if self.options.repairs:
            # After the update, as later batches are repaired from its final rows.
            self._append(planned, inputs, new)
            # Device validation finds exactly the rows that the gather could not see.
            if not self.options.plans_sources:
                stale = patched = count_found(source)
            metrics = {**metrics, "stale_rows": stale, "patched_rows": patched}
        return Committed(new, stale, patched, loaded.read), metrics

    def repair(self, inputs: Inputs, loaded: Loaded, rows: dict, floor: int) -> tuple[dict, dict]:
        """Return the valid rows of a batch, and the ring places from which stale rows were replaced."""
        ring, source = self.ring, loaded.source
        assert ring is not None
        if not self.options.plans_sources:
            written = max(loaded.watermark, floor) - 1
            source = self._programs["validate"](ring, inputs.plans, np.int32(written))
        replay = self._programs["replay"]
        return {name: replay(ring.rows[name], mine, source[name]) for name, mine in rows.items()}, source

    def _append(self, planned, inputs, new):
        """Append the rows of a batch to the ring, and its row numbers if the device validates."""
        unique = {name: p.unique for name, p in inputs.plans.items()} if self._row_numbers_on_device else {}
        self.ring = self._programs["append"](self.ring, unique, new, np.int32(planned.number))

    def _fit_ring(self, planned, rows):
        """Create the ring at the first batch, whose rows are always all sent; widen it when a capacity has grown."""
        capacity = capacity_of(planned.plans)
        if self.ring is None:
            self.ring = self._programs["init"](rows, self.depth, self._row_numbers_on_device)
        elif any(r.value.shape[2] != capacity[name] for name, r in self.ring.rows.items()):
            self.ring = self._programs["widen"](self.ring, tuple(capacity.items()))

    def dense_is_lost(self) -> bool:
        """Return whether the dense state was donated to an update that failed."""
        leaves = jax.tree.leaves(self.dense)
        return any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array))


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a leaf on the device."""
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype))


class Stages:
    """The stages over one set of tables, and the batches in flight.

    `placement` is {'inputs', 'rows': tree of shardings}; the rest is as for `Pipeline`.
    """

    def __init__(
        self, tables: HostedTables, options: PipelineOptions, device_step: DeviceStep, send: Callable,
        fetch: Callable, placement: Mapping, capacity: Mapping[str, int] | None = None,
    ):  # fmt: skip
        self.tables, self.options = tables, options
        self.last = LastWriters(tables.spec, options.window, options.depth) if options.plans_sources else None
        self.capacity = capacity  # {stack: U}; U only grows
        self.items: dict[int, Item] = {}
        self.counters: collections.Counter = collections.Counter()
        self._device_step, self._send, self._fetch, self._placement = device_step, send, fetch, placement
        self._lock = threading.Lock()  # guards the counters

    def plan(self, batch: Batch, number: int) -> Planned:
        """Plan a batch; must be called in batch order."""
        # Reuses the capacity of earlier batches, so that programs are compiled for few shapes.
        plans = plan(self.tables.spec, batch.ids, self.capacity)
        validate.check_batch(self.tables.spec, plans, batch)
        self.capacity = capacity_of(plans)
        # Traced here, not before the transfer: a batch that the step refuses is no more returned to the stream than one
        # that cannot be planned.
        reads = self._device_step.reads(Inputs(plans, batch))
        source = self.last.sources(plans, number) if self.last else {}
        return Planned(number, batch, plans, reads, source)

    def enter(self, planned: Planned, floor: int) -> None:
        """Store a planned batch."""
        number, window = planned.number, self.options.window
        if number - window < floor:  # the ring may hold void rows
            planned = planned._replace(source=written_since(planned.source, number, window, floor))
        self.items[number] = Item(planned)

    def void(self, floor: int) -> None:
        """Drop gathered rows, and sources in ring entries of batches before the floor."""
        for item in self.items.values():
            item.loaded, planned = None, item.planned
            source = written_since(planned.source, planned.number, self.options.window, floor)
            item.planned = planned._replace(source=source)

    def send_inputs(self, planned: Planned) -> Inputs:
        """Send the leaves of plans and batch that the device reads; they never become stale."""
        inputs, reads = Inputs(planned.plans, planned.batch), planned.reads
        read = jax.tree.map(lambda leaf, is_read: leaf if is_read else None, inputs, reads)
        sent = self._send_counted(tuple(read), "inputs")
        # The other leaves are still arguments of the step; `jit` drops them before any transfer.
        return jax.tree.map(lambda is_read, leaf, there: there if is_read else leaf, reads, inputs, Inputs(*sent))

    def load(self, planned: Planned, watermark: int, scheduler: BatchScheduler) -> Loaded:
        """Gather the rows of a batch and send them; all batches before the watermark are written."""
        number, window, source, plans = planned.number, self.options.window, planned.source, planned.plans
        floor = scheduler.void_before  # ring entries of earlier batches are void
        if self.options.skip_stale_reads and number - window >= floor:  # else the ring lacks some of the window
            plans = self._without_gaps(plans, {name: where < 0 for name, where in source.items()})
        read = self.tables.read(plans)
        # Before the transfer, as in semisync the previous batch's write waits for this gather.
        scheduler.mark_gathered(number)
        whole = self._rows_bytes(planned.plans) + nbytes(source)
        rows, source_there = self._send_counted((read, source), "rows", whole)
        stale = count_found(written_since(source, number, window, max(watermark, floor)))
        before = read if self.options.adds else {}
        return Loaded(rows, source_there, watermark, stale, count_found(source), before)

    def fetch(self, item: Item) -> Fetched:
        """Fetch the rows of a committed batch."""
        planned, committed = item.planned, item.committed
        assert committed is not None
        self._count_bytes("bytes_fetched", nbytes(committed.rows))
        rows = self._fetch(committed.rows)
        self._count(planned, committed)
        return Fetched(planned.plans, rows, committed.read)

    def write(self, item: Item, shards: Sequence[int], scheduler: BatchScheduler) -> None:
        """Write the rows of a fetched batch to the given shards, except lost ones."""
        fetched = item.fetched
        assert fetched is not None
        there = [shard for shard in shards if shard not in scheduler.lost_shards] if scheduler.lost_shards else shards
        # Lost shards are marked before the write is counted; otherwise a batch admitted by it might be gathered
        # without it.
        with marking_lost_shards(scheduler):
            if self.options.adds:
                self.tables.add(fetched.plans, fetched.rows, fetched.read, there)
            else:
                self.tables.put(fetched.plans, fetched.rows, there)

    def _without_gaps(self, plans, keep):
        """Return plans of the rows in `keep` only, padded to one of few sizes C, so that few programs are compiled."""
        found = {}
        for name, p in plans.items():
            mask = keep[name] & in_use(p)
            size = bucket(int(mask.sum(axis=1).max()))
            # A stack that would not become smaller keeps its plan.
            packed = size < p.unique.shape[1]
            found[name] = compact_plan(p, mask, size, self.tables.spec.stacks[name].rows)[0] if packed else p
        return found

    def _rows_bytes(self, plans):
        widths = {name: sum(part.width for part in parts.values()) for name, parts in self.tables.layout.items()}
        return sum(4 * p.unique.size * widths[name] for name, p in plans.items())

    def _send_counted(self, tree, kind, whole=None):
        self._count_bytes("bytes_sent", nbytes(tree), whole)
        return self._send(tree, self._placement[kind])

    def _count_bytes(self, direction, number, whole=None):
        """Count the bytes of a transfer, and what they would be without `skip_stale_reads`."""
        with self._lock:
            self.counters[direction] += number
            self.counters["bytes_without_savings"] += number if whole is None else whole

    def _count(self, planned, committed):
        rows = sum(int(p.count.sum()) for p in planned.plans.values())
        # Outside the lock, as reading them from the device may block.
        stale, patched = int(committed.stale), int(committed.patched)
        with self._lock:
            self.counters.update(rows=rows, stale_rows=stale, patched_rows=patched, batches=1)


@contextlib.contextmanager
def marking_lost_shards(scheduler: BatchScheduler) -> Iterator[None]:
    """Mark shards that a write finds lost; the other shards are written all the same."""
    try:
        yield
    except ShardsLost as lost:
        scheduler.mark_lost(lost.shards)


def fetch_whole(tree: Any) -> Any:
    """Copy all leaves of a tree to the host in parallel, and wait for them.

    From a GPU through pinned memory: on an H200 OAC had 1.36 of the rate without at width 128 (docs/results.md).
    """
    return fetch_pinned(tree) if on_gpu(tree) else fetch_async(tree)


def fetch_async(tree: Any) -> Any:
    """Fetch after the copies of all leaves have been started."""
    for leaf in jax.tree.leaves(tree):
        leaf.copy_to_host_async()
    return jax.tree.map(np.asarray, tree)


def fetch_pinned(tree: Any) -> Any:
    """Fetch through pinned host memory."""
    pinned = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind("pinned_host"), tree)
    return jax.tree.map(np.asarray, jax.device_put(tree, pinned))


def on_gpu(tree: Any) -> bool:
    """Return whether any leaf of a tree is on a GPU."""
    return any(device.platform == "gpu" for leaf in jax.tree.leaves(tree) for device in leaf.devices())


def in_use(plan: Plan) -> np.ndarray:
    """Return which places of a plan hold a row and not padding, bool[S, U]."""
    return np.arange(plan.unique.shape[1]) < np.asarray(plan.count)[:, None]
