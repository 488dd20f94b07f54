"""The state of free trainers: the dense halves of all, as one that is saved and restored, and apart, as they train.

Legend: n trainers.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrec.shadowsync import FreeStep, Rule, mean_of
from jaxrec.shadowsync.params import floating, with_floating
from jaxrec.shadowsync.rules import wide
from jaxrec.sharding import DATA, EVERYWHERE, PER_REPLICA, make_mesh, put_on_mesh
from jaxrec.types import DenseState, PyTree
from jaxrec.validate import check_is_state, check_not_donated, check_spec


class FreeState(NamedTuple):
    """What free trainers need to go on, beside their parameters: it takes the place of `DenseState.opt_state`.

    `DenseState.step` counts the batches that were taken from the stream, by all trainers.
    """

    optimizer: PyTree  # leaves [n, ...]
    steps: np.ndarray  # i32[n] that each trainer has made
    group: dict[str, Any]  # `SyncGroup.memory`; empty without a rule
    capacity: dict[str, np.ndarray]  # {stack: i64[]} of the plans, 0 before the first


def apart(dense: DenseState, mesh) -> list[DenseState]:
    """The dense state of each trainer, on its own device, in arrays of its own; its step is that trainer's."""
    whole, states = jax.device_get((dense.params, dense.opt_state.optimizer)), []
    for number, device in enumerate(mesh.devices[:, 0]):
        own = make_mesh(devices=[device])
        # A copy: a step donates it, and on a CPU JAX would share the memory.
        mine = jax.tree.map(lambda leaf, i=number: np.array(leaf[i : i + 1]), whole)
        params, optimizer = put_on_mesh(mine, own, PER_REPLICA)
        step = put_on_mesh(np.array(dense.opt_state.steps[number], np.int32), own, EVERYWHERE)
        states.append(DenseState(step, params, optimizer))
    return states


def joined(states: list[DenseState], mesh, step: int, group: dict, capacity: dict) -> DenseState:
    """The dense states of all trainers as one, on their mesh."""
    steps = np.array([int(state.step) for state in states], np.int32)
    trees = [jax.device_get((state.params, state.opt_state)) for state in states]
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *trees)
    params, optimizer = put_on_mesh(whole, mesh, PER_REPLICA)
    step = put_on_mesh(np.array(step, np.int32), mesh, EVERYWHERE)
    return DenseState(step, params, FreeState(optimizer, steps, group, capacity))


def after_last_round(dense: DenseState, rule: Rule, mesh: jax.sharding.Mesh) -> DenseState:
    """The dense state as a last round of all trainers makes it: at a centre one after the other, and then all get its
    parameters."""
    params = jax.device_get(dense.params)
    replicas = [jax.tree.map(lambda leaf, i=i: leaf[i, ...], params) for i in range(mesh.devices.size)]
    live = [floating(one) for one in replicas]
    brought = [[leaf.astype(wide(leaf.dtype)) for leaf in one] for one in live]
    moved = _last_round(rule, dense.opt_state.group["shared"], live, brought)
    trees = [with_floating(one, leaves) for one, leaves in zip(replicas, moved, strict=True)]
    params = put_on_mesh(jax.tree.map(lambda *leaves: np.stack(leaves), *trees), mesh, PER_REPLICA)
    return dense._replace(params=params)


def _last_round(rule, shared, replicas, brought):
    """The leaves of each replica after a last round of all, one after the other at a centre."""
    if not rule.has_centre:
        _, target = rule.combine(shared, mean_of(brought))
        return [rule.merge(one, one, target) for one in replicas]
    for one in brought:
        shared = [rule.combine(centre, leaf)[0] for centre, leaf in zip(shared, one, strict=True)]
    return [[np.array(c, leaf.dtype) for c, leaf in zip(shared, one, strict=True)] for one in replicas]


def mesh_of(state, step):
    """The mesh of a state, which free trainers can train."""
    check_is_state(state)
    check_not_donated(state)
    if not isinstance(step, FreeStep):
        raise ValueError(f"step is a {type(step).__name__}: free trainers want a FreeStep(spec, loss, ...).")
    if not getattr(state.tables, "in_place", False):
        raise ValueError(f"tables is a {type(state.tables).__name__}: free trainers write in place, into HostTables.")
    check_spec(step.spec, state.tables.spec)
    leaves = jax.tree.leaves(state.dense.params)
    mesh = getattr(getattr(leaves[0], "sharding", None), "mesh", None) if leaves else None
    if mesh is None or mesh.shape.get(DATA) != 1:
        raise ValueError(
            "the dense state lies on no mesh of one device for each trainer: init_state(params, optimizer, tables, "
            "make_mesh(replicas=n, devices=jax.devices()[:n]))."
        )
    return mesh
