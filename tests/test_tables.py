"""One harness over all homes of rows and all row optimizers: read, put and add against a dense reference."""

import errno
import functools
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from homes import dense_table, tables_in
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process_servers import remote
from strategies import chosen, draw_ids, examples, random_like, small_spec, specs

import jaxrec
from jaxrec.checkpoint import restore_shards
from jaxrec.embedding import (
    DeviceTables,
    EmbeddingSpec,
    HostTables,
    Lookup,
    Table,
    activations,
    adagrad,
    kernels,
    plan,
    rowwise_adagrad,
    sgd,
)  # fmt: skip
from jaxrec.embedding.tables import initial_rows, is_initial
from jaxrec.types import Rows

OPTIMIZERS = {
    "sgd": sgd(0.1),
    "adagrad": adagrad(0.1, initial_accumulator_value=0.5),
    "rowwise_adagrad": rowwise_adagrad(0.1),
    "sgd_schedule": sgd(lambda step: 0.1 / (step + 1)),
}
HOMES = ["device", "device4", "host", "pinned", "programs", "programs4", "files", "remote1", "remote2", "remote8"]
IN_THE_GATE = ("device4", "host", "pinned", "programs4", "files", "remote2")
in_each_home = pytest.mark.parametrize("home", chosen([(home,) for home in HOMES], lambda home: home in IN_THE_GATE))


def create(home, spec, row_optimizer, tmp_path):
    if home == "files":
        return HostTables.create(spec, row_optimizer, tmp_path / "tables")
    if home.startswith("remote"):
        return remote(spec, row_optimizer, servers=int(home.removeprefix("remote")))
    mesh = jaxrec.make_mesh(devices=jax.devices()[: 4 if home.endswith("4") else 1])
    return tables_in(home.removesuffix("4"), spec, row_optimizer, mesh)


def gradient_by_table(spec, stack, ids, weights):
    """Gradient of a sum of weighted activations for every row of a stack: f32[V, E]."""
    gradient = np.zeros((spec.stacks[stack].rows, spec.stacks[stack].width), np.float32)
    for lookup in spec.lookups_of(stack):
        offset, _ = spec.columns_of(lookup)
        flat = ids[lookup].reshape(-1, len(offset))
        weight = weights[lookup].reshape(-1, len(offset), gradient.shape[1])
        for column, first in enumerate(offset):
            present = flat[:, column] >= 0
            np.add.at(gradient, flat[present, column] + first, weight[present, column])
    return gradient


@in_each_home
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps_equal_the_dense_reference(home, name, tmp_path):
    """Duplicates are summed, touched rows step as under a dense optimizer, all others keep their bits."""
    spec, row_optimizer = small_spec(), OPTIMIZERS[name]
    tables = create(home, spec, row_optimizer, tmp_path)
    for step in range(3):
        ids = draw_ids(spec, 12, seed=step)
        plans = plan(spec, ids)
        rows = tables.read(plans)
        values = {n: r.value for n, r in rows.items()}
        weights = {k: random_like(act, step) for k, act in activations(spec, values, plans).items()}
        weighted = lambda values, plans, weights: sum(
            jnp.sum(act * weights[k]) for k, act in activations(spec, values, plans).items()
        )
        gradients = jax.grad(weighted)(values, plans, weights)
        new = {n: Rows(*row_optimizer.update(gradients[n], r.value, r.slots, step)) for n, r in rows.items()}
        before = {n: dense_table(tables, n).copy() for n in spec.stacks}
        slots = {n: {s: dense_table(tables, n, s).copy() for s in rows[n].slots} for n in spec.stacks}
        tables = tables.put(plans, new)
        for n in spec.stacks:
            gradient = gradient_by_table(spec, n, ids, weights)
            value, new_slots = row_optimizer.update(gradient, before[n], slots[n], step)
            for part, wanted in {"value": value, **new_slots}.items():
                np.testing.assert_allclose(dense_table(tables, n, part), wanted, rtol=1e-5, atol=1e-6)
            untouched = np.setdiff1d(np.arange(len(gradient)), np.asarray(plans[n].unique))
            np.testing.assert_array_equal(dense_table(tables, n)[untouched], before[n][untouched])


