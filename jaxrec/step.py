"""The step: one pure `update`, and what wraps it for a mesh, for a home of the rows, and for evaluation.

plan -> read -> update -> put: only `update` is mathematics, and every way to train runs this one function.
Legend: B batch, S shards, U padded unique rows a shard, E embedding width, R replicas, D devices a replica.
"""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrec import boundary
from jaxrec.embedding import DeviceTables, activations
from jaxrec.embedding.spec import EmbeddingSpec, check_row_optimizer
from jaxrec.sharding import (
    AXES,
    BATCH,
    DATA,
    EVERYWHERE,
    PER_REPLICA,
    REPLICA,
    SPLIT,
    as_mesh,
    check_shards,
    plan_specs,
    put_on_mesh,
    replicate,
    shardings,
)  # fmt: skip
from jaxrec.types import DenseState, RowOptimizer, Rows, TrainState

_DENSE = DenseState(step=EVERYWHERE, params=PER_REPLICA, opt_state=PER_REPLICA)


def update(dense, rows, plan, batch, *, spec, loss, optimizer, row_optimizer, axes=False, row_gradient="sum"):
    """Takes one training step on the dense parameters and on the rows that the batch touches.

    The loss of a batch is sum(weight * loss) / sum(weight) over the examples of a replica. Gradients reach the rows
    as [S, U, E], duplicates summed; no array of the size of a table is made.

    Args:
      dense: DenseState, without a replica axis.
      rows: {stack: Rows}, f32[S, U, E]; a device's own shards if `axes`.
      plan: {stack: Plan}.
      batch: Batch.
      spec: EmbeddingSpec.
      loss: (params, activations {lookup: f32[B, ..., E]}, batch) -> f32[B], the loss of each example.
      optimizer: optax.GradientTransformation for the dense parameters.
      row_optimizer: RowOptimizer.
      axes: True inside a shard_map over the mesh (replica, data).
      row_gradient: 'sum' or 'mean' over replicas.

    Returns:
      dense', rows', metrics {'loss': f32[] mean over the batches of all replicas, 'weight': f32[]}.

    Raises:
      ValueError: the loss is not one number for each example.
    """
    values = {name: stack_rows.value for name, stack_rows in rows.items()}
    gradient, row_gradients, metrics = gradients(dense.params, values, plan, batch, spec=spec, loss=loss, axes=axes)
    replicas = jax.lax.axis_size(REPLICA) if axes and row_gradient == "mean" else 1
    row_gradients = jax.tree.map(lambda g: g / replicas, row_gradients)
    return step_dense(dense, gradient, optimizer), step_rows(rows, row_gradients, dense.step, row_optimizer), metrics


def gradients(params, values, plan, batch, *, spec, loss, axes=False):
    """The first half of `update`: the gradients of a batch, for those who apply them later (Hogwild).

    Args:
      params: dense parameters, without a replica axis.
      values: {stack: f32[S, U, E]}; a device's own shards if `axes`.
      plan, batch, spec, loss, axes: as for `update`.

    Returns:
      The gradient by params, by values (summed over replicas), and metrics.

    Raises:
      ValueError: the loss is not one number for each example.
    """

    def objective(params, values):
        if axes:
            values = jax.tree.map(lambda value: jax.lax.all_gather(value, AXES, tiled=True), values)
            # Said here, so that a model with a custom_vjp sees parameters of the type of its activations; the
            # transpose of this line is the sum over the devices of a replica.
            params = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, DATA, to="varying"), params)
        per_example = loss(params, activations(spec, values, plan), batch)
        boundary.check_per_example("loss", per_example, batch)
        weight = jnp.sum(batch.weight)
        weight = jax.lax.psum(weight, DATA) if axes else weight
        return jnp.sum(per_example * batch.weight) / jnp.where(weight > 0, weight, 1), weight

    # Under shard_map both gradients are summed already, by autodiff: over the devices of a replica for the dense
    # parameters, over all devices for the rows. A psum here would count them twice.
    differentiate = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
    (value, weight), (gradient, row_gradients) = differentiate(params, values)
    if axes:
        value = jax.lax.pmean(jax.lax.psum(value, DATA), REPLICA)
        weight = jax.lax.psum(weight, REPLICA)
    return gradient, row_gradients, {"loss": value, "weight": weight}


