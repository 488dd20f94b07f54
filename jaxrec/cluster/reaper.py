"""Kill the processes of a Ray that a driver has started, however the driver ends; a program of its own.

    python -I -S reaper.py DIRECTORY ADVICE LOGS    standard input: a pipe that the driver holds open while it lives

The driver writes `BEGUN` once Ray runs and `ENDING` before it ends Ray. If an essential process of Ray dies in between,
Ray ends the driver sooner or later, with code 1 and without a message; this program prints which process has died, or
that the driver has, whichever it sees first, and the advice.

When a driver is killed, Ray ends most of its processes, but not all, no stopped ones (SIGSTOP), and it leaves its
directory on the disk. This program finds them by the variable `JAXREC_CLUSTER=DIRECTORY`, which they inherit, or by
files that they have open there. It imports the standard library only, as it stays in memory during training.
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
ESSENTIAL = {"raylet": "its agent on this machine", "gcs_server": "its control service"}  # Ray cannot do without them
ROUNDS = 20  # a process that is just starting is seen in the next round


def marked(directory: str) -> list[int]:
    """Return the ids of the processes on this machine that belong to a Ray directory."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError):  # it has ended, or belongs to another user
            if _has_mark(int(name), directory) or _writes_below(int(name), directory):
                found.append(int(name))
    return found


def _has_mark(process, directory):
    with open(f"/proc/{process}/environ", "rb") as file:
        return f"{MARK}={directory}".encode() in file.read().split(b"\0")


def _writes_below(process, directory):
    """Return whether a process of Ray has a file open there: one that sets its title overwrites its environment."""
    with open(f"/proc/{process}/cmdline", "rb") as file:
        if not file.read().startswith(b"ray::"):  # the driver has files open there, too
            return False
    files = (f"/proc/{process}/fd/{number}" for number in os.listdir(f"/proc/{process}/fd"))
    return any(os.readlink(file).startswith(directory) for file in files)


def reap(directory: str, logs: str = "") -> None:
    """Kill all processes of a Ray directory, copy its logs into `logs` unless that is '', and remove it."""
    for _ in range(ROUNDS):
        if not (processes := marked(directory)):
            break
        for process in processes:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    with contextlib.suppress(OSError, shutil.Error):  # a full disk must not prevent the removal
        for session in glob.glob(f"{directory}/session_[0-9]*") if logs else ():
            shutil.copytree(f"{session}/logs", f"{logs}/{os.path.basename(session)}")
    shutil.rmtree(directory, ignore_errors=True)


def essential(directory: str) -> dict[int, str]:
    """Return {pidfd, readable once the process has ended: description} of the essential processes of a Ray."""
    found = {}
    for process in marked(directory) if hasattr(os, "pidfd_open") else ():
        with contextlib.suppress(OSError):
            with open(f"/proc/{process}/comm") as file:
                name = file.read().strip()
            if name in ESSENTIAL:
                found[os.pidfd_open(process)] = f"Ray's {name} (process {process}), {ESSENTIAL[name]},"
    return found


def watch(driver: int, directory: str, advice: str = "") -> None:
    """Wait until the driver, which writes to the file descriptor, ends; say if Ray dies, or the driver unannounced."""
    living: dict[int, str] = {}
    running = False
    while True:
        ready, _, _ = select.select([driver, *living], [], [])
        dead = [living[file] for file in ready if file != driver]
        if driver not in ready:
            _say(f"{dead[0]} has died, and Ray may end this run without a message. {advice}")
            living, running = {}, False  # said once
            continue
        event = os.read(driver, 1)
        if not event:
            # Both may have ended since the last look, in either order.
            if running:
                what = f"{dead[0]} has died, and the run has ended" if dead else "the run was killed, or ended by Ray"
                _say(f"{what}. {advice}")
            return
        running = event == BEGUN
        living = essential(directory) if running else {}


def _say(line):
    with contextlib.suppress(OSError):  # nobody reads it
        print(line.strip(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # for the driver, for whose end this process waits
    directory, advice, logs = sys.argv[1:]
    watch(sys.stdin.fileno(), directory, advice)
    reap(directory, logs)
