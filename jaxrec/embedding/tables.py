"""`Tables`: the one interface to embedding rows, in device memory, host memory (also pinned) or at shard servers.

Initial rows are an integer hash of (seed, row, column), so that any row can be redrawn at any time.

Legend: S shards, V rows of a stack, U padded unique rows per shard, E embedding width, n selected rows.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from jaxrec.embedding import kernels
from jaxrec.embedding.spec import EmbeddingSpec, Layout, Stack
from jaxrec.types import Array, Part, Plan, Rows

_GOLDEN = 0x9E3779B9
_ALIGNMENT = 64  # bytes


def mix(h):
    """Hash u32 by xor-shift-multiply rounds ("lowbias32", Wellons 2018)."""
    h = h ^ (h >> 16)
    h = h * np.uint32(0x7FEB352D)
    h = h ^ (h >> 15)
    h = h * np.uint32(0x846CA68B)
    return h ^ (h >> 16)


def hashes_of(row, key, column):
    """Hash rows u32[...], a key u32[] or u32[1], and the keys of the columns u32[E] to u32[..., E]."""
    return mix(mix(row ^ key)[..., None] + column[(None,) * row.ndim])


def keys_of_columns(width: int) -> np.ndarray:
    """Return the keys u32[E] of the columns of a row for `hashes_of`."""
    return np.arange(1, width + 1, dtype=np.uint32) * np.uint32(_GOLDEN)


def initial_rows(row, width, scale, seed, xp=np):
    """Draw initial embedding rows, uniform in [-scale, scale), from (seed, row, column) alone.

    numpy and jax.numpy give the same bits, as all steps except the last product are exact in f32.

    Args:
      row: i32[n] row numbers within the stack.
      width: embedding width E.
      scale: f32[n] or a float, half the width of each row's distribution.
      seed: non-negative integer below 2**32.
      xp: `numpy` or `jax.numpy`.

    Returns:
      f32[n, E].

    >>> initial_rows(np.array([0, 1]), 2, 1.0, seed=0).shape
    (2, 2)
    """
    key = mix(np.asarray([(seed * _GOLDEN + 1) & 0xFFFFFFFF], np.uint32))
    column = keys_of_columns(width)
    row, scale = row.astype(np.uint32), xp.asarray(scale, dtype=np.float32).reshape(-1)
    if xp is np:
        rows = np.empty((len(row), width), np.float32)
        kernels.initial_rows(row, key[0], column, scale, rows)
        return rows
    h = hashes_of(row, key, column)
    unit = (h >> 8).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)  # exact, in [-1, 1)
    return unit * scale[:, None]


_CHUNK_ROWS = 1 << 14

Parts = dict[str, Array]  # {'value': [V / S, E], slot: [V / S, K]} of one shard of one stack
# {(stack, shard): i32[n] rows of the stack that lie on that shard}
RowIds = Mapping[tuple[str, int], np.ndarray]


class Tables(Protocol):
    """Embedding rows and their optimizer slots, independent of where they are stored.

    Device tables are immutable: writes donate them and return new ones. All others change in place and writes return
    the same object. Generic code must therefore always continue with the returned tables.

    Attributes:
      spec: tables and shards.
      layout: parts of a row, per stack.
      step: number of puts applied to all shards; None if puts are not counted, or if the tables are torn.
      hosted: the same rows as `HostedTables`, which several threads can write in place; None on the devices.
      traced: a pytree with pure `read` and `put` for programs, whose result `with_traced` takes; None if only the host
        reaches the rows.
    """

    @property
    def spec(self) -> EmbeddingSpec: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def step(self) -> int | None: ...

    @property
    def hosted(self) -> "HostedTables | None": ...

    @property
    def traced(self) -> Any | None: ...

    def read(self, plans: dict[str, Plan]) -> dict[str, Rows]:
        """Gather the planned rows and slots; padding yields zeros."""

    def put(self, plans: dict[str, Plan], rows: dict[str, Rows]) -> Self:
        """Store updated rows; for a single writer in batch order."""

    def add(self, plans: dict[str, Plan], rows: dict[str, Rows], old: dict[str, Rows]) -> Self:
        """Add rows - old to the current rows; for concurrent writers."""

    def parts(self, stack: str) -> Mapping[str, Any]:
        """Return {part: S arrays [V / S, width], one per shard} of a stack: the current rows, where they are stored."""

    def on_shards(self, function: Callable[..., Any], *args) -> dict[tuple[str, int], Any]:
        """Run function(stack, shard, parts, *args) for every shard of every stack, where its rows are stored.

        Args:
          function: a pure function, picklable since rows may be in another process; `parts` is {part: [V / S, width]}.
          args: further arguments, picklable.

        Returns:
          {(stack, shard): result}.
        """

    def take(self, rows: RowIds) -> dict[tuple[str, int], dict[str, np.ndarray]]:
        """Copy selected rows to the host: {(stack, shard): {part: [n, width]}}."""

    def with_shard(self, stack: str, shard: int, parts: Mapping[str, np.ndarray]) -> Self:
        """Replace the first n rows of one shard; return the tables.

        Args:
          stack: name of the stack.
          shard: shard number.
          parts: {part: [n, width]} for all parts of the layout, n at most V / S.

        Raises:
          ValueError: no such shard, or parts of wrong shapes; nothing has changed.
        """

    def overwriting(self, shards: Sequence[int] | None = None, step: int | None = None) -> AbstractContextManager:
        """Context in which the caller replaces whole shards; tables that outlive the process are marked torn in it."""


class HostedTables(Tables, Protocol):
    """Tables that the host reads and writes in place: in its memory, also pinned, or at servers.

    Attributes:
      puts: i64[S, 2], puts begun and puts done per shard.
      directory: directory of mapped files; None if there are none.
    """

    @property
    def puts(self) -> np.ndarray: ...

    @property
    def directory(self) -> Path | None: ...

    def put(self, plans: dict[str, Plan], rows: dict[str, Rows], shards: Sequence[int] | None = None) -> Self:
        """As `Tables.put`, for some shards or all: each has one writer at a time."""

    def add(
        self, plans: dict[str, Plan], rows: dict[str, Rows], old: dict[str, Rows], shards: Sequence[int] | None = None
    ) -> Self:
        """As `Tables.add`, for some shards or all."""


def check_shard(spec: EmbeddingSpec, shard: int) -> None:
    """Raise ValueError if there is no such shard: a negative one would wrap around, too large a one be dropped."""
    if not isinstance(shard, int | np.integer) or not 0 <= shard < spec.shards:
        raise ValueError(f"shard={shard!r} must be a whole number from 0 to {spec.shards - 1}.")


def check_parts(spec: EmbeddingSpec, layout: Layout, stack: str, shard: int, parts: Mapping[str, Any]) -> None:
    """Raise ValueError if rows do not fit a shard: they would be broadcast, or leave it partly written."""
    check_shard(spec, shard)
    most, found = spec.stacks[stack].rows_per_shard, {name: np.shape(rows) for name, rows in parts.items()}
    given = min([most, *(shape[0] for shape in found.values() if shape)])
    if found != {name: (given, part.width) for name, part in layout[stack].items()}:
        wanted = {name: ("n", part.width) for name, part in layout[stack].items()}
        raise ValueError(
            f"parts of shard {shard} of {stack!r} have the shapes {found}, but {wanted} are expected, with one n up to "
            f"{most}."
        )


def chosen_shards(spec: EmbeddingSpec, shards: Sequence[int] | None) -> list[int]:
    """Return checked shard numbers as a list; all if None."""
    chosen = list(range(spec.shards) if shards is None else shards)  # a tuple would be an index of several axes
    for shard in chosen:
        check_shard(spec, shard)
    return chosen


def used_rows(tables: Tables, name: str, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Return row numbers i32[S, U] and rows in use i32[S] of a plan, checked, as kernels do not check bounds."""
    unique, rows = np.asarray(plan.unique), tables.spec.stacks[name].rows
    count = np.minimum(np.asarray(plan.count), unique.shape[1])
    if len(unique) != tables.spec.shards or len(count) != len(unique) or kernels.outside(unique, count, rows):
        raise ValueError(
            f"a plan of {len(unique)} shards for {name!r}, of which these tables have {rows} rows in "
            f"{tables.spec.shards} shards: its row numbers are out of range. Plan with their own spec."
        )
    return unique, count


