"""Cuts: consistent states that are announced for a step, and saved in a thread while training goes
on."""

import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.interrupts import uninterrupted
from jaxrec.oac.stages import Stages
from jaxrec.oac.steps import Steps
from jaxrec.oac.workers import Workers
from jaxrec.types import ShardsLost, TrainState


class Cut(NamedTuple):
    """What is to be done at a step."""

    save: Callable[[TrainState], Any]
    unreached: Literal["warn", "ignore"]


class Cuts:
    """The cuts of a pipeline that are still to come.

    Args:
      stages, steps: of the pipeline.
    """

    def __init__(self, stages: Stages, steps: Steps):
        self._stages, self._steps = stages, steps
        self._to_come: dict[int, Cut] = {}
        self._missed: list[Callable] = []  # saves that met lost shards, and come again when those are back

    def announce(self, step: int, now: int, cut: Cut) -> None:
        """Keeps a cut for a step behind that of now.

        Raises:
          ValueError: the step lies behind, or has a cut already; no whole number, no function, an
            unknown word.
        """
        if not isinstance(step, int | np.integer) or not callable(cut.save):
            raise ValueError(f"cut(step={step!r:.80}, save={cut.save!r:.80}) wants a whole number and a function.")
        if cut.unreached not in ("warn", "ignore"):
            raise ValueError(f"unreached={cut.unreached!r} must be 'warn' or 'ignore'.")
        if step <= now:
            raise ValueError(f"step={step} is committed already ({now} are).")
        if step in self._to_come:
            raise ValueError(f"a cut of step {step} is announced already: let one function save all that is wanted.")
        self._to_come[step] = cut

    def begin(self, step: int, workers: Workers) -> None:
        """Begins the cut of a step that was just committed, if there is one, and those that lost
        shards have kept."""
        for _ in range(len(self._missed)):
            self._begin(self._missed[0], workers, lambda: self._missed.pop(0))
        if step in self._to_come:
            self._begin(self._to_come[step].save, workers, lambda: self._to_come.pop(step))

    def save_missed(self, state: TrainState) -> None:
        """Saves, on this thread, what lost shards have kept from being saved, when a run has
        ended."""
        missed, self._missed = self._missed, []
        for save in missed:
            save(state)

    def _begin(self, save, workers, forget):
        flow = workers.flow
        flow.wait_for_release()  # of the cut before; Ctrl-C may end it, and then this one is still to come
        with uninterrupted():  # whoever holds the writes has a thread that lets them go
            # Before the copy: no later batch is written from here on, and what is copied fits what
            # will be written.
            number = flow.hold_writes()
            try:
                ring = self._steps.ring if self._stages.way.skip_writes else None
                # Now, as the next step takes the dense state for good.
                dense, ring = jax.tree.map(jnp.copy, (self._steps.dense, ring))
                workers.start("cut", lambda worker: self._save(worker, workers, number, dense, ring, save))
                forget()
            except BaseException:
                flow.release_writes()
                raise

    def _save(self, worker, workers, number, dense, ring, save):
        worker.number, flow = number - 1, workers.flow
        try:
            if whole := flow.wait_for_hold():
                self._stages.write_rest(ring, flow)
            if flow.gone:  # perhaps only since then
                self._missed.append(save)
            elif whole:
                save(TrainState(dense, self._stages.tables))
        except ShardsLost as lost:
            flow.tell_lost(lost.shards)
            self._missed.append(save)
        finally:
            flow.release_writes()

    def forget(self) -> None:
        """No cut is to come any more."""
        self._to_come, self._missed = {}, []

    def warn(self, now: int) -> None:
        """Says, once, which cuts a run was left without, and forgets those that lie behind."""
        steps = [step for step, cut in self._to_come.items() if cut.unreached == "warn"]
        later = {step: cut for step, cut in self._to_come.items() if step > now}
        self._to_come = {step: cut._replace(unreached="ignore") for step, cut in later.items()}
        if steps:
            warnings.warn(
                f"cuts announced for steps {sorted(steps)} were not taken: the run was left at step {now}. Those of "
                "later steps stay announced for the next run.",
                stacklevel=4,
            )
