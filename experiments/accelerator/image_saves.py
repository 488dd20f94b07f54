"""Part 5: saving and restoring beside training: blocking time, duration, and slowdown of the steps.

Each way starts an operation and trains on until it is done: `full` saves an image (Checkpointer), `rows` an eighth of
the rows over it (RowCheckpointer), `restore` restores one shard of 8 into other tables of the same placement, from
files just written. `stall_s` is how long training is blocked, `seconds` how long until all is on disk (or restored),
`rate_beside_over_alone` the step rate meanwhile over that of `alone`. `restore_idle_seconds` is without training beside
it.
"""

import functools
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from studies.reference import Job
from studies.shadow_work import TimedTrainer

from accelerator.measure import Task, interval, over
from jaxrec.checkpoint import Checkpointer, RowCheckpointer, images, restore_shards
from jaxrec.embedding import create_tables

FRACTION = 1 / 8  # of the rows, in a save of rows
CHUNK = 5  # steps between two checks for completion


def run(task: Task) -> None:
    """Measure both placements of the rows."""
    sizes = (("host", 0.002), ("device", 0.002)) if task.smoke else (("host", 1.0), ("device", 1.0), ("device", 8.0))

    def one(point, until):
        rows = int(point["table_gb"] * 1e9 / (4 * (16 + 1)))
        with tempfile.TemporaryDirectory(prefix="jaxrec-saves-") as directory:
            free = shutil.disk_usage(directory).free
            if free < 4e9 * point["table_gb"]:
                raise ValueError(f"{directory} has {free / 1e9:.1f} GB free: 4 times the tables are needed.")
            job = Job(point["tables"], rows, 64 if task.smoke else 4096)
            found = task.turns(SavesInTurns(job, Path(directory), task.smoke).ways, until)
        task.row(point | {"rows": rows, "batch": job.batch_size}, figures_of_saves(found))

    task.each([{"tables": home, "table_gb": size} for home, size in sizes], one, cost="table_gb")


class SavesInTurns:
    """A trainer, a directory for its images, and the operations measured beside its steps."""

    def __init__(self, job: Job, directory: Path, smoke: bool):
        self.trainer, self.directory, self.number = TimedTrainer(job), directory, 0
        self.spec, self.row_optimizer = self.trainer.spec, self.trainer.task.row_optimizer
        self.target = create_tables(job.tables, self.spec, self.row_optimizer)  # what a shard is restored into
        self.steps = 4 if smoke else 40
        self.rng = np.random.default_rng(0)
        self.trainer.run(CHUNK)  # compiles
        self.ways: dict[str, Callable] = {
            "alone": self.alone,
            "full": self.full,
            "rows": self.rows,
            "restore": self.restore,
        }
        self.ways["restore_idle"] = self.restore_idle
        for way in self.ways.values():  # compiles, and makes the first image
            way()

    def alone(self) -> dict[str, float]:
        """Measure the step rate with nothing beside it."""
        start = time.perf_counter()
        for _ in range(-(-self.steps // CHUNK)):
            self.trainer.run(CHUNK)
        return {"steps_per_s": CHUNK * -(-self.steps // CHUNK) / (time.perf_counter() - start)}

    def full(self) -> dict[str, float]:
        """Save a whole image, in a new directory."""
        shutil.rmtree(self.directory / str(self.number), ignore_errors=True)
        self.number += 1
        self.images = self.directory / str(self.number)
        with Checkpointer(self.images) as saver:
            return self._save(saver, functools.partial(saver.save, self.trainer.state))

    def rows(self) -> dict[str, float]:
        """Save random rows over the image."""
        rows = {
            (name, shard): shard + stack.shards * np.sort(self._draw(stack.rows_per_shard))
            for name, stack in self.spec.stacks.items()
            for shard in range(stack.shards)
        }
        rows = {key: ids[ids < self.spec.stacks[key[0]].rows] for key, ids in rows.items()}
        with RowCheckpointer(self.images, images(self.images)[0]) as saver:
            step = int(self.trainer.state.dense.step)
            return self._save(saver, functools.partial(saver.save, self.trainer.state.tables, rows, step))

    def _draw(self, rows):
        return self.rng.choice(rows, int(FRACTION * rows), replace=False).astype(np.int32)

    def _save(self, saver, begin) -> dict[str, float]:
        before, stalled = _size(self.images), saver.stall_seconds
        jax.block_until_ready(self.trainer.state.dense)
        begin()
        stall = saver.stall_seconds - stalled
        found = self._beside(saver.wait)
        return found | {
            "stall_s": stall,
            "seconds": stall + found["seconds"],
            "megabytes": (_size(self.images) - before) / 1e6,
        }

    def restore(self) -> dict[str, float]:
        """Restore one shard beside training."""
        return self._beside(self.restore_idle)

    def restore_idle(self) -> dict[str, float]:
        """Restore one shard with nothing beside it."""
        start = time.perf_counter()
        path, shard = images(self.images)[0], self.number % self.spec.shards
        self.target, _ = restore_shards(path, self.target, [shard])
        if self.trainer.job.tables == "device":
            jax.block_until_ready(self.target)
        return {"seconds": time.perf_counter() - start}

    def _beside(self, job: Callable) -> dict[str, float]:
        """Train until a job in a thread is done; raises what the job raises."""
        steps, start = 0, time.perf_counter()

        def timed():
            job()
            return time.perf_counter() - start

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(timed)
            while not steps or not done.done():
                self.trainer.run(CHUNK)
                steps += CHUNK
            return {"seconds": done.result(), "steps_per_s": steps / (time.perf_counter() - start)}


def figures_of_saves(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return medians of every way, and its step rates over that of `alone`."""
    result: dict[str, Any] = {}
    alone = [each["steps_per_s"] for each in found["alone"]]
    for way, rounds in found.items():
        for key in rounds[0]:
            result[f"{way}_{key}"] = interval([each[key] for each in rounds])
        if way != "alone" and "steps_per_s" in rounds[0]:
            result[f"{way}_rate_beside_over_alone"] = over([each["steps_per_s"] for each in rounds], alone)
    return result


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) if directory.exists() else 0
