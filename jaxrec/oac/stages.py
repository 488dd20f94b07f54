"""The stages of a batch: what each does to the `Item` of the batch; `flight` decides when it may begin.

    plan -> send inputs -> gather, send rows -> COMMIT -> fetch -> write back

On the device, three programs repair, update and append, not one: `update` is then the same compiled program
in every mode and in a loop without a pipeline, so that bitwise equality does not depend on fusion.

Data that no device program reads stay on the host: leaves of the batch that the loss does not use (often the ids), and
row numbers where nothing is repaired.

Legend: W window, U padded unique rows per shard.
"""

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from jaxrec import validate
from jaxrec.embedding import capacity_of, plan
from jaxrec.oac import ring as rings
from jaxrec.oac.options import PipelineOptions, nbytes
from jaxrec.prefetch import result_or_error
from jaxrec.sharding import BATCH, EVERYWHERE, SPLIT, plan_specs, shardings
from jaxrec.types import Batch, Plan, Rows, TrainState


class Inputs(NamedTuple):
    """Plans and batch: leaves that device programs read are on the device, the others on the host."""

    plans: dict[str, Plan]
    batch: Batch


@dataclasses.dataclass(eq=False)
class Item:
    """A batch in flight, with its own copies of the arrays; each stage sets some fields, and clears others."""

    number: int
    batch: Any = None
    plans: dict[str, Plan] = dataclasses.field(default_factory=dict)
    reads: Any = None  # Inputs of bool: leaves that device programs read
    over: Any = None  # END, or an error of a stage before the commit: neither this batch nor a later one is committed
    inputs: Any = None  # Inputs
    # Set when the gather begins: batches before `watermark` are written, and those before `floor` are void in the ring.
    watermark: int = 0
    floor: int = 0
    rows: Any = None  # {stack: Rows} gathered, possibly stale, on the device; then updated; then on the host
    read: Any = None  # gathered rows on the host, if `add` will subtract them
    stale: Any = 0  # i32[] rows whose last writer was not written when the gather began
    patched: Any = 0  # i32[] rows that the ring provides
    gathered: bool = False
    loaded: bool = False
    fetched: bool = False

    def afresh(self) -> "Item":
        """Return the same batch before it was gathered."""
        return Item(self.number, self.batch, self.plans, self.reads, self.over, self.inputs)


@functools.lru_cache
def compile_ops(mesh: jax.sharding.Mesh, stacks: tuple[str, ...], shards: int) -> dict[str, Callable]:
    """Return the jitted functions of `ring`, shared by all pipelines on a mesh with tables of so many shards."""
    plans, split, number = plan_specs(stacks), shardings(SPLIT, mesh), EVERYWHERE
    on_mesh = lambda function, *inputs: jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=SPLIT)
    repair_shards = on_mesh(functools.partial(repair, shards), SPLIT, SPLIT, plans, number, number, number)

    def repair_all(*given):
        rows, *counts = repair_shards(*given)
        return rows, *(count.sum() for count in counts)

    return {
        "repair": jax.jit(repair_all),
        "append": jax.jit(
            on_mesh(functools.partial(rings.append, shards=shards), SPLIT, plans, SPLIT, number), donate_argnums=0
        ),
        # Created with its final sharding: no device ever holds the rings of all shards.
        "init": jax.jit(rings.init, static_argnums=(1, 2), out_shardings=split),
        "widen": jax.jit(rings.widen, static_argnums=1, out_shardings=split),
    }


def repair(shards: int, ring: rings.Ring, rows: dict[str, Rows], plans: dict[str, Plan], number, floor, watermark):
    """Return the valid rows of a batch, the number of those from the ring, and of those that were stale."""
    source = rings.validate(ring, plans, number, floor, shards)
    stale = rings.validate(ring, plans, number, watermark, shards)
    return rings.replay(ring, rows, source), rings.count_found(source)[None], rings.count_found(stale)[None]


