"""Servers that die while a run goes on, and `Serial` over host tables that loses the same shards at the same steps:
both must end with the same bits.

`Log` and the engine of a run note what a death has done: at which step shards were lost, and which saves were not made
by then. `of_losses` makes tables, an engine and `failures=` of it for the run that is told instead.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrec.embedding import HostTables
from jaxrec.loop import Serial
from jaxrec.oac import Pipeline
from jaxrec.types import ShardsLost, TrainState

Losses = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]  # {step: (lost shards, steps of saves not made by then)}


class Noting:
    """An engine that notes which of its cuts are saved; those of the steps in `missed` are kept for `Late`."""

    missed: tuple[int, ...] = ()

    def cut(self, step, save, unreached="warn"):
        """As that of an engine."""
        notes = self.__dict__.setdefault("notes", {})  # {step of a cut: whether it was saved}

        def noted(state):
            if step in self.missed and not notes[step]:
                self.__dict__.setdefault("late", []).append(save)
                return
            save(state)
            notes[step] = True

        notes[step] = False
        super().cut(step, noted, unreached)  # type: ignore[misc]


class NotingSerial(Noting, Serial):
    """One batch after the other."""


class NotingPipeline(Noting, Pipeline):
    """Batches in flight."""


class Watcher:
    """What an engine can enter."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.losses: Losses = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class Log(Watcher):
    """Notes, before the recovery, at which step which shards were lost, and which saves were not made by then; `more`
    says whether others were lost at such a step when those were back, which no run that is told of failures can do."""

    more = False

    def recover(self, shards: Sequence[int]) -> None:
        """As that of a watcher."""
        step = self.engine.step
        notes = self.engine.__dict__.get("notes", {})
        missed = tuple(at for at, saved in notes.items() if at <= step and not saved)
        if step:  # before the first step there is nothing to lose
            first, _ = self.losses.setdefault(step, (tuple(shards), missed))
            self.more = self.more or not set(shards) <= set(first)


class Late(Watcher):
    """Makes, after the recovery, the saves that lost shards have kept from being made."""

    def recover(self, shards: Sequence[int]) -> None:
        """As that of a watcher."""
        for save in self.engine.__dict__.pop("late", []):
            save(self.engine.state)


class Dying(HostTables):
    """Host tables that lose shards in the put of some steps: they come back before the cut of that step."""

    def put(self, plans, rows, shards=None):
        """As that of `Tables`."""
        super().put(plans, rows, shards)
        if lost := self.__dict__["deaths"].pop(self.step, None):
            raise ShardsLost(lost)
        return self


def of_losses(losses: Losses, tables: HostTables) -> tuple[HostTables, tuple[int, ...], dict[int, Sequence[int]]]:
    """What a run of `Serial` is told instead of deaths that have really been.

    That is `failures=`, but where a real loss has kept saves from being made: these are made after the recovery, and
    one of the very step comes after it, too.

    Args:
      losses: as `Log` has noted them.
      tables: of initial rows.

    Returns:
      The tables, what its engine's `missed` is, and `failures=`.
    """
    dying = Dying(tables.spec, tables.layout, tables.shards)
    dying.__dict__["deaths"] = {step: shards for step, (shards, missed) in losses.items() if step in missed}
    late = tuple(at for step, (_, missed) in losses.items() for at in missed if at != step)
    return dying, late, {step: shards for step, (shards, missed) in losses.items() if step not in missed}


def digest_rows(stack: str, shard: int, parts: Mapping[str, np.ndarray]) -> tuple[int, ...]:
    """The checksums of a shard's rows and slots; runs where they live."""
    return tuple(zlib.crc32(np.asarray(array).tobytes()) for array in parts.values())


def digests(state: TrainState) -> dict[Any, Any]:
    """A checksum of each array of a state, by its place."""
    dense = [zlib.crc32(np.asarray(array).tobytes()) for array in jax.tree.leaves(jax.device_get(state.dense))]
    return {"dense": dense, **state.tables.on_shards(digest_rows)}
