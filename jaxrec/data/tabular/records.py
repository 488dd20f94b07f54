"""Export of tfds data sets to files that `prepare` reads: one Parquet file per split, in record order.

Nothing is downloaded, and TensorFlow is not needed: the data set must already be prepared, in array_record.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.data.blocks import tfds_module
from jaxrec.files import Lock, atomic_write, local_path, make_directory, write_json

_ROWS = 1 << 14  # in memory at once
_ABOUT = "records.json"


def export_records(
    name: str,
    splits: Sequence[str],
    columns: Sequence[str],
    directory: str | Path,
    *,
    data_directory: str | Path | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[Path]:
    """Write splits of a prepared tfds data set as Parquet files; existing files are kept.

    Args:
      name: tfds name of the data set, such as 'movielens/100k-ratings:1.0.0'.
      splits: splits to export, in the order of the files; empty for all.
      columns: features to export, 'outer/inner' if nested: numbers, strings, or lists of them.
      directory: directory of the files, SPLIT.parquet; they may be deleted once the table is prepared.
      data_directory: data directory of tfds; None for its default.
      progress: called at intervals with the number of rows since the last call.

    Returns:
      The files.
    """
    builder = _builder(name, data_directory)
    wanted = list(splits) or list(builder.info.splits)
    _check(name, builder, wanted, columns)
    directory = local_path(directory)
    make_directory(directory)
    about = {"data_set": builder.info.full_name, "columns": list(columns)}
    with Lock(directory / "lock", f"writing the records of {name}"):
        known = directory / _ABOUT
        if known.exists() and (before := json.loads(known.read_text())) != about:
            raise ValueError(f"{directory} holds records of {before}, and {about} are expected: remove it.")
        write_json(known, about)
        paths = [directory / f"{split}.parquet" for split in wanted]
        for split, path in zip(wanted, paths, strict=True):
            if not path.exists():
                _write(builder, split, columns, path, progress or (lambda rows: None))
    return paths


def _builder(name, data_directory) -> Any:
    tfds = tfds_module()
    try:
        builder = tfds.builder(name, data_dir=None if data_directory is None else str(data_directory), try_gcs=False)
    except Exception as error:  # each data set is a module, whose code may raise anything
        why = str(error).strip().partition("\n")[0][:300]
        raise ValueError(f"tfds has no data set {name!r} ({type(error).__name__}: {why}).") from error
    if not builder.info.splits:
        raise ValueError(
            f"{name} is not prepared in {builder.data_dir}, and nothing is downloaded here. Prepare it: "
            f"tfds.builder({name!r}, file_format='array_record').download_and_prepare(), or say where it is."
        )
    return builder


def _check(name, builder, splits, columns) -> None:
    tfds = tfds_module()
    has, features = list(builder.info.splits), _leaves(builder.info.features)
    if missing := [split for split in splits if split not in has]:
        raise ValueError(f"{name} has no split {missing[0]!r}, only {', '.join(has)}.")
    if missing := [column for column in columns if column not in features]:
        raise ValueError(f"{name} has no feature {missing[0]!r}, only {', '.join(features)!s:.500}.")
    for column in columns:
        shape, dtype = features[column].shape, features[column].np_dtype
        if isinstance(dtype, dict) or len(shape) > 1 or np.dtype(dtype).kind not in "biufSUO":
            raise ValueError(
                f"the feature {column!r} is an array of shape {shape}: numbers and texts are columns, or lists of "
                "them. Leave it out of the schema."
            )
    if builder.info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
        raise ValueError(
            f"{name} is prepared as {builder.info.file_format.value}, which TensorFlow alone reads: prepare it with "
            "file_format='array_record'."
        )


def _leaves(features, prefix: str = "") -> dict[str, Any]:
    """Return all leaf features, {'outer/inner': feature}."""
    found: dict[str, Any] = {}
    for key, feature in features.items():
        is_dict = hasattr(feature, "items")
        found |= _leaves(feature, f"{prefix}{key}/") if is_dict else {prefix + key: feature}
    return found


def _write(builder, split, columns, path, progress) -> None:
    import pyarrow
    import pyarrow.parquet

    writer, features = None, _leaves(builder.info.features)
    with atomic_write(path) as partial:
        try:
            for records in _some(builder.as_data_source(split=split)):
                if writer is None:
                    schema = pyarrow.schema({column: _kind(pyarrow, features[column]) for column in columns})
                    writer = pyarrow.parquet.ParquetWriter(partial, schema)
                rows = {column: [_plain(column, record) for record in records] for column in columns}
                writer.write_table(pyarrow.table(rows, schema=schema))
                progress(len(records))
        except (pyarrow.ArrowException, TypeError) as error:
            why = str(error).partition("\n")[0][:200]
            raise ValueError(f"split {split!r}: a feature changes its kind from record to record ({why}).") from error
        finally:
            if writer is not None:
                writer.close()
        if writer is None:
            raise ValueError(f"split {split!r} has no records: leave it out.")


def _some(source) -> Iterator[list]:
    records = iter(source)
    while some := list(itertools.islice(records, _ROWS)):
        yield some


def _kind(pyarrow, feature) -> Any:
    """Return the Arrow type of a column by its feature, as a first value may be an empty list."""
    of_number = {"b": pyarrow.bool_(), "i": pyarrow.int64(), "u": pyarrow.int64(), "f": pyarrow.float64()}
    kind = of_number.get(np.dtype(feature.np_dtype).kind, pyarrow.string())
    return pyarrow.list_(kind) if len(feature.shape) else kind


def _plain(column: str, record) -> Any:
    """Return a feature of a record as a Python number, a string, or a list of them."""
    value = record
    for key in column.split("/"):
        value = value[key]
    plain = np.asarray(value).tolist()
    return [_text(column, one) for one in plain] if isinstance(plain, list) else _text(column, plain)


def _text(column, value):
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ValueError(f"the feature {column!r} holds {value[:20]!r}, which is no UTF-8 text.") from None
