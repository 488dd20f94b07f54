"""Accuracy lost over the portion of lost samples (PLS), by scheme: does PLS predict accuracy as CPR assumes?

    python experiments/cpr_pls.py                                                synthetic clicks
    python experiments/cpr_pls.py --data criteo --path train.prepared --seeds 5  made by prepare.py

The claim as we recall the paper (arXiv 2011.02999): accuracy falls about linearly with PLS, and saving the most used
rows first makes the slope smaller. Runs vary the target PLS (the interval between saves), the number of failures and
how many of the 8 nodes each takes; each is paired with the failure-free run of its seed. Accuracy is measured on real
training with real saves and restores, as in cpr_overhead.py; the realised PLS is counted, not expected.

`SCHEME_slope`: AUC lost per unit of PLS, least squares through the origin; `SCHEME_correlation`: of loss and PLS;
`SCHEME_slope_minus_vanilla` with its 95 % interval over seeds, each fitted separately. Losses are also given in
normalised entropy, which is smoother. --resume continues a run.

docs/results.md has the run on the Criteo sample. With 7 of 26 tables watched (--watched 7, 3 seeds, no file was kept)
its slopes were 0.0070 (vanilla), 0.0043 (MFU), 0.0050 (SSU): the others were saved only at regular saves. 5 seconds per
run on a core.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from cpr_scalability import SETTINGS
from main.cli import Run, command_line, grid, paired_interval, plot
from main.report import figures, number, said
from studies.cpr_work import NODES, CprJob, JobConfig, failures_in_steps, make_data
from tqdm import tqdm

from jaxrec.cpr import place_failures, schedule


@dataclasses.dataclass(frozen=True)
class Config(JobConfig):
    """Flags of the experiment."""

    schemes: tuple[Literal["vanilla", "scar", "mfu", "ssu"], ...] = ("vanilla", "mfu", "ssu")


# {preset: (examples, seeds, target PLS, failures per job, failed nodes per failure)}.
SIZES: dict[str, tuple[int, int, tuple[float, ...], tuple[int, ...], tuple[int, ...]]] = {
    "smoke": (60_000, 1, (0.1,), (2, 8), (1, 4)),
    "default": (200_000, 2, (0.05, 0.1), (2, 8), (1, 4)),
    "paper": (1_000_000, 10, (0.02, 0.05, 0.1), (1, 2, 4, 8), (1, 2, 4)),
}


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
            by_seed[f"{scheme}{short}"] = np.array([fit_line(pls[seed == s], loss[seed == s]) for s in sorted(base)])
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


def finding(results: Mapping[str, Any], schemes: Sequence[str]) -> str:
    """Title of the plot: slopes, and their differences from vanilla with intervals."""
    found = figures(results)
    slopes = ", ".join(f"{scheme} {number(results[f'{scheme}_slope'], 3)}" for scheme in schemes)
    less = [f"{scheme} {said(found[f'{scheme}_slope_minus_vanilla'])}" for scheme in schemes
            if f"{scheme}_slope_minus_vanilla" in found]  # fmt: skip
    return f"AUC lost for a unit of PLS: {slopes}" + (f". Minus vanilla's: {', '.join(less)}" if less else "")


def draw(run: Run, rows: list[dict], results: dict[str, Any], schemes) -> None:
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
    plot(run.directory / "loss_over_pls.png", panels, "realised PLS", finding(results, schemes), levels=levels)


def table(results: dict[str, Any], schemes) -> str:
    """Format the slopes of all schemes, in AUC and in normalised entropy."""
    tables = [f"Seeds: {results['seeds']}"]
    for corner, short in (("AUC lost", ""), ("NE gained", "_ne")):
        columns = {"runs": "{}_runs", "largest PLS": "{}_realized_pls_max", "per unit of PLS": f"{{}}_slope{short}"}
        columns |= {"minus vanilla": f"{{}}_slope{short}_minus_vanilla", "correlation": f"{{}}_correlation{short}"}
        tables.append(grid(results, corner, schemes, columns))
    return "\n\n".join(tables)


def main(config: Config) -> dict:
    """Train the missing runs and return the contents of results.json."""
    examples, seeds, targets, counts, widths = SIZES[config.preset]
    run = Run("cpr_pls", config, config.workdir, config.resume)
    job = CprJob(config, make_data(config, config.examples or examples))
    costs = SETTINGS["a"]
    runs: list[tuple] = []
    for seed in range(config.seeds or seeds):
        runs.append((None, seed, 0.0, 0, 0))
        runs += [(s, seed, *rest) for rest in itertools.product(targets, counts, widths) for s in config.schemes]
    names = ("scheme", "seed", "target_pls", "failures", "failed_nodes")
    done = {tuple(row[name] for name in names) for row in run.metrics()}
    for scheme, seed, target, failures, width in tqdm(runs, unit="run", disable=None):
        if (scheme or "no_failure", seed, target, failures, width) in done:
            continue
        placed = place_failures(failures, costs.total_hours, NODES, config.seed + seed, max(1, width))
        every = min(schedule.partial_interval(costs, target), costs.total_hours) if scheme else costs.total_hours
        steps = job.steps(seed)
        row = job.run(scheme, seed, every / costs.total_hours * steps, failures_in_steps(placed, steps))
        run.log(row | {"target_pls": target, "failures": failures, "failed_nodes": width})
    rows = run.metrics()
    results = slopes_of(rows, config.schemes, len(config.path or [0]))
    draw(run, rows, results, config.schemes)
    run.close(results, table(results, config.schemes))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
