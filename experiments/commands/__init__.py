"""The commands of an installed jaxrec: `jaxrec-train`, or `python -m jaxrec train`, does what `python train.py` does.

Installed as jaxrec_commands; a wheel has the scripts below it, an editable install those of the checkout. Nothing here
imports jaxrec, which takes seconds: a script first sees to the signals.
"""

import functools
import importlib.util
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("prepare", "train", "evaluate", "export", "sweep")


def run(name: str) -> None:
    """Run the script of a command; its flags are those of this process."""
    if importlib.util.find_spec("tyro") is None:
        sys.exit("error: the commands need tyro: pip install 'jaxrec[experiments,data,plots]'")
    scripts = HERE / "scripts" if (HERE / "scripts").is_dir() else HERE.parent
    sys.path.insert(0, str(scripts))
    runpy.run_path(str(scripts / f"{name}.py"), run_name="__main__")


prepare, train, evaluate, export, sweep = (functools.partial(run, name) for name in NAMES)


def main() -> None:
    """Run the command that the first word names."""
    command = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if command not in NAMES:
        sys.exit(f"error: {command!r} is no command: python -m jaxrec {'|'.join(NAMES)}, with --help or its flags.")
    run(command)
