"""OAC, optimistic asynchrony control: batches in flight in parallel, results of one after the
other.

For tables that are larger than the memory of the devices. `Pipeline` trains in the place of
`jaxrec.Serial`. Read `ring` first, which is pure, usable alone, and has the equations; then
`pipeline`, whose first lines name the stages.
"""

from jaxrec.oac.options import memory_bytes
from jaxrec.oac.pipeline import Pipeline
from jaxrec.oac.ring import Ring, append, commit, init, replay, validate
from jaxrec.oac.view import BrokenPipeline

__all__ = ["BrokenPipeline", "Pipeline", "Ring", "append", "commit", "init", "memory_bytes", "replay", "validate"]
