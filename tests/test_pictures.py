"""Reports and pictures of the experiments: no figure is omitted, titles follow from the results, nothing overlaps."""

import itertools
import math
import re
import sys
import types

import cluster_failures
import cpr_overhead
import cpr_real_cost
import cpr_scalability
import evaluate
import matplotlib.figure
import models
import numpy as np
import oac_throughput
import pytest
import retrieval
import shadowsync_isolation
import shadowsync_quality
import shadowsync_scaling
import throughput
from hypothesis import given, settings
from hypothesis import strategies as st
from main.plots import FILLS, apart, bars, identical, plot, stacked_bars, ticks
from main.report import Figure, figures, grid, listing
from studies import recovery_overheads
from studies.shadow_protocol import Point

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
    results |= {"loss": 5.0, "loss_half_interval": 1.0, "error_max": 7.0, "auc": 0.5, "auc_half_width": 0.1, "slow": 1}
    found = figures(results)
    assert (
        found["a_over_b_x"] == (2.0, 1.0, 3.0) and found["loss"] == (5.0, 4.0, 6.0) and found["auc"] == (0.5, 0.4, 0.6)
    )
    assert found.keys() == {"a_over_b_x", "loss", "error_max", "auc", "slow"}


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


# ---- pictures


def with_interval(key, value, half, end=""):
    """A flat result with the ends of its interval."""
    return {f"{key}{end}": value, f"{key}_low{end}": value - half, f"{key}_high{end}": value + half}


def of_isolation(back_to_back=0.97, foreground=0.5):
    rates = {"blocked": 0.99, "foreground": foreground, "shadow_back_to_back": back_to_back, "shadow_pace_0.2_s": 1.0}
    results = {"rule": "ma", "average_sync_gap_blocked": None, "average_sync_gap_foreground": 5.0}
    results |= {"average_sync_gap_shadow_back_to_back": 1.02, "average_sync_gap_shadow_pace_0.2_s": 3.3}
    for way, rate in rates.items():
        results |= with_interval(f"{way}_over_no_sync", rate, 0.03)
    return results


ARMS = ["none", "all_reduce", *(f"fr_{rule}_{k}" for rule in ("easgd-symmetric", "ma", "bmuf") for k in (5, 30))]
ARMS += [f"s_{rule}" for rule in ("easgd-symmetric", "easgd-sequential", "ma-lerp", "ma-delta", "bmuf-delta")]


def of_quality(*numbers):
    results = {"seeds": 5, "auc_change_one_replica_trainers_1": 0.0}
    for n, (place, arm) in itertools.product(numbers, enumerate(ARMS)):
        at = f"{arm}_trainers_{n}"
        results |= {f"auc_change_{at}": -1e-4 * n * (20 - place), f"auc_change_half_interval_{at}": 2e-4}
        results |= {f"relative_ne_percent_{at}": 0.1 * place, f"relative_ne_percent_half_interval_{at}": 0.05}
        if arm.startswith("s_"):
            results |= {f"auc_over_foreground_{at}": 3e-4 - 1e-4 * place, f"best_foreground_of_{at}": "fr_ma_5"}
            results[f"auc_over_foreground_half_interval_{at}"] = None if n == 20 else 2e-4
    return results


def of_scaling(kind):
    """Rows of one kind and their flat results: the foreground flattens at 14 and 28 trainers."""
    rows = {}
    for (way, servers), n in itertools.product(shadowsync_scaling.LINES, (1, 2, 4, 8, 16, 32, 64, 1000)):
        most = min(n, 7 * servers) if way == "fr_easgd_5" else n
        row = {"examples_per_s": 2e4 * most, "of_ideal": most / n, "average_sync_gap": 5.0 + n / 8}
        rows[Point(way, n, servers, 0.1, 0.1, 0, (4,), 1.0)] = row
    return rows, shadowsync_scaling.flat(kind, rows)


