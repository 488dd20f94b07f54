"""A supervisor whose servers run in this process: whom it kills, and how many deaths it tolerates."""

import types

import pytest
from click_model import ROWS, SPEC, plan_of
from in_process_servers import InProcess

from jaxrec.cluster import GivenUp, Supervisor
from jaxrec.embedding.servers import ShardServer
from jaxrec.types import ShardsLost

PLANS = plan_of(range(40))
pytestmark = pytest.mark.filterwarnings("ignore:shards .* has taken its place:UserWarning")


class InProcessServer(InProcess):
    """What a supervisor uses of `RayServer`."""

    def __init__(self, config, index, shards, incarnation, process):
        super().__init__(ShardServer(config.spec, config.layout, shards, incarnation))
        self.index, self.shards, self.incarnation, self.killed = index, tuple(shards), incarnation, 0

    def __str__(self):
        return f"server {self.index} (incarnation {self.incarnation})"

    def wait(self, timeout_s):
        pass

    def death_reason(self):
        return ""

    def kill(self):
        self.killed += 1
        super().kill()


@pytest.fixture
def start(monkeypatch):
    """Starts supervisors that learn of deaths by their calls alone."""
    monkeypatch.setattr("jaxrec.cluster.supervisor.RayServer", InProcessServer)
    monkeypatch.setattr("jaxrec.cluster.supervisor.server_process", lambda resources: None)
    opened = []
    cluster = types.SimpleNamespace(check_entered=lambda: None, before_end=opened.append, died="")
    yield lambda **options: Supervisor(cluster, SPEC, ROWS, 2, **options)
    for close in opened:
        close()


def lose(servers):
    """The shards whose loss the next read raises."""
    with pytest.raises(ShardsLost) as lost:
        servers.tables.read(PLANS)
    return lost.value.shards


def test_as_many_deaths_are_tolerated_as_the_caller_says_and_one_more_ends_the_run(start):
    servers = start(most_deaths=2)
    for number in (1, 2):
        servers.in_use[number - 1].kill()
        servers.recover(lose(servers))
        assert len(servers.tables.read(PLANS)) == 1 and len(servers.deaths) == number
    servers.in_use[0].kill()
    with pytest.raises(GivenUp, match="3 deaths of servers within 10 minutes, above most_deaths=2"):
        servers.recover(lose(servers))


def test_a_server_that_counts_as_dead_is_killed_as_it_could_go_on_later(start):
    servers = start()
    silent, other = servers.in_use
    servers.tables.mark_lost(silent.shards, "it has not answered for a minute")
    servers.recover(lose(servers))
    assert silent.killed and not other.killed and servers.in_use[0].incarnation == 2
