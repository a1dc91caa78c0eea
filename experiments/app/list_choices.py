"""`windtunnel list [group]`: prints the config groups, their choices, and a description of each choice."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.app.settings.config_groups import Choice, config_dirs, find_groups
from sim.settings.errors import ConfigError, suggest


def main(arguments: Sequence[str]) -> None:
    """Prints all config groups, or the one named. Raises ConfigError if there is no such group."""
    parser = argparse.ArgumentParser(
        prog="windtunnel list",
        description="Show the config groups, their choices and a description of each.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "group", nargs="?", help="show only this group, such as batching or workload/arrivals"
    )
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder with your own configs")
    options = parser.parse_args(arguments)
    groups = find_groups(config_dirs(options.config_dir))
    if options.group and options.group not in groups:
        raise ConfigError(
            f"{options.group}: no such group; {suggest(options.group, groups, listed_by='windtunnel list')}"
        )
    console = Console(highlight=False)
    for group in [options.group] if options.group else groups:
        console.print(Text(group, style="bold"))
        console.print(choices_table(groups[group], width=min(console.width, 100)))


def choices_table(choices: Sequence[Choice], width: int) -> Table:
    """Returns the names of the choices, each with its description."""
    table = Table(box=None, show_header=False, width=width, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True, min_width=20)
    table.add_column(ratio=1)
    for choice in choices:
        table.add_row(Text(f"  {choice.name}"), Text(choice.description))
    return table
