"""The rows of a step that tell log-probabilities of prompts: those before a known token of the prompt.

    chunk   positions first .. first + n - 1
    scored  the tokens at first + 1 .. min(first + n, num_prompt_tokens - 1), by the logits before them

The first token of a prompt has none. What a preempted sequence computes again is scored again, alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.sequence import Sequence
from realengine.runner.work import PrefillRow, ScoredRows


class ScoredChunk(NamedTuple):
    """Consecutive tokens of a prompt that a step scores. first: position of the first of them."""

    seq: Sequence
    first: int
    num_tokens: int


class Scored(NamedTuple):
    """The rows that a step scores, None if there are none, and what they are of."""

    rows: ScoredRows | None
    chunks: list[ScoredChunk]


NOTHING_SCORED = Scored(None, [])


class PromptScores:
    """The slots of sequences that want log-probabilities of their prompts."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[int, int]] = {}  # number of prompt tokens, and of most likely tokens

    def set(self, slot: int, num_prompt_tokens: int, num_tokens: int, num_top: int | None) -> None:
        """Sets what the sequence in a slot wants.

        num_tokens: its known tokens; when it has an output, its prompt has been scored. num_top: None:
        nothing.
        """
        if num_top is not None and num_tokens == num_prompt_tokens:
            self._slots[slot] = num_prompt_tokens, num_top
        elif self._slots:
            self._slots.pop(slot, None)

    def of(self, rows: Iterable[PrefillRow], first_row: int, tokens_SL: NDArray[np.int32]) -> Scored:
        """Returns what a step scores.

        rows: of the step's chunks, of which the first token is row first_row. tokens_SL: tokens by slot.
        """
        if not self._slots:
            return NOTHING_SCORED
        chunks: list[ScoredChunk] = []
        numbers, tokens, most = [], [], 0
        for seq, slot, first, num_tokens, _ in rows:
            num_prompt_tokens, num_top = self._slots.get(slot, (0, 0))
            num_scored = min(first + num_tokens, num_prompt_tokens - 1) - first
            if num_scored > 0:
                chunks.append(ScoredChunk(seq, first + 1, num_scored))
                numbers.append(np.arange(first_row, first_row + num_scored, dtype=np.int32))
                tokens.append(tokens_SL[slot, first + 1 : first + 1 + num_scored])
                most = max(most, num_top)
            first_row += num_tokens
        if not chunks:
            return NOTHING_SCORED
        return Scored(ScoredRows(np.concatenate(numbers), np.concatenate(tokens), most), chunks)
