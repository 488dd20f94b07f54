"""Remote tables: the bits of host tables under any message faults, and lost shards reported by number."""

import contextlib
import functools
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from click_model import ROWS, SPEC, TASK, batch_at, bits, fresh, plain, plan_of
from deaths import Log, NotingPipeline
from equality import same
from homes import every_row
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process_servers import Fleet, InProcess, Supervised, remote
from oac_task import SPEC as OAC_SPEC
from oac_task import make_batches, make_state, plain_loop, train
from runs_with_losses import ENGINES, EVERY, LENGTH, SCHEMES, run, serially
from strategies import chosen, draw_ids, examples, random_like, specs
from threads import until

from jaxrec import Serial
from jaxrec.checkpoint import (
    Checkpointer,
    deltas,
    images,
    is_intact,
    restore,
    restore_shards,
    snapshot_rows,
    write_image,
)
from jaxrec.cluster.pool import ServedTables
from jaxrec.cpr import Recovery, mfu, random_rows, round_robin, scar, ssu, tracking
from jaxrec.cpr.tracking import RowTracker
from jaxrec.embedding import HostTables, RemoteTables, adagrad, embedding_matrix, plan
from jaxrec.embedding.servers import ShardServer, Superseded, deal
from jaxrec.shadowsync import train_freely
from jaxrec.types import Rows, ShardsLost, TrainState

# Servers write row deltas while training goes on: whether a death voids one depends on the timing.
pytestmark = pytest.mark.filterwarnings("ignore:a save failed")

# ---- the bits of host tables


def changed(rows, seed):
    return {
        n: Rows(random_like(r.value, seed), {s: random_like(a, seed + 1) for s, a in r.slots.items()})
        for n, r in rows.items()
    }


@given(specs(), st.data())
@settings(max_examples=examples(15, 25))
def test_random_calls_leave_the_bits_of_host_tables(spec, data):
    servers = data.draw(st.integers(1, spec.shards), label="servers")
    homes = HostTables.create(spec, adagrad(0.1)), remote(spec, adagrad(0.1), servers)
    for seed in range(data.draw(st.integers(1, 5), label="calls")):
        verb = data.draw(st.sampled_from(["put", "add", "with_shard"]), label="verb")
        shards = data.draw(st.none() | st.lists(st.integers(0, spec.shards - 1), min_size=1, unique=True))
        plans = plan(spec, draw_ids(spec, 5, seed))
        found = [tables.read(plans) for tables in homes]
        jax.tree.map(np.testing.assert_array_equal, *found)
        for tables, rows in zip(homes, found, strict=True):
            stack, shard = next(iter(spec.stacks)), seed % spec.shards
            if verb == "put":
                tables.put(plans, changed(rows, seed), shards)
            elif verb == "add":
                tables.add(plans, changed(rows, seed), rows, shards)
            else:
                parts = {p: np.full((1, one.width), seed, np.float32) for p, one in tables.layout[stack].items()}
                tables.with_shard(stack, shard, parts)
        jax.tree.map(np.testing.assert_array_equal, *map(every_row, homes))
        np.testing.assert_array_equal(homes[0].puts, homes[1].puts)
    assert homes[0].step == homes[1].step


def test_what_was_read_is_not_changed_by_what_is_read_next():
    tables = remote(SPEC, ROWS)
    plans = plan_of(range(8))
    first = tables.read(plans)
    before = jax.tree.map(np.array, first)
    tables.put(plans, changed(first, 3))
    assert not same(before, tables.read(plans)) and same(before, first)
    assert all(array.flags.owndata and array.flags.writeable for array in jax.tree.leaves(first))


def test_one_message_goes_to_each_server_that_has_rows_of_it():
    calls = []
    tables = remote(OAC_SPEC, ROWS, servers=2, fate=lambda server, _, verb, n: calls.append((verb, server)) or "")
    plans = plan(OAC_SPEC, draw_ids(OAC_SPEC, 20, 0))
    calls.clear()
    tables.put(plans, tables.read(plans))
    assert sorted(calls) == [("put", 0), ("put", 1), ("read", 0), ("read", 1)]
    calls.clear()
    even = {**draw_ids(OAC_SPEC, 4, 0, missing=1), "bag": np.full((4, 3), 2, np.int32)}
    tables.read(plan(OAC_SPEC, even))
    assert calls == [("read", 0)]  # row 2 of the stack is in shard 2


def test_rows_travel_when_they_are_looked_at_and_only_those():
    asked = []
    tables = remote(SPEC, ROWS, fate=lambda server, _, verb, n: asked.append(verb) or "")
    asked.clear()
    rows = tables.parts("width_4")["value"][1]
    assert (len(rows), rows.shape, rows.dtype, asked) == (10, (10, 4), np.float32, [])
    host = HostTables.create(SPEC, ROWS)
    np.testing.assert_array_equal(rows[3:5], host.shards["width_4"][1]["value"][3:5])
    np.testing.assert_array_equal(embedding_matrix(tables, "item", [7, 2]), embedding_matrix(host, "item", [7, 2]))
    np.testing.assert_array_equal(embedding_matrix(tables, "item"), embedding_matrix(host, "item"))


