"""The loop: plan ahead in a thread, fold the step and the hooks over the batches, evaluate.

Legend: B batch, U padded unique rows a shard.
"""

import ctypes
import sys
from collections.abc import Callable, Generator, Iterable, Sequence

import numpy as np

from jaxrec import metrics
from jaxrec.boundary import check_not_donated, own_batch
from jaxrec.data.loader import prefetch
from jaxrec.embedding import capacity_of, plan
from jaxrec.embedding.spec import EmbeddingSpec
from jaxrec.step import check_finite, run_hooks
from jaxrec.types import Batch


def keep_memory() -> bool:
    """Tells glibc to keep freed memory for the next step; call it once, before the first, on a CPU.

    XLA allocates its scratch memory anew in each step. A block above 32 MB is mapped and unmapped every time, and the
    kernel zeroes its pages: 15 to 25 of 100 ms a step were seen on the reference work. The same as
    MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ in the environment; it holds for the whole process, which then
    gives less memory back.

    Returns:
      Whether the C library took it; others than glibc do not.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
    return mallopt is not None and bool(mallopt(m_mmap_threshold, 1 << 30) and mallopt(m_trim_threshold, 2**31 - 1))


def planned(spec: EmbeddingSpec, batches: Iterable, capacity=None, depth: int = 2) -> Generator[tuple, None, None]:
    """Plans batches in a thread, ahead of the step: plans depend on ids only, never on parameters.

    Args:
      spec: the tables and lookups.
      batches: Batch after Batch, of one size.
      capacity: {stack: U} to begin with; it grows when a batch does not fit.
      depth: how many batches to be ahead.

    Yields:
      (batch, {stack: Plan}). Close the generator (or exhaust it) to end the thread.

    Raises:
      ValueError: as `plan`; what comes is no Batch.
    """
    return prefetch(_plan_each(spec, batches, capacity), depth)


def _plan_each(spec, batches, capacity):
    for batch in batches:
        if not hasattr(batch, "ids"):
            raise ValueError(
                f"`planned` makes the plans itself from Batch after Batch, but got a {type(batch).__name__}."
            )
        batch = own_batch(batch)  # plans run ahead, and a loader may fill the same arrays again
        plans = plan(spec, batch.ids, capacity)
        capacity = capacity_of(plans)
        yield batch, plans


def fit(
    state,
    batches: Iterable[tuple],
    train_step: Callable,
    hooks: Sequence[Callable] = (),
    check_every_steps: int = 100,
):
    """Trains on all batches: a fold of the step and the hooks over the state.

    Args:
      state: TrainState; it is donated, use the returned one.
      batches: (Batch, {stack: Plan}) pairs, as from `planned`.
      train_step: (state, plan, batch) -> state', metrics.
      hooks: (state, step, plan, metrics) -> state, called in order after every step.
      check_every_steps: how often the losses are fetched and checked.

    Returns:
      The state after the last batch.

    Raises:
      FloatingPointError: a loss is not finite; names the range of steps and what to look at.
      ValueError: what comes is no pair of a batch and its plan; as the step.
    """
    if check_every_steps < 1:
        raise ValueError(f"check_every_steps={check_every_steps} must be at least 1.")
    check_not_donated(state)
    first = int(state.dense.step)
    pending, step = [], first
    for step, (batch, plans) in enumerate(_pairs(batches), first + 1):
        state, step_metrics = train_step(state, plans, batch)
        pending.append(step_metrics["loss"])
        state = run_hooks(hooks, state, step, plans, step_metrics)
        if len(pending) >= check_every_steps:
            check_finite(pending, step)
            pending = []
    check_finite(pending, step)
    return state


def _pairs(batches):
    for pair in batches:
        if isinstance(pair, Batch) or not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                f"a (Batch, {{stack: Plan}}) pair is wanted, got a {type(pair).__name__}: iterate over "
                "planned(spec, batches)."
            )
        yield pair


def every(steps: int, hook: Callable) -> Callable:
    """Makes a hook that runs another one at every multiple of `steps`."""
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1.")

    def run(state, step, plan, step_metrics):
        return hook(state, step, plan, step_metrics) if step % steps == 0 else state

    return run


def evaluate(state, batches: Iterable[tuple], eval_step: Callable) -> dict[str, float]:
    """Evaluates a click model: a fold of mergeable statistics over the batches.

    Args:
      state: TrainState.
      batches: (Batch, {stack: Plan}) pairs.
      eval_step: (state, plan, batch) -> logit f32[B].

    Returns:
      auc, log_loss, normalized_entropy, calibration, label_mean, examples: see `metrics.summarize`.

    Raises:
      FloatingPointError: a logit is not finite; names the step of the state and the batch.
      ValueError: labels other than 0 and 1; no examples; what comes is no pair of a batch and its plan.
    """
    total = metrics.empty_evaluation()
    for number, (batch, plans) in enumerate(_pairs(batches)):
        logit = np.asarray(eval_step(state, plans, batch))
        try:
            total = metrics.merge(total, metrics.evaluate_batch(logit, batch.label, batch.weight))
        except FloatingPointError as error:
            raise FloatingPointError(
                f"in an evaluation after step {int(state.dense.step)}, in its batch {number}: {error}"
            ) from None
    return metrics.summarize(total)
