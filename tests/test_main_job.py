"""The main job with each of the three techniques: it learns, resumes at its last step, and reports losses."""

import dataclasses
import importlib.util
import itertools
import json
import os
import re
import signal
import types
from pathlib import Path

import evaluate
import jax
import numpy as np
import pytest
import train
from main.config import config_of
from main.recorder import check_mapping
from main.signals import Stopped
from main.table_summary import open_schema
from trained_run import SCHEMA, changed, criteo_lines, table_lines, write_lines

from jaxrec.checkpoint import images, read_manifest, read_tables, restore
from jaxrec.checkpoint.format import leaves_of, load_arrays
from jaxrec.data.criteo import prepare
from jaxrec.data.tabular import AtRandom, open_table
from jaxrec.data.tabular import prepare as prepare_table

ROOT = Path(__file__).parent.parent
TINY = config_of(
    preset="smoke", rows=500, batch_size=64, steps=24, evaluations=3, embedding_width=8, model="small_dlrm",
    learning_rate=0.01, row_learning_rate=0.1,
)  # fmt: skip
STOP_AT = 15  # the signal is sent when this batch is drawn; a pipeline has committed fewer
# Depends on execution, not on learning: a stop drains a pipeline, and a resumed run has its own sync gap.
OF_THE_WORK = {"train_seconds", "stale_share", "sync_gap_steps", "rows_saved"}

DEVICE, HOST = {"tables": "device"}, {"tables": "host"}
OAC = HOST | {"pipeline": "oac", "window": 4}
SHADOW = {"shadowsync": "easgd"}
MFU = {"cpr": "mfu", "fail": ("3:5",), "save_every_steps": 8}

slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)
# Stopped and resumed, each equals an undisturbed run bit for bit. Together they cover every placement, pipeline mode,
# rule and scheme.
EXACT = {
    "device": DEVICE,
    "sync": HOST | {"pipeline": "sync"},
    "oac": OAC,
    "easgd in the foreground": DEVICE | {"shadowsync": "easgd", "sync_every_steps": 5},
    "ma and oac": OAC | {"shadowsync": "ma", "sync_every_steps": 5},
    "full on the host": HOST | MFU | {"cpr": "full"},
    "vanilla on the device": DEVICE | MFU | {"cpr": "vanilla"},
    "mfu on the device": DEVICE | MFU,
    "mfu, easgd and oac over pinned rows": MFU
    | {"tables": "pinned", "pipeline": "oac", "shadowsync": "easgd", "sync_every_steps": 5},
    "ssu on the host": HOST | MFU | {"cpr": "ssu"},
    "scar and oac": OAC | MFU | {"cpr": "scar"},
    "full, easgd and oac": OAC | MFU | {"cpr": "full", "shadowsync": "easgd", "sync_every_steps": 5},
    "mfu and bmuf": HOST | MFU | {"shadowsync": "bmuf", "sync_every_steps": 5},
    "all three": OAC | MFU | {"shadowsync": "easgd", "sync_every_steps": 5, "monitor": "log_loss", "group": "C1"},
    "epochs, shuffled, at a schedule": OAC
    | {"steps": 8, "epochs": 3, "shuffle": True, "schedule": "cosine", "warmup_steps": 3},
}
# These resume at the step at which they stopped, but with other bits: a thread or a window starts anew.
INEXACT = {
    "semisync": HOST | {"pipeline": "semisync"},
    "async and shadow": HOST | {"pipeline": "async", "window": 4} | SHADOW,
    "shadow over device tables and mfu": DEVICE | SHADOW | MFU,
    "all three in the background": OAC | SHADOW | MFU,
    "free bmuf": HOST | {"shadowsync": "bmuf"},
    "free, with workers, in the foreground": HOST | SHADOW | {"workers": 2, "sync_every_steps": 3},
    "free, with a pace": HOST | SHADOW | {"sync_pace_seconds": 0.001, "monitor": "log_loss", "group": "C1"},
}
IN_ALL = ("all three",)  # in the gate


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Shrinks evaluations in all tests of this file."""
    look_at_few(monkeypatch)


def look_at_few(monkeypatch):
    """Validates and tests on one batch each."""
    whole = train.data_of

    def fewer(config):
        data = whole(config)
        one = lambda batches: lambda: itertools.islice(batches(), 1)
        return data._replace(validation=one(data.validation), test=one(data.test))

    monkeypatch.setattr(train, "data_of", fewer)


def change_data(patch, change):
    """Trains on `change(data)` instead of the data."""
    whole = train.data_of
    patch.setattr(train, "data_of", lambda config: change(whole(config)))


def stop_the_stream(patch, at=STOP_AT, number=signal.SIGTERM, since=0):
    """Sends a signal when training batch `at` is drawn, of an iterator that begins at `since` or later."""

    def signalled(batches, first):
        for index, batch in enumerate(batches, first):
            if index == at and first >= since:
                os.kill(os.getpid(), number)
            yield batch

    change_data(patch, lambda data: data._replace(train=lambda k: signalled(data.train(k), k)))


def stopped_and_resumed(directory, monkeypatch, flags, at=STOP_AT, since=0):
    """Runs until a signal, then resumes to the end; returns the step of the stop and the results."""
    config, begun = changed(TINY, workdir=directory, **flags), []
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="stopped and saved") as stopped:
        stop_the_stream(patch, at, since=since)
        train.main(config)
    step = int(re.search(r"saved at step (\d+)", str(stopped.value))[1])
    assert step == image_of(directory).step
    with monkeypatch.context() as patch:
        change_data(patch, lambda data: data._replace(train=lambda k: begun.append(k) or data.train(k)))
        results = train.main(changed(config, resume=True))
    assert begun[0] == step  # no batch is trained twice or skipped
    return step, results


def image_of(directory, of="checkpoints"):
    return read_manifest(max(images(directory / of), key=lambda path: read_manifest(path).step))


def rows_of(directory, but=OF_THE_WORK):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in but} for line in lines]


def arrays_of(directory, of="checkpoints"):
    image = image_of(directory, of)
    return image.step, load_arrays(image, leaves_of(image))


def differences(a, b):
    """Names of the arrays that differ in two runs' last or best images, and "metrics" if their metrics differ."""
    found = []
    for of in ("checkpoints", "best") if (a / "best").exists() else ("checkpoints",):
        (step, one), (other_step, other) = arrays_of(a, of), arrays_of(b, of)
        assert one.keys() == other.keys() and step == other_step
        found += [name for name, array in one.items() if not np.array_equal(array, other[name])]
    return found + ([] if rows_of(a) == rows_of(b) else ["metrics"])


