"""Parts 2 and 3: OAC over the real link between host tables and the device.

`oac`: every mode and windows 1 to 16 in turns, several ways to send and fetch rows. Before that, the bandwidth of the
link alone, and whether oac is bitwise equal to sync on this device: with XLA's defaults, and with
--xla_gpu_deterministic_ops, each in a separate process. `sync_again` shows whether the device is deterministic at all;
`async` must differ, or nothing was stale and equality proves nothing. `oac_wide`: ten tables of width 128, ids by a
power law of exponent 1.05, as many rows as fit in half of the free memory, at most 64 GB.
"""

import functools
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from studies.oac_work import Work, turn
from studies.reference import Job
from studies.sides import Side

from accelerator.equality import equality
from accelerator.measure import Task, interval, last_line, over
from jaxrec.embedding import HostTables
from jaxrec.embedding.tables import empty_parts
from jaxrec.oac.stages import fetch_async, fetch_pinned

COUNTED = 10  # measured batches of a turn


def send_pinned(tree, placement):
    """Send to the device through pinned memory, which the device reads without a CPU copy."""
    pinned = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), placement)
    return jax.device_put(jax.device_put(tree, pinned), placement)


def fetch_plain(tree):
    """Fetch to the host leaf by leaf; the pipeline fetches by `fetch_pinned` from a GPU, else by `fetch_async`."""
    return jax.tree.map(np.asarray, tree)


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "sync": ("sync", {}),
    "oac_4": ("oac", {"window": 4}),
    "async_4": ("async", {"window": 4}),
    "semisync": ("semisync", {}),
    "oac_1": ("oac", {"window": 1}),
    "oac_2": ("oac", {"window": 2}),
    "oac_8": ("oac", {"window": 8}),
    "oac_16": ("oac", {"window": 16}),
    "oac_4_fetch_plain": ("oac", {"window": 4, "fetch": fetch_plain}),
    "oac_4_fetch_async": ("oac", {"window": 4, "fetch": fetch_async}),
    "oac_4_fetch_pinned": ("oac", {"window": 4, "fetch": fetch_pinned}),
    "oac_4_send_pinned": ("oac", {"window": 4, "send": send_pinned}),
}
SMOKE = ("sync", "oac_4", "async_4", "oac_4_fetch_pinned")
WIDE = ("sync", "oac_4", "async_4", "semisync", "oac_1", "oac_16", "oac_4_fetch_async", "oac_4_send_pinned")
EXACT = ("sync_again", "oac_1", "oac_16", "oac_4", "async_4")


def run(task: Task) -> None:
    """Measure part 2."""
    bandwidth(task)
    # Whether oac is bitwise equal to sync on this device.
    make = functools.partial(Exactness, batches=12 if task.smoke else 40)
    equality(task, "host", make, lambda side: compare(side, EXACT[:: 3 if task.smoke else 1]))
    sizes = (64,) if task.smoke else (16384, 4096, 65536, 2048)
    ways = {name: WAYS[name] for name in (SMOKE if task.smoke else WAYS)}

    def one(point, until):
        job = Job("host", 20_000 if task.smoke else 10_000_000, point["batch"], point["width"])
        time_pipelines(task, point, Work(job, _batches(ways)), ways, until)

    task.each([{"width": 16, "batch": size} for size in sizes], one)


