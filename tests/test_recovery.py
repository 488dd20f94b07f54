"""Recovery: survivors are unchanged, lost shards are as saved; in both homes and under OAC."""

import contextlib
import dataclasses
import errno
import math
import os
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpr_task import CAPACITY, ROWS, SCHEMES, SPEC, STEPS, TASK, batches, fresh, loss, nothing, rows_of
from equality import same
from step_callbacks import at_step, failing_at
from strategies import chosen
from threads import is_inside, until

from jaxrec import Batch, Serial
from jaxrec.checkpoint import Checkpointer, deltas, images, read_manifest, restore
from jaxrec.checkpoint.format import leaves_of, load_arrays, number_of
from jaxrec.checkpoint.row_deltas import write_delta
from jaxrec.checkpoint.state import ROW_IDS, leaf_name
from jaxrec.cpr import Recovery, mfu, random_rows, round_robin, scar
from jaxrec.cpr.saving import Saves
from jaxrec.cpr.tracking import ranges_of, without_rows
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, plan
from jaxrec.oac import Pipeline
from jaxrec.table_use import BrokenEngine
from jaxrec.types import DenseState, TrainState


def fill_with_nan(tables, shard):
    """The tables with all rows and slots of one shard lost, on host or devices."""
    for name, stack in tables.spec.stacks.items():
        parts = tables.layout[name].items()
        rows = {part: np.full((stack.rows_per_shard, one.width), np.nan, one.dtype) for part, one in parts}
        tables = tables.with_shard(name, shard, rows)
    return tables


def make(directory, scheme="vanilla", **more):
    # The end of a block stands for the death of the process; what a clean end saves has a test of its own.
    given = {"save_every_steps": 8, "total_steps": STEPS, "scheme": SCHEMES[scheme], "save_at_end": False} | more
    return Recovery(directory, **given)


@contextlib.contextmanager
def watched(home, directory, scheme="vanilla", state=None, before=(), **more):
    """An engine over a home, and its recovery, listed after the functions of `before`."""
    recovery = make(directory, scheme, **more)
    with Serial(TASK, state or fresh(home), [*before, recovery], capacity=CAPACITY) as engine:
        yield engine, recovery


def train(home, stop=STEPS):
    return Serial(TASK, fresh(home), capacity=CAPACITY).train(batches(0, stop))


def oac(window, callbacks=()):
    return Pipeline(TASK, fresh("host"), callbacks, mode="oac", window=window)


def rows_saved(directory, spec=SPEC):
    """{(stack, shard): rows} of each delta of a directory, oldest first."""
    found = []
    for image in map(read_manifest, reversed(deltas(directory))):
        arrays = load_arrays(image, leaves_of(image, "rows."))
        keys = [(name, shard) for name in spec.stacks for shard in range(spec.shards)]
        found.append({key: arrays.get(leaf_name(*key, ROW_IDS), np.zeros(0, np.int32)) for key in keys})
    return found


@contextlib.contextmanager
def in_the_way(directory, name):
    """Let a delta or an image fail to be written: a file has the name of its directory. Later deltas wait for it."""
    path = directory / f"{name}.partial"
    path.write_text("in the way")
    yield
    path.unlink()


def damage(image, shard):
    """Overwrite the file of the first rows of a shard with zeros."""
    damaged, *_ = image.glob(f"arrays.*/rows.*.{shard:04d}.value/0.0")
    damaged.write_bytes(bytes(damaged.stat().st_size))


HOMES = ("host", "device", "pinned")
BOTH = [(home, scheme) for home in HOMES for scheme in (SCHEMES if home == "host" else ("vanilla", "mfu", "ssu"))]
HOST_ALL_DEVICE_MFU = lambda home, scheme: home == "host" or scheme == "mfu"


def both(without=()):
    """All schemes over both homes, except those in `without`."""
    return chosen([pair for pair in BOTH if pair[1] not in without], HOST_ALL_DEVICE_MFU)


@pytest.mark.parametrize(("home", "scheme"), both())
def test_without_failures_nothing_changes(tmp_path, home, scheme):
    with watched(home, tmp_path, scheme, fraction=0.25) as (engine, recovery):
        state = engine.train(batches())
    plain = train(home)
    assert all(same(rows_of(state, shard), rows_of(plain, shard)) for shard in range(4))
    assert recovery.pls == 0 and recovery.saves == (5 if scheme == "vanilla" else 20)


@pytest.mark.parametrize(("home", "scheme"), both())
def test_after_a_clean_end_what_is_restored_is_what_was_trained(tmp_path, home, scheme):
    for at_end in (True, False):  # negative control: otherwise some rows are older
        directory, more = tmp_path / str(at_end), {"fraction": 0.25, "failures": {13: [1]}, "save_at_end": at_end}
        with watched(home, directory, scheme, **more) as (engine, _):
            state = engine.train(batches(0, 21))
        restored, image = restore(directory, fresh(home))
        as_trained = all(same(rows_of(state, shard), rows_of(restored, shard)) for shard in range(4))
        assert as_trained == (image.step == 21) == at_end


def test_after_a_clean_end_of_the_pipeline_what_is_restored_is_what_was_trained(tmp_path):
    with oac(3, [make(tmp_path, "mfu", fraction=0.25, failures={13: [1]}, save_at_end=True)]) as pipeline:
        state = pipeline.train(batches(0, 21))
    restored, image = restore(tmp_path, fresh("host"))
    assert image.step == 21 and all(same(rows_of(state, shard), rows_of(restored, shard)) for shard in range(4))


