"""Tables in host memory that the devices read and write themselves, inside of the program of a step.

A row and its slots are one record, padded to 16 bytes. On a GPU the records are registered with the driver, so that its
threads reach them over the link, at their address in host memory; on a CPU the same kernels run on the host.

Programs wait for each other through `puts`, a result of each put and an operand of each read, so that XLA cannot
reorder them. The host waits for the last put before it reads or writes a record.

Legend: S shards, V rows of a stack, U padded unique rows per shard, E embedding width, K slot width, L record width.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import mmap
import os
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.embedding import native
from jaxrec.embedding.host import HostTables, PutCounts
from jaxrec.embedding.spec import EmbeddingSpec, Layout
from jaxrec.embedding.tables import RowIds, fitting_parts
from jaxrec.sharding import SPLIT, as_mesh, check_split, put_on_mesh
from jaxrec.types import Part, Plan, RowOptimizer, Rows

_LANE = 4  # floats that a thread moves at a time


@functools.partial(jax.tree_util.register_dataclass, data_fields=["address", "puts"], meta_fields=["spec", "layout"])
@dataclasses.dataclass(frozen=True)
class PinnedRows:
    """What a program needs to read and put rows of `PinnedTables`; pure, as each put returns new `puts`.

    Attributes:
      address: {stack: i32[S, 2]} where the records of each shard begin, as halves of 64 bits; inside shard_map only the
        local shards.
      puts: {stack: i32[S]} puts by programs so far.
      spec: the complete spec, also inside shard_map.
      layout: parts of a row, per stack.
    """

    address: dict[str, jax.Array]
    puts: dict[str, jax.Array]
    spec: EmbeddingSpec
    layout: Layout

    def read(self, plans: dict[str, Plan]) -> dict[str, Rows]:
        """Gather the planned rows and slots; padding yields zeros. Raises ValueError for plans of another spec."""
        return {name: self._read_stack(name, plan) for name, plan in plans.items()}

    def put(self, plans: dict[str, Plan], rows: dict[str, Rows]) -> "PinnedRows":
        """Store updated rows."""
        return self._after({name: self._put_stack(name, plan, rows[name]) for name, plan in plans.items()})

    def begin_read(self, plans: dict[str, Plan], unfinished: int) -> tuple[dict[str, jax.Array], "PinnedRows"]:
        """Begin to gather the planned records, beside the programs that follow, until `end_read`.

        Args:
          plans: {stack: Plan}; they must stay in memory until `end_read`. A row below 0 is not read and yields zeros.
          unfinished: number of the last puts that need not have ended: their rows may be old, new or torn.

        Returns:
          {stack: f32[S, U, L]}, to be read after `end_read`, and these rows after the beginning.
        """
        found = {name: self._begin_read_stack(name, plan, unfinished) for name, plan in plans.items()}
        puts = {name: puts for name, (_, puts) in found.items()}
        return {name: records for name, (records, _) in found.items()}, self._after(puts)

    def end_read(self) -> tuple[jax.Array, "PinnedRows"]:
        """Make what follows wait for the last `begin_read`; return i32[] 0, and these rows after that.

        Add the 0 to an operand of what reads the records: only then does XLA keep their order.
        """
        name = next(iter(self.puts))
        shapes = jax.ShapeDtypeStruct(self.puts[name].shape, jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        puts, nothing = jax.ffi.ffi_call("jaxrec_end_read", shapes, has_side_effect=True)(self.puts[name])
        return nothing, self._after({name: puts})

    def begin_put(self, plans: dict[str, Plan], records: dict[str, jax.Array]) -> "PinnedRows":
        """Begin to store records f32[S, U, L], beside the programs that follow.

        Plans and records must stay in memory until the put has ended: at the `end_read` of one that had to wait for it,
        at the next `read` or `put`, or when the host reads the rows.
        """
        return self._after(
            {
                name: self._call("jaxrec_begin_put", name, plan, self._token(name), records[name])
                for name, plan in plans.items()
            }
        )

    def rows_of(self, records: dict[str, jax.Array]) -> dict[str, Rows]:
        """Split records f32[S, U, L] into values and slots."""
        return {name: self._rows_of_stack(name, one) for name, one in records.items()}

    def records_of(self, plans: dict[str, Plan], rows: dict[str, Rows]) -> dict[str, jax.Array]:
        """Join values and slots to records f32[S, U, L]; the inverse of `rows_of`."""
        return {name: self._records_of_stack(name, plan, rows[name]) for name, plan in plans.items()}

    def _after(self, puts):
        return dataclasses.replace(self, puts={**self.puts, **puts})

    def _token(self, name):
        return jax.ShapeDtypeStruct(self.puts[name].shape, jnp.int32)

    def _records(self, name, plan):
        return jax.ShapeDtypeStruct((*plan.unique.shape, places(self.layout[name])[1]), jnp.float32)

    def _read_stack(self, name, plan):
        return self._rows_of_stack(name, self._call("jaxrec_read_rows", name, plan, self._records(name, plan)))

    def _begin_read_stack(self, name, plan, unfinished):
        shapes = self._records(name, plan), self._token(name)
        return self._call("jaxrec_begin_read", name, plan, shapes, unfinished=np.int64(unfinished))

    def _put_stack(self, name, plan, rows):
        return self._call("jaxrec_put_rows", name, plan, self._token(name), self._records_of_stack(name, plan, rows))

    def _rows_of_stack(self, name, records):
        where, _ = places(self.layout[name])
        parts = {part: _unpacked(records[..., place], self.layout[name][part]) for part, place in where.items()}
        return Rows(parts.pop("value"), parts)

    def _records_of_stack(self, name, plan, rows):
        parts = fitting_parts(self.layout, name, plan, rows)
        where, width = places(self.layout[name])
        used = sum(place.stop - place.start for place in where.values())
        padding = jnp.zeros((*plan.unique.shape, width - used), jnp.float32)
        return jnp.concatenate([*(_packed(parts[part]) for part in where), padding], axis=-1)

    def _call(self, target, name, plan, shapes, *records, **more):
        puts, stack = self.puts[name], self.spec.stacks[name]
        if len(plan.unique) != len(puts):
            raise ValueError(
                f"a plan of {len(plan.unique)} shards for {name!r}, but the tables have {len(puts)} here of "
                f"{stack.shards}: plan with their own spec."
            )
        # With a side effect, so that XLA neither drops a call nor makes it twice.
        call = jax.ffi.ffi_call(target, shapes, has_side_effect=True)
        fixed = {"shards": np.int64(stack.shards), "rows_per_shard": np.int64(stack.rows_per_shard), **more}
        return call(plan.unique, plan.count, self.address[name], puts, *records, **fixed)


def places(parts: Mapping[str, Part]) -> tuple[dict[str, slice], int]:
    """Return where the parts of a row are in its record, and the width L of the record, a multiple of 16 bytes.

    >>> places({"value": Part(16, "float32", None), "accumulator": Part(1, "float32", 0.0)})
    ({'value': slice(0, 16, None), 'accumulator': slice(16, 17, None)}, 20)
    >>> places({"value": Part(16, "float16", None), "accumulator": Part(1, "float32", 0.0)})
    ({'value': slice(0, 8, None), 'accumulator': slice(8, 9, None)}, 12)
    """
    sizes = [-(-part.row_bytes // 4) for part in parts.values()]  # in f32
    ends = list(itertools.accumulate(sizes))
    where = {name: slice(end - size, end) for name, size, end in zip(parts, sizes, ends, strict=True)}
    return where, -(-ends[-1] // _LANE) * _LANE


def _packed(part):
    """Return a part of rows as f32: float16 in pairs, bit by bit."""
    if part.dtype == jnp.float32:
        return part
    pairs = jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, part.shape[-1] % 2)])
    return jax.lax.bitcast_convert_type(pairs.reshape(*part.shape[:-1], -1, 2), jnp.float32)


def _unpacked(floats, part):
    if part.dtype == "float32":
        return floats
    pairs = jax.lax.bitcast_convert_type(floats, jnp.dtype(part.dtype))
    return pairs.reshape(*floats.shape[:-1], -1)[..., : part.width]


class PinnedTables(PutCounts):
    """Embedding tables and their optimizer slots in host memory, read and written by the devices in the step's program.

    For tables that are larger than the memory of the GPUs: a step moves the rows of its batch over the link and nothing
    else. The kernels are compiled at first use, by the nvcc of `jax[cuda13]` or, on a CPU, by a C++ compiler.

    From the host they are used like `HostTables`: each access waits until the devices have put the last rows. Rows that
    the host writes are seen by all later steps.

    >>> from jaxrec.embedding import Lookup, Table, sgd
    >>> spec = EmbeddingSpec({'item': Table(10, 4)}, {'item': Lookup('item')})
    >>> PinnedTables.create(spec, sgd(0.1)).step
    0
    """

    def __init__(self, host: HostTables, records: dict[str, list[np.ndarray]], mesh: jax.sharding.Mesh):
        """See `create`; `host` has views of the records {stack: f32[V / S, L] per shard}."""
        self._host, self.spec, self.layout, self.puts = host, host.spec, host.layout, host.puts
        check_split(self.spec.shards, mesh)
        self._last: list[PinnedRows] = []  # `traced`, in a list that the finalizer shares
        self.uses_by_host = 0  # accesses of `host`, each of which may have changed rows
        every = [one for shards in records.values() for one in shards]
        library = native.load(mesh.devices.flat[0])
        self._wait = functools.partial(native.wait_for_puts, library, mesh)
        _register(self, library, every, self._last, self._wait)
        address = {name: np.array([one.ctypes.data for one in shards], np.uint64) for name, shards in records.items()}
        self._last[:] = [
            PinnedRows(
                {name: put_on_mesh(of.view(np.int32).reshape(-1, 2), mesh, SPLIT) for name, of in address.items()},
                {name: put_on_mesh(np.zeros(self.spec.shards, np.int32), mesh, SPLIT) for name in records},
                self.spec,
                self.layout,
            )
        ]

    @classmethod
    def create(
        cls, spec: EmbeddingSpec, row_optimizer: RowOptimizer, mesh: jax.sharding.Mesh | None = None
    ) -> "PinnedTables":
        """Create initial tables for the devices of a mesh, each of which reads and writes its own shards.

        Args:
          spec: tables and shards.
          row_optimizer: decides the slots.
          mesh: from `make_mesh`; one device if None.

        Raises:
          OSError: the kernels cannot be compiled, or the driver refuses the memory.
          NotImplementedError: the devices are neither CPUs nor NVIDIA's GPUs.
          ValueError: the shards cannot be split over the mesh.
        """
        layout, mesh = spec.layout(row_optimizer), as_mesh(mesh)
        _wait_for_releases()
        records, shards = {}, {}
        for name, stack in spec.stacks.items():
            where, width = places(layout[name])
            records[name] = [_whole_pages(stack.rows_per_shard, width) for _ in range(spec.shards)]
            view = lambda one, place, part: one[:, place].view(part.dtype)[:, : part.width]
            shards[name] = [
                {part: view(one, place, layout[name][part]) for part, place in where.items()} for one in records[name]
            ]
        return cls(HostTables(spec, layout, shards).filled(), records, mesh)

    def with_traced(self, rows: PinnedRows) -> Self:
        """Return these tables after a program that has put rows once."""
        self._last[:] = [rows]
        self.puts += 1
        return self

    def keep(self, arrays: Any) -> None:
        """Keep what a read or a put that has begun still uses, until `with_traced`, or until it has ended."""
        self._last.append(arrays)

    @property
    def traced(self) -> PinnedRows:
        """The rows for a program, after the last put."""
        return self._last[0]

    @property
    def host(self) -> HostTables:
        """The same rows as `HostTables`, once the devices have put the last ones; ask anew after each step."""
        jax.block_until_ready(self.traced.puts)
        self._wait()
        self.uses_by_host += 1
        return self._host

    def read(self, plans: dict[str, Plan]) -> dict[str, Rows]:
        """Gather the planned rows and slots into arrays of the host; padding yields zeros."""
        return self.host.read(plans)

    def put(self, plans: dict[str, Plan], rows: dict[str, Rows], shards: Sequence[int] | None = None) -> Self:
        """Store updated rows from the host; return the same tables."""
        self.host.put(plans, rows, shards)
        return self

    def add(
        self, plans: dict[str, Plan], rows: dict[str, Rows], old: dict[str, Rows], shards: Sequence[int] | None = None
    ) -> Self:
        """Add rows - old to the current rows, on the host and without a lock; return the same tables."""
        self.host.add(plans, rows, old, shards)
        return self

    def parts(self, stack: str) -> dict[str, list[np.ndarray]]:
        """See `HostTables`; views that the next step writes."""
        return self.host.parts(stack)

    def on_shards(self, function: Callable[..., Any], *args) -> dict[tuple[str, int], Any]:
        """See `HostTables`."""
        return self.host.on_shards(function, *args)

    def take(self, rows: RowIds) -> dict[tuple[str, int], dict[str, np.ndarray]]:
        """See `HostTables`."""
        return self.host.take(rows)

    def with_shard(self, stack: str, shard: int, parts: Mapping[str, np.ndarray]) -> Self:
        """See `HostTables`."""
        self.host.with_shard(stack, shard, parts)
        return self

    @contextlib.contextmanager
    def overwriting(self, shards: Sequence[int] | None = None, step: int | None = None):
        """See `HostTables`."""
        with self.host.overwriting(shards, step):
            yield self

    def flush(self) -> None:
        """Do nothing: the rows are in RAM."""


def _whole_pages(rows, width):
    """Return f32[rows, width] of zeros on pages of its own, as a page is registered once."""
    return np.frombuffer(mmap.mmap(-1, 4 * rows * width), np.float32).reshape(rows, width)


def _register(tables, library, records, last, wait):
    """Give the devices access to the records for as long as the tables live."""
    for number, one in enumerate(records):
        if wrong := library.jaxrec_register(one.ctypes.data, one.nbytes):
            release(library, records[:number], [], wait)
            raise OSError(
                f"the driver refuses {one.nbytes / 1e9:.1f} GB of host memory for the GPU ({wrong.decode()}): make the "
                "tables smaller, raise the limit of locked memory, or keep them in HostTables (--tables host)."
            )
    # The arguments keep the memory until the last program has written it, though the tables are gone.
    drop = weakref.finalize(tables, _dropped.put, functools.partial(release, library, records, last, wait))
    atexit.register(drop)  # before `_wait_for_releases`, which is registered


def release(
    library: ctypes.CDLL, records: Sequence[np.ndarray], last: Sequence[PinnedRows], wait: Callable[[], None]
) -> None:
    """Take the records from the devices, once the last program has put its rows."""
    with contextlib.suppress(RuntimeError):  # of a program that failed, which its step has raised
        jax.block_until_ready(last)
    wait()
    for one in records:
        library.jaxrec_unregister(one.ctypes.data)


# Calls for a thread, as Python up to 3.11 may collect tables wherever it allocates, also inside of JAX, which there
# corrupts the tracebacks that it captures (jaxlib 0.10). A SimpleQueue may be put to in a collection.
_dropped = queue.SimpleQueue[Callable[[], Any]]()


@functools.cache
def _start_releasing():
    """Start the thread, and return the id of the process that has it."""
    threading.Thread(target=_release_dropped, name="release-pinned-rows", daemon=True).start()
    atexit.register(_wait_for_releases)
    return os.getpid()


def _release_dropped():
    while True:
        try:
            _dropped.get()()
        except Exception:  # those who wait for later ones must not wait for ever
            traceback.print_exc()


def _wait_for_releases():
    """Wait until the memory of the tables dropped so far is free."""
    if _start_releasing() != os.getpid():  # a forked child has no such thread
        return
    done = threading.Event()
    _dropped.put(done.set)
    done.wait()
