"""Recovery: survivors do not notice, the victim is what was saved, no failure is no difference; both homes and OAC."""

import contextlib
import math
import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrec import Batch, init_state, make_mesh, make_train_step
from jaxrec.checkpoint import RowCheckpointer, deltas, images
from jaxrec.cpr import Recovery, RolledBack, lose, mfu, random, round_robin, scar, ssu
from jaxrec.cpr.watch import without_rows
from jaxrec.embedding import DeviceTables, EmbeddingSpec, HostTables, Lookup, Table, adagrad, plan
from jaxrec.loop import fit, planned
from jaxrec.oac import Pipeline
from jaxrec.step import make_update
from jaxrec.types import DenseState, TrainState

TABLES = {"big": Table(90, 4), "small": Table(7, 4), "wide": Table(40, 8)}
SPEC = EmbeddingSpec(TABLES, {"pair": Lookup(("big", "small")), "wide": Lookup("wide")}, shards=4)
ROWS, DENSE = adagrad(0.1), optax.adam(0.01)
SCHEMES = {
    "vanilla": None,
    "mfu": mfu(),
    "ssu": ssu(1),
    "scar": scar(),
    "round_robin": round_robin(),
    "random": random(),
}
STEPS = 40


def loss(params, activations, batch):
    logit = activations["pair"].sum((1, 2)) + activations["wide"].sum(-1) * params["w"].sum()
    return optax.sigmoid_binary_cross_entropy(logit, batch.label)


STEP = make_train_step(SPEC, loss, DENSE, ROWS)
CAPACITY = {"width_4": 16, "width_8": 12}  # as much as any batch needs, so that each home compiles once


def batches(start=0, stop=STEPS, size=12):
    for index in range(start, stop):
        rng = np.random.default_rng(index)
        pair = np.stack([rng.zipf(1.5, size) % 90, rng.integers(0, 7, size)], axis=1).astype(np.int32)
        ids = {"pair": pair, "wide": (rng.zipf(1.3, size) % 40).astype(np.int32)}
        label = rng.integers(0, 2, size).astype(np.float32)
        yield Batch(ids, np.zeros((size, 0), np.float32), label, np.ones(size, np.float32))


def fresh(home):
    tables = HostTables.create(SPEC, ROWS) if home == "host" else DeviceTables.create(SPEC, ROWS, make_mesh())
    return init_state({"w": jnp.ones(3)}, DENSE, tables)


def rows_of(state, shard):
    """Copies of all rows and slots of one shard."""
    every = {name: state.tables.parts(name) for name in SPEC.stacks}
    return {(name, part): np.array(rows[shard]) for name in SPEC.stacks for part, rows in every[name].items()}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def train(home, recovery=None, hooks=(), state=None, start=0):
    state = state or fresh(home)
    if recovery is not None and not start:
        state = recovery.begin(state)
    hooks = [*([recovery.hook] if recovery else []), *hooks]
    return fit(state, planned(SPEC, batches(start), CAPACITY), STEP, hooks)


def oac(window):
    return Pipeline(fresh("host"), make_update(SPEC, loss, DENSE, ROWS), mode="oac", window=window)


def make(directory, scheme="vanilla", **more):
    given = {"save_every_steps": 8, "total_steps": STEPS, "scheme": SCHEMES[scheme]} | more
    return Recovery(directory, SPEC, **given)


BOTH = [("host", scheme) for scheme in SCHEMES] + [("device", scheme) for scheme in ("vanilla", "mfu", "ssu")]


@pytest.mark.parametrize(("home", "scheme"), BOTH)
def test_without_failures_nothing_changes(tmp_path, home, scheme):
    with make(tmp_path, scheme, fraction=0.25) as recovery:
        state = train(home, recovery)
    plain = train(home)
    assert all(same(rows_of(state, shard), rows_of(plain, shard)) for shard in range(4))
    assert recovery.pls == 0 and recovery.saves == (5 if scheme == "vanilla" else 20)


