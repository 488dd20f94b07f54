"""How batches follow each other: one after the other, or overlapped. `--pipeline` chooses an engine, which each builds.

Over host or remote tables oac overlaps batches, bitwise equal to sync; none trains one batch after the other. Over
pinned tables oac overlaps transfers and programs of the device.
"""

import dataclasses
from typing import Any, ClassVar, Literal

from jaxrec.engine import Engine, Serial
from jaxrec.oac import Overlap, Pipeline
from jaxrec.task import Task
from jaxrec.types import TrainState

PipelineKind = Literal["none", "sync", "semisync", "async", "oac"]


@dataclasses.dataclass(frozen=True)
class InTurn:
    """One batch after the other."""

    pipeline: PipelineKind = "none"
    """Over host or remote tables: oac overlaps batches, bitwise equal to sync; none trains one batch after the
    other. Over pinned tables oac overlaps transfers and programs of the device."""

    def engine(self, task: Task, state: TrainState, capacity: Any = None) -> Engine:
        """Build the engine.

        Args:
          capacity: capacities of the plans, of a run that resumes; None to grow them from small ones.
        """
        return Serial(task, state, capacity=capacity)

    def figures(self, engine) -> dict[str, float]:
        """Return the engine's figures, of this process so far."""
        return {}


@dataclasses.dataclass(frozen=True)
class Overlapped(InTurn):
    """OAC over pinned rows, on the devices' own streams."""

    read_by: ClassVar = "--pipeline oac or async"
    pipeline: PipelineKind = "oac"
    window: int = 2
    """Over pinned tables: batches in the ring. Otherwise: batches in flight."""

    def engine(self, task: Task, state: TrainState, capacity: Any = None) -> Engine:
        return Serial(Overlap(task, self.window), state, capacity=capacity)


@dataclasses.dataclass(frozen=True)
class Synchronous(InTurn):
    """A pipeline that moves one batch after the other: sync, or semisync, whose transfers run beside the programs."""

    pipeline: PipelineKind = "sync"

    def engine(self, task: Task, state: TrainState, capacity: Any = None) -> Engine:
        return Pipeline(task, state, mode=self.pipeline, capacity=capacity, **self._options())

    def _options(self) -> dict[str, Any]:
        return {}


@dataclasses.dataclass(frozen=True)
class Asynchronous(Synchronous):
    """Batches in flight whose rows may be stale."""

    pipeline: PipelineKind = "async"
    window: int = 8
    """Over pinned tables: batches in the ring. Otherwise: batches in flight."""

    def _options(self) -> dict[str, Any]:
        return {"window": self.window}


@dataclasses.dataclass(frozen=True)
class OAC(Asynchronous):
    """Batches in flight whose stale rows are replaced just before the update."""

    read_by: ClassVar = "--pipeline oac over --tables host or remote"
    pipeline: PipelineKind = "oac"

    def figures(self, engine) -> dict[str, float]:
        counters = engine.counters
        return {"stale_share": counters["stale_rows"] / max(counters["rows"], 1)}


def engines_over(tables: str | None) -> dict[PipelineKind, type[InTurn]]:
    """Return the engines that `--pipeline` chooses from over tables of a kind.

    >>> list(engines_over("pinned"))
    ['none', 'oac']
    """
    engines: dict[PipelineKind, type[InTurn]] = {"none": InTurn}
    if tables in ("host", "remote"):
        engines |= {"sync": Synchronous, "semisync": Synchronous, "async": Asynchronous, "oac": OAC}
    elif tables == "pinned":
        engines["oac"] = Overlapped
    return engines
