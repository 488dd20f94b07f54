"""Plots whose titles state the finding, with labels beside the lines; and the table and the curves of train.py.

Colours differ in lightness and lines in their dashes, so that a monochrome print is readable.
"""

import itertools
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxrec.files import atomic_write
from main.report import Figure, Line, number
from main.signals import say

# Dark enough for text; in monochrome print the strokes distinguish them.
_LINES = ("#08306b", "#d94801", "#238b45", "#6a51a3", "#a50f15", "#525252")
_STROKES = ("-", "--", "-.", ":")
# Distinct in lightness, not in hue alone.
FILLS = ("#08306b", "#e6550d", "#74c476", "#dadaeb")

MOST_WORDS = 5  # most marks that are labelled

_WIDTH = 7.2  # inches at 120 dpi: in a column of 600 pixels, letters of 8 points are nine pixels high
_LEVEL = (0, (4, 2, 1, 2))  # dashes and gaps, in points
_INTERVALS = "_intervals"


def plot(
    path: Path, panels: Mapping[str, Mapping[str, tuple]], x_label: str, title: str = "",
    marks: Sequence[tuple[float, str]] = (), levels: Mapping[str, Mapping[str, float | None]] | None = None,
) -> bool:  # fmt: skip
    """Plot one panel per metric, {y_label: {line: (xs, ys)}}.

    Args:
      panels: values of None are left out, and a Figure shows its interval.
      x_label: with its unit.
      title: finding of the plot, in a sentence.
      marks: (x, words) of events: a dotted line through each panel.
      levels: {y_label: {words: y}} of reference levels, such as a target; None for those that there are not.

    Returns:
      Whether the plot was written; False without matplotlib, or if the disk is full.
    """
    columns = 1 if len(panels) <= 3 else 2
    heights = [3.8] if len(panels) == 1 else [2.6] * -(-len(panels) // columns)

    def fill(axes):
        for axis, (y_label, lines) in zip(axes, panels.items(), strict=True):
            for place, (name, points) in enumerate(lines.items()):
                _line(axis, name, place, *points)
            for words, y in (levels or {}).get(y_label, {}).items():
                if y is not None:
                    axis.axhline(y, color="black", linewidth=1, linestyle=_LEVEL, label=words)
            _marks(axis, marks)
            axis.set(xlabel=x_label, ylabel=textwrap.fill(y_label, round(13 * (heights[0] - 0.6))))
            _shorten(axis)
            axis.grid(alpha=0.3)
        return [(axis, _label_ends(axis)) for axis in axes]

    return _draw(path, len(panels), heights, columns, title, fill)


def bars(
    path: Path, x_label: str, series: Mapping[str, Mapping[str, Figure]], title: str, level: tuple[str, float]
) -> bool:
    """Plot {series: {case: figure above 0}} as bars with intervals, beside a level (words, x); returns as `plot`."""
    cases = list(next(iter(series.values())))
    width, (words, x) = 0.8 / len(series), level

    def fill(axes):
        (axis,) = axes
        for nth, (name, values) in enumerate(series.items()):
            for place, figure in enumerate(values.values(), 1):
                _bar(axis, name, figure, place - 1.4 + (nth + 0.5) * width, width, FILLS[nth % len(FILLS)])
        axis.set_yticks(range(len(cases)), cases)
        axis.axvline(x, color="white", linewidth=2.5, label="_light")  # visible on bars of any lightness
        axis.axvline(x, color="black", linewidth=1, linestyle=_LEVEL, label="_level")
        axis.annotate(words, (x, 1), (0, 2), ("data", "axes fraction"), "offset points", fontsize=8, ha="center")
        axis.invert_yaxis()
        axis.margins(x=0.16)  # for the values after the bars
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_xlabel(x_label)
        names = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        axis.legend(  # above the axes, away from the bars, and above the words of the level
            names.values(), names, frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1),
            borderaxespad=1.8,
        )  # fmt: skip
        return []

    return _draw(path, 1, [0.9 + 0.21 * len(cases) * len(series)], 1, title, fill)


