"""`import jaxrec` is light and needs none of the optional packages."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrec

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
HEAVY = ["tensorflow", "tensorflow_datasets", "polars", "tyro", "tqdm", "matplotlib", "array_record", "torch", "ray"]


@pytest.mark.process
@pytest.mark.gate
def test_importing_the_library_loads_no_optional_package():
    code = f"""
import sys
for name in {HEAVY}:
    sys.modules[name] = None  # importing it raises ImportError
import jaxrec, jaxrec.cluster, jaxrec.loop, jaxrec.metrics
import jaxrec.models.dlrm, jaxrec.data.synthetic, jaxrec.data.criteo
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_front_door_is_open_and_its_tour_names_what_there_is():
    """All names of the quick start exist, and `help(jaxrec)` mentions only existing techniques."""
    assert all(hasattr(jaxrec, name) for name in jaxrec.__all__)
    assert {"Serial", "Callback", "every", "evaluate", "SyntheticClicks", "DLRM", "adagrad"} <= set(jaxrec.__all__)
    tour = jaxrec.__doc__ or ""
    assert 15 <= len(tour.strip().splitlines()) <= 25
    for package, name in re.findall(r"^    (jaxrec\.\w+) .*`(\w+)`$", tour, re.MULTILINE):
        assert hasattr(importlib.import_module(package), name)
    assert tour.count("jaxrec.") >= 3


@pytest.mark.process
@pytest.mark.parametrize("package", ["scipy", "tqdm", "tyro"])
def test_an_experiment_without_its_packages_says_what_to_install(package):
    code = f"import sys; sys.modules['{package}'] = None; sys.path[0] = '{EXPERIMENTS}'; import main.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"need {package}" in done.stderr and "make setup" in done.stderr
