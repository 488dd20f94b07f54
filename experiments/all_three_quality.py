"""Whether all three techniques together cost accuracy: the main job with all of them and with none, over seeds.

    python experiments/all_three_quality.py                8 seeds, fixed beforehand; about 40 minutes on two cores
    python experiments/all_three_quality.py --workdir DIR --resume

`none` uses synchronous host tables and two devices that share each batch. `all` is OAC with a window of 8, two replicas
in lock step that a thread synchronises by model averaging, and recovery from MFU checkpoints. `failures` is `all` with
three shards lost in two failures. Three more arms show where a difference comes from: `foreground` averages the
replicas in every step, blocking training; `easgd` has a centre; `sqrt` scales the dense learning rate by the square
root of two, as each replica sees half of a batch.

All arms of a seed share mesh, data and initial values; each runs train.py in a process and directory of its own, and
resumes there after a stop. Non-inferior means that the 95 % interval of the paired differences lies above -0.0005 AUC.
"""

import dataclasses
from typing import Any, Literal

from demo import environment
from main.cli import Flags, Run, command_line, listing, paired_interval
from main.signals import stop_on_signals
from sweep import trained_arms

MARGIN_AUC = -0.0005
Arm = Literal["none", "all", "failures", "foreground", "easgd", "sqrt"]
REPLICAS = "--tables host --pipeline oac --window 8 --trainers 2 --cpr mfu --shadowsync "
ARMS: dict[Arm, str] = {
    "none": "--tables host --pipeline sync",
    "all": REPLICAS + "ma",
    "failures": REPLICAS + "ma --fail 300:3 700:1,5",
    "foreground": REPLICAS + "ma --sync-every-steps 1 --sync-alpha 1",
    "easgd": REPLICAS + "easgd",
    "sqrt": REPLICAS + "ma --learning-rate 0.001414",
}
SMALL = ARMS | {"failures": REPLICAS + "ma --fail 30:3 70:1,5"}  # for the 100 steps of `smoke`
TABLE = {"Test AUC": ["auc"], "Of the runs": ["seeds", "pls", "shards", "replica", "stale", "examples"]}


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the comparison."""

    seeds: int = 8
    arms: tuple[Arm, ...] = tuple(ARMS)
    """Arms to compare with `none`."""
    resume: bool = False
    """Continue the comparison in --workdir."""


def again_in(run: Run) -> str:
    """The command that resumes the comparison in the directory of a run."""
    return f"python experiments/all_three_quality.py --workdir {run.directory} --resume, and the same flags"


def main(config: Config) -> dict:
    """Train the missing arms and return the contents of results.json."""
    with (
        Run("all_three_quality", config, config.workdir, config.resume) as run,
        stop_on_signals(f"go on with {again_in(run)}") as asked,
    ):
        flags_of, seeds = SMALL if config.preset == "smoke" else ARMS, range(config.seed, config.seed + config.seeds)
        arms = {arm: flags_of[arm].split() for arm in ARMS if arm == "none" or arm in config.arms}
        results = summary(trained_arms(run, arms, config.preset, seeds, asked, environment()))
        run.close(results, listing(results, TABLE))
        return results


def summary(found: dict[str, list[dict]]) -> dict[str, Any]:
    """Paired AUC differences between arms, and figures of the techniques.

    >>> arms = {"none": [{"test_auc": 0.74}, {"test_auc": 0.75}], "all": [{"test_auc": 0.74}, {"test_auc": 0.76}]}
    >>> round(summary(arms)["auc_all_minus_none"], 3), summary(arms)["auc_all_non_inferior"]
    (0.005, False)
    >>> found = summary(arms | {"foreground": [{"test_auc": 0.73}, {"test_auc": 0.75}]})
    >>> round(found["auc_all_minus_foreground"], 3), found["auc_all_non_inferior_to_foreground"]
    (0.01, True)
    """
    auc = {arm: [run["test_auc"] for run in runs] for arm, runs in found.items()}
    results: dict[str, Any] = {"seeds": len(auc["none"])}
    results |= {f"auc_{arm}": sum(values) / len(values) for arm, values in auc.items()}
    for arm in [arm for arm in found if arm != "none"]:
        results |= minus(auc, arm, "none", f"auc_{arm}_non_inferior")
        for name in ("pls", "shards_failed", "replica_spread", "stale_share"):
            values = [run[name] for run in found[arm] if name in run]
            results |= {f"{name}_{arm}": sum(values) / len(values)} if values else {}
    if "all" in auc and "foreground" in auc:  # as ShadowSync's paper compares: equally many trainers, background or not
        results |= minus(auc, "all", "foreground", "auc_all_non_inferior_to_foreground")
    return results


def minus(auc: dict[str, list[float]], arm: str, other: str, verdict: str) -> dict[str, Any]:
    """Paired difference of two arms with its interval; whether the first is non-inferior, under the key `verdict`."""
    difference, half_width = paired_interval([a - b for a, b in zip(auc[arm], auc[other], strict=True)])
    name = f"auc_{arm}_minus_{other}"
    non_inferior = half_width is not None and difference - half_width > MARGIN_AUC
    return {name: difference, f"{name}_half_width": half_width, verdict: non_inferior}


if __name__ == "__main__":
    command_line(main, Config, __doc__)
