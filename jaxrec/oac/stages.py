"""The stages of a batch but the commit: what each makes of what the one before it returned.

    plan -> send inputs -> gather, send rows -> COMMIT -> fetch -> write back
    Planned     Inputs          Loaded          Committed  Fetched

Nothing in here waits for another batch: `flow` says when a stage may begin, and `threads` ask it.

What nothing on the device reads stays on the host: leaves of the batch that the loss does not look
at (ids, often), row numbers, rows that the ring gives, rows that a later batch will write.

Legend: W window, S shards, U padded unique rows per shard, C rows that travel.
"""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrec import boundary
from jaxrec.embedding import HostTables, bucket, capacity_of, plan
from jaxrec.embedding.planning import without_gaps
from jaxrec.oac.flow import Flow
from jaxrec.oac.ring import Ring
from jaxrec.oac.stale import LastWriters, found, mark_rewritten, newest_rows, written_since
from jaxrec.oac.ways import Way, nbytes
from jaxrec.types import Array, Batch, Plan, Rows, ShardsLost


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
    """One batch on its way: each part comes from one stage, and goes when the stage behind it is
    done."""

    planned: Planned
    inputs: Inputs | None = None
    loaded: Loaded | None = None
    committed: Committed | None = None
    fetched: Fetched | None = None


