"""Schema of a table: a few lines that describe its columns, rejected at once if they contradict each other.

    schema = Schema(
        label="click",
        features=[Categorical("user"), Dense("price", log=True), MultiHot("tags", "|", at_most=5)],
        split=ByTime("when", train=0.8, validation=0.1),
    )

A vocabulary maps missing categories to row 0, all rare ones to row 1, and the others to rows from 2; in bags
(`MultiHot`, `Sequence`, `History`) a missing category is -1.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any, ClassVar

from jaxrec.bounds import real_number, whole_number
from jaxrec.data.preparation import MOST_ROWS
from jaxrec.data.tabular.splits import AtRandom, ByColumn, ByFile, ByRows, ByTime, Split, texts

MISSING, RARE, FIRST_ROW = 0, 1, 2
WHOLE = r"^([+-]?[0-9]+)\.0+$"  # a whole number with decimals, as pandas writes integers of which one is missing
_NOT_A_NUMBER = ("nan", "NaN")  # as Python and pandas, and as Rust, Java and JavaScript write it
KEY_BYTES = 64  # of a key in a block
_MOST_HOTS, _MIN_COUNT = 1000, 2


@dataclasses.dataclass(frozen=True)
class Categorical:
    """A column of one category per row.

    Attributes:
      column: column name.
      min_count: categories that occur less often in the training rows share a row; 2 if None. With `share`, that of
        that column.
      hash_cap: rows of the table to hash into, which needs no memory for a vocabulary; None for a vocabulary.
      share: column whose table is looked up, and whose vocabulary counts these categories too, as for the second genre
        of a film; None for an own table.
    """

    column: str
    min_count: int | None = None
    hash_cap: int | None = None
    share: str | None = None

    def __post_init__(self):
        _check_vocabulary(self)


@dataclasses.dataclass(frozen=True)
class MultiHot:
    """A column of several categories per row, in separated text or a Parquet list; pooled by their mean.

    Attributes:
      column: column name.
      separator: string between two categories.
      at_most: number of categories kept, the first ones.
      min_count, hash_cap: as in `Categorical`; with `share`, those of that column.
      share: column whose table is looked up, and whose vocabulary counts these categories too; None for an own table.
    """

    column: str
    separator: str = "|"
    at_most: int = 8
    min_count: int | None = None
    hash_cap: int | None = None
    share: str | None = None

    @property
    def hots(self) -> int:
        """Width of the bag."""
        return self.at_most

    def __post_init__(self):
        _check_vocabulary(self)
        _check_bag(self, "at_most", self.at_most)


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A column with a history of categories per row, oldest first.

    Attributes:
      column: column name.
      separator: string between two categories.
      last: T, number of categories kept, the newest ones.
      min_count, hash_cap: as in `Categorical`; with `share`, those of that column.
      share: column whose table is looked up, and whose vocabulary counts these categories too; None for an own table.
    """

    column: str
    separator: str = "|"
    last: int = 20
    min_count: int | None = None
    hash_cap: int | None = None
    share: str | None = None

    @property
    def hots(self) -> int:
        """T, width of the bag."""
        return self.last

    def __post_init__(self):
        _check_vocabulary(self)
        _check_bag(self, "last", self.last)


@dataclasses.dataclass(frozen=True)
class History:
    """The categories that a column had in earlier rows of the same user, oldest first, which the preparation looks up.

    A row sees the rows of all files whose time is strictly before its own, in the order of time, and of the files where
    times are equal. A row without a user or category is not remembered, and one without a user has no history.

    Attributes:
      of: column of a `Categorical`, whose table is looked up.
      by: column of the user, a feature or not.
      last: T, number of categories kept, the newest ones.
      time: column of numbers, or of ISO 8601 dates and times; None for that of a split `ByTime`.
      where: label; only rows where it is 1 are remembered, such as clicks; None for all.
      column: name of the bag; OF_history if empty.

    >>> features = [Categorical("user"), Categorical("item"), History("item", by="user", where="click")]
    >>> Schema("click", features, ByTime("hour")).bags[0].column
    'item_history'
    """

    of: str
    by: str
    last: int = 20
    time: str | None = None
    where: str | None = None
    column: str = ""
    separator: ClassVar[str] = "|"  # of a text at a server, which is given the history

    @property
    def hots(self) -> int:
        """T, width of the bag."""
        return self.last

    @property
    def share(self) -> str:
        """Column whose table is looked up."""
        return self.of

    def __post_init__(self):
        object.__setattr__(self, "column", self.column or f"{self.of}_history")
        _check_bag(self, "last", self.last)


