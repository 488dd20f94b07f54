"""CPR: partial recovery of lost embedding shards from checkpoints that save the most used rows first.

`plan_recovery` decides before training whether partial recovery pays and how often to save; `Recovery` then watches an
engine. Read `schedule` first for the equations, then `priority` for the choice of rows, then `recovery`.
"""

from jaxrec.callbacks import RolledBack
from jaxrec.cpr.costs import measure_costs
from jaxrec.cpr.failure import Failures, draw_failures, place_failures
from jaxrec.cpr.priority import Priority, mfu, random_rows, round_robin, scar, ssu
from jaxrec.cpr.recovery import Recovery
from jaxrec.cpr.schedule import Costs, Overhead, RecoveryPlan, plan_recovery

__all__ = [
    "Costs", "Failures", "Overhead", "Priority", "Recovery", "RecoveryPlan", "RolledBack",
    "draw_failures", "measure_costs", "mfu", "place_failures", "plan_recovery", "random_rows", "round_robin",
    "scar", "ssu",
]  # fmt: skip
