"""Free trainers: one alone is plain training, no update is lost, all reach their end; stretches make up one run.

One that fails, blocks or is interrupted is named, and the others end or go on.
"""

import collections
import dataclasses
import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click_model import loss
from equality import assert_equal
from step_callbacks import at_step
from threads import frames, interrupt_when, join_all, no_threads_left, until, workers
from transports import Clock, in_meet

from jaxrec import Batch, Task, make_eval_step, make_mesh
from jaxrec.checkpoint import Checkpointer, restore
from jaxrec.cpr import Recovery, mfu
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad, embedding_matrix, sgd
from jaxrec.prefetch import Stream
from jaxrec.shadowsync import (
    AllToAll,
    Centre,
    Foreground,
    FreeStep,
    FreeTrainers,
    Shadow,
    SyncGroup,
    bmuf,
    easgd,
    model_averaging,
    train_freely,
)
from jaxrec.shadowsync.free import StreamSplitter
from jaxrec.shadowsync.workers import Trainer, train_stretch

SPEC = EmbeddingSpec({"item": Table(40, 4)}, {"item": Lookup("item")}, shards=2)
PARAMS = {"w": jnp.ones(4)}


def counting(params, activations, batch):
    """A loss whose gradient by w, and by row 0 if all examples look it up, is -1 at every step."""
    return -activations["item"].sum(-1) - params["w"].sum()


@functools.cache
def counting_at(dense_rate, row_rate):
    """The task of the loss `counting`, with SGD at these rates."""
    return Task(SPEC, counting, optax.sgd(dense_rate), sgd(row_rate))


SMALL = Task(SPEC, loss, optax.sgd(0.1), sgd(0.1))


def stream(seed, batches, rows=40, size=8):
    rng = np.random.default_rng(seed)
    for _ in range(batches):
        ids, label = rng.integers(0, rows, size), rng.integers(0, 2, size)
        yield Batch({"item": ids.astype(np.int32)}, label)


def freely(tables, streams, synchroniser=None, workers=1, **more):
    """Trains the small model over the given tables."""
    return train_freely(SMALL, PARAMS, tables, streams, synchroniser, workers, **more)


def synchronisers(kind, rule, trainers, of=None, on_failure="raise", timeout_s=60.0, **more):
    of = of or (Centre if rule.has_centre else AllToAll)
    transport = of(rule, PARAMS, trainers, on_failure=on_failure, timeout_s=timeout_s)
    return lambda number: kind(transport, number, **more)


WAYS = {
    "s-easgd": (Shadow, easgd(), {}),
    "s-ma-lerp": (Shadow, model_averaging(form="lerp"), {}),
    "s-ma-delta": (Shadow, model_averaging(alpha=1.0, form="delta"), {}),
    "fr-easgd-3": (Foreground, easgd(), {"every_steps": 3}),
    "fr-ma-3": (Foreground, model_averaging(), {"every_steps": 3}),
}


def raising(error):
    """Yields three batches, then raises the error."""
    yield from stream(0, 3)
    raise error


def every(steps, kind):
    return {"every_steps": steps} if kind is Foreground else {}


def lasting(number, batches, made):
    """At least `batches` batches for trainer `number`, and more until it has completed a round."""
    for count, batch in enumerate(stream(number, 20_000)):
        if count >= batches and made[number].rounds:
            return
        yield batch


RULES = {
    "ma": model_averaging(),
    "ma-lerp": model_averaging(0.3, form="lerp"),
    "bmuf": bmuf(eta=0.9, momentum=0.5),
    "easgd": easgd(),
    "easgd-sequential": easgd(0.3, form="sequential"),
}
DENSE, ROWS = optax.adam(0.05), adagrad(0.1)
TASK = Task(SPEC, loss, DENSE, ROWS)
STILL_ROWS = Task(SPEC, loss, DENSE, sgd(0.0))


def cases(all_of_them, kept):
    """Pytest parameters of all cases; only `kept` ones are in the gate."""
    more = lambda case: pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.more)
    return [case if case in kept else more(case) for case in all_of_them]


# ---- one training


def test_no_thread_is_seen_after_training_though_each_lingers_at_its_end(monkeypatch):
    """A thread that has reported its end still exists until the system has ended it."""
    run = threading.Thread.run
    monkeypatch.setattr(threading.Thread, "run", lambda thread: (run(thread), threading.Event().wait(0.2)))
    freely(HostTables.create(SPEC, sgd(0.1)), [stream(0, 3)])
    assert no_threads_left()


def test_one_trainer_with_one_worker_is_plain_training():
    task, tables = Task(SPEC, loss, optax.adam(0.01), ROWS), HostTables.create(SPEC, ROWS)
    (found,), figures = train_freely(task, PARAMS, tables, [stream(0, 30)])
    state = task.init(PARAMS, "host")
    for batch in stream(0, 30):
        state, _ = task.step(state, batch)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found.params, state.dense.params)
    jax.tree.map(close, tables.shards, state.tables.shards)
    assert figures.steps == [30] and figures.examples == 240 and figures.replica_spread == 0


def gained_by(trainers, workers, synchroniser=None):
    """(increment of row 0, dense states, figures) after 40 batches per trainer, each of which adds 1."""
    tables = HostTables.create(SPEC, sgd(1.0))
    before = tables.shards["width_4"][0]["value"][0].copy()
    streams = [stream(i, 40, rows=1) for i in range(trainers)]
    dense, figures = train_freely(
        counting_at(1.0, 1.0), PARAMS, tables, streams, synchroniser, workers_per_trainer=workers
    )
    return tables.shards["width_4"][0]["value"][0] - before, dense, figures


def test_no_update_of_rows_or_parameters_is_lost_with_hogwild_workers():
    gained, dense, figures = gained_by(trainers=2, workers=4)
    np.testing.assert_allclose(gained, 80, rtol=0.1)  # adds take no lock: two concurrent ones may count as one
    assert figures.steps == [40, 40]
    for state in dense:
        np.testing.assert_array_equal(state.params["w"], 41)  # exact: steps update the newest version under a lock


