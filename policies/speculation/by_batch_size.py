"""Drafts fewer tokens the more requests a step has: vLLM's num_speculative_tokens_per_batch_size.

Verification takes time once the draft tokens make a pass compute-bound, so large batches draft little.
As in vLLM 0.32, the sizes of a gap between two ranges, and those above the last range, get the number of the
range before them, and no number exceeds what the proposer drafts at most.

    [[1, 16, 5], [32, 128, 2]]    1-31 requests: 5 draft tokens; 32 and more: 2
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from policies.core.plan import FOREVER
from policies.speculation import DraftView


@dataclass(frozen=True, kw_only=True, slots=True)
class ByBatchSize:
    """Looks the number up by the requests of the step, those that compute a prompt included, as vLLM does."""

    needs_cost: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = False

    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = (
        (1, 16, 3),
        (17, 64, 2),
        (65, 256, 1),
    )
    """Ranges of (smallest, largest number of requests, draft tokens); both ends of a range are in it."""
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _lengths: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ranges = sorted(self.num_speculative_tokens_per_batch_size)
        _check(ranges)
        object.__setattr__(self, "_starts", tuple(start for start, _, _ in ranges))
        object.__setattr__(self, "_lengths", tuple(length for _, _, length in ranges))

    @property
    def num_repeats(self) -> int:
        """Returns FOREVER: only the number of requests matters."""
        return FOREVER

    def num_draft_tokens(self, view: DraftView) -> int:
        """Returns the number of the last range that begins at or below the number of requests."""
        if view.num_requests < 1:
            return view.max_draft_tokens
        length = self._lengths[bisect_right(self._starts, view.num_requests) - 1]
        return min(length, view.max_draft_tokens)

    def lengths(self, most: int) -> tuple[int, ...]:
        """Returns the numbers of all ranges."""
        return tuple(sorted({min(length, most) for length in self._lengths}))


def _check(ranges: list[tuple[int, int, int]]) -> None:
    key = "num_speculative_tokens_per_batch_size"
    if not ranges:
        raise ValueError(f"{key}=[]: must have at least one range, such as [1, 32, 4]")
    for start, end, length in ranges:
        if not 1 <= start <= end:
            raise ValueError(
                f"{key}: the range [{start}, {end}, {length}] must have 1 <= smallest <= largest requests"
            )
        if length < 0:
            raise ValueError(f"{key}: the range [{start}, {end}, {length}] must have >= 0 draft tokens")
    if ranges[0][0] != 1:
        raise ValueError(
            f"{key}: the first range begins at {ranges[0][0]} requests; it must begin at 1, "
            "so that every batch has a number of draft tokens"
        )
    for (_, end, _), (start, _, _) in pairwise(ranges):
        if start <= end:
            raise ValueError(
                f"{key}: ranges must not overlap, but one ends at {end} requests and one begins at {start}"
            )
