"""Reports of a run: no figure is omitted, columns are aligned, intervals show enough digits."""

import math
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from main.plots import FILLS, apart, bars, plot, stacked_bars
from main.report import Figure, figures, grid, listing

NAMES = st.from_regex(r"[a-z]{2,5}(_[a-z]{2,5}){0,2}", fullmatch=True)
NUMBERS = st.floats(-1e9, 1e9) | st.integers(-(10**9), 10**9)
VALUES = NUMBERS | st.sampled_from([None, True, "words", math.nan, math.inf, np.float32(0.5), np.int64(7), np.bool_(1)])


@given(st.dictionaries(NAMES, VALUES, min_size=1), st.data())
@settings(max_examples=100)
def test_every_figure_stands_in_one_line(results, data):
    shown, beginnings = figures(results), data.draw(st.lists(st.sampled_from([key[:2] for key in results])))
    text = listing(results, {f"Group {n}": [beginning] for n, beginning in enumerate(beginnings)})
    said = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(said) == len(shown) and all(key in shown or "_" in key for key in results)
    assert all(re.search(r"  \S", line.strip()) for line in said)  # label and value


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(NUMBERS, st.floats(1e-6, 1e6) | st.none()), min_size=1))
@settings(max_examples=100)
def test_columns_are_aligned_and_intervals_have_ends(found):
    results = {f"{word}_auc": value for word, (value, _) in found.items()}
    results |= {f"{word}_auc_half_interval": half for word, (_, half) in found.items()}
    head, *lines = grid(results, "way", list(found), {"AUC": "{}_auc"}).splitlines()
    assert [line[0] for line in lines] == list(found) and head.split() == ["way", "AUC"]
    numbers = [re.match(r"\S+ +(-?[\d,]+)(\.\d+)?", line) for line in lines]
    assert len({number.end(1) for number in numbers if number[2]}) <= 1  # decimal points are aligned
    for line, (_, half) in zip(lines, found.values(), strict=True):
        assert ("(" in line) == (half is not None)


@given(NUMBERS, st.floats(1e-5, 1e5))
def test_an_interval_is_given_in_two_digits(value, half):
    text = listing({"rate": float(value), "rate_low": value - half, "rate_high": value + half})
    low, high = re.search(r"\((\S+) to (\S+)\)", text).groups()
    width = float(high.replace(",", "")) - float(low.replace(",", ""))
    assert width == pytest.approx(2 * half, rel=0.1)


def test_an_interval_belongs_to_its_figure_wherever_the_word_stands():
    results = {"a_over_b_x": 2.0, "a_over_b_low_x": 1.0, "a_over_b_high_x": 3.0, "a_over_b_min_x": 0.5}
    results |= {"loss": 5.0, "loss_half_interval": 1.0, "error_max": 7.0, "auc_mean": 0.5, "auc_sem": 0.1, "slow": 1}
    found = figures(results)
    assert found["a_over_b_x"] == (2.0, 1.0, 3.0) and found["loss"] == (5.0, 4.0, 6.0)
    assert found.keys() == {"a_over_b_x", "loss", "error_max", "auc_mean", "slow"}


def test_units_stand_behind_values_and_not_in_names():
    text = listing(
        {"step_ms_none": 30.47, "a_s": 2.0, "rate_per_s": 5.0, "a_percent": None, "minutes": 3.0, "is_s": "x"}
    )
    said = dict(re.split(r"  +", line.strip()) for line in text.splitlines() if line)
    assert said["step none"] == "30.47 ms" and said["a"] in ("2.000 s", "-") and said["rate per s"] == "5.000"
    assert said["minutes"] == "3.000" and said["is"] == "x"


def test_a_grid_leaves_empty_what_it_has_not():
    text = grid({"a_x": 1, "b_x": None, "b_y": True}, "way", {"first": "a", "second": "b"}, {"X": "{}_x", "Y": "{}_y"})
    assert text.splitlines() == ["way     X    Y", "first   1", "second  -  yes"]


@given(st.lists(st.floats(-1e3, 1e3), max_size=12), st.floats(0.5, 30))
def test_labels_move_apart_and_no_further_than_they_must(places, least):
    moved = apart(places, least)
    order = np.argsort(places, kind="stable")
    assert all(b - a >= least - 1e-6 for a, b in zip(np.array(moved)[order], np.array(moved)[order][1:], strict=False))
    assert np.sum(moved) == pytest.approx(np.sum(places), abs=1e-6)
    if all(b - a >= least for a, b in zip(sorted(places), sorted(places)[1:], strict=False)):
        assert moved == pytest.approx(places)


def test_names_of_modes_become_bars_and_no_line(tmp_path):
    assert plot(tmp_path / "a.png", {"rate": {"link": (["sync", "oac"], [1.0, 2.0])}}, "mode", "Found")
    assert bars(tmp_path / "b.png", {"rate": {"link": {"sync": 1.0, "oac": Figure(2.0)}}}, "Found")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_fills_are_told_apart_without_colours():
    light = sorted(sum(w * int(c[i : i + 2], 16) for w, i in ((0.3, 1), (0.59, 3), (0.11, 5))) / 255 for c in FILLS[:4])
    assert min(np.diff(light)) > 0.15


def test_pictures_are_drawn_of_whatever_a_run_has(tmp_path):
    nothing = {"y": {"line": ([1, 2], [None, math.nan]), "other": ([1], [2.0])}}
    assert plot(tmp_path / "a.png", nothing, "x", "A sentence " * 30, log_x=True)
    assert bars(tmp_path / "b.png", {"y": {"": {"a": None, "b": Figure(-1.0, -2.0, 0.5)}}})
    assert stacked_bars(tmp_path / "c.png", {"a": {"save": 1.0, "none": 0.0}, "b": {"save": 0.0, "none": 0.0}}, "y")
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in "abc")


def test_without_matplotlib_there_is_no_picture_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not plot(tmp_path / "a.png", {"y": {"line": ([1], [1.0])}}, "x") and not list(tmp_path.iterdir())