@pytest.mark.parametrize("scheme", ["vanilla", "mfu"])
def test_the_end_saves_nothing_that_an_image_holds_and_nothing_after_an_error(tmp_path, scheme, monkeypatch):
    bases, save_base, more = [], Saves.save_base, {"save_at_end": True}
    note = lambda self, state, **more: (bases.append(int(state.dense.step)), save_base(self, state, **more))[1]
    monkeypatch.setattr(Saves, "save_base", note)
    with watched("host", tmp_path, scheme, **more):
        pass
    assert not bases  # initial rows can be regenerated
    with watched("host", tmp_path, scheme, **more) as (engine, _):
        engine.train(batches(0, 16))
    wanted = [] if scheme == "vanilla" else [16]  # of no scheme the regular save of step 16 holds everything
    assert bases == wanted
    state, image = restore(tmp_path, fresh("host"))
    with watched("host", tmp_path, scheme, state, image=image, **more):
        pass
    assert bases == wanted
    with pytest.raises(KeyError), watched("host", tmp_path, scheme, state, image=image, **more) as (engine, _):
        engine.train(batches(16, 19))
        raise KeyError
    assert bases == wanted
    state, image = restore(tmp_path, fresh("host"))
    with watched("host", tmp_path, scheme, state, image=image, **more) as (engine, recovery):
        engine.train(batches(engine.step, 21))
        recovery.save_whole()
    assert bases == [*wanted, 21]


def test_the_end_saves_what_came_back_from_an_older_image_as_the_newest_was_damaged(tmp_path):
    with watched("host", tmp_path, save_at_end=True) as (engine, recovery):
        engine.train(batches(0, 16))
        until(lambda: images(tmp_path)[0].name == "step_00000016")
        damage(images(tmp_path)[0], 1)
        with SKIPPED:
            recovery.recover([1])
        wanted = [rows_of(engine.state, shard) for shard in range(4)]
    restored, image = restore(tmp_path, fresh("host"))
    assert image.step == 16 and all(same(rows_of(restored, shard), wanted[shard]) for shard in range(4))


def test_a_failed_save_at_the_end_is_raised_and_one_before_it_is_made_up_for(tmp_path):
    more = {"scheme": "vanilla", "save_at_end": True}
    with in_the_way(tmp_path, "step_00000019"), pytest.raises(FileExistsError):
        with watched("host", tmp_path, **more) as (engine, _):
            engine.train(batches(0, 19))
    state, image = restore(tmp_path, fresh("host"))
    assert image.step == 16
    with FAILED, watched("host", tmp_path, state=state, image=image, **more) as (engine, recovery):
        with in_the_way(tmp_path, "step_00000024"):
            engine.train(batches(16, 24))
            until(lambda: recovery.failed_saves)
    assert restore(tmp_path, fresh("host"))[1].step == 24


@pytest.mark.parametrize(("home", "scheme"), both(without=("ssu",)))
def test_survivors_do_not_notice_and_the_victim_is_what_was_saved(tmp_path, home, scheme):
    """With fraction 1 a scheme saves every touched row, so a lost shard is restored as at the last save."""
    kept, after = {}, {}

    def keep(info):
        if info.step in (16, 21):
            kept[info.step] = [rows_of(info.state, shard) for shard in range(4)]

    more = {"failures": {21: [1, 3]}} | ({} if scheme == "vanilla" else {"fraction": 1.0, "pick_ahead_steps": 0})
    with watched(home, tmp_path, scheme, before=[keep], **more) as (engine, recovery):
        for state, _ in engine.run(batches()):
            if engine.step == 21:
                after = [rows_of(state, shard) for shard in range(4)]
    assert same(after[0], kept[21][0]) and same(after[2], kept[21][2])
    assert same(after[1], kept[16][1]) and same(after[3], kept[16][3])
    assert not same(kept[21][1], kept[16][1])  # negative control: training had changed it
    assert all(np.isfinite(a).all() for s in range(4) for a in rows_of(engine.state, s).values())
    assert recovery.pls == pytest.approx(2 * (21 - 16) / (STEPS * 4)) and recovery.failed == 2


@pytest.mark.parametrize("scheme", ["mfu", "ssu", "scar"])
def test_a_scheme_keeps_its_budget_and_loses_less_than_no_save(tmp_path, scheme):
    lost, whole = {}, [] if scheme == "scar" else ["small"]
    with watched("host", tmp_path, scheme, fraction=0.25, whole=whole, failures={30: [2]}) as (engine, recovery):
        for state, _ in engine.run(batches()):
            lost |= {engine.step: rows_of(state, 2)} if engine.step in (29, 30) else {}
    assert recovery.saves == 20
    # A quarter of each shard's tracked rows, rounded up: 90 (+ 7) and 40 rows in 4 shards; the small table 5 times.
    watched_rows = (97 if scheme == "scar" else 90, 40)
    budget = sum(math.ceil(0.25 * math.ceil(rows / 4)) for rows in watched_rows) * 4 * 20
    assert 0 < recovery.rows_saved <= budget + (0 if scheme == "scar" else 7 * 5)
    initial = rows_of(fresh("host"), 2)
    distance = lambda rows: sum(float(np.abs(rows[key] - lost[29][key]).sum()) for key in rows if key[1] == "value")
    assert distance(lost[30]) < 0.7 * distance(initial)


@pytest.mark.parametrize("scheme", ["mfu", "ssu"])
def test_regular_saves_alone_hold_the_tables_in_whole_and_all_their_rows(tmp_path, scheme):
    with watched("host", tmp_path, scheme, fraction=0.25, whole=["small"]) as (engine, _):
        engine.train(batches())
    ((stack, [(first, end)]),) = ranges_of(SPEC, ["small"]).items()
    found = [np.concatenate([rows[stack, shard] for shard in range(4)]) for rows in rows_saved(tmp_path)]
    held = [len({*range(first, end)} & {*rows.tolist()}) for rows in found]
    assert held == [0, 0, 0, end - first] * 5


def moving(spec, callbacks):
    """An engine whose step moves every row of host tables and nothing else."""

    def step(state, batch, plans):
        dense = state.dense._replace(step=np.int32(state.dense.step + 1))
        for shards in state.tables.shards.values():
            for shard in shards:
                shard["value"][:] += dense.step
        return state._replace(dense=dense), {"loss": np.float32(0)}

    state = TrainState(DenseState(np.int32(0), {}, ()), HostTables.create(spec, ROWS))
    return Serial(types.SimpleNamespace(step=step), state, callbacks)


