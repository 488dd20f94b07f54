"""What a step refuses: objects that do not fit each other, each with one sentence and its remedy.

A batch and its plan are looked at in every call, shapes always and values where they lie on the
host, so that no device is waited for; it costs some microseconds and one pass over the ids. What
depends on shapes alone is looked at where a step is traced, once for each compiled shape. Where a
state lies is looked at only after JAX has refused it.

Legend: B batch, S shards, U padded unique rows per shard, V rows of a stack, E embedding width,
R replicas.
"""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from jaxrec.embedding.lookup import is_plan_of
from jaxrec.embedding.spec import ARRAYS, EmbeddingSpec, Layout
from jaxrec.sharding import PER_REPLICA, REPLICA, SPLIT, shardings
from jaxrec.types import Batch, Plan, RowOptimizer, TrainState


def check_arguments(spec, function) -> None:
    """Refuses what is no spec or no function where a step is made."""
    if not isinstance(spec, EmbeddingSpec):
        raise ValueError(f"spec is a {type(spec).__name__}, but an EmbeddingSpec(tables, lookups) is wanted.")
    if not callable(function):
        raise ValueError(
            f"a {type(function).__name__} was given where a function (params, activations, batch) "
            "-> f32[B] is wanted: of a Flax model, write one that calls model.apply(params, "
            "batch.dense, activations['...'])."
        )


def check_optimizer(optimizer) -> None:
    """Refuses what cannot step the dense parameters."""
    if isinstance(optimizer, RowOptimizer):
        raise ValueError(
            "the dense optimizer is a RowOptimizer: give an optax transformation; that of the rows comes last."
        )
    if not callable(getattr(optimizer, "init", None)) or not callable(getattr(optimizer, "update", None)):
        raise ValueError(f"the dense optimizer {optimizer!r:.200} is no optax transformation: give optax.adam(1e-3).")


def check_tables(tables) -> None:
    """Refuses what is no home of rows."""
    if not hasattr(tables, "on_shards"):
        raise ValueError(
            f"tables are a {type(tables).__name__}: make them with DeviceTables.create(spec, "
            "row_optimizer, mesh) or HostTables.create(spec, row_optimizer)."
        )


def check_state(spec: EmbeddingSpec, state) -> None:
    """Refuses a state that is none, that was used up before, or whose tables are of another
    spec."""
    check_is_state(state, ": a step takes (state, plans, batch)")
    check_tables(state.tables)
    check_not_donated(state)
    check_spec(spec, state.tables.spec)


def check_spec(spec: EmbeddingSpec, theirs: EmbeddingSpec) -> None:
    """Refuses tables of another spec; another seed is fine, as it decides how rows begin."""
    if theirs is spec or theirs.digest == spec.digest:
        return
    if (list(theirs.tables.items()), theirs.shards) != (list(spec.tables.items()), spec.shards):
        wanted, found = ({name: (t.rows, t.width) for name, t in s.tables.items()} for s in (spec, theirs))
        raise ValueError(
            f"the tables were made with another spec than the step: they have {found!s:.200} in "
            f"{theirs.shards} shards, and the step wants {wanted!s:.200} in {spec.shards}. Make "
            "both with one spec."
        )


def check_is_state(state, why: str = "") -> None:
    """Refuses what is no state; `why` is said behind the rule.

    Raises:
      ValueError: says what it is.
    """
    if not isinstance(state, TrainState):
        raise ValueError(f"state is a {type(state).__name__}, but a TrainState from `init_state` is wanted{why}.")


def check_not_donated(state) -> None:
    """Refuses a state that was donated to an earlier step."""
    step = state.dense.step
    if isinstance(step, jax.Array) and not isinstance(step, jax.core.Tracer) and step.is_deleted():
        raise ValueError(
            "this state was donated to an earlier step and is gone: go on with the state that the "
            "step returned (`state, metrics = step(state, plans, batch)`), and copy what you need "
            "to keep."
        )


