"""OAC, optimistic asynchrony control: batches in flight in parallel, results of one after the
other.

`ring` is pure and usable alone; `pipeline` is the host that runs it over `HostTables`.
"""

from jaxrec.oac.pipeline import Pipeline
from jaxrec.oac.ring import Ring, append, commit, init, replay, validate
from jaxrec.oac.sizes import memory_bytes
from jaxrec.oac.view import BrokenPipeline

__all__ = ["BrokenPipeline", "Pipeline", "Ring", "append", "commit", "init", "memory_bytes", "replay", "validate"]
