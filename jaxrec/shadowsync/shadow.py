"""The shadow: a thread that synchronises replicas while they train, and its foreground counterpart.

Neither the backward pass nor every k-th step waits: between two steps a trainer hands a copy of its dense parameters
over if the thread is free, and folds the newest result in if there is one, on the parameters as they are by then. The
thread reads to the host, meets the other replicas through a transport, and launches no program on a training device.

A state is a TrainState, whose parameters have a leading axis of R replicas (those of the mesh in lock step, or one of a
trainer of its own), or a pytree of parameters, with that axis or without. Floating leaves are synchronised and keep
their dtype; all others are left alone.

Reference: Zheng et al., ShadowSync, arXiv 2003.03477. Legend: R replicas of a trainer, n trainers.
"""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.interrupts import uninterrupted, wait
from jaxrec.shadowsync.leaves import check_finite, check_names, floating, replicas_in, with_floating
from jaxrec.shadowsync.rules import Rule, checked_number, wide
from jaxrec.shadowsync.transport import Left, Transport
from jaxrec.types import PyTree, TrainState


class _Live(NamedTuple):
    """The floating leaves of a trainer as they are now."""

    leaves: list[jax.Array]
    has_axis: bool  # else they are those of one replica, which gets the axis on its way to a transport


class _Round(NamedTuple):
    """What a round has found, on the device."""

    before: list[jax.Array]
    target: list[jax.Array]
    bytes: int  # brought and taken


class Synchroniser:
    """What `Shadow` and `Foreground` have in common: a trainer's place among the others, and its figures.

    Attributes:
      steps: calls of `exchange`.
      rounds: whose results were folded in, by `exchange` or by `finish`; not those that `finish` itself makes.
      bytes: of floating leaves that these rounds have brought and taken.
    """

    def __init__(self, rule: Rule, transport: Transport, trainer: int):
        _check_transport(transport, rule)
        self._rule, self._transport, self._trainer = transport.rule, transport, trainer
        self._tell_alive = getattr(transport, "alive", lambda trainer: None)
        self._phase = "not entered"
        self._structures: list = []  # of the last state, whose names fit
        self._first: list[tuple] = []  # (shape, dtype) of each leaf in the first exchange
        self.steps = self.rounds = self.bytes = 0

    @property
    def average_sync_gap(self) -> float:
        """Steps of this trainer for each round that it has folded in; inf if there was none."""
        return self.steps / self.rounds if self.rounds else float("inf")

    @property
    def on_failure(self) -> str:
        """What becomes of the others when this trainer leaves early: 'raise' or 'drop'."""
        return getattr(self._transport, "on_failure", "raise")

    def __enter__(self):
        if self._phase != "not entered":
            raise ValueError(f"{self._name} has been entered before: make one for each training.")
        try:
            with uninterrupted():
                self._transport.join(self._trainer)
                self._phase = "open"
                self._begin()
        except BaseException as error:  # no more threads, or Ctrl-C
            if self._phase == "open":
                self.leave(error)
            raise
        return self

    def _begin(self):
        """What begins with the `with` block."""

    def __exit__(self, kind, error, trace) -> None:
        self.leave(error)

    def exchange(self, state):
        """Synchronises a state, now or in the background; returns the one to train on."""
        raise NotImplementedError

    def hook(self, state, step, plan, metrics):
        """`exchange` as a hook of `fit` or `Pipeline`."""
        return self.exchange(state)

    def leave(self, error: BaseException | None = None) -> None:
        """Tells the others not to wait for this trainer any more: it fails, and takes no part from now on."""
        with uninterrupted():
            self._phase = "left"
            self._transport.leave(self._trainer, error)

    @property
    def why_gone(self) -> str:
        """Why the others go on without this trainer, as when it was overdue; empty if they do not."""
        return getattr(self._transport, "why_gone", lambda trainer: "")(self._trainer)

    @property
    def _name(self):
        return f"{type(self).__name__} of trainer {self._trainer}"

    def _check_open(self, what):
        if self._phase == "not entered":
            raise ValueError(f"`{what}` comes inside of the `with` block, and {self._name} has not been entered.")
        if self._phase != "open":
            raise ValueError(f"`{what}` comes too late: {self._name} has {self._phase}. Make one for each training.")

    def _looks_known(self, state):
        """Whether a state has the structure of those before, and is none of a function under jit."""
        leaves, structure = jax.tree.flatten(_params_of(state))
        return structure in self._structures and not isinstance(leaves[0], jax.core.Tracer)

    def _live(self, state) -> _Live:
        """The floating leaves on the device, which must be those of the transport's parameters."""
        params, what = _params_of(state), f"the state of trainer {self._trainer}"
        structure = jax.tree.structure(params)
        if structure not in self._structures:  # names cost more than shapes
            check_names(self._transport.template, params, what)
            self._structures = [structure]
        has_axis = replicas_in(self._transport.template, params, what) is not None
        if isinstance(state, TrainState) and not has_axis:
            raise ValueError(
                "the parameters of a TrainState have a leading axis of replicas, and those that the transport was made "
                "with have it too: make the transport with one replica, the parameters that `init_state` was given."
            )
        leaves = [_on_device(leaf) for leaf in floating(params)]
        kind = [(leaf.shape, leaf.dtype) for leaf in leaves]
        self._first = self._first or kind
        for name, one, other in zip(self._transport.template.names, self._first, kind, strict=True):
            if one != other:
                raise ValueError(f"the leaf {name} was {one} in the first exchange and is {other} now: keep it alike.")
        return _Live(leaves, has_axis)

    def _meet(self, before, done=False):
        """One round on leaves in numpy: where they should move to, and whether it was the last."""
        if not (done and self._rule.has_centre):  # which brings nothing
            check_finite(self._transport.template.names, before, f"the state of trainer {self._trainer}")
        target, last = self._transport.meet(self._trainer, before, done)
        _check_target(target, before)
        return target, last

    def _round_of(self, held):
        """A round of leaves on the device, for `_folded`."""
        before = _to_host(held)
        target, _ = self._meet(before)
        moved = sum(leaf.nbytes for leaf in (*before, *target))
        return _Round(held.leaves, _place(_from_host(target, held), held.leaves), moved)

    def _folded(self, leaves, result, program):
        """Leaves on the device after a round that is counted now."""
        self.rounds += 1
        self.bytes += result.bytes
        return program(leaves, _place(result.before, leaves), _place(result.target, leaves))

    def _last_rounds(self, leaves):
        """Rounds of a trainer that is done, on leaves in numpy, until all are; with a centre, what it is then."""
        if self._rule.has_centre:
            leaves, last = self._rule.merge(leaves, leaves, self._meet(leaves)[0]), False
            while not last:
                target, last = self._meet(leaves, done=True)
            return [np.array(x, leaf.dtype) for x, leaf in zip(target, leaves, strict=True)]
        last = False
        while not last:
            target, last = self._meet(leaves, done=True)
            leaves = self._rule.merge(leaves, leaves, target)
        return leaves