@given(specs(), st.integers(0, 99))
@settings(max_examples=examples(5, 20))
def test_read_put_add_equal_a_dense_table(spec, seed):
    row_optimizer = adagrad(0.1)
    mesh = jaxrec.make_mesh()
    homes = (
        HostTables.create(spec, row_optimizer),
        DeviceTables.create(spec, row_optimizer, mesh),
        tables_in("pinned", spec, row_optimizer),
        remote(spec, row_optimizer, servers=1 + seed % spec.shards),
    )
    plans = plan(spec, draw_ids(spec, 5, seed))
    for tables in homes:
        rows = tables.read(plans)
        for name, p in plans.items():
            valid = p.unique < spec.stacks[name].rows
            expected = dense_table(tables, name)[p.unique[valid]]
            np.testing.assert_array_equal(np.asarray(rows[name].value)[valid], expected)
            assert not np.asarray(rows[name].value)[~valid].any()
        new = jax.tree.map(lambda x: np.asarray(x) * np.asarray(2, x.dtype) + np.asarray(1, x.dtype), rows)
        tables = tables.put(plans, new)
        tables = tables.add(plans, new, rows)
        for name, p in plans.items():
            valid = p.unique < spec.stacks[name].rows
            after, before = (np.asarray(one[name].value, np.float32)[valid] for one in (new, rows))
            expected = (2 * after - before).astype(spec.dtype)  # rounded once, to the nearest
            np.testing.assert_allclose(dense_table(tables, name)[p.unique[valid]], expected, rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_homes_begin_equal_to_the_bit(name, tmp_path):
    spec = small_spec()
    tables = [create(home, spec, OPTIMIZERS[name], tmp_path) for home in HOMES]
    for stack in spec.stacks:
        for part in ("value", *OPTIMIZERS[name].init(spec.stacks[stack].width)):
            for other in tables[1:]:
                np.testing.assert_array_equal(dense_table(tables[0], stack, part), dense_table(other, stack, part))


def test_dense_optimizers_are_refused():
    with pytest.raises(ValueError, match="not a RowOptimizer"):
        jaxrec.Task(small_spec(), lambda *a: 0, optax.sgd(1.0), optax.adam(0.1))


def test_initial_rows_are_spread_and_of_both_numpys():
    row = np.arange(1000)
    host = initial_rows(row, 16, 0.5, seed=3)
    np.testing.assert_array_equal(host, jax.jit(lambda r: initial_rows(r, 16, 0.5, 3, jnp))(row))
    assert abs(host.mean()) < 0.01 and abs(host.std() - 0.5 / 3**0.5) < 0.01
    assert abs(np.corrcoef(host[:-1, 0], host[1:, 0])[0, 1]) < 0.1
    assert abs(np.corrcoef(host[:, 0], host[:, 1])[0, 1]) < 0.1
    assert not (host == initial_rows(row, 16, 0.5, seed=4)).any(axis=1).all()


def test_files_are_shared_and_guarded(tmp_path):
    spec = small_spec()
    first = HostTables.create(spec, sgd(0.1), tmp_path)
    second = HostTables.attach(spec, sgd(0.1), tmp_path)
    first.shards["width_4"][3]["value"][:] = 7
    assert (second.shards["width_4"][3]["value"] == 7).all()
    restore_shards(None, second, [3])
    np.testing.assert_array_equal(
        dense_table(first, "width_4"), dense_table(HostTables.create(spec, sgd(0.1)), "width_4")
    )
    with pytest.raises(ValueError, match="holds tables already"):
        HostTables.create(spec, sgd(0.1), tmp_path)
    with pytest.raises(ValueError, match="differ in .'slots'"):
        HostTables.attach(spec, adagrad(0.1), tmp_path)
    with pytest.raises(ValueError, match="no complete tables"):
        HostTables.attach(spec, sgd(0.1), tmp_path / "other")


def pooled_plainly(spec, values, plans):
    """Reference pooling: gather the rows of each bag, then sum; differentiated by autodiff."""
    result = {}
    for name, one in plans.items():
        rows = jnp.concatenate(
            [values[name].reshape(-1, values[name].shape[-1]), jnp.zeros((1, spec.stacks[name].width))]
        )
        for key, lookup in spec.lookups_of(name).items():
            taken, here = rows[one.inverse[key]], one.inverse[key] < len(rows) - 1
            if lookup.hots > 1:
                divisor = jnp.maximum(here.sum(-1), 1)[..., None] if lookup.pooling == "mean" else 1
                taken = taken.sum(-2) / divisor
            result[key] = taken
    return result


def many_bags(hots, seed, batch_size=5):
    """A spec of bags and single lookups in one stack, its plans and rows, and a weight for each activation."""
    tables = {"a": Table(40, 6), "b": Table(7, 6)}
    lookups = {"sum": Lookup("a", hots), "mean": Lookup(("b", "a"), hots, "mean"), "one": Lookup(("a", "b"))}
    spec = EmbeddingSpec(tables, lookups, shards=2)
    ids, rng = draw_ids(spec, batch_size, seed), np.random.default_rng(seed)
    ids["sum"][0] = ids["mean"][0] = -1  # empty bags
    plans = plan(spec, ids)
    values = {"width_6": rng.standard_normal((*plans["width_6"].unique.shape, 6), np.float32)}
    weight = {
        key: rng.standard_normal(one.shape, np.float32) for key, one in pooled_plainly(spec, values, plans).items()
    }
    return spec, plans, values, weight


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.more)])
@pytest.mark.parametrize("hots", [2, 8, 9, 27, *(pytest.param(hots, marks=pytest.mark.more) for hots in (7, 24))])
def test_pooling_and_its_derivative_are_those_of_a_plain_sum(hots, seed):
    spec, plans, values, weight = many_bags(hots, seed)
    found, wanted = (pool(spec, values, plans) for pool in (activations, pooled_plainly))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, wanted)
    objective = lambda pool: lambda v: sum(jnp.vdot(one, weight[key]) for key, one in pool(spec, v, plans).items())
    slopes = [jax.jit(jax.grad(objective(pool)))(values)["width_6"] for pool in (activations, pooled_plainly)]
    np.testing.assert_allclose(*slopes, rtol=1e-5, atol=1e-5)


