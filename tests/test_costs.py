"""Measured costs, and plans in steps: they connect the equations of CPR with a run that saves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrec import Batch, init_state, make_train_step, plan
from jaxrec.checkpoint import Checkpointer, is_intact
from jaxrec.cpr import Recovery, measure, plan_recovery
from jaxrec.cpr.schedule import SETTING_A
from jaxrec.embedding import DeviceTables, EmbeddingSpec, HostTables, Lookup, Table, adagrad
from jaxrec.loop import Serial

SPEC = EmbeddingSpec({"item": Table(50, 4)}, {"item": Lookup("item")}, shards=4)
ROWS, DENSE = adagrad(0.1), optax.adam(0.01)
JOB = {"mtbf_hours": 28, "total_hours": 56, "reschedule_hours": 0.1}


def state_of(home):
    return init_state({"bias": jnp.ones(())}, DENSE, home.create(SPEC, ROWS))


def loss(params, activations, batch):
    return (activations["item"].sum(-1) + params["bias"] - batch.label) ** 2


def batch(index):
    ids = np.random.default_rng(index).integers(0, 50, 8).astype(np.int32)
    return Batch({"item": ids}, np.zeros((8, 0)), np.ones(8), np.ones(8))


def listing(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


class NotedTables(HostTables):
    """Tables that record each restored shard, and which images are intact at that time."""

    def with_shard(self, stack, shard, parts):
        self.seen.append((shard, [is_intact(path) for path in self.place.rglob("step_*") if path.is_dir()]))
        return super().with_shard(stack, shard, parts)


@pytest.mark.parametrize("mode", ["full", "partial"])
def test_recovery_takes_a_plan_in_steps(tmp_path, mode):
    """It saves at the steps of the planned hours: with 90 s per step and a save every 0.1 h, at steps 4, 8 and 12."""
    decided = plan_recovery(SETTING_A, 0.1)._replace(mode=mode, save_every_hours=0.1, total_hours=0.3)
    with Serial(state_of(HostTables), make_train_step(SPEC, loss, DENSE, ROWS)) as engine:
        recovery = engine.enter(Recovery(engine, tmp_path, **decided.in_steps(seconds_per_step=90)))
        saved = [engine.step for _ in engine.run(map(batch, range(12)), [recovery.hook]) if recovery.saves]
    assert saved[0] == 4 and recovery.saves == 3 and recovery.mode == mode


@pytest.mark.parametrize("copy", ["whole", "shards"])
@pytest.mark.parametrize("home", [HostTables, DeviceTables])
def test_measured_costs_stand_in_for_assumed_ones_and_nothing_is_left_or_changed(tmp_path, home, copy):
    """Measured beside a run that has saved in the same directory and still holds its locks."""
    train_step, plans = make_train_step(SPEC, loss, DENSE, ROWS), plan(SPEC, batch(0).ids)
    state, _ = train_step(state_of(home), plans, batch(0))
    state = state._replace(dense=state.dense._replace(step=jnp.int32(7)))  # as if others had written the tables
    before = jax.tree.map(np.array, (state.dense, state.tables.parts("width_4"), state.tables.step))
    with Checkpointer(tmp_path) as saver:
        saver.save(state)
        saver.wait()
        files = listing(tmp_path)
        state, costs = measure(state, tmp_path, **JOB, failed_nodes=2, copy=copy, rounds=2)
        assert listing(tmp_path) == files
    after = jax.tree.map(np.array, (state.dense, state.tables.parts("width_4"), state.tables.step))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert 0 < costs.save_hours < 1 and 0 < costs.load_hours < 1 and 0 < costs.partial_load_hours < 1
    assert costs[2:7] == (0.1, 28, 56, 4, 2) and plan_recovery(costs, 0.1).mode == "partial"
    train_step(state, plans, batch(0))  # the state can still be trained


def test_measuring_really_saves_all_and_restores_all_and_then_the_failed_shards(tmp_path):
    state = state_of(NotedTables)
    state.tables.__dict__.update(seen=[], place=tmp_path)
    measure(state, tmp_path / "made" / "by nobody", **JOB, failed_nodes=3, rounds=2)
    assert state.tables.seen == 2 * [(shard, [True]) for shard in [0, 1, 2, 3, 0, 1, 2]]
    assert listing(tmp_path) == []
