"""Every notebook runs from start to end, and is committed without outputs."""

from pathlib import Path

import nbclient
import nbformat
import pytest

COLABS = sorted((Path(__file__).parent.parent / "colabs").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", COLABS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")
def test_a_colab_runs_and_ends_in_a_picture(path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), f"strip the outputs of {path.name}"
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    assert any("image/png" in output.get("data", {}) for output in cells[-1].outputs)
