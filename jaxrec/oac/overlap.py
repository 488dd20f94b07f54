"""OAC where the devices read and write the rows themselves: steps of one thread, whose transfers overlap the programs.

    begin to read batch t + 1          on a stream of its own, beside the update of t
    replay t, update t, append t       on the stream of the programs
    begin to put batch t               on a stream of its own, beside the update of t + 1

A batch is read while up to W - 1 puts before it are unfinished. Just before its update, the device looks up in a stamp
of each row which batch has written it last: if that is one of the last W, the row is taken from the ring, which holds
their records, and what was read is discarded, be it old, new or torn. So every step sees the rows of serial execution.
A row that the ring will hold is not read at all: the ring is an exact cache of the rows of the last W batches.

After OAC (OpenReview xHQeok6ZWX), see `ring`; here its rows are records, f32[S, W, U, L]. Legend: W window, S shards, V
rows of a shard, U padded unique rows per shard, L record width.
"""

import collections
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.embedding import PinnedTables
from jaxrec.embedding.pinned import PinnedRows, places
from jaxrec.oac import ring as rings
from jaxrec.oac.ring import Ring
from jaxrec.sharding import EVERYWHERE, SPLIT, as_mesh, plan_specs, shardings
from jaxrec.step import checked_plans
from jaxrec.task import Metrics, Task
from jaxrec.types import Array, Batch, Plan, Rows, TrainState


class Begun(NamedTuple):
    """The rows of a batch that is being read, with the arguments, which must stay until that has ended."""

    plans: dict[str, Plan]  # of the batch, as given
    sent: dict[str, Plan]  # the same, on several devices
    unique: dict[str, Array]  # row numbers, -1 for rows that the ring will hold
    records: dict[str, Array]


class Overlap:
    """The step of a task over `PinnedTables`, whose transfers overlap the programs: OAC for `Serial`, in one thread.

        with Serial(Overlap(task, window=4), task.init(params, "pinned")) as engine:
            state = engine.train(batches)

    Bitwise equal to the step of the task over host tables (over pinned ones, XLA compiles update and put as one
    program, and may round otherwise). Nothing lags: whoever reads the tables, on the host or in a program, waits for
    the puts that have begun. If the host has used the tables, or others have trained them, the ring is void, and the
    next batch is read anew.

    Args:
      task: Task, whose `update` runs.
      window: W, number of batches in the ring, of which one less may be unfinished when a batch is read. The ring holds
        4 W U L bytes per shard and stack on the devices, and 8 V of stamps. More than 2 pay by what is not read.

    >>> import jax.numpy as jnp, numpy as np, optax, jaxrec
    >>> from jaxrec import EmbeddingSpec, Lookup, Serial, Table, sgd
    >>> spec = EmbeddingSpec({'item': Table(9, 2)}, {'item': Lookup('item')})
    >>> loss = lambda params, activations, batch: (activations['item'].sum(-1) + params - batch.label) ** 2
    >>> task = jaxrec.Task(spec, loss, optax.sgd(0.1), sgd(0.1))
    >>> batches = [jaxrec.Batch({'item': np.array([k % 3, 8])}, np.ones(2, np.float32)) for k in range(5)]
    >>> with Serial(Overlap(task, window=2), task.init(jnp.zeros(()), 'pinned')) as engine:
    ...     patched = [int(metrics['patched_rows']) for _, metrics in engine.run(batches)]
    >>> patched  # row 8 is in each batch, and others come back after three
    [0, 1, 1, 1, 1]
    """

    def __init__(self, task: Task, window: int = 2):
        self.task, self.spec, self.window = task, task.spec, whole_number("window", window)
        self._update: Callable = jax.jit(task.checked_update, donate_argnums=0)
        self._programs = compile_programs(as_mesh(task.mesh), tuple(task.spec.stacks), self.window)
        self._capacity: dict[str, int] = {}
        self._ring: Any = None  # Ring; None when it is void
        self._number = 0  # of the next batch
        self._begun: Begun | None = None
        self._announced: dict[str, Plan] | None = None
        self._kept: collections.deque = collections.deque(maxlen=self.window + 1)  # what unfinished puts read
        self._seen: tuple = ()

    def announce(self, plans: dict[str, Plan] | None) -> None:
        """Name the plans of the batch after the next `step`, which begins to read its rows; None for no batch."""
        self._announced = plans

    def step(self, state: TrainState, batch: Batch, plans: dict[str, Plan] | None = None) -> tuple[TrainState, Metrics]:
        """See `Task.step`; metrics have 'patched_rows' i32[], the rows that the ring has provided.

        Raises:
          ValueError: also for other tables than `PinnedTables`.
        """
        plans = checked_plans(self.task.spec, state, batch, plans, self._capacity)
        tables = state.tables
        if not isinstance(tables, PinnedTables):
            raise ValueError(f"Overlap is for PinnedTables, not {type(tables).__name__}: give Serial the task itself.")
        self._attach(tables)
        self._fit_ring(tables.traced, plans)
        begun, traced = self._begun, tables.traced
        if begun is None or begun.plans is not plans:
            traced = self._drop_begun(traced)
            begun, traced = self._begin(tables, traced, plans)
        plans, number = begun.sent, np.int32(self._number)
        numbers = rings.numbers_of_rows(plans)
        rows, patched, traced = self._programs["replay"](self._ring, traced, numbers, begun.records, number)
        self._begun, upcoming, self._announced = None, self._announced, None
        if upcoming is not None:
            self._begun, traced = self._begin(tables, traced, upcoming, ahead=1)
        dense, new, metrics = self._update(state.dense, rows, plans, batch)
        # Donated: should this fail, the next step waits for all puts, and finds nothing in a ring of its own.
        ring, self._ring, self._seen = self._ring, None, ()
        self._ring, records, traced = self._programs["append"](ring, traced, numbers, new, number)
        self._number += 1
        self._kept.append((numbers, records))
        tables = tables.with_traced(traced)
        tables.keep((*self._kept, self._begun))
        self._seen = uses_of(tables)
        return TrainState(dense, tables), {**metrics, "patched_rows": patched}

    def _attach(self, tables):
        """Void the ring and what is being read, if others have used the tables since the last step."""
        if self._seen == uses_of(tables):
            return
        self._drop_begun(tables.traced)
        _ = tables.host  # waits for all puts, whoever has begun them
        self._kept.clear()
        self._ring, self._seen = None, uses_of(tables)

    def _begin(self, tables, traced, plans, ahead=0):
        sent = self._programs["send"](plans)
        numbers, number = rings.numbers_of_rows(sent), np.int32(self._number + ahead)
        unique, records, traced = self._programs["begin"](self._ring, traced, numbers, number)
        begun = Begun(plans, sent, unique, records)
        tables.keep(begun)  # though this step may fail
        return begun, traced

    def _drop_begun(self, traced):
        if self._begun is not None:
            traced = self._programs["end"](traced)
            self._begun = None
        return traced

    def _fit_ring(self, traced, plans):
        capacity = tuple((name, plan.unique.shape[1]) for name, plan in plans.items())
        if self._ring is None:
            self._ring = self._programs["init"](traced, capacity)
        elif any(self._ring.rows[name].shape[2] < width for name, width in capacity):
            self._ring = self._ring._replace(rows=self._programs["widen"](self._ring.rows, capacity))


