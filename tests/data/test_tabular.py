"""Tables by a schema, raw rows, ready-made schemas: values are kept, bad rows named, a kill leaves no partial file."""

import csv
import dataclasses
import errno
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from criteo_files import criteo_lines, write_lines
from criteo_files import read_all as read_criteo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import examples

from jaxrec.data import preparation
from jaxrec.data.blocks import write_blocks
from jaxrec.data.criteo import prepare as prepare_criteo
from jaxrec.data.loader import Loader
from jaxrec.data.tabular import (
    AtRandom,
    ByColumn,
    ByFile,
    ByRows,
    ByTime,
    Categorical,
    Dense,
    Label,
    MultiHot,
    Schema,
    Sequence,
    open_table,
    open_vocabularies,
    prepare,
    ready,
    schema_of,
)
from jaxrec.data.tabular.raw import has_labels, read_rows
from jaxrec.data.tabular.reading import read_pieces
from jaxrec.data.tabular.schema import restored

SMALL = {"block_rows": 16, "blocks_per_shard": 2}
NAMES = ("click", "user", "item", "price", "age", "tags", "seen", "when", "weight", "bought", "part")
FEATURES = (
    Categorical("user", min_count=3), Categorical("item", min_count=1), Categorical("part", hash_cap=7),
    Dense("price", log=True, standardise=True), Dense("age", missing=-2.0), Dense("when", buckets=(3, 7.5)),
    MultiHot("tags", ";", at_most=2), Sequence("seen", ";", last=3, share="item"),
)  # fmt: skip
SCHEMA = Schema(
    label=["click", Label("bought", at_least=2)], features=FEATURES, weight="weight", missing=("NA",),
    split=ByTime("when", train=0.6, validation=0.2),
)  # fmt: skip


