"""Pinned rows: kernels, the cache of their compilation, order of programs and host, memory.

The laws of all homes of rows are elsewhere. The kernels are those of a GPU, run by the CPU; what only a GPU shows is in
part `pinned` of on_accelerator.py.
"""

import dataclasses
import gc
import multiprocessing
import os
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_equal
from homes import ByPrograms, dense_table, each_part, every_row, tables_in
from main.homes import fits_devices
from pinned_task import ROWS, SPEC, TASK, batch_at
from pinned_task import compiler as compiler  # a fixture
from strategies import draw_ids, small_spec
from threads import until

import jaxrec
from jaxrec.embedding import HostTables, PinnedTables, native, pinned, plan
from jaxrec.sharding import AXES
from jaxrec.types import Part, Plan


def library():
    return native.load(jax.devices()[0])


@pytest.fixture
def as_threads():
    """Plays as many threads in an order drawn from a seed; afterwards one, as without tests."""
    yield library().jaxrec_play
    library().jaxrec_play(1, 0)


def state_of(tables, task=TASK):
    return task.init({"bias": jnp.zeros(())}, tables)


def trained(tables, steps=40):
    state, metrics = state_of(tables), []
    for step in range(steps):
        batch = batch_at(step)
        state, its = TASK.step(state, batch, plan(SPEC, batch.ids, {"width_4": 32, "width_1": 16}))
        metrics.append(its["loss"])
    return state, metrics


@pytest.mark.parametrize(("threads", "seed"), [(1, 0), (2, 1), (37, 2), (8192, 3)])
def test_threads_may_run_in_any_order(as_threads, threads, seed):
    as_threads(threads, seed)
    (host, host_losses), (mine, losses) = (
        trained(HostTables.create(SPEC, ROWS)),
        trained(PinnedTables.create(SPEC, ROWS)),
    )
    assert_equal([host_losses, host.dense, every_row(host.tables)], [losses, mine.dense, every_row(mine.tables)])
    assert mine.tables.step == 40


def test_programs_and_the_host_see_what_the_other_wrote():
    """Nothing waits but the tables themselves; each is compared with host tables after every access."""
    tables, wanted, rng = ByPrograms.create(SPEC, ROWS), HostTables.create(SPEC, ROWS), np.random.default_rng(0)
    for number in range(30):
        plans = plan(SPEC, draw_ids(SPEC, 12, number), {"width_4": 32, "width_1": 16})
        rows = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), wanted.read(plans))
        for one in (wanted, tables):
            by_host = one is wanted or number % 3 == 0
            (HostTables.put if one is wanted else PinnedTables.put if by_host else ByPrograms.put)(one, plans, rows)
        if number % 2:
            assert_equal(ByPrograms.read(tables, plans), wanted.read(plans))
        else:
            assert_equal(every_row(tables), every_row(wanted))


def _by_step(state, plans, batch):
    TASK.step(state, batch, plans)


def _by_host(state, plans, batch):
    state.tables.put(plans, jax.tree.map(np.ones_like, state.tables.read(plans)))


@pytest.mark.parametrize("overwrite", [_by_step, _by_host])
def test_a_prediction_has_the_rows_of_its_state_though_they_are_overwritten_at_once(overwrite):
    """Its program would begin late, as its parameters are still being computed."""
    predict = lambda params, activations, batch: activations["ab"].sum((1, 2)) + params["bias"]
    look, slow = jaxrec.make_eval_step(SPEC, predict), jax.jit(lambda x: jax.lax.fori_loop(0, 200, _product, x).sum())
    batch = batch_at(0)
    plans, found = plan(SPEC, batch.ids, {"width_4": 32, "width_1": 16}), []
    for late in (False, True):
        state = state_of(PinnedTables.create(SPEC, ROWS))
        look(state, batch, plans)
        bias = state.dense.params["bias"] + (0 * slow(np.full((400, 400), 0.01, np.float32)) if late else 0)
        found.append(look(state._replace(dense=state.dense._replace(params={"bias": bias})), batch, plans))
        overwrite(state, plans, batch)
    assert_equal(*found)


def _product(number, x):
    return jnp.tanh(x @ x)


@pytest.mark.parametrize("row", [-1, -(2**31), 2**31 - 1, 36])
def test_rows_that_a_shard_lacks_are_neither_read_nor_written(row):
    """A plan under jit is checked by nobody before: it must not reach memory of others."""
    tables = PinnedTables.create(SPEC, ROWS)
    before, name = every_row(tables), "width_4"
    plans = {name: Plan(np.full((4, 3), row, np.int32), {}, np.full(4, 3, np.int32), np.int32(0))}
    read = jax.jit(lambda traced, plans: traced.read(plans))(tables.traced, plans)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(read))
    put = jax.jit(lambda traced, plans, rows: traced.put(plans, rows))
    tables = tables.with_traced(put(tables.traced, plans, jax.tree.map(jnp.ones_like, read)))
    assert_equal(every_row(tables), before)