def uses_of(tables: PinnedTables) -> tuple:
    """Return what changes whenever others read or write the rows."""
    return weakref.ref(tables), int(tables.puts[0, 0]), tables.uses_by_host


@functools.lru_cache
def compile_programs(mesh: jax.sharding.Mesh, stacks: tuple[str, ...], window: int) -> dict[str, Callable]:
    """Return the jitted functions of this module, shared by all over a mesh."""
    split = shardings(SPLIT, mesh)
    plans = plan_specs(stacks)
    placed = shardings(plans, mesh)

    def mapped(function, *inputs):
        # Not checked: a call of `PinnedRows` does not say over which axes its results vary.
        return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=SPLIT, check_vma=False)

    def over(function, *inputs, **options):
        return jax.jit(mapped(function, *inputs), **options)

    replay_mapped = mapped(replay, SPLIT, SPLIT, plans, SPLIT, EVERYWHERE)

    def replay_all(*given):
        rows, patched, traced = replay_mapped(*given)
        return rows, jnp.sum(patched), traced

    return {
        # One GPU has planned them itself; to several devices each program would send them anew.
        "send": (lambda given: given) if mesh.size == 1 else functools.partial(jax.device_put, device=placed),
        "begin": over(functools.partial(begin, window), SPLIT, SPLIT, plans, EVERYWHERE),
        "replay": jax.jit(replay_all),
        "append": over(append, SPLIT, SPLIT, plans, SPLIT, EVERYWHERE, donate_argnums=0),
        "end": over(lambda traced: traced.end_read()[1], SPLIT),
        "init": jax.jit(functools.partial(_init, window), static_argnums=1, out_shardings=split),
        "widen": jax.jit(rings.widen, static_argnums=1, out_shardings=split),
    }


def begin(window: int, ring: Ring, traced: PinnedRows, plans: dict[str, Plan], number: Array):
    """Begin to read batch `number`, except rows that the ring will hold; return the rows read, records, tables."""
    found = rings.validate(ring, plans, number, shards=traced.spec.shards)
    read = {name: plan._replace(unique=jnp.where(found[name] >= 0, -1, plan.unique)) for name, plan in plans.items()}
    records, traced = traced.begin_read(read, (window - 1) * len(plans))
    return {name: plan.unique for name, plan in read.items()}, records, traced


def replay(
    ring: Ring, traced: PinnedRows, plans: dict[str, Plan], records: dict[str, Array], number: Array
) -> tuple[dict[str, Rows], Array, PinnedRows]:
    """Return the rows of batch `number` as of serial execution, how many are of the ring, the tables."""
    nothing, traced = traced.end_read()
    found = rings.validate(ring, plans, number, shards=traced.spec.shards)
    found = {name: one + nothing for name, one in found.items()}
    return traced.rows_of(rings.replay(ring, records, found)), rings.count_found(found)[None], traced


def append(
    ring: Ring, traced: PinnedRows, plans: dict[str, Plan], rows: dict[str, Rows], number: Array
) -> tuple[Ring, dict[str, Array], PinnedRows]:
    """Write batch `number` to the ring, and begin to put it; return ring, records and tables."""
    records = traced.records_of(plans, rows)
    ring = rings.append(ring, plans, records, number, traced.spec.shards)
    return ring, records, traced.begin_put(plans, records)


def _init(window, traced, capacity):
    shards = next(iter(traced.puts.values())).shape[0]
    empty = {name: jnp.zeros((shards, u, places(traced.layout[name])[1]), jnp.float32) for name, u in capacity}
    return rings.init(empty, {name: traced.spec.stacks[name].rows_per_shard for name in empty}, window)
