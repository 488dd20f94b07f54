"""When to save and how to recover: the overhead model of CPR in plain floats.

All times are in hours, all overheads are fractions of the useful time T_total, and T_fail is the mean useful time
between failures of the whole job. Reference: Maeng et al., CPR, MLSys 2021, arXiv 2011.02999, eqs. (1) to (6),
reconstructed from its abstract and from papers that cite it: check them against the PDF before quoting them as the
paper's.
"""

import math
from typing import Literal, NamedTuple, TypedDict

from jaxrec.bounds import is_not_negative, is_portion, is_positive, real_number, whole_number

Mode = Literal["full", "partial"]


class Costs(NamedTuple):
    """Costs of saves and recoveries of a job, and its failure rate."""

    save_hours: float  # O_save, of one save of everything
    load_hours: float  # O_load, of one recovery; of a full one if partial_load_hours is given
    reschedule_hours: float  # O_res, of one recovery
    mtbf_hours: float  # T_fail, of the whole job
    total_hours: float  # T_total, without overhead
    nodes: int  # N_emb, number of nodes that hold embedding tables
    failed_nodes: int = 1  # m, number of nodes lost in a failure
    # The equations have one O_load, but a partial recovery reads only the failed nodes. None: both cost the same.
    partial_load_hours: float | None = None

    def load_of(self, mode: Mode) -> float:
        """Return O_load of one recovery in a mode, in hours."""
        partial = self.partial_load_hours
        return self.load_hours if mode == "full" or partial is None else partial


class Overhead(NamedTuple):
    """Time that is not useful, as fractions of T_total."""

    save: float
    load: float
    lost_work: float
    reschedule: float

    @property
    def total(self) -> float:
        """Sum of all four."""
        return sum(self)


class InSteps(TypedDict):
    """Arguments of `Recovery` that a plan decides."""

    save_every_steps: float
    total_steps: int
    mode: Mode


class RecoveryPlan(NamedTuple):
    """Recovery mode and save interval, with their expected overhead and PLS."""

    mode: Mode
    save_every_hours: float  # useful time
    expected_overhead: Overhead
    expected_pls: float  # by eq. (5); 0 with full recovery
    total_hours: float  # useful time, as in the costs

    def in_steps(self, seconds_per_step: float) -> InSteps:
        """Return the plan as arguments of `Recovery`, which counts steps instead of hours.

            Recovery(directory, **plan.in_steps(seconds_per_step=0.05))

        A plan of full recovery takes no scheme.

        Args:
          seconds_per_step: mean useful time of one step, without saves and recoveries.

        Returns:
          {'save_every_steps' (may be fractional), 'total_steps', 'mode'}.

        Raises:
          ValueError: the plan saves more often than once per step.

        >>> plan = plan_recovery(SETTING_A, target_pls=0.1)
        >>> plan.in_steps(seconds_per_step=0.5)
        {'save_every_steps': 322560.0, 'total_steps': 403200, 'mode': 'partial'}
        """
        rule = "above 0 and finite: time some hundred steps without saves, and give the mean"
        seconds = real_number("seconds_per_step", seconds_per_step, rule, is_positive)
        # Rounded, as hours are floats: 44.8 h would not be a whole number of steps otherwise.
        every, total = (round(hours * 3600 / seconds, 6) for hours in (self.save_every_hours, self.total_hours))
        if not 1 <= every <= total < math.inf:
            raise ValueError(
                f"save_every_hours={self.save_every_hours:.6g} are {every:.3g} steps of {seconds:g} s, and "
                f"total_hours={self.total_hours:.6g} are {total:.3g}: a plan saves once per step at most. Give "
                "seconds_per_step in seconds, or plan with a higher target_pls."
            )
        return InSteps(save_every_steps=every, total_steps=round(total), mode=self.mode)