@pytest.mark.parametrize("scheme", ["mfu", "scar", "round_robin", "random"])
def test_no_save_holds_more_rows_of_a_shard_than_its_budget_and_a_busy_one_holds_as_many(tmp_path, scheme):
    """Every row is touched between saves, so each save uses its whole budget: 3 of 12 and 2 of 5 rows per shard."""
    spec = EmbeddingSpec({"a": Table(46, 2), "b": Table(20, 4)}, {"a": Lookup("a"), "b": Lookup("b")}, shards=4)
    batch = Batch({"a": np.arange(46), "b": np.arange(20)}, np.ones(1, np.float32))
    with moving(spec, [make(tmp_path, scheme, fraction=0.25, pick_ahead_steps=0)]) as engine:
        engine.train([batch] * 12)
    saved = rows_saved(tmp_path, spec)
    assert len(saved) == 6
    for rows in saved:
        assert {key: len(ids) for key, ids in rows.items()} == {
            (name, shard): n for name, n in (("width_2", 3), ("width_4", 2)) for shard in range(4)
        }


@pytest.mark.parametrize(("home", "scheme"), both(without=("vanilla", "random")))
def test_a_shard_that_came_back_equals_what_is_saved_and_is_not_saved_again(tmp_path, home, scheme):
    """The tracker has nothing to save of a restored shard until its rows are touched again."""
    with watched(home, tmp_path, scheme, fraction=1.0, pick_ahead_steps=0) as (engine, recovery):
        engine.train(batches(0, 6))
        recovery.recover([1])
        engine.train(nothing(2))  # saves at 8
    (saved,) = rows_saved(tmp_path)
    assert all((len(rows) == 0) == (shard == 1) for (_, shard), rows in saved.items())


def test_a_row_touched_once_and_never_saved_returns_to_its_initial_value(tmp_path):
    row = 4 * 17 + 1  # of shard 1
    ids = {"pair": np.array([[row, -1]], np.int32), "wide": np.array([-1], np.int32)}
    once = Batch(ids, np.ones(1, np.float32))
    with watched("host", tmp_path, "mfu", save_every_steps=1000.0) as (engine, recovery):
        value = engine.tables.shards["width_4"][1]["value"]
        before = value[17].copy()
        engine.train([once])
        assert (value[17] != before).all()
        recovery.recover([1])
    np.testing.assert_array_equal(value[17], before)


@pytest.mark.parametrize("home", HOMES)
def test_full_recovery_trains_again_to_the_same_bits(tmp_path, home):
    with watched(home, tmp_path / "run", mode="full", failures={13: [0], 30: [2]}) as (engine, recovery):
        state = engine.train(batches)
    assert recovery.lost_steps == (13 - 8) + (30 - 24) and recovery.pls == 0 and recovery.failed == 2
    plain = train(home)
    assert all(same(rows_of(state, shard), rows_of(plain, shard)) for shard in range(4))
    np.testing.assert_array_equal(state.dense.params["w"], plain.dense.params["w"])


IN_THE_GATE = [(4, "vanilla"), (4, "mfu"), (4, "ssu"), (0, "mfu")]


@pytest.mark.parametrize(
    ("ahead", "scheme"),
    chosen([(ahead, scheme) for ahead in (0, 4) for scheme in SCHEMES], lambda *case: case in IN_THE_GATE),
)
def test_under_oac_saves_and_failures_give_the_bits_of_one_batch_after_the_other(tmp_path, scheme, ahead):
    """24 and 36 are regular saves, so failures there restore the rows just saved."""
    failures = {15: [1], 24: [3], 33: [0, 2], 36: [1]}
    more = {"save_every_steps": 12, "fraction": 0.5, "failures": failures, "pick_ahead_steps": ahead}
    with watched("host", tmp_path / "plain", scheme, **more) as (serial, plain):
        wanted = serial.train(batches())
    recovery = make(tmp_path / "oac", scheme, **more)
    with oac(4, [recovery]) as pipeline:
        pipeline.train(batches())
    found, calm = pipeline.state, train("host")
    assert all(same(rows_of(found, shard), rows_of(wanted, shard)) for shard in range(4))
    assert (recovery.pls, recovery.saves, recovery.rows_saved) == (plain.pls, plain.saves, plain.rows_saved)
    assert not all(same(rows_of(found, shard), rows_of(calm, shard)) for shard in range(4))


SKIPPED = pytest.warns(UserWarning, match="skipped what is damaged")
FAILED = pytest.warns(UserWarning, match="a save failed, and the next one tries again.*File exists")


PICKED = [(more, name, home) for more in (0, 1) for name in ("mfu", "ssu", "round_robin") for home in HOMES]


@pytest.mark.parametrize(  # negative control: one more batch after the save
    ("more", "scheme", "home"),
    chosen(PICKED, lambda more, scheme, home: HOST_ALL_DEVICE_MFU(home, scheme) and (not more or scheme == "mfu")),
)
def test_what_is_picked_ahead_is_written_as_it_is_at_the_save_and_not_again(tmp_path, home, scheme, more):
    """Rows picked after batch 4 are touched again; the save at 8 must hold them as of step 8."""
    at_save = {}

    def keep(state):
        at_save.update({shard: rows_of(state, shard) for shard in range(4)})

    with watched(home, tmp_path, scheme, before=[at_step(8, keep)], fraction=1.0) as (engine, recovery):
        given = [*batches(0, 4), *batches(0, 4), *batches(0, more), *nothing(8 - more)]
        engine.train(given)  # the second save is at 16
        recovery.recover([2])
        restored = rows_of(engine.state, 2)
    assert more or same(restored, at_save[2])
    first, second = rows_saved(tmp_path)
    assert sum(map(len, first.values())) > 0
    assert bool(more) == any(np.isin(rows, first[key]).any() for key, rows in second.items())


def test_a_failure_between_pick_and_save_drops_the_pick(tmp_path):
    with watched("host", tmp_path, "mfu", fraction=1.0, failures={6: [1]}) as (engine, recovery):
        engine.train(batches(0, 8))
        wanted = [rows_of(engine.state, shard) for shard in range(4)]
        for shard in range(4):
            recovery.recover([shard])
            assert same(rows_of(engine.state, shard), wanted[shard])


def touched_by(given):
    """{(stack, row)} that batches look up."""
    plans = [item for batch in given for item in plan(SPEC, batch.ids).items()]
    return {(name, int(row)) for name, one in plans for row in one.unique.flat if row < SPEC.stacks[name].rows}


