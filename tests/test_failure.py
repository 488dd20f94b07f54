"""Failures: drawing, fitting, and reading the formats of two published traces."""

import csv
import gzip
import json
import lzma
import math
import tracemalloc

import cpr_scalability
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from studies import failure_nodes
from studies.failure_fit import fit_exponential, fit_gamma, hazard_by_age
from studies.failure_nodes import of_nodes
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
def test_fits_recover_what_was_drawn(seed, shape, mtbf):
    gaps = np.diff(interruptions(draw_failures(mtbf, 4000 * mtbf, 1, seed, shape))[0])
    fit = fit_gamma(gaps)
    assert fit.shape == pytest.approx(shape, rel=0.15) and fit.mean_hours == pytest.approx(mtbf, rel=0.15)
    assert fit.ks_distance < 1.3 * fit.ks_limit and fit.survival_rmse < 0.03
    for other in (0.99, 1.01):  # the fit maximises the likelihood
        assert density(gaps, other * fit.shape, gaps.mean() / (other * fit.shape)) < fit.log_likelihood
    assert density(gaps, fit.shape, fit.scale_hours) == pytest.approx(fit.log_likelihood)
    assert fit_exponential(gaps).scale_hours == pytest.approx(gaps.mean())


def density(gaps, shape, scale):
    """Log likelihood of gaps under a gamma distribution, by its density."""
    logs = (shape - 1) * np.log(gaps) - gaps / scale - shape * math.log(scale) - math.lgamma(shape)
    return logs.sum()


@pytest.mark.parametrize("shape", [0.5, 2.0])
def test_an_exponential_law_does_not_fit_gamma_gaps(shape):
    """Negative control of both goodness-of-fit figures."""
    gaps = np.diff(draw_failures(10, 20_000, 1, 0, shape).hours)
    wrong, right = fit_exponential(gaps), fit_gamma(gaps)
    assert wrong.ks_distance > 2 * wrong.ks_limit > 2 * right.ks_distance
    assert wrong.survival_rmse > 5 * right.survival_rmse


def test_figures_of_fit_by_hand():
    """Two gaps of 1 and 3 hours: an exponential distribution with mean 2."""
    fit = fit_exponential([1.0, 3.0])
    first, second = 1 - math.exp(-0.5), 1 - math.exp(-1.5)
    assert fit.ks_distance == pytest.approx(max(first, 0.5 - first, second - 0.5, 1 - second))
    assert fit.survival_rmse == pytest.approx(math.sqrt(((0.25 - first) ** 2 + (0.75 - second) ** 2) / 2))


def test_hazard_is_constant_for_an_exponential_law_and_falls_or_rises_for_others():
    edges = np.array([0.0, 2, 4, 8, 16, 32])
    for shape, ratio in ((1.0, 1.0), (0.5, 0.5), (3.0, 4.0)):
        gaps = np.diff(draw_failures(10, 400_000, 1, 0, shape).hours)
        hazard, spent = hazard_by_age(gaps, edges)
        assert spent.sum() == pytest.approx(np.minimum(gaps, 32).sum())
        assert (hazard * spent).sum() == pytest.approx((gaps < 32).sum())
        if shape == 1:
            np.testing.assert_allclose(hazard, 0.1, rtol=0.05)
        else:
            assert hazard[-1] / hazard[0] < ratio if shape < 1 else hazard[-1] / hazard[0] > ratio
    assert math.isnan(hazard_by_age(np.array([1.0]), np.array([0.0, 1, 2]))[0][1])


def some_failures(hours, node, cause=None, nodes=4):
    cause = np.zeros(len(hours)) if cause is None else np.array(cause)
    return Failures(np.array(hours), np.array(node), cause.astype(np.int32), ("disk", "cable"), nodes, 10.0)


def test_failures_of_the_same_time_are_one_and_nodes_can_be_chosen():
    failures = some_failures([1.0, 1.0, 1.0, 5.0], [2, 0, 2, 3])
    hours, count = interruptions(failures)
    assert hours.tolist() == [1, 5] and count.tolist() == [2, 1]
    chosen = of_nodes(failures, np.array([3, 2]))
    assert chosen.hours.tolist() == [1, 1, 5] and chosen.node.tolist() == [1, 1, 0] and chosen.nodes == 2
    unknown = of_nodes(failures._replace(node=np.array([-1, 0, -1, 3])), np.arange(4))
    assert unknown.hours.tolist() == [1, 5]


