"""Rate and peak memory of preparing tables and reading them back: Criteo's format, CSV and Parquet.

    python experiments/preparation_rate.py                  5M rows of each, 3 rounds; 12 minutes on two cores
    python experiments/preparation_rate.py --rows 22000000 --formats criteo

The rows are generated. Those of `criteo` have 13 integers and 26 categorical columns, the largest with `--categories`
values; they get a vocabulary. `csv` and `parquet` hold one table: 3 single-category columns, 3 multi-hot, 2 sequences,
2 numbers, split by time. Each format is prepared by prepare.py in its own process, whose wall time, start-up included,
and peak resident memory are measured; then a loader reads the training rows in batches of 2,048, in file order and
shuffled. The formats take turns; figures are medians over the rounds, with minimum and maximum.
Result: results/two_cores_cpu/preparation_rate.json.
"""

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from main.cli import Flags, Run, command_line, listing
from studies.turns import in_turns

from jaxrec.data.criteo import open_split
from jaxrec.data.loader import Loader
from jaxrec.data.tabular import open_table

CHUNK_ROWS = 250_000
SCHEMA = """
from jaxrec.data.tabular import ByTime, Categorical, Dense, MultiHot, Schema, Sequence

schema = Schema(
    label="click",
    features=[
        Categorical("user"), Categorical("item"), Categorical("page"),
        MultiHot("tags", "|", at_most=4), MultiHot("topics", "|", at_most=4), MultiHot("queries", "|", at_most=4),
        Sequence("seen", "|", last=10, share="item"), Sequence("bought", "|", last=10, share="item"),
        Dense("price", log=True, standardise=True), Dense("age"),
    ],
    split=ByTime("hour", train=0.8, validation=0.1),
)
"""


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the measurement."""

    rows: int = 5_000_000
    categories: int = 1_000_000
    """Number of categories of the largest column."""
    rounds: int = 3
    formats: tuple[Literal["criteo", "csv", "parquet"], ...] = ("criteo", "csv", "parquet")


def main(config: Config) -> dict:
    """Generate, prepare and read; return the contents of results.json."""
    if config.preset == "smoke":
        config = dataclasses.replace(config, rows=20_000, categories=1_000, rounds=2)
    with Run("preparation_rate", config, config.workdir) as run:
        sources = {name: source_of(config, name, run.directory / name) for name in config.formats}
        ways = {name: functools.partial(measured, config, name, source) for name, source in sources.items()}
        results: dict[str, Any] = {"rows": config.rows, "rounds": config.rounds}
        for name, rounds in in_turns(ways, config.rounds, "rounds").items():
            results[f"{name}_source_gb"] = sources[name].stat().st_size / 1e9
            for key in rounds[0]:
                each = [one[key] for one in rounds]
                results[f"{name}_{key}"] = float(np.median(each))
                results |= {f"{name}_{key}_min": min(each), f"{name}_{key}_max": max(each)}
            shutil.rmtree(run.directory / name)
        run.close(results, listing(results, {name: [name] for name in config.formats}))
        return results


def source_of(config: Config, name: str, directory: Path) -> Path:
    """The file of one format, with its schema beside it if it needs one."""
    directory.mkdir()
    source = directory / f"rows.{name}"
    rng = np.random.default_rng(config.seed)
    WRITERS[name](source, _chunks(config, rng, _clicks if name != "criteo" else _log))
    (directory / "schema.py").write_text(SCHEMA)
    return source


def measured(config: Config, name: str, source: Path) -> dict[str, float]:
    """Figures of preparing and reading one format once; what was prepared is deleted afterwards."""
    prepared = source.with_name("prepared")
    flags = ["--sources", str(source), "--directory", str(prepared)]
    flags += [] if name == "criteo" else ["--schema", str(source.with_name("schema.py"))]
    seconds, peak = _run([sys.executable, str(Path(__file__).with_name("prepare.py")), *flags], source.with_name("log"))
    split = open_split(prepared, "train") if name == "criteo" else open_table(prepared, "train")
    found = {
        "prepared_gb": sum(path.stat().st_size for path in prepared.rglob("*") if path.is_file()) / 1e9,
        "rows_per_s": config.rows / seconds,
        "peak_gb": peak / 1e9,
        "loader_examples_per_s": _read_rate(Loader(split, 2048)),
        "shuffled_loader_examples_per_s": _read_rate(Loader(split, 2048, shuffle_seed=0)),
    }
    shutil.rmtree(prepared)
    return found


def _run(command: list[str], log: Path) -> tuple[float, int]:
    """Run a command; return wall seconds and peak resident bytes."""
    start = time.perf_counter()
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise OSError(f"{' '.join(command)} has failed: {log.read_text()[-500:]}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def _read_rate(loader: Loader) -> float:
    """Examples per second of one epoch."""
    start = time.perf_counter()
    examples = sum(int(batch.weight.sum()) for batch in loader)
    return examples / (time.perf_counter() - start)


# ---- rows


def _chunks(config: Config, rng, chunk: Callable) -> Iterator[Any]:
    for first in range(0, config.rows, CHUNK_ROWS):
        yield chunk(rng, first, min(CHUNK_ROWS, config.rows - first), config)


def _popular(rng, shape, categories: int) -> np.ndarray:
    """Categories with a skewed distribution: few are frequent, most are rare."""
    return (categories * rng.random(shape) ** 3).astype(np.int64)


def _log(rng, first: int, rows: int, config: Config) -> Any:
    """Rows in Criteo's format."""
    import polars as pl

    columns = {"label": rng.integers(0, 2, rows)}
    columns |= {f"I{i}": (rng.exponential(20, rows)).astype(np.int64) for i in range(13)}
    for i in range(26):
        columns[f"C{i}"] = _popular(rng, rows, max(4, config.categories // 2**i))
    frame = pl.DataFrame(columns)
    hexed = [pl.col(f"C{i}").map_elements(lambda value: f"{value:08x}", pl.String) for i in range(26)]
    return frame.with_columns(hexed)


def _clicks(rng, first: int, rows: int, config: Config) -> Any:
    """Rows of the table with several lookups."""
    import polars as pl

    def bags(prefix: str, categories: int, at_most: int) -> Any:
        ids = pl.Series("ids", _popular(rng, (rows, at_most), categories)).arr.to_list()
        frame = pl.DataFrame([ids, pl.Series("many", rng.integers(0, at_most + 1, rows))])
        texts = pl.col("ids").list.head(pl.col("many")).list.eval(pl.lit(prefix) + pl.element().cast(pl.String))
        return frame.select(texts.list.join("|")).to_series()

    of = lambda prefix, categories: pl.Series(_popular(rng, rows, categories)).cast(pl.String).str.replace("^", prefix)
    return pl.DataFrame({
        "click": rng.integers(0, 2, rows),
        "user": of("u", config.categories), "item": of("i", config.categories // 10), "page": of("p", 1_000),
        "tags": bags("t", 500, 4), "topics": bags("o", 100, 4), "queries": bags("q", 10_000, 4),
        "seen": bags("i", config.categories // 10, 10), "bought": bags("i", config.categories // 10, 5),
        "price": rng.exponential(10, rows).round(2), "age": rng.integers(15, 80, rows),
        "hour": first + np.arange(rows),
    })  # fmt: skip


def _write_text(path: Path, frames, separator: str, header: bool) -> None:
    with open(path, "wb") as file:
        for number, frame in enumerate(frames):
            frame.write_csv(file, include_header=header and number == 0, separator=separator)


def _write_parquet(path: Path, frames) -> None:
    import pyarrow.parquet

    writer: Any = None
    for frame in frames:
        table = frame.to_arrow()
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()


WRITERS: dict[str, Callable] = {
    "criteo": lambda path, frames: _write_text(path, frames, "\t", header=False),
    "csv": lambda path, frames: _write_text(path, frames, ",", header=True),
    "parquet": _write_parquet,
}


if __name__ == "__main__":
    command_line(main, Config, __doc__)
