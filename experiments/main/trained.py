"""A run of train.py opened for reading: its flags and images, and the model and rows that belong to them."""

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import optax

from jaxrec.checkpoint import DamagedImage, Image, images, newest_first, read_manifest, spec_of
from jaxrec.checkpoint.format import is_image, number_of
from jaxrec.data.blocks import read_metadata
from jaxrec.data.criteo import Encoder, open_encoder
from jaxrec.data.tabular import Vocabulary, open_vocabularies
from jaxrec.embedding import sgd
from jaxrec.files import local_path
from main.click_data import ClickJob, click_job, division_of, division_told, fields_of
from main.model import model_of, of_run
from main.run_dir import BEST
from main.signals import say
from main.sources import PREPARATION, Criteo, prepared_directory
from main.table_data import table_job, table_of
from main.targets import Targets, of_told, targets_of


class Trained(NamedTuple):
    """A run that has saved images."""

    directory: Path
    config: Mapping[str, Any]  # contents of config.json
    images: Path  # their directory
    image: Image  # the newest of them with a readable manifest


State = Literal["best", "last"] | int


def images_directory(directory: Path, state: State | None = "last") -> Path:
    """Return where the images of a state of a run are, given its directory, or the image directory itself.

    Args:
      state: the best evaluated state, which a run with --patience or --monitor keeps; the last one saved; or that of a
        step, as --keep-period keeps them: then its image. None for the best one if there is one.
    """
    directory = local_path(directory)
    if not (directory / "config.json").exists():
        return directory
    best, saved = directory / BEST, directory / "checkpoints"
    if isinstance(state, int):
        of_step = {number_of(path): path for path in images(saved)}
        if state not in of_step:
            raise ValueError(
                f"{saved} has no save of step {state}, but of {sorted(of_step)}: give one of these as --state."
            )
        return of_step[state]
    if state == "last" or not images(best):
        if state == "best":
            raise ValueError(
                f"{directory} has kept no best state: train.py does with --patience or --monitor, from its first "
                "evaluation on. Leave out --state for the last one."
            )
        return saved
    return best


def words_of(image: Image) -> str:
    """Return which image of a run is used, in words."""
    return f"{'the best state, ' if image.path.parent.name == BEST else ''}{image.path}, step {image.step}"


def open_run(directory: Path, state: State | None = None) -> Trained:
    """Open a run of train.py for reading; it may still be training.

    Args:
      state: as for `images_directory`.
    """
    directory = local_path(directory)
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} is no run: it has no config.json. Give the --workdir of a run of train.py.")
    try:
        config = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): repair or restore it.") from None
    missing = [key for key in ("data", "model") if key not in config]
    if config.get("experiment") != "train" or missing:
        raise ValueError(
            f"{directory} is a run of {config.get('experiment', 'an unknown experiment')}"
            + (f" without {', '.join(missing)}" if missing else "")
            + ": give the --workdir of a run of train.py."
        )
    found = images_directory(directory, state)
    return Trained(directory, config, found, _newest_manifest(found))


def _newest_manifest(directory):
    damaged = None
    for path in [directory] if is_image(directory) else newest_first(directory):
        try:
            return read_manifest(path)
        except DamagedImage as error:
            damaged = damaged or error
    if damaged is not None:
        raise damaged
    raise ValueError(f"{directory} holds no image yet: wait until the run has saved one, or stop it, as it saves then.")


def job_of(run: Trained, prepared: Path | None = None) -> ClickJob:
    """Return the model of a run over the tables of its images, without its optimizers.

    Args:
      prepared: current location of its prepared table; where the run had it if None. Only for --data tabular, where it
        names the tables.
    """
    width, widths = run.config["embedding_width"], {name: width for name, (_, width) in run.image.tables.items()}
    flags = {**run.config, "model": of_run(run.config["model"], run.directory)}
    how = optax.identity(), sgd(0.0), width, run.image.shards, run.image.seed, widths, spec_of(run.image).dtype
    if run.config["data"] == "tabular":
        table = table_of_run(run, table_directory(run, prepared))
        targets = targets_of_run(run, table)
        return table_job(table, model_of(flags, width, len(targets)), *how, targets)
    return click_job([rows for rows, _ in run.image.tables.values()], model_of(flags, width), *how)


def targets_of_run(run: Trained, table: Mapping[str, Any]) -> Targets:
    """Return what a run predicts: what its images say; of an older run, the first label of its prepared table."""
    return of_told(run.image.extra["targets"]) if "targets" in run.image.extra else targets_of(table)


