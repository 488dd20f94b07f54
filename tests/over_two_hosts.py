"""A driver on the first of two hosts, with its servers on the second: tests/test_two_hosts.py starts it.

    python over_two_hosts.py ADDRESS DIRECTORY

It trains once undisturbed and three times with saves. At step `AT` of each of the latter it prints `at` and waits for a
line on stdin: the second host has lost its power, or the link to it is cut. Its last line holds its results as JSON.
"""

import contextlib
import json
import sys
import warnings
from pathlib import Path

from click_model import ROWS, SPEC, TASK, batch_at, bits, fresh, plain
from equality import same
from runs_with_losses import ENGINES, LENGTH, run, serially

from jaxrec.cluster import Cluster, GivenUp, Supervisor
from jaxrec.oac import Pipeline

AT = 10


def undisturbed(servers):
    """Addresses of the servers, and whether an undisturbed run equals host tables bit for bit."""
    with Pipeline(TASK, fresh("host")._replace(tables=servers.tables), window=3) as engine:
        losses = [float(metrics["loss"]) for _, metrics in engine.run(map(batch_at, range(LENGTH)))]
        found = {
            "addresses": [server.address for server in servers.in_use],
            "shorter_is_equal": same(bits(engine.state), plain(LENGTH - 1)[0]),
        }
        return found | {"equal_to_host": same(bits(engine.state), plain(LENGTH)[0]) and losses == plain(LENGTH)[1]}


def without_host(servers, directory):
    """A run whose servers' host is lost in the middle: (final bits, failed shards, Log)."""

    def gate(index):
        if index == AT:
            print("at", flush=True)
            sys.stdin.readline()

    engine = ENGINES["pipeline"](fresh("host")._replace(tables=servers.tables))
    found, log, recovery = run(engine, directory, "mfu", servers, gate)
    return found, recovery.failed, log


def main(address, directory):
    """Runs all three trainings and prints the results."""
    warnings.simplefilter("ignore")
    runs = Path(directory)
    with Cluster(address) as cluster:

        def start(**options):  # only the second host has the resource
            return contextlib.closing(Supervisor(cluster, SPEC, ROWS, 2, resources={"rows": 0.01}, **options))

        with start() as servers:
            found = undisturbed(servers)
        control = serially(runs / "control", "mfu")
        for lost in ("power", "link"):
            timeouts = {"timeout_s": 10.0 if lost == "link" else 60.0, "start_timeout_s": 150.0}
            with start(directory=runs / lost, **timeouts) as servers:
                state, failed, log = without_host(servers, runs / lost)
                deaths = [[death.server, death.reason] for death in servers.deaths]
            found[lost] = {
                "deaths": deaths, "failed": failed, "more": log.more, "equal_without_losses": same(state, control),
                "equal_to_serial": same(state, serially(runs / f"wanted_{lost}", "mfu", log)),
            }  # fmt: skip
        # The host's death counts as two, one per server.
        with start(directory=runs / "goes", start_timeout_s=20.0, most_deaths=2) as servers:
            try:
                without_host(servers, runs / "goes")
            except GivenUp as error:
                found["given_up"] = str(error)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
