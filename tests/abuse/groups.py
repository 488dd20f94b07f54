"""SyncGroup: contradictory arguments; trainers that join twice, too late or never."""

from abuse import situation
from abuse.shadowsync import EASGD, MEAN, PARAMS, params_of
from jaxrec.shadowsync import SyncGroup


def group_of(rule=MEAN, trainers=1, **more):
    return SyncGroup(rule, PARAMS, trainers, **more)


def with_group(group, number=0, value=1.0):
    """Run a trainer of one step; return its final parameters."""
    with group.trainer(number) as sync:
        return sync.finish(sync.exchange(params_of(value)))


@situation("a group of no trainers", ValueError, "trainers=0 must be a whole number from 1")
def _(directory):
    group_of(trainers=0)


@situation("a centre of no servers in a group", ValueError, "servers=0 must be a whole number from 1")
def _(directory):
    group_of(EASGD, servers=0)


@situation("a centre of no bandwidth in a group", ValueError, "bytes_per_s=0 must be above 0, or None")
def _(directory):
    group_of(EASGD, bytes_per_s=0)


@situation("a foreground by steps and by seconds", ValueError, "give every_steps or every_seconds, one of them")
def _(directory):
    group_of(every_steps=5, every_seconds=1.0)


@situation(
    "a group's bad period is refused before any trainer is", ValueError, "every_steps=0 must be a whole number from 1"
)
def _(directory):
    group_of(every_steps=0)


@situation("a group for a second training", ValueError, "a group or a transport is for one training, make a new one")
def _(directory):
    group = group_of()
    with_group(group)
    with_group(group)
