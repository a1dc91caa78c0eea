"""The common form of all studies of many runs: findings, which are printed, written and drawn.

A command of this kind is a `Study`: its settings are checked and its runs are built before `find` makes them.
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pandas as pd
from rich.console import Console

from experiments.app.job import UnsuccessfulError
from experiments.app.run_folder import print_folder, print_path, seen_from_here, write_study
from experiments.app.terminal import terminal_console
from experiments.study.workers import Report, progress_of
from sim.report.files import write_table

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from sim.report.plain_page import Content


class Page(NamedTuple):
    """A page of HTML. sections: by their headings."""

    title: str
    introduction: str
    sections: Mapping[str, Content]

    @property
    def figures(self) -> dict[str, go.Figure]:
        """The figures by the heading of their section; a second one of a section has a number."""
        found: dict[str, go.Figure] = {}
        for heading, content in self.sections.items():
            own = [] if isinstance(content, str) else [one for one in content if not isinstance(one, str)]
            found |= {heading if i == 1 else f"{heading} {i}": one for i, one in enumerate(own, start=1)}
        return found


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The findings of a study. A notebook shows them with the content of their page."""

    name: str
    """Name of the command; its page is NAME.html."""
    config: dict[str, Any]
    """The resolved config of the command."""
    tables: Mapping[str, pd.DataFrame]
    """Name of a file without its ending -> table; the first has one row per run, or per candidate."""
    verdicts: Sequence[str]
    """The decisions of the study, in one sentence each."""
    caveats: Sequence[str]
    """Warnings about the verdicts, and the expected errors of the figures."""
    record: Mapping[str, Any]
    """Content of summary.json."""
    show: Callable[[Console], None]
    """This function prints the findings."""
    draw: Callable[[], Page]
    """This function draws the page."""
    is_whole: bool = True
    """False after Ctrl-C: only some of the runs have ended."""
    failure: str | None = None
    """Why the findings are no success, perhaps ""; None if they are."""

    @property
    def table(self) -> pd.DataFrame:
        """The first table: one row per run, or per candidate, with its settings and figures."""
        return next(iter(self.tables.values()))

    @cached_property
    def page(self) -> Page:
        """The page, which is drawn when it is asked for."""
        return self.draw()

    @property
    def figures(self) -> dict[str, go.Figure]:
        """The figures of the page, by the heading of their section."""
        return self.page.figures

    def write(self, folder: str | Path, *, page: bool = True) -> None:
        """Writes the tables, config.yaml and summary.json, and the page unless it is not wanted."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        for name, table in self.tables.items():
            write_table(table, path / f"{name}.parquet")
        write_study(path, self.config, dict(self.record))
        if page:
            from sim.report.plain_page import write_page  # noqa: PLC0415 (plotly: not for every study)

            write_page(path / f"{self.name}.html", *self.page)

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=100)
        with console.capture() as printed:
            self.show(console)
        return printed.get().rstrip()

    def __repr__(self) -> str:
        return f"<Findings of {self.name}: {self.verdicts[0] if self.verdicts else 'no verdict'}>"

    def _ipython_display_(self) -> None:
        notebook: Any = importlib.import_module("IPython.display")
        for heading, content in self.page.sections.items():
            notebook.display(notebook.HTML(f"<h3>{html.escape(heading)}</h3>"))
            for piece in [content] if isinstance(content, str) else content:
                notebook.display(notebook.HTML(piece) if isinstance(piece, str) else piece)


class Study(Protocol):
    """A question about many runs, with checked settings."""

    def find(self, report: Report) -> Findings | None:
        """Makes the runs; report is called with the number of finished parts and of all.

        After Ctrl-C it returns what has been found so far, None if that is nothing. Raises ConfigError for a
        wrong setting that is found only during a run.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyJob:
    """A study as the job of a command."""

    study: Study
    parts: str = "runs"
    """The parts that the progress counts, in the plural."""
    progress: bool = True
    page: bool = True
    """Whether the page is written."""
    page_note: str = ""
    """Words before the path of the page; "": it is not printed."""

    def find(self, console: Console) -> Findings:
        """Makes the runs with their progress. Raises KeyboardInterrupt if Ctrl-C leaves nothing to show."""
        with progress_of(console, enabled=self.progress, what=self.parts) as report:
            found = self.study.find(report)
        if found is None:
            raise KeyboardInterrupt
        return found

    def run(self, folder: Path) -> None:
        """Makes the runs, prints the findings and writes them.

        Raises KeyboardInterrupt after Ctrl-C, once the findings so far are written, and UnsuccessfulError if
        they are no success.
        """
        console = terminal_console()
        found = self.find(console)
        found.show(console)
        found.write(folder, page=self.page)
        print_folder(folder, console)
        if self.page_note and self.page:
            print_path(f"{self.page_note}{seen_from_here(folder / f'{found.name}.html')}", console)
        if not found.is_whole:
            raise KeyboardInterrupt
        if found.failure is not None:
            raise UnsuccessfulError(found.failure)