def check_learned(directory, results, flags):
    """Checks that a run has learned and reports a figure for each enabled technique."""
    first, *_, last = rows_of(directory, but=())
    assert last["validation_auc"] > first["validation_auc"] and results["batch_size"] == 64
    assert results["last_state_saved"] and results["saves_failed"] == 0 and results["steps"] == 24 == last["step"]
    wanted = {"test_auc", "examples_per_s"} | (
        ({"stale_share"} if flags.get("pipeline") == "oac" and flags["tables"] != "pinned" else set())
        | ({"sync_gap_steps", "replica_spread"} if "shadowsync" in flags else set())
        | ({"pls", "rows_saved", "shards_failed", "lost_steps"} if "cpr" in flags else set())
    )
    assert all(np.isfinite(results[name]) for name in wanted)
    if "monitor" in flags:
        key = f"validation_{flags['monitor']}"
        best = min(rows_of(directory), key=lambda row: row[key])
        assert results["best_step"] == best["step"] == image_of(directory, "best").step and not results["stopped_early"]
        assert results[key] == best[key] and {"validation_gauc", "test_gauc"} < results.keys()
    else:
        assert not {"best_step", "stopped_early"} & results.keys() and not (directory / "best").exists()
    if "cpr" in flags:
        assert results["shards_failed"] == 1 and (results["pls"] > 0) == (flags["cpr"] != "full")
        assert (results["lost_steps"] > 0) == (flags["cpr"] == "full")
    assert (directory / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", [name if name in IN_ALL else slow(name) for name in EXACT])
def test_stopped_and_resumed_it_has_the_bits_of_an_undisturbed_run(tmp_path, monkeypatch, capsys, name):
    flags = EXACT[name]
    check_learned(tmp_path / "whole", train.main(changed(TINY, workdir=tmp_path / "whole", **flags)), flags)
    assert re.match("batches of 64 on ([28] x )?cpu; test AUC to expect: ", capsys.readouterr().out)
    step, results = stopped_and_resumed(tmp_path / "cut", monkeypatch, flags)
    assert 3 <= step < 24
    assert differences(tmp_path / "whole", tmp_path / "cut") == []
    check_learned(tmp_path / "cut", results, flags)


@pytest.mark.parametrize("name", [name if name in IN_ALL else slow(name) for name in INEXACT])
def test_where_it_is_not_deterministic_it_goes_on_from_its_step(tmp_path, monkeypatch, name):
    flags = INEXACT[name]
    step, results = stopped_and_resumed(tmp_path, monkeypatch, flags)
    assert 3 <= step < 24
    check_learned(tmp_path, results, flags)
    assert [row["step"] for row in rows_of(tmp_path)] == [8, 16, 24]
    if "free" in name:
        done = image_of(tmp_path).extra["techniques"]["trainers"]
        assert sum(done["steps"]) + done["batches_lost"] == 24
        assert done["batches_lost"] <= 2 * flags.get("workers", 1)  # in flight when the signal came


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "off"),
    [
        (EXACT["easgd in the foreground"], DEVICE | {"shadowsync": "easgd", "sync_every_steps": 100}),
        (EXACT["vanilla on the device"], EXACT["vanilla on the device"] | {"fail": ()}),
        (EXACT["mfu on the device"], EXACT["vanilla on the device"] | {"fail": ("3:2",)}),
    ],
)
def test_with_a_mechanism_off_the_bits_are_others(tmp_path, on, off):
    for name, flags in (("on", on), ("off", off)):
        train.main(changed(TINY, workdir=tmp_path / name, **flags))
    assert differences(tmp_path / "on", tmp_path / "off")


