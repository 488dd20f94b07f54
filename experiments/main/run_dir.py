"""The directory of a run: it belongs to one run, has one writer, and every file in it is whole or absent.

Files are JSON, and record the machine of the run.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Self

from jaxrec.files import Lock, local_path, make_directory, new_run_id, sync, write_text
from main.report import listing
from main.signals import EXPERIMENTS, say

BEST = "best"  # directory of the image of a run's best state, and the key of its figures in that image
# Flags, on resume; --metric and --vary are of sweep.py, --rates of oac_link_prediction.py.
_MAY_CHANGE = {
    "workdir", "resume", "requeue", "save_every_steps", "keep_period", "seeds", "times", "metric", "vary",
    "tensorboard", "rates",
}  # fmt: skip
_OF_ANY = "config.json", "environment.json", "graph.json"  # files that a run has before it has anything to keep
_VERSIONS = (
    "jaxrec", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "numba", "torch", "fbgemm-gpu-cpu",
)  # fmt: skip


class Run:
    """A run's directory: config.json, environment.json, metrics.jsonl, results.json and plots.

    The directory belongs to one run from the start: config.json holds the run's id, and DIR/lock is held while the
    process lives (or until `close`, or the end of a `with` block).

    Args:
      workdir: where to write; a new directory under `runs/` if None.
      resume: whether to resume the run in the directory; if it holds none, the run begins there.
      may_grow: flags that a resumed run may have larger than before (a number, a list with more at its end, or None for
        no limit); it is then not complete.

    Attributes:
      id: id of the run, for the manifests of its images.
      resumed: whether the directory held this run before.
      grows: whether it has grown since, and has not `grown` yet.

    Raises:
      ValueError: the directory holds a run and `resume` is off; a flag changed that may not; another process holds the
        lock; the path is a file, a URL, full or read-only; the run's files are damaged.
    """

    def __init__(
        self, name: str, config, workdir: Path | None = None, resume: bool = False, may_grow: Collection[str] = ()
    ):  # fmt: skip
        if resume and workdir is None:
            raise ValueError("--resume needs --workdir: the directory of the run to go on with.")
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        self.directory = local_path(workdir or Path("runs") / f"{name}-{stamp}-{os.getpid()}")
        self._unwritten: list[str] = []  # rows that a full disk refused
        # The lock comes first: two processes that begin here at once must not both find the directory empty.
        with contextlib.ExitStack() as locked:
            try:
                make_directory(self.directory)
                locked.enter_context(Lock(self.directory / "lock", "at work on this run"))
                self._begin({**flat(config), "experiment": name}, resume, defaults(config), may_grow)
            except OSError as error:
                raise ValueError(f"{self.directory} cannot hold a run: {error}. Give another --workdir.") from error
            self._locked = locked.pop_all()

    def _begin(self, flags, resume, unset, may_grow):
        """Write the run's id to config.json before anything else."""
        before = self.read_json("config.json")
        names = "metrics.jsonl", "results.json", "checkpoints", BEST
        files = [name for name in names if (self.directory / name).exists()]
        if before and not resume:
            raise ValueError(
                f"{self.directory} holds a run already: give another --workdir, or --resume to go on with it."
            )
        if files and not before:
            raise ValueError(
                f"{self.directory} holds {', '.join(files)} of a run whose config.json is gone: give another "
                "--workdir, or bring config.json back to go on with that run."
            )
        self.resumed, self.id = bool(before), before.get("run") or new_run_id()
        # Check everything before writing anything: a refused run leaves no trace.
        commits, self.grows, self._flags = [], False, flags | {"run": self.id}
        if self.resumed:
            self.grows = bool(self._growing({**unset, **before}, flags, may_grow))
            self._cut_torn_line()
            self.metrics()  # refuses damaged rows now, not after hours
            past = self.read_json("environment.json")
            commits = [*past.get("earlier_commits", []), past.get("commit")]
        elif resume:
            say(f"{self.directory} holds no run yet: this one begins there")
        if not self.grows:
            self.write_json("config.json", self._flags)
        self.write_json("environment.json", read_environment() | ({"earlier_commits": commits} if commits else {}))

    def grown(self) -> None:
        """Keep the flags of a run that grows, once its state has been restored into what is larger now."""
        if self.grows:  # results first: with these flags, they would seem to be of the whole run
            (self.directory / "results.json").unlink(missing_ok=True)
            self.write_json("config.json", self._flags)
            self.grows = False

    def _growing(self, before, flags, may_grow) -> list[str]:
        """Return the flags that have grown as they may; raise ValueError if another one differs."""
        # Compared as JSON, where tuples are lists and paths are strings. A flag added since then was at its default.
        before, now = json.loads(to_json(before)), json.loads(to_json(flags))
        changed = [key for key in before.keys() & now.keys() - _MAY_CHANGE if before[key] != now[key]]
        # Where tables are left to the run, they are one of these.
        on_devices = all(flags.get("tables") in (None, "device", "pinned") for flags in (before, now))
        grown = [key for key in changed if key in may_grow and _is_larger(now[key], before[key])]
        other = [key for key in changed if not (key == "tables" and on_devices) and key not in grown]
        if other:
            was = ", ".join(f"{key} {before[key]}, not {now[key]}" for key in sorted(other))
            raise ValueError(f"{self.directory} was begun with {was}: resume it with its own flags, or take another.")
        return grown

    def read_json(self, name: str) -> dict:
        """Return the contents of one file of the run; {} if it does not exist."""
        path = self.directory / name
        try:
            return _row(path.read_bytes()) if path.exists() else {}
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): mend it, or give another --workdir.") from None

    def write_json(self, name: str, content) -> None:
        """Write one file of the run atomically."""
        write_text(self.directory / name, to_json(content, indent=2) + "\n")

    def log(self, row: dict) -> None:
        """Append one row to metrics.jsonl; on a full disk it is kept, and written with the next one."""
        self._unwritten.append(to_json(row))
        try:
            self._append()
        except OSError as error:
            say(f"{error}: {len(self._unwritten)} rows of metrics are kept in memory until the next one", sys.stderr)

    def logged(self, key: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the row that is logged under a key already; else log what `make` returns, with the key."""
        for row in self.metrics():
            if key.items() <= row.items():
                return row
        self.log(found := {**key, **make()})
        return found

    def _append(self):
        """Write the pending rows, all or none of them."""
        path = self.directory / "metrics.jsonl"
        # A partial row would be in the middle of the file once the next one is appended.
        size = path.stat().st_size if path.exists() else 0
        try:
            with open(path, "ab") as file:
                file.write("".join(row + "\n" for row in self._unwritten).encode())
            sync(path)
            # A new file survives a power cut only if its directory is flushed too.
            if size == 0:
                sync(self.directory)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            raise
        self._unwritten.clear()

    def metrics(self) -> list[dict]:
        """Return the rows logged so far."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        rows = []
        for number, line in enumerate([*lines, *(row.encode() for row in self._unwritten)], 1):
            try:
                rows.append(_row(line))
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number} is damaged ({error}): mend it, or take the line out and keep a copy."
                ) from None
        return rows

    def _cut_torn_line(self):
        """Cut a last line without newline, left by a process or machine that died while writing it."""
        path = self.directory / "metrics.jsonl"
        content = path.read_bytes() if path.exists() else b""
        torn = content.rpartition(b"\n")[2]
        if torn:
            warnings.warn(f"{path}: a torn last line of {len(torn)} bytes is cut off: {torn!r:.80}", stacklevel=4)
            os.truncate(path, len(content) - len(torn))

    def rewrite_metrics(self, rows: list[dict]) -> None:
        """Replace metrics.jsonl by these rows, when a run resumes from an earlier step."""
        write_text(self.directory / "metrics.jsonl", "".join(to_json(row) + "\n" for row in rows))

    def close(self, results: dict, table: str = "") -> None:
        """Show and write the results, and release the directory.

        Args:
          table: from `report.grid` or `report.listing`; a listing of all results if empty.
        """
        say(table or listing(results))  # first: shown even if the disk is full
        if self._unwritten:
            self._append()
        # Last: results.json marks the run as finished, with all rows of metrics.
        self.write_json("results.json", results)
        say(f"run written to {self.directory}")
        self.release()

    def release(self) -> None:
        """Release the directory, for another process or a later run of this one."""
        self._locked.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        # A run that is refused before it has anything to keep leaves its directory to one with better flags.
        if isinstance(error, ValueError) and not self.resumed:
            if {path.name for path in self.directory.iterdir()} <= {*_OF_ANY, "lock"}:
                for name in _OF_ANY:
                    (self.directory / name).unlink(missing_ok=True)
        self.release()