class Shadow(Synchroniser):
    """Synchronises a trainer's dense parameters in the background.

        with Shadow(rule, transport) as shadow:
            for batch in batches:
                state, metrics = step(state, plan, batch)
                state = shadow.exchange(state)          # never waits
            state = shadow.finish(state)                # goes on until all trainers are done

    Args:
      rule: the transport's.
      transport: shared by all trainers.
      trainer: the number of this one, from 0; each has its own.
      pace_seconds: the least time from one round to the next; 0 is back to back.

    Raises:
      ValueError: another rule than the transport's; pace_seconds < 0. On entering: no such trainer, or a taken one.
      Left: another trainer has left, or is overdue. It and whatever else a round raises come with the next `exchange`,
        or on leaving the `with` block.
      TimeoutError: on leaving, the thread has not ended within `timeout_s` of the transport, as when `meet` does not
        return: it is left behind, and does nothing with what may still come.
    """

    def __init__(self, rule: Rule, transport: Transport, trainer: int = 0, pace_seconds: float = 0.0):
        checked_number("pace_seconds", pace_seconds, "0 or more", lambda x: 0 <= x < float("inf"))
        super().__init__(rule, transport, trainer)
        self._pace = pace_seconds
        self._changed = threading.Condition()
        self._handed: Any = None  # a copy for the thread, on the device
        self._result: _Round | None = None  # what the thread has found since the last exchange
        self._busy = self._done = self._stopped = self._ended = False
        self._met_at: float | None = None  # when `meet` was called that has not returned
        self._final: Any = None  # leaves [R, ...] on the host, of a trainer that is done
        self._has_axis = True
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"shadow-{trainer}", daemon=True)

    def _begin(self):
        self._thread.start()

    def leave(self, error: BaseException | None = None) -> None:
        """Tells the others not to wait for this trainer any more: it fails, and its thread ends."""
        with uninterrupted():
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            super().leave(error)

    def __exit__(self, kind, error, trace) -> None:
        self.leave(error)
        if not wait(self._changed, lambda: self._ended, self._transport.timeout_s):
            self._left_behind(error)
            return
        with uninterrupted():
            self._thread.join()  # it has nothing more to do
        if error is None:
            self._raise_failure()

    def _left_behind(self, error):
        why = f"timeout_s={self._transport.timeout_s:g}; its thread is left behind and does nothing with what may come."
        if self._met_at is None:
            message = f"{self._name} is still at work after {why}"
        else:
            message = f"{self._name}: `meet` of {type(self._transport).__name__} has not returned for {why}"
        if error is None:
            raise TimeoutError(message)
        error.add_note(message)

    def exchange(self, state):
        """Folds the newest result in and hands a copy over, if there is one and if the thread is free; never waits.

        The first call compiles the fold, so that the first result is folded in as soon as it is there. A call that has
        nothing to do looks at the state's structure only.

        Args:
          state: TrainState with parameters [R, ...], or a pytree of parameters, of one replica or [R, ...].

        Returns:
          The state to train on. It is the one given where nothing was folded in; else its parameters are new arrays of
          JAX, also where they were NumPy's, which may be changed in place: their values are copied at once. No array is
          donated.

        Raises:
          ValueError: outside of the `with` block; the parameters do not fit those of the transport; those of an earlier
            call were not finite.
          Left: another trainer has left or is overdue, or this one has been dropped.
          Exception: whatever else a round raised.
        """
        self._check_open("exchange")
        self._raise_failure()
        self._tell_alive(self._trainer)
        if self._result is None and (self._busy or self._handed is not None) and self._looks_known(state):
            self.steps += 1
            return state
        live = self._live(state)
        program = _merge_program(self._rule.merge, _kinds(live.leaves))
        self.steps += 1
        with uninterrupted(), self._changed:  # together: a round that ends in between would put its result on another
            result, self._result = self._result, None
            free = self._handed is None and not self._busy
        leaves = live.leaves if result is None else self._folded(live.leaves, result, program)
        if free:
            copy = _Live(_copy(leaves), live.has_axis)
            with uninterrupted(), self._changed:
                self._handed = copy
                self._changed.notify_all()
        return state if result is None else _with(state, leaves)

    def finish(self, state):
        """Takes part in rounds until all trainers are done.

        Args:
          state: after the trainer's last step.

        Returns:
          The state with new parameters, on the same devices and of the same dtypes; all else is as it was. With a
          centre they are the centre's after the last round of all trainers: the same model for each. With AllToAll each
          trainer has its replica after a last round of all: by lerp it is 1 - alpha of its old distance from the
          target, so all are equal with alpha = 1; by delta it is moved by alpha (target - replica), the same here.

        Raises:
          ValueError: outside of the `with` block, or again, even after an interrupt; parameters do not fit or are not
            finite.
          Left: another trainer has left or is overdue, or this one has been dropped.
          TimeoutError: `meet` neither has returned nor was at work for three times `timeout_s` of the transport.
          Exception: whatever else a round raised.
        """
        self._check_open("finish")
        self._raise_failure()
        live = self._live(state)
        program = _merge_program(self._rule.merge, _kinds(live.leaves))
        with uninterrupted():
            self._phase = "begun to finish before"
            with self._changed:
                result, self._result = self._result, None
            leaves = live.leaves if result is None else self._folded(live.leaves, result, program)
            final = _to_host(_Live(leaves, live.has_axis))
            with self._changed:
                self._final, self._has_axis, self._done = final, live.has_axis, True
                self._changed.notify_all()
        self._wait_for_the_end()
        self._raise_failure()
        if self._stopped:
            raise Left(f"trainer {self._trainer} has left while it finished.")
        self._phase = "finished"
        return _with(state, _place(_from_host(self._final, live), live.leaves))

    def _wait_for_the_end(self):
        limit = 3 * self._transport.timeout_s  # of a transport that does nothing; it may wait for those who train
        seen = getattr(self._transport, "last_seen", lambda trainer: 0.0)
        while not wait(self._changed, lambda: self._ended, self._transport.timeout_s / 2):
            now = time.monotonic()
            if now - max(self._met_at or now, seen(self._trainer)) > limit:
                raise TimeoutError(f"{self._name}: `meet` of its transport has not returned for {limit:g} s.")

    def _run(self):
        try:
            while (handed := self._next()) is not None:
                self._round(handed)
            if self._done and not self._stopped:
                if (late := self._result) is not None:  # of a round that ended after the trainer's last exchange
                    before, target = (_to_host(_Live(part, self._has_axis)) for part in late[:2])
                    self._final = self._rule.merge(self._final, before, target)
                    self.rounds, self.bytes = self.rounds + 1, self.bytes + late.bytes
                self._final = self._last_rounds(self._final)
        except BaseException as error:
            with self._changed:
                self._failure = None if self._stopped and isinstance(error, Left) else error
            self._transport.leave(self._trainer, error)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _next(self):
        """The copy to bring to the next round; None when the trainer is done or has stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._handed is not None or self._done or self._stopped)
            if self._done or self._stopped:
                return None
            handed, self._handed, self._busy = self._handed, None, True
            return handed

    def _round(self, handed):
        start = time.monotonic()
        result = self._round_of(handed)
        with self._changed:
            self._result, self._busy = result, False
            self._changed.notify_all()
            left = start + self._pace - time.monotonic()
            if left > 0:
                self._busy = True
                self._changed.wait_for(lambda: self._done or self._stopped, timeout=min(left, threading.TIMEOUT_MAX))
                self._busy = False

    def _meet(self, before, done=False):
        self._check_not_stopped()
        self._met_at = time.monotonic()
        try:
            found = super()._meet(before, done)
        finally:
            self._met_at = None
        self._check_not_stopped()  # it was left behind: nothing comes of a late answer
        return found

    def _check_not_stopped(self):
        if self._stopped:
            raise Left(f"trainer {self._trainer} has left.")

    def _raise_failure(self):
        if self._failure is not None:
            raise self._failure


class Foreground(Synchroniser):
    """The same rules in the foreground, every so many steps or seconds: training waits for each round (FR-k).

    Used as `Shadow` is, in a `with` block.

    Args:
      rule, transport, trainer: as for `Shadow`.
      every_steps: k, or None.
      every_seconds: or this.

    Raises:
      ValueError: not exactly one of the two is given, or it is below 1 step or not above 0 seconds; as `Shadow`.
    """

    def __init__(
        self, rule: Rule, transport: Transport, trainer: int = 0,
        every_steps: int | None = None, every_seconds: float | None = None,
    ):  # fmt: skip
        if (every_steps is None) == (every_seconds is None):
            raise ValueError("give every_steps or every_seconds, one of them.")
        if every_steps is not None:
            checked_number("every_steps", every_steps, "1 or more", lambda x: x >= 1, whole=True)
        if every_seconds is not None:
            checked_number("every_seconds", every_seconds, "above 0", lambda x: x > 0)
        super().__init__(rule, transport, trainer)
        self._steps, self._seconds = every_steps, every_seconds

    def _begin(self):
        self._last = time.monotonic()

    def exchange(self, state):
        """Makes a round if it is time for one; the first call compiles the fold.

        Args:
          state: TrainState with parameters [R, ...], or a pytree of parameters, of one replica or [R, ...].

        Returns:
          The state to train on: the one given if it was no time; else its parameters are new arrays of JAX.

        Raises:
          ValueError: outside of the `with` block; the parameters do not fit those of the transport, or are not finite.
          Left: another trainer has left or is overdue, or this one has been dropped.
        """
        self._check_open("exchange")
        if not self._looks_known(state):
            _merge_program(self._rule.merge, _kinds(self._live(state).leaves))
        return self.meet(state)(state) if self.due() else state

    def due(self) -> bool:
        """Counts a step, by which the others hear of this trainer; says whether it is time for a round."""
        self._tell_alive(self._trainer)
        self.steps += 1
        if self._steps is not None:
            return self.steps % self._steps == 0
        if self._seconds is not None and time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True

    def meet(self, before) -> Callable:
        """Makes a round; `exchange` in two halves, for a trainer whose other workers step on between them.

        Args:
          before: as `exchange` takes it; nobody may donate it during the round.

        Returns:
          A function: the state as it is by then -> the state with the round's result folded in.

        Raises:
          As `exchange`.
        """
        self._check_open("meet")
        result = self._round_of(self._live(before))

        def fold(state):
            live = self._live(state).leaves
            return _with(state, self._folded(live, result, _merge_program(self._rule.merge, _kinds(live))))

        return fold

    def finish(self, state):
        """Takes part in rounds until all trainers are done; returns what `Shadow.finish` does.

        Raises:
          ValueError: outside of the `with` block, or again, even after an interrupt; parameters do not fit or are not
            finite.
          Left: another trainer has left or is overdue, or this one has been dropped.
        """
        self._check_open("finish")
        live = self._live(state)
        self._phase = "begun to finish before"
        final = self._last_rounds(_to_host(live))
        self._phase = "finished"
        return _with(state, _place(_from_host(final, live), live.leaves))


def spread(params: PyTree) -> float:
    """How far the R replicas [R, ...] are from their mean: root mean square over replicas and floating parameters."""
    leaves = [np.asarray(leaf).astype(np.float64) for leaf in floating(params)]
    squares = sum(((leaf - leaf.mean(axis=0)) ** 2).sum() for leaf in leaves)
    return float(np.sqrt(squares / max(1, sum(leaf.size for leaf in leaves))))


def _params_of(state):
    return state.dense.params if isinstance(state, TrainState) else state


def _with(state, leaves):
    """The state with other floating parameters."""
    params = with_floating(_params_of(state), leaves)
    return state._replace(dense=state.dense._replace(params=params)) if isinstance(state, TrainState) else params


def _on_device(leaf):
    """An array of JAX that is still there, of the same dtype."""
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError("a synchroniser was called by a function under jit: call it between two steps, outside.")
    if not isinstance(leaf, jax.Array):
        placed = jnp.asarray(np.array(leaf))  # a copy: on the host JAX would share the caller's memory
        if placed.dtype != getattr(leaf, "dtype", placed.dtype):
            raise ValueError(
                f"JAX would turn a leaf of {leaf.dtype} into {placed.dtype}: give that dtype, or set jax_enable_x64."
            )
        return placed
    if leaf.is_deleted():
        raise ValueError("a leaf has been donated to an earlier step: give the state that this step has returned.")
    return leaf


def _to_host(live):
    """Leaves [R, ...] in numpy: views where the device is the host, whose memory XLA does not reuse meanwhile."""
    return [np.asarray(leaf) if live.has_axis else np.asarray(leaf)[None] for leaf in live.leaves]


def _from_host(leaves, live):
    return leaves if live.has_axis else [leaf[0] for leaf in leaves]


def _place(new, old):
    """Arrays to where others are, in one call."""
    with jax.enable_x64(any(leaf.dtype.itemsize > 4 for leaf in new)):  # which a thread does not inherit
        return jax.device_put(new, [leaf.sharding for leaf in old])


def _kinds(leaves):
    return tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)


@functools.lru_cache(maxsize=256)
def _merge_program(merge, kinds):
    """A rule's fold for leaves of these shapes, dtypes and places, compiled; trainers share it."""
    live = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in kinds]
    target = [jax.ShapeDtypeStruct(shape, wide(dtype), sharding=sharding) for shape, dtype, sharding in kinds]
    return jax.jit(merge).lower(live, live, target).compile()


_copy = jax.jit(lambda leaves: [jnp.copy(leaf) for leaf in leaves])


def _check_transport(transport, rule):
    missing = [n for n in ("join", "meet", "leave", "rule", "template", "timeout_s") if not hasattr(transport, n)]
    if missing:
        raise ValueError(
            f"transport is a {type(transport).__name__} without {missing}: give an AllToAll or a Centre; one around "
            "another hands on by `__getattr__` what it does not change."
        )
    if not isinstance(rule, Rule):
        raise ValueError(f"rule is a {type(rule).__name__}: give model_averaging(), bmuf() or easgd().")
    if not rule.same_as(transport.rule):
        raise ValueError(f"the rule {rule.describe()} is not that of the transport, {transport.rule.describe()}.")


def _check_target(target, before):
    """Refuses what a transport of somebody's own returns, if it is not alike what was brought."""
    shapes = [np.shape(leaf) for leaf in target] if isinstance(target, list) else target
    if shapes != [leaf.shape for leaf in before]:
        raise ValueError(f"`meet` has returned {shapes!r:.200}: wanted a list of arrays as they were brought.")
