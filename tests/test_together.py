"""The three techniques in one run: OAC's pipeline, synchronised replicas, shards that fail and are restored."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from click_model import loss
from equality import same
from transports import folded

import jaxrec
from jaxrec import Batch, Serial
from jaxrec.checkpoint import restore, snapshot, write_image
from jaxrec.cpr import Recovery, mfu
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, adagrad
from jaxrec.oac import Pipeline
from jaxrec.shadowsync import AllToAll, Foreground, Shadow, model_averaging

SPEC = EmbeddingSpec({"item": Table(120, 4)}, {"item": Lookup("item")}, shards=4)
MESH = jaxrec.make_mesh(replicas=2, devices=jax.devices()[:2])
TASK = jaxrec.Task(SPEC, loss, optax.adam(0.02), adagrad(0.1), MESH)
FAILURES = {11: [1], 27: [0, 3]}
STEPS = 36


def batches():
    for index in range(STEPS):
        rng = np.random.default_rng(index)
        ids, label = (rng.zipf(1.3, 16) % 120).astype(np.int32), rng.integers(0, 2, 16).astype(np.float32)
        yield Batch({"item": ids}, label)


def fresh():
    return TASK.init({"w": jnp.ones(4)}, "host")


def averaging(kind, **more):
    return kind(AllToAll(model_averaging(), {"w": jnp.ones(4)}), **more)


def pipeline(callbacks):
    return Pipeline(TASK, fresh(), callbacks, mode="oac", window=3)


def run(directory, synchroniser, failures=FAILURES, changes=(), engine_of=pipeline):
    """Run all three; return the state and the recovery."""
    recovery = Recovery(directory, 8, STEPS, scheme=mfu(), fraction=0.5, failures=failures)
    with engine_of([synchroniser, *changes, recovery]) as engine:
        return synchroniser.finish(engine.train(batches())), recovery


def arrays(state):
    return jax.tree.map(np.array, (state.dense.params, state.tables.shards))


def test_in_lock_step_all_three_give_the_bits_of_one_batch_after_the_other(tmp_path):
    serial = lambda callbacks: Serial(TASK, fresh(), callbacks)
    wanted, plain = run(tmp_path / "plain", averaging(Foreground, every_steps=5), engine_of=serial)
    found, recovery = run(tmp_path / "all", averaging(Foreground, every_steps=5))
    assert same(arrays(found), arrays(wanted)) and recovery.pls == plain.pls > 0
    calm, _ = run(tmp_path / "calm", averaging(Foreground, every_steps=5), failures={})  # negative controls
    apart, _ = run(tmp_path / "apart", averaging(Foreground, every_steps=STEPS + 1))
    assert not same(arrays(calm), arrays(wanted)) and not same(arrays(apart), arrays(wanted))


def test_with_a_shadow_all_ends_are_reached_and_any_replica_supplies_the_dense_state(tmp_path):
    shadow = averaging(Shadow)
    one_round = lambda info: folded(shadow, info.state) if info.step == 20 else None
    state, recovery = run(tmp_path / "run", shadow, changes=[one_round])
    params, shards = arrays(state)
    assert shadow.rounds >= 1 and recovery.failed == 3
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, shards)))
    dense = state.dense._replace(params={"w": state.dense.params["w"] + jnp.array([[0.0], [1.0]])})  # replicas differ
    for replica in range(2):
        alone = jax.tree.map(lambda leaf, r=replica: leaf[r : r + 1] if jnp.ndim(leaf) else leaf, dense)
        write_image(tmp_path / f"step_{replica}", snapshot(state._replace(dense=alone)))
        restored, _ = restore(tmp_path / f"step_{replica}", fresh())
        np.testing.assert_array_equal(restored.dense.params["w"], np.repeat(alone.params["w"], 2, axis=0))
    assert not np.array_equal(dense.params["w"][0], dense.params["w"][1])  # otherwise any replica would pass
