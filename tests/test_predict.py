"""A trained run in use: its model without optimizers, its embeddings, and both by way of files."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from world import pair_batch, pair_loss, pair_predict

import jaxrec
from jaxrec.checkpoint import (
    Checkpointer,
    copy_rows,
    deltas,
    images,
    read_tables,
    restore,
    restore_for_prediction,
    snapshot,
    write_image,
)
from jaxrec.cpr import Recovery, mfu
from jaxrec.embedding import DeviceTables, EmbeddingSpec, HostTables, Lookup, Table, adagrad, embedding_matrix, sgd
from jaxrec.oac import Pipeline

TABLES = {"user": Table(40, 8), "item": Table(9, 8)}
SPEC = EmbeddingSpec(TABLES, {"pair": Lookup(("user", "item"))}, shards=4)
ROWS, DENSE = adagrad(0.1), optax.adam(0.05)
PARAMS = {"bias": jnp.zeros(())}
HOMES = pytest.mark.parametrize("home", [HostTables, DeviceTables])
TEST = pair_batch(64, seed=99)


def train_step(mesh=None):
    return jaxrec.make_train_step(SPEC, pair_loss, DENSE, ROWS, mesh)


def fresh(home=HostTables):
    return jaxrec.init_state(PARAMS, DENSE, home.create(SPEC, ROWS))


def batches(first=0, last=12):
    return [pair_batch(8, seed) for seed in range(first, last)]


def trained(home=HostTables):
    state, step = fresh(home), train_step()
    for batch in batches():
        state, _ = step(state, jaxrec.plan(SPEC, batch.ids), batch)
    return state


def logits(state, spec=SPEC, **where):
    predict = jaxrec.make_eval_step(spec, pair_predict, **where)
    return np.asarray(predict(state, jaxrec.plan(spec, TEST.ids), TEST))


def save(state, directory, name="step_00000012"):
    write_image(directory / name, snapshot(state, run="run"))
    return logits(state)


def equal(a, b):
    np.testing.assert_array_equal(a, b, strict=True)


# ---- the model


@HOMES
@pytest.mark.parametrize("into", [HostTables, DeviceTables])
def test_a_restored_model_predicts_what_the_trained_one_did(tmp_path, home, into):
    wanted = save(trained(home), tmp_path)
    state, image = restore_for_prediction(tmp_path, SPEC, PARAMS, home=into)
    equal(logits(state), wanted)
    assert image.step == int(state.dense.step) == 12 and state.dense.opt_state == ()
    assert {part for parts in state.tables.layout.values() for part in parts} == {"value"}
    assert isinstance(state.tables, into)


def test_shapes_of_parameters_are_enough_and_shards_may_be_others(tmp_path):
    wanted = save(trained(), tmp_path)
    shapes = jax.eval_shape(lambda: PARAMS)
    for shards in (1, 3, 4):
        spec = EmbeddingSpec(TABLES, SPEC.lookups, shards)
        state, _ = restore_for_prediction(tmp_path / "step_00000012", spec, shapes)
        equal(logits(state, spec), wanted)


def recovered_run(directory, home, steps=12):
    """A run with CPR: a base of some step, and row deltas over it with their dense state."""
    with jaxrec.Serial(fresh(home), train_step()) as engine:
        schedule = dict(save_every_steps=4, total_steps=20, scheme=mfu(), fraction=0.5)
        recovery = engine.enter(Recovery(engine, directory, **schedule))
        jaxrec.train(engine, lambda at: batches(at, steps), [recovery.hook])
    assert deltas(directory)
    return restore(directory, fresh(home))[0]


@HOMES
def test_a_chain_of_deltas_predicts_what_the_state_restored_from_it_does(tmp_path, home):
    wanted = recovered_run(tmp_path, home)
    state, image = restore_for_prediction(tmp_path, SPEC, PARAMS, home=home)
    assert image.path.name.startswith("delta_") and not images(tmp_path)  # over initial rows
    equal(logits(state), logits(wanted))
    write_image(tmp_path / "step_00000011", snapshot(trained(home)))  # older than the deltas
    again, _ = restore_for_prediction(tmp_path, SPEC, PARAMS, home=home)
    equal(logits(again), logits(wanted))


def test_each_replica_predicts_what_it_did(tmp_path):
    mesh = jaxrec.make_mesh(2, jax.devices()[:2])
    state = jaxrec.init_state(PARAMS, DENSE, DeviceTables.create(SPEC, ROWS, mesh), mesh)
    step = train_step(mesh)
    for batch in batches():
        state, _ = step(state, jaxrec.plan(SPEC, batch.ids), batch)
    write_image(tmp_path / "step_00000012", snapshot(state))
    wanted = [logits(state, mesh=mesh, replica=replica) for replica in (0, 1)]
    assert (wanted[0] != wanted[1]).any()
    for replica in (0, 1):
        equal(logits(restore_for_prediction(tmp_path, SPEC, PARAMS, replica)[0]), wanted[replica])
        there, _ = restore_for_prediction(tmp_path, SPEC, PARAMS, replica, DeviceTables, mesh)
        equal(logits(there, mesh=mesh, replica=1), wanted[replica])
    with pytest.raises(ValueError, match="replica=2, but .* holds 2 of them"):
        restore_for_prediction(tmp_path, SPEC, PARAMS, 2)


def test_to_go_on_training_still_wants_the_optimizers(tmp_path):
    """Negative control: only who asks for a model gets one without them."""
    save(trained(), tmp_path)
    with pytest.raises(ValueError, match="other row optimizer slots"):
        restore(tmp_path, jaxrec.init_state(PARAMS, DENSE, HostTables.create(SPEC, sgd(0.1))))
    with pytest.raises(ValueError, match="other dense state"):
        restore(tmp_path, jaxrec.init_state(PARAMS, optax.sgd(0.1), HostTables.create(SPEC, ROWS)))


# ---- the embeddings


def random_spec(seed):
    draw = np.random.default_rng(seed)
    rows, widths = draw.integers(1, 30, 5), draw.choice([2, 3], 5)
    tables = {f"t{i}": Table(int(r), int(w)) for i, (r, w) in enumerate(zip(rows, widths, strict=True))}
    return EmbeddingSpec(tables, {name: Lookup(name) for name in tables}, int(draw.integers(1, 9)), seed)


@HOMES
@pytest.mark.parametrize("seed", range(4))
def test_a_matrix_has_the_rows_that_lookups_read(home, seed):
    spec = random_spec(seed)
    tables = home.create(spec, ROWS)
    for name, table in spec.tables.items():
        ids = {other: np.arange(table.rows) if other == name else np.full(table.rows, -1) for other in spec.tables}
        plans = jaxrec.plan(spec, ids)
        stack = f"width_{table.width}"
        read = np.asarray(tables.read(plans)[stack].value).reshape(-1, table.width)[plans[stack].inverse[name]]
        equal(embedding_matrix(tables, name), read)
        some = np.random.default_rng(seed).integers(0, table.rows, (3, 4))
        equal(embedding_matrix(tables, name, some), read[some])
        assert embedding_matrix(tables, name, []).shape == (0, table.width)


def test_a_matrix_is_a_copy():
    tables = HostTables.create(SPEC, ROWS)
    for matrix in (embedding_matrix(tables, "item"), embedding_matrix(tables, "item", [0, 1])):
        before = matrix.copy()
        for parts in tables.shards["width_8"]:
            parts["value"] += 1
        equal(matrix, before)


def test_tables_that_lag_refuse_to_be_copied():
    update = jaxrec.make_update(SPEC, pair_loss, DENSE, ROWS)
    with Pipeline(fresh(), update, mode="oac", window=4) as pipeline:
        for state, _ in pipeline.run(batches()):
            if pipeline.step == 3:
                for ids in (None, [1, 2]):
                    with pytest.raises(ValueError, match="lag|stood at step"):
                        embedding_matrix(state.tables, "item", ids)
        matrix = embedding_matrix(pipeline.state.tables, "item")
    equal(matrix, embedding_matrix(trained().tables, "item"))


# ---- tables out of an image, without a state


def slots(tables, table):
    """The accumulators of one table: the matrix of tables that hold them in place of embeddings."""
    shards = {name: [{"value": parts["accumulator"]} for parts in mine] for name, mine in tables.shards.items()}
    return embedding_matrix(HostTables(tables.spec, tables.spec.layout(sgd(0.1)), shards), table)


@pytest.mark.parametrize("seed", range(3))
def test_an_image_gives_the_rows_and_slots_of_each_table(tmp_path, seed):
    spec = random_spec(seed)
    tables = HostTables.create(spec, ROWS)
    for stack in tables.shards.values():
        for shard, parts in enumerate(stack):
            parts["accumulator"][:] = np.random.default_rng([seed, shard]).random(parts["accumulator"].shape)
    write_image(tmp_path / "step_00000001", snapshot(jaxrec.init_state(PARAMS, DENSE, tables)))
    read = read_tables(tmp_path, list(spec.tables), ("value", "accumulator"))
    for name in spec.tables:
        equal(read[name]["value"], embedding_matrix(tables, name))
        equal(read[name]["accumulator"], slots(tables, name))


def test_a_chain_gives_the_newest_of_each_row(tmp_path):
    wanted = recovered_run(tmp_path, HostTables).tables
    for name in TABLES:
        equal(read_tables(tmp_path, [name])[name]["value"], embedding_matrix(wanted, name))
    with pytest.raises(ValueError, match="what their slots .* begin with stands in no image"):
        read_tables(tmp_path, ["item"], ["accumulator"])
    base, over = trained(), fresh()
    write_image(tmp_path / "a" / "step_00000012", snapshot(base))
    below = {"step_00000012": read_digest(tmp_path / "a" / "step_00000012")}
    rows = {("width_8", 1): np.array([1, 5, 41, 45], np.int32)}
    write_image(tmp_path / "a" / "delta_000001", copy_rows(over.tables, rows, 13, below))
    read, ids = read_tables(tmp_path / "a", ["item"], ["value", "accumulator"])["item"], np.arange(9)
    newer = np.isin(ids + 40, [41, 45])
    equal(read["value"][newer], embedding_matrix(over.tables, "item", ids[newer]))
    equal(read["value"][~newer], embedding_matrix(base.tables, "item", ids[~newer]))
    equal(read["accumulator"][newer], np.zeros((2, 8), np.float32))


def read_digest(path):
    return jaxrec.checkpoint.read_manifest(path).digest


def test_reading_changes_nothing_and_waits_for_nobody(tmp_path):
    """Who saves in the directory holds its locks; who reads takes none."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(trained())
        checkpointer.wait()
        before = sorted(path.name for path in tmp_path.rglob("*"))
        restore_for_prediction(tmp_path, SPEC, PARAMS)
        read_tables(tmp_path, ["item"])
        assert sorted(path.name for path in tmp_path.rglob("*")) == before