def all_are_saved_by_the_next_save(engine, directory):
    """Whether the next save holds all rows of the first 8 batches, whose save at 8 has failed."""
    engine.train(nothing(8))
    until(lambda: len(deltas(directory)) == 1)
    (saved,) = rows_saved(directory)
    return {(name, int(row)) for (name, _), rows in saved.items() for row in rows} == touched_by(batches(0, 8))


def test_rows_that_could_not_be_copied_stay_to_be_saved(tmp_path):
    room = []

    class Uncopied(HostTables):
        def take(self, rows):
            if not room:
                raise MemoryError("no room for a copy")
            return super().take(rows)

    state = fresh("host")
    state = state._replace(tables=Uncopied(SPEC, state.tables.layout, state.tables.shards))
    more = {"fraction": 1.0, "pick_ahead_steps": 0}
    with watched("host", tmp_path, "mfu", state, **more) as (engine, _):
        with pytest.raises(MemoryError, match="no room for a copy"):
            engine.train(batches(0, 8))
        room.append("enough")
        assert all_are_saved_by_the_next_save(engine, tmp_path)


@pytest.mark.parametrize("under_oac", [False, True])
def test_rows_that_could_not_be_written_stay_to_be_saved_and_training_goes_on(tmp_path, under_oac):
    recovery = make(tmp_path, "mfu", fraction=1.0, pick_ahead_steps=0)
    with oac(4, [recovery]) if under_oac else Serial(TASK, fresh("host"), [recovery]) as engine:
        with in_the_way(tmp_path, "delta_000001"):
            engine.train(batches(0, 8))
            until(lambda: recovery.failed_saves)
        with FAILED:
            assert all_are_saved_by_the_next_save(engine, tmp_path)
        assert len(recovery.failed_saves) == 1


@pytest.mark.parametrize("scheme", [mfu(), round_robin(), random_rows()], ids=lambda scheme: scheme.name)
def test_after_a_failed_save_every_access_counts_also_those_between_its_pick_and_it(tmp_path, scheme):
    """Picked at 4, not saved at 8, and picked again at 12."""
    given, at_picks, wanted = [*batches(0, 8), *nothing(4)], [], []
    for name, stack in SPEC.stacks.items():
        tracker = scheme.init(fresh("host").tables.parts(name)["value"], stack.rows_per_shard)
        for batch in given:
            tracker = scheme.touch(tracker, plan(SPEC, batch.ids)[name])
        wanted.append(tracker.count)
    pick = lambda tracker, *more: (at_picks.append(tracker.count.copy()), scheme.pick(tracker, *more))[1]
    watching = scheme._replace(pick=pick)
    recovery = Recovery(tmp_path, 8, STEPS, scheme=watching, fraction=1.0, save_at_end=False)
    with FAILED, in_the_way(tmp_path, "delta_000001"), Serial(TASK, fresh("host"), [recovery]) as engine:
        engine.train(given)
    assert len(at_picks) == 2 * len(wanted)
    jax.tree.map(np.testing.assert_array_equal, at_picks[len(wanted) :], wanted)


def test_under_oac_later_batches_are_written_while_rows_are_still_written_to_disk(tmp_path, monkeypatch):
    done, slow = threading.Event(), []
    with oac(2, [make(tmp_path, "mfu", save_every_steps=100.0, fraction=0.08)]) as pipeline:
        write = lambda *given: (slow.append(done.wait(60)), write_delta(*given))[1]
        monkeypatch.setattr("jaxrec.checkpoint.row_deltas.write_delta", write)
        for state, _ in pipeline.run(batches(0, 15)):  # one save, after step 8
            if int(state.dense.step) == 14:
                done.set()
    assert slow == [True]  # the write took until six more batches of a window of two were done


def test_a_failure_during_a_cut_waits_for_it(tmp_path, monkeypatch):
    """A failure in the loop body right after a step whose snapshot is still being saved restores that save."""
    slow = []

    def write_meanwhile(*given):
        until(lambda: is_inside(Recovery.recover))
        slow.append(given)
        return write_delta(*given)

    monkeypatch.setattr("jaxrec.checkpoint.row_deltas.write_delta", write_meanwhile)
    recovery = make(tmp_path, "mfu", fraction=1.0, pick_ahead_steps=0)
    with oac(4, [recovery]) as pipeline:
        for number, _ in enumerate(pipeline.run(batches(0, 16)), 1):
            if number in (8, 16):
                recovery.recover([1])
    assert len(slow) == 2 and recovery.pls == 0
    assert same(rows_of(pipeline.state, 1), rows_of(train("host", 16), 1))


@pytest.mark.parametrize("fraction", [0.3, 0.75])
def test_regular_saves_come_though_saves_between_them_do_not_divide_their_interval(tmp_path, fraction):
    more = {"save_every_steps": 10, "fraction": fraction, "whole": ["small"]}
    with watched("host", tmp_path, "mfu", **more) as (engine, recovery):
        engine.train(batches(0, 29))
        recovery.recover([1])
    assert recovery.pls <= (29 - 20) / (STEPS * 4)


@pytest.mark.parametrize("home", HOMES)
def test_a_shard_comes_back_though_the_last_save_failed_and_the_failure_is_told(tmp_path, home):
    wanted = {}
    keep = at_step(8, lambda state: wanted.update(rows_of(state, 2)))
    more = {"fraction": 1.0, "pick_ahead_steps": 0, "before": [keep]}
    with (
        in_the_way(tmp_path, "delta_000002"),
        pytest.raises(OSError, match="File exists"),
        watched(home, tmp_path, "mfu", **more) as (engine, recovery),
    ):
        engine.train(batches(0, 20))  # saves at 8; at 16 it fails
        with FAILED:
            recovery.recover([2])
        assert same(rows_of(engine.state, 2), wanted) and recovery.pls == pytest.approx((20 - 8) / (STEPS * 4))
        engine.train(batches(20, 24))  # the last save fails, which is raised on exit


