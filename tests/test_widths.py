"""A width per field: lookups of several widths, projections to the width of the model, and runs that have them."""

import dataclasses
import itertools

import evaluate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sweep
import train
from equality import assert_equal, same
from hypothesis import given, settings
from hypothesis import strategies as st
from main.cli import Run
from main.click_data import click_job, synthetic_clicks
from main.config import config_of, parse, words_of
from main.model import make_model
from main.table_data import table_job
from main.widths import PROJECTION, widths_of
from strategies import draw_ids, examples

from jaxrec import Serial, adagrad
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, activations, capacity_of, device_plan, host_plan, plan
from jaxrec.embedding.lookup import is_plan_of
from jaxrec.oac import Pipeline
from jaxrec.types import Batch

CARDINALITIES, E = (40, 9, 7), 4
DATA = synthetic_clicks(CARDINALITIES, 64, 40, seed=0, test_batches=1)
WIDTHS = {"C1": 6, "C3": 1}
TABLE = {
    "tables": {"user": 9, "item": 20, "tag": 5},
    "labels": ["click"],
    "sparse": ["user", "item"],
    "bags": {"tags": {"table": "tag", "hots": 2}, "seen": {"table": "item", "hots": 10}},
    "dense": [],
}


def job_of(name="dnn", widths=WIDTHS, **flags):
    model = make_model(name, E, **flags)
    return click_job(CARDINALITIES, model, optax.adam(0.01), adagrad(0.1), E, 2, widths=widths)


def trained(job, steps, engine_of=Serial):
    with engine_of(job.task, job.state("host", 0)) as engine:
        metrics = [each for _, each in engine.run(itertools.islice(DATA.train(0), steps))]
        tables = [shard for shards in engine.state.tables.shards.values() for shard in shards]
        return jax.tree.map(np.array, (engine.state.dense, tables)), metrics


@st.composite
def columns(draw):
    """Tables of some widths, and the hots and pooling of a lookup whose columns read them, some twice."""
    widths = draw(st.lists(st.sampled_from([1, 3, 4]), min_size=2, max_size=5))
    tables = {f"t{i}": Table(draw(st.integers(1, 30)), width) for i, width in enumerate(widths)}
    names = [*tables, *draw(st.lists(st.sampled_from([*tables]), max_size=2))]
    return tables, draw(st.permutations(names)), draw(st.integers(1, 2)), draw(st.sampled_from(["sum", "mean"]))