def numbers_of_rows(plans: dict[str, Plan]) -> dict[str, Plan]:
    """Return plans without what depends on the batch's size, for which programs of the ring would be compiled anew."""
    return {name: p._replace(inverse={}) for name, p in plans.items()}


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a leaf on the device."""
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype))


class Stages:
    """The stages, with what they train: the dense state, which is donated, the ring and the tables.

    No stage waits for another batch.
    """

    def __init__(
        self, update: Callable, state: TrainState, mesh: jax.sharding.Mesh, options: PipelineOptions,
        send: Callable | None = None, fetch: Callable | None = None, capacity: Mapping[str, int] | None = None,
    ):  # fmt: skip
        self.options = options
        self.dense, self.tables = state
        self.ring: Any = None  # Ring, from the first batch on
        spec = self.tables.spec
        self.capacity = capacity  # {stack: U}; U only grows
        self.counters: collections.Counter = collections.Counter()
        self._lock = threading.Lock()  # guards the counters
        self.update: Callable = jax.jit(update, donate_argnums=0)
        self._jitted, self._programs = self.update, compile_ops(mesh, tuple(spec.stacks), spec.shards)
        self._send, self._fetch = send or jax.device_put, fetch or fetch_whole
        self._placement = shardings({"inputs": (plan_specs(spec.stacks), BATCH), "rows": SPLIT}, mesh)
        self._reads: dict = {}  # {shapes: Inputs of bool}

    def compiled(self) -> int:
        """Return the number of programs compiled so far."""
        jitted = (self.update, *self._programs.values())
        return sum(program._cache_size() for program in jitted if hasattr(program, "_cache_size"))

    def plan(self, batch: Batch, number: int) -> Item:
        """Plan a batch; must be called in batch order."""
        # Reuses the capacity of earlier batches, so that programs are compiled for few shapes.
        plans = plan(self.tables.spec, batch.ids, self.capacity)
        validate.check_batch(self.tables.spec, plans, batch)
        self.capacity = capacity_of(plans)
        # Traced here, not before the transfer: a batch that the step refuses is no more returned to the stream than one
        # that cannot be planned.
        reads = self._reads_of(Inputs(plans, batch))
        return Item(number, batch, plans, reads)

    def _reads_of(self, inputs):
        """Return which leaves of plans and batch the programs of a step read."""
        leaves, structure = jax.tree.flatten(inputs)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._reads:
            traced = self._jitted.trace(*jax.tree.map(shape_of, (self.dense, self._rows_of(inputs.plans), *inputs)))
            # The same dead-code elimination by which `jit` drops unused arguments.
            read = dce_jaxpr(traced.jaxpr.jaxpr, [True] * len(traced.jaxpr.out_avals))[1]
            found = jax.tree.unflatten(structure, read[len(read) - len(leaves) :])
            if self.options.repairs:
                plans = {name: p._replace(unique=True, count=True) for name, p in found.plans.items()}
                found = found._replace(plans=plans)
            self._reads[key] = found
        return self._reads[key]

    def _rows_of(self, plans):
        """Return the shapes of the rows of plans."""

        def rows(name, plan):
            shape = lambda part: jax.ShapeDtypeStruct((*plan.unique.shape, part.width), part.dtype)
            parts = {part: shape(one) for part, one in self.tables.layout[name].items()}
            return Rows(parts.pop("value"), parts)

        return {name: rows(name, plan) for name, plan in plans.items()}

    def send_inputs(self, item: Item) -> None:
        """Send the leaves of plans and batch that the device reads; they never become stale."""
        inputs, reads = Inputs(item.plans, item.batch), item.reads
        read = jax.tree.map(lambda leaf, is_read: leaf if is_read else None, inputs, reads)
        self._count_bytes("bytes_sent", nbytes(read))
        sent = Inputs(*self._send(tuple(read), self._placement["inputs"]))
        # The other leaves are still arguments of the step; `jit` drops them before any transfer.
        item.inputs = jax.tree.map(lambda is_read, leaf, there: there if is_read else leaf, reads, inputs, sent)

    def gather(self, item: Item) -> dict[str, Rows]:
        """Return the rows of an admitted batch."""
        return self.tables.read(item.plans)

    def send_rows(self, item: Item, read: dict[str, Rows]) -> None:
        """Send gathered rows."""
        self._count_bytes("bytes_sent", nbytes(read))
        item.rows = self._send(read, self._placement["rows"])
        item.read = read if self.options.adds else None

    def commit(self, item: Item) -> dict:
        """Run the step of a loaded batch, as `ring.commit`: replace `dense` and the item's rows; return the metrics.

        If a program fails after `dense` was replaced, the step is done and its rows are lost.
        """
        rows, repairs = item.rows, self.options.repairs
        if repairs:
            # Every program needs a ring as wide as the batch, even if the batch takes no row from it.
            self._fit_ring(item)
            rows = self.repair(item)
        self.dense, item.rows, metrics = self.update(self.dense, rows, *item.inputs)
        if repairs:
            # After the update, as later batches are repaired from its final rows.
            plans = numbers_of_rows(item.inputs.plans)
            self.ring = self._programs["append"](self.ring, plans, item.rows, np.int32(item.number))
            metrics = {**metrics, "stale_rows": item.stale, "patched_rows": item.patched}
        # Freed before another batch needs the memory.
        item.inputs = None
        return metrics

    def _fit_ring(self, item):
        """Create the ring at the first batch; widen it when a capacity has grown."""
        capacity = capacity_of(item.plans)
        if self.ring is None:
            size = tuple((name, stack.rows_per_shard) for name, stack in self.tables.spec.stacks.items())
            self.ring = self._programs["init"](item.rows, size, self.options.window)
        elif any(r.value.shape[2] < capacity[name] for name, r in self.ring.rows.items()):
            self.ring = self._programs["widen"](self.ring, tuple(capacity.items()))

    def repair(self, item: Item) -> dict[str, Rows]:
        """Return the valid rows of a batch; count those from the ring."""
        numbers = (np.int32(number) for number in (item.number, item.floor, item.watermark))
        plans = numbers_of_rows(item.inputs.plans)
        rows, item.patched, item.stale = self._programs["repair"](self.ring, item.rows, plans, *numbers)
        return rows

    def dense_is_lost(self) -> bool:
        """Return whether the dense state was given to an update that failed, possibly after its call had returned."""
        return isinstance(result_or_error(lambda: jax.block_until_ready(self.dense)), BaseException)

    def fetch(self, item: Item) -> None:
        """Fetch the rows of a committed batch."""
        self._count_bytes("bytes_fetched", nbytes(item.rows))
        item.rows = self._fetch(item.rows)
        rows = sum(int(p.count.sum()) for p in item.plans.values())
        # Outside the lock, as reading them from the device may block.
        stale, patched = int(item.stale), int(item.patched)
        with self._lock:
            self.counters.update(rows=rows, stale_rows=stale, patched_rows=patched, batches=1)

    def write(self, item: Item, shards: Sequence[int]) -> None:
        """Write the rows of a fetched batch to the given shards."""
        if self.options.adds:
            self.tables.add(item.plans, item.rows, item.read, shards)
        else:
            self.tables.put(item.plans, item.rows, shards)

    def _count_bytes(self, direction, number):
        with self._lock:
            self.counters[direction] += number


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