def of_modes(*labels, windows=()):
    """Names of modes by label, and their flat results."""
    names = ["sync", "semisync", "async", "oac"]
    if windows:
        names = ["sync", *(f"{mode}_window_{w}" for mode in ("async", "oac") for w in windows)]
    results = {}
    for place, (label, name) in enumerate(itertools.product(labels, names)):
        results |= with_interval(f"examples_per_s_{name}", 2e4 + 500 * place, 900.0, f"_{label}")
        results |= with_interval(f"{name}_over_sync", 1 + 0.05 * place, 0.04, f"_{label}")
    return dict.fromkeys(labels, names), results


def of_gpu():
    """Content of the files of `oac` and `oac_wide`, with a point of one round."""
    results = {"oac_4_rate_over_sync_width_16_batch_65536": 9.0, "oac_4_rate_over_sync_low_width_16_batch_65536": None}
    for place, way in enumerate(("semisync", "async_4", "oac_4", "oac_1", "oac_4_skip_both")):
        for more, point in enumerate(("width_16_batch_4096", "batch_16384_tables_10_width_128_rows_9_table_gb_64.0")):
            results |= with_interval(f"{way}_rate_over_sync", 0.5 + 0.2 * place + 0.9 * more, 0.04, f"_{point}")
            results |= with_interval(f"{way}_rate_over_async_4", 7.0, 0.04, f"_{point}")
    return {"results": results, "environment": {"device": "A card", "date": "2026-01-02", "commit": "1234567"}}


def of_accuracy(**non_inferior):
    results = {"seeds": 3}
    for place, scheme in enumerate(("vanilla", "scar", "mfu", "ssu")):  # a run without `random`
        results |= {f"cpr_{scheme}_test_auc_loss": 3e-4 - 2e-4 * place}
        results |= {f"cpr_{scheme}_test_auc_loss_half_interval": 2e-4}
    return results | {f"non_inferior_{scheme}": said for scheme, said in non_inferior.items()}


def of_slopes():
    slopes = {"vanilla_slope": 0.0062, "mfu_slope": 0.0018, "vanilla_slope_ne": 0.01, "mfu_slope_ne": 0.002}
    return slopes | {"mfu_slope_minus_vanilla": -0.0044, "mfu_slope_minus_vanilla_half_interval": 0.0017}


def of_saves():
    over = with_interval("rows_over_fastest_orbax_save", 0.234, 0.04)
    return over | with_interval("one_shard_over_full_restore", 0.076, 0.01)


def of_nodes():
    results = {}
    for place, n in enumerate(cpr_scalability.COUNTS):
        for line, percent in (("full", 9.0), ("partial", 2.78), ("partial_shard_load", 0.25)):
            results[f"linear_mtbf_{n}_nodes_{line}_percent_modelled"] = percent * (place + 1)
    return results


def of_kills():
    results = {}
    for place, arm in enumerate(arm for arm in recovery_overheads.ARMS if arm != "none"):
        results |= {f"{arm}_overhead_percent": 130.0 - 20 * place, f"{arm}_kills": 3, f"{arm}_lost_steps": 0}
        for part in (*recovery_overheads.PARTS, "saving"):
            results |= {f"{arm}_{part}_s_median": 0.5, f"{arm}_{part}_percent": 12.5 + place}
    return results | {"full_lost_steps": 191}


def of_throughput(end="", peers=True):
    results = {"step_ms": 60.3, "plan_read_put_share_of_step": 0.085, "examples_per_s": 34_000.0, "gemm_ms": 46.0}
    results |= {"plan_ms": 2.2, "read_ms": 1.9, "update_ms": 59.5, "put_ms": 1.1}
    for name, over in (("torch_unique", 1.26), ("torch_compiled", 1.44), ("torch", 1.26), ("fbgemm", 1.3)):
        results |= with_interval(f"jaxrec_over_{name}", over, 0.04) if peers else {}
    return {f"{key}{end}": value for key, value in results.items()}


def of_models(fm, teacher=None):
    means = {"lr": 0.755, "fm": fm, "dnn": 0.761, "dlrm": 0.758}
    results = {"first": "lr", "seeds": 3} | {f"{model}_mean": mean for model, mean in means.items()}
    for model in ("fm", "dnn", "dlrm"):
        results |= {f"{model}_minus_first": means[model] - 0.755, f"{model}_minus_first_half_width": 0.001}
    results |= {} if teacher is None else {"teacher_auc_mean": teacher}
    return results | models.verdict(results, tuple(means))