# ---- OAC


@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("options", [{"mode": "sync"}, {"window": 3}], ids=str)
def test_the_pipeline_over_servers_is_a_plain_loop_bit_for_bit(servers, options):
    batches = make_batches(14)
    state = make_state()._replace(tables=remote(OAC_SPEC, ROWS, servers))
    pipeline, (found, losses) = train(batches, state=state, **options)
    wanted, wanted_losses = plain_loop(batches)
    assert same(losses, wanted_losses) and same(jax.tree.map(np.array, found.dense), wanted.dense)
    jax.tree.map(np.testing.assert_array_equal, every_row(found.tables), every_row(wanted.tables))
    assert pipeline.tables.step == 14


def test_async_and_semisync_run_over_servers_too():
    batches = make_batches(14)
    for mode in ("async", "semisync"):
        state = make_state()._replace(tables=remote(OAC_SPEC, ROWS, 2))
        _, (found, losses) = train(batches, state=state, mode=mode, late=mode == "semisync")
        assert np.isfinite(losses).all()
    wanted, _ = plain_loop(batches, delay=1)
    jax.tree.map(np.testing.assert_array_equal, every_row(found.tables), every_row(wanted.tables))


def test_a_free_trainer_over_servers_ends_with_the_bits_of_one_over_host_tables():
    found = []
    for tables in (HostTables.create(SPEC, ROWS), remote(SPEC, ROWS, 2)):
        streams, params = [[batch_at(index) for index in range(8)]], {"w": np.ones(4, np.float32)}
        (state,), figures = train_freely(TASK, params, tables, streams, None)
        assert figures.steps == [8]
        found.append((jax.tree.map(np.array, state), every_row(tables)))
    jax.tree.map(np.testing.assert_array_equal, *found)


# ---- numbering


def add_ones(tables, rows, times):
    plans = plan_of(range(rows))
    zeros = jax.tree.map(np.zeros_like, HostTables.create(SPEC, ROWS).read(plans))
    for _ in range(times):
        tables.add(plans, jax.tree.map(np.ones_like, zeros), zeros)


def put_numbers(tables, times):
    plans = plan_of(range(32, 40))
    rows = tables.read(plans)
    for number in range(times):
        tables.put(plans, jax.tree.map(functools.partial(np.full_like, fill_value=number), rows))
        for array in jax.tree.leaves(tables.read(plans)):
            assert (array[:, :2] == number).all()  # two rows of each shard; none is rolled back


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.more) for seed in (2, 3))])
def test_a_thousand_faults_of_messages_apply_each_write_once_and_in_order(seed):
    """More than 250 messages are lost, doubled or late: adds from three threads, puts from a fourth."""
    rng, faults, lock = np.random.default_rng(seed), [], threading.Lock()

    def fate(server, incarnation, verb, number):
        with lock:
            drawn = str(rng.choice(["", "twice", "twice, once late", "late", "drop"]))
            faults.extend([drawn] if drawn else [])
            return drawn

    with Fleet(SPEC, ROWS, 2, fate, tries=3000) as fleet:
        tables = fleet.tables
        for shard in range(SPEC.shards):
            widths = {part: one.width for part, one in tables.layout["width_4"].items()}
            tables.with_shard("width_4", shard, {part: np.zeros((10, width)) for part, width in widths.items()})
        add = functools.partial(add_ones, tables, times=30)
        put = functools.partial(put_numbers, tables, times=30)
        with ThreadPoolExecutor() as pool:
            tuple(pool.map(lambda job: job(), [lambda: add(8), lambda: add(8), lambda: add(16), put]))
        found = embedding_matrix(tables, "item")
    assert len(faults) > 250
    assert (found[:8] == 90).all() and (found[8:16] == 30).all() and not found[16:32].any() and (found[32:] == 29).all()


# ---- losses


def test_a_death_is_told_with_all_shards_of_the_server_when_the_others_are_done():
    fleet = Fleet(SPEC, ROWS, 2, lambda server, _, verb, n: "die" if (server, verb) == (0, "put") else "")
    plans = plan_of(range(40))
    with fleet:
        tables = fleet.tables
        rows = jax.tree.map(lambda a: np.full_like(a, 7), tables.read(plans))
        with pytest.raises(ShardsLost, match=r"shards \[0, 2\] are lost: server 0 \(incarnation 1\) is gone") as raised:
            tables.put(plans, rows)
        assert raised.value.shards == tables.lost == (0, 2) and tables.step is None
        assert (np.asarray(tables.parts("width_4")["value"][3]) == 7).all()
        for call in (
            lambda: tables.read(plans),
            lambda: tables.add(plans, rows, rows, [2]),
            lambda: tables.on_shards(lambda *given: 0),
            lambda: tables.take({("width_4", 0): np.array([4])}),
            lambda: np.asarray(tables.parts("width_4")["value"][0]),
            lambda: restore_shards(None, tables, [2]),
        ):
            with pytest.raises(ShardsLost, match=r"shards \[0, 2\] are lost"):
                call()
        tables.add(plans, rows, rows, [1, 3])
        fleet.recover([0, 2])
        assert tables.lost == ()
        restore_shards(None, tables, [0, 2])
        assert tables.step == 1
        np.testing.assert_array_equal(
            np.asarray(tables.parts("width_4")["value"][2]), HostTables.create(SPEC, ROWS).shards["width_4"][2]["value"]
        )


