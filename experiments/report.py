"""What a run shows to people: tables of figures with their units and intervals, and plots that say a finding.

Results are flat, {key: value}, as results.json holds them. `KEY_low` and `KEY_high` are the ends of the interval of
`KEY`, `KEY_half_interval` is half of its width; the word may also stand inside of the key, before the name of a case
(`a_over_b_low_CASE`). `KEY_min` and `KEY_max`, the least and the most of the rounds, are for the file only.
"""

import itertools
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from stopping import say

from jaxrec.files import aside

_UNITS = {"ms": "ms", "mb": "MB", "percent": "%", "hours": "h", "seconds": "s", "minutes": "min"}
_BESIDE = ("low", "high", "half_interval", "sem", "min", "max")
# Dark enough to be read as text; in print without colours the strokes tell them apart.
_LINES = ("#08306b", "#d94801", "#238b45", "#6a51a3", "#a50f15", "#525252")
_STROKES = ("-", "--", "-.", ":")
FILLS = ("#08306b", "#e6550d", "#74c476", "#dadaeb", "#636363")  # apart in lightness, not in hue alone


class Figure(NamedTuple):
    """A value with the ends of its 95 % interval, if it has one."""

    value: Any
    low: float | None = None
    high: float | None = None


def figures(results: Mapping[str, Any]) -> dict[str, Figure]:
    """What results hold, each value with its interval; a single round or seed has none.

    >>> found = figures({"a": 2.0, "a_low": 1.0, "a_high": 3.0, "a_max": 9.0, "b_half_interval": None, "b": 5})
    >>> found["a"], found["b"], len(found)
    (Figure(value=2.0, low=1.0, high=3.0), Figure(value=5, low=None, high=None), 2)
    """
    beside: dict[str, dict[str, Any]] = {}
    taken = set()
    for key, word in itertools.product(results, _BESIDE):
        # A standard error belongs to a mean. A key that belongs to no other, such as `error_max`, is a figure itself.
        of = key.replace("_sem", "_mean") if word == "sem" else re.sub(f"_{word}(?=_|$)", "", key)
        if of != key and of in results:
            beside.setdefault(of, {})[word] = results[key]
            taken.add(key)
    return {key: _figure(value, beside.get(key, {})) for key, value in results.items() if key not in taken}


def _figure(value, beside):
    value = value.item() if isinstance(value, np.generic) else value
    half = beside.get("half_interval")
    if half is not None and value is not None:
        return Figure(value, value - half, value + half)
    return Figure(value, beside.get("low"), beside.get("high"))


def grid(
    results: Mapping[str, Any],
    corner: str,
    rows: Mapping[str, str] | Iterable[str],
    columns: Mapping[str, str | tuple[str, float]],
) -> str:
    """A table with a line for each case and a column for each figure; what results lack stays empty.

    Args:
      results: flat.
      corner: what the cases are.
      rows: {what a line is called: the word in its keys}, or the words alone.
      columns: {heading with its unit: key with {} for the word, or (key, what to multiply the figure by)}.

    >>> found = {"full_s": 0.5, "rows_s": 0.25, "rows_s_low": 0.2, "rows_s_high": 0.3, "full_auc_loss": 2e-5}
    >>> columns = {"save, s": "{}_s", "AUC lost, 1e-5": ("{}_auc_loss", 1e5)}
    >>> print(grid(found, "way", {"full": "full", "1/8 of it": "rows"}, columns))
    way                    save, s  AUC lost, 1e-5
    full       0.50                          2.000
    1/8 of it  0.25 (0.20 to 0.30)
    """
    named = rows if isinstance(rows, Mapping) else {row: row for row in rows}
    found, lines = figures(results), [[corner], *([name] for name in named)]
    for heading, column in columns.items():
        key, scale = (column, 1.0) if isinstance(column, str) else column
        cells = [_scaled(found.get(key.format(word), Figure("")), scale) for word in named.values()]
        for line, text in zip(lines, _column(heading, cells), strict=True):
            line.append(text)
    first = max(len(line[0]) for line in lines)
    return "\n".join("  ".join([line[0].ljust(first), *line[1:]]).rstrip() for line in lines)


