"""Part `pinned`: tables in host memory that the GPU reads and writes itself, within the program of a step.

First, whether reads and puts give the host's bits, and how far twelve steps are from those over tables on the device,
with XLA's defaults and with --xla_gpu_deterministic_ops. Then DLRM-Kaggle at batch 16,384 over 10M rows, batches sent
with each step: pinned tables, tables on the device, and, where FBGEMM is installed, its tables in host memory (UVM),
alone and with a cache of a fifth of the rows, the dense part under torch.compile. Last, ten tables of width 128 without
a network, under SGD, a million ids a batch: the work of NVIDIA's DynamicEmb benchmark, over as many rows as fit in half
of the free memory, at most 20 GB. The rates count the bytes of rows and slots, not those of the records' padding.
"""

import dataclasses
import functools
import importlib.util
from typing import Any

import jax
import numpy as np
from studies.reference import Job, synthetic
from studies.sides import Failed, JaxSide, Side, TorchSide

from accelerator.equality import equality
from accelerator.link import memory_available
from accelerator.measure import Task, interval, last_line, over

FBGEMM = ("fbgemm_uvm", "fbgemm_uvm_cached")
STEPS = 12
TRANSFERS = 20  # programs of a kind in a row
EXPONENT = 1.01  # of the ids of the ten tables: 43 % of a batch's are distinct over 39 million rows


def run(task: Task) -> None:
    """Measure point after point."""
    equality(task, "pinned", Exactness, lambda side: side.ask("rows") | side.ask("steps"))
    batch, rows = (64, 20_000) if task.smoke else (16384, 10_000_000)
    lookups = 10 * (2_000 if task.smoke else int(min(0.5 * memory_available(), 20e9) / (10 * 4 * 128)))
    points = [{"work": "dlrm", "width": width, "batch": batch, "rows": rows} for width in (16, 128)]
    points.append({"work": "ten_tables", "width": 128, "batch": 64 if task.smoke else 104_857, "rows": lookups})

    def one(point, until):
        job = Job("pinned", point["rows"], point["batch"], point["width"])
        if point["work"] == "ten_tables":
            job = dataclasses.replace(job, equal_tables=10, exponent=EXPONENT)
        task.row(point, measure(task, job, until))

    task.each(points, one)


def measure(task: Task, job: Job, until: float) -> dict[str, Any]:
    """Return the figures of one point."""
    work = {"work": lookups_alone} if job.equal_tables else {}
    sides = {"pinned": Side(functools.partial(JaxSide, job, **work), start=False)}
    if not job.equal_tables:
        sides["device"] = Side(functools.partial(JaxSide, dataclasses.replace(job, tables="device")), start=False)
        sides |= {name: Side(functools.partial(TorchSide, job, name, "cuda"), start=False) for name in peers(task)}
    try:
        for name, side in list(sides.items()):
            try:
                side.ready()
                for _ in range(2):  # twice, as a capacity that has grown meanwhile compiles once more
                    side.ask("run", 3)
            except Failed as error:
                if name == "pinned":
                    raise
                sides.pop(name).close()
                task.leave_out(name, last_line(error))
        ways = {name: functools.partial(side.ask, "run", STEPS) for name, side in sides.items()}
        moved = functools.partial(sides["pinned"].ask, "transfers", 2 if task.smoke else TRANSFERS)
        return _figures(job, task.turns(ways | {"transfers": moved}, until))
    finally:
        for side in sides.values():
            side.close()


def peers(task: Task) -> tuple[str, ...]:
    """Return the variants of FBGEMM that this machine has."""
    if jax.default_backend() != "cpu" and importlib.util.find_spec("fbgemm_gpu") is not None:
        return FBGEMM
    task.leave_out("FBGEMM", "there is no GPU, or fbgemm_gpu is not installed")
    return ()


