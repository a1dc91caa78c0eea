"""Scripted draft tokens, equal on both sides: which of them a proposer finds, and which of those are right.

A draft token for a place of an answer is right or wrong by the id of the request and the place alone, so a
pass accepts the same draft tokens however it was scheduled, cut or repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

FINDS_FEWER = ("ngram", "suffix")
"""Methods whose proposer may find fewer draft tokens than it is asked for."""
METHODS = (*FINDS_FEWER, "medusa", "draft_model", "eagle", "eagle3", "mtp")
"""Methods that the scheduler treats differently, in vLLM's words."""


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """A method of vLLM's with its settings, and the script of its draft tokens.

    num_modules: layers of MTP that draft, one token each.
    by_batch_size: num_speculative_tokens_per_batch_size.
    right_share: share of draft tokens that are right.
    found_share: share of the passes for which `ngram` and `suffix` find as many draft tokens as asked.
    """

    method: str
    num_speculative_tokens: int
    num_modules: int = 1
    by_batch_size: tuple[tuple[int, int, int], ...] | None = None
    right_share: float
    found_share: float = 1.0

    @property
    def finds_fewer(self) -> bool:
        """True if some passes have fewer draft tokens than were asked for."""
        return self.method in FINDS_FEWER and self.found_share < 1

    def num_accepted(self, request_id: int, position: int, num_drafts: int) -> int:
        """Returns how many draft tokens a pass accepts whose first token is the output token at position."""
        for place in range(num_drafts):
            if _draw("right", request_id, position + place) >= self.right_share:
                return place
        return num_drafts

    def num_found(self, request_id: int, position: int, num_asked: int) -> int:
        """Returns how many draft tokens are found for a pass that begins at position."""
        draw = _draw("found", request_id, position)
        if self.method not in FINDS_FEWER or draw < self.found_share:
            return num_asked
        return int(num_asked * (draw - self.found_share) / (1 - self.found_share))


def _draw(name: str, request_id: int, position: int) -> float:
    """Returns a number in [0, 1) that is always the same for the same arguments."""
    return crc32(f"{name}/{request_id}/{position}".encode()) / 2**32
