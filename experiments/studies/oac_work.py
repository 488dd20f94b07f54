"""The reference workload over host tables in a pipeline of any mode, and an EMULATED link between host and device.

Timed by oac_throughput.py and on_accelerator.py.

Legend: W window.
"""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrec.embedding import HostTables, Tables, capacity_of, plan
from jaxrec.loop import keep_memory
from jaxrec.oac import Pipeline, ring
from jaxrec.oac.options import nbytes
from jaxrec.types import TrainState
from studies.reference import Job, reference_work, synthetic

MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "semisync": {"mode": "semisync"},
    "async": {"mode": "async"},
    "oac": {"mode": "oac"},
}
# Emulated links: the bytes of which directions take how many times as long as the compute of a batch.
LINKS: dict[str, tuple[Callable, float]] = {"balanced": (sum, 1.0), "link": (max, 1.5), "compute": (sum, 0.25)}


class Work:
    """The job, its batches, and the time of each stage alone."""

    def __init__(self, job: Job, number: int, window: int = 4, create: Callable = HostTables.create):
        keep_memory()
        if job.precision != "default":
            jax.config.update("jax_default_matmul_precision", job.precision)
        self.job, self.window = job, window
        _, self.batches = synthetic(job, number)
        self.task, self.params = reference_work(job)
        self.spec = self.task.spec
        self.create = functools.partial(create, self.spec, self.task.row_optimizer)
        self.tables = self.create()

    def state(self, tables: Tables | None = None) -> TrainState:
        """An initial state over `tables`, or over the shared tables if None."""
        return self.task.init(self.params, tables or self.tables)

    def pipeline(self, mode: str, tables: Tables | None = None, **options) -> Pipeline:
        """A pipeline in one of MODES, with its own dense state; over the shared tables if `tables` is None."""
        options = MODES[mode] | options
        if options["mode"] in ("async", "oac"):
            options.setdefault("window", self.window)
        return Pipeline(self.task, self.state(tables), loaders=3, fetchers=2, **options)

    def stages_ms(self, repeats: int) -> dict[str, float]:
        """Median milliseconds of every stage alone."""
        window, tables = self.window, self.tables
        held, capacity, size = None, None, {name: stack.rows_per_shard for name, stack in tables.spec.stacks.items()}
        dense = self.state().dense
        update = jax.jit(self.task.checked_update, donate_argnums=0)
        append = jax.jit(ring.append, donate_argnums=0)

        @jax.jit
        def replay(held, rows, plans, number):
            return ring.replay(held, rows, ring.validate(held, plans, number))

        times: dict[str, list[float]] = {
            name: [] for name in ("plan", "gather", "replay", "update", "append", "write_back")
        }

        def timed(name, function, *args):
            start = time.perf_counter()
            out = jax.block_until_ready(function(*args))
            times[name].append(1e3 * (time.perf_counter() - start))
            return out

        for number, batch in enumerate(self.batches[:repeats]):
            plans = timed("plan", plan, tables.spec, batch.ids, capacity)
            capacity = capacity_of(plans)
            read = timed("gather", tables.read, plans)
            inputs, rows = jax.device_put((plans, batch)), jax.device_put(read)
            held = ring.init(rows, size, window) if held is None else held
            right = timed("replay", replay, held, rows, inputs[0], number)
            dense, new, _ = timed("update", update, dense, right, *inputs)
            held = timed("append", append, held, inputs[0], new, number)
            timed("write_back", tables.put, plans, new)
        return {name: float(np.median(values[2:])) for name, values in times.items()}


def turn(pipeline: Pipeline, batches: list, skip: int) -> float:
    """Steady-state seconds per batch of one run, timed from batch `skip` to the last one.

    The stream continues after the last batch, and what is in flight then is dropped: otherwise the last batches would
    be trained while nothing is planned, gathered or sent, which flatters the modes that do so ahead.
    """
    if len(batches) < skip + 2:
        raise ValueError(f"{len(batches)} batches leave none to count after the first {skip}: give {skip + 2}.")
    start = end = 0.0
    for index, (_, metrics) in enumerate(pipeline.run(itertools.cycle(batches))):
        if index == skip:
            jax.block_until_ready(metrics)
            start = time.perf_counter()
        if index == len(batches) - 1:
            jax.block_until_ready(metrics)
            end = time.perf_counter()
            break
    pipeline.close()
    return (end - start) / (len(batches) - 1 - skip)


class EmulatedLink:
    """A full-duplex channel between host and device: its time is slept, its bytes are those of the arrays.

    Attributes:
      passed: {"send": bytes, "fetch": bytes}, transferred so far.
    """

    def __init__(self, bytes_per_s: float, latency_s: float):
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        self.lock, self.free_at = threading.Lock(), {"send": 0.0, "fetch": 0.0}
        self.passed = {"send": 0, "fetch": 0}

    def pass_time(self, direction: str, tree) -> None:
        """Sleep until these bytes have been transferred, after all earlier ones in this direction."""
        size = nbytes(tree)
        with self.lock:
            self.passed[direction] += size
            start = max(time.perf_counter(), self.free_at[direction])
            self.free_at[direction] = start + size / self.bytes_per_s
            until = self.free_at[direction] + self.latency_s
        time.sleep(max(0.0, until - time.perf_counter()))

    def send(self, tree, placement):
        """Transfer a tree to the device."""
        self.pass_time("send", tree)
        return jax.device_put(tree, placement)

    def fetch(self, tree):
        """Transfer a tree to the host once the device has computed it."""
        jax.block_until_ready(tree)
        self.pass_time("fetch", tree)
        return jax.tree.map(np.asarray, tree)


def compute_ms(stages: Mapping[str, float]) -> float:
    """Milliseconds that the device computes for a batch, of `Work.stages_ms`."""
    return stages["replay"] + stages["update"] + stages["append"]


def bytes_per_s(regime: str, compute_ms: float, size: Mapping[str, float]) -> float:
    """Bandwidth of a link of LINKS.

    Args:
      compute_ms: of a batch.
      size: bytes of a batch in each direction.

    >>> [bytes_per_s(regime, 10.0, {"send": 3e6, "fetch": 2e6}) for regime in ("balanced", "link")]
    [500000000.0, 200000000.0]
    """
    directions, times = LINKS[regime]
    return directions(size.values()) / (times * compute_ms / 1e3)


def bytes_a_batch(work: Work, number: int) -> dict[str, float]:
    """Bytes per batch that OAC passes to `send` and `fetch`: padded rows and batch inputs.

    Args:
      work: its first `number` batches are trained once each.
      number: number of batches.

    Returns:
      {'send': bytes, 'fetch': bytes}.
    """
    meter = EmulatedLink(float("inf"), 0.0)
    with work.pipeline("oac", send=meter.send, fetch=meter.fetch) as pipeline:
        for _ in pipeline.run(itertools.islice(work.batches, number)):
            pass
    return {way: size / number for way, size in meter.passed.items()}