def _bar(axis, name, figure, place, width, colour):
    axis.barh(place, figure.value, width, color=colour, edgecolor="white", label=name)
    if figure.low is not None:
        # A dark line on a light one is visible on bars of any lightness.
        axis.plot([figure.low, figure.high], [place] * 2, color="white", linewidth=3, label="_")
        axis.plot([figure.low, figure.high], [place] * 2, color="black", linewidth=1, marker="|", label=_INTERVALS)
    light = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # keeps the level from crossing the digits
    axis.annotate(
        number(figure.value, 3), (figure.high or figure.value, place), (4, 0), textcoords="offset points", fontsize=8,
        va="center", bbox=light,
    )  # fmt: skip


def _line(axis, name, place, xs, ys):
    found = [y if isinstance(y, Figure) else Figure(y) for y in ys]
    colour, marker = _LINES[place % len(_LINES)], "o^sDvX"[place % 6] if len(xs) < 15 else None
    ends = [(x, y.low, y.high) for x, y in zip(xs, found, strict=True) if y.low is not None]
    if ends:
        axis.vlines(*zip(*ends, strict=True), color=colour, linewidth=1, label=_INTERVALS)
        axis.update_datalim([(x, y) for x, *both in ends for y in both])
    axis.plot(
        xs, np.array([y.value for y in found], float), linestyle=_STROKES[place % len(_STROKES)], color=colour,
        marker=marker, markersize=3, label=name,
    )  # fmt: skip


def _shorten(axis):
    """Write 100k instead of 100000, whose digits would overlap those of the next tick."""
    from matplotlib.ticker import EngFormatter

    for one, (_, end) in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
        if end >= 10_000:
            one.set_major_formatter(EngFormatter(sep=""))


def _marks(axis, marks):
    for x, _ in marks:
        axis.axvline(x, color="black", linestyle=":", linewidth=1, label="_mark")
    # Above the axes, away from the lines; many would overlap.
    for x, words in marks if len(marks) <= MOST_WORDS else ():
        axis.annotate(words, (x, 1), (0, 2), ("data", "axes fraction"), "offset points", fontsize=8, ha="center")


def _label_ends(axis):
    """Label each line at the right of its last point: a legend would cover the lines."""
    labels = []
    for line in axis.lines:
        seen = np.asarray(line.get_ydata(), float)
        seen = seen[np.isfinite(seen)]
        if len(seen) and not line.get_label().startswith("_"):
            labels.append(
                axis.annotate(
                    line.get_label(), (1, seen[-1]), (6, 0), ("axes fraction", "data"), "offset points",
                    color=line.get_color(), fontsize=8, va="center", annotation_clip=False,
                )
            )  # fmt: skip
    return labels


def _spread(axis, labels):
    """Move overlapping labels apart; the layout of the axes must be final."""
    points = axis.figure.dpi / 72
    ends = [axis.transData.transform((1, label.xy[1]))[1] / points for label in labels]
    for label, end, place in zip(labels, ends, apart(ends, 9.5), strict=True):
        label.set_position((6, place - end))