def test_pooling_holds_no_row_for_every_id():
    """Its memory scales with bags; the plain sum, which scales with ids, is the control."""
    spec, plans, values, weight = many_bags(64, seed=0, batch_size=300)

    def temporary_bytes(pool):
        objective = lambda v: sum(jnp.vdot(one, weight[key]) for key, one in pool(spec, v, plans).items())
        compiled = jax.jit(jax.value_and_grad(objective)).lower(values).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    by_ids = 300 * 64 * 6 * 4
    assert temporary_bytes(activations) < by_ids / 2 and temporary_bytes(pooled_plainly) > by_ids


def test_a_full_disk_leaves_nothing_behind_and_other_tables_alone(tmp_path, monkeypatch):
    spec = EmbeddingSpec({"a": Table(50, 4)}, {"a": Lookup("a")}, shards=4)
    good = HostTables.create(spec, sgd(0.1), tmp_path / "good")
    before = [parts["value"].copy() for parts in good.shards["width_4"]]
    calls, allocate = itertools.count(), os.posix_fallocate

    def full(*args):
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(*args)

    monkeypatch.setattr("jaxrec.embedding.host.os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left") as raised:
        HostTables.create(spec, sgd(0.1), tmp_path / "new")
    assert "free space there" in raised.value.__notes__[0]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["tables.lock"]
    with pytest.raises(ValueError, match="no complete tables"):
        HostTables.attach(spec, sgd(0.1), tmp_path / "new")
    for parts, old in zip(HostTables.attach(spec, sgd(0.1), tmp_path / "good").shards["width_4"], before, strict=True):
        np.testing.assert_array_equal(parts["value"], old)


# ---- table files record their step

