"""What all engines do in the same words: requests that they refuse, losses that they look at, shards
that are lost again and again."""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrec.bounds import whole_number
from jaxrec.embedding import EmbeddingSpec
from jaxrec.types import ShardsLost, TrainState

# How often shards may be lost again before one more step is committed, or the cut that they keep is saved.
MOST_TRIES = 8


def check_hooks(hooks: Any) -> tuple[Callable, ...]:
    """The hooks as a tuple, as they are called in every step and may come from a generator.

    Raises:
      ValueError: they are no functions.
    """
    once = (None,) if callable(hooks) or not isinstance(hooks, Iterable) else tuple(hooks)
    if not all(map(callable, once)):
        raise ValueError("hooks must be a list of functions (state, step, plan, metrics) -> state: hooks=[hook].")
    return once


def check_change(change: Any) -> None:
    """Refuses what cannot change tables.

    Raises:
      ValueError: it is no function.
    """
    if not callable(change):
        raise ValueError(f"exclusive wants a function (tables) -> tables, and was given a {type(change).__name__}.")


def check_watcher(watcher: Any) -> None:
    """Refuses what cannot be entered.

    Raises:
      ValueError: it is no context manager.
    """
    if not hasattr(watcher, "__enter__") or not hasattr(watcher, "__exit__"):
        raise ValueError(f"enter wants a context manager, and was given a {type(watcher).__name__}.")


def checked_shards(spec: EmbeddingSpec, shards: Iterable[int], running: bool) -> set[int]:
    """The shards that a hook wants lost.

    Raises:
      ValueError: they are no numbers of shards; nothing runs.
    """
    try:
        wanted = {operator.index(shard) for shard in shards}
    except TypeError:
        raise ValueError(f"lose wants the numbers of shards, as in [3], and was given {shards!r:.80}.") from None
    if wrong := [shard for shard in wanted if shard not in range(spec.shards)]:
        raise ValueError(f"shards {wrong} must lie between 0 and {spec.shards - 1}.")
    if not running:
        raise ValueError("nothing runs: `lose` is for a hook. Change the tables in `exclusive`.")
    return wanted


def tell_restarted(watchers: Iterable[Any], state: TrainState) -> None:
    """Tells watchers which state an engine will go on from; what they raise keeps it where it is."""
    for watcher in watchers:
        getattr(watcher, "restarted", lambda state: None)(state)


def checked_capacity(spec: EmbeddingSpec, capacity: Mapping[str, int]) -> dict[str, int]:
    """The capacities {stack: U} that plans begin with.

    Raises:
      ValueError: not one positive number for each stack.
    """
    if not isinstance(capacity, Mapping) or set(capacity) != set(spec.stacks):
        raise ValueError(f"capacity={capacity!r:.200} must be one number for each of {list(spec.stacks)}, or None.")
    return {name: whole_number(f"capacity[{name!r}]", number) for name, number in capacity.items()}


class Losses:
    """The losses of steps, on the device: to look at each would make every step wait for it."""

    def __init__(self):
        self._waiting: list[tuple[int, Any]] = []  # (step, loss), not looked at yet

    def note(self, step: int, metrics: dict) -> None:
        """Keeps the loss of a step, if it has one."""
        if "loss" in metrics:
            self._waiting.append((step, metrics["loss"]))

    def check(self, from_number: int = 1) -> None:
        """Looks at the losses since the last time, if there are so many.

        Raises:
          FloatingPointError: one is not finite; names the first such step, and what to look at.
        """
        if len(self._waiting) >= from_number:
            waiting, self._waiting = self._waiting, []
            found = np.asarray(jax.device_get([loss for _, loss in waiting]))
            if not np.isfinite(found).all():
                at = int(np.argmin(np.isfinite(found)))
                raise FloatingPointError(
                    f"the loss is {found[at]} at step {waiting[at][0]} (found when steps {waiting[0][0]} to "
                    f"{waiting[-1][0]} were checked). Look at that step's batch (labels? dense features on "
                    "a log scale?) and at the learning rates; `jax.config.update('jax_debug_nans', True)` "
                    "finds the operation."
                )


class Tries:
    """How often shards were brought back at one place: what is lost again and again ends the run."""

    def __init__(self):
        self._place, self._tries = "", 0

    def count(self, place: str, shards: Iterable[int], remedy: str) -> None:
        """Counts a recovery; at another place than the last one it begins anew.

        Args:
          place: as in "step 5".
          shards: the lost ones.
          remedy: what is said when it is one too many.

        Raises:
          ShardsLost: it is one too many.
        """
        self._tries = self._tries + 1 if self._place == place else 1
        self._place = place
        if self._tries > MOST_TRIES:
            raise ShardsLost(shards, f"again, after {MOST_TRIES} recoveries at {place}: {remedy}")
