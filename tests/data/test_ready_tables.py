"""Ready-made schemas, on small files of their formats; schemas that contradict themselves."""

import gzip

import numpy as np
import pytest
from test_criteo import lines as criteo_lines
from test_criteo import read_all as read_criteo
from test_tabular import read_all

from jaxrec.data.criteo import prepare as prepare_criteo
from jaxrec.data.tabular import (
    AtRandom,
    ByColumn,
    ByRows,
    Categorical,
    Dense,
    MultiHot,
    Schema,
    Sequence,
    open_table,
    prepare,
    ready,
)


def test_criteo_by_its_schema_is_criteo_by_its_own_preparation(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("\n".join(criteo_lines(300)) + "\n")
    own = prepare_criteo([path], tmp_path / "a")
    ours = prepare([path], tmp_path / "b", ready.CRITEO)
    assert own["rows"] == ours["rows"] and own["cardinalities"] == ours["cardinalities"]
    for name in ("train", "test"):
        a, b = read_criteo(tmp_path / "a", name), read_all(tmp_path / "b", name)
        np.testing.assert_array_equal(a["label"], b["label"])
        np.testing.assert_allclose(a["dense"], b["dense"], rtol=1e-6)
        np.testing.assert_array_equal(a["ids"], b["sparse"])


def numbered(rows, seed, label):
    """CSV in the layout of BARS: I1 to I13, C1 to C26."""
    rng = np.random.default_rng(seed)
    header = [label, *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]
    body = [[rng.integers(2), *rng.random(13).round(3), *rng.integers(0, 50, 26)] for _ in range(rows)]
    return "\n".join(",".join(map(str, line)) for line in [header, *body]) + "\n"


@pytest.mark.parametrize(("schema", "label"), [(ready.CRITEO_X1, "label"), (ready.CRITEO_X4, "Label")])
def test_bars_files_divide_the_rows(tmp_path, schema, label):
    sizes = {"train": 60, "valid": 20, "test": 30}
    for name, rows in sizes.items():
        (tmp_path / f"{name}.csv").write_text(numbered(rows, rows, label))
    metadata = prepare([tmp_path / f"{name}.csv" for name in sizes], tmp_path / "out", schema)
    assert metadata["rows"] == {"train": 60, "validation": 20, "test": 30}
    assert read_all(tmp_path / "out", "test")["sparse"].shape == (30, 26)


def test_avazu_is_divided_by_its_hours(tmp_path):
    names = ["id", "click", "hour", *(feature.column for feature in ready.AVAZU.features)]
    rng = np.random.default_rng(0)
    rows = [[i, rng.integers(2), 14102100 + i // 10, *rng.integers(0, 5, 21)] for i in range(200)]
    text = "\n".join(",".join(map(str, row)) for row in [names, *rows]) + "\n"
    (tmp_path / "train.gz").write_bytes(gzip.compress(text.encode()))
    metadata = prepare([tmp_path / "train.gz"], tmp_path / "out", ready.AVAZU)
    assert metadata["rows"] == {"train": 160, "validation": 20, "test": 20}


MOVIELENS = {
    "ratings.dat": [
        "1::10::5::100", "1::20::3::300", "2::20::4::250", "1::30::4::300", "2::10::1::400", "1::10::2::500",
    ],
    "users.dat": ["1::F::1::10::48067", "2::M::56::16::70072"],
    "movies.dat": ["10::Toy Story (1995)::Animation|Children's|Comedy", "20::Caf\xe9 (1999)::Drama", "30::Odd::Drama"],
}  # fmt: skip


def movielens(directory, **others):
    for name, lines in (MOVIELENS | others).items():
        (directory / name).write_bytes("\n".join(lines).encode("latin-1") + b"\n")
    return [directory / name for name in MOVIELENS]


def test_movielens_tells_what_a_user_has_rated_before(tmp_path):
    metadata = prepare(movielens(tmp_path)[::-1], tmp_path / "out", ready.MOVIELENS_1M)
    assert metadata["rows"] == {"train": 4, "validation": 1, "test": 1}
    train, test = read_all(tmp_path / "out", "train"), read_all(tmp_path / "out", "test")
    # In order of time: user 1 rates movie 10 with 5; 2 rates 20 with 4; 1 rates 20 with 3 and 30 with 4 in one second.
    assert train["label"].tolist() == [1, 1, 0, 1]
    movie = train["sparse"][:, metadata["table"]["sparse"].index("movie")]
    assert train["history"][:, 0].tolist() == [-1, -1, movie[0], movie[0]] and (train["history"][:, 1:] == -1).all()
    assert test["history"][0, :4].tolist() == [movie[0], movie[2], movie[3], -1]
    assert (train["genres"][0] >= 0).sum() == 3 and (train["genres"][1] >= 0).sum() == 1
    assert prepare(movielens(tmp_path), tmp_path / "out", ready.MOVIELENS_1M) == metadata


@pytest.mark.parametrize(
    ("file", "lines", "rule"),
    [
        ("ratings.dat", ["1::10::5"], "ratings.dat, line 1: 3 fields, but each has 4"),
        ("ratings.dat", ["1::10::five::100"], "ratings.dat, line 1: rating and time are whole numbers"),
        ("ratings.dat", ["1::99::5::100"], "movies.dat: the movie 99 is missing"),
        ("users.dat", ["1::F::1::10::48067"], "users.dat: the user 2 is missing"),
        ("movies.dat", MOVIELENS["movies.dat"] * 2, "movies.dat: the movie .* is there twice"),
        ("movies.dat", [""], "movies.dat, is empty"),
    ],
)
def test_malformed_movielens_is_named(tmp_path, file, lines, rule):
    with pytest.raises(ValueError, match=rule):
        prepare(movielens(tmp_path, **{file: lines}), tmp_path / "out", ready.MOVIELENS_1M)


def test_a_file_of_movielens_that_is_not_given_is_named(tmp_path):
    with pytest.raises(ValueError, match="wants ratings.dat, users.dat, movies.dat, and got ratings.dat"):
        prepare(movielens(tmp_path)[:1], tmp_path / "out", ready.MOVIELENS_1M)


USER = Categorical("user")
WRONG = {
    "no category": (lambda: Schema(label="y", features=[Dense("x")]), "no table would be"),
    "a column twice": (lambda: Schema(label="y", features=[USER, USER]), "'user' is given twice"),
    "the label as a feature": (lambda: Schema(label="user", features=[USER]), "'user' is given twice"),
    "no label": (lambda: Schema(label=[], features=[USER]), "must be the name of a column"),
    "the weight is a label": (lambda: Schema(label="y", features=[USER], weight="y"), "'y' is given twice"),
    "a table that is not there": (
        lambda: Schema(label="y", features=[USER, Sequence("s", share="item")]), "'item', which is no Categorical",
    ),
    "long separator": (lambda: Schema(label="y", features=[USER], separator="::"), "with quote=False several"),
    "no separator": (lambda: Schema(label="y", features=[USER], separator=""), "separator='' must be"),
    "a bag of a taken name": (lambda: Schema(label="y", features=[MultiHot("dense")]), "rename the column"),
    "a text for texts": (lambda: Schema(label="y", features=[USER], missing="NA"), "must be a list of texts"),
    "min_count 0": (lambda: Categorical("user", min_count=0), "min_count of 'user'=0 must be a whole number"),
    "hash_cap 1": (lambda: Categorical("user", hash_cap=1), "hash_cap of 'user'=1"),
    "at_most 0": (lambda: MultiHot("tags", at_most=0), "at_most of 'tags'=0"),
    "last 0": (lambda: Sequence("seen", last=0), "last of 'seen'=0"),
    "no separator of a bag": (lambda: MultiHot("tags", ""), "separator='' of 'tags'"),
    "buckets that fall": (lambda: Dense("x", buckets=(2, 1)), "must ascend"),
    "buckets and log": (lambda: Dense("x", log=True, buckets=(1,)), "leave out log"),
    "missing is nan": (lambda: Dense("x", missing=float("nan")), "must be finite"),
    "shares above 1": (lambda: ByRows(0.8, 0.2), "train \\+ validation below 1"),
    "no train": (lambda: AtRandom(0.0), "train must be above 0"),
    "a negative share": (lambda: ByRows(0.5, -0.1), "validation of the split=-0.1"),
    "one value for two": (lambda: ByColumn("c", ("a",), (), ("a",)), "no value stands for two"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_schema_that_contradicts_itself_is_refused(kind):
    make, rule = WRONG[kind]
    with pytest.raises(ValueError, match=rule):
        make()


def test_arguments_of_a_preparation_are_refused_by_name(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("y,user\n1,a\n0,b\n1,c\n")
    schema = Schema(label="y", features=[USER], split=ByRows(0.5))
    for wrong, rule in (({"block_rows": 0}, "block_rows=0"), ({"max_bad_rows": -1}, "max_bad_rows=-1")):
        with pytest.raises(ValueError, match=rule):
            prepare([path], tmp_path / "out", schema, **wrong)
    for sources, rule in (([], "sources is empty"), ([tmp_path / "b"], "is no file")):
        with pytest.raises(ValueError, match=rule):
            prepare(sources, tmp_path / "out", schema)
    with pytest.raises(ValueError, match="the train split would have no rows out of 3"):
        prepare([path], tmp_path / "out", Schema(label="y", features=[USER], split=ByRows(0.1)))
    unknown = Schema(label="y", features=[Categorical("item")], columns=("y", "user"))
    with pytest.raises(ValueError, match="a.csv, as columns=.* the column 'item' of the schema is not there"):
        prepare([path], tmp_path / "out3", unknown)
    with pytest.raises(ValueError, match="no split 'validation', only"):
        prepare([path], tmp_path / "out2", schema) and open_table(tmp_path / "out2", "validation")