def test_a_directory_of_another_run_is_refused(tmp_path):
    for scheme in ("vanilla", "mfu"):
        with watched("host", tmp_path / scheme, scheme) as (engine, _):
            engine.train(batches(0, 20))
        files = sorted((tmp_path / scheme).iterdir())
        with pytest.raises(ValueError, match="would take for this run's"), watched("host", tmp_path / scheme, scheme):
            pass
        assert sorted((tmp_path / scheme).iterdir()) == files


def test_what_fails_past_the_end_or_with_a_damaged_delta_counts_when_it_is_recovered(tmp_path):
    more = {"fraction": 1.0, "total_steps": 10, "pick_ahead_steps": 0}
    with watched("host", tmp_path, "mfu", **more) as (engine, recovery):
        engine.train(batches(0, 20))
        recovery.recover([0])
        before = recovery.pls, recovery.failed
        (newest, *_) = deltas(tmp_path)
        damage(newest, 1)
        whole, lost = rows_of(engine.state, 0), rows_of(engine.state, 1)
        with pytest.warns(UserWarning, match=f"skipped what is damaged: .*{newest.name}"):
            recovery.recover([0, 1])  # only the file of shard 1 is damaged
        assert recovery.pls == pytest.approx(before[0] + ((20 - 16) + (20 - 8)) / (20 * 4)) and recovery.failed == 3
        assert same(rows_of(engine.state, 0), whole) and not same(rows_of(engine.state, 1), lost)
        assert all(np.isfinite(array).all() for array in rows_of(engine.state, 1).values())


def test_a_shard_from_an_older_image_lacks_what_was_trained_since_the_last_regular_save_of_that(tmp_path):
    with watched("host", tmp_path, "mfu") as (engine, recovery):  # a save after each step
        engine.train(batches(0, 14))
        recovery.recover([0])  # waits for the last save
        before, (newest, older, *_) = recovery.pls, deltas(tmp_path)
        assert read_manifest(older).step == 13 and before == pytest.approx((14 - 8) / (STEPS * 4))
        damage(newest, 0)
        with SKIPPED:
            recovery.recover([0])
        assert recovery.pls - before == pytest.approx((14 - 8) / (STEPS * 4))


@pytest.mark.parametrize("full", [False, True], ids=["", "on a full disk"])
def test_a_damaged_chain_does_not_grow_a_base_is_saved_at_once_or_by_the_next_save(tmp_path, full):
    with watched("host", tmp_path, "mfu", fraction=1.0) as (engine, recovery):
        engine.train(batches(0, 20))
        recovery.recover([0])  # waits for the last save
        damage(deltas(tmp_path)[0], 1)
        with in_the_way(tmp_path, "step_00000020") if full else contextlib.nullcontext(), SKIPPED:
            with FAILED if full else contextlib.nullcontext():
                recovery.recover([1])
        assert [path.name for path in images(tmp_path)] == ([] if full else ["step_00000020"])
        engine.train(batches(20, 25))
        recovery.recover([0])  # waits for the save of step 24
    if full:
        assert [path.name for path in images(tmp_path)] == ["step_00000024"] and not deltas(tmp_path)


def test_a_base_is_kept_when_a_run_begins_in_the_middle(tmp_path):
    with watched("host", tmp_path, "mfu", state=train("host", 10)) as (engine, recovery):
        wanted = rows_of(engine.state, 3)
        assert [path.name for path in images(tmp_path)] == ["step_00000010"]
        recovery.recover([3])
        assert same(rows_of(engine.state, 3), wanted)


def test_a_plan_without_some_rows_reads_all_others():
    for batch in batches(0, 5):
        for whole, plans in ((range(90, 97), plan(SPEC, batch.ids)), (range(3, 50), plan(SPEC, batch.ids))):
            old = plans["width_4"]
            new = without_rows(old, np.isin(old.unique, list(whole)), SPEC.stacks["width_4"].rows)
            flat = np.append(old.unique.reshape(-1), -1)
            again = np.append(new.unique.reshape(-1), -1)
            a, b = flat[old.inverse["pair"]], again[new.inverse["pair"]]
            np.testing.assert_array_equal(b, np.where(np.isin(a, list(whole)), -1, a))
            assert new.count.sum() == len(np.unique(b[b >= 0]))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"save_every_steps": 0}, "save_every_steps=0"),
        ({"total_steps": 0}, "total_steps=0"),
        ({"mode": "some"}, "mode='some'"),
        ({"mode": "full", "scheme": mfu()}, "scheme='mfu' must be None"),
        ({"fraction": 0.0}, "fraction=0.0"),
        ({"whole": ["huge"]}, "unknown tables"),
        ({"whole": ["small"], "scheme": scar()}, "scheme='scar' compares all rows"),
        ({"failures": {3: [4]}}, r"shards=\[4\] must be distinct"),
        ({"failures": {0: [1]}}, "a step of failures=0 must be a whole number from 1 to 40, the steps that this run"),
        ({"failures": {9: [1], 41: [3]}}, "a step of failures=41 must .* from 1 to 40, .* Give one of these, or more"),
        ({"pick_ahead_steps": 2.5}, "pick_ahead_steps=2.5"),
    ],
)
def test_bad_input_is_refused(tmp_path, changed, message):
    given = {"save_every_steps": 8, "total_steps": 40} | changed
    with pytest.raises(ValueError, match=message), Serial(TASK, fresh("host"), [Recovery(tmp_path, **given)]):
        pass
    assert not list(tmp_path.iterdir())


def test_a_failure_before_the_first_step_has_happened_only_if_there_is_an_image(tmp_path):
    with watched("host", tmp_path, failures={5: [1]}) as (engine, recovery):
        engine.train(batches(0, 6))
        recovery.save_whole()
    state, image = restore(tmp_path, fresh("host"))
    with pytest.raises(ValueError, match="a step of failures=5 must be a whole number from 7 to 40"):
        with watched("host", tmp_path / "other", state=state, failures={5: [1]}):
            pass
    with watched("host", tmp_path, state=state, failures={5: [1]}, image=image):
        pass