def test_a_silence_is_a_death_that_names_server_verb_and_seconds():
    fleet = Fleet(
        SPEC, ROWS, 4, lambda server, _, verb, n: "drop" if (server, verb) == (2, "read") else "", timeout_s=2
    )
    plans = plan_of(range(40))
    with (
        fleet,
        pytest.raises(ShardsLost, match=r"\[2\] .*: server 2 \(incarnation 1\) has not answered read within 2 s"),
    ):
        fleet.tables.read(plans)


def test_an_answer_to_a_message_that_was_sent_before_is_one():
    """The answer to the first attempt is late, and all repeated messages are lost."""
    fate = lambda server, incarnation, verb, n: "" if verb == "hello" else "drop" if n else "late"
    with Fleet(SPEC, ROWS, 1, fate, tries=1000) as fleet:
        assert len(fleet.tables.read(plan_of(range(8)))["width_4"].value) == 4


def test_a_server_in_the_place_of_another_is_not_written_to():
    """A restarted server has the same name: messages for its predecessor must not reach it."""

    class Renamed:
        def __init__(self, way):
            self.way = way

        def call(self, *message):
            return self.way.call(*message)

    layout = SPEC.layout(ROWS)
    start = lambda incarnation: InProcess(ShardServer(SPEC, layout, range(4), incarnation))
    name = Renamed(start(1))
    tables = RemoteTables(SPEC, ROWS, [name], timeout_s=60)
    name.way = start(2)
    with pytest.raises(ShardsLost, match="sent to incarnation 1 .* and this is incarnation 2"):
        restore_shards(None, tables, [0])
    with pytest.raises(ValueError, match="has incarnation 1: start it with a higher one"):
        tables.replace(start(1))
    tables.replace(name)
    restore_shards(None, tables, [0])


def test_late_writers_of_a_process_that_was_replaced_change_nothing_and_end():
    layout, plans = SPEC.layout(ROWS), plan_of(range(40))
    servers = [InProcess(ShardServer(SPEC, layout, shards)) for shards in deal(4, 2)]
    late = RemoteTables(SPEC, ROWS, servers, client="run")
    rows = jax.tree.map(lambda a: np.full_like(a, 7), late.read(plans))
    successor = RemoteTables(SPEC, ROWS, servers, client="run", incarnation=2)
    before = every_row(successor)
    for call in (lambda: late.put(plans, rows), lambda: late.add(plans, rows, rows), lambda: late.read(plans)):
        with pytest.raises(Superseded, match="this one must end"):
            call()
    jax.tree.map(np.testing.assert_array_equal, before, every_row(successor))
    successor.put(plans, rows)
    assert successor.step == 1 and not late.lost


# ---- CPR

INSTANTS = ["read", "put", "put that was done", "save", "restore", "track"]
DEATHS = [(death, scheme, engine) for death in INSTANTS for scheme in SCHEMES for engine in ENGINES]
DEATHS = [case for case in DEATHS if case[:2] != ("track", "vanilla")]
IN_THE_GATE = [("save", "vanilla", "pipeline"), ("put", "mfu", "serial")]