# Solved from the overheads of the abstract (8.5 % to 0.53 %, 8.2 % to 0.68 %) with a target PLS of 0.1; not the paper's
# own numbers. Only the sum of loading and rescheduling can be solved for: it is given as load.
SETTING_A = Costs(5.619 / 60, 5.392 / 60, 0.0, 28.0, 56.0, 8)
SETTING_B = Costs(4.988 / 60, 8.307 / 60, 0.0, 28.0, 56.0, 8)


def full_overhead(costs: Costs, save_every_hours: float) -> Overhead:
    """Return the overhead when all nodes go back to the last save (eq. 1).

    O_full = O_save T_total / T_save + (O_load + T_save / 2 + O_res) T_total / T_fail

    Args:
      costs: costs of the job.
      save_every_hours: T_save, useful time between saves.

    Returns:
      Overhead, fractions of T_total.

    >>> print(f"{100 * full_overhead(SETTING_A, full_interval(SETTING_A)).total:.2f} %")
    8.50 %
    """
    return _overhead(costs, "full", save_every_hours)


def partial_overhead(costs: Costs, save_every_hours: float) -> Overhead:
    """Return the overhead when only the failed nodes go back and no work is repeated (eq. 2).

    O_part = O_save T_total / T_save + (O_load + O_res) T_total / T_fail

    Args:
      costs: costs of the job.
      save_every_hours: T_save, useful time between saves.

    Returns:
      Overhead, fractions of T_total.

    >>> print(f"{100 * partial_overhead(SETTING_A, partial_interval(SETTING_A, 0.1)).total:.2f} %")
    0.53 %
    """
    return _overhead(costs, "partial", save_every_hours)


def _overhead(costs, mode, save_every_hours):
    check_costs(costs, save_every_hours=save_every_hours)
    load, reschedule = costs.load_of(mode) / costs.mtbf_hours, costs.reschedule_hours / costs.mtbf_hours
    lost_work = save_every_hours / 2 / costs.mtbf_hours if mode == "full" else 0.0
    return Overhead(costs.save_hours / save_every_hours, load, lost_work, reschedule)


def full_interval(costs: Costs) -> float:
    """Return the hours between saves that minimise the overhead of full recovery (eq. 3; Young, 1974).

    T_save = sqrt(2 O_save T_fail), where the derivative of eq. (1) is 0

    Args:
      costs: costs of the job.

    Returns:
      Useful hours; may exceed the length of the job.
    """
    check_costs(costs)
    return math.sqrt(2 * costs.save_hours * costs.mtbf_hours)


def lost_portion(seen: float, saved: float, total: float, nodes: int, failed_nodes: int = 1) -> float:
    """Return the portion of lost samples, PLS, that one failure adds with partial recovery (eq. 4).

    PLS += m (S_i - S_last_save) / (S_total N_emb), from 0 at the start

    Args:
      seen: S_i, samples (or useful hours) up to the failure.
      saved: S_last_save, samples up to the last save.
      total: S_total, samples of the job.
      nodes: N_emb.
      failed_nodes: m.

    Returns:
      A fraction of the samples of the job.

    >>> lost_portion(seen=600, saved=200, total=1000, nodes=8)
    0.05
    """
    if not 0 <= saved <= seen <= total or not 1 <= failed_nodes <= nodes or not total > 0:
        raise ValueError(
            f"saved={saved}, seen={seen}, total={total}, failed_nodes={failed_nodes}, nodes={nodes}: need 0 <= saved "
            "<= seen <= total and 1 <= failed_nodes <= nodes; count samples from the start of the job."
        )
    return failed_nodes * (seen - saved) / (total * nodes)


def expected_pls(costs: Costs, save_every_hours: float) -> float:
    """Return the expected PLS of partial recovery if T_save is much shorter than the job (eq. 5).

    E[PLS] = m T_save / (2 T_fail N_emb)

    Args:
      costs: costs of the job.
      save_every_hours: T_save, useful time between saves.

    Returns:
      A fraction of the samples of the job.
    """
    check_costs(costs, save_every_hours=save_every_hours)
    return costs.failed_nodes * save_every_hours / (2 * costs.mtbf_hours * costs.nodes)