def of_retrieval(**recall):
    recall = {"corrected": 0.143, "oac": 0.143, "teacher": 0.153, "popularity": 0.093, "chance": 0.005} | recall
    results = {"seeds": 3, "corrected_minus_popularity_recall_at_10": 0.0502}
    results["corrected_minus_popularity_half_interval_recall_at_10"] = 0.0084
    for way, value in recall.items():
        for metric in ("recall_at_10", "recall_at_100", "mrr"):
            results |= {f"{way}_{metric}": value, f"{way}_deviation_{metric}": 0.01}
    return results


# Results and the sentence that follows from them; the second of a pair has other results and another sentence.
FINDINGS = {
    "isolation": (
        lambda: shadowsync_isolation.finding(of_isolation()),
        "Beside a shadow training keeps 0.97 to 1.00 of its rate without sync, beside a blocked one 0.990 (0.960 to "
        "1.020), with sync in the foreground every 5 steps 0.500 (0.470 to 0.530)",
    ),
    "isolation, a shadow that costs": (
        lambda: shadowsync_isolation.finding(of_isolation(back_to_back=0.6))[:38],
        "Beside a shadow training keeps 0.60 to",
    ),
    "quality": (
        lambda: shadowsync_quality.finding(of_quality(8)),
        "8 trainers, 5 seeds, test AUC over that of one replica: without sync -0.0160, with s_bmuf-delta, the best "
        "shadow, -0.00640, with fr_bmuf_30, the best in the foreground, -0.0104",
    ),
    "quality, of the most trainers": (lambda: shadowsync_quality.finding(of_quality(1, 20, 8))[:11], "20 trainers"),
    "scaling": (
        lambda: shadowsync_scaling.finding(of_scaling("simulated")[1], "simulated"),
        "Simulated: FR-EASGD-5 gets to the rate of 14.0 trainers with 2 servers, and of 28.0 with 4. In the background "
        "the sync gap is 130.0 steps with 1000 trainers",
    ),
    "scaling, measured": (
        lambda: shadowsync_scaling.finding_measured(MEASURED),
        "Measured: 2 trainers with s_ma-delta reach 0.800 (0.760 to 0.840) of 2 times the rate of one; those "
        "that do not synchronise 0.860 (0.820 to 0.900)",
    ),
    "modes": (
        lambda: oac_throughput.finding(*reversed(of_modes("balanced_link", "no_link"))),
        "OAC has the results of sync. Its rate over that of sync, link as slow as compute: 1.150 (1.110 to 1.190); no "
        "link: 1.350 (1.310 to 1.390)",
    ),
    "modes, windows": (
        lambda: oac_throughput.finding(*reversed(of_modes("remote", windows=(2, 4)))),
        "OAC has the results of sync. Its rate over that of sync, rows at servers, window 4: 1.200 (1.160 to 1.240)",
    ),
    "over sync": (
        lambda: oac_throughput.finding_over_sync(of_modes("balanced_link", "no_link")[1]),
        "OAC, with the results of sync, has 1.15 of its rate over a link as slow as compute and 1.35 without a link; "
        "async, whose rows are stale, 1.10 and 1.30",
    ),
    "on a GPU": (
        lambda: oac_throughput.finding_on_gpu(of_gpu()),
        "A card, tables in host memory, code of 2026-01-02 (commit 1234567): OAC has 1.800 (1.760 to 1.840) times the "
        "rate of sync at best, 0.900 (0.860 to 0.940) at worst",
    ),
    "accuracy": (
        lambda: cpr_overhead.finding_accuracy(of_accuracy(mfu=True, vanilla=False), 2),
        "AUC lost to 2 failures, beside a margin of 0.0005 (3 seeds): below it mfu; above it vanilla; not settled "
        "scar, ssu",
    ),
    "slopes": (
        lambda: cpr_overhead.finding_slopes(of_slopes(), ("vanilla", "mfu")),
        "AUC lost for a unit of PLS: vanilla 0.00620, mfu 0.00180. Minus vanilla's: mfu -0.0044 (-0.0061 to -0.0027)",
    ),
    "saves": (
        lambda: cpr_real_cost.finding(of_saves()),
        "Saving the most used rows takes 0.234 (0.194 to 0.274) of the time of Orbax's fastest full save; restoring "
        "one shard 0.076 (0.066 to 0.086) of that of a full restore",
    ),
    "equations": (
        lambda: cpr_scalability.finding(of_nodes()),
        "Modelled, MTBF = c / nodes: with 64 nodes full recovery costs 36.0 % of the useful time, CPR 11.1 %, and "
        "1.00 % where it loads the lost shard alone",
    ),
    "kills, full": (
        lambda: cluster_failures.finding(of_kills(), "full"),
        "full takes 130 % more time than none, and goes on 2.00 s after a server is killed (the sum of medians). At "
        "the dotted lines there are 3 kills, after which it repeats 191 steps",
    ),
    "kills, all": (
        lambda: recovery_overheads.finding_overheads(of_kills() | {"ssu_kills": 3}),
        "Measured overhead, kills in each arm: 3. ssu 70.0 %, mfu 90.0 %, vanilla 110 %, full 130 %",
    ),
    "throughput": (
        lambda: throughput.finding(of_throughput()),
        "A step takes 60.3 ms; its plan, read and put, each waited for, 8.5% of that. torch_unique, the fastest beside "
        "it, takes 1.260 (1.220 to 1.300) times as long",
    ),
    "throughput, alone": (lambda: throughput.finding(of_throughput(peers=False))[-12:], "8.5% of that"),
    "models": (
        lambda: models.finding(of_models(0.75), ("lr", "fm", "dnn", "dlrm")),
        "dnn has the best test AUC, 0.7610; lr, the best shallow one, is below dlrm, the worst deep one. Means over "
        "3 seeds",
    ),
    "models, a shallow one above": (
        lambda: models.finding(of_models(0.759, teacher=0.8), ("lr", "fm", "dnn", "dlrm")),
        "dnn has the best test AUC, 0.7610, beside 0.8000 of the teacher; fm, the best shallow one, is not below dlrm, "
        "the worst deep one. Means over 3 seeds",
    ),
    "retrieval": (
        lambda: retrieval.finding(of_retrieval()),
        "corrected ranks 14.3% of the clicked items among its first 10, 0.93 of what is best possible, and 5.0 "
        "(4.2 to 5.9) points more than popularity (paired). Seeds: 3",
    ),
}
MEASURED = with_interval("measured_efficiency_none", 0.86, 0.04, "_trainers_2")
MEASURED |= with_interval("measured_efficiency_s_easgd-symmetric_paced", 0.7, 0.04, "_trainers_2")
MEASURED |= with_interval("measured_efficiency_s_ma-delta", 0.8, 0.04, "_trainers_2")


