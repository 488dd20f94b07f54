"""Failures: drawing them, and reading the formats of two published traces."""

import csv
import gzip
import json
import lzma
import math

import cpr_scalability
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st
from studies.failure_traces import load_infinitehbd, load_lanl

from jaxrec.cpr.failure import Failures, draw_failures, interruptions, place_failures

SHAPES = st.floats(0.3, 5)


@given(
    seed=st.integers(0, 99), nodes=st.integers(4, 20), failed=st.integers(1, 4), mtbf=st.floats(1, 50), shape=SHAPES
)  # fmt: skip
def test_drawn_failures_take_distinct_nodes_and_keep_to_the_horizon(seed, nodes, failed, mtbf, shape):
    drawn = draw_failures(mtbf, 200.0, nodes, seed, shape, failed)
    placed = place_failures(5, 200.0, nodes, seed, failed)
    for failures in (drawn, placed):
        hours, count = interruptions(failures)
        assert len(failures.hours) == failed * len(hours) and (count == failed).all()
        assert (np.diff(failures.hours) >= 0).all() and (failures.hours < 200).all() and failures.nodes == nodes
        assert ((failures.node >= 0) & (failures.node < nodes)).all()
    assert len(interruptions(placed)[0]) == 5
    longer = draw_failures(mtbf, 400.0, nodes, seed, shape, failed)  # the same failures and later ones
    np.testing.assert_allclose(longer.hours[: len(drawn.hours)], drawn.hours, rtol=1e-12)


@pytest.mark.parametrize("nodes", [1, 8])
def test_placed_failures_are_uniform_over_the_whole_job_and_over_its_nodes(nodes):
    placed = place_failures(4000, 56.0, nodes, 0)
    share = np.histogram(placed.hours, bins=8, range=(0, 56.0))[0] / 4000
    assert np.abs(share - 1 / 8).max() < 0.02  # the standard deviation is 0.005
    assert np.abs(np.bincount(placed.node, minlength=nodes) / 4000 - 1 / nodes).max() < 0.03


@settings(max_examples=20)
@given(seed=st.integers(0, 99), shape=SHAPES, mtbf=st.floats(1, 50))
def test_gaps_follow_the_gamma_law(seed, shape, mtbf):
    """Mean m, shape k: the coefficient of variation is 1 / sqrt(k), the mean logarithm log(m / k) + digamma(k)."""
    gaps = np.diff(interruptions(draw_failures(mtbf, 4000 * mtbf, 1, seed, shape))[0])
    assert gaps.mean() == pytest.approx(mtbf, rel=0.15)
    assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.15)
    assert np.log(gaps / mtbf).mean() == pytest.approx(scipy.special.digamma(shape) - math.log(shape), abs=0.3)


def some_failures(hours, node, nodes=4):
    return Failures(np.array(hours), np.array(node), nodes, 10.0)


def test_failures_of_the_same_time_are_one():
    failures = some_failures([1.0, 1.0, 1.0, 5.0], [2, 0, 2, 3])
    hours, count = interruptions(failures)
    assert hours.tolist() == [1, 5] and count.tolist() == [2, 1]


def test_failures_of_unknown_nodes_are_not_replayed():
    costs = cpr_scalability.SETTINGS["a"]
    unknown = some_failures([1.0, 2.0, 5.0], [0, -1, 3])
    known = some_failures([1.0, 5.0], [0, 3])
    found = cpr_scalability.replayed(unknown, costs, 0.1)
    assert found == cpr_scalability.replayed(known, costs, 0.1) and found["mtbf_hours"] == 5


def events_of(number, seed=0):
    rng = np.random.default_rng(seed)
    for day in np.sort(rng.uniform(0, 300, number)).round(4).tolist():
        what = {"Level": "Hardware Failure", "Class": str(rng.choice(["GPU", "Fan", "NIC é"])), "Desc": "x [y], {z}"}
        kind = "fault_start" if rng.random() < 0.6 else "fault_end"
        yield {"node_id": f"node-{rng.integers(50)}", "event_time": day, "event_type": kind, "fault_type": what}


def write(path, text):
    """Writes a text file, compressed according to its suffix."""
    with {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)(path, "wt", encoding="utf-8", newline="") as file:
        file.write(text)
    return path


@pytest.mark.parametrize("indent", [None, 4])
@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_infinitehbd_is_read_plain_or_compressed(tmp_path, indent, suffix):
    events = list(events_of(1000))
    found = load_infinitehbd(write(tmp_path / f"trace.json{suffix}", json.dumps(events, indent=indent)), nodes=60)
    starts = [event for event in events if event["event_type"] == "fault_start"]
    assert found.hours.tolist() == [event["event_time"] * 24 for event in starts]
    same_node = lambda names: [names.index(name) for name in names]
    assert same_node(found.node.tolist()) == same_node([event["node_id"] for event in starts])
    assert found.nodes == 60 and found.span_hours == pytest.approx(24 * events[-1]["event_time"])


COLUMNS = [
    "System", "machine type", "nodes", "nodenumz", "Prob Started", "Facilities", "Hardware", "Human Error", "Network",
    "Undetermined", "Software", "Same Event",
]  # fmt: skip
GOOD = [
    ["2", "cluster", "49", "0", "6/21/2005 10:54", "", "Graphics, Hdwr", "", "", "", "", "No"],
    ["20", "cluster", "4", "3", "6/21/2005 10:54", "", "", "", "", "", "Other, Software", "No"],
    ["20", "cluster", "4", "1", "6/20/2005 9:24", "", "CPU", "", "", "", "", "No"],
    ["20", "cluster", "4", "", "6/21/2005 10:54", "", "", "", "", "", "", "No"],
]