@pytest.mark.parametrize(("home", "scheme"), [pair for pair in BOTH if pair[1] != "ssu"])
def test_survivors_do_not_notice_and_the_victim_is_what_was_saved(tmp_path, home, scheme):
    """With fraction 1 a scheme saves every touched row, so that the victim is the table at the last save."""
    kept = {}

    def keep(state, step, plan, metrics):
        if step in (16, 21):
            kept[step] = [rows_of(state, shard) for shard in range(4)]
        return state

    def look(state, step, plan, metrics):
        if step == 21:
            after = [rows_of(state, shard) for shard in range(4)]
            assert same(after[0], kept[21][0]) and same(after[2], kept[21][2])
            assert same(after[1], kept[16][1]) and same(after[3], kept[16][3])
            assert not same(kept[21][1], kept[16][1])  # negative control: training had gone on
            kept["seen"] = True
        return state

    more = {} if scheme == "vanilla" else {"fraction": 1.0, "pick_ahead_steps": 0}
    with make(tmp_path, scheme, failures={21: [1, 3]}, **more) as recovery:
        state = train_with(home, recovery, [keep, recovery.hook, look])
    assert kept["seen"] and all(np.isfinite(array).all() for s in range(4) for array in rows_of(state, s).values())
    assert recovery.pls == pytest.approx(2 * (21 - 16) / (STEPS * 4)) and recovery.failed == 2


def train_with(home, recovery, hooks):
    return fit(recovery.begin(fresh(home)), planned(SPEC, batches(), CAPACITY), STEP, hooks)


@pytest.mark.parametrize("scheme", ["mfu", "ssu", "scar"])
def test_a_scheme_keeps_its_budget_and_loses_less_than_no_save(tmp_path, scheme):
    lost = {}

    def look(state, step, plan, metrics):
        if step in (29, 30):
            lost[step] = rows_of(state, 2)
        return state

    whole = [] if scheme == "scar" else ["small"]
    with make(tmp_path, scheme, fraction=0.25, whole=whole, failures={30: [2]}) as recovery:
        train_with("host", recovery, [look, recovery.hook, lambda s, n, p, m: look(s, n, p, m)])
    assert recovery.saves == 20
    # A quarter of each shard's watched rows, rounded up: 90 (+ 7) and 40 rows in 4 shards; the small table 5 times.
    watched = (97 if scheme == "scar" else 90, 40)
    budget = sum(math.ceil(0.25 * math.ceil(rows / 4)) for rows in watched) * 4 * 20 + (
        0 if scheme == "scar" else 7 * 5
    )
    assert 0 < recovery.rows_saved <= budget
    initial = rows_of(fresh("host"), 2)
    distance = lambda rows: sum(float(np.abs(rows[key] - lost[29][key]).sum()) for key in rows if key[1] == "value")
    assert distance(lost[30]) < 0.7 * distance(initial)


@pytest.mark.parametrize("scheme", ["mfu", "scar", "round_robin", "random"])
def test_no_save_holds_more_rows_of_a_shard_than_its_budget_and_a_busy_one_holds_as_many(tmp_path, scheme):
    """Every row is touched between saves, so that a save writes its whole budget: 3 of 12 and 2 of 5 rows a shard."""
    spec = EmbeddingSpec({"a": Table(46, 2), "b": Table(20, 4)}, {"a": Lookup("a"), "b": Lookup("b")}, shards=4)
    plans, saved = plan(spec, {"a": np.arange(46), "b": np.arange(20)}), []
    tables = HostTables.create(spec, ROWS)
    state = TrainState(DenseState(np.int32(0), {}, ()), tables)
    with Recovery(tmp_path, spec, 8, 100, scheme=SCHEMES[scheme], fraction=0.25, pick_ahead_steps=0) as recovery:
        recovery.begin(state)
        copy = recovery._deltas.save
        recovery._deltas.save = lambda t, rows, *more: saved.append(rows) or copy(t, rows, *more)
        for step in range(1, 13):
            for shards in tables.shards.values():
                for shard in shards:
                    shard["value"][:] += step
            recovery.hook(state, step, plans, {})
    assert len(saved) == 6
    for rows in saved:
        assert {key: len(ids) for key, ids in rows.items()} == {
            (name, shard): n for name, n in (("width_2", 3), ("width_4", 2)) for shard in range(4)
        }


