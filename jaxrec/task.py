"""What is trained: a model over embedding tables, its loss, its two optimizers and the devices.

Legend: B batch, S shards, U padded unique rows per shard, E embedding width, R replicas.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from jaxrec import validate
from jaxrec.embedding import Place, Tables, create_tables
from jaxrec.embedding.spec import EmbeddingSpec, check_row_optimizer
from jaxrec.outcome import check_rng, checked_seed
from jaxrec.sharding import (
    BATCH,
    EVERYWHERE,
    PER_REPLICA,
    REPLICA,
    SPLIT,
    as_mesh,
    check_split,
    mesh_of,
    plan_specs,
    shardings,
)
from jaxrec.step import (
    as_float32,
    as_stored,
    checked_plans,
    device_operations,
    init_dense,
    make_eval_step,
    update,
    with_replica,
    without_replica,
)
from jaxrec.types import Batch, DenseState, Plan, PyTree, RowOptimizer, Rows, ShardsLost, TrainState
from jaxrec.xla import check_fusion

_DENSE = DenseState(step=EVERYWHERE, params=PER_REPLICA, opt_state=PER_REPLICA)
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A model to train: tables, loss, optimizers, devices. Engines and all three techniques take it.

        task = Task(spec, loss, optax.adam(1e-3), rowwise_adagrad(0.1))
        state = task.init(params)
        for batch in batches:
            state, metrics = task.step(state, batch)

    A loss is a function (params, activations {lookup: f32[B, ..., E]}, batch) -> f32[B]. If a seed is given, it also
    gets `rng=key`, the key of the seed, step and device. It may return (f32[B], figures) or (f32[B], figures,
    variables). Figures {name: f32[B] or f32[]} are reported in the metrics: weighted means over the examples of a
    replica, then over replicas; an f32[] is taken as the mean over the examples of its device. Variables {name: value}
    replace params[name] after the optimizer. `jaxrec.outcome` has the details.

    A training step of another kind is a subclass that overrides `update`. Programs are compiled once per task and
    shape.

    Args:
      spec: the tables and lookups.
      loss: as above.
      optimizer: optax.GradientTransformation for the dense parameters.
      row_optimizer: `sgd`, `adagrad`, `lazy_adam` or another RowOptimizer.
      mesh: from `make_mesh`; one device if None. Its size must divide the shards and the batch size, except for free
        trainers.
      seed: seed of a random loss, from 0 to 2**32 - 1; None for a loss without `rng`.

    Raises:
      ValueError: the mesh is over other axes, or the seed does not match the signature of the loss.

    >>> import jax.numpy as jnp, numpy as np, optax
    >>> from jaxrec import Batch, EmbeddingSpec, Lookup, Table, sgd
    >>> spec = EmbeddingSpec({'user': Table(50, 4), 'item': Table(9, 4)}, {'pair': Lookup(('user', 'item'))})
    >>> def loss(params, activations, batch):  # matrix factorisation, squared error
    ...     user, item = activations['pair'][:, 0], activations['pair'][:, 1]
    ...     return (jnp.sum(user * item, axis=-1) + params['bias'] - batch.label) ** 2
    >>> task = Task(spec, loss, optax.sgd(0.1), sgd(0.1))
    >>> state = task.init({'bias': jnp.zeros(())})
    >>> batch = Batch({'pair': np.array([[3, 1], [3, 8]])}, label=np.ones(2, np.float32))
    >>> losses = []
    >>> for _ in range(60):
    ...     state, metrics = task.step(state, batch)
    ...     losses.append(float(metrics['loss']))
    >>> losses[0] > 0.9 and losses[-1] < 0.01
    True
    """

    spec: EmbeddingSpec
    loss: Callable
    optimizer: optax.GradientTransformation
    row_optimizer: RowOptimizer
    mesh: jax.sharding.Mesh | None = None
    seed: int | None = None

    def __post_init__(self):
        if self.mesh is not None:
            as_mesh(self.mesh)  # refuses one over other axes
        if self.seed is not None:
            object.__setattr__(self, "seed", checked_seed(self.seed))
        check_rng(self.loss, self.seed is not None)
        check_row_optimizer(self.row_optimizer)

    def __reduce__(self):
        # Without compiled programs, which belong to a process.
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def init(self, params: PyTree, tables: Place | Tables = "device") -> TrainState:
        """Create the state of a training run, placed on the mesh.

        Args:
          params: dense parameters, any pytree.
          tables: where the rows are created: "device", "pinned" (host memory that the devices read and write) or
            "host", which `Pipeline` and free trainers need; or tables that exist.

        Returns:
          TrainState; dense leaves have a leading axis of R replicas.

        Raises:
          ValueError: a parameter is no array of floats, the state of the optimizer has a PRNG key, the tables are of
            another spec, or there is no such place.
        """
        mesh = as_mesh(self.mesh)
        dense = init_dense(params, self.optimizer, mesh)
        if isinstance(tables, str):
            tables = create_tables(tables, self.spec, self.row_optimizer, mesh)
        validate.check_spec(self.spec, tables.spec)
        return TrainState(dense, tables)

    def step(self, state: TrainState, batch: Batch, plans: dict[str, Plan] | None = None) -> tuple[TrainState, Metrics]:
        """Train on one batch: plan, read, update, put.

        A pure function of state, batch and plans over `DeviceTables`, which `jax.jit` and `jax.lax.scan` take if the
        plans are given. With these and `PinnedTables`, read, update and put are one program; with others, rows are
        copied to the mesh and back.

        Args:
          state: TrainState; it is donated: go on with the one returned.
          batch: Batch. Arrays of numpy may be read until the step has ended: do not write to them before.
          plans: {stack: Plan} of the batch, from `plan` or `planned`; made here if None.

        Returns:
          The next state, and metrics {'loss': f32[], 'weight': f32[], and the figures f32[] of the loss}, left on the
          device.

        Raises:
          ValueError: the state was donated before, weights are negative or not finite, the plans are of another batch,
            the shards cannot be split over the mesh, objects do not match each other, or the loss returns something
            else than it may; the state is unchanged.
          ShardsLost: shards of the row storage are lost. If they are lost during the write, the step counts, and the
            error has its result as `done`.
          RuntimeError: XLA gives wrong results on this CPU, as its faulty fusion was not disabled (see `xla`).
        """
        plans = checked_plans(self.spec, state, batch, plans, self._capacity)
        tables, (on_device, on_pinned, on_rows) = state.tables, self._programs
        if tables.traced is not None:
            program = on_device if tables.hosted is None else on_pinned
            dense, traced, metrics = program(state.dense, tables.traced, plans, batch)
            return TrainState(dense, tables.with_traced(traced)), metrics
        dense, rows, metrics = on_rows(state.dense, tables.read(plans), plans, batch)
        try:
            return TrainState(dense, tables.put(plans, rows)), metrics
        except ShardsLost as lost:
            # All other shards are written and the old dense state is donated: the step counts as done.
            lost.done = TrainState(dense, tables), metrics
            raise

    def update(
        self, dense: DenseState, rows: dict[str, Rows], plans: dict[str, Plan], batch: Batch
    ) -> tuple[DenseState, dict[str, Rows], Metrics]:
        """Apply one step to the dense parameters and the rows that the batch touches: `jaxrec.update` over the mesh.

        Pure, and not jitted. An override must leave rows of zero gradient unchanged, as padding relies on it, and keep
        all shapes. Rows that are stored in 16 bits are rounded after it.

        Args:
          dense: DenseState, its leaves with a leading axis of R replicas.
          rows: {stack: Rows}, f32[S, U, E], split over all devices.
          plans: {stack: Plan}.
          batch: Batch.

        Returns:
          dense', rows', metrics.
        """

        mesh = as_mesh(self.mesh)
        # One device has nothing to combine, and XLA would keep the collectives as copies of all rows. The shard_map
        # stays, as a loss may use the axes of the mesh.
        several = mesh.size > 1

        def local(dense, rows, plans, batch):
            new, rows, metrics = update(
                without_replica(dense), rows, plans, batch, spec=self.spec, loss=self.loss, optimizer=self.optimizer,
                row_optimizer=self.row_optimizer, sharded=several, seed=self.seed,
            )  # fmt: skip
            return with_replica(new), rows, metrics

        in_specs = (_DENSE, SPLIT, plan_specs(self.spec.stacks), BATCH)
        out_specs = (_DENSE, SPLIT, EVERYWHERE)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=several)
        return mapped(dense, rows, plans, batch)

    def eval_step(self, predict: Callable) -> Callable:
        """Make the evaluation step over the mesh of the task, see `make_eval_step`."""
        return make_eval_step(self.spec, predict, self.mesh)

    @functools.cached_property
    def checked_update(self) -> Callable:
        """`update` with checks of what goes in and out, always the same object, so that its programs are shared."""
        mesh = as_mesh(self.mesh)
        check_fusion(mesh.devices.flat[0].platform)
        check_split(self.spec.shards, mesh)

        # Under jit this runs once per compiled shape.
        def checked(dense, rows, plans, batch):
            validate.check_batch(self.spec, plans, batch)
            validate.check_dense(dense, self.optimizer, mesh.shape[REPLICA])
            validate.check_rows(self.spec, rows, self.row_optimizer)
            wide = as_float32(rows)
            found = self.update(dense, wide, plans, batch)
            validate.check_updated((dense, wide), found)
            new, updated, metrics = found
            return new, as_stored(rows, updated, plans, dense.step, self.spec.seed), metrics

        return checked

    @functools.cached_property
    def _capacity(self) -> dict[str, int]:
        return {}

    @functools.cached_property
    def _programs(self):
        mesh, updated = as_mesh(self.mesh), self.checked_update
        read_rows, put_rows = device_operations(self.spec, mesh)

        # One program, in which XLA writes the rows of donated device tables in place.
        def fused(dense, tables, plans, batch):
            dense, rows, metrics = updated(dense, read_rows(tables, plans), plans, batch)
            return dense, put_rows(tables, plans, rows), metrics

        placed = shardings((_DENSE, SPLIT, plan_specs(self.spec.stacks), BATCH), mesh)
        compiled = functools.partial(jax.jit, fused, in_shardings=placed)
        on_rows = jax.jit(updated, in_shardings=placed, donate_argnums=0)
        return compiled(donate_argnums=(0, 1)), compiled(donate_argnums=0), on_rows


