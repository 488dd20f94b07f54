"""Measure what needs an accelerator, in parts (accelerator/*.py): each in its own process, within its own limit.

    python experiments/on_accelerator.py --out DIR            all parts in order: 45 minutes at most
    python experiments/on_accelerator.py step_time --out DIR  one part
    python experiments/on_accelerator.py --out DIR --smoke    tiny, on any machine; figures mean nothing

On a machine lent for ten minutes a command, run these seven, each within its ten minutes:

    python experiments/on_accelerator.py pinned --out $OUT                 5 minutes
    python experiments/on_accelerator.py oac_streams --out $OUT            5 minutes
    python experiments/on_accelerator.py graph --out $OUT                  5 minutes
    python experiments/on_accelerator.py step_time --out $OUT              8 minutes
    python experiments/on_accelerator.py oac oac_wide --out $OUT           8.5 minutes
    python experiments/on_accelerator.py shadow saves --out $OUT           5.5 minutes
    python experiments/on_accelerator.py cores --out $OUT                  5 minutes

A part writes DIR/PART.json when it ends, and is skipped next time unless --again is given; one that fails or is killed
at its limit writes DIR/PART.failed.txt. The exit code is 1 if a requested part has no result. Wants torch for the
comparison with it. Result: results/one_h200/*.json.
"""

import argparse
import collections
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
for _place in (ROOT, ROOT / "experiments"):  # jaxrec need not be installed
    if str(_place) not in sys.path:
        sys.path.insert(0, str(_place))

from accelerator.measure import ROW, Task, table  # noqa: E402

from jaxrec.files import local_path, make_directory, write_json, write_text  # noqa: E402


class PartOfKit(NamedTuple):
    """Module and function of a part, its share of the 45 minutes, and whether it needs an accelerator."""

    module: str
    function: str
    minutes: float
    on_device: bool = True


PARTS = {
    "pinned": PartOfKit("accelerator.pinned", "run", 5),
    "oac_streams": PartOfKit("accelerator.oac_streams", "run", 5),
    "graph": PartOfKit("accelerator.graph", "run", 5),
    "cores": PartOfKit("accelerator.cores", "run", 5, on_device=False),
    "step_time": PartOfKit("accelerator.step_time", "run", 8),
    "oac": PartOfKit("accelerator.link", "run", 5),
    "oac_wide": PartOfKit("accelerator.link", "run_wide", 3.5),
    "shadow": PartOfKit("accelerator.shadow_rate", "run", 2.5),
    "saves": PartOfKit("accelerator.image_saves", "run", 3),
}
LAST_LINES = 60


def measure(name: str, out: Path, seconds: float, smoke: bool) -> None:
    """Run a part in this process and write its file."""
    from main.run_dir import read_environment

    part, task = PARTS[name], Task(seconds, smoke)
    about = read_environment()
    if part.on_device and not smoke and about["platform"] == "cpu":
        raise ValueError(
            f"part {name} wants an accelerator, and jax sees {about['device']!r} only: install jax for the card, or "
            "give --smoke to see that all works."
        )
    importlib.import_module(part.module).__dict__[part.function](task)
    if not task.rows:
        raise ValueError(f"part {name} has measured nothing: {'; '.join(task.left_out)}")
    kind = "smoke, not a measurement" if smoke else "measured"
    taken = time.monotonic() - task.start
    found = dict(part=name, kind=kind, about=about, seconds=taken, left_out=task.left_out, rows=task.rows)
    write_json(out / f"{name}.json", found)
    print(table(task.rows))


