"""Which seeds a study runs with."""

from __future__ import annotations

from collections.abc import Sequence


def check_seeds(seeds: Sequence[int], usual: str) -> None:
    """Raise ValueError unless they are one or more, different and not negative. usual: how many, in words."""
    if not seeds:
        example = {"three": "[0,1,2]", "five": "[0,1,2,3,4]"}[usual]
        raise ValueError(f"seeds=[]: must name a seed; {usual} give an interval, say seeds={example}")
    if min(seeds) < 0:
        raise ValueError(f"seeds={min(seeds)}: must be >= 0")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={list(seeds)}: must be different; the same draw twice is no second look")
