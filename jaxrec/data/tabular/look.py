"""Statistics of a first pass over all rows: category counts, means and deviations, missing values, labels over time.

Vocabularies, counts, means and deviations are of the training rows alone. The look is kept beside the shards, so that a
resumed preparation need not repeat it.

Legend: n rows of a piece.
"""

import hashlib
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrec.data.tabular.encode import flattened, labels_of, numbers
from jaxrec.data.tabular.reading import Table
from jaxrec.data.tabular.schema import Bag, Categorical, Dense, Feature, History, Schema, table_of
from jaxrec.data.tabular.splits import ByTime
from jaxrec.files import atomic_write

PENDING_VALUES = 1 << 20  # counted at once, which bounds the memory of counting
PERIODS = 20
FORMAT = 2  # of the mapping; in 1, 12.0 and nan were categories, and a bag did not count in a table that it shared
_MOST_SPANS, _TOP = 1 << 12, 5


class Look(NamedTuple):
    """Statistics of a table.

    Attributes:
      vocabularies: {table: its categories, most frequent first}, of the tables that do not hash.
      counts: {table: i64[v] occurrences of each category}.
      summary: moments {dense column: [mean, deviation]}, by which it is standardised; scales, the same of what is not
        standardised too; targets, the same of labels of a regression; missing {column: rows}; distinct {table: number
        of categories, rare ones included}; label_over_time [[row or time at which a period begins, rows, label mean]];
        rows.
    """

    vocabularies: dict[str, list[str]]
    counts: dict[str, np.ndarray]
    summary: dict[str, Any]


