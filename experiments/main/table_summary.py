"""Schemas by name or file, and the printed and drawn summary of a prepared table."""

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.data.tabular import Progress, Schema, ready
from jaxrec.files import atomic_write
from main.plots import FILLS

READY = {
    "criteo": ready.CRITEO,
    "criteo_x1": ready.CRITEO_X1,
    "criteo_x4": ready.CRITEO_X4,
    "avazu": ready.AVAZU,
    "movielens_1m": ready.MOVIELENS_1M,
}
_SHOWN = 40  # most features that are drawn
_FAR = 100.0  # a mean or deviation of a number that is not scaled


def open_schema(name: str | None) -> Schema:
    """Return a built-in schema, or that of a Python file that defines `schema = Schema(...)`."""
    if name in READY:
        return READY[name]
    path = Path(str(name))
    if not path.is_file():
        raise ValueError(f"--schema {name} is no file, and none of the schemas that are ready: {', '.join(READY)}.")
    found: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), found)  # bytes, which may begin with a byte-order mark
    except Exception as error:  # a user's file may raise anything
        raise ValueError(f"{path}{_line_of(path, error)}: {type(error).__name__}: {error}") from error
    if not isinstance(found.get("schema"), Schema):
        raise ValueError(f"{path} has no schema: write `schema = Schema(label=..., features=[...])` in it.")
    return found["schema"]


def _line_of(path, error) -> str:
    line = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == str(path) else line
        trace = trace.tb_next
    return f", line {line}" if line else ""


class Bars:
    """Progress of a preparation: a bar per stage, with rows per second and the time left."""

    def __init__(self):
        self._stage, self._bar = "", None

    def show(self, progress: Progress) -> None:
        """Update with a report of `prepare`."""
        from tqdm import tqdm

        if progress.stage != self._stage:
            self.__exit__()
            self._stage = progress.stage
            self._bar = tqdm(desc=progress.stage, unit="rows", unit_scale=True, disable=None, file=sys.stderr)
        assert self._bar is not None
        if progress.share:
            self._bar.total = round((self._bar.n + progress.rows) / progress.share)
        self._bar.update(progress.rows)

    def __enter__(self) -> "Bars":
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.close()


def words(metadata: Mapping[str, Any]) -> str:
    """Format the summary of a prepared table.

    >>> table = {"labels": ["click"], "digest": "ab", "label_over_time": [[0, 4, 0.25]], "bags": {}, "features": {
    ...     "user": {"missing_share": 0.5, "table_rows": 3, "distinct": 1, "top": [["ann", 2]],
    ...              "unknown_share": {"train": 0.25}}, "age": {"missing_share": 0.0, "scale": [40.0, 2000.5]}}}
    >>> print(words({"rows": {"train": 4}, "label_mean": {"train": 0.25}, "skipped_rows": 0, "table": table}))
    train: 4 rows, label mean 0.2500
    malformed rows left out: 0
    <BLANKLINE>
    feature  missing  unknown in train  table rows  distinct  most frequent in training
    user     50.00 %           25.00 %           3         1  'ann' 2
    age       0.00 %                 -           -         -  mean 40, deviation 2000
    <BLANKLINE>
    mean of 'click' over time: 0.2500
    warning: age would dominate a model, or keep it from learning: add log=True or standardise=True
    """
    table = metadata["table"]
    lines = [f"{name}: {rows} rows, label mean {metadata['label_mean'][name]:.4f}"
             for name, rows in metadata["rows"].items()]  # fmt: skip
    lines += [f"malformed rows left out: {metadata['skipped_rows']}", ""]
    splits = [*metadata["rows"]]
    cells = [["feature", "missing", *(f"unknown in {split}" for split in splits), "table rows", "distinct",
              "most frequent in training"]]  # fmt: skip
    for name, one in table["features"].items():
        top = ", ".join(f"{value[:16]!r} {count}" for value, count in one.get("top", [])[:3])
        if scale := one.get("scale") or [one[key] for key in ("mean", "deviation") if key in one]:
            top = f"mean {scale[0]:.4g}, deviation {scale[1]:.4g}"
        unknown = [f"{100 * one['unknown_share'][split]:.2f} %" if "unknown_share" in one else "-" for split in splits]
        of_table = [str(one.get(key, "-")) for key in ("table_rows", "distinct")]
        cells.append([name, f"{100 * one['missing_share']:.2f} %", *unknown, *of_table, top])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for name, *numbers, top in cells:
        aligned = (number.rjust(width) for number, width in zip(numbers, widths[1:-1], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *aligned, top]).rstrip())
    means = " ".join(f"{mean:.4f}" for _, _, mean in table["label_over_time"])
    lines += ["", f"mean of {table['labels'][0]!r} over time: {means}"]
    lines += warnings_of({name: one.get("unknown_share", {}) for name, one in table["features"].items()})
    lists = [name for name, bag in table["bags"].items() if bag["hots"] > 1 and bag["kind"] != "History"]
    alone = [name for name in lists if table["features"][name]["most"] < 2]
    lines += (
        [f"warning: no row has more than one category of {', '.join(alone)}: is the separator right?"] if alone else []
    )
    far = [name for name, one in table["features"].items() if max(map(abs, one.get("scale", [0]))) > _FAR]
    lines += [
        f"warning: {', '.join(far)} would dominate a model, or keep it from learning: add log=True or standardise=True"
    ] if far else []  # fmt: skip
    return "\n".join(lines)


