"""Part `oac_streams`: OAC over tables in host memory that the GPU reads and writes itself, on streams of its own.

First, whether it gives the bits of steps in a row, for windows 1, 4 and 16, with an image and a lost shard in between,
with XLA's defaults and with --xla_gpu_deterministic_ops. Then DLRM-Kaggle at batch 16,384 over 10M rows of width 16 and
128, and ten tables of width 128 without a network, a million ids a batch, as in part `pinned`: steps in a row
(`sync`), and OAC with windows 1 to 64, all over the same tables, batches sent with each step. `device` is the same loop
over tables on the GPU, so that max(device, read + put) bounds what overlapping can reach.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from studies.reference import BATCHES, Job, reference_work, synthetic
from studies.sides import Failed, JaxSide, Side

from accelerator.equality import equality
from accelerator.link import memory_available
from accelerator.measure import Task, interval, last_line, over
from accelerator.pinned import EXPONENT, STEPS, lookups_alone, same_bits

WINDOWS = (1, 2, 4, 16, 64)


def run(task: Task) -> None:
    """Measure point after point."""
    equality(task, "pinned", Exactness, lambda side: side.ask("windows"))
    batch, rows = (64, 20_000) if task.smoke else (16384, 10_000_000)
    lookups = 10 * (2_000 if task.smoke else int(min(0.5 * memory_available(), 20e9) / (10 * 4 * 128)))
    points = [{"work": "dlrm", "width": width, "batch": batch, "rows": rows} for width in (128, 16)]
    points.append({"work": "ten_tables", "width": 128, "batch": 64 if task.smoke else 104_857, "rows": lookups})
    task.each(points, functools.partial(one, task))


def one(task: Task, point: dict, until: float) -> None:
    """Measure one point."""
    job = Job("pinned", point["rows"], point["batch"], point["width"])
    work: Callable = reference_work
    if point["work"] == "ten_tables":
        job, work = dataclasses.replace(job, equal_tables=10, exponent=EXPONENT), lookups_alone
    windows = WINDOWS[:3] if task.smoke else WINDOWS
    sides = {"pinned": Side(functools.partial(Streams, job, work, windows), start=False)}
    if not job.equal_tables:
        in_memory = dataclasses.replace(job, tables="device")
        sides["device"] = Side(functools.partial(Streams, in_memory, work, ()), start=False)
    task.row(point, compare(task, sides, windows, until))


def compare(task: Task, sides: dict[str, Side], windows: Sequence[int], until: float) -> dict[str, Any]:
    """Return the figures of steps in a row, of OAC with each window, and of the rows on the device if that fits."""
    try:
        for name, side in list(sides.items()):
            try:
                side.ready()
                side.ask("warm", windows if name == "pinned" else ())
            except Failed as error:
                if name == "pinned":
                    raise
                sides.pop(name).close()
                task.leave_out(name, last_line(error))
        ways: dict[Any, Any] = {
            window: functools.partial(sides["pinned"].ask, "run_in", (window, STEPS)) for window in (0, *windows)
        }
        if "device" in sides:
            ways["device"] = functools.partial(sides["device"].ask, "run_in", (0, STEPS))
        moved = functools.partial(sides["pinned"].ask, "transfers", 2 if task.smoke else 20)
        return _figures(task.turns(ways | {"transfers": moved}, until))
    finally:
        for side in sides.values():
            side.close()


def _figures(turns):
    moved, named = turns.pop("transfers"), {0: "sync", "device": "device"}
    times = {named.get(way, f"oac_{way}"): [seconds for seconds, _ in its] for way, its in turns.items()}
    found: dict[str, Any] = {f"{way}_ms": interval([1e3 * t for t in its]) for way, its in times.items()}
    found |= {f"{way}_over_sync": over(its, times["sync"]) for way, its in times.items() if way != "sync"}
    found |= {f"oac_{way}_rows_of_the_ring": its[0][1] for way, its in turns.items() if isinstance(way, int) and way}
    for name in ("plan", "read", "put"):
        found[f"{name}_ms"] = interval([1e3 * each[name] for each in moved])
    return found | {"unique_rows": moved[0]["rows"], "moved_gb": moved[0]["gb"]}


class Streams(JaxSide):
    """Steps in a row, and OAC with several windows, by turns over the same tables."""

    def __init__(self, job: Job, work, windows):
        from jaxrec.oac import Overlap

        super().__init__(job, work)
        self.steppings = {0: self.task} | {window: Overlap(self.task, window) for window in windows}

    def warm(self, windows) -> None:
        """Compile all, twice, as a capacity may grow meanwhile."""
        for window in (0, *windows) * 2:
            self.run_in((window, 3))

    def run_in(self, given: tuple[int, int]) -> tuple[float, float]:
        """Seconds per step with a window, once its ring is full; and the mean of the rows that the ring provides."""
        from jaxrec.embedding import capacity_of
        from jaxrec.engine import Serial

        (window, steps), counts = given, list[Any]()
        first = max(2, window)
        batches = (self.batches[i % BATCHES] for i in range(first + steps))
        note = lambda info: setattr(self, "capacity", capacity_of(info.plans, self.capacity))
        with Serial(self.steppings[window], self.state, [note], capacity=self.capacity) as engine:
            for _, metrics in engine.run(batches):
                if len(counts) == first - 1:
                    jax.block_until_ready(engine.state.dense)
                    start = time.perf_counter()
                counts.append(metrics.get("patched_rows", 0))
            jax.block_until_ready((engine.state.dense, metrics))
            seconds = (time.perf_counter() - start) / steps
            self.state = engine.state
        return seconds, float(np.mean([int(count) for count in counts[first:]]))


class Exactness:
    """A process that compares OAC with steps in a row."""

    def __init__(self, job: Job):
        self.job = job

    def windows(self, _=None) -> dict[str, Any]:
        """Losses, dense parameters and rows of some windows: are they those of steps in a row?"""
        from jaxrec.oac import Overlap

        task, params = reference_work(self.job)
        wanted, again = (self._trained(task, task.init(params, "pinned")) for _ in range(2))
        found = {"sync_again_bitwise_equal": same_bits(wanted, again)}
        for window in (1, 4, 16):
            stepping = Overlap(task, window)
            its = self._trained(stepping, task.init(params, "pinned"))
            found[f"oac_{window}_bitwise_equal"] = same_bits(its, wanted)
        return found

    def _trained(self, stepping, state):
        from jaxrec.embedding import embedding_matrix
        from jaxrec.engine import Serial

        def lose_and_restore(tables):
            for name, parts in image.items():
                tables = tables.with_shard(name, 1, parts)
            return tables

        image, losses = {}, []
        with Serial(stepping, state) as engine:
            for _, metrics in engine.run(synthetic(self.job, 2 * STEPS)[1]):
                losses.append(metrics["loss"])
                if engine.step == STEPS - 3:
                    spec, parts = engine.tables.spec, engine.tables.parts
                    image = {s: {part: of[1].copy() for part, of in parts(s).items()} for s in spec.stacks}
                if engine.step == STEPS:
                    engine.exclusive(lose_and_restore)
            rows = [embedding_matrix(engine.tables, name) for name in engine.tables.spec.tables]
            return jax.tree.map(np.asarray, (losses, engine.state.dense.params, rows))
