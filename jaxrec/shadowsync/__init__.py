"""ShadowSync: synchronisation of dense replicas in the background or in the foreground.

    group = SyncGroup(easgd(), params, trainers=4)      # complete example in its docstring
    with group.trainer(i) as sync:                      # in the thread of trainer i
        params = sync.exchange(params)                  # after every step
        params = sync.finish(params)                    # after the last one

`train_freely` runs such trainers over shared host tables, and `FreeTrainers` is an engine that trains in stretches and
calls its callbacks in between. Start with the equations in `rules`, then read `synchroniser`. A group gives each
trainer a `Shadow` or a `Foreground`, over an `AllToAll`, a `Centre` or a custom transport.
"""

from jaxrec.shadowsync.free import FreeTrainers
from jaxrec.shadowsync.group import SyncGroup
from jaxrec.shadowsync.params import replica_spread, with_mean_replica
from jaxrec.shadowsync.rules import Rule, bmuf, easgd, mean_of, model_averaging
from jaxrec.shadowsync.stats import TrainerStats
from jaxrec.shadowsync.synchroniser import Foreground, Shadow
from jaxrec.shadowsync.transport import AllToAll, Centre, PeerLeft, Transport
from jaxrec.shadowsync.workers import FreeStats, FreeStep, train_freely

__all__ = [
    "AllToAll",
    "Centre",
    "Foreground",
    "FreeStats",
    "FreeStep",
    "FreeTrainers",
    "PeerLeft",
    "Rule",
    "Shadow",
    "SyncGroup",
    "TrainerStats",
    "Transport",
    "bmuf",
    "easgd",
    "mean_of",
    "model_averaging",
    "replica_spread",
    "train_freely",
    "with_mean_replica",
]