@pytest.mark.slow
def test_rounds_that_forget_their_centre_are_other_rounds(tmp_path, monkeypatch):
    flags = EXACT["easgd in the foreground"]
    train.main(changed(TINY, workdir=tmp_path / "whole", **flags))

    def forgetful(run, state, digest):
        found, *rest = resumed(run, state, digest)
        kept = found.dense.opt_state._replace(memory=state.dense.opt_state.memory)
        return found._replace(dense=found.dense._replace(opt_state=kept)), *rest

    resumed = train.resumed
    monkeypatch.setattr(train, "resumed", forgetful)
    stopped_and_resumed(tmp_path / "cut", monkeypatch, flags)
    assert differences(tmp_path / "whole", tmp_path / "cut")


# The last save determines the cost of a failure


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["full", "vanilla", "mfu"])
def test_a_failure_behind_a_stop_finds_what_was_saved_there(tmp_path, monkeypatch, scheme):
    flags = HOST | {"cpr": scheme, "fail": ("22:5",), "save_every_steps": 16}
    whole = train.main(changed(TINY, workdir=tmp_path / "whole", **flags))
    step, results = stopped_and_resumed(tmp_path / "cut", monkeypatch, flags, at=20)
    assert step > 16  # after the save to which the other run returns
    if scheme == "full":
        assert results["lost_steps"] == 22 - step < whole["lost_steps"] == 6
        assert arrays_of(tmp_path / "whole")[1].keys() == arrays_of(tmp_path / "cut")[1].keys()
        assert not [name for name in differences(tmp_path / "whole", tmp_path / "cut") if name != "metrics"]
    else:
        assert 0 < results["pls"] < whole["pls"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        DEVICE | {"cpr": "vanilla", "fail": ("24:1",), "save_every_steps": 8},
        DEVICE | {"cpr": "full", "fail": ("24:1",), "save_every_steps": 9},
        HOST | {"cpr": "full", "fail": ("1:0",), "save_every_steps": 100},
        OAC | {"cpr": "mfu", "fail": ("10:0,1,2,3,4,5,6,7",), "save_every_steps": 8},
        OAC | {"cpr": "ssu", "fail": ("23:0", "24:0"), "save_every_steps": 1},
        HOST | {"cpr": "mfu", "fail": ("5:2",), "save_every_steps": 100},
        DEVICE | {"cpr": "mfu", "fail": ("gamma",), "mtbf_steps": 6.0, "fail_shape": 0.5},
        OAC | {"cpr": "scar", "fail": ("5:2",)},
    ],
    ids=lambda flags: " ".join(f"{name} {value}" for name, value in flags.items()),
)
def test_failures_anywhere_are_survived(tmp_path, flags):
    results = train.main(changed(TINY, workdir=tmp_path, **flags))
    lost = sum(word.count(",") + 1 for word in flags["fail"])
    assert results["steps"] == 24 and results["saves_failed"] == 0
    assert results["shards_failed"] == lost if flags["fail"] != ("gamma",) else results["shards_failed"] > 0
    assert image_of(tmp_path).step == 24 and np.isfinite(results["test_auc"])