def fitting_parts(layout: Layout, name: str, plan: Plan, rows: Rows) -> dict[str, Array]:
    """Return {'value' or slot: [S, U, width]} of one stack's rows, after checking their shapes and dtypes."""
    parts = {"value": rows.value, **rows.slots}
    found = {part: (array.shape, str(array.dtype)) for part, array in parts.items()}
    wanted = {part: ((*plan.unique.shape, one.width), one.dtype) for part, one in layout[name].items()}
    if found != wanted:
        raise ValueError(
            f"rows of {name!r} have the shapes {found}, but plan and tables want {wanted}: read, update and put "
            "with one plan and one row optimizer."
        )
    return parts


def parts_on_host(tables: Tables, name: str, plan: Plan, rows: Mapping[str, Rows]) -> dict[str, np.ndarray]:
    """`fitting_parts` as numpy arrays."""
    return {part: np.asarray(array) for part, array in fitting_parts(tables.layout, name, plan, rows[name]).items()}


def aligned_empty(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Allocate an array at a multiple of 64 bytes: JAX takes such an array on a CPU without copying it."""
    size = np.dtype(dtype).itemsize * math.prod(shape)
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def empty_parts(stack: Stack, parts: Mapping[str, Part]) -> Parts:
    """Allocate uninitialised arrays for one shard of a stack."""
    return {name: np.empty((stack.rows_per_shard, one.width), one.dtype) for name, one in parts.items()}


def initial_parts(spec: EmbeddingSpec, layout: Layout, stack: str, row: np.ndarray) -> dict[str, np.ndarray]:
    """Return the initial values and slots of rows i32[n] of a stack, {part: [n, width]}, for all kinds of `Tables`."""
    width, scale = spec.stacks[stack].width, spec.row_scale(stack, row)
    value = initial_rows(row, width, scale, spec.seed)
    slots = {name: part for name, part in layout[stack].items() if part.fill is not None}
    return {"value": value.astype(spec.dtype, copy=False)} | {
        name: np.full((len(row), part.width), part.fill, part.dtype) for name, part in slots.items()
    }


def fill_initial(spec: EmbeddingSpec, layout: Layout, stack: str, shard: int, parts: Parts) -> None:
    """Fill the numpy arrays of one shard with initial rows."""
    for rows, initial in initial_chunks(spec, layout, stack, shard):
        for name, array in initial.items():
            parts[name][rows] = array


def initial_chunks(
    spec: EmbeddingSpec, layout: Layout, stack: str, shard: int
) -> Iterator[tuple[slice, dict[str, np.ndarray]]]:
    """Yield (slice of one shard's rows, their initial parts), in chunks, as drawing takes far more memory than rows."""
    rows = spec.stacks[stack].rows_per_shard
    for start in range(0, rows, _CHUNK_ROWS):
        chunk = slice(start, min(start + _CHUNK_ROWS, rows))
        yield chunk, initial_parts(spec, layout, stack, np.arange(chunk.start, chunk.stop) * spec.shards + shard)


def embedding_matrix(tables: Tables, table: str, ids: Any = None) -> np.ndarray:
    """Copy the embeddings of one table to the host, in the order of the ids.

    Args:
      tables: any `Tables`.
      table: name of the table in the spec.
      ids: i32[...], from 0 to rows - 1, in any order, with or without repeats; all rows if None.

    Returns:
      f32[rows, E] for all rows, f32[..., E] for ids.

    >>> from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, sgd
    >>> spec = EmbeddingSpec({'user': Table(9, 4), 'item': Table(5, 4)}, {'pair': Lookup(('user', 'item'))})
    >>> tables = HostTables.create(spec, sgd(0.1))
    >>> matrix = embedding_matrix(tables, 'item')
    >>> matrix.shape
    (5, 4)
    >>> bool((embedding_matrix(tables, 'item', [3, 0]) == matrix[[3, 0]]).all())
    True
    """
    stack, first, last = range_of(tables.spec, table)
    width, shards = tables.spec.stacks[stack].width, tables.spec.shards
    if ids is None:
        matrix = np.empty((last - first, width), np.float32)
        for shard, rows in enumerate(tables.parts(stack)["value"]):
            write_shard(matrix, rows, first, shard, shards)
        return matrix
    ids = _checked_ids(table, ids, last - first)
    rows, found = first + ids.ravel(), np.empty((ids.size, width), np.float32)
    of_shard = [rows % shards == shard for shard in range(shards)]
    picked = {(stack, shard): rows[mine] for shard, mine in enumerate(of_shard) if mine.any()}
    for (_, shard), parts in tables.take(picked).items():
        found[of_shard[shard]] = parts["value"]
    return found.reshape(*ids.shape, width)


def range_of(spec: EmbeddingSpec, table: str) -> tuple[str, int, int]:
    """Return a table's stack, its first row in the stack, and the row after its last."""
    if not isinstance(table, str) or table not in spec.tables:
        known = list(spec.tables)
        raise ValueError(f"table {table!r:.80} is none of the {len(known)} of the spec: {str(known)[:300]}.")
    name = f"width_{spec.tables[table].width}"
    stack = spec.stacks[name]
    place = stack.tables.index(table)
    return name, stack.offsets[place], stack.offsets[place + 1]


def write_shard(matrix: np.ndarray, rows: Array, first: int, shard: int, shards: int) -> None:
    """Copy rows [V / S, width] of one shard into the matrix [rows, width] of a table whose first row is `first`."""
    begin = (shard - first) % shards  # the table's first row on this shard
    wanted = matrix[begin::shards]
    place = (first + begin) // shards
    wanted[:] = rows[place : place + len(wanted)]


def _checked_ids(table, ids, rows):
    ids = np.asarray(ids)
    ids = ids if ids.size else ids.astype(np.int32)  # numpy makes floats of an empty list
    if ids.dtype.kind not in "iu":
        raise ValueError(f"ids of {table!r} are {ids.dtype}, but ids are whole numbers: cast them.")
    if ids.size and not (ids.min() >= 0 and ids.max() < rows):
        wrong = ids[(ids < 0) | (ids >= rows)].ravel()
        raise ValueError(
            f"{len(wrong)} ids of {table!r} are outside of it, the first is {wrong[0]}: ids run from 0 to {rows - 1}, "
            "and -1, which is no id, has no row."
        )
    return ids.astype(np.int32)


def is_initial(tables: Tables) -> bool:
    """Return whether all rows have their initial values, so that they can be restored without being saved."""
    return all(tables.on_shards(_shard_is_initial, tables.spec, tables.layout).values())


def _shard_is_initial(stack, shard, parts, spec, layout):
    return all(
        np.array_equal(np.asarray(parts[name][rows]), array)
        for rows, initial in initial_chunks(spec, layout, stack, shard)
        for name, array in initial.items()
    )
