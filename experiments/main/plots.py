"""Plots whose titles state the finding, with labels beside the lines; and the table and the curves of train.py.

Cases are compared by bars with intervals, never by a line through them. Colours differ in lightness and lines in their
dashes, so that a monochrome print is readable.
"""

import itertools
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from jaxrec.files import atomic_write
from main.report import Figure, Line, listing, number
from main.signals import say

# Dark enough for text; in monochrome print the strokes distinguish them.
_LINES = ("#08306b", "#d94801", "#238b45", "#6a51a3", "#a50f15", "#525252")
_STROKES = ("-", "--", "-.", ":")
# Distinct in lightness, not in hue alone.
FILLS = ("#08306b", "#e6550d", "#74c476", "#dadaeb")
_HATCHES = ("", "////", "xxxx")  # for the series after the last fill

MOST_WORDS = 5  # most marks that are labelled

_WIDTH = 7.2  # inches at 120 dpi: in a column of 600 pixels, letters of 8 points are nine pixels high
_LONG = 24  # letters of two line names together
_CHOSEN = 30  # most values on an axis that count as chosen, not measured
_LEVEL, _GAPS = (0, (4, 2, 1, 2)), (0, (3, 6))  # dashes and gaps, in points
_INTERVALS = "_intervals"


def plot(
    path: Path, panels: Mapping[str, Mapping[str, tuple]], x_label: str, title: str = "", log_x: bool = False,
    marks: Sequence[tuple[float, str]] = (), log_y: bool = False,
    levels: Mapping[str, Mapping[str, float | None]] | None = None,
) -> bool:  # fmt: skip
    """Plot one panel per metric, {y_label: {line: (xs, ys)}}; names instead of numbers as xs make bars.

    Args:
      panels: values of None are left out, and a Figure shows its interval; (xs, ys, fitted) draws points at ys and a
        line through `fitted`.
      x_label: with its unit.
      title: finding of the plot, in a sentence.
      log_x: whether the x axis is logarithmic, with ticks at the xs.
      marks: (x, words) of events: a dotted line through each panel of lines.
      log_y: whether the y axes are logarithmic.
      levels: {y_label: {words: y}} of reference levels, such as a target or an ideal.

    Returns:
      Whether the plot was written; False without matplotlib, or if the disk is full.
    """
    if any(isinstance(x, str) for lines in panels.values() for xs, *_ in lines.values() for x in xs):
        named = {
            label: {line: dict(zip(xs, ys, strict=True)) for line, (xs, ys) in lines.items()}
            for label, lines in panels.items()
        }
        return bars(path, named, title, levels)

    columns = 1 if len(panels) <= 3 else 2
    heights = [3.8] if len(panels) == 1 else [2.6] * -(-len(panels) // columns)

    def fill(axes):
        for axis, (y_label, lines) in zip(axes, panels.items(), strict=True):
            _lines(axis, lines)
            for words, y in _drawn((levels or {}).get(y_label)):
                axis.axhline(y, color="black", linewidth=1, linestyle=_LEVEL, label=words)
            _marks(axis, marks)
            axis.set(xlabel=x_label, ylabel=textwrap.fill(y_label, round(13 * (heights[0] - 0.6))))
            above = [
                {float(v) for points in lines.values() for v in map(_value, points[of]) if v is not None and v > 0}
                for of in (0, 1)
            ]
            if log_y and above[1]:
                axis.set_yscale("log")
            if log_x and above[0]:
                axis.set_xscale("log")
                if len(above[0]) <= _CHOSEN:  # such as numbers of nodes; measured values get round ticks
                    at = ticks(above[0])
                    axis.set_xticks(at, [f"{x:.4g}" if x == round(x) else f"{x:.2g}" for x in at])
                    axis.minorticks_off()
            _shorten(axis)
            axis.grid(alpha=0.3)
        return [(axis, _label_ends(axis)) for axis in axes]

    return _draw(path, len(panels), heights, columns, title, fill)


def bars(
    path: Path, panels: Mapping[str, Mapping[str, Mapping[str, Any]]], title: str = "",
    levels: Mapping[str, Mapping[str, float | None]] | None = None,
) -> bool:  # fmt: skip
    """Plot {x_label: {series: {case: value or Figure}}} as bars with intervals and values; the rest as `plot`."""

    def fill(axes):
        for axis, (x_label, series) in zip(axes, panels.items(), strict=True):
            cases = list(dict.fromkeys(case for each in series.values() for case in each))
            for place, (name, values) in enumerate(series.items()):
                _bars(axis, cases, values, name, place, 0.8 / len(series))
            axis.set_yticks(range(len(cases)), cases)
            held = _drawn((levels or {}).get(x_label))
            for words, x in held:
                axis.axvline(x, color="white", linewidth=2.5, label="_light")  # visible on bars of any lightness
                axis.axvline(x, color="black", linewidth=1, linestyle=_LEVEL, label="_level")
                axis.annotate(
                    words, (x, 1), (0, 2), ("data", "axes fraction"), "offset points", fontsize=8, ha="center"
                )
            _finish_bars(axis, x_label, len(series) > 1, bool(held))
        return []

    most = [len(set().union(*series.values())) * len(series) for series in panels.values()]
    return _draw(path, len(panels), [0.9 + 0.21 * number for number in most], 1, title, fill)


def stacked_bars(path: Path, stacks: Mapping[str, Mapping[str, float]], x_label: str, title: str = "") -> bool:
    """Plot {case: {part: length}} as stacked bars with their sums; parts that are zero everywhere are left out."""

    def fill(axes):
        at, left = np.arange(len(stacks)), np.zeros(len(stacks))
        parts = [part for part in next(iter(stacks.values())) if any(each[part] for each in stacks.values())]
        for (hatch, colour), part in zip(itertools.product(_HATCHES, FILLS), parts, strict=False):
            lengths = np.array([each[part] for each in stacks.values()])
            axes[0].barh(
                at, lengths, 0.7, left, color=colour, hatch=hatch, edgecolor="white", label=part.replace("_", " ")
            )
            left += lengths
        for place, total in zip(at, left, strict=True):
            _say_value(axes[0], total, total, place)
        axes[0].set_yticks(at, list(stacks))
        _finish_bars(axes[0], x_label, True, False)
        return []

    return _draw(path, 1, [0.9 + 0.32 * len(stacks)], 1, title, fill)


def ticks(xs: Iterable[float], most: int = 12) -> list[float]:
    """Return some of these numbers, from the least to the largest, whose labels fit on a logarithmic axis.

    >>> ticks([1, 2, 4, 8, 12, 14, 16, 20, 24, 32, 48, 64])
    [1, 2, 4, 8, 12, 20, 32, 64]
    """
    *others, last = sorted(xs)
    kept: list[float] = []
    least = (last / others[0]) ** (1 / most) if others else 1.0
    for x in others:
        if (not kept or x >= least * kept[-1]) and last >= least * x:
            kept.append(x)
    return [*kept, last]


def identical(lines: Mapping[str, tuple]) -> dict[str, str]:
    """Return {line: earlier line with the same points, which it would hide}.

    >>> identical({"sync": ([1, 2], [0.5, 0.6]), "async": ([1, 2], [0.5, 0.7]), "oac": ((1, 2), (0.5, 0.6))})
    {'oac': 'sync'}
    """
    first: dict[tuple, str] = {}
    found = {name: first.setdefault(tuple(map(tuple, points)), name) for name, points in lines.items()}
    return {name: other for name, other in found.items() if name != other}


def _drawn(levels):
    return [(words, value) for words, value in (levels or {}).items() if value is not None]


def _figure(value):
    return value if isinstance(value, Figure) else Figure(value)


def _value(value):
    return _figure(value).value


def _lines(axis, lines):
    from matplotlib.transforms import ScaledTranslation

    same = identical(lines)
    for place, (name, (xs, ys, *fitted)) in enumerate(lines.items()):
        colour, stroke = _LINES[place % len(_LINES)], cast(Any, _STROKES[place % len(_STROKES)])
        marker = "o^sDvX"[place % 6] if len(xs) < 15 or fitted else None
        found = [_figure(y) for y in ys]
        seen = np.array([y.value for y in found], float)
        if fitted:
            axis.plot(xs, seen, color=colour, marker=marker, markersize=4, linestyle="none", label="_points")
            seen, marker = np.array(fitted[0]), None
        ends = [(x, y.low, y.high) for x, y in zip(xs, found, strict=True) if y.low is not None]
        if ends:
            # Intervals of several lines at one x are two points apart.
            beside = ScaledTranslation((2 * place - len(lines) + 1) / 72, 0, axis.figure.dpi_scale_trans)
            axis.vlines(
                *zip(*ends, strict=True), color=colour, linewidth=1, label=_INTERVALS, transform=axis.transData + beside
            )
            axis.update_datalim([(x, y) for x, *both in ends for y in both])
        if name in same:  # with gaps, through which the other line shows
            stroke, marker = _GAPS, None
        label = name
        if name in same:  # long names leave no room for the lines
            label += f", identical to {same[name]}" if len(name + same[name]) < _LONG else ", identical"
        axis.plot(xs, seen, linestyle=stroke, color=colour, marker=marker, markersize=3, label=label)


def _shorten(axis):
    """Write 100k instead of 100000, whose digits would overlap those of the next tick."""
    from matplotlib.ticker import EngFormatter

    for one, (_, end) in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
        if one.get_scale() == "linear" and end >= 10_000:
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


def _bars(axis, cases, values, name, number, width):
    for case, value in values.items():
        figure = _figure(value)
        place = cases.index(case) - 0.4 + (number + 0.5) * width
        if figure.value is None:
            _say_value(axis, None, 0, place)
            continue
        colour = FILLS[number % len(FILLS)]
        axis.barh(place, figure.value, width, color=colour, edgecolor="white", label=name)
        end, outer = figure.value, max if figure.value >= 0 else min
        if figure.low is not None:
            # A dark line on a light one is visible on bars of any lightness.
            axis.plot([figure.low, figure.high], [place] * 2, color="white", linewidth=3, label="_")
            axis.plot([figure.low, figure.high], [place] * 2, color="black", linewidth=1, marker="|", label=_INTERVALS)
            end = outer(figure.low, cast(float, figure.high))
        _say_value(axis, figure.value, end, place)


def _say_value(axis, value, end, place):
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # keeps levels from crossing the digits
    left = end < 0
    axis.annotate(
        "-" if value is None else number(float(value), 3), (end, place), (-4 if left else 4, 0),
        textcoords="offset points", fontsize=8, va="center", ha="right" if left else "left", bbox=behind,
    )  # fmt: skip


def _finish_bars(axis, x_label, legend, below_words):
    axis.invert_yaxis()
    axis.margins(x=0.16)  # for the values after the bars
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xlabel(x_label)
    _shorten(axis)
    names = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    if legend:  # above the axes, away from the bars, and above the words of levels
        columns = min(4, max(1, round(70 / (6 + max(map(len, names))))))
        axis.legend(
            names.values(), names, frameon=False, fontsize=8, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1),
            borderaxespad=1.8 if below_words else 0.5,
        )  # fmt: skip


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
    if any(_has_intervals(axis) for axis in axes):
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


