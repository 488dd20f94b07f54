"""Labels of a run: several of them, numbers of a regression, and the keys that say which row a prediction is of."""

import csv
import itertools
import json
import runpy
import shutil

import evaluate
import export
import jax
import jax.numpy as jnp
import numpy as np
import optax
import polars as pl
import pytest
import train
from equality import same
from hypothesis import given
from hypothesis import strategies as st
from main.config import config_of
from main.model import as_functions, make_model
from main.table_data import table_job, table_of
from main.targets import Target, losses, of_each, targets_of

from jaxrec import Batch, adagrad, metrics
from jaxrec.data.blocks import keys_of
from jaxrec.data.loader import Loader
from jaxrec.data.tabular import AtRandom, ByTime, Categorical, Dense, Label, Schema, open_table, prepare
from jaxrec.ranking import group_auc

ROWS, USERS = 600, 12
FEATURES = [Categorical("user"), Categorical("item"), Dense("age", standardise=True)]
SCHEMA = Schema(
    label=["click", "like", Label("price", regression=True)],
    features=FEATURES,
    keys=["visit", "request"],
    weight="weight",
    split=AtRandom(seed=0),
)


def rows(seed=0, number=ROWS):
    """Rows of a user who likes some items; visits are of no feature."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, USERS, number), rng.integers(0, 8, number)
    score = 3.0 * ((user + item) % 3 == 0) - 1.5
    chance = lambda x: rng.random(number) < 1 / (1 + np.exp(-x))
    return pl.DataFrame(
        {
            "click": chance(score).astype(int), "like": chance(-score).astype(int),
            "price": 1000.0 + 50 * score + rng.standard_normal(number),
            "user": [f"u{one}" for one in user], "item": item, "age": rng.integers(18, 70, number),
            "visit": [f"é{one % 40}" for one in rng.permutation(number)], "request": np.arange(number) + 10**12,
            "weight": (rng.random(number) < 0.9).astype(float),
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("labels")
    rows().write_parquet(directory / "rows.parquet")
    prepare([directory / "rows.parquet"], directory / "prepared", SCHEMA, block_rows=64)
    return directory / "prepared"


def hashed(directory, frame, labels=SCHEMA.label, seed=0):
    """Prepare rows whose ids are hashed: another table has the same digest."""
    features = [Categorical("user", hash_cap=50), Categorical("item", hash_cap=20)]
    frame.write_parquet(directory.with_suffix(".parquet"))
    prepare([directory.with_suffix(".parquet")], directory, Schema(labels, features, split=AtRandom(seed=seed)))
    return directory


def trained(directory, prepared, *labels, **flags):
    """Train a few steps; return the results."""
    flags = {"embedding_width": 4, "batch_size": 64, "epochs": 2, "layers": (16,), "evaluations": 1} | flags
    flags = {"learning_rate": 0.01, "row_optimizer": "adagrad", "row_learning_rate": 0.1} | flags
    return train.main(
        config_of(data="tabular", path=(prepared,), labels=labels, workdir=directory, save_every_steps=0, **flags)
    )


@given(st.integers(0, 9), st.integers(1, 5))
def test_errors_merge_in_any_parts(seed, parts):
    rng = np.random.default_rng(seed)
    prediction, label = 100 + rng.standard_normal((2, 40)).astype(np.float32)
    weight = rng.integers(0, 3, 40).astype(np.float32)
    label[weight == 0] = np.nan  # does not count
    cut = [np.array_split(each, parts) for each in (prediction, label, weight)]
    total = metrics.evaluate_errors(prediction[:1], label[:1] * 0, np.zeros(1))
    for part in zip(*cut, strict=True):
        total = metrics.merge(total, metrics.evaluate_errors(*part))
    error, counts = (prediction - label)[weight > 0].astype(np.float64), weight[weight > 0]
    found = metrics.summarize(total)
    assert found["rmse"] == pytest.approx(np.sqrt(np.average(error**2, weights=counts)), rel=1e-4)
    assert found["mae"] == pytest.approx(np.average(abs(error), weights=counts), rel=1e-4)
    assert found["examples"] == len(counts)
    assert found["prediction_mean"] - found["label_mean"] == pytest.approx(np.average(error, weights=counts), abs=1e-3)


@pytest.mark.parametrize(
    "label, weight, message",
    [(np.nan, 1.0, "labels of a regression are finite"), (1.0, -1.0, "weights are finite"), (1.0, 0.0, "no example")],
)
def test_errors_of_no_number_are_refused(label, weight, message):
    with pytest.raises(ValueError, match=message):
        metrics.summarize(metrics.evaluate_errors(np.ones(1), np.array([label]), np.array([weight])))


def test_the_loss_of_several_labels_is_the_weighted_sum_of_theirs():
    rng = np.random.default_rng(0)
    outputs, label = rng.standard_normal((9, 3), np.float32), rng.integers(0, 2, (9, 3)).astype(np.float32)
    label[:, 2] = 1000 + 50 * rng.standard_normal(9)
    targets = [Target("click"), Target("like", 0.5), Target("price", 2.0, (1000.0, 50.0))]
    bce = lambda x, y: np.logaddexp(0, x) - y * x
    wanted = bce(outputs[:, 0], label[:, 0]) + 0.5 * bce(outputs[:, 1], label[:, 1])
    wanted += 2.0 * (outputs[:, 2] - (label[:, 2] - 1000) / 50) ** 2
    np.testing.assert_allclose(losses(targets, jnp.array(outputs), jnp.array(label)), wanted, rtol=1e-5)
    for k, target in enumerate(targets):  # alone
        one = losses([target], jnp.array(outputs[:, k]), jnp.array(label[:, k]))
        column = losses([target], jnp.array(outputs[:, k : k + 1]), jnp.array(label[:, k]))
        np.testing.assert_array_equal(one, column)
    np.testing.assert_array_equal(one, 2.0 * (outputs[:, 2] - (label[:, 2] - 1000) / 50) ** 2)
    found = of_each(targets, of_each(targets, jnp.array(outputs), Target.prediction), Target.served)
    np.testing.assert_allclose(found[:, 0], 1 / (1 + np.exp(-outputs[:, 0])), rtol=1e-6)
    np.testing.assert_allclose(found[:, 2], 1000 + 50 * outputs[:, 2], rtol=1e-6)


def test_keys_come_back_as_they_were_beside_their_rows(prepared):
    source = rows()
    visits = dict(zip(source["request"].cast(pl.String), source["visit"], strict=True))
    seen = []
    for name in ("train", "test"):
        split = open_table(prepared, name)
        request, visit = ([text.decode() for text in keys_of(split, key)] for key in ("request", "visit"))
        assert [visits[one] for one in request] == visit
        price = np.concatenate([batch.label[:, 2] for batch in Loader(split, 50)])[: len(request)]
        wanted = dict(zip(source["request"].cast(pl.String), source["price"].cast(pl.Float32), strict=True))
        assert price.tolist() == [wanted[one] for one in request]
        seen += request
    assert sorted(seen) == sorted(visits)


def test_a_csv_has_the_keys_of_a_parquet(tmp_path, prepared):
    rows().write_csv(tmp_path / "rows.csv")
    prepare([tmp_path / "rows.csv"], tmp_path / "other", SCHEMA, block_rows=64)
    for name, key in itertools.product(("train", "test"), SCHEMA.keys):
        one, other = (keys_of(open_table(directory, name), key) for directory in (prepared, tmp_path / "other"))
        np.testing.assert_array_equal(one, other)
    assert table_of(prepared)["targets"] == table_of(tmp_path / "other")["targets"]


def test_a_missing_key_is_empty_and_a_long_one_is_refused_by_its_line(tmp_path):
    schema = Schema("click", [Categorical("user")], keys=["visit"], split=AtRandom(seed=0))
    write = lambda last: (tmp_path / "rows.csv").write_text(
        "click,user,visit\n" + "".join(f"{i % 2},u{i % 3},{'' if i % 2 else i}\n" for i in range(40)) + last
    )
    write(f"1,u1,{'x' * 65}\n")
    with pytest.raises(ValueError, match=r"rows.csv, line 42: 'visit' is .*, but it is a key, a text of at most 64"):
        prepare([tmp_path / "rows.csv"], tmp_path / "long", schema)
    write(f"1,u1,{'x' * 64}\n")
    prepare([tmp_path / "rows.csv"], tmp_path / "short", schema)
    found = [
        *keys_of(open_table(tmp_path / "short", "train"), "visit"),
        *keys_of(open_table(tmp_path / "short", "test"), "visit"),
    ]
    assert sorted(found) == sorted([b""] * 20 + [str(i).encode() for i in range(0, 40, 2)] + [b"x" * 64])


def test_keys_and_regressions_change_no_mapping_and_no_older_description(prepared, tmp_path):
    rows().write_parquet(tmp_path / "rows.parquet")
    prepare([tmp_path / "rows.parquet"], tmp_path / "plain", Schema("click", FEATURES, split=AtRandom(seed=0)))
    assert table_of(tmp_path / "plain")["digest"] == table_of(prepared)["digest"]
    described = Schema("click", FEATURES).described()
    assert "keys" not in described and described["label"] == [["Label", {"column": "click", "at_least": None}]]


@pytest.fixture(scope="module")
def multi(prepared, tmp_path_factory):
    directory = tmp_path_factory.mktemp("multi")
    results = trained(
        directory / "run", prepared, "like", "click", "price", model="mmoe", experts=2, group="visit", epochs=8
    )
    return directory / "run", results


def test_evaluate_finds_what_training_has_tested(multi, prepared, tmp_path):
    run, results = multi
    config = evaluate.Config(
        run, workdir=tmp_path / "look", group="visit", segments=("visit",), predictions=tmp_path / "p.parquet"
    )
    found = evaluate.main(config)
    for mine, its in {
        "auc": "auc", "gauc": "gauc", "click_auc": "click_auc", "click_log_loss": "click_log_loss",
        "price_rmse": "price_rmse", "price_mean_prediction": "price_prediction_mean",
    }.items():  # fmt: skip
        assert found[mine] == pytest.approx(results[f"test_{its}"], rel=1e-5), mine
    frame, saved = pl.read_parquet(tmp_path / "p.parquet"), np.load(tmp_path / "look" / "predictions.npz")
    assert frame.columns[:3] == ["row", "visit", "request"]
    source = rows().with_columns(pl.col("request").cast(pl.String))
    assert 0 < len(frame) == found["rows"] < sum(open_table(prepared, "test").rows)  # without the rows of weight 0
    joined = frame.join(source, on="request", how="left", suffix="_source", maintain_order="left")
    for k, name in enumerate(("like", "click", "price")):
        np.testing.assert_array_equal(joined[name], joined[f"{name}_source"].cast(pl.Float32))
        np.testing.assert_array_equal(frame[f"{name}_prediction"], saved["prediction"][:, k])
    assert joined["visit"].to_list() == joined["visit_source"].to_list()
    by_hand = group_auc(frame["like_prediction"].to_numpy(), frame["like"].to_numpy(), frame["visit"].to_numpy())
    assert found["gauc"] == pytest.approx(by_hand["gauc"], abs=1e-6) and found["groups"] == by_hand["groups"]
    assert by_hand["gauc"] != pytest.approx(results["test_auc"], abs=1e-4)  # negative control
    largest = frame["visit"].value_counts(sort=True)["visit"][0]
    names = [found[key] for key in found if key.startswith("segment_visit_") and key.endswith("_name")]
    assert largest in names


def test_groups_of_a_key_are_those_of_the_rows_that_are_evaluated(prepared, tmp_path):
    flags = {"group": "visit", "monitor": "gauc", "validation_fraction": 0.3, "epochs": 1}
    results = trained(tmp_path / "run", prepared, "click", model="dnn", **flags)
    found = evaluate.main(evaluate.Config(tmp_path / "run", workdir=tmp_path / "look", group="visit"))
    assert found["gauc"] == pytest.approx(results["test_gauc"], abs=1e-6)
    assert 0 < results["validation_gauc"] < 1 and results["validation_examples"] != results["test_examples"]


def test_a_run_keeps_what_its_outputs_stand_for(tmp_path):
    own, other = (
        hashed(tmp_path / "own", rows()),
        hashed(tmp_path / "other", rows().with_columns(price=pl.col("price") * 10), list(reversed(SCHEMA.label))),
    )
    trained(tmp_path / "run", own, "price", "click", model="shared_bottom")
    found = [
        evaluate.main(evaluate.Config(tmp_path / "run", workdir=tmp_path / f"e{k}", prepared=directory))
        for k, directory in enumerate((own, other))
    ]
    assert found[0]["mean_prediction"] == pytest.approx(found[1]["mean_prediction"], rel=1e-3)
    assert found[0]["mean_label"] * 10 == pytest.approx(found[1]["mean_label"], rel=1e-5)  # the rows' own
    assert found[0]["click_mean_label"] == pytest.approx(found[1]["click_mean_label"], rel=1e-6)
    for path in (tmp_path / "run" / "results.json", own, *own.parent.glob("own.*")):
        path.rename(path.with_name(f"old_{path.name}"))
    hashed(tmp_path / "own", rows().with_columns(price=pl.col("price") * 10))
    with pytest.raises(ValueError, match=r"predicts .*'price'.*, and its data now has .*prepare the same sources"):
        trained(tmp_path / "run", own, "price", "click", model="shared_bottom", resume=True)


def test_a_run_tests_no_rows_that_it_has_trained_on_though_its_table_was_prepared_anew(tmp_path):
    run, own = tmp_path / "run", hashed(tmp_path / "own", rows())
    trained(run, own, "click")
    shutil.rmtree(own)
    hashed(own, rows(), seed=1)
    with pytest.raises(ValueError, match="own divides its rows otherwise than when .*run was trained"):
        evaluate.main(evaluate.Config(run, workdir=tmp_path / "look"))
    with pytest.raises(ValueError, match="was trained with another division into training and test rows"):
        trained(run, own, "click", resume=True, epochs=3)
    with pytest.raises(ValueError, match="own divides its rows otherwise than when .*run was trained"):
        evaluate.main(evaluate.Config(run, workdir=tmp_path / "look", path=(own,)))
    found = evaluate.main(evaluate.Config(run, workdir=tmp_path / "again", path=(tmp_path / "own.parquet",)))
    assert found["rows"] > 0  # all rows, as the user says so
    shutil.rmtree(own)  # with another key rows are divided as before
    features = [Categorical("user", hash_cap=50), Categorical("item", hash_cap=20)]
    schema = Schema(SCHEMA.label, features, split=AtRandom(seed=0), keys=["request"])
    prepare([tmp_path / "own.parquet"], own, schema)
    assert evaluate.main(evaluate.Config(run, workdir=tmp_path / "keyed"))["rows"] < found["rows"]


def test_a_table_by_time_has_validation_rows_by_its_schema_alone(tmp_path):
    rows().with_row_index("when").write_parquet(tmp_path / "rows.parquet")
    features = [Categorical("user", hash_cap=50)]
    prepare([tmp_path / "rows.parquet"], tmp_path / "prepared", Schema("click", features, split=ByTime("when")))
    with pytest.raises(ValueError, match=r"last rows of the files, .*: prepare it with ByTime\(..., validation=0.2\)"):
        trained(tmp_path / "run", tmp_path / "prepared", "click", validation_fraction=0.2)


def test_flags_that_an_older_run_lacks_were_at_their_defaults(prepared, tmp_path):
    trained(tmp_path / "run", prepared, "click", model="dnn")
    config, results = tmp_path / "run" / "config.json", tmp_path / "run" / "results.json"
    older = json.loads(config.read_text())
    config.write_text(json.dumps({key: older[key] for key in older if key not in ("labels", "widths", "experts")}))
    results.unlink()
    with pytest.raises(ValueError, match=r"begun with labels \[\], not \['click'\]"):
        trained(tmp_path / "run", prepared, "click", model="dnn", resume=True)
    trained(tmp_path / "run", prepared, model="dnn", resume=True)  # the default, and the first label: nothing is left


def test_a_key_that_is_a_feature_too_groups_alike_everywhere(tmp_path):
    schema = Schema(
        "click", [Categorical("user", min_count=60), Categorical("item")], keys=["user"], split=AtRandom(0.7)
    )
    rows().write_parquet(tmp_path / "rows.parquet")
    prepare([tmp_path / "rows.parquet"], tmp_path / "prepared", schema)
    results = trained(tmp_path / "run", tmp_path / "prepared", model="dnn", group="user")
    found = evaluate.main(evaluate.Config(tmp_path / "run", workdir=tmp_path / "look", group="user"))
    assert found["groups"] == USERS and found["gauc"] == pytest.approx(results["test_gauc"], abs=1e-6)


def test_raw_rows_need_no_keys_and_all_labels_or_none(multi, tmp_path):
    run, _ = multi
    new, schema = tmp_path / "new.csv", tmp_path / "schema.py"
    rows(seed=1, number=50).drop("click", "like", "price", "visit").write_csv(new)
    evaluate.main(evaluate.Config(run, workdir=tmp_path / "a", path=(new,), predictions=tmp_path / "in" / "p.csv"))
    assert pl.read_csv(tmp_path / "in" / "p.csv").columns[:3] == ["row", "request", "like_prediction"]
    rows(seed=1, number=50).write_csv(new)
    schema.write_text(
        "from jaxrec.data.tabular import *\nschema = Schema('like', [Categorical('user'), Categorical('item'), "
        "Dense('age', standardise=True)], keys=['visit', 'request'], split=AtRandom(seed=0))\n"
    )
    with pytest.raises(ValueError, match="'click' is no label of the schema: give all that"):
        evaluate.main(evaluate.Config(run, workdir=tmp_path / "b", path=(new,), schema=str(schema)))


def test_a_server_answers_all_labels(multi, tmp_path):
    run, _ = multi
    rows(seed=2, number=50).with_columns(weight=pl.lit(1.0)).write_csv(tmp_path / "new.csv")
    evaluate.main(
        evaluate.Config(run, workdir=tmp_path / "a", path=(tmp_path / "new.csv",), predictions=tmp_path / "p.csv")
    )
    export.main(export.Config(run_directory=run, serve=tmp_path / "served"))
    runpy.run_path(str(tmp_path / "served" / "serve.py"))["main"](tmp_path / "new.csv", tmp_path / "found.csv")
    found, wanted = pl.read_csv(tmp_path / "found.csv"), pl.read_csv(tmp_path / "p.csv")
    for name in ("like", "click", "price"):
        column = f"{name}_prediction"
        np.testing.assert_allclose(found[column], wanted[column], rtol=1e-5)
    assert found.columns == [name for name in wanted.columns if name.endswith("_prediction")]


def test_raw_rows_are_predicted_with_their_keys(multi, prepared, tmp_path):
    run, _ = multi
    rows(seed=1, number=50).drop("click", "like", "price").write_csv(tmp_path / "new.csv")
    evaluate.main(
        evaluate.Config(run, workdir=tmp_path / "a", path=(tmp_path / "new.csv",), predictions=tmp_path / "p.csv")
    )
    with open(tmp_path / "p.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == ["row", "visit", "request", "like_prediction", "click_prediction", "price_prediction"]
    assert [one["request"] for one in found] == [str(10**12 + i) for i in range(50)]
    saved = np.load(tmp_path / "a" / "predictions.npz")["prediction"]
    np.testing.assert_allclose([float(one["price_prediction"]) for one in found], saved[:, 2], rtol=1e-6)
    assert 800 < saved[:, 2].min() and saved[:, 2].max() < 1200  # in the unit of the label


def test_several_labels_are_learned_together(multi, prepared):
    _, results = multi
    deviation = table_of(prepared)["targets"]["price"][1]
    assert results["labels"] == ["like", "click", "price"]
    assert results["test_auc"] > 0.6 and results["test_click_auc"] > 0.6  # opposite labels of the same rows
    assert results["test_price_rmse"] < 0.8 * deviation
    assert results["test_label_mean"] != results["test_click_label_mean"]


def test_a_regression_keeps_its_best_state_by_its_error(prepared, tmp_path):
    flags = {"validation_fraction": 0.2, "evaluations": 4, "monitor": "mae", "epochs": 4}
    results = trained(tmp_path / "run", prepared, "price", model="dnn", **flags)
    history = [pl.read_ndjson(tmp_path / "run" / "metrics.jsonl")["validation_mae"].to_list()]
    assert results["validation_mae"] == min(*history) and "test_auc" not in results
    assert results["test_rmse"] < table_of(prepared)["targets"]["price"][1]
    found = evaluate.main(evaluate.Config(tmp_path / "run", workdir=tmp_path / "look"))
    assert found["rmse"] == pytest.approx(results["test_rmse"], rel=1e-5)
    assert found["tenth_1_predicted"] < found["tenth_10_predicted"] and "tenth_1_label" in found


def test_oac_trains_several_labels_as_one_batch_after_another_does(prepared, tmp_path):
    flags = {"model": "shared_bottom", "tables": "host"}
    found = [trained(tmp_path / name, prepared, "click", "price", pipeline=name, **flags) for name in ("none", "oac")]
    figures = [{key: value for key, value in one.items() if key.startswith("test_")} for one in found]
    assert figures[0] == figures[1] and len(figures[0]) > 8


def test_the_first_label_of_a_schema_is_trained_as_it_always_was(prepared):
    table, model = table_of(prepared), make_model("dnn", 4, layers=(8,))
    batch = Batch({"sparse": np.array([[2, 3], [4, 5]])}, np.array([1.0, 0.0]), np.ones((2, 1), np.float32))
    jobs = [
        table_job(table, model, optax.sgd(0.1), adagrad(0.1), 4, 2, 0, **of)
        for of in ({}, {"targets": targets_of(table)})
    ]
    states = [job.task.step(job.state("device", 0), batch)[0] for job in jobs]
    assert same(*states) and jobs[0].targets == (Target("click"),)


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"labels": ("clicks",)}, "--labels clicks is no label of the table: give some of click, like, price"),
        ({"labels": ("click", "click")}, "names a label twice"),
        ({"labels": ("click", "like")}, "--model dnn predicts one label, and --labels names 2: give shared_bottom or"),
        ({"labels": ("click", "like"), "label_weights": (0.0, 0.0)}, "--label-weights are all 0"),
        (
            {"labels": ("click", "like"), "label_weights": (-1.0, 1.0)},
            "--label-weights -1.0 must be a number of at least 0",
        ),
        ({"reduce_on_plateau": -0.5, "validation_fraction": 0.1}, "--reduce-on-plateau -0.5 must lie between 0 and 1"),
        ({"experts": 0}, "--experts 0 must be a number of at least 1"),
        ({"labels": ("click",), "label_weights": (1.0, 2.0)}, "has 2 weights for 1 labels"),
        ({"labels": ("price",), "monitor": "auc", "validation_fraction": 0.1}, "--monitor auc is no figure of 'price'"),
        ({"labels": ("price",), "group": "visit"}, "--group visit is for labels of 0 and 1, and 'price'"),
        ({"group": "visits"}, "--group visits is no field .* or a key of the schema first"),
        ({"experts": 4}, "has no experts"),
    ],
)
def test_what_cannot_be_predicted_is_refused(prepared, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        trained(tmp_path / "run", prepared, *flags.pop("labels", ()), model="dnn", **flags)
    assert "visits" in message or not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["row", "click"])
def test_a_key_has_no_name_of_another_column_of_predictions(name):
    with pytest.raises(ValueError, match=f"the key '{name}' has the name of something else"):
        Schema("click", FEATURES, keys=[name])


def test_a_model_has_an_output_for_each_label(prepared):
    table = table_of(prepared)
    with pytest.raises(
        ValueError, match=r"outputs of shape \['B'\] for 2 labels \(click, like\): give --model shared_"
    ):
        table_job(
            table, make_model("dnn", 4), optax.sgd(0.1), adagrad(0.1), 4, targets=targets_of(table, ["click", "like"])
        )


def test_a_label_is_a_click_or_a_number():
    with pytest.raises(ValueError, match="by at_least, or a number by regression"):
        Label("price", at_least=3.0, regression=True)


def test_a_model_of_one_output_in_a_second_axis_is_one_of_one_label():
    model = as_functions(make_model("shared_bottom", 4, layers=(8,)), [jnp.zeros((1, 2)), jnp.zeros((1, 3, 4))])
    assert model.shape == (1,) and jax.eval_shape(
        lambda: of_each([Target("y")], jnp.zeros((5, 1)), Target.served)
    ).shape == (5,)
