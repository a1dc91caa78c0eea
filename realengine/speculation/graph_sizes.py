"""Which passes with drafts are captured as CUDA graphs.

Captured are the numbers of draft tokens that the draft-length policy may decide (`KnownLengths`); of other
policies 0, half of the most and the most, without the drafts of the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.speculation import DraftLength, KnownLengths
from policies.speculation.engine.drafts import Shapes
from realengine.runner.work import StepSize
from realengine.speculation.drafter import Drafter


def captured_levels(shapes: Shapes, policy: DraftLength, *, drafts_on_device: bool) -> tuple[int, ...]:
    """Returns the levels of drafts that passes are captured for, ascending."""
    most = shapes.max_depth
    if not isinstance(policy, KnownLengths):
        return tuple(sorted({0, most // 2, most}))
    levels = set(policy.lengths(most))
    return tuple(sorted(levels if drafts_on_device else levels | {0}))  # a lookup may find nothing


def drafts_in_graph(policy: DraftLength, drafter: Drafter | None) -> bool:
    """Returns whether graphs hold the drafts of the next pass, too."""
    return drafter is not None and drafter.is_static and isinstance(policy, KnownLengths)


def sizes_of(
    shapes: Shapes, levels: Sequence[int], nums: Sequence[int], max_context_len: int, *, drafts: bool
) -> list[StepSize]:
    """Returns the sizes of the captured passes.

    levels: of the drafts that are verified. nums: numbers of sequences. drafts: whether the graphs hold the
    drafts of the next pass, as many as are verified.
    """
    return [
        StepSize(num, int(shapes.rows[level]), level, level if drafts else None)
        for level in levels
        if shapes.rows[level] < max_context_len
        for num in nums
    ]
