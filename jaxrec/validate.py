"""Validation in a step: invalid data that would train silently, and objects of different specs, optimizers or meshes.

A batch and its plans are checked in every call, shapes always and values only on the host, to never wait for a device.
This costs a few microseconds and one pass over the ids. Checks of shapes alone run when a step is traced, once per
compiled shape. Objects of a wrong type are not checked: Python's error names the missing attribute.

Legend: B batch, S shards, U padded unique rows per shard, E embedding width, R replicas.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.embedding.lookup import is_plan_of
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.types import Batch, DenseState, RowOptimizer, TrainState


def check_spec(spec: EmbeddingSpec, theirs: EmbeddingSpec) -> None:
    """Refuse tables of another spec; the seed may differ, which decides initial rows and how 16 bits are rounded."""
    if theirs is spec or theirs.digest == spec.digest:
        return
    if (list(theirs.tables.items()), theirs.shards) != (list(spec.tables.items()), spec.shards):
        wanted, found = ({name: (t.rows, t.width) for name, t in s.tables.items()} for s in (spec, theirs))
        raise ValueError(
            f"the tables were made with another spec than the step: they have {found!s:.200} in "
            f"{theirs.shards} shards, and the step wants {wanted!s:.200} in {spec.shards}. Make "
            "both with one spec."
        )
    if theirs.dtype != spec.dtype:
        raise ValueError(f"the tables are of {theirs.dtype}, and the step's spec of {spec.dtype}: make both with one.")


def donated(state: TrainState) -> bool:
    """Return whether a state was donated to a step."""
    step = state.dense.step
    return isinstance(step, jax.Array) and not isinstance(step, jax.core.Tracer) and step.is_deleted()


def check_not_donated(state: TrainState) -> None:
    """Refuse a state that was donated to an earlier step."""
    if donated(state):
        raise ValueError(
            "this state was donated to an earlier step and is gone: go on with the state that the "
            "step returned (`state, metrics = task.step(state, batch)`), and copy what you need "
            "to keep."
        )


def check_finite(dense: DenseState) -> None:
    """Raise FloatingPointError if a dense parameter is not finite: a loss shows that only a step later."""
    if not np.all(jax.device_get([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(dense.params)])):
        raise FloatingPointError(
            f"a dense parameter is not finite after step {int(dense.step)}, though the losses are. Look at that step's "
            "batch, and at what the gradient of the loss divides by or takes the root of."
        )


def check_params(params: Any) -> None:
    """Refuse dense parameters that are not arrays of floats."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        found = getattr(leaf, "dtype", type(leaf))
        if not (isinstance(leaf, float) or (hasattr(leaf, "dtype") and jnp.issubdtype(found, jnp.inexact))):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {found!s:.80}, but dense parameters are arrays of floats, as "
                "they are trained: keep counters, PRNG keys, strings and functions out of them (the loss gets its key "
                "by `seed=`, and may close over the rest)."
            )


