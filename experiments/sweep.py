"""Train every combination of some flags over seeds and compare them: one table of means and paired intervals.

    python experiments/sweep.py --vary model=dlrm,dcnv2 row-learning-rate=0.02,0.05 --seeds 3
    python experiments/sweep.py --vary model=lr,fm --fixed data=criteo path=prepared validation-fraction=0.1
    python experiments/sweep.py --vary model=lr,fm --fixed data=criteo --path split_{0..4} --seeds 5 --metric test_auc
    python experiments/sweep.py ... --workdir DIR --resume           goes on; what is complete is not trained again
    python experiments/sweep.py ... --workdir DIR --resume --metric validation_log_loss   by another figure

Each run is train.py in its own process and directory. All arms of a seed see the same data, so differences are taken
within seeds. The first arm is the baseline: put yours first. The arm with the best mean is chosen, by a figure of the
validation set (of the best state with --fixed patience=2, say); the test set is for the chosen arm alone, once. A run
takes as long as train.py with its flags, a minute and a half by default.
"""

import dataclasses
import itertools
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from main.children import trained
from main.cli import Figure, Flags, Run, command_line, grid, paired_interval, refuse
from main.config import Config as TrainConfig
from main.config import parse
from main.model import keep_copy
from main.report import QUALITY, said
from main.signals import Asked, stop_on_signals

from jaxrec.data.blocks import read_metadata
from jaxrec.files import local_path

