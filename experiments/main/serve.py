"""Predict rows with a model that export.py --serve has written, without jaxrec: jax, numpy and flatbuffers suffice.

    python serve.py rows.csv predictions.csv

`export.py --serve DIR` copies this file to DIR, beside what it reads. A server imports it: `Model(directory)` has
`encode`, from rows as a file or a request has them to ids and numbers, and `predict`, from these to predictions.

Legend: b rows, H categories of a bag.
"""

import csv
import datetime
import itertools
import json
import math
import re
import sys
from pathlib import Path

import jax
import numpy as np
from jax import export


class Model:
    """A model of a run, with its tables in memory.

    Args:
      directory: what `export.py --serve` has written.
    """

    def __init__(self, directory):
        directory = Path(directory)
        self.about = json.loads((directory / "serve.json").read_text(encoding="utf-8"))
        self.index(json.loads((directory / "categories.json").read_text(encoding="utf-8")))
        with np.load(directory / "weights.npz") as weights:
            dense = {name: weights[name] for name in weights if name.startswith("dense")}
            join = lambda tables: np.concatenate([weights[f"table.{name}"] for name in tables])
            stacks = {name: join(tables) for name, tables in self.about["stacks"].items()}
        self._weights = jax.device_put((dense, stacks))
        self._call = jax.jit(export.deserialize((directory / "model.stablehlo").read_bytes()).call)

    def index(self, categories):
        """Set the rows of all categories; row 0 is for missing ones and row 1 for unknown ones."""
        self._no_numbers = {float(text) for text in self.about["absent"] if _NUMBER.fullmatch(text)}
        self._rows = {table: {name: 2 + i for i, name in enumerate(names)} for table, names in categories.items()}

    def predict(self, ids, dense):
        """Return predictions f32[b] of ids {lookup: i32[b, ...]} and numbers f32[b, N], of K labels f32[b, K].

        They are probabilities of labels of 0 and 1, and the numbers of a regression.
        """
        return np.asarray(self._call(*self._weights, ids, dense))

    def encode(self, rows):
        """Return ids and numbers, the inputs of `predict`, of rows {column: text, number or list; None if missing}.

        Raises ValueError for a row without one of the columns, and for what is no number where one must be.
        """
        about = self.about
        ids = {name: np.full((len(rows), *shape), -1, np.int32) for name, shape in about["lookups"].items()}
        dense = np.zeros((len(rows), about["numbers"]), np.float32)
        for feature in about["features"]:
            kind, column = feature["kind"], feature["column"]
            for number, row in enumerate(rows):
                if column not in row:
                    raise ValueError(f"row {number} has no {column!r}: give None if it is missing.")
                found = _OF_KIND[kind](self, feature, row[column])
                if kind == "number":
                    dense[number, feature["place"]] = found
                elif kind == "bag":
                    ids[column][number, : len(found)] = found
                else:
                    ids["sparse"][number, feature["place"]] = found
        return ids, dense

    def _category(self, text):
        """Return a category without decimals of a whole number; None if there is none."""
        if text is None:
            return None
        if isinstance(text, bytes | datetime.date | datetime.time | datetime.timedelta | np.datetime64):
            raise ValueError(f"{text!r:.80} is {type(text).__name__}: give it as text, as the training rows had it.")
        text = str(text).lower() if isinstance(text, bool | np.bool_) else str(text)
        text = re.sub(r"\A([+-]?[0-9]+)\.0+\Z", r"\1", text)
        return None if text in self.about["absent"] else text

    def _number(self, feature, given):
        """Return a number, NaN if it is missing; of a time, seconds since 1970."""
        if (text := self._category(int(given) if isinstance(given, bool | np.bool_) else given)) is None:
            return math.nan
        if not _NUMBER.fullmatch(text):
            if not feature["time"]:
                raise ValueError(f"{text!r:.80} is no number.")
            return _moment(text)
        value = float(text)
        return math.nan if value in self._no_numbers else value

    def _row_of(self, feature, text):
        """Return the row of the table that a category is looked up in."""
        if (name := self._category(text)) is None:
            return 0
        if feature["hash_cap"] is None:
            rows = self._rows[feature["table"]]
            if isinstance(text, bool | np.bool_) and name not in rows:
                name = name.title()  # as text has them that pandas writes
            return rows.get(name, 1)
        return 1 + hashed(name, hashed(feature["table"])) % (feature["hash_cap"] - 1)

    def _bucket_of(self, feature, text):
        value = self._number(feature, text)
        return 0 if math.isnan(value) else 1 + int(np.searchsorted(feature["bounds"], value, side="right"))

    def _rows_of(self, feature, text):
        """Return the rows of the categories of a bag, given as text, as a list, or as one category."""
        if isinstance(text, str):
            whole = self._category(text)  # first, as in the preparation
            words = [] if whole is None else whole.split(feature["separator"])
        else:
            words = [*text] if isinstance(text, list | tuple | np.ndarray) else [text]
        words = [word for word in words if self._category(word) is not None]
        words = words[-feature["hots"] :] if feature["newest"] else words[: feature["hots"]]
        return [self._row_of(feature, word) for word in words]

    def _value_of(self, feature, text):
        value = self._number(feature, text)
        if math.isnan(value):
            return feature["missing"]
        value = math.log1p(max(value, 0)) if feature["log"] else value
        limit = float(np.finfo(np.float32).max)
        return min(max((value - feature["mean"]) / feature["deviation"], -limit), limit)


