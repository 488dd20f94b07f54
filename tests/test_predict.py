"""Use of a trained run: its model without optimizers and its embeddings, in memory and through files."""

import dataclasses
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import evaluate
import export
import jax
import jax.numpy as jnp
import numpy as np
import optax
import polars as pl
import pytest
from click_model import pair_batch, pair_loss, pair_predict
from criteo_files import criteo_lines, write_lines
from main import saving, subsets
from main.recorder import Recorder
from main.signals import Asked
from main.subsets import fields_of
from main.table_data import spec_of, table_of, with_vocabulary
from main.targets import CLICK
from main.trained import open_run, vocabularies_of
from trained_run import STEPS, criteo_run, synthetic_run, tabular_run, without_labels

import jaxrec
from jaxrec.checkpoint import (
    Checkpointer,
    deltas,
    images,
    read_tables,
    restore,
    restore_for_prediction,
    snapshot,
    snapshot_rows,
    write_image,
)
from jaxrec.cpr import Recovery, mfu
from jaxrec.data.criteo import has_labels, open_encoder, open_split, prepare, read_rows
from jaxrec.embedding import (
    DeviceTables,
    EmbeddingSpec,
    HostTables,
    Lookup,
    Table,
    adagrad,
    create_tables,
    embedding_matrix,
    sgd,
)
from jaxrec.ranking import group_auc
from jaxrec.shadowsync import with_mean_replica
from jaxrec.types import DenseState, TrainState

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
TABLES = {"user": Table(40, 8), "item": Table(9, 8)}
SPEC = EmbeddingSpec(TABLES, {"pair": Lookup(("user", "item"))}, shards=4)
ROWS, DENSE = adagrad(0.1), optax.adam(0.05)
PARAMS = {"bias": jnp.zeros(())}
KINDS = {"host": HostTables, "device": DeviceTables}
HOMES = pytest.mark.parametrize("home", KINDS)
TASK, TEST = jaxrec.Task(SPEC, pair_loss, DENSE, ROWS), pair_batch(64, seed=99)


def fresh(home="host"):
    return TASK.init(PARAMS, home)


def batches(first=0, last=12):
    return [pair_batch(8, seed) for seed in range(first, last)]


def trained(home="host", task=TASK):
    state = task.init(PARAMS, home)
    for batch in batches():
        state, _ = task.step(state, batch)
    return state


def logits(state, spec=SPEC, **where):
    predict = jaxrec.make_eval_step(spec, pair_predict, **where)
    return np.asarray(predict(state, TEST))


def save(state, directory, name="step_00000012"):
    write_image(directory / name, snapshot(state, run="run"))
    return logits(state)


def equal(a, b):
    np.testing.assert_array_equal(a, b, strict=True)


# ---- the model


@HOMES
@pytest.mark.parametrize("into", KINDS)
def test_a_restored_model_predicts_what_the_trained_one_did(tmp_path, home, into):
    wanted = save(trained(home), tmp_path)
    state, image = restore_for_prediction(tmp_path, SPEC, PARAMS, place=into)
    equal(logits(state), wanted)
    assert image.step == int(state.dense.step) == 12 and state.dense.opt_state == ()
    assert {part for parts in state.tables.layout.values() for part in parts} == {"value"}
    assert isinstance(state.tables, KINDS[into])


def test_shapes_of_parameters_are_enough_and_shards_may_be_others(tmp_path):
    wanted = save(trained(), tmp_path)
    shapes = jax.eval_shape(lambda: PARAMS)
    for shards in (1, 3, 4):
        spec = EmbeddingSpec(TABLES, SPEC.lookups, shards)
        state, _ = restore_for_prediction(tmp_path / "step_00000012", spec, shapes)
        equal(logits(state, spec), wanted)


def recovered_run(directory, home, steps=12):
    """State restored from a run with CPR, which has left row deltas with their dense state."""
    recovery = Recovery(directory, 4, 20, scheme=mfu(), fraction=0.5, save_at_end=False)
    with jaxrec.Serial(TASK, fresh(home), [recovery]) as engine:
        engine.train(batches(0, steps))
    assert deltas(directory)
    return restore(directory, fresh(home))[0]


@HOMES
def test_a_chain_of_deltas_predicts_what_the_state_restored_from_it_does(tmp_path, home):
    wanted = recovered_run(tmp_path, home)
    state, image = restore_for_prediction(tmp_path, SPEC, PARAMS, place=home)
    assert image.path.name.startswith("delta_") and not images(tmp_path)  # over initial rows
    equal(logits(state), logits(wanted))
    write_image(tmp_path / "step_00000011", snapshot(trained(home)))  # older than the deltas
    again, _ = restore_for_prediction(tmp_path, SPEC, PARAMS, place=home)
    equal(logits(again), logits(wanted))


