"""Event-by-event replay of a job under failures: saves, failures, loads, recomputed work, and the resulting PLS.

Failure times are given on one of two clocks:

  useful time   the clock of the equations of schedule.py: it stands still during saves, recoveries and recomputation,
                so a job has T_total / T_fail failures on average, however long it runs. The means agree with eqs. (1),
                (2) and (5).
  wall time     the clock of a trace: failures also hit saves, recoveries and recomputation. The means exceed eqs. (1)
                and (2) by second-order terms.

Overhead is a fraction of useful time on either clock. Saves are blocking and happen every `save_every_hours` of useful
time; there is a save at 0. Nodes that fail at the same time count as one failure with one recovery.
"""

import math
from typing import NamedTuple

import numpy as np

from jaxrec.cpr.schedule import Costs, Mode, Overhead, check_costs


class Replay(NamedTuple):
    """Outcome of a replayed job."""

    overhead: Overhead  # fractions of the useful time
    useful_hours: float
    failures: int
    saves: int
    pls: float  # by eq. (4), 0 with full recovery


def replay_in_useful_time(
    costs: Costs, mode: Mode, save_every_hours: float, hours: np.ndarray, failed_nodes: np.ndarray | None = None
) -> Replay:
    """Replay a job of T_total useful hours with failures at given hours of useful time.

    Args:
      costs: costs of the job; its MTBF is not used.
      mode: 'full' or 'partial' recovery.
      save_every_hours: T_save.
      hours: f64[n], failure times, ascending; those from T_total on are ignored.
      failed_nodes: i32[n], m of each failure; `costs.failed_nodes` if None.

    Returns:
      Replay. A save at the very end of the job counts.
    """
    hours, failed = _checked(costs, mode, save_every_hours, hours, failed_nodes)
    n = int(np.searchsorted(hours, costs.total_hours))
    hours, failed = hours[:n], failed[:n]
    # Useful time stands still during saves and recoveries, so saves fall on multiples of the interval.
    since_save = hours % save_every_hours
    saves = math.floor(costs.total_hours / save_every_hours + 1e-9)
    total, full = costs.total_hours, mode == "full"
    lost, pls = (since_save.sum(), 0.0) if full else (0.0, failed @ since_save / (total * costs.nodes))
    spent = (saves * costs.save_hours, n * costs.load_of(mode), lost, n * costs.reschedule_hours)
    return Replay(Overhead(*(float(hour / total) for hour in spent)), total, n, saves, float(pls))


def replay_in_wall_time(
    costs: Costs,
    mode: Mode,
    save_every_hours: float,
    hours: np.ndarray,
    end_hours: float,
    failed_nodes: np.ndarray | None = None,
) -> Replay:
    """Replay back-to-back jobs with failures at given hours of wall time.

    A recovery is rescheduling, then loading; a failure during a recovery restarts it. A save interrupted by a failure
    is lost: its time counts as lost work, and with partial recovery the save is repeated right after the recovery.

    Args:
      costs: costs of the job; its MTBF and T_total are not used.
      mode: 'full' or 'partial' recovery.
      save_every_hours: T_save, in useful time.
      hours: f64[n], failure times, ascending; those from `end_hours` on are ignored.
      end_hours: end of the replay, in wall time.
      failed_nodes: i32[n], m of each failure; `costs.failed_nodes` if None.

    Returns:
      Replay. Its overhead is infinite if no work was kept; its PLS is relative to the useful hours.
    """
    hours, failed = _checked(costs, mode, save_every_hours, hours, failed_nodes, end_hours)
    n = int(np.searchsorted(hours, end_hours))
    cycle, recovery = save_every_hours + costs.save_hours, 0.0
    useful = since_save = now = load = lost = reschedule = lost_by_nodes = 0.0
    saves, cut_save = 0, 0.0
    for at, m in zip([*hours[:n].tolist(), end_hours], [*failed[:n].tolist(), 0], strict=True):
        # First the rest of a recovery in progress: rescheduling, then loading.
        recovering = min(at - now, recovery)
        reschedule += min(recovering, costs.reschedule_hours)
        load += max(0.0, recovering - costs.reschedule_hours)
        # The remaining time alternates between work and saves; the failure may interrupt either.
        whole, rest = divmod(since_save + at - now - recovering, cycle)
        worked, cut_save = min(rest, save_every_hours), max(0.0, rest - save_every_hours)
        useful += whole * save_every_hours + worked - since_save
        saves, since_save, now = saves + int(whole), worked, at
        # Restarts also if this failure hit a recovery.
        recovery = costs.reschedule_hours + costs.load_of(mode)
        if m:
            lost += cut_save
            lost_by_nodes += m * since_save
            if mode == "full":
                lost, useful, since_save = lost + since_save, useful - since_save, 0.0
    spent = (saves * costs.save_hours + cut_save, load, lost, reschedule)
    pls = lost_by_nodes / (useful * costs.nodes) if mode == "partial" and useful else 0.0
    return Replay(Overhead(*(hour / useful if useful else math.inf for hour in spent)), useful, n, saves, pls)


def _checked(costs, mode, save_every_hours, hours, failed_nodes, end_hours=1.0):
    check_costs(costs, mode, save_every_hours=save_every_hours, end_hours=end_hours)
    hours = np.asarray(hours, np.float64)
    failed = np.full(hours.shape, costs.failed_nodes) if failed_nodes is None else np.asarray(failed_nodes)
    if hours.ndim != 1 or failed.shape != hours.shape:
        raise ValueError(f"hours {hours.shape} and failed_nodes {failed.shape} must be of one length.")
    if len(hours) and not (hours[0] >= 0 and (np.diff(hours) > 0).all()):
        raise ValueError(
            "hours must ascend from 0 on without repeats: merge simultaneous failures with `interruptions`."
        )
    if len(hours) and not 1 <= failed.min() <= failed.max() <= costs.nodes:
        raise ValueError(f"failed_nodes from {failed.min()} to {failed.max()} must be from 1 to nodes={costs.nodes}.")
    return hours, failed