_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_OF_KIND = {"category": Model._row_of, "bucket": Model._bucket_of, "bag": Model._rows_of, "number": Model._value_of}


def _moment(text):
    """Parse an ISO 8601 date and time: seconds since 1970, in UTC unless it names another zone."""
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r:.80} is neither a number nor a date and time.") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def hashed(text, h=14695981039346656037):
    """Return the 64-bit FNV-1a hash of a text that follows a hash, with the finaliser of splitmix64."""
    most = (1 << 64) - 1
    for byte in text.encode():
        h = (h ^ byte) * 1099511628211 & most
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & most
    h = (h ^ h >> 27) * 0x94D049BB133111EB & most
    return h ^ h >> 31


def rows_of(about, path):
    """Yield the rows of a text file as {column: text}."""
    how = about["text"]
    csv.field_size_limit(1 << 30)
    with open(path, newline="", encoding=how["encoding"]) as file:
        split = lambda line: line.rstrip("\r\n").split(how["separator"])
        lines = csv.reader(file, delimiter=how["separator"]) if how["quote"] else map(split, file)
        columns = how["columns"] or next(lines)
        if lacking := {feature["column"] for feature in about["features"]} - set(columns):
            raise ValueError(f"{path} has no column {', '.join(sorted(lacking))}.")
        for number, line in enumerate(lines, 1 if how["columns"] else 2):
            if line in ([], [""]) and len(columns) > 1:
                continue
            if len(line) != len(columns):
                raise ValueError(f"{path}, row {number}: {len(line)} fields, and {len(columns)} columns.")
            yield dict(zip(columns, line, strict=True))


def main(source, target):
    """Write a file with the predictions of each row of a text file."""
    model, partial = Model(Path(__file__).parent), Path(f"{target}.partial")
    rows = rows_of(model.about, source)
    with open(partial, "w", encoding="utf-8") as out:
        out.write(",".join(f"{label}_prediction" for label in model.about["labels"]) + "\n")
        while some := list(itertools.islice(rows, 4096)):
            found = model.predict(*model.encode(some)).reshape(len(some), -1)
            out.writelines(",".join(f"{one:.9g}" for one in row) + "\n" for row in found)
    partial.replace(target)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (OSError, ValueError, csv.Error) as error:
        sys.exit(f"error: {error}")
