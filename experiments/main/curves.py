"""What a training run shows to people: a table of its figures, and a picture of what it learned, how
fast, and what the techniques did on the way."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from main.cli import plot
from main.report import Line


def _evaluated(of: str) -> list[Line]:
    return [
        Line(f"{of}_auc", "AUC"), Line(f"{of}_log_loss", "log loss"),
        Line(f"{of}_normalized_entropy", "normalized entropy"),
        Line(f"{of}_calibration", "calibration, predicted over true clicks"),
        Line(f"{of}_label_mean", "clicks", "%", 100), Line(f"{of}_examples", "examples"),
    ]  # fmt: skip


TABLE = {
    "Test set": [
        *_evaluated("test"), Line("teacher_auc", "AUC of the teacher"),
        Line("teacher_normalized_entropy", "normalized entropy of the teacher"),
    ],
    "Validation, at the last evaluation": _evaluated("validation"),
    "Training": [
        Line("steps", "steps"), Line("examples", "examples"), Line("train_seconds", "time, with compilation", "s"),
        Line("examples_per_s", "examples/s, with compilation"),
    ],
    "Techniques": [
        Line("stale_share", "OAC: rows that arrived too old", "%", 100),
        Line("sync_gap_steps", "ShadowSync: sync gap", "steps"),
        Line("replica_spread", "ShadowSync: spread of the replicas"),
        Line("pls", "CPR: portion of lost samples", "%", 100), Line("shards_failed", "CPR: shards failed"),
        Line("lost_steps", "CPR: steps trained again"), Line("rows_saved", "CPR: rows saved"),
    ],
    "Saving": [
        Line("saves", "saves"), Line("saves_failed", "saves failed"),
        Line("checkpoint_stall_s", "training waited", "s"), Line("checkpoint_percent", "share of the time", "%"),
        Line("last_state_saved", "last state saved"),
    ],
}  # fmt: skip

# What the techniques did, each in a panel of its own if there is anything of it.
_DONE = {
    "OAC: share of rows too old": "stale_share", "ShadowSync: sync gap, steps": "sync_gap_steps",
    "ShadowSync: spread of replicas": "replica_spread", "CPR: portion of lost samples": "pls",
}  # fmt: skip


def draw(path: Path, history: Sequence[Mapping], results: Mapping, watched: str, failures: Sequence[Mapping]) -> bool:
    """Draws the curves of a run over its examples; a panel for each figure of a technique that is on.

    Args:
      path: of the PNG.
      history: rows of metrics.
      results: what results.json will hold.
      watched: 'validation' or 'test', which the rows are of.
      failures: of shards, which are marked where they were.

    Returns:
      As `plot`.
    """
    best = results.get("teacher_auc")
    loss = {"train": line(history, "train_loss"), watched: line(history, f"{watched}_log_loss")}
    auc = {"model": line(history, f"{watched}_auc")}
    panels = {"log loss": loss, f"{watched} AUC": auc, "examples/s": {"": rates(history)}}
    panels |= {label: {"": line(history, name)} for label, name in _DONE.items() if _is_in(history, name)}
    title = f"Test AUC {results['test_auc']:.4f} after {results['examples']:,} examples"
    title += f", where the teacher of the data has {best:.4f}" if best else ""
    levels = {f"{watched} AUC": {"teacher": best}}
    return plot(path, panels, "examples", title + _told(failures), marks=marks(failures), levels=levels)


def compare(path: Path, arms: Mapping[str, Sequence[Mapping]], watched: str, title: str) -> bool:
    """Draws the curves of several runs into the same panels.

    Args:
      path: of the PNG.
      arms: {name: rows of metrics}.
      watched: as for `draw`.
      title: what the picture shows, in a sentence.

    Returns:
      As `plot`.
    """
    of_all = lambda name: {arm: line(rows, name) for arm, rows in arms.items()}
    panels = {f"{watched} log loss": of_all(f"{watched}_log_loss"), f"{watched} AUC": of_all(f"{watched}_auc")}
    panels["examples/s"] = {arm: rates(rows) for arm, rows in arms.items()}
    names = {label: name for label, name in _DONE.items() if any(_is_in(rows, name) for rows in arms.values())}
    panels |= {label: of_all(name) for label, name in names.items() if name != "replica_spread"}
    failures = [failure for rows in arms.values() for failure in failures_in(rows)]
    return plot(path, panels, "examples", title + _told(failures), marks=marks(failures))


def line(history: Sequence[Mapping], name: str) -> tuple[list, list]:
    """One figure of the rows over their examples; NaN where a row lacks it."""
    return [row["examples"] for row in history], [row.get(name, float("nan")) for row in history]


def rates(history: Sequence[Mapping]) -> tuple[list, list]:
    """Examples per second of training between each row and the one before it, over the examples."""
    points = [(0, 0.0)] + [(row["examples"], row["train_seconds"]) for row in history]
    found = [(e - d) / max(t - s, 1e-9) for (d, s), (e, t) in itertools.pairwise(points)]
    return [examples for examples, _ in points[1:]], found


def failures_in(history: Sequence[Mapping]) -> list[Mapping]:
    """Failures that the rows tell of, in order."""
    return [failure for row in history for failure in row.get("failures", ())]


def marks(failures: Sequence[Mapping]) -> list[tuple[float, str]]:
    """(examples, shards in words) of each failure."""
    return [(each["examples"], ", ".join(map(str, each["shards"]))) for each in failures]


def _is_in(history, name):
    return any(name in row for row in history)


def _told(failures):
    return ". Dotted lines: failures, with the numbers of the lost shards" if failures else ""
