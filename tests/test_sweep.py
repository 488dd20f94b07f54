"""Sweeps run every combination once, compare within seeds, and resume where they stopped."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import all_three
import demo
import models
import numpy as np
import pytest
import sweep
from main import children
from main.cli import paired_interval
from main.signals import Stopped, stop_on_signals
from trained_run import criteo_lines, write_lines

from jaxrec.data import criteo
from jaxrec.data.tabular import open_table

SCRIPT = Path(__file__).parent.parent / "experiments" / "sweep.py"
TINY = ("rows=500", "batch-size=64", "steps=4", "evaluations=2", "embedding-width=4", "model=small_dlrm")
FLAGS = {"preset": "smoke", "vary": ("row-learning-rate=0.02,0.5",), "fixed": TINY, "seeds": 2}


def test_arms_are_all_combinations_in_order():
    arms = sweep.arms_of(["model=lr,fm", "row_learning_rate=0.1,0.2,0.3"])
    assert len(arms) == 6 and next(iter(arms)) == "model=lr row-learning-rate=0.1"
    assert arms["model=fm row-learning-rate=0.3"] == ["--model", "fm", "--row-learning-rate", "0.3"]


def test_differences_are_within_seeds():
    """Variation that all arms of a seed share is not noise."""
    common = np.random.default_rng(0).standard_normal(5)
    found = sweep.summary({"a": list(common), "b": list(common + 0.1 + 0.001 * np.arange(5))})
    assert found["b_minus_first"] == pytest.approx(0.102) and found["b_minus_first_half_width"] < 0.003
    assert found["b_deviation"] > 0.3
    alone = sweep.summary({"a": [0.5], "b": [0.75]})
    assert alone["b_minus_first"] == 0.25 and alone["b_minus_first_half_width"] is None and alone["a_deviation"] is None


def test_an_interval_over_seeds_that_share_test_sets_holds_its_share():
    """And that of seeds taken as independent does not: a test set moves all of its seeds."""
    rng, seeds, inside = np.random.default_rng(0), range(25), np.zeros(2)
    for _ in range(2000):
        differences = rng.standard_normal(5)[np.arange(25) % 5] + rng.standard_normal(25)
        for at, (mean, half) in enumerate(
            [paired_interval(differences, seeds, test_sets=5), paired_interval(differences)]
        ):
            inside[at] += abs(mean) < half
    assert 0.935 < inside[0] / 2000 < 0.965 and inside[1] / 2000 < 0.8


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"vary": ()}, "--vary is needed"),
        ({"vary": ("model",)}, "'model' is no flag with values"),
        ({"vary": ("=lr",)}, "'=lr' is no flag with values"),
        ({"vary": ("seed=0,1",)}, "gives --seed itself"),
        ({"vary": ("model=lr,fm", "model=dnn")}, "model is given twice"),
        ({"fixed": ("workdir=a",)}, "gives --workdir itself"),
        ({"fixed": ("--preset=smoke",)}, "gives --preset itself"),
        ({"fixed": ("shuffle",)}, "--fixed 'shuffle' is no flag"),
        ({"metric": "gauc"}, "--metric gauc is unknown: give one of validation_auc, .*test_log_loss.*examples_per_s"),
        ({"metric": "test_examples"}, "--metric test_examples is unknown"),
        ({"metric": "validation_gauc"}, "validation_gauc is the mean AUC within groups: give --fixed group=FIELD"),
        (
            {"fixed": ("data=criteo", "path=x")},
            "validation_auc wants a validation set, and row-learning-rate=0.02 has none",
        ),
        ({"fixed": ("data=tabular", "path=nowhere")}, "nowhere is no complete dataset"),
        ({"vary": ("model=dlrm,none",), "fixed": TINY[:-1]}, "model=none: model='none' must be one of"),
        ({"vary": ("model=lr,dlrm",), "fixed": (*TINY[:-1], "layers=8")}, "model=lr: model='lr' has no towers"),
        ({"fixed": ("path=x",), "path": (Path("y"),)}, "--path and path=... are two ways to name the data"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_is_trained(tmp_path, flags, words):
    with pytest.raises(ValueError, match=words):
        sweep.main(sweep.Config(workdir=tmp_path / "s", **(FLAGS | flags)))
    assert not (tmp_path / "s").exists()


def test_seeds_take_splits_in_turn_and_intervals_are_over_splits(tmp_path, monkeypatch):
    seen = []

    def trained(run, name, words, flags, asked, env):
        given = {flag: flags[place + 1] for place, flag in enumerate(flags) if flag.startswith("--")}
        seen.append((given["--model"], int(given["--seed"]), given["--path"]))
        auc = 0.5 + 0.1 * (given["--path"] == "b") + 0.001 * seen[-1][1] * (given["--model"] == "fm")
        return {"test_auc": auc, "validation_auc": auc}

    monkeypatch.setattr(sweep, "trained", trained)
    fixed, path = ("data=criteo", "validation-fraction=0.1"), (Path("a"), Path("b"))
    found = sweep.main(sweep.Config(vary=("model=lr,fm",), fixed=fixed, path=path, seeds=4, workdir=tmp_path))
    assert seen == [(model, seed, "ab"[seed % 2]) for model in ("lr", "fm") for seed in range(4)]
    half = paired_interval([0, 0.001, 0.002, 0.003], range(4), 2)[1]
    assert found["model=fm_minus_first_half_width"] == pytest.approx(half)
    assert found["chosen_test_auc_half_width"] == pytest.approx(paired_interval([0.501, 0.602])[1])


def of_arms(**found):
    """{arm: results of two seeds} for {arm: (validation AUC, test AUC, validation log loss) of both}."""
    names = "validation_auc", "test_auc", "validation_log_loss", "examples_per_s"
    return {arm: [dict(zip(names, (*its, 1.0), strict=True)) for its in seeds] for arm, seeds in found.items()}


def test_the_validation_chooses_and_the_test_set_is_shown_of_the_chosen_arm_alone():
    found = of_arms(a=[(0.6, 0.9, 0.5), (0.6, 0.9, 0.5)], b=[(0.7, 0.55, 0.6), (0.7, 0.56, 0.6)])
    by_auc = sweep.chosen(found, "validation_auc")
    assert by_auc["chosen"] == "b" and by_auc["chosen_test_auc"] == pytest.approx(0.555)
    assert sweep.said_of({"metric": "validation_auc"} | by_auc).startswith("chosen: b, whose test_auc is 0.56 (0.49 ")
    assert sweep.chosen(found, "test_auc") == {"chosen": "a"}
    assert "flatters" in sweep.said_of({"metric": "test_auc", "chosen": "a"})
    assert sweep.chosen(found, "examples_per_s")["chosen"] == "a"  # the first of equals
    with pytest.raises(
        ValueError, match="pls is no number of results.json: give one of validation_auc, .*with --resume"
    ):
        sweep.chosen(found, "pls")


@pytest.mark.parametrize("metric", [*sweep.METRICS, "validation_like_auc", "test_like_log_loss", "test_price_mae"])
def test_the_better_direction_of_each_metric_is_known(metric):
    found = {
        arm: [{metric: value, metric.replace("validation", "test"): value}] for arm, value in (("a", 0.1), ("b", 0.2))
    }
    less = (
        "log_loss",
        "normalized_entropy",
        "rmse",
        "mae",
        "seconds",
        "percent",
        "stall_s",
        "share",
        "gap_steps",
        "spread",
        "pls",
    )
    assert sweep.chosen(found, metric)["chosen"] == ("a" if metric.endswith((*less, "lost_steps")) else "b")


@pytest.mark.slow
def test_a_sweep_trains_compares_gains_arms_and_trains_nothing_twice(tmp_path, capsys):
    config = sweep.Config(workdir=tmp_path, **FLAGS)
    found = sweep.main(config)
    said = capsys.readouterr().out
    read = lambda: {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/results.json")}
    times = lambda: {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/results.json")}
    runs, before = read(), times()
    assert sorted(runs) == [f"row-learning-rate={rate}_{seed}" for rate in ("0.02", "0.5") for seed in (0, 1)]
    of = lambda rate, metric: np.array([read()[f"row-learning-rate={rate}_{seed}"][metric] for seed in (0, 1)])
    auc = {rate: of(rate, "validation_auc") for rate in ("0.02", "0.5")}
    assert found["row-learning-rate=0.5_mean"] == pytest.approx(auc["0.5"].mean())
    assert found["row-learning-rate=0.5_minus_first"] == pytest.approx((auc["0.5"] - auc["0.02"]).mean())
    best = max(auc, key=lambda rate: auc[rate].mean())
    assert found["chosen"] == f"row-learning-rate={best}"
    assert found["chosen_test_auc"] == pytest.approx(of(best, "test_auc").mean())
    assert "minus the first" in said and said.count("test_auc") == 1
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {f"{row['arm']}_{row['seed']}": row["test_auc"] for row in rows} == {
        name: run["test_auc"] for name, run in runs.items()
    }
    (tmp_path / "results.json").unlink()
    again = dataclasses.replace(config, resume=True)
    assert sweep.main(again) == found
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(rows) == 4
    by_loss = sweep.main(dataclasses.replace(again, metric="test_log_loss"))
    assert by_loss["row-learning-rate=0.02_mean"] == pytest.approx(of("0.02", "test_log_loss").mean())
    more = sweep.main(dataclasses.replace(again, vary=("row-learning-rate=0.02,0.1,0.5",), seeds=1))
    assert more["row-learning-rate=0.1_mean"] == read()["row-learning-rate=0.1_0"]["validation_auc"]
    assert {path: at for path, at in times().items() if path in before} == before and len(times()) == 5


def test_a_flag_that_train_does_not_know_is_named_before_anything_is_trained(tmp_path, capsys):
    with pytest.raises(SystemExit):
        sweep.main(sweep.Config(workdir=tmp_path / "a", **(FLAGS | {"vary": ("learnin-rate=1,2",)})))
    assert "--learnin-rate" in capsys.readouterr().err and not (tmp_path / "a").exists()


def test_why_a_run_has_failed_is_quoted_from_its_log(tmp_path):
    script = "print('error: an earlier one'); print('error: no rows'); print('bye'); raise SystemExit(3)"
    with open(tmp_path / "a.log", "w") as log, stop_on_signals("go on") as asked:
        with pytest.raises(OSError, match="an arm ended with code 3, see .*a.log: error: no rows; go on"):
            children.run_child([sys.executable, "-c", script], "an arm", asked, None, log)


@pytest.mark.parametrize(
    ("module", "flags"), [(sweep, FLAGS), (models, {}), (demo, {}), (all_three, {"quality": True})]
)
def test_a_signal_before_a_run_has_begun_says_how_to_go_on_too(tmp_path, monkeypatch, module, flags):
    monkeypatch.setattr(children, "run_child", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped, match=f"SIGTERM: go on with .*{tmp_path}.* --resume"):
        module.main(module.Config(**{"preset": "smoke", "workdir": tmp_path / "a"} | flags))


@pytest.mark.slow
def test_a_signal_stops_the_run_that_goes_on_later(tmp_path):
    words = ["--preset", "smoke", "--seeds", "1", "--workdir", str(tmp_path)]
    words += ["--vary", *FLAGS["vary"], "--fixed", *TINY]
    process = subprocess.Popen([sys.executable, str(SCRIPT), *words], stderr=subprocess.PIPE, text=True)
    log = tmp_path / "row-learning-rate=0.02_0.log"
    while not log.exists():  # created when the first run begins
        assert process.poll() is None
        os.sched_yield()
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM and "--resume" in error
    assert not [line for line in os.popen("ps -eo args") if str(tmp_path) in line and "train.py" in line]
    done = subprocess.run([sys.executable, str(SCRIPT), *words, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("*/results.json"))) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"data": "criteo"}, "--data criteo needs --path"),
        ({"data": "criteo", "path": (Path("/nowhere"),)}, "--data criteo needs --path"),
        ({"binned": Path("train.txt")}, "--binned is for --data criteo"),
    ],
)
def test_models_that_cannot_be_compared_are_refused(tmp_path, flags, words):
    with pytest.raises(ValueError, match=words):
        models.main(models.Config(workdir=tmp_path / "m", **flags))
    assert not (tmp_path / "m").exists()


def test_integers_in_buckets_have_the_splits_of_the_other_models(tmp_path):
    raw = write_lines(tmp_path / "train.txt", criteo_lines(240))
    like = [tmp_path / f"split_{seed}" for seed in (3, 4)]
    for seed, directory in enumerate(like, start=3):
        criteo.prepare([raw], directory, split="random", hash_cap=50, seed=seed)
    for one, binned in zip(like, models.prepared_in_buckets(raw, like, tmp_path), strict=True):
        for split in ("train", "test"):
            plain, own = criteo.open_split(one, split), open_table(binned, split)
            assert [block["label"].ravel().tolist() for block in own] == [b["label"].tolist() for b in plain]
        assert own.metadata["cardinalities"] == [len(models.BUCKETS) + 2] * 13 + [50] * 26
        assert own[0]["dense"].shape[1] == 0


@pytest.mark.slow
def test_models_are_compared_on_the_same_rows(tmp_path, capsys):
    sizes = {"preset": "smoke", "rows": 500, "steps": 4, "curved": 0.5}
    found = models.main(models.Config(models=("lr", "deepfm"), seeds=1, workdir=tmp_path, **sizes))
    runs = {name: json.loads((tmp_path / f"{name}_0" / "results.json").read_text()) for name in ("lr", "deepfm")}
    assert {name: run["test_auc"] for name, run in runs.items()} == {n: found[f"{n}_0_auc"] for n in runs}
    assert runs["lr"]["teacher_auc"] == runs["deepfm"]["teacher_auc"]  # the same clicks
    assert found["shallow_below_deep"] == (found["lr_mean"] < found["deepfm_mean"])
    assert "LR and FM below every deep model" in capsys.readouterr().out