def test_a_finished_run_trains_on_as_if_it_had_been_longer(tmp_path, monkeypatch):
    flags = OAC | {"steps": 8, "shuffle": True}
    longer = changed(TINY, workdir=tmp_path / "on", epochs=3, resume=True, **flags)
    whole = train.main(changed(TINY, workdir=tmp_path / "whole", epochs=3, **flags))
    first = train.main(changed(longer, epochs=1, resume=False))
    assert first["steps"] == 8
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="stopped and saved"):
        stop_the_stream(patch, 20)
        train.main(longer)
    assert not (tmp_path / "on" / "results.json").exists()  # as they were of one epoch
    results = train.main(longer)
    assert results["steps"] == 24 and results["test_auc"] == whole["test_auc"] != first["test_auc"]
    np.testing.assert_equal(arrays_of(tmp_path / "on"), arrays_of(tmp_path / "whole"))
    assert [row["step"] for row in rows_of(tmp_path / "on")] == [3, 6, 8, 16, 24]
    assert train.main(longer) == results  # complete
    for shorter, rule in (({"epochs": 2}, "epochs 3, not 2"), ({"steps": 9}, "steps 8, not 9"), ({"seed": 3}, "seed")):
        with pytest.raises(ValueError, match=f"was begun with {rule}"):
            train.main(changed(longer, **shorter))
    assert (tmp_path / "on" / "results.json").exists()


def refused(why):
    raise ValueError(why)


def test_a_finished_run_trains_on_newer_rows_with_new_categories(tmp_path, monkeypatch):
    lines = [*table_lines(700)]
    lines = lines[:401] + [re.sub(r",u[0-4],", ",new_one,", line) for line in lines[401:]]
    days, schema = [], ("schema.py", SCHEMA)
    # Not by time, so that training rows can be held out.
    (tmp_path / schema[0]).write_text(schema[1].replace('ByTime("hour", train=0.8)', "ByRows(train=0.8)"))
    for number, part in enumerate((lines[1:401], lines[401:])):
        path = write_lines(tmp_path / f"{number}.csv", [lines[0], *part])
        days.append(tmp_path / f"day_{number}")
        onto = days[-2] if number else None
        prepare_table([path], days[-1], open_schema(str(tmp_path / schema[0])), block_rows=64, onto=onto)
    flags = {"data": "tabular", "model": "lr", "batch_size": 32, "evaluations": 2, "validation_fraction": 0.1} | OAC
    config = config_of(path=(days[0],), workdir=tmp_path / "run", **flags)
    first = train.main(config)
    with pytest.raises(ValueError, match="was begun with path"):
        train.main(changed(config, resume=True, path=(days[1],)))
    before = read_tables(tmp_path / "run" / "checkpoints", ["user", "item"])
    with pytest.raises(ValueError, match="day_0 was not prepared onto .*day_0"):
        train.main(changed(config, resume=True, path=(days[0], days[0])))
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="the files of Tuesday are damaged"):
        change_data(patch, lambda data: refused("the files of Tuesday are damaged"))
        train.main(changed(config, resume=True, path=tuple(days)))
    assert train.main(changed(config, resume=True)) == first  # the refused ones have left no trace
    results = train.main(changed(config, resume=True, path=tuple(days)))
    after = read_tables(tmp_path / "run" / "checkpoints", ["user", "item"])
    assert results["steps"] > first["steps"] and results["examples"] == 288 + 216
    assert len(after["user"]["value"]) > len(before["user"]["value"])
    split = open_table(days[1], "train")
    used = [split[block]["ids"] for block in range(len(split))]
    used = np.unique(np.concatenate([ids.ravel() for block in used for ids in (block["sparse"][:, 1], block["seen"])]))
    kept = np.setdiff1d(np.arange(len(before["item"]["value"])), used)
    np.testing.assert_array_equal(after["item"]["value"][kept], before["item"]["value"][kept])
    assert len(kept) > 3 and (after["item"]["value"][used[used >= 0]] != 0).all()
    whole = train.main(config_of(path=tuple(days), **flags | {"workdir": tmp_path / "whole"}))
    assert whole["steps"] == results["steps"] and whole["examples"] == results["examples"]
    evaluated = evaluate.main(evaluate.Config(tmp_path / "run", workdir=tmp_path / "look"))
    assert evaluated["auc"] == pytest.approx(results["test_auc"], abs=1e-6)
    # Rows of the first day, divided otherwise, may be rows that were trained on.
    schema = open_schema(str(tmp_path / "schema.py"))
    other = dataclasses.replace(schema, split=AtRandom(0.5, seed=3))
    prepare_table([tmp_path / "0.csv"], tmp_path / "other", other, block_rows=64)
    with pytest.raises(ValueError, match="other divides rows of .*day_0 otherwise"):
        evaluate.main(evaluate.Config(tmp_path / "run", workdir=tmp_path / "again", path=(tmp_path / "other",)))


