"""Trainers that synchronise: wrong arguments, shapes and kinds of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState as FlaxState

from abuse import refused, situation
from jaxrec.shadowsync import (
    AllToAll,
    Centre,
    Foreground,
    Shadow,
    SyncGroup,
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


def finished(state):
    with Shadow(meeting(EASGD)) as shadow:
        shadow.finish(state)


def exchanged_under_jit():
    with Foreground(meeting(), every_steps=1) as foreground:
        jax.jit(foreground.exchange)(params_of(0.0))


def flax_state():
    return FlaxState.create(apply_fn=None, params=params_of(0.0), tx=optax.adam(0.1))


@situation("a leaf without elements, and one without axes")
def _(directory):
    initial = {"empty": np.zeros((0, 3), np.float32), "one": np.float32(1.0), "none": None, "x": 2.0}
    found = exchanged(
        {"empty": jnp.zeros((2, 0, 3)), "one": jnp.array([1.0, 3.0]), "none": None, "x": jnp.ones(2)}, initial
    )
    assert found["one"].tolist() == [2.0, 2.0] and found["empty"].shape == (2, 0, 3) and found["none"] is None


REFUSED = {
    "AllToAll needs a rule without a centre, got easgd.alpha=0.5, form='symmetric'.": lambda _: AllToAll(EASGD, PARAMS),
    "Centre needs a rule with a centre, got model_averaging.*: use AllToAll": lambda _: Centre(MEAN, PARAMS),
    "no floating leaf, so there is nothing to synchronise": lambda _: AllToAll(MEAN, {"count": np.zeros(3, np.int32)}),
    r"the leaf \['w'\] is complex": lambda _: AllToAll(MEAN, {"w": np.zeros(3, np.complex64)}),
    r"the leaf \['w'\] holds nan or inf": lambda _: AllToAll(MEAN, {"w": np.array([0.0, -np.inf], np.float32)}),
    r"the leaf \['bias'\] holds nan or inf": lambda _: AllToAll(MEAN, {"bias": np.array([0.0, np.nan], np.float32)}),
    "on_failure='ignore' must be 'raise', 'drop' or 'replace'": lambda _: meeting(on_failure="ignore"),
    "timeout_s=inf must be": lambda _: meeting(timeout_s=float("inf")),
    "on_failure='replace' is of transports": lambda _: SyncGroup(MEAN, PARAMS, 2, on_failure="replace"),
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
    "make the group or the transport with one replica": lambda _: exchanged(state_of(1.0, 2), params_of(1.0, 2)),
    "does not fit: it has .*Give the parameters": lambda _: exchanged(flax_state()),
    # Parameters of other kinds.
    "by a function under jit: call it between two steps": lambda _: exchanged_under_jit(),
    "float64 into float32: give that dtype, or set": lambda _: exchanged(
        jax.tree.map(lambda x: np.zeros(x.shape), PARAMS)
    ),
    "state of trainer 0 cannot be synchronised": lambda _: finished(params_of(float("nan"))),
}
refused(REFUSED)


@situation("a group for a second training", ValueError, "a group or a transport is for one training, make a new one")
def _(directory):
    group = SyncGroup(MEAN, PARAMS, 1)
    for _ in range(2):
        with group.trainer(0) as sync:
            sync.finish(sync.exchange(params_of(1.0)))