@pytest.mark.parametrize(("home", "scheme"), [pair for pair in BOTH if pair[1] not in ("vanilla", "random")])
def test_a_shard_that_came_back_equals_what_is_saved_and_is_not_saved_again(tmp_path, home, scheme):
    """Its rows are those of the last save, so the tracker has nothing to save of it until it is touched again."""
    saved = []
    with make(tmp_path, scheme, fraction=1.0, pick_ahead_steps=0) as recovery:
        state = recovery.begin(fresh(home))
        state = fit(state, planned(SPEC, batches(0, 6), CAPACITY), STEP, [recovery.hook])
        copy = recovery._deltas.save
        recovery._deltas.save = lambda t, rows, *more: saved.append(rows) or copy(t, rows, *more)
        state = recovery.fail(state, [1])
        recovery._save(state, 8)
    assert all((len(rows) == 0) == (shard == 1) for (_, shard), rows in saved[0].items())


def test_a_row_touched_once_and_never_saved_returns_to_its_initial_value(tmp_path):
    row = 4 * 17 + 1  # of shard 1
    ids = {"pair": np.array([[row, -1]], np.int32), "wide": np.array([-1], np.int32)}
    once = Batch(ids, np.zeros((1, 0), np.float32), np.ones(1, np.float32), np.ones(1, np.float32))
    with make(tmp_path, "mfu", save_every_steps=1000.0) as recovery:
        state = recovery.begin(fresh("host"))
        value = state.tables.shards["width_4"][1]["value"]
        before = value[17].copy()
        state = fit(state, planned(SPEC, [once]), STEP, [recovery.hook])
        assert (value[17] != before).all()
        recovery.fail(state, [1])
    np.testing.assert_array_equal(value[17], before)


