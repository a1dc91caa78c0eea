"""Defines TTFT, TPOT, ITL, E2E and queue time, their means and percentiles, and the measured part of a run.

    arrival      scheduled        first token    ...    last token
       |-- queue ---|                  |-- ITL --|-- ITL --|
       |------------ TTFT -------------|
       |----------------------- E2E ----------------------|
    TPOT = (last token - first token) / (output tokens - 1)

ITL is pooled over all gaps of all requests, so long outputs weigh more; TPOT is one value per request. Other
tools differ: guidellm and AIPerf call our TPOT "ITL", Vidur divides by the number of output tokens. With
speculation a pass brings a burst of tokens at one time. ITL has one value per burst, as vLLM's benchmark has
one per chunk of the stream; TPOT counts every token.
Times are in seconds, arrays have one value per request, NaN stands for an event that did not happen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.metrics.sums import weighted_sum
from sim.records.table import AnyTable, column

Times = NDArray[np.float64]
Counts = NDArray[np.int64]

PERCENTILES = (50, 90, 95, 99)
"""Percentiles in every summary."""
SPEED_PERCENTILES = (50, 10, 1)
"""Percentiles of the per-user output speed."""


def times(table: AnyTable, name: str) -> Times:
    """Returns a column of a table as floats."""
    return column(table, name, np.float64)


def longest_tokens(requests: AnyTable) -> Counts:
    """Returns each request's output tokens in its longest sample.

    In tables without that column, in all samples.
    """
    return column(requests, "longest_tokens" if "longest_tokens" in requests else "output_tokens")


def per(part: float, whole: float) -> float:
    """Returns part over whole; NaN if the whole is 0."""
    return part / whole if whole > 0 else float("nan")


def plain_json(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ttft_s(arrival_s: Times, first_token_s: Times) -> Times:
    """Computes the time to first token: from arrival to the first output token, including queueing."""
    return first_token_s - arrival_s


def tpot_s(first_token_s: Times, last_token_s: Times, output_tokens: Counts) -> Times:
    """Computes the time per output token after the first; NaN for outputs of one token.

    Example: first token at 1.0 s, last at 1.9 s, 10 tokens: 0.9 / 9 = 0.1 s.
    """
    several = output_tokens > 1
    return np.where(several, (last_token_s - first_token_s) / np.where(several, output_tokens - 1, 1), np.nan)


def e2e_s(arrival_s: Times, last_token_s: Times) -> Times:
    """Computes the end-to-end latency: arrival to last token. Also called request latency or JCT."""
    return last_token_s - arrival_s


def queue_s(arrival_s: Times, scheduled_s: Times) -> Times:
    """Computes the time from arrival to the start of the first iteration.

    Later waiting times do not count.
    """
    return scheduled_s - arrival_s


def describe(values: Times, counts: Counts | None = None) -> dict[str, float | int]:
    """Computes count, mean, `PERCENTILES`, min and max of the values, in seconds, ignoring NaN.

    counts: occurrences of each value; None: one each. Without values the statistics are NaN.
    Example: TTFTs of 100, 102, 100, 100, 99, 104, 110, 90, 3000 and 95 ms have a mean of 390 ms and a median
    of 100 ms. One slow request in ten makes the mean useless; hence percentiles.
    """
    happened = ~np.isnan(values)
    if counts is None:
        counts = np.ones(values.shape, dtype=np.int64)
    happened &= counts > 0
    if not happened.all():
        values, counts = values[happened], counts[happened]
    total = int(counts.sum())
    return description(
        total,
        weighted_sum(values, counts) / total if total else float("nan"),
        weighted_percentile(values, counts, PERCENTILES),
        float(values.min()) if total else float("nan"),
        float(values.max()) if total else float("nan"),
    )


def description(
    count: int, mean_s: float, percentiles_s: Times, min_s: float, max_s: float
) -> dict[str, float | int]:
    """Returns the statistics of a latency by their names in the summary.

    percentiles_s: at `PERCENTILES`.
    """
    return {
        "count": count,
        "mean_s": mean_s,
        **{f"p{q}_s": float(p) for q, p in zip(PERCENTILES, percentiles_s, strict=True)},
        "min_s": min_s,
        "max_s": max_s,
    }


def speeds_of(tpot_s: Times) -> Times:
    """Computes the output tokens/s per user after the first token: 1 / TPOT of each request.

    Also called interactivity. NaN values and requests whose tokens arrived all at once are ignored.
    """
    found: Times = 1 / tpot_s[tpot_s > 0]
    return found


def speed_description(count: int, mean: float, percentiles: Times) -> dict[str, float | int]:
    """Returns the statistics of speeds by their names in the summary.

    percentiles: `SPEED_PERCENTILES`. Low percentiles belong to slow requests: 99 % of the requests exceed p1.
    """
    values = (mean, *percentiles.tolist())
    names = ("mean", *(f"p{q}" for q in SPEED_PERCENTILES))
    return {"count": count, **{f"{name}_tokens_per_s": v for name, v in zip(names, values, strict=True)}}


def weighted_percentile(values: Times, counts: Counts, q: Sequence[float]) -> Times:
    """Computes the percentiles q (0 to 100) of `np.repeat(values, counts)` bit by bit, without expanding it.

    Linear interpolation as in numpy's default: the percentile is at position (n - 1) q / 100 of the n sorted
    values. NaN if there are no values. Raises ValueError for q outside [0, 100].
    """
    share = np.asarray(q, dtype=np.float64) / 100
    if not ((share >= 0) & (share <= 1)).all():
        raise ValueError(f"q={list(q)}: percentiles must be in [0, 100]")
    total = int(counts.sum())
    if total == 0:
        return np.full(share.shape, np.nan)
    order = np.argsort(values)
    ordered, last_position = values[order], np.cumsum(counts[order]) - 1
    position = (total - 1) * share
    below = np.floor(position)
    low = ordered[np.searchsorted(last_position, below)]
    high = ordered[np.searchsorted(last_position, np.minimum(below + 1, total - 1))]
    t = position - below
    # As in numpy, interpolation starts from the nearer end, so the result stays between low and high.
    result: Times = np.where(t < 0.5, low + (high - low) * t, high - (high - low) * (1 - t))
    return result


class Window(NamedTuple):
    """Simulated time from start_s to end_s, both included: the last token of a run comes at its very end."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def is_empty(self) -> bool:
        """True if trimming left nothing. An untrimmed run of 0 s is not empty."""
        return self.start_s == self.end_s > 0

    def holds(self, time_s: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Returns which times are inside the window; NaN, for events that did not happen, is not."""
        return (time_s >= self.start_s) & (time_s <= self.end_s) & (not self.is_empty)

    def overlap_s(self, start_s: NDArray[np.float64], duration_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Computes the seconds of each interval that lie inside the window."""
        inside = np.minimum(start_s + duration_s, self.end_s) - np.maximum(start_s, self.start_s)
        # An interval completely inside keeps its duration, because (start + duration) - start would be
        # rounded.
        whole = (start_s >= self.start_s) & (start_s + duration_s <= self.end_s)
        return np.where(whole, duration_s, np.maximum(inside, 0.0))


def measured_window(end_s: float, *, warmup_s: float = 0.0, cooldown_s: float = 0.0) -> Window:
    """Returns the measured part of a run from 0 to end_s; if nothing remains, an empty window at end_s.

    Raises ValueError for a warm-up or cool-down that is negative or not finite.
    """
    for key, value in (("warmup_s", warmup_s), ("cooldown_s", cooldown_s)):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{key}={value}: must be finite and >= 0 s")
    if warmup_s + cooldown_s >= end_s:
        return Window(end_s, end_s)
    return Window(warmup_s, end_s - cooldown_s)
