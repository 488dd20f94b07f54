"""Ends what a driver has started on Ray when that driver ends, however it ends; a program of its own.

    python -I -S reaper.py DIRECTORY ADVICE LOGS    standard input is a pipe that the driver holds open while it lives

The driver writes `BEGUN` when Ray is there and `ENDING` before it ends Ray. If a process that Ray cannot do without
dies in between, Ray ends the driver sooner or later, with code 1 and without a word: this program says what has died.

Ray ends most of its processes by itself when their driver is killed, but not all, none that is stopped, and it leaves
its directory behind. All of them have inherited `JAXREC_CLUSTER=DIRECTORY`, or write there. It imports the standard
library alone, as it waits beside training.
"""

import contextlib
import glob
import os
import select
import shutil
import signal
import sys
import time

MARK = "JAXREC_CLUSTER"
BEGUN, ENDING = b"+", b"-"
NEEDED = {"raylet": "its agent on this machine", "gcs_server": "which knows all others"}
ROUNDS = 20  # a process that is just being started is seen in the next round


def marked(directory: str) -> list[int]:
    """The processes of this machine that belong to a directory, by their number."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError):  # it has ended, or is not ours
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


def reap(directory: str, logs: str = "") -> None:
    """Kills all processes of a directory, and removes it.

    Args:
      directory: of Ray.
      logs: where what Ray has logged is kept, in a directory of its own; nothing is kept if empty.
    """
    for _ in range(ROUNDS):
        if not (processes := marked(directory)):
            break
        for process in processes:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    with contextlib.suppress(OSError, shutil.Error):  # a full disk must not keep the rest from being removed
        for session in glob.glob(f"{directory}/session_[0-9]*") if logs else ():
            shutil.copytree(f"{session}/logs", f"{logs}/{os.path.basename(session)}")
    shutil.rmtree(directory, ignore_errors=True)


def needed(directory: str) -> dict[int, str]:
    """{a file that can be read when the process has ended: what it is} of those that Ray cannot do without."""
    found = {}
    for process in marked(directory) if hasattr(os, "pidfd_open") else ():
        with contextlib.suppress(OSError):
            with open(f"/proc/{process}/comm") as file:
                name = file.read().strip()
            if name in NEEDED:
                found[os.pidfd_open(process)] = f"Ray's {name} (process {process}), {NEEDED[name]},"
    return found


def watch(driver: int, directory: str, advice: str = "") -> None:
    """Waits for the end of the driver, and says if Ray has ended before it.

    Args:
      driver: the file that it writes to.
      directory: of the processes.
      advice: how to go on.
    """
    living: dict[int, str] = {}
    while True:
        ready, _, _ = select.select([driver, *living], [], [])
        if driver in ready:  # first: the driver's end is not the fault of Ray, which ends with it
            told = os.read(driver, 1)
            if not told:
                return
            living = needed(directory) if told == BEGUN else {}
        elif ready:
            what, living = living[ready[0]], {}
            print(
                f"{what} has died, and Ray may end this run without a word. {advice}".strip(),
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the driver, whose end this one waits for
    directory, advice, logs = sys.argv[1:]
    watch(sys.stdin.fileno(), directory, advice)
    reap(directory, logs)
