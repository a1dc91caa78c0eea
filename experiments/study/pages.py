"""Parts that the pages of all studies share: styles of arms, settings of the command, and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from experiments.study.notes import merged_notes
from experiments.study.runs import Point, settings_that_differ
from sim.report.chart import GREY, RED, SERIES
from sim.report.plain_page import Content, folded, listed
from sim.settings.build import shown

COLOURS = (*SERIES, RED, GREY)
DASHES = ("solid", "dash", "dot")


def line_style(index: int) -> dict[str, str]:
    """Returns colour and dash of an arm's line: all colours first, then the next dash."""
    return {"color": COLOURS[index % len(COLOURS)], "dash": DASHES[index // len(COLOURS) % len(DASHES)]}


def settings_text(title: str, config: Mapping[str, Any], state: str = "") -> str:
    """Returns HTML that shows a config as YAML when its title is clicked. state: see `folded`."""
    return folded(title, OmegaConf.to_yaml(OmegaConf.create(dict(config))), state)


def last_sections(notes: Mapping[str, Sequence[str]], configuration: str) -> dict[str, Content]:
    """Returns the sections with which a page ends. notes: arm -> those on its runs."""
    return {"Assumptions and notes": listed(merged_notes(notes)), "Configuration": configuration}


def differing_rows(points: Sequence[Point], *, max_chars: int | None = None) -> list[list[str]]:
    """Returns a table of the settings that differ between arms, its heading first.

    max_chars: number of characters after which a value is cut off.
    """
    rows = [
        [key, *(shown(value)[:max_chars] for value in by_arm.values())]
        for key, by_arm in settings_that_differ(points).items()
    ]
    return [["setting", *(point.arm for point in points)], *rows]
