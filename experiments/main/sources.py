"""What a run trains, validates and tests on: the synthetic click log, Criteo's files, or a prepared table.

`--data` chooses one; each opens its own `Data`. Unset flags follow from the data.
"""

import abc
import dataclasses
import hashlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from jaxrec import metrics
from jaxrec.data.blocks import read_metadata
from jaxrec.data.synthetic import SyntheticClicks, scaled_cardinalities
from jaxrec.files import local_path
from main.cli import belongs, refuse, say
from main.click_data import Data, criteo_clicks, data_of_blocks, division_told, fields_of, synthetic_clicks
from main.table_data import open_rows, table_of, tables_by_field
from main.targets import CLICK, Targets, targets_of

DataKind = Literal["synthetic", "criteo", "tabular"]
# {preset: (rows, steps, test batches)} of the synthetic log, and the AUC of DLRM with seed 0 and no other flags.
SIZES = {"smoke": (20_000, 100, 8), "default": (200_000, 1_000, 50), "paper": (33_762_577, 20_000, 500)}
EXPECTED = {
    "smoke": "; with --preset smoke alone DLRM reaches about 0.716",
    "default": "; with the defaults DLRM reaches about 0.744",
    "paper": "",
}
# Defaults of `prepare`. The name of a directory prepared with these depends on its files alone.
PREPARATION: dict[str, Any] = {
    "min_count": 6, "hash_cap": None, "split": "time", "train_fraction": 5 / 6, "max_bad_rows": 0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Source(abc.ABC):
    """Data of a run, and their order."""

    data: DataKind = "synthetic"
    batch_size: int | None = None
    steps: int | None = None
    """Synthetic: batches of one epoch. Criteo: at most so many steps, of all epochs together."""
    epochs: int = 1
    """Passes over the training data. Synthetic: the same batches again."""
    shuffle: bool = False
    """Another order in every epoch, by --seed. Criteo: the blocks of 4,096 rows, then the rows within
    16 of them. Synthetic: the batches."""

    @abc.abstractmethod
    def open(self, seed: int) -> Data:
        """Return the data, prepared if necessary; shuffling, and the synthetic log, depend on the seed."""

    def for_training(self, seed: int) -> Data:
        """Return the data without what only an evaluation needs."""
        return self.open(seed)

    def tables(self) -> Mapping[str, str]:
        """Return {field: its table}."""
        return {field: field for field in fields_of()}

    def targets(self) -> Targets:
        """Return the labels to predict."""
        return CLICK

    def from_anywhere(self) -> Any:
        """Return the same with absolute paths of prepared data, for a process with another working directory."""
        return self

    def has_validation(self) -> bool:
        """Whether it has a validation set."""
        return True


@dataclasses.dataclass(frozen=True)
class Synthetic(Source):
    """The synthetic click log, sized by the preset."""

    read_by: ClassVar = "--data synthetic"
    preset: Literal["smoke", "default", "paper"] = "default"
    rows: int | None = None
    """Embedding rows in all; the Criteo Kaggle cardinalities, cut."""
    curved: float = 0.0
    """Share of what decides a click that sums and products of two fields cannot express."""
    exponent: float = 1.05
    """Of the power law of the ids: the larger, the more rows neighbouring batches share; 0 is uniform."""

    def check(self) -> None:
        """Raise ValueError if there are too few rows."""
        if self.rows is not None:
            scaled_cardinalities(self.rows)

    def for_training(self, seed: int) -> Data:
        rows, steps, test_batches = SIZES[self.preset]
        return synthetic_clicks(
            scaled_cardinalities(self.rows or rows), self.batch_size or 2048, self.steps or steps, seed,
            test_batches, epochs=self.epochs, shuffle=self.shuffle, curved=self.curved, exponent=self.exponent,
        )  # fmt: skip

    def open(self, seed: int) -> Data:
        """Return the log, with the metrics of its teacher."""
        data, teacher = self.for_training(seed), metrics.empty_evaluation()
        clicks = SyntheticClicks(data.cardinalities, exponent=self.exponent, seed=seed, curved=self.curved)
        for batch in data.test():
            found = metrics.evaluate_batch(clicks.teacher_logit(batch), batch.label, batch.weight)
            teacher = metrics.merge(teacher, found)
        best = metrics.summarize(teacher)
        return data._replace(
            expectation=f"the teacher that drew the labels reaches {best['auc']:.4f}" + EXPECTED[self.preset],
            best={"teacher_auc": best["auc"], "teacher_normalized_entropy": best["normalized_entropy"]},
        )


@dataclasses.dataclass(frozen=True)
class Files(Source):
    """Rows in files."""

    read_by: ClassVar = "--data criteo or tabular"
    path: tuple[Path, ...] = ()
    """Criteo: raw files (plain or .gz) in time order, or one prepared directory. Tabular: the directory that prepare.py
    --schema has made; or several, each prepared --onto the one before it, which are trained on in turn. The last one is
    validated and tested on."""
    validation_fraction: float = 0.0
    """Share of the training rows held out for validation, such as 0.1: the last ones of the files, or random ones if
    the preparation split at random."""

    def has_validation(self) -> bool:
        return self.validation_fraction > 0

    def check(self) -> None:
        """Raise ValueError if the flags contradict each other."""
        share = self.validation_fraction
        refuse(
            {
                f"--validation-fraction {share} must be a share from 0 to below 1, such as 0.1.": not 0 <= share < 1,
            }
        )

    def _how(self, seed) -> dict[str, Any]:
        order = seed if self.shuffle else None
        return {"epochs": self.epochs, "shuffle_seed": order, "validation_fraction": self.validation_fraction}


@dataclasses.dataclass(frozen=True)
class Criteo(Files):
    """Criteo rows; raw files are prepared in the current directory, as theirs may be read-only."""

    read_by: ClassVar = "raw Criteo files, with --data criteo and before they are prepared"
    data: DataKind = "criteo"
    min_count: int | None = None
    """Raw files: rarer categories share one row (6 unless hashing)."""
    hash_cap: int | None = None
    """Raw files: hash each field into this many rows instead."""
    split: Literal["time", "random"] | None = None
    """Raw files: train on the first lines and test on the last ones (time, the default), or split at random, alike for
    every --seed."""
    train_fraction: float | None = None
    """Raw files: share of the lines to train on; default 5/6."""
    max_bad_rows: int | None = None
    """Raw files: number of malformed lines to skip before giving up; default 0."""

    def check(self) -> None:
        given = {name: getattr(self, name) for name in PREPARATION if getattr(self, name) is not None}
        refuse(
            {
                "--data criteo needs --path: raw Criteo files, or a directory made by prepare.py.": not self.path,
                f"--path {' '.join(map(str, self.path))}: a prepared directory stands alone, without other files.": (
                    self.path[1:] and any(path.is_dir() for path in self.path)
                ),
            }
        )
        super().check()
        refuse({belongs(name, value, self.read_by): self.path[0].is_dir() for name, value in given.items()})

    @property
    def preparation(self) -> dict[str, Any]:
        """The given flags of the preparation that differ from its defaults."""
        given = {name: getattr(self, name) for name in PREPARATION}
        return {name: value for name, value in given.items() if value is not None and value != PREPARATION[name]}

    @property
    def prepared(self) -> Path:
        """The prepared directory that is given, or in which the raw files are to be prepared."""
        return self.path[0] if self.path[0].is_dir() else prepared_directory(self.path, self.preparation)

    def from_anywhere(self) -> Any:
        return Criteo(**vars(self) | dict.fromkeys(PREPARATION) | {"path": (local_path(self.prepared),)})

    def open(self, seed: int) -> Data:
        """Return the rows, prepared in the current directory if necessary."""
        from jaxrec.data.criteo import prepare

        if self.prepared != self.path[0]:
            say(f"preparing {', '.join(map(str, self.path))} in {self.prepared}")
            prepare(self.path, self.prepared, **self.preparation)
        data = criteo_clicks(self.prepared, self.batch_size, self.steps, **self._how(seed))
        reached = (
            "with the defaults DLRM reaches about 0.761 in one pass over a sample of 110,000 rows of Criteo Kaggle"
        )
        return data._replace(expectation=reached)


@dataclasses.dataclass(frozen=True)
class Tabular(Files):
    """A table that prepare.py --schema has prepared."""

    read_by: ClassVar = "--data tabular"
    data: DataKind = "tabular"
    labels: tuple[str, ...] = ()
    """Labels of the schema to predict; the first of them is the main one, whose figures are plain. Default: the first
    of the schema."""
    label_weights: tuple[float, ...] = ()
    """Weight of the loss of each of --labels; default 1 each."""

    def check(self) -> None:
        super().check()
        refuse(
            {
                "--data tabular needs --path: the directory that prepare.py --schema has made, or several.": (
                    not self.path or not all(path.is_dir() for path in self.path)
                ),
                belongs("steps", self.steps, "a single directory"): self.steps is not None and len(self.path) > 1,
            }
        )
        for earlier, later in itertools.pairwise(self.path):
            if table_of(earlier)["digest"] not in table_of(later).get("onto", ()):
                raise ValueError(
                    f"--path {earlier} {later}: {later} was not prepared onto {earlier}, so their rows stand for other "
                    f"categories: prepare it with --onto {earlier}, in another directory."
                )

    def from_anywhere(self) -> Any:
        return dataclasses.replace(self, path=tuple(map(local_path, self.path)))

    def has_validation(self) -> bool:
        """Whether its schema has set validation rows apart, or --validation-fraction does."""
        return super().has_validation() or "validation" in read_metadata(local_path(self.path[-1]))["rows"]

    def tables(self) -> Mapping[str, str]:
        return tables_by_field(table_of(self.path[-1]))

    def targets(self) -> Targets:
        return targets_of(table_of(self.path[-1]), self.labels, self.label_weights)

    def open(self, seed: int) -> Data:
        found: Data | None = None
        for directory in self.path:
            data = self._opened(directory, seed, self.batch_size if found is None else found.batch_size)
            found = data if found is None else data.after(found)
        assert found is not None  # as `check` has seen a directory
        return found

    def _opened(self, directory: Path, seed: int, batch_size: int | None) -> Data:
        share = self.validation_fraction
        table, metadata = table_of(directory), read_metadata(local_path(directory))
        own = "validation" in metadata["rows"]
        if own and share:
            raise ValueError(
                f"--validation-fraction {share}: {directory} has validation rows of its own. Leave it out."
            )
        split = metadata["options"]["schema"]["split"][0][0]
        if share and split == "ByTime":
            raise ValueError(
                f"--validation-fraction {share} takes the last rows of the files, which need not be the latest, and "
                f"{directory} is split by time: prepare it with ByTime(..., validation={share:g}) instead."
            )
        targets = self.targets()
        data = data_of_blocks(
            open_rows(directory, "train", targets), open_rows(directory, "test", targets),
            open_rows(directory, "validation", targets) if own else None, batch_size=batch_size, steps=self.steps,
            at_random=split == "AtRandom", **self._how(seed),
        )  # fmt: skip
        return data._replace(
            cardinalities=tuple(table["tables"].values()),
            vocabulary_digest=table["digest"],
            division=division_told(metadata),
            table=table,
            targets=targets,
            expectation=expectation(targets, table, metadata["label_mean"]["train"]),
        )


def expectation(targets: Targets, table: Mapping[str, Any], mean: float) -> str:
    """Say what is known of the main label before training; `mean` is that of the first label of the table."""
    first = targets[0]
    if first.moments is not None:
        return f"nobody knows; {first.name!r} has the deviation {first.moments[1]:.4g}, the RMSE of its mean"
    if first.name != table["labels"][0]:
        return "nobody knows"
    return f"nobody knows; the first label, {first.name!r}, is 1 in {mean:.4f} of the training rows"


SOURCES: dict[DataKind, type[Source]] = {"synthetic": Synthetic, "criteo": Criteo, "tabular": Tabular}


def prepared_directory(sources: tuple[Path, ...], options: Mapping[str, Any] | None = None) -> Path:
    """Return where raw files are prepared: in the current directory, as theirs may be read-only.

    Files of one name in two directories get distinct names, and so does one file prepared with other options.
    """
    words = [str(local_path(source)) for source in sources]
    words += [f"{name}={value!r}" for name, value in sorted((options or {}).items())]
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()
    return Path(f"{sources[0].name.split('.')[0]}.{digest[:8]}.prepared")
