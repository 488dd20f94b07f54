"""What a run shows to people: plots whose title says what was found, with names beside what they
name.

Names are compared by bars with intervals, never by a line through them. Colours are apart in
lightness and lines in their strokes, so that a print without colours can be read.
"""

import itertools
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from report import Figure, number
from stopping import say

from jaxrec.files import aside

# Dark enough to be read as text; in print without colours the strokes tell them apart.
_LINES = ("#08306b", "#d94801", "#238b45", "#6a51a3", "#a50f15", "#525252")
_STROKES = ("-", "--", "-.", ":")
# Apart in lightness, not in hue alone.
FILLS = ("#08306b", "#e6550d", "#74c476", "#dadaeb", "#636363")

MOST_WORDS = 5  # of marks, beside each other


def plot(
    path: Path, panels: Mapping[str, Mapping[str, tuple]], x_label: str, title: str = "", log_x: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> bool:  # fmt: skip
    """Draws one panel for each metric, {y_label: {line: (xs, ys)}}; names instead of numbers as xs
    make bars.

    Args:
      path: of the PNG.
      panels: values of None are left out; (xs, ys, fitted) is points at ys and a line through what
        is fitted to them.
      x_label: with its unit.
      title: what the picture shows, in a sentence.
      log_x: whether the x axis is logarithmic, with a tick at each x.
      marks: (x, words) of what happened on the way: a dotted line through each panel of lines.

    Returns:
      Whether it is drawn: matplotlib is installed, and the disk has taken it.
    """
    if any(isinstance(x, str) for lines in panels.values() for xs, *_ in lines.values() for x in xs):
        named = {
            label: {line: dict(zip(xs, ys, strict=True)) for line, (xs, ys) in lines.items()}
            for label, lines in panels.items()
        }
        return bars(path, named, title)

    def fill(axes):
        for axis, (y_label, lines) in zip(axes, panels.items(), strict=True):
            _lines(axis, lines)
            _marks(axis, marks)
            axis.set(xlabel=x_label, ylabel=y_label)
            if log_x:
                xs = next(iter(lines.values()))[0]
                axis.set_xscale("log")
                axis.set_xticks(xs, list(map(str, xs)))
                axis.minorticks_off()
            _shorten(axis)
            axis.grid(alpha=0.3)
        return [(axis, _label_ends(axis)) for axis in axes]

    return _draw(path, len(panels), (5.5, 3.6), title, fill)


def bars(path: Path, panels: Mapping[str, Mapping[str, Mapping[str, Any]]], title: str = "") -> bool:
    """Draws {x_label: {series: {case: value or Figure}}} as bars with intervals, each with its
    value; as `plot`."""

    def fill(axes):
        for axis, (x_label, series) in zip(axes, panels.items(), strict=True):
            cases = list(dict.fromkeys(case for each in series.values() for case in each))
            for place, (name, values) in enumerate(series.items()):
                _bars(axis, cases, values, name, place, 0.8 / len(series))
            axis.set_yticks(range(len(cases)), cases)
            _finish_bars(axis, x_label, len(series) > 1)
        return []

    most = max(len(set().union(*series.values())) * len(series) for series in panels.values())
    return _draw(path, len(panels), (5.5, 1.3 + 0.25 * most), title, fill)


def stacked_bars(path: Path, stacks: Mapping[str, Mapping[str, float]], x_label: str, title: str = "") -> bool:
    """Draws {case: {part: length}} as bars of parts, each with its sum; parts that are zero
    everywhere are left out."""

    def fill(axes):
        at, left = np.arange(len(stacks)), np.zeros(len(stacks))
        parts = [part for part in next(iter(stacks.values())) if any(each[part] for each in stacks.values())]
        for part, colour in zip(parts, itertools.cycle(FILLS), strict=False):
            lengths = np.array([each[part] for each in stacks.values()])
            axes[0].barh(at, lengths, 0.7, left, color=colour, edgecolor="white", label=part.replace("_", " "))
            left += lengths
        for place, total in zip(at, left, strict=True):
            _say_value(axes[0], total, total, place)
        axes[0].set_yticks(at, list(stacks))
        _finish_bars(axes[0], x_label, True)
        return []

    return _draw(path, 1, (7.0, 1.3 + 0.32 * len(stacks)), title, fill)


def _lines(axis, lines):
    for place, (name, (xs, ys, *fitted)) in enumerate(lines.items()):
        colour, stroke = _LINES[place % len(_LINES)], _STROKES[place % len(_STROKES)]
        marker = "o^sDvX"[place % 6] if len(xs) < 15 or fitted else None
        seen = np.array(ys, float)
        if fitted:
            axis.plot(xs, seen, color=colour, marker=marker, markersize=4, linestyle="none", label="_points")
            seen, marker = np.array(fitted[0]), None
        axis.plot(xs, seen, stroke, color=colour, marker=marker, markersize=3, label=name)


def _shorten(axis):
    """Says 100k instead of 100000, five digits of which would lie on those of the next tick."""
    from matplotlib.ticker import EngFormatter

    for one, (_, end) in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
        if one.get_scale() == "linear" and end >= 10_000:
            one.set_major_formatter(EngFormatter(sep=""))


def _marks(axis, marks):
    for x, _ in marks:
        axis.axvline(x, color="black", linestyle=":", linewidth=1, label="_mark")
    # Above the axes, where no line is; of many the words would lie on each other.
    for x, words in marks if len(marks) <= MOST_WORDS else ():
        axis.annotate(words, (x, 1), (0, 2), ("data", "axes fraction"), "offset points", fontsize=8, ha="center")


def _label_ends(axis):
    """The name of each line at the right, beside its last point: a legend would lie on the
    lines."""
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
    """Moves labels apart that would lie on each other; wants the axes where they will be."""
    points = axis.figure.dpi / 72
    ends = [axis.transData.transform((1, label.xy[1]))[1] / points for label in labels]
    for label, end, place in zip(labels, ends, apart(ends, 9.5), strict=True):
        label.set_position((6, place - end))


def apart(places: Sequence[float], least: float) -> list[float]:
    """The nearest places, in squares, that keep the order and are at least so far from each other.

    >>> apart([9.0, 0.0, 9.0], 3.0)
    [7.5, 0.0, 10.5]
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    # Less what is below them they need only not fall: isotonic regression, by pooling neighbours
    # that do.
    pools: list[list[float]] = []
    for rank, at in enumerate(order):
        pools.append([places[at] - rank * least])
        while len(pools) > 1 and statistics.mean(pools[-2]) > statistics.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    moved = dict(zip(order, (statistics.mean(pool) for pool in pools for _ in pool), strict=True))
    return [moved[at] + order.index(at) * least for at in range(len(places))]


def _bars(axis, cases, values, name, number, width):
    for case, value in values.items():
        figure = value if isinstance(value, Figure) else Figure(value)
        if figure.value is None:
            continue
        place = cases.index(case) - 0.4 + (number + 0.5) * width
        colour = FILLS[number % len(FILLS)]
        axis.barh(place, figure.value, width, color=colour, edgecolor="white", label=name)
        end = figure.value
        if figure.low is not None:
            axis.plot([figure.low, figure.high], [place] * 2, color="black", linewidth=1, marker="|", label="_")
            end = max(end, figure.high)
        _say_value(axis, figure.value, end, place)


def _say_value(axis, value, end, place):
    axis.annotate(number(float(value), 3), (end, place), (4, 0), textcoords="offset points", fontsize=8, va="center")


def _finish_bars(axis, x_label, legend):
    axis.invert_yaxis()
    axis.margins(x=0.16)  # for the values behind the bars
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xlabel(x_label)
    names = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    if legend:  # above the axes, where no bar is
        axis.legend(names.values(), names, frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))


def _draw(path: Path, panels: int, inches: tuple[float, float], title: str, fill: Callable) -> bool:
    """Draws so many panels, each of that size, in lines of at most four."""
    lines = -(-panels // 4)
    columns = -(-panels // lines)
    shrunk = 1.0 if lines == 1 else 0.85  # many panels: a picture that fits on a page
    width, height = shrunk * columns * inches[0], shrunk * lines * inches[1]
    try:
        from matplotlib.figure import Figure as Picture
    except ImportError:
        return False
    picture = Picture((width, height), dpi=120, layout="constrained")
    axes = picture.subplots(lines, columns, squeeze=False).reshape(-1)
    for axis in axes[panels:]:
        axis.set_visible(False)
    to_spread = fill(axes[:panels])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    if title:
        picture.suptitle(textwrap.fill(title, int(13 * width)), x=0.01, ha="left", fontsize=10)
    picture.draw_without_rendering()  # decides where the axes are
    for axis, labels in to_spread:
        _spread(axis, labels)
    try:
        with aside(path) as partial:
            picture.savefig(partial, format="png", pil_kwargs={"optimize": True})
    except OSError as error:
        say(f"{error}: {path.name} is not drawn", sys.stderr)  # no reason to lose the results
        return False
    return True
