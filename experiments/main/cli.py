"""Contract of all experiments: common flags and their limits, one way to end, intervals, tables and plots."""

import dataclasses
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

try:
    import scipy.stats
    import tqdm  # noqa: F401  for the experiments; checked here, so that one message covers all
    import tyro
except ModuleNotFoundError as error:
    sys.exit(
        f"error: the experiments need {error.name}: `make setup`, or `pip install 'jaxrec[experiments,data,plots]'`"
    )

from main.plots import bars, plot, stacked_bars
from main.report import Figure, grid, listing
from main.run_dir import Run, flat
from main.signals import EXPERIMENTS, Stopped, leave, say, stop_on_signals

__all__ = [
    "Figure",
    "Flags",
    "Run",
    "bars",
    "belongs",
    "command_line",
    "grid",
    "help_of",
    "listing",
    "paired_interval",
    "plot",
    "refuse",
    "refuse_small",
    "rule_of_ray",
    "say",
    "stacked_bars",
    "unread",
]

_LEAST = {
    "seed": 0, "seeds": 1, "steps": 1, "evaluations": 1, "save_every_steps": 0, "batch_size": 1, "examples": 1,
    "rows": 1, "shards": 1, "embedding_width": 1, "width": 1, "rank": 1, "learning_rate": 0, "row_learning_rate": 0,
    "trainers": 1, "workers": 1, "window": 1, "epochs": 1, "negatives": 1, "minutes": 0, "soak_minutes": 0,
    "servers": 1, "rounds": 0, "failures": 0, "kills": 1, "deltas": 1, "warmup_steps": 0, "shadow_steps": 1,
    "every_steps": 1, "min_count": 1, "hash_cap": 2, "max_bad_rows": 0, "patience": 1, "mtbf_steps": 1,
    "fail_shape": 0.01, "sync_pace_seconds": 0, "sync_every_steps": 1, "target_pls": 0, "spares": 0, "hots_scale": 0,
    "weight_decay": 0, "clip_norm": 1e-9, "layers": 1, "dropout": 0,
    "keep_period": 1, "label_weights": 0, "experts": 1, "windows": 1, "groups": 1, "fanout": 1, "valid_triples": 1,
    "factors": 1e-9,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags common to all experiments; each adds its own."""

    preset: Literal["smoke", "default", "paper"] = "default"
    workdir: Path | None = None
    seed: int = 0


def command_line(
    main: Callable[[Any], dict], config: type, description: str | None, parse: Callable[..., Any] = tyro.cli
) -> dict:
    """Run `main` on the flags of the command line; bad input ends in one line, not in a traceback.

    A signal ends in one line too, with exit code 128 + its number; or 75, for a scheduler configured to restart such
    jobs, if --requeue is given.

    Args:
      parse: (config, description=..., prog=...) -> its flags.
    """
    try:
        with stop_on_signals():
            flags: Any = parse(config, **help_of(description))
            refuse_small(flags)
            return main(flags)
    except (ValueError, FloatingPointError, NotImplementedError, OSError) as error:
        sys.exit(f"error: {error}")
    except Stopped as stopped:
        leave(stopped)


def help_of(doc: str | None) -> dict[str, Any]:
    """Return how --help describes and names a script; in a wheel, where no user finds the script, by its command."""
    if EXPERIMENTS.name != "scripts":
        return {"description": doc, "prog": None}
    doc = re.sub(r"python experiments/(\w+)\.py", r"jaxrec-\1", doc or "")
    return {"description": doc, "prog": f"jaxrec-{Path(sys.argv[0]).stem}"}


def refuse(broken: Mapping[str, object]) -> None:
    """Raise the first broken rule of {sentence: whether it is broken}, as a ValueError with that sentence."""
    for sentence, is_broken in broken.items():
        if is_broken:
            raise ValueError(sentence)


def unread(config, read_by: Mapping[str, tuple[bool, Sequence[str]]]) -> dict[str, object]:
    """Return {problem and remedy: whether it applies}, for `refuse`, for flags that are given but read by nothing.

    Args:
      read_by: {reader: (whether the run has it, flags that it reads)}.
    """
    broken = {}
    for reader, (there, names) in read_by.items():
        for name in names:
            value = getattr(config, name)
            broken[belongs(name, value, reader)] = (
                not there and value != type(config).__dataclass_fields__[name].default
            )
    return broken


def belongs(name: str, value: Any, reader: str) -> str:
    """Return the sentence that refuses a flag, name_of_it, without what reads it.

    >>> belongs("window", 4, "--pipeline oac"), belongs("path", ("a", "b"), "--data criteo")[:13]
    ('--window 4 is for --pipeline oac: add that, or leave it out.', '--path a b is')
    """
    words = [*map(str, value if isinstance(value, tuple) else () if isinstance(value, bool) else (value,))]
    flag = " ".join([f"--{'no-' * (value is False)}{name.replace('_', '-')}", *words])
    return f"{flag} is for {reader}: add that, or leave it out."


def rule_of_ray() -> dict[str, object]:
    """Return the rule, for `refuse`, that Ray is installed."""
    missing = importlib.util.find_spec("ray") is None
    return {"this needs Ray, which is not installed: pip install 'jaxrec[cluster]'.": missing}


def refuse_small(config: object) -> None:
    """Check every numeric flag against its minimum; infinity and NaN are refused too."""
    for name, given in flat(config).items():
        for value in given if isinstance(given, tuple) else (given,):
            if name in _LEAST and value is not None and not _LEAST[name] <= value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be a number of at least {_LEAST[name]}.")


def paired_interval(differences, seeds: Sequence[int] = (), test_sets: int = 1) -> tuple[float, float | None]:
    """Return mean and half width of the 95 % interval of paired differences, one per seed; None for one seed.

    Seeds that share one of several test sets are not independent: the interval is then that of the test sets' means.

    Args:
      differences: one per seed.
      seeds: their numbers.
      test_sets: number of test sets that the seeds take in turn.

    >>> paired_interval([1.0, 3.0, 1.0, 3.0], range(4), test_sets=2) == paired_interval([1.0, 3.0])
    True
    """
    differences = np.asarray(differences, np.float64)
    if test_sets > 1:
        its = np.asarray(seeds) % test_sets
        differences = np.array([differences[its == each].mean() for each in np.unique(its)])
    n = len(differences)
    if n < 2:
        return float(differences.mean()), None
    t = scipy.stats.t.ppf(0.975, n - 1)
    return float(differences.mean()), float(t * differences.std(ddof=1) / n**0.5)
