"""Remote tables: mismatched servers, servers that do not answer, clients that come late."""

import pickle

import jax
import numpy as np
import pytest
from click_model import ROWS, SPEC, TASK, plan_of
from in_process_servers import Fleet, InProcess, remote

import jaxrec
from abuse import refused, situation
from jaxrec.cpr import Recovery
from jaxrec.embedding import EmbeddingSpec, HostTables, Lookup, RemoteTables, Table, plan, sgd
from jaxrec.embedding.servers import Sender, ServerGone, ShardServer, Superseded, deal
from jaxrec.types import ShardsLost

OTHER = EmbeddingSpec({"item": Table(41, 4)}, {"item": Lookup("item")}, shards=4)
PLANS = plan_of(range(40))


def server(shards, spec=SPEC, rows=ROWS, incarnation=1):
    return InProcess(ShardServer(spec, spec.layout(rows), shards, incarnation))


def over(*servers, **options):
    return RemoteTables(SPEC, ROWS, servers, **({"timeout_s": 60} | options))


def rows_of(tables):
    return jax.tree.map(np.array, tables.read(PLANS))


SERVERS = {
    "servers=5 must be a whole number from 1 to 4: each of them needs": lambda _: deal(4, 5),
    "shard=4 must be a whole number from 0 to 3": lambda _: server([3, 4]),
    r"server 1 \(incarnation 1\) was made for another spec": lambda _: over(server([0, 2]), server([1, 3], OTHER)),
    "server 0 .* made for another row optimizer": lambda _: over(server(range(4), rows=sgd(0.1))),
    r"none holds \[\], and several hold .* \{2: \[0, 1\]\}": lambda _: over(server([0, 2]), server([1, 2, 3])),
    r"the 2 servers must hold each .* none holds \[3\]": lambda _: over(server([0, 2]), server([1])),
    "tries=0 must be a whole number from 1": lambda _: over(server(range(4)), tries=0),
    "verb='_write' must be one of": lambda _: ShardServer(SPEC, SPEC.layout(ROWS), range(4)).answer(
        "_write", Sender("run", 1, 1)
    ),
    r"the successor has the shards \[0\], but the servers have": lambda _: lost_one().tables.replace(
        server([0], incarnation=2)
    ),
    "the successor was made for another spec": lambda _: lost_one().tables.replace(
        server([0, 2], OTHER, incarnation=2)
    ),
}
refused(SERVERS)


for seconds in (0, float("inf"), None):

    @situation(f"timeout_s={seconds!r}", ValueError, "timeout_s=.* must be a number of seconds above 0 and finite")
    def _(directory, seconds=seconds):
        over(server(range(4)), timeout_s=seconds)


@situation("a server that is dead from the beginning", ServerGone, "server 1.* is gone")
def _(directory):
    dead = server([1, 3])
    dead.kill()
    over(server([0, 2]), dead)


@situation("a server that does not say hello in time", TimeoutError, "server 0.* has not answered hello within 0.1 s")
def _(directory):
    silent = InProcess(ShardServer(SPEC, SPEC.layout(ROWS), range(4)), lambda verb, number: "drop")
    over(silent, timeout_s=0.1)


@situation("two objects that say to be one client", ValueError, "client 'run' uses this server already: give a higher")
def _(directory):
    way = server(range(4))
    first = over(way, client="run")
    try:
        over(way, client="run")
    finally:
        first.probe(1)  # the first client still works


@situation("a client that comes back with an incarnation of before", Superseded, "incarnation 2 has taken its place")
def _(directory):
    way = server(range(4))
    newer = over(way, client="run", incarnation=2)
    try:
        over(way, client="run", incarnation=1)
    finally:
        newer.probe(1)


@situation("a write without a number", ValueError, "number=0 must be a whole number from 1: each write has one")
def _(directory):
    alone = ShardServer(SPEC, SPEC.layout(ROWS), range(4))
    alone.answer("hello", Sender("run", 1, 1), "mine")
    alone.answer("put", Sender("run", 1, 1), [1], {})


@situation("use after close", ValueError, "these tables are closed: make others over the servers")
def _(directory):
    tables = remote(SPEC, ROWS)
    tables.close()
    tables.read(PLANS)


@situation("a plan of another spec", ValueError, "its row numbers are out of range. Plan with their own spec")
def _(directory):
    tables = remote(SPEC, ROWS)
    wide = EmbeddingSpec({"item": Table(400, 4)}, {"item": Lookup("item")}, shards=4)
    before = rows_of(tables)
    plans = plan(wide, {"item": np.array([399], np.int32)})
    try:
        tables.put(plans, HostTables.create(wide, ROWS).read(plans))
    finally:
        jax.tree.map(np.testing.assert_array_equal, before, rows_of(tables))
        assert tables.step == 0


@situation("a successor while the server lives", ValueError, r"server 0 \(incarnation 1\) is not lost: .* in silence")
def _(directory):
    with Fleet(SPEC, ROWS, 2) as fleet:
        before = rows_of(fleet.tables)
        try:
            fleet.tables.replace(fleet.start(0, 2))
        finally:
            jax.tree.map(np.testing.assert_array_equal, before, rows_of(fleet.tables))


@situation("a successor before anybody was told of the loss", ValueError, "is lost, but no call has raised ShardsLost")
def _(directory):
    with Fleet(SPEC, ROWS, 2) as fleet:
        fleet.tables.mark_lost([2], "the supervisor saw it die")
        try:
            fleet.tables.replace(fleet.start(0, 2))
        finally:
            with pytest.raises(ShardsLost, match=r"shards \[0, 2\] are lost: .* is gone: the supervisor saw it die"):
                fleet.tables.read(PLANS)
            fleet.recover([0, 2])
            rows_of(fleet.tables)


def lost_one():
    fleet = Fleet(SPEC, ROWS, 2)
    fleet.ways[0].kill()
    with pytest.raises(ShardsLost):
        fleet.tables.read(PLANS)
    return fleet


@situation(
    "a successor of the same incarnation", ValueError, "the successor of server 0 .* has incarnation 1: start it"
)
def _(directory):
    fleet = lost_one()
    fleet.tables.replace(fleet.start(0, 1))


@situation("a successor that is dead, too", ServerGone, "the successor is gone")
def _(directory):
    dead = server([0, 2], incarnation=2)
    dead.kill()
    lost_one().tables.replace(dead)


@situation("pickling tables whose rows live elsewhere", TypeError, "cannot be pickled, their rows live elsewhere")
def _(directory):
    pickle.dumps(remote(SPEC, ROWS))


@situation("a function for the shards that raises", ZeroDivisionError, "division")
def _(directory):
    remote(SPEC, ROWS).on_shards(lambda *given: 1 / 0)


@situation("entering a recovery while a server is lost", ShardsLost, r"shards \[0, 2\] are lost: server 0")
def _(directory):
    state = TASK.init({"w": np.ones(4, np.float32)}, lost_one().tables)
    with jaxrec.Serial(TASK, state, [Recovery(directory, 2, 4)]):
        pass
