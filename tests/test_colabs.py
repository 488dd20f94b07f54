"""Every notebook runs from start to end, has the outputs of today's code, and installs jaxrec in Colab.

`make colabs` writes the install cell into all of them and runs those whose outputs are not of today's code;
`make colabs ARGS=colabs/1_oac.ipynb` runs the given ones in any case.
"""

import ast
import base64
import hashlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
import types
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import jaxrec

ROOT = Path(__file__).parent.parent
COLABS = sorted((ROOT / "colabs").glob("*.ipynb"))
GOLDEN = ROOT / "tests" / "golden" / "dlrm_losses.txt"
INSTALL = "install"
MOST_LINES, MOST_BYTES = 10, 30_000
A_PATH = re.compile(r"(?<![\w.<:/])/\w[\w.-]*/\w")


def repository() -> str:
    """The address of the repository; empty until it is published."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project.get("urls", {}).get("Repository", "")


def install_cell(address: str) -> str:
    """The cell that installs jaxrec in Colab and does nothing elsewhere."""
    source = f"git+{address}" if address else ""
    return f"""# In Colab this installs jaxrec and keeps Colab's own JAX; elsewhere it does nothing.
import sys
from importlib import metadata
from pathlib import Path

source = "{source}"  # what pip installs, as "jaxrec" from an index; empty: a wheel or an archive of yours

if "google.colab" in sys.modules and not list(metadata.distributions(name="jaxrec")):
    if not source:  # the newest that lies here or on your Drive; else you are asked for one
        from google.colab import files

        places = [Path(place) for place in (".", "/content", "/content/drive/MyDrive")]
        found = [file for place in places for file in place.glob("jaxrec-*") if file.suffix in (".whl", ".gz", ".zip")]
        source = max(found, key=lambda file: file.stat().st_mtime, default=None) or list(files.upload())[0]
    Path("keep.txt").write_text("".join(f"{{name}}=={{metadata.version(name)}}\\n" for name in ("jax", "jaxlib")))
    %pip install -q -c keep.txt "{{source}}"
"""[:-1]


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def text(notebook: dict) -> str:
    """The notebook as nbformat writes it."""
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def source_of(cell: dict) -> str:
    return "".join(cell["source"])


def code_of(notebook: dict) -> list[dict]:
    """The code cells behind the install cell."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code" and cell["id"] != INSTALL]


