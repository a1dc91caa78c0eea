"""Formats numbers and texts as commands write them into config files."""

from __future__ import annotations

import math

NOTHING = 1e-12
"""Figures below this are remains of a fit that went to 0; no time in seconds and no share is as small."""


def figure(value: float) -> str:
    """Formats four digits with an exponent that is a multiple of three: 2.431e-6; below `NOTHING`: 0."""
    if abs(value) < NOTHING:
        return "0"
    if 1e-2 <= abs(value) < 1e4:
        return f"{value:.4g}"
    rounded = float(f"{value:.4g}")
    exponent = 3 * math.floor(math.log10(abs(rounded)) / 3)
    return f"{rounded / 10**exponent:.4g}e{exponent}"


def quoted(text: str) -> str:
    """Quotes any text as a YAML string."""
    return "'" + text.replace("'", "''") + "'"
