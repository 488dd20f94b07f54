"""A test that hangs ends within its limit and is reported, wherever it hangs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Code that hangs, and whether the signal ends it. Locking a mutex twice in C never returns, with or without the GIL.
HANGS = {
    "python": ("threading.Event().wait()", True),
    "c": ("[ctypes.CDLL(None).pthread_mutex_lock(mutex) for _ in range(2)]", False),
    "c_with_the_gil": ("[ctypes.PyDLL(None).pthread_mutex_lock(mutex) for _ in range(2)]", False),
    "closing": ("try:\n        threading.Event().wait()\n    finally:\n        threading.Event().wait()", False),
}
MODULE = """
import ctypes, threading
import pytest

def test_that_hangs():
    mutex = ctypes.create_string_buffer(64)
    {hang}

def test_after_it():
    pass
"""


def run(directory, hang, *flags):
    (directory / "test_hanging.py").write_text(MODULE.format(hang=hang))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        TESTS.parent / "pyproject.toml",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
    ]
    path = f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(
        [*command, "-o", "timeout=2", *flags, directory / "test_hanging.py"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", HANGS)
def test_a_test_that_hangs_is_named_and_the_run_ends(tmp_path, kind):
    hang, heard = HANGS[kind]
    done = run(tmp_path, hang)
    assert done.returncode == 1 and "test_that_hangs" in (done.stdout if heard else done.stderr)
    assert ("1 failed, 1 passed" in done.stdout) == heard


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["python", "c_with_the_gil"])
def test_of_two_processes_the_other_goes_on(tmp_path, kind):
    done = run(tmp_path, HANGS[kind][0], "-n", "2")
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout
    assert "::test_that_hangs" in done.stdout


@pytest.mark.slow
def test_a_slow_test_may_take_longer(request):
    assert request.node.get_closest_marker("timeout").args == (900,)


def test_every_test_has_a_limit(pytestconfig):
    """From the configuration file, whatever the command line."""
    assert 0 < float(pytestconfig.getini("timeout")) <= 240