class Stages:
    """The stages over one set of tables, and the batches that are between them.

    Args:
      tables: HostTables.
      way: how the batches are run.
      devices: how many share a batch.
      send: (tree of arrays, tree of shardings) -> tree on the device.
      fetch: (tree on the device) -> tree of numpy arrays.
      placement: {'inputs', 'rows': tree of shardings}.
      kept: `ring.kept`, on the device.
      reads: Planned -> Inputs of bool, which leaves are read on the device.
      capacity: {stack: U} to begin with, or None.
    """

    def __init__(
        self, tables: HostTables, way: Way, devices: int, send: Callable, fetch: Callable, placement: Mapping,
        kept: Callable, reads: Callable[[Planned], Inputs], capacity: dict[str, int] | None = None,
    ):  # fmt: skip
        self.tables, self.way, self.devices = tables, way, devices
        self.last = LastWriters(tables.spec, way.window, way.depth) if way.plans_sources else None
        self.capacity = capacity  # U of each stack; it only grows
        self.items: dict[int, Item] = {}
        self.counters: collections.Counter = collections.Counter()
        self._send, self._fetch, self._placement, self._kept, self._reads = send, fetch, placement, kept, reads
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
        boundary.check_batch(self.tables.spec, plans, batch, self.devices)
        self.capacity = capacity_of(plans)
        source = self.last.sources(plans, number) if self.last else {}
        keep = {name: in_use(p) for name, p in plans.items()} if self.way.skip_writes else {}
        return Planned(number, batch, plans, source, keep)

    def enter(self, planned: Planned, floor: int, committed: int) -> None:
        """Keeps a planned batch, and lets those before it leave to it what it will write again."""
        number, window = planned.number, self.way.window
        if number - window < floor:  # the ring holds rows of batches that are void
            planned = planned._replace(source=written_since(planned.source, number, window, floor))
        if self.way.skip_writes:
            # What is committed may be on its way already: too late to leave a row of it to this
            # batch.
            keep_of = lambda n: self.items[n].planned.keep if n >= committed and n in self.items else None
            mark_rewritten(keep_of, planned.source, number, window)
        self.items[number] = Item(planned)

    def void(self, floor: int) -> None:
        """Forgets what was gathered, and what the ring holds of batches before the floor."""
        for item in self.items.values():
            item.loaded, planned = None, item.planned
            source = written_since(planned.source, planned.number, self.way.window, floor)
            item.planned = planned._replace(source=source)

    def send_inputs(self, planned: Planned) -> Inputs:
        """Sends of plans and batch, which nothing can make stale, what is read on the device."""
        inputs = Inputs(planned.plans, planned.batch)
        with self._lock:  # the first of several loaders traces the step, the others wait for what it finds
            reads = self._reads(planned)
        read = jax.tree.map(lambda leaf, is_read: leaf if is_read else None, inputs, reads)
        sent = self._send_counted(tuple(read), "inputs")
        # The rest is an argument of the step all the same, which drops it before anything is sent.
        return jax.tree.map(lambda is_read, leaf, there: there if is_read else leaf, reads, inputs, Inputs(*sent))

    def load(self, planned: Planned, watermark: int, flow: Flow) -> Loaded:
        """Gathers the rows of a batch and sends them.

        Args:
          planned: the batch.
          watermark: all batches before it are written.
          flow: of the run, which is told when the tables have been read.
        """
        number, window, source, plans = planned.number, self.way.window, planned.source, planned.plans
        floor = flow.floor  # what batches before it left in the ring is void
        if self.way.skip_reads and number - window >= floor:  # before that, little is in the ring
            plans = self._without_gaps(plans, {name: where < 0 for name, where in source.items()})
        read = self.tables.read(plans)
        # Before anything is sent: in semisync the write of the batch before waits for this gather.
        flow.tell_gathered(number)
        # All that will rewrite rows of this batch are planned: with the rows it costs no wait of its own.
        keep = as_bits(planned.keep) if flow.planned > number + window else {}
        whole = self._rows_bytes(planned.plans) + nbytes(source)
        rows, source_there, keep_there = self._send_counted((read, source, keep), "rows", whole)
        stale = found(written_since(source, number, window, max(watermark, floor)))
        before = read if self.way.adds else {}
        return Loaded(rows, source_there, keep_there, watermark, stale, found(source), before)

    def fetch(self, item: Item, end: int | None) -> Fetched:
        """Fetches the rows of a batch, or those of them that no later batch will write.

        Args:
          item: a batch that is committed.
          end: number behind the last batch of the run, if it is known.
        """
        planned, committed = item.planned, item.committed
        assert committed is not None
        plans, rows, whole = planned.plans, committed.rows, self._rows_bytes(planned.plans)
        # What nobody is known to rewrite: behind the last batches of a run none is planned.
        if self.way.skip_writes and (end is None or planned.number + self.way.window < end):
            plans = self._without_gaps(plans, planned.keep)
            keep = committed.keep or self._send_counted(as_bits(planned.keep), "rows", 0)
            rows = self._kept(rows, keep, capacity_of(plans))
        self._count_bytes("bytes_fetched", nbytes(rows), whole)
        rows = self._fetch(rows)
        self._count(planned, committed)
        return Fetched(plans, rows, committed.read)

    def write(self, item: Item, shards: Sequence[int], flow: Flow) -> None:
        """Writes the rows of a batch, which is fetched, into some shards; to those that are lost
        goes nothing."""
        fetched = item.fetched
        assert fetched is not None
        there = [shard for shard in shards if shard not in flow.gone] if flow.gone else shards
        # What is lost is told before the write counts, or a batch that waits for it might be
        # gathered without.
        with telling_lost(flow):
            if self.way.adds:
                self.tables.add(fetched.plans, fetched.rows, fetched.read, there)
            else:
                self.tables.put(fetched.plans, fetched.rows, there)

    def write_rest(self, ring: Ring | None, flow: Flow) -> None:
        """Writes what was not written back because a later batch would."""
        if not self.way.skip_writes or ring is None:
            return
        there = [shard for shard in range(self.tables.spec.shards) if shard not in flow.gone]
        step = int(self.tables.steps[:, 1].max())  # it is no step of its own
        with self.tables.overwriting(there, step), telling_lost(flow):
            self.tables.put(*newest_rows(ring, self.tables.spec, flow.floor), there)

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
def telling_lost(flow: Flow) -> Iterator[None]:
    """A write in which shards may be lost; what goes to the others is written all the same."""
    try:
        yield
    except ShardsLost as lost:
        flow.tell_lost(lost.shards)


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
