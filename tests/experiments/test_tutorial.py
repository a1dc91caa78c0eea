"""The tutorial notebook runs from top to bottom in a kernel of its own, and its results hold."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "experiments/tutorial.ipynb"


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [output for cell in cells for output in cell.outputs]
    texts = "".join(output.get("text", "") for output in shown)
    assert texts.count("requests met it (target 90 %)") == 2
    assert "'report.html', 'requests.parquet'" in texts
    figures = [output for output in shown if "application/vnd.plotly.v1+json" in output.get("data", {})]
    assert len(figures) == 4
    tables = [
        output.data["text/html"]
        for output in shown
        if "<table" in output.get("data", {}).get("text/html", "")
    ]
    assert len(tables) >= 4  # the headline, requests, latencies, policies


def test_the_tutorial_is_kept_without_outputs():
    """Saved outputs would become outdated; every reader runs the notebook."""
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert not cell.get("outputs")
