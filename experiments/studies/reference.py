"""The reference workload that every speed benchmark trains; imports only jaxrec's own dependencies.

DLRM-Kaggle: bottom MLP 13-512-256-64-E, 26 lookups of width E in one stack, dot interaction, top MLP 512-256-1,
row-wise Adagrad on rows, SGD on the dense part, f32, ids from a power law of exponent 1.05. DCNv2 over the same rows:
three full cross layers beside a tower 512-256. MLPerf's DCNv2: bottom MLP 13-512-256-E, three cross layers of rank 4 E
(512 at its width 128), then a tower 1024-1024-512-256. `hots`: bags of MLPerf's sizes, one sum-pooled lookup per field.
"""

import dataclasses
import itertools
from typing import Any, Literal

import numpy as np
from accelerator.measure import interval

from jaxrec.data.synthetic import SyntheticClicks, scaled_cardinalities

# Ids per field in MLPerf Training's multi-hot Criteo 1TB (DLRM-DCNv2).
MLPERF_HOTS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
BATCHES = 16  # created before the timing starts, then cycled


@dataclasses.dataclass(frozen=True)
class Job:
    """Model and size of the workload."""

    tables: Literal["device", "pinned", "host"] = "host"
    rows: int = 10_000_000
    batch_size: int = 2048
    width: int = 16
    model: Literal["dlrm", "dcnv2", "dcnv2_mlperf"] = "dlrm"
    hots: Literal["one", "mlperf"] = "one"
    """Ids per field: one, or bags of MLPerf's sizes, 214 ids per example."""
    hots_scale: float = 1.0
    """Factor on MLPerf's bag sizes; rounded, at least 1 id."""
    exponent: float = 1.05
    """Exponent of the power law of the ids."""
    equal_tables: int = 0
    """Number of equally large tables; if 0, 26 tables with the proportions of Criteo Kaggle."""
    precision: Literal["default", "highest"] = "default"
    """Precision of f32 matrix products: 'default' is TF32 on recent NVIDIA GPUs, 'highest' is f32; CPUs always use f32.
    """
    row_dtype: Literal["float32", "float16"] = "float32"
    """In which jaxrec stores the rows; PyTorch's are float32."""
    seed: int = 0

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """Rows of each table."""
        n = self.equal_tables
        return (self.rows // n,) * n if n else scaled_cardinalities(self.rows)

    @property
    def field_hots(self) -> tuple[int, ...]:
        """Ids per field.

        >>> Job(hots="mlperf", hots_scale=0.1).field_hots[19:23]
        (1, 10, 3, 1)
        """
        fields = len(self.cardinalities)
        if self.hots == "one":
            return (1,) * fields
        sizes = itertools.islice(itertools.cycle(MLPERF_HOTS), fields)
        return tuple(max(1, round(self.hots_scale * hots)) for hots in sizes)


def synthetic(job: Job, batches: int = BATCHES) -> tuple[SyntheticClicks, list]:
    """The click log of the workload and its first batches; ids are i32[B, ids per example], those of a bag adjacent."""
    each_id = [size for size, hots in zip(job.cardinalities, job.field_hots, strict=True) for _ in range(hots)]
    clicks = SyntheticClicks(tuple(each_id), exponent=job.exponent, seed=job.seed)
    return clicks, list(clicks.stream(job.batch_size, batches=batches))


def reference_work(job: Job, mesh=None):
    """The job for jaxrec: (Task, initial parameters)."""
    # Imported here: PyTorch processes use this file only for its batches and need no jax.
    import optax
    from main.click_data import click_job
    from main.model import make_model

    from jaxrec.embedding import rowwise_adagrad

    model = make_model(job.model, job.width)
    rows = rowwise_adagrad(0.02)
    work = click_job(job.cardinalities, model, optax.sgd(0.01), rows, job.width, dtype=job.row_dtype)
    spec, loss = (work.spec, work.task.loss) if job.hots == "one" else _of_bags(job, work)
    return dataclasses.replace(work.task, spec=spec, loss=loss), work.init(0)


def _of_bags(job, work):
    """Spec and loss with one sum-pooled lookup per field."""
    import jax.numpy as jnp

    from jaxrec.embedding import Lookup

    lookups = {name: Lookup(name, hots) for name, hots in zip(work.spec.tables, job.field_hots, strict=True)}

    def loss(params, activations, batch):
        return work.task.loss(params, {"sparse": jnp.stack([activations[name] for name in lookups], axis=1)}, batch)

    return dataclasses.replace(work.spec, lookups=lookups), loss


def in_bags(job: Job, spec, batch):
    """Convert a batch of `synthetic` to the lookups of the job's spec.

    Args:
      batch: batch with ids {'sparse': i32[B, ids per example]}.

    Returns:
      The batch with ids {field: i32[B, hots], or i32[B] if hots is 1}; unchanged if `job.hots` is 'one'.
    """
    if job.hots == "one":
        return batch
    parts = np.split(batch.ids["sparse"], np.cumsum(job.field_hots)[:-1], axis=1)
    ids = {name: part[:, 0] if part.shape[1] == 1 else part for name, part in zip(spec.lookups, parts, strict=True)}
    return batch._replace(ids=ids)


def ratio(key: str, values) -> dict[str, Any]:
    """Median of a figure over the rounds, with its 95 % bootstrap interval, minimum and maximum.

    >>> list(ratio("a_over_b", [0.9, 1.0, 1.1]))
    ['a_over_b', 'a_over_b_low', 'a_over_b_high', 'a_over_b_min', 'a_over_b_max']
    """
    found = interval(values)
    ends = {f"{key}_low": found["low"], f"{key}_high": found["high"]}
    return {key: found["median"], **ends, f"{key}_min": float(np.min(values)), f"{key}_max": float(np.max(values))}
