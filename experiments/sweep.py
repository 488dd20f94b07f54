"""Train every combination of some flags over seeds and compare them: one table of means and paired intervals.

    python experiments/sweep.py --vary model=dlrm,dcnv2 row-learning-rate=0.02,0.05 --seeds 3
    python experiments/sweep.py --vary model=lr,fm,dnn --fixed data=criteo path=prepared --workdir DIR
    python experiments/sweep.py ... --workdir DIR --resume           goes on; what is complete is not trained again

Each run is train.py in its own process and directory. All arms of a seed see the same data, so differences are taken
within seeds. The first arm is the baseline: put yours first. A run takes as long as train.py with its flags, a minute
and a half by default.
"""

import dataclasses
import itertools
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from main.children import trained
from main.cli import Flags, Run, command_line, grid, paired_interval, refuse
from main.signals import Asked, stop_on_signals

OWN = {"seed", "seeds", "workdir", "resume", "requeue", "preset"}  # flags that the sweep sets for each run
MINUS = "{}_minus_first"


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the sweep; --preset is that of each run, and --seed the first of the seeds."""

    vary: tuple[str, ...] = ()
    """flag=value,value,...: all combinations are trained; no value for a flag that is on or off: flag=,no."""
    fixed: tuple[str, ...] = ()
    """flag=value shared by all runs; several values in quotes: "fail=300:3 700:1"."""
    seeds: int = 3
    metric: str = "test_auc"
    """Key of results.json to compare."""
    resume: bool = False
    """Resume the sweep in --workdir."""


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


def again_in(run: Run) -> str:
    """Return how to resume, in words."""
    return f"the same flags, --workdir {run.directory} and --resume"


def trained_arms(
    run: Run, arms: Mapping[Any, Sequence[str]], preset: str, seeds: Iterable[int], asked: Asked,
    env: Mapping[str, str] | None = None, of_seed: Callable[[int], list[str]] = lambda seed: [],
) -> dict[Any, list[dict[str, Any]]]:  # fmt: skip
    """Train arms {name: flags of train.py}, with `of_seed` more flags; return {arm: results of each seed}, each logged.

    Raises as `trained`.
    """
    found: dict[Any, list[dict[str, Any]]] = {arm: [] for arm in arms}
    logged = [(row["arm"], row["seed"]) for row in run.metrics()]
    for (arm, flags), seed in itertools.product(arms.items(), seeds):
        name = "".join(c if c.isalnum() or c in ".=-" else "_" for c in f"{arm}_{seed}")
        words = ["--preset", preset, "--seed", str(seed), *flags, *of_seed(seed)]
        found[arm].append(trained(run, name, f"{arm}, seed {seed}", words, asked, env))
        if (arm, seed) not in logged:
            run.log({"arm": arm, "seed": seed} | found[arm][-1])
    return found


def figure_of(results: Mapping[str, Any], metric: str) -> float:
    """Return a number of results.json."""
    if not isinstance(results.get(metric), int | float):
        numbers = ", ".join(key for key, value in results.items() if isinstance(value, int | float))
        raise ValueError(f"--metric {metric} is no number of results.json: give one of {numbers}.")
    return results[metric]


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
    with (
        Run("sweep", config, config.workdir, config.resume) as run,
        stop_on_signals(f"go on with {again_in(run)}") as asked,
    ):
        found = trained_arms(run, arms, config.preset, range(config.seed, config.seed + config.seeds), asked)
        results = summary({arm: [figure_of(one, config.metric) for one in of_arm] for arm, of_arm in found.items()})
        columns = {"mean": "{}_mean", "deviation": "{}_deviation", "minus the first": MINUS}
        run.close(results, f"{config.metric} over {config.seeds} seeds\n{grid(results, 'arm', list(arms), columns)}")
        return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
