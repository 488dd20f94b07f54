"""What a crew has done, and which of it have died."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrec.shadowsync.params import replica_spread
from jaxrec.types import PyTree

# Of the progress of a trainer, what all of its incarnations have together.
_SUMS = ("examples", "steps", "rounds", "bytes", "waited_for_rows_s", "rows_lost")


class Progress(NamedTuple):
    """How far a trainer has come, in what it has trained of its own stream."""

    position: int = 0  # all batches before it are trained
    examples: int = 0  # in these
    steps: int = 0  # of this incarnation
    rounds: int = 0
    bytes: int = 0  # of its synchronisation
    longest_step_s: float = 0.0  # from one step of a worker to its next, without what waited for rows
    median_step_s: float = 0.0
    waited_for_rows_s: float = 0.0
    rows_lost: int = 0  # that were to be added where a server was dead
    lost: tuple[int, ...] = ()  # shards whose servers are dead, as far as it knows
    state: str = "waits"  # then "begins", "trains", "done" or "failed"
    why: str = ""


class Fall(NamedTuple):
    """What is known of a death.

    Attributes:
      kind: 'trainer', 'server' or 'place'.
      number: of them, from 0.
      why: in words.
      at_s: seconds since the run has begun.
    """

    kind: str
    number: int
    why: str
    at_s: float


class CrewFigures(NamedTuple):
    """What a run of n trainers has done; lists have a number for each trainer, and all its incarnations."""

    examples: int  # trained, each counted once
    examples_lost: int  # of trainers that were given up
    seconds: float  # until the last trainer was done
    examples_per_s: float
    steps: list[int]  # those that were trained once more among them
    rounds: list[int]
    bytes: list[int]  # sent and received by synchronisation
    average_sync_gap: list[float]  # steps per round; inf without one
    longest_step_over_median: list[float]  # of the newest incarnation, without what waited for rows
    waited_for_rows_s: list[float]
    rows_lost: int  # that were to be added where a server was dead
    replica_spread: float  # of those that have come to their end
    falls: list[Fall]
    pls: float  # portion of lost samples, of all trainers


def summed(before: Progress, now: Progress) -> Progress:
    """What incarnations of a trainer have done before, and one more of them.

    >>> summed(Progress(position=9, steps=9), Progress(position=12, steps=3)).steps
    12
    """
    return now._replace(**{name: getattr(before, name) + getattr(now, name) for name in _SUMS})


def figures_of(
    reached: Sequence[Progress], lost: int, seconds: float, ended: Sequence[PyTree], falls: Sequence[Fall]
) -> CrewFigures:
    """The figures of a run.

    Args:
      reached: of each trainer, of all its incarnations.
      lost: examples that no trainer trains.
      seconds: of the run.
      ended: parameters of those that are done, leaves [1, ...].
      falls: deaths.
    """
    all_of = lambda name: [getattr(one, name) for one in reached]
    examples, steps, rounds = sum(all_of("examples")), all_of("steps"), all_of("rounds")
    return CrewFigures(
        examples=examples,
        examples_lost=lost,
        seconds=seconds,
        examples_per_s=examples / seconds,
        steps=steps,
        rounds=rounds,
        bytes=all_of("bytes"),
        average_sync_gap=[step / made if made else float("inf") for step, made in zip(steps, rounds, strict=True)],
        longest_step_over_median=[
            one.longest_step_s / one.median_step_s if one.median_step_s else 0 for one in reached
        ],
        waited_for_rows_s=all_of("waited_for_rows_s"),
        rows_lost=sum(all_of("rows_lost")),
        replica_spread=replica_spread(jax.tree.map(lambda *leaves: np.concatenate(leaves), *ended)),
        falls=list(falls),
        pls=lost / (examples + lost) if examples + lost else 0.0,
    )
