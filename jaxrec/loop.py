"""The loop: train to the end of the batches, with hooks; evaluate.

Legend: B batch.
"""

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxrec import metrics
from jaxrec.bounds import whole_number
from jaxrec.engine import Engine, Serial
from jaxrec.prefetch import in_pairs, planned
from jaxrec.types import Batch, RolledBack, TrainState

__all__ = ["Engine", "Serial", "evaluate", "every", "fit", "keep_memory", "planned", "train"]


def keep_memory() -> bool:
    """Tells glibc to keep freed memory for the next step; call it once, before JAX starts, on a CPU.

    XLA allocates its scratch memory anew in each step, often in a thread of its own. A block above
    32 MB is mapped and unmapped every time, and so is one above 64 MB in any thread but the main
    one, whose heaps end there; the kernel zeroes its pages. At width 128 of the reference work that
    were 21,600 page faults and 36 ms of the system in a step; none are left. The same as
    MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and MALLOC_ARENA_MAX in the environment; it holds
    for the whole process, which then gives less memory back. Threads that are there already keep
    their heaps.

    Returns:
      Whether the C library took it; others than glibc do not.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    # All three: with the first alone the memory would be given back when it is freed at the end of
    # the heap, and with the first two a thread's heap would still have no room for a large block.
    m_mmap_threshold, m_trim_threshold, m_arena_max = -3, -1, -8  # malloc.h
    wanted = ((m_mmap_threshold, 1 << 30), (m_trim_threshold, 2**31 - 1), (m_arena_max, 1))
    return mallopt is not None and all([mallopt(which, value) for which, value in wanted])


def train(engine: Engine, stream: Callable[[int], Iterable[Batch]], hooks: Sequence[Callable] = ()) -> TrainState:
    """Trains an engine to the end of a stream, from wherever it stands.

    Args:
      engine: `Serial`, `oac.Pipeline` or `shadowsync.FreeTrainers`.
      stream: step -> the batches from there on; called again, with an earlier step, when all is
        rolled back.
      hooks: (state, step, plans, metrics) -> state, called in order after every step.

    Returns:
      The state after the last batch.

    Raises:
      As `run` of the engine.
    """
    while True:
        try:
            # The stream is asked for anew after a rollback, from the earlier step on: an iterator
            # cannot go back.
            for _ in engine.run(stream(engine.step), hooks):
                pass
            return engine.state
        except RolledBack as back:
            # Only now: the run has ended, and the engine may be given another state.
            back.go_back()


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
      train_step: (state, plans, batch) -> state', metrics.
      hooks: (state, step, plans, metrics) -> state, called in order after every step.
      check_every_steps: how often the losses are fetched and checked.

    Returns:
      The state after the last batch.

    Raises:
      FloatingPointError: a loss is not finite; names the range of steps and what to look at.
      ValueError: as the step.
    """
    # An engine without a `with` block: nothing was entered, so that nothing has to be left.
    engine = Serial(state, train_step)
    for _ in engine.steps(batches, hooks, check_every_steps):
        pass
    return engine.state


def every(steps: int, hook: Callable) -> Callable:
    """Makes a hook that runs another one at every multiple of `steps`."""
    whole_number("steps", steps)

    def run(state, step, plans, step_metrics):
        return hook(state, step, plans, step_metrics) if step % steps == 0 else state

    return run


def evaluate(state, batches: Iterable[tuple], eval_step: Callable) -> dict[str, float]:
    """Evaluates a click model: a fold of mergeable statistics over the batches.

    Args:
      state: TrainState.
      batches: (Batch, {stack: Plan}) pairs.
      eval_step: (state, plans, batch) -> logit f32[B].

    Returns:
      auc, log_loss, normalized_entropy, calibration, label_mean, examples: see `metrics.summarize`.

    Raises:
      FloatingPointError: a logit is not finite; names the step of the state and the batch.
      ValueError: labels other than 0 and 1; no examples.
    """
    # Sums that merge, no list of logits: an evaluation needs as much memory as one batch.
    total = metrics.empty_evaluation()
    for number, (batch, plans) in enumerate(in_pairs(batches)):
        logit = np.asarray(eval_step(state, plans, batch))
        try:
            total = metrics.merge(total, metrics.evaluate_batch(logit, batch.label, batch.weight))
        except FloatingPointError as error:
            raise FloatingPointError(
                f"in an evaluation after step {int(state.dense.step)}, in its batch {number}: {error}"
            ) from None
    return metrics.summarize(total)