def test_what_comes_at_the_wrong_time_or_place_is_refused(tmp_path):
    recovery = make(tmp_path)
    engine = Serial(TASK, fresh("host"), [recovery])
    with pytest.raises(ValueError, match="run it within `with engine:`"):
        engine.run(batches())
    with pytest.raises(ValueError, match="this recovery has not begun"):
        recovery.recover([1])
    with engine:
        with pytest.raises(ValueError, match="has begun before"), Serial(TASK, fresh("host"), [recovery]):
            pass
        with pytest.raises(ValueError, match="must be distinct"):
            recovery.recover([4])
        engine.enter(lambda info: recovery.recover([1]))
        with pytest.raises(ValueError, match="was read in `after_step`"):
            engine.train(batches())
    assert engine.step == 1
    with pytest.raises(ValueError, match="this recovery is closed"):
        recovery.recover([1])


def test_full_recovery_over_an_iterable_is_refused_before_any_step(tmp_path):
    stream = batches()
    with watched("host", tmp_path, mode="full") as (engine, _):
        for begin in (engine.run, engine.train):
            with pytest.raises(ValueError, match="a recovery may go back to an earlier step"):
                begin(stream)
    assert engine.step == 0 and len(list(stream)) == STEPS  # no batch was taken


@pytest.mark.parametrize("kind", [Serial, Pipeline])
def test_a_checkpointer_among_the_callbacks_saves_at_multiples_of_its_interval(tmp_path, kind):
    """Also at the first step of a run that begins in the middle; every image is of its step, bit for bit."""
    with kind(TASK, train("host", 4), [Checkpointer(tmp_path, keep=9, every_steps=5)]) as engine:
        engine.train(batches(4, 12))
        engine.train(batches(12, 18))
    found = [restore(path, fresh("host")) for path in images(tmp_path)]
    assert [image.step for _, image in found] == [15, 10, 5]
    for state, image in found:
        wanted = train("host", image.step)
        assert all(same(rows_of(state, shard), rows_of(wanted, shard)) for shard in range(4))
        jax.tree.map(np.testing.assert_array_equal, state.dense, wanted.dense)


def test_a_checkpointer_saves_late_after_a_reset_or_a_failed_step_and_not_beyond_its_block(tmp_path):
    engine = Serial(TASK, fresh("host"), [failing_at(10)])
    with engine:
        engine.enter(Checkpointer(tmp_path / "one", keep=9, every_steps=5))
        stream = batches(0, 14)
        with pytest.raises(KeyError):
            engine.train(stream)
        engine.train(stream)
    assert [number_of(path) for path in images(tmp_path / "one")] == [11, 5]
    with engine:
        engine.enter(Checkpointer(tmp_path / "two", keep=9, every_steps=5))
        engine.train(batches(14, 17))
        engine.reset(train("host", 18))
        engine.train(batches(18, 22))
    assert [number_of(path) for path in images(tmp_path / "two")] == [20, 15]


@pytest.mark.parametrize("kind", [Serial, Pipeline])
def test_a_checkpointer_saves_what_is_trained_after_a_reset_in_place_of_what_was_before_it(tmp_path, kind):
    """The image of the same step was kept as intact, so that the state before the reset was restored."""
    with kind(TASK, fresh("host"), [Checkpointer(tmp_path, every_steps=5)]) as engine:
        engine.train(batches(0, 5))
        engine.reset(fresh("host"))
        state = engine.train(batches(20, 25))
    found, image = restore(tmp_path, fresh("host"))
    assert image.step == 5 and all(same(rows_of(found, shard), rows_of(state, shard)) for shard in range(4))
    jax.tree.map(np.testing.assert_array_equal, found.dense, state.dense)


# ---- failures around a recovery


def test_a_callback_that_fails_at_a_save_does_not_keep_later_saves_waiting_for_ever(tmp_path):
    """A snapshot that was announced but never taken used to block the thread that picks ahead, and the next save."""
    found = []
    for name in ("disturbed", "calm"):
        with watched("host", tmp_path / name, "mfu", fraction=1.0) as (engine, recovery):
            stream = batches(0, 24)
            if name == "disturbed":
                engine.enter(failing_at(8))
                with pytest.raises(KeyError):
                    engine.train(stream)
            engine.train(stream)
            recovery.recover([1])
            found.append((recovery.saves, recovery.pls, rows_of(engine.state, 1)))
    assert found[0][:2] == found[1][:2] == (3, 0) and same(found[0][2], found[1][2])


@pytest.mark.parametrize("scheme", ["vanilla", "mfu"])
def test_after_another_state_was_put_in_its_rows_are_those_that_come_back(tmp_path, scheme):
    other = train("host", 7)
    wanted = rows_of(other, 2)
    with watched("host", tmp_path, scheme) as (engine, recovery):
        engine.train(batches(0, 7))  # picks the rows of the save at step 8
        engine.exclusive(lambda tables: fill_with_nan(tables, 2))
        engine.reset(other)
        recovery.recover([2])
        assert same(rows_of(engine.state, 2), wanted) and recovery.pls == 0
        engine.train(batches(7, 24))  # saves must not wait for the discarded snapshot
        recovery.recover([2])
    assert recovery.pls == 0


@pytest.mark.parametrize("under_oac", [False, True])
@pytest.mark.parametrize(("unseen", "saved"), [(6, 8), (7, 8), (8, 9)])  # a save is due at 8
def test_rows_of_a_step_that_the_recovery_has_not_seen_are_saved_with_all_others(tmp_path, unseen, saved, under_oac):
    recovery = make(tmp_path, "mfu", fraction=1.0)
    callbacks = [failing_at(unseen), recovery]
    with oac(2, callbacks) if under_oac else Serial(TASK, fresh("host"), callbacks) as engine:
        stream = batches(0, saved)
        with pytest.raises(KeyError):
            engine.train(stream)
        engine.train(stream)
        wanted = rows_of(engine.state, 1)
        recovery.recover([1])
        assert same(rows_of(engine.state, 1), wanted) and read_manifest(images(tmp_path)[0]).step == saved


def copy_a_shard(tables):
    """The tables whose shard 1 has the rows of shard 2."""
    return tables.with_shard("width_8", 1, {part: rows[2] for part, rows in tables.parts("width_8").items()})


