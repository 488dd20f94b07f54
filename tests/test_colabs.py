"""Every notebook runs from start to end, is committed without outputs, and installs jaxrec where it is missing.

`python tests/test_colabs.py` writes the install cell, with the address of pyproject.toml, into all of them.
"""

import ast
import importlib.util
import sys
import tomllib
import types
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="Jupyter is not installed: `make notebooks`")
nbformat = pytest.importorskip("nbformat", reason="Jupyter is not installed: `make notebooks`")

ROOT = Path(__file__).parent.parent
COLABS = sorted((ROOT / "colabs").glob("*.ipynb"))
INSTALL = "install"
MOST_LINES = 10


def repository() -> str:
    """The address of the repository; empty until it is published."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project.get("urls", {}).get("Repository", "")


def install_cell(address: str) -> str:
    """The cell that installs jaxrec in Colab and does nothing elsewhere."""
    do = f"""get_ipython().run_line_magic("pip", "install -q 'jaxrec[plots] @ git+{address}'")"""
    say = """raise RuntimeError("jaxrec is not published yet: upload it, then %pip install '.[plots]' there")"""
    return f"""# In Colab this installs jaxrec; elsewhere it does nothing.
import importlib.util
import sys

if "google.colab" in sys.modules and importlib.util.find_spec("jaxrec") is None:
    {do if address else say}"""


def written(path: Path, address: str) -> str:
    """The notebook with the install cell after its title, replacing an existing one."""
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.id != INSTALL]
    cell = nbformat.v4.new_code_cell(install_cell(address), id=INSTALL)
    notebook.cells = [cells[0], cell, *cells[1:]]
    return nbformat.writes(notebook) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("path", COLABS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")
def test_a_colab_runs_and_ends_in_a_picture(path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    assert any("image/png" in output.get("data", {}) for output in cells[-1].outputs)


@pytest.mark.parametrize("path", COLABS, ids=lambda path: path.stem)
def test_a_colab_is_stripped_and_installs_first(path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), f"strip the outputs of {path.name}"
    assert cells[0].source == install_cell(repository()), "python tests/test_colabs.py writes it into all"
    assert written(path, repository()) == path.read_text()


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
    notebook = nbformat.read(path, as_version=4)
    for source in [cell.source for cell in notebook.cells if cell.cell_type == "code"][1:]:
        lines = [line for line in source.split("\n") if line and not line.startswith(("import ", "from "))]
        assert len(lines) <= MOST_LINES, source
        assert ends_well(source), source
    assert ends_well("def f():\n    pass") and not ends_well("loss = 1.0\nprint(loss)")


@pytest.mark.parametrize("address", ["", "https://example.org/x"])
@pytest.mark.parametrize("colab, installed", [(False, False), (True, True), (True, False)])
def test_it_installs_in_colab_alone_and_says_that_there_is_no_address(monkeypatch, address, colab, installed):
    calls = []
    shell = types.SimpleNamespace(run_line_magic=lambda *call: calls.append(call))
    if colab:
        monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there" if installed else None)
    run = lambda: exec(install_cell(address), {"get_ipython": lambda: shell})
    if colab and not installed and not address:
        with pytest.raises(RuntimeError, match="not published yet"):
            run()
    else:
        run()
    assert len(calls) == (colab and not installed and bool(address))
    assert all(name == "pip" and address in line for name, line in calls)


if __name__ == "__main__":
    for path in COLABS:
        path.write_text(written(path, repository()))
