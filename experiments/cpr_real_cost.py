"""Measured cost of saving and restoring: whole images, prioritised rows and single shards, against plain Orbax.

    python experiments/cpr_real_cost.py                  1 GB of tables; 14 minutes
    python experiments/cpr_real_cost.py --table-mb 4000  about four times that in memory, twice on the disk

CPR (arXiv 2011.02999) takes the costs of a checkpoint as given. Claim: one shard is restored in at most 1/5 of the time
of all, rows are saved in at most 1/4 of the time of a full Orbax save, with a stall of at most 3 % of the fastest
blocking save. All methods (`SaveWork`) save the same tables of DLRM-Kaggle in interleaved rounds. `*_stall_s`: for how
long a save blocks training; `*_save_s`: until all is on disk; `*_flush_s`: to flush what the system had not written
yet. Restores read the page cache: `*_of_base_*` the whole image alone, others with the deltas over it. Result:
results/two_cores_cpu/cpr_real_cost.json.
"""

import dataclasses
import functools
import os
import shutil
import statistics
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from accelerator.measure import interval
from main.cli import Figure, Flags, Run, bars, command_line, grid, listing
from main.report import figures, said
from studies import reference
from tqdm import tqdm

from jaxrec.checkpoint import (
    Checkpointer,
    RowCheckpointer,
    images,
    restore,
    restore_shards,
    snapshot,
    write_image,
)  # fmt: skip
from jaxrec.cpr import Recovery
from jaxrec.cpr.priority import budget_rows, mfu, ssu
from jaxrec.embedding import host_plan
from jaxrec.engine import Serial
from jaxrec.loop import keep_memory


@dataclasses.dataclass(frozen=True)
class Config(Flags):
    """Flags of the benchmark."""

    table_mb: float = 1000
    """Size of rows and slots, in 10^6 bytes."""
    fraction: float = 0.125
    """r, the fraction of the rows of every shard to save."""
    deltas: int = 4
    """Deltas in the chain from which a shard is restored."""


def clock(function: Callable, *args) -> tuple[float, Any]:
    """Call a function; return (seconds, result)."""
    start = time.perf_counter()
    out = function(*args)
    return time.perf_counter() - start, out


