"""Training and evaluation loops.

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
from jaxrec.task import Task
from jaxrec.types import Batch, RolledBack, TrainState

__all__ = ["Engine", "Serial", "evaluate", "every", "fit", "keep_memory", "planned", "train"]


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


def train(engine: Engine, stream: Callable[[int], Iterable[Batch]], hooks: Sequence[Callable] = ()) -> TrainState:
    """Train an engine from its current step to the end of a stream.

    Args:
      engine: `Serial`, `oac.Pipeline` or `shadowsync.FreeTrainers`.
      stream: step -> iterable of the batches from that step on; called again, with an earlier step, after a rollback.
      hooks: (state, step, plans, metrics) -> state, called in order after every step.

    Returns:
      The state after the last batch.

    Raises:
      As `run` of the engine.
    """
    while True:
        try:
            # A rollback needs a new iterator from the earlier step, as an iterator cannot go back.
            for _ in engine.run(stream(engine.step), hooks):
                pass
            return engine.state
        except RolledBack as back:
            # Only here has the run ended, so that the state of the engine may be replaced.
            back.go_back()


def fit(
    task: Task,
    state: TrainState,
    batches: Iterable[tuple],
    hooks: Sequence[Callable] = (),
):
    """Train on all batches: a fold of the step and the hooks over the state.

    Args:
      task: Task, or anything else with its `step`.
      state: TrainState; it is donated, use the returned one.
      batches: (Batch, {stack: Plan}) pairs, as from `planned`.
      hooks: (state, step, plans, metrics) -> state, called in order after every step.

    Returns:
      The state after the last batch.

    Raises:
      FloatingPointError: a loss is not finite; the error gives the step and what to inspect.
      ValueError: as the step.
    """
    # No `with` block: the engine has no watchers to leave.
    engine = Serial(task, state)
    for _ in engine.steps(batches, hooks):
        pass
    return engine.state


def every(steps: int, hook: Callable) -> Callable:
    """Return a hook that runs another one at every multiple of `steps`."""
    whole_number("steps", steps)

    def run(state, step, plans, step_metrics):
        return hook(state, step, plans, step_metrics) if step % steps == 0 else state

    return run


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
    # Merged sums instead of a list of logits: an evaluation needs no more memory than one batch.
    total = metrics.empty_evaluation()
    for number, (batch, plans) in enumerate(in_pairs(batches)):
        logit = np.asarray(eval_step(state, batch, plans))
        try:
            total = metrics.merge(total, metrics.evaluate_batch(logit, batch.label, batch.weight))
        except FloatingPointError as error:
            raise FloatingPointError(
                f"in an evaluation after step {int(state.dense.step)}, in its batch {number}: {error}"
            ) from None
    return metrics.summarize(total)
