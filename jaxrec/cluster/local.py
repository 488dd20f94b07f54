"""Objects in processes of their own on this machine, without Ray: for trainers that share tables in host memory.

    if __name__ == "__main__":  # processes import the main module again
        with Machine() as machine:
            tables = HostTables.create(task.spec, task.row_optimizer, machine.directory / "tables")
            with TrainerPool(machine, tables, work, trainers=16, cores=[[core] for core in range(16)]) as pool:
                params, stats = pool.run()

A process serves calls at a socket in a directory of shared memory that only this user can enter. When the process that
has started it ends, however it ends, it ends too, and the directory is removed.
"""

import contextlib
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Sequence
from multiprocessing import reduction, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self

from jaxrec.cluster.processes import VARIABLES, Process, ProcessInfo
from jaxrec.cluster.runtime import environment
from jaxrec.embedding.servers import ServerGone
from jaxrec.loop import keep_memory

_SHARED_MEMORY = Path("/dev/shm")
_KILL_S = 10.0  # for the kernel to end a killed process
# Removes a directory once its standard input has a byte or ends; tries again, as processes may still write there.
_REMOVER = """
import os, shutil, sys, time
os.read(0, 1)
for attempt in range(100):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.05)
"""


class Machine:
    """Processes on this machine, for a `with` block.

    Attributes:
      directory: where sockets, and tables that processes share, are: a new one in shared memory, removed at the end.
    """

    def __init__(self) -> None:
        self._entered = False

    def __enter__(self) -> Self:
        shared = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        self.directory = Path(tempfile.mkdtemp(prefix="jaxrec-", dir=shared))
        command = [sys.executable, "-I", "-S", "-c", _REMOVER, str(self.directory)]
        try:  # in a session of its own, so that a Ctrl-C is for this process alone
            self._remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        except BaseException:
            shutil.rmtree(self.directory)
            raise
        self._entered = True
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._entered = False
        self._remover.communicate(b".")  # not only closed: children that were forked have the pipe too
        shutil.rmtree(self.directory, ignore_errors=True)  # if somebody has killed it

    def check_entered(self) -> None:
        """Raise a ValueError if the machine is not entered."""
        if not self._entered:
            raise ValueError("the machine is not entered: with Machine() as machine: TrainerPool(machine, ...).")

    def process(self, kind: type, name: str, args: Sequence = (), threads: int = 0) -> "LocalProcess":
        """Start a process with one object; arguments as for `RayProcess`. Each call has a thread of its own."""
        return LocalProcess(self.directory, kind, name, args)


class LocalAnswer:
    """`Answer` to a call, received at a connection of its own."""

    def __init__(self, connection: Connection | None, name: str):
        self._connection, self._name = connection, name
        self._found: tuple[bool, Any] | None = None

    def result(self, timeout: float | None = None) -> Any:
        """Return the answer, see `Answer.result`."""
        if self._found is None:
            self._found = self._received(timeout)
        succeeded, found = self._found
        if not succeeded:
            raise found
        return found

    def _received(self, timeout):
        if self._connection is None:
            return False, ServerGone(f"{self._name} has ended")
        try:
            if not self._connection.poll(timeout):
                raise TimeoutError("no answer yet")
            with _receive(self._connection) as file:
                return pickle.load(file)
        except (EOFError, ConnectionError):
            return False, ServerGone(f"{self._name} has ended")


class LocalHandle(NamedTuple):
    """Handle to an object in another process; can be pickled."""

    address: str
    name: str

    def call(self, method: str, *args: Any) -> LocalAnswer:
        """Call a method of the object; return a future of its result."""
        try:
            with socket.socket(socket.AF_UNIX) as client:  # closed unless the connection takes it over
                client.connect(self.address)
                connection = Connection(client.detach())
        except OSError:
            return LocalAnswer(None, self.name)
        with contextlib.suppress(ConnectionError):  # as the answer will say
            _send(connection, (method, args), os.path.dirname(self.address))
        return LocalAnswer(connection, self.name)


class LocalProcess(Process):
    """A new process of this machine with one object, whose methods are called through `handle`."""

    def __init__(self, directory: Path, kind: type, name: str, args: Sequence):
        self._address = address = str(directory / uuid.uuid4().hex[:12])
        # Bound here: calls before it has started wait at the socket.
        with socket.socket(socket.AF_UNIX) as listening, environment(VARIABLES):
            listening.bind(address)
            listening.listen(socket.SOMAXCONN)
            self._process = multiprocessing.get_context("spawn").Process(
                target=_serve, args=(listening, kind, tuple(args)), name=name, daemon=True
            )
            self._process.start()
        # Before `multiprocessing` asks it to end, by SIGTERM, and waits.
        self._at_exit = util.Finalize(None, self.kill, exitpriority=10)
        super().__init__(name, LocalHandle(address, name))

    @property
    def pid(self) -> int | None:
        """Process id."""
        return self._process.pid

    def _ended(self) -> str:
        code = self._process.exitcode
        return "" if code is None else f"{self.name} has ended with code {code}"

    def kill(self) -> None:
        """Kill the process, also one that is stopped (SIGSTOP)."""
        self._at_exit.cancel()
        self._process.kill()
        self._process.join(_KILL_S)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._address)


def _serve(listening: socket.socket, kind: type, args: tuple) -> None:
    """Serve the calls of an object in this process until the driver has ended."""
    # Of a terminal or a scheduler, for all processes of a run: the driver handles them, and saves while trainers run.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs started here would inherit
    keep_memory()
    threading.Thread(target=_end_with_driver, daemon=True).start()
    served, directory = kind(*args), os.path.dirname(listening.getsockname())
    while True:
        client, _ = listening.accept()
        call = Connection(client.detach()), served, directory
        threading.Thread(target=_answer, args=call, daemon=True).start()


def _end_with_driver():
    driver = multiprocessing.parent_process()
    if driver is not None:
        driver.join()
        os._exit(1)


def _send(connection, message, directory):
    """Send a message as a file without a name, so that neither side ever waits for the other to write or read it."""
    with tempfile.TemporaryFile(dir=directory) as file:
        pickle.dump(message, file)
        file.seek(0)
        reduction.send_handle(connection, file.fileno(), None)


def _receive(connection):
    return open(reduction.recv_handle(connection), "rb")


def _answer(connection, served, directory):
    with connection, contextlib.suppress(EOFError, ConnectionError), _receive(connection) as file:
        method = "a call"
        try:
            method, args = pickle.load(file)
            found = True, _process_info() if method == "process_info" else getattr(served, method)(*args)
        except Exception as error:
            found = False, error
        try:
            _send(connection, found, directory)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            _send(connection, (False, RuntimeError(f"the answer of {method} cannot be sent: {error}")), directory)


def _process_info():
    return ProcessInfo("this machine", os.getpid(), importlib.import_module("jaxrec").__version__)