def warnings_of(unknown: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a warning if half of the ids of a column, or more, are unknown.

    Args:
      unknown: {column: {rows in words: share of unknown ids among those of these rows}}.

    >>> warnings_of({"user": {"test": 0.1}, "seen": {"train": 0.1, "test": 0.652}})[0][:66]
    'warning: many ids are unknown: seen (65.2 % in test). They share o'
    """
    many = {name: [f"{100 * share:.1f} % in {rows}" for rows, share in of.items() if share >= 0.5]
            for name, of in unknown.items()}  # fmt: skip
    named = ", ".join(f"{name} ({', '.join(of)})" for name, of in many.items() if of)
    causes = (
        "They share one row of their table. Is the separator of lists right, are they written as in training (012 is "
        "not 12), are they ids of this table? Ids that are new, or rarer in training than min_count, are unknown too."
    )
    return [f"warning: many ids are unknown: {named}. {causes}"] if named else []


def finding(metadata: Mapping[str, Any], shown: int = _SHOWN) -> str:
    """Return the title of the plot of a prepared table, which has at most `shown` of its columns.

    >>> table = {"labels": ["click"], "label_over_time": [[0, 4, 0.25], [4, 4, 0.5]], "features": {
    ...     "user": {"missing_share": 0.5, "table_rows": 3}, "age": {"missing_share": 0.125}}}
    >>> finding({"rows": {"train": 4, "test": 4}, "table": table})
    "8 rows; user is missing most, 50.0 %; the mean of 'click' goes from 0.2500 to 0.5000"
    >>> finding({"rows": {"train": 4, "test": 4}, "table": table}, shown=1)[-42:]
    '0.5000; drawn are the first 1 of 2 columns'
    """
    table = metadata["table"]
    columns = len(table["features"])
    only = f"; drawn are the first {shown} of {columns} columns" if shown < columns else ""
    share = {name: one["missing_share"] for name, one in table["features"].items()}
    most = max(share, key=share.__getitem__)
    missing = f"{most} is missing most, {100 * share[most]:.1f} %" if share[most] else "nothing is missing"
    means = [mean for _, _, mean in table["label_over_time"]]
    return (
        f"{sum(metadata['rows'].values()):,} rows; {missing}; the mean of {table['labels'][0]!r} goes from "
        f"{means[0]:.4f} to {means[-1]:.4f}{only}"
    )


def draw(path: Path, metadata: Mapping[str, Any]) -> bool:
    """Plot the rows of each table, the missing shares, and the label over the rows; return False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    table = metadata["table"]
    names = list(table["features"])[:_SHOWN]
    height = 0.6 + 0.19 * len(names)
    figure = Figure(figsize=(7.2, height + 3.1), layout="constrained")  # as wide as those of plots.py
    axes = figure.subplot_mosaic([["rows", "missing"], ["label", "label"]], height_ratios=[height, 2.4])
    place, of = np.arange(len(names)), lambda key: [table["features"][name].get(key, 0) for name in names]
    axes["rows"].barh(place, of("table_rows"), color=FILLS[0])
    axes["rows"].set(xscale="symlog", xlabel="rows of its table", yticks=place, yticklabels=names)
    axes["missing"].barh(place, [100 * share for share in of("missing_share")], color=FILLS[1])
    axes["missing"].set(xlabel="missing, %", xlim=(0, 100), yticks=place, yticklabels=[])
    for name in ("rows", "missing"):
        axes[name].set_ylim(len(names) - 0.4, -0.6)
    axes["label"].plot(
        *zip(*[(at, mean) for at, _, mean in table["label_over_time"]], strict=True), "o-", color=FILLS[0]
    )
    by_time = metadata["options"]["schema"]["split"][0][0] == "ByTime"
    axes["label"].set(ylabel=f"mean of {table['labels'][0]!r}", xlabel="time" if by_time else "row", ylim=(0, None))
    for each in axes.values():
        each.tick_params(labelsize=8)
        each.spines[["top", "right"]].set_visible(False)
    figure.suptitle(textwrap.fill(finding(metadata), 88), x=0.01, ha="left", fontsize=10)
    with atomic_write(path) as partial:
        figure.savefig(partial, format="png", dpi=120)
    return True