def bytes_in(directory: Path) -> int:
    """Total bytes of all files in a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


class SaveWork:
    """A state to save, its access counts, and all methods to save and restore it.

    orbax_standard       ocp.StandardCheckpointer, asynchronous, as Orbax advises
    orbax_pytree         ocp.PyTreeCheckpointer, blocking
    orbax_pytree_async   ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    full                 Checkpointer, asynchronous; Orbax inside, checksums, everything flushed
    full_blocking        write_image(snapshot(...))
    rows                 RowCheckpointer of r V / S rows per shard, which MFU picks; its stall is their copy
    recovery             the same rows, saved by `Recovery` every 16 steps; its stall is its callback at a save

    MFU counts accesses drawn from a power law and uniform ones, so that the budget of r = 0.125 is always full. Orbax
    compresses, which saves a fifth of the bytes here (all slots are equal); jaxrec does not.
    """

    def __init__(self, config: Config, directory: Path):
        rows = int(config.table_mb * 1e6 / (4 * (16 + 1)))
        of_reference = reference.Job(rows=rows, batch_size=2048, seed=config.seed)
        self.clicks, batches = reference.synthetic(of_reference)
        self.task, params = reference.reference_work(of_reference)
        self.spec, self.state = self.task.spec, self.task.init(params, "host")
        ((self.stack, stack),) = self.spec.stacks.items()
        self.budget = budget_rows(stack.rows_per_shard, config.fraction)
        self.directory, self.step = directory, 0
        self.rng = np.random.default_rng(config.seed)
        self.batches = batches
        self.plans = [host_plan(self.spec, batch.ids)[self.stack] for batch in batches]
        self.mfu, self.config = mfu(), config
        self.tracker = self.mfu.init(self.values(), self.budget)
        tables = self.state.tables.shards
        self.orbax_state = {"dense": jax.tree.map(np.asarray, self.state.dense._asdict()), "tables": tables}

    def values(self) -> list[np.ndarray]:
        """The embedding rows of each shard."""
        return [parts["value"] for parts in self.state.tables.shards[self.stack]]

    def track_ms(self, scheme) -> float:
        """Mean milliseconds to track a batch."""
        tracker, times = scheme.init(self.values(), self.budget), []
        for plan in self.plans * 3:
            start = time.perf_counter()
            tracker = scheme.touch(tracker, plan)
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.mean(times[2:])

    def train(self) -> None:
        """Count accesses of the batches and of a uniform one, which fills any budget, and change all rows."""
        self.step += 1
        for plan in self.plans:
            self.tracker = self.mfu.touch(self.tracker, plan)
        self.tracker = self.mfu.touch(self.tracker, self.uniform_plan())
        for parts in self.state.tables.shards[self.stack]:
            for array in parts.values():  # Orbax compresses, so every save gets new values
                array += 0.001

    def uniform_plan(self):
        """Plan of as many uniform ids as there are rows, which touch more rows than any budget."""
        limit = self.spec.columns_of("sparse")[1]
        size = self.spec.stacks[self.stack].rows // len(limit)
        ids = self.rng.integers(0, limit, (size, len(limit)), dtype=np.int32)
        return host_plan(self.spec, {"sparse": ids})[self.stack]

    def train_with_recovery(self, saves: int, steps: int = 16) -> dict[str, float]:
        """Train for real with a prioritised save every `steps` steps; return mean stall of a save and step time."""
        path, times, fraction = self.fresh("recovery"), [], self.config.fraction
        total = saves * steps

        def timed_step(state, batch, plans):
            start = time.perf_counter()
            found = jax.block_until_ready(self.task.step(state, batch, plans))
            times.append(time.perf_counter() - start)
            return found

        def fill_budget(info):
            if info.step % steps == 1:
                info.plans[self.stack] = self.uniform_plan()

        state = self.state._replace(dense=self.state.dense._replace(step=np.int32(0)))
        numbers = [number % len(self.batches) for number in range(1, total + 1)]
        timed: Any = types.SimpleNamespace(step=timed_step)
        recovery = Recovery(path, steps / fraction, total, scheme=mfu(), fraction=fraction, save_at_end=False)
        with Serial(timed, state, [fill_budget, recovery]) as engine:
            engine.train(self.batches[at] for at in numbers)
            stall, saved = recovery.stall_seconds / recovery.saves, recovery.rows_saved / recovery.saves
        self.state = engine.state
        shutil.rmtree(path)
        step_ms = 1e3 * statistics.median(times)
        return {"recovery_stall_s": stall, "recovery_rows_saved": saved, "train_step_ms": step_ms}

    def pick(self):
        """Rows to save, {(stack, shard): i32[n]}, and the pick."""
        rows, self.tracker = self.mfu.pick(self.tracker, self.budget, self.values())
        pick, self.tracker = self.mfu.copied(self.tracker, rows, self.values())
        return {(self.stack, shard): mine for shard, mine in enumerate(rows)}, pick

    def fresh(self, name: str) -> Path:
        """Path of a directory that does not exist, on a flushed disk."""
        path = self.directory / name
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
        return path

    def measured(self, name: str, stall: float, path: Path, wait: Callable) -> dict[str, float]:
        """Wait for a save and flush it; return its stall, duration and bytes."""
        start = time.perf_counter()
        wait()
        save = stall + time.perf_counter() - start
        flush, _ = clock(os.sync)
        found = {"stall_s": stall, "save_s": save, "flush_s": flush, "mb": bytes_in(path) / 1e6}
        return {f"{name}_{key}": value for key, value in found.items()}

    def save_orbax(self, name: str) -> dict[str, float]:
        """One full save and one full restore by plain Orbax."""
        make: dict[str, Callable] = {
            "orbax_standard": ocp.StandardCheckpointer,
            "orbax_pytree": ocp.PyTreeCheckpointer,
            "orbax_pytree_async": lambda: ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
        }
        path = self.fresh(name)
        with make[name]() as orbax:
            stall, _ = clock(orbax.save, path.resolve(), self.orbax_state)
            wait = getattr(orbax, "wait_until_finished", lambda: None)
            found = self.measured(name, stall, path, wait)
            found[f"{name}_restore_s"], _ = clock(orbax.restore, path.resolve())
        shutil.rmtree(path)
        return found

    def save_full(self, blocking: bool) -> dict[str, float]:
        """One full save by jaxrec."""
        if blocking:
            path = self.fresh("full_blocking")
            stall, _ = clock(lambda: write_image(path / "step_1", snapshot(self.state)))
            found = self.measured("full_blocking", stall, path, lambda: None)
            shutil.rmtree(path)
            return found
        path = self.fresh("full")
        with Checkpointer(path) as saver:
            stall = saver.save(self.state)
            return self.measured("full", stall, path, saver.wait)

    def save_rows(self, number: int) -> dict[str, float]:
        """`number` prioritised saves over the image of `save_full`; full and single-shard restores."""
        path, found, sums = self.directory / "full", [], {}
        (base,) = images(path)
        with RowCheckpointer(path, base, most_deltas=number) as saver:
            for _ in range(number):
                self.train()
                os.sync()
                before = bytes_in(path)
                pick_s, (rows, pick) = clock(self.pick)
                stall = saver.save(self.state.tables, rows, self.step, dense=self.state.dense)
                sums = self.measured("rows", stall, path, saver.wait)
                self.tracker = self.mfu.saved(self.tracker, pick)
                sums |= {"rows_pick_s": pick_s}
                sums |= {"rows_mb": (bytes_in(path) - before) / 1e6, "rows_saved": sum(map(len, rows.values()))}
                found.append(sums)
            tip = saver.newest()
        results = {key: statistics.median(row[key] for row in found) for key in sums}
        shard = self.step % self.spec.shards
        for chain, image in (("_of_base", base), ("", tip)):
            results[f"full{chain}_restore_s"], _ = clock(restore, image, self.state)
            results[f"one_shard{chain}_restore_s"], _ = clock(restore_shards, image, self.state.tables, [shard])
        shutil.rmtree(path)
        return results


def ratios(rows: list[dict[str, float]]) -> dict[str, float]:
    """Target ratios within each round, formatted by `ratio`."""
    column = lambda key: np.array([row[key] for row in rows])
    orbax = np.min([column(f"{name}_save_s") for name in ORBAX], axis=0)
    orbax_restore = np.min([column(f"{name}_restore_s") for name in ORBAX], axis=0)
    blocking = np.minimum(column("orbax_pytree_save_s"), column("full_blocking_save_s"))
    pairs = {
        "one_shard_over_full_restore": column("one_shard_restore_s") / column("full_restore_s"),
        "one_shard_of_base_over_full_of_base_restore": (
            column("one_shard_of_base_restore_s") / column("full_of_base_restore_s")
        ),
        "one_shard_over_full_of_base_restore": column("one_shard_restore_s") / column("full_of_base_restore_s"),
        "one_shard_over_orbax_restore": column("one_shard_restore_s") / column("orbax_standard_restore_s"),
        "full_of_base_over_fastest_orbax_restore": column("full_of_base_restore_s") / orbax_restore,
        "rows_over_fastest_orbax_save": column("rows_save_s") / orbax,
        "rows_over_orbax_standard_save": column("rows_save_s") / column("orbax_standard_save_s"),
        "recovery_stall_over_orbax_blocking_save": column("recovery_stall_s") / column("orbax_pytree_save_s"),
        "recovery_stall_over_fastest_blocking_save": column("recovery_stall_s") / blocking,
        "full_stall_over_fastest_blocking_save": column("full_stall_s") / blocking,
        "full_over_orbax_standard_save": column("full_save_s") / column("orbax_standard_save_s"),
    }
    return {key: value for name, values in pairs.items() for key, value in reference.ratio(name, values).items()}


ORBAX = ("orbax_standard", "orbax_pytree", "orbax_pytree_async")
WAYS = (*ORBAX, "full", "full_blocking", "full_of_base", "rows", "recovery", "one_shard", "one_shard_of_base")


def table(results: dict[str, Any]) -> str:
    """Format seconds and bytes of all methods, then the target ratios, then the state."""
    heads = {"stall, s": "stall_s", "saved after, s": "save_s", "still to flush, s": "flush_s", "MB": "mb"}
    heads |= {"restored after, s": "restore_s", "rows": "saved", "to pick them, s": "pick_s"}
    columns = {head: f"{{}}_{key}" for head, key in heads.items()}
    shown = {column.format(way) for column in columns.values() for way in WAYS}
    rest = {key: value for key, value in results.items() if key not in shown}
    words = {way.replace("_", " "): way for way in WAYS}
    groups = {"Ratios, within a round": [key for key in rest if "_over_" in key], "Work": [""]}
    return grid(results, "way", words, columns) + "\n\n" + listing(rest, groups)


def finding(results: Mapping[str, Any]) -> str:
    """Title of the plot."""
    found = figures(results)
    return (
        f"Saving the most used rows takes {said(found['rows_over_fastest_orbax_save'])} of the time of Orbax's fastest "
        f"full save; restoring one shard {said(found['one_shard_over_full_restore'])} of that of a full restore"
    )


def draw(run: Run, rows: list[dict[str, float]], results: dict[str, Any]) -> None:
    """Plot the save time and the stall of each method: medians over the rounds, with intervals."""

    def figure(key):
        found = interval([row[key] for row in rows])
        return Figure(found["median"], found["low"], found["high"])

    names = [*ORBAX, "full", "full_blocking", "rows"]
    series = {
        words: {name.replace("_", " "): figure(f"{name}_{what}_s") for name in names}
        for words, what in (("until saved", "save"), ("training waits", "stall"))
    }
    bars(run.directory / "saves.png", {"seconds": series}, finding(results))


def main(config: Config) -> dict:
    """Run all methods in interleaved rounds and return the contents of results.json."""
    rounds = 1 if config.preset == "smoke" else 24
    if config.preset == "smoke":
        config = dataclasses.replace(config, table_mb=min(config.table_mb, 50), deltas=2)
    keep_memory()  # before JAX starts its threads
    run = Run("cpr_real_cost", config, config.workdir)
    directory = run.directory / "files"
    work = SaveWork(config, directory)
    results: dict[str, Any] = {
        "tables_mb": sum(a.nbytes for parts in work.state.tables.shards[work.stack] for a in parts.values()) / 1e6,
        "rows_of_table": work.spec.stacks[work.stack].rows,
        "rows_of_a_batch": float(np.mean([plan.count.sum() for plan in work.plans])),
        "mfu_touch_ms": work.track_ms(mfu()),
        "ssu_touch_ms": work.track_ms(ssu()),
    }
    ways = [functools.partial(work.save_orbax, name) for name in ORBAX]
    ways += [functools.partial(work.save_full, blocking) for blocking in (True, False)]
    ways += [functools.partial(way, config.deltas) for way in (work.save_rows, work.train_with_recovery)]
    rows: list[dict[str, float]] = []
    for number in tqdm(range(rounds + 1), desc="rounds", unit="round", disable=None):
        work.train()
        found: dict[str, float] = {}
        for way in ways:
            found |= way()
        if number:  # the first round compiles and fills caches
            rows.append(found)
            run.log(found)
    shutil.rmtree(directory)
    results |= {key: statistics.median(row[key] for row in rows) for key in rows[0]} | ratios(rows)
    draw(run, rows, results)
    run.close(results, table(results))
    return results


if __name__ == "__main__":
    command_line(main, Config, __doc__)
