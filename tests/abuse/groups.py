"""SyncGroup: contradictory arguments; trainers that join twice, too late or never."""

from concurrent.futures import ThreadPoolExecutor

from abuse import situation
from abuse.shadowsync import EASGD, MEAN, PARAMS, params_of
from jaxrec.shadowsync import PeerLeft, SyncGroup


def group_of(rule=MEAN, trainers=1, **more):
    return SyncGroup(rule, PARAMS, trainers, **more)


def with_group(group, number=0, value=1.0):
    """Run a trainer of one step; return its final parameters."""
    with group.trainer(number) as sync:
        return sync.finish(sync.exchange(params_of(value)))


@situation("a group of parameters for its number of trainers", ValueError, "trainers={'bias': array")
def _(directory):
    SyncGroup(EASGD, PARAMS, PARAMS)


@situation("a group of no trainers", ValueError, "trainers=0 must be a whole number from 1")
def _(directory):
    group_of(trainers=0)


@situation("servers for a rule without a centre", TypeError, "unexpected keyword argument 'servers'")
def _(directory):
    group_of(servers=2)


@situation("a centre of no servers in a group", ValueError, "servers=0 must be a whole number from 1")
def _(directory):
    group_of(EASGD, servers=0)


@situation("a centre of no bandwidth in a group", ValueError, "bytes_per_s=0 must be above 0, or None")
def _(directory):
    group_of(EASGD, bytes_per_s=0)


@situation("a pace for the foreground", TypeError, "unexpected keyword argument 'pace_seconds'")
def _(directory):
    group_of(every_steps=5, pace_seconds=0.1)


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


@situation("a group's trainer beyond the last", ValueError, "trainer=2 must be a whole number from 0 to 1")
def _(directory):
    with_group(group_of(trainers=2), 2)


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


@situation("a truth value for a trainer's number", ValueError, "trainer=True must be a whole number from 0 to 1")
def _(directory):
    with_group(group_of(trainers=2), True)


@situation(
    "the parts of a model where the group has its state", ValueError, "it has nothing where .*Give the parameters"
)
def _(directory):
    with group_of().trainer(0) as sync:
        sync.exchange(None)