@pytest.mark.parametrize(
    ("death", "scheme", "engine"),
    chosen(DEATHS, lambda *case: case[1:] == ("mfu", "pipeline") or case in IN_THE_GATE),
)
def test_a_death_at_any_instant_ends_as_serial_that_loses_the_same_shards_at_that_step(death, scheme, engine, tmp_path):
    verb, number, how = {
        "read": ("read", 10, "die"),
        "put": ("put", 9, "die"),
        "put that was done": ("put", 9, "answer and die"),
        # With a scheme, the first message of this verb looks whether rows are initial, and the others write deltas.
        "save": ("shard", 2, "die") if scheme == "vanilla" else ("run", 3, "answer and die"),
        "restore": ("change", 0, "die"),
        "track": ("track", 5, "die"),
    }[death]
    dead = threading.Event()

    def fate(server, incarnation, called, message):
        first = (called, message, server, incarnation) == (verb, number, 1, 1 if death != "restore" else 2)
        if first or (death == "restore" and (called, message, server, incarnation) == ("put", 9, 1, 1)):
            dead.set()
            return how
        return ""

    # The death is noticed before the next batch is read, so that the step of the loss is known.
    saved = EVERY if scheme == "vanilla" else 3 * EVERY // 2
    gate = lambda index: index == saved and death == "save" and until(dead.is_set)
    with Fleet(SPEC, ROWS, 2, fate) as fleet:
        over_servers = ENGINES[engine](fresh("host")._replace(tables=fleet.tables))
        found, log, recovery = run(over_servers, tmp_path / "found", scheme, fleet, gate)
        assert fleet.died == [1] * (2 if death == "restore" else 1)
    assert [shards for shards, _ in log.losses.values()] == [(1, 3)] and recovery.failed == 2
    assert bool(log.voided) >= (death == "save" and scheme != "vanilla")
    assert same(found, serially(tmp_path / "wanted", scheme, log))
    assert not same(found, serially(tmp_path / "control", scheme))


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=10)
def test_random_deaths_end_as_serial_that_loses_the_same_shards_at_those_steps(data):
    verbs = st.sampled_from(["read", "put", "take", "shard", "run", "change", "track"])
    death = st.tuples(st.integers(0, 1), st.integers(1, 2), verbs, st.integers(0, 20))
    deaths = data.draw(st.dictionaries(death, st.sampled_from(["die", "answer and die"]), min_size=1, max_size=4))
    scheme = data.draw(st.sampled_from(list(SCHEMES)), label="scheme")
    options = {"window": data.draw(st.integers(1, 5), label="window")}
    values = data.draw(st.sampled_from([1, 1 << 22]), label="values of a message")  # one batch, or all of them
    armed = []  # from the first batch on: no recovery has begun before

    def fate(*message):
        return deaths.get(message, "") if armed else ""

    with (
        tempfile.TemporaryDirectory() as directory, Fleet(SPEC, ROWS, 2, fate) as fleet,
        mock.patch.object(tracking, "VALUES_PER_MESSAGE", values),
    ):  # fmt: skip
        engine = NotingPipeline(TASK, fresh("host")._replace(tables=fleet.tables), **options)
        found, log, recovery = run(engine, Path(directory, "found"), scheme, fleet, armed.append)
        assert bool(fleet.died) == bool(recovery.failed) and engine.step == LENGTH
        assert log.more or same(found, serially(Path(directory, "wanted"), scheme, log))


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_all_that_is_lost_comes_back_once_more_when_a_server_dies_meanwhile(make, tmp_path):
    """Both servers die, and so does the successor of the second while the shards are being restored."""
    deaths = {(0, 1, "put", 9), (1, 1, "put", 9), (1, 2, "change", 0)}
    with Fleet(SPEC, ROWS, 2, lambda *message: "die" if message in deaths else "") as fleet:
        engine = make(fresh("host")._replace(tables=fleet.tables))
        found, log, recovery = run(engine, tmp_path / "found", "mfu", fleet)
        assert sorted(fleet.died) == [0, 1, 1]
    assert same(found, serially(tmp_path / "wanted", "mfu", log)) and recovery.failed == 4


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_a_death_that_a_supervisor_tells_of_is_one_that_a_call_has_met(make, tmp_path):
    with Fleet(SPEC, ROWS, 2) as fleet:
        gate = lambda index: fleet.tables.mark_lost([1], "the supervisor saw it") if index == 10 else None
        engine = make(fresh("host")._replace(tables=fleet.tables))
        found, log, recovery = run(engine, tmp_path / "found", "mfu", fleet, gate)
        assert fleet.died == [1] and recovery.failed == 2
    assert same(found, serially(tmp_path / "wanted", "mfu", log))


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize(
    "at", [10, EVERY, LENGTH, None], ids=["a step", "the step of a snapshot", "the last step", "after the run"]
)
def test_a_look_at_the_rows_that_meets_a_death_comes_again_when_they_are_back(make, at, tmp_path):
    """`exclusive`, as used by an evaluation, is repeated after recovery, and then sees the rows that `Serial` has."""
    seen = {}

    def look(engine, step):
        def rows(tables):
            if step == at and not fleet.died:
                fleet.ways[1].kill()
            seen.setdefault(engine, []).append(bits(TrainState(None, tables)))
            return tables

        if step in (at, None):
            engine.exclusive(rows)

    with Fleet(SPEC, ROWS, 2) as fleet:
        engine = make(fresh("host")._replace(tables=fleet.tables))
        found, log, recovery = run(engine, tmp_path / "found", "mfu", fleet, look=look)
        assert fleet.died == [1] and recovery.failed == 2
    assert [*log.losses] == [at or LENGTH]
    assert same(found, serially(tmp_path / "wanted", "mfu", log))
    assert len(seen[engine]) == 1 + (at is not None) and same(seen[engine][-1][1], found[1])


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_a_cut_holds_what_callbacks_have_made_after_one_of_its_step_has_met_a_death(make, tmp_path):
    saved, made = [], []

    def dies(info):
        if info.step == 5:
            fleet.ways[1].kill()
            engine.exclusive(lambda tables: every_row(tables) and tables)

    def doubles(info):
        if info.step == 5:
            dense = info.state.dense
            made.append(jax.tree.map(lambda leaf: 2 * leaf, dense.params))
            return info.state._replace(dense=dense._replace(params=made[0]))

    recovery = Recovery(tmp_path, EVERY, LENGTH, copy="shards")
    with Fleet(SPEC, ROWS, 2) as fleet:
        state = fresh("host")._replace(tables=fleet.tables)
        with make(state, [fleet, recovery, dies, doubles]) as engine:
            engine.snapshot_at(5, lambda state: saved.append(jax.device_get(state.dense.params)))
            for _ in engine.run(map(batch_at, range(8))):
                made[:] = jax.device_get(made)
            assert fleet.died == [1] and recovery.failed == 2
    jax.tree.map(np.testing.assert_array_equal, saved, made)


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_a_death_in_the_last_save_is_survived(make, tmp_path):
    kill = lambda engine, step: fleet.ways[1].kill() if step is None else None
    with Fleet(SPEC, ROWS, 2) as fleet:
        engine = make(fresh("host")._replace(tables=fleet.tables))
        found, log, recovery = run(engine, tmp_path / "found", "mfu", fleet, look=kill)
        assert fleet.died == [1] and recovery.failed == 2
    assert same(found, serially(tmp_path / "wanted", "mfu", log))
    image = restore(tmp_path / "found", fresh("host"))[0]
    assert same(bits(image), found)


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_a_look_that_meets_a_death_that_nobody_recovers_says_so(make):
    with Fleet(SPEC, ROWS, 2) as fleet, make(fresh("host")._replace(tables=fleet.tables)) as engine:
        fleet.ways[1].kill()
        with pytest.raises(ShardsLost):
            engine.exclusive(lambda tables: every_row(tables) and tables)


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("verb", ["read", "put"])
def test_full_recovery_over_servers_ends_as_a_run_without_failures(make, verb, tmp_path):
    fate = lambda server, incarnation, called, n: "die" if (server, incarnation, called, n) == (0, 1, verb, 15) else ""
    with Fleet(SPEC, ROWS, 2, fate) as fleet, make(fresh("host")._replace(tables=fleet.tables)) as engine:
        engine.enter(fleet)
        recovery = engine.enter(Recovery(tmp_path, EVERY, LENGTH, mode="full"))
        engine.train(lambda step: map(batch_at, range(step, LENGTH)))
        assert fleet.died == [0] and recovery.failed == 2 and recovery.lost_steps > 0
        assert same(bits(engine.state), plain(LENGTH)[0])


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("also", [(0, 2), (1, 1)], ids=["its successor", "another server"])
def test_full_recovery_survives_a_death_while_all_rows_go_back(make, also, tmp_path):
    """The second death falls within the restore, when no run is active that could report it."""
    deaths = {(0, 1, "put", 15), (*also, "change", 0)}
    with (
        Fleet(SPEC, ROWS, 2, lambda *message: "die" if message in deaths else "") as fleet,
        make(fresh("host")._replace(tables=fleet.tables)) as engine,
    ):
        engine.enter(fleet)
        recovery = engine.enter(Recovery(tmp_path, EVERY, LENGTH, mode="full", copy="shards"))
        engine.train(lambda step: map(batch_at, range(step, LENGTH)))
        assert fleet.died == [0, also[0]] and recovery.failed == 4
        assert same(bits(engine.state), plain(LENGTH)[0])


