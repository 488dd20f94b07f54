"""Two hosts on one machine: network namespaces with one link between them, in which commands run.

Root may make them, and others where the kernel lets them have user namespaces. They see one file system and one list of
processes, and end with the processes in them.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_TOOLS = ("unshare", "nsenter", "ip", "sh", "cat")
_HOLD = ["sh", "-c", "echo up; exec cat"]  # it ends when who has started it ends, as its input does


class Host(NamedTuple):
    """A network namespace of its own.

    Attributes:
      address: of this host for the other one.
      holder: the process that keeps it.
      network: the name of the namespace, which is not that of this process.
    """

    address: str
    holder: subprocess.Popen
    network: str

    def command(self, words: list[str]) -> list[str]:
        """The command that runs words on this host."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self.holder.pid), *user, "--net", "--", *words]

    def run(self, *words: str, **options) -> None:
        """Runs a command to its end, which must be a good one."""
        done = subprocess.run(self.command([*words]), capture_output=True, text=True, timeout=120, **options)
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr or done.stdout}")

    def processes(self) -> list[int]:
        """All processes on this host, but the one that keeps it."""
        found = (int(name) for name in os.listdir("/proc") if name.isdecimal())
        return [one for one in found if one != self.holder.pid and _network_of(one) == self.network]

    def kill(self) -> None:
        """As when its power goes: all processes on it end at once, also those that are just being started."""
        for _ in range(100):
            if not (left := self.processes()):
                return
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            threading.Event().wait(0.02)
        raise OSError(f"these processes do not end: {left}")


def _network_of(process):
    with contextlib.suppress(OSError):  # it has ended, or is somebody else's
        return os.readlink(f"/proc/{process}/ns/net")
    return ""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a link; all that runs on them ends with the block.

    Raises:
      OSError: they may not be made here; says why.
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
            for words in (f"addr add {host.address}/24 dev link0", "link set lo up", "link set link0 up"):
                host.run("ip", *words.split())
            # By the route to the world Ray finds the address of the machine that it is on.
            host.run("ip", "route", "add", "default", "dev", "link0")
        yield first, second


def _held(stack, address, begin):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    holder = stack.enter_context(subprocess.Popen([*begin, *_HOLD], **pipes))
    if holder.stdout.readline() != "up\n":
        raise OSError(holder.stderr.read().strip() or "a namespace has ended at once")
    stack.callback(holder.kill)
    host = Host(address, holder, _network_of(holder.pid))
    if host.network in ("", _network_of(os.getpid())):  # all that runs there will be killed
        raise OSError(f"process {holder.pid} has no network of its own")
    stack.callback(host.kill)
    return host
