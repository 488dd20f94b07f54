"""Experiments run from the command line, and what they have written."""

import json
import subprocess
import sys
from pathlib import Path

EXPERIMENTS, SOAK = Path(__file__).parent.parent / "experiments", Path(__file__).parent / "soak"


def run(name, *flags, cwd=None):
    (script,) = (path for directory in (EXPERIMENTS, SOAK) if (path := directory / f"{name}.py").exists())
    command = [sys.executable, script, *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def results(workdir):
    return json.loads((workdir / "results.json").read_text())


def logged(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def smoke(workdir, name, *flags):
    """The results of an experiment with its preset `smoke`."""
    done = run(name, "--preset", "smoke", *flags, "--workdir", workdir)
    assert done.returncode == 0, done.stderr
    return results(workdir)
