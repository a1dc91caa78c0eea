"""Merges the notes on the runs of several arms, and finds those on expected errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sim.setup.notes import PREFIX


def merged_notes(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns each note once; a note that does not hold for all arms begins with the names of its arms.

    notes: arm -> notes on its runs.
    """
    arms_by_note: dict[str, list[str]] = {}
    for arm, lines in notes.items():
        for note in dict.fromkeys(lines):
            arms_by_note.setdefault(note, []).append(arm)
    return [
        note if len(arms) == len(notes) else f"{', '.join(arms)}: {note}"
        for note, arms in arms_by_note.items()
    ]


def expected_error_lines(notes: Iterable[str]) -> list[str]:
    """Returns the notes on the expected errors of figures, which every answer prints."""
    return [note for note in notes if PREFIX in note]
