"""Prints a validation on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.app.run_folder import print_folder
from experiments.app.terminal import plain_table
from experiments.validate.fidelity import tables
from experiments.validate.fidelity.errors import Fidelity, Part


def print_fidelity(
    fidelity: Fidelity, notes: Sequence[str], console: Console, parts: Sequence[Part] = ()
) -> None:
    """Prints the verdict, the errors, their decomposition and the notes."""
    colour = {"met": "bold green", "missed": "bold red"}.get(fidelity.verdict, "bold")
    console.print(tables.verdict_line(fidelity), style=colour, highlight=False)
    console.print(plain_table(tables.metric_rows(fidelity)))
    if fidelity.curves:
        console.print(plain_table(tables.curve_rows(fidelity.curves)))
    if fidelity.iterations:
        console.print(plain_table(tables.kind_rows(fidelity.iterations)))
    if parts:
        console.print(plain_table(tables.part_rows(parts)))
        console.print(tables.largest_part(parts), highlight=False)
    for note in dict.fromkeys([*notes, *(note for run in fidelity.reals for note in run.notes)]):
        console.print(note, style="yellow", highlight=False, soft_wrap=True)


def print_files(files: Sequence[Path], console: Console) -> None:
    """Prints the paths of files, relative to the working directory."""
    for file in files:
        print_folder(file, console)