@pytest.mark.parametrize(("verb", "gained"), [("add", 80), ("put", 40)])
def test_put_in_place_of_add_loses_one_of_two_updates(monkeypatch, verb, gained):
    """Scripts two writers: both read, one writes, then the other writes; repeated for each of 40 batches."""
    add, both, one = HostTables.add, threading.Barrier(2), threading.Lock()

    def in_turns(self, plans, new, old):
        both.wait(60)
        with one:
            add(self, plans, new, old) if verb == "add" else self.put(plans, new)
        both.wait(60)

    monkeypatch.setattr(HostTables, "add", in_turns)
    found, _, figures = gained_by(trainers=2, workers=1)
    np.testing.assert_allclose(found, gained, rtol=1e-6)
    assert figures.steps == [40, 40]


class Far(AllToAll):
    """Rounds whose result is 1000 above the mean, except a trainer's last one."""

    def sync_round(self, trainer, before, done):
        target, last = super().sync_round(trainer, before, done)
        return (target if done else jax.tree.map(lambda x: x + 1000, target)), last


@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_what_a_round_gives_is_what_the_workers_train_on(kind):
    """Learning rates are zero, so a loss below -1000 can only come from parameters set by a round."""
    rule, losses = model_averaging(alpha=1.0), []
    more = {"every_steps": 3} if kind is Foreground else {}
    make = synchronisers(kind, rule, 1, Far, **more)

    def until_seen():
        return itertools.takewhile(lambda _: min(losses, default=0) > -1000, stream(0, 20_000))

    hook = lambda trainer, step, metrics: losses.append(float(metrics["loss"]))
    tables = HostTables.create(SPEC, sgd(0.0))
    train_freely(counting_at(0.0, 0.0), PARAMS, tables, [until_seen()], make, hook=hook)
    assert losses[0] > -1000 > losses[-1]


@pytest.mark.parametrize("way", WAYS)
def test_uneven_trainers_reach_their_end_together(way):
    kind, rule, more = WAYS[way]
    make = synchronisers(kind, rule, 3, **more)
    made = [make(number) for number in range(3)]
    tables, batches = HostTables.create(SPEC, sgd(0.1)), (5, 20, 33)
    streams = [lasting(i, batches[i], made) if kind is Shadow else stream(i, batches[i]) for i in range(3)]
    dense, figures = freely(tables, streams, made.__getitem__, workers=2)
    assert min(figures.rounds) > 0 and all(a >= b for a, b in zip(figures.steps, batches, strict=True))
    if kind is Foreground:
        assert figures.steps == [5, 20, 33]
        assert figures.rounds == [1, 6, 11]
        assert figures.average_sync_gap == pytest.approx(58 / 18)
    # Negative control: synchronisation brings the replicas closer to each other.
    streams = [stream(i, steps) for i, steps in enumerate(figures.steps)]
    alone, figures = freely(HostTables.create(SPEC, sgd(0.1)), streams)
    assert figures.rounds == [0, 0, 0] and figures.average_sync_gap == float("inf")
    distance = lambda states: float(np.abs(np.asarray(states[0].params["w"]) - np.asarray(states[2].params["w"])).max())
    assert distance(dense) < distance(alone)
    assert no_threads_left()


