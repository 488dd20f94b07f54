"""Other experiments as processes: run to their end, with the signals that come here, and none is left behind."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from main.signals import STOPPING, Stopped


def run_child(
    command: Sequence[str], what: str, again: str, env: Mapping[str, str] | None = None, output: IO | None = None
) -> None:
    """Runs a command, and hands on to it every signal that asks to stop.

    Args:
      command: its words.
      what: what it does, as an error calls it.
      again: the command by which a person goes on.
      env: its environment; that of this process if None.
      output: where it writes; where this process does if None.

    Raises:
      Stopped: a signal came, and the command has ended.
      OSError: it failed.
    """
    with handing_on() as give:
        # A session of its own: a Ctrl-C of the terminal comes here alone, and is handed on once.
        child = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
        came = give(child)
        code = child.wait()
    if came:
        raise Stopped(came[0], f"go on with {again}")
    if code:
        where = "see above" if output is None else f"see {output.name}"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}, {where}"
        raise OSError(f"{what} {how}; go on with {again}")


@contextlib.contextmanager
def handing_on() -> Iterator:
    """In this block signals go to a child process, once it is given to what this yields; so do those before.

    Yields:
      child -> the signals so far, which grow.
    """
    children: list[subprocess.Popen] = []
    came: list[int] = []

    def hand_on(number, frame):
        came.append(number)
        for child in children:
            child.send_signal(number)

    def give(child):
        children.append(child)
        for number in [*came]:
            child.send_signal(number)
        return came

    before: dict[int, Any] = {}
    try:
        for number in STOPPING:  # one that the parent has told this process to ignore stays ignored, in the child too
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, hand_on)
        yield give
    finally:
        for taken, handler in before.items():
            signal.signal(taken, handler)
