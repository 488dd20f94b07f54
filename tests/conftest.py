"""Eight virtual devices, strict jax and a time limit for all tests."""

import atexit
import faulthandler
import os
import shutil
import signal
import tempfile
import threading

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

# Half of the time of all tests was compilation, of programs that another test has compiled before: what one process has
# compiled the others read, also those that tests start. A directory of this run, as nothing old shall be believed.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxrec-programs-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
# What another process is still writing, or was killed in, cannot be read: it is compiled again, with a warning.
os.environ["PYTHONWARNINGS"] = "ignore:Error reading persistent comp,ignore:Error writing persistent comp"

from pathlib import Path

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# Under nohup the one is ignored, in the background of a script the other, and by all processes that tests start, too:
# they would not end with their terminal, nor on Ctrl-C.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the first example of a shape compiles. The same examples for everybody: what is drawn at random is found
# by `make test-all`, which names the other profile. Hypothesis has one of its own where CI is set; it is not used.
hypothesis.settings.register_profile("laws", deadline=None, max_examples=50, print_blob=True, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "laws"))

LIMIT_OF_SLOW_TESTS_S = 900  # all others: `timeout` in pyproject.toml


def pytest_configure(config):
    config.real_stderr = os.fdopen(os.dup(2), "w")  # while a test runs, 2 is captured, and lost with the process


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIMIT_OF_SLOW_TESTS_S))
    items.sort(key=_turn)


def _turn(item):
    """What is read and not run comes first, as it takes seconds and says much; processes come last."""
    if item.get_closest_marker("process"):
        return 2
    return int(item.path.stem not in ("test_floors", "test_docs", "test_site"))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    """Ends the process, with all stacks, if a test outlives its limit by half: a C call hears no signal, and what the
    signal interrupts may hang again where it is closed."""
    faulthandler.dump_traceback_later(1.5 * settings.timeout, exit=True, file=item.config.real_stderr)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_enter_pdb():
    faulthandler.cancel_dump_traceback_later()


def pytest_unconfigure(config):
    """A thread that a test left behind may not keep the run from ending."""
    if any(not t.daemon for t in threading.enumerate() if t is not threading.main_thread()):
        faulthandler.dump_traceback_later(60, exit=True, file=config.real_stderr)


@pytest.fixture
def real_data() -> Path:
    """The directory of real data, where there is one."""
    if "JAXREC_DATA" not in os.environ:
        pytest.skip("JAXREC_DATA names no directory of real data")
    return Path(os.environ["JAXREC_DATA"])
