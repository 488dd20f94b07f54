"""Run all three techniques at once, with two failures, beside the same run with none of them.

    make demo                                                two trainings, a table and one picture; 2.5 minutes
    make demo ARGS="--workdir runs/demo --resume"            goes on; what is complete is not trained again

Both arms train DLRM on the same synthetic clicks, with tables in host memory, on two virtual devices of this CPU. One
trains one batch after the other. The other has batches in flight (OAC, window 8), two replicas synchronised in the
background (ShadowSync, model averaging), and saves the most used rows first (CPR, MFU): it loses one of eight shards
after a third of the run, two more after two thirds, and only these are restored. The AUCs differ by less than 0.01.
Rates of arms that run one after the other differ with the load, too. Result: results/two_cores_cpu/demo.json.
"""

import dataclasses
import json
import os
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from main.children import trained
from main.cli import Flags, Run, command_line, grid, say
from main.plots import compare, rates
from main.signals import stop_on_signals

ARMS = {"none": "none", "all": "all three"}  # {prefix of result keys: name in tables}
# Flags of train.py; its smoke preset has a test set that takes a second.
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"preset": "smoke", "rows": 2_000, "steps": 24, "batch_size": 64, "evaluations": 6, "model": "small_dlrm"},
    "default": {"preset": "smoke", "rows": 60_000, "steps": 400, "batch_size": 1024, "evaluations": 20},
    "paper": {"evaluations": 20},
}
_STEPS = {"paper": 1_000}  # where train.py's preset sets them
COLUMNS: dict[str, str | tuple[str, float]] = {
    "test AUC": "{}_test_auc", "log loss": "{}_test_log_loss", "examples/s": "{}_median_examples_per_s",
    "rows too old, %": ("{}_stale_share", 100), "sync gap, steps": "{}_sync_gap_steps", "PLS, %": ("{}_pls", 100),
    "shards failed": "{}_shards_failed", "rows saved": "{}_rows_saved",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the demonstration."""

    resume: bool = False
    """Resume in --workdir: complete arms are not trained again, others resume from their last save."""


def flags_of(arm: str, config: Config) -> list[str]:
    """Return the flags of train.py for one arm."""
    sizes = SIZES[config.preset]
    steps = sizes.get("steps") or _STEPS[config.preset]
    flags = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--seed", str(config.seed), "--tables", "host"]
    if arm == "all":
        flags += ["--pipeline", "oac", "--window", "8", "--shadowsync", "ma", "--trainers", "2"]
        flags += ["--cpr", "mfu", "--fail", f"{steps // 3}:3", f"{2 * steps // 3}:1,5"]
    return flags


def environment() -> dict[str, str]:
    """Return this process's environment with two virtual CPU devices, whatever number it requests."""
    others = re.sub(r"--xla_force_host_platform_device_count=\S*", "", os.environ.get("XLA_FLAGS", ""))
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{others} --xla_force_host_platform_device_count=2"}


def again_in(run: Run) -> str:
    """Return the command that resumes the demonstration."""
    return f"make demo ARGS='--workdir {run.directory} --resume'"


def rows_of(directory: Path) -> list[dict]:
    """Read the rows of metrics of an arm."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def results_of(run: Run, found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the contents of results.json: the keys of both arms, prefixed by arm, and their comparison."""
    results = {f"{arm}_{key}": value for arm, of_arm in found.items() for key, value in of_arm.items()}
    for arm in found:
        # Median over the intervals between evaluations: the first one compiles, and other processes share the machine.
        results[f"{arm}_median_examples_per_s"] = statistics.median(rates(rows_of(run.directory / arm))[1])
    return results | {"test_auc_all_minus_none": results["all_test_auc"] - results["none_test_auc"]}


def main(config: Config) -> dict:
    """Train both arms, show and plot them; return the contents of results.json."""
    with (
        Run("demo", config, config.workdir, config.resume) as run,
        stop_on_signals(f"go on with {again_in(run)}") as asked,
    ):
        say("This trains one model twice on the same clicks, on two virtual devices of this CPU: first with none of")
        say("the techniques, then with OAC, ShadowSync and CPR at once, where three of eight shards fail on the way.")
        found = {}
        for arm, name in ARMS.items():
            what, flags = f"the training with {name} of the techniques", flags_of(arm, config)
            found[arm] = trained(run, arm, what, flags, asked, environment(), shown=True)
        results = results_of(run, found)
        none, both, lost = (results[key] for key in ("none_test_auc", "all_test_auc", "all_shards_failed"))
        said = f"Test AUC {both:.4f} with all three techniques and {lost} shards lost, {none:.4f} with none"
        histories = {name: rows_of(run.directory / arm) for arm, name in ARMS.items()}
        drawn = compare(run.directory / "demo.png", histories, "validation", said)
        table = grid(results, "techniques", {name: arm for arm, name in ARMS.items()}, COLUMNS)
        say("")
        run.close(results, f"{table}\n\n{said}.")
        if drawn:
            say(f"the picture: {run.directory / 'demo.png'}")
        return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
