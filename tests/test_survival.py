"""A run with CPR survives kill -9: its state is the base, the deltas and the dense state saved with them."""

import os
import shutil
import types

import jax
import numpy as np
import pytest
from cpr_task import CAPACITY, SCHEMES, SPEC, TASK, batches, fresh, nothing, rows_of
from equality import same
from kills import kill_at_call, was_killed
from strategies import chosen

from jaxrec import Batch, Serial
from jaxrec.checkpoint import RowCheckpointer, deltas, images, newest, newest_first, read_manifest, restore
from jaxrec.cpr import Recovery
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, rowwise_adagrad
from jaxrec.oac import Pipeline
from jaxrec.types import DenseState, TrainState

TOTAL, EVERY = 400, 16


def recovery_of(directory, scheme, **more):
    # The end of a block stands for the death of the process.
    given = {"fraction": 0.25 if SCHEMES[scheme] else 0.125, "most_deltas": 5, "save_at_end": False} | more
    return Recovery(directory, EVERY, TOTAL, scheme=SCHEMES[scheme], **given)


def all_rows(state):
    return {(shard, *key): rows for shard in range(SPEC.shards) for key, rows in rows_of(state, shard).items()}


def keep(directory, state, step):
    """Write the whole state after a step, as a reference."""
    dense = [np.array(leaf) for leaf in jax.tree.leaves(state.dense)]
    rows = {"/".join(map(str, key)): array for key, array in all_rows(state).items()}
    with open(directory / "partial", "wb") as file:
        np.savez(file, **rows, **{f"dense{number}": leaf for number, leaf in enumerate(dense)})
    os.replace(directory / "partial", directory / f"{step}.npz")


def go_on(directory, scheme, steps=0, home="host", before=(), given=None, **more):
    """Restore the newest image if any, and train `steps` more steps; return the state and the recovery."""
    state, image = fresh(home), None
    if newest_first(directory):
        state, image = restore(directory, state)
    first = image.step if image else 0
    recovery = recovery_of(directory, scheme, image=image, **more)
    with Serial(TASK, state, [*before, recovery], capacity=CAPACITY) as engine:
        return engine.train(given or batches(first, first + steps)), recovery


def _train_until_killed(directory, notes, scheme, die_at):
    """Train, and kill this process at its die_at-th call that changes the disk."""
    kill_at_call(die_at)
    save = RowCheckpointer.save

    def note_and_save(saver, tables, rows, step, *more):
        np.savez(notes / f"saved{step}.npz", **{f"{name}.{shard}": ids for (name, shard), ids in rows.items()})
        return save(saver, tables, rows, step, *more)

    RowCheckpointer.save = note_and_save
    go_on(directory, scheme, 60, before=[lambda info: keep(notes, info.state, info.step)])


def noted(notes, step, rows):
    """Rows and dense leaves after a step."""
    with np.load(notes / f"{step}.npz") as file:
        dense = [file[f"dense{number}"] for number in range(sum(name.startswith("dense") for name in file))]
        return {key: file["/".join(map(str, key))] for key in rows}, dense


def replayed(notes, step, scheme):
    """The state that must have survived: each row as of its last save, the dense state of the last step."""
    rows = all_rows(fresh("host"))
    if not SCHEMES[scheme]:
        return noted(notes, step, rows)
    for number in sorted(int(path.name[5:-4]) for path in notes.glob("saved*.npz")):
        if number <= step:
            then, dense = noted(notes, number, rows)
            with np.load(notes / f"saved{number}.npz") as ids:
                for (shard, name, part), table in rows.items():
                    mine = ids[f"{name}.{shard}"] // SPEC.shards
                    table[mine] = then[shard, name, part][mine]
    return rows, dense


def kill_often(tmp_path, scheme, instants):
    directory, notes, killed, step, pls = tmp_path / "run", tmp_path / "notes", 0, 0, 0.0
    notes.mkdir()
    keep(notes, fresh("host"), 0)
    for number, die_at in enumerate(instants):
        killed += was_killed(_train_until_killed, directory, notes, scheme, die_at)
        if not newest_first(directory):
            continue
        copied = shutil.copytree(directory, tmp_path / f"copy{number}")
        state, tip = restore(copied, fresh("host"))
        assert tip.step >= step  # commits are never undone
        rows, dense = replayed(notes, tip.step, scheme)
        assert same(all_rows(state), rows)
        for found, wanted in zip(jax.tree.leaves(state.dense), dense, strict=True):
            np.testing.assert_array_equal(found, wanted)
        # Two resumed copies give the same bits, and count the PLS of rows older than the tip.
        again = shutil.copytree(copied, tmp_path / f"again{number}")
        (a, first), (b, second) = (go_on(path, scheme, 10) for path in (copied, again))
        assert same(all_rows(a), all_rows(b)) and first.pls == second.pls
        pls = tip.extra["cpr"]["pls"] + (tip.step - tip.extra["cpr"]["regular"]) / TOTAL
        assert first.pls == pytest.approx(pls) and tip.step - tip.extra["cpr"]["regular"] < EVERY
        step = tip.step
        shutil.rmtree(copied)
        shutil.rmtree(again)
    assert killed >= len(instants) // 2 and step > 0
    assert len(deltas(directory)) <= 2 * 5  # of `most_deltas`, as a merge may have been killed
    return pls


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("scheme", ["vanilla", "mfu", "ssu", "scar", "round_robin"])
def test_kill_9_at_8_instants(tmp_path, scheme):
    calls = 700 if SCHEMES[scheme] else 250  # calls of 60 steps; whole images are saved less often
    instants = np.random.default_rng(len(scheme)).integers(1, calls, 8).tolist()
    pls = kill_often(tmp_path, scheme, instants)
    assert (pls > 0) == (scheme != "vanilla")


