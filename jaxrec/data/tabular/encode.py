"""Columns to arrays: categories to table rows, bags padded with -1, numbers transformed.

Legend: n rows, F columns of one category each, N dense features, H hots of a bag, K labels.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numba
import numpy as np

from jaxrec.data.tabular.schema import (
    FIRST_ROW,
    KEY_BYTES,
    MISSING,
    RARE,
    WHOLE,
    Categorical,
    Dense,
    History,
    Label,
    MultiHot,
    Schema,
    Sequence,
    is_bucketed,
    table_of,
)

Ids = Callable[[Any], np.ndarray]  # polars series of strings without nulls -> i32[n]


def hashed_ids(values: Any, name: str, cap: int) -> np.ndarray:
    """Hash a series of strings without nulls into a table of `cap` rows, i32[n]: 1 + h(name, text) % (cap - 1).

    The name of the table is hashed too: tables map the same string to different rows. Row 0 is for missing values.
    """
    return (1 + hashes(values, name) % np.uint64(cap - 1)).astype(np.int32)


def hashes(values: Any, name: str) -> np.ndarray:
    """Hash a series of strings without nulls, and the name of their column, u64[n]."""
    texts = "".join(values.to_list()).encode()
    ends = values.str.len_bytes().to_numpy().astype(np.int64).cumsum()
    seed = _fnv(np.frombuffer(name.encode(), np.uint8), np.array([len(name.encode())]), np.uint64(14695981039346656037))
    return _fnv(np.frombuffer(texts, np.uint8), ends, seed[0])


@numba.njit(cache=True, nogil=True)
def _fnv(data, ends, seed):
    """Hash each text by 64-bit FNV-1a, then the finaliser of splitmix64, since the low bits of FNV are weak."""
    found = np.empty(len(ends), np.uint64)
    start = 0
    for number in range(len(ends)):
        h = seed
        for at in range(start, ends[number]):
            h = (h ^ np.uint64(data[at])) * np.uint64(1099511628211)
        start = ends[number]
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found[number] = h ^ (h >> np.uint64(31))
    return found


def encoders(schema: Schema, vocabularies: dict[str, list[str]]) -> dict[str, Ids]:
    """Make {table: strings -> rows} for all tables of strings."""
    import polars as pl

    def of_vocabulary(values):
        # Enum is the only type of polars that keeps its table of strings between calls.
        kind = pl.Enum(values)

        def ids(texts):
            found = texts.cast(kind, strict=False).to_physical().cast(pl.Int32)
            return (found + FIRST_ROW).fill_null(RARE).to_numpy().astype(np.int32)

        return ids

    def of_hash(name, cap):
        def ids(texts):
            different = texts.unique()
            rows = pl.Series(hashed_ids(different, name, cap))
            return texts.replace_strict(different, rows, return_dtype=pl.Int32).to_numpy().astype(np.int32)

        return ids

    found: dict[str, Ids] = {}
    for feature in schema.features:
        if not isinstance(feature, Categorical | MultiHot | Sequence) or table_of(feature) != feature.column:
            continue
        cap = feature.hash_cap
        found[feature.column] = (
            of_vocabulary(vocabularies[feature.column]) if cap is None else of_hash(feature.column, cap)
        )
    return found


def rows_of(ids: Ids, texts: Any) -> np.ndarray:
    """Return the row of each string of a series, 0 where it is null, i32[n]."""
    there, found = texts.is_not_null().to_numpy(), np.full(len(texts), MISSING, np.int32)
    found[there] = ids(texts.drop_nulls())
    return found


def table_rows(schema: Schema, vocabularies: dict[str, list[str]]) -> dict[str, int]:
    """Return {table: number of rows}, in the order of the features."""
    rows = {}
    for feature in schema.features:
        if isinstance(feature, Dense) and feature.buckets:
            rows[feature.column] = 2 + len(feature.buckets)  # one bucket more than bounds, and row 0
        elif isinstance(feature, Categorical | MultiHot | Sequence) and table_of(feature) == feature.column:
            cap = feature.hash_cap
            rows[feature.column] = FIRST_ROW + len(vocabularies[feature.column]) if cap is None else cap
    return rows


def categories(series: Any, absent: Iterable[str]) -> Any:
    """Return a series as strings, in which whole numbers have no decimals, and null is missing.

    A column of integers becomes one of floats in pandas as soon as a value is missing, in Parquet and in text: 12.0 is
    the same category as 12.

    Args:
      absent: texts that stand for no category.
    """
    import polars as pl

    texts = series.cast(pl.String)
    # A regular expression takes ten times as long as these two, and few columns need it.
    if texts.filter(texts.str.ends_with("0")).str.contains(".", literal=True).any():
        texts = texts.str.replace(WHOLE, "${1}")
    nothing = texts.is_in([*absent]).fill_null(False)
    return texts.set(nothing, None) if nothing.any() else texts


def flattened(bag: MultiHot | Sequence, series: Any, absent: Iterable[str]) -> tuple[np.ndarray, Any]:
    """Concatenate the categories of a bag, at most `bag.hots` of each of n strings with separators, or lists.

    Args:
      absent: texts that stand for no category.

    Returns:
      The number of categories of each row, i64[n], and all categories as a series without nulls.
    """
    import polars as pl

    listed = series if series.dtype == pl.List else series.str.split(bag.separator)
    many = listed.list.len().fill_null(0).to_numpy().astype(np.int64)
    # An empty list would explode to a null.
    values = listed.filter(pl.Series(many > 0)).explode() if many.any() else pl.Series([], dtype=pl.String)
    values, row = categories(values, absent), np.repeat(np.arange(len(many)), many)
    there = values.is_not_null()
    if not there.all():
        values, row = values.filter(there), row[there.to_numpy()]
        many = np.bincount(row, minlength=len(many))
    if len(many) and many.max() > bag.hots:
        ends = np.cumsum(many)
        place = np.arange(len(row)) - (ends - many)[row]
        kept = place >= many[row] - bag.hots if isinstance(bag, Sequence) else place < bag.hots
        values, many = values.filter(pl.Series(kept)), np.minimum(many, bag.hots)
    return many, values


def padded(many: np.ndarray, ids: np.ndarray, hots: int) -> np.ndarray:
    """Arrange bags as rows of `hots` ids, padded with -1 at the end.

    >>> padded(np.array([2, 0, 1]), np.array([7, 8, 9], np.int32), 2).tolist()
    [[7, 8], [-1, -1], [9, -1]]
    """
    found = np.full((len(many), hots), -1, np.int32)
    row = np.repeat(np.arange(len(many)), many)
    found[row, np.arange(len(row)) - (np.cumsum(many) - many)[row]] = ids
    return found


def labels_of(label: Label, frame: Any) -> np.ndarray:
    """Return a label of rows from `read_table`, bool[n] or f64[n]."""
    found = frame[f"n:{label.column}"].to_numpy()
    return found if label.at_least is None else found >= label.at_least


def numbers(feature, column: np.ndarray) -> np.ndarray:
    """Return a dense column before it is standardised, f64[n], NaN where missing."""
    return np.log1p(np.maximum(column, 0)) if feature.log else column


def standardised(feature, values: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    """Turn the result of `numbers` into model inputs: f32[n], without NaN."""
    if feature.standardise:
        values = (values - mean) / (deviation if deviation > 0 else 1.0)
    limit = np.finfo(np.float32).max
    return np.where(np.isnan(values), feature.missing, np.clip(values, -limit, limit)).astype(np.float32)


def buckets(feature: Dense, values: np.ndarray) -> np.ndarray:
    """Return the row of each number f64[n] of a feature with buckets, i32[n]."""
    bucket = 1 + np.searchsorted(np.array(feature.buckets), values, side="right")
    return np.where(np.isnan(values), MISSING, bucket).astype(np.int32)


def arrays(
    schema: Schema,
    frame: Any,
    ids_of: dict[str, Ids],
    moments: dict[str, list[float]],
    histories: Callable[[History, Any], np.ndarray],
) -> dict[str, np.ndarray]:
    """Encode rows from `read_table` as a block holds them; `histories`: (feature, rows) -> i32[n, H].

    Returns:
      label f32[n] or f32[n, K] and weight f32[n] if the schema has them, dense f32[n, N], 'ids.sparse' i32[n, F] if F >
      0, 'ids.NAME' i32[n, H] for each bag, and 'key.NAME' u8[n, KEY_BYTES], UTF-8, for each key.
    """
    column = lambda name: frame[f"n:{name}"].to_numpy()
    labels = [labels_of(label, frame) for label in schema.label]
    found: dict[str, np.ndarray] = {}
    if labels:
        label = np.stack(labels, axis=1).astype(np.float32)
        found["label"] = label[:, 0] if len(labels) == 1 else label
    if schema.weight:
        found["weight"] = column(schema.weight).astype(np.float32)
    of_dense = [standardised(f, numbers(f, column(f.column)), *moments[f.column]) for f in schema.dense]
    found["dense"] = np.stack(of_dense, axis=1) if of_dense else np.zeros((len(frame), 0), np.float32)
    single = [_single(f, frame, ids_of) for f in schema.features if f.column in schema.single]
    if single:
        found["ids.sparse"] = np.stack(single, axis=1)
    for bag in schema.bags:
        if isinstance(bag, History):
            found[f"ids.{bag.column}"] = histories(bag, frame)
            continue
        many, values = flattened(bag, frame[f"b:{bag.column}"], schema.absent)
        found[f"ids.{bag.column}"] = padded(many, ids_of[table_of(bag)](values), bag.hots)
    for name in schema.keys:
        texts = [text.encode() for text in frame[f"k:{name}"].fill_null("")]
        found[f"key.{name}"] = np.array(texts, f"S{KEY_BYTES}").view(np.uint8).reshape(len(texts), KEY_BYTES)
    return found


def _single(feature, frame, ids_of) -> np.ndarray:
    if not is_bucketed(feature):
        return rows_of(ids_of[table_of(feature)], frame[f"c:{feature.column}"])
    return buckets(feature, frame[f"n:{feature.column}"].to_numpy())
