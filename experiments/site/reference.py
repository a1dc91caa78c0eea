"""All generated pages: settings, commands, Python interfaces, notebooks, and the glossary of the reports."""

from experiments.site.command_pages import command_pages
from experiments.site.notebooks import notebook_pages
from experiments.site.python_pages import python_pages
from experiments.site.settings_pages import cell, settings_pages
from sim.report.page import DRAFT_GLOSSARY, GLOSSARY


def generated_pages() -> dict[str, str]:
    """Returns the text of every page that is not a file of the repository, by its place in the site."""
    terms = "".join(
        f"| {cell(term)} | {cell(text)} |\n" for term, text in {**GLOSSARY, **DRAFT_GLOSSARY}.items()
    )
    glossary = f"# Glossary\n\nThe terms of `report.html`.\n\n| term | meaning |\n| --- | --- |\n{terms}"
    pages = settings_pages() | command_pages() | python_pages() | notebook_pages()
    return pages | {"reference/glossary.md": glossary}
