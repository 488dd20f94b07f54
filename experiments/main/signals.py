"""How a run stops: Ctrl-C, a scheduler's SIGTERM and a closed terminal's SIGHUP are requests, not accidents."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import NoReturn, TextIO

from tqdm import tqdm

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTHING_NEW = "stopped before there was anything new to save"


class Stopped(KeyboardInterrupt):
    """Raised when a signal has ended the run."""

    def __init__(self, number: int, words: str = NOTHING_NEW):
        self.signal = signal.Signals(number)
        super().__init__(f"{self.signal.name}: {words}")


class Asked:
    """Whether a signal has asked the run to stop: true from the first one on.

    If there is nothing to save, the first signal raises `Stopped` at once. Inside `held` it is a request: the loop
    checks it between two steps, and saves. Further signals change nothing.
    """

    def __init__(self, words: str = NOTHING_NEW) -> None:
        self.signal: int | None = None
        self.words = words
        self._held = False

    def __bool__(self) -> bool:
        return self.signal is not None

    def check(self) -> None:
        """Raise `Stopped` if a signal has arrived."""
        if self.signal is not None:
            raise Stopped(self.signal, self.words)

    def each(self, items: Iterable) -> Iterator:
        """Iterate until a signal arrives, then raise `Stopped`."""
        for item in items:
            self.check()
            yield item

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Defer signals in this block until the loop checks for one."""
        self._held = True
        try:
            self.check()  # a signal whose exception was lost in a callback
            yield
        finally:
            self._held = False

    def on_signal(self, number: int, frame) -> None:
        """Handle a signal."""
        words = "the running step ends, then its state is saved; Ctrl-\\ kills at once" if self._held else "stopping"
        with contextlib.suppress(OSError):
            # Not print: the signal may have interrupted one.
            os.write(2, f"\n{signal.Signals(number).name}: {words}\n".encode())
        if self.signal is None:
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


def leave(stopped: Stopped, requeue: bool) -> NoReturn:
    """End the process with a message, and code 128 + the signal's number, or 75 if the job is to be requeued."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)  # nothing else is left to do
    say(str(stopped), sys.stderr)
    sys.exit(os.EX_TEMPFAIL if requeue else 128 + stopped.signal)


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line beside a progress bar; a closed terminal or pipe does not end the run."""
    file = file or sys.stdout
    try:
        tqdm.write(text, file=file)
        file.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # Otherwise Python would fail at exit, when it flushes its buffer.
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)
