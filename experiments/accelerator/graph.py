"""Part `graph`: knowledge graphs larger than GPU memory, by the shape of Freebase86M, over pinned tables.

DistMult of width 100 under Adagrad, batches of 50,000 edges in both directions, in 20 groups with 500 negatives each,
half of them by degree: the setting of Marius's authors (EuroSys 2023 artifact, freebase86m/dm_mem.yaml). The
file is not to be had here, so edges are drawn by a power law of the degrees. Steps in a row (`sync`), and OAC with
windows 2 to 16, over 10 million nodes and over all 86 million (69 GB of rows and slots), if they fit. An epoch of
Freebase86M, 304,727,650 edges, is 6,095 such batches.
"""

import functools
from typing import Any

import numpy as np
from studies.reference import BATCHES, Job
from studies.sides import Side

from accelerator.link import memory_available
from accelerator.measure import Task
from accelerator.oac_streams import Streams, compare

NODES, RELATIONS, WIDTH, BATCH = 86_054_151, 14_824, 100, 50_000
GROUPS, NEGATIVES = 20, 500
WINDOWS = (2, 4, 16)


def run(task: Task) -> None:
    """Measure point after point."""
    most = int(0.7 * memory_available() / (8 * WIDTH))
    sizes = (50_000,) if task.smoke else (min(10_000_000, most), min(NODES, most))
    task.each(
        [{"nodes": nodes, "batch": 100 if task.smoke else BATCH} for nodes in sizes], functools.partial(one, task)
    )


def one(task: Task, point: dict, until: float) -> None:
    """Measure one point."""
    job = Job("pinned", point["nodes"], point["batch"], WIDTH)
    windows = WINDOWS[:2] if task.smoke else WINDOWS
    sides = {"pinned": Side(functools.partial(Links, job, graph_work, windows), start=False)}
    task.row(point, compare(task, sides, windows, until))


def graph_work(job: Job) -> tuple[Any, dict]:
    """Return the task, and its initial parameters."""
    import optax

    from jaxrec import EmbeddingSpec, Lookup, Table, Task, adagrad
    from jaxrec.models.link_prediction import DISTMULT, make_loss

    lookups = {name: Lookup("entity") for name in ("head", "tail", "negative")}
    spec = EmbeddingSpec({"entity": Table(job.rows, job.width, 0.001)}, lookups)
    optimizer = optax.chain(optax.scale_by_rss(0.0, eps=1e-16), optax.scale_by_learning_rate(0.1))
    task = Task(spec, make_loss(DISTMULT), optimizer, adagrad(0.1))
    return task, {"relation": np.ones((2 * RELATIONS, job.width), np.float32)}


class Links(Streams):
    """Steps in a row, and OAC, over the links of a power law."""

    def make_batches(self) -> list:
        """Make the batches: both directions of as many edges as they have."""
        from jaxrec.data.triples import TripleBatches, both_directions, generate_power_law

        edges = generate_power_law(self.job.rows, RELATIONS, 2 * BATCHES * self.job.batch_size).train
        queries = both_directions(edges, RELATIONS)
        batches = TripleBatches(queries, self.job.rows, 2 * self.job.batch_size, NEGATIVES, GROUPS, by_degree=0.5)
        return [batches.batch(index) for index in range(BATCHES)]
