"""Ray for one run: a Ray started on this machine or a running one, and the process state that it changes, restored.

A Ray that was started here ends with the run, even if the driver is killed: see `reaper`.
"""

import contextlib
import functools
import importlib
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrec.cluster import reaper
from jaxrec.files import local_path

# One per process: Ray reads it once and keeps it.
_TOKEN = secrets.token_hex(32)
_LONGEST_DIRECTORY = 40  # Ray puts its sockets below it, whose paths have at most 107 bytes
_REACHABLE_S = 5.0
_LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",  # else usage statistics are sent to the makers of Ray
    "RAY_worker_niceness": "0",  # else every other process of the machine goes before a server
}
# Largest value, in bytes, that travels inside a message. A larger one goes through shared memory that a third process
# manages: a read of 24,000 rows from two servers took a third longer that way.
_INLINE = 2 << 20
_STORE = 256 << 20  # bytes of that shared memory
# Between machines all values do: others are pulled after the message, and Ray 2.60 often asks for one before it knows
# where it is, and again only after some 0.2 s (tests/soak/cluster_two_hosts.py: 0.45 s a step, where it is 0.01 s now).
INLINE_BETWEEN_MACHINES = {
    "RAY_max_direct_call_object_size": str(256 << 20), "RAY_task_rpc_inlined_bytes_limit": str(256 << 20)
}  # fmt: skip
# The signals of Ctrl-C and of a closed terminal are for the driver, which saves while its servers still run.
_NOT_FOR_RAY = (signal.SIGINT, signal.SIGHUP)
_OURS = (signal.SIGINT, signal.SIGTERM)


def import_ray() -> Any:
    """Import Ray, which only clusters need; return its module."""
    # Else a call after the end of a cluster would silently start another one.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError(
            "rows at servers need Ray, which is not installed: pip install 'jaxrec[cluster]'.", name="ray"
        ) from None


class Cluster:
    """Ray in this process, for a `with` block.

    Args:
      address: address of a running cluster, 'auto' (on this machine) or such as '10.0.0.1:6379'; None starts a cluster
        on this machine, which ends with the block or with this process.
      advice: how to resume, printed if Ray itself dies, which then ends this process at once.
      log_directory: directory into which Ray's logs are copied at the end; None to discard them.

    The last two apply to a cluster that is started here.

    Raises:
      ValueError: the address is malformed. On entering: authentication is switched off (by `RAY_AUTH_MODE`), there is
        no token for a running cluster, or Ray is in use in this process already.
      ConnectionError: on entering: no cluster answers at the address.
      ModuleNotFoundError: on entering: Ray is not installed.
    """

    def __init__(self, address: str | None = None, advice: str = "", log_directory: str | Path | None = None):
        self.address = None if address is None else _checked_address(address)
        self._open, self._entered = contextlib.ExitStack(), False
        self._advice, self._logs = advice, "" if log_directory is None else str(local_path(log_directory).resolve())
        self._notify_reaper: Callable[[bytes], object] = lambda event: None
        self._directory, self._essential = "", dict[int, str]()

    def __enter__(self) -> "Cluster":
        check_authentication(os.environ)
        with contextlib.ExitStack() as opened:
            begin = self._joining_options if self.address else self._starting_options
            options, variables = begin(opened)
            with _restored_signals(), environment(variables, ["RAY_AUTH_MODE"]):
                ray = import_ray()  # reads the variables
                if ray.is_initialized():
                    raise ValueError("Ray is in use in this process already: end it by ray.shutdown() first.")
                opened.callback(ray.shutdown)
                _start(ray, options)
                opened.enter_context(_without_worker_logs())
            _refuse_without_token(self.address)
            self._notify_reaper(reaper.BEGUN)
            opened.callback(self._notify_reaper, reaper.ENDING)
            self._essential = reaper.essential(self._directory) if self._directory else {}
            for file in self._essential:
                opened.callback(os.close, file)
            opened.callback(self._essential.clear)
            self._open, self._entered = opened.pop_all(), True
        return self

    @property
    def died(self) -> str:
        """Which essential process of Ray has died, with the advice; '' if none is known to have died."""
        ended, _, _ = select.select(list(self._essential), [], [], 0)
        return f"{self._essential[ended[0]]} has died. {self._advice}".strip() if ended else ""

    def before_end(self, close: Callable[[], object]) -> None:
        """Register a function to be called when the block is left, while Ray still runs."""
        self.check_entered()
        self._open.callback(close)

    def check_entered(self) -> None:
        """Raise a ValueError if the cluster is not entered."""
        if not self._entered:
            raise ValueError("the cluster is not entered: with Cluster() as cluster: Supervisor(cluster, ...).")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._entered = False
        self._open.close()

    def _joining_options(self, opened):
        if self.address != "auto":
            _check_reachable(self.address)
        opened.enter_context(environment(INLINE_BETWEEN_MACHINES))  # until the end, for the processes of the run
        return {"address": self.address}, {"RAY_AUTH_MODE": "token"}

    def _starting_options(self, opened):
        """Create a directory for Ray and start its reaper; return the options and variables to start Ray with."""
        above = tempfile.gettempdir()
        short = len(above) <= _LONGEST_DIRECTORY - len("/jaxrec-12345678")
        self._directory = directory = tempfile.mkdtemp(prefix="jaxrec-", dir=above if short else "/tmp")
        opened.callback(shutil.rmtree, directory, ignore_errors=True)
        command = [sys.executable, "-I", "-S", reaper.__file__, directory, self._advice, self._logs]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
        self._notify_reaper = functools.partial(_notify, process)
        opened.callback(_end_reaper, process)
        options = {
            "address": "local", "num_cpus": 0, "include_dashboard": False, "_temp_dir": directory,
            "object_store_memory": _STORE, "_system_config": {"max_direct_call_object_size": _INLINE},
        }  # fmt: skip
        # Not RAY_AUTH_MODE: Ray sets it when it starts, even in a process that has imported Ray before.
        return options, _LOCAL | {reaper.MARK: directory, "RAY_AUTH_TOKEN": _TOKEN}