def apart(places: Sequence[float], least: float) -> list[float]:
    """Return the nearest places, in least squares, that keep the order and are at least `least` apart.

    >>> apart([9.0, 0.0, 9.0], 3.0)
    [7.5, 0.0, 10.5]
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    # After subtracting rank * least, the places only need to be non-decreasing: isotonic regression, by pooling
    # neighbours that decrease.
    pools: list[list[float]] = []
    for rank, at in enumerate(order):
        pools.append([places[at] - rank * least])
        while len(pools) > 1 and statistics.mean(pools[-2]) > statistics.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    moved = dict(zip(order, (statistics.mean(pool) for pool in pools for _ in pool), strict=True))
    return [moved[at] + order.index(at) * least for at in range(len(places))]


def _draw(path: Path, panels: int, heights: Sequence[float], columns: int, title: str, fill: Callable) -> bool:
    """Draw panels in rows of these heights, in inches: side by side they would be too small for a column of text."""
    try:
        from matplotlib.figure import Figure as Picture
    except ImportError:
        return False
    words = textwrap.wrap(title, 92)
    picture = Picture((_WIDTH, sum(heights) + 0.2 * len(words)), dpi=120, layout="constrained")
    axes = picture.subplots(len(heights), columns, squeeze=False, height_ratios=heights).reshape(-1)
    for axis in axes[panels:]:
        axis.set_visible(False)
    to_spread = fill(axes[:panels])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        for label in (axis.xaxis.label, axis.yaxis.label):
            label.set_fontsize(9)
    if title:
        picture.suptitle("\n".join(words), x=0.01, ha="left", fontsize=10)
    if any(drawn.get_label() == _INTERVALS for axis in axes for drawn in (*axis.lines, *axis.collections)):
        picture.supxlabel("Thin lines at values: 95 % intervals", x=0.99, ha="right", fontsize=7)
    picture.draw_without_rendering()  # fixes the layout of the axes
    for axis, labels in to_spread:
        _spread(axis, labels)
    try:
        with atomic_write(path) as partial:
            picture.savefig(partial, format="png", pil_kwargs={"optimize": True})
    except OSError as error:
        say(f"{error}: {path.name} is not drawn", sys.stderr)  # no reason to lose the results
        return False
    return True


# A run of train.py: its table, and its curves of learning, speed and techniques.


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

# Figures of the techniques, a panel for each that is logged.
_DONE = {
    "OAC: share of rows too old": "stale_share", "ShadowSync: sync gap, steps": "sync_gap_steps",
    "ShadowSync: spread of replicas": "replica_spread", "CPR: portion of lost samples": "pls",
}  # fmt: skip


def draw(path: Path, history: Sequence[Mapping], results: Mapping, watched: str, failures: Sequence[Mapping]) -> bool:
    """Plot the curves of a run over its examples, with a panel for each figure of an active technique."""
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
    """Plot the curves of several runs in the same panels."""
    of_all = lambda name: {arm: line(rows, name) for arm, rows in arms.items()}
    panels = {f"{watched} log loss": of_all(f"{watched}_log_loss"), f"{watched} AUC": of_all(f"{watched}_auc")}
    panels["examples/s"] = {arm: rates(rows) for arm, rows in arms.items()}
    names = {label: name for label, name in _DONE.items() if any(_is_in(rows, name) for rows in arms.values())}
    panels |= {label: of_all(name) for label, name in names.items() if name != "replica_spread"}
    failures = [failure for rows in arms.values() for failure in failures_in(rows)]
    return plot(path, panels, "examples", title + _told(failures), marks=marks(failures))


def line(history: Sequence[Mapping], name: str) -> tuple[list, list]:
    """Return one figure of the rows over their examples; NaN where a row lacks it."""
    return [row["examples"] for row in history], [row.get(name, float("nan")) for row in history]


def rates(history: Sequence[Mapping]) -> tuple[list, list]:
    """Return examples per second of training between each row and the previous one, over the examples."""
    points = [(0, 0.0)] + [(row["examples"], row["train_seconds"]) for row in history]
    found = [(e - d) / max(t - s, 1e-9) for (d, s), (e, t) in itertools.pairwise(points)]
    return [examples for examples, _ in points[1:]], found


def failures_in(history: Sequence[Mapping]) -> list[Mapping]:
    """Return the failures logged in the rows, in order."""
    return [failure for row in history for failure in row.get("failures", ())]


def marks(failures: Sequence[Mapping]) -> list[tuple[float, str]]:
    """Return (examples, shard numbers in words) of each failure."""
    return [(each["examples"], ", ".join(map(str, each["shards"]))) for each in failures]


def _is_in(history, name):
    return any(name in row for row in history)


def _told(failures):
    return ". Dotted lines: failures, with the numbers of the lost shards" if failures else ""
