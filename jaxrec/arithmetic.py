"""The arithmetic of a step: `update`, which every way to train runs, and its two halves.

Legend: B batch, S shards, U padded unique rows per shard, E embedding width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxrec.embedding import activations
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.losses import check_per_example, key_at, mean_figures, mean_variables, or_one, outcome_of
from jaxrec.sharding import AXES, DATA, REPLICA
from jaxrec.types import Batch, DenseState, Plan, PyTree, RowOptimizer, Rows


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
    row_gradient: str = "sum",
    seed: int | None = None,
) -> tuple[DenseState, dict[str, Rows], dict[str, jax.Array]]:
    """Takes one training step on the dense parameters and on the rows that the batch touches.

    The loss of a batch is sum(weight * loss) / sum(weight) over the examples of a replica.
    Gradients reach the rows as [S, U, E], duplicates summed; no array of the size of a table is
    made.

    Args:
      dense: DenseState, without a replica axis.
      rows: {stack: Rows}, f32[S, U, E]; a device's own shards if `sharded`.
      plans: {stack: Plan}.
      batch: Batch.
      spec: EmbeddingSpec.
      loss: (params, activations {lookup: f32[B, ..., E]}, batch) -> f32[B], the loss of each
        example; see `make_train_step` for what else it may take and return.
      optimizer: optax.GradientTransformation for the dense parameters.
      row_optimizer: RowOptimizer.
      sharded: True inside a shard_map over the mesh (replica, data).
      row_gradient: 'sum' or 'mean' over replicas.
      seed: of the key that the loss is given as `rng`; none if None.

    Returns:
      dense', rows', metrics {'loss': f32[] mean over the batches of all replicas, 'weight': f32[],
      and the figures of the loss}.

    Raises:
      ValueError: the loss and the seed do not fit; what the loss returns is not what is wanted.
    """
    values = {name: stack_rows.value for name, stack_rows in rows.items()}
    rng = None if seed is None else key_at(seed, dense.step, sharded)
    gradient, row_gradients, metrics, variables = _differentiate(
        dense.params, values, plans, batch, spec, loss, sharded, rng
    )
    replicas = jax.lax.axis_size(REPLICA) if sharded and row_gradient == "mean" else 1
    row_gradients = jax.tree.map(lambda g: g / replicas, row_gradients)
    new = step_dense(dense, gradient, optimizer)
    # After optax, so that nothing that an optimizer does to every leaf (decay, clipping) reaches
    # the variables.
    new = new._replace(params={**new.params, **variables}) if variables else new
    return new, step_rows(rows, row_gradients, dense.step, row_optimizer), metrics


def gradients(
    params: PyTree,
    values: dict[str, jax.Array],
    plans: dict[str, Plan],
    batch: Batch,
    *,
    spec: EmbeddingSpec,
    loss: Callable,
    sharded: bool = False,
    rng: jax.Array | None = None,
) -> tuple[PyTree, dict[str, jax.Array], dict[str, jax.Array]]:
    """The first half of `update`: the gradients of a batch, for those who apply them later
    (Hogwild).

    Args:
      params: dense parameters, without a replica axis.
      values: {stack: f32[S, U, E]}; a device's own shards if `sharded`.
      plans, batch, spec, loss, sharded: as for `update`.
      rng: the key that the loss is given, as from `losses.key_at`; none if None.

    Returns:
      The gradient by params, by values (summed over replicas), and metrics.

    Raises:
      ValueError: as `update`; the loss returns variables, which have no gradient to be applied
        later.
    """
    gradient, row_gradients, metrics, variables = _differentiate(params, values, plans, batch, spec, loss, sharded, rng)
    if variables:
        raise ValueError(
            f"the loss returned variables {list(variables)}, but free trainers and the emulation "
            "apply gradients alone: train with make_train_step or make_update, or leave the "
            "variables as they are."
        )
    return gradient, row_gradients, metrics


def _differentiate(params, values, plans, batch, spec, loss, sharded, rng):
    """The gradients by params and by values, metrics, and the new variables."""

    def objective(params, values):
        if sharded:
            values = jax.tree.map(lambda value: jax.lax.all_gather(value, AXES, tiled=True), values)
            # Said here, so that a model with a custom_vjp sees parameters of the type of its
            # activations; the transpose of this line is the sum over the devices of a replica.
            params = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, DATA, to="varying"), params)
        outcome = outcome_of(loss, params, activations(spec, values, plans), batch, rng)
        weight = jnp.sum(batch.weight)
        weight = jax.lax.psum(weight, DATA) if sharded else weight
        value = jnp.sum(outcome.per_example * batch.weight) / or_one(weight)
        return value, (weight, outcome.figures, outcome.variables)

    # Under shard_map both gradients are summed already, by autodiff: over the devices of a replica
    # for the dense parameters, over all devices for the rows. A psum here would count them twice.
    differentiate = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
    (value, (weight, figures, variables)), (gradient, row_gradients) = differentiate(params, values)
    # Behind autodiff: what is only looked at, or kept as it is, has no gradient.
    figures = mean_figures(figures, batch, weight, sharded)
    variables = mean_variables(variables, params, batch, weight, sharded) if variables else {}
    if sharded:
        value = jax.lax.pmean(jax.lax.psum(value, DATA), REPLICA)
        weight = jax.lax.psum(weight, REPLICA)
    return gradient, row_gradients, {"loss": value, "weight": weight, **figures}, variables


def step_dense(dense: DenseState, gradient: PyTree, optimizer: optax.GradientTransformation) -> DenseState:
    """The dense half of a step: optax on the parameters."""
    updates, opt_state = optimizer.update(gradient, dense.opt_state, dense.params)
    return DenseState(dense.step + 1, optax.apply_updates(dense.params, updates), opt_state)


def step_rows(
    rows: dict[str, Rows], row_gradients: dict[str, jax.Array], step: jax.Array, row_optimizer: RowOptimizer
) -> dict[str, Rows]:
    """The sparse half of a step: the row optimizer on the rows that a batch touched."""
    return {
        name: Rows(*row_optimizer.update(row_gradients[name], old.value, old.slots, step)) for name, old in rows.items()
    }


def predictions(
    params: PyTree,
    rows: dict[str, Rows],
    plans: dict[str, Plan],
    batch: Batch,
    *,
    spec: EmbeddingSpec,
    predict: Callable,
) -> jax.Array:
    """The predictions of a device for its own examples, inside a shard_map over the mesh.

    Args:
      params: dense parameters, without a replica axis.
      rows: {stack: Rows}, the device's own shards.
      plans, batch, spec: as for `update`.
      predict: (params, activations, batch) -> f32[B].

    Returns:
      f32[B], or f32[B, ...] where an example has several labels.

    Raises:
      ValueError: the prediction is not one number for each example.
    """
    values = {name: jax.lax.all_gather(stack_rows.value, AXES, tiled=True) for name, stack_rows in rows.items()}
    found = predict(params, activations(spec, values, plans), batch)
    several = getattr(batch.label, "shape", None) != batch.weight.shape  # tasks, perhaps
    check_per_example("predict", found, batch, only_first_axis=several)
    return found


def without_replica(dense: DenseState) -> DenseState:
    """The dense state of one replica from leaves [1, ...]."""
    one = lambda leaf: leaf[0]
    return DenseState(dense.step, jax.tree.map(one, dense.params), jax.tree.map(one, dense.opt_state))


def with_replica(dense: DenseState) -> DenseState:
    """The dense state of one replica as leaves [1, ...]."""
    one = lambda leaf: leaf[None]
    return DenseState(dense.step, jax.tree.map(one, dense.params), jax.tree.map(one, dense.opt_state))
