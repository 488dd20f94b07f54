"""Evaluation of a model, and the memory settings of a loop.

Legend: B batch.
"""

import ctypes
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxrec import metrics
from jaxrec.prefetch import in_pairs


def keep_memory() -> bool:
    """Configure glibc to keep freed memory for the next step; call it once on a CPU, before JAX starts.

    XLA allocates its scratch memory anew in each step, often in threads other than the main one. Every block above
    32 MB is mapped and unmapped each time, and so is a block above 64 MB, the heap limit, outside the main thread; the
    kernel zeroes its pages. At width 128 of the reference workload this cost 21,600 page faults and 36 ms of system
    time per step; with these settings there are none. They equal MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and
    MALLOC_ARENA_MAX in the environment and apply to the whole process, which then returns less memory to the system.
    Existing threads keep their heaps.

    Returns:
      Whether the C library accepted the settings; only glibc does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    # All three are needed: with the first alone, memory freed at the end of the heap would be returned to the system,
    # and with the first two a thread's heap would still have no room for a large block.
    m_mmap_threshold, m_trim_threshold, m_arena_max = -3, -1, -8  # malloc.h
    wanted = ((m_mmap_threshold, 1 << 30), (m_trim_threshold, 2**31 - 1), (m_arena_max, 1))
    return mallopt is not None and all([mallopt(which, value) for which, value in wanted])


def evaluate(state, batches: Iterable[tuple], eval_step: Callable) -> dict[str, float]:
    """Evaluate a click model: a fold of mergeable statistics over the batches.

    Args:
      state: TrainState.
      batches: (Batch, {stack: Plan}) pairs.
      eval_step: (state, batch, plans) -> logit f32[B].

    Returns:
      auc, log_loss, normalized_entropy, calibration, label_mean, examples: see `metrics.summarize`.

    Raises:
      FloatingPointError: a logit is not finite; the error gives the step of the state and the batch.
      ValueError: there are labels other than 0 and 1, or no examples.
    """
    return evaluate_labels(state, batches, eval_step, [metrics.evaluate_batch])[0]


def evaluate_labels(
    state, batches: Iterable[tuple], eval_step: Callable, measures: Sequence[Callable]
) -> list[dict[str, float]]:
    """Evaluate a model of one or several labels: a fold of mergeable statistics over the batches.

    Args:
      state, batches: as for `evaluate`.
      eval_step: (state, batch, plans) -> f32[B], or f32[B, K] for K labels.
      measures: for each label, `metrics.evaluate_batch` of clicks, or `metrics.evaluate_errors` of a regression.

    Returns:
      The metrics of each label, see `metrics.summarize`. Warns if all of a label are equal, which leaves its AUC NaN.

    Raises:
      FloatingPointError, ValueError: as `evaluate`.
    """
    # Merged sums instead of a list of predictions: an evaluation needs no more memory than one batch.
    totals: list[Any] = []
    for number, (batch, plans) in enumerate(in_pairs(batches)):
        found, label = np.asarray(eval_step(state, batch, plans)), np.asarray(batch.label)
        columns = [(found, label)] if label.ndim == 1 else list(zip(found.T, label.T, strict=True))
        try:
            now = [
                measure(*column, np.asarray(batch.weight)) for measure, column in zip(measures, columns, strict=True)
            ]
        except FloatingPointError as error:
            raise FloatingPointError(
                f"in an evaluation after step {int(state.dense.step)}, in its batch {number}: {error}"
            ) from None
        totals = list(map(metrics.merge, totals, now)) if totals else now
    every = [metrics.summarize(total) for total in totals or [metrics.empty_evaluation()]]
    for one in every:
        if math.isnan(one.get("auc", 0.0)):
            said = f"all labels of the {one['examples']} examples are {one['label_mean']:g}, so the AUC is not a number"
            warnings.warn(f"{said}: compare how labels are written, or evaluate more rows.", stacklevel=2)
    return every