OWN = {"seed", "seeds", "workdir", "resume", "requeue", "preset"}  # flags that the sweep sets for each run
MINUS = "{}_minus_first"
# Keys of results.json that can choose, and whether more (1) or less (-1) of one is better; of a label that is not the
# first one, validation_NAME_auc and so on.
METRICS = {f"{of}_{name}": sign for of in ("validation", "test") for name, sign in QUALITY.items()} | {
    "examples_per_s": 1, "train_seconds": -1, "checkpoint_percent": -1, "checkpoint_stall_s": -1, "stale_share": -1,
    "sync_gap_steps": -1, "replica_spread": -1, "pls": -1, "lost_steps": -1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the sweep; --preset is that of each run, and --seed the first of the seeds."""

    vary: tuple[str, ...] = ()
    """flag=value,value,...: all combinations are trained; no value for a flag that is on or off: flag=,no."""
    fixed: tuple[str, ...] = ()
    """flag=value shared by all runs; several values in quotes: "fail=300:3 700:1"."""
    path: tuple[Path, ...] = ()
    """Prepared directories that seeds take in turn, such as several splits."""
    seeds: int = 3
    metric: str = "validation_auc"
    """Key of results.json by which arms are compared and one is chosen."""
    resume: bool = False
    """Resume the sweep in --workdir, also with more values of --vary, more --seeds or another --metric."""


def arms_of(vary: Sequence[str]) -> dict[str, list[str]]:
    """Return {name of an arm: its flags} for all combinations, in the given order.

    >>> arms_of(["model=lr,fm", "shuffle=,no"])["model=fm shuffle=no"]
    ['--model', 'fm', '--no-shuffle']
    >>> list(arms_of(["model=lr,fm", "shuffle=,no"]))
    ['model=lr shuffle=', 'model=lr shuffle=no', 'model=fm shuffle=', 'model=fm shuffle=no']
    """
    choices: list[tuple[str, list[str]]] = []
    for item in vary:
        name, values = pair_of("vary", item)
        refuse({f"--vary {name} is given twice: give all its values at once.": any(name == a for a, _ in choices)})
        choices.append((name, values.split(",")))
    arms = {}
    for chosen in itertools.product(*(values for _, values in choices)):
        pairs = [(name, value) for (name, _), value in zip(choices, chosen, strict=True)]
        arms[" ".join(f"{name}={value}" for name, value in pairs)] = [
            word for pair in pairs for word in words_of(*pair)
        ]
    return arms


def pair_of(flag: str, item: str) -> tuple[str, str]:
    """Split flag=value into a flag of train.py and its value."""
    name, _, value = item.partition("=")
    name = name.removeprefix("--").replace("_", "-")
    refuse(
        {
            f"--{flag} {item!r} is no flag with values: write learning-rate=0.001.": "=" not in item or not name,
            f"--{flag} {item!r}: the sweep gives --{name} itself; it has flags of its own for seeds and preset.": (
                name.replace("-", "_") in OWN
            ),
        }
    )
    return name, value


def words_of(name: str, value: str) -> list[str]:
    """Return a flag and its value as words of a command line.

    >>> words_of("fail", "300:3 700:1"), words_of("shuffle", ""), words_of("shuffle", "no")
    (['--fail', '300:3', '700:1'], ['--shuffle'], ['--no-shuffle'])
    """
    return [f"--no-{name}"] if value == "no" else [f"--{name}", *shlex.split(value)]


def of_preset(preset: str) -> list[str]:
    """Return a preset as words of a command line."""
    return [] if preset == "default" else ["--preset", preset]


def again_in(run: Run) -> str:
    """Return how to resume, in words."""
    return f"the same flags, --workdir {run.directory} and --resume"


def trained_arms(
    run: Run, arms: Mapping[Any, Sequence[str]], preset: str, seeds: Iterable[int], asked: Asked,
    env: Mapping[str, str] | None = None, of_seed: Callable[[int], list[str]] = lambda seed: [],
    check: Callable[[dict[str, Any]], object] = lambda results: None,
) -> dict[Any, list[dict[str, Any]]]:  # fmt: skip
    """Train arms {name: flags of train.py}, with `of_seed` more flags; return {arm: results of each seed}, each logged.

    Raises as `trained`, and what `check` does of results.
    """
    found: dict[Any, list[dict[str, Any]]] = {arm: [] for arm in arms}
    logged = [(row["arm"], row["seed"]) for row in run.metrics()]
    for (arm, flags), seed in itertools.product(arms.items(), seeds):
        for word in flags:  # refuses a file that has changed since the first arm
            keep_copy(word, run.directory, f"model_{Path(word.rpartition(':')[0]).stem}.py")
        name = "".join(c if c.isalnum() or c in ".=-" else "_" for c in f"{arm}_{seed}")
        words = [*of_preset(preset), "--seed", str(seed), *flags, *of_seed(seed)]
        found[arm].append(trained(run, name, f"{arm}, seed {seed}", words, asked, env))
        check(found[arm][-1])
        if (arm, seed) not in logged:
            run.log({"arm": arm, "seed": seed} | found[arm][-1])
    return found


def in_turn(paths: Sequence[Path]) -> Callable[[int], list[str]]:
    """Return seed -> flags that name the data of that seed, which take the paths in turn; none without paths."""
    return lambda seed: ["--path", str(paths[seed % len(paths)])] if paths else []


def sign_of(metric: str) -> int:
    """Return 1 if more of a metric is better, -1 if less, 0 if it is unknown.

    >>> sign_of("validation_auc"), sign_of("test_like_log_loss"), sign_of("validation_speed")
    (1, -1, 0)
    """
    of, _, name = metric.partition("_")
    of_label = next((sign for key, sign in QUALITY.items() if name.endswith(f"_{key}")), 0)
    return METRICS.get(metric, of_label if of in ("validation", "test") else 0)


def figure_of(results: Mapping[str, Any], metric: str) -> float:
    """Return a number of results.json."""
    if not isinstance(results.get(metric), int | float):
        known = ", ".join(key for key, value in results.items() if sign_of(key) and isinstance(value, int | float))
        raise ValueError(f"--metric {metric} is no number of results.json: give one of {known}, with --resume.")
    return results[metric]


def check_arms(preset: str, arms: Mapping[str, Sequence[str]]) -> None:
    """Refuse flags that train.py refuses, before any arm is trained; a misspelt flag ends the process, as there."""
    for arm, words in arms.items():
        try:
            parse(TrainConfig, [*of_preset(preset), *words], prog=f"train.py {shlex.join(words)}")
        except ValueError as error:
            raise ValueError(f"{arm}: {error}") from error


def check_metric(metric: str, arms: Mapping[str, Sequence[str]]) -> None:
    """Refuse a metric whose better direction is unknown, or that arms {name: flags of train.py} will not have."""
    refuse({f"--metric {metric} is unknown: give one of {', '.join(METRICS)}.": sign_of(metric) == 0})
    for arm, words in arms.items():
        refuse(
            {
                f"--metric {metric} wants a validation set, and {arm} has none: hold rows out with --fixed "
                "validation-fraction=0.1, say, or give --metric test_auc, which chooses on the test set.": (
                    metric.startswith("validation_") and not has_validation(words)
                ),
                f"--metric {metric} is the mean AUC within groups: give --fixed group=FIELD, such as the user.": (
                    metric.endswith("_gauc") and "--group" not in words
                ),
            }
        )


def has_validation(words: Sequence[str]) -> bool:
    """Whether train.py has a validation set with these flags.

    >>> has_validation([]), has_validation(["--data", "criteo", "--path", "train.txt"])
    (True, False)
    """
    given = dict(itertools.pairwise(words))
    if given.get("--data", "synthetic") == "synthetic" or "--validation-fraction" in given:
        return True
    return given["--data"] == "tabular" and "validation" in read_metadata(local_path(given.get("--path", "")))["rows"]


def chosen(
    found: Mapping[str, Sequence[Mapping[str, Any]]], metric: str, seeds: Sequence[int] = (), test_sets: int = 1
) -> dict[str, Any]:
    """Return the arm with the best mean, the first of equals, and its test figure if the validation has chosen it.

    >>> runs = {"a": [{"validation_auc": 0.6, "test_auc": 0.7}], "b": [{"validation_auc": 0.7, "test_auc": 0.5}]}
    >>> chosen(runs, "validation_auc"), chosen(runs, "test_auc")
    ({'chosen': 'b', 'chosen_test_auc': 0.5, 'chosen_test_auc_half_width': None}, {'chosen': 'a'})
    """
    worth = {
        arm: sign_of(metric) * np.mean([figure_of(one, metric) for one in of_arm]) for arm, of_arm in found.items()
    }
    arm = max(worth, key=lambda name: worth[name])
    results: dict[str, Any] = {"chosen": arm}
    if metric.startswith("validation_"):
        test = metric.replace("validation", "test")
        results[f"chosen_{test}"], results[f"chosen_{test}_half_width"] = paired_interval(
            [figure_of(one, test) for one in found[arm]], seeds, test_sets
        )
    return results


def said_of(results: Mapping[str, Any]) -> str:
    """Say which arm is chosen, and how it tests."""
    key = next((key for key in results if key.startswith("chosen_test_")), None)
    if key is None:
        by_test = results["metric"].startswith("test_")
        return f"chosen: {results['chosen']}" + (
            ", by the test set, whose figure therefore flatters it" if by_test else ""
        )
    mean, half = results[key], results[f"{key}_half_width"]
    figure = Figure(mean) if half is None else Figure(mean, mean - half, mean + half)
    return f"chosen: {results['chosen']}, whose {key.removeprefix('chosen_')} is {said(figure)}"


def summary(found: dict[str, list[float]], seeds: Sequence[int] = (), test_sets: int = 1) -> dict[str, Any]:
    """Return each arm's mean and deviation over seeds, and its paired difference from the first arm.

    Seeds and test sets as in `paired_interval`.

    >>> flat = summary({"a": [1.0, 2.0], "b": [2.0, 4.0]})
    >>> flat["b_mean"], round(flat["b_deviation"], 3), flat["b_minus_first"], flat["first"]
    (3.0, 1.414, 1.5, 'a')
    """
    first, *others = found
    results: dict[str, Any] = {"first": first, "seeds": len(found[first])}
    for arm, values in found.items():
        results[f"{arm}_mean"] = float(np.mean(values))
        results[f"{arm}_deviation"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
    for arm in others:
        differences = np.subtract(found[arm], found[first])
        results[f"{arm}_minus_first"], half = paired_interval(differences, seeds, test_sets)
        results[f"{arm}_minus_first_half_width"] = half
    return results


def main(config: Config) -> dict:
    """Train what is missing; return the contents of results.json."""
    arms = arms_of(config.vary)
    refuse({"--vary is needed: a flag of train.py and its values, such as model=dlrm,dcnv2.": not config.vary})
    fixed = [word for item in config.fixed for word in words_of(*pair_of("fixed", item))]
    arms = {arm: [*fixed, *flags] for arm, flags in arms.items()}
    paths = config.path
    twice = bool(paths) and any("--path" in flags for flags in arms.values())
    refuse({"--path and path=... are two ways to name the data: leave one of them out.": twice})
    of_seed = in_turn(paths)
    of_first = {arm: [*flags, *of_seed(0)] for arm, flags in arms.items()}
    check_metric(config.metric, of_first)
    check_arms(config.preset, of_first)
    with (
        Run("sweep", config, config.workdir, config.resume) as run,
        stop_on_signals(f"go on with {again_in(run)}") as asked,
    ):
        seeds = range(config.seed, config.seed + config.seeds)
        has_metric = lambda results: figure_of(results, config.metric)  # before the next arm is trained
        found = trained_arms(run, arms, config.preset, seeds, asked, of_seed=of_seed, check=has_metric)
        figures = {arm: [figure_of(one, config.metric) for one in of_arm] for arm, of_arm in found.items()}
        results = summary(figures, seeds, len(paths) or 1)
        results |= {"metric": config.metric} | chosen(found, config.metric, seeds, len(paths) or 1)
        columns = {"mean": "{}_mean", "deviation": "{}_deviation", "minus the first": MINUS}
        better = "more" if sign_of(config.metric) > 0 else "less"
        head = f"{config.metric} ({better} is better) over {config.seeds} seeds"
        run.close(results, "\n".join([head, grid(results, "arm", list(arms), columns), said_of(results)]))
        return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
