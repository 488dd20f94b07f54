"""The front door: a group of trainers that hands out each trainer's synchroniser.

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

    Each trainer is a thread with a training loop of its own. It calls `exchange` after every step
    and `finish` after the last one, with a pytree of parameters (a dict of arrays, or what Flax
    Linen and NNX give) or with a TrainState:

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

    EASGD has a centre that each trainer visits when it likes, and whose parameters all get from
    `finish`. Model averaging and BMUF make rounds of all trainers; after `finish` the replicas are
    near each other, and equal with alpha = 1 and form='lerp'.

    Args:
      rule: `easgd()`, `model_averaging()` or `bmuf()`.
      params: the initial parameters of one replica, without a replica axis.
      trainers: n. All of them must come, each in a thread of its own.
      every_steps: a round every so many steps of a trainer, which waits for it (foreground).
      every_seconds: the same by the clock; with neither a thread of each trainer synchronises it.
      pace_seconds: of these threads, the least time from one round to the next.
      core_share: of the time of a core, the largest part that each of them takes, above 0 and at
        most 1: for a machine whose cores all train, which rounds back to back would slow down.
      servers: over how many servers the tensors of a centre are divided.
      bytes_per_s: the bandwidth that each of them is held to; no limit if None.
      timeout_s: seconds after which a trainer that is awaited, and was not heard of, is overdue:
        more than the longest time between two of its calls of `exchange`, compilation included.
      on_failure: what becomes of the others when a trainer leaves early or is overdue: 'raise' ends
        their training with `PeerLeft`, which names it; 'drop' lets them go on without it.
      last_round: whether `finish` brings the trainers together. Without it a trainer that is done
        takes part in the rounds that others begin, and all stay where they are at the end: for a
        training that goes on later, with a group that has the `memory` of this one.
      memory: of an earlier group of the same rule, parameters and trainers, whose training goes on.

    Attributes:
      transport: where they meet, an `AllToAll` or a `Centre`, for synchronisers made by hand.

    Raises:
      ValueError: an argument is out of range; parameters that cannot be synchronised.
      TypeError: servers or a bandwidth for a rule without a centre, a pace for the foreground.
    """

    transport: AllToAll | Centre

    def __init__(
        self,
        rule: Rule,
        params: PyTree,
        trainers: int,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        pace_seconds: float | None = None,
        core_share: float | None = None,
        servers: int | None = None,
        bytes_per_s: float | None = None,
        timeout_s: float = 60.0,
        on_failure: str = "raise",
        last_round: bool = True,
        memory: dict[str, Any] | None = None,
    ):
        of_all: dict[str, Any] = {"timeout_s": timeout_s, "on_failure": on_failure, "last_round": last_round}
        if memory is not None:
            of_all["memory"] = memory["shared"]
        of_centre = _given(servers=servers, bytes_per_s=bytes_per_s)
        self.transport = (Centre if rule.has_centre else AllToAll)(rule, params, trainers, **of_all, **of_centre)
        self._foreground = _given(every_steps=every_steps, every_seconds=every_seconds)
        self._options = self._foreground | _given(pace_seconds=pace_seconds, core_share=core_share)
        self._waited = [0.0] * trainers if memory is None else np.asarray(memory["waited"]).tolist()
        if len(self._waited) != trainers:
            raise ValueError(f"the memory is of {len(self._waited)} trainers and the group of {trainers}.")
        self._of_trainers: dict[int, Synchroniser] = {}
        self.trainer(0)  # refuses now what it would refuse in a trainer's thread

    @property
    def memory(self) -> dict[str, Any]:
        """What a later group needs to go on, when all trainers are done; it can be saved.

        Returns:
          {'shared': a pytree of arrays, EASGD's centre or what BMUF remembers, 'waited': f64[n], in
          the foreground the steps or seconds of each trainer since it was time for a round}.
        """
        waited = [getattr(self._of_trainers.get(i), "waited", before) for i, before in enumerate(self._waited)]
        return {"shared": self.transport.memory, "waited": np.array(waited, np.float64)}

    def trainer(self, number: int) -> Synchroniser:
        """One trainer's synchroniser, to be entered in its thread, once.

        Args:
          number: of the trainer, from 0 to n - 1; each has its own.

        Returns:
          A context manager with `exchange`, `finish`, `hook` (`exchange` for `fit` and `Pipeline`)
          and figures (`rounds`, `average_sync_gap`): a `Shadow` or a `Foreground`.

        Raises:
          ValueError: on entering, if there is no such trainer or its place was taken before.
        """
        made: Synchroniser
        if self._foreground:
            waited = self._waited[number] if number in range(len(self._waited)) else 0.0
            made = Foreground(self.transport, number, waited=waited, **self._options)
        else:
            made = Shadow(self.transport, number, **self._options)
        self._of_trainers[number] = made
        return made


def _given(**arguments: Any) -> dict[str, Any]:
    """The arguments that are not None: for all others the defaults of what is made with them hold."""
    return {name: value for name, value in arguments.items() if value is not None}
