"""The stages of a batch: what each does to the `Item` of the batch; `flight` decides when it may begin.

    plan -> send inputs -> gather, send rows -> COMMIT -> fetch -> write back

On the device, three programs repair, update and append, not one: `update` is then the same compiled program
in every mode and in a loop without a pipeline, so that bitwise equality does not depend on fusion.

Legend: W window, U padded unique rows per shard.
"""

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrec import validate
from jaxrec.embedding import capacity_of, plan
from jaxrec.oac import ring as rings
from jaxrec.oac.options import PipelineOptions, nbytes
from jaxrec.prefetch import result_or_error
from jaxrec.sharding import BATCH, EVERYWHERE, SPLIT, plan_specs, shardings
from jaxrec.task import Task
from jaxrec.types import Batch, Plan, Rows, TrainState


@dataclasses.dataclass(eq=False)
class Item:
    """A batch in flight, with its own copies of the arrays; each stage sets some fields, and clears others."""

    number: int
    batch: Any = None
    plans: dict[str, Plan] = dataclasses.field(default_factory=dict)
    over: Any = None  # END, or an error of a stage before the commit: neither this batch nor a later one is committed
    inputs: Any = None  # (plans, batch) on the device
    watermark: int = 0  # batches before it were written when the gather began
    rows: Any = None  # {stack: Rows} gathered, possibly stale, on the device; then updated; then on the host
    read: Any = None  # gathered rows on the host, if `add` will subtract them
    stale: Any = 0  # i32[] rows whose last writer was not written when the gather began
    patched: Any = 0  # i32[] rows that the ring provides
    gathered: bool = False
    loaded: bool = False
    fetched: bool = False

    def afresh(self) -> "Item":
        """Return the same batch before it was gathered."""
        return Item(self.number, self.batch, self.plans, self.over, self.inputs)


@functools.lru_cache
def compile_ops(mesh: jax.sharding.Mesh, stacks: tuple[str, ...], shards: int) -> dict[str, Callable]:
    """Return the jitted functions of `ring`, shared by all pipelines on a mesh with tables of so many shards."""
    plans, split, number = plan_specs(stacks), shardings(SPLIT, mesh), EVERYWHERE
    on_mesh = lambda function, *inputs: jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=SPLIT)
    repair_shards = on_mesh(functools.partial(repair, shards), SPLIT, SPLIT, plans, number, number)

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


def repair(shards: int, ring: rings.Ring, rows: dict[str, Rows], plans: dict[str, Plan], number, watermark):
    """Return the valid rows of a batch, the number of those from the ring, and of those that were stale."""
    source = rings.validate(ring, plans, number, shards=shards)
    stale = rings.validate(ring, plans, number, watermark, shards)
    return rings.replay(ring, rows, source), rings.count_found(source)[None], rings.count_found(stale)[None]


class Stages:
    """The stages, with what they train: the dense state, which is donated, the ring and the tables.

    No stage waits for another batch.
    """

    def __init__(
        self, task: Task, state: TrainState, mesh: jax.sharding.Mesh, options: PipelineOptions,
        send: Callable | None = None, fetch: Callable | None = None, capacity: Mapping[str, int] | None = None,
    ):  # fmt: skip
        self.options = options
        self.dense, self.tables = state
        self.ring: Any = None  # Ring; None when it is void, until the next batch
        self._spec = spec = task.spec  # lookups of the tables' own spec may be others
        self.capacity = capacity  # {stack: U}; U only grows
        self.counters: collections.Counter = collections.Counter()
        self._lock = threading.Lock()  # guards the counters
        self.update: Callable = jax.jit(task.checked_update, donate_argnums=0)
        self._programs = compile_ops(mesh, tuple(spec.stacks), spec.shards)
        self._send, self._fetch = send or jax.device_put, fetch or fetch_whole
        self._devices = mesh.size
        self._placement = shardings({"inputs": (plan_specs(spec.stacks), BATCH), "rows": SPLIT}, mesh)

    def compiled(self) -> int:
        """Return the number of programs compiled so far."""
        jitted = (self.update, *self._programs.values())
        return sum(program._cache_size() for program in jitted if hasattr(program, "_cache_size"))

    def plan(self, batch: Batch, number: int) -> Item:
        """Plan a batch; must be called in batch order."""
        # Reuses the capacity of earlier batches, so that programs are compiled for few shapes.
        plans = plan(self._spec, batch.ids, self.capacity)
        validate.check_batch(self._spec, plans, batch)
        examples = len(batch.weight)
        if examples % self._devices:  # told here, as a batch that a loader refuses is returned to the stream
            raise ValueError(
                f"a batch of {examples} examples cannot be split over {self._devices} devices: fill it up with "
                "examples of weight 0."
            )
        self.capacity = capacity_of(plans)
        return Item(number, batch, plans)

    def send_inputs(self, item: Item) -> None:
        """Send plans and batch, which never become stale."""
        inputs = item.plans, item.batch
        self._count_bytes("bytes_sent", nbytes(inputs))
        item.inputs = self._send(inputs, self._placement["inputs"])

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
            plans = rings.numbers_of_rows(item.inputs[0])
            self.ring = self._programs["append"](self.ring, plans, item.rows, np.int32(item.number))
            metrics = {**metrics, "stale_rows": item.stale, "patched_rows": item.patched}
        # Freed before another batch needs the memory.
        item.inputs = None
        return metrics

    def _fit_ring(self, item):
        """Create the ring if it is void; widen it when a capacity has grown."""
        capacity = capacity_of(item.plans)
        if self.ring is None:
            size = tuple((name, stack.rows_per_shard) for name, stack in self.tables.spec.stacks.items())
            self.ring = self._programs["init"](item.rows, size, self.options.window)
        elif any(r.value.shape[2] < capacity[name] for name, r in self.ring.rows.items()):
            self.ring = self.ring._replace(rows=self._programs["widen"](self.ring.rows, tuple(capacity.items())))

    def repair(self, item: Item) -> dict[str, Rows]:
        """Return the valid rows of a batch; count those from the ring."""
        plans, numbers = rings.numbers_of_rows(item.inputs[0]), (np.int32(item.number), np.int32(item.watermark))
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
