"""Processes beside this one: shard servers, also on other machines, started and supervised with Ray; and trainers.

    with Cluster() as cluster:                                       # Ray on this machine, or Cluster("auto")
        servers = Supervisor(cluster, task.spec, task.row_optimizer, servers=2)
        recovery = Recovery(directory, ...)                          # after the servers, whose rows it restores
        with Pipeline(task, task.init(params, servers.tables), [servers, recovery], window=4) as engine:
            engine.train(batches)

Only this package needs the extra `[cluster]`; it imports Ray when a `Cluster` is entered. A `Machine` starts processes
without Ray: see `pool`.
"""

from jaxrec.cluster.local import Machine
from jaxrec.cluster.runtime import Cluster
from jaxrec.cluster.servers import RayServer
from jaxrec.cluster.supervisor import Death, GivenUp, Supervisor

__all__ = ["Cluster", "Death", "GivenUp", "Machine", "RayServer", "Supervisor"]
