"""Evaluate a run of train.py on its test set or another file, or predict rows without labels; some seconds.

    python experiments/evaluate.py --run runs/a                       its own test set, once more
    python experiments/evaluate.py --run runs/a --path day_1.gz       other rows: Criteo's, or a table of one's own
    python experiments/evaluate.py --run runs/a --path b.prepared     the test rows of a prepared directory
    python experiments/evaluate.py --run runs/a --bootstrap 1000      and an interval of the AUC
    python experiments/evaluate.py --run runs/a --group C1 --segments C9 C17   and AUC within groups, and by segments

Writes AUC, log loss, normalised entropy and calibration to results.json, and the predictions, in row order, to
predictions.npz; predictions alone for rows without labels. Uses the best state of a run that keeps one, else the last,
from the newest whole image; the run may still be training.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro
from main import subsets
from main.cli import Figure, Run, command_line, grid, listing, plot, refuse, say
from main.click_data import TEST_BATCH, ClickJob, synthetic_clicks
from main.signals import Asked, stop_on_signals
from main.table_data import open_rows, with_vocabulary
from main.table_summary import open_schema, warnings_of
from main.trained import (
    State,
    Trained,
    job_of,
    open_run,
    prepared_of,
    refuse_trained_rows,
    table_directory,
    table_of_run,
    tested_on,
    vocabularies_of,
    words_of,
)

from jaxrec import metrics
from jaxrec.checkpoint import restore_for_prediction
from jaxrec.data.blocks import is_prepared, read_metadata
from jaxrec.data.criteo import has_labels, open_encoder, open_split, read_rows
from jaxrec.data.loader import Loader
from jaxrec.data.preparation import count_ids
from jaxrec.data.tabular import Vocabulary, raw, schema_of
from jaxrec.embedding import EmbeddingSpec
from jaxrec.files import atomic_write, local_path
from jaxrec.prefetch import planned
from jaxrec.types import Batch, TrainState

TENTHS, SYNTHETIC_EXAMPLES, MOST_UNKNOWN = 10, 50 * TEST_BATCH, 10
TABLE = {
    "Rows": ["rows", "step"],
    "Quality": ["auc", "log_loss", "normalized", "calibration"],
    "Within groups": ["gauc", "groups", "share_counted"],
    "Means": ["mean_"],
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Flags of an evaluation."""

    run_directory: Annotated[Path, tyro.conf.arg(name="run")]
    """The --workdir of a run of train.py."""
    workdir: Path | None = None
    path: tuple[Path, ...] = ()
    """Raw files or a directory of them, with or without labels, or one prepared directory; by default the run's own
    test set."""
    schema: str | None = None
    """For raw files of a run of --data tabular: its schema, if their text is written otherwise (separator, columns); by
    default that of the prepared table."""
    split: Literal["test", "validation", "train"] = "test"
    """Part of a prepared directory; only tables with a schema have a validation set."""
    prepared: Path | None = None
    """Current location of the run's prepared directory, if it has moved."""
    state: State | None = None
    """The best or the last state of the run; by default the best one if the run keeps it."""
    replica: int | Literal["mean"] = "mean"
    """Parameters that predict, if the run had several replicas: the mean of all, or one replica's, from 0."""
    group: str | None = None
    """A field, such as the user: the mean AUC within its categories, or equal numbers (GAUC)."""
    segments: tuple[str, ...] = ()
    """Categorical fields: normalised entropy, AUC and calibration of each of their largest categories."""
    bootstrap: int = 0
    """Resamples of the examples for a 95 % interval of the AUC."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Categorical fields named by --group and --segments."""
        return tuple(dict.fromkeys((*([self.group] if self.group else []), *self.segments)))


class Examples(NamedTuple):
    """Examples to predict."""

    batches: Iterator[Batch]
    labelled: bool
    words: str  # description for messages
    vocabularies: frozenset[str] = frozenset()  # fields whose unknown ids share row 1
    table: Mapping[str, Any] | None = None  # metadata of the prepared table


