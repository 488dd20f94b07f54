"""A synthetic click log: power-law ids, a planted teacher, any number of examples in constant memory.

The teacher that draws the labels is known, so that its AUC and normalised entropy are the best that a model can reach.
Batch i depends on the seed and i alone.

Legend: B batch, N dense features, F fields, L latent width.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from jaxrec.bounds import is_not_negative, real_number, whole_number
from jaxrec.embedding.tables import initial_rows
from jaxrec.types import Batch

# Distinct values of the 26 categorical fields of the Criteo Kaggle training set, as published with DLRM.
CRITEO_KAGGLE_CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip

_LATENT = 4
_TRAIN, _TEST, _VALIDATION = 0, 1, 3  # stream 2 draws the teacher


def scaled_cardinalities(rows: int) -> tuple[int, ...]:
    """Scale the Criteo Kaggle cardinalities to a total of `rows`, by a cap on the largest or by stretching all.

    Args:
      rows: total rows of all tables, at least 78.

    >>> sum(scaled_cardinalities(1_000_000))
    1000000
    """
    whole_number("rows", rows, 3 * len(CRITEO_KAGGLE_CARDINALITIES))
    cardinalities = np.array(CRITEO_KAGGLE_CARDINALITIES)
    cardinalities = np.maximum(cardinalities, cardinalities * rows // int(cardinalities.sum()))
    low, high = 0.0, float(cardinalities.max())
    for _ in range(100):
        cap = (low + high) / 2
        if np.minimum(cardinalities, cap).sum() > rows:
            high = cap
        else:
            low = cap
    cut = np.maximum(np.minimum(cardinalities, int(low)), 3)
    cut[int(np.argmax(cardinalities))] += max(0, rows - int(cut.sum()))
    return tuple(int(c) for c in cut)


@dataclasses.dataclass(frozen=True)
class SyntheticClicks:
    """A click log as pure functions of a batch index.

    Attributes:
      cardinalities: number of ids of each of the F fields, below 2**31; ids count from 0, most frequent first.
      dense_features: N.
      exponent: exponent of the power law of the ids; 0 is uniform. The default of 1.05 was measured on production
        traces.
      seed: seed of teacher and examples.
      signal: standard deviation of the teacher's logit.
      bias: bias of the teacher's logit; -1.2 gives about 25 % clicks.
      curved: share of the variance of the logit, from 0 to 1, that is a wave of a sum over the fields, which sums and
        products of two fields cannot express.
      lookup: name of the lookup in `Batch.ids`.
    """

    cardinalities: tuple[int, ...]
    dense_features: int = 13
    exponent: float = 1.05
    seed: int = 0
    signal: float = 1.5
    bias: float = -1.2
    curved: float = 0.0
    lookup: str = "sparse"

    def __post_init__(self):
        for cardinality in self.cardinalities:
            whole_number("each of cardinalities", cardinality, 1, 2**31 - 1)  # ids are int32
        for name in ("exponent", "signal"):
            real_number(name, getattr(self, name), "finite and 0 or more", is_not_negative)
        real_number("curved", self.curved, "a share from 0 to 1", lambda share: 0 <= share <= 1)
        real_number("bias", self.bias, "finite", math.isfinite)

    def batch(self, index: int, batch_size: int, test: bool = False, validation: bool = False) -> Batch:
        """Draw batch `index` of the train, test or validation stream.

        Args:
          index: 0, 1, ...
          batch_size: B.
          test: draw from the test stream.
          validation: draw from the validation stream.

        Returns:
          Batch with ids {lookup: i32[B, F]}, dense f32[B, N] standard normal, label f32[B], weight 1.
        """
        if test and validation:
            raise ValueError("test=True and validation=True name two streams: give one of them.")
        stream = _TEST if test else _VALIDATION if validation else _TRAIN
        rng = np.random.default_rng([self.seed, stream, index])
        ids = _power_law(rng.random((batch_size, len(self.cardinalities))), self.cardinalities, self.exponent)
        dense = rng.standard_normal((batch_size, self.dense_features), np.float32)
        batch = Batch({self.lookup: ids}, np.zeros(batch_size, np.float32), dense)
        click = rng.random(batch_size) < 1 / (1 + np.exp(-self.teacher_logit(batch)))
        return batch._replace(label=click.astype(np.float32))

    def teacher_logit(self, batch: Batch) -> np.ndarray:
        """Return the logits from which the labels of a batch are drawn, f32[B].

        The sum of a bias, a weight per id, a linear term of the dense features, and the dot products of latent vectors
        (width L) of each field and the next: half of the variance is first order, half is second order. `curved` mixes
        in the wave.
        """
        ids = batch.ids[self.lookup]
        fields = ids.shape[1]
        starts = np.concatenate([[0], np.cumsum(self.cardinalities)[:-1]])
        latent = initial_rows((ids + starts).reshape(-1), 1 + _LATENT, 3**0.5, self.seed ^ 0x5EED)
        latent = latent.reshape(*ids.shape, 1 + _LATENT)  # each element of variance 1
        first = latent[..., 0].sum(1) / fields**0.5
        pairs = (latent[:, :-1, 1:] * latent[:, 1:, 1:]).sum((1, 2)) / max(1, (fields - 1) * _LATENT) ** 0.5
        slope = np.random.default_rng([self.seed, 2]).standard_normal(self.dense_features)
        linear = batch.dense @ (slope / max(1, self.dense_features) ** 0.5).astype(np.float32)
        share = 0.5**0.5, 0.25**0.5, 0.25**0.5
        mixed = share[0] * pairs + share[1] * first + share[2] * linear
        if self.curved:
            score = initial_rows((ids + starts).reshape(-1), 1, 3**0.5, self.seed ^ 0xC0FFEE).reshape(ids.shape)
            # The sum is normal with variance 1. The wave has variance 1/2 and a linear component, 2 exp(-2) times the
            # sum, by which a network finds the sum.
            wave = np.sin(2 * score.sum(1) / fields**0.5) / 0.5**0.5
            mixed = (1 - self.curved) ** 0.5 * mixed + self.curved**0.5 * wave
        return (self.bias + self.signal * mixed).astype(np.float32)

    def stream(
        self, batch_size: int, start: int = 0, batches: int | None = None, test: bool = False, validation: bool = False
    ) -> Iterator[Batch]:
        """Yield batches `start`, `start` + 1, ..., below index `batches`, or without end if `batches` is None."""
        indices = itertools.count(start) if batches is None else range(start, batches)
        return (self.batch(index, batch_size, test, validation) for index in indices)


def _power_law(uniform, cardinalities, exponent):
    """Draw ids i32[B, F] with P(id) ~ (id + 1)^-exponent by inverting the continuous distribution."""
    n = np.asarray(cardinalities, np.float64)
    if exponent == 1:
        x = np.exp(uniform * np.log(n + 1))
    else:
        x = (1 + uniform * ((n + 1) ** (1 - exponent) - 1)) ** (1 / (1 - exponent))
    return np.minimum(x.astype(np.int64) - 1, n.astype(np.int64) - 1).astype(np.int32)
