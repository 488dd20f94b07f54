"""Quality by parts of the data: within groups and by segments; and the interval of the AUC over test sets.

Used by evaluate.py on the row ids of categorical fields: the categories of a prepared directory, -1 if missing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrec.embedding import EmbeddingSpec
from jaxrec.ranking import auc_interval, by_segment, group_auc
from jaxrec.types import Batch
from main.cli import grid

SHOWN = 20  # segments of a field that have separate lines; the rest share one
FIGURES = ("examples", "label_mean", "auc", "normalized_entropy", "calibration")


def single_fields(spec: EmbeddingSpec) -> dict[str, tuple[str, int | None]]:
    """Return {field: (lookup, column)} of the fields with one category per example."""
    found: dict[str, tuple[str, int | None]] = {}
    for name, lookup in spec.lookups.items():
        if lookup.hots != 1:
            continue
        if isinstance(lookup.tables, str):
            found[name] = name, None
        else:
            found |= {table: (name, column) for column, table in enumerate(lookup.tables)}
    return found


def refusals(spec: EmbeddingSpec, group: str | None, segments: Sequence[str]) -> dict[str, bool]:
    """Return {problem and remedy: whether it applies} for fields that the run lacks."""
    known = single_fields(spec)
    return {
        f"--{flag} {name} is no field of the run with one category for each example: give one of "
        f"{', '.join(list(known)[:40])}.": name not in known
        for flag, names in (("group", [group] if group else []), ("segments", segments))
        for name in names
    }


def fields_of(spec: EmbeddingSpec, batch: Batch, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return {field: i32[B]}: the row ids of some fields of a batch."""
    known, found = single_fields(spec), {}
    for name in names:
        lookup, column = known[name]
        ids = np.asarray(batch.ids[lookup])
        found[name] = ids if column is None else ids[:, column]
    return found


def figures(
    logit: np.ndarray,
    label: np.ndarray,
    weight: np.ndarray,
    fields: Mapping[str, np.ndarray],
    group: str | None,
    segments: Sequence[str],
    bootstrap: int,
) -> dict[str, Any]:
    """Return the figures of the parts for results.json; undefined ones are NaN.

    Args:
      logit, label, weight: f32[n].
      fields: {field: i32[n]} of the named fields.
      bootstrap: draws for the interval of the AUC; 0 for none.

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
        results |= group_auc(logit, label, fields[group], weight)
    for name in segments:
        for value, found in by_segment(logit, label, _largest(fields[name]), weight).items():
            results |= {f"segment_{name}_{value}_{key}": found[key] for key in FIGURES}
    return results


def _largest(ids):
    """Return the segment of each example as text: its row id, or 'others' for small segments."""
    values, mine, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    names = np.array([str(value) for value in values], dtype=object)
    names[np.argsort(-sizes, kind="stable")[SHOWN:]] = "others"
    return names.astype(str)[mine]


def tables(results: Mapping[str, Any], segments: Sequence[str]) -> str:
    """Format a table for each field of segments."""
    shown = []
    for name in segments:
        prefix = f"segment_{name}_"
        values = [key.removeprefix(prefix).removesuffix("_examples") for key in results if key.startswith(prefix)
                  and key.endswith("_examples")]  # fmt: skip
        columns = {key.replace("_", " "): f"{prefix}{{}}_{key}" for key in FIGURES}
        shown.append(grid(results, name, values, columns))
    return "\n\n".join(shown)
