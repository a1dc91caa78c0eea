"""Notebooks as pages of the site: their texts and their code; notebooks are kept without outputs."""

import json
from pathlib import Path

from experiments.site.pages import ROOT

FOLDER = ROOT / "experiments" / "notebooks"


def notebook_pages() -> dict[str, str]:
    """Returns the text of a page for each notebook, by its place in the site."""
    return {f"notebooks/{file.stem}.md": page_of(file) for file in sorted(FOLDER.glob("*.ipynb"))}


def page_of(file: Path) -> str:
    """Returns a notebook as Markdown: its texts as they are, its code as blocks of Python."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    parts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return (
        "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in parts) + "\n"
    )
