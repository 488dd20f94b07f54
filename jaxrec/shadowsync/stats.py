"""Statistics of several trainers."""

import dataclasses
from collections.abc import Sequence


def average_sync_gap(steps: Sequence[int], rounds: Sequence[int]) -> float:
    """Return the steps per round over all trainers; inf without a round.

    Args:
      steps, rounds: numbers of each trainer.

    >>> average_sync_gap([40, 60], [10, 10])
    5.0
    """
    return sum(steps) / sum(rounds) if sum(rounds) else float("inf")


@dataclasses.dataclass(frozen=True)
class TrainerStats:
    """Statistics of a run of n trainers; lists have an entry per trainer.

    Attributes:
      examples: trained by all.
      seconds: until the last trainer was done, without rounds after that.
      steps, rounds: of each trainer.
      replica_spread: spread of the replicas at the end, without trainers that were dropped or given up.
    """

    examples: int
    seconds: float
    steps: list[int]
    rounds: list[int]
    replica_spread: float

    @property
    def examples_per_s(self) -> float:
        """Rate of all trainers together."""
        return self.examples / self.seconds

    @property
    def average_sync_gap(self) -> float:
        """Steps per round; inf without a round."""
        return average_sync_gap(self.steps, self.rounds)
