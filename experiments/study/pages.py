"""Line styles of arms, for the pages of all studies."""

from __future__ import annotations

from sim.report.chart import GREY, RED, SERIES

COLOURS = (*SERIES, RED, GREY)
DASHES = ("solid", "dash", "dot")


def line_style(index: int) -> dict[str, str]:
    """Returns colour and dash of an arm's line: all colours first, then the next dash."""
    return {"color": COLOURS[index % len(COLOURS)], "dash": DASHES[index // len(COLOURS) % len(DASHES)]}