def _column(heading, cells):
    """Heading and cells of one width: values behind each other's decimal points, intervals behind the values."""
    numbers = [cell for cell in cells if _is_number(cell.value) and cell.value]
    with_interval = [cell for cell in numbers if cell.low is not None]
    decimals = statistics.median_low([_decimals(cell) for cell in with_interval or numbers] or [0])
    values = [_text(cell.value, decimals) for cell in cells]
    intervals = [_interval(cell, decimals) for cell in cells]
    widths = max(map(len, values)), max(map(len, intervals))
    texts = [v.rjust(widths[0]) + i.ljust(widths[1]) for v, i in zip(values, intervals, strict=True)]
    width = max(len(heading), sum(widths))
    return [text.rjust(width) for text in [heading, *texts]]


def _scaled(figure, scale):
    if scale == 1 or not _is_number(figure.value):
        return figure
    return Figure(*(None if value is None else scale * value for value in figure))


def listing(results: Mapping[str, Any], groups: Mapping[str, Sequence[str]] | None = None) -> str:
    """One figure in a line, with its unit and its interval, in groups.

    Args:
      results: flat.
      groups: {title: beginnings of keys}, in order; a beginning that ends in _ is not said again. What belongs to no
        group comes last, keys of one first word together.

    >>> found = {"test_auc": 0.74, "train_seconds": 85.25, "saved": True}
    >>> found |= {"rate": 3.0, "rate_low": 2.5, "rate_high": 3.5}
    >>> print(listing(found, {"Test set": ["test_"], "Training": ["train", "rate"]}))
    Test set
      auc    0.7400
    Training
      train  85.25 s
      rate   3.0 (2.5 to 3.5)
    <BLANKLINE>
      saved  yes
    """
    left, blocks = figures(results), []
    for title, beginnings in (groups or {}).items():
        keys = [key for beginning in beginnings for key in left if key.startswith(beginning)]
        strip = tuple(beginning for beginning in beginnings if beginning.endswith("_"))
        block = [(*_label(key, strip), left.pop(key)) for key in dict.fromkeys(keys)]
        blocks.append((title, block))
    for word in dict.fromkeys(key.partition("_")[0] for key in left):
        blocks.append(("", [(*_label(key), left[key]) for key in left if key.partition("_")[0] == word]))
    width = max((len(label) for _, block in blocks for label, _, _ in block), default=0)
    lines, before = [], None
    for title, block in blocks:
        # A figure that is alone with its first word needs no space around it.
        if block and (title or before is None or max(len(block), before) > 1):
            lines.append(title)
        lines += [f"  {label:<{width}}  {_said(figure, unit)}" for label, unit, figure in block]
        before = len(block)
    return "\n".join(lines).strip("\n")


def _label(key, strip=()):
    """A key in words, and its unit."""
    words = next((key.removeprefix(one) for one in strip if key.startswith(one)), key).split("_")
    unit = "s" if words[-1] == "s" and "per" not in words[-2:] else next((_UNITS[w] for w in words if w in _UNITS), "")
    kept = [word for word in words if word not in _UNITS and not (unit == "s" and word == "s")]
    return (" ".join(kept), unit) if kept else (" ".join(words), "")


def _said(figure, unit=""):
    decimals = _decimals(figure) if _is_number(figure.value) else 0
    number = _text(figure.value, decimals)
    return number + (f" {unit}" if unit and _is_number(figure.value) else "") + _interval(figure, decimals)


def _is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _decimals(figure):
    """So many that an interval has two digits, and a value without one has four."""
    if isinstance(figure.value, int) or (figure.value == 0 and figure.low is None):
        return 0
    if figure.low is not None and 0 < figure.high - figure.low < math.inf:
        return min(8, max(0, 1 - math.floor(math.log10(figure.high - figure.low))))
    return min(8, max(0, 3 - math.floor(math.log10(abs(figure.value) or 1))))


def _text(value, decimals):
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.{0 if isinstance(value, int) else decimals}f}" if _is_number(value) else str(value)


def _interval(figure, decimals):
    return "" if figure.low is None else f" ({figure.low:,.{decimals}f} to {figure.high:,.{decimals}f})"


