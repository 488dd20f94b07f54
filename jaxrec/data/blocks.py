"""Prepared rows on disk: array_record shards of blocks, registered with tfds; every file is whole or absent.

Blocks hold Criteo columns unless a `Layout` describes others.

Legend: n rows of a block.
"""

import errno
import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrec.files import atomic_write, local_path, sync

DONE, METADATA, PROGRESS = "dataset_info.json", "metadata.json", "progress.json"
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}"
SPLITS = ("train", "validation", "test")
_IDS, _KEY = "ids.", "key."  # prefixes of the columns of lookups, in blocks with several lookups, and of keys


class Layout(NamedTuple):
    """Columns of the blocks of a dataset."""

    name: str  # of the dataset, prefix of its shard names
    columns: dict[str, tuple[tuple[int, ...], str]]  # {column: (shape of one row, dtype)}


CRITEO = Layout("criteo", {"label": ((), "uint8"), "dense": ((13,), "float32"), "ids": ((26,), "int32")})


def layout_of(metadata: dict[str, Any]) -> Layout:
    """Return the layout recorded in a dataset's metadata or progress notes; `CRITEO` if none is recorded."""
    if "layout" not in metadata:
        return CRITEO
    kept = metadata["layout"]
    columns = {name: (tuple(shape), dtype) for name, (shape, dtype) in kept["columns"].items()}
    return Layout(kept["name"], columns)


def write_blocks(
    directory: Path, name: str, index: int, rows: dict[str, np.ndarray], block_rows: int, layout: Layout
) -> int:
    """Write one shard of a split, the columns of the layout cut into blocks; return its size in bytes."""
    from array_record.python.array_record_module import ArrayRecordWriter

    serialize, path = _serializer(layout), _shard_path(directory, name, index, layout)
    with atomic_write(path) as partial:
        try:
            writer = ArrayRecordWriter(str(partial), "group_size:1")
            for start in range(0, len(rows["label"]), block_rows):
                block = {key: rows[key][start : start + block_rows] for key in layout.columns}
                writer.write(serialize(block))
            writer.close()
        except RuntimeError as error:
            raise _os_error(error, path) from error
    return path.stat().st_size


def _os_error(error: RuntimeError, path: Path) -> OSError:
    """Derive an OSError from the message of a RuntimeError, the only type that array_record raises for files."""
    kinds = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)
    kind = next((kind for kind in kinds if os.strerror(kind) in str(error)), errno.EIO)
    return OSError(kind, os.strerror(kind), str(path))


def _shard_path(directory: Path, name: str, index: int, layout: Layout) -> Path:
    return directory / f"{layout.name}-{name}.array_record-{index:05d}"


def _features(layout):
    features = tfds_module().features
    # As bytes, since a list of numbers would be decoded value by value.
    column = lambda shape, dtype: features.Tensor(
        shape=(None, *shape), dtype=np.dtype(dtype), encoding=features.Encoding.BYTES
    )
    return features.FeaturesDict({name: column(*each) for name, each in layout.columns.items()})


def _serializer(layout: Layout) -> Callable[[dict[str, np.ndarray]], bytes]:
    """Like `features.serialize_example`, but with the same bytes in every process: protobuf maps are unordered."""
    from tensorflow_datasets.core.example_serializer import ExampleSerializer

    features = _features(layout)
    serializer = ExampleSerializer(features.get_serialized_info())
    return lambda block: serializer.get_tf_example(features.encode_example(block)).SerializeToString(deterministic=True)


