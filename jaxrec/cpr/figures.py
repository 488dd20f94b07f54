"""What a recovery counts, and what of it goes on with a run that was restored.

Reference: Maeng et al., CPR, MLSys 2021, arXiv 2011.02999, eq. (4).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrec.cpr.saves import Saves
from jaxrec.cpr.schedule import lost_portion
from jaxrec.cpr.watch import Watch
from jaxrec.embedding import EmbeddingSpec

_KEPT = ("pls", "failed", "lost_steps", "rows_saved", "saves")  # go on with a run


class Figures:
    """What a recovery has saved, lost and brought back. `Recovery` is the one that has this.

    Attributes:
      pls: portion of lost samples so far (eq. 4); a mini-save does not count as a checkpoint there,
        as we recall the paper.
      failed: shards lost so far. lost_steps: steps trained again, with full recovery.
    """

    spec: EmbeddingSpec
    _saves: Saves
    _watch: Watch | None

    def __init__(self, total_steps: int, extra: Callable[[int], Mapping[str, Any]] | None = None):
        self._total, self._extra = total_steps, extra
        self.pls, self.failed, self.lost_steps = 0.0, 0, 0

    @property
    def saves(self) -> int:
        """Saves so far."""
        return self._saves.saves

    @property
    def rows_saved(self) -> int:
        """Rows in them."""
        return self._saves.rows_saved

    @property
    def stall_seconds(self) -> float:
        """How long training has waited for saves: for picking, copying, and what was being written
        still; of an engine that saves beside training, how long its writes were held."""
        return self._saves.stall_seconds

    @property
    def bytes_written(self) -> int:
        """Bytes of all images and deltas committed since it was entered, merged deltas included."""
        return self._saves.bytes_written

    @property
    def failed_saves(self) -> list[str]:
        """What went wrong with saves, a line for each that failed."""
        return self._saves.failures

    @property
    def scheme_name(self) -> str | None:
        """Of the scheme that picks rows, if there is one."""
        return self._watch.scheme.name if self._watch else None

    def remember(self, step: int, regular: int) -> dict[str, Any]:
        """What a save says beside rows and dense state.

        Args:
          step: of the save.
          regular: step of the last regular save.

        Raises:
          ValueError: what the caller saves along has the name that the recovery has.
        """
        extra = dict(self._extra(step)) if self._extra else {}
        if "cpr" in extra:
            raise ValueError("extra holds 'cpr', under which the recovery saves its own figures: take another name.")
        trackers = self._watch.remember() if self._watch else {}
        more = {"regular": regular, "scheme": self.scheme_name, "trackers": trackers}
        return {**extra, "cpr": {name: getattr(self, name) for name in _KEPT} | more}

    def go_on(self, known: Mapping[str, Any], step: int) -> None:
        """Goes on with what an image remembers; what that lacks of its step is lost in all shards."""
        self.pls, self.failed, self.lost_steps = (known.get(name, 0) for name in ("pls", "failed", "lost_steps"))
        self._saves.rows_saved, self._saves.saves = known.get("rows_saved", 0), known.get("saves", 0)
        regular = known.get("regular", step)
        # And no more of it later: a shard that fails next comes back with what was restored now.
        if regular < step:
            self.pls += self._portion(step, regular, self.spec.shards)

    def count_lost(self, step: int, saved: Sequence[int]) -> None:
        """Counts shards that failed right after a step; for each the step up to which it was saved."""
        self.pls += sum(self._portion(step, at, 1) for at in saved)
        self.failed += len(saved)

    def _portion(self, step, saved, shards):
        return lost_portion(step, saved, max(self._total, step), self.spec.shards, shards)
