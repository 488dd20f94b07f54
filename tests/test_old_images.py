"""Runs saved by an earlier jaxrec are restored to the same values and resumed, or refused by their format.

tests/golden/run_of_format_2.tar.gz was written by the code of commit fd9c844, before there were engines: a base of step
2, deltas of steps 4 and 6 by MFU, and restored.npz, the state that that code itself restored from them.
"""

import hashlib
import json
import tarfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrec
from jaxrec.checkpoint import deltas, images, newest, restore, restore_shards
from jaxrec.cpr import Recovery, mfu
from jaxrec.embedding import DeviceTables, EmbeddingSpec, HostTables, Lookup, Table, adagrad
from jaxrec.loop import Serial
from jaxrec.oac import Pipeline

GOLDEN = Path(__file__).parent / "golden" / "run_of_format_2.tar.gz"
SPEC = EmbeddingSpec({"item": Table(12, 2)}, {"item": Lookup("item")}, shards=2)
ROWS, DENSE = adagrad(0.1), optax.sgd(0.1, momentum=0.9)
HOMES = pytest.mark.parametrize("home", [HostTables, DeviceTables])


@pytest.fixture
def old_run(tmp_path):
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run_of_format_2"


def loss(params, activations, batch):
    return (activations["item"].sum(-1) + params["bias"] - batch.label) ** 2


def batch(index):
    draw = np.random.default_rng(index)
    ids = {"item": draw.integers(0, 12, 4).astype(np.int32)}
    return jaxrec.Batch(ids, np.zeros((4, 0), np.float32), draw.random(4, np.float32), np.ones(4, np.float32))


def fresh(home):
    return jaxrec.init_state({"bias": jnp.zeros(())}, DENSE, home.create(SPEC, ROWS))


def found(state):
    """The arrays of a state under the names of restored.npz."""
    rows = state.tables.parts("width_2")
    dense = {"bias": state.dense.params["bias"], "trace": state.dense.opt_state[0].trace["bias"]}
    shards = {f"{part}_{shard}": rows[part][shard] for part in rows for shard in range(2)}
    return {"step": state.dense.step} | dense | shards


@HOMES
def test_a_run_of_before_the_engines_restores_value_for_value(old_run, home):
    state, image = restore(old_run, fresh(home))
    wanted = dict(np.load(old_run / "restored.npz"))
    mine = found(state)
    assert mine.keys() == wanted.keys() and image.step == 6 and image.format == 2
    assert all(np.array_equal(mine[name], wanted[name]) for name in wanted)
    assert not all(np.array_equal(found(fresh(home))[name], wanted[name]) for name in wanted)  # negative control


@HOMES
def test_a_shard_of_it_comes_back_alone(old_run, home):
    wanted = dict(np.load(old_run / "restored.npz"))
    tables, read = restore_shards(newest(old_run), fresh(home).tables, [1])
    assert [image.step for image in read] == [2, 4, 6]
    mine = tables.parts("width_2")
    assert all(np.array_equal(mine[part][1], wanted[f"{part}_1"]) for part in mine)


@pytest.mark.parametrize("engine_of", [
    lambda state: Serial(state, jaxrec.make_train_step(SPEC, loss, DENSE, ROWS)),
    lambda state: Pipeline(state, jaxrec.make_update(SPEC, loss, DENSE, ROWS), window=2),
], ids=["serial", "pipeline"])  # fmt: skip
def test_it_goes_on_in_its_directory_with_its_figures(old_run, engine_of):
    state, image = restore(old_run, fresh(HostTables))
    with engine_of(state) as engine:
        more = {"save_every_steps": 4, "total_steps": 20, "scheme": mfu(), "fraction": 0.5}
        recovery = engine.enter(Recovery(engine, old_run, image=image, **more))
        before = image.extra["cpr"]
        assert (recovery.saves, recovery.rows_saved) == (before["saves"], before["rows_saved"]) and recovery.saves > 0
        list(engine.run(map(batch, range(6, 12)), [recovery.hook]))
        recovery.recover([0])
        assert recovery.saves > before["saves"] and np.isfinite(engine.state.dense.params["bias"]).all()
    assert restore(old_run, fresh(HostTables))[1].step == 12


def test_an_image_of_another_format_is_refused_by_it_with_the_way_to_convert_and_stays(old_run):
    """An older and a newer format, through every function that reads images."""
    for number in (1, 3):
        for path in [*images(old_run), *deltas(old_run)]:
            body = json.dumps(json.loads((path / "manifest.json").read_bytes().split(b"\n")[0]) | {"format": number})
            digest = hashlib.sha256(body.encode()).hexdigest()
            (path / "manifest.json").write_text(f"{body}\n{digest}\n")
        files = sorted(old_run.rglob("*"))
        whole = images(old_run)[0]
        for act in (
            lambda: restore(old_run, fresh(HostTables)),
            lambda whole=whole: restore(whole, fresh(HostTables)),
            lambda: restore_shards(deltas(old_run)[0], fresh(HostTables).tables, [0]),
            lambda: Recovery(Serial(fresh(HostTables), print), old_run, 4, 20).__enter__(),
        ):
            with pytest.raises(
                ValueError, match=rf"format {number}, and this version of jaxrec reads format 2: go on with"
            ):
                act()
        assert sorted(old_run.rglob("*")) == files
