"""Raw rows of a table in the ids of a preparation, with or without labels."""

import dataclasses

import numpy as np
import polars as pl
import pytest
from test_tabular import NAMES, SCHEMA, SMALL, read_all, table, write

from jaxrec.data.tabular import ByFile, Categorical, Schema, prepare
from jaxrec.data.tabular.raw import has_labels, read_rows

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
