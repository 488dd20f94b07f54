"""Quality by parts of the data: within groups and by segments; and the interval of the AUC over test sets.

Used by evaluate.py on the row ids of categorical fields: the categories of a prepared directory, -1 if missing.
"""

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrec.embedding import EmbeddingSpec, Lookup
from jaxrec.ranking import auc_interval, by_segment, group_auc
from jaxrec.types import Batch
from main.cli import grid
from main.table_data import tables_by_field, with_vocabulary

SHOWN, OTHERS = 20, "others"  # segments of a field that have separate lines; the rest share one
Table = Mapping[str, Any] | None
FIGURES = ("examples", "label_mean", "auc", "normalized_entropy", "calibration")


def single_fields(spec: EmbeddingSpec, table: Table = None) -> dict[str, tuple[str, int | None]]:
    """Return {field: (lookup, column)} of the fields with one category per example.

    Args:
      table: metadata of the prepared table, if the run has one.
    """
    found: dict[str, tuple[str, int | None]] = {}
    for name, lookup in spec.lookups.items():
        # The steps of a history of DIN are looked up one by one.
        hots = lookup.hots if table is None or name not in table["bags"] else table["bags"][name]["hots"]
        if hots != 1:
            continue
        if isinstance(lookup.tables, str):
            found[name] = name, None
        else:
            found |= {field: (name, column) for column, field in enumerate(columns_of(lookup, table))}
    return found


def columns_of(lookup: Lookup, table: Table = None) -> Sequence[str]:
    """Return the fields of a lookup of several columns: its tables, unless fields of a prepared table share some."""
    return lookup.columns if table is None else table["sparse"]


def grouping_fields(spec: EmbeddingSpec, table: Table = None) -> dict[str, tuple[str, int | None]]:
    """As `single_fields`, with the numbers of a prepared table as well, under the name 'dense' for a lookup."""
    numbers = [] if table is None else table["dense"]
    return single_fields(spec, table) | {name: ("dense", column) for column, name in enumerate(numbers)}


def refusals(spec: EmbeddingSpec, group: str | None, segments: Sequence[str], table: Table = None) -> dict[str, bool]:
    """Return {problem and remedy: whether it applies} for fields that the rows of the run lack."""
    keys = [] if table is None else table.get("keys", [])
    flags = [("group", "value", "Dense", [*grouping_fields(spec, table), *keys], [group] if group else [])]
    flags += [("segments", "category", "Dense with buckets", [*single_fields(spec, table), *keys], [*segments])]
    return {
        f"--{flag} {name} is no field of the run with one {kind} for each example: give one of "
        f"{', '.join(list(known)[:40])}"
        + (f"; another column must be a Categorical, a {other} or a key of the schema first." if table else "."): name
        not in known
        for flag, kind, other, known, names in flags
        for name in names
    }


def fields_of(spec: EmbeddingSpec, batch: Batch, names: Sequence[str], table: Table = None) -> dict[str, np.ndarray]:
    """Return {field: i32[B]}: the row ids of some fields of a batch; of a number f32[B], as the model sees it."""
    known, found = grouping_fields(spec, table), {}
    for name in (name for name in names if name in known):  # a key is in no batch
        lookup, column = known[name]
        values = np.asarray(batch.dense if lookup == "dense" else batch.ids[lookup])
        found[name] = values.ravel() if column is None else values[:, column]
    return found


def gauc(
    logit: np.ndarray, label: np.ndarray, values: np.ndarray, weight: np.ndarray, field: str, table: Table = None
) -> dict[str, float]:
    """Return `group_auc` of an evaluation; missing and unknown categories of a prepared table are in no group.

    Unknown ones share a row: as a group, all new users were one.

    Args:
      logit, label, weight: f32[n].
      values: [n], from `fields_of`, or a key of the table.
      field: their name.

    >>> table = {"sparse": ["user"], "bags": {}, "features": {"user": {"distinct": 5}}}
    >>> logit, label, user = np.arange(6.0), np.array([0, 1, 1, 0, 0, 1]), np.array([2, 2, 1, 1, 1, 1])
    >>> {name: round(value, 2) for name, value in gauc(logit, label, user, np.ones(6), "user", table).items()}
    {'gauc': 1.0, 'groups': 1, 'groups_counted': 1, 'share_counted': 0.33}
    """
    first = 0  # row that a category can have
    if table is not None and field in tables_by_field(table):
        first = 2 if field in with_vocabulary(table) else 1
    known = np.where(values >= first, weight, 0) if first else weight
    if not known.any():
        return {"gauc": math.nan, "groups": 0, "groups_counted": 0, "share_counted": 0.0}
    found = group_auc(logit, label, values, known)
    return found | {"share_counted": found["share_counted"] * float(known.sum() / weight.sum())}