def check_batch(spec: EmbeddingSpec, plans, batch, devices: int = 1) -> None:
    """Refuses a batch that is none, that devices cannot share, or that was not planned; bad
    weights.

    Args:
      spec: the tables and lookups.
      plans: {stack: Plan} of the batch.
      batch: Batch; of numpy arrays the values are looked at, too.
      devices: how many share the batch.

    Raises:
      ValueError: says what does not fit, and the remedy.
    """
    if not isinstance(batch, Batch):
        raise ValueError(
            f"batch is a {type(batch).__name__}, but a jaxrec.Batch(ids, dense, label, weight) is "
            "wanted: a step takes (state, plans, batch)."
        )
    size = _check_weight(batch.weight)
    for name in ("dense", "label"):
        for leaf in jax.tree.leaves(getattr(batch, name)):
            _check_leaf(name, leaf, size)
    spec.check_ids(batch.ids)
    _check_plans(spec, plans, batch.ids)
    sizes = {"weight": size, **{f"ids[{name!r}]": array.shape[0] for name, array in batch.ids.items()}}
    for name, length in sizes.items():
        if length % devices:
            raise ValueError(
                f"{name} has {length} rows, which {devices} devices cannot share equally: choose a "
                "batch size that they divide, or pad with examples of weight 0 and ids -1."
            )


def own_batch(batch: Batch) -> Batch:
    """A batch with host arrays of its own, as a loader may fill the same arrays again."""
    return jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, batch)


def _check_weight(weight) -> int:
    """B, after looking at the weights; on the host only, as a device would have to be waited
    for."""
    if not isinstance(weight, ARRAYS) or weight.ndim != 1:
        found = f"array of shape {tuple(weight.shape)}" if isinstance(weight, ARRAYS) else type(weight).__name__
        raise ValueError(f"weight is a {found}, but f32[B] is wanted: np.ones(B, np.float32) if all examples count.")
    if not len(weight):
        raise ValueError("a batch without examples: leave it out, or pad it with examples of weight 0.")
    _check_leaf("weight", weight, len(weight))
    # A NaN makes the minimum NaN, which is not >= 0.
    if isinstance(weight, np.ndarray) and not (weight.min() >= 0 and weight.max() < np.inf):
        bad = int(np.argmin((weight >= 0) & (weight < np.inf)))
        raise ValueError(
            f"weight[{bad}] is {weight[bad]}: weights are finite and 0 or more, as they divide the "
            "loss. Give examples that shall not count weight 0."
        )
    return len(weight)


def _check_leaf(name, leaf, size):
    if not isinstance(leaf, ARRAYS) or leaf.dtype.kind in "OUSMm":
        found = f"array of {leaf.dtype}" if isinstance(leaf, ARRAYS) else f"list or a {type(leaf).__name__}"
        raise ValueError(f"{name} is a {found}, but an array of numbers is wanted: np.asarray({name}, np.float32).")
    if leaf.shape[:1] != (size,):
        raise ValueError(
            f"{name} has shape {tuple(leaf.shape)}, but the weights are of {size} examples: give one row each."
        )


def _check_plans(spec, plans, ids):
    if not isinstance(plans, Mapping) or plans.keys() != spec.stacks.keys():
        found = list(plans) if isinstance(plans, Mapping) else type(plans).__name__
        raise ValueError(
            f"plans are {found}, but {{stack: Plan}} of {list(spec.stacks)} is wanted: make it "
            "with jaxrec.plan(spec, batch.ids), or iterate over planned(spec, batches)."
        )
    for name, plan in plans.items():
        wanted = {key: ids[key].shape for key in spec.lookups_of(name)}
        if not isinstance(plan, Plan) or len(plan.unique) != spec.shards:
            raise ValueError(f"the plan of {name!r} is not of this spec: make it with jaxrec.plan(spec, batch.ids).")
        shapes = {key: array.shape for key, array in plan.inverse.items()}
        if shapes != wanted:
            raise ValueError(
                f"the plan of {name!r} is of ids {shapes}, but the batch has {wanted}: plan this "
                "very batch, jaxrec.plan(spec, batch.ids)."
            )
        if all(isinstance(array, np.ndarray) for array in (*plan[:3:2], *map(ids.get, wanted))):
            _check_host_plan(spec, name, plan, ids)


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
    """Refuses a dense state of another number of replicas or of another optimizer, by shapes alone.

    Args:
      dense: DenseState with a leading axis of R replicas; of tracers, too.
      optimizer: optax.GradientTransformation of the step.
      replicas: R of the step's mesh.
    """
    found = {np.shape(leaf)[:1] for leaf in jax.tree.leaves((dense.params, dense.opt_state))} - {(replicas,)}
    if found:
        raise ValueError(
            f"leaves of the dense state have a first axis of {sorted(found)}, but the step's mesh "
            f"has {replicas} replicas: give the same mesh to `init_state` and to the step."
        )
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), dense.params)
    wanted = jax.eval_shape(optimizer.init, one)
    if _described(wanted, 0) != _described(dense.opt_state, 1):
        raise ValueError(
            f"the optimizer state is {_kinds(dense.opt_state)}, but the step's optimizer wants "
            f"{_kinds(wanted)}: give the same optax transformation to `init_state` and to the step."
        )


