"""The answers that running sequences generate, where they have content ids that others can look up.

As in vLLM, a generated block is offered to others when its last token is known and has been computed or will
be in the current step. Nothing happens token by token: the blocks of a place (`content.Places`) are offered
when a lookup could find them, or when a sequence adds or frees blocks there. Meanwhile decoding sequences
advance together, so the one that is ahead has filled each block first; of two at the same token, it is the
one admitted first. This decides which of equal blocks is the copy.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.caching.content import PathPart
from policies.core.sequence import LOADING, PREFILLING, Sequence

Offer = Callable[[Sequence, int], None]
"""Offers the first blocks of a sequence, as many as given."""


class Answers:
    """The running sequences that generate answers with a content id, by the place of the answer.

    offer: offers blocks in the pool. lookahead: tokens after a block that belong to its content.
    num_readable: returns the first tokens of a running sequence that are known and computed; the engine sets
    it (`BlockPool.watch`).
    """

    def __init__(self, offer: Offer, block_size: int, lookahead: int = 0) -> None:
        self.num_readable: Callable[[Sequence], int] = _num_computed
        self._offer_now = offer
        self._block_size = block_size
        self._lookahead = lookahead
        self.writers: dict[int, dict[int, Sequence]] = {}
        """By place of answers: the running sequences that generate tokens there, by request id."""
        self.num_shared = 0
        """Number of places at which several sequences generate tokens."""

    def begin(self, seq: Sequence) -> None:
        """Adds an admitted sequence with a content id for its answer, unless it has several."""
        for place in self._places(seq):
            writers = self.writers.setdefault(place, {})
            writers[seq.request_id] = seq
            self.num_shared += len(writers) == 2

    def is_shared(self, seq: Sequence) -> bool:
        """Returns whether other running sequences generate the answer of a sequence, too."""
        return any(len(self.writers.get(place, ())) > 1 for place in self._places(seq))

    def offer(self, seq: Sequence) -> None:
        """Offers what a sequence and those with an equal answer have generated, if there are any."""
        for place in self._places(seq):
            if len(writers := self.writers[place]) > 1:
                self._offer_all(writers)

    def end(self, seq: Sequence, num_full: int) -> None:
        """Removes a sequence that frees its blocks, of which the first num_full have all their tokens."""
        for place in self._places(seq):
            writers = self.writers[place]
            if len(writers) == 1:
                del self.writers[place]
                continue
            self._offer_all(writers, seq, num_full)
            del writers[seq.request_id]
            self.num_shared -= len(writers) == 1

    def _places(self, seq: Sequence) -> list[int]:
        """Returns the places of a sequence's answer: several if a prompt has quoted only its beginning."""
        if seq.request.branching is not None:
            return []
        num_prompt_blocks = max(seq.num_prompt_tokens - self._lookahead, 0) // self._block_size
        return [place for place, end in seq.kv.path if end > num_prompt_blocks]

    def num_generated(self, seq: Sequence) -> int:
        """Counts the first tokens of a running sequence that are known and computed; 0 before it decodes."""
        return 0 if seq.state is PREFILLING or seq.state is LOADING else self.num_readable(seq)

    def offer_for(self, path: list[PathPart], num_blocks: int) -> bool:
        """Offers what a lookup of the first num_blocks blocks of a path can find.

        Returns whether a later lookup may find more.
        """
        may_grow = False
        for place, end in path:
            writers = self.writers.get(place)
            if writers is not None:
                upto = min(end, num_blocks)
                if self._lags(writers, upto):
                    self._offer_all(writers)
                    may_grow = may_grow or self._lags(writers, upto)
            if end >= num_blocks:
                break
        return may_grow

    def offer_before(self, seq: Sequence) -> bool:
        """Offers what others have generated where a sequence in prefill adds blocks.

        Returns whether they may generate more there: then the order of its chunks and their tokens matters.
        """
        is_shared = False
        num_known = max(seq.stored_known - self._lookahead, 0) // self._block_size
        for place, end in seq.kv.path:
            if end > seq.kv.num_with_content:
                writers = self.writers.get(place)
                if writers is not None and (len(writers) > 1 or seq.request_id not in writers):
                    self._offer_all(writers, seq)
                    is_shared = True
            if end >= num_known:
                break
        return is_shared

    def _offer_all(
        self, writers: dict[int, Sequence], but: Sequence | None = None, num_full: int = 0
    ) -> None:
        """Offers the full blocks of all writers of a place in the order of their progress.

        but: a sequence of which num_full blocks are offered.
        """
        for seq in sorted(writers.values(), key=lambda seq: (-seq.num_computed, seq.admission)):
            num_offered = num_full if seq is but else self.num_generated(seq) // self._block_size
            if num_offered > seq.kv.num_with_content:
                self._offer_now(seq, num_offered)

    @staticmethod
    def _lags(writers: dict[int, Sequence], num_blocks: int) -> bool:
        """Returns whether a sequence may have generated, or will generate, one of the first num_blocks."""
        for seq in writers.values():
            has_generated = seq.state is not PREFILLING and seq.state is not LOADING
            if has_generated and seq.kv.num_with_content < num_blocks:
                return True
        return False


def _num_computed(seq: Sequence) -> int:
    return seq.num_computed
