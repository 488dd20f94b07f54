"""Runs of train.py as child processes, below the directory of a sweep, a comparison or the demonstration.

A signal to this process is forwarded, and no child outlives it.
"""

import contextlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from main.cli import Run, say
from main.signals import Asked

TRAIN = Path(__file__).parents[1] / "train.py"


def trained(
    run: Run, name: str, what: str, flags: Sequence[str], asked: Asked,
    env: Mapping[str, str] | None = None, shown: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the results of a run of train.py, training it now unless it is complete.

    Args:
      name: name of its directory there, and of its log file.
      shown: whether to show the output instead of logging it.

    Raises:
      Stopped: a signal arrived, and the run has saved its state.
      OSError: the run failed.
      ValueError: its results are damaged.
    """
    directory, results = run.directory / name, f"{name}/results.json"
    if run.read_json(results).get("last_state_saved"):
        say(f"{what}: {directory} is complete, and is not trained again")
        return run.read_json(results)
    words = [*flags, "--workdir", str(directory), "--resume"]
    say(f"{what}: train.py {shlex.join(words)}")
    with contextlib.nullcontext() if shown else open(f"{directory}.log", "a") as output:
        run_child([sys.executable, str(TRAIN), *words], what, asked, env, output)
    return run.read_json(results)


def last_error(log: Path, start: int) -> str:
    """Return the last error line of a log from a byte on, after a colon; nothing if there is none."""
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    return next((f": {line}" for line in reversed(lines) if line.startswith("error: ")), "")


def run_child(
    command: Sequence[str], what: str, asked: Asked, env: Mapping[str, str] | None = None, output: IO | None = None
) -> None:
    """Run a command, forwarding a signal that asks to stop; output goes to `output`, or to this process's own.

    Raises:
      Stopped: a signal arrived, and the command has ended.
      OSError: the command failed.
    """
    told, start = False, output.tell() if output is not None else 0
    # In a new session: a Ctrl-C of the terminal reaches this process alone, which forwards it once.
    with (
        asked.held(),
        subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True) as child,
    ):
        before = signal.signal(signal.SIGQUIT, lambda *_: child.kill())  # Ctrl-\, which the child does not get either
        try:
            while (code := child.poll()) is None:
                if asked.signal is not None and not told:
                    child.send_signal(asked.signal)
                    told = True
                time.sleep(0.05)
        finally:
            signal.signal(signal.SIGQUIT, before)
    asked.check()
    if code:
        where = "see above" if output is None else f"see {output.name}{last_error(Path(output.name), start)}"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}, {where}"
        raise OSError(f"{what} {how}; {asked.words}")
