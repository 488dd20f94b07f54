"""Failures per node: those of a subset of nodes, how unevenly nodes and causes fail, and the MTBF of n nodes.

All times are in hours. Reference: Maeng et al., CPR, MLSys 2021, arXiv 2011.02999.
"""

import math

import numpy as np

from jaxrec.bounds import is_portion, real_number, whole_number
from jaxrec.cpr.failure import Failures


def of_nodes(failures: Failures, chosen: np.ndarray) -> Failures:
    """Return the failures seen by a job that runs on a subset of the nodes.

    Args:
      failures: failures of all nodes.
      chosen: i32[k], distinct node numbers.

    Returns:
      Failures of k nodes, numbered by their position in `chosen`.
    """
    distinct = np.unique(chosen)
    if not 0 < len(distinct) == len(chosen) or distinct[0] < 0 or distinct[-1] >= failures.nodes:
        raise ValueError(f"{len(chosen)} chosen nodes must be one or more, distinct, from 0 to {failures.nodes - 1}.")
    place = np.full(failures.nodes, -1, np.int32)
    place[chosen] = np.arange(len(chosen))
    node = np.where(failures.node >= 0, place[failures.node], -1)
    kept = node >= 0
    return failures._replace(hours=failures.hours[kept], node=node[kept], cause=failures.cause[kept], nodes=len(chosen))


def mtbf_by_cause(failures: Failures) -> dict[str, float]:
    """MTBF in hours of each cause, most frequent cause first: the span divided by the number of failures."""
    count = np.bincount(failures.cause, minlength=len(failures.causes))
    order = [int(c) for c in np.argsort(-count, kind="stable") if count[c]]
    return {failures.causes[c]: float(failures.span_hours / count[c]) for c in order}


def share_of_worst_nodes(failures: Failures, portion: float) -> float:
    """Fraction of all failures that falls on the worst nodes.

    Args:
      failures: failures with known nodes.
      portion: fraction of the nodes that counts as the worst; their number is rounded up.

    Returns:
      A fraction; it equals `portion` if all nodes fail equally often.
    """
    real_number("portion", portion, "above 0 and at most 1", is_portion)
    count = np.sort(np.bincount(failures.node[failures.node >= 0], minlength=failures.nodes))[::-1]
    return int(count[: math.ceil(portion * failures.nodes)].sum()) / max(1, int(count.sum()))


def linear_mtbf(node_mtbf_hours: float, nodes: int) -> float:
    """MTBF of n nodes that share one per-node MTBF: T_fail = T_node / n.

    Args:
      node_mtbf_hours: T_node, above 0.
      nodes: n, at least 1.

    Returns:
      Hours.
    """
    return real_number("node_mtbf_hours", node_mtbf_hours, "above 0", lambda x: x > 0) / whole_number("nodes", nodes)


def independent_mtbf(chance_per_hour: float, nodes: int) -> float:
    """Mean hours until the first hour in which any of n nodes fails: T_fail = 1 / (1 - (1 - p)^n).

    Args:
      chance_per_hour: p, the probability that one node fails within an hour, between 0 and 1 exclusive.
      nodes: n, at least 1.

    Returns:
      Hours, at least 1: time is counted in whole hours.
    """
    real_number("chance_per_hour", chance_per_hour, "between 0 and 1", lambda x: 0 < x < 1)
    return -1 / math.expm1(whole_number("nodes", nodes) * math.log1p(-chance_per_hour))