class Looking:
    """Accumulator of a `Look`; `times` begin the periods of label_over_time if a split is by time, not by rows."""

    def __init__(self, schema: Schema, times: Sequence[float] = ()):
        self._schema, self._times = schema, np.array(times)
        self._totals: dict[str, Any] = {}  # {table: frame of value and count}
        self._pending: dict[str, list[Any]] = {}
        self._targets = [label.column for label in schema.label if label.regression]
        self._moments = {name: (0, 0.0, 0.0) for name in [*(f.column for f in schema.dense), *self._targets]}
        # The items of a history are those of other rows, and were counted there.
        self._features = [f for f in schema.features if not isinstance(f, History)]
        self._missing = {f.column: 0 for f in self._features}
        self._spans, self._span_rows = np.zeros((0, 2)), 1  # rows and labels of each span
        self._rows = 0

    def add(self, table: Table, trains: np.ndarray) -> None:
        """Add the rows of a piece; values are counted only in its training rows, `trains` bool[n]."""
        import polars as pl

        frame = table.frame
        self._rows += len(frame)
        self._label(table)
        of_train = frame.filter(pl.Series(trains))
        for feature in self._features:
            role = "n" if isinstance(feature, Dense) else "c" if isinstance(feature, Categorical) else "b"
            key = f"{role}:{feature.column}"
            self._missing[feature.column] += frame[key].null_count()
            if isinstance(feature, Dense):
                if not feature.buckets:
                    self._number(feature.column, numbers(feature, of_train[key].drop_nulls().to_numpy()))
            elif feature.hash_cap is None:
                values = of_train[key]
                if isinstance(feature, Bag):
                    _, values = flattened(feature, values, self._schema.absent)
                self._count(table_of(feature), values.drop_nulls())
        for name in self._targets:
            self._number(name, of_train[f"n:{name}"].to_numpy())

    def _label(self, table: Table) -> None:
        label, split = labels_of(self._schema.label[0], table.frame), self._schema.split
        if isinstance(split, ByTime):
            span = np.searchsorted(self._times, table.frame[f"n:{split.column}"].to_numpy(), side="right") - 1
        else:
            span = table.row // self._span_rows
        many = int(span.max(initial=-1)) + 1
        self._spans = np.pad(self._spans, [(0, max(0, many - len(self._spans))), (0, 0)])
        self._spans[:many] += np.stack([np.bincount(span, minlength=many), np.bincount(span, label, many)], axis=1)
        while len(self._spans) > _MOST_SPANS:
            self._spans = np.pad(self._spans, [(0, len(self._spans) % 2), (0, 0)])
            self._spans, self._span_rows = self._spans[::2] + self._spans[1::2], 2 * self._span_rows

    def _number(self, name: str, values: np.ndarray) -> None:
        """Merge the means and sums of squares of two parts (Chan, Golub and LeVeque)."""
        if not len(values):
            return
        many, mean, squares = self._moments[name]
        apart, total = values.mean() - mean, many + len(values)
        squares += ((values - values.mean()) ** 2).sum() + apart**2 * many * len(values) / total
        self._moments[name] = total, mean + apart * len(values) / total, float(squares)

    def _count(self, name: str, values) -> None:
        import polars as pl

        if not len(values):
            return
        counted = pl.DataFrame({"value": values}).group_by("value").len("count")
        pending = self._pending.setdefault(name, [])
        pending.append(counted)
        if sum(map(len, pending)) >= PENDING_VALUES:
            self._merge(name)

    def _merge(self, name: str) -> None:
        import polars as pl

        parts = [*([self._totals[name]] if name in self._totals else []), *self._pending.pop(name, [])]
        if parts:
            self._totals[name] = pl.concat(parts).group_by("value").agg(pl.col("count").sum())

    def done(self) -> Look:
        """Return all statistics."""
        import polars as pl

        vocabularies, counts, distinct = {}, {}, {}
        for feature in self._features:
            if isinstance(feature, Dense) or feature.hash_cap is not None or table_of(feature) != feature.column:
                continue
            self._merge(feature.column)
            total = self._totals.get(feature.column, pl.DataFrame(schema={"value": pl.String, "count": pl.UInt32}))
            distinct[feature.column] = len(total)
            kept = total.filter(pl.col("count") >= feature.min_count)
            kept = kept.sort(["count", "value"], descending=[True, False])
            vocabularies[feature.column] = kept["value"].to_list()
            counts[feature.column] = kept["count"].to_numpy().astype(np.int64)
        scales = {
            name: [mean, float(np.sqrt(squares / many)) if many else 1.0]
            for name, (many, mean, squares) in self._moments.items()
        }
        targets = {name: scales.pop(name) for name in self._targets}
        # Those of other columns are in the digests of earlier versions.
        moments = {f.column: scales[f.column] if f.standardise else [0.0, 1.0] for f in self._schema.dense}
        summary = {
            "rows": self._rows, "targets": targets, "moments": moments, "scales": scales,
            "missing": self._missing, "distinct": distinct, "label_over_time": self._periods(),
        }  # fmt: skip
        return Look(vocabularies, counts, summary)

    def _periods(self) -> list[list[float]]:
        """Return [first time or row, rows, label mean] of periods of about equal size."""
        found = []
        for part in np.array_split(np.arange(len(self._spans)), PERIODS):
            rows, label = self._spans[part].sum(axis=0)
            if rows:
                begin = float(self._times[part[0]]) if len(self._times) else int(part[0]) * self._span_rows
                found.append([begin, int(rows), float(label / rows)])
        return found


def extended(base: Look, look: Look) -> Look:
    """Return a look whose rows go on from another one's: its categories keep their rows, and its numbers their scale.

    The categories that are new come after them, most frequent first.
    """
    vocabularies, counts = {}, {}
    for name, values in look.vocabularies.items():
        count = dict(zip(values, look.counts[name].tolist(), strict=True))
        known = dict.fromkeys([*base.vocabularies[name], *values])
        vocabularies[name] = [*known]
        counts[name] = np.array([count.get(value, 0) for value in known], np.int64)
    moments = {key: base.summary[key] for key in ("moments", "targets") if key in base.summary}
    return Look(vocabularies, counts, look.summary | moments)


