"""All generated pages: settings, commands, Python interfaces, notebooks, and the glossary of the reports.

Notebooks, which are kept without outputs, are pages of their texts and their code.

The page of commands has what each prints with --help, and the settings that it adds to a run's.
"""

import contextlib
import importlib
import io
import json
from pathlib import Path

from experiments.app.cli import COMMANDS, Command
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.site.pages import ROOT
from experiments.site.python_pages import python_pages
from experiments.site.settings_pages import cell, settings_pages, settings_table
from sim.report.page import DRAFT_GLOSSARY, GLOSSARY

PLACE = "reference/commands.md"
OF_A_RUN = ("scenario", "simulate")
FLAGS = """\
Flags of commands with settings: `--config-dir DIR` (a folder with your own configs), `--cfg job` (prints the
composed config), `--multirun` (one run for each combination of comma-separated values), `overwrite=true`
(replaces the results in the same folder), `--traceback` (prints the whole traceback of an error), `--help`.

Exit codes: 0 success; 1 files or output cannot be written, or a bug; 2 a wrong command or setting, or a
policy of yours that failed; 3 the command ended, but what it checked does not hold; 130 Ctrl-C; 143 SIGTERM.
"""


def command_pages() -> dict[str, str]:
    """Returns the page of all commands, by its place in the site."""
    sections = [_section(name, command) for name, command in COMMANDS.items()]
    return {PLACE: "\n".join([f"# Commands\n\n{FLAGS}", *sections])}


def _section(name: str, command: Command) -> str:
    head = f"## {name}\n\n{command.summary}\n"
    if command.config_name is None:
        return f"{head}\n```text\n{help_text(command)}\n```\n"
    flags = "".join(f"`{flag}` stands for `{setting}`. " for flag, setting in command.flags.items())
    secrets = "".join(f"`{flag}` is kept in `{variable}`. " for flag, variable in command.secrets.items())
    if command.config_name in OF_A_RUN:
        return f"{head}\n{flags}{secrets}Its settings are those [of a run](settings.md).\n"
    table = settings_table(CONFIG_DIR / f"{command.config_name}.yaml", skip=("defaults", "hydra"))
    if not table:
        table = f"Its settings are those of the group [`{name}`](groups/{name}.md).\n"
    return "\n".join(
        part for part in (head, f"{flags}{secrets}\n" if flags or secrets else "", table) if part
    )


def help_text(command: Command) -> str:
    """Returns what a command that Hydra does not compose prints with --help."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        importlib.import_module(command.module).main(["--help"])
    return printed.getvalue().strip()


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