def test_rows_of_an_earlier_table_go_on_over_those_that_came_first_in_the_run(tmp_path):
    of = lambda digest, onto, before=None: types.SimpleNamespace(
        vocabulary_digest=digest, division=digest, table={"onto": onto}, before=before, targets=()
    )
    run, saved = types.SimpleNamespace(directory=tmp_path), dict.fromkeys(("vocabulary_digest", "division"), "monday")
    saved["targets"] = []
    monday = of("monday", [])
    tuesday = of("tuesday", ["monday"], monday)
    for grown in (tuesday, of("wednesday", ["monday", "tuesday"], tuesday)):
        check_mapping(run, saved, grown)
    with pytest.raises(ValueError, match="was trained with another vocabulary"):
        check_mapping(run, saved, of("tuesday", ["monday"]))  # in the place of Monday's, whose steps it would skip
    with pytest.raises(ValueError, match="was trained with another division into training and test rows"):
        check_mapping(run, saved | {"division": "as on Sunday"}, tuesday)


@pytest.mark.parametrize(
    ("flags", "grows"),
    [
        ({"steps": 4}, {"epochs"}),
        ({"data": "criteo", "path": ("a.txt", "b.txt")}, {"epochs", "steps"}),
        ({"data": "tabular", "path": ("a",)}, {"epochs", "steps"}),
        ({"data": "tabular", "path": ("a", "b")}, {"path"}),
        ({"data": "tabular", "path": ("a", "b"), "validation_fraction": 0.1, "patience": 2}, set()),
        ({"data": "tabular", "path": ("a", "b"), "table_directory": "tables"}, set()),
        ({"data": "tabular", "path": ("a", "b"), "cpr": "full"}, set()),
        ({"steps": 4, "patience": 2}, {"epochs"}),
        ({"steps": 4, "reduce_on_plateau": 0.5}, set()),
        ({"steps": 4, "cpr": "mfu", "fail": ("2:0",), "save_every_steps": 2}, {"epochs"}),
        ({"steps": 4, "cpr": "mfu", "fail": ("2:0",)}, set()),
        ({"steps": 4, "cpr": "mfu", "fail": ("gamma",), "save_every_steps": 2}, set()),
        ({"steps": 4, "schedule": "linear"}, set()),
        ({"steps": 4, "shadowsync": "easgd", "where": "processes"}, set()),
    ],
)
def test_a_run_may_grow_where_its_length_decides_nothing_else(flags, grows):
    paths = {name: tuple(map(Path, flags[name])) for name in ("path",) if name in flags}
    directory = {name: Path(flags[name]) for name in ("table_directory",) if name in flags}
    assert train.may_grow(config_of(tables="host", **flags | paths | directory)) == grows


def test_a_run_whose_rates_end_at_zero_is_not_made_longer(tmp_path):
    config = changed(TINY, workdir=tmp_path / "run", steps=4, schedule="linear", **HOST)
    train.main(config)
    with pytest.raises(ValueError, match="was begun with epochs 1, not 2"):
        train.main(changed(config, epochs=2, resume=True))


def test_saves_of_periods_stay_and_each_can_be_evaluated(tmp_path):
    results = train.main(changed(TINY, workdir=tmp_path / "run", save_every_steps=4, keep_period=8, **HOST))
    assert sorted(read_manifest(path).step for path in images(tmp_path / "run" / "checkpoints")) == [8, 16, 20, 24]
    look = lambda step: evaluate.Config(tmp_path / "run", workdir=tmp_path / f"look {step}", state=step)
    found = {step: evaluate.main(look(step)) for step in (8, 16, 24)}
    assert [one["step"] for one in found.values()] == [*found]
    rounding = 1e-5 if jax.__version_info__ < (0, 11) else 0  # 1.2e-6 was seen on jax 0.10
    assert found[24]["auc"] == pytest.approx(results["test_auc"], rel=0, abs=rounding)
    assert len({round(one["auc"], 3) for one in found.values()}) == 3
    with pytest.raises(ValueError, match=r"has no save of step 4, but of \[8, 16, 20, 24\]"):
        evaluate.main(look(4))