def expected_pls_of_job(costs: Costs, save_every_hours: float) -> float:
    """Return the expected PLS of a job of any length, at a constant failure rate.

    Derived here: m / (T_total N_emb T_fail) times the integral over the job of t - (last save before t). It is below
    eq. (5) unless the job is a whole number of intervals, as the last interval is cut short.

    Args:
      costs: costs of the job.
      save_every_hours: T_save, useful time between saves.

    Returns:
      A fraction of the samples of the job.

    >>> plan = plan_recovery(SETTING_A, target_pls=0.1)
    >>> print(f"{plan.expected_pls:.3f} {expected_pls_of_job(SETTING_A, plan.save_every_hours):.3f}")
    0.100 0.085
    """
    check_costs(costs, save_every_hours=save_every_hours)
    whole, rest = divmod(costs.total_hours, save_every_hours)
    area = (whole * save_every_hours**2 + rest**2) / 2
    return costs.failed_nodes * area / (costs.total_hours * costs.nodes * costs.mtbf_hours)


def partial_interval(costs: Costs, target_pls: float) -> float:
    """Return the hours between saves at which partial recovery has the target PLS (eq. 6).

    T_save = 2 PLS N_emb T_fail / m

    Args:
      costs: costs of the job.
      target_pls: portion of lost samples that the model tolerates, above 0 and at most 1.

    Returns:
      Useful hours; may exceed the length of the job.
    """
    check_costs(costs)
    real_number("target_pls", target_pls, "above 0 and at most 1: it is a portion of the samples", is_portion)
    return 2 * target_pls * costs.nodes * costs.mtbf_hours / costs.failed_nodes


def plan_recovery(costs: Costs, target_pls: float) -> RecoveryPlan:
    """Choose partial recovery if it is cheaper than full recovery, each with its own save interval.

    This is the policy of arXiv 2011.02999; full recovery has its cheapest interval. Intervals are limited to the length
    of the job, which must begin with a save or with rows that can be regenerated.

    Args:
      costs: costs of the job.
      target_pls: portion of lost samples that the model tolerates, above 0 and at most 1.

    Returns:
      RecoveryPlan.

    >>> plan = plan_recovery(SETTING_B, target_pls=0.1)
    >>> print(f"{plan.mode} every {plan.save_every_hours:.1f} h, overhead {100 * plan.expected_overhead.total:.2f} %")
    partial every 44.8 h, overhead 0.68 %
    """
    full_every = min(full_interval(costs), costs.total_hours)
    partial_every = min(partial_interval(costs, target_pls), costs.total_hours)
    full, partial = full_overhead(costs, full_every), partial_overhead(costs, partial_every)
    if partial.total < full.total:
        pls = expected_pls(costs, partial_every)
        return RecoveryPlan("partial", partial_every, partial, pls, costs.total_hours)
    return RecoveryPlan("full", full_every, full, 0.0, costs.total_hours)


def check_costs(costs: Costs, mode: str = "full", **positive: float) -> None:
    """Raise if costs, the mode, or other numbers (which must be above 0) are out of range."""
    above_0 = {name: getattr(costs, name) for name in ("save_hours", "mtbf_hours", "total_hours")} | positive
    for name, value in above_0.items():
        real_number(name, value, "above 0 and finite: give hours", is_positive)
    for name in ("load_hours", "reschedule_hours", "partial_load_hours"):
        if (value := getattr(costs, name)) is not None:
            real_number(name, value, "0 or more and finite: give hours, 0 if it costs none", is_not_negative)
    nodes = whole_number("nodes", costs.nodes)
    whole_number("failed_nodes", costs.failed_nodes, 1, nodes, ", nodes: a failure takes some of them")
    if mode not in ("full", "partial"):
        raise ValueError(f"mode={mode!r} must be 'full' or 'partial'.")
