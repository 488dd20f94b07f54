"""In-process shard servers that die on demand, and their successors."""

from in_process import InProcess

from jaxrec.embedding import RemoteTables
from jaxrec.embedding.servers import ShardServer, deal


class Fleet:
    """The shard servers of one set of tables; as a watcher entered before a `Recovery`, it starts successors.

    Args:
      servers: number of servers.
      fate: (server, incarnation, verb, index of the message among those of its verb) -> a fate of `InProcess`.
      way: (spec, layout, shards, incarnation) -> a connection to a new server; default: `InProcess`.
      options: passed to RemoteTables.
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
                assert set(mine) <= set(shards)  # a dead server loses all of its rows
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
    """RemoteTables over new servers, which end with this process."""
    return Fleet(spec, row_optimizer, servers, **options).tables
