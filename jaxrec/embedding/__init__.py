"""Embeddings: what to look up (`EmbeddingSpec`), where rows live (`DeviceTables`, `HostTables`), and the verbs.

`plan`, `read`, `put` and `add` work on both homes; inside jit they are pure.
"""

import jax
import numpy as np

from jaxrec.embedding.activations import activations
from jaxrec.embedding.device import DeviceTables
from jaxrec.embedding.host import HostTables, host_plan
from jaxrec.embedding.optimizers import adagrad, rowwise_adagrad, sgd
from jaxrec.embedding.plan import device_plan
from jaxrec.embedding.spec import EmbeddingSpec, Lookup, Table
from jaxrec.types import Plan, Rows

__all__ = [
    "DeviceTables", "EmbeddingSpec", "HostTables", "Lookup", "Table",
    "activations", "adagrad", "add", "bucket", "device_plan", "host_plan", "plan", "put", "read",
    "rowwise_adagrad", "sgd",
]  # fmt: skip


def plan(spec: EmbeddingSpec, ids, capacity=None) -> dict[str, Plan]:
    """Plans which rows a batch touches; nothing is ever dropped.

    Numpy ids are planned on the host, jax arrays on their device, with the same result. Both give plans of static
    shape [S, U]: U is the given capacity if the batch fits; else (an overflow) the plan is made again with the next
    bucket; without a capacity it is the need of this batch x 1.25, bucketed.

    Args:
      spec: the tables and lookups.
      ids: {lookup: i32[B, ...]}, -1 where an id is missing.
      capacity: {stack: U}, usually `capacity_of` the plan of the batch before; required under jit.

    Returns:
      {stack: Plan}.

    Raises:
      ValueError: ids that do not fit the lookups; an id outside its table; a capacity that is not one positive number
        for each stack, or none under jit, where the caller
        must check `count <= U` and `invalid == 0` of the plan.

    >>> spec = EmbeddingSpec({'item': Table(1000, 4)}, {'item': Lookup('item')}, shards=1)
    >>> plan(spec, {'item': np.array([7, 9, 7])})['width_4'].inverse['item'].tolist()
    [0, 1, 0]
    """
    if not isinstance(spec, EmbeddingSpec):
        raise ValueError(f"spec is a {type(spec).__name__}, but an EmbeddingSpec is wanted: plan(spec, batch.ids).")
    spec.check_ids(ids)
    if capacity is not None and (set(capacity) != set(spec.stacks) or min(capacity.values()) < 1):
        raise ValueError(f"capacity={capacity!r:.200} must be one positive number for each of {list(spec.stacks)}.")
    leaves = jax.tree.leaves(dict(ids))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        if capacity is None:
            raise ValueError("plan under jit needs capacity={stack: U}: shapes must be static.")
        return device_plan(spec, ids, capacity)
    on_device = any(isinstance(leaf, jax.Array) for leaf in leaves)
    if capacity is None:
        need = host_plan(spec, jax.device_get(dict(ids)))
        capacity = {name: bucket(int(1.25 * p.count.max())) for name, p in need.items()}
    plans = _plan_on_device(spec, ids, capacity) if on_device else host_plan(spec, ids, capacity)
    _refuse_invalid(plans)
    rows = {name: int(np.max(p.count)) for name, p in plans.items()}
    if all(rows[name] <= capacity[name] for name in rows):
        return plans
    return plan(spec, ids, {name: max(capacity[name], bucket(rows[name])) for name in rows})


def bucket(rows: int) -> int:
    """Rounds a capacity up to one of eight sizes an octave, so that few shapes are ever compiled.

    >>> [bucket(n) for n in (1, 8, 100, 1000, 1025)]
    [8, 8, 104, 1024, 1152]
    """
    step = max(1, 1 << max(0, (max(rows, 1) - 1).bit_length() - 4))
    return max(8, -(-rows // step) * step)


def capacity_of(plans: dict[str, Plan]) -> dict[str, int]:
    """The capacities {stack: U} that plans were made with."""
    return {name: p.unique.shape[1] for name, p in plans.items()}


def read(tables, plans: dict[str, Plan]) -> dict[str, Rows]:
    """Gathers the planned rows and slots of `DeviceTables` or `HostTables`.

    Args:
      tables: either home.
      plans: {stack: Plan}, U rows a shard.

    Returns:
      {stack: Rows}, f32[S, U, E] and slots f32[S, U, K]; padding reads zero.
    """
    return tables.read(plans)


def put(tables, plans: dict[str, Plan], rows: dict[str, Rows]):
    """Stores the rows that an update has made, final values, one writer in batch order.

    Args:
      tables: either home; device tables are left as they are, host tables change in place.
      plans: {stack: Plan}.
      rows: {stack: Rows} as from `update`.

    Returns:
      The tables that hold the rows.
    """
    return tables.put(plans, rows)


def add(tables, plans: dict[str, Plan], rows: dict[str, Rows], old: dict[str, Rows]):
    """Adds what an update has changed (rows - old) to the rows as they are now, for writers that do not take turns.

    Args:
      tables: either home; device tables are left as they are, host tables change in place.
      plans: {stack: Plan}.
      rows: {stack: Rows} as from `update`.
      old: {stack: Rows} as they were read.

    Returns:
      The tables that hold the sums.
    """
    return tables.add(plans, rows, old)


@jax.jit(static_argnums=(0, 2))
def _plan_on_device_jit(spec, ids, capacity):
    return device_plan(spec, ids, dict(capacity))


def _plan_on_device(spec, ids, capacity):
    return _plan_on_device_jit(spec, dict(ids), tuple(capacity.items()))


def _refuse_invalid(plans):
    for name, p in plans.items():
        if int(p.invalid):
            raise ValueError(
                f"{int(p.invalid)} ids of lookups {list(p.inverse)} are outside their tables ({name}): an id runs from "
                "0 to rows - 1, or is -1 if missing. Hash them into range or make the tables larger."
            )