def register(directory: Path, state: dict[str, Any], cardinalities: list[int]) -> None:
    """Mark the dataset complete: write the tfds metadata aside, then move it into place, `dataset_info.json` last."""
    beside = directory / "metadata.partial"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        _write_metadata(directory, beside, state, cardinalities)
        for path in sorted(beside.iterdir(), key=lambda path: path.name == DONE):
            if not path.is_symlink():
                sync(path)
                os.replace(path, directory / path.name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # frees the space if the disk is full
    sync(directory)


def _write_metadata(directory, beside, state, cardinalities):
    tfds, layout = tfds_module(), layout_of(state)
    template = functools.partial(
        tfds.core.ShardedFileTemplate, dataset_name=layout.name, filetype_suffix="array_record", template=_TEMPLATE
    )
    block_rows = state["options"]["block_rows"]
    for shard in directory.glob(f"{layout.name}-*.array_record-?????"):
        # The builder of tfds expects the data beside its metadata.
        (beside / shard.name).symlink_to(shard.resolve())
    tfds.folder_dataset.write_metadata(
        data_dir=beside, features=_features(layout), version="1.0.0", check_data=False,
        split_infos=[
            tfds.core.SplitInfo(
                name=name, shard_lengths=[-(-shard["rows"] // block_rows) for shard in shards],
                num_bytes=sum(shard["bytes"] for shard in shards),
                filename_template=template(data_dir=directory, split=name),
            )
            for name, shards in shards_of(state).items()
        ],
        filename_template=template(data_dir=beside),
        metadata=tfds.core.MetadataDict(_metadata(state, cardinalities)),
    )  # fmt: skip


def shards_of(state: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return {split: notes of its shards} from the progress notes, in the order of `SPLITS`."""
    of = {name: [shard for shard in state["shards"] if shard["split"] == name] for name in SPLITS}
    return {name: shards for name, shards in of.items() if shards}


def shard_bytes(state: dict[str, Any]) -> dict[str, list[int]]:
    """Return {split: size in bytes of each of its shards} from the progress notes."""
    return {name: [shard["bytes"] for shard in shards] for name, shards in shards_of(state).items()}


def _metadata(state, cardinalities):
    of = shards_of(state)
    rows = {name: sum(shard["rows"] for shard in shards) for name, shards in of.items()}
    return {
        "cardinalities": cardinalities,
        "rows": rows,
        "label_mean": {name: sum(shard["clicks"] for shard in shards) / rows[name] for name, shards in of.items()},
        "skipped_rows": len(state["bad_rows"]),
        "options": state["options"],
        "sources": state["sources"],
        "texts": state["texts"],
        **{key: state[key] for key in ("layout", "table", "unknown_share") if key in state},
        "shard_bytes": shard_bytes(state),
    }


class Split:
    """The blocks of one split, readable in any order; a source for `Loader`.

    Attributes:
      metadata: as returned by `prepare`.
      rows: number of rows of each block.
    """

    def __init__(self, source, metadata: dict[str, Any], directory: Path, name: str):
        self._source, self.metadata, self._directory, self._name = source, metadata, directory, name
        self._layout = layout_of(metadata)
        block_rows, rows = metadata["options"]["block_rows"], metadata["rows"][name]
        self.rows = [min(block_rows, rows - start) for start in range(0, rows, block_rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one block.

        A block of a Criteo log is {'label': u8[n], 'dense': f32[n, 13], 'ids': i32[n, 26]}. A block of a table is
        {'label': f32[n] or f32[n, K], 'dense': f32[n, N], 'ids': {'sparse': i32[n, F], bag: i32[n, H]}}, and has
        'weight': f32[n] if its schema does, and 'keys': {key: S[n]}, which are no part of a batch.

        Raises:
          IndexError: no such block.
          ValueError: the shard is damaged or missing; names the file and the remedy.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of split {self._name!r}: blocks are numbered from 0 to {len(self) - 1}.")
        try:
            block = self._source[index]
            found = {key: len(block[key]) for key in self._layout.columns}
        except Exception as error:  # of many types, from array_record, protobuf and tfds
            raise self._unreadable(index, str(error).partition("\n")[0][:200]) from error
        if set(found.values()) != {self.rows[index]}:
            raise self._unreadable(index, f"it holds {found} rows instead of {self.rows[index]}")
        if "ids" in found:
            return block
        columns = {key: np.asarray(block[key]) for key in found}
        ids = {key.removeprefix(_IDS): columns.pop(key) for key in found if key.startswith(_IDS)}
        keys = {key.removeprefix(_KEY): as_texts(columns.pop(key)) for key in found if key.startswith(_KEY)}
        rest = {"keys": keys} if keys else {}
        return {"dense": np.zeros((self.rows[index], 0), np.float32), **columns, "ids": ids, **rest}

    def _unreadable(self, index, why) -> ValueError:
        shard, block = divmod(index, self.metadata["options"]["blocks_per_shard"])
        path = _shard_path(self._directory, self._name, shard, self._layout)
        return ValueError(f"{path}, block {block} cannot be read ({why}). {_remedy(self._directory)}")


def as_texts(keys: np.ndarray) -> np.ndarray:
    """Return keys u8[n, bytes] as UTF-8, S[n]."""
    return np.ascontiguousarray(keys).view(f"S{keys.shape[1]}")[:, 0]


def keys_of(source: Any, name: str) -> np.ndarray:
    """Return a key of all rows of a source of blocks, in their order, S[n]."""
    return np.concatenate([source[block]["keys"][name] for block in range(len(source.rows))])


def _remedy(directory: Path) -> str:
    return f"Restore the file, or delete {directory} and run the preparation again."


def open_split(directory: str | Path, name: str) -> Split:
    """Open the 'train', 'validation' or 'test' split of a prepared directory.

    Args:
      directory: as given to `prepare`.
      name: name of the split.

    Raises:
      ValueError: the preparation is incomplete, there is no such split, or a file is missing, truncated or damaged;
        names the file and the remedy. Damage inside a shard is found only when its block is read.
    """
    directory = local_path(directory)
    metadata = read_metadata(directory)
    if name not in metadata["rows"]:
        raise ValueError(f"{directory} has no split {name!r}, only {sorted(metadata['rows'])}.")
    check_files(directory, metadata)
    try:
        source = tfds_module().builder_from_directory(directory).as_data_source(name)
        blocks = len(source)
    except (ImportError, OSError):
        raise
    except Exception as error:  # of many types, from protobuf and tfds
        why = str(error).partition("\n")[0][:200]
        raise ValueError(f"{directory / DONE} cannot be read ({why}). {_remedy(directory)}") from error
    split = Split(source, metadata, directory, name)
    if blocks != len(split):
        raise ValueError(
            f"{directory / DONE} tells of {blocks} blocks of split {name!r}, {METADATA} of {len(split)}: one of them "
            f"is damaged. {_remedy(directory)}"
        )
    return split


def is_prepared(path: Path) -> bool:
    """Whether a path is the directory of a preparation, complete or not."""
    return any((path / name).is_file() for name in (DONE, PROGRESS))


def read_metadata(directory: Path) -> dict[str, Any]:
    """Read the metadata of a complete preparation."""
    if not (directory / DONE).exists():
        raise ValueError(f"{directory} is no complete dataset: run the preparation (again), it goes on where it was.")
    keys = ("cardinalities", "rows", "label_mean", "skipped_rows", "options", "sources")
    return read_json(directory / METADATA, keys, _remedy(directory))


def read_json(path: Path, keys: tuple[str, ...], remedy: str) -> dict[str, Any]:
    """Read a JSON object; raise ValueError with the remedy if the file is missing, damaged or lacks one of the keys."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing. {remedy}") from error
    except ValueError as error:
        raise ValueError(f"{path} is cut or damaged ({error}). {remedy}") from error
    missing = [key for key in keys if not isinstance(content, dict) or key not in content]
    if missing:
        raise ValueError(f"{path} is cut or damaged: it has no {', '.join(missing)}. {remedy}")
    return content


def check_files(directory: Path, metadata: dict[str, Any]) -> None:
    """Raise ValueError if a shard of a dataset is missing or differs in size from what was written."""
    options = metadata["options"]
    shard_rows = options["block_rows"] * options["blocks_per_shard"]
    # Preparations of earlier versions recorded no sizes.
    sizes = {name: [None] * -(-rows // shard_rows) for name, rows in metadata["rows"].items()}
    check_shards(directory, metadata.get("shard_bytes", sizes), layout_of(metadata))


def check_shards(directory: Path, sizes: Mapping[str, Sequence[int | None]], layout: Layout) -> None:
    """Raise ValueError if a shard is missing or differs in size from `sizes`, bytes per shard of each split."""
    for name, of_split in sizes.items():
        for index, size in enumerate(of_split):
            path = _shard_path(directory, name, index, layout)
            if not path.exists():
                raise ValueError(f"{path} is missing. {_remedy(directory)}")
            found = path.stat().st_size
            if size not in (None, found):
                raise ValueError(
                    f"{path} has {found} bytes instead of {size}: it was cut or replaced. {_remedy(directory)}"
                )


def tfds_module():
    """Import tensorflow_datasets; an ImportError says what to install."""
    try:
        import array_record  # noqa: F401
        import polars  # noqa: F401
        import tensorflow_datasets
    except ImportError as error:
        raise ImportError(f"prepared datasets need {error.name}: pip install 'jaxrec[data]'") from error
    return tensorflow_datasets