def save(path: Path, look: Look, found: dict[str, Any]) -> None:
    """Write a look, and what else was found, whole or not at all; zip stores a checksum of each part."""
    parts = {}
    for number, (name, values) in enumerate(look.vocabularies.items()):
        texts = [value.encode() for value in values]
        parts[f"{number}.texts"] = np.frombuffer(b"".join(texts), np.uint8)
        parts[f"{number}.ends"] = np.cumsum([len(text) for text in texts], dtype=np.int64)
        parts[f"{number}.counts"] = look.counts[name]
    words = {"tables": list(look.vocabularies), "summary": look.summary, "found": found}
    parts["words"] = np.frombuffer(json.dumps(words).encode(), np.uint8)
    with atomic_write(path) as partial, open(partial, "wb") as file:
        np.savez(file, allow_pickle=False, **parts)


def load(path: Path, remedy: str) -> tuple[Look, dict[str, Any]]:
    """Load what `save` wrote."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:
            parts = {name: saved[name] for name in saved.files}
        words = json.loads(parts["words"].tobytes())
        vocabularies, counts = {}, {}
        for number, name in enumerate(words["tables"]):
            texts, ends = parts[f"{number}.texts"].tobytes(), parts[f"{number}.ends"].tolist()
            starts = [0, *ends[:-1]]
            vocabularies[name] = [texts[a:b].decode() for a, b in zip(starts, ends, strict=True)] if ends else []
            counts[name] = parts[f"{number}.counts"]
        return Look(vocabularies, counts, words["summary"]), words["found"]
    except (ValueError, TypeError, KeyError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is missing, cut or damaged ({error}): {remedy}") from error


def digest(schema: Schema, look: Look) -> str:
    """Return a digest that is equal for two preparations if and only if they map all values alike."""
    kept = {"schema": schema.described(), "vocabularies": look.vocabularies, "moments": look.summary["moments"]}
    if any(getattr(feature, "hash_cap", None) for feature in schema.features):  # no vocabulary tells how they were read
        kept["format"] = FORMAT
    # How rows are read, split, weighted and labelled does not affect the mapping of values.
    for name in ("split", "columns", "separator", "quote", "weight", "label", "keys", "encoding"):
        kept["schema"].pop(name, None)
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _ids_of(feature: Feature, schema: Schema, counts: Mapping[str, Any]) -> Any:
    """Return a feature's part of the counts of ids of a split: those given and the unknown ones, for each column."""
    if isinstance(feature, Bag):
        return counts[f"ids.{feature.column}"]
    place = schema.single.index(feature.column)
    return [[of[place]] for of in counts["ids.sparse"]]


def shown(
    schema: Schema, look: Look, tables: dict[str, int], ids: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Summarise each feature.

    Args:
      tables: {table: rows}.
      ids: {split: {column of the blocks: result of `count_ids`}}.

    Returns:
      {feature: rows of its table, share of missing values, most frequent values with their counts, the share of unknown
      ids among those of each split, and the most ids of a row}, as far as it has them.
    """
    found = {}
    for feature in schema.features:
        one: dict[str, Any] = {}
        if isinstance(feature, History):
            missing = look.summary["rows"] - sum(counts[f"ids.{feature.column}"][0][0] for counts in ids.values())
        else:
            missing = look.summary["missing"][feature.column]
        one["missing_share"] = missing / max(look.summary["rows"], 1)
        if table_of(feature) in tables:
            one["table_rows"] = tables[table_of(feature)]
            its = {split: _ids_of(feature, schema, counts) for split, counts in ids.items()}
            if table_of(feature) in look.vocabularies:
                one["unknown_share"] = {name: sum(rare) / max(sum(given), 1) for name, (given, rare) in its.items()}
            if isinstance(feature, Bag):
                one["most"] = max(sum(map(bool, given)) for given, _ in its.values())
        if feature.column in look.summary["distinct"]:
            one["distinct"] = look.summary["distinct"][feature.column]
            counts, values = look.counts[feature.column], look.vocabularies[feature.column]
            top = np.argsort(-counts, kind="stable")[:_TOP].tolist()
            one["top"] = [[values[row], int(counts[row])] for row in top]
        if isinstance(feature, Dense) and feature.standardise:
            one["mean"], one["deviation"] = look.summary["moments"][feature.column]
        elif scale := look.summary.get("scales", {}).get(feature.column):  # looks of earlier versions have none
            one["scale"] = scale
        found[feature.column] = one
    return found
