"""OAC: for any window, thread counts and delays, results equal training batch by batch, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oac_equivalence
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oac_equivalence import HeldBack, batch_in_work, same
from oac_task import (
    ROWS,
    SPEC,
    frozen,
    make_batches,
    make_state,
    plain_loop,
    reset,
    states_of,
    task_of,
    train,
    watched,
)
from step_callbacks import at_step
from strategies import draw_ids, examples, specs
from studies.oac_failures import KINDS, Problem, break_one
from threads import no_threads_left, until

import jaxrec
from jaxrec.embedding import HostTables
from jaxrec.oac import Pipeline, ring, stages
from jaxrec.types import Rows, TrainState


@pytest.mark.parametrize("window", [1, 2, 5, 16])
def test_equals_the_plain_loop_bit_for_bit(window):
    batches = make_batches(24)
    pipeline, found = train(batches, window=window)
    assert same(found, plain_loop(batches))
    assert no_threads_left()
    assert pipeline.counters["stale_rows"] > 24


@settings(max_examples=examples(3, 8))
@given(data=st.data())
def test_law_of_equality(data):
    devices = data.draw(st.sampled_from([1, 2, 4]), label="devices")
    spec = data.draw(specs(shards=4), label="spec")
    mesh = jaxrec.make_mesh(devices=jax.devices()[:devices])
    overlap = data.draw(st.sampled_from(["full", "some", "none"]))
    batches = make_batches(data.draw(st.integers(1, 12)), spec, seed=data.draw(st.integers(0, 9)), overlap=overlap)
    threads = {name: data.draw(st.integers(1, 3), label=name) for name in ("loaders", "fetchers")}
    window = data.draw(st.integers(1, 8), label="window")
    _, found = train(batches, spec, mesh, window=window, **threads)
    assert same(found, plain_loop(batches, spec, mesh))


def test_every_mutant_is_caught():
    """Negative controls: five ways of breaking the mechanism."""
    config = oac_equivalence.Config(rows=100, batch_size=16)
    task = oac_equivalence.problem(config.rows)
    batches = oac_equivalence.make_batches(config, 24, 0.5, 0)
    caught = oac_equivalence.mutants_caught(task, batches, window=4)
    assert len(caught) == 5 and all(caught.values()), caught


def test_sync_equals_the_plain_loop_and_async_and_semisync_the_delayed_one():
    batches = make_batches(20)
    assert same(train(batches, mode="sync")[1], plain_loop(batches))
    assert same(train(batches, mode="oac", window=0)[1], plain_loop(batches))
    assert same(train(batches, mode="async", window=3)[1], plain_loop(batches, delay=3))
    for late in (True, False):  # exactly one batch stale at any speed of transfers
        assert same(train(batches, mode="semisync", late=late, loaders=3)[1], plain_loop(batches, delay=1))
    assert not same(plain_loop(batches), plain_loop(batches, delay=1))


_validate, _replay, _append = (jax.jit(function) for function in (ring.validate, ring.replay, ring.append))
SIZE = {name: stack.rows_per_shard for name, stack in SPEC.stacks.items()}


@settings(max_examples=examples(8, 20))
@given(seed=st.integers(0, 2**31), window=st.sampled_from([1, 2, 5]), since=st.integers(-2, 12))
def test_the_ring_has_the_rows_of_their_last_writers_within_the_window(seed, window, since):
    """Compared with a dictionary of all rows, for any since; slots are wider than later batches."""
    rng, tables = np.random.default_rng(seed), HostTables.create(SPEC, ROWS)
    held, written = None, {}
    for number in range(rng.integers(1, 9)):
        capacity = {"width_4": 24 if number == 0 else 16, "width_1": 8}
        plans = jaxrec.plan(SPEC, draw_ids(SPEC, 4, int(rng.integers(2**31))), capacity)
        read = jax.tree.map(jnp.asarray, tables.read(plans))
        held = ring.init(read, SIZE, window) if held is None else held
        source = _validate(held, plans, number, since)
        right = jax.tree.map(np.asarray, _replay(held, read, source))
        new = jax.tree.map(lambda leaf, n=number: leaf + n + 1, read)
        for name, p in plans.items():
            unused = np.arange(p.unique.shape[1]) >= p.count[:, None]
            assert (np.asarray(source[name])[unused] == -1).all()
            for shard, u in ((s, u) for s, count in enumerate(p.count) for u in range(count)):
                row = (name, int(p.unique[shard, u]))
                at, rows = written.get(row, (-1, None))
                wanted = rows if at >= max(number - window, since, 0) else bits_at(read[name], shard, u)
                assert bits_at(right[name], shard, u) == wanted
                written[row] = number, bits_at(new[name], shard, u)
        held = _append(held, plans, new, number)


def bits_at(rows, shard, place):
    return [np.asarray(leaf)[shard, place].tobytes() for leaf in jax.tree.leaves(rows)]


def test_commit_in_one_jit_repairs_rows_that_are_as_stale_as_they_may_be():
    """The pure function without a pipeline: rows are read before the last three batches are written."""
    window, batches = 3, make_batches(12)
    capacity = {"width_4": 40, "width_1": 8}
    commit = jax.jit(functools.partial(ring.commit, task_of(SPEC).checked_update))
    dense, tables = make_state()
    held, waiting, losses = None, [], []
    for number, batch in enumerate(batches):
        plans = jaxrec.plan(SPEC, batch.ids, capacity)
        stale = tables.read(plans)
        held = ring.init(stale, SIZE, window) if held is None else held
        dense, held, rows, metrics = commit(dense, held, stale, plans, batch, number)
        losses.append(np.asarray(metrics["loss"]))
        waiting.append((plans, rows))
        if len(waiting) > window:
            tables.put(*waiting.pop(0))
    for plans, rows in waiting:
        tables.put(plans, rows)
    expected, expected_losses = plain_loop(batches)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)  # another program, fused differently
    for a, b in zip(jax.tree.leaves(dense), jax.tree.leaves(expected.dense), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_rows_changed_in_exclusive_are_what_later_batches_see():
    """As after a shard failure: no row gathered before, or held in the ring, survives."""
    batches, fail = make_batches(20), at_step(9, lambda state: pipeline.exclusive(reset))
    with Pipeline(task_of(SPEC), make_state(), [fail], window=5, loaders=3) as pipeline:
        losses = [np.asarray(metrics["loss"]) for _, metrics in pipeline.run(batches)]
    expected = plain_loop(batches, after=lambda step, state: step == 9 and reset(state.tables))
    assert same((pipeline.state, losses), expected)
    assert not same(expected, plain_loop(batches))


def test_a_cut_is_the_state_after_its_step_while_compute_goes_on():
    """Training on from the snapshot gives the same bits; during the save exactly a window of batches is committed."""
    window, at = 3, 7
    batches, snapshots = make_batches(20), []
    plain, expected = plain_loop(batches), states_of(batches)

    def save(state):
        # During this save training fills the window and no more.
        until(lambda: pipeline.step == at + window + 1)
        snapshots.append(frozen(state))
        assert pipeline.step == at + window + 1

    with Pipeline(task_of(SPEC), make_state(), window=window) as pipeline:
        pipeline.snapshot_at(at, save)
        losses = [np.asarray(metrics["loss"]) for _, metrics in pipeline.run(batches)]
    assert same((pipeline.state, losses), plain)
    assert same((snapshots[0], []), (expected[at], []))
    dense = jax.tree.map(jnp.asarray, snapshots[0].dense)
    _, (state, losses) = train(batches[at:], state=TrainState(dense, snapshots[0].tables), window=window)
    assert same((state, plain[1][:at] + losses), plain)


@functools.cache
def problem():
    batches = make_batches(12)
    return Problem(make_state, task_of(SPEC), batches, [*states_of(batches).values()])


# A stream that blocks is in test_oac_runs.py, as here a pipeline would wait for it for seconds.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stream blocks"])
@settings(max_examples=examples(4, 20))
@given(seed=st.integers(0, 2**31))
def test_a_run_that_fails_anywhere_tells_so_and_goes_on_to_the_same_bits_or_refuses_to(kind, seed):
    """The instant, the window and the threads are random; `studies.oac_failures` says what must hold."""
    assert break_one(problem(), kind, np.random.default_rng(seed))[1] == []


def test_the_window_bounds_what_is_in_flight():
    """Admission: no batch is gathered before all but the last W are written."""
    window, seen = 3, []

    def look():
        seen.append(batch_in_work() - (pipeline.flight.written - pipeline.flight.first))

    batches, state = make_batches(20), watched(make_state(), before_read=look)
    held = HeldBack(window, 20)
    with Pipeline(task_of(SPEC), state, window=window, send=held.send, fetch=held.fetch) as pipeline:
        for _ in pipeline.run(batches):
            pass
    assert max(seen) == window and len(seen) == 20


def test_capacities_grow_in_the_middle_and_compilations_are_counted():
    small, large = make_batches(6, size=8), make_batches(6, size=8, seed=5)
    # Large batches touch all users at once.
    rows = np.arange(24, dtype=np.int32).reshape(8, 3)
    large = [batch._replace(ids={**batch.ids, "bag": rows + 24 * (i % 2)}) for i, batch in enumerate(large)]
    small = [batch._replace(ids={**batch.ids, "bag": rows * 0}) for batch in small]
    pipeline, found = train(small + large + small, window=4)
    assert same(found, plain_loop(small + large + small))
    again, _ = train(small + large + small, window=4)
    assert 0 < pipeline.compilations and again.compilations == 0  # same shapes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "eventual"}, "must be one of"),
        ({"window": -1}, "window=-1"),
        ({"mode": "sync", "window": 2}, "window is 0"),
        ({"loaders": 0}, "loaders=0"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(task_of(SPEC), make_state(), **options)


def test_other_tables_and_other_shapes_are_refused():
    state = task_of(SPEC).init({}, "device")
    with pytest.raises(ValueError, match="HostTables"):
        Pipeline(task_of(SPEC), state)

    class Growing(jaxrec.Task):
        def update(self, *given):
            dense, rows, metrics = super().update(*given)
            return dense, {name: Rows(jnp.tile(r.value, 2), r.slots) for name, r in rows.items()}, metrics

    before, pipeline = make_state(), Pipeline(task_of(SPEC, kind=Growing), make_state())
    with pytest.raises(ValueError, match="changes the shapes of the rows"), pipeline:
        next(pipeline.run(make_batches(3)))
    assert same((pipeline.state, []), (before, []))
    with pytest.raises(ValueError, match="window=0"):
        ring.init({"s": Rows(np.zeros((1, 1, 1)), {})}, {"s": 1}, 0)


def test_rows_fetched_through_pinned_memory_are_the_same(monkeypatch):
    """As from a GPU; a CPU has pinned memory of its own."""
    tree = jax.jit(lambda: {"rows": jnp.arange(12.0).reshape(3, 4), "count": jnp.int32(7)})()
    plain = stages.fetch_whole(tree)
    monkeypatch.setattr(stages, "on_gpu", lambda tree: True)
    pinned = stages.fetch_whole(tree)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(pinned))
    jax.tree.map(np.testing.assert_array_equal, plain, pinned)
