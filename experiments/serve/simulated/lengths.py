"""Lengths of simulated outputs: what the request asks for, within what the workload would generate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count
from typing import Literal

from sim.workload.base import Workload

OutputLength = Literal["workload", "max_tokens"]


class OutputLengths:
    """Draws the length of each output.

    kind "workload": the output lengths of the workload, in the order of its requests, with new ones after the
    last; "max_tokens": the limit of the request. Raises ValueError for a workload without requests.
    """

    def __init__(self, kind: OutputLength, workload: Workload, seed: int, max_model_len: int) -> None:
        self._drawn: Iterator[int] | None = None
        if kind == "workload":
            drawn = _lengths(workload, seed, max_model_len)
            self._drawn = chain([next(drawn)], drawn)  # the first raises for a workload without requests

    def draw(self, max_tokens: int, min_tokens: int, *, ignore_eos: bool) -> tuple[int, bool]:
        """Returns the output tokens of the next request, and whether the output ends there by itself."""
        if ignore_eos or self._drawn is None:
            return max_tokens, False
        num_tokens = max(next(self._drawn), min_tokens, 1)
        return min(num_tokens, max_tokens), num_tokens <= max_tokens


def _lengths(workload: Workload, seed: int, max_model_len: int) -> Iterator[int]:
    for run in count(seed):
        is_empty = True
        for arrival in workload.source(seed=run, max_model_len=max_model_len).arrivals():
            is_empty = False
            yield arrival.num_output_tokens
        if is_empty:
            raise ValueError("workload: has no requests from which to take output lengths")
