"""The entry point: a group of trainers that creates each trainer's synchroniser.

Legend: R replicas of a trainer, n trainers.
"""

from typing import Any

import numpy as np

from jaxrec.shadowsync.rules import Rule
from jaxrec.shadowsync.synchroniser import Foreground, Shadow, Synchroniser
from jaxrec.shadowsync.transport import AllToAll, Centre
from jaxrec.types import PyTree


class SyncGroup:
    """n trainers of one process whose parameters are synchronised while they train.

    Each trainer is a thread that runs its own training loop. It calls `exchange` after every step and `finish` after
    the last one, with a pytree of parameters (a dict of arrays, or the parameters of a Flax Linen or NNX model) or with
    a TrainState:

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import jax, numpy as np
    >>> from jaxrec.shadowsync import SyncGroup, easgd
    >>> initial = {"w": np.zeros(2, np.float32)}
    >>> group = SyncGroup(easgd(), initial, trainers=2)
    >>> step = jax.jit(lambda params, x: {"w": params["w"] + 0.1 * (x - params["w"])})
    >>> def train(number):
    ...     params = initial
    ...     with group.trainer(number) as sync:
    ...         for _ in range(100):
    ...             params = step(params, [1.0, 3.0][number])  # each has data of its own
    ...             params = sync.exchange(params)  # never waits
    ...         return sync.finish(params)  # until all trainers are done
    >>> with ThreadPoolExecutor(2) as pool:
    ...     one, other = pool.map(train, range(2))
    >>> bool((one["w"] == other["w"]).all() and (one["w"] > 0).all())
    True

    With EASGD each trainer synchronises with a centre at its own pace, and `finish` returns the centre's parameters to
    all. Model averaging and BMUF make rounds of all trainers; after `finish` the replicas are close to each other, and
    equal with alpha = 1 and form='lerp'.

    Args:
      rule: `easgd()`, `model_averaging()` or `bmuf()`.
      params: initial parameters of one replica, without a replica axis.
      trainers: n. All of them must join, each in its own thread.
      every_steps: k for a foreground round every k steps of a trainer, which waits for it; None for rounds in a
        background thread of each trainer.
      pace_seconds: minimum seconds from the start of one background round to the start of the next.
      core_share: maximum fraction of one core's time that each background thread uses for rounds, in (0, 1]. Lower it
        on a machine whose cores all train, where back-to-back rounds would slow down training.
      timeout_s: seconds without a sign of life after which an awaited trainer is overdue. It must exceed the longest
        time between two `exchange` calls of a trainer, compilation included.
      on_failure: effect on the other trainers when one leaves early or is overdue: 'raise' ends their training with a
        `PeerLeft` that names it; 'drop' continues without it.
      last_round: whether `finish` brings the trainers together in a last round. If False, a trainer that is done still
        takes part in rounds that others begin, and all keep their parameters at the end: for training that is continued
        later by a group with the `memory` of this one.
      memory: `memory` of an earlier group with the same rule, parameters and trainers, to continue its training.

    Attributes:
      transport: `AllToAll` or `Centre` through which the trainers meet, for synchronisers created without the group.
    """

    transport: AllToAll | Centre

    def __init__(
        self,
        rule: Rule,
        params: PyTree,
        trainers: int,
        *,
        every_steps: int | None = None,
        pace_seconds: float | None = None,
        core_share: float | None = None,
        timeout_s: float = 60.0,
        on_failure: str = "raise",
        last_round: bool = True,
        memory: dict[str, Any] | None = None,
    ):
        if on_failure == "replace":  # no successor ever joins a group, and the end of training would wait for it
            raise ValueError("on_failure='replace' is of transports: a group takes 'raise' or 'drop'.")
        self.transport = (Centre if rule.has_centre else AllToAll)(
            rule, params, trainers, timeout_s=timeout_s, on_failure=on_failure, last_round=last_round,
            memory=None if memory is None else memory["shared"],
        )  # fmt: skip
        self._foreground = every_steps is not None
        options: dict[str, Any] = {"every_steps": every_steps, "pace_seconds": pace_seconds, "core_share": core_share}
        self._options = {name: value for name, value in options.items() if value is not None}  # else their defaults
        self._waited = [0] * trainers if memory is None else [int(steps) for steps in memory["waited"]]
        if len(self._waited) != trainers:
            raise ValueError(f"the memory is of {len(self._waited)} trainers and the group of {trainers}.")
        self._of_trainers: dict[int, Synchroniser] = {}
        self.trainer(0)  # raises invalid options here rather than in a trainer's thread

    @property
    def memory(self) -> dict[str, Any]:
        """State from which a later group continues once all trainers are done; it can be saved.

        Returns:
          {'shared': pytree of arrays, the centre of EASGD or the global model and momentum of BMUF,
          'waited': f64[n], steps of each trainer since its last foreground round was due}.
        """
        waited = [getattr(self._of_trainers.get(i), "waited", before) for i, before in enumerate(self._waited)]
        return {"shared": self.transport.memory, "waited": np.array(waited, np.float64)}

    def trainer(self, number: int) -> Synchroniser:
        """Create one trainer's synchroniser, which is entered once, in the trainer's thread.

        Args:
          number: unique trainer number from 0 to n - 1.

        Returns:
          A `Shadow` or a `Foreground`: a context manager with `exchange`, `finish`, `rounds` and `average_sync_gap`,
          and a callback that makes each `exchange` of an engine.
        """
        made: Synchroniser
        if self._foreground:
            waited = self._waited[number] if number in range(len(self._waited)) else 0
            made = Foreground(self.transport, number, waited=waited, **self._options)
        else:
            made = Shadow(self.transport, number, **self._options)
        self._of_trainers[number] = made
        return made
