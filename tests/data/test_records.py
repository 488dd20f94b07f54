"""Records of a tfds data set as a table: both hold the same values, and nothing is downloaded."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import tensorflow_datasets as tfds

from jaxrec.data.tabular import open_table
from jaxrec.data.tabular.records import export_records

ROOT = Path(__file__).parents[2]
COLUMNS = ("click", "user/name", "price", "tags")
SCHEMA = """
from jaxrec.data.tabular import ByFile, Categorical, Dense, Label, MultiHot, Schema
schema = Schema(
    label="click", features=[Categorical("user/name", min_count=1), Dense("price"), MultiHot("tags", at_most=3)],
    split=ByFile(train=("train.parquet",), test=("test.parquet",)),
)
"""


def examples(split, number):
    rng = np.random.default_rng(len(split))
    for row in range(number):
        yield row, {
            "click": int(rng.integers(2)), "user": {"name": f"ü{rng.integers(9)}", "seen": [[1, 2], [3, 4]]},
            "price": float(rng.normal()), "tags": [f"t{tag}" for tag in rng.integers(0, 5, row % 4)],
        }  # fmt: skip


class TinyClicks(tfds.core.GeneratorBasedBuilder):
    """Forty clicks."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        user = {"name": tfds.features.Text(), "seen": tfds.features.Tensor(shape=(2, 2), dtype=np.int64)}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
            "click": tfds.features.Scalar(np.int64), "user": user, "price": tfds.features.Scalar(np.float32),
            "tags": tfds.features.Sequence(tfds.features.Text()),
        }))  # fmt: skip

    def _split_generators(self, manager):
        return {"train": examples("train", 30), "test": examples("test", 10)}

    def _generate_examples(self):
        raise NotImplementedError


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tfds")
    TinyClicks(data_dir=str(directory), file_format="array_record").download_and_prepare()
    return directory


def test_the_files_hold_the_records_in_their_order(prepared, tmp_path):
    seen: list[int] = []
    given = {"data_directory": prepared, "progress": seen.append}
    paths = export_records("tiny_clicks", (), COLUMNS, tmp_path / "records", **given)
    assert [path.name for path in paths] == ["train.parquet", "test.parquet"] and sum(seen) == 40
    source = tfds.builder("tiny_clicks", data_dir=str(prepared)).as_data_source(split="train")
    for row, record in zip(pl.read_parquet(paths[0]).iter_rows(named=True), source, strict=True):
        assert row["user/name"] == record["user"]["name"].decode() and row["click"] == record["click"]
        assert row["tags"] == [tag.decode() for tag in record["tags"]] and row["price"] == pytest.approx(
            record["price"]
        )
    before = [path.stat().st_mtime_ns for path in paths]
    assert export_records("tiny_clicks", ["train"], COLUMNS, tmp_path / "records", **given) == paths[:1]
    assert [path.stat().st_mtime_ns for path in paths] == before and sum(seen) == 40  # nothing is rewritten


def test_what_cannot_be_had_is_refused_by_name(prepared, tmp_path):
    export = lambda name, splits=("train",), columns=COLUMNS, at=prepared: export_records(
        name, splits, columns, tmp_path / "records", data_directory=at
    )
    with pytest.raises(ValueError, match="tfds has no data set 'no_such_clicks'"):
        export("no_such_clicks")
    with pytest.raises(ValueError, match="tiny_clicks is not prepared in .*, and nothing is downloaded here"):
        export("tiny_clicks", at=tmp_path)
    with pytest.raises(ValueError, match="has no split 'validation', only train, test"):
        export("tiny_clicks", ["validation"])
    with pytest.raises(ValueError, match="has no feature 'user', only click"):
        export("tiny_clicks", columns=["user"])
    with pytest.raises(ValueError, match=r"'user/seen' is an array of shape \(2, 2\)"):
        export("tiny_clicks", columns=["user/seen"])
    assert not list((tmp_path / "records").glob("*.parquet*"))
    export("tiny_clicks")
    with pytest.raises(ValueError, match="holds records of .*: remove it"):
        export("tiny_clicks", columns=["click"])


def test_a_data_set_in_another_format_says_how_to_prepare_it(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(tfds.core.DatasetInfo, "file_format", property(lambda info: tfds.core.FileFormat.TFRECORD))
    with pytest.raises(
        ValueError, match="prepared as tfrecord, which TensorFlow alone reads.*file_format='array_record'"
    ):
        export_records("tiny_clicks", (), COLUMNS, tmp_path, data_directory=prepared)


def run_prepare(directory, *arguments):
    command = [sys.executable, str(ROOT / "experiments" / "prepare.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)


@pytest.mark.process
def test_prepare_reads_a_data_set_of_tfds_by_a_schema(prepared, tmp_path):
    (tmp_path / "schema.py").write_text(SCHEMA)
    flags = ("--schema", "schema.py", "--directory", "table", "--tfds-directory", prepared)
    done = run_prepare(tmp_path, *flags, "--sources", "tfds:tiny_clicks@train,test")
    assert done.returncode == 0, done.stderr
    rows = open_table(tmp_path / "table", "train")
    assert sum(rows.rows) == 30 and rows[0]["ids"]["tags"].shape == (30, 3)
    for more, why in [
        (("--sources", "tfds:tiny_clicks", "b.csv"), "a tfds data set stands alone"),
        (("--sources", "schema.py"), "--tfds-directory is for --sources tfds:NAME"),
    ]:
        done = run_prepare(tmp_path, *flags, *more)
        assert done.returncode == 1 and why in done.stderr and "Traceback" not in done.stderr
    done = run_prepare(tmp_path, "--sources", "tfds:tiny_clicks", "--directory", "other")
    assert done.returncode == 1 and "are of --schema" in done.stderr
