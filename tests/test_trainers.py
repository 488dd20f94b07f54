"""A trainer of a pool, without its process: accounting, waits for lost rows, start and end."""

import dataclasses
import queue
import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from homes import every_row
from in_process_servers import InProcess, InThread
from threads import is_inside, until
from trainer_work import CLICKS, OWN, PARAMS, SPEC, TASK, batches, loss, work

from jaxrec import Task
from jaxrec.cluster.sync_servers import SyncServer
from jaxrec.cluster.trainers import RetryingTables, Stream, TrainerProcess
from jaxrec.embedding import HostTables
from jaxrec.embedding.lookup import plan
from jaxrec.embedding.servers import ShardServer, deal
from jaxrec.shadowsync import model_averaging, train_freely
from jaxrec.types import ShardsLost

RETRY_TIMEOUT_S = 60.0


def servers_of(incarnation=1):
    return [InProcess(ShardServer(SPEC, SPEC.layout(OWN[1]), shards, incarnation)) for shards in deal(SPEC.shards, 2)]


def retrying(servers, **more):
    return RetryingTables(SPEC, OWN[1], servers, 20.0, **more)


def wait(trainer, state, seconds=60):
    for _ in range(int(seconds / 0.02)):
        assert state == "failed" or trainer.progress().state != "failed", trainer.progress()
        if trainer.progress().state == state:
            return trainer.progress()
        threading.Event().wait(0.02)
    raise AssertionError(f"waited in vain for {state}: {trainer.progress()}")


def begun(work, servers, sync_servers=(), number=0, trainers=1, incarnation=1, start=0, params=None, timeout_s=20.0):
    trainer = TrainerProcess()
    trainer.begin(work, number, trainers, incarnation, start, params, servers, sync_servers, "a", timeout_s, None)
    return trainer


def test_what_counts_as_trained_is_what_has_no_gap_whoever_ends_first():
    """Workers in random order: the position is always that of the first batch not yet trained."""
    rng, sizes = np.random.default_rng(0), np.random.default_rng(1).integers(1, 50, 200)
    stream, taken, trained = Stream((SimpleNamespace(weight=np.ones(size)) for size in sizes), 0), [], set()
    while len(trained) < 200:
        if len(taken) < 5 and next(stream, None) is not None:
            taken.append(stream.number())
        if rng.random() < 0.5 and taken:
            trained.add(done := taken.pop(int(rng.integers(len(taken)))))
            stream.trained(done)
        first = min(set(range(201)) - trained)
        assert stream.progress() == (first, int(sizes[:first].sum()))
        assert not stream.over or len(taken) + len(trained) == 200
    assert stream.over


def test_one_trainer_at_servers_has_the_bits_of_threads_over_host_tables():
    host = HostTables.create(SPEC, OWN[1])
    (wanted,), _ = train_freely(TASK, PARAMS, host, [batches(0, 1)(0)])
    servers = servers_of()
    trainer = begun(work(), servers)
    progress = wait(trainer, "done")
    assert (progress.position, progress.examples, progress.steps) == (12, 12 * 16, 12)
    params, _ = trainer.result()
    assert all(np.array_equal(params[name], wanted.params[name]) for name in PARAMS)
    found, of_host = every_row(retrying(servers, client="b")), every_row(host)
    assert all(np.array_equal(found[key], of_host[key]) for key in of_host)


def test_a_successor_goes_on_at_the_position_with_the_parameters_given():
    servers, given = servers_of(), [np.float32(0.5), np.array([1, 2, 3], np.float32)]
    trainer = begun(work(), servers, incarnation=2, start=9, params=given)
    progress = wait(trainer, "done")
    assert (progress.position, progress.examples, progress.steps) == (12, 3 * 16, 3)
    assert np.abs(trainer.result()[0]["dense"][0] - [1, 2, 3]).max() < 0.1
    assert begun(work(), servers, start=12, incarnation=3).progress().examples == 0


@pytest.mark.parametrize("sgd", [optax.sgd, optax.inject_hyperparams(optax.sgd)])
def test_schedules_of_dense_parameters_go_on_where_a_successor_starts(sgd):
    sudden = sgd(lambda step: jnp.where(step < 9, 1.0, 0.0))
    for start, stays in ((9, True), (8, False)):
        trainer = begun(work(task=Task(SPEC, loss, sudden, OWN[1])), servers_of(), start=start)
        assert wait(trainer, "done").steps == 12 - start
        assert (trainer.result()[0]["dense"][0] == PARAMS["dense"]).all() == stays


def test_who_dies_while_it_begins_has_come_no_less_far_than_the_one_before():
    assert TrainerProcess().progress().state == "waiting"
    released = threading.Event()

    def slow(trainer, trainers):
        assert released.wait(60)
        return batches(trainer, trainers)

    trainer = begun(work(batches=slow), servers_of(), start=9)
    assert trainer.progress().state == "starting" and trainer.progress().position == 9
    released.set()
    assert wait(trainer, "done").position == 12


