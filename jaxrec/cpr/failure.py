"""Failure times and failed nodes: drawn, placed, or from a trace.

All times are in hours. Reference: Maeng et al., CPR, MLSys 2021, arXiv 2011.02999.
"""

from typing import NamedTuple

import numpy as np

from jaxrec.bounds import is_positive, real_number, whole_number


class Failures(NamedTuple):
    """Failures of nodes; those at the same time are one failure of the job."""

    hours: np.ndarray  # f64[n] since the start, ascending
    node: np.ndarray  # i32[n] from 0 to nodes - 1; -1 if unknown
    nodes: int  # number of nodes of the whole system, including those that never fail
    span_hours: float  # length of the observation


def draw_failures(
    mtbf_hours: float, horizon_hours: float, nodes: int, seed: int, shape: float = 1.0, failed_nodes: int = 1
) -> Failures:
    """Draw failures whose gaps follow a gamma distribution, by default (shape 1) the exponential one.

    The first gap begins at 0, as the age of a job does, so a shape below 1 gives more than horizon / MTBF failures.

    Args:
      mtbf_hours: mean gap.
      horizon_hours: length of time to draw.
      nodes: number of nodes of the job, all equally likely to fail.
      seed: seed of gaps and nodes.
      shape: shape of the gamma distribution; below 1 failures come in bursts.
      failed_nodes: m, number of distinct nodes lost in each failure.

    Returns:
      Failures, with m entries of the same hour per failure.

    >>> draw_failures(mtbf_hours=28, horizon_hours=56, nodes=8, seed=7).hours.round(1).tolist()
    [19.8, 48.5]
    """
    _check_nodes(nodes, failed_nodes)
    for name, value in (("mtbf_hours", mtbf_hours), ("horizon_hours", horizon_hours), ("shape", shape)):
        real_number(name, value, "above 0 and finite", is_positive)
    rng = np.random.default_rng(seed)
    hours = np.zeros(1)
    while hours[-1] < horizon_hours:
        more = 16 + int(1.1 * (horizon_hours - hours[-1]) / mtbf_hours)
        hours = np.concatenate([hours, hours[-1] + rng.gamma(shape, mtbf_hours / shape, more).cumsum()])
    hours = np.unique(hours[1:])  # two within a rounding of each other are one
    return _on_nodes(rng, hours[hours < horizon_hours], nodes, failed_nodes, horizon_hours)


def place_failures(number: int, horizon_hours: float, nodes: int, seed: int, failed_nodes: int = 1) -> Failures:
    """Place a number of failures uniformly over a job, as the emulation of arXiv 2011.02999 does with two.

    Args:
      number: number of failures.
      horizon_hours: length of the job.
      nodes: number of nodes of the job, all equally likely to fail.
      seed: seed of hours and nodes.
      failed_nodes: m, number of distinct nodes lost in each failure.

    Returns:
      Failures, with m entries of the same hour per failure.
    """
    _check_nodes(nodes, failed_nodes)
    whole_number("number", number, 0)
    real_number("horizon_hours", horizon_hours, "above 0 and finite", is_positive)
    rng = np.random.default_rng(seed)
    return _on_nodes(rng, np.sort(rng.uniform(0, horizon_hours, number)), nodes, failed_nodes, horizon_hours)


def interruptions(failures: Failures) -> tuple[np.ndarray, np.ndarray]:
    """Merge failures of the same time, as seen by a job that runs on all nodes.

    Args:
      failures: failures of nodes.

    Returns:
      f64[k] distinct hours, ascending; i32[k] number of distinct nodes that fail at each.
    """
    pairs = np.unique(np.stack([failures.hours, failures.node]), axis=1)
    hours, count = np.unique(pairs[0], return_counts=True)
    return hours, count.astype(np.int32)


def _check_nodes(nodes, failed_nodes):
    whole_number("failed_nodes", failed_nodes, 1, whole_number("nodes", nodes), ", nodes: a failure takes some of them")


def _on_nodes(rng, hours, nodes, failed_nodes, span):
    """Assign nodes to each failure."""
    if failed_nodes == 1:
        node = rng.integers(nodes, size=len(hours))
    else:
        node = rng.random((len(hours), nodes)).argsort(axis=1)[:, :failed_nodes].reshape(-1)
    return Failures(np.repeat(hours, failed_nodes), node.astype(np.int32), nodes, span)
