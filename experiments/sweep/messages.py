"""Messages of a sweep on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.sweep.folder import DONE, FAILED, REFUSED, SweepFolder
from sim.report.wording import plural


def print_resumed(folder: SweepFolder, already: int, missing: int, console: Console) -> None:
    """Prints how many runs are done and how many are missing when a sweep is resumed."""
    console.print(Text(f"{plural(already, 'run')} done; {missing:,} missing or failed."))
    if len(folder.about["code"]) > 1:
        console.print(
            Text(
                "  The code or a config has changed since then; see the column code of runs.parquet.",
                style="yellow",
            )
        )


def print_done(folder: SweepFolder, num_new: int, seconds: float, console: Console) -> None:
    """Prints the number of runs by status, the runs per second, and up to five error messages."""
    total, rate = folder.plan.num_points, num_new / seconds if seconds > 0 else 0.0
    parts = [f"{folder.num_of(DONE):,} of {plural(total, 'run')} done"]
    parts += [f"{count:,} {status}" for status in (FAILED, REFUSED) if (count := folder.num_of(status))]
    new = f"; {num_new:,} simulated in {seconds:.1f} s ({rate:.1f} runs/s)" if num_new else ""
    console.print(Text(f"{', '.join(parts)}{new}", style="bold"))
    messages: dict[str, list[dict[str, Any]]] = {}
    for row in folder.rows.values():
        if row["status"] != DONE:
            messages.setdefault(f"{row['status']}: {row['error']}", []).append(row)
    for message, rows in list(messages.items())[:5]:
        where = ", ".join(str(row["run"]) for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
        console.print(Text(f"  {message} (run {where})", style="yellow"), soft_wrap=True)
    if len(messages) > 5:
        console.print(
            Text(f"  {plural(len(messages) - 5, 'more reason')} in the column error of runs.parquet")
        )


def print_remaining(count: int, command: str, console: Console) -> None:
    """Prints the command that continues with the missing runs."""
    console.print(
        f"{plural(count, 'run')} left; to continue: {command}",
        style="yellow",
        soft_wrap=True,
        highlight=False,
    )
