"""What is on disk: array_record shards of blocks, registered with tfds and read back; every file whole or absent.

Legend: n rows of a block, N = 13 dense features, F = 26 fields.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.data.criteo.parse import DENSE, FIELDS

DONE = "dataset_info.json"
_NAME, _TEMPLATE = "criteo", "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}"
_CITATION = "Criteo Labs, Display Advertising Challenge (Kaggle, 2014) and Terabyte Click Logs (2015)."
_LICENSE = "The terms of the raw files hold: Criteo's allow non-commercial research and forbid distribution."


def write_blocks(directory: Path, name: str, index: int, rows: dict[str, np.ndarray], block_rows: int) -> None:
    """Writes one shard of a split: label u8, dense f32 and ids i32 rows, cut into blocks."""
    from array_record.python.array_record_module import ArrayRecordWriter

    serialize = _serializer()
    with aside(_shard_path(directory, name, index)) as partial:
        writer = ArrayRecordWriter(str(partial), "group_size:1")
        for start in range(0, len(rows["label"]), block_rows):
            block = {key: rows[key][start : start + block_rows] for key in ("label", "dense", "ids")}
            writer.write(serialize(block))
        writer.close()


def _shard_path(directory: Path, name: str, index: int) -> Path:
    return directory / f"{_NAME}-{name}.array_record-{index:05d}"


def _features():
    tfds = tfds_module()
    kinds = {"label": ((None,), np.uint8), "dense": ((None, DENSE), np.float32), "ids": ((None, FIELDS), np.int32)}
    return tfds.features.FeaturesDict(
        {
            # Bytes: as lists of numbers a block would be decoded value by value.
            name: tfds.features.Tensor(shape=shape, dtype=dtype, encoding=tfds.features.Encoding.BYTES)
            for name, (shape, dtype) in kinds.items()
        }
    )


def _serializer() -> Callable[[dict[str, np.ndarray]], bytes]:
    """Like `features.serialize_example`, but the same bytes in every process: protobuf maps have no order."""
    from tensorflow_datasets.core.example_serializer import ExampleSerializer

    features = _features()
    serializer = ExampleSerializer(features.get_serialized_info())
    return lambda block: serializer.get_tf_example(features.encode_example(block)).SerializeToString(deterministic=True)


def register(directory, state, cardinalities):
    """Names the dataset complete: everything that tfds wants is written aside, `dataset_info.json` comes last."""
    tfds = tfds_module()
    block_rows, shards = state["options"]["block_rows"], state["shards"]
    splits, totals = [], {}
    for name in dict.fromkeys(shard["split"] for shard in shards):
        mine = [shard for shard in shards if shard["split"] == name]
        totals[name] = (sum(s["rows"] for s in mine), sum(s["clicks"] for s in mine))
        template = tfds.core.ShardedFileTemplate(
            data_dir=directory, dataset_name=_NAME, split=name, filetype_suffix="array_record", template=_TEMPLATE
        )
        lengths = [-(-shard["rows"] // block_rows) for shard in mine]
        size = sum(_shard_path(directory, name, index).stat().st_size for index in range(len(mine)))
        splits.append(tfds.core.SplitInfo(name=name, shard_lengths=lengths, num_bytes=size, filename_template=template))
    metadata = {
        "cardinalities": cardinalities,
        "rows": {name: rows for name, (rows, _) in totals.items()},
        "label_mean": {name: clicks / rows for name, (rows, clicks) in totals.items()},
        "skipped_rows": len(state["bad_rows"]),
        "options": state["options"],
        "sources": state["sources"],
    }
    aside = directory / "metadata.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for shard in directory.glob(f"{_NAME}-*.array_record-?????"):
        (aside / shard.name).symlink_to(shard.resolve())  # tfds wants to see the data beside its files
    tfds.folder_dataset.write_metadata(
        data_dir=aside, features=_features(), split_infos=splits, version="1.0.0", check_data=False,
        filename_template=tfds.core.ShardedFileTemplate(
            data_dir=aside, dataset_name=_NAME, filetype_suffix="array_record", template=_TEMPLATE
        ),
        citation=_CITATION, license=_LICENSE, metadata=tfds.core.MetadataDict(metadata),
    )  # fmt: skip
    for path in sorted(aside.iterdir(), key=lambda path: path.name == DONE):
        if not path.is_symlink():
            sync(path)
            os.replace(path, directory / path.name)
    shutil.rmtree(aside)
    sync(directory)


class Split:
    """The blocks of one split, read in any order; a source for `Loader`.

    Attributes:
      metadata: as `prepare` returns it.
      rows: rows of each block.
    """

    def __init__(self, source, metadata: dict[str, Any], name: str):
        self._source, self.metadata = source, metadata
        block_rows, rows = metadata["options"]["block_rows"], metadata["rows"][name]
        self.rows = [min(block_rows, rows - start) for start in range(0, rows, block_rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One block: {'label': u8[n], 'dense': f32[n, N], 'ids': i32[n, F]}."""
        return self._source[index]


def open_split(directory: str | Path, name: str) -> Split:
    """Opens the 'train' or 'test' split of a prepared directory.

    Errors:
      ValueError: the preparation is not complete, a shard is missing, or there is no such split.
    """
    directory = Path(directory)
    if not (directory / DONE).exists():
        raise ValueError(f"{directory} is no complete dataset: run the preparation (again), it goes on where it was.")
    metadata = json.loads((directory / "metadata.json").read_text())
    if name not in metadata["rows"]:
        raise ValueError(f"{directory} has no split {name!r}, only {sorted(metadata['rows'])}.")
    shard_rows = metadata["options"]["block_rows"] * metadata["options"]["blocks_per_shard"]
    for index in range(-(-metadata["rows"][name] // shard_rows)):
        if not (shard := _shard_path(directory, name, index)).exists():
            raise ValueError(f"{shard} is missing: delete the directory and run the preparation again.")
    return Split(tfds_module().builder_from_directory(directory).as_data_source(name), metadata, name)


def tfds_module():
    """tensorflow_datasets, or an ImportError that says what to install."""
    try:
        import array_record  # noqa: F401
        import polars  # noqa: F401
        import tensorflow_datasets
    except ImportError as error:
        raise ImportError(f"prepared datasets need {error.name}: pip install 'jaxrec[data]'") from error
    return tensorflow_datasets


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Yields a name to write to; what is written takes its place at once, or not at all."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    sync(partial)
    os.replace(partial, path)


def sync(path: Path) -> None:
    """Waits until a file or directory is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content) -> None:
    """Writes JSON whole or not at all."""
    with aside(path) as partial:
        partial.write_text(json.dumps(content))