def check_opt_state(opt_state: Any) -> None:
    """Refuse typed PRNG keys in the state of an optimizer."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        if jnp.issubdtype(getattr(leaf, "dtype", np.dtype(object)), jax.dtypes.prng_key):
            raise ValueError(
                f"opt_state{jax.tree_util.keystr(path)} is a PRNG key, which images and averages of replicas do not "
                "hold: choose an optax transformation without one, and draw noise in the loss, by `seed=`."
            )


def check_batch(spec: EmbeddingSpec, plans, batch: Batch) -> None:
    """Refuse a batch that has invalid weights or does not match the lookups or the plans."""
    check_examples(batch)
    spec.check_ids(batch.ids)
    _check_plans(spec, plans, batch.ids)


def check_examples(batch: Batch) -> None:
    """Refuse a batch that has invalid weights, or labels and dense features of another number of examples."""
    check_weight(batch.weight)
    if batch.label is None or batch.dense is None:
        raise ValueError("label and dense of a batch are arrays: Batch(ids, label) has no dense features.")
    for name in ("dense", "label"):
        for leaf in jax.tree.leaves(getattr(batch, name)):
            dtype = getattr(leaf, "dtype", np.dtype(object))  # a Python number, leaf of a list
            if np.shape(leaf)[:1] != batch.weight.shape or dtype.kind in "OUSMm":
                raise ValueError(
                    f"{name} has shape {np.shape(leaf)}, but the weights are of {len(batch.weight)} examples: give an "
                    f"array with one row of numbers each, not of {dtype}."
                )


def check_weight(weight: Any) -> None:
    """Raise ValueError unless weights are f32[B] and, if they are on the host, finite and not negative."""
    # Values are checked on the host only, as reading them from a device would block.
    if weight.ndim != 1 or not len(weight):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, but f32[B] of at least one example is expected: np.ones(B, "
            "np.float32) if all count, 0 for padding."
        )
    # A NaN makes the minimum NaN, which is not >= 0.
    if isinstance(weight, np.ndarray) and not (weight.min() >= 0 and weight.max() < np.inf):
        bad = int(np.argmin((weight >= 0) & (weight < np.inf)))
        raise ValueError(
            f"weight[{bad}] is {weight[bad]}: weights are finite and 0 or more, as they divide the "
            "loss. Give examples that shall not count weight 0."
        )


def _check_plans(spec, plans, ids):
    if not isinstance(plans, Mapping) or plans.keys() != spec.stacks.keys():
        found = list(plans) if isinstance(plans, Mapping) else type(plans).__name__
        raise ValueError(
            f"plans are {found}, but {{stack: Plan}} of {list(spec.stacks)} is expected: make it "
            "with jaxrec.plan(spec, batch.ids), or iterate over planned(spec, batches)."
        )
    for name, plan in plans.items():
        wanted = {key: _shape_there(spec, name, key, ids[key].shape) for key in spec.lookups_of(name)}
        shapes = {key: array.shape for key, array in plan.inverse.items()}
        if shapes != wanted or len(plan.unique) != spec.shards:
            raise ValueError(
                f"the plan of {name!r} is of ids {shapes} and {len(plan.unique)} shards, but the batch has {wanted} "
                f"and the spec {spec.shards} shards: plan this very batch, jaxrec.plan(spec, batch.ids)."
            )
        if all(isinstance(array, np.ndarray) for array in (*plan[:3:2], *map(ids.get, wanted))):
            _check_host_plan(spec, name, plan, ids)


def _shape_there(spec, stack, key, shape):
    """Return the shape of the ids of a lookup that are in one stack, without touching them."""
    axis, places = len(shape) - 1 - (spec.lookups[key].hots > 1), spec.places_of(key, stack)
    return shape if len(places) == len(spec.lookups[key].columns) else (*shape[:axis], len(places), *shape[axis + 1 :])


def _check_host_plan(spec, name, plan, ids):
    if plan.count.max() > plan.unique.shape[1]:
        raise ValueError(
            f"the plan of {name!r} has dropped rows: {plan.count.max()} in a shard of capacity "
            f"{plan.unique.shape[1]}. Use jaxrec.plan, which plans again with more."
        )
    if not is_plan_of(spec, name, plan, ids):
        raise ValueError(
            f"the plan of {name!r} is that of other ids: plan this very batch, jaxrec.plan(spec, "
            "batch.ids), and do not write into its arrays afterwards."
        )


def check_dense(dense, optimizer, replicas: int) -> None:
    """Refuse a dense state with another number of replicas or of another optimizer.

    The step would silently use the first replicas only, or take one optimizer's moments for another's.
    """
    found = {np.shape(leaf)[:1] for leaf in jax.tree.leaves((dense.params, dense.opt_state))} - {(replicas,)}
    if found:
        raise ValueError(
            f"leaves of the dense state have a first axis of {sorted(found)}, but the step's mesh "
            f"has {replicas} replicas: make the state by `task.init`."
        )
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), dense.params)
    wanted, found = (jax.tree.structure(tree) for tree in (jax.eval_shape(optimizer.init, one), dense.opt_state))
    if found != wanted:  # by structure, as named tuples of different types compare equal
        raise ValueError(
            f"the optimizer state is {found!s:.300}, but the step's optimizer wants {wanted!s:.300}: give the same "
            "optax transformation to the task, which makes the state by `init`."
        )


def check_row_update(before: Mapping, after: Mapping) -> None:
    """Refuse a row optimizer that changes shapes or dtypes: rows are stored as they were read."""
    described = lambda tree: jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", dict(tree))
    if (found := described(after)) != (wanted := described(before)):
        raise ValueError(f"the row optimizer returned rows {found!s:.300} of {wanted!s:.300}: only values may change.")


def check_rows(spec: EmbeddingSpec, rows: Mapping, row_optimizer: RowOptimizer | None = None) -> None:
    """Refuse rows f32[S, U, E] of another spec or, if given, row optimizer, which might silently broadcast."""
    found = {name: [len(r.value), r.value.shape[-1]] for name, r in rows.items()}
    wanted = {name: [stack.shards, stack.width] for name, stack in spec.stacks.items()}
    if found != wanted:
        raise ValueError(
            f"the rows are of stacks {found}, but the step's spec wants {wanted}: make tables and step with one spec."
        )
    for name, parts in spec.layout(row_optimizer).items() if row_optimizer is not None else ():
        slots = {slot: array.shape[-1] for slot, array in rows[name].slots.items()}
        widths = {slot: part.width for slot, part in parts.items() if slot != "value"}
        if slots != widths:
            raise ValueError(
                f"the tables have slots {slots} in {name!r}, but the step's row optimizer wants {widths}: give tables "
                "and step the same row optimizer."
            )


def check_updated(given: tuple[Any, Mapping], found: Any) -> None:
    """Refuse the result of an update that changes shapes or dtypes of (dense, rows), before anything is donated."""
    dense, rows, metrics = found
    if not isinstance(metrics, dict):
        raise ValueError(
            f"the update returns metrics that are a {type(metrics).__name__}: a dict {{name: array}} is expected."
        )
    for what, before, after in [("dense state", given[0], dense), ("rows", given[1], rows)]:
        check_same_shapes(before, after, f"the update changes the shapes of the {what}")


def check_same_shapes(before: Any, after: Any, what: str) -> None:
    """Refuse a dense state, or rows, of other shapes or dtypes; the message begins with `what`."""
    if after is not before and shapes_of(after) != shapes_of(before):
        raise ValueError(f"{what}: {shapes_of(after)} in place of {shapes_of(before)}. Only its values may be others.")


def shapes_of(tree: Any) -> Any:
    """Return the shape and dtype of every leaf."""
    return jax.tree.map(lambda leaf: (np.shape(leaf), str(getattr(leaf, "dtype", type(leaf)))), tree)
