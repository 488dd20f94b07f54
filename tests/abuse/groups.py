"""The front door of ShadowSync: what does not go together in a group, and who comes twice, late or never."""

import contextlib
import pickle
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp

from abuse import situation
from abuse.shadowsync import EASGD, MEAN, PARAMS, params_of, state_of, together
from jaxrec.shadowsync import PeerLeft, SyncGroup, bmuf, easgd


def group_of(rule=MEAN, trainers=1, **more):
    return SyncGroup(rule, PARAMS, trainers, **more)


def with_group(group, number=0, value=1.0):
    """The end of a trainer that takes one step."""
    with group.trainer(number) as sync:
        return sync.finish(sync.exchange(params_of(value)))


@situation(
    "a group made with the number of trainers for its parameters", ValueError, "SyncGroup.rule, params, trainers=4"
)
def _(directory):
    SyncGroup(EASGD, 4, PARAMS)


@situation("a group of parameters for its number of trainers", ValueError, "trainers={'bias': array")
def _(directory):
    SyncGroup(EASGD, PARAMS, PARAMS)


@situation("a group by the rule's function", ValueError, "rule is a function: give model_averaging")
def _(directory):
    group_of(easgd)


@situation("a group of no trainers", ValueError, "trainers=0 must be a whole number from 1")
def _(directory):
    group_of(trainers=0)


@situation("servers for a rule without a centre", ValueError, r"servers=2 is of a centre, which ma\(.* has not")
def _(directory):
    group_of(servers=2)


@situation("a bandwidth for a rule without a centre", ValueError, "bytes_per_s=1000.0 is of a centre")
def _(directory):
    group_of(bmuf(), bytes_per_s=1e3)


@situation("a centre of no servers in a group", ValueError, "servers=0 must be a whole number from 1")
def _(directory):
    group_of(EASGD, servers=0)


@situation("a centre of no bandwidth in a group", ValueError, "bytes_per_s=0 must be above 0, or None")
def _(directory):
    group_of(EASGD, bytes_per_s=0)


@situation("a pace for the foreground", ValueError, "pace_seconds=0.1 is of threads in the background")
def _(directory):
    group_of(every_steps=5, pace_seconds=0.1)


@situation("a pace of zero for the foreground", ValueError, "pace_seconds=0.0 is of threads in the background")
def _(directory):
    group_of(every_seconds=5, pace_seconds=0.0)


@situation("a foreground by steps and by seconds", ValueError, "give every_steps or every_seconds, one of them")
def _(directory):
    group_of(every_steps=5, every_seconds=1.0)


@situation("a group's bad pace is refused before any trainer is", ValueError, "pace_seconds=-1 must be 0 or more")
def _(directory):
    group_of(pace_seconds=-1)


@situation(
    "a group's bad period is refused before any trainer is", ValueError, "every_steps=0 must be a whole number from 1"
)
def _(directory):
    group_of(every_steps=0)


@situation("a group's trainer that is not entered", ValueError, "`exchange` comes inside of the `with` block")
def _(directory):
    group_of().trainer(0).exchange(params_of(0.0))


@situation("a group's trainer beyond the last", ValueError, "trainer=2 must be a whole number from 0 to 1")
def _(directory):
    with_group(group_of(trainers=2), 2)


@situation("a group's trainer that is entered twice", ValueError, "trainer=0 has joined already")
def _(directory):
    group = group_of(trainers=2)
    with group.trainer(0), group.trainer(0):
        pass


@situation("a group for a second training", ValueError, "a group or a transport is for one training, make a new one")
def _(directory):
    group = group_of()
    with_group(group)
    with_group(group)


@situation("a pool of fewer threads than trainers", PeerLeft, "trainer 2 never joined within timeout_s=0.2")
def _(directory):
    group = group_of(trainers=3, timeout_s=0.2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: with_group(group, number), range(3)))


@situation("a group in one thread, trainer after trainer", PeerLeft, "trainer 1 never joined")
def _(directory):
    group = group_of(EASGD, 2, timeout_s=0.2)
    for number in range(2):
        with_group(group, number)


@situation(
    "the parameters of another model in a group", ValueError, "Give the parameters that the group or the transport"
)
def _(directory):
    with group_of().trainer(0) as sync:
        sync.exchange({"w": jnp.zeros(3)})


@situation("a TrainState in a group made with its parameters", ValueError, "make the group or the transport with one")
def _(directory):
    state = state_of(1.0, 2)
    with SyncGroup(MEAN, state.dense.params, 1).trainer(0) as sync:
        sync.exchange(state)


@situation("a group whose other trainer raises, under drop")
def _(directory):
    group, ends = group_of(EASGD, 2, on_failure="drop"), []

    def failing():
        with contextlib.suppress(OSError), group.trainer(1):
            raise OSError("the disk is gone")

    together(lambda: ends.append(with_group(group)), failing)
    assert len(ends) == 1


@situation("a group in a pool of processes", ValueError, "a SyncGroup cannot be sent to another process")
def _(directory):
    pickle.dumps(group_of().trainer)


@situation("a truth value for a trainer's number", ValueError, "trainer=True must be a whole number from 0 to 1")
def _(directory):
    with_group(group_of(trainers=2), True)


@situation("the parts of a model where the group has its state", ValueError, "does not fit at .*Give the parameters")
def _(directory):
    with group_of().trainer(0) as sync:
        sync.exchange(None)
