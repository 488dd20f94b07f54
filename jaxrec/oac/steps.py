"""What happens to a batch on the device: its rows are repaired, updated and kept, in programs that
are compiled once.

The programs are four, not one: `update` is then the same compiled program in every mode and in a
loop without a pipeline, so that equality to the last bit is no accident of fusion.

Legend: W window, S shards, U padded unique rows per shard.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from jaxrec.asked import Losses
from jaxrec.embedding import HostTables, capacity_of
from jaxrec.oac import ring as rings
from jaxrec.oac.stages import Committed, Inputs, Item, Loaded, Planned
from jaxrec.oac.stale import found
from jaxrec.oac.ways import Way
from jaxrec.sharding import EVERYWHERE, SPLIT, plan_specs, shardings
from jaxrec.types import DenseState, Rows


@functools.lru_cache
def programs(mesh: jax.sharding.Mesh, stacks: tuple[str, ...]) -> dict[str, Callable]:
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


class Steps:
    """The steps of a pipeline, one batch after the other: dense state, ring and losses.

    Args:
      update: (dense, rows, plans, batch) -> dense', rows', metrics; not jitted.
      way: how the batches are run.
      tables: whose rows it updates.
      mesh: of all programs.
      dense: DenseState to begin with; it is donated.
    """

    def __init__(self, update: Callable, way: Way, tables: HostTables, mesh: jax.sharding.Mesh, dense: DenseState):
        self.way, self.dense, self.depth = way, dense, way.depth
        self.ring: rings.Ring | None = None
        # {stack: i32[S, W, U]} the row numbers of the ring, if rows may be left to later batches.
        self.numbers: dict[str, np.ndarray] = {}
        self.update: Callable = jax.jit(update, donate_argnums=0)
        self.losses = Losses()
        self._layout, self._jitted, self._programs = tables.layout, self.update, programs(mesh, tuple(tables.layout))
        self._numbers_there = way.repairs and not way.plans_sources
        self._read: dict = {}  # {shapes: Inputs of bool}

    def compiled(self) -> int:
        """How many programs are compiled by now."""
        jitted = (self.update, *self._programs.values())
        return sum(program._cache_size() for program in jitted if hasattr(program, "_cache_size"))

    def kept(self, rows: dict, bits: dict, size: dict[str, int]) -> dict:
        """The rows to write back, on the device: see `ring.kept`."""
        return self._programs["kept"](rows, bits, tuple(size.items()))

    def reads(self, planned: Planned) -> Inputs:
        """Which leaves of plans and batch the programs of a step read, as Inputs of bool: all, if
        the update is refused, as its first step will tell."""
        try:
            read = self._read_of(planned)
        except Exception:
            return jax.tree.map(lambda leaf: True, Inputs(planned.plans, planned.batch))
        if not self._numbers_there:
            return read
        return Inputs({name: p._replace(unique=True, count=True) for name, p in read.plans.items()}, read.batch)

    def _read_of(self, planned):
        """Which inputs of these shapes the update reads.

        Raises:
          ValueError: it returns other shapes than it was given.
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
            self._read[key] = jax.tree.unflatten(structure, read[len(read) - len(leaves) :])
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
          ValueError: the update returns other shapes than it was given; nothing has changed.
          Whatever a program raises. If `dense` is another one then, the step is done and its rows
            are lost.
        """
        planned, inputs, loaded = item.planned, item.inputs, item.loaded
        assert inputs is not None and loaded is not None
        # First, as the update takes the dense state for good: refuses what returns other shapes.
        self._read_of(planned)
        rows, source = loaded.rows, loaded.source
        if self.way.repairs:
            # The ring is as wide as the batch before anything looks into it, also if the batch
            # needs nothing of it.
            self._fit_ring(planned, rows)
            rows, source = self.repair(inputs, loaded, rows, floor)
        self.dense, new, metrics = self.update(self.dense, rows, *inputs)
        stale, patched = loaded.stale, loaded.patched
        if self.way.repairs:
            # Behind the update, whose rows are the final ones: the next batch may be repaired from
            # them.
            self._append(planned, inputs, new)
            # The device has found what the gather could not see, and no more.
            if not self.way.plans_sources:
                stale = patched = found(source)
            metrics = {**metrics, "stale_rows": stale, "patched_rows": patched}
        return Committed(new, stale, patched, loaded.read, loaded.keep), metrics

    def repair(self, inputs: Inputs, loaded: Loaded, rows: dict, floor: int) -> tuple[dict, dict]:
        """The right rows of a batch, and where the ring has held those that were not."""
        source = loaded.source
        if not self.way.plans_sources:
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
            if self.way.skip_writes:  # a row that no later batch has written after all is looked up here
                self.numbers = {name: np.full(shape(p), -1, np.int32) for name, p in planned.plans.items()}
        elif any(r.value.shape[2] != capacity[name] for name, r in self.ring.rows.items()):
            self.ring = self._programs["widen"](self.ring, tuple(capacity.items()))
            self.numbers = {name: rings.widened(held, capacity[name], -1, np) for name, held in self.numbers.items()}

    def whole_ring(self) -> rings.Ring | None:
        """The ring with its row numbers, if there is one and somebody looks at them."""
        return self.ring and self.ring._replace(unique=self.numbers or self.ring.unique)

    def dense_is_gone(self) -> bool:
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