def step_dense(dense: DenseState, gradient, optimizer) -> DenseState:
    """The dense half of a step: optax on the parameters."""
    updates, opt_state = optimizer.update(gradient, dense.opt_state, dense.params)
    return DenseState(dense.step + 1, optax.apply_updates(dense.params, updates), opt_state)


def step_rows(rows: dict[str, Rows], row_gradients, step, row_optimizer: RowOptimizer) -> dict[str, Rows]:
    """The sparse half of a step: the row optimizer on the rows that a batch touched."""
    return {
        name: Rows(*row_optimizer.update(row_gradients[name], old.value, old.slots, step)) for name, old in rows.items()
    }


def init_state(params, optimizer, tables, mesh=None) -> TrainState:
    """Makes the state of a training run, placed as the train step wants it.

    Args:
      params: dense parameters, any pytree.
      optimizer: optax.GradientTransformation.
      tables: DeviceTables or HostTables.
      mesh: from `make_mesh`; one device if None.

    Returns:
      TrainState; dense leaves have a leading axis of R replicas.

    Raises:
      ValueError: not tables, not an optax transformation or not a mesh; tables that lie on another mesh.
    """
    mesh = as_mesh(mesh)
    boundary.check_tables(tables)
    boundary.check_optimizer(optimizer)
    replicas = mesh.shape[REPLICA]
    dense = DenseState(
        put_on_mesh(jnp.zeros((), jnp.int32), mesh, EVERYWHERE),
        put_on_mesh(replicate(params, replicas), mesh, PER_REPLICA),
        put_on_mesh(replicate(optimizer.init(params), replicas), mesh, PER_REPLICA),
    )
    state = TrainState(dense, tables)
    boundary.check_placement(state, mesh)
    return state


def make_update(spec, loss, optimizer, row_optimizer, mesh=None, row_gradient="sum") -> Callable:
    """Puts `update` under shard_map: (dense, rows, plan, batch) -> dense', rows', metrics, not yet jitted.

    Args:
      spec, loss, optimizer, row_optimizer, row_gradient: as for `update`.
      mesh: from `make_mesh`; one device if None.

    Returns:
      The function on global arrays; dense leaves have a leading replica axis, rows are split over all devices.

    Raises:
      ValueError: the shards cannot be split over the mesh; an argument of another kind than wanted. The function
        itself: batch, plan, rows and dense state do not fit the step or each other.
    """
    mesh = as_mesh(mesh)
    boundary.check_arguments(spec, loss)
    boundary.check_optimizer(optimizer)
    check_shards(spec.shards, mesh)
    check_row_optimizer(row_optimizer)
    if row_gradient not in ("sum", "mean"):
        raise ValueError(f"row_gradient={row_gradient!r} must be 'sum' or 'mean'.")

    def local(dense, rows, plan, batch):
        new, rows, metrics = update(
            without_replica(dense), rows, plan, batch, spec=spec, loss=loss, optimizer=optimizer,
            row_optimizer=row_optimizer, axes=True, row_gradient=row_gradient,
        )  # fmt: skip
        return with_replica(new), rows, metrics

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(_DENSE, SPLIT, plan_specs(spec.stacks), BATCH),
        out_specs=(_DENSE, SPLIT, EVERYWHERE),
    )

    def checked(dense, rows, plan, batch):  # under jit this is looked at once for each compiled shape
        boundary.check_batch(spec, plan, batch, mesh.size)
        boundary.check_dense(dense, optimizer, mesh.shape[REPLICA])
        boundary.check_rows(spec, rows, row_optimizer)
        return mapped(dense, rows, plan, batch)

    checked.mesh = mesh  # type: ignore[attr-defined]  # for a pipeline, which runs it on its own
    return checked


