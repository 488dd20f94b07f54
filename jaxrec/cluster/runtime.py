"""Ray for one run: started on this machine, or joined where it runs; what it changes in this process is given back.

Ray ends with the run. Where it was started here, that holds for a driver that is killed, too: `reaper` sees to it.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrec.bounds import whole_number
from jaxrec.cluster import reaper
from jaxrec.files import local_path

# Once for this process: Ray reads it once, and keeps it.
_TOKEN = secrets.token_hex(32)
_LONGEST_DIRECTORY = 40  # Ray puts its sockets below it, whose paths may have 107 bytes
_REACHABLE_S = 5.0
_LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",  # it would send what it counts to its makers
    "RAY_worker_niceness": "0",  # else a server waits for every other process of the machine
}
# Bytes of what travels inside of a message. More goes through shared memory, which a process between the two hands out:
# a read of 24,000 rows from two servers took a third longer.
_INLINE = 2 << 20
# A closed terminal and Ctrl-C are for the driver, which saves while its servers are still there.
_NOT_FOR_RAY = (signal.SIGINT, signal.SIGHUP)
_OURS = (signal.SIGINT, signal.SIGTERM)


def import_ray() -> Any:
    """Ray, which nothing but a cluster needs.

    Raises:
      ModuleNotFoundError: it is not installed; names the extra.
    """
    # Else a call after the end of a cluster would start another one, without a word.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError(
            "rows at servers need Ray, which is not installed: pip install 'jaxrec[cluster]', or in a checkout "
            "pip install -e '.[cluster]'.",
            name="ray",
        ) from None


class Cluster:
    """Ray in this process, for a `with` block.

    Args:
      address: of a cluster that runs, as 'auto' (of this machine) or '10.0.0.1:6379'; None starts one here, which ends
        with the block or with this process.
      object_store_bytes: of shared memory, through which messages travel; of a cluster that is started here.
      advice: how to go on, said if Ray itself dies under this process, which it then ends at once; of a cluster that is
        started here.
      log_directory: where the logs of Ray are kept at the end; of a cluster that is started here.

    Raises:
      ValueError: on entering: authentication is switched off (by `RAY_AUTH_MODE`) or there is no token for a cluster
        that runs; Ray is in use in this process already; the address is none.
      ConnectionError: on entering: no cluster answers there.
      ModuleNotFoundError: on entering: Ray is not installed.
    """

    def __init__(
        self, address: str | None = None, object_store_bytes: int = 256 << 20, advice: str = "",
        log_directory: str | Path | None = None,
    ):  # fmt: skip
        self.address = None if address is None else _checked_address(address)
        # Ray takes no less than 75 MiB.
        self._object_store_bytes = whole_number("object_store_bytes", object_store_bytes, 80 << 20)
        self._open, self._entered = contextlib.ExitStack(), False
        self._advice, self._logs = advice, "" if log_directory is None else str(local_path(log_directory).resolve())
        self._tell_reaper: Callable[[bytes], object] = lambda told: None
        self._directory, self._needed = "", dict[int, str]()

    def __enter__(self) -> "Cluster":
        check_authentication(os.environ)
        with contextlib.ExitStack() as opened:
            options, variables = self._joined() if self.address else self._local(opened)
            with _as_it_was(), _environment(variables):
                ray = import_ray()  # which looks at the variables
                if ray.is_initialized():
                    raise ValueError("Ray is in use in this process already: end it by ray.shutdown() first.")
                opened.callback(ray.shutdown)
                _start(ray, options)
                opened.enter_context(_without_words())
            _refuse_without_token(self.address)
            self._tell_reaper(reaper.BEGUN)
            opened.callback(self._tell_reaper, reaper.ENDING)
            self._watch_needed(opened)
            self._open, self._entered = opened.pop_all(), True
        return self

    def _watch_needed(self, opened):
        self._needed = reaper.needed(self._directory) if self._directory else {}
        for file in self._needed:
            opened.callback(os.close, file)
        opened.callback(self._needed.clear)

    @property
    def died(self) -> str:
        """Which process of Ray has died without which nothing goes on, and how to, in words; '' if none is known to."""
        ended, _, _ = select.select(list(self._needed), [], [], 0)
        return f"{self._needed[ended[0]]} has died. {self._advice}".strip() if ended else ""

    def before_end(self, close: Callable[[], object]) -> None:
        """Calls a function when the block is left, while Ray is still there."""
        self.check_entered()
        self._open.callback(close)

    def check_entered(self) -> None:
        """Refuses a cluster that is not entered.

        Raises:
          ValueError: it is not.
        """
        if not self._entered:
            raise ValueError("the cluster is not entered: with Cluster() as cluster: Supervisor(cluster, ...).")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._entered = False
        self._open.close()

    def _joined(self):
        if self.address != "auto":
            _check_reachable(self.address)
        return {"address": self.address}, {"RAY_AUTH_MODE": "token"}

    def _local(self, opened):
        """How Ray is started here, and what ends it if this process cannot: options, and variables."""
        above = tempfile.gettempdir()
        short = len(above) <= _LONGEST_DIRECTORY - len("/jaxrec-12345678")
        directory = tempfile.mkdtemp(prefix="jaxrec-", dir=above if short else "/tmp")
        self._directory = directory
        opened.callback(shutil.rmtree, directory, ignore_errors=True)
        started = _started_reaper(directory, self._advice, self._logs)
        self._tell_reaper = functools.partial(_tell, started)
        opened.callback(_end, started)
        options = {
            "address": "local", "num_cpus": 0, "include_dashboard": False, "_temp_dir": directory,
            "object_store_memory": self._object_store_bytes, "_system_config": {"max_direct_call_object_size": _INLINE},
        }  # fmt: skip
        # Not RAY_AUTH_MODE: Ray sets it where it starts, if it is not set, also in a process that has imported it.
        return options, _LOCAL | {reaper.MARK: directory, "RAY_AUTH_TOKEN": _TOKEN}


def _checked_address(address):
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if address != "auto" and not (host and port.isdecimal() and "/" not in host):
        raise ValueError(
            f"address={address!r:.80} must be 'auto' or host:port of a cluster that runs, such as '10.0.0.1:6379', or "
            "None to start Ray on this machine."
        )
    return address


def _check_reachable(address):
    """Ray would look for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACHABLE_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address} ({error}): look whether `ray start --head --port {port}` runs there, "
            "and whether a firewall lies between."
        ) from error


