"""The notebooks run from top to bottom in a kernel of their own, and their results hold."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "notebooks"
NOTEBOOKS = {
    "first_steps": ("requests met it (target 90 %)", "'report.html', 'requests.parquet'"),
    "choosing_a_fleet": (" per hour",),
    "inventing_a_policy": (
        *("shortest first beats vLLM: TTFT p99", "10 of 10 runs"),
        *("holds: leap_equals_step", "holds: no_leaked_blocks", "equal: False"),
    ),
    "trusting_the_simulator": ("identical", "was ever measured"),
}
"""Notebooks, with texts that they print."""
FIGURES = {"first_steps": 3, "choosing_a_fleet": 1, "inventing_a_policy": 2, "trusting_the_simulator": 0}


def outputs_of(name: str, folder: Path) -> list[Any]:
    """Runs a notebook in a folder. Returns the outputs of all its cells."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    metadata = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook, timeout=300, startup_timeout=300, kernel_name="python3", resources=metadata
    )
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output for cell in cells for output in cell.outputs]


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_shows_what_it_says(name, tmp_path):
    outputs = outputs_of(name, tmp_path)
    printed = "".join(
        output.get("text", "") + output.get("data", {}).get("text/html", "") for output in outputs
    )
    assert [text for text in NOTEBOOKS[name] if text not in printed] == [], printed
    figures = [output for output in outputs if "application/vnd.plotly.v1+json" in output.get("data", {})]
    assert len(figures) == FIGURES[name]
    assert any("<table" in output.get("data", {}).get("text/html", "") for output in outputs)


def test_every_notebook_is_tested():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_without_outputs(name):
    """Saved outputs would become outdated; every reader runs the notebook."""
    for cell in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
