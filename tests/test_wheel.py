"""The wheel holds the library and the scripts of its commands, nothing else, and works without a checkout."""

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import commands
import pytest

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
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


def test_every_package_is_in_the_wheel_and_every_command_has_its_script():
    packages = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "jaxrec").rglob("*.py")}
    setup = PYPROJECT["tool"]["setuptools"]
    assert set(setup["packages"]) == {*packages, "jaxrec_commands", "jaxrec_commands.scripts.main"}
    assert set(setup["py-modules"]) == {f"jaxrec_commands.scripts.{name}" for name in commands.NAMES}
    assert PROJECT["scripts"] == {f"jaxrec-{name}": f"jaxrec_commands:{name}" for name in commands.NAMES}
    assert all(getattr(commands, name).args == (name,) for name in commands.NAMES)


def test_the_scripts_in_the_wheel_import_no_script_that_is_not():
    experiments = ROOT / "experiments"
    left_out = {path.stem for path in experiments.iterdir()} - {*commands.NAMES, "main"}
    for path in (*(experiments / f"{name}.py" for name in commands.NAMES), *(experiments / "main").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else getattr(node, "names", ())
            roots = {str(getattr(name, "name", name)).partition(".")[0] for name in names}
            assert left_out.isdisjoint(roots), f"{path.name}:{node.lineno}"


def test_an_index_can_show_the_readme():
    """It is its description there: pictures beside it are missing, and, once there is an address, so are pages."""
    links = re.findall(r"(!?)\[[^]]*\]\((?!https:)([^)]*)\)", (ROOT / "README.md").read_text())
    assert not [link for picture, link in links if picture or "Repository" in PROJECT["urls"]]


def run(directory, *command, path=""):
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(list(map(str, command)), cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_installs_in_a_clean_place_and_trains_and_so_do_its_commands(tmp_path):
    if why := too_old():
        pytest.skip(why)
    source, target = tmp_path / "source", tmp_path / "target"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("jaxrec", "experiments"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(tmp_path, *pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", "wheels", source)
    (wheel,) = (tmp_path / "wheels").glob("jaxrec-*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    library = {str(path.relative_to(source)) for path in (source / "jaxrec").rglob("*") if path.is_file()}
    scripts = {f"jaxrec_commands/scripts/{name}.py" for name in commands.NAMES} | {"jaxrec_commands/__init__.py"}
    main = {f"jaxrec_commands/scripts/main/{path.name}" for path in (ROOT / "experiments" / "main").glob("*.py")}
    assert held == library | scripts | main
    run(tmp_path, *pip, "install", "-q", "--no-deps", "--no-index", "--target", target, wheel)
    assert run(tmp_path, sys.executable, "-P", "-c", SMOKE, target, path=target).strip() == "trained"
    small = ("--fixed", "rows=5000", "batch-size=128", "--preset", "smoke", "--seeds", 1, "--metric", "test_auc")
    run(tmp_path, target / "bin" / "jaxrec-sweep", "--vary", "model=lr,fm", *small, "--workdir", "sweep", path=target)
    trained = tmp_path / "sweep" / "model=fm_0"
    assert json.loads((trained / "environment.json").read_text())["commit"] is None  # it was not that of this checkout
    evaluate = ("-m", "jaxrec", "evaluate", "--run", trained, "--workdir", "evaluated")
    assert "run written to" in run(tmp_path, sys.executable, *evaluate, path=target)
    described = run(tmp_path, target / "bin" / "jaxrec-train", "--help", path=target)
    assert described.startswith("usage: jaxrec-train") and "python experiments" not in described
