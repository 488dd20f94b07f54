"""Servers of shards apply each write once, none out of order, and no message of another incarnation."""

import os
import pickle
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
from in_process_servers import InProcess

from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, Table, adagrad
from jaxrec.embedding.servers import (
    ANY,
    OldWrite,
    OtherIncarnation,
    RowBlock,
    Sender,
    ServerGone,
    ShardServer,
    Superseded,
    deal,
)

SPEC = EmbeddingSpec({"item": Table(40, 4), "w": Table(9, 1)}, {"item": Lookup("item"), "w": Lookup("w")}, shards=4)
LAYOUT = SPEC.layout(adagrad(0.1))
ME = Sender("run", 1, 1)


def server_of(shards=(1, 3), incarnation=1, greet=True):
    server = ShardServer(SPEC, LAYOUT, shards, incarnation)
    if greet:
        server.answer("hello", ME._replace(server=incarnation), "mine")
    return server


def piece(shards, row, value=None):
    """Row number `row` of each shard of a message, all its parts filled with `value`."""
    unique = np.array([[row * 4 + shard] for shard in shards], np.int32)
    widths = {} if value is None else {part: one.width for part, one in LAYOUT["width_4"].items()}
    parts = {part: np.full((len(shards), 1, width), value, np.float32) for part, width in widths.items()}
    return {"width_4": RowBlock(unique, np.ones(len(shards), np.int32), parts)}


def value_of(server, shard, row, sender=ME):
    return server.answer("read", sender, [shard], piece([shard], row))["width_4"]["value"][0, 0, 0]


def write(server, verb, number, shards, value, row=2, sender=ME):
    return server.answer(verb, sender._replace(number=number), shards, piece(shards, row, value))


def test_a_server_holds_its_shards_as_host_tables_do_and_no_others():
    server, host = server_of(), HostTables.create(SPEC, adagrad(0.1))
    found = server.answer("run", ME, ShardServer.on_shards, lambda stack, shard, parts: parts)
    assert set(found) == {(stack, shard) for stack in SPEC.stacks for shard in (1, 3)}
    for (stack, shard), parts in found.items():
        for part, rows in host.shards[stack][shard].items():
            np.testing.assert_array_equal(parts[part], rows)
    with pytest.raises(ValueError, match=r"a message for shards \[0\], but this server has \[1, 3\]"):
        write(server, "put", 1, [0], 7.0)


@pytest.mark.parametrize("verb", ["put", "add"])
def test_a_write_that_comes_again_is_done_once(verb):
    server = server_of()
    before = value_of(server, 1, 2)
    for _ in range(3):
        assert write(server, verb, 1, [1], 7.0) is None
    assert value_of(server, 1, 2) == np.float32(7.0 if verb == "put" else before + np.float32(7.0))
    write(server, "add", 2, [1], 1.0)
    assert value_of(server, 1, 2) != np.float32(7.0 if verb == "put" else before + np.float32(7.0))


def test_what_is_tracked_is_tracked_once_and_has_its_answer_however_often_the_message_arrives():
    server, calls = server_of(), []
    count = lambda server: calls.append(server) or len(calls)
    assert [server.answer("track", ME._replace(number=number), count) for number in (1, 1, 2, 2)] == [1, 1, 2, 2]


def test_an_old_put_is_refused_for_its_shard_and_an_old_add_is_done():
    server = server_of()
    write(server, "put", 3, [1], 30.0)
    with pytest.raises(OldWrite, match=r"put number 2 came after newer writes, .shard: number. .1: 3."):
        write(server, "put", 2, [1, 3], 20.0)
    assert value_of(server, 1, 2) == 30 and value_of(server, 3, 2) != 20
    write(server, "put", 2, [3], 20.0)  # no write there yet
    write(server, "add", 1, [1], 1.0)
    assert value_of(server, 1, 2) == 31 and value_of(server, 3, 2) == 20
    write(server, "put", 5, [1, 3], 50.0)
    for shard in (1, 3):
        with pytest.raises(OldWrite):
            write(server, "put", 4, [shard], 40.0)


def test_whole_shards_that_come_back_are_writes_in_order_too():
    server = server_of()
    rows = {part: np.full((10, one.width), 5, np.float32) for part, one in LAYOUT["width_4"].items()}
    server.answer("with_shard", ME._replace(number=1), "width_4", 3, rows)
    write(server, "put", 2, [3], 6.0)
    server.answer("with_shard", ME._replace(number=1), "width_4", 3, rows)  # a late repeat
    assert value_of(server, 3, 2) == 6 and value_of(server, 3, 1) == 5
    first = value_of(server_of(), 3, 2)
    server.answer("change", ME._replace(number=4), lambda server, shards: server.reset_shard("width_4", *shards), [3])
    assert value_of(server, 3, 2) == first
    with pytest.raises(OldWrite):
        server.answer("with_shard", ME._replace(number=3), "width_4", 3, rows)
    assert value_of(server, 3, 2) not in (5, 6)