def lanl(path, rows, columns=COLUMNS):
    with (lzma.open if path.suffix == ".xz" else open)(path, "wt", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


@pytest.mark.parametrize("name", ["failures.csv", "failures.csv.xz"])
def test_lanl_is_read_by_system_and_put_in_order(tmp_path, name):
    found = load_lanl(lanl(tmp_path / name, GOOD), 20)
    assert found.hours.tolist() == [0, 25.5, 25.5] and found.node.tolist() == [1, 3, -1]
    assert found.nodes == 4 and found.span_hours == 25.5


def changed(row, **fields):
    return [fields.get(name.replace(" ", "_"), value) for name, value in zip(COLUMNS, row, strict=True)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*GOOD, changed(GOOD[1], Prob_Started="2005-06-21")], "time data '2005-06-21'"),
        ([GOOD[1], changed(GOOD[1], nodenumz="x1")], "invalid literal .*'x1'"),
        ([*GOOD, GOOD[1][:3]], "damaged, or no such trace: TypeError"),
        ([GOOD[0]], "system=20 has no failure there"),
    ],
)
def test_bad_lanl_records_are_refused(tmp_path, rows, message):
    with pytest.raises(ValueError, match=f"failures.csv.* {message}"):
        load_lanl(lanl(tmp_path / "failures.csv", rows), 20)


def test_a_table_without_the_columns_is_refused(tmp_path):
    with pytest.raises(ValueError, match="damaged, or no such trace: KeyError: 'Prob Started'"):
        load_lanl(lanl(tmp_path / "failures.csv", GOOD, [c if c != "Prob Started" else "Ended" for c in COLUMNS]), 20)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace('"event_time"', '"time"', 1), "KeyError: 'event_time'"),
        (lambda text: text.replace('"node_id": ', '"node_id" ', 1), "Expecting ':'.* line 3"),
        (lambda text: text[:-2], "JSONDecodeError"),
        (lambda text: '{"events": []}', "TypeError"),
        (lambda text: text.replace('"fault_start"', '"fault_begin"'), "0 nodes have faults"),
    ],
)
def test_bad_infinitehbd_files_are_named(tmp_path, damage, message):
    text = json.dumps(list(events_of(300)), indent=4)
    with pytest.raises(ValueError, match=f"trace.json.*{message}"):
        load_infinitehbd(write(tmp_path / "trace.json", damage(text)))


def test_damaged_packing_is_named(tmp_path):
    path = write(tmp_path / "trace.json.gz", json.dumps(list(events_of(1000)), indent=4))
    for content in (path.read_bytes()[:-2000], b"no gzip"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="trace.json.gz is damaged"):
            load_infinitehbd(path)
    (tmp_path / "bad.csv.xz").write_bytes(b"no xz")
    with pytest.raises(ValueError, match="bad.csv.xz is damaged"):
        load_lanl(tmp_path / "bad.csv.xz", 20)


def test_more_nodes_than_the_cluster_has_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nodes have faults, and the cluster has 3"):
        load_infinitehbd(write(tmp_path / "trace.json", json.dumps(list(events_of(300)))), nodes=3)


def test_real_infinitehbd(real_data):
    path = real_data / "failures" / "infinitehbd_fault_trace.json.gz"
    found = load_infinitehbd(path)
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file) if event["event_type"] == "fault_start"]
    assert found.hours.tolist() == [event["event_time"] * 24 for event in events] and len(events) == 584
    assert len(np.unique(found.node)) == 231 and found.nodes == 400
    assert len(interruptions(found)[0]) == 529


@pytest.mark.parametrize(("system", "failures", "nodes"), [(18, 3997, 1024), (19, 3284, 1024), (20, 2478, 512)])
def test_real_lanl(real_data, system, failures, nodes):
    found = load_lanl(real_data / "failures" / "lanl_1996_2005.csv.xz", system)
    assert len(found.hours) == failures and found.nodes == nodes and (found.node >= 0).all()


def test_the_experiment_says_what_is_modelled_and_what_emulated(tmp_path):
    found = cpr_scalability.main(cpr_scalability.Config(preset="smoke", workdir=tmp_path))
    assert "never measured" in found["overhead_is"] and found["failures_are"] == "drawn"
    for setting in "ab":
        assert found[f"setting_{setting}_failures"] >= 20_000
    wanted = {"a_full": 8.50, "a_partial": 0.53, "b_full": 8.20, "b_partial": 0.68}  # the paper's percentages
    for key, percent in wanted.items():
        assert found[f"setting_{key}_percent_modelled"] == pytest.approx(percent, abs=0.01)
        assert abs(found[f"setting_{key}_emulated_minus_modelled_points"]) < 0.1
    overheads = {key for key in found if "_percent" in key and ("full" in key or "partial" in key)}
    assert overheads and all("modelled" in key or "emulated" in key for key in overheads)
    assert found["infinitehbd_like_all_nodes_full_percent_emulated"] > 10
    assert found["infinitehbd_like_all_nodes_partial_percent_emulated"] < 1
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draw_failures(0, 56, 8, 0), "mtbf_hours=0"),
        (lambda: draw_failures(28, math.inf, 8, 0), "horizon_hours=inf"),
        (lambda: draw_failures(28, 56, 8, 0, shape=-1), "shape=-1"),
        (lambda: draw_failures(28, 56, 8, 0, failed_nodes=9), "failed_nodes=9"),
        (lambda: place_failures(-1, 56, 8, 0), "number=-1"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
