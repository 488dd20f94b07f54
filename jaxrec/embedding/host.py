"""Tables in host memory or in mapped files, and the plan made on the host.

Legend: S shards, V rows of a stack, U padded unique rows a shard, E embedding width, K slot width, N ids.
"""

import dataclasses
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxrec.embedding import kernels
from jaxrec.embedding.initial import initial_rows
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.types import Plan, RowOptimizer, Rows, Slot

_MANIFEST = "tables.json"


def host_plan(spec: EmbeddingSpec, ids: Mapping[str, np.ndarray], capacity=None) -> dict[str, Plan]:
    """Numbers the rows of a batch by first appearance, shard by shard, in one pass over a hash of 2 N entries.

    Stateless, so any number of threads can plan at once; bitwise equal to `device_plan`.

    Args:
      spec: the tables and lookups.
      ids: {lookup: integers [B, ...]}, -1 where an id is missing.
      capacity: {stack: U}, padded unique rows a shard; the exact need of the batch for stacks that it lacks.

    Returns:
      {stack: Plan} of numpy arrays. Where count > U the plan has dropped rows and must not be used.
    """
    capacity = capacity or {}
    plans = {}
    for name, stack in spec.stacks.items():
        lookups = {key: _as_int32(ids[key]) for key in spec.lookups_of(name)}
        plans[name] = _plan_stack(spec, stack, lookups, capacity.get(name))
    return plans


def _as_int32(ids):
    """Row-major i32; what does not fit stays outside every table instead of wrapping around into one."""
    ids = np.asarray(ids)
    if ids.dtype.itemsize > 2 and ids.dtype != np.int32:
        ids = np.clip(ids, -2, np.iinfo(np.int32).max)
    return np.ascontiguousarray(ids, np.int32)


def _plan_stack(spec, stack, lookups, capacity):
    n = sum(array.size for array in lookups.values())
    keys = np.full(1 << (2 * n).bit_length(), -1, np.int32)
    ranks = np.empty_like(keys)
    found = np.empty((stack.shards, n), np.int32)
    count = np.zeros(stack.shards, np.int32)
    positions, invalid = {}, 0
    for key, array in lookups.items():
        positions[key] = np.empty(array.size, np.int64)
        offset, limit = spec.columns_of(key)
        invalid += kernels.number_rows(
            array.reshape(-1), spec.lookups[key].hots, offset, limit, stack.shards,
            keys, ranks, found, count, positions[key],
        )  # fmt: skip
    capacity = max(1, int(count.max(initial=0))) if capacity is None else capacity
    unique = np.full((stack.shards, capacity), stack.rows, np.int32)
    for shard, used in enumerate(np.minimum(count, capacity)):
        unique[shard, :used] = found[shard, :used]
    inverse = {}
    for key, array in lookups.items():
        inverse[key] = np.empty(array.shape, np.int32)
        kernels.flatten_positions(positions[key], capacity, stack.shards * capacity, inverse[key].reshape(-1))
    return Plan(unique, inverse, count, np.int32(invalid))


def without_gaps(plan: Plan, keep: np.ndarray, size: int, rows: int) -> tuple[Plan, np.ndarray, np.ndarray]:
    """A plan of some of a plan's rows alone.

    Args:
      plan: of one stack.
      keep: bool[S, U], which rows to keep.
      size: C, padded rows a shard, at least the kept rows of any shard.
      rows: V.

    Returns:
      Plan of [S, C], without `inverse`; which row of U each of C is, i32[S, C]; which of C each row of U is,
      i32[S, U], 0 if not kept.
    """
    rows_of = np.asarray(plan.unique)
    unique, index = np.full((len(keep), size), rows, np.int32), np.zeros((len(keep), size), np.int32)
    for shard, row in enumerate(keep):
        at = np.flatnonzero(row)
        index[shard, : len(at)], unique[shard, : len(at)] = at, rows_of[shard, at]
    place = np.where(keep, np.cumsum(keep, axis=1, dtype=np.int32) - 1, 0).astype(np.int32)
    return Plan(unique, {}, keep.sum(axis=1).astype(np.int32), np.int32(0)), index, place


