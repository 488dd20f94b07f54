"""The best state of a run is on disk wherever its rows are, through kills and resumed runs."""

import contextlib
import itertools
import math
import types

import numpy as np
import pytest
from click_model import ROWS, SPEC, TASK, batch_at, bits, fresh, plain
from equality import same
from kills import kill_at_call, was_killed
from main import saving
from main.saving import Best

from jaxrec.checkpoint import images, read_manifest
from jaxrec.embedding import HostTables
from jaxrec.files import PARTIAL

RUN = "a" * 16


def best_of(directory, metric="validation_auc", run=RUN):
    run = types.SimpleNamespace(directory=directory, id=run)
    return Best(run, metric, lambda step: {"vocabulary_digest": f"of {step}"})


def state_at(step, home="host"):
    """The state after some steps, all rows trained."""
    state = fresh(home)
    for index in range(step):
        state, _ = TASK.step(state, batch_at(index))
    return state


def row_at(step, value, metric="validation_auc"):
    return {"step": step, "train_loss": 0.5, metric: value, "validation_examples": 8}


def offer(best, step, value, metric="validation_auc"):
    best.offer(state_at(step), row_at(step, value, metric))


def steps_of(directory):
    return [read_manifest(path).step for path in images(directory / "best")]


@pytest.fixture
def written(monkeypatch):
    """The steps of the images that are written."""
    steps, write = [], saving.write_image
    monkeypatch.setattr(saving, "write_image", lambda path, image, **how: _noted(steps, write(path, image, **how)))
    return steps


def _noted(steps, image):
    steps.append(image.step)
    return image


RISING, FALLING = [0.5, 0.7, math.nan, 0.7, 0.6, 0.8, 0.75], [0.7, 0.5, math.nan, 0.5, 0.6, 0.4, 0.45]


@pytest.mark.parametrize(
    ("home", "metric", "values"),
    [(home, "validation_auc", RISING) for home in ("host", "mapped", "device", "pinned", "remote")]
    + [("host", "validation_gauc", RISING), ("host", "validation_log_loss", FALLING)],
)
def test_the_best_state_comes_back_bit_for_bit_and_is_written_when_it_improves_alone(
    tmp_path, written, home, metric, values
):
    mapped = TASK.init({"w": np.ones(4)}, HostTables.create(SPEC, ROWS, tmp_path / "tables"))
    state, best = mapped if home == "mapped" else fresh(home), best_of(tmp_path, metric)
    for step, value in enumerate(values, 1):
        state, _ = TASK.step(state, batch_at(step - 1))
        before = bits(state)
        best.offer(state, row_at(step, value, metric))
        assert same(bits(state), before)
    assert written == [1, 2, 6] and steps_of(tmp_path) == [6]
    assert same(bits(best.restored(state)), plain(6)[0])
    again = best_of(tmp_path, metric)  # as in a run that goes on
    assert again.row == best.row == {"step": 6, metric: values[5], "validation_examples": 8}
    assert again.results() == {"best_step": 6, metric: values[5], "validation_examples": 8}
    assert read_manifest(images(tmp_path / "best")[0]).extra["vocabulary_digest"] == "of 6"
    assert again.evaluations_since([{"step": step} for step in range(1, 8)]) == 1
    assert same(bits(again.restored(fresh("host"))), plain(6)[0])


def test_without_a_figure_there_is_no_best_state(tmp_path, written):
    best = best_of(tmp_path)
    offer(best, 1, math.nan)
    state = state_at(2)
    assert best.restored(state) is state and best.results() == {"best_step": None} and not written
    assert best.evaluations_since([{"step": 1}]) == 0


class Killed(BaseException):
    """A kill between two calls."""


def kill(path):
    raise Killed


def test_a_kill_before_the_old_image_is_gone_leaves_the_new_one(tmp_path, monkeypatch):
    best = best_of(tmp_path)
    offer(best, 1, 0.5)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(saving, "remove_directory", kill)
        offer(best, 2, 0.6)
    assert steps_of(tmp_path) == [2, 1]
    (tmp_path / "best" / f"step_00000003{PARTIAL}").mkdir()  # of a kill in the middle of the next one
    again = best_of(tmp_path)
    assert len([*(tmp_path / "best").glob("step_*")]) == 2
    assert again.row["step"] == 2 and same(bits(again.restored(fresh("host"))), plain(2)[0])
    offer(again, 3, 0.7)
    assert steps_of(tmp_path) == [3]


@pytest.mark.parametrize(("value", "step"), [(0.5, 9), (0.7, 9), (0.71, 4)])
def test_a_run_that_goes_on_from_an_earlier_step_keeps_its_best_state_until_there_is_a_better_one(
    tmp_path, monkeypatch, written, value, step
):
    offer(best_of(tmp_path), 9, 0.7)
    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(saving, "remove_directory", kill)
        offer(best_of(tmp_path), 4, value)
    assert best_of(tmp_path).row["step"] == 9  # killed before the better one was the only one
    best = best_of(tmp_path)
    offer(best, 4, value)
    assert steps_of(tmp_path) == [step] and best.row == best_of(tmp_path).row == row_of(step, max(value, 0.7))
    assert same(bits(best.restored(fresh("host"))), plain(step)[0])
    assert written == ([9] if step == 9 else [9, 4, 4])


def row_of(step, value):
    return {"step": step, "validation_auc": value, "validation_examples": 8}


def _offer_until_killed(directory, die_at):
    best = best_of(directory)
    kill_at_call(die_at)
    offer(best, 2, 0.6)


@pytest.mark.slow
@pytest.mark.process
def test_kill_9_at_any_instant_leaves_the_old_state_or_the_new_one(tmp_path):
    found = set()
    for die_at in itertools.count(1, 3):
        directory = tmp_path / str(die_at)
        offer(best_of(directory), 1, 0.5)
        killed = was_killed(_offer_until_killed, directory, die_at)
        best = best_of(directory)
        found.add(step := best.row["step"])
        assert same(bits(best.restored(fresh("host"))), plain(step)[0])
        offer(best, 3, 0.7)
        assert steps_of(directory) == [3] and len([*(directory / "best").iterdir()]) == 1
        if not killed:
            break
    assert found == {1, 2} and step == 2


def test_a_full_disk_leaves_the_best_state_as_it_was(tmp_path, monkeypatch):
    best = best_of(tmp_path)
    offer(best, 1, 0.5)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("jaxrec.checkpoint.format.shutil.disk_usage", lambda path: types.SimpleNamespace(free=0))
        offer(best, 2, 0.6)
    assert best.row["step"] == 1 and same(bits(best.restored(fresh("host"))), plain(1)[0])


def test_what_is_damaged_or_of_another_run_is_not_taken_for_the_best_state(tmp_path):
    offer(best_of(tmp_path), 1, 0.5)
    with pytest.raises(ValueError, match="holds step_00000001 of run aaaaaaaaaaaaaaaa, and this is run b"):
        best_of(tmp_path, run="b")
    (image,) = images(tmp_path / "best")
    next(file for file in image.rglob("rows*/*") if file.is_file()).write_bytes(b"")
    with pytest.raises(ValueError, match="is damaged.* Remove .*best, and the last state is tested in its place"):
        best_of(tmp_path).restored(fresh("host"))
    (image / "manifest.json").write_text("")
    with pytest.warns(UserWarning, match="the best state is lost, the best one from here on is kept: .*manifest.json"):
        best = best_of(tmp_path)
    offer(best, 2, 0.4)
    assert best.row["step"] == 2 and steps_of(tmp_path) == [2]
