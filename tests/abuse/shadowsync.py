"""Trainers that synchronise: wrong shapes, numbers and order, and trainers that leave early."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meetings import Clock, in_meet, in_threads
from world import no_threads_left, until

from abuse import refused, situation
from jaxrec.shadowsync import (
    AllToAll,
    Centre,
    Foreground,
    PeerLeft,
    Shadow,
    SyncGroup,
    bmuf,
    easgd,
    model_averaging,
)
from jaxrec.types import DenseState, TrainState

MEAN, EASGD = model_averaging(1.0), easgd(0.5)
PARAMS = {"bias": np.zeros(2, np.float32), "kernel": np.zeros((3, 2), np.float32)}


def params_of(value, *axis):
    return jax.tree.map(lambda x: jnp.full((*axis, *x.shape), value, jnp.float32), PARAMS)


def state_of(value, *axis):
    return TrainState(DenseState(jnp.int32(3), params_of(value, *axis), {}), None)


def meeting(rule=MEAN, trainers=1, **more):
    return (Centre if rule.has_centre else AllToAll)(rule, PARAMS, trainers, **more)


def exchanged(state, initial=PARAMS):
    with Foreground(AllToAll(MEAN, initial), every_steps=1) as foreground:
        return foreground.exchange(state)


def together(*trainers):
    """Run trainers as threads; raise the error of the first one that failed."""
    found = in_threads(*trainers)
    assert no_threads_left()
    for error in found:
        if isinstance(error, BaseException):
            raise error


def together_while_time_passes(transport, *trainers):
    """Run trainers as threads, and let the time-out pass once all of them wait for a trainer that never joined.

    Only the missing trainer is overdue then.
    """
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)

        def time_passes():
            until(lambda: len(in_meet(transport)) == len(trainers))
            clock.goes_on(1.2 * transport.timeout_s)

        together(*trainers, time_passes)


def trainer(transport, number=0, kind=Foreground, steps=3, error=None, ends=None):
    """A plain trainer of one replica, as the docstrings describe it."""

    def run():
        params = params_of(float(number))
        with kind(transport, number, **({"every_steps": 1} if kind is Foreground else {})) as sync:
            for _ in range(steps):
                params = sync.exchange(jax.tree.map(lambda x: x + 1, params))
            if error is not None:
                raise error
            params = sync.finish(params)
        if ends is not None:
            ends[number] = float(params["bias"][0])

    return run


@situation(
    "two trainers in one thread, of which one waits", PeerLeft, r"trainer 1 was last seen when it joined, [\d.]+ s"
)
def _(directory):
    transport = meeting(trainers=2, timeout_s=0.2)
    with Shadow(transport, 0) as first, Shadow(transport, 1):
        first.finish(params_of(1.0))


@situation("two shadows in one thread that only exchange")
def _(directory):
    transport = meeting(trainers=2)
    with Shadow(transport, 0) as first, Shadow(transport, 1) as second:
        a, b = params_of(0.0), params_of(4.0)
        while first.rounds + second.rounds < 6:
            a, b = first.exchange(a), second.exchange(b)
        assert 0 < float(a["bias"][0]) == float(b["bias"][0]) == 2.0


@situation(
    "a parameter that lacks the replica axis in a TrainState",
    ValueError,
    "make the group or the transport with one replica",
)
def _(directory):
    state = state_of(1.0, 2)
    exchanged(state, initial=state.dense.params)


@situation("a state of Flax for its parameters", ValueError, "does not fit: it has .*Give the parameters")
def _(directory):
    import optax
    from flax.training.train_state import TrainState as FlaxState

    exchanged(FlaxState.create(apply_fn=None, params=params_of(0.0), tx=optax.adam(0.1)))


@situation("an exchange under jit", ValueError, "by a function under jit: call it between two steps")
def _(directory):
    with Foreground(meeting(), every_steps=1) as foreground:
        jax.jit(foreground.exchange)(params_of(0.0))


@situation("doubles of NumPy that JAX would cut", ValueError, "float64 into float32: give that dtype, or set")
def _(directory):
    exchanged(jax.tree.map(lambda x: np.zeros(x.shape), PARAMS))


@situation("a trainer that leaves without finish", PeerLeft, "trainer 1 left without `finish` after its round 3")
def _(directory):
    transport = meeting(trainers=2)
    together(trainer(transport, 0, steps=4), _without_finish(transport, 1))


def _without_finish(transport, number):
    def run():
        with Foreground(transport, number, every_steps=1) as foreground:
            for _ in range(3):
                foreground.exchange(params_of(0.0))

    return run


@situation("a trainer that leaves is dropped, the others end")
def _(directory):
    for kind in (Shadow, Foreground):
        transport, ends = meeting(trainers=4, on_failure="drop"), {}
        others = [trainer(transport, i, kind, steps=4, ends=ends) for i in (0, 1, 3)]
        together(*others, _without_finish(transport, 2))
        assert sorted(ends) == [0, 1, 3] and len(set(ends.values())) == 1


@situation("a trainer that never comes is dropped, the others end")
def _(directory):
    for rule in (MEAN, bmuf(1.0, momentum=0.5), EASGD):
        transport, ends = meeting(rule, 3, on_failure="drop", timeout_s=0.2), {}
        together_while_time_passes(transport, *[trainer(transport, i, Shadow, ends=ends) for i in (0, 2)])
        assert sorted(ends) == [0, 2] and len(set(ends.values())) == 1


@situation("four plain trainers of uneven length, two of a kind")
def _(directory):
    for rule in (MEAN, EASGD):
        transport, ends = meeting(rule, 4), {}
        kinds = (Shadow, Foreground, Shadow, Foreground)
        together(*[trainer(transport, i, kind, steps=5 + 20 * i, ends=ends) for i, kind in enumerate(kinds)])
        assert len(ends) == 4 and len(set(ends.values())) == 1 and ends[0] > 3


@situation("trainers with different numbers of replicas")
def _(directory):
    transport, found = meeting(trainers=2), {}

    def run(number, *axis):
        with Foreground(transport, number, every_steps=1) as foreground:
            found[number] = foreground.exchange(params_of(4.0 * number, *axis))
            foreground.finish(found[number])

    together(lambda: run(0, 3), lambda: run(1))
    assert found[0]["bias"].tolist() == [[1.0, 1.0]] * 3 and found[1]["bias"].tolist() == [1.0, 1.0]


@situation("ten megabytes in a hundred leaves")
def _(directory):
    initial = {f"{i:05d}": np.zeros(256, np.float32) for i in range(100)} | {"big": np.zeros(2_500_000, np.float32)}
    with Foreground(AllToAll(MEAN, initial), every_steps=1) as foreground:
        params = {name: jnp.ones((2, *leaf.shape)) for name, leaf in initial.items()}
        assert float(foreground.exchange(params)["big"].sum()) == 5_000_000


@situation("a leaf without elements, and one without axes")
def _(directory):
    initial = {"empty": np.zeros((0, 3), np.float32), "one": np.float32(1.0), "none": None, "x": 2.0}
    found = exchanged(
        {"empty": jnp.zeros((2, 0, 3)), "one": jnp.array([1.0, 3.0]), "none": None, "x": jnp.ones(2)}, initial
    )
    assert found["one"].tolist() == [2.0, 2.0] and found["empty"].shape == (2, 0, 3) and found["none"] is None


@situation("a trainer whose last state has diverged", ValueError, "state of trainer 0 cannot be synchronised")
def _(directory):
    with Shadow(meeting(EASGD)) as shadow:
        shadow.finish(params_of(float("nan")))


REFUSED = {
    "AllToAll needs a rule without a centre, got easgd.alpha=0.5, form='symmetric'.": lambda _: AllToAll(EASGD, PARAMS),
    "Centre needs a rule with a centre, got model_averaging.*: use AllToAll": lambda _: Centre(MEAN, PARAMS),
    "no floating leaf, so there is nothing to synchronise": lambda _: AllToAll(MEAN, {"count": np.zeros(3, np.int32)}),
    r"the leaf \['w'\] is complex": lambda _: AllToAll(MEAN, {"w": np.zeros(3, np.complex64)}),
    r"the leaf \['bias'\] holds nan or inf": lambda _: AllToAll(MEAN, {"bias": np.array([0.0, np.nan], np.float32)}),
    "on_failure='ignore' must be 'raise', 'drop' or 'replace'": lambda _: meeting(on_failure="ignore"),
    "timeout_s=inf must be": lambda _: meeting(timeout_s=float("inf")),
    "core_share=0.0 must be": lambda _: Shadow(meeting(), core_share=0.0),
    "core_share=1.5 must be": lambda _: Shadow(meeting(), core_share=1.5),
    "trainers=0 must be a whole number from 1": lambda _: SyncGroup(MEAN, PARAMS, 0),
    "every_steps=0 must be a whole number from 1": lambda _: SyncGroup(MEAN, PARAMS, 1, every_steps=0),
    # Parameters of other shapes.
    r"at \['kernel'\]: it has \(3, 2\), wanted \(3, 3, 2\)": lambda _: exchanged(
        {"bias": jnp.zeros((3, 2)), "kernel": jnp.zeros((3, 2))}  # rows of a kernel in the place of replicas
    ),
    r"at \['kernel'\]: it has \(3, 5\), wanted \(3, 2\)": lambda _: exchanged(
        {"bias": jnp.zeros(2), "kernel": jnp.zeros((3, 5))}
    ),
    r"it has \['scale'\] where nothing is expected": lambda _: exchanged(params_of(0.0) | {"scale": jnp.zeros(1)}),
    r"it has \(0, 2\)": lambda _: exchanged(params_of(0.0, 0)),
}
refused(REFUSED)


@situation("a group for a second training", ValueError, "a group or a transport is for one training, make a new one")
def _(directory):
    group = SyncGroup(MEAN, PARAMS, 1)
    for _ in range(2):
        with group.trainer(0) as sync:
            sync.finish(sync.exchange(params_of(1.0)))