@pytest.mark.parametrize("scheme", ["vanilla", "mfu", "ssu", "scar"])
@pytest.mark.parametrize("kind", [Serial, Pipeline])
@pytest.mark.parametrize("change_at", [5, 8], ids=["before a save", "in the callback after it"])
def test_rows_that_exclusive_has_changed_are_in_the_next_save_though_no_batch_reads_them(
    tmp_path, kind, scheme, change_at
):
    recovery = make(tmp_path, scheme, save_every_steps=4, fraction=1.0, pick_ahead_steps=2)
    change = at_step(change_at, lambda state: engine.exclusive(copy_a_shard))
    with kind(TASK, fresh("host"), [recovery, change]) as engine:
        engine.train(batches(0, 5))
        engine.train(nothing(8))
        wanted = [rows_of(engine.state, shard) for shard in range(4)]
        assert same(wanted[1]["width_8", "value"], wanted[2]["width_8", "value"])
        assert recovery.saves == 3 or scheme != "vanilla"  # which hold all rows anyway: none is in the foreground
        recovery.recover([0, 1, 2, 3])
        assert all(same(rows_of(engine.state, shard), wanted[shard]) for shard in range(4))


@pytest.mark.parametrize("scheme", ["vanilla", "mfu"])
@pytest.mark.parametrize("kind", [Serial, Pipeline])
def test_the_end_saves_what_exclusive_has_changed_since_the_save_of_its_step(tmp_path, kind, scheme):
    with kind(TASK, fresh("host"), [make(tmp_path, scheme, save_at_end=True, total_steps=8)]) as engine:
        engine.train(batches(0, 8))
        engine.exclusive(copy_a_shard)
        wanted = [rows_of(engine.state, shard) for shard in range(4)]
    found, _ = restore(tmp_path, fresh("host"))
    assert all(same(rows_of(found, shard), wanted[shard]) for shard in range(4))


@pytest.mark.parametrize("kind", [Serial, Pipeline])
def test_rows_that_exclusive_has_changed_before_a_recovery_begins_are_in_its_next_save(tmp_path, kind):
    with kind(TASK, fresh("host"), [make(tmp_path, "mfu")]) as engine:
        engine.train(batches(0, 8))
    state, image = restore(tmp_path, fresh("host"))
    with kind(TASK, state) as engine:
        engine.exclusive(copy_a_shard)
        recovery = engine.enter(make(tmp_path, "mfu", image=image))
        engine.train(nothing(8))
        wanted = rows_of(engine.state, 1)
        recovery.recover([1])
        assert same(rows_of(engine.state, 1), wanted)


def test_no_image_of_parameters_that_are_not_finite_takes_the_place_of_a_good_one_at_the_end(tmp_path):
    def break_them(info):
        broken = info.state.dense._replace(params={"w": np.inf * info.state.dense.params["w"]})
        return info.state._replace(dense=broken) if info.step == 10 else None

    with pytest.raises(FloatingPointError, match="not finite after step 10"):
        with watched("host", tmp_path, before=[break_them], save_at_end=True) as (engine, _):
            engine.train(batches(0, 10))
    assert restore(tmp_path, fresh("host"))[1].step == 8


@pytest.mark.parametrize("kind", [Serial, Pipeline])
def test_a_look_at_rest_and_a_shard_that_has_come_back_make_no_save_one_of_all_rows(tmp_path, kind):
    looks = []
    with kind(TASK, fresh("host"), [recovery := make(tmp_path, "mfu", fraction=1.0)]) as engine:
        engine.enter(at_step(5, lambda state: engine.at_rest(lambda tables: looks.append(rows_of(engine, 1)))))
        engine.enter(at_step(11, lambda state: engine.lose([2])))
        engine.train(batches(0, 12))
        recovery.recover([1])
        engine.train(batches(12, 24))
        assert recovery.saves == 3 and not images(tmp_path) and engine.changes == 1
    assert same(looks[0], rows_of(train("host", 5), 1))


@pytest.mark.parametrize("scheme", ["vanilla", "mfu"])
def test_a_state_changed_at_a_saved_step_takes_the_place_of_the_saved_one(tmp_path, scheme):
    def all_come_back():
        wanted = [rows_of(engine.state, shard) for shard in range(4)]
        recovery.recover([0, 1, 2, 3])
        restored, image = restore(tmp_path, fresh("host"))
        found = [[rows_of(state, shard) for shard in range(4)] for state in (engine.state, restored)]
        return image.step == 8 and all(map(same, found[0], wanted)) and all(map(same, found[1], wanted))

    with watched("host", tmp_path, scheme) as (engine, recovery):
        engine.train(batches(0, 8))
        recovery.save_whole()
        engine.exclusive(copy_a_shard)
        recovery.save_whole()
        assert all_come_back()
        engine.reset(Serial(TASK, fresh("host")).train(batches(32, 40)))  # another state of step 8
        assert all_come_back()


def test_rows_trained_after_a_base_are_saved_though_the_save_before_it_held_them(tmp_path):
    """What that save held was subtracted from the trackers that the base starts afresh."""
    more = {"fraction": 1.0, "pick_ahead_steps": 0, "before": [failing_at(10)]}
    with watched("host", tmp_path, "mfu", **more) as (engine, recovery):
        stream = batches(0, 24)
        with pytest.raises(KeyError):
            engine.train(stream)  # saves at 8
        engine.train(stream)  # a base at 16, as step 10 was not seen, the rows touched since at 24
        assert [path.name for path in images(tmp_path)] == ["step_00000016"]
        wanted = [rows_of(engine.state, shard) for shard in range(4)]
        recovery.recover([0, 1, 2, 3])
        assert all(same(rows_of(engine.state, shard), wanted[shard]) for shard in range(4)) and recovery.pls == 0


def test_a_failed_save_of_rows_does_not_end_training_at_the_base_after_it(tmp_path):
    more = {"fraction": 1.0, "pick_ahead_steps": 0, "before": [failing_at(10)]}
    with watched("host", tmp_path, "mfu", **more) as (engine, recovery):
        stream = batches(0, 20)
        with in_the_way(tmp_path, "delta_000001"), pytest.raises(KeyError):
            for _ in engine.run(stream):
                until(lambda: engine.step < 8 or recovery.failed_saves)
        with FAILED:
            engine.train(stream)
        assert [path.name for path in images(tmp_path)] == ["step_00000016"] and len(recovery.failed_saves) == 1


