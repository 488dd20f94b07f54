"""Rounds of replicas in lock step that training waits for. What the rule remembers, EASGD's centre and what BMUF knows,
lies in the state: a run that was saved, resumed or rolled back goes on as if nothing had been."""

from typing import NamedTuple

import jax
import numpy as np
import optax

from jaxrec.shadowsync import Rule, SyncGroup
from jaxrec.shadowsync.params import floating
from jaxrec.types import PyTree, TrainState


class Remembering(NamedTuple):
    """The state of an optimizer, and what a rule remembers beside it."""

    optimizer: PyTree
    memory: PyTree  # of `SyncGroup.memory`, the same for each replica; empty for model averaging


def remembering(optimizer: optax.GradientTransformation, rule: Rule) -> optax.GradientTransformation:
    """An optimizer that does what another one does, and whose state holds the memory of a rule."""

    def init(params):
        return Remembering(optimizer.init(params), rule.init(floating(params)))

    def update(gradient, state, params=None):
        changes, kept = optimizer.update(gradient, state.optimizer, params)
        return changes, state._replace(optimizer=kept)

    return optax.GradientTransformation(init, update)


class ForegroundRounds:
    """A round of all replicas of a state every so many steps, as a hook that has no memory of its own.

    Args:
      rule: of the rounds.
      every_steps: k; a round falls on the steps that it divides.

    Attributes:
      steps: calls of the hook.
      rounds: of all replicas.
    """

    def __init__(self, rule: Rule, every_steps: int):
        self._rule, self._every_steps = rule, every_steps
        self.steps = self.rounds = 0

    def hook(self, state: TrainState, step: int, plans, metrics) -> TrainState:
        """Makes the round, if the step has one; the state's optimizer is a `remembering` one."""
        self.steps += 1
        if step % self._every_steps:
            return state
        self.rounds += 1
        known = state.dense.opt_state.memory
        params, shared = jax.tree.map(lambda leaf: np.array(leaf[0]), jax.device_get((state.dense.params, known)))
        group = SyncGroup(self._rule, params, 1, every_steps=1, memory={"shared": shared, "waited": [0.0]})
        with group.trainer(0) as sync:
            state = sync.exchange(state)
        # Stacked, so that memory is of its own that a step may donate.
        alike = lambda new, old: jax.device_put(np.stack([new] * len(old)), old.sharding)
        memory = jax.tree.map(alike, group.memory["shared"], known)
        kept = state.dense.opt_state._replace(memory=memory)
        return state._replace(dense=state.dense._replace(opt_state=kept))