def test_each_replica_predicts_what_it_did(tmp_path):
    mesh = jaxrec.make_mesh(2, jax.devices()[:2])
    state = trained("device", dataclasses.replace(TASK, mesh=mesh))
    write_image(tmp_path / "step_00000012", snapshot(state))
    wanted = [logits(state, mesh=mesh, replica=replica) for replica in (0, 1)]
    assert (wanted[0] != wanted[1]).any()
    for replica in (0, 1):
        equal(logits(restore_for_prediction(tmp_path, SPEC, PARAMS, replica)[0]), wanted[replica])
        there, _ = restore_for_prediction(tmp_path, SPEC, PARAMS, replica, "device", mesh)
        equal(logits(there, mesh=mesh, replica=1), wanted[replica])
    equal(
        logits(restore_for_prediction(tmp_path, SPEC, PARAMS)[0]),
        logits(with_mean_replica(state), mesh=mesh, replica=0),
    )
    with pytest.raises(ValueError, match="replica=2, but .* holds 2 of them"):
        restore_for_prediction(tmp_path, SPEC, PARAMS, 2)
    with pytest.raises(ValueError, match="number of replicas is another one: `restore_for_prediction`"):
        restore(tmp_path, fresh("host"))


def test_to_go_on_training_still_wants_the_optimizers(tmp_path):
    """Negative control: only a model for prediction is restored without optimizers."""
    save(trained(), tmp_path)
    with pytest.raises(ValueError, match="other row optimizer slots"):
        restore(tmp_path, dataclasses.replace(TASK, row_optimizer=sgd(0.1)).init(PARAMS, "host"))
    with pytest.raises(ValueError, match="other dense state.*or another directory.$"):
        restore(tmp_path, dataclasses.replace(TASK, optimizer=optax.sgd(0.1)).init(PARAMS, "host"))


# ---- the embeddings


def random_spec(seed):
    draw = np.random.default_rng(seed)
    rows, widths = draw.integers(1, 30, 5), draw.choice([2, 3], 5)
    tables = {f"t{i}": Table(int(r), int(w)) for i, (r, w) in enumerate(zip(rows, widths, strict=True))}
    return EmbeddingSpec(tables, {name: Lookup(name) for name in tables}, int(draw.integers(1, 9)), seed)


@HOMES
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.more) for seed in (1, 2, 3))])
def test_a_matrix_has_the_rows_that_lookups_read(home, seed):
    spec = random_spec(seed)
    tables = create_tables(home, spec, ROWS)
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


# ---- tables out of an image, without a state


def slots(tables, table):
    """The accumulators of one table, read as the embeddings of tables that hold them in their place."""
    shards = {name: [{"value": parts["accumulator"]} for parts in mine] for name, mine in tables.shards.items()}
    return embedding_matrix(HostTables(tables.spec, tables.spec.layout(sgd(0.1)), shards), table)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.more) for seed in (1, 2))])
def test_an_image_gives_the_rows_and_slots_of_each_table(tmp_path, seed):
    spec = random_spec(seed)
    tables = HostTables.create(spec, ROWS)
    for stack in tables.shards.values():
        for shard, parts in enumerate(stack):
            parts["accumulator"][:] = np.random.default_rng([seed, shard]).random(parts["accumulator"].shape)
    write_image(tmp_path / "step_00000001", snapshot(dataclasses.replace(TASK, spec=spec).init(PARAMS, tables)))
    read = read_tables(tmp_path, list(spec.tables), ("value", "accumulator"))
    for name in spec.tables:
        equal(read[name]["value"], embedding_matrix(tables, name))
        equal(read[name]["accumulator"], slots(tables, name))


def test_a_chain_gives_the_newest_of_each_row(tmp_path):
    wanted = recovered_run(tmp_path, "host").tables
    for name in TABLES:
        equal(read_tables(tmp_path, [name])[name]["value"], embedding_matrix(wanted, name))
    with pytest.raises(ValueError, match="what their slots .* begin with stands in no image"):
        read_tables(tmp_path, ["item"], ["accumulator"])
    base, over = trained(), fresh()
    write_image(tmp_path / "a" / "step_00000012", snapshot(base))
    below = {"step_00000012": read_digest(tmp_path / "a" / "step_00000012")}
    rows = {("width_8", 1): np.array([1, 5, 41, 45], np.int32)}
    write_image(tmp_path / "a" / "delta_000001", snapshot_rows(over.tables, rows, 13, below))
    read, ids = read_tables(tmp_path / "a", ["item"], ["value", "accumulator"])["item"], np.arange(9)
    newer = np.isin(ids + 40, [41, 45])
    equal(read["value"][newer], embedding_matrix(over.tables, "item", ids[newer]))
    equal(read["value"][~newer], embedding_matrix(base.tables, "item", ids[~newer]))
    equal(read["accumulator"][newer], np.zeros((2, 8), np.float32))


