"""Raw rows for a trained model: encoded with the categories and moments of a prepared table, labelled or not."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxrec.data.preparation import VOCABULARY
from jaxrec.data.sources import is_parquet, local_files
from jaxrec.data.tabular import look as looks
from jaxrec.data.tabular.encode import arrays, encoders
from jaxrec.data.tabular.preparation import open_table
from jaxrec.data.tabular.reading import read_pieces, read_table
from jaxrec.data.tabular.schema import Schema
from jaxrec.data.tabular.splits import ByRows
from jaxrec.files import local_path


def has_labels(sources: Sequence[str | Path], schema: Schema) -> bool:
    """Whether raw files have the columns of the labels.

    Args:
      sources: text, plain or compressed by gzip, or Parquet.
      schema: schema of the prepared table.
    """
    import polars as pl

    labels, found = [label.column for label in schema.label], {}
    for path in local_files(sources):
        piece = next(iter(read_pieces([path], _as_read(schema, labelled=False))))
        names = pl.scan_parquet(path).collect_schema().names() if is_parquet(path) else piece.names
        found[path] = sum(label in names for label in labels)
    if set(found.values()) - {0, len(labels)} or len(set(found.values())) > 1:
        said = ", ".join(f"{path.name} {number}" for path, number in found.items())
        raise ValueError(f"of the {len(labels)} labels {', '.join(labels)} the files have: {said}. Give all, or none.")
    return len(labels) in found.values()


def read_rows(
    sources: Sequence[str | Path], schema: Schema, directory: str | Path, labelled: bool = True
) -> Iterator[dict[str, np.ndarray]]:
    """Stream the rows of raw files in order, with the ids of a prepared table.

    Args:
      sources: as for `has_labels`.
      schema: schema of the prepared table; its split is ignored.
      directory: directory of the prepared table.
      labelled: whether to read labels and weights; if not, the files need not have them.

    Yields:
      Blocks as from `encode.arrays`, without `label` and `weight` if not labelled.
    """
    directory = local_path(directory)
    metadata = open_table(directory, "train").metadata
    if metadata["options"].get("format") != looks.FORMAT:
        raise ValueError(
            f"{directory} was prepared by an earlier version, which read some values otherwise, such as 12.0 and nan: "
            "prepare the same sources in another directory, and give that; if it has another vocabulary, train again."
        )
    look, _ = looks.load(directory / VOCABULARY, "give the directory as it was prepared.")
    if looks.digest(schema, look) != metadata["table"]["digest"]:
        raise ValueError(
            f"{directory} was prepared with another schema, by which the same values are other categories: give the "
            "one that it was prepared with."
        )
    schema = _as_read(schema, labelled)
    ids_of, moments = encoders(schema, look.vocabularies), look.summary["moments"]
    for piece in read_pieces(local_files(sources), schema):
        table = read_table(piece, schema)
        if table.bad_rows:
            raise ValueError(f"{table.why}. Correct it: every row is predicted.")
        yield arrays(schema, table.frame, ids_of, moments)


def _as_read(schema: Schema, labelled: bool) -> Schema:
    """Return the schema without its split, and without labels and weights if not labelled."""
    found = dataclasses.replace(schema, split=ByRows())
    if not labelled:
        object.__setattr__(found, "label", ())  # the constructor requires a label
        object.__setattr__(found, "weight", None)
    return found