def test_full_recovery_trains_again_to_the_same_bits(tmp_path):
    for home in ("host", "device"):
        with make(tmp_path / home, mode="full", failures={13: [0], 30: [2]}) as recovery:
            state, start = recovery.begin(fresh(home)), 0
            while start < STEPS:
                try:
                    given = planned(SPEC, batches(start), CAPACITY)
                    state, start = fit(state, given, STEP, [recovery.hook]), STEPS
                except RolledBack as back:
                    state, start = back.state, back.step
        assert recovery.lost_steps == (13 - 8) + (30 - 24) and recovery.pls == 0
        plain = train(home)
        assert all(same(rows_of(state, shard), rows_of(plain, shard)) for shard in range(4))
        np.testing.assert_array_equal(state.dense.params["w"], plain.dense.params["w"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_under_oac_saves_and_failures_give_the_bits_of_one_batch_after_the_other(tmp_path, scheme):
    more = {"save_every_steps": 12, "fraction": 0.5, "failures": {15: [1], 24: [3], 33: [0, 2], 36: [1]}}
    # 24 and 36 are regular saves: what is saved there is what comes back
    with make(tmp_path / "plain", scheme, pick_ahead_steps=0, **more) as plain:
        wanted = train("host", plain)
    pipeline = oac(window=4)
    with make(tmp_path / "oac", scheme, pipeline=pipeline, **more) as recovery, pipeline:
        recovery.begin(pipeline.state)
        for _ in pipeline.run(batches(), [recovery.hook]):
            pass
    found = pipeline.state
    assert all(same(rows_of(found, shard), rows_of(wanted, shard)) for shard in range(4))
    assert (recovery.pls, recovery.saves, recovery.rows_saved) == (plain.pls, plain.saves, plain.rows_saved)
    calm = train("host")  # negative control: the failures did something
    assert not all(same(rows_of(found, shard), rows_of(calm, shard)) for shard in range(4))


def fail_writes(monkeypatch, fails):
    """The n-th delta cannot be written if fails[n]; those after them can."""
    write, fails = RowCheckpointer._commit, iter(fails)

    def commit(saver, image):
        if next(fails, False):
            raise OSError(28, "No space left on device")
        return write(saver, image)

    monkeypatch.setattr(RowCheckpointer, "_commit", commit)


FAILED = pytest.warns(UserWarning, match="a save failed, and the next one tries again.*No space left")


def test_rows_of_a_save_that_failed_are_saved_by_the_next_one_and_training_goes_on(tmp_path, monkeypatch):
    fail_writes(monkeypatch, [True])
    with make(tmp_path, "mfu", fraction=1.0, pick_ahead_steps=0) as recovery:
        state = recovery.begin(fresh("host"))
        with FAILED:
            state = fit(state, planned(SPEC, batches(0, 16), CAPACITY), STEP, [recovery.hook])  # fails at 8
        wanted = rows_of(state, 1)
        recovery.fail(state, [1])
        assert same(rows_of(state, 1), wanted) and len(recovery.failed_saves) == 1


@pytest.mark.parametrize("home", ["host", "device"])
@pytest.mark.parametrize("scheme", ["mfu", "ssu", "round_robin"])
def test_what_is_picked_ahead_is_written_as_it_is_at_the_save_and_not_again(tmp_path, monkeypatch, home, scheme):
    """Rows picked after batch 4 are touched by the next batches too; the save at 8 holds them as they are then."""
    for more in (0, 1):  # a batch after the save is the negative control
        at_save, written = {}, []

        def keep(state, step, plan, metrics, at_save=at_save):
            at_save |= {shard: rows_of(state, shard) for shard in range(4)} if step == 8 else {}
            return state

        with make(tmp_path / str(more), scheme, fraction=1.0) as recovery:
            state = recovery.begin(fresh(home))
            copy = recovery._deltas.save
            save = lambda t, rows, *rest, written=written, copy=copy: written.append(rows) or copy(t, rows, *rest)
            monkeypatch.setattr(recovery._deltas, "save", save)
            given = [*batches(0, 4), *batches(0, 4), *batches(0, more)]
            state = fit(state, planned(SPEC, given, CAPACITY), STEP, [keep, recovery.hook])
            recovery._save(state, 16)
            state = recovery.fail(state, [2], step=16)
        assert more or scheme == "ssu" or same(rows_of(state, 2), at_save[2])  # a full list forgets rows
        first, second = written
        assert sum(map(len, first.values())) > 0
        assert bool(more) == any(np.isin(rows, first[key]).any() for key, rows in second.items())


def test_a_failure_between_pick_and_save_drops_the_pick(tmp_path):
    with make(tmp_path, "mfu", fraction=1.0, failures={6: [1]}) as recovery:
        state = fit(recovery.begin(fresh("host")), planned(SPEC, batches(0, 8), CAPACITY), STEP, [recovery.hook])
        wanted = [rows_of(state, shard) for shard in range(4)]
        for shard in range(4):
            state = recovery.fail(state, [shard])
            assert same(rows_of(state, shard), wanted[shard])


@pytest.mark.parametrize("under_oac", [False, True])
def test_rows_that_could_not_be_copied_or_written_stay_to_be_saved(tmp_path, monkeypatch, under_oac):
    pipeline = oac(window=4) if under_oac else None
    recovery = make(tmp_path, "mfu", fraction=1.0, pipeline=pipeline, pick_ahead_steps=0)
    state = recovery.begin(pipeline.state if under_oac else fresh("host"))

    def fail(*args):
        raise OSError(28, "No space left on device")

    if under_oac:  # the disk is full
        monkeypatch.setattr(RowCheckpointer, "_commit", fail)
        with pipeline, FAILED:
            list(pipeline.run(batches(0, 16), [recovery.hook]))
    else:  # the copy does not succeed
        monkeypatch.setattr(recovery._deltas, "save", fail)
        with pytest.raises(OSError, match="No space"):
            fit(state, planned(SPEC, batches(0, 8), CAPACITY), STEP, [recovery.hook])
    monkeypatch.undo()
    with FAILED if under_oac else contextlib.nullcontext():
        recovery._settle()  # nothing is being written, so nothing is saved
    touched = {row for batch in batches(0, 8) for row in np.unique(plan(SPEC, batch.ids)["width_4"].unique)}
    counts = recovery._trackers["width_4"].count
    assert all(counts[row % 4, row // 4] > 0 for row in touched if row < SPEC.stacks["width_4"].rows)


def test_under_oac_later_batches_are_written_while_rows_are_still_written_to_disk(tmp_path, monkeypatch):
    pipeline = oac(window=2)
    done, slow = threading.Event(), []
    with make(tmp_path, "mfu", save_every_steps=100.0, fraction=0.08, pipeline=pipeline) as recovery, pipeline:
        write = RowCheckpointer._commit
        commit = lambda saver, image: (slow.append(done.wait(60)), write(saver, image))[1]
        monkeypatch.setattr(RowCheckpointer, "_commit", commit)
        recovery.begin(pipeline.state)
        for state, _ in pipeline.run(batches(0, 15), [recovery.hook]):  # one save, after step 8
            if int(state.dense.step) == 14:
                done.set()
    assert slow == [True]  # it was still being written when six more batches of a window of two were done


def test_a_failure_during_a_cut_waits_for_it(tmp_path, monkeypatch):
    """In the body of the loop, right after a step whose state is being saved."""
    pipeline = oac(window=4)
    running, seen = threading.Event(), []
    with make(tmp_path, "mfu", fraction=1.0, pipeline=pipeline) as recovery, pipeline:
        save, settle = recovery._save, recovery._settle

        def slow_save(state, step):
            running.set()
            save(state, step)
            running.clear()

        def settle_during(*args):
            if threading.current_thread() is threading.main_thread():
                seen.append(running.is_set())
            settle()

        monkeypatch.setattr(recovery, "_save", slow_save)
        monkeypatch.setattr(recovery, "_settle", settle_during)
        recovery.begin(pipeline.state)
        for number, (state, _) in enumerate(pipeline.run(batches(0, 16), [recovery.hook]), 1):
            if number in (8, 16):
                recovery.fail(state, [1])
                wanted = rows_of(pipeline.state, 1)
                assert all(np.isfinite(array).all() for array in wanted.values())
    assert seen and not any(seen) and recovery.pls == 0  # the save of the step was there to recover from


@pytest.mark.parametrize("fraction", [0.3, 0.75])
def test_regular_saves_come_though_saves_between_them_do_not_divide_their_interval(tmp_path, fraction):
    with make(tmp_path, "mfu", save_every_steps=10, fraction=fraction, whole=["small"]) as recovery:
        state = fit(recovery.begin(fresh("host")), planned(SPEC, batches(0, 29), CAPACITY), STEP, [recovery.hook])
        recovery.fail(state, [1])
    assert recovery.pls <= (29 - 20) / (STEPS * 4)


@pytest.mark.parametrize("home", ["host", "device"])
def test_a_shard_comes_back_though_the_last_save_failed_and_the_failure_is_told(tmp_path, monkeypatch, home):
    recovery, wanted = make(tmp_path, "mfu", fraction=1.0, pick_ahead_steps=0), {}
    fail_writes(monkeypatch, [False, True, True])

    def keep(state, step, plan, metrics):
        wanted.update(rows_of(state, 2) if step == 8 else {})
        return state

    given = planned(SPEC, batches(0, 20), CAPACITY)
    state = fit(recovery.begin(fresh(home)), given, STEP, [keep, recovery.hook])  # saves at 8; at 16 it fails
    with FAILED:
        state = recovery.fail(state, [2])
    assert same(rows_of(state, 2), wanted) and recovery.pls == pytest.approx((20 - 8) / (STEPS * 4))
    fit(state, planned(SPEC, batches(20, 24), CAPACITY), STEP, [recovery.hook])
    with pytest.raises(OSError, match="No space"):  # of the last save
        recovery.__exit__(None, None, None)


def test_a_directory_of_another_run_is_refused(tmp_path):
    for scheme in ("vanilla", "mfu"):
        with make(tmp_path / scheme, scheme) as recovery:
            fit(recovery.begin(fresh("host")), planned(SPEC, batches(0, 20), CAPACITY), STEP, [recovery.hook])
        files = sorted((tmp_path / scheme).iterdir())
        with make(tmp_path / scheme, scheme) as again, pytest.raises(ValueError, match="would pass for rows"):
            again.begin(fresh("host"))
        assert sorted((tmp_path / scheme).iterdir()) == files


def test_what_fails_past_the_end_or_with_a_damaged_delta_counts_when_it_is_recovered(tmp_path):
    with make(tmp_path, "mfu", fraction=1.0, total_steps=10, pick_ahead_steps=0) as recovery:
        state = fit(recovery.begin(fresh("host")), planned(SPEC, batches(0, 20), CAPACITY), STEP, [recovery.hook])
        recovery.fail(state, [0])
        before = recovery.pls, recovery.failed
        (newest, *_) = deltas(tmp_path)
        damaged = next(path for path in sorted(newest.rglob("*")) if path.is_file() and path.stat().st_size > 200)
        damaged.write_bytes(bytes(damaged.stat().st_size))
        with pytest.warns(UserWarning, match=f"skipped what is damaged: .*{newest.name}"):
            recovery.fail(state, [1])
        assert recovery.pls == pytest.approx(before[0] + (20 - 8) / (20 * 4)) and recovery.failed == 2
        assert all(np.isfinite(array).all() for array in rows_of(state, 1).values())


def test_the_data_position_and_a_base_are_kept_when_a_run_begins_in_the_middle(tmp_path):
    state = fit(fresh("host"), planned(SPEC, batches(0, 10), CAPACITY), STEP)
    with make(tmp_path, "mfu") as recovery:
        state = recovery.begin(state)
        wanted = rows_of(state, 3)
        assert [path.name for path in images(tmp_path)] == ["step_00000010"]
        state = recovery.fail(state, [3])
    assert same(rows_of(state, 3), wanted)


def test_lost_shards_are_gone():
    for home in ("host", "device"):
        state = fresh(home)
        before = [rows_of(state, shard) for shard in range(4)]
        state = state._replace(tables=lose(state.tables, 2))
        assert all(np.isnan(array).all() for array in rows_of(state, 2).values())
        assert all(same(rows_of(state, shard), before[shard]) for shard in (0, 1, 3))


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
        ({"pick_ahead_steps": -1}, "pick_ahead_steps=-1"),
        ({"pick_ahead_steps": 2.5}, "pick_ahead_steps=2.5"),
    ],
)
def test_bad_input_is_refused(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        Recovery(tmp_path, SPEC, **({"save_every_steps": 8, "total_steps": 40} | changed))
    with make(tmp_path) as recovery, pytest.raises(ValueError, match="call state = recovery.begin"):
        fit(fresh("host"), planned(SPEC, batches(0, 1), CAPACITY), STEP, [recovery.hook])
    with make(tmp_path) as recovery, pytest.raises(ValueError, match="must be distinct"):
        recovery.fail(recovery.begin(fresh("host")), [4])
