"""The notebooks in examples/, run in a kernel."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.nightly


def test_letters(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(ROOT / "examples/letters.ipynb", as_version=4)
    learned = "assert summary['after']['ci95'][0] > summary['before']['ci95'][1], summary; len(rewards)"
    notebook.cells.append(nbformat.v4.new_code_cell(learned))
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    (train,) = (outputs[source] for source in outputs if "pspo.train(" in source)
    pictures = [output.data for output in train if output.output_type == "display_data"]
    assert outputs[learned][0].data["text/plain"] == "30"
    assert any("image/png" in data for data in pictures)  # the live curve, in one place
    assert len(pictures) == 1
