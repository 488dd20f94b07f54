"""Compare all click models on the same rows, over seeds: test AUC in one table, as in papers.

    python experiments/models.py --data criteo --path criteo.prepared        rows of your own preparation, 3 seeds
    python experiments/models.py --curved 0.5 --steps 2500                   5,120,000 synthetic clicks, 3 seeds
    python experiments/models.py --data criteo --path criteo.prepared --models lr --binned train.txt
    python experiments/models.py --workdir DIR --resume                      goes on; what is complete is kept

With --curved 0.5, half of what decides a synthetic click is a wave over a sum of all fields, which neither a sum of
features (LR) nor products of two features (FM) can express: both must stay below every deep model, and results.json
says whether they do. --binned adds logistic regression over integers in buckets, the stronger baseline. Each run is
train.py with defaults except for the model, two to five minutes on two cores.
Result: results/two_cores_cpu/models_*.json.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from main.cli import Figure, Flags, Run, bars, command_line, grid, refuse, say
from main.report import scaled
from main.signals import stop_on_signals
from sweep import MINUS, again_in, in_turn, summary, trained_arms

from jaxrec.data.blocks import read_metadata
from jaxrec.data.tabular import AtRandom, ByRows, Categorical, Dense, Schema, prepare
from jaxrec.data.tabular.ready import CRITEO

Model = Literal["lr", "fm", "wide_deep", "deepfm", "dnn", "finalmlp", "dlrm", "dcnv2"]
BINNED = "lr_binned"
BUCKETS = (0, *(2**power for power in range(17)))  # of an integer
SHALLOW: tuple[str, ...] = ("lr", BINNED, "fm")
DEEP: tuple[Model, ...] = ("wide_deep", "deepfm", "dnn", "finalmlp", "dlrm", "dcnv2")


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the comparison; --preset is that of each run, and --seed the first of the seeds."""

    models: tuple[Model, ...] = ("lr", "fm", *DEEP)
    seeds: int = 3
    data: Literal["synthetic", "criteo"] = "synthetic"
    path: tuple[Path, ...] | None = None
    """Prepared directories, for --data criteo, which seeds take in turn."""
    binned: Path | None = None
    """Criteo's raw file, from which --path was prepared: adds LR over integers in buckets, on the same splits."""
    curved: float = 0.0
    """Synthetic: share of what decides a click that LR and FM cannot express."""
    rows: int | None = None
    """Synthetic: embedding rows in all."""
    steps: int | None = None
    """Synthetic: batches of 2,048."""
    resume: bool = False
    """Resume the comparison in --workdir."""


def flags_of(config: Config) -> list[str]:
    """Return the flags of train.py that all runs share."""
    given = {"data": config.data, "rows": config.rows, "steps": config.steps}
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    return words + (["--curved", str(config.curved)] if config.curved else [])


def binned_schema(options: Mapping[str, Any]) -> Schema:
    """Return the schema of Criteo's raw files with integers in buckets.

    Args:
      options: of the preparation whose categories and split it shall have.
    """
    features = tuple(
        Dense(feature.column, buckets=BUCKETS)
        if isinstance(feature, Dense)
        else Categorical(feature.column, options["min_count"] or 1, options["hash_cap"])
        for feature in CRITEO.features
    )
    share = options["train_fraction"]
    split = AtRandom(share, seed=options["seed"]) if options["split"] == "random" else ByRows(share)
    return dataclasses.replace(CRITEO, features=features, split=split)


def prepared_in_buckets(source: Path, like: Sequence[Path], to: Path) -> list[Path]:
    """Prepare a raw file for each of the preparations `like`, below `to`; return the directories."""
    directories = [to / f"binned_{number}" for number in range(len(like))]
    for directory, one in zip(directories, like, strict=True):
        prepare([source], directory, binned_schema(read_metadata(one)["options"]))
    return directories


def verdict(results: dict[str, Any], models: Sequence[str]) -> dict[str, Any]:
    """Return whether every deep model beats every shallow one, in the mean over seeds.

    >>> verdict({"lr_mean": 0.7, "fm_mean": 0.72, "dnn_mean": 0.75}, ("lr", "fm", "dnn"))
    {'best': 'dnn', 'worst_deep': 'dnn', 'shallow_below_deep': True}
    """
    mean = {model: results[f"{model}_mean"] for model in models}
    deep, shallow = ([model for model in models if model in of] for of in (DEEP, SHALLOW))
    found: dict[str, Any] = {"best": max(mean, key=mean.__getitem__)}
    if deep:
        found["worst_deep"] = min(deep, key=mean.__getitem__)
    if deep and shallow:
        found["shallow_below_deep"] = max(mean[m] for m in shallow) < mean[found["worst_deep"]]
    return found


