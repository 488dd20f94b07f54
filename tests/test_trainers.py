"""Free-running trainers: one alone is plain training, no update is lost, every end is reached."""

import itertools
import threading

import jax
import numpy as np
import optax
import pytest
from free_trainers import (
    PARAMS,
    SPEC,
    WAYS,
    counting,
    freely,
    stream,
    synchronisers,
)
from world import loss, no_threads_left

from jaxrec import init_state, make_train_step
from jaxrec.embedding import HostTables, adagrad, plan, sgd
from jaxrec.shadowsync import AllToAll, Foreground, Shadow, model_averaging, train_freely


def alone_in(transport, rule):
    return transport(rule, PARAMS, 1)


def test_no_thread_is_seen_after_training_though_each_lingers_at_its_end(monkeypatch):
    """A thread that has told that it is done is still there until the system has ended it."""
    run = threading.Thread.run
    monkeypatch.setattr(threading.Thread, "run", lambda thread: (run(thread), threading.Event().wait(0.2)))
    freely(HostTables.create(SPEC, sgd(0.1)), [stream(0, 3)])
    assert no_threads_left()


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
    assert figures.steps == [30] and figures.examples == 240 and figures.replica_spread == 0


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


@pytest.mark.parametrize(("verb", "gained"), [("add", 80), ("put", 40)])
def test_put_in_place_of_add_loses_one_of_two_updates(monkeypatch, verb, gained):
    """Two writers in a script: both read, one writes, the other writes, and so again for each of 40 batches."""
    add, both, one = HostTables.add, threading.Barrier(2), threading.Lock()

    def in_turns(self, plans, new, old):
        both.wait(60)
        with one:
            add(self, plans, new, old) if verb == "add" else self.put(plans, new)
        both.wait(60)

    monkeypatch.setattr(HostTables, "add", in_turns)
    found, _, figures = counted(trainers=2, workers=1)
    np.testing.assert_allclose(found, gained, rtol=1e-6)
    assert figures.steps == [40, 40]


def until_a_round(seed, batches, synchroniser):
    """So many batches, and more until the trainer's synchroniser has folded a result in, but not for ever."""
    for number, batch in enumerate(stream(seed, 20_000)):
        if number >= batches and synchroniser.rounds:
            return
        yield batch


class Far(AllToAll):
    """Rounds whose result lies 1000 beyond the mean, until a trainer is done."""

    def meet(self, trainer, before, done):
        target, last = super().meet(trainer, before, done)
        return (target if done else jax.tree.map(lambda x: x + 1000, target)), last


@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_what_a_round_gives_is_what_the_workers_train_on(kind):
    """No rate moves anything here, so a loss that falls below -1000 is that of parameters which a round has given."""
    rule, losses = model_averaging(alpha=1.0), []
    more = {"every_steps": 3} if kind is Foreground else {}
    make = synchronisers(kind, rule, 1, Far, **more)

    def until_seen():
        return itertools.takewhile(lambda _: min(losses, default=0) > -1000, stream(0, 20_000))

    train_freely(
        SPEC,
        counting,
        optax.sgd(0.0),
        sgd(0.0),
        PARAMS,
        HostTables.create(SPEC, sgd(0.0)),
        [until_seen()],
        make,
        hook=lambda trainer, step, metrics: losses.append(float(metrics["loss"])),
    )
    assert losses[0] > -1000 > losses[-1]


@pytest.mark.parametrize("way", WAYS)
def test_uneven_trainers_reach_their_end_together(way):
    kind, rule, more = WAYS[way]
    make = synchronisers(kind, rule, 3, **more)
    made = [make(number) for number in range(3)]
    tables, batches = HostTables.create(SPEC, sgd(0.1)), (5, 20, 33)
    streams = [until_a_round(i, batches[i], made[i]) if kind is Shadow else stream(i, batches[i]) for i in range(3)]
    dense, figures = freely(tables, streams, made.__getitem__, workers=2)
    assert min(figures.rounds) > 0 and all(a >= b for a, b in zip(figures.steps, batches, strict=True))
    if kind is Foreground:
        assert figures.steps == [5, 20, 33]
        assert figures.rounds == [1, 6, 11] and figures.bytes == [32, 192, 352]  # 4 floats to and fro
        assert figures.average_sync_gap[2] == 3 and figures.average_sync_gap_per_worker[2] == 1.5
    # Negative control: what synchronises brings the replicas nearer to each other.
    streams = [stream(i, steps) for i, steps in enumerate(figures.steps)]
    alone, figures = freely(HostTables.create(SPEC, sgd(0.1)), streams)
    assert figures.rounds == [0, 0, 0] and figures.average_sync_gap == [float("inf")] * 3
    distance = lambda states: float(np.abs(np.asarray(states[0].params["w"]) - np.asarray(states[2].params["w"])).max())
    assert distance(dense) < distance(alone)
    assert no_threads_left()


class Gated(AllToAll):
    """Rounds before the end wait for the test, and find each weight 100 above what was brought."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.entered, self.open = threading.Event(), threading.Event()

    def meet(self, trainer, before, done):
        target, last = super().meet(trainer, before, done)
        if done:
            return target, last
        self.entered.set()
        assert self.open.wait(30), "nobody stepped during the round"
        return [x + 100 for x in target], last


@pytest.mark.parametrize("workers", [2, 3])
def test_a_foreground_round_keeps_one_worker_waiting_and_the_others_step_on(workers):
    rule = model_averaging(alpha=1.0, form="delta")
    transport, opened_at = alone_in(Gated, rule), []

    def hook(trainer, step, metrics):
        """Once the round of step 4 has begun, step 7 is made, and lets it go; at step 8 the next is due."""
        if step in (5, 6):
            assert transport.entered.wait(30)
        if step == 7:
            opened_at.append(step)
            transport.open.set()

    (found,), figures = train_freely(
        SPEC,
        counting,
        optax.sgd(1.0),
        sgd(0.0),
        PARAMS,
        HostTables.create(SPEC, sgd(0.0)),
        [stream(0, 15)],
        lambda i: Foreground(transport, i, every_steps=4),
        workers,
        hook=hook,
    )
    assert opened_at == [7] and figures.steps == [15] and figures.rounds == [3]
    # Every step adds 1 and every round 100: those of the steps during a round are kept, and no round counts twice.
    np.testing.assert_array_equal(found.params["w"], 1 + 15 + 300)


def test_all_devices_take_turns_and_a_gap_without_rounds_is_infinite():
    devices = jax.local_devices()
    dense, figures = freely(
        HostTables.create(SPEC, sgd(0.1)),
        [stream(i, 2) for i in range(3)],
        devices=devices[:2],
    )
    assert [next(iter(state.params["w"].devices())) for state in dense] == [devices[i] for i in (0, 1, 0)]
    assert figures.average_sync_gap_per_worker == [float("inf")] * 3 and figures.failures == {}


def test_bad_input_is_refused():
    tables = HostTables.create(SPEC, sgd(0.1))
    with pytest.raises(ValueError, match="leave_timeout_s=-1"):
        freely(tables, [stream(0, 1)], leave_timeout_s=-1)
    for streams, workers in (([], 1), ([stream(0, 1)], 0)):
        with pytest.raises(ValueError, match="must be (1 or more|a whole number from 1)"):
            freely(tables, streams, workers=workers)
