"""The reference work: what every benchmark of speed trains, and nothing that wants more than
jaxrec's own packages.

DLRM-Kaggle: bottom 13-512-256-64-E, 26 lookups of width E in one stack, dot interaction, top
512-256-1, row-wise Adagrad on rows, SGD on the dense part, f32, ids by a power law of exponent
1.05. DCNv2 over the same rows: three full cross layers beside a tower 512-256.
"""

import dataclasses
from typing import Any, Literal

import numpy as np
from accelerator.measure import interval

from jaxrec.data.synthetic import SyntheticClicks, scaled_cardinalities

BATCHES = 16  # made before the clock starts, used in turn


@dataclasses.dataclass(frozen=True)
class Job:
    """The size of the work."""

    tables: Literal["device", "host"] = "host"
    rows: int = 10_000_000
    batch_size: int = 2048
    width: int = 16
    model: Literal["dlrm", "dcnv2"] = "dlrm"
    equal_tables: int = 0
    """So many tables of equal size; 26 of Criteo Kaggle's proportions if 0."""
    precision: Literal["default", "highest"] = "default"
    """Of f32 matrix products: 'default' is TF32 on recent NVIDIA GPUs, 'highest' is f32; CPUs know
    f32 only."""
    seed: int = 0

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """Rows of each table."""
        n = self.equal_tables
        return (self.rows // n,) * n if n else scaled_cardinalities(self.rows)


def synthetic(job: Job, batches: int = BATCHES) -> tuple[SyntheticClicks, list]:
    """The click log of the reference work, and its first batches."""
    clicks = SyntheticClicks(job.cardinalities, seed=job.seed)
    return clicks, list(clicks.stream(job.batch_size, batches=batches))


def reference_work(job: Job):
    """The job for jaxrec: (spec, loss, initial parameters, dense optimizer, row optimizer)."""
    # Here, as a process of PyTorch reads this file for its batches alone, and needs no jax.
    import optax
    from clicks import click_job, make_model

    from jaxrec.embedding import rowwise_adagrad

    model = make_model(job.model, job.width)
    work = click_job(job.cardinalities, model, optax.sgd(0.01), rowwise_adagrad(0.02), job.width)
    return work.spec, work.loss, work.init(0), work.optimizer, work.row_optimizer


def ratio(key: str, values) -> dict[str, Any]:
    """Median, 95 % bootstrap interval of it, least and most of a figure over the rounds.

    >>> list(ratio("a_over_b", [0.9, 1.0, 1.1]))
    ['a_over_b', 'a_over_b_low', 'a_over_b_high', 'a_over_b_min', 'a_over_b_max']
    """
    found = interval(values)
    ends = {f"{key}_low": found["low"], f"{key}_high": found["high"]}
    return {key: found["median"], **ends, f"{key}_min": float(np.min(values)), f"{key}_max": float(np.max(values))}