def test_rows_of_16_bits_are_trained_saved_and_evaluated(tmp_path):
    flags = {"row_dtype": "float16", "resume": True}
    found = {name: train.main(changed(TINY, workdir=tmp_path / name, **flags | of)) for name, of in
             {"host": HOST, "oac": OAC}.items()}  # fmt: skip
    assert found["host"]["test_auc"] == found["oac"]["test_auc"]
    rows = read_tables(tmp_path / "oac" / "checkpoints", ["C3"], ["value", "accumulator"])["C3"]
    assert (rows["value"].dtype, rows["accumulator"].dtype) == (np.float16, np.float32)
    look = evaluate.main(evaluate.Config(tmp_path / "oac", workdir=tmp_path / "look"))
    assert look["auc"] == pytest.approx(found["oac"]["test_auc"], abs=1e-5)  # by a program on one device
    with pytest.raises(ValueError, match="was begun with row_dtype float16, not float32"):
        train.main(changed(TINY, workdir=tmp_path / "oac", resume=True, **OAC))


@pytest.mark.slow
def test_epochs_of_shuffled_criteo_rows_go_on_bit_for_bit(tmp_path, monkeypatch):
    prepare([write_lines(tmp_path / "train.txt", list(criteo_lines(240)))], tmp_path / "rows", min_count=3)
    flags = {"data": "criteo", "path": (tmp_path / "rows",), "batch_size": 16}
    flags |= {"steps": None, "epochs": 3, "shuffle": True, "validation_fraction": 0.1, "schedule": "linear"}
    flags |= EXACT["all three"] | {"table_directory": tmp_path / "tables"}
    whole = train.main(changed(TINY, workdir=tmp_path / "whole", **flags))
    assert whole["steps"] == 36 and whole["examples"] == 3 * 180
    flags |= {"table_directory": tmp_path / "other tables"}
    step, results = stopped_and_resumed(tmp_path / "cut", monkeypatch, flags, at=30)
    assert 12 < step < 36 and results["test_auc"] == whole["test_auc"]
    assert differences(tmp_path / "whole", tmp_path / "cut") == []


# Early stopping, seeds, and steps of evaluations


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (OAC, "auc"),
        (DEVICE | {"monitor": "log_loss"}, "log_loss"),
        pytest.param(
            HOST | {"monitor": "gauc", "group": "C1", "table_directory": Path("tables")}, "gauc", marks=pytest.mark.gate
        ),
        (EXACT["mfu on the device"], "auc"),
    ],
)
def test_patience_ends_a_run_and_its_best_state_is_tested(tmp_path, monkeypatch, flags, key):
    monkeypatch.chdir(tmp_path)
    own = lambda flags, name: (
        flags | ({"table_directory": Path(f"{name}.tables")} if "table_directory" in flags else {})
    )
    stopping = flags | {"patience": 2, "evaluations": 12}
    turned = lambda batches, first: (
        batch._replace(label=1 - batch.label if index >= 8 else batch.label)
        for index, batch in enumerate(batches, first)
    )  # labels are flipped from batch 8 on
    change_data(monkeypatch, lambda data: data._replace(train=lambda k: turned(data.train(k), k)))
    whole = train.main(changed(TINY, workdir=tmp_path / "whole", **own(stopping, "whole")))
    values = [row[f"validation_{key}"] for row in rows_of(tmp_path / "whole")]
    best = int(np.argmin(values) if key == "log_loss" else np.argmax(values))
    assert len(values) == best + 3 < 12 and whole["steps"] == 2 * len(values) and whole["stopped_early"]
    assert whole["best_step"] == 2 * (best + 1) and whole[f"validation_{key}"] == values[best]
    shorter = flags | {"monitor": None, "evaluations": best + 1, "steps": 2 * (best + 1)}
    alone = train.main(changed(TINY, workdir=tmp_path / "best", **own(shorter, "best")))
    assert alone["test_auc"] == whole["test_auc"]
    _, results = stopped_and_resumed(tmp_path / "cut", monkeypatch, own(stopping, "cut"), at=2 * best + 4)
    assert {name: results[name] for name in results if name.startswith(("test", "best", "stop"))} == {
        name: whole[name] for name in whole if name.startswith(("test", "best", "stop"))
    }
    assert differences(tmp_path / "whole", tmp_path / "cut") == []
    found = evaluate.main(evaluate.Config(run_directory=tmp_path / "cut", workdir=tmp_path / "evaluation"))
    assert found["step"] == whole["best_step"]