def test_a_read_waits_for_the_successor_and_what_was_to_be_added_is_lost_and_counted():
    servers = servers_of()
    tables = retrying(servers, retry_timeout_s=RETRY_TIMEOUT_S)
    plans = plan(SPEC, CLICKS.batch(0, 16).ids)
    rows = tables.read(plans)
    more = {name: rows[name]._replace(value=rows[name].value + 1) for name in rows}
    servers[1].kill()
    tables.add(plans, more, rows)
    gone = deal(SPEC.shards, 2)[1]
    assert tables.rows_lost == plans["width_4"].count[gone].sum() > 0
    found = queue.Queue()
    reader, start = threading.Thread(target=lambda: found.put(tables.read(plans)), daemon=True), time.monotonic()
    reader.start()
    until(lambda: is_inside(threading.Condition.wait_for, reader))
    threading.Event().wait(0.2)
    assert found.empty()
    dies = lambda verb, message: "die" if verb == "read" else ""
    dying = InProcess(ShardServer(SPEC, SPEC.layout(OWN[1]), gone, 2), dies)
    tables.replace_server(dying, gone, "killed")
    until(lambda: tables.lost and is_inside(threading.Condition.wait_for, reader))
    threading.Event().wait(0.2)
    tables.replace_server(servers_of(incarnation=3)[1], gone, "killed")
    now = found.get(timeout=60)["width_4"].value
    kept = [shard for shard in range(SPEC.shards) if shard not in gone]
    used = np.arange(now.shape[1]) < plans["width_4"].count[:, None]  # [S, U]
    for shards, wanted in ((kept, more), (gone, rows)):  # lost shards have initial rows, as nothing was restored
        mine = [shard in shards for shard in range(SPEC.shards)] & used.T
        assert np.array_equal(now[mine.T], wanted["width_4"].value[mine.T])
    assert 0.3 < tables.waited_s < time.monotonic() - start


def test_a_read_waits_no_longer_than_the_retry_timeout():
    servers = servers_of()
    tables = retrying(servers, retry_timeout_s=0.2)
    servers[0].kill()
    with pytest.raises(ShardsLost):
        tables.read(plan(SPEC, CLICKS.batch(0, 16).ids))


def test_successors_of_a_server_and_a_sync_server_announced_while_a_trainer_starts_are_not_missed():
    rule, entered, released = model_averaging(), threading.Event(), threading.Event()
    leaves = [np.asarray(PARAMS["bias"]), PARAMS["dense"]]
    old, new = (InThread(SyncServer(rule, leaves, 1, 20.0)) for _ in range(2))
    servers = servers_of()

    def slow(trainer, trainers):  # called after the hello to the shard servers, before any call of a sync server
        entered.set()
        assert released.wait(60)
        return batches(trainer, trainers)

    trainer = begun(work(batches=slow, rule=rule), servers, [old])
    assert entered.wait(60)
    old.kill()
    trainer.replace_sync_server(0, new)
    servers[0].kill()
    trainer.replace_server(servers_of(incarnation=2)[0], deal(SPEC.shards, 2)[0], "killed")
    released.set()
    assert wait(trainer, "done").position == 12 and trainer.newest() is not None


def test_a_trainer_that_answers_gives_signs_of_life_however_long_a_batch_takes(tmp_path):
    entered, released, heartbeats = threading.Event(), threading.Event(), []

    class Noting(SyncServer):
        def heartbeat(self, *me):
            heartbeats.append(me)

    def slow(trainer, trainers):
        def stream(start):
            yield CLICKS.batch(0, 16)
            entered.set()
            assert released.wait(60)

        return stream

    rule, leaves = model_averaging(), [np.asarray(PARAMS["bias"]), PARAMS["dense"]]
    HostTables.create(SPEC, OWN[1], tmp_path / "tables")
    server = InThread(Noting(rule, leaves, 1, 20.0))
    of_slow = work(batches=slow, rule=rule, every_steps=1)
    trainer = begun(of_slow, tmp_path / "tables", [server], incarnation=2, timeout_s=0.01)
    assert entered.wait(60)
    heartbeats.clear()
    until(lambda: trainer.progress().state == "training" and heartbeats)
    released.set()
    assert wait(trainer, "done").steps == 1 and set(heartbeats) == {(0, 2)}


def test_a_trainer_that_waits_for_others_at_its_end_is_finishing():
    rule, leaves = model_averaging(), [np.asarray(PARAMS["bias"]), PARAMS["dense"]]
    server = InThread(SyncServer(rule, leaves, 2, 20.0))
    trainer = begun(work(rule=rule), servers_of(), [server], trainers=2)
    assert wait(trainer, "finishing").position == 12
    server.server.give_up(1)
    assert wait(trainer, "done").steps == 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batches": lambda trainer, trainers: lambda start: iter([None])}, "'NoneType'"),
        ({"batches": lambda trainer, trainers: 1 / 0}, "ZeroDivisionError"),
        ({"task": dataclasses.replace(TASK, loss=lambda params, activations, batch: jnp.zeros(3))}, "Error"),
        ({"every_steps": 0, "rule": model_averaging()}, "every_steps=0"),
    ],
)
def test_progress_reports_why_a_trainer_has_failed(changes, words):
    server = InThread(SyncServer(model_averaging(), [np.zeros(3, np.float32), np.float32(0)], 1, 20.0))
    assert words in wait(begun(work(**changes), servers_of(), [server]), "failed").reason
