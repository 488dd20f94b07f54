"""Invalid numbers: one checker refuses them by the name of the argument."""

import numpy as np

from abuse import situation
from jaxrec.bounds import is_not_negative, real_number, whole_number
from jaxrec.checkpoint import Checkpointer, RowCheckpointer
from jaxrec.cpr.failure import draw_failures
from jaxrec.cpr.priority import budget_rows

MISTAKES = {
    "two and a half images to keep": ("keep=2.5 must be a whole number from 1", lambda at: Checkpointer(at, keep=2.5)),
    "no deltas": ("most_deltas=0 must be a whole number from 1", lambda at: RowCheckpointer(at, most_deltas=0)),
    "half a node": ("nodes=8.5 must be a whole", lambda at: draw_failures(28, 56, 8.5, 0)),
    "a fraction as text": ("fraction='0.1' must be above 0 and at most 1", lambda at: budget_rows(100, "0.1")),
    "True for a number": ("x=True must be a whole number", lambda at: whole_number("x", True)),
    "an array in place of a number": ("x=array.* must be a whole", lambda at: whole_number("x", np.arange(2))),
    "a NaN": ("x=nan must be 0 or more", lambda at: real_number("x", np.nan, "0 or more", is_not_negative)),
}
for _words, (_match, _act) in MISTAKES.items():
    situation(_words, ValueError, _match)(_act)


@situation("numpy's numbers are numbers")
def _(directory):
    assert type(whole_number("x", np.int64(3))) is int
    assert real_number("x", np.float32(0.5), "0 or more", is_not_negative) == 0.5
