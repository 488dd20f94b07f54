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

from jaxrec.asked import Losses
from jaxrec.embedding import EmbeddingSpec, capacity_of
from jaxrec.oac import ring as rings
from jaxrec.oac.stages import Committed, Inputs, Item, Loaded
from jaxrec.oac.stale import found
from jaxrec.oac.ways import Way
from jaxrec.sharding import EVERYWHERE, SPLIT, plan_specs, shardings
from jaxrec.types import DenseState


@functools.lru_cache
def programs(mesh: jax.sharding.Mesh, stacks: tuple[str, ...]) -> dict[str, Callable]:
    """The functions of `ring`, compiled once per mesh, however many pipelines there are."""
    plans, split = plan_specs(stacks), shardings(SPLIT, mesh)
    on_mesh = lambda function, *inputs: jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=SPLIT)
    return {
        "replay": jax.jit(on_mesh(rings.replay, SPLIT, SPLIT, SPLIT)),
        "append": jax.jit(on_mesh(rings.append, SPLIT, SPLIT, SPLIT, EVERYWHERE), donate_argnums=0),
        "validate": jax.jit(on_mesh(rings.validate, SPLIT, plans, EVERYWHERE)),
        "take": jax.jit(on_mesh(rings.rows_at, SPLIT, SPLIT)),
        # Made where it stays: no device ever holds the rings of all shards.
        "init": jax.jit(rings.init, static_argnums=1, out_shardings=split),
        "widen": jax.jit(
            lambda ring, capacity: rings.resize(ring, dict(capacity)), static_argnums=1, out_shardings=split
        ),
    }


class Steps:
    """The steps of a pipeline, one batch after the other: dense state, ring and losses.

    Args:
      update: (dense, rows, plans, batch) -> dense', rows', metrics; not jitted.
      way: how the batches are run.
      spec: the tables.
      mesh: of all programs.
      dense: DenseState to begin with; it is donated.
    """

    def __init__(self, update: Callable, way: Way, spec: EmbeddingSpec, mesh: jax.sharding.Mesh, dense: DenseState):
        self.way, self.dense, self.depth = way, dense, way.depth
        self.ring: rings.Ring | None = None
        self.update: Callable = jax.jit(update, donate_argnums=0)
        self._traced, self._programs = update, programs(mesh, tuple(spec.stacks))
        self._checked: set = set()
        self.losses = Losses()

    def compiled(self) -> int:
        """How many programs are compiled by now."""
        jitted = (self.update, *self._programs.values())
        return sum(program._cache_size() for program in jitted if hasattr(program, "_cache_size"))

    def take(self, rows: dict, place: dict) -> dict:
        """Rows in other places, on the device: see `ring.rows_at`."""
        return self._programs["take"](rows, place)

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
        # First, as the update takes the dense state for good.
        self._check_shapes(planned, inputs, loaded)
        rows, source = loaded.rows, loaded.source
        if self.way.repairs:
            if loaded.place:
                rows = self.take(rows, loaded.place)
            # The ring is as wide as the batch before anything looks into it, also if the batch
            # needs nothing of it.
            self._fit_ring(planned, rows)
            rows, source = self.repair(inputs, loaded, rows, floor)
        self.dense, new, metrics = self.update(self.dense, rows, *inputs)
        stale, patched = loaded.stale, loaded.patched
        if self.way.repairs:
            # Behind the update, whose rows are the final ones: the next batch may be repaired from
            # them.
            unique = {name: p.unique for name, p in inputs.plans.items()}
            self.ring = self._programs["append"](self.ring, unique, new, np.int32(planned.number))
            # The device has found what the gather could not see, and no more.
            if not self.way.plans_sources:
                stale = patched = found(source)
            metrics = {**metrics, "stale_rows": stale, "patched_rows": patched}
        return Committed(new, stale, patched, loaded.read), metrics

    def repair(self, inputs: Inputs, loaded: Loaded, rows: dict, floor: int) -> tuple[dict, dict]:
        """The right rows of a batch, and where the ring has held those that were not."""
        source = loaded.source
        if not self.way.plans_sources:
            written = max(loaded.watermark, floor) - 1
            source = self._programs["validate"](self.ring, inputs.plans, np.int32(written))
        return self._programs["replay"](self.ring, rows, source), source

    def _fit_ring(self, planned, rows):
        """Makes the ring with the first batch, and widens it when a capacity has grown."""
        capacity = capacity_of(planned.plans)
        if self.ring is None:
            self.ring = self._programs["init"](rows, self.depth)
        elif any(leaf.shape[2] != capacity[name] for name, leaf in self.ring.unique.items()):
            self.ring = self._programs["widen"](self.ring, tuple(capacity.items()))

    def dense_is_gone(self) -> bool:
        """Whether the dense state died with an update that failed."""
        leaves = jax.tree.leaves(self.dense)
        return any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array))

    def _check_shapes(self, planned, inputs, loaded):
        """Refuses an update that returns other shapes than it was given, before anything is donated
        to it."""
        capacity = capacity_of(planned.plans)
        batch = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(inputs.batch))
        if (key := (*sorted(capacity.items()), *batch)) in self._checked:
            return
        whole = lambda name: lambda leaf: jax.ShapeDtypeStruct((len(leaf), capacity[name], leaf.shape[2]), leaf.dtype)
        rows = {name: jax.tree.map(whole(name), stack_rows) for name, stack_rows in loaded.rows.items()}
        dense, new, metrics = jax.eval_shape(self._traced, self.dense, rows, *inputs)
        if not isinstance(metrics, dict):
            raise ValueError(
                f"the update returns metrics that are a {type(metrics).__name__}: a dict {{name: array}} is wanted."
            )
        for what, before, after in [("dense state", self.dense, dense), ("rows", rows, new)]:
            shapes = [shapes_of(tree) for tree in (before, after)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"the update changes the shapes of the {what}: from {shapes[0]} to {shapes[1]}. A step must return "
                    "what it was given, in shape and dtype."
                )
        self._checked.add(key)


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