FILES = EmbeddingSpec(
    {"a": Table(4000, 8), "w": Table(4000, 1)}, {"a": Lookup("a"), "w": Lookup("w")}, shards=4
)  # fmt: skip
SCATTERS = 4 * (1 + 1) + 4 * (1 + 1)  # of one put: shards x (value + slot) of each stack
HALF = pytest.param(SCATTERS // 2, marks=pytest.mark.gate)


def whole_batch(tables):
    """A plan of all rows, and a function that fills them with a number."""
    plans = plan(FILES, {key: np.arange(4000, dtype=np.int32) for key in ("a", "w")})
    rows = tables.read(plans)
    return plans, lambda number: jax.tree.map(lambda x: np.full_like(x, number), rows)


def put_for_ever(directory, die_at=None, after=None):
    """Put the number of the put into all rows; kill this process at scatter `die_at` or after put `after`, if given."""
    tables, scatter, calls = (
        HostTables.attach(FILES, rowwise_adagrad(0.1), directory),
        kernels.scatter,
        itertools.count(1),
    )

    def counted(*args):
        if next(calls) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        scatter(*args)

    kernels.scatter = counted if die_at else scatter
    plans, full_of = whole_batch(tables)
    for number in itertools.count(1):
        tables.put(plans, full_of(number))
        if number == after:
            os.kill(os.getpid(), signal.SIGKILL)


def start(*args):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jax", "jaxrec.embedding"])
    child = context.Process(target=put_for_ever, args=args)
    child.start()
    return child


def killed(child):
    child.join()
    assert child.exitcode == -signal.SIGKILL


def values_of(tables):
    return {
        float(x)
        for n in FILES.stacks
        for part in ("value", "accumulator")
        for x in np.unique(dense_table(tables, n, part))
    }


@pytest.mark.process
@pytest.mark.parametrize("die_at", [1, 2, HALF, SCATTERS, SCATTERS + 1])
def test_tables_of_a_process_killed_within_a_put_are_refused_until_overwritten(tmp_path, die_at):
    HostTables.create(FILES, rowwise_adagrad(0.1), tmp_path)
    killed(start(tmp_path, die_at))
    with pytest.raises(ValueError, match="are torn: .*shards .* within a put.*torn='accept'"):
        HostTables.attach(FILES, rowwise_adagrad(0.1), tmp_path)
    tables = HostTables.attach(FILES, rowwise_adagrad(0.1), tmp_path, torn="accept")
    assert tables.step is None
    with tables.overwriting(step=9):
        restore_shards(None, tables, range(4))
    again = HostTables.attach(FILES, rowwise_adagrad(0.1), tmp_path)
    assert again.step == 9
    plans, full_of = whole_batch(again)
    assert again.put(plans, full_of(10)).step == 10


@pytest.mark.process
def test_tables_of_a_process_killed_between_puts_stand_at_its_last(tmp_path):
    HostTables.create(FILES, rowwise_adagrad(0.1), tmp_path)
    killed(start(tmp_path, None, 3))
    tables = HostTables.attach(FILES, rowwise_adagrad(0.1), tmp_path)
    assert tables.step == 3 and values_of(tables) == {3.0}


@pytest.mark.process
@pytest.mark.random_instant
def test_what_attach_accepts_is_whole_whenever_the_kill_comes(tmp_path):
    """Tables that `attach` accepts hold all rows of the put that they record."""
    for attempt in range(4):
        directory = tmp_path / str(attempt)
        tables = HostTables.create(FILES, rowwise_adagrad(0.1), directory)
        child = start(directory)
        while tables.puts[3, 1] < 5 + 3 * attempt:  # terminates: the child puts for ever; a dead one fails
            assert child.is_alive()
            time.sleep(0.001)
        child.kill()
        killed(child)
        try:
            found = HostTables.attach(FILES, rowwise_adagrad(0.1), directory)
        except ValueError as error:
            assert "are torn" in str(error)
        else:
            assert values_of(found) == {float(found.step)}


def test_puts_of_single_shards_count_for_them_alone(tmp_path):
    tables = HostTables.create(FILES, rowwise_adagrad(0.1), tmp_path)
    plans, full_of = whole_batch(tables)
    for shard in range(4):  # as several writers do, each with its own shards
        tables.put(plans, full_of(1), [shard])
        assert tables.step == (1 if shard == 3 else None)
    tables.put(plans, full_of(2), [1, 2])
    with pytest.raises(ValueError, match=r"shards .0, 3. after put 1, shards .1, 2. after put 2; shards .. within"):
        HostTables.attach(FILES, rowwise_adagrad(0.1), tmp_path)
    tables.put(plans, full_of(2), [0, 3])
    tables.add(plans, full_of(2), full_of(1))  # concurrent adds do not count
    assert HostTables.attach(FILES, rowwise_adagrad(0.1), tmp_path).step == 2


def test_one_shard_overwritten_stands_beside_the_others(tmp_path):
    tables = HostTables.create(FILES, rowwise_adagrad(0.1), tmp_path)
    plans, full_of = whole_batch(tables)
    for number in (1, 2):
        tables.put(plans, full_of(number))
    with pytest.raises(KeyError), tables.overwriting([1]):
        raise KeyError
    assert tables.step is None
    with pytest.raises(ValueError, match=r"shards .1. within a put"):
        HostTables.attach(FILES, rowwise_adagrad(0.1), tmp_path)
    with tables.overwriting([1]):
        assert tables.step is None
    assert tables.step == 2 and HostTables.attach(FILES, rowwise_adagrad(0.1), tmp_path).step == 2


def test_a_put_that_fails_leaves_the_tables_torn(tmp_path, monkeypatch):
    """Ctrl-C within a put: the process continues, but rows belong to no step, and further puts do not repair them."""
    tables, scatter, calls = (
        HostTables.create(FILES, rowwise_adagrad(0.1), tmp_path),
        kernels.scatter,
        itertools.count(),
    )
    plans, full_of = whole_batch(tables)

    def interrupted(*args):
        if next(calls) == 3:
            raise KeyboardInterrupt
        scatter(*args)

    monkeypatch.setattr(kernels, "scatter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tables.put(plans, full_of(1))
    tables.put(plans, full_of(2))
    with pytest.raises(ValueError, match="are torn"):
        HostTables.attach(FILES, rowwise_adagrad(0.1), tmp_path)


def test_tables_are_on_disk_before_they_are_named_complete(tmp_path, monkeypatch):
    """flush once did nothing: it looked for memory maps where numpy keeps memoryviews."""
    synced = []
    record = lambda path: synced.append((path.name, (tmp_path / "t" / "tables.json").exists()))
    for module in ("jaxrec.files", "jaxrec.embedding.host"):
        monkeypatch.setattr(f"{module}.sync", record)
    tables = HostTables.create(small_spec(2), adagrad(0.1), tmp_path / "t")
    files = {"steps", "width_4.000", "width_4.001", "width_1.000", "width_1.001"}
    before = {name for name, committed in synced if not committed}
    assert files | {"tables.json.partial"} <= before and synced[-1] == ("t", True)
    synced.clear()
    tables.flush()
    assert {name for name, _ in synced} == files


def create_at_once(directory, ready, words):
    ready.wait(timeout=60)
    try:
        HostTables.create(FILES, sgd(0.1), directory)
        words.write_text("created")
    except ValueError as error:
        words.write_text(str(error))


@pytest.mark.process
def test_of_processes_that_create_in_one_directory_one_does(tmp_path):
    context = multiprocessing.get_context("forkserver")
    ready, words = context.Barrier(3), [tmp_path / f"words_{n}" for n in range(3)]
    children = [context.Process(target=create_at_once, args=(tmp_path / "tables", ready, path)) for path in words]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    found = [path.read_text() for path in words]
    assert found.count("created") == 1
    assert all("locked" in text or "holds tables already" in text for text in found if text != "created")
    HostTables.attach(FILES, sgd(0.1), tmp_path / "tables")


# ---- operations on rows in place, in every home


def trained(home, tmp_path):
    """Tables of random rows and slots."""
    spec = small_spec()
    tables, rng = create(home, spec, rowwise_adagrad(0.1), tmp_path), np.random.default_rng(0)
    for name, stack in spec.stacks.items():
        for shard in range(spec.shards):
            shapes = {part: (stack.rows_per_shard, one.width) for part, one in tables.layout[name].items()}
            drawn = {part: rng.normal(size=shape).astype(np.float32) for part, shape in shapes.items()}
            tables = tables.with_shard(name, shard, drawn)
    return tables


def shards_of(tables):
    copied = tables.on_shards(lambda stack, shard, parts: {part: np.array(rows) for part, rows in parts.items()})
    return copied, {
        stack: {p: np.array([*map(np.array, rows)]) for p, rows in tables.parts(stack).items()}
        for stack in tables.spec.stacks
    }


@in_each_home
def test_shards_are_the_same_in_every_home(home, tmp_path):
    wanted, _ = shards_of(trained("host", None))
    found, parts = shards_of(trained(home, tmp_path))
    assert found.keys() == wanted.keys()
    for (stack, shard), mine in wanted.items():
        jax.tree.map(np.testing.assert_array_equal, mine, found[stack, shard])
        jax.tree.map(np.testing.assert_array_equal, mine, {part: rows[shard] for part, rows in parts[stack].items()})


@in_each_home
def test_picked_rows_are_copies_of_those_rows(home, tmp_path):
    tables = trained(home, tmp_path)
    shards = tables.spec.shards
    every, _ = shards_of(tables)
    rng = np.random.default_rng(1)
    picked = {key: np.flatnonzero(rng.random(len(parts["value"])) < 0.5) for key, parts in every.items()}
    rows = {(s, shard): (at * shards + shard).astype(np.int32) for (s, shard), at in picked.items() if shard != 2}
    taken = tables.take(rows)
    assert taken.keys() == rows.keys()
    for key, parts in taken.items():
        jax.tree.map(np.testing.assert_array_equal, parts, {p: a[picked[key]] for p, a in every[key].items()})
    key = next(iter(taken))
    restore_shards(None, tables, [key[1]])
    jax.tree.map(np.testing.assert_array_equal, taken[key], {p: a[picked[key]] for p, a in every[key].items()})


@in_each_home
def test_one_shard_changes_alone(home, tmp_path):
    tables, stack, shard = trained(home, tmp_path), "width_4", 3
    before, _ = shards_of(tables)
    new = {part: rows[:1] + 1 for part, rows in before[stack, shard].items()}
    tables = tables.with_shard(stack, shard, new)
    wanted = before | {(stack, shard): {p: np.concatenate([new[p], a[1:]]) for p, a in before[stack, shard].items()}}
    jax.tree.map(np.testing.assert_array_equal, wanted, shards_of(tables)[0])
    initial, _ = shards_of(create("host", small_spec(), rowwise_adagrad(0.1), None))
    tables, _ = restore_shards(None, tables, [shard])
    wanted |= {key: rows for key, rows in initial.items() if key[1] == shard}
    jax.tree.map(np.testing.assert_array_equal, wanted, shards_of(tables)[0])


@in_each_home
@pytest.mark.parametrize("changed", ["value", "accumulator"])
def test_initial_rows_are_known_as_such(home, changed, tmp_path):
    tables = create(home, small_spec(), rowwise_adagrad(0.1), tmp_path)
    assert is_initial(tables)
    last = {part: np.array(rows) for part, rows in tables.on_shards(lambda *a: a[2])["width_4", 7].items()}
    last[changed][3] += 1
    assert not is_initial(tables.with_shard("width_4", 7, last))


def test_a_spec_and_a_layout_of_equal_content_are_one_to_jit():
    traced = []

    @jax.jit
    def values(tables):
        traced.append(1)
        return tables.value

    for _ in range(3):
        values(DeviceTables.create(small_spec(), adagrad(0.1)))
    assert len(traced) == 1
    values(DeviceTables.create(small_spec(), adagrad(0.1, initial_accumulator_value=0.5)))
    assert len(traced) == 2
    spec = small_spec()
    swapped = EmbeddingSpec(spec.tables, dict(reversed(spec.lookups.items())), spec.shards)
    assert spec == small_spec() and hash(spec) == hash(small_spec())
    assert spec != swapped  # rows are numbered in the order of the lookups


# ---- a shard that is replaced


@pytest.mark.parametrize("create", [HostTables.create, DeviceTables.create, remote])
def test_a_shard_of_another_shape_is_refused_and_no_row_changes(create):
    spec = EmbeddingSpec({"item": Table(10, 4)}, {"item": Lookup("item")}, shards=4)
    tables = create(spec, adagrad(0.1))
    shapes = {name: (3, part.width) for name, part in tables.layout["width_4"].items()}
    rows = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    before = {part: [np.array(a) for a in mine] for part, mine in tables.parts("width_4").items()}
    wrong = [
        ("width_4", 1, rows | {"value": np.ones((3, 1), np.float32)}, "have the shapes"),  # would broadcast
        ("width_4", 1, rows | {"value": np.ones((2, 4), np.float32)}, "have the shapes"),
        ("width_4", 1, {name: np.ones((4, *shape[1:])) for name, shape in shapes.items()}, "have the shapes"),
        ("width_4", 1, {"value": rows["value"]}, "have the shapes"),
        ("width_4", 1, rows | {"momentum": rows["value"]}, "have the shapes"),
        ("width_4", -1, rows, "shard=-1 must be a whole number from 0 to 3"),
        ("width_4", 4, rows, "shard=4 must be a whole number from 0 to 3"),
    ]
    for stack, shard, parts, words in wrong:
        with pytest.raises(ValueError, match=words):
            tables.with_shard(stack, shard, parts)
    after = {part: [np.array(a) for a in mine] for part, mine in tables.parts("width_4").items()}
    jax.tree.map(np.testing.assert_array_equal, before, after)
    some = {name: array[:2] for name, array in rows.items()}
    found = tables.with_shard("width_4", np.int64(1), some).parts("width_4")["value"][1]
    assert (np.array(found)[:2] == 1).all() and (np.array(found)[2] == before["value"][1][2]).all()


# Rows of several MB are copied by threads.
LARGE = """
import atexit, os, sys, threading
import jax, numpy as np
from jaxrec import EmbeddingSpec, HostTables, Lookup, Table, plan, sgd

spec = EmbeddingSpec({"item": Table(20_000, 64)}, {"item": Lookup("item")}, shards=2)
tables = HostTables.create(spec, sgd(0.1), sys.argv[1])
plans = plan(spec, {"item": np.arange(20_000, dtype=np.int32)})
ones = lambda: jax.tree.map(np.ones_like, tables.read(plans))
"""
WAYS = {
    "read in a forked child, put at the exit": """
rows = ones()
if (child := os.fork()) == 0:
    tables.read(plans)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
atexit.register(tables.put, plans, rows)
""",
    # One that could not start has its work in a queue, which a later one must not take up.
    "put where no thread can be started": """
def refuse(self):
    raise RuntimeError("can't start new thread")
start, threading.Thread.start = threading.Thread.start, refuse
tables.put(plans, ones())
threading.Thread.start = start
tables.read(plans)
""",
}


@pytest.mark.process
@pytest.mark.gate
@pytest.mark.parametrize("way", WAYS)
def test_many_rows_are_copied_whatever_becomes_of_threads(tmp_path, way):
    command = [sys.executable, "-W", "ignore", "-c", LARGE + WAYS[way], str(tmp_path / "tables")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "Error" not in done.stderr
    spec = jaxrec.EmbeddingSpec({"item": jaxrec.Table(20_000, 64)}, {"item": jaxrec.Lookup("item")}, shards=2)
    tables = jaxrec.HostTables.attach(spec, jaxrec.sgd(0.1), tmp_path / "tables")
    assert tables.step == 1 and (dense_table(tables, *spec.stacks) == 1).all()
