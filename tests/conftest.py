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

# Half of the tests' time went into compiling programs that another test had compiled before, so all processes,
# including those that tests start, share one compilation cache. It is new for every run: no stale entry is trusted.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxrec-programs-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
# A cache entry that is still being written, or whose writer was killed, is unreadable: jax warns and compiles again.
os.environ["PYTHONWARNINGS"] = "ignore:Error reading persistent comp,ignore:Error writing persistent comp"

from pathlib import Path

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# nohup ignores SIGHUP, a shell script's background jobs ignore SIGINT, and child processes inherit this: they would end
# neither with their terminal nor on Ctrl-C.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the first example of a shape compiles. The examples are fixed; `make test-all` selects the profile that
# draws them at random. Hypothesis' own CI profile is not used.
hypothesis.settings.register_profile("laws", deadline=None, max_examples=50, print_blob=True, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "laws"))

LIMIT_OF_SLOW_TESTS_S = 900  # the limit of other tests is `timeout` in pyproject.toml


def pytest_configure(config):
    config.real_stderr = os.fdopen(os.dup(2), "w")  # pytest captures fd 2, lost if the process ends


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIMIT_OF_SLOW_TESTS_S))
    items.sort(key=_turn)


def _turn(item):
    """Sort key: checks of source text first, as they take seconds and find much; tests that start processes last."""
    if item.get_closest_marker("process"):
        return 2
    return int(item.path.stem not in ("test_floors", "test_docs", "test_site"))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    """Dumps all stacks and ends the process at 1.5 times a test's limit: a C call ignores the time-out's signal, and an
    interrupted object may hang again while it is closed."""
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
    """Ends the run even if a test has left a thread running."""
    if any(not t.daemon for t in threading.enumerate() if t is not threading.main_thread()):
        faulthandler.dump_traceback_later(60, exit=True, file=config.real_stderr)


@pytest.fixture
def real_data() -> Path:
    """The directory of real data; skips the test if there is none."""
    if "JAXREC_DATA" not in os.environ:
        pytest.skip("JAXREC_DATA names no directory of real data")
    return Path(os.environ["JAXREC_DATA"])
