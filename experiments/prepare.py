"""Prepare click logs for training, Criteo's or any table with a schema; a killed run resumes where it was.

    python experiments/prepare.py --sources train.txt --directory criteo.prepared
    python experiments/prepare.py --sources day_0.gz day_1.gz --directory day01.prepared --hash-cap 1000000
    python experiments/prepare.py --schema schema.py --sources a.csv b.parquet --directory mine.prepared
    python experiments/prepare.py --schema schema.py --sources parts/ --directory mine.prepared
    python experiments/prepare.py --schema schema.py --sources tuesday.csv --onto monday --directory tuesday
    python experiments/prepare.py --schema schema.py --sources tfds:movielens/100k-ratings --directory ml.prepared

A schema is a Python file that defines `schema = Schema(...)` (docs/your_data.md), or one of criteo, criteo_x1,
criteo_x4, avazu, movielens_1m (--sources ratings.dat users.dat movies.dat). tfds:NAME, or tfds:NAME@train,test, is a
data set that tfds has prepared as array_record: nothing is downloaded, and DIRECTORY.records may be deleted afterwards.
Exit codes: 0 done, 1 refused or failed (one line gives the reason and the remedy), 2 wrong flags, 130 Ctrl-C, 143
SIGTERM.
"""

import dataclasses
import errno
import os
import signal
import sys
from pathlib import Path
from typing import Literal

_OF_CRITEO = ("min_count", "hash_cap", "split", "train_fraction", "seed")
_GO_ON = "the same command goes on where it was"
_REMEDIES = {
    errno.ENOSPC: f"free some space; {_GO_ON}",
    errno.EDQUOT: f"free some space; {_GO_ON}",
    errno.EACCES: "give yourself the rights, or name files and directories that you may read and write",
    errno.EPERM: "give yourself the rights, or name files and directories that you may read and write",
    errno.EROFS: "give a directory that may be written",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Flags; see `jaxrec.data.criteo.prepare` and, with --schema, `jaxrec.data.tabular.prepare`."""

    sources: tuple[Path, ...]
    """Raw files in time order, plain or .gz, or a directory of part files, sorted by name; with --schema CSV, other
    text, Parquet, or one tfds:NAME."""
    directory: Path
    schema: str | None = None
    """A Python file with a schema, or the name of a built-in one; Criteo's raw files need none."""
    min_count: int | None = None
    """Vocabulary: rarer categories share one row (6 unless hashing)."""
    hash_cap: int | None = None
    """Hash each field into this many rows instead."""
    split: Literal["time", "random"] = "time"
    train_fraction: float = 5 / 6
    seed: int = 0
    onto: Path | None = None
    """With --schema: a directory prepared before, of which these are newer rows. Its categories keep their rows."""
    max_bad_rows: int = 0
    tfds_directory: Path | None = None
    """Where tfds keeps its data sets, for tfds:NAME; default ~/tensorflow_datasets."""


def main() -> int:
    """Run the preparation; every outcome has its own line and exit code."""
    _on_signals(_leave)
    try:
        print(_prepared())
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        return _end(_stopped(number), 128 + number)
    except (ValueError, ImportError) as error:
        return _end(f"error: {error}", 1)
    except MemoryError:
        return _end(f"error: out of memory: hash with --hash-cap, or use a machine with more; {_GO_ON}.", 1)
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, f"if that can be mended, {_GO_ON}")
        named = f"{error.filename}: " if error.filename else ""
        return _end(f"error: {named}{error.strerror or error}. Remedy: {remedy}.", 1)
    return 0


def _prepared() -> str:
    """Prepare the sources; return the text to print."""
    # Imported here, after the signal handler is set: the imports take seconds.
    import tyro
    from main.cli import help_of
    from main.table_summary import Bars, warnings_of

    from jaxrec.data.blocks import tfds_module
    from jaxrec.data.criteo import prepare

    tfds_module()
    _on_signals(_stop)
    config = tyro.cli(Config, **help_of(__doc__))
    if config.schema is not None:
        return _prepared_table(config)
    if config.onto:
        raise ValueError("--onto is of --schema: give one, which says what the columns are.")
    if any(map(_of_tfds, config.sources)) or config.tfds_directory:
        raise ValueError("tfds:NAME and --tfds-directory are of --schema: give one, which says what the columns are.")
    if config.seed and config.split == "time":
        raise ValueError(f"--seed {config.seed} is for --split random: add that, or leave it out.")
    flags = dataclasses.asdict(config)
    del flags["schema"], flags["tfds_directory"], flags["onto"]
    with Bars() as bars:
        metadata = prepare(flags.pop("sources"), flags.pop("directory"), **flags, progress=bars.show)
    lines = [f"{key}: {metadata[key]}" for key in ("rows", "label_mean", "cardinalities", "skipped_rows")]
    unknown = metadata.get("unknown_share", {})  # earlier versions did not count them
    for split in metadata["rows"] if unknown else ():
        shares = " ".join(f"{100 * of[split]:.1f}" for of in unknown.values())
        lines.append(f"unknown ids of C1 to C26 in {split}, %: {shares}")
    return "\n".join(lines + warnings_of(unknown))


def _prepared_table(config: Config) -> str:
    """As `_prepared`, for a table with a schema."""
    from main.table_summary import Bars, draw, open_schema, words

    from jaxrec.data.tabular import prepare

    for field in dataclasses.fields(Config):
        flag = f"--{field.name.replace('_', '-')}"
        if field.name in _OF_CRITEO and getattr(config, field.name) != field.default:
            raise ValueError(f"{flag} is for Criteo's raw files: with --schema, the schema says it.")
    schema = open_schema(config.schema)
    with Bars() as bars:
        sources = _files_of(config, schema, bars)
        metadata = prepare(
            sources, config.directory, schema, max_bad_rows=config.max_bad_rows, onto=config.onto, progress=bars.show
        )
    draw(config.directory / "summary.png", metadata)
    return words(metadata)


def _of_tfds(source: Path) -> bool:
    return str(source).startswith("tfds:")


def _files_of(config: Config, schema, bars) -> list[Path]:
    """Return the sources as files; those of a tfds data set are written first."""
    from jaxrec.data.tabular import Progress, export_records

    if not any(map(_of_tfds, config.sources)):
        if config.tfds_directory:
            raise ValueError("--tfds-directory is for --sources tfds:NAME: give that, or leave it out.")
        return list(config.sources)
    if len(config.sources) > 1:
        raise ValueError("a tfds data set stands alone: --sources tfds:NAME, or tfds:NAME@SPLIT,SPLIT for some splits.")
    name, _, splits = str(config.sources[0]).removeprefix("tfds:").partition("@")
    records = config.directory.with_name(f"{config.directory.name}.records")
    tell = lambda rows: bars.show(Progress("records", rows, None))
    return export_records(
        name, [split for split in splits.split(",") if split], schema.used, records,
        data_directory=config.tfds_directory, progress=tell,
    )  # fmt: skip


def _on_signals(handler) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _leave(number, _frame):
    """Exit at once: nothing has begun yet, and imports would turn an exception into another one."""
    os.write(2, f"{_stopped(number)}\n".encode())
    os._exit(128 + number)


def _stopped(number) -> str:
    return f"stopped by {signal.Signals(number).name}: {_GO_ON}."


def _stop(number, _frame):
    """Raise an exception, which removes partially written files as it propagates."""
    # A second signal ends the process at once, at no more cost than a kill.
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt(number)


def _end(line: str, code: int) -> int:
    print(line, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
