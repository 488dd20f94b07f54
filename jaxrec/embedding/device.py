"""Tables on the devices: a pytree of arrays [S, V / S, E] split over the mesh, with pure read, put and add.

Legend: S shards, V rows of a stack, U padded unique rows a shard, E embedding width, K slot width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxrec.embedding.initial import initial_rows
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.sharding import SPLIT, as_mesh, check_shards, shardings
from jaxrec.types import Plan, RowOptimizer, Rows


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value", "slots"], meta_fields=["shards"])
@dataclasses.dataclass(frozen=True)
class DeviceTables:
    """Embedding tables and their optimizer slots in device memory.

    Attributes:
      value: {stack: f32[S, V / S, E]}.
      slots: {stack: {slot: f32[S, V / S, K]}}.
      shards: S of the whole tables, also where this holds only a device's part.
    """

    value: dict[str, jax.Array]
    slots: dict[str, dict[str, jax.Array]]
    shards: int

    @classmethod
    def create(cls, spec: EmbeddingSpec, row_optimizer: RowOptimizer, mesh=None) -> "DeviceTables":
        """Makes initial tables on a mesh, each device its own shards.

        Args:
          spec: the tables.
          row_optimizer: decides the slots.
          mesh: from `jaxrec.sharding.make_mesh`; one device if None.

        Raises:
          ValueError: the shards cannot be split over the devices; not a row optimizer; not such a mesh.
        """
        mesh, layout = as_mesh(mesh), spec.slot_layout(row_optimizer)
        check_shards(spec.shards, mesh)
        make = functools.partial(_initial, spec, layout)
        return jax.jit(make, out_shardings=shardings(SPLIT, mesh))()

    def read(self, plans: dict[str, Plan]) -> dict[str, Rows]:
        """Gathers the planned rows and slots; padding reads zero. Plans of another spec are refused by `ValueError`."""

        def gather(name, plan):
            where = self._where(name, plan)
            take = lambda table: table.at[where].get(mode="fill", fill_value=0)
            return Rows(take(self.value[name]), {slot: take(table) for slot, table in self.slots[name].items()})

        return {name: gather(name, plan) for name, plan in plans.items()}

    def put(self, plans: dict[str, Plan], rows: dict[str, Rows]) -> "DeviceTables":
        """Stores final rows; the caller owns the tables and donates them."""
        return self._scatter(plans, rows, lambda at, new: at.set(new, mode="drop", unique_indices=True))

    def add(self, plans, rows, old) -> "DeviceTables":
        """Adds rows - old to what the tables hold now, for writers that do not take turns."""
        change = jax.tree.map(jnp.subtract, rows, old)
        return self._scatter(plans, change, lambda at, delta: at.add(delta, mode="drop", unique_indices=True))

    def _scatter(self, plans, rows, write):
        value = dict(self.value)
        slots = {name: dict(tables) for name, tables in self.slots.items()}
        for name, plan in plans.items():
            where = self._where(name, plan)
            self._check_rows(name, plan, rows[name])
            value[name] = write(value[name].at[where], rows[name].value)
            for slot, new in rows[name].slots.items():
                slots[name][slot] = write(slots[name][slot].at[where], new)
        return DeviceTables(value, slots, self.shards)

    def _check_rows(self, name, plan, rows):
        # Else rows would be broadcast over the table, and slots that are missing stay as they are.
        tables = {"value": self.value[name], **self.slots[name]}
        found = {part: array.shape for part, array in {"value": rows.value, **rows.slots}.items()}
        wanted = {part: (*plan.unique.shape, table.shape[-1]) for part, table in tables.items()}
        if found != wanted:
            raise ValueError(
                f"rows of {name!r} have the shapes {found}, but plan and tables want {wanted}: read, update and put "
                "with one plan and one row optimizer."
            )

    def _where(self, name: str, plan: Plan):
        if name not in self.value or len(plan.unique) != len(self.value[name]):
            raise ValueError(
                f"a plan of {len(plan.unique)} shards for {name!r}, but the tables have {list(self.value)} in "
                f"{self.shards}: plan with their own spec."
            )
        # Padding ids are V: their row V // S lies just past the end, where scatters drop and gathers fill.
        return jnp.arange(plan.unique.shape[0])[:, None], plan.unique // self.shards


def _initial(spec, layout):
    value, slots = {}, {}
    for name, stack in spec.stacks.items():
        row = jnp.arange(stack.shards)[:, None] + jnp.arange(stack.rows_per_shard)[None, :] * stack.shards
        scale = spec.row_scale(name, row.reshape(-1), jnp)
        rows = initial_rows(row.reshape(-1), stack.width, scale, spec.seed, jnp)
        value[name] = rows.reshape(*row.shape, stack.width)
        slots[name] = {
            slot: jnp.full((*row.shape, one.width), one.fill, jnp.float32) for slot, one in layout[name].items()
        }
    return DeviceTables(value, slots, spec.shards)
