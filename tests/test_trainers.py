"""Free-running trainers: one alone is plain training, no update is lost, every end is reached, failures stop all."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrec import Batch, init_state, make_train_step
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad, plan, sgd
from jaxrec.shadowsync import AllToAll, Centre, Foreground, Shadow, easgd, model_averaging, train_freely

SPEC = EmbeddingSpec({"item": Table(40, 4)}, {"item": Lookup("item")}, shards=2)
PARAMS = {"w": jnp.ones(4)}


def loss(params, activations, batch):
    return optax.sigmoid_binary_cross_entropy(activations["item"] @ params["w"], batch.label)


def counting(params, activations, batch):
    """The gradient of a batch by row 0, all whose examples look it up, and by w is -1 in every step."""
    return -activations["item"].sum(-1) - params["w"].sum()


def stream(seed, batches, rows=40, size=8):
    rng = np.random.default_rng(seed)
    for _ in range(batches):
        ids, label = rng.integers(0, rows, size), rng.integers(0, 2, size)
        yield Batch({"item": ids.astype(np.int32)}, np.zeros((size, 0), np.float32), label, np.ones(size, np.float32))


def synchronisers(kind, rule, trainers, **more):
    transport = Centre(rule, PARAMS, trainers) if rule.has_centre else AllToAll(rule, PARAMS, trainers)
    return lambda number: kind(rule, transport, number, **more)


def no_threads_left():
    return not [t for t in threading.enumerate() if t.name.startswith(("trainer", "shadow"))]


def test_one_trainer_with_one_worker_is_plain_training():
    dense, rows = optax.adam(0.01), adagrad(0.1)
    tables = HostTables.create(SPEC, rows)
    (found,), figures = train_freely(SPEC, loss, dense, rows, PARAMS, tables, [stream(0, 30)])
    state, step = (
        init_state(PARAMS, dense, HostTables.create(SPEC, rows)),
        make_train_step(SPEC, loss, dense, rows),
    )
    for batch in stream(0, 30):
        state, _ = step(state, plan(SPEC, batch.ids), batch)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found.params, state.dense.params)
    jax.tree.map(close, tables.shards, state.tables.shards)
    assert figures.steps == [30] and figures.examples == 240 and figures.spread == 0


def counted(trainers, workers, synchroniser=None):
    """(what row 0 has gained, steps) after trainers x 40 batches that each add 1."""
    rows = sgd(1.0)
    tables = HostTables.create(SPEC, rows)
    before = tables.shards["width_4"][0]["value"][0].copy()
    streams = [stream(i, 40, rows=1) for i in range(trainers)]
    dense, figures = train_freely(
        SPEC, counting, optax.sgd(1.0), rows, PARAMS, tables, streams, synchroniser, workers_per_trainer=workers
    )
    return tables.shards["width_4"][0]["value"][0] - before, dense, figures


def test_no_update_of_rows_or_parameters_is_lost_with_hogwild_workers():
    gained, dense, figures = counted(trainers=2, workers=4)
    np.testing.assert_allclose(gained, 80, rtol=0.02)  # adds take no lock: two at the same instant may count as one
    assert figures.steps == [40, 40] and figures.example_level_parallelism == 8 * 4 * 2
    for state in dense:
        np.testing.assert_array_equal(state.params["w"], 41)  # exact: the newest version is stepped under the lock


def test_put_in_place_of_add_loses_updates_of_eight_trainers(monkeypatch):
    kept, _, _ = counted(trainers=8, workers=1)
    np.testing.assert_allclose(kept, 320, rtol=0.02)
    all_have_read = threading.Barrier(8)  # on one core they would rarely overlap by themselves

    def put(self, plans, new, old):
        all_have_read.wait(60)
        self.put(plans, new)

    monkeypatch.setattr(HostTables, "add", put)
    gained, _, _ = counted(trainers=8, workers=1)
    assert (gained < 41).all()  # of each eight that were read together one is left


WAYS = {
    "s-easgd": (Shadow, easgd(), {}),
    "s-ma": (Shadow, model_averaging(), {}),
    "s-ma-delta": (Shadow, model_averaging(alpha=1.0, form="delta"), {}),
    "fr-easgd-3": (Foreground, easgd(), {"every_steps": 3}),
    "fr-ma-3": (Foreground, model_averaging(), {"every_steps": 3}),
}


@pytest.mark.parametrize("way", WAYS)
def test_uneven_trainers_reach_their_end_together(way):
    kind, rule, more = WAYS[way]
    synchroniser = synchronisers(kind, rule, 3, **more)
    tables = HostTables.create(SPEC, sgd(0.1))
    streams = [stream(i, batches) for i, batches in enumerate((5, 20, 33))]
    dense, figures = train_freely(
        SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, streams, synchroniser, workers_per_trainer=2
    )
    assert figures.steps == [5, 20, 33]
    if kind is Foreground:
        assert figures.rounds == [1, 6, 11] and figures.bytes == [32, 192, 352]  # 4 floats to and fro
        assert figures.average_sync_gap[2] == 3 and figures.average_sync_gap_per_worker[2] == 1.5
    alone, _ = train_freely(  # negative control: what synchronises brings the replicas nearer to each other
        SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, HostTables.create(SPEC, sgd(0.1)),
        [stream(i, batches) for i, batches in enumerate((5, 20, 33))],
    )  # fmt: skip
    distance = lambda states: float(np.abs(np.asarray(states[0].params["w"]) - np.asarray(states[2].params["w"])).max())
    assert distance(dense) < distance(alone)
    assert no_threads_left()


@pytest.mark.parametrize("kind", [None, Shadow, Foreground])
def test_a_failure_stops_everybody_and_is_named(kind):
    def broken():
        yield from stream(0, 3)
        raise OSError("the disk is gone")

    def endless():
        while True:
            yield from stream(1, 10)

    more = {"every_steps": 1} if kind is Foreground else {}
    make = kind and synchronisers(kind, model_averaging(), 2, **more)
    tables = HostTables.create(SPEC, sgd(0.1))
    with pytest.raises(OSError, match="the disk is gone") as caught:
        train_freely(SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, [broken(), endless()], make, 2)
    assert "trainer 0" in caught.value.__notes__[0]
    assert no_threads_left()


def test_bad_input_is_refused():
    tables = HostTables.create(SPEC, sgd(0.1))
    for streams, workers in (([], 1), ([stream(0, 1)], 0)):
        with pytest.raises(ValueError, match="must be 1 or more"):
            train_freely(SPEC, loss, optax.sgd(0.1), sgd(0.1), PARAMS, tables, streams, workers_per_trainer=workers)