@dataclasses.dataclass(frozen=True)
class Dense:
    """A column of one number per row.

    Attributes:
      column: column name.
      log: whether to take log(1 + max(x, 0)).
      standardise: whether to subtract the mean of the training rows, then divide by their standard deviation.
      missing: replaces a missing number, after log and standardise; with `standardise`, 0 is the mean.
      buckets: ascending bounds; if any, the number becomes a category, one per bucket, instead of a dense feature.
    """

    column: str
    log: bool = False
    standardise: bool = False
    missing: float = 0.0
    buckets: tuple[float, ...] = ()

    def __post_init__(self):
        real_number(f"missing of {self.column!r}", self.missing, "finite", math.isfinite)
        object.__setattr__(self, "buckets", tuple(self.buckets))
        if not all(low < high for low, high in zip(self.buckets, self.buckets[1:], strict=False)):
            raise ValueError(f"buckets of {self.column!r} must ascend, got {self.buckets}.")
        if self.buckets and (self.log or self.standardise or self.missing):
            raise ValueError(
                f"Dense({self.column!r}) has buckets, which take the number as it is, and a row for missing ones: "
                "leave out log, standardise and missing."
            )


@dataclasses.dataclass(frozen=True)
class Label:
    """A column to predict.

    Attributes:
      column: column name.
      at_least: threshold from which on the label is 1, else 0; None if the column holds 0 and 1.
      regression: whether the label is the number itself, such as a rating, a price or a watch time.
    """

    column: str
    at_least: float | None = None
    regression: bool = False

    def __post_init__(self):
        if self.at_least is not None:
            if self.regression:
                raise ValueError(
                    f"Label({self.column!r}) is 0 or 1 by at_least, or a number by regression: give one of them."
                )
            real_number(f"at_least of {self.column!r}", self.at_least, "finite", math.isfinite)


Feature = Categorical | MultiHot | Sequence | History | Dense
Bag = MultiHot | Sequence | History


