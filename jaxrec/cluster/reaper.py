"""Ends what a driver has started on Ray when that driver ends, however it ends; a program of its own.

    python -I -S reaper.py DIRECTORY        standard input is a pipe that the driver holds open while it lives

Ray ends most of its processes by itself when their driver is killed, but not all, none that is stopped, and it leaves
its directory behind. All of them have inherited `JAXREC_CLUSTER=DIRECTORY`, or write there. It imports the standard
library alone, as it waits beside training.
"""

import contextlib
import os
import shutil
import signal
import sys
import time

MARK = "JAXREC_CLUSTER"
ROUNDS = 20  # a process that is just being started is seen in the next round


def marked(directory: str) -> list[int]:
    """The processes of this machine that belong to a directory, by their number."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError):  # it has ended, or is somebody else's
            if _has_mark(int(name), directory) or _writes_below(int(name), directory):
                found.append(int(name))
    return found


def _has_mark(process, directory):
    with open(f"/proc/{process}/environ", "rb") as file:
        return f"{MARK}={directory}".encode() in file.read().split(b"\0")


def _writes_below(process, directory):
    """Whether it is of Ray and has a file open there: an agent that names itself writes its name over the mark."""
    with open(f"/proc/{process}/cmdline", "rb") as file:
        if not file.read().startswith(b"ray::"):  # the driver writes there, too
            return False
    files = (f"/proc/{process}/fd/{number}" for number in os.listdir(f"/proc/{process}/fd"))
    return any(os.readlink(file).startswith(directory + "/") for file in files)


def reap(directory: str) -> None:
    """Kills all processes of a directory, and removes it."""
    for _ in range(ROUNDS):
        if not (processes := marked(directory)):
            break
        for process in processes:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the driver, whose end this one waits for
    sys.stdin.buffer.read()
    reap(sys.argv[1])