@pytest.mark.parametrize("name", FINDINGS)
def test_a_title_says_what_follows_from_the_figures(name):
    find, sentence = FINDINGS[name]
    assert find() == sentence


# All pictures, from results.


def killer(*killed):
    times = [(0.5 * step, step) for step in range(80)]
    return types.SimpleNamespace(times=times, kills=[types.SimpleNamespace(killed=at) for at in killed])


def draw_slopes(run):
    base = {"test_auc": 0.76, "test_normalized_entropy": 0.8, "seed": 0}
    rows = [base | {"scheme": "no_failure"}]
    for scheme, pls in itertools.product(("vanilla", "mfu"), (0.1, 0.5, 1.6)):
        lost = {"realized_pls": pls, "test_auc": 0.76 - 0.005 * pls, "test_normalized_entropy": 0.8 + 0.01 * pls}
        rows.append(base | {"scheme": scheme} | lost)
    cpr_overhead.draw_slopes(run, rows, of_slopes(), ("vanilla", "mfu"))


def draw_saves(run):
    what = {f"{name}_{key}_s": 0.5 for name in cpr_real_cost.WAYS for key in ("save", "stall")}
    rows = [{key: value + round_ / 10 for key, value in what.items()} for round_ in range(5)]
    cpr_real_cost.draw(run, rows, of_saves())


