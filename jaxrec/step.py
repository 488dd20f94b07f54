"""The mathematics of a training step, `update`, and the evaluation step.

`Task` runs `update` over a mesh and moves the rows: plan -> read -> update -> put.
Legend: B batch, S shards, U padded unique rows per shard, E embedding width, R replicas.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxrec import validate
from jaxrec.embedding import activations, capacity_of, plan
from jaxrec.embedding.rounding import to_float16
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.outcome import (
    check_per_example,
    check_rng,
    key_at,
    mean_figures,
    mean_variables,
    naming_lookups,
    or_one,
    outcome_of,
)
from jaxrec.sharding import (
    AXES,
    BATCH,
    DATA,
    EVERYWHERE,
    PER_REPLICA,
    REPLICA,
    SPLIT,
    as_mesh,
    check_split,
    plan_specs,
    put_on_mesh,
    replicate,
    shardings,
)
from jaxrec.types import Batch, DenseState, Plan, PyTree, RowOptimizer, Rows, TrainState
from jaxrec.xla import check_fusion

__all__ = [
    "checked_plans",
    "device_operations",
    "gradients",
    "init_dense",
    "make_eval_step",
    "step_dense",
    "step_rows",
    "update",
    "with_replica",
    "without_replica",
]


def update(
    dense: DenseState,
    rows: dict[str, Rows],
    plans: dict[str, Plan],
    batch: Batch,
    *,
    spec: EmbeddingSpec,
    loss: Callable,
    optimizer: optax.GradientTransformation,
    row_optimizer: RowOptimizer,
    sharded: bool = False,
    seed: int | None = None,
) -> tuple[DenseState, dict[str, Rows], dict[str, jax.Array]]:
    """Apply one training step to the dense parameters and the rows that the batch touches.

    The loss of a batch is sum(weight * loss) / sum(weight) over the examples of a replica. Row gradients are [S, U, E]
    with duplicates summed, and those of all replicas added; no array of the size of a table is allocated.

    Args:
      dense: DenseState, without a replica axis.
      rows: {stack: Rows}, [S, U, E] of the spec's dtype; the device's shards only if `sharded`.
      plans: {stack: Plan}.
      batch: Batch.
      spec: EmbeddingSpec.
      loss: (params, activations {lookup: f32[B, ..., E]}, batch) -> f32[B], the loss per example; see `Task` for other
        signatures.
      optimizer: optax.GradientTransformation for the dense parameters.
      row_optimizer: RowOptimizer.
      sharded: True inside a shard_map over a mesh (replica, data) of several devices, whose gradients and metrics are
        then combined.
      seed: seed of the key passed to the loss as `rng`; None for a loss without `rng`.

    Returns:
      dense', rows', metrics {'loss': f32[] mean over the batches of all replicas, 'weight': f32[] their total
      weight, and the figures of the loss}.

    Raises:
      ValueError: the seed does not match the signature of the loss, or the loss returns an invalid result.
    """
    values = {name: stack_rows.value for name, stack_rows in rows.items()}
    rng = None if seed is None else key_at(seed, dense.step, sharded)
    gradient, row_gradients, metrics, variables = _differentiate(
        dense.params, values, plans, batch, spec, loss, sharded, rng
    )
    new = step_dense(dense, gradient, optimizer)
    # After optax, so that operations of the optimizer on all leaves (decay, clipping) do not affect the variables.
    new = new._replace(params={**new.params, **variables}) if variables else new
    return new, step_rows(rows, row_gradients, plans, dense.step, spec, row_optimizer), metrics


def gradients(
    params: PyTree,
    values: dict[str, jax.Array],
    plans: dict[str, Plan],
    batch: Batch,
    *,
    spec: EmbeddingSpec,
    loss: Callable,
) -> tuple[PyTree, dict[str, jax.Array], dict[str, jax.Array]]:
    """Compute the gradients of a batch, the first half of `update`, for callers that apply them later (Hogwild).

    Args:
      params: dense parameters, without a replica axis.
      values: {stack: [S, U, E]} of the spec's dtype; their gradients are f32.
      plans, batch, spec, loss: as for `update`; a loss without `rng`.

    Returns:
      The gradients with respect to params and to values, and metrics.

    Raises:
      ValueError: as `update`; the loss returns variables, which have no gradient to apply later.
    """
    gradient, row_gradients, metrics, variables = _differentiate(params, values, plans, batch, spec, loss, False, None)
    if variables:
        raise ValueError(
            f"the loss returned variables {list(variables)}, but free trainers apply gradients alone: train with "
            "Serial or Pipeline, or leave the variables as they are."
        )
    return gradient, row_gradients, metrics


def _differentiate(params, values, plans, batch, spec, loss, sharded, rng):
    """Return the gradients with respect to params and to values, metrics, and the new variables."""
    batch, values = _finite_where_unweighted(batch), as_float32(values)

    def objective(params, values):
        if sharded:
            values = jax.tree.map(lambda value: jax.lax.all_gather(value, AXES, tiled=True), values)
            # Explicit, so that a model with a custom_vjp sees parameters with the varying type of its activations; the
            # transpose of this cast sums the gradient over the devices of a replica.
            params = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, DATA, to="varying"), params)
        outcome = outcome_of(loss, params, activations(spec, values, plans), batch, rng)
        weight = jnp.sum(batch.weight)
        weight = jax.lax.psum(weight, DATA) if sharded else weight
        value = jnp.sum(outcome.per_example * batch.weight) / or_one(weight)
        return value, (weight, outcome.figures, outcome.variables)

    # Under shard_map autodiff sums both gradients already: over the devices of a replica for the dense parameters, over
    # all devices for the rows. A psum here would count them twice.
    differentiate = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
    (value, (weight, figures, variables)), (gradient, row_gradients) = differentiate(params, values)
    # Outside autodiff, as figures and variables have no gradient.
    figures = mean_figures(figures, batch, weight, sharded)
    variables = mean_variables(variables, params, batch, weight, sharded) if variables else {}
    if sharded:
        value = jax.lax.pmean(jax.lax.psum(value, DATA), REPLICA)
        weight = jax.lax.psum(weight, REPLICA)
    return gradient, row_gradients, {"loss": value, "weight": weight, **figures}, variables


def _finite_where_unweighted(batch):
    """Replace what is not finite in examples of weight 0: their weight does not cancel it, as 0 * NaN is NaN."""

    def finite(leaf):
        counts = jnp.expand_dims(batch.weight > 0, tuple(range(1, jnp.ndim(leaf))))
        return jnp.where(counts, leaf, jnp.nan_to_num(leaf, posinf=0, neginf=0))

    dense, label = jax.tree.map(finite, (batch.dense, batch.label))
    return batch._replace(dense=dense, label=label)


def step_dense(dense: DenseState, gradient: PyTree, optimizer: optax.GradientTransformation) -> DenseState:
    """Apply the optax optimizer to the dense parameters."""
    updates, opt_state = optimizer.update(gradient, dense.opt_state, dense.params)
    return DenseState(dense.step + 1, optax.apply_updates(dense.params, updates), opt_state)


def step_rows(
    rows: dict[str, Rows],
    row_gradients: dict[str, jax.Array],
    plans: dict[str, Plan],
    step: jax.Array,
    spec: EmbeddingSpec,
    row_optimizer: RowOptimizer,
) -> dict[str, Rows]:
    """Apply the row optimizer to the rows that a batch touched, and round those that are stored in 16 bits."""
    before = as_float32(rows)
    found = {
        name: Rows(*row_optimizer.update(row_gradients[name], old.value, old.slots, step))
        for name, old in before.items()
    }
    validate.check_row_update(before, found)
    return as_stored(rows, found, plans, step, spec.seed)


def as_float32(rows: PyTree) -> PyTree:
    """Widen rows, or values alone, as they are stored to those that are computed with; slots are float32 already."""
    return jax.tree.map(lambda part: part.astype(jnp.float32), rows)


def as_stored(
    before: dict[str, Rows], rows: dict[str, Rows], plans: dict[str, Plan], step: jax.Array, seed: int
) -> dict[str, Rows]:
    """Round updated rows, f32, to the dtype in which they were read."""
    is_wide = lambda name: before[name].value.dtype == jnp.float32
    rounded = lambda name, value: to_float16(value, plans[name].unique, step, seed)
    return {name: one if is_wide(name) else one._replace(value=rounded(name, one.value)) for name, one in rows.items()}


def without_replica(dense: DenseState) -> DenseState:
    """Remove the replica axis of size 1 from a dense state."""
    one = lambda leaf: leaf[0]
    return DenseState(dense.step, jax.tree.map(one, dense.params), jax.tree.map(one, dense.opt_state))


def with_replica(dense: DenseState) -> DenseState:
    """Add a replica axis of size 1 to a dense state."""
    one = lambda leaf: leaf[None]
    return DenseState(dense.step, jax.tree.map(one, dense.params), jax.tree.map(one, dense.opt_state))


def device_operations(spec, mesh):
    """Return functions that read and put the rows of traced tables, each device those of its own shards."""
    # Not checked: a call of `PinnedRows` does not say over which axes its results vary.
    over = functools.partial(jax.shard_map, mesh=mesh, out_specs=SPLIT, check_vma=False)
    of_plans = plan_specs(spec.stacks)
    read = over(lambda tables, plans: tables.read(plans), in_specs=(SPLIT, of_plans))
    put = over(lambda tables, plans, rows: tables.put(plans, rows), in_specs=(SPLIT, of_plans, SPLIT))
    return read, put


def init_dense(params: PyTree, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> DenseState:
    """Create the dense half of a state on a mesh, see `Task.init`."""
    validate.check_params(params)
    opt_state = optimizer.init(params)
    validate.check_opt_state(opt_state)
    place = lambda tree: put_on_mesh(replicate(tree, mesh.shape[REPLICA]), mesh, PER_REPLICA)
    return DenseState(put_on_mesh(jnp.zeros((), jnp.int32), mesh, EVERYWHERE), place(params), place(opt_state))


def checked_plans(
    spec: EmbeddingSpec, state: TrainState, batch: Batch, plans: dict[str, Plan] | None, capacity: dict[str, int]
) -> dict[str, Plan]:
    """Check the arguments of a step, and return the plans of its batch, made here if there are none.

    `capacity` {stack: U} is that of the plans made so far, and grows here, so that few shapes are compiled.
    """
    validate.check_not_donated(state)
    validate.check_spec(spec, state.tables.spec)
    if plans is None:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(batch.ids)):
            raise ValueError("a step under jit is given its plans: step(state, batch, jaxrec.plan(spec, batch.ids)).")
        plans = plan(spec, batch.ids, dict(capacity) or None)
        capacity.update(capacity_of(plans))
    validate.check_batch(spec, plans, batch)
    return plans


def make_eval_step(
    spec: EmbeddingSpec, predict: Callable, mesh: jax.sharding.Mesh | None = None, replica: int = 0
) -> Callable:
    """Make the evaluation step, (state, batch, plans) -> f32[B, ...], for any row storage; it modifies nothing.

    Args:
      spec: the tables and lookups.
      predict: (params, activations, batch) -> f32[B], for example logits; or f32[B, D] with D > 1, for example vectors;
        or f32[B, ...] if examples have several labels.
      mesh: from `make_mesh`; one device if None. All its devices share the work.
      replica: index of the replica whose dense parameters are used.

    Returns:
      A function of TrainState, Batch and {stack: Plan}, which plans the batch itself if no plans are given.

    Raises:
      ValueError: the shards cannot be split over the mesh, or there is no such replica. Raised by the step: as by
        `Task.step`; the prediction is not one number per example.
    """
    mesh = as_mesh(mesh)
    check_fusion(mesh.devices.flat[0].platform)
    check_rng(predict, keyed=False)
    check_split(spec.shards, mesh)
    if not 0 <= replica < mesh.shape[REPLICA]:
        last = mesh.shape[REPLICA] - 1
        raise ValueError(f"replica={replica} must lie between 0 and {last}, as the mesh has them.")
    of_plans, (read_rows, _) = plan_specs(spec.stacks), device_operations(spec, mesh)

    def predicted(params, rows, plans, batch):  # of a device, for its part of the examples
        values = {name: stack_rows.value for name, stack_rows in rows.items()}
        if mesh.size > 1:
            values = jax.tree.map(lambda value: jax.lax.all_gather(value, AXES, tiled=True), values)
        with naming_lookups(spec.lookups):
            found = predict(params, activations(spec, as_float32(values), plans), batch)
        several = getattr(batch.label, "shape", None) != batch.weight.shape  # as in multi-task models
        vectors = jnp.shape(found)[1:] not in ((), (1,))  # of a tower; one column is a logit with an axis too many
        check_per_example("predict", found, batch, only_first_axis=several or vectors)
        return found

    in_specs = (EVERYWHERE, SPLIT, of_plans, BATCH)
    mapped = jax.shard_map(predicted, mesh=mesh, in_specs=in_specs, out_specs=SPLIT)

    # `source`: traced tables, whose rows are read in the same program, or rows.
    def on_source(params, source, plans, batch):
        rows = source if isinstance(source, dict) else read_rows(source, plans)
        validate.check_rows(spec, rows)
        return mapped(jax.tree.map(lambda leaf: leaf[replica], params), rows, plans, batch)

    capacity: dict[str, int] = {}
    compiled = jax.jit(on_source, in_shardings=shardings((PER_REPLICA, SPLIT, of_plans, BATCH), mesh))

    def run(state, batch, plans=None):
        tables, plans = state.tables, checked_plans(spec, state, batch, plans, capacity)
        found = compiled(state.dense.params, tables.traced or tables.read(plans), plans, batch)
        # The host waits for puts alone before it overwrites a row, or lets go of all.
        return jax.block_until_ready(found) if tables.traced and tables.hosted else found

    return run