def plot(
    path: Path, panels: Mapping[str, Mapping[str, tuple]], x_label: str, title: str = "", log_x: bool = False
) -> bool:
    """Draws one panel for each metric, {y_label: {line: (xs, ys)}}; names instead of numbers as xs make bars.

    Args:
      path: of the PNG.
      panels: values of None are left out; (xs, ys, fitted) is points at ys and a line through what is fitted to them.
      x_label: with its unit.
      title: what the picture shows, in a sentence.
      log_x: whether the x axis is logarithmic, with a tick at each x.

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
            axis.set(xlabel=x_label, ylabel=y_label)
            if log_x:
                xs = next(iter(lines.values()))[0]
                axis.set_xscale("log")
                axis.set_xticks(xs, list(map(str, xs)))
                axis.minorticks_off()
            axis.grid(alpha=0.3)
        return [(axis, _label_ends(axis)) for axis in axes]

    return _draw(path, len(panels), (5.5 * len(panels), 3.6), title, fill)


def bars(path: Path, panels: Mapping[str, Mapping[str, Mapping[str, Any]]], title: str = "") -> bool:
    """Draws {x_label: {series: {case: value or Figure}}} as bars with intervals, each with its value; as `plot`."""

    def fill(axes):
        for axis, (x_label, series) in zip(axes, panels.items(), strict=True):
            cases = list(dict.fromkeys(case for each in series.values() for case in each))
            for number, (name, values) in enumerate(series.items()):
                _bars(axis, cases, values, name, number, 0.8 / len(series))
            axis.set_yticks(range(len(cases)), cases)
            _finish_bars(axis, x_label, len(series) > 1)
        return []

    most = max(len(set().union(*series.values())) * len(series) for series in panels.values())
    return _draw(path, len(panels), (5.5 * len(panels), 1.3 + 0.25 * most), title, fill)


def stacked_bars(path: Path, stacks: Mapping[str, Mapping[str, float]], x_label: str, title: str = "") -> bool:
    """Draws {case: {part: length}} as bars of parts, each with its sum; parts that are zero everywhere are left out."""

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
    for number, (name, (xs, ys, *fitted)) in enumerate(lines.items()):
        colour, stroke = _LINES[number % len(_LINES)], _STROKES[number % len(_STROKES)]
        marker = "o^sDvX"[number % 6] if len(xs) < 15 or fitted else None
        seen = np.array(ys, float)
        if fitted:
            axis.plot(xs, seen, color=colour, marker=marker, markersize=4, linestyle="none", label="_points")
            seen, marker = np.array(fitted[0]), None
        axis.plot(xs, seen, stroke, color=colour, marker=marker, markersize=3, label=name)


def _label_ends(axis):
    """The name of each line at the right, beside its last point: a legend would lie on the lines."""
    labels = []
    for line in axis.lines:
        seen = line.get_ydata()[np.isfinite(line.get_ydata())]
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
    # Less what is below them they need only not fall: isotonic regression, by pooling neighbours that do.
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
    text = _text(float(value), max(0, _decimals(Figure(float(value))) - 1))  # three digits will do
    axis.annotate(text, (end, place), (4, 0), textcoords="offset points", fontsize=8, va="center")


def _finish_bars(axis, x_label, legend):
    axis.invert_yaxis()
    axis.margins(x=0.16)  # for the values behind the bars
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xlabel(x_label)
    names = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    if legend:  # above the axes, where no bar is
        axis.legend(names.values(), names, frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))


def _draw(path: Path, panels: int, inches: tuple[float, float], title: str, fill: Callable) -> bool:
    try:
        from matplotlib.figure import Figure as Picture
    except ImportError:
        return False
    picture = Picture(inches, dpi=120, layout="constrained")
    axes = picture.subplots(1, panels, squeeze=False)[0]
    to_spread = fill(axes)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    if title:
        picture.suptitle(textwrap.fill(title, int(13 * inches[0])), x=0.01, ha="left", fontsize=10)
    picture.draw_without_rendering()  # decides where the axes are
    for axis, labels in to_spread:
        _spread(axis, labels)
    try:
        with aside(path) as partial:
            picture.savefig(partial, format="png")
    except OSError as error:
        say(f"{error}: {path.name} is not drawn", sys.stderr)  # no reason to lose the results
        return False
    return True