def test_a_death_within_a_rollback_that_nobody_replaces_ends_by_name(tmp_path):
    deaths = {(0, 1, "put", 15), (0, 2, "change", 0)}
    fate = lambda *message: "die" if message in deaths else ""
    with Fleet(SPEC, ROWS, 2, fate) as fleet, Serial(TASK, fresh("host")._replace(tables=fleet.tables)) as engine:
        recovery = engine.enter(Recovery(tmp_path, EVERY, LENGTH, mode="full", save_at_end=False))
        engine.enter(fleet)  # after the recovery: too late
        with pytest.raises(ShardsLost, match="while all were restored: list what replaces them before the recovery"):
            engine.train(lambda step: map(batch_at, range(step, LENGTH)))
        assert recovery.failed == 0


def test_the_save_at_the_end_of_a_block_says_that_it_met_lost_shards(tmp_path):
    with Fleet(SPEC, ROWS, 2) as fleet, pytest.raises(ShardsLost, match="server 1 .* is gone"):
        with Serial(TASK, fresh("host")._replace(tables=fleet.tables), [Recovery(tmp_path, EVERY, LENGTH)]) as engine:
            engine.train(map(batch_at, range(3)))
            fleet.ways[1].kill()
    assert not images(tmp_path)


def test_a_recovery_whose_servers_nobody_replaces_ends_the_run_by_name(tmp_path):
    fate = lambda server, incarnation, called, n: "die" if (server, called, n) == (0, "put", 5) else ""
    with Fleet(SPEC, ROWS, 2, fate) as fleet, Serial(TASK, fresh("host")._replace(tables=fleet.tables)) as engine:
        recovery = engine.enter(Recovery(tmp_path, EVERY, LENGTH))
        with pytest.raises(ShardsLost, match="again, after 8 recoveries at step 6") as raised:
            engine.train(map(batch_at, range(LENGTH)))
        assert "server 0 (incarnation 1) is gone" in str(raised.value.__context__)
        engine.enter(fleet)
        fleet.recover([0, 2])
        recovery.recover([0, 2])
        assert fleet.tables.lost == () and fleet.tables.step == engine.step == 6


# ---- trackers on servers

TRACKED = {
    "mfu": mfu(),
    "ssu": ssu(2),
    "scar": scar(),
    "robin": round_robin(),
    "random": random_rows(3),
}
FATES = st.sampled_from(["", "", "twice", "twice, once late", "drop"])