def make_train_step(
    spec: EmbeddingSpec,
    loss: Callable,
    optimizer: optax.GradientTransformation,
    row_optimizer: RowOptimizer,
    mesh=None,
    row_gradient: str = "sum",
) -> Callable:
    """Makes the train step of both homes: (state, plan, batch) -> state', metrics; the state is donated.

    Args:
      spec: the tables and lookups.
      loss: (params, activations {lookup: f32[B, ..., E]}, batch) -> f32[B].
      optimizer: optax.GradientTransformation for the dense parameters.
      row_optimizer: `sgd`, `adagrad`, `rowwise_adagrad` or another RowOptimizer.
      mesh: from `make_mesh`; one device if None. The batch must divide by its size.
      row_gradient: 'sum' or 'mean' over replicas.

    Returns:
      A function of TrainState, {stack: Plan} and Batch. With `DeviceTables` read, update and put are one program;
      with `HostTables` rows travel to the mesh and back. Metrics: {'loss': f32[], 'weight': f32[]}, still on device.

    Raises:
      ValueError: as `make_update`. The step itself: a state that was donated before, weights that are negative or not
        finite, a plan of another batch, objects that do not fit each other; the state is as it was.

    A step around a loss of one's own:

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
    mapped = make_update(spec, loss, optimizer, row_optimizer, mesh, row_gradient)
    plans = plan_specs(spec.stacks)
    in_rows = shardings((_DENSE, SPLIT, plans, BATCH), mesh)
    on_rows = jax.jit(mapped, in_shardings=in_rows, donate_argnums=0)
    read_rows = jax.shard_map(lambda t, p: t.read(p), mesh=mesh, in_specs=(SPLIT, plans), out_specs=SPLIT)
    put_rows = jax.shard_map(lambda t, p, r: t.put(p, r), mesh=mesh, in_specs=(SPLIT, plans, SPLIT), out_specs=SPLIT)

    def fused(state, plan, batch):
        boundary.check_layout(state.tables.layout, row_optimizer, spec)
        dense, rows, metrics = mapped(state.dense, read_rows(state.tables, plan), plan, batch)
        return TrainState(dense, put_rows(state.tables, plan, rows)), metrics

    in_state = shardings((TrainState(_DENSE, SPLIT), plans, BATCH), mesh)
    on_device = jax.jit(fused, in_shardings=in_state, donate_argnums=0)

    def run(state, plan, batch):
        if isinstance(state.tables, DeviceTables):
            return on_device(state, plan, batch)
        dense, rows, metrics = on_rows(state.dense, state.tables.read(plan), plan, batch)
        return TrainState(dense, state.tables.put(plan, rows)), metrics

    def refuse(state):
        boundary.check_dense(state.dense, optimizer, mesh.shape[REPLICA])
        boundary.check_placement(state, mesh)

    def train_step(state, plan, batch):
        boundary.check_state(spec, state)
        boundary.check_batch(spec, plan, batch, mesh.size)
        return boundary.explained(lambda: run(state, plan, batch), lambda: refuse(state))

    return train_step


def make_eval_step(spec: EmbeddingSpec, predict: Callable, mesh=None, replica: int = 0) -> Callable:
    """Makes the evaluation step of both homes: (state, plan, batch) -> f32[B]; it changes nothing.

    Args:
      spec: the tables and lookups.
      predict: (params, activations, batch) -> f32[B], for example logits.
      mesh: from `make_mesh`; one device if None. All its devices share the work.
      replica: whose dense parameters to use.

    Returns:
      A function of TrainState, {stack: Plan} and Batch.

    Raises:
      ValueError: an argument of another kind than wanted. The step itself: as that of `make_train_step`; a prediction
        that is not one number for each example.
    """
    mesh = as_mesh(mesh)
    boundary.check_arguments(spec, predict)
    check_shards(spec.shards, mesh)
    if not 0 <= replica < mesh.shape[REPLICA]:
        raise ValueError(f"replica={replica} must lie between 0 and {mesh.shape[REPLICA] - 1}, as the mesh has them.")
    plans = plan_specs(spec.stacks)

    def local(params, rows, plan, batch):
        values = {name: jax.lax.all_gather(stack_rows.value, AXES, tiled=True) for name, stack_rows in rows.items()}
        found = predict(params, activations(spec, values, plan), batch)
        several = getattr(batch.label, "shape", None) != batch.weight.shape  # tasks, perhaps
        boundary.check_per_example("predict", found, batch, only_first_axis=several)
        return found

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(EVERYWHERE, SPLIT, plans, BATCH), out_specs=SPLIT)
    read_rows = jax.shard_map(lambda t, p: t.read(p), mesh=mesh, in_specs=(SPLIT, plans), out_specs=SPLIT)

    def on_rows(params, rows, plan, batch):
        boundary.check_rows(spec, rows)
        return mapped(jax.tree.map(lambda leaf: leaf[replica], params), rows, plan, batch)

    def on_tables(params, tables, plan, batch):
        return on_rows(params, read_rows(tables, plan), plan, batch)

    of_rows = jax.jit(on_rows, in_shardings=shardings((PER_REPLICA, SPLIT, plans, BATCH), mesh))
    of_tables = jax.jit(on_tables, in_shardings=shardings((PER_REPLICA, SPLIT, plans, BATCH), mesh))

    def run(state, plan, batch):
        if isinstance(state.tables, DeviceTables):
            return of_tables(state.dense.params, state.tables, plan, batch)
        return of_rows(state.dense.params, state.tables.read(plan), plan, batch)

    def eval_step(state, plan, batch):
        boundary.check_state(spec, state)
        boundary.check_batch(spec, plan, batch, mesh.size)
        return boundary.explained(lambda: run(state, plan, batch), lambda: boundary.check_placement(state, mesh))

    return eval_step


def run_hooks(hooks: Iterable[Callable], state, step: int, plan, metrics):
    """Folds the hooks, (state, step, plan, metrics) -> state, over the state in their order.

    Args:
      hooks: called right after a step, in batch order, on the thread that commits.
      state: TrainState, or a technique's state around it.
      step: how many steps the state has seen.
      plan: {stack: Plan} of the batch just trained.
      metrics: of the step, on device.

    Returns:
      The state that the last hook returned.

    Raises:
      ValueError: a hook returned None.
    """
    for hook in hooks:
        state = hook(state, step, plan, metrics)
        if state is None:
            raise ValueError(f"the hook {hook!r:.200} returned None: a hook returns the state, changed or not.")
    return state


def without_replica(dense: DenseState) -> DenseState:
    """The dense state of one replica from leaves [1, ...]."""
    one = lambda leaf: leaf[0]
    return DenseState(dense.step, jax.tree.map(one, dense.params), jax.tree.map(one, dense.opt_state))


def with_replica(dense: DenseState) -> DenseState:
    """The dense state of one replica as leaves [1, ...]."""
    one = lambda leaf: leaf[None]
    return DenseState(dense.step, jax.tree.map(one, dense.params), jax.tree.map(one, dense.opt_state))


def check_finite(losses, last_step: int) -> None:
    """Refuses losses that are not finite, of steps in a row.

    Args:
      losses: list of f32[], on device.
      last_step: the step of the last one.

    Raises:
      FloatingPointError: names the first such step, and what to look at.
    """
    losses = np.asarray(jax.device_get(losses))
    if not np.isfinite(losses).all():
        bad = last_step - len(losses) + 1 + int(np.argmin(np.isfinite(losses)))
        raise FloatingPointError(
            f"the loss is {losses[~np.isfinite(losses)][0]} at step {bad} (found when steps "
            f"{last_step - len(losses) + 1} to {last_step} were checked). Look at that step's batch (labels? dense "
            "features on a log scale?) and at the learning rates; `jax.config.update('jax_debug_nans', True)` finds "
            "the operation."
        )
