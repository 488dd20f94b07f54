"""The shadow: a thread that synchronises replicas while they train, and its foreground counterpart.

Neither the backward pass nor every k-th step waits: between two steps a trainer hands a copy of its dense parameters
over if the thread is free, and folds the newest result in if there is one, on the parameters as they are by then. The
thread reads to the host, meets the other replicas through a transport, and launches no program on a training device.

Reference: Zheng et al., ShadowSync, arXiv 2003.03477. Leaves of `DenseState.params` have a leading axis of R replicas:
the replicas of the mesh (lock-step), or one of a trainer of its own (free-running). Legend: R replicas of a trainer,
n trainers.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.shadowsync.rules import Rule, check_same, mean_of
from jaxrec.types import PyTree


class Left(RuntimeError):
    """Another trainer has left in the middle of a round."""


class Transport(Protocol):
    """How trainers meet; called by their background threads only (or in the foreground)."""

    def meet(self, trainer: int, before: PyTree, done: bool) -> tuple[PyTree, bool]:
        """Brings [R, ...] numpy parameters; returns where each should move to, and whether it was the last round."""

    def leave(self, trainer: int) -> None:
        """This trainer fails: others must not wait for it."""


class AllToAll:
    """Rounds of all trainers of one process, for rules that combine the mean over all replicas.

    Args:
      rule: model averaging or BMUF; what it shares is kept here once, being the same for all.
      trainers: n; a round waits for all of them, as long as not all are done.

    Errors:
      ValueError: a rule with a centre; trainers < 1.
    """

    def __init__(self, rule: Rule, trainers: int = 1):
        if rule.has_centre or trainers < 1:
            raise ValueError(f"AllToAll needs a rule without a centre and trainers >= 1, got {rule.name}, {trainers}.")
        self._rule, self._trainers = rule, trainers
        self._changed, self._round, self._left = threading.Condition(), 0, False
        self._brought: dict[int, tuple[PyTree, bool]] = {}
        self._shared: Any = None
        self._target, self._last = None, False

    def meet(self, trainer: int, before: PyTree, done: bool) -> tuple[PyTree, bool]:
        """One round: waits for all others, then every replica gets the same target."""
        with self._changed:
            if self._brought and trainer not in self._brought:
                check_same(_first(next(iter(self._brought.values()))[0]), _first(before), f"trainer {trainer}")
            self._brought[trainer] = before, done
            if len(self._brought) == self._trainers:
                self._combine()
            else:
                number = self._round
                self._changed.wait_for(lambda: self._round > number or self._left)
                if self._round == number:
                    raise Left(f"trainer {trainer} waited for a trainer that has left.")
            target, last = self._target, self._last
        rows = len(jax.tree.leaves(before)[0])
        return jax.tree.map(lambda x: np.broadcast_to(x, (rows, *x.shape)), target), last

    def _combine(self):
        brought = [self._brought[i] for i in sorted(self._brought)]
        replicas = [_replica(tree, r) for tree, _ in brought for r in range(len(jax.tree.leaves(tree)[0]))]
        if self._shared is None:
            self._shared = self._rule.init(replicas[0])
        self._shared, self._target = self._rule.combine(self._shared, mean_of(replicas))
        self._last, self._brought = all(done for _, done in brought), {}
        self._round += 1
        self._changed.notify_all()

    def leave(self, trainer: int) -> None:
        """Wakes all who wait."""
        with self._changed:
            self._left = True
            self._changed.notify_all()


class Centre:
    """Synchronisation parameter servers in this process, for EASGD: each trainer meets the centre when it likes.

    The tensors are bin-packed over the servers by size. A server's bandwidth is emulated: transfers to and from it take
    turns, and their time is slept.

    Args:
      rule: with a centre.
      parameters: initial ones, without a replica axis.
      servers: how many.
      bytes_per_s: of each server, both directions together; None for no limit.

    Errors:
      ValueError: a rule without a centre; servers < 1; bytes_per_s <= 0.
    """

    def __init__(self, rule: Rule, parameters: PyTree, servers: int = 1, bytes_per_s: float | None = None):
        if not rule.has_centre:
            raise ValueError(f"Centre needs a rule with a centre, got {rule.name}.")
        if servers < 1 or (bytes_per_s is not None and bytes_per_s <= 0):
            raise ValueError(f"servers={servers} must be at least 1, bytes_per_s={bytes_per_s} above 0 or None.")
        self._rule, self._bytes_per_s = rule, bytes_per_s
        leaves, self._structure = jax.tree.flatten(jax.tree.map(np.array, parameters))
        self._server_of = pack([leaf.nbytes for leaf in leaves], servers)
        self._centre = [rule.init(leaf) for leaf in leaves]
        self._locks = [threading.Lock() for _ in range(servers)]
        self._free_at, self._clock = [0.0] * servers, threading.Lock()

    @property
    def parameters(self) -> PyTree:
        """The centre as it is."""
        return jax.tree.unflatten(self._structure, [leaf.copy() for leaf in self._centre])

    def meet(self, trainer: int, before: PyTree, done: bool) -> tuple[PyTree, bool]:
        """Moves the centre towards every replica brought, one after the other."""
        check_same(self.parameters, _first(before), f"trainer {trainer}")
        leaves = jax.tree.leaves(before)
        targets: list[list[np.ndarray]] = [[] for _ in leaves]
        for replica in range(len(leaves[0])):
            self._transfer(leaves)
            for number, server in enumerate(self._server_of):
                with self._locks[server]:
                    self._centre[number], target = self._rule.combine(self._centre[number], leaves[number][replica])
                targets[number].append(target)
        return jax.tree.unflatten(self._structure, [np.stack(target) for target in targets]), done

    def _transfer(self, leaves):
        """Sleeps until the slowest server has got and sent its tensors, behind what it had to do already."""
        if self._bytes_per_s is None:
            return
        with self._clock:
            now = time.perf_counter()
            for server in range(len(self._locks)):
                size = sum(2 * x[0].nbytes for x, s in zip(leaves, self._server_of, strict=True) if s == server)
                self._free_at[server] = max(now, self._free_at[server]) + size / self._bytes_per_s
            until = max(self._free_at)
        time.sleep(max(0.0, until - now))

    def leave(self, trainer: int) -> None:
        """Nobody waits for anybody here."""


def pack(sizes: list[int], bins: int) -> list[int]:
    """Spreads things over bins: the largest first, each to the bin that is emptiest so far.

    >>> pack([1, 5, 3, 3], 2)
    [0, 0, 1, 1]
    """
    load, place = [0] * bins, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        place[number] = load.index(min(load))
        load[place[number]] += sizes[number]
    return place


class Synchroniser:
    """What `Shadow` and `Foreground` have in common: a trainer's place among the others, and its figures."""

    def __init__(self, rule: Rule, transport: Transport, trainer: int):
        self._rule, self._transport, self._trainer = rule, transport, trainer
        self.steps = self.rounds = self.bytes = 0

    @property
    def average_sync_gap(self) -> float:
        """Steps of this trainer for each round that it has folded in."""
        return self.steps / max(1, self.rounds)

    def exchange(self, state):
        """Synchronises a TrainState, now or in the background; returns the one to train on."""
        raise NotImplementedError

    def hook(self, state, step, plan, metrics):
        """`exchange` as a hook of `fit` or `Pipeline`."""
        return self.exchange(state)

    def leave(self) -> None:
        """Tells the others not to wait for this trainer any more: it fails."""
        self._transport.leave(self._trainer)

    def _meet(self, before):
        """One round on parameters in numpy: where they should move to."""
        target, _ = self._transport.meet(self._trainer, before, False)
        self.bytes += 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(before))
        return target

    def _last_rounds(self, params):
        """Rounds of a trainer that is done, on parameters in numpy, until all are."""
        last = False
        while not last:
            target, last = self._transport.meet(self._trainer, params, True)
            params = self._rule.merge(params, params, target)
        return params