def test_an_engine_has_one_recovery_at_a_time_and_goes_on_without_it(tmp_path):
    engine = Serial(TASK, fresh("host"))
    with engine:
        engine.enter(make(tmp_path / "one"))
        with pytest.raises(ValueError, match="this engine has a recovery already"):
            engine.enter(make(tmp_path / "two"))
        engine.train(batches(0, 7))
    engine.train(batches(7, 9))  # past the step of an announced save
    with engine:
        again = engine.enter(make(tmp_path / "three", "mfu"))
        engine.train(batches(9, 20))
        again.recover([0, 1, 2, 3])
    assert again.failed == 4


def test_of_two_recoveries_the_second_is_refused_and_leaves_its_directory_untouched(tmp_path):
    with watched("host", tmp_path / "two", "mfu") as (engine, _):
        engine.train(batches(0, 9))
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "two").rglob("*")}
    one, two = make(tmp_path / "one"), make(tmp_path / "two", image=read_manifest(deltas(tmp_path / "two")[0]))
    with pytest.raises(ValueError, match="this engine has a recovery already, which saves in .*one"):
        with Serial(TASK, fresh("host"), [one, two]):
            pass
    assert one.closed and files == {path: path.stat().st_mtime_ns for path in (tmp_path / "two").rglob("*")}


@pytest.mark.parametrize("kind", [Serial, Pipeline])
def test_a_rollback_that_ends_amid_the_rows_breaks_the_engine_until_a_reset(tmp_path, kind, monkeypatch):
    every, recovery = list(batches()), make(tmp_path, mode="full", failures={20: [1]})
    left, with_shard = [3], HostTables.with_shard

    def failing(tables, *given):
        left[0] -= 1
        if not left[0]:
            raise OSError("the disk cannot be read")
        return with_shard(tables, *given)

    with kind(TASK, fresh("host"), [recovery]) as engine:
        with monkeypatch.context() as patch, pytest.raises(OSError, match="cannot be read"):
            patch.setattr(HostTables, "with_shard", failing)
            engine.train(lambda step: every[step:])
        with pytest.raises(BrokenEngine):
            engine.train(lambda step: every[step:])
        state, image = restore(tmp_path, fresh("host"))
        engine.reset(state)
        state = engine.train(lambda step: every[step:])
        assert image.step == 16
        assert all(same(rows_of(state, shard), rows_of(train("host"), shard)) for shard in range(4))


@pytest.mark.parametrize("kind", [Serial, Pipeline])
def test_a_snapshot_dropped_for_a_loss_does_not_keep_the_next_pick_waiting(tmp_path, kind):
    """The loss of a batch at a save is infinite, its gradient is not, and the user goes on."""

    def sometimes_infinite(params, activations, batch):
        broken = batch.label > 1
        found = loss(params, activations, batch._replace(label=jnp.where(broken, 0, batch.label)))
        return found + jax.lax.stop_gradient(jnp.where(broken, jnp.inf, 0.0))

    every = list(batches())
    every[7] = every[7]._replace(label=np.full(12, 5, np.float32))
    task = dataclasses.replace(TASK, loss=sometimes_infinite)
    recovery = make(tmp_path, "mfu", fraction=1.0)
    with kind(task, task.init({"w": jnp.ones(3)}, "host"), [recovery]) as engine:
        stream = iter(every)
        with pytest.raises(FloatingPointError, match="the loss is inf"):
            engine.train(stream)
        engine.train(stream)
    assert recovery.saves >= 3


def test_a_chain_that_cannot_be_merged_gives_way_to_a_base(tmp_path):
    more = {"fraction": 1.0, "most_deltas": 3, "save_every_steps": 4, "pick_ahead_steps": 0}
    with watched("host", tmp_path, "mfu", **more) as (engine, recovery):
        engine.train(batches(0, 10))
        recovery.recover([0])  # waits for the last save
        damage(deltas(tmp_path)[0], 1)
        with pytest.warns(UserWarning, match="cannot be merged"):
            state = engine.train(batches(10, STEPS))
            recovery.recover([0])
    assert not recovery.failed_saves and len(images(tmp_path)) == 1
    found, _ = restore(tmp_path, fresh("host"))
    assert all(same(rows_of(found, shard), rows_of(state, shard)) for shard in range(4))


@pytest.mark.parametrize("what", ["write_json", "remove_directory"])
def test_a_base_counts_though_what_it_replaces_cannot_be_removed(tmp_path, what, monkeypatch):
    def fail(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with watched("device", tmp_path, "mfu", fraction=1.0) as (engine, recovery):
        engine.train(batches(0, 18))
        recovery.recover([0])  # waits for the last save
        damage(deltas(tmp_path)[0], 1)
        with monkeypatch.context() as patch, SKIPPED, pytest.warns(UserWarning, match="could not be removed, or"):
            patch.setattr(f"jaxrec.checkpoint.row_deltas.{what}", fail)
            recovery.recover([1])
        engine.train(batches(18, STEPS))
    assert [path.name for path in images(tmp_path)] == ["step_00000018"]
    assert restore(tmp_path, fresh("device"))[1].step == STEPS


def test_an_image_counts_though_those_before_it_cannot_be_removed(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    monkeypatch.setattr("jaxrec.checkpoint.checkpointer.remove_directory", fail)
    with watched("host", tmp_path) as (engine, recovery), pytest.warns(UserWarning, match="could not be removed"):
        engine.train(batches())
        recovery.save_whole()
    assert not recovery.failed_saves and images(tmp_path)[0].name == "step_00000040"


def test_an_image_saved_within_a_recovery_records_it(tmp_path):
    with watched("host", tmp_path, "mfu", fraction=1.0) as (engine, recovery):
        engine.train(batches(0, 20))
        recovery.recover([0])  # waits for the last save
        damage(deltas(tmp_path)[0], 1)
        with SKIPPED:
            recovery.recover([1, 2])
        live = recovery.pls, recovery.failed
    assert live[1] == 3 and live[0] > 0
    image = read_manifest(images(tmp_path)[0])
    assert image.step == 20 and (image.extra["cpr"]["pls"], image.extra["cpr"]["failed"]) == live