def finding(results: Mapping[str, Any], models: Sequence[str]) -> str:
    """Return the title of the plot: its finding, expected or not."""
    best, seeds = results["best"], results["seeds"]
    said_of = f"{best} has the best test AUC, {results[f'{best}_mean']:.4f}"
    if "teacher_auc_mean" in results:
        said_of += f", beside {results['teacher_auc_mean']:.4f} of the teacher"
    if "shallow_below_deep" in results:
        shallow = max((m for m in models if m in SHALLOW), key=lambda model: results[f"{model}_mean"])
        is_below = "below" if results["shallow_below_deep"] else "not below"
        said_of += f"; {shallow}, the best shallow one, is {is_below} {results['worst_deep']}, the worst deep one"
    return f"{said_of}. Means over {seeds} seed{'s'[: seeds > 1]}"


def minus_first(results: Mapping[str, Any], model: str) -> Figure:
    """Return the difference of a model from the first, with its interval; 0 for the first itself.

    >>> minus_first({"first": "lr", "fm_minus_first": 2.0, "fm_minus_first_half_width": 0.5}, "fm")
    Figure(value=2.0, low=1.5, high=2.5)
    """
    value = results.get(MINUS.format(model), 0.0)
    half = results.get(f"{MINUS.format(model)}_half_width")
    return Figure(value) if half is None else Figure(value, value - half, value + half)


def draw(run: Run, results: Mapping[str, Any], models: Sequence[str]) -> None:
    """Plot each model's difference from the first: bars of the AUCs themselves would all look equally long."""
    first = results["first"]
    label = f"test AUC minus that of {first}, 1e-4 (paired)"
    over = {model: scaled(minus_first(results, model), 1e4) for model in models}
    teacher = results.get("teacher_auc_mean")
    above = None if teacher is None else 1e4 * (teacher - results[f"{first}_mean"])
    bars(run.directory / "models.png", {label: {"": over}}, finding(results, models), {label: {"teacher": above}})


def main(config: Config) -> dict:
    """Train what is missing; return the contents of results.json."""
    paths = config.path or ()
    needs_path = config.data == "criteo" and not (paths and all(path.is_dir() for path in paths))
    refuse(
        {
            "--data criteo needs --path: directories made by prepare.py.": needs_path,
            "--binned is for --data criteo.": config.binned is not None and config.data != "criteo",
        }
    )
    with (
        Run("models", config, config.workdir, config.resume) as run,
        stop_on_signals(f"go on with {again_in(run)}") as asked,
    ):
        seeds, flags = range(config.seed, config.seed + config.seeds), flags_of(config)
        arms: dict[str, list[str]] = {model: [*flags, "--model", model] for model in config.models}
        found = trained_arms(run, arms, config.preset, seeds, asked, of_seed=in_turn(paths))
        if config.binned is not None:
            binned = prepared_in_buckets(config.binned, paths, run.directory)
            arms = {BINNED: ["--data", "tabular", "--model", "lr"]}
            found |= trained_arms(run, arms, config.preset, seeds, asked, of_seed=in_turn(binned))
        models = list(found)
        aucs = {model: [one["test_auc"] for one in its] for model, its in found.items()}
        results = summary(aucs, seeds, len(paths) or 1)
        results |= {f"{model}_{seed}_auc": one["test_auc"] for model, its in found.items()
                    for seed, one in zip(seeds, its, strict=True)}  # fmt: skip
        results |= verdict(results, models)
        first = found[config.models[0]]  # all have the same data
        if all("teacher_auc" in one for one in first):
            results["teacher_auc_mean"] = float(np.mean([one["teacher_auc"] for one in first]))
        draw(run, results, models)
        columns = {"test AUC": "{}_mean", "deviation": "{}_deviation", "minus the first": MINUS}
        run.close(results, grid(results, "model", models, columns))
        if "shallow_below_deep" in results:
            say(f"LR and FM below every deep model: {'yes' if results['shallow_below_deep'] else 'NO'}")
        return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