@dataclasses.dataclass(frozen=True, eq=False)
class HostTables:
    """Embedding tables and their optimizer slots in host memory: RAM, or one mapped file a shard.

    Reads and writes release the GIL and take no lock. `put` is for one writer in batch order; writers that do not
    take turns use `add`.

    Attributes:
      spec: the tables.
      layout: {stack: {slot: Slot}}.
      shards: {stack: one dict {'value': f32[V / S, E], slot: f32[V / S, K]} a shard}.
      directory: where the files are, or None.
    """

    spec: EmbeddingSpec
    layout: dict[str, dict[str, Slot]]
    shards: dict[str, list[dict[str, np.ndarray]]]
    directory: Path | None = None

    @classmethod
    def create(
        cls, spec: EmbeddingSpec, row_optimizer: RowOptimizer, directory: str | Path | None = None
    ) -> "HostTables":
        """Makes initial tables in RAM, or as files under a directory (best on tmpfs) that others can attach.

        Args:
          spec: the tables.
          row_optimizer: decides the slots.
          directory: where to put one file a (stack, shard); must not hold tables yet.

        Errors:
          ValueError: the directory holds tables already.
          OSError: there is no room, or no right to write; what was begun is removed.
        """
        layout = {name: row_optimizer.init(stack.width) for name, stack in spec.stacks.items()}
        directory = None if directory is None else Path(directory)
        if directory is not None:
            if (directory / _MANIFEST).exists():
                raise ValueError(f"{directory} holds tables already: attach them, or give another directory.")
            directory.mkdir(parents=True, exist_ok=True)
        try:
            tables = cls(spec, layout, _map_all(spec, layout, directory, create=True), directory)
        except OSError as error:
            for name, stack in spec.stacks.items():
                for shard in range(stack.shards):
                    _path(directory, name, shard).unlink(missing_ok=True)
            rows = sum(stack.rows for stack in spec.stacks.values())
            error.add_note(
                f"while making tables of {rows} rows in {directory}: free space there, or use another directory"
            )
            raise
        for name, stack in spec.stacks.items():
            for shard in range(stack.shards):
                tables.reset_shard(name, shard)
        if directory is not None:
            tables.flush()
            _commit_manifest(directory, spec, layout)
        return tables

    @classmethod
    def attach(cls, spec: EmbeddingSpec, row_optimizer: RowOptimizer, directory: str | Path) -> "HostTables":
        """Maps the files of tables that this or another process has created.

        Errors:
          ValueError: no complete tables are there, or they were made for another spec or row optimizer.
        """
        directory = Path(directory)
        layout = {name: row_optimizer.init(stack.width) for name, stack in spec.stacks.items()}
        try:
            found = json.loads((directory / _MANIFEST).read_text())
        except FileNotFoundError:
            raise ValueError(f"{directory} holds no complete tables: create them first.") from None
        wanted = _manifest(spec, layout)
        differ = [key for key in wanted if wanted[key] != found.get(key)]
        if differ:
            raise ValueError(
                f"the tables in {directory} differ in {differ}: found {[found.get(k) for k in differ]}, wanted "
                f"{[wanted[k] for k in differ]}. Use the spec and row optimizer that created them."
            )
        return cls(spec, layout, _map_all(spec, layout, directory, create=False), directory)

    def read(self, plans: dict[str, Plan]) -> dict[str, Rows]:
        """Gathers the planned rows and slots into fresh arrays; padding reads zero."""
        return {name: self._read_stack(name, plan) for name, plan in plans.items()}

    def _read_stack(self, name, plan):
        shape, count, unique = _used(plan)
        out = {}
        for part, table in self.shards[name][0].items():
            # Never reuse these buffers: jax may alias them (jax#37830).
            out[part] = np.empty((*shape, table.shape[1]), np.float32)
        for shard, tables in enumerate(self.shards[name]):
            for part, table in tables.items():
                kernels.gather(table, unique[shard], self.spec.shards, count[shard], out[part][shard])
        return Rows(out.pop("value"), out)

    def put(self, plans: dict[str, Plan], rows: dict[str, Rows], shards: Sequence[int] | None = None) -> "HostTables":
        """Stores final rows, in place, of all shards or of some; returns the same tables."""
        for name, plan in plans.items():
            _, count, unique = _used(plan)
            values = _parts(rows[name])
            for shard in range(self.spec.shards) if shards is None else shards:
                for part, table in self.shards[name][shard].items():
                    kernels.scatter(table, unique[shard], self.spec.shards, count[shard], values[part][shard])
        return self

    def add(
        self,
        plans: dict[str, Plan],
        rows: dict[str, Rows],
        old: dict[str, Rows],
        shards: Sequence[int] | None = None,
    ) -> "HostTables":
        """Adds rows - old to what the tables hold now, in place and without a lock; returns the same tables."""
        for name, plan in plans.items():
            _, count, unique = _used(plan)
            values, before = _parts(rows[name]), _parts(old[name])
            for shard in range(self.spec.shards) if shards is None else shards:
                for part, table in self.shards[name][shard].items():
                    kernels.scatter_add(
                        table, unique[shard], self.spec.shards, count[shard],
                        values[part][shard], before[part][shard],
                    )  # fmt: skip
        return self

    def reset_shard(self, stack: str, shard: int, chunk_rows: int = 1 << 14) -> None:
        """Gives all rows of one shard their initial values and slots, as if never touched."""
        tables, spec = self.shards[stack][shard], self.spec
        for start in range(0, len(tables["value"]), chunk_rows):
            chunk = slice(start, min(start + chunk_rows, len(tables["value"])))
            row = np.arange(chunk.start, chunk.stop) * spec.shards + shard
            scale = spec.row_scale(stack, row)
            tables["value"][chunk] = initial_rows(row, spec.stacks[stack].width, scale, spec.seed)
        for slot, layout in self.layout[stack].items():
            tables[slot][:] = layout.fill

    def flush(self) -> None:
        """Writes mapped files through to their disk; a no-op for tables in RAM."""
        for shards in self.shards.values():
            for tables in shards:
                for array in tables.values():
                    if isinstance(array.base, mmap.mmap):
                        array.base.flush()