@dataclasses.dataclass(frozen=True)
class Schema:
    """The relevant columns of a table, and how its text is read.

    Attributes:
      label: column name, a `Label`, or a list of them.
      features: the features, at least one of them with categories.
      split: which rows train, validate and test.
      weight: name of the column of example weights, 0 or more; None if all rows count alike.
      keys: columns that say which row it is, such as a user or a request; no model sees them, but AUC within groups
        (GAUC) and files of predictions use them. Texts of at most 64 bytes; they may be features too.
      columns: names of all columns in order, for text without a header; None if the first line names them.
      separator: string between two fields of a text.
      quote: whether fields of a text may be in double quotes.
      missing: strings that stand for a missing value, besides the empty field and, except for the label, weight and
        split, NaN.
      encoding: how the characters of a text are written, as Python calls it, such as 'latin-1' or 'cp1252'.
      gather: (sources, directory) -> sources: first joins several files into one table, in the directory of the
        preparation.

    >>> Schema(label="click", features=[Categorical("user"), Dense("age", buckets=(18, 30))]).single
    ('user', 'age')
    """

    label: Any
    features: tuple[Feature, ...]
    split: Split = ByRows()  # noqa: RUF009, it is frozen
    weight: str | None = None
    columns: tuple[str, ...] | None = None
    separator: str = ","
    quote: bool = True
    missing: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    encoding: str = "utf-8"
    gather: Callable[[Several[Path], Path], Several[Path]] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        set_to = lambda name, value: object.__setattr__(self, name, value)
        given = self.label if isinstance(self.label, list | tuple) else [self.label]
        set_to("label", tuple(Label(one) if isinstance(one, str) else one for one in given))
        if not self.label:
            raise ValueError("label=[] must be the name of a column, a Label(...), or a list of them.")
        set_to("features", tuple(self.features))
        set_to("missing", texts("missing", self.missing))
        set_to("keys", texts("keys", self.keys))
        if self.columns is not None:
            set_to("columns", texts("columns", self.columns))
        _check_schema(self)
        set_to("features", tuple(_completed(f, self) for f in self.features))

    @property
    def single(self) -> tuple[str, ...]:
        """Columns of one category per row, bucketed numbers included: those of the lookup 'sparse'."""
        return tuple(f.column for f in self.features if isinstance(f, Categorical) or is_bucketed(f))

    @property
    def bags(self) -> tuple[Bag, ...]:
        """Features of several categories per row."""
        return tuple(f for f in self.features if isinstance(f, Bag))

    @property
    def histories(self) -> tuple[History, ...]:
        """Bags that the preparation looks up in earlier rows."""
        return tuple(f for f in self.features if isinstance(f, History))

    @property
    def dense(self) -> tuple[Dense, ...]:
        """Features that stay numbers."""
        return tuple(f for f in self.features if isinstance(f, Dense) and not f.buckets)

    @property
    def used(self) -> tuple[str, ...]:
        """All columns that are read, each once."""
        names = [label.column for label in self.label]
        for f in self.features:
            names += [f.of, f.by, str(f.time)] if isinstance(f, History) else [f.column]
        names += [*([self.weight] if self.weight else []), *self.keys]
        names += [self.split.column] if isinstance(self.split, ByTime | ByColumn) else []
        return tuple(dict.fromkeys(names))

    @property
    def times(self) -> tuple[str, ...]:
        """Columns of times, each once."""
        names = [self.split.column] if isinstance(self.split, ByTime) else []
        return tuple(dict.fromkeys(names + [str(history.time) for history in self.histories]))

    @property
    def absent(self) -> tuple[str, ...]:
        """Texts that stand for no category."""
        return ("", *_NOT_A_NUMBER, *self.missing, *(re.sub(WHOLE, r"\1", text) for text in self.missing))

    def described(self) -> dict[str, Any]:
        """Return the schema as JSON types; equal for equal schemas."""
        plain = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("label", "features", "split", "gather")
        }
        kinds = {"label": self.label, "features": self.features, "split": (self.split,)}
        for name, by_default in (("keys", ()), ("encoding", "utf-8")):  # so that older descriptions stay
            if plain[name] == by_default:
                plain.pop(name)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()} | {
            name: [[type(one).__name__, _fields(one)] for one in many] for name, many in kinds.items()
        }


_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Label, Categorical, MultiHot, Sequence, History, Dense, ByRows, AtRandom, ByTime, ByColumn, ByFile)
}


def restored(described: Mapping[str, Any]) -> Schema:
    """Return the schema that `Schema.described` describes, without `gather`.

    >>> schema = Schema("y", [Categorical("item"), Sequence("seen", share="item"), Dense("age", buckets=(18, 30))])
    >>> restored(schema.described()) == schema
    True
    """
    # Of tables prepared before this was refused, and which never looked at it.
    read = lambda fields: fields | {"missing": 0.0} if fields.get("buckets") else fields
    made = {
        name: [_KINDS[kind](**read(fields)) for kind, fields in described[name]]
        for name in ("label", "features", "split")
    }
    return Schema(**{**described, **made, "split": made["split"][0]})


def is_bucketed(feature: Feature) -> bool:
    """Whether a feature is a number that becomes a category."""
    return isinstance(feature, Dense) and bool(feature.buckets)


def table_of(feature: Feature) -> str:
    """Return the name of the table in which a feature is looked up."""
    return feature.column if isinstance(feature, Dense) else feature.share or feature.column


def _completed(feature: Feature, schema: Schema) -> Feature:
    """Return a feature with the min_count and hash_cap of the column whose table it shares, or with its time."""
    if isinstance(feature, Dense):
        return feature
    if isinstance(feature, History):
        return dataclasses.replace(feature, time=feature.time or next(iter(schema.times)))
    of = next((f for f in schema.features if f.column == feature.share), None)
    if not isinstance(of, Categorical):
        return feature
    for name, value in (("min_count", of.min_count), ("hash_cap", of.hash_cap)):
        given = getattr(feature, name)
        if given not in (None, value):
            raise ValueError(
                f"{name}={given} of {feature.column!r} is not that of {feature.share!r}, whose table it shares, "
                f"{value}: leave it out, or change that one."
            )
    return dataclasses.replace(feature, min_count=of.min_count, hash_cap=of.hash_cap)


