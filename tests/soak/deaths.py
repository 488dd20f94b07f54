"""Compares a run whose servers die with `Serial` over host tables that loses the same shards at the same steps.

Both must end with the same bits. `Log` and the engine of the run record at which steps shards were lost, which saves
had not been made by then, and which row deltas a death has voided while servers wrote them. `of_losses` and
`DeltaWrites` make the run of `Serial` repeat that.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrec.callbacks import Callback
from jaxrec.checkpoint import row_deltas
from jaxrec.embedding import HostTables
from jaxrec.engine import Serial
from jaxrec.oac import Pipeline
from jaxrec.types import ShardsLost, TrainState

Losses = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]  # {step: (lost shards, steps of saves not made by then)}


class Noting:
    """Engine mixin that records which snapshots were saved; saves of the steps in `missed` are left to `Late`."""

    missed: tuple[int, ...] = ()

    def snapshot_at(self, step, save, dropped=lambda: None):
        """Save at a step, see the engine."""
        notes = self.__dict__.setdefault("notes", {})  # {step of a snapshot: whether it was saved}

        def noted(state):
            if step in self.missed and not notes[step]:
                self.__dict__.setdefault("late", []).append(save)
                return
            save(state)
            notes[step] = True

        notes[step] = False
        super().snapshot_at(step, noted, dropped)  # type: ignore[misc]


class NotingSerial(Noting, Serial):
    """`Serial` that records its snapshots."""


class NotingPipeline(Noting, Pipeline):
    """`Pipeline` that records its snapshots."""


class Watcher(Callback):
    """Callback that knows its engine."""

    def begin(self, engine: Any) -> None:
        """See `Callback`."""
        self.engine = engine


class DeltaWrites:
    """Context in which the writes of row deltas are numbered.

    Args:
      failing: numbers of the writes that are to fail, from 0.

    Attributes:
      failed: numbers of those that have failed.
    """

    def __init__(self, failing: Sequence[int] = ()):
        self._failing, self._count, self._write = failing, 0, row_deltas.write_delta
        self.failed: list[int] = []

    def __enter__(self):
        setattr(row_deltas, "write_delta", self._numbered)  # noqa: B010, which mypy would refuse as an assignment
        return self

    def __exit__(self, *error):
        setattr(row_deltas, "write_delta", self._write)  # noqa: B010

    def _numbered(self, directory, image):
        number, self._count = self._count, self._count + 1
        try:
            if number in self._failing:
                raise OSError("a server died while it wrote this delta")
            return self._write(directory, image)
        except BaseException:
            self.failed.append(number)
            raise


class Log(Watcher):
    """Callback before the recovery that records lost shards, by step, and the saves not made by then.

    Attributes:
      losses: losses so far.
      more: whether further shards were lost at the same step after a recovery, which `failures=` cannot reproduce.
    """

    more = False

    def __init__(self):
        self.losses: Losses = {}
        self._writes = DeltaWrites()

    @property
    def voided(self) -> tuple[int, ...]:
        """Numbers of the writes of row deltas that a death has voided, for `DeltaWrites`."""
        return tuple(self._writes.failed)

    def begin(self, engine: Any) -> None:
        """See `Callback`."""
        super().begin(engine)
        self._writes.__enter__()

    def end(self, error: BaseException | None) -> None:
        """See `Callback`."""
        self._writes.__exit__()

    def recover(self, shards: Sequence[int]) -> None:
        """Record the loss."""
        step = self.engine.step
        notes = self.engine.__dict__.get("notes", {})
        missed = tuple(at for at, saved in notes.items() if at <= step and not saved)
        if step:  # before the first step nothing is lost
            first, _ = self.losses.setdefault(step, (tuple(shards), missed))
            self.more = self.more or not set(shards) <= set(first)


class Late(Watcher):
    """Callback after the recovery that makes the saves that lost shards have prevented."""

    def recover(self, shards: Sequence[int]) -> None:
        """Make the saves that are left."""
        for save in self.engine.__dict__.pop("late", []):
            save(self.engine.state)


class Dying(HostTables):
    """Host tables that lose shards in the put of some steps; they are restored before the snapshot of that step."""

    def put(self, plans, rows, shards=None):
        """Write rows, see `Tables.put`; raises `ShardsLost` at the steps of `deaths`."""
        super().put(plans, rows, shards)
        if lost := self.__dict__["deaths"].pop(self.step, None):
            raise ShardsLost(lost)
        return self


def of_losses(losses: Losses, tables: HostTables) -> tuple[HostTables, tuple[int, ...], dict[int, Sequence[int]]]:
    """Return the inputs with which a run of `Serial` reproduces recorded losses.

    These are `failures=`, except where a loss has prevented saves. Such saves are made after the recovery; where one of
    them is of the step of the loss itself, the tables raise the loss in its put, so that its snapshot follows the
    recovery.

    Args:
      losses: `Log.losses` of a run.
      tables: tables with initial rows.

    Returns:
      The tables; `missed` for the engine; `failures=` for the recovery.
    """
    dying = Dying(tables.spec, tables.layout, tables.shards)
    dying.__dict__["deaths"] = {step: shards for step, (shards, missed) in losses.items() if step in missed}
    late = tuple(at for step, (_, missed) in losses.items() for at in missed if at != step)
    return dying, late, {step: shards for step, (shards, missed) in losses.items() if step not in missed}


def digest_rows(stack: str, shard: int, parts: Mapping[str, np.ndarray]) -> tuple[int, ...]:
    """Return the checksums of a shard's rows and slots; runs at its server."""
    return tuple(zlib.crc32(np.asarray(array).tobytes()) for array in parts.values())


def digests(state: TrainState) -> dict[Any, Any]:
    """Return a checksum of each array of a state, by (stack, shard), and of the dense leaves."""
    dense = [zlib.crc32(np.asarray(array).tobytes()) for array in jax.tree.leaves(jax.device_get(state.dense))]
    return {"dense": dense, **state.tables.on_shards(digest_rows)}