@pytest.mark.parametrize(
    "flags",
    [
        HOST, slow(OAC), slow(DEVICE), slow(EXACT["mfu on the device"] | {"fail": ("15:5",)}),
        slow(HOST | {"shadowsync": "ma", "where": "lockstep", "sync_every_steps": 3}),
    ],
)  # fmt: skip
def test_on_a_plateau_training_goes_on_with_lower_rates(tmp_path, monkeypatch, flags):
    turned = lambda batches, first: (
        batch._replace(label=1 - batch.label if index >= 8 else batch.label)
        for index, batch in enumerate(batches, first)
    )  # labels are flipped from batch 8 on
    change_data(monkeypatch, lambda data: data._replace(train=lambda k: turned(data.train(k), k)))
    flags = flags | {"reduce_on_plateau": 0.125, "monitor": "log_loss", "evaluations": 4}
    whole = train.main(changed(TINY, workdir=tmp_path / "whole", **flags))
    values = [row["validation_log_loss"] for row in rows_of(tmp_path / "whole")]
    worse = [row > min(values[:k]) for k, row in enumerate(values[:-1]) if k]
    assert any(worse) and whole["steps"] == 24 and len(values) == 4
    assert whole["saves"] >= 1 + sum(worse) and whole["saves_failed"] == 0
    if flags["tables"] == "host" and not {"pipeline", "shadowsync", "cpr"} & flags.keys():
        # By hand: a task for each rate, which is lower after the evaluations that were worse.
        config, state = changed(TINY, **flags), None
        data = train.data_of(config)
        for k, slower in enumerate(np.cumsum([0, 0, *worse])[: len(values)]):
            task = dataclasses.replace(config, learning=config.learning.slower(0.125**slower)).job(data)
            state = task.state("host", config.seed) if state is None else state
            for batch in itertools.islice(data.train(6 * k), 6):
                state, _ = task.task.step(state, batch)
        found, image = restore(tmp_path / "whole" / "checkpoints", task.state("host", 1))
        assert image.step == 24
        of = lambda state: [np.asarray(leaf) for leaf in jax.tree.leaves(state.dense.params)]
        for one, other in zip(of(found), of(state), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)  # without lower rates they differ by 0.01 and more
    _, results = stopped_and_resumed(tmp_path / "cut", monkeypatch, flags, at=20, since=18)
    assert results["test_auc"] == whole["test_auc"] and differences(tmp_path / "whole", tmp_path / "cut") == []


@pytest.mark.slow
@pytest.mark.parametrize("look", [0, 1])
def test_a_state_whose_evaluation_was_left_off_is_not_taken_for_the_best(tmp_path, monkeypatch, look):
    flags, looks = HOST | {"patience": 2, "workdir": tmp_path}, itertools.count()
    with monkeypatch.context() as patch, pytest.raises(Stopped, match=f"saved at step {8 * (look + 1)}"):
        change_data(patch, lambda data: data._replace(validation=lambda: signalled_at(data.validation(), looks, look)))
        train.main(changed(TINY, **flags))
    assert [read_manifest(path).step for path in images(tmp_path / "best")] == [8] * look
    assert train.main(changed(TINY, **flags, resume=True))["steps"] == 24


@pytest.mark.slow
def test_a_run_that_ends_in_saving_its_best_state_evaluates_it_again(tmp_path, monkeypatch):
    """Else the last state would be tested in its place."""
    flags = HOST | {"patience": 2}
    whole = train.main(changed(TINY, workdir=tmp_path / "whole", **flags))

    def full(best, state, row):
        raise OSError("no space left")

    config = changed(TINY, workdir=tmp_path / "cut", **flags)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(train.Best, "offer", full)
        train.main(config)
    assert not (tmp_path / "cut" / "metrics.jsonl").exists() or not rows_of(tmp_path / "cut")
    assert train.main(changed(config, resume=True))["test_auc"] == whole["test_auc"]
    assert differences(tmp_path / "whole", tmp_path / "cut") == []


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_vocabulary(tmp_path, monkeypatch):
    config = changed(TINY, workdir=tmp_path, **HOST)
    for digest in ("one", "another", "one"):
        with monkeypatch.context() as patch:
            change_data(patch, lambda data, digest=digest: data._replace(vocabulary_digest=digest))
            if digest == "another":
                with pytest.raises(ValueError, match="was trained with another vocabulary"):
                    train.main(changed(config, resume=True))
            elif not images(tmp_path / "checkpoints"):
                with pytest.raises(Stopped):
                    stop_the_stream(patch, STOP_AT)
                    train.main(config)
            else:
                assert train.main(changed(config, resume=True))["last_state_saved"]