@pytest.mark.parametrize(
    ("home", "scheme"),
    chosen([("host", "ssu"), ("device", "mfu"), ("device", "vanilla"), ("host", "scar")], lambda home, scheme: (
        scheme in ("ssu", "mfu")
    )),
)  # fmt: skip
def test_what_is_restored_is_what_one_call_gives_in_any_home(tmp_path, home, scheme):
    _, recovery = go_on(tmp_path, scheme, 41, home, pick_ahead_steps=0)
    found = {}
    for other in ("host", "device"):
        restored, image = restore(tmp_path, fresh(other))
        found[other] = all_rows(restored)
        assert image.step == (40 if SCHEMES[scheme] else 32) and image.run
    assert same(found["host"], found["device"])
    _, second = go_on(tmp_path, scheme, 3, home)
    assert second.saves == recovery.saves and second.rows_saved == recovery.rows_saved


def test_under_oac_a_run_goes_on_from_what_its_cuts_have_saved(tmp_path):
    def train(state, image, start, stop, directory):
        recovery = recovery_of(directory, "mfu", image=image)
        with Pipeline(TASK, state, [recovery], mode="oac", window=4) as pipeline:
            return pipeline.train(batches(start, stop)), recovery

    train(fresh("host"), None, 0, 30, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    state, image = restore(tmp_path / "a", fresh("host"))
    found, first = train(state, image, image.step, 50, tmp_path / "a")
    wanted, second = go_on(tmp_path / "b", "mfu", 50 - image.step)
    assert same(all_rows(found), all_rows(wanted)) and first.pls == second.pls > 0


def test_what_a_resumed_run_lacks_of_its_last_steps_counts_as_lost_in_all_shards(tmp_path):
    go_on(tmp_path, "mfu", EVERY - 2)
    image = read_manifest(newest(tmp_path))
    _, recovery = go_on(tmp_path, "mfu")
    assert image.extra["cpr"]["regular"] == 0 < image.step
    assert recovery.pls == pytest.approx(image.step / TOTAL) and recovery.failed == 0


def test_trackers_go_on_where_they_were(tmp_path):
    """Round-robin resumes at its turn, SSU at its batch; other state of a saved row is cleared."""
    for scheme, known, more in (("round_robin", "turn", 0), ("ssu", "batch", 4)):
        found = []
        for given in (batches(0, 40), nothing(4)):  # the resumed run saves an image without rows
            go_on(tmp_path / scheme, scheme, given=given, pick_ahead_steps=0)
            trackers = read_manifest(newest(tmp_path / scheme)).extra["cpr"]["trackers"]
            found.append({name: np.array(one[known]) for name, one in trackers.items()})
        before, after = found
        assert all(np.any(before[name]) and (after[name] == before[name] + more).all() for name in SPEC.stacks)


def bytes_of(directory, scheme, saves, rows, **more):
    """Bytes written over `saves` intervals in which every batch touches more rows than are saved."""
    spec = EmbeddingSpec({"t": Table(rows, 16)}, {"t": Lookup("t")}, shards=4)
    optimizer, rng = rowwise_adagrad(0.1), np.random.default_rng(0)
    state = TrainState(
        DenseState(np.int32(0), {"w": np.zeros((1, 100), np.float32)}, ()), HostTables.create(spec, optimizer)
    )
    ids = [rng.integers(0, rows, rows // 4, dtype=np.int32) for _ in range(8)]
    given = [Batch({"t": each}, np.ones(len(each), np.float32)) for each in ids]

    def count(state, batch, plans):
        return state._replace(dense=state.dense._replace(step=state.dense.step + 1)), {"loss": np.float32(0)}

    recovery = Recovery(directory, 8, 8 * saves, scheme=SCHEMES[scheme], save_at_end=False, **more)
    with Serial(types.SimpleNamespace(step=count), state, [recovery]) as engine:
        engine.train(given * saves)
    return recovery.bytes_written


@pytest.mark.slow
def test_mfu_writes_at_most_15_percent_more_than_saving_everything_over_20_intervals(tmp_path):
    rows = 40_000
    vanilla, mfu = (bytes_of(tmp_path / scheme, scheme, 20, rows) for scheme in ("vanilla", "mfu"))
    assert vanilla == pytest.approx(20 * rows * 17 * 4, rel=0.02)
    assert 0.9 < mfu / vanilla <= 1.15, mfu / vanilla
    often = bytes_of(tmp_path / "often", "mfu", 4, rows, most_deltas=8)  # negative control: the former setting
    assert often / (vanilla * 4 / 20) > 1.5
    assert len(images(tmp_path / "vanilla")) == 2 and len(deltas(tmp_path / "mfu")) <= 128