@pytest.mark.parametrize("name", TRACKED)
@given(specs(), st.data())
@settings(max_examples=examples(15, 40))
def test_trackers_at_servers_pick_what_those_of_host_tables_pick(name, spec, data):
    """Under message faults and server deaths: the successor is restored, and so is the shard of the host tables."""
    fates = data.draw(st.lists(FATES, max_size=30), label="fates")
    fate = lambda server, incarnation, verb, n: fates.pop() if verb == "track" and fates else ""
    servers = data.draw(st.integers(1, spec.shards), label="servers")
    with Fleet(spec, adagrad(0.1), servers, fate, tries=2000, timeout_s=60) as fleet:
        homes = HostTables.create(spec, adagrad(0.1)), fleet.tables
        trackers = [RowTracker(spec, TRACKED[name], 0.4, {}) for _ in homes]
        for tracker, tables in zip(trackers, homes, strict=True):
            tracker.begin(tables, {})
        for step in range(1, data.draw(st.integers(1, 12), label="steps") + 1):
            plans = plan(spec, draw_ids(spec, 5, step))
            for tracker, tables in zip(trackers, homes, strict=True):
                tables.put(plans, changed(tables.read(plans), step))
                tracker.mark_trained(step, plans)
            what = data.draw(st.sampled_from(["save", "fail", "die", "lose", "begin", "go on"]), label="what")
            for tracker in trackers:
                tracker.track_until(step)
            if what in ("save", "fail"):
                picked = [tracker.pick(tables) for tracker, tables in zip(trackers, homes, strict=True)]
                jax.tree.map(np.testing.assert_array_equal, *picked)
                for tracker, tables, rows in zip(trackers, homes, picked, strict=True):
                    copied = tracker.copied(tables, rows)
                    if what == "save":
                        tracker.saved(copied)
            elif what == "die":
                lost = fleet.shards[step % servers]
                fleet.tables.mark_lost(lost, "the test says so")
                trackers[1].track_until(step)
                with pytest.raises(ShardsLost):
                    fleet.tables.take({(next(iter(spec.stacks)), lost[0]): np.zeros(0, np.int32)})
                fleet.recover(lost)
                for tracker, tables in zip(trackers, homes, strict=True):
                    restore_shards(None, tables, lost)
                    tracker.restored(tables, lost)
            elif what == "lose":  # emulated: the server lives on
                for tracker, tables in zip(trackers, homes, strict=True):
                    restore_shards(None, tables, [step % spec.shards])
                    tracker.restored(tables, [step % spec.shards])
            elif what == "begin":
                for tracker, tables in zip(trackers, homes, strict=True):
                    tracker.begin(tables, tracker.remember())
            assert trackers[0].remember() == trackers[1].remember()
        for tracker in trackers:
            tracker.close()


def test_no_row_of_a_tracker_or_of_values_comes_to_the_trainer():
    """SCAR compares all rows on their servers."""
    asked = []
    with Fleet(SPEC, ROWS, 2, lambda server, _, verb, n: asked.append(verb) or "") as fleet:
        tracker = RowTracker(SPEC, scar(), 0.5, {})
        asked.clear()
        tracker.begin(fleet.tables, {})
        tracker.saved(tracker.copied(fleet.tables, tracker.pick(fleet.tables)))
        tracker.close()
    assert set(asked) == {"track"} and len(asked) == 8


def test_batches_are_tracked_many_in_a_message(monkeypatch):
    asked, plans = [], [plan(SPEC, batch_at(step).ids) for step in range(1, 33)]
    values = [sum(map(np.size, jax.tree.leaves([(one.unique, one.inverse) for one in of.values()]))) for of in plans]
    monkeypatch.setattr(tracking, "VALUES_PER_MESSAGE", sum(values[:16]))
    with Fleet(SPEC, ROWS, 2, lambda server, _, verb, n: asked.append(server) or "") as fleet:
        tracker = RowTracker(SPEC, mfu(), 0.5, {})
        tracker.begin(fleet.tables, {})
        asked.clear()
        for step, of in enumerate(plans[:15], 1):
            tracker.mark_trained(step, of)
        assert not asked
        for step, of in enumerate(plans[15:], 16):
            tracker.mark_trained(step, of)
        assert sorted(asked) == [0, 0, 1, 1] and len(set(values)) == 1
        tracker.close()


def test_a_scheme_is_sent_only_what_it_looks_at_and_a_recovery_sends_one_message():
    asked, given = [], []
    with Fleet(SPEC, ROWS, 1, lambda server, _, verb, n: asked.append(verb) or "") as fleet:
        call = fleet.tables.track
        fleet.tables.track = lambda function, args_of: (given.append(args_of([0, 1, 2, 3])), call(function, args_of))[1]
        for scheme in (mfu(), ssu(), scar()):
            tracker = RowTracker(SPEC, scheme, 0.5, {})
            tracker.begin(fleet.tables, {})
            tracker.mark_trained(1, plan(SPEC, batch_at(1).ids))
            asked.clear(), given.clear()
            tracker.track_until(1)
            assert asked == ["track"] * (scheme.name != "scar")
            accesses = [part[2] for args in given for batch in args[0] for part in batch.values()]
            assert all((part is not None) == (scheme.name == "mfu") for part in accesses)
            asked.clear()
            tracker.restored(fleet.tables, [0, 1, 2])
            assert asked == ["track"]
            tracker.close()


