"""The reference work: what every benchmark of speed trains, and nothing that wants more than
jaxrec's own packages.

DLRM-Kaggle: bottom 13-512-256-64-E, 26 lookups of width E in one stack, dot interaction, top
512-256-1, row-wise Adagrad on rows, SGD on the dense part, f32, ids by a power law of exponent
1.05. DCNv2 over the same rows: three full cross layers beside a tower 512-256; or MLPerf's: bottom
13-512-256-E, three cross layers of rank 4 E (512 at its width 128), after them a tower
1024-1024-512-256. Bags of MLPerf's sizes (`hots`): a lookup with sum pooling for each field.
"""

import dataclasses
import itertools
from typing import Any, Literal

import numpy as np
from accelerator.measure import interval

from jaxrec.data.synthetic import SyntheticClicks, scaled_cardinalities

# Ids of each field of Criteo 1TB as MLPerf Training makes it multi-hot (DLRM-DCNv2).
MLPERF_HOTS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
BATCHES = 16  # made before the clock starts, used in turn


@dataclasses.dataclass(frozen=True)
class Job:
    """The size of the work."""

    tables: Literal["device", "host"] = "host"
    rows: int = 10_000_000
    batch_size: int = 2048
    width: int = 16
    model: Literal["dlrm", "dcnv2", "dcnv2_mlperf"] = "dlrm"
    hots: Literal["one", "mlperf"] = "one"
    """Ids of each field: one, or bags of MLPerf's sizes, 214 ids an example."""
    hots_scale: float = 1.0
    """Times MLPerf's sizes, rounded, 1 at least."""
    exponent: float = 1.05
    """Of the power law of the ids."""
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

    @property
    def field_hots(self) -> tuple[int, ...]:
        """Ids of each field.

        >>> Job(hots="mlperf", hots_scale=0.1).field_hots[19:23]
        (1, 10, 3, 1)
        """
        fields = len(self.cardinalities)
        if self.hots == "one":
            return (1,) * fields
        sizes = itertools.islice(itertools.cycle(MLPERF_HOTS), fields)
        return tuple(max(1, round(self.hots_scale * hots)) for hots in sizes)


def synthetic(job: Job, batches: int = BATCHES) -> tuple[SyntheticClicks, list]:
    """The click log of the reference work, and its first batches: ids i32[B, ids of an example], those of a bag
    side by side."""
    each_id = [size for size, hots in zip(job.cardinalities, job.field_hots, strict=True) for _ in range(hots)]
    clicks = SyntheticClicks(tuple(each_id), exponent=job.exponent, seed=job.seed)
    return clicks, list(clicks.stream(job.batch_size, batches=batches))


def reference_work(job: Job):
    """The job for jaxrec: (spec, loss, initial parameters, dense optimizer, row optimizer)."""
    # Here, as a process of PyTorch reads this file for its batches alone, and needs no jax.
    import optax
    from main.click_data import click_job, make_model

    from jaxrec.embedding import rowwise_adagrad

    model = make_model(job.model, job.width)
    work = click_job(job.cardinalities, model, optax.sgd(0.01), rowwise_adagrad(0.02), job.width)
    spec, loss = (work.spec, work.loss) if job.hots == "one" else _of_bags(job, work)
    return spec, loss, work.init(0), work.optimizer, work.row_optimizer


def _of_bags(job, work):
    """Spec and loss with a lookup for each field, of as many hots as it has, pooled by sums."""
    import jax.numpy as jnp

    from jaxrec.embedding import Lookup

    lookups = {name: Lookup(name, hots) for name, hots in zip(work.spec.tables, job.field_hots, strict=True)}

    def loss(params, activations, batch):
        return work.loss(params, {"sparse": jnp.stack([activations[name] for name in lookups], axis=1)}, batch)

    return dataclasses.replace(work.spec, lookups=lookups), loss


def in_bags(job: Job, spec, batch):
    """A batch of `synthetic` with the ids that the spec of the job has lookups for.

    Args:
      job: the size of the work.
      spec: of `reference_work(job)`.
      batch: ids {'sparse': i32[B, ids of an example]}.

    Returns:
      The same batch with ids {field: i32[B, hots], or i32[B] of one}; the batch itself if all fields have one id
      in one lookup.
    """
    if job.hots == "one":
        return batch
    parts = np.split(batch.ids["sparse"], np.cumsum(job.field_hots)[:-1], axis=1)
    ids = {name: part[:, 0] if part.shape[1] == 1 else part for name, part in zip(spec.lookups, parts, strict=True)}
    return batch._replace(ids=ids)


def ratio(key: str, values) -> dict[str, Any]:
    """Median, 95 % bootstrap interval of it, least and most of a figure over the rounds.

    >>> list(ratio("a_over_b", [0.9, 1.0, 1.1]))
    ['a_over_b', 'a_over_b_low', 'a_over_b_high', 'a_over_b_min', 'a_over_b_max']
    """
    found = interval(values)
    ends = {f"{key}_low": found["low"], f"{key}_high": found["high"]}
    return {key: found["median"], **ends, f"{key}_min": float(np.min(values)), f"{key}_max": float(np.max(values))}
