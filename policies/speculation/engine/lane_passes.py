"""The passes of a sequence in a lane: what is accepted determines them all when it begins to decode."""

from __future__ import annotations

from policies.core.sequence import Sequence
from policies.speculation.engine.drafts import Ints
from policies.speculation.engine.lane_sums import LaneSums


class Passes:
    """The passes of a sequence from the end of its prefill to that of its answer.

    tokens: tokens that each pass gives, as bytes. surplus: those of the last pass that lie behind the end of
    the answer. num_computed: computed tokens before each pass, then those at the end. first: iteration of the
    first pass. num_blocks: KV blocks of a complete sequence.
    """

    __slots__ = ("_sums", "first", "num_blocks", "num_computed", "seq", "surplus", "tokens")

    def __init__(
        self, sums: LaneSums, seq: Sequence, num_computed: Ints, tokens: bytes, surplus: int
    ) -> None:
        self._sums = sums
        self.seq = seq
        self.num_computed = num_computed
        self.tokens = tokens
        self.surplus = surplus
        self.first = sums.clock
        self.num_blocks = 0

    @property
    def num_run(self) -> int:
        """Number of passes that have run."""
        return min(self._sums.clock - self.first, len(self.tokens))

    @property
    def clock(self) -> int:
        """Number of computed tokens of the sequence, read as its clock."""
        return int(self.num_computed[self.num_run])

    @property
    def num_last(self) -> int:
        """Number of tokens that the last pass has given and that stay; 0 if there was none."""
        num_run = self.num_run
        return int(self.num_computed[num_run] - self.num_computed[num_run - 1]) if num_run else 0


def tokens_of_passes(num_tokens: int, tokens_at: bytes) -> tuple[bytes, int]:
    """Returns the tokens that each pass gives after the first token of an answer, and the surplus.

    num_tokens: tokens of the answer. tokens_at: tokens of a pass by the output position of its first draft
    token, at least 1. surplus: tokens of the last pass that the answer does not need.
    """
    given: list[int] = []
    note, place = given.append, 1
    while place < num_tokens:
        num = tokens_at[place]
        note(num)
        place += num
    return bytes(given), place - num_tokens