def _checked_address(address):
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if address != "auto" and not (host and port.isdecimal() and "/" not in host):
        raise ValueError(
            f"address={address!r:.80} must be 'auto' or host:port of a running cluster, such as '10.0.0.1:6379', or "
            "None to start Ray on this machine."
        )
    return address


def _check_reachable(address):
    # Ray itself would try for minutes.
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACHABLE_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address} ({error}): look whether `ray start --head --port {port}` runs there, "
            "and whether a firewall lies between."
        ) from error


def check_authentication(environment: Mapping[str, str]) -> None:
    """Refuse an environment that switches authentication off: a port of Ray would let anyone run any code."""
    mode = environment.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        raise ValueError(
            f"RAY_AUTH_MODE={mode} switches the authentication of Ray off, and anyone who reaches one of its ports "
            "can run code as you: unset it, or set it to token."
        )


def _start(ray, options):
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called")  # Ray's children exec another program at once
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR, namespace="jaxrec")
    except ray.exceptions.AuthenticationError as error:
        raise ValueError(
            f"the cluster at {options['address']} requires a token that this process does not have "
            f"({str(error).partition('. ')[0]}): put it into ~/.ray/auth_token, or name its file in "
            "RAY_AUTH_TOKEN_PATH."
        ) from error
    except (ConnectionError, RuntimeError) as error:
        raise ConnectionError(
            f"Ray could not be {'joined at ' + options['address'] if options['address'] != 'local' else 'started'}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _refuse_without_token(address):
    known = importlib.import_module("ray._raylet")
    if known.get_authentication_mode() != known.AuthenticationMode.TOKEN:
        raise ValueError(
            f"Ray has begun without token authentication{' at ' + address if address else ''}, and anyone who reaches "
            "one of its ports could run code as you: set RAY_AUTH_MODE=token before Ray is imported, here and where "
            "the cluster is started, with one token in ~/.ray/auth_token of all machines."
        )


@contextlib.contextmanager
def _without_worker_logs() -> Iterator[None]:
    """Silence Ray's page of output per death; the supervisor warns of each in one line."""
    worker: Any = importlib.import_module("ray._private.worker")
    before, worker._worker_logs_enabled = getattr(worker, "_worker_logs_enabled", True), False
    try:
        yield
    finally:
        worker._worker_logs_enabled = before


def _notify(process, event):
    with contextlib.suppress(OSError):  # it has ended
        process.stdin.write(event)


def _end_reaper(process):
    """Close the reaper's input, so that it kills what is left of Ray, and wait for its end."""
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)


@contextlib.contextmanager
def environment(wanted: Mapping[str, str], also: Sequence[str] = ()) -> Iterator[None]:
    """Set variables that processes started in the block inherit; restore them after it, and those in `also`."""
    before = {name: os.environ.get(name) for name in (*wanted, *also)}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _restored_signals() -> Iterator[None]:
    """Restore the signal handlers, the signal mask and `sys.excepthook`, which Ray replaces."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _OURS} if main else {}
    hook, mask = sys.excepthook, signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_RAY)  # inherited by Ray's processes
    try:
        yield
    finally:
        sys.excepthook = hook
        for number, handler in handlers.items():
            if handler is not None:  # None: not set by Python
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
