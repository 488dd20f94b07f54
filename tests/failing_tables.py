"""Host tables whose shards die at chosen calls, as on a server: their rows are lost, and refused until restored."""

import collections
import threading

import numpy as np

from jaxrec.checkpoint import restore_shards
from jaxrec.embedding import HostTables
from jaxrec.types import ShardsLost


class FailingTables(HostTables):
    """Host tables that lose shards.

    Attributes:
      deaths: (kind of call, its index from 0, shard); kinds are 'read', 'write' and 'take'.
      calls: calls of each kind so far; 'refused read' and 'refused write' are those that have raised ShardsLost.
      dead: shards that are lost.
    """

    @classmethod
    def of(cls, tables, deaths=()):
        found = cls(tables.spec, tables.layout, tables.shards, tables.directory, tables.puts)
        found.__dict__.update(deaths=list(deaths), calls=collections.Counter(), dead=set(), lock=threading.Lock())
        return found

    def count(self, kind):
        with self.lock:  # several loaders may read concurrently
            number, self.calls[kind] = self.calls[kind], self.calls[kind] + 1
            for shard in [shard for k, n, shard in self.deaths if (k, n) == (kind, number)]:
                self.kill(shard)

    def kill(self, shard):
        self.dead.add(shard)
        for name in self.spec.stacks:
            for array in self.shards[name][shard].values():
                array[:] = np.nan

    def revive(self, shards):
        """Restore shards to their initial rows."""
        return restore_shards(None, self, shards)[0]

    def read(self, plans):
        self.count("read")
        rows = super().read(plans)
        # After the read: a shard that dies during it leaves torn rows.
        if lost := [s for s in self.dead if any(p.count[s] for p in plans.values())]:
            self.count("refused read")
            raise ShardsLost(lost, "the test killed them")
        return rows

    def take(self, rows):
        self.count("take")
        if self.dead:
            raise ShardsLost(self.dead, "the test killed them")
        return super().take(rows)

    def write(self, store, shards):
        self.count("write")
        chosen = range(self.spec.shards) if shards is None else shards
        store([shard for shard in chosen if shard not in self.dead])
        if lost := self.dead.intersection(chosen):
            self.count("refused write")
            raise ShardsLost(lost)
        return self

    def put(self, plans, rows, shards=None):
        return self.write(lambda there: HostTables.put(self, plans, rows, there), shards)

    def add(self, plans, rows, old, shards=None):
        return self.write(lambda there: HostTables.add(self, plans, rows, old, there), shards)

    def with_shard(self, stack, shard, parts):
        if shard in self.dead:  # a restored shard has the puts that it missed
            self.dead.discard(shard)
            self.puts[shard] = self.puts[:, 1].max()
        return super().with_shard(stack, shard, parts)
