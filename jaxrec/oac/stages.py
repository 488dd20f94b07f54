"""The stages of a batch: what each makes of what the one before it returned.

    plan -> send inputs -> gather, send rows -> COMMIT -> fetch -> write back
    Planned     Inputs          Loaded          Committed  Fetched

Nothing in here waits for another batch: `scheduler` says when a stage may begin, and `workers` ask it.

On the device (`DeviceStep`) rows are repaired, updated and kept by four programs, not one: `update` is then the same
compiled program in every mode and in a loop without a pipeline, so that equality to the last bit is no accident of
fusion.

What nothing on the device reads stays on the host: leaves of the batch that the loss does not look
at (ids, often), row numbers, rows that the ring gives, rows that a later batch will write.

Legend: W window, S shards, U padded unique rows per shard, C rows that travel.
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
from jaxrec.embedding import HostTables, bucket, capacity_of, plan
from jaxrec.embedding.lookup import without_gaps
from jaxrec.engine import Losses
from jaxrec.oac import ring as rings
from jaxrec.oac.options import PipelineOptions, nbytes
from jaxrec.oac.ring import LastWriters, Ring, count_found, mark_rewritten, newest_rows, written_since
from jaxrec.oac.scheduler import BatchScheduler
from jaxrec.sharding import EVERYWHERE, SPLIT, plan_specs, shardings
from jaxrec.types import Array, Batch, DenseState, Plan, Rows, ShardsLost


class Planned(NamedTuple):
    """A batch of the stream, with arrays of its own."""

    number: int
    batch: Batch
    plans: dict[str, Plan]
    # i32[S, U] where the ring holds each row, -1 where the gather will be right.
    source: dict[str, np.ndarray]
    # bool[S, U] the rows to write back; later batches clear those that they will write.
    keep: dict[str, np.ndarray]


class Inputs(NamedTuple):
    """What a batch brings along: on the device what is read there, the rest as it is."""

    plans: dict[str, Plan]
    batch: Batch


class Loaded(NamedTuple):
    """The rows of a batch as they were gathered, perhaps stale."""

    # f32[S, U, E] on the device; [S, C, E] if only those were sent that the ring does not give.
    rows: dict[str, Rows]
    source: dict[str, Array]  # of `Planned`, on the device
    # u8[S, U / 8] which rows to write back, on the device, if it was known by then; else empty.
    keep: dict[str, Array]
    watermark: int  # all batches before it were written when the gather began
    stale: int  # rows whose last writer was not written by then
    patched: int  # rows that the ring gives
    read: dict[str, Rows]  # the rows on the host, which `add` will subtract; empty if rows are put


class Committed(NamedTuple):
    """The rows of a batch after its update, on the device."""

    rows: dict[str, Rows]
    stale: Any  # as in `Loaded`; i32[] on the device if the device validates
    patched: Any
    read: dict[str, Rows]
    keep: dict[str, Array]


class Fetched(NamedTuple):
    """The rows to write back, on the host."""

    plans: dict[str, Plan]
    rows: dict[str, Rows]
    read: dict[str, Rows]


@dataclasses.dataclass
class Item:
    """One batch on its way: each part comes from one stage, and goes when the stage after it is
    done."""

    planned: Planned
    inputs: Inputs | None = None
    loaded: Loaded | None = None
    committed: Committed | None = None
    fetched: Fetched | None = None


@functools.lru_cache
def compile_ops(mesh: jax.sharding.Mesh, stacks: tuple[str, ...]) -> dict[str, Callable]:
    """The functions of `ring`, compiled once per mesh, however many pipelines there are."""
    plans, split = plan_specs(stacks), shardings(SPLIT, mesh)
    on_mesh = lambda function, *inputs: jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=SPLIT)
    return {
        "replay": jax.jit(on_mesh(rings.replay, SPLIT, SPLIT, SPLIT)),
        "append": jax.jit(on_mesh(rings.append, SPLIT, SPLIT, SPLIT, EVERYWHERE), donate_argnums=0),
        "validate": jax.jit(on_mesh(rings.validate, SPLIT, plans, EVERYWHERE)),
        "kept": jax.jit(
            lambda rows, bits, size: on_mesh(functools.partial(rings.kept, size=dict(size)), SPLIT, SPLIT)(rows, bits),
            static_argnums=2,
        ),
        # Made where it stays: no device ever holds the rings of all shards.
        "init": jax.jit(rings.init, static_argnums=(1, 2), out_shardings=split),
        "widen": jax.jit(
            lambda ring, capacity: rings.resize(ring, dict(capacity)), static_argnums=1, out_shardings=split
        ),
    }


class DeviceStep:
    """The steps of a pipeline, one batch after the other: dense state, ring and losses.

    Args:
      update: (dense, rows, plans, batch) -> dense', rows', metrics; not jitted.
      options: how the batches are run.
      tables: whose rows it updates.
      mesh: of all programs.
      dense: DenseState to begin with; it is donated.
    """

    def __init__(
        self, update: Callable, options: PipelineOptions, tables: HostTables, mesh: jax.sharding.Mesh, dense: DenseState
    ):
        self.options, self.dense, self.depth = options, dense, options.depth
        self.ring: rings.Ring | None = None
        # {stack: i32[S, W, U]} the row numbers of the ring, if rows may be left to later batches.
        self.numbers: dict[str, np.ndarray] = {}
        self.update: Callable = jax.jit(update, donate_argnums=0)
        self.losses = Losses()
        self._layout, self._jitted, self._programs = tables.layout, self.update, compile_ops(mesh, tuple(tables.layout))
        self._numbers_there = options.repairs and not options.plans_sources
        self._read: dict = {}  # {shapes: Inputs of bool}

    def compiled(self) -> int:
        """How many programs are compiled by now."""
        jitted = (self.update, *self._programs.values())
        return sum(program._cache_size() for program in jitted if hasattr(program, "_cache_size"))

    def kept(self, rows: dict, bits: dict, size: dict[str, int]) -> dict:
        """The rows to write back, on the device: see `ring.kept`."""
        return self._programs["kept"](rows, bits, tuple(size.items()))

    def reads(self, planned: Planned) -> Inputs:
        """Which leaves of plans and batch the programs of a step read, as Inputs of bool.

        Raises:
          ValueError: the update returns other shapes than it was given: nothing has been donated to it yet.
        """
        inputs = Inputs(planned.plans, planned.batch)
        leaves, structure = jax.tree.flatten(inputs)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._read:
            dense, rows = jax.tree.map(shape_of, self.dense), self._rows_of(planned)
            traced = self._jitted.trace(dense, rows, *jax.tree.map(shape_of, inputs))
            check_returned(dense, rows, traced.out_info)
            # As `jit` itself drops arguments: what it would not hand to the device need not be there.
            read = dce_jaxpr(traced.jaxpr.jaxpr, [True] * len(traced.jaxpr.out_avals))[1]
            found = jax.tree.unflatten(structure, read[len(read) - len(leaves) :])
            if self._numbers_there:
                plans = {name: p._replace(unique=True, count=True) for name, p in found.plans.items()}
                found = found._replace(plans=plans)
            self._read[key] = found
        return self._read[key]

    def _rows_of(self, planned):
        """The shapes of all rows of a batch."""

        def rows(name, plan):
            shape = lambda part: jax.ShapeDtypeStruct((*plan.unique.shape, part.width), part.dtype)
            parts = {part: shape(one) for part, one in self._layout[name].items()}
            return Rows(parts.pop("value"), parts)

        return {name: rows(name, plan) for name, plan in planned.plans.items()}

    def commit(self, item: Item, floor: int) -> tuple[Committed, dict]:
        """The step of one batch, as `ring.commit`; returns its rows and metrics. `dense` is the new
        one from then on.

        Args:
          item: a batch that is loaded.
          floor: what batches before it left in the ring is void.

        Raises:
          Whatever a program raises. If `dense` is another one then, the step is done and its rows
            are lost.
        """
        planned, inputs, loaded = item.planned, item.inputs, item.loaded
        assert inputs is not None and loaded is not None
        rows, source = loaded.rows, loaded.source
        if self.options.repairs:
            # The ring is as wide as the batch before anything looks into it, also if the batch
            # needs nothing of it.
            self._fit_ring(planned, rows)
            rows, source = self.repair(inputs, loaded, rows, floor)
        self.dense, new, metrics = self.update(self.dense, rows, *inputs)
        stale, patched = loaded.stale, loaded.patched
        if self.options.repairs:
            # After the update, whose rows are the final ones: the next batch may be repaired from
            # them.
            self._append(planned, inputs, new)
            # The device has found what the gather could not see, and no more.
            if not self.options.plans_sources:
                stale = patched = count_found(source)
            metrics = {**metrics, "stale_rows": stale, "patched_rows": patched}
        return Committed(new, stale, patched, loaded.read, loaded.keep), metrics

    def repair(self, inputs: Inputs, loaded: Loaded, rows: dict, floor: int) -> tuple[dict, dict]:
        """The right rows of a batch, and where the ring has held those that were not."""
        source = loaded.source
        if not self.options.plans_sources:
            written = max(loaded.watermark, floor) - 1
            source = self._programs["validate"](self.ring, inputs.plans, np.int32(written))
        return self._programs["replay"](self.ring, rows, source), source

    def _append(self, planned, inputs, new):
        """Keeps the rows of a batch; its row numbers where they are looked at."""
        unique = {name: p.unique for name, p in inputs.plans.items()} if self._numbers_there else {}
        self.ring = self._programs["append"](self.ring, unique, new, np.int32(planned.number))
        for name, held in self.numbers.items():
            held[:, planned.number % self.depth] = planned.plans[name].unique

    def _fit_ring(self, planned, rows):
        """Makes the ring with the first batch, all of whose rows have come, and widens it when a
        capacity has grown."""
        capacity = capacity_of(planned.plans)
        if self.ring is None:
            self.ring = self._programs["init"](rows, self.depth, self._numbers_there)
            shape = lambda p: (len(p.unique), self.depth, p.unique.shape[1])
            if self.options.skip_writes:  # a row that no later batch has written after all is looked up here
                self.numbers = {name: np.full(shape(p), -1, np.int32) for name, p in planned.plans.items()}
        elif any(r.value.shape[2] != capacity[name] for name, r in self.ring.rows.items()):
            self.ring = self._programs["widen"](self.ring, tuple(capacity.items()))
            self.numbers = {name: rings.widened(held, capacity[name], -1, np) for name, held in self.numbers.items()}

    def whole_ring(self) -> rings.Ring | None:
        """The ring with its row numbers, if there is one and they are looked at."""
        return self.ring and self.ring._replace(unique=self.numbers or self.ring.unique)

    def dense_is_lost(self) -> bool:
        """Whether the dense state died with an update that failed."""
        leaves = jax.tree.leaves(self.dense)
        return any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array))


def check_returned(dense: DenseState, rows: dict, returned: Any) -> None:
    """Refuses an update that returns other shapes than it was given, before anything is donated to
    it.

    Raises:
      ValueError: it does.
    """
    dense_after, new, metrics = returned
    if not isinstance(metrics, dict):
        raise ValueError(
            f"the update returns metrics that are a {type(metrics).__name__}: a dict {{name: array}} is wanted."
        )
    for what, before, after in [("dense state", dense, dense_after), ("rows", rows, new)]:
        shapes = [shapes_of(tree) for tree in (before, after)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the update changes the shapes of the {what}: from {shapes[0]} to {shapes[1]}. A step must return "
                "what it was given, in shape and dtype."
            )


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """What a leaf is on the device."""
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype))


def check_same_shapes(before: DenseState, after: DenseState, what: str) -> None:
    """Refuses a dense state that the next step cannot take.

    Raises:
      ValueError: its shapes are others than before; begins with what happened.
    """
    if after is not before and shapes_of(after) != shapes_of(before):
        raise ValueError(f"{what}: {shapes_of(after)} in place of {shapes_of(before)}. Only its values may be others.")


def shapes_of(tree: Any) -> Any:
    """The shape and dtype of every leaf."""
    return jax.tree.map(lambda leaf: (np.shape(leaf), str(getattr(leaf, "dtype", type(leaf)))), tree)


class Stages:
    """The stages over one set of tables, and the batches that are between them.

    Args:
      tables: HostTables or RemoteTables.
      options: how the batches are run.
      device_step: what is done on the device.
      devices: how many share a batch.
      send: (tree of arrays, tree of shardings) -> tree on the device.
      fetch: (tree on the device) -> tree of numpy arrays.
      placement: {'inputs', 'rows': tree of shardings}.
      capacity: {stack: U} to begin with, or None.
    """

    def __init__(
        self, tables: HostTables, options: PipelineOptions, device_step: DeviceStep, devices: int, send: Callable,
        fetch: Callable, placement: Mapping, capacity: Mapping[str, int] | None = None,
    ):  # fmt: skip
        self.tables, self.options, self.devices = tables, options, devices
        self.last = LastWriters(tables.spec, options.window, options.depth) if options.plans_sources else None
        self.capacity = capacity  # U of each stack; it only grows
        self.items: dict[int, Item] = {}
        self.counters: collections.Counter = collections.Counter()
        self._device_step, self._send, self._fetch, self._placement = device_step, send, fetch, placement
        self._lock = threading.Lock()  # of the counters, and of `reads`

    def plan(self, batch: Any, number: int) -> Planned:
        """Numbers the rows of a batch; call it in batch order.

        Raises:
          ValueError: it is no Batch, or does not fit the tables.
        """
        if not isinstance(batch, Batch):
            raise ValueError(
                f"`run` makes the plans itself from Batch after Batch, but got a {type(batch).__name__}: give it "
                "jaxrec.Batch(ids, dense, label, weight), not the pairs of `planned`."
            )
        # With the capacity of the batches before, so that programs are compiled for few shapes.
        plans = plan(self.tables.spec, batch.ids, self.capacity)
        validate.check_batch(self.tables.spec, plans, batch, self.devices)
        self.capacity = capacity_of(plans)
        source = self.last.sources(plans, number) if self.last else {}
        keep = {name: in_use(p) for name, p in plans.items()} if self.options.skip_writes else {}
        return Planned(number, batch, plans, source, keep)

    def enter(self, planned: Planned, floor: int, committed: int) -> None:
        """Keeps a planned batch, and lets those before it leave to it what it will write again."""
        number, window = planned.number, self.options.window
        if number - window < floor:  # the ring holds rows of batches that are void
            planned = planned._replace(source=written_since(planned.source, number, window, floor))
        if self.options.skip_writes:
            # What is committed may be on its way already: too late to leave a row of it to this
            # batch.
            keep_of = lambda n: self.items[n].planned.keep if n >= committed and n in self.items else None
            mark_rewritten(keep_of, planned.source, number, window)
        self.items[number] = Item(planned)

    def void(self, floor: int) -> None:
        """Forgets what was gathered, and what the ring holds of batches before the floor."""
        for item in self.items.values():
            item.loaded, planned = None, item.planned
            source = written_since(planned.source, planned.number, self.options.window, floor)
            item.planned = planned._replace(source=source)

    def send_inputs(self, planned: Planned) -> Inputs:
        """Sends of plans and batch, which nothing can make stale, what is read on the device."""
        inputs = Inputs(planned.plans, planned.batch)
        with self._lock:  # the first of several loaders traces the step, the others wait for what it finds
            reads = self._device_step.reads(planned)
        read = jax.tree.map(lambda leaf, is_read: leaf if is_read else None, inputs, reads)
        sent = self._send_counted(tuple(read), "inputs")
        # The rest is an argument of the step all the same, which drops it before anything is sent.
        return jax.tree.map(lambda is_read, leaf, there: there if is_read else leaf, reads, inputs, Inputs(*sent))

    def load(self, planned: Planned, watermark: int, scheduler: BatchScheduler) -> Loaded:
        """Gathers the rows of a batch and sends them.

        Args:
          planned: the batch.
          watermark: all batches before it are written.
          scheduler: of the run, which is told when the tables have been read.
        """
        number, window, source, plans = planned.number, self.options.window, planned.source, planned.plans
        floor = scheduler.floor  # what batches before it left in the ring is void
        if self.options.skip_reads and number - window >= floor:  # before that, little is in the ring
            plans = self._without_gaps(plans, {name: where < 0 for name, where in source.items()})
        read = self.tables.read(plans)
        # Before anything is sent: in semisync the write of the batch before waits for this gather.
        scheduler.mark_gathered(number)
        # All that will rewrite rows of this batch are planned: with the rows it costs no wait of its own.
        keep = as_bits(planned.keep) if scheduler.planned > number + window else {}
        whole = self._rows_bytes(planned.plans) + nbytes(source)
        rows, source_there, keep_there = self._send_counted((read, source, keep), "rows", whole)
        stale = count_found(written_since(source, number, window, max(watermark, floor)))
        before = read if self.options.adds else {}
        return Loaded(rows, source_there, keep_there, watermark, stale, count_found(source), before)

    def fetch(self, item: Item, end: int | None) -> Fetched:
        """Fetches the rows of a batch, or those of them that no later batch will write.

        Args:
          item: a batch that is committed.
          end: number after the last batch of the run, if it is known.
        """
        planned, committed = item.planned, item.committed
        assert committed is not None
        plans, rows, whole = planned.plans, committed.rows, self._rows_bytes(planned.plans)
        # Rows that no batch is known to rewrite: after the last batches of a run none is planned.
        if self.options.skip_writes and (end is None or planned.number + self.options.window < end):
            plans = self._without_gaps(plans, planned.keep)
            keep = committed.keep or self._send_counted(as_bits(planned.keep), "rows", 0)
            rows = self._device_step.kept(rows, keep, capacity_of(plans))
        self._count_bytes("bytes_fetched", nbytes(rows), whole)
        rows = self._fetch(rows)
        self._count(planned, committed)
        return Fetched(plans, rows, committed.read)

    def write(self, item: Item, shards: Sequence[int], scheduler: BatchScheduler) -> None:
        """Writes the rows of a batch, which is fetched, into some shards; to those that are lost
        goes nothing."""
        fetched = item.fetched
        assert fetched is not None
        there = [shard for shard in shards if shard not in scheduler.lost_shards] if scheduler.lost_shards else shards
        # What is lost is told before the write counts, or a batch that waits for it might be
        # gathered without.
        with telling_lost(scheduler):
            if self.options.adds:
                self.tables.add(fetched.plans, fetched.rows, fetched.read, there)
            else:
                self.tables.put(fetched.plans, fetched.rows, there)

    def write_rest(self, ring: Ring | None, scheduler: BatchScheduler) -> None:
        """Writes what was not written back because a later batch would."""
        if not self.options.skip_writes or ring is None:
            return
        there = [shard for shard in range(self.tables.spec.shards) if shard not in scheduler.lost_shards]
        step = int(self.tables.steps[:, 1].max())  # it is no step of its own
        with self.tables.overwriting(there, step), telling_lost(scheduler):
            self.tables.put(*newest_rows(ring, self.tables.spec, scheduler.floor), there)

    def _without_gaps(self, plans, keep):
        """The plans of some rows alone, in sizes C of few, so that few programs are compiled."""
        found = {}
        for name, p in plans.items():
            mask = keep[name] & in_use(p)
            size = bucket(int(mask.sum(axis=1).max()))
            # Rows of a stack that travel all but some stay where they are.
            packed = size < p.unique.shape[1]
            found[name] = without_gaps(p, mask, size, self.tables.spec.stacks[name].rows)[0] if packed else p
        return found

    def _rows_bytes(self, plans):
        """The bytes of all rows of some plans, with padding and slots."""
        widths = {name: sum(part.width for part in parts.values()) for name, parts in self.tables.layout.items()}
        return sum(4 * p.unique.size * widths[name] for name, p in plans.items())

    def _send_counted(self, tree, kind, whole=None):
        self._count_bytes("bytes_sent", nbytes(tree), whole)
        return self._send(tree, self._placement[kind])

    def _count_bytes(self, direction, number, whole=None):
        """Counts what is handed over in one direction, and what it would be with both savings
        off."""
        with self._lock:
            self.counters[direction] += number
            self.counters["bytes_without_savings"] += number if whole is None else whole

    def _count(self, planned, committed):
        rows = sum(int(p.count.sum()) for p in planned.plans.values())
        # Before the lock: they may be on the device.
        stale, patched = int(committed.stale), int(committed.patched)
        with self._lock:
            self.counters.update(rows=rows, stale_rows=stale, patched_rows=patched, batches=1)


@contextlib.contextmanager
def telling_lost(scheduler: BatchScheduler) -> Iterator[None]:
    """A write in which shards may be lost; what goes to the others is written all the same."""
    try:
        yield
    except ShardsLost as lost:
        scheduler.mark_lost(lost.shards)


def fetch_whole(tree: Any) -> Any:
    """Starts to copy all leaves of a tree, and waits for them."""
    for leaf in jax.tree.leaves(tree):
        leaf.copy_to_host_async()
    return jax.tree.map(np.asarray, tree)


def in_use(plan: Plan) -> np.ndarray:
    """Which places of a plan hold a row, bool[S, U]."""
    return np.arange(plan.unique.shape[1]) < np.asarray(plan.count)[:, None]


def as_bits(masks: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """{stack: bool[S, U]} -> {stack: u8[S, U / 8]}."""
    return {name: np.packbits(mask, axis=1) for name, mask in masks.items()}
