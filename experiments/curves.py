"""The picture of a training run: what it learned, how fast, and what the techniques did on the way."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from contract import plot


def draw(path: Path, history: Sequence[Mapping], results: Mapping, watched: str) -> None:
    """Draws the curves of a run over its examples; a panel for each figure of a technique that is on.

    Args:
      path: of the PNG.
      history: rows of metrics.
      results: what results.json will hold.
      watched: 'validation' or 'test', which the rows are of.
    """
    examples = [row["examples"] for row in history]
    line = lambda name: (examples, [row.get(name, float("nan")) for row in history])
    best = results.get("teacher_auc")
    auc = {"model": line(f"{watched}_auc")} | ({"teacher": (examples, [best] * len(examples))} if best else {})
    panels = {"log loss": {"train": line("train_loss"), watched: line(f"{watched}_log_loss")}, f"{watched} AUC": auc}
    panels["examples/s"] = {"": (examples, rates(history))}
    more = {
        "share of stale rows": "stale_share", "steps between rounds": "sync_gap_steps",
        "spread of replicas": "replica_spread", "portion of lost samples": "pls",
    }  # fmt: skip
    panels |= {label: {"": line(name)} for label, name in more.items() if any(name in row for row in history)}
    title = f"Test AUC {results['test_auc']:.4f} after {results['examples']:,} examples"
    title += f", where the teacher of the data has {best:.4f}" if best else ""
    plot(path, panels, "examples", title)


def rates(history: Sequence[Mapping]) -> list[float]:
    """Examples per second of training between each row and the one before it."""
    points = [(0, 0.0)] + [(row["examples"], row["train_seconds"]) for row in history]
    return [(e - d) / max(t - s, 1e-9) for (d, s), (e, t) in itertools.pairwise(points)]
