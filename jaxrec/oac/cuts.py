"""Cuts: consistent states that are announced for a step, and saved in a thread while training goes
on."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrec.announced import Announced
from jaxrec.interrupts import uninterrupted
from jaxrec.oac.stages import Stages
from jaxrec.oac.steps import Steps
from jaxrec.oac.workers import Workers
from jaxrec.types import ShardsLost, TrainState


class Cuts(Announced):
    """The cuts of a pipeline: those still to come, and those that lost shards have kept from being saved.

    Args:
      stages, steps: of the pipeline.
    """

    def __init__(self, stages: Stages, steps: Steps):
        super().__init__()
        self._stages, self._steps = stages, steps
        self._missed: list[Callable] = []  # saves that met lost shards, and come again when those are back

    def begin(self, step: int, workers: Workers) -> None:
        """Begins the cut of a step that was just committed, if there is one, and those that lost
        shards have kept."""
        for _ in range(len(self._missed)):
            self._begin(self._missed[0], workers, lambda: self._missed.pop(0))
        if save := self.at(step):
            self._begin(save, workers, lambda: self.tell_begun(step))

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

    def forget(self, now: int) -> None:
        """No cut is to come any more."""
        self._missed = []
        super().forget(now)
