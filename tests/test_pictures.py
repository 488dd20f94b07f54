"""Pictures that pages show, and evaluate.py's: titles follow from the results, nothing overlaps, text is legible."""

import itertools
import json
from pathlib import Path

import evaluate
import matplotlib.figure
import oac_throughput
import pytest
from main import plots
from main.plots import bars, plot
from main.report import Figure

RESULTS = Path(__file__).parent.parent / "experiments" / "results"
MODES = json.loads((RESULTS / "oac_throughput.json").read_text())["results"]


def test_the_title_of_the_readmes_picture_says_what_follows_from_the_figures():
    rates = {"oac_over_sync_balanced_link": 1.856, "oac_over_sync_no_link": 0.5}
    rates |= {"async_over_sync_balanced_link": 1.9, "async_over_sync_no_link": 1.02}
    assert oac_throughput.finding_over_sync(rates) == (
        "OAC, with the results of sync, has 1.86 of its rate over a link as slow as compute and 0.500 without a link; "
        "async, whose rows are stale, 1.90 and 1.02"
    )


def history(failures=(), **more):
    """Rows of metrics of a run with ten evaluations."""
    rows = [
        {"examples": 8_192 * (n + 1), "train_seconds": 0.4 * n + 3, "train_loss": 0.6 - n / 100, "validation_auc": 0.7}
        | {"validation_log_loss": 0.605 - n / 100} | {name: value * n for name, value in more.items()}
        for n in range(10)
    ]  # fmt: skip
    rows[4]["failures"] = list(failures)
    return rows


LOST = [{"step": 3, "examples": 24_576, "shards": [3]}, {"step": 8, "examples": 65_536, "shards": [1, 5]}]
OF_ALL = {"stale_share": 0.07, "sync_gap_steps": 0.2, "replica_spread": 0.01, "pls": 0.02}


def draw_curves(directory):
    results = {"test_auc": 0.7389, "examples": 81_920, "teacher_auc": 0.8157}
    return plots.draw(directory / "a.png", history(LOST, **OF_ALL), results, "validation", LOST)


def draw_plain_curves(directory):
    return plots.draw(directory / "a.png", history(), {"test_auc": 0.7389, "examples": 81_920}, "validation", [])


def draw_arms(directory):
    arms = {"none": history(), "all three": history(LOST, **OF_ALL)}
    return plots.compare(directory / "a.png", arms, "validation", "Test AUC 0.7382 with all, 0.7389 with none")


def draw_calibration(directory):
    results = {"calibration": 1.02, "rows": 110_000}
    for tenth in range(1, 11):
        clicked = {"": tenth / 13, "_low": tenth / 13 - 0.02, "_high": tenth / 13 + 0.02}
        results |= {f"tenth_{tenth}_predicted": tenth / 12}
        results |= {f"tenth_{tenth}_clicked{end}": value for end, value in clicked.items()}
    return evaluate.draw(directory / "calibration.png", results)


PICTURES = {
    "over sync": lambda directory: oac_throughput.draw_ratios(directory / "a.png", MODES),
    "curves": draw_curves,
    "plain curves": draw_plain_curves,
    "arms": draw_arms,
    "calibration": draw_calibration,
}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that have been saved."""
    pictures, save = [], matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *to, **how: (pictures.append(self), save(self, *to, **how))
    )
    return pictures


def words_in(picture):
    """All visible texts of a figure; tick labels only within the limits of their axis."""
    for axis in picture.axes:
        if axis.get_visible():
            yield from (*axis.texts, axis.xaxis.label, axis.yaxis.label)
            yield from axis.get_legend().get_texts() if axis.get_legend() else ()
            for line in (axis.xaxis, axis.yaxis):
                low, high = sorted(line.get_view_interval())
                yield from (tick.label1 for tick in line.get_major_ticks() if low <= tick.get_loc() <= high)
    yield from picture.texts


def overlaps(picture, allowed=1.5):
    """Pairs of texts that overlap and texts that leave the figure, by more than `allowed` pixels."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in words_in(picture) if text.get_text().strip()]
    whole, found = picture.bbox, []
    for text, box in boxes:
        if box.x0 < -allowed or box.y0 < -allowed or box.x1 > whole.x1 + allowed or box.y1 > whole.y1 + allowed:
            found.append(text)
    for (text, a), (other, b) in itertools.combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        if min(across) > allowed:
            found.append((text, other))
    return found


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_a_title_and_nothing_lies_on_anything_else(tmp_path, drawn, name):
    assert PICTURES[name](tmp_path)
    (picture,) = drawn
    assert len(picture.get_suptitle()) > 20 and not overlaps(picture)
    # In a column of 600 pixels.
    shrunk = 600 / picture.bbox.width
    smallest = min(text.get_fontsize() for text in words_in(picture) if text.get_text())
    assert smallest * picture.dpi / 72 * min(1.0, shrunk) > 8


def test_words_that_lie_on_each_other_are_seen(tmp_path, drawn):
    """Negative control."""
    assert plot(tmp_path / "a.png", {"y": {"a": ([1, 2], [1.0, 2.0])}}, "x", marks=[(1.5, "killed"), (1.501, "kills")])
    assert overlaps(drawn[0]) == [("killed", "kills")]


def test_what_lines_and_bars_are_held_against_is_drawn_and_named(tmp_path, drawn):
    lines = {"oac": ([1, 2, 3], [0.5, 0.6, Figure(0.65, 0.6, 0.7)])}
    assert plot(tmp_path / "a.png", {"AUC": lines}, "steps", levels={"AUC": {"target": 0.7, "teacher": None}})
    series = {"oac": {"a": Figure(2.0, 1.5, 2.5), "b": Figure(0.5)}}
    assert bars(tmp_path / "b.png", "rate", series, "Found", ("sync", 1.0))
    of_lines, of_bars = (picture.axes[0] for picture in drawn)
    assert [line.get_ydata()[0] for line in of_lines.lines if line.get_label() == "target"] == [0.7]
    assert {text.get_text() for text in of_lines.texts} == {"oac", "target"}
    assert [line.get_xdata()[0] for line in of_bars.lines if line.get_label() == "_level"] == [1.0]
    assert [text.get_text() for text in of_bars.texts] == ["2.00", "0.500", "sync"]
    assert all(any("95 %" in text.get_text() for text in picture.texts) for picture in drawn)


def test_lines_without_intervals_do_not_speak_of_them(tmp_path, drawn):
    assert plot(tmp_path / "a.png", {"rate": {"": ([1, 2], [1.0, 2.0])}}, "steps", "Found")
    assert not any("interval" in text.get_text() for text in drawn[0].texts)
