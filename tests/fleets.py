"""Servers of shards in this process, that die when a test says so, and the successors of the dead."""

from in_process import InProcess

from jaxrec.embedding import RemoteTables
from jaxrec.embedding.servers import ShardServer, deal


class Fleet:
    """The servers of some tables; as a watcher of an engine, entered before a recovery, it starts successors.

    Args:
      servers: how many.
      fate: (server, incarnation, verb, number of the message with that verb) -> as for `InProcess`.
      way: made of a spec, a layout, shards and an incarnation; it reaches a server of these.
      options: of RemoteTables.
    """

    def __init__(self, spec, row_optimizer, servers=2, fate=lambda *message: "", way=None, **options):
        self.spec, self.layout, self.fate, self.way = spec, spec.layout(row_optimizer), fate, way
        self.shards, self.died = deal(spec.shards, servers), []
        self.ways = [self.start(number) for number in range(servers)]
        self.tables = RemoteTables(spec, row_optimizer, self.ways, **({"timeout_s": 60} | options))

    def start(self, number, incarnation=1):
        if self.way:
            return self.way(self.spec, self.layout, self.shards[number], incarnation)
        fate = lambda verb, message: self.fate(number, incarnation, verb, message)
        return InProcess(ShardServer(self.spec, self.layout, self.shards[number], incarnation), fate)

    def recover(self, shards):
        for number, mine in enumerate(self.shards):
            if set(mine) & set(self.tables.lost):
                assert set(mine) <= set(shards)  # all rows of a server go with it
                self.died.append(number)
                self.ways[number].kill()
                self.ways[number] = self.start(number, 1 + self.died.count(number))
                self.tables.replace(self.ways[number])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for way in self.ways:
            way.kill()


def remote(spec, row_optimizer, servers=2, **options):
    """RemoteTables over servers of their own, which end with this process."""
    return Fleet(spec, row_optimizer, servers, **options).tables
