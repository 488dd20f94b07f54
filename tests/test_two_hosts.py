"""Servers on another host than their driver: the bits of host tables, and behaviour when that host is lost."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from smoke import smoke
from two_hosts import PORT, ray_environment, ray_on, two_hosts

pytest.importorskip("ray", reason="Ray is not installed: `make cluster`, or pip install -e '.[cluster]'")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
HERE, CUT_S = Path(__file__).parent, 45.0


@pytest.fixture(scope="module")
def hosts():
    """Two hosts with Ray; the head is on the first."""
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(two_hosts())
        except OSError as error:
            pytest.skip(f"two hosts cannot be made here: {error}")
        stack.enter_context(ray_on(*found))
        yield found


@pytest.fixture(scope="module")
def found(hosts, tmp_path_factory):
    """Results of a driver whose server host loses its power, then its link, and then its power for good."""
    first, second = hosts
    words = [HERE / "over_two_hosts.py", f"{first.address}:{PORT}", tmp_path_factory.mktemp("runs")]
    command = first.command([sys.executable, *map(str, words)])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, env=ray_environment(), **pipes) as driver:
        try:
            for lost in ("power", "link", "power for good"):
                assert "at\n" in driver.stdout  # after the output of Ray
                if lost == "link":
                    first.cut()
                else:
                    second.kill()
                driver.stdin.write(f"it has lost its {lost}\n")
                if lost == "link":
                    time.sleep(CUT_S)
                    second.kill()  # it is restarted before it is let in again
                    first.join()
                if lost != "power for good":
                    second.join_ray(first)
            return json.loads(driver.communicate(timeout=300)[0].splitlines()[-1])
        finally:
            driver.kill()


def test_servers_on_another_host_have_the_bits_of_host_tables(hosts, found):
    assert found["addresses"] == [hosts[1].address] * 2
    assert found["equal_to_host"] and not found["shorter_is_equal"]


@pytest.mark.parametrize("lost", ["power", "link"])
def test_a_run_whose_host_is_lost_ends_as_serial_that_loses_the_shards_of_all_its_servers(found, lost):
    found = found[lost]
    # A successor that starts before Ray notices the loss is placed on the lost host, and dies too.
    assert {server for server, _ in found["deaths"]} == {0, 1} and found["failed"] == 4
    # The second server may be noticed at the same step after the first one's recovery, which Serial cannot repeat.
    assert (found["equal_to_serial"] or found["more"]) and not found["equal_without_losses"]


def test_servers_that_a_link_has_cut_off_are_noticed_by_the_time_out_of_a_call(found):
    assert any(re.search("has not answered .* within 10 s", reason) for _, reason in found["link"]["deaths"])


def test_a_run_whose_servers_have_no_host_any_more_ends_and_says_so(found):
    said = r"3 deaths of servers .*, above most_deaths=2; the last one of server \d \(incarnation 2\)"
    assert re.match(said, found["given_up"])


def test_a_short_cut_of_the_link_keeps_the_bits_and_so_does_a_slow_one(hosts, tmp_path):
    if not shutil.which("tc"):
        pytest.skip("tc of iproute2 is not installed")
    found = smoke(tmp_path, "cluster_two_hosts")
    assert found["mbit_1000_bitwise_equal_remote"] and not found["mbit_1000_bitwise_equal_async_remote"]
    assert found["no_cut_train_seconds"] < 200  # 20 s; through Ray's object store more than 700
    assert found["cut_2_s_same_bits"] and found["cut_2_s_cut_s"] > 2 and found["cut_2_s_shards_failed"] == 0
