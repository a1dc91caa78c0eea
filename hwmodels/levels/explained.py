"""The operators of an iteration that was measured as a whole, or component by component."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hwmodels.iterations.iteration import Explained


def share_out(lines: Sequence[Explained], measured_s: Mapping[str, float]) -> list[Explained]:
    """Each component's measured seconds, shared out among its lines as theirs are; the longest first.

    Bounds, FLOPs and bytes stay what they are. Lines that all took 0 s share alike.
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
