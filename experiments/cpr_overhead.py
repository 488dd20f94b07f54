"""What partial recovery does to accuracy after failures, alone and over the portion of lost samples (PLS).

    python experiments/cpr_overhead.py                                                 synthetic clicks, 1M examples
    python experiments/cpr_overhead.py --data criteo --path p0 p1 p2 --seeds 10        each seed has one of 3 test sets
    python experiments/cpr_overhead.py --over-pls --data criteo --path p0 p1           over PLS; 5 seconds for each run

Claims as we recall the paper (arXiv 2011.02999): two failures in 56 hours cost CPR hardly any accuracy; the loss is
about linear in PLS, and its slope smaller where the most used rows are saved first. Training, saves and restores by
jaxrec.cpr.Recovery are real, with 8 nodes and r = 0.125; an arm takes 3 to 60 seconds on one core. Full recovery ends
with the bits of `no_failure` (tests/test_recovery.py). `non_inferior_SCHEME`: the interval of the paired loss lies
below 0.0005 AUC, or above. With --watched 7, the paper's setting as recalled, the Criteo sample lost 32 +- 26
(vanilla), 39 +- 15 (SCAR), 17 +- 21 (MFU) and 35 +- 20 (SSU), in units of 0.00001 AUC over 25 seeds, and the slopes
over PLS of 3 seeds were 0.0070 (vanilla), 0.0043 (MFU) and 0.0050 (SSU); no file was kept.
Result: results/two_cores_cpu/cpr_overhead_*.json and cpr_pls_criteo.json.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from cpr_scalability import SETTINGS
from main.cli import Run, bars, command_line, grid, paired_interval, plot, refuse, unread
from main.report import figures, number, said, scaled
from studies.cpr_work import NODES, SCHEMES, CprJob, JobConfig, failures_in_steps, make_data
from tqdm import tqdm

from jaxrec.cpr import place_failures, schedule

MARGIN = 0.0005  # of AUC
SIZES = {"smoke": (60_000, 2), "default": (1_000_000, 3), "paper": (5_000_000, 10)}  # examples, seeds
# With --over-pls: {preset: (examples, seeds, target PLS, failures per job, failed nodes per failure)}.
SIZES_OVER_PLS: dict[str, tuple[int, int, tuple[float, ...], tuple[int, ...], tuple[int, ...]]] = {
    "smoke": (60_000, 1, (0.1,), (2, 8), (1, 4)),
    "default": (200_000, 2, (0.05, 0.1), (2, 8), (1, 4)),
    "paper": (1_000_000, 10, (0.02, 0.05, 0.1), (1, 2, 4, 8), (1, 2, 4)),
}


@dataclasses.dataclass(frozen=True)
class Config(JobConfig):
    """Flags of the experiment."""

    target_pls: float = 0.1
    failures: int = 2
    setting: Literal["a", "b"] = "a"
    """Of the schedule of saves; both settings have the same."""
    over_pls: bool = False
    """Vary the target PLS and the failures, and fit the accuracy lost over PLS."""
    schemes: tuple[Literal["vanilla", "scar", "mfu", "ssu", "random"], ...] = ("vanilla", "scar", "mfu", "ssu")
    """Schemes to train. `random`, a control: random touched rows, as many and as often as of SCAR and MFU."""


class Arm(NamedTuple):
    """A training; its fields are in its row of metrics."""

    scheme: str
    seed: int
    target_pls: float = 0.0
    failures: int = 0
    failed_nodes: int = 1


def train(run: Run, config: Config, job: CprJob, arms: Sequence[Arm]) -> None:
    """Train the arms that the run has not logged yet."""
    costs = SETTINGS[config.setting]
    done = {tuple(row.get(name) for name in Arm._fields) for row in run.metrics()}
    for arm in tqdm(arms, unit="arm", disable=None):
        if arm not in done:
            seed = config.seed + arm.seed
            placed = place_failures(arm.failures, costs.total_hours, NODES, seed, arm.failed_nodes)
            scheme, every, steps = None, 0.0, job.steps(arm.seed)
            if arm.scheme != "no_failure":
                hours = min(schedule.partial_interval(costs, arm.target_pls), costs.total_hours)
                scheme, every = arm.scheme, hours / costs.total_hours * steps
            row = job.run(scheme, arm.seed, every, failures_in_steps(placed, steps))
            run.log(row | arm._asdict())


def accuracies(rows: list[dict], schemes: Sequence[str], test_sets: int = 1) -> dict[str, Any]:
    """Accuracy results from the seeds for which all arms are complete; test sets as in `paired_interval`."""
    found = {(row["scheme"], row["seed"]): row for row in rows}
    arms = ["no_failure", *schemes]
    seeds = [seed for seed in sorted({seed for _, seed in found}) if all((arm, seed) in found for arm in arms)]
    results: dict[str, Any] = {"accuracy_is": "measured", "seeds": len(seeds)}
    auc = {arm: np.array([found[arm, seed]["test_auc"] for seed in seeds]) for arm in arms}
    for arm in arms:
        key = arm if arm == "no_failure" else f"cpr_{arm}"
        results[f"{key}_test_auc_mean"], half = paired_interval(auc[arm], seeds, test_sets)
        results[f"{key}_test_auc_mean_half_interval"] = half
        if arm != "no_failure":
            results[f"{key}_realized_pls"] = float(np.mean([found[arm, seed]["realized_pls"] for seed in seeds]))
            loss, half = paired_interval(auc["no_failure"] - auc[arm], seeds, test_sets)
            results[f"{key}_test_auc_loss"], results[f"{key}_test_auc_loss_half_interval"] = loss, half
            if half is not None and (loss + half < MARGIN or loss - half > MARGIN):
                results[f"non_inferior_{arm}"] = loss + half < MARGIN
            for control in ("vanilla", "random"):
                if control in schemes and arm not in ("vanilla", control):
                    gain, half = paired_interval(auc[arm] - auc[control], seeds, test_sets)
                    results[f"{key}_test_auc_minus_{control}"] = gain
                    results[f"{key}_test_auc_minus_{control}_half_interval"] = half
    # Full recovery replays the steps it loses, to a bitwise equal state.
    results["full_test_auc_mean"] = results["no_failure_test_auc_mean"]
    return results


def table(results: dict[str, Any]) -> str:
    """Format the accuracy of each scheme."""
    base = f"Test AUC without a failure {results['no_failure_test_auc_mean']:.4f} (seeds: {results['seeds']})"
    of_schemes: dict[str, str | tuple[str, float]] = {
        "test AUC": "cpr_{}_test_auc_mean", "AUC lost, 1e-5": ("cpr_{}_test_auc_loss", 1e5),
        "PLS": "cpr_{}_realized_pls", "non-inferior": "non_inferior_{}",
    }  # fmt: skip
    if "random" in trained(results):
        of_schemes["minus random, 1e-5"] = "cpr_{}_test_auc_minus_random", 1e5
    return f"{base}\n{grid(results, 'scheme', trained(results), of_schemes)}"


def trained(results: Mapping[str, Any]) -> list[str]:
    """Return the schemes that have results."""
    return [scheme for scheme in SCHEMES if f"cpr_{scheme}_test_auc_loss" in results]


def finding_accuracy(results: Mapping[str, Any], failures: int) -> str:
    """Title of the accuracy plot: schemes whose loss is settled below the margin, above it, or not settled."""
    said = {"below it": True, "above it": False, "not settled": None}
    of = {
        words: [scheme for scheme in trained(results) if results.get(f"non_inferior_{scheme}") is found]
        for words, found in said.items()
    }
    each = "; ".join(f"{words} {', '.join(schemes)}" for words, schemes in of.items() if schemes)
    return f"AUC lost to {failures} failures, beside a margin of {MARGIN} ({results['seeds']} seeds): {each}"


def draw_accuracy(path: Path, results: Mapping[str, Any], failures: int) -> None:
    """Plot the accuracy lost by each scheme."""
    label = "test AUC lost, 1e-5"
    lost = {scheme: scaled(figures(results)[f"cpr_{scheme}_test_auc_loss"], 1e5) for scheme in trained(results)}
    bars(path, {label: {"": lost}}, finding_accuracy(results, failures), {label: {"margin": 1e5 * MARGIN}})


def fit_line(pls: np.ndarray, loss: np.ndarray) -> float:
    """Least-squares slope of loss = slope * PLS."""
    return float((pls * loss).sum() / (pls * pls).sum())


def slopes_of(rows: list[dict], schemes, test_sets: int = 1) -> dict[str, Any]:
    """Slopes and correlations over all runs whose seed has a failure-free run; test sets as in `paired_interval`."""
    base = {row["seed"]: row for row in rows if row["scheme"] == "no_failure"}
    results: dict[str, Any] = {"accuracy_is": "measured", "seeds": len(base)}
    by_seed: dict[str, np.ndarray] = {}
    for scheme in schemes:
        mine = [row for row in rows if row["scheme"] == scheme and row["seed"] in base]
        pls = np.array([row["realized_pls"] for row in mine])
        seed = np.array([row["seed"] for row in mine])
        results |= {f"{scheme}_runs": len(mine), f"{scheme}_realized_pls_max": float(pls.max())}
        for name, sign in (("auc", 1), ("normalized_entropy", -1)):
            key = f"test_{name}"
            loss = np.array([sign * (base[row["seed"]][key] - row[key]) for row in mine])
            short = {"auc": "", "normalized_entropy": "_ne"}[name]
            results[f"{scheme}_slope{short}"] = fit_line(pls, loss)
            results[f"{scheme}_correlation{short}"] = float(np.corrcoef(pls, loss)[0, 1])
            of_seeds = np.array([fit_line(pls[seed == s], loss[seed == s]) for s in sorted(base)])
            results[f"{scheme}_slope{short}_half_interval"] = paired_interval(of_seeds, sorted(base), test_sets)[1]
            by_seed[f"{scheme}{short}"] = of_seeds
    for scheme, short in itertools.product(schemes, ("", "_ne")):
        if scheme != "vanilla" and "vanilla" in schemes:
            less = by_seed[f"{scheme}{short}"] - by_seed[f"vanilla{short}"]
            over, half = paired_interval(less, sorted(base), test_sets)
            results[f"{scheme}_slope{short}_minus_vanilla"] = over
            results[f"{scheme}_slope{short}_minus_vanilla_half_interval"] = half
            results[f"{scheme}_slope{short}_over_vanilla"] = (
                results[f"{scheme}_slope{short}"] / results[f"vanilla_slope{short}"]
            )
    return results


def finding_slopes(results: Mapping[str, Any], schemes: Sequence[str]) -> str:
    """Title of the plot: slopes, and their differences from vanilla with intervals."""
    found = figures(results)
    slopes = ", ".join(f"{scheme} {number(results[f'{scheme}_slope'], 3)}" for scheme in schemes)
    less = [f"{scheme} {said(found[f'{scheme}_slope_minus_vanilla'])}" for scheme in schemes
            if f"{scheme}_slope_minus_vanilla" in found]  # fmt: skip
    return f"AUC lost for a unit of PLS: {slopes}" + (f". Minus vanilla's: {', '.join(less)}" if less else "")


def draw_slopes(run: Run, rows: list[dict], results: dict[str, Any], schemes) -> None:
    """Plot loss over realised PLS, one point per run, with the fitted lines."""
    base = {row["seed"]: row for row in rows if row["scheme"] == "no_failure"}
    panels: dict[str, dict[str, tuple]] = {"test AUC lost": {}, "normalised entropy gained": {}}
    for scheme in schemes:
        mine = sorted((r for r in rows if r["scheme"] == scheme), key=lambda row: row["realized_pls"])
        pls = np.array([row["realized_pls"] for row in mine])
        for panel, name, sign, short in zip(panels, ("auc", "normalized_entropy"), (1, -1), ("", "_ne"), strict=True):
            lost = [sign * (base[row["seed"]][f"test_{name}"] - row[f"test_{name}"]) for row in mine]
            panels[panel][scheme] = pls, lost, results[f"{scheme}_slope{short}"] * pls
    levels = {label: {"no failure": 0.0} for label in panels}
    plot(run.directory / "loss_over_pls.png", panels, "realised PLS", finding_slopes(results, schemes), levels=levels)


def table_of_slopes(results: dict[str, Any], schemes) -> str:
    """Format the slopes of all schemes, in AUC and in normalised entropy."""
    tables = [f"Seeds: {results['seeds']}"]
    for corner, short in (("AUC lost", ""), ("NE gained", "_ne")):
        columns = {"runs": "{}_runs", "largest PLS": "{}_realized_pls_max", "per unit of PLS": f"{{}}_slope{short}"}
        columns |= {"minus vanilla": f"{{}}_slope{short}_minus_vanilla", "correlation": f"{{}}_correlation{short}"}
        tables.append(grid(results, corner, schemes, columns))
    return "\n\n".join(tables)


def of_failures(config: Config) -> dict:
    """Train every scheme with the same failures; return the contents of results.json."""
    examples, seeds = SIZES[config.preset]
    with Run("cpr_overhead", config, config.workdir, config.resume) as run:
        job = CprJob(config, make_data(config, config.examples or examples))
        arms = []
        for seed in range(config.seeds or seeds):
            arms += [Arm("no_failure", seed)]
            arms += [Arm(scheme, seed, config.target_pls, config.failures) for scheme in config.schemes]
        train(run, config, job, arms)
        results = accuracies(run.metrics(), config.schemes, len(config.path or [0]))
        draw_accuracy(run.directory / "accuracy.png", results, config.failures)
        run.close(results, table(results))
        return results


def over_pls(config: Config) -> dict:
    """Train every scheme with more and fewer failures; return the contents of results.json."""
    examples, seeds, targets, counts, widths = SIZES_OVER_PLS[config.preset]
    with Run("cpr_pls", config, config.workdir, config.resume) as run:
        job = CprJob(config, make_data(config, config.examples or examples))
        arms = []
        for seed in range(config.seeds or seeds):
            arms += [Arm("no_failure", seed)]
            arms += [
                Arm(scheme, seed, *rest)
                for rest in itertools.product(targets, counts, widths)
                for scheme in config.schemes
            ]
        train(run, config, job, arms)
        rows = run.metrics()
        results = slopes_of(rows, config.schemes, len(config.path or [0]))
        draw_slopes(run, rows, results, config.schemes)
        run.close(results, table_of_slopes(results, config.schemes))
        return results


def main(config: Config) -> dict:
    """Train the missing arms; return the contents of results.json."""
    refuse(unread(config, {"given failures, without --over-pls": (not config.over_pls, ("target_pls", "failures"))}))
    return over_pls(config) if config.over_pls else of_failures(config)


if __name__ == "__main__":
    command_line(main, Config, __doc__)