def read_digest(path):
    return jaxrec.checkpoint.read_manifest(path).digest


def test_reading_changes_nothing_and_waits_for_nobody(tmp_path):
    """A writer holds the locks of the directory; readers take none."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(trained())
        checkpointer.wait()
        before = sorted(path.name for path in tmp_path.rglob("*"))
        restore_for_prediction(tmp_path, SPEC, PARAMS)
        read_tables(tmp_path, ["item"])
        assert sorted(path.name for path in tmp_path.rglob("*")) == before


# ---- raw rows, mapped as a preparation did


def joined(blocks):
    blocks = list(blocks)
    return {key: np.concatenate([block[key] for block in blocks]) for key in blocks[0]}


@pytest.mark.parametrize("options", [{"min_count": 3}, {"hash_cap": 7}])
@pytest.mark.parametrize("name", ["rows.txt", "rows.gz"])
def test_raw_rows_are_mapped_as_a_preparation_mapped_them(tmp_path, options, name):
    lines = criteo_lines(120)
    prepare([write_lines(tmp_path / "train.txt", lines)], tmp_path / "prepared", **options)
    splits = [open_split(tmp_path / "prepared", split) for split in ("train", "test")]
    wanted = joined(split[i] for split in splits for i in range(len(split)))
    encoder = open_encoder(tmp_path / "prepared")
    for labelled in (True, False):
        path = write_lines(tmp_path / "rows.txt", lines if labelled else without_labels(lines))
        if name == "rows.gz":
            path = Path(shutil.copy(path, tmp_path / name))
            path.write_bytes(gzip.compress(path.read_bytes()))
        assert has_labels([path]) is labelled
        found = joined(read_rows([path], encoder, labelled))
        assert ("label" in found) is labelled
        for key in found:
            equal(found[key], wanted[key])


def test_a_digest_tells_encoders_apart(tmp_path):
    def digest(name, lines, **options):
        prepare([write_lines(tmp_path / f"{name}.txt", lines)], tmp_path / name, **options)
        return open_encoder(tmp_path / name).digest

    lines = criteo_lines(120)
    swapped = [line.replace("00001eef", "x").replace("00003dde", "00001eef").replace("x", "00003dde") for line in lines]
    first = digest("a", lines, min_count=3)
    assert first == digest("b", [*lines[:100], *criteo_lines(20, 1)], min_count=3)  # the test rows differ
    others = [digest("c", swapped, min_count=3), digest("d", lines, hash_cap=9), digest("e", lines, hash_cap=8)]
    assert len({first, *others}) == 4
    assert open_encoder(tmp_path / "a").cardinalities == open_encoder(tmp_path / "c").cardinalities  # equal sizes


# ---- experiments/evaluate.py


def evaluated(run, workdir, *path, **flags):
    """Run an evaluation; return its results.json and predictions."""
    evaluate.main(evaluate.Config(run_directory=run, workdir=workdir, path=path, **flags))
    with np.load(workdir / "predictions.npz") as predictions:
        return json.loads((workdir / "results.json").read_text()), dict(predictions)


def quality(state, job, batches):
    return jaxrec.evaluate(state, jaxrec.planned(job.spec, batches), job.eval_step())


def assert_as_trained(results, wanted):
    names = {"mean_label": "label_mean", "rows": "examples"}
    names |= {key: key for key in ("auc", "log_loss", "normalized_entropy", "calibration")}
    assert {key: results[key] for key in names} == {key: wanted[name] for key, name in names.items()}


def test_a_synthetic_run_is_evaluated_as_it_evaluated_itself(tmp_path, capsys):
    run, job, state, data = synthetic_run(tmp_path)
    results, predictions = evaluated(run, tmp_path / "e")
    assert_as_trained(results, quality(state, job, data.test()))
    assert predictions["logit"].shape == predictions["label"].shape == (4096,)
    assert "normalized entropy" in capsys.readouterr().out
    assert (tmp_path / "e" / "calibration.png").stat().st_size > 10_000


def test_an_evaluation_looks_within_groups_and_at_segments(tmp_path, capsys):
    run, _, _, data = synthetic_run(tmp_path)
    results, predictions = evaluated(run, tmp_path / "e", group="C1", segments=("C2", "C26"), bootstrap=40)
    ids = np.concatenate([batch.ids["sparse"] for batch in data.test()])
    wanted = group_auc(predictions["logit"], predictions["label"], ids[:, 0])
    assert {key: results[key] for key in wanted} == wanted and wanted["groups_counted"] > 1
    assert results["auc_low"] < results["auc"] < results["auc_high"]
    sizes = [value for key, value in results.items() if re.fullmatch("segment_C2_.*_examples", key)]
    assert sum(sizes) == 4096 and len(sizes) == min(21, len(set(ids[:, 1])))
    assert "C26" in capsys.readouterr().out


def test_the_best_state_of_a_run_is_evaluated_and_exported_unless_the_last_is_asked_for(tmp_path, capsys):
    run, job, last, data = synthetic_run(tmp_path)
    best = job.state("host", seed=1)
    with pytest.raises(ValueError, match="has kept no best state: .*--patience or --monitor.* Leave out --state"):
        evaluated(run, tmp_path / "none", state="best")
    saver = saving.Best(types.SimpleNamespace(directory=run, id="a" * 16), "validation_auc", lambda step: {})
    saver.offer(best._replace(dense=best.dense._replace(step=jnp.asarray(1))), {"step": 1, "validation_auc": 0.5})
    for flags, state, words in (({}, best, "the best state, "), ({"state": "last"}, last, "")):
        image = "best/step_00000001, step 1" if words else f"checkpoints/step_0000000{STEPS}, step {STEPS}"
        results, _ = evaluated(run, tmp_path / f"e{image[0]}", **flags)
        assert_as_trained(results, quality(state, job, data.test()))
        assert f"{words}{run}/{image}, on its own" in capsys.readouterr().out
        found = exported(tmp_path / f"{image[0]}.npz", run, table="C3", **flags)
        equal(found["value"], embedding_matrix(state.tables, "C3"))
        assert f", of {words}{run}/{image}, to " in capsys.readouterr().out
    equal(exported(tmp_path / "i.npz", run / "best", table="C3")["value"], embedding_matrix(best.tables, "C3"))


def test_auc_within_groups_is_in_training_what_it_is_afterwards(tmp_path):
    run, job, state, data = synthetic_run(tmp_path)
    recorder = types.SimpleNamespace(data=data, spec=job.spec, asked=Asked(), eval_step=job.eval_step(), group="C1")
    results, _ = evaluated(run, tmp_path / "e", group="C1")
    wanted = quality(state, job, data.test()) | {"gauc": results["gauc"]}
    assert Recorder.evaluated(recorder, state, "test") == {f"test_{key}": value for key, value in wanted.items()}


@pytest.mark.parametrize("options", [{"min_count": 3}, {"hash_cap": 7}])
def test_rows_predict_alike_prepared_or_raw_with_labels_or_without(tmp_path, options):
    run, lines, job, state = criteo_run(tmp_path, **options)
    results, own = evaluated(run, tmp_path / "own")
    assert_as_trained(results, quality(state, job, evaluate.Loader(open_split(tmp_path / "prepared", "test"), 2048)))
    raw = write_lines(tmp_path / "test.txt", lines[200:])
    bare = write_lines(tmp_path / "bare.txt", without_labels(lines[200:]))
    of_raw, from_raw = evaluated(run, tmp_path / "raw", raw)
    of_bare, from_bare = evaluated(run, tmp_path / "bare", bare)
    equal(from_raw["label"], own["label"])
    for found in (from_raw, from_bare):
        equal(found["logit"], own["logit"])
    counted = json.loads((tmp_path / "prepared" / "metadata.json").read_text()).get("unknown_share", {})
    assert shares_of_unknown_ids(results) == {field: shares["test"] for field, shares in counted.items()}
    assert len(counted) == (26 if "min_count" in options else 0)
    assert of_raw == results and "auc" not in of_bare and "label" not in from_bare
    assert of_bare["mean_prediction"] == results["mean_prediction"]
    twice, from_two = evaluated(run, tmp_path / "two", bare, bare)
    equal(from_two["logit"], np.concatenate([own["logit"]] * 2))
    assert twice["rows"] == 80 and of_bare["tenth_10_rows"] == 4


# ---- a table with a schema


def shares_of_unknown_ids(results):
    prefix = "unknown_share_"
    return {key.removeprefix(prefix): share for key, share in results.items() if key.startswith(prefix)}


def test_unknown_ids_are_counted_in_all_rows_that_are_evaluated(tmp_path, capsys):
    """Those of the prepared test rows as the preparation counted them; those of other ids with a warning."""
    run, _, features = tabular_run(tmp_path, trained=False)
    of_test = {name: one["unknown_share"]["test"] for name, one in features.items() if "unknown_share" in one}
    own, predictions = evaluated(run, tmp_path / "own")
    assert shares_of_unknown_ids(own) == of_test
    assert of_test.keys() == {"user", "item", "seen"} and 0 < of_test["item"] < 0.5
    said = capsys.readouterr().out
    assert f"{100 * of_test['item']:.3f}" in said and "unknown ids, %" in said and "warning" not in said
    frame, schema = pl.read_csv(tmp_path / "a.csv")[240:], str(tmp_path / "schema.py")
    frame.with_columns(pl.col("item").cast(pl.Float64)).write_parquet(tmp_path / "floats.parquet")
    same, from_floats = evaluated(run, tmp_path / "floats", tmp_path / "floats.parquet", schema=schema)
    assert same == own and "warning" not in capsys.readouterr().out
    equal(from_floats["logit"], predictions["logit"])
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "_SUCCESS").touch()
    for number in (1, 0):
        others = frame[30 * number : 30 * (number + 1)].drop("click").with_columns(pl.col("item") + 1000)
        others.write_csv(tmp_path / "parts" / f"part-{number}.csv")
    others, predictions = evaluated(run, tmp_path / "others", tmp_path / "parts")  # by the schema of the preparation
    assert shares_of_unknown_ids(others) == of_test | {"item": 1.0} and len(predictions["logit"]) == 60
    assert f"many ids are unknown: item (100.0 % in {tmp_path / 'parts'})." in capsys.readouterr().out


@pytest.mark.parametrize("history", [None, "seen"])
def test_ids_count_for_their_field_whether_pooled_or_not_and_with_weight_only(history):
    table = {
        "tables": {"user": 9, "item": 9},
        "sparse": ["user", "item"],
        "bags": {"seen": {"table": "item", "hots": 3}},
    }
    ids = {"sparse": np.array([[1, 0], [2, 1], [1, 1]]), "seen": np.array([[1, 2, 1], [5, -1, -1], [1, 1, 1]])}
    batch = jaxrec.Batch(ids, np.zeros(3), np.zeros((3, 1)), np.array([1.0, 0.5, 0.0]))
    found = evaluate.counted(spec_of(table, 4, 1, 0, history), batch)
    assert {name: its.tolist() for name, its in found.items()} == {"user": [2, 1], "item": [1, 1], "seen": [4, 2]}


def test_ids_of_columns_that_share_a_table_count_for_each_of_them():
    table = {"tables": {"genre": 9}, "sparse": ["genre", "second"], "shared": {"second": "genre"}, "bags": {}}
    table["dense"] = []
    ids = {"sparse": np.array([[1, 0], [2, 1], [1, 1]])}
    batch, spec = jaxrec.Batch(ids, np.zeros(3), np.zeros((3, 1)), np.ones(3)), spec_of(table, 4, 1, 0)
    assert spec.lookups["sparse"].columns == ("genre", "genre")
    found = evaluate.counted(spec, batch, table)
    assert {name: its.tolist() for name, its in found.items()} == {"genre": [3, 2], "second": [2, 2]}
    assert fields_of(spec, batch, ["genre", "second"], table)["second"].tolist() == [0, 1, 1]
    assert with_vocabulary(table | {"features": {"genre": {"distinct": 7}}}) == {"genre", "second"}


def test_segments_have_names_and_groups_may_be_numbers(tmp_path, capsys):
    run, *_ = tabular_run(tmp_path, trained=False)
    rows = pl.read_csv(tmp_path / "a.csv")[240:].with_columns(pl.col("item").cast(pl.String))
    results, predictions = evaluated(run, tmp_path / "e", group="price", segments=("item", "age"))
    wanted = group_auc(predictions["logit"], predictions["label"], rows["price"].fill_null(-1).to_numpy())
    assert {key: results[key] for key in wanted} == wanted and wanted["groups_counted"] > 3
    said, sizes = capsys.readouterr().out, dict(rows["item"].value_counts().iter_rows())
    named = {key.split("_")[2]: name for key, name in results.items() if re.fullmatch("segment_item_[0-9]+_name", key)}
    assert len(named) > 5 and named["1"] == "<unknown>"
    for row, name in named.items():
        assert re.search(rf"(?m)^{row} '{name}' ", said)
        assert row == "1" or results[f"segment_item_{row}_examples"] == sizes[name]
    assert {results[f"segment_age_{row}_name"] for row in range(4)} == {"<missing>", "below 18", "18 to 30", "from 30"}
    # Columns that the rows do not keep, or of which they keep several values.
    numbers, categories = (
        "item, age, price; another column must be a",
        "item, age; another .* a Dense with buckets or a key of",
    )
    for name, flags, rule in (
        ("hour", {"group": "hour"}, numbers), ("seen", {"group": "seen"}, numbers),
        ("price", {"segments": ("price",)}, categories),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} is no field .* with one .*: give one of user, {rule}"):
            evaluated(run, tmp_path / "refused", **flags)
    history = spec_of(table_of(tmp_path / "prepared"), 4, 1, 0, "seen")  # DIN looks its steps up one by one
    assert "seen" not in subsets.single_fields(history, table_of(tmp_path / "prepared"))
    (tmp_path / "prepared").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="the prepared table of .* is not at .*--prepared DIR"):
        evaluated(run, tmp_path / "gone")
    assert vocabularies_of(open_run(run), tmp_path / "moved").keys() == {"user", "item", "age", "tag"}
    (tmp_path / "moved" / "vocabulary.npz").unlink()  # the prepared rows and their ids do without
    assert not vocabularies_of(open_run(run), tmp_path / "moved")
    assert "rows have no names: " in capsys.readouterr().err


def clicks(logit, label, weight):
    """Predictions of one label."""
    total = evaluate.metrics.evaluate_batch(logit, label, weight)
    rows = np.arange(len(logit))
    return evaluate.Predictions(CLICK, logit[:, None], label[:, None], weight, [total], {}, {}, {}, rows)


def test_tenths_hold_all_rows_and_what_was_clicked():
    draw = np.random.default_rng(0)
    logit, label = draw.normal(size=1003).astype(np.float32), (draw.random(1003) < 0.3).astype(np.uint8)
    found = evaluate.figures(clicks(logit, label, np.ones(1003, np.float32)))
    of = lambda key: np.array([found[f"tenth_{i}_{key}"] for i in range(1, 11)])
    assert of("rows").sum() == 1003 and (np.diff(of("predicted")) > 0).all()
    assert (of("rows") * of("clicked")).sum() == pytest.approx(label.sum())
    assert (of("rows") * of("predicted")).sum() == pytest.approx((1 / (1 + np.exp(-logit.astype(float)))).sum())
    np.testing.assert_allclose(of("calibration"), of("predicted") / of("clicked"))
    assert ((of("clicked_low") < of("clicked")) & (of("clicked") < of("clicked_high"))).all()


@pytest.mark.parametrize("weight", [[1, 2, 3], [1, 1, 1]])
def test_a_weight_is_as_many_equal_rows(weight):
    draw = np.random.default_rng(0)
    logit, label, user = draw.normal(size=600), (draw.random(600) < 0.3).astype(np.uint8), draw.integers(0, 5, 600)
    weight = np.tile(np.float32(weight), 200)

    def figures(logit, label, weight, user):
        found = evaluate.figures(clicks(logit, label, weight))
        parts = subsets.figures(logit, label, weight, {"user": user}, "user", ["user"], 0)
        return found | {key: value for key, value in parts.items() if not key.endswith(("examples", "counted"))}

    found = figures(logit, label, weight, user)
    times = weight.astype(int)
    wanted = figures(*(np.repeat(of, times) for of in (logit, label, np.ones(600, np.float32), user)))
    for key, value in wanted.items():
        if "tenth" not in key and key != "rows":
            assert found[key] == pytest.approx(value), key
    for number, rows in enumerate(np.array_split(np.argsort(logit), 10), 1):
        of_tenth = {key: found[f"tenth_{number}_{key}"] for key in ("clicked", "predicted", "clicked_low")}
        share, of = np.average(label[rows], weights=weight[rows]), 1 / (1 + np.exp(-logit[rows]))
        assert of_tenth["clicked"] == pytest.approx(share) and of_tenth["clicked_low"] < share
        assert of_tenth["predicted"] == pytest.approx(np.average(of, weights=weight[rows]))
    if (weight == 1).all():
        assert found == wanted
    else:  # negative control
        assert found["mean_prediction"] != figures(logit, label, np.ones(600, np.float32), user)["mean_prediction"]
        low, high = (subsets.figures(logit, label, weight, {}, None, [], 200)[key] for key in ("auc_low", "auc_high"))
        assert low < found["auc"] < high


def test_one_row_without_a_click_has_figures_that_json_can_hold(tmp_path):
    run, lines, *_ = criteo_run(tmp_path)
    line = next(line for line in lines if line[0] == "0")
    results, _ = evaluated(run, tmp_path / "e", write_lines(tmp_path / "one.txt", [line]))
    assert results["rows"] == 1 and results["auc"] is results["calibration"] is None


# ---- experiments/export.py


def exported(to, run, **flags):
    export.main(export.Config(run_directory=run, to=to, **flags))
    with np.load(to, allow_pickle=False) as arrays:
        return dict(arrays)


def assert_equal_states(found, wanted):
    for a, b in zip(jax.tree.leaves(found.dense), jax.tree.leaves(wanted.dense), strict=True):
        equal(np.asarray(a), np.asarray(b))
    for name, mine in wanted.tables.shards.items():
        used = wanted.tables.spec.stacks[name].offsets[-1]
        for shard, parts in enumerate(mine):
            rows = len(range(shard, used, wanted.tables.spec.shards))  # the rest is padding of the stack
            for part, array in parts.items():
                equal(found.tables.shards[name][shard][part][:rows], array[:rows])


def test_rows_of_a_table_are_exported_by_id(tmp_path):
    run, _, state, _ = synthetic_run(tmp_path)
    matrix = embedding_matrix(state.tables, "C3")
    found = exported(tmp_path / "rows.npz", run, table="C3", ids=(7, 5, 7))
    equal(found["value"], matrix[[7, 5, 7]])
    assert found["ids"].tolist() == [7, 5, 7] and found.keys() == {"ids", "value"}
    equal(exported(tmp_path / "c3.npz", run, table="C3")["value"], matrix)
    with_slots = exported(tmp_path / "slots.npz", run / "checkpoints", table="C3", optimizer=True)
    equal(with_slots["accumulator"], slots(state.tables, "C3"))


def test_exported_rows_have_names_where_these_are_known(tmp_path, capsys):
    run, *_ = tabular_run(tmp_path, trained=False)
    most, _ = pl.read_csv(tmp_path / "a.csv")["item"].value_counts(sort=True).row(0)
    found = exported(tmp_path / "a.npz", run, table="item", ids=(2, 0, 1))
    assert found["names"].tolist() == [str(most), "<missing>", "<unknown>"] and found["ids"].tolist() == [2, 0, 1]
    assert f"         2  '{most}'\n         0  '<missing>'\n" in capsys.readouterr().out
    assert "names" not in exported(tmp_path / "b.npz", run / "checkpoints", table="item", ids=(2,))
    assert "names" not in exported(tmp_path / "c.npz", run, table="tag", ids=(2,))  # it hashes
    (tmp_path / "prepared").rename(tmp_path / "moved")
    assert "names" not in exported(tmp_path / "d.npz", run, table="item", ids=(2,))
    assert "rows have no names: the prepared table of " in capsys.readouterr().err
    moved = exported(tmp_path / "e.npz", run, table="item", ids=(2,), prepared=tmp_path / "moved")
    assert moved["names"].tolist() == [str(most)]


@pytest.mark.parametrize("at_once", [1, pytest.param(1 << 26, marks=pytest.mark.more)])
def test_all_goes_out_and_back_bit_for_bit_and_trains_on(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(export, "AT_ONCE_BYTES", at_once)  # one table at a time, or all together
    run, job, state, _ = synthetic_run(tmp_path)
    found = exported(tmp_path / "all.npz", run, all=True, optimizer=True)
    equal(found["table.C3.value"], embedding_matrix(state.tables, "C3"))
    assert found["dense.step"] == 3
    export.main(export.Config(back=tmp_path / "all.npz", into=tmp_path / "other"))
    after = []
    for directory in (run / "checkpoints", tmp_path / "other"):
        again, image = restore(directory, job.state("host", seed=1))
        assert_equal_states(again, state)
        assert image.run == "a" * 16 and image.step == 3
        more = jaxrec.SyntheticClicks((9,) * 26).stream(64, 3, 5)
        after.append(jaxrec.Serial(job.task, again).train(more))
    assert_equal_states(after[1], after[0])


def test_without_optimizers_what_comes_back_predicts_and_no_more(tmp_path):
    run, job, state, data = synthetic_run(tmp_path)
    whole = exported(tmp_path / "all.npz", run, all=True, optimizer=True)
    model = exported(tmp_path / "model.npz", run, all=True)
    assert not [key for key in model if "opt_state" in key or "accumulator" in key] and len(model) < len(whole)
    export.main(export.Config(back=tmp_path / "model.npz", into=tmp_path / "other"))
    back, _ = restore_for_prediction(tmp_path / "other", job.spec, job.init(5))
    assert quality(back, job, data.test()) == quality(state, job, data.test())
    with pytest.raises(ValueError, match="other row optimizer slots"):
        restore(tmp_path / "other", job.state("host", seed=0))


def test_odd_leaves_and_a_chain_of_deltas_go_out_and_back(tmp_path):
    """Half-precision weights, keys and empty leaves; several widths; and deltas without a base."""
    params = {"half": jnp.arange(3, dtype=jnp.bfloat16)[None], "none": jnp.zeros((1, 0)), "long": jnp.arange(2)[None]}

    def state_of(step):
        dense = DenseState(jnp.asarray(step), jax.tree.map(lambda leaf: leaf + step, params), jax.random.key(step))
        return TrainState(dense, HostTables.create(random_spec(1), ROWS))

    directory = tmp_path / "images"
    write_image(directory / "step_00000004", snapshot(state_of(4)))
    exported(tmp_path / "all.npz", directory, all=True, optimizer=True)
    export.main(export.Config(back=tmp_path / "all.npz", into=tmp_path / "other"))
    found, wanted = restore(tmp_path / "other", state_of(0))[0], state_of(4)
    assert found.dense.opt_state == wanted.dense.opt_state
    assert_equal_states(*(state._replace(dense=state.dense._replace(opt_state=())) for state in (found, wanted)))
    recovered = recovered_run(tmp_path / "chain", "host")
    found = exported(tmp_path / "chain.npz", tmp_path / "chain", all=True)
    equal(found["table.user.value"], embedding_matrix(recovered.tables, "user"))


@pytest.mark.parametrize("optimizer", [False, True])
def test_tables_are_read_together_up_to_the_size_of_the_largest(tmp_path, optimizer, monkeypatch):
    monkeypatch.setattr(export, "AT_ONCE_BYTES", 1)
    tables = {"a": Table(10, 2), "b": Table(100, 2), "c": Table(40, 2), "d": Table(60, 2), "e": Table(1, 2)}
    tables |= {"wide": Table(50, 3)}
    spec = EmbeddingSpec(tables, {name: Lookup(name) for name in tables})
    state = dataclasses.replace(TASK, spec=spec).init(PARAMS, "host")
    image = write_image(tmp_path / "step_00000000", snapshot(state))
    assert list(export.together(image, optimizer)) == [["a"], ["b"], ["c", "d"], ["e"], ["wide"]]
    assert export.bytes_of(image, ["wide"], optimizer) == 50 * 3 * 4 * (1 + optimizer)


# ---- as users start them


def start(name, *flags, cwd):
    """Start an experiment as a user does, on the devices of the machine."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(EXPERIMENTS.parent), environment.get("PYTHONPATH", "")])
    may_warn = [part for verb in ("reading", "writing") for part in ("-W", f"ignore:Error {verb} persistent")]
    command = [sys.executable, "-W", "error::UserWarning", *may_warn, EXPERIMENTS / f"{name}.py", *map(str, flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=cwd, env=environment, text=True, **pipes)


def done(process):
    said, failed = process.communicate(timeout=300)
    return process.returncode, said, failed


@pytest.mark.slow
def test_a_run_of_the_main_job_is_evaluated_and_exported(tmp_path):
    flags = ("--preset", "smoke", "--steps", 20, "--batch-size", 256, "--rows", 3000, "--workdir", "run")
    assert done(start("train", *flags, cwd=tmp_path))[0] == 0
    code, said, failed = done(start("evaluate", "--run", "run", "--workdir", "e", cwd=tmp_path))
    assert code == 0 and "tenth, by prediction" in said, failed
    trained, found = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("run", "e"))
    for key in ("auc", "log_loss", "normalized_entropy", "calibration"):
        assert found[key] == trained[f"test_{key}"]
    code, _, failed = done(start("evaluate", "--run", "nowhere", cwd=tmp_path))
    assert code == 1 and failed.startswith("error: ") and failed.count("\n") == 1
    code, _, failed = done(
        start("export", "--run", "run", "--table", "C3", "--ids", 1, 2, "--to", "a.npz", cwd=tmp_path)
    )
    assert code == 0 and np.load(tmp_path / "a.npz")["value"].shape == (2, 16), failed


@pytest.mark.slow
def test_bringing_back_stands_kill_9_and_sigterm(tmp_path):
    save(trained(), tmp_path / "images", "step_00000012")
    exported(tmp_path / "a.npz", tmp_path / "images", all=True, optimizer=True)
    for number, kill in enumerate((signal.SIGKILL, signal.SIGTERM)):
        into = tmp_path / f"into{number}"
        process = start("export", "--back", "a.npz", "--into", into, cwd=tmp_path)
        while process.poll() is None and not list(into.glob("*.partial")):
            os.sched_yield()
        process.send_signal(kill)
        done(process)
        assert process.returncode in (-kill, 128 + kill, 0)
        if process.returncode:
            assert not images(into)
            assert done(start("export", "--back", "a.npz", "--into", into, cwd=tmp_path))[0] == 0
        assert not list(into.glob("*.partial"))
        assert_equal_states(restore(into, fresh())[0], restore(tmp_path / "images", fresh())[0])