def _figures(job, turns):
    moved = turns.pop("transfers")
    found: dict[str, Any] = {f"{way}_ms": interval([1e3 * t for t in times]) for way, times in turns.items()}
    found |= {f"{way}_over_pinned": over(times, turns["pinned"]) for way, times in turns.items() if way != "pinned"}
    found["pinned_examples_per_s"] = interval([job.batch_size / t for t in turns["pinned"]])
    for name in ("plan", "read", "put"):
        found[f"{name}_ms"] = interval([1e3 * each[name] for each in moved])
    for name in ("read", "put"):
        found[f"{name}_gb_per_s"] = interval([each["gb"] / each[name] for each in moved])
    return found | {"unique_rows": moved[0]["rows"], "moved_gb": moved[0]["gb"]}


def lookups_alone(job: Job):
    """The work of `reference_work` without a network: half the squares of the looked up rows, under SGD."""
    import optax

    from jaxrec import EmbeddingSpec, Lookup, Table, Task, sgd

    names = tuple(f"t{number}" for number in range(len(job.cardinalities)))
    tables = {name: Table(rows, job.width) for name, rows in zip(names, job.cardinalities, strict=True)}
    spec = EmbeddingSpec(tables, {"sparse": Lookup(names)})

    def loss(params, activations, batch):
        return 0.5 * (activations["sparse"] ** 2).sum((1, 2)) + params["bias"]

    return Task(spec, loss, optax.sgd(0.01), sgd(0.01)), {"bias": np.zeros((), np.float32)}


class Exactness:
    """A process that compares pinned tables with the host's copies and with tables on the device."""

    def __init__(self, job: Job):
        self.job = job

    def rows(self, _=None) -> dict[str, Any]:
        """Read and put random rows by programs: are they those of the host?"""
        from studies.reference import reference_work

        from jaxrec.embedding import PinnedTables, plan

        task, _ = reference_work(self.job)
        spec, tables = task.spec, PinnedTables.create(task.spec, task.row_optimizer)
        read, put = jax.jit(lambda t, p: t.read(p)), jax.jit(lambda t, p, r: t.put(p, r))
        equal = {"read": True, "put": True}
        for batch in synthetic(self.job, 4)[1]:
            plans = plan(spec, batch.ids)
            rows, wanted = read(tables.traced, plans), tables.read(plans)
            equal["read"] &= same_bits(rows, wanted)
            new = jax.tree.map(lambda x: 2 * x + 1, rows)
            tables = tables.with_traced(put(tables.traced, plans, new))
            used = {name: np.arange(one.unique.shape[1]) < one.count[:, None] for name, one in plans.items()}
            zeroed = {
                name: jax.tree.map(lambda x, used=used[name]: np.where(used[..., None], x, 0), its)
                for name, its in new.items()
            }
            equal["put"] &= same_bits(tables.read(plans), zeroed)
        return {f"{name}_bitwise_equal": found for name, found in equal.items()}

    def steps(self, _=None) -> dict[str, Any]:
        """Train over pinned tables and over tables on the device: losses, dense parameters and rows."""
        from studies.reference import reference_work

        work = reference_work(self.job)
        pinned, again, device = (self._trained(place, *work) for place in ("pinned", "pinned", "device"))
        worst = max(
            float(np.max(np.abs(a.astype(np.float64) - b), initial=0.0))
            for a, b in zip(jax.tree.leaves(pinned), jax.tree.leaves(device), strict=True)
        )
        found = {"steps_bitwise_equal": same_bits(pinned, device), "again_bitwise_equal": same_bits(pinned, again)}
        return found | {"steps_largest_difference": worst}

    def _trained(self, place, task, params):
        from jaxrec.embedding import embedding_matrix
        from jaxrec.engine import Serial

        with Serial(task, task.init(params, place)) as engine:
            losses = [metrics["loss"] for _, metrics in engine.run(synthetic(self.job, STEPS)[1])]
            rows = [embedding_matrix(engine.tables, name) for name in task.spec.tables]
            return jax.tree.map(np.asarray, (losses, engine.state.dense.params, rows))


def same_bits(one: Any, other: Any) -> bool:
    """Return whether all leaves of two trees have equal bytes."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
