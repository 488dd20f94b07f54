"""A served model predicts what evaluate.py does, of the same rows, without jaxrec."""

import datetime
import json
import subprocess
import sys

import evaluate
import export
import numpy as np
import pytest
from main import serve, serving
from main.table_summary import open_schema
from main.trained import open_run
from trained_run import synthetic_run, table_lines, tabular_run, write_lines

from jaxrec.data.tabular import ByTime, Categorical, History, Schema, open_vocabularies, prepare
from jaxrec.data.tabular.raw import read_rows, schema_of

OWN = """
import jax.numpy as jnp
from flax import nnx

class Net(nnx.Module):
    def __init__(self, dense_features, fields, width, *, rngs):
        self.norm = nnx.BatchNorm(dense_features + fields * width, rngs=rngs)
        self.hidden = nnx.Linear(dense_features + fields * width, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, dense, activations):
        x = self.norm(jnp.concatenate([dense, activations.reshape(dense.shape[0], -1)], axis=1))
        return self.last(self.dropout(nnx.relu(self.hidden(x))))[:, 0]

class OfOneSize(Net):
    def __call__(self, dense, activations):
        return super().__call__(dense.reshape(len(dense), -1), activations)

class OfFew(Net):
    def __call__(self, dense, activations):
        return super().__call__(dense, activations) * (2 if dense.shape[0] > 4096 else 1)
"""
WITHOUT_JAXREC = """
import runpy, sys
sys.modules["jaxrec"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def served(directory, model, widths=None):
    """A run of a model with all kinds of features, and its directory for a server."""
    run, *_ = tabular_run(directory, model, widths=widths)
    export.main(export.Config(run_directory=run, serve=directory / "served"))
    return run, directory / "served"


@pytest.mark.parametrize(
    ("model", "widths"),
    [
        ("deepfm", None),
        ("din", {"user": 2, "item": 3, "tag": 7}),
        ("dcnv2", {"age": 1}),
        ("mine.py:Net", None),
    ],
)
def test_it_predicts_what_evaluate_does_without_jaxrec(tmp_path, model, widths):
    (tmp_path / "mine.py").write_text(OWN)
    run, directory = served(tmp_path, str(tmp_path / model) if ":" in model else model, widths)
    rows = write_lines(tmp_path / "new.csv", table_lines(100, seed=1))
    evaluate.main(evaluate.Config(run, workdir=tmp_path / "look", path=(rows,), group="user", segments=("age",)))
    wanted = np.load(tmp_path / "look" / "predictions.npz")["probability"]
    words = [directory / "serve.py", rows, tmp_path / "found.csv"]
    command = [sys.executable, "-c", WITHOUT_JAXREC, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = np.loadtxt(tmp_path / "found.csv", skiprows=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert wanted.std() > 1e-4  # negative control: predictions differ


SCHEMA = """
from jaxrec.data.tabular import *
schema = Schema(
    label="y", separator=";", missing=("none", "7", "8.5"), split=ByTime("when", train=0.8),
    features=[
        Categorical("name", min_count=1), Categorical("second", share="name"), Categorical("code", hash_cap=50),
        MultiHot("tags", "/", at_most=2, min_count=1),
        Sequence("seen", "|", last=2, share="name"), MultiHot("words", " ", hash_cap=20),
        Dense("price", log=True, standardise=True), Dense("age", missing=-1.5), Dense("same", standardise=True),
        Dense("hour", buckets=(6, 12, 18)), MultiHot("version", ".", min_count=1), Dense("when", standardise=True),
    ],
)
"""
NAMES = [
    "Amélie",
    "千と千尋",
    "12",
    "12.0",
    "012",
    "-3.00",
    "1.50",
    "nan",
    "NaN",
    "",
    "none",
    "7",
    "7.0",
    "a b",
    "Ёлки",
    "x",
]
NUMBERS = ["", "nan", "none", "7", "7.0", "8.50", "0", "-4", "1e3", "12.25", "6", "18", "5.999", "1e-3"]


def odd_lines(rows, seed):
    """A table of texts that are easy to read otherwise."""
    draw = np.random.default_rng(seed)
    one = lambda choices: choices[draw.integers(len(choices))]
    many = lambda separator: separator.join(one(NAMES) for _ in range(draw.integers(0, 5)))
    yield "y;name;second;code;tags;seen;words;price;age;same;hour;version;when"
    for _ in range(rows):
        quoted = one(['"a;b"', '"say ""so"""', *NAMES])
        bags = many("/"), many("|"), many(" ")
        numbers = [one(NUMBERS), one(NUMBERS), "3.5", one(NUMBERS)]
        when = f"2024-01-{draw.integers(1, 29):02d} {draw.integers(0, 24):02d}:00"
        version = one(("3.0", "3.1.2", "7", ""))
        yield ";".join([one("01"), quoted, one(NAMES), one(NAMES), *bags, *numbers, version, when])


