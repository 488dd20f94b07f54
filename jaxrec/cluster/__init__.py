"""Rows in other processes and on other machines, on Ray: servers for `RemoteTables`, and their supervisor.

    with Cluster() as cluster:                                       # Ray on this machine, or Cluster("auto")
        servers = Supervisor(cluster, spec, row_optimizer, servers=2)
        state = init_state(params, optimizer, servers.tables)
        with Pipeline(state, update, window=4) as engine:
            engine.enter(servers)                                    # before the recovery, which brings the rows back
            recovery = engine.enter(Recovery(engine, directory, ...))
            train(engine, stream, hooks=[recovery.hook])

It needs the extra `[cluster]`, and nothing else does: Ray is imported where a `Cluster` is entered.
"""

from jaxrec.cluster.runtime import Cluster
from jaxrec.cluster.servers import RayServer
from jaxrec.cluster.supervisor import Death, GivenUp, Supervisor

__all__ = ["Cluster", "Death", "GivenUp", "RayServer", "Supervisor"]
