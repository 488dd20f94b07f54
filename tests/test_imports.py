"""`import jaxrec` is light and needs none of the optional packages."""

import subprocess
import sys

HEAVY = ["tensorflow", "tensorflow_datasets", "polars", "tyro", "tqdm", "matplotlib", "array_record", "torch"]


def test_importing_the_library_loads_no_optional_package():
    code = f"""
import sys
for name in {HEAVY}:
    sys.modules[name] = None  # importing it raises ImportError
import jaxrec, jaxrec.loop, jaxrec.metrics, jaxrec.models.dlrm, jaxrec.data.synthetic, jaxrec.data.criteo
"""
    subprocess.run([sys.executable, "-c", code], check=True)
