"""`import jaxrec` is light and needs none of the optional packages."""

import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
HEAVY = ["tensorflow", "tensorflow_datasets", "polars", "tyro", "tqdm", "matplotlib", "array_record", "torch"]


def test_importing_the_library_loads_no_optional_package():
    code = f"""
import sys
for name in {HEAVY}:
    sys.modules[name] = None  # importing it raises ImportError
import jaxrec, jaxrec.loop, jaxrec.metrics, jaxrec.models.dlrm, jaxrec.data.synthetic, jaxrec.data.criteo
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", ["scipy", "tqdm", "tyro"])
def test_an_experiment_without_its_packages_says_what_to_install(package):
    code = f"import sys; sys.modules['{package}'] = None; sys.path[0] = '{EXPERIMENTS}'; import contract"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"need {package}" in done.stderr and "make setup" in done.stderr
