"""`oac.Overlap`: steps over pinned tables whose reads and puts go on beside the programs, as of serial execution.

The kernels are those of a GPU. The CPU plays the streams beside its programs: a put ends as late as it may, and a read
meets the puts that it need not wait for at any point, as drawn from a seed.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click_model import bits
from equality import same
from homes import tables_in
from hypothesis import given, settings
from hypothesis import strategies as st
from pinned_task import ROWS, SPEC, TASK, batch_at
from pinned_task import compiler as compiler  # a fixture
from strategies import draw_ids, small_spec

import jaxrec
from jaxrec import Serial
from jaxrec.embedding import Table, native, plan
from jaxrec.oac import Overlap, overlap
from jaxrec.sharding import mesh_of

OVER_FOUR = dataclasses.replace(TASK, mesh=jaxrec.make_mesh(devices=jax.devices()[:4]))


@pytest.fixture
def play():
    """Plays the streams beside the programs from a seed; afterwards puts end at once, as without tests."""
    library = native.load(jax.devices()[0])
    yield lambda seed: library.jaxrec_play(7, seed)
    library.jaxrec_play(1, 0)


def state_of(task=TASK, home="pinned"):
    return task.init({"bias": jnp.zeros(())}, tables_in(home, SPEC, ROWS, task.mesh))


def trained(task, state, batches, capacity=None):
    with Serial(task, state, capacity=capacity) as engine:
        losses = [float(metrics["loss"]) for _, metrics in engine.run(batches)]
    return losses, bits(engine.state)


def predict(params, activations, batch):
    return activations["ab"].sum((1, 2)) + params["bias"]


LOOK = {of: jaxrec.make_eval_step(SPEC, predict, task.mesh) for of, task in ((1, TASK), (4, OVER_FOUR))}


def _evaluate(engine, task, seen):
    batch = batch_at(1000 + engine.step)
    look = LOOK[mesh_of(engine.state.dense).size]
    seen.append(np.array(look(engine.state, batch, plan(SPEC, batch.ids, {"width_4": 32, "width_1": 16}))))


def _read(engine, task, seen):
    seen.append(bits(engine.state))


def _change(engine, task, seen):
    engine.exclusive(zeroed)


def _train_elsewhere(engine, task, seen):
    state, _ = task.step(engine.state, batch_at(2000 + engine.step))
    engine.reset(state)


def _go_back(engine, task, seen):
    """To the first step, over other tables."""
    engine.reset(state_of(task))


BETWEEN_RUNS = {"evaluate": _evaluate, "read": _read, "change": _change, "train": _train_elsewhere, "back": _go_back}
DURING_ONE = {"evaluate": _evaluate, "read": _read, "change": _change}


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="jax 0.10 compiles the program of a step over pinned tables to other roundings than that of the other homes",
)
@settings(max_examples=10)
@given(st.data())
def test_any_use_of_the_tables_between_and_during_runs_gives_what_serial_execution_gives(data):
    """Batches have two sizes, runs are left in the middle, one or four devices; compared bit by bit."""
    library = native.load(jax.devices()[0])
    task, window = data.draw(st.sampled_from([TASK, OVER_FOUR])), data.draw(st.sampled_from([1, 2, 5]), label="window")
    sizes = data.draw(st.lists(st.sampled_from([12, 24]), min_size=12, max_size=12), label="sizes")
    between = data.draw(st.dictionaries(st.integers(0, 11), st.sampled_from([*BETWEEN_RUNS])), label="between runs")
    during = data.draw(st.dictionaries(st.integers(1, 12), st.sampled_from([*DURING_ONE])), label="during one")
    seed = data.draw(st.integers(1, 2**31), label="seed")

    def run(stepping):
        seen, stream = [], (batch_at(number, size) for number, size in enumerate(sizes))
        with Serial(stepping, state_of(task)) as engine:
            trained = 0
            while trained < len(sizes):
                if trained in between:
                    BETWEEN_RUNS[between[trained]](engine, task, seen)
                for _, metrics in engine.run(stream):
                    trained += 1
                    seen.append(float(metrics["loss"]))
                    if trained in during:
                        DURING_ONE[during[trained]](engine, task, seen)
                    if trained in between:
                        break
            return seen, bits(engine.state)

    wanted = run(task)
    library.jaxrec_play(5, seed)
    try:
        assert same(run(Overlap(task, window)), wanted)
    finally:
        library.jaxrec_play(1, 0)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_steps_are_those_of_serial_execution_whenever_puts_end(play, window):
    batches = [batch_at(step) for step in range(30)]
    wanted = trained(TASK, state_of(home="host"), batches)
    for seed in (0, 1, 2, 3):
        play(seed)
        found = trained(Overlap(TASK, window), state_of(), batches)
        assert same(found, wanted)


def test_the_ring_keeps_its_rows_when_a_capacity_grows(play):
    spec = small_spec(4, {"a": Table(85, 4), "b": Table(5, 4), "w": Table(61, 1)})
    task = dataclasses.replace(TASK, spec=spec)
    batches = [jaxrec.Batch(draw_ids(spec, size, size), np.ones(size, np.float32)) for size in (8, 8, 48, 48)]
    capacities = [plan(spec, batch.ids)["width_4"].unique.shape[1] for batch in batches]
    assert capacities[1] < capacities[2]
    start = lambda home: task.init({"bias": jnp.zeros(())}, tables_in(home, spec, ROWS))
    wanted = trained(task, start("host"), batches)
    play(3)
    assert same(trained(Overlap(task, 3), start("pinned"), batches), wanted)


def test_a_step_that_has_failed_can_be_taken_again(play, monkeypatch):
    """It fails where the ring is donated, and is taken again over the same tables, whose puts have not ended."""
    batches, failing, append = [batch_at(step) for step in range(6)], [], overlap.append
    plans = [
        plan(SPEC, batch.ids, {"width_4": u, "width_1": u})
        for batch, u in zip(batches, [16] * 4 + [32] * 2, strict=True)
    ]

    def fails(*given):
        if failing:
            raise KeyError(failing.pop())
        return append(*given)

    monkeypatch.setattr(overlap, "append", fails)
    overlap.compile_programs.cache_clear()
    state, losses, stepping = state_of(), [], Overlap(TASK, 3)
    play(3)
    for step, batch in enumerate(batches):
        if step == 4:  # the first of its capacity, for which the program is traced
            failing.append("once")
            dense = jax.tree.map(jnp.copy, state.dense)
            with pytest.raises(KeyError, match="once"):
                stepping.step(state, batch, plans[step])
            state = state._replace(dense=dense)
        elif step < 4:  # so that no read has met the last put when a step fails
            stepping.announce(plans[step + 1])
        state, metrics = stepping.step(state, batch, plans[step])
        losses.append(float(metrics["loss"]))
    overlap.compile_programs.cache_clear()
    assert same((losses, bits(state)), trained(TASK, state_of(home="host"), batches))


def _unrepaired(ring, traced, plans, records, number):
    nothing, traced = traced.end_read()
    return traced.rows_of({name: of + nothing for name, of in records.items()}), nothing[None], traced


def _too_early(window, ring, traced, plans, number):
    unique = {name: plan.unique for name, plan in plans.items()}
    records, traced = traced.begin_read(plans, window * len(plans))
    return unique, records, traced


@pytest.mark.parametrize(
    ("part", "wrong", "between"),
    [("replay", _unrepaired, False), ("begin", _too_early, False), ("uses_of", lambda tables: 0, True)],
)
def test_the_law_sees_what_is_left_out(play, monkeypatch, part, wrong, between):
    """No replay; reads that wait for one put too few; a ring that outlives what the host has written."""
    batches = [batch_at(step) for step in range(30)]
    plans = [plan(SPEC, batch.ids, {"width_4": 32, "width_1": 16}) for batch in batches]

    def run(stepping):
        state, losses = state_of(), []
        for step, batch in enumerate(batches):
            if isinstance(stepping, Overlap):  # here always, where an engine does so if the plans are made in time
                stepping.announce(plans[step + 1] if step + 1 < len(batches) else None)
            state, metrics = stepping.step(state, batch, plans[step])
            losses.append(float(metrics["loss"]))
            if between and step == 11:
                state = state._replace(tables=zeroed(state.tables))
        return losses, bits(state)

    wanted = run(TASK)
    play(5)
    assert same(run(Overlap(TASK, 2)), wanted)
    monkeypatch.setattr(overlap, part, wrong)
    overlap.compile_programs.cache_clear()
    try:
        assert not same(run(Overlap(TASK, 2)), wanted)
    finally:
        overlap.compile_programs.cache_clear()


def zeroed(tables):
    for name in SPEC.stacks:
        for shard in range(SPEC.shards):
            tables = tables.with_shard(name, shard, {p: 0 * a[shard] for p, a in tables.parts(name).items()})
    return tables


def test_more_batches_in_the_ring_leave_fewer_rows_to_read(play):
    read = []
    for window in (1, 2, 8):
        with Serial(Overlap(TASK, window), state_of()) as engine:
            read.append(-sum(int(metrics["patched_rows"]) for _, metrics in engine.run(map(batch_at, range(20)))))
    assert read == sorted(read, reverse=True) and read[0] > read[-1]


def test_other_tables_are_noticed_though_they_have_been_used_as_often(play):
    """The ring of the first tables must not supply rows of the second ones."""
    play(5)
    batch, stepping, one = batch_at(0), Overlap(TASK, 2), state_of()
    plans = plan(SPEC, batch.ids)
    other, wanted = (state_of()._replace(tables=zeroed(state_of().tables)) for _ in range(2))
    one, _ = stepping.step(one, batch, plans)
    while one.tables.uses_by_host < other.tables.uses_by_host:
        one.tables.parts("width_4")
    one, _ = stepping.step(one, batch, plans)  # uses them on the host, once
    other.tables.parts("width_4")
    for _ in range(2):
        other, _ = TASK.step(other, batch, plans)
    uses = [(int(state.tables.puts[0, 0]), state.tables.uses_by_host) for state in (one, other)]
    assert uses[0] == uses[1]
    other, _ = stepping.step(other, batch, plans)
    for _ in range(3):
        wanted, _ = TASK.step(wanted, batch, plans)
    assert same(bits(other), bits(wanted))


def test_another_batch_than_the_one_announced_gets_its_own_rows(play):
    play(5)
    batches = [batch_at(step) for step in range(6)]
    plans = [plan(SPEC, batch.ids, {"width_4": 32, "width_1": 16}) for batch in batches]
    state, wanted, stepping = state_of(), state_of(), Overlap(TASK, 2)
    for step, batch in enumerate(batches):
        stepping.announce(plans[0])
        state, _ = stepping.step(state, batch, plans[step])
        wanted, _ = TASK.step(wanted, batch, plans[step])
    assert same(bits(state), bits(wanted))


def test_other_tables_are_refused():
    state = TASK.init({"bias": jnp.zeros(())}, "host")
    with pytest.raises(ValueError, match="Overlap is for PinnedTables, not HostTables: give Serial the task itself"):
        Overlap(TASK).step(state, batch_at(0))