def digest(notebook: dict) -> str:
    """What outputs come from: code, the version of jaxrec, and the golden curve, which changes with the mathematics."""
    parts = [jaxrec.__version__, GOLDEN.read_text(), *map(source_of, code_of(notebook))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def with_install_cell(notebook: dict, address: str) -> dict:
    """The notebook with the install cell after its title, replacing an existing one."""
    cells = [cell for cell in notebook["cells"] if cell["id"] != INSTALL]
    cell = {"cell_type": "code", "execution_count": 1, "id": INSTALL, "metadata": {}, "outputs": []}
    cell["source"] = install_cell(address).splitlines(keepends=True)
    return notebook | {"cells": [cells[0], cell, *cells[1:]]}


def smaller(png: str) -> str:
    """A picture in 256 colours, less than half as large."""
    from PIL import Image

    out = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(256).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def run(path: Path) -> dict:
    """Run a notebook from start to end."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False)
    client.coalesce_streams = True
    client.execute()
    done = json.loads(nbformat.writes(notebook))
    for output in itertools.chain.from_iterable(cell["outputs"] for cell in code_of(done)):
        if "image/png" in output.get("data", {}):
            output["data"]["image/png"] = smaller(output["data"]["image/png"])
    return done | {"metadata": read(path)["metadata"] | {"outputs_of": digest(done)}}


def stale(notebook: dict) -> bool:
    return notebook["metadata"].get("outputs_of") != digest(notebook)


@pytest.mark.slow
@pytest.mark.parametrize("path", COLABS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")
def test_a_colab_runs_and_ends_in_a_picture(path):
    pytest.importorskip("nbclient", reason="Jupyter is not installed: `make notebooks`")
    assert any("image/png" in output.get("data", {}) for output in code_of(run(path))[-1]["outputs"])


@pytest.mark.parametrize("path", COLABS, ids=lambda path: path.stem)
def test_outputs_are_those_of_todays_code(path):
    notebook = read(path)
    assert not stale(notebook), "`make colabs` runs it"
    cells = code_of(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(2, len(cells) + 2)), "run it from start to end"
    cells[-1]["source"] += "\n"
    assert stale(notebook)


@pytest.mark.parametrize("path", COLABS, ids=lambda path: path.stem)
def test_outputs_are_small_and_hold_no_warnings_and_no_paths(path):
    outputs = [output for cell in code_of(read(path)) for output in cell["outputs"]]
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    shown = [output.get("data", {}) for output in outputs]
    pictures = [len(base64.b64decode("".join(data["image/png"]))) for data in shown if "image/png" in data]
    assert pictures and max(pictures) <= MOST_BYTES
    words = ["".join(output.get("text", "")) for output in outputs]
    words += ["".join(lines) for data in shown for kind, lines in data.items() if kind.startswith("text/")]
    assert not [word for word in words if A_PATH.search(word)]
    assert A_PATH.search("saved at '/home/me/run'") and not A_PATH.search("</span></pre> 3/4 of a/b")


@pytest.mark.parametrize("path", COLABS, ids=lambda path: path.stem)
def test_a_colab_installs_first(path):
    notebook = read(path)
    first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert source_of(first) == install_cell(repository()), "`make colabs` writes it into all"
    assert text(with_install_cell(notebook, repository())) == path.read_text()


def ends_well(source: str) -> bool:
    """Whether a cell ends in a picture or an assertion, or only defines names."""
    if any(line.startswith(("assert ", "plt.show()")) for line in source.split("\n")[-3:]):
        return True
    last = ast.parse(source).body[-1]
    return isinstance(last, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom) or (
        isinstance(last, ast.Assign) and isinstance(last.value, ast.Lambda)
    )


@pytest.mark.parametrize("path", COLABS, ids=lambda path: path.stem)
def test_cells_are_short_and_each_ends_in_a_picture_or_a_law(path):
    for source in map(source_of, code_of(read(path))):
        lines = [line for line in source.split("\n") if line and not line.startswith(("import ", "from "))]
        assert len(lines) <= MOST_LINES, source
        assert ends_well(source), source
    assert ends_well("def f():\n    pass") and not ends_well("loss = 1.0\nprint(loss)")


def install(monkeypatch, address="", colab=True, installed=False, uploads=()):
    """Run the install cell with pip and google.colab in effigy, and return what pip was called with."""
    calls = []
    if colab:
        module = types.ModuleType("google.colab")
        module.files = types.SimpleNamespace(upload=lambda: dict.fromkeys(uploads, b""))
        monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
        monkeypatch.setitem(sys.modules, "google.colab", module)
    monkeypatch.setattr(metadata, "distributions", lambda name: ["there"] if installed else [])
    python = re.sub(r"%pip (.*)", lambda line: f"pip(f'{line[1]}')", install_cell(address))
    exec(python, {"pip": calls.append})
    return [call.split('"')[1] for call in calls]


@pytest.mark.parametrize("address", ["", "https://example.org/x"])
def test_it_installs_in_colab_alone_and_once(monkeypatch, tmp_path, address):
    monkeypatch.chdir(tmp_path)
    assert install(monkeypatch, address, colab=False) == install(monkeypatch, address, installed=True) == []
    assert not any(tmp_path.iterdir())
    wanted = f"git+{address}" if address else "jaxrec-1.zip"
    assert install(monkeypatch, address, uploads=["jaxrec-1.zip"]) == [wanted]


def test_it_takes_the_newest_file_that_lies_there_before_it_asks_for_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for age, there in enumerate(("jaxrec-1.txt", "jaxrec-1.tar.gz", "jaxrec-2.zip", "jaxrec-1.whl")):
        (tmp_path / there).touch()
        os.utime(tmp_path / there, (age, age))
        asked = install(monkeypatch, uploads=["jaxrec-3.whl"])
        assert asked == ["jaxrec-3.whl" if there == "jaxrec-1.txt" else there]
    kept = (tmp_path / "keep.txt").read_text()
    assert kept == f"jax=={metadata.version('jax')}\njaxlib=={metadata.version('jaxlib')}\n"


@pytest.mark.process
def test_pip_leaves_jax_as_it_is_or_refuses(tmp_path):
    """Wheels of nothing but needs: those of jaxrec, and another JAX."""

    def dry_run(*needs):
        about = "jaxrec-99.dist-info/"
        head = ["Metadata-Version: 2.1", "Name: jaxrec", "Version: 99", *(f"Requires-Dist: {need}" for need in needs)]
        with zipfile.ZipFile(tmp_path / "jaxrec-99-py3-none-any.whl", "w") as wheel:
            wheel.writestr(about + "METADATA", "\n".join(head))
            wheel.writestr(about + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any")
            wheel.writestr(about + "RECORD", "")
        (tmp_path / "keep.txt").write_text(f"jax=={metadata.version('jax')}\n")
        command = "-m pip install --dry-run --no-index -c keep.txt jaxrec-99-py3-none-any.whl".split()
        return subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)

    kept = dry_run(*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    assert kept.returncode == 0 and "Would install jaxrec-99\n" in kept.stdout, kept
    refused = dry_run("jax>=99")
    assert refused.returncode != 0 and "constraint) jax==" in refused.stdout, refused


if __name__ == "__main__":
    for path in COLABS:
        notebook = read(path)
        path.write_text(text(with_install_cell(notebook, repository())))
        if stale(notebook) or path in [Path(given).resolve() for given in sys.argv[1:]]:
            print("running", path.name, flush=True)
            path.write_text(text(run(path)))
