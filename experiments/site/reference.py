"""All generated pages: settings, commands, Python interfaces, notebooks, and the glossary of the reports.

Notebooks, which are kept without outputs, are pages of their texts and their code.
"""

import json
from pathlib import Path

from experiments.site.command_pages import command_pages
from experiments.site.pages import ROOT
from experiments.site.python_pages import python_pages
from experiments.site.settings_pages import cell, settings_pages
from sim.report.page import DRAFT_GLOSSARY, GLOSSARY

NOTEBOOKS = ROOT / "experiments" / "notebooks"


def generated_pages() -> dict[str, str]:
    """Returns the text of every page that is not a file of the repository, by its place in the site."""
    terms = "".join(
        f"| {cell(term)} | {cell(text)} |\n" for term, text in {**GLOSSARY, **DRAFT_GLOSSARY}.items()
    )
    glossary = f"# Glossary\n\nThe terms of `report.html`.\n\n| term | meaning |\n| --- | --- |\n{terms}"
    pages = settings_pages() | command_pages() | python_pages() | notebook_pages()
    return pages | {"reference/glossary.md": glossary}


def notebook_pages() -> dict[str, str]:
    """Returns the text of a page for each notebook, by its place in the site."""
    return {f"notebooks/{file.stem}.md": page_of(file) for file in sorted(NOTEBOOKS.glob("*.ipynb"))}


def page_of(file: Path) -> str:
    """Returns a notebook as Markdown: its texts as they are, its code as blocks of Python."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    parts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return (
        "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in parts) + "\n"
    )
