"""Run an experiment several times in fresh processes, and give its figures with intervals over those runs.

    python experiments/repeat.py --command "throughput.py --tables host --sweep width --rounds 4"
    python experiments/repeat.py --times 3 --own-seeds --command "link_prediction.py --path WN18"
    python experiments/repeat.py --times 6 --command "oac_throughput.py" --workdir DIR --resume    adds runs, later

The interval of one run covers its rounds. What a process keeps from start to end, and the load of the machine in its
minutes, are the same in all of them, so a second run often lies outside. Here a run is one value: a figure is the mean
over the runs, with its 95 % t-interval (`_low`, `_high`) and the least and the most (`_min`, `_max`). Many short runs,
hours apart, say more than few long ones in a row. Nothing else should run beside it.
"""

import dataclasses
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from main.children import run_child
from main.cli import Run, command_line, listing, paired_interval, refuse, say
from main.report import figures, keys_beside
from main.run_dir import go_on_with
from main.signals import stop_on_signals

HERE = Path(__file__).parent
OWN = ("--workdir", "--resume", "--requeue")  # each run has a directory of its own


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run, and how often."""

    command: str = ""
    """An experiment of this directory and its flags, in quotes."""
    times: int = 6
    own_seeds: bool = False
    """Give run k the seed k - 1: the intervals are then over seeds."""
    workdir: Path | None = None
    resume: bool = False
    """Resume in --workdir: with more --times, runs are added."""


def over_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the results of several runs, which have the same keys up to what some lacked.

    Args:
      runs: contents of their results.json. Their own intervals are not used.

    Returns:
      `repeats`, their number; what is equal in all of them as it is; other figures as their mean, with the ends of its
      95 % t-interval over the runs and the least and the most of them, under the keys that the runs have for these;
      other words that differ as "A or B". Keys that some run lacks are left out.

    >>> over_runs([{"side": "a", "x": 1.0, "x_low": 0.9, "n": 2}, {"side": "b", "x": 3.0, "x_low": 2.9, "n": 2}])
    {'repeats': 2, 'side': 'a or b', 'x': 2.0, 'x_low': -10.70..., 'x_high': 14.70...,
     'x_min': 1.0, 'x_max': 3.0, 'n': 2}
    """
    found, beside = [figures(one) for one in runs], keys_beside(runs[0])
    results: dict[str, Any] = {"repeats": len(runs)}
    for key in found[0]:
        values = [one[key].value for one in found if key in one]
        if len(values) < len(runs):
            continue
        if all(value == values[0] for value in values):
            results[key] = values[0]
        elif all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            mean, half = paired_interval(values)
            assert half is not None  # values that differ are several
            ends = {"low": mean - half, "high": mean + half, "min": min(values), "max": max(values)}
            keys = beside.get(key, {})
            results |= {key: mean} | {keys.get(word, f"{key}_{word}"): end for word, end in ends.items()}
        else:
            results[key] = " or ".join(sorted(set(map(str, values))))
    return results


def script_of(words: Sequence[str]) -> Path:
    """Return the experiment that a command names, or refuse the command."""
    name = words[0] if words else ""
    given = [word for word in words if word.partition("=")[0] in OWN]
    refuse(
        {
            f"--command {name!r} is no experiment of {HERE}: begin with its file, such as throughput.py.": (
                Path(name).name != name or not name.endswith(".py") or not (HERE / name).is_file()
            ),
            "--command repeat.py would repeat itself: give an experiment.": name == Path(__file__).name,
            f"--command has {' '.join(given)}, and each run has a directory of its own: leave it out there.": given,
        }
    )
    return HERE / name


def main(config: Config) -> dict:
    """Run what is missing; return the contents of results.json."""
    words = shlex.split(config.command)
    script = script_of(words)
    refuse({"--own-seeds gives each run its --seed: leave it out there.": config.own_seeds and "--seed" in words})
    refuse({f"--times {config.times} must be at least 2: one run has no spread.": config.times < 2})
    with Run("repeat", config, config.workdir, config.resume) as run, stop_on_signals(go_on_with(run)) as asked:
        logged = [row["run"] for row in run.metrics()]
        for number in range(1, config.times + 1):
            directory, results = run.directory / str(number), f"{number}/results.json"
            if not (run.directory / results).exists():
                if directory.exists():
                    shutil.rmtree(directory)  # of a run that was stopped: part of a measurement is none
                say(f"run {number} of {config.times}: {config.command}")
                with open(f"{directory}.log", "a") as output:
                    each = [sys.executable, str(script), *words[1:], "--workdir", str(directory)]
                    each += ["--seed", str(number - 1)] if config.own_seeds else []
                    run_child(each, f"run {number}", asked, output=output)
            if number not in logged:
                run.log({"run": number} | run.read_json(results))
        found = over_runs([run.read_json(f"{number}/results.json") for number in range(1, config.times + 1)])
        run.close(found, f"{config.command}, {config.times} runs\n{listing(found)}")
        return found


if __name__ == "__main__":
    command_line(main, Config, __doc__)
