"""A histogram that counts many equal values at once, and the bucket bounds of vLLM 0.32."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

REQUEST_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
TOKEN_DELAY_S = (
    *(1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03),
    *(0.05, 0.07, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0),
)
ITERATION_TOKENS = (1.0, *(2.0**power for power in range(3, 15)))
OUTPUTS_PER_PROMPT = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


def request_tokens(max_model_len: int) -> tuple[float, ...]:
    """Returns 1, 2, 5, 10, 20, 50, ... up to max_model_len: bounds for token counts of requests."""
    bounds = (first * 10.0**power for power in range(len(str(max_model_len))) for first in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= max_model_len)


class Histogram:
    """Counts values by bucket; a bucket includes its upper bound. bounds: ascending, without infinity."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Counts a value `count` times, at the cost of once."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """Returns the number of values that were counted, in all buckets together."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Returns each upper bound as text, the last one +Inf, with the number of values up to it."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))
