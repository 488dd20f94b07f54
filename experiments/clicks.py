"""Click data for a training job, from its flags: the synthetic log, or Criteo's, prepared on the way.

The functions take the flags of the experiment: data, path, preset, rows, batch_size, steps, seed and those that they
refuse together.
"""

import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from contract import say

from jaxrec import metrics
from jaxrec.data.synthetic import SyntheticClicks, scaled_cardinalities
from jaxrec.files import local_path
from jaxrec.types import Batch

TEST_BATCH = 2048  # whatever the batch size: the test examples are the same
EXPECTED_AUC = {"smoke": 0.716, "default": 0.744}  # measured with seed 0


class Data(NamedTuple):
    """What a run reads: all its numbers and two ways to iterate."""

    cardinalities: tuple[int, ...]
    dense_features: int
    batch_size: int
    steps: int
    examples: int
    train: Callable[[int], Iterator[Batch]]  # from which step on -> batches
    test: Callable[[], Iterator[Batch]]
    expectation: str
    best: dict[str, float]  # metrics of the teacher, if there is one


def synthetic_data(config) -> Data:
    """The synthetic click log, sized by the preset."""
    rows, steps, test_batches = {
        "smoke": (20_000, 100, 8),
        "default": (200_000, 1_000, 50),
        "paper": (33_762_577, 20_000, 500),
    }[config.preset]
    batch_size, steps = config.batch_size or 2048, config.steps or steps
    clicks = SyntheticClicks(scaled_cardinalities(config.rows or rows), seed=config.seed)

    def test():
        return clicks.stream(TEST_BATCH, batches=test_batches, test=True)

    teacher = metrics.empty_evaluation()
    for batch in test():
        logit = clicks.teacher_logit(batch)
        teacher = metrics.merge(teacher, metrics.evaluate_batch(logit, batch.label, batch.weight))
    best = metrics.summarize(teacher)
    return Data(
        clicks.cardinalities,
        clicks.dense_features,
        batch_size,
        steps,
        steps * batch_size,
        lambda start: clicks.stream(batch_size, start, steps),
        test,
        f"the teacher that drew the labels reaches {best['auc']:.4f}" + expected_auc(config),
        {"teacher_auc": best["auc"], "teacher_normalized_entropy": best["normalized_entropy"]},
    )


def expected_auc(config) -> str:
    """What was measured with a preset, for a run that changes nothing that matters."""
    same = dataclasses.replace(
        config, workdir=None, resume=False, requeue=False, save_every_steps=None, evaluations=8, tables="device",
        table_directory=None,
    )  # fmt: skip
    known = EXPECTED_AUC.get(config.preset)
    return f"; this preset reaches about {known}" if known and same == type(config)(preset=config.preset) else ""


def criteo_data(config) -> Data:
    """Criteo rows, prepared in the current directory if they are not yet."""
    from jaxrec.data.criteo import open_split, prepare
    from jaxrec.data.loader import Loader

    directory = config.path[0]
    if not directory.is_dir():
        directory = prepared_directory(config.path)
        say(f"preparing {', '.join(map(str, config.path))} in {directory}")
        try:
            prepare(config.path, directory)
        except ValueError as error:
            raise ValueError(f"{error} (Other options are flags of prepare.py: give --path what it makes.)") from error
    train, test = open_split(directory, "train"), open_split(directory, "test")
    examples = sum(train.rows)
    # One pass over few rows wants many small steps: 2,048 reached 0.69-0.75 where 128 reaches 0.756.
    batch_size = config.batch_size or (128 if examples < 1_000_000 else 2048)
    steps = min(config.steps or sys.maxsize, -(-examples // batch_size))

    def batches(start):
        loader = Loader(train, batch_size)
        loader.seek(start)
        return itertools.islice(loader, steps - start)

    return Data(
        tuple(train.metadata["cardinalities"]),
        13,
        batch_size,
        steps,
        min(examples, steps * batch_size),
        batches,
        lambda: iter(Loader(test, TEST_BATCH)),
        "about 0.761 on a sample of 110,000 rows of Criteo Kaggle, about 0.80 on the whole set",
        {},
    )


def prepared_directory(sources: tuple[Path, ...]) -> Path:
    """Where raw files are prepared: here, as they may be read-only; two files of one name in two folders are two."""
    digest = hashlib.sha256("\n".join(str(local_path(source)) for source in sources).encode()).hexdigest()
    return Path(f"{sources[0].name.split('.')[0]}.{digest[:8]}.prepared")


def rules(config) -> dict[str, object]:
    """{what is wrong, and the remedy: whether it is} of flags that do not fit each other."""
    synthetic, paths = config.data == "synthetic", ", ".join(map(str, config.path))
    return {
        f"--path {paths} is not read by --data synthetic: add --data criteo, or leave it out.": synthetic and paths,
        "--data criteo needs --path: raw Criteo files, or a directory made by prepare.py.": not synthetic and not paths,
        f"--path {paths}: a prepared directory stands alone, without other files.": (
            len(config.path) > 1 and any(path.is_dir() for path in config.path)
        ),
        f"--rows {config.rows} is for --data synthetic: Criteo's tables follow from its data.": (
            not synthetic and config.rows is not None
        ),
        f"--preset {config.preset} is a size of --data synthetic: limit Criteo by --steps.": (
            not synthetic and config.preset != "default"
        ),
        f"--rows {config.rows} must be at least 78, three for each of the 26 fields.": (
            config.rows is not None and config.rows < 78
        ),
        f"--table-directory {config.table_directory} is for --tables host: add it, or leave the directory out.": (
            config.table_directory is not None and config.tables != "host"
        ),
        "--requeue needs --workdir and --resume: the same command must go on when it is started again.": (
            config.requeue and not (config.workdir and config.resume)
        ),
    }
