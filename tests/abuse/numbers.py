"""Invalid numbers: one checker refuses them by the name of the argument."""

import numpy as np

from abuse import situation
from jaxrec import loop
from jaxrec.bounds import is_not_negative, real_number, whole_number
from jaxrec.checkpoint import Checkpointer, RowCheckpointer
from jaxrec.cpr import failure, plan_recovery, schedule, ssu
from jaxrec.cpr.priority import budget_rows
from jaxrec.embedding import EmbeddingSpec, Lookup, Table
from jaxrec.oac import ring

MISTAKES = {
    "two and a half images to keep": ("keep=2.5 must be a whole number from 1", lambda at: Checkpointer(at, keep=2.5)),
    "keep=True": ("keep=True must be a whole number", lambda at: Checkpointer(at, keep=True)),
    "deltas as text": ("most_deltas='8' must be a whole", lambda at: RowCheckpointer(at, most_deltas="8")),
    "a hook at every half step": ("steps=0.5 must be a whole number", lambda at: loop.every(0.5, print)),
    "a sample of every half batch": ("every=0.5 must be a whole number .*2 every second one", lambda at: ssu(0.5)),
    "a fraction as text": ("fraction='0.1' must be above 0 and at most 1", lambda at: budget_rows(100, "0.1")),
    "half a failure": ("number=0.5 must be a whole", lambda at: failure.place_failures(0.5, 56, 8, 0)),
    "half a node": ("nodes=8.5 must be a whole", lambda at: failure.draw_failures(28, 56, 8.5, 0)),
    "hours as text": ("mtbf_hours='28' must be above 0", lambda at: failure.draw_failures("28", 56, 8, 0)),
    "a target as text": ("target_pls='0.1' must", lambda at: plan_recovery(schedule.SETTING_A, "0.1")),
    "a scale as text": ("scale='1' must be 0 or more", lambda at: Table(4, 2, scale="1")),
    "shards=True": (
        "shards=True must be a whole number",
        lambda at: EmbeddingSpec({"t": Table(4, 2)}, {"t": Lookup("t")}, shards=True),
    ),
    "a ring of half a batch": ("depth=0.5 must be a whole number", lambda at: ring.init({}, 0.5)),
    "an array in place of a number": ("x=array.* must be a whole", lambda at: whole_number("x", np.arange(2))),
    "a NaN": ("x=nan must be 0 or more", lambda at: real_number("x", np.nan, "0 or more", is_not_negative)),
}
for _words, (_match, _act) in MISTAKES.items():
    situation(_words, ValueError, _match)(_act)


@situation("numpy's numbers are numbers")
def _(directory):
    assert type(whole_number("x", np.int64(3))) is int
    assert real_number("x", np.float32(0.5), "0 or more", is_not_negative) == 0.5
