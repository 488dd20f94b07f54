"""Raw rows for a trained model, with the categories and moments of a prepared table; and what its rows stand for."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxrec.data.sources import is_parquet, local_files
from jaxrec.data.tabular.encode import arrays, buckets, categories, encoders, rows_of, table_rows
from jaxrec.data.tabular.histories import before, open_logs
from jaxrec.data.tabular.preparation import look_of, metadata_of
from jaxrec.data.tabular.reading import read_pieces, read_table
from jaxrec.data.tabular.schema import Categorical, Schema, is_bucketed, restored
from jaxrec.data.tabular.splits import ByRows
from jaxrec.files import local_path


def has_labels(sources: Sequence[str | Path], schema: Schema) -> bool:
    """Whether raw files have the columns of the labels.

    Args:
      sources: text, plain or compressed by gzip, or Parquet.
      schema: schema of the prepared table.
    """
    labels, found = [label.column for label in schema.label], {}
    for path, names in _columns_of(sources, schema).items():
        found[path] = sum(label in names for label in labels)
    if set(found.values()) - {0, len(labels)} or len(set(found.values())) > 1:
        said = ", ".join(f"{path.name} {number}" for path, number in found.items())
        raise ValueError(f"of the {len(labels)} labels {', '.join(labels)} the files have: {said}. Give all, or none.")
    return len(labels) in found.values()


def keys_in(sources: Sequence[str | Path], schema: Schema) -> tuple[str, ...]:
    """Return the keys of a schema that all raw files have; arguments as for `has_labels`."""
    columns = _columns_of(sources, schema).values()
    return tuple(name for name in schema.keys if all(name in names for names in columns))


def _columns_of(sources, schema) -> dict[Path, Sequence[str]]:
    import polars as pl

    found: dict[Path, Sequence[str]] = {}
    for path in local_files(sources):
        piece = next(iter(read_pieces([path], _as_read(schema, labelled=False))))
        found[path] = pl.scan_parquet(path).collect_schema().names() if is_parquet(path) else piece.names
    return found


def read_rows(
    sources: Sequence[str | Path], schema: Schema, directory: str | Path, labelled: bool = True
) -> Iterator[dict[str, np.ndarray]]:
    """Stream the rows of raw files in order, with the ids of a prepared table.

    A `History` holds what the user did before in the rows that were prepared, and nothing of these files: the rows that
    were prepared have the histories that they had there.

    Args:
      sources: as for `has_labels`.
      schema: schema of the prepared table; its split is ignored.
      directory: directory of the prepared table.
      labelled: whether to read labels and weights; if not, the files need not have them.

    Yields:
      Blocks as from `encode.arrays`, without `label` and `weight` if not labelled, and without keys that a file lacks.
    """
    directory = local_path(directory)
    table = metadata_of(directory)["table"]
    look, logs = look_of(directory, table, schema), open_logs(directory, schema, table)
    times, schema = schema.times, _as_read(schema, labelled, keys_in(sources, schema))
    ids_of, moments = encoders(schema, look.vocabularies), look.summary["moments"]
    histories = functools.partial(before, logs)
    for piece in read_pieces(local_files(sources), schema):
        rows = read_table(piece, schema, times)
        if rows.bad_rows:
            raise ValueError(f"{rows.why}. Correct it: every row is predicted.")
        yield arrays(schema, rows.frame, ids_of, moments, histories)


def schema_of(directory: str | Path) -> Schema:
    """Return the schema by which a table was prepared, without `gather`.

    Args:
      directory: directory of the prepared table.

    Raises:
      ValueError: the preparation is incomplete, of Criteo's files, or by an earlier version.
    """
    return restored(metadata_of(local_path(directory))["options"]["schema"])


def mapping_of(directory: str | Path) -> tuple[Schema, dict[str, list[str]], dict[str, list[float]]]:
    """Return how a prepared table maps values.

    Args:
      directory: directory of the prepared table.

    Returns:
      Its schema; {table: the categories of its rows from 2 on}, of the tables that do not hash; {dense column: [mean,
      standard deviation]} of the training rows.

    Raises:
      ValueError: as for `schema_of`, or vocabulary.npz is missing, damaged or of another preparation.
    """
    directory = local_path(directory)
    metadata = metadata_of(directory)
    schema = restored(metadata["options"]["schema"])
    look = look_of(directory, metadata["table"], schema)
    return schema, look.vocabularies, look.summary["moments"]


class Vocabulary(NamedTuple):
    """What the rows of a table stand for.

    Attributes:
      decode: row numbers -> their categories, `None` for a missing one (row 0, and -1 in bags), '<unknown>' for row 1,
        the bounds of a bucket; raises ValueError if the table hashes.
      encode: categories as a file has them, None where missing -> rows, i32[n], as in the preparation.
    """

    decode: Callable[[npt.ArrayLike], list[str | None]]
    encode: Callable[[Iterable[str | None]], np.ndarray]


def open_vocabularies(directory: str | Path) -> dict[str, Vocabulary]:
    """Open the categories of all tables of a prepared table.

    Args:
      directory: directory of the prepared table.

    Returns:
      {table, or Categorical that shares one: its vocabulary}; a bag that shares a table has none of its own.

    Raises:
      ValueError: as for `mapping_of`.
    """
    schema, categories, _ = mapping_of(directory)
    ids_of = functools.cache(lambda: encoders(schema, categories))
    features = {feature.column: feature for feature in schema.features}
    found = {
        table: _vocabulary(features[table], schema, categories, ids_of) for table in table_rows(schema, categories)
    }
    return found | {f.column: found[f.share] for f in schema.features if isinstance(f, Categorical) and f.share}


def _vocabulary(feature: Any, schema: Schema, known: dict[str, list[str]], ids_of: Callable[[], Any]) -> Vocabulary:
    import polars as pl

    def encode(texts):
        series = categories(pl.Series(texts, dtype=pl.String), schema.absent)
        if not is_bucketed(feature):
            return rows_of(ids_of()[feature.column], series)
        return buckets(feature, series.cast(pl.Float64).to_numpy())

    def decode(rows):
        if not is_bucketed(feature) and feature.hash_cap is not None:
            raise ValueError(
                f"the table {feature.column!r} hashes: a row of it stands for many categories, unknown ones."
            )
        return [words[row] if row > 0 else None for row in np.asarray(rows).ravel().tolist()]

    if is_bucketed(feature):
        bounds = [f"{bound:g}" for bound in feature.buckets]
        between = [f"{low} to {high}" for low, high in itertools.pairwise(bounds)]
        words = [None, f"below {bounds[0]}", *between, f"from {bounds[-1]}"]
    else:
        words = [None, "<unknown>", *known.get(feature.column, [])]
    return Vocabulary(decode, encode)


def _as_read(schema: Schema, labelled: bool, keys: tuple[str, ...] = ()) -> Schema:
    """Return the schema without its split, without labels and weights if not labelled, and with some of its keys."""
    found = dataclasses.replace(schema, split=ByRows(), keys=keys)
    if not labelled:
        object.__setattr__(found, "label", ())  # the constructor requires a label
        object.__setattr__(found, "weight", None)
    return found