def test_rates_by_cause_and_by_node():
    failures = some_failures([1.0, 2, 3, 4, 5], [0, 0, 0, 0, 1], [1, 1, 0, 1, 1])
    assert failure_nodes.mtbf_by_cause(failures) == {"cable": 2.5, "disk": 10}
    assert failure_nodes.share_of_worst_nodes(failures, 0.25) == 0.8
    assert failure_nodes.share_of_worst_nodes(failures, 1.0) == 1.0
    even = draw_failures(1, 10_000, 10, 0)
    assert failure_nodes.share_of_worst_nodes(even, 0.5) == pytest.approx(0.5, abs=0.03)


@given(nodes=st.integers(1, 1000), chance=st.floats(1e-6, 0.5))
def test_mtbf_over_nodes(nodes, chance):
    alone = failure_nodes.independent_mtbf(chance, 1)
    assert alone == pytest.approx(1 / chance) and failure_nodes.linear_mtbf(alone, 1) == alone
    many = failure_nodes.independent_mtbf(chance, nodes)
    assert many == pytest.approx(1 / (1 - (1 - chance) ** nodes), rel=1e-6)
    assert many >= max(1, failure_nodes.linear_mtbf(alone, nodes)) * (1 - 1e-9)


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
def test_infinitehbd_is_read_piece_by_piece(tmp_path, indent, suffix):
    events = list(events_of(1000))
    found = load_infinitehbd(write(tmp_path / f"trace.json{suffix}", json.dumps(events, indent=indent)), nodes=60)
    starts = [event for event in events if event["event_type"] == "fault_start"]
    assert found.hours.tolist() == [event["event_time"] * 24 for event in starts]
    assert [found.causes[c].split(": ")[1] for c in found.cause] == [event["fault_type"]["Class"] for event in starts]
    same_node = lambda names: [names.index(name) for name in names]
    assert same_node(found.node.tolist()) == same_node([event["node_id"] for event in starts])
    assert found.nodes == 60 and found.span_hours == pytest.approx(24 * events[-1]["event_time"])


def test_a_large_trace_is_read_in_little_memory(tmp_path):
    some = json.dumps(list(events_of(2000)), indent=4)[1:-1]
    path = write(tmp_path / "trace.json.gz", "[" + ",".join([some] * 10) + "]")  # 5 MB of text
    tracemalloc.start()
    found = load_infinitehbd(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.hours) > 10_000 and peak < 3e6


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
    assert [found.causes[c] for c in found.cause] == ["Hardware", "Software", "Unknown"]
    assert found.nodes == 4 and found.span_hours == 25.5


def changed(row, **fields):
    return [fields.get(name.replace(" ", "_"), value) for name, value in zip(COLUMNS, row, strict=True)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*GOOD, GOOD[1][:-1]], "line 6: 11 fields, wanted 12"),
        ([*GOOD, changed(GOOD[1], Prob_Started="2005-06-21")], "line 6: time data '2005-06-21'"),
        ([GOOD[1], changed(GOOD[1], nodenumz="x1")], "line 3: invalid literal .*'x1'"),
        ([GOOD[1], changed(GOOD[1], nodes="99999999")], "line 3: nodenumz=3 and nodes=99999999"),
        ([GOOD[0]], "system=20 has no failure there, but these have: 2"),
        ([*GOOD, [*GOOD[1][:-1], "x" * 200_000]], "line 6: longer than 65536 characters"),
        ([GOOD[0], ["2"] * 12 + ["line\nbreak"], *GOOD], "line 3: 13 fields"),
        ([GOOD[0], [*GOOD[1][:-1], "line\n" * 40_000]], "line 3: field larger than field limit"),
    ],
)
def test_bad_lanl_lines_are_named(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        load_lanl(lanl(tmp_path / "failures.csv", rows), 20)


def test_a_table_without_the_columns_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"line 1: columns \['Prob Started'\] are missing"):
        load_lanl(lanl(tmp_path / "failures.csv", [], [c for c in COLUMNS if c != "Prob Started"]), 20)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace('"event_time"', '"time"', 1), "line 2: .*KeyError: 'event_time'"),
        (lambda text: text.replace('"fault_', '"bad_', 1), "line 2: event_type='bad_"),
        (lambda text: text.replace('"event_time": ', '"event_time": -', 1), "line 2: .*event_time=-"),
        (lambda text: text.replace('"node_id": ', '"node_id" ', 1), "line 3: Expecting ':'"),
        (lambda text: text[:-2], "the file ends within its JSON array"),
        (lambda text: text.replace("},\n    {", "}\n    {", 1), "line 12: '' before an event"),
        (lambda text: "[]", "0 nodes have faults"),
        (lambda text: "", "the file ends"),
    ],
)
def test_bad_infinitehbd_files_are_named(tmp_path, damage, message):
    text = json.dumps(list(events_of(300)), indent=4)
    with pytest.raises(ValueError, match=message):
        load_infinitehbd(write(tmp_path / "trace.json", damage(text)))


