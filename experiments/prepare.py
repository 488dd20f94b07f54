"""Prepares Criteo click logs for training; a killed run goes on where it was.

python experiments/prepare.py --sources train.txt --directory criteo.prepared
python experiments/prepare.py --sources day_0.gz day_1.gz --directory day01.prepared --hash-cap 1000000
"""

import dataclasses
import sys
from pathlib import Path
from typing import Literal

import tyro
from tqdm import tqdm

from jaxrec.data.criteo import prepare


@dataclasses.dataclass(frozen=True)
class Config:
    """Flags; see `jaxrec.data.criteo.prepare`."""

    sources: tuple[Path, ...]
    """Raw files in time order, plain or .gz."""
    directory: Path
    min_count: int | None = None
    """Vocabulary: rarer categories share one row (6 unless hashing)."""
    hash_cap: int | None = None
    """Hash each field into so many rows instead."""
    split: Literal["time", "random"] = "time"
    train_fraction: float = 5 / 6
    seed: int = 0
    max_bad_rows: int = 0


if __name__ == "__main__":
    flags = dataclasses.asdict(tyro.cli(Config, description=__doc__))
    with tqdm(unit="lines", unit_scale=True, disable=None) as bar:
        try:
            metadata = prepare(flags.pop("sources"), flags.pop("directory"), **flags, progress=bar.update)
        except (ValueError, ImportError) as error:
            sys.exit(f"error: {error}")
    for key in ("rows", "label_mean", "cardinalities", "skipped_rows"):
        print(f"{key}: {metadata[key]}")
