"""The click job over a prepared table: every model takes its bags, runs resume, misuse is refused."""

import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from main import table_data
from main.click_data import make_model
from main.table_summary import open_schema

from jaxrec.data.tabular import AtRandom, Categorical, Dense, MultiHot, Schema, Sequence, prepare
from jaxrec.embedding import HostTables, sgd
from jaxrec.loop import planned

OTHERS = ("lr", "fm", "dnn", "wide_deep", "deepfm", "finalmlp", "dcnv2")
FEATURES = [Categorical("user", 1), MultiHot("tags", at_most=3), Sequence("seen", last=1, share="user")]
WITHOUT = {
    "everything": [*FEATURES, Dense("x")],
    "no number": FEATURES,
    "bags alone": [MultiHot("tags", at_most=2), Dense("x")],
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """{kind of schema: directory}"""
    folder, rng = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    rows = [f"{rng.integers(2)},{rng.integers(3)},u{rng.integers(9)},{rng.random()},a|b,u{rng.integers(9)}"
            for _ in range(300)]  # fmt: skip
    (folder / "a.csv").write_text("\n".join(["y,z,user,x,tags,seen", *rows]) + "\n")
    for kind, features in WITHOUT.items():
        schema = Schema(label=["y"], features=features, split=AtRandom(0.6, 0.2))
        prepare([folder / "a.csv"], folder / kind, schema, block_rows=32)
    return folder


def flags(directory, **others):
    defaults = dict(batch_size=16, steps=None, epochs=2, shuffle=True, seed=3, validation_fraction=0.0, patience=None)
    return types.SimpleNamespace(path=(directory,), **(defaults | others))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("dlrm", kind) for kind in WITHOUT]
    + [pytest.param(name, "everything", marks=pytest.mark.slow) for name in OTHERS],
)
def test_every_model_trains_on_every_kind_of_table(prepared, kind, name):
    data = table_data.tabular_data(flags(prepared / kind))
    job = table_data.table_job(data.table, make_model(name, 4), optax.sgd(0.1), sgd(0.1), 4, 2)
    state, step = job.state(HostTables.create(job.spec, job.row_optimizer), 0), job.train_step()
    batch, plans = next(iter(planned(job.spec, data.train(0))))
    _, metrics = step(state, plans, batch)
    assert jnp.isfinite(metrics["loss"])


def test_a_run_goes_on_where_it_was_and_its_parts_have_no_row_in_common(prepared):
    data = table_data.tabular_data(flags(prepared / "everything"))
    whole = list(data.train(0))
    assert len(whole) == data.steps == 2 * data.epoch_steps
    for later, batch in zip(data.train(7), whole[7:], strict=True):
        np.testing.assert_equal(later._asdict(), batch._asdict())
    seen = lambda batches: {float(x) for b in batches for x, w in zip(b.dense[:, 0], b.weight, strict=True) if w}
    parts = [seen(whole), seen(data.validation()), seen(data.test())]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 300


def test_flags_that_do_not_fit_a_table_are_refused(prepared, tmp_path):
    with pytest.raises(ValueError, match="has validation rows of its own"):
        table_data.tabular_data(flags(prepared / "everything", validation_fraction=0.1))
    schema = Schema(label="y", features=FEATURES)
    prepare([prepared / "a.csv"], tmp_path / "out", schema)
    with pytest.raises(ValueError, match="--patience 2 wants a validation"):
        table_data.tabular_data(flags(tmp_path / "out", patience=2))
    assert table_data.tabular_data(flags(tmp_path / "out", patience=2, validation_fraction=0.1)).validation
    with pytest.raises(ValueError, match="is no complete dataset"):
        table_data.tabular_data(flags(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("schema = (", "schema.py, line 1: SyntaxError"),
        ("x = 1\n\nschema = nobody", "schema.py, line 3: NameError"),
        ("x = 1", "has no schema: write"),
        ("from jaxrec.data.tabular import *\nschema = Schema(label='y', features=[])", "line 2: ValueError: features"),
    ],
)
def test_a_file_without_a_schema_is_refused_by_its_line(tmp_path, text, rule):
    (tmp_path / "schema.py").write_text(text)
    with pytest.raises(ValueError, match=rule):
        open_schema(str(tmp_path / "schema.py"))