@given(columns(), st.integers(0, 99))
@settings(max_examples=examples(10, 50))
def test_a_lookup_of_several_widths_is_one_lookup_for_each_column(given, seed):
    tables, names, hots, pooling = given
    joined = EmbeddingSpec(tables, {"all": Lookup(tuple(names), hots, pooling)}, 2)
    apart = EmbeddingSpec(tables, {f"{i}": Lookup(name, hots, pooling) for i, name in enumerate(names)}, 2)
    ids, rng = draw_ids(joined, 6, seed), np.random.default_rng(seed)
    weight = [rng.standard_normal((6, tables[name].width), np.float32) for name in names]

    def looked_up(spec, ids):
        """Each column's activations, and the gradient of their weighted sum for all rows of each stack."""
        plans, found, gradient = plan(spec, ids), {}, {}
        whole = {
            name: np.random.default_rng(1).standard_normal((stack.rows + 1, stack.width), np.float32)
            for name, stack in spec.stacks.items()
        }
        values = {name: jnp.asarray(whole[name][plans[name].unique]) for name in plans}

        def weighted(values):
            found.update(activations(spec, values, plans))
            each = found["all"] if "all" in found else [found[f"{i}"] for i in range(len(names))]
            each = [each[:, i] for i in range(len(names))] if isinstance(each, jax.Array) else each
            return sum(jnp.sum(one * other) for one, other in zip(each, weight, strict=True)), each

        of_rows, each = jax.grad(weighted, has_aux=True)(values)
        for name, one in of_rows.items():
            gradient[name] = np.zeros_like(whole[name])
            np.add.at(gradient[name], plans[name].unique, np.asarray(one))
        return [np.asarray(one) for one in each], gradient

    one, other = looked_up(joined, ids), looked_up(apart, {f"{i}": ids["all"][:, i] for i in range(len(names))})
    assert_equal(one[0], other[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one[1], other[1])

    plans = plan(joined, ids)
    capacity = capacity_of(plans)
    assert_equal(host_plan(joined, ids, capacity), device_plan(joined, {"all": jnp.asarray(ids["all"])}, capacity))
    assert all(is_plan_of(joined, name, one, ids) for name, one in plans.items())
    changed, limit = ids["all"].copy(), joined.columns_of("all")[1]
    column = rng.integers(len(names))
    changed[0, column] = (changed[0, column] + 2) % (limit[column] + 1) - 1  # another row, or missing
    if (changed != ids["all"]).any():
        right = {name: is_plan_of(joined, name, one, {"all": changed}) for name, one in plans.items()}
        assert [name for name, is_right in right.items() if not is_right] == [f"width_{tables[names[column]].width}"]


def test_ids_outside_a_table_and_plans_of_other_batches_are_refused():
    job = job_of()
    batch, other = itertools.islice(DATA.train(0), 2)
    state, wrong = job.state("host", 0), batch.ids["sparse"].copy()
    wrong[3, 1] = 9
    with pytest.raises(ValueError, match="the first is 9 in 'sparse', and 'C2' has rows 0 to 8"):
        job.task.step(state, batch._replace(ids={"sparse": wrong}))
    with pytest.raises(ValueError, match="is that of other ids"):
        job.task.step(state, batch, plan(job.spec, other.ids))
    half = plan(job.spec, {"sparse": batch.ids["sparse"][:32]})
    with pytest.raises(ValueError, match=r"is of ids .*\(32, 1\)"):
        job.task.step(state, batch, half)


@given(st.lists(st.integers(1, 8), min_size=3, max_size=3), st.integers(0, 99))
@settings(max_examples=examples(5, 20))
def test_the_model_sees_each_row_times_the_matrix_of_its_table(widths, seed):
    widths, rng = dict(zip(("user", "item", "tag"), widths, strict=True)), np.random.default_rng(seed)
    of = lambda widths: table_job(TABLE, make_model("din", E), optax.adam(0.01), adagrad(0.1), E, 2, seed, widths)
    job, plain = of(widths), of(None)
    batch = Batch({"seen": rng.integers(-1, 20, (16, 10))})  # a step that is missing does not count
    params = job.init(seed)
    assert set(params.get(PROJECTION, {})) == {name for name, width in widths.items() if width != E}
    kernel = lambda table: np.asarray(params[PROJECTION][table]) if widths[table] != E else np.eye(E)
    draw = lambda table, *shape: rng.standard_normal((*shape, widths[table])).astype(np.float32)
    user, item, tags, seen = draw("user", 16), draw("item", 16), draw("tag", 16), draw("item", 16, 10)
    sparse = [user, item] if widths["user"] != widths["item"] else np.stack([user, item], 1)
    found = job.predict(params, {"sparse": sparse, "tags": tags, "seen": seen}, batch)
    pair = np.stack([user @ kernel("user"), item @ kernel("item")], 1)
    wide = {"sparse": pair, "tags": tags @ kernel("tag"), "seen": seen @ kernel("item")}
    wanted = plain.predict(plain.init(seed), jax.tree.map(jnp.float32, wide), batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_without_other_widths_the_bits_are_as_ever():
    """That they are those of earlier versions, the golden curve shows."""
    for name in ("deepfm", "dlrm"):
        plain, given = job_of(name, None), job_of(name, dict.fromkeys(("C1", "C2"), E))
        assert given.spec == plain.spec and same(given.init(3), plain.init(3)) and set(plain.init(3)) == {"params"}
        assert_equal(trained(given, 3)[0], trained(plain, 3)[0])


def test_what_another_width_adds_changes_no_other_parameter():
    some, plain = job_of().init(5), job_of(widths=None).init(5)
    assert same(some["params"], plain["params"])
    assert {name: leaf.shape for name, leaf in some[PROJECTION].items()} == {"C1": (6, E), "C3": (1, E)}
    assert same(some[PROJECTION]["C1"], job_of(widths={"C1": 6}).init(5)[PROJECTION]["C1"])
    assert not same(some[PROJECTION], job_of().init(6)[PROJECTION])


@pytest.mark.parametrize("flags", [{}, {"dropout": 0.2, "batch_norm": True}])
def test_under_oac_the_bits_are_those_of_one_batch_at_a_time(flags):
    job = job_of("deepfm", **flags)
    assert list(job.spec.stacks) == ["width_6", "width_4", "width_1"]
    serial, _ = trained(job, 12)
    overlapped, _ = trained(job, 12, lambda *given: Pipeline(*given, window=3))
    assert_equal(serial, overlapped)
    stale, _ = trained(job, 12, lambda *given: Pipeline(*given, mode="semisync"))
    assert not same(serial, stale)  # negative control
    before, after = job.init(0)[PROJECTION], serial[0].params[PROJECTION]
    assert all((np.asarray(before[name]) != after[name][0]).any() for name in before)  # they are trained
    losses = [float(each["loss"]) for each in trained(job, 40)[1]]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.02


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("user", "--widths user must be a field and its width, 1 or more"),
        ("=4", "must be a field and its width"),
        ("user=0", "must be a field and its width"),
        ("user=1.5", "must be a field and its width"),
        ("user=-3", "must be a field and its width"),
        ("usr=3", "there is no field 'usr'; give one of user, item, seen"),
        ("seen=3", "'seen' shares the table of 'item': give item=3"),
        ("item=3", "'item' is given twice, 8 before"),
    ],
)
def test_words_that_name_no_table_and_width_are_refused(word, message):
    tables = {"user": "user", "item": "item", "seen": "item"}
    assert widths_of(["item=8"], tables) == {"item": 8} and widths_of([], tables) == {}
    with pytest.raises(ValueError, match=message):
        widths_of(["item=8", word], tables)


