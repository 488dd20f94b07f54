"""Evaluate a run of train.py on its test set or another file, or predict rows without labels; some seconds.

    python experiments/evaluate.py --run runs/a                       its own test set, once more
    python experiments/evaluate.py --run runs/a --path day_1.gz       other rows: Criteo's, or a table of one's own
    python experiments/evaluate.py --run runs/a --path b.prepared     the test rows of a prepared directory
    python experiments/evaluate.py --run runs/a --bootstrap 1000      and an interval of the AUC
    python experiments/evaluate.py --run runs/a --group C1 --segments C9 C17   and AUC within groups, and by segments
    python experiments/evaluate.py --run runs/a --predictions a.parquet   predictions with the keys of the schema

Writes AUC, log loss, normalised entropy and calibration to results.json (of a regression RMSE and MAE), and the
predictions to predictions.npz, with the numbers of their rows, those of weight above 0; predictions alone for rows
without labels. Uses the best state of a run that keeps one, else the last, from the newest whole image; the run may
still be training.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro
from main import subsets
from main.cli import Figure, Run, command_line, grid, listing, plot, refuse, say
from main.click_data import TEST_BATCH, ClickJob, synthetic_clicks
from main.signals import Asked, stop_on_signals
from main.table_data import labels_at, open_rows, with_vocabulary
from main.table_summary import open_schema, warnings_of
from main.targets import Targets, named
from main.trained import (
    State,
    Trained,
    job_of,
    open_run,
    prepared_of,
    refuse_other_division,
    refuse_trained_rows,
    table_directory,
    table_of_run,
    targets_of_run,
    tested_on,
    vocabularies_of,
    words_of,
)

from jaxrec import metrics
from jaxrec.checkpoint import restore_for_prediction
from jaxrec.data.blocks import as_texts, is_prepared, keys_of, read_metadata
from jaxrec.data.criteo import has_labels, open_encoder, open_split, read_rows
from jaxrec.data.loader import Loader
from jaxrec.data.preparation import count_ids
from jaxrec.data.tabular import Vocabulary, raw, schema_of
from jaxrec.embedding import EmbeddingSpec
from jaxrec.files import atomic_write, local_path, make_directory
from jaxrec.prefetch import planned
from jaxrec.types import Batch, TrainState

MEASURED = ("auc", "log_loss", "normalized_entropy", "calibration", "rmse", "mae")
TENTHS, SYNTHETIC_EXAMPLES, MOST_UNKNOWN = 10, 50 * TEST_BATCH, 10
TABLE = {
    "Rows": ["rows", "step"],
    "Quality": ["auc", "log_loss", "normalized", "calibration", "rmse", "mae"],
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
    """The best or the last state of the run, or that of a step; by default the best one if the run keeps it."""
    replica: int | Literal["mean"] = "mean"
    """Parameters that predict, if the run had several replicas: the mean of all, or one replica's, from 0."""
    group: str | None = None
    """A field or a key, such as the user: the mean AUC within its categories, or equal numbers (GAUC)."""
    segments: tuple[str, ...] = ()
    """Categorical fields or keys: normalised entropy, AUC and calibration of each of their largest categories."""
    predictions: Path | None = None
    """A file, .parquet or .csv, with a line per row of weight above 0: its number from 0, the keys of the schema,
    labels and predictions."""
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
    keys: Callable[[str], np.ndarray] | None = None  # key of the schema -> S[n], once all batches are read


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
    directory = chosen(config, run, directory)
    rows = iter(Loader(open_split(directory, config.split), TEST_BATCH))
    return Examples(rows, True, f"{config.split} of {directory}", vocabularies)


def has_raw_files(config: Config) -> bool:
    """Whether --path names raw files, or a directory of them."""
    return bool(config.path) and not is_prepared(local_path(config.path[0]))


def chosen(config: Config, run: Trained, own: Path, *earlier: Path) -> Path:
    """Return the prepared directory of --path, or the run's own, the last; it must test nothing that it trained on."""
    directory = config.path[0] if config.path else own
    if config.split != "train":
        refuse_other_division(run, directory)
        for each in (own, *earlier) if config.path else ():
            refuse_trained_rows(each, directory)
    return directory