class Shadow(Synchroniser):
    """Synchronises a trainer's dense parameters in the background.

        with Shadow(rule, transport) as shadow:
            for batch in batches:
                state, metrics = step(state, plan, batch)
                state = shadow.exchange(state)          # never waits
            state = shadow.finish(state)                # goes on until all trainers are done

    Args:
      rule: from `rules`.
      transport: shared by all trainers.
      trainer: the number of this one.
      pace_seconds: the least time from one round to the next; 0 is back to back.

    A round's exception is raised by the next `exchange` and on leaving the `with` block.
    """

    def __init__(self, rule: Rule, transport: Transport, trainer: int = 0, pace_seconds: float = 0.0):
        if pace_seconds < 0:
            raise ValueError(f"pace_seconds={pace_seconds} must be 0 or more.")
        super().__init__(rule, transport, trainer)
        self._pace = pace_seconds
        self._merge: Any = None  # compiled by the thread, with the first result
        self._changed = threading.Condition()
        self._handed: Any = None  # a device copy for the thread
        self._result: Any = None  # (that copy, target), both on the device
        self._busy = self._done = self._stopped = False
        self._final: Any = None  # host parameters of a trainer that is done
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"shadow-{trainer}", daemon=True)

    def __enter__(self) -> "Shadow":
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._final is None:  # not finished: the others must not wait for this one
            self.leave()
        self._thread.join()
        if error is None:
            self._raise_failure()

    def exchange(self, state):
        """Folds the newest result in and hands a copy over, if there is one and if the thread is free; never waits.

        Args:
          state: TrainState; its parameters are donated.

        Returns:
          The state to train on.

        Errors:
          What a round raised.
        """
        self._raise_failure()
        self.steps += 1
        with self._changed:
            result, self._result = self._result, None
            free = self._handed is None and not self._busy
        params = state.dense.params
        if result is not None:
            params = self._merge(params, *result)
            self.rounds += 1
        if free:
            copy = _copy(params)
            with self._changed:
                self._handed = copy
                self._changed.notify_all()
        return state._replace(dense=state.dense._replace(params=params))

    def finish(self, state):
        """Takes part in rounds until all trainers are done; returns the state with the parameters of the last one.

        Args:
          state: TrainState after the trainer's last step.

        Errors:
          What a round raised.
        """
        state = self.exchange(state)
        params = state.dense.params
        with self._changed:
            self._final = jax.tree.map(np.array, params)
            self._done = True
            self._changed.notify_all()
        self._thread.join()
        self._raise_failure()
        return _with_params(state, self._final)

    def _run(self):
        try:
            while (handed := self._next()) is not None:
                self._round(handed)
            if self._done and not self._stopped:
                if self._result is not None:  # of a round that ended after the trainer's last exchange
                    self._final = self._rule.merge(self._final, *jax.tree.map(np.asarray, self._result))
                self._final = self._last_rounds(self._final)
        except BaseException as error:
            with self._changed:
                self._failure = None if self._stopped and isinstance(error, Left) else error
            self.leave()

    def _next(self):
        """The copy to bring to the next round; None when the trainer is done or has stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._handed is not None or self._done or self._stopped)
            if self._done or self._stopped:
                return None
            handed, self._handed, self._busy = self._handed, None, True
            return handed

    def _round(self, handed):
        start = time.perf_counter()
        before = jax.tree.map(np.asarray, handed)
        placed = _place(self._meet(before), handed)
        if self._merge is None:
            self._merge = jax.jit(self._rule.merge, donate_argnums=0).lower(handed, handed, placed).compile()
        with self._changed:
            self._result, self._busy = (handed, placed), False
            self._changed.notify_all()
            left = start + self._pace - time.perf_counter()
            if left > 0:
                self._busy = True
                self._changed.wait_for(lambda: self._done or self._stopped, timeout=left)
                self._busy = False

    def _raise_failure(self):
        if self._failure is not None:
            raise self._failure


class Foreground(Synchroniser):
    """The same rules in the foreground, every so many steps or seconds: training waits for each round (FR-k).

    Args:
      rule, transport, trainer: as for `Shadow`.
      every_steps: k, or None.
      every_seconds: or this.

    Errors:
      ValueError: not exactly one of the two is given, or it is below 1 step or not above 0 seconds.
    """

    def __init__(
        self, rule: Rule, transport: Transport, trainer: int = 0,
        every_steps: int | None = None, every_seconds: float | None = None,
    ):  # fmt: skip
        if (every_steps is None) == (every_seconds is None):
            raise ValueError("give every_steps or every_seconds, one of them.")
        if (every_steps is not None and every_steps < 1) or (every_seconds is not None and every_seconds <= 0):
            raise ValueError(f"every_steps={every_steps} must be 1 or more, every_seconds={every_seconds} above 0.")
        super().__init__(rule, transport, trainer)
        self._steps, self._seconds = every_steps, every_seconds
        self._merge: Callable = jax.jit(rule.merge)
        self._last = time.monotonic()

    def exchange(self, state):
        """Makes a round if it is time for one.

        Args:
          state: TrainState.

        Returns:
          The state to train on.
        """
        if not self.due():
            return state
        live = state.dense.params
        return state._replace(dense=state.dense._replace(params=self.meet(live)(live)))

    def due(self) -> bool:
        """Counts a step; says whether it is time for a round."""
        self.steps += 1
        if self._steps is not None:
            return self.steps % self._steps == 0
        if time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True

    def meet(self, before):
        """Makes a round on a copy of the parameters; for trainers whose other workers step on meanwhile.

        Args:
          before: parameters that nobody donates during the round.

        Returns:
          A function: the parameters as they are by then -> those with the round's result folded in.
        """
        target = _place(self._meet(jax.tree.map(np.asarray, before)), before)

        def fold(live):
            self.rounds += 1
            return self._merge(live, before, target)

        return fold

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        pass

    def finish(self, state):
        """Takes part in rounds until all trainers are done; returns the state with the parameters of the last one."""
        final = jax.tree.map(np.array, state.dense.params)
        return _with_params(state, self._last_rounds(final))


def spread(params: PyTree) -> float:
    """How far the R replicas [R, ...] are from their mean: root mean square over replicas and parameters."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params)]
    squares = sum(((leaf - leaf.mean(axis=0)) ** 2).sum() for leaf in leaves)
    return float(np.sqrt(squares / max(1, sum(leaf.size for leaf in leaves))))


def _with_params(state, params):
    return state._replace(dense=state.dense._replace(params=_place(params, state.dense.params)))


def _place(new, old):
    """Numpy arrays to where others are, in one call."""
    return jax.device_put(new, jax.tree.map(lambda leaf: leaf.sharding, old))


_copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def _replica(tree, number):
    return jax.tree.map(lambda x: x[number], tree)


def _first(tree):
    return _replica(tree, 0)