def _has_intervals(axis):
    return any(drawn.get_label() == _INTERVALS for drawn in (*axis.lines, *axis.collections))


# A run of train.py: its table, and its curves of learning, speed and techniques.


def _evaluated(of: str) -> list[Line]:
    return [
        Line(f"{of}_auc", "AUC"), Line(f"{of}_gauc", "AUC within groups (GAUC)"), Line(f"{of}_log_loss", "log loss"),
        Line(f"{of}_normalized_entropy", "normalized entropy"),
        Line(f"{of}_calibration", "calibration, predicted over true clicks"),
        Line(f"{of}_rmse", "RMSE"), Line(f"{of}_mae", "MAE"), Line(f"{of}_prediction_mean", "prediction mean"),
        Line(f"{of}_label_mean", "label mean"), Line(f"{of}_examples", "examples"),
    ]  # fmt: skip


SETS = {"Test set": "test", "Validation": "validation"}
TABLE = {
    "Test set": [
        *_evaluated("test"), Line("teacher_auc", "AUC of the teacher"),
        Line("teacher_normalized_entropy", "normalized entropy of the teacher"),
    ],
    "Validation": _evaluated("validation"),
    "Training": [
        Line("best_step", "step of the best state, tested above"), Line("stopped_early", "stopped early"),
        Line("steps", "steps"), Line("batch_size", "batch size"), Line("examples", "examples"),
        Line("train_seconds", "time, with compilation", "s"),
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


def table(results: Mapping[str, Any]) -> str:
    """Format the results of a run."""
    of = "at the last evaluation" if results.get("best_step") is None else "of the best state"
    groups: dict[str, list[Line]] = {}
    for title, lines in TABLE.items():
        groups[f"{title}, {of}" if title == "Validation" else title] = lines
        for name in results.get("labels", [])[1:] if title in SETS else ():
            groups[f"{title}, {name!r}"] = _evaluated(f"{SETS[title]}_{name}")
    return listing({key: value for key, value in results.items() if key != "labels"}, groups)


def draw(path: Path, history: Sequence[Mapping], results: Mapping, watched: str, failures: Sequence[Mapping]) -> bool:
    """Plot the curves of a run over its examples, with a panel for each figure of an active technique."""
    best = results.get("teacher_auc")
    trained = {"train": line(history, "train_loss")}
    if "test_rmse" in results:
        panels = {"training loss": trained, f"{watched} RMSE": {"model": line(history, f"{watched}_rmse")}}
    else:
        panels = {"log loss": trained | {watched: line(history, f"{watched}_log_loss")}}
        panels |= {f"{watched} AUC": {"model": line(history, f"{watched}_auc")}}
    panels |= {"examples/s": {"": rates(history)}}
    panels |= {label: {"": line(history, name)} for label, name in _DONE.items() if _is_in(history, name)}
    step = results.get("best_step")
    after = f"after {results['examples']:,} examples" if step is None else f"of the best state, that of step {step:,}"
    metric = "rmse" if "test_rmse" in results else "auc"
    title = f"Test {metric.upper()} {results[f'test_{metric}']:.4f} {after}"
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