# ---- images


def trained(tables, steps=6):
    with Serial(TASK, fresh("host")._replace(tables=tables)) as engine:
        return engine.train(map(batch_at, range(steps)))


@pytest.mark.parametrize("copy", ["whole", "shards"])
def test_an_image_from_two_servers_is_restored_into_three_into_host_tables_and_back(copy, tmp_path):
    def saved(state, name):
        with Checkpointer(tmp_path / name, copy=copy) as checkpointer:
            checkpointer.save(state)
        return tmp_path / name

    state = trained(remote(SPEC, ROWS, 2))
    path, wanted = saved(state, "two"), bits(state)
    assert same(wanted, plain(6)[0])
    for name, tables in (("three", remote(SPEC, ROWS, 3)), ("host", HostTables.create(SPEC, ROWS))):
        found, image = restore(path, fresh("host")._replace(tables=tables))
        assert same(bits(found), wanted) and image.step == found.tables.step == 6
        path = saved(found, name)
    found, _ = restore(path, fresh("host")._replace(tables=remote(SPEC, ROWS, 4)))
    assert same(bits(found), wanted)


def test_the_servers_write_their_shards_into_the_image_themselves_and_no_row_travels(tmp_path):
    asked = []
    tables = remote(SPEC, ROWS, 2, fate=lambda server, _, verb, n: asked.append((server, verb)) or "")
    state = trained(tables)
    wanted, _ = bits(state), asked.clear()
    with Checkpointer(tmp_path, copy="shards") as checkpointer:
        checkpointer.save(state)
    assert sorted(asked) == [(0, "run"), (1, "run")]
    (path,) = images(tmp_path)
    assert is_intact(path) and len(list(path.glob("arrays.*.width_4.*"))) == 4 and not (path / "probe").exists()
    assert same(bits(restore(path, fresh("host"))[0]), wanted)
    template = fresh("host")._replace(
        tables=remote(SPEC, ROWS, 2, fate=lambda server, _, verb, n: asked.append((server, verb)) or "")
    )
    asked.clear()
    found, _ = restore(path, template)
    assert sorted(asked) == [(0, "change"), (1, "change")] and same(bits(found), wanted)


@pytest.mark.parametrize("piece_bytes", [1, 1 << 27])
def test_the_servers_write_row_deltas_of_what_they_held_at_the_save_and_no_row_travels(
    tmp_path, monkeypatch, piece_bytes
):
    monkeypatch.setattr("jaxrec.checkpoint.format.PIECE_BYTES", piece_bytes)
    asked = []
    tables = remote(SPEC, ROWS, 2, fate=lambda server, _, verb, n: asked.append((server, verb)) or "")
    trained(tables)
    rows = {(name, shard): np.arange(shard, stack.rows, 8) for name, stack in SPEC.stacks.items() for shard in (0, 3)}
    taken, _ = tables.take(rows), asked.clear()
    image = snapshot_rows(tables, rows, 5)
    restore_shards(None, tables, [0, 3])
    written = write_image(tmp_path / "delta_000001", image)
    assert [verb for _, verb in asked] == ["track"] * 2 + ["change"] * 2 + ["run"] * 2
    found, _ = restore_shards(written.path, HostTables.create(SPEC, ROWS), [0, 3])
    for place, parts in found.take(rows).items():
        assert same(parts, taken[place])
    assert not same(tables.take(rows), taken)  # negative control


def test_a_message_to_write_that_comes_again_writes_nothing_more_and_one_after_the_next_save_is_refused(tmp_path):
    tables = remote(SPEC, ROWS, 2)
    first = snapshot_rows(tables, {("width_4", 0): [4]}, 1)
    files = first.write_remote_rows(tmp_path)
    assert files and first.write_remote_rows(tmp_path) == files
    second = snapshot_rows(tables, {("width_4", 0): [4]}, 2)
    second.write_remote_rows(tmp_path)
    third = snapshot_rows(tables, {("width_4", 0): [4]}, 3)
    with pytest.raises(OSError, match=r"the rows to save of shards \[0, 2\] were lost with an earlier server"):
        first.write_remote_rows(tmp_path)
    assert third.write_remote_rows(tmp_path).keys().isdisjoint(files)


def test_a_delta_whose_server_dies_while_it_writes_is_void_and_its_rows_are_in_the_next_one(tmp_path):
    fate = lambda server, incarnation, verb, n: (
        "answer and die" if (server, incarnation, verb, n) == (1, 1, "run", 1) else ""
    )
    with Fleet(SPEC, ROWS, 2, fate) as fleet, Serial(TASK, fresh("host")._replace(tables=fleet.tables)) as engine:
        log = engine.enter(Log())
        engine.enter(fleet)
        recovery = engine.enter(Recovery(tmp_path, EVERY, LENGTH, scheme=mfu(), fraction=1.0, pick_ahead_steps=0))
        gate = lambda index: until(lambda: log.voided) if index == EVERY else None
        engine.train(gate(index) or batch_at(index) for index in range(2 * EVERY))
        assert fleet.died == [1] and len(log.voided) == len(recovery.failed_saves) == 1
        until(lambda: deltas(tmp_path))
        found, _ = restore(tmp_path, fresh("host"))
        assert same(bits(found)[1], bits(engine.state)[1])


