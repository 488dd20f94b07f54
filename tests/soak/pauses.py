"""Steps of trainers in processes, timed by their streams, by what went on in other processes meanwhile."""

import bisect
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

STATES = ("calm", "stopped", "starting", "rows_away")  # in order of precedence, the last one first


@dataclasses.dataclass(frozen=True)
class Timed:
    """Batch factory that notes the instant of each batch in a file of the trainer's process.

    Attributes:
      batches: (trainer, trainers) -> (start -> iterator).
      directory: an existing directory, for one file per process.
    """

    batches: Callable[[int, int], Callable[[int], Iterator[Any]]]
    directory: Path

    def __call__(self, trainer: int, trainers: int) -> Callable[[int], Iterator[Any]]:
        stream = self.batches(trainer, trainers)

        def of(start: int) -> Iterator[Any]:
            with open(self.directory / f"{trainer}-{os.getpid()}", "ab", buffering=0) as file:
                for batch in stream(start):
                    file.write(np.float64(time.monotonic()).tobytes())
                    yield batch

        return of


def state_at(rows_away: bool, starting: bool, stopped: bool) -> str:
    """Return the state of a pool, as one of `STATES`.

    >>> state_at(rows_away=False, starting=True, stopped=True)
    'starting'
    """
    return STATES[3 if rows_away else 2 if starting else 1 if stopped else 0]


def state_between(samples: Sequence[tuple[float, str]], begin: float, end: float) -> str | None:
    """Return the state of the highest precedence from the last sample before `begin` to the first after `end`.

    Args:
      samples: (instant, state), in order.
      begin, end: instants.

    Returns:
      One of `STATES`; None if no sample is before `begin`, or none after `end`.

    >>> samples = [(0.0, "calm"), (1.0, "stopped"), (2.0, "calm"), (3.0, "calm")]
    >>> state_between(samples, 1.2, 1.4), state_between(samples, 2.2, 2.4), state_between(samples, 2.9, 3.1)
    ('stopped', 'calm', None)
    """
    first = bisect.bisect_right(samples, begin, key=lambda each: each[0]) - 1
    last = bisect.bisect_left(samples, end, key=lambda each: each[0])
    if first < 0 or last >= len(samples):
        return None
    return max((state for _, state in samples[first : last + 1]), key=STATES.index)


def longest_by_state(directory: Path, samples: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """Return how long the longest step of a trainer was in each state, over the median of all its steps.

    A step lasts from one batch to the next of any worker. The first two of a process, which compile, do not count.

    Args:
      directory: directory of `Timed`.
      samples: (instant, state), in order.

    Returns:
      {steps_STATE, longest_step_over_median_STATE} over all trainers; the latter is missing for a state without steps.
    """
    found: dict[str, list[float]] = {state: [] for state in STATES}
    for path in directory.iterdir():
        content = path.read_bytes()
        instants = np.frombuffer(content[: len(content) // 8 * 8], np.float64)[2:]  # a kill may have torn the last one
        if len(instants) < 2:
            continue
        median = np.median(np.diff(instants))
        for begin, end in itertools.pairwise(instants):
            if state := state_between(samples, begin, end):
                found[state].append((end - begin) / median)
    counts = {f"steps_{state}": len(steps) for state, steps in found.items()}
    return counts | {f"longest_step_over_median_{state}": max(steps) for state, steps in found.items() if steps}