def examples_of_table(config: Config, run: Trained) -> Examples:
    """Return rows of a prepared table with the run's vocabulary, or of raw files mapped with it."""
    directory = table_directory(run, config.prepared)
    table = table_of_run(run, directory)
    targets = targets_of_run(run, table)
    if has_raw_files(config):
        schema = open_schema(config.schema) if config.schema else schema_of(directory)
        labelled = raw.has_labels(config.path, schema)
        kept: list[dict[str, np.ndarray]] = []
        blocks = keeping_keys(raw.read_rows(config.path, schema, directory, labelled), kept)
        names = [label.column for label in schema.label]
        for target in targets if labelled else ():
            if target.name not in names:
                raise ValueError(f"{target.name!r} is no label of the schema: give all that {run.directory} predicts.")
        places = [names.index(target.name) for target in targets] if labelled else range(len(targets))
        return Examples(
            in_batches(blocks, TEST_BATCH, places),
            labelled,
            ", ".join(map(str, config.path)),
            with_vocabulary(table),
            {**table, "keys": raw.keys_in(config.path, schema)},
            lambda name: np.concatenate([block[name] for block in kept]),
        )
    directory = chosen(config, run, directory, *(path for path in map(Path, run.config["path"][:-1]) if path.is_dir()))
    rows, table = open_rows(directory, config.split, targets), table_of_run(run, directory)
    return Examples(
        iter(Loader(rows, TEST_BATCH)), True, f"{config.split} of {directory}", with_vocabulary(table), table,
        lambda name: keys_of(rows, name),
    )  # fmt: skip


def keeping_keys(
    blocks: Iterable[dict[str, np.ndarray]], kept: list[dict[str, np.ndarray]]
) -> Iterator[dict[str, np.ndarray]]:
    """Yield blocks of raw rows without their keys, which are appended to `kept`, {key: S[n]} of each block."""
    for block in blocks:
        names = [name for name in block if name.startswith("key.")]
        kept.append({name.removeprefix("key."): as_texts(block.pop(name)) for name in names})
        yield block


def synthetic_test(run: Trained, job: ClickJob) -> Iterator[Batch]:
    """Return the test examples of a synthetic run, as many as it was last tested on."""
    batches = (tested_on(run) or SYNTHETIC_EXAMPLES) // TEST_BATCH
    cardinalities = tuple(table.rows for table in job.spec.tables.values())
    # Runs of an earlier version lacked some of these flags.
    log = {name: run.config[name] for name in ("curved", "exponent") if name in run.config}
    return synthetic_clicks(cardinalities, TEST_BATCH, 1, run.config["seed"], batches, **log).test()


def in_batches(blocks: Iterable[dict[str, np.ndarray]], size: int, places: Sequence[int] = (0,)) -> Iterator[Batch]:
    """Cut blocks of rows into batches of one size; pad the last one with examples of weight 0.

    Args:
      places: of the labels to predict, among those of the blocks.

    >>> blocks = [{"dense": np.ones((3, 1), np.float32), "ids": np.arange(3)[:, None]}] * 2
    >>> [(batch.ids["sparse"].ravel().tolist(), batch.weight.tolist()) for batch in in_batches(blocks, 4)]
    [([0, 1, 2, 0], [1.0, 1.0, 1.0, 1.0]), ([1, 2, -1, -1], [1.0, 1.0, 0.0, 0.0])]
    """
    rest: dict[str, np.ndarray] = {}
    for block in blocks:
        rest = {key: np.concatenate([rest[key], rows]) for key, rows in block.items()} if rest else dict(block)
        whole = len(rest["dense"]) // size * size
        for start in range(0, whole, size):
            yield _batch({key: rows[start : start + size] for key, rows in rest.items()}, size, places)
        rest = {key: rows[whole:] for key, rows in rest.items()}
    if rest and len(rest["dense"]):
        yield _batch(rest, size, places)


def _batch(rows, size, places):
    number = len(rows["dense"])
    fill = lambda array, value: np.pad(array, [(0, size - number)] + [(0, 0)] * (array.ndim - 1), constant_values=value)
    label = fill(labels_at(rows.get("label", np.zeros((number, 1 + max(places)))).astype(np.float32), places), 0)
    # Criteo rows have one ids array, rows of a table one per lookup.
    ids = {key: rows[key] for key in rows if key.startswith("ids")}
    ids = {key.removeprefix("ids").removeprefix(".") or "sparse": fill(array, -1) for key, array in ids.items()}
    return Batch(ids, label, fill(rows["dense"], 0), fill(rows.get("weight", np.ones(number)).astype(np.float32), 0))


class Predictions(NamedTuple):
    """Predictions in row order."""

    targets: Targets  # K labels
    found: np.ndarray  # f32[n, K], see `Target.prediction`
    label: np.ndarray | None  # f32[n, K]
    weight: np.ndarray  # f32[n], above 0
    totals: list[Any]  # of each label; meaningful with labels only; accumulated batch by batch, as in training
    fields: dict[str, np.ndarray]  # {requested field: i32[n]}
    keys: dict[str, np.ndarray]  # {key of the schema: S[n]}
    unknown: dict[str, float]  # {field with a vocabulary: share of unknown ids}
    row: np.ndarray  # i64[n] number of each row among all, from 0

    @property
    def served(self) -> np.ndarray:
        """Click probabilities, or the numbers of a regression, f64[n, K]."""
        clicks = np.array([target.moments is None for target in self.targets])
        found = self.found.astype(np.float64)
        return np.where(clicks, 1 / (1 + np.exp(-np.where(clicks, found, 0))), found)