def test_an_image_whose_server_dies_while_it_writes_is_void_and_comes_again(tmp_path):
    fate = lambda server, incarnation, verb, n: "answer and die" if (server, verb, n) == (1, "run", 1) else ""
    with Fleet(SPEC, ROWS, 2, fate) as fleet, Serial(TASK, fresh("host")._replace(tables=fleet.tables)) as engine:
        engine.enter(fleet)
        recovery = engine.enter(Recovery(tmp_path, EVERY, LENGTH, copy="shards"))
        engine.train(map(batch_at, range(EVERY)))
        assert fleet.died == [1] and recovery.saves == 1 and recovery.failed == 2
        wanted = bits(engine.state)
    assert same(bits(restore(tmp_path, fresh("host"))[0]), wanted) and not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("left_over", [False, True])
def test_a_server_that_does_not_see_the_directory_refuses_to_save_there(tmp_path, left_over):
    """Nor does it if the other directory holds the proof of an earlier save."""

    class Mounted(InProcess):
        """A server on a machine where this path is another directory."""

        def call(self, verb, sender, *args):
            return super().call(
                verb, sender, *(str(tmp_path / "other") if str(tmp_path) in str(a) else a for a in args)
            )

    (tmp_path / "other").mkdir()
    if left_over:
        (tmp_path / "other" / "probe").write_text("of an earlier save")
    tables = remote(SPEC, ROWS, way=lambda *about: Mounted(ShardServer(*about)))
    state = fresh("host")._replace(tables=tables)
    words = r"the server of shards \[0, 2\] does not see .*other, where it is to save its rows: give a directory that"
    with pytest.raises(ValueError, match=words), Checkpointer(tmp_path / "run", copy="shards") as checkpointer:
        checkpointer.save(state)
    assert not images(tmp_path / "run") and not list((tmp_path / "run").glob("*.partial"))


# ---- the tables of a trainer pool


@pytest.mark.parametrize("damaged", ["", "manifest.json", "0.0"])
def test_a_pool_restores_a_server_from_the_newest_intact_image(damaged, tmp_path):
    with Supervised(SPEC, ROWS) as servers:
        tables, saved = servers.tables, []
        pool = ServedTables(servers, tmp_path, 1e6, {"w": np.ones(4)})
        for seed in (1, 2):
            plans = plan(SPEC, batch_at(seed).ids)
            tables.put(plans, changed(tables.read(plans), seed))
            saved.append(every_row(tables))
            pool.save(lambda: (None, {}))
        newest = images(tmp_path)[0]
        for path in newest.rglob(damaged) if damaged else ():
            path.write_bytes(b"cut")
        servers.ways[1].kill()
        with pytest.raises(ShardsLost):
            tables.read(plan(SPEC, batch_at(3).ids))
        with pytest.warns(UserWarning, match="damaged") if damaged else contextlib.nullcontext():
            pool.restore_lost(lambda: (None, {}))
        pool.close()
        found, lost = every_row(tables), [s for s in range(SPEC.shards) if s in servers.shards[1]]
        expected = saved[0 if damaged else 1]
        for key, rows in found.items():
            mine = np.isin(np.arange(len(rows)) % SPEC.shards, lost)
            np.testing.assert_array_equal(rows[mine], expected[key][mine])
            np.testing.assert_array_equal(rows[~mine], saved[1][key][~mine])


@pytest.mark.filterwarnings("ignore:an image was not saved")  # the thread that saves says so, too
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_pool_saves_no_parameters_that_are_not_finite(wrong, tmp_path):
    with Supervised(SPEC, ROWS) as servers:
        pool = ServedTables(servers, tmp_path, 1e6, {"w": np.ones(4, np.float32)})
        with pytest.raises(OSError, match="an image was not saved: the parameters are not finite"):
            pool.save(lambda: ([np.array([1, wrong, 1, 1], np.float32)], {}))
        pool.close()
    assert not images(tmp_path)


def test_a_pool_restores_again_if_a_successor_dies_meanwhile():
    fate = lambda server, incarnation, verb, message: "die" if (incarnation, verb) == (2, "change") else ""
    with Supervised(SPEC, ROWS, fate=fate) as servers:
        before = every_row(servers.tables)
        servers.ways[1].kill()
        with pytest.raises(ShardsLost):
            servers.tables.read(plan(SPEC, batch_at(3).ids))
        ServedTables(servers, None, None, {}).restore_lost(lambda: (None, {}))
        assert servers.died == [1, 1]
        after = every_row(servers.tables)
        for key, rows in before.items():
            np.testing.assert_array_equal(after[key], rows)