def _is_larger(now, before) -> bool:
    """Whether a flag has grown: a number, None for no limit, or a list with more at its end."""
    if isinstance(before, list):
        return len(now) > len(before) and now[: len(before)] == before
    return before is not None and (now is None or now > before)


def flat(config) -> dict:
    """Return {flag: value} of a configuration, whose parts have distinct flags."""
    found: dict = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        found |= flat(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return found


def defaults(config) -> dict:
    """Return {flag: default} of a configuration, of those that have one."""
    found: dict = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= defaults(value)
        elif field.default is not dataclasses.MISSING:
            found[field.name] = field.default
    return found


def go_on_with(run: Run) -> str:
    """Return how to resume a stopped run, in words."""
    return f"go on with the same flags and --workdir {run.directory} --resume"


def to_json(content, indent: int | None = None) -> str:
    """Return what a run writes as JSON text; NaN and infinity become null, with a warning.

    >>> import numpy as np
    >>> to_json({"auc": 0.5, "path": Path("a"), "loss": np.float32(2)})
    '{"auc": 0.5, "path": "a", "loss": 2.0}'
    """
    lost: list[str] = []
    text = json.dumps(_plain(content, "", lost), indent=indent, allow_nan=False)
    if lost:
        warnings.warn(f"not a finite number, so null in JSON: {', '.join(lost)}", stacklevel=3)
    return text


def read_environment() -> dict:
    """Describe machine and versions; `driver` is None without an NVIDIA driver, `commit` without git or a checkout."""
    import jax  # here, so that a process can choose its platform after importing this module

    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in _VERSIONS},
        # A wheel may lie in an environment within another repository.
        "commit": _said("git", "describe", "--always", "--dirty") if (EXPERIMENTS.parent / ".git").exists() else None,
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "driver": _said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "cores": cores(),
        "cpu": _cpu(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "date": datetime.date.today().isoformat(),
    }


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu():
    """Return the processor's name, family and model, as virtual machines often hide which one it is."""
    with contextlib.suppress(OSError, KeyError):
        said = dict(re.findall(r"(.+?)\s*: (.*)", Path("/proc/cpuinfo").read_text().split("\n\n")[0]))
        return ", ".join(
            [said["model name"], *(f"{key} {said[key]}" for key in ("cpu family", "model") if key in said)]
        )
    return platform.processor() or platform.machine()


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _said(*command):
    """Return the output of a command; None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _row(line: bytes) -> dict:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    return row


def _plain(value, name, lost):
    """Convert to JSON values; the names of numbers that are not finite are added to `lost`."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {key: _plain(one, f"{name}.{key}" if name else str(key), lost) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, f"{name}[{place}]", lost) for place, one in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(name)
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