def predict(
    state: TrainState, job: ClickJob, examples: Examples, asked: Asked, fields: Sequence[str] = ()
) -> Predictions:
    """Predict all rows and keep their keys and some of their fields; raises `Stopped` on a signal."""
    step, totals, known = job.eval_step(), list[Any](), list((examples.table or {}).get("keys", ()))
    outputs, labels, weights, kept = [], [], [], []
    ids: dict[str, Any] = dict.fromkeys(sorted(examples.vocabularies), 0)
    with contextlib.closing(planned(job.spec, examples.batches)) as pairs:
        for batch, plans in asked.each(pairs):
            # On a GPU the batch was sent there.
            found, label, weight = map(np.asarray, (step(state, batch, plans), batch.label, batch.weight))
            found, label = found.reshape(len(found), -1), label.reshape(len(label), -1)
            batch = batch._replace(ids={name: np.asarray(its) for name, its in batch.ids.items()}, weight=weight)
            counts = weight > 0
            # Rows without labels get label 0: only the check for finite predictions matters.
            now = [one.measure(found[:, k], label[:, k], weight) for k, one in enumerate(job.targets)]
            totals = list(map(metrics.merge, totals, now)) if totals else now
            outputs.append(found[counts])
            labels.append(label[counts])
            weights.append(weight)
            ids = {
                name: ids[name] + its for name, its in counted(job.spec, batch, examples.table).items() if name in ids
            }
            kept.append(
                {name: ids[counts] for name, ids in subsets.fields_of(job.spec, batch, fields, examples.table).items()}
            )
    if not outputs:
        raise ValueError(f"{examples.words} has no rows: there is nothing to predict.")
    columns = {name: np.concatenate([one[name] for one in kept]) for name in kept[0]}
    unknown = {name: float(rare / max(given, 1)) for name, (given, rare) in ids.items()}
    weight = np.concatenate(weights)
    row = np.flatnonzero(weight > 0)
    keys = {name: examples.keys(name)[row] for name in known} if examples.keys is not None else {}
    truth = np.concatenate(labels) if examples.labelled else None
    return Predictions(job.targets, np.concatenate(outputs), truth, weight[row], totals, columns, keys, unknown, row)


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
    """Return the figures for results.json: quality if the rows are labelled, and tenths by prediction of the first."""
    served, weight = found.served, found.weight.astype(np.float64)
    results: dict[str, float] = {"rows": len(served)}
    of_each: list[dict[str, float]] = []
    for k, total in enumerate(found.totals):
        quality = metrics.summarize(total) if found.label is not None else {}
        one = {key: quality[key] for key in MEASURED if key in quality}
        one |= {"mean_label": quality["label_mean"]} if quality else {}
        of_each.append(one | {"mean_prediction": float(np.average(served[:, k], weights=weight))})
    results |= named(found.targets, of_each)
    results |= {f"unknown_share_{name}": share for name, share in found.unknown.items()}
    predictions, clicks = served[:, 0], found.targets[0].moments is None
    order = np.argsort(predictions, kind="stable")
    for number, rows in enumerate(np.array_split(order, min(TENTHS, len(order))), 1):
        predicted = float(np.average(predictions[rows], weights=weight[rows]))
        results |= {f"tenth_{number}_rows": len(rows), f"tenth_{number}_predicted": predicted}
        if found.label is not None:
            label = float(np.average(found.label[rows, 0], weights=weight[rows]))
            if not clicks:
                results[f"tenth_{number}_label"] = label
                continue
            size = float(weight[rows].sum() ** 2 / (weight[rows] ** 2).sum())  # effective (Kish, 1965)
            results |= of_tenth(f"tenth_{number}", label * size, size, predicted * size)
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
    if "rmse" in results:
        columns |= {"label": "tenth_{}_label"}
    apart = ("tenth_", "segment_", "unknown_share_")
    overall = {key: value for key, value in results.items() if not key.startswith(apart) and key != "labels"}
    others = {f"Label {name!r}": [f"{name}_"] for name in results.get("labels", [])[1:]}
    tenths_of = grid(results, "tenth, by prediction", tenths, columns)
    return f"{listing(overall, others | TABLE)}\n\n{tenths_of}"


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
    config: Config, run: Run, found: Predictions, step: int, examples: Examples, known: Mapping[str, Vocabulary]
) -> dict[str, Any]:
    """Write and show the figures; return the contents of results.json.

    Args:
      examples: what was predicted.
      known: {table: what its rows stand for}.
    """
    results = {"step": step, **figures(found)}
    if len(found.targets) > 1:
        results["labels"] = [target.name for target in found.targets]
    is_click = found.targets[0].moments is None
    if found.label is not None and is_click:
        of_key = [name for name in config.fields if name in found.keys]  # of a key that is a field too, as in training
        numbered = {name: np.unique(found.keys[name], return_inverse=True) for name in of_key}
        fields = found.fields | {name: mine for name, (_, mine) in numbered.items()}
        decode: dict[str, Callable] = {name: one.decode for name, one in known.items()}
        decode |= {name: functools.partial(_texts_at, texts) for name, (texts, _) in numbered.items()}
        asked = config.group, config.segments, config.bootstrap
        of_field = None if config.group in numbered else examples.table
        of_parts = subsets.figures(found.found[:, 0], found.label[:, 0], found.weight, fields, *asked, of_field)
        results |= {key: value if math.isfinite(value) else None for key, value in of_parts.items()}
        results |= subsets.names_of(results, config.segments, decode)
    with atomic_write(run.directory / "predictions.npz") as partial, open(partial, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays_of(found))  # type: ignore[arg-type]
    if config.predictions is not None:
        write_predictions(config.predictions, found)
    if found.label is not None and is_click:
        draw(run.directory / "calibration.png", results)
    tables = [table(results), subsets.tables(results, config.segments), table_of_unknown(found.unknown, examples.words)]
    run.close(results, "\n\n".join(filter(None, tables)))
    return results