def table_directory(run: Trained, given: Path | None = None) -> Path:
    """Return the prepared table on which a run was trained.

    Args:
      given: its current location; where the run had it if None.
    """
    directory = given or Path(run.config["path"][-1])
    if not directory.is_dir():
        raise ValueError(
            f"the prepared table of {run.directory} is not at {directory}, and it says what the tables stand for: give "
            "--prepared DIR, or start this where train.py was started."
        )
    return directory


def table_of_run(run: Trained, directory: Path) -> Mapping[str, Any]:
    """Return the metadata of a prepared table, checked against the tables of a run."""
    table = table_of(directory)
    refuse_other_ids(run, directory, table["tables"], table["digest"])
    return table


def vocabularies_of(run: Trained, given: Path | None = None) -> Mapping[str, Vocabulary]:
    """Return what the rows of a run's tables stand for; nothing, with a line that says why, if that cannot be read.

    Args:
      given: current location of its prepared table; where the run had it if None.
    """
    if run.config["data"] != "tabular":
        return {}
    try:
        directory = table_directory(run, given)
        table_of_run(run, directory)
        return open_vocabularies(directory)
    except ValueError as error:
        say(f"rows have no names: {error}", sys.stderr)
        return {}


def tested_on(run: Trained) -> int | None:
    """Return how many examples a run was last tested on, according to its files; None if they do not say."""
    lines = []
    if (run.directory / "metrics.jsonl").exists():
        lines = (run.directory / "metrics.jsonl").read_text(errors="replace").splitlines()
    if (run.directory / "results.json").exists():
        lines.append((run.directory / "results.json").read_text(errors="replace"))
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):  # the last line of an active run may be torn
            return int(json.loads(line)["test_examples"])
    return None


def prepared_of(run: Trained, given: Path | None = None) -> tuple[Path, Encoder]:
    """Return the prepared directory on which a run was trained, and its encoder of categories to ids.

    Args:
      given: its current location; where the run had it if None.
    """
    paths = tuple(map(Path, run.config["path"]))
    its = Criteo(path=paths, **{name: run.config.get(name) for name in PREPARATION})  # type: ignore[arg-type]
    candidates = [given] if given else [*paths[:1], prepared_directory(paths, its.preparation)]
    found = next((path for path in candidates if path.is_dir()), None)
    if found is None:
        raise ValueError(
            f"the prepared directory of {run.directory} is not at {' or '.join(map(str, candidates))}, and it says "
            "which category has which id: give --prepared DIR, or start this where train.py was started; if it is "
            "lost, prepare the same files with the same options (prepare.py) and give that."
        )
    encoder = open_encoder(found)
    tables = dict(zip(fields_of(), encoder.cardinalities, strict=True))
    refuse_other_ids(run, found, tables, encoder.digest)
    return found, encoder


def refuse_trained_rows(own: Path, other: Path) -> None:
    """Refuse a directory that divides rows of a run's own otherwise: the run may have been trained on what it tests.

    Ids alone do not tell: hashed ones are the same in every division.
    """
    (texts, options), (its_texts, its_options) = (
        division_of(read_metadata(local_path(directory))) for directory in (own, other)
    )
    if any(text in its_texts for text in texts) and (texts, options) != (its_texts, its_options):
        raise ValueError(
            f"{other} divides rows of {own} otherwise, so that the run may have been trained on some of its test rows: "
            "give the run's own directory, or one of other files."
        )


def refuse_other_division(run: Trained, directory: Path) -> None:
    """Refuse the prepared directory of a run if it divides rows otherwise than when the run was trained on them."""
    noted, now = run.image.extra.get("division"), division_told(read_metadata(local_path(directory)))
    if noted and noted != now and any(text in noted["texts"] for text in now["texts"]):
        raise ValueError(
            f"{directory} divides its rows otherwise than when {run.directory} was trained, so that the run may have "
            "been trained on some of its test rows: prepare the same sources with the same options again, or give "
            "other rows as --path."
        )


def refuse_other_ids(run: Trained, directory: Path, tables: Mapping[str, int], digest: str) -> None:
    """Refuse a prepared directory, of tables {name: rows}, whose ids do not belong to the tables of a run."""
    wanted = {name: rows for name, (rows, _) in run.image.tables.items()}
    names = dict.fromkeys((*wanted, *tables))
    noted = run.image.extra.get("vocabulary_digest") or digest
    other = [f"{name} has {tables.get(name)} rows, not {wanted.get(name)}" for name in names
             if tables.get(name) != wanted.get(name)]  # fmt: skip
    if other or noted != digest:
        why = ", ".join(other[:3]) or f"digest {digest}, not {noted}"
        raise ValueError(
            f"{directory} was prepared with another vocabulary than {run.directory} was trained with ({why}): give "
            "the run's own directory with --prepared, or raw files with --path, which are mapped as the run's were."
        )
