"""Finds livelocks: policies that preempt, or wait, again and again, so that no sequence gets a token."""

from __future__ import annotations

from collections.abc import Mapping

from policies.core.sequence import Sequence

MAX_STEPS = 10_000
"""Number of steps that preempt, among which a sequence must get a token or a request must come or end."""

MAX_WAITS = 10_000
"""Number of steps in a row that only wait, among which a request must get a token, come or end."""


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


class WaitWatch:
    """Counts the steps in a row that only wait."""

    __slots__ = ("_at", "num_waits")

    def __init__(self) -> None:
        self.num_waits = 0
        self._at = (-1, -1)

    def is_livelock(self, num_iterations: int, num_unfinished: int) -> bool:
        """Counts a step that waits; returns whether more than `MAX_WAITS` in a row were in vain.

        A change of either number is progress: an iteration has run, or a request has come or ended.
        """
        at = num_iterations, num_unfinished
        self.num_waits = self.num_waits + 1 if at == self._at else 1
        self._at = at
        return self.num_waits > MAX_WAITS