def _texts_at(texts: np.ndarray, rows: Sequence[int]) -> list[str]:
    return [texts[row].decode() for row in rows]


def arrays_of(found: Predictions) -> dict[str, np.ndarray]:
    """Return the arrays of predictions.npz: `row` i64[n], from 0; of one label [n], of several [n, K].

    Of clicks logit, probability and label; if any label is a number, prediction and label.
    """
    shaped = lambda array: array[:, 0] if len(found.targets) == 1 else array
    served, labels = shaped(found.served.astype(np.float32)), {}
    clicks = all(target.moments is None for target in found.targets)
    if found.label is not None:
        labels = {"label": shaped(found.label.astype(np.uint8 if clicks else np.float32))}
    what = {"logit": shaped(found.found), "probability": served} if clicks else {"prediction": served}
    return {"row": found.row} | what | labels


def write_predictions(path: Path, found: Predictions) -> None:
    """Write a table with a line for each row: its number, keys, labels and predictions."""
    import polars as pl  # which `main` has tried

    columns: dict[str, Any] = {"row": found.row}
    columns |= {name: np.char.decode(key, "utf-8") for name, key in found.keys.items()}
    for k, target in enumerate(found.targets):
        if found.label is not None:
            columns[target.name] = found.label[:, k]
        columns[f"{target.name}_prediction"] = found.served[:, k].astype(np.float32)
    frame = pl.DataFrame(columns)
    with atomic_write(path) as partial:
        (frame.write_parquet if path.suffix == ".parquet" else frame.write_csv)(partial)


def rules(config: Config) -> dict[str, object]:
    """Return {problem and remedy: whether it applies} for flags that do not fit together."""
    return {
        f"--path {' '.join(map(str, config.path))}: a prepared directory stands alone, without other files.": (
            len(config.path) > 1 and any(is_prepared(local_path(path)) for path in config.path)
        ),
        "--schema is for raw files of a table: give --path FILE as well.": (
            config.schema is not None and not has_raw_files(config)
        ),
        f"--predictions {config.predictions} must end in .parquet or .csv.": (
            config.predictions is not None and config.predictions.suffix not in (".parquet", ".csv")
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
    if config.predictions is not None:
        try:
            import polars  # noqa: F401
        except ImportError as error:
            raise ValueError("--predictions needs polars: pip install 'jaxrec[data]'.") from error
        make_directory(config.predictions.parent)
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
                ),
                "--group, --segments and --bootstrap are for labels of 0 and 1, and the first label of this run is a "
                "regression: leave them out.": (
                    job.targets[0].moments is not None and (config.fields or config.bootstrap)
                ),
            }
        )
        state, image = restore_for_prediction(trained.images, job.spec, job.init(0), config.replica)
        with Run("evaluate", config, config.workdir, resume=is_unfinished(config.workdir)) as run:
            say(f"{words_of(image)}, on {examples.words}")
            found = predict(state, job, examples, asked, config.fields)
            known = vocabularies_of(trained, config.prepared) if config.segments else {}
            return finish(config, run, found, image.step, examples, known)


def is_unfinished(workdir: Path | None) -> bool:
    """Whether a directory holds an unfinished evaluation, which the same command may restart."""
    return workdir is not None and (workdir / "config.json").exists() and not (workdir / "results.json").exists()


if __name__ == "__main__":
    command_line(main, Config, __doc__)
