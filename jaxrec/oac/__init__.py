"""OAC, optimistic asynchrony control: several batches in flight, with the results of serial execution.

For tables larger than device memory. `Pipeline` replaces `jaxrec.Serial`, over rows that the host moves; `Overlap` is a
step for it, over rows that the devices move. Start with `ring`, which is pure, usable alone, and contains the
equations; then read `overlap`, or `pipeline`, which begins with an overview of the stages.
"""

from jaxrec.oac.overlap import Overlap
from jaxrec.oac.pipeline import Pipeline
from jaxrec.oac.ring import Ring, append, commit, init, replay, validate

__all__ = ["Overlap", "Pipeline", "Ring", "append", "commit", "init", "replay", "validate"]
