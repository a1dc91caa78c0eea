"""Finds livelocks: policies that preempt sequences again and again, so that none of them gets a token."""

from __future__ import annotations

from collections.abc import Mapping

from policies.core.sequence import Sequence

MAX_STEPS = 10_000
"""Number of steps that preempt, among which a sequence must get a token or a request must come or end."""


class PreemptionWatch:
    """Counts the steps that preempt. The output tokens of all sequences are compared once per `MAX_STEPS`."""

    __slots__ = ("_num_steps", "_output_tokens", "_sequences")

    def __init__(self, sequences: Mapping[int, Sequence]) -> None:
        self._sequences = sequences
        self._num_steps = 0
        self._output_tokens: dict[int, int] = {}

    def is_livelock(self) -> bool:
        """Counts a step that preempts, and returns whether the last `MAX_STEPS` of them were in vain."""
        self._num_steps += 1
        if self._num_steps < MAX_STEPS:
            return False
        before = self._output_tokens
        self._num_steps = 0
        self._output_tokens = {number: seq.num_output_tokens for number, seq in self._sequences.items()}
        return self._output_tokens == before