def examples_of(config: Config, run: Trained, job: ClickJob) -> Examples:
    """Return the rows that the flags select."""
    if run.config["data"] == "synthetic":
        return Examples(synthetic_test(run, job), True, "its own synthetic test set")
    if run.config["data"] == "tabular":
        return examples_of_table(config, run)
    directory, encoder = prepared_of(run, config.prepared)
    hashed = read_metadata(directory)["options"].get("hash_cap") is not None
    vocabularies = frozenset(() if hashed else run.image.tables)
    if has_raw_files(config):
        labelled = has_labels(config.path)
        blocks = read_rows(config.path, encoder, labelled)
        return Examples(in_batches(blocks, TEST_BATCH), labelled, ", ".join(map(str, config.path)), vocabularies)
    if config.path and open_encoder(config.path[0]).digest != encoder.digest:
        raise ValueError(
            f"{config.path[0]} was prepared with another vocabulary than {directory}, from which {run.directory} was "
            "trained, so that its ids mean other categories: give the raw files, which are mapped as the run's were."
        )
    directory = chosen(config, directory)
    rows = iter(Loader(open_split(directory, config.split), TEST_BATCH))
    return Examples(rows, True, f"{config.split} of {directory}", vocabularies)


def has_raw_files(config: Config) -> bool:
    """Whether --path names raw files, or a directory of them."""
    return bool(config.path) and not is_prepared(local_path(config.path[0]))


def chosen(config: Config, own: Path) -> Path:
    """Return the prepared directory of --path, or the run's own; it must not test what the run was trained on."""
    if not config.path:
        return own
    if config.split != "train":
        refuse_trained_rows(own, config.path[0])
    return config.path[0]


def examples_of_table(config: Config, run: Trained) -> Examples:
    """Return rows of a prepared table with the run's vocabulary, or of raw files mapped with it."""
    directory = table_directory(run, config.prepared)
    table = table_of_run(run, directory)
    own = with_vocabulary(table), table
    if has_raw_files(config):
        schema = open_schema(config.schema) if config.schema else schema_of(directory)
        labelled = raw.has_labels(config.path, schema)
        blocks = raw.read_rows(config.path, schema, directory, labelled)
        return Examples(in_batches(blocks, TEST_BATCH), labelled, ", ".join(map(str, config.path)), *own)
    directory = chosen(config, directory)
    table_of_run(run, directory)
    rows = Loader(open_rows(directory, config.split), TEST_BATCH)
    return Examples(iter(rows), True, f"{config.split} of {directory}", *own)


def synthetic_test(run: Trained, job: ClickJob) -> Iterator[Batch]:
    """Return the test examples of a synthetic run, as many as it was last tested on."""
    batches = (tested_on(run) or SYNTHETIC_EXAMPLES) // TEST_BATCH
    cardinalities = tuple(table.rows for table in job.spec.tables.values())
    curved = run.config.get("curved", 0.0)  # runs of an earlier version had no such flag
    return synthetic_clicks(cardinalities, TEST_BATCH, 1, run.config["seed"], batches, curved=curved).test()


def in_batches(blocks: Iterable[dict[str, np.ndarray]], size: int) -> Iterator[Batch]:
    """Cut blocks of rows into batches of one size; pad the last one with examples of weight 0.

    >>> blocks = [{"dense": np.ones((3, 1), np.float32), "ids": np.arange(3)[:, None]}] * 2
    >>> [(batch.ids["sparse"].ravel().tolist(), batch.weight.tolist()) for batch in in_batches(blocks, 4)]
    [([0, 1, 2, 0], [1.0, 1.0, 1.0, 1.0]), ([1, 2, -1, -1], [1.0, 1.0, 0.0, 0.0])]
    """
    rest: dict[str, np.ndarray] = {}
    for block in blocks:
        rest = {key: np.concatenate([rest[key], rows]) for key, rows in block.items()} if rest else dict(block)
        whole = len(rest["dense"]) // size * size
        for start in range(0, whole, size):
            yield _batch({key: rows[start : start + size] for key, rows in rest.items()}, size)
        rest = {key: rows[whole:] for key, rows in rest.items()}
    if rest and len(rest["dense"]):
        yield _batch(rest, size)