def test_damaged_packing_is_named(tmp_path):
    path = write(tmp_path / "trace.json.gz", json.dumps(list(events_of(1000)), indent=4))
    for content, message in ((path.read_bytes()[:-2000], "after line [1-9]"), (b"no gzip", "after line 0")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_infinitehbd(path)
    (tmp_path / "bad.csv.xz").write_bytes(b"no xz")
    with pytest.raises(ValueError, match="damaged"):
        load_lanl(tmp_path / "bad.csv.xz", 20)


def test_more_nodes_than_the_cluster_has_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nodes have faults, nodes=3"):
        load_infinitehbd(write(tmp_path / "trace.json", json.dumps(list(events_of(300)))), nodes=3)


def test_real_infinitehbd(real_data):
    path = real_data / "failures" / "infinitehbd_fault_trace.json.gz"
    found = load_infinitehbd(path)
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file) if event["event_type"] == "fault_start"]
    assert found.hours.tolist() == [event["event_time"] * 24 for event in events] and len(events) == 584
    assert len(np.unique(found.node)) == 231 and found.nodes == 400
    gaps = np.diff(interruptions(found)[0])
    fit = fit_gamma(gaps)
    assert len(gaps) == 528 and fit.shape == pytest.approx(0.4895, abs=1e-4) and fit.ks_distance < fit.ks_limit
    assert fit.survival_rmse == pytest.approx(0.01084, abs=1e-5) and fit_exponential(gaps).survival_rmse > 0.1


@pytest.mark.parametrize(
    ("system", "failures", "nodes", "shape"),
    [(18, 3997, 1024, 0.7541), (19, 3284, 1024, 0.8598), (20, 2478, 512, 0.527)],
)
def test_real_lanl(real_data, system, failures, nodes, shape):
    found = load_lanl(real_data / "failures" / "lanl_1996_2005.csv.xz", system)
    assert len(found.hours) == failures and found.nodes == nodes and (found.node >= 0).all()
    assert fit_gamma(np.diff(interruptions(found)[0])).shape == pytest.approx(shape, abs=1e-4)


def test_the_experiment_says_what_is_modelled_and_what_emulated(tmp_path):
    found = cpr_scalability.main(cpr_scalability.Config(preset="smoke", workdir=tmp_path))
    assert "never measured" in found["overhead_is"] and found["failures_are"] == "drawn"
    for setting in "ab":
        assert found[f"setting_{setting}_failures"] >= 20_000
        for mode in ("full", "partial"):
            assert abs(found[f"setting_{setting}_{mode}_emulated_minus_modelled_points"]) < 0.1
    overheads = {key for key in found if "_percent" in key and ("full" in key or "partial" in key)}
    assert overheads and all("modelled" in key or "emulated" in key for key in overheads)
    assert found["infinitehbd_like_all_nodes_full_percent_emulated"] > 10
    assert found["infinitehbd_like_all_nodes_partial_percent_emulated"] < 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draw_failures(0, 56, 8, 0), "mtbf_hours=0"),
        (lambda: draw_failures(28, math.inf, 8, 0), "horizon_hours=inf"),
        (lambda: draw_failures(28, 56, 8, 0, shape=-1), "shape=-1"),
        (lambda: draw_failures(28, 56, 8, 0, failed_nodes=9), "failed_nodes=9"),
        (lambda: place_failures(-1, 56, 8, 0), "number=-1"),
        (lambda: of_nodes(some_failures([1.0], [0]), np.array([1, 1])), "2 chosen nodes"),
        (lambda: of_nodes(some_failures([1.0], [0]), np.array([4])), "from 0 to 3"),
        (lambda: of_nodes(some_failures([1.0], [0]), np.array([], int)), "0 chosen nodes"),
        (lambda: failure_nodes.share_of_worst_nodes(some_failures([1.0], [0]), 0), "portion=0"),
        (lambda: failure_nodes.linear_mtbf(-1, 2), "node_mtbf_hours=-1"),
        (lambda: failure_nodes.independent_mtbf(1, 2), "chance_per_hour=1"),
        (lambda: fit_gamma([1.0]), "1 gaps"),
        (lambda: fit_gamma([1.0, 0.0]), "the smallest 0.0"),
        (lambda: fit_gamma([2.0, 2.0, 2.0]), "gaps that differ"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