def check_authentication(environment: Mapping[str, str]) -> None:
    """Refuses to begin where authentication is switched off: whoever reaches a port of Ray can run any code.

    Args:
      environment: of this process.

    Raises:
      ValueError: it is switched off.
    """
    mode = environment.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        raise ValueError(
            f"RAY_AUTH_MODE={mode} switches the authentication of Ray off, and whoever reaches one of its ports can "
            "run code as you: unset it, or set it to token."
        )


def _start(ray, options):
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called")  # Ray's children run another program at once
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR, namespace="jaxrec")
    except ray.exceptions.AuthenticationError as error:
        raise ValueError(
            f"the cluster at {options['address']} wants a token that this process does not have "
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
            f"Ray has begun without token authentication{' at ' + address if address else ''}, and whoever reaches one "
            "of its ports could run code as you: set RAY_AUTH_MODE=token before Ray is imported, here and where the "
            "cluster is started, with one token in ~/.ray/auth_token of all machines."
        )


@contextlib.contextmanager
def _without_words() -> Iterator[None]:
    """Ray says nothing of deaths: it would print a page of each, and the supervisor warns of them in a line."""
    worker: Any = importlib.import_module("ray._private.worker")
    before, worker._worker_logs_enabled = getattr(worker, "_worker_logs_enabled", True), False
    try:
        yield
    finally:
        worker._worker_logs_enabled = before


def _started_reaper(*arguments):
    command = [sys.executable, "-I", "-S", reaper.__file__, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)


def _tell(started, what):
    with contextlib.suppress(OSError):  # it has ended
        started.stdin.write(what)


def _end(started):
    """Lets the reaper do its work, and waits for it."""
    started.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        started.wait(30)


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Variables that Ray's processes inherit, and no others that this process starts later."""
    before = {name: os.environ.get(name) for name in (*wanted, "RAY_AUTH_MODE")}
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
def _as_it_was() -> Iterator[None]:
    """Gives back what Ray puts its own in the place of: handlers of signals, and the last word on exceptions."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _OURS} if main else {}
    hook, mask = sys.excepthook, signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_RAY)  # which its processes inherit
    try:
        yield
    finally:
        sys.excepthook = hook
        for number, handler in handlers.items():
            if handler is not None:  # None is one that Python has not set
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