def _batch(rows, size):
    number = len(rows["dense"])
    fill = lambda array, value: np.pad(array, [(0, size - number)] + [(0, 0)] * (array.ndim - 1), constant_values=value)
    label = rows.get("label", np.zeros(number)).astype(np.float32)
    # The first of several labels is predicted. Criteo rows have one ids array, rows of a table one per lookup.
    label, ids = fill(label.reshape(number, -1)[:, 0], 0), {key: rows[key] for key in rows if key.startswith("ids")}
    ids = {key.removeprefix("ids").removeprefix(".") or "sparse": fill(array, -1) for key, array in ids.items()}
    return Batch(ids, label, fill(rows["dense"], 0), fill(rows.get("weight", np.ones(number)).astype(np.float32), 0))


class Predictions(NamedTuple):
    """Predictions in row order."""

    logit: np.ndarray  # f32[n]
    label: np.ndarray | None  # u8[n]
    weight: np.ndarray  # f32[n], above 0
    total: metrics.Evaluation  # meaningful with labels only; accumulated batch by batch, as in training
    fields: dict[str, np.ndarray]  # {requested field: i32[n]}
    unknown: dict[str, float]  # {field with a vocabulary: share of unknown ids}

    @property
    def probability(self) -> np.ndarray:
        """Click probabilities, f64[n]."""
        return 1 / (1 + np.exp(-self.logit.astype(np.float64)))


def predict(
    state: TrainState, job: ClickJob, examples: Examples, asked: Asked, fields: Sequence[str] = ()
) -> Predictions:
    """Predict all rows and keep some of their fields; raises `Stopped` on a signal."""
    step, total = job.eval_step(), metrics.empty_evaluation()
    logits, labels, weights, kept = [], [], [], []
    ids: dict[str, Any] = dict.fromkeys(sorted(examples.vocabularies), 0)
    with contextlib.closing(planned(job.spec, examples.batches)) as pairs:
        for batch, plans in asked.each(pairs):
            found = np.asarray(step(state, batch, plans))
            # On a GPU it was sent there.
            clicked, weight = np.asarray(batch.label), np.asarray(batch.weight)
            batch = batch._replace(ids={name: np.asarray(its) for name, its in batch.ids.items()}, weight=weight)
            counts = weight > 0
            # Rows without labels get label 0: only the check for finite predictions matters.
            total = metrics.merge(total, metrics.evaluate_batch(found, clicked, weight))
            logits.append(found[counts])
            labels.append(clicked[counts].astype(np.uint8))
            weights.append(weight[counts])
            ids = {
                name: ids[name] + its for name, its in counted(job.spec, batch, examples.table).items() if name in ids
            }
            kept.append(
                {name: ids[counts] for name, ids in subsets.fields_of(job.spec, batch, fields, examples.table).items()}
            )
    if not logits:
        raise ValueError(f"{examples.words} has no rows: there is nothing to predict.")
    columns = {name: np.concatenate([one[name] for one in kept]) for name in fields}
    label = np.concatenate(labels) if examples.labelled else None
    unknown = {name: float(rare / max(given, 1)) for name, (given, rare) in ids.items()}
    return Predictions(np.concatenate(logits), label, np.concatenate(weights), total, columns, unknown)


