"""When to save: the steps of regular saves, and of those between them.

Reference: Maeng et al., CPR, MLSys 2021, arXiv 2011.02999, section 5.
"""

from typing import NamedTuple


class Clock(NamedTuple):
    """The schedule of a run's saves, in steps, which need not be whole.

    >>> clock = Clock(every=10, mini=2.5)
    >>> [step for step in range(1, 13) if clock.due(step)], clock.regular_due(12, since=0)
    ([3, 5, 8, 10], True)
    """

    every: float  # T_save: from one regular save to the next
    mini: float  # r T_save with a scheme, else T_save: from one save to the next

    def due(self, step: int) -> bool:
        """Whether a save falls on a step."""
        return _between(self.mini, step - 1, step)

    def regular_due(self, step: int, since: int) -> bool:
        """Whether a regular save has fallen due since a step: one that failed stays due."""
        return _between(self.every, since, step)


def _between(every, since, step):
    """Whether a multiple of `every` lies in (since, step]."""
    return int(step / every + 1e-9) > int(since / every + 1e-9)
