"""Tables of results, with units and intervals.

Results are flat, {key: value}, as in results.json. `KEY_low` and `KEY_high` are the ends of the interval of `KEY`,
`KEY_half_interval` or `KEY_half_width` is half of its width; the word may also stand inside the key, before the name of
a case (`a_over_b_low_CASE`). `KEY_min` and `KEY_max`, the least and the most of the rounds, are for the file only.
"""

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_UNITS = {"ms": "ms", "mb": "MB", "percent": "%", "hours": "h", "seconds": "s", "minutes": "min"}
_BESIDE = ("low", "high", "half_interval", "half_width", "min", "max")
# Metrics of a set of examples, and whether more (1) or less (-1) of one is better.
QUALITY = {"auc": 1, "gauc": 1, "log_loss": -1, "normalized_entropy": -1, "rmse": -1, "mae": -1}


class Figure(NamedTuple):
    """A value with the ends of its 95 % interval, if it has one."""

    value: Any
    low: float | None = None
    high: float | None = None


class Line(NamedTuple):
    """Label, unit and scale of one figure in a table."""

    key: str
    label: str
    unit: str = ""
    scale: float = 1.0


def figures(results: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the results as figures, each with its interval; a single round or seed has none.

    >>> results = {"a": 2.0, "a_low": 1.0, "a_high": 3.0, "a_max": 9.0, "b_half_interval": None, "b": 5}
    >>> found = figures(results)
    >>> found["a"], found["b"], len(found)
    (Figure(value=2.0, low=1.0, high=3.0), Figure(value=5, low=None, high=None), 2)
    """
    beside = keys_beside(results)
    taken = {key for keys in beside.values() for key in keys.values()}
    return {
        key: _figure(value, {word: results[one] for word, one in beside.get(key, {}).items()})
        for key, value in results.items()
        if key not in taken
    }


def keys_beside(results: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return {key of a figure: {word: the key with that word, such as of an end of its interval}}.

    >>> keys_beside(["a_over_b", "a_over_b_high", "a_at_4", "a_low_at_4", "error_max"])
    {'a_over_b': {'high': 'a_over_b_high'}, 'a_at_4': {'low': 'a_low_at_4'}}
    """
    keys = set(results)
    beside: dict[str, dict[str, str]] = {}
    for key, word in itertools.product(results, _BESIDE):
        of = re.sub(f"_{word}(?=_|$)", "", key)  # that of no other, such as `error_max`, is a figure itself
        if of != key and of in keys:
            beside.setdefault(of, {})[word] = key
    return beside


def _figure(value, beside):
    value = value.item() if isinstance(value, np.generic) else value
    half = beside.get("half_interval", beside.get("half_width"))
    if half is not None and value is not None:
        return Figure(value, value - half, value + half)
    return Figure(value, beside.get("low"), beside.get("high"))


def grid(
    results: Mapping[str, Any],
    corner: str,
    rows: Mapping[str, str] | Iterable[str],
    columns: Mapping[str, str | tuple[str, float]],
) -> str:
    """Format a table with a line per case and a column per figure; missing results stay empty.

    Args:
      rows: {label of a case: the word in its keys}, or the words alone.
      columns: {heading with its unit: key with {} for the word, or (key, factor)}.

    >>> found = {"full_s": 0.5, "rows_s": 0.25, "rows_s_low": 0.2, "rows_s_high": 0.3}
    >>> columns = {"save, s": "{}_s", "AUC lost, 1e-5": ("{}_auc_loss", 1e5)}
    >>> print(grid(found | {"full_auc_loss": 2e-5}, "way", {"full": "full", "1/8 of it": "rows"}, columns))
    way                    save, s  AUC lost, 1e-5
    full       0.50                          2.000
    1/8 of it  0.25 (0.20 to 0.30)
    """
    named = rows if isinstance(rows, Mapping) else {row: row for row in rows}
    found, lines = figures(results), [[corner], *([name] for name in named)]
    for heading, column in columns.items():
        key, scale = (column, 1.0) if isinstance(column, str) else column
        cells = [scaled(found.get(key.format(word), Figure("")), scale) for word in named.values()]
        for line, text in zip(lines, _column(heading, cells), strict=True):
            line.append(text)
    first = max(len(line[0]) for line in lines)
    return "\n".join("  ".join([line[0].ljust(first), *line[1:]]).rstrip() for line in lines)


def _column(heading, cells):
    """Return heading and cells at one width: decimal points aligned, intervals after the values."""
    numbers = [cell for cell in cells if _is_number(cell.value) and cell.value]
    with_interval = [cell for cell in numbers if cell.low is not None]
    decimals = statistics.median_low([_decimals(cell) for cell in with_interval or numbers] or [0])
    values = [_text(cell.value, decimals) for cell in cells]
    intervals = [_interval(cell, decimals) for cell in cells]
    widths = max(map(len, values)), max(map(len, intervals))
    texts = [v.rjust(widths[0]) + i.ljust(widths[1]) for v, i in zip(values, intervals, strict=True)]
    width = max(len(heading), sum(widths))
    return [text.rjust(width) for text in [heading, *texts]]


def scaled(figure: Figure, scale: float) -> Figure:
    """Multiply a figure and its interval by a number; words stay as they are."""
    if scale == 1 or not _is_number(figure.value):
        return figure
    return Figure(*(None if value is None else scale * value for value in figure))


def listing(results: Mapping[str, Any], groups: Mapping[str, Sequence[str | Line]] | None = None) -> str:
    """Format one figure per line, with its unit and its interval, in groups.

    Args:
      groups: {title: prefixes of keys, or a Line for one key}, in order; a prefix that ends in _ is stripped from the
        label. Keys of no group come last, grouped by their first word.

    >>> found = {"test_auc": 0.74, "train_seconds": 85.25, "saved": True}
    >>> found |= {"rate": 3.0, "rate_low": 2.5, "rate_high": 3.5}
    >>> print(listing(found, {"Test set": ["test_"], "Training": [Line("train_seconds", "time", "s"), "rate"]}))
    Test set
      auc    0.7400
    Training
      time   85.25 s
      rate   3.0 (2.5 to 3.5)
    <BLANKLINE>
      saved  yes
    """
    left, blocks = figures(results), []
    for title, lines_of in (groups or {}).items():
        blocks.append((title, [line for one in lines_of for line in _taken(left, one)]))
    for word in dict.fromkeys(key.partition("_")[0] for key in left):
        blocks.append(("", [(*_label(key), left[key]) for key in left if key.partition("_")[0] == word]))
    width = max((len(label) for _, block in blocks for label, _, _ in block), default=0)
    lines, before = [], None
    for title, block in blocks:
        # Figures that share their first word with no other are not set apart by blank lines.
        if block and (title or before is None or max(len(block), before) > 1):
            lines.append(title)
        lines += [f"  {label:<{width}}  {said(figure, unit)}" for label, unit, figure in block]
        before = len(block)
    return "\n".join(lines).strip("\n")


def _taken(left, one):
    """Pop the keys that a line or a prefix selects, as (label, unit, figure)."""
    if isinstance(one, Line):
        return [(one.label, one.unit, scaled(left.pop(one.key), one.scale))] if one.key in left else []
    strip = one if one.endswith("_") else ""
    return [(*_label(key.removeprefix(strip)), left.pop(key)) for key in list(left) if key.startswith(one)]


def _label(key):
    """Split a key into words and unit."""
    words = key.split("_")
    unit = "s" if words[-1] == "s" and "per" not in words[-2:] else next((_UNITS[w] for w in words if w in _UNITS), "")
    kept = [word for word in words if word not in _UNITS and not (unit == "s" and word == "s")]
    return (" ".join(kept), unit) if kept else (" ".join(words), "")


def said(figure: Figure, unit: str = "") -> str:
    """Format a figure with its unit and its interval.

    >>> said(Figure(1.8512, 1.74, 1.98)), said(Figure(0.5), "s"), said(Figure(None))
    ('1.85 (1.74 to 1.98)', '0.5000 s', '-')
    """
    decimals = _decimals(figure) if _is_number(figure.value) else 0
    number = _text(figure.value, decimals)
    return number + (f" {unit}" if unit and _is_number(figure.value) else "") + _interval(figure, decimals)


def _is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits, or more if its integer part has more.

    >>> number(0.012345), number(23732.2), number(1.5, 3)
    ('0.01235', '23,732', '1.50')
    """
    return _text(value, _decimals(Figure(value), digits))


def _decimals(figure, digits=4):
    """Return decimals: two digits of an interval's width, or `digits` significant digits of a value without one."""
    if isinstance(figure.value, int) or (figure.value == 0 and figure.low is None):
        return 0
    if figure.low is not None and 0 < figure.high - figure.low < math.inf:
        return min(8, max(0, 1 - math.floor(math.log10(figure.high - figure.low))))
    return min(8, max(0, digits - 1 - math.floor(math.log10(abs(figure.value) or 1))))


def _text(value, decimals):
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.{0 if isinstance(value, int) else decimals}f}" if _is_number(value) else str(value)


def _interval(figure, decimals):
    return "" if figure.low is None else f" ({figure.low:,.{decimals}f} to {figure.high:,.{decimals}f})"
