"""Prepares Criteo click logs for training; a killed run goes on where it was.

python experiments/prepare.py --sources train.txt --directory criteo.prepared python
experiments/prepare.py --sources day_0.gz day_1.gz --directory day01.prepared --hash-cap 1000000

Exit codes: 0 done, 1 refused or failed (one line says what and what to do), 2 wrong flags, 130
Ctrl-C, 143 SIGTERM.
"""

import dataclasses
import errno
import os
import signal
import sys
from pathlib import Path
from typing import Literal

_GO_ON = "the same command goes on where it was"
_REMEDIES = {
    errno.ENOSPC: f"free some space; {_GO_ON}",
    errno.EDQUOT: f"free some space; {_GO_ON}",
    errno.EACCES: "give yourself the rights, or name files and directories that you may read and write",
    errno.EPERM: "give yourself the rights, or name files and directories that you may read and write",
    errno.EROFS: "give a directory that may be written",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Flags; see `jaxrec.data.criteo.prepare`."""

    sources: tuple[Path, ...]
    """Raw files in time order, plain or .gz."""
    directory: Path
    min_count: int | None = None
    """Vocabulary: rarer categories share one row (6 unless hashing)."""
    hash_cap: int | None = None
    """Hash each field into so many rows instead."""
    split: Literal["time", "random"] = "time"
    train_fraction: float = 5 / 6
    seed: int = 0
    max_bad_rows: int = 0


def main() -> int:
    """Prepares; every way in which it can end has one line and an exit code of its own."""
    _on_signals(_leave)
    try:
        for key, value in _prepared().items():
            print(f"{key}: {value}")
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        return _end(_stopped(number), 128 + number)
    except (ValueError, ImportError) as error:
        return _end(f"error: {error}", 1)
    except MemoryError:
        return _end(f"error: out of memory: hash with --hash-cap, or use a machine with more; {_GO_ON}.", 1)
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, f"if that can be mended, {_GO_ON}")
        named = f"{error.filename}: " if error.filename else ""
        return _end(f"error: {named}{error.strerror or error}. Remedy: {remedy}.", 1)
    return 0


def _prepared() -> dict:
    """What to print."""
    # The imports take seconds and stand here, behind the handler of signals.
    import tyro
    from tqdm import tqdm

    from jaxrec.data.criteo import prepare
    from jaxrec.data.criteo.dataset import tfds_module

    tfds_module()
    _on_signals(_stop)
    flags = dataclasses.asdict(tyro.cli(Config, description=__doc__))
    with tqdm(unit="lines", unit_scale=True, disable=None) as bar:
        metadata = prepare(flags.pop("sources"), flags.pop("directory"), **flags, progress=bar.update)
    return {key: metadata[key] for key in ("rows", "label_mean", "cardinalities", "skipped_rows")}


def _on_signals(handler) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _leave(number, _frame):
    """Ends at once: nothing is begun yet, and imports turn exceptions into others."""
    os.write(2, f"{_stopped(number)}\n".encode())
    os._exit(128 + number)


def _stopped(number) -> str:
    return f"stopped by {signal.Signals(number).name}: {_GO_ON}."


def _stop(number, _frame):
    """Ends by an exception, on whose way files that are half written go away."""
    # A second one ends it at once, which costs no more than a kill.
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt(number)


def _end(line: str, code: int) -> int:
    print(line, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
