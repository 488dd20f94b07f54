"""Synchronisation servers for trainers in other processes: the bits of threads, successors, and lost servers."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from in_process_servers import InThread
from threads import until

from jaxrec.cluster.sync_servers import SyncClient, SyncServer, assign_leaves
from jaxrec.shadowsync import AllToAll, Centre, Foreground, Shadow, bmuf, easgd, model_averaging
from jaxrec.shadowsync.transport import PeerLeft

PARAMS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32(2.0), "c": np.ones(4, np.float32)}
RULES = {"easgd": easgd(0.3), "ma": model_averaging(0.7), "lerp": model_averaging(1.0, form="lerp"), "bmuf": bmuf()}


def sync_servers_of(rule, trainers, sync_servers=1, timeout_s=20.0):
    leaves = [PARAMS["a"], np.asarray(PARAMS["b"]), PARAMS["c"]]
    assigned = assign_leaves([leaf.nbytes for leaf in leaves], rule, sync_servers)
    return [InThread(SyncServer(rule, [leaves[leaf] for leaf in mine], trainers, timeout_s)) for mine in assigned]


def brought(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((1, *np.shape(leaf))).astype(np.float32) for name, leaf in PARAMS.items()}


def rounds(clients, script):
    """Run a script [(trainers that meet at once, done)]; return the results of all `sync_round` calls."""
    found = []
    with ThreadPoolExecutor(len(clients)) as pool:
        for number, (who, done) in enumerate(script):
            meet = lambda i, number=number, done=done: clients[i].sync_round(i, brought(100 * number + i), done)
            found += list(pool.map(meet, who)) if len(who) > 1 else [meet(who[0])]
    return found


def same(a, b):
    return all(np.array_equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in PARAMS)


@pytest.mark.parametrize(("name", "sync_servers"), [*((name, 1) for name in RULES), ("easgd", 2), ("easgd", 3)])
def test_scripted_rounds_have_the_bits_of_threads(name, sync_servers):
    rule = RULES[name]
    one_by_one = [((i,), False) for _ in range(3) for i in (0, 2, 1)]
    script = one_by_one if rule.has_centre else [((0, 1, 2), False)] * 3
    transport = (Centre if rule.has_centre else AllToAll)(rule, PARAMS, 3, timeout_s=20)
    for trainer in range(3):
        transport.join(trainer)
    handles = sync_servers_of(rule, 3, sync_servers)
    clients = [SyncClient(rule, PARAMS, trainer, 1, handles, 20.0) for trainer in range(3)]
    of_threads, of_servers = rounds([transport] * 3, script), rounds(clients, script)
    assert all(same(a[0], b[0]) and a[1] == b[1] for a, b in zip(of_threads, of_servers, strict=True))
    assert not same(of_servers[0][0], of_servers[-1][0])


def test_rounds_go_on_without_a_dead_trainer_and_the_end_waits_for_its_successor():
    rule = RULES["ma"]
    (handle,) = sync_servers_of(rule, 2)
    clients = [SyncClient(rule, PARAMS, i, 1, [handle], 20.0) for i in (0, 1)]
    rounds(clients, [((0, 1), False)])
    handle.call("leave", 1, 1, "killed").result(10)
    alone, last = clients[0].sync_round(0, brought(7), False)
    assert same(alone, {n: np.asarray(x, np.float32) for n, x in brought(7).items()}) and not last
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(clients[0].sync_round, 0, brought(8), True)
        with pytest.raises(TimeoutError):
            ended.result(0.5)
        successor = SyncClient(rule, PARAMS, 1, 2, [handle], 20.0)
        both, last = successor.sync_round(1, brought(9), True)
        assert last and ended.result(10)[1]
    np.testing.assert_allclose(both["c"], (brought(8)["c"] + brought(9)["c"]) / 2, rtol=1e-6)
    with pytest.raises(PeerLeft, match="has a successor"):  # a stopped process that wakes up
        clients[1].sync_round(1, brought(3), False)


@pytest.mark.parametrize("name", ["ma", "easgd", "bmuf"])
def test_a_successor_of_one_that_died_after_the_end_gets_the_parameters_of_the_others(name):
    rule = RULES[name]
    (handle,) = sync_servers_of(rule, 2)
    clients = [SyncClient(rule, PARAMS, i, 1, [handle], 20.0) for i in (0, 1)]
    *_, (_, first), (ended, last) = rounds(
        clients, [((0,), False), ((0, 1), True)] if rule.has_centre else [((0, 1), True)]
    )
    assert last and (first or rule.has_centre)
    for incarnation in (2, 3):  # the first one dies too
        successor = SyncClient(rule, PARAMS, 1, incarnation, [handle], 20.0)
        for done in (False, True):  # it trains its last batches once more
            found, last = successor.sync_round(1, brought(9), done)
            assert last and same(found, ended)
    handle.call("give_up", 1).result(10)
    with pytest.raises(ValueError, match="trainer=0 has finished"):
        handle.server.sync_round(0, 1, list(brought(1).values()), False)


@pytest.mark.parametrize("name", ["ma", "easgd"])
def test_the_end_waits_no_longer_when_a_trainer_is_given_up(name):
    (handle,) = sync_servers_of(RULES[name], 2)
    clients = [SyncClient(RULES[name], PARAMS, i, 1, [handle], 20.0) for i in (0, 1)]
    if name == "ma":
        rounds(clients, [((0, 1), False)])
    else:
        rounds(clients, [((0,), False), ((1,), False)])
    handle.call("leave", 1, 1, "killed").result(10)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(clients[0].sync_round, 0, brought(8), True)
        with pytest.raises(TimeoutError):
            ended.result(0.5)
        handle.call("give_up", 1).result(10)
        assert ended.result(10)[1]


def test_a_round_continues_at_the_successor_of_a_dead_sync_server():
    rule = RULES["easgd"]
    handles = sync_servers_of(rule, 1, 2)
    client = SyncClient(rule, PARAMS, 0, 1, handles, 20.0)
    client.sync_round(0, brought(0), False)
    handles[1].kill()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.sync_round, 0, brought(1), False)
        with pytest.raises(TimeoutError):
            waits.result(0.5)
        client.replace(1, sync_servers_of(rule, 1, 2)[1])  # starts from the initial parameters
        found, last = waits.result(20)
    assert not last
    mine = assign_leaves([24, 4, 16], rule, 2)
    for sync_server, leaves in enumerate(mine):
        for leaf in leaves:
            name = "abc"[leaf]
            assert np.array_equal(found[name][0], PARAMS[name]) == (sync_server == 1)


def test_a_trainer_that_leaves_ends_its_wait_and_a_sync_server_refuses_an_earlier_incarnation():
    rule = RULES["ma"]
    (handle,) = sync_servers_of(rule, 2)
    client = SyncClient(rule, PARAMS, 0, 2, [handle], 20.0)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.sync_round, 0, brought(0), False)
        with pytest.raises(TimeoutError):
            waits.result(0.5)
        client.leave(0)
        with pytest.raises(PeerLeft, match="trainer 0"):
            waits.result(20)
    with pytest.raises(PeerLeft, match="has a successor"):
        handle.call("join", 0, 1).result(10)


def test_heartbeats_of_a_trainer_that_has_a_successor_are_no_signs_of_life_of_the_successor():
    (handle,) = sync_servers_of(RULES["ma"], 2, timeout_s=0.3)
    handle.call("join", 0, 2).result(10)
    ended = handle.call("join", 1, 1).result(10) or handle.call("sync_round", 1, 1, list(brought(1).values()), False)
    until(lambda: handle.server.heartbeat(0, 1) or ended.done())
    np.testing.assert_array_equal(ended.result(0)[0][0], brought(1)["a"])  # the round went on without trainer 0


@pytest.mark.parametrize(
    ("rule", "sync_servers", "words"), [("ma", 2, "takes at most 1"), ("easgd", 4, "takes at most 3")]
)
def test_more_sync_servers_than_a_rule_can_have_are_refused(rule, sync_servers, words):
    with pytest.raises(ValueError, match=words):
        sync_servers_of(RULES[rule], 2, sync_servers)


@pytest.mark.parametrize("kind", [Shadow, lambda client, i: Foreground(client, i, every_steps=2)], ids=["shadow", "FR"])
@pytest.mark.parametrize("name", ["ma", "easgd"])
def test_synchronisers_at_sync_servers_end_with_equal_parameters(kind, name):
    rule = {"ma": RULES["lerp"], "easgd": RULES["easgd"]}[name]
    handles = sync_servers_of(rule, 2, 2 if rule.has_centre else 1)

    def train(i):
        params = {key: np.array(leaf) for key, leaf in PARAMS.items()}
        with kind(SyncClient(rule, PARAMS, i, 1, handles, 20.0), i) as sync:
            for _ in range(40):
                params = sync.exchange({key: leaf + np.float32(0.01 * (i + 1)) for key, leaf in params.items()})
            return sync.finish(params), sync.rounds

    with ThreadPoolExecutor(2) as pool:
        (one, made), (other, also) = pool.map(train, (0, 1))
    assert all(np.array_equal(one[key], other[key]) for key in PARAMS)
    assert kind is Shadow or (made > 0 and also > 0)  # a shadow may not have had time for a round
    assert (np.asarray(one["c"]) > 1).all()  # lerp may lose updates made during a round
