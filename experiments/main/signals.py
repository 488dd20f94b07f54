"""How a run stops: Ctrl-C, a scheduler's SIGTERM and a closed terminal's SIGHUP are requests, not accidents."""

import contextlib
import os
import signal
import sys
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn, TextIO

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTHING_NEW = "stopped before there was anything new to save"
EXPERIMENTS = Path(__file__).resolve().parents[1]


class Stopped(KeyboardInterrupt):
    """Raised when a signal has ended the run."""

    def __init__(self, number: int, words: str = NOTHING_NEW):
        self.signal = signal.Signals(number)
        super().__init__(f"{self.signal.name}: {words}")


class Asked:
    """Whether a signal has asked the run to stop: true from the first one on.

    If there is nothing to save, the first signal raises `Stopped` at once. Inside `held` it is a request: the loop
    checks it between two steps, and saves. Further signals change nothing, unless that exception is gone though nobody
    has left: Python drops what is raised in a destructor or a callback.
    """

    def __init__(self, words: str = NOTHING_NEW) -> None:
        self.signal: int | None = None
        self.words = words
        self._held = False
        self._raised: weakref.ref[Stopped] | None = None  # what was raised where nothing is held; dead if it is gone

    def __bool__(self) -> bool:
        return self.signal is not None

    def check(self) -> None:
        """Raise `Stopped` if a signal has arrived."""
        if self.signal is None:
            return
        stopped = Stopped(self.signal, self.words)
        if not self._held:
            self._raised = weakref.ref(stopped)
        try:
            raise stopped
        finally:
            del stopped  # in a cycle with its own frame it would outlive those who handle it

    def each(self, items: Iterable) -> Iterator:
        """Iterate until a signal arrives, then raise `Stopped`."""
        for item in items:
            self.check()
            yield item

    @contextlib.contextmanager
    def saying(self, words: str) -> Iterator[None]:
        """Use other words in this block, such as how to resume the run whose directory it has."""
        before, self.words = self.words, words
        try:
            yield
        finally:
            self.words = before

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Defer signals in this block until the loop checks for one."""
        self.check()  # a signal whose exception was lost in a callback
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def on_signal(self, number: int, frame) -> None:
        """Handle a signal."""
        words = "the running step ends, then its state is saved; Ctrl-\\ kills at once" if self._held else "stopping"
        with contextlib.suppress(OSError):
            # Not print: the signal may have interrupted one.
            os.write(2, f"\n{signal.Signals(number).name}: {words}\n".encode())
        lost = self._raised is not None and self._raised() is None
        if self.signal is None or lost:
            self.signal = number
            if not self._held:
                self.check()


@contextlib.contextmanager
def stop_on_signals(words: str = NOTHING_NEW) -> Iterator[Asked]:
    """Handle SIGINT, SIGTERM and SIGHUP as requests to stop; restore the handlers on leaving.

    A signal that this process inherited as ignored (nohup's SIGHUP, a background job's SIGINT) stays ignored.

    Args:
      words: words of `Stopped`: what was done, or how to resume.

    Raises:
      ValueError: not called from the main thread, the only one in which Python handles signals.
      Stopped: a signal arrived where nothing was `held`.
    """
    asked, before = Asked(words), {}
    try:  # from the first handler on: a signal may arrive before the second one is set
        for number in STOPPING:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, asked.on_signal)
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_at_once() -> None:
    """Have signals end this process, an experiment that has begun nothing, until `stop_on_signals` handles them.

    Not by an exception: extension modules crash if one is raised while they are loaded. Called by the first import of
    this package, before those that take seconds; without effect in programs other than the experiments, and on signals
    that are ignored or handled.
    """
    script = sys.modules["__main__"]  # a process that `multiprocessing` has started calls it __mp_main__
    file = getattr(script, "__file__", None)
    if script.__name__ != "__main__" or not file or Path(file).resolve().parent != EXPERIMENTS:
        return
    for number in STOPPING:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def _end(number, frame):
    with contextlib.suppress(OSError):
        os.write(2, f"{Stopped(number)}\n".encode())
    os._exit(_code_of(number))


def _code_of(number):
    # From the command line, as a signal may arrive before the flags are parsed.
    return os.EX_TEMPFAIL if "--requeue" in sys.argv else 128 + number


def leave(stopped: Stopped) -> NoReturn:
    """End the process with a message, and code 128 + the signal's number, or 75 if --requeue is given."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)  # nothing else is left to do
    say(str(stopped), sys.stderr)
    sys.exit(_code_of(stopped.signal))


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line beside a progress bar; a closed terminal or pipe does not end the run."""
    from tqdm import tqdm  # here, as this module is imported first, before `main.cli` tells what is missing

    file = file or sys.stdout
    try:
        tqdm.write(text, file=file)
        file.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # Otherwise Python would fail at exit, when it flushes its buffer.
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)
