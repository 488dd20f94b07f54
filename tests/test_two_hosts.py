"""Servers on another host than their driver: the bits of host tables, and behaviour when that host is lost."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from two_hosts import two_hosts

pytest.importorskip("ray", reason="Ray is not installed: `make cluster`, or pip install -e '.[cluster]'")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
HERE, PORT = Path(__file__).parent, 6379
ENVIRONMENT = os.environ | {
    "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32, "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": os.pathsep.join(map(str, (HERE.parent, HERE, HERE.parent / "experiments"))),
}  # fmt: skip


@pytest.fixture(scope="module")
def hosts():
    """Two hosts with Ray; the head is on the first."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="h-", dir="/tmp", ignore_cleanup_errors=True)
        )
        try:
            first, second = stack.enter_context(two_hosts())
        except OSError as error:
            pytest.skip(f"two hosts cannot be made here: {error}")
        start_ray(first, "--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={directory}")
        start_second(first, second)
        yield first, second


def start_ray(host, *words):
    """Start Ray on a host by its command line."""
    command = [str(Path(sys.executable).parent / "ray"), "start", f"--node-ip-address={host.address}", "--num-cpus=0"]
    host.run(*command, "--object-store-memory=100000000", *words, env=ENVIRONMENT)


def start_second(first, second):
    start_ray(second, f"--address={first.address}:{PORT}", '--resources={"rows": 1}')


@pytest.fixture(scope="module")
def found(hosts, tmp_path_factory):
    """Results of a driver whose server host loses power twice and returns once."""
    first, second = hosts
    words = [HERE / "over_two_hosts.py", f"{first.address}:{PORT}", tmp_path_factory.mktemp("runs")]
    command = first.command([sys.executable, *map(str, words)])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, env=ENVIRONMENT, **pipes) as driver:
        try:
            for returns in (True, False):
                assert "at\n" in driver.stdout  # after the output of Ray
                second.kill()
                driver.stdin.write("its power is gone\n")
                if returns:
                    start_second(first, second)
            return json.loads(driver.communicate(timeout=300)[0].splitlines()[-1])
        finally:
            driver.kill()


def test_servers_on_another_host_have_the_bits_of_host_tables(hosts, found):
    assert found["addresses"] == [hosts[1].address] * 2
    assert found["equal_to_host"] and not found["shorter_is_equal"]


def test_a_host_that_loses_its_power_ends_as_serial_that_loses_the_shards_of_all_its_servers(found):
    # A successor that starts before Ray notices the loss is placed on the dead host, and dies too.
    assert set(found["deaths"]) == {0, 1} and found["failed"] == 4
    assert found["equal_to_serial"] and not found["equal_without_losses"]


def test_a_run_whose_servers_have_no_host_any_more_ends_and_says_so(found):
    said = r"3 deaths of servers .*, above most_deaths=2; the last one of server \d \(incarnation 2\)"
    assert re.match(said, found["given_up"])
