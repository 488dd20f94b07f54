"""The contract of all experiments: one working directory a run, the same files in each, written whole or not at all."""

import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from environment import environment

try:
    import scipy.stats
    import tqdm  # noqa: F401  the experiments' own, looked for here so that one line stands for all
    import tyro
except ModuleNotFoundError as error:
    sys.exit(f"error: the experiments need {error.name}: `make setup`, or `pip install -e '.[experiments,data,plots]'`")

_MAY_CHANGE = {"workdir", "resume", "seeds"}  # when a run goes on


@dataclasses.dataclass(frozen=True)
class Flags:
    """The flags of every experiment; its own come after them."""

    preset: Literal["smoke", "default", "paper"] = "default"
    workdir: Path | None = None
    seed: int = 0


def command_line(main: Callable[[Any], dict], config: type[Flags], description: str | None) -> dict:
    """Runs `main` on the flags of the command line; bad input ends in one line, not in a traceback."""
    try:
        return main(tyro.cli(config, description=description))
    except (ValueError, FloatingPointError, NotImplementedError) as error:
        sys.exit(f"error: {error}")


class Run:
    """A run's directory: config.json, environment.json, metrics.jsonl, results.json and plots.

    Args:
      name: of the experiment.
      config: its frozen dataclass.
      workdir: where to write; a new directory under `runs/` if None.
      resume: go on in a directory that holds a run already.

    Errors:
      ValueError: the directory holds a run that has logged something, and `resume` is off or other flags have changed
        than `seeds`.
    """

    def __init__(self, name: str, config, workdir: Path | None = None, resume: bool = False):
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        self.directory = Path(workdir) if workdir else Path("runs") / f"{name}-{stamp}-{os.getpid()}"
        logged = bool(self.metrics())
        if logged and not resume:
            raise ValueError(
                f"{self.directory} holds a run already: give another --workdir, or --resume to go on with it."
            )
        flags, commits = dataclasses.asdict(config), []
        if logged:
            self._refuse_other_flags(flags)
            before = self._read_json("environment.json")
            commits = [*before.get("earlier_commits", []), before.get("commit")]
        self.directory.mkdir(parents=True, exist_ok=True)
        self.write_json("config.json", flags)
        self.write_json("environment.json", environment() | ({"earlier_commits": commits} if commits else {}))

    def _refuse_other_flags(self, flags):
        before, now = self._read_json("config.json"), json.loads(json.dumps(flags, default=_plain))
        other = [key for key in before.keys() & now.keys() - _MAY_CHANGE if before[key] != now[key]]
        if other:
            was = ", ".join(f"{key} {before[key]}, not {now[key]}" for key in sorted(other))
            raise ValueError(f"{self.directory} was begun with {was}: resume it with its own flags, or take another.")

    def _read_json(self, name):
        path = self.directory / name
        return json.loads(path.read_text()) if path.exists() else {}

    def write_json(self, name: str, content) -> None:
        """Writes one file of the run, aside first."""
        write_text(self.directory / name, json.dumps(content, indent=2, default=_plain) + "\n")

    def log(self, row: dict) -> None:
        """Appends one row to metrics.jsonl."""
        with open(self.directory / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row, default=_plain) + "\n")

    def metrics(self) -> list[dict]:
        """The rows logged so far."""
        path = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def rewrite_metrics(self, rows: list[dict]) -> None:
        """Keeps only some rows of metrics.jsonl, when a run goes on from an earlier step."""
        write_text(self.directory / "metrics.jsonl", "".join(json.dumps(row, default=_plain) + "\n" for row in rows))

    def close(self, results: dict) -> None:
        """Writes results.json, flat, and prints it."""
        self.write_json("results.json", results)
        width = max(map(len, results))
        for key, value in results.items():
            print(f"{key:<{width}}  {value:.6g}" if isinstance(value, float) else f"{key:<{width}}  {value}")
        print(f"run written to {self.directory}")


def paired_interval(differences) -> tuple[float, float | None]:
    """Mean and half width of the 95 % interval of paired differences, one a seed; no width from a single one."""
    differences = np.asarray(differences, np.float64)
    n = len(differences)
    if n < 2:
        return float(differences.mean()), None
    t = scipy.stats.t.ppf(0.975, n - 1)
    return float(differences.mean()), float(t * differences.std(ddof=1) / n**0.5)


def write_text(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


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
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _plain(value):
    return value.item() if isinstance(value, np.generic) else str(value)
