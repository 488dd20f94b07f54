"""The flags that choose the data of the click job, the rules between them, and the data that they
name.

An experiment inherits from `DataFlags`, refuses `rules(config)` and reads `data_of(config)`.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from click_data import Data, criteo_clicks, synthetic_clicks
from contract import Flags, say

from jaxrec import metrics
from jaxrec.data.synthetic import SyntheticClicks, scaled_cardinalities
from jaxrec.files import local_path

EXPECTED_AUC = {"smoke": 0.716, "default": 0.744}  # of DLRM, measured with seed 0
# Of `prepare`, where a flag is not given. A directory made with these bears the name of its files
# alone.
PREPARATION: dict[str, Any] = {
    "min_count": 6, "hash_cap": None, "split": "time", "train_fraction": 5 / 6, "max_bad_rows": 0,
}  # fmt: skip
# Flags that say where and how a run is made, and not what comes out of it.
_SAME_RESULTS = {
    "workdir", "resume", "requeue", "save_every_steps", "evaluations", "tables", "table_directory", "preset",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DataFlags(Flags):
    """Which data a run reads, in which order; what is not given follows from the data and the
    preset."""

    data: Literal["synthetic", "criteo", "tabular"] = "synthetic"
    path: tuple[Path, ...] = ()
    """Criteo: raw files (plain or .gz) in time order, or one prepared directory. Tabular: the directory that prepare.py
    --schema has made."""
    rows: int | None = None
    """Synthetic: embedding rows in all; the Criteo Kaggle cardinalities, cut."""
    curved: float = 0.0
    """Synthetic: share of what decides a click that sums and products of two fields cannot express."""
    batch_size: int | None = None
    steps: int | None = None
    """Synthetic: batches of one epoch. Criteo: at most so many steps, of all epochs together."""
    epochs: int = 1
    """Passes over the training data. Synthetic: the same batches again."""
    shuffle: bool = False
    """Another order in every epoch, by --seed. Criteo: the blocks of 4,096 rows, then the rows within
    16 of them. Synthetic: the batches."""
    validation_fraction: float = 0.0
    """Criteo: this share of the training rows does not train but validates, such as 0.1: the last ones
    in time; or random ones, if the preparation split at random. The synthetic log has a validation of
    its own."""
    min_count: int | None = None
    """Raw Criteo files: rarer categories share one row (6 unless hashing)."""
    hash_cap: int | None = None
    """Raw Criteo files: hash each field into so many rows instead."""
    split: Literal["time", "random"] | None = None
    """Raw Criteo files: the first lines train and the last ones test (time, unless given), or random
    ones, the same for every --seed."""
    train_fraction: float | None = None
    """Raw Criteo files: share of the lines that trains; 5/6 unless given."""
    max_bad_rows: int | None = None
    """Raw Criteo files: how many malformed lines to leave out before giving up; 0 unless given."""


def data_of(config: DataFlags) -> Data:
    """What the flags name.

    Raises:
      ValueError: as `synthetic_clicks`, `criteo_clicks`, `tabular_data` and `prepare`.
    """
    if config.data == "tabular":
        from table_data import tabular_data

        return tabular_data(config)
    return synthetic_data(config) if config.data == "synthetic" else criteo_data(config)


def synthetic_data(config) -> Data:
    """The synthetic click log, sized by the preset, with what its teacher reaches."""
    rows, steps, test_batches = {
        "smoke": (20_000, 100, 8),
        "default": (200_000, 1_000, 50),
        "paper": (33_762_577, 20_000, 500),
    }[config.preset]
    cardinalities = scaled_cardinalities(config.rows or rows)
    data = synthetic_clicks(
        cardinalities, config.batch_size or 2048, config.steps or steps, config.seed, test_batches,
        epochs=config.epochs, shuffle=config.shuffle, curved=config.curved,
    )  # fmt: skip
    clicks, teacher = SyntheticClicks(cardinalities, seed=config.seed, curved=config.curved), metrics.empty_evaluation()
    for batch in data.test():
        found = metrics.evaluate_batch(clicks.teacher_logit(batch), batch.label, batch.weight)
        teacher = metrics.merge(teacher, found)
    best = metrics.summarize(teacher)
    return data._replace(
        expectation=f"the teacher that drew the labels reaches {best['auc']:.4f}" + expected_auc(config),
        best={"teacher_auc": best["auc"], "teacher_normalized_entropy": best["normalized_entropy"]},
    )


def expected_auc(config) -> str:
    """What was measured with a preset, for a run that changes nothing that matters."""
    known = EXPECTED_AUC.get(config.preset)
    return f"; this preset reaches about {known}" if known and _is_usual(config) else ""


def _is_usual(config, *but: str) -> bool:
    """Whether all flags that matter for the result are the defaults, but for some."""
    fields = {field.name for field in dataclasses.fields(config)} - _SAME_RESULTS - {*but}
    return all(getattr(config, name) == getattr(type(config)(), name) for name in fields)


def criteo_data(config) -> Data:
    """Criteo rows, prepared in the current directory if they are not yet."""
    directory, options = config.path[0], preparation(config)
    if not directory.is_dir():
        directory = prepared_directory(config.path, options)
        _prepare(config.path, directory, options)
    reached = "about 0.761 in one pass over a sample of 110,000 rows of Criteo Kaggle"
    data = criteo_clicks(
        directory, config.batch_size, config.steps, epochs=config.epochs,
        shuffle_seed=config.seed if config.shuffle else None, validation_fraction=config.validation_fraction,
    )  # fmt: skip
    usual = _is_usual(config, "data", "path", "seed")
    return data._replace(expectation=reached if usual else f"with the defaults, DLRM reaches {reached}")


def _prepare(paths, directory, options):
    from jaxrec.data.criteo import prepare

    say(f"preparing {', '.join(map(str, paths))} in {directory}")
    prepare(paths, directory, **options)


def preparation(config) -> dict[str, Any]:
    """The flags of the preparation that are given, and are not what it does anyway."""
    given = {name: getattr(config, name) for name in PREPARATION}
    return {name: value for name, value in given.items() if value is not None and value != PREPARATION[name]}


def prepared_directory(sources: tuple[Path, ...], options: Mapping[str, Any] | None = None) -> Path:
    """Where raw files are prepared: here, as they may be read-only.

    Two files of one name in two folders are two, and so is one file that is prepared in two ways.

    Args:
      sources: raw files.
      options: of the preparation, those that are not the defaults.
    """
    words = [str(local_path(source)) for source in sources]
    words += [f"{name}={value!r}" for name, value in sorted((options or {}).items())]
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()
    return Path(f"{sources[0].name.split('.')[0]}.{digest[:8]}.prepared")


def rules(config) -> dict[str, object]:
    """{what is wrong, and the remedy: whether it is} of flags of the data that do not fit each
    other."""
    synthetic, paths = config.data == "synthetic", ", ".join(map(str, config.path))
    directories = [path for path in config.path if path.is_dir()]
    share, trains = config.validation_fraction, config.train_fraction
    return {
        f"--path {paths} is not read by --data synthetic: add --data criteo or --data tabular, or leave it out.": (
            synthetic and paths
        ),
        "--data criteo needs --path: raw Criteo files, or a directory made by prepare.py.": (
            config.data == "criteo" and not paths
        ),
        "--data tabular needs --path: the directory that prepare.py --schema has made.": (
            config.data == "tabular" and len(directories) != 1
        ),
        f"--path {paths}: a prepared directory stands alone, without other files.": directories and config.path[1:],
        f"--rows {config.rows} is for --data synthetic: all other tables follow from their data.": (
            not synthetic and config.rows is not None
        ),
        f"--curved {config.curved} is for --data synthetic: leave it out.": not synthetic and config.curved,
        f"--preset {config.preset} is a size of --data synthetic: limit other data by --steps.": (
            not synthetic and config.preset != "default"
        ),
        f"--rows {config.rows} must be at least 78, three for each of the 26 fields.": (
            config.rows is not None and config.rows < 78
        ),
        f"--validation-fraction {share} must be a share from 0 to below 1, such as 0.1.": not 0 <= share < 1,
        f"--validation-fraction {share} is for --data criteo: the synthetic log draws its validation apart, and takes "
        "nothing from training. Leave it out.": synthetic and share,
        f"--train-fraction {trains} must be a share between 0 and 1, such as 0.8.": (
            trains is not None and not 0 < trains < 1
        ),
        f"--min-count {config.min_count} (a vocabulary) and --hash-cap {config.hash_cap} (hashing) exclude each other: "
        "give one.": config.min_count is not None and config.hash_cap is not None,
    } | _rules_of_preparation(config, synthetic, directories)


def _rules_of_preparation(config, synthetic, directories):
    """Each flag of the preparation is refused where nothing is prepared."""
    broken = {}
    for name in PREPARATION:
        flag, given = f"--{name.replace('_', '-')} {getattr(config, name)}", getattr(config, name) is not None
        broken[f"{flag} prepares Criteo files, and --data synthetic has none: leave it out."] = given and synthetic
        decided = f"{flag} was to be decided when {', '.join(map(str, directories))} was prepared"
        broken[f"{decided}: leave it out, or give the raw files as --path."] = given and directories
    return broken