def check_gradients_suffice(task: Task) -> None:
    """Refuse a task that cannot be trained by gradients that are applied later, in any order."""
    if task.seed is not None:
        raise ValueError(
            f"seed={task.seed}: free trainers give a loss no key, for dropout, say, as they apply gradients in any "
            "order; make a Task without, or train with Serial or Pipeline."
        )
    if type(task).update is not Task.update:
        raise ValueError(
            f"{type(task).__name__} has an update of its own, which free trainers would not run, as they apply "
            "gradients later: train with Serial or Pipeline."
        )


def once_per_task(make: Callable[[Task], Any]) -> Callable[[Task], Any]:
    """Decorate a function of a task whose result, such as compiled programs, is kept on the task."""
    name = f"{make.__module__}.{make.__qualname__}"

    @functools.wraps(make)
    def made(task):
        if name not in task.__dict__:
            task.__dict__[name] = make(task)
        return task.__dict__[name]

    return made


def check_step(task: Task, state: TrainState, batch: Batch) -> float:
    """Compare a compiled step with the same step run operation by operation.

    Run it once for a new model, on a small batch: a difference means a compiler fault or an impure loss.

    Args:
      task: Task.
      state: TrainState; it is not donated.
      batch: Batch of about 8 to 64 examples, as loops are slow without compilation.

    Returns:
      The largest relative difference found in dense state, rows and metrics.

    Raises:
      ArithmeticError: a leaf differs by more than 1e-3 of its largest value; the error names it.

    >>> import jax.numpy as jnp, numpy as np
    >>> from jaxrec import Lookup, Table, sgd
    >>> spec = EmbeddingSpec({'item': Table(9, 2)}, {'item': Lookup('item')})
    >>> loss = lambda params, activations, batch: (activations['item'].sum(-1) + params - batch.label) ** 2
    >>> task = Task(spec, loss, optax.sgd(0.1), sgd(0.1))
    >>> batch = Batch({'item': np.array([3, 3, 8, 0])}, np.ones(4, np.float32))
    >>> check_step(task, task.init(jnp.zeros(())), batch) < 1e-6
    True
    """
    plans, traced, updated = checked_plans(task.spec, state, batch, None, {}), state.tables.traced, task.checked_update
    read_rows = jax.jit(device_operations(task.spec, mesh_of(state.dense))[0])
    rows = state.tables.read(plans) if traced is None else read_rows(traced, plans)
    compiled = jax.jit(updated)(state.dense, rows, plans, batch)
    with jax.disable_jit():
        plain = updated(state.dense, rows, plans, batch)
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