@pytest.mark.parametrize("count", [0, 1, 9])
def test_as_many_rows_are_read_and_written_as_the_plan_counts(count):
    """Of one row per shard; a count beyond the capacity, of a plan that has dropped rows, reaches no other shard."""
    tables = PinnedTables.create(SPEC, ROWS)
    before = dense_table(tables, "width_4").copy()
    unique = np.array([[0], [1], [2], [3]], np.int32)
    plans = {"width_4": Plan(unique, {}, np.full(4, count, np.int32), np.int32(0))}
    read = jax.jit(lambda traced, plans: traced.read(plans))(tables.traced, plans)
    np.testing.assert_array_equal(np.asarray(read["width_4"].value)[:, 0], before[:4] if count else np.zeros((4, 4)))
    put = jax.jit(lambda traced, plans, rows: traced.put(plans, rows))
    tables = tables.with_traced(put(tables.traced, plans, jax.tree.map(jnp.ones_like, read)))
    wanted = np.concatenate([np.ones((4, 4)), before[4:]]) if count else before
    np.testing.assert_array_equal(dense_table(tables, "width_4"), wanted)


def test_plans_of_other_shards_are_refused():
    tables, other = PinnedTables.create(SPEC, ROWS), small_spec(shards=2)
    plans = plan(other, draw_ids(other, 5, 0))
    with pytest.raises(ValueError, match="a plan of 2 shards for 'width_4', but the tables have 4"):
        tables.traced.read(plans)
    with pytest.raises(ValueError, match="a plan of 2 shards"):
        tables.read(plans)


def test_records_are_of_whole_lanes_and_aligned():
    for width, floats in ((1, 4), (3, 4), (4, 8), (15, 16), (16, 20), (128, 132)):
        where, record = pinned.places({"value": Part(width, "float32", None), "slot": Part(1, "float32", 0.0)})
        assert record == floats and where == {"value": slice(0, width), "slot": slice(width, width + 1)}
    tables = PinnedTables.create(SPEC, ROWS)
    address = np.asarray(tables.traced.address["width_4"]).astype(np.uint32).astype(np.uint64)
    first = [array.ctypes.data for (_, part), array in each_part(tables) if _ == "width_4" and part == "value"]
    assert [int(low | high << np.uint64(32)) for low, high in address] == first and not any(at % 16 for at in first)


def test_memory_is_registered_until_the_tables_are_gone(monkeypatch):
    calls = []
    fake = types.SimpleNamespace(
        jaxrec_register=lambda at, size: calls.append(("register", at, size)),
        jaxrec_unregister=lambda at: calls.append(("unregister", at)),
        jaxrec_wait=lambda device: None,
    )
    monkeypatch.setattr(native, "load", lambda device: fake)
    tables = PinnedTables.create(SPEC, ROWS)
    registered = [(at, size) for _, at, size in calls]
    assert len(registered) == 8 and sum(size for _, size in registered) == 4 * (8 * 36 + 4 * 24)
    traced = tables.traced  # a program may still have the addresses: they go with the tables, not with it
    del tables
    gc.collect()
    until(lambda: len(calls) == 16)
    assert calls[8:] == [("unregister", at) for at, _ in registered] and traced is not None


def test_memory_that_the_driver_refuses_is_told_and_none_stays_registered(monkeypatch):
    calls = []

    def register(at, size):
        calls.append(at)
        return b"out of memory" if len(calls) == 3 else None

    gone = []
    fake = types.SimpleNamespace(
        jaxrec_register=register, jaxrec_unregister=gone.append, jaxrec_wait=lambda device: None
    )
    monkeypatch.setattr(native, "load", lambda device: fake)
    with pytest.raises(OSError, match=r"refuses .* GB of host memory for the GPU \(out of memory\).*--tables host"):
        PinnedTables.create(SPEC, ROWS)
    assert gone == calls[:2]


@pytest.mark.parametrize("home", ["device", "pinned"])
def test_devices_of_a_mesh_plan_the_batches_that_they_are_sent(home):
    mesh = jaxrec.make_mesh(devices=jax.devices()[:4])
    task, found = dataclasses.replace(TASK, mesh=mesh), []
    for send in (lambda batch: batch, lambda batch: jaxrec.to_device(batch, mesh)):
        with jaxrec.Serial(task, state_of(tables_in(home, SPEC, ROWS, mesh), task)) as engine:
            losses = [float(metrics["loss"]) for _, metrics in engine.run(send(batch_at(i)) for i in range(8))]
            found.append((losses, every_row(engine.tables)))
    assert_equal(*found)


def test_tables_that_are_dropped_stay_until_the_last_program_has_written_them(monkeypatch):
    events = []
    release = lambda library, records, last, wait: events.append(int(last[0].puts["width_4"][0]))
    monkeypatch.setattr(pinned, "release", release)
    state, _ = trained(PinnedTables.create(SPEC, ROWS), steps=3)
    del state
    gc.collect()
    until(lambda: events)
    assert events == [3]


