"""Tables in device memory: a pytree of arrays [S, V / S, E] sharded over the mesh, with pure read, put and add.

Legend: S shards, V rows of a stack, U padded unique rows per shard, E embedding width, K slot width.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.embedding.lookup import bucket
from jaxrec.embedding.spec import EmbeddingSpec, Layout
from jaxrec.embedding.tables import (
    RowIds,
    check_parts,
    fitting_parts,
    initial_rows,
)
from jaxrec.sharding import SPLIT, as_mesh, check_split, shardings
from jaxrec.types import Plan, RowOptimizer, Rows


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value", "slots"], meta_fields=["spec", "layout"])
@dataclasses.dataclass(frozen=True)
class DeviceTables:
    """Embedding tables and their optimizer slots in device memory.

    Attributes:
      value: {stack: [S, V / S, E]} of the spec's dtype; inside shard_map only the local shards.
      slots: {stack: {slot: f32[S, V / S, K]}}.
      spec: the complete spec, also inside shard_map.
      layout: parts of a row, per stack.
    """

    value: dict[str, jax.Array]
    slots: dict[str, dict[str, jax.Array]]
    spec: EmbeddingSpec
    layout: Layout

    step = None  # puts are not counted
    hosted = None

    @property
    def traced(self) -> "DeviceTables":
        """These tables, whose reads and puts are part of a program."""
        return self

    def with_traced(self, rows: "DeviceTables") -> "DeviceTables":
        """Return the tables that a program has returned."""
        return rows

    @classmethod
    def create(cls, spec: EmbeddingSpec, row_optimizer: RowOptimizer, mesh=None) -> "DeviceTables":
        """Create initial tables on a mesh; each device draws its own shards.

        Args:
          spec: tables and shards.
          row_optimizer: decides the slots.
          mesh: from `jaxrec.sharding.make_mesh`; one device if None.
        """
        mesh, layout = as_mesh(mesh), spec.layout(row_optimizer)
        check_split(spec.shards, mesh)
        make = functools.partial(_initial, spec, layout)
        return jax.jit(make, out_shardings=shardings(SPLIT, mesh))()

    def read(self, plans: dict[str, Plan]) -> dict[str, Rows]:
        """Gather the planned rows and slots; padding yields zeros. Raises ValueError for plans of another spec."""

        def gather(name, plan):
            where = self._where(name, plan)
            take = lambda table: table.at[where].get(mode="fill", fill_value=0)
            return Rows(take(self.value[name]), {slot: take(table) for slot, table in self.slots[name].items()})

        return {name: gather(name, plan) for name, plan in plans.items()}

    def put(self, plans: dict[str, Plan], rows: dict[str, Rows]) -> "DeviceTables":
        """Store updated rows; the caller donates the tables."""
        write = lambda at, new: at.set(new, mode="drop", unique_indices=True)
        value = dict(self.value)
        slots = {name: dict(tables) for name, tables in self.slots.items()}
        for name, plan in plans.items():
            where = self._where(name, plan)
            parts = fitting_parts(self.layout, name, plan, rows[name])
            value[name] = write(value[name].at[where], parts.pop("value"))
            for slot, new in parts.items():
                slots[name][slot] = write(slots[name][slot].at[where], new)
        return dataclasses.replace(self, value=value, slots=slots)

    def add(self, plans: dict[str, Plan], rows: dict[str, Rows], old: dict[str, Rows]) -> "DeviceTables":
        """Add rows - old to the current rows; for concurrent writers."""
        f32 = lambda array: array.astype(jnp.float32)
        change = lambda current, new, before: (f32(current) + (f32(new) - f32(before))).astype(current.dtype)
        return self.put(plans, jax.tree.map(change, self.read(plans), rows, old))

    def parts(self, stack: str) -> dict[str, jax.Array]:
        """Return {part: [S, V / S, width]} of a stack, on the devices."""
        return {"value": self.value[stack], **self.slots[stack]}

    def on_shards(self, function: Callable[..., Any], *args) -> dict[tuple[str, int], Any]:
        """Run function(stack, shard, parts, *args) for every shard of every stack; parts are on the devices."""
        return {
            (name, shard): function(name, shard, {part: rows[shard] for part, rows in self.parts(name).items()}, *args)
            for name in self.spec.stacks
            for shard in range(self.spec.shards)
        }

    def take(self, rows: RowIds) -> dict[tuple[str, int], dict[str, np.ndarray]]:
        """Copy selected rows to the host, with one gather per stack, padded to one of few sizes."""
        taken = {}
        for name in dict.fromkeys(stack for stack, _ in rows):
            mine = [rows.get((name, shard), np.zeros(0, np.int32)) for shard in range(self.spec.shards)]
            read = _read(self, {name: _plan_of(mine, self.spec.stacks[name].rows)})[name]
            parts = {part: np.asarray(array) for part, array in {"value": read.value, **read.slots}.items()}
            for shard, ids in enumerate(mine):
                if (name, shard) in rows:
                    taken[name, shard] = {part: array[shard, : len(ids)] for part, array in parts.items()}
        return taken

    def with_shard(self, stack: str, shard: int, parts: Mapping[str, np.ndarray]) -> "DeviceTables":
        """Replace the first n rows of one shard; donates these tables and returns new ones."""
        check_parts(self.spec, self.layout, stack, shard, parts)
        new = {part: _set_shard(rows, shard, parts[part], rows.sharding) for part, rows in self.parts(stack).items()}
        value = {**self.value, stack: new.pop("value")}
        return dataclasses.replace(self, value=value, slots={**self.slots, stack: new})

    def overwriting(self, shards: Sequence[int] | None = None, step: int | None = None):
        """Return a null context: these tables do not outlive the process and need not be marked torn."""
        return contextlib.nullcontext(self)

    def _where(self, name: str, plan: Plan):
        if len(plan.unique) != len(self.value[name]):
            raise ValueError(
                f"a plan of {len(plan.unique)} shards for {name!r}, but the tables have {list(self.value)} in "
                f"{self.spec.shards}: plan with their own spec."
            )
        # Padding rows are V: index V // S is just past the end, where scatters drop and gathers fill.
        return jnp.arange(plan.unique.shape[0])[:, None], plan.unique // self.spec.shards


def _initial(spec, layout):
    value, slots = {}, {}
    for name, stack in spec.stacks.items():
        row = jnp.arange(stack.shards)[:, None] + jnp.arange(stack.rows_per_shard)[None, :] * stack.shards
        scale = spec.row_scale(name, row.reshape(-1), jnp)
        rows = initial_rows(row.reshape(-1), stack.width, scale, spec.seed, jnp)
        value[name] = rows.reshape(*row.shape, stack.width).astype(spec.dtype)
        slots[name] = {
            slot: jnp.full((*row.shape, one.width), one.fill, one.dtype)
            for slot, one in layout[name].items()
            if one.fill is not None
        }
    return DeviceTables(value, slots, spec, layout)


def _plan_of(rows: Sequence[np.ndarray], absent: int) -> Plan:
    """Return a plan that reads the given rows, one array i32[n] per shard, padded with `absent`."""
    count = np.array([len(ids) for ids in rows], np.int32)
    unique = np.full((len(rows), bucket(int(count.max()))), absent, np.int32)
    for shard, ids in enumerate(rows):
        unique[shard, : len(ids)] = ids
    return Plan(unique, {}, count, np.int32(0))


_read = jax.jit(lambda tables, plans: tables.read(plans))


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _set_shard(table, shard, rows, sharding):
    new = table.at[shard, : len(rows)].set(rows.astype(table.dtype))
    return jax.lax.with_sharding_constraint(new, sharding)
