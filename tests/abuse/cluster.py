"""Servers on Ray: wrong arguments and environments, refused before any process starts."""

import sys
from pathlib import Path

import oac_throughput
import shadowsync_quality

from abuse import refused, situation
from jaxrec.cluster import Cluster, Supervisor
from jaxrec.cluster.runtime import check_authentication
from jaxrec.embedding import EmbeddingSpec, Lookup, Table, adagrad

SPEC = EmbeddingSpec({"item": Table(40, 4)}, {"item": Lookup("item")}, shards=4)

for address in ("", "ray://10.0.0.1:10001", ":6379", "10.0.0.1:head", 6379):
    situation(f"the address {address!r}", ValueError, "must be 'auto' or host:port of a running cluster")(
        lambda directory, address=address: Cluster(address)
    )


@situation("an address where nobody answers", ConnectionError, "no Ray cluster answers at 127.0.0.1:1 .*ray start --he")
def _(directory):
    with Cluster("127.0.0.1:1"):
        pass


refused(
    {
        "RAY_AUTH_MODE=disabled switches the authentication": lambda _: check_authentication(
            {"RAY_AUTH_MODE": "disabled"}
        ),
        r"the cluster is not entered: with Cluster\(": lambda _: Supervisor(Cluster(), SPEC, adagrad(0.1)),
        "--servers 3 is for --link remote: add that, or leave": lambda _: oac_throughput.check(
            oac_throughput.Config(servers=3)
        ),
        "--server-cores 512 must leave a core of ": lambda _: oac_throughput.check(
            oac_throughput.Config(link="remote", server_cores=512)
        ),
        "--server-cores is for servers of this machine: leave out --ray-address": lambda _: oac_throughput.check(
            oac_throughput.Config(link="remote", server_cores=1, ray_address="auto")
        ),
        "--server-resource rows is for --ray-address: add that": lambda _: oac_throughput.check(
            oac_throughput.Config(link="remote", server_resource="rows")
        ),
    }
)


@situation("authentication by token, or as Ray has it")
def _(directory):
    check_authentication({})
    check_authentication({"RAY_AUTH_MODE": "TOKEN"})


@situation("no Ray where a cluster begins", ModuleNotFoundError, r"Ray, which is not installed: .*jaxrec\[cluster\]")
def _(directory):
    before = {name: sys.modules.get(name) for name in ("ray",)}
    sys.modules["ray"] = None  # importing it raises
    try:
        with Cluster("auto"):
            pass
    finally:
        sys.modules.pop("ray")
        sys.modules.update({name: module for name, module in before.items() if module is not None})


for name, value, match in (
    ("timeout_s", 0, "timeout_s=0 must be a number of seconds"),
    ("start_timeout_s", float("inf"), "start_timeout_s=inf must be a number of seconds"),
    ("spares", -1, "spares=-1 must be a whole number"),
    ("most_deaths", -1, "most_deaths=-1 must be a whole number"),
):
    situation(f"a supervisor with {name}={value}", ValueError, match)(
        lambda directory, name=name, value=value: Supervisor(Cluster(), SPEC, adagrad(0.1), **{name: value})
    )


for words, flags in {
    "--pace-seconds 0.1 is for --where processes": {"pace_seconds": 0.1},
    "--no-last-rounds is for --where emulated": {"last_rounds": False, "where": "processes"},
    "--path x is for --data criteo": {"path": Path("x")},
    "--rows 9 is for --data synthetic": {"rows": 9, "data": "criteo"},
    "the arm all_reduce waits in every step": {"arms": ("all_reduce",), "where": "processes"},
    "rounds of a given gap, as of s_ma_5, are emulated": {"arms": ("s_ma-delta_1",), "where": "processes"},
}.items():

    @situation(f"quality of trainers with {flags}", ValueError, words)
    def _(directory, flags=flags):
        config = shadowsync_quality.Config(**flags)
        shadowsync_quality.check(config, shadowsync_quality.size_of(config))