def test_tables_may_be_collected_while_jax_captures_a_traceback():
    """Where Python collects inside of JAX, as 3.11 does, no other traceback may be captured there."""
    array, code = jnp.zeros(3), pinned.release.__code__
    before, thresholds = sys.getrefcount(code), gc.get_threshold()

    def deep(frames):
        return deep(frames - 1) if frames else jax.block_until_ready(array)

    deep(30)
    try:
        for allocations in range(1, 150):
            cycle = [PinnedTables.create(SPEC, ROWS)]
            cycle.append(cycle)
            gc.disable()
            gc.collect(0)
            del cycle
            gc.set_threshold(allocations)
            gc.enable()
            deep(30)
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
    gc.collect()
    deep(30)
    assert sys.getrefcount(code) >= before


# ---- compilation


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jaxrec"


def small_compiler(directory, script):
    """A compiler that is a shell script; $5 is its output, and it notes each of its calls."""
    path = directory / "cc"
    path.write_text(f"#!/bin/sh\necho called >> {directory}/calls\nfor last; do :; done\n{script}\n")
    path.chmod(0o755)
    return [str(path)]


def test_a_library_is_compiled_once_for_a_command_and_source(empty_cache, tmp_path, monkeypatch):
    command = small_compiler(tmp_path, 'echo library > "$last"')
    first = native.compiled(command)
    assert native.compiled(command) == first and first.read_text() == "library\n"
    assert native.compiled([*command, "-O1"]) != first
    changed = tmp_path / "changed.cu"
    changed.write_text(native.SOURCE.read_text() + "\n")
    monkeypatch.setattr(native, "SOURCE", changed)
    assert native.compiled(command) != first
    assert (tmp_path / "calls").read_text().count("called") == 3 and len(list(empty_cache.iterdir())) == 3


def test_a_compiler_that_fails_is_told_with_its_words_and_leaves_nothing(empty_cache, tmp_path):
    command = small_compiler(tmp_path, 'echo half > "$last"; echo no such header >&2; exit 1')
    with pytest.raises(OSError, match=r"cc.*failed: no such header\n.*--tables host"):
        native.compiled(command)
    assert list(empty_cache.iterdir()) == []


def _compile(cache, command, results):
    os.environ["XDG_CACHE_HOME"] = cache  # the server that forks may have begun before this test
    results.put(native.compiled(command).read_text())


@pytest.mark.process
def test_processes_that_compile_at_once_do_not_meet(tmp_path):
    """Each sees a whole library, though the compiler writes it in two halves."""
    command = small_compiler(tmp_path, 'echo one > "$last"; sleep 0.3; echo two >> "$last"')
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    processes = [context.Process(target=_compile, args=(str(tmp_path), command, results)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == ["one\ntwo\n"] * 3
    for process in processes:
        process.join()
    assert len(list((tmp_path / "jaxrec").iterdir())) == 1


def test_what_is_missing_to_compile_is_named(monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.raises(OSError, match=r"no C\+\+ compiler: install g\+\+, or keep the rows in HostTables"):
        native.cpu_command()
    with pytest.raises(OSError, match=r"no nvcc: pip install 'jax\[cuda13\]', or"):
        native.gpu_command("9.0")
    monkeypatch.setattr(native.shutil, "which", lambda name: name if name.endswith("nvcc") else None)
    with pytest.raises(OSError, match=r"nvcc needs g\+\+: install it, or"):
        native.gpu_command("9.0")
    with pytest.raises(NotImplementedError, match="the devices are tpu"):
        native.load(types.SimpleNamespace(platform="tpu"))


@pytest.mark.slow
def test_the_source_compiles_for_gpus_and_says_that_there_is_none(empty_cache):
    """With a CUDA toolkit, or `pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-nvvm nvidia-cuda-crt`."""
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("there is a GPU: see part `pinned` of on_accelerator.py")
    try:
        gpu = native.load(types.SimpleNamespace(platform="gpu", compute_capability="9.0"))
    except OSError as error:
        pytest.skip(str(error))
    memory = np.zeros(1024, np.float32)
    assert b"CUDA" in gpu.jaxrec_register(memory.ctypes.data, memory.nbytes)
    (path,) = empty_cache.iterdir()
    assert b"sm_90" in path.read_bytes()


# ---- where train.py keeps the rows


@pytest.mark.parametrize(("gb", "on_devices"), [(None, True), (1.9e-6, True), (1.8e-6, False)])
def test_rows_are_pinned_if_they_take_more_than_half_of_the_gpus(gb, on_devices, capsys):
    """Two devices; small_spec takes (36 * 4 + 24 * 1 + 60) * 4 B = 912 B with its slots."""
    stats = {"bytes_limit": (gb or 0) * 1e9 / 2}
    device = types.SimpleNamespace(memory_stats=lambda: stats, platform="gpu" if gb else "tpu")
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = types.SimpleNamespace(devices=np.array([device] * 2), axis_names=AXES, axis_types=auto)
    assert fits_devices(types.SimpleNamespace(spec=SPEC, row_optimizer=ROWS, mesh=mesh)) == on_devices
    said = capsys.readouterr().out
    assert said == "" if gb is None else ("on the devices" if on_devices else "pinned in host memory") in said
