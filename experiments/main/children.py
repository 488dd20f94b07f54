"""Runs of train.py as processes below the directory of another run: what a sweep, a comparison or the demonstration
trains. A signal that comes here is handed on, and no process is left behind."""

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
    """The results of a run of train.py, which is trained now unless it is complete.

    Args:
      run: whose directory it is in.
      name: of its directory there, and of the file that its words go to.
      what: it is, in words.
      flags: of train.py.
      asked: from `stop_on_signals`; its words say how a person goes on.
      env: environment; that of this process if None.
      shown: whether its words are shown instead.

    Raises:
      Stopped: a signal came, and the run has saved its state.
      OSError: it failed.
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


def run_child(
    command: Sequence[str], what: str, asked: Asked, env: Mapping[str, str] | None = None, output: IO | None = None
) -> None:
    """Runs a command, and hands on to it the signal that asks to stop; writes to `output`, or where this process does.

    Raises:
      Stopped: a signal came, and the command has ended.
      OSError: it failed.
    """
    told = False
    # A session of its own: a Ctrl-C of the terminal comes here alone, and is handed on once.
    with (
        asked.held(),
        subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True) as child,
    ):
        before = signal.signal(signal.SIGQUIT, lambda *_: child.kill())  # Ctrl-\, which is not of its session either
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
        where = "see above" if output is None else f"see {output.name}"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}, {where}"
        raise OSError(f"{what} {how}; {asked.words}")