def run_wide(task: Task) -> None:
    """Measure part 3."""
    width, number = 128, 10
    free = memory_available()
    rows = 2_000 if task.smoke else int(min(0.5 * free, 64e9) // (4 * (width + 1)))
    ways = {name: WAYS[name] for name in WIDE[: 3 if task.smoke else None]}
    kept: list[HostTables] = []  # shared by all points, as creating them takes long

    def create(spec, row_optimizer):
        if not kept:
            kept.append(filled_tables(spec, row_optimizer))
        return kept[0]

    def one(point, until):
        job = Job("host", rows // number * number, point["batch"], width, equal_tables=number)
        work = Work(job, _batches(ways), create=create)
        sizes = {"width": width, "rows": job.rows, "table_gb": round(4e-9 * job.rows * (width + 1), 2)}
        time_pipelines(task, point | {"tables": number} | sizes, work, ways, until)

    task.each([{"batch": size} for size in ((64,) if task.smoke else (16384, 4096, 65536))], one)


def _batches(ways):
    """Return how many batches give a turn of the widest window COUNTED batches in steady state."""
    return COUNTED + 3 + max(options.get("window", 0) for _, options in ways.values())


def memory_available() -> int:
    """Return the bytes that can be allocated without swapping."""
    for line in open("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise ValueError("/proc/meminfo does not say what memory is available: this part needs Linux.")


def filled_tables(spec, row_optimizer) -> HostTables:
    """Create host tables of random rows, shards in parallel."""
    layout = spec.layout(row_optimizer)
    shards = {
        name: [empty_parts(stack, layout[name]) for _ in range(spec.shards)] for name, stack in spec.stacks.items()
    }

    def fill(number, parts, rows=1 << 12):
        rng = np.random.default_rng(number)
        for start in range(0, len(parts["value"]), rows):
            chunk = parts["value"][start : start + rows]
            rng.random(out=chunk, dtype=np.float32)
            chunk -= 0.5
            chunk *= 0.02
        for slot, array in parts.items():
            if slot != "value":
                array[:] = 0.01

    every = [parts for stack in shards.values() for parts in stack]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, range(len(every)), every))
    return HostTables(spec, layout, shards)


def time_pipelines(task: Task, point: dict, work: Work, ways: dict, until: float) -> None:
    """Measure all ways of a job in turns: milliseconds per batch, and rates over sync and async."""
    made, turns = {}, {}
    for name, (mode, options) in ways.items():
        try:
            made[name] = work.pipeline(mode, **options)
            turn(made[name], work.batches[: _skip(made[name]) + 2], _skip(made[name]))  # compiles
        except Exception as error:  # a device may lack pinned memory, or memory for the widest ring
            if name in ("sync", "oac_4"):
                raise
            made.pop(name, None)
            task.leave_out(f"{name} at batch {point['batch']}", f"{type(error).__name__}: {last_line(error)}")
    for name, pipeline in made.items():
        batches = work.batches[: _skip(pipeline) + 1 + COUNTED]
        turns[name] = functools.partial(turn, pipeline, batches, _skip(pipeline))
    times = task.turns(turns, until)
    figures: dict[str, Any] = {f"{name}_ms": interval([1e3 * t for t in times[name]]) for name in times}
    figures["oac_4_examples_per_s"] = interval([work.job.batch_size / t for t in times["oac_4"]])
    for name in times:
        figures |= {f"{name}_rate_over_sync": over(times["sync"], times[name])} if name != "sync" else {}
        if name.startswith("oac") and "async_4" in times:
            figures[f"{name}_rate_over_async_4"] = over(times["async_4"], times[name])
        if name.startswith("oac_4_"):
            figures[f"{name}_rate_over_oac_4"] = over(times["oac_4"], times[name])
    counters = made["oac_4"].counters
    figures["stale_rows_share"] = counters["stale_rows"] / max(1, counters["rows"])
    figures["megabytes_a_batch"] = (counters["bytes_sent"] + counters["bytes_fetched"]) / counters["batches"] / 1e6
    task.row(point, figures)


def _skip(pipeline):
    return pipeline.window + 2


def bandwidth(task: Task) -> None:
    """Measure gigabytes per second over the link alone, each way, one array at a time."""
    device = jax.devices()[0]
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    for megabytes in (1,) if task.smoke else (1, 16, 256):
        ways: dict[str, Any] = {}
        for name, way in {
            "send_plain": functools.partial(_send, megabytes, None),
            "send_pinned": functools.partial(_send, megabytes, pinned),
            "fetch_plain": functools.partial(_fetch, megabytes, fetch_plain),
            "fetch_async": functools.partial(_fetch, megabytes, fetch_async),
            "fetch_pinned": functools.partial(_fetch, megabytes, fetch_pinned),
        }.items():
            try:
                way()
                ways[name] = way
            except Exception as error:
                task.leave_out(f"{name} of {megabytes} MB", f"{type(error).__name__}: {last_line(error)}")
        found = task.turns(ways, time.monotonic() + 0.02 * task.left())
        task.row({"link_megabytes": megabytes}, {f"{name}_gb_per_s": interval(rates) for name, rates in found.items()})


def _send(megabytes, by):
    array = _numbers(megabytes << 18)
    placed = array if by is None else jax.block_until_ready(jax.device_put(array, by))
    start = time.perf_counter()
    jax.block_until_ready(jax.device_put(placed, SingleDeviceSharding(jax.devices()[0])))
    return array.nbytes / 1e9 / (time.perf_counter() - start)


def _fetch(megabytes, fetch):
    # A new array each time: an array caches its host copy.
    array = jax.block_until_ready(_made(megabytes << 18, jnp.float32(1)))
    start = time.perf_counter()
    fetch(array)
    return array.nbytes / 1e9 / (time.perf_counter() - start)


@functools.lru_cache(maxsize=1)
def _numbers(size):
    return np.random.default_rng(0).random(size, dtype=np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _made(size, add):
    return jnp.arange(size, dtype=jnp.float32) + add


class Exactness:
    """A process that trains the same batches in several ways and compares every bit with sync."""

    def __init__(self, job: Job, batches: int):
        self.work = Work(job, batches)
        self.right, _ = self._train("sync", {})

    def _train(self, mode, options):
        work, tables = self.work, self.work.create()
        with work.pipeline(mode, tables=tables, **options) as pipeline:
            losses = np.array([metrics["loss"] for _, metrics in pipeline.run(work.batches)])
            dense = jax.tree.map(np.asarray, pipeline.state.dense)
        return {"loss": losses, "dense": dense, "rows": tables.shards}, pipeline.counters["stale_rows"]

    def compare(self, name: str) -> dict[str, Any]:
        """Compare losses, dense parameters, rows and slots of a way with sync: bitwise, and the largest difference."""
        mode, options = ("sync", {}) if name == "sync_again" else WAYS[name]
        found, stale = self._train(mode, options)
        worst, equal = 0.0, True
        for a, b in zip(jax.tree.leaves(self.right), jax.tree.leaves(found), strict=True):
            equal &= a.tobytes() == b.tobytes()
            worst = max(worst, float(np.max(np.abs(a.astype(np.float64) - b), initial=0.0)))
        return {"bitwise_equal": equal, "largest_difference": worst, "stale_rows": int(stale)}


def compare(side: Side, names: Iterable[str]) -> dict[str, Any]:
    """Compare ways with sync in a process of `Exactness`."""
    return {f"{name}_{key}": value for name in names for key, value in side.ask("compare", name).items()}
