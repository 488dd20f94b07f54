"""Properties of the plan: it gives the ids back, host and device agree to the bit, nothing is dropped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import draw_ids, examples, specs

import jaxrec
from jaxrec.cpr import counters, row_set
from jaxrec.embedding import (
    DeviceTables,
    EmbeddingSpec,
    Lookup,
    Table,
    bucket,
    capacity_of,
    device_plan,
    host_plan,
    plan,
    rowwise_adagrad,
)
from jaxrec.embedding.lookup import is_plan_of
from jaxrec.sharding import SPLIT, make_mesh, plan_specs, put_on_mesh


def stack_rows(spec, lookup, ids):
    """Reference: the row in the stack of every id, -1 where missing."""
    offset, _ = spec.columns_of(lookup)
    columns = spec.lookups[lookup].columns
    hots = spec.lookups[lookup].hots
    flat = ids.reshape(-1, len(columns), hots)
    return np.where(flat < 0, -1, flat + offset[None, :, None]).reshape(ids.shape)


def assert_plans_equal(a, b):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@given(specs(), st.integers(1, 9), st.integers(0, 99))
def test_plan_gives_the_ids_back(spec, batch_size, seed):
    ids = draw_ids(spec, batch_size, seed)
    for name, p in plan(spec, ids).items():
        flat = np.append(p.unique.reshape(-1), -1)
        for key, inverse in p.inverse.items():
            np.testing.assert_array_equal(flat[inverse], stack_rows(spec, key, ids[key]))
        stack = spec.stacks[name]
        seen = [stack_rows(spec, key, ids[key]).reshape(-1) for key in p.inverse]
        order = dict.fromkeys(int(r) for r in np.concatenate(seen) if r >= 0)  # in order of first appearance
        for shard in range(spec.shards):
            expected = [r for r in order if r % spec.shards == shard]
            assert p.unique[shard, : p.count[shard]].tolist() == expected
            assert (p.unique[shard, p.count[shard] :] == stack.rows).all()


@given(specs(shards=8), st.integers(1, 9), st.integers(0, 99), st.booleans())
@settings(max_examples=examples(5, 12))
def test_host_and_device_plans_are_equal_with_a_slot_for_each_row_or_id(spec, batch_size, seed, overflow):
    ids = draw_ids(spec, batch_size, seed)
    capacity = {name: 1 if overflow else u for name, u in capacity_of(plan(spec, ids)).items()}
    on_host = host_plan(spec, ids, capacity)
    for slots, sorts in ((0, True), (1000, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jaxrec.embedding.lookup.slots_per_id", lambda slots=slots: slots)
            planner = jax.jit(lambda i: device_plan(spec, i, capacity))
            assert_plans_equal(on_host, planner(ids))
            assert ("sort[" in str(jax.make_jaxpr(planner)(ids))) == sorts


@pytest.mark.parametrize("devices", [1, 8, *(pytest.param(some, marks=pytest.mark.more) for some in (2, 4))])
def test_sharded_device_plan_equals_host_plan(devices):
    spec = EmbeddingSpec(
        {"a": Table(50, 4), "b": Table(7, 4), "w": Table(50, 1)},
        {
            "ab": Lookup(("a", "b")),
            "bag": Lookup("a", hots=3),
            "w": Lookup("w"),
            "of_two_widths": Lookup(("a", "w", "b")),
        },
    )
    ids = draw_ids(spec, 16, seed=devices)
    capacity = capacity_of(plan(spec, ids))
    mesh = make_mesh(devices=jax.devices()[:devices])
    sharded = jax.shard_map(
        functools.partial(device_plan, spec, capacity=capacity, sharded=True),
        mesh=mesh, in_specs=SPLIT, out_specs=plan_specs(spec.stacks),
    )  # fmt: skip
    assert_plans_equal(host_plan(spec, ids, capacity), jax.jit(sharded)(ids))


def test_ids_on_a_mesh_whose_devices_do_not_divide_the_shards_lose_none():
    spec = EmbeddingSpec({"t": Table(60, 4)}, {"t": Lookup("t")}, shards=6)
    ids = {"t": np.arange(0, 60, 5, dtype=np.int32)}
    there = put_on_mesh(ids, make_mesh(devices=jax.devices()[:4]), SPLIT)
    assert_plans_equal(plan(spec, ids, {"width_4": 8}), plan(spec, there, {"width_4": 8}))


def test_an_overflow_is_visible_and_plan_grows():
    spec = EmbeddingSpec({"t": Table(100, 4)}, {"t": Lookup("t")}, shards=2)
    ids = {"t": np.arange(60, dtype=np.int32)}
    assert (host_plan(spec, ids, {"width_4": 10})["width_4"].count == 30).all()
    grown = plan(spec, ids, {"width_4": 10})["width_4"]
    assert grown.unique.shape == (2, bucket(30))
    assert (grown.inverse["t"] < 2 * bucket(30)).all()
    assert_plans_equal(grown, plan(spec, jax.device_put(ids), {"width_4": 10})["width_4"])


@pytest.mark.parametrize("bad", [-2, 100, 2**31, 2**32 + 5, -(2**40)])
@pytest.mark.parametrize("home", [np.asarray, jax.numpy.asarray])
def test_ids_outside_their_table_are_refused(bad, home):
    if home is not np.asarray and abs(bad) >= 2**31:
        pytest.skip("jax arrays are int32")
    spec = EmbeddingSpec({"t": Table(100, 4), "u": Table(9, 4)}, {"t": Lookup("t"), "u": Lookup("u")})
    with pytest.raises(ValueError, match="1 ids of lookups .* outside their tables"):
        plan(spec, {"t": home([1, bad]), "u": home([1, 2])})


@pytest.mark.parametrize("home", [np.asarray, lambda ids: put_on_mesh(ids, make_mesh(), SPLIT)])
@pytest.mark.parametrize("hots", [1, 3])
def test_an_id_outside_its_table_is_named_with_its_lookup_and_its_table(hots, home):
    sizes, rng = {"a": 9, "b": 5, "c": 7}, np.random.default_rng(hots)
    spec = EmbeddingSpec(
        {name: Table(rows, 4) for name, rows in sizes.items()},
        {"alone": Lookup("c", hots), "three": Lookup(("a", "b", "c"), hots)}, shards=8,
    )  # fmt: skip
    tail = () if hots == 1 else (hots,)
    for column, (table, rows) in enumerate(sizes.items()):
        ids = {"alone": rng.integers(-1, 7, (16, *tail)), "three": rng.integers(-1, 5, (16, 3, *tail))}
        bad = int(rng.choice([-2, rows, rows + 40]))
        ids["three"][(rng.integers(16), column, *(rng.integers(size) for size in tail))] = bad
        given = {name: home(array.astype(np.int32)) for name, array in ids.items()}
        with pytest.raises(ValueError, match=f"first is {bad} in 'three', and '{table}' has rows 0 to {rows - 1}\\."):
            plan(spec, given)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({}, "but the spec has lookups"),
        ({"pair": np.zeros((3, 3), int)}, "has shape"),
        ({"pair": np.zeros((2,), int)}, "has shape"),
        ({"pair": np.zeros((3, 2), np.float32)}, "ids are arrays of integers"),
        ({"pair": jnp.array([[2**31 + 3, 1]], jnp.uint32)}, "uint32 on a device, .*jaxrec.to_device"),
    ],
)
@pytest.mark.parametrize(
    "plans", [plan, lambda spec, ids: jax.jit(lambda ids: device_plan(spec, ids, {"width_4": 8}))(ids)]
)
def test_ids_that_do_not_fit_are_refused(ids, message, plans):
    spec = EmbeddingSpec({"a": Table(9, 4), "b": Table(9, 4)}, {"pair": Lookup(("a", "b"))})
    with pytest.raises(ValueError, match=message):
        plans(spec, ids)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_the_largest_id_of_a_small_type_is_not_a_missing_one(dtype):
    """On a device -1 was cast to the type of the ids."""
    spec, ids = EmbeddingSpec({"t": Table(40, 4)}, {"t": Lookup("t")}), np.array([7, np.iinfo(dtype).max], dtype)
    for array in (ids, jnp.asarray(ids)):
        with pytest.raises(ValueError, match="outside their tables"):
            plan(spec, {"t": array})


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_a_batch_sent_to_the_device_is_planned_as_on_the_host_or_refused(dtype):
    spec, limits = EmbeddingSpec({"t": Table(40, 4)}, {"t": Lookup("t")}), np.iinfo(dtype)
    batch = jaxrec.Batch({"t": np.array([7, 39, 0, 7], dtype)}, np.ones(4, np.float32))
    sent = jaxrec.to_device(batch)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(sent)) and sent.ids["t"].dtype == np.int32
    jax.tree.map(np.testing.assert_array_equal, plan(spec, sent.ids), plan(spec, batch.ids))
    for value in {int(limits.min), int(limits.max)} - {0}:  # valid rows only by being cut
        batch.ids["t"][0] = value
        with pytest.raises(ValueError, match="outside their tables" if -(2**31) <= value < 2**31 else "ids are i32"):
            plan(spec, jaxrec.to_device(batch).ids)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Table(0, 4), "whole number from 1"),
        (lambda: Lookup("t", hots=0), "hots"),
        (lambda: Lookup("t", pooling="max"), "pooling"),
        (lambda: EmbeddingSpec({"t": Table(9, 4)}, {"x": Lookup("y")}), "unknown tables"),
        (lambda: EmbeddingSpec({"t": Table(9, 4)}, {}), "no lookup reads"),
        (lambda: EmbeddingSpec({"t": Table(9, 4)}, {"x": Lookup("t")}, shards=0), "shards"),
        (lambda: EmbeddingSpec({"t": Table(2**31, 4)}, {"x": Lookup("t")}), "int32"),
    ],
)
def test_bad_specs_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@given(st.integers(1, 10**9))
def test_buckets_are_few_and_close(rows):
    assert rows <= bucket(rows) <= max(8, 1.125 * rows + 1)
    assert bucket(bucket(rows)) == bucket(rows)


@given(specs(), st.integers(1, 9), st.integers(0, 99))
def test_a_plan_is_that_of_its_own_ids_and_of_no_others(spec, batch_size, seed):
    ids, rng = draw_ids(spec, batch_size, seed), np.random.default_rng(seed)
    plans = plan(spec, ids)
    for name, p in plans.items():
        assert is_plan_of(spec, name, p, ids)
        for key in p.inverse:
            _, rows = spec.columns_of(key)
            other, place = ids[key].copy(), rng.integers(ids[key].size)
            flat = other.reshape(-1)
            column = place // spec.lookups[key].hots % len(rows)
            flat[place] = (flat[place] + 2) % (rows[column] + 1) - 1  # another row of its table, or missing
            if (flat != ids[key].reshape(-1)).any():
                assert not is_plan_of(spec, name, p, {**ids, key: other})


# `--xla_gpu_deterministic_ops` may store what a `set` must drop, unless its indices are called unique.


def sets_of_equal_indices(function, *args):
    """The `set` scatters of a program, nested ones included, whose indices are not called unique."""

    def inside(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scatter" and not eqn.params["unique_indices"]:
                yield eqn
            for value in jax.tree.leaves(list(eqn.params.values())):
                if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                    yield from inside(inner)

    return list(inside(jax.make_jaxpr(function)(*args).jaxpr))


def test_scatters_that_overwrite_have_unique_indices():
    spec = EmbeddingSpec({"a": Table(50, 4)}, {"a": Lookup("a", hots=3)}, shards=4)
    ids = draw_ids(spec, 8, 0)
    plans = plan(spec, ids)
    ((stack, p),) = plans.items()
    capacity = capacity_of(plans)
    tables = DeviceTables.create(spec, rowwise_adagrad(0.1))
    rows = tables.read(plans)
    listed = row_set.empty(tables.value[stack], 16)
    programs = {
        "device_plan": (lambda ids: device_plan(spec, ids, capacity), ids),
        "put": (lambda tables, rows: tables.put(plans, rows), tables, rows),
        "row set": (lambda listed: row_set.insert(listed, p, np.int32(0)), listed),
        "overwrite": (
            lambda value: counters.overwrite(value, [np.arange(3)] * 4, [np.ones((3, 4))] * 4),
            tables.value[stack],
        ),
        "counts": (lambda count: counters.add_accesses(count, p, True), np.zeros((4, 13), np.int32)),
    }
    found = {name: sets_of_equal_indices(*program) for name, program in programs.items()}
    assert not any(found.values()), found


def test_a_scatter_with_equal_indices_is_noticed():
    wrong = jax.jit(lambda at: jnp.zeros((2, 3)).at[jnp.zeros(4, jnp.int32), at].set(1.0, mode="drop"))
    assert len(sets_of_equal_indices(wrong, np.arange(4))) == 1