def _described(tree, first_axis):
    # By structure, as named tuples of several kinds are equal to each other.
    return jax.tree.structure(tree), [np.shape(leaf)[first_axis:] for leaf in jax.tree.leaves(tree)]


def _kinds(opt_state):
    """The names of the parts of an optax state, without its arrays."""
    if type(opt_state) is tuple:
        return ", ".join(map(_kinds, opt_state))[:200]
    return type(opt_state).__name__


def check_rows(spec: EmbeddingSpec, rows: Mapping, row_optimizer: RowOptimizer | None = None) -> None:
    """Refuses rows of another spec or row optimizer, by shapes alone.

    Args:
      spec: the tables.
      rows: {stack: Rows} f32[S, U, E].
      row_optimizer: of the step; slots are not looked at if None.
    """
    found = {name: [len(r.value), r.value.shape[-1]] for name, r in rows.items()}
    wanted = {name: [stack.shards, stack.width] for name, stack in spec.stacks.items()}
    if found != wanted:
        raise ValueError(
            f"the rows are of stacks {found}, but the step's spec wants {wanted}: make tables and step with one spec."
        )
    if row_optimizer is not None:
        widths = {name: {slot: array.shape[-1] for slot, array in r.slots.items()} for name, r in rows.items()}
        _check_slots(widths, spec.layout(row_optimizer))


def check_layout(layout: Layout, row_optimizer: RowOptimizer, spec: EmbeddingSpec) -> None:
    """Refuses tables with other slots than a row optimizer wants; their fills may differ."""
    _check_slots(_slot_widths(layout), spec.layout(row_optimizer))


def _slot_widths(layout):
    return {
        name: {slot: part.width for slot, part in parts.items() if slot != "value"} for name, parts in layout.items()
    }


def _check_slots(found, layout):
    for name, wanted in _slot_widths(layout).items():
        if found[name] != wanted:
            raise ValueError(
                f"the tables have slots {found[name]} in {name!r}, but the step's row optimizer "
                f"wants {wanted}: give tables and step the same row optimizer."
            )


def check_placement(state, mesh) -> None:
    """Refuses a state that lies on other devices than a mesh's, or lies there in another way."""
    check_context(mesh)
    for tree, place in (((state.dense.params, state.dense.opt_state), PER_REPLICA), (state.tables, SPLIT)):
        for leaf in jax.tree.leaves(tree):  # tables in host memory are one leaf, and no array
            if not isinstance(leaf, jax.Array) or not leaf.committed:
                continue
            if not leaf.sharding.is_equivalent_to(shardings(place, mesh), leaf.ndim):
                what = "dense state" if place is PER_REPLICA else "tables"
                raise ValueError(
                    f"the {what} lies on {leaf.sharding.num_devices} devices, "
                    f"{leaf.sharding.device_set!s:.200}, not as the mesh of {mesh.size} devices in "
                    f"{mesh.shape[REPLICA]} replicas wants it: give one mesh to `init_state`, "
                    "`DeviceTables.create`, `make_train_step` and `make_eval_step`."
                )


def check_context(mesh) -> None:
    """Refuses another mesh set by `jax.set_mesh`: JAX runs no program of this one under it."""
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and context != mesh.abstract_mesh:
        raise ValueError(
            f"jax.set_mesh has set a mesh {dict(context.shape)} of axis types "
            f"{context.axis_types}, but the step is of {dict(mesh.shape)} of type Auto: leave its "
            "block, or set the mesh of jaxrec.make_mesh."
        )


def explained(run: Callable, check: Callable):
    """Runs a program; where it fails and a check knows why, the check's words are the error."""
    try:
        return run()
    except Exception as error:
        failure = error
    check()
    try:
        raise failure
    finally:
        del failure  # else its traceback keeps this frame, and the state, alive
