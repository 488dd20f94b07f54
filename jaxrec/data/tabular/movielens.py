"""MovieLens-1M as one table: each rating with its user and its movie."""

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


def gather(sources: Sequence[Path], directory: Path) -> list[Path]:
    """Join ratings.dat, users.dat and movies.dat into one Parquet file, once, in time order."""
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