class Gated(AllToAll):
    """Rounds before the last one wait for the test, and return each weight 100 above the mean brought."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.entered, self.open = threading.Event(), threading.Event()

    def sync_round(self, trainer, before, done):
        target, last = super().sync_round(trainer, before, done)
        if done:
            return target, last
        self.entered.set()
        assert self.open.wait(60), "nobody stepped during the round"
        return [x + 100 for x in target], last


@pytest.mark.parametrize("workers", [2, 3])
def test_a_foreground_round_keeps_one_worker_waiting_and_the_others_step_on(workers):
    rule = model_averaging(alpha=1.0, form="delta")
    transport, opened_at = Gated(rule, PARAMS, 1), []

    def hook(trainer, step, metrics):
        """Holds the round of step 4 until step 7, so that it ends before the next round is due at step 8."""
        if step in (5, 6):
            assert transport.entered.wait(60)
        if step == 7:
            opened_at.append(step)
            transport.open.set()

    tables, make = HostTables.create(SPEC, sgd(0.0)), lambda number: Foreground(transport, number, every_steps=4)
    task, batches = counting_at(1.0, 0.0), stream(0, 15)
    (found,), figures = train_freely(task, PARAMS, tables, [batches], make, workers, hook=hook)
    assert opened_at == [7] and figures.steps == [15] and figures.rounds == [3]
    # Every step adds 1 and every round 100: steps during a round are kept, and no round counts twice.
    np.testing.assert_array_equal(found.params["w"], 1 + 15 + 300)


def test_all_devices_take_turns_and_a_gap_without_rounds_is_infinite():
    devices = jax.local_devices()
    streams = [stream(i, 2) for i in range(3)]
    dense, figures = freely(HostTables.create(SPEC, sgd(0.1)), streams, devices=devices[:2])
    assert [next(iter(state.params["w"].devices())) for state in dense] == [devices[i] for i in (0, 1, 0)]
    assert figures.average_sync_gap == float("inf") and figures.failures == {}


# ---- stretches


class Turns:
    """Streams of two trainers that step alternately: one steps when the other has asked for its next batch."""

    def __init__(self, batches):
        self.batches, self.asked, self.changed = batches, [0, 0], threading.Condition()

    def of(self, number):
        other = 1 - number
        for at, batch in enumerate(self.batches[number]):
            with self.changed:
                self.asked[number] = at + 1
                self.changed.notify_all()
                assert self.changed.wait_for(lambda at=at: self.asked[other] >= at + 1 + number, 60)
            yield batch
        with self.changed:
            self.asked[number] = len(self.batches[number]) + 1
            self.changed.notify_all()


def in_stretches(rule, lengths, trainers=2, every_steps=3, task=TASK):
    """(dense states, shards, group memory, rounds) after stretches of `lengths` batches for each trainer."""
    tables, step = HostTables.create(SPEC, task.row_optimizer), FreeStep(task)
    states = [task.init(PARAMS, tables).dense for _ in range(trainers)]
    batches, memory, rounds = [stream(number, sum(lengths)) for number in range(trainers)], None, 0
    for length in lengths:
        mine = [list(itertools.islice(of, length)) for of in batches]
        turns = Turns(mine) if rule is not None and rule.has_centre else None
        streams = [turns.of(number) for number in range(trainers)] if turns else mine
        group = rule and SyncGroup(
            rule, PARAMS, trainers, every_steps=every_steps, last_round=False, memory=memory, timeout_s=60
        )
        states, figures = train_stretch(step, states, tables, streams, group and group.trainer)
        memory, rounds = group and group.memory, rounds + sum(figures.rounds)
    return states, tables.shards, memory, rounds


@pytest.mark.parametrize("name", cases(RULES, ["ma-lerp", "bmuf", "easgd"]))
def test_stretches_of_two_trainers_in_the_foreground_are_one_run(name):
    """Rounds fall inside, at the end of and across stretches; where all trainers meet, no one writes rows meanwhile."""
    rule = RULES[name]
    task = TASK if rule.has_centre else STILL_ROWS  # in turns; otherwise two trainers write rows in any order
    whole, parts = (in_stretches(rule, each, task=task) for each in ([20], [7, 3, 2, 8]))
    assert_equal(whole, parts)
    assert whole[3] == 12


@pytest.mark.parametrize("name", cases(RULES, ["bmuf", "easgd"]))
def test_without_what_the_group_knew_it_is_another_run(name, monkeypatch):
    """Negative control of the test above."""
    rule = RULES[name]
    task = TASK if rule.has_centre else STILL_ROWS
    whole = in_stretches(rule, [14], task=task)
    monkeypatch.setattr(SyncGroup, "memory", property(lambda group: None))
    forgot = in_stretches(rule, [7, 7], task=task)
    assert not np.array_equal(whole[0][0].params["w"], forgot[0][0].params["w"])


@functools.cache
def on_devices(task, trainers):
    """The task on a mesh of one device for each trainer."""
    return dataclasses.replace(task, mesh=make_mesh(trainers, jax.devices()[:trainers]))


def engine(trainers=2, rule=None, tables="host", task=TASK, **more):
    task = on_devices(task, trainers)
    return FreeTrainers(task, task.init(PARAMS, tables), rule, **more)


def trained(engine, batches):
    return [(int(state.dense.step), metrics) for state, metrics in engine.run(batches)]


@pytest.mark.parametrize(
    ("name", "stretch_steps"),
    cases(itertools.product([None, "bmuf", "easgd"], [1, 4, 100]), [("bmuf", 1), ("easgd", 4), (None, 1), (None, 100)]),
)
def test_one_trainer_does_not_feel_how_long_its_stretches_are(name, stretch_steps):
    rule, every = (RULES[name], {"every_steps": 3}) if name else (None, {})
    one, other = (engine(1, rule, stretch_steps=steps, **every) for steps in (stretch_steps, 7))
    with one, other:
        trained(one, stream(0, 15)), trained(other, stream(0, 15))
        assert_equal((one.state.dense, one.tables.shards), (other.state.dense, other.tables.shards))
        assert one.figures()["rounds"] == [5 if name else 0] == other.figures()["rounds"]
    if name is None:
        (plain,), _ = train_freely(TASK, PARAMS, HostTables.create(SPEC, ROWS), [stream(0, 15)])
        assert_equal(plain.params, one.state.dense.params)


GROUPS = {
    "none": (None, {}),
    "ma-foreground": (model_averaging(), {"every_steps": 3}),
    "bmuf-shadow": (bmuf(momentum=0.5), {}),
    "easgd-foreground": (easgd(), {"every_steps": 2}),
    "easgd-shadow": (easgd(), {"pace_seconds": 0.001}),
}


class Counted:
    """Counts trained batches: each has a single example of one row, to which its step adds 1."""

    def __init__(self, batches):
        rows = np.arange(batches) % 40
        self.batches = [Batch({"item": np.array([row], np.int32)}, np.ones(1)) for row in rows]
        self.times = np.bincount(rows, minlength=40)

    @staticmethod
    def gained(tables, before):
        parts = [
            now["value"] - then["value"] for now, then in zip(tables.shards["width_4"], before["width_4"], strict=True)
        ]
        return np.stack(parts, 1).reshape(-1, 4)[:40, 0]


@pytest.mark.parametrize("name", GROUPS)
def test_every_batch_is_trained_once_and_callbacks_see_all_at_rest(name):
    rule, more = GROUPS[name]
    counted, given, seen = Counted(57), itertools.count(), []
    tables = HostTables.create(SPEC, sgd(1.0))
    before = jax.tree.map(np.array, tables.shards)

    def batches():
        for batch in counted.batches:
            next(given)
            yield batch

    def look(info):
        dense = info.state.dense
        assert info.plans == {} and next(given) - len(seen) == info.step == int(dense.step)
        seen.append(info.step)
        assert dense.opt_state.steps.sum() == info.step and np.asarray(dense.params["w"]).shape == (2, 4)

    options = {"callbacks": [look], "workers": 2, "stretch_steps": 20, **more}
    with engine(2, rule, tables, counting_at(0.0, 1.0), **options) as trainers:
        found = trained(trainers, batches())
        figures = trainers.figures()
    assert seen == [20, 40, 57] == [step for step, _ in found]
    np.testing.assert_allclose(Counted.gained(tables, before), counted.times, rtol=1e-5)
    assert [metrics["examples"] for _, metrics in found] == [20, 20, 17]
    assert sum(figures["steps"]) == 57 and figures["batches_lost"] == 0 and figures["dropped"] == []
    assert sum(figures["rounds"]) == sum(metrics["rounds"] for _, metrics in found)
    if "every_steps" in more:
        assert sum(figures["rounds"]) == sum(steps // more["every_steps"] for steps in figures["steps"])
    assert no_threads_left()


@pytest.mark.parametrize("name", ["none", "ma-foreground", "bmuf-shadow", "easgd-foreground"])
def test_a_saved_state_goes_on_in_new_trainers(name, tmp_path):
    rule, more = GROUPS[name]

    def save(state):
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(state)

    with engine(2, rule, stretch_steps=3, callbacks=[at_step(6, save)], **more) as first:
        trained(first, stream(0, 6))
        kept = jax.tree.map(np.array, (first.state.dense, first.tables.shards))
    with engine(2, rule, stretch_steps=5, **more) as second:
        state, image = restore(tmp_path, second.state)
        second.reset(state)
        assert_equal(kept, (second.state.dense, second.tables.shards))
        assert second.step == image.step == 6
        evaluate = make_eval_step(
            SPEC, lambda params, found, batch: found["item"] @ params["w"], make_mesh(2, jax.devices()[:2])
        )
        batch = next(stream(9, 1))
        assert evaluate(second.state, batch).shape == (8,)
        # It continues at its step: stretches end at multiples of their length.
        assert [step for step, _ in trained(second, itertools.islice(stream(0, 12), 6, None))] == [10, 12]
        assert second.state.dense.opt_state.steps.sum() == 12


def test_one_trainer_that_goes_on_from_a_save_is_one_run(tmp_path):
    options = {"rule": bmuf(momentum=0.5), "every_steps": 3, "stretch_steps": 5}
    with engine(1, **options) as whole, engine(1, **options) as second, Checkpointer(tmp_path) as checkpointer:
        whole.enter(at_step(15, checkpointer.save))
        trained(whole, stream(0, 30))
        checkpointer.wait()
        state, image = restore(tmp_path, second.state)
        assert image.step == 15
        second.reset(state)
        trained(second, itertools.islice(stream(0, 30), 15, None))
        assert_equal((whole.state.dense, whole.tables.shards), (second.state.dense, second.tables.shards))


@pytest.mark.parametrize("name", cases(RULES, ["ma-lerp", "bmuf", "easgd-sequential"]))
def test_together_is_what_finish_makes_of_the_trainers(name, monkeypatch):
    rule = RULES[name]
    with engine(2, rule, every_steps=2, stretch_steps=9) as trainers:
        trained(trainers, stream(0, 9))
        state, found = trainers.state, trainers.together().dense.params["w"]
        assert_equal(state.dense, trainers.state.dense)
    replicas = [{"w": np.asarray(state.dense.params["w"][i])} for i in range(2)]
    group = SyncGroup(rule, PARAMS, 2, every_steps=2, memory=state.dense.opt_state.group)
    syncs, done, first = [group.trainer(i) for i in range(2)], {}, threading.Event()
    meet = group.transport.sync_round

    def in_order(trainer, before, is_done):
        assert trainer == 0 or not rule.has_centre or first.wait(60)
        try:
            return meet(trainer, before, is_done)
        finally:
            first.set()

    monkeypatch.setattr(group.transport, "sync_round", in_order)

    def finish(number):
        with syncs[number] as sync:
            done[number] = sync.finish(replicas[number])["w"]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(finish, range(2)))
    np.testing.assert_array_equal(found, np.stack([done[0], done[1]]))


RATE = optax.linear_schedule(1.0, 0.0, 10)


@pytest.mark.parametrize(
    ("optimizer", "trainers", "moves"),
    [
        (optax.sgd(RATE), 2, 11.0),
        (optax.inject_hyperparams(optax.sgd)(RATE), 2, 11.0),
        (optax.MultiSteps(optax.sgd(RATE), 4), 1, 4.0),  # five updates, at the rates of its own steps
    ],
)
def test_schedules_follow_the_stream_whichever_trainer_takes_a_batch(monkeypatch, optimizer, trainers, moves):
    """Batch t of n trainers is trained at the rate of step t // n, also if one is slow, or a run goes on."""
    plain = FreeStep.plan

    def slow(step, ids):
        threading.Event().wait(0.03 * (threading.current_thread().name == "trainer-1"))
        return plain(step, ids)

    monkeypatch.setattr(FreeStep, "plan", slow)
    task = on_devices(Task(SPEC, counting, optimizer, sgd(RATE)), trainers)
    one_row_each = [Batch({"item": np.full(2, t, np.int32)}, np.zeros(2)) for t in range(20)]
    state = task.init(PARAMS, "host")
    start, steps = np.array(embedding_matrix(state.tables, "item")), []
    for part in (one_row_each[:7], one_row_each[7:]):
        with FreeTrainers(task, state, stretch_steps=5) as engine_of_part:
            state = engine_of_part.train(part)
            steps.append(engine_of_part.figures()["steps"])
    assert trainers == 1 or steps[1][0] > steps[1][1]
    wanted = np.array([max(0.0, 1 - t // trainers / 10) for t in range(20)])
    moved = embedding_matrix(state.tables, "item") - start
    np.testing.assert_allclose(moved[:20], np.repeat(wanted[:, None], 4, axis=1), atol=1e-5)
    np.testing.assert_allclose((np.asarray(state.dense.params["w"]) - 1).sum(axis=0), moves, rtol=1e-5)


def test_a_batch_that_arrives_after_the_end_of_a_stretch_is_the_first_of_the_next():
    asked, go = threading.Event(), threading.Event()

    def late():
        asked.set()
        assert go.wait(60)
        yield from stream(0, 3)

    batches = Stream(late())
    splitter = StreamSplitter(batches, 10)
    taker = threading.Thread(target=lambda: list(splitter.batches()))
    taker.start()
    assert asked.wait(60)
    splitter.close()
    go.set()
    join_all([taker])
    found = [turn.batch.label for turn in StreamSplitter(batches, 10).batches()]
    assert splitter.taken == 0
    jax.tree.map(np.testing.assert_array_equal, found, [batch.label for batch in stream(0, 3)])


def test_programs_are_compiled_once_for_all_stretches_and_engines():
    traced = collections.Counter()

    def noted(*given):
        traced["loss"] += 1
        return loss(*given)

    task, options = Task(SPEC, noted, DENSE, ROWS), {"stretch_steps": 4, "every_steps": 2}
    same = next(stream(0, 1))
    with engine(2, model_averaging(), task=task, **options) as trainers:
        trained(trainers, itertools.repeat(same, 4))
        first = traced["loss"]
        trained(trainers, itertools.repeat(same, 12))
    with engine(2, model_averaging(), task=task, **options) as trainers:
        trained(trainers, itertools.repeat(same, 4))
    assert traced["loss"] == first > 0


def test_a_callback_that_raises_leaves_a_state_to_go_on_from():
    def fail(state):
        raise RuntimeError("no room")

    batches = stream(0, 9)
    with engine(2, model_averaging(), stretch_steps=3, callbacks=[at_step(3, fail)]) as trainers:
        with pytest.raises(RuntimeError, match="no room"):
            trained(trainers, batches)
        assert trainers.step == 3 and not trainers.running
        assert [step for step, _ in trained(trainers, batches)] == [6, 9]
        assert no_threads_left()


def test_the_parameters_that_a_callback_returns_are_trained():
    def change(info):
        if info.step <= 6:
            dense = info.state.dense
            return info.state._replace(dense=dense._replace(params={"w": 0 * dense.params["w"] + info.step}))

    task = Task(SPEC, loss, optax.sgd(0.0), ROWS)
    with engine(2, task=task, stretch_steps=3, callbacks=[change]) as trainers:
        found = [np.asarray(state.dense.params["w"])[:, 0] for state, _ in trainers.run(stream(0, 6))]
        np.testing.assert_array_equal(found, [[3, 3], [6, 6]])
        trained(trainers, stream(0, 3))
        np.testing.assert_array_equal(trainers.state.dense.params["w"], np.full((2, 4), 6))


def test_ctrl_c_ends_a_stretch_with_a_whole_state():
    counted, given = Counted(400), []
    tables = HostTables.create(SPEC, sgd(1.0))
    before = jax.tree.map(np.array, tables.shards)

    def batches():
        while True:
            for batch in counted.batches:
                given.append(batch)
                yield batch

    with engine(2, easgd(), tables, counting_at(0.0, 1.0), stretch_steps=10**9) as trainers:
        thread = interrupt_when(lambda: len(given) > 30)
        with pytest.raises(KeyboardInterrupt):
            trained(trainers, batches())
        join_all([thread])
        made = trainers.state.dense.opt_state.steps
        lost = trainers.figures()["batches_lost"]
        assert trainers.step == len(given) == made.sum() + lost and 0 <= lost <= 2
        np.testing.assert_allclose(Counted.gained(tables, before).sum(), made.sum(), rtol=1e-5)
        assert no_threads_left()
        trained(trainers, stream(0, 3))
        assert trainers.step == len(given) + 3


def test_a_signal_that_a_handler_takes_ends_the_stretch_and_the_callbacks_see_it():
    asked, given, seen = [], [], []

    def batches():
        for batch in itertools.cycle(stream(0, 5)):
            given.append(batch)
            yield batch

    def stop(info):
        seen.append(info.step)
        raise StopAsyncIteration("saved") if asked else AssertionError("nobody has asked")

    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        with engine(2, model_averaging(), callbacks=[stop], stretch_steps=10**9, every_steps=2) as trainers:
            thread = interrupt_when(lambda: len(given) > 20)
            with pytest.raises(StopAsyncIteration, match="saved"):
                trained(trainers, batches())
            join_all([thread])
            assert seen == [trainers.step] == [len(given)] and asked == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


class FailsOnce(HostTables):
    """Tables whose n-th write fails."""

    def failing_at(self, write, error):
        self.left, self.error = itertools.count(1), (write, error)
        self.both, self.here = None, set()
        return self

    def wait_for_both(self):
        """From now on each trainer's first write waits for the other's, so that both train."""
        self.both = threading.Barrier(2)

    def add(self, plans, new, old):
        if self.both and (name := threading.current_thread().name) not in self.here:
            self.here.add(name)
            self.both.wait(60)
        if next(self.left) == self.error[0]:
            raise self.error[1]
        super().add(plans, new, old)


@pytest.mark.parametrize("name", ["ma-foreground", "easgd-shadow"])
def test_a_trainer_that_fails_is_named_and_the_state_is_refused_until_it_is_restored(name, tmp_path):
    rule, more = GROUPS[name]
    tables = FailsOnce.create(SPEC, ROWS).failing_at(13, OSError("the memory is gone"))
    with engine(2, rule, tables, stretch_steps=5, **more) as trainers, Checkpointer(tmp_path) as checkpointer:

        @trainers.enter
        def save(info):
            checkpointer.save(info.state)

        with pytest.raises(OSError, match="the memory is gone") as caught:
            trained(trainers, stream(0, 50))
        assert "of trainer" in caught.value.__notes__[0] and no_threads_left()
        with pytest.raises(ValueError, match="began at step 10: rows have changed.*`reset`"):
            trainers.state  # noqa: B018
        with pytest.raises(ValueError, match="rows have changed"):
            trainers.run(stream(0, 5))
        checkpointer.wait()
        fresh = engine(2, rule, tables, stretch_steps=5, **more)
        state, _ = restore(tmp_path, fresh.state)
        trainers.reset(state)
        trained(trainers, itertools.islice(stream(0, 20), 10, None))
        assert trainers.step == 20


@pytest.mark.parametrize("name", ["ma-foreground", "bmuf-shadow", "easgd-foreground", "easgd-shadow"])
def test_a_dropped_trainer_comes_back_in_the_next_stretch_and_its_batch_is_counted_as_lost(name):
    rule, more = GROUPS[name]
    tables = FailsOnce.create(SPEC, ROWS).failing_at(3, OSError("the memory is gone"))
    with engine(2, rule, tables, stretch_steps=10, on_failure="drop", **more) as trainers:
        run = trainers.run(stream(0, 30))
        with pytest.warns(RuntimeWarning, match="was dropped: OSError: the memory is gone"):
            state, metrics = next(run)
        one, other = np.asarray(state.dense.params["w"])
        np.testing.assert_array_equal(one, other)  # a copy of the surviving trainer's replica
        assert metrics["batches_lost"] == 1 and int(state.dense.step) == 10
        tables.wait_for_both()
        for _, metrics in run:
            assert metrics["batches_lost"] == 0
        figures = trainers.figures()
        assert sum(figures["steps"]) == 29 and figures["batches_lost"] == 1 and trainers.step == 30
        assert min(figures["steps"]) > 0 and "the memory is gone" in figures["dropped"][0]
        assert no_threads_left()


def test_a_reset_forgets_the_saves_that_stood_behind_one_that_failed():
    saved, disk = [], ["full"]

    def fail(state):
        raise OSError("the disk is full")

    def announce(info):
        for save in (fail, saved.append) if disk else ():
            trainers.snapshot_at(info.step, save)

    with engine(callbacks=[announce], stretch_steps=5) as trainers:
        start = trainers.state
        with pytest.raises(OSError, match="full"):
            trained(trainers, stream(0, 5))
        disk.clear()
        trainers.reset(start)
        trained(trainers, stream(0, 5))
    assert trainers.step == 5 and not saved


def test_figures_are_counted_on_from_those_of_an_earlier_process():
    with engine(2, easgd(), every_steps=2, stretch_steps=5) as first:
        trained(first, stream(0, 10))
        past = first.figures()
    older = past | {"bytes": [1, 2]}  # which images of an earlier version have
    with engine(2, easgd(), every_steps=2, stretch_steps=5, past=older) as second:
        assert second.figures() == past
        trained(second, stream(0, 10))
        assert sum(second.figures()["steps"]) == 20


@pytest.mark.parametrize("stretch_steps", [1, 4])
def test_a_recovery_with_a_scheme_saves_all_rows_of_free_trainers_as_no_stretch_reports_its_rows(
    tmp_path, stretch_steps
):
    recovery = Recovery(tmp_path, save_every_steps=8, total_steps=16, scheme=mfu(), save_at_end=False)
    with engine(1, stretch_steps=stretch_steps) as free:
        free.enter(recovery)
        trained(free, stream(0, 16))
        found, image = restore(tmp_path, engine(1).state)
        assert image.step == 16
        assert_equal(found.tables.shards, free.tables.shards)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": np.array([1.0, -1.0], np.float32)}, "weights are finite and 0 or more"),
        ({"weight": np.array([1.0, np.nan], np.float32)}, "weights are finite and 0 or more"),
        ({"label": np.ones(1, np.float32)}, "label has shape"),
    ],
)
def test_a_batch_that_would_train_silently_wrong_is_refused(changed, message):
    batch = Batch({"item": np.array([3, 4])}, np.ones(2, np.float32))._replace(**changed)
    with pytest.raises(ValueError, match=message):
        freely(HostTables.create(SPEC, ROWS), [[batch]])


def test_a_loss_that_is_not_finite_stops_training_before_it_changes_a_row():
    bad = lambda params, activations, batch: activations["item"].sum(-1) * jnp.where(batch.label > 0, jnp.nan, 1)
    tables, start = (HostTables.create(SPEC, ROWS) for _ in range(2))
    batch = Batch({"item": np.array([3, 4])}, np.ones(2, np.float32))
    with pytest.raises(FloatingPointError, match="the loss of trainer 0 is nan after its step 0: look at that batch"):
        train_freely(Task(SPEC, bad, DENSE, ROWS), PARAMS, tables, [[batch] * 3])
    assert_equal(tables.shards, start.shards)


def test_tables_of_another_spec_are_refused():
    other = EmbeddingSpec({"user": Table(40, 4)}, {"item": Lookup("user")}, shards=2)
    with pytest.raises(ValueError, match="made with another spec"):
        freely(HostTables.create(other, ROWS), [stream(0, 2)])


def test_slots_of_another_row_optimizer_and_the_state_of_another_optimizer_are_refused():
    with pytest.raises(ValueError, match="the tables have slots .* but the step's row optimizer wants"):
        freely(HostTables.create(SPEC, adagrad(0.1)), [stream(0, 2)])
    adam, alike = (Task(SPEC, loss, optimizer(0.1), sgd(0.1)) for optimizer in (optax.adam, optax.adabelief))
    with pytest.raises(ValueError, match="the optimizer state is .*ScaleByAdamState.* wants .*ScaleByBeliefState"):
        FreeTrainers(alike, adam.init(PARAMS, "host")).train(stream(0, 2))


# ---- failures


@pytest.mark.parametrize(
    ("where", "kind"), [("stream", None), ("stream", Shadow), ("stream", Foreground), ("hook", None), ("hook", Shadow)]
)
def test_a_failure_stops_everybody_and_its_worker_is_named(where, kind):
    def hook(trainer, step, metrics):
        if where == "hook" and (trainer, step) == (1, 5):
            raise OSError("the disk is gone")

    broken = raising(OSError("the disk is gone")) if where == "stream" else stream(1, 10**6)
    make, tables = kind and synchronisers(kind, easgd(), 2, **every(2, kind)), HostTables.create(SPEC, sgd(0.1))
    with pytest.raises(OSError, match="the disk is gone") as caught:
        freely(tables, [stream(0, 10**6), broken], make, 2, hook=hook)
    assert "in worker" in caught.value.__notes__[0] and "of trainer 1" in caught.value.__notes__[0]
    assert no_threads_left()


class Blocks:
    """Trainer 0 blocks in its stream or in a read of rows until `wake` is set; trainer 1 fails meanwhile."""

    def __init__(self, where, read=HostTables.read):
        self.where, self.read_rows, self.blocked, self.wake = where, read, threading.Event(), threading.Event()
        self.steps = []  # steps of trainer 0

    def block(self):
        self.blocked.set()
        assert self.wake.wait(60)

    def stream(self):
        yield from stream(0, 3)
        if self.where == "stream":
            self.block()
        yield from stream(1, 3)

    def read(self, tables, plans):
        if self.where == "read" and threading.current_thread().name.startswith("trainer-0"):
            self.block()
        return self.read_rows(tables, plans)

    def hook(self, trainer, step, metrics):
        if trainer == 0:
            self.steps.append(step)

    def broken(self):
        yield from stream(1, 3)
        assert self.blocked.wait(60)
        if self.where == "stream":
            until(lambda: len(self.steps) == 3)  # its other worker has finished its writes
        raise OSError("the disk is gone")


@pytest.mark.parametrize("where", ["stream", "read"])
def test_what_blocks_is_left_behind_by_name_and_writes_nothing_when_it_wakes(monkeypatch, where):
    blocks, tables = Blocks(where), HostTables.create(SPEC, sgd(0.1))
    monkeypatch.setattr(HostTables, "read", lambda *given: blocks.read(*given))
    make, streams = synchronisers(Shadow, model_averaging(), 2), [blocks.stream(), blocks.broken()]
    monkeypatch.setattr("jaxrec.shadowsync.workers.LEAVE_S", 0.2)
    with (
        pytest.warns(RuntimeWarning, match="trainer-0.* did not end within 0.2 s"),
        pytest.raises(OSError, match="disk"),
    ):
        freely(tables, streams, make, 2, hook=blocks.hook)
    join_all(workers("trainer-1"))  # on a busy machine they may be late
    as_left = jax.tree.map(np.array, tables.shards)
    left = workers()
    blocks.wake.set()
    join_all(left)
    assert [thread for thread in left if thread.name == "trainer-0"] and no_threads_left()
    jax.tree.map(np.testing.assert_array_equal, tables.shards, as_left)


@pytest.mark.parametrize("rule", [model_averaging(), easgd()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_a_failing_trainer_is_dropped_and_the_others_finish(kind, rule):
    make = synchronisers(kind, rule, 3, on_failure="drop", **every(2, kind))
    made, tables = [make(number) for number in range(3)], HostTables.create(SPEC, sgd(0.1))
    streams = [raising(OSError("the disk is gone")), *(lasting(i, 30, made) for i in (1, 2))]
    with pytest.warns(RuntimeWarning, match="trainer 0 was dropped: OSError: the disk is gone"):
        dense, figures = freely(tables, streams, made.__getitem__, 2)
    assert list(figures.failures) == [0] and str(figures.failures[0]) == "the disk is gone"
    assert "of trainer 0" in figures.failures[0].__notes__[0]
    assert min(figures.steps[1:]) >= 30 and min(figures.rounds[1:]) > 0 and figures.steps[0] <= 3
    assert len(dense) == 3 and no_threads_left()
    if rule.has_centre:
        np.testing.assert_array_equal(dense[1].params["w"], dense[2].params["w"])  # the centre after both trainers


def test_all_dropped_is_a_failure_and_ctrl_c_of_one_drops_nobody():
    tables = HostTables.create(SPEC, sgd(0.1))
    make = lambda: synchronisers(Shadow, model_averaging(), 2, on_failure="drop")
    with pytest.raises(OSError, match="disk"):
        both = [raising(OSError("no disk")), raising(OSError("no disk"))]
        freely(tables, both, make())
    with pytest.raises(KeyboardInterrupt) as caught:
        streams = [raising(KeyboardInterrupt()), stream(1, 10**9)]
        freely(tables, streams, make(), 2)
    assert "of trainer 0" in caught.value.__notes__[0]
    assert no_threads_left()


class Broken(AllToAll):
    """A transport that raises in the third round of trainer 1."""

    rounds_of_1 = 0

    def sync_round(self, trainer, before, done):
        if trainer == 1 and self.rounds_of_1 == 2:
            raise ConnectionError("the cable is cut")
        self.rounds_of_1 += trainer == 1
        return super().sync_round(trainer, before, done)


@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_what_a_transport_raises_comes_out_and_not_that_others_were_left(kind):
    tables = HostTables.create(SPEC, sgd(0.1))
    make = synchronisers(kind, model_averaging(), 3, of=Broken, **every(1, kind))
    with pytest.raises(ConnectionError, match="cable") as caught:
        streams = [stream(i, 10**9) for i in range(3)]
        freely(tables, streams, make, 2)
    assert "trainer 1" in caught.value.__notes__[0]
    assert no_threads_left()


@pytest.mark.parametrize("policy", ["raise", "drop"])
@pytest.mark.parametrize("broken", [0, 1])
def test_what_a_round_raises_comes_out_if_the_trainer_is_seen_to_be_gone_before_it_steps_again(
    policy, broken, monkeypatch
):
    """All streams block until then, so no `exchange` raises the error of the round."""
    seen, is_over = threading.Event(), Trainer.is_over

    class BrokenAtOnce(AllToAll):
        def sync_round(self, trainer, before, done):
            if trainer == broken:
                raise ConnectionError("the cable is cut")
            return super().sync_round(trainer, before, done)

    def noticed(self):
        found = is_over(self)
        if found and self.number == broken:
            seen.set()
        return found

    def blocking(batches):
        yield from stream(0, batches)
        assert seen.wait(60)

    monkeypatch.setattr(Trainer, "is_over", noticed)
    make = synchronisers(Shadow, model_averaging(), 2, of=BrokenAtOnce, on_failure=policy)
    streams, tables = [blocking(broken == number) for number in range(2)], HostTables.create(SPEC, sgd(0.1))
    if policy == "raise":
        with pytest.raises(ConnectionError, match="cable"):
            freely(tables, streams, make)
    else:
        with pytest.warns(RuntimeWarning, match=f"trainer {broken} was dropped: ConnectionError: the cable"):
            _, figures = freely(tables, streams, make)
        assert isinstance(figures.failures[broken], ConnectionError)
    assert no_threads_left()


def test_what_a_round_of_a_dropped_trainer_raises_is_told_once():
    make = synchronisers(Shadow, model_averaging(), 2, of=Broken, on_failure="drop")
    with pytest.warns(RuntimeWarning) as told:
        freely(HostTables.create(SPEC, sgd(0.1)), [stream(0, 5), stream(1, 10**9)], make)
    assert ["cable" in str(each.message) for each in told] == [True]


@pytest.mark.parametrize("rule", [model_averaging(), easgd()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", [Shadow, Foreground])
def test_a_trainer_whose_stream_blocks_is_dropped_and_left_behind_by_name(kind, rule, monkeypatch):
    """The clock stands until trainer 1 blocks and trainer 0 waits for it, so compiling makes no other overdue."""
    clock, blocked, wake = Clock(monkeypatch), threading.Event(), threading.Event()
    transport = (Centre if rule.has_centre else AllToAll)(rule, PARAMS, 2, timeout_s=0.5, on_failure="drop")

    def blocking():
        yield from stream(0, 3)
        blocked.set()
        assert wake.wait(60)
        yield from stream(0, 3)

    def time_passes():
        until(lambda: blocked.is_set() and {"trainer-0", "shadow-0"} & {*in_meet(transport)})
        gone = lambda: transport.exit_reason(1)
        while not gone():
            clock.goes_on(0.3, transport, 0, unless=gone)

    (passing := threading.Thread(target=time_passes)).start()
    tables, make = HostTables.create(SPEC, sgd(0.1)), lambda number: kind(transport, number, **every(2, kind))
    monkeypatch.setattr("jaxrec.shadowsync.workers.LEAVE_S", 0.2)
    with pytest.warns(RuntimeWarning) as told:
        _, figures = freely(tables, [stream(1, 5), blocking()], make)
    words = " ".join(str(each.message) for each in told)
    assert (
        "trainer 1 was dropped: PeerLeft: trainer 1 was last seen" in words and "trainer-1 did not end within" in words
    )
    assert list(figures.failures) == [1] and figures.steps == [5, 3]
    left = workers()
    wake.set()
    join_all([*left, passing])
    assert "trainer-1" in {thread.name for thread in left} and no_threads_left() and figures.steps == [5, 3]


def train_for_ever(way):
    """Trainer 0 finishes early and waits for trainer 1, which never finishes."""
    kind, rule, more = WAYS[way] if way != "none" else (None, None, {})

    class Telling(Centre if rule and rule.has_centre else AllToAll):
        def sync_round(self, trainer, before, done):
            if done:
                print("finishing", flush=True)
            return super().sync_round(trainer, before, done)

    make = kind and synchronisers(kind, rule, 2, of=Telling, **more)
    streams = [stream(0, 5), stream(1, 10**9)]
    freely(HostTables.create(SPEC, sgd(0.1)), streams, make, 2)


def child():
    """Train until SIGINT, repeatedly; print a JSON line with the Python threads that are left."""
    before = set(frames())  # `threading.enumerate` may leave out a thread that Ctrl-C hit in a `join`
    for way in itertools.cycle(["none", *WAYS]):
        told = {"way": way, "raised": None}
        try:
            print("training", flush=True)
            train_for_ever(way)
        except KeyboardInterrupt:
            told["raised"] = "KeyboardInterrupt"
        told["left"] = len(set(frames()) - before)
        told["names"] = [thread.name for thread in threading.enumerate()]
        print(json.dumps(told), flush=True)


@pytest.mark.process
@pytest.mark.random_instant
@pytest.mark.timeout(200)
def test_ctrl_c_at_any_instant_ends_all_threads():
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "import test_free; test_free.child()"]
    instants, told = random.Random(3), []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}) as process:
        lines = iter(process.stdout.readline, "")
        try:
            for number in range(14):
                way = ["none", *WAYS][number % (len(WAYS) + 1)]
                wanted = "training" if number % 2 or way == "none" else "finishing"
                assert wanted in (line.strip() for line in lines)  # reads up to that line
                threading.Event().wait(instants.random() * 0.6)
                process.send_signal(signal.SIGINT)
                told.append(json.loads(next(line for line in lines if line.startswith("{"))))
        finally:
            process.kill()
    assert [each["way"] for each in told] == (3 * ["none", *WAYS])[:14]
    assert [each["raised"] for each in told] == ["KeyboardInterrupt"] * 14, told
    assert [each["names"] for each in told] == [["MainThread"]] * 14
    assert [each["left"] for each in told] == [0] * 14


def test_of_two_errors_of_a_dropped_trainer_the_first_is_its_failure():
    class NoWayOut(AllToAll):
        def leave(self, trainer, error=None):
            super().leave(trainer, error)
            if error is not None:
                raise OSError("no way out")

    make = synchronisers(Shadow, model_averaging(), 2, of=NoWayOut, on_failure="drop")
    streams, tables = [raising(OSError("the disk is gone")), stream(1, 5)], HostTables.create(SPEC, sgd(0.1))
    with pytest.warns(RuntimeWarning) as told:
        _, figures = freely(tables, streams, make)
    assert [str(error) for error in figures.failures.values()] == ["the disk is gone"] and no_threads_left()
    assert [word for each in told for word in ("disk", "way out") if word in str(each.message)] == ["disk", "way out"]
