"""Errors of a policy about one sequence, reported in place of raised.

An engine with real clients must not end because a policy fails at one of their requests. Only calls with one
sequence can be contained; an error of a call about the whole step leaves the step half built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast
from weakref import WeakMethod

from policies.core.sequence import Sequence
from policies.core.sequence_view import SequenceView
from policies.core.state import EngineState, Rank

Report = Callable[[Sequence, Exception], None]

LAST = (float("inf"),)
"""Rank of a prefill whose `chunk_rank` has failed."""


def weakly(report: Report) -> Report:
    """Returns a call of a method that does not keep its object alive, as the engine owns the core."""
    method = WeakMethod(report)

    def call(seq: Sequence, error: Exception) -> None:
        if (found := method()) is not None:
            found(seq, error)

    return call


def contain(state: EngineState, report: Report) -> None:
    """Has errors of `rank`, `chunk_rank` and `on_end` reported: the sequence keeps its rank, or is last.

    An error of `rank` about a request that is not in the engine yet is raised: it has no rank to keep.
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
