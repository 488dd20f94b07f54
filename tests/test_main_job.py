"""The main job with any of the three techniques: it learns, goes on where it stopped, and says what it lost."""

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import techniques
import train
from stopping import Stopped

from jaxrec.checkpoint import images, read_manifest
from jaxrec.checkpoint.image import leaves_of, load_arrays

ROOT = Path(__file__).parent.parent
TINY = train.Config(
    preset="smoke", rows=500, batch_size=64, steps=24, evaluations=3, embedding_width=8, model="small_dlrm",
    learning_rate=0.01, row_learning_rate=0.1,
)  # fmt: skip
STOP_AT = 15  # the batch whose drawing sends the signal; a pipeline has committed fewer
# Of the work, and not of what was learned: a stop drains a pipeline, and a resumed run has a gap of its own.
OF_THE_WORK = {"train_seconds", "stale_share", "sync_gap_steps", "rows_saved"}

DEVICE, HOST = {"tables": "device"}, {"tables": "host"}
OAC = HOST | {"pipeline": "oac", "window": 4}
SHADOW = {"shadowsync": "easgd"}
MFU = {"cpr": "mfu", "fail": ("3:5",), "save_every_steps": 8}

slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)
# Each has the bits of a run that nobody stops.
EXACT = {
    "device": DEVICE,
    "host": HOST,
    "sync": HOST | {"pipeline": "sync"},
    "oac": OAC,
    "oac that validates on the device": OAC | {"stale_rows": "device"},
    "oac with savings": OAC | {"savings": True},
    **{f"{rule} in the foreground": DEVICE | {"shadowsync": rule, "sync_every_steps": 5} for rule in techniques.RULES},
    **{f"{rule} and oac": OAC | {"shadowsync": rule, "sync_every_steps": 5} for rule in techniques.RULES},
    **{
        f"{scheme} on the {home}": {"tables": home} | MFU | {"cpr": scheme}
        for scheme in ("full", "vanilla", "mfu", "ssu", "scar")
        for home in ("device", "host")
    },
    "mfu and oac": OAC | MFU,
    "full, easgd and oac": OAC | MFU | {"cpr": "full", "shadowsync": "easgd", "sync_every_steps": 5},
    "mfu and bmuf": HOST | MFU | {"shadowsync": "bmuf", "sync_every_steps": 5},
    "all three": OAC | MFU | {"shadowsync": "easgd", "sync_every_steps": 5},
    "epochs, shuffled, at a schedule": OAC
    | {"steps": 8, "epochs": 3, "shuffle": True, "schedule": "cosine", "warmup_steps": 3},
}
# They go on from the step that they stopped at, with other bits: a thread or a window of theirs began anew.
INEXACT = {
    "semisync": HOST | {"pipeline": "semisync"},
    "async": HOST | {"pipeline": "async", "window": 4},
    "shadow": DEVICE | SHADOW,
    "shadow over host tables and mfu": HOST | SHADOW | MFU,
    "shadow and oac": OAC | SHADOW,
    "all three in the background": OAC | SHADOW | MFU,
    **{f"free {rule}": HOST | {"shadowsync": rule} for rule in techniques.RULES},
    "free, with workers, in the foreground": HOST | SHADOW | {"workers": 2, "sync_every_steps": 3},
    "free, with a pace": HOST | SHADOW | {"sync_pace_seconds": 0.001},
}
IN_ALL = ("all three", "free easgd")  # the others take longer


@pytest.fixture(autouse=True)
def few_to_look_at(monkeypatch):
    """One batch to validate and to test on."""
    whole = train.data_of

    def fewer(config):
        data = whole(config)
        one = lambda batches: lambda: itertools.islice(batches(), 1)
        return data._replace(validation=one(data.validation), test=one(data.test))

    monkeypatch.setattr(train, "data_of", fewer)


def stop_the_stream(patch, at=STOP_AT, number=signal.SIGTERM, seen=None):
    """Sends a signal with a batch of the training; `seen` collects the batches that are drawn."""
    whole = train.data_of

    def signalled(batches, first):
        for index, batch in enumerate(batches, first):
            if index == at:
                os.kill(os.getpid(), number)
            yield batch

    patch.setattr(
        train, "data_of", lambda config: (data := whole(config))._replace(train=lambda k: signalled(data.train(k), k))
    )


def stopped_and_resumed(directory, monkeypatch, flags, **more):
    """Runs until a signal comes and to the end; returns the step between and the results."""
    config = dataclasses.replace(TINY, workdir=directory, **flags | more)
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="stopped and saved") as stopped:
        stop_the_stream(patch)
        train.main(config)
    step = int(re.search(r"saved at step (\d+)", str(stopped.value))[1])
    assert step == image_of(directory).step
    return step, train.main(dataclasses.replace(config, resume=True))


def image_of(directory):
    return read_manifest(max(images(directory / "checkpoints"), key=lambda path: read_manifest(path).step))


def rows_of(directory, but=OF_THE_WORK):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in but} for line in lines]


def arrays_of(directory):
    image = image_of(directory)
    return image.step, load_arrays(image, leaves_of(image))


def differences(a, b):
    """What differs between the last images and the rows of two runs."""
    (step, one), (other_step, other) = arrays_of(a), arrays_of(b)
    assert one.keys() == other.keys() and step == other_step
    found = [name for name, array in one.items() if not np.array_equal(array, other[name])]
    return found + ([] if rows_of(a) == rows_of(b) else ["metrics"])


def check_learned(directory, results, flags):
    """A run has learned, and has a figure for each technique that is on."""
    first, *_, last = rows_of(directory, but=())
    assert last["validation_auc"] > first["validation_auc"]
    assert results["last_state_saved"] and results["saves_failed"] == 0 and results["steps"] == 24 == last["step"]
    wanted = {"test_auc", "examples_per_s"} | (
        ({"stale_share"} if flags.get("pipeline") == "oac" else set())
        | ({"sync_gap_steps", "replica_spread"} if "shadowsync" in flags else set())
        | ({"pls", "rows_saved", "shards_failed", "lost_steps"} if "cpr" in flags else set())
    )
    assert all(np.isfinite(results[name]) for name in wanted)
    if "cpr" in flags:
        assert results["shards_failed"] == 1 and (results["pls"] > 0) == (flags["cpr"] != "full")
        assert (results["lost_steps"] > 0) == (flags["cpr"] == "full")
    assert (directory / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", [name if name in IN_ALL else slow(name) for name in EXACT])
def test_stopped_and_resumed_it_has_the_bits_of_an_undisturbed_run(tmp_path, monkeypatch, name):
    flags = EXACT[name]
    check_learned(tmp_path / "whole", train.main(dataclasses.replace(TINY, workdir=tmp_path / "whole", **flags)), flags)
    step, results = stopped_and_resumed(tmp_path / "cut", monkeypatch, flags)
    assert 3 <= step < 24
    assert differences(tmp_path / "whole", tmp_path / "cut") == []
    check_learned(tmp_path / "cut", results, flags)


@pytest.mark.parametrize("name", [name if name in IN_ALL else slow(name) for name in INEXACT])
def test_where_it_is_not_deterministic_it_goes_on_from_its_step(tmp_path, monkeypatch, name):
    step, results = stopped_and_resumed(tmp_path, monkeypatch, INEXACT[name])
    assert 3 <= step < 24
    check_learned(tmp_path, results, INEXACT[name])
    assert [row["step"] for row in rows_of(tmp_path)] == [8, 16, 24]
