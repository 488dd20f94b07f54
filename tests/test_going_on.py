"""What a resumed run restores: its capacities, all rows at its step, and the caller's own values."""

import os

import numpy as np
import pytest
from click_model import TASK, batch_at, bits, fresh, plain, stream_from
from equality import same

from jaxrec import Batch, Serial
from jaxrec.checkpoint import deltas, images, read_manifest, restore
from jaxrec.cpr import Recovery, mfu
from jaxrec.embedding import capacity_of
from jaxrec.oac import Pipeline

HOMES = {"serial over host tables": "host", "serial over device tables": "device", "pipeline": "host"}
of_both = pytest.mark.parametrize("name", HOMES)


def engine_over(state, name, callbacks=()):
    return Pipeline(TASK, state, callbacks, window=3) if name == "pipeline" else Serial(TASK, state, callbacks)


def wide_and_narrow():
    """Two batches: the first touches all rows of shard 0, the second one row."""
    all_of = Batch({"item": np.tile(np.arange(0, 40, 4, dtype=np.int32), 2)}, np.ones(20, np.float32))
    return all_of, Batch({"item": np.zeros(20, np.int32)}, np.ones(20, np.float32))


@pytest.mark.parametrize("kind", [Serial, Pipeline])
def test_an_engine_plans_with_the_capacities_of_the_run_that_it_goes_on_with(kind):
    capacities, (wide, narrow) = [], wide_and_narrow()

    def note(info):
        capacities.append(capacity_of(info.plans)["width_4"])

    with kind(TASK, fresh("host"), [note]) as engine:
        engine.train([wide, narrow])
    for capacity in ({"width_4": capacities[-1]}, None):
        with kind(TASK, fresh("host"), [note], capacity=capacity) as engine:
            engine.train([narrow])
    assert capacities[0] == capacities[1] == capacities[2] > capacities[3]  # the last is the negative control


@pytest.mark.parametrize("kind", [Serial, Pipeline])
@pytest.mark.parametrize("wrong", [{"width_9": 8}, {}, {"width_4": 0}])
def test_capacities_that_are_none_are_refused(kind, wrong):
    with kind(TASK, fresh("host"), capacity=wrong) as engine:
        with pytest.raises(ValueError, match="capacity=.* must be one positive number for each"):
            engine.train(stream_from(0, 1))


def recovery_of(directory, **more):
    # The end of a block stands for the death of the process.
    return Recovery(directory, 4, 12, **{"scheme": mfu(), "fraction": 0.5, "save_at_end": False} | more)


@of_both
def test_from_a_whole_save_a_run_goes_on_with_the_same_bits(tmp_path, name):
    recovery = recovery_of(tmp_path, fraction=0.1)
    with engine_over(fresh(HOMES[name]), name, [recovery]) as engine:
        engine.train(stream_from(0, 7))
        at_seven = bits(plain_state(engine))
        recovery.save_whole()
        engine.train(stream_from(7, 12))  # later steps are in no whole image
    state, image = restore(images(tmp_path)[0], fresh(HOMES[name]))
    assert image.step == 7 and same(bits(state), at_seven)
    restored, tip = restore(tmp_path, fresh(HOMES[name]))
    assert tip.step == 12 and not same(bits(restored), plain(12, HOMES[name])[0])  # mixed steps: negative control
    with engine_over(state, name) as engine:
        engine.train(stream_from)
        assert same(bits(plain_state(engine)), plain(12, HOMES[name])[0])


def plain_state(engine):
    """The engine's state between two steps, with drained tables."""
    getattr(engine, "drain", lambda: None)()
    return engine.state


@of_both
def test_after_a_whole_save_the_recovery_itself_goes_on(tmp_path, name):
    recovery = recovery_of(tmp_path)
    with engine_over(fresh(HOMES[name]), name, [recovery]) as engine:
        engine.train(stream_from(0, 6))
        recovery.save_whole()
    state, image = restore(tmp_path, fresh(HOMES[name]))
    again = recovery_of(tmp_path, image=image)
    with engine_over(state, name, [again]) as engine:
        before = again.saves
        engine.train(stream_from)
        assert (again.pls, before) == (0.0, recovery.saves) and again.saves > before
        assert same(bits(plain_state(engine)), plain(12, HOMES[name])[0])


@of_both
@pytest.mark.parametrize("scheme", [None, mfu()])
def test_what_the_caller_saves_along_is_of_the_step_of_the_save(tmp_path, name, scheme):
    recovery = recovery_of(tmp_path, scheme=scheme, run="of-mine", extra=lambda step: {"position": step})
    with engine_over(fresh(HOMES[name]), name, [recovery]) as engine:
        engine.train(stream_from(0, 10))
    found = [read_manifest(path) for path in (*images(tmp_path), *deltas(tmp_path))]
    assert len(found) > 1 and {image.run for image in found} == {"of-mine"}
    assert all(image.extra["position"] == image.step and "pls" in image.extra["cpr"] for image in found)


def test_a_name_that_the_recovery_needs_is_refused(tmp_path):
    recovery = recovery_of(tmp_path, extra=lambda step: {"cpr": step})
    with Serial(TASK, fresh("host"), [recovery]):
        with pytest.raises(ValueError, match="extra holds 'cpr'"):
            recovery.save_whole()


@of_both
def test_a_whole_save_comes_between_two_steps_and_within_the_block(tmp_path, name):
    recovery = recovery_of(tmp_path)
    engine = engine_over(fresh(HOMES[name]), name, [recovery, lambda info: recovery.save_whole()])
    with pytest.raises(ValueError, match="this recovery has not begun"):
        recovery.save_whole()
    with engine, pytest.raises(ValueError, match="was read in `after_step`"):
        engine.train(stream_from(0, 2))
    with pytest.raises(ValueError, match="closed"):
        recovery.save_whole()


def test_a_whole_save_that_cannot_be_written_is_raised_and_training_goes_on(tmp_path):
    recovery = recovery_of(tmp_path)
    with Serial(TASK, fresh("host"), [recovery]) as engine:
        engine.train([batch_at(n) for n in range(3)])
        (tmp_path / "step_00000003.partial").write_text("in the way of the directory")
        os.chmod(tmp_path, 0o755)
        with pytest.raises(OSError, match="File exists"):
            recovery.save_whole()
        (tmp_path / "step_00000003.partial").unlink()
        recovery.save_whole()
        assert [image.step for image in map(read_manifest, images(tmp_path))] == [3]