def _fields(one: Any) -> dict[str, Any]:
    """Return the fields of a part of a schema; later ones only if they are set, so that older digests stay."""
    later = {Categorical: ("share",), Label: ("regression",)}.get(type(one), ())
    fields = dataclasses.asdict(one).items()
    return {k: list(v) if isinstance(v, tuple) else v for k, v in fields if v or k not in later}


def _check_schema(schema: Schema) -> None:
    given = [one.column for one in (*schema.label, *schema.features)] + ([schema.weight] if schema.weight else [])
    twice = sorted({name for name in given if given.count(name) > 1})
    if twice:
        raise ValueError(f"the column {twice[0]!r} is given twice, as feature, label or weight: a label tells itself.")
    if not schema.single and not schema.bags:
        raise ValueError("features has no Categorical, MultiHot, Sequence or Dense with buckets: no table would be.")
    text = schema.separator
    fits = text.isascii() and not set(text) & set('\n\r"') and len(set(text)) in (1, len(text))
    if not text or not fits or (schema.quote and len(text) > 1):
        raise ValueError(
            f"separator={text!r} must be one ASCII character, or with quote=False several, all alike or all different; "
            "and no quote or end of line."
        )
    for feature in (f for f in schema.features if not isinstance(f, Dense) and f.share is not None):
        of = next((f for f in schema.features if f.column == feature.share), None)
        if not isinstance(of, Categorical) or of.share is not None:
            raise ValueError(
                f"{feature.column!r} shares the table of {feature.share!r}, which is no Categorical here with a table "
                "of its own."
            )
    for history in schema.histories:
        _check_history(history, schema)
    try:
        ascii_too = bytes(range(128)).decode(schema.encoding) == bytes(range(128)).decode()
    except (LookupError, TypeError, UnicodeError):
        ascii_too = False
    if not ascii_too:
        raise ValueError(
            f"encoding={schema.encoding!r} is none that Python knows and in which ASCII characters are bytes: give one "
            "such as 'latin-1', and convert UTF-16 (iconv -f UTF-16 -t UTF-8)."
        )
    for name in schema.keys:
        if name == "row" or name in [label.column for label in schema.label]:
            raise ValueError(f"the key {name!r} has the name of something else in a file of predictions: rename it.")
    for bag in schema.bags:
        if {"sparse", "label", "dense", "weight"} & {bag.column}:
            raise ValueError(f"the bag {bag.column!r} has the name of something else in a batch: rename the column.")


def _check_history(history: History, schema: Schema) -> None:
    if history.time is None and not isinstance(schema.split, ByTime):
        raise ValueError(
            f"{history.column!r} has no time, and the split is not ByTime: give time=COLUMN, as a row sees what was "
            "before it."
        )
    if history.where is not None and not any(
        label.column == history.where and not label.regression for label in schema.label
    ):
        raise ValueError(
            f"where={history.where!r} of {history.column!r} is no label of 0 and 1 of this schema "
            f"({', '.join(label.column for label in schema.label)}): only rows where it is 1 are remembered."
        )


def _check_vocabulary(feature) -> None:
    if feature.min_count is None:
        if feature.share is not None:
            return  # the schema gives it those of the column
        object.__setattr__(feature, "min_count", _MIN_COUNT)
    whole_number(f"min_count of {feature.column!r}", feature.min_count)
    if feature.hash_cap is not None:
        whole_number(f"hash_cap of {feature.column!r}", feature.hash_cap, 2, MOST_ROWS)


def _check_bag(feature, name: str, hots: int) -> None:
    whole_number(f"{name} of {feature.column!r}", hots, 1, _MOST_HOTS)
    if not feature.separator:
        raise ValueError(f"separator={feature.separator!r} of {feature.column!r} must be text, such as '|'.")
