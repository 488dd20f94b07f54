"""The training step: the pure `update`, shared by all engines, and the train and evaluation steps built on it.

plan -> read -> update -> put: `update` has all the mathematics, the rest moves rows.
Legend: B batch, S shards, U padded unique rows per shard, E embedding width, R replicas.
"""

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrec import validate
from jaxrec.embedding import Tables, activations
from jaxrec.embedding.spec import EmbeddingSpec, check_row_optimizer
from jaxrec.losses import (
    check_per_example,
    check_rng,
    checked_seed,
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
    mesh_of,
    plan_specs,
    put_on_mesh,
    replicate,
    shardings,
)
from jaxrec.types import Batch, DenseState, Plan, PyTree, RowOptimizer, Rows, ShardsLost, TrainState
from jaxrec.xla import check_fusion

__all__ = [
    "check_step",
    "gradients",
    "init_state",
    "make_eval_step",
    "make_train_step",
    "make_update",
    "run_hooks",
    "step_dense",
    "step_rows",
    "update",
    "with_replica",
    "without_replica",
]

_DENSE = DenseState(step=EVERYWHERE, params=PER_REPLICA, opt_state=PER_REPLICA)


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
      rows: {stack: Rows}, f32[S, U, E]; the device's shards only if `sharded`.
      plans: {stack: Plan}.
      batch: Batch.
      spec: EmbeddingSpec.
      loss: (params, activations {lookup: f32[B, ..., E]}, batch) -> f32[B], the loss per example; see `make_train_step`
        for other signatures.
      optimizer: optax.GradientTransformation for the dense parameters.
      row_optimizer: RowOptimizer.
      sharded: True inside a shard_map over the mesh (replica, data).
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
    return new, step_rows(rows, row_gradients, dense.step, row_optimizer), metrics


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
      values: {stack: f32[S, U, E]}.
      plans, batch, spec, loss: as for `update`; a loss without `rng`.

    Returns:
      The gradients with respect to params and to values, and metrics.

    Raises:
      ValueError: as `update`; the loss returns variables, which have no gradient to apply later.
    """
    gradient, row_gradients, metrics, variables = _differentiate(params, values, plans, batch, spec, loss, False, None)
    if variables:
        raise ValueError(
            f"the loss returned variables {list(variables)}, but free trainers and the emulation "
            "apply gradients alone: train with make_train_step or make_update, or leave the "
            "variables as they are."
        )
    return gradient, row_gradients, metrics


def _differentiate(params, values, plans, batch, spec, loss, sharded, rng):
    """Return the gradients with respect to params and to values, metrics, and the new variables."""
    batch = _finite_where_unweighted(batch)

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
    rows: dict[str, Rows], row_gradients: dict[str, jax.Array], step: jax.Array, row_optimizer: RowOptimizer
) -> dict[str, Rows]:
    """Apply the row optimizer to the rows that a batch touched."""
    found = {
        name: Rows(*row_optimizer.update(row_gradients[name], old.value, old.slots, step)) for name, old in rows.items()
    }
    validate.check_row_update(rows, found)
    return found


def without_replica(dense: DenseState) -> DenseState:
    """Remove the replica axis of size 1 from a dense state."""
    one = lambda leaf: leaf[0]
    return DenseState(dense.step, jax.tree.map(one, dense.params), jax.tree.map(one, dense.opt_state))


def with_replica(dense: DenseState) -> DenseState:
    """Add a replica axis of size 1 to a dense state."""
    one = lambda leaf: leaf[None]
    return DenseState(dense.step, jax.tree.map(one, dense.params), jax.tree.map(one, dense.opt_state))


def init_state(
    params: PyTree, optimizer: optax.GradientTransformation, tables: Tables, mesh: jax.sharding.Mesh | None = None
) -> TrainState:
    """Create the state of a training run, placed on the mesh of the train step.

    Args:
      params: dense parameters, any pytree.
      optimizer: optax.GradientTransformation.
      tables: DeviceTables, PinnedTables, HostTables or RemoteTables.
      mesh: from `make_mesh`; one device if None.

    Returns:
      TrainState; dense leaves have a leading axis of R replicas.

    Raises:
      ValueError: a parameter is no array of floats, or the state of the optimizer has a PRNG key.
    """
    mesh = as_mesh(mesh)
    replicas = mesh.shape[REPLICA]
    validate.check_params(params)
    opt_state = optimizer.init(params)
    validate.check_opt_state(opt_state)
    dense = DenseState(
        put_on_mesh(jnp.zeros((), jnp.int32), mesh, EVERYWHERE),
        put_on_mesh(replicate(params, replicas), mesh, PER_REPLICA),
        put_on_mesh(replicate(opt_state, replicas), mesh, PER_REPLICA),
    )
    return TrainState(dense, tables)


def make_update(
    spec: EmbeddingSpec,
    loss: Callable,
    optimizer: optax.GradientTransformation,
    row_optimizer: RowOptimizer,
    mesh: jax.sharding.Mesh | None = None,
    seed: int | None = None,
) -> Callable:
    """Map `update` over a mesh, not jitted: (dense, rows, plans, batch) -> dense', rows', metrics.

    Args:
      spec, loss, optimizer, row_optimizer, seed: as for `make_train_step`.
      mesh: from `make_mesh`; one device if None.

    Returns:
      A function of global arrays; dense leaves have a leading replica axis, rows are split over all devices.

    Raises:
      RuntimeError: XLA gives wrong results on this CPU, as its faulty fusion was not disabled (see `xla`).
      ValueError: the shards cannot be split over the mesh, or the seed does not match the signature of the loss. Raised
        by the function: batch, plans, rows and dense state do not match the step or each other.
    """
    mesh = as_mesh(mesh)
    check_fusion(mesh.devices.flat[0].platform)
    seed = None if seed is None else checked_seed(seed)
    check_rng(loss, seed is not None)
    check_split(spec.shards, mesh)
    check_row_optimizer(row_optimizer)
    fixed = {"spec": spec, "loss": loss, "optimizer": optimizer, "row_optimizer": row_optimizer, "seed": seed}

    def local(dense, rows, plans, batch):
        new, rows, metrics = update(without_replica(dense), rows, plans, batch, sharded=True, **fixed)
        return with_replica(new), rows, metrics

    of_plans = plan_specs(spec.stacks)
    in_specs, out_specs = (_DENSE, SPLIT, of_plans, BATCH), (_DENSE, SPLIT, EVERYWHERE)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    # Checked here, not only in the step: a pipeline runs the update without the step. Under jit this runs once per
    # compiled shape.
    def checked(dense, rows, plans, batch):
        validate.check_batch(spec, plans, batch)
        validate.check_dense(dense, optimizer, mesh.shape[REPLICA])
        validate.check_rows(spec, rows, row_optimizer)
        return mapped(dense, rows, plans, batch)

    checked.mesh = mesh  # type: ignore[attr-defined]  # read by pipelines, which run the update without a step
    return checked


def make_train_step(
    spec: EmbeddingSpec,
    loss: Callable,
    optimizer: optax.GradientTransformation,
    row_optimizer: RowOptimizer,
    mesh: jax.sharding.Mesh | None = None,
    seed: int | None = None,
) -> Callable:
    """Make the train step, (state, plans, batch) -> state', metrics, for any row storage; it donates the state.

    A loss is a function (params, activations {lookup: f32[B, ..., E]}, batch) -> f32[B]. If a seed is given, it also
    gets `rng=key`, the key of the seed, step and device. It may return (f32[B], figures) or (f32[B], figures,
    variables). Figures {name: f32[B] or f32[]} are reported in the metrics: weighted means over the examples of a
    replica, then over replicas; an f32[] is taken as the mean over the examples of its device. Variables {name: value}
    replace params[name] after the optimizer. `jaxrec.losses` has the details.

    Args:
      spec: the tables and lookups.
      loss: as above.
      optimizer: optax.GradientTransformation for the dense parameters.
      row_optimizer: `sgd`, `adagrad`, `lazy_adam` or another RowOptimizer.
      mesh: from `make_mesh`; one device if None. Its size must divide the batch size.
      seed: seed of a random loss, from 0 to 2**32 - 1; None for a loss without `rng`.

    Returns:
      A function of TrainState, {stack: Plan} and Batch. With `DeviceTables` and `PinnedTables`, read, update and put
      are one program; with others, rows are copied to the mesh and back. Metrics: {'loss': f32[], 'weight': f32[], and
      the figures f32[] of the loss}, left on the device.

    Raises:
      ValueError: as `make_update`. Raised by the step, leaving the state unchanged: the state was donated before,
        weights are negative or not finite, the plans are of another batch, objects do not match each other, or the
        loss returns something else than the above.
      ShardsLost: raised by the step, if shards of the row storage are lost. If they are lost during the write, the step
        counts, and the error has its result as `done`.

    A step with a custom loss:

    >>> import jax, jax.numpy as jnp, numpy as np, optax, jaxrec
    >>> from jaxrec.embedding import DeviceTables, EmbeddingSpec, Lookup, Table, sgd
    >>> spec = EmbeddingSpec({'user': Table(50, 4), 'item': Table(9, 4)}, {'pair': Lookup(('user', 'item'))})
    >>> def loss(params, activations, batch):  # matrix factorisation, squared error
    ...     user, item = activations['pair'][:, 0], activations['pair'][:, 1]
    ...     return (jnp.sum(user * item, axis=-1) + params['bias'] - batch.label) ** 2
    >>> step = jaxrec.make_train_step(spec, loss, optax.sgd(0.1), sgd(0.1))
    >>> tables = DeviceTables.create(spec, sgd(0.1), jaxrec.make_mesh())
    >>> state = jaxrec.init_state({'bias': jnp.zeros(())}, optax.sgd(0.1), tables)
    >>> ids = {'pair': np.array([[3, 1], [3, 8]], np.int32)}
    >>> batch = jaxrec.Batch(ids, np.zeros((2, 0), np.float32), np.ones(2, np.float32), np.ones(2, np.float32))
    >>> losses = []
    >>> for _ in range(60):
    ...     state, metrics = step(state, jaxrec.plan(spec, ids), batch)
    ...     losses.append(float(metrics['loss']))
    >>> losses[0] > 0.9 and losses[-1] < 0.01
    True
    """
    mesh = as_mesh(mesh)
    mapped = make_update(spec, loss, optimizer, row_optimizer, mesh, seed)
    read_rows, put_rows = _device_operations(spec, mesh)

    # One program, in which XLA writes the rows of donated device tables in place.
    def fused(dense, tables, plans, batch):
        dense, rows, metrics = mapped(dense, read_rows(tables, plans), plans, batch)
        return dense, put_rows(tables, plans, rows), metrics

    placed = lambda *first: shardings((*first, plan_specs(spec.stacks), BATCH), mesh)
    compiled = functools.partial(jax.jit, fused, in_shardings=placed(_DENSE, SPLIT))
    on_device, on_pinned = compiled(donate_argnums=(0, 1)), compiled(donate_argnums=0)
    on_rows = jax.jit(mapped, in_shardings=placed(_DENSE, SPLIT), donate_argnums=0)

    def run(state, plans, batch):
        tables = state.tables
        if tables.traced is not None:
            step = on_pinned if tables.in_place else on_device
            dense, traced, metrics = step(state.dense, tables.traced, plans, batch)
            return TrainState(dense, tables.with_traced(traced)), metrics
        dense, rows, metrics = on_rows(state.dense, tables.read(plans), plans, batch)
        try:
            return TrainState(dense, tables.put(plans, rows)), metrics
        except ShardsLost as lost:
            # All other shards are written and the old dense state is donated: the step counts as done.
            lost.done = TrainState(dense, tables), metrics
            raise

    return _checked(run, spec)


def _device_operations(spec, mesh):
    """Return functions that read and put the rows of traced tables, each device those of its own shards."""
    # Not checked: a call of `PinnedRows` does not say over which axes its results vary.
    over = functools.partial(jax.shard_map, mesh=mesh, out_specs=SPLIT, check_vma=False)
    of_plans = plan_specs(spec.stacks)
    read = over(lambda tables, plans: tables.read(plans), in_specs=(SPLIT, of_plans))
    put = over(lambda tables, plans, rows: tables.put(plans, rows), in_specs=(SPLIT, of_plans, SPLIT))
    return read, put


def _checked(run, spec):
    """Wrap a step with validation of its arguments."""

    def step(state, plans, batch):
        validate.check_not_donated(state)
        validate.check_spec(spec, state.tables.spec)
        validate.check_batch(spec, plans, batch)
        return run(state, plans, batch)

    return step


def check_step(update: Callable, state: TrainState, plans: dict[str, Plan], batch: Batch) -> float:
    """Compare a compiled step with the same step run operation by operation.

    Run it once for a new model, on a small batch: a difference means a compiler fault or an impure loss.

    Args:
      update: (dense, rows, plans, batch) -> dense', rows', metrics, as from `make_update`; not jitted.
      state: TrainState; it is not donated.
      plans: {stack: Plan} of the batch.
      batch: Batch of about 8 to 64 examples, as loops are slow without compilation.

    Returns:
      The largest relative difference found in dense state, rows and metrics.

    Raises:
      ArithmeticError: a leaf differs by more than 1e-3 of its largest value; the error names it.

    >>> import jax.numpy as jnp, numpy as np, jaxrec
    >>> from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, sgd
    >>> spec = EmbeddingSpec({'item': Table(9, 2)}, {'item': Lookup('item')})
    >>> loss = lambda params, activations, batch: (activations['item'].sum(-1) + params - batch.label) ** 2
    >>> state = jaxrec.init_state(jnp.zeros(()), optax.sgd(0.1), HostTables.create(spec, sgd(0.1)))
    >>> ids, ones = {'item': np.array([3, 3, 8, 0])}, np.ones(4, np.float32)
    >>> batch = jaxrec.Batch(ids, np.zeros((4, 0), np.float32), ones, ones)
    >>> update = jaxrec.make_update(spec, loss, optax.sgd(0.1), sgd(0.1))
    >>> jaxrec.check_step(update, state, jaxrec.plan(spec, ids), batch) < 1e-6
    True
    """
    spec, traced = state.tables.spec, state.tables.traced
    read_rows = jax.jit(_device_operations(spec, mesh_of(state.dense))[0])
    rows = state.tables.read(plans) if traced is None else read_rows(traced, plans)
    compiled = jax.jit(update)(state.dense, rows, plans, batch)
    with jax.disable_jit():
        plain = update(state.dense, rows, plans, batch)
    worst = 0.0
    for (path, one), (_, other) in zip(*map(jax.tree_util.tree_leaves_with_path, (compiled, plain)), strict=True):
        one, other = (np.asarray(leaf, np.float64) for leaf in (one, other))
        found = float(np.max(np.abs(one - other), initial=0.0) / max(np.max(np.abs(other), initial=0.0), 1e-30))
        if not found <= 1e-3:  # also nan
            raise ArithmeticError(
                f"the compiled step differs from the plain one by {found:.1e} of the largest value in "
                f"{jax.tree_util.keystr(path)}: is the loss pure? Else it is a fault of the compiler, see "
                "docs/running.md."
            )
        worst = max(worst, found)
    return worst


def make_eval_step(
    spec: EmbeddingSpec, predict: Callable, mesh: jax.sharding.Mesh | None = None, replica: int = 0
) -> Callable:
    """Make the evaluation step, (state, plans, batch) -> f32[B], for any row storage; it modifies nothing.

    Args:
      spec: the tables and lookups.
      predict: (params, activations, batch) -> f32[B], for example logits; f32[B, ...] if examples have several labels.
      mesh: from `make_mesh`; one device if None. All its devices share the work.
      replica: index of the replica whose dense parameters are used.

    Returns:
      A function of TrainState, {stack: Plan} and Batch.

    Raises:
      ValueError: the shards cannot be split over the mesh, or there is no such replica. Raised by the step: as by that
        of `make_train_step`; the prediction is not one number per example.
    """
    mesh = as_mesh(mesh)
    check_fusion(mesh.devices.flat[0].platform)
    check_rng(predict, keyed=False)
    check_split(spec.shards, mesh)
    if not 0 <= replica < mesh.shape[REPLICA]:
        last = mesh.shape[REPLICA] - 1
        raise ValueError(f"replica={replica} must lie between 0 and {last}, as the mesh has them.")
    of_plans, (read_rows, _) = plan_specs(spec.stacks), _device_operations(spec, mesh)

    def predicted(params, rows, plans, batch):  # of a device, for its part of the examples
        values = {name: jax.lax.all_gather(stack_rows.value, AXES, tiled=True) for name, stack_rows in rows.items()}
        with naming_lookups(spec.lookups):
            found = predict(params, activations(spec, values, plans), batch)
        several = getattr(batch.label, "shape", None) != batch.weight.shape  # as in multi-task models
        check_per_example("predict", found, batch, only_first_axis=several)
        return found

    in_specs = (EVERYWHERE, SPLIT, of_plans, BATCH)
    mapped = jax.shard_map(predicted, mesh=mesh, in_specs=in_specs, out_specs=SPLIT)

    # `source`: traced tables, whose rows are read in the same program, or rows.
    def on_source(params, source, plans, batch):
        rows = source if isinstance(source, dict) else read_rows(source, plans)
        validate.check_rows(spec, rows)
        return mapped(jax.tree.map(lambda leaf: leaf[replica], params), rows, plans, batch)

    compiled = jax.jit(on_source, in_shardings=shardings((PER_REPLICA, SPLIT, of_plans, BATCH), mesh))

    def run(state, plans, batch):
        tables = state.tables
        found = compiled(state.dense.params, tables.traced or tables.read(plans), plans, batch)
        # The host waits for puts alone before it overwrites a row, or lets go of all.
        return jax.block_until_ready(found) if tables.traced and tables.in_place else found

    return _checked(run, spec)


def run_hooks(
    hooks: Iterable[Callable],
    state: TrainState,
    step: int,
    plans: dict[str, Plan] | None,
    metrics: dict[str, jax.Array] | None,
) -> TrainState:
    """Fold the hooks, (state, step, plans, metrics) -> state, over the state in order.

    Args:
      hooks: hooks, called right after a step, in batch order, on the committing thread.
      state: TrainState, or a technique's wrapper of it.
      step: number of steps that the state has seen.
      plans: {stack: Plan} of the batch just trained; None if the hooks run outside a step.
      metrics: metrics of the step, on the device; None likewise.

    Returns:
      The state that the last hook returned.

    Raises:
      ValueError: a hook returned None.
    """
    for hook in hooks:
        state = hook(state, step, plans, metrics)
        if state is None:
            raise ValueError(f"the hook {hook!r:.200} returned None: a hook returns the state, changed or not.")
    return state