def table(rows, seed=0):
    """Random well-formed rows as strings."""
    rng = np.random.default_rng(seed)
    bag = lambda words, most: ";".join(f"{words}{n}" for n in rng.integers(0, 9, rng.integers(0, most)))
    maybe = lambda text: ["", "NA", text, text, text][rng.integers(5)]
    return [
        {
            "click": str(rng.integers(2)), "user": maybe(f"u{rng.integers(20)}"), "item": f'i"{rng.integers(9)},é',
            "price": maybe(f"{rng.normal() * 50:.3f}"), "age": maybe(str(rng.integers(90))), "tags": maybe(bag("t", 5)),
            "seen": bag('i"', 6).replace(";", ",é;") + ",é", "when": str(at // 7 % 11), "weight": f"{rng.random():.2f}",
            "bought": str(rng.integers(4)), "part": "abc"[rng.integers(3)],
        }
        for at in range(rows)
    ]  # fmt: skip


def write(path, rows, header=True, separator=",", names=NAMES):
    """Write rows as text or Parquet, by the suffix of the path."""
    if path.suffix == ".parquet":
        pl.DataFrame([{name: row[name] for name in names} for row in rows]).write_parquet(path, row_group_size=13)
        return path
    text = io.StringIO()
    writer = csv.writer(text, delimiter=separator, lineterminator="\n")
    writer.writerows(([names] if header else []) + [[row[name] for name in names] for row in rows])
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read_all(directory, name):
    """All rows of a split, {column: array}; ids as 'sparse' and by bag."""
    split = open_table(directory, name)
    blocks = [split[index] for index in range(len(split))]
    assert [len(block["label"]) for block in blocks] == list(split.rows)
    flat = [{**{k: v for k, v in block.items() if k != "ids"}, **block["ids"]} for block in blocks]
    return {key: np.concatenate([block[key] for block in flat]) for key in flat[0]}


def digests(directory):
    """A digest of each data file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.glob("table-*"))}


def vocabulary(values, min_count):
    """Reference vocabulary: rows from 2 on, most frequent values first."""
    counts = {value: values.count(value) for value in set(values)}
    kept = sorted((v for v in counts if counts[v] >= min_count), key=lambda v: (-counts[v], v))
    return {value: 2 + row for row, value in enumerate(kept)}


def given_(text):
    return "" if text == "NA" else text


def expected(train, rows):
    """Reference content of blocks, row by row."""
    users = vocabulary([r["user"] for r in train if given_(r["user"])], 3)
    history = lambda text: [i for i in text.split(";") if i][-3:]
    items = vocabulary([r["item"] for r in train] + [i for r in train for i in history(r["seen"])], 1)
    tags = vocabulary([t for r in train for t in given_(r["tags"]).split(";")[:2] if t], 2)
    log = lambda text: math.log1p(max(float(text), 0))
    prices = [log(r["price"]) for r in train if given_(r["price"])]
    bag = lambda found, hots: (found + [-1] * hots)[:hots]
    price = lambda text: (log(text) - np.mean(prices)) / np.std(prices) if given_(text) else 0
    seen = lambda text: [items.get(i, 1) for i in history(text)]
    return {
        "label": [[float(r["click"]), float(float(r["bought"]) >= 2)] for r in rows],
        "weight": [float(r["weight"]) for r in rows],
        "dense": [[price(r["price"]), float(r["age"]) if given_(r["age"]) else -2] for r in rows],
        "user": [users.get(r["user"], 1) if given_(r["user"]) else 0 for r in rows],
        "item": [items.get(r["item"], 1) for r in rows],
        "when": [1 + (float(r["when"]) >= 3) + (float(r["when"]) >= 7.5) for r in rows],
        "tags": [bag([tags.get(t, 1) for t in given_(r["tags"]).split(";") if t][:2], 2) for r in rows],
        "seen": [bag(seen(r["seen"]), 3) for r in rows],
    }


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.parquet"])
def test_what_goes_in_comes_out(tmp_path, name):
    rows = table(300)
    metadata = prepare([write(tmp_path / name, rows)], tmp_path / "out", SCHEMA, **SMALL)
    parts = {"train": range(6), "validation": range(6, 9), "test": range(9, 11)}  # split at 0.56 and 0.84 of the rows
    of = {part: [r for r in rows if int(r["when"]) in times] for part, times in parts.items()}
    assert metadata["rows"] == {part: len(mine) for part, mine in of.items()} and metadata["skipped_rows"] == 0
    for part, mine in of.items():
        found, wanted = read_all(tmp_path / "out", part), expected(of["train"], mine)
        for column, place in (("user", 0), ("item", 1), ("when", 3)):
            assert found["sparse"][:, place].tolist() == wanted[column], column
        for feature, place in (("user", 0), ("item", 1), ("tags", None), ("seen", None)):
            ids = found["sparse"][:, place] if place is not None else found[feature]
            share = metadata["table"]["features"][feature]["unknown_share"][part]
            assert share == (ids == 1).sum() / (ids > 0).sum() and (feature != "user" or share > 0)
        for column in ("label", "weight", "dense", "tags", "seen"):
            np.testing.assert_allclose(found[column], wanted[column], rtol=1e-5, atol=1e-6, err_msg=column)
    features = metadata["table"]["features"]
    assert not [name for name in ("part", "when", "age") if "unknown_share" in features[name]]
    assert {name: features[name]["most"] for name in ("tags", "seen")} == {"tags": 2, "seen": 3}
    hashed = read_all(tmp_path / "out", "train")["sparse"][:, 2]
    assert len(set(zip(hashed.tolist(), [r["part"] for r in of["train"]], strict=True))) == 3
    assert 1 <= hashed.min() and hashed.max() < 7


def test_text_and_parquet_and_parts_of_them_are_one_table(tmp_path):
    rows = table(200)
    prepare([write(tmp_path / "whole.csv", rows)], tmp_path / "a", SCHEMA, **SMALL)
    excel = write(tmp_path / "x.csv", rows[:50])
    excel.write_bytes(b"\xef\xbb\xbf" + excel.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    parts = [excel, write(tmp_path / "y.parquet", rows[50:120]),
             write(tmp_path / "z.csv.gz", rows[120:], names=NAMES[::-1])]  # fmt: skip
    prepare(parts, tmp_path / "b", SCHEMA, **SMALL)
    assert digests(tmp_path / "a") == digests(tmp_path / "b") and len(digests(tmp_path / "a")) > 6


def test_lists_numbers_and_moments_of_parquet_are_read_as_they_are(tmp_path):
    frame = pl.DataFrame({
        "y": [True, False] * 10, "n": list(range(20)), "user": [7, None] * 10, "bag": [["a", None, "b"], []] * 10,
        "at": pl.Series(range(20)).cast(pl.Datetime("us")),
    })  # fmt: skip
    frame.write_parquet(tmp_path / "a.parquet")
    features = [Categorical("user", 1), Dense("n"), MultiHot("bag", min_count=1)]
    schema = Schema(label="y", features=features, split=ByTime("at", train=0.5))
    prepare([tmp_path / "a.parquet"], tmp_path / "out", schema, **SMALL)
    train, test = read_all(tmp_path / "out", "train"), read_all(tmp_path / "out", "test")
    assert train["label"].tolist() == [1, 0] * 5 and train["sparse"][:, 0].tolist() == [2, 0] * 5
    assert train["bag"][:2, :3].tolist() == [[2, 3, -1], [-1, -1, -1]]
    assert test["dense"][:, 0].tolist() == list(range(10, 20))


NUMBERED = Schema(
    label="y", features=[Categorical("item", 1), MultiHot("tags", min_count=1), Sequence("seen", last=3, share="item"),
                         Dense("x", standardise=True), Dense("z", buckets=(2.5,)), Categorical("hashed", hash_cap=99)],
    missing=("-1.0",),
)  # fmt: skip


def ways_of_writing(item, tags, seen, x):
    """{file: frame} of one table, whose ids are whole numbers of which some are missing."""
    y = [at % 2 for at in range(len(item))]
    texts = lambda lists, number: ["|".join(map(number, each)) for each in lists]
    decimals = lambda value: "" if value is None else f"{value}.0"
    text = {"y": y, "item": item, "tags": texts(tags, str), "seen": texts(seen, str), "x": x, "z": x, "hashed": item}
    some = [-1.0 if value is None else value for value in x]
    floats = text | {"item": pl.Series(item, dtype=pl.Float64), "hashed": pl.Series(item, dtype=pl.Float64)}
    not_a_number = floats | {"item": floats["item"].fill_null(np.nan), "x": pl.Series(x).fill_null(np.nan), "z": some}
    lists = {"tags": pl.Series(tags).cast(pl.List(pl.Float64)), "seen": [[*map(float, each), np.nan] for each in seen]}
    return {
        "integers.csv": text, "integers.parquet": text | {"tags": tags, "seen": seen}, "floats.parquet": floats,
        "floats.csv": text | {"item": list(map(decimals, item)), "hashed": list(map(decimals, item))},
        "nan.parquet": not_a_number | lists, "nan.csv": not_a_number,
        "words.csv": text | {"item": ["nan" if value is None else f"{value}" for value in item],
                             "tags": texts(tags, decimals), "seen": texts(seen, lambda value: f"{value}.00|NaN"),
                             "x": ["nan" if value is None else str(value) for value in x], "z": some,
                             "hashed": floats["hashed"].fill_null(-1.0)},
    }  # fmt: skip


def test_whole_numbers_and_missing_values_are_the_same_however_they_are_written(tmp_path):
    """Integers, floats of pandas, lists and texts of them; null, NaN, nan and a word for missing."""
    rng = np.random.default_rng(0)
    number = lambda: int(rng.choice([3, 12, 5 * 10**15, -7]))
    item = [None if at % 5 == 0 else number() for at in range(60)]
    bags = lambda: [[number() for _ in range(1 + at % 4)] for at in range(60)]
    x = [None if at % 7 == 0 else float(rng.integers(5)) for at in range(60)]
    found = {}
    for name, columns in ways_of_writing(item, bags(), bags(), x).items():
        frame = pl.DataFrame(columns)
        (frame.write_csv if name.endswith(".csv") else frame.write_parquet)(tmp_path / name)
        metadata = prepare([tmp_path / name], tmp_path / f"{name}.out", NUMBERED)
        assert metadata["table"]["features"]["item"]["missing_share"] == 0.2, name
        assert metadata["table"]["features"]["x"]["missing_share"] == pytest.approx(9 / 60), name
        found[name] = digests(tmp_path / f"{name}.out") | {"digest": metadata["table"]["digest"]}
    assert len(found) == 7
    for name, its in found.items():
        assert its == found["integers.csv"], name
    train = read_all(tmp_path / "integers.csv.out", "train")
    assert train["sparse"].min() == 0 and train["sparse"][:, 0].max() == 5  # 0 where missing, else one of four ids
    assert (train["sparse"][:, 2] == 0).tolist() == (train["sparse"][:, 0] == 0).tolist()  # also where it is hashed


def test_a_split_by_a_column_takes_its_values_as_they_are_written(tmp_path):
    frame = pl.DataFrame({"y": [0, 1] * 5, "item": ["a"] * 10, "part": [1.0] * 8 + [2.0] * 2})
    frame.write_csv(tmp_path / "a.csv")
    frame.write_parquet(tmp_path / "a.parquet")
    schema = Schema(label="y", features=[Categorical("item")], split=ByColumn("part", ("1.0",), (), ("2.0",)))
    for name in ("a.csv", "a.parquet"):
        assert prepare([tmp_path / name], tmp_path / f"{name}.out", schema)["rows"] == {"train": 8, "test": 2}


def test_histories_count_in_the_table_that_they_share(tmp_path):
    """Whatever is often enough in both together has a row, in training rows alone; so do tags."""
    rows = ["1,i1,h1|h2|old|i2|h1,t", "0,i1,h1,i2|t", "1,i2,,", "0,,h3|i3,", "1,i9,h9|h9|h9,i9|h9", "0,i9,h9,"]
    (tmp_path / "a.csv").write_text("\n".join(["y,item,seen,tags", *rows]) + "\n")
    features = [Categorical("item", 3), Sequence("seen", last=4, share="item"), MultiHot("tags", share="item")]
    metadata = prepare([tmp_path / "a.csv"], tmp_path / "out", Schema("y", features, ByRows(4 / 6)))
    # i2: twice in seen and tags, once in item. h1: three times, of which the fifth last of its history is not read.
    assert metadata["table"]["features"]["item"]["top"] == [["i2", 3]] and metadata["table"]["tables"] == {"item": 3}
    train = read_all(tmp_path / "out", "train")
    assert train["seen"].tolist() == [[1, 1, 2, 1], [1, -1, -1, -1], [-1] * 4, [1, 1, -1, -1]]
    assert train["sparse"][:, 0].tolist() == [1, 1, 2, 0] and train["tags"][1, :3].tolist() == [2, 1, -1]
    assert metadata["table"]["features"]["seen"]["unknown_share"] == {"train": 6 / 7, "test": 5 / 5}
    assert Schema("y", features).features[1].min_count == 3
    assert metadata["options"]["schema"]["features"][1][1]["min_count"] == 3  # so that other counts are another schema


def test_columns_of_one_category_share_a_table_and_its_categories(tmp_path):
    """Two genres of a film are of one table: what is often enough in both together has a row."""
    rows = ["1,a,b,3", "0,b,,12.0", "1,a,c,12", "0,c,a,", "1,b,zz,99"]
    features = [Categorical("first"), Categorical("second", share="first"), Categorical("other", 1, 50)]
    features.append(Categorical("fourth", share="other"))
    (tmp_path / "a.csv").write_text("\n".join(["y,first,second,other,fourth", *(f"{row},12" for row in rows)]) + "\n")
    metadata = prepare([tmp_path / "a.csv"], tmp_path / "out", Schema("y", features, ByRows(4 / 5)))
    table = metadata["table"]
    # In the first four rows: a three times, b and c twice, each once in one of the two.
    assert table["tables"] == {"first": 5, "other": 50} and table["features"]["first"]["top"][0] == ["a", 3]
    assert table["sparse"] == ["first", "second", "other", "fourth"]
    assert table["shared"] == {"second": "first", "fourth": "other"}
    found = read_all(tmp_path / "out", "train")["sparse"]
    row = {name: 2 + place for place, (name, _) in enumerate(table["features"]["first"]["top"])} | {"": 0}
    assert found[:, :2].tolist() == [[row[x] for x in pair] for pair in ("ab", ("b", ""), "ac", "ca")]
    assert read_all(tmp_path / "out", "test")["sparse"][0, :2].tolist() == [row["b"], 1]
    hashed = found[:, 2:]
    assert (
        hashed[1].tolist() == hashed[2].tolist() == [hashed[2, 0]] * 2
        and hashed[3, 0] == 0
        and (hashed[:, 1] > 0).all()
    )
    known = open_vocabularies(tmp_path / "out")
    assert known["second"].decode([2, 1, 0]) == known["first"].decode([2, 1, 0]) == ["a", "<unknown>", None]


def test_a_schema_without_shared_columns_has_the_digest_that_it_had():
    """Or what was prepared before could not be used any more."""
    described = Schema("y", [Categorical("item"), Categorical("b", 3, 50)]).described()
    wanted = [{"column": "item", "min_count": 2, "hash_cap": None}, {"column": "b", "min_count": 3, "hash_cap": 50}]
    assert [fields for _, fields in described["features"]] == wanted


SPLITS = {
    "rows": (ByRows(0.5, 0.2), lambda at, row: 0 if at < 50 else 1 if at < 70 else 2),
    "column": (ByColumn("part", ("a",), ("c",), ("b",)), lambda at, row: "acb".index(row["part"])),
    "dates": (ByTime("day", 0.5), lambda at, row: 0 if row["day"] < "2020-01-06" else 2),
}


@pytest.mark.parametrize("kind", SPLITS)
def test_rows_are_divided_as_the_split_says(tmp_path, kind):
    split, rule = SPLITS[kind]
    rows = [row | {"day": f"2020-01-{1 + at % 10:02d} 0{at % 7}:30"} for at, row in enumerate(table(100))]
    schema = Schema(label="click", features=[Categorical("item")], weight="weight", split=split)
    prepare([write(tmp_path / "a.csv", rows, names=(*NAMES, "day"))], tmp_path / "out", schema, **SMALL)
    for number, name in enumerate(("train", "validation", "test")):
        wanted = [float(row["weight"]) for at, row in enumerate(rows) if rule(at, row) == number]
        if wanted:
            np.testing.assert_allclose(read_all(tmp_path / "out", name)["weight"], wanted, rtol=1e-6)


def test_files_are_divided_by_their_names_and_others_are_refused(tmp_path):
    schema = Schema(label="click", features=[Categorical("item")], split=ByFile())
    paths = [write(tmp_path / f"{name}.csv", table(rows, rows)) for name, rows in (("test", 10), ("train", 30))]
    assert prepare(paths, tmp_path / "out", schema)["rows"] == {"train": 30, "test": 10}
    with pytest.raises(ValueError, match="other.csv is none of the files of the split"):
        prepare([*paths, write(tmp_path / "other.csv", table(20, 20))], tmp_path / "out2", schema)


def test_a_random_split_is_seeded_and_keeps_its_shares(tmp_path):
    path = write(tmp_path / "a.csv", table(1000))
    schema = lambda seed: Schema(label="click", features=[Categorical("item")], split=AtRandom(0.6, 0.2, seed))
    of = {seed: prepare([path], tmp_path / str(seed), schema(seed), **SMALL)["rows"] for seed in (0, 1)}
    assert of[0] != of[1] and all(sum(rows.values()) == 1000 for rows in of.values())
    assert all(abs(rows["train"] - 600) < 60 and abs(rows["test"] - 200) < 50 for rows in of.values())


def test_a_loader_gives_all_of_it_from_any_position(tmp_path):
    prepare([write(tmp_path / "a.csv", table(200))], tmp_path / "out", SCHEMA, **SMALL)
    source = open_table(tmp_path / "out", "train")
    make = lambda: Loader(source, 24, shuffle_seed=5, epochs=2, window_blocks=3)
    batches = list(make())
    assert batches[0].label.shape == (24, 2) and batches[0].ids["seen"].shape == (24, 3)
    last = batches[len(batches) // 2 - 1]
    padding = last.weight == 0
    assert padding.any() and (last.ids["tags"][padding] == -1).all() and (last.label[padding] == 0).all()
    later = make()
    later.seek(7)
    for one, other in zip(later, batches[7:], strict=True):
        np.testing.assert_equal(one._asdict(), other._asdict())


FILES_OF_TIMES = ("us.parquet", "ms.parquet", "day.parquet", "text.csv")


@pytest.mark.parametrize("names", list(itertools.permutations(FILES_OF_TIMES, 2)))
def test_times_of_files_of_several_types_are_of_one_scale(tmp_path, names):
    """Microseconds of one file were compared with milliseconds of another, so that the latest rows were trained on."""
    days = pl.Series("t", range(40)).cast(pl.Date)
    for name, part in zip(names, (days[:20], days[20:]), strict=True):
        kinds = {"us": pl.Datetime("us"), "ms": pl.Datetime("ms"), "day": pl.Date}
        rows = pl.DataFrame({"y": [0, 1] * 10, "n": part.to_physical(), "t": part, "y_too": ["a", "b"] * 10})
        if name == "text.csv":
            rows.write_csv(tmp_path / name)
        else:
            rows.with_columns(pl.col("t").cast(kinds[name.split(".")[0]])).write_parquet(tmp_path / name)
    schema = Schema("y", [Dense("n"), Categorical("y_too", 1)], ByTime("t", 0.75))
    prepare([tmp_path / name for name in names], tmp_path / "out", schema, **SMALL)
    assert sorted(read_all(tmp_path / "out", "train")["dense"][:, 0]) == list(range(30))


def test_the_scale_of_a_number_that_is_not_standardised_is_shown_and_changes_no_digest(tmp_path):
    rows = np.random.default_rng(0).normal(3e4, 2e4, 400)
    text = "y,user,x\n" + "".join(f"{n % 2},{n % 3},{x}\n" for n, x in enumerate(rows))
    (tmp_path / "a.csv").write_text(text)
    schema = Schema("y", [Categorical("user", 1), Dense("x", log=True)], ByRows(0.5))
    found = prepare([tmp_path / "a.csv"], tmp_path / "out", schema)["table"]
    logs = np.log1p(np.maximum(rows[:200], 0))
    np.testing.assert_allclose(found["features"]["x"]["scale"], [logs.mean(), logs.std()], rtol=1e-5)
    assert "scale" not in found["features"]["user"] and found["digest"] == "381663c867cb748a"


def test_texts_for_missing_values_are_no_labels_and_what_is_missing_is_said(tmp_path):
    schema = Schema("y", [Categorical("user", 1)], ByTime("t", 0.5), missing=("0",))
    (tmp_path / "a.csv").write_text("y,user,t\n" + "".join(f"{n % 2}.0,{n % 3},{n + 1}\n" for n in range(8)))
    prepare([tmp_path / "a.csv"], tmp_path / "out", schema, **SMALL)
    train = read_all(tmp_path / "out", "train")
    assert train["label"].tolist() == [0, 1, 0, 1]
    assert (train["sparse"][:, 0] == 0).tolist() == [True, False, False, True]
    for row, rule in {"0,1,0": "'t' is '0', but .* not one of missing=", "0,1,": "'t' is missing, but"}.items():
        (tmp_path / "b.csv").write_text(f"y,user,t\n1,1,1\n0,2,2\n{row}\n")
        with pytest.raises(ValueError, match=f"b.csv, line 4: {rule}"):
            prepare([tmp_path / "b.csv"], tmp_path / "no", schema, **SMALL)


GOOD = {"y": "1", "user": "ann", "price": "1.5", "tags": "a|b", "w": "1", "t": "5"}
STRICT = Schema(
    label="y", features=[Categorical("user", 1), Dense("price"), MultiHot("tags", min_count=1)], weight="w",
    split=ByTime("t", 0.5),
)  # fmt: skip
BAD = {
    "a field too few": (b"1,ann,1.5,a|b,1", "5 fields, but a row has 6"),
    "a field too many": (b"1,ann,1.5,a|b,1,5,", "7 fields, but a row has 6"),
    "an empty line": (b"", "the line is empty"),
    "an open quote": (b'1,"ann,1.5,a|b,1,5', "a quote is open"),
    "a quote inside": (b'1,a"nn,1.5,a|b,1,5', "a quote is open or stands inside"),
    "a quote after a backslash": (rb'1,"a\"nn",1.5,a|b,1,5', r"a quote is open .*; sed 's/.*' doubles those after a b"),
    "text after a quote": (b'1,"ann"x,1.5,a|b,1,5', "a quote is open or stands inside"),
    "no UTF-8": (b"1,an\xff,1.5,a|b,1,5", r"byte 5 is no UTF-8; .*encoding='latin-1'"),
    "a label of 2": (b"2,ann,1.5,a|b,1,5", "'y' is '2', but it is 0 or 1"),
    "no label": (b",ann,1.5,a|b,1,5", "'y' is .*, but it is 0 or 1"),
    "a number in words": (b"1,ann,cheap,a|b,1,5", "'price' is 'cheap', but it is a number or missing"),
    "no finite number": (b"1,ann,inf,a|b,1,5", "'price' is 'inf', but it is a number or missing"),
    "a label of NaN": (b"nan,ann,1.5,a|b,1,5", "'y' is 'nan', but it is 0 or 1"),
    "a weight of NaN": (b"1,ann,1.5,a|b,NaN,5", "'w' is 'NaN', but it is a number from 0"),
    "a time of NaN": (b"1,ann,1.5,a|b,1,nan", "'t' is 'nan', but it is a number, or a date"),
    "a decimal comma": (b'1,ann,"1,5",a|b,1,5', "'price' is '1,5'"),
    "a negative weight": (b"1,ann,1.5,a|b,-1,5", "'w' is '-1', but it is a number from 0"),
    "no weight": (b"1,ann,1.5,a|b,,5", "'w' is"),
    "a time in words": (b"1,ann,1.5,a|b,1,noon", "'t' is 'noon', but it is a number, or a date"),
}


def bad_table(path, kind, at, rows):
    """A table of `rows` good rows and a bad one."""
    lines = [",".join([*[GOOD[name] for name in list(GOOD)[:-1]], str(n)]).encode() for n in range(rows)]
    lines[at:at] = [BAD[kind][0]]
    path.write_bytes(",".join(GOOD).encode() + b"\n" + b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_named_or_counted(tmp_path, kind):
    path = bad_table(tmp_path / "a.csv", kind, 3, 8)
    with pytest.raises(ValueError, match=f"a.csv, line 5: .*{BAD[kind][1]}.*max_bad_rows"):
        prepare([path], tmp_path / "out", STRICT)


def test_bad_rows_are_counted_over_all_pieces_up_to_what_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrec.data.sources.CHUNK_BYTES", 200)
    lines = [*range(20), *(text for text, _ in BAD.values())]
    lines = [
        b"1,ann,1.5,a|b,1,%d" % line if isinstance(line, int) else line
        for line in lines[::3] + lines[1::3] + lines[2::3]
    ]
    (tmp_path / "a.csv").write_bytes(",".join(GOOD).encode() + b"\n" + b"\n".join(lines))
    with pytest.raises(ValueError, match="max_bad_rows=N .* more are allowed"):
        prepare([tmp_path / "a.csv"], tmp_path / "out", STRICT, max_bad_rows=len(BAD) - 1)
    metadata = prepare([tmp_path / "a.csv"], tmp_path / "out2", STRICT, max_bad_rows=len(BAD), **SMALL)
    assert metadata["skipped_rows"] == len(BAD) and sum(metadata["rows"].values()) == 20


@settings(max_examples=examples(40, 300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), rows=st.integers(3, 12), several=st.integers(1, 3))
def test_whatever_is_malformed_is_a_value_error_of_one_line(tmp_path_factory, data, rows, several):
    """Change, insert or delete bytes anywhere: the text is refused with a message, or all rows are counted."""
    folder = tmp_path_factory.mktemp("bad")
    path = bad_table(folder / "a.csv", data.draw(st.sampled_from(sorted(BAD))), 1, rows)
    text = bytearray(path.read_bytes())
    for _ in range(several):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.sampled_from([b"", b",", b"\n", b'"', b"\r", b"\x00", b"\xff", b"|", b"\n\n", b"\xef\xbb\xbf", b"x,"])
        )
    path.write_bytes(bytes(text))
    try:
        metadata = prepare([path], folder / "out", STRICT, max_bad_rows=data.draw(st.integers(0, 20)))
    except ValueError as error:
        assert ("\n" not in str(error) and "a.csv" in str(error)) or "split" in str(error), error
        return
    lines = bytes(text).removesuffix(b"\r").replace(b"\r\n", b"\n").rstrip(b"\n").count(b"\n")
    assert sum(metadata["rows"].values()) + metadata["skipped_rows"] == lines


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_three_hundred_damaged_parquet_files_are_refused_or_read_whole(tmp_path_factory, data):
    """Change, delete or insert bytes anywhere, including parts that only the Parquet library reads."""
    folder = tmp_path_factory.mktemp("parquet")
    text = bytearray(write(folder / "whole.parquet", table(30)).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, len(text) - 1))  # without the magic bytes it would be read as text
        text[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    (folder / "a.parquet").write_bytes(bytes(text))
    try:
        metadata = prepare([folder / "a.parquet"], folder / "out", SCHEMA, max_bad_rows=30)
    except ValueError as error:
        assert ("\n" not in str(error) and "a.parquet" in str(error)) or "split" in str(error), error
    else:
        assert sum(metadata["rows"].values()) + metadata["skipped_rows"] == 30


def test_a_parquet_file_at_which_the_library_that_reads_it_panics_is_refused(tmp_path):
    path = write(tmp_path / "a.parquet", table(30))
    text = bytearray(path.read_bytes())
    footer = len(text) - 8 - int.from_bytes(text[-8:-4], "little")
    text[text.index(2 * 13, footer)] = 0  # the first column of 13 rows claims to have 0
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"a\.parquet is no whole Parquet file"):
        prepare([path], tmp_path / "out", SCHEMA)


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path):
    path = bad_table(tmp_path / "a.csv", "no label", 0, 4)
    with pytest.raises(ValueError, match=r"a.csv, line 1: the column 'colour' .* not there, only 'y', 'user'"):
        prepare([path], tmp_path / "out", Schema(label="y", features=[Categorical("colour")]))
    with pytest.raises(ValueError, match="the column 'y;user' .*is the separator right"):
        prepare([path], tmp_path / "out", Schema(label="y;user", features=[Categorical("user")], separator=";"))


def test_a_header_in_another_encoding_is_refused_with_the_command_that_converts_it(tmp_path):
    (tmp_path / "a.csv").write_bytes("größe,y\n1,1\n".encode("latin-1"))
    with pytest.raises(ValueError, match="a.csv, line 1: byte 3 of the header is no UTF-8.*encoding='latin-1'"):
        prepare([tmp_path / "a.csv"], tmp_path / "out", Schema(label="y", features=[Categorical("größe")]))


def test_a_text_is_read_in_the_encoding_of_its_schema(tmp_path):
    lines = ["1::größe::4", "0::cœur::5", "1::größe::6", "0::cœur::7"]
    found = {}
    for encoding in ("utf-8", "latin-1", "cp1252", "utf-8-sig"):
        words = [line.replace("œ", "ô") for line in lines]
        (tmp_path / "a.txt").write_bytes("\n".join(["y::wôrd::t", *words]).encode(encoding))
        schema = Schema("y", [Categorical("wôrd", 1)], ByTime("t", 0.5), separator="::", quote=False, encoding=encoding)
        prepare([tmp_path / "a.txt"], tmp_path / encoding, schema)
        found[encoding] = schema_of(tmp_path / encoding), open_vocabularies(tmp_path / encoding)["wôrd"].decode([2, 3])
    assert {repr(names) for _, names in found.values()} == {"['côur', 'größe']"}
    assert all(schema.encoding == encoding for encoding, (schema, _) in found.items())


def test_what_is_not_in_the_encoding_of_the_schema_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"y,word\n1,a\n0,b\n1,\x81\n")
    with pytest.raises(ValueError, match="a.txt, line 4: byte 0x81 is no cp1252, the encoding of the schema"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", Schema("y", [Categorical("word")], encoding="cp1252"))
    for encoding in ("utf-16", "latin-eleven", None):
        with pytest.raises(ValueError, match=f"encoding={encoding!r} is none that Python knows"):
            Schema("y", [Categorical("word")], encoding=encoding)


def test_a_parquet_file_that_was_seen_otherwise_is_refused(tmp_path):
    path = write(tmp_path / "a.parquet", table(20))
    (piece,) = read_pieces([path], SCHEMA)
    assert piece.seen.ended and [its.rows for its in read_pieces([path], SCHEMA, [[piece.seen]])] == [20]
    with pytest.raises(ValueError, match="a.parquet is not the text that rows were prepared from before"):
        list(read_pieces([path], SCHEMA, [[piece.seen._replace(crc32=piece.seen.crc32 ^ 1)]]))


def test_damaged_parquet_and_foreign_types_are_refused_in_words(tmp_path):
    rows = table(50)
    whole = write(tmp_path / "a.parquet", rows)
    (tmp_path / "b.parquet").write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(ValueError, match="b.parquet is no whole Parquet file"):
        prepare([tmp_path / "b.parquet"], tmp_path / "out", SCHEMA)
    pl.DataFrame({"y": [0, 1], "x": [{"a": 1}, {"a": 2}]}).write_parquet(tmp_path / "c.parquet")
    for feature in (Categorical("x"), Dense("x", buckets=(1,))):
        with pytest.raises(ValueError, match="c.parquet: 'x' holds Struct"):
            prepare([tmp_path / "c.parquet"], tmp_path / "out", Schema(label="y", features=[feature]))
    pl.DataFrame({"y": [0, 1], "x": pl.Series([1, 2], dtype=pl.Duration("us"))}).write_parquet(tmp_path / "d.parquet")
    with pytest.raises(ValueError, match="d.parquet: 'x' holds Duration"):
        prepare([tmp_path / "d.parquet"], tmp_path / "out", Schema(label="y", features=[Categorical("x")]))
    pl.DataFrame({"y": [0, 1], "x": pl.Series([1, 2], dtype=pl.Datetime("ms"))}).write_parquet(tmp_path / "e.parquet")
    with pytest.raises(ValueError, match="e.parquet: 'x' holds Datetime"):  # whose numbers depend on its unit
        prepare([tmp_path / "e.parquet"], tmp_path / "out", Schema(label="y", features=[Dense("x", buckets=(1,))]))


KILLED = """
import os, signal, sys
import jaxrec.data.sources as source, jaxrec.data.preparation as preparation, jaxrec.data.tabular as tabular
sys.path[:0] = {tests!r}
from test_tabular import SCHEMA, SMALL
source.CHUNK_BYTES = 2000
write = preparation.write_blocks
left = [{shards}]
def counted(*arguments):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return write(*arguments)
preparation.write_blocks = counted
tabular.prepare([{path!r}], {out!r}, SCHEMA, **SMALL)
"""


@pytest.mark.process
@pytest.mark.parametrize("shards", [0, 3])
def test_what_was_killed_goes_on_to_the_same_bytes(tmp_path, shards, monkeypatch):
    monkeypatch.setattr("jaxrec.data.sources.CHUNK_BYTES", 2000)
    path, out = write(tmp_path / "a.csv", table(300)), tmp_path / "out"
    code = KILLED.format(
        tests=[str(place) for place in Path(__file__).parents[:2]], shards=shards, path=str(path), out=str(out)
    )
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), timeout=200)
    assert done.returncode == -signal.SIGKILL and len(digests(out)) == shards
    with pytest.raises(ValueError, match="is no complete dataset"):
        open_table(out, "train")
    resumed = prepare([path], out, SCHEMA, **SMALL)
    undisturbed = prepare([path], tmp_path / "undisturbed", SCHEMA, **SMALL)
    assert digests(out) == digests(tmp_path / "undisturbed") and resumed == undisturbed
    for name in ("vocabulary.npz", "metadata.json", "dataset_info.json"):
        assert (out / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name


def test_unknown_ids_are_counted_once_over_interruptions(tmp_path, monkeypatch):
    path, whole = write(tmp_path / "a.csv", table(160)), tmp_path / "whole"
    wanted = prepare([path], whole, SCHEMA, **SMALL)
    for shards in (1, len(digests(whole)) - 1):
        left = [shards]

        def full(*arguments, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "no space")
            return write_blocks(*arguments)

        monkeypatch.setattr(preparation, "write_blocks", full)
        with pytest.raises(OSError, match="no space"):
            prepare([path], tmp_path / f"{shards}", SCHEMA, **SMALL)
        monkeypatch.setattr(preparation, "write_blocks", write_blocks)
        assert prepare([path], tmp_path / f"{shards}", SCHEMA, **SMALL) == wanted


def test_a_directory_is_of_one_schema_and_of_the_text_that_was_read(tmp_path):
    rows = table(100)
    path = write(tmp_path / "a.csv", rows)
    first = prepare([path], tmp_path / "out", SCHEMA, **SMALL)
    assert prepare([path], tmp_path / "out", SCHEMA, **SMALL) == first
    other = Schema(label="click", features=FEATURES)
    with pytest.raises(ValueError, match="other schema: use the same"):
        prepare([path], tmp_path / "out", other, **SMALL)
    write(path, rows[:-1] + rows[:1])
    with pytest.raises(ValueError, match="other sources"):
        prepare([path], tmp_path / "out", SCHEMA, **SMALL)


def test_a_directory_of_an_earlier_version_can_be_read_but_maps_no_other_rows(tmp_path, monkeypatch):
    """It took 12.0 and nan for categories, and its histories did not count."""
    path, out = write(tmp_path / "a.csv", table(100)), tmp_path / "out"
    schemas = {"hashed": SCHEMA, "vocabulary": Schema(label="click", features=FEATURES[:2])}
    digest = lambda place, schema: prepare([path], place, schema, **SMALL)["table"]["digest"]
    now = {name: digest(out if schema is SCHEMA else tmp_path / "b", schema) for name, schema in schemas.items()}
    with monkeypatch.context() as patch:
        patch.setattr("jaxrec.data.tabular.look.FORMAT", 1)
        before = {name: digest(tmp_path / f"{name}1", schema) for name, schema in schemas.items()}
    # An equal vocabulary maps alike, whichever version has made it; hashing does not tell.
    assert before["vocabulary"] == now["vocabulary"] and before["hashed"] != now["hashed"]
    wanted, metadata = read_all(out, "train"), json.loads((out / "metadata.json").read_text())
    assert len(list(read_rows([path], SCHEMA, out))) == 1
    metadata["options"].pop("format")
    (out / "metadata.json").write_text(json.dumps(metadata))
    np.testing.assert_equal(read_all(out, "train"), wanted)
    with pytest.raises(ValueError, match="holds a preparation with other format: use the same, or another directory"):
        prepare([path], out, SCHEMA, **SMALL)
    with pytest.raises(ValueError, match="was prepared by an earlier version.* prepare the same sources in another"):
        next(read_rows([path], SCHEMA, out))


def test_a_column_that_splits_is_a_category_as_well(tmp_path):
    (tmp_path / "a.csv").write_text("y,part\n" + "1,NA\n0,b\n1,b\n" * 9)
    split = ByColumn("part", ("b",), (), ("NA",))
    prepare([tmp_path / "a.csv"], tmp_path / "out", Schema("y", [Categorical("part")], split, missing=("NA",)))
    assert set(read_all(tmp_path / "out", "test")["sparse"][:, 0].tolist()) == {0}
    assert set(read_all(tmp_path / "out", "train")["sparse"][:, 0].tolist()) == {2}


PEAK = """
import resource, sys
import jaxrec.data.sources as source, jaxrec.data.tabular.reading as reading
source.CHUNK_BYTES, reading.PARQUET_ROWS = 1 << 20, 1 << 13
from jaxrec.data.tabular import *
features = [Categorical("user", hash_cap=1000), Categorical("item"), MultiHot("tags"), Sequence("seen", share="item")]
schema = Schema(label="y", features=features, split=ByTime("t"))
prepare([sys.argv[1]], sys.argv[2], schema, block_rows=1024, blocks_per_shard=8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_memory_does_not_grow_with_the_rows(tmp_path, name):
    rng, peak_mib = np.random.default_rng(0), {}
    for rows in (40_000, 320_000):
        bags = pl.Series(["|".join(f"i{n}" for n in rng.integers(0, 500, 20)) for _ in range(1000)] * (rows // 1000))
        columns = {
            "y": rng.integers(0, 2, rows), "user": rng.integers(0, 10**9, rows),
            "item": [f"i{n % 500}" for n in range(rows)], "tags": bags, "seen": bags, "t": np.arange(rows) // 100,
        }  # fmt: skip
        path = tmp_path / f"{rows}.{name}"
        frame = pl.DataFrame(columns)
        frame.write_csv(path) if path.suffix == ".csv" else frame.write_parquet(path, row_group_size=1 << 13)
        out = [sys.executable, "-c", PEAK, str(path), str(tmp_path / f"{rows}.out")]
        done = subprocess.run(out, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-2000:]
        peak_mib[rows] = float(done.stdout)
    assert peak_mib[320_000] < peak_mib[40_000] + 150, peak_mib  # for 60 MiB more text


# ---- raw rows in the ids of a preparation, with or without labels

SPLIT = ByFile(train=("a.csv",), test=("b.csv",))
OF_FILES = dataclasses.replace(SCHEMA, split=SPLIT)
WITHOUT = [name for name in NAMES if name not in ("click", "bought", "weight")]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A directory with two files prepared in `table`; the second file is the test split."""
    directory = tmp_path_factory.mktemp("raw")
    for seed, name in enumerate(("a.csv", "b.csv")):
        write(directory / name, table(150, seed))
    prepare([directory / "a.csv", directory / "b.csv"], directory / "table", OF_FILES, **SMALL)
    return directory


def joined(blocks):
    blocks = list(blocks)
    return {key.removeprefix("ids."): np.concatenate([block[key] for block in blocks]) for key in blocks[0]}


@pytest.mark.parametrize("name", ["b.csv", "c.csv.gz", "c.parquet", "c.txt"])
def test_raw_rows_are_those_of_the_preparation(prepared, name):
    """In any format, with vocabularies, moments and rare categories of the training rows alone."""
    schema = dataclasses.replace(OF_FILES, columns=NAMES) if name == "c.txt" else OF_FILES
    if name != "b.csv":
        write(prepared / name, table(150, 1), header=name != "c.txt")
    found, wanted = (
        joined(read_rows([prepared / name], schema, prepared / "table")),
        read_all(prepared / "table", "test"),
    )
    assert has_labels([prepared / name], schema)
    assert found.keys() == wanted.keys() and len(found["label"]) == 150
    for key in wanted:
        np.testing.assert_array_equal(found[key], wanted[key], err_msg=key)
    assert (found["sparse"] != joined(read_rows([prepared / "a.csv"], schema if name != "c.txt" else OF_FILES,
                                                    prepared / "table"))["sparse"]).any()  # fmt: skip


@pytest.mark.parametrize("name", ["d.csv", "d.parquet"])
def test_rows_without_labels_and_weights_have_the_same_ids(prepared, name):
    path, wanted = write(prepared / name, table(150, 1), names=WITHOUT), read_all(prepared / "table", "test")
    assert not has_labels([path], OF_FILES)
    found = joined(read_rows([path], OF_FILES, prepared / "table", labelled=False))
    assert found.keys() == wanted.keys() - {"label", "weight"}
    for key in found:
        np.testing.assert_array_equal(found[key], wanted[key], err_msg=key)


def test_what_cannot_be_mapped_is_refused_by_name(prepared, tmp_path):
    some = write(tmp_path / "some.csv", table(9), names=[name for name in NAMES if name != "bought"])
    with pytest.raises(ValueError, match="of the 2 labels click, bought the files have: some.csv 1. Give all, or none"):
        has_labels([some], OF_FILES)
    with pytest.raises(ValueError, match="the files have: b.csv 2, none.csv 0"):
        has_labels([prepared / "b.csv", write(tmp_path / "none.csv", table(9), names=WITHOUT)], OF_FILES)
    other = Schema(label="click", features=[Categorical("user")], split=SPLIT)
    with pytest.raises(ValueError, match="was prepared with another schema"):
        next(read_rows([prepared / "b.csv"], other, prepared / "table"))
    bad = table(9)
    bad[4]["click"] = "maybe"
    with pytest.raises(ValueError, match=r"bad.csv, line 6: 'click' is 'maybe', but it is 0 or 1.* every row is pred"):
        next(read_rows([write(tmp_path / "bad.csv", bad)], OF_FILES, prepared / "table"))
    pl.DataFrame({name: [] for name in NAMES}).write_parquet(tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match="empty.parquet has no rows"):
        has_labels([tmp_path / "empty.parquet"], OF_FILES)


def test_vocabularies_tell_what_rows_stand_for_and_back(tmp_path):
    """Rows as the preparation has given them, from and to what the file says, in every kind of table."""
    rows = table(200)
    prepare([write(tmp_path / "a.csv", rows)], tmp_path / "out", SCHEMA, **SMALL)
    known, tables = open_vocabularies(tmp_path / "out"), ("user", "item", "part", "when")
    assert known.keys() == {*tables, "tags"}
    found = joined(read_rows([tmp_path / "a.csv"], SCHEMA, tmp_path / "out"))
    texts = lambda name: [given_(row[name]) or None for row in rows]
    for column, name in enumerate(tables):
        np.testing.assert_array_equal(known[name].encode(texts(name)), found["sparse"][:, column], err_msg=name)
    assert known["item"].decode(found["sparse"][:, 1]) == texts("item")
    named = known["user"].decode(found["sparse"][:, 0])
    assert all(name in (user, "<unknown>") for name, user in zip(named, texts("user"), strict=True))
    assert None in named and "<unknown>" in named and (known["user"].encode(named) == found["sparse"][:, 0]).all()
    assert known["when"].decode([0, 1, 2, 3, -1]) == [None, "below 3", "3 to 7.5", "from 7.5", None]
    tags = [[*filter(None, given_(row["tags"]).split(";")), None, None][:2] for row in rows]
    assert [known["tags"].decode(row) for row in found["tags"]] == tags
    with pytest.raises(ValueError, match="the table 'part' hashes: a row of it stands for many"):
        known["part"].decode([1])
    prepare([write(tmp_path / "b.csv", table(200, 1))], tmp_path / "other", SCHEMA, **SMALL)
    (tmp_path / "other" / "vocabulary.npz").replace(tmp_path / "out" / "vocabulary.npz")
    with pytest.raises(ValueError, match="vocabulary.npz is of another preparation"):
        open_vocabularies(tmp_path / "out")


def test_a_directory_of_part_files_is_its_files_by_name(tmp_path):
    rows, parts = table(90), tmp_path / "parts"
    parts.mkdir()
    for number in (1, 0):
        write(parts / f"part-{number}.csv", rows[45 * number : 45 * (number + 1)])
    (parts / "_SUCCESS").touch()
    (parts / ".part-0.csv.crc").write_bytes(b"crc")
    prepare([write(tmp_path / "whole.csv", rows)], tmp_path / "a", SCHEMA, **SMALL)
    prepare([parts], tmp_path / "b", SCHEMA, **SMALL)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert has_labels([parts], SCHEMA) and len(joined(read_rows([parts], SCHEMA, tmp_path / "b"))["label"]) == 90
    for place, rule in (("b", "b is no file: give raw files"), ("none", "none has no files"), ("", "holds the direc")):
        (tmp_path / "none").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=rule):
            prepare([tmp_path / place], tmp_path / "c", SCHEMA)


@pytest.mark.parametrize("split", [split for split, _ in SPLITS.values()] + [AtRandom(0.6, 0.2, 3), SPLIT])
def test_a_prepared_table_knows_its_schema(tmp_path, split):
    schema = dataclasses.replace(SCHEMA, split=split, columns=(*NAMES, "day"), separator="\t", quote=False)
    assert restored(json.loads(json.dumps(schema.described()))) == schema
    if split is SPLIT:
        prepare([write(tmp_path / name, table(30, seed)) for seed, name in enumerate(("a.csv", "b.csv"))],
                tmp_path / "out", OF_FILES)  # fmt: skip
        assert schema_of(tmp_path / "out") == OF_FILES
        prepare_criteo([write_lines(tmp_path / "train.txt", criteo_lines(30))], tmp_path / "criteo")
        with pytest.raises(ValueError, match="holds Criteo rows, prepared without a schema"):
            schema_of(tmp_path / "criteo")


# ---- ready-made schemas, and schemas that contradict themselves


def test_criteo_by_its_schema_is_criteo_by_its_own_preparation(tmp_path):
    path = write_lines(tmp_path / "train.txt", criteo_lines(300))
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
    "a table that is shared itself": (
        lambda: Schema(label="y", features=[USER, Categorical("b", share="user"), Categorical("c", share="b")]),
        "'c' shares the table of 'b', which is no Categorical here with a table of its own",
    ),
    "another min_count of a column that shares a table": (
        lambda: Schema(label="y", features=[USER, Categorical("b", 3, share="user")]),
        "min_count=3 of 'b' is not that of 'user'",
    ),
    "another min_count for a shared table": (
        lambda: Schema(label="y", features=[USER, Sequence("s", share="user", min_count=1)]),
        "min_count=1 of 's' is not that of 'user', whose table it shares, 2: leave it out",
    ),
    "another hash_cap for a shared table": (
        lambda: Schema(label="y", features=[USER, MultiHot("s", share="user", hash_cap=9)]),
        "hash_cap=9 of 's' is not that of 'user', whose table it shares, None: leave it out",
    ),
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
