"""Checks the seeds of a study."""

from __future__ import annotations

from collections.abc import Sequence


def check_seeds(seeds: Sequence[int], usual: str) -> None:
    """Raises ValueError unless seeds are given, distinct and >= 0. usual: their usual number, in words."""
    if not seeds:
        example = {"three": "[0,1,2]", "five": "[0,1,2,3,4]"}[usual]
        raise ValueError(
            f"seeds=[]: must contain at least one seed; {usual} give a confidence interval, such as "
            f"seeds={example}"
        )
    if min(seeds) < 0:
        raise ValueError(f"seeds={min(seeds)}: must be >= 0")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={list(seeds)}: must be distinct, because equal seeds give equal runs")
