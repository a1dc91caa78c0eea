"""Line styles and notes of arms, for the pages of all studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim.report.look import GREY, RED, SERIES
from sim.report.plain_page import listed

COLOURS = (*SERIES, RED, GREY)
DASHES = ("solid", "dash", "dot")


def line_style(index: int) -> dict[str, str]:
    """Returns colour and dash of an arm's line: all colours first, then the next dash."""
    return {"color": COLOURS[index % len(COLOURS)], "dash": DASHES[index // len(COLOURS) % len(DASHES)]}


def notes_of_arms(notes: Mapping[str, Sequence[str]]) -> str:
    """Formats the notes on the runs of each arm as a list of a page."""
    return listed([f"{arm}: {note}" for arm, lines in notes.items() for note in lines])