def draw_calibration(run):
    results = {"calibration": 1.02, "rows": 110_000}
    for tenth in range(1, 11):
        results |= {f"tenth_{tenth}_predicted": tenth / 12} | with_interval(f"tenth_{tenth}_clicked", tenth / 13, 0.02)
    evaluate.draw(run.directory / "calibration.png", results)


def draw_scaling(run):
    for kind in ("emulated_sleep", "simulated"):
        rows, results = of_scaling(kind)
        shadowsync_scaling.draw(run, results, kind, rows)
    shadowsync_scaling.draw_measured(run.directory, MEASURED)


def draw_cluster(run):
    killers = {"none": killer()} | {arm: killer(9.0, 9.2, 30.0) for arm in recovery_overheads.ARMS if arm != "none"}
    cluster_failures.draw(run, cluster_failures.Config(batch_size=2048), killers, of_kills())


def draw_swept_throughput(run):
    config = throughput.Config(sweep="width")
    widths = throughput.SWEEPS["width"][1]
    results = {k: v for width in widths for k, v in of_throughput(f"_at_width_{width}").items()}
    throughput.draw(run, config, results)


ALL_LINKS = ("balanced_link", "link_link", "compute_link", "no_link")
PICTURES = {
    "isolation": (lambda run: shadowsync_isolation.draw(run.directory, of_isolation()), 1),
    "quality": (lambda run: shadowsync_quality.draw(run.directory, of_quality(8)), 1),
    "quality, one seed": (lambda run: shadowsync_quality.draw(run.directory, of_quality(20)), 1),
    "quality over trainers": (lambda run: shadowsync_quality.draw(run.directory, of_quality(1, 5, 10, 15, 20)), 2),
    "scaling": (draw_scaling, 3),
    "modes": (lambda run: oac_throughput.draw(run, *reversed(of_modes(*ALL_LINKS))), 2),
    "modes, servers": (lambda run: oac_throughput.draw(run, *reversed(of_modes("remote"))), 1),
    "modes, GPU": (lambda run: oac_throughput.draw_on_gpu(run.directory / "over_sync.png", of_gpu()), 1),
    "windows": (lambda run: oac_throughput.draw(run, *reversed(of_modes("remote", windows=(2, 4, 8, 16)))), 1),
    "accuracy": (lambda run: cpr_overhead.draw_accuracy(run.directory / "accuracy.png", of_accuracy(), 2), 1),
    "slopes": (draw_slopes, 1),
    "saves": (draw_saves, 1),
    "scalability": (lambda run: cpr_scalability.draw(run.directory / "scaling.png", of_nodes()), 1),
    "cluster": (draw_cluster, 5),
    "throughput": (lambda run: throughput.draw(run, throughput.Config(), of_throughput()), 1),
    "throughput, alone": (lambda run: throughput.draw(run, throughput.Config(), of_throughput(peers=False)), 1),
    "throughput, swept": (draw_swept_throughput, 1),
    "models": (lambda run: models.draw(run, of_models(0.75, teacher=0.8), ("lr", "fm", "dnn", "dlrm")), 1),
    "retrieval": (lambda run: retrieval.draw(run, of_retrieval(plain=0.02)), 1),
    "calibration": (draw_calibration, 1),
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


IN_THE_GATE = ("quality", "scaling", "modes", "saves", "throughput, swept")  # one of each kind of axes


@pytest.mark.parametrize(
    "name", [name if name in IN_THE_GATE else pytest.param(name, marks=pytest.mark.more) for name in PICTURES]
)
def test_a_picture_has_a_title_and_nothing_lies_on_anything_else(tmp_path, drawn, name):
    draw, number = PICTURES[name]
    draw(types.SimpleNamespace(directory=tmp_path))
    assert len(drawn) == number == len(list(tmp_path.glob("*.png")))
    for picture in drawn:
        assert len(picture.get_suptitle()) > 20 and not overlaps(picture)
        # In a column of 600 pixels.
        shrunk = 600 / picture.bbox.width
        smallest = min(text.get_fontsize() for text in words_in(picture) if text.get_text())
        assert smallest * picture.dpi / 72 * min(1.0, shrunk) > 8


def test_a_point_of_one_round_and_other_windows_are_not_drawn():
    rates = oac_throughput.rates_on_gpu(of_gpu()["results"])
    assert list(rates) == ["semisync", "async", "oac"]
    for mode in rates.values():
        assert list(mode) == ["width 16, batch 4,096", "width 128, batch 16,384"]


def test_words_that_lie_on_each_other_are_seen(tmp_path, drawn):
    """Negative control."""
    assert plot(tmp_path / "a.png", {"y": {"a": ([1, 2], [1.0, 2.0])}}, "x", marks=[(1.5, "killed"), (1.501, "kills")])
    assert overlaps(drawn[0]) == [("killed", "kills")]


def test_words_at_a_level_stay_below_the_legend(tmp_path, drawn):
    series = {name: {"a": 9.0} for name in ("oac", "async")}
    assert bars(tmp_path / "a.png", {"rate": series}, levels={"rate": {"sync": 0.5}})
    assert not overlaps(drawn[0]) and {text.get_text() for text in words_in(drawn[0])} > {"oac", "async", "sync"}


def test_equal_lines_are_seen_through_each_other_and_say_so(tmp_path, drawn):
    lines = {"sync": ([1, 2], [0.5, 0.6]), "async": ([1, 2], [0.5, 0.5]), "oac": ([1, 2], [0.5, 0.6])}
    assert identical(lines) == {"oac": "sync"}
    assert plot(tmp_path / "a.png", {"MRR": lines}, "epochs", "Found")
    said = {line.get_label(): line for line in drawn[0].axes[0].lines}
    assert set(said) == {"sync", "async", "oac, identical to sync"}
    assert said["oac, identical to sync"].get_linestyle() == "--" and said["sync"].get_linestyle() == "-"


def test_what_lines_are_held_against_is_drawn_and_named(tmp_path, drawn):
    lines = {"oac": ([1, 2, 3], [0.5, 0.6, Figure(0.65, 0.6, 0.7)])}
    assert plot(tmp_path / "a.png", {"AUC": lines}, "steps", levels={"AUC": {"target": 0.7, "teacher": None}})
    series = {"oac": {"a": Figure(2.0, 1.5, 2.5), "b": -1.0}}
    assert bars(tmp_path / "b.png", {"rate": series}, levels={"rate": {"sync": 1.0}, "other": {"x": 2.0}})
    of_lines, of_bars = (picture.axes[0] for picture in drawn)
    assert [line.get_ydata()[0] for line in of_lines.lines if line.get_label() == "target"] == [0.7]
    assert {text.get_text() for text in of_lines.texts} == {"oac", "target"}
    assert [line.get_xdata()[0] for line in of_bars.lines if line.get_label() == "_level"] == [1.0]
    assert [text.get_text() for text in of_bars.texts] == ["2.00", "-1.00", "sync"]
    assert all(any("95 %" in text.get_text() for text in picture.texts) for picture in drawn)


def test_bars_without_intervals_do_not_speak_of_them(tmp_path, drawn):
    assert bars(tmp_path / "a.png", {"rate": {"": {"a": 1.0}}}, "Found")
    assert not any("interval" in text.get_text() for text in drawn[0].texts)


@pytest.mark.parametrize("xs", [[], [0, 1], [5]])
def test_a_logarithmic_axis_takes_what_there_is(tmp_path, drawn, xs):
    assert plot(tmp_path / "a.png", {"rate": {"oac": (xs, xs)}}, "window", log_x=True, log_y=True)
    assert plot(tmp_path / "b.png", {"rate": {}}, "window", log_x=True, levels={"rate": {"target": 1.0}})


@pytest.mark.parametrize("most", [3, 8, 12])
def test_ticks_have_room_and_reach_both_ends(most):
    rng = np.random.default_rng(most)
    for _ in range(50):
        xs = np.unique(rng.integers(1, 2000, rng.integers(1, 30))).tolist()
        found = ticks(xs, most)
        assert set(found) <= set(xs) and (found[0], found[-1]) == (xs[0], xs[-1]) and len(found) <= most + 1
        assert min(np.diff(np.log(found)), default=9) >= np.log(xs[-1] / xs[0]) / most - 1e-9