def counted(spec: EmbeddingSpec, batch: Batch, table: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Return {field: number of ids in a batch, and of those in row 1, i64[2]}."""
    found: dict[str, np.ndarray] = {}
    for name, lookup in spec.lookups.items():
        ids = np.asarray(batch.ids[name])
        counts = count_ids(ids.reshape(len(ids), -1)[batch.weight > 0])
        if isinstance(lookup.tables, str):
            found[name] = counts.sum(axis=1)
        else:
            found |= dict(zip(subsets.columns_of(lookup, table), counts.T, strict=True))
    return found


def figures(found: Predictions) -> dict[str, Any]:
    """Return the figures for results.json: quality if the rows are labelled, and tenths by prediction."""
    probability, weight = found.probability, found.weight.astype(np.float64)
    results: dict[str, float] = {"rows": len(found.logit)}
    if found.label is not None:
        quality = metrics.summarize(found.total)
        results |= {key: quality[key] for key in ("auc", "log_loss", "normalized_entropy", "calibration")}
        results |= {"mean_label": quality["label_mean"]}
    results |= {"mean_prediction": float(np.average(probability, weights=weight))}
    results |= {f"unknown_share_{name}": share for name, share in found.unknown.items()}
    order = np.argsort(probability, kind="stable")
    for number, rows in enumerate(np.array_split(order, min(TENTHS, len(order))), 1):
        predicted = float(np.average(probability[rows], weights=weight[rows]))
        results |= {f"tenth_{number}_rows": len(rows), f"tenth_{number}_predicted": predicted}
        if found.label is not None:
            clicked = float(np.average(found.label[rows], weights=weight[rows]))
            size = float(weight[rows].sum() ** 2 / (weight[rows] ** 2).sum())  # effective (Kish, 1965)
            results |= of_tenth(f"tenth_{number}", clicked * size, size, predicted * size)
    return {key: value if math.isfinite(value) else None for key, value in results.items()}


def of_tenth(key: str, clicks: float, rows: float, predicted: float) -> dict[str, float]:
    """Return the share of clicks with its 95 % interval (Wilson, JASA 1927), and predicted over observed clicks.

    >>> {key: round(value, 3) for key, value in of_tenth("t", 10.0, 100, 12.0).items()}
    {'t_clicked': 0.1, 't_clicked_low': 0.055, 't_clicked_high': 0.174, 't_calibration': 1.2}
    """
    share, z = clicks / rows, 1.96
    middle, half = share + z * z / (2 * rows), z * math.sqrt(share * (1 - share) / rows + (z / (2 * rows)) ** 2)
    low, high = ((middle + side * half) / (1 + z * z / rows) for side in (-1, 1))
    ends = {f"{key}_clicked_low": max(low, 0.0), f"{key}_clicked_high": high}
    return {f"{key}_clicked": share} | ends | {f"{key}_calibration": float(predicted / clicks) if clicks else math.inf}


def table(results: dict[str, Any]) -> str:
    """Format the results as tables."""
    tenths = [key.removesuffix("_predicted").removeprefix("tenth_") for key in results if key.endswith("_predicted")]
    columns = {"rows": "tenth_{}_rows", "predicted": "tenth_{}_predicted"}
    if "auc" in results:
        columns |= {"clicked": "tenth_{}_clicked", "predicted / clicked": "tenth_{}_calibration"}
    apart = ("tenth_", "segment_", "unknown_share_")
    overall = {key: value for key, value in results.items() if not key.startswith(apart)}
    tenths_of = grid(results, "tenth, by prediction", tenths, columns)
    return f"{listing(overall, TABLE)}\n\n{tenths_of}"


def table_of_unknown(unknown: Mapping[str, float], where: str) -> str:
    """Format the shares of unknown ids, the largest first, and a warning if there are many.

    >>> print(table_of_unknown({"user": 0.0, "item": 0.125}, "a.csv"))
    field  unknown ids, %
    item            12.50
    user             0.00
    """
    most = sorted(unknown, key=lambda name: -unknown[name])[:MOST_UNKNOWN]
    cells = {f"share_{place}": unknown[name] for place, name in enumerate(most)}
    of = f", {MOST_UNKNOWN} of {len(unknown)}" if len(unknown) > MOST_UNKNOWN else ""
    rows = {name: str(place) for place, name in enumerate(most)}
    found = grid(cells, f"field{of}", rows, {"unknown ids, %": ("share_{}", 100)}) if most else ""
    return "\n".join(filter(None, [found, *warnings_of({name: {where: share} for name, share in unknown.items()})]))


def draw(path: Path, results: dict[str, Any]) -> bool:
    """Plot the share of clicks over the mean prediction, one point per tenth."""
    tenths = [key.removesuffix("_predicted") for key in results if key.endswith("_predicted")]
    predicted = [results[f"{tenth}_predicted"] for tenth in tenths]
    clicked = [Figure(*(results[f"{tenth}_clicked{end}"] for end in ("", "_low", "_high"))) for tenth in tenths]
    lines = {"as predicted": (predicted, predicted), "clicked": (predicted, clicked)}
    said = "no clicks" if results["calibration"] is None else f"{results['calibration']:.3f} times the clicks"
    title = f"The model predicts {said} of {results['rows']:,} rows; each point is a tenth of them, by prediction"
    return plot(path, {"share of clicks": lines}, "mean prediction of the tenth", title)


def finish(
    config: Config, run: Run, found: Predictions, step: int, words: str, known: Mapping[str, Vocabulary]
) -> dict[str, Any]:
    """Write and show the figures; return the contents of results.json.

    Args:
      words: description of the rows.
      known: {table: what its rows stand for}.
    """
    results = {"step": step, **figures(found)}
    if found.label is not None:
        asked = config.group, config.segments, config.bootstrap
        of_parts = subsets.figures(found.logit, found.label, found.weight, found.fields, *asked)
        results |= {key: value if math.isfinite(value) else None for key, value in of_parts.items()}
        results |= subsets.names_of(results, config.segments, known)
    labels: dict[str, Any] = {} if found.label is None else {"label": found.label}
    with atomic_write(run.directory / "predictions.npz") as partial, open(partial, "wb") as file:
        np.savez(file, logit=found.logit, probability=found.probability.astype(np.float32), **labels)
    if found.label is not None:
        draw(run.directory / "calibration.png", results)
    tables = [table(results), subsets.tables(results, config.segments), table_of_unknown(found.unknown, words)]
    run.close(results, "\n\n".join(filter(None, tables)))
    return results


def rules(config: Config) -> dict[str, object]:
    """Return {problem and remedy: whether it applies} for flags that do not fit together."""
    return {
        f"--path {' '.join(map(str, config.path))}: a prepared directory stands alone, without other files.": (
            len(config.path) > 1 and any(is_prepared(local_path(path)) for path in config.path)
        ),
        "--schema is for raw files of a table: give --path FILE as well.": (
            config.schema is not None and not has_raw_files(config)
        ),
        f"--split {config.split} is of a prepared directory: raw files are evaluated whole.": (
            config.split != "test" and has_raw_files(config)
        ),
    }


def rules_of_run(config: Config, trained: Trained) -> dict[str, object]:
    """As `rules`, for flags that do not fit the run."""
    synthetic, tabular = (trained.config["data"] == kind for kind in ("synthetic", "tabular"))
    return {
        f"--schema {config.schema} is for a run of --data tabular, and {trained.directory} is none: leave it out.": (
            config.schema is not None and not tabular
        ),
        f"{trained.directory} was trained on synthetic clicks, and Criteo rows mean nothing to it: leave out --path, "
        "--prepared and --split.": synthetic and (config.path or config.prepared or config.split != "test"),
    }


def main(config: Config) -> dict[str, Any]:
    """Evaluate a run; return the contents of results.json."""
    refuse(rules(config))
    trained = open_run(config.run_directory, config.state)
    refuse(rules_of_run(config, trained))
    with stop_on_signals() as asked:
        # Check everything before creating the directory of the evaluation.
        job = job_of(trained, config.prepared)
        examples = examples_of(config, trained, job)
        refuse(subsets.refusals(job.spec, config.group, config.segments, examples.table))
        refuse(
            {
                "--group, --segments and --bootstrap need labels, and these rows have none: leave them out.": (
                    not examples.labelled and (config.fields or config.bootstrap)
                )
            }
        )
        state, image = restore_for_prediction(trained.images, job.spec, job.init(0), config.replica)
        with Run("evaluate", config, config.workdir, resume=is_unfinished(config.workdir)) as run:
            say(f"{words_of(image)}, on {examples.words}")
            found = predict(state, job, examples, asked, config.fields)
            known = vocabularies_of(trained, config.prepared) if config.segments else {}
            return finish(config, run, found, image.step, examples.words, known)


def is_unfinished(workdir: Path | None) -> bool:
    """Whether a directory holds an unfinished evaluation, which the same command may restart."""
    return workdir is not None and (workdir / "config.json").exists() and not (workdir / "results.json").exists()


if __name__ == "__main__":
    command_line(main, Config, __doc__)
