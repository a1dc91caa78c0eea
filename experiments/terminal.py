"""The summary of a run on the terminal, 100 columns wide: verdict, latencies, three blocks of figures."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments import wording


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """Print what `sim.metrics.summary.summarise` returned."""
    goodput = summary["goodput"]
    attained = goodput and goodput["attained"]
    colour = "bold" if not goodput or attained is None else "bold green" if attained else "bold red"
    console.print(Text(wording.verdict(summary), style=colour))
    if goodput and attained is not None:
        console.print(Text("  " + "; ".join(wording.slo_terms(goodput)), style="dim"))
    for caveat in wording.caveats(summary):
        console.print(Text(f"  {caveat}", style="yellow"))
    console.print(_latencies(summary))
    console.print(_figures(summary))


def _latencies(summary: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("ms")
    for heading in (*wording.STATISTICS, "count"):
        table.add_column(heading, justify="right")
    for row in wording.latency_rows(summary):
        table.add_row(*row)
    return table


def _figures(summary: dict[str, Any]) -> Table:
    """The headline blocks side by side, two columns each."""
    blocks = wording.headline(summary)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in blocks:
        table.add_column(title, no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
    for row in zip(*(block.items() for block in blocks.values()), strict=True):
        table.add_row(*(text for item in row for text in item))
    return table
