"""The wheel holds the library, all of it and nothing else, and works without a checkout."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDED = 77  # version of setuptools, as in pyproject.toml
SMOKE = """
import pathlib, sys
import jaxrec, jaxrec.oac, jaxrec.shadowsync, jaxrec.cpr, jaxrec.checkpoint.trees, optax
assert pathlib.Path(jaxrec.__file__).is_relative_to(sys.argv[1]), jaxrec.__file__
spec = jaxrec.EmbeddingSpec({"user": jaxrec.Table(50, 4)}, {"user": jaxrec.Lookup(("user",))})
loss = lambda params, activations, batch: (activations["user"].sum((1, 2)) - batch.label) ** 2
task = jaxrec.Task(spec, loss, optax.sgd(0.1), jaxrec.adagrad(0.1))
batch = jaxrec.SyntheticClicks((50,), dense_features=0, lookup="user").batch(0, 32)
state, losses = task.init({}, "host"), []
for _ in range(20):
    state, metrics = task.step(state, batch)
    losses.append(float(metrics["loss"]))
assert losses[-1] < losses[0], losses
print("trained")
"""


def too_old() -> str:
    """Reason why no wheel can be built here; empty if one can."""
    if importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None:
        return "neither setuptools nor pip is in the tests' environment by itself"
    found = importlib.metadata.version("setuptools")
    return "" if int(found.split(".")[0]) >= NEEDED else f"setuptools {found} is older than {NEEDED}"


def run(directory, *command, path=""):
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(list(map(str, command)), cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_installs_in_a_clean_place_and_trains(tmp_path):
    if why := too_old():
        pytest.skip(why)
    source, target = tmp_path / "source", tmp_path / "target"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "jaxrec", source / "jaxrec", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "experiments").mkdir()
    (source / "experiments" / "train.py").write_text("")  # must be left out of the wheel
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(tmp_path, *pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", "wheels", source)
    (wheel,) = (tmp_path / "wheels").glob("jaxrec-*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {str(path.relative_to(source)) for path in (source / "jaxrec").rglob("*") if path.is_file()}
    run(tmp_path, *pip, "install", "-q", "--no-deps", "--no-index", "--target", target, wheel)
    assert run(tmp_path, sys.executable, "-P", "-c", SMOKE, target, path=target).strip() == "trained"
