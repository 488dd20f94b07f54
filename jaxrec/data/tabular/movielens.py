"""MovieLens-1M as one table: each rating with its user, its movie, and the user's earlier ratings.

Legend: n ratings, T steps of a history.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.files import atomic_write

_COLUMNS = {
    "ratings.dat": ("user", "movie", "rating", "time"),
    "users.dat": ("user", "gender", "age", "occupation", "zip"),
    "movies.dat": ("movie", "title", "genres"),
}
_LAST = 50  # movies written per history; a schema may take fewer


def gather(sources: Sequence[Path], directory: Path) -> list[Path]:
    """Join ratings.dat, users.dat, movies.dat and histories into one Parquet file, once, in time order."""
    import polars as pl

    path = directory / "ratings.parquet"
    if path.exists():
        return [path]
    named = {source.name: source for source in sources}
    if sorted(named) != sorted(_COLUMNS) or len(sources) != len(_COLUMNS):
        raise ValueError(f"MovieLens-1M wants {', '.join(_COLUMNS)}, and got {', '.join(sorted(named))}.")
    ratings, users, movies = (_read(pl, named[name], columns) for name, columns in _COLUMNS.items())
    movies = movies.with_columns(pl.col("title").str.extract(r"\((\d{4})\)\s*$").alias("year"))
    for column, table, name in (("user", users, "users.dat"), ("movie", movies, "movies.dat")):
        lost = ratings.join(table, on=column, how="anti")
        if table[column].is_duplicated().any() or len(lost):
            which = lost[column][0] if len(lost) else table[column].filter(table[column].is_duplicated())[0]
            raise ValueError(f"{named[name]}: the {column} {which} is {'missing' if len(lost) else 'there twice'}.")
    numbers = ratings.with_columns(pl.col("rating", "time").cast(pl.Int64, strict=False))
    bad = numbers["rating"].is_null() | numbers["time"].is_null()
    if bad.any():
        line = int(np.argmax(bad.to_numpy())) + 1
        raise ValueError(f"{named['ratings.dat']}, line {line}: rating and time are whole numbers.")
    # In time order, and in file order within one second.
    numbers = numbers.with_row_index("line").sort("time", "line").drop("line")
    whole = numbers.join(users, on="user", how="left", maintain_order="left")
    whole = whole.join(movies.drop("title"), on="movie", how="left", maintain_order="left")
    whole = whole.with_columns(pl.Series("history", histories(whole["user"], whole["time"], whole["movie"])))
    with atomic_write(path) as partial:
        whole.write_parquet(partial, row_group_size=1 << 16)
    return [path]


def _read(pl, path: Path, columns: Sequence[str]) -> Any:
    text = path.read_bytes().decode("latin-1").replace("\r\n", "\n")  # the encoding of MovieLens-1M
    fields = [line.split("::") for line in text.split("\n") if line]
    wrong = next((at for at, found in enumerate(fields) if len(found) != len(columns)), None)
    if wrong is not None or not fields:
        line = "is empty" if wrong is None else f"line {wrong + 1}: {len(fields[wrong])} fields"
        raise ValueError(f"{path}, {line}, but each has {len(columns)}, separated by '::'.")
    return pl.DataFrame(fields, schema=dict.fromkeys(columns, pl.String), orient="row")


def histories(user: Any, time: Any, movie: Any) -> Any:
    """List what a user rated before each of n ratings in time order: newest last, without those of the same second."""
    import polars as pl

    rows = pl.DataFrame({"user": user, "time": time, "movie": movie}).with_row_index("row")
    rows = rows.sort("user", "row")
    starts = rows.select((pl.col("user") != pl.col("user").shift(1)).fill_null(True))["user"].to_numpy()
    moved = starts | rows.select((pl.col("time") != pl.col("time").shift(1)).fill_null(True))["time"].to_numpy()
    at = np.arange(len(rows))
    first = np.maximum.accumulate(np.where(starts, at, 0))
    end = np.maximum.accumulate(np.where(moved, at, 0))  # first rating of the same second
    begin = np.maximum(first, end - _LAST)
    many = end - begin
    taken = np.repeat(begin - (np.cumsum(many) - many), many) + np.arange(many.sum())
    lists = pl.DataFrame({"at": np.repeat(at, many), "movie": rows["movie"].gather(taken)})
    lists = lists.group_by("at", maintain_order=True).agg("movie")
    found = rows.with_columns(pl.Series("at", at)).join(lists, on="at", how="left", suffix="_before")
    return found.sort("row")["movie_before"]
