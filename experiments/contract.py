"""The contract of all experiments: common flags and their limits, one way to end, paired intervals and plots."""

import dataclasses
import math
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

try:
    import scipy.stats
    import tqdm  # noqa: F401  the experiments' own, looked for here so that one line stands for all
    import tyro
except ModuleNotFoundError as error:
    sys.exit(f"error: the experiments need {error.name}: `make setup`, or `pip install -e '.[experiments,data,plots]'`")

from runs import Run
from stopping import Stopped, leave, say

from jaxrec.files import aside

__all__ = [
    "Flags",
    "Run",
    "command_line",
    "command_of",
    "paired_interval",
    "plot",
    "refuse",
    "refuse_small",
    "say",
    "stacked_bars",
]

_LEAST = {
    "seed": 0, "seeds": 1, "steps": 1, "evaluations": 1, "save_every_steps": 0, "batch_size": 1, "examples": 1,
    "rows": 1, "shards": 1, "embedding_width": 1, "width": 1, "rank": 1, "learning_rate": 0, "row_learning_rate": 0,
    "trainers": 1, "workers": 1, "window": 1, "epochs": 1, "negatives": 1, "minutes": 0, "soak_minutes": 0,
    "rounds": 0, "failures": 0, "deltas": 1, "warmup_steps": 0, "shadow_steps": 1, "every_steps": 1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Flags:
    """The flags of every experiment; its own come after them."""

    preset: Literal["smoke", "default", "paper"] = "default"
    workdir: Path | None = None
    seed: int = 0


def command_line(main: Callable[[Any], dict], config: type[Flags], description: str | None) -> dict:
    """Runs `main` on the flags of the command line; bad input ends in one line, not in a traceback.

    A signal ends in one line too, and in the exit code 128 + its number; or in 75, by which a scheduler knows that it
    should start the job again, if the experiment has a flag `requeue` and it is given.
    """
    flags = None
    try:
        flags = tyro.cli(config, description=description)
        refuse_small(flags)
        return main(flags)
    except (ValueError, FloatingPointError, NotImplementedError, OSError) as error:
        sys.exit(f"error: {error}")
    except Stopped as stopped:
        leave(stopped, requeue=getattr(flags, "requeue", False))


def command_of(name: str, config: Flags) -> str:
    """The command line that gives these flags again: those that are not the defaults.

    Args:
      name: of the experiment.
      config: as it came from the command line; where to write and what to go on with is left out.

    >>> command_of("train", Flags(preset="smoke", workdir=Path("runs/a"), seed=3))
    'python experiments/train.py --preset smoke --seed 3'
    """
    words = ["python", f"experiments/{name}.py"]
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), field.name.replace("_", "-")
        if field.name in ("workdir", "resume") or value == field.default:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return shlex.join(words)


def refuse(broken: Mapping[str, object]) -> None:
    """Raises the first rule of {sentence: whether it is broken}.

    Raises:
      ValueError: with that sentence.
    """
    for sentence, is_broken in broken.items():
        if is_broken:
            raise ValueError(sentence)


def refuse_small(config: object) -> None:
    """Compares every number among the flags with the least that it may be; infinity and NaN are refused too.

    Raises:
      ValueError: names the flag, its value and the least.
    """
    for name, least in _LEAST.items():
        values = getattr(config, name, None)
        for value in values if isinstance(values, tuple) else (values,):
            if value is not None and not least <= value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be a number of at least {least}.")


def paired_interval(differences) -> tuple[float, float | None]:
    """Mean and half width of the 95 % interval of paired differences, one a seed; no width from a single one."""
    differences = np.asarray(differences, np.float64)
    n = len(differences)
    if n < 2:
        return float(differences.mean()), None
    t = scipy.stats.t.ppf(0.975, n - 1)
    return float(differences.mean()), float(t * differences.std(ddof=1) / n**0.5)


def plot(path: Path, panels: dict[str, dict[str, tuple]], x_label: str) -> bool:
    """Draws one panel a metric, {y_label: {line: (xs, ys)}}, to a PNG; False if matplotlib is not installed."""

    def fill(axes):
        for axis, (y_label, lines) in zip(axes, panels.items(), strict=True):
            for name, (xs, ys) in lines.items():
                axis.plot(xs, ys, label=name)
            axis.set(xlabel=x_label, ylabel=y_label)
            axis.grid(alpha=0.3)

    return _draw(path, len(panels), 5 * len(panels), fill)


def stacked_bars(path: Path, bars: dict[str, dict[str, float]], y_label: str) -> bool:
    """Draws {bar: {part: height}} as stacked bars to a PNG; False if matplotlib is not installed."""

    def fill(axes):
        below = np.zeros(len(bars))
        for part in next(iter(bars.values())):
            heights = np.array([parts[part] for parts in bars.values()])
            axes[0].bar(list(bars), heights, bottom=below, label=part)
            below += heights
        axes[0].set(ylabel=y_label)

    return _draw(path, 1, 1.2 * len(bars) + 2, fill)


def _draw(path, panels, width, fill):
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, panels, figsize=(width, 3.5), squeeze=False)
    fill(axes[0])
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.tight_layout()
    try:
        with aside(path) as partial:
            figure.savefig(partial, format="png", dpi=120)
    except OSError as error:
        say(f"{error}: {path.name} is not drawn", sys.stderr)  # no reason to lose the results
        return False
    finally:
        plt.close(figure)
    return True