def test_rows_become_the_inputs_that_the_library_makes_of_them(tmp_path):
    (tmp_path / "schema.py").write_text(SCHEMA)
    first = write_lines(tmp_path / "a.csv", odd_lines(400, 0))
    prepare([first], tmp_path / "prepared", open_schema(str(tmp_path / "schema.py")))
    about, categories = serving.described(tmp_path / "prepared")
    last = "1;unknown;unknown;unknown;unknown;unknown/x;;99;99;3.5;99;4.0;2025-01-01"
    new = write_lines(tmp_path / "b.csv", [*odd_lines(300, 1), last])
    (wanted,) = read_rows([new], schema_of(tmp_path / "prepared"), tmp_path / "prepared")
    model = serve.Model.__new__(serve.Model)  # without weights
    model.about = json.loads(json.dumps(about))
    model.index(json.loads(json.dumps(categories)))
    ids, dense = model.encode(list(serve.rows_of(model.about, new)))
    for name, found in ids.items():
        np.testing.assert_array_equal(found, wanted[f"ids.{name}"], err_msg=name)
    np.testing.assert_allclose(dense, wanted["dense"], rtol=1e-6)
    assert set(ids) == {"sparse", "tags", "seen", "words", "version"}
    assert (ids["sparse"] == 1).any() and (ids["sparse"] == 0).any()


def test_a_server_is_given_histories_and_reads_texts_in_their_encoding(tmp_path):
    rows = [f"{n % 2};größe{n % 4};é{n % 5};{n}" for n in range(60)]
    text, new = tmp_path / "a.csv", tmp_path / "new.csv"
    text.write_bytes("\n".join(["y;user;name;t", *rows]).encode("latin-1"))
    new.write_bytes("y;name;name_history\n1;é1;é0|é1".encode("latin-1"))
    features = [Categorical("name", hash_cap=20), History("name", by="user", last=3)]
    schema = Schema("y", features, ByTime("t"), separator=";", encoding="latin-1")
    prepare([text], tmp_path / "out", schema)
    about, categories = serving.described(tmp_path / "out")
    model = serve.Model.__new__(serve.Model)  # without weights
    model.about = json.loads(json.dumps(about))
    model.index(categories)
    requests = {"name": "é1", "name_history": ["é4", "é0", "é1", "é2"]}, {"name": "", "name_history": None}
    ids, _ = model.encode([*requests])
    one = open_vocabularies(tmp_path / "out")["name"].encode(["é0", "é1", "é2"])
    assert ids["name_history"].tolist() == [one.tolist(), [-1, -1, -1]]  # the newest
    (row,) = serve.rows_of(model.about, new)
    assert row["name_history"] == "é0|é1"


