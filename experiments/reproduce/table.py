"""Prints the gallery: one table per family, then the setting, source and reason of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from experiments.app.terminal import plain_table
from experiments.reproduce.findings import broken_by
from experiments.reproduce.rows import CLOSE, UNVERIFIED, Kind, Row, Source
from experiments.reproduce.verdicts import Judged, State, Verdict
from sim.metrics.definitions import plain_json
from sim.report.wording import plural

HEADINGS = ("", "kind", "published", "ours", "ratio", "")
PLURALS = {State.HOLDS: "hold", State.DIFFERS: "differ"}
COLOURS = {State.HOLDS: "green", State.DIFFERS: "yellow", State.FELL_OUT: "bold red", State.MISSING: "dim"}


def print_gallery(judged: Sequence[Judged], console: Console) -> None:
    """Prints every family with its rows, the sentences on differences, and the counts of states."""
    for part in judged:
        console.print(Text(part.family.title, style="bold"))
        console.print(
            plain_table([HEADINGS, *(_cells(verdict) for verdict in part.verdicts)], label_columns=(0, 1, 5))
        )
        for verdict in part.verdicts:
            row = verdict.row
            text = Text.assemble(f"{row.name}: ", (f"{row.setting}. From: {source_text(row.source)}.", "dim"))
            console.print(Padding(text.append("".join(f" {words}" for words in notes(row))), (0, 0, 0, 2)))
        console.print()
    console.print(Text(count_line(judged)))
    verdicts = (verdict for part in judged for verdict in part.verdicts)
    if left := [verdict.row.name for verdict in verdicts if verdict.is_unexplained]:
        console.print(Text(f"Not within the band, and the cause is not verified: {', '.join(left)}."))


def count_line(judged: Sequence[Judged]) -> str:
    """Returns the numbers of rows by state, as sentences: first those that the simulator could break."""
    verdicts = [verdict for part in judged for verdict in part.verdicts]
    sentences = []
    for kind in Kind:
        of_kind = [verdict for verdict in verdicts if verdict.row.kind is kind]
        counts = {state: sum(verdict.state is state for verdict in of_kind) for state in State}
        words = [
            f"{count} {state.value if count == 1 else PLURALS.get(state, state.value)}"
            for state, count in counts.items()
            if count
        ]
        if close := sum(verdict.state is State.DIFFERS and verdict.is_close for verdict in of_kind):
            words.append(f"{close} of them by at most {100 * CLOSE:g} %")
        if words:
            sentences.append(f"{plural(len(of_kind), f'{kind.value} row')}: {', '.join(words)}.")
    return " ".join(sentences)


def notes(row: Row) -> list[str]:
    """Returns what is known of a row's difference, and which changes break the row, as far as there are."""
    cause = UNVERIFIED if row.differs and not row.verified else ""
    broken = broken_by(row) if row.kind in (Kind.SIMULATED, Kind.INDICATIVE) else ""
    return [words for words in (row.why, cause, broken) if words]


def source_text(source: Source) -> str:
    """Returns the source, and whether the figure was checked in it."""
    return source.text if source.was_read else f"{source.text} (not read here)"


def records(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Returns the rows as they are written to summary.json."""
    found: list[dict[str, Any]] = plain_json(
        [
            {
                "family": part.family.name,
                "row": verdict.row.name,
                "kind": verdict.row.kind.value,
                "claim": verdict.row.claim,
                "published": list(verdict.row.published),
                "unit": verdict.row.unit,
                "source": source_text(verdict.row.source),
                "url": verdict.row.source.url,
                "setting": verdict.row.setting,
                "ours": {"mean": verdict.ours.mean, "low": verdict.ours.low, "high": verdict.ours.high},
                "ratio": verdict.ratio,
                "band": list(verdict.row.limits),
                "state": verdict.state.value,
                "why": verdict.row.why,
                "cause_verified": verdict.row.verified,
            }
            for part in judged
            for verdict in part.verdicts
        ]
    )
    return found


def _cells(verdict: Verdict) -> list[str]:
    state = verdict.state
    return [
        f"{verdict.row.claim} [{verdict.row.name}]".replace("[", r"\["),
        verdict.row.kind.value,
        verdict.row.published_text,
        verdict.ours_text,
        verdict.ratio_text,
        f"[{COLOURS[state]}]{state.value}[/]",
    ]
