"""Safeguards of an engine against policies that fail on one sequence, or loop without progress.

Contained errors: an engine with real clients must not stop because a policy fails on one request. Only calls
with one sequence can be contained; an error of a call about the whole step leaves the step half built.

Livelocks: policies that preempt or wait repeatedly, so that no sequence gets a token, are detected and
stopped with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast
from weakref import WeakMethod

from policies.core.sequence import Sequence, SequenceView
from policies.core.state import EngineState, Rank

Report = Callable[[Sequence, Exception], None]

LAST = (float("inf"),)
"""Rank of a prefill whose `chunk_rank` raised an error."""


def weakly(report: Report) -> Report:
    """Returns a call of a method that does not keep its object alive, as the engine owns the core."""
    method = WeakMethod(report)

    def call(seq: Sequence, error: Exception) -> None:
        if (found := method()) is not None:
            found(seq, error)

    return call


def contain(state: EngineState, report: Report) -> None:
    """Reports errors of `rank`, `chunk_rank` and `on_end`; the sequence keeps its rank, or goes last.

    An error of `rank` for a request that is not in the engine yet is raised, because it has no rank to keep.
    """
    first_rank, state.on_end = state.rank, [_contained(listener, report) for listener in state.on_end]

    def rank(seq: SequenceView) -> tuple[float, ...]:
        try:
            return first_rank(seq)
        except Exception as error:
            if seq.request_id not in state.sequences:
                raise
            report(cast(Sequence, seq), error)
            return seq.rank

    state.rank = rank
    if state.chunk_rank is not None:
        state.chunk_rank = _last_if_failing(state.chunk_rank, report)


def _contained(listener: Callable[[Sequence], None], report: Report) -> Callable[[Sequence], None]:
    def call(seq: Sequence) -> None:
        try:
            listener(seq)
        except Exception as error:
            report(seq, error)

    return call


def _last_if_failing(rank: Rank, report: Report) -> Rank:
    def call(seq: SequenceView) -> tuple[float, ...]:
        try:
            return rank(seq)
        except Exception as error:
            report(cast(Sequence, seq), error)
            return LAST

    return call


MAX_STEPS = 10_000
"""Number of preempting steps within which a sequence must get a token, or a request must arrive or end."""

MAX_WAITS = 10_000
"""Number of consecutive waiting steps within which a request must get a token, arrive or end."""


class PreemptionWatch:
    """Counts the steps that preempt. The output tokens of all sequences are compared once per `MAX_STEPS`."""

    __slots__ = ("_num_steps", "_output_tokens", "_sequences")

    def __init__(self, sequences: Mapping[int, Sequence]) -> None:
        self._sequences = sequences
        self._num_steps = 0
        self._output_tokens: dict[int, int] = {}

    def is_livelock(self) -> bool:
        """Counts a preempting step; returns whether the last `MAX_STEPS` of them made no progress."""
        self._num_steps += 1
        if self._num_steps < MAX_STEPS:
            return False
        before = self._output_tokens
        self._num_steps = 0
        self._output_tokens = {number: seq.num_output_tokens for number, seq in self._sequences.items()}
        return self._output_tokens == before


class WaitWatch:
    """Counts consecutive steps that only wait."""

    __slots__ = ("_at", "num_waits")

    def __init__(self) -> None:
        self.num_waits = 0
        self._at = (-1, -1)

    def is_livelock(self, num_iterations: int, num_unfinished: int) -> bool:
        """Counts a waiting step; returns whether more than `MAX_WAITS` consecutive ones made no progress.

        A change of either number is progress: an iteration has run, or a request has arrived or ended.
        """
        at = num_iterations, num_unfinished
        self.num_waits = self.num_waits + 1 if at == self._at else 1
        self._at = at
        return self.num_waits > MAX_WAITS