def test_a_request_may_have_lists_numbers_and_nothing(tmp_path):
    _, directory = served(tmp_path, "lr")
    model = serve.Model(directory)
    text = {"user": "u3", "item": "4", "seen": "1|2", "price": "2.5", "age": "20", "tag": "a|b"}
    same = {"user": "u3", "item": 4, "seen": np.array([1, 2]), "price": 2.5, "age": 20, "tag": ["a", "b"]}
    nothing, empty = dict.fromkeys(text), dict.fromkeys(text, "")
    one, two, three, four = model.predict(*model.encode([text, same, nothing, empty]))
    assert one == two != three == four
    alone, listed, switched, said = (
        model.encode([text | change])[0] for change in ({"seen": 0}, {"seen": ["0"]}, {"item": True}, {"item": "true"})
    )
    assert (alone["seen"] == listed["seen"]).all() and (alone["seen"] != -1).sum() == 1
    assert (switched["sparse"] == said["sparse"]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"price": "1_0"}, "'1_0' is no number"),
        ({"price": " 3"}, "' 3' is no number"),
        ({"user": b"u3"}, "b'u3' is bytes: give it as text"),
        ({"user": datetime.datetime(2024, 1, 1)}, "is datetime: give it as text"),
        (None, "row 0 has no 'price': give None if it is missing"),
    ],
)
def test_a_request_that_would_be_read_as_another_is_refused(tmp_path, change, message):
    _, directory = served(tmp_path, "lr")
    row = {"user": "u3", "item": "4", "seen": "1|2", "price": "2.5", "age": "20", "tag": "a|b"}
    row = row | change if change else {name: value for name, value in row.items() if name != "price"}
    with pytest.raises(ValueError, match=message):
        serve.Model(directory).encode([row])


def test_a_file_that_would_be_read_as_another_is_refused_and_an_empty_line_is_none(tmp_path):
    _, directory = served(tmp_path, "lr")
    model, lines = serve.Model(directory), [*table_lines(5)]
    read = lambda lines: [*serve.rows_of(model.about, write_lines(tmp_path / "rows.csv", lines))]
    assert read([*lines, ""]) == read(lines) and len(read(lines)) == 5
    for wrong, message in (
        ([lines[0].replace("user", "User"), *lines[1:]], "rows.csv has no column user"),
        ([*lines, "1,u3"], "rows.csv, row 7: 2 fields, and 8 columns"),
    ):
        with pytest.raises(ValueError, match=message):
            read(wrong)
    done = subprocess.run([sys.executable, directory / "serve.py"], capture_output=True, text=True)
    assert done.returncode == 1 and "python serve.py rows.csv predictions.csv" in done.stderr


def test_a_batch_may_have_any_size(tmp_path):
    _, directory = served(tmp_path, "deepfm")
    model = serve.Model(directory)
    row = dict.fromkeys(("seen", "price", "age", "tag"))
    ids, dense = model.encode([{"user": f"u{i}", "item": str(i)} | row for i in range(7)])
    whole = model.predict(ids, dense)
    alone = [
        model.predict({name: each[i : i + 1] for name, each in ids.items()}, dense[i : i + 1])[0] for i in range(7)
    ]
    np.testing.assert_allclose(alone, whole, rtol=1e-6)


def test_what_cannot_be_served_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    for model in ("OfOneSize", "OfFew"):
        (tmp_path / model).mkdir()
        run, *_ = tabular_run(tmp_path / model, f"{tmp_path}/mine.py:{model}")
        with pytest.raises(
            ValueError, match=r"(?s)cannot be written for batches of any size .*dense.shape\[0\] for len"
        ):
            serving.write(open_run(run), tmp_path / "served")
    (tmp_path / "other").mkdir()
    other, *_ = synthetic_run(tmp_path / "other")
    with pytest.raises(ValueError, match="--serve is for a run of --data tabular, and .* is one of --data synthetic"):
        serving.write(open_run(other), tmp_path / "served")
    assert not (tmp_path / "served").exists() and not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"all": True}, "give one of --table NAME, --all, --serve DIR and --back FILE"),
        ({"run_directory": None}, "--serve DIR needs --run DIR"),
        ({"ids": (3,)}, "are not for --serve"),
        ({"optimizer": True}, "are not for --serve"),
    ],
)
def test_flags_that_do_not_go_with_serve_are_refused(tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        export.main(export.Config(**{"run_directory": tmp_path, "serve": tmp_path / "to"} | flags))