def run_part(name: str, command: list[str], out: Path, seconds: float) -> bool:
    """Run a part's process, kill it and all its children at its limit, and record a failure.

    The process holds a pipe from this one, and ends itself and all its children when the pipe closes: no part keeps
    running, and holding the card, after this process is killed.

    Returns:
      Whether the part has written its file.
    """
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    if name in PARTS and not PARTS[name].on_device:
        environment["JAX_PLATFORMS"] = "cpu"
    result = out / f"{name}.json"
    before = _age(result)
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=environment, process_group=0,
    )  # fmt: skip
    lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
    rows: list[str] = []
    reader = threading.Thread(target=_read, args=(child.stdout, lines, rows), daemon=True)
    reader.start()
    why = None
    try:
        code = child.wait(seconds)
        if code or _age(result) == before:
            why = f"its process ended with code {code}" + " and without a result" * (not code)
    except subprocess.TimeoutExpired:
        why = f"it was killed at its limit of {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # its children too; on Ctrl-C, the part as well
        child.wait()
        reader.join(10)
    failed = out / f"{name}.failed.txt"
    if why is None:
        failed.unlink(missing_ok=True)
        return True
    parts = [f"part {name} failed: {why}.", "", f"{len(rows)} rows were measured before:", *rows]
    try:
        write_text(failed, "\n".join([*parts, "", "Its last lines:", *lines]) + "\n")
        print(f"part {name} failed: {why}; see {failed}")
    except OSError as error:  # a full disk must not stop the next part
        print("\n".join([*parts, f"{failed} could not be written: {error}"]))
    return False


def _age(path):
    """Return the modification time of a file, in ns; None if there is none."""
    return path.stat().st_mtime_ns if path.exists() else None


def _read(stream, lines, rows):
    """Print the output of a process, keeping its rows and its last lines."""
    for line in stream:
        line = line.rstrip("\n")
        if line.startswith(ROW):
            rows.append(line.removeprefix(ROW))
        else:
            lines.append(line)
            print(line, flush=True)


def summary(names, out: Path) -> str:
    """Return one line per part: its result, if any."""
    lines = []
    for name in names:
        path = out / f"{name}.json"
        if path.exists():
            try:
                found = json.loads(path.read_text())
            except ValueError:
                lines.append(f"{name:<10}  {path} is damaged: --again measures it anew")
                continue
            said = f"{len(found['rows'])} rows in {found['seconds']:.0f} s, {len(found['left_out'])} left out"
            lines.append(f"{name:<10}  {found['kind']}: {said}; {found['about']['device']}")
        else:
            lines.append(f"{name:<10}  no result")
    return "\n".join(lines)


def flags(given=None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--out", required=True, help="where results go")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one round, on any machine")
    parser.add_argument("--again", action="store_true", help="also parts that have a result")
    parser.add_argument("--minutes-per-part", type=float, default=8, help="the most; a part's own share may be less")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    found = parser.parse_args(given)
    for name in found.parts:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}: take some of {', '.join(PARTS)}.")
    if not found.minutes_per_part > 0:
        parser.error(f"--minutes-per-part {found.minutes_per_part} must be above 0.")
    try:
        found.out = local_path(found.out)
        make_directory(found.out)
    except (ValueError, OSError) as error:
        parser.error(f"--out {found.out}: {error}")
    if not found.out.is_dir() or not os.access(found.out, os.W_OK):
        parser.error(f"--out {found.out} is no directory that can be written to: give another.")
    return found


def main(given: argparse.Namespace) -> int:
    """Run the parts without a result, in order; return the exit code."""
    names = [name for name in PARTS if name in given.parts] or list(PARTS)
    fine = True
    for name in names:
        if (given.out / f"{name}.json").exists() and not given.again:
            print(f"part {name} has a result already: --again measures it anew.")
            continue
        # A smoke test must pass on a slow machine too.
        minutes = given.minutes_per_part if given.smoke else min(PARTS[name].minutes, given.minutes_per_part)
        print(f"== part {name}, at most {minutes:g} minutes", flush=True)
        command = [sys.executable, __file__, name, "--child", "--out", str(given.out)]
        command += ["--minutes-per-part", str(minutes), *["--smoke"] * given.smoke]
        fine &= run_part(name, command, given.out, 60 * minutes)
    print(summary(names, given.out))
    return 0 if fine else 1


def _end_with_the_runner():
    sys.stdin.read()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def child(given: argparse.Namespace) -> None:
    """Run one part: the main function of its process."""
    seconds = 60 * given.minutes_per_part
    threading.Thread(target=_end_with_the_runner, daemon=True).start()
    # Shows where a part hangs, just before it is killed.
    faulthandler.dump_traceback_later(0.98 * seconds)
    measure(given.parts[0], given.out, seconds, given.smoke)


if __name__ == "__main__":
    given = flags()
    if given.child:
        child(given)
    else:
        sys.exit(main(given))
