"""Splits measured times of an iteration, or of its components, over its operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hwmodels.iterations.iteration import Explained


def share_out(lines: Sequence[Explained], measured_s: Mapping[str, float]) -> list[Explained]:
    """Splits each component's measured seconds over its lines in proportion; returns the longest first.

    Bounds, FLOPs and bytes are unchanged. Lines that all took 0 s get equal shares.
    """
    own_s: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for line in lines:
        own_s[line.component] += line.seconds
        count[line.component] += 1
    total_s = sum(measured_s[name] for name in count)
    changed = []
    for line in lines:
        name = line.component
        part = line.seconds / own_s[name] if own_s[name] else 1 / count[name]
        seconds = part * measured_s[name]
        changed.append(line._replace(seconds=seconds, share=seconds / total_s))
    return sorted(changed, key=lambda line: -line.seconds)