def test_a_run_has_them_and_goes_on_and_is_evaluated_with_them(tmp_path):
    flags = {"preset": "smoke", "rows": 500, "batch_size": 64, "steps": 12, "evaluations": 2, "model": "small_dlrm"}
    flags |= {"widths": ("C1=3", "C26=8"), "embedding_width": 4, "tables": "host", "pipeline": "oac"}
    config = config_of(**flags, workdir=tmp_path / "run")
    results = train.main(config)
    file = tmp_path / "run" / "config.json"
    again = parse(type(config), words_of(file))
    assert again.learning == config.learning and again.learning.widths == ("C1=3", "C26=8")
    look = evaluate.Config(tmp_path / "run", workdir=tmp_path / "look", group="C1")
    assert evaluate.main(look)["auc"] == pytest.approx(results["test_auc"], abs=1e-6)
    train.main(dataclasses.replace(config, resume=True))  # complete: nothing is left to do
    with pytest.raises(ValueError, match="there is no field 'C27'"):
        train.main(config_of(**{**flags, "widths": ("C27=3",)}, workdir=tmp_path / "other"))
    assert not (tmp_path / "other").exists()
    other = dataclasses.replace(config.learning, widths=("C1=8",))
    with pytest.raises(ValueError, match="widths"):
        Run("train", dataclasses.replace(config, learning=other), config.workdir, resume=True)


def test_a_sweep_varies_them():
    arms = sweep.arms_of(["widths=C1=3 C26=8,"])
    config = [parse(type(config_of()), words).learning.widths for words in arms.values()]
    assert config == [("C1=3", "C26=8"), ()]