def points_of(directory):
    """{(step, figure): value} of the run's one file for TensorBoard; none has two."""
    from tensorboardX.proto.event_pb2 import Event

    (path,), found = (directory / "tensorboard").iterdir(), {}
    rest = path.read_bytes()
    while rest:  # length, its checksum, event, its checksum
        size = int.from_bytes(rest[:8], "little")
        event, rest = Event.FromString(rest[12 : 12 + size]), rest[16 + size :]
        points = {(event.step, value.tag): value.simple_value for value in event.summary.value}
        assert found.keys().isdisjoint(points)
        found |= points
    return found


def test_tensorboard_has_each_row_of_metrics_once_though_one_was_made_again(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed: pip install 'jaxrec[tensorboard]'")
    config = changed(TINY, workdir=tmp_path, tensorboard=True, save_every_steps=10)  # evaluations after 8, 16, 24

    def breaking(batches, first):
        for index, batch in enumerate(batches, first):
            if index == 18:
                raise ValueError("broken off")
            yield batch

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="broken off"):
        change_data(patch, lambda data: data._replace(train=lambda k: breaking(data.train(k), k)))
        train.main(config)
    assert {step for step, _ in points_of(tmp_path)} == {8, 16} and image_of(tmp_path).step == 10
    train.main(changed(config, resume=True))
    rows = rows_of(tmp_path, but=())
    shown = {(row["step"], name): x for row in rows for name, x in row.items() if name != "step"}
    assert [row["step"] for row in rows] == [8, 16, 24] and points_of(tmp_path) == pytest.approx(shown)


def test_tensorboard_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tensorboardX, which is not installed: pip install 'jaxrec\[tensorboard\]'"):
        changed(TINY, tensorboard=True).check()


def signalled_at(batches, counts, wanted):
    """Yields the batches; sends a signal before the first one in pass number `wanted`."""
    if next(counts) == wanted:
        os.kill(os.getpid(), signal.SIGTERM)
    yield from batches


@pytest.mark.slow
def test_several_seeds_go_on_with_the_seed_that_was_stopped(tmp_path, monkeypatch):
    config = changed(TINY, seeds=2, steps=8, workdir=tmp_path / "cut")
    whole = train.main(changed(config, workdir=tmp_path / "whole"))
    assert whole["test_auc_half_width"] > 0
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="stopped in seed 0; .*--workdir .*/cut --resume"):
        stop_the_stream(patch, at=5)
        train.main(config)
    results = train.main(changed(config, resume=True))
    assert results["test_auc"] == whole["test_auc"]
    with pytest.raises(ValueError, match="holds runs of several seeds"):
        train.main(changed(config, seeds=1, resume=True))


@pytest.mark.slow
@pytest.mark.parametrize("look", [0, 1])
def test_free_trainers_that_were_stopped_in_an_evaluation_make_it_when_they_go_on(tmp_path, monkeypatch, look):
    config, looks = changed(TINY, workdir=tmp_path, **INEXACT["free bmuf"]), itertools.count()

    with monkeypatch.context() as patch, pytest.raises(Stopped, match=f"saved at step {8 * (look + 1)}"):
        change_data(patch, lambda data: data._replace(validation=lambda: signalled_at(data.validation(), looks, look)))
        train.main(config)
    train.main(changed(config, resume=True))
    assert [row["step"] for row in rows_of(tmp_path)] == [8, 16, 24]


def test_evaluations_are_as_many_as_asked_for_when_steps_are_told_in_strides():
    recorder = types.SimpleNamespace(every_steps=125, history=[], data=types.SimpleNamespace(steps=1000))
    for step in range(100, 1001, 100):
        for _ in range(2):
            if train.Recorder.due(recorder, step):
                recorder.history.append({"step": step})
    assert [row["step"] for row in recorder.history] == [200, 300, 400, 500, 700, 800, 900, 1000]


@pytest.mark.slow
def test_an_interval_by_measured_costs_is_kept_when_the_run_goes_on(tmp_path, monkeypatch):
    flags = {"cpr": "full", "recovery_costs": "measured", "workdir": tmp_path}
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_the_stream(patch, at=20)
        train.main(changed(TINY, **flags))
    measured = json.loads((tmp_path / "recovery.json").read_text())
    results = train.main(changed(TINY, **flags, resume=True))
    assert json.loads((tmp_path / "recovery.json").read_text()) == measured
    assert 1 <= measured["save_every_steps"] <= 24 and measured["save_hours"] > 0 < measured["partial_load_hours"]
    assert results["steps"] == 24 and results["last_state_saved"]
