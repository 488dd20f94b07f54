"""Eight virtual devices and strict jax for all tests."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from pathlib import Path

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example of a shape compiles.
hypothesis.settings.register_profile("laws", deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.load_profile("laws")


@pytest.fixture
def real_data() -> Path:
    """The directory of real data, where there is one."""
    if "JAXREC_DATA" not in os.environ:
        pytest.skip("JAXREC_DATA names no directory of real data")
    return Path(os.environ["JAXREC_DATA"])