def test_messages_to_and_from_other_incarnations_change_nothing():
    server = server_of(incarnation=2)
    right = ME._replace(server=2)
    with pytest.raises(OtherIncarnation, match=r"sent to incarnation 1 of the server of shards \[1, 3\], .* 2"):
        write(server, "put", 1, [1], 7.0)
    write(server, "put", 1, [1], 7.0, sender=right)
    late, successor = right, right._replace(incarnation=2)
    with pytest.raises(ValueError, match="has not said hello"):
        write(server, "put", 1, [1], 8.0, sender=successor)
    server.answer("hello", successor._replace(server=ANY), "other")
    for verb in ("put", "add"):
        with pytest.raises(Superseded, match="incarnation 1 of client 'run', whose incarnation 2 has taken its place"):
            write(server, verb, 2, [1], 9.0, sender=late)
    assert value_of(server, 1, 2, successor) == 7
    write(server, "put", 1, [1], 8.0, sender=successor)  # its write numbers restart
    assert value_of(server, 1, 2, successor) == 8


def test_a_write_that_waits_for_its_turn_while_a_successor_says_hello_changes_nothing(monkeypatch):
    class Contended:
        """A lock before which others come first."""

        def __init__(self):
            self.lock, self.first = threading.Lock(), []
            locks.append(self)

        def __enter__(self):
            while self.first:
                self.first.pop()()
            self.lock.acquire()

        def __exit__(self, *error):
            self.lock.release()

    locks, successor = [], ME._replace(incarnation=2)
    monkeypatch.setattr("jaxrec.embedding.servers.threading", types.SimpleNamespace(Lock=Contended))
    server = server_of()
    before = value_of(server, 1, 2)
    for lock in locks:
        lock.first.append(lambda: server.answer("hello", successor._replace(server=ANY), "other"))
    with pytest.raises(Superseded):
        write(server, "put", 1, [1], 9.0)
    assert value_of(server, 1, 2, successor) == before


def test_a_second_client_of_one_name_and_incarnation_is_refused_and_the_first_may_repeat_itself():
    server = server_of()
    assert server.answer("hello", ME, "mine").incarnation == 1
    with pytest.raises(ValueError, match="uses this server already: give a higher incarnation"):
        server.answer("hello", ME, "another object")
    server.answer("hello", Sender("trainer 2", 1, ANY), "another object")


def test_a_write_that_does_not_fit_changes_nothing_and_may_come_again_as_it_should():
    server = server_of()
    good = piece([1], 2, 7.0)["width_4"]
    before = value_of(server, 1, 2)
    for wrong in (
        good._replace(unique=np.array([[99999]], np.int32)),
        good._replace(unique=np.array([[-4]], np.int32)),
        good._replace(count=np.array([5], np.int32)),
        good._replace(parts={"value": good.parts["value"]}),
        good._replace(unique=np.zeros((2, 1), np.int32)),
    ):
        with pytest.raises(ValueError, match="a message|row numbers out of range"):
            server.answer("put", ME._replace(number=1), [1], {"width_4": wrong})
    with pytest.raises(ValueError, match="lie outside"):
        server.answer("take", ME, {("width_4", 1): np.array([401], np.int32)})
    with pytest.raises(ValueError, match="each of them at most once"):
        write(server, "add", 1, [1, 1], 7.0)
    assert value_of(server, 1, 2) == before
    write(server, "put", 1, [1], 7.0)
    assert value_of(server, 1, 2) == 7


def test_every_fate_of_a_message_is_what_it_says():
    fates = iter(["twice", "late", "", "drop", "twice, once late", "", "answer and die"])
    with InProcess(server_of(), lambda verb, number: next(fates) if verb == "add" else "") as server:

        def add(number):
            return server.call("add", ME._replace(number=number), [1], piece([1], 2, 1.0))

        def value():
            rows = server.call("read", ME, [1], piece([1], 2)).result(60)
            return rows["width_4"]["value"][0, 0, 0]

        first = value()
        add(1).result(60)
        assert value() == first + 1
        late = add(2)
        with pytest.raises(TimeoutError):
            late.result(0)
        add(3).result(60)
        assert late.result(60) is None and value() == first + 3
        with pytest.raises(TimeoutError):
            add(4).result(0.01)
        add(5).result(60)
        add(6).result(60)
        assert value() == first + 5
        with pytest.raises(ServerGone):
            add(7).result(60)
        with pytest.raises(ServerGone):
            server.call("read", ME, [1], piece([1], 2)).result(0)


@pytest.mark.process
def test_a_layout_from_another_process_is_equal_and_hashes_as_one_made_here():
    """Hashes of strings differ between processes, so a cached hash would make a pickled layout miss in dicts."""
    code = "import pickle, sys, test_servers as t; sys.stdout.buffer.write(pickle.dumps((t.SPEC, t.LAYOUT)))"
    env = dict(os.environ, PYTHONHASHSEED="1", PYTHONPATH=os.pathsep.join(sys.path))
    there = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True, timeout=100)
    spec, layout = pickle.loads(there.stdout)
    assert layout == LAYOUT and hash(layout) == hash(LAYOUT) and spec == SPEC and hash(spec) == hash(SPEC)


def test_shards_are_dealt_in_turn():
    assert deal(4, 1) == [[0, 1, 2, 3]] and deal(4, 4) == [[0], [1], [2], [3]]
    assert sorted(shard for mine in deal(7, 3) for shard in mine) == list(range(7))


def test_a_shard_that_is_named_twice_is_refused():
    with pytest.raises(ValueError, match="names one twice"):
        ShardServer(SPEC, LAYOUT, shards=[1, 1])
