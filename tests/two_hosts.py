"""Two hosts on one machine: network namespaces with one link between them, in which commands run.

Needs root, or a kernel that allows user namespaces. The hosts share file system and process list, and a namespace ends
with its processes. `ray_on` starts Ray on both.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_TOOLS = ("unshare", "nsenter", "ip", "sh", "cat")
PORT = 6379
_HOLD = ["sh", "-c", "echo up; exec cat"]  # ends with its parent, which closes its stdin


class Host(NamedTuple):
    """A network namespace of its own.

    Attributes:
      address: IP address of this host, reachable from the other one.
      holder: process that keeps the namespace alive.
      network: identifier of the namespace, different from that of this process.
    """

    address: str
    holder: subprocess.Popen
    network: str

    def command(self, words: list[str]) -> list[str]:
        """Return the command line that runs words on this host."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self.holder.pid), *user, "--net", "--", *words]

    def run(self, *words: str, **options) -> None:
        """Run a command on this host to its end; OSError if it fails."""
        done = subprocess.run(self.command([*words]), capture_output=True, text=True, timeout=120, **options)
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr or done.stdout}")

    def processes(self) -> list[int]:
        """All processes on this host except the holder."""
        found = (int(name) for name in os.listdir("/proc") if name.isdecimal())
        return [one for one in found if one != self.holder.pid and _network_of(one) == self.network]

    def kill(self) -> None:
        """Simulate a power loss: kill all processes on the host, including those that are starting."""
        for _ in range(100):
            if not (left := self.processes()):
                return
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            threading.Event().wait(0.02)
        raise OSError(f"these processes do not end: {left}")

    def cut(self) -> None:
        """Cut the link."""
        self.run(*"ip link set link0 down".split())

    def join(self) -> None:
        """Repair the link."""
        self.run(*"ip link set link0 up".split())
        self.run(*"ip route replace default dev link0".split())  # Ray finds the address of its machine by it

    def slow_down(self, mbit_per_s: float) -> None:
        """Limit what this host sends, by a token bucket; OSError where the kernel has none."""
        self.run(*f"tc qdisc replace dev link0 root tbf rate {mbit_per_s}mbit burst 256kb latency 200ms".split())

    def start_ray(self, *words: str) -> None:
        """Start Ray on this host by its command line."""
        command = [str(Path(sys.executable).parent / "ray"), "start", f"--node-ip-address={self.address}"]
        self.run(*command, "--num-cpus=0", "--object-store-memory=100000000", *words, env=ray_environment())

    def join_ray(self, head: "Host") -> None:
        """Start Ray on this host, which joins that of another and has the resource `rows`."""
        self.start_ray(f"--address={head.address}:{PORT}", '--resources={"rows": 1}')


def ray_environment() -> dict[str, str]:
    """Return the environment variables of Ray and of its drivers, which import what this process does."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32, "RAY_USAGE_STATS_ENABLED": "0"}
    return os.environ | token | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _network_of(process):
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        return os.readlink(f"/proc/{process}/ns/net")
    return ""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create two hosts with a link; all processes on them are killed on exit.

    Raises:
      OSError: namespaces cannot be created here; with the reason.
    """
    missing = [tool for tool in _TOOLS if not shutil.which(tool)]
    if missing or sys.platform != "linux":
        raise OSError(f"network namespaces want Linux and the programs {missing or _TOOLS}")
    root = os.geteuid() == 0
    with contextlib.ExitStack() as stack:
        first = _held(stack, ADDRESSES[0], ["unshare", "--net", *([] if root else ["--user", "--map-root-user"])])
        second = _held(stack, ADDRESSES[1], first.command(["unshare", "--net"]) if not root else ["unshare", "--net"])
        first.run(*f"ip link add link0 type veth peer name link0 netns {second.holder.pid}".split())
        for host in (first, second):
            for words in (f"addr add {host.address}/24 dev link0", "link set lo up"):
                host.run("ip", *words.split())
            host.join()
        yield first, second


@contextlib.contextmanager
def ray_on(first: Host, second: Host) -> Iterator[None]:
    """Start Ray on two hosts: its head is on the first, and the second has the resource `rows`; it ends with them.

    Raises:
      OSError: it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="h-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        first.start_ray("--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={directory}")
        second.join_ray(first)
        try:
            yield
        finally:
            first.kill()
            second.kill()


def _held(stack, address, begin):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    holder = stack.enter_context(subprocess.Popen([*begin, *_HOLD], **pipes))
    if holder.stdout.readline() != "up\n":
        raise OSError(holder.stderr.read().strip() or "a namespace has ended at once")
    stack.callback(holder.kill)
    host = Host(address, holder, _network_of(holder.pid))
    if host.network in ("", _network_of(os.getpid())):  # all processes there will be killed
        raise OSError(f"process {holder.pid} has no network of its own")
    stack.callback(host.kill)
    return host