def figures(
    logit: np.ndarray,
    label: np.ndarray,
    weight: np.ndarray,
    fields: Mapping[str, np.ndarray],
    group: str | None,
    segments: Sequence[str],
    bootstrap: int,
    table: Table = None,
) -> dict[str, Any]:
    """Return the figures of the parts for results.json; undefined ones are NaN.

    Args:
      logit, label, weight: f32[n].
      fields: {field: [n]} of the named fields.
      bootstrap: draws for the interval of the AUC; 0 for none.
      table: metadata of the prepared table, if `group` is a field of it.

    >>> rng = np.random.default_rng(0)
    >>> user, label = rng.integers(0, 3, 200), rng.integers(0, 2, 200)
    >>> found = figures(label + rng.standard_normal(200), label, np.ones(200), {"user": user}, "user", ["user"], 50)
    >>> found["groups"], found["auc_low"] < found["gauc"] < found["auc_high"], "segment_user_2_auc" in found
    (3, True, True)
    """
    results: dict[str, Any] = {}
    if bootstrap:
        _, results["auc_low"], results["auc_high"] = auc_interval(logit, label, weight, bootstrap)
    if group:
        results |= gauc(logit, label, fields[group], weight, group, table)
    for name in segments:
        for value, found in by_segment(logit, label, _largest(fields[name]), weight).items():
            results |= {f"segment_{name}_{value}_{key}": found[key] for key in FIGURES}
    return results


def _largest(ids):
    """Return the segment of each example as text: its row id, or OTHERS for small segments."""
    values, mine, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    names = np.array([str(value) for value in values], dtype=object)
    names[np.argsort(-sizes, kind="stable")[SHOWN:]] = OTHERS
    return names.astype(str)[mine]


def names_of(
    results: Mapping[str, Any], segments: Sequence[str], decode: Mapping[str, Callable[[list[int]], Sequence]]
) -> dict[str, str]:
    """Return for results.json what the row ids of segments stand for, of the fields that have a `decode`."""
    found: dict[str, str] = {}
    for field in segments:
        rows = [row for row in _values(results, field) if row != OTHERS]
        with contextlib.suppress(KeyError, ValueError):  # no vocabulary, or one that hashes
            names = decode[field]([*map(int, rows)])
            found |= {f"segment_{field}_{row}_name": name or "<missing>" for row, name in zip(rows, names, strict=True)}
    return found


def tables(results: Mapping[str, Any], segments: Sequence[str]) -> str:
    """Format a table for each field of segments, with the names of `names_of` beside the row ids.

    >>> results = {f"segment_item_{row}_{key}": 0.5 for row in ("7", "others") for key in FIGURES}
    >>> print(tables(results | {"segment_item_7_name": "i17"}, ["item"]))
    item     examples  label mean     auc  normalized entropy  calibration
    7 'i17'    0.5000      0.5000  0.5000              0.5000       0.5000
    others     0.5000      0.5000  0.5000              0.5000       0.5000
    """
    shown = []
    for field in segments:
        prefix = f"segment_{field}_"
        columns = {key.replace("_", " "): f"{prefix}{{}}_{key}" for key in FIGURES}
        names = {value: results.get(f"{prefix}{value}_name") for value in _values(results, field)}
        rows = {value if name is None else f"{value} {name!r:.40}": value for value, name in names.items()}
        shown.append(grid(results, field, rows, columns))
    return "\n\n".join(shown)


def _values(results, field):
    """Return the segments of a field: row ids as text, and OTHERS."""
    found = (re.fullmatch(f"segment_{re.escape(field)}_(-?[0-9]+|{OTHERS})_examples", key) for key in results)
    return [match[1] for match in found if match]