def _parts(rows: Rows) -> dict[str, np.ndarray]:
    return {"value": np.asarray(rows.value), **{k: np.asarray(v) for k, v in rows.slots.items()}}


def _used(plan: Plan):
    """Shape [S, U], rows in use a shard and row numbers of a plan, on the host."""
    unique = np.asarray(plan.unique)
    return unique.shape, np.minimum(np.asarray(plan.count), unique.shape[1]), unique


def _map_all(spec, layout, directory, create):
    return {
        name: [
            _map_shard(directory and _path(directory, name, shard), stack, layout[name], create)
            for shard in range(stack.shards)
        ]
        for name, stack in spec.stacks.items()
    }


def _path(directory, stack, shard):
    return directory / f"{stack}.{shard:03d}"


def _map_shard(path, stack, slots, create):
    """One shard's arrays, one behind the other in a file, or in RAM if the path is None."""
    rows = stack.rows_per_shard
    widths = {"value": stack.width, **{slot: layout.width for slot, layout in slots.items()}}
    if path is None:
        return {part: np.empty((rows, width), np.float32) for part, width in widths.items()}
    size = 4 * rows * sum(widths.values())
    with open(path, "w+b" if create else "r+b") as file:
        if create:
            # A sparse map on a full tmpfs dies with SIGBUS; this raises OSError instead.
            os.posix_fallocate(file.fileno(), 0, size)
        mapped = mmap.mmap(file.fileno(), size)
    arrays, start = {}, 0
    for part, width in widths.items():
        arrays[part] = np.frombuffer(mapped, np.float32, rows * width, start).reshape(rows, width)
        start += 4 * rows * width
    return arrays


def _manifest(spec, layout):
    return {
        "tables": spec.digest,
        "slots": {name: {s: list(slot) for s, slot in slots.items()} for name, slots in layout.items()},
    }


def _commit_manifest(directory, spec, layout):
    """Names the tables complete, by one rename."""
    partial = directory / (_MANIFEST + ".partial")
    with open(partial, "w") as file:
        json.dump(_manifest(spec, layout), file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, directory / _MANIFEST)
